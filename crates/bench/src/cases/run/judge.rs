//! What a cell has to reach, whether it does, and how many do.

use super::cell::Cell;
use crate::contest::{Rounds, column};
use crate::contestant::Contestant;
use crate::figures::median;
use crate::row::{Bar, Comparison, Row};
use crate::worker::Touch;

pub const BENCH: &str = "run";

/// What glibc takes, we take at most.
const GLIBC: f64 = 1.0;
/// The fastest other malloc, where blocks are touched whole and are no smaller than [`LARGE`] on average.
const BEST_WHOLE: f64 = 1.0;
/// The fastest other malloc in all other cells.
const BEST_ELSE: f64 = 0.8;
const LARGE: usize = 256 << 10;
/// Memory at the peak, against glibc's or the fastest malloc's where that is more.
const PEAK: f64 = 1.10;

/// One requirement of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    Glibc,
    Best,
    Peak,
}

impl Requirement {
    pub const ALL: [Requirement; 3] = [Requirement::Glibc, Requirement::Best, Requirement::Peak];

    /// What is said of a cell that misses it.
    fn missed(self) -> &'static str {
        match self {
            Requirement::Glibc => "slower than glibc",
            Requirement::Best => "too slow beside the fastest of the others",
            Requirement::Peak => "more than 1.1x the memory at the peak",
        }
    }
}

/// A cell's comparisons. The first contestant is ours, the second is glibc; the others are the other mallocs.
///
/// # Panics
/// If there are fewer than two contestants.
pub fn cell(cell: &Cell, contestants: &[Contestant], results: &[Rounds]) -> Vec<(Option<Requirement>, Row)> {
    let time = |index: usize| column(&results[index], 0);
    let peak = |index: usize| column(&results[index], 1);
    let best = (2..contestants.len()).min_by(|&a, &b| median(&time(a)).total_cmp(&median(&time(b))));
    let mut rows = Vec::new();
    for (index, peer) in contestants.iter().enumerate().skip(1) {
        let (requirement, bar) = match index {
            1 => (Some(Requirement::Glibc), Bar::Ratio(GLIBC)),
            _ if Some(index) == best => (Some(Requirement::Best), Bar::Ratio(against_the_best(cell))),
            _ => (None, Bar::None),
        };
        let comparison = Comparison::new(BENCH, cell.name(), "ns").bar(bar);
        rows.push((requirement, comparison.rounds(&time(0), &peer.name, &time(index))));
    }
    let more = best.filter(|&best| median(&peak(best)) > median(&peak(1))).unwrap_or(1);
    let comparison = Comparison::new(BENCH, format!("{}, peak", cell.name()), "MiB").bar(Bar::Times(PEAK));
    rows.push((Some(Requirement::Peak), comparison.rounds(&peak(0), &contestants[more].name, &peak(more))));
    rows
}

fn against_the_best(cell: &Cell) -> f64 {
    if cell.touch == Touch::Whole && cell.sizes.mean() >= LARGE { BEST_WHOLE } else { BEST_ELSE }
}

/// The verdicts of all cells.
#[derive(Default)]
pub struct Tally(Vec<(Requirement, Row)>);

impl Tally {
    pub fn add(&mut self, requirement: Requirement, row: Row) {
        self.0.push((requirement, row));
    }

    /// How many cells miss each requirement.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for requirement in Requirement::ALL {
            let all: Vec<_> = self.0.iter().filter(|(of, _)| *of == requirement).map(|(_, row)| row).collect();
            let missed = all.iter().filter(|row| row.met == Some(false)).count();
            if !all.is_empty() {
                let case = format!("cells: {}", requirement.missed());
                let comparison = Comparison::new(BENCH, case, "").bar(Bar::Ours(0.0)).resolution(1.0);
                rows.push(comparison.row(missed as f64, "all cells", all.len() as f64));
            }
        }
        rows
    }

    /// The cells that miss a requirement, the one that misses by most first.
    pub fn worst(&self) -> Vec<&Row> {
        let mut missed: Vec<&Row> = self.0.iter().map(|(_, row)| row).filter(|row| row.met == Some(false)).collect();
        missed.sort_by(|a, b| part(a).total_cmp(&part(b)));
        missed
    }
}

/// How much of what it has to reach a comparison reaches: 1 where it is just met.
fn part(row: &Row) -> f64 {
    let bar = row.bar.unwrap_or(1.0);
    if row.bar_for == Some("ratio") { row.ratio / bar } else { row.theirs * bar / row.ours }
}

#[cfg(test)]
mod tests {
    use super::super::cell::Sizes;
    use super::*;

    const CELL: Cell = Cell { sizes: Sizes::one(256 << 10), touch: Touch::Whole, threads: 1, slots: 16 };

    /// Of contestants with these nanoseconds and MiB.
    fn judged(cell_: &Cell, figures: &[(f64, f64)]) -> Vec<(Option<Requirement>, Row)> {
        let names = ["pagecrew", "glibc", "jemalloc", "mimalloc", "tcmalloc"];
        let contestants: Vec<_> = names[..figures.len()].iter().map(|name| Contestant::plain(name)).collect();
        let results: Vec<Rounds> = figures.iter().map(|&(ns, mib)| vec![vec![ns, mib]; 3]).collect();
        cell(cell_, &contestants, &results)
    }

    fn verdicts(rows: &[(Option<Requirement>, Row)]) -> Vec<(&str, Option<bool>)> {
        rows.iter().map(|(_, row)| (row.peer.as_str(), row.met)).collect()
    }

    #[test]
    fn the_fastest_of_the_others_counts() {
        let rows = judged(&CELL, &[(90.0, 12.0), (100.0, 10.0), (95.0, 50.0), (85.0, 11.0), (200.0, 9.0)]);
        assert_eq!(
            verdicts(&rows),
            [
                ("glibc", Some(true)),
                ("jemalloc", None),
                ("mimalloc", Some(false)),
                ("tcmalloc", None),
                ("mimalloc", Some(true)),
            ]
        );
        let required: Vec<_> = rows.iter().filter_map(|(requirement, _)| *requirement).collect();
        assert_eq!(required, Requirement::ALL);
    }

    #[test]
    fn the_bar_depends_on_sizes_and_touch() {
        let figures = [(100.0, 1.0), (100.0, 1.0), (85.0, 1.0)];
        let met = |cell: &Cell| judged(cell, &figures)[1].1.met;
        assert_eq!(met(&CELL), Some(false));
        assert_eq!(met(&Cell { touch: Touch::TwoBytes, ..CELL }), Some(true));
        assert_eq!(met(&Cell { sizes: Sizes::one(64 << 10), ..CELL }), Some(true));
        assert_eq!(met(&Cell { sizes: Sizes::SMALLER_MIX, ..CELL }), Some(false));
    }

    #[test]
    fn glibc_alone_is_enough_of_a_comparison() {
        let rows = judged(&CELL, &[(100.0, 11.1), (99.0, 10.0)]);
        assert_eq!(verdicts(&rows), [("glibc", Some(false)), ("glibc", Some(false))]);
    }

    #[test]
    fn the_tally_counts_and_the_worst_comes_first() {
        let mut tally = Tally::default();
        for figures in [[(50.0, 30.0), (100.0, 10.0)], [(100.0, 10.0), (50.0, 10.0)], [(1.0, 1.0), (1.0, 1.0)]] {
            for (requirement, row) in judged(&CELL, &figures) {
                tally.add(requirement.unwrap(), row);
            }
        }
        let counts: Vec<_> = tally.rows().iter().map(|row| (row.ours, row.theirs, row.met)).collect();
        assert_eq!(counts, [(1.0, 3.0, Some(false)), (1.0, 3.0, Some(false))]);
        let worst: Vec<_> = tally.worst().iter().map(|row| (row.ours, row.unit)).collect();
        assert_eq!(worst, [(30.0, "MiB"), (100.0, "ns")]);
    }
}
