//! The case that the kernel's own shrinker of huge pages was proposed with: a program whose huge pages are twice as
//! large as what its control group may use, while it touches a twelfth of them.

use super::command::Watch;
use super::{BENCH, OURS};
use crate::cases::Setting;
use crate::contest::{Rounds, alternate, column};
use crate::contestant::Contestant;
use crate::group::Hierarchy;
use crate::kept::Kept;
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::{Context, Result, bail};
use pagecrew::units::Bytes;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

/// With more zero pages than this of its 512, a huge page is under-used for the kernel. At 511, the default, none is.
const MAX_PTES_NONE: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none";
/// What Meta ran, and the default of trim.
const THRESHOLD: &str = "409";

const STOCK: &str = "the stock kernel";
const SHRINKER: &str = "its shrinker at 409";

/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
const RUNS: usize = 5;

/// Figures of a run: whether it was ended before its time, its seconds, and the most memory that its group used, if the
/// kernel tells.
const ENDED: usize = 0;
const SECONDS: usize = 1;
const PEAK: usize = 2;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let Some(hierarchy) = Hierarchy::find() else {
        report.note(
            "programs under a memory limit are left out: it takes root and a control group with the memory controller",
        );
        return Ok(());
    };
    let found = std::fs::read_to_string(MAX_PTES_NONE).context(MAX_PTES_NONE)?;
    report.note(&format!(
        "khugepaged/max_ptes_none is {THRESHOLD} for the runs of the kernel's own shrinker, and {} again after each",
        found.trim()
    ));
    let rounds = setting.size(20, 5);
    for (bytes, rounds) in [(40 << 20, rounds * 8), (setting.size(512 << 20, 128 << 20), rounds)] {
        compare(&hierarchy, bytes, rounds, report)?;
    }
    Ok(())
}

fn compare(hierarchy: &Hierarchy, bytes: usize, rounds: usize, report: &mut Report) -> Result<()> {
    let limit = bytes / 2;
    let case = format!("{} under a limit of {}", Bytes(bytes as u64), Bytes(limit as u64));
    let contestants = [OURS, STOCK, SHRINKER].map(Contestant::plain);
    let results =
        alternate(report, &case, RUNS, &contestants, |contestant| one(hierarchy, &contestant.name, bytes, rounds))?;
    let (ours, others) = results.split_first().context("nobody took part")?;
    for (peer, theirs) in contestants[1..].iter().zip(others) {
        let killed = Comparison::new(BENCH, format!("{case}: killed or hung, of {RUNS}"), "");
        report.row(killed.bar(Bar::Ours(0.0)).resolution(1.0).row(ended(ours), &peer.name, ended(theirs)))?;
        if ended(ours) + ended(theirs) > 0.0 {
            continue;
        }
        let parts = [(format!("{case}: {rounds} rounds"), "s", SECONDS), (format!("{case}: peak"), "MiB", PEAK)];
        for (case, unit, index) in parts {
            let (ours, theirs) = (column(ours, index), column(theirs, index));
            if ours.iter().chain(&theirs).all(|figure| figure.is_finite()) {
                report.row(Comparison::new(BENCH, case, unit).rounds(&ours, &peer.name, &theirs))?;
            }
        }
    }
    Ok(())
}

/// How many runs did not come to their end.
fn ended(rounds: &Rounds) -> f64 {
    column(rounds, ENDED).iter().sum()
}

/// One run in a group of its own.
fn one(hierarchy: &Hierarchy, contestant: &str, bytes: usize, rounds: usize) -> Result<Vec<f64>> {
    let group = hierarchy.group("stress", Some(bytes / 2))?;
    group.keep_from_swap()?;
    let setting = match contestant {
        SHRINKER => Some(Kept::setting(Path::new(MAX_PTES_NONE), THRESHOLD)?),
        _ => None,
    };
    let watch = match contestant {
        OURS => Some(Watch::start(["--cgroup", &group.path()])?),
        _ => None,
    };
    // What was freed for a while, a host may have taken: whoever comes next would pay for it.
    machine::warm_for_a_run(2 * bytes)?;
    let arguments = ["trim-stress", &bytes.to_string(), &rounds.to_string()];
    let mut command = worker(&Contestant::plain(""), &arguments);
    group.enter(&mut command)?;
    let program = Running::start(&mut command)?;
    let in_time = program.ends_within(LIMIT)?;
    if !in_time {
        program.signal(libc::SIGKILL)?;
    }
    let (status, usage) = program.end()?;
    let killed = status.signal() == Some(libc::SIGKILL);
    if !status.success() && !killed {
        bail!("the program failed: {status}");
    }
    watch.map(Watch::stop).transpose()?;
    setting.map(Kept::undo).transpose()?;
    let peak = group.peak_mib().unwrap_or(f64::NAN);
    group.remove()?;
    Ok(vec![f64::from(u8::from(killed)), usage.seconds, peak])
}
