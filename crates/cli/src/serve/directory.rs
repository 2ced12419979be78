//! The directory of a supervisor: the sockets between it and its services, for root alone, and the locks that say who is there.

use super::part::Part;
use crate::failure::Failure;
use pagecrew::pool;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long processes of a former supervisor are waited for.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);

/// The directory, had alone. When this is dropped, it goes with what is in it.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Locked by the supervisor. One that was killed has it no more.
    here: File,
    /// Locked as long as the supervisor or a process of its services is there, which inherit it.
    lives: File,
}

impl Directory {
    /// Makes and takes the directory. Processes of a former supervisor that have not ended yet are waited for: `wait` waits, for the given time at
    /// most, and says whether to go on. `None` if not.
    ///
    /// # Errors
    /// If another supervisor has it, if the former one's processes do not end, or if others may write there.
    pub fn take(path: &Path, mut wait: impl FnMut(Duration) -> bool) -> Result<Option<Directory>, Failure> {
        let failed = |error: io::Error| failure(path, &error);
        make(path).map_err(failed)?;
        let path = safe(path)?;
        let here = own(&path).map_err(failed)?;
        let taken = || Failure::Failed(format!("another pagecrew serve runs already, with {}", path.display()));
        let here = here.ok_or_else(taken)?;
        let lives = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lives"))
            .map_err(failed)?;
        let until = Instant::now() + PATIENCE;
        while !lock(&lives).map_err(failed)? {
            if Instant::now() >= until {
                return Err(Failure::Failed(format!(
                    "{}: processes of a killed pagecrew serve have not ended after {} s: fuser -v {0}/lives says which",
                    path.display(),
                    PATIENCE.as_secs()
                )));
            }
            if !wait(PAUSE) {
                return Ok(None);
            }
        }
        Ok(Some(Directory { path, here, lives }))
    }

    /// Where a service says how it stands.
    pub fn notify(&self, part: Part) -> PathBuf {
        self.path.join(format!("{part}.notify"))
    }

    /// Where a service serves its metrics.
    pub fn metrics(&self, part: Part) -> PathBuf {
        metrics_in(&self.path, part.name())
    }

    /// Where the supervisor serves its own.
    pub fn own_metrics(&self) -> PathBuf {
        metrics_in(&self.path, OWN)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What processes of its services keep.
    pub fn lives(&self) -> BorrowedFd<'_> {
        self.lives.as_fd()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What a killed process of a service has left.
        for part in Part::SERVICES {
            let _ = std::fs::remove_file(self.metrics(part));
        }
        let _ = std::fs::remove_file(self.path.join("lives"));
        let _ = std::fs::remove_dir(&self.path);
        // Not left to the end of the file, so that whoever comes finds no lock of a directory that has gone.
        let _ = rustix::fs::flock(&self.here, FlockOperation::Unlock);
    }
}

/// The supervisor's name among those of the sockets.
pub const OWN: &str = "serve";

/// The socket of the metrics of `name`.
pub fn metrics_in(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.metrics"))
}

fn failure(path: &Path, error: &io::Error) -> Failure {
    let message = format!("{}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Failure::Impossible(message),
        _ => Failure::Failed(message),
    }
}

/// Makes the directory for its owner alone, those above it for everybody.
fn make(path: &Path) -> io::Result<()> {
    if let Some(above) = path.parent().filter(|above| !above.exists()) {
        DirBuilder::new().recursive(true).create(above)?;
        std::fs::set_permissions(above, Permissions::from_mode(0o755))?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// The path by the way that no link changes, where nobody else can change names; and nobody else can reach what is in it.
fn safe(path: &Path) -> Result<PathBuf, Failure> {
    let not_own = |path: &Path| {
        Failure::Usage(format!("directory: {} is another user's, or others may write to it", path.display()))
    };
    let found = pool::safe_directory(path).map_err(|error| match error {
        pool::Error::NotOwn(path) => not_own(&path),
        error => Failure::Failed(format!("directory: {error}")),
    })?;
    let facts = std::fs::symlink_metadata(&found).map_err(|error| failure(&found, &error))?;
    if !facts.is_dir() || facts.uid() != rustix::process::geteuid().as_raw() {
        return Err(not_own(&found));
    }
    // What others have in it is no directory for this.
    let known = |name: &str| name == "lives" || name.ends_with(".metrics") || name.ends_with(".notify");
    for entry in std::fs::read_dir(&found).map_err(|error| failure(&found, &error))? {
        let name = entry.map_err(|error| failure(&found, &error))?.file_name();
        if !name.to_str().is_some_and(known) {
            return Err(Failure::Usage(format!(
                "directory: there is something else in {}: {}",
                found.display(),
                name.display()
            )));
        }
    }
    std::fs::set_permissions(&found, Permissions::from_mode(0o700)).map_err(|error| failure(&found, &error))?;
    Ok(found)
}

fn lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The directory, locked; `None` if somebody has it. Nobody else can open it.
fn own(path: &Path) -> io::Result<Option<File>> {
    loop {
        let here = File::open(path)?;
        if !lock(&here)? {
            return Ok(None);
        }
        // Whoever had it has removed it since it was opened here? Then another one is made.
        match std::fs::symlink_metadata(path) {
            Ok(facts) if here.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (facts.dev(), facts.ino())) => {
                return Ok(Some(here));
            }
            _ => make(path)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("above/serve");
        (directory, path)
    }

    #[test]
    fn one_supervisor_has_it_and_nothing_is_left() {
        let (_above, path) = place();
        let directory = Directory::take(&path, |_| panic!("nobody to wait for")).unwrap().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        let Err(Failure::Failed(reason)) = Directory::take(&path, |_| true) else { panic!("two at a time") };
        assert!(reason.contains("runs already"), "{reason}");
        std::fs::write(directory.metrics(Part::Pool), "left by a killed one").unwrap();
        drop(directory);
        assert!(!path.exists());
        drop(Directory::take(&path, |_| true).unwrap());
    }

    #[test]
    fn those_that_a_killed_one_has_left_are_waited_for() {
        let (_above, path) = place();
        let directory = Directory::take(&path, |_| true).unwrap().unwrap();
        // As if it had been killed: its lock is free, and its services' is not.
        rustix::fs::flock(&directory.here, FlockOperation::Unlock).unwrap();
        // Who is told to end meanwhile does.
        let mut waits = 0;
        let mut given_up = |_| {
            waits += 1;
            waits < 2
        };
        assert!(Directory::take(&path, &mut given_up).unwrap().is_none());
        let mut waits = 0;
        let next = Directory::take(&path, |_| {
            waits += 1;
            if waits == 3 {
                rustix::fs::flock(&directory.lives, FlockOperation::Unlock).unwrap();
            }
            true
        });
        assert!(next.unwrap().is_some() && waits == 3, "{waits}");
    }

    #[test]
    fn a_directory_with_something_else_in_it_is_refused() {
        let (_above, path) = place();
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("precious"), "").unwrap();
        let Err(Failure::Usage(reason)) = Directory::take(&path, |_| true) else { panic!("taken") };
        assert!(reason.contains("precious"), "{reason}");
        assert!(path.join("precious").exists());
    }
}
