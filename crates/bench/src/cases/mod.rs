//! The benches and their sizes.

mod alloc;
mod frame;
mod free;
mod only;
mod polite;
mod pool;
mod reclaim;
mod run;
mod trim;

use crate::Options;
use crate::contestant::{Contestant, Peers};
use crate::plot;
use crate::report::Report;
use anyhow::{Result, bail};
use only::Only;

/// Every bench, in the order in which they run.
pub const NAMES: &[&str] = &["free", "alloc", "polite", "frame", "trim", "pool", "run", "reclaim"];

/// Those of which some cases can be left out.
pub const OF_CASES: &[&str] = &["run", "reclaim"];

/// Those that run only if they are named: they take nearly all of the machine's memory.
const ONLY_NAMED: &[&str] = &["reclaim"];

/// Those that compare with the mallocs that are installed.
const AMONG_MALLOCS: &[&str] = &["alloc", "frame", "run"];

/// What every bench gets.
pub struct Setting {
    /// Smaller sizes and fewer runs.
    pub quick: bool,
    /// Cases that are wanted, of the benches that can leave some out.
    pub only: Only,
    /// Pagecrew with its default options.
    pub ours: Contestant,
    /// The mallocs that are installed here; none where no bench that is wanted compares with them.
    pub peers: Peers,
}

impl Setting {
    /// Runs of each contestant.
    pub fn repetitions(&self) -> usize {
        if self.quick { 3 } else { 5 }
    }

    /// The full size, or the quick one.
    pub fn size(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

/// Runs the benches that `options` name, or all.
pub fn run(options: &Options) -> Result<()> {
    let names = &options.names;
    if let Some(unknown) = names.iter().find(|name| !NAMES.contains(&name.as_str())) {
        bail!("there is no bench called '{unknown}'; there are {}", NAMES.join(", "));
    }
    let mut report = Report::new(options.json);
    let result = run_wanted(options, &mut report);
    // What was measured is drawn, also where the rest has failed: it may have taken an hour.
    let plot = options.plot.as_ref().filter(|_| result.is_ok() || !report.all().is_empty());
    let drawn = plot.map_or(Ok(()), |path| plot::draw(path, report.all()));
    result.and(drawn)
}

fn run_wanted(options: &Options, report: &mut Report) -> Result<()> {
    let names = &options.names;
    let wanted = |name: &&str| match names.is_empty() {
        true => !ONLY_NAMED.contains(name),
        false => names.iter().any(|wanted| wanted == name),
    };
    let setting = Setting {
        quick: options.quick,
        only: Only::new(&options.only),
        ours: Contestant::pagecrew()?,
        peers: if AMONG_MALLOCS.iter().any(wanted) { Peers::find(report) } else { Peers::default() },
    };
    for &name in NAMES.iter().filter(|name| wanted(name)) {
        let result = match name {
            "free" => free::run(&setting, report),
            "alloc" => alloc::run(&setting, report),
            "polite" => polite::run(&setting, report),
            "frame" => frame::run(&setting, report),
            "trim" => trim::run(&setting, report),
            "pool" => pool::run(&setting, report),
            "reclaim" => reclaim::run(&setting, report),
            _ => run::run(&setting, report),
        };
        let shown = report.table(name);
        result?;
        shown?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_bench_is_refused_before_anything_runs() {
        let error = run(&Options { names: vec!["fre".to_owned()], ..Options::default() }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no bench called 'fre'; there are free, alloc, polite, frame, trim, pool, run, reclaim"
        );
    }
}
