//! What can be done to a range of memory in chunks, and what a waiting caller may do about a chunk that a stopped helper holds.

use super::governor::Grain;
use crate::crew::zero::{self, Use};
use crate::sys::Errno;
use crate::sys::memory::{self, Advice, Range};
use std::sync::atomic::AtomicU32;

/// An operation on memory that can be cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Give the pages back to the kernel. May be done twice, as long as nobody uses the range until everybody has let go.
    Discard,
    /// Write zeroes. A chunk can be taken back from whoever is at it.
    Zero,
    /// Back the range with writable pages (`MADV_POPULATE_WRITE`, or a touch where the kernel is older than 5.14). Where there are none
    /// to be had, it stays as it is.
    Populate,
}

/// Number of operations.
pub(super) const OPERATIONS: usize = 3;

/// How a waiting caller gets past a chunk that a helper holds without running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bypass {
    /// Do it again.
    Redo,
    /// Revoke it, then do it.
    Revoke,
    /// Nothing but to wait for it.
    Wait,
}

impl Operation {
    /// A small number, different for each.
    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// What a chunk costs.
    pub(super) fn grain(self) -> Grain {
        match self {
            Operation::Discard | Operation::Populate => Grain::PageTable,
            Operation::Zero => Grain::Fine,
        }
    }

    pub(super) fn bypass(self) -> Bypass {
        match self {
            Operation::Discard => Bypass::Redo,
            Operation::Zero => Bypass::Revoke,
            Operation::Populate => Bypass::Wait,
        }
    }

    /// Performs the operation on `range`; with `revoked`, until that is set. Returns whether it was done whole.
    ///
    /// # Safety
    /// The range is mapped read-write. For [`Operation::Discard`] and [`Operation::Zero`] nobody else uses it, with `revoked` until
    /// that was set and the sequences of this thread were restarted.
    pub(super) unsafe fn perform(self, range: Range, revoked: Option<&AtomicU32>) -> bool {
        // SAFETY: by the function's own contract.
        unsafe {
            match self {
                // The range is ours and mapped, so the kernel has no reason to refuse; should it, the pages merely stay.
                Operation::Discard => {
                    let _ = memory::discard(range);
                    true
                }
                Operation::Zero => match revoked {
                    Some(flag) if zero::revocable() => zero::zero_unless(range, flag),
                    _ => {
                        zero::zero(range, Use::Later);
                        true
                    }
                },
                Operation::Populate => {
                    // Of every other error the pages themselves are the sign: touching what can't be had would end the process.
                    if memory::advise(range, Advice::PopulateWrite) == Err(Errno(libc::EINVAL)) {
                        touch(range);
                    }
                    true
                }
            }
        }
    }
}

/// Writes to each page of `range` without changing it.
///
/// # Safety
/// The range is mapped read-write.
unsafe fn touch(range: Range) {
    for address in (range.start..range.end()).step_by(crate::sys::PAGE_SIZE) {
        // SAFETY: the address is in a mapped range, and adding 0 atomically keeps what another thread may write.
        unsafe { std::sync::atomic::AtomicU8::from_ptr(address as *mut u8) }
            .fetch_add(0, std::sync::atomic::Ordering::Relaxed);
    }
}
