//! The mmap family, for programs that map memory themselves: private anonymous memory of 2 MiB and more becomes eligible for huge
//! pages where it will be used densely. Everything else is passed on.
//!
//! The calls go to the next library's functions, which stand in the C library unless something else was preloaded; what this library
//! adds to them are system calls of its own, which never change `errno`. Before the library is loaded, everything is passed on.

use crate::heap::limited_address_space;
use crate::{HEAP, exit, state};
use pagecrew::mapping::policy::{self, LEAST, Purpose, Request};
use pagecrew::mapping::{Mappings, pages};
use pagecrew::sys::{Errno, huge_page};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

type Pointer = *mut c_void;

/// What is known of the program's own mappings.
pub static MAPPINGS: Mappings = Mappings::new();
/// Calls about less are passed on at once; so is everything where this is off.
static FROM: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The next functions of these names. Until they are looked up, the system calls themselves.
mod next {
    use super::*;

    pub type Map = unsafe extern "C" fn(Pointer, usize, i32, i32, i32, i64) -> Pointer;
    pub type Unmap = unsafe extern "C" fn(Pointer, usize) -> i32;
    pub type Remap = unsafe extern "C" fn(Pointer, usize, usize, i32, Pointer) -> Pointer;

    pub static MAP: AtomicPtr<c_void> = AtomicPtr::new(raw_map as *mut c_void);
    pub static UNMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_unmap as *mut c_void);
    pub static REMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_remap as *mut c_void);

    unsafe extern "C" fn raw_map(
        address: Pointer,
        len: usize,
        protection: i32,
        flags: i32,
        file: i32,
        offset: i64,
    ) -> Pointer {
        // SAFETY: by the caller's contract, which is that of the C function.
        unsafe { libc::syscall(libc::SYS_mmap, address, len, protection, flags, file, offset) as Pointer }
    }

    unsafe extern "C" fn raw_unmap(address: Pointer, len: usize) -> i32 {
        // SAFETY: by the caller's contract, which is that of the C function.
        unsafe { libc::syscall(libc::SYS_munmap, address, len) as i32 }
    }

    unsafe extern "C" fn raw_remap(old: Pointer, old_len: usize, len: usize, flags: i32, new: Pointer) -> Pointer {
        // SAFETY: by the caller's contract, which is that of the C function.
        unsafe { libc::syscall(libc::SYS_mremap, old, old_len, len, flags, new) as Pointer }
    }

    pub fn look_up() {
        for (place, name) in [(&MAP, c"mmap"), (&UNMAP, c"munmap"), (&REMAP, c"mremap")] {
            let name: &CStr = name;
            // SAFETY: the name is a C string; RTLD_NEXT is meant for just this use.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            if !found.is_null() {
                place.store(found, Ordering::Relaxed);
            }
        }
    }
}

/// Runs when the library is loaded, where no other thread is. Reads the system's settings, since no file may be opened later.
pub fn start(on: bool, huge_pages: bool) {
    next::look_up();
    if !on {
        return;
    }
    // SAFETY: takes a number and returns one.
    let memory = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) }.max(0) as usize * pagecrew::sys::PAGE_SIZE;
    // Under `always` there is nothing to advise, under `never` nothing to be had.
    MAPPINGS.start(huge_pages && huge_page::setting() == huge_page::Setting::Advised, memory);
    FROM.store(LEAST, Ordering::Release);
}

/// Nothing is done any more, for good: the program has locked what it will map.
pub fn stop() {
    FROM.store(usize::MAX, Ordering::Relaxed);
    MAPPINGS.stop();
}

/// The program has a wish of its own about a range.
pub fn left_alone(address: Pointer, len: usize) {
    if let Some(range) = pages(address as usize, len) {
        MAPPINGS.left_alone(range);
    }
}

fn keeping_errno<T>(body: impl FnOnce() -> T) -> T {
    let errno = Errno::last();
    let result = body();
    errno.set();
    result
}

fn request(protection: i32, flags: i32) -> Request {
    const TYPE: i32 = 0xf;
    const KNOWN: i32 = libc::PROT_READ | libc::PROT_WRITE;
    #[cfg(target_arch = "x86_64")]
    const LOW: i32 = libc::MAP_32BIT;
    #[cfg(not(target_arch = "x86_64"))]
    const LOW: i32 = 0;
    const SPECIAL: i32 =
        libc::MAP_GROWSDOWN | libc::MAP_STACK | libc::MAP_LOCKED | libc::MAP_HUGETLB | libc::MAP_POPULATE | LOW;
    Request {
        private_anonymous: flags & TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0,
        special: flags & SPECIAL != 0,
        read: protection & libc::PROT_READ != 0,
        write: protection & libc::PROT_WRITE != 0,
        execute: protection & !KNOWN != 0,
    }
}

/// # Safety
/// As [`mmap`].
#[inline(always)]
unsafe fn next_map(address: Pointer, len: usize, protection: i32, flags: i32, file: i32, offset: i64) -> Pointer {
    // SAFETY: what is stored there has this signature; the rest by the function's own contract.
    unsafe {
        transmute::<Pointer, next::Map>(next::MAP.load(Ordering::Relaxed))(
            address, len, protection, flags, file, offset,
        )
    }
}

/// # Safety
/// As [`munmap`].
#[inline(always)]
unsafe fn next_unmap(address: Pointer, len: usize) -> i32 {
    // SAFETY: as above.
    unsafe { transmute::<Pointer, next::Unmap>(next::UNMAP.load(Ordering::Relaxed))(address, len) }
}

/// `void *mmap(void *address, size_t len, int protection, int flags, int file, off_t offset)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: Pointer,
    len: usize,
    protection: i32,
    flags: i32,
    file: i32,
    offset: i64,
) -> Pointer {
    // SAFETY: by the function's own contract.
    unsafe {
        let map = || {
            if len < FROM.load(Ordering::Relaxed) {
                return next_map(address, len, protection, flags, file, offset);
            }
            map_large(address, len, protection, flags, file, offset)
        };
        let place = map();
        if place == libc::MAP_FAILED && make_room(len) { map() } else { place }
    }
}

/// After a refusal of `len` bytes: says whether it is worth a second try.
#[cold]
#[inline(never)]
fn make_room(len: usize) -> bool {
    let most = state::existing_region().map_or(0, |region| region.range().len);
    Errno::last() == Errno(libc::ENOMEM) && len <= most && give_up_reserve()
}

/// Under a limit of the process's own, what the region has reserved may be what is missing elsewhere, and is given up. Returns whether there
/// was any.
pub fn give_up_reserve() -> bool {
    limited_address_space()
        && keeping_errno(|| {
            // In a signal handler, a lock may be the interrupted thread's own.
            let region = state::existing_region().filter(|region| region.unlocked() && HEAP.unlocked());
            region.is_some_and(|region| region.tighten())
        })
}

/// `void *mmap64(void *address, size_t len, int protection, int flags, int file, off64_t offset)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: Pointer,
    len: usize,
    protection: i32,
    flags: i32,
    file: i32,
    offset: i64,
) -> Pointer {
    // SAFETY: by the function's own contract.
    unsafe { mmap(address, len, protection, flags, file, offset) }
}

/// # Safety
/// As [`mmap`].
#[inline(never)]
unsafe fn map_large(address: Pointer, len: usize, protection: i32, flags: i32, file: i32, offset: i64) -> Pointer {
    let purpose = MAPPINGS.purpose(request(protection, flags), len);
    // SAFETY: by the function's own contract.
    let mut place = unsafe { next_map(address, len, protection, flags, file, offset) };
    if place == libc::MAP_FAILED {
        return place;
    }
    keeping_errno(|| {
        let better = policy::better_address(place as usize, len).filter(|_| address.is_null());
        if let (Purpose::Dense, Some(better)) = (purpose, better) {
            // SAFETY: the mapping was made above and nobody else knows of it. The address is a hint only.
            unsafe {
                if next_unmap(place, len) == 0 {
                    place = next_map(better as Pointer, len, protection, flags, file, offset);
                }
            }
        }
        if place == libc::MAP_FAILED {
            return;
        }
        if let Some(range) = pages(place as usize, len) {
            MAPPINGS.mapped(range, purpose);
            note_growth();
        }
    });
    place
}

/// `int munmap(void *address, size_t len)`
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: Pointer, len: usize) -> i32 {
    if len >= FROM.load(Ordering::Relaxed)
        && let Some(range) = pages(address as usize, len)
    {
        // Before the call: behind it, the addresses may be another thread's.
        MAPPINGS.unmapped(range);
    }
    // SAFETY: by the function's own contract.
    unsafe { next_unmap(address, len) }
}

/// `void *mremap(void *old, size_t old_len, size_t len, int flags, ... /* void *new */)`
///
/// # Safety
/// As in C. The last argument is only used where the flags say that there is one; without it, a register holds some number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(old: Pointer, old_len: usize, len: usize, flags: i32, new: Pointer) -> Pointer {
    // SAFETY: what is stored there has this signature; the rest by the function's own contract.
    let remap = || unsafe {
        transmute::<Pointer, next::Remap>(next::REMAP.load(Ordering::Relaxed))(old, old_len, len, flags, new)
    };
    let before = Errno::last();
    let from = pages(old as usize, old_len).filter(|_| old_len.max(len) >= FROM.load(Ordering::Relaxed));
    let known = from.and_then(|from| MAPPINGS.moving(from));
    let mut place = remap();
    if place == libc::MAP_FAILED
        && Errno::last() == Errno(libc::EFAULT)
        && keeping_errno(|| pages(old as usize, old_len).is_some_and(|range| MAPPINGS.unite(range)))
    {
        // A success leaves `errno` as it was before the call.
        before.set();
        place = remap();
    }
    if let Some(from) = from {
        let to = if place == libc::MAP_FAILED { Some(from) } else { pages(place as usize, len) };
        to.into_iter().for_each(|to| MAPPINGS.moved(to, known));
    }
    place
}

/// Eligible memory from which on a region is made that counts it and has it trimmed.
const MUCH: u64 = 64 << 20;
/// Bytes that were eligible when they were counted last.
static COUNTED: AtomicU64 = AtomicU64::new(0);
static LOOKED_AFTER: AtomicBool = AtomicBool::new(false);

/// Whether the calling thread may be in a handler of a signal that programs map memory in: of faults, timers, and their own
/// signals. Others are blocked for good by many threads (the JVM's block SIGQUIT).
fn in_handler() -> bool {
    use libc::{
        SIGALRM, SIGBUS, SIGFPE, SIGILL, SIGIO, SIGPROF, SIGSEGV, SIGTRAP, SIGURG, SIGUSR1, SIGUSR2, SIGVTALRM,
    };
    let usual =
        [SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGPROF, SIGALRM, SIGVTALRM, SIGUSR1, SIGUSR2, SIGURG, SIGIO];
    exit::any_blocked(usual.into_iter().chain(34..=64))
}

/// Counts what has become eligible, once it is much.
fn note_growth() {
    let now = MAPPINGS.eligible_bytes();
    if now < MUCH || now == COUNTED.load(Ordering::Relaxed) {
        return;
    }
    if !LOOKED_AFTER.load(Ordering::Relaxed) {
        // What follows takes locks that this very thread may hold where it was interrupted.
        if in_handler() || !HEAP.unlocked() || !state::own_process() || LOOKED_AFTER.swap(true, Ordering::Relaxed) {
            return;
        }
        state::look_after_mappings();
    }
    if let Some(region) = state::existing_region() {
        let before = COUNTED.swap(now, Ordering::Relaxed);
        region.stats().counters.mapped_eligible_bytes.add(now.saturating_sub(before));
    }
}

/// In a forked child, which counts anew.
///
/// # Safety
/// Called by the child's only thread.
pub unsafe fn after_fork() {
    // SAFETY: by the function's own contract.
    unsafe { MAPPINGS.after_fork() };
    COUNTED.store(0, Ordering::Relaxed);
    LOOKED_AFTER.store(false, Ordering::Relaxed);
}

/// After a change of protection that succeeded.
pub fn protected(address: Pointer, len: usize, protection: i32) {
    if len < FROM.load(Ordering::Relaxed) {
        return;
    }
    let Some(range) = pages(address as usize, len) else { return };
    match request(protection, 0) {
        Request { execute: true, .. } => MAPPINGS.unmapped(range),
        Request { read: true, write: true, .. } => keeping_errno(|| {
            MAPPINGS.made_accessible(range);
            note_growth();
        }),
        _ => {}
    }
}
