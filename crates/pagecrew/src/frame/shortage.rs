//! When nothing is left: free frames are fetched from wherever they are but can't be had.

use super::allocator::{Allocator, ZEROED};
use super::area::WordFrames;
use super::error::OutOfFrames;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long an allocation waits for memory that is being zeroed or given back before it says that there is none.
const LAST_RESORT: Duration = Duration::from_millis(100);

impl Allocator {
    /// Has `work` move free frames about: nobody is told meanwhile that there are none.
    pub fn moving<T>(&self, work: impl FnOnce() -> T) -> T {
        self.moving.fetch_add(1, Ordering::AcqRel);
        let result = work();
        self.moving.fetch_sub(1, Ordering::AcqRel);
        result
    }

    /// Tries, and while there is nothing, has frames come back from wherever they are free but can't be had.
    pub fn or_last_resort<T>(&self, order: u32, mut attempt: impl FnMut() -> Option<T>) -> Result<T, OutOfFrames> {
        if let Some(found) = attempt() {
            return Ok(found);
        }
        for _ in 0..LAST_RESORT.as_millis() {
            let drained = self.drain(|_| true);
            let taken_back = self.take_zeroing_back();
            if let Some(found) = attempt() {
                return Ok(found);
            }
            if drained + taken_back == 0 {
                let moving = self.moving.load(Ordering::Acquire);
                if moving + self.held_areas.load(Ordering::Acquire) + self.pieces.under_way() == 0 {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        attempt().ok_or(OutOfFrames { order })
    }

    /// Empties the stacks of the CPUs that `wanted` names into the zones. Returns the number of frames.
    pub fn drain(&self, wanted: impl Fn(usize) -> bool) -> usize {
        let give = |slots: &[u32]| self.give(slots);
        let zeroed = |slots: &[u32]| {
            // All of this stack are zero, whether they say so or not.
            slots.chunks(64).for_each(|some| {
                let mut flagged = [0; 64];
                flagged.iter_mut().zip(some).for_each(|(flagged, slot)| *flagged = slot | ZEROED);
                self.give(&flagged[..some.len()]);
            })
        };
        let count = self.stacks.drain(&wanted, give) + self.zeroed.drain(&wanted, zeroed);
        if count > 0 {
            self.counters.drains.add(1);
        }
        count
    }

    /// Takes what is being zeroed ahead away from whoever is at it. Returns the number of frames.
    pub fn take_zeroing_back(&self) -> usize {
        self.pieces.revoke_all();
        self.take_in_pieces()
    }

    /// Takes in what helpers have let go of. Returns the number of frames.
    pub fn take_in_pieces(&self) -> usize {
        self.pieces.take_in(|area, masks, whole| {
            let mut count = 0;
            for (word, &mask) in masks.iter().enumerate().filter(|(_, mask)| **mask != 0) {
                if whole {
                    self.areas[area].clean(word, mask);
                }
                self.areas[area].put(WordFrames { word, mask, zeroed: if whole { mask } else { 0 } });
                count += mask.count_ones();
            }
            self.tables().release(area, count, whole);
            if whole {
                self.counters.zeroed_ahead.add(count.into());
            }
            count as usize
        })
    }
}
