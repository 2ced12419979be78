//! Which control group takes most of what is taken: read from the top down, a level at a time, as far as one takes more than half.
//!
//! What a group has taken is known by its `memory.stat`. A survey reads that of the groups at the top, and of those inside the one that takes
//! most, and compares with the last survey. So a group deep down is known after as many surveys, and a machine with thousands costs no more than
//! one with dozens.

use super::group_share::{Machine, Taker, most};
use super::group_support::version_at;
use crate::group::{Group, Version, mounts};
use crate::sys::group_memory::{self, Taking};
use crate::sys::vmstat::VmStat;
use crate::sys::{Errno, nodes};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// So many groups inside one are looked at, at most.
const INSIDE_MOST: usize = 1000;
/// And so many levels.
const LEVELS_MOST: usize = 32;

/// The groups as they were found the last time.
#[derive(Debug)]
pub(super) struct Survey {
    top: PathBuf,
    version: Version,
    before: HashMap<PathBuf, Taking>,
    /// When that was, and what all of the machine had reclaimed by then.
    at_ns: u64,
    reclaimed: u64,
    vmstat: VmStat,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub machine: Machine,
    /// A group without others inside that takes more than half of what is taken; `None` also where that is not known yet.
    pub taker: Option<Taker<PathBuf>>,
}

/// A group, with what it has taken since the last survey; `None` where it was not looked at then.
struct Seen {
    path: PathBuf,
    files: u64,
    since: Option<u64>,
}

impl Survey {
    /// Of the hierarchy whose groups can be served; `None` where there is none.
    pub fn new() -> Option<Survey> {
        let top = |mount: &mounts::Mount| {
            let version = version_at(mount.point()).ok()?;
            Survey::of(mount.point().to_owned(), version).ok()
        };
        mounts::of_memory().iter().find_map(top)
    }

    fn of(top: PathBuf, version: Version) -> Result<Survey, Errno> {
        let mut vmstat = VmStat::open()?;
        let reclaimed = vmstat.read()?.reclaimed;
        Ok(Survey { top, version, before: HashMap::new(), at_ns: 0, reclaimed, vmstat })
    }

    /// A survey, at the time `at_ns`. Whether there is `demand` of the machine's is not found out here.
    ///
    /// # Errors
    /// Those of reading what the machine and the top of the hierarchy have; `ENODATA` where the kernel says it of no top.
    pub fn look(&mut self, at_ns: u64, demand: bool) -> Result<Found, Errno> {
        let nodes = nodes::read(Path::new("/"))?;
        // The one with the least left.
        let scarce = nodes.iter().min_by(|a, b| {
            let left = |node: &nodes::Node| node.free as f64 / node.total as f64;
            left(a).total_cmp(&left(b))
        });
        let scarce = scarce.ok_or(Errno(libc::ENODATA))?;
        let mut now = HashMap::new();
        let top = self.see(self.top.clone(), &mut now).ok_or(Errno(libc::ENODATA))?;
        let passed = Duration::from_nanos(at_ns.saturating_sub(std::mem::replace(&mut self.at_ns, at_ns)));
        let all = self.vmstat.read()?.reclaimed;
        let reclaimed = all.saturating_sub(std::mem::replace(&mut self.reclaimed, all));
        let machine = Machine { demand, total: scarce.total, free: scarce.free, files: top.files, passed, reclaimed };
        let taker = self.descend(&top, &mut now);
        self.before = now;
        Ok(Found { machine, taker })
    }

    fn descend(&self, top: &Seen, now: &mut HashMap<PathBuf, Taking>) -> Option<Taker<PathBuf>> {
        let mut inside = self.inside(&top.path, now);
        // What a process gave back at its end makes the sum less than its parts.
        let parts = inside.iter().map(|seen| seen.since.unwrap_or(0)).sum();
        let all = top.since?.max(parts);
        for _ in 0..LEVELS_MOST {
            let taken = inside.iter().map(|seen| seen.since.unwrap_or(0));
            let index = most(all, taken)?;
            let Seen { path, files, since } = inside.swap_remove(index);
            inside = self.inside(&path, now);
            if inside.is_empty() {
                let usage = Group::at(&path).ok()??.usage().ok()?;
                let taken = since.unwrap_or(0);
                return Some(Taker { group: path, usage, files, taken, others: all.saturating_sub(taken) });
            }
        }
        None
    }

    /// The groups right inside one, as far as the memory controller knows them.
    fn inside(&self, path: &Path, now: &mut HashMap<PathBuf, Taking>) -> Vec<Seen> {
        let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
        let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        directories.take(INSIDE_MOST).filter_map(|entry| self.see(entry.path(), now)).collect()
    }

    fn see(&self, path: PathBuf, now: &mut HashMap<PathBuf, Taking>) -> Option<Seen> {
        let text = fs::read_to_string(path.join("memory.stat")).ok()?;
        let taking = group_memory::taking(&text, self.version == Version::V1)?;
        now.insert(path.clone(), taking);
        let since = self.before.get(&path).map(|before| {
            // What goes back may make it fall.
            let taken = taking.taken.saturating_sub(before.taken);
            taken.max(taking.back.saturating_sub(before.back))
        });
        Some(Seen { path, files: taking.files, since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = crate::sys::PAGE_SIZE as u64;

    /// A made-up hierarchy of version 2.
    struct MadeUp {
        top: tempfile::TempDir,
        survey: Survey,
        now_ns: u64,
    }

    impl MadeUp {
        fn new(groups: &[&str]) -> MadeUp {
            let top = tempfile::tempdir().unwrap();
            groups.iter().for_each(|name| fs::create_dir_all(top.path().join(name)).unwrap());
            let survey = Survey::of(top.path().to_owned(), Version::V2).unwrap();
            MadeUp { top, survey, now_ns: 0 }
        }

        /// A group has so many pages of files, and so many were reclaimed of it so far.
        fn set(&self, name: &str, files: u64, reclaimed: u64) {
            let path = self.top.path().join(name);
            let text =
                format!("anon 0\nfile {0}\ninactive_file {0}\nactive_file 0\npgsteal {reclaimed}\n", files * PAGE);
            fs::write(path.join("memory.stat"), text).unwrap();
            fs::write(path.join("cgroup.procs"), "").unwrap();
            fs::write(path.join("cgroup.controllers"), "memory\n").unwrap();
            fs::write(path.join("memory.current"), format!("{}\n", files * PAGE)).unwrap();
        }

        /// A second after the last time.
        fn look(&mut self) -> Result<Found, Errno> {
            self.now_ns += 1_000_000_000;
            self.survey.look(self.now_ns, true)
        }

        /// Name and usage in pages.
        fn taker(&mut self) -> Option<(String, u64)> {
            let taker = self.look().unwrap().taker?;
            let name = taker.group.strip_prefix(self.top.path()).unwrap().to_str().unwrap().to_owned();
            Some((name, taker.usage / PAGE))
        }
    }

    #[test]
    fn the_one_that_takes_most_is_found_a_level_at_a_time() {
        let mut made_up = MadeUp::new(&["system/db", "system/backup", "user"]);
        let groups = ["", "system", "system/db", "system/backup", "user"];
        let round = |made_up: &MadeUp, round: u64| {
            // The backup reads 70 of 100 pages.
            for (name, share) in groups.into_iter().zip([100, 90, 20, 70, 10]) {
                made_up.set(name, 1000, round * share);
            }
        };
        round(&made_up, 1);
        assert_eq!(made_up.taker(), None, "there is nothing to compare with");
        round(&made_up, 2);
        assert_eq!(made_up.taker(), None, "the groups inside were not looked at");
        round(&made_up, 3);
        let found = made_up.look().unwrap();
        assert_eq!(found.machine.passed, Duration::from_secs(1));
        let taker = found.taker.unwrap();
        assert!(taker.group.ends_with("system/backup"), "{taker:?}");
        assert_eq!((taker.usage, found.machine.files), (1000 * PAGE, 1000 * PAGE));
        assert_eq!((taker.taken, taker.others), (70 * PAGE, 30 * PAGE));
        // Nothing was taken since.
        assert_eq!(made_up.taker(), None);
    }

    #[test]
    fn where_several_share_it_nobody_is_found() {
        let mut made_up = MadeUp::new(&["system/a", "system/b", "system/c"]);
        for round in 1..6 {
            for (name, share) in
                ["", "system", "system/a", "system/b", "system/c"].into_iter().zip([90, 90, 30, 30, 30])
            {
                made_up.set(name, 1000, round * share);
            }
            assert_eq!(made_up.taker(), None);
        }
    }

    #[test]
    fn what_has_come_back_was_taken_however_few_folios_that_were() {
        let mut made_up = MadeUp::new(&["large", "small"]);
        made_up.survey.version = Version::V1;
        let set = |made_up: &MadeUp, name: &str, folios: u64, back: u64| {
            let path = made_up.top.path().join(name);
            let text = format!(
                "total_inactive_file {}\ntotal_active_file 0\ntotal_pgpgin {folios}\ntotal_workingset_refault_file {back}\n",
                1000 * PAGE,
            );
            fs::write(path.join("memory.stat"), text).unwrap();
            fs::write(path.join("cgroup.procs"), "").unwrap();
            fs::write(path.join("memory.usage_in_bytes"), format!("{}\n", 1000 * PAGE)).unwrap();
        };
        for round in 1..3 {
            set(&made_up, "large", round * 50, round * 5000);
            set(&made_up, "small", round * 400, round * 100);
            set(&made_up, "", round * 450, round * 5100);
            if round == 1 {
                assert_eq!(made_up.taker(), None, "there is nothing to compare with");
            }
        }
        let taker = made_up.look().unwrap().taker.unwrap();
        assert!(taker.group.ends_with("large"), "{taker:?}");
        assert_eq!((taker.taken, taker.others), (5000 * PAGE, 400 * PAGE));
    }

    #[test]
    fn what_is_not_there_takes_nothing() {
        let mut made_up = MadeUp::new(&["a", "b"]);
        assert_eq!(made_up.look(), Err(Errno(libc::ENODATA)));
        made_up.set("", 5, 0);
        made_up.set("a", 5, 0);
        assert_eq!(made_up.taker(), None);
        made_up.set("", 1, 100);
        made_up.set("a", 1, 100);
        fs::write(made_up.top.path().join("b/memory.stat"), "x").unwrap();
        assert_eq!(made_up.taker(), Some(("a".to_owned(), 1)));
        // It has gone.
        fs::remove_dir_all(made_up.top.path().join("a")).unwrap();
        made_up.set("", 1, 200);
        assert_eq!(made_up.taker(), None);
    }
}
