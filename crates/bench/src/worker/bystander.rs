//! A program that needs nothing but its CPU.

use anyhow::{Context, Result, ensure};
use pagecrew::sys::{PAGE_SIZE, sched};
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters stand this far apart, so that bystanders share no cache line.
pub const STRIDE: usize = 128;

/// Counts loops of about 10 us on `cpu`, for ever, in the counter number `index` of the file `path`.
pub fn run(cpu: usize, path: &str, index: usize) -> Result<()> {
    let mut only = sched::CpuSet::new();
    only.insert(cpu);
    sched::set_affinity(&only)?;
    let file = std::fs::File::options().read(true).write(true).open(path).context("the counters' file")?;
    ensure!((index + 1) * STRIDE <= PAGE_SIZE, "no room for counter {index}");
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a page of the file, which has one; it stays as long as this program runs.
    let page =
        unsafe { libc::mmap(std::ptr::null_mut(), PAGE_SIZE, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    ensure!(page != libc::MAP_FAILED, "the counters can't be mapped");
    // SAFETY: aligned, inside the mapping, and only ever used as an atomic number.
    let counter = unsafe { &*((page as usize + index * STRIDE) as *const AtomicU64) };
    let mut value = 1u64;
    loop {
        for _ in 0..10_000 {
            value = black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
