//! Readers of a fast disk on a machine with little free memory: how often they have to reclaim for themselves, and how long they take.

use super::{Only, Setting};
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::group::{Group, Hierarchy};
use crate::kept::Kept;
use crate::program::{Running, pagecrew, run as run_program, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::{DELAYS, Delays, file_of_neighbour, files_of_disk};
use anyhow::{Context, Result, bail};
use pagecrew::sys::procfs;
use pagecrew::units::Bytes;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const BENCH: &str = "reclaim";

/// A machine is in use if less than this share of its memory is available.
const AT_REST: f64 = 0.85;
/// So much of the memory is left to the page cache: what a machine that is well used has.
const LEFT: f64 = 0.05;
/// A neighbour of the readers uses this part of that.
const WORKING_SET: usize = 2;
/// The disk takes a third of the memory, and no more than this.
const DISK_MOST: usize = 8 << 30;

const FACTOR: &str = "/proc/sys/vm/watermark_scale_factor";
const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

/// So many readers there are beside a neighbour.
const BESIDE: usize = 8;

/// So many figures a load has, and a neighbour.
const FIGURES: usize = 5;
const FIGURES_OF_NEIGHBOUR: usize = 4;

/// From one load to the next one of a steady state.
const PAUSE: Duration = Duration::from_secs(2);
/// Without a load, demand is forgotten within this time.
const REST: Duration = Duration::from_secs(60);
/// And this much is read slowly then, so that what is free is what is kept free.
const SLOWLY: usize = 1 << 30;

/// What a contestant does to the machine, or to the readers.
enum Change {
    Nothing,
    /// A setting of the kernel's is another one.
    Setting(Kept),
    /// The kernel's threads come before others.
    Nice(Kept),
    /// The readers have a control group of their own.
    Group(Group),
    /// The readers leave nothing in the page cache (`RWF_DONTCACHE`, 6.14).
    Uncached,
    Ours(Running),
}

impl Change {
    /// Makes the change that `name` stands for.
    fn make(name: &str) -> Result<Change> {
        let setting = |path: &str, value: &str| Kept::setting(Path::new(path), value).map(Change::Setting);
        match name.split_once(' ') {
            None if name == OURS => {
                let mut program = Running::start(&mut pagecrew(&["reclaim", "--json"]))?;
                program.line().context("pagecrew reclaim")?;
                Ok(Change::Ours(program))
            }
            None if name == UNCACHED => Ok(Change::Uncached),
            None => Ok(Change::Nothing),
            Some(("watermark_scale_factor", value)) => setting(FACTOR, value),
            Some(("min_free_kbytes", times)) => {
                let before: u64 = std::fs::read_to_string(MIN_FREE)?.trim().parse().context(MIN_FREE)?;
                setting(MIN_FREE, &(before * times.trim_start_matches('x').parse::<u64>()?).to_string())
            }
            Some(("DAMOS", _)) => Kept::damos().map(Change::Setting),
            Some(("kswapd", _)) => Kept::nice_kswapd(MOST_URGENT).map(Change::Nice),
            Some(_) => {
                let hierarchy = Hierarchy::find().context("no control groups for memory")?;
                hierarchy.group("limited", Some(OWN_GROUP)).map(Change::Group)
            }
        }
    }

    /// The readers of `files`, as they read with it.
    fn readers(&self, files: &Path, readers: usize) -> Result<Command> {
        let kind = if matches!(self, Change::Uncached) { "uncached" } else { "cached" };
        let mut command = load_of(files, readers, kind);
        if let Change::Group(group) = self {
            group.enter(&mut command)?;
        }
        Ok(command)
    }

    fn undo(self) -> Result<()> {
        match self {
            Change::Nothing | Change::Uncached => Ok(()),
            Change::Setting(kept) | Change::Nice(kept) => kept.undo(),
            Change::Group(group) => group.remove(),
            Change::Ours(program) => {
                program.signal(libc::SIGTERM)?;
                program.end().map(drop)
            }
        }
    }
}

const OURS: &str = "pagecrew";
const STOCK: &str = "stock";
const UNCACHED: &str = "RWF_DONTCACHE";
const DAMOS: &str = "DAMOS pageout";
const NICE: &str = "kswapd nice -20";
const GROUP: &str = "group of 512 MiB for the readers";

/// The limit of that group.
const OWN_GROUP: usize = 512 << 20;
const MOST_URGENT: i32 = -20;
/// That of a group whose readers are at it.
const LIMIT: usize = 256 << 20;

/// The contestants, ours first: settings of the kernel's, one as it is said and one as many times what it is, and what else an operator can
/// do.
fn contestants(quick: bool) -> Vec<Contestant> {
    let names: &[&str] = if quick {
        &[OURS, STOCK, "watermark_scale_factor 200"]
    } else {
        &[
            OURS,
            STOCK,
            "watermark_scale_factor 100",
            "watermark_scale_factor 200",
            "watermark_scale_factor 500",
            "min_free_kbytes x4",
            NICE,
            DAMOS,
            GROUP,
            UNCACHED,
        ]
    };
    names.iter().map(|name| Contestant::plain(name)).collect()
}

/// What is measured, by the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// So many readers with nothing beside them.
    Readers(usize),
    /// Readers beside a program with a working set of its own.
    Neighbour,
    /// The same, each in a control group of its own without limits.
    Apart,
    /// Threads that do something else with the files: a kind of the load's, and what it does.
    Other(&'static str, &'static str),
    /// Programs that need half as much again as there is, with swap in compressed memory.
    Swapping,
    /// Readers in a control group at its limit.
    AtLimit,
    /// What is kept free while nobody needs it.
    Rest,
}

impl Case {
    /// All of a run, in its order.
    fn all(quick: bool) -> Vec<Case> {
        let neighbours = [Case::Neighbour, Case::Apart];
        if quick {
            return [&[Case::Readers(8)][..], &neighbours].concat();
        }
        let others = [("mapped", "mapped files"), ("written", "files written over"), ("names", "names looked up")]
            .map(|(kind, what)| Case::Other(kind, what));
        let rest = [Case::Swapping, Case::AtLimit, Case::Rest];
        [&[8, 16, 64].map(Case::Readers)[..], &neighbours, &others, &rest].concat()
    }

    /// Those of a run that are wanted.
    fn wanted(quick: bool, only: &Only) -> Result<Vec<Case>> {
        let among = |quick| -> Vec<Case> {
            Case::all(quick).into_iter().filter(|case| only.wants(&case.to_string())).collect()
        };
        let wanted = among(quick);
        if wanted.is_empty() {
            if let Some(case) = among(false).first() {
                bail!("the case '{case}' of the bench '{BENCH}' is not part of a quick run");
            }
            bail!("no case of the bench '{BENCH}' has all of these texts in its name");
        }
        Ok(wanted)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Readers(readers) => write!(f, "{readers} readers"),
            Case::Neighbour => write!(f, "{BESIDE} readers beside a neighbour"),
            Case::Apart => write!(f, "{BESIDE} readers beside a neighbour, in groups"),
            Case::Other(_, what) => write!(f, "{BESIDE} threads, {what}"),
            Case::Swapping => f.write_str("2 threads that swap to zram"),
            Case::AtLimit => write!(f, "{BESIDE} readers at the limit of their group"),
            Case::Rest => f.write_str("free at rest"),
        }
    }
}

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let wanted = Case::wanted(setting.quick, &setting.only)?;
    if let Some(reason) = refusal()? {
        report.note(&format!("the bench of reclaim is left out: {reason}"));
        return Ok(());
    }
    let total = procfs::memory_info()?.total as usize;
    let base = tempfile::Builder::new().prefix("pagecrew-bench-").tempdir()?;
    report.expect(1, "a disk in memory");
    let left = (total as f64 * LEFT) as usize;
    let disk = Kept::disk(base.path(), (total / 3).min(DISK_MOST), left / WORKING_SET)?;
    report.step();
    report.note(&format!("all memory but {} is taken while this runs", Bytes(left as u64)));
    let locked = Running::start(&mut worker(&Contestant::plain(""), &["lock", &left.to_string()]));
    let result = locked.and_then(|mut locked| {
        locked.line()?;
        let accounting = Delays::open().and_then(|_| Kept::setting(Path::new(DELAYS), "1"));
        if let Err(error) = &accounting {
            report.note(&format!("times in reclaim are left out: {error:#}"));
        }
        let (files, own) = (files_of_disk(base.path()), file_of_neighbour(base.path()));
        let scene = Scene { files: &files, own: &own, timed: accounting.is_ok(), setting };
        scene.measure(&wanted, left, report)?;
        accounting.map_or(Ok(()), Kept::undo)
    });
    disk.undo().and(result)
}

/// Why this machine is left alone.
fn refusal() -> Result<Option<String>> {
    let memory = procfs::memory_info()?;
    let in_use = memory.total.saturating_sub(memory.available);
    if (memory.available as f64) < memory.total as f64 * AT_REST {
        return Ok(Some(format!(
            "the machine is in use ({} of its memory), and this would take nearly all of the rest",
            Bytes(in_use)
        )));
    }
    // The same user's right to all that is needed.
    if let Err(error) = std::fs::OpenOptions::new().write(true).open(FACTOR) {
        return Ok(Some(format!("{FACTOR}: {error}")));
    }
    Ok(None)
}

/// Those of the contestants that this machine can have; why not, is said of the others.
fn possible(files: &Path, contestants: Vec<Contestant>, report: &mut Report) -> Vec<Contestant> {
    let mut found = Vec::new();
    for contestant in contestants {
        let tried = match contestant.name.as_str() {
            GROUP | DAMOS => Change::make(&contestant.name).and_then(Change::undo),
            UNCACHED => load(files, 1, &Change::Uncached).map(drop),
            _ => Ok(()),
        };
        match tried {
            Ok(()) => found.push(contestant),
            Err(error) => report.note(&format!("{} is left out: {error:#}", contestant.name)),
        }
    }
    found
}

/// The load of this kind, of so many threads.
fn load_of(files: &Path, threads: usize, kind: &str) -> Command {
    worker(&Contestant::plain("load"), &["load", &files.to_string_lossy(), &threads.to_string(), kind])
}

/// A load: seconds, direct reclaims, MiB reclaimed by the readers, seconds of CPU time of the whole machine, seconds for which all readers
/// together have reclaimed.
fn load(files: &Path, readers: usize, change: &Change) -> Result<Vec<f64>> {
    run_program(&mut change.readers(files, readers)?)?.figures()
}

/// Where the loads run, and whether the kernel says for how long tasks reclaim.
#[derive(Clone, Copy)]
struct Scene<'a> {
    files: &'a Path,
    /// The neighbour's.
    own: &'a Path,
    timed: bool,
    setting: &'a Setting,
}

impl Scene<'_> {
    /// `left` is how much of the memory is not taken.
    fn measure(&self, cases: &[Case], left: usize, report: &mut Report) -> Result<()> {
        let hierarchy = Hierarchy::find();
        let mut all = None;
        for &case in cases {
            match (case, &hierarchy) {
                (Case::Readers(readers), _) => {
                    let all = all.get_or_insert_with(|| possible(self.files, contestants(self.setting.quick), report));
                    self.readers(readers, all, report)?;
                }
                (Case::Neighbour, _) => self.neighbour(case, None, report)?,
                (Case::Apart, Some(hierarchy)) => self.neighbour(case, Some(hierarchy), report)?,
                (Case::AtLimit, Some(hierarchy)) => self.at_limit(case, hierarchy, report)?,
                (Case::Apart | Case::AtLimit, None) => {
                    report.note(&format!("'{case}' is left out: no control groups for memory"))
                }
                (Case::Other(kind, _), _) => {
                    self.beside_stock(case, report, || run_program(&mut load_of(self.files, BESIDE, kind))?.figures())?
                }
                (Case::Swapping, _) => self.swapping(case, left, report)?,
                (Case::Rest, _) => self.rest(case, report)?,
            }
        }
        Ok(())
    }

    fn readers(&self, readers: usize, contestants: &[Contestant], report: &mut Report) -> Result<()> {
        let Scene { files, setting, .. } = *self;
        let what = Case::Readers(readers).to_string();
        let results = alternate(report, &what, setting.repetitions(), contestants, |contestant| {
            // What is free is what the kernel's own settings keep free.
            load(files, readers, &Change::Nothing)?;
            let change = Change::make(&contestant.name)?;
            std::thread::sleep(PAUSE);
            let first = load(files, readers, &change);
            std::thread::sleep(PAUSE);
            let steady = load(files, readers, &change);
            change.undo()?;
            Ok([first?, steady?].concat())
        })?;
        for (when, from) in [("after rest", 0), ("steady", FIGURES)] {
            let bars = |peer: &Contestant, stock: f64, others: f64| {
                Bar::Ratio(if peer.name == STOCK { stock } else { others })
            };
            let of = |what: &str| format!("{readers} readers, {when}: {what}");
            let stalls = |peer: &Contestant| {
                Comparison::new(BENCH, of("direct reclaims"), "").resolution(1.0).bar(bars(peer, 100.0, 1.0))
            };
            let time = |peer: &Contestant| Comparison::new(BENCH, of("time"), "s").bar(bars(peer, 1.3, 0.98));
            let reclaimed =
                |_: &Contestant| Comparison::new(BENCH, of("reclaimed by the readers"), "MiB").resolution(0.1);
            let cpu = |_: &Contestant| Comparison::new(BENCH, of("CPU time of the machine"), "s").resolution(0.1);
            let rows = against_the_first(stalls, contestants, &results, from + 1)
                .chain(against_the_first(time, contestants, &results, from))
                .chain(against_the_first(reclaimed, contestants, &results, from + 2))
                .chain(against_the_first(cpu, contestants, &results, from + 3));
            for row in rows {
                report.row(row)?;
            }
            let waiting = |peer: &Contestant| {
                Comparison::new(BENCH, of("their time in reclaim"), "s").resolution(0.001).bar(bars(peer, 100.0, 1.0))
            };
            if self.timed {
                for row in against_the_first(waiting, contestants, &results, from + 4) {
                    report.row(row)?;
                }
            }
        }
        Ok(())
    }

    /// What the readers do to a program that has half of what is left to the page cache as its working set, and allocates a little all the time.
    /// `apart` has each of the two in a control group of its own, without limits.
    fn neighbour(&self, case: Case, apart: Option<&Hierarchy>, report: &mut Report) -> Result<()> {
        let Scene { files, own, setting, .. } = *self;
        let mut contestants = contestants(true);
        if apart.is_some() && !setting.quick {
            contestants.push(Contestant::plain(GROUP));
        }
        let what = case.to_string();
        let results = alternate(report, &what, setting.repetitions(), &contestants, |contestant| {
            load(files, BESIDE, &Change::Nothing)?;
            let change = Change::make(&contestant.name)?;
            let beside = |groups: &[Group]| -> Result<Vec<f64>> {
                let mut command = worker(&Contestant::plain("neighbour"), &["neighbour", &own.to_string_lossy()]);
                let mut readers = change.readers(files, BESIDE)?;
                if let [of_readers, of_neighbour] = groups {
                    of_neighbour.enter(&mut command)?;
                    // A limit of their own is a group of their own.
                    if !matches!(change, Change::Group(_)) {
                        of_readers.enter(&mut readers)?;
                    }
                }
                let mut neighbour = Running::start(&mut command)?;
                neighbour.line()?;
                std::thread::sleep(PAUSE);
                let refaults = || groups.get(1).and_then(Group::refaults);
                let before = refaults();
                let mut figures = run_program(&mut readers)?.figures()?;
                neighbour.hush();
                for _ in 0..FIGURES_OF_NEIGHBOUR {
                    figures.push(neighbour.figure()?);
                }
                neighbour.wait()?;
                if let (Some(before), Some(after)) = (before, refaults()) {
                    figures.push(after - before);
                }
                Ok(figures)
            };
            let group = |name: &str| apart.map(|hierarchy| hierarchy.group(name, None));
            let groups: Vec<Group> = ["readers", "neighbour"].into_iter().filter_map(group).collect::<Result<_>>()?;
            let figures = beside(&groups);
            groups.into_iter().try_for_each(Group::remove)?;
            change.undo()?;
            figures
        })?;
        let bar = |peer: &Contestant, bar: Bar| if peer.name == STOCK { bar } else { Bar::None };
        let row = |name: &str, unit: &'static str| Comparison::new(BENCH, format!("{what}: {name}"), unit);
        let waits =
            |peer: &Contestant| row("its waits for the disk", "").resolution(1.0).bar(bar(peer, Bar::Times(1.0)));
        let slowest = |peer: &Contestant| row("99.9 % of its allocations", "us").bar(bar(peer, Bar::Ratio(5.0)));
        let for_memory = |_: &Contestant| row("the same but for waits for a CPU", "us");
        let back =
            |peer: &Contestant| row("pages that came back to it", "").resolution(1.0).bar(bar(peer, Bar::Times(1.0)));
        let rows = against_the_first(waits, &contestants, &results, FIGURES)
            .chain(against_the_first(slowest, &contestants, &results, FIGURES + 1))
            .chain(against_the_first(for_memory, &contestants, &results, FIGURES + 2))
            .chain(against_the_first(|_| row("the readers' time", "s"), &contestants, &results, 0));
        for row in rows {
            report.row(row)?;
        }
        // Of the machine as a whole, most of what comes back is the readers'.
        let told = FIGURES + FIGURES_OF_NEIGHBOUR;
        if results.iter().all(|rounds| rounds.iter().all(|figures| figures.len() > told)) {
            for row in against_the_first(back, &contestants, &results, told) {
                report.row(row)?;
            }
        }
        if self.timed {
            let times = [("the readers' time in reclaim", FIGURES - 1), ("its time in reclaim", FIGURES + 3)];
            for (name, figure) in times {
                let time = |peer: &Contestant| row(name, "s").resolution(0.001).bar(bar(peer, Bar::Ratio(100.0)));
                for row in against_the_first(time, &contestants, &results, figure) {
                    report.row(row)?;
                }
            }
        }
        Ok(())
    }

    /// Programs that need half as much again as there is, with swap in compressed memory.
    fn swapping(&self, case: Case, left: usize, report: &mut Report) -> Result<()> {
        let swap = match Kept::swap(2 * left) {
            Ok(swap) => swap,
            Err(error) => {
                report.note(&format!("swap in compressed memory is left out: {error:#}"));
                return Ok(());
            }
        };
        let arguments = ["load-memory", &(left / 2 * 3).to_string(), "2"];
        let result = self
            .beside_stock(case, report, || run_program(&mut worker(&Contestant::plain("load"), &arguments))?.figures());
        swap.undo().and(result)
    }

    /// What a load costs with each of the contestants of a quick run. The first time of each is not counted.
    fn beside_stock(&self, case: Case, report: &mut Report, load: impl Fn() -> Result<Vec<f64>>) -> Result<()> {
        let what = case.to_string();
        let contestants = contestants(true);
        let results = alternate(report, &what, self.setting.repetitions(), &contestants, |contestant| {
            load()?;
            let change = Change::make(&contestant.name)?;
            std::thread::sleep(PAUSE);
            let figures = load();
            change.undo()?;
            figures
        })?;
        let row = |name: &str, unit: &'static str| Comparison::new(BENCH, format!("{what}: {name}"), unit);
        let bar = |peer: &Contestant| if peer.name == STOCK { Bar::Ratio(1.0) } else { Bar::None };
        let mut rows = vec![("time", "s", 0, 0.0), ("direct reclaims", "", 1, 1.0)];
        if self.timed {
            rows.push(("their time in reclaim", "s", FIGURES - 1, 0.001));
        }
        for (name, unit, figure, resolution) in rows {
            let comparison = |peer: &Contestant| row(name, unit).resolution(resolution).bar(bar(peer));
            for row in against_the_first(comparison, &contestants, &results, figure) {
                report.row(row)?;
            }
        }
        Ok(())
    }

    /// Readers in a control group at its own limit.
    fn at_limit(&self, case: Case, hierarchy: &Hierarchy, report: &mut Report) -> Result<()> {
        let contestants = [OURS, STOCK].map(Contestant::plain);
        let what = case.to_string();
        let results = alternate(report, &what, self.setting.repetitions(), &contestants, |contestant| {
            let change = Change::make(&contestant.name)?;
            let group = hierarchy.group("limited", Some(LIMIT))?;
            std::thread::sleep(PAUSE);
            let one = || -> Result<Vec<f64>> {
                let mut readers = change.readers(self.files, BESIDE)?;
                group.enter(&mut readers)?;
                let before = group.times_at_limit()?;
                let mut figures = run_program(&mut readers)?.figures()?;
                figures.push(group.times_at_limit()? - before);
                Ok(figures)
            };
            let figures = one();
            group.remove()?;
            change.undo()?;
            figures
        })?;
        let row = |name: &str, unit: &'static str| Comparison::new(BENCH, format!("{what}: {name}"), unit);
        let mut rows = vec![("time", "s", 0, 0.0, 1.0), ("how often", "", FIGURES, 1.0, 10.0)];
        if self.timed {
            rows.push(("their time in reclaim", "s", FIGURES - 1, 0.001, 10.0));
        }
        for (name, unit, figure, resolution, bar) in rows {
            let comparison = |_: &Contestant| row(name, unit).resolution(resolution).bar(Bar::Ratio(bar));
            for row in against_the_first(comparison, &contestants, &results, figure) {
                report.row(row)?;
            }
        }
        Ok(())
    }

    /// What is kept free while nobody needs it.
    fn rest(&self, case: Case, report: &mut Report) -> Result<()> {
        let files = self.files;
        let contestants = contestants(true);
        let results = alternate(report, &case.to_string(), 3, &contestants, |contestant| {
            load(files, 8, &Change::Nothing)?;
            let change = Change::make(&contestant.name)?;
            std::thread::sleep(PAUSE);
            load(files, 8, &change)?;
            std::thread::sleep(REST);
            let arguments = ["read-slowly", &files.to_string_lossy(), &SLOWLY.to_string()];
            let free = run_program(&mut worker(&Contestant::plain("reader"), &arguments))
                .and_then(|outcome| outcome.figures());
            change.undo()?;
            free
        })?;
        let free = |peer: &Contestant| {
            let comparison = Comparison::new(BENCH, "free memory a minute later", "MiB");
            if peer.name == STOCK { comparison.bar(Bar::Times(1.01)) } else { comparison.bar(Bar::Ratio(1.0)) }
        };
        for row in against_the_first(free, &contestants, &results, 0) {
            report.row(row)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_is_the_first_and_stock_is_there() {
        for quick in [false, true] {
            let names: Vec<String> = contestants(quick).into_iter().map(|contestant| contestant.name).collect();
            assert_eq!(names[..2], [OURS, STOCK]);
        }
    }

    #[test]
    fn the_cases_that_are_wanted() {
        let wanted = |quick, text: &str| Case::wanted(quick, &Only::new(&[text.to_string()]));
        assert_eq!(wanted(false, "").unwrap(), Case::all(false));
        assert_eq!(wanted(true, "8 READERS").unwrap(), Case::all(true));
        assert_eq!(wanted(false, "in groups").unwrap(), [Case::Apart]);
        let refusal = |quick, text| wanted(quick, text).unwrap_err().to_string();
        let not_quick = "the case '2 threads that swap to zram' of the bench 'reclaim' is not part of a quick run";
        assert_eq!(refusal(true, "zram"), not_quick);
        assert!(refusal(false, "nonsense").starts_with("no case"));
    }

    #[test]
    fn a_change_is_what_its_name_says() {
        assert!(matches!(Change::make(STOCK), Ok(Change::Nothing)));
        assert!(matches!(Change::make(UNCACHED), Ok(Change::Uncached)));
        let readers = |change: &Change| format!("{:?}", change.readers(Path::new("/d"), 3).unwrap());
        assert!(readers(&Change::Nothing).contains("\"/d\" \"3\" \"cached\""), "{}", readers(&Change::Nothing));
        assert!(readers(&Change::Uncached).contains("\"uncached\""));
    }
}
