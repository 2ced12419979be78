//! Large mappings that are kept, zeroed, given back and moved off the program's critical path.
//!
//! A [`Region`] owns an arena of address space. A *span* is a run of it that was handed out. Every byte of the arena is in
//! exactly one state at any time:
//!
//! ```text
//!  Reserved --allocate--> InUse --free--> Retained(dirty) --zeroer--> Retained(zeroed)
//!     ^                     ^                |     |                      |
//!     |                     +----allocate----+-----|----------------------+
//!     +------discard (decay, pressure, over the target)-------------------+
//! ```
//!
//! Spans of up to 64 MiB have one of a few sizes, and wait on the CPU where they were freed for the next request of their size: such a pair
//! takes no lock, executes no atomic exchange and makes no system call. What else is freed is retained in its zone, or its pages are given back by the crew in
//! parallel. What is retained raises the program's peak by a few percent at most, goes back when nothing needed it for the decay time, and at once under pressure
//! (see [`policy`]). [`Region::allocate_zeroed`] takes memory that is known to be zero first.
//!
//! Sources: parallel free (Aaron Lu, 2017) and PG_zero (Liang Li, 2020), whose reviewers asked for the memory to be bounded, for
//! somebody to pay for the CPU, and not to zero what is small and hot.

mod arena;
mod bins;
mod bits;
mod cache;
mod churn;
mod classes;
pub mod colour;
mod core;
mod density;
mod exit;
mod hook;
mod lanes;
mod limits;
mod links;
mod options;
pub mod page_map;
mod placement;
pub mod policy;
mod resize;
mod retention;
mod reuse;
pub(crate) mod signals;
mod slow_counts;
pub mod spans;
#[cfg(test)]
mod tests;
mod transfer;
mod zeroing;

pub use hook::Hook;
pub use options::{NAMES, Name, OptionError, Options, Trim};

pub use resize::ResizeError;

use self::core::Need;
use self::core::{Core, Inner, RegionCrew, Zone, ZoneForkGuard};
use crate::crew::zero::{self, Use};
use crate::crew::{Crew, Employer, ForkGuard, Operation, Task};
use crate::stats::{Snapshot, StatsPage};
use crate::sys::HUGE_PAGE_SIZE;
use crate::sys::memory::Range;
use crate::sys::sched::{self, CpuSet};
use crate::sys::topology::Topology;
use crate::sys::{Errno, PAGE_SIZE, check_page_size, clock, round_up};
use crate::sys::{numa, numa_maps};
pub use cache::{CpuCaches, TakenSpan, Uncached};
use classes::ALIGNED_LEAST;
pub use page_map::Cacheable;
use slow_counts::Counts;
use spans::{Grant, Segment, State, Want};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The largest alignment that a span can have.
pub const MAX_ALIGN: usize = 1 << 30;

/// How long a helper that gives memory back is waited for: where that is a courtesy, and where the program would get no memory.
const TRIM_PATIENCE: Duration = Duration::from_millis(10);
const REFUSED_PATIENCE: Duration = Duration::from_secs(1);

/// Why a span could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocateError {
    /// Size or alignment can't be served at all.
    Unsupported {
        /// The size asked for, in bytes.
        size: usize,
        /// The alignment asked for, in bytes.
        align: usize,
    },
    /// The arena has no room for it, or the kernel refused the memory.
    OutOfMemory {
        /// The size asked for, in bytes.
        size: usize,
    },
}

impl fmt::Display for AllocateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocateError::Unsupported { size, align } => write!(f, "no span can have {size} bytes aligned to {align}"),
            AllocateError::OutOfMemory { size } => write!(f, "no room in the arena for a span of {size} bytes"),
        }
    }
}

impl std::error::Error for AllocateError {}

/// What is wrong with a pointer that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointerError {
    /// It lies in the arena, where nothing is in use: freed twice, or never handed out.
    NotInUse(usize),
    /// It points into a span and not to its beginning.
    Inside {
        /// The pointer.
        address: usize,
        /// The beginning of the span.
        start: usize,
    },
    /// It does not lie in the arena.
    Foreign(usize),
}

impl fmt::Display for PointerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointerError::NotInUse(address) => write!(f, "{address:#x} is not in use (freed twice?)"),
            PointerError::Inside { address, start } => write!(f, "{address:#x} points into the span at {start:#x}"),
            PointerError::Foreign(address) => write!(f, "{address:#x} is no address of this region"),
        }
    }
}

impl std::error::Error for PointerError {}

/// Large memory for one process. See the module's description.
pub struct Region {
    crew: RegionCrew,
}

/// Holds a region still while the process forks.
pub struct RegionForkGuard<'r> {
    region: &'r Region,
    zones: Vec<ZoneForkGuard<'r>>,
    roster: Option<ForkGuard<'r>>,
}

impl Region {
    /// A region of this machine's shape, with helpers on the CPUs that the calling thread may use.
    ///
    /// # Errors
    /// `ENOMEM` if there is no address space for even a small arena, `EOPNOTSUPP` where the kernel's pages have another size
    /// ([`check_page_size`]).
    pub fn new(options: Options) -> Result<Region, Errno> {
        Region::with(options, sched::with_offline(sched::affinity().unwrap_or_default()), Topology::read())
    }

    /// A region with helpers on `cpus` and a zone for each node of `topology`.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn with(options: Options, cpus: CpuSet, topology: Topology) -> Result<Region, Errno> {
        check_page_size()?;
        let helpers = options.helpers;
        let core = Core::new(options, &topology)?;
        Ok(Region { crew: Crew::new(core, helpers, cpus, topology) })
    }

    fn core(&self) -> &Core {
        self.crew.employer()
    }

    /// The options in force.
    pub fn options(&self) -> &Options {
        &self.core().options
    }

    /// The addresses that spans come from: whether a pointer is the region's is one comparison.
    pub fn range(&self) -> Range {
        self.core().range()
    }

    /// The counters and states.
    pub fn stats(&self) -> &StatsPage {
        &self.core().stats
    }

    /// A copy of the counters and states.
    pub fn snapshot(&self) -> Snapshot {
        self.core().publish_all();
        self.stats().snapshot()
    }

    /// Adds what was counted on each CPU to the counters, without a lock: for a process that ends.
    pub fn add_up_counts(&self) {
        self.core().sum_up_all();
    }

    /// Counts the memory that lies on another node than its zone's, where memory is placed at all: once, for a process that ends and whose
    /// counters somebody will read. It takes the kernel milliseconds for each GiB.
    pub fn count_elsewhere(&self) {
        if !self.core().placement.is_on() {
            return;
        }
        if let Ok(spread) = numa_maps::read(None, Some(self.range())) {
            self.stats().counters.elsewhere_bytes.add(spread.elsewhere);
        }
    }

    /// Hands out at least `size` bytes aligned to `align` (and to a page; from 32 MiB on, to a huge page). Their contents are
    /// undefined.
    ///
    /// # Errors
    /// See [`AllocateError`].
    #[inline]
    pub fn allocate(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        self.allocate_span(size, align, false).map(|span| span.start)
    }

    /// As [`Region::allocate`]; the first `size` bytes are zero.
    ///
    /// # Errors
    /// As [`Region::allocate`].
    pub fn allocate_zeroed(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        self.allocate_span(size, align, true).map(|span| span.start)
    }

    /// As [`Region::allocate`], or [`Region::allocate_zeroed`]. Says how much of the span can be used as well.
    ///
    /// # Errors
    /// As [`Region::allocate`].
    pub fn allocate_span(&self, size: usize, align: usize, zeroed: bool) -> Result<TakenSpan, AllocateError> {
        // What is large may have been zeroed ahead, which caches know nothing of.
        let cacheable = !zeroed || size < zeroing::ZERO_SOON;
        let Some(span) = cacheable.then(|| self.take_cached(size, align)).flatten() else {
            return self.allocate_for(size, align, if zeroed { Want::Zeroes } else { Want::Any });
        };
        if zeroed {
            let used = Range { start: span.start.as_ptr() as usize, len: colour::to_be_zeroed(size, span.len) };
            // SAFETY: the span belongs to this call, and is at least as long.
            unsafe { zero::zero(used, Use::Soon) };
            self.core().counters().zeroed_by_caller_bytes.add(used.len as u64);
        }
        Ok(span)
    }

    /// A span for whoever runs the region itself: it is not counted as the program's. `None` where there is none to be had.
    pub fn allocate_uncounted(&self, size: usize) -> Option<NonNull<u8>> {
        let len = round_up(size, PAGE_SIZE).filter(|&len| len > 0)?;
        let need = Need { len, class: 0, align: 1, want: Want::Any, huge: false, node: None };
        let mut grant = Grant::new();
        let zone = self.core().allocate(self.crew.topology(), need, &mut grant)?;
        Some(Self::pointer(zone.range.start + grant.offset))
    }

    /// The caches of spans before the region, for those who want nothing else of it most of the time.
    pub fn caches(&self) -> &CpuCaches {
        &self.core().caches
    }

    fn take_cached(&self, size: usize, align: usize) -> Option<TakenSpan> {
        if align > PAGE_SIZE || !align.is_power_of_two() {
            return None;
        }
        self.core().caches.take_slowly(size)
    }

    /// Hands out `size` bytes aligned to `align` without a page behind them: for a layer that keeps books of its own of what it touches.
    ///
    /// # Errors
    /// As [`Region::allocate`].
    pub(crate) fn allocate_unbacked(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        let core = self.core();
        let out_of_memory = AllocateError::OutOfMemory { size };
        let len = round_up(size, PAGE_SIZE).filter(|&len| len > 0 && !core.exceeds_memory(len)).ok_or(out_of_memory)?;
        let need = Need { len, class: 0, align, want: Want::AddressSpace, huge: core.options.huge_pages, node: None };
        let mut grant = Grant::new();
        let zone = core.allocate(self.crew.topology(), need, &mut grant).ok_or(out_of_memory)?;
        Ok(Self::pointer(zone.range.start + grant.offset))
    }

    fn allocate_for(&self, size: usize, align: usize, want: Want) -> Result<TakenSpan, AllocateError> {
        let core = self.core();
        let unsupported = AllocateError::Unsupported { size, align };
        if size == 0 || !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(unsupported);
        }
        let (len, class) = core.span_for(size).ok_or(unsupported)?;
        let out_of_memory = AllocateError::OutOfMemory { size };
        if core.exceeds_memory(len) {
            return Err(out_of_memory);
        }
        // A span with an alignment of its own does not wait for requests that have none.
        let class = if align > PAGE_SIZE { 0 } else { class };
        let huge = core.wants_huge_pages(len) || (align.min(len) >= HUGE_PAGE_SIZE && core.options.huge_pages);
        let need = Need { len, class, align, want, huge, node: None };
        let mut grant = Grant::new();
        let allocate = |grant: &mut Grant| core.allocate(self.crew.topology(), need, grant);
        let first = allocate(&mut grant);
        let retry = || self.reclaim_all().then(|| allocate(&mut grant)).flatten();
        let zone = first.or_else(retry).ok_or(out_of_memory)?;
        // The zone may have made it longer.
        let len = grant.len;
        let reused = grant.pieces.backed();
        let moved: usize = grant.transfers().iter().map(|transfer| transfer.len).sum();
        let fresh = (len - reused).saturating_sub(moved);
        let counts = Counts { allocations: 1, allocated_bytes: len as u64, reused_bytes: reused as u64, frees: 0 };
        core.note_request(len, counts);
        core.note_want(want, len, &grant.pieces);
        let span = zone.at(grant.offset, len);
        if reused == 0 && (!zone.huge || len >= ALIGNED_LEAST) {
            core.density.handed_out(span, |seen| core.first_use(seen));
        }
        if want == Want::Zeroes {
            let used = colour::to_be_zeroed(size, len);
            core.counters().zeroing_skipped_bytes.add(core.clear(&self.crew, zone, &grant, used) as u64);
        }
        if fresh > 0 {
            core.reserve_headroom(&self.crew, zone, fresh);
        }
        if core.wants_look() {
            core.wake(&self.crew, 0);
        }
        self.call_hook(len);
        // A guard takes its last page.
        let usable = if core.guards { zone.in_use_at(grant.offset).map_or(len, |span| span.usable()) } else { len };
        Ok(TakenSpan { start: Self::pointer(span.start), len: usable })
    }

    /// Ends the helpers and the watcher for good, waiting for what they are at. For a process that ends with its last thread: the C library
    /// runs what there is to do at the end on that thread, which must be one of the program's.
    pub fn dismiss_crew(&self) {
        self.crew.dismiss();
    }

    /// Has the watcher call `hook` from now on, if it has none yet.
    pub fn set_hook(&self, hook: Box<dyn Hook>) -> bool {
        self.core().hook.take(hook)
    }

    /// Has the watcher call the hook, which may have work besides spans.
    pub fn wake_hook(&self) {
        self.call_hook(HUGE_PAGE_SIZE);
    }

    fn call_hook(&self, usable: usize) {
        if self.core().hook.call(usable) {
            self.crew.watch();
        }
    }

    /// The spans in use that may be in huge pages; what is free is not among them.
    pub fn huge_spans(&self) -> Vec<Range> {
        self.core().huge_spans()
    }

    fn pointer(address: usize) -> NonNull<u8> {
        NonNull::new(address as *mut u8).expect("an arena is never mapped at address 0")
    }

    /// Where a pointer lies in the arena; beyond its end, if it doesn't.
    fn offset(&self, pointer: NonNull<u8>) -> usize {
        (pointer.as_ptr() as usize).wrapping_sub(self.core().range().start)
    }

    /// The zone that a pointer lies in and its offset there.
    fn place(&self, pointer: NonNull<u8>) -> Result<(&Zone, usize), PointerError> {
        let address = pointer.as_ptr() as usize;
        let zone = self.core().zone_of(address).ok_or(PointerError::Foreign(address))?;
        Ok((zone, address - zone.range.start))
    }

    /// What is wrong with a pointer at which no span begins.
    fn diagnose(zone: &Zone, inner: &Inner, offset: usize) -> PointerError {
        let address = zone.range.start + offset;
        // Where address space was given up, others may have mapped something.
        if !inner.map.owns(offset) {
            return PointerError::Foreign(address);
        }
        match inner.map.segment_of(offset) {
            Some((start, segment)) if segment.state == State::InUse && start != offset => {
                PointerError::Inside { address, start: zone.range.start + start }
            }
            _ => PointerError::NotInUse(address),
        }
    }

    /// The span in use at `pointer`, with its zone and its offset there.
    fn span_at(&self, pointer: NonNull<u8>) -> Result<(&Zone, usize, Segment), PointerError> {
        let (zone, offset) = self.place(pointer)?;
        match zone.in_use_at(offset) {
            Some(span) => Ok((zone, offset, span)),
            None if zone.gave_up(offset) => Err(PointerError::Foreign(zone.range.start + offset)),
            None => Err(Self::diagnose(zone, &zone.lock(), offset)),
        }
    }

    /// What may be used of the span that begins at `pointer`, in bytes: at least what was asked for.
    ///
    /// # Errors
    /// See [`PointerError`].
    pub fn usable_size(&self, pointer: NonNull<u8>) -> Result<usize, PointerError> {
        self.span_at(pointer).map(|(_, _, span)| span.usable())
    }

    /// Takes a span back. Returns in microseconds unless memory is given back faster than the crew can do it.
    ///
    /// # Safety
    /// The span's memory is not used any more.
    ///
    /// # Errors
    /// See [`PointerError`]; nothing has changed then.
    #[inline]
    pub unsafe fn free(&self, pointer: NonNull<u8>) -> Result<(), PointerError> {
        // SAFETY: by the function's own contract.
        unsafe {
            match self.core().caches.put(self.offset(pointer)) {
                Ok(()) => Ok(()),
                Err(why) => self.free_uncached(pointer, why).map(|_| ()),
            }
        }
    }

    /// What [`Region::free`] does where [`CpuCaches::put`] doesn't. Returns the length of the span in bytes.
    ///
    /// # Safety
    /// As [`Region::free`]; `why` is what [`CpuCaches::put`] has said of this pointer just now.
    ///
    /// # Errors
    /// As [`Region::free`].
    #[cold]
    #[inline(never)]
    pub unsafe fn free_uncached(&self, pointer: NonNull<u8>, why: Uncached) -> Result<usize, PointerError> {
        let core = self.core();
        let put = match why {
            // SAFETY: by the function's own contract.
            Uncached::AsItWas => unsafe { core.caches.put_slowly(self.offset(pointer)) },
            Uncached::Retired(span) => core.caches.put_retired(self.offset(pointer), span).map(|()| span.bytes()),
            Uncached::LookAfter(_) => Err(why),
        };
        match put {
            Ok(len) => Ok(len),
            // SAFETY: as above.
            Err(Uncached::AsItWas) => unsafe { self.free_span(pointer) },
            Err(Uncached::LookAfter(span)) => {
                let len = span.bytes();
                core.sum_up_here();
                core.wake(&self.crew, len);
                Ok(len)
            }
            Err(Uncached::Retired(span)) => {
                let (zone, offset) = self.place(pointer)?;
                let len = span.bytes();
                core.release_retired(zone, offset, true);
                core.note_request(len, Counts { frees: 1, ..Counts::default() });
                core.settle_retained(&self.crew, len);
                Ok(len)
            }
        }
    }

    /// Returns the length of the span in bytes.
    ///
    /// # Safety
    /// As [`Region::free`].
    unsafe fn free_span(&self, pointer: NonNull<u8>) -> Result<usize, PointerError> {
        let core = self.core();
        let (zone, offset, span) = self.span_at(pointer)?;
        if span.marks.fresh {
            if !span.marks.altered {
                // SAFETY: the span is mapped and, by the function's own contract, nobody uses it.
                unsafe { core.density.taken_back(zone.at(offset, span.len), zone.huge) };
            }
            // It may wait in a cache from now on.
            zone.clear_fresh(offset, span);
            // SAFETY: by the function's own contract.
            match unsafe { core.caches.put_slowly(self.offset(pointer)) } {
                Ok(len) => return Ok(len),
                Err(Uncached::AsItWas) => {}
                // SAFETY: as above.
                Err(why) => return unsafe { self.free_uncached(pointer, why) },
            }
        }
        let Some(mut inner) =
            zone.lock_unless(&core.forking).or_else(|| (!zone.retire_and_park(offset)).then(|| zone.lock()))
        else {
            return Ok(span.len);
        };
        core.remove_guard(zone, &mut inner, offset);
        core.note_came_back(&mut inner, span.len);
        let discard = inner.map.release(offset);
        core.publish(zone, &mut inner);
        drop(inner);
        core.note_request(span.len, Counts { frees: 1, ..Counts::default() });
        if let Some((offset, len)) = discard {
            core.discard(&self.crew, zone, offset, len);
        }
        core.settle_retained(&self.crew, span.len);
        Ok(span.len)
    }

    /// Backs the first `size` bytes of the span at `pointer` with pages now, in parallel.
    ///
    /// # Errors
    /// See [`PointerError`].
    pub fn populate(&self, pointer: NonNull<u8>, size: usize) -> Result<(), PointerError> {
        let (zone, offset, span) = self.span_at(pointer)?;
        let len = round_up(size, PAGE_SIZE).unwrap_or(span.usable()).min(span.usable());
        let range = Range { start: zone.range.start + offset, len };
        // SAFETY: the range is in use and mapped; populating changes no contents.
        unsafe { self.crew.run(Task { operation: Operation::Populate, range, node: 0, report: false }) };
        Ok(())
    }

    /// Has the pages of a part of a span come from the node with the kernel's number `node`, if the region places memory at all: for a layer
    /// that divides a span among nodes. The span is mapped anew when it is freed.
    pub(crate) fn place_apart(&self, range: Range, node: usize) {
        if self.core().placement.is_on() {
            self.mark_altered(range.start, range.len);
            // Where it is refused, pages come from the node of the CPU that touches them first.
            let _ = numa::prefer(range, node);
        }
    }

    /// From now on, memory comes from where the program's own NUMA policy says, and no longer from the node of the CPU on which it was asked
    /// for. What is retained was placed otherwise, and goes back. On a machine with one node, nothing happens.
    pub fn leave_placement(&self) {
        if self.core().leave_placement() {
            self.trim();
        }
    }

    /// Takes note that the program changed the kernel's view of `[address, address + len)` (advice, locks, protection): spans in
    /// it are not reused as they are.
    pub fn mark_altered(&self, address: usize, len: usize) {
        let core = self.core();
        let end = address.saturating_add(len);
        let mut at = address;
        while let Some(zone) = core.zone_of(at).filter(|_| at < end) {
            let mut inner = zone.lock();
            let offset = at - zone.range.start;
            let Some((start, segment)) = inner.map.segment_of(offset) else { return };
            inner.map.mark_altered(offset);
            at = zone.range.start + start + segment.len;
        }
    }

    /// Gives everything back that is retained, and returns when it is back.
    pub fn trim(&self) {
        self.trim_within(TRIM_PATIENCE);
    }

    /// A helper that is at its last chunk needs a moment, and is not waited for longer than `patience`.
    fn trim_within(&self, patience: Duration) {
        let core = self.core();
        let deadline = clock::now_ns() + patience.as_nanos() as u64;
        loop {
            core.call_off_zeroing();
            core.drain_caches();
            core.discard_down_to(&self.crew, 0, None);
            self.crew.assist(Operation::Discard, || false);
            if core.discarding() == 0 || clock::now_ns() > deadline {
                break;
            }
            self.crew.boost_all();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// After a refusal of the kernel: where it accounts for accessible memory, what is retained or on its way back may be what is
    /// missing. Returns whether there was any.
    fn reclaim_all(&self) -> bool {
        let core = self.core();
        // While the process forks, the zones are held.
        let any = core.retained() + core.discarding() > 0 && !core.forking.load(Ordering::SeqCst);
        if any {
            self.trim_within(REFUSED_PATIENCE);
        }
        any
    }

    /// Makes do with the address space that is in use, from now on: what is retained goes back, and what is only reserved is given
    /// up. For a program that sets itself a limit (`RLIMIT_AS`, `RLIMIT_DATA`) or locks what it will map: its own malloc serves it
    /// from there on. Returns whether there was anything to give up.
    pub fn tighten(&self) -> bool {
        self.core().caches.close();
        self.trim();
        self.core().zones.iter().filter(|zone| self.core().tighten(zone)).count() > 0
    }

    /// Free pages are not moved to where they are needed from now on: for a program that wants a `userfaultfd` of its own over spans, or has
    /// its system calls filtered.
    pub fn stop_transfers(&self) {
        self.core().stop_transfers();
    }

    /// Holds the region still for a fork. Call it before, then drop what it returns in the parent and hand it to
    /// [`RegionForkGuard::in_child`] in the child. Free memory is not copied into the child. Meanwhile no other thread waits for the region:
    /// what it can't get is refused, what it frees is taken back later.
    pub fn before_fork(&self) -> RegionForkGuard<'_> {
        let core = self.core();
        core.drain_caches();
        core.forking.store(true, Ordering::SeqCst);
        let mut zones: Vec<_> = core.zones.iter().map(Zone::lock_for_fork).collect();
        let roster = Some(self.crew.hold_for_fork());
        for (zone, held) in core.zones.iter().zip(&mut zones) {
            core.wipe_in_child(&mut held.inner, zone);
        }
        RegionForkGuard { region: self, zones, roster }
    }
}

impl RegionForkGuard<'_> {
    /// Makes the region of a forked child work: no helpers, nothing retained, counters at zero.
    ///
    /// # Safety
    /// Called in the child by its only thread.
    pub unsafe fn in_child(mut self) {
        let region = self.region;
        // Opens the locks; without zones, dropping the guard does nothing more.
        self.zones.clear();
        self.roster = None;
        drop(self);
        // SAFETY: by the function's own contract.
        unsafe {
            region.crew.forget_helpers();
            region.core().after_fork();
        }
    }
}

impl Drop for RegionForkGuard<'_> {
    /// In the parent.
    fn drop(&mut self) {
        let core = self.region.core();
        for (zone, held) in core.zones.iter().zip(&mut self.zones) {
            core.keep_in_child(&mut held.inner, zone);
        }
        core.forking.store(false, Ordering::SeqCst);
    }
}
