//! An event count: where background threads wait and end, and others notify them.
//!
//! There is no lock in it, and there must not be one: a helper of the idle class that is stopped while it holds a lock would keep
//! the program's threads waiting for as long as others want the CPU.
//!
//! One word holds how many notifications there were and how many threads listen. A thread prepares to wait by reading the word, looks for
//! work, and then waits or ends only if the word is still the same. So whoever notifies and finds a listener may rely on it to look.

use super::sync::{AtomicU32, Ordering};
#[cfg(not(loom))]
use crate::sys::futex;
#[cfg(not(loom))]
use std::time::Duration;

/// The lower bits count the listeners, the rest the notifications. After 2^24 of them the count begins anew, which a thread would have to
/// miss all of.
const LISTENERS: u32 = 0xff;
const NOTIFICATION: u32 = LISTENERS + 1;

/// What the word was when a thread prepared to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prepared(u32);

/// See the module.
pub(crate) struct EventCount {
    word: AtomicU32,
    asleep: AtomicU32,
}

impl EventCount {
    pub fn new() -> EventCount {
        EventCount { word: AtomicU32::new(0), asleep: AtomicU32::new(0) }
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

    /// To be called by a listener before it looks for work.
    pub fn prepare(&self) -> Prepared {
        Prepared(self.word.load(Ordering::SeqCst))
    }

    /// A listener ends, unless there was a notification since it `prepared`.
    pub fn end(&self, prepared: Prepared) -> bool {
        self.word.compare_exchange(prepared.0, prepared.0 - 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Notifies. Returns how many threads listen; all of them will look, those that sleep once they are woken.
    fn count_notification(&self) -> usize {
        (self.word.fetch_add(NOTIFICATION, Ordering::SeqCst) & LISTENERS) as usize
    }

    /// No listener exists and none ever did: for a forked child.
    pub fn reset(&self) {
        self.word.store(0, Ordering::SeqCst);
        self.asleep.store(0, Ordering::SeqCst);
    }
}

#[cfg(not(loom))]
impl EventCount {
    /// Notifies, and wakes up to `most` sleepers. Returns how many threads listen.
    pub fn notify(&self, most: usize) -> usize {
        let listeners = self.count_notification();
        // A listener that isn't counted as asleep yet will find the word changed and not fall asleep.
        if self.asleep.load(Ordering::SeqCst) > 0 {
            futex::wake(&self.word, most as u32);
        }
        listeners
    }

    /// A listener waits for a notification, at most for `timeout`, and not at all if there was one since it `prepared`.
    pub fn wait(&self, prepared: Prepared, timeout: Duration) {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        futex::wait(&self.word, prepared.0, timeout);
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn nobody_ends_or_waits_over_a_notification() {
        let events = EventCount::new();
        assert_eq!(events.notify(1), 0);
        events.join();
        let prepared = events.prepare();
        assert_eq!((events.notify(1), events.listeners()), (1, 1));
        assert!(!events.end(prepared));
        let begin = Instant::now();
        events.wait(prepared, Duration::from_secs(60));
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert!(events.end(events.prepare()));
        assert_eq!(events.notify(1), 0);
    }

    #[test]
    fn a_listener_sleeps_until_it_is_notified_or_its_time_is_over() {
        let events = EventCount::new();
        let begin = Instant::now();
        events.wait(events.prepare(), Duration::from_millis(50));
        assert!(begin.elapsed() >= Duration::from_millis(50));
        let asleep = || events.asleep.load(Ordering::SeqCst);
        assert_eq!(asleep(), 0);
        std::thread::scope(|scope| {
            let begin = Instant::now();
            events.join();
            let listener = scope.spawn(|| events.wait(events.prepare(), Duration::from_secs(120)));
            while asleep() == 0 {
                std::thread::yield_now();
            }
            // It was counted and is on its way into the kernel: where it is there in time, only a wake-up ends its sleep.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(events.notify(1), 1);
            listener.join().unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60));
        });
        assert_eq!((asleep(), events.listeners()), (0, 1));
    }

    #[test]
    fn a_thread_that_did_not_start_does_not_listen_nor_does_a_child_s_parent() {
        let events = EventCount::new();
        events.join();
        events.join();
        events.unjoin();
        assert_eq!(events.listeners(), 1);
        events.asleep.store(1, Ordering::SeqCst);
        events.reset();
        assert_eq!((events.listeners(), events.asleep.load(Ordering::SeqCst)), (0, 0));
    }

    #[test]
    fn the_count_of_notifications_never_spills_into_that_of_listeners() {
        let events = EventCount::new();
        events.join();
        events.word.fetch_add(u32::MAX - LISTENERS, Ordering::SeqCst);
        assert_eq!((events.notify(1), events.notify(1), events.listeners()), (1, 1, 1));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn work_that_a_listener_was_called_for_is_never_left() {
        loom::model(|| {
            let events = Arc::new(EventCount::new());
            let work = Arc::new(AtomicU32::new(0));
            events.join();
            let listener = {
                let (events, work) = (events.clone(), work.clone());
                loom::thread::spawn(move || {
                    loop {
                        let prepared = events.prepare();
                        work.swap(0, Ordering::SeqCst);
                        if events.end(prepared) {
                            break;
                        }
                    }
                })
            };
            work.store(1, Ordering::SeqCst);
            if events.count_notification() == 0 {
                // Nobody listens any more: the caller does it.
                work.swap(0, Ordering::SeqCst);
            }
            listener.join().unwrap();
            assert_eq!(work.load(Ordering::SeqCst), 0);
        });
    }
}
