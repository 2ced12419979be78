//! `PAGEMAP_SCAN` on this process's own pages (6.7).

use pagecrew::sys::memory::Range;
use pagecrew::sys::{Errno, PAGE_SIZE};
use std::fs::File;
use std::os::fd::AsRawFd;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610u32 as libc::Ioctl;

/// What a page can be.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum Category {
    /// In memory.
    Present = 1 << 3,
    /// The shared zero page.
    Zero = 1 << 5,
    /// Part of a huge page.
    Huge = 1 << 6,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Arguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    region_count: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The number of base pages of `range` that are of `category`.
pub fn count(range: Range, category: Category) -> Result<usize, Errno> {
    let file = File::open("/proc/self/pagemap").map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    // At worst, every other page is a region of its own.
    let mut regions = vec![Region::default(); range.len / PAGE_SIZE / 2 + 1];
    let mut arguments = Arguments {
        size: size_of::<Arguments>() as u64,
        start: range.start as u64,
        end: range.end() as u64,
        regions: regions.as_mut_ptr() as u64,
        region_count: regions.len() as u64,
        category_mask: category as u64,
        return_mask: category as u64,
        ..Arguments::default()
    };
    // SAFETY: the arguments are of the layout that the number of the call encodes, and point to room for that many regions.
    let found = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, &mut arguments) };
    let found = usize::try_from(found).map_err(|_| Errno::last())?;
    Ok(regions[..found].iter().map(|region| (region.end - region.start) as usize / PAGE_SIZE).sum())
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::*;

    #[test]
    fn touched_pages_are_present() {
        let mut scratch = Scratch::new(64 * PAGE_SIZE).unwrap();
        for page in [3, 4, 9] {
            scratch.write(page * PAGE_SIZE, 1);
        }
        // Kernels before 6.7 don't know the call.
        if let Ok(present) = count(scratch.range(), Category::Present) {
            assert_eq!(present, 3);
        }
    }
}
