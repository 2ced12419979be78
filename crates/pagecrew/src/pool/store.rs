//! The files of a pool: a private mount, in it those that wait and those that are taken.
//!
//! A file is made in `ready/`, which nobody but the server may look into, and moves to `taken/` once, when it becomes somebody's. It
//! never moves back: what somebody may have written to goes to the kernel, which zeroes it before anybody sees it again. Numbers of files
//! are random and of inodes never the same twice, so that who remembers one finds nothing.

use super::error::Error;
use super::options::Backing;
use crate::sys::mount::{self, MemoryFs};
use crate::sys::seqpacket::Peer;
use crate::sys::shared_file::Mapped;
use crate::sys::{Errno, HUGE_PAGE_SIZE, numa, procfs};
use rustix::fs::FlockOperation;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The mount of a pool, and the sole right to it.
#[derive(Debug)]
pub(super) struct Store {
    mount: PathBuf,
    kind: MemoryFs,
    /// Locked as long as it is open.
    _lock: File,
}

/// A file that a former server left.
#[derive(Debug)]
pub(super) struct Found {
    pub id: u64,
    pub file: File,
    pub size: usize,
    pub user: u32,
}

/// What a former server left.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub ready: Vec<Found>,
    pub taken: Vec<Found>,
}

/// What the mount holds at most, in times of the pool's limit. The limit itself is kept by the books. On its way out memory is off the
/// books and still there for a moment, and whoever is promised its place must not find the mount full.
const ROOM: usize = 2;

const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

const READY: &str = "ready";
const TAKEN: &str = "taken";

impl Store {
    /// Takes possession of `directory`, mounts what is needed there, and finds what a former server left. At most `limit` bytes can be
    /// in files.
    ///
    /// # Errors
    /// [`Error::Served`], [`Error::MayNotMount`], [`Error::NoHugePages`], [`Error::OtherBacking`], and those of the file system.
    pub fn open(directory: &Path, backing: Backing, limit: usize) -> Result<(Store, Left), Error> {
        own_directory(directory)?;
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
            mount::detach(&mount).map_err(Error::system("unmounting", &mount))?;
        }
        let room = limit.saturating_mul(ROOM);
        let kind = match found.filter(|found| wanted.contains(found)) {
            Some(kind) => {
                // Where more is in use than the new limit, the old one stays until that is less.
                let _ = mount::remount(&mount, &format!("size={room}"));
                kind
            }
            None => mount_first(&mount, &wanted, room)?,
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

    fn path(&self, place: &str, id: u64) -> PathBuf {
        self.mount.join(place).join(format!("{id:016x}"))
    }

    /// Where the taken file `id` is.
    pub fn taken_path(&self, id: u64) -> PathBuf {
        self.path(TAKEN, id)
    }

    /// The number of the taken file at `path`, if that can be one.
    pub fn taken_id(&self, path: &Path) -> Option<u64> {
        let name = path.strip_prefix(self.mount.join(TAKEN)).ok()?.to_str()?;
        let id = u64::from_str_radix(name, 16).ok()?;
        (self.taken_path(id) == path).then_some(id)
    }

    /// A new file of `size` bytes that nobody knows of, whose memory comes from `node` where the machine has several.
    pub fn create(&self, size: usize, node: Option<usize>) -> Result<(u64, File), Error> {
        let id = random().map_err(Error::system("reading", Path::new("/dev/urandom")))?;
        let path = self.path(READY, id);
        let create = || OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = create().map_err(Error::system("making", &path))?;
        self.resize(&file, size, node).inspect_err(|_| self.remove_ready(id))?;
        Ok((id, file))
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
            && let Ok(mapped) = Mapped::new(file, 0, size)
        {
            let _ = numa::prefer(mapped.range(), node);
        }
    }

    /// Makes the waiting file `id` the `peer`'s, and opens it for him.
    pub fn hand_out(&self, id: u64, peer: Peer) -> Result<File, Error> {
        let (from, to) = (self.path(READY, id), self.taken_path(id));
        std::fs::rename(&from, &to).map_err(Error::system("handing out", &from))?;
        let open = || {
            std::os::unix::fs::lchown(&to, Some(peer.user), Some(peer.group))?;
            // Opened anew: what the server itself has open must be distinguishable from what others have.
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&to)
        };
        open().map_err(Error::system("handing out", &to))
    }

    /// Takes the name of the waiting file `id` away; its memory goes back with the last descriptor of it.
    pub fn remove_ready(&self, id: u64) {
        // One that isn't there any more is gone all the same.
        let _ = std::fs::remove_file(self.path(READY, id));
    }

    /// The same for a taken one.
    pub fn remove_taken(&self, id: u64) {
        let _ = std::fs::remove_file(self.taken_path(id));
    }

    /// Takes the mount out of sight, with everything in it that nobody has open.
    pub fn close(&self) -> Result<(), Error> {
        mount::detach(&self.mount).map_err(Error::system("unmounting", &self.mount))?;
        // Both are made again when they are needed.
        let _ = std::fs::remove_dir(&self.mount);
        Ok(())
    }

    /// Files in `ready/` that are as this server would have made them; others go.
    fn found_ready(&self) -> Result<Vec<Found>, Error> {
        // SAFETY: takes nothing and cannot fail.
        let own = unsafe { libc::geteuid() };
        let mut found = self.found(READY)?;
        found.retain(|found| {
            let sound = found.user == own && found.size > 0 && found.size.is_multiple_of(HUGE_PAGE_SIZE);
            if !sound {
                self.remove_ready(found.id);
            }
            sound
        });
        Ok(found)
    }

    fn found_taken(&self) -> Result<Vec<Found>, Error> {
        self.found(TAKEN)
    }

    /// The files in `taken/` but those that are `known`.
    pub fn taken_besides(&self, known: impl Fn(u64) -> bool) -> Vec<Found> {
        let Ok(entries) = std::fs::read_dir(self.mount.join(TAKEN)) else { return Vec::new() };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let unknown = paths.filter(|path| self.taken_id(path).is_none_or(|id| !known(id)));
        unknown
            .filter_map(|path| {
                let found = self.found_at(TAKEN, &path);
                if found.is_none() {
                    let _ = std::fs::remove_file(&path);
                }
                found
            })
            .collect()
    }

    /// The files of a directory; what isn't one of a pool's is removed.
    fn found(&self, place: &str) -> Result<Vec<Found>, Error> {
        let directory = self.mount.join(place);
        let error = || Error::system::<std::io::Error>("reading", &directory);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&directory).map_err(error())? {
            let path = entry.map_err(error())?.path();
            match self.found_at(place, &path) {
                Some(file) => found.push(file),
                None => drop(std::fs::remove_file(&path)),
            }
        }
        Ok(found)
    }

    fn found_at(&self, place: &str, path: &Path) -> Option<Found> {
        let id = u64::from_str_radix(path.file_name()?.to_str()?, 16).ok()?;
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
        let facts = file.metadata().ok()?;
        let sound = facts.is_file() && facts.nlink() == 1 && self.path(place, id) == path;
        sound.then_some(Found { id, size: facts.len() as usize, user: facts.uid(), file })
    }
}

/// Makes the directory of a pool, or sees that nobody else can change what is in it.
fn own_directory(path: &Path) -> Result<(), Error> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => make_directory(path, 0o755),
        Err(error) => Err(Error::system("looking at", path)(error)),
        Ok(facts) => {
            // SAFETY: takes nothing and cannot fail.
            let own = unsafe { libc::geteuid() };
            let others_write = facts.mode() & 0o022 != 0;
            if !facts.is_dir() || facts.uid() != own || others_write {
                return Err(Error::NotOwn(path.to_owned()));
            }
            Ok(())
        }
    }
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

/// The lock of `directory`, in which the server's number is.
fn lock(directory: &Path) -> Result<File, Error> {
    let path = directory.join("lock");
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(&path);
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
fn mount_first(target: &Path, kinds: &[MemoryFs], size: usize) -> Result<MemoryFs, Error> {
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
        match mount::mount(kind, target, &format!("{options},size={size},mode=0711")) {
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
