//! Moving a helper to the ordinary scheduling class for the rest of its chunk, and back.
//!
//! The caller moves the helper up, then says so; the helper moves itself down when it finds that said, which it looks for after each
//! chunk and whenever it wakes up. Said *after* the move, because said before, the helper could go down first and then be
//! moved up with nobody to say it. So a helper may sleep in the ordinary class, but never works in it for longer than a chunk.

use super::sync::{AtomicU32, Ordering};

/// Whether a helper has been moved up since it last moved itself down.
pub(super) struct Boost(AtomicU32);

impl Boost {
    pub fn new() -> Boost {
        Boost(AtomicU32::new(0))
    }

    /// The caller's part: `raise` moves the helper up and says whether that was allowed.
    pub fn up(&self, raise: impl FnOnce() -> bool) -> bool {
        let raised = raise();
        if raised {
            // An exchange, so that the helper sees the moves of all who said so, and not only of the last.
            self.0.swap(1, Ordering::AcqRel);
        }
        raised
    }

    /// The helper's part: `lower` moves it down.
    pub fn down(&self, lower: impl FnOnce()) {
        if self.0.swap(0, Ordering::AcqRel) == 1 {
            lower();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_helper_goes_down_once_for_each_time_it_was_moved_up() {
        let boost = Boost::new();
        let mut lowered = 0;
        boost.down(|| lowered += 1);
        assert!(!boost.up(|| false));
        boost.down(|| lowered += 1);
        assert_eq!(lowered, 0);
        assert!(boost.up(|| true));
        boost.down(|| lowered += 1);
        boost.down(|| lowered += 1);
        assert_eq!(lowered, 1);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn once_callers_are_done_the_next_look_leaves_the_helper_idle() {
        loom::model(|| {
            let boost = Arc::new(Boost::new());
            // The kernel's view of the helper's class: 1 for ordinary.
            let class = Arc::new(AtomicU32::new(0));
            let callers: Vec<_> = (0..2)
                .map(|_| {
                    let (boost, class) = (boost.clone(), class.clone());
                    loom::thread::spawn(move || {
                        boost.up(|| {
                            class.store(1, Ordering::SeqCst);
                            true
                        });
                    })
                })
                .collect();
            boost.down(|| class.store(0, Ordering::SeqCst));
            callers.into_iter().for_each(|caller| caller.join().unwrap());
            boost.down(|| class.store(0, Ordering::SeqCst));
            assert_eq!(class.load(Ordering::SeqCst), 0);
        });
    }
}
