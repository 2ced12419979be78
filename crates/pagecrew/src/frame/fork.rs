//! What `fork` takes: the background held still before it, and in the child, everything free that no program has.

use super::Frames;
use super::GIANT_ORDER;
use super::allocator::{ALLOCATED, Allocator};
use super::area::{FRAMES, WHOLE, WORD, WORDS};
use super::background::Look;
use super::zone::GIANT_AREAS;
use crate::crew::ForkGuard;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

impl Frames {
    /// Holds the background still for a fork. Call it before, then drop what it returns in the parent and hand it to
    /// [`FrameForkGuard::in_child`] in the child; until then, frames may only be allocated and freed. The region's own
    /// [before_fork](crate::region::Region::before_fork) comes before it.
    pub fn before_fork(&self) -> FrameForkGuard<'_> {
        let look = Some(self.crew.employer().hold());
        let roster = Some(self.crew.hold_for_fork());
        FrameForkGuard { frames: self, look, roster }
    }
}

/// Holds frames still while the process forks.
pub struct FrameForkGuard<'f> {
    frames: &'f Frames,
    look: Option<MutexGuard<'f, Look>>,
    roster: Option<ForkGuard<'f>>,
}

impl FrameForkGuard<'_> {
    /// Makes the frames of a forked child work: what the program has allocated is allocated, everything else is free.
    ///
    /// # Safety
    /// Called in the child by its only thread.
    pub unsafe fn in_child(mut self) {
        (self.look, self.roster) = (None, None);
        // SAFETY: by the function's own contract.
        unsafe {
            self.frames.crew.forget_helpers();
            self.frames.allocator.after_fork();
        }
        self.frames.crew.watch();
    }
}

impl Allocator {
    /// In a forked child: makes every frame free that no program has. Threads of the parent may have had frames in their hands or been
    /// in the middle of anything; what the program has is in the bytes.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: by the function's own contract.
        unsafe {
            self.stacks.after_fork();
            self.zeroed.after_fork();
        }
        self.pieces.reset();
        self.next_look.reset();
        self.held_areas.store(0, Ordering::Relaxed);
        self.moving.store(0, Ordering::Relaxed);
        for zone in &self.zones {
            zone.forget_places(self.tables());
            let mut giant = 0;
            for area in zone.open() {
                let states = &self.states[area * FRAMES..(area + 1) * FRAMES];
                let order_at =
                    |frame: usize| states[frame].load(Ordering::Relaxed).checked_sub(ALLOCATED).map(u32::from);
                match order_at(0) {
                    Some(GIANT_ORDER) => giant = GIANT_AREAS,
                    Some(WHOLE) => giant = 1,
                    _ => {}
                }
                let mut used = [0u64; WORDS];
                for frame in (0..FRAMES).filter(|_| giant == 0) {
                    let run = order_at(frame).map_or(0, |order| 1usize << order);
                    (frame..frame + run).for_each(|frame| used[frame / WORD] |= 1 << (frame % WORD));
                }
                self.areas[area].rebuild((giant == 0).then_some(used));
                self.tables().rebuilt(area);
                giant = giant.saturating_sub(1);
            }
        }
    }
}
