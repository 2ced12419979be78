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
//! [`Region::free`] returns in microseconds: the span is retained, or its pages are given back by the crew in parallel. What is
//! retained never raises the program's peak, goes back when nothing needed it for the decay time, and at once under pressure
//! (see [`policy`]). [`Region::allocate_zeroed`] takes memory that is known to be zero first.
//!
//! Sources: parallel free (Aaron Lu, 2017) and PG_zero (Liang Li, 2020), whose reviewers asked for the memory to be bounded, for
//! somebody to pay for the CPU, and not to zero what is small and hot.

mod arena;
mod core;
mod exit;
mod options;
pub mod policy;
mod retention;
mod rider;
pub(crate) mod signals;
pub mod spans;
#[cfg(test)]
mod tests;
mod zeroing;

pub use options::{NAMES, Name, OptionError, Options, Trim};
pub use rider::Rider;

use self::core::{Core, Inner, RegionCrew, Zone};
use crate::crew::{Crew, Employer, ForkGuard, Operation, Task};
use crate::stats::{Snapshot, StatsPage};
use crate::sys::memory::{self, Advice, Range};
use crate::sys::sched::{self, CpuSet};
use crate::sys::topology::Topology;
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, clock, round_up};
use spans::{Marks, State, Want};
use std::fmt;
use std::ptr::NonNull;
use std::sync::MutexGuard;
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
    zones: Vec<MutexGuard<'r, Inner>>,
    roster: Option<ForkGuard<'r>>,
}

impl Region {
    /// A region of this machine's shape, with helpers on the CPUs that the calling thread may use.
    ///
    /// # Errors
    /// `ENOMEM` if there is no address space for even a small arena.
    pub fn new(options: Options) -> Result<Region, Errno> {
        Region::with(options, sched::affinity().unwrap_or_default(), Topology::read())
    }

    /// A region with helpers on `cpus` and a zone for each node of `topology`.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn with(options: Options, cpus: CpuSet, topology: Topology) -> Result<Region, Errno> {
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
        self.stats().snapshot()
    }

    /// Hands out at least `size` bytes aligned to `align` (and to a page; from 2 MiB on, to a huge page). Their contents are
    /// undefined.
    ///
    /// # Errors
    /// See [`AllocateError`].
    pub fn allocate(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        self.allocate_for(size, align, Want::Any)
    }

    /// A span for whoever runs the region itself: it is not counted as the program's. `None` where there is none to be had.
    pub fn allocate_uncounted(&self, size: usize) -> Option<NonNull<u8>> {
        let usable = round_up(size, PAGE_SIZE).filter(|&usable| usable > 0)?;
        let (zone, grant) = self.core().allocate(self.crew.topology(), usable, 1, Want::Any)?;
        Some(Self::pointer(zone, grant.offset))
    }

    /// As [`Region::allocate`]; the first `size` bytes are zero.
    ///
    /// # Errors
    /// As [`Region::allocate`].
    pub fn allocate_zeroed(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        self.allocate_for(size, align, Want::Zeroes)
    }

    /// Hands out `size` bytes aligned to `align` without a page behind them: for a layer that keeps books of its own of what it touches.
    ///
    /// # Errors
    /// As [`Region::allocate`].
    pub(crate) fn allocate_bare(&self, size: usize, align: usize) -> Result<NonNull<u8>, AllocateError> {
        let core = self.core();
        let out_of_memory = AllocateError::OutOfMemory { size };
        let usable =
            round_up(size, PAGE_SIZE).filter(|&usable| usable > 0 && !core.absurd(usable)).ok_or(out_of_memory)?;
        let found = core.allocate(self.crew.topology(), usable, align, Want::AddressSpace);
        let (zone, grant) = found.ok_or(out_of_memory)?;
        for piece in grant.pieces.iter().filter(|piece| piece.backed > 0) {
            // SAFETY: the piece is part of the new span. A range of the region is never refused.
            let _ = unsafe { memory::discard(zone.at(piece.offset, piece.len)) };
        }
        Ok(Self::pointer(zone, grant.offset))
    }

    fn allocate_for(&self, size: usize, align: usize, want: Want) -> Result<NonNull<u8>, AllocateError> {
        let core = self.core();
        let supported = size > 0 && align.is_power_of_two() && align <= MAX_ALIGN;
        let usable =
            round_up(size, PAGE_SIZE).filter(|_| supported).ok_or(AllocateError::Unsupported { size, align })?;
        let out_of_memory = AllocateError::OutOfMemory { size };
        if core.absurd(usable) {
            return Err(out_of_memory);
        }
        let allocate = || core.allocate(self.crew.topology(), usable, align, want);
        let retry = || self.make_way().then(allocate).flatten();
        let (zone, grant) = allocate().or_else(retry).ok_or(out_of_memory)?;
        let reused = grant.pieces.iter().map(|piece| piece.backed).sum::<usize>().min(usable);
        let fresh = usable - reused;
        let counters = self.crew.employer().counters();
        counters.allocations.add(1);
        counters.allocated_bytes.add(usable as u64);
        counters.reused_bytes.add(reused as u64);
        core.note_call();
        core.note_want(want, usable, &grant.pieces);
        if want == Want::Zeroes {
            counters.zeroing_skipped_bytes.add(core.clear(&self.crew, zone, &grant, usable) as u64);
        }
        core.target_after_allocation(reused);
        if fresh > 0 {
            core.make_room(&self.crew, fresh);
        }
        self.call_rider(usable);
        Ok(Self::pointer(zone, grant.offset))
    }

    /// Has the watcher take `rider` along from now on, if it has none yet.
    pub fn take_along(&self, rider: Box<dyn Rider>) -> bool {
        self.core().seat.take(rider)
    }

    /// Has the watcher call the rider, which may have work besides spans.
    pub fn wake_rider(&self) {
        self.call_rider(HUGE_PAGE_SIZE);
    }

    fn call_rider(&self, usable: usize) {
        if self.core().seat.call(usable) {
            self.crew.watch();
        }
    }

    /// The spans in use that may be in huge pages; what is free is not among them.
    pub fn huge_spans(&self) -> Vec<Range> {
        self.core().huge_spans()
    }

    fn pointer(zone: &Zone, offset: usize) -> NonNull<u8> {
        NonNull::new((zone.range.start + offset) as *mut u8).expect("an arena is never mapped at address 0")
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
            Some((start, segment)) if segment.state == State::InUse => {
                PointerError::Inside { address, start: zone.range.start + start }
            }
            _ => PointerError::NotInUse(address),
        }
    }

    /// What may be used of the span that begins at `pointer`, in bytes: at least what was asked for.
    ///
    /// # Errors
    /// See [`PointerError`].
    pub fn usable_size(&self, pointer: NonNull<u8>) -> Result<usize, PointerError> {
        let (zone, offset) = self.place(pointer)?;
        let inner = zone.lock();
        inner.map.in_use_at(offset).map(|span| span.usable).ok_or_else(|| Self::diagnose(zone, &inner, offset))
    }

    /// Takes a span back. Returns in microseconds unless memory is given back faster than the crew can do it.
    ///
    /// # Safety
    /// The span's memory is not used any more.
    ///
    /// # Errors
    /// See [`PointerError`]; nothing has changed then.
    pub unsafe fn free(&self, pointer: NonNull<u8>) -> Result<(), PointerError> {
        let core = self.core();
        let (zone, offset) = self.place(pointer)?;
        let mut inner = zone.lock();
        let span = inner.map.in_use_at(offset).ok_or_else(|| Self::diagnose(zone, &inner, offset))?;
        let target = core.target_after_free(span.usable);
        let keep = core.keep(&span, target);
        core.remove_guard(zone, &mut inner, offset);
        let discard = inner.map.release(offset, core.backed(&span), keep);
        core.publish(zone, &mut inner);
        drop(inner);
        core.counters().frees.add(1);
        core.note_call();
        if let Some((offset, len)) = discard {
            core.discard(&self.crew, zone, offset, len);
        }
        core.wake(&self.crew, span.len);
        Ok(())
    }

    /// Makes the span at `pointer` at least `size` bytes long, keeping its contents up to the shorter length: where it is if
    /// the address space behind it is free, else by moving its pages. Returns where it is now; if that is another place, the old
    /// pointer is not to be used any more.
    ///
    /// # Safety
    /// Nobody else uses the span meanwhile.
    ///
    /// # Errors
    /// [`ResizeError`]; the span is as it was then.
    pub unsafe fn resize(&self, pointer: NonNull<u8>, size: usize) -> Result<NonNull<u8>, ResizeError> {
        let refused = ResizeError::Memory(AllocateError::OutOfMemory { size });
        let usable = round_up(size.max(1), PAGE_SIZE).filter(|&usable| !self.core().absurd(usable)).ok_or(refused)?;
        self.core().counters().reallocations.add(1);
        // SAFETY: by the function's own contract; a span that could not be resized is as it was.
        unsafe {
            match self.resize_once(pointer, size, usable) {
                Err(ResizeError::Memory(_)) if self.make_way() => self.resize_once(pointer, size, usable),
                result => result,
            }
        }
    }

    /// # Safety
    /// As [`Region::resize`]; `usable` is `size` in whole pages.
    unsafe fn resize_once(&self, pointer: NonNull<u8>, size: usize, usable: usize) -> Result<NonNull<u8>, ResizeError> {
        let core = self.core();
        let (zone, offset) = self.place(pointer)?;
        let refused = ResizeError::Memory(AllocateError::OutOfMemory { size });
        let len = core.len_in(zone, usable).ok_or(refused)?;
        let mut guard = zone.lock();
        let inner = &mut *guard;
        let span = inner.map.in_use_at(offset).ok_or_else(|| Self::diagnose(zone, inner, offset))?;
        // A span that becomes small enough to be packed moves to where spans are packed, and the other way round.
        let fits_kind = (zone.granule == HUGE_PAGE_SIZE) == (usable >= HUGE_PAGE_SIZE);
        if !fits_kind {
            drop(guard);
            // SAFETY: by the function's own contract.
            return unsafe { self.copy_to_new(pointer, span.usable, size) };
        }
        core.remove_guard(zone, inner, offset);
        if len <= span.len {
            let target = core.target_after_free(span.usable.saturating_sub(usable));
            let keep = core.keep(&span, target);
            let discard = inner.map.shrink(offset, len, usable, core.backed(&span), keep);
            core.publish(zone, inner);
            drop(guard);
            core.settle_tail(zone, offset, usable, len, false);
            if let Some((offset, len)) = discard {
                core.discard(&self.crew, zone, offset, len);
            }
            return Ok(pointer);
        }
        if let Some(pieces) = inner.map.grow(offset, len, usable, core.can_revoke()) {
            if core.open_up(zone, inner, &pieces) {
                core.publish(zone, inner);
                drop(guard);
                core.settle_tail(zone, offset, usable, len, Core::bare(&pieces, offset + usable));
                core.counters().grown_in_place_bytes.add((len - span.len) as u64);
                core.make_room(&self.crew, usable - span.usable);
                return Ok(pointer);
            }
            // The kernel refused the growth: the span is cut back, and what was added goes back through the usual way.
            let back = inner.map.shrink(offset, span.len, span.usable, len, 0);
            core.publish(zone, inner);
            drop(guard);
            core.settle_tail(zone, offset, span.usable, span.len, false);
            if let Some((offset, len)) = back {
                core.discard(&self.crew, zone, offset, len);
            }
            return Err(refused);
        }
        drop(guard);
        if span.len < HUGE_PAGE_SIZE || !core.may_move() {
            // SAFETY: by the function's own contract.
            return unsafe { self.copy_to_new(pointer, span.usable, size) };
        }
        let Some((new_zone, grant)) = core.allocate(self.crew.topology(), usable, 1, Want::AddressSpace) else {
            core.settle_tail(zone, offset, span.usable, span.len, false);
            return Err(refused);
        };
        let from = Range { start: zone.range.start + offset, len: span.len };
        // SAFETY: `from` is the span of the caller, which does not use it meanwhile; the new span belongs to this call.
        if unsafe { memory::move_pages(from, new_zone.range.start + grant.offset) }.is_err() {
            // SAFETY: the new span is this call's own.
            let _ = unsafe { self.free(Self::pointer(new_zone, grant.offset)) };
            // SAFETY: by the function's own contract.
            return unsafe { self.copy_to_new(pointer, span.usable, size) };
        }
        core.counters().moved_bytes.add(span.len as u64);
        core.count_moved(true);
        // Advice and locks move with the pages; the guard behind the old span was removed, the new one has its own.
        new_zone.lock().map.mark(grant.offset, Marks { moved: true, guarded: false, bare: false, ..span.marks });
        let mut inner = zone.lock();
        let discard = inner.map.release(offset, span.len, 0);
        core.publish(zone, &mut inner);
        drop(inner);
        if let Some((offset, len)) = discard {
            core.discard(&self.crew, zone, offset, len);
        }
        Ok(Self::pointer(new_zone, grant.offset))
    }

    /// # Safety
    /// As [`Region::resize`]; the span has `usable` bytes.
    unsafe fn copy_to_new(&self, pointer: NonNull<u8>, usable: usize, size: usize) -> Result<NonNull<u8>, ResizeError> {
        let new = self.allocate(size, 1)?;
        let count = usable.min(size);
        // SAFETY: both spans are at least `count` bytes long and different; the old one belongs to the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(pointer.as_ptr(), new.as_ptr(), count);
            self.free(pointer)?;
        }
        self.core().counters().copied_bytes.add(count as u64);
        Ok(new)
    }

    /// Backs the first `size` bytes of the span at `pointer` with pages now, in parallel.
    ///
    /// # Errors
    /// See [`PointerError`].
    pub fn populate(&self, pointer: NonNull<u8>, size: usize) -> Result<(), PointerError> {
        let (zone, offset) = self.place(pointer)?;
        let inner = zone.lock();
        let span = inner.map.in_use_at(offset).ok_or_else(|| Self::diagnose(zone, &inner, offset))?;
        drop(inner);
        let len = round_up(size, PAGE_SIZE).unwrap_or(span.usable).min(span.usable);
        let range = Range { start: zone.range.start + offset, len };
        // SAFETY: the range is in use and mapped; populating changes no contents.
        unsafe { self.crew.run(Task { operation: Operation::Populate, range, node: 0, report: false }) };
        Ok(())
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
            if segment.state == State::InUse {
                inner.map.mark(offset, Marks { altered: true, ..Marks::default() });
            }
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
            core.discard_down_to(&self.crew, 0);
            self.crew.assist(Operation::Discard, || false);
            if core.retained() + core.discarding() == 0 || clock::now_ns() > deadline {
                break;
            }
            self.crew.hurry();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// After a refusal of the kernel: where it accounts for accessible memory, what is retained or on its way back may be what is
    /// missing. Returns whether there was any.
    fn make_way(&self) -> bool {
        let any = self.core().retained() + self.core().discarding() > 0;
        if any {
            self.trim_within(REFUSED_PATIENCE);
        }
        any
    }

    /// Makes do with the address space that is in use, from now on: what is retained goes back, and what is only reserved is given
    /// up. For a program that sets itself a limit (`RLIMIT_AS`, `RLIMIT_DATA`) or locks what it will map: its own malloc serves it
    /// from there on. Returns whether there was anything to give up.
    pub fn tighten(&self) -> bool {
        self.trim();
        self.core().zones.iter().filter(|zone| self.core().tighten(zone)).count() > 0
    }

    /// Holds the region still for a fork. Call it before, then drop what it returns in the parent and hand it to
    /// [`RegionForkGuard::in_child`] in the child. Free memory is not copied into the child.
    pub fn before_fork(&self) -> RegionForkGuard<'_> {
        let zones: Vec<_> = self.core().zones.iter().map(Zone::lock).collect();
        let roster = Some(self.crew.hold_for_fork());
        for (zone, inner) in self.core().zones.iter().zip(&zones) {
            self.core().wipe_in_child(inner, zone, Advice::WipeOnFork);
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
        for (zone, inner) in self.region.core().zones.iter().zip(&self.zones) {
            self.region.core().wipe_in_child(inner, zone, Advice::KeepOnFork);
        }
    }
}

/// Why a span could not be resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeError {
    /// The pointer is wrong.
    Pointer(PointerError),
    /// There is no memory.
    Memory(AllocateError),
}

impl From<PointerError> for ResizeError {
    fn from(error: PointerError) -> ResizeError {
        ResizeError::Pointer(error)
    }
}

impl From<AllocateError> for ResizeError {
    fn from(error: AllocateError) -> ResizeError {
        ResizeError::Memory(error)
    }
}

impl fmt::Display for ResizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ResizeError::Pointer(error) => error.fmt(f),
            ResizeError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ResizeError {}
