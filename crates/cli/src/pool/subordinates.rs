//! Whose the users in user namespaces are, by `/etc/subuid`, which changes when a user is added: then it counts as soon as it was read, or he would
//! have a quota for each of his numbers until the settings are read again.

use crate::failure::Failure;
use crate::rereading::Rereading;
use crate::values::parse_user;
use pagecrew::pool::Subordinates;
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use std::ffi::{CStr, OsString};
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where the system has it.
pub const SUBUID: &str = "/etc/subuid";

/// What the file at `path` says now.
pub fn read(path: &Path) -> Result<Subordinates, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        // Without the file, nobody has any.
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        // Else users would have as many quotas as they have numbers.
        Err(error) => return Err(Failure::Failed(format!("{}: {error}", path.display()))),
    };
    Ok(Subordinates::read(&text, |name| parse_user(name).ok()))
}

/// The file, watched through its directory: whoever changes it puts another one in its place.
pub struct Watch {
    /// `None` where the kernel has no more of them: then it is read when the settings are.
    inotify: Option<OwnedFd>,
    name: OsString,
    rereading: Rereading<Subordinates>,
}

impl Watch {
    /// Watches it from now on, and reads it: whoever has read it before may have been a moment too early.
    pub fn new(path: PathBuf) -> Result<Watch, Failure> {
        let name = path.file_name().unwrap_or_default().to_owned();
        let inotify = path.parent().and_then(watch);
        let mut watch = Watch { inotify, name, rereading: Rereading::new(move || read(&path))? };
        watch.read_again();
        Ok(watch)
    }

    /// Reads it again, since somebody else has who may have been slow.
    pub fn read_again(&mut self) {
        self.rereading.begin();
    }

    /// Ready when [`changed`](Watch::changed) may have something.
    pub fn descriptors(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> {
        let inotify = self.inotify.as_ref().map(AsRawFd::as_raw_fd);
        inotify.into_iter().chain([self.rereading.descriptor()]).map(|descriptor| (descriptor, libc::POLLIN))
    }

    /// What it says since it was changed, once that was read. Waits for nobody.
    pub fn changed(&mut self) -> Option<Result<Subordinates, Failure>> {
        if let Some(inotify) = &self.inotify {
            let mut room = [MaybeUninit::uninit(); 4096];
            let mut reader = Reader::new(inotify, &mut room);
            let mut is_changed = false;
            while let Ok(event) = reader.next() {
                // With no name, the kernel has lost count. A name in the file may be that of a user who is made later.
                let is_one = |name: &CStr| name.to_bytes() == self.name.as_bytes() || name == c"passwd";
                is_changed |= event.file_name().is_none_or(is_one);
            }
            if is_changed {
                self.rereading.begin();
            }
        }
        self.rereading.take()
    }
}

fn watch(directory: &Path) -> Option<OwnedFd> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
    let flags = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::DELETE | WatchFlags::ONLYDIR;
    inotify::add_watch(&inotify, directory, flags).ok()?;
    Some(inotify)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn eventually(watch: &mut Watch) -> Result<Subordinates, Failure> {
        let begin = Instant::now();
        loop {
            if let Some(read) = watch.changed() {
                return read;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "nothing was read");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_is_added_counts_however_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("subuid");
        let mut watch = Watch::new(path.clone()).unwrap();
        assert_eq!(watch.descriptors().count(), 2);
        assert_eq!(eventually(&mut watch), Ok(Subordinates::default()));
        assert!(watch.changed().is_none());
        std::fs::write(directory.path().join("other"), "").unwrap();
        assert!(watch.changed().is_none());
        std::fs::write(&path, "1000:100000:65536\n").unwrap();
        assert_eq!(eventually(&mut watch).unwrap().account_of(100_001), 1000);
        std::fs::write(directory.path().join("new"), "1001:100000:65536\n").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        assert_eq!(eventually(&mut watch).unwrap().account_of(100_001), 1001);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(eventually(&mut watch).unwrap().account_of(100_001), 100_001);
        std::fs::create_dir(&path).unwrap();
        std::fs::rename(directory.path().join("other"), path.join("inside")).unwrap();
        assert!(watch.changed().is_none());
        assert!(matches!(read(&path), Err(Failure::Failed(message)) if message.contains("subuid")));
    }
}
