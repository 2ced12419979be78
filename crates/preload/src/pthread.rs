//! `pthread_create` in a program whose address space is limited: what the region has reserved and doesn't use may be what a new thread's
//! stack lacks. The C library maps stacks by itself, so that no other stand-in sees them.

use crate::{mmap, next};
use pagecrew::sys::thread;
use std::ffi::c_void;

/// `int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    start: *const c_void,
    argument: *mut c_void,
) -> i32 {
    // SAFETY: by the function's own contract; where it was refused, nothing has begun.
    let create = || unsafe { next::pthread_create(thread, attributes, start, argument) };
    match create() {
        // Too many threads say the same, and are refused again. A helper may be wanted by somebody who is at the region.
        libc::EAGAIN | libc::ENOMEM if !thread::spawning() && mmap::give_up_reserve() => create(),
        done => done,
    }
}
