//! Programs that get their memory from a pool, and what they would do without it.

use super::block::{Block, Origin};
use super::huge::Pages;
use super::say;
use anyhow::Result;
use pagecrew::pool::{Client, Request, Taken, Until};
use pagecrew::sys::clock::now_ns;
use std::path::Path;

fn request(size: usize, node: usize) -> Request {
    Request { size, node: Some(node), until: Until::Closed }
}

fn milliseconds_since(start: u64) -> f64 {
    (now_ns() - start) as f64 / 1e6
}

/// Takes a file of `size` bytes over a connection that is there already. Says how long that took, in ms, and how much
/// of it was ready.
pub fn take(socket: &Path, size: usize, node: usize) -> Result<()> {
    let client = Client::connect(socket)?;
    let request = request(size, node);
    let start = now_ns();
    let taken = client.take(&request)?;
    let milliseconds = milliseconds_since(start);
    say(milliseconds)?;
    say(taken.ready)
}

/// Takes a file of `size` bytes as its heap and writes to each page. Says how long that took, in ms.
pub fn heap(socket: &Path, size: usize, node: usize) -> Result<()> {
    let start = now_ns();
    let client = Client::connect(socket)?;
    let Taken { file, .. } = client.take(&request(size, node))?;
    let block = Block::of_file(&file, size)?;
    block.touch();
    say(milliseconds_since(start))?;
    block.forget();
    Ok(())
}

/// The same in memory of its own.
pub fn own_heap(size: usize, pages: Pages) -> Result<()> {
    let start = now_ns();
    let block = Block::new(Origin::Map, size)?;
    let block = match pages {
        Pages::Huge => block.with_huge_pages(),
        Pages::Small => block.without_huge_pages(),
    };
    block.touch();
    say(milliseconds_since(start))?;
    block.forget();
    Ok(())
}

/// Gets `size` bytes of zeroes on the spot, by all CPUs. Says how long that took, in ms.
pub fn own_zeroes(size: usize) -> Result<()> {
    let start = now_ns();
    let block = Block::new(Origin::Map, size)?.with_huge_pages();
    block.touch_in_parallel();
    say(milliseconds_since(start))?;
    block.forget();
    Ok(())
}
