//! Free runs of pages by length, as lists through the runs themselves: what fits is found in a few looks, and a run leaves its list in
//! one step. Eight bins for each power of two, as in TLSF (Masmano, 2004).

use super::links::Links;

/// Ends a list.
const NONE: u32 = u32::MAX;

/// Runs shorter than this have a bin for each length.
const EXACT: usize = 16;
const PER_DOUBLING: usize = 8;
/// Runs of up to 2^32 pages.
const BINS: usize = EXACT + (32 - 4) * PER_DOUBLING + PER_DOUBLING;
const WORDS: usize = BINS.div_ceil(64);

/// The lists of one kind of run.
pub(super) struct Bins {
    first: [u32; BINS],
    filled: [u64; WORDS],
}

/// The bin for runs of `pages`.
fn bin(pages: usize) -> usize {
    if pages < EXACT {
        return pages;
    }
    let doubling = pages.ilog2() as usize;
    EXACT + (doubling - 4) * PER_DOUBLING + ((pages >> (doubling - 3)) & (PER_DOUBLING - 1))
}

/// Whether runs of so many pages are in the same list.
pub(super) fn alike(pages: usize, others: usize) -> bool {
    bin(pages) == bin(others)
}

impl Bins {
    pub fn new() -> Bins {
        Bins { first: [NONE; BINS], filled: [0; WORDS] }
    }

    pub fn is_empty(&self) -> bool {
        self.filled == [0; WORDS]
    }

    /// Adds the run at page `at`.
    pub fn insert(&mut self, links: &Links, at: usize, pages: usize) {
        let bin = bin(pages);
        let next = self.first[bin];
        links.set(at, next, NONE);
        if next != NONE {
            links.set_previous(next as usize, at as u32);
        }
        self.first[bin] = at as u32;
        self.filled[bin / 64] |= 1 << (bin % 64);
    }

    /// Removes the run at page `at`, which has that many pages.
    pub fn remove(&mut self, links: &Links, at: usize, pages: usize) {
        let bin = bin(pages);
        let (next, previous) = links.get(at);
        if previous == NONE {
            debug_assert_eq!(self.first[bin], at as u32);
            self.first[bin] = next;
            if next == NONE {
                self.filled[bin / 64] &= !(1 << (bin % 64));
            }
        } else {
            links.set_next(previous as usize, next);
        }
        if next != NONE {
            links.set_previous(next as usize, previous);
        }
    }

    /// The runs of the bins in which a run of `pages` may fit, shorter bins first, in each the last added first. Those of the first bin may
    /// be a little too short.
    pub fn from<'l>(&'l self, links: &'l Links, pages: usize) -> impl Iterator<Item = usize> + use<'l> {
        let mut next = bin(pages);
        self.runs(links, move || {
            let found = self.filled_from(next)?;
            next = found + 1;
            Some(found)
        })
    }

    /// The runs of at least about `least` pages, longer bins first, in each the last added first.
    pub fn down_to<'l>(&'l self, links: &'l Links, least: usize) -> impl Iterator<Item = usize> + use<'l> {
        let (least, mut end) = (bin(least), BINS);
        self.runs(links, move || {
            let found = self.filled_below(end).filter(|&found| found >= least)?;
            end = found;
            Some(found)
        })
    }

    /// The runs of the bins that `next_bin` names.
    fn runs<'l, N: FnMut() -> Option<usize>>(
        &'l self,
        links: &'l Links,
        mut next_bin: N,
    ) -> impl Iterator<Item = usize> + use<'l, N> {
        let mut at = NONE;
        std::iter::from_fn(move || {
            while at == NONE {
                at = self.first[next_bin()?];
            }
            let run = at as usize;
            at = links.get(run).0;
            Some(run)
        })
    }

    /// The first bin from `bin` on that has a run.
    fn filled_from(&self, bin: usize) -> Option<usize> {
        let (first, mask) = (bin / 64, u64::MAX << (bin % 64));
        let mut word = first;
        while word < WORDS {
            let filled = self.filled[word] & if word == first { mask } else { u64::MAX };
            if filled != 0 {
                return Some(word * 64 + filled.trailing_zeros() as usize);
            }
            word += 1;
        }
        None
    }

    /// The last bin before `bin` that has a run.
    fn filled_below(&self, bin: usize) -> Option<usize> {
        let (last, mask) = (bin / 64, (1 << (bin % 64)) - 1);
        let mut word = last + 1;
        while word > 0 {
            word -= 1;
            let filled = self.filled.get(word).copied().unwrap_or(0) & if word == last { mask } else { u64::MAX };
            if filled != 0 {
                return Some(word * 64 + filled.ilog2() as usize);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bins_are_in_the_order_of_the_lengths_they_hold() {
        let mut last = 0;
        for pages in 1..100_000 {
            let bin = bin(pages);
            assert!(bin == last || bin == last + 1, "{pages}");
            last = bin;
        }
        let most = bin(1 << 32);
        assert!(most < BINS && BINS <= most + PER_DOUBLING, "as many as are needed");
        assert_eq!([(16, 17), (17, 18), (15, 16)].map(|(pages, others)| alike(pages, others)), [true, false, false]);
    }

    #[test]
    fn bins_are_empty_again_when_the_last_run_has_left() {
        let links = Links::new(1 << 16).unwrap();
        for pages in [3, 17, 500, 2000, 1 << 20] {
            let mut bins = Bins::new();
            assert!(bins.is_empty());
            bins.insert(&links, 1, pages);
            bins.insert(&links, 2, pages);
            bins.remove(&links, 1, pages);
            assert!(!bins.is_empty(), "{pages}");
            bins.remove(&links, 2, pages);
            assert!(bins.is_empty(), "{pages}");
        }
    }

    #[test]
    fn runs_are_found_by_length_and_leave_from_anywhere() {
        let links = Links::new(1 << 16).unwrap();
        let mut bins = Bins::new();
        // Page numbers stand for runs; the length of run 100 * n is n.
        for pages in [3usize, 17, 17, 18, 40, 500].into_iter().enumerate().map(|(place, pages)| (place + 1, pages)) {
            bins.insert(&links, pages.0 * 1000, pages.1);
        }
        assert_eq!(bins.from(&links, 17).collect::<Vec<_>>(), [3000, 2000, 4000, 5000, 6000]);
        assert_eq!(bins.down_to(&links, 18).collect::<Vec<_>>(), [6000, 5000, 4000]);
        bins.remove(&links, 2000, 17);
        bins.remove(&links, 5000, 40);
        bins.remove(&links, 6000, 500);
        assert_eq!(bins.from(&links, 1).collect::<Vec<_>>(), [1000, 3000, 4000]);
        bins.remove(&links, 3000, 17);
        bins.remove(&links, 1000, 3);
        bins.remove(&links, 4000, 18);
        assert_eq!(bins.from(&links, 1).count() + bins.down_to(&links, 1).count(), 0);
    }

    #[test]
    fn runs_of_very_different_lengths_are_found_in_order() {
        let links = Links::new(1 << 16).unwrap();
        let lengths = [3, 17, 500, 2000, 1 << 14, 1 << 17, 3 << 17, 1 << 20, 1 << 25];
        let mut bins = Bins::new();
        for (run, &pages) in lengths.iter().enumerate() {
            bins.insert(&links, run, pages);
        }
        for (first, &least) in lengths.iter().enumerate() {
            let longer = first..lengths.len();
            assert_eq!(bins.from(&links, least).collect::<Vec<_>>(), longer.clone().collect::<Vec<_>>());
            assert_eq!(bins.down_to(&links, least).collect::<Vec<_>>(), longer.rev().collect::<Vec<_>>());
        }
    }
}
