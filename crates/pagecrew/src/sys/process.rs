//! Another process: its number held fast, its memory read, and advice given to it. It is never stopped or traced.

use super::memory::{self, Advice, Range};
use super::{Errno, procfs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// More pieces than this the kernel does not take in one call.
pub const PIECES_MOST: usize = 1024;

/// A process that was there when it was opened (`pidfd_open`, 5.3). Once it has ended, its number may be another's: whoever used the
/// number asks [`Process::alive`] afterwards, and if that is so, it was this process all the time.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    descriptor: OwnedFd,
    own: bool,
}

impl Process {
    /// Opens process `pid`.
    ///
    /// # Errors
    /// `ESRCH` where there is none, `ENOSYS` on kernels before 5.3.
    pub fn open(pid: i32) -> Result<Process, Errno> {
        // SAFETY: takes no pointers; the descriptor is new and nobody else's (and closed on exec by itself).
        unsafe {
            let descriptor = Errno::check(libc::syscall(libc::SYS_pidfd_open, pid, 0))?;
            let descriptor = OwnedFd::from_raw_fd(descriptor as i32);
            Ok(Process { pid, descriptor, own: pid == libc::getpid() })
        }
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it has not ended yet; one that waits to be reaped has.
    pub fn alive(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry; returns at once.
        unsafe { libc::poll(&mut poll, 1, 0) == 0 }
    }

    /// Reads `pieces` of its memory into `room`, one behind the other (`process_vm_readv`, 3.2). Returns the bytes that were read, which
    /// are fewer where a piece is not there.
    ///
    /// # Errors
    /// `EFAULT` where not even the first byte is there, `EPERM` without the right to trace the process, `ESRCH` where it has ended.
    ///
    /// # Panics
    /// If there are more than [`PIECES_MOST`] pieces, or if `room` is too small for them.
    pub fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
        read_of(self.pid, pieces, room)
    }

    /// Says that `range` of its memory is not needed soon ([`Advice::Cold`]; in another process 5.10, `process_madvise`). Contents do not
    /// change.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_NICE` or the right to look at the process; `EINVAL` where the memory is locked or made of reserved huge
    /// pages; `ENOMEM` where nothing is mapped; `ESRCH` where it has ended.
    pub fn cold(&self, range: Range) -> Result<(), Errno> {
        if self.own {
            // Needs no rights at all.
            // SAFETY: this kind of advice changes no contents.
            return unsafe { memory::advise(range, Advice::Cold) };
        }
        let vector = vector(&range);
        // SAFETY: `vector` is valid for the call and names memory of the other process, whose contents do not change.
        let result = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.descriptor.as_raw_fd(),
                &raw const vector,
                1usize,
                Advice::Cold as i32,
                0,
            )
        };
        Errno::check(result).map(drop)
    }
}

/// As [`Process::read`] of this very process: what can't be read is an error and not a fault.
///
/// # Errors
/// As [`Process::read`].
///
/// # Panics
/// As [`Process::read`].
pub fn read_own(pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: takes nothing and cannot fail.
    read_of(unsafe { libc::getpid() }, pieces, room)
}

fn read_of(pid: i32, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
    let total: usize = pieces.iter().map(|piece| piece.len).sum();
    assert!(pieces.len() <= PIECES_MOST && total <= room.len());
    let local = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: total };
    let remote: Vec<_> = pieces.iter().map(vector).collect();
    // SAFETY: the kernel writes at most `total` bytes into `room`; the pieces are only read, by the kernel.
    let count = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as u64, 0) };
    Errno::check(count as libc::c_long).map(|count| count as usize)
}

fn vector(range: &Range) -> libc::iovec {
    libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: range.len }
}

/// When process `pid` was started, in clock ticks since the machine was (`/proc/PID/stat`): with the number, it names a process for good.
///
/// # Errors
/// Those of [`procfs::read`].
pub fn start_ticks(pid: i32) -> Result<u64, Errno> {
    let (mut path, mut buffer) = ([0; 32], procfs::Buffer::new());
    let text = procfs::read_lossy(procfs::path(&mut path, &["/proc/"], pid as u64, "/stat"), &mut buffer)?;
    // The name stands in parentheses and may hold anything, parentheses included.
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
    fields.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).ok_or(Errno(libc::EILSEQ))
}

/// Lets this process have as many descriptors as it may have at all (`RLIMIT_NOFILE`), and returns how many that is.
pub fn raise_descriptor_limit() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer, and then the new value.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) != 0 {
            return 0;
        }
        let before = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        if libc::setrlimit(libc::RLIMIT_NOFILE, &limit) != 0 {
            limit.rlim_cur = before;
        }
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE_SIZE;
    use crate::sys::memory::{Protection, map, unmap};

    #[test]
    fn this_process_can_be_read_and_advised() {
        let range = Range { start: map(4 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 4 * PAGE_SIZE };
        // SAFETY: the mapping belongs to this test.
        unsafe { ((range.start + PAGE_SIZE) as *mut u8).write(7) };
        let this = Process::open(std::process::id() as i32).unwrap();
        let mut room = [0xa5; 16];
        let pieces = [Range { start: range.start + PAGE_SIZE, len: 8 }, Range { start: range.start, len: 8 }];
        assert_eq!(this.read(&pieces, &mut room), Ok(16));
        assert_eq!((room[0], &room[1..]), (7, &[0; 15][..]));
        this.cold(range).unwrap();
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
        assert_eq!(this.read(&pieces, &mut room), Err(Errno(libc::EFAULT)));
        assert_eq!(this.cold(range), Err(Errno(libc::ENOMEM)));
        assert!(this.alive() && this.pid() == std::process::id() as i32);
    }

    #[test]
    fn a_process_that_ended_is_not_alive() {
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(process.alive());
        assert!(start_ticks(process.pid()).unwrap() >= start_ticks(1).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.alive());
        assert_eq!(Process::open(process.pid()).err(), Some(Errno(libc::ESRCH)));
    }
}
