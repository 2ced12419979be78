//! How much of other programs' memory is read to find out that there is nothing to trim.

use super::{BENCH, command};
use crate::cases::Setting;
use crate::contestant::Contestant;
use crate::figures::median;
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::{Result, ensure};
use pagecrew::sys::HUGE_PAGE_SIZE;
use pagecrew::units::Bytes;

/// Manners of using huge pages, and what they are called.
const KINDS: [(&str, &str); 3] = [
    ("random", "random bytes everywhere"),
    ("line", "one random cache line in each 4 KiB"),
    ("zeroes", "60 % of its 4 KiB pages zero"),
];

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let bytes = machine::affordable(setting.size(512 << 20, 128 << 20), report);
    for (kind, name) in KINDS {
        let case = format!("{}, {name}", Bytes(bytes as u64));
        report.expect(setting.repetitions(), &case);
        let mut read = Vec::new();
        for _ in 0..setting.repetitions() {
            read.push(one(kind, bytes)?);
            report.step();
        }
        let comparison = Comparison::new(BENCH, format!("{case}: read per huge page in use"), "KiB");
        let whole = HUGE_PAGE_SIZE as f64 / 1024.0;
        report.row(comparison.bar(Bar::Ours(64.0)).row(median(&read), "the whole page", whole))?;
    }
    Ok(())
}

/// KiB that are read of each huge page of a program that uses them.
fn one(kind: &str, bytes: usize) -> Result<f64> {
    let mut program = Running::start(&mut worker(&Contestant::plain(""), &["trim-dense", kind, &bytes.to_string()]))?;
    program.figure()?;
    let counts = command::dry_run(program.pid())?;
    program.go()?;
    let wrong = program.figure()?;
    ensure!(wrong == 0.0, "{wrong} numbers of a program that was only looked at have changed");
    program.wait()?;
    let all = (bytes / HUGE_PAGE_SIZE) as u64;
    ensure!(counts.used >= all / 10 * 9, "{} of {all} huge pages were found to be in use", counts.used);
    ensure!(
        counts.under_used <= all / 100,
        "{} of {all} huge pages in use were taken for under-used",
        counts.under_used
    );
    ensure!(counts.split == 0, "a dry run has split {} huge pages", counts.split);
    Ok(counts.read_of_used_bytes as f64 / counts.used as f64 / 1024.0)
}
