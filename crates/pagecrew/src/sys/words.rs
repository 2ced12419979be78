//! Arrays of atomic words that cost address space only, until a word is written.

use super::memory::{self, Advice, Protection, Range};
use super::{Errno, PAGE_SIZE};
use std::sync::atomic::AtomicU64;

/// An array of atomic words, all zero at first. Pages of it that were never written have no memory.
#[derive(Debug)]
pub struct Words {
    range: Range,
    count: usize,
}

impl Words {
    /// An array of `count` words.
    ///
    /// # Errors
    /// Those of [`memory::map`].
    pub fn new(count: usize) -> Result<Words, Errno> {
        let len = (count * size_of::<AtomicU64>()).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE);
        let range = Range { start: memory::map(len, Protection::ReadWrite)?, len };
        // One word written must not cost 2 MiB, whatever the system's setting is.
        // SAFETY: this kind of advice changes no contents.
        let _ = unsafe { memory::advise(range, Advice::NoHugePage) };
        Ok(Words { range, count })
    }

    /// Where the array lies.
    pub fn range(&self) -> Range {
        self.range
    }

    /// The word at `index`.
    ///
    /// # Panics
    /// If there is no such word.
    #[inline(always)]
    pub fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: the mapping holds `count` words and lives as long as `self`; zero is a valid word.
        unsafe { &*(self.range.start as *const AtomicU64).add(index) }
    }

    /// Makes the words from `index` on read-only as far as they fill whole pages: the array is not used there any more, and `mlockall`
    /// would otherwise fill it with pages.
    pub fn close_from(&self, index: usize) {
        let start = (self.range.start + index * size_of::<AtomicU64>()).next_multiple_of(PAGE_SIZE);
        if start < self.range.end() {
            let rest = Range { start, len: self.range.end() - start };
            // SAFETY: nobody uses the words there any more, by the caller's word.
            let _ = unsafe { memory::protect(rest, Protection::Read) };
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the owner of the array goes away, and no reference outlives it.
        let _ = unsafe { memory::unmap(self.range) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn words_are_zero_until_written_and_cost_only_what_is_written() {
        let words = Words::new(1 << 30).unwrap();
        assert_eq!(words.at((1 << 30) - 1).load(Ordering::Relaxed), 0);
        words.at(12_345_678).store(7, Ordering::Relaxed);
        assert_eq!(words.at(12_345_678).load(Ordering::Relaxed), 7);
        let resident = crate::sys::pagemap::bytes_of(words.range, crate::sys::pagemap::Category::Present).unwrap();
        assert!(resident <= 2 * PAGE_SIZE, "{resident}");
        words.close_from(12_400_000);
        assert_eq!(words.at(1 << 29).load(Ordering::Relaxed), 0);
    }

    #[test]
    #[should_panic(expected = "word 5 of 5")]
    fn a_word_behind_the_end_is_refused() {
        Words::new(5).unwrap().at(5);
    }
}
