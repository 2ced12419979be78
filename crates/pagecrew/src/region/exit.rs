//! Giving memory back in parallel when the process ends, before the kernel does it with one thread.
//!
//! Nobody may see memory go that he still uses. So the other threads are stopped first (see [`crate::sys::stop`]); if one of them
//! doesn't stop, only free memory is given back. What is still needed until the very end is kept: the calling thread's stack and
//! thread-local storage, the helpers' stacks, and what the caller names.

use super::Region;
use crate::crew::{Operation, Task};
use crate::sys::memory::{self, Range};
use crate::sys::{PAGE_SIZE, maps, procfs, stop};

/// A process with less than this in small pages is left to the kernel: stopping and looking costs as much as it would save.
const WORTH: usize = 256 << 20;
/// The kernel takes a huge page down as fast as this many of its 512 parts: 4 ms for 1 GiB, and 150 ms in small pages.
const HUGE_COST: usize = 40;
/// Mappings smaller than this are left to the kernel.
const MAPPING_LEAST: usize = 32 << 20;
/// The most mappings that are looked at.
const MAPPINGS: usize = 512;
/// How long threads have to stop.
const PATIENCE_NS: u64 = 20_000_000;
/// Around an address that is needed until the end, this much is kept on both sides.
const MARGIN: usize = 1 << 20;

/// Ranges in memory that is taken before the stop: behind it, nothing may be allocated.
struct List(Vec<Range>);

impl List {
    fn new() -> List {
        List(Vec::with_capacity(MAPPINGS))
    }

    fn push(&mut self, range: Range) {
        if self.0.len() < self.0.capacity() && range.len >= MAPPING_LEAST {
            self.0.push(range);
        }
    }

    /// Removes `hole` from every range.
    fn cut(&mut self, hole: Range) {
        let begin = hole.start & !(PAGE_SIZE - 1);
        let end = hole.end().next_multiple_of(PAGE_SIZE);
        for index in 0..self.0.len() {
            let range = self.0[index];
            if begin >= range.end() || end <= range.start {
                continue;
            }
            self.0[index].len = begin.saturating_sub(range.start);
            if end < range.end() {
                self.push(Range { start: end, len: range.end() - end });
            }
        }
    }
}

/// Whether `resident` bytes are worth it that came with `faults` page faults. Each fault brought one small page, or a huge one.
fn worth(resident: usize, faults: usize) -> bool {
    let small = resident.min(faults.saturating_mul(PAGE_SIZE));
    small + (resident - small) / HUGE_COST >= WORTH
}

impl Region {
    /// Whether the process is large enough for [`Region::give_back_before_exit`] to be worth it. With `inherited`, it has memory from
    /// before a fork, which it had no faults for.
    pub fn worth_giving_back(inherited: bool) -> bool {
        let faults = if inherited { usize::MAX } else { memory::page_faults() };
        procfs::resident_bytes().is_ok_and(|bytes| worth(bytes, faults))
    }

    /// Whether no lock of the region is held at this moment. In a signal handler, a held one may be the interrupted thread's own, and
    /// waiting for it would last for ever.
    pub fn unlocked(&self) -> bool {
        self.core().zones.iter().all(super::core::Zone::unlocked) && self.crew.unlocked()
    }

    /// Stops all other threads of the process but the helpers and gives its large private memory back in parallel, except
    /// `kept`. Nothing may be allocated from here on.
    ///
    /// # Safety
    /// The process ends next, by a system call and without running anything that uses its memory; `kept` holds what that, and this
    /// crate's own data, need.
    pub unsafe fn give_back_before_exit(&self, kept: &[Range]) {
        let mut list = List::new();
        let arena = self.range();
        if maps::private_anonymous(|mapping| list.push(mapping)).is_err() {
            return;
        }
        list.cut(arena);
        // The zones' maps are needed until the last helper has reported.
        for zone in &self.core().zones {
            zone.lock().map.own_memory().for_each(|range| list.cut(range));
        }
        list.cut(self.core().caches.own_memory());
        let mut spans = self.held();
        let mut sum = 0;
        let marker = 0u8;
        let around = |address: usize| Range { start: address.saturating_sub(MARGIN), len: 2 * MARGIN };
        list.cut(around((&raw const marker) as usize));
        // SAFETY: the address of the calling thread's errno, which lies in its thread-local storage.
        list.cut(around(unsafe { libc::__errno_location() } as usize));
        for &range in kept {
            list.cut(range);
            spans.cut(range);
        }
        for range in list.0.iter().chain(&spans.0) {
            sum += range.len;
        }
        // Helpers are there before the others stop: a stopped thread may hold the locks that starting one takes.
        self.crew.call(sum, Operation::Discard);
        self.crew.helper_stacks().for_each(|stack| list.cut(stack));
        let hold = self.before_exit();
        let helpers = |thread| self.crew.helper_threads().any(|helper| helper == thread);
        let stopped = self.crew.all_started() && stop::stop_others(helpers, PATIENCE_NS);
        drop(hold);
        if !stopped {
            return;
        }
        self.crew.uncontended();
        for range in spans.0.iter().chain(&list.0) {
            if range.len > 0 {
                // SAFETY: every thread that could use the range has stopped for good, and nothing that this one or the helpers
                // use lies in it.
                unsafe { self.crew.run(Task { operation: Operation::Discard, range: *range, node: 0, report: false }) };
            }
        }
        self.boost_helpers();
    }

    /// What is in use in the arena, and what is retained there. Adjacent spans are one range.
    fn held(&self) -> List {
        let mut spans = List::new();
        for zone in &self.core().zones {
            let inner = zone.lock();
            let mut run = Range { start: 0, len: 0 };
            let mut held: Vec<(usize, usize)> = inner
                .map
                .handed_out()
                .chain(inner.map.backed())
                .map(|(offset, segment)| (offset, segment.len))
                .collect();
            drop(inner);
            held.sort_unstable();
            for (offset, len) in held {
                let start = zone.range.start + offset;
                if run.end() == start {
                    run.len += len;
                } else {
                    spans.push(run);
                    run = Range { start, len };
                }
            }
            spans.push(run);
        }
        spans
    }

    /// Lets helpers that are at work have CPU time soon, where the user may: a process can't end before each of its threads has had
    /// some, and those of the idle class wait for it while others want the CPUs.
    pub fn boost_helpers(&self) {
        self.crew.boost_all();
    }

    /// Holds the zones and the crew while threads are stopped, so that none of them stops inside a lock that is needed later;
    /// no helper is started afterwards.
    fn before_exit(&self) -> impl Drop + '_ {
        struct Hold<'r, Z>(Vec<Z>, Option<crate::crew::ForkGuard<'r>>);
        impl<Z> Drop for Hold<'_, Z> {
            fn drop(&mut self) {
                // The locks open; the vector's memory is not given back, since its allocator may be held by a stopped thread.
                self.0.drain(..).for_each(drop);
                std::mem::forget(std::mem::take(&mut self.0));
                self.1 = None;
            }
        }
        let zones: Vec<_> = self.core().zones.iter().map(super::core::Zone::lock).collect();
        let mut roster = self.crew.hold_for_fork();
        roster.no_more_helpers();
        Hold(zones, Some(roster))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Options;
    use crate::sys::HUGE_PAGE_SIZE;

    /// What libc has for the helpers lies among the program's spans, and is needed as long as they are.
    #[test]
    fn what_is_kept_is_cut_out_of_the_spans_around_it() {
        let region = Region::new(Options { huge_pages: false, ..Options::default() }).unwrap();
        let before = region.allocate(40 << 20, 1).unwrap().as_ptr() as usize;
        let kept = Range { start: region.allocate_uncounted(512 << 10).unwrap().as_ptr() as usize, len: 512 << 10 };
        let behind = region.allocate(40 << 20, 1).unwrap().as_ptr() as usize;
        let mut held = region.held();
        let has =
            |held: &List, address: usize| held.0.iter().any(|range| (range.start..range.end()).contains(&address));
        assert!([before, kept.start, behind].iter().all(|&address| has(&held, address)));
        held.cut(kept);
        assert!(has(&held, before) && has(&held, behind));
        assert!(!has(&held, kept.start) && !has(&held, kept.end() - 1));
    }

    #[test]
    fn memory_in_huge_pages_is_left_to_the_kernel() {
        const GIB: usize = 1 << 30;
        assert!(worth(GIB, GIB / PAGE_SIZE) && worth(GIB, usize::MAX) && !worth(WORTH - 1, usize::MAX));
        assert!(!worth(8 * GIB, 8 * GIB / HUGE_PAGE_SIZE + 5000));
        assert!(worth(2 * GIB, GIB / PAGE_SIZE) && worth(64 * GIB, 0));
    }

    #[test]
    fn holes_are_cut_out_of_every_range() {
        let mut list = List::new();
        list.push(Range { start: 1 << 30, len: 1 << 30 });
        list.push(Range { start: 4 << 30, len: 1 << 30 });
        list.push(Range { start: 6 << 30, len: 4096 });
        assert_eq!(list.0.len(), 2, "a small range is left to the kernel");
        list.cut(Range { start: (1 << 30) + (256 << 20) + 5, len: 10 });
        list.cut(Range { start: 4 << 30, len: 1 << 20 });
        list.cut(Range { start: 100 << 30, len: 1 << 20 });
        let ranges: Vec<(usize, usize)> = list.0.iter().map(|range| (range.start, range.len)).collect();
        assert_eq!(
            ranges,
            [
                (1 << 30, 256 << 20),
                (4 << 30, 0),
                ((1 << 30) + (256 << 20) + 4096, (1 << 30) - (256 << 20) - 4096),
                ((4 << 30) + (1 << 20), (1 << 30) - (1 << 20)),
            ]
        );
    }
}
