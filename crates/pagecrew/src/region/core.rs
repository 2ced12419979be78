//! What a region consists of: its zones with what lies in them, the caches before them, and what its crew wants to know.
//!
//! Lock order: a zone's map, then its frontier, then nothing. No lock is held while the crew is called.

use super::arena::{self, Arena, ZONE_ALIGN};
use super::cache::{ARENA_MOST, CpuCaches};
use super::classes::{self, ALIGNED_LEAST};
use super::density::Density;
use super::hook::{self, HookSlot};
use super::lanes::{self, Lanes};
use super::options::Options;
use super::page_map::PageMap;
use super::placement::Placement;
use super::retention::Retention;
use super::reuse::Reuse;
use super::slow_counts::{Counts, SlowCounts};
use super::spans::{Grant, Marks, Pieces, Request, Segment, SpanMap, State, TRANSFERS, Transfer, Want};
use super::transfer::{Outcome, Transfers};
use super::zeroing::Zeroing;
use crate::crew::ahead::Revoked;
use crate::crew::{Crew, Employer, Task, Tick};
use crate::stats::{Counters, MAX_LANES, MAX_ZONES, StatsPage};
use crate::sys::memory::{self, Advice, Protection, Range};
use crate::sys::topology::{self, Topology};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, procfs, sched};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// More moved spans than this, and pages are copied instead: each may cost two mappings of `vm.max_map_count` (65,530).
const MOVED_MOST: usize = 8192;
/// Spans that are freed while another thread forks wait here for the lock: more than threads can have freed in that moment.
const PARKED: usize = 64;
/// No more than this is moved to one new span: the caller may not touch all of it.
const TRANSFER_MOST: usize = 64 << 20;

/// Longer spans all come from the first lane: what a program does with more memory costs it more than a lock, and in one zone more of it fits.
const LANES_MOST: usize = 16 << 20;

/// What a zone of a lane may lack in the region's sums: this part of the program's peak, and no more than that.
const UNSUMMED_SHARE: usize = 64;
const UNSUMMED_MOST: usize = 8 << 20;

/// A part of the arena for one lane of one node, with small pages or with huge pages.
#[repr(align(128))]
pub(super) struct Zone {
    pub range: Range,
    /// Its place in the arena.
    number: usize,
    pub node: usize,
    /// Whether its spans may be in huge pages.
    pub huge: bool,
    /// What is said about huge pages; `None` leaves it to the system.
    advice: Option<bool>,
    /// What begins where: the same that the map inside the lock uses.
    pages: Arc<PageMap>,
    inner: Mutex<Inner>,
    /// Address up to which the zone is accessible. The lock is for moving it.
    frontier: AtomicUsize,
    frontier_lock: Mutex<()>,
    /// Offset from which on nothing is the zone's any more: others may map something there, which is freed without the lock.
    end: AtomicUsize,
    /// Of what was handed out, bytes that wait in caches, as last summed up, for all lanes of the node in the zone of its first; wraps.
    cached: AtomicUsize,
    /// Bytes that are retained here, as last published.
    pub retained: AtomicUsize,
    /// Whether the region's sums lack something of this zone.
    unsummed: AtomicBool,
    /// Threads that wait for the lock.
    waiting: AtomicUsize,
    /// Pages and one of spans that wait for the lock to be free; 0 for none.
    parked: Box<[AtomicUsize]>,
}

/// What is said of a zone when it is made.
struct Kind {
    node: usize,
    huge: bool,
    advice: Option<bool>,
}

pub(super) struct Inner {
    pub map: SpanMap,
    reuse: Reuse,
    /// What this zone last added to the region's sums.
    retained: usize,
    discarding: usize,
    used: usize,
}

/// A zone that is held still for a fork.
pub(super) struct ZoneForkGuard<'z> {
    pub inner: MutexGuard<'z, Inner>,
    _frontier: MutexGuard<'z, ()>,
}

/// The shared part of a region; the crew's employer.
pub struct Core {
    pub(super) options: Options,
    pub(super) arena: Arena,
    pub(super) zones: Vec<Zone>,
    /// Each zone has 2^this bytes.
    zone_shift: u32,
    pub(super) placement: Placement,
    pub(super) lanes: Lanes,
    pub(super) caches: CpuCaches,
    slow_counts: SlowCounts,
    pub(super) stats: StatsPage,
    sums: Sums,
    pub(super) retention: Retention,
    pub(super) zeroing: Zeroing,
    pub(super) density: Density,
    pub(super) transfers: Transfers,
    pub(super) hook: HookSlot,
    /// The machine's memory, and the largest request that heuristic overcommit would grant, in bytes.
    machine: usize,
    largest: AtomicUsize,
    /// Whether spans end with a guard.
    pub(super) guards: bool,
    /// Whether a thread is about to fork, holds the zones, and may be waiting for one that wants them.
    pub(super) forking: AtomicBool,
}

/// Sums over the zones, in bytes. Each request that no cache serves changes some of them, so they have lines of their own.
#[derive(Default)]
#[repr(align(128))]
struct Sums {
    /// What is retained, with small pages and with huge pages.
    retained: [AtomicUsize; 2],
    used: AtomicUsize,
    /// What of `used` lies in caches, as `retained`.
    cached: [AtomicUsize; 2],
    discarding: AtomicUsize,
}

/// What a span has to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    /// Length in bytes, whole pages.
    pub len: usize,
    /// Its size class, counted from 1; 0 for none.
    pub class: u8,
    pub align: usize,
    pub want: Want,
    /// Whether it is to have huge pages.
    pub huge: bool,
    /// The node whose memory it is to have; `None` for that of the calling thread's CPU.
    pub node: Option<usize>,
}

/// A handle for all that needs the crew.
pub(super) type RegionCrew = Crew<Core>;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sum of differences of which some may be missing for a moment.
fn not_below_zero(sum: usize) -> usize {
    sum.cast_signed().max(0) as usize
}

impl Zone {
    /// A zone of `range`, the one with this `number`, for CPUs with numbers below `cpus`. With `exact`, only what is in use or retained may be
    /// accessible.
    fn new(range: Range, number: usize, kind: Kind, pages: PageMap, exact: bool, cpus: usize) -> Result<Zone, Errno> {
        let Kind { node, huge, advice } = kind;
        let granule = if huge { HUGE_PAGE_SIZE } else { PAGE_SIZE };
        let map = if exact { SpanMap::exact(pages, granule) } else { SpanMap::on(pages, granule) }?;
        Ok(Zone {
            range,
            number,
            node,
            huge,
            advice,
            pages: map.page_map(),
            inner: Mutex::new(Inner { map, reuse: Reuse::new(cpus), retained: 0, discarding: 0, used: 0 }),
            frontier: AtomicUsize::new(range.start),
            frontier_lock: Mutex::new(()),
            end: AtomicUsize::new(range.len),
            cached: AtomicUsize::new(0),
            retained: AtomicUsize::new(0),
            unsummed: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            parked: (0..PARKED).map(|_| AtomicUsize::new(0)).collect(),
        })
    }

    /// Locks the zone. Spans that could not be freed while another thread was forking are taken back first.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.unpark(lock(&self.inner))
    }

    fn unpark<'z>(&'z self, mut inner: MutexGuard<'z, Inner>) -> MutexGuard<'z, Inner> {
        if self.parked[0].load(Ordering::Relaxed) != 0 {
            for place in self.parked.iter() {
                let page = place.swap(0, Ordering::Acquire);
                // What the program altered has to be given back first, and waits as a span until the next fork.
                if let Some(page) = page.checked_sub(1) {
                    inner.map.release_retained(page * PAGE_SIZE);
                }
            }
        }
        inner
    }

    /// As [`Zone::lock`] for a thread of the program. `None` while another thread is forking: it may hold the zone and wait for a lock of
    /// the C library that the caller holds.
    pub fn lock_unless(&self, forking: &AtomicBool) -> Option<MutexGuard<'_, Inner>> {
        self.try_lock().or_else(|| self.wait_unless(forking))
    }

    /// The lock, if nobody has it.
    fn try_lock(&self) -> Option<MutexGuard<'_, Inner>> {
        self.inner.try_lock().ok().map(|inner| self.unpark(inner))
    }

    /// As [`Zone::lock_unless`], where somebody has the lock.
    fn wait_unless(&self, forking: &AtomicBool) -> Option<MutexGuard<'_, Inner>> {
        // Whoever forks sets its flag first, and then waits for those who are waiting already.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let inner = (!forking.load(Ordering::SeqCst)).then(|| self.lock());
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        inner
    }

    /// Leaves the retired span at page `page` for the next holder of the lock. Returns whether there was room.
    fn park(&self, page: usize) -> bool {
        self.parked
            .iter()
            .any(|place| place.compare_exchange(0, page + 1, Ordering::Release, Ordering::Relaxed).is_ok())
    }

    /// As [`Zone::park`] for a span in use. Returns whether that was possible.
    pub fn retire_and_park(&self, offset: usize) -> bool {
        let page = offset / PAGE_SIZE;
        // A span that found no place is freed by its zone, to which it does not matter that it is retired.
        self.pages.retire_any(page) && self.park(page)
    }

    /// Takes note that the span at `offset`, which its user is giving back, was looked at.
    pub fn clear_fresh(&self, offset: usize, span: Segment) {
        self.pages.set(offset / PAGE_SIZE, &Segment { marks: Marks { fresh: false, ..span.marks }, ..span });
    }

    /// Locks the zone for a fork, its frontier included: a child would find that locked for ever by a thread that it doesn't have.
    pub fn lock_for_fork(&self) -> ZoneForkGuard<'_> {
        while self.waiting.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        let inner = self.lock();
        ZoneForkGuard { inner, _frontier: lock(&self.frontier_lock) }
    }

    pub fn unlocked(&self) -> bool {
        self.inner.try_lock().is_ok()
    }

    pub fn at(&self, offset: usize, len: usize) -> Range {
        Range { start: self.range.start + offset, len }
    }

    /// Whether what lies at `offset` certainly is not the zone's, without the lock.
    pub fn gave_up(&self, offset: usize) -> bool {
        offset >= self.end.load(Ordering::Relaxed)
    }

    /// The span in use that begins at `offset`, without the lock: for its user.
    pub fn in_use_at(&self, offset: usize) -> Option<Segment> {
        if !offset.is_multiple_of(PAGE_SIZE) || offset >= self.range.len {
            return None;
        }
        self.pages.get(offset / PAGE_SIZE).filter(|segment| segment.state == State::InUse)
    }
}

fn may_cache(options: &Options) -> bool {
    options.retain != Some(0) && !options.guards
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

/// The largest request that heuristic overcommit grants: all memory and swap.
fn largest_request(memory: Option<procfs::MemoryInfo>) -> usize {
    let memory = memory.filter(|_| !arena::always_overcommits());
    memory.map_or(usize::MAX, |memory| (memory.total + memory.swap) as usize)
}

impl Core {
    pub fn new(options: Options, topology: &Topology) -> Result<Core, Errno> {
        let memory = procfs::memory_info().ok();
        let total = memory.map_or(64 << 30, |memory| memory.total as usize);
        let nodes = topology.nodes();
        let cpus = topology::possible_cpus();
        let largest_node = (0..nodes).map(|node| topology.cpus(node).count()).max().unwrap_or(1);
        let most_lanes = lanes::count(largest_node, MAX_LANES);
        // Much more address space than memory, so that fragmentation of it never matters.
        let wanted = (16.max(2 * nodes * most_lanes) * total).next_power_of_two();
        let wanted = wanted.clamp(64 << 30, ARENA_MOST.min(8 << 40));
        let mut arena = Arena::reserve(wanted, nodes * 64 * HUGE_PAGE_SIZE)?;
        let stats = StatsPage::new()?;
        // Each zone has room for a span as large as the machine's memory, if possible.
        let room = arena.range().len / (2 * nodes * total.max(1));
        let lanes = Lanes::new(lanes::count(most_lanes, room), cpus);
        let placement = Placement::new(topology);
        let zone_count = 2 * nodes * lanes.count();
        // The zones' length is a power of two: an address says its zone by a shift.
        let zone_shift = (arena.range().len / zone_count).ilog2();
        let zone_len = 1usize << zone_shift;
        let aligned = zone_len >= ZONE_ALIGN;
        // How many there are need not be a power of two: what they leave of the arena would be nobody's, and count against `RLIMIT_AS`.
        arena.end_at(zone_count * zone_len);
        // One for the whole arena, so that an address says where to look by itself.
        let pages = zone_count * (zone_len / PAGE_SIZE);
        let map = if arena.exact() { PageMap::closed(pages) } else { PageMap::new(pages) }?;
        let mut zones = Vec::with_capacity(zone_count);
        for node in 0..nodes {
            for huge in (0..lanes.count()).flat_map(|_| [false, true]) {
                let range = Range { start: arena.range().start + zones.len() * zone_len, len: zone_len };
                debug_assert!(!aligned || range.start.is_multiple_of(ZONE_ALIGN));
                let advice = Some(huge && options.huge_pages);
                arena::advise_huge_pages(range, advice);
                placement.place(node, range);
                stats.zones[zones.len()]
                    .publish(crate::stats::ZoneBytes { reserved: range.len as u64, ..Default::default() });
                let pages = zone_len / PAGE_SIZE;
                let pages = map.part(zones.len() * pages, pages, huge);
                let kind = Kind { node, huge, advice };
                zones.push(Zone::new(range, zones.len(), kind, pages, arena.exact(), cpus)?);
            }
        }
        stats.set_zone_count(zones.len());
        let retention = Retention::new(&options);
        let guards = options.guards && guards_work();
        let node_shift = zone_shift + (2 * lanes.count()).ilog2();
        let caches = CpuCaches::new(arena.range().start, map, node_shift, nodes, |cpu| topology.node_of(cpu))?;
        caches.set_open(may_cache(&options));
        Ok(Core {
            options,
            arena,
            zones,
            zone_shift,
            placement,
            lanes,
            caches,
            slow_counts: SlowCounts::new(cpus),
            stats,
            sums: Sums::default(),
            retention,
            zeroing: Zeroing::new(),
            density: Density::new(),
            transfers: Transfers::new(),
            hook: HookSlot::default(),
            machine: total,
            largest: AtomicUsize::new(largest_request(memory)),
            guards,
            forking: AtomicBool::new(false),
        })
    }

    /// Whether the options leave room for caches.
    pub fn may_cache(&self) -> bool {
        may_cache(&self.options)
    }

    /// The addresses that spans come from.
    pub fn range(&self) -> Range {
        self.arena.range()
    }

    /// The zone that `address` lies in.
    pub fn zone_of(&self, address: usize) -> Option<&Zone> {
        let offset = address.wrapping_sub(self.arena.range().start);
        self.zones.get(offset >> self.zone_shift)
    }

    /// Bytes that are free and have pages, those in caches included. Of memory with small pages, the share counts that has pages, as far as
    /// is known.
    pub fn retained(&self) -> usize {
        let [small, huge] =
            [0, 1].map(|kind| self.sums.retained[kind].load(Ordering::Relaxed).saturating_add(self.cached_of(kind)));
        // Where memory is short, nothing is guessed.
        let small = if self.cramped() { small } else { self.density.share_of(small) };
        small + huge
    }

    /// Bytes that wait in caches, as last summed up.
    pub fn cached(&self) -> usize {
        self.cached_of(0) + self.cached_of(1)
    }

    fn cached_of(&self, kind: usize) -> usize {
        not_below_zero(self.sums.cached[kind].load(Ordering::Relaxed))
    }

    /// Bytes of the spans that are in use.
    pub fn in_use(&self) -> usize {
        self.sums.used.load(Ordering::Relaxed).saturating_sub(self.cached())
    }

    /// The machine's memory in bytes.
    pub fn machine(&self) -> usize {
        self.machine
    }

    /// Bytes on their way back to the kernel.
    pub fn discarding(&self) -> usize {
        self.sums.discarding.load(Ordering::Relaxed)
    }

    /// Brings the published states and the region's sums up to date with a zone; called before its lock is opened.
    ///
    /// Where lanes are used, threads take and give at the same time, and all would wait for the line of the sums. So what only changes between
    /// in use and retained in a zone, and not what the two are together, is added to the sums once it is more than a little.
    pub fn publish(&self, zone: &Zone, inner: &mut Inner) {
        let mut bytes = inner.map.bytes();
        // What waits in caches is in use as far as the zone knows.
        let cached = bytes.in_use.min(not_below_zero(zone.cached.load(Ordering::Relaxed)) as u64);
        (bytes.in_use, bytes.retained_dirty) = (bytes.in_use - cached, bytes.retained_dirty + cached);
        self.stats.zones[zone.number].publish(bytes);
        let (retained, discarding, used) = (inner.map.retained(), inner.map.discarding(), inner.map.used());
        if zone.retained.load(Ordering::Relaxed) != retained {
            zone.retained.store(retained, Ordering::Relaxed);
        }
        let exchanged = used.wrapping_add(retained) == inner.used.wrapping_add(inner.retained);
        let may_wait = exchanged && discarding == inner.discarding && self.lane(zone) > 0 && !self.limits().near();
        if may_wait && used.abs_diff(inner.used) <= (self.retention.peak_in_use() / UNSUMMED_SHARE).min(UNSUMMED_MOST) {
            if used != inner.used {
                zone.unsummed.store(true, Ordering::Relaxed);
            }
            return;
        }
        self.add_to_sums(zone, inner);
        if self.lanes.used() > 1 && self.in_use() > self.retention.peak_in_use() {
            // A peak is for good: what others lack is added first, where nobody is at it.
            for zone in self.zones.iter().filter(|zone| zone.unsummed.load(Ordering::Relaxed)) {
                if let Some(mut inner) = zone.try_lock() {
                    zone.unsummed.store(false, Ordering::Relaxed);
                    self.add_to_sums(zone, &mut inner);
                }
            }
        }
        self.retention.note(self.retained(), self.in_use());
    }

    /// Adds to the region's sums what has changed in a zone since that was done last.
    fn add_to_sums(&self, zone: &Zone, inner: &mut Inner) {
        let (retained, discarding, used) = (inner.map.retained(), inner.map.discarding(), inner.map.used());
        // Wrapping: the sums of differences are right whatever their order.
        let moved = |sum: &AtomicUsize, now: usize, before: usize| {
            let difference = now.wrapping_sub(before);
            if difference != 0 {
                sum.fetch_add(difference, Ordering::Relaxed);
            }
        };
        moved(&self.sums.retained[zone.huge as usize], retained, inner.retained);
        moved(&self.sums.discarding, discarding, inner.discarding);
        moved(&self.sums.used, used, inner.used);
        (inner.retained, inner.discarding, inner.used) = (retained, discarding, used);
    }

    /// As [`Core::add_to_sums`] for all zones of which something is missing.
    fn sum_up_zones(&self) {
        for zone in self.zones.iter().filter(|zone| zone.unsummed.swap(false, Ordering::Relaxed)) {
            self.add_to_sums(zone, &mut zone.lock());
        }
        self.retention.note(self.retained(), self.in_use());
    }

    /// The lane of its node that a zone belongs to.
    fn lane(&self, zone: &Zone) -> usize {
        (zone.number / 2) & (self.lanes.count() - 1)
    }

    /// The node that the calling thread's CPU belongs to.
    fn node(&self, topology: &Topology) -> usize {
        if topology.nodes() == 1 {
            return 0;
        }
        self.caches.node(self.caches.here()).unwrap_or_else(|| {
            // A CPU that was offline when the topology was read.
            let (cpu, number) = sched::current_cpu_and_node();
            let node = topology.home(number);
            self.caches.set_node(cpu, node);
            node
        })
    }

    /// Length and class of a span for `size` bytes, a guard included.
    pub fn span_for(&self, size: usize) -> Option<(usize, u8)> {
        if self.options.guards {
            // The guard stands right behind what was asked for, so no two sizes share a span.
            let guard = if self.guards { PAGE_SIZE } else { 0 };
            return Some((crate::sys::round_up(size, PAGE_SIZE)?.checked_add(guard)?, 0));
        }
        let exact = crate::sys::round_up(size, PAGE_SIZE)?;
        let (len, class) = classes::span_for(size)?;
        Some(if self.limits().counts_every_page(|| self.in_use()) { (exact, 0) } else { (len, class) })
    }

    /// Whether a span of `len` bytes should come from memory with huge pages.
    pub fn wants_huge_pages(&self, len: usize) -> bool {
        let keeps = len >= ALIGNED_LEAST || self.options.retain != Some(0);
        self.options.huge_pages
            && keeps
            && !self.cramped()
            && self.density.wants_huge_pages(len, || self.in_use(), |span| self.first_use(span))
    }

    /// Whether a span that was address space when it was handed out lies in memory with huge pages; `None` if its first user has it no more.
    pub fn first_use(&self, span: Range) -> Option<bool> {
        let zone = self.zone_of(span.start)?;
        let now = zone.in_use_at(span.start - zone.range.start)?;
        (now.len == span.len && now.marks.fresh).then_some(zone.huge)
    }

    /// Cuts a span out of a zone of the calling thread's node, or of another if that is full.
    ///
    /// Retained memory comes first: of the kind that is wanted and, where small pages are wanted, with huge pages too, since it is there
    /// already. Before anything fresh is taken, what waits on this CPU goes to its zones and is joined there, where that may be enough; and
    /// what waits on any CPU, or lies in other lanes, where the program's peak would be raised.
    pub fn allocate(&self, topology: &Topology, need: Need, grant: &mut Grant) -> Option<&Zone> {
        let Need { len, class, want, huge, .. } = need;
        let align = if huge && len >= ALIGNED_LEAST { need.align.max(HUGE_PAGE_SIZE) } else { need.align };
        let request = |fresh| Request { len, align, want, class, revocable: self.can_revoke(), fresh, transfer: 0 };
        let own = need.node.unwrap_or_else(|| self.node(topology));
        let lane = if len <= LANES_MOST { self.lanes.of(self.caches.here()) } else { 0 };
        let lanes = self.lanes.count();
        // The lanes from the CPU's own on.
        let zone = |node: usize, step: usize, huge: bool| {
            &self.zones[2 * (node * lanes + ((lane + step) & (lanes - 1))) + huge as usize]
        };
        let retained_in = |step: usize, grant: &mut Grant| {
            let other = (!huge && self.options.huge_pages).then(|| zone(own, step, true));
            [Some(zone(own, step, huge)), other].into_iter().flatten().find(|zone| {
                let any = zone.retained.load(Ordering::Relaxed) > 0;
                any && self.allocate_in(zone, &request(false), step == 0, grant)
            })
        };
        let retained = |grant: &mut Grant| retained_in(0, grant);
        if want != Want::AddressSpace {
            self.sum_up_own();
            let waiting = || self.density.share_of(self.cached_of(0)) + self.cached_of(1);
            let mut found = retained(grant);
            if found.is_none() && waiting() >= len / 2 && self.drain_here() {
                found = retained(grant);
            }
            if found.is_none() && waiting() >= len / 8 && self.exceeds_peak(len) && self.drain_caches() {
                found = retained(grant);
            }
            if found.is_none() && lanes > 1 && self.lacks_room_for(len) {
                found = (1..lanes).find_map(|step| retained_in(step, grant));
            }
            if found.is_some() {
                return found;
            }
        }
        // Memory that is known to be zero can't be had that way.
        let may_transfer = huge && want == Want::Any && self.lacks_room_for(len) && self.can_transfer();
        let request = Request { transfer: if may_transfer { TRANSFER_MOST } else { 0 }, ..request(true) };
        let nearest = topology.nearest(own).iter();
        let mut everywhere = nearest.flat_map(|&node| (0..lanes).map(move |step| (node, step)));
        everywhere.find_map(|(node, step)| {
            let zone = zone(node, step, huge);
            self.allocate_in(zone, &request, true, grant).then_some(zone)
        })
    }

    /// The zones with huge pages.
    fn huge_zones(&self) -> impl Iterator<Item = Range> + '_ {
        self.zones.iter().filter(|zone| zone.huge).map(|zone| zone.range)
    }

    fn can_transfer(&self) -> bool {
        !self.arena.exact() && self.transfers.ready(self.huge_zones())
    }

    /// Nothing is moved from now on, and the program may register the arena's memory with a `userfaultfd` of its own.
    pub fn stop_transfers(&self) {
        self.transfers.stop(self.huge_zones());
    }

    /// Moves free pages to where a new span needs them, as its grant says.
    fn carry_out(&self, zone: &Zone, grant: &Grant) {
        let transfers = grant.transfers();
        let mut outcomes = [Outcome::Stayed; TRANSFERS];
        for (&Transfer { from, to, len }, outcome) in transfers.iter().zip(&mut outcomes) {
            let range = zone.at(from, len);
            // SAFETY: nobody uses what is being discarded until that was reported, and what is at the other place belongs to the caller's
            // span or is nobody's until all transfers were reported.
            *outcome = unsafe { self.transfers.carry_out(range, zone.range.start + to) };
            // SAFETY: as above.
            if *outcome == Outcome::Torn && unsafe { memory::advise(range, Advice::DontNeed) }.is_err() {
                *outcome = Outcome::Stayed;
            }
        }
        let mut inner = zone.lock();
        for (&Transfer { from, len, .. }, outcome) in transfers.iter().zip(outcomes) {
            match outcome {
                Outcome::Moved => {
                    inner.map.finish_discard(from, len, false);
                    self.counters().transferred_bytes.add(len as u64);
                }
                Outcome::Torn => inner.map.finish_discard(from, len, false),
                Outcome::Stayed => inner.map.keep(from),
            }
        }
        inner.map.finish_transfers(grant);
        self.publish(zone, &mut inner);
    }

    /// As [`Zone::lock_unless`] for a thread that takes something; where it has to wait, its CPU may go on with another lane.
    fn lock_on_this_cpu<'z>(&self, zone: &'z Zone) -> Option<MutexGuard<'z, Inner>> {
        let cpu = self.caches.here();
        let is_own = self.lane(zone) == self.lanes.of(cpu);
        if let Some(inner) = zone.try_lock() {
            if is_own {
                self.lanes.found_open(cpu);
            }
            return Some(inner);
        }
        if is_own {
            self.lanes.found_locked(cpu);
        }
        zone.wait_unless(&self.forking)
    }

    /// Returns whether there was room. A zone that somebody else is at is waited for if `wait` says so.
    fn allocate_in(&self, zone: &Zone, request: &Request, wait: bool, grant: &mut Grant) -> bool {
        // A small arena, as under RLIMIT_AS, is not aligned to more than a huge page.
        if !zone.range.start.is_multiple_of(request.align) {
            return false;
        }
        let guard = match wait {
            true if request.len <= LANES_MOST => self.lock_on_this_cpu(zone),
            true => zone.lock_unless(&self.forking),
            false => zone.try_lock(),
        };
        let Some(mut guard) = guard else { return false };
        let inner = &mut *guard;
        if request.want == Want::Zeroes {
            self.take_in(zone, inner);
        }
        if !inner.map.allocate_into(request, grant) {
            return false;
        }
        let cpu = self.caches.here();
        let long = inner.map.is_long(request.len);
        let waits =
            request.class != 0 && (!long || inner.reuse.long_goes_out(cpu)) && inner.reuse.may_wait(cpu, request.class);
        if request.class != 0 && !waits {
            inner.map.take_class(grant.offset);
        }
        self.revoke(&grant.pieces);
        self.publish(zone, inner);
        drop(guard);
        if !self.commit(zone, &grant.pieces) {
            let mut inner = zone.lock();
            inner.map.undo(grant);
            self.publish(zone, &mut inner);
            return false;
        }
        if !grant.transfers().is_empty() {
            self.carry_out(zone, grant);
        }
        if self.guards {
            self.install_guard(zone, grant.offset, grant.len);
        }
        true
    }

    /// Puts a guard on the last page of a span.
    pub fn install_guard(&self, zone: &Zone, offset: usize, len: usize) {
        // SAFETY: the page is part of the span and behind what the program may use.
        if unsafe { memory::advise(zone.at(offset + len - PAGE_SIZE, PAGE_SIZE), Advice::GuardInstall) }.is_ok() {
            let mut inner = zone.lock();
            let marks = inner.map.in_use_at(offset).map(|span| span.marks).unwrap_or_default();
            inner.map.mark(offset, Marks { guarded: true, ..marks });
        }
    }

    /// Takes pieces away from the helpers that zero them. Called with the zone locked: what was left of such a piece is somebody else's
    /// as soon as the lock opens.
    pub fn revoke(&self, pieces: &Pieces) {
        for piece in pieces.iter() {
            let State::Zeroing(slot) = piece.state else { continue };
            let slot = usize::from(slot);
            match self.zeroing.ahead.revoke(slot) {
                Revoked::Idle => {}
                Revoked::Interrupted => self.counters().stragglers_bypassed.add(1),
                // The kernel refused to interrupt the helper, as in a program that sandboxes itself: it is waited for. Nothing is set out
                // after that, so this happens once for each slot at most; what it is at is no longer than one piece.
                Revoked::StillAtIt => {
                    while !self.zeroing.ahead.has_let_go(slot) {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            }
        }
    }

    /// Makes those pieces accessible that are not. Returns whether the kernel granted it.
    pub fn commit(&self, zone: &Zone, pieces: &Pieces) -> bool {
        let exact = self.arena.exact();
        let missing = |piece: &&super::spans::Piece| {
            let end = zone.range.start + piece.offset + piece.len;
            // What came with somebody else's huge page may be here before he has moved the frontier.
            if exact { piece.state == State::Reserved } else { end > zone.frontier.load(Ordering::Acquire) }
        };
        if pieces.iter().find(missing).is_none() {
            return true;
        }
        let held = lock(&zone.frontier_lock);
        let mut frontier = zone.frontier.load(Ordering::Relaxed);
        let pieces = pieces.iter().filter(missing).map(|piece| zone.at(piece.offset, piece.len));
        let granted = self.arena.commit(pieces, &mut frontier, zone.range.end()).is_ok();
        zone.frontier
            .store(if exact { frontier.max(zone.range.start + PAGE_SIZE) } else { frontier }, Ordering::Release);
        drop(held);
        granted
    }

    /// Whether a request is larger than all memory and swap: the kernel's heuristic overcommit refuses those, and a program that
    /// asks for one expects the refusal rather than to be killed later.
    pub fn exceeds_memory(&self, size: usize) -> bool {
        if size <= self.largest.load(Ordering::Relaxed) {
            return false;
        }
        // Memory or swap may have been added.
        let largest = largest_request(procfs::memory_info().ok());
        self.largest.store(largest, Ordering::Relaxed);
        size > largest
    }

    /// Whether one more span may be moved without coming near the kernel's limit of mappings.
    pub fn may_move(&self) -> bool {
        self.zones.iter().map(|zone| zone.lock().map.moved()).sum::<usize>() < MOVED_MOST
    }

    /// Removes the guard of a span, before it is freed or resized: free memory has none. Called with the zone locked.
    pub fn remove_guard(&self, zone: &Zone, inner: &mut Inner, offset: usize) {
        if let Some(span) = inner.map.in_use_at(offset).filter(|span| span.marks.guarded) {
            // SAFETY: this kind of advice changes no contents.
            let _ = unsafe { memory::advise(zone.at(offset + span.usable(), PAGE_SIZE), Advice::GuardRemove) };
            inner.map.mark(offset, Marks { guarded: false, ..span.marks });
        }
    }

    /// Gives up the address space of a zone that is not in use. Returns whether there was any.
    pub fn tighten(&self, zone: &Zone) -> bool {
        self.stop_transfers();
        let mut inner = zone.lock();
        self.arena.be_exact();
        inner.map.be_exact();
        let mut any = false;
        inner.map.give_up(|offset, len| {
            // SAFETY: address space that no span has; the map never hands it out again.
            unsafe { self.arena.give_up(zone.at(offset, len)) };
            any = true;
        });
        zone.end.store(inner.map.end(), Ordering::Relaxed);
        self.publish(zone, &mut inner);
        any
    }

    /// From now on, memory comes from where the program's own policy says. Spans that the program altered keep what it said of them.
    /// Returns whether that is new.
    pub fn leave_placement(&self) -> bool {
        if !self.placement.leave() {
            return false;
        }
        for zone in &self.zones {
            let inner = zone.lock();
            let mut start = 0;
            for (offset, segment) in inner.map.handed_out().filter(|(_, segment)| segment.marks.altered) {
                Placement::follow_threads(zone.at(start, offset - start));
                start = offset + segment.len;
            }
            Placement::follow_threads(zone.at(start, inner.map.end() - start));
        }
        true
    }

    // The caches.

    /// The node of the spans that wait on a CPU. On one whose node is not known, none does.
    fn cache_node(&self, cpu: usize) -> usize {
        self.caches.node(cpu).unwrap_or(0)
    }

    /// The address of page `page` of the arena.
    fn address(&self, page: usize) -> usize {
        self.arena.range().start + page * PAGE_SIZE
    }

    /// Adds what was counted on a CPU to the region's sums.
    #[cold]
    #[inline(never)]
    pub fn sum_up(&self, cpu: usize) {
        let Some(tally) = self.caches.tally(cpu) else { return };
        self.counters().allocations.add(tally.taken as u64);
        self.counters().allocated_bytes.add(tally.taken_bytes as u64);
        self.counters().reused_bytes.add(tally.taken_bytes as u64);
        self.counters().cached_allocations.add(tally.taken as u64);
        self.counters().frees.add(tally.put as u64);
        self.note_held(cpu, tally.held_change);
        self.note_call();
        self.retention.note(self.retained(), self.in_use());
    }

    /// What waits on a CPU has changed.
    fn note_held(&self, cpu: usize, change: [usize; 2]) {
        for (kind, change) in change.into_iter().enumerate().filter(|&(_, change)| change != 0) {
            self.note_cached(self.first_zone(self.cache_node(cpu), kind), change);
        }
    }

    /// The number of the zone of a node's first lane with small pages (0) or huge pages (1).
    fn first_zone(&self, node: usize, kind: usize) -> usize {
        2 * node * self.lanes.count() + kind
    }

    /// What waits in caches of the spans of a node, whose first zone of that kind has the number `zone`, has changed.
    fn note_cached(&self, zone: usize, change: usize) {
        self.sums.cached[zone % 2].fetch_add(change, Ordering::Relaxed);
        self.zones[zone].cached.fetch_add(change, Ordering::Relaxed);
    }

    /// As [`Core::sum_up`] for this CPU.
    pub fn sum_up_here(&self) {
        self.sum_up(self.caches.here());
    }

    /// As [`Core::sum_up_here`] where the sums are wrong by more than a little.
    pub fn sum_up_own(&self) {
        let cpu = self.caches.here();
        if self.caches.is_behind(cpu) {
            self.sum_up(cpu);
        }
    }

    /// As [`Core::sum_up`] for every CPU.
    pub fn sum_up_all(&self) {
        self.slow_counts.cpus().for_each(|cpu| self.add_slow_counts(cpu));
        self.sum_up_zones();
        self.caches.used().for_each(|cpu| self.sum_up(cpu));
    }

    /// Counts a request about a span of `len` bytes that no cache served.
    pub fn note_request(&self, len: usize, what: Counts) {
        let cpu = self.caches.here();
        if self.slow_counts.add(cpu, len, what) {
            self.add_slow_counts(cpu);
        }
        self.note_call();
    }

    fn add_slow_counts(&self, cpu: usize) {
        if let Some(counts) = self.slow_counts.take(cpu) {
            self.counters().allocations.add(counts.allocations);
            self.counters().allocated_bytes.add(counts.allocated_bytes);
            self.counters().reused_bytes.add(counts.reused_bytes);
            self.counters().frees.add(counts.frees);
        }
    }

    /// Publishes what every zone has now.
    pub fn publish_all(&self) {
        self.sum_up_all();
        for zone in &self.zones {
            self.publish(zone, &mut zone.lock());
        }
    }

    /// Gives every span that waits in a cache back to its zone. Returns whether there was any.
    ///
    /// What was counted wrong until then, since counting costs no atomic exchange, is right again: what nobody can change is compared with
    /// what is found.
    pub fn drain_caches(&self) -> bool {
        // How much more was counted than is found, of each zone; wraps.
        let missing = [const { Cell::new(0usize) }; MAX_ZONES];
        let closed = || {
            for cpu in self.caches.used() {
                self.sum_up(cpu);
                for (kind, held) in self.caches.forget_held(cpu).into_iter().enumerate() {
                    missing[self.first_zone(self.cache_node(cpu), kind)].update(|sum| sum.wrapping_add(held));
                }
            }
        };
        let release = |page| {
            let (zone, len) = self.release_cached(page);
            missing[zone].update(|sum| sum.wrapping_sub(len));
        };
        let any = self.caches.drain_all(closed, release) > 0;
        for (zone, missing) in missing.iter().enumerate().filter(|(_, missing)| missing.get() != 0) {
            self.note_cached(zone, missing.get().wrapping_neg());
        }
        any
    }

    /// As [`Core::drain_caches`] for this CPU, which disturbs no other.
    fn drain_here(&self) -> bool {
        let cpu = self.caches.here();
        self.sum_up(cpu);
        let release = |page| {
            let (zone, len) = self.release_cached(page);
            self.caches.note_drained(cpu, zone % 2, len);
        };
        self.caches.drain_here(release) > 0
    }

    /// Gives the span that begins at `page` of the arena, and came out of a cache, back to its zone. Returns the number of the node's first
    /// zone of that kind and the span's length.
    fn release_cached(&self, page: usize) -> (usize, usize) {
        let zone = &self.zones[(page * PAGE_SIZE) >> self.zone_shift];
        let number = self.first_zone(zone.node, zone.huge as usize);
        let offset = self.address(page) - zone.range.start;
        let len = zone.pages.get(offset / PAGE_SIZE).map_or(0, |span| span.len);
        self.release_retired(zone, offset, false);
        // It was free before as well: only its place has changed.
        self.note_cached(number, len.wrapping_neg());
        (number, len)
    }

    /// Takes note that the program gave a span of `len` bytes back to its zone.
    pub fn note_came_back(&self, inner: &mut Inner, len: usize) {
        let cpu = self.caches.here();
        inner.reuse.came_back(cpu, inner.map.class_of(len));
        if inner.map.is_long(len) {
            inner.reuse.long_came_back(cpu);
        }
    }

    /// Gives a span that was retired and is in no cache back to its zone, whether it was `freed` just now or lay in a cache.
    pub fn release_retired(&self, zone: &Zone, offset: usize, freed: bool) {
        let mut inner = match zone.lock_unless(&self.forking) {
            Some(inner) => inner,
            None if zone.park(offset / PAGE_SIZE) => return,
            None => zone.lock(),
        };
        let len = inner.map.release_retained(offset);
        if freed {
            self.note_came_back(&mut inner, len);
        }
        self.publish(zone, &mut inner);
    }

    /// Maps a range of a zone anew, as the rest of the zone.
    ///
    /// # Safety
    /// Nobody uses the range.
    unsafe fn renew(&self, zone: &Zone, range: Range) -> Result<(), Errno> {
        // SAFETY: by the function's own contract.
        unsafe { self.arena.renew(range, zone.advice)? };
        self.placement.place(zone.node, range);
        if zone.huge {
            self.transfers.adopt(range);
        }
        Ok(())
    }

    /// Before a fork: the ranges that a child does not need are marked so that the kernel does not copy them. Where it refuses, the child
    /// has a copy, whose contents are unknown.
    pub fn wipe_in_child(&self, inner: &mut Inner, zone: &Zone) {
        self.advise_on_fork(inner, zone, Self::worth_wiping, Advice::WipeOnFork);
    }

    /// Undoes [`Core::wipe_in_child`] in the parent.
    pub fn keep_in_child(&self, inner: &mut Inner, zone: &Zone) {
        self.advise_on_fork(inner, zone, |segment| segment.marks.wiped, Advice::KeepOnFork);
    }

    fn advise_on_fork(&self, inner: &mut Inner, zone: &Zone, wanted: fn(&Segment) -> bool, advice: Advice) {
        let mut offset = 0;
        while let Some((at, segment)) = inner.map.next_backed(offset) {
            if wanted(&segment) {
                // SAFETY: this kind of advice changes no contents here; in the child, nobody needs free memory.
                let done = unsafe { memory::advise(zone.at(at, segment.len), advice) }.is_ok();
                inner.map.set_wiped(at, done && advice == Advice::WipeOnFork);
            }
            offset = at + segment.len;
        }
    }

    /// Whether a free segment is worth two system calls at each fork.
    fn worth_wiping(segment: &Segment) -> bool {
        segment.len >= HUGE_PAGE_SIZE && !segment.marks.remap()
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
            self.transfers.after_fork();
            self.hook.after_fork();
            let _ = self.stats.detach();
        }
        // What was counted and not added yet is the parent's.
        for cpu in self.slow_counts.cpus() {
            let _ = self.slow_counts.take(cpu);
        }
        // SAFETY: by the function's own contract.
        unsafe { self.caches.after_fork() };
        for zone in &self.zones {
            // A thread of the parent that waited for the zone is not here.
            zone.waiting.store(0, Ordering::Relaxed);
            let mut inner = zone.lock();
            // What was wiped and becomes address space must not be wiped again for this child's own children once it is in use.
            let wiped: Vec<_> = inner.map.backed().filter(|(_, segment)| segment.marks.wiped).collect();
            for (offset, segment) in wiped {
                // SAFETY: this kind of advice changes no contents.
                let _ = unsafe { memory::advise(zone.at(offset, segment.len), Advice::KeepOnFork) };
            }
            // What a helper of the parent was giving back and has to be mapped anew, this thread maps anew.
            let altered: Vec<_> =
                inner.map.backed().filter(|(_, segment)| segment.state == State::Discarding).collect();
            for (offset, segment) in altered.into_iter().filter(|(_, segment)| segment.marks.remap()) {
                // SAFETY: free memory, which nobody uses.
                match unsafe { self.renew(zone, zone.at(offset, segment.len)) } {
                    Ok(()) => inner.map.finish_discard(offset, segment.len, true),
                    Err(_) => inner.map.lose(offset),
                }
            }
            inner.map.after_fork();
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
        // SAFETY: nobody uses a range in state `Discarding`.
        let renewed = !remap || unsafe { self.renew(zone, task.range) }.is_ok();
        let mut inner = zone.lock();
        if renewed {
            inner.map.finish_discard(offset, task.range.len, remap);
            inner.map.give_back_map();
        } else {
            // It may not even be mapped any more: it is never handed out again, and nobody waits for it.
            inner.map.lose(offset);
        }
        self.publish(zone, &mut inner);
    }

    fn work_ahead(&self, crew: &RegionCrew) -> bool {
        self.zero_one_ahead(crew)
    }

    fn watch(&self, crew: &RegionCrew) -> Tick {
        hook::sooner(self.look(crew), self.run_hook())
    }

    fn counters(&self) -> &Counters {
        &self.stats.counters
    }
}
