//! The lock of whoever holds a group or changes a setting of the machine: a file that nobody else can open. Whoever can open a file can lock
//! it, and everybody can read those of a control group.

use super::marker::Marker;
use crate::stats;
use crate::sys::Errno;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const DIRECTORY: &str = "hold";

/// The place where the file can't be made or written, and why.
#[derive(Debug)]
pub(crate) struct LockError(pub PathBuf, pub Errno);

/// The lock. It belongs to the open file, which the guard shares: it is free again when both have ended, or this was dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    pub file: File,
    path: PathBuf,
    /// Not released.
    held: bool,
}

impl Lock {
    /// That of the group with the directory `group`; `None` if somebody has it.
    pub fn of(group: &Path) -> Result<Option<Lock>, LockError> {
        let about = group.metadata().map_err(|error| LockError(group.to_owned(), error.into()))?;
        let lock = Lock::named(&format!("{}-{}", about.dev(), about.ino()))?;
        if let Some(directory) = lock.as_ref().and_then(|lock| lock.path.parent()) {
            remove_left(directory);
        }
        Ok(lock)
    }

    /// That with a name; `None` if somebody has it.
    pub fn named(name: &str) -> Result<Option<Lock>, LockError> {
        let refused = |path: &Path| {
            let path = path.to_owned();
            move |errno| LockError(path, errno)
        };
        let own = stats::directory_of(rustix::process::geteuid().as_raw());
        let directory = own.join(DIRECTORY);
        for directory in [&own, &directory] {
            stats::own_directory(directory).map_err(refused(directory))?;
        }
        let path = directory.join(name);
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
        Ok(file.map(|file| Lock { file, path, held: true }))
    }

    /// What is written in the file, for what has no attributes of its own: there is something only while a change may have to be undone.
    pub fn marker(&self) -> Option<Marker> {
        let mut buffer = [0; 2 * Self::LINE];
        let count = self.file.read_at(&mut buffer, 0).ok()?;
        Marker::parse(std::str::from_utf8(&buffer[..count]).ok()?.trim_end())
    }

    /// Writes a marker into the file, or nothing.
    pub fn mark(&self, marker: Option<&Marker>) -> Result<(), LockError> {
        // All are of one length, nothing as well, so that one takes the place of another in a single write: whenever this process is killed, one is
        // there. And so the first one alone takes a page of the file system, which others may have filled by the time of the next.
        let line = format!("{:<1$}\n", marker.map(Marker::text).unwrap_or_default(), Self::LINE);
        self.file.write_all_at(line.as_bytes(), 0).map_err(|error| LockError(self.path.clone(), error.into()))
    }

    /// The file.
    #[cfg(test)]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets others have it. Once is enough.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.held) {
            let _ = std::fs::remove_file(&self.path);
            // Not left to the end of the file: a child of this process may have it.
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }

    /// Longer than any marker of numbers.
    const LINE: usize = 96;
}

/// What a killed process has left stays for so long: it is its successor's, who would find it locked for a moment here.
const SUCCESSORS: Duration = Duration::from_secs(60);

/// Removes what processes that were killed have left of groups that nobody watches any more: files that nothing is written in, and that nobody
/// has locked. Otherwise there would be one more for each kill.
fn remove_left(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_of_a_group) {
            continue;
        }
        let age = entry.metadata().ok().and_then(|about| about.modified().ok()?.elapsed().ok());
        if age.is_none_or(|age| age < SUCCESSORS) {
            continue;
        }
        let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(entry.path()) else {
            continue;
        };
        // Whoever opens it meanwhile sees that it is gone, once he has the lock, and makes another one.
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
            && file.metadata().is_ok_and(|about| about.len() == 0 && about.nlink() > 0)
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a file has the name that [`Lock::of`] gives.
fn is_of_a_group(name: &str) -> bool {
    name.split_once('-')
        .is_some_and(|numbers| [numbers.0, numbers.1].iter().all(|number| number.parse::<u64>().is_ok()))
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn one_at_a_time_has_it_and_nothing_is_left() {
        let group = tempfile::tempdir().unwrap();
        let lock = Lock::of(group.path()).unwrap().unwrap();
        assert_eq!(lock.file.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(Lock::of(group.path()).unwrap().is_none());
        let markers = [(10, 200), (10, 7), (u64::MAX, u64::MAX)];
        for (before, next) in markers {
            let marker = Marker::High { before: Some(before), ours: [None, Some(next)] };
            lock.mark(Some(&marker)).unwrap();
            assert_eq!(lock.marker(), Some(marker));
        }
        lock.mark(None).unwrap();
        assert_eq!(lock.marker(), None);
        let path = lock.path.clone();
        drop(lock);
        assert!(!path.exists());
        assert!(Lock::of(group.path()).unwrap().is_some());
    }

    #[test]
    fn what_killed_processes_have_left_goes_with_the_next_group() {
        let groups = [(); 5].map(|()| tempfile::tempdir().unwrap());
        let [next, killed, lately, marked, held] = &groups;
        let path = |group: &tempfile::TempDir| {
            let lock = Lock::of(group.path()).unwrap().unwrap();
            lock.path.clone()
        };
        let (killed, lately, marked) = (path(killed), path(lately), path(marked));
        let held = Lock::of(held.path()).unwrap().unwrap();
        let long_ago = SystemTime::now() - 2 * SUCCESSORS;
        for (path, text, modified) in
            [(&killed, "", long_ago), (&lately, "", SystemTime::now()), (&marked, "something to undo", long_ago)]
        {
            std::fs::write(path, text).unwrap();
            File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
        }
        held.file.set_modified(long_ago).unwrap();
        let _next = Lock::of(next.path()).unwrap().unwrap();
        assert!(!killed.exists() && lately.exists() && marked.exists() && held.path.exists());
        assert!(is_of_a_group("32-10001") && !is_of_a_group("watermark_scale_factor") && !is_of_a_group("32-"));
        for path in [lately, marked] {
            std::fs::remove_file(path).unwrap();
        }
    }
}
