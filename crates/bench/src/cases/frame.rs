//! Pages of 4 KiB: singly, in batches and in arrays, zeroed, from several threads.

use super::Setting;
use crate::contest::{Rounds, against_the_first, alternate, column};
use crate::contestant::Contestant;
use crate::figures::median;
use crate::program::{self, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::LARGEST_BATCH;
use anyhow::Result;
use pagecrew::sys::sched;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BENCH: &str = "frame";

const OURS: &str = "pagecrew";
const LIST: &str = "a list under a lock";
const RING: &str = "the ring alone";
const MEMPOOL: &str = "DPDK's mempool";
const MEMPOOL_SOURCE: &str = include_str!("../../scripts/mempool.c");

/// Pages that a program has at a time where it has many: 1 GiB.
const MANY: usize = 262_144;

struct Frames<'s> {
    setting: &'s Setting,
    /// Pagecrew, a list under a lock, and every malloc.
    contestants: Vec<Contestant>,
    /// DPDK's mempool, where it could be built.
    mempool: Option<(Contestant, PathBuf)>,
    repetitions: usize,
}

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mempool = build_mempool(directory.path()).map(|path| (Contestant::plain(MEMPOOL), path));
    if mempool.is_none() {
        report.note("DPDK's mempool is left out: it takes cc, pkg-config and Debian's package libdpdk-dev");
    }
    let mut contestants: Vec<_> = [OURS, LIST, "glibc"].map(Contestant::plain).into();
    contestants.extend(setting.peers.all().iter().cloned());
    let frames = Frames { setting, contestants, mempool, repetitions: setting.repetitions() };
    frames.pairs(report)?;
    frames.many(report)?;
    frames.arrays(report)?;
    frames.zeroes(report)?;
    frames.threads(report)?;
    frames.batches(report)?;
    frames.metadata(report)
}

/// Compiles the program that uses DPDK's mempool; `None` where that is not installed.
fn build_mempool(directory: &Path) -> Option<PathBuf> {
    let flags = Command::new("pkg-config").args(["--cflags", "--libs", "libdpdk"]).output().ok()?;
    if !flags.status.success() {
        return None;
    }
    let (source, program) = (directory.join("mempool.c"), directory.join("mempool"));
    std::fs::write(&source, MEMPOOL_SOURCE).ok()?;
    let flags = String::from_utf8(flags.stdout).ok()?;
    let mut compiler = Command::new("cc");
    compiler.args(["-O3", "-o"]).arg(&program).arg(&source).args(flags.split_whitespace());
    compiler.stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?.success().then_some(program)
}

impl Frames<'_> {
    /// What each contestant that can do it measures for `what`.
    fn contest(
        &self,
        report: &Report,
        what: &str,
        number: usize,
        mempool: bool,
    ) -> Result<(Vec<Contestant>, Vec<Rounds>)> {
        let mut contestants = self.contestants.clone();
        if let Some((contestant, _)) = self.mempool.as_ref().filter(|_| mempool) {
            contestants.push(contestant.clone());
        }
        let name = format!("pages, {what} {number}");
        let results = alternate(report, &name, self.repetitions, &contestants, |contestant| {
            self.measure(contestant, what, number)
        })?;
        Ok((contestants, results))
    }

    fn measure(&self, contestant: &Contestant, what: &str, number: usize) -> Result<Vec<f64>> {
        let number = number.to_string();
        let mut command = match &self.mempool {
            Some((mempool, path)) if mempool.name == contestant.name => {
                let mut command = Command::new(path);
                command.args([what, &number]);
                command
            }
            _ => {
                let source = match contestant.name.as_str() {
                    OURS => "pagecrew",
                    LIST => "locked",
                    RING => "nothing",
                    _ => "malloc",
                };
                worker(contestant, &["frames", source, what, &number])
            }
        };
        program::run(&mut command)?.figures()
    }

    /// Our own figures for `what`.
    fn own(&self, report: &Report, what: &str, number: usize) -> Result<Rounds> {
        let name = format!("pages, {what} {number}");
        let ours = &self.contestants[..1];
        let mut results =
            alternate(report, &name, self.repetitions, ours, |contestant| self.measure(contestant, what, number))?;
        Ok(results.remove(0))
    }

    /// Our own figures for `what` with each of two numbers, in turns.
    fn own_by_turns(&self, report: &Report, what: &str, numbers: [usize; 2]) -> Result<[Rounds; 2]> {
        let mut both = [Vec::new(), Vec::new()];
        report.expect(2 * self.repetitions, &format!("pages, {what}"));
        for _ in 0..self.repetitions {
            for (rounds, number) in both.iter_mut().zip(numbers) {
                rounds.push(self.measure(&self.contestants[0], what, number)?);
                report.step();
            }
        }
        Ok(both)
    }

    /// Rows that compare one figure with everybody's, each of whom has to be beaten `times` over; the list is there as the floor.
    fn against_all(
        &self,
        report: &mut Report,
        case: &str,
        times: f64,
        (contestants, results): &(Vec<Contestant>, Vec<Rounds>),
        index: usize,
    ) -> Result<()> {
        let comparison = |peer: &Contestant| {
            let bar = if peer.name == LIST || times == 0.0 { Bar::None } else { Bar::Ratio(times) };
            Comparison::new(BENCH, case, "ns").bar(bar)
        };
        against_the_first(comparison, contestants, results, index).try_for_each(|row| report.row(row))
    }

    /// A row that says whether a figure of ours is low enough in itself, beside the best malloc's.
    fn at_most(
        &self,
        report: &mut Report,
        case: &str,
        most: f64,
        (contestants, results): &(Vec<Contestant>, Vec<Rounds>),
        index: usize,
    ) -> Result<()> {
        let best = best_malloc(contestants, results, |figures| figures[index]);
        let comparison = Comparison::new(BENCH, case, "ns").bar(Bar::Ours(most));
        let row =
            comparison.rounds(&column(&results[0], index), &contestants[best].name, &column(&results[best], index));
        report.row(row)
    }

    fn pairs(&self, report: &mut Report) -> Result<()> {
        let case = "a page, put back at once";
        let outcome = self.contest(report, "pair", self.setting.size(20_000_000, 5_000_000), true)?;
        self.at_most(report, &format!("{case}, in itself"), 4.0, &outcome, 0)?;
        self.against_all(report, case, 2.5, &outcome, 0)
    }

    fn many(&self, report: &mut Report) -> Result<()> {
        let outcome = self.contest(report, "all", MANY, true)?;
        for (index, part) in ["get", "put"].iter().enumerate() {
            let case = format!("{part} {MANY} pages one by one");
            self.at_most(report, &format!("{case}, in itself"), 6.0, &outcome, index)?;
            self.against_all(report, &case, 8.0, &outcome, index)?;
        }
        self.against_all(report, &format!("put {MANY} pages in random order"), 0.0, &outcome, 2)
    }

    fn arrays(&self, report: &mut Report) -> Result<()> {
        let outcome = self.contest(report, "bulk", 64, true)?;
        for (index, part) in ["get", "put"].iter().enumerate() {
            let case = format!("arrays of 64 pages, {part}");
            self.at_most(report, &format!("{case}, in itself"), 1.5, &outcome, index)?;
            self.against_all(report, &case, 0.0, &outcome, index)?;
        }
        let one = self.own(report, "bulk", 1)?;
        let both = |from: usize| -> Vec<f64> { one.iter().map(|figures| figures[from] + figures[from + 1]).collect() };
        let comparison = Comparison::new(BENCH, "arrays of 1 page, get and put", "ns").bar(Bar::Ratio(1.0));
        report.row(comparison.rounds(&both(0), "our own singly", &both(2)))
    }

    fn zeroes(&self, report: &mut Report) -> Result<()> {
        let rounds = self.own(report, "zeroed", 1024)?;
        let comparison = Comparison::new(BENCH, "1024 zeroed pages, zeroed ahead", "ns").bar(Bar::Times(1.3));
        report.row(comparison.rounds(&column(&rounds, 0), "our own not zeroed", &column(&rounds, 1)))?;
        let outcome = self.contest(report, "cold", MANY, false)?;
        // A list under a lock zeroes nothing.
        let keep = |index: &usize| outcome.0[*index].name != LIST;
        let kept: Vec<usize> = (0..outcome.0.len()).filter(keep).collect();
        let outcome = (
            kept.iter().map(|&index| outcome.0[index].clone()).collect(),
            kept.iter().map(|&index| outcome.1[index].clone()).collect(),
        );
        self.against_all(report, &format!("the first {MANY} zeroed pages of a program"), 20.0, &outcome, 0)
    }

    fn threads(&self, report: &mut Report) -> Result<()> {
        let cpus = sched::affinity().map_or(1, |cpus| cpus.count());
        let counts = std::iter::successors(Some(2), |count| Some(count * 2)).take_while(|&count| count <= cpus);
        for count in counts {
            let [several, single] = self.own_by_turns(report, "threads", [count, 1])?;
            let case = format!("{count} threads that get and put");
            let bar = if count == 2 { Bar::Ratio(1.9) } else { Bar::None };
            let comparison = Comparison::new(BENCH, format!("{case}, per page"), "ns").bar(bar);
            report.row(comparison.rounds(&column(&several, 0), "our own in one", &column(&single, 0)))?;
            let outcome = self.contest(report, "threads", count, false)?;
            self.against_all(report, &case, 0.0, &outcome, 0)?;
        }
        if cpus >= 2 {
            let [both, single] = self.own_by_turns(report, "across", [2, 1])?;
            let case = "one thread gets what the other puts";
            let comparison = Comparison::new(BENCH, format!("{case}, per page"), "ns").bar(Bar::Ratio(1.5));
            report.row(comparison.rounds(&column(&both, 0), "our own in one", &column(&single, 0)))?;
            let outcome = self.contest(report, "across", 2, false)?;
            self.against_all(report, case, 0.0, &outcome, 0)?;
            let ring = Contestant::plain(RING);
            let alone = alternate(report, case, self.repetitions, std::slice::from_ref(&ring), |ring| {
                self.measure(ring, "across", 2)
            })?;
            let comparison = Comparison::new(BENCH, case, "ns");
            report.row(comparison.rounds(&column(&outcome.1[0], 0), RING, &column(&alone[0], 0)))?;
        }
        Ok(())
    }

    /// The table of the kernel's own benchmark: batches of every size, one page after the other.
    fn batches(&self, report: &mut Report) -> Result<()> {
        let (contestants, results) = self.contest(report, "batches", LARGEST_BATCH, false)?;
        let sizes = std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|&size| size <= LARGEST_BATCH);
        for (step, size) in sizes.enumerate() {
            let (get, put) = (2 * step, 2 * step + 1);
            let best = best_malloc(&contestants, &results, |figures| figures[get] + figures[put]);
            let (ours, theirs) = (&results[0], &results[best]);
            let both = |rounds: &Rounds| -> Vec<f64> { rounds.iter().map(|f| f[get] + f[put]).collect() };
            let parts = [
                ("get", column(ours, get), column(theirs, get)),
                ("put", column(ours, put), column(theirs, put)),
                ("both", both(ours), both(theirs)),
            ];
            for (part, ours, theirs) in parts {
                let comparison = Comparison::new(BENCH, format!("batches of {size}, {part}"), "ns");
                report.row(comparison.rounds(&ours, &contestants[best].name, &theirs))?;
            }
        }
        Ok(())
    }

    fn metadata(&self, report: &mut Report) -> Result<()> {
        let share = program::run(&mut worker(&self.contestants[0], &["frames-metadata"]))?.figures()?;
        let comparison = Comparison::new(BENCH, "book-keeping, of the memory managed", "%").bar(Bar::Ours(0.1));
        report.row(comparison.row(share[0], "the bound", 0.1))
    }
}

/// The malloc whose figure is the lowest.
fn best_malloc(contestants: &[Contestant], results: &[Rounds], figure: impl Fn(&Vec<f64>) -> f64) -> usize {
    let middle = |index: &usize| median(&results[*index].iter().map(&figure).collect::<Vec<_>>());
    let mallocs =
        (0..contestants.len()).filter(|&index| ![OURS, LIST, MEMPOOL].contains(&contestants[index].name.as_str()));
    mallocs.min_by(|a, b| middle(a).total_cmp(&middle(b))).expect("glibc is always there")
}
