//! Dirty frames that are being zeroed ahead: what a helper has of an area at a time.
//!
//! The agreement with the helpers is [`Ahead`]'s; here is what each of its slots stands for. A piece is made by the watcher and taken in by
//! whoever comes first to [`Pieces::take_in`]: one thread at a time, and none that would have to wait.

use super::area::{FRAMES, Kind, WORD, WORDS};
use super::zone::Tables;
use crate::crew::ahead::{Ahead, Done, Revoked, SLOTS};
use crate::sys::PAGE_SIZE;
use crate::sys::memory::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

struct Piece {
    area: AtomicUsize,
    masks: [AtomicU64; WORDS],
}

/// See the module.
pub(super) struct Pieces {
    pub ahead: Ahead,
    pieces: [Piece; SLOTS],
    /// Frames in pieces.
    frames: AtomicUsize,
    /// Whether a thread is taking in.
    busy: AtomicBool,
}

impl Pieces {
    pub fn new() -> Pieces {
        let piece = || Piece { area: AtomicUsize::new(0), masks: [const { AtomicU64::new(0) }; WORDS] };
        Pieces {
            ahead: Ahead::new(),
            pieces: std::array::from_fn(|_| piece()),
            frames: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
        }
    }

    /// Frames that are in nobody's hands but a helper's, or wait for one.
    pub fn under_way(&self) -> usize {
        self.frames.load(Ordering::Relaxed)
    }

    /// Sets dirty frames of `area` out, up to `most` of them. `range` are its addresses. Returns how many. Called by one thread at a time.
    pub fn set_out(&self, area: usize, tables: Tables, range: Range, most: u32) -> usize {
        let mut count = 0;
        self.ahead.set_out(|slot| {
            let piece = &self.pieces[slot];
            let mut masks = [0; WORDS];
            count = tables.take(area, most, Kind::Dirty, |taken| masks[taken.word] |= taken.mask) as usize;
            piece.area.store(area, Ordering::Relaxed);
            masks.iter().zip(&piece.masks).for_each(|(&mask, place)| place.store(mask, Ordering::Relaxed));
            self.frames.fetch_add(count, Ordering::Relaxed);
            (count > 0).then_some(range)
        });
        count
    }

    /// A helper's part: has the runs of frames of one piece zeroed by `zero`, which says whether it did. Returns whether there was a piece.
    pub fn work(&self, mut zero: impl FnMut(Range, &AtomicU32) -> bool, now: impl Fn() -> u64) -> bool {
        self.ahead.work(|slot, range, revoked| {
            let begin = now();
            let masks = self.pieces[slot].masks.each_ref().map(|mask| mask.load(Ordering::Relaxed));
            let used = |frame: usize| masks[frame / WORD] >> (frame % WORD) & 1 != 0;
            let (mut frame, mut whole) = (0, true);
            while frame < FRAMES && whole {
                let len = (frame..FRAMES).take_while(|&frame| used(frame)).count();
                if len > 0 {
                    whole = zero(Range { start: range.start + frame * PAGE_SIZE, len: len * PAGE_SIZE }, revoked);
                }
                frame += len.max(1);
            }
            (whole, now() - begin)
        })
    }

    /// Has helpers let go of all pieces soon. Each piece stays its helper's until the helper says that it has let go, so a barrier that
    /// fails only makes that later. May be called in a signal handler.
    pub fn revoke_all(&self) {
        for slot in 0..SLOTS {
            let (Revoked::Idle | Revoked::Interrupted | Revoked::StillAtIt) = self.ahead.revoke(slot);
        }
    }

    /// Takes in what helpers have let go of: `each` gets the area, the frames and whether they were zeroed, and returns their number.
    /// Returns the sum.
    pub fn take_in(&self, mut each: impl FnMut(usize, &[u64; WORDS], bool) -> usize) -> usize {
        if self.under_way() == 0 || self.busy.swap(true, Ordering::Acquire) {
            return 0;
        }
        let everywhere = Range { start: 0, len: usize::MAX };
        let mut sum = 0;
        self.ahead.collect(everywhere, |Done { slot, whole, .. }| {
            let piece = &self.pieces[slot];
            let masks = piece.masks.each_ref().map(|mask| mask.load(Ordering::Relaxed));
            sum += each(piece.area.load(Ordering::Relaxed), &masks, whole);
        });
        self.frames.fetch_sub(sum, Ordering::Relaxed);
        self.busy.store(false, Ordering::Release);
        sum
    }

    /// In a forked child: there is no helper.
    pub fn reset(&self) {
        self.ahead.reset();
        self.frames.store(0, Ordering::Relaxed);
        self.busy.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `take_in` relies on: a revocation, whether its barrier works or not, doesn't make a piece anybody's whose helper has not let go.
    #[test]
    fn a_piece_is_taken_in_only_when_its_helper_has_let_go() {
        let pieces = Pieces::new();
        assert!(pieces.ahead.set_out(|_| Some(Range { start: 1 << 30, len: FRAMES * PAGE_SIZE })));
        pieces.pieces[0].masks[0].store(0b1010, Ordering::Relaxed);
        pieces.frames.store(2, Ordering::Relaxed);
        let taken = |pieces: &Pieces| {
            let mut taken = Vec::new();
            let count = pieces.take_in(|_, masks, whole| {
                taken.push((masks[0], whole));
                masks[0].count_ones() as usize
            });
            (count, taken)
        };
        let zeroed = std::cell::Cell::new(0);
        let zero = |range: Range, revoked: &AtomicU32| {
            zeroed.set(zeroed.get() + range.len);
            // Registered or not in this process: the barrier's result doesn't matter.
            pieces.revoke_all();
            assert_eq!(taken(&pieces), (0, vec![]));
            assert_eq!(revoked.load(Ordering::Relaxed), 1);
            false
        };
        assert!(pieces.work(zero, || 0));
        // The first of two runs of a frame each; behind the revocation, the second was left out.
        assert_eq!(zeroed.get(), PAGE_SIZE);
        assert_eq!(taken(&pieces), (2, vec![(0b1010, false)]));
        assert_eq!((taken(&pieces), pieces.under_way()), ((0, vec![]), 0));
    }
}
