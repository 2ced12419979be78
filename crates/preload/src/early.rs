//! Blocks for requests that come while the program's own malloc is being looked up. They are never reused: there are hardly any.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const ROOM: usize = 16 << 10;

#[repr(align(16))]
struct Room(UnsafeCell<[u8; ROOM]>);

// SAFETY: each byte is handed out once, by the atomic below.
unsafe impl Sync for Room {}

static BLOCKS: Room = Room(UnsafeCell::new([0; ROOM]));
static USED: AtomicUsize = AtomicUsize::new(0);

/// The functions that [`free`] and [`realloc`] stand before.
pub static FREE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
pub static REALLOC: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// A zeroed block; null when there is no room.
pub fn allocate(size: usize) -> *mut c_void {
    let take = size.clamp(1, ROOM + 1).next_multiple_of(16);
    let before = USED.fetch_add(take, Ordering::Relaxed);
    // SAFETY: the block lies in the room.
    if before + take <= ROOM { unsafe { BLOCKS.0.get().byte_add(before).cast() } } else { null_mut() }
}

/// Whether there is such a block at all.
pub fn any() -> bool {
    USED.load(Ordering::Relaxed) > 0
}

/// How much of the room lies behind `pointer`, if it is such a block.
fn behind(pointer: *mut c_void) -> Option<usize> {
    (BLOCKS.0.get() as usize + ROOM).checked_sub(pointer as usize).filter(|&left| left <= ROOM)
}

/// Stands before the next `free` where such blocks exist.
///
/// # Safety
/// That of `free`.
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if behind(pointer).is_none() {
        // SAFETY: the address is that of the next `free`, and the pointer is passed on as it came.
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(FREE.load(Ordering::Relaxed))(pointer) }
    }
}

/// Stands before the next `realloc` where such blocks exist.
///
/// # Safety
/// That of `realloc`.
pub unsafe extern "C" fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the address is that of the next `realloc`; what is copied lies in the room and in the new block.
    unsafe {
        let next = transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>(
            REALLOC.load(Ordering::Relaxed),
        );
        let Some(left) = behind(pointer) else { return next(pointer, size) };
        let new = next(null_mut(), size);
        if !new.is_null() {
            std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), new.cast(), left.min(size));
        }
        new
    }
}
