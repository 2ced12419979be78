//! Which processes are meant.

use crate::failure::Failure;
use crate::output::printable;
use pagecrew::group::{Group, GroupError};
use pagecrew::sys::Errno;
use pagecrew::sys::process::start_ticks;
use pagecrew::trim::Id;
use std::collections::BTreeSet;

/// A process that may be worth a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub id: Id,
    pub name: String,
    pub user: u32,
    /// Resident memory of its own in bytes.
    pub anonymous: u64,
    /// Asked for by its number, although its name is one of those to leave alone.
    pub never: bool,
}

/// Which processes are meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    pub pids: Vec<i32>,
    /// By path or name, since a group may go and come back.
    pub groups: Vec<String>,
    pub users: Vec<u32>,
    pub names: Vec<String>,
    pub all: bool,
    /// Names of processes that are not meant, but by their numbers.
    pub never: Vec<String>,
}

/// The kernel keeps so many bytes of a process's name.
const NAME_MOST: usize = 15;
/// A process with less memory of its own than this has no huge page.
const ANONYMOUS_LEAST_KIB: u64 = 2048;

/// A process's name, as much of it as the kernel knows.
pub fn parse_name(text: &str) -> Result<String, String> {
    let bytes = text.as_bytes();
    match &bytes[..bytes.len().min(NAME_MOST)] {
        [] => Err("a name has at least one character".into()),
        known => Ok(String::from_utf8_lossy(known).into_owned()),
    }
}

impl Selection {
    /// Whether any process could be meant.
    pub fn is_some(&self) -> bool {
        let Selection { pids, groups, users, names, all, never: _ } = self;
        *all || !(pids.is_empty() && groups.is_empty() && users.is_empty() && names.is_empty())
    }

    /// This, or `base` where this says nothing. Whoever is to be left alone by either is.
    pub fn or(self, base: Selection) -> Selection {
        let never = [&self.never[..], &base.never].concat();
        Selection { never, ..if self.is_some() { self } else { base } }
    }

    /// The names of the control groups.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// That each of the control groups is there.
    pub fn check_groups(&self) -> Result<(), Failure> {
        self.groups.iter().try_for_each(|name| match Group::find(name) {
            Ok(_) => Ok(()),
            Err(error) => Err(Failure::Usage(error.to_string())),
        })
    }

    /// The processes that were asked for by their number.
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Whether a process that was asked for by its number is all there is, so that nothing is left to do when those have ended.
    pub fn only_numbers(&self) -> bool {
        self.groups.is_empty() && self.users.is_empty() && self.names.is_empty() && !self.all
    }

    /// The processes that run now, this one excepted, by number, as far as they could be found; and the first thing that was in the way of
    /// that. A group that is not there has none.
    pub fn processes(&self) -> (Vec<Found>, Option<Failure>) {
        let mut members = BTreeSet::new();
        let mut trouble = None;
        for name in &self.groups {
            match numbers_in(name) {
                Ok(numbers) => members.extend(numbers),
                Err(failure) => trouble = trouble.or(Some(failure)),
            }
        }
        let mut pids: BTreeSet<i32> = self.pids.iter().chain(&members).copied().collect();
        if self.all || !self.users.is_empty() || !self.names.is_empty() {
            let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
            match std::fs::read_dir("/proc") {
                Ok(entries) => pids.extend(entries.flatten().filter_map(number)),
                Err(error) => trouble = trouble.or_else(|| Some(Failure::Failed(format!("/proc: {error}")))),
            }
        }
        (pids.into_iter().filter_map(|pid| self.found(pid, members.contains(&pid))).collect(), trouble)
    }

    /// The processes of the control group `name` that run now and are meant.
    pub fn processes_in(&self, name: &str) -> Result<Vec<Found>, Failure> {
        Ok(numbers_in(name)?.into_iter().filter_map(|pid| self.found(pid, true)).collect())
    }

    fn found(&self, pid: i32, in_group: bool) -> Option<Found> {
        if pid == std::process::id() as i32 {
            return None;
        }
        let by_number = self.pids.contains(&pid);
        let about = About::of(pid)?;
        let worth_it = about.anonymous_kib >= ANONYMOUS_LEAST_KIB;
        let by_kind = in_group || self.all || self.users.contains(&about.user) || self.names.contains(&about.name);
        let meant = by_number || (worth_it && by_kind);
        let never = self.never.contains(&about.name);
        (meant && (by_number || !never)).then_some(())?;
        let id = Id { pid, start_ticks: start_ticks(pid).ok()? };
        let (name, anonymous) = (printable(&about.name), about.anonymous_kib << 10);
        Some(Found { id, name, user: about.user, anonymous, never })
    }
}

/// The processes of the control group `name` and those below it; none if it isn't there.
fn numbers_in(name: &str) -> Result<Vec<i32>, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::Failed(format!("{name}: {error}"));
    match Group::find(name) {
        Ok(group) => match group.processes() {
            // It has gone meanwhile.
            Err(Errno(libc::ENOENT | libc::ENODEV)) => Ok(Vec::new()),
            result => result.map_err(|error| failed(&error)),
        },
        Err(GroupError::NotFound { .. }) => Ok(Vec::new()),
        Err(error) => Err(failed(&error)),
    }
}

impl Found {
    /// Whether it still runs, and what it ran when it was found.
    pub fn stands(&self) -> bool {
        About::of(self.id.pid).is_some_and(|about| printable(&about.name) == self.name)
            && start_ticks(self.id.pid).is_ok_and(|ticks| ticks == self.id.start_ticks)
    }
}

/// What `/proc/PID/status` says.
pub struct About {
    name: String,
    pub user: u32,
    /// Resident anonymous memory; none of a kernel thread.
    anonymous_kib: u64,
}

impl About {
    /// Nothing of a process that is not there.
    pub fn of(pid: i32) -> Option<About> {
        About::parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/status")).ok()?))
    }

    fn parse(text: &str) -> Option<About> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let first = |name: &str| field(name)?.split_ascii_whitespace().next()?.parse::<u64>().ok();
        Some(About {
            name: field("Name:")?.to_owned(),
            user: first("Uid:")? as u32,
            anonymous_kib: first("RssAnon:").unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Selection {
        Selection { all: true, ..Selection::default() }
    }

    #[test]
    fn status_files() {
        let about = About::parse("Name:\tredis server\nUid:\t110\t110\t110\t110\nRssAnon:\t   4096 kB\n").unwrap();
        assert_eq!((about.name.as_str(), about.user, about.anonymous_kib), ("redis server", 110, 4096));
        assert_eq!(About::parse("Name:\tkthreadd\nUid:\t0\t0\t0\t0\n").unwrap().anonymous_kib, 0);
        assert!(About::parse("").is_none());
    }

    #[test]
    fn of_a_name_that_is_known_which_the_kernel_keeps() {
        assert_eq!(parse_name("qemu-system-x86_64").unwrap(), "qemu-system-x86");
        assert_eq!((parse_name("a").unwrap(), parse_name("").is_err()), ("a".to_owned(), true));
        // As the kernel cuts it, in the middle of a letter.
        assert_eq!(parse_name(&"\u{E4}".repeat(8)).unwrap().chars().last(), Some('\u{FFFD}'));
    }

    #[test]
    fn a_child_is_found_by_number_and_left_out_by_name() {
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let never = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        let find =
            |names: &[&str]| Selection { pids: vec![pid], never: never(names), ..Selection::default() }.processes().0;
        // It has its name once it runs the program.
        while About::of(pid).is_some_and(|about| about.name != "sleep") {
            std::thread::yield_now();
        }
        let found = find(&[]);
        assert_eq!((found.len(), found[0].id.pid, found[0].name.as_str()), (1, pid, "sleep"));
        assert!(found[0].stands() && !Found { name: "sh".into(), ..found[0].clone() }.stands());
        let other = Id { start_ticks: found[0].id.start_ticks + 1, ..found[0].id };
        assert!(!Found { id: other, ..found[0].clone() }.stands());
        assert!(find(&["sleep"])[0].never && !found[0].never);
        let others = Selection { never: never(&["sleep"]), ..all() }.processes().0;
        assert!(others.iter().all(|found| found.id.pid != pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(find(&[]).is_empty());
    }

    #[test]
    fn this_process_is_never_among_all() {
        let this = std::process::id() as i32;
        let every = all().processes().0;
        assert!(every.iter().all(|found| found.id.pid != this));
        let nobody = |selection: Selection| selection.processes().0.is_empty();
        assert!(nobody(Selection { users: vec![3999999999], ..Selection::default() }));
        assert!(nobody(Selection { names: vec!["no such name".into()], ..Selection::default() }));
        assert!(nobody(Selection { groups: vec!["no/such/group".into()], ..Selection::default() }));
    }

    #[test]
    fn processes_are_found_by_what_they_are_called() {
        // One with memory of its own: this test's own name is left out, so another of the machine's, if there is one.
        let every = all().processes().0;
        assert!(every.iter().all(|found| found.anonymous >= ANONYMOUS_LEAST_KIB << 10));
        for found in every.iter().take(3) {
            let by_name = Selection { names: vec![found.name.clone()], ..Selection::default() }.processes().0;
            assert!(by_name.iter().all(|other| other.name == found.name));
        }
        let nowhere = Selection { groups: vec!["no/such/group".into()], ..Selection::default() };
        assert!(nowhere.check_groups().is_err());
    }
}
