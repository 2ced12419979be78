//! Thin, typed access to the kernel interfaces that Pagecrew uses: one file an interface, no policy.
//!
//! Every call returns the kernel's own error as [`Errno`], and every item says the kernel version that brought it. What a process
//! may call on its last stack or at its very end ([`stop`], [`memory`]) allocates nothing.

pub mod activity;
#[cfg(all(test, not(loom)))]
pub(crate) mod alone;
pub mod cgroup;
pub mod child;
pub mod clock;
pub mod closing;
#[cfg(not(loom))]
pub mod cpu_stack;
pub mod futex;
pub mod group_memory;
pub mod huge_page;
pub mod interrupt;
pub mod maps;
pub mod membarrier;
pub mod memory;
pub mod mount;
pub mod nodes;
pub mod numa;
pub mod numa_maps;
pub mod page_cache;
mod page_size;
pub mod pagemap;
mod perf_event;
pub mod process;
pub mod process_list;
pub mod procfs;
pub mod psi;
pub mod rights;
pub mod rseq;
pub mod run_time;
pub mod sched;
pub mod seqpacket;
pub mod shared_file;
pub mod smaps;
pub mod stop;
#[cfg(test)]
pub(crate) mod stop_on_drop;
pub mod stranger;
pub mod thread;
pub mod topology;
pub mod tracepoint;
pub mod userfaultfd;
pub mod vmstat;
pub mod words;
pub mod zero;

// Sequences are not modelled by loom; how a stack is had alone is.
#[cfg(loom)]
mod cpu_stack {
    const CLOSED: u32 = u32::MAX;
    mod head;
}

pub use page_size::{PageSizeError, check_page_size};
use std::fmt;

/// An error number as the kernel returned it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's `errno`.
    pub fn last() -> Errno {
        // SAFETY: glibc's errno location is valid for the calling thread as long as it runs.
        Errno(unsafe { *libc::__errno_location() })
    }

    /// Sets the calling thread's `errno`; a function that stands in for a libc function uses it to report or to restore.
    pub fn set(self) {
        // SAFETY: as in `last`.
        unsafe { *libc::__errno_location() = self.0 }
    }

    /// The result of a system call wrapper that returns -1 on failure.
    pub(crate) fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
        if result == -1 { Err(Errno::last()) } else { Ok(result) }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl std::error::Error for Errno {}

impl From<std::io::Error> for Errno {
    /// `EIO` for an error that didn't come from the kernel.
    fn from(error: std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Errno {
        Errno(error.raw_os_error())
    }
}

/// Size of a base page on x86-64 and on the aarch64 kernels that Pagecrew supports, in bytes. [`check_page_size`] says whether it is so here.
pub const PAGE_SIZE: usize = 4096;

/// Size of a huge page (a page-middle-directory entry) with 4 KiB base pages, in bytes.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// `value` rounded up to a multiple of `align`, a power of two; `None` if that overflows.
pub fn round_up(value: usize, align: usize) -> Option<usize> {
    debug_assert!(align.is_power_of_two());
    Some(value.checked_add(align - 1)? & !(align - 1))
}
