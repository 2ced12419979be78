//! Random numbers for generated data: the same ones every time.

/// Marsaglia's xorshift generator with 64 bits of state.
pub struct Noise(u64);

impl Noise {
    pub fn new() -> Noise {
        Noise(0x9e37_79b9_7f4a_7c15)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// At least 0 and less than 1.
    pub fn fraction(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_fill_the_interval() {
        let mut noise = Noise::new();
        let mean =
            (0..10_000).map(|_| noise.fraction()).inspect(|x| assert!((0.0..1.0).contains(x))).sum::<f64>() / 1e4;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert_eq!(Noise::new().number(), Noise::new().number());
    }
}
