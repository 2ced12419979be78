//! A control group, with a limit on its memory or without.

use crate::kept::Kept;
use anyhow::{Context, Result, bail};
use pagecrew::sys::group_memory;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which version of control groups limits memory here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Where control groups for memory are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    mount: PathBuf,
    version: Version,
}

impl Hierarchy {
    /// The one of this machine; `None` where there is none in which groups can be made.
    pub fn find() -> Option<Hierarchy> {
        let mounts = fs::read_to_string("/proc/mounts").ok()?;
        let controllers = |mount: &Path| fs::read_to_string(mount.join("cgroup.subtree_control")).unwrap_or_default();
        let hierarchy = Hierarchy::among(&mounts, controllers)?;
        hierarchy.group("try", Some(1 << 30)).ok()?.remove().ok()?;
        Some(hierarchy)
    }

    /// The first of `mounts` that limits memory; `controllers` are those that version 2 hands down from a mount.
    fn among(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<Hierarchy> {
        mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (mount, kind, options) = (PathBuf::from(fields.next()?), fields.next()?, fields.next()?);
            let version = match kind {
                "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
                "cgroup2" if controllers(&mount).split_whitespace().any(|name| name == "memory") => Version::Two,
                _ => return None,
            };
            Some(Hierarchy { mount, version })
        })
    }

    /// A new group, for at most `limit` bytes of memory if there is one.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn group(&self, name: &str, limit: Option<usize>) -> Result<Group> {
        let path = self.mount.join(format!("pagecrew-bench-{}-{name}", std::process::id()));
        let kept = Kept::group(&path)?;
        let group = Group { path, version: self.version, kept };
        let Some(limit) = limit.map(|limit| limit.to_string()) else { return Ok(group) };
        let file = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        group.write(file, &limit)?;
        Ok(group)
    }
}

/// A control group. It is removed, with what is in it, where it is dropped.
pub struct Group {
    path: PathBuf,
    version: Version,
    kept: Kept,
}

impl Group {
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Has `command` start inside the group: memory is charged to the group that a process is in when it touches it.
    ///
    /// # Errors
    /// If the group's path can't be.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let members = CString::new(self.path.join("cgroup.procs").as_os_str().as_bytes())?;
        let enter = move || {
            // SAFETY: the path is a C string and the text is as long as it says; only system calls between fork and
            // exec.
            let written = unsafe {
                let file = libc::open(members.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                let written = libc::write(file, c"0".as_ptr().cast(), 1);
                libc::close(file);
                written
            };
            if written == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: the closure makes system calls and touches no memory but its own string.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }

    /// Nothing of it is swapped from now on.
    ///
    /// # Errors
    /// If the kernel refuses that.
    pub fn keep_from_swap(&self) -> Result<()> {
        // Without swap in the kernel, there is no such file.
        match self.version {
            Version::One => {
                let limit = fs::read_to_string(self.path.join("memory.limit_in_bytes"))?;
                self.write_if_there("memory.memsw.limit_in_bytes", limit.trim())
            }
            Version::Two => self.write_if_there("memory.swap.max", "0"),
        }
    }

    /// The most memory that the group ever used, in MiB; `None` where the kernel doesn't tell (version 2 before 5.19).
    pub fn peak_mib(&self) -> Option<f64> {
        let name = match self.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        };
        let bytes: f64 = fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok()?;
        Some(bytes / f64::from(1 << 20))
    }

    /// How often tasks were at its limit so far.
    ///
    /// # Errors
    /// If it does not say.
    pub fn times_at_limit(&self) -> Result<f64> {
        let read = |name: &str| fs::read_to_string(self.path.join(name)).with_context(|| self.path());
        let times = match self.version {
            Version::One => read("memory.failcnt")?.trim().parse().ok(),
            Version::Two => group_memory::times_at_limit(&read("memory.events")?),
        };
        times.map(|times: u64| times as f64).context("how often tasks were at a limit")
    }

    /// So many pages of its page cache came back from the disk so far, after they were reclaimed; `None` where the kernel
    /// doesn't tell (before 5.9).
    pub fn refaults(&self) -> Option<f64> {
        refaults(&fs::read_to_string(self.path.join("memory.stat")).ok()?)
    }

    /// Removes it.
    ///
    /// # Errors
    /// If something can't be removed from it.
    pub fn remove(self) -> Result<()> {
        self.kept.undo()
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path = self.path.join(name);
        fs::write(&path, value).with_context(|| path.display().to_string())
    }

    fn write_if_there(&self, name: &str, value: &str) -> Result<()> {
        match fs::write(self.path.join(name), value) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => bail!("{name} of {}: {error}", self.path()),
            _ => Ok(()),
        }
    }
}

/// Pages of files that came back, of a `memory.stat`.
fn refaults(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("workingset_refault_file ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_cache_that_came_back_is_counted_where_the_kernel_does() {
        let stat =
            "cache 1\nworkingset_refault_anon 7\nworkingset_refault_file 4021\ntotal_workingset_refault_file 5000\n";
        assert_eq!(refaults(stat), Some(4021.0));
        assert_eq!(refaults("cache 1\nworkingset_refault 3\n"), None);
    }

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let one = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                   cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                   cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let two = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        let find = |mounts, controllers: &str| {
            let found = Hierarchy::among(mounts, |_| controllers.to_owned())?;
            Some((found.mount.display().to_string(), found.version))
        };
        assert_eq!(find(one, ""), Some(("/sys/fs/cgroup/memory".to_owned(), Version::One)));
        assert_eq!(find(two, "cpu memory pids\n"), Some(("/sys/fs/cgroup".to_owned(), Version::Two)));
        assert_eq!(find(two, "cpu pids\n"), None);
    }
}
