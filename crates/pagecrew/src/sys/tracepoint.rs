//! Tracepoints of the kernel, waited for like descriptors (`perf_event_open`, 2.6.32).

use super::Errno;
use super::perf_event::{Kind, PerfEvent};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// Where the file system of tracepoints is mounted, if it is (4.1, and before).
const MOUNTS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// The number that this kernel has given to the tracepoint `name`, such as `vmscan/mm_vmscan_lru_shrink_inactive`. Where their file system is mounted
/// nowhere, it is opened for this process alone (`fsopen`, 5.2). What was found once is known from then on, whatever rights are given up.
///
/// # Errors
/// `ENOENT` where there is no such tracepoint, `EPERM` and `EACCES` for users who may not look, `ENODEV` where the kernel has none.
pub fn number(name: &str) -> Result<u64, Errno> {
    static KNOWN: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&number) = known().get(name) {
        return Ok(number);
    }
    let number = read(name)?;
    known().insert(name.to_owned(), number);
    Ok(number)
}

fn read(name: &str) -> Result<u64, Errno> {
    let place = format!("events/{name}/id");
    let mut text = String::new();
    match MOUNTS.iter().find_map(|mount| File::open(format!("{mount}/{place}")).ok()) {
        Some(mut file) => file.read_to_string(&mut text),
        None => {
            let file = rustix::fs::openat(unattached()?, place, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            File::from(file).read_to_string(&mut text)
        }
    }?;
    text.trim().parse().map_err(|_| Errno(libc::EILSEQ))
}

fn unattached() -> Result<OwnedFd, Errno> {
    let context = rustix::mount::fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    Ok(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

/// A tracepoint as one thread comes by it. The descriptor is readable when it has, until that was [taken](Tracepoint::take).
///
/// The kernel takes tens of milliseconds to let go of one that nobody else uses.
#[derive(Debug)]
pub struct Tracepoint(PerfEvent);

impl Tracepoint {
    /// The tracepoint with that [`number`] in the thread `thread`, which may be one of the kernel's.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` without `CAP_PERFMON` (`CAP_SYS_ADMIN` before 5.8), `ESRCH` where there is no such thread, `ENOENT` where the
    /// kernel has no such events.
    pub fn new(number: u64, thread: libc::pid_t) -> Result<Tracepoint, Errno> {
        PerfEvent::new(Kind::Tracepoint(number), 1, thread).map(Tracepoint)
    }

    /// From now on the event happens once the thread has come by so many times, and so often again (`PERF_EVENT_IOC_PERIOD`).
    ///
    /// # Errors
    /// `EINVAL` for 0.
    pub fn every(&self, times: u64) -> Result<(), Errno> {
        self.0.every(times)
    }

    /// From now on it does not happen any more.
    ///
    /// # Errors
    /// None that are known.
    pub fn off(&self) -> Result<(), Errno> {
        self.0.off()
    }

    /// Whether the thread came by since the last time.
    pub fn take(&self) -> bool {
        self.0.take()
    }
}

impl AsRawFd for Tracepoint {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_comes_by_is_seen() {
        let Ok(number) = number("syscalls/sys_enter_getppid") else { return };
        // SAFETY: takes nothing and cannot fail.
        let thread = unsafe { libc::gettid() };
        let Ok(tracepoint) = Tracepoint::new(number, thread) else { return };
        let readable = || {
            let mut poll = libc::pollfd { fd: tracepoint.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid entry.
            unsafe { libc::poll(&mut poll, 1, 0) == 1 }
        };
        assert!(!readable() && !tracepoint.take());
        for _ in 0..3 {
            // More than the records that there is room for: it is still seen.
            for _ in 0..1000 {
                // SAFETY: takes nothing and cannot fail.
                unsafe { libc::syscall(libc::SYS_getppid) };
            }
            assert!(readable() && tracepoint.take() && !tracepoint.take());
        }
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        assert!(number("vmscan/no_such_tracepoint").is_err());
        assert!(Tracepoint::new(u64::MAX, 1).is_err());
    }
}
