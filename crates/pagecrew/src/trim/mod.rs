//! Huge pages without the bloat: the zero part of under-used huge pages goes back to the system, from any process, while it runs.
//!
//! Since Linux 6.12, when a huge page is split, the kernel puts the shared zero page in the place of those of its 512 subpages that are
//! zero. By itself it does that only when it is out of memory, and by default not at all. A process that may do so can have it done
//! at any time, to its own huge pages and to those of others, by the advice that a part of one is cold (`MADV_COLD`). The kernel compares
//! the contents under its own locks, so no write is lost, whatever was read before; and nobody is stopped or traced.
//!
//! - [`sample`], [`credit`], [`history`], [`plan`]: the policy. Is a huge page under-used, what may it cost to find out, when is it looked
//!   at again, whose turn is it, is memory short ([`shortage`]), is a program at rest ([`rest`]). Pure.
//! - [`target`]: a process, as far as it matters here; [`trimmer`]: one process; [`fleet`]: many, within one budget.
//! - [`own_process`], [`spans`], [`SpanTrimmer`]: this process itself.
//! - [`protect`]: what a process can do to be left alone; [`support`]: whether this kernel can.
//!
//! Source: "split underutilized THPs" (Usama Arif, Alexander Zhu and Yu Zhao, 2024), whose review objected that zero on purpose is zero,
//! too; that scanning pollutes caches; and that nothing happens before memory is short.

pub mod credit;
pub mod fleet;
pub mod history;
pub mod options;
mod own;
pub mod plan;
pub mod protect;
pub mod rest;
pub mod sample;
pub mod shortage;
pub mod support;
pub mod tally;
pub mod target;
#[cfg(test)]
mod tests;
pub mod trimmer;

pub use fleet::{Fleet, Id, Member, Turn};
pub use options::{Exclusion, Options};
pub use own::{SpanTrimmer, own_process, spans};
pub use tally::{BUDGET, Left, Overview, Tally};
pub use target::{Other, Target, TargetError};
pub use trimmer::{Clock, Kernel, Trimmer};
