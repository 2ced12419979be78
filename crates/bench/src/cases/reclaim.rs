//! Readers of a fast disk on a machine with little free memory: how often they have to reclaim for themselves, and how long they take.

use super::Setting;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::kept::Kept;
use crate::program::{Running, pagecrew, run as run_program, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::files_of_disk;
use anyhow::{Context, Result};
use pagecrew::sys::procfs;
use pagecrew::units::Bytes;
use std::path::Path;
use std::time::Duration;

const BENCH: &str = "reclaim";

/// A machine is in use if less than this share of its memory is available.
const AT_REST: f64 = 0.85;
/// So much of the memory is left to the page cache: what a machine that is well used has.
const LEFT: f64 = 0.05;
/// The disk takes a third of the memory, and no more than this.
const DISK_MOST: usize = 8 << 30;

const FACTOR: &str = "/proc/sys/vm/watermark_scale_factor";
const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

/// From one load to the next one of a steady state.
const PAUSE: Duration = Duration::from_secs(2);
/// Without a load, demand is forgotten within this time.
const REST: Duration = Duration::from_secs(60);
/// And this much is read slowly then, so that what is free is what is kept free.
const SLOWLY: usize = 1 << 30;

/// What a contestant does to the machine.
enum Change {
    Nothing,
    Setting(Kept),
    Ours(Running),
}

impl Change {
    /// Makes the change that `name` stands for.
    fn make(name: &str) -> Result<Change> {
        let setting = |path: &str, value: &str| Kept::setting(Path::new(path), value).map(Change::Setting);
        match name.split_once(' ') {
            None if name == OURS => {
                let mut program = Running::start(&mut pagecrew(&["reclaim", "--json"]))?;
                program.line().context("pagecrew reclaim")?;
                Ok(Change::Ours(program))
            }
            None => Ok(Change::Nothing),
            Some(("watermark_scale_factor", value)) => setting(FACTOR, value),
            Some((_, times)) => {
                let before: u64 = std::fs::read_to_string(MIN_FREE)?.trim().parse().context(MIN_FREE)?;
                setting(MIN_FREE, &(before * times.trim_start_matches('x').parse::<u64>()?).to_string())
            }
        }
    }

    fn undo(self) -> Result<()> {
        match self {
            Change::Nothing => Ok(()),
            Change::Setting(kept) => kept.undo(),
            Change::Ours(program) => {
                program.signal(libc::SIGTERM)?;
                program.end().map(drop)
            }
        }
    }
}

const OURS: &str = "pagecrew";
const STOCK: &str = "stock";

/// The contestants, ours first: settings of the kernel's, one as it is said and one as many times what it is.
fn contestants(quick: bool) -> Vec<Contestant> {
    let names: &[&str] = if quick {
        &[OURS, STOCK, "watermark_scale_factor 200"]
    } else {
        &[
            OURS,
            STOCK,
            "watermark_scale_factor 100",
            "watermark_scale_factor 200",
            "watermark_scale_factor 500",
            "min_free_kbytes x4",
        ]
    };
    names.iter().map(|name| Contestant::plain(name)).collect()
}

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    if let Some(reason) = refusal()? {
        report.note(&format!("the bench of reclaim is left out: {reason}"));
        return Ok(());
    }
    let total = procfs::memory_info()?.total as usize;
    let base = tempfile::Builder::new().prefix("pagecrew-bench-").tempdir()?;
    report.expect(1, "a disk in memory");
    let disk = Kept::disk(base.path(), (total / 3).min(DISK_MOST))?;
    report.step();
    let left = (total as f64 * LEFT) as usize;
    report.note(&format!("all memory but {} is taken while this runs", Bytes(left as u64)));
    let locked = Running::start(&mut worker(&Contestant::plain(""), &["lock", &left.to_string()]));
    let result = locked.and_then(|mut locked| {
        locked.line()?;
        let files = files_of_disk(base.path());
        loads(&files, setting, report)?;
        rest(&files, setting, report)
    });
    disk.undo().and(result)
}

/// Why this machine is left alone.
fn refusal() -> Result<Option<String>> {
    let memory = procfs::memory_info()?;
    let in_use = memory.total.saturating_sub(memory.available);
    if (memory.available as f64) < memory.total as f64 * AT_REST {
        return Ok(Some(format!(
            "the machine is in use ({} of its memory), and this would take nearly all of the rest",
            Bytes(in_use)
        )));
    }
    // The same user's right to all that is needed.
    if let Err(error) = std::fs::OpenOptions::new().write(true).open(FACTOR) {
        return Ok(Some(format!("{FACTOR}: {error}")));
    }
    Ok(None)
}

/// A load: seconds, direct reclaims, MiB reclaimed by the readers.
fn load(files: &Path, readers: usize) -> Result<Vec<f64>> {
    let arguments = ["read-files", &files.to_string_lossy(), &readers.to_string()];
    run_program(&mut worker(&Contestant::plain("readers"), &arguments))?.figures()
}

fn loads(files: &Path, setting: &Setting, report: &mut Report) -> Result<()> {
    let contestants = contestants(setting.quick);
    for &readers in if setting.quick { &[8][..] } else { &[8, 16] } {
        let results =
            alternate(report, &format!("{readers} readers"), setting.repetitions(), &contestants, |contestant| {
                // What is free is what the kernel's own settings keep free.
                load(files, readers)?;
                let change = Change::make(&contestant.name)?;
                std::thread::sleep(PAUSE);
                let first = load(files, readers);
                std::thread::sleep(PAUSE);
                let steady = load(files, readers);
                change.undo()?;
                Ok([first?, steady?].concat())
            })?;
        for (when, from) in [("after rest", 0), ("steady", 3)] {
            let bars = |peer: &Contestant, stock: f64, others: f64| {
                Bar::Ratio(if peer.name == STOCK { stock } else { others })
            };
            let of = |what: &str| format!("{readers} readers, {when}: {what}");
            let stalls = |peer: &Contestant| {
                Comparison::new(BENCH, of("direct reclaims"), "").resolution(1.0).bar(bars(peer, 100.0, 1.0))
            };
            let time = |peer: &Contestant| Comparison::new(BENCH, of("time"), "s").bar(bars(peer, 1.3, 0.98));
            let reclaimed =
                |_: &Contestant| Comparison::new(BENCH, of("reclaimed by the readers"), "MiB").resolution(0.1);
            let rows = against_the_first(stalls, &contestants, &results, from + 1)
                .chain(against_the_first(time, &contestants, &results, from))
                .chain(against_the_first(reclaimed, &contestants, &results, from + 2));
            for row in rows {
                report.row(row)?;
            }
        }
    }
    Ok(())
}

/// What is kept free while nobody needs it.
fn rest(files: &Path, setting: &Setting, report: &mut Report) -> Result<()> {
    if setting.quick {
        return Ok(());
    }
    let contestants = contestants(true);
    let results = alternate(report, "free at rest", 3, &contestants, |contestant| {
        load(files, 8)?;
        let change = Change::make(&contestant.name)?;
        std::thread::sleep(PAUSE);
        load(files, 8)?;
        std::thread::sleep(REST);
        let arguments = ["read-slowly", &files.to_string_lossy(), &SLOWLY.to_string()];
        let free =
            run_program(&mut worker(&Contestant::plain("reader"), &arguments)).and_then(|outcome| outcome.figures());
        change.undo()?;
        free
    })?;
    let free = |peer: &Contestant| {
        let comparison = Comparison::new(BENCH, "free memory a minute later", "MiB");
        if peer.name == STOCK { comparison.bar(Bar::Times(1.01)) } else { comparison.bar(Bar::Ratio(1.0)) }
    };
    for row in against_the_first(free, &contestants, &results, 0) {
        report.row(row)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_is_the_first_and_stock_is_there() {
        for quick in [false, true] {
            let names: Vec<String> = contestants(quick).into_iter().map(|contestant| contestant.name).collect();
            assert_eq!(names[..2], [OURS, STOCK]);
        }
    }

    #[test]
    fn a_change_is_what_its_name_says() {
        assert!(matches!(Change::make(STOCK), Ok(Change::Nothing)));
    }
}
