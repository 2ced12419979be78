//! Whether one thread's figures depend on what else is in the process, and those of many threads on how many they are.

use super::super::Setting;
use super::cell::{Cell, Crowd, Sizes};
use super::judge::BENCH;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::Touch;
use anyhow::Result;

/// Of what it does alone, a thread does at least this much in a crowd.
const LEAST: f64 = 0.9;

/// Threads that are alive and sleep, and threads that all work.
const MANY_THREADS: usize = 64;
/// The threads with which the many are compared.
const FEW_THREADS: usize = 2;
/// Spans that are in use.
const MANY_SPANS: usize = 100_000;

const SUBJECTS: [(Sizes, Touch); 3] =
    [(Sizes::one(256 << 10), Touch::Whole), (Sizes::one(1 << 20), Touch::TwoBytes), (Sizes::SMALLER_MIX, Touch::Whole)];

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    for (sizes, touch) in SUBJECTS {
        let cell = Cell { sizes, touch, threads: 1, slots: 16 };
        let crowds = [
            (format!("{MANY_THREADS} threads asleep"), Crowd { idle_threads: MANY_THREADS, ..Crowd::default() }),
            (format!("{MANY_SPANS} spans of 64 KiB in use"), Crowd { live_spans: MANY_SPANS, ..Crowd::default() }),
        ];
        for (what, crowd) in crowds {
            let name = format!("{what} ({})", cell.name().trim_start_matches("cells: "));
            compare(setting, report, &name, (cell, crowd), (cell, Crowd::default(), "alone"))?;
        }
        let cell = Cell { slots: 4, ..cell };
        let name = format!("{MANY_THREADS} threads at work ({})", sizes.name());
        let few = format!("{FEW_THREADS} threads");
        let (many, few) = (
            (Cell { threads: MANY_THREADS, ..cell }, Crowd::default()),
            (Cell { threads: FEW_THREADS, ..cell }, Crowd::default(), few.as_str()),
        );
        compare(setting, report, &name, many, few)?;
    }
    report.table("crowd")
}

/// Compares a round in two circumstances, with the preload library.
fn compare(
    setting: &Setting,
    report: &mut Report,
    name: &str,
    crowded: (Cell, Crowd),
    quiet: (Cell, Crowd, &str),
) -> Result<()> {
    let case = format!("crowd: {name}");
    if !setting.only.wants(&case) {
        return Ok(());
    }
    let mut alone = setting.ours.clone();
    alone.name = quiet.2.to_owned();
    let contestants = [setting.ours.clone(), alone];
    let rounds = [crowded.0.rounds(&setting.ours)?, quiet.0.rounds(&setting.ours)?];
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        if contestant.name == quiet.2 {
            quiet.0.measure(contestant, rounds[1], quiet.1)
        } else {
            crowded.0.measure(contestant, rounds[0], crowded.1)
        }
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &case, "ns").bar(Bar::Ratio(LEAST));
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}
