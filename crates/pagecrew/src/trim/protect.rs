//! What a process can do to be left alone.
//!
//! Zero on purpose is zero, too: memory that was touched so that later writes don't fault, or that is read as a source of zeroes. A
//! process says so in a file, `/dev/shm/pagecrew-UID/no-trim/PID`. It may be made by anything, for instance by `touch`: a file without
//! lines means all of the process. Otherwise each line is one of these:
//!
//! ```text
//! started 4711                      the file counts only for the process that was started at this time (field 22 of /proc/PID/stat)
//! all                               all of it is to be left alone
//! 7f0000000000-7f0000400000         these addresses
//! [heap]                            the mappings with this name
//! ```
//!
//! [`exclude`] and [`exclude_all`] write it for the calling process, with the time in it, so that a file that is left over protects
//! nobody else. A file that is neither the process's own user's nor root's is passed over. More than 256 exclusions, or 64 KiB, mean all of
//! the process.

use super::options::Exclusion;
use crate::stats;
use crate::sys::Errno;
use crate::sys::memory::Range;
use crate::sys::process::start_ticks;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "no-trim";
const STARTED: &str = "started ";
const ALL: &str = "all";
/// A longer file, and one with more exclusions, means all of the process: they would cost whoever trims more than is gained.
const LONGEST: u64 = 64 << 10;
const MOST: usize = 256;

/// What a process wants left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Protected {
    /// Nothing.
    #[default]
    Nothing,
    /// These.
    Some(Vec<Exclusion>),
    /// All of it.
    All,
}

fn path(user: u32, pid: i32) -> PathBuf {
    stats::directory_of(user).join(DIRECTORY).join(pid.to_string())
}

/// What process `pid`, which was started at `start_ticks`, wants left alone.
pub fn of(pid: i32, start_ticks: u64) -> Protected {
    let Ok(user) = fs::metadata(format!("/proc/{pid}")).map(|about| about.uid()) else { return Protected::Nothing };
    read(&path(user, pid), user, start_ticks)
}

fn read(path: &Path, user: u32, start_ticks: u64) -> Protected {
    // Not through a link, which could lead anywhere, and not waiting for somebody at the other end of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else { return Protected::Nothing };
    let valid = file.metadata().is_ok_and(|about| about.is_file() && (about.uid() == user || about.uid() == 0));
    let mut text = Vec::new();
    if !valid || file.take(LONGEST + 1).read_to_end(&mut text).is_err() {
        return Protected::Nothing;
    }
    if text.len() as u64 > LONGEST {
        return Protected::All;
    }
    parse(&String::from_utf8_lossy(&text), start_ticks)
}

fn parse(text: &str, start_ticks: u64) -> Protected {
    let mut exclusions = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(started) = line.strip_prefix(STARTED) {
            if started.trim().parse() != Ok(start_ticks) {
                return Protected::Nothing;
            }
        } else if line == ALL {
            return Protected::All;
        } else {
            // Whoever wrote what can't be read wanted something left alone.
            let Ok(exclusion) = Exclusion::parse(line) else { return Protected::All };
            if exclusions.len() == MOST {
                return Protected::All;
            }
            exclusions.push(exclusion);
        }
    }
    if exclusions.is_empty() { Protected::All } else { Protected::Some(exclusions) }
}

/// Has `range` of this process left alone by whoever trims it, as long as the process runs.
///
/// # Errors
/// Those of making the file: `/dev/shm` is not there or not writable.
pub fn exclude(range: Range) -> io::Result<()> {
    write(&format!("{:#x}-{:#x}\n", range.start, range.end()))
}

/// Has all of this process left alone.
///
/// # Errors
/// As [`exclude`].
pub fn exclude_all() -> io::Result<()> {
    write(&format!("{ALL}\n"))
}

fn write(line: &str) -> io::Result<()> {
    let error = |error: Errno| io::Error::from_raw_os_error(error.0);
    let (user, pid) = (rustix::process::geteuid().as_raw(), std::process::id() as i32);
    let (path, ticks) = (path(user, pid), start_ticks(pid).map_err(error)?);
    let directories = path.ancestors().skip(1).take(2).collect::<Vec<_>>();
    for directory in directories.into_iter().rev() {
        stats::own_directory(directory).map_err(error)?;
    }
    // A file that was left over by another process with this number is in the way; one that somebody made for all of this process stays.
    match fs::read_to_string(&path).map(|text| parse(&text, ticks)) {
        Ok(Protected::All) => return Ok(()),
        Ok(Protected::Nothing) => fs::remove_file(&path)?,
        Ok(Protected::Some(_)) | Err(_) => {}
    }
    let mut file =
        OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path)?;
    // In one piece, so that nobody reads a part of it and takes it for all.
    let begin = if file.metadata()?.len() == 0 { format!("{STARTED}{ticks}\n") } else { String::new() };
    file.write_all((begin + line).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn files() {
        let range = Exclusion::Range(Range { start: 0x20_0000, len: 0x20_0000 });
        assert_eq!(parse("", 7), Protected::All);
        assert_eq!(parse("\n \n", 7), Protected::All);
        assert_eq!(parse("started 7\n", 7), Protected::All);
        assert_eq!(parse("started 8\nall\n", 7), Protected::Nothing);
        assert_eq!(parse("started 7\n0x200000-0x400000\n", 7), Protected::Some(vec![range.clone()]));
        assert_eq!(
            parse("200000-400000\n[heap]", 7),
            Protected::Some(vec![range, Exclusion::Mapping("[heap]".into())])
        );
        assert_eq!(parse("200000-400000\nall\n", 7), Protected::All);
        assert_eq!(parse("400000-200000\n", 7), Protected::All);
        let many = |count: usize| parse(&"[heap]\n".repeat(count), 7);
        assert!(matches!(many(256), Protected::Some(exclusions) if exclusions.len() == 256));
        assert_eq!(many(257), Protected::All);
    }

    proptest! {
        #[test]
        fn no_file_is_too_strange(text: String, ticks: u64) {
            parse(&text, ticks);
        }
    }

    #[test]
    fn a_file_of_somebody_else_or_of_another_kind_is_passed_over() {
        let directory = std::env::temp_dir().join(format!("pagecrew-protect-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (file, link) = (directory.join("1"), directory.join("2"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let owner = fs::metadata(&file).unwrap().uid();
        assert_eq!(read(&file, owner, 7), Protected::All);
        if owner != 0 {
            assert_eq!(read(&file, owner + 1, 7), Protected::Nothing);
        }
        for other in [&link, &directory, &directory.join("3")] {
            assert_eq!(read(other, owner, 7), Protected::Nothing);
        }
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn this_process_can_protect_itself() {
        let user = rustix::process::geteuid().as_raw();
        let pid = std::process::id() as i32;
        let ticks = start_ticks(pid).unwrap();
        let ranges = [Range { start: 0x20_0000, len: 0x20_0000 }, Range { start: 0x60_0000, len: 0x20_0000 }];
        fs::create_dir_all(path(user, pid).parent().unwrap()).unwrap();
        fs::write(path(user, pid), "started 1\nall\n").unwrap();
        assert_eq!(of(pid, ticks), Protected::Nothing);
        ranges.iter().for_each(|&range| exclude(range).unwrap());
        assert_eq!(of(pid, ticks), Protected::Some(ranges.map(Exclusion::Range).to_vec()));
        assert_eq!(of(pid, ticks + 1), Protected::Nothing);
        exclude_all().unwrap();
        assert_eq!(of(pid, ticks), Protected::All);
        exclude(ranges[0]).unwrap();
        assert_eq!(of(pid, ticks), Protected::All);
        fs::remove_file(path(user, pid)).unwrap();
    }
}
