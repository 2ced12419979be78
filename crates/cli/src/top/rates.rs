//! What counters tell when they are read again and again: rates, and their history.

use std::collections::VecDeque;

/// As many values as the widest terminal shows.
const KEPT: usize = 240;

/// By how much a counter grew in a second; `None` where it is not known: it was not there, or it has begun anew.
pub fn per_second(before: Option<u64>, now: Option<u64>, seconds: f64) -> Option<f64> {
    let grown = now?.checked_sub(before?)?;
    (seconds > 0.0).then(|| grown as f64 / seconds)
}

/// The last values of something, the newest last.
#[derive(Debug, Clone, Default)]
pub struct History(VecDeque<Option<f64>>);

impl History {
    /// One more; the oldest goes where there are enough.
    pub fn push(&mut self, value: Option<f64>) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    /// The newest one.
    pub fn last(&self) -> Option<f64> {
        self.0.back().copied().flatten()
    }

    /// All of them, the oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Option<f64>> + '_ {
        self.0.iter().copied()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_begins_anew_has_no_rate() {
        assert_eq!(per_second(Some(10), Some(30), 2.0), Some(10.0));
        assert_eq!(per_second(Some(10), Some(10), 2.0), Some(0.0));
        assert_eq!(per_second(Some(0), Some(u64::MAX), 1.0), Some(u64::MAX as f64));
        for (before, now, seconds) in [
            (Some(10), Some(9), 1.0),
            (Some(u64::MAX), Some(0), 1.0),
            (None, Some(9), 1.0),
            (Some(9), None, 1.0),
            (Some(1), Some(2), 0.0),
            (Some(1), Some(2), -1.0),
        ] {
            assert_eq!(per_second(before, now, seconds), None, "{before:?} {now:?} {seconds}");
        }
    }

    #[test]
    fn a_history_is_bounded() {
        let mut history = History::default();
        assert_eq!(history.last(), None);
        for value in 0..1000 {
            history.push(Some(f64::from(value)));
        }
        history.push(None);
        assert_eq!((history.len(), history.last(), history.iter().next()), (KEPT, None, Some(Some(761.0))));
    }
}
