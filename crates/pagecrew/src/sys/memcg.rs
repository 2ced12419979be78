//! A memory control group by its path, version 1 and version 2, and a *hold* on it.
//!
//! At the limit of a group the kernel kills one of its tasks. A [`Hold`] has the tasks wait instead, until somebody has given
//! memory back. It is meant for a process that watches the group from outside, so unlike most of this layer it uses the heap.
//! Where a group is to be held, and whether it is near that, `trim/held.rs` decides.

use super::Errno;
use super::cgroup::{MEMORY_V1, MEMORY_V2, NO_LIMIT};
use super::guard::{Guard, Ours};
use super::{PAGE_SIZE, procfs};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which version of control groups a group belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The memory controller in a hierarchy of its own (2.6.25).
    V1,
    /// The one hierarchy of all controllers (4.5).
    V2,
}

/// The files of a group in one version.
struct Files {
    usage: &'static str,
    /// The limit at which the kernel kills.
    most: &'static str,
    /// A limit is the lowest of these.
    limits: &'static [&'static str],
    /// What is written to hold the group.
    control: &'static str,
}

const FILES_V1: Files = Files {
    usage: "memory.usage_in_bytes",
    most: "memory.limit_in_bytes",
    limits: &["memory.limit_in_bytes"],
    control: "memory.oom_control",
};
const FILES_V2: Files = Files {
    usage: "memory.current",
    most: "memory.max",
    limits: &["memory.high", "memory.max"],
    control: "memory.high",
};
const OOM_KILLER_OFF: &str = "1\n";
const OOM_KILLER_ON: &str = "0\n";

/// A control group, with what the memory controller says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    path: PathBuf,
    version: Version,
}

/// Why there is no such group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupError {
    /// None of these directories is a control group.
    NotFound {
        /// The name that was looked up.
        name: String,
        /// The directories, in the order in which they were looked at.
        tried: Vec<PathBuf>,
    },
    /// The directory is a group of version 1 in the hierarchy of another controller.
    OtherController(PathBuf),
    /// The kernel refused to look at the directory.
    Refused(PathBuf, Errno),
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupError::NotFound { name, tried } => {
                write!(f, "'{name}' is not a control group")?;
                for (index, path) in tried.iter().enumerate() {
                    write!(f, "{}{}", if index == 0 { ": no cgroup.procs in " } else { ", " }, path.display())?;
                }
                write!(f, "; give the name that /proc/PID/cgroup tells, or the group's directory")
            }
            GroupError::OtherController(path) => {
                write!(
                    f,
                    "{} is a group of another controller; give the one below {}",
                    path.display(),
                    MEMORY_V1.mounts[0]
                )
            }
            GroupError::Refused(path, errno) => write!(f, "{}: {errno}", path.display()),
        }
    }
}

impl std::error::Error for GroupError {}

/// Why a group can't be held. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HoldError {
    /// The group has no limit of its own, so nothing would ever be held.
    NoLimit(PathBuf),
    /// Somebody else holds the group by this file.
    Taken(PathBuf),
    /// The guard can't be started.
    NoGuard(Errno),
    /// The kernel refused to open, read or write this file.
    Refused(PathBuf, Errno),
}

impl fmt::Display for HoldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HoldError::NoLimit(path) => write!(
                f,
                "{} has no memory limit of its own, so its tasks are never held; set memory.limit_in_bytes (version 1) or memory.max (version 2)",
                path.display()
            ),
            HoldError::Taken(path) => {
                write!(f, "{}: another process holds this group; end that one first", path.display())
            }
            HoldError::NoGuard(errno) => write!(
                f,
                "no child process can be started, which would let the group go if this one were killed: {errno}; raise the limit of processes"
            ),
            HoldError::Refused(path, errno) => write!(
                f,
                "{}: {errno}; holding a group takes the right to write its files, as root and its owner have it",
                path.display()
            ),
        }
    }
}

impl std::error::Error for HoldError {}

/// What the kernel can take from a group without its tasks, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reclaimable {
    /// Page cache and other memory of the kernel that it drops or writes back.
    pub cache: u64,
    /// Anonymous and shared memory that goes to swap, as far as there is room.
    pub swappable: u64,
}

/// Whether `error` tells that a group has gone: removed by its path, or under an open file of it.
fn vanished(error: Errno) -> bool {
    matches!(error.0, libc::ENOENT | libc::ENODEV)
}

/// The number in the first line of a file that has only one; `None` for `max`.
fn number(text: &str) -> Result<Option<u64>, Errno> {
    match text.lines().next().unwrap_or("").trim() {
        "max" => Ok(None),
        text => text.parse().map(Some).map_err(|_| Errno(libc::EILSEQ)),
    }
}

/// The value of the line that begins with `name`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The process numbers in the text of `cgroup.procs`. Processes that have no number in this process's namespace are told as 0.
fn numbers_of_processes(text: &str) -> impl Iterator<Item = i32> {
    text.lines().filter_map(|line| line.parse().ok()).filter(|&process| process > 0)
}

/// The text of a file of version 2 that has `number`, as the kernel takes it.
fn text(number: Option<u64>) -> String {
    number.map_or("max\n".to_owned(), |number| format!("{number}\n"))
}

/// What `memory.stat` tells. A field that a kernel doesn't have counts as zero: nothing is known that could be taken.
fn reclaimable(stat: &str, version: Version) -> Reclaimable {
    // In version 1, the fields without this are the group's alone, without those below it.
    let prefix = if version == Version::V1 { "total_" } else { "" };
    let sum = |names: &[&str]| names.iter().filter_map(|name| field(stat, &format!("{prefix}{name}"))).sum();
    Reclaimable {
        cache: sum(&["inactive_file", "active_file", "slab_reclaimable"]),
        swappable: sum(&["inactive_anon", "active_anon"]),
    }
}

/// The directory `top` and all groups below it, each before those inside it, with their numbers; those that vanish meanwhile
/// are left out. A number belongs to one group only, also after that has gone.
fn groups(top: &Path) -> Result<Vec<(PathBuf, u64)>, Errno> {
    let mut found = vec![(top.to_owned(), 0)];
    let mut next = 0;
    while next < found.len() {
        match fs::read_dir(&found[next].0).map_err(Errno::from) {
            Ok(entries) => {
                for entry in entries {
                    let Ok(entry) = entry else { break };
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        found.push((entry.path(), entry.ino()));
                    }
                }
            }
            Err(error) if next == 0 || !vanished(error) => return Err(error),
            Err(_) => {}
        }
        next += 1;
    }
    Ok(found)
}

impl Group {
    /// Finds a group by its directory (an absolute path), or by its name as `/proc/PID/cgroup` tells it, with or without the
    /// slash in front: below the mount of version 1's memory controller first, then below those of version 2.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub fn find(name: &str) -> Result<Group, GroupError> {
        let mut tried = Vec::new();
        if name.starts_with('/') {
            tried.push(PathBuf::from(name));
        }
        if !name.is_empty() {
            let below = name.trim_start_matches('/');
            tried.extend(MEMORY_V1.mounts.iter().chain(MEMORY_V2.mounts).map(|mount| Path::new(mount).join(below)));
        }
        for path in &tried {
            if let Some(group) = Group::at(path)? {
                return Ok(group);
            }
        }
        Err(GroupError::NotFound { name: name.to_owned(), tried })
    }

    /// The group whose directory is `path`; `None` if that isn't one.
    fn at(path: &Path) -> Result<Option<Group>, GroupError> {
        let has = |file: &str| match fs::metadata(path.join(file)) {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
            Err(error) => Err(GroupError::Refused(path.to_owned(), Errno::from(error))),
        };
        if !has("cgroup.procs")? {
            return Ok(None);
        }
        let version = if has(FILES_V1.usage)? {
            Version::V1
        } else if has(FILES_V2.usage)? || has("cgroup.controllers")? {
            Version::V2
        } else {
            return Err(GroupError::OtherController(path.to_owned()));
        };
        Ok(Some(Group { path: path.to_owned(), version }))
    }

    /// Which version the group belongs to.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The group's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> &'static Files {
        match self.version {
            Version::V1 => &FILES_V1,
            Version::V2 => &FILES_V2,
        }
    }

    /// The processes in the group and in all groups below it, in ascending order. What vanishes meanwhile is passed over.
    ///
    /// # Errors
    /// Those of reading the directories and `cgroup.procs`: `ENOENT` or `ENODEV` if the group itself has gone, `EOPNOTSUPP` if
    /// it is a group of threads (version 2, 4.14), whose processes only a group above it lists.
    pub fn processes(&self) -> Result<Vec<i32>, Errno> {
        let mut processes = Vec::new();
        for (index, (path, _)) in groups(&self.path)?.iter().enumerate() {
            match fs::read_to_string(path.join("cgroup.procs")).map_err(Errno::from) {
                Ok(text) => processes.extend(numbers_of_processes(&text)),
                Err(error) if index > 0 && (vanished(error) || error.0 == libc::EOPNOTSUPP) => {}
                Err(error) => return Err(error),
            }
        }
        processes.sort_unstable();
        processes.dedup();
        Ok(processes)
    }

    /// What is charged to the group and to those below it, in bytes (`memory.usage_in_bytes`, `memory.current`).
    ///
    /// # Errors
    /// `ENOENT` or `ENODEV` if the group has gone, or is one of version 2 for which the memory controller is not enabled.
    pub fn usage(&self) -> Result<u64, Errno> {
        self.number(self.files().usage)?.ok_or(Errno(libc::EILSEQ))
    }

    /// The group's own limit in bytes, whatever those above it have: `memory.limit_in_bytes`, or the lower of `memory.high` and
    /// `memory.max`. `None` where there is none.
    pub fn limit(&self) -> Option<u64> {
        let limits = self.files().limits.iter().filter_map(|name| self.number(name).ok()?);
        limits.min().filter(|&limit| limit < NO_LIMIT)
    }

    fn number(&self, name: &str) -> Result<Option<u64>, Errno> {
        number(&fs::read_to_string(self.path.join(name)).map_err(Errno::from)?)
    }

    /// Prepares to have the group's tasks held, which [`Hold::take`] does, until the [`Hold`] is dropped.
    ///
    /// - Version 1 (2.6.35; as described since 3.12): the OOM killer is off for the group. A task that takes a page fault at the
    ///   limit sleeps, and only SIGKILL ends it, until memory of the group is freed, its limit raised or the group let go. That
    ///   is true for faults of user code only: a *system call* that needs memory at the limit fails with `ENOMEM`, or with
    ///   `EFAULT` where it had to fill memory that was never touched.
    /// - Version 2 (4.5): `memory.high` is set below `memory.max`, unless it is there already. Tasks above it have to reclaim,
    ///   and sleep up to two seconds each time they return to user code (5.4): they are slowed down, not stopped.
    ///
    /// The kernel asks the group whose limit is reached. At a limit above this group, what is set there counts; at one below it,
    /// what is set there. One process at a time can hold a group, and it should not be in the group, where it would be held like
    /// any other.
    ///
    /// A child process, the *guard*, undoes all this if this process ends without dropping the hold, also by SIGKILL. If both
    /// are killed at once, the group stays held: `echo 0 > memory.oom_control` (version 1) or `echo max > memory.high`
    /// (version 2) lets it go.
    ///
    /// # Errors
    /// See [`HoldError`].
    pub fn hold(&self) -> Result<Hold, HoldError> {
        let limit = self.limit().ok_or_else(|| HoldError::NoLimit(self.path.clone()))?;
        let control = self.open(self.files().control, true)?;
        // SAFETY: takes a descriptor that is open. The lock belongs to the open file, which the guard shares: it is free again
        // when both have ended.
        if unsafe { libc::flock(control.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let path = self.path.join(self.files().control);
            return Err(match Errno::last() {
                Errno(libc::EWOULDBLOCK) => HoldError::Taken(path),
                errno => HoldError::Refused(path, errno),
            });
        }
        let refused = |errno| HoldError::Refused(self.path.join(self.files().control), errno);
        let before = read_again(&control).map_err(refused)?;
        let usage = self.open(self.files().usage, false)?;
        let most = self.open(self.files().most, false)?;
        let (signals, change) = match self.version {
            Version::V1 => {
                let threshold = format!(" {}", limit / 8 * 7);
                let signals = vec![self.notify(&control, "")?, self.notify(&usage, &threshold)?];
                let off = field(&before, "oom_kill_disable") == Some(1);
                (signals, (!off).then_some(Change::OomKiller))
            }
            Version::V2 => {
                // Those of the groups below are not told in the first one (5.2).
                let events = self.open("memory.events.local", false).or_else(|_| self.open("memory.events", false))?;
                // The kernel signals what has changed since the file was read.
                read_again(&events).map_err(|errno| HoldError::Refused(self.path.join("memory.events"), errno))?;
                let high = number(&before).map_err(refused)?;
                let max = self.number("memory.max").map_err(refused)?;
                let change = match max {
                    Some(max) if high.is_none_or(|high| high >= max) => {
                        let ours = Ours::new().map_err(HoldError::NoGuard)?;
                        Some(Change::High { before: high, now: high, ours })
                    }
                    _ => None,
                };
                (vec![events], change)
            }
        };
        let guard = match &change {
            Some(Change::OomKiller) => Some(Guard::start(&control, OOM_KILLER_ON, None)),
            Some(Change::High { before, ours, .. }) => Some(Guard::start(&control, &text(*before), Some(ours))),
            None => None,
        };
        let guard = guard.transpose().map_err(HoldError::NoGuard)?;
        let mut hold = Hold {
            group: self.clone(),
            control,
            change,
            guard,
            signals,
            usage,
            most,
            stat: None,
            known: BTreeSet::new(),
        };
        hold.know_groups().map_err(refused)?;
        Ok(hold)
    }

    fn open(&self, name: &str, write: bool) -> Result<File, HoldError> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(write).open(&path);
        file.map_err(|error| HoldError::Refused(path, Errno::from(error)))
    }

    /// An eventfd that the kernel signals when something happens that `file` tells about: tasks sleep at the limit, or the usage
    /// has passed the threshold in `arguments` in either direction (version 1, 2.6.34; not on PREEMPT_RT).
    fn notify(&self, file: &File, arguments: &str) -> Result<File, HoldError> {
        let path = self.path.join("cgroup.event_control");
        let register = || {
            // SAFETY: takes numbers only; the new descriptor is owned by the file that is made of it.
            let signal = unsafe {
                let signal = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
                if signal < 0 {
                    return Err(io::Error::last_os_error());
                }
                File::from_raw_fd(signal)
            };
            let request = format!("{} {}{arguments}", signal.as_raw_fd(), file.as_raw_fd());
            OpenOptions::new().write(true).open(&path)?.write_all(request.as_bytes())?;
            Ok(signal)
        };
        register().map_err(|error| HoldError::Refused(path.clone(), Errno::from(error)))
    }
}

/// A group whose tasks can be held at its limit. Dropping it undoes what it has done.
#[derive(Debug)]
pub struct Hold {
    group: Group,
    /// The file that is written to hold the group, locked for as long as that may be undone.
    control: File,
    /// `None` if the group was set up like this already, or somebody else has changed it: then it is left so.
    change: Option<Change>,
    /// There is one where there is a change.
    guard: Option<Guard>,
    /// Eventfds in version 1, `memory.events` in version 2.
    signals: Vec<File>,
    usage: File,
    most: File,
    /// `memory.stat`, once it was needed.
    stat: Option<File>,
    /// The groups below that have been seen (version 1).
    known: BTreeSet<u64>,
}

/// What a [`Hold`] changes.
#[derive(Debug)]
enum Change {
    /// The OOM killer (version 1).
    OomKiller,
    /// `memory.high` (version 2): what it was, and what it is by our doing.
    High { before: Option<u64>, now: Option<u64>, ours: Ours },
}

impl Hold {
    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Waits until the kernel tells that tasks of the group are held or that its usage passes seven eighths of the limit that it
    /// had at first (version 1), that its usage was at `memory.high` (version 2), until a signal handler has run or until
    /// `timeout` has passed.
    ///
    /// In version 1, groups that are made below a held group are made without an OOM killer, too. This gives it back to them, so
    /// it is to be called again and again.
    pub fn wait(&mut self, timeout: Duration) {
        self.free_new_groups();
        let events = if self.group.version == Version::V1 { libc::POLLIN } else { libc::POLLPRI };
        let mut polled: Vec<_> =
            self.signals.iter().map(|signal| libc::pollfd { fd: signal.as_raw_fd(), events, revents: 0 }).collect();
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the descriptors are open, the array has the length that is given, and no signal mask is passed.
        let ready =
            unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, &timeout, std::ptr::null()) };
        if ready <= 0 {
            return;
        }
        for mut signal in &self.signals {
            // What was signalled is found by looking; an eventfd that was not signalled has nothing to read.
            let _ = match self.group.version {
                Version::V1 => signal.read(&mut [0; 8]),
                Version::V2 => signal.read_at(&mut [0; 512], 0),
            };
        }
    }

    /// What is charged to the group and to those below it, in bytes; `None` if the group has gone.
    pub fn usage(&self) -> Option<u64> {
        number(&read_again(&self.usage).ok()?).ok()?
    }

    /// The limit at which the kernel kills: `memory.limit_in_bytes`, `memory.max`.
    pub fn most(&self) -> Option<u64> {
        number(&read_again(&self.most).ok()?).ok()?.filter(|&most| most < NO_LIMIT)
    }

    /// `memory.high`, in version 2.
    pub fn high(&self) -> Option<u64> {
        match self.group.version {
            Version::V1 => None,
            Version::V2 => number(&read_again(&self.control).ok()?).ok()?,
        }
    }

    /// Whether tasks of the group sleep at its limit; `None` in version 2, which doesn't tell.
    pub fn sleeping(&self) -> Option<bool> {
        (self.group.version == Version::V1).then(|| {
            let control = read_again(&self.control).unwrap_or_default();
            field(&control, "under_oom").is_some_and(|under_oom| under_oom != 0)
        })
    }

    /// How often tasks of the group were over `memory.high` and had to reclaim (version 2).
    pub fn times_over_high(&self) -> u64 {
        let text = self.signals.first().map_or(Err(Errno(libc::ENOENT)), read_again);
        text.ok().and_then(|text| field(&text, "high")).unwrap_or(0)
    }

    /// What the kernel could take, by `memory.stat`, which costs it tens of microseconds to write. As the kernel keeps these
    /// numbers, they may be two seconds old by up to 64 pages a CPU.
    pub fn reclaimable(&mut self) -> Reclaimable {
        if self.stat.is_none() {
            self.stat = self.group.open("memory.stat", false).ok();
        }
        let mut buffer = [0; 8192];
        let count = self.stat.as_ref().and_then(|file| file.read_at(&mut buffer, 0).ok()).unwrap_or(0);
        reclaimable(&String::from_utf8_lossy(&buffer[..count]), self.group.version)
    }

    /// Swap that the group may still use, by its own limit and by what the machine has. Limits of groups above it don't count.
    pub fn free_swap(&self) -> u64 {
        let machine = procfs::memory_info().map_or(0, |memory| memory.free_swap);
        let own = match (self.group.number("memory.swap.max"), self.group.number("memory.swap.current")) {
            (Ok(Some(max)), Ok(Some(current))) => max.saturating_sub(current),
            _ => u64::MAX,
        };
        machine.min(own)
    }

    /// Whether this may change the group: it was not set up like this before it was held, and nobody else has changed it since.
    pub fn may_change(&self) -> bool {
        self.change.is_some()
    }

    /// Holds the group. In version 2, `memory.high` is set to `high`, in whole pages; the kernel reclaims at once what is above it.
    /// Does nothing if [`may_change`](Hold::may_change) is false, or becomes so because `memory.high` is not as this left it.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn take(&mut self, high: u64) -> Result<(), Errno> {
        match self.change {
            None => Ok(()),
            Some(Change::OomKiller) => {
                self.know_groups()?;
                write(&self.control, OOM_KILLER_OFF)
            }
            Some(Change::High { .. }) => self.set_high(Some(high / PAGE_SIZE as u64 * PAGE_SIZE as u64)),
        }
    }

    /// Lets the group's tasks go on as they would without the hold: in version 1 the OOM killer ends one of those that sleep,
    /// unless there is memory now. Does nothing in the cases in which [`take`](Hold::take) doesn't.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn let_go(&mut self) -> Result<(), Errno> {
        match self.change {
            None => Ok(()),
            Some(Change::OomKiller) => {
                let written = write(&self.control, OOM_KILLER_ON);
                self.free_new_groups();
                written
            }
            Some(Change::High { before, .. }) => self.set_high(before),
        }
    }

    /// Writes `memory.high`, unless somebody else has: from then on it is theirs, and the guard, which would see the same, ends.
    fn set_high(&mut self, high: Option<u64>) -> Result<(), Errno> {
        let found = number(&read_again(&self.control)?)?;
        let Some(Change::High { now, ours, .. }) = &mut self.change else { return Ok(()) };
        if found != *now {
            self.change = None;
            self.guard = None;
            return Ok(());
        }
        if found != high {
            ours.change(high.unwrap_or(u64::MAX), || write(&self.control, &text(high)))?;
            *now = high;
        }
        Ok(())
    }

    /// The groups that are there now have their OOM killers as they were set up (version 1).
    fn know_groups(&mut self) -> Result<(), Errno> {
        if matches!(self.change, Some(Change::OomKiller)) {
            self.known = groups(&self.group.path)?.into_iter().map(|(_, number)| number).collect();
        }
        Ok(())
    }

    /// Gives the OOM killer back to the groups below that were made since this was last called, and so without one (version 1):
    /// nobody looks whether tasks sleep at *their* limits.
    fn free_new_groups(&mut self) {
        if !matches!(self.change, Some(Change::OomKiller)) {
            return;
        }
        let Ok(groups) = groups(&self.group.path) else { return };
        for (path, _) in groups.iter().filter(|(_, number)| !self.known.contains(number)) {
            // One that has gone again needs nothing.
            let control = OpenOptions::new().write(true).open(path.join(FILES_V1.control));
            let _ = control.and_then(|mut control| control.write_all(OOM_KILLER_ON.as_bytes()));
        }
        self.known = groups.into_iter().map(|(_, number)| number).collect();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A group that has gone needs nothing.
        let _ = self.let_go();
        // The guard writes once more, so nobody else may hold the group before it has ended.
        drop(self.guard.take());
        // SAFETY: the descriptor is open. Not left to the end of the file: a child of this process may have it.
        unsafe { libc::flock(self.control.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// The beginning of an open file of the kernel's as it is now; all of those that are read like this are short.
fn read_again(file: &File) -> Result<String, Errno> {
    let mut buffer = [0; 512];
    let count = file.read_at(&mut buffer, 0).map_err(Errno::from)?;
    String::from_utf8(buffer[..count].to_vec()).map_err(|_| Errno(libc::EILSEQ))
}

/// Writes `text` at the beginning of an open file.
fn write(file: &File, text: &str) -> Result<(), Errno> {
    file.write_all_at(text.as_bytes(), 0).map_err(Errno::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_int;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::Instant;

    const PATIENCE: Duration = Duration::from_secs(20);
    const LIMIT: usize = 16 << 20;

    /// A directory name that no other test of any process has.
    fn unique() -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        format!("pagecrew-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether `condition` becomes true while there is patience.
    fn comes_true(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        while begin.elapsed() < patience {
            if condition() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        condition()
    }

    /// A group of version 1 that is removed at the end, with those below it and whatever is in them.
    struct TestGroup(Group);

    impl TestGroup {
        /// `None` where no group can be made: without the rights, or without version 1.
        fn new(limit: usize) -> Option<TestGroup> {
            let name = unique();
            fs::create_dir(Path::new(MEMORY_V1.mounts[0]).join(&name)).ok()?;
            let group = TestGroup(Group::find(&name).unwrap());
            group.write("memory.limit_in_bytes", &limit.to_string());
            Some(group)
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.0.path.join(file), text).unwrap();
        }

        fn below(&self, name: &str) -> PathBuf {
            let path = self.0.path.join(name);
            fs::create_dir(&path).unwrap();
            path
        }

        fn oom_kill_disable(&self) -> u64 {
            oom_kill_disable(&self.0.path)
        }
    }

    fn oom_kill_disable(path: &Path) -> u64 {
        field(&fs::read_to_string(path.join("memory.oom_control")).unwrap(), "oom_kill_disable").unwrap()
    }

    impl Drop for TestGroup {
        fn drop(&mut self) {
            for process in self.0.processes().unwrap_or_default() {
                // SAFETY: a process that a test has put into its own group.
                unsafe { libc::kill(process, libc::SIGKILL) };
            }
            for (path, _) in groups(&self.0.path).unwrap_or_default().iter().rev() {
                // A process that was killed leaves its group a moment later.
                comes_true(PATIENCE, || fs::remove_dir(path).is_ok());
            }
        }
    }

    /// A child process in a group, which touches memory when it is told to, and exits when it is told to.
    struct Eater {
        process: libc::pid_t,
        go: UnixStream,
    }

    impl Eater {
        fn new(group: &Path, bytes: usize) -> Eater {
            let (go, told) = UnixStream::pair().unwrap();
            // SAFETY: the child makes raw system calls only, touches memory that it has mapped itself, and exits.
            let process = unsafe {
                let process = libc::fork();
                if process == 0 {
                    let mut byte = 0u8;
                    let mut wait = || libc::read(told.as_raw_fd(), (&raw mut byte).cast(), 1);
                    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                    if wait() == 1 {
                        let memory = libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0).cast::<u8>();
                        libc::madvise(memory.cast(), bytes, libc::MADV_NOHUGEPAGE);
                        for at in (0..bytes).step_by(super::super::PAGE_SIZE) {
                            memory.add(at).write_volatile(1);
                        }
                    }
                    wait();
                    libc::_exit(7);
                }
                process
            };
            assert!(process > 0);
            let eater = Eater { process, go };
            fs::write(group.join("cgroup.procs"), process.to_string()).unwrap();
            eater
        }

        fn go(&self) {
            (&self.go).write_all(&[1]).unwrap();
        }

        /// The status that it has ended with, if it has within `patience`.
        fn status(&mut self, patience: Duration) -> Option<i32> {
            let mut status = 0;
            // SAFETY: the test's own child, which nobody else waits for; 0 once it was waited for.
            let ended = || self.process > 0 && unsafe { libc::waitpid(self.process, &mut status, libc::WNOHANG) } != 0;
            if !comes_true(patience, ended) {
                return None;
            }
            self.process = 0;
            Some(status)
        }
    }

    impl Drop for Eater {
        fn drop(&mut self) {
            if self.process > 0 {
                // SAFETY: the test's own child, which was not waited for yet.
                unsafe {
                    libc::kill(self.process, libc::SIGKILL);
                    libc::waitpid(self.process, std::ptr::null_mut(), 0);
                }
            }
        }
    }

    /// A group that is held.
    fn held(group: &Group) -> Hold {
        let mut hold = group.hold().unwrap();
        hold.take(56 << 20).unwrap();
        hold
    }

    fn wait_for_sleepers(hold: &mut Hold) {
        let begin = Instant::now();
        while hold.sleeping() == Some(false) {
            hold.wait(Duration::from_secs(1));
            assert!(begin.elapsed() < PATIENCE, "nothing sleeps");
        }
    }

    #[test]
    fn texts_of_the_kernel() {
        let text = "oom_kill_disable 1\nunder_oom 0\noom_kill 5\n";
        assert_eq!(field(text, "oom_kill_disable"), Some(1));
        assert_eq!(field(text, "oom_kill"), Some(5));
        assert_eq!(field(text, "oom"), None);
        assert_eq!(number("4096\n"), Ok(Some(4096)));
        assert_eq!(number("max\n"), Ok(None));
        assert_eq!(number("many\n"), Err(Errno(libc::EILSEQ)));
        assert_eq!(numbers_of_processes("7\n0\n12\n\n").collect::<Vec<_>>(), [7, 12]);
    }

    #[test]
    fn what_can_be_taken_by_memory_stat() {
        let v2 =
            "anon 1\nfile 90\ninactive_anon 4\nactive_anon 8\ninactive_file 16\nactive_file 32\nslab_reclaimable 64\n";
        assert_eq!(reclaimable(v2, Version::V2), Reclaimable { cache: 112, swappable: 12 });
        assert_eq!(reclaimable("anon 1\ninactive_file 16\n", Version::V2), Reclaimable { cache: 16, swappable: 0 });
        let v1 = "inactive_file 1\nactive_file 2\ntotal_inactive_file 16\ntotal_active_file 32\ntotal_active_anon 5\n";
        assert_eq!(reclaimable(v1, Version::V1), Reclaimable { cache: 48, swappable: 5 });
        assert_eq!(reclaimable("", Version::V1), Reclaimable::default());
    }

    #[test]
    fn groups_are_found_by_name_and_by_directory_and_nothing_else_is() {
        let error = Group::find("no/such-group").unwrap_err();
        let GroupError::NotFound { tried, .. } = &error else { panic!("{error:?}") };
        assert_eq!(tried[0], Path::new("/sys/fs/cgroup/memory/no/such-group"));
        assert!(error.to_string().contains("/sys/fs/cgroup/unified/no/such-group; give"), "{error}");
        assert!(matches!(Group::find("/proc/self/status"), Err(GroupError::NotFound { .. })));
        assert_eq!(Group::find(""), Err(GroupError::NotFound { name: String::new(), tried: vec![] }));
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let name = group.0.path.file_name().unwrap().to_str().unwrap();
        for name in [name, &format!("/{name}"), group.0.path.to_str().unwrap()] {
            assert_eq!(Group::find(name).unwrap(), group.0);
        }
        assert_eq!(group.0.version(), Version::V1);
        if Path::new("/sys/fs/cgroup/cpu/cgroup.procs").exists()
            && !Path::new("/sys/fs/cgroup/cpu/memory.stat").exists()
        {
            let found = Group::find("/sys/fs/cgroup/cpu");
            assert_eq!(found, Err(GroupError::OtherController("/sys/fs/cgroup/cpu".into())));
        }
    }

    #[test]
    fn processes_and_usage_include_the_groups_below() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        assert_eq!(group.0.limit(), Some(LIMIT as u64));
        assert_eq!(group.0.processes(), Ok(vec![]));
        let eaters = [Eater::new(&group.0.path, 4 << 20), Eater::new(&group.below("a"), 4 << 20)];
        eaters.iter().for_each(Eater::go);
        let mut expected: Vec<i32> = eaters.iter().map(|eater| eater.process).collect();
        expected.sort();
        assert_eq!(group.0.processes(), Ok(expected));
        assert!(comes_true(PATIENCE, || (8 << 20..=LIMIT as u64).contains(&group.0.usage().unwrap())));
        drop(eaters);
        let gone = group.0.clone();
        drop(group);
        assert_eq!(gone.processes(), Err(Errno(libc::ENOENT)));
        assert_eq!((gone.usage(), gone.limit()), (Err(Errno(libc::ENOENT)), None));
    }

    #[test]
    fn a_group_without_a_limit_is_not_held() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        group.write("memory.limit_in_bytes", "-1");
        assert_eq!(group.0.limit(), None);
        assert_eq!(group.0.hold().unwrap_err(), HoldError::NoLimit(group.0.path.clone()));
        assert_eq!(group.oom_kill_disable(), 0);
    }

    #[test]
    fn tasks_are_held_at_the_limit_until_there_is_memory() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let mut hold = group.0.hold().unwrap();
        assert_eq!(group.oom_kill_disable(), 0);
        hold.take(0).unwrap();
        assert_eq!((group.oom_kill_disable(), hold.most(), hold.high()), (1, Some(LIMIT as u64), None));
        assert_eq!(hold.sleeping(), Some(false));
        let mut eater = Eater::new(&group.0.path, 2 * LIMIT);
        eater.go();
        wait_for_sleepers(&mut hold);
        assert_eq!(eater.status(Duration::from_millis(100)), None);
        assert_eq!(hold.sleeping(), Some(true));
        group.write("memory.limit_in_bytes", &(4 * LIMIT).to_string());
        eater.go();
        let status = eater.status(PATIENCE).unwrap();
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "status {status:#x}");
        assert_eq!(hold.sleeping(), Some(false));
        drop(hold);
        assert_eq!(group.oom_kill_disable(), 0);
    }

    #[test]
    fn the_threshold_is_told_before_the_limit() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let mut hold = held(&group.0);
        let eater = Eater::new(&group.0.path, LIMIT / 16 * 15);
        let begin = Instant::now();
        eater.go();
        hold.wait(PATIENCE);
        assert!(begin.elapsed() < PATIENCE / 2, "only after {:?}", begin.elapsed());
        assert!(hold.usage().unwrap() >= LIMIT as u64 / 8 * 7);
        assert!(comes_true(PATIENCE, || hold.usage().unwrap() - hold.reclaimable().cache >= LIMIT as u64 / 16 * 15));
    }

    #[test]
    fn tasks_that_are_let_go_meet_the_oom_killer() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let mut hold = held(&group.0);
        for _ in 0..2 {
            let mut eater = Eater::new(&group.0.path, 2 * LIMIT);
            eater.go();
            wait_for_sleepers(&mut hold);
            hold.let_go().unwrap();
            let status = eater.status(PATIENCE).unwrap();
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "status {status:#x}");
            assert_eq!(group.oom_kill_disable(), 0);
            hold.take(0).unwrap();
            assert_eq!(group.oom_kill_disable(), 1);
        }
    }

    #[test]
    fn one_at_a_time_holds_a_group_and_finds_it_as_it_was_again() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let hold = held(&group.0);
        assert_eq!(group.0.hold().unwrap_err(), HoldError::Taken(group.0.path.join("memory.oom_control")));
        drop(hold);
        group.write("memory.oom_control", "1");
        let mut hold = held(&group.0);
        hold.let_go().unwrap();
        assert!(!hold.may_change());
        assert_eq!(group.oom_kill_disable(), 1);
        drop(hold);
        assert_eq!(group.oom_kill_disable(), 1);
    }

    #[test]
    fn groups_that_come_below_a_held_one_keep_their_oom_killer() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let own = group.below("own");
        fs::write(own.join("memory.oom_control"), "1").unwrap();
        let mut hold = held(&group.0);
        let first = group.below("first");
        assert_eq!(oom_kill_disable(&first), 1);
        hold.wait(Duration::ZERO);
        assert_eq!(oom_kill_disable(&first), 0);
        fs::write(first.join("memory.oom_control"), "1").unwrap();
        let second = group.below("second");
        drop(hold);
        assert_eq!([&own, &first, &second].map(|path| oom_kill_disable(path)), [1, 1, 0]);
    }

    #[test]
    fn a_group_may_go_while_it_is_held() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let mut hold = held(&group.0);
        drop(group);
        hold.wait(Duration::from_millis(10));
        assert_eq!((hold.usage(), hold.most(), hold.sleeping()), (None, None, Some(false)));
        assert_eq!(hold.let_go(), Err(Errno(libc::ENODEV)));
    }

    #[test]
    fn the_guard_has_nothing_of_this_process_and_ends_with_the_hold() {
        let Some(group) = TestGroup::new(LIMIT) else { return };
        let hold = held(&group.0);
        let guard = hold.guard.as_ref().unwrap().process;
        let entry = |name: &str| PathBuf::from(format!("/proc/{guard}/{name}"));
        assert_eq!(fs::read_to_string(entry("comm")).unwrap(), "pagecrew/guard\n");
        assert_eq!(fs::read_dir(entry("fd")).unwrap().count(), 2);
        assert_eq!(fs::read_link(entry("cwd")).unwrap(), Path::new("/"));
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            // SAFETY: the guard is this process's child, and was not waited for.
            assert_eq!(unsafe { libc::kill(guard, signal) }, 0);
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(entry("exe").exists());
        drop(hold);
        assert!(!entry("comm").exists());
    }

    #[test]
    fn a_signal_handler_ends_a_wait() {
        extern "C" fn nothing(_: c_int) {}
        // SAFETY: no other test uses this signal; the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR2, nothing as *const () as libc::sighandler_t) };
        let files = MadeUp::new("max\n", "67108864\n");
        let mut hold = held(&files.group());
        let (begin, over) = (Instant::now(), AtomicBool::new(false));
        // SAFETY: takes nothing.
        let this = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                    // SAFETY: the scope keeps that thread alive.
                    unsafe { libc::pthread_kill(this, libc::SIGUSR2) };
                }
            });
            hold.wait(PATIENCE);
            over.store(true, Ordering::Relaxed);
        });
        assert!(begin.elapsed() < PATIENCE / 2);
    }

    /// Not a test: the process that is killed below while it holds a group.
    #[test]
    #[ignore = "started by another test"]
    fn a_process_that_holds() {
        let Some(path) = std::env::var_os("PAGECREW_TEST_GROUP") else { return };
        let group = Group::find(path.to_str().unwrap()).unwrap();
        if std::env::var_os("PAGECREW_TEST_INSIDE").is_some() {
            fs::write(group.path.join("cgroup.procs"), "0").unwrap();
        }
        let _hold = held(&group);
        let _ = io::stdin().read_line(&mut String::new());
    }

    #[test]
    fn a_holder_that_is_killed_leaves_no_task_held() {
        for inside in [false, true] {
            let Some(group) = TestGroup::new(2 * LIMIT) else { return };
            let mut command = Command::new(std::env::current_exe().unwrap());
            let name = format!("{}::a_process_that_holds", module_path!().split_once("::").unwrap().1);
            command.env("PAGECREW_TEST_GROUP", &group.0.path).args(["--exact", &name, "--ignored", "--quiet"]);
            if inside {
                command.env("PAGECREW_TEST_INSIDE", "1");
            }
            let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let held = comes_true(PATIENCE, || group.oom_kill_disable() == 1);
            let mut eater = Eater::new(&group.0.path, 4 * LIMIT);
            eater.go();
            let text = || fs::read_to_string(group.0.path.join("memory.oom_control")).unwrap();
            let stuck = comes_true(PATIENCE, || field(&text(), "under_oom") == Some(1));
            holder.kill().unwrap();
            holder.wait().unwrap();
            assert!(held && stuck, "held {held}, stuck {stuck}");
            assert!(comes_true(Duration::from_secs(1), || group.oom_kill_disable() == 0), "inside: {inside}");
            let status = eater.status(PATIENCE).unwrap();
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "status {status:#x}");
        }
    }

    /// A directory of plain files like those of a group of version 2. What is written to a plain file replaces the beginning of
    /// what it has, so only first lines are looked at.
    struct MadeUp(PathBuf);

    impl MadeUp {
        fn new(high: &str, max: &str) -> MadeUp {
            let group = MadeUp(std::env::temp_dir().join(unique()));
            fs::create_dir(&group.0).unwrap();
            group.write("cgroup.procs", "5\n");
            group.write("memory.current", "1048576\n");
            group.write("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n");
            group.write("memory.high", high);
            group.write("memory.max", max);
            group
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.0.join(file), text).unwrap();
        }

        fn high(&self) -> String {
            fs::read_to_string(self.0.join("memory.high")).unwrap().lines().next().unwrap().to_owned()
        }

        fn group(&self) -> Group {
            Group::find(self.0.to_str().unwrap()).unwrap()
        }
    }

    impl Drop for MadeUp {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn version_2_is_held_by_memory_high() {
        let files = MadeUp::new("max\n", "67108864\n");
        let group = files.group();
        assert_eq!((group.version(), group.limit(), group.usage()), (Version::V2, Some(64 << 20), Ok(1 << 20)));
        assert_eq!(group.processes(), Ok(vec![5]));
        let mut hold = group.hold().unwrap();
        assert_eq!(
            (files.high().as_str(), hold.high(), hold.most(), hold.sleeping()),
            ("max", None, Some(64 << 20), None)
        );
        // In whole pages, as the kernel would round it.
        hold.take((56 << 20) + 5).unwrap();
        assert_eq!((files.high().as_str(), hold.high()), ("58720256", Some(56 << 20)));
        hold.take(48 << 20).unwrap();
        assert_eq!(files.high(), "50331648");
        hold.let_go().unwrap();
        assert_eq!((files.high().as_str(), hold.high()), ("max", None));
        hold.take(56 << 20).unwrap();
        drop(hold);
        assert_eq!(files.high(), "max");
    }

    #[test]
    fn numbers_of_version_2() {
        let files = MadeUp::new("max\n", "67108864\n");
        let mut hold = files.group().hold().unwrap();
        assert_eq!((hold.usage(), hold.times_over_high()), (Some(1 << 20), 0));
        assert_eq!(hold.reclaimable(), Reclaimable::default());
        files.write("memory.stat", "inactive_file 4096\n");
        files.write("memory.events", "low 0\nhigh 17\nmax 0\n");
        assert_eq!((hold.times_over_high(), hold.reclaimable().cache), (17, 4096));
        files.write("memory.swap.max", "8192\n");
        files.write("memory.swap.current", "8192\n");
        assert_eq!(hold.free_swap(), 0);
        files.write("memory.max", "max\n");
        files.write("memory.current", "\n");
        assert_eq!((hold.most(), hold.usage()), (None, None));
        // Those of the groups below are left out where the kernel can.
        files.write("memory.events.local", "low 0\nhigh 3\nmax 0\n");
        files.write("memory.max", "67108864\n");
        drop(hold);
        assert_eq!(files.group().hold().unwrap().times_over_high(), 3);
    }

    #[test]
    fn the_guard_restores_memory_high() {
        let files = MadeUp::new("99000000000\n", "67108864\n");
        let mut hold = held(&files.group());
        hold.take(48 << 20).unwrap();
        assert_eq!(files.high(), "50331648");
        // As if this process had ended: the guard alone is left to do it.
        hold.guard = None;
        assert_eq!(files.high(), "99000000000");
    }

    #[test]
    fn what_somebody_else_writes_to_memory_high_stays() {
        // Before each step that would write.
        for step in 0..4 {
            let files = MadeUp::new("max\n", "67108864\n");
            let mut hold = held(&files.group());
            files.write("memory.high", "33554432\n");
            match step {
                0 => hold.take(48 << 20).unwrap(),
                1 => hold.let_go().unwrap(),
                2 => hold.guard = None,
                _ => {}
            }
            assert_eq!(hold.may_change(), step > 1);
            hold.take(48 << 20).unwrap();
            assert!(!hold.may_change());
            drop(hold);
            assert_eq!(files.high(), "33554432");
        }
        // Also while the group is let go.
        let files = MadeUp::new("max\n", "67108864\n");
        let mut hold = held(&files.group());
        hold.let_go().unwrap();
        files.write("memory.high", "33554432\n");
        hold.take(48 << 20).unwrap();
        assert!(!hold.may_change());
        drop(hold);
        assert_eq!(files.high(), "33554432");
    }

    #[test]
    fn memory_high_is_left_where_it_is_below_max() {
        let files = MadeUp::new("33554432\n", "67108864\n");
        let hold = held(&files.group());
        assert_eq!((hold.may_change(), hold.high(), files.high()), (false, Some(32 << 20), "33554432".to_owned()));
        drop(hold);
        assert_eq!(files.high(), "33554432");
        let files = MadeUp::new("max\n", "max\n");
        assert_eq!(files.group().hold().unwrap_err(), HoldError::NoLimit(files.0.clone()));
    }
}
