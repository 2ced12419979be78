//! Zeroing with the fastest method that this CPU has, which is found out by the first large ranges: each method has its turns with them.

use crate::sys::clock;
use crate::sys::memory::Range;
use crate::sys::zero::{self, Method};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub use crate::sys::zero::revocable;

/// Trials of each method before the fastest is settled on.
const TRIALS: u64 = 3;
/// A trial writes at least this much, since in less the caches decide.
const TRIAL_BYTES: usize = 1 << 20;

static TRIALS_BEGUN: AtomicU64 = AtomicU64::new(0);
/// The best rate of each method so far, in bytes a millisecond.
static RATE: [AtomicU64; Method::EVERY.len()] = [const { AtomicU64::new(0) }; Method::EVERY.len()];
/// The settled method's number + 1; 0 while trials go on.
static SETTLED: AtomicU32 = AtomicU32::new(0);

/// The method for the next large range, and whether that is a trial: while there are trials left, each in turn; afterwards the fastest.
fn next_method(len: usize) -> (Method, bool) {
    match SETTLED.load(Ordering::Relaxed) {
        0 if len >= TRIAL_BYTES => {}
        0 => return (Method::Cached, false),
        settled => return (Method::EVERY[settled as usize - 1], false),
    }
    let count = Method::all().count() as u64;
    let trial = TRIALS_BEGUN.fetch_add(1, Ordering::Relaxed);
    if trial < count * TRIALS {
        return (Method::all().nth((trial % count) as usize).unwrap_or(Method::Cached), true);
    }
    let fastest = (0..Method::EVERY.len()).max_by_key(|&index| RATE[index].load(Ordering::Relaxed)).unwrap_or(0);
    SETTLED.store(fastest as u32 + 1, Ordering::Relaxed);
    (Method::EVERY[fastest], false)
}

/// Does `zeroing` of `len` bytes with the method that is next, and notes how long that took if it is a trial. Returns what `zeroing`
/// does: whether all was zeroed.
fn with_next_method(len: usize, zeroing: impl FnOnce(Method) -> bool) -> bool {
    let (method, trial) = next_method(len);
    if !trial {
        return zeroing(method);
    }
    let begin = clock::now_ns();
    let whole = zeroing(method);
    if whole {
        let took = (clock::now_ns() - begin).max(1);
        RATE[method as usize].fetch_max(len as u64 * 1_000_000 / took, Ordering::Relaxed);
    }
    whole
}

/// The method that has been settled on; `None` while trials go on.
pub fn settled_method() -> Option<Method> {
    SETTLED.load(Ordering::Relaxed).checked_sub(1).map(|index| Method::EVERY[index as usize])
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
                // SAFETY: by the function's own contract; `next_method` chooses among those that there are.
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
    // SAFETY: by the function's own contract; `next_method` chooses among those that there are.
    with_next_method(range.len, |method| unsafe { zero::zero_unless(range, method, revoked) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};

    #[test]
    fn every_range_is_zeroed_and_one_method_is_settled_on() {
        const LEN: usize = 2 * TRIAL_BYTES;
        let range = Range { start: map(LEN, Protection::ReadWrite).unwrap(), len: LEN };
        // SAFETY: a fresh mapping that only this test knows.
        let bytes = unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, LEN) };
        let trials = Method::all().count() as u64 * TRIALS;
        for _ in 0..=trials {
            bytes.fill(0xa5);
            // SAFETY: the range is this test's.
            unsafe { zero(range, Use::Later) };
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
        let settled = settled_method().unwrap();
        assert!(settled.available(), "{settled:?}");
        assert_eq!(next_method(LEN), (settled, false));
        // SAFETY: the test is done with it.
        unsafe { unmap(range).unwrap() };
    }
}
