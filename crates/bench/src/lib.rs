//! Side-by-side benchmarks behind `pagecrew bench` and the real programs behind `pagecrew demo`.
//!
//! Whatever is measured runs as an unmodified program in a process of its own, once with Pagecrew's preload library and once
//! with what a user would have instead. Small workloads are this very binary, executed again as `pagecrew bench-worker`.
//!
//! - `figures`, `row`, `report`, `plot`: medians, one comparison, and how comparisons are printed and drawn.
//! - `contestant`, `program`, `contest`: which malloc, one measured process, and taking turns.
//! - `machine`, `python`: what this machine has room for and has installed.
//! - `kept`, `group`, `bystanders`: changes to the system that don't outlive a bench, control groups, and programs that keep every CPU busy.
//! - `programs`, `noise`: real programs and their generated inputs.
//! - `worker`: the measured programs.
//! - `cases`: `free`, `alloc`, `polite`, `frame`, `trim`, `pool`, `run` and `reclaim`.
//! - `demo`: real programs with and without Pagecrew.

mod bystanders;
mod cases;
mod contest;
mod contestant;
mod demo;
mod figures;
mod group;
mod kept;
mod machine;
mod noise;
mod plot;
mod program;
mod programs;
mod python;
mod report;
mod row;
mod worker;

pub use cases::{NAMES, OF_CASES};

use std::path::PathBuf;

/// What is measured, and how it is printed.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The benches; all where none is named.
    pub names: Vec<String>,
    /// Of a bench among [`OF_CASES`], only cases whose names contain each of these texts.
    pub only: Vec<String>,
    /// Smaller sizes and fewer rounds, so that everything takes a few minutes.
    pub quick: bool,
    /// One object a line instead of tables.
    pub json: bool,
    /// Where the comparisons are drawn as well.
    pub plot: Option<PathBuf>,
}

/// Runs benches and prints their comparisons.
///
/// # Errors
/// If a name is unknown, the preload library can't be found, or a measured program fails.
pub fn bench(options: &Options) -> anyhow::Result<()> {
    cases::run(options)
}

/// Runs real programs with and without Pagecrew and prints what changed. What is not installed is named and left out.
///
/// # Errors
/// If the preload library can't be found, a program fails, or its results differ.
pub fn demo(json: bool) -> anyhow::Result<()> {
    demo::run(json)
}

/// The measured side of a bench: what the hidden command `pagecrew bench-worker` does.
///
/// # Errors
/// If the arguments are not a worker's, or if memory can't be had.
pub fn worker(args: &[String]) -> anyhow::Result<()> {
    worker::run(args)
}
