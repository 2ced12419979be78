//! A child process that undoes a change to the system when this process ends, whatever the way, SIGKILL included.

use super::Errno;
use std::ffi::c_int;
use std::fs::File;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// A child process that writes a text to a file as soon as this process has ended, or this is dropped. A child that this process
/// forked meanwhile, and that has not called `exec`, counts as a part of it.
#[derive(Debug)]
pub(super) struct Guard {
    /// Its number.
    pub process: libc::pid_t,
    /// The guard sees the end of it. A socket, since that can be ended for all who have it.
    line: UnixStream,
}

impl Guard {
    /// Starts a guard over `file`, which is to be open for writing, and waits until it is at its place.
    pub fn start(file: &File, text: &str) -> Result<Guard, Errno> {
        let (line, end) = UnixStream::pair().map_err(Errno::from)?;
        // SAFETY: the masks are set by sigfillset and pthread_sigmask before they are used. The child stays inside
        // `guard`, which keeps to what is allowed after a fork of a process with several threads.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            // Blocked from its first instruction on: none of this process's handlers runs there, and what ends this process
            // from a terminal doesn't end it.
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let process = libc::fork();
            let error = Errno::last();
            if process == 0 {
                guard(line.as_raw_fd(), end.as_raw_fd(), file.as_raw_fd(), text.as_bytes());
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            if process < 0 {
                return Err(error);
            }
            // From here on the guard alone has this side, so its death is seen.
            drop(end);
            let mut guard = Guard { process, line };
            guard.line.read_exact(&mut [0]).map_err(|_| Errno(libc::ECHILD))?;
            Ok(guard)
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.line.shutdown(Shutdown::Both);
        // SAFETY: takes the number of a child; the status isn't asked for. ECHILD: somebody else has waited for it.
        while unsafe { libc::waitpid(self.process, std::ptr::null_mut(), 0) } < 0 && Errno::last() == Errno(libc::EINTR)
        {
        }
    }
}

/// The guard's life: sends a byte, waits for the end of `end`, writes `text` to `file` and exits. `line` is the other side of
/// `end`.
///
/// It may be in the group that is held, since it inherits this process's. So from that byte on it must not need a page that it
/// doesn't have: what it touches is touched before, and kept by `mlockall` (`MCL_ONFAULT`, 4.4), where that is allowed, without
/// bringing in anything else.
///
/// # Safety
/// To be called in a forked child, with every signal blocked. Calls only what is safe in a signal handler.
unsafe fn guard(line: c_int, end: c_int, file: c_int, text: &[u8]) -> ! {
    // SAFETY: the descriptors are open here as they are in the parent; the text and the name are the child's own copies, and reads
    // and writes stay within what is given.
    unsafe {
        // Its own copy of that side would keep `end` open. Closed by itself, since close_range (5.9) may be missing.
        libc::close(line);
        let (low, high) = (end.min(file) as libc::c_uint, end.max(file) as libc::c_uint);
        for (first, behind) in [(0, low), (low + 1, high), (high + 1, libc::c_uint::MAX)] {
            if first < behind {
                libc::syscall(libc::SYS_close_range, first, behind - 1, 0);
            }
        }
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        libc::prctl(libc::PR_SET_NAME, c"pagecrew/guard".as_ptr());
        // Writes nothing, but has the code that does in memory.
        libc::pwrite(-1, text.as_ptr().cast(), text.len(), 0);
        libc::mlockall(libc::MCL_CURRENT | libc::MCL_ONFAULT);
        let mut byte = 0u8;
        libc::write(end, (&raw const byte).cast(), 1);
        while libc::read(end, (&raw mut byte).cast(), 1) < 0 && Errno::last() == Errno(libc::EINTR) {}
        libc::pwrite(file, text.as_ptr().cast(), text.len(), 0);
        libc::_exit(0)
    }
}
