//! What there is to do for the threads of a server's front, and which of them waits for more.
//!
//! One thread has the *watch*: it waits for what clients ask. It does the first of what has come itself, since it takes longer to wake somebody up
//! than to do it, and somebody else gets the watch meanwhile. So whoever asks waits for one thread to wake up, and there is always one that sees who else
//! is there, as long as not all of them are at something.

use super::turns::Turns;
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// What a thread does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Duty<W, E, T> {
    /// Goes on with what an errand was for.
    GoOn(E),
    /// Has the watch, until it hands it over.
    Watch(W),
    /// Does what is asked.
    Turn(T),
}

struct Queue<W, T> {
    turns: Turns<T>,
    /// While no thread has it.
    watch: Option<W>,
    over: bool,
}

/// See the module. `W` is what whoever has the watch knows, `T` something that is asked.
pub(super) struct Duties<W, T> {
    queue: Mutex<Queue<W, T>>,
    /// There is something to do, or there will be nothing any more.
    changed: Condvar,
}

impl<W, T> Duties<W, T> {
    pub fn new(watch: W) -> Duties<W, T> {
        let queue = Queue { turns: Turns::new(), watch: Some(watch), over: false };
        Duties { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<W, T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be done next, as soon as there is something; none once it is over. `errand_done` says which errand is.
    pub fn next<E>(&self, errand_done: impl Fn() -> Option<E>) -> Option<Duty<W, E, T>> {
        let mut queue = self.lock();
        loop {
            if queue.over {
                return None;
            }
            if let Some(errand) = errand_done() {
                return Some(Duty::GoOn(errand));
            }
            // Before turns: who floods would keep all threads at his own, and nobody would see who else is there.
            if let Some(watch) = queue.watch.take() {
                return Some(Duty::Watch(watch));
            }
            if let Some(turn) = queue.turns.pop() {
                return Some(Duty::Turn(turn));
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whoever had the watch hands it over, with what has come, in that order and with whose it is. Returns what this thread does.
    pub fn hand_over(&self, watch: W, come: Vec<(u32, T)>) -> Option<T> {
        let more = come.len();
        let mut queue = self.lock();
        queue.watch = Some(watch);
        come.into_iter().for_each(|(user, turn)| queue.turns.push(user, turn));
        let own = queue.turns.pop();
        drop(queue);
        // All but its own, and the watch.
        (0..more).for_each(|_| self.changed.notify_one());
        own
    }

    /// An errand is done. Uses no descriptors.
    pub fn errand_is_done(&self) {
        // Whoever is about to wait has not looked yet, or waits.
        drop(self.lock());
        self.changed.notify_one();
    }

    /// Nothing more is begun. Whoever has the watch is to be woken up by other means.
    pub fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Takes the watch away, for good.
    pub fn take_watch(&self) -> Option<W> {
        self.lock().watch.take()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const NO_ERRAND: fn() -> Option<()> = || None;

    #[test]
    fn whoever_had_the_watch_does_the_first_and_others_the_rest() {
        let duties = Duties::new("watch");
        assert_eq!(duties.next(NO_ERRAND), Some(Duty::Watch("watch")));
        assert_eq!(duties.hand_over("watch", vec![(1, 10), (1, 11), (2, 20)]), Some(10));
        // However much there is to do, somebody sees what else comes.
        assert_eq!(duties.next(NO_ERRAND), Some(Duty::Watch("watch")));
        assert_eq!(duties.next(NO_ERRAND), Some(Duty::Turn(20)));
        assert_eq!(duties.next(|| Some("done")), Some(Duty::GoOn("done")));
        assert_eq!(duties.next(NO_ERRAND), Some(Duty::Turn(11)));
        assert_eq!(duties.hand_over("watch", Vec::new()), None);
        duties.end();
        assert_eq!(duties.next(|| Some("done")), None);
        assert_eq!((duties.take_watch(), duties.take_watch()), (Some("watch"), None));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    const ASKED: usize = 2;
    /// So much is finished when nobody waits any more.
    const OVER: usize = 10 * ASKED;

    /// Clients who ask, an errand, and what of both is done.
    struct World {
        duties: Duties<usize, ()>,
        errands: Mutex<usize>,
        finished: Mutex<usize>,
        is_finished: Condvar,
    }

    impl World {
        fn work(&self) {
            let errand_done = || {
                let mut errands = self.errands.lock().unwrap();
                (*errands > 0).then(|| *errands -= 1)
            };
            while let Some(duty) = self.duties.next(errand_done) {
                let done = match duty {
                    Duty::GoOn(()) | Duty::Turn(()) => Some(()),
                    // Nobody comes any more.
                    Duty::Watch(0) => {
                        self.until(OVER);
                        self.duties.hand_over(0, Vec::new())
                    }
                    Duty::Watch(asked) => self.duties.hand_over(0, vec![(0, ()); asked]),
                };
                if done.is_some() {
                    self.finish(1);
                }
            }
        }

        fn finish(&self, more: usize) {
            *self.finished.lock().unwrap() += more;
            self.is_finished.notify_all();
        }

        fn until(&self, all: usize) {
            let mut finished = self.finished.lock().unwrap();
            while *finished < all {
                finished = self.is_finished.wait(finished).unwrap();
            }
        }
    }

    /// If a call got lost, somebody would wait for ever, which the model finds.
    #[test]
    fn all_that_is_asked_is_done_and_the_watch_is_kept() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (duties, errands) = (Duties::new(ASKED), Mutex::new(0));
            let world = Arc::new(World { duties, errands, finished: Mutex::new(0), is_finished: Condvar::new() });
            let work = |world: Arc<World>| loom::thread::spawn(move || world.work());
            let workers = [work(world.clone()), work(world.clone())];
            *world.errands.lock().unwrap() += 1;
            world.duties.errand_is_done();
            world.until(ASKED + 1);
            world.duties.end();
            world.finish(OVER);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            assert_eq!(world.duties.take_watch(), Some(0));
        });
    }
}
