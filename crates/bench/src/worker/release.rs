//! Programs that give much memory back at once.

use super::block::{Block, Origin};
use super::say;
use anyhow::Result;
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::procfs::resident_bytes;
use std::time::Duration;

/// Prints the milliseconds that `free` or `munmap` of `bytes` in 4 KiB pages takes.
pub fn until_the_caller_goes_on(origin: Origin, bytes: usize) -> Result<()> {
    let block = Block::new(origin, bytes)?.without_huge_pages();
    block.touch_in_parallel();
    let start = now_ns();
    drop(block);
    say((now_ns() - start) as f64 / 1e6)
}

/// How often the program looks whether its memory is back: seldom enough to leave the CPUs alone.
const LOOK: Duration = Duration::from_millis(1);

/// Prints the milliseconds until 95 % of `bytes` in 4 KiB pages are the kernel's again.
pub fn until_the_memory_is_back(origin: Origin, bytes: usize) -> Result<()> {
    let block = Block::new(origin, bytes)?.without_huge_pages();
    block.touch_in_parallel();
    let enough = resident_bytes()?.saturating_sub(bytes / 100 * 95);
    let start = now_ns();
    drop(block);
    let give_up = start + 120_000_000_000;
    while resident_bytes()? > enough && now_ns() < give_up {
        std::thread::sleep(LOOK);
    }
    say((now_ns() - start) as f64 / 1e6)
}

/// Prints the time on the monotonic clock in nanoseconds and exits with `bytes` in 4 KiB pages still allocated.
pub fn by_exit(bytes: usize) -> Result<()> {
    let block = Block::new(Origin::Malloc, bytes)?.without_huge_pages();
    block.touch_in_parallel();
    block.forget();
    say(now_ns() as f64)
}

/// Says when `bytes` in 4 KiB pages are touched, waits for a line, gives them back, prints the milliseconds that this took,
/// and stays until its input ends.
pub fn beside_others(origin: Origin, bytes: usize) -> Result<()> {
    let block = Block::new(origin, bytes)?.without_huge_pages();
    block.touch_in_parallel();
    say(0.0)?;
    let input = std::io::stdin();
    let mut line = String::new();
    input.read_line(&mut line)?;
    let start = now_ns();
    drop(block);
    say((now_ns() - start) as f64 / 1e6)?;
    while input.read_line(&mut line)? > 0 {}
    Ok(())
}
