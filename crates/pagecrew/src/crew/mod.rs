//! Background workers: divisible jobs over ranges of memory, helper threads, and the policy that says how many of them there are and
//! how much each takes at a time.
//!
//! **Life of a job.** A thread of the program puts an [`Operation`] on a range on the board and, if it waits for the end, takes
//! chunks of it itself until none is left: helpers only add, so progress never depends on them. A helper that finds an
//! open job enters it, takes chunks, and leaves when none is left; whoever leaves last finishes the job, which is when the
//! [`Employer`] hears of it. A waiting caller that runs out of chunks does not wait for a helper that holds one and isn't
//! running: what can be done twice it does again, what can't it takes back (see [`crate::sys::zero`]).
//!
//! **Life of a helper.** It is started by the first job that is worth it, blocks every signal, works only while there is a CPU that
//! nobody else wants (`contention`), prefers jobs of its own NUMA node, and ends when it has had nothing to do for 30 s. It is a
//! thread of the process like any other, so the process's CPU cgroup, cpuset, affinity and limits bind it. It takes no lock of the
//! process that anybody else waits for.
//!
//! There are two kinds (`kind`). One that discards and populates holds locks of the kernel meanwhile: it is in the ordinary class and
//! stays there. One that writes zeroes works in the class SCHED_IDLE and sleeps in the ordinary
//! class; where the user may not go back to that, it ends after 50 ms.
//!
//! **The watcher** is one thread in the ordinary class beside them, for what is little work and can't wait: it takes over what helpers
//! have finished and asks the [`Employer`] to look at what it keeps. It ends like a helper.
//!
//! Source: parallel free of huge memory (Aaron Lu, 2017), whose review asked who pays for the workers, who tunes them, and what
//! happens when they don't run.

pub(crate) mod ahead;
mod boost;
pub(crate) mod eventcount;
mod governor;
mod job;
#[cfg(not(loom))]
mod kind;
mod left;
pub(crate) mod look;
mod operation;
#[cfg(all(test, loom))]
mod publication;
#[cfg(not(loom))]
mod quota;
mod sync;
// Under loom only the protocols are built: the rest of the crew is threads and system calls.
#[cfg(not(loom))]
mod board;
#[cfg(not(loom))]
mod contention;
#[cfg(not(loom))]
mod cpus;
#[cfg(not(loom))]
#[expect(clippy::module_inception, reason = "the crew itself is what the module is named after")]
mod crew;
#[cfg(not(loom))]
mod employer;
#[cfg(not(loom))]
mod helper;
#[cfg(all(test, not(loom)))]
mod hogs;
#[cfg(not(loom))]
mod threads;
#[cfg(not(loom))]
mod watcher;
pub mod zero;

#[cfg(not(loom))]
pub use crew::{Crew, ForkGuard};
#[cfg(not(loom))]
pub use employer::{Employer, Idle, Task, Tick};

pub use governor::{Demand, Means, chunk_bytes, helpers_wanted};
pub use operation::Operation;
