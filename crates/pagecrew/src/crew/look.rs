//! When the watcher looks next: the agreement between it and those who leave something for it to look at.
//!
//! A watcher with nothing to look at rests until it is called. Whoever frees memory calls it only if it rests, since a call is a system
//! call. So the watcher first lets everybody see that it rests and looks for a reason not to after that: however long it is stopped
//! in between, either it sees what was freed, or whoever freed that sees it resting.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

const RESTS: u64 = 0;
const LOOKS: u64 = u64::MAX;

/// See the module.
pub(crate) struct NextLook {
    /// When the watcher will look by itself, in nanoseconds, or one of the constants above.
    due_ns: AtomicU64,
}

impl NextLook {
    /// The watcher rests.
    pub fn new() -> NextLook {
        NextLook { due_ns: AtomicU64::new(RESTS) }
    }

    /// The watcher looks, if it is time to at `now`.
    ///
    /// # Errors
    /// The nanoseconds until it is time.
    pub fn begin(&self, now: u64) -> Result<(), u64> {
        let due = self.due_ns.load(Ordering::Relaxed);
        if due != LOOKS && now < due {
            return Err(due - now);
        }
        self.due_ns.store(LOOKS, Ordering::Relaxed);
        Ok(())
    }

    /// The watcher has looked and will look again at the time `due_ns`.
    pub fn again_at(&self, due_ns: u64) {
        self.due_ns.store(due_ns.clamp(RESTS + 1, LOOKS - 1), Ordering::Relaxed);
    }

    /// The watcher has looked and rests, unless there is a `reason` to look again at once. Returns whether it rests.
    pub fn rest(&self, reason: impl FnOnce() -> bool) -> bool {
        self.due_ns.store(RESTS, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !reason()
    }

    /// Whether somebody who has just given the watcher a reason to look has to call it.
    pub fn rests(&self) -> bool {
        fence(Ordering::SeqCst);
        self.due_ns.load(Ordering::Relaxed) == RESTS
    }

    /// In a forked child: there is no watcher.
    pub fn reset(&self) {
        self.due_ns.store(RESTS, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_taken_when_it_is_due() {
        let next = NextLook::new();
        assert!(next.rests() && next.begin(5).is_ok() && !next.rests());
        next.again_at(100);
        assert_eq!((next.begin(60), next.rests()), (Err(40), false));
        assert!(next.begin(100).is_ok());
        // Called while it looks: it looks once more.
        assert!(next.begin(101).is_ok());
        assert!(!next.rest(|| true) && next.rest(|| false) && next.rests());
        // No time says that it rests, or that it looks.
        next.again_at(0);
        assert!(!next.rests());
        next.again_at(u64::MAX);
        assert_eq!(next.begin(5), Err(u64::MAX - 6));
        next.reset();
        assert!(next.rests());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    /// The watcher may be stopped anywhere for as long as it likes, so only what it has agreed to by itself counts.
    #[test]
    fn what_was_freed_is_looked_at_or_the_watcher_called() {
        loom::model(|| {
            let next = Arc::new(NextLook::new());
            let retained = Arc::new(AtomicUsize::new(0));
            assert!(next.begin(1).is_ok());
            let watcher = {
                let (next, retained) = (next.clone(), retained.clone());
                loom::thread::spawn(move || next.rest(|| retained.load(Ordering::Relaxed) > 0))
            };
            retained.fetch_add(1, Ordering::Relaxed);
            let called = next.rests();
            let rests = watcher.join().unwrap();
            assert!(called || !rests);
        });
    }
}
