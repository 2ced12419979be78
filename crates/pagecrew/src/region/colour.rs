//! Where a block begins in its span: at one of the lines of its first page, each at another.
//!
//! Programs go through their blocks in steps of a page or of a power of two. If all blocks begin at a page, what they touch lies in
//! few of the sets of the processor's caches, which hold a dozen lines each. A span for a block of medium size has a page more than the
//! block, and the address of the span says by how many lines the block is moved into it; so it is the same again when the span comes back.
//!
//! Source: cache colouring in the slab allocator (Jeff Bonwick, 1994).

use crate::sys::PAGE_SIZE;
use std::ptr::NonNull;

/// A span is longer than what its block needs by so many bytes, if it is neither short nor long.
pub(super) const ROOM: usize = PAGE_SIZE;

/// The lengths of spans that have it, without it. For a shorter one it would be more than a fiftieth, all of it resident in a huge page; with small pages
/// it is only address space, and those have it too. A longer block fills the caches by itself, and one that is as long as its huge pages stays so.
pub(super) const COLOURED: std::ops::RangeInclusive<usize> = COLOURED_LEAST..=COLOURED_MOST;
pub(super) const COLOURED_LEAST: usize = 192 << 10;
pub(super) const COLOURED_MOST: usize = 1 << 20;

/// The bytes that processors cache together.
const LINE: usize = 64;
/// The bits of an address that say the line of its page.
const LINES: usize = PAGE_SIZE - LINE;

/// Whether a span of which `usable` bytes can be used has room for a line beside a block of `size` bytes, which it is long enough for.
#[inline(always)]
pub fn leaves_room(usable: usize, size: usize) -> bool {
    usable - size >= LINES
}

/// Where a block begins in the span at `span`, which begins at a page and has room.
#[inline(always)]
pub fn begin(span: NonNull<u8>) -> NonNull<u8> {
    // The first bits of a product: a factor was looked for with which what lies at the distance of any class comes out spread.
    let page = (span.as_ptr() as usize / PAGE_SIZE) as u32;
    let line = page.wrapping_mul(0x52ED_F8B5) >> (u32::BITS - (PAGE_SIZE / LINE).ilog2());
    span.map_addr(|address| address | (line as usize * LINE))
}

/// The address of the span of the block at `address`, or something that is no span's address if no block can begin there.
#[inline(always)]
pub fn span_of(address: usize) -> usize {
    address & !LINES
}

/// How far the block at `address` is into its span, in bytes.
#[inline(always)]
pub fn of(address: usize) -> usize {
    address & LINES
}

/// The bytes from the beginning of a span that a block of `size` bytes may lie in, whole pages; the span is `len` bytes long.
pub(super) fn to_be_zeroed(size: usize, len: usize) -> usize {
    (size + LINES).next_multiple_of(PAGE_SIZE).min(len)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::classes;
    use super::*;
    use std::collections::HashSet;

    fn span(address: usize) -> NonNull<u8> {
        NonNull::new(address as *mut u8).unwrap()
    }

    #[test]
    fn a_block_lies_in_its_span_and_leads_back_to_it() {
        for page in (1 << 20..).take(1000) {
            let start = page * PAGE_SIZE;
            let block = begin(span(start)).as_ptr() as usize;
            assert!(block >= start && block - start <= LINES && block.is_multiple_of(LINE));
            assert_eq!((span_of(block), of(block)), (start, block - start));
            for size in [1, 100, PAGE_SIZE, 70_001] {
                assert!(leaves_room(size + LINES, size) && !leaves_room(size + LINES - 1, size));
                assert!(to_be_zeroed(size, size + PAGE_SIZE) >= block - start + size);
            }
        }
    }

    #[test]
    fn spans_of_medium_length_have_a_page_more() {
        let len = |size| classes::span_for(size).unwrap().0;
        let (least, most) = (192 << 10, 1 << 20);
        let below = least - (8 << 10);
        assert_eq!([below, least, most].map(len), [below, least + PAGE_SIZE, most + PAGE_SIZE]);
        assert!(len(most + 1).is_multiple_of(64 << 10), "a longer one has none");
    }

    #[test]
    fn what_a_block_may_lie_in_is_zeroed_and_no_more() {
        const MOST: usize = 1 << 30;
        assert_eq!([1, PAGE_SIZE].map(|size| to_be_zeroed(size, MOST)), [PAGE_SIZE, 2 * PAGE_SIZE]);
        assert_eq!(to_be_zeroed(10 * PAGE_SIZE + 64, MOST), 11 * PAGE_SIZE);
        assert_eq!(to_be_zeroed(10 * PAGE_SIZE + 65, MOST), 12 * PAGE_SIZE);
        assert_eq!(to_be_zeroed(10 * PAGE_SIZE, 10 * PAGE_SIZE), 10 * PAGE_SIZE);
    }

    #[test]
    fn what_is_no_block_s_address_leads_to_no_span() {
        for inside in [1, 8, 16, 63, PAGE_SIZE + 8] {
            assert!(!span_of((1 << 40) + inside).is_multiple_of(PAGE_SIZE));
        }
        assert_eq!(span_of((1 << 40) + PAGE_SIZE), (1 << 40) + PAGE_SIZE);
    }

    #[test]
    fn spans_of_one_length_side_by_side_begin_at_different_lines() {
        for size in COLOURED.step_by(PAGE_SIZE) {
            let (len, _) = classes::span_for(size).unwrap();
            let colours = (0..64).map(|index| of(begin(span((1 << 40) + index * len)).as_ptr() as usize));
            let colours: HashSet<_> = colours.collect();
            assert!(colours.len() >= 32, "{size}: {}", colours.len());
        }
    }
}
