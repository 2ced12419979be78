//! Memory control groups of both versions: finding them, what they tell, and holding them at their limits.
//!
//! At the limit of a group the kernel kills one of its tasks. A [`Hold`] has the tasks wait instead, until somebody has given
//! memory back. It is meant for a process that watches the group from outside.
//!
//! - [`Group`]: a group by its name or its directory. `mounts`: where groups are.
//! - [`hold`]: the mechanism; `guard` and `marker`: what undoes it when its process is killed, and when both are.
//! - [`held`]: how a group stands, [`relief`]: what is done about it, and [`rushes`]: whose turn it is. Pure.
//! - [`holder`]: the two together.

mod guard;
pub mod held;
pub mod hold;
pub mod holder;
mod lock;
mod marker;
pub(crate) mod mounts;
pub mod relief;
pub mod rushes;
#[cfg(test)]
mod tests;

pub(crate) use guard::{Guard, Ours, URGENT, Undo, change_nice};
pub use held::Standing;
pub use hold::{Hold, HoldError, undo_what_was_left};
pub use holder::{Holder, Holds};
pub(crate) use lock::{Lock, LockError};
pub(crate) use marker::Marker;
pub use relief::Relief;

use crate::sys::Errno;
use crate::sys::cgroup::NO_LIMIT;
use std::fmt;
use std::fs;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

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
                write!(f, "{} is a group of another controller; give that of the memory controller", path.display())
            }
            GroupError::Refused(path, errno) => write!(f, "{}: {errno}", path.display()),
        }
    }
}

impl std::error::Error for GroupError {}

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

/// The directory `top` and all groups below it, each before those inside it, with their numbers; those that vanish meanwhile
/// are left out. A number belongs to one group only, also after that has gone.
fn groups(top: &Path) -> Result<Vec<(PathBuf, u64)>, Errno> {
    let mut found = vec![(top.to_owned(), 0)];
    let mut next = 0;
    while next < found.len() {
        match fs::read_dir(&found[next].0).map_err(Errno::from) {
            Ok(entries) => {
                for entry in entries {
                    let entry = match entry.map_err(Errno::from) {
                        Ok(entry) => entry,
                        Err(error) if vanished(error) => break,
                        Err(error) => return Err(error),
                    };
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
            // A machine full of containers has thousands of mounts: they are not read for a directory that is there.
            if let Some(group) = Group::at(&tried[0])? {
                return Ok(group);
            }
        }
        if !name.is_empty() {
            for mount in mounts::of_memory() {
                let path = mount.directory(name);
                let found = Group::at(&path);
                tried.push(path);
                if let Some(group) = found? {
                    return Ok(group);
                }
            }
        }
        Err(GroupError::NotFound { name: name.to_owned(), tried })
    }

    /// The group whose directory is `path`; `None` if that isn't one.
    pub(crate) fn at(path: &Path) -> Result<Option<Group>, GroupError> {
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
}
