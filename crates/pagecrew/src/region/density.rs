//! Which sizes of spans are worth huge pages: those of which a program touches most.
//!
//! A huge page is zeroed and takes memory as a whole at its first touch. So spans of a size that nothing is known of, nor of those next to
//! it, are cut from memory with small pages, and the pages of some of them are looked at: one that was handed out a while ago when the next
//! one of its size is asked for, and some of those that come back. Where most pages were touched, spans of that size come from memory with huge pages from then
//! on, and those are looked at as well when they come back for the first time: what still is zero then was probably not used, which the next
//! span shows, in small pages again.
//!
//! Very large spans begin on the other side: they nearly always are used whole, and gain most. As long as nothing more is known, the one
//! that was handed out before is looked at for jumps: who fills a span goes through it, who uses it thinly leaves out most of what lies
//! between.

use super::classes::{ALIGNED_LEAST, KINDS, kind_of};
use crate::sys::memory::{self, Range};
use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize};

const UNKNOWN: u8 = 0;
const DENSE: u8 = 1;
const THIN: u8 = 2;
/// Its huge pages were full of zeroes. A program may have written those: the next span has small pages, which tell.
const DOUBTFUL: u8 = 3;

/// A program that has less than this in use has its spans in small pages: what is left of the last huge page would weigh too much.
const WORTH: usize = 16 << 20;
/// Of a span, so many windows of at most a huge page each are looked at.
const WINDOWS: usize = 8;
/// Of a window in a huge page, so many pages are read.
const READ: usize = 8;
/// Of a very large span, one page of so many huge pages is looked at for jumps, at the most: 0.1 ms.
const POINTS: usize = 512;

/// What is known of one kind of size.
struct Kind {
    verdict: AtomicU8,
    /// Spans handed out, and those taken back, that could have been looked at.
    handed_out: AtomicU32,
    taken_back: AtomicU32,
    /// A span that was handed out lately, to be looked at; 0 for none. Its length may be that of another one for a moment.
    seen: AtomicUsize,
    seen_len: AtomicUsize,
}

/// So many spans of its kind are handed out while one is looked at again and again.
const PATIENCE: u32 = 4;
/// While nothing is known of a kind, so many chances are all taken.
const EAGER: u32 = 32;

impl Kind {
    /// The span to be looked at, if there is one.
    fn seen(&self) -> Option<Range> {
        let seen = Range { start: self.seen.load(Relaxed), len: self.seen_len.load(Relaxed) };
        (seen.start != 0).then_some(seen)
    }

    /// Its huge pages were full of zeroes: from the next span on it is learnt anew. What comes back is still looked at as seldom as before,
    /// so that a program that writes nothing but zeroes does not go back and forth.
    fn doubt(&self) {
        if matches!(self.verdict.load(Relaxed), UNKNOWN | DENSE) {
            self.verdict.store(DOUBTFUL, Relaxed);
            self.seen.store(0, Relaxed);
            self.handed_out.store(0, Relaxed);
        }
    }

    /// Whether the `count`-th chance is taken: always while nothing is certain and looking may soon pay, then often, then now and then.
    fn due(&self, count: u32) -> bool {
        let eager = matches!(self.verdict.load(Relaxed), UNKNOWN | DOUBTFUL) && count <= EAGER;
        eager || count.is_power_of_two() || count.is_multiple_of(64)
    }
}

/// See the module.
pub(super) struct Density {
    kinds: Box<[Kind]>,
    /// The share of memory with small pages that has pages, in parts of [`WHOLE`].
    share: AtomicU32,
}

const WHOLE: u32 = 1 << 10;

/// How much of what was looked at was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Touched {
    pages: usize,
    of: usize,
}

impl Touched {
    /// What it says, where it says anything: three quarters are enough for huge pages, half are not.
    fn verdict(self) -> Option<u8> {
        match self {
            Touched { of: 0, .. } => None,
            Touched { pages, of } if 4 * pages >= 3 * of => Some(DENSE),
            Touched { pages, of } if 2 * pages <= of => Some(THIN),
            _ => None,
        }
    }
}

impl Density {
    pub fn new() -> Density {
        let kind = || Kind {
            verdict: AtomicU8::new(UNKNOWN),
            handed_out: AtomicU32::new(0),
            taken_back: AtomicU32::new(0),
            seen: AtomicUsize::new(0),
            seen_len: AtomicUsize::new(0),
        };
        Density { kinds: (0..KINDS).map(|_| kind()).collect(), share: AtomicU32::new(WHOLE) }
    }

    /// Whether a span of `len` bytes should come from memory with huge pages, in a program that has `in_use` bytes in use. `first_use` says
    /// of a span whether its first user still has it, and with huge pages or not.
    pub fn wants_huge_pages(
        &self,
        len: usize,
        in_use: impl FnOnce() -> usize,
        first_use: impl Fn(Range) -> Option<bool>,
    ) -> bool {
        let kind = kind_of(len);
        let verdict = |kind: usize| self.kinds.get(kind).map_or(UNKNOWN, |kind| kind.verdict.load(Relaxed));
        match verdict(kind) {
            UNKNOWN if len >= ALIGNED_LEAST => {
                match self.kinds[kind].seen().and_then(|seen| Some((seen, first_use(seen)?))) {
                    Some((seen, true)) => !has_jumps(seen),
                    // It has small pages because the one before it had jumps; where its own are, a page here and there doesn't say.
                    Some((_, false)) => false,
                    None => true,
                }
            }
            // A size that comes up seldom is probably used as those next to it.
            UNKNOWN => {
                let beside = [kind.wrapping_sub(1), kind + 1].map(verdict);
                beside.contains(&DENSE) && !beside.contains(&THIN) && !beside.contains(&DOUBTFUL) && in_use() >= WORTH
            }
            verdict => verdict == DENSE && (len >= ALIGNED_LEAST || in_use() >= WORTH),
        }
    }

    /// Whether spans of about `len` bytes are known to be used whole.
    pub fn is_dense(&self, len: usize) -> bool {
        self.kinds[kind_of(len)].verdict.load(Relaxed) == DENSE
    }

    /// Takes note of a fresh span, and looks at one of its kind that was handed out before it, if its first user still has it as `first_use`
    /// says: what others touch after him would add up.
    pub fn handed_out(&self, span: Range, first_use: impl Fn(Range) -> Option<bool>) {
        let kind = &self.kinds[kind_of(span.len)];
        let count = kind.handed_out.fetch_add(1, Relaxed) + 1;
        let seen = kind.seen();
        if let Some(seen) = seen
            && kind.due(count)
            && first_use(seen) == Some(false)
        {
            // Its user may be only just beginning: that it has pages says something, that it has none doesn't. Nothing is read but which
            // pages there are; of huge pages that says too little.
            let touched = resident(seen);
            if touched.verdict() == Some(DENSE) {
                self.note(span.len, touched);
            }
        }
        // One is given a while to be touched.
        if seen.is_none() || count.is_multiple_of(PATIENCE) {
            kind.seen_len.store(span.len, Relaxed);
            kind.seen.store(span.start, Relaxed);
        }
    }

    /// Looks at a span that comes back for the first time, if it is worth it: one with small pages at which pages it has, one with
    /// huge pages at which of them are not zero.
    ///
    /// # Safety
    /// The span is mapped, and nobody uses it.
    pub unsafe fn taken_back(&self, span: Range, huge: bool) {
        let kind = &self.kinds[kind_of(span.len)];
        if kind.due(kind.taken_back.fetch_add(1, Relaxed) + 1) {
            // SAFETY: by the function's own contract.
            let touched = if huge { unsafe { written(span) } } else { resident(span) };
            match touched.verdict() {
                Some(THIN) if huge => kind.doubt(),
                _ => self.note(span.len, touched),
            }
        }
    }

    /// How much of `bytes` of memory with small pages probably has pages.
    pub fn share_of(&self, bytes: usize) -> usize {
        match self.share.load(Relaxed) {
            WHOLE => bytes,
            share => bytes / WHOLE as usize * share as usize,
        }
    }

    /// Looks at how much of the zones with small pages has pages, as far as they were ever used.
    pub fn look_at_zones(&self, used: impl Iterator<Item = Range>) {
        let (pages, of) = used.fold((0, 0), |(pages, of), range| {
            let touched = resident(range);
            let seen = (touched.pages * WHOLE as usize).checked_div(touched.of).unwrap_or(0);
            (pages + range.len / PAGE_SIZE * seen, of + range.len / PAGE_SIZE)
        });
        if let Some(seen) = pages.checked_div(of) {
            let seen = seen as u32;
            // A program that begins to use more of its memory is believed at once, one that uses less of it by and by.
            let share = self.share.load(Relaxed);
            self.share.store(seen.max((3 * share + seen) / 4), Relaxed);
        }
    }

    fn note(&self, len: usize, touched: Touched) {
        if let Some(verdict) = touched.verdict() {
            self.kinds[kind_of(len)].verdict.store(verdict, Relaxed);
        }
    }
}

/// Windows spread evenly over a span.
fn windows(span: Range) -> impl Iterator<Item = Range> {
    let len = span.len.min(HUGE_PAGE_SIZE);
    let count = span.len.div_ceil(HUGE_PAGE_SIZE).min(WINDOWS);
    let step = if count > 1 { ((span.len - len) / (count - 1)) & !(PAGE_SIZE - 1) } else { 0 };
    (0..count).map(move |index| Range { start: span.start + index * step, len })
}

/// Whether a span is used with jumps: half of it or less has pages, and they lie behind some that are missing.
fn has_jumps(span: Range) -> bool {
    let step = (span.len / POINTS).next_multiple_of(HUGE_PAGE_SIZE);
    let mut pages = 0;
    let mut missing = 0;
    let mut jumps = false;
    for start in (span.start..span.end()).step_by(step) {
        let mut page = [0];
        if memory::residence(Range { start, len: PAGE_SIZE }, &mut page).is_err() {
            return false;
        }
        if page[0] & 1 != 0 {
            pages += 1;
            jumps |= missing > 0;
        } else {
            missing += 1;
        }
    }
    jumps && pages <= missing
}

fn resident(span: Range) -> Touched {
    let mut sum = Touched::default();
    let mut pages = [0u8; HUGE_PAGE_SIZE / PAGE_SIZE];
    for window in windows(span) {
        if memory::residence(window, &mut pages).is_ok() {
            let count = window.len / PAGE_SIZE;
            sum.of += count;
            sum.pages += pages[..count].iter().filter(|&&page| page & 1 != 0).count();
        }
    }
    sum
}

/// # Safety
/// The span is mapped, and nobody uses it.
unsafe fn written(span: Range) -> Touched {
    let mut sum = Touched::default();
    let mut pages = [0u8; HUGE_PAGE_SIZE / PAGE_SIZE];
    for window in windows(span) {
        if memory::residence(window, &mut pages).is_err() {
            continue;
        }
        let count = window.len / PAGE_SIZE;
        for index in (0..count).step_by((count / READ).max(1)) {
            sum.of += 1;
            let page = (window.start + index * PAGE_SIZE) as *const u64;
            // SAFETY: the page is mapped and resident, so that reading it gives it no memory, and nobody writes to it.
            let used = || unsafe { std::slice::from_raw_parts(page, PAGE_SIZE / 8) }.iter().any(|&word| word != 0);
            sum.pages += usize::from(pages[index] & 1 != 0 && used());
        }
    }
    sum
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::memory::{Advice, Protection};

    fn span(len: usize, huge: bool) -> Range {
        // Aligned to a huge page, with room before it that is never touched.
        let start = memory::map(len + 2 * HUGE_PAGE_SIZE, Protection::ReadWrite).unwrap();
        let range = Range { start: start.next_multiple_of(HUGE_PAGE_SIZE), len };
        // SAFETY: the test's own mapping.
        let _ = unsafe { memory::advise(range, if huge { Advice::HugePage } else { Advice::NoHugePage }) };
        range
    }

    fn nobody(_: Range) -> Option<bool> {
        None
    }

    fn touch(span: Range, step: usize) {
        for at in (0..span.len).step_by(step) {
            // SAFETY: the test's own mapping.
            unsafe { ((span.start + at) as *mut u8).write(1) };
        }
    }

    #[test]
    fn a_size_that_is_touched_whole_gets_huge_pages_with_its_second_span() {
        let density = Density::new();
        let size = 4 << 20;
        assert!(!density.wants_huge_pages(size, || 1 << 30, nobody));
        let (first, second) = (span(size, false), span(size, false));
        density.handed_out(first, nobody);
        touch(first, PAGE_SIZE);
        let somebody_elses = Density::new();
        somebody_elses.handed_out(first, nobody);
        somebody_elses.handed_out(second, nobody);
        assert!(!somebody_elses.wants_huge_pages(size, || 1 << 30, nobody));
        density.handed_out(second, |seen| (seen == first).then_some(false));
        assert!(density.wants_huge_pages(size, || 1 << 30, nobody));
        assert!(!density.wants_huge_pages(size, || 1 << 20, nobody), "not in a small program");
        assert!(!density.wants_huge_pages(16 << 20, || 1 << 30, nobody), "not of another size");
    }

    #[test]
    fn a_size_that_nothing_is_known_of_is_believed_to_be_used_as_those_next_to_it() {
        let density = Density::new();
        let know = |len: usize, pages: usize| density.note(len, Touched { pages, of: 100 });
        let wants = |len: usize| density.wants_huge_pages(len, || 1 << 30, nobody);
        know(4 << 20, 90);
        assert_eq!([1, 2, 4, 8, 16].map(|mebibytes| wants(mebibytes << 20)), [false, true, true, true, false]);
        assert!(!density.wants_huge_pages(8 << 20, || 1 << 20, nobody), "not in a small program");
        know(16 << 20, 10);
        assert_eq!([8, 16].map(|mebibytes| wants(mebibytes << 20)), [false; 2], "they differ");
        know(8 << 20, 90);
        assert!(wants(8 << 20), "what is known comes first");
        assert!(!wants(64 << 10) && wants(1 << 40), "the smallest and the largest");
    }

    #[test]
    fn a_size_of_which_little_is_touched_stays_with_small_pages() {
        let density = Density::new();
        let span = span(8 << 20, false);
        touch(span, 4 << 20);
        // SAFETY: the test's own span.
        unsafe { density.taken_back(span, false) };
        assert!(!density.wants_huge_pages(span.len, || 1 << 30, nobody));
        assert_eq!(resident(span), Touched { pages: 2, of: 4 * 512 });
    }

    #[test]
    fn thin_use_of_huge_pages_is_seen_when_the_span_comes_back() {
        let density = Density::new();
        let size = 64 << 20;
        assert!(density.wants_huge_pages(size, || 0, nobody), "very large ones begin with huge pages");
        let sparse = span(size, true);
        touch(sparse, 1 << 20);
        // SAFETY: the test's own span.
        unsafe { density.taken_back(sparse, true) };
        assert!(!density.wants_huge_pages(size, || 1 << 30, nobody));
        let dense = span(size, true);
        touch(dense, 512);
        // SAFETY: as above.
        unsafe { density.taken_back(dense, true) };
        assert!(density.wants_huge_pages(size, || 1 << 30, nobody));
    }

    #[test]
    fn zeroes_that_a_program_wrote_into_huge_pages_cost_it_one_span_with_small_pages() {
        for size in [4 << 20, 64 << 20] {
            let density = Density::new();
            density.note(size, Touched { pages: 1, of: 1 });
            let wants = || density.wants_huge_pages(size, || 1 << 30, nobody);
            for _ in 0..8 {
                density.handed_out(span(size, true), nobody);
            }
            let zeroes = span(size, true);
            touch(zeroes, HUGE_PAGE_SIZE);
            // SAFETY: the test's own span.
            unsafe { (zeroes.start as *mut u8).write_bytes(0, zeroes.len) };
            // SAFETY: as above.
            unsafe { density.taken_back(zeroes, true) };
            assert!(!wants());
            let beside = |len: usize| density.wants_huge_pages(len, || 1 << 30, nobody);
            density.note(size / 4, Touched { pages: 1, of: 1 });
            assert!(!beside(size / 2), "one of its neighbours may be thin");
            let small = span(size, false);
            density.handed_out(small, |seen| (seen == small).then_some(false));
            assert!(!wants(), "it was not touched yet");
            touch(small, PAGE_SIZE);
            density.handed_out(span(size, false), |seen| (seen == small).then_some(false));
            assert!(wants());
        }
    }

    #[test]
    fn what_is_thin_indeed_stays_with_small_pages() {
        let density = Density::new();
        let size = 64 << 20;
        let wants = || density.wants_huge_pages(size, || 1 << 30, nobody);
        let (first, second) = (span(size, true), span(size, false));
        // SAFETY: the test's own span.
        unsafe { density.taken_back(first, true) };
        density.handed_out(second, |_| Some(false));
        touch(second, 1 << 20);
        density.handed_out(second, |_| Some(false));
        assert!(!wants());
        // SAFETY: as above.
        unsafe { density.taken_back(second, false) };
        assert!(!wants());
        let verdict = || density.kinds[kind_of(size)].verdict.load(Relaxed);
        assert_eq!(verdict(), THIN, "which is certain now");
        for _ in 0..EAGER {
            // SAFETY: as above.
            unsafe { density.taken_back(first, true) };
        }
        assert_eq!(verdict(), THIN, "and stays so, whatever comes back later of its huge pages");
    }

    #[test]
    fn a_program_that_writes_only_zeroes_has_huge_pages_most_of_the_time() {
        let density = Density::new();
        let size = 4 << 20;
        let (zeroes, small) = (span(size, true), span(size, false));
        touch(small, PAGE_SIZE);
        let huge = |_| {
            let huge = density.wants_huge_pages(size, || 1 << 30, nobody);
            if huge {
                // SAFETY: the test's own span.
                unsafe { density.taken_back(zeroes, true) };
            } else {
                density.handed_out(small, |seen| (seen == small).then_some(false));
            }
            huge
        };
        assert!((0..1000).map(huge).filter(|&huge| huge).count() > 900);
    }

    #[test]
    fn a_very_large_span_with_jumps_is_followed_by_one_with_small_pages() {
        let density = Density::new();
        let size = 64 << 20;
        let his = |huge| move |_| Some(huge);
        let wants = |huge| density.wants_huge_pages(size, || 1 << 30, his(huge));
        let first = span(size, true);
        density.handed_out(first, nobody);
        assert!(wants(true), "nothing of it is touched");
        touch(Range { len: size / 4, ..first }, HUGE_PAGE_SIZE);
        assert!(wants(true), "somebody fills it");
        let sparse = span(size, true);
        let density = Density::new();
        density.handed_out(sparse, nobody);
        touch(sparse, size / 2);
        assert!(has_jumps(sparse) && !has_jumps(first));
        let mostly = span(size, true);
        touch(Range { len: HUGE_PAGE_SIZE, ..mostly }, HUGE_PAGE_SIZE);
        touch(Range { start: mostly.start + 2 * HUGE_PAGE_SIZE, len: size - 2 * HUGE_PAGE_SIZE }, HUGE_PAGE_SIZE);
        assert!(!has_jumps(mostly), "there are some, but most of it has pages");
        let wants = |huge| density.wants_huge_pages(size, || 1 << 30, his(huge));
        assert!(!wants(true));
        assert!(!wants(false), "the next one has small pages, and so have those after it");
        assert!(density.wants_huge_pages(size, || 1 << 30, nobody), "somebody else's by now");
        assert!(density.wants_huge_pages(4 * size, || 1 << 30, his(true)), "another size");
        touch(sparse, HUGE_PAGE_SIZE);
        assert!(wants(true), "it came to be used everywhere");
        assert!(!wants(false), "of one with small pages, a page here and there doesn't say that");
        for _ in 0..EAGER {
            density.handed_out(sparse, his(true));
        }
        assert!(!density.is_dense(size), "which says nothing yet of what is in its huge pages");
        for _ in 0..EAGER {
            density.handed_out(sparse, his(false));
        }
        assert!(density.is_dense(size));
    }

    #[test]
    fn windows_lie_within_the_span() {
        for len in [64 << 10, 2 << 20, 3 << 20, 17 << 20, (17 << 20) + PAGE_SIZE, 1 << 30] {
            let span = Range { start: 1 << 40, len };
            let all: Vec<Range> = windows(span).collect();
            assert!(
                all.len() <= WINDOWS
                    && all.iter().all(|window| window.start >= span.start && window.end() <= span.end())
                    && all.iter().all(|window| window.start.is_multiple_of(PAGE_SIZE))
            );
            assert!(len <= 2 << 20 || all.windows(2).all(|pair| pair[0].start < pair[1].start));
            let last = all.last().unwrap();
            assert!(span.end() - last.end() < WINDOWS * PAGE_SIZE, "the last one is at the end");
        }
    }

    #[test]
    fn three_quarters_are_dense_and_a_half_is_thin() {
        let verdict = |pages, of| Touched { pages, of }.verdict();
        assert_eq!([(0, 0), (2, 3), (3, 5), (51, 100), (74, 100)].map(|(pages, of)| verdict(pages, of)), [None; 5]);
        assert_eq!([(3, 4), (4, 4)].map(|(pages, of)| verdict(pages, of)), [Some(DENSE); 2]);
        assert_eq!([(0, 4), (1, 3), (2, 4)].map(|(pages, of)| verdict(pages, of)), [Some(THIN); 3]);
        let density = Density::new();
        density.note(4 << 20, Touched { pages: 3, of: 4 });
        density.note(16 << 20, Touched { pages: 1, of: 4 });
        assert_eq!([4, 8, 16].map(|mebibytes| density.is_dense(mebibytes << 20)), [true, false, false]);
    }

    #[test]
    fn every_fourth_span_is_the_next_to_be_looked_at() {
        let density = Density::new();
        let at = |start: usize| Range { start, len: 1 << 20 };
        let seen = (1..=8).map(|start| {
            density.handed_out(at(start), nobody);
            density.kinds[kind_of(1 << 20)].seen().unwrap()
        });
        assert_eq!(seen.collect::<Vec<_>>(), [1, 1, 1, 4, 4, 4, 4, 8].map(at));
    }

    #[test]
    fn the_share_of_memory_that_has_pages_follows_what_is_seen() {
        let density = Density::new();
        assert_eq!(density.share_of(12345), 12345, "nothing is known");
        let (quarter, none) = (span(8 << 20, false), span(4 << 20, false));
        touch(Range { len: 2 << 20, ..quarter }, PAGE_SIZE);
        density.look_at_zones([quarter, none].into_iter());
        // 512 of 3072 pages are 170 of 1024 parts.
        assert_eq!(density.share.load(Relaxed), (3 * 1024 + 170) / 4, "one that uses less is believed by and by");
        density.share.store(256, Relaxed);
        assert_eq!(density.share_of(4 << 20), 1 << 20);
        density.look_at_zones([quarter].into_iter());
        assert_eq!(density.share.load(Relaxed), 256);
        touch(quarter, PAGE_SIZE);
        density.look_at_zones([quarter, none].into_iter());
        assert_eq!(density.share.load(Relaxed), 682, "one that uses more is believed at once");
        density.look_at_zones(std::iter::empty());
        assert_eq!(density.share.load(Relaxed), 682);
    }

    #[test]
    fn a_span_that_is_not_touched_yet_says_nothing() {
        let density = Density::new();
        let size = 4 << 20;
        let first = span(size, false);
        density.handed_out(first, |_| Some(false));
        density.handed_out(span(size, false), |seen| (seen == first).then_some(false));
        assert!(!density.wants_huge_pages(size, || 1 << 30, nobody));
        touch(first, PAGE_SIZE);
        density.handed_out(span(size, false), |seen| (seen == first).then_some(false));
        assert!(density.wants_huge_pages(size, || 1 << 30, nobody));
    }

    #[test]
    fn the_first_span_that_comes_back_says_something_however_many_were_handed_out() {
        let density = Density::new();
        let span = span(8 << 20, false);
        for _ in 0..2 * EAGER {
            density.handed_out(span, nobody);
        }
        touch(span, 4 << 20);
        // SAFETY: the test's own span.
        unsafe { density.taken_back(span, false) };
        assert_eq!(density.kinds[kind_of(span.len)].verdict.load(Relaxed), THIN);
    }

    #[test]
    fn chances_are_taken_often_at_first() {
        let density = Density::new();
        let due = |verdict| {
            density.kinds[3].verdict.store(verdict, Relaxed);
            (1..=1000).filter(|&count| density.kinds[3].due(count)).count()
        };
        assert_eq!([UNKNOWN, DOUBTFUL, DENSE, THIN].map(due), [32 + 15, 32 + 15, 6 + 15, 6 + 15]);
    }
}
