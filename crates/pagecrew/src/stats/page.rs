//! The memory in which a process counts: private, or a small file that other processes can read while it runs.
//!
//! **Life of the file.** `DIRECTORY/PID` is made the first time the process does something worth reading, with mode 0600 in a
//! directory with mode 0700. It is removed when the process exits; what a killed process left behind is recognised by its start
//! time and removed by the next reader or the next process with its number. A forked child never writes to its parent's.

use super::{Counters, Figure, figures};
use crate::sys::memory::{self, Protection, Range};
use crate::sys::process::start_ticks;
use crate::sys::{Errno, PAGE_SIZE};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// The most lanes of a NUMA node: pairs of zones that different CPUs use.
pub const MAX_LANES: usize = 8;
/// Room for this many zones: two for each lane of each node.
pub const MAX_ZONES: usize = 2 * MAX_LANES * crate::sys::topology::MAX_NODES;

const MAGIC: u64 = u64::from_le_bytes(*b"pagecrew");
/// Counted up with every change of the layout; a reader of another version refuses.
const LAYOUT: u32 = 7;

figures! {
    /// Bytes of a zone's arena in each state. They add up to the arena at any time.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct ZoneBytes: Run, none, [], "zones[]." {
        reserved key "reserved_bytes": u64, Gauge Bytes, "Address space without pages.";
        in_use key "in_use_bytes": u64, Gauge Bytes, "Handed out.";
        retained_dirty key "retained_dirty_bytes": u64, Gauge Bytes, "Free and backed by pages with unknown contents.";
        retained_zeroed key "retained_zeroed_bytes": u64, Gauge Bytes, "Free and backed by pages known to be zero.";
    }
}

impl ZoneBytes {
    /// The sum over all states: the size of the arena.
    pub fn total(&self) -> u64 {
        self.reserved + self.in_use + self.retained_dirty + self.retained_zeroed
    }
}

/// The states of one zone, published under a sequence count so that a reader in another process sees one instant.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ZoneStates {
    /// Odd while a writer is at it.
    sequence: AtomicU64,
    bytes: [AtomicU64; 4],
}

impl ZoneStates {
    /// Publishes `bytes`. Writers exclude each other by the zone's lock.
    pub fn publish(&self, bytes: ZoneBytes) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let values = [bytes.reserved, bytes.in_use, bytes.retained_dirty, bytes.retained_zeroed];
        for (place, value) in self.bytes.iter().zip(values) {
            place.store(value, Ordering::Relaxed);
        }
        self.sequence.store(sequence + 2, Ordering::Release);
    }

    /// The states at one instant; `None` if a writer ended in the middle of a publication (it was killed there).
    pub fn read(&self) -> Option<ZoneBytes> {
        for _ in 0..1_000_000 {
            let before = self.sequence.load(Ordering::Acquire);
            let [reserved, in_use, retained_dirty, retained_zeroed] =
                [0, 1, 2, 3].map(|index| self.bytes[index].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return Some(ZoneBytes { reserved, in_use, retained_dirty, retained_zeroed });
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Everything that a process counts.
#[derive(Debug)]
#[repr(C)]
pub struct Page {
    magic: u64,
    layout: AtomicU32,
    zone_count: AtomicU32,
    pid: AtomicU64,
    start_time: AtomicU64,
    /// The counters.
    pub counters: Counters,
    /// The states of each zone.
    pub zones: [ZoneStates; MAX_ZONES],
}

/// Length of the mapping of a [`Page`] in bytes.
const LENGTH: usize = size_of::<Page>().next_multiple_of(PAGE_SIZE);

impl Page {
    /// Says how many of the zones are used.
    pub fn set_zone_count(&self, count: usize) {
        self.zone_count.store(count as u32, Ordering::Relaxed);
    }

    /// A copy of everything.
    pub fn snapshot(&self) -> Snapshot {
        let count = (self.zone_count.load(Ordering::Relaxed) as usize).min(MAX_ZONES);
        Snapshot {
            counters: self.counters.values(),
            zones: self.zones[..count].iter().map(|zone| zone.read().unwrap_or_default()).collect(),
        }
    }
}

/// What a process had counted at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Values in the order of [`Counters::METRICS`].
    pub counters: [u64; Counters::COUNT],
    /// Each zone's states.
    pub zones: Vec<ZoneBytes>,
}

impl Snapshot {
    /// The counter in the field `name` of [`Counters`]; times are in nanoseconds.
    ///
    /// # Panics
    /// If there is no such counter.
    pub fn counter(&self, name: &str) -> u64 {
        let index = Counters::FIELDS.iter().position(|field| *field == name);
        self.counters[index.unwrap_or_else(|| panic!("no counter is called {name}"))]
    }

    /// The counters, with what they are.
    pub fn figures(&self) -> impl Iterator<Item = Figure> + use<> {
        Counters::METRICS.iter().zip(self.counters.map(Some))
    }

    /// The states of all zones together.
    pub fn bytes(&self) -> ZoneBytes {
        self.zones.iter().fold(ZoneBytes::default(), |sum, zone| ZoneBytes {
            reserved: sum.reserved.saturating_add(zone.reserved),
            in_use: sum.in_use.saturating_add(zone.in_use),
            retained_dirty: sum.retained_dirty.saturating_add(zone.retained_dirty),
            retained_zeroed: sum.retained_zeroed.saturating_add(zone.retained_zeroed),
        })
    }
}

/// The mapping of a [`Page`]: private until [`StatsPage::share`].
pub struct StatsPage {
    range: Range,
    /// Address of the name of the file, a C string that is never freed; 0 while there is none. Kept so that a process can
    /// remove it at its very end, where nothing can be allocated.
    name: AtomicUsize,
}

impl StatsPage {
    /// A private page, all zero.
    ///
    /// # Errors
    /// Those of [`memory::map`].
    pub fn new() -> Result<StatsPage, Errno> {
        let range = Range { start: memory::map(LENGTH, Protection::ReadWrite)?, len: LENGTH };
        // SAFETY: the fresh mapping is large enough and aligned for a `Page`, for which all zeroes is a valid value.
        unsafe {
            let page = range.start as *mut Page;
            (&raw mut (*page).magic).write(MAGIC);
            (*page).layout.store(LAYOUT, Ordering::Relaxed);
        }
        Ok(StatsPage { range, name: AtomicUsize::new(0) })
    }

    /// Makes the page readable from outside: it becomes `directory/PID`. Counts made by other threads at this very moment may
    /// be lost, so it is best done early.
    ///
    /// # Errors
    /// `EPERM` if the directory is somebody else's or open to others; those of `mkdir`, `open`, `posix_fallocate` (`ENOSPC`: the
    /// file system is full; writing to the page later would otherwise kill the process) and `mmap`.
    pub fn share(&self, directory: &Path) -> Result<(), Errno> {
        let pid = std::process::id();
        let start_time = start_ticks(pid as i32)?;
        let name = file_in(directory, pid)?;
        own_directory(directory)?;
        // SAFETY: the name is a C string.
        unsafe { libc::unlink(name.as_ptr()) };
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the name is a C string; the descriptor is ours and closed below; MAP_FIXED replaces our own mapping, whose
        // contents were written to the file before.
        unsafe {
            let file = libc::open(name.as_ptr(), flags, 0o600);
            if file < 0 {
                return Err(Errno::last());
            }
            let page = self.range.start as *mut Page;
            (*page).pid.store(pid.into(), Ordering::Relaxed);
            (*page).start_time.store(start_time, Ordering::Relaxed);
            let mut result = match libc::posix_fallocate(file, 0, LENGTH as i64) {
                0 => Ok(()),
                error => Err(Errno(error)),
            };
            if result.is_ok() && libc::pwrite(file, page.cast(), LENGTH, 0) != LENGTH as isize {
                result = Err(Errno::last());
            }
            if result.is_ok() {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                let place = libc::mmap(page.cast(), LENGTH, protection, libc::MAP_SHARED | libc::MAP_FIXED, file, 0);
                if place == libc::MAP_FAILED {
                    result = Err(Errno::last());
                }
            }
            libc::close(file);
            match result {
                Ok(()) => self.name.store(name.into_raw() as usize, Ordering::Release),
                Err(_) => drop(libc::unlink(name.as_ptr())),
            }
            result
        }
    }

    /// Gives a forked child a private page of its own with all counters at zero, whatever its parent's was.
    ///
    /// # Errors
    /// Those of `mmap`.
    ///
    /// # Safety
    /// The calling thread is the only one.
    pub unsafe fn detach(&self) -> Result<(), Errno> {
        let zones = self.zone_count.load(Ordering::Relaxed);
        // SAFETY: the range is ours and no other thread uses it.
        unsafe {
            memory::map_fresh(self.range, Protection::ReadWrite)?;
            let page = self.range.start as *mut Page;
            (&raw mut (*page).magic).write(MAGIC);
            (*page).layout.store(LAYOUT, Ordering::Relaxed);
            (*page).zone_count.store(zones, Ordering::Relaxed);
        }
        // The parent's file.
        self.name.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Removes the file, if [`StatsPage::share`] made one in this process; the mapping stays. Allocates nothing.
    pub fn unshare(&self) {
        let name = self.name.swap(0, Ordering::Acquire);
        if name != 0 && self.pid.load(Ordering::Relaxed) == u64::from(std::process::id()) {
            // SAFETY: the address is that of a C string that was leaked.
            unsafe { libc::unlink(name as *const libc::c_char) };
        }
    }
}

impl std::ops::Deref for StatsPage {
    type Target = Page;

    fn deref(&self) -> &Page {
        // SAFETY: the mapping holds an initialised page for as long as `self` lives; all that changes in it is atomic.
        unsafe { &*(self.range.start as *const Page) }
    }
}

impl Drop for StatsPage {
    fn drop(&mut self) {
        // SAFETY: nobody can hold a reference into the mapping any more.
        let _ = unsafe { memory::unmap(self.range) };
    }
}

/// Where this user's processes publish their counters: `/dev/shm/pagecrew-UID`, or what `PAGECREW_STATS_DIR` says.
pub fn directory() -> PathBuf {
    match std::env::var_os("PAGECREW_STATS_DIR") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory),
        // SAFETY: geteuid takes nothing and cannot fail.
        _ => directory_of(unsafe { libc::geteuid() }),
    }
}

/// Where the processes of `user` publish what they have to say, if nobody has said otherwise.
pub fn directory_of(user: u32) -> PathBuf {
    PathBuf::from(format!("/dev/shm/pagecrew-{user}"))
}

/// Makes `directory` with mode 0700, or checks that it is a directory of this user's that nobody else may write to.
///
/// Everybody may make things in `/dev/shm`. What somebody else has put where root's directory belongs is moved aside.
pub fn own_directory(directory: &Path) -> Result<(), Errno> {
    make_own_directory(directory, directory == directory_of(0))
}

fn make_own_directory(directory: &Path, of_root: bool) -> Result<(), Errno> {
    let name = c_string(directory)?;
    // SAFETY: geteuid takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let mut aside = of_root && user == 0;
    loop {
        // SAFETY: the name is a C string.
        if unsafe { libc::mkdir(name.as_ptr(), 0o700) } == 0 {
            return Ok(());
        }
        let error = Errno::last();
        if error != Errno(libc::EEXIST) {
            return Err(error);
        }
        // SAFETY: all zeroes are a valid value, and only plain numbers.
        let mut about: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the name is a C string, and `about` a valid place for the answer.
        if unsafe { libc::lstat(name.as_ptr(), &mut about) } != 0 {
            return Err(Errno::last());
        }
        if about.st_uid == user && about.st_mode & libc::S_IFMT == libc::S_IFDIR && about.st_mode & 0o022 == 0 {
            return Ok(());
        }
        if about.st_uid == user || !std::mem::take(&mut aside) {
            return Err(Errno(libc::EPERM));
        }
        let mut elsewhere = directory.as_os_str().to_owned();
        elsewhere.push(format!("-of-{}-{}", about.st_uid, std::process::id()));
        let elsewhere = c_string(Path::new(&elsewhere))?;
        // SAFETY: both names are C strings.
        if unsafe { libc::rename(name.as_ptr(), elsewhere.as_ptr()) } != 0 {
            return Err(Errno::last());
        }
    }
}

fn c_string(path: &Path) -> Result<std::ffi::CString, Errno> {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno(libc::EINVAL))
}

fn file_in(directory: &Path, pid: u32) -> Result<std::ffi::CString, Errno> {
    c_string(&directory.join(pid.to_string()))
}

/// Why the counters of a process could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadError {
    /// No such file: the process does not run under Pagecrew, has had no large memory yet, or is another user's.
    NotThere(PathBuf),
    /// The process has ended and its file was left behind; it has been removed.
    Ended(u32),
    /// The file is not one of this version's.
    OtherLayout(PathBuf),
    /// The kernel refused.
    Refused(PathBuf, Errno),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::NotThere(path) => write!(
                f,
                "{} is not there: the process is not running under pagecrew, has not used large memory yet, or belongs to another user",
                path.display()
            ),
            ReadError::Ended(pid) => write!(f, "process {pid} has ended"),
            ReadError::OtherLayout(path) => write!(f, "{} was written by another version of pagecrew", path.display()),
            ReadError::Refused(path, errno) => write!(f, "{}: {errno}", path.display()),
        }
    }
}

impl std::error::Error for ReadError {}

/// Reads the counters of process `pid`, published in `directory`, which may be another user's: whatever lies there holds up nobody, and is
/// never mapped.
///
/// # Errors
/// See [`ReadError`].
pub fn read(directory: &Path, pid: u32) -> Result<Snapshot, ReadError> {
    let path = directory.join(pid.to_string());
    let refused = |error: std::io::Error| ReadError::Refused(path.clone(), error.into());
    // Of a pipe, nobody waits for its other end.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) | None => ReadError::NotThere(path.clone()),
        Some(_) => refused(error),
    })?;
    if !file.metadata().is_ok_and(|about| about.is_file() && about.len() == LENGTH as u64) {
        return Err(ReadError::OtherLayout(path));
    }
    let (mut one, mut other) = (Page::zeroed(), Page::zeroed());
    one.copy_from(&file).map_err(refused)?;
    if one.magic != MAGIC || one.layout.load(Ordering::Relaxed) != LAYOUT {
        return Err(ReadError::OtherLayout(path));
    }
    if start_ticks(pid as i32) != Ok(one.start_time.load(Ordering::Relaxed)) {
        let _ = std::fs::remove_file(&path);
        return Err(ReadError::Ended(pid));
    }
    for pair in 1..=COPIES_MOST {
        other.copy_from(&file).map_err(refused)?;
        if one.stood_still(&other) || pair == COPIES_MOST {
            break;
        }
        std::mem::swap(&mut one, &mut other);
    }
    Ok(one.copied(&other))
}

/// Pairs of copies after which a zone counts as empty whose states were never seen at one instant.
const COPIES_MOST: usize = 100;

impl Page {
    fn zeroed() -> Box<Page> {
        // SAFETY: the layout is that of a `Page`, which is not empty and for which all zeroes is a valid value.
        unsafe {
            let layout = std::alloc::Layout::new::<Page>();
            let page = std::alloc::alloc_zeroed(layout);
            if page.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            Box::from_raw(page.cast())
        }
    }

    /// Becomes what stands in `file` now, which may change meanwhile.
    fn copy_from(&mut self, file: &File) -> std::io::Result<()> {
        // SAFETY: nobody else has this page, and every bit pattern is a valid `Page`; it has no padding that was never written, since it began as zeroes.
        let bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut *self).cast::<u8>(), size_of::<Page>()) };
        file.read_exact_at(bytes, 0)
    }

    fn zones_used(&self) -> &[ZoneStates] {
        &self.zones[..(self.zone_count.load(Ordering::Relaxed) as usize).min(MAX_ZONES)]
    }

    /// Whether nobody was at a zone while this was copied, if `later` was copied after it.
    fn stood_still(&self, later: &Page) -> bool {
        self.zones_used().iter().zip(&later.zones).all(|(zone, later)| zone.stood_still(later))
    }

    /// What this copy says; of zones that did not stand still until `later`, nothing.
    fn copied(&self, later: &Page) -> Snapshot {
        let zone = |(zone, later): (&ZoneStates, &ZoneStates)| {
            if zone.stood_still(later) { zone.read().unwrap_or_default() } else { ZoneBytes::default() }
        };
        Snapshot {
            counters: self.counters.values(),
            zones: self.zones_used().iter().zip(&later.zones).map(zone).collect(),
        }
    }
}

impl ZoneStates {
    /// Of two copies: a writer would have changed the sequence before it changed anything else.
    fn stood_still(&self, later: &ZoneStates) -> bool {
        let [before, after] = [self, later].map(|zone| zone.sequence.load(Ordering::Relaxed));
        before == after && before.is_multiple_of(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::stop_on_drop::StopOnDrop;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("pagecrew-stats-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn a_shared_page_is_read_as_it_changes() {
        let directory = scratch("shared");
        let page = StatsPage::new().unwrap();
        page.set_zone_count(1);
        page.counters.frees.add(2);
        page.share(&directory).unwrap();
        page.counters.frees.add(3);
        let states = ZoneBytes { reserved: 1, in_use: 2, retained_dirty: 3, retained_zeroed: 4 };
        page.zones[0].publish(states);
        let snapshot = read(&directory, std::process::id()).unwrap();
        assert_eq!((snapshot.counter("frees"), snapshot.bytes()), (5, states));
        page.unshare();
        assert!(matches!(read(&directory, std::process::id()), Err(ReadError::NotThere(_))));
        std::fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_recognised_and_removed() {
        let directory = scratch("dead");
        let page = StatsPage::new().unwrap();
        page.share(&directory).unwrap();
        // Process 1 runs, but did not start when this one did: as if the number had been used again.
        std::fs::rename(directory.join(std::process::id().to_string()), directory.join("1")).unwrap();
        assert_eq!(read(&directory, 1), Err(ReadError::Ended(1)));
        assert!(!directory.join("1").exists());
        std::fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = scratch("open");
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(StatsPage::new().unwrap().share(&directory), Err(Errno(libc::EPERM)));
        std::fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn what_lies_where_roots_directory_belongs_is_moved_aside() {
        // SAFETY: takes nothing and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return;
        }
        let place = scratch("root");
        std::fs::create_dir(&place).unwrap();
        let directory = place.join("pagecrew-0");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("theirs"), b"").unwrap();
        std::os::unix::fs::chown(&directory, Some(65534), None).unwrap();
        assert_eq!(make_own_directory(&directory, false), Err(Errno(libc::EPERM)));
        assert_eq!(make_own_directory(&directory, true), Ok(()));
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        let aside = place.join(format!("pagecrew-0-of-65534-{}", std::process::id()));
        assert!(aside.join("theirs").exists());
        // One's own with the wrong rights is a mistake, and nobody's trick.
        std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(make_own_directory(&directory, true), Err(Errno(libc::EPERM)));
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn a_truncated_file_is_refused() {
        let directory = scratch("short");
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("1"), b"short").unwrap();
        assert!(matches!(read(&directory, 1), Err(ReadError::OtherLayout(_))));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_others_lay_there_holds_up_nobody() {
        let directory = scratch("others");
        std::fs::create_dir(&directory).unwrap();
        let name = std::ffi::CString::new(directory.join("1").to_str().unwrap()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(matches!(read(&directory, 1), Err(ReadError::OtherLayout(_))));
        std::os::unix::fs::symlink("/dev/zero", directory.join("2")).unwrap();
        assert!(matches!(read(&directory, 2), Err(ReadError::Refused(_, Errno(libc::ELOOP)))));
        std::fs::create_dir(directory.join("3")).unwrap();
        assert!(matches!(read(&directory, 3), Err(ReadError::OtherLayout(_))));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn the_states_of_a_zone_are_of_one_instant() {
        let directory = scratch("instant");
        let page = StatsPage::new().unwrap();
        page.set_zone_count(1);
        page.share(&directory).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = StopOnDrop(&done);
            scope.spawn(|| {
                let mut in_use = 0;
                while !done.load(Ordering::Relaxed) {
                    in_use = (in_use + 1) % 1000;
                    page.zones[0].publish(ZoneBytes { reserved: 1000 - in_use, in_use, ..ZoneBytes::default() });
                }
            });
            for _ in 0..2000 {
                // Where it never stands still, there is nothing.
                let total = read(&directory, std::process::id()).unwrap().bytes().total();
                assert!(total == 1000 || total == 0, "{total}");
            }
            drop(running);
        });
        assert_eq!(read(&directory, std::process::id()).unwrap().bytes().total(), 1000);
        page.unshare();
        std::fs::remove_dir(&directory).unwrap();
    }
}
