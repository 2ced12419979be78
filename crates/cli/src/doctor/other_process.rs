//! What can be done to another process.

use super::check::Check;
use super::scratch::Scratch;
use pagecrew::sys::process::Process;
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
    let result = Process::open(child).and_then(|child| child.cold(scratch.range()));
    // SAFETY: the child is ours and has not been waited for, so the number is its own; a null status is allowed.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    result
}
