//! What lies at an address: one word for each page of a zone, of which that of a run's first page says its state, length and marks.
//!
//! The zone's lock protects every word but those of spans that were handed out. Such a span belongs to one thread at a time: its user, who
//! frees it; then the cache that it waits in; then whoever takes it from there. So `InUse` and `Cached` change without a lock or an atomic
//! exchange. A program that frees a span twice is told; one that does so in two threads within the same few nanoseconds may not be, as
//! with every malloc that takes no lock.

use super::spans::{Marks, Segment, State};
use crate::sys::memory::Range;
use crate::sys::words::Words;
use crate::sys::{Errno, PAGE_SIZE};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// See the module.
pub struct PageMap {
    words: Words,
    /// What is set in each word that is written here: [`HUGE`] or nothing.
    zone: u64,
}

const RESERVED: u64 = 1;
const IN_USE: u64 = 2;
const CACHED: u64 = 3;
const DIRTY: u64 = 4;
const ZEROED: u64 = 5;
const ZEROING: u64 = 6;
const DISCARDING: u64 = 7;
const GIVEN_UP: u64 = 8;
const LOST: u64 = 9;
/// In use and cached, where no cache takes the span: it has no class. Differ in the same bit as those with a class.
const IN_USE_ALONE: u64 = 10;
const CACHED_ALONE: u64 = 11;
const STATES: u64 = 0xf;

const MOVED: u64 = 1 << 4;
const ALTERED: u64 = 1 << 5;
const GUARDED: u64 = 1 << 6;
const FRESH: u64 = 1 << 7;
const WIPED: u64 = 1 << 16;
/// What begins there lies in a zone with huge pages.
const HUGE: u64 = 1 << 17;

/// Of a span, its class and one; of what is being zeroed, the helper's slot.
const TAG: u32 = 8;
/// Above it, its pages.
pub(super) const PAGES: u32 = 20;
/// A bit that is set in each word of a span in use or cached that has a class, among those below [`PAGES`].
pub(super) const ONE: usize = (IN_USE & CACHED) as usize;
const _: () = assert!(ONE.is_power_of_two());

fn encode(segment: &Segment) -> u64 {
    let (state, tag) = match segment.state {
        State::Reserved => (RESERVED, 0),
        State::InUse if segment.class == 0 => (IN_USE_ALONE, 0),
        State::Cached if segment.class == 0 => (CACHED_ALONE, 0),
        State::InUse => (IN_USE, segment.class as u64),
        State::Cached => (CACHED, segment.class as u64),
        State::Dirty => (DIRTY, 0),
        State::Zeroed => (ZEROED, 0),
        State::Zeroing(slot) => (ZEROING, slot as u64),
        State::Discarding => (DISCARDING, 0),
        State::GivenUp => (GIVEN_UP, 0),
        State::Lost => (LOST, 0),
    };
    let Marks { moved, altered, guarded, fresh, wiped } = segment.marks;
    let marks = [(moved, MOVED), (altered, ALTERED), (guarded, GUARDED), (fresh, FRESH), (wiped, WIPED)];
    let marks = marks.iter().filter(|(set, _)| *set).fold(0, |sum, (_, bit)| sum | bit);
    state | marks | tag << TAG | ((segment.len / PAGE_SIZE) as u64) << PAGES
}

fn decode(word: u64) -> Option<Segment> {
    let tag = (word >> TAG) as u8;
    let (state, class) = match word & STATES {
        RESERVED => (State::Reserved, 0),
        IN_USE | IN_USE_ALONE => (State::InUse, tag),
        CACHED | CACHED_ALONE => (State::Cached, tag),
        DIRTY => (State::Dirty, 0),
        ZEROED => (State::Zeroed, 0),
        ZEROING => (State::Zeroing(tag), 0),
        DISCARDING => (State::Discarding, 0),
        GIVEN_UP => (State::GivenUp, 0),
        LOST => (State::Lost, 0),
        _ => return None,
    };
    let marks = Marks {
        moved: word & MOVED != 0,
        altered: word & ALTERED != 0,
        guarded: word & GUARDED != 0,
        fresh: word & FRESH != 0,
        wiped: word & WIPED != 0,
    };
    Some(Segment { len: (word >> PAGES) as usize * PAGE_SIZE, state, marks, class })
}

/// What the map said of a span that was taken out of use for its cache, or out of its cache for use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cacheable(u64);

impl Cacheable {
    /// Its class and one.
    #[inline(always)]
    pub fn class(self) -> u8 {
        (self.0 >> TAG) as u8
    }

    /// Its pages.
    #[inline(always)]
    pub fn pages(self) -> usize {
        (self.0 >> PAGES) as usize
    }

    /// What is added up to count such spans: [`ONE`], and above it their pages where the map's words have them.
    #[inline(always)]
    pub(super) fn counted(self) -> usize {
        self.0 as usize & (!((1 << PAGES) - 1) | ONE)
    }

    /// Whether it lies in a zone with huge pages: 1, or 0.
    #[inline(always)]
    pub fn kind(self) -> usize {
        (self.0 / HUGE) as usize & 1
    }

    /// Its length in bytes.
    #[inline(always)]
    pub fn bytes(self) -> usize {
        self.pages() * PAGE_SIZE
    }
}

impl PageMap {
    /// A map of `pages` pages in which nothing begins.
    ///
    /// # Errors
    /// `ENOMEM` without address space.
    pub fn new(pages: usize) -> Result<PageMap, Errno> {
        Ok(PageMap { words: Words::new(pages)?, zone: 0 })
    }

    /// As [`PageMap::new`], to be [opened](PageMap::open) before anything is said to begin somewhere.
    ///
    /// # Errors
    /// As [`PageMap::new`].
    pub fn closed(pages: usize) -> Result<PageMap, Errno> {
        Ok(PageMap { words: Words::closed(pages)?, zone: 0 })
    }

    /// Pages `[from, to)` can be written to from now on.
    ///
    /// # Errors
    /// Those of [`Words::open`].
    pub fn open(&self, from: usize, to: usize) -> Result<(), Errno> {
        self.words.open(from, to)
    }

    /// The map of the `pages` pages from `first` on, a zone with `huge` pages or small ones: what one says, the other does.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn part(&self, first: usize, pages: usize, huge: bool) -> PageMap {
        PageMap { words: self.words.part(first, pages), zone: if huge { HUGE } else { 0 } }
    }

    /// How many pages it is a map of.
    #[inline(always)]
    pub fn pages(&self) -> usize {
        self.words.len()
    }

    /// What begins at page `page`.
    pub fn get(&self, page: usize) -> Option<Segment> {
        decode(self.words.get(page)?.load(Acquire))
    }

    /// Says that `segment` begins at page `page`.
    pub fn set(&self, page: usize, segment: &Segment) {
        self.words.at(page).store(encode(segment) | self.zone, Release);
    }

    /// Says that nothing begins at page `page` any more.
    pub fn clear(&self, page: usize) {
        self.words.at(page).store(0, Release);
    }

    /// Marks the span in use that begins at page `page` as altered, whatever else happens to it.
    pub fn mark_altered(&self, page: usize) {
        self.words.at(page).fetch_or(ALTERED, Release);
    }

    /// The span at page `page`, whose user gives it back, goes from `InUse` to `Cached`. `None` where no span in use begins, or one that no
    /// cache takes: without a class, or with any mark.
    #[inline(always)]
    pub fn retire(&self, page: usize) -> Option<Cacheable> {
        let word = self.words.get(page)?;
        let found = word.load(Relaxed);
        if found & 0xff != IN_USE {
            return None;
        }
        word.store(found ^ (IN_USE ^ CACHED), Release);
        Some(Cacheable(found))
    }

    /// As [`PageMap::retire`] for any span in use, which then waits for its zone. Returns whether there was one.
    pub fn retire_any(&self, page: usize) -> bool {
        let Some(word) = self.words.get(page) else { return false };
        let in_use = |found: u64| matches!(found & STATES, IN_USE | IN_USE_ALONE);
        let retire = |found: u64| in_use(found).then_some(found ^ (IN_USE ^ CACHED));
        word.fetch_update(Release, Relaxed, retire).is_ok()
    }

    /// The span at page `page`, which was taken from a cache, is in use again.
    ///
    /// # Safety
    /// There is such a page.
    #[inline(always)]
    pub unsafe fn employ(&self, page: usize) -> Cacheable {
        // SAFETY: by the function's own contract.
        let word = unsafe { self.words.get(page).unwrap_unchecked() };
        let found = word.load(Acquire);
        debug_assert_eq!(found & 0xff, CACHED);
        word.store(found ^ (IN_USE ^ CACHED), Release);
        Cacheable(found)
    }

    /// As [`PageMap::employ`], for tests of what needs no `unsafe` itself. Panics if there is no such page.
    #[cfg(test)]
    pub fn employ_checked(&self, page: usize) -> Cacheable {
        assert!(self.words.get(page).is_some(), "there is no page {page}");
        // SAFETY: there is such a page.
        unsafe { self.employ(page) }
    }

    /// Gives the memory back that says that nothing lies in pages `[from, to)`.
    pub fn forget(&self, from: usize, to: usize) {
        self.words.forget(from, to);
    }

    /// The zone ends at page `page` from now on. What this is a part of is not asked about a page there any more.
    pub fn close_from(&self, page: usize) {
        // SAFETY: nothing is handed out there, so only a pointer that is none of ours could be looked up, and the caches, which know the
        // whole map, were closed before.
        unsafe { self.words.close_from(page) };
    }

    /// Where the map lies.
    pub fn range(&self) -> Range {
        self.words.range()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_segment_reads_back_as_it_was_written() {
        let states = [
            State::Reserved,
            State::InUse,
            State::Cached,
            State::Dirty,
            State::Zeroed,
            State::Zeroing(7),
            State::Discarding,
            State::GivenUp,
            State::Lost,
        ];
        let map = PageMap::new(4).unwrap();
        for state in states {
            for bits in 0..32u8 {
                let [moved, altered, guarded, fresh, wiped] = [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
                let marks = Marks { moved, altered, guarded, fresh, wiped };
                for class in if matches!(state, State::InUse | State::Cached) { 0..42 } else { 0..1 } {
                    let segment = Segment { len: (1 << 40) + 4096, state, marks, class };
                    map.set(2, &segment);
                    assert_eq!(map.get(2), Some(segment));
                }
            }
        }
        map.clear(2);
        assert_eq!((map.get(1), map.get(2)), (None, None));
    }

    #[test]
    fn a_span_retires_once_and_only_if_nothing_marks_it() {
        let map = PageMap::new(4).unwrap();
        let plain = Segment { len: 1 << 16, state: State::InUse, marks: Marks::default(), class: 3 };
        map.set(1, &plain);
        assert_eq!(map.retire(1).map(|span| (span.class(), span.bytes())), Some((3, 1 << 16)));
        assert_eq!((map.retire(1), map.retire(0)), (None, None), "freed twice, and never handed out");
        assert_eq!((map.employ_checked(1).bytes(), map.get(1)), (1 << 16, Some(plain)));
        map.mark_altered(1);
        assert_eq!(map.retire(1), None);
        map.set(2, &Segment { class: 0, ..plain });
        assert_eq!(map.retire(2), None);
        assert!(map.retire_any(2) && !map.retire_any(2));
        assert_eq!(map.get(2), Some(Segment { class: 0, state: State::Cached, ..plain }));
        assert_eq!(map.part(1, 2, true).get(1), map.get(2));
    }

    #[test]
    fn what_is_counted_of_a_span_is_one_and_its_pages() {
        let map = PageMap::new(8).unwrap();
        let span = Segment { len: 17 << 12, state: State::InUse, marks: Marks::default(), class: 41 };
        for (huge, kind) in [(false, 0), (true, 1)] {
            let part = map.part(2, 3, huge);
            part.set(1, &span);
            let (retired, employed) = (part.retire(1).unwrap(), part.employ_checked(1));
            for seen in [retired, employed] {
                assert_eq!((seen.counted(), seen.kind()), (ONE | 17 << PAGES, kind));
                assert_eq!((seen.class(), seen.pages(), seen.bytes()), (41, 17, 17 << 12));
            }
        }
        assert_eq!((map.pages(), map.part(2, 3, true).pages()), (8, 3));
    }

    #[test]
    fn a_span_without_a_class_waits_as_one_that_no_cache_takes() {
        let map = PageMap::new(4).unwrap();
        let span = Segment { len: 1 << 16, state: State::InUse, marks: Marks::default(), class: 0 };
        map.set(1, &span);
        assert!(map.retire_any(1));
        map.set(2, &Segment { state: State::Cached, ..span });
        assert_eq!(map.words.at(1).load(Relaxed), map.words.at(2).load(Relaxed));
    }

    #[test]
    fn what_is_forgotten_reads_as_nothing_and_a_closed_map_ends_earlier() {
        let map = PageMap::new(4096).unwrap();
        let span = Segment { len: 1 << 16, state: State::InUse, marks: Marks::default(), class: 1 };
        for page in [100, 700, 2000, 3000] {
            map.set(page, &span);
        }
        map.forget(512, 2048);
        assert_eq!([100, 700, 2000, 3000].map(|page| map.get(page).is_some()), [true, false, false, true]);
        map.close_from(1024);
        assert_eq!((map.pages(), map.get(3000)), (1024, None));
        assert_eq!(map.get(100), Some(span));
    }
}
