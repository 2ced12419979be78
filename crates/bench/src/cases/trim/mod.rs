//! Huge pages without the bloat: what goes back, what that costs, and what it does to the speed of the program.

mod command;
mod mapped;
mod reading;
mod sparse;
mod speed;
mod stress;

use super::Setting;
use crate::machine;
use crate::report::Report;
use anyhow::Result;

const BENCH: &str = "trim";

/// Who takes part.
const OURS: &str = "pagecrew";
const UNTOUCHED: &str = "huge pages untouched";

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    if !machine::has_huge_pages() {
        report.note("this kernel has no huge pages, or they are switched off; the bench of trim is left out");
        return Ok(());
    }
    if let Some(refusal) = command::refusal()? {
        report.note(&format!("the bench of trim is left out: {refusal}"));
        return Ok(());
    }
    sparse::run(setting, report)?;
    reading::run(setting, report)?;
    stress::run(setting, report)?;
    speed::run(setting, report)
}
