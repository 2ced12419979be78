//! Whether memory of control groups can be reclaimed ahead of their demand here.

use super::group_files::PIECE;
use crate::group::{Group, Version, mounts};
use crate::sys::{Errno, tracepoint};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::path::Path;

/// Why it can't.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unserved {
    /// The memory controller is mounted nowhere.
    NoController,
    /// The kernel can't be asked to reclaim memory of a group.
    TooOld,
    /// The kernel or the user's rights rule it out.
    Refused(Errno),
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unserved::NoController => write!(f, "no memory controller of control groups is mounted"),
            Unserved::TooOld => {
                write!(f, "the kernel can't be asked to reclaim memory of a group (memory.reclaim, Linux 5.19)")
            }
            Unserved::Refused(errno) => write!(f, "the files of control groups: {errno}"),
        }
    }
}

impl std::error::Error for Unserved {}

/// The file that is written to reclaim memory of a group.
pub(super) fn file(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.force_empty",
        Version::V2 => "memory.reclaim",
    }
}

/// Whether memory of this group can be reclaimed: not where it is another user's, for whoever may write to what is root's alone.
pub(super) fn serves(group: &Group) -> bool {
    OpenOptions::new().write(true).open(group.path().join(file(group.version()))).is_ok()
}

/// Which versions can be served. Changes nothing.
///
/// # Errors
/// See [`Unserved`].
pub fn attempt() -> Result<Vec<Version>, Unserved> {
    let mut served = Vec::new();
    let mut reason = Unserved::NoController;
    for mount in mounts::of_memory() {
        match version_at(mount.point()) {
            Ok(version) if served.contains(&version) => {}
            Ok(version) => served.push(version),
            Err(Unserved::NoController) => {}
            Err(found) => reason = found,
        }
    }
    if served.is_empty() { Err(reason) } else { Ok(served) }
}

/// The version of the hierarchy that is mounted at `point`, if its groups can be served.
pub(super) fn version_at(point: &Path) -> Result<Version, Unserved> {
    let group = Group::at(point).ok().flatten().ok_or(Unserved::NoController)?;
    let version = group.version();
    if version == Version::V2 {
        let controllers = fs::read_to_string(point.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_ascii_whitespace().any(|name| name == "memory") {
            return Err(Unserved::NoController);
        }
    }
    if version == Version::V1 {
        // A write to its file has no end of its own, and has to be cut short.
        tracepoint::number(PIECE).map_err(Unserved::Refused)?;
    }
    match OpenOptions::new().write(true).open(point.join(file(version))).map_err(Errno::from) {
        Ok(_) => Ok(version),
        Err(Errno(libc::ENOENT)) => Err(Unserved::TooOld),
        Err(errno) => Err(Unserved::Refused(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with these files.
    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    #[test]
    fn hierarchies_of_every_kernel() {
        let procs = ("cgroup.procs", "");
        let controllers = ("cgroup.controllers", "cpu memory pids\n");
        for (files, expected) in [
            (&[][..], Err(Unserved::NoController)),
            // Version 2 before 5.19, and since; and without the memory controller, which version 1 has.
            (&[procs, controllers], Err(Unserved::TooOld)),
            (&[procs, controllers, ("memory.reclaim", "")], Ok(Version::V2)),
            (&[procs, ("cgroup.controllers", "cpu\n"), ("memory.reclaim", "")], Err(Unserved::NoController)),
            (&[procs, ("memory.usage_in_bytes", "0\n"), ("memory.force_empty", "")], Ok(Version::V1)),
        ] {
            let expected = match expected {
                // Containers may not trace.
                Ok(Version::V1) => tracepoint::number(PIECE).map(|_| Version::V1).map_err(Unserved::Refused),
                other => other,
            };
            assert_eq!(version_at(group(files).path()), expected, "{files:?}");
        }
        // This machine's.
        let _ = attempt();
    }
}
