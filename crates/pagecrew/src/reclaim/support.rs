//! Whether it can be done here.

use super::factor::PATH;
use super::group_files::PIECE;
use crate::sys::run_time::RunTime;
use crate::sys::{Errno, rights, sched, tracepoint, vmstat};
use std::fmt;
use std::time::Duration;

/// A thread of the kernel that has run for so long has something to do. A little is soon over, and nobody's demand; what is free lasts for
/// milliseconds.
pub(super) const AT_WORK: Duration = Duration::from_micros(50);
/// Where it is known to be at work, that is worth no more interrupts than these.
pub(super) const STILL_AT_WORK: Duration = Duration::from_millis(5);

/// Why it can't.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsupported {
    /// The kernel's threads can't be seen.
    NoThreads,
    /// Nor when they run.
    Events(Errno),
    /// The setting can't be changed.
    Setting(Errno),
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unsupported::NoThreads => {
                write!(
                    f,
                    "the kernel's reclaim threads (kswapd) can't be seen: this is for the machine, not for a container"
                )
            }
            Unsupported::Events(errno) => write!(
                f,
                "the kernel does not tell when its reclaim threads run (perf_event_open: {errno}); it takes root, and CONFIG_PERF_EVENTS"
            ),
            Unsupported::Setting(errno) => write!(f, "{PATH} can't be changed here: {errno}"),
        }
    }
}

impl std::error::Error for Unsupported {}

/// One of the kernel's threads.
#[derive(Debug)]
pub struct Thread {
    /// The number of its node.
    pub node: usize,
    /// Its own.
    pub number: libc::pid_t,
    /// When it is at work: what wakes it up is its node's low watermark.
    pub runs: RunTime,
}

impl Thread {
    /// Whether it is still there: it ends with its node.
    pub fn lives(&self) -> bool {
        sched::nice_of(self.number) != Err(Errno(libc::ESRCH))
    }
}

/// The kernel's threads, if it can be done. Changes nothing.
///
/// # Errors
/// See [`Unsupported`].
pub fn attempt() -> Result<Vec<Thread>, Unsupported> {
    let found = vmstat::kswapds();
    if found.is_empty() {
        return Err(Unsupported::NoThreads);
    }
    let thread = |(node, number)| Ok(Thread { node, number, runs: RunTime::new(number, AT_WORK)? });
    let threads = found.into_iter().map(thread).collect::<Result<_, Errno>>().map_err(Unsupported::Events)?;
    let opened = std::fs::OpenOptions::new().write(true).open(PATH);
    opened.map_err(|error| Unsupported::Setting(error.into()))?;
    Ok(threads)
}

/// The kernel's threads, for a [`Reclaimer`](super::Reclaimer).
#[derive(Debug)]
pub struct Threads(pub(super) Vec<Thread>);

impl Threads {
    /// Begins to listen when they run, which on some kernels takes `CAP_SYS_ADMIN` (before 5.8; Debian's 6.1), and gives that right up: to be
    /// called before there are other threads, which would keep it.
    ///
    /// # Errors
    /// See [`Unsupported`].
    pub fn listen() -> Result<Threads, Unsupported> {
        let threads = attempt()?;
        // What groups need is asked for while that is allowed; where there is none, they are told when they ask.
        let _ = tracepoint::number(PIECE);
        // Where it can't be given up, it was not needed more than before.
        let _ = rights::give_up_admin();
        Ok(Threads(threads))
    }
}
