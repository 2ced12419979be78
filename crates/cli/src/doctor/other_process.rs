//! What can be done to another process.

use super::check::Check;
use super::scratch::Scratch;
use pagecrew::sys::memory::Range;
use pagecrew::sys::{Errno, PAGE_SIZE};

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![Check::tried(
        "advice to other processes",
        advise_a_child(),
        "huge pages of other processes can't be trimmed",
        "CAP_SYS_NICE and the right to trace the process (Linux 5.10: process_madvise)",
    )]
}

/// Gives a forked child, which has the same mappings, advice about one of them.
fn advise_a_child() -> Result<(), Errno> {
    let mut scratch = Scratch::new(PAGE_SIZE)?;
    scratch.write(0, 1);
    // SAFETY: the child only waits to be killed, which is allowed however many threads its parent has.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: takes no pointers. If the parent is killed before it gets to the end, the child goes too.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            loop {
                libc::pause();
            }
        }
    }
    if child < 0 {
        return Err(Errno::last());
    }
    let result = cold(child, scratch.range());
    // SAFETY: the child is ours and has not been waited for, so the number is its own; a null status is allowed.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    result
}

/// `process_madvise(MADV_COLD)`, which does not change contents.
fn cold(pid: i32, range: Range) -> Result<(), Errno> {
    let vector = libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: range.len };
    // SAFETY: the descriptor is ours and closed here; `vector` is valid for the call and names memory of the other process.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if process < 0 {
            return Err(Errno::last());
        }
        let result = libc::syscall(libc::SYS_process_madvise, process, &vector, 1, libc::MADV_COLD, 0);
        let error = Errno::last();
        libc::close(process as i32);
        if result < 0 { Err(error) } else { Ok(()) }
    }
}
