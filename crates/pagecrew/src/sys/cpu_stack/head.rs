//! What a stack is apart from where its numbers lie, and the protocol by which somebody gets one alone.
//!
//! **Life of a stack.** It is open: its floor is 0 and its limit is what the owner set. Whoever drains it closes it (nothing is below the
//! limit, nothing above the floor), restarts the sequences of all threads (`membarrier`), has it alone then, empties it, and opens it
//! again, or leaves it as one that was never opened: empty, with a limit of 0. A sequence reads the bound *before* the length: one that finds the stack open again finds it empty, too.
//!
//! Where there is no rseq, each stack has a try-lock, and whoever doesn't get it finds the stack empty or full.

use super::CLOSED;
use Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// A line for what is looked at; the numbers follow it. All zero, it is a stack that was never opened.
#[repr(C, align(64))]
pub(super) struct Head {
    /// Pushes go on below this length; 0 while it is closed.
    pub limit: AtomicU32,
    /// Pops go on above this length; [`CLOSED`] while it is closed.
    pub floor: AtomicU32,
    pub length: AtomicU32,
    /// Whether a thread is draining it, or, without rseq, using it.
    held: AtomicU32,
    /// The limit when it is open.
    open_limit: AtomicU32,
}

/// A stack: its head and the slots for its numbers.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub head: &'a Head,
    pub slots: &'a [AtomicU32],
}

impl Head {
    /// Keeps everybody else from draining it, opening it or, without rseq, using it. Returns whether nobody was at it.
    pub fn hold(&self) -> bool {
        self.held.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    /// How many numbers it takes.
    pub fn limit(&self) -> usize {
        self.open_limit.load(Relaxed) as usize
    }

    /// It takes up to `limit` numbers from now on, of which there are slots.
    pub fn set_limit(&self, limit: u32) {
        let before = self.open_limit.swap(limit, Relaxed);
        // One that is closed stays so, and opens with the new limit.
        let _ = self.limit.compare_exchange(before, limit, Relaxed, Relaxed);
    }

    /// Closes the stack. Returns whether the caller did; somebody else may be draining or using it.
    pub fn close(&self) -> bool {
        let mine = self.hold();
        if mine {
            self.floor.store(CLOSED, SeqCst);
            self.limit.store(0, SeqCst);
        }
        mine
    }

    /// Whether a thread is draining it, or, without rseq, using it.
    pub fn held(&self) -> bool {
        self.held.load(Relaxed) != 0
    }

    /// Whether it is closed.
    pub fn closed(&self) -> bool {
        self.floor.load(Relaxed) == CLOSED
    }

    /// Leaves the stack that the caller closed and emptied as one that was never opened.
    pub fn retire(&self) {
        self.open_limit.store(0, Relaxed);
        self.floor.store(0, Release);
        self.held.store(0, Release);
    }

    /// Opens the stack that the caller holds for up to `limit` numbers.
    pub fn open(&self, limit: u32) {
        self.open_limit.store(limit, Relaxed);
        self.reopen();
    }

    /// Opens the stack that the caller closed.
    pub fn reopen(&self) {
        self.limit.store(self.open_limit.load(Relaxed), Release);
        self.floor.store(0, Release);
        self.held.store(0, Release);
    }
}

impl View<'_> {
    /// Takes all numbers of a stack that the caller closed, and that no sequence works on any more. Returns how many.
    pub fn empty(&self, into: &mut [u32]) -> usize {
        let length = self.head.length.load(Relaxed) as usize;
        for (number, slot) in into.iter_mut().zip(&self.slots[..length]) {
            *number = slot.load(Relaxed);
        }
        self.head.length.store(0, Relaxed);
        length
    }

    /// Without rseq: has `work` done with the stack, if nobody is at it.
    fn alone<T: Default>(&self, work: impl FnOnce() -> T) -> T {
        if !self.head.hold() {
            return T::default();
        }
        let result = work();
        self.head.held.store(0, Release);
        result
    }

    /// Without rseq: takes up to as many numbers as `into` has room for. Returns how many.
    pub fn pop_held(&self, into: &mut [u32]) -> usize {
        self.alone(|| {
            let length = self.head.length.load(Relaxed) as usize;
            let count = into.len().min(length);
            for (number, slot) in into.iter_mut().zip(&self.slots[length - count..length]) {
                *number = slot.load(Relaxed);
            }
            self.head.length.store((length - count) as u32, Relaxed);
            count
        })
    }

    /// Without rseq: puts as many of the first of `numbers` as there is room for. Returns how many.
    pub fn push_held(&self, numbers: &[u32]) -> usize {
        self.alone(|| {
            let length = self.head.length.load(Relaxed) as usize;
            let room = (self.head.limit.load(Relaxed) as usize).saturating_sub(length);
            let count = numbers.len().min(room);
            for (number, slot) in numbers[..count].iter().zip(&self.slots[length..]) {
                slot.store(*number, Relaxed);
            }
            self.head.length.store((length + count) as u32, Relaxed);
            count
        })
    }
}

/// The hand-over through a stack, in every interleaving. Sequences are what the kernel makes of them: they commit, or begin anew if they
/// were restarted before.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Mutex};

    struct Shared {
        head: Head,
        slots: [AtomicU32; 1],
        memory: UnsafeCell<u32>,
        /// How often the sequences of the other threads were restarted; commits and restarts exclude each other.
        restarts: Mutex<u32>,
    }

    // SAFETY: loom reports accesses to the cell that are not ordered.
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    unsafe impl Send for Shared {}

    impl Shared {
        fn new(length: u32) -> Arc<Shared> {
            let [limit, floor, held, open_limit] = [1, 0, 0, 1].map(AtomicU32::new);
            let head = Head { limit, floor, length: AtomicU32::new(length), held, open_limit };
            let (slots, memory) = ([AtomicU32::new(5)], UnsafeCell::new(7));
            Arc::new(Shared { head, slots, memory, restarts: Mutex::new(0) })
        }

        fn view(&self) -> View<'_> {
            View { head: &self.head, slots: &self.slots }
        }

        fn commit(&self, began: u32, length: u32) -> bool {
            let restarts = self.restarts.lock().unwrap();
            let commits = *restarts == began;
            if commits {
                self.head.length.store(length, Relaxed);
            }
            commits
        }

        fn pop(&self) -> Option<u32> {
            loop {
                let began = *self.restarts.lock().unwrap();
                let floor = self.head.floor.load(Acquire);
                let length = self.head.length.load(Relaxed);
                if length <= floor {
                    return None;
                }
                let number = self.slots[length as usize - 1].load(Relaxed);
                if self.commit(began, length - 1) {
                    return Some(number);
                }
            }
        }

        fn push(&self, number: u32) -> bool {
            loop {
                let began = *self.restarts.lock().unwrap();
                let limit = self.head.limit.load(Acquire);
                let length = self.head.length.load(Relaxed);
                if length >= limit {
                    return false;
                }
                self.slots[length as usize].store(number, Relaxed);
                if self.commit(began, length + 1) {
                    return true;
                }
            }
        }

        fn drain(&self) -> Option<u32> {
            self.drain_and(Head::reopen)
        }

        fn drain_and(&self, then: fn(&Head)) -> Option<u32> {
            if !self.head.close() {
                return None;
            }
            *self.restarts.lock().unwrap() += 1;
            let mut number = [0];
            let count = self.view().empty(&mut number);
            then(&self.head);
            (count == 1).then_some(number[0])
        }

        fn use_it(&self, number: u32) {
            assert_eq!(number, 5);
            // SAFETY: what has this number is this thread's.
            self.memory.with_mut(|memory| unsafe {
                assert_eq!(*memory, 7);
                *memory = 8;
            });
        }
    }

    #[test]
    fn a_number_is_popped_or_drained_but_not_both() {
        loom::model(|| {
            let shared = Shared::new(1);
            let popper = {
                let shared = shared.clone();
                loom::thread::spawn(move || shared.pop().map(|number| shared.use_it(number)).is_some())
            };
            let drained = shared.drain().map(|number| shared.use_it(number)).is_some();
            assert!(popper.join().unwrap() != drained, "had by both, or lost");
        });
    }

    #[test]
    fn a_number_that_is_pushed_is_drained_or_still_there() {
        loom::model(|| {
            let shared = Shared::new(0);
            let pusher = {
                let shared = shared.clone();
                loom::thread::spawn(move || shared.push(5))
            };
            let drained = shared.drain();
            let pushed = pusher.join().unwrap();
            let left = shared.pop();
            assert_eq!((drained.is_some() as u32) + (left.is_some() as u32), pushed as u32);
            assert!(drained.or(left).is_none_or(|number| number == 5));
        });
    }

    #[test]
    fn a_stack_that_is_opened_while_another_one_drains_it_loses_nothing() {
        loom::model(|| {
            let shared = Shared::new(0);
            let pusher = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    if shared.head.limit() == 0 && shared.head.hold() {
                        shared.head.open(1);
                    }
                    shared.push(5)
                })
            };
            let drained = shared.drain_and(Head::retire);
            let pushed = pusher.join().unwrap();
            let left = shared.pop();
            assert_eq!((drained.is_some() as u32) + (left.is_some() as u32), pushed as u32);
        });
    }

    #[test]
    fn without_sequences_the_next_user_sees_what_the_last_one_wrote() {
        loom::model(|| {
            let shared = Shared::new(0);
            let giver = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    // SAFETY: what has the number is this thread's until it is pushed.
                    shared.memory.with_mut(|memory| unsafe { *memory = 7 });
                    shared.view().push_held(&[5]);
                })
            };
            let mut number = [0];
            if shared.view().pop_held(&mut number) == 1 {
                shared.use_it(number[0]);
            } else if let Some(number) = shared.drain() {
                shared.use_it(number);
            }
            giver.join().unwrap();
        });
    }
}
