//! What libc allocates for a helper thread while it is started (its vector of thread-local storage), out of a span of the region:
//! never from the program's malloc, and recognised by `free` without a comparison more.

use pagecrew::region::Region;
use pagecrew::sys::memory::Range;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Room for the thread-local storage of 500 libraries.
const SLOT: usize = 8 << 10;
/// As many as there can be helpers, and those whose stack libc keeps for a while.
const SLOTS: usize = u64::BITS as usize;

/// The span; 0 before there is one.
static START: AtomicUsize = AtomicUsize::new(0);
/// A bit for each slot in use.
static USED: AtomicU64 = AtomicU64::new(0);

/// Takes the span out of the region.
pub fn prepare(region: &Region) {
    if let Some(span) = region.allocate_uncounted(SLOTS * SLOT) {
        START.store(span.as_ptr() as usize, Ordering::Release);
    }
}

/// Where they lie.
pub fn range() -> Range {
    Range { start: START.load(Ordering::Acquire), len: SLOTS * SLOT }
}

/// The slot that `address` lies in.
fn slot(address: usize) -> Option<usize> {
    let start = START.load(Ordering::Acquire);
    let offset = address.checked_sub(start).filter(|&offset| start != 0 && offset < SLOTS * SLOT)?;
    Some(offset / SLOT)
}

/// Whether `pointer` is one of these blocks.
pub fn contains(pointer: *mut c_void) -> bool {
    slot(pointer as usize).is_some()
}

/// A zeroed block of `size` bytes; null if it is too large or all are in use.
pub fn allocate(size: usize) -> *mut c_void {
    let start = START.load(Ordering::Acquire);
    if start == 0 || size > SLOT {
        return null_mut();
    }
    let taken = USED.fetch_update(Ordering::Acquire, Ordering::Relaxed, |used| {
        Some(used | (used + 1)).filter(|_| used != u64::MAX)
    });
    let Ok(used) = taken else { return null_mut() };
    let block = (start + (!used).trailing_zeros() as usize * SLOT) as *mut u8;
    // SAFETY: the slot is part of the span, and its bit makes it this call's.
    unsafe { block.write_bytes(0, SLOT) };
    block.cast()
}

/// Takes a block back, if it is one of these.
pub fn release(pointer: *mut c_void) -> bool {
    let slot = slot(pointer as usize);
    if let Some(slot) = slot {
        USED.fetch_and(!(1 << slot), Ordering::Release);
    }
    slot.is_some()
}

/// What may be used of each block, in bytes.
pub fn size() -> usize {
    SLOT
}
