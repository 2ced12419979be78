//! When something that brought nothing is tried again: pure arithmetic.

use std::time::Duration;

/// A pause that doubles each time something was in vain.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    pause: Duration,
    until_ns: u64,
}

impl Backoff {
    /// Pauses from `first` to `most`.
    pub fn new(first: Duration, most: Duration) -> Backoff {
        Backoff { first, most, pause: Duration::ZERO, until_ns: 0 }
    }

    /// Whether the last pause is over.
    pub fn ready(&self, now_ns: u64) -> bool {
        now_ns >= self.until_ns
    }

    /// It was in vain: the next pause begins. `paid` is the time after which the budget has paid for the attempt, and the pause
    /// grows to that where that is longer than the longest pause. Returns whether an episode has begun: nothing was in vain
    /// since the pause before had ended and as much time again had passed.
    pub fn in_vain(&mut self, paid: Duration, now_ns: u64) -> bool {
        let begins = now_ns >= self.until_ns + self.pause.as_nanos() as u64;
        self.pause = if begins { self.first } else { (2 * self.pause).min(paid.max(self.most)) };
        self.until_ns = now_ns + self.pause.as_nanos() as u64;
        begins
    }

    /// It was worth it: the episode and its pause are over.
    pub fn worth_it(&mut self) {
        self.pause = Duration::ZERO;
        self.until_ns = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn pauses_double_up_to_the_longest_or_until_they_are_paid_for() {
        for (paid, expected) in [(0, [2, 4, 8, 16, 16, 16]), (30, [2, 4, 8, 16, 30, 30])] {
            let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(16));
            let mut now = 5 * SECOND;
            let mut begins = Vec::new();
            for pause in expected {
                assert!(backoff.ready(now));
                begins.push(backoff.in_vain(Duration::from_secs(paid), now));
                assert!(!backoff.ready(now + pause * SECOND - 1));
                now += pause * SECOND;
            }
            assert_eq!(begins, [true, false, false, false, false, false]);
        }
    }

    #[test]
    fn an_episode_ends_when_something_was_worth_it_or_after_a_long_time() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(16));
        assert!(backoff.in_vain(Duration::ZERO, 0));
        assert!(!backoff.in_vain(Duration::ZERO, 3 * SECOND));
        // That pause ended at 7 s, and was 4 s long.
        assert!(backoff.in_vain(Duration::ZERO, 11 * SECOND));
        assert!(!backoff.ready(12 * SECOND) && backoff.ready(13 * SECOND));
        backoff.worth_it();
        assert!(backoff.ready(12 * SECOND) && backoff.in_vain(Duration::ZERO, 12 * SECOND));
    }
}
