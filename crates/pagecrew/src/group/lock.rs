//! The lock of whoever holds a group: a file that nobody else can open. Whoever can open a file can lock it, and everybody can read those of a
//! control group.

use super::hold::HoldError;
use crate::stats;
use crate::sys::Errno;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "hold";

/// The lock. It belongs to the open file, which the guard shares: it is free again when both have ended, or this was dropped.
#[derive(Debug)]
pub(super) struct Lock {
    pub file: File,
    path: PathBuf,
}

impl Lock {
    /// That of the group with the directory `group`; `None` if somebody has it.
    ///
    /// # Errors
    /// [`HoldError::Refused`] with the place where the file can't be made.
    pub fn of(group: &Path) -> Result<Option<Lock>, HoldError> {
        let refused = |path: &Path| {
            let path = path.to_owned();
            move |errno| HoldError::Refused(path, errno)
        };
        let about = group.metadata().map_err(Errno::from).map_err(refused(group))?;
        let own = stats::directory_of(rustix::process::geteuid().as_raw());
        let directory = own.join(DIRECTORY);
        for directory in [&own, &directory] {
            stats::own_directory(directory).map_err(refused(directory))?;
        }
        let path = directory.join(format!("{}-{}", about.dev(), about.ino()));
        let open = || -> Result<Option<File>, Errno> {
            loop {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
                let file = options.open(&path).map_err(Errno::from)?;
                match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                    result => result?,
                }
                // Whoever had it has removed it since it was opened here? Then others make another one.
                if file.metadata().map_err(Errno::from)?.nlink() > 0 {
                    return Ok(Some(file));
                }
            }
        };
        let file = open().map_err(refused(&path))?;
        Ok(file.map(|file| Lock { file, path }))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // Not left to the end of the file: a child of this process may have it.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_it_and_nothing_is_left() {
        let group = tempfile::tempdir().unwrap();
        let lock = Lock::of(group.path()).unwrap().unwrap();
        assert_eq!(lock.file.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(Lock::of(group.path()).unwrap().is_none());
        let path = lock.path.clone();
        drop(lock);
        assert!(!path.exists());
        assert!(Lock::of(group.path()).unwrap().is_some());
    }
}
