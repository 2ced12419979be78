//! A system call that is cut short after a time: a timer of the calling thread sends it a signal (`timer_create` with `SIGEV_THREAD_ID`, 2.6.12).

use super::Errno;
use super::sched::thread_id;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

/// Nobody else is sent one by anybody but a program that asked for it, and without a handler it does nothing.
const SIGNAL: libc::c_int = libc::SIGURG;
/// Until the call is over, the signal comes again and again: the first one may have come before the call had begun.
const AGAIN: Duration = Duration::from_millis(1);

/// Cuts calls of one thread short, the one that has made this.
#[derive(Debug)]
pub struct Interrupter {
    timer: libc::timer_t,
}

extern "C" fn nothing(_: libc::c_int) {}

impl Interrupter {
    /// For the calling thread, which has to be a thread of its own for this: the signal is let through there. This process has a handler for
    /// `SIGURG` from then on that does nothing.
    ///
    /// # Errors
    /// `EAGAIN` where the kernel has no room for a timer.
    pub fn new() -> Result<Interrupter, Errno> {
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
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = SIGNAL;
            event.sigev_notify_thread_id = thread_id();
            let mut timer = MaybeUninit::uninit();
            Errno::check(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, timer.as_mut_ptr()).into())?;
            Ok(Interrupter { timer: timer.assume_init() })
        }
    }

    /// What comes of `call`, which fails with `EINTR` if it takes longer than `time`.
    pub fn within<T>(&mut self, time: Duration, call: impl FnOnce() -> T) -> T {
        // Zero would be no time at all.
        self.set(time.max(Duration::from_nanos(1)));
        let result = call();
        self.set(Duration::ZERO);
        result
    }

    fn set(&mut self, time: Duration) {
        let spec = |time: Duration| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: time.subsec_nanos() as libc::c_long,
        };
        let times = libc::itimerspec { it_value: spec(time), it_interval: spec(AGAIN) };
        // SAFETY: the timer is this value's own, and the times outlive the call.
        unsafe { libc::timer_settime(self.timer, 0, &times, ptr::null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: the timer is this value's own, and used no more.
        unsafe { libc::timer_delete(self.timer) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::now_ns;

    #[test]
    fn a_call_ends_when_its_time_is_over() {
        std::thread::spawn(|| {
            let mut interrupter = Interrupter::new().unwrap();
            for time in [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(20)] {
                let begin = now_ns();
                let result = interrupter.within(time, || {
                    // SAFETY: waits for a signal.
                    unsafe { libc::pause() };
                    Errno::last()
                });
                let passed = Duration::from_nanos(now_ns() - begin);
                assert_eq!(result, Errno(libc::EINTR));
                assert!(passed >= time && passed < Duration::from_secs(10), "{passed:?}");
            }
            // And nothing is cut short after that.
            std::thread::sleep(Duration::from_millis(5));
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            // SAFETY: the time outlives the call.
            assert_eq!(unsafe { libc::nanosleep(&time, &mut time) }, 0);
        })
        .join()
        .unwrap();
    }
}
