//! Zeroed memory, touched and freed, over and over.

use super::block::{Block, Origin};
use super::say;
use anyhow::Result;
use pagecrew::sys::clock::now_ns;
use std::hint::black_box;
use std::time::Duration;

/// Rounds before the timed ones: a malloc that keeps memory has it only from then on.
const UNTIMED: usize = 2;
/// Timed rounds, at least; and no fewer than fill [`LEAST_NS`].
const LEAST: usize = 8;
const LEAST_NS: u64 = 500_000_000;

/// Prints the milliseconds that a round of calloc, one write a page and free of `bytes` takes, with `other_work` on the CPU
/// between two rounds, which does not count.
pub fn run(bytes: usize, other_work: Duration) -> Result<()> {
    let (mut rounds, mut total) = (0, 0);
    while rounds < UNTIMED + LEAST || total < LEAST_NS {
        let start = now_ns();
        let block = Block::new(Origin::Calloc, bytes)?;
        block.touch();
        drop(block);
        if rounds >= UNTIMED {
            total += now_ns() - start;
        }
        rounds += 1;
        spin(other_work);
    }
    say(total as f64 / 1e6 / (rounds - UNTIMED) as f64)
}

/// Uses the CPU for `time` without touching memory.
fn spin(time: Duration) {
    let end = now_ns() + time.as_nanos() as u64;
    let mut value = 1u64;
    while now_ns() < end {
        for _ in 0..1000 {
            value = black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}
