//! Background threads that no signal ever reaches.

use super::Errno;
use std::thread::JoinHandle;

/// Stack of a background thread in bytes: they call nothing deep.
pub const STACK_SIZE: usize = 256 << 10;

/// Blocks every signal in the calling thread and returns the mask that was in force.
fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are valid; the calls cannot fail with these arguments.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

/// Starts a thread called `name` (15 bytes are visible) with every signal blocked from its first instruction on.
///
/// # Errors
/// `EAGAIN` at `RLIMIT_NPROC` or the cgroup's `pids.max`, `ENOMEM` without room for its stack.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Errno> {
    let before = block_signals();
    let result = std::thread::Builder::new().name(name).stack_size(STACK_SIZE).spawn(body);
    // SAFETY: restores the mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    result.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_background_thread_blocks_signals_and_its_parent_does_not() {
        let blocked = || {
            // SAFETY: reads the calling thread's mask into a valid set.
            unsafe {
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut set);
                libc::sigismember(&set, libc::SIGUSR1) == 1
            }
        };
        let before = blocked();
        spawn("pagecrew/test".into(), move || assert!(blocked())).unwrap().join().unwrap();
        assert_eq!(blocked(), before);
    }
}
