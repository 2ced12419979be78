//! Numbers that look random, fast, and the same in every run.

/// Marsaglia's xorshift with 64 bits.
pub struct Random(u64);

impl Random {
    /// The numbers that belong to `seed`.
    pub fn new(seed: u64) -> Random {
        Random(mix(seed) | 1)
    }

    /// The next number, never zero.
    #[inline(always)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Changes all numbers that follow, unless `by` is zero.
    #[inline(always)]
    pub fn disturb(&mut self, by: u64) {
        self.0 ^= by;
    }

    /// The next number below `bound`.
    #[inline(always)]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// Each number's own, and 0 only for 0 (the finalizer of splitmix64).
#[inline(always)]
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_their_bound_and_reach_all_of_it() {
        let mut random = Random::new(0);
        let mut seen = [0; 10];
        (0..1000).for_each(|_| seen[random.below(10) as usize] += 1);
        assert!(seen.iter().all(|count| (50..200).contains(count)), "{seen:?}");
    }
}
