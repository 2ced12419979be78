//! Pagecrew takes memory work off a program's critical path, on a stock Linux kernel: freeing, zeroing and re-packing pages in
//! parallel, in batches, in the background, on CPU that nobody else wants.
//!
//! The modules are layers. Each uses only those that stand before it here: [`units`], [`sys`], [`stats`], [`control`], [`crew`], [`region`],
//! [`mapping`], [`frame`], [`trim`], [`group`], [`pool`], [`reclaim`],
//! [`metrics`].
//! `ARCHITECTURE.md` in the repository has the whole picture.

// Only the parts that have models are used under loom.
#![cfg_attr(loom, allow(dead_code))]

pub mod units;

pub mod sys;

pub mod stats;

#[cfg(not(loom))]
pub mod control;

pub mod crew;

#[cfg(not(loom))]
pub mod region;

#[cfg(not(loom))]
pub mod mapping;

#[cfg(not(loom))]
pub mod frame;

#[cfg(not(loom))]
pub mod trim;

#[cfg(not(loom))]
pub mod group;

#[cfg(not(loom))]
pub mod pool;

#[cfg(not(loom))]
pub mod reclaim;

#[cfg(not(loom))]
pub mod metrics;

// Threads and system calls are not modelled by loom; the bookkeeping of spans and of areas is, and who waits for what.
#[cfg(loom)]
#[allow(missing_docs)]
pub mod region {
    mod bins;
    mod bits;
    mod classes;
    mod colour;
    mod links;
    pub mod page_map;
    pub mod spans;
}
#[cfg(loom)]
#[allow(missing_docs)]
pub mod frame {
    mod area;
    mod tree;
}
#[cfg(loom)]
#[allow(missing_docs)]
pub mod pool {
    mod duties;
    mod turns;
}
