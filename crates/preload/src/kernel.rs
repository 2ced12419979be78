//! System call wrappers that this library stands in for, to hear of what a program does to its own spans and limits.
//!
//! Advice, locks and protection stay with a range, so a span that had any is not reused as it is. And a program that limits its own
//! address space does not count on an arena in it, which is given up then.

use crate::state;
use pagecrew::sys::HUGE_PAGE_SIZE;
use std::ffi::c_void;

/// Takes note of a change to a range, if it is one of ours.
fn note(address: *mut c_void, len: usize) {
    if state::touches(address as usize, len)
        && let Some(region) = state::existing_region()
    {
        region.mark_altered(address as usize, len);
    }
}

/// Whether the advice stays with the range after the call, other than what the range has anyway.
fn lasting(advice: i32, len: usize) -> bool {
    const WILLNEED: i32 = libc::MADV_WILLNEED;
    const DONTNEED: i32 = libc::MADV_DONTNEED;
    const FREE: i32 = libc::MADV_FREE;
    const HUGEPAGE: i32 = libc::MADV_HUGEPAGE;
    match advice {
        // COLD, PAGEOUT, POPULATE_READ, POPULATE_WRITE, DONTNEED_LOCKED, COLLAPSE.
        WILLNEED | DONTNEED | FREE | 20..=25 => false,
        HUGEPAGE => {
            let on = state::start().is_some_and(|start| start.options.huge_pages);
            !on || len < HUGE_PAGE_SIZE
        }
        _ => true,
    }
}

/// `int madvise(void *address, size_t len, int advice)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    if lasting(advice, len) {
        note(address, len);
    }
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) as i32 }
}

/// `int mprotect(void *address, size_t len, int protection)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, protection: i32) -> i32 {
    note(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mprotect, address, len, protection) as i32 }
}

/// `int mlock(const void *address, size_t len)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *mut c_void, len: usize) -> i32 {
    note(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mlock, address, len) as i32 }
}

/// `int mlock2(const void *address, size_t len, unsigned flags)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *mut c_void, len: usize, flags: u32) -> i32 {
    note(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mlock2, address, len, flags) as i32 }
}

/// `int mlockall(int flags)`: what is only address space is given up first, or it would be filled with pages.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: i32) -> i32 {
    match state::existing_region() {
        Some(region) => {
            region.tighten();
        }
        None => state::no_region_any_more(),
    }
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mlockall, flags) as i32 }
}

/// Takes note of a limit that the process sets itself.
fn note_limit(resource: i32, limit: *const libc::rlimit) {
    if resource != libc::RLIMIT_AS as i32 && resource != libc::RLIMIT_DATA as i32 {
        return;
    }
    // SAFETY: the pointer is null or, by the caller's contract, a limit to read.
    let finite = unsafe { limit.as_ref() }.is_some_and(|limit| limit.rlim_cur != libc::RLIM_INFINITY);
    if let (true, Some(region)) = (finite, state::existing_region()) {
        region.tighten();
    }
}

/// # Safety
/// As `setrlimit` in C.
unsafe fn set_limit(process: i32, resource: i32, new: *const libc::rlimit, old: *mut libc::rlimit) -> i32 {
    // SAFETY: getpid takes nothing and cannot fail.
    if process == 0 || process == unsafe { libc::getpid() } {
        note_limit(resource, new);
    }
    // SAFETY: by the function's own contract; the kernel's structure is the 64-bit one, as libc's is here.
    unsafe { libc::syscall(libc::SYS_prlimit64, process, resource, new, old) as i32 }
}

/// `int setrlimit(int resource, const struct rlimit *limit)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit(resource: i32, limit: *const libc::rlimit) -> i32 {
    // SAFETY: by the function's own contract.
    unsafe { set_limit(0, resource, limit, std::ptr::null_mut()) }
}

/// `int setrlimit64(int resource, const struct rlimit64 *limit)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit64(resource: i32, limit: *const libc::rlimit) -> i32 {
    // SAFETY: by the function's own contract.
    unsafe { set_limit(0, resource, limit, std::ptr::null_mut()) }
}

/// `int prlimit(pid_t process, int resource, const struct rlimit *new, struct rlimit *old)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit(process: i32, resource: i32, new: *const libc::rlimit, old: *mut libc::rlimit) -> i32 {
    // SAFETY: by the function's own contract.
    unsafe { set_limit(process, resource, new, old) }
}

/// `int prlimit64(pid_t process, int resource, const struct rlimit64 *new, struct rlimit64 *old)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit64(
    process: i32,
    resource: i32,
    new: *const libc::rlimit,
    old: *mut libc::rlimit,
) -> i32 {
    // SAFETY: by the function's own contract.
    unsafe { set_limit(process, resource, new, old) }
}
