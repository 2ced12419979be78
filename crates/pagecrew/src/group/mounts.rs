//! Where control groups are mounted that have something to say about memory (`/proc/self/mountinfo`, 2.6.26).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A mounted hierarchy, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The group that is seen at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Where the group at the top of what is mounted is seen.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// The directory of the group `name`, as `/proc/PID/cgroup` tells it.
    pub fn directory(&self, name: &str) -> PathBuf {
        // A container without a namespace of groups sees its own group at the mount point, and names from the real root.
        let seen = Path::new("/").join(name.trim_start_matches('/'));
        let below = seen.strip_prefix(&self.root).or_else(|_| seen.strip_prefix("/")).unwrap_or(&seen);
        self.point.join(below)
    }
}

/// The hierarchies of version 1 with the memory controller, then those of version 2.
pub(crate) fn of_memory() -> Vec<Mount> {
    parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

fn parse(text: &[u8]) -> Vec<Mount> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for line in text.split(|&byte| byte == b'\n') {
        let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        // The fields before the dash vary in number.
        let (Some(root), Some(point), Some(dash)) =
            (words.get(3), words.get(4), words.iter().position(|word| *word == b"-"))
        else {
            continue;
        };
        let mount = || Mount { root: unescaped(root).into(), point: unescaped(point).into() };
        match (words.get(dash + 1), words.get(dash + 3)) {
            (Some(&b"cgroup"), Some(options)) if options.split(|&byte| byte == b',').any(|word| word == b"memory") => {
                first.push(mount())
            }
            (Some(&b"cgroup2"), _) => second.push(mount()),
            _ => {}
        }
    }
    first.append(&mut second);
    first
}

/// A path in which the kernel has written blanks and the like as `\040`.
fn unescaped(word: &[u8]) -> OsString {
    let mut path = Vec::new();
    let mut rest = word;
    while let [first, tail @ ..] = rest {
        let digits =
            tail.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|byte| matches!(byte, b'0'..=b'7')));
        match digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &tail[3..];
            }
            None => {
                path.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    const TEXT: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw,nsdelegate
33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
34 31 0:31 /docker/7\\040a /sys/fs/cgroup/memory rw master:3 - cgroup cgroup rw,seclabel,memory
nonsense
";

    #[test]
    fn only_hierarchies_of_memory_count() {
        let mounts = parse(TEXT.as_bytes());
        let points: Vec<&OsStr> = mounts.iter().map(|mount| mount.point.as_os_str()).collect();
        assert_eq!(points, ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"]);
        assert_eq!(mounts[0].root, Path::new("/docker/7 a"));
        assert!(parse(b"").is_empty());
    }

    #[test]
    fn names_are_looked_up_from_what_is_seen() {
        let [memory, unified] = &parse(TEXT.as_bytes())[..] else { panic!() };
        for name in ["/docker/7 a/db", "docker/7 a/db", "/db"] {
            assert_eq!(memory.directory(name), Path::new("/sys/fs/cgroup/memory/db"), "{name}");
        }
        assert_eq!(memory.directory("/docker/7 a"), Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(unified.directory("system.slice/db"), Path::new("/sys/fs/cgroup/unified/system.slice/db"));
    }

    #[test]
    fn what_only_looks_like_an_escape_stays() {
        let of = |text: &str| unescaped(text.as_bytes());
        assert_eq!(
            (of("a\\134b"), of("a\\13"), of("\\777"), of("\\")),
            ("a\\b".into(), "a\\13".into(), "\\777".into(), "\\".into())
        );
        assert_eq!(OsStr::from_bytes(b"\xff"), unescaped(b"\\377"));
    }
}
