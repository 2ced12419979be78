//! What one take costs, and a process that has a file of the pool as its heap.

use super::server::Server;
use super::{BENCH, FAST, OURS, main_size};
use crate::cases::Setting;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::{Result, ensure};
use pagecrew::units::Bytes;

const ON_THE_SPOT: &str = "zeroes on the spot";
const HUGE: &str = "mmap, huge pages";
const SMALL: &str = "mmap, pages of 4 KiB";

pub fn run(sizes: &[usize], setting: &Setting, report: &mut Report) -> Result<()> {
    for &size in sizes {
        take(size, report)?;
    }
    heap(main_size(sizes), setting, report)
}

/// Runs a worker on its own memory, and returns its figures.
fn figures(arguments: &[&str]) -> Result<Vec<f64>> {
    program::run(&mut worker(&Contestant::plain(""), arguments))?.figures()
}

/// The same for one that takes `size` bytes of the pool.
fn figures_of_client(name: &str, server: &Server, size: usize) -> Result<Vec<f64>> {
    let socket = server.socket().display().to_string();
    figures(&[name, &socket, &size.to_string(), &server.node().to_string()])
}

fn take(size: usize, report: &mut Report) -> Result<()> {
    const TAKES: usize = 5;
    let contestants = [OURS, ON_THE_SPOT].map(Contestant::plain);
    let case = format!("take {}, all of it ready", Bytes(size as u64));
    let server = Server::start(size, &FAST)?.serving()?;
    let results = alternate(report, &case, TAKES, &contestants, |contestant| {
        if contestant.name != OURS {
            server.empty()?;
            machine::warm_for_a_run(size)?;
            return figures(&["own-zeroes", &size.to_string()]);
        }
        server.fill()?;
        let figures = figures_of_client("pool-take", &server, size)?;
        ensure!(figures.get(1) == Some(&(size as f64)), "{figures:?}: what was taken was not ready");
        Ok(figures[..1].to_vec())
    })?;
    server.stop()?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &*case, "ms").bar(Bar::Ours(1.0));
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}

/// A program that gets its heap and writes to each page of it once.
fn heap(size: usize, setting: &Setting, report: &mut Report) -> Result<()> {
    let contestants = [OURS, HUGE, SMALL].map(Contestant::plain);
    let case = format!("a heap of {}, got and touched", Bytes(size as u64));
    let server = Server::start(size, &FAST)?.serving()?;
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        if contestant.name == OURS {
            server.fill()?;
            return figures_of_client("pool-heap", &server, size);
        }
        server.empty()?;
        machine::warm_for_a_run(size)?;
        let pages = if contestant.name == HUGE { "huge" } else { "small" };
        figures(&["own-heap", &size.to_string(), pages])
    })?;
    server.stop()?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &*case, "ms");
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}
