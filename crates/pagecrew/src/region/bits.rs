//! A set of numbers in which the next smaller one is found in a few looks, however large and sparse it is.
//!
//! A bit for each number, a bit for each word of those that isn't zero, and so on, until one word is left.

use crate::sys::Errno;
use crate::sys::memory::Range;
use crate::sys::words::Words;
use std::sync::atomic::Ordering::Relaxed;

const WORD: usize = u64::BITS as usize;

/// See the module. Changed by one thread at a time, which its owner sees to.
pub(super) struct Bits {
    /// The numbers first, the single word last.
    levels: Vec<Words>,
}

impl Bits {
    /// An empty set for numbers below `limit`.
    ///
    /// # Errors
    /// `ENOMEM` without address space.
    pub fn new(limit: usize) -> Result<Bits, Errno> {
        Self::on(limit, Words::new(limit / WORD + 1)?)
    }

    /// As [`Bits::new`], to be [opened](Bits::open) before numbers are added.
    ///
    /// # Errors
    /// As [`Bits::new`].
    pub fn closed(limit: usize) -> Result<Bits, Errno> {
        Self::on(limit, Words::closed(limit / WORD + 1)?)
    }

    fn on(limit: usize, numbers: Words) -> Result<Bits, Errno> {
        let mut levels = vec![numbers];
        let mut count = limit / WORD + 1;
        while count > 1 {
            count = count.div_ceil(WORD);
            // All of these are a sixty-third part of the numbers.
            levels.push(Words::new(count)?);
        }
        Ok(Bits { levels })
    }

    /// Numbers in `[from, to)`, which is at most the limit, can be added from now on.
    ///
    /// # Errors
    /// Those of [`Words::open`].
    pub fn open(&self, from: usize, to: usize) -> Result<(), Errno> {
        self.levels[0].open(from / WORD, to / WORD + 1)
    }

    /// Where the set lies.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + '_ {
        self.levels.iter().map(Words::range)
    }

    /// Adds `number`.
    pub fn insert(&mut self, number: usize) {
        let mut at = number;
        for level in &self.levels {
            let word = level.at(at / WORD);
            let before = word.load(Relaxed);
            word.store(before | 1 << (at % WORD), Relaxed);
            if before != 0 {
                return;
            }
            at /= WORD;
        }
    }

    /// Removes `number`.
    pub fn remove(&mut self, number: usize) {
        let mut at = number;
        for level in &self.levels {
            let word = level.at(at / WORD);
            let after = word.load(Relaxed) & !(1 << (at % WORD));
            word.store(after, Relaxed);
            if after != 0 {
                return;
            }
            at /= WORD;
        }
    }

    /// The largest number of the set below `number`, which is at most the limit.
    pub fn before(&self, number: usize) -> Option<usize> {
        let mut at = number;
        for (height, level) in self.levels.iter().enumerate() {
            let below = level.at(at / WORD).load(Relaxed) & ((1 << (at % WORD)) - 1);
            at /= WORD;
            if below != 0 {
                let mut found = at * WORD + below.ilog2() as usize;
                for level in self.levels[..height].iter().rev() {
                    found = found * WORD + level.at(found).load(Relaxed).ilog2() as usize;
                }
                return Some(found);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_says_where_it_lies() {
        let bits = Bits::new(300_000).unwrap();
        let bytes: usize = bits.ranges().map(|range| range.len).sum();
        assert!(bytes >= 300_000 / 8 + 300_000 / 8 / WORD, "the numbers, and one level above them");
        assert_eq!(bits.ranges().count(), 4);
    }

    proptest! {
        #[test]
        fn it_behaves_like_a_tree(limit in 1usize..300_000, steps in proptest::collection::vec((0usize..1 << 30, 0..3), 1..300)) {
            let mut bits = Bits::new(limit).unwrap();
            let mut model = BTreeSet::new();
            for (number, step) in steps {
                let number = number % limit;
                match step {
                    0 => { bits.insert(number); model.insert(number); }
                    // One that is there, where there is any.
                    1 => {
                        let there = model.range(number..).next().copied().unwrap_or(number);
                        bits.remove(there);
                        model.remove(&there);
                    }
                    _ => {
                        for place in [number, limit] {
                            prop_assert_eq!(bits.before(place), model.range(..place).next_back().copied());
                        }
                    }
                }
            }
        }
    }
}
