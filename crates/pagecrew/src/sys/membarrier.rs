//! `membarrier(2)`, used to restart the restartable sequences of every thread of this process.

use super::Errno;

const QUERY: i32 = 0;
const PRIVATE_EXPEDITED_RSEQ: i32 = 1 << 7;
const REGISTER_PRIVATE_EXPEDITED_RSEQ: i32 = 1 << 8;

fn membarrier(command: i32) -> Result<i32, Errno> {
    // SAFETY: membarrier takes no pointers.
    Errno::check(unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }).map(|result| result as i32)
}

/// Declares that this process will call [`restart_sequences`]. Needed once before it; a forked child has to do it again.
///
/// # Errors
/// `EINVAL` or `ENOSYS` on kernels before 5.10 or without the feature.
pub fn register() -> Result<(), Errno> {
    if membarrier(QUERY)? & REGISTER_PRIVATE_EXPEDITED_RSEQ == 0 {
        return Err(Errno(libc::EINVAL));
    }
    membarrier(REGISTER_PRIVATE_EXPEDITED_RSEQ).map(drop)
}

/// When this returns, every other thread of this process that was inside a restartable sequence has left it or will
/// continue at its abort handler (5.10). Costs an inter-processor interrupt to each CPU that runs one: a few microseconds.
///
/// # Errors
/// `EPERM` without [`register`].
pub fn restart_sequences() -> Result<(), Errno> {
    membarrier(PRIVATE_EXPEDITED_RSEQ).map(drop)
}
