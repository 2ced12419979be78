//! Events of the kernel as they happen to one thread, waited for like descriptors (`perf_event_open`, 2.6.31).

use super::{Errno, PAGE_SIZE};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// What happens.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// The thread comes by the tracepoint with that number.
    Tracepoint(u64),
    /// It has run for a nanosecond.
    TaskClock,
}

const CLOSE_ON_EXEC: libc::c_ulong = 8;
/// `PERF_EVENT_IOC_PERIOD`, `_ENABLE` and `_DISABLE`, on machines whose numbers of such calls have the direction in the two highest bits.
const SET_PERIOD: libc::Ioctl = 0x4008_2404;
const TURN_ON: libc::Ioctl = 0x2400;
const TURN_OFF: libc::Ioctl = 0x2401;
/// Where the kernel says how far it has written, and where it is told how far that was read.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// An event in one thread. The descriptor is readable when it has happened so often as was asked for, until that was
/// [taken](PerfEvent::take).
#[derive(Debug)]
pub(super) struct PerfEvent {
    event: OwnedFd,
    /// A page of numbers and one of records.
    ring: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone.
unsafe impl Send for PerfEvent {}

impl PerfEvent {
    const LEN: usize = 2 * PAGE_SIZE;

    /// Each time that this has happened `times` times in the thread `thread`, which may be one of the kernel's.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` without `CAP_PERFMON` (`CAP_SYS_ADMIN` before 5.8), `ESRCH` where there is no such thread, `ENOENT` where the
    /// kernel has no such events.
    pub fn new(kind: Kind, times: u64, thread: libc::pid_t) -> Result<PerfEvent, Errno> {
        let (kind, config) = match kind {
            Kind::Tracepoint(number) => (2, number),
            Kind::TaskClock => (1, 1),
        };
        let attributes = Attributes {
            kind,
            size: size_of::<Attributes>() as u32,
            config,
            sample_period: times,
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
        Ok(PerfEvent { event, ring: NonNull::new(ring.cast()).ok_or(Errno(libc::ENOMEM))? })
    }

    /// From now on each time that it has happened so many times (`PERF_EVENT_IOC_PERIOD`).
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

    /// From now on not any more.
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

    /// Whether it has happened since the last time.
    pub fn take(&self) -> bool {
        let head = self.word(HEAD).load(Ordering::Acquire);
        self.word(TAIL).swap(head, Ordering::Release) != head
    }
}

impl AsRawFd for PerfEvent {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, which nothing refers to any more.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), Self::LEN) };
    }
}
