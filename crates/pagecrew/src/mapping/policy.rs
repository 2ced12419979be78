//! Policy: what a mapping is for, as far as its request says, and whether another address would be better.

use crate::sys::HUGE_PAGE_SIZE;

/// Calls about less than this are passed on: no huge page fits.
pub const LEAST: usize = HUGE_PAGE_SIZE;

/// Up to this length a mapping is moved to gain a huge page. Behind it, one huge page more or less is no longer felt.
const ALIGN_MOST: usize = 64 << 20;

/// What was asked for, by `mmap`'s protection and flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Request {
    /// `MAP_PRIVATE` and `MAP_ANONYMOUS`.
    pub private_anonymous: bool,
    /// A stack, locked, growing, of `hugetlb` pages, or below 4 GiB.
    pub special: bool,
    /// `PROT_READ`.
    pub read: bool,
    /// `PROT_WRITE`.
    pub write: bool,
    /// `PROT_EXEC`, or a protection that is not known here.
    pub execute: bool,
}

/// What a mapping is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Nothing that concerns us.
    Other,
    /// Address space, of which parts may become accessible.
    Reserve,
    /// Memory that will be used densely.
    Dense,
}

/// The purpose of a mapping of `len` bytes on a machine with `memory` bytes. Accessible memory larger than the machine's will be
/// sparse: the shadow of a sanitizer, a table that is indexed by addresses.
pub fn purpose(request: Request, len: usize, memory: usize) -> Purpose {
    let Request { private_anonymous, special, read, write, execute } = request;
    match () {
        () if !private_anonymous || special || execute || len < LEAST => Purpose::Other,
        () if !write => Purpose::Reserve,
        () if !read || len > memory => Purpose::Other,
        () => Purpose::Dense,
    }
}

/// Bytes of whole huge pages in `len` bytes at `start`.
fn in_huge_pages(start: usize, len: usize) -> usize {
    let first = start.next_multiple_of(HUGE_PAGE_SIZE);
    ((start + len) & !(HUGE_PAGE_SIZE - 1)).saturating_sub(first)
}

/// A better address for a mapping of `len` bytes that the kernel has put at `start`: just below, where huge pages fit. The kernel
/// itself aligns lengths that are multiples of a huge page (6.7), and fills address space from above.
pub fn better_address(start: usize, len: usize) -> Option<usize> {
    let below = start & !(HUGE_PAGE_SIZE - 1);
    (len <= ALIGN_MOST && below > 0 && in_huge_pages(below, len) > in_huge_pages(start, len)).then_some(below)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMORY: usize = 16 << 30;
    const PLAIN: Request = Request { private_anonymous: true, special: false, read: true, write: true, execute: false };

    #[test]
    fn what_mappings_are_for() {
        for (request, len, expected) in [
            (PLAIN, LEAST, Purpose::Dense),
            (PLAIN, LEAST - 1, Purpose::Other),
            (PLAIN, MEMORY, Purpose::Dense),
            (PLAIN, MEMORY + 1, Purpose::Other),
            (Request { read: false, ..PLAIN }, LEAST, Purpose::Other),
            (Request { write: false, ..PLAIN }, LEAST, Purpose::Reserve),
            (Request { read: false, write: false, ..PLAIN }, MEMORY << 10, Purpose::Reserve),
            (Request { execute: true, ..PLAIN }, LEAST, Purpose::Other),
            (Request { special: true, ..PLAIN }, LEAST, Purpose::Other),
            (Request { private_anonymous: false, ..PLAIN }, LEAST, Purpose::Other),
            (Request::default(), LEAST, Purpose::Other),
        ] {
            assert_eq!(purpose(request, len, MEMORY), expected, "{request:?} of {len} bytes");
        }
    }

    #[test]
    fn a_mapping_moves_only_for_a_huge_page_more() {
        let at = 512 * HUGE_PAGE_SIZE;
        assert_eq!(better_address(at, 3 * HUGE_PAGE_SIZE + 4096), None);
        assert_eq!(better_address(at + 4096, 3 * HUGE_PAGE_SIZE), Some(at));
        assert_eq!(better_address(at + 4096, 3 * HUGE_PAGE_SIZE + (1 << 20)), Some(at));
        assert_eq!(better_address(at + 4096, 4 * HUGE_PAGE_SIZE - 4096), None, "three either way");
        assert_eq!(better_address(at + HUGE_PAGE_SIZE - 4096, 2 * HUGE_PAGE_SIZE + 4096), None);
        assert_eq!(better_address(at + 4096, ALIGN_MOST + HUGE_PAGE_SIZE), None);
        assert_eq!(better_address(4096, 4 * HUGE_PAGE_SIZE), None, "nothing is mapped at 0");
    }

    proptest! {
        #[test]
        fn a_better_address_is_close_aligned_and_has_more(start in 1usize..1 << 30, len in LEAST..4 * ALIGN_MOST) {
            if let Some(better) = better_address(start, len) {
                prop_assert!(better <= start && start - better < HUGE_PAGE_SIZE && better % HUGE_PAGE_SIZE == 0);
                prop_assert!(in_huge_pages(better, len) > in_huge_pages(start, len));
            }
        }
    }
}
