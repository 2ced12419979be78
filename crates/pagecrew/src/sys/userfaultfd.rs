//! `userfaultfd(2)`, for the one thing that nothing else can do: moving pages from one place of a mapping to another without cutting the
//! mapping in pieces (`UFFDIO_MOVE`, 6.8). No fault is handled: the ranges are registered for write protection, and nothing is protected.
//!
//! The program sees a descriptor more, with a number above those that it has and closed by `exec`. It may close it; then the calls here fail.

use super::memory::Range;
use super::{Errno, procfs};

/// `UFFD_USER_MODE_ONLY` (5.11): without it, an ordinary user is refused.
const USER_MODE_ONLY: libc::c_int = 1;
const API_VERSION: u64 = 0xaa;
const MODE_WRITE_PROTECT: u64 = 1 << 1;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`, and so on.
const API: libc::c_ulong = 0xc018_aa3f;
const REGISTER: libc::c_ulong = 0xc020_aa00;
const UNREGISTER: libc::c_ulong = 0x8010_aa01;
const MOVE: libc::c_ulong = 0xc028_aa05;
/// Bit of a registered range's operations that says whether pages can be moved into it.
const CAN_MOVE: u64 = 1 << 5;

/// The descriptor has one of the last numbers that the table of descriptors has room for, which no program counts on. To make the table longer, the
/// kernel waits until no CPU reads the old one: 10 to 30 milliseconds in a process with several threads.
const DESCRIPTORS_LEFT: usize = 8;
/// And not a higher one than this: a common limit is 1024.
const DESCRIPTOR_MOST: usize = 1000;
/// A table has room for so many at least.
const TABLE_LEAST: usize = 64;

/// Only from 6.17 on: before, the kernel crashed where a huge page was about to be migrated at that moment.
const KERNEL_LEAST: (u32, u32) = (6, 17);

/// A descriptor for this process's memory. It stays open until [`Userfaultfd::close`] or `exec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Userfaultfd(pub i32);

/// Why pages did not move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveError {
    /// Bytes that moved before.
    pub moved: usize,
    /// What the kernel said.
    pub errno: Errno,
}

/// Whether a kernel of this name (`uname -r`) moves pages safely.
fn is_recent(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    matches!((numbers.next(), numbers.next()), (Some(Some(major)), Some(Some(minor))) if (major, minor) >= KERNEL_LEAST)
}

fn kernel_is_recent() -> bool {
    // SAFETY: all-zero bytes are a valid value of this plain structure, and its address is a valid place for the answer.
    let about = unsafe {
        let mut about: libc::utsname = std::mem::zeroed();
        libc::uname(&mut about);
        about
    };
    // SAFETY: the kernel ends the text with a zero.
    let release = unsafe { std::ffi::CStr::from_ptr(about.release.as_ptr()) };
    release.to_str().is_ok_and(is_recent)
}

/// Whether system calls of this thread are filtered: then, one that its maker did not think of may end the process.
fn is_filtered() -> bool {
    // SAFETY: reads a number of this thread; takes no pointers. A kernel without filters refuses.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) > 0 }
}

impl Userfaultfd {
    /// A descriptor for moving pages of this process.
    ///
    /// # Errors
    /// `EPERM` where the process's system calls are filtered or it may not have one; `ENOSYS` or `EINVAL` on kernels without it, and
    /// before 6.17; `EMFILE` where there is no room for it.
    pub fn new() -> Result<Userfaultfd, Errno> {
        if !kernel_is_recent() {
            return Err(Errno(libc::ENOSYS));
        }
        if is_filtered() {
            return Err(Errno(libc::EPERM));
        }
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: takes no pointers; the descriptors are this function's own until it returns.
        let low = Errno::check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })? as i32;
        let table = procfs::descriptor_table().unwrap_or(TABLE_LEAST);
        let least = table.min(DESCRIPTOR_MOST).saturating_sub(DESCRIPTORS_LEFT) as libc::c_int;
        // SAFETY: as above.
        let high = unsafe {
            let high = Errno::check(libc::fcntl(low, libc::F_DUPFD_CLOEXEC, least).into());
            libc::close(low);
            high? as i32
        };
        let made = Userfaultfd(high);
        let mut api = [API_VERSION, 0, 0];
        made.call(API, &mut api).inspect_err(|_| made.close())?;
        Ok(made)
    }

    /// Lets pages be moved into `range`, which consists of private anonymous mappings of this process.
    ///
    /// # Errors
    /// `EINVAL` where it does not, or where the kernel can't move pages (before 6.8); `EBUSY` where another descriptor has it.
    pub fn register(self, range: Range) -> Result<(), Errno> {
        let mut request = [range.start as u64, range.len as u64, MODE_WRITE_PROTECT, 0];
        self.call(REGISTER, &mut request)?;
        if request[3] & CAN_MOVE == 0 { Err(Errno(libc::EINVAL)) } else { Ok(()) }
    }

    /// Undoes [`Userfaultfd::register`].
    pub fn unregister(self, range: Range) {
        let _ = self.call(UNREGISTER, &mut [range.start as u64, range.len as u64]);
    }

    /// Moves the pages of `from` to `to`, where there are none. What they leave reads as zero.
    ///
    /// # Safety
    /// Nobody uses either range meanwhile, and nobody counts on what is in either.
    ///
    /// # Errors
    /// Whatever keeps a page from moving: `EEXIST` where there is one already, `ENOENT` where there is none to move, `EBUSY` for one that
    /// is shared with another process or pinned, `EAGAIN` for a moment in which the mappings change. `EBADF` or `ENOTTY` where the program
    /// has closed the descriptor.
    pub unsafe fn move_pages(self, from: Range, to: usize) -> Result<(), MoveError> {
        let mut request = [to as u64, from.start as u64, from.len as u64, 0, 0];
        self.call(MOVE, &mut request).map_err(|errno| MoveError {
            // Less than the length where some did, an error number where none did, 0 where it did not begin.
            moved: request[4].cast_signed().clamp(0, from.len as i64) as usize,
            errno,
        })
    }

    /// Closes the descriptor: nothing is moved with it any more.
    pub fn close(self) {
        // SAFETY: the descriptor is the caller's own.
        let _ = unsafe { libc::close(self.0) };
    }

    fn call<const N: usize>(self, request: libc::c_ulong, argument: &mut [u64; N]) -> Result<(), Errno> {
        // SAFETY: each request's structure is as long as its number says, and consists of 64-bit numbers only. Not libc's function, which a
        // program may stand in for.
        Errno::check(unsafe { libc::syscall(libc::SYS_ioctl, self.0, request, argument.as_mut_ptr()) }).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{self, Protection};
    use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};

    #[test]
    fn kernels_are_told_apart_by_their_names() {
        for (release, recent) in [
            ("6.18.5", true),
            ("6.17.0-5-generic", true),
            ("7.0-rc1", true),
            ("10.2", true),
            ("6.16.12", false),
            ("6.12.48+deb13-amd64", false),
            ("5.19", false),
            ("6", false),
            ("", false),
            ("none.at.all", false),
        ] {
            assert_eq!(is_recent(release), recent, "{release}");
        }
    }

    #[test]
    fn pages_move_with_their_contents() {
        let table = procfs::descriptor_table().unwrap();
        let Ok(descriptor) = Userfaultfd::new() else { return };
        assert!((descriptor.0 as usize) < table, "{} of {table}: the table of descriptors became longer", descriptor.0);
        let len = 4 * HUGE_PAGE_SIZE;
        let start = memory::map(len, Protection::ReadWrite).unwrap().next_multiple_of(HUGE_PAGE_SIZE);
        let whole = Range { start, len: 3 * HUGE_PAGE_SIZE };
        descriptor.register(whole).unwrap();
        let from = Range { start, len: 3 * PAGE_SIZE };
        let (first, second) = (from.start as *mut u8, (start + HUGE_PAGE_SIZE) as *mut u8);
        // SAFETY: the mapping is this test's own.
        unsafe {
            let gap = descriptor.move_pages(from, second as usize).unwrap_err();
            assert_eq!((gap.moved, gap.errno), (0, Errno(libc::ENOENT)), "nothing to move");
            for page in 0..3 {
                first.add(page * PAGE_SIZE).write(7 + page as u8);
            }
            descriptor.move_pages(from, second as usize).unwrap();
            for page in 0..3 {
                assert_eq!(second.add(page * PAGE_SIZE).read(), 7 + page as u8);
                assert_eq!(first.add(page * PAGE_SIZE).read(), 0);
            }
            let taken = descriptor.move_pages(Range { start: second as usize, len: PAGE_SIZE }, start).unwrap_err();
            assert_eq!((taken.moved, taken.errno), (0, Errno(libc::EEXIST)));
        }
        descriptor.unregister(whole);
        descriptor.close();
        // SAFETY: as above.
        let closed = unsafe { descriptor.move_pages(from, second as usize) };
        assert_eq!(closed, Err(MoveError { moved: 0, errno: Errno(libc::EBADF) }));
    }
}
