//! Memory that is made of huge pages from its first byte to its last.

use anyhow::{Result, ensure};
use pagecrew::sys::HUGE_PAGE_SIZE;
use pagecrew::sys::memory::{self, Advice, Protection, Range};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What the kernel is asked to back memory with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages, whatever the system's setting, unless that is `never`.
    Huge,
    /// Pages of 4 KiB.
    Small,
}

/// A private mapping that begins and ends where a huge page does. It is written to through shared references, as memory
/// that others look at is.
pub struct Huge {
    range: Range,
}

impl Huge {
    /// Fresh memory. `len` is a multiple of the size of a huge page.
    ///
    /// # Errors
    /// If there is no such memory.
    pub fn new(len: usize, pages: Pages) -> Result<Huge> {
        ensure!(len > 0 && len.is_multiple_of(HUGE_PAGE_SIZE), "{len} bytes are not whole huge pages");
        let mapped = memory::map(len + HUGE_PAGE_SIZE, Protection::ReadWrite)?;
        let start = mapped.next_multiple_of(HUGE_PAGE_SIZE);
        let range = Range { start, len };
        let before = Range { start: mapped, len: start - mapped };
        let behind = Range { start: range.end(), len: HUGE_PAGE_SIZE - before.len };
        for rest in [before, behind] {
            if rest.len > 0 {
                // SAFETY: the mapping is new, and this part of it will not be used.
                unsafe { memory::unmap(rest)? };
            }
        }
        let memory = Huge { range };
        let advice = match pages {
            Pages::Huge => Advice::HugePage,
            Pages::Small => Advice::NoHugePage,
        };
        // SAFETY: the advice does not change contents. A kernel without huge pages refuses, and there is nothing to ask
        // for.
        let _ = unsafe { memory::advise(range, advice) };
        Ok(memory)
    }

    /// Its first address.
    pub fn start(&self) -> usize {
        self.range.start
    }

    pub fn len(&self) -> usize {
        self.range.len
    }

    /// The byte at `offset`.
    pub fn read(&self, offset: usize) -> u8 {
        self.byte(offset).load(Ordering::Relaxed)
    }

    /// Makes the byte at `offset` `value`.
    pub fn write(&self, offset: usize, value: u8) {
        self.byte(offset).store(value, Ordering::Relaxed);
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        assert!(offset < self.range.len);
        // SAFETY: inside the mapping, which lives as long as `self` and is only ever used as atomic numbers.
        unsafe { &*((self.range.start + offset) as *const AtomicU8) }
    }

    /// The first `bytes` as numbers.
    pub fn words(&self, bytes: usize) -> &[AtomicU64] {
        assert!(bytes <= self.range.len);
        // SAFETY: as in `byte`; the mapping is aligned and zero at first, and every bit pattern is a number.
        unsafe { std::slice::from_raw_parts(self.range.start as *const AtomicU64, bytes / size_of::<AtomicU64>()) }
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody uses it after its owner. A part that stays mapped harms nobody.
        let _ = unsafe { memory::unmap(self.range) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_whole_huge_pages_and_zero() {
        for pages in [Pages::Huge, Pages::Small] {
            let memory = Huge::new(2 * HUGE_PAGE_SIZE, pages).unwrap();
            assert!(memory.start().is_multiple_of(HUGE_PAGE_SIZE) && memory.len() == 2 * HUGE_PAGE_SIZE);
            memory.write(memory.len() - 8, 1);
            let words = memory.words(memory.len());
            assert_eq!((words[0].load(Ordering::Relaxed), words[words.len() - 1].load(Ordering::Relaxed)), (0, 1));
        }
        assert!(Huge::new(4096, Pages::Small).is_err());
    }
}
