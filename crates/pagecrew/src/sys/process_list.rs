//! The processes that there are, what they are called, and how much anonymous memory they have: what `/proc` says of each at little cost.

use super::{Errno, PAGE_SIZE, procfs};
use std::path::Path;

/// The numbers of all processes, in no order. `root` is `/`, or the top of a made-up tree, here and below.
///
/// # Errors
/// Those of reading the directory.
pub fn pids(root: &Path) -> Result<Vec<u32>, Errno> {
    let entries = std::fs::read_dir(root.join("proc"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The name of process `pid` (`/proc/PID/comm`, up to 15 bytes). It may hold anything.
///
/// # Errors
/// `ENOENT` and `ESRCH` where it has gone.
pub fn name(root: &Path, pid: u32) -> Result<String, Errno> {
    let mut name = procfs::text_under(root, &format!("proc/{pid}/comm"), 256)?;
    name.truncate(name.strip_suffix('\n').unwrap_or(&name).len());
    Ok(name)
}

/// Bytes of resident memory of process `pid` that are of no file (`/proc/PID/statm`); 0 for a thread of the kernel.
///
/// # Errors
/// As [`name`]; `EILSEQ` where the file has not what it should have.
pub fn anonymous(root: &Path, pid: u32) -> Result<u64, Errno> {
    parse(&procfs::text_under(root, &format!("proc/{pid}/statm"), 256)?).ok_or(Errno(libc::EILSEQ))
}

/// The second and the third number are resident pages and those of files among them, of seven.
fn parse(text: &str) -> Option<u64> {
    let mut words = text.strip_suffix('\n')?.split(' ').map(|word| word.parse::<u64>().ok());
    let (_, resident, of_files) = (words.next()??, words.next()??, words.next()??);
    resident.saturating_sub(of_files).checked_mul(PAGE_SIZE as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn this_process_is_among_them() {
        let root = Path::new("/");
        let this = std::process::id();
        assert!(pids(root).unwrap().contains(&this));
        assert!(!name(root, this).unwrap().is_empty());
        assert!(anonymous(root, this).unwrap() > 0);
        assert!(name(root, u32::MAX).is_err() && anonymous(root, u32::MAX).is_err());
    }

    #[test]
    fn made_up_processes() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(pids(root.path()), Err(Errno(libc::ENOENT)));
        for (name, comm, statm) in
            [("1", &b"a b\n"[..], "100 50 20 1 0 30 0\n"), ("2", b"\xff\x1b", "0 0 0 0 0 0 0\n"), ("self", b"x\n", "")]
        {
            let directory = root.path().join("proc").join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("comm"), comm).unwrap();
            fs::write(directory.join("statm"), statm).unwrap();
        }
        let mut found = pids(root.path()).unwrap();
        found.sort_unstable();
        assert_eq!(found, [1, 2]);
        assert_eq!((name(root.path(), 1), anonymous(root.path(), 1)), (Ok("a b".into()), Ok(30 << 12)));
        assert_eq!((name(root.path(), 2), anonymous(root.path(), 2)), (Ok("\u{fffd}\u{1b}".into()), Ok(0)));
        assert_eq!(anonymous(root.path(), 3), Err(Errno(libc::ENOENT)));
        for text in ["", "\n", "1 2\n", "1 x 3\n", "1 2 3", "1 99999999999999999999 3\n"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("1 2 3\n"), Some(0));
    }
}
