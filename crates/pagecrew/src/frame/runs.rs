//! Frames in a row: orders 1 to 9, and 1 GiB. They come from the zones at once, and go back there.

use super::GIANT_ORDER;
use super::allocator::{ALLOCATED, Allocator};
use super::area::{FRAMES, WHOLE};
use super::error::{FreeError, OutOfFrames};
use super::zone::GIANT_AREAS;
use crate::crew::zero::{self, Use};
use std::sync::atomic::Ordering;

impl Allocator {
    /// Allocates `1 << order` frames in a row.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn alloc_order(&self, order: u32, want_zeroes: bool) -> Result<u32, OutOfFrames> {
        if order == 0 {
            return if want_zeroes { self.alloc_zeroed() } else { self.alloc() };
        }
        if order > WHOLE && order != GIANT_ORDER {
            return Err(OutOfFrames { order });
        }
        let cpu = self.stacks.here();
        let (first, zeroed) = self.or_last_resort(order, || {
            self.nearest_zones().find_map(|zone| match order {
                GIANT_ORDER => zone.take_giant(self.tables()),
                _ => zone.take_run(self.tables(), cpu, order),
            })
        })?;
        if want_zeroes && !zeroed {
            self.counters.zeroed_by_caller.add(1 << order);
            let intent = if order < WHOLE { Use::Soon } else { Use::Later };
            // SAFETY: the frames are this call's.
            unsafe { zero::zero(self.range_of(first, 1 << order), intent) };
        }
        let frame = self.hand_out(first as u32);
        self.state(frame).store(ALLOCATED + order as u8, Ordering::Relaxed);
        Ok(frame)
    }

    /// Frees frames that were allocated with `order`.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn free_order(&self, frame: u32, order: u32) -> Result<(), FreeError> {
        if order == 0 {
            return self.free(frame);
        }
        let state = u8::try_from(order).ok().and_then(|order| order.checked_add(ALLOCATED));
        if frame >= self.frames() || Some(self.state(frame).load(Ordering::Relaxed)) != state {
            return Err(self.diagnose(frame, order));
        }
        self.state(frame).store(ALLOCATED, Ordering::Relaxed);
        self.take_back(frame).expect("this thread has it");
        let first = frame as usize / FRAMES;
        let areas = if order == GIANT_ORDER { GIANT_AREAS } else { 1 };
        for area in first..first + areas {
            self.areas[area].put_run(frame % FRAMES as u32, order.min(WHOLE));
            self.tables().release(area, 1 << order.min(WHOLE), false);
        }
        self.call_background();
        Ok(())
    }
}
