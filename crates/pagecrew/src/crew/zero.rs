//! Zeroing with the fastest method that this CPU has, which is found out by the first large ranges: each method has its turns with them.

use crate::sys::clock;
use crate::sys::memory::Range;
use crate::sys::zero::{self, Method};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use crate::sys::zero::revocable;

/// Trials of each method before the fastest is settled on.
const TRIALS_EACH: u64 = 3;
/// A trial writes at least this much, since in less the caches decide.
const TRIAL_BYTES: usize = 1 << 20;

/// What is known of the methods. All of the process has one of these; each thread that zeroes adds to it.
struct Trials {
    begun: AtomicU64,
    /// The best rate of each method so far, in bytes a millisecond; 0 before its first trial ended.
    rate: [AtomicU64; Method::EVERY.len()],
    /// The settled method's number + 1; 0 while trials go on.
    settled: AtomicU32,
}

static TRIALS: Trials = Trials::new();

impl Trials {
    const fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            rate: [const { AtomicU64::new(0) }; Method::EVERY.len()],
            settled: AtomicU32::new(0),
        }
    }

    /// The method for the next large range, and whether that is a trial: while there are trials left, each in turn; afterwards the fastest.
    /// A trial may be revoked, or still go on in another thread; so a method without a rate is tried until it has one.
    fn next(&self, len: usize) -> (Method, bool) {
        if let Some(method) = self.settled() {
            return (method, false);
        }
        if len < TRIAL_BYTES {
            return (Method::Cached, false);
        }
        let count = Method::all().count() as u64;
        let trial = self.begun.fetch_add(1, Ordering::Relaxed);
        if trial < count * TRIALS_EACH {
            return (Method::all().nth((trial % count) as usize).unwrap_or(Method::Cached), true);
        }
        let rate = |method: Method| self.rate[method as usize].load(Ordering::Relaxed);
        if let Some(unknown) = Method::all().find(|&method| rate(method) == 0) {
            return (unknown, true);
        }
        let fastest = Method::all().max_by_key(|&method| rate(method)).unwrap_or(Method::Cached);
        self.settled.store(fastest as u32 + 1, Ordering::Relaxed);
        (fastest, false)
    }

    /// A trial of `method` zeroed `len` bytes in `took` nanoseconds.
    fn tried(&self, method: Method, len: usize, took: u64) {
        let rate = len as u64 * 1_000_000 / took.max(1);
        self.rate[method as usize].fetch_max(rate.max(1), Ordering::Relaxed);
    }

    fn settled(&self) -> Option<Method> {
        self.settled.load(Ordering::Relaxed).checked_sub(1).map(|index| Method::EVERY[index as usize])
    }
}

/// Does `zeroing` of `len` bytes with the method that is next, and notes how long that took if it is a trial. Returns what `zeroing`
/// does: whether all was zeroed.
fn with_next_method(len: usize, zeroing: impl FnOnce(Method) -> bool) -> bool {
    let (method, trial) = TRIALS.next(len);
    if !trial {
        return zeroing(method);
    }
    let begin = clock::now_ns();
    let whole = zeroing(method);
    if whole {
        TRIALS.tried(method, len, clock::now_ns() - begin);
    }
    whole
}

/// The method that has been settled on; `None` while trials go on.
pub fn settled_method() -> Option<Method> {
    TRIALS.settled()
}

/// How the zeroed memory will be used, which decides whether it should pass through the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Soon and as a whole small enough for a cache: cached stores.
    Soon,
    /// Large or later: the fastest method.
    Later,
}

/// Zeroes `range`, whose bounds are page aligned.
///
/// # Safety
/// The range is mapped read-write and nobody else uses it.
pub unsafe fn zero(range: Range, intent: Use) {
    match intent {
        // The C library knows what is fastest through this processor's caches.
        // SAFETY: by the function's own contract.
        Use::Soon => unsafe { std::ptr::write_bytes(range.start as *mut u8, 0, range.len) },
        Use::Later => {
            with_next_method(range.len, |method| {
                // SAFETY: by the function's own contract; `Trials::next` chooses among those that there are.
                unsafe { zero::zero(range, method) };
                true
            });
        }
    }
}

/// Zeroes `range`, which will be used later, until `revoked` is not 0. Returns whether all of it was zeroed.
///
/// # Safety
/// As [`crate::sys::zero::zero_unless`], but for the method.
pub unsafe fn zero_unless(range: Range, revoked: &AtomicU32) -> bool {
    // SAFETY: by the function's own contract; `Trials::next` chooses among those that there are.
    with_next_method(range.len, |method| unsafe { zero::zero_unless(range, method, revoked) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};

    #[test]
    fn what_was_never_measured_is_not_settled_on() {
        let trials = Trials::new();
        let count = Method::all().count() as u64;
        for _ in 0..count * TRIALS_EACH {
            assert!(trials.next(TRIAL_BYTES).1);
        }
        // All trials were begun and none came to its end: each method is tried again.
        for _ in 0..count {
            let (method, trial) = trials.next(TRIAL_BYTES);
            assert!(trial && method.available(), "{method:?}");
            let took = if method == Method::Cached { 1_000 } else { 2_000 };
            trials.tried(method, TRIAL_BYTES, took);
        }
        assert_eq!(trials.settled(), None);
        assert_eq!(trials.next(TRIAL_BYTES), (Method::Cached, false));
        assert_eq!(trials.settled(), Some(Method::Cached));
    }

    #[test]
    fn small_ranges_are_no_trials() {
        let trials = Trials::new();
        for _ in 0..100 {
            assert_eq!(trials.next(TRIAL_BYTES - 1), (Method::Cached, false));
        }
        assert_eq!(trials.settled(), None);
    }

    #[test]
    fn every_range_is_zeroed_and_one_method_is_settled_on() {
        const LEN: usize = 2 * TRIAL_BYTES;
        let range = Range { start: map(LEN, Protection::ReadWrite).unwrap(), len: LEN };
        // SAFETY: a fresh mapping that only this test knows.
        let bytes = unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, LEN) };
        // Each method's turns, one more for each whose trials go on in other tests' threads, and the one that settles.
        for _ in 0..=Method::all().count() as u64 * (TRIALS_EACH + 1) {
            bytes.fill(0xa5);
            // SAFETY: the range is this test's.
            unsafe { zero(range, Use::Later) };
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
        let settled = settled_method().unwrap();
        assert!(settled.available(), "{settled:?}");
        assert_eq!(TRIALS.next(LEN), (settled, false));
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }
}
