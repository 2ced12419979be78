//! When something that brought nothing is tried again: pure arithmetic.

use std::time::Duration;

/// After this much time in which nothing was tried, or after another pause if that is longer, the pauses begin anew.
const CALM: Duration = Duration::from_secs(60);

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

    /// When the last pause is over.
    pub fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// It was in vain: the next pause begins. `paid` is the time after which the budget has paid for the attempt, and the pause
    /// grows to that where that is longer than the longest pause. Returns whether this is the first time after a long calm or
    /// something that was worth it: the beginning of an episode.
    pub fn in_vain(&mut self, paid: Duration, now_ns: u64) -> bool {
        let calm = self.until_ns.saturating_add(self.pause.max(CALM).as_nanos() as u64);
        let begins = self.pause.is_zero() || now_ns >= calm;
        self.pause = if begins { self.first } else { (2 * self.pause).min(paid.max(self.most)) };
        self.go_on(now_ns);
        begins
    }

    /// It is in vain still, without another attempt: the pause begins again, as long as it is.
    pub fn go_on(&mut self, now_ns: u64) {
        self.until_ns = now_ns.saturating_add(self.pause.as_nanos() as u64);
    }

    /// It is about something else now, of which nothing is known: from `now_ns` on, the first pause is the longest that is waited for.
    pub fn shorten(&mut self, now_ns: u64) {
        self.pause = self.pause.min(self.first);
        self.until_ns = self.until_ns.min(now_ns + self.first.as_nanos() as u64);
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
    fn a_pause_that_begins_again_is_no_longer() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(16));
        backoff.in_vain(Duration::ZERO, 0);
        backoff.go_on(SECOND);
        backoff.go_on(2 * SECOND);
        assert!(!backoff.ready(4 * SECOND - 1) && backoff.ready(4 * SECOND));
        assert!(!backoff.in_vain(Duration::ZERO, 4 * SECOND) && backoff.until_ns() == 8 * SECOND);
    }

    #[test]
    fn an_episode_ends_when_something_was_worth_it_or_after_a_long_calm() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(100));
        assert!(backoff.in_vain(Duration::ZERO, 0));
        // Attempts that come later than they might are not calm.
        for attempt in 1..13 {
            assert!(!backoff.in_vain(Duration::ZERO, attempt * 59 * SECOND), "{attempt}");
        }
        // The last pause is 40.96 s long, from 708 s on; the next one twice that.
        let end = 708 * SECOND + 40_960_000_000;
        assert!(!backoff.ready(end - 1) && backoff.ready(end));
        assert!(!backoff.in_vain(Duration::ZERO, end + 59 * SECOND));
        let end = end + 59 * SECOND + 81_920_000_000;
        assert!(!backoff.clone().in_vain(Duration::ZERO, end + 81 * SECOND));
        assert!(backoff.in_vain(Duration::ZERO, end + 82 * SECOND));
        let mut other = backoff.clone();
        other.shorten(0);
        assert!(other.ready(10_000_000) && !other.ready(9_999_999));
        assert!(!other.in_vain(Duration::ZERO, 10_000_000) && other.ready(30_000_000));
        backoff.worth_it();
        assert!(backoff.ready(0) && backoff.in_vain(Duration::ZERO, end + 83 * SECOND));
    }
}
