//! Arrays of atomic words that cost address space only, until a word is written.

use super::memory::{self, Advice, Protection, Range};
use super::{Errno, PAGE_SIZE};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// An array of atomic words, all zero at first. Pages of it that were never written have no memory.
#[derive(Debug)]
pub struct Words {
    start: usize,
    /// Words that there are.
    count: AtomicUsize,
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
        Ok(Words { start: range.start, count: AtomicUsize::new(count) })
    }

    /// Where the array lies.
    pub fn range(&self) -> Range {
        let len = self.count.load(Ordering::Relaxed) * size_of::<AtomicU64>();
        Range { start: self.start, len: len.next_multiple_of(PAGE_SIZE).max(PAGE_SIZE) }
    }

    /// The word at `index`, if there is one.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: the mapping holds `count` words and lives as long as `self`; zero is a valid word.
        (index < self.count.load(Ordering::Relaxed)).then(|| unsafe { &*(self.start as *const AtomicU64).add(index) })
    }

    /// The word at `index`.
    ///
    /// # Panics
    /// If there is no such word.
    #[inline(always)]
    pub fn at(&self, index: usize) -> &AtomicU64 {
        self.get(index).unwrap_or_else(|| panic!("there is no word {index}"))
    }

    /// Gives the memory of the words in `[from, to)` back, which nobody needs, as far as they fill whole pages: they are zero then.
    pub fn forget(&self, from: usize, to: usize) {
        let address = |index: usize| self.start + index * size_of::<AtomicU64>();
        let (start, end) = (address(from).next_multiple_of(PAGE_SIZE), address(to) & !(PAGE_SIZE - 1));
        if start < end && end <= self.range().end() {
            // SAFETY: nobody needs what the words hold, by the caller's word, and they stay mapped.
            let _ = unsafe { memory::discard(Range { start, len: end - start }) };
        }
    }

    /// Gives the words from `index` on up: the array ends there.
    ///
    /// # Safety
    /// Nobody uses a word there at this moment.
    pub unsafe fn close_from(&self, index: usize) {
        let before = self.range();
        if index < self.count.load(Ordering::Relaxed) {
            self.count.store(index, Ordering::Relaxed);
            let end = self.range().end();
            if end < before.end() {
                // SAFETY: the pages hold only words that nobody uses, by the function's own contract.
                let _ = unsafe { memory::unmap(Range { start: end, len: before.end() - end }) };
            }
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the owner of the array goes away, and no reference outlives it.
        let _ = unsafe { memory::unmap(self.range()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_until_written_and_cost_only_what_is_written() {
        let words = Words::new(1 << 30).unwrap();
        assert_eq!(words.at((1 << 30) - 1).load(Ordering::Relaxed), 0);
        words.at(12_345_678).store(7, Ordering::Relaxed);
        assert_eq!(words.at(12_345_678).load(Ordering::Relaxed), 7);
        let resident = crate::sys::pagemap::bytes_of(words.range(), crate::sys::pagemap::Category::Present).unwrap();
        assert!(resident <= 2 * PAGE_SIZE, "{resident}");
        // SAFETY: nobody else knows of the words.
        unsafe { words.close_from(12_345_679) };
        assert!(words.get(12_345_678).is_some() && words.get(12_345_679).is_none());
        assert_eq!(words.range().len, (12_345_679 * 8usize).next_multiple_of(PAGE_SIZE));
    }

    #[test]
    #[should_panic(expected = "no word 5")]
    fn a_word_behind_the_end_is_refused() {
        Words::new(5).unwrap().at(5);
    }
}
