//! Work on spans in use that a layer above has the region's watcher do now and then.
//!
//! **Life of a hook.** It rests as long as no span is large enough for a huge page. The first such allocation calls the watcher, which then
//! asks the hook each time when to come again, until the spans are gone.

use super::core::Core;
use super::spans::State;
use crate::crew::Tick;
use crate::stats::Counters;
use crate::sys::memory::Range;
use crate::sys::{HUGE_PAGE_SIZE, clock};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What the watcher calls besides its own work.
pub trait Hook: Send + Sync {
    /// Called by the watcher, which has other things to do: takes a few milliseconds at most. `spans` lists the ranges in use that may be
    /// in huge pages. Returns when to be called again; `None` for never.
    fn run(&self, spans: &dyn Fn() -> Vec<Range>, counters: &Counters) -> Option<Duration>;

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

/// Where a region keeps its hook.
#[derive(Default)]
pub(super) struct HookSlot {
    hook: OnceLock<Box<dyn Hook>>,
    rests: AtomicBool,
    next_ns: AtomicU64,
}

impl HookSlot {
    /// Takes `hook` in. Returns whether there was none yet.
    pub fn take(&self, hook: Box<dyn Hook>) -> bool {
        let free = self.hook.set(hook).is_ok();
        if free {
            self.rests.store(true, Ordering::SeqCst);
        }
        free
    }

    /// Whether an allocation of `usable` bytes, which can be seen in the zones, has to call the watcher for the hook.
    pub fn call(&self, usable: usize) -> bool {
        usable >= HUGE_PAGE_SIZE && self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst)
    }

    /// In a forked child.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        if let Some(hook) = self.hook.get() {
            // SAFETY: by the function's own contract.
            unsafe { hook.after_fork() };
            self.rests.store(true, Ordering::SeqCst);
        }
    }
}

impl Core {
    /// Calls the hook, if it is time.
    pub(super) fn run_hook(&self) -> Tick {
        let slot = &self.hook;
        let Some(hook) = slot.hook.get().filter(|_| !slot.rests.load(Ordering::SeqCst)) else { return Tick::Rest };
        let now = clock::now_ns();
        let next = slot.next_ns.load(Ordering::Relaxed);
        if now < next {
            return Tick::Wait(Duration::from_nanos(next - now));
        }
        if !hook.has_more() && self.huge_spans().is_empty() {
            // Whoever allocates from here on sees that it rests; whoever has allocated before is seen by the second look.
            slot.rests.store(true, Ordering::SeqCst);
            if self.huge_spans().is_empty() || !slot.rests.swap(false, Ordering::SeqCst) {
                return Tick::Rest;
            }
        }
        match hook.run(&|| self.huge_spans(), &self.stats.counters) {
            None => Tick::Rest,
            Some(Duration::ZERO) => Tick::Again,
            Some(pause) => {
                slot.next_ns.store(now + pause.as_nanos() as u64, Ordering::Relaxed);
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
