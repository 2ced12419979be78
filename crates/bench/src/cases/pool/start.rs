//! How long a virtual machine takes until its monitor answers, with memory from a pool and with QEMU's own.

use super::guest::{Guest, Memory, Translator};
use super::server::Server;
use super::{ALL_THREADS, BENCH, FAST, GIB, ONE_THREAD, OURS, main_size};
use crate::cases::Setting;
use crate::contest::{Rounds, against_the_first, alternate, column};
use crate::contestant::Contestant;
use crate::figures::readable;
use crate::machine;
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::Result;
use pagecrew::units::Bytes;

const UNTOUCHED: &str = "no prealloc";

/// Everybody, in the order of the results.
const EVERYBODY: [&str; 4] = [OURS, ALL_THREADS, ONE_THREAD, UNTOUCHED];

/// The size that there is a bar for.
const JUDGED: usize = 8 * GIB;
/// The rounds of that: QEMU itself takes from 30 to 100 ms from one start to the next.
const JUDGED_ROUNDS: usize = 9;

/// What QEMU is asked for, and how many times faster than by all its threads that has to be.
struct Kind {
    name: &'static str,
    locked: bool,
    translator: Translator,
    bar: Bar,
    /// Measured in every size, or in the judged one alone.
    every_size: bool,
}

const KINDS: [Kind; 3] = [
    Kind { name: "prealloc", locked: false, translator: Translator::Usual, bar: Bar::Ratio(6.0), every_size: true },
    Kind {
        name: "prealloc, mem-lock",
        locked: true,
        translator: Translator::Usual,
        bar: Bar::Ratio(2.5),
        every_size: true,
    },
    // What is left of it where the CPU runs the guest.
    Kind {
        name: "prealloc, mem-lock, little translated code",
        locked: true,
        translator: Translator::Small,
        bar: Bar::None,
        every_size: false,
    },
];

/// What QEMU pins beside the guest's memory, code that it has translated most of all.
const BESIDE: usize = 3 << 29;

/// What everybody measured for each size.
type Sizes = Vec<(usize, Vec<Rounds>)>;

pub fn run(sizes: &[usize], setting: &Setting, report: &mut Report) -> Result<()> {
    let threads = machine::cpus()?.len();
    for kind in &KINDS {
        let contestants = EVERYBODY.map(Contestant::plain);
        let mut measured = Sizes::new();
        for &size in sizes.iter().filter(|&&size| kind.every_size || size == main_size(sizes)) {
            let case = format!("{} guest, {}", Bytes(size as u64), kind.name);
            let server = Server::start(size, &FAST)?.serving()?;
            let rounds = if size == JUDGED { setting.repetitions().max(JUDGED_ROUNDS) } else { setting.repetitions() };
            let results = alternate(report, &case, rounds, &contestants, |contestant| {
                one(&server, &contestant.name, size, kind, threads)
            })?;
            let comparison = |peer: &Contestant| {
                let judged = size == JUDGED && peer.name == ALL_THREADS;
                Comparison::new(BENCH, &*case, "s").bar(if judged { kind.bar } else { Bar::None })
            };
            server.stop()?;
            against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))?;
            measured.push((size, results));
        }
        growth(kind, &measured, report)?;
        print(kind, &measured, report)?;
    }
    empty(main_size(sizes), setting, threads, report)
}

/// The seconds that one start takes.
fn one(server: &Server, contestant: &str, size: usize, kind: &Kind, threads: usize) -> Result<Vec<f64>> {
    let memory = match contestant {
        OURS => Memory::Pool(server),
        ALL_THREADS => Memory::Own { threads },
        ONE_THREAD => Memory::Own { threads: 1 },
        _ => Memory::Untouched,
    };
    if contestant == OURS {
        server.fill()?;
    } else {
        server.empty()?;
    }
    machine::warm_for_a_run(size + if kind.locked { BESIDE } else { 0 })?;
    let Kind { locked, translator, .. } = *kind;
    Ok(vec![Guest { size, locked, translator, memory }.seconds_to_monitor()?])
}

/// How much longer the largest machine takes than the smallest.
fn growth(kind: &Kind, measured: &Sizes, report: &mut Report) -> Result<()> {
    let [(small, least), .., (large, most)] = &measured[..] else { return Ok(()) };
    // As many rounds as both have.
    let more = |who: usize| -> Vec<f64> {
        column(&most[who], 0).iter().zip(column(&least[who], 0)).map(|(most, least)| most - least).collect()
    };
    let case = format!("{}, growth from {} to {}", kind.name, Bytes(*small as u64), Bytes(*large as u64));
    let bar = if kind.locked { Bar::None } else { Bar::Ours(0.1) };
    let comparison = Comparison::new(BENCH, case, "s").resolution(0.001).bar(bar);
    report.row(comparison.rounds(&more(0), ALL_THREADS, &more(1)))
}

/// Each round with and without the pool.
fn print(kind: &Kind, measured: &Sizes, report: &Report) -> Result<()> {
    let rounds = measured.iter().map(|(_, results)| results[0].len()).max().unwrap_or(0);
    let headings: Vec<_> = std::iter::once(String::new()).chain((1..=rounds).map(|n| format!("round {n}"))).collect();
    let headings: Vec<_> = headings.iter().map(String::as_str).collect();
    let sides = [(2, "without, 1 thread"), (1, "without, all threads"), (0, "with the pool")];
    let rows = measured.iter().flat_map(|(size, results)| {
        sides.iter().map(|&(who, side)| {
            let name = format!("{}, {side}", Bytes(*size as u64));
            let times = column(&results[who], 0).into_iter().map(|seconds| format!("{} s", readable(seconds)));
            std::iter::once(name).chain(times).collect()
        })
    });
    report.print(&format!("{}: time until QEMU's monitor answers", kind.name), &headings, rows)
}

/// A machine that comes to a pool in which nothing is ready.
fn empty(size: usize, setting: &Setting, threads: usize, report: &mut Report) -> Result<()> {
    let contestants = [OURS, ALL_THREADS].map(Contestant::plain);
    let case = format!("{} guest, empty pool", Bytes(size as u64));
    let server = Server::start(size, &FAST)?.serving()?;
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        server.empty()?;
        machine::warm_for_a_run(size)?;
        let memory = if contestant.name == OURS { Memory::Pool(&server) } else { Memory::Own { threads } };
        Ok(vec![Guest { size, locked: false, translator: Translator::Usual, memory }.seconds_to_monitor()?])
    })?;
    server.stop()?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &*case, "s").bar(Bar::Ratio(1.0));
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}
