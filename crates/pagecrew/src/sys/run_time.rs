//! Threads that run, noticed as they do: the kernel's clock of a thread, which only goes while that has a CPU (`perf_event_open`, 2.6.31).

use super::Errno;
use super::perf_event::{Kind, PerfEvent};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Says each time that a thread has run for a while, in one piece or in several. The descriptor is readable when it has, until that was
/// [taken](RunTime::take). A thread that sleeps costs nothing.
#[derive(Debug)]
pub struct RunTime {
    clock: PerfEvent,
    every: Duration,
}

impl RunTime {
    /// Each `every` that the thread `thread` runs, which may be one of the kernel's. No shorter than 10 us.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` without `CAP_PERFMON` (`CAP_SYS_ADMIN` before 5.8), `ESRCH` where there is no such thread, `ENOSYS` where the
    /// kernel has no such events (`CONFIG_PERF_EVENTS`).
    pub fn new(thread: libc::pid_t, every: Duration) -> Result<RunTime, Errno> {
        Ok(RunTime { clock: PerfEvent::new(Kind::TaskClock, every.as_nanos() as u64, thread)?, every })
    }

    /// From now on each so much.
    ///
    /// # Errors
    /// None that are known.
    pub fn every(&mut self, every: Duration) -> Result<(), Errno> {
        if every != self.every {
            self.clock.every(every.as_nanos() as u64)?;
            self.every = every;
        }
        Ok(())
    }

    /// Whether that has been so since the last time.
    pub fn take(&self) -> bool {
        self.clock.take()
    }
}

impl AsRawFd for RunTime {
    fn as_raw_fd(&self) -> RawFd {
        self.clock.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{clock, sched};

    fn run(time: Duration) {
        let until = clock::thread_cpu_ns() + time.as_nanos() as u64;
        while clock::thread_cpu_ns() < until {}
    }

    #[test]
    fn a_thread_that_runs_is_noticed_and_one_that_sleeps_is_not() {
        let long = Duration::from_millis(50);
        let Ok(mut time) = RunTime::new(sched::thread_id(), long) else { return };
        let readable = |time: &RunTime| {
            let mut poll = libc::pollfd { fd: time.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid entry.
            unsafe { libc::poll(&mut poll, 1, 0) == 1 }
        };
        std::thread::sleep(2 * long);
        assert!(!readable(&time) && !time.take());
        for _ in 0..2 {
            // A little longer: the event's clock starts a moment after the thread's own each time that the thread gets a CPU again.
            run(long * 6 / 5);
            assert!(readable(&time) && time.take() && !time.take());
        }
        time.every(Duration::from_micros(50)).unwrap();
        let begin = clock::now_ns();
        while !time.take() {
            assert!(clock::now_ns() < begin + 10_000_000_000, "it has run for long");
        }
        assert_eq!(RunTime::new(-5, long).map(drop), Err(Errno(libc::ESRCH)));
    }
}
