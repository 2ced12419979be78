//! What the layer costs programs of small blocks: loops of mimalloc-bench, over each malloc and with that malloc alone.

use super::super::Setting;
use super::judge::BENCH;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::program::{self, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::SmallKind;
use anyhow::Result;

/// Of what the malloc does alone.
const LEAST: f64 = 0.98;
const THREADS: [usize; 2] = [1, 8];
const TIME_NS: usize = 250_000_000;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let mut below = vec![Contestant::plain("glibc")];
    below.extend(setting.peers.all().iter().cloned());
    for kind in SmallKind::ALL {
        for threads in THREADS {
            for below in &below {
                pair(setting, report, kind, threads, below)?;
            }
        }
    }
    report.table("small")
}

/// One malloc with the layer and alone.
fn pair(setting: &Setting, report: &mut Report, kind: SmallKind, threads: usize, below: &Contestant) -> Result<()> {
    let name = kind.argument();
    let case = format!("small: {name}, {threads} thread{}, {}", if threads == 1 { "" } else { "s" }, below.name);
    if !setting.only.wants(&case) {
        return Ok(());
    }
    let contestants = [setting.ours.clone().over(below), below.clone()];
    // A difference of 2 % needs more rounds than others.
    let results = alternate(report, &case, 3 * setting.repetitions(), &contestants, |contestant| {
        program::run(&mut worker(contestant, &["small", name, &threads.to_string(), &TIME_NS.to_string()]))?.figures()
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &case, "ns").bar(Bar::Ratio(LEAST));
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}
