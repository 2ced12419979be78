//! Tracepoints of the kernel, waited for like descriptors (`perf_event_open`, 2.6.32).

use super::{Errno, PAGE_SIZE};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Where the file system of tracepoints is mounted, if it is (4.1, and before).
const MOUNTS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// The number that this kernel has given to the tracepoint `name`, such as `vmscan/mm_vmscan_kswapd_wake`. Where their file system is mounted
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

/// `struct perf_event_attr` as far as the first kernels had it.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

const TRACEPOINT: u32 = 2;
const CLOSE_ON_EXEC: libc::c_ulong = 8;
/// `PERF_EVENT_IOC_PERIOD`, `_ENABLE` and `_DISABLE`, on machines whose numbers of such calls have the direction in the two highest bits.
const SET_PERIOD: libc::Ioctl = 0x4008_2404;
const TURN_ON: libc::Ioctl = 0x2400;
const TURN_OFF: libc::Ioctl = 0x2401;
/// Where the kernel says how far it has written, and where it is told how far that was read.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// A tracepoint as one thread comes by it. The descriptor is readable when it has, until that was [taken](Tracepoint::take).
#[derive(Debug)]
pub struct Tracepoint {
    event: OwnedFd,
    /// A page of numbers and one of records.
    ring: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for Tracepoint {}

impl Tracepoint {
    const LEN: usize = 2 * PAGE_SIZE;

    /// The tracepoint with that [`number`] in the thread `thread`, which may be one of the kernel's.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` without `CAP_PERFMON` (`CAP_SYS_ADMIN` before 5.8), `ESRCH` where there is no such thread, `ENOENT` where the
    /// kernel has no such events.
    pub fn new(number: u64, thread: libc::pid_t) -> Result<Tracepoint, Errno> {
        let attributes = Attributes {
            kind: TRACEPOINT,
            size: size_of::<Attributes>() as u32,
            config: number,
            sample_period: 1,
            wakeup_events: 1,
            ..Attributes::default()
        };
        // SAFETY: the attributes have the length that they say; the descriptor that comes back is nobody else's.
        let event = unsafe {
            let fd = Errno::check(libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                thread,
                -1 as libc::c_int,
                -1 as libc::c_int,
                CLOSE_ON_EXEC,
            ))?;
            OwnedFd::from_raw_fd(fd as RawFd)
        };
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping, at no address in particular.
        let ring = unsafe { libc::mmap(std::ptr::null_mut(), Self::LEN, rights, kind, event.as_raw_fd(), 0) };
        if ring == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        Ok(Tracepoint { event, ring: NonNull::new(ring.cast()).ok_or(Errno(libc::ENOMEM))? })
    }

    /// From now on the event happens once the thread has come by so many times, and so often again (`PERF_EVENT_IOC_PERIOD`).
    ///
    /// # Errors
    /// `EINVAL` for 0.
    pub fn every(&self, times: u64) -> Result<(), Errno> {
        self.off()?;
        // SAFETY: the kernel reads a number of eight bytes, which outlives the call.
        Errno::check(unsafe { libc::ioctl(self.event.as_raw_fd(), SET_PERIOD, &raw const times) }.into())?;
        // The kernel begins to count when the event is turned on.
        // SAFETY: no memory is involved.
        Errno::check(unsafe { libc::ioctl(self.event.as_raw_fd(), TURN_ON, 0) }.into()).map(drop)
    }

    /// From now on it does not happen any more.
    ///
    /// # Errors
    /// None that are known.
    pub fn off(&self) -> Result<(), Errno> {
        // SAFETY: no memory is involved.
        Errno::check(unsafe { libc::ioctl(self.event.as_raw_fd(), TURN_OFF, 0) }.into()).map(drop)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the first page of the mapping has numbers of eight bytes at these places, for as long as this is. Both sides use
        // them one at a time.
        unsafe { AtomicU64::from_ptr(self.ring.as_ptr().add(offset).cast()) }
    }

    /// Whether the thread came by since the last time.
    pub fn take(&self) -> bool {
        let head = self.word(HEAD).load(Ordering::Acquire);
        self.word(TAIL).swap(head, Ordering::Release) != head
    }
}

impl AsRawFd for Tracepoint {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl Drop for Tracepoint {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, which nothing refers to any more.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), Self::LEN) };
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
