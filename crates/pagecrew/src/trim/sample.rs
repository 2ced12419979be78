//! Whether a huge page is under-used, by as few of its subpages as it takes: pure statistics.
//!
//! A huge page is under-used when more than `max_zero` of its 512 subpages are zero. Subpages are drawn at random. As long as all of what
//! was drawn leaves it open, twice as many are drawn; the whole page at the end, so that near the threshold the answer is exact. A
//! page that is far from the threshold, as nearly all are, is decided by its first few subpages.
//!
//! A subpage is zero if all of it is. A single line of each tells nearly as much at a fraction of the cost, so lines are looked at first.
//! A line that isn't zero speaks against its subpage for good, so lines alone can call a page *used*. A zero line proves nothing: before
//! a page is called *under-used*, some of the subpages that look zero are read to their ends, and if one of them isn't, all of those
//! that were drawn are.

use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};

/// Subpages of a huge page.
pub const SUBPAGES: usize = HUGE_PAGE_SIZE / PAGE_SIZE;

/// How many are drawn first.
pub const FIRST: usize = 32;

/// How sure an answer is that does not rest on the whole page: three standard deviations.
const DEVIATIONS: f64 = 3.0;

/// What is known of a huge page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No more than `max_zero` of its subpages are zero.
    Used,
    /// More than `max_zero` of them are.
    UnderUsed,
    /// More have to be looked at.
    Open,
}

/// What `drawn` subpages, of which `zero` are zero or at least look it, say about all of them.
///
/// # Panics
/// If `zero` is more than `drawn`, or that more than [`SUBPAGES`].
pub fn judge(drawn: usize, zero: usize, max_zero: usize) -> Verdict {
    assert!(zero <= drawn && drawn <= SUBPAGES);
    if zero > max_zero {
        return Verdict::UnderUsed;
    }
    if SUBPAGES - (drawn - zero) <= max_zero {
        return Verdict::Used;
    }
    let deviation = DEVIATIONS * SUBPAGES as f64 * uncertainty(drawn, zero);
    let expected = SUBPAGES as f64 * share(drawn, zero);
    match max_zero as f64 {
        threshold if expected - deviation > threshold => Verdict::UnderUsed,
        threshold if expected + deviation < threshold => Verdict::Used,
        _ => Verdict::Open,
    }
}

/// The share of zero subpages, as one that has seen one of each kind before would have it: never quite 0 or 1.
fn share(drawn: usize, zero: usize) -> f64 {
    (zero + 1) as f64 / (drawn + 2) as f64
}

/// The standard deviation of that, drawn without putting back.
fn uncertainty(drawn: usize, zero: usize) -> f64 {
    let share = share(drawn, zero);
    let left = (SUBPAGES - drawn) as f64 / (SUBPAGES - 1) as f64;
    (share * (1.0 - share) / drawn.max(1) as f64 * left).sqrt()
}

/// Zero subpages of the whole page, as far as is known.
pub fn expected_zero(drawn: usize, zero: usize) -> usize {
    (zero * SUBPAGES).checked_div(drawn).unwrap_or(0)
}

/// Numbers without a pattern (xorshift64*): which subpages are drawn must not go along with how a program lays out its data.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as usize % bound
    }
}

/// The subpages of a huge page in the order in which they are drawn.
#[derive(Debug)]
pub struct Draw {
    order: [u16; SUBPAGES],
    drawn: usize,
}

impl Default for Draw {
    fn default() -> Draw {
        Draw { order: std::array::from_fn(|index| index as u16), drawn: 0 }
    }
}

impl Draw {
    /// Begins anew. The order that is left over is as good as any other to begin with.
    pub fn restart(&mut self) {
        self.drawn = 0;
    }

    /// Draws until `count` are drawn, and returns the new ones.
    pub fn up_to(&mut self, count: usize, random: &mut Random) -> &[u16] {
        let before = self.drawn;
        self.drawn = count.clamp(before, SUBPAGES);
        for place in before..self.drawn {
            self.order.swap(place, place + random.below(SUBPAGES - place));
        }
        &self.order[before..self.drawn]
    }

    /// The subpage that was drawn as number `place`.
    ///
    /// # Panics
    /// If not so many were drawn.
    pub fn at(&self, place: usize) -> usize {
        usize::from(self.order[..self.drawn][place])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Draws and judges until there is an answer. Returns it and how many were drawn.
    fn decide(zero: &[bool], max_zero: usize, seed: u64) -> (Verdict, usize) {
        let (mut draw, mut random) = (Draw::default(), Random::new(seed));
        let (mut count, mut zeroes) = (FIRST, 0);
        loop {
            zeroes += draw.up_to(count, &mut random).iter().filter(|&&index| zero[index as usize]).count();
            match judge(count, zeroes, max_zero) {
                Verdict::Open => count *= 2,
                verdict => return (verdict, count),
            }
        }
    }

    fn page(zero: usize, seed: u64) -> Vec<bool> {
        let mut draw = Draw::default();
        let mut page = vec![false; SUBPAGES];
        draw.up_to(zero, &mut Random::new(seed)).iter().for_each(|&index| page[index as usize] = true);
        page
    }

    #[test]
    fn the_whole_page_is_always_an_answer_and_the_right_one() {
        for max_zero in 0..SUBPAGES {
            for zero in 0..=SUBPAGES {
                let expected = if zero > max_zero { Verdict::UnderUsed } else { Verdict::Used };
                assert_eq!(judge(SUBPAGES, zero, max_zero), expected, "{zero} of {max_zero}");
            }
        }
    }

    #[test]
    fn dense_and_empty_pages_are_decided_at_once_and_the_source_s_after_a_quarter() {
        assert_eq!(decide(&page(0, 1), 409, 2), (Verdict::Used, FIRST));
        assert_eq!(decide(&page(256, 1), 409, 2).0, Verdict::Used);
        assert_eq!(decide(&page(512, 1), 409, 2), (Verdict::UnderUsed, FIRST));
        let drawn: Vec<_> = (0..1000).map(|seed| decide(&page(472, seed), 409, seed ^ 0xabc)).collect();
        assert!(drawn.iter().filter(|(verdict, _)| *verdict == Verdict::UnderUsed).count() >= 995);
        let mean = drawn.iter().map(|(_, count)| count).sum::<usize>() / drawn.len();
        assert!(mean <= SUBPAGES / 4, "{mean}");
    }

    #[test]
    fn next_to_the_threshold_hardly_a_page_is_taken_for_what_it_is_not() {
        for (zero, right) in [(409, Verdict::Used), (410, Verdict::UnderUsed)] {
            let wrong = (0..10_000).filter(|&seed| decide(&page(zero, seed), 409, seed ^ 0xabc).0 != right).count();
            assert!(wrong < 200, "{wrong} of 10,000 with {zero} zero subpages");
        }
    }

    #[test]
    fn a_threshold_that_only_a_whole_page_can_pass() {
        assert_eq!(decide(&page(512, 3), 511, 3), (Verdict::UnderUsed, SUBPAGES));
        assert_eq!(decide(&page(1, 3), 0, 3).0, Verdict::UnderUsed);
        assert_eq!(decide(&page(0, 3), 0, 3).0, Verdict::Used);
    }

    proptest! {
        #[test]
        fn every_subpage_is_drawn_once(seed: u64, steps in proptest::collection::vec(0usize..600, 1..8)) {
            let (mut draw, mut random) = (Draw::default(), Random::new(seed));
            let mut seen = vec![false; SUBPAGES];
            for count in steps.into_iter().chain([SUBPAGES]) {
                for &index in draw.up_to(count, &mut random) {
                    prop_assert!(!std::mem::replace(&mut seen[index as usize], true));
                }
            }
            prop_assert!(seen.iter().all(|&seen| seen));
        }
    }
}
