//! Real programs with and without Pagecrew: what changes in time, page faults and memory.

mod fasttext;
mod numpy;
mod redis;

use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::programs;
use crate::report::Report;
use crate::row::{Bar, Comparison, Row};
use anyhow::Result;
pub use redis::run as redis_run;
use std::time::Duration;

/// Runs of each program, with and without Pagecrew.
const REPETITIONS: usize = 3;

/// More than any of them needs.
const WARM: usize = 4 << 30;

/// Pagecrew may cost this much more memory at the peak.
const MOST_PEAK: f64 = 1.10;

/// After its work, a program is left alone for this long before its memory is looked at for the last time.
const PAUSE: Duration = Duration::from_secs(15);

/// One figure that a program's run gives.
struct Metric {
    name: String,
    unit: &'static str,
    bar: Bar,
}

impl Metric {
    fn new(name: impl Into<String>, unit: &'static str) -> Metric {
        Metric { name: name.into(), unit, bar: Bar::None }
    }

    /// What every program ends with: page faults and peak.
    fn faults_and_peak() -> [Metric; 2] {
        let mut peak = Metric::new("peak memory", "MiB");
        peak.bar = Bar::Times(MOST_PEAK);
        [Metric::new("page faults", ""), peak]
    }
}

/// A program that is ready to be run any number of times.
struct Program {
    name: &'static str,
    metrics: Vec<Metric>,
    /// One run with a contestant's memory, with that pause after its work; gives a figure for each metric, and in MiB what is
    /// resident after the pause, where the program lives on after its work.
    run: Run,
}

/// See [`Program::run`].
type Run = Box<dyn FnMut(&Contestant, Duration) -> Result<(Vec<f64>, Option<f64>)>>;

/// Runs every program that is installed.
pub fn run(json: bool) -> Result<()> {
    let mut report = Report::new(json);
    let contestants = [Contestant::pagecrew()?, Contestant::plain("without")];
    for prepare in [numpy::prepare, redis::prepare, fasttext::prepare, java, node, polars, duckdb] {
        if let Some(program) = prepare(&report)? {
            compare(program, &contestants, &report)?.into_iter().try_for_each(|row| report.row(row))?;
            let rows = report.take_rows();
            report.print("", &Row::BEFORE_AND_AFTER, rows.iter().map(|row| row.before_and_after().to_vec()))?;
        }
    }
    Ok(())
}

fn java(report: &Report) -> Result<Option<Program>> {
    of_the_bench(programs::JAVA, report)
}

fn node(report: &Report) -> Result<Option<Program>> {
    of_the_bench(programs::NODE, report)
}

fn polars(report: &Report) -> Result<Option<Program>> {
    of_the_bench(programs::POLARS, report)
}

fn duckdb(report: &Report) -> Result<Option<Program>> {
    of_the_bench(programs::DUCKDB, report)
}

/// A program that `pagecrew bench run` has, too. It ends with its work, so there is no memory to look at after a pause.
fn of_the_bench(definition: programs::Definition, report: &Report) -> Result<Option<Program>> {
    let Some(mut program) = definition.prepare(report)? else { return Ok(None) };
    let metrics = [Metric::new("time", "s")].into_iter().chain(Metric::faults_and_peak()).collect();
    let run = move |contestant: &Contestant, _pause: Duration| {
        let usage = program.run(contestant)?;
        Ok((vec![usage.seconds, usage.faults as f64, usage.peak_mib], None))
    };
    Ok(Some(Program { name: definition.name, metrics, run: Box::new(run) }))
}

/// Runs `program` in turns. Only the last run of each contestant has the pause.
fn compare(mut program: Program, contestants: &[Contestant; 2], report: &Report) -> Result<Vec<Row>> {
    let mut left = Vec::new();
    let mut runs = 0;
    let results = alternate(report, program.name, REPETITIONS, contestants, |contestant| {
        runs += 1;
        machine::warm_for_a_run(WARM)?;
        let last = runs > (REPETITIONS - 1) * contestants.len();
        let (figures, resident) = (program.run)(contestant, if last { PAUSE } else { Duration::ZERO })?;
        left.extend(resident.filter(|_| last));
        Ok(figures)
    })?;
    let comparison = |name: &str, unit, bar, resolution| {
        Comparison::new("demo", format!("{}: {name}", program.name), unit).bar(bar).resolution(resolution)
    };
    let mut rows: Vec<Row> = Vec::new();
    for (index, metric) in program.metrics.iter().enumerate() {
        let comparison = comparison(&metric.name, metric.unit, metric.bar, 1e-6);
        rows.extend(against_the_first(|_| comparison.clone(), contestants, &results, index));
    }
    if let [ours, theirs] = left[..] {
        let name = format!("memory {} s after its work", PAUSE.as_secs());
        rows.push(comparison(&name, "MiB", Bar::None, 1.0).row(ours, &contestants[1].name, theirs));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_becomes_rows() {
        let metrics = [Metric::new("time", "s")].into_iter().chain(Metric::faults_and_peak()).collect();
        let run: Run = Box::new(|contestant, pause| {
            let ours = contestant.name == "pagecrew";
            let figures = if ours { vec![1.0, 10.0, 115.0] } else { vec![3.0, 1000.0, 100.0] };
            Ok((figures, Some(pause.as_secs_f64())))
        });
        let contestants = [Contestant::plain("pagecrew"), Contestant::plain("without")];
        let rows = compare(Program { name: "Test", metrics, run }, &contestants, &Report::new(true)).unwrap();
        let summary: Vec<_> = rows.iter().map(|row| (row.case.as_str(), row.ratio, row.met)).collect();
        assert_eq!(
            summary,
            [
                ("Test: time", 3.0, None),
                ("Test: page faults", 100.0, None),
                ("Test: peak memory", 0.8696, Some(false)),
                ("Test: memory 15 s after its work", 1.0, None),
            ]
        );
    }
}
