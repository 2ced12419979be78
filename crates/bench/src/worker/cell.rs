//! Slots whose blocks are replaced in random order, which is what most programs do with memory in the middle of their lives.

use super::block::{Block, Origin};
use super::random::Random;
use super::say;
use anyhow::{Context, Result, bail};
use pagecrew::sys::clock::now_ns;
use std::sync::Barrier;

/// The size of a span that only has to be there.
const SPAN: usize = 64 << 10;

/// Rounds between two looks at the clock.
const STRIDE: usize = 8;

/// Untimed rounds of a thread for each of its slots, and the time after which no further one begins.
const UNTIMED: usize = 4;
const UNTIMED_NS: u64 = 250_000_000;

/// How much of a block is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// A byte in every page.
    Whole,
    /// The first byte and the one in the middle.
    TwoBytes,
}

impl Touch {
    /// As a worker's argument.
    pub fn argument(self) -> &'static str {
        match self {
            Touch::Whole => "whole",
            Touch::TwoBytes => "two-bytes",
        }
    }

    /// The one with this argument.
    ///
    /// # Errors
    /// If there is none.
    pub fn named(argument: &str) -> Result<Touch> {
        [Touch::Whole, Touch::TwoBytes]
            .into_iter()
            .find(|touch| touch.argument() == argument)
            .with_context(|| format!("a block is touched whole or two-bytes, not '{argument}'"))
    }
}

/// What the worker does.
pub struct Cell {
    /// Sizes of the blocks, drawn evenly from this range.
    pub low: usize,
    /// Its end, included.
    pub high: usize,
    pub touch: Touch,
    /// 0 for the main thread alone.
    pub threads: usize,
    /// Slots of each thread.
    pub slots: usize,
    /// Timed rounds of each thread.
    pub rounds: usize,
    /// After this time no further round begins.
    pub limit_ns: u64,
    /// Other threads that had one block each and sleep.
    pub idle_threads: usize,
    /// Other spans of 64 KiB that are in use.
    pub live_spans: usize,
    /// Size of a block that is touched and freed before all else; 0 for none. A malloc may learn from it.
    pub freed_before: usize,
}

/// What one thread did.
struct Done {
    rounds: usize,
    start_ns: u64,
    end_ns: u64,
}

/// Prints the nanoseconds that a round takes, the most KiB that were resident, and the timed rounds of all threads. A round frees the
/// block of a random slot, and puts a new one of random size there and touches it. Before the timed rounds each thread fills its
/// slots and then replaces each of them a few times, untimed: a malloc that keeps memory has it from then on, and whoever is slow at
/// that has less time for it. The peak is that of the whole process, the filling included.
pub fn run(cell: &Cell) -> Result<()> {
    let spans = (0..cell.live_spans).map(|_| Block::new(Origin::Malloc, SPAN)).collect::<Result<Vec<_>>>()?;
    if cell.freed_before > 0 {
        Block::new(Origin::Malloc, cell.freed_before)?.touch();
    }
    let (ready, end) = (Barrier::new(cell.idle_threads + 1), Barrier::new(cell.idle_threads + 1));
    let done = std::thread::scope(|scope| {
        for _ in 0..cell.idle_threads {
            scope.spawn(|| {
                let had = take(cell, cell.low).map(drop);
                ready.wait();
                end.wait();
                had
            });
        }
        ready.wait();
        let done = work(cell);
        end.wait();
        done
    })?;
    drop(spans);
    let rounds: usize = done.iter().map(|done| done.rounds).sum();
    let start = done.iter().map(|done| done.start_ns).min().unwrap_or(0);
    let end = done.iter().map(|done| done.end_ns).max().unwrap_or(0);
    say((end - start) as f64 / rounds as f64)?;
    say(peak_kib()?)?;
    say(rounds)
}

/// What the main thread, or each of the threads, did.
fn work(cell: &Cell) -> Result<Vec<Done>> {
    let begin = Barrier::new(cell.threads.max(1));
    if cell.threads == 0 {
        return Ok(vec![rounds(cell, 0, &begin)?]);
    }
    std::thread::scope(|scope| {
        let begin = &begin;
        let threads: Vec<_> = (0..cell.threads).map(|index| scope.spawn(move || rounds(cell, index, begin))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked"))).collect()
    })
}

/// All rounds of thread `index`.
fn rounds(cell: &Cell, index: usize, begin: &Barrier) -> Result<Done> {
    let mut random = Random::new(index as u64 + 1);
    let spread = (cell.high - cell.low + 1) as u64;
    let size = |random: &mut Random| cell.low + random.below(spread) as usize;
    let mut slots: Vec<Option<Block>> = (0..cell.slots).map(|_| None).collect();
    let fill = |slots: &mut [Option<Block>], random: &mut Random| {
        for slot in slots {
            *slot = Some(take(cell, size(random))?);
        }
        Ok(())
    };
    let replace = |slots: &mut [Option<Block>], random: &mut Random, rounds: usize, limit_ns: u64| {
        let start_ns = now_ns();
        let mut done = 0;
        while done < rounds && (!done.is_multiple_of(STRIDE) || done == 0 || now_ns() - start_ns <= limit_ns) {
            let slot = random.below(cell.slots as u64) as usize;
            slots[slot] = None;
            slots[slot] = Some(take(cell, size(random))?);
            done += 1;
        }
        Ok(Done { rounds: done, start_ns, end_ns: now_ns() })
    };
    let filled: Result<()> = fill(&mut slots, &mut random);
    let ready = filled.and_then(|()| replace(&mut slots, &mut random, UNTIMED * cell.slots, UNTIMED_NS));
    // Without a thread that got no memory, the others would wait for ever.
    begin.wait();
    ready?;
    replace(&mut slots, &mut random, cell.rounds, cell.limit_ns)
}

/// A block of `len` bytes, used as much as the cell says.
fn take(cell: &Cell, len: usize) -> Result<Block> {
    let block = Block::new(Origin::Malloc, len)?;
    match cell.touch {
        Touch::Whole => block.touch(),
        Touch::TwoBytes => block.touch_two_bytes(),
    }
    Ok(block)
}

/// The most KiB that this process had resident since its start. `ru_maxrss` would count its parent's, too.
fn peak_kib() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_done_until_the_time_is_up() {
        let cell = Cell {
            low: 1 << 16,
            high: 1 << 18,
            touch: Touch::TwoBytes,
            threads: 2,
            slots: 4,
            rounds: 100,
            limit_ns: 60_000_000_000,
            idle_threads: 0,
            live_spans: 0,
            freed_before: 0,
        };
        let count = |cell: &Cell| work(cell).unwrap().iter().map(|done| done.rounds).collect::<Vec<_>>();
        assert_eq!(count(&cell), [100, 100]);
        assert_eq!(count(&Cell { limit_ns: 0, threads: 0, ..cell }), [STRIDE]);
        assert!(peak_kib().unwrap() > 100);
    }
}
