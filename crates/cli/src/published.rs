//! Finding the counters that a process publishes.

use pagecrew::stats::{self, ReadError, Snapshot};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The counters of process `pid`, which may be a zombie, and the directory that they were in: this user's, or that of the user
/// whom the process runs as, which root may read. (A server that root starts changes to another user before it does anything
/// large.)
pub fn read(pid: u32) -> Result<(PathBuf, Snapshot), ReadError> {
    let directory = stats::directory();
    let absent = match stats::read(&directory, pid) {
        Err(error @ ReadError::NotThere(_)) => error,
        result => return result.map(|snapshot| (directory, snapshot)),
    };
    let other = directory_of_its_user(pid).filter(|other| *other != directory).ok_or(absent.clone())?;
    let snapshot = stats::read(&other, pid).map_err(|_| absent)?;
    Ok((other, snapshot))
}

/// Where the process publishes if nobody has said otherwise.
fn directory_of_its_user(pid: u32) -> Option<PathBuf> {
    if std::env::var_os("PAGECREW_STATS_DIR").is_some() {
        return None;
    }
    let user = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    Some(stats::directory_of(user))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_publishes_nothing() {
        assert!(matches!(read(1), Err(ReadError::NotThere(_))));
        assert!(matches!(read(u32::MAX), Err(ReadError::NotThere(_))));
    }

    #[test]
    fn this_process_publishes_where_its_user_does() {
        // SAFETY: takes nothing and cannot fail.
        let user = unsafe { libc::geteuid() };
        if std::env::var_os("PAGECREW_STATS_DIR").is_none() {
            let expected = stats::directory_of(user);
            assert_eq!(directory_of_its_user(std::process::id()), Some(expected));
        }
    }
}
