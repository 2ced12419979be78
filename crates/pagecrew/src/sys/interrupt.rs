//! A system call that is cut short when the kernel has come by a tracepoint so many times in it: the event sends the thread a signal (`O_ASYNC`
//! of `perf_event_open`, 2.6.32).

use super::Errno;
use super::sched::thread_id;
use super::tracepoint::Tracepoint;
use std::os::fd::AsRawFd;
use std::ptr;

/// Nobody else is sent one but by a program that asked for it, and without a handler it does nothing.
const SIGNAL: libc::c_int = libc::SIGURG;
/// `struct f_owner_ex`, and what says that the owner is one thread.
#[repr(C)]
struct Owner {
    kind: libc::c_int,
    thread: libc::pid_t,
}
const SET_SIGNAL: libc::c_int = 10;
const SET_OWNER: libc::c_int = 15;
const OF_THREAD: libc::c_int = 0;

/// Cuts calls of one thread short, the one that has made this.
#[derive(Debug)]
pub struct Interrupter {
    tracepoint: Tracepoint,
}

extern "C" fn nothing(_: libc::c_int) {}

impl Interrupter {
    /// For the calling thread, which has to be a thread of its own for this: the signal is let through there. `number` is that of the
    /// tracepoint. This process has a handler for `SIGURG` from then on that does nothing.
    ///
    /// # Errors
    /// See [`Tracepoint::new`].
    pub fn new(number: u64) -> Result<Interrupter, Errno> {
        let thread = thread_id();
        let tracepoint = Tracepoint::new(number, thread)?;
        tracepoint.off()?;
        let owner = Owner { kind: OF_THREAD, thread };
        let event = tracepoint.as_raw_fd();
        // SAFETY: all zeroes is a valid value of each structure, and all of them outlive the calls; the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            // Without SA_RESTART: a call that is cut short says so.
            Errno::check(libc::sigaction(SIGNAL, &action, ptr::null_mut()).into())?;
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
            Errno::check(libc::fcntl(event, SET_OWNER, &raw const owner).into())?;
            Errno::check(libc::fcntl(event, SET_SIGNAL, SIGNAL).into())?;
            Errno::check(libc::fcntl(event, libc::F_SETFL, libc::O_ASYNC).into())?;
        }
        Ok(Interrupter { tracepoint })
    }

    /// What comes of `call`, which fails with `EINTR` once the kernel has come by `times` times in it.
    ///
    /// # Errors
    /// Those of setting that up; then nothing was called.
    pub fn after<T>(&self, times: u64, call: impl FnOnce() -> T) -> Result<T, Errno> {
        self.tracepoint.every(times.max(1))?;
        let result = call();
        self.tracepoint.off()?;
        // What was written down of it is of no use.
        self.tracepoint.take();
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::tracepoint;

    #[test]
    fn a_call_ends_when_the_kernel_has_come_by_often_enough() {
        let Ok(number) = tracepoint::number("syscalls/sys_enter_clock_nanosleep") else { return };
        std::thread::spawn(move || {
            let Ok(interrupter) = Interrupter::new(number) else { return };
            let sleep = |seconds, nanoseconds| {
                let time = libc::timespec { tv_sec: seconds, tv_nsec: nanoseconds };
                // SAFETY: the time outlives the call.
                unsafe { libc::nanosleep(&time, ptr::null_mut()) }
            };
            assert_eq!(interrupter.after(1, || sleep(1000, 0)), Ok(-1));
            assert_eq!(interrupter.after(2, || [sleep(0, 1000), sleep(1000, 0)]), Ok([0, -1]));
            // And nothing is cut short after that.
            assert_eq!(sleep(0, 5_000_000), 0);
        })
        .join()
        .unwrap();
    }
}
