//! What background work may take from others: pure arithmetic.

use std::time::Duration;

/// An allowance that fills up with time. Something is charged after it was done, since only then its cost is known; then nothing more
/// may be done until the debt is paid off. So what was taken never exceeds what was granted by more than the last piece.
#[derive(Debug, Clone)]
pub struct Bucket {
    per_ns: f64,
    most: f64,
    left: f64,
    at_ns: u64,
}

impl Bucket {
    /// An allowance of `per_second` that saves up what was not used for up to `saved`, full at the time `now_ns`.
    pub fn new(per_second: f64, saved: Duration, now_ns: u64) -> Bucket {
        let most = per_second * saved.as_secs_f64();
        Bucket { per_ns: per_second / 1e9, most, left: most, at_ns: now_ns }
    }

    fn fill(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.at_ns) as f64;
        self.at_ns = self.at_ns.max(now_ns);
        self.left = (self.left + passed * self.per_ns).min(self.most);
    }

    /// Charges `amount`.
    pub fn charge(&mut self, amount: f64, now_ns: u64) {
        self.fill(now_ns);
        self.left -= amount;
    }

    /// Nothing is saved up from here on.
    pub fn use_up(&mut self, now_ns: u64) {
        self.fill(now_ns);
        self.left = self.left.min(0.0);
    }

    /// How long nothing may be done; zero if something may.
    pub fn wait(&mut self, now_ns: u64) -> Duration {
        self.fill(now_ns);
        if self.left >= 0.0 { Duration::ZERO } else { Duration::from_nanos((-self.left / self.per_ns).ceil() as u64) }
    }
}

/// The processor time and the memory traffic that background work may take.
#[derive(Debug, Clone)]
pub struct Budget {
    cpu: Option<Bucket>,
    traffic: Option<Bucket>,
}

/// What is saved up while there is nothing to do, in time: a program that has just made a mess is seen to soon.
const SAVED: Duration = Duration::from_secs(10);

impl Budget {
    /// At most the share `cpu` of one CPU, and `traffic` bytes a second read; `None` is no bound.
    ///
    /// # Panics
    /// If one of them is not positive.
    pub fn new(cpu: Option<f64>, traffic: Option<usize>, now_ns: u64) -> Budget {
        let bucket = |per_second: f64| {
            assert!(per_second > 0.0);
            Bucket::new(per_second, SAVED, now_ns)
        };
        Budget { cpu: cpu.map(|share| bucket(share * 1e9)), traffic: traffic.map(|bytes| bucket(bytes as f64)) }
    }

    /// Charges what was done.
    pub fn charge(&mut self, cpu_ns: u64, read_bytes: u64, now_ns: u64) {
        for (bucket, amount) in [(&mut self.cpu, cpu_ns), (&mut self.traffic, read_bytes)] {
            if let Some(bucket) = bucket {
                bucket.charge(amount as f64, now_ns);
            }
        }
    }

    /// Nothing is saved up from here on.
    pub fn use_up(&mut self, now_ns: u64) {
        for bucket in [&mut self.cpu, &mut self.traffic].into_iter().flatten() {
            bucket.use_up(now_ns);
        }
    }

    /// How long nothing may be done.
    pub fn wait(&mut self, now_ns: u64) -> Duration {
        [&mut self.cpu, &mut self.traffic]
            .into_iter()
            .flatten()
            .map(|bucket| bucket.wait(now_ns))
            .max()
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_was_not_used_is_saved_for_a_while() {
        let mut bucket = Bucket::new(100.0, Duration::from_secs(2), 0);
        bucket.charge(150.0, 0);
        assert_eq!(bucket.wait(0), Duration::ZERO);
        bucket.charge(150.0, 0);
        assert_eq!(bucket.wait(0), Duration::from_secs(1));
        assert_eq!(bucket.wait(SECOND / 2), Duration::from_millis(500));
        assert_eq!(bucket.wait(1000 * SECOND), Duration::ZERO);
        bucket.charge(300.0, 1000 * SECOND);
        assert_eq!(bucket.wait(1000 * SECOND), Duration::from_secs(1));
        // A clock that was read earlier changes nothing.
        assert_eq!(bucket.wait(0), Duration::from_secs(1));
    }

    #[test]
    fn each_of_the_two_can_be_what_is_lacking() {
        let mut budget = Budget::new(Some(0.01), Some(1 << 20), 0);
        budget.charge(SECOND / 10, 0, 0);
        assert_eq!(budget.wait(0), Duration::ZERO);
        budget.charge(SECOND / 100, 0, 0);
        assert_eq!(budget.wait(0), Duration::from_secs(1));
        let mut budget = Budget::new(Some(0.01), Some(1 << 20), 0);
        budget.charge(0, 12 << 20, 0);
        assert_eq!(budget.wait(0), Duration::from_secs(2));
    }

    proptest! {
        #[test]
        fn no_more_is_taken_than_granted_and_the_last_piece(
            pieces in proptest::collection::vec((1u64..50_000_000, 0u64..SECOND), 1..200),
        ) {
            let mut budget = Budget::new(Some(0.02), Some(1 << 30), 0);
            let (mut now, mut taken, mut last) = (0, 0, 0);
            for (piece, pause) in pieces {
                now += pause + budget.wait(now + pause).as_nanos() as u64;
                // Whatever was taken before the last piece was within what had been granted by then.
                prop_assert!((taken - last) as f64 <= 0.02 * (now + 10 * SECOND) as f64 + 1.0);
                budget.charge(piece, 0, now);
                taken += piece;
                last = piece;
            }
            prop_assert!((taken - last) as f64 <= 0.02 * (now + 10 * SECOND) as f64 + 1.0);
        }
    }
}
