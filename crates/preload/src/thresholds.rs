//! glibc's thresholds for what is below ours.
//!
//! glibc learns from what a program frees: when a block that it had mapped is freed, blocks up to that size come from its heap from then on,
//! and the heap keeps up to twice as much at its end. Under Pagecrew it never sees such a block any more, and would give its heap back
//! and take it again for ever. So it is told what it would have learnt, unless the user or the program has set these values, which ends the
//! learning in glibc as well.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where glibc begins, and where its learning ends: 32 MiB on 64-bit machines.
const FIRST: usize = 128 << 10;
const MOST: usize = 32 << 20;

/// What M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD and M_MMAP_MAX are in `malloc.h`.
const TRIM_THRESHOLD: i32 = -1;
const MMAP_THRESHOLD: i32 = -3;
const FIXING: std::ops::RangeInclusive<i32> = -4..=-1;

/// The largest block of which glibc has been told.
static LEARNT: AtomicUsize = AtomicUsize::new(FIRST);

/// Nothing is learnt where the environment sets glibc's values.
pub fn load() {
    let set = |variable: &str| std::env::var_os(variable).is_some();
    let tunables = std::env::var("GLIBC_TUNABLES").unwrap_or_default();
    let names = ["MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"];
    if names.into_iter().any(set) || tunables.contains("glibc.malloc") {
        LEARNT.store(usize::MAX, Ordering::Relaxed);
    }
}

/// A block of `size` bytes was freed.
pub fn freed(size: usize) {
    let learnt = LEARNT.load(Ordering::Relaxed);
    // A little more is not worth two calls.
    if size <= MOST && size > learnt.saturating_add(learnt / 4) && LEARNT.fetch_max(size, Ordering::Relaxed) < size {
        set(MMAP_THRESHOLD, size as i32);
        set(TRIM_THRESHOLD, 2 * size as i32);
    }
}

fn set(parameter: i32, value: i32) -> i32 {
    const NAME: &CStr = c"mallopt";
    // SAFETY: looks the next library's function up, which has this signature.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, NAME.as_ptr());
        if next.is_null() {
            return 0;
        }
        let next: extern "C" fn(i32, i32) -> i32 = std::mem::transmute(next);
        next(parameter, value)
    }
}

/// `int mallopt(int parameter, int value)`: takes note of a program that sets the thresholds itself.
#[unsafe(no_mangle)]
pub extern "C" fn mallopt(parameter: i32, value: i32) -> i32 {
    if FIXING.contains(&parameter) {
        LEARNT.store(usize::MAX, Ordering::Relaxed);
    }
    set(parameter, value)
}
