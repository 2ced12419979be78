//! What happens around `fork`: nothing is in the middle of a change when the process is copied, and the child starts alone.
//!
//! A child of `vfork` or `posix_spawn` shares the parent's memory until it calls `exec`; no handler runs for it, and none is needed:
//! it changes nothing here, except through `_exit`, which knows (see [`crate::exit`]).

use crate::{HEAP, state};
use pagecrew::region::RegionForkGuard;
use std::cell::UnsafeCell;

struct Held(UnsafeCell<Option<RegionForkGuard<'static>>>);

// SAFETY: only used between the handlers of one fork, by the thread that forks; libc runs one fork's handlers at a time.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

extern "C" fn before() {
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
}

extern "C" fn in_child() {
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
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}
