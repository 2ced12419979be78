//! A *hold* on a control group: its tasks wait at the limit instead of being killed, until it ends.
//!
//! Where a group is to be held, and whether it is near that, [`held`](super::held) decides.

use super::guard::{Guard, Ours, Undo};
use super::lock::{Lock, LockError};
use super::marker::Marker;
use super::{FILES_V1, FILES_V2, Files, Group, Version, field, groups, mounts, number, text};
use crate::sys::cgroup::NO_LIMIT;
use crate::sys::{Errno, PAGE_SIZE, procfs};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const OOM_KILLER_OFF: &str = "1\n";
pub(super) const OOM_KILLER_ON: &str = "0\n";

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

/// What `memory.stat` tells. A field that a kernel doesn't have counts as zero: nothing is known that could be taken.
pub(super) fn reclaimable(stat: &str, version: Version) -> Reclaimable {
    // In version 1, the fields without this are the group's alone, without those below it.
    let prefix = if version == Version::V1 { "total_" } else { "" };
    let sum = |names: &[&str]| names.iter().filter_map(|name| field(stat, &format!("{prefix}{name}"))).sum();
    Reclaimable {
        cache: sum(&["inactive_file", "active_file", "slab_reclaimable"]),
        swappable: sum(&["inactive_anon", "active_anon"]),
    }
}

impl Group {
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
    /// are killed at once, the group stays held until the next hold on it, which finds a marker and undoes it first
    /// ([`Hold::found_one_left`]; 5.7), or until [`undo_what_was_left`]. By hand, `echo 0 > memory.oom_control` (version 1) or `echo max > memory.high` (version 2) lets it go.
    ///
    /// # Errors
    /// See [`HoldError`].
    pub fn hold(&self) -> Result<Hold, HoldError> {
        self.limit().ok_or_else(|| HoldError::NoLimit(self.path.clone()))?;
        let control = self.open(self.files().control, true)?;
        let lock = self.hold_lock()?;
        let refused = |errno| HoldError::Refused(self.path.join(self.files().control), errno);
        let found_one_left = self.undo_what_was_left(&control).map_err(refused)?;
        let before = read_again(&control).map_err(refused)?;
        let limit = self.limit().ok_or_else(|| HoldError::NoLimit(self.path.clone()))?;
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
            Some(Change::OomKiller) => {
                read_again(&usage).map_err(|errno| HoldError::Refused(self.path.join(self.files().usage), errno))?;
                Some(Guard::start(&control, &lock.file, Undo::OomKiller { top: &self.path, usage: &usage, limit }))
            }
            Some(Change::High { before, ours, .. }) => {
                Some(Guard::start(&control, &lock.file, Undo::Number { before: &text(*before), ours }))
            }
            None => None,
        };
        let guard = guard.transpose().map_err(HoldError::NoGuard)?;
        let mut hold = Hold {
            group: self.clone(),
            control,
            change,
            guard,
            _lock: lock,
            signals,
            usage,
            most,
            stat: None,
            known: BTreeSet::new(),
            found_one_left,
        };
        hold.know_groups().map_err(refused)?;
        Ok(hold)
    }

    /// The right to hold the group, which nobody else has then.
    pub(super) fn hold_lock(&self) -> Result<Lock, HoldError> {
        let lock = Lock::of(&self.path).map_err(|LockError(path, errno)| HoldError::Refused(path, errno))?;
        lock.ok_or_else(|| HoldError::Taken(self.path.join(self.files().control)))
    }

    /// Undoes the hold of a process that was killed together with its guard, whatever it was. Returns whether there was one.
    fn undo_what_was_left(&self, control: &File) -> Result<bool, Errno> {
        let Some(marker) = Marker::read(control) else { return Ok(false) };
        let mut undone = false;
        match marker {
            Marker::OomKiller { off_below } if self.version == Version::V1 => {
                if field(&read_again(control)?, "oom_kill_disable") == Some(1) {
                    write(control, OOM_KILLER_ON)?;
                    undone = true;
                }
                turn_oom_killers_on_below(&self.path, &off_below)?;
            }
            // Any other number is somebody else's.
            Marker::High { before, ours } if self.version == Version::V2 => {
                let found = number(&read_again(control)?)?;
                if found != before && ours.contains(&found) {
                    write(control, &text(before))?;
                    undone = true;
                }
            }
            Marker::OomKiller { .. } | Marker::High { .. } | Marker::Nice { .. } => {}
        }
        Marker::remove(control);
        Ok(undone)
    }

    fn open(&self, name: &str, write: bool) -> Result<File, HoldError> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(write).open(&path);
        file.map_err(|error| HoldError::Refused(path, Errno::from(error)))
    }

    /// An eventfd that the kernel signals when something happens that `file` tells about: tasks sleep at the limit, or the usage
    /// has passed the threshold in `arguments` in either direction (version 1, 2.6.34; not on PREEMPT_RT).
    pub(crate) fn notify(&self, file: &File, arguments: &str) -> Result<File, HoldError> {
        let path = self.path.join("cgroup.event_control");
        let register = || {
            let signal = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            let request = format!("{} {}{arguments}", signal.as_raw_fd(), file.as_raw_fd());
            OpenOptions::new().write(true).open(&path)?.write_all(request.as_bytes())?;
            Ok::<_, std::io::Error>(signal)
        };
        register().map_err(|error| HoldError::Refused(path.clone(), Errno::from(error)))
    }
}

/// A group whose tasks can be held at its limit. Dropping it undoes what it has done.
#[derive(Debug)]
pub struct Hold {
    group: Group,
    /// The file that is written to hold the group.
    control: File,
    /// `None` if the group was set up like this already, or somebody else has changed it: then it is left so.
    change: Option<Change>,
    /// There is one where there is a change.
    pub(super) guard: Option<Guard>,
    /// For as long as what is changed may be undone; dropped after the guard, which writes once more.
    _lock: Lock,
    /// Eventfds in version 1, `memory.events` in version 2.
    signals: Vec<File>,
    usage: File,
    most: File,
    /// `memory.stat`, once it was needed.
    stat: Option<File>,
    /// The groups below that have been seen (version 1).
    known: BTreeSet<u64>,
    found_one_left: bool,
}

/// Lets all groups of this machine go that are held still by processes that were killed together with their guards, and returns which those were.
/// Groups that a process holds stay as they are. Costs an `open` for each group.
pub fn undo_what_was_left() -> Vec<PathBuf> {
    mounts::of_memory().iter().flat_map(|mount| undo_what_was_left_below(mount.point())).collect()
}

pub(super) fn undo_what_was_left_below(top: &Path) -> Vec<PathBuf> {
    let undo = |path: PathBuf| {
        // Of most groups nobody has ever written anything down.
        let open = |files: &Files| File::open(path.join(files.control)).ok();
        let control = [&FILES_V1, &FILES_V2].into_iter().find_map(open)?;
        Marker::read(&control)?;
        let group = Group::at(&path).ok()??;
        let control = group.open(group.files().control, true).ok()?;
        let _lock = group.hold_lock().ok()?;
        group.undo_what_was_left(&control).is_ok_and(|undone| undone).then_some(path)
    };
    groups(top).unwrap_or_default().into_iter().filter_map(|(path, _)| undo(path)).collect()
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

    /// Whether the group was still held by a process that was killed together with its guard. That was undone first.
    pub fn found_one_left(&self) -> bool {
        self.found_one_left
    }

    /// What to poll, and for which events: ready when tasks of the group are held or its usage passes seven eighths of the limit that it
    /// had at first (version 1), or when its usage was at `memory.high` (version 2). [`heard`](Hold::heard) makes them not ready again.
    pub fn descriptors(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        let events = if self.group.version == Version::V1 { libc::POLLIN } else { libc::POLLPRI };
        self.signals.iter().map(move |signal| (signal.as_raw_fd(), events))
    }

    /// To be called again and again, and whenever one of the [`descriptors`](Hold::descriptors) was ready.
    ///
    /// In version 1, groups that are made below a held group are made without an OOM killer, too. This gives it back to them.
    pub fn heard(&mut self) {
        self.free_new_groups();
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

    /// Whether the guard lives, where there has to be one. Without it, the group would stay held if this process were killed: drop the hold then,
    /// and make another.
    pub fn guarded(&self) -> bool {
        self.guard.as_ref().is_none_or(Guard::lives)
    }

    /// Becomes readable when there has to be a guard and it has ended: then it's time for another hold.
    pub fn guard_descriptor(&self) -> Option<RawFd> {
        self.guard.as_ref().map(Guard::descriptor)
    }

    /// Whether this may change the group: it was not set up like this before it was held, and nobody else has changed it since.
    pub fn may_change(&self) -> bool {
        self.change.is_some()
    }

    /// Holds the group. In version 2, `memory.high` is set to `high`, in whole pages; the kernel reclaims at once what is above it.
    /// Does nothing if [`may_change`](Hold::may_change) is false, or becomes so because `memory.high` is neither as this left it nor as it was
    /// before.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn take(&mut self, high: u64) -> Result<(), Errno> {
        match self.change {
            None => Ok(()),
            Some(Change::OomKiller) => {
                self.know_groups()?;
                Marker::OomKiller { off_below: self.off_below()? }.write(&self.control);
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
                // Where the group has gone, there may be another one with its name, whose own affair it is.
                write(&self.control, OOM_KILLER_ON)?;
                self.free_new_groups();
                Marker::remove(&self.control);
                Ok(())
            }
            Some(Change::High { before, .. }) => self.set_high(before),
        }
    }

    /// What `memory.high` was before, where this has changed it and somebody had set it.
    pub fn before(&self) -> Option<u64> {
        match self.change {
            Some(Change::High { before, .. }) => before,
            Some(Change::OomKiller) | None => None,
        }
    }

    /// Has everything as it was before, for good.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn give_up(&mut self) -> Result<(), Errno> {
        self.let_go()?;
        (self.change, self.guard) = (None, None);
        Ok(())
    }

    /// Writes `memory.high`, unless somebody else has: from then on it is theirs, and the guard, which would see the same, ends.
    ///
    /// Somebody who has written what was there before has not chosen anything: systemd writes all the settings of all its groups again
    /// whenever it is reloaded, and whenever one of them changes.
    fn set_high(&mut self, high: Option<u64>) -> Result<(), Errno> {
        let found = number(&read_again(&self.control)?)?;
        let Some(Change::High { before, now, ours }) = &mut self.change else { return Ok(()) };
        if found == *before {
            *now = found;
        }
        if found != *now {
            self.change = None;
            self.guard = None;
            Marker::remove(&self.control);
            return Ok(());
        }
        if found != high {
            Marker::High { before: *before, ours: [*now, high] }.write(&self.control);
            ours.change(high.unwrap_or(u64::MAX), || write(&self.control, &text(high)))?;
            *now = high;
        }
        if high == *before {
            Marker::remove(&self.control);
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

    /// The groups below in which somebody else has turned the OOM killer off (version 1).
    fn off_below(&self) -> Result<Vec<u64>, Errno> {
        let below = groups(&self.group.path)?.into_iter().skip(1);
        let off = |(path, number): (PathBuf, u64)| {
            let control = std::fs::read_to_string(path.join(FILES_V1.control)).ok()?;
            (field(&control, "oom_kill_disable") == Some(1)).then_some(number)
        };
        Ok(below.filter_map(off).collect())
    }

    /// Gives the OOM killer back to the groups below that were made since this was last called, and so without one (version 1):
    /// nobody looks whether tasks sleep at *their* limits.
    fn free_new_groups(&mut self) {
        if !matches!(self.change, Some(Change::OomKiller)) {
            return;
        }
        let Ok(groups) = groups(&self.group.path) else { return };
        // One that it failed for has its turn the next time.
        let has_its_own =
            |(path, number): &(PathBuf, u64)| self.known.contains(number) || turn_oom_killer_on(path).is_ok();
        self.known = groups.into_iter().filter(has_its_own).map(|(_, number)| number).collect();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A group that has gone needs nothing.
        let _ = self.let_go();
        // The guard writes once more, so nobody else may hold the group before it has ended.
        drop(self.guard.take());
    }
}

/// Turns the OOM killer on in the groups at and below `top`, but for those in which somebody else has turned it off.
///
/// # Errors
/// That of finding them; `ENOMEM` where there was no memory to change one of them.
pub(super) fn turn_oom_killers_on_below(top: &Path, off_below: &[u64]) -> Result<(), Errno> {
    let groups = groups(top)?;
    let mut result = Ok(());
    for (path, _) in groups.iter().filter(|(_, number)| !off_below.contains(number)) {
        result = turn_oom_killer_on(path).and(result);
    }
    result
}

/// Turns the OOM killer of the group at `path` on (version 1). One that has gone needs nothing, and what may not be changed is somebody else's.
fn turn_oom_killer_on(path: &Path) -> Result<(), Errno> {
    let control = OpenOptions::new().write(true).open(path.join(FILES_V1.control));
    match control.and_then(|mut control| control.write_all(OOM_KILLER_ON.as_bytes())).map_err(Errno::from) {
        Err(Errno(libc::ENOMEM)) => Err(Errno(libc::ENOMEM)),
        _ => Ok(()),
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
