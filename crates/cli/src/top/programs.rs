//! The programs under `pagecrew run`: whose pages are read when, what became of them since, and in which order they are shown.

use super::rates::per_second;
use pagecrew::stats::Snapshot;
use std::collections::BTreeMap;

/// Pages that are read at a time. Of more programs, those come first whose turn it was longest ago.
pub const AT_A_TIME: usize = 100;

/// What was read of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// When.
    pub at_ns: u64,
    /// Its name, without control characters.
    pub name: String,
    /// What it has published.
    pub snapshot: Snapshot,
}

/// A program as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// What it has published.
    pub snapshot: Snapshot,
    /// Bytes a second that were freed or zeroed in the background, between the last two readings.
    pub background_rate: Option<f64>,
}

impl Program {
    /// Bytes that were freed or zeroed in the background.
    pub fn background(&self) -> u64 {
        background(&self.snapshot)
    }

    /// Bytes that are retained.
    pub fn retained(&self) -> u64 {
        let bytes = self.snapshot.bytes();
        bytes.retained_dirty.saturating_add(bytes.retained_zeroed)
    }
}

fn background(snapshot: &Snapshot) -> u64 {
    ["discarded_in_background_bytes", "zeroed_in_background_bytes"]
        .into_iter()
        .fold(0, |sum, name| sum.saturating_add(snapshot.counter(name)))
}

/// What is known of all programs.
#[derive(Debug, Default)]
pub struct Programs {
    /// By number: the reading before the last one, and the last one.
    known: BTreeMap<u32, (Option<Reading>, Reading)>,
}

impl Programs {
    /// Which of those that publish, in the order of their numbers, are to be read now: those that are new, then those whose reading is oldest. The
    /// others that are known are gone.
    pub fn due(&mut self, publishing: &[u32]) -> Vec<u32> {
        self.known.retain(|pid, _| publishing.binary_search(pid).is_ok());
        let mut due = publishing.to_vec();
        due.sort_by_key(|pid| (self.known.get(pid).map_or(0, |(_, last)| last.at_ns), *pid));
        due.truncate(AT_A_TIME);
        due
    }

    /// Notes what was read of `pid`, or that it could not be read.
    pub fn note(&mut self, pid: u32, reading: Option<Reading>) {
        let before = self.known.remove(&pid);
        if let Some(reading) = reading {
            self.known.insert(pid, (before.map(|(_, last)| last), reading));
        }
    }

    /// The name that `pid` had when it was read last.
    pub fn name(&self, pid: u32) -> Option<&str> {
        self.known.get(&pid).map(|(_, last)| last.name.as_str())
    }

    /// All of them, by number.
    pub fn all(&self) -> Vec<Program> {
        let program = |(pid, (before, last)): (&u32, &(Option<Reading>, Reading))| Program {
            pid: *pid,
            name: last.name.clone(),
            snapshot: last.snapshot.clone(),
            background_rate: before.as_ref().and_then(|before| {
                let seconds = last.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
                per_second(Some(background(&before.snapshot)), Some(background(&last.snapshot)), seconds)
            }),
        };
        self.known.iter().map(program).collect()
    }
}

/// By what programs are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Key {
    /// Their number.
    Pid,
    /// Their name.
    Name,
    /// What they have in use.
    #[default]
    InUse,
    /// What is retained.
    Retained,
    /// What was reused.
    Reused,
    /// What was done in the background.
    Background,
    /// What is done in the background now.
    Rate,
}

/// An order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sort {
    /// By what.
    pub key: Key,
    /// The other way round: numbers otherwise begin with the largest, names with A.
    pub reversed: bool,
}

impl Sort {
    /// By the next column.
    pub fn next(self) -> Sort {
        let key = match self.key {
            Key::Pid => Key::Name,
            Key::Name => Key::InUse,
            Key::InUse => Key::Retained,
            Key::Retained => Key::Reused,
            Key::Reused => Key::Background,
            Key::Background => Key::Rate,
            Key::Rate => Key::Pid,
        };
        Sort { key, ..self }
    }

    /// Puts them in this order. Equal ones are in that of their numbers.
    pub fn apply(self, programs: &mut [Program]) {
        programs.sort_by(|one, other| {
            let order = match self.key {
                Key::Pid => one.pid.cmp(&other.pid),
                Key::Name => one.name.cmp(&other.name),
                Key::InUse => other.snapshot.bytes().in_use.cmp(&one.snapshot.bytes().in_use),
                Key::Retained => other.retained().cmp(&one.retained()),
                Key::Reused => other.snapshot.counter("reused_bytes").cmp(&one.snapshot.counter("reused_bytes")),
                Key::Background => other.background().cmp(&one.background()),
                Key::Rate => other.background_rate.unwrap_or(-1.0).total_cmp(&one.background_rate.unwrap_or(-1.0)),
            };
            let order = if self.reversed { order.reverse() } else { order };
            order.then(one.pid.cmp(&other.pid))
        });
    }
}

/// Made-up ones.
#[cfg(test)]
pub mod made_up {
    use super::*;
    use pagecrew::stats::{Counters, ZoneBytes};

    /// What a program publishes with so many bytes in use, and so many freed in the background.
    pub fn snapshot(in_use: u64, freed: u64) -> Snapshot {
        let mut counters = [0; Counters::COUNT];
        let place = |name: &str| Counters::FIELDS.iter().position(|field| *field == name).unwrap();
        counters[place("discarded_in_background_bytes")] = freed;
        counters[place("reused_bytes")] = in_use / 2;
        let zone = ZoneBytes { in_use, retained_dirty: in_use / 8, retained_zeroed: in_use / 4, reserved: 1 << 40 };
        Snapshot { counters, zones: vec![zone] }
    }

    /// A program.
    pub fn program(pid: u32, name: &str, in_use: u64, rate: Option<f64>) -> Program {
        Program { pid, name: name.into(), snapshot: snapshot(in_use, in_use), background_rate: rate }
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{program, snapshot};
    use super::*;

    fn reading(at_ns: u64, freed: u64) -> Reading {
        Reading { at_ns, name: "x".into(), snapshot: snapshot(8, freed) }
    }

    #[test]
    fn rates_are_between_two_readings_of_the_same_program() {
        let mut programs = Programs::default();
        programs.note(7, Some(reading(1_000_000_000, 100)));
        assert_eq!(programs.all()[0].background_rate, None);
        programs.note(7, Some(reading(3_000_000_000, 300)));
        assert_eq!((programs.all()[0].background_rate, programs.all()[0].background()), (Some(100.0), 300));
        // Another one has its number.
        programs.note(7, Some(reading(4_000_000_000, 5)));
        assert_eq!(programs.all()[0].background_rate, None);
        programs.note(7, None);
        assert_eq!(programs.all(), []);
    }

    #[test]
    fn of_a_thousand_each_has_its_turn() {
        let mut programs = Programs::default();
        let publishing: Vec<u32> = (1..=1000).collect();
        for round in 1..=10 {
            let due = programs.due(&publishing);
            assert_eq!(due.len(), AT_A_TIME);
            for pid in due {
                assert_eq!(programs.name(pid), None, "{pid} comes twice");
                programs.note(pid, Some(reading(round, 0)));
            }
        }
        assert_eq!(programs.all().len(), 1000);
        // Then those that were first, except those that are gone; a new one before them.
        let later: Vec<u32> = (101..=1001).collect();
        let due = programs.due(&later);
        assert_eq!((due[0], due[1], programs.all().len()), (1001, 101, 900));
    }

    #[test]
    fn orders() {
        let programs = [
            program(3, "a", 10, None),
            program(1, "c", 30, Some(1.0)),
            program(2, "b", 30, Some(2.0)),
            program(4, "d", 20, Some(0.0)),
        ];
        let order = |key, reversed| {
            let mut sorted = programs.to_vec();
            Sort { key, reversed }.apply(&mut sorted);
            sorted.iter().map(|program| program.pid).collect::<Vec<_>>()
        };
        assert_eq!(order(Key::InUse, false), [1, 2, 4, 3]);
        assert_eq!(order(Key::InUse, true), [3, 4, 1, 2]);
        assert_eq!(order(Key::Pid, false), [1, 2, 3, 4]);
        assert_eq!(order(Key::Name, false), [3, 2, 1, 4]);
        assert_eq!(order(Key::Rate, false), [2, 1, 4, 3]);
        for key in [Key::Retained, Key::Reused, Key::Background] {
            assert_eq!(order(key, false), [1, 2, 4, 3]);
        }
        // Every column has its turn.
        let mut sort = Sort::default();
        for _ in 0..7 {
            sort = sort.next();
        }
        assert_eq!(sort, Sort::default());
    }
}
