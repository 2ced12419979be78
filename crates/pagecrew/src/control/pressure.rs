//! Do tasks wait for memory, by how long some have waited since the machine was started (PSI): pure arithmetic.

use std::time::Duration;

/// A span of time over which waiting is counted.
#[derive(Debug, Clone, Copy)]
struct Span {
    since_ns: u64,
    stall_us: u64,
}

/// Shares of time in which tasks waited, one span after the other.
#[derive(Debug, Clone)]
pub struct Pressure {
    percent: u64,
    window: Duration,
    span: Option<Span>,
}

/// What a span came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spell {
    /// When it began.
    pub since_ns: u64,
    /// Whether tasks waited for too much of it.
    pub waited: bool,
}

impl Pressure {
    /// Tasks wait if they do for more than `percent` of the time. Spans shorter than `window` say nothing.
    pub fn new(percent: u64, window: Duration) -> Pressure {
        Pressure { percent, window, span: None }
    }

    /// Takes note that tasks have waited for `stall_us` in all by the time `now_ns`; `None` where the kernel doesn't say. Returns the span
    /// that ends with that, if it is long enough.
    pub fn note(&mut self, now_ns: u64, stall_us: Option<u64>) -> Option<Spell> {
        let now = Span { since_ns: now_ns, stall_us: stall_us? };
        let span = *self.span.get_or_insert(now);
        let passed_ns = now.since_ns.saturating_sub(span.since_ns);
        if u128::from(passed_ns) < self.window.as_nanos() {
            return None;
        }
        self.span = Some(now);
        let stalled_us = now.stall_us.saturating_sub(span.stall_us);
        let waited = u128::from(stalled_us) * 100_000 > u128::from(passed_ns) * u128::from(self.percent);
        Some(Spell { since_ns: span.since_ns, waited })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_share_of_the_time_is_too_much() {
        let mut pressure = Pressure::new(10, Duration::from_millis(500));
        assert_eq!(pressure.note(1000 * MS, Some(7_000_000)), None);
        // Too short to say anything, and not forgotten.
        assert_eq!(pressure.note(1400 * MS, Some(7_045_000)), None);
        assert_eq!(pressure.note(1500 * MS, Some(7_050_000)), Some(Spell { since_ns: 1000 * MS, waited: false }));
        assert_eq!(pressure.note(2000 * MS, Some(7_100_001)), Some(Spell { since_ns: 1500 * MS, waited: true }));
        assert_eq!(pressure.note(3000 * MS, Some(7_100_001)), Some(Spell { since_ns: 2000 * MS, waited: false }));
    }

    #[test]
    fn what_the_kernel_does_not_say_is_not_known() {
        let mut pressure = Pressure::new(10, Duration::from_millis(500));
        assert_eq!([pressure.note(0, None), pressure.note(1000 * MS, None)], [None, None]);
        pressure.note(2000 * MS, Some(5));
        // A clock, or a sum, that goes back.
        assert_eq!(pressure.note(1000 * MS, Some(5)), None);
        assert_eq!(pressure.note(3000 * MS, Some(0)).map(|spell| spell.waited), Some(false));
    }
}
