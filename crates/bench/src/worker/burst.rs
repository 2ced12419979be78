//! Blocks of 100 KiB after a large one was freed, from which a malloc may learn the wrong thing.

use super::block::{Block, Origin};
use super::say;
use anyhow::{Result, bail};
use pagecrew::sys::clock::now_ns;

/// What is freed once.
const LARGE: usize = 20 << 20;
/// What is taken, touched and freed together in a round.
const SMALLER: usize = 100 << 10;
const COUNT: usize = 64;

/// Rounds before the timed ones.
const UNTIMED: usize = 4;
/// Rounds between two looks at the clock.
const STRIDE: usize = 4;

/// Prints the nanoseconds that a round takes, on the main thread or on another one, for `time_ns`.
pub fn run(on_main_thread: bool, time_ns: u64) -> Result<()> {
    if on_main_thread {
        return say(rounds(time_ns)?);
    }
    say(std::thread::spawn(move || rounds(time_ns)).join().unwrap_or_else(|_| bail!("the thread panicked"))?)
}

fn rounds(time_ns: u64) -> Result<f64> {
    let large = Block::new(Origin::Malloc, LARGE)?;
    large.touch();
    drop(large);
    (0..UNTIMED).try_for_each(|_| round())?;
    let start = now_ns();
    let mut done = 0;
    while now_ns() - start < time_ns {
        (0..STRIDE).try_for_each(|_| round())?;
        done += STRIDE;
    }
    Ok((now_ns() - start) as f64 / done as f64)
}

fn round() -> Result<()> {
    let mut blocks = Vec::with_capacity(COUNT);
    for _ in 0..COUNT {
        let block = Block::new(Origin::Malloc, SMALLER)?;
        block.touch();
        blocks.push(block);
    }
    Ok(())
}
