//! What is remembered of each huge page, so that none is looked at again and again for nothing: pure bookkeeping.
//!
//! A page that turned out to be used, or that could not be split, is left alone for a while, each time for twice as long. One that
//! was split and is huge again (the program or the kernel's `khugepaged` has made it so) is left alone for four times as long each time:
//! splitting it once more would only begin the same round again.

use std::collections::HashMap;
use std::time::Duration;

/// The first rest of a page that was used or could not be split, and the longest.
const REST: Duration = Duration::from_secs(30);
const REST_MOST: Duration = Duration::from_secs(3600);
/// The first rest of a page that came back huge, and the longest.
const REST_BACK: Duration = Duration::from_secs(60);
const REST_BACK_MOST: Duration = Duration::from_secs(86_400);
/// Notes are kept on so many pages (512 GiB). Of what is beyond, nothing is remembered.
const NOTES_MOST: usize = 1 << 18;
/// What has not been huge for this long is forgotten.
const FORGET: Duration = Duration::from_secs(2 * 86_400);

/// What came of looking at a huge page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is used.
    Used,
    /// It was split.
    Split,
    /// It could not be split or looked at.
    Left,
}

#[derive(Debug, Clone, Copy)]
struct Note {
    last: Outcome,
    /// How often it was looked at for nothing in a row; of a page that was split, how often it came back.
    times: u8,
    /// Not to be looked at before this time, in seconds.
    until: u32,
    /// When it was last seen as a huge page, in seconds.
    seen: u32,
}

/// The notes on the huge pages of one process.
#[derive(Debug, Default)]
pub struct History {
    notes: HashMap<usize, Note>,
}

fn seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000).min(u32::MAX as u64) as u32
}

fn rest(first: Duration, growth: u32, times: u8, most: Duration) -> u32 {
    let factor = growth.saturating_pow(u32::from(times));
    (first.as_secs() as u32).saturating_mul(factor).min(most.as_secs() as u32)
}

impl History {
    /// Whether the huge page at `address`, which was found at `now_ns`, may be looked at. In an `emergency` no page rests, nor does one that was
    /// split and is found huge again only now.
    pub fn due(&mut self, address: usize, now_ns: u64, emergency: bool) -> bool {
        let now = seconds(now_ns);
        let Some(note) = self.notes.get_mut(&address) else { return true };
        note.seen = now;
        if note.last == Outcome::Split {
            // It is huge again.
            note.until = now.saturating_add(rest(REST_BACK, 4, note.times, REST_BACK_MOST));
            note.times = note.times.saturating_add(1);
            note.last = Outcome::Left;
        }
        if emergency {
            note.until = now;
        }
        note.until <= now
    }

    /// Takes note of what came of looking at the huge page at `address`.
    pub fn note(&mut self, address: usize, outcome: Outcome, now_ns: u64) {
        let now = seconds(now_ns);
        let before = self.notes.get(&address);
        if before.is_none() && self.notes.len() >= NOTES_MOST {
            return;
        }
        let times = before.map_or(0, |note| note.times);
        let (times, until) = match outcome {
            Outcome::Split => (times, 0),
            // A page that was split before and is in use now has a reason to be huge; what it cost is forgotten only with the page.
            Outcome::Used | Outcome::Left => {
                (times.saturating_add(1), now.saturating_add(rest(REST, 2, times, REST_MOST)))
            }
        };
        self.notes.insert(address, Note { last: outcome, times, until, seen: now });
    }

    /// Forgets what has not been huge for long.
    pub fn prune(&mut self, now_ns: u64) {
        let oldest = seconds(now_ns).saturating_sub(FORGET.as_secs() as u32);
        self.notes.retain(|_, note| note.seen >= oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const PAGE: usize = 0x7f00_0020_0000;

    /// When a page that is found every second is looked at, if each look ends with `outcome`.
    fn looks(outcome: Outcome, during: u64) -> Vec<u64> {
        let mut history = History::default();
        let mut looks = Vec::new();
        for second in 0..during {
            if history.due(PAGE, second * SECOND, false) {
                looks.push(second);
                history.note(PAGE, outcome, second * SECOND);
            }
        }
        looks
    }

    #[test]
    fn a_used_page_is_looked_at_less_and_less() {
        assert_eq!(looks(Outcome::Used, 1000), [0, 30, 90, 210, 450, 930]);
        let day = looks(Outcome::Left, 86_400);
        assert!(day.len() < 32 && day.windows(2).all(|pair| pair[1] - pair[0] <= 3600), "{day:?}");
    }

    #[test]
    fn what_comes_back_huge_is_left_alone_for_longer_each_time() {
        // Found huge one second after each split.
        let looks = looks(Outcome::Split, 200_000);
        let gaps: Vec<_> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps, [61, 241, 961, 3841, 15_361, 61_441, 86_401]);
    }

    #[test]
    fn a_split_page_that_stays_split_is_forgotten() {
        let mut history = History::default();
        history.note(PAGE, Outcome::Split, 0);
        history.note(PAGE + (2 << 20), Outcome::Used, 0);
        history.prune(FORGET.as_nanos() as u64);
        assert_eq!(history.notes.len(), 2);
        history.due(PAGE + (2 << 20), FORGET.as_nanos() as u64, false);
        history.prune(FORGET.as_nanos() as u64 + SECOND);
        assert_eq!(history.notes.len(), 1);
    }

    #[test]
    fn notes_are_bounded() {
        let mut history = History::default();
        (0..NOTES_MOST + 10).for_each(|page| history.note(page << 21, Outcome::Used, 0));
        assert!(history.notes.len() == NOTES_MOST && history.due((NOTES_MOST + 1) << 21, 0, false));
        assert!(!history.due(0, 0, false));
    }

    #[test]
    fn an_emergency_ends_every_rest() {
        for outcome in [Outcome::Used, Outcome::Left, Outcome::Split] {
            let mut history = History::default();
            history.note(PAGE, outcome, 0);
            assert!(history.due(PAGE, SECOND, true), "{outcome:?}");
            // Until it was looked at.
            assert!(history.due(PAGE, 2 * SECOND, false), "{outcome:?}");
            history.note(PAGE, Outcome::Left, 2 * SECOND);
            assert!(!history.due(PAGE, 3 * SECOND, false), "{outcome:?}");
        }
    }

    #[test]
    fn what_came_back_in_an_emergency_rests_for_longer_afterwards() {
        let mut history = History::default();
        history.note(PAGE, Outcome::Split, 0);
        assert!(history.due(PAGE, SECOND, true));
        history.note(PAGE, Outcome::Split, SECOND);
        // It came back once before: 240 s instead of 60.
        assert!(!history.due(PAGE, 2 * SECOND, false));
        assert!(!history.due(PAGE, 241 * SECOND, false) && history.due(PAGE, 242 * SECOND, false));
    }
}
