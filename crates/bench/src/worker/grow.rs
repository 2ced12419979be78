//! A buffer that doubles.

use super::block::{Block, Origin};
use super::say;
use anyhow::{Result, ensure};
use pagecrew::sys::clock::now_ns;

/// Grows a block from `first` to `last` bytes by doubling, writing to each new page, and checks that every page kept its mark.
/// Prints the milliseconds for all of that and those inside realloc alone.
pub fn run(first: usize, last: usize) -> Result<()> {
    let start = now_ns();
    let mut inside = 0;
    let mut block = Block::new(Origin::Malloc, first)?;
    block.touch();
    let mut len = first;
    while len < last {
        let call = now_ns();
        block.resize(len * 2)?;
        inside += now_ns() - call;
        block.mark(len, len * 2);
        len *= 2;
    }
    ensure!(block.check(), "realloc lost what was in the block");
    say((now_ns() - start) as f64 / 1e6)?;
    say(inside as f64 / 1e6)
}
