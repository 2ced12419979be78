//! What the pages of a process are: the `PAGEMAP_SCAN` request (6.7) on `/proc/PID/pagemap`, and that file's entries.

use super::memory::Range;
use super::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, procfs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

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

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl =
    (3 << 30 | (size_of::<ScanArgument>() as u32) << 16 | (b'f' as u32) << 8 | 16) as libc::Ioctl;

/// In the entries of the file: whether the page is in memory, and which frame it is then.
const PRESENT: u64 = 1 << 63;
const FRAME_NUMBER: u64 = (1 << 55) - 1;

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

/// What a huge page is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugeKind {
    /// Anonymous memory.
    Anonymous,
    /// A file, shared memory included.
    File,
    /// The shared huge zero page, which takes no memory of the process.
    Zero,
}

/// A process's page map. It stays that of the memory which the process had when it was opened: after an `exec`, it is empty.
#[derive(Debug)]
pub struct Pagemap(OwnedFd);

impl Pagemap {
    /// This process's own.
    ///
    /// # Errors
    /// Those of opening `/proc/self/pagemap`.
    pub fn own() -> Result<Pagemap, Errno> {
        Pagemap::open(c"/proc/self/pagemap")
    }

    /// That of process `pid`.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` where there is no such process, `EACCES` where the caller may not look at its memory.
    pub fn of(pid: i32) -> Result<Pagemap, Errno> {
        Pagemap::open(procfs::path(&mut [0; 32], &["/proc/"], pid as u64, "/pagemap"))
    }

    fn open(path: &std::ffi::CStr) -> Result<Pagemap, Errno> {
        // SAFETY: the path is a C string, and the descriptor is nobody else's.
        unsafe {
            match libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) {
                -1 => Err(Errno::last()),
                file => Ok(Pagemap(OwnedFd::from_raw_fd(file))),
            }
        }
    }

    /// Whether the memory is still there that the process had when this was opened: it has not ended, and runs no other program.
    pub fn lives(&self) -> bool {
        let mut entry = [0u8; 8];
        // Of no memory, not even the first entry can be read, though an entry is there for every address.
        matches!(rustix::io::pread(&self.0, &mut entry, 0), Ok(count) if count == entry.len())
    }

    /// The bytes of `range` that are of `category`.
    ///
    /// # Errors
    /// `ENOTTY` on kernels before 6.7.
    pub fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno> {
        let wanted = category as u64;
        let mut bytes = 0;
        let argument = ScanArgument { category_mask: wanted, return_mask: wanted, ..ScanArgument::default() };
        self.scan(range, argument, |run, _| bytes += run.len)?;
        Ok(bytes)
    }

    /// Calls `each` for every run of whole huge pages of one kind that are mapped as such in `range`.
    ///
    /// # Errors
    /// As [`Pagemap::bytes_of`].
    pub fn huge_pages(&self, range: Range, mut each: impl FnMut(Range, HugeKind)) -> Result<(), Errno> {
        let wanted = ScanArgument {
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE | PAGE_IS_FILE | PAGE_IS_PFNZERO,
            ..ScanArgument::default()
        };
        self.scan(range, wanted, |run, categories| {
            let kind = match categories {
                zero if zero & PAGE_IS_PFNZERO != 0 => HugeKind::Zero,
                file if file & PAGE_IS_FILE != 0 => HugeKind::File,
                _ => HugeKind::Anonymous,
            };
            // A mapping may have a part of a huge page at its ends.
            let start = run.start.next_multiple_of(HUGE_PAGE_SIZE);
            let end = run.end() & !(HUGE_PAGE_SIZE - 1);
            if start < end {
                each(Range { start, len: end - start }, kind);
            }
        })
    }

    /// Whether the page at `address` is mapped by this process alone (4.2); `None` if there is no page.
    ///
    /// # Errors
    /// `EIO` where nothing could be read: the process has ended or runs another program.
    pub fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno> {
        const EXCLUSIVE: u64 = 1 << 56;
        let entry = self.entry(address / PAGE_SIZE)?;
        Ok((entry & PRESENT != 0).then_some(entry & EXCLUSIVE != 0))
    }

    /// The entry of the file, of eight bytes each, with this number.
    fn entry(&self, number: usize) -> Result<u64, Errno> {
        let mut entry = 0u64;
        let at = (number * size_of::<u64>()) as i64;
        // SAFETY: `entry` is a valid place for the eight bytes that are read.
        let count = unsafe { libc::pread(self.0.as_raw_fd(), (&raw mut entry).cast(), size_of::<u64>(), at) };
        match count {
            8 => Ok(entry),
            -1 => Err(Errno::last()),
            _ => Err(Errno(libc::EIO)),
        }
    }

    /// Calls `each` for every run of pages in `range` that is of the categories in `argument`, with those asked for. Allocates nothing.
    fn scan(&self, range: Range, mut argument: ScanArgument, mut each: impl FnMut(Range, u64)) -> Result<(), Errno> {
        let mut regions = [PageRegion::default(); 64];
        argument.size = size_of::<ScanArgument>() as u64;
        (argument.start, argument.end) = (range.start as u64, range.end() as u64);
        (argument.vec, argument.vec_len) = ((&raw mut regions) as u64, regions.len() as u64);
        while argument.start < argument.end {
            // SAFETY: the request fills at most `vec_len` regions of the array that `vec` points to.
            let count = unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
            if count < 0 {
                return Err(Errno::last());
            }
            for region in &regions[..count as usize] {
                let run = Range { start: region.start as usize, len: (region.end - region.start) as usize };
                each(run, region.categories);
            }
            argument.start = argument.walk_end;
        }
        Ok(())
    }
}

/// Calls `each` for every run of pages in `range` of this process that has contents: in memory or in swap, and not the shared zero
/// page. What lies between reads as zero.
///
/// # Errors
/// `ENOTTY` on kernels before 6.7; those of opening `/proc/self/pagemap`. `each` may have been called for a part of the range then.
pub fn with_contents(range: Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    let wanted = ScanArgument {
        category_inverted: PAGE_IS_PFNZERO,
        category_mask: PAGE_IS_PFNZERO,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT,
        ..ScanArgument::default()
    };
    Pagemap::own()?.scan(range, wanted, |run, _| each(run))
}

/// The bytes of `range` of this process that are of `category`. Kernels before 6.7 tell only what is [`Category::Present`], by
/// `/proc/self/smaps`, which is read into the heap.
///
/// # Errors
/// Those of opening `/proc/self/pagemap`; `ENOTTY` for another category on kernels before 6.7.
pub fn bytes_of(range: Range, category: Category) -> Result<usize, Errno> {
    let pagemap = Pagemap::own()?;
    match pagemap.bytes_of(range, category) {
        Err(Errno(libc::ENOTTY)) if category == Category::Present => present_by_mappings(&pagemap, range),
        result => result,
    }
}

/// What is present in the mappings that lie in the range, and page by page in those that reach beyond it.
fn present_by_mappings(pagemap: &Pagemap, range: Range) -> Result<usize, Errno> {
    let text = std::fs::read_to_string("/proc/self/smaps")?;
    let (mut bytes, mut whole) = (0, false);
    for line in text.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or("");
        let bounds = first.split_once('-').map(|(start, end)| [start, end].map(|text| usize::from_str_radix(text, 16)));
        if let Some([Ok(start), Ok(end)]) = bounds {
            whole = start >= range.start && end <= range.end();
            if !whole {
                for address in (start.max(range.start)..end.min(range.end())).step_by(PAGE_SIZE) {
                    bytes += if pagemap.entry(address / PAGE_SIZE)? & PRESENT != 0 { PAGE_SIZE } else { 0 };
                }
            }
        } else if whole && let Some(size) = line.strip_prefix("Rss:") {
            bytes += size.trim().trim_end_matches(" kB").parse::<usize>().map_err(|_| Errno(libc::EILSEQ))? << 10;
        }
    }
    Ok(bytes)
}

/// Calls `each` for every run of whole huge pages that are mapped in `range` of this process. Kernels before 6.7 are asked for the flags
/// of the pages (`/proc/kpageflags`, 2.6.25), which tell of every huge page, whether it is mapped as one or not.
///
/// # Errors
/// Those of opening `/proc/self/pagemap`; before 6.7 `EACCES` or `EPERM` without `CAP_SYS_ADMIN`.
pub fn own_huge_pages(range: Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    let pagemap = Pagemap::own()?;
    match pagemap.huge_pages(range, |run, _| each(run)) {
        Err(Errno(libc::ENOTTY)) => huge_pages_by_flags(&pagemap, range, each),
        result => result,
    }
}

fn huge_pages_by_flags(pagemap: &Pagemap, range: Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    const HUGETLB: u64 = 1 << 17;
    const TRANSPARENT: u64 = 1 << 22;
    let flags = Pagemap::open(c"/proc/kpageflags")?;
    let first = range.start.next_multiple_of(HUGE_PAGE_SIZE);
    for start in (first..range.end()).step_by(HUGE_PAGE_SIZE).take_while(|start| start + HUGE_PAGE_SIZE <= range.end())
    {
        let entry = pagemap.entry(start / PAGE_SIZE)?;
        if entry & PRESENT == 0 {
            continue;
        }
        // Whoever may not know the number is told 0.
        let number = (entry & FRAME_NUMBER) as usize;
        if number == 0 {
            return Err(Errno(libc::EPERM));
        }
        // A huge page begins at a frame that is aligned to its size.
        if number.is_multiple_of(HUGE_PAGE_SIZE / PAGE_SIZE) && flags.entry(number)? & (HUGETLB | TRANSPARENT) != 0 {
            each(Range { start, len: HUGE_PAGE_SIZE });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};

    /// Both ways see the same huge pages.
    #[test]
    fn huge_pages_are_found_by_their_flags_as_well() {
        use crate::sys::memory::{Advice, advise};
        let whole = Range { start: map(8 * HUGE_PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 8 * HUGE_PAGE_SIZE };
        let start = whole.start.next_multiple_of(HUGE_PAGE_SIZE);
        let range = Range { start, len: 6 * HUGE_PAGE_SIZE };
        // SAFETY: the mapping belongs to this test.
        unsafe {
            let _ = advise(Range { start, len: 4 * HUGE_PAGE_SIZE }, Advice::HugePage);
            let _ = advise(Range { start: start + 4 * HUGE_PAGE_SIZE, len: HUGE_PAGE_SIZE }, Advice::NoHugePage);
            // One is not touched, and one has small pages.
            for index in [0, 2, 3, 4] {
                ((start + index * HUGE_PAGE_SIZE) as *mut u8).write_bytes(1, HUGE_PAGE_SIZE);
            }
        }
        let pagemap = Pagemap::own().unwrap();
        let (mut scanned, mut flagged) = (0, 0);
        let by_scan = pagemap.huge_pages(range, |run, _| scanned += run.len);
        let by_flags = huge_pages_by_flags(&pagemap, range, |run| flagged += run.len);
        if by_scan.is_ok() && by_flags.is_ok() {
            assert_eq!(scanned, flagged);
            assert!(scanned <= 3 * HUGE_PAGE_SIZE, "{scanned}");
        }
        // SAFETY: the test is done with it.
        unsafe { unmap(whole).unwrap() };
    }

    #[test]
    fn what_is_present_is_counted_by_mappings_as_well() {
        let range = Range { start: map(64 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 64 * PAGE_SIZE };
        // SAFETY: the mapping belongs to this test; huge pages would bring more than is touched.
        unsafe {
            let _ = crate::sys::memory::advise(range, crate::sys::memory::Advice::NoHugePage);
            (0..64).step_by(4).for_each(|index| ((range.start + index * PAGE_SIZE) as *mut u8).write(1));
        }
        let part = Range { start: range.start + PAGE_SIZE, len: 32 * PAGE_SIZE };
        let pagemap = Pagemap::own().unwrap();
        for (range, pages) in [(range, 16), (part, 8)] {
            assert_eq!(present_by_mappings(&pagemap, range), Ok(pages * PAGE_SIZE));
            assert_eq!(bytes_of(range, Category::Present), Ok(pages * PAGE_SIZE));
        }
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }

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
