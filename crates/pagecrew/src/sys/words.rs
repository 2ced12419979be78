//! Arrays of atomic words that cost address space only, until a word is written.

use super::memory::{self, Advice, Protection, Range};
use super::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// An array of atomic words, all zero at first, or a part of one. Pages of it that were never written have no memory.
#[derive(Debug, Clone)]
pub struct Words {
    start: usize,
    count: usize,
    /// Goes with the last part.
    mapping: Arc<Mapping>,
}

#[derive(Debug)]
struct Mapping(Range);

impl Words {
    /// An array of `count` words.
    ///
    /// # Errors
    /// Those of [`memory::map`].
    pub fn new(count: usize) -> Result<Words, Errno> {
        let len = Self::len_of(count);
        let range = Range { start: memory::map(len, Protection::ReadWrite)?, len };
        // One word written must not cost 2 MiB, whatever the system's setting is.
        // SAFETY: this kind of advice changes no contents.
        let _ = unsafe { memory::advise(range, Advice::NoHugePage) };
        Ok(Words { start: range.start, count, mapping: Arc::new(Mapping(range)) })
    }

    /// The `count` words from `first` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn part(&self, first: usize, count: usize) -> Words {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.count));
        Words { start: self.start + first * size_of::<AtomicU64>(), count, mapping: self.mapping.clone() }
    }

    /// How many words it has.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.count
    }

    fn len_of(count: usize) -> usize {
        (count * size_of::<AtomicU64>()).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE)
    }

    /// Where the array lies.
    pub fn range(&self) -> Range {
        Range { start: self.start, len: Self::len_of(self.count) }
    }

    /// The word at `index`, if there is one.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: the mapping holds `count` words from `start` on and lives as long as `self`; zero is a valid word.
        (index < self.count).then(|| unsafe { &*(self.start as *const AtomicU64).add(index) })
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
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: no part of the array is left, and no reference outlives its part.
        let _ = unsafe { memory::unmap(self.0) };
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
        let resident = crate::sys::pagemap::bytes_of(words.range(), crate::sys::pagemap::Category::Present).unwrap();
        assert!(resident <= 2 * PAGE_SIZE, "{resident}");
        let part = words.part(12_345_600, 100);
        assert_eq!((part.at(78).load(Ordering::Relaxed), part.get(100).is_none()), (7, true));
        drop(words);
        assert_eq!(part.at(78).load(Ordering::Relaxed), 7);
        part.forget(0, 100);
        assert_eq!(part.at(78).load(Ordering::Relaxed), 7, "half a page is left alone");
    }

    #[test]
    #[should_panic(expected = "no word 5")]
    fn a_word_behind_the_end_is_refused() {
        Words::new(5).unwrap().at(5);
    }
}
