//! A program that uses little of its huge pages, and one pass of trim.

use super::command::{self, Counts};
use super::mapped::Mapped;
use super::{BENCH, OURS};
use crate::cases::Setting;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::marked_pages;
use anyhow::{Context, Result, ensure};
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use pagecrew::units::Bytes;
use std::cell::Cell;
use std::time::Duration;

/// Less memory than this, in %, is what a few pages of something else make.
pub const RESOLUTION: f64 = 0.1;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let bytes = machine::affordable(setting.size(2 << 30, 256 << 20), report);
    let case = format!("sparse, {}", Bytes(bytes as u64));
    let contestants = [Contestant::plain(OURS), Contestant::plain("the stock kernel")];
    // The kernel gets as much time for nothing to happen in as the pass before it took.
    let taken = Cell::new(Duration::ZERO);
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        let program = Sparse::start(bytes)?;
        let counts = if contestant.name == OURS {
            let start = now_ns();
            let counts = command::pass(program.running.pid())?;
            taken.set(Duration::from_nanos(now_ns() - start));
            Some(counts)
        } else {
            std::thread::sleep(taken.get());
            None
        };
        let left = program.left()?;
        if let Some(counts) = &counts {
            program.agrees(counts)?;
        }
        program.end()?;
        Ok([vec![left], counts.map_or(vec![f64::NAN; 3], |counts| cost(&counts))].concat())
    })?;
    let left = |_: &Contestant| {
        let case = format!("{case}: memory above the 4 KiB-page footprint left");
        Comparison::new(BENCH, case, "%").resolution(RESOLUTION).bar(Bar::Ours(5.0))
    };
    against_the_first(left, &contestants, &results, 0).try_for_each(|row| report.row(row))?;
    let column = |index: usize| -> Vec<f64> { results[0].iter().map(|figures| figures[index]).collect() };
    let itself = "the split itself";
    let extra = Comparison::new(BENCH, format!("{case}: our CPU on top of the kernel's split"), "%");
    report.row(extra.bar(Bar::Ours(30.0)).rounds(&column(1), itself, &vec![100.0; results[0].len()]))?;
    let each = Comparison::new(BENCH, format!("{case}: CPU per huge page split"), "us");
    report.row(each.rounds(&column(2), itself, &column(3)))
}

/// What a pass cost: our CPU time in % of the kernel's split, all CPU time per split, and the kernel's, in
/// microseconds.
fn cost(counts: &Counts) -> Vec<f64> {
    let (all, split, number) = (counts.cpu_seconds * 1e6, counts.split_seconds * 1e6, counts.split as f64);
    vec![(all - split) / split * 100.0, all / number, split / number]
}

/// A sparse program that is ready.
struct Sparse {
    running: Running,
    mapped: Mapped,
    /// What its memory had before anything was done to it.
    before: usize,
    /// See [`made_huge`], then.
    made_huge: usize,
}

impl Sparse {
    fn start(bytes: usize) -> Result<Sparse> {
        let mut running = Running::start(&mut worker(&Contestant::plain(""), &["trim-sparse", &bytes.to_string()]))?;
        let mapped = Mapped { start: running.figure()? as usize, len: bytes, pid: running.pid() };
        let before = mapped.backing()?;
        ensure!(before.huge > bytes / 10 * 9, "the kernel gave {} of {bytes} bytes in huge pages", before.huge);
        Ok(Sparse { running, mapped, before: before.resident, made_huge: made_huge()? })
    }

    /// How much of what was above the footprint in 4 KiB pages is still there, in %.
    fn left(&self) -> Result<f64> {
        let footprint = marked_pages(self.mapped.len) * PAGE_SIZE;
        Ok(percent_above(footprint, self.before, self.mapped.backing()?.resident))
    }

    /// Whether trim says that as much has gone as really has. What the kernel has made huge again meanwhile (khugepaged takes eight
    /// huge pages' worth in ten seconds) had gone, and has come back.
    fn agrees(&self, counts: &Counts) -> Result<()> {
        let gone = self.before as f64 - self.mapped.backing()?.resident as f64;
        let back = made_huge()? - self.made_huge;
        let missing = counts.gone_bytes as f64 - gone;
        let unsure = self.before as f64 / 50.0;
        ensure!(
            (-unsure..=unsure + (back * HUGE_PAGE_SIZE) as f64).contains(&missing),
            "trim says {} bytes have gone; {gone} have, and {back} huge pages may have come back",
            counts.gone_bytes
        );
        Ok(())
    }

    /// Has it look at its memory.
    fn end(mut self) -> Result<()> {
        self.running.go()?;
        let wrong = self.running.figure()?;
        ensure!(wrong == 0.0, "{wrong} bytes of the trimmed program have changed");
        self.running.wait().map(drop)
    }
}

/// How many huge pages the kernel has made of small ones since the machine was started, in whichever program.
fn made_huge() -> Result<usize> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("thp_collapse_alloc "));
    count.context("/proc/vmstat has no thp_collapse_alloc")?.parse().context("thp_collapse_alloc in /proc/vmstat")
}

/// What of the memory above `footprint` is left when of `before` bytes `after` are, in %.
pub fn percent_above(footprint: usize, before: usize, after: usize) -> f64 {
    after.saturating_sub(footprint) as f64 / before.saturating_sub(footprint) as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_counted_above_the_footprint() {
        assert_eq!(percent_above(100, 1100, 150), 5.0);
        assert_eq!(percent_above(100, 1100, 1100), 100.0);
        assert_eq!(percent_above(100, 1100, 90), 0.0);
    }

    #[test]
    fn costs_are_told_apart() {
        let counts = Counts {
            huge_pages: 4,
            under_used: 2,
            used: 2,
            split: 2,
            gone_bytes: 0,
            read_of_used_bytes: 0,
            cpu_seconds: 1.5e-3,
            split_seconds: 1.25e-3,
        };
        assert_eq!(cost(&counts), [20.0, 750.0, 625.0]);
    }
}
