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

use crate::sys::memory::Range;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

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

/// See the module.
pub(crate) struct Ahead {
    slots: [Slot; SLOTS],
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
        Ahead { slots: std::array::from_fn(|_| slot()) }
    }

    /// Bytes that are set out or being zeroed.
    pub fn under_way(&self) -> usize {
        let busy = |slot: &&Slot| slot.state.load(Ordering::Acquire) != EMPTY;
        self.slots.iter().filter(busy).map(|slot| slot.len.load(Ordering::Relaxed)).sum()
    }

    /// Sets a piece out, which `choose` makes for the number of an empty slot. Returns whether there was both. One thread at a time
    /// calls this; the piece's zone is locked.
    pub fn set_out(&self, choose: impl FnOnce(usize) -> Option<Range>) -> bool {
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

    /// Sees to it that nobody writes to the piece of `slot` any more; `barrier` restarts the sequences of all threads. Called with the
    /// piece's zone locked and where helpers can be revoked. Returns whether a helper had to be interrupted.
    pub fn revoke(&self, slot: usize, barrier: impl FnOnce()) -> bool {
        let slot = &self.slots[slot];
        slot.revoked.store(1, Ordering::SeqCst);
        match slot.state.compare_exchange(READY, PART, Ordering::SeqCst, Ordering::SeqCst) {
            Err(TAKEN) => {
                barrier();
                true
            }
            _ => false,
        }
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

    const ZONE: Range = Range { start: 1 << 30, len: 1 << 30 };
    const OTHER: Range = Range { start: 2 << 30, len: 1 << 30 };

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
        assert_eq!(collected(&ahead, OTHER), []);
        assert_eq!(collected(&ahead, ZONE), [(0, true)]);
        assert_eq!((ahead.under_way(), collected(&ahead, ZONE)), (0, vec![]));
    }

    #[test]
    fn a_piece_that_was_revoked_in_time_is_never_begun() {
        let ahead = Ahead::new();
        assert!(ahead.set_out(|number| Some(piece(number))));
        assert!(!ahead.revoke(0, || unreachable!()));
        assert!(!ahead.work(|_, _, _| unreachable!()));
        assert_eq!(collected(&ahead, ZONE), [(0, false)]);
        // The slot serves another piece, which is not revoked.
        assert!(ahead.set_out(|number| Some(piece(number))));
        assert!(ahead.work(|_, _, revoked| (revoked.load(Ordering::SeqCst) == 0, 1)));
        assert_eq!(collected(&ahead, ZONE), [(0, true)]);
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
