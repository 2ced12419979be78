//! Which processes have the most huge pages in anonymous memory: whose turn it is to be looked at, and what was found.

use pagecrew::sys::smaps::Rollup;
use std::collections::BTreeMap;

/// Who has less anonymous memory than one huge page has none.
pub const ANONYMOUS_LEAST: u64 = pagecrew::sys::HUGE_PAGE_SIZE as u64;
/// As good as now.
const FRESH_NS: u64 = 5_000_000_000;
/// Rights hardly ever change.
const DENIED_NS: u64 = 60_000_000_000;
/// A look that took so long is worth that many times as long.
const WORTH: u64 = 200;
/// As many as anybody scrolls through.
const SHOWN_MOST: usize = 200;

/// What came of a look at a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    /// Its name, without control characters, and its memory.
    Seen(String, Rollup),
    /// It may not be looked at.
    Denied,
}

#[derive(Debug)]
struct Known {
    anonymous: u64,
    /// When it was looked at last, what that took, and what came of it.
    last: Option<(u64, u64, Look)>,
}

/// A process with huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory: Rollup,
}

/// What is known of all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Those with huge pages, the most first.
    pub candidates: Vec<Candidate>,
    /// Processes with at least as much anonymous memory as a huge page has.
    pub processes: usize,
    /// Of them, those that may not be looked at.
    pub denied: usize,
    /// Of them, those whose turn has not come yet.
    pub waiting: usize,
}

/// All processes that may have huge pages.
#[derive(Debug, Default)]
pub struct Candidates(BTreeMap<u32, Known>);

impl Candidates {
    /// Notes which processes there are, with their anonymous memory. The others are gone.
    pub fn note_all(&mut self, found: impl IntoIterator<Item = (u32, u64)>) {
        let mut before = std::mem::take(&mut self.0);
        for (pid, anonymous) in found.into_iter().filter(|(_, anonymous)| *anonymous >= ANONYMOUS_LEAST) {
            let last = before.remove(&pid).and_then(|known| known.last);
            self.0.insert(pid, Known { anonymous, last });
        }
    }

    /// Which one to look at now: the largest of the new ones, else the one that was looked at longest ago, if that is long enough ago.
    pub fn next(&self, now_ns: u64) -> Option<u32> {
        let new = self.0.iter().filter(|(_, known)| known.last.is_none()).max_by_key(|(_, known)| known.anonymous);
        if let Some((pid, _)) = new {
            return Some(*pid);
        }
        let due_ns = |known: &Known| match &known.last {
            None => 0,
            Some((at, _, Look::Denied)) => at.saturating_add(DENIED_NS),
            Some((at, took, Look::Seen(..))) => at.saturating_add(FRESH_NS.max(took.saturating_mul(WORTH))),
        };
        let first = self.0.iter().min_by_key(|(_, known)| due_ns(known))?;
        (due_ns(first.1) <= now_ns).then_some(*first.0)
    }

    /// Notes what came of a look that ended at `now_ns` and took `took_ns`; `None`: the process has gone.
    pub fn note(&mut self, pid: u32, now_ns: u64, took_ns: u64, look: Option<Look>) {
        match (look, self.0.get_mut(&pid)) {
            (Some(look), Some(known)) => known.last = Some((now_ns, took_ns, look)),
            (None, _) => drop(self.0.remove(&pid)),
            (Some(_), None) => {}
        }
    }

    /// What is known.
    pub fn report(&self) -> Report {
        let mut report = Report { processes: self.0.len(), ..Report::default() };
        for (pid, known) in &self.0 {
            match &known.last {
                None => report.waiting += 1,
                Some((_, _, Look::Denied)) => report.denied += 1,
                Some((_, _, Look::Seen(name, memory))) if memory.anon_huge > 0 => {
                    report.candidates.push(Candidate { pid: *pid, name: name.clone(), memory: *memory });
                }
                Some(_) => {}
            }
        }
        report.candidates.sort_by_key(|candidate| (std::cmp::Reverse(candidate.memory.anon_huge), candidate.pid));
        report.candidates.truncate(SHOWN_MOST);
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn seen(huge: u64) -> Option<Look> {
        Some(Look::Seen("x".into(), Rollup { anonymous: 100 << 20, anon_huge: huge << 20 }))
    }

    #[test]
    fn the_largest_comes_first_and_each_has_its_turn_again() {
        let mut candidates = Candidates::default();
        candidates.note_all([(1, 10 << 20), (2, 30 << 20), (3, 20 << 20), (4, 1 << 20), (5, 5 << 20)]);
        assert_eq!(candidates.report(), Report { processes: 4, waiting: 4, ..Report::default() });
        let mut turns = Vec::new();
        for now in 1..=4 {
            let pid = candidates.next(now * S).unwrap();
            turns.push(pid);
            candidates.note(pid, now * S, 1000, if pid == 3 { Some(Look::Denied) } else { seen(u64::from(pid) % 5) });
        }
        assert_eq!(turns, [2, 3, 1, 5]);
        assert_eq!(candidates.next(5 * S), None);
        let report = candidates.report();
        assert_eq!((report.processes, report.denied, report.waiting), (4, 1, 0));
        // One without a huge page is no candidate.
        assert_eq!(report.candidates.iter().map(|c| c.pid).collect::<Vec<_>>(), [2, 1]);
        // The first one is due again, a new one before it; who was denied is not asked again soon.
        assert_eq!(candidates.next(6 * S), Some(2));
        candidates.note_all([(1, 10 << 20), (3, 20 << 20), (5, 5 << 20), (6, 2 << 20)]);
        assert_eq!(candidates.next(6 * S), Some(6));
        candidates.note(6, 6 * S, 1000, None);
        assert_eq!(candidates.next(8 * S), Some(1));
        for now in [20, 30, 40, 50] {
            let pid = candidates.next(now * S).unwrap();
            assert_ne!(pid, 3);
            candidates.note(pid, now * S, 1000, seen(1));
        }
        candidates.note_all([(3, 20 << 20)]);
        assert_eq!((candidates.next(61 * S), candidates.next(62 * S)), (None, Some(3)));
    }

    #[test]
    fn a_look_that_took_long_is_worth_long() {
        let mut candidates = Candidates::default();
        candidates.note_all([(1, 1 << 40)]);
        candidates.note(1, S, 2 * S, seen(7));
        assert_eq!((candidates.next(400 * S), candidates.next(402 * S)), (None, Some(1)));
        candidates.note(1, u64::MAX, u64::MAX, seen(7));
        assert_eq!(candidates.next(402 * S), None);
    }

    #[test]
    fn who_has_gone_meanwhile_is_nobody() {
        let mut candidates = Candidates::default();
        assert_eq!(candidates.next(0), None);
        candidates.note(9, 1, 1, seen(7));
        assert_eq!(candidates.report(), Report::default());
        candidates.note_all((1..=1000).map(|pid| (pid, 4 << 20)));
        (1..=1000).for_each(|pid| candidates.note(pid, 1, 1, seen(1)));
        assert_eq!((candidates.report().candidates.len(), candidates.report().processes), (SHOWN_MOST, 1000));
    }
}
