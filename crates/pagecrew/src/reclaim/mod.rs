//! Reclaim without stalls on a stock kernel: memory is free before it is taken.
//!
//! The kernel reclaims in the background when a node's free memory has come to its low watermark, and lets tasks reclaim for themselves at
//! the min watermark. The distance between them is a thousandth of the memory, which fast storage takes in milliseconds, before a kernel
//! thread was even given a CPU. Several such threads were proposed for that and refused: one more number to tune, and hogs that must still
//! be throttled. Measured, the distance decides and not the number of threads. So it is set to what the demand of the moment needs
//! ([`crate::control::lead`]) and set back when that is over: a fixed distance costs memory all day.
//!
//! - [`watermarks`]: which value of the setting makes which distance. [`looks`]: what is known of each node. [`plan`]: when is looked, and
//!   what follows. Pure.
//! - [`urgency`]: the kernel's threads come before others.
//! - [`factor`]: the setting, with what puts it back whatever happens. [`support`]: whether it can be done. [`reclaimer`]: all of it together.
//! - The same for control groups at their own limits, for which the kernel has no reclaim in the background: [`group_plan`] and [`group_turns`], pure;
//!   [`group_files`], [`group_tree`], [`group_support`]; [`groups`]: the threads, and `group_member`: a turn of one group.
//! - Whoever waits for reclaim no longer takes more of what is others': the group that takes most is held to what it has ([`group_share`], pure;
//!   `group_survey`: which one that is). Programs that somebody names have what they have used of files dropped behind them ([`behind_plan`], pure;
//!   [`behind`]).

pub mod behind;
pub mod behind_plan;
#[cfg(test)]
mod beside;
pub mod factor;
pub mod group_files;
mod group_member;
pub mod group_plan;
pub mod group_share;
#[cfg(test)]
mod group_simulation;
pub mod group_support;
mod group_survey;
pub mod group_tree;
pub mod group_turns;
pub mod groups;
pub mod looks;
pub mod plan;
pub mod reclaimer;
pub mod support;
pub mod urgency;
pub mod watermarks;

pub use behind::{Behind, BehindStanding};
pub use factor::FactorError;
pub use group_plan::Pause;
pub use group_support::Unserved;
pub use group_tree::Choice;
pub use groups::{GroupEvent, GroupOptions, GroupStanding, Groups};
pub use reclaimer::{Event, Options, ReclaimError, Reclaimer, Standing};
pub use support::Unsupported;
