//! The end of the process: what is large is given back in parallel before the kernel does it with one thread.
//!
//! `exit` and the return from `main` end in the handler that was registered first: this library's initialiser runs before libc
//! registers anything, so when its turn comes, every other handler and destructor has run. `_exit`, `_Exit` and `quick_exit` are
//! stood in for. Where the main thread ends alone (`pthread_exit`, `thrd_exit`), the process ends with its last thread, and the C library runs the
//! handlers on that: the crew, whose threads count, is dismissed. A process that shares its memory with its parent (`vfork`, `posix_spawn`) has another number than the one
//! that owns it, and leaves everything as it is.

use crate::{HEAP, libc_blocks, state};
use pagecrew::region::Region;
use pagecrew::sys::memory::Range;
use pagecrew::sys::sched::thread_id;
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

unsafe extern "C" {
    fn on_exit(handler: extern "C" fn(i32, *mut c_void), argument: *mut c_void) -> i32;
    fn at_quick_exit(handler: extern "C" fn()) -> i32;
    /// Flushes and closes every stream: just what `exit` does behind its handlers.
    fn fcloseall() -> i32;
}

static QUICK_EXIT_STATUS: AtomicI32 = AtomicI32::new(0);

/// Registers the handlers.
pub fn install() {
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe {
        on_exit(at_exit, std::ptr::null_mut());
        at_quick_exit(at_quick);
        let next = |name: &std::ffi::CStr| libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        NEXT_PTHREAD_EXIT.store(next(c"pthread_exit"), Ordering::Relaxed);
        NEXT_THRD_EXIT.store(next(c"thrd_exit"), Ordering::Relaxed);
    }
}

static NEXT_PTHREAD_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static NEXT_THRD_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// A thread ends alone.
extern "C" fn before_thread_ends() {
    // SAFETY: getpid takes nothing and cannot fail.
    if thread_id() == unsafe { libc::getpid() } && state::own_process() {
        state::main_thread_ends();
    }
}

/// A function that calls [`before_thread_ends`] and goes on with its namesake behind us. The C library unwinds the thread's stack from there, so
/// this leaves no frame.
macro_rules! thread_end {
    ($(#[$doc:meta])* $name:ident, $argument:ty, $next:ident) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name(value: $argument) -> ! {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "push rdi",
                "call {before}",
                "pop rdi",
                "jmp qword ptr [rip + {next}]",
                before = sym before_thread_ends,
                next = sym $next,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x0, x30, [sp, #-16]!",
                "bl {before}",
                "ldp x0, x30, [sp], #16",
                "adrp x16, {next}",
                "ldr x16, [x16, :lo12:{next}]",
                "br x16",
                before = sym before_thread_ends,
                next = sym $next,
            );
        }
    };
}

thread_end!(
    /// `void pthread_exit(void *value)`
    pthread_exit, *mut c_void, NEXT_PTHREAD_EXIT
);
thread_end!(
    /// `void thrd_exit(int value)`
    thrd_exit, i32, NEXT_THRD_EXIT
);

extern "C" fn at_exit(status: i32, _: *mut c_void) {
    finish(status, true);
}

extern "C" fn at_quick() {
    finish(QUICK_EXIT_STATUS.load(Ordering::Relaxed), false);
}

/// Ends the counters' file, unless somebody waits to read it.
fn end_stats() {
    if let (Some(start), Some(region)) = (state::start(), state::existing_region()) {
        region.add_up_counts();
        // SAFETY: getpid takes nothing and cannot fail.
        if start.keep_stats_of != Some(unsafe { libc::getpid() }) {
            region.stats().unshare();
        } else {
            region.count_elsewhere();
        }
    }
}

/// Whether the calling thread may be in a signal handler: then some signal is blocked. What it interrupted may hold any lock, libc's
/// included, so such a process is left to the kernel.
fn in_handler() -> bool {
    any_blocked(1..=64)
}

/// Whether the calling thread has one of `signals` blocked.
pub fn any_blocked(mut signals: impl Iterator<Item = i32>) -> bool {
    // SAFETY: reads the calling thread's mask into a valid set.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        signals.any(|signal| libc::sigismember(&mask, signal) == 1)
    }
}

/// Gives large memory back and ends the process, if it is large; otherwise returns.
fn finish(status: i32, flush: bool) {
    if !state::own_process() {
        return;
    }
    end_stats();
    if let Some(region) = state::existing_region() {
        region.boost_helpers();
    }
    let wanted = state::start().is_some_and(|start| start.options.exit);
    if !wanted
        || !Region::worth_giving_back(state::forked())
        || (!flush && in_handler())
        || !HEAP.unlocked()
        || HEAP.outgrown()
    {
        return;
    }
    give_back(status, flush);
}

/// A function of its own, so that its frame is not on the stack of a process that ends without it.
#[inline(never)]
fn give_back(status: i32, flush: bool) {
    let Some(region) = state::region().filter(|region| region.unlocked()) else { return };
    let here = (&raw const QUICK_EXIT_STATUS) as usize;
    // The helpers' thread-local storage as well: they are at work until the end.
    let kept = [HEAP.range(), libc_blocks::range(), Range { start: here.saturating_sub(1 << 20), len: 2 << 20 }];
    // SAFETY: the process ends below by a system call. Before that, streams are flushed as `exit` would do next, and nothing
    // runs that needs more than this library's heap and statics, which are kept.
    unsafe {
        if flush {
            fcloseall();
        }
        region.give_back_before_exit(&kept);
        libc::syscall(libc::SYS_exit_group, status);
    }
}

/// `void _exit(int status)`
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: i32) -> ! {
    finish(status, false);
    loop {
        // SAFETY: ends the process.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// `void _Exit(int status)`
#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: i32) -> ! {
    _exit(status)
}

/// `void quick_exit(int status)`: takes note of the status for the handler that runs last.
#[unsafe(no_mangle)]
pub extern "C" fn quick_exit(status: i32) -> ! {
    QUICK_EXIT_STATUS.store(status, Ordering::Relaxed);
    // SAFETY: looks the next library's function up, which has this signature and does not return.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"quick_exit".as_ptr());
        if !next.is_null() {
            let next: extern "C" fn(i32) -> ! = std::mem::transmute(next);
            next(status);
        }
    }
    _exit(status)
}
