//! A burst of memory, then nothing.

use super::block::{Block, Origin};
use super::say;
use anyhow::Result;
use pagecrew::sys::procfs::resident_bytes;
use std::time::Duration;

/// Size of each allocation of the burst.
const PIECE: usize = 64 << 20;

/// Prints by how many MiB the program's resident memory is above what it was before, `pause` after it has allocated and freed
/// `bytes`. It makes no call in between.
pub fn run(bytes: usize, pause: Duration) -> Result<()> {
    let before = resident_bytes()?;
    let burst = (0..bytes / PIECE).map(|_| Block::new(Origin::Malloc, PIECE)).collect::<Result<Vec<_>>>()?;
    burst.iter().for_each(Block::touch);
    drop(burst);
    std::thread::sleep(pause);
    say((resident_bytes()? as f64 - before as f64) / f64::from(1 << 20))
}
