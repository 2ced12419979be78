//! Which processes are meant.

use crate::failure::Failure;
use crate::output::printable;
use crate::values::parse_user;
use pagecrew::sys::memcg::Group;
use pagecrew::sys::process::start_ticks;
use pagecrew::trim::Id;
use std::collections::BTreeSet;

/// A process that may be worth a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub id: Id,
    pub name: String,
    /// Resident memory of its own in bytes.
    pub anonymous: u64,
    /// Asked for by its number, although its name is one of those to leave alone.
    pub never: bool,
}

/// Which processes are meant.
pub struct Selection {
    pids: Vec<i32>,
    group: Option<Group>,
    user: Option<u32>,
    all: bool,
    never: Vec<String>,
}

/// The kernel keeps this much of a process's name.
const NAME_MOST: usize = 15;
/// A process with less memory of its own than this has no huge page.
const ANONYMOUS_LEAST_KIB: u64 = 2048;

impl Selection {
    pub fn new(
        pids: Vec<i32>,
        group: Option<String>,
        user: Option<String>,
        all: bool,
        never: Vec<String>,
    ) -> Result<Selection, Failure> {
        let group = group.map(|name| Group::find(&name)).transpose();
        let user = user.map(|name| parse_user(&name).map_err(|reason| Failure::Usage(format!("--user: {reason}"))));
        let cut = |name: String| name.chars().take(NAME_MOST).collect();
        Ok(Selection {
            pids,
            group: group.map_err(|error| Failure::Usage(error.to_string()))?,
            user: user.transpose()?,
            all,
            never: never.into_iter().map(cut).collect(),
        })
    }

    /// The control group, if one was named.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The processes that were asked for by their number.
    pub fn pids(&self) -> &[i32] {
        &self.pids
    }

    /// Whether a process that was asked for by its number is all there is, so that nothing is left to do when those have ended.
    pub fn only_numbers(&self) -> bool {
        self.group.is_none() && self.user.is_none() && !self.all
    }

    /// The processes that run now, this one excepted, by number.
    pub fn processes(&self) -> Result<Vec<Found>, Failure> {
        let mut pids: BTreeSet<i32> = self.pids.iter().copied().collect();
        if let Some(group) = &self.group {
            let members = group.processes();
            pids.extend(members.map_err(|error| Failure::Failed(format!("{}: {error}", group.path().display())))?);
        }
        if self.all || self.user.is_some() {
            let entries = std::fs::read_dir("/proc").map_err(|error| Failure::Failed(format!("/proc: {error}")))?;
            let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<i32>().ok();
            pids.extend(entries.flatten().filter_map(number));
        }
        let this = std::process::id() as i32;
        Ok(pids.into_iter().filter(|&pid| pid != this).filter_map(|pid| self.found(pid)).collect())
    }

    fn found(&self, pid: i32) -> Option<Found> {
        let by_number = self.pids.contains(&pid);
        let about = About::of(pid)?;
        let worth_it = about.anonymous_kib >= ANONYMOUS_LEAST_KIB;
        let of_user = self.user.is_none_or(|user| user == about.user) || self.in_group_or_all();
        let meant = by_number || (worth_it && of_user);
        let never = self.never.contains(&about.name);
        (meant && (by_number || !never)).then_some(())?;
        let id = Id { pid, start_ticks: start_ticks(pid).ok()? };
        Some(Found { id, name: printable(&about.name), anonymous: about.anonymous_kib << 10, never })
    }

    /// Whether processes are meant whoever's they are.
    fn in_group_or_all(&self) -> bool {
        self.all || self.group.is_some()
    }
}

/// What `/proc/PID/status` says.
struct About {
    name: String,
    user: u32,
    /// Resident anonymous memory; none of a kernel thread.
    anonymous_kib: u64,
}

impl About {
    fn of(pid: i32) -> Option<About> {
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

    fn selection(pids: Vec<i32>, user: Option<u32>, all: bool, never: &[&str]) -> Selection {
        let never = never.iter().map(|name| name.to_string()).collect();
        Selection { pids, group: None, user, all, never }
    }

    #[test]
    fn status_files() {
        let about = About::parse("Name:\tredis server\nUid:\t110\t110\t110\t110\nRssAnon:\t   4096 kB\n").unwrap();
        assert_eq!((about.name.as_str(), about.user, about.anonymous_kib), ("redis server", 110, 4096));
        assert_eq!(About::parse("Name:\tkthreadd\nUid:\t0\t0\t0\t0\n").unwrap().anonymous_kib, 0);
        assert!(About::parse("").is_none());
    }

    #[test]
    fn a_child_is_found_by_number_and_left_out_by_name() {
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let find = |never: &[&str]| selection(vec![pid], None, false, never).processes().unwrap();
        // It has its name once it runs the program.
        while About::of(pid).is_some_and(|about| about.name != "sleep") {
            std::thread::yield_now();
        }
        let found = find(&[]);
        assert_eq!((found.len(), found[0].id.pid, found[0].name.as_str()), (1, pid, "sleep"));
        assert!(find(&["sleep"])[0].never && !found[0].never);
        let others = selection(Vec::new(), None, true, &["sleep"]).processes().unwrap();
        assert!(others.iter().all(|found| found.id.pid != pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(find(&[]).is_empty());
    }

    #[test]
    fn this_process_is_never_among_all() {
        let this = std::process::id() as i32;
        let all = selection(Vec::new(), None, true, &[]).processes().unwrap();
        assert!(all.iter().all(|found| found.id.pid != this));
        // SAFETY: takes nothing and cannot fail.
        let other_user = unsafe { libc::geteuid() } + 12345;
        assert!(selection(Vec::new(), Some(other_user), false, &[]).processes().unwrap().is_empty());
    }
}
