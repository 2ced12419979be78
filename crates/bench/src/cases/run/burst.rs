//! One large block is freed once, and then many smaller ones are taken, touched and freed, over and over. glibc keeps more memory from
//! that free on, so that it is faster than in the cells.

use super::super::Setting;
use super::cell::{Cell, Crowd, Sizes};
use super::everyone;
use super::judge::BENCH;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::Touch;
use anyhow::Result;

const TIME_NS: usize = 150_000_000;
/// More than is in use at once.
const WARM: usize = 64 << 20;

/// The block that is freed once before blocks of many sizes.
const LARGE: usize = 20 << 20;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    of_one_size(setting, report)?;
    of_many_sizes(setting, report)?;
    report.table("burst")
}

fn of_one_size(setting: &Setting, report: &mut Report) -> Result<()> {
    for thread in ["main thread", "1 thread"] {
        let case = format!("burst: 20 MiB freed once, then 64 x 100 KiB taken, touched and freed, {thread}");
        if !setting.only.wants(&case) {
            continue;
        }
        let contestants = everyone(setting);
        let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
            machine::warm_for_a_run(WARM)?;
            let main = if thread == "main thread" { "main" } else { "other" };
            program::run(&mut worker(contestant, &["burst", main, &TIME_NS.to_string()]))?.figures()
        })?;
        compare(report, &case, &contestants, &results)?;
    }
    Ok(())
}

fn of_many_sizes(setting: &Setting, report: &mut Report) -> Result<()> {
    for threads in [0, 1, 2, 8] {
        let cell = Cell { sizes: Sizes::SMALLER_MIX, touch: Touch::Whole, threads, slots: 32 };
        let case = format!("burst: 20 MiB freed once, then {}", cell.name().trim_start_matches("cells: "));
        if !setting.only.wants(&case) {
            continue;
        }
        let contestants = everyone(setting);
        let rounds = cell.rounds(&contestants[1])?;
        let freed = Crowd { freed_before: LARGE, ..Crowd::default() };
        let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
            cell.measure(contestant, rounds, freed)
        })?;
        compare(report, &case, &contestants, &results)?;
    }
    Ok(())
}

/// A row for each other contestant; glibc's is to be met.
fn compare(report: &mut Report, case: &str, contestants: &[Contestant], results: &[Vec<Vec<f64>>]) -> Result<()> {
    let comparison = |peer: &Contestant| {
        let bar = if peer.name == "glibc" { Bar::Ratio(1.0) } else { Bar::None };
        Comparison::new(BENCH, case, "ns").bar(bar)
    };
    against_the_first(comparison, contestants, results, 0).try_for_each(|row| report.row(row))
}
