//! Sizes of spans. Those that caches take have one of a few sizes, so that a span that comes back fits the next request.

use super::colour::{COLOURED, ROOM};
use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};

/// The smallest span that caches take, in pages: 64 KiB.
const LEAST_PAGES: usize = 16;
/// Sizes for each power of two: a span is at most a sixteenth longer than what was asked for.
const PER_DOUBLING: usize = 16;
/// Up to so many pages, 2 MiB; beyond, there are twice as many, and a span is at most a thirty-second part longer.
const SMALL_PAGES: usize = HUGE_PAGE_SIZE / PAGE_SIZE;
const SMALL_CLASSES: usize = (SMALL_PAGES / LEAST_PAGES).ilog2() as usize * PER_DOUBLING;
const PER_LARGE_DOUBLING: usize = 2 * PER_DOUBLING;
/// The largest span that caches take: 64 MiB. Above it, what a program does with the memory costs far more than a lock.
pub const CACHED_MOST: usize = 64 << 20;

/// Number of classes.
pub const CLASSES: usize = SMALL_CLASSES + (CACHED_MOST / HUGE_PAGE_SIZE).ilog2() as usize * PER_LARGE_DOUBLING + 1;

/// A span this long with huge pages begins at one: its pages can be moved whole.
pub const ALIGNED_LEAST: usize = (32 << 20) + 1;

/// The pages of a span for a request of `pages`, and its class, counted from 1.
const fn round(pages: usize) -> (usize, u8) {
    let (first, below, per_doubling) = if pages <= SMALL_PAGES {
        (LEAST_PAGES, 0, PER_DOUBLING)
    } else {
        (SMALL_PAGES, SMALL_CLASSES, PER_LARGE_DOUBLING)
    };
    // Rounded up to the next of the steps between two powers of two.
    let step = 1 << (pages.ilog2() - per_doubling.ilog2());
    let rounded = (pages + step - 1) & !(step - 1);
    let doubling = rounded.ilog2();
    let within = (rounded >> (doubling - per_doubling.ilog2())) & (per_doubling - 1);
    (rounded, (below + (doubling - first.ilog2()) as usize * per_doubling + within) as u8 + 1)
}

/// Length of a span for `size` bytes, and its class, counted from 1; 0 where no cache takes it.
pub fn span_for(size: usize) -> Option<(usize, u8)> {
    let pages = size.checked_add(PAGE_SIZE - 1)? / PAGE_SIZE;
    if size > CACHED_MOST || pages < LEAST_PAGES {
        return Some((pages.max(1) * PAGE_SIZE, 0));
    }
    let (rounded, class) = round(pages);
    let len = rounded * PAGE_SIZE;
    Some((if COLOURED.contains(&len) { len + ROOM } else { len }, class))
}

/// The class of a span of `len` bytes that [`span_for`] gave.
pub fn class_of(len: usize) -> u8 {
    class_for(if COLOURED.contains(&len.saturating_sub(ROOM)) { len - ROOM } else { len })
}

/// The class of a request of so many pages, up to 2 MiB; 0 for one that no cache takes.
static CLASS_OF_PAGES: [u8; SMALL_PAGES + 1] = {
    let mut table = [0; SMALL_PAGES + 1];
    let mut pages = LEAST_PAGES;
    while pages <= SMALL_PAGES {
        table[pages] = round(pages).1;
        pages += 1;
    }
    table
};

/// All larger sizes are multiples of so many pages.
const LARGE_STEP: usize = SMALL_PAGES / PER_LARGE_DOUBLING;
const LARGE_STEPS: usize = CACHED_MOST / PAGE_SIZE / LARGE_STEP;

/// The class of a request of so many steps.
static CLASS_OF_STEPS: [u8; LARGE_STEPS + 1] = {
    let mut table = [0; LARGE_STEPS + 1];
    let mut steps = LEAST_PAGES.div_ceil(LARGE_STEP);
    while steps <= LARGE_STEPS {
        table[steps] = round(steps * LARGE_STEP).1;
        steps += 1;
    }
    table
};

/// The class of a span for `size` bytes, as [`span_for`] says, and 0 for a size of 0.
#[inline(always)]
pub fn class_for(size: usize) -> u8 {
    let pages = size.wrapping_add(PAGE_SIZE - 1) / PAGE_SIZE;
    match CLASS_OF_PAGES.get(pages) {
        Some(&class) => class,
        None => CLASS_OF_STEPS.get(pages.div_ceil(LARGE_STEP)).copied().unwrap_or(0),
    }
}

/// How many spans of a class a cache holds: fewer of the longer ones.
pub const fn slots(class: usize) -> usize {
    match class / PER_DOUBLING {
        0 | 1 => 64,
        2 => 32,
        3 => 16,
        4 => 8,
        // From 2 MiB on.
        _ => 2,
    }
}

/// Kinds of sizes for what is learnt about their use: one for each power of two.
pub const KINDS: usize = 32;

/// The kind of a span of `len` bytes.
pub fn kind_of(len: usize) -> usize {
    let doubling = (len.max(1).ilog2() as usize).saturating_sub((LEAST_PAGES * PAGE_SIZE).ilog2() as usize);
    doubling.min(KINDS - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn classes_are_contiguous_and_waste_a_sixteenth_at_most() {
        let mut last = (0, 0);
        for size in (LEAST_PAGES * PAGE_SIZE..=CACHED_MOST).step_by(2048) {
            let (len, class) = span_for(size).unwrap();
            let share = if size <= HUGE_PAGE_SIZE { 16 } else { 32 };
            let rounded = round(size.div_ceil(PAGE_SIZE)).0 * PAGE_SIZE;
            let room = if COLOURED.contains(&rounded) { ROOM } else { 0 };
            assert!(len >= size + room && len - size - room <= size / share + PAGE_SIZE, "{size}: {len}");
            assert!(class as usize >= 1 && class as usize <= CLASSES);
            assert!((len, class) == last || (len > last.0 && class == last.1 + 1), "{size}: {last:?} {len} {class}");
            assert_eq!((span_for(len - room), class_for(size)), (Some((len, class)), class));
            assert_eq!(class_of(len), class);
            last = (len, class);
        }
        assert_eq!(last, (CACHED_MOST, CLASSES as u8));
    }

    #[test]
    fn what_no_cache_takes_has_whole_pages() {
        assert_eq!((span_for(0), span_for(1)), (Some((4096, 0)), Some((4096, 0))));
        assert_eq!(span_for((64 << 10) - 4096), Some(((64 << 10) - 4096, 0)));
        assert_eq!(span_for((70 << 20) + 1), Some(((70 << 20) + 4096, 0)));
        assert_eq!(span_for(usize::MAX), None);
        assert_eq!([0, 1, 60 << 10, (64 << 20) + 1, usize::MAX].map(class_for), [0; 5]);
    }

    #[test]
    fn spans_of_more_than_32_mib_begin_at_a_huge_page() {
        assert_eq!(ALIGNED_LEAST, 32 * (1 << 20) + 1);
    }

    #[test]
    fn a_cache_holds_fewer_of_the_longer_ones() {
        let sizes = [64, 160, 320, 640, 1280, 3072, 64 << 10];
        assert_eq!(sizes.map(|kib| slots(class_for(kib << 10).into())), [64, 64, 32, 16, 8, 2, 2]);
    }

    #[test]
    fn kinds_grow_with_the_length() {
        assert_eq!([0, 60, 64, 127, 128, 64 << 10].map(|kib| kind_of(kib << 10)), [0, 0, 0, 0, 1, 10]);
        let mut last = 0;
        for shift in 12..50 {
            for half in [0, 1] {
                let kind = kind_of((1usize << shift) + half * (1 << (shift - 1)));
                assert!(kind >= last && kind < KINDS);
                last = kind;
            }
        }
    }
}
