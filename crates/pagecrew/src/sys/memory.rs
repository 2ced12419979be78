//! Mappings: reserve, commit, discard, move. All ranges are page aligned; lengths are in bytes.

use super::Errno;

/// A page-aligned range of this process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Range {
    /// The first address behind the range.
    pub fn end(&self) -> usize {
        self.start + self.len
    }
}

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// No access: address space only, never counted against overcommit.
    None,
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

impl Protection {
    fn bits(self) -> i32 {
        match self {
            Protection::None => libc::PROT_NONE,
            Protection::Read => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Maps `len` bytes of anonymous memory at an address of the kernel's choice, without reserving swap (`MAP_NORESERVE`).
///
/// # Errors
/// `ENOMEM` where `RLIMIT_AS`, `RLIMIT_DATA`, strict overcommit or `vm.max_map_count` refuse it.
pub fn map(len: usize, protection: Protection) -> Result<usize, Errno> {
    // SAFETY: a new anonymous mapping at an address that the kernel chooses cannot touch memory in use.
    unsafe { raw_map(0, len, protection, ANONYMOUS) }
}

// The raw system calls, not the libc functions: the preload library stands in for those.

/// # Safety
/// With `MAP_FIXED`, nobody uses the memory of the range.
unsafe fn raw_map(address: usize, len: usize, protection: Protection, flags: i32) -> Result<usize, Errno> {
    // SAFETY: by the function's own contract.
    let result = unsafe { libc::syscall(libc::SYS_mmap, address, len, protection.bits(), flags, -1, 0usize) };
    Errno::check(result).map(|address| address as usize)
}

/// Replaces whatever is mapped in `range` by fresh anonymous memory: contents, advice, locks and page offsets are gone.
///
/// # Safety
/// Nobody uses the memory in `range`.
///
/// # Errors
/// As [`map`]; the old mapping may then be gone.
pub unsafe fn map_fresh(range: Range, protection: Protection) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, so replacing what is mapped there harms nobody.
    unsafe { raw_map(range.start, range.len, protection, ANONYMOUS | libc::MAP_FIXED) }.map(drop)
}

/// Unmaps `range`.
///
/// # Safety
/// Nobody uses the memory in `range`.
///
/// # Errors
/// `ENOMEM` where a hole would exceed `vm.max_map_count`.
pub unsafe fn unmap(range: Range) -> Result<(), Errno> {
    // SAFETY: the caller owns the range.
    Errno::check(unsafe { libc::syscall(libc::SYS_munmap, range.start, range.len) }).map(drop)
}

/// Changes the protection of `range`.
///
/// # Safety
/// Nobody relies on an access that the new protection refuses.
///
/// # Errors
/// `ENOMEM` where strict overcommit, `RLIMIT_DATA` or `vm.max_map_count` refuse it.
pub unsafe fn protect(range: Range, protection: Protection) -> Result<(), Errno> {
    // SAFETY: by the function's own contract.
    let result = unsafe { libc::syscall(libc::SYS_mprotect, range.start, range.len, protection.bits()) };
    Errno::check(result).map(drop)
}

/// Advice of `madvise(2)`, with the kernel version that brought it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Advice {
    /// `MADV_DONTNEED`: give the pages back; the range reads as zero afterwards. Refused with `EINVAL` on locked memory.
    DontNeed = 4,
    /// `MADV_HUGEPAGE` (2.6.38): the range may be backed by huge pages.
    HugePage = 14,
    /// `MADV_NOHUGEPAGE` (2.6.38): the range is never backed by huge pages.
    NoHugePage = 15,
    /// `MADV_WIPEONFORK` (4.14): a child sees the range as zero, and `fork` copies none of it.
    WipeOnFork = 18,
    /// `MADV_KEEPONFORK` (4.14): undoes [`Advice::WipeOnFork`].
    KeepOnFork = 19,
    /// `MADV_COLD` (5.4): the range is not needed soon. A huge page of which it is a part is split, and since 6.12 the kernel puts the
    /// shared zero page in the place of what is zero in it.
    Cold = 20,
    /// `MADV_POPULATE_READ` (5.14): enter the pages of the range into the page tables.
    PopulateRead = 22,
    /// `MADV_POPULATE_WRITE` (5.14): back the range with writable pages now.
    PopulateWrite = 23,
    /// `MADV_DONTNEED_LOCKED` (5.18): as `DontNeed`, on locked memory too.
    DontNeedLocked = 24,
    /// `MADV_COLLAPSE` (6.1): back the range with huge pages now, whatever the system's setting is.
    Collapse = 25,
    /// `MADV_GUARD_INSTALL` (6.13): an access to the range is a fault; needs no mapping of its own.
    GuardInstall = 102,
    /// `MADV_GUARD_REMOVE` (6.13): undoes [`Advice::GuardInstall`].
    GuardRemove = 103,
}

/// Gives advice about `range`.
///
/// # Safety
/// With [`Advice::DontNeed`], [`Advice::DontNeedLocked`] and [`Advice::GuardInstall`] the contents are lost: nobody may need
/// them. The other kinds do not change contents.
///
/// # Errors
/// `EINVAL` where the kernel does not know the advice or the mapping refuses it; `ENOMEM` where part of the range is unmapped.
pub unsafe fn advise(range: Range, advice: Advice) -> Result<(), Errno> {
    // SAFETY: by the function's own contract.
    let result = unsafe { libc::syscall(libc::SYS_madvise, range.start, range.len, advice as i32) };
    Errno::check(result).map(drop)
}

/// Gives the pages of `range` back to the kernel, whether they are locked or not; the range reads as zero afterwards.
///
/// # Safety
/// Nobody needs the contents.
///
/// # Errors
/// As [`advise`].
pub unsafe fn discard(range: Range) -> Result<(), Errno> {
    // SAFETY: by the function's own contract.
    unsafe {
        match advise(range, Advice::DontNeed) {
            Err(Errno(libc::EINVAL)) => advise(range, Advice::DontNeedLocked),
            result => result,
        }
    }
}

/// Moves the pages of `from` to `to`, an equally long range, without copying. `from` stays mapped and reads as zero
/// (`MREMAP_DONTUNMAP`, 5.7; huge pages move whole where both are 2 MiB aligned).
///
/// # Safety
/// Nobody uses either range meanwhile, nor needs the contents of `to`.
///
/// # Errors
/// `EINVAL` on kernels before 5.7, `EFAULT` where `from` spans several mappings, `ENOMEM` at `vm.max_map_count`; nothing has changed then.
pub unsafe fn move_pages(from: Range, to: usize) -> Result<(), Errno> {
    const DONTUNMAP: i32 = 4;
    is_one_mapping(from)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    // SAFETY: by the function's own contract.
    let result = unsafe { libc::syscall(libc::SYS_mremap, from.start, from.len, from.len, flags, to) };
    Errno::check(result).map(drop)
}

/// Whether a mapping has all of `range`. Kernels before 6.17 find out only after they have unmapped the range that pages are to move to,
/// which would leave a hole there. So they are asked to make the mapping longer where it is: they look at this first.
///
/// # Errors
/// `EFAULT` if not.
fn is_one_mapping(range: Range) -> Result<(), Errno> {
    let longer = range.len + super::PAGE_SIZE;
    // SAFETY: a mapping that grows by a page into free address space harms nobody, and is undone below.
    let grown = unsafe { libc::syscall(libc::SYS_mremap, range.start, range.len, longer, 0, 0) };
    match Errno::check(grown) {
        Err(error @ Errno(libc::EFAULT)) => Err(error),
        Err(_) => Ok(()),
        Ok(_) => {
            // SAFETY: the page was mapped by the call above, so nobody knows of it.
            unsafe { unmap(Range { start: range.end(), len: super::PAGE_SIZE }) }
        }
    }
}

/// Says for each page of `range` whether it is resident: bit 0 of its byte in `pages` (`mincore(2)`).
///
/// # Errors
/// `ENOMEM` where part of the range is not mapped.
///
/// # Panics
/// If `pages` has fewer bytes than the range has pages.
pub fn residence(range: Range, pages: &mut [u8]) -> Result<(), Errno> {
    assert!(pages.len() >= range.len.div_ceil(super::PAGE_SIZE));
    // SAFETY: the kernel writes one byte for each page, for which there is room.
    let result = unsafe { libc::syscall(libc::SYS_mincore, range.start, range.len, pages.as_mut_ptr()) };
    Errno::check(result).map(drop)
}

/// Keeps in memory what this process has used or will use, program code included, until it ends (`mlockall` with `MCL_ONFAULT`, 4.4). What it
/// has mapped and never used takes no memory for that.
///
/// # Errors
/// `ENOMEM` or `EPERM` beyond `RLIMIT_MEMLOCK`.
pub fn keep_what_is_used() -> Result<(), Errno> {
    // SAFETY: changes what the kernel may take away, and nothing that is in memory.
    Errno::check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }.into()).map(drop)
}

/// Page faults of this process so far, those before its last `exec` included (`getrusage`).
pub fn page_faults() -> usize {
    let usage = usage();
    (usage.ru_minflt + usage.ru_majflt) as usize
}

/// The most that this process ever had resident, in bytes, before its last `exec` included (`getrusage`). Needs no file.
pub fn peak_resident() -> usize {
    usage().ru_maxrss as usize * 1024
}

fn usage() -> libc::rusage {
    // SAFETY: all zeroes is a valid structure, and the call fills it in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE_SIZE;

    fn mapped(len: usize) -> Range {
        Range { start: map(len, Protection::ReadWrite).unwrap(), len }
    }

    #[test]
    fn discarded_memory_reads_as_zero_even_when_locked() {
        let range = mapped(4 * PAGE_SIZE);
        let bytes = range.start as *mut u8;
        // SAFETY: the range is mapped read-write and belongs to this test.
        unsafe {
            bytes.write(1);
            discard(range).unwrap();
            assert_eq!(bytes.read(), 0);
            bytes.write(2);
            if libc::mlock(bytes.cast(), range.len) == 0 {
                discard(range).unwrap();
                assert_eq!(bytes.read(), 0);
            }
            unmap(range).unwrap();
        }
    }

    #[test]
    fn moved_pages_keep_their_contents_and_leave_zeroes() {
        let (from, to) = (mapped(8 * PAGE_SIZE), mapped(8 * PAGE_SIZE));
        // SAFETY: both ranges are mapped read-write and belong to this test.
        unsafe {
            (from.start as *mut u8).add(PAGE_SIZE).write(7);
            move_pages(from, to.start).unwrap();
            assert_eq!((to.start as *mut u8).add(PAGE_SIZE).read(), 7);
            assert_eq!((from.start as *mut u8).add(PAGE_SIZE).read(), 0);
            unmap(from).unwrap();
            unmap(to).unwrap();
        }
    }

    #[test]
    fn an_impossible_mapping_is_an_error() {
        assert_eq!(map(1 << 56, Protection::None), Err(Errno(libc::ENOMEM)));
    }

    #[test]
    fn a_move_that_is_refused_leaves_no_hole() {
        let both = Range { start: map(4 << 20, Protection::ReadWrite).unwrap(), len: 4 << 20 };
        let half = Range { start: both.start + (2 << 20), len: 2 << 20 };
        let to = Range { start: map(4 << 20, Protection::ReadWrite).unwrap(), len: 4 << 20 };
        // SAFETY: only this test knows these mappings.
        unsafe {
            (to.start as *mut u8).write(7);
            (both.start as *mut u8).write(8);
            // Two mappings from here on, since one is copied by a fork and the other isn't.
            advise(half, Advice::WipeOnFork).unwrap();
            assert_eq!(move_pages(both, to.start), Err(Errno(libc::EFAULT)));
            assert_eq!(((to.start as *mut u8).read(), (both.start as *mut u8).read()), (7, 8));
            advise(half, Advice::KeepOnFork).unwrap();
            move_pages(both, to.start).unwrap();
            assert_eq!(((to.start as *mut u8).read(), (both.start as *mut u8).read()), (8, 0));
            unmap(both).unwrap();
            unmap(to).unwrap();
        }
    }

    #[test]
    fn asking_whether_it_is_one_mapping_changes_nothing() {
        let all = Range { start: map(1 << 20, Protection::ReadWrite).unwrap(), len: 1 << 20 };
        let first = Range { start: all.start, len: 512 << 10 };
        // SAFETY: only this test knows the mapping.
        unsafe { unmap(Range { start: first.end(), len: 512 << 10 }).unwrap() };
        assert_eq!(is_one_mapping(first), Ok(()));
        // Nothing is behind it, as before.
        assert_eq!(residence(Range { start: first.end(), len: 4096 }, &mut [0]), Err(Errno(libc::ENOMEM)));
        // SAFETY: as above.
        unsafe { unmap(first).unwrap() };
        assert_eq!(is_one_mapping(first), Err(Errno(libc::EFAULT)));
    }
}
