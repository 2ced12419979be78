//! Virtual machines on hugetlbfs: QEMU's own files beside those of a pool.

use super::guest::{Guest, Memory, Translator};
use super::server::{Server, Started};
use super::{ALL_THREADS, BENCH, FAST, GIB, OURS};
use crate::cases::Setting;
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::kept::Kept;
use crate::machine;
use crate::report::Report;
use crate::row::Comparison;
use anyhow::{Context, Result, ensure};
use pagecrew::sys::HUGE_PAGE_SIZE;
use pagecrew::units::Bytes;
use std::path::Path;
use std::time::{Duration, Instant};

/// How many huge pages are set apart, for hugetlbfs only, and how many of them nobody has.
const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Pages that are set apart beside those that are needed: a filler that got no CPU time meanwhile has its last few a
/// while longer.
const SPARE: usize = 64;

/// What a pool gives up is free a few milliseconds later.
const PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(1);

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let wanted = if setting.quick { vec![GIB / 2] } else { vec![GIB, 8 * GIB] };
    let mut sizes: Vec<_> = wanted.into_iter().map(|size| machine::affordable(size, report)).collect();
    sizes.dedup();
    for size in sizes {
        if let Err(refusal) = compare(size, setting, report)? {
            report.note(&format!("hugetlbfs is left out: {refusal}"));
            break;
        }
    }
    Ok(())
}

fn pages(file: &str) -> Result<usize> {
    let text = std::fs::read_to_string(file).with_context(|| file.to_owned())?;
    text.trim().parse().with_context(|| format!("{file} says '{}'", text.trim()))
}

/// Has the pool hold nothing, and waits until QEMU can have `size` bytes.
fn empty(server: &Server, size: usize) -> Result<()> {
    server.empty()?;
    let start = Instant::now();
    while pages(FREE)? < size / HUGE_PAGE_SIZE {
        ensure!(start.elapsed() < PATIENCE, "the huge pages of a pool that was emptied are not free");
        std::thread::sleep(STEP);
    }
    Ok(())
}

/// Compares machines of `size` bytes, or says why this machine can't have them.
fn compare(size: usize, setting: &Setting, report: &mut Report) -> Result<Result<(), String>> {
    let before = match pages(RESERVED) {
        Ok(before) => before,
        Err(error) => return Ok(Err(format!("{error:#}"))),
    };
    let wanted = before + size / HUGE_PAGE_SIZE + SPARE;
    // What is set apart stays with this machine until the end, so it is warm from now on.
    machine::warm_for_a_run(size)?;
    report.note(&format!("{RESERVED} is {wanted} for the runs on hugetlbfs, and {before} again after them"));
    let setting_apart = match Kept::setting(Path::new(RESERVED), &wanted.to_string()) {
        Ok(setting_apart) => setting_apart,
        Err(error) => return Ok(Err(format!("{error:#}"))),
    };
    let found = pages(RESERVED)?;
    if found < wanted {
        return Ok(Err(format!("only {found} of {wanted} huge pages could be set apart")));
    }
    let path = std::env::temp_dir().join(format!("pagecrew-bench-{}-hugetlbfs", std::process::id()));
    let mount = Kept::hugetlbfs(&path)?;
    let server = match Server::start(size, &[&FAST[..], &["--backing", "hugetlbfs"]].concat())? {
        Started::Serving(server) => *server,
        Started::Refused(refusal) => return Ok(Err(refusal)),
    };
    measure(size, &server, &path, setting, report)?;
    server.stop()?;
    mount.undo()?;
    setting_apart.undo()?;
    Ok(Ok(()))
}

fn measure(size: usize, server: &Server, mount: &Path, setting: &Setting, report: &mut Report) -> Result<()> {
    let threads = machine::cpus()?.len();
    let case = format!("{} guest, hugetlbfs", Bytes(size as u64));
    let start = |memory| Guest { size, locked: false, translator: Translator::Usual, memory }.seconds_to_monitor();
    empty(server, size)?;
    // Whoever has the pages first must not pay for that.
    start(Memory::Hugetlbfs { mount, threads })?;
    let contestants = [OURS, ALL_THREADS].map(Contestant::plain);
    let results = alternate(report, &case, setting.repetitions(), &contestants, |contestant| {
        if contestant.name == OURS {
            server.fill()?;
            return Ok(vec![start(Memory::Pool(server))?]);
        }
        empty(server, size)?;
        Ok(vec![start(Memory::Hugetlbfs { mount, threads })?])
    })?;
    let comparison = |_: &Contestant| Comparison::new(BENCH, &*case, "s");
    against_the_first(comparison, &contestants, &results, 0).try_for_each(|row| report.row(row))
}
