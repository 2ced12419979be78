//! A bell: where background threads sleep and end, and others call them.
//!
//! There is no lock in it, and there must not be one: a helper of the idle class that is stopped while it holds a lock would keep
//! the program's threads waiting for as long as others want the CPU.
//!
//! One word holds how often the bell was rung and how many threads listen. A thread *hears* the word, looks for work, and then goes to
//! sleep or ends only if the word is still the same. So whoever rings and finds a listener may rely on it to look.

use super::sync::{AtomicU32, Ordering};
#[cfg(not(loom))]
use crate::sys::futex;
#[cfg(not(loom))]
use std::time::Duration;

/// The lower bits count the listeners, the rest the rings. After 2^24 rings the count begins anew, which a thread would have to
/// miss all of.
const LISTENERS: u32 = 0xff;
const RING: u32 = LISTENERS + 1;

/// What a thread has heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heard(u32);

/// See the module.
pub(crate) struct Bell {
    word: AtomicU32,
    asleep: AtomicU32,
}

impl Bell {
    pub fn new() -> Bell {
        Bell { word: AtomicU32::new(0), asleep: AtomicU32::new(0) }
    }

    /// One more thread is about to listen: called by who starts it, before it runs.
    pub fn join(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
    }

    /// The thread that was to listen could not be started.
    pub fn unjoin(&self) {
        self.word.fetch_sub(1, Ordering::SeqCst);
    }

    /// How many threads listen.
    pub fn listeners(&self) -> usize {
        (self.word.load(Ordering::SeqCst) & LISTENERS) as usize
    }

    /// The state of the bell, before a listener looks for work.
    pub fn hear(&self) -> Heard {
        Heard(self.word.load(Ordering::SeqCst))
    }

    /// A listener ends, unless the bell was rung since it `heard`.
    pub fn end(&self, heard: Heard) -> bool {
        self.word.compare_exchange(heard.0, heard.0 - 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Rings. Returns how many threads listen; all of them will look, those that sleep once they are woken.
    fn count_ring(&self) -> usize {
        (self.word.fetch_add(RING, Ordering::SeqCst) & LISTENERS) as usize
    }

    /// No listener exists and none ever did: for a forked child.
    pub fn reset(&self) {
        self.word.store(0, Ordering::SeqCst);
        self.asleep.store(0, Ordering::SeqCst);
    }
}

#[cfg(not(loom))]
impl Bell {
    /// Rings, and wakes up to `most` sleepers. Returns how many threads listen.
    pub fn ring(&self, most: usize) -> usize {
        let listeners = self.count_ring();
        // A listener that isn't counted as asleep yet will find the word changed and not fall asleep.
        if self.asleep.load(Ordering::SeqCst) > 0 {
            futex::wake(&self.word, most as u32);
        }
        listeners
    }

    /// A listener sleeps until the bell is rung, at most for `timeout`, and not at all if it was rung since it `heard`.
    pub fn sleep(&self, heard: Heard, timeout: Duration) {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        futex::wait(&self.word, heard.0, timeout);
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn nobody_ends_or_sleeps_over_a_ring() {
        let bell = Bell::new();
        assert_eq!(bell.ring(1), 0);
        bell.join();
        let heard = bell.hear();
        assert_eq!((bell.ring(1), bell.listeners()), (1, 1));
        assert!(!bell.end(heard));
        let begin = Instant::now();
        bell.sleep(heard, Duration::from_secs(60));
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(bell.end(bell.hear()));
        assert_eq!(bell.ring(1), 0);
    }

    #[test]
    fn the_count_of_rings_never_spills_into_that_of_listeners() {
        let bell = Bell::new();
        bell.join();
        bell.word.fetch_add(u32::MAX - LISTENERS, Ordering::SeqCst);
        assert_eq!((bell.ring(1), bell.ring(1), bell.listeners()), (1, 1, 1));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn work_that_a_listener_was_called_for_is_never_left() {
        loom::model(|| {
            let bell = Arc::new(Bell::new());
            let work = Arc::new(AtomicU32::new(0));
            bell.join();
            let listener = {
                let (bell, work) = (bell.clone(), work.clone());
                loom::thread::spawn(move || {
                    loop {
                        let heard = bell.hear();
                        work.swap(0, Ordering::SeqCst);
                        if bell.end(heard) {
                            break;
                        }
                    }
                })
            };
            work.store(1, Ordering::SeqCst);
            if bell.count_ring() == 0 {
                // Nobody listens any more: the caller does it.
                work.swap(0, Ordering::SeqCst);
            }
            listener.join().unwrap();
            assert_eq!(work.load(Ordering::SeqCst), 0);
        });
    }
}
