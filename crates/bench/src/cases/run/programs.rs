//! Real programs, with nothing preloaded, with Pagecrew and with tcmalloc.

use super::super::Setting;
use super::judge::BENCH;
use crate::contest::{Rounds, against_the_first, alternate};
use crate::contestant::Contestant;
use crate::programs::{ALL, Program};
use crate::report::Report;
use crate::row::{Bar, Comparison, Row};
use anyhow::{Result, ensure};

/// Times better that all programs are on average (geometric): than without, and than with tcmalloc.
const MEAN: [f64; 2] = [1.15, 1.05];
/// Memory at the peak, against that without.
const PEAK: f64 = 1.10;

/// Rounds of a program that must not lose 2 %: medians of five of the same command differ by as much.
const ROUNDS_OF_NO_LOSS: usize = 11;

/// For a first impression.
const QUICK: [&str; 7] = ["Java", "Node", "Polars", "DuckDB", "pandas", "sort", "SQLite"];

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let mut contestants = vec![setting.ours.clone(), Contestant::plain("without")];
    contestants.extend(setting.peers.named("tcmalloc").cloned());
    // For each peer, how many times less each program's time was.
    let mut ratios = vec![Vec::new(); contestants.len() - 1];
    let mut failed = Vec::new();
    for definition in ALL {
        let wanted = setting.only.wants(&format!("programs: {}", definition.name));
        let left_out = setting.quick && !QUICK.contains(&definition.name) && !setting.only.asks_for(definition.name);
        if !wanted || left_out {
            continue;
        }
        // One that can't be run must not keep out the others.
        match one(setting, report, &contestants, definition.prepare(report)) {
            Ok(rows) => {
                for (ratios, row) in ratios.iter_mut().zip(rows.iter().filter(|row| row.unit == "s")) {
                    ratios.push(row.ratio);
                }
                rows.into_iter().try_for_each(|row| report.row(row))?;
            }
            Err(error) => {
                report.note(&format!("{}: {error:#}", definition.name));
                failed.push(definition.name);
            }
        }
    }
    for ((peer, ratios), bar) in contestants[1..].iter().zip(&ratios).zip(MEAN) {
        if !ratios.is_empty() {
            let case = format!("programs: geometric mean of {}", ratios.len());
            // The requirement is for all of them together.
            let bar = if ratios.len() == ALL.len() { Bar::Ratio(bar) } else { Bar::None };
            let comparison = Comparison::new(BENCH, case, "of ours").bar(bar);
            report.row(comparison.row(1.0, &peer.name, geometric_mean(ratios)))?;
        }
    }
    report.table("programs")?;
    ensure!(failed.is_empty(), "these programs failed: {}", failed.join(", "));
    Ok(())
}

/// The comparisons of one program; none where it is not installed.
fn one(
    setting: &Setting,
    report: &Report,
    contestants: &[Contestant],
    program: Result<Option<Program>>,
) -> Result<Vec<Row>> {
    let Some(mut program) = program? else { return Ok(Vec::new()) };
    let least = program.definition.least;
    let rounds = if least < 1.0 && !setting.quick { ROUNDS_OF_NO_LOSS } else { setting.repetitions() };
    let results = alternate(report, program.definition.name, rounds, contestants, |contestant| {
        let usage = program.run(contestant)?;
        Ok(vec![usage.seconds, usage.peak_mib])
    })?;
    Ok(rows(program.definition.name, least, contestants, &results))
}

/// What of a program is compared: times with those of everybody, memory with that without.
fn rows(name: &str, least: f64, contestants: &[Contestant], results: &[Rounds]) -> Vec<Row> {
    let bar = |peer: &Contestant, bar| if peer.name == "without" { bar } else { Bar::None };
    let time =
        |peer: &Contestant| Comparison::new(BENCH, format!("programs: {name}"), "s").bar(bar(peer, Bar::Ratio(least)));
    let peak = |peer: &Contestant| {
        Comparison::new(BENCH, format!("programs: {name}, peak"), "MiB").bar(bar(peer, Bar::Times(PEAK)))
    };
    let times = against_the_first(time, contestants, results, 0);
    times.chain(against_the_first(peak, contestants, results, 1)).collect()
}

fn geometric_mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_it_was_without_is_a_bar() {
        let contestants = ["pagecrew", "without", "tcmalloc"].map(Contestant::plain);
        let results: Vec<Rounds> = [(1.0, 120.0), (1.3, 100.0), (0.9, 200.0)].map(|(s, m)| vec![vec![s, m]]).to_vec();
        let rows = rows("Java", 1.4, &contestants, &results);
        let verdicts: Vec<_> = rows.iter().map(|row| (row.peer.as_str(), row.unit, row.met)).collect();
        assert_eq!(
            verdicts,
            [
                ("without", "s", Some(false)),
                ("tcmalloc", "s", None),
                ("without", "MiB", Some(false)),
                ("tcmalloc", "MiB", None),
            ]
        );
    }

    #[test]
    fn the_mean_is_geometric() {
        assert!((geometric_mean(&[0.5, 2.0, 8.0]) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_first_impression_is_of_programs_that_there_are() {
        assert!(QUICK.iter().all(|name| ALL.iter().any(|program| program.name == *name)));
    }
}
