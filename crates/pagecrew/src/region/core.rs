//! What a region consists of: its zones, their spans with guards and tails, and what its crew wants to know.
//!
//! Lock order: a zone's map, then nothing. No lock is held while the crew is called.

use super::arena::{self, Arena, ZONE_ALIGN};
use super::options::Options;
use super::retention::Retention;
use super::rider::{self, Seat};
use super::spans::{Grant, Marks, Piece, Segment, SpanMap, State, Want};
use super::zeroing::Zeroing;
use crate::crew::ahead::Revoked;
use crate::crew::{Crew, Employer, Task, Tick};
use crate::stats::{Counters, StatsPage};
use crate::sys::memory::{self, Advice, Protection, Range};
use crate::sys::topology::{MAX_NODES, Topology};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, procfs, sched};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// More moved spans than this, and pages are copied instead: each may cost two mappings of `vm.max_map_count` (65,530).
const MOVED_MOST: usize = 8192;
/// The last huge page of a span is kept from becoming one where more than this, or than this share of the span, would be wasted.
const WASTE_MOST: usize = 512 << 10;
const WASTE_SHARE: usize = 32;

/// A part of the arena for spans of one kind on one node.
pub(super) struct Zone {
    pub range: Range,
    pub granule: usize,
    pub node: usize,
    /// Whether huge pages are wanted; `None` leaves it to the system.
    huge_pages: Option<bool>,
    inner: Mutex<Inner>,
}

pub(super) struct Inner {
    pub map: SpanMap,
    /// Address up to which the zone is accessible.
    frontier: usize,
    /// What this zone last added to the region's sums.
    retained: usize,
    discarding: usize,
    in_use: usize,
}

/// The shared part of a region; the crew's employer.
pub struct Core {
    pub(super) options: Options,
    arena: Arena,
    pub(super) zones: Vec<Zone>,
    zone_stride: usize,
    packed_len: usize,
    pub(super) stats: StatsPage,
    /// Sums over the zones.
    retained: AtomicUsize,
    discarding: AtomicUsize,
    in_use: AtomicUsize,
    pub(super) retention: Retention,
    pub(super) zeroing: Zeroing,
    pub(super) seat: Seat,
    /// The machine's memory, and the largest request that heuristic overcommit would grant, in bytes.
    machine: usize,
    largest: usize,
    moved: AtomicUsize,
    guards_work: bool,
}

/// A handle for all that needs the crew.
pub(super) type RegionCrew = Crew<Core>;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Zone {
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub fn unlocked(&self) -> bool {
        self.inner.try_lock().is_ok()
    }

    pub fn at(&self, offset: usize, len: usize) -> Range {
        Range { start: self.range.start + offset, len }
    }
}

/// Whether the kernel has guard pages without mappings of their own (6.13).
fn guards_work() -> bool {
    let Ok(start) = memory::map(PAGE_SIZE, Protection::ReadWrite) else { return false };
    let page = Range { start, len: PAGE_SIZE };
    // SAFETY: the page was mapped above and nobody else knows of it.
    unsafe {
        let works = memory::advise(page, Advice::GuardInstall).is_ok();
        let _ = memory::unmap(page);
        works
    }
}

impl Core {
    pub fn new(options: Options, topology: &Topology) -> Result<Core, Errno> {
        let memory = procfs::memory_info().ok();
        let total = memory.map_or(64 << 30, |memory| memory.total as usize);
        let largest = memory.filter(|_| !arena::always_overcommits());
        let largest = largest.map_or(usize::MAX, |memory| (memory.total + memory.swap) as usize);
        let nodes = topology.nodes();
        // Much more address space than memory, so that fragmentation of it never matters.
        let wanted = (16 * total).next_power_of_two().clamp(64 << 30, 64 << 40);
        let arena = Arena::reserve(wanted, nodes * 64 * HUGE_PAGE_SIZE)?;
        let stats = StatsPage::new()?;
        let align = if arena.range().len >= nodes * 8 * ZONE_ALIGN { ZONE_ALIGN } else { HUGE_PAGE_SIZE };
        let zone_stride = (arena.range().len / nodes) & !(align - 1);
        let packed_len = (zone_stride / 8) & !(align - 1);
        let mut zones = Vec::with_capacity(2 * nodes);
        for node in 0..nodes {
            let start = arena.range().start + node * zone_stride;
            let packed = Range { start, len: packed_len };
            let whole = Range { start: start + packed_len, len: zone_stride - packed_len };
            for (range, granule, huge_pages) in
                [(packed, PAGE_SIZE, None), (whole, HUGE_PAGE_SIZE, Some(options.huge_pages))]
            {
                arena::advise_huge_pages(range, huge_pages);
                let map = SpanMap::new(range.len, granule);
                stats.zones[zones.len()].publish(map.bytes());
                let inner = Inner { map, frontier: range.start, retained: 0, discarding: 0, in_use: 0 };
                zones.push(Zone { range, granule, node, huge_pages, inner: Mutex::new(inner) });
            }
        }
        stats.set_zone_count(zones.len());
        let retention = Retention::new(&options);
        Ok(Core {
            guards_work: guards_work(),
            options,
            arena,
            zones,
            zone_stride,
            packed_len,
            stats,
            retained: AtomicUsize::new(0),
            discarding: AtomicUsize::new(0),
            in_use: AtomicUsize::new(0),
            retention,
            zeroing: Zeroing::new(),
            seat: Seat::default(),
            machine: total,
            largest,
            moved: AtomicUsize::new(0),
        })
    }

    /// The addresses that spans come from.
    pub fn range(&self) -> Range {
        self.arena.range()
    }

    /// The zone that `address` lies in.
    pub fn zone_of(&self, address: usize) -> Option<&Zone> {
        let offset = address.checked_sub(self.arena.range().start)?;
        let node = offset / self.zone_stride;
        let whole = (offset % self.zone_stride >= self.packed_len) as usize;
        self.zones.get(2 * node + whole).filter(|zone| address < zone.range.end())
    }

    /// Bytes that are free and backed.
    pub fn retained(&self) -> usize {
        self.retained.load(Ordering::Relaxed)
    }

    /// Bytes of the spans that are in use.
    pub fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }

    /// The machine's memory in bytes.
    pub fn machine(&self) -> usize {
        self.machine
    }

    /// Bytes on their way back to the kernel.
    pub fn discarding(&self) -> usize {
        self.discarding.load(Ordering::Relaxed)
    }

    /// Brings the published states and the region's sums up to date with a zone; called before its lock is opened.
    pub fn publish(&self, zone: &Zone, inner: &mut Inner) {
        let index = 2 * zone.node + (zone.granule == HUGE_PAGE_SIZE) as usize;
        self.stats.zones[index].publish(inner.map.bytes());
        let (retained, discarding) = (inner.map.retained(), inner.map.discarding());
        // Wrapping: the sums of differences are right whatever their order.
        let moved = |sum: &AtomicUsize, now: usize, before: usize| {
            let difference = now.wrapping_sub(before);
            sum.fetch_add(difference, Ordering::Relaxed).wrapping_add(difference)
        };
        let in_use = inner.map.used();
        let all_retained = moved(&self.retained, retained, inner.retained);
        moved(&self.discarding, discarding, inner.discarding);
        self.retention.note(all_retained, moved(&self.in_use, in_use, inner.in_use));
        (inner.retained, inner.discarding, inner.in_use) = (retained, discarding, in_use);
    }

    /// The node that the calling thread runs on.
    fn node(&self, topology: &Topology) -> usize {
        if topology.nodes() == 1 { 0 } else { topology.node_of(sched::current_cpu()).min(MAX_NODES - 1) }
    }

    /// Length of a span for `usable` bytes in a zone of this granule, a guard included.
    fn span_len(&self, usable: usize, granule: usize) -> Option<usize> {
        let guard = if self.options.guards && self.guards_work { PAGE_SIZE } else { 0 };
        crate::sys::round_up(usable.checked_add(guard)?, granule)
    }

    /// Cuts a span out of a zone of the calling thread's node, or of another if that is full.
    pub fn allocate(&self, topology: &Topology, usable: usize, align: usize, want: Want) -> Option<(&Zone, Grant)> {
        let whole = (usable >= HUGE_PAGE_SIZE || align >= HUGE_PAGE_SIZE) as usize;
        let own = self.node(topology);
        (0..topology.nodes()).find_map(|step| {
            let zone = &self.zones[2 * ((own + step) % topology.nodes()) + whole];
            self.allocate_in(zone, usable, align, want).map(|grant| (zone, grant))
        })
    }

    fn allocate_in(&self, zone: &Zone, usable: usize, align: usize, want: Want) -> Option<Grant> {
        // A small arena, as under RLIMIT_AS, is not aligned to more than a huge page.
        let len = self.span_len(usable, zone.granule).filter(|_| zone.range.start.is_multiple_of(align))?;
        let mut guard = zone.lock();
        let inner = &mut *guard;
        if want == Want::Zeroes {
            self.take_in(zone, inner);
        }
        let grant = inner.map.allocate(len, usable, align, want, self.can_revoke())?;
        if !self.open_up(zone, inner, &grant.pieces) {
            inner.map.undo(&grant);
            self.publish(zone, inner);
            return None;
        }
        self.publish(zone, inner);
        drop(guard);
        self.settle_tail(zone, grant.offset, usable, grant.len, Self::bare(&grant.pieces, grant.offset + usable));
        Some(grant)
    }

    /// Takes pieces away from the helper that zeroes them, and makes those accessible that are not. Called with the zone locked.
    /// Returns whether the kernel granted it.
    pub fn open_up(&self, zone: &Zone, inner: &mut Inner, pieces: &[Piece]) -> bool {
        for piece in pieces {
            let State::Zeroing(slot) = piece.state else { continue };
            match self.zeroing.ahead.revoke(slot) {
                Revoked::Idle => {}
                Revoked::Interrupted => self.counters().stragglers_bypassed.add(1),
                // Happens SLOTS times at most, since nothing is set out after that.
                Revoked::StillAtIt => {
                    while !self.zeroing.ahead.has_let_go(slot) {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            }
        }
        let reserved =
            pieces.iter().filter(|piece| piece.state == State::Reserved).map(|piece| zone.at(piece.offset, piece.len));
        self.arena.commit(reserved, &mut inner.frontier, zone.range.end()).is_ok()
    }

    /// Whether a huge page at the end of the span would waste much.
    fn wasteful(&self, zone: &Zone, usable: usize, len: usize) -> bool {
        zone.huge_pages == Some(true) && len - usable > WASTE_MOST.min(usable / WASTE_SHARE)
    }

    /// Whether none of the pieces has pages behind `offset`.
    pub fn bare(pieces: &[Piece], offset: usize) -> bool {
        pieces.iter().all(|piece| piece.backed == 0 || piece.offset + piece.len <= offset)
    }

    /// Sees to the tail of a span, behind what the program may use; `bare` says that it has no pages.
    ///
    /// A guard page is put there where the user asked for guards, and in an incomplete last huge page that would waste much: a page table
    /// with a guard in it can't become a huge page. Pages of another span's time would be nobody's, neither in use nor retained.
    pub fn settle_tail(&self, zone: &Zone, offset: usize, usable: usize, len: usize, bare: bool) {
        if len - usable < PAGE_SIZE {
            return;
        }
        let tail = zone.at(offset + usable, len - usable);
        let small_pages = zone.huge_pages != Some(true);
        let wasteful = self.wasteful(zone, usable, len);
        // SAFETY: the tail is part of the span, and nobody needs what it holds.
        let bare = bare || ((wasteful || small_pages) && unsafe { memory::discard(tail) }.is_ok());
        let guard = Range { len: PAGE_SIZE, ..tail };
        let guarded = (self.options.guards || wasteful)
            && self.guards_work
            // SAFETY: the page is part of the span and behind what the program may use.
            && unsafe { memory::advise(guard, Advice::GuardInstall) }.is_ok();
        let marks = Marks { guarded, bare: bare && (guarded || small_pages), ..Marks::default() };
        if marks.guarded || marks.bare {
            zone.lock().map.mark(offset, marks);
        }
    }

    /// How much of a span may have pages. Behind what the program may use, a huge page may reach to the end; and where access rights
    /// follow use exactly, what is free has to lose them.
    pub fn backed(&self, span: &Segment) -> usize {
        if span.marks.bare && !self.arena.exact() { span.usable } else { span.len }
    }

    /// Whether a request is larger than all memory and swap: the kernel's heuristic overcommit refuses those, and a program that
    /// asks for one expects the refusal rather than to be killed later.
    pub fn absurd(&self, size: usize) -> bool {
        size > self.largest
    }

    /// Takes note that a span's pages were moved, or that it was mapped anew.
    pub fn count_moved(&self, moved: bool) {
        if moved {
            self.moved.fetch_add(1, Ordering::Relaxed);
        } else {
            let _ = self.moved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
        }
    }

    /// Whether one more span may be moved without coming near the kernel's limit of mappings.
    pub fn may_move(&self) -> bool {
        self.moved.load(Ordering::Relaxed) < MOVED_MOST
    }

    /// Removes the guard behind a span, before it is freed or resized: free memory has none. Called with the zone locked.
    pub fn remove_guard(&self, zone: &Zone, inner: &mut Inner, offset: usize) {
        let Some(span) = inner.map.in_use_at(offset) else { return };
        if span.marks.guarded {
            // SAFETY: this kind of advice changes no contents.
            let _ = unsafe { memory::advise(zone.at(offset + span.usable, PAGE_SIZE), Advice::GuardRemove) };
        }
        inner.map.unmark_tail(offset);
    }

    /// As [`Core::span_len`] for the zone's granule.
    pub fn len_in(&self, zone: &Zone, usable: usize) -> Option<usize> {
        self.span_len(usable, zone.granule)
    }

    /// Gives up the address space of a zone that is not in use. Returns whether there was any.
    pub fn tighten(&self, zone: &Zone) -> bool {
        let mut inner = zone.lock();
        self.arena.be_exact();
        let given_up = inner.map.give_up();
        for &(offset, len) in &given_up {
            // SAFETY: address space that no span has; the map never hands it out again.
            unsafe { self.arena.give_up(zone.at(offset, len)) };
        }
        self.publish(zone, &mut inner);
        !given_up.is_empty()
    }

    /// Before a fork: the ranges that a child does not need are marked so that the kernel does not copy them.
    pub fn wipe_in_child(&self, inner: &Inner, zone: &Zone, advice: Advice) {
        for (offset, segment) in inner.map.backed() {
            if Self::wiped(&segment) {
                // SAFETY: this kind of advice changes no contents here; in the child, nobody needs free memory.
                let _ = unsafe { memory::advise(zone.at(offset, segment.len), advice) };
            }
        }
    }

    /// Whether a free segment is worth two system calls at each fork.
    fn wiped(segment: &Segment) -> bool {
        segment.len >= HUGE_PAGE_SIZE
    }

    /// In a forked child: what was retained is address space again, and everything counts from zero.
    ///
    /// # Safety
    /// Called by the child's only thread, with no lock held.
    pub unsafe fn after_fork(&self) {
        // The watcher or a helper of the parent may have held these locks; it does not exist here.
        // SAFETY: by the function's own contract, nobody is inside or waiting.
        unsafe {
            self.retention.after_fork(&self.options);
            self.zeroing.after_fork();
            self.seat.after_fork();
            let _ = self.stats.detach();
        }
        for zone in &self.zones {
            let mut inner = zone.lock();
            self.wipe_in_child(&inner, zone, Advice::KeepOnFork);
            let odd: Vec<_> = inner.map.backed().filter(|(_, segment)| segment.marks.remap()).collect();
            for (offset, segment) in odd {
                // SAFETY: free memory, which nobody uses. A range that could not be mapped anew is not used again either.
                if unsafe { self.arena.renew(zone.at(offset, segment.len), zone.huge_pages) }.is_err() {
                    inner.map.lose(offset);
                }
            }
            inner.map.after_fork(|segment| Self::wiped(segment) || segment.marks.remap());
            self.publish(zone, &mut inner);
        }
    }
}

impl Employer for Core {
    fn finished(&self, task: Task) {
        let zone = self.zone_of(task.range.start).expect("only ranges of the arena are reported");
        let offset = task.range.start - zone.range.start;
        let marks = zone.lock().map.discarding_marks(offset);
        let remap = marks.remap() || self.arena.exact();
        if remap {
            // SAFETY: nobody uses a range in state `Discarding`.
            if unsafe { self.arena.renew(task.range, zone.huge_pages) }.is_err() {
                // It may not even be mapped any more. It stays as it is and is never handed out again.
                return;
            }
            if marks.moved {
                self.count_moved(false);
            }
        }
        let mut inner = zone.lock();
        inner.map.finish_discard(offset, task.range.len, remap);
        self.publish(zone, &mut inner);
    }

    fn work_ahead(&self, crew: &RegionCrew) -> bool {
        self.zero_one_ahead(crew)
    }

    fn watch(&self, crew: &RegionCrew) -> Tick {
        rider::sooner(self.look(crew), self.ride())
    }

    fn counters(&self) -> &Counters {
        &self.stats.counters
    }
}
