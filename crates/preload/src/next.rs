//! The program's own malloc: whatever stands behind this library in the search order (glibc's, jemalloc, mimalloc, tcmalloc).
//!
//! Each entry first points at a function that looks everything up and goes on to what it found, so that the fast path is one
//! load and a jump. Looking up may itself allocate (libc keeps the message of a symbol that was not found); such requests are
//! served from a few kilobytes of our own, and then `free` and `realloc` keep looking out for those.

use crate::early;
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

type Pointer = *mut c_void;

macro_rules! next {
    ($($function:ident, $symbol:literal, ($($argument:ident: $type:ty),*) $(-> $result:ty)?, $early:expr;)*) => {
        /// Addresses of the functions.
        #[allow(non_upper_case_globals)]
        pub mod address {
            use super::*;
            $(pub static $function: AtomicPtr<c_void> = AtomicPtr::new(first::$function as *mut c_void);)*
        }

        /// What the addresses hold until everything was looked up.
        mod first {
            use super::*;
            $(pub unsafe extern "C" fn $function($($argument: $type),*) $(-> $result)? {
                if look_up() {
                    // SAFETY: the arguments are passed on as they came.
                    return unsafe { super::$function($($argument),*) };
                }
                #[allow(clippy::redundant_closure_call)]
                ($early)($($argument),*)
            })*
        }

        $(
            /// The next library's function of this name.
            ///
            /// # Safety
            /// That of the C function.
            #[inline(always)]
            pub unsafe fn $function($($argument: $type),*) $(-> $result)? {
                let address = address::$function.load(Ordering::Relaxed);
                // SAFETY: the address is that of a function with this signature: the one in `first`, or the C library's.
                let function: unsafe extern "C" fn($($type),*) $(-> $result)? = unsafe { transmute(address) };
                // SAFETY: by the function's own contract.
                unsafe { function($($argument),*) }
            }
        )*

        fn look_up_all() {
            $(
                let found = symbol($symbol);
                address::$function.store(if found.is_null() { missing::$function as *mut c_void } else { found }, Ordering::Relaxed);
            )*
        }

        /// For what the next library does not have.
        mod missing {
            use super::*;
            $(pub unsafe extern "C" fn $function($(_: $type),*) $(-> $result)? {
                $(none::<$result>())?
            })*
        }
    };
}

/// The result of a function that is not there: null, zero or an error number.
trait Nothing {
    fn nothing() -> Self;
}

impl Nothing for Pointer {
    fn nothing() -> Pointer {
        pagecrew::sys::Errno(libc::ENOMEM).set();
        std::ptr::null_mut()
    }
}

impl Nothing for usize {
    fn nothing() -> usize {
        0
    }
}

impl Nothing for isize {
    fn nothing() -> isize {
        pagecrew::sys::Errno(libc::ENOSYS).set();
        -1
    }
}

impl Nothing for i32 {
    /// No memory, as `posix_memalign` says it; for the others, which are there in every glibc, never asked for.
    fn nothing() -> i32 {
        libc::ENOMEM
    }
}

fn none<T: Nothing>() -> T {
    T::nothing()
}

next! {
    malloc, c"malloc", (size: usize) -> Pointer, early::allocate;
    free, c"free", (pointer: Pointer), |_| ();
    calloc, c"calloc", (count: usize, size: usize) -> Pointer, |count: usize, size| early::allocate(count.saturating_mul(size));
    realloc, c"realloc", (pointer: Pointer, size: usize) -> Pointer, |_, size| early::allocate(size);
    memalign, c"memalign", (align: usize, size: usize) -> Pointer, |_, _| none::<Pointer>();
    posix_memalign, c"posix_memalign", (place: *mut Pointer, align: usize, size: usize) -> i32, |_, _, _| libc::ENOMEM;
    aligned_alloc, c"aligned_alloc", (align: usize, size: usize) -> Pointer, |_, _| none::<Pointer>();
    malloc_usable_size, c"malloc_usable_size", (pointer: Pointer) -> usize, |_| 0;
    malloc_trim, c"malloc_trim", (pad: usize) -> i32, |_| 0;
    pthread_create, c"pthread_create", (thread: Pointer, attributes: *const c_void, start: *const c_void, argument: Pointer) -> i32,
        |_, _, _, _| libc::EAGAIN;
    prctl, c"prctl", (option: i32, a: usize, b: usize, c: usize, d: usize) -> i32, |_, _, _, _, _| -1;
    syscall, c"syscall", (number: isize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize,
        |_, _, _, _, _, _, _| none::<isize>();
}

fn symbol(name: &CStr) -> Pointer {
    // SAFETY: the name is a C string; RTLD_NEXT is meant for just this use.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

const UNKNOWN: u32 = 0;
const LOOKING: u32 = 1;
const KNOWN: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(UNKNOWN);

/// Looks everything up. Returns false while that is being done, which can only be noticed by what it allocates itself: the
/// first allocation of a process happens before it has a second thread.
pub fn look_up() -> bool {
    match STATE.compare_exchange(UNKNOWN, LOOKING, Ordering::Acquire, Ordering::Acquire) {
        Ok(_) => {
            look_up_all();
            if early::any() {
                early::FREE.store(address::free.swap(early::free as *mut c_void, Ordering::Relaxed), Ordering::Relaxed);
                early::REALLOC
                    .store(address::realloc.swap(early::realloc as *mut c_void, Ordering::Relaxed), Ordering::Relaxed);
            }
            STATE.store(KNOWN, Ordering::Release);
            true
        }
        Err(state) => state == KNOWN,
    }
}
