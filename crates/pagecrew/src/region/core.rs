//! What a region consists of, and what its crew does for it: the zones, the retention and its watcher, the zeroing ahead.
//!
//! Lock order: a zone's map, then nothing. No lock is held while the crew is called.

use super::ahead::{Ahead, Done};
use super::arena::{self, Arena, ZONE_ALIGN};
use super::look::NextLook;
use super::options::Options;
use super::policy::{LowWater, ZeroDemand, expected_growth, first_peak};
use super::signals::SignalReader;
use super::spans::{Grant, Marks, Piece, Segment, SpanMap, State, Want};
use crate::crew::{Crew, Employer, Operation, Task, Tick};
use crate::stats::{Counters, StatsPage};
use crate::sys::memory::{self, Advice, Protection, Range};
use crate::sys::topology::{MAX_NODES, Topology};
use crate::sys::zero::{self, Use};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, clock, membarrier, pagemap, procfs, sched};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Memory that is retained without a watcher: less than a new thread is worth.
const UNWATCHED: usize = 32 << 20;
/// What a helper zeroes ahead at a time.
const ZERO_STEP: usize = 4 << 20;
/// Zeroing less than this is done by the caller alone, through the caches.
const ZERO_SOON: usize = 4 << 20;
/// A free range at least this long is looked at for pages that were never touched before it is zeroed.
const SCAN_LEAST: usize = 4 << 20;
/// The longest pause between two looks at the signals while something is retained.
const MOST_PAUSE: Duration = Duration::from_millis(20);
/// The shortest one: near a limit of the machine or the control group, and where little is retained.
const LEAST_PAUSE: Duration = Duration::from_millis(5);
/// How often a program that has no room to retain anything is looked at for room, while it is active.
const CRAMPED_PAUSE: Duration = Duration::from_secs(1);
/// Bytes that a program may touch for the first time in a microsecond: 4 GB/s.
const GROWTH_PER_US: usize = 4_000;
/// A program counts as active for this long after its last call.
const ACTIVE_NS: u64 = 1_000_000_000;
/// Without pressure, an excess below this share of what is retained is left alone.
const SLACK_SHARE: usize = 32;
/// While fresh memory is being touched, no more than this is left on its way back.
const ROOM_BACKLOG: usize = 8 << 20;
/// The backlog of memory on its way back may always be this long.
const BACKLOG_LEAST: usize = 64 << 20;
/// More moved spans than this, and pages are copied instead: each may cost two mappings of `vm.max_map_count` (65,530).
const MOVED_MOST: usize = 8192;
/// The last huge page of a span is kept from becoming one where more than this, or than this share of the span, would be wasted.
const WASTE_MOST: usize = 512 << 10;
const WASTE_SHARE: usize = 32;

/// A part of the arena for spans of one kind on one node.
pub(super) struct Zone {
    pub range: Range,
    pub granule: usize,
    node: usize,
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

/// What the watcher remembers.
struct Watch {
    signals: SignalReader,
    low_water: LowWater,
    /// Memory of the program outside the region at the last look.
    outside: Option<usize>,
}

impl Watch {
    fn new(options: &Options, now: u64) -> Watch {
        Watch { signals: SignalReader::new(), low_water: LowWater::new(options.decay, now), outside: None }
    }
}

/// What the signals say.
struct Sample {
    /// How much more is retained than may be.
    excess: usize,
    /// How much may be free and backed, on its way back or not.
    bound: usize,
    /// Whether the machine or the control group is the reason.
    pressure: bool,
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
    /// The most that was ever in use.
    peak_in_use: AtomicUsize,
    /// The most that was in use since the last look at the signals.
    recent_in_use: AtomicUsize,
    /// The least that was retained since the watcher's last look.
    least_retained: AtomicUsize,
    /// The most that the program ever had live, as far as seen; 0 until something is freed.
    peak_live: AtomicUsize,
    /// The most that the process ever had resident, as the kernel said when the region was made.
    resident_at_start: AtomicUsize,
    /// How much may be retained, as last computed.
    target: AtomicUsize,
    /// The machine's memory, and the largest request that heuristic overcommit would grant, in bytes.
    machine: usize,
    largest: usize,
    last_call_ns: AtomicU64,
    next_look: NextLook,
    /// Zeroed bytes asked for since the watcher last set some out, and whether any ever were.
    zeroes_wanted: AtomicUsize,
    wants_zeroes: AtomicBool,
    /// Bytes zeroed ahead that were used where zeroes were not needed, since then.
    zeroes_wasted: AtomicUsize,
    ahead: Ahead,
    revocable: AtomicBool,
    moved: AtomicUsize,
    /// Whether a limit is near; until somebody has looked, it may be.
    near_limit: AtomicBool,
    /// Whether the control group has no room for memory that waits for its way back.
    cramped: AtomicBool,
    watch: Mutex<Watch>,
    demand: Mutex<ZeroDemand>,
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

    fn at(&self, offset: usize, len: usize) -> Range {
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
        let now = clock::now_ns();
        let watch = Watch::new(&options, now);
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
            peak_in_use: AtomicUsize::new(0),
            recent_in_use: AtomicUsize::new(0),
            least_retained: AtomicUsize::new(0),
            peak_live: AtomicUsize::new(0),
            resident_at_start: AtomicUsize::new(memory::peak_resident()),
            target: AtomicUsize::new(0),
            machine: total,
            largest,
            last_call_ns: AtomicU64::new(now),
            next_look: NextLook::new(),
            zeroes_wanted: AtomicUsize::new(0),
            wants_zeroes: AtomicBool::new(false),
            zeroes_wasted: AtomicUsize::new(0),
            ahead: Ahead::new(),
            revocable: AtomicBool::new(false),
            moved: AtomicUsize::new(0),
            near_limit: AtomicBool::new(true),
            cramped: AtomicBool::new(false),
            watch: Mutex::new(watch),
            demand: Mutex::new(ZeroDemand::default()),
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

    /// Bytes on their way back to the kernel.
    pub fn discarding(&self) -> usize {
        self.discarding.load(Ordering::Relaxed)
    }

    /// Brings the published states and the region's sums up to date with a zone; called before its lock is opened.
    fn publish(&self, zone: &Zone, inner: &mut Inner) {
        let index = 2 * zone.node + (zone.granule == HUGE_PAGE_SIZE) as usize;
        self.stats.zones[index].publish(inner.map.bytes());
        let (retained, discarding) = (inner.map.retained(), inner.map.discarding());
        // Wrapping: the sums of differences are right whatever their order.
        let now = self.retained.fetch_add(retained.wrapping_sub(inner.retained), Ordering::Relaxed);
        self.least_retained.fetch_min(now.wrapping_add(retained).wrapping_sub(inner.retained), Ordering::Relaxed);
        self.discarding.fetch_add(discarding.wrapping_sub(inner.discarding), Ordering::Relaxed);
        let in_use = inner.map.used();
        let before = self.in_use.fetch_add(in_use.wrapping_sub(inner.in_use), Ordering::Relaxed);
        let now = before.wrapping_add(in_use).wrapping_sub(inner.in_use);
        self.peak_in_use.fetch_max(now, Ordering::Relaxed);
        self.recent_in_use.fetch_max(now, Ordering::Relaxed);
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
            if let State::Zeroing(slot) = piece.state
                // Registered before anything was set out.
                && self.ahead.revoke(slot, || _ = membarrier::restart_sequences())
            {
                self.counters().stragglers_bypassed.add(1);
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

    /// Zeroes the dirty pieces of the first `usable` bytes of a span; behind them may be a guard. Returns the bytes that were
    /// retained and known to be zero.
    pub fn clear(&self, crew: &RegionCrew, zone: &Zone, grant: &Grant, usable: usize) -> usize {
        let end = grant.offset + usable;
        let within = |piece: &Piece| Piece { len: piece.len.min(end.saturating_sub(piece.offset)), ..*piece };
        let pieces: Vec<Piece> = grant.pieces.iter().map(within).filter(|piece| piece.len > 0).collect();
        let dirty = |piece: &&Piece| matches!(piece.state, State::Dirty | State::Zeroing(_));
        let total: usize = pieces.iter().filter(dirty).map(|piece| piece.len).sum();
        let mut skipped: usize =
            pieces.iter().filter(|piece| piece.state == State::Zeroed).map(|piece| piece.len).sum();
        for piece in pieces.iter().filter(dirty) {
            let range = zone.at(piece.offset, piece.len);
            if piece.len < SCAN_LEAST {
                self.zero(crew, range, total, zone.node);
                continue;
            }
            // A program that touches little of a large table leaves most of it without pages, and those read as zero already:
            // writing zeroes there would give the table pages that it never had.
            let mut backed = 0;
            let scan = pagemap::with_contents(range, |part| {
                backed += part.len;
                self.zero(crew, part, total, zone.node);
            });
            match scan {
                Ok(()) => skipped += range.len - backed,
                Err(_) => self.zero(crew, range, total, zone.node),
            }
        }
        skipped
    }

    fn zero(&self, crew: &RegionCrew, range: Range, total: usize, node: usize) {
        if total < ZERO_SOON || range.len < HUGE_PAGE_SIZE {
            // SAFETY: the range is part of a span that belongs to the calling allocation.
            unsafe { zero::zero(range, if total < ZERO_SOON { Use::Soon } else { Use::Later }) };
            self.counters().zeroed_by_caller_bytes.add(range.len as u64);
        } else {
            // SAFETY: as above.
            unsafe { crew.run(Task { operation: Operation::Zero, range, node, report: false }) };
        }
    }

    /// Whether memory can be taken from a helper that is zeroing it.
    pub fn can_revoke(&self) -> bool {
        self.revocable.load(Ordering::Relaxed)
    }

    /// Takes note that the program is active.
    pub fn note_call(&self) {
        self.last_call_ns.store(clock::now_ns(), Ordering::Relaxed);
    }

    /// Takes note of what a span was wanted for and of what it consists.
    pub fn note_want(&self, want: Want, usable: usize, pieces: &[Piece]) {
        if want == Want::Zeroes {
            self.zeroes_wanted.fetch_add(usable, Ordering::Relaxed);
            self.wants_zeroes.store(true, Ordering::Relaxed);
            return;
        }
        let zeroed = pieces.iter().filter(|piece| matches!(piece.state, State::Zeroed | State::Zeroing(_)));
        let wasted: usize = zeroed.map(|piece| piece.len).sum();
        if wasted > 0 {
            self.zeroes_wasted.fetch_add(wasted, Ordering::Relaxed);
        }
    }

    /// How much may be retained once the program has freed `bytes`. On the program's own threads the target only follows what is
    /// freed and what comes into use; the watcher corrects it by what the process and the machine really have. No file is read here:
    /// the program's descriptors and its stacks, however small, are its own.
    pub fn target_after_free(&self, bytes: usize) -> usize {
        if self.peak_live.load(Ordering::Relaxed) == 0 {
            let in_use = self.peak_in_use.load(Ordering::Relaxed);
            let at_start = self.resident_at_start.load(Ordering::Relaxed);
            self.peak_live.fetch_max(first_peak(at_start, memory::peak_resident(), in_use), Ordering::Relaxed);
        }
        if self.cramped.load(Ordering::Relaxed) {
            return 0;
        }
        let bound = self.options.retain.unwrap_or(self.machine / 2);
        let follow = |target: usize| target.saturating_add(bytes).min(bound);
        let before = self.target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |target| Some(follow(target)));
        // The caller has not taken the bytes out of what is in use yet.
        follow(before.unwrap_or(0)).min(self.own_room() + bytes)
    }

    /// How many bytes of a span that is given back may be retained, of its length: all of it where its pages fit below the target.
    pub fn keep(&self, span: &Segment, target: usize) -> usize {
        let room = target.saturating_sub(self.retained());
        match span.marks.altered {
            true => 0,
            false if span.usable <= room => usize::MAX,
            false => room,
        }
    }

    /// How much less is in use than there once was: retained memory may fill that, and the sum stays below the peak.
    fn own_room(&self) -> usize {
        self.peak_in_use.load(Ordering::Relaxed).saturating_sub(self.in_use.load(Ordering::Relaxed))
    }

    /// What may be there beyond the target: without pressure, little enough to spare a large span a hole; near a limit, nothing.
    fn slack(&self, retained: usize) -> usize {
        if self.near_limit.load(Ordering::Relaxed) { 0 } else { retained / SLACK_SHARE }
    }

    /// How much may be retained now that `bytes` more are in use.
    pub fn target_after_allocation(&self, bytes: usize) -> usize {
        let follow = |target: usize| target.saturating_sub(bytes);
        let before = self.target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |target| Some(follow(target)));
        follow(before.unwrap_or(0)).min(self.own_room())
    }

    /// Whether a request is larger than all memory and swap: the kernel's heuristic overcommit refuses those, and a program that
    /// asks for one expects the refusal rather than to be killed later.
    pub fn absurd(&self, size: usize) -> bool {
        size > self.largest
    }

    /// Reads the signals and computes the target. `None` if memory was freed or reused meanwhile, so that what was read does not
    /// belong together: the target keeps following what is freed and reused.
    fn sample(&self, crew: &RegionCrew, watch: &mut Watch, now: u64) -> Option<Sample> {
        let free = || (self.retained(), self.discarding());
        let before = free();
        // What is on its way back is free already, as far as the program is concerned.
        let still_there = before.0 + crew.backlog(Operation::Discard);
        // Without /proc, nothing is known of the program, and nothing is retained.
        let read = watch.signals.read(still_there, now);
        self.near_limit.store(watch.signals.near_limit(), Ordering::Relaxed);
        if free() != before {
            return None;
        }
        let mut growth = 0;
        let target = read.map_or(0, |signals| {
            let used = self.in_use.load(Ordering::Relaxed);
            let most_used = self.recent_in_use.swap(used, Ordering::Relaxed);
            let outside = signals.outside(used);
            let before = watch.outside.replace(outside);
            let seen = signals.peak_live(used, most_used, before);
            let peak = self.peak_live.fetch_max(seen, Ordering::Relaxed).max(seen);
            growth = before.map_or(0, |before| expected_growth(before, outside));
            self.cramped.store(signals.cramped(peak), Ordering::Relaxed);
            signals.retain_target(peak, self.options.retain).saturating_sub(growth)
        });
        // Pages of retained memory that were never touched make the program look smaller than it is.
        let target = target.min(self.own_room());
        self.target.store(target, Ordering::Relaxed);
        let pressure = read.is_some_and(|signals| signals.pressure());
        let retained = self.retained().min(still_there);
        // A hole cut for a few megabytes keeps a large span from fitting where it was, and costs all of it in page faults.
        let slack = if pressure || growth > 0 { 0 } else { self.slack(retained) };
        let excess = retained.saturating_sub(target);
        Some(Sample { excess: if excess > slack { excess } else { 0 }, bound: target + slack, pressure })
    }

    /// Discards retained memory until no more than `target` is retained. Returns the bytes.
    pub fn discard_down_to(&self, crew: &RegionCrew, target: usize) -> usize {
        let mut sum = 0;
        for zone in self.zones.iter().rev() {
            while self.retained() > target {
                let excess = self.retained() - target;
                let mut inner = zone.lock();
                let Some((offset, len)) = inner.map.begin_discard(excess.max(zone.granule)) else { break };
                self.publish(zone, &mut inner);
                drop(inner);
                self.discard(crew, zone, offset, len);
                sum += len;
            }
        }
        sum
    }

    /// Makes room for `fresh` bytes that are about to be touched for the first time: what is retained and what is on its way back
    /// stays, together with them, below the program's own peak.
    pub fn make_room(&self, crew: &RegionCrew, fresh: usize) {
        let target = self.target_after_allocation(fresh);
        let retained = self.retained();
        if retained > target + self.slack(retained) {
            self.discard_down_to(crew, target);
        }
        // Touching is slower than giving back, so the caller helps a little rather than wait for a helper that may not run.
        let near = self.near_limit.load(Ordering::Relaxed);
        let bound = if near { 0 } else { self.slack(retained).max(ROOM_BACKLOG) };
        self.bound_backlog(crew, bound);
    }

    /// Helps the crew until no more than `bound` bytes wait for their way back.
    fn bound_backlog(&self, crew: &RegionCrew, bound: usize) {
        if self.discarding() > bound && crew.assist(Operation::Discard, || crew.backlog(Operation::Discard) <= bound) {
            self.counters().backlog_assists.add(1);
        }
    }

    /// Has a range discarded that is marked so: by the crew, with the calling thread's help where the backlog has reached its
    /// bound or nothing is to be retained at all.
    pub fn discard(&self, crew: &RegionCrew, zone: &Zone, offset: usize, len: usize) {
        let task = Task { operation: Operation::Discard, range: zone.at(offset, len), node: zone.node, report: true };
        if self.options.retain == Some(0) || self.cramped.load(Ordering::Relaxed) {
            // SAFETY: a range in state `Discarding` is used by nobody until it was reported as finished.
            unsafe { crew.run(task) };
            return;
        }
        // SAFETY: as above.
        unsafe { crew.submit(task) };
        // What is on its way back weighs as much as what is retained, so as much of it may be there at a time.
        let bound = self.target.load(Ordering::Relaxed).max(BACKLOG_LEAST);
        self.bound_backlog(crew, bound);
    }

    /// Sees to it that the watcher looks at what is retained, and starts zeroing where zeroes are in demand.
    pub fn wake(&self, crew: &RegionCrew, freed: usize) {
        let zeroes = self.options.zero && freed >= ZERO_STEP && self.wants_zeroes.load(Ordering::Relaxed);
        // Room may come back: the limit is raised, others leave the group.
        let worth_watching = self.retained() >= UNWATCHED || self.cramped.load(Ordering::Relaxed);
        if (zeroes || (worth_watching && self.next_look.rests())) && !crew.watch() {
            self.discard_down_to(crew, UNWATCHED);
        }
    }

    /// Sets out dirty memory for helpers to zero, as much as is worth having. Called by the watcher.
    fn zero_ahead(&self, crew: &RegionCrew, now: u64) {
        let wanted = self.zeroes_wanted.swap(0, Ordering::Relaxed);
        let wasted = self.zeroes_wasted.swap(0, Ordering::Relaxed);
        let mut demand = lock(&self.demand);
        if wanted > 0 {
            demand.note(wanted, now);
        }
        demand.wasted(wasted);
        let goal = demand.goal(now);
        drop(demand);
        if goal == 0 {
            self.wants_zeroes.store(false, Ordering::Relaxed);
        }
        if !self.options.zero {
            return;
        }
        if crew.contended() {
            // Nobody will take it soon.
            self.call_off_zeroing();
            return;
        }
        self.revocable.store(crew.revocation() && zero::revocable(), Ordering::Relaxed);
        let zeroed: u64 = self.zones.iter().map(|zone| self.take_in_all(zone)).sum();
        let mut missing = goal.saturating_sub(zeroed as usize + self.ahead.under_way());
        let mut set_out = false;
        for zone in &self.zones {
            let mut inner = zone.lock();
            while missing > 0
                && self.ahead.set_out(|slot| {
                    let (offset, len) = inner.map.begin_zeroing(ZERO_STEP, slot)?;
                    missing = missing.saturating_sub(len);
                    Some(zone.at(offset, len))
                })
            {
                set_out = true;
            }
            self.publish(zone, &mut inner);
        }
        if set_out {
            crew.call(0, Operation::Zero);
        }
    }

    /// Takes in what helpers have zeroed of a zone. Returns how much of it is zeroed then, in bytes.
    fn take_in_all(&self, zone: &Zone) -> u64 {
        let mut inner = zone.lock();
        self.take_in(zone, &mut inner);
        self.publish(zone, &mut inner);
        inner.map.bytes().retained_zeroed
    }

    /// Calls off what is set out for zeroing and not begun, and takes in what is done.
    pub fn call_off_zeroing(&self) {
        self.ahead.call_off();
        self.zones.iter().for_each(|zone| {
            self.take_in_all(zone);
        });
    }

    /// Takes in what helpers have zeroed of a zone, which is locked.
    fn take_in(&self, zone: &Zone, inner: &mut Inner) {
        self.ahead.collect(zone.range, |Done { slot, range, whole, took_ns }| {
            if inner.map.finish_zeroing(range.start - zone.range.start, slot, whole) {
                self.counters().zeroed_in_background_bytes.add(range.len as u64);
                self.counters().background_zero_ns.add(took_ns);
            }
        });
    }

    /// Zeroes what is set out, until that is revoked. Returns whether all of it was zeroed, and the nanoseconds that it took.
    fn zero_piece(&self, range: Range, revoked: &AtomicU32) -> (bool, u64) {
        let begin = clock::now_ns();
        let zero = |part: Range| {
            // SAFETY: a range in state `Zeroing` is used by nobody else until it is revoked; where it can't be revoked, nobody
            // takes it.
            unsafe {
                if self.can_revoke() {
                    zero::zero_unless(part, Use::Later, revoked)
                } else {
                    zero::zero(part, Use::Later);
                    true
                }
            }
        };
        // Only what is backed: zeroing pages that were never touched would give them memory.
        let mut whole = true;
        if pagemap::with_contents(range, |part| whole = whole && zero(part)).is_err() {
            whole = zero(range);
        }
        (whole, clock::now_ns() - begin)
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

    /// Publishes a zone's states after a change that the caller made under its lock.
    pub fn changed(&self, zone: &Zone, inner: &mut Inner) {
        self.publish(zone, inner);
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
            let watch = Watch::new(&self.options, clock::now_ns());
            std::ptr::write((&raw const self.watch).cast_mut(), Mutex::new(watch));
            std::ptr::write((&raw const self.demand).cast_mut(), Mutex::new(ZeroDemand::default()));
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
        self.peak_live.store(0, Ordering::Relaxed);
        self.resident_at_start.store(0, Ordering::Relaxed);
        self.target.store(0, Ordering::Relaxed);
        self.next_look.reset();
        self.revocable.store(false, Ordering::Relaxed);
        self.ahead.reset();
        self.cramped.store(false, Ordering::Relaxed);
        self.near_limit.store(true, Ordering::Relaxed);
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
        let worked = self.ahead.work(|range, revoked| self.zero_piece(range, revoked));
        // In time for the watcher to set more out.
        if worked && self.ahead.ready() <= 2 {
            crew.ring_watcher();
        }
        worked
    }

    fn watch(&self, crew: &RegionCrew) -> Tick {
        let now = clock::now_ns();
        self.zero_ahead(crew, now);
        if let Err(early) = self.next_look.begin(now) {
            return Tick::Wait(Duration::from_nanos(early));
        }
        let mut watch = lock(&self.watch);
        let retained = self.retained();
        let least = self.least_retained.swap(retained, Ordering::Relaxed).min(retained);
        watch.low_water.note(least, now);
        watch.low_water.note(retained, now);
        if self.watched(crew) == 0 && !self.cramped.load(Ordering::Relaxed) {
            return self.pause(crew, now);
        }
        let surplus = watch.low_water.surplus(retained);
        let sample = self.sample(crew, &mut watch, now);
        // The lock is not held while others are called.
        drop(watch);
        let mut again = false;
        let excess = sample.as_ref().map_or(0, |sample| sample.excess).max(surplus);
        if excess > 0 {
            let gone = self.discard_down_to(crew, self.retained().saturating_sub(excess));
            lock(&self.watch).low_water.discarded(gone);
            if sample.as_ref().is_some_and(|sample| sample.pressure && sample.excess >= surplus) {
                self.counters().pressure_trims.add(1);
            } else {
                self.counters().decayed_bytes.add(gone.min(surplus) as u64);
            }
            again = gone > 0;
        }
        if let Some(sample) = sample {
            // What only lacks need may take its time; what there should not be is taken care of even where helpers get no CPU.
            crew.assist(Operation::Discard, || self.watched(crew) <= sample.bound);
        }
        if again { Tick::Again } else { self.pause(crew, now) }
    }

    fn counters(&self) -> &Counters {
        &self.stats.counters
    }
}

impl Core {
    /// Bytes that are free and still there, but for those that a thread of the program is giving back at this moment.
    fn watched(&self, crew: &RegionCrew) -> usize {
        self.retained() + crew.backlog(Operation::Discard)
    }

    /// When the watcher should look next.
    fn pause(&self, crew: &RegionCrew, now: u64) -> Tick {
        let active = now < self.last_call_ns.load(Ordering::Relaxed) + ACTIVE_NS;
        let cramped = active && self.cramped.load(Ordering::Relaxed);
        if self.watched(crew) == 0 && !cramped {
            return if self.next_look.rest(|| self.watched(crew) > 0) { Tick::Rest } else { Tick::Again };
        }
        // A program that grows outside the region may use up what retention may exceed its target by before the next look, whether
        // or not it calls here meanwhile. In an idle one, what is retained decays, and the looks with it.
        let lead = Duration::from_micros((self.slack(self.retained()) / GROWTH_PER_US) as u64);
        let pause = if self.watched(crew) == 0 { CRAMPED_PAUSE } else { lead.clamp(LEAST_PAUSE, MOST_PAUSE) };
        self.next_look.again_at(now + pause.as_nanos() as u64);
        Tick::Wait(pause)
    }
}
