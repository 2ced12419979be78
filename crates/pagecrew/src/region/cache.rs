//! Spans that wait for their next user on the CPU where they were freed: a pair of malloc and free that finds one there takes no lock,
//! executes no atomic exchange and makes no system call.
//!
//! Each CPU has a stack for each size class ([`ClassStacks`]): any thread may use its CPU's at any instant, one that was moved to another
//! CPU meanwhile and a signal handler too. No thread ever waits for another, and a forked child finds them as they were.
//!
//! **Bounds.** A span comes here from its user, so what caches hold is never more than what the program once had. Whoever needs memory
//! that the zones don't have drains the caches first; the watcher drains those on which nothing happens.

use super::classes::{self, CLASSES};
use super::page_map::{self, Cacheable, ONE, PageMap};
use super::zeroing::ZERO_SOON;
use crate::sys::cpu_stack::{ClassStacks, Line, MOST_CLASSES, NONE};
use crate::sys::{Errno, PAGE_SIZE};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::Relaxed};

/// What was counted on a CPU. One thread at a time is on a CPU, so an update that is lost to a move to another CPU is rare, and only a
/// number for people is wrong by one.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tally {
    pub taken: usize,
    pub taken_bytes: usize,
    pub put: usize,
    /// By how much more the CPU's stacks hold than at the last tally, in bytes, with small pages and with huge pages; wraps.
    pub held_change: [usize; 2],
}

// What the line of a CPU holds, each with small pages and with huge pages. Of spans that were taken and put in since the last tally, in the
// low bits their number times `ONE`, above it their pages, as in the words of the map. Between two tallies, fewer are taken than wait on the
// stacks and are put in.
const TAKEN: usize = 0;
const PUT: usize = 2;
/// Bytes on the stacks, about, as of the last tally.
const HELD: usize = 4;

const CALLS: u32 = page_map::PAGES;
/// Spans that are put in before a CPU's counts are added to the region's, at the latest; a power of two.
const TALLY_CALLS: usize = 256;
/// And pages by which what the stacks hold grows: 4 MiB.
const TALLY_PAGES: usize = (4 << 20) / PAGE_SIZE;
/// Of spans with fewer pages than these, one in so many is looked at whether it is time: together they are as long.
const CLOSELY_CALLS: usize = 8;
const CLOSELY_PAGES: usize = TALLY_PAGES / CLOSELY_CALLS;
const _: () = assert!(CLOSELY_CALLS.is_power_of_two() && TALLY_CALLS.is_multiple_of(CLOSELY_CALLS));

/// And pages that were taken or put in, from which on the slow path adds them first: 2 MiB.
const BEHIND_PAGES: usize = (2 << 20) / PAGE_SIZE;

fn calls(counted: usize) -> usize {
    (counted & ((1 << CALLS) - 1)) / ONE
}

/// Class 0 is that of spans that no cache takes.
static SLOTS: [u8; MOST_CLASSES] = {
    let mut slots = [0; MOST_CLASSES];
    let mut class = 0;
    while class < CLASSES {
        slots[class + 1] = classes::slots(class) as u8;
        class += 1;
    }
    slots
};

#[inline(always)]
fn count(counter: &AtomicUsize, span: Cacheable) -> usize {
    let value = counter.load(Relaxed).wrapping_add(span.counted());
    counter.store(value, Relaxed);
    value
}

/// The page that begins at `offset`. Of an offset that is not a page's, the low bits become high ones, and there is no such page.
#[inline(always)]
fn page_at(offset: usize) -> usize {
    offset.rotate_right(PAGE_SIZE.ilog2())
}

/// A span that is handed out.
#[derive(Debug, Clone, Copy)]
pub struct TakenSpan {
    /// Where it begins.
    pub start: NonNull<u8>,
    /// How many bytes of it can be used.
    pub len: usize,
}

/// What is left to do of a span that is given back and could not simply be put into a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uncached {
    /// Nothing has happened: it is freed in its zone, or is no span.
    AsItWas,
    /// It is retired, and the cache didn't take it at once.
    Retired(Cacheable),
    /// It is in the cache, and it is time to look at what is retained.
    LookAfter(Cacheable),
}

// What a CPU's cache takes. Bits: spans, in restartable sequences; only those of the CPU's node; spans, where there are no sequences.
const NOTHING: u8 = 0;
const FAST: u8 = 1;
const NEAR: u8 = 2;
const SLOWLY: u8 = 4;

/// A CPU that was offline so far; no node has this number.
const UNKNOWN: u8 = u8::MAX;

/// The caches of all CPUs, with what has to be known to use them in one place: what nearly every request meets.
pub struct CpuCaches {
    /// Where the arena begins, in bytes.
    start: usize,
    /// What begins where in the arena.
    map: PageMap,
    /// An offset into the arena shifted right by so much is the number of its node.
    node_shift: u32,
    /// What may wait here of what is freed: bits as above.
    takes: AtomicU8,
    /// Whether they never may again.
    closed: AtomicBool,
    /// Whether the spans that memory is zeroed ahead for go back to their zones.
    zeroes_wanted: AtomicBool,
    stacks: ClassStacks,
    /// The node of each CPU, or `UNKNOWN`; empty where there is only one. Only spans of its node wait on a CPU.
    nodes: Box<[AtomicU8]>,
}

impl CpuCaches {
    /// Empty caches of an arena that begins at `start`, of which each node has 2^`node_shift` bytes; `node_of` says the node of a CPU.
    ///
    /// # Errors
    /// `ENOMEM` without address space.
    pub(super) fn new(
        start: usize,
        map: PageMap,
        node_shift: u32,
        nodes: usize,
        node_of: impl Fn(usize) -> Option<usize>,
    ) -> Result<CpuCaches, Errno> {
        let stacks = ClassStacks::new(&SLOTS)?;
        let known = |cpu| AtomicU8::new(node_of(cpu).map_or(UNKNOWN, |node| node as u8));
        let nodes = (0..if nodes > 1 { stacks.cpus() } else { 0 }).map(known).collect();
        let [closed, zeroes_wanted] = [false; 2].map(AtomicBool::new);
        let takes = AtomicU8::new(NOTHING);
        Ok(CpuCaches { start, map, node_shift, takes, closed, zeroes_wanted, stacks, nodes })
    }

    /// The CPU that the calling thread runs on at this moment.
    pub(super) fn here(&self) -> usize {
        self.stacks.here()
    }

    /// The CPUs on which a span ever waited.
    pub(super) fn used(&self) -> impl Iterator<Item = usize> + '_ {
        self.stacks.used()
    }

    /// The node of a CPU, if that is known.
    pub(super) fn node(&self, cpu: usize) -> Option<usize> {
        let node = self.nodes.get(cpu).map_or(0, |node| node.load(Relaxed));
        (node != UNKNOWN).then_some(node as usize)
    }

    /// Says the node of a CPU that was not known. From now on, spans of that node wait there.
    pub(super) fn set_node(&self, cpu: usize, node: usize) {
        if let Some(place) = self.nodes.get(cpu) {
            place.store(node as u8, Relaxed);
        }
    }

    /// Says whether spans that are freed may wait here from now on.
    pub(super) fn set_open(&self, open: bool) {
        let takes = match () {
            () if !open || self.closed.load(Relaxed) => NOTHING,
            () if !self.restartable() => SLOWLY,
            () if self.nodes.is_empty() => FAST,
            () => FAST | NEAR,
        };
        self.takes.store(takes, Relaxed);
    }

    /// Nothing waits here any more, and nobody looks at the map: parts of it go.
    pub(super) fn close(&self) {
        self.closed.store(true, Relaxed);
        self.takes.store(NOTHING, Relaxed);
    }

    /// Says whether the spans that memory is zeroed ahead for go back to their zones.
    pub(super) fn set_zeroes_wanted(&self, wanted: bool) {
        self.zeroes_wanted.store(wanted, Relaxed);
    }

    /// Whether there are restartable sequences.
    pub fn restartable(&self) -> bool {
        self.stacks.restartable()
    }

    /// A span for `size` bytes that waits on this CPU, if there is one: no lock, no system call, and `errno` stays as it is.
    ///
    /// # Safety
    /// [`CpuCaches::restartable`] says so; otherwise [`Region::allocate`](super::Region::allocate) may find one.
    #[inline(always)]
    pub unsafe fn take(&self, size: usize) -> Option<TakenSpan> {
        // SAFETY: by the function's own contract.
        let (page, line) = unsafe { self.stacks.pop(classes::class_for(size)) }?;
        Some(self.employ(page, line))
    }

    /// As [`CpuCaches::take`], with and without restartable sequences.
    pub(super) fn take_slowly(&self, size: usize) -> Option<TakenSpan> {
        let (page, line) = self.stacks.pop_slowly(classes::class_for(size))?;
        Some(self.employ(page, line))
    }

    #[inline(always)]
    fn employ(&self, page: u32, line: &Line) -> TakenSpan {
        // SAFETY: a span begins there that waited in this cache, so the page is one of the map's.
        let span = unsafe { self.map.employ(page as usize) };
        count(&line.counts[TAKEN + span.kind()], span);
        let address = (self.start + page as usize * PAGE_SIZE) as *mut u8;
        // SAFETY: the arena, in which the page lies, is not at address 0.
        let start = unsafe { NonNull::new_unchecked(address) };
        TakenSpan { start, len: span.bytes() }
    }

    /// Takes the span at `offset` in the arena back into the cache of this CPU: no lock, no system call, and `errno` stays as it is.
    ///
    /// # Safety
    /// If a span in use begins there, its memory is not used any more.
    ///
    /// # Errors
    /// What is left to do; [`Region::free_uncached`](super::Region::free_uncached) has to be called with it.
    #[inline(always)]
    pub unsafe fn put(&self, offset: usize) -> Result<(), Uncached> {
        let page = page_at(offset);
        let takes = self.takes.load(Relaxed);
        // What is set beside `FAST`, or is missing.
        let beside = takes ^ FAST;
        if beside != 0 && (beside != NEAR || !self.stacks.cpu().is_some_and(|cpu| self.is_near(page, cpu))) {
            return Err(Uncached::AsItWas);
        }
        let span = self.map.retire(page).ok_or(Uncached::AsItWas)?;
        if self.goes_back(span) {
            return Err(Uncached::Retired(span));
        }
        // SAFETY: there are restartable sequences, as `FAST` says.
        match unsafe { self.stacks.push(span.class(), page as u32) } {
            Some(line) => Self::count_put(line, span),
            None => Err(Uncached::Retired(span)),
        }
    }

    /// As [`CpuCaches::put`], with and without restartable sequences. Returns the length of the span in bytes.
    ///
    /// # Safety
    /// As [`CpuCaches::put`].
    ///
    /// # Errors
    /// As [`CpuCaches::put`].
    #[cold]
    pub(super) unsafe fn put_slowly(&self, offset: usize) -> Result<usize, Uncached> {
        let page = page_at(offset);
        let takes = self.takes.load(Relaxed);
        if takes == NOTHING || (!self.nodes.is_empty() && !self.is_near(page, self.here())) {
            return Err(Uncached::AsItWas);
        }
        let span = self.map.retire(page).ok_or(Uncached::AsItWas)?;
        self.put_retired(offset, span).map(|()| span.bytes())
    }

    /// As [`CpuCaches::put`] for a span that is retired already, as [`Uncached::Retired`] says.
    ///
    /// # Errors
    /// As [`CpuCaches::put`].
    pub(super) fn put_retired(&self, offset: usize, span: Cacheable) -> Result<(), Uncached> {
        let line =
            if self.goes_back(span) { None } else { self.stacks.push_slowly(span.class(), page_at(offset) as u32) };
        line.map_or(Err(Uncached::Retired(span)), |line| Self::count_put(line, span))
    }

    /// Whether a span goes back to its zone to be zeroed ahead.
    #[inline(always)]
    fn goes_back(&self, span: Cacheable) -> bool {
        span.pages() >= ZERO_SOON / PAGE_SIZE && self.zeroes_wanted.load(Relaxed)
    }

    #[inline(always)]
    fn count_put(line: &Line, span: Cacheable) -> Result<(), Uncached> {
        let put = count(&line.counts[PUT + span.kind()], span);
        if span.pages() >= CLOSELY_PAGES || put & ((CLOSELY_CALLS - 1) * ONE) == 0 {
            let grown = put.wrapping_sub(line.counts[TAKEN + span.kind()].load(Relaxed)).cast_signed();
            if put & (TALLY_CALLS * ONE) != 0 || grown >= (TALLY_PAGES << CALLS) as isize {
                return Err(Uncached::LookAfter(span));
            }
        }
        Ok(())
    }

    /// Whether `page` lies on the node of `cpu`.
    #[inline(always)]
    fn is_near(&self, page: usize, cpu: usize) -> bool {
        let node = self.nodes.get(cpu).map_or(0, |node| node.load(Relaxed));
        page < self.map.pages() && (page * PAGE_SIZE) >> self.node_shift == node as usize
    }

    /// Whether so much was counted on `cpu` since the last tally that whoever looks at the sums should have it added first. What was taken and
    /// put in counts, not only what that leaves: a tally that meets a thread in the middle of counting may count all of it twice.
    pub(super) fn is_behind(&self, cpu: usize) -> bool {
        let counts = &self.stacks.line(cpu).counts[TAKEN..HELD];
        counts.iter().any(|counter| counter.load(Relaxed) >= BEHIND_PAGES << CALLS)
    }

    /// What was counted on `cpu` since the last call; `None` for nothing.
    pub(super) fn tally(&self, cpu: usize) -> Option<Tally> {
        let mut tally = Tally::default();
        let Line { counts: line, .. } = self.stacks.line(cpu);
        if line[TAKEN..HELD].iter().all(|counter| counter.load(Relaxed) == 0) {
            return None;
        }
        for kind in [0, 1] {
            let [taken, put] = [TAKEN, PUT].map(|counter| line[counter + kind].swap(0, Relaxed));
            let bytes = |counted: usize| (counted >> CALLS) * PAGE_SIZE;
            tally.taken += calls(taken);
            tally.taken_bytes += bytes(taken);
            tally.put += calls(put);
            tally.held_change[kind] = bytes(put).wrapping_sub(bytes(taken));
            line[HELD + kind].fetch_add(tally.held_change[kind], Relaxed);
        }
        Some(tally)
    }

    /// Takes every span of this CPU out, for `release` to give the one that begins at a page of the arena back to its zone. Returns how
    /// many there were.
    pub(super) fn drain_here(&self, mut release: impl FnMut(usize)) -> usize {
        self.stacks.drain_here(|page| release(page as usize))
    }

    /// As [`CpuCaches::drain_here`] for all CPUs; interrupts those that run this program. `closed` is called when nobody can put or take any
    /// more, before the first span comes out.
    pub(super) fn drain_all(&self, closed: impl FnOnce(), mut release: impl FnMut(usize)) -> usize {
        self.stacks.drain(closed, |page| release(page as usize))
    }

    /// A span of `len` bytes was drained from `cpu`.
    pub(super) fn note_drained(&self, cpu: usize, kind: usize, len: usize) {
        self.stacks.line(cpu).counts[HELD + kind].fetch_sub(len, Relaxed);
    }

    /// What `cpu` holds, with small pages and with huge pages, as far as was counted until now; from now on it holds nothing. It wraps.
    pub(super) fn forget_held(&self, cpu: usize) -> [usize; 2] {
        [0, 1].map(|kind| self.stacks.line(cpu).counts[HELD + kind].swap(0, Relaxed))
    }

    /// In a forked child.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub(super) unsafe fn after_fork(&self) {
        // SAFETY: by the function's own contract.
        unsafe { self.stacks.after_fork() };
    }

    /// Where the stacks lie.
    pub(super) fn own_memory(&self) -> crate::sys::memory::Range {
        self.stacks.range()
    }
}

/// The largest arena of which spans can wait here, in bytes: 16 TiB.
pub(super) const ARENA_MOST: usize = (NONE as usize) * PAGE_SIZE;

#[cfg(test)]
mod tests {
    use super::super::spans::{Marks, Segment, State};
    use super::*;
    use crate::sys::sched::{self, CpuSet};

    const START: usize = 1 << 40;
    const SHIFT: u32 = 30;

    /// Runs `work` on one CPU, with empty caches and a function that says that a span of so many bytes is in use at an offset.
    fn pinned<T: Send>(work: impl FnOnce(&CpuCaches, &dyn Fn(usize, usize)) -> T + Send) -> T {
        let map = PageMap::new(2 << SHIFT >> 12).unwrap();
        let caches = CpuCaches::new(START, map.part(0, map.pages(), false), SHIFT + 1, 1, |_| Some(0)).unwrap();
        let zones = [false, true].map(|huge| map.part((huge as usize) << SHIFT >> 12, 1 << SHIFT >> 12, huge));
        caches.set_open(true);
        std::thread::scope(|scope| {
            let work = || {
                let mut one = CpuSet::new();
                one.insert(sched::current_cpu());
                sched::set_affinity(&one).unwrap();
                let span = |offset: usize, size: usize| {
                    let (len, class) = classes::span_for(size).unwrap();
                    let zone = &zones[offset >> SHIFT];
                    zone.set(
                        (offset & ((1 << SHIFT) - 1)) >> 12,
                        &Segment { len, state: State::InUse, marks: Marks::default(), class },
                    );
                };
                work(&caches, &span)
            };
            scope.spawn(work).join().unwrap()
        })
    }

    fn put(caches: &CpuCaches, address: usize) -> Result<(), Uncached> {
        let offset = address.wrapping_sub(START);
        // SAFETY: these spans have no memory.
        match unsafe { caches.put(offset) } {
            Err(Uncached::Retired(span)) => caches.put_retired(offset, span),
            done => done,
        }
    }

    fn take(caches: &CpuCaches, size: usize) -> Option<usize> {
        assert!(caches.restartable());
        // SAFETY: as was asserted.
        unsafe { caches.take(size) }.map(|span| span.start.as_ptr() as usize - START)
    }

    #[test]
    fn the_last_span_put_in_comes_out_first_and_each_once() {
        pinned(|caches, span| {
            let size = 100 << 10;
            assert_eq!(take(caches, size), None);
            let (len, class) = classes::span_for(size).unwrap();
            let slots = classes::slots(class as usize - 1);
            for index in 0..=slots {
                span(index * len, size);
            }
            assert!(
                (0..slots)
                    .all(|index| matches!(put(caches, START + index * len), Ok(()) | Err(Uncached::LookAfter(_))))
            );
            let full = put(caches, START + slots * len);
            assert!(matches!(full, Err(Uncached::Retired(span)) if span.bytes() == len), "{full:?}");
            assert_eq!([take(caches, size / 2), take(caches, 2 * size)], [None, None], "another class");
            assert!((0..slots).rev().all(|index| take(caches, size) == Some(index * len)));
            assert_eq!(take(caches, size), None);
        });
    }

    #[test]
    fn what_is_no_span_in_use_is_left_as_it_was() {
        pinned(|caches, span| {
            span(0, 64 << 10);
            assert_eq!(put(caches, START), Ok(()));
            for address in [START, START + 8, START + 4096, START - 4096, START + (2 << SHIFT), 0, usize::MAX] {
                assert_eq!(put(caches, address), Err(Uncached::AsItWas), "{address:#x}");
            }
            assert_eq!(take(caches, 64 << 10), Some(0));
            caches.set_open(false);
            assert_eq!(put(caches, START), Err(Uncached::AsItWas));
        });
    }

    #[test]
    fn what_is_held_is_what_was_put_in_and_not_taken() {
        pinned(|caches, span| {
            let cpu = caches.here();
            span(0, 64 << 10);
            span(1 << SHIFT, 1 << 20);
            assert_eq!([put(caches, START), put(caches, START + (1 << SHIFT))], [Ok(()), Ok(())]);
            assert_eq!(take(caches, 64 << 10), Some(0));
            let [small, mebibyte] = [64 << 10, 1 << 20].map(|size| classes::span_for(size).unwrap().0);
            let tally = Tally { taken: 1, taken_bytes: small, put: 2, held_change: [0, mebibyte] };
            assert_eq!([caches.tally(cpu), caches.tally(cpu)], [Some(tally), None]);
            span(1 << 20, 4 << 20);
            let grown = put(caches, START + (1 << 20));
            assert!(
                matches!(grown, Err(Uncached::LookAfter(span)) if span.bytes() == 4 << 20),
                "4 MiB more: {grown:?}"
            );
            assert_eq!(caches.tally(cpu).unwrap().held_change, [4 << 20, 0]);
            caches.note_drained(cpu, 0, 1 << 20);
            assert_eq!(caches.forget_held(cpu), [3 << 20, mebibyte]);
            assert_eq!(caches.forget_held(cpu), [0, 0]);
        });
    }

    #[test]
    fn it_is_time_for_a_tally_after_so_many_calls() {
        pinned(|caches, span| {
            span(0, 1 << 20);
            for _ in 1..TALLY_CALLS {
                assert_eq!(put(caches, START), Ok(()));
                assert_eq!(take(caches, 1 << 20), Some(0));
            }
            let (len, _) = classes::span_for(1 << 20).unwrap();
            let due = put(caches, START);
            assert!(matches!(due, Err(Uncached::LookAfter(span)) if span.bytes() == len), "{due:?}");
        });
    }

    #[test]
    fn spans_that_are_zeroed_ahead_do_not_wait_here() {
        pinned(|caches, span| {
            span(0, ZERO_SOON);
            caches.set_zeroes_wanted(true);
            let put = put(caches, START);
            assert!(matches!(put, Err(Uncached::Retired(span)) if span.bytes() == ZERO_SOON), "{put:?}");
        });
    }
}
