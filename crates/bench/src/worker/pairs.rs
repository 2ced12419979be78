//! Small allocations, freed at once.

use super::block::{Block, Origin};
use super::say;
use anyhow::Result;
use pagecrew::sys::clock::now_ns;

/// Prints the nanoseconds that a malloc of `bytes` and its free take.
pub fn run(bytes: usize, pairs: usize) -> Result<()> {
    let start = now_ns();
    for _ in 0..pairs {
        drop(Block::new(Origin::Malloc, bytes)?);
    }
    say((now_ns() - start) as f64 / pairs as f64)
}
