//! The files of a pool: a private mount, in it those that wait, those that are taken, and those on their way out.
//!
//! A file is made in `ready/`, which nobody but the server may look into, and moves to `taken/` once, when it becomes somebody's. There it
//! is seized: it becomes the server's again, which nobody may open, and only when nobody has it open any more and the kernel has all of its
//! memory back, its name goes. It never moves back: what somebody may have written to goes to the kernel, which zeroes it before
//! anybody sees it again. Numbers of files are random and of inodes never the same twice, so that who remembers one finds nothing.
//!
//! What is known of a file is in its name (`ledger`).
//!
//! **What may wait.** Whoever has a file open can keep it locked (`errands`). To change its owner, mode or length, to rename it and to remove
//! it takes that lock, the latter two together with the directory's; to look at it, to open it and to ask whether others have it open does
//! not. So the first three are done by an errand, the fourth before anybody has the file, and the fifth when nobody has it any more; by an errand,
//! too, since giving the memory of a large file back takes long.

use super::error::Error;
use super::ledger::{Entry, Holding};
use super::options::Backing;
use super::protocol::Until;
use super::state::Found;
use crate::sys::mount::{self, MemoryFs};
use crate::sys::seqpacket::Peer;
use crate::sys::shared_file::{self, Mapped};
use crate::sys::{Errno, HUGE_PAGE_SIZE, clock, numa, procfs};
use rustix::fs::FlockOperation;
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The mount of a pool, and the sole right to it.
#[derive(Debug)]
pub(super) struct Store {
    mount: PathBuf,
    kind: MemoryFs,
    /// Locked as long as it is open.
    _lock: File,
}

/// A file that waits, as a former server left it.
#[derive(Debug)]
pub(super) struct Waiting {
    pub id: u64,
    pub node: usize,
    pub file: Arc<File>,
    pub size: usize,
}

/// What a former server left.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub ready: Vec<Waiting>,
    pub taken: Vec<Found<Arc<File>>>,
}

/// What a mount of reserved pages holds at most, in times of the pool's limit; the others are programs' own. The limit itself is kept by the books.
/// On its way out memory is off the books and still there for a moment, and whoever is promised its place must not find the mount full.
const ROOM: usize = 2;

/// Bytes that a mount of this kind holds at most, for a pool of this limit. What users add to their files, until that is seen or as long as they keep
/// it locked, takes the place of what others were promised: so there is room for it besides, as much as any user has in `/dev/shm`, half of the
/// memory. Of that, something has to be left.
fn room(kind: MemoryFs, limit: usize) -> usize {
    let total = procfs::memory_info().map_or(usize::MAX, |memory| memory.total as usize);
    match kind {
        MemoryFs::Tmpfs => limit.saturating_add(total / 2).min(total / 16 * 15),
        MemoryFs::Hugetlbfs => limit.saturating_mul(ROOM),
    }
}

/// There is room for so many files more, at a kibibyte of the kernel's memory each.
const FREE_FILES: u64 = 16 << 10;

const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

const READY: &str = "ready";
const TAKEN: &str = "taken";
/// The mode of a seized file.
const SEIZED: u32 = 0o000;

impl Store {
    /// Takes possession of `directory`, mounts what is needed there, and finds what a former server left. At most `limit` bytes can be
    /// in files.
    ///
    /// # Errors
    /// [`Error::Served`], [`Error::MayNotMount`], [`Error::NoHugePages`], [`Error::OtherBacking`], and those of the file system.
    pub fn open(directory: &Path, backing: Backing, limit: usize) -> Result<(Store, Left), Error> {
        // By the way that no link changes: whoever can change one could have another directory mounted at.
        let directory = &own_directory(directory)?;
        let lock = lock(directory)?;
        let mount = directory.join("mem");
        make_directory(&mount, 0o755)?;
        let wanted = choose(backing)?;
        let found = mount::mounted_at(&mount).map_err(Error::system("looking for a mount at", &mount))?;
        if let Some(found) = found.filter(|found| !wanted.contains(found)) {
            // Another kind: only what nobody has can be cleared away.
            let files = std::fs::read_dir(mount.join(TAKEN)).map_or(0, |entries| entries.count());
            if files > 0 {
                return Err(Error::OtherBacking { mount, files });
            }
            debug_assert!(found != wanted[0]);
            // Whoever has made mounts of his own (unshare) has this one as well, and what has a name there stays for as long.
            for entry in std::fs::read_dir(mount.join(READY)).into_iter().flatten().flatten() {
                let _ = std::fs::remove_file(entry.path());
            }
            mount::detach(&mount).map_err(Error::system("unmounting", &mount))?;
        }
        let kind = match found.filter(|found| wanted.contains(found)) {
            Some(kind) => {
                // Where more is in use than the new limit, the old one stays until that is less.
                let _ = mount::remount(&mount, &format!("size={}", room(kind, limit)));
                kind
            }
            None => mount_first(&mount, &wanted, limit)?,
        };
        let store = Store { mount, kind, _lock: lock };
        for (name, mode) in [(READY, 0o700), (TAKEN, 0o711)] {
            make_directory(&store.mount.join(name), mode)?;
        }
        let left = Left { ready: store.found_ready()?, taken: store.found_taken()? };
        Ok((store, left))
    }

    pub fn kind(&self) -> MemoryFs {
        self.kind
    }

    pub fn mount(&self) -> &Path {
        &self.mount
    }

    fn path(&self, place: &str, name: &str) -> PathBuf {
        self.mount.join(place).join(name)
    }

    fn ready_path(&self, id: u64, node: usize) -> PathBuf {
        self.path(READY, &Entry { id, node, holding: None }.to_string())
    }

    /// Where the taken file of this name is.
    pub fn taken_path(&self, name: &str) -> PathBuf {
        self.path(TAKEN, name)
    }

    /// Whose the taken file of this name is.
    pub fn owner(&self, name: &str) -> Option<u32> {
        std::fs::symlink_metadata(self.taken_path(name)).ok().map(|facts| facts.uid())
    }

    /// Sees to it that there is room for more files. Users can use that up with the attributes of theirs, for which tmpfs takes it, too (6.6): the
    /// kernel charges that memory to them. Returns whether there is.
    pub fn keep_room_for_files(&self) -> bool {
        let (MemoryFs::Tmpfs, Ok(facts)) = (self.kind, rustix::fs::statvfs(&self.mount)) else { return false };
        // None of either is no bound.
        facts.f_files == 0
            || facts.f_ffree >= FREE_FILES
            || mount::remount(&self.mount, &format!("nr_inodes={}", facts.f_files + 4 * FREE_FILES)).is_ok()
    }

    /// What is known of a taken file that can't be opened.
    pub fn facts(&self, name: &str) -> std::io::Result<Metadata> {
        std::fs::symlink_metadata(self.taken_path(name))
    }

    /// The name of the taken file at `path`, if that can be one.
    pub fn taken_name<'p>(&self, path: &'p Path) -> Option<&'p str> {
        let name = path.strip_prefix(self.mount.join(TAKEN)).ok()?.to_str()?;
        (!name.is_empty() && self.taken_path(name) == path && !name.contains('/')).then_some(name)
    }

    /// A number for a new file.
    pub fn new_id(&self) -> Result<u64, Error> {
        random().map_err(Error::system("reading", Path::new("/dev/urandom")))
    }

    /// The new file `id` of `size` bytes of `node`, of which nobody knows. Its memory is `placed` there, where the machine has several.
    pub fn create(&self, id: u64, size: usize, node: usize, placed: bool) -> Result<File, Error> {
        let path = self.ready_path(id, node);
        let create = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        // Where users have just used up the room for files, there is more at once.
        let full = |error: &std::io::Error| error.kind() == ErrorKind::StorageFull;
        let file = match create() {
            Err(error) if full(&error) && self.keep_room_for_files() => create(),
            result => result,
        };
        let file = file.map_err(Error::system("making", &path))?;
        self.resize(&file, size, placed.then_some(node)).inspect_err(|_| self.remove_ready(id, node))?;
        Ok(file)
    }

    /// Makes `file` longer or shorter.
    pub fn resize(&self, file: &File, size: usize, node: Option<usize>) -> Result<(), Error> {
        file.set_len(size as u64).map_err(Error::system("changing the size of a file in", &self.mount))?;
        self.prefer(file, node);
        Ok(())
    }

    /// Has what `file` does not have yet come from `node`, whoever touches it first: the kernel keeps that with the file. Where it is refused,
    /// the filler finds out where the memory is.
    pub fn prefer(&self, file: &File, node: Option<usize>) {
        let size = file.metadata().map_or(0, |facts| facts.len() as usize);
        if let (Some(node), true) = (node, size > 0)
            && let Ok(mapped) = Mapped::unchanged(file, 0, size)
        {
            let _ = numa::prefer(mapped.range(), node);
        }
    }

    /// Makes a waiting file the `peer`'s, as the entry of `name` says, and opens it for him.
    pub fn hand_out(&self, entry: &Entry, name: &str, peer: Peer) -> Result<File, Error> {
        let (from, to) = (self.ready_path(entry.id, entry.node), self.taken_path(name));
        std::fs::rename(&from, &to).map_err(Error::system("handing out", &from))?;
        let open = || {
            std::os::unix::fs::lchown(&to, Some(peer.user), Some(peer.group))?;
            // Opened anew: what the server itself has open must be distinguishable from what others have.
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&to)
        };
        open().map_err(Error::system("handing out", &to))
    }

    /// Takes the name of a waiting file away; its memory goes back with the last descriptor of it.
    pub fn remove_ready(&self, id: u64, node: usize) {
        // One that isn't there any more is gone all the same.
        let _ = std::fs::remove_file(self.ready_path(id, node));
    }

    /// Opens a file that could not be opened when it was found.
    pub fn open_taken(&self, name: &str) -> Option<File> {
        open_found(&self.taken_path(name)).ok()
    }

    /// Takes the mount out of sight, with everything in it that nobody has open.
    pub fn close(&self) -> Result<(), Error> {
        mount::detach(&self.mount).map_err(Error::system("unmounting", &self.mount))?;
        // Both are made again when they are needed.
        let _ = std::fs::remove_dir(&self.mount);
        Ok(())
    }

    /// Files in `ready/` that are as this server would have made them; others go.
    fn found_ready(&self) -> Result<Vec<Waiting>, Error> {
        let directory = self.mount.join(READY);
        let found = |path: &Path| {
            let entry = Entry::read(path.file_name()?.to_str()?).filter(|entry| entry.holding.is_none())?;
            let file = open_found(path).ok()?;
            let facts = file.metadata().ok()?;
            let size = facts.len() as usize;
            let sound = facts.uid() == own_user() && size > 0 && size.is_multiple_of(HUGE_PAGE_SIZE);
            sound.then(|| Waiting { id: entry.id, node: entry.node, file: Arc::new(file), size })
        };
        let mut ready = Vec::new();
        for path in paths(&directory)? {
            match found(&path) {
                Some(file) => ready.push(file),
                None => drop(std::fs::remove_file(&path)),
            }
        }
        Ok(ready)
    }

    /// Files in `taken/`.
    fn found_taken(&self) -> Result<Vec<Found<Arc<File>>>, Error> {
        Ok(paths(&self.mount.join(TAKEN))?.iter().filter_map(|path| found_at(path)).collect())
    }

    /// The files in `taken/` but those whose names are `known`. One of which that is asked after it has gone is not found.
    pub fn taken_besides(&self, known: impl Fn(&str) -> bool) -> Vec<Found<Arc<File>>> {
        let paths = paths(&self.mount.join(TAKEN)).unwrap_or_default();
        let unknown = paths.iter().filter(|path| !path.file_name().and_then(|name| name.to_str()).is_some_and(&known));
        unknown.filter_map(|path| found_at(path)).collect()
    }
}

/// Takes the file at `path` from its owner: nobody can open it any more, not even by what he has kept of it (`O_PATH`, `/proc/self/fd`).
/// Who has it open goes on as before. Returns whether it is so. May wait for whoever has it open.
pub(super) fn seize(path: &Path) -> bool {
    // In this order: whoever owns it could undo the second.
    let seized = std::os::unix::fs::lchown(path, Some(own_user()), None)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(SEIZED)));
    // Root may have removed it by hand.
    seized.map_or_else(|error| error.kind() == ErrorKind::NotFound, |()| true)
}

/// Whether a file is its owner's no longer.
pub(super) fn is_seized(facts: &Metadata) -> bool {
    facts.uid() == own_user() && facts.mode() & 0o7777 == SEIZED
}

/// Takes from the file at `path` what it has beyond `size` bytes, what is reserved beyond its end included. Returns whether that is so: not
/// where its owner keeps it from being opened. May wait for whoever has it open.
pub(super) fn shrink(path: &Path, size: usize) -> bool {
    let shrink = |file: File| file.set_len(size as u64).is_ok() && shared_file::punch_from(&file, size).is_ok();
    open_found(path).is_ok_and(shrink)
}

/// Gives the memory of the seized file at `path`, which nobody has open, to the kernel, for good, and takes its name away. Returns whether that
/// is so. Takes as long as the kernel does for so much memory.
pub(super) fn take_back(path: &Path) -> bool {
    let file = match open_found(path) {
        Ok(file) => file,
        // A killed server's thread has come to its end, or root has removed it by hand.
        Err(error) => return error.kind() == ErrorKind::NotFound,
    };
    // What was reserved beyond its end goes with the rest.
    let back = file.set_len(0).is_ok() && shared_file::backed_bytes(&file) == Ok(0);
    if back {
        let _ = std::fs::remove_file(path);
    }
    back
}

/// The user that serves.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// On whose accounts memory is that was taken from the pool of `directory`, by the names of the files. Nobody, where there is no pool.
pub fn holders(directory: &Path) -> BTreeSet<u32> {
    let paths = paths(&directory.join("mem").join(TAKEN)).unwrap_or_default();
    let holder = |path: &PathBuf| Some(Entry::read(path.file_name()?.to_str()?)?.holding?.user);
    paths.iter().filter_map(holder).collect()
}

fn paths(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = || std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    read().map_err(Error::system("reading", directory))
}

/// Opens a file that others may have, and never waits for them.
fn open_found(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// The file at `path`, by its name where that says it; by what it is where root has put it there. What is no file goes.
fn found_at(path: &Path) -> Option<Found<Arc<File>>> {
    let facts = std::fs::symlink_metadata(path).ok();
    let name = path.file_name().and_then(|name| name.to_str());
    let facts = facts?;
    let Some(name) = name.filter(|_| facts.is_file()) else {
        let _ = std::fs::remove_file(path);
        return None;
    };
    let written = Entry::read(name).filter(|entry| entry.holding.is_some());
    let entry = match written {
        Some(entry) => entry,
        None => Entry {
            id: random().ok()?,
            node: 0,
            holding: Some(Holding {
                size: facts.len() as usize,
                user: facts.uid(),
                since: clock::since_1970(),
                until: Until::Unused,
            }),
        },
    };
    let going = is_seized(&facts);
    Some(Found { name: name.to_owned(), entry, file: open_found(path).ok().map(Arc::new), going })
}

/// Makes the directory of a pool, or sees that nobody else can change what is in it. Returns it by the way that no link changes.
fn own_directory(path: &Path) -> Result<PathBuf, Error> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            safe_directory(nearest(path))?;
            make_directory(path, 0o755)?;
        }
        Err(error) => return Err(Error::system("looking at", path)(error)),
        Ok(facts) => {
            let others_write = facts.mode() & 0o022 != 0;
            if !facts.is_dir() || facts.uid() != own_user() || others_write {
                return Err(Error::NotOwn(path.to_owned()));
            }
        }
    }
    safe_directory(path)
}

/// The nearest directory above `path` that is there. What is made below it lies where it says.
fn nearest(path: &Path) -> &Path {
    let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    above.into_iter().find(|above| above.exists()).unwrap_or(Path::new("."))
}

/// The directory by the way that no link changes, if nobody but root and this user can put another one in its place, or another file in
/// the place of one in it.
///
/// # Errors
/// [`Error::NotOwn`] with the one that somebody else can change.
pub fn safe_directory(directory: &Path) -> Result<PathBuf, Error> {
    let directory = directory.canonicalize().map_err(Error::system("looking at", directory))?;
    if in_a_namespace() {
        return Ok(directory);
    }
    for above in directory.ancestors() {
        let facts = std::fs::metadata(above).map_err(Error::system("looking at", above))?;
        if !is_safe(facts.uid(), facts.mode(), own_user()) {
            return Err(Error::NotOwn(above.to_owned()));
        }
    }
    Ok(directory)
}

/// As [`safe_directory`], of a directory in which only root and this user make names, too: whoever looks for one there must not find another's.
///
/// # Errors
/// [`Error::NotOwn`] with the one that somebody else can change.
pub fn socket_directory(directory: &Path) -> Result<PathBuf, Error> {
    let directory = safe_directory(directory)?;
    let facts = std::fs::metadata(&directory).map_err(Error::system("looking at", &directory))?;
    if facts.mode() & 0o022 != 0 && !in_a_namespace() {
        return Err(Error::NotOwn(directory));
    }
    Ok(directory)
}

/// As [`socket_directory`], of one that is made if it is not there.
pub(super) fn make_socket_directory(directory: &Path) -> Result<PathBuf, Error> {
    if !directory.exists() {
        safe_directory(nearest(directory))?;
        std::fs::create_dir_all(directory).map_err(Error::system("making the directory", directory))?;
    }
    socket_directory(directory)
}

/// Whether this is in a user namespace: whose the directories above are can't be told there, and there is no root's service to be led astray.
fn in_a_namespace() -> bool {
    let mut buffer = procfs::Buffer::new();
    // A kernel without them has no such file; where it can't be read for another reason, all is as it would be outside.
    let map = procfs::read(c"/proc/self/uid_map", &mut buffer);
    map.is_ok_and(|map| map.split_whitespace().ne(["0", "0", "4294967295"]))
}

/// Whether nobody but root and `own` can change the names of others' files in a directory of this owner and mode.
fn is_safe(owner: u32, mode: u32, own: u32) -> bool {
    let (others_write, sticky) = (mode & 0o022 != 0, mode & 0o1000 != 0);
    (owner == 0 || owner == own) && (!others_write || sticky)
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    let make = || -> std::io::Result<()> {
        match DirBuilder::new().recursive(true).mode(0o755).create(path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        std::fs::set_permissions(path, Permissions::from_mode(mode))
    };
    make().map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => Error::MayNotMount(path.to_owned()),
        _ => Error::system("making the directory", path)(error),
    })
}

/// The lock of `directory`, in which the server's number is. Nobody else can open it: who can open a file can lock it.
fn lock(directory: &Path) -> Result<File, Error> {
    let path = directory.join("lock");
    let open = || {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        // A former version's had other permissions.
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok::<_, std::io::Error>(file)
    };
    let mut file = open().map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => Error::MayNotMount(directory.to_owned()),
        _ => Error::system("opening", &path)(error),
    })?;
    // A server that was killed a moment ago has it until the kernel is done with that.
    let mut attempts = (0..LOCK_ATTEMPTS).map(|attempt| {
        if attempt > 0 {
            std::thread::sleep(LOCK_PAUSE);
        }
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
    });
    match attempts.find(|result| *result != Err(rustix::io::Errno::WOULDBLOCK)) {
        Some(Ok(())) => {}
        None => {
            let mut text = String::new();
            let _ = file.read_to_string(&mut text);
            return Err(Error::Served { directory: directory.to_owned(), pid: text.trim().parse().ok() });
        }
        Some(Err(error)) => return Err(Error::system("locking", &path)(error)),
    }
    let mut write = || {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write().map_err(Error::system("writing", &path))?;
    Ok(file)
}

const SHMEM_ENABLED: &std::ffi::CStr = c"/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// The kinds of file system that will do, the preferred one first.
fn choose(backing: Backing) -> Result<Vec<MemoryFs>, Error> {
    let mut buffer = procfs::Buffer::new();
    let transparent = match procfs::read(SHMEM_ENABLED, &mut buffer) {
        Ok(text) if text.contains("[deny]") => Err(
            "transparent ones are denied to files in memory (echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled)",
        ),
        Ok(_) => Ok(MemoryFs::Tmpfs),
        Err(_) => Err("this kernel has no transparent ones for files in memory (CONFIG_TRANSPARENT_HUGEPAGE)"),
    };
    let reserved = match reserved_pages() {
        Some(pages) if pages.total > 0 => Ok(MemoryFs::Hugetlbfs),
        Some(_) => Err("none of 2 MiB are reserved (sysctl vm.nr_hugepages=COUNT)"),
        None => Err("this kernel has no reserved ones of 2 MiB (CONFIG_HUGETLBFS)"),
    };
    match backing {
        Backing::Tmpfs => transparent.map(|kind| vec![kind]).map_err(|why| Error::NoHugePages(why.into())),
        Backing::Hugetlbfs => reserved.map(|kind| vec![kind]).map_err(|why| Error::NoHugePages(why.into())),
        Backing::Auto => match (transparent, reserved) {
            (Err(one), Err(other)) => Err(Error::NoHugePages(format!("{one}, and {other}"))),
            (one, other) => Ok([one, other].into_iter().flatten().collect()),
        },
    }
}

/// Mounts the first kind that the kernel takes.
fn mount_first(target: &Path, kinds: &[MemoryFs], limit: usize) -> Result<MemoryFs, Error> {
    let mut failure = None;
    let attempts = kinds.iter().flat_map(|&kind| {
        let options: &[&str] = match kind {
            // Memory that went to the swap device isn't ready (`noswap` is of 6.4).
            MemoryFs::Tmpfs => &["huge=always,inode64,noswap", "huge=always,inode64"],
            MemoryFs::Hugetlbfs => &["pagesize=2M"],
        };
        options.iter().map(move |options| (kind, options))
    });
    for (kind, options) in attempts {
        match mount::mount(kind, target, &format!("{options},size={},mode=0711", room(kind, limit))) {
            Ok(()) => return Ok(kind),
            Err(Errno(libc::EPERM | libc::EACCES)) => return Err(Error::MayNotMount(target.to_owned())),
            Err(errno) => failure = failure.or(Some(errno)),
        }
    }
    let errno = failure.unwrap_or(Errno(libc::ENODEV));
    Err(Error::System { action: "mounting at", path: target.to_owned(), errno })
}

/// The machine's reserved huge pages of 2 MiB.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReservedPages {
    pub total: usize,
    /// Neither in use nor promised to somebody.
    pub free: usize,
}

/// What `/sys/kernel/mm/hugepages` says; `None` on a kernel without them.
pub(super) fn reserved_pages() -> Option<ReservedPages> {
    let read = |path: &std::ffi::CStr| -> Option<usize> {
        procfs::read(path, &mut procfs::Buffer::new()).ok()?.trim().parse().ok()
    };
    let total = read(c"/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")?;
    let free = read(c"/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")?;
    let promised = read(c"/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages")?;
    // The kernel's count of promises can fall below 0, and counts all the same.
    Some(ReservedPages { total, free: free.wrapping_sub(promised).min(total) })
}

fn random() -> Result<u64, std::io::Error> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_directory_is_one_that_is_there() {
        assert_eq!(nearest(Path::new("/no/such/place")), Path::new("/"));
        assert_eq!(nearest(Path::new("/proc/self/no/such")), Path::new("/proc/self"));
        assert_eq!((nearest(Path::new("no")), nearest(Path::new("/"))), (Path::new("."), Path::new(".")));
    }

    #[test]
    fn a_directory_in_which_others_change_names_is_not_safe() {
        for (owner, mode, safe) in [
            (0, 0o755, true),
            (0, 0o1777, true),
            (0, 0o777, false),
            (0, 0o775, false),
            (7, 0o700, true),
            (7, 0o1777, true),
            (8, 0o700, false),
            (8, 0o1777, false),
        ] {
            assert_eq!(is_safe(owner, mode, 7), safe, "{owner} {mode:o}");
        }
    }
}
