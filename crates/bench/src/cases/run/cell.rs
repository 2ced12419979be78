//! One cell of the table: sizes, how much of a block is used, threads and slots.

use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, worker};
use crate::worker::Touch;
use anyhow::{Result, ensure};
use pagecrew::units::Bytes;

/// Sizes of blocks, drawn evenly from a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub low: usize,
    /// The end of the range, included.
    pub high: usize,
}

impl Sizes {
    /// All that the table has.
    pub const ALL: [Sizes; 8] = [
        Sizes::one(64 << 10),
        Sizes::one(256 << 10),
        Sizes::one(1 << 20),
        Sizes::one(4 << 20),
        Sizes::one(16 << 20),
        Sizes::one(64 << 20),
        Sizes::SMALLER_MIX,
        Sizes { low: 1 << 20, high: 32 << 20 },
    ];

    /// The mix that most programs are nearest to.
    pub const SMALLER_MIX: Sizes = Sizes { low: 64 << 10, high: 2 << 20 };

    /// One size.
    pub const fn one(size: usize) -> Sizes {
        Sizes { low: size, high: size }
    }

    /// The size of a block on average.
    pub fn mean(self) -> usize {
        usize::midpoint(self.low, self.high)
    }

    /// `1 MiB`, or `mixed 64 KiB-2 MiB`.
    pub fn name(self) -> String {
        let (low, high) = (Bytes(self.low as u64), Bytes(self.high as u64));
        if self.low == self.high { low.to_string() } else { format!("mixed {low}-{high}") }
    }
}

/// One cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub sizes: Sizes,
    pub touch: Touch,
    /// 0 for the main thread.
    pub threads: usize,
    /// Slots of each thread.
    pub slots: usize,
}

/// What else is in the process, or was.
#[derive(Debug, Clone, Copy, Default)]
pub struct Crowd {
    pub idle_threads: usize,
    pub live_spans: usize,
    /// Size of a block that is touched and freed before all else; 0 for none.
    pub freed_before: usize,
}

/// How long the timed rounds take with the malloc by which their number was chosen. Each contestant does the same number.
const TIMED_NS: f64 = 120e6;
/// The rounds by which that number is chosen.
const TRIAL_NS: u64 = 20_000_000;
/// No contestant's timed rounds take much longer: who is that much slower does fewer.
const LIMIT_NS: u64 = 1_500_000_000;
/// Rounds of each thread, at least.
const LEAST_ROUNDS: usize = 8;
/// Where a malloc may use a huge page for a byte, a block can take this much on top of what is touched.
const HUGE_PAGE: usize = 2 << 20;

impl Cell {
    /// Its name in tables and for `--only`.
    pub fn name(&self) -> String {
        let touch = match self.touch {
            Touch::Whole => "whole",
            Touch::TwoBytes => "two bytes",
        };
        let threads = match self.threads {
            0 => "main thread".to_owned(),
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        };
        format!("cells: {}, {touch}, {threads}, {} slots", self.sizes.name(), self.slots)
    }

    /// Memory that it has in use at once, where blocks that are touched thinly may get huge pages.
    pub fn live(&self) -> usize {
        let block = match self.touch {
            Touch::Whole => self.sizes.mean(),
            Touch::TwoBytes => self.sizes.mean().min(2 * HUGE_PAGE),
        };
        block * self.slots * self.threads.max(1)
    }

    /// This cell with as many slots as fit into `room`.
    pub fn fitted(mut self, room: usize) -> Cell {
        while self.live() > room && self.slots > 1 {
            self.slots /= 2;
        }
        self
    }

    /// Rounds of each thread that are neither too few to be timed nor take too long, by a trial of `contestant`.
    ///
    /// # Errors
    /// If the trial fails.
    pub fn rounds(&self, contestant: &Contestant) -> Result<usize> {
        let (ns, _) = self.start(contestant, usize::MAX, TRIAL_NS, Crowd::default())?;
        let rounds = TIMED_NS / ns.max(1.0) / self.threads.max(1) as f64;
        Ok((rounds as usize).max(LEAST_ROUNDS))
    }

    /// Nanoseconds of a round and the most MiB resident, of a process that does `rounds` rounds in each thread.
    ///
    /// # Errors
    /// If the process fails.
    pub fn measure(&self, contestant: &Contestant, rounds: usize, crowd: Crowd) -> Result<Vec<f64>> {
        machine::warm_for_a_run(self.live() + self.live() / 4 + (32 << 20))?;
        let (ns, mib) = self.start(contestant, rounds, LIMIT_NS, crowd)?;
        Ok(vec![ns, mib])
    }

    fn start(&self, contestant: &Contestant, rounds: usize, limit_ns: u64, crowd: Crowd) -> Result<(f64, f64)> {
        let number = |number: usize| number.to_string();
        let arguments = [
            "cell".to_owned(),
            number(self.sizes.low),
            number(self.sizes.high),
            self.touch.argument().to_owned(),
            number(self.threads),
            number(self.slots),
            number(rounds),
            limit_ns.to_string(),
            number(crowd.idle_threads),
            number(crowd.live_spans),
            number(crowd.freed_before),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let figures = program::run(&mut worker(contestant, &arguments))?.figures()?;
        ensure!(figures.len() == 3, "a cell has three figures, not {figures:?}");
        Ok((figures[0], figures[1] / 1024.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_cell_is() {
        let cell = Cell { sizes: Sizes::one(64 << 10), touch: Touch::Whole, threads: 0, slots: 16 };
        assert_eq!(cell.name(), "cells: 64 KiB, whole, main thread, 16 slots");
        let cell = Cell { sizes: Sizes::ALL[7], touch: Touch::TwoBytes, threads: 8, slots: 32 };
        assert_eq!(cell.name(), "cells: mixed 1 MiB-32 MiB, two bytes, 8 threads, 32 slots");
    }

    #[test]
    fn a_cell_gets_fewer_slots_until_it_fits() {
        let cell = Cell { sizes: Sizes::one(64 << 20), touch: Touch::Whole, threads: 8, slots: 32 };
        assert_eq!(cell.live(), 16 << 30);
        assert_eq!(cell.fitted(16 << 30), cell);
        assert_eq!(cell.fitted(5 << 30).slots, 8);
        assert_eq!(cell.fitted(0).slots, 1);
        assert_eq!(Cell { touch: Touch::TwoBytes, ..cell }.live(), 1 << 30);
    }
}
