//! Which control groups there are, and which come and go: the directories below the mounts, watched by inotify.
//!
//! A group is made without a limit, gets one later, and may lose it again: whoever writes to one of its files closes it, and then it is looked
//! at. Nothing is looked for by time.

use crate::group::mounts;
use crate::sys::Errno;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// So many directories are watched at most, those near the top first. The kernel needs memory for each, and has a limit of its own.
const DIRECTORIES_MOST: usize = 8192;
/// When so many have gone, it is looked for those that were left out.
const GONE_MOST: usize = DIRECTORIES_MOST / 8;

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
///
/// **Life of a directory.** It is watched when the one above it says that it was made, and no longer when that one says that it was removed.
/// A directory of a control group says nothing of its own end (before Linux 7.1), and its watch would stay, and keep the kernel's memory for it.
#[derive(Debug)]
pub struct Tree {
    inotify: OwnedFd,
    /// By the number of the watch.
    watched: BTreeMap<i32, PathBuf>,
    /// The watch of each.
    watches: HashMap<PathBuf, i32>,
    choice: Choice,
    named: Vec<PathBuf>,
    /// Directories that are not watched, because there are too many.
    left_out: u64,
    /// Directories that have gone since some are left out.
    gone: usize,
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
        let (watched, watches) = (BTreeMap::new(), HashMap::new());
        let mut tree = Tree { inotify, watched, watches, choice, named, left_out: 0, gone: 0 };
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
        let flags =
            WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE | WatchFlags::CLOSE_WRITE | WatchFlags::ONLYDIR;
        if self.watched.len() >= DIRECTORIES_MOST {
            self.left_out += 1;
            return false;
        }
        match inotify::add_watch(&self.inotify, path, flags) {
            Ok(watch) => {
                self.watched.insert(watch, path.to_owned());
                // Another one had the name, if there was a watch by it.
                if let Some(before) = self.watches.insert(path.to_owned(), watch).filter(|&before| before != watch) {
                    self.end_watch(before);
                }
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

    fn end_watch(&mut self, watch: i32) {
        self.watched.remove(&watch);
        // The kernel may have ended it by itself.
        let _ = inotify::remove_watch(&self.inotify, watch);
    }

    /// The directory has gone.
    fn forget(&mut self, path: &Path) {
        if let Some(watch) = self.watches.remove(path) {
            self.end_watch(watch);
            self.gone += usize::from(self.left_out > 0);
        }
    }

    /// What has changed since the last time. `None` where a new tree is to be made: so much has that the kernel has lost count, a group was given
    /// another name (version 1), or there is room again for some that were left out.
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
                // The mount has gone, or nobody has heard of a removal yet.
                self.forget(&path);
                changes.push(Change::Gone(path));
            } else if events.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO)
                && events.contains(ReadFlags::ISDIR)
            {
                return None;
            } else if events.contains(ReadFlags::DELETE | ReadFlags::ISDIR) {
                let path = path.join(OsStr::from_bytes(&name));
                self.forget(&path);
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
        (self.gone < GONE_MOST).then_some(changes)
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
        let gone = tree.changes().unwrap();
        assert!(!gone.is_empty() && gone.iter().all(|change| *change == Change::Gone(path("c/d/e"))), "{gone:?}");
        // A group may have the name of one that has gone.
        fs::create_dir(path("c/d/e")).unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("c/d/e"))]));
        // Also before anybody has heard of the end of that.
        fs::remove_dir(path("c/d/e")).unwrap();
        fs::create_dir(path("c/d/e")).unwrap();
        assert_eq!(tree.changes().unwrap().last(), Some(&Change::Look(path("c/d/e"))));
        fs::write(path("c/d/e/memory.max"), "5").unwrap();
        assert_eq!(tree.changes(), Some(vec![Change::Look(path("c/d/e"))]));
        assert_eq!((tree.left_out(), tree.watched.len(), tree.watches.len()), (0, 6, 6));
        // With another name it is another one: all are looked at anew.
        fs::rename(path("c/d"), path("c/f")).unwrap();
        assert_eq!(tree.changes(), None);
    }

    /// Containers come and go all day. A directory of a control group does not behave as others do, so these are some.
    #[test]
    fn groups_that_come_and_go_leave_nothing_behind() {
        let top = tempfile::tempdir().unwrap();
        let point = mounts::of_memory()
            .first()
            .map(|mount| mount.point().join(format!("pagecrew-tree-{}", std::process::id())));
        let group = point.filter(|group| fs::create_dir(group).is_ok());
        let path = group.as_deref().unwrap_or(top.path());
        let (mut tree, _) = tree(path, Choice::All);
        for round in 0..2000 {
            let inside = path.join(format!("g{}", round % 3));
            fs::create_dir(&inside).unwrap();
            if round % 2 == 0 {
                assert!(tree.changes().unwrap().contains(&Change::Look(inside.clone())));
            }
            fs::remove_dir(&inside).unwrap();
            assert_eq!(tree.changes().unwrap().last(), Some(&Change::Gone(inside)));
            assert_eq!((tree.watched.len(), tree.watches.len(), tree.left_out()), (1, 1, 0));
        }
        if let Some(group) = &group {
            fs::remove_dir(group).unwrap();
        }
    }

    #[test]
    fn those_that_were_left_out_come_when_others_have_gone() {
        let top = tempfile::tempdir().unwrap();
        for number in 0..DIRECTORIES_MOST + 10 {
            fs::create_dir(top.path().join(number.to_string())).unwrap();
        }
        let (mut tree, _) = tree(top.path(), Choice::All);
        assert_eq!(tree.left_out(), 11);
        let mut removed = 0;
        for number in 0..GONE_MOST {
            fs::remove_dir(top.path().join(number.to_string())).unwrap();
            removed += 1;
            if tree.changes().is_none() {
                break;
            }
        }
        assert_eq!(removed, GONE_MOST);
        assert_eq!(self::tree(top.path(), Choice::All).0.left_out(), 0);
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
