//! The two kinds of helpers, and which operation is whose.
//!
//! A thread of the idle class that is preempted inside the kernel keeps the locks that it holds there for as long as others want the
//! CPU, and the program's next `mprotect` or `fork` waits for them. So each kind has its class for life: the ordinary one for work
//! inside the kernel, the idle one for writing to memory, which can be taken back from it at any instant.
//!
//! Nice 19 would not do for work inside the kernel. Its weight is 15 where others have 1024, so a helper that has run for one tick (4 ms)
//! waits for 270 ms of each thread on its CPU. Beside three hogs a CPU that come all of a sudden, the program's longest `mprotect` and
//! `fork` took 1.4 s and 0.9 s with helpers of the idle class, 1.9 s and 2.9 s with nice 19, 24 ms and 50 ms with nice 0, which
//! is the turn of the other threads (`hogs.rs`). What helpers take from others is bounded by [`contention`](super::contention)
//! instead.

use super::governor::MAX_HELPERS;
use super::operation::Operation;
use std::ops::Range;

/// What a helper does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Discards and populates: system calls. The ordinary class, as nice as the program.
    Kernel,
    /// Writes zeroes: user mode. The idle class.
    Zeroer,
}

/// Number of kinds.
pub(super) const KINDS: usize = 2;
/// Helpers of all kinds.
pub(super) const WORKERS: usize = KINDS * MAX_HELPERS;

impl Kind {
    pub const ALL: [Kind; KINDS] = [Kind::Kernel, Kind::Zeroer];

    /// The kind that does `operation`.
    pub fn of(operation: Operation) -> Kind {
        match operation {
            Operation::Discard | Operation::Populate => Kind::Kernel,
            Operation::Zero => Kind::Zeroer,
        }
    }

    /// A small number, different for each.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The numbers of this kind's helpers.
    pub fn workers(self) -> Range<usize> {
        let first = self.index() * MAX_HELPERS;
        first..first + MAX_HELPERS
    }

    /// The kind of helper `worker`.
    pub fn of_worker(worker: usize) -> Kind {
        Self::ALL[worker / MAX_HELPERS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_is_of_one_kind() {
        for worker in 0..WORKERS {
            let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| kind.workers().contains(&worker)).collect();
            assert_eq!(kinds, [Kind::of_worker(worker)]);
        }
        assert_eq!(Kind::ALL.map(|kind| kind.workers().len()), [MAX_HELPERS; KINDS]);
        assert!(Kind::ALL.iter().enumerate().all(|(index, kind)| kind.index() == index));
    }

    #[test]
    fn only_what_can_be_taken_back_is_done_in_the_idle_class() {
        use super::super::operation::Bypass;
        for operation in [Operation::Discard, Operation::Zero, Operation::Populate] {
            assert_eq!(Kind::of(operation) == Kind::Zeroer, operation.bypass() == Bypass::Revoke, "{operation:?}");
        }
    }
}
