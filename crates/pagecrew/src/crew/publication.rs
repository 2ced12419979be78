//! Proof that a published task can be read: the memory beside a [`Job`], which its publication hands over, in every interleaving. Apart from
//! the job itself, which needs no `unsafe`.

mod model {
    use super::super::job::{Job, Left};
    use loom::sync::Arc;
    use loom::thread;

    /// What whoever claimed the place writes there before it is published, those inside read.
    #[test]
    fn whoever_is_inside_sees_the_task() {
        loom::model(|| {
            let job = Arc::new(Job::<1>::new());
            let task = Arc::new(loom::cell::UnsafeCell::new(0));
            let (other, read) = (job.clone(), task.clone());
            let thread = thread::spawn(move || {
                if other.enter() {
                    // SAFETY: loom fails where this isn't ordered behind the write.
                    assert_eq!(read.with(|task| unsafe { *task }), 1);
                    other.take(1, Some(0)).map(|_| other.done(0));
                    if other.leave() == Left::Last {
                        other.release();
                    }
                }
            });
            // A second job at the same place is ordered behind the first one's readers.
            for _ in 0..2 {
                if job.claim() {
                    // SAFETY: as above.
                    task.with_mut(|task| unsafe { *task = 1 });
                    job.publish(1, false);
                }
            }
            thread.join().unwrap();
        });
    }
}
