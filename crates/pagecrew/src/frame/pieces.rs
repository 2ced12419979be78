//! Dirty frames that are being zeroed ahead: what a helper has of an area at a time.
//!
//! The agreement with the helpers is [`Ahead`]'s; here is what each of its slots stands for. A piece is made by the watcher and taken in by
//! whoever comes first to [`Pieces::take_in`]: one thread at a time, and none that would have to wait.

use super::area::{FRAMES, Kind, WORD, WORDS};
use super::zone::Tables;
use crate::crew::ahead::{Ahead, Done, SLOTS};
use crate::sys::memory::Range;
use crate::sys::{PAGE_SIZE, membarrier};
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

    /// Sees to it that nobody writes to a piece any more. May be called in a signal handler.
    pub fn revoke_all(&self) {
        for slot in 0..SLOTS {
            // Where there is no barrier, pieces are not revoked while somebody is at them: that takes a moment at most.
            self.ahead.revoke(slot, || _ = membarrier::restart_sequences());
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
