//! Small blocks in the way of two loops of mimalloc-bench.

use super::block::{Block, Origin};
use super::random::Random;
use super::say;
use anyhow::{Context, Result, bail};
use pagecrew::sys::clock::now_ns;

/// Sizes of the blocks, from the smallest on to below the largest.
const SMALLEST: u64 = 64;
const LARGEST: u64 = 32 << 10;

/// Operations between two looks at the clock.
const STRIDE: usize = 1024;

/// What is done with the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Blocks of all sizes alike in many slots. A thread ends after a while and leaves its blocks to its successor, so most blocks are
    /// freed by another thread than took them.
    Larson,
    /// Blocks of all orders of magnitude alike, most of them short-lived, in slots of the thread's own.
    AllocTest,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 2] = [Kind::Larson, Kind::AllocTest];

    /// As a worker's argument.
    pub fn argument(self) -> &'static str {
        match self {
            Kind::Larson => "larson",
            Kind::AllocTest => "alloc-test",
        }
    }

    /// The one with this argument.
    ///
    /// # Errors
    /// If there is none.
    pub fn named(argument: &str) -> Result<Kind> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.argument() == argument);
        kind.with_context(|| format!("there is no loop over small blocks called '{argument}'"))
    }

    /// Slots of a thread.
    fn slots(self) -> u64 {
        match self {
            Kind::Larson => 1000,
            Kind::AllocTest => 256,
        }
    }

    /// Operations after which a thread leaves its blocks to its successor.
    fn life(self) -> usize {
        match self {
            Kind::Larson => 20 * STRIDE,
            Kind::AllocTest => usize::MAX,
        }
    }

    fn size(self, random: &mut Random) -> usize {
        let size = match self {
            Kind::Larson => SMALLEST + random.below(LARGEST - SMALLEST),
            Kind::AllocTest => {
                let order = SMALLEST << random.below(u64::from((LARGEST / SMALLEST).ilog2()));
                order + random.below(order)
            }
        };
        size as usize
    }
}

/// What a thread leaves to its successor.
struct Lane {
    slots: Vec<Option<Block>>,
    random: Random,
    operations: usize,
}

/// Prints the nanoseconds that it takes, over all `threads` lanes of threads together, to free a block and to take another one and
/// write two of its bytes. Lanes go on for `time_ns`.
pub fn run(kind: Kind, threads: usize, time_ns: u64) -> Result<()> {
    let start = now_ns();
    let end = start + time_ns;
    let operations = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..threads).map(|index| scope.spawn(move || lane(kind, index, end))).collect();
        lanes.into_iter().map(|lane| lane.join().unwrap_or_else(|_| bail!("a thread panicked"))).sum::<Result<usize>>()
    })?;
    say((now_ns() - start) as f64 / operations as f64)
}

/// One thread after another, until `end_ns`; how many operations they did.
fn lane(kind: Kind, index: usize, end_ns: u64) -> Result<usize> {
    let slots = (0..kind.slots()).map(|_| None).collect();
    let mut lane = Lane { slots, random: Random::new(index as u64 + 1), operations: 0 };
    loop {
        let thread = std::thread::spawn(move || life(kind, lane, end_ns));
        lane = thread.join().unwrap_or_else(|_| bail!("a thread panicked"))?;
        if now_ns() >= end_ns {
            return Ok(lane.operations);
        }
    }
}

/// What one thread does.
fn life(kind: Kind, mut lane: Lane, end_ns: u64) -> Result<Lane> {
    let mut operations = 0;
    while operations < kind.life() && (!operations.is_multiple_of(STRIDE) || now_ns() < end_ns) {
        let slot = lane.random.below(kind.slots()) as usize;
        lane.slots[slot] = None;
        let block = Block::new(Origin::Malloc, kind.size(&mut lane.random))?;
        block.touch_two_bytes();
        lane.slots[slot] = Some(block);
        operations += 1;
    }
    lane.operations += operations;
    Ok(lane)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_reach_both_ends() {
        for kind in Kind::ALL {
            let mut random = Random::new(0);
            let sizes: Vec<_> = (0..100_000).map(|_| kind.size(&mut random) as u64).collect();
            assert!(sizes.iter().all(|size| (SMALLEST..LARGEST).contains(size)), "{kind:?}");
            assert!(sizes.iter().any(|size| *size < 80) && sizes.iter().any(|size| *size > 32_000), "{kind:?}");
        }
    }

    #[test]
    fn a_lane_goes_on_until_its_time_is_up() {
        assert!(lane(Kind::Larson, 0, now_ns() + 20_000_000).unwrap() > 1000);
    }
}
