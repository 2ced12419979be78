//! Files in memory: mapping a part of one, where its pages come from, how much of it is backed, and whether anybody has it.

use super::memory::{self, Range};
use super::{Errno, PAGE_SIZE};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// A part of a file, mapped shared and read-write at an address that is 2 MiB aligned, until it is dropped.
#[derive(Debug)]
pub struct Mapped {
    whole: Range,
    range: Range,
}

impl Mapped {
    /// Maps `len` bytes from `offset` on, both multiples of 2 MiB.
    ///
    /// # Errors
    /// `ENOMEM` where there is no address space left, or where a file on hugetlbfs finds too few huge pages for it.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn new(file: &File, offset: usize, len: usize) -> Result<Mapped, Errno> {
        Mapped::with(file, offset, len, libc::PROT_READ | libc::PROT_WRITE, 0)
    }

    /// As [`Mapped::new`], but the mapping changes nothing of the file. On hugetlbfs, mapping what is to be written to makes a file longer that
    /// ends before that, as one does that was cut meanwhile, and sets huge pages apart for all of it.
    ///
    /// # Errors
    /// `ENOMEM` where there is no address space left.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn unchanged(file: &File, offset: usize, len: usize) -> Result<Mapped, Errno> {
        let mapped = Mapped::with(file, offset, len, libc::PROT_READ, libc::MAP_NORESERVE)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: this object's own mapping, of which nobody else knows yet.
        if unsafe { libc::mprotect(mapped.range.start as *mut libc::c_void, len, rights) } < 0 {
            return Err(Errno::last());
        }
        Ok(mapped)
    }

    fn with(file: &File, offset: usize, len: usize, rights: i32, more: i32) -> Result<Mapped, Errno> {
        const ALIGN: usize = super::HUGE_PAGE_SIZE;
        assert!(len > 0);
        // Address space alone, in which there is a range that is aligned as huge pages need it.
        let room = len.checked_add(ALIGN).ok_or(Errno(libc::ENOMEM))?;
        let whole = Range { start: memory::map(room, memory::Protection::None)?, len: room };
        let mapped = Mapped { whole, range: Range { start: whole.start.next_multiple_of(ALIGN), len } };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | more;
        // SAFETY: replaces a part of a mapping that was made above and that nobody else knows of.
        let address = unsafe {
            libc::mmap(
                mapped.range.start as *mut libc::c_void,
                len,
                rights,
                flags,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if address == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(mapped) }
    }

    /// Where it is.
    pub fn range(&self) -> Range {
        self.range
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and whoever used it had a borrow of this object.
        let _ = unsafe { memory::unmap(self.whole) };
    }
}

/// Bytes of `file` that are backed by memory.
///
/// # Errors
/// Those of `fstat`.
pub fn backed_bytes(file: &File) -> Result<usize, Errno> {
    Ok(file.metadata()?.blocks() as usize * 512)
}

/// Gives the memory of a part of `file` back; it reads as zero afterwards (2.6.38; on hugetlbfs 4.3).
///
/// # Errors
/// `EOPNOTSUPP` where the file system can't.
pub fn punch(file: &File, offset: usize, len: usize) -> Result<(), Errno> {
    debug_assert!(offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE));
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes no pointers.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) };
    Errno::check(result.into()).map(drop)
}

/// Gives back all memory of `file` from `offset` on, what was reserved beyond its end included (`FALLOC_FL_KEEP_SIZE`), which no size
/// shows.
///
/// # Errors
/// As [`punch`].
pub fn punch_from(file: &File, offset: usize) -> Result<(), Errno> {
    let all = (i64::MAX as usize - offset) / PAGE_SIZE * PAGE_SIZE;
    punch(file, offset, all)
}

/// Whether nobody but the holder of `file` has it open or mapped. The kernel knows: it gives a write lease only then. Whoever opens it
/// at that very moment waits until the lease is given back, which is at once.
///
/// # Errors
/// `EINVAL` where the file system has no leases, `EACCES` where the file is another user's and `CAP_LEASE` is missing.
pub fn unused_by_others(file: &File) -> Result<bool, Errno> {
    let lease = |kind: i32| {
        // SAFETY: takes no pointers.
        Errno::check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) }.into())
    };
    // Who breaks a lease has a signal sent to its holder: one that does nothing, instead of SIGIO, which ends a process.
    // SAFETY: takes no pointers.
    Errno::check(unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) }.into())?;
    match lease(libc::F_WRLCK) {
        Ok(_) => {
            lease(libc::F_UNLCK)?;
            Ok(true)
        }
        Err(Errno(libc::EAGAIN)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// `fcntl`'s number for the choice of a signal.
const F_SETSIG: i32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::HUGE_PAGE_SIZE;
    use std::os::fd::FromRawFd;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    fn file(name: &str) -> (PathBuf, File) {
        let path = PathBuf::from(format!("/dev/shm/pagecrew-{name}-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(4 << 20).unwrap();
        (path, file)
    }

    #[test]
    fn a_mapped_part_is_the_files() {
        let (path, file) = file("mapped");
        std::fs::remove_file(path).unwrap();
        let mapped = Mapped::new(&file, 2 << 20, 2 << 20).unwrap();
        assert!(mapped.range().start.is_multiple_of(HUGE_PAGE_SIZE));
        // SAFETY: the range is mapped read-write as long as `mapped` lives.
        unsafe { (mapped.range().start as *mut u8).write(7) };
        assert!(backed_bytes(&file).unwrap() >= PAGE_SIZE);
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_at(&file, &mut byte, 2 << 20).unwrap();
        assert_eq!(byte, [7]);
        punch(&file, 2 << 20, 2 << 20).unwrap();
        assert_eq!(backed_bytes(&file), Ok(0));
        // SAFETY: as above.
        assert_eq!(unsafe { (mapped.range().start as *const u8).read() }, 0);
    }

    #[test]
    fn mapping_a_file_of_reserved_pages_may_leave_it_as_it_is() {
        // SAFETY: the name is a C string, and the descriptor is this test's own.
        let file = unsafe {
            match libc::memfd_create(c"pagecrew".as_ptr(), libc::MFD_HUGETLB | libc::MFD_HUGE_2MB) {
                // A kernel without them.
                -1 => return,
                descriptor => File::from_raw_fd(descriptor),
            }
        };
        file.set_len(2 << 20).unwrap();
        // No page of this size need be there for that.
        let mapped = Mapped::unchanged(&file, 0, 8 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 2 << 20);
        drop(mapped);
        // Unlike this.
        if Mapped::new(&file, 0, 8 << 20).is_ok() {
            assert_eq!(file.metadata().unwrap().len(), 8 << 20);
        }
    }

    #[test]
    fn who_has_a_file_is_seen_whichever_way_he_has_it() {
        let (path, file) = file("lease");
        let unused = || unused_by_others(&file).unwrap();
        // Children of other tests have every file of this process for a moment.
        let soon_unused = || {
            let deadline = Instant::now() + Duration::from_secs(30);
            while !unused() && Instant::now() < deadline {}
            Instant::now() < deadline
        };
        assert!(soon_unused());
        let reader = File::open(&path).unwrap();
        assert!(!unused());
        drop(reader);
        assert!(soon_unused());
        let other = File::options().read(true).write(true).open(&path).unwrap();
        let mapped = Mapped::new(&other, 0, 2 << 20).unwrap();
        drop(other);
        assert!(!unused());
        std::fs::remove_file(path).unwrap();
        assert!(!unused());
        drop(mapped);
        assert!(soon_unused());
    }

    /// Thousands of openings beside thousands of questions: each opening comes through, and nobody is ended by a signal.
    #[test]
    fn the_question_disturbs_nobody() {
        let (path, file) = file("disturb");
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| {
                for _ in 0..5000 {
                    File::options().read(true).write(true).open(&path).unwrap();
                }
            });
            while !opener.is_finished() {
                let _ = unused_by_others(&file).unwrap();
            }
        });
        std::fs::remove_file(path).unwrap();
    }
}
