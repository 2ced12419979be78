//! System call wrappers that this library stands in for, to hear of what a program does to its own spans, mappings and limits.
//!
//! Advice, locks, keys, policies and protection stay with a range. So a span that had any is not reused as it is, and a mapping
//! that had any is left alone from then on. And a program that limits its own address space does not count on an arena in it, which
//! is given up then.

use crate::{mmap, next, state};
use pagecrew::sys::{Errno, HUGE_PAGE_SIZE};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Takes note of a change to a range, if it is one of ours.
fn note(address: *mut c_void, len: usize) {
    if state::touches(address as usize, len)
        && let Some(region) = state::existing_region()
    {
        region.mark_altered(address as usize, len);
    }
}

/// Takes note of a wish of the program's about a range, whatever is there.
fn note_wish(address: *mut c_void, len: usize) {
    note(address, len);
    mmap::left_alone(address, len);
}

/// Whether the advice stays with the range after the call.
fn lasting(advice: i32) -> bool {
    const WILLNEED: i32 = libc::MADV_WILLNEED;
    const DONTNEED: i32 = libc::MADV_DONTNEED;
    const FREE: i32 = libc::MADV_FREE;
    // The numbers are COLD, PAGEOUT, POPULATE_READ, POPULATE_WRITE, DONTNEED_LOCKED, COLLAPSE.
    !matches!(advice, WILLNEED | DONTNEED | FREE | 20..=25)
}

/// Whether a span has this advice anyway.
fn usual(advice: i32, len: usize) -> bool {
    let on = || state::start().is_some_and(|start| start.options.huge_pages);
    advice == libc::MADV_HUGEPAGE && len >= HUGE_PAGE_SIZE && on()
}

/// `int madvise(void *address, size_t len, int advice)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    if lasting(advice) {
        if !usual(advice, len) {
            note(address, len);
        }
        mmap::left_alone(address, len);
    }
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) as i32 }
}

/// `int posix_madvise(void *address, size_t len, int advice)`: as libc has it, `POSIX_MADV_DONTNEED` does nothing.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: i32) -> i32 {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    let errno = Errno::last();
    // SAFETY: by the function's own contract.
    let result = unsafe { madvise(address, len, advice) };
    if result == 0 {
        return 0;
    }
    let error = Errno::last().0;
    errno.set();
    error
}

/// `int mprotect(void *address, size_t len, int protection)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, protection: i32) -> i32 {
    note(address, len);
    // SAFETY: by the function's own contract.
    let result = unsafe { libc::syscall(libc::SYS_mprotect, address, len, protection) as i32 };
    if result == 0 {
        mmap::protected(address, len, protection);
    }
    result
}

/// `int pkey_mprotect(void *address, size_t len, int protection, int key)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(address: *mut c_void, len: usize, protection: i32, key: i32) -> i32 {
    // Without a key it is the other function, on kernels without keys too.
    if key == -1 {
        // SAFETY: by the function's own contract.
        return unsafe { mprotect(address, len, protection) };
    }
    note_wish(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_pkey_mprotect, address, len, protection, key) as i32 }
}

/// `long mbind(void *address, unsigned long len, int mode, const unsigned long *nodes, unsigned long count, unsigned flags)`, as
/// libnuma has it.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mbind(
    address: *mut c_void,
    len: usize,
    mode: i32,
    nodes: *const libc::c_ulong,
    count: libc::c_ulong,
    flags: u32,
) -> libc::c_long {
    note_wish(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mbind, address, len, mode, nodes, count, flags) }
}

/// Takes note of a NUMA policy of a thread's. Another than the default is a word of the program's about where memory is to come from.
fn note_policy(mode: i32, nodes: *const libc::c_ulong) {
    const DEFAULT: i32 = 0;
    const PREFERRED: i32 = 1;
    const LOCAL: i32 = 4;
    let is_default = matches!(mode, DEFAULT | LOCAL) || (mode == PREFERRED && nodes.is_null());
    if !is_default {
        state::leaves_placement_to_program();
    }
}

/// `long set_mempolicy(int mode, const unsigned long *nodes, unsigned long count)`, as libnuma has it.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn set_mempolicy(mode: i32, nodes: *const libc::c_ulong, count: libc::c_ulong) -> libc::c_long {
    note_policy(mode, nodes);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, count) }
}

/// Takes note of pages that the program moves to other nodes: a span with such pages is not reused as it is.
///
/// # Safety
/// `pages` has `count` addresses.
unsafe fn note_moved_pages(count: usize, pages: *const *mut c_void) {
    for index in 0..count {
        // SAFETY: by the function's own contract.
        note(unsafe { pages.add(index).read() }, 1);
    }
}

/// `long move_pages(int process, unsigned long count, void **pages, const int *nodes, int *status, int flags)`, as libnuma has it.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn move_pages(
    process: i32,
    count: libc::c_ulong,
    pages: *const *mut c_void,
    nodes: *const i32,
    status: *mut i32,
    flags: i32,
) -> libc::c_long {
    // Without nodes it is a question.
    if !nodes.is_null() && !pages.is_null() && is_own(process) {
        // SAFETY: by the function's own contract.
        unsafe { note_moved_pages(count as usize, pages) };
    }
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_move_pages, process, count, pages, nodes, status, flags) }
}

/// Whether the number of a process, where 0 is the calling one, is this process's.
fn is_own(process: i32) -> bool {
    // SAFETY: getpid takes nothing and cannot fail.
    process == 0 || process == unsafe { libc::getpid() }
}

/// `_IOWR(0xAA, 0, struct uffdio_register)`: from here on, a thread of the program's handles faults in a range.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;

/// The next `ioctl`; null before the library is loaded.
static NEXT_IOCTL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Runs when the library is loaded.
pub fn look_up() {
    let name: &CStr = c"ioctl";
    // SAFETY: the name is a C string; RTLD_NEXT is meant for just this use.
    NEXT_IOCTL.store(unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }, Ordering::Relaxed);
}

/// `int ioctl(int file, unsigned long request, ...)`: of all requests, the one that concerns mappings.
///
/// # Safety
/// As in C. Where the request has no argument, a register holds some number, which the kernel doesn't look at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: i32, request: libc::c_ulong, argument: *mut c_void) -> i32 {
    if request == UFFDIO_REGISTER && !argument.is_null() {
        // SAFETY: the structure begins with the address and the length of the range.
        let [start, len] = unsafe { argument.cast::<[u64; 2]>().read_unaligned() };
        note_wish(start as *mut c_void, len as usize);
        // A range can have one such file only, and pages are moved by one of ours.
        if state::touches(start as usize, len as usize)
            && let Some(region) = state::existing_region()
        {
            region.stop_transfers();
        }
    }
    let next = NEXT_IOCTL.load(Ordering::Relaxed);
    // SAFETY: the function has this signature, as far as registers go; the rest by the function's own contract.
    unsafe {
        if next.is_null() {
            return libc::syscall(libc::SYS_ioctl, file, request, argument) as i32;
        }
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(i32, libc::c_ulong, *mut c_void) -> i32>(next)(
            file, request, argument,
        )
    }
}

/// The process is about to have its system calls filtered: it is left with those that every malloc makes.
fn note_filter() {
    state::moves_no_pages_any_more();
}

/// `int prctl(int option, ...)`: of all options, the one that filters system calls.
///
/// # Safety
/// As in C. Where there are fewer arguments, registers hold some numbers, which the kernel doesn't look at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: i32, a: usize, b: usize, c: usize, d: usize) -> i32 {
    if option == libc::PR_SET_SECCOMP {
        note_filter();
    }
    // SAFETY: by the function's own contract.
    unsafe { next::prctl(option, a, b, c, d) }
}

/// `long syscall(long number, ...)`: of all system calls, `seccomp` and those of NUMA policies, for which the C library has no
/// function. Not `mbind`, which the region calls this way itself.
///
/// # Safety
/// As in C. Where there are fewer arguments, registers and the caller's stack hold some numbers, which the kernel doesn't look at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: isize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    match number as libc::c_long {
        libc::SYS_seccomp => note_filter(),
        libc::SYS_set_mempolicy => note_policy(a as i32, b as *const libc::c_ulong),
        libc::SYS_move_pages if c != 0 && d != 0 && is_own(a as i32) => {
            // SAFETY: by the function's own contract, these are the arguments of that call.
            unsafe { note_moved_pages(b, c as *const *mut c_void) };
        }
        _ => {}
    }
    // SAFETY: by the function's own contract.
    unsafe { next::syscall(number, a, b, c, d, e, f) }
}

/// `int mlock(const void *address, size_t len)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *mut c_void, len: usize) -> i32 {
    note_wish(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mlock, address, len) as i32 }
}

/// `int mlock2(const void *address, size_t len, unsigned flags)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *mut c_void, len: usize, flags: u32) -> i32 {
    note_wish(address, len);
    // SAFETY: by the function's own contract.
    unsafe { libc::syscall(libc::SYS_mlock2, address, len, flags) as i32 }
}

/// `int mlockall(int flags)`: what is only address space is given up first, or it would be filled with pages.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: i32) -> i32 {
    mmap::stop();
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
    if is_own(process) {
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
