//! Whether it can be done here.

use crate::sys::vmstat;
use crate::sys::{Errno, tracepoint};
use std::fmt;

/// Where a thread of the kernel comes by when its node's free memory has come to the low watermark.
const WAKES: &str = "vmscan/mm_vmscan_kswapd_wake";

/// Why it can't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unsupported {
    /// The kernel's threads can't be seen.
    NoThreads,
    /// Nor when they wake up.
    Events(Errno),
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unsupported::NoThreads => {
                write!(f, "the kernel's reclaim threads (kswapd) can't be seen: this is for the machine, not for a container")
            }
            Unsupported::Events(errno) => write!(
                f,
                "the kernel does not tell when its reclaim wakes up (tracepoint {WAKES}: {errno}); it takes root, and CONFIG_PERF_EVENTS \
                 with tracepoints"
            ),
        }
    }
}

impl std::error::Error for Unsupported {}

/// The number of the tracepoint and the threads, node by node.
///
/// # Errors
/// See [`Unsupported`].
pub fn check() -> Result<(u64, Vec<(usize, libc::pid_t)>), Unsupported> {
    let threads = vmstat::kswapds();
    if threads.is_empty() {
        return Err(Unsupported::NoThreads);
    }
    Ok((tracepoint::number(WAKES).map_err(Unsupported::Events)?, threads))
}
