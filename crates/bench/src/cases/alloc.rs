//! Getting memory: zeroed, grown, small, and as NumPy and pandas ask for it.

use super::Setting;
use crate::contest::{Rounds, against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, Outcome, worker};
use crate::python;
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::{Context, Result, ensure};
use pagecrew::units::Bytes;
use std::cell::RefCell;
use std::path::Path;
use std::process::Command;

const BENCH: &str = "alloc";

const NUMPY_ROWS: &str = include_str!("../../scripts/numpy_rows.py");
const DATA_FRAMES: &str = include_str!("../../scripts/data_frames.py");
/// A little more than the data-frame job needs at its full size, with the malloc that keeps most.
const FRAMES_PEAK: usize = 5 << 30;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    machine::warm(machine::affordable(setting.size(4 << 30, 2 << 30), report), report)?;
    churn(setting, report, 0)?;
    churn(setting, report, 20)?;
    grow(setting, report)?;
    pairs(setting, report)?;
    match python::with_numpy() {
        Some(python) => {
            numpy_rows(setting, report, &python)?;
            data_frames(setting, report, &python)?;
        }
        None => report.note(python::MISSING),
    }
    match python::interpreter() {
        Some(python) => start(setting, report, &python)?,
        None => report.note("no python3; its start is left out"),
    }
    Ok(())
}

fn glibc() -> Contestant {
    Contestant::plain("glibc")
}

/// Pagecrew, glibc, and the other mallocs as users get them.
fn everyone(setting: &Setting) -> Vec<Contestant> {
    [setting.ours.clone(), glibc()].into_iter().chain(setting.peers.all().iter().cloned()).collect()
}

/// Compares one figure of the first contestant with each other one's.
fn add_rows(
    report: &mut Report,
    comparison: impl Fn(&Contestant) -> Comparison,
    contestants: &[Contestant],
    results: &[Rounds],
    index: usize,
) -> Result<()> {
    against_the_first(comparison, contestants, results, index).try_for_each(|row| report.row(row))
}

/// calloc, touch, free, over and over, with or without `other_work` milliseconds of other work between two rounds.
fn churn(setting: &Setting, report: &mut Report, other_work: u32) -> Result<()> {
    let bytes = setting.size(256 << 20, 64 << 20);
    let size = Bytes(bytes as u64);
    let (case, over_glibc, over_others) = match other_work {
        0 => (format!("calloc {size}, touch, free"), 40.0, 3.0),
        _ => (format!("calloc {size}, touch, free; {other_work} ms of other work between"), 100.0, 8.0),
    };
    let contestants = everyone(setting);
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        program::run(&mut worker(contestant, &["churn", &bytes.to_string(), &other_work.to_string()]))?.figures()
    })?;
    let comparison = |peer: &Contestant| {
        let bar = if peer.name == "glibc" { over_glibc } else { over_others };
        Comparison::new(BENCH, &case, "ms").bar(Bar::Ratio(bar))
    };
    add_rows(report, comparison, &contestants, &results, 0)
}

/// A buffer that grows by doubling.
fn grow(setting: &Setting, report: &mut Report) -> Result<()> {
    let last = machine::affordable(setting.size(4 << 30, 1 << 30), report);
    let first = last / 64;
    let case = format!("realloc {} to {}", Bytes(first as u64), Bytes(last as u64));
    let contestants = [setting.ours.clone(), glibc()];
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        machine::warm_for_a_run(last)?;
        program::run(&mut worker(contestant, &["grow", &first.to_string(), &last.to_string()]))?.figures()
    })?;
    for (index, part) in ["the whole job", "inside realloc"].iter().enumerate() {
        let comparison = |_: &Contestant| Comparison::new(BENCH, format!("{case}, {part}"), "ms").bar(Bar::Ratio(1.0));
        add_rows(report, comparison, &contestants, &results, index)?;
    }
    Ok(())
}

/// What the layer costs a program that allocates nothing large.
fn pairs(setting: &Setting, report: &mut Report) -> Result<()> {
    let case = "malloc and free of 64 bytes";
    let contestants = [setting.ours.clone(), Contestant::plain("without")];
    let pairs = setting.size(50_000_000, 10_000_000).to_string();
    let results = alternate(report, case, setting.repetitions() + 2, &contestants, |contestant| {
        program::run(&mut worker(contestant, &["pairs", "64", &pairs]))?.figures()
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, case, "ns").bar(Bar::Ratio(0.9));
    add_rows(report, comparison, &contestants, &results, 0)
}

/// A run of a script.
fn script(contestant: &Contestant, python: &Path, text: &str, arguments: &[String]) -> Result<Outcome> {
    let mut command = Command::new(python);
    command.arg("-c").arg(text).args(arguments);
    contestant.prepare(&mut command);
    program::run(&mut command)
}

/// The three things that NumPy programs do with large memory all day.
fn numpy_rows(setting: &Setting, report: &mut Report, python: &Path) -> Result<()> {
    let mib = setting.size(256, 64);
    let mut contestants = everyone(setting);
    if let Some(jemalloc) = setting.peers.named("jemalloc") {
        let mut keeping = jemalloc.clone().with("MALLOC_CONF", "thp:always,dirty_decay_ms:-1");
        keeping.name = "jemalloc that keeps all".to_owned();
        contestants.push(keeping);
    }
    let case = format!("NumPy {mib} MiB");
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        script(contestant, python, NUMPY_ROWS, &[mib.to_string()])?.figures()
    })?;
    for (index, (row, bar)) in [("zeros+touch", 2.5), ("a*2+1", 1.05), ("empty+fill", 1.0)].into_iter().enumerate() {
        let comparison = |_: &Contestant| Comparison::new(BENCH, format!("{case} {row}"), "ms").bar(Bar::Ratio(bar));
        add_rows(report, comparison, &contestants, &results, index)?;
    }
    Ok(())
}

/// A data-frame job from start to exit, over glibc and over tcmalloc; every run has to come to the same result.
fn data_frames(setting: &Setting, report: &mut Report, python: &Path) -> Result<()> {
    let rows = setting.size(7_000_000, 1_500_000).to_string();
    let case = format!("data frames, {rows} rows");
    let mut contestants = vec![setting.ours.clone(), glibc()];
    if let Some(tcmalloc) = setting.peers.named("tcmalloc") {
        contestants.extend([setting.ours.clone().over(tcmalloc), tcmalloc.clone()]);
    }
    let checksum = RefCell::new(None::<String>);
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        machine::warm_for_a_run(setting.size(FRAMES_PEAK, FRAMES_PEAK / 4))?;
        let outcome = script(contestant, python, DATA_FRAMES, std::slice::from_ref(&rows))?;
        let found = outcome.output.lines().last().context("the job printed no checksum")?.to_owned();
        let mut expected = checksum.borrow_mut();
        let expected = expected.get_or_insert_with(|| found.clone());
        ensure!(*expected == found, "the job's results differ: {found} instead of {expected}");
        Ok(vec![outcome.usage.seconds])
    })?;
    for (pair, bar) in [(0..2, 1.15), (2..4, 1.0)] {
        if let (Some(contestants), Some(results)) = (contestants.get(pair.clone()), results.get(pair)) {
            let case = match contestants[0].name.as_str() {
                "pagecrew" => case.clone(),
                over => format!("{case}, {over}"),
            };
            let comparison = |_: &Contestant| Comparison::new(BENCH, &case, "s").bar(Bar::Ratio(bar));
            add_rows(report, comparison, contestants, results, 0)?;
        }
    }
    Ok(())
}

/// What a program that does nothing pays.
fn start(setting: &Setting, report: &mut Report, python: &Path) -> Result<()> {
    let case = "python3 -c pass";
    let contestants = [setting.ours.clone(), Contestant::plain("without")];
    let results = alternate(report, case, 25, &contestants, |contestant| {
        Ok(vec![script(contestant, python, "pass", &[])?.usage.seconds * 1e3])
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, case, "ms").bar(Bar::Extra(3.0));
    add_rows(report, comparison, &contestants, &results, 0)?;
    let case = "threads of python3";
    let count = "import os; print(len(os.listdir('/proc/self/task')))";
    let results =
        alternate(report, case, 1, &contestants, |contestant| script(contestant, python, count, &[])?.figures())?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, case, "").bar(Bar::Ratio(1.0));
    add_rows(report, comparison, &contestants, &results, 0)
}
