//! Where glibc (2.35 and later) keeps the calling thread's registered restartable-sequence area (kernel 4.18).

use super::Errno;
use std::ffi::c_void;
use std::sync::atomic::{AtomicIsize, Ordering};

/// Offset of the field `rseq_cs` in the kernel's `struct rseq`, in bytes.
pub const CRITICAL_SECTION: usize = 8;

/// Not looked up yet.
const UNKNOWN: isize = isize::MIN;
/// Looked up: this process has none.
const ABSENT: isize = isize::MIN + 1;

/// Distance of the area from the thread pointer; the same in every thread.
static OFFSET: AtomicIsize = AtomicIsize::new(UNKNOWN);

fn look_up() -> isize {
    // SAFETY: dlsym with constant names; the symbols are variables of these types since glibc 2.35, and read-only after start-up.
    unsafe {
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) as *const isize;
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()) as *const u32;
        if offset.is_null() || size.is_null() || *size == 0 { ABSENT } else { *offset }
    }
}

/// Finds out where the area is, which calls `dlsym` the first time. Later calls of [`area`] only read the answer.
///
/// # Errors
/// `ENOSYS` where glibc is older than 2.35, was told not to register (`GLIBC_TUNABLES`), or the kernel has no rseq.
pub fn prepare() -> Result<(), Errno> {
    if OFFSET.load(Ordering::Relaxed) == UNKNOWN {
        OFFSET.store(look_up(), Ordering::Relaxed);
    }
    area().map(drop).ok_or(Errno(libc::ENOSYS))
}

/// The calling thread's area, a `struct rseq` registered with the kernel; `None` before [`prepare`] and where there is none.
pub fn area() -> Option<*mut c_void> {
    offset().map(at)
}

/// Distance of the area from the thread pointer, the same in every thread; `None` as for [`area`].
pub fn offset() -> Option<isize> {
    match OFFSET.load(Ordering::Relaxed) {
        UNKNOWN | ABSENT => None,
        offset => Some(offset),
    }
}

/// The calling thread's area, by what [`offset`] said.
#[inline(always)]
pub fn at(offset: isize) -> *mut c_void {
    thread_pointer().wrapping_byte_offset(offset)
}

/// The CPU that the calling thread runs on at this moment; a huge number in a thread that isn't registered.
///
/// # Safety
/// `offset` is what [`offset`] said.
#[inline(always)]
pub unsafe fn cpu(offset: isize) -> u32 {
    // SAFETY: the area has the kernel's `cpu_id` in its second word.
    unsafe { at(offset).cast::<u32>().add(1).read_volatile() }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn thread_pointer() -> *mut c_void {
    let pointer: *mut c_void;
    // SAFETY: on x86-64 Linux, %fs:0 holds the address of the thread control block itself (the psABI's TLS variant II).
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags)) };
    pointer
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn thread_pointer() -> *mut c_void {
    let pointer: *mut c_void;
    // SAFETY: reading the thread pointer register has no effect.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags)) };
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_area_belongs_to_the_calling_thread() {
        if prepare().is_err() {
            return;
        }
        // The field `cpu_id` (offset 4) of a registered area is a CPU of this machine.
        let here = area().unwrap();
        // SAFETY: a registered area has at least 20 bytes.
        let cpu = unsafe { here.cast::<u32>().add(1).read_volatile() };
        assert!(cpu < 1 << 16, "cpu {cpu}");
        let here = here as usize;
        assert_ne!(std::thread::spawn(|| area().unwrap() as usize).join().unwrap(), here);
    }
}
