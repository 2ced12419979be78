//! Which control groups there are, and which come and go: the directories below the mounts, watched by inotify.
//!
//! A group is made without a limit, gets one later, and may lose it again: whoever writes to one of its files closes it, and then it is looked
//! at. Nothing is looked for by time.

use crate::group::mounts;
use crate::sys::Errno;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// So many directories are watched at most, those near the top first. The kernel needs memory for each, and has a limit of its own.
const DIRECTORIES_MOST: usize = 8192;

/// Which groups are meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Choice {
    /// Every one with a limit of its own.
    #[default]
    All,
    /// None.
    None,
    /// Those with these names, as `/proc/PID/cgroup` tells them, or directories, and those below them.
    Named(Vec<String>),
}

impl Choice {
    /// Whether the group with this directory is meant.
    fn has(&self, path: &Path, directories: &[PathBuf]) -> bool {
        match self {
            Choice::All => true,
            Choice::None => false,
            Choice::Named(_) => directories.iter().any(|directory| path.starts_with(directory)),
        }
    }

    /// The directories of those that are named, wherever they may be.
    fn directories(&self) -> Vec<PathBuf> {
        let Choice::Named(names) = self else { return Vec::new() };
        let mounts = mounts::of_memory();
        let of = |name: &String| {
            let mounted = mounts.iter().map(|mount| mount.directory(name));
            Some(PathBuf::from(name)).filter(|path| path.is_absolute()).into_iter().chain(mounted).collect::<Vec<_>>()
        };
        names.iter().flat_map(of).collect()
    }
}

/// What has become of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is there, or one of its limits was written: it has to be looked at.
    Look(PathBuf),
    /// It has gone.
    Gone(PathBuf),
}

/// The directories, as they are known.
#[derive(Debug)]
pub struct Tree {
    inotify: OwnedFd,
    watched: BTreeMap<i32, PathBuf>,
    choice: Choice,
    named: Vec<PathBuf>,
    /// Directories that are not watched, because there are too many.
    left_out: u64,
}

impl Tree {
    /// All of them, below the mounts of the memory controller.
    ///
    /// # Errors
    /// `EMFILE` where this user has too many of them.
    pub fn new(choice: Choice) -> Result<(Tree, Vec<Change>), Errno> {
        let tops = mounts::of_memory().into_iter().map(|mount| mount.point().to_owned()).collect();
        Tree::below(tops, choice)
    }

    fn below(tops: Vec<PathBuf>, choice: Choice) -> Result<(Tree, Vec<Change>), Errno> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let named = choice.directories();
        let mut tree = Tree { inotify, watched: BTreeMap::new(), choice, named, left_out: 0 };
        let mut changes = Vec::new();
        if tree.choice != Choice::None {
            tree.walk(tops, &mut changes);
        }
        Ok((tree, changes))
    }

    /// Whether the group with this directory is one of those that are meant.
    pub fn means(&self, path: &Path) -> bool {
        self.choice.has(path, &self.named)
    }

    /// How many directories are not watched, because there are too many.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Watches these directories and those below them, each before those inside.
    fn walk(&mut self, tops: Vec<PathBuf>, changes: &mut Vec<Change>) {
        let mut next = VecDeque::from(tops);
        while let Some(path) = next.pop_front() {
            // First watched, then looked at: what comes in between is seen twice.
            if !self.watch(&path) {
                continue;
            }
            if self.choice.has(&path, &self.named) {
                changes.push(Change::Look(path.clone()));
            }
            let Ok(entries) = fs::read_dir(&path) else { continue };
            let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            next.extend(directories.map(|entry| entry.path()));
        }
    }

    fn watch(&mut self, path: &Path) -> bool {
        let flags = WatchFlags::CREATE | WatchFlags::CLOSE_WRITE | WatchFlags::DELETE_SELF | WatchFlags::ONLYDIR;
        if self.watched.len() >= DIRECTORIES_MOST {
            self.left_out += 1;
            return false;
        }
        match inotify::add_watch(&self.inotify, path, flags) {
            Ok(watch) => {
                self.watched.insert(watch, path.to_owned());
                true
            }
            // The kernel's own limit (fs.inotify.max_user_watches).
            Err(rustix::io::Errno::NOSPC) => {
                self.left_out += 1;
                false
            }
            Err(_) => false,
        }
    }

    /// What has changed since the last time. `None` where so much has that the kernel has lost count: then a new tree is to be made.
    pub fn changes(&mut self) -> Option<Vec<Change>> {
        let mut room = [MaybeUninit::uninit(); 16 << 10];
        let mut seen = Vec::new();
        {
            let mut reader = Reader::new(&self.inotify, &mut room);
            while let Ok(event) = reader.next() {
                let name = event.file_name().map(|name| name.to_bytes().to_vec()).unwrap_or_default();
                seen.push((event.wd(), event.events(), name));
            }
        }
        let mut changes = Vec::new();
        for (watch, events, name) in seen {
            if events.contains(ReadFlags::QUEUE_OVERFLOW) {
                return None;
            }
            let Some(path) = self.watched.get(&watch).cloned() else { continue };
            if events.contains(ReadFlags::IGNORED) {
                self.watched.remove(&watch);
                changes.push(Change::Gone(path));
            } else if events.contains(ReadFlags::CREATE | ReadFlags::ISDIR) {
                self.walk(vec![path.join(OsStr::from_bytes(&name))], &mut changes);
            } else if events.contains(ReadFlags::CLOSE_WRITE) {
                match &name[..] {
                    b"memory.max" | b"memory.high" | b"memory.limit_in_bytes"
                        if self.choice.has(&path, &self.named) =>
                    {
                        changes.push(Change::Look(path));
                    }
                    // The groups inside may have a memory controller from now on.
                    b"cgroup.subtree_control" => {
                        let inside = self.watched.values().filter(|inside| inside.parent() == Some(&path));
                        let inside = inside.filter(|inside| self.choice.has(inside, &self.named));
                        changes.extend(inside.cloned().map(Change::Look));
                    }
                    _ => {}
                }
            }
        }
        Some(changes)
    }
}

impl AsFd for Tree {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(top: &Path, choice: Choice) -> (Tree, Vec<Change>) {
        Tree::below(vec![top.to_owned()], choice).unwrap()
    }

    #[test]
    fn groups_come_and_go() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        fs::create_dir_all(path("a/b")).unwrap();
        let (mut tree, changes) = tree(top.path(), Choice::All);
        assert_eq!(changes, [path(""), path("a"), path("a/b")].map(Change::Look));
        assert_eq!(tree.changes(), Some(vec![]));
        // One that is made with others inside.
        fs::create_dir_all(path("c/d/e")).unwrap();
        let found = tree.changes().unwrap();
        for name in ["c", "c/d", "c/d/e"] {
            assert!(found.contains(&Change::Look(path(name))), "{name}: {found:?}");
        }
        fs::write(path("c/d/memory.max"), "5").unwrap();
        fs::write(path("c/cgroup.procs"), "5").unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("c/d"))]));
        fs::write(path("c/cgroup.subtree_control"), "+memory").unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("c/d"))]));
        fs::remove_dir(path("c/d/e")).unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Gone(path("c/d/e"))]));
        // A group may have the name of one that has gone.
        fs::create_dir(path("c/d/e")).unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("c/d/e"))]));
        assert_eq!(tree.left_out(), 0);
    }

    #[test]
    fn only_those_that_are_meant() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        fs::create_dir_all(path("a/b")).unwrap();
        fs::create_dir_all(path("ab")).unwrap();
        let named =
            Choice::Named(vec![path("a").to_str().unwrap().to_owned(), path("later").to_str().unwrap().to_owned()]);
        let (mut tree, changes) = tree(top.path(), named);
        assert_eq!(changes, [path("a"), path("a/b")].map(Change::Look));
        for name in ["later", "other"] {
            fs::create_dir(path(name)).unwrap();
        }
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("later"))]));
        fs::write(path("ab/memory.max"), "5").unwrap();
        assert_eq!(tree.changes(), Some(vec![]));
        assert_eq!(self::tree(top.path(), Choice::None).1, []);
    }
}
