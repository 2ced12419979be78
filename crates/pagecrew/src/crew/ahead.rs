//! Zeroing ahead of time: pieces of free memory that wait for a helper, are being zeroed, or are done. For employers that keep such
//! memory.
//!
//! **Life of a slot.** Whoever holds the lock of a zone sets a piece out (`Empty` -> `Ready`). A helper takes it (`Ready` -> `Taken`),
//! zeroes it, and says how that went (`Taken` -> `Whole` or `Part`). Again somebody who holds the zone's lock takes it in (-> `Empty`).
//! The helper itself touches no lock: it may be stopped anywhere.
//!
//! While a slot is not empty, its piece is in state `Zeroing` with the slot's number, or was allocated away. Whoever allocates such a
//! piece revokes the slot, with the zone locked: if the helper had not begun, it never will; if it had, it writes no more once
//! the barrier has restarted its sequences (see [`crate::sys::zero`]).
//!
//! **The barrier may fail**, though it never did before: a program may forbid itself the system call. Then the helper goes on to the
//! end of its piece, which stays the helper's until it says so, and from then on no piece is set out any more.

use crate::sys::memory::Range;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

const EMPTY: u32 = 0;
const READY: u32 = 1;
const TAKEN: u32 = 2;
const WHOLE: u32 = 3;
const PART: u32 = 4;

/// Pieces that can be under way at a time: a few milliseconds of work, so that helpers don't wait for the watcher. Each splits free
/// memory while it lasts.
pub(crate) const SLOTS: usize = 8;

/// One piece.
struct Slot {
    state: AtomicU32,
    revoked: AtomicU32,
    start: AtomicUsize,
    len: AtomicUsize,
    took_ns: AtomicU64,
}

/// A piece that a helper has let go of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    /// The slot's number.
    pub slot: usize,
    /// Where.
    pub range: Range,
    /// Whether all of it was zeroed.
    pub whole: bool,
    /// How long it took, in nanoseconds.
    pub took_ns: u64,
}

/// What became of a revocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Revoked {
    /// No helper was at the piece, and none will be.
    Idle,
    /// A helper was, and writes no more.
    Interrupted,
    /// The barrier failed, and a helper may go on writing until [`Ahead::has_let_go`]: the piece must not be used before.
    StillAtIt,
}

/// See the module.
pub(crate) struct Ahead {
    slots: [Slot; SLOTS],
    /// Whether a barrier ever failed.
    failed: AtomicBool,
}

impl Ahead {
    pub fn new() -> Ahead {
        let slot = || Slot {
            state: AtomicU32::new(EMPTY),
            revoked: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            took_ns: AtomicU64::new(0),
        };
        Ahead { slots: std::array::from_fn(|_| slot()), failed: AtomicBool::new(false) }
    }

    /// Bytes that are set out or being zeroed.
    pub fn under_way(&self) -> usize {
        let busy = |slot: &&Slot| slot.state.load(Ordering::Acquire) != EMPTY;
        self.slots.iter().filter(busy).map(|slot| slot.len.load(Ordering::Relaxed)).sum()
    }

    /// Sets a piece out, which `choose` makes for the number of an empty slot. Returns whether there was both, and pieces can be
    /// revoked. One thread at a time calls this; the piece's zone is locked.
    pub fn set_out(&self, choose: impl FnOnce(usize) -> Option<Range>) -> bool {
        if self.failed.load(Ordering::Relaxed) {
            return false;
        }
        let empty = |slot: &Slot| slot.state.load(Ordering::Acquire) == EMPTY;
        let Some(number) = self.slots.iter().position(empty) else { return false };
        let Some(range) = choose(number) else { return false };
        let slot = &self.slots[number];
        slot.start.store(range.start, Ordering::Relaxed);
        slot.len.store(range.len, Ordering::Relaxed);
        slot.revoked.store(0, Ordering::Relaxed);
        slot.state.store(READY, Ordering::Release);
        true
    }

    /// Pieces that no helper has taken yet.
    pub fn ready(&self) -> usize {
        self.slots.iter().filter(|slot| slot.state.load(Ordering::Relaxed) == READY).count()
    }

    /// A helper's part: takes a piece and has it zeroed by `zero`, which gets the slot's number and returns whether it did all of
    /// it and how long that took. Returns whether there was a
    /// piece.
    pub fn work(&self, zero: impl FnOnce(usize, Range, &AtomicU32) -> (bool, u64)) -> bool {
        let take = |(_, slot): &(usize, &Slot)| {
            slot.state.load(Ordering::Relaxed) == READY
                && slot.state.compare_exchange(READY, TAKEN, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let Some((number, slot)) = self.slots.iter().enumerate().find(take) else { return false };
        let range = Range { start: slot.start.load(Ordering::Relaxed), len: slot.len.load(Ordering::Relaxed) };
        let (whole, took_ns) = zero(number, range, &slot.revoked);
        slot.took_ns.store(took_ns, Ordering::Relaxed);
        slot.state.store(if whole { WHOLE } else { PART }, Ordering::Release);
        true
    }

    /// Sees to it that nobody writes to the piece of `slot` any more. Called with the piece's zone locked and where helpers can be
    /// revoked. May be called in a signal handler.
    #[cfg(not(loom))]
    pub fn revoke(&self, slot: usize) -> Revoked {
        self.revoke_with(slot, crate::sys::membarrier::restart_sequences)
    }

    /// The same with a `barrier` that restarts the sequences of all threads, or fails.
    pub fn revoke_with<E>(&self, slot: usize, barrier: impl FnOnce() -> Result<(), E>) -> Revoked {
        let place = &self.slots[slot];
        place.revoked.store(1, Ordering::SeqCst);
        if place.state.compare_exchange(READY, PART, Ordering::SeqCst, Ordering::SeqCst) != Err(TAKEN) {
            return Revoked::Idle;
        }
        if barrier().is_ok() {
            return Revoked::Interrupted;
        }
        self.failed.store(true, Ordering::Relaxed);
        if self.has_let_go(slot) { Revoked::Idle } else { Revoked::StillAtIt }
    }

    /// Whether no helper is at the piece of `slot`. Where a barrier has failed, this says when a revoked piece may be used.
    pub fn has_let_go(&self, slot: usize) -> bool {
        // Acquire: what the helper has written comes before whatever the next owner writes.
        self.slots[slot].state.load(Ordering::Acquire) != TAKEN
    }

    /// Whether a barrier ever failed. Nothing is set out any more.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Calls off every piece that no helper has taken yet: it counts as done in part.
    pub fn call_off(&self) {
        for slot in &self.slots {
            let _ = slot.state.compare_exchange(READY, PART, Ordering::SeqCst, Ordering::Relaxed);
        }
    }

    /// The pieces within `zone` that helpers have let go of. Called with the zone locked, so that it gets each of them once; `take_in` brings
    /// the map up to date before the slot is empty again.
    pub fn collect(&self, zone: Range, mut take_in: impl FnMut(Done)) {
        for (number, slot) in self.slots.iter().enumerate() {
            let state = slot.state.load(Ordering::Acquire);
            let range = Range { start: slot.start.load(Ordering::Relaxed), len: slot.len.load(Ordering::Relaxed) };
            if matches!(state, WHOLE | PART) && range.start >= zone.start && range.start < zone.end() {
                let took_ns = slot.took_ns.load(Ordering::Relaxed);
                take_in(Done { slot: number, range, whole: state == WHOLE, took_ns });
                slot.state.store(EMPTY, Ordering::Release);
            }
        }
    }

    /// In a forked child: there is no helper, and the map knows of no piece.
    pub fn reset(&self) {
        self.slots.iter().for_each(|slot| slot.state.store(EMPTY, Ordering::Release));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ZONE: Range = Range { start: 0x4000_0000, len: 0x4000_0000 };
    const OTHERS: [Range; 2] = [Range { start: 0, ..ZONE }, Range { start: 0x8000_0000, ..ZONE }];

    fn piece(number: usize) -> Range {
        Range { start: ZONE.start + (number << 22), len: 1 << 22 }
    }

    fn collected(ahead: &Ahead, zone: Range) -> Vec<(usize, bool)> {
        let mut all = Vec::new();
        ahead.collect(zone, |done| all.push((done.slot, done.whole)));
        all
    }

    #[test]
    fn a_piece_is_zeroed_once_and_taken_in_once() {
        let ahead = Ahead::new();
        assert!(!ahead.work(|_, _, _| unreachable!()));
        assert!(ahead.set_out(|number| Some(piece(number))) && !ahead.set_out(|_| None));
        assert_eq!((ahead.under_way(), collected(&ahead, ZONE)), (1 << 22, vec![]));
        assert!(ahead.work(|_, range, _| (range == piece(0), 5)) && !ahead.work(|_, _, _| unreachable!()));
        OTHERS.iter().for_each(|&other| assert_eq!(collected(&ahead, other), []));
        assert_eq!(collected(&ahead, ZONE), [(0, true)]);
        assert_eq!((ahead.under_way(), collected(&ahead, ZONE)), (0, vec![]));
    }

    #[test]
    fn a_piece_that_was_revoked_in_time_is_never_begun() {
        let ahead = Ahead::new();
        assert!(ahead.set_out(|number| Some(piece(number))));
        assert_eq!(ahead.revoke_with(0, || -> Result<(), ()> { unreachable!() }), Revoked::Idle);
        assert!(!ahead.work(|_, _, _| unreachable!()));
        assert_eq!(collected(&ahead, ZONE), [(0, false)]);
        // The slot serves another piece, which is not revoked.
        assert!(ahead.set_out(|number| Some(piece(number))));
        assert!(ahead.work(|_, _, revoked| (revoked.load(Ordering::SeqCst) == 0, 1)));
        assert_eq!(collected(&ahead, ZONE), [(0, true)]);
    }

    #[test]
    fn a_piece_whose_revocation_failed_is_the_helpers_until_it_says_so() {
        let ahead = Ahead::new();
        assert!(ahead.set_out(|number| Some(piece(number))) && ahead.set_out(|number| Some(piece(number))));
        assert_eq!(ahead.ready(), 2);
        assert!(ahead.work(|slot, _, revoked| {
            assert_eq!(ahead.ready(), 1);
            // While the barrier works, the piece is the caller's at once, though the helper has yet to say that it has let go.
            assert_eq!(ahead.revoke_with(slot, || Ok::<(), ()>(())), Revoked::Interrupted);
            assert!(!ahead.has_failed() && !ahead.has_let_go(slot));
            // Without it, it is not.
            assert_eq!(ahead.revoke_with(slot, || Err(())), Revoked::StillAtIt);
            assert!(ahead.has_failed() && !ahead.has_let_go(slot));
            assert_eq!(collected(&ahead, ZONE), []);
            (revoked.load(Ordering::SeqCst) == 0, 1)
        }));
        assert!(ahead.has_let_go(0));
        // One that no helper has begun needs no barrier.
        assert_eq!(ahead.revoke_with(1, || Err(())), Revoked::Idle);
        assert_eq!(collected(&ahead, ZONE), [(0, false), (1, false)]);
        // From now on there is no zeroing ahead, nor in a forked child.
        assert!(!ahead.set_out(|_| unreachable!()));
        ahead.reset();
        assert!(!ahead.set_out(|_| unreachable!()));
    }

    /// The barrier itself: without it, a helper in the middle of a piece goes on zeroing what the owner has filled.
    #[test]
    fn what_the_owner_writes_behind_a_revocation_stays() {
        use crate::crew::zero;
        use crate::sys::memory::{Protection, map, unmap};
        use crate::sys::stop_on_drop::StopOnDrop;
        use crate::sys::{membarrier, rseq};
        if rseq::prepare().is_err() || membarrier::register().is_err() {
            return;
        }
        let range = Range { start: map(8 << 20, Protection::ReadWrite).unwrap(), len: 8 << 20 };
        // SAFETY: the test's own mapping. The helper and the owner write to it by turns, which is what is tested.
        let bytes = || unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len) };
        bytes().fill(1);
        let (ahead, stop) = (Ahead::new(), AtomicBool::new(false));
        let (mut interrupted, mut kept, begin) = (0, true, std::time::Instant::now());
        std::thread::scope(|scope| {
            let running = StopOnDrop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // SAFETY: the owner leaves the range alone until it has revoked the piece.
                    ahead.work(|_, range, revoked| (unsafe { zero::zero_unless(range, revoked) }, 1));
                }
            });
            // A helper that shares this thread's CPU is never interrupted, so some rounds say nothing.
            let rounds = (0..2000).take_while(|round| *round < 100 || begin.elapsed().as_secs() < 2);
            for round in rounds {
                if interrupted == 100 {
                    break;
                }
                assert!(ahead.set_out(|_| Some(range)));
                while ahead.ready() > 0 {
                    std::hint::spin_loop();
                }
                for _ in 0..round % 16 * 200 {
                    std::hint::spin_loop();
                }
                interrupted += usize::from(ahead.revoke(0) == Revoked::Interrupted);
                let mark = (round % 255) as u8 + 1;
                // The end, where the helper comes last.
                let tail = &mut bytes()[range.len - (16 << 10)..];
                tail.fill(mark);
                while !ahead.has_let_go(0) {
                    std::hint::spin_loop();
                }
                kept = kept && tail.iter().all(|&byte| byte == mark);
                ahead.collect(range, |_| ());
            }
            drop(running);
        });
        assert!(kept, "{interrupted} interrupted");
        assert!(!ahead.has_failed());
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }

    #[test]
    fn a_helper_that_lets_go_while_the_barrier_fails_needs_no_waiting() {
        let ahead = Ahead::new();
        assert!(ahead.set_out(|number| Some(piece(number))));
        let slot = &ahead.slots[0];
        slot.state.store(TAKEN, Ordering::SeqCst);
        let barrier = || {
            slot.state.store(WHOLE, Ordering::SeqCst);
            Err(())
        };
        assert_eq!(ahead.revoke_with(0, barrier), Revoked::Idle);
    }

    #[test]
    fn there_are_only_so_many_slots() {
        let ahead = Ahead::new();
        assert_eq!((0..100).filter(|_| ahead.set_out(|number| Some(piece(number)))).count(), SLOTS);
        assert!(ahead.work(|_, _, _| (true, 1)));
        ahead.call_off();
        assert!(!ahead.work(|_, _, _| unreachable!()));
        assert_eq!(collected(&ahead, ZONE).iter().filter(|(_, whole)| *whole).count(), 1);
        assert!(ahead.set_out(|number| Some(piece(number))));
        ahead.reset();
        assert_eq!(ahead.under_way(), 0);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    const PIECE: Range = Range { start: 0x4000_0000, len: 4096 };
    /// What the next owner writes; a helper writes [`HELPERS`].
    const OWNERS: u8 = 1;
    const HELPERS: u8 = 2;

    struct Model {
        ahead: Ahead,
        /// The piece. The lock stands for the restartable sequence: reading the flag and writing are one step, into which a barrier that
        /// works can't fall.
        byte: Mutex<u8>,
    }

    /// A helper, who may be stopped anywhere. Each look at the flag begins a sequence; there are two.
    fn helper(model: &Model) {
        model.ahead.work(|_, _, revoked| {
            let mut whole = true;
            for _ in 0..2 {
                let mut byte = model.byte.lock().unwrap();
                whole = whole && revoked.load(Ordering::Relaxed) == 0;
                if whole {
                    *byte = HELPERS;
                }
            }
            (whole, 1)
        });
    }

    /// The owner's part, with a barrier that works or fails: whatever the helper does, what the owner wrote is there.
    fn owner(works: bool) {
        loom::model(move || {
            let model = Arc::new(Model { ahead: Ahead::new(), byte: Mutex::new(0) });
            assert!(model.ahead.set_out(|_| Some(PIECE)));
            let other = model.clone();
            let thread = thread::spawn(move || helper(&other));
            let barrier = || {
                if works {
                    // Waits for the end of the sequence that a thread may be in.
                    drop(model.byte.lock().unwrap());
                    return Ok(());
                }
                Err(())
            };
            let revoked = model.ahead.revoke_with(0, barrier);
            while revoked == Revoked::StillAtIt && !model.ahead.has_let_go(0) {
                thread::yield_now();
            }
            *model.byte.lock().unwrap() = OWNERS;
            thread.join().unwrap();
            assert_eq!(*model.byte.lock().unwrap(), OWNERS);
            assert!(works || revoked != Revoked::Interrupted);
        });
    }

    #[test]
    fn behind_a_barrier_no_helper_writes() {
        owner(true);
    }

    #[test]
    fn where_the_barrier_fails_the_owner_waits_for_the_helper() {
        owner(false);
    }
}
