//! What the pages of a range of this process are: the `PAGEMAP_SCAN` request on `/proc/self/pagemap` (6.7).

use super::Errno;
use super::memory::Range;

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl =
    (3 << 30 | (size_of::<ScanArgument>() as u32) << 16 | (b'f' as u32) << 8 | 16) as libc::Ioctl;

/// What a page can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Category {
    /// In memory.
    Present = PAGE_IS_PRESENT,
    /// The shared zero page.
    Zero = PAGE_IS_PFNZERO,
    /// Part of a huge page.
    Huge = PAGE_IS_HUGE,
}

/// Calls `each` for every run of pages in `range` that has contents: in memory or in swap, and not the shared zero page. What lies
/// between reads as zero.
///
/// # Errors
/// `ENOTTY` on kernels before 6.7; those of opening `/proc/self/pagemap`. `each` may have been called for a part of the range then.
pub fn with_contents(range: Range, each: impl FnMut(Range)) -> Result<(), Errno> {
    let wanted = ScanArgument {
        category_inverted: PAGE_IS_PFNZERO,
        category_mask: PAGE_IS_PFNZERO,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT,
        ..ScanArgument::default()
    };
    scan(range, wanted, each)
}

/// The bytes of `range` that are of `category`.
///
/// # Errors
/// As [`with_contents`].
pub fn bytes_of(range: Range, category: Category) -> Result<usize, Errno> {
    let wanted = category as u64;
    let mut bytes = 0;
    let argument = ScanArgument { category_mask: wanted, return_mask: wanted, ..ScanArgument::default() };
    scan(range, argument, |run| bytes += run.len)?;
    Ok(bytes)
}

/// Calls `each` for every run of pages in `range` that is of the categories in `argument`. Allocates nothing.
fn scan(range: Range, mut argument: ScanArgument, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    let mut regions = [PageRegion::default(); 64];
    argument.size = size_of::<ScanArgument>() as u64;
    (argument.start, argument.end) = (range.start as u64, range.end() as u64);
    (argument.vec, argument.vec_len) = ((&raw mut regions) as u64, regions.len() as u64);
    // SAFETY: the path is a C string; the descriptor is ours and closed below; the request fills at most `vec_len` regions of
    // the array that `vec` points to.
    unsafe {
        let file = libc::open(c"/proc/self/pagemap".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(Errno::last());
        }
        let mut result = Ok(());
        while argument.start < argument.end {
            let count = libc::ioctl(file, PAGEMAP_SCAN, &raw mut argument);
            if count < 0 {
                result = Err(Errno::last());
                break;
            }
            for region in &regions[..count as usize] {
                each(Range { start: region.start as usize, len: (region.end - region.start) as usize });
            }
            argument.start = argument.walk_end;
        }
        libc::close(file);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE_SIZE;
    use crate::sys::memory::{Protection, map, unmap};

    #[test]
    fn written_pages_have_contents_and_read_ones_do_not() {
        let range = Range { start: map(300 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 300 * PAGE_SIZE };
        let page = |index: usize| (range.start + index * PAGE_SIZE) as *mut u8;
        // SAFETY: the mapping belongs to this test.
        unsafe {
            for index in (0..300).step_by(2) {
                page(index).write(1);
            }
            assert_eq!(page(1).read_volatile(), 0);
        }
        let mut found = Vec::new();
        if with_contents(range, |run| found.push(run)).is_ok() {
            let expected: Vec<Range> =
                (0..300).step_by(2).map(|index| Range { start: page(index) as usize, len: PAGE_SIZE }).collect();
            assert_eq!(found, expected);
            assert_eq!(bytes_of(range, Category::Zero), Ok(PAGE_SIZE));
            assert_eq!(bytes_of(range, Category::Present), Ok(151 * PAGE_SIZE));
        }
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }
}
