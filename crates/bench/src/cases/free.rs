//! Giving memory back: how long the program waits, how long until the machine has it, and what an idle program keeps.

use super::Setting;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::Result;
use pagecrew::units::Bytes;

const BENCH: &str = "free";

/// The program after a burst is looked at again after this time.
const IDLE_SECONDS: &str = "30";

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let bytes = machine::affordable(setting.size(8 << 30, 2 << 30), report);
    machine::warm(bytes, report)?;
    release(setting, report, bytes)?;
    exit(setting, report, bytes)?;
    if !setting.quick {
        idle(setting, report)?;
    }
    Ok(())
}

/// `free` against `munmap`, for the caller and for the machine.
fn release(setting: &Setting, report: &mut Report, bytes: usize) -> Result<()> {
    let ours = setting.ours.clone().with("PAGECREW_HUGE_PAGES", "off");
    let cases = [
        ("release", ours.clone(), "until the caller goes on", 100.0),
        ("release-back", ours.with("PAGECREW_RETAIN", "0"), "until the memory is back", 1.85),
    ];
    for (program, ours, what, bar) in cases {
        let contestants = [ours, Contestant::plain("munmap")];
        let case = format!("{} in 4 KiB pages, {what}", Bytes(bytes as u64));
        let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
            let origin = if contestant.name == "munmap" { "map" } else { "malloc" };
            crate::program::run(&mut worker(contestant, &[program, origin, &bytes.to_string()]))?.figures()
        })?;
        let comparison = |_: &Contestant| Comparison::new(BENCH, &case, "ms").bar(Bar::Ratio(bar));
        for row in against_the_first(comparison, &contestants, &results, 0) {
            report.row(row)?;
        }
    }
    Ok(())
}

/// From a program's last word until its parent has waited for it.
fn exit(setting: &Setting, report: &mut Report, bytes: usize) -> Result<()> {
    let ours = setting.ours.clone().with("PAGECREW_HUGE_PAGES", "off");
    let contestants = [ours, Contestant::plain("without")];
    let case = format!("exit with {} in 4 KiB pages, seen by the parent", Bytes(bytes as u64));
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        let mut running = Running::start(&mut worker(contestant, &["release-exit", &bytes.to_string()]))?;
        let last_word = running.figure()?;
        running.wait()?;
        Ok(vec![(pagecrew::sys::clock::now_ns() as f64 - last_word) / 1e6])
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &case, "ms").bar(Bar::Ratio(1.8));
    for row in against_the_first(comparison, &contestants, &results, 0) {
        report.row(row)?;
    }
    Ok(())
}

/// What is still resident long after a burst. Nothing in it is a matter of timing, so one run of each, side by side, is enough.
fn idle(setting: &Setting, report: &mut Report) -> Result<()> {
    let bytes = machine::affordable(2 << 30, report);
    let contestants = [setting.ours.clone(), Contestant::plain("glibc")];
    let case = format!("left {IDLE_SECONDS} s after {} were freed", Bytes(bytes as u64));
    report.expect(contestants.len(), &case);
    let start = |contestant| Running::start(&mut worker(contestant, &["idle", &bytes.to_string(), IDLE_SECONDS]));
    let mut running = contestants.iter().map(start).collect::<Result<Vec<_>>>()?;
    let mut left = Vec::new();
    for program in &mut running {
        left.push(program.figure()?);
        report.step();
    }
    let comparison = Comparison::new(BENCH, case, "MiB").resolution(1.0).bar(Bar::Ours(64.0));
    report.row(comparison.row(left[0], &contestants[1].name, left[1]))
}
