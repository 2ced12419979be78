//! The malloc family.
//!
//! `errno` is only changed where the standard says so: a success keeps it, and `free` always does.

use crate::heap::limited_address_space;
use crate::state::{self, THRESHOLD, ours};
use crate::{libc_blocks, next, thresholds};
use pagecrew::region::{Cacheable, PointerError, Region, ResizeError, TakenSpan, Uncached, colour};
use pagecrew::sys::{Errno, PAGE_SIZE, round_up, thread};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::Ordering;

type Pointer = *mut c_void;

/// Ends the program with one clear line, as glibc does for a pointer that can't be freed.
#[cold]
fn die(function: &str, error: PointerError) -> ! {
    use std::io::Write;
    let mut line = [0u8; 160];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "pagecrew: {function}: invalid pointer: {error}");
    let written = 160 - rest.len();
    // SAFETY: writes part of a local buffer; abort takes nothing.
    unsafe {
        libc::write(2, line.as_ptr().cast(), written);
        libc::abort()
    }
}

/// Runs `body` and keeps `errno` as it was.
fn keeping_errno<T>(body: impl FnOnce() -> T) -> T {
    let errno = Errno::last();
    let result = body();
    errno.set();
    result
}

/// A span of the region; `None` where there is none to be had, and then the program's own malloc is asked.
fn span(size: usize, align: usize, zeroed: bool) -> Option<TakenSpan> {
    keeping_errno(|| {
        let region = state::region()?;
        let span = region.allocate_span(size, align, zeroed);
        if span.is_err() {
            region.stats().counters.fallbacks.add(1);
        }
        span.ok()
    })
}

/// Where a block of `size` bytes begins in its span.
#[inline(always)]
fn block(span: TakenSpan, size: usize) -> Pointer {
    let begin = if colour::leaves_room(span.len, size) { colour::begin(span.start) } else { span.start };
    begin.as_ptr().cast()
}

fn large(size: usize) -> bool {
    size >= THRESHOLD.load(Ordering::Relaxed)
}

extern "C" fn malloc_large(size: usize) -> Pointer {
    // SAFETY: these caches have restartable sequences.
    match state::caches().and_then(|caches| unsafe { caches.take(size) }) {
        Some(span) => block(span, size),
        None => malloc_uncached(size),
    }
}

#[cold]
#[inline(never)]
fn malloc_uncached(size: usize) -> Pointer {
    match span(size, 1, false) {
        Some(span) => block(span, size),
        // SAFETY: any size may be asked for.
        None => from_next(|| unsafe { next::malloc(size) }),
    }
}

/// Asks the program's own malloc for something large. If that fails, the unused part of the arena may be what is in the way (under
/// `RLIMIT_AS`): it is given up and the request made once more. Not every malloc sets `errno` for a size that no memory could
/// have; a failure here says why.
fn from_next(ask: impl Fn() -> Pointer) -> Pointer {
    let mut pointer = ask();
    if pointer.is_null()
        && let Some(region) = state::existing_region().filter(|_| limited_address_space())
        && region.tighten()
    {
        pointer = ask();
    }
    if pointer.is_null() {
        Errno(libc::ENOMEM).set();
    }
    pointer
}

// The two functions that a program calls most, for requests that are not ours: a comparison and a jump each. Written out because the
// compiler loads every atomic into a register first, which makes a pair of small calls a tenth slower.

/// `void *malloc(size_t size)`
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub extern "C" fn malloc(size: usize) -> Pointer {
    std::arch::naked_asm!(
        "cmp rdi, qword ptr [rip + {threshold}]",
        "jae {large}",
        "jmp qword ptr [rip + {next}]",
        // Aligns the section, and with it the function, which is alone in it: no instruction crosses a line of the decoder.
        ".p2align 5",
        threshold = sym THRESHOLD,
        large = sym malloc_large,
        next = sym next::address::malloc,
    )
}

/// `void free(void *pointer)`
///
/// # Safety
/// As in C: the pointer is null or came from this family, and is not used any more.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn free(pointer: Pointer) {
    std::arch::naked_asm!(
        "mov rsi, rdi",
        "sub rsi, qword ptr [rip + {start}]",
        "cmp rsi, qword ptr [rip + {len}]",
        "jb {ours}",
        "jmp qword ptr [rip + {next}]",
        ".p2align 5",
        start = sym state::ARENA_START,
        len = sym state::ARENA_LEN,
        ours = sym free_span,
        next = sym next::address::free,
    )
}

/// `void *malloc(size_t size)`
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> Pointer {
    if large(size) {
        return malloc_large(size);
    }
    // SAFETY: any size may be asked for.
    unsafe { next::malloc(size) }
}

/// `void free(void *pointer)`
///
/// # Safety
/// As in C: the pointer is null or came from this family, and is not used any more.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: Pointer) {
    if ours(pointer as usize) {
        return free_span(pointer, pointer as usize - state::ARENA_START.load(Ordering::Relaxed));
    }
    // SAFETY: by the function's own contract it is the next one's.
    unsafe { next::free(pointer) }
}

#[cold]
#[inline(never)]
fn calloc_rare(count: usize, size: usize) -> Pointer {
    let Some(total) = count.checked_mul(size) else {
        Errno(libc::ENOMEM).set();
        return null_mut();
    };
    let pointer = if thread::spawning() {
        libc_blocks::allocate(total)
    } else if large(total) {
        span(total, 1, true).map_or(null_mut(), |span| block(span, total))
    } else {
        null_mut()
    };
    // SAFETY: any numbers may be asked for.
    if pointer.is_null() { from_next(|| unsafe { next::calloc(count, size) }) } else { pointer }
}

/// `void *calloc(size_t count, size_t size)`
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> Pointer {
    match count.checked_mul(size) {
        // SAFETY: any numbers may be asked for.
        Some(total) if !large(total) && !thread::spawning() => unsafe { next::calloc(count, size) },
        _ => calloc_rare(count, size),
    }
}

/// Takes back what lies at `offset` in the arena.
extern "C" fn free_span(pointer: Pointer, offset: usize) {
    let Some(caches) = state::caches() else { return free_as_it_is(pointer) };
    // What libc has for a helper thread lies in a span that no cache takes.
    // SAFETY: the program gives the memory back.
    match unsafe { caches.put(colour::span_of(offset)) } {
        Ok(()) => {}
        // A function each: what is to be said to it is not made ready where nobody calls it.
        Err(Uncached::AsItWas) => free_as_it_is(pointer),
        Err(Uncached::Retired(span)) => free_retired(pointer, span),
        Err(Uncached::LookAfter(span)) => look_after(pointer, span),
    }
}

#[cold]
#[inline(never)]
fn free_as_it_is(pointer: Pointer) {
    free_uncached(pointer, Uncached::AsItWas);
}

#[cold]
#[inline(never)]
fn free_retired(pointer: Pointer, span: Cacheable) {
    free_uncached(pointer, Uncached::Retired(span));
}

#[cold]
#[inline(never)]
fn look_after(pointer: Pointer, span: Cacheable) {
    free_uncached(pointer, Uncached::LookAfter(span));
}

fn free_uncached(pointer: Pointer, uncached: Uncached) {
    let (Some(region), Some(span)) = (state::existing_region(), span_of(pointer)) else { return };
    if libc_blocks::release(pointer) {
        return;
    }
    // SAFETY: as in `free_span`. Where the arena was cut short, the program's own malloc may have memory.
    keeping_errno(|| unsafe {
        match region.free_uncached(span, uncached) {
            Ok(size) => thresholds::freed(size),
            Err(PointerError::Foreign(_)) => next::free(pointer),
            Err(error) => die("free()", error),
        }
    });
}

/// The span that the block at `pointer` lies in, if it is one of ours.
fn span_of(pointer: Pointer) -> Option<NonNull<u8>> {
    NonNull::new(pointer.cast::<u8>().map_addr(colour::span_of))
}

/// Copies what a block holds to a new one of the program's own malloc, and frees it.
///
/// # Safety
/// The block lies in `span`, a span of the region, and is not used any more if this succeeds.
unsafe fn move_down(region: &Region, pointer: Pointer, span: NonNull<u8>, size: usize) -> Pointer {
    // SAFETY: any size may be asked for.
    let new = unsafe { next::malloc(size) };
    if !new.is_null() {
        let usable = region.usable_size(span).unwrap_or_else(|error| die("realloc()", error));
        let held = usable - colour::of(pointer as usize);
        // SAFETY: the new block has `size` bytes, the old one `held`, and they are different.
        unsafe {
            std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), new.cast(), held.min(size));
            if let Err(error) = region.free(span) {
                die("realloc()", error);
            }
        }
    }
    if new.is_null() {
        Errno(libc::ENOMEM).set();
    }
    new
}

/// # Safety
/// As [`realloc`]; the pointer is one of ours.
#[cold]
#[inline(never)]
unsafe fn realloc_span(pointer: Pointer, size: usize) -> Pointer {
    let (Some(region), Some(span)) = (state::existing_region(), span_of(pointer)) else {
        return null_mut();
    };
    if libc_blocks::contains(pointer) {
        let new = malloc(size);
        if !new.is_null() {
            // SAFETY: both blocks are at least this long, and the old one is given back.
            unsafe { std::ptr::copy_nonoverlapping(pointer, new, size.min(libc_blocks::size())) };
            libc_blocks::release(pointer);
        }
        return new;
    }
    // SAFETY: by the function's own contract.
    unsafe {
        if let Err(PointerError::Foreign(_)) = region.usable_size(span) {
            return next::realloc(pointer, size);
        }
        if size == 0 {
            free(pointer);
            return null_mut();
        }
        let errno = Errno::last();
        // Its pages may move, but what lies in them stays where it is in its page.
        let colour = colour::of(pointer as usize);
        // A little below the threshold a span stays one, so that a size that goes up and down does not copy each time.
        if size >= THRESHOLD.load(Ordering::Relaxed) / 2 {
            match region.resize(span, size, colour) {
                Ok(new) => {
                    errno.set();
                    return new.as_ptr().add(colour).cast();
                }
                Err(ResizeError::Pointer(error)) => die("realloc()", error),
                Err(ResizeError::Memory(_)) => region.stats().counters.fallbacks.add(1),
            }
        } else if let Err(error) = region.usable_size(span) {
            die("realloc()", error);
        }
        let new = move_down(region, pointer, span, size);
        if !new.is_null() {
            errno.set();
        }
        new
    }
}

/// A block of the program's own malloc that grows past the threshold becomes a span.
///
/// # Safety
/// As [`realloc`]; the pointer is the next one's.
#[cold]
#[inline(never)]
unsafe fn realloc_up(pointer: Pointer, size: usize) -> Pointer {
    // SAFETY: by the function's own contract.
    unsafe {
        let held = next::malloc_usable_size(pointer);
        // One that is large already was a fallback or comes from before this library; its owner may move it without copying.
        if held == 0 || held >= size || large(held) {
            return from_next(|| next::realloc(pointer, size));
        }
        let Some(new) = span(size, 1, false).map(|span| block(span, size)) else {
            return from_next(|| next::realloc(pointer, size));
        };
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), new.cast(), held);
        next::free(pointer);
        new
    }
}

/// `void *realloc(void *pointer, size_t size)`
///
/// # Safety
/// As in C: the pointer is null or came from this family.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: Pointer, size: usize) -> Pointer {
    // SAFETY: by the function's own contract, each goes to who it belongs to.
    unsafe {
        if ours(pointer as usize) {
            realloc_span(pointer, size)
        } else if pointer.is_null() {
            malloc(size)
        } else if large(size) {
            realloc_up(pointer, size)
        } else {
            next::realloc(pointer, size)
        }
    }
}

/// `void *reallocarray(void *pointer, size_t count, size_t size)`
///
/// # Safety
/// As [`realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(pointer: Pointer, count: usize, size: usize) -> Pointer {
    match count.checked_mul(size) {
        // SAFETY: by the function's own contract.
        Some(total) => unsafe { realloc(pointer, total) },
        None => {
            Errno(libc::ENOMEM).set();
            null_mut()
        }
    }
}

/// A span for an aligned request; null where it is not ours to serve.
fn aligned_span(align: usize, size: usize) -> Pointer {
    if large(size) && align.is_power_of_two() && align <= pagecrew::region::MAX_ALIGN {
        // With an alignment of its own it begins where the span does.
        span(size, align, false).map_or(null_mut(), |span| span.start.as_ptr().cast())
    } else {
        null_mut()
    }
}

/// `void *memalign(size_t align, size_t size)`
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> Pointer {
    let pointer = aligned_span(align, size);
    // SAFETY: any numbers may be asked for.
    if pointer.is_null() { from_next(|| unsafe { next::memalign(align, size) }) } else { pointer }
}

/// `void *aligned_alloc(size_t align, size_t size)`
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> Pointer {
    let pointer = aligned_span(align, size);
    // SAFETY: any numbers may be asked for.
    if pointer.is_null() { from_next(|| unsafe { next::aligned_alloc(align, size) }) } else { pointer }
}

/// `int posix_memalign(void **place, size_t align, size_t size)`
///
/// # Safety
/// As in C: `place` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(place: *mut Pointer, align: usize, size: usize) -> i32 {
    let pointer = if align.is_multiple_of(size_of::<Pointer>()) { aligned_span(align, size) } else { null_mut() };
    // SAFETY: by the function's own contract.
    unsafe {
        if pointer.is_null() {
            return next::posix_memalign(place, align, size);
        }
        *place = pointer;
    }
    0
}

/// `void *valloc(size_t size)`
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> Pointer {
    memalign(PAGE_SIZE, size)
}

/// `void *pvalloc(size_t size)`: as `valloc`, with the size rounded up to whole pages.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> Pointer {
    match round_up(size.max(1), PAGE_SIZE) {
        Some(whole) => memalign(PAGE_SIZE, whole),
        None => {
            Errno(libc::ENOMEM).set();
            null_mut()
        }
    }
}

/// `size_t malloc_usable_size(void *pointer)`
///
/// # Safety
/// As in C: the pointer is null or came from this family.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: Pointer) -> usize {
    if let (true, Some(region), Some(span)) = (ours(pointer as usize), state::existing_region(), span_of(pointer)) {
        match region.usable_size(span) {
            Ok(usable) => return usable - colour::of(pointer as usize),
            Err(PointerError::Foreign(_)) => {}
            Err(error) => die("malloc_usable_size()", error),
        }
    }
    // SAFETY: by the function's own contract.
    unsafe { next::malloc_usable_size(pointer) }
}

/// `void free_sized(void *pointer, size_t size)` (C23)
///
/// # Safety
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(pointer: Pointer, _size: usize) {
    // SAFETY: by the function's own contract.
    unsafe { free(pointer) }
}

/// `void free_aligned_sized(void *pointer, size_t align, size_t size)` (C23)
///
/// # Safety
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(pointer: Pointer, _align: usize, _size: usize) {
    // SAFETY: by the function's own contract.
    unsafe { free(pointer) }
}

/// `int malloc_trim(size_t pad)`: what is retained goes back too.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(pad: usize) -> i32 {
    let retained = state::existing_region().is_some_and(|region| {
        let states = region.snapshot().bytes();
        region.trim();
        states.retained_dirty + states.retained_zeroed > 0
    });
    // SAFETY: any number may be given.
    let released = unsafe { next::malloc_trim(pad) };
    i32::from(retained || released == 1)
}
