//! What happens around `fork`: nothing is in the middle of a change when the process is copied, and the child starts alone.
//!
//! **Order of locks.** Whoever flushes all streams holds the C library's list of them, and may allocate meanwhile. `fork` takes that list as
//! well, but only behind these handlers. So they take it first: nobody who holds it ever waits for the region while it is held still.
//!
//! A child of `vfork` or `posix_spawn` shares the parent's memory until it calls `exec`; no handler runs for it, and none is needed:
//! it changes nothing here, except through `_exit`, which knows (see [`crate::exit`]).

use crate::{HEAP, state};
use pagecrew::region::RegionForkGuard;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

struct Held(UnsafeCell<Option<RegionForkGuard<'static>>>);

// SAFETY: only used between the handlers of one fork, by the thread that forks; libc runs one fork's handlers at a time.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

/// The C library's functions that lock its list of streams, open it, and make it new in a child; null where it has none of that name.
static STREAMS: [AtomicPtr<c_void>; 3] = [const { AtomicPtr::new(null_mut()) }; 3];
const LOCK: usize = 0;
const UNLOCK: usize = 1;
const RESET: usize = 2;

fn streams(which: usize) {
    // Nothing is called where one is missing.
    let all = STREAMS.each_ref().map(|function| function.load(Ordering::Relaxed));
    if all.iter().all(|function| !function.is_null()) {
        // SAFETY: glibc has exported these functions with this signature in every version. The lock may be taken again by its holder, and is
        // opened or made new by the same thread, in the child by its copy.
        unsafe { transmute::<*mut c_void, extern "C" fn()>(all[which])() }
    }
}

extern "C" fn before() {
    streams(LOCK);
    let guard = state::existing_region().map(|region| region.before_fork());
    // SAFETY: see `Held`.
    unsafe { *HELD.0.get() = guard };
    // Last, since holding the region allocates.
    HEAP.before_fork();
}

extern "C" fn in_parent() {
    HEAP.after_fork();
    // SAFETY: see `Held`.
    drop(unsafe { (*HELD.0.get()).take() });
    streams(UNLOCK);
}

extern "C" fn in_child() {
    // The C library does that only if the parent had threads.
    streams(RESET);
    HEAP.after_fork();
    state::after_fork_in_child();
    // SAFETY: see `Held`; the child has one thread.
    unsafe {
        crate::mmap::after_fork();
        if let Some(guard) = (*HELD.0.get()).take() {
            guard.in_child();
        }
    }
}

/// Registers the handlers.
pub fn install() {
    let names = [c"_IO_list_lock", c"_IO_list_unlock", c"_IO_list_resetlock"];
    for (function, name) in STREAMS.iter().zip(names) {
        // SAFETY: the name ends with a zero.
        function.store(unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }, Ordering::Relaxed);
    }
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}
