//! Work on spans in use that a layer above has the region's watcher do now and then.
//!
//! **Life of a rider.** It rests as long as no span is large enough for a huge page. The first such allocation calls the watcher, which then
//! asks the rider each time when to come again, until the spans are gone.

use super::core::Core;
use super::spans::State;
use crate::crew::Tick;
use crate::stats::Counters;
use crate::sys::memory::Range;
use crate::sys::{HUGE_PAGE_SIZE, clock};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What rides with the watcher.
pub trait Rider: Send + Sync {
    /// Called by the watcher, which has other things to do: takes a few milliseconds at most. `spans` lists the ranges in use that may be
    /// in huge pages. Returns when to be called again; `None` for never.
    fn ride(&self, spans: &dyn Fn() -> Vec<Range>, counters: &Counters) -> Option<Duration>;

    /// Whether there may be work besides spans, so that it is called without any.
    fn has_more(&self) -> bool {
        false
    }

    /// In a forked child: what was under way is not.
    ///
    /// # Safety
    /// Called by the child's only thread.
    unsafe fn after_fork(&self);
}

/// The place of a rider.
#[derive(Default)]
pub(super) struct Seat {
    rider: OnceLock<Box<dyn Rider>>,
    rests: AtomicBool,
    next_ns: AtomicU64,
}

impl Seat {
    /// Takes `rider` in. Returns whether the seat was free.
    pub fn take(&self, rider: Box<dyn Rider>) -> bool {
        let free = self.rider.set(rider).is_ok();
        if free {
            self.rests.store(true, Ordering::SeqCst);
        }
        free
    }

    /// Whether an allocation of `usable` bytes, which can be seen in the zones, has to call the watcher for the rider.
    pub fn call(&self, usable: usize) -> bool {
        usable >= HUGE_PAGE_SIZE && self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst)
    }

    /// In a forked child.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        if let Some(rider) = self.rider.get() {
            // SAFETY: by the function's own contract.
            unsafe { rider.after_fork() };
            self.rests.store(true, Ordering::SeqCst);
        }
    }
}

impl Core {
    /// The watcher's ride.
    pub(super) fn ride(&self) -> Tick {
        let seat = &self.seat;
        let Some(rider) = seat.rider.get().filter(|_| !seat.rests.load(Ordering::SeqCst)) else { return Tick::Rest };
        let now = clock::now_ns();
        let next = seat.next_ns.load(Ordering::Relaxed);
        if now < next {
            return Tick::Wait(Duration::from_nanos(next - now));
        }
        if !rider.has_more() && self.huge_spans().is_empty() {
            // Whoever allocates from here on sees that it rests; whoever has allocated before is seen by the second look.
            seat.rests.store(true, Ordering::SeqCst);
            if self.huge_spans().is_empty() || !seat.rests.swap(false, Ordering::SeqCst) {
                return Tick::Rest;
            }
        }
        match rider.ride(&|| self.huge_spans(), &self.stats.counters) {
            None => Tick::Rest,
            Some(Duration::ZERO) => Tick::Again,
            Some(pause) => {
                seat.next_ns.store(now + pause.as_nanos() as u64, Ordering::Relaxed);
                Tick::Wait(pause)
            }
        }
    }

    /// What of the spans in use may be in huge pages. Adjacent spans are one range.
    pub(super) fn huge_spans(&self) -> Vec<Range> {
        let mut spans: Vec<Range> = Vec::new();
        for zone in self.zones.iter().filter(|zone| zone.huge) {
            let inner = zone.lock();
            for (offset, segment) in inner.map.handed_out().filter(|(_, segment)| segment.state == State::InUse) {
                let range = zone.at(offset, segment.len);
                match spans.last_mut().filter(|last| last.end() == range.start) {
                    Some(last) => last.len += range.len,
                    None => spans.push(range),
                }
            }
        }
        spans.retain(|range| range.len >= HUGE_PAGE_SIZE);
        spans
    }
}

/// Whichever comes first.
pub(super) fn sooner(one: Tick, other: Tick) -> Tick {
    match (one, other) {
        (Tick::Again, _) | (_, Tick::Again) => Tick::Again,
        (Tick::Wait(one), Tick::Wait(other)) => Tick::Wait(one.min(other)),
        (Tick::Wait(pause), Tick::Rest) | (Tick::Rest, Tick::Wait(pause)) => Tick::Wait(pause),
        (Tick::Rest, Tick::Rest) => Tick::Rest,
    }
}
