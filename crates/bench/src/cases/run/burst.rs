//! One large block is freed once, and then many smaller ones are taken, touched and freed, over and over.

use super::super::Setting;
use super::everyone;
use super::judge::BENCH;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::Result;

const TIME_NS: usize = 150_000_000;
/// More than is in use at once.
const WARM: usize = 64 << 20;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
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
        let comparison = |peer: &Contestant| {
            let bar = if peer.name == "glibc" { Bar::Ratio(1.0) } else { Bar::None };
            Comparison::new(BENCH, &case, "ns").bar(bar)
        };
        against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))?;
    }
    report.table("burst")
}
