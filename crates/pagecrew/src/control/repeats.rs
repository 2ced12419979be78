//! What happens again and again is said at once, and then once in a while with how often it was: pure bookkeeping.

use std::collections::BTreeMap;
use std::time::Duration;

/// At most so many different things are kept apart. A log is read by people.
const MOST: usize = 64;

/// What was said lately.
#[derive(Debug, Clone)]
pub struct Repeats {
    apart: Duration,
    said: BTreeMap<String, Said>,
}

#[derive(Debug, Clone, Copy)]
struct Said {
    at_ns: u64,
    /// How often it has happened since.
    times: u64,
}

impl Repeats {
    /// Each thing is said again after `apart` at the earliest.
    pub fn new(apart: Duration) -> Repeats {
        Repeats { apart, said: BTreeMap::new() }
    }

    /// Something happens. Returns how often it has since it was said last, this time included, if it is to be said now.
    pub fn happened(&mut self, what: &str, now_ns: u64) -> Option<u64> {
        let quiet = |said: &Said| now_ns.saturating_sub(said.at_ns) < self.apart.as_nanos() as u64;
        if let Some(said) = self.said.get_mut(what) {
            said.times += 1;
            if quiet(said) {
                return None;
            }
            let times = said.times;
            *said = Said { at_ns: now_ns, times: 0 };
            return Some(times);
        }
        self.said.retain(|_, said| quiet(said));
        if self.said.len() >= MOST {
            return None;
        }
        self.said.insert(what.to_owned(), Said { at_ns: now_ns, times: 0 });
        Some(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn it_is_said_at_once_and_then_once_a_minute_with_how_often_it_was() {
        let mut repeats = Repeats::new(Duration::from_secs(60));
        assert_eq!(repeats.happened("pressure", 5 * SECOND), Some(1));
        for second in 6..60 {
            assert_eq!(repeats.happened("pressure", second * SECOND), None);
        }
        assert_eq!(repeats.happened("another thing", 60 * SECOND), Some(1));
        assert_eq!(repeats.happened("pressure", 70 * SECOND), Some(55));
        assert_eq!(repeats.happened("pressure", 300 * SECOND), Some(1));
    }

    #[test]
    fn many_different_things_are_not_said_all() {
        let mut repeats = Repeats::new(Duration::from_secs(60));
        let said = (0..10 * MOST).filter(|number| repeats.happened(&number.to_string(), SECOND).is_some()).count();
        assert_eq!(said, MOST);
        assert_eq!(repeats.happened("later", 100 * SECOND), Some(1));
    }
}
