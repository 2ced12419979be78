//! Memory that is ready before it is asked for: how long virtual machines wait for theirs with and without a pool, what
//! a take costs, what those have who come to an empty pool, and what filling it costs others.

mod guest;
mod hugetlb;
mod monitor;
mod refill;
mod server;
mod start;
mod take;

use super::Setting;
use crate::machine;
use crate::program::on_path;
use crate::report::Report;
use anyhow::Result;
use pagecrew::sys::HUGE_PAGE_SIZE;
use server::{Server, Started};

const BENCH: &str = "pool";

/// Who takes part.
const OURS: &str = "pagecrew";
const ALL_THREADS: &str = "QEMU, all threads";
const ONE_THREAD: &str = "QEMU, 1 thread";

const GIB: usize = 1 << 30;

/// The filler may use all of a CPU where only what is ready then matters.
const FAST: [&str; 2] = ["--cpu", "100"];

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    if !machine::has_huge_pages() {
        report.note("this kernel has no huge pages, or they are switched off; the bench of the pool is left out");
        return Ok(());
    }
    if let Started::Refused(refusal) = Server::start(HUGE_PAGE_SIZE, &[])? {
        report.note(&format!("the bench of the pool is left out: {refusal}"));
        return Ok(());
    }
    let sizes = sizes(setting, report);
    let guests = on_path(guest::PROGRAM);
    if guests {
        start::run(&sizes, setting, report)?;
    } else {
        report.note(&format!("{} is not installed; virtual machines are left out", guest::PROGRAM));
    }
    take::run(&sizes, setting, report)?;
    if guests {
        hugetlb::run(setting, report)?;
    }
    refill::run(setting, report)
}

/// The size of what is measured in one size only: the largest of `sizes` that isn't above 8 GiB.
fn main_size(sizes: &[usize]) -> usize {
    sizes.iter().copied().filter(|&size| size <= 8 * GIB).max().unwrap_or(GIB)
}

/// Each size that this machine can have, once.
fn sizes(setting: &Setting, report: &Report) -> Vec<usize> {
    let wanted = if setting.quick { vec![GIB / 2, GIB] } else { [1, 2, 4, 8, 12].map(|size| size * GIB).to_vec() };
    let mut sizes: Vec<_> = wanted.into_iter().map(|size| machine::affordable(size, report)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}
