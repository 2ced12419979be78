//! Memory to try things on.

use pagecrew::sys::Errno;
use pagecrew::sys::memory::{self, Advice, Protection, Range};

/// A private anonymous mapping of its own, gone when dropped.
pub struct Scratch(Range);

impl Scratch {
    /// Maps `len` bytes, readable and writable.
    pub fn new(len: usize) -> Result<Scratch, Errno> {
        Ok(Scratch(Range { start: memory::map(len, Protection::ReadWrite)?, len }))
    }

    /// The mapping.
    pub fn range(&self) -> Range {
        self.0
    }

    /// Gives advice about all of it.
    pub fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: nobody else knows the mapping, and nobody needs its contents.
        unsafe { memory::advise(self.0, advice) }
    }

    /// Writes the byte at `offset`.
    pub fn write(&mut self, offset: usize, byte: u8) {
        assert!(offset < self.0.len, "outside the mapping");
        // SAFETY: inside a mapping that is readable, writable and ours alone.
        unsafe { ((self.0.start + offset) as *mut u8).write_volatile(byte) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: nobody else knows the mapping.
        let _ = unsafe { memory::unmap(self.0) };
    }
}
