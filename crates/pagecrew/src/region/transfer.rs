//! Free huge pages that are moved to where a request needs them.
//!
//! In a mixture of sizes, what is free rarely lies where the next span fits. Giving it back and having the kernel zero another huge page
//! elsewhere costs 90 microseconds; moving it by the page tables costs one to ten (`UFFDIO_MOVE`), and the program has no more memory
//! than before. Unlike `mremap`, that cuts no mapping in pieces.
//!
//! **Life of the descriptor.** It is opened by the first thread that has something to move, and stays as long as the region. Where the kernel, a filter or the
//! program is against it, nothing is moved from then on. A forked child opens its own.

use crate::sys::clock;
use crate::sys::memory::Range;
use crate::sys::userfaultfd::{MoveError, Userfaultfd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

const UNTRIED: i32 = -1;
const OPENING: i32 = -2;
const OFF: i32 = -3;

/// After so many moves in a row that failed or were not worth it, there are none for a while.
const FUTILE_MOST: u32 = 8;
const REST_NS: u64 = 100_000_000;
/// What a move of one huge page may take on average: the kernel zeroes it in that time. One that the kernel has as small pages takes longer.
const WORTH_NS: u64 = 60_000;

/// Whether pages can be moved, and by which descriptor.
pub(super) struct Transfers {
    descriptor: AtomicI32,
    futile: AtomicU32,
    rests_until_ns: AtomicU64,
}

/// What became of pages that were to be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// They are at the other place.
    Moved,
    /// They are where they were.
    Stayed,
    /// Some are here, some there.
    Torn,
}

impl Transfers {
    pub fn new() -> Transfers {
        Transfers { descriptor: AtomicI32::new(UNTRIED), futile: AtomicU32::new(0), rests_until_ns: AtomicU64::new(0) }
    }

    /// Whether pages of `ranges` can be moved now. Asked first where there is something to move.
    pub fn ready(&self, ranges: impl Iterator<Item = Range>) -> bool {
        match self.descriptor.load(Ordering::Acquire) {
            OFF | OPENING => false,
            UNTRIED => self.open(ranges),
            _ => {
                let rests_until = self.rests_until_ns.load(Ordering::Relaxed);
                rests_until == 0 || clock::now_ns() >= rests_until
            }
        }
    }

    #[cold]
    fn open(&self, mut ranges: impl Iterator<Item = Range>) -> bool {
        if self.descriptor.compare_exchange(UNTRIED, OPENING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        let made = Userfaultfd::new().ok().filter(|made| ranges.all(|range| made.register(range).is_ok()));
        let now = made.map_or(OFF, |made| made.0);
        // Whoever was against it meanwhile has the last word.
        let opened = self.descriptor.compare_exchange(OPENING, now, Ordering::Release, Ordering::Relaxed).is_ok();
        opened && now != OFF
    }

    fn get(&self) -> Option<Userfaultfd> {
        Some(self.descriptor.load(Ordering::Acquire)).filter(|&number| number >= 0).map(Userfaultfd)
    }

    /// Nothing is moved from now on, and `ranges` are as any other memory.
    pub fn stop(&self, ranges: impl Iterator<Item = Range>) {
        let before = self.get();
        self.descriptor.store(OFF, Ordering::Release);
        if let Some(descriptor) = before {
            ranges.for_each(|range| descriptor.unregister(range));
        }
    }

    /// Has pages move to and from `range`, as its neighbours, of whose mapping it becomes a part.
    pub fn adopt(&self, range: Range) {
        if let Some(descriptor) = self.get() {
            let _ = descriptor.register(range);
        }
    }

    /// Makes `range` as any other memory, until [`Transfers::adopt`]. `mremap` of more than one mapping fails in the middle where the second
    /// is registered, or the first (6.17).
    pub fn disown(&self, range: Range) {
        if let Some(descriptor) = self.get() {
            descriptor.unregister(range);
        }
    }

    /// Moves the pages of `from` to `to`.
    ///
    /// # Safety
    /// Nobody uses either range meanwhile, and nobody counts on what is in either.
    pub unsafe fn carry_out(&self, from: Range, to: usize) -> Outcome {
        let Some(descriptor) = self.get() else { return Outcome::Stayed };
        let begin = clock::now_ns();
        // SAFETY: by the function's own contract.
        let result = unsafe { descriptor.move_pages(from, to) };
        let took = clock::now_ns().saturating_sub(begin);
        let huge_pages = (from.len / crate::sys::HUGE_PAGE_SIZE).max(1) as u64;
        self.note(result.is_ok() && took <= huge_pages * WORTH_NS, begin + took);
        match result {
            Ok(()) => Outcome::Moved,
            Err(MoveError { moved: 0, errno }) => {
                if matches!(errno.0, libc::EBADF | libc::ENOTTY | libc::EPERM | libc::ENOSYS) {
                    self.descriptor.store(OFF, Ordering::Release);
                }
                Outcome::Stayed
            }
            Err(_) => Outcome::Torn,
        }
    }

    fn note(&self, worth_it: bool, now: u64) {
        if worth_it {
            if self.futile.load(Ordering::Relaxed) != 0 {
                self.futile.store(0, Ordering::Relaxed);
            }
        } else if self.futile.fetch_add(1, Ordering::Relaxed) + 1 >= FUTILE_MOST {
            self.futile.store(0, Ordering::Relaxed);
            self.rests_until_ns.store(now + REST_NS, Ordering::Relaxed);
        }
    }

    /// In a forked child, to whose memory the parent's descriptor is no key.
    pub fn after_fork(&self) {
        if self.descriptor.load(Ordering::Relaxed) != OFF {
            self.descriptor.store(UNTRIED, Ordering::Relaxed);
        }
        self.rests_until_ns.store(0, Ordering::Relaxed);
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        if let Some(descriptor) = self.get() {
            descriptor.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{self, Protection};
    use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};

    fn two_huge_pages() -> [Range; 2] {
        let start = memory::map(3 * HUGE_PAGE_SIZE, Protection::ReadWrite).unwrap().next_multiple_of(HUGE_PAGE_SIZE);
        [start, start + HUGE_PAGE_SIZE].map(|start| Range { start, len: HUGE_PAGE_SIZE })
    }

    #[test]
    fn a_program_that_closes_the_descriptor_has_nothing_moved_any_more() {
        let transfers = Transfers::new();
        let ranges = two_huge_pages();
        if !transfers.ready(ranges.into_iter()) {
            return;
        }
        let [from, to] = ranges;
        // SAFETY: the mapping is this test's own.
        unsafe {
            for page in (0..HUGE_PAGE_SIZE).step_by(PAGE_SIZE) {
                ((from.start + page) as *mut u8).write(5);
            }
            assert_eq!(transfers.carry_out(from, to.start), Outcome::Moved);
            assert_eq!((to.start as *const u8).read(), 5);
            libc::close(transfers.descriptor.load(Ordering::Relaxed));
            assert_eq!(transfers.carry_out(to, from.start), Outcome::Stayed);
        }
        assert!(!transfers.ready(ranges.into_iter()));
        transfers.after_fork();
        assert!(!transfers.ready(ranges.into_iter()), "a child does not begin with it again");
    }

    #[test]
    fn what_fails_again_and_again_rests() {
        let transfers = Transfers::new();
        let ranges = two_huge_pages();
        if !transfers.ready(ranges.into_iter()) {
            return;
        }
        for _ in 0..FUTILE_MOST {
            assert!(transfers.ready(ranges.into_iter()));
            // SAFETY: the mapping is this test's own.
            assert_eq!(unsafe { transfers.carry_out(ranges[0], ranges[1].start) }, Outcome::Stayed, "nothing there");
        }
        assert!(!transfers.ready(ranges.into_iter()));
        transfers.stop(ranges.into_iter());
        assert!(!transfers.ready(ranges.into_iter()));
    }
}
