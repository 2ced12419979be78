//! Pagecrew takes memory work off a program's critical path, on a stock Linux kernel: freeing, zeroing and re-packing pages in
//! parallel, in batches, in the background, on CPU that nobody else wants.
//!
//! The modules are layers. Each uses only those that stand before it here: [`units`], [`sys`], [`stats`], [`crew`], [`region`].
//! `ARCHITECTURE.md` in the repository has the whole picture.

pub mod units;

pub mod sys;

pub mod stats;

pub mod crew;

#[cfg(not(loom))]
// Built of threads and system calls, which loom does not model.
#[cfg(not(loom))]
pub mod region;
