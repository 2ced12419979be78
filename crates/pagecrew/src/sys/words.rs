//! Arrays of atomic words that cost address space only, until a word is written.

use super::memory::{self, Advice, Protection, Range};
use super::{Errno, PAGE_SIZE};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// An array of atomic words, all zero at first, or a part of one. Pages of it that were never written have no memory.
#[derive(Debug)]
pub struct Words {
    start: usize,
    /// Words that there are; fewer once the end was given up.
    count: AtomicUsize,
    /// Goes with the last part.
    mapping: Arc<Mapping>,
}

/// What is mapped for an array.
#[derive(Debug)]
struct Mapping(Mutex<Vec<Range>>);

impl Words {
    /// An array of `count` words.
    ///
    /// # Errors
    /// Those of [`memory::map`].
    pub fn new(count: usize) -> Result<Words, Errno> {
        Self::with(count, Protection::ReadWrite)
    }

    /// An array of `count` words that can only be read until they are [opened](Words::open). Those that were not count neither against
    /// overcommit nor `RLIMIT_DATA`.
    ///
    /// # Errors
    /// Those of [`memory::map`].
    pub fn closed(count: usize) -> Result<Words, Errno> {
        Self::with(count, Protection::Read)
    }

    fn with(count: usize, protection: Protection) -> Result<Words, Errno> {
        let len = Self::len_of(count);
        let range = Range { start: memory::map(len, protection)?, len };
        // One word written must not cost 2 MiB, whatever the system's setting is.
        // SAFETY: this kind of advice changes no contents.
        let _ = unsafe { memory::advise(range, Advice::NoHugePage) };
        let mapping = Arc::new(Mapping(Mutex::new(vec![range])));
        Ok(Words { start: range.start, count: AtomicUsize::new(count), mapping })
    }

    /// The `count` words from `first` on: what is written to one is read in the other.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn part(&self, first: usize, count: usize) -> Words {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.len()));
        let start = self.start + first * size_of::<AtomicU64>();
        Words { start, count: AtomicUsize::new(count), mapping: self.mapping.clone() }
    }

    /// How many words it has.
    #[allow(clippy::len_without_is_empty)]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn len_of(count: usize) -> usize {
        (count * size_of::<AtomicU64>()).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE)
    }

    /// Where the array lies.
    pub fn range(&self) -> Range {
        Range { start: self.start, len: Self::len_of(self.len()) }
    }

    /// Makes the words in `[from, to)` writable, and what shares their pages.
    ///
    /// # Errors
    /// `ENOMEM` where that is more than may be written to; nothing has changed then.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn open(&self, from: usize, to: usize) -> Result<(), Errno> {
        assert!(from <= to && to <= self.len());
        let address = |index: usize| self.start + index * size_of::<AtomicU64>();
        let (start, end) = (address(from) & !(PAGE_SIZE - 1), address(to).next_multiple_of(PAGE_SIZE));
        // SAFETY: more rights on words harm nobody, and they stay mapped.
        unsafe { memory::protect(Range { start, len: end - start }, Protection::ReadWrite) }
    }

    /// The word at `index`, if there is one.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.len() {
            return None;
        }
        // SAFETY: the mapping holds `count` words from `start` on, lives as long as `self`, and is not at address 0; zero is a valid word.
        unsafe {
            std::hint::assert_unchecked(self.start != 0);
            Some(&*(self.start as *const AtomicU64).add(index))
        }
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

    /// Gives the words from `index` on up, address space included: the array ends there.
    ///
    /// # Safety
    /// Nobody uses a word there from now on, in this array or in one that it is a part of or that is a part of it.
    pub unsafe fn close_from(&self, index: usize) {
        let before = self.range();
        if index >= self.len() {
            return;
        }
        self.count.store(index, Ordering::Relaxed);
        let gone = Range { start: self.range().end(), len: before.end() - self.range().end() };
        // A part that ends within a page shares it with the next one.
        let gone = Range { start: gone.start, len: gone.len & !(PAGE_SIZE - 1) };
        let mut kept = self.mapping.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = kept.iter().position(|range| range.start <= gone.start && gone.end() <= range.end()) else {
            return;
        };
        // SAFETY: the pages hold only words that nobody uses, by the function's own contract.
        if gone.len > 0 && unsafe { memory::unmap(gone) }.is_ok() {
            let range = kept.swap_remove(at);
            let rest = [
                Range { start: range.start, len: gone.start - range.start },
                Range { start: gone.end(), len: range.end() - gone.end() },
            ];
            kept.extend(rest.into_iter().filter(|range| range.len > 0));
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for &range in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).iter() {
            // SAFETY: no part of the array is left, and no reference outlives its part.
            let _ = unsafe { memory::unmap(range) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_zero_until_written_and_cost_only_what_is_written() {
        let words = Words::new(1 << 27).unwrap();
        assert_eq!(words.at((1 << 27) - 1).load(Ordering::Relaxed), 0);
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
    fn the_end_of_a_part_is_given_up_and_its_neighbours_stay() {
        let words = Words::new(4096).unwrap();
        let parts = [0, 1024, 2048, 3072].map(|first| words.part(first, 1024));
        words.at(3072).store(7, Ordering::Relaxed);
        let behind = parts[1].range().start + PAGE_SIZE;
        // SAFETY: nobody else knows of the words.
        unsafe { parts[1].close_from(100) };
        assert_eq!(
            (parts[1].get(99).is_some(), parts[1].get(100).is_none(), parts[1].range().len),
            (true, true, PAGE_SIZE)
        );
        let gone = Range { start: behind, len: PAGE_SIZE };
        assert!(memory::residence(gone, &mut [0]).is_err(), "still mapped");
        assert_eq!(parts[3].at(0).load(Ordering::Relaxed), 7);
        parts[2].at(0).store(8, Ordering::Relaxed);
        // What somebody else maps there is his, also when the words go.
        // SAFETY: nobody else knows of the address, where nothing is mapped.
        unsafe { memory::map_fresh(gone, Protection::ReadWrite) }.unwrap();
        drop((words, parts));
        assert!(memory::residence(gone, &mut [0]).is_ok());
    }

    #[test]
    fn closed_words_read_as_zero_and_can_be_written_once_they_are_open() {
        let words = Words::closed(1 << 20).unwrap();
        let part = words.part(1 << 19, 1 << 10);
        assert_eq!(part.at(1000).load(Ordering::Relaxed), 0);
        part.open(100, 200).unwrap();
        part.at(150).store(7, Ordering::Relaxed);
        assert_eq!(words.at((1 << 19) + 150).load(Ordering::Relaxed), 7);
        let protection_at = |address: usize| {
            let text = std::fs::read_to_string("/proc/self/maps").unwrap();
            let line = text.lines().find(|line| {
                let (start, rest) = line.split_once('-').unwrap();
                let end = rest.split_once(' ').unwrap().0;
                let number = |text| usize::from_str_radix(text, 16).unwrap();
                (number(start)..number(end)).contains(&address)
            });
            line.unwrap().split_once(' ').unwrap().1[..4].to_owned()
        };
        let start = words.range().start;
        assert_eq!((protection_at(start), protection_at(part.range().start + 800)), ("r--p".into(), "rw-p".into()));
        assert_eq!(protection_at(part.range().start + PAGE_SIZE), "r--p");
    }

    #[test]
    #[should_panic(expected = "no word 5")]
    fn a_word_behind_the_end_is_refused() {
        Words::new(5).unwrap().at(5);
    }
}
