//! A fixed number of items that begin as zero bytes, in a mapping of their own: what is never looked at takes no memory.

use crate::sys::memory::{self, Protection, Range};
use crate::sys::{Errno, PAGE_SIZE, round_up};
use std::ops::Deref;
use std::ptr::NonNull;

/// Items that all-zero bytes are a valid value of.
///
/// # Safety
/// All-zero bytes are a valid value, there is nothing to drop, and the alignment is at most a page.
pub(super) unsafe trait Zeroable {}

// SAFETY: an integer.
unsafe impl Zeroable for std::sync::atomic::AtomicU8 {}
// SAFETY: a pointer, which may be null.
#[cfg(debug_assertions)]
unsafe impl<T> Zeroable for std::sync::atomic::AtomicPtr<T> {}
// SAFETY: integers.
unsafe impl Zeroable for super::area::Area {}
// SAFETY: integers.
unsafe impl Zeroable for super::tree::Tree {}

/// See the module.
pub(super) struct Table<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: a table gives out shared references only, so it may go where `&[T]` and `T` may.
unsafe impl<T: Send + Sync> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Table<T> {}

impl<T: Zeroable> Table<T> {
    /// A table of `len` items.
    pub fn new(len: usize) -> Result<Table<T>, Errno> {
        let start = memory::map(Self::bytes(len)?, Protection::ReadWrite)?;
        Ok(Table { start: NonNull::new(start as *mut T).expect("nothing is mapped at address 0"), len })
    }

    fn bytes(len: usize) -> Result<usize, Errno> {
        let bytes = len.max(1).checked_mul(size_of::<T>()).and_then(|bytes| round_up(bytes, PAGE_SIZE));
        bytes.ok_or(Errno(libc::ENOMEM))
    }

    /// The bytes that it takes if all of it is looked at.
    pub fn size(&self) -> usize {
        Self::bytes(self.len).expect("it was mapped")
    }
}

impl<T> Deref for Table<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` items that began as zero bytes, which `Zeroable` allows, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        let len = (self.len.max(1) * size_of::<T>()).next_multiple_of(PAGE_SIZE);
        // SAFETY: references into the table don't outlive it.
        let _ = unsafe { memory::unmap(Range { start: self.start.as_ptr() as usize, len }) };
    }
}
