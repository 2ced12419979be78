//! Work that is on the board and that nobody was called for: the watcher sees to it when it next looks.
//!
//! **Nothing is left for good.** Whoever leaves work puts it on the board, says so, and then reads when the watcher looks: if that is late, he
//! wakes it. The watcher says when it will look and then reads whether something was left. One of the two sees the other. And the watcher
//! [takes](LeftWork::take) the word that something was left *before* it looks at the board, so that what comes behind its look is another word.

use super::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// See the module.
pub(super) struct LeftWork {
    left: AtomicBool,
    /// When the watcher looks by itself; `u64::MAX` while it does not say.
    due_ns: AtomicU64,
}

impl LeftWork {
    pub fn new() -> LeftWork {
        LeftWork { left: AtomicBool::new(false), due_ns: AtomicU64::new(u64::MAX) }
    }

    /// Work was left on the board. Returns whether the watcher looks by `by_ns`; otherwise, whoever wants that has to wake it. Without a system
    /// call.
    pub fn leave(&self, by_ns: u64) -> bool {
        // Release: whoever takes the word sees the work.
        self.left.store(true, Ordering::Release);
        // The one between the two lines of `rest` is its counterpart.
        fence(Ordering::SeqCst);
        self.is_due(by_ns)
    }

    /// Whether the watcher looks by `by_ns`.
    pub fn is_due(&self, by_ns: u64) -> bool {
        self.due_ns.load(Ordering::Relaxed) <= by_ns
    }

    /// Whether work was left that nobody has seen to.
    pub fn is_there(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Takes the word that work was left, to look at the board next: the watcher's.
    pub fn take(&self) -> bool {
        self.is_there() && self.left.swap(false, Ordering::AcqRel)
    }

    /// The watcher looks at `due_ns` and not before, unless it is woken. Returns whether something was left meanwhile.
    pub fn rest(&self, due_ns: u64) -> bool {
        self.due_ns.store(due_ns, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.is_there()
    }

    /// In a forked child: no watcher, no work.
    pub fn reset(&self) {
        self.left.store(false, Ordering::Relaxed);
        self.due_ns.store(u64::MAX, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_there_until_it_was_taken() {
        let left = LeftWork::new();
        assert!(!left.is_there() && !left.take() && !left.rest(5));
        assert!(left.leave(5) && left.is_there());
        assert!(!left.leave(4), "nobody looks by then");
        assert!(left.rest(9) && !left.is_due(8) && left.is_due(9));
        assert!(left.take() && !left.take());
        left.leave(0);
        left.reset();
        assert!(!left.is_there() && !left.is_due(u64::MAX - 1));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    /// A watcher that looks, says that it looks again soon, and then that it rests: whatever is left beside it, is seen by one of its looks, by
    /// the question before its rest, or by the one who left it, who wakes it then.
    #[test]
    fn what_is_left_is_seen() {
        const SOON: u64 = 1;
        loom::model(|| {
            let shared = Arc::new((LeftWork::new(), AtomicU64::new(0)));
            shared.0.rest(SOON);
            let other = shared.clone();
            let thread = loom::thread::spawn(move || {
                let (left, board) = &*other;
                board.store(1, Ordering::Release);
                left.leave(SOON)
            });
            let (left, board) = &*shared;
            let mut seen = false;
            for due in [SOON, u64::MAX] {
                if left.take() {
                    seen |= board.load(Ordering::Acquire) == 1;
                }
                seen |= left.rest(due);
            }
            let looks_soon = thread.join().unwrap();
            assert!(seen || !looks_soon, "left for good");
        });
    }
}
