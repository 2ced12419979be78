//! The limits of the control group that this process is in: memory and CPU, version 1 and version 2.
//!
//! A limit may stand at any level above the process, so each reader walks up to the root and keeps the tightest.

use super::Errno;
use super::procfs::{self, Buffer};
use std::ffi::CStr;
use std::io::Write;

/// The memory limit that is closest to being reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The limit in bytes.
    pub limit: u64,
    /// What is charged against it and can't be dropped: usage less inactive page cache.
    pub used: u64,
}

/// The CPU bandwidth limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// CPUs' worth of time that the group may use, in thousandths.
    pub quota_milli: u64,
    /// Periods in which the group was held back so far.
    pub throttled: u64,
    /// CPU time that the group has used so far, in microseconds; version 2 alone says so.
    pub used_us: Option<u64>,
}

/// A controller's files in one hierarchy.
struct Hierarchy {
    /// The field of `/proc/self/cgroup` that names the controller; empty for version 2.
    controller: &'static str,
    /// Where it is mounted on common systems.
    mounts: &'static [&'static str],
}

const MEMORY_V2: Hierarchy = Hierarchy { controller: "", mounts: &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] };
const MEMORY_V1: Hierarchy = Hierarchy { controller: "memory", mounts: &["/sys/fs/cgroup/memory"] };
const CPU_V2: Hierarchy = Hierarchy { controller: "", mounts: MEMORY_V2.mounts };
const CPU_V1: Hierarchy =
    Hierarchy { controller: "cpu", mounts: &["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"] };

const OWN_GROUPS: &CStr = c"/proc/self/cgroup";

/// The path of this process's group in the hierarchy of `controller`, out of the text of `/proc/self/cgroup`.
fn group_of<'t>(text: &'t str, controller: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let ours = if controller.is_empty() {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|name| name == controller)
        };
        ours.then_some(path)
    })
}

/// Longer paths are left out; they are read on whatever stack there is.
const PATH: usize = 512;

/// Puts a path together in `room`; `None` where it doesn't fit.
fn join<'r>(room: &'r mut [u8; PATH], parts: &[&str]) -> Option<&'r CStr> {
    let mut rest = &mut room[..];
    for part in parts {
        rest.write_all(part.as_bytes()).ok()?;
    }
    rest.write_all(&[0]).ok()?;
    CStr::from_bytes_until_nul(room).ok()
}

/// Reads one number of the file `mount`+`group`+`/`+`name`; `None` for `max`, -1 and what is not there.
fn number(mount: &str, group: &str, name: &str) -> Option<u64> {
    let (mut room, mut buffer) = ([0; PATH], Buffer::new());
    let text = procfs::read(join(&mut room, &[mount, group.trim_end_matches('/'), "/", name])?, &mut buffer).ok()?;
    text.trim().parse().ok()
}

/// Reads the value of the line that starts with `key` in the file `name`.
fn keyed(mount: &str, group: &str, name: &str, key: &str) -> Option<u64> {
    let (mut room, mut buffer) = ([0; PATH], Buffer::new());
    let text = procfs::read(join(&mut room, &[mount, group.trim_end_matches('/'), "/", name])?, &mut buffer).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Calls `level` for this process's group and each one above it, in each place where the hierarchy may be mounted. Inside a
/// container the path that the kernel tells may not exist below the mount; then the mount itself is the container's group.
fn walk(hierarchy: &Hierarchy, level: impl FnMut(&str, &str)) {
    let mut buffer = Buffer::new();
    if let Ok(text) = procfs::read(OWN_GROUPS, &mut buffer) {
        walk_in(text, hierarchy, level);
    }
}

/// The same, where `text` says which groups this process is in.
fn walk_in(text: &str, hierarchy: &Hierarchy, mut level: impl FnMut(&str, &str)) {
    let Some(group) = group_of(text, hierarchy.controller) else { return };
    for mount in hierarchy.mounts {
        let mut path = group.trim_end_matches('/');
        loop {
            level(mount, path);
            match path.rfind('/') {
                Some(cut) => path = &path[..cut],
                None => break,
            }
        }
    }
}

/// More than this is "no limit" in version 1, which writes the largest page-aligned number there.
pub(crate) const NO_LIMIT: u64 = 1 << 60;

/// The tightest memory limit on this process; `None` where there is none.
pub fn memory() -> Option<Memory> {
    let mut tightest: Option<Memory> = None;
    let mut keep = |found: Memory| {
        let room = |memory: &Memory| memory.limit.saturating_sub(memory.used);
        if found.limit < NO_LIMIT && tightest.as_ref().is_none_or(|best| room(&found) < room(best)) {
            tightest = Some(found);
        }
    };
    let mut buffer = Buffer::new();
    let text = procfs::read(OWN_GROUPS, &mut buffer).unwrap_or_default();
    walk_in(text, &MEMORY_V2, |mount, group| {
        let high = number(mount, group, "memory.high").unwrap_or(NO_LIMIT);
        let max = number(mount, group, "memory.max").unwrap_or(NO_LIMIT);
        // What is used is only of interest where there is a limit.
        if high.min(max) < NO_LIMIT
            && let Some(used) = number(mount, group, "memory.current")
        {
            let cache = keyed(mount, group, "memory.stat", "inactive_file").unwrap_or(0);
            keep(Memory { limit: high.min(max), used: used.saturating_sub(cache) });
        }
    });
    walk_in(text, &MEMORY_V1, |mount, group| {
        let limit = number(mount, group, "memory.limit_in_bytes").unwrap_or(NO_LIMIT);
        if limit < NO_LIMIT
            && let Some(used) = number(mount, group, "memory.usage_in_bytes")
        {
            let cache = keyed(mount, group, "memory.stat", "total_inactive_file").unwrap_or(0);
            keep(Memory { limit, used: used.saturating_sub(cache) });
        }
    });
    tightest
}

/// Total time in microseconds that some task of this process's own group has waited for memory (`memory.pressure` of version 2, 4.20); `None`
/// where groups don't say so.
pub fn memory_stall_us() -> Option<u64> {
    let mut found = None;
    walk(&MEMORY_V2, |mount, group| {
        if found.is_none() {
            let (mut room, mut buffer) = ([0; PATH], Buffer::new());
            let path = join(&mut room, &[mount, group.trim_end_matches('/'), "/memory.pressure"]);
            found = path.and_then(|path| procfs::parse_stall(procfs::read(path, &mut buffer).ok()?));
        }
    });
    found
}

/// The CPU bandwidth limit on this process; `None` where there is none.
pub fn cpu() -> Option<Cpu> {
    let mut tightest: Option<Cpu> = None;
    let mut keep = |quota: u64, period: u64, throttled: u64, used_us: Option<u64>| {
        let found = Cpu { quota_milli: quota * 1000 / period.max(1), throttled, used_us };
        if tightest.as_ref().is_none_or(|best| found.quota_milli < best.quota_milli) {
            tightest = Some(found);
        }
    };
    walk(&CPU_V2, |mount, group| {
        let (mut room, mut buffer) = ([0; PATH], Buffer::new());
        let path = join(&mut room, &[mount, group, "/cpu.max"]);
        let Some(Ok(text)) = path.map(|path| procfs::read(path, &mut buffer)) else { return };
        if let Some((quota, period)) = parse_cpu_max(text) {
            let used_us = keyed(mount, group, "cpu.stat", "usage_usec");
            keep(quota, period, keyed(mount, group, "cpu.stat", "nr_throttled").unwrap_or(0), used_us);
        }
    });
    walk(&CPU_V1, |mount, group| {
        if let (Some(quota), Some(period)) =
            (number(mount, group, "cpu.cfs_quota_us"), number(mount, group, "cpu.cfs_period_us"))
        {
            keep(quota, period, keyed(mount, group, "cpu.stat", "nr_throttled").unwrap_or(0), None);
        }
    });
    tightest
}

fn parse_cpu_max(text: &str) -> Option<(u64, u64)> {
    let (quota, period) = text.trim().split_once(' ')?;
    Some((quota.parse().ok()?, period.parse().ok()?))
}

/// Which version of the memory controller this process is under, for people.
///
/// # Errors
/// Those of reading `/proc/self/cgroup`.
pub fn memory_controller() -> Result<&'static str, Errno> {
    let mut buffer = Buffer::new();
    let text = procfs::read(c"/proc/self/cgroup", &mut buffer)?;
    Ok(match (group_of(text, "memory"), group_of(text, "")) {
        (Some(_), _) => "cgroup v1",
        (None, Some(_)) => "cgroup v2",
        (None, None) => "none",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions() {
        let text = "5:memory:/a/b\n2:cpu,cpuacct:/c\n0::/d:e\n";
        assert_eq!(group_of(text, "memory"), Some("/a/b"));
        assert_eq!(group_of(text, "cpu"), Some("/c"));
        assert_eq!(group_of(text, ""), Some("/d:e"));
        assert_eq!(group_of("0::/only-v2\n", "memory"), None);
    }

    #[test]
    fn cpu_limits() {
        assert_eq!(parse_cpu_max("150000 100000\n"), Some((150_000, 100_000)));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
    }

    #[test]
    fn this_process_can_be_asked() {
        memory_controller().unwrap();
        if let Some(memory) = memory() {
            assert!(memory.limit < NO_LIMIT);
        }
    }
}
