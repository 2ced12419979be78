//! The allocator: a stack of frames for each CPU before the zones, and a byte for each frame that says whether somebody has it.
//!
//! **Life of a frame.** Its bit in its area says *used* from the moment that it leaves the zone, whether for a CPU's stack or for a
//! program. Its byte says *allocated* while a program has it, so that a second `free` is seen at once. On a stack, a flag in the number
//! says whether it is known to be zero: one that came from the zone so and was never handed out. In the zone, a bit says so. A frame
//! that was handed out is dirty when it comes back.

use super::Options;
use super::area::{Area, FRAMES, Kind, WORD, WORDS, WordFrames};
use super::error::{BuildError, FreeError, OutOfFrames, Problem};
use super::pieces::Pieces;
use super::policy;
use super::table::Table;
use super::tree::{TREE, Tree};
use super::zone::{self, GIANT_AREAS, Tables, Zone};
use crate::crew::eventcount::EventCount;
use crate::crew::look::NextLook;
use crate::crew::zero::{self, Use};
use crate::region::Region;
use crate::stats::Counter;
use crate::sys::cpu_stack::{self, CpuStacks, NONE};
use crate::sys::memory::Range;
use crate::sys::sched;
use crate::sys::topology::Topology;
use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use std::fmt;
use std::panic::Location;
use std::ptr::NonNull;
#[cfg(debug_assertions)]
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Nobody has the frame, or it is inside a run.
const FREE: u8 = 0;
/// The frame is allocated; the first one of a run of order n has this plus n.
pub(super) const ALLOCATED: u8 = 1;

/// On a stack: the frame is known to be zero.
pub(super) const ZEROED: u32 = 1 << 31;
const NUMBER: u32 = ZEROED - 1;

/// A CPU that was offline so far; no node has this number.
const UNKNOWN: u8 = u8::MAX;

/// The most frames: their numbers leave room for the flag, and for [`NONE`].
const MOST_FRAMES: usize = 1 << 30;

/// The most frames that a stack takes, and of which the half comes from a zone at a time: whole words, since
/// a zone gives those out with one operation each.
const STACK_MOST: usize = 6 * WORD;
const _: () = assert!(STACK_MOST <= cpu_stack::SLOTS);
const BATCH_MOST: usize = STACK_MOST / 2;

/// What happens too often to be counted by those to whom it happens, and what doesn't.
#[derive(Default)]
pub(super) struct PoolCounters {
    pub refills: Counter,
    pub flushes: Counter,
    pub drains: Counter,
    pub zeroed_by_caller: Counter,
    pub zeroed_ahead: Counter,
    pub given_back: Counter,
    pub free_errors: Counter,
}

/// Where a frame was allocated and freed last. Known in debug builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Places {
    /// Where it was allocated last.
    pub allocated: Option<&'static Location<'static>>,
    /// Where it was freed last.
    pub freed: Option<&'static Location<'static>>,
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = self.allocated {
            write!(f, "; allocated last at {place}")?;
        }
        if let Some(place) = self.freed {
            write!(f, "; freed last at {place}")?;
        }
        Ok(())
    }
}

/// See the module.
pub(super) struct Allocator {
    pub stacks: CpuStacks,
    pub states: Table<AtomicU8>,
    base: usize,
    frames: u32,
    /// Whether a frame may be another node's than the CPU's.
    several_nodes: bool,
    /// Frames that are known to be zero, for those who ask for such.
    pub zeroed: CpuStacks,
    pub areas: Table<Area>,
    pub trees: Table<Tree>,
    pub zones: Vec<Zone>,
    /// The node of each CPU, or `UNKNOWN`.
    nodes: Box<[AtomicU8]>,
    topology: Topology,
    /// Frames known to be zero that were asked for since the background looked.
    pub zeroes_wanted: AtomicUsize,
    /// Areas that are on their way back to the kernel.
    pub held_areas: AtomicUsize,
    /// Threads that may have free frames in their hands which they are about to put somewhere.
    pub moving: AtomicUsize,
    pub pieces: Pieces,
    /// Whether a stack was filled or relieved since the background looked, and whether it has to be called.
    pub attention: AtomicBool,
    pub next_look: NextLook,
    events: OnceLock<Arc<EventCount>>,
    pub counters: PoolCounters,
    region: Arc<Region>,
    span: NonNull<u8>,
    #[cfg(debug_assertions)]
    places: Table<[AtomicPtr<Location<'static>>; 2]>,
}

// SAFETY: `span` is memory that the allocator owns until it is dropped; everything else is shared by atomics.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

// SAFETY: null pointers.
#[cfg(debug_assertions)]
unsafe impl super::table::Zeroable for [AtomicPtr<Location<'static>>; 2] {}

impl Allocator {
    pub fn new(region: Arc<Region>, options: &Options, topology: &Topology) -> Result<Allocator, BuildError> {
        let nodes = topology.nodes();
        let wanted = options.limit.div_ceil(HUGE_PAGE_SIZE);
        // Each node has the same share, in whole trees where there are several.
        let share = wanted.div_ceil(nodes);
        let share = if nodes > 1 { share.next_multiple_of(TREE) } else { share };
        let count = share * nodes;
        if wanted == 0 || count * FRAMES > MOST_FRAMES {
            return Err(BuildError::Limit(options.limit));
        }
        let stacks = CpuStacks::new(policy::STACK_LEAST)?;
        let zeroed = CpuStacks::new(policy::STACK_LEAST)?;
        let (areas, trees) = (Table::new(count)?, Table::new(zone::trees(count))?);
        let states = Table::new(count * FRAMES)?;
        let tables = Tables { areas: &areas, trees: &trees };
        let open = if options.fixed { share } else { 0 };
        let cpus = stacks.cpus();
        let zones = (0..nodes).map(|node| Zone::new(node * share, share, open, cpus, tables)).collect();
        #[cfg(debug_assertions)]
        let places = Table::new(count * FRAMES)?;
        let bytes = count * HUGE_PAGE_SIZE;
        let align = if count >= GIANT_AREAS { 1 << 30 } else { HUGE_PAGE_SIZE };
        let span = region.allocate_unbacked(bytes, align)?;
        let allocator = Allocator {
            stacks,
            states,
            base: span.as_ptr() as usize,
            frames: (count * FRAMES) as u32,
            several_nodes: nodes > 1,
            zeroed,
            areas,
            trees,
            zones,
            nodes: (0..cpus).map(|cpu| topology.node_of(cpu).map_or(UNKNOWN, |node| node as u8).into()).collect(),
            topology: topology.clone(),
            zeroes_wanted: AtomicUsize::new(0),
            held_areas: AtomicUsize::new(0),
            moving: AtomicUsize::new(0),
            pieces: Pieces::new(),
            attention: AtomicBool::new(false),
            next_look: NextLook::new(),
            events: OnceLock::new(),
            counters: PoolCounters::default(),
            region,
            span,
            #[cfg(debug_assertions)]
            places,
        };
        if allocator.several_nodes {
            for (node, zone) in allocator.zones.iter().enumerate() {
                let frames = allocator.range_of(zone.frames().start, zone.frames().len());
                allocator.region.place_apart(frames, topology.number(node));
            }
        }
        Ok(allocator)
    }

    pub fn tables(&self) -> Tables<'_> {
        Tables { areas: &self.areas, trees: &self.trees }
    }

    /// The addresses of `count` frames from number `first` on.
    pub fn range_of(&self, first: usize, count: usize) -> Range {
        Range { start: self.base + first * PAGE_SIZE, len: count * PAGE_SIZE }
    }

    #[inline]
    pub fn frames(&self) -> u32 {
        self.frames
    }

    #[inline]
    pub fn base(&self) -> usize {
        self.base
    }

    /// The byte of a frame.
    #[inline(always)]
    pub fn state(&self, frame: u32) -> &AtomicU8 {
        debug_assert!(frame < self.frames);
        // SAFETY: only numbers that came out of a zone, or were compared with the number of frames, come here.
        unsafe { self.states.get_unchecked(frame as usize) }
    }

    /// Takes note that a program has `frame` from now on.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn hand_out(&self, frame: u32) -> u32 {
        self.state(frame).store(ALLOCATED, Ordering::Relaxed);
        #[cfg(debug_assertions)]
        self.places[frame as usize][0].store((&raw const *Location::caller()).cast_mut(), Ordering::Relaxed);
        frame
    }

    /// Takes note that a program has `frame` no more; `None` if none had it.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn take_back(&self, frame: u32) -> Option<()> {
        if frame >= self.frames || self.state(frame).load(Ordering::Relaxed) != ALLOCATED {
            return None;
        }
        self.state(frame).store(FREE, Ordering::Relaxed);
        #[cfg(debug_assertions)]
        self.places[frame as usize][1].store((&raw const *Location::caller()).cast_mut(), Ordering::Relaxed);
        Some(())
    }

    /// What is wrong with `frame`, which was given back with `order`.
    #[cold]
    #[inline(never)]
    pub fn diagnose(&self, frame: u32, order: u32) -> FreeError {
        self.counters.free_errors.add(1);
        let problem = if frame >= self.frames {
            Problem::OutOfRange
        } else {
            match self.state(frame).load(Ordering::Relaxed) {
                FREE => Problem::NotAllocated,
                state if u32::from(state - ALLOCATED) != order => Problem::Order,
                _ => Problem::NotAllocated,
            }
        };
        FreeError { frame, problem, places: self.places_of(frame) }
    }

    #[cfg(debug_assertions)]
    fn places_of(&self, frame: u32) -> Places {
        let read = |index: usize| {
            let place = self.places.get(frame as usize)?[index].load(Ordering::Relaxed);
            // SAFETY: null, or what `Location::caller` returned, which lives for ever.
            unsafe { place.as_ref() }
        };
        Places { allocated: read(0), freed: read(1) }
    }

    #[cfg(not(debug_assertions))]
    fn places_of(&self, _: u32) -> Places {
        Places::default()
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc(&self) -> Result<u32, OutOfFrames> {
        let slot = self.stacks.pop();
        let slot = if slot == NONE { self.refill()? } else { slot };
        Ok(self.hand_out(slot & NUMBER))
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc_zeroed(&self) -> Result<u32, OutOfFrames> {
        let slot = self.zeroed.pop();
        let slot = if slot == NONE { self.refill_zeroed()? } else { slot };
        Ok(self.hand_out(slot & NUMBER))
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn free(&self, frame: u32) -> Result<(), FreeError> {
        if self.take_back(frame).is_none() {
            return Err(self.diagnose(frame, 0));
        }
        if self.several_nodes && self.is_remote(frame) {
            self.give(&[frame]);
        } else if !self.stacks.push(frame) {
            self.flush(frame);
        }
        Ok(())
    }

    /// Whether `frame` belongs to another node than the CPU.
    #[cold]
    fn is_remote(&self, frame: u32) -> bool {
        !self.zones[self.node()].frames().contains(&(frame as usize))
    }

    /// The node that the calling thread's CPU belongs to.
    fn node(&self) -> usize {
        match self.nodes[self.stacks.here()].load(Ordering::Relaxed) {
            UNKNOWN => self.learn_node(),
            node => node as usize,
        }
    }

    /// The same for a CPU that was offline when the topology was read.
    #[cold]
    fn learn_node(&self) -> usize {
        let (cpu, number) = sched::current_cpu_and_node();
        let node = self.topology.home(number);
        if let Some(place) = self.nodes.get(cpu) {
            place.store(node as u8, Ordering::Relaxed);
        }
        node
    }

    /// The zones, those of the calling thread's node first, then by their distance.
    pub fn nearest_zones(&self) -> impl Iterator<Item = &Zone> {
        let own = if self.several_nodes { self.node() } else { 0 };
        self.topology.nearest(own).iter().map(|&node| &self.zones[node])
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc_bulk(&self, into: &mut [u32]) -> usize {
        let [one] = into else { return self.alloc_many(into) };
        let Ok(frame) = self.alloc() else { return 0 };
        *one = frame;
        1
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(never)]
    fn alloc_many(&self, into: &mut [u32]) -> usize {
        let mut count = self.stacks.pop_many(into);
        if count < into.len() {
            count += self.alloc_rest(&mut into[count..]);
        }
        for slot in &mut into[..count] {
            *slot = self.hand_out(*slot & NUMBER);
        }
        count
    }

    /// Takes what the stack did not have: large parts from the zones at once, the last one by way of the stack.
    #[cold]
    fn alloc_rest(&self, into: &mut [u32]) -> usize {
        let mut count = 0;
        while count < into.len() {
            let rest = &mut into[count..];
            if rest.len() >= BATCH_MOST {
                let taken = self.take(Kind::Any, rest);
                if taken > 0 {
                    count += taken;
                    continue;
                }
            }
            let Ok(slot) = self.refill() else { break };
            rest[0] = slot;
            count += 1 + self.stacks.pop_many(&mut rest[1..]);
        }
        count
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn free_bulk(&self, frames: &[u32]) -> Result<(), FreeError> {
        let &[one] = frames else { return self.free_many(frames) };
        self.free(one)
    }

    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(never)]
    fn free_many(&self, frames: &[u32]) -> Result<(), FreeError> {
        let (mut rest, mut first_error) = (frames, Ok(()));
        loop {
            let good = rest.iter().take_while(|&&frame| self.take_back(frame).is_some()).count();
            self.give_many(&rest[..good]);
            if good == rest.len() {
                return first_error;
            }
            // The others are free all the same; the first mistake is the one to look for.
            first_error = first_error.and(Err(self.diagnose(rest[good], 0)));
            rest = &rest[good + 1..];
        }
    }

    /// Puts frames that nobody has any more on the stack, and what it has no room for into the zones.
    #[inline]
    fn give_many(&self, frames: &[u32]) {
        if !self.several_nodes {
            let pushed = self.stacks.push_many(frames);
            if pushed < frames.len() {
                self.give_rest(&frames[pushed..]);
            }
        } else {
            self.give_by_node(frames);
        }
    }

    #[cold]
    fn give_by_node(&self, frames: &[u32]) {
        for run in frames.chunk_by(|&a, &b| self.is_remote(a) == self.is_remote(b)) {
            let pushed = if self.is_remote(run[0]) { 0 } else { self.stacks.push_many(run) };
            self.give(&run[pushed..]);
        }
    }

    #[cold]
    fn give_rest(&self, frames: &[u32]) {
        // An array is as good as a stack: it goes where it came from.
        if frames.len() >= BATCH_MOST {
            self.give(frames);
            return;
        }
        let (&last, first) = frames.split_last().expect("there is a rest");
        self.flush(last);
        let pushed = self.stacks.push_many(first);
        self.give(&first[pushed..]);
    }

    /// Fills the CPU's stack by half and returns one more frame, as on a stack.
    #[cold]
    #[inline(never)]
    fn refill(&self) -> Result<u32, OutOfFrames> {
        self.counters.refills.add(1);
        let cpu = self.stacks.here();
        let limit = self.stacks.limit(cpu);
        let mut batch = [0; BATCH_MOST];
        self.or_last_resort(0, || {
            let taken = self.take(Kind::Any, &mut batch[..policy::batch(limit).min(BATCH_MOST)]);
            let Some((&slot, rest)) = batch[..taken].split_last() else {
                return Some(self.zeroed.pop()).filter(|&slot| slot != NONE);
            };
            self.put(&self.stacks, cpu, rest);
            Some(slot)
        })
    }

    /// Fills the CPU's stack of frames that are known to be zero by half and returns one more. Where there are none, one is zeroed here.
    #[cold]
    #[inline(never)]
    fn refill_zeroed(&self) -> Result<u32, OutOfFrames> {
        self.counters.refills.add(1);
        let cpu = self.zeroed.here();
        let mut batch = [0; BATCH_MOST];
        let wanted = policy::batch(self.zeroed.limit(cpu)).min(BATCH_MOST);
        let taken = self.take(Kind::Zeroed, &mut batch[..wanted]);
        if let Some((&slot, rest)) = batch[..taken].split_last() {
            self.zeroes_wanted.fetch_add(taken, Ordering::Relaxed);
            self.put(&self.zeroed, cpu, rest);
            self.call_background();
            return Ok(slot);
        }
        self.zeroes_wanted.fetch_add(1, Ordering::Relaxed);
        let slot = self.stacks.pop();
        // What was opened just now is zero, too.
        let slot = if slot == NONE { self.refill()? } else { slot };
        if self.call_background() {
            // Helpers can zero what is in the zones, and not what waits on a stack.
            self.relieve(cpu);
        }
        if slot & ZEROED == 0 {
            self.counters.zeroed_by_caller.add(1);
            // SAFETY: the frame is this call's.
            unsafe { zero::zero(self.range_of(slot as usize, 1), Use::Soon) };
        }
        Ok(slot)
    }

    /// Puts frames on one of the CPU's stacks, which takes more from now on; what it has no room for goes into the zones.
    fn put(&self, stacks: &CpuStacks, cpu: usize, slots: &[u32]) {
        let pushed = stacks.push_many(slots);
        self.give(&slots[pushed..]);
        stacks.set_limit(cpu, policy::grown(stacks.limit(cpu), STACK_MOST));
    }

    /// Relieves the CPU's stack of half and puts `frame` there.
    #[cold]
    #[inline(never)]
    fn flush(&self, frame: u32) {
        let cpu = self.stacks.here();
        self.relieve(cpu);
        if !self.stacks.push(frame) {
            self.give(&[frame]);
        }
        self.stacks.set_limit(cpu, policy::grown(self.stacks.limit(cpu), STACK_MOST));
        self.call_background();
    }

    /// Gives up to half of what the CPU's stack takes back to the zones.
    fn relieve(&self, cpu: usize) {
        self.counters.flushes.add(1);
        let mut batch = [0; BATCH_MOST];
        let count = self.stacks.pop_many(&mut batch[..policy::batch(self.stacks.limit(cpu)).min(BATCH_MOST)]);
        self.give(&batch[..count]);
    }

    /// Takes frames from the zones, as for a stack: the CPU's own node first, and frames that are known to be zero from there only. Returns how
    /// many.
    fn take(&self, kind: Kind, into: &mut [u32]) -> usize {
        let cpu = self.stacks.here();
        let mut count = 0;
        // To zero a frame costs less than to use one of another node as long as it is in use.
        let zones = if kind == Kind::Zeroed { 1 } else { self.zones.len() };
        for zone in self.nearest_zones().take(zones) {
            let most = (into.len() - count) as u32;
            zone.take(self.tables(), cpu, most, kind, |area, taken| {
                let first = (area * FRAMES + taken.word * WORD) as u32;
                count += write_numbers(first, taken, &mut into[count..]);
            });
            if count == into.len() {
                break;
            }
        }
        count
    }

    /// Gives frames, as on a stack, back to their zones.
    pub fn give(&self, slots: &[u32]) {
        let word_of = |slot: u32| (slot & NUMBER) as usize / WORD;
        let mut next = 0;
        while next < slots.len() {
            let area = word_of(slots[next]) / WORDS;
            let (mut count, mut zeroed_any) = (0, false);
            while next < slots.len() && word_of(slots[next]) / WORDS == area {
                let word = word_of(slots[next]);
                let (mut mask, mut zeroed) = (0u64, 0u64);
                while next < slots.len() && word_of(slots[next]) == word {
                    let slot = slots[next];
                    mask |= 1 << (slot % WORD as u32);
                    zeroed |= u64::from(slot / ZEROED) << (slot % WORD as u32);
                    next += 1;
                }
                let free_before = self.areas[area].put(WordFrames { word: word % WORDS, mask, zeroed });
                if free_before != 0 {
                    // Two threads have freed it at the same instant, which neither could see.
                    self.counters.free_errors.add(free_before.count_ones().into());
                }
                count += (mask & !free_before).count_ones();
                zeroed_any |= zeroed != 0;
            }
            if count > 0 {
                self.tables().release(area, count, zeroed_any);
            }
        }
        if let Some(&last) = slots.last() {
            let area = (last & NUMBER) as usize / FRAMES;
            self.zone_of(area).gives(self.tables(), self.stacks.here(), area);
        }
    }

    /// The zone of an area.
    fn zone_of(&self, area: usize) -> &Zone {
        &self.zones[area / (self.areas.len() / self.zones.len())]
    }

    /// Has the background listen to `events`.
    pub fn connect(&self, events: Arc<EventCount>) {
        let _ = self.events.set(events);
    }

    /// Has the background look soon. May be called in a signal handler. Returns whether nobody had since its last look.
    pub fn call_background(&self) -> bool {
        let first = !self.attention.load(Ordering::Relaxed) && !self.attention.swap(true, Ordering::Relaxed);
        if first
            && self.next_look.rests()
            && let Some(events) = self.events.get()
        {
            events.notify(1);
        }
        first
    }

    /// Frames in the zones that are known to be zero, counted up to `enough`.
    pub fn known_zeroed(&self, enough: usize) -> usize {
        let mut sum = 0;
        for area in self.zones.iter().flat_map(|zone| zone.with_zeroed(self.tables())) {
            sum += self.areas[area].counts().zeroed;
            if sum >= enough {
                break;
            }
        }
        sum
    }

    /// Whether no area has memory behind it.
    pub fn nothing_backed(&self) -> bool {
        !self.zones.iter().flat_map(Zone::open).any(|area| self.areas[area].is_backed())
    }

    /// Sets up to `most` dirty frames of `area` out for a helper to zero. Returns how many.
    pub fn set_out(&self, area: usize, most: u32) -> usize {
        self.pieces.set_out(area, self.tables(), self.range_of(area * FRAMES, FRAMES), most)
    }
}

/// Writes the numbers of the frames in `taken`, the first of whose word is `first`. Returns how many.
#[inline]
fn write_numbers(first: u32, taken: WordFrames, into: &mut [u32]) -> usize {
    if taken.mask == u64::MAX && (taken.zeroed == 0 || taken.zeroed == u64::MAX) {
        let first = first | if taken.zeroed == 0 { 0 } else { ZEROED };
        into[..WORD].iter_mut().zip(first..).for_each(|(slot, number)| *slot = number);
        return WORD;
    }
    let (mut mask, mut count) = (taken.mask, 0);
    while mask != 0 {
        let bit = mask.trailing_zeros();
        let zeroed = (taken.zeroed >> bit) as u32 & 1;
        into[count] = (first + bit) | zeroed << 31;
        mask &= mask - 1;
        count += 1;
    }
    count
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: the span is the allocator's own; nobody who could use its memory is left. It was allocated, so it is known to the region.
        let _ = unsafe { self.region.free(self.span) };
    }
}
