//! What `pagecrew reclaim` keeps free ahead of demand, for everybody to read: whoever judges by the kernel's figure of available memory would
//! take it for memory that programs have taken.
//!
//! A line of text in a file of root's. It says when it was written, and is written again with each look while more is kept free than the
//! operator's setting makes. So what a process has left that was killed or stopped is void a second later, and so is everything that is not
//! such a line.

use crate::sys::Errno;
use rustix::fs::{FileType, Mode, OFlags};
use std::ffi::CStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where it is: in memory, and writable for a service for which all other files are not.
const PATH: &CStr = c"/dev/shm/pagecrew-ahead";
/// All lines are of this length, so that one takes the place of another whole.
const LINE: usize = 160;
const BEGINNING: &str = "pagecrew ahead 1";

/// What is kept free at a moment, in bytes, over all zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// When.
    pub at_ns: u64,
    /// Up to the watermark min.
    pub min: u64,
    /// Between the watermarks min and low, with the operator's own setting.
    pub own_gap: u64,
    /// With the setting as it is.
    pub gap: u64,
}

impl Ahead {
    /// As it is written.
    fn text(&self) -> String {
        let Ahead { at_ns, min, own_gap, gap } = self;
        let text = format!("{BEGINNING} {at_ns} {min} {own_gap} {gap}");
        let text = format!("{text} {:016x}", check(&text));
        format!("{text:<width$}\n", width = LINE - 1)
    }

    /// `None` for whatever is no such line.
    pub fn parse(text: &str) -> Option<Ahead> {
        let (text, sum) = text.trim_end().rsplit_once(' ')?;
        if sum.len() != 16 || u64::from_str_radix(sum, 16).ok()? != check(text) {
            return None;
        }
        let mut words = text.strip_prefix(BEGINNING)?.split_ascii_whitespace();
        let mut next = || words.next()?.parse().ok();
        let ahead = Ahead { at_ns: next()?, min: next()?, own_gap: next()?, gap: next()? };
        words.next().is_none().then_some(ahead)
    }
}

/// Tells a line that was read while another one was written (FNV-1a).
fn check(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What is published, if anything is.
pub fn read() -> Option<Ahead> {
    read_at(PATH, 0)
}

/// Only what this user has published in a file that nobody else may write to: everybody can make files there.
fn read_at(path: &CStr, user: u32) -> Option<Ahead> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let facts = rustix::fs::fstat(&file).ok()?;
    let regular = FileType::from_raw_mode(facts.st_mode) == FileType::RegularFile;
    if !regular || facts.st_uid != user || facts.st_mode & 0o022 != 0 {
        return None;
    }
    let mut room = [0; LINE];
    // Again where it was written just then.
    (0..3).find_map(|_| {
        let count = rustix::io::pread(&file, &mut room[..], 0).ok()?;
        Ahead::parse(std::str::from_utf8(&room[..count]).ok()?)
    })
}

/// Publishes. One process at a time may, which has the lock of the setting. Dropping it takes the file away.
#[derive(Debug)]
pub struct Publisher {
    /// `None` where there can't be one: then others judge as if nothing were kept free.
    file: Option<File>,
    path: PathBuf,
    empty: bool,
}

impl Publisher {
    /// Makes the file anew, with nothing in it.
    pub fn new() -> Publisher {
        Publisher::at(Path::new(PATH.to_str().unwrap_or_default()))
    }

    fn at(path: &Path) -> Publisher {
        // What is there may be somebody else's.
        let _ = std::fs::remove_file(path);
        let make = || -> Result<File, Errno> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
            // Whatever the umask is.
            rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)?;
            Ok(file.into())
        };
        Publisher { file: make().ok(), path: path.to_owned(), empty: true }
    }

    /// From now on, this is published.
    pub fn publish(&mut self, ahead: Option<Ahead>) {
        let Some(file) = &self.file else { return };
        match ahead {
            Some(ahead) => {
                let _ = file.write_all_at(ahead.text().as_bytes(), 0);
                self.empty = false;
            }
            None if !self.empty => {
                let _ = file.set_len(0);
                self.empty = true;
            }
            None => {}
        }
    }
}

impl Default for Publisher {
    fn default() -> Publisher {
        Publisher::new()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ffi::CString;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn place() -> (tempfile::TempDir, PathBuf, CString) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ahead");
        let name = CString::new(path.to_str().unwrap()).unwrap();
        (directory, path, name)
    }

    const AHEAD: Ahead = Ahead { at_ns: 7, min: 60 << 20, own_gap: 24 << 20, gap: 600 << 20 };

    #[test]
    fn what_is_published_is_read_until_it_ends() {
        let (_directory, path, name) = place();
        assert_eq!(read_at(&name, own()), None);
        std::fs::write(&path, "somebody's").unwrap();
        let mut publisher = Publisher::at(&path);
        assert_eq!(read_at(&name, own()), None);
        for ahead in [AHEAD, Ahead { at_ns: u64::MAX, min: u64::MAX, own_gap: u64::MAX, gap: u64::MAX }, AHEAD] {
            publisher.publish(Some(ahead));
            assert_eq!(read_at(&name, own()), Some(ahead));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), LINE as u64);
        }
        publisher.publish(None);
        assert_eq!(read_at(&name, own()), None);
        publisher.publish(Some(AHEAD));
        drop(publisher);
        assert!(!path.exists());
    }

    #[test]
    fn what_somebody_else_may_have_written_is_void() {
        let (_directory, path, name) = place();
        std::fs::write(&path, AHEAD.text()).unwrap();
        assert_eq!(read_at(&name, own()), Some(AHEAD));
        assert_eq!(read_at(&name, own() + 1), None);
        std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read_at(&name, own()), None);
        std::fs::remove_file(&path).unwrap();
        let other = path.with_extension("other");
        std::fs::write(&other, AHEAD.text()).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert_eq!(read_at(&name, own()), None);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read_at(&name, own()), None);
        // Nobody waits for whoever opens a pipe there.
        std::fs::remove_dir(&path).unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(read_at(&name, own()), None);
    }

    #[test]
    fn a_reader_beside_a_writer_gets_a_whole_line_or_none() {
        let (_directory, path, name) = place();
        let mut publisher = Publisher::at(&path);
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                for number in 0..20_000 {
                    let (min, own_gap, gap) = (number, number * 7, number * 1_000_003);
                    publisher.publish(Some(Ahead { at_ns: number, min, own_gap, gap }));
                }
                publisher
            });
            while !writer.is_finished() {
                let Some(Ahead { at_ns, min, own_gap, gap }) = read_at(&name, own()) else { continue };
                assert!(min == at_ns && own_gap == 7 * at_ns && gap == 1_000_003 * at_ns);
            }
            let _publisher = writer.join().unwrap();
            assert_eq!(read_at(&name, own()).map(|ahead| ahead.at_ns), Some(19_999));
        });
    }

    proptest! {
        #[test]
        fn whatever_is_no_such_line_is_none(text in "[a-z0-9 ]{0,100}", place in 0..100usize, byte in 0u8..128) {
            prop_assert_eq!(Ahead::parse(&text), None);
            let mut line = AHEAD.text().into_bytes();
            let before = std::mem::replace(&mut line[place], byte);
            let parsed = Ahead::parse(std::str::from_utf8(&line).unwrap());
            // Blanks at the end say nothing, nor do capitals in the sum.
            prop_assert!(parsed.is_none() || byte == before || (parsed == Some(AHEAD) && place >= 40));
        }
    }
}
