//! `pagecrew run` before all kinds of programs. The parts are named by the beginnings of their cases' names.
//!
//! - `cells`: blocks of 64 KiB and more, beside other mallocs; [`cell`] is one of them, [`judge`] says what it has to reach.
//! - `burst`: smaller blocks after a large one was freed, of one size and of many.
//! - `crowd`: the same with much else in the process.
//! - `small`: blocks below 64 KiB, over each malloc.
//! - `programs`: real programs, without it and with tcmalloc.

mod burst;
mod cell;
mod cells;
mod crowd;
mod judge;
mod programs;
mod small;

use super::Setting;
use crate::contestant::Contestant;
use crate::report::Report;
use anyhow::{Result, ensure};

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    cells::run(setting, report)?;
    burst::run(setting, report)?;
    crowd::run(setting, report)?;
    small::run(setting, report)?;
    programs::run(setting, report)?;
    ensure!(!setting.only.matched_nothing(), "no case of the bench 'run' has all of these texts in its name");
    Ok(())
}

/// Pagecrew, glibc, and the other mallocs as users get them.
fn everyone(setting: &Setting) -> Vec<Contestant> {
    [setting.ours.clone(), Contestant::plain("glibc")].into_iter().chain(setting.peers.all().iter().cloned()).collect()
}
