//! A child process that undoes a change to the system when this process ends, whatever the way, SIGKILL included.

use super::hold::{OOM_KILLER_ON, turn_oom_killers_on_below};
use super::marker::{self, Marker};
use crate::sys::{Errno, sched};
use rustix::net::RecvFlags;
use std::ffi::c_int;
use std::fs::File;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The numbers that this process has written to a file and is about to write there, in memory that the guard shares. A file
/// with any other number was changed by somebody else.
#[derive(Debug)]
pub(crate) struct Ours(NonNull<[AtomicU64; 2]>);

// SAFETY: the memory belongs to this value alone, and is only used as atomic numbers.
unsafe impl Send for Ours {}
// SAFETY: as above.
unsafe impl Sync for Ours {}

impl Ours {
    /// Before the first write there is none.
    const NONE: u64 = u64::MAX - 1;

    /// # Errors
    /// `ENOMEM`.
    pub fn new() -> Result<Ours, Errno> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at no address in particular.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<[AtomicU64; 2]>(), rights, kind, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let ours = Ours(NonNull::new(mapped.cast()).ok_or(Errno(libc::ENOMEM))?);
        ours.numbers().iter().for_each(|number| number.store(Ours::NONE, Ordering::Relaxed));
        Ok(ours)
    }

    fn numbers(&self) -> &[AtomicU64; 2] {
        // SAFETY: mapped for as long as this is, zeroed by the kernel, and only ever used as atomic numbers.
        unsafe { self.0.as_ref() }
    }

    /// Has `write` write `number`. Whenever this process is killed, the file has one of the two numbers.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn change(&self, number: u64, write: impl FnOnce() -> Result<(), Errno>) -> Result<(), Errno> {
        let [last, next] = self.numbers();
        next.store(number, Ordering::SeqCst);
        write()?;
        last.store(number, Ordering::SeqCst);
        Ok(())
    }

    /// Whether the text of the file has a number of ours.
    fn has(&self, text: &[u8]) -> bool {
        let found = number(text);
        self.numbers().iter().any(|number| number.load(Ordering::SeqCst) == found)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // SAFETY: this process's mapping, which nothing refers to any more. The guard has its own.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<[AtomicU64; 2]>()) };
    }
}

/// The number that a text begins with; `u64::MAX` for `max` and whatever else is none.
fn number(text: &[u8]) -> u64 {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    match text.first() {
        Some(first) if first.is_ascii_digit() => {
            digits.fold(0, |number: u64, digit| number.saturating_mul(10).saturating_add((digit - b'0').into()))
        }
        _ => u64::MAX,
    }
}

/// The groups below are seen to for no longer than this.
const PATIENCE_SECONDS: libc::c_uint = 10;
/// From one try to the next.
const AGAIN: Duration = Duration::from_millis(5);
/// So often it is looked whether the group has room, and no more: one that is full of page cache never has.
const WAITS: usize = 40;
/// This is room enough for a guard.
const ROOM: u64 = 512 << 10;

/// What a guard undoes.
#[derive(Clone, Copy)]
pub(crate) enum Undo<'a> {
    /// The OOM killer is off in the group with the directory `top`, and in those that were made below it since (version 1).
    OomKiller {
        top: &'a Path,
        /// The group's `memory.usage_in_bytes`, which was read already: the kernel has room for the answer then.
        usage: &'a File,
        /// And its limit.
        limit: u64,
    },
    /// The number in the file is one of `ours`, and was `before`: `memory.high` (version 2), or a setting of the machine.
    Number { before: &'a str, ours: &'a Ours },
    /// These threads are as urgent as they can be, and were `before` nice.
    Nice { threads: &'a [i32], before: i32 },
}

/// No thread is as nice as this.
const NO_NICE: i32 = i32::MAX;

/// As urgent as a thread of the ordinary class can be.
pub(crate) const URGENT: i32 = -20;

/// Those of `threads` that are as nice as `from` says are as nice as `to` then. May be called after a fork of a process with several threads.
pub(crate) fn change_nice(threads: &[i32], from: i32, to: i32) {
    for &thread in threads {
        if sched::nice_of(thread) == Ok(from) {
            let _ = sched::set_nice_of(thread, to);
        }
    }
}

/// A child process that undoes a change to a file as soon as this process has ended, or this is dropped. A child that this process
/// forked meanwhile, and that has not called `exec`, counts as a part of it; so does a thread that shares its open files.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Its number.
    pub process: libc::pid_t,
    /// The guard sees the end of it. A socket, since that can be ended for all who have it.
    line: UnixStream,
}

impl Guard {
    /// Starts a guard over `file`, which is to be open for reading and writing, and waits until it is at its place. It shares `lock`, and
    /// empties that file when it has undone the change. It leaves a file alone that has none of our numbers.
    pub fn start(file: &File, lock: &File, undo: Undo<'_>) -> Result<Guard, Errno> {
        let (line, end) = UnixStream::pair().map_err(Errno::from)?;
        // SAFETY: the masks are set by sigfillset and pthread_sigmask before they are used. The child stays inside
        // `guard`, which keeps to what is allowed after a fork of a process with several threads.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            // Blocked from its first instruction on: none of this process's handlers runs there, and what ends this process
            // from a terminal doesn't end it.
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let process = libc::fork();
            let error = Errno::last();
            if process == 0 {
                guard(line.as_raw_fd(), end.as_raw_fd(), file, lock.as_raw_fd(), undo);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            if process < 0 {
                return Err(error);
            }
            // From here on the guard alone has this side, so its death is seen.
            drop(end);
            let mut guard = Guard { process, line };
            guard.line.read_exact(&mut [0]).map_err(|_| Errno(libc::ECHILD))?;
            Ok(guard)
        }
    }

    /// Becomes readable when it has ended.
    pub fn descriptor(&self) -> RawFd {
        self.line.as_raw_fd()
    }

    /// Whether it lives: it keeps its side of the line open, and says nothing.
    pub fn lives(&self) -> bool {
        let mut byte = [0u8];
        let heard = rustix::net::recv(&self.line, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        heard == Err(rustix::io::Errno::AGAIN)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.line.shutdown(Shutdown::Both);
        // SAFETY: takes the number of a child; the status isn't asked for. ECHILD: somebody else has waited for it.
        while unsafe { libc::waitpid(self.process, std::ptr::null_mut(), 0) } < 0 && Errno::last() == Errno(libc::EINTR)
        {
        }
    }
}

/// The guard's life: sends a byte, waits for the end of `end`, undoes what `undo` says by `file`, and exits. `line` is the other side of `end`.
///
/// It may be in the group that is held, since it inherits this process's. So from that byte on it must not need a page that it
/// doesn't have until the group is let go: what it touches is touched before, and kept by `mlockall` (`MCL_ONFAULT`, 4.4), where that is
/// allowed, without bringing in anything else.
///
/// # Safety
/// To be called in a forked child, with every signal blocked. Until the group is let go, it calls only what is safe in a signal handler.
unsafe fn guard(line: c_int, end: c_int, file: &File, lock: c_int, undo: Undo<'_>) -> ! {
    let control = file.as_raw_fd();
    let (text, ours, usage) = match undo {
        Undo::OomKiller { usage, .. } => (OOM_KILLER_ON, None, usage.as_raw_fd()),
        Undo::Number { before, ours } => (before, Some(ours), control),
        Undo::Nice { .. } => ("", None, control),
    };
    // In a page of its own: a constant may be in one that nobody has touched since the fork.
    let mut own = [0u8; 32];
    let Some(text) = own.get_mut(..text.len()).map(|own| {
        own.copy_from_slice(text.as_bytes());
        std::hint::black_box(&*own)
    }) else {
        // SAFETY: ends this process, which has done nothing yet.
        unsafe { libc::_exit(1) }
    };
    let mut found = [0u8; 32];
    // Whether the file may be written to.
    let mut may = || {
        // SAFETY: the kernel writes to the array, within its length.
        let count = unsafe { libc::pread(control, found.as_mut_ptr().cast(), found.len(), 0) };
        ours.is_none_or(|ours| found.get(..usize::try_from(count).unwrap_or(0)).is_some_and(|text| ours.has(text)))
    };
    // SAFETY: the descriptors are open here as they are in the parent; the text and the name are the child's own copies, and reads
    // and writes stay within what is given.
    unsafe {
        // Its own copy of that side would keep `end` open. Closed by itself, since close_range (5.9) may be missing.
        libc::close(line);
        let mut kept = [end, control, lock, usage];
        kept.sort_unstable();
        let mut first: libc::c_uint = 0;
        for kept in kept {
            let kept = kept as libc::c_uint;
            if first < kept {
                libc::syscall(libc::SYS_close_range, first, kept - 1, 0);
            }
            first = kept + 1;
        }
        libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0);
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        libc::prctl(libc::PR_SET_NAME, c"pagecrew/guard".as_ptr());
        // When the group is let go, the kernel kills there until there is room, and it is not to be the guard, which has still something to do. Takes
        // CAP_SYS_RESOURCE.
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        let is_spared = libc::write(score, b"-1000".as_ptr().cast(), 5) == 5;
        libc::close(score);
        // Writes nothing, but has the code that does in memory.
        std::hint::black_box(may());
        let mut byte = 0u8;
        libc::read(-1, (&raw mut byte).cast(), 1);
        libc::pwrite(-1, text.as_ptr().cast(), text.len(), 0);
        libc::fremovexattr(-1, marker::NAME.as_ptr());
        if let Undo::Nice { threads, before } = undo {
            libc::pread(lock, (&raw mut byte).cast(), 1, 0);
            change_nice(threads, NO_NICE, before);
        }
        libc::mlockall(libc::MCL_CURRENT | libc::MCL_ONFAULT);
        libc::write(end, (&raw const byte).cast(), 1);
        while libc::read(end, (&raw mut byte).cast(), 1) < 0 && Errno::last() == Errno(libc::EINTR) {}
        if let Undo::Nice { threads, before } = undo {
            // Without a marker nothing was changed, or it was put back: whatever there is now is somebody else's.
            let mut first = b' ';
            let count = libc::pread(lock, (&raw mut first).cast(), 1, 0);
            if count < 0 || (count == 1 && first != b' ') {
                change_nice(threads, URGENT, before);
                libc::ftruncate(lock, 0);
            }
        } else if may() && libc::pwrite(control, text.as_ptr().cast(), text.len(), 0) == text.len() as isize {
            let is_done = match undo {
                Undo::OomKiller { top, usage, limit } => {
                    free_groups_below(file, top, || is_spared || has_room(usage, limit))
                }
                _ => true,
            };
            if is_done {
                libc::fremovexattr(control, marker::NAME.as_ptr());
                libc::ftruncate(lock, 0);
            }
        }
        libc::_exit(0)
    }
}

/// Whether there is room below the limit of the group with this `usage`. Allocates nothing.
fn has_room(usage: &File, limit: u64) -> bool {
    let mut text = [0u8; 32];
    // Where it can't be read there is no group any more.
    usage.read_at(&mut text, 0).map_or(true, |_| number(&text).saturating_add(ROOM) <= limit)
}

/// Gives the OOM killer back to the groups below that were made while their group was held, as the next hold would, but now. Returns whether that is done.
///
/// This allocates memory, in a fork of a process that may have had several threads. The malloc of the C library and those that stand in for it
/// keep their locks free across a fork; should one of them not, the alarm ends this, and the marker stays for the next hold.
///
/// Where the guard is in the group, it waits a moment until that has room again: the memory of those whom the kernel has killed there is not free at
/// once, and whoever asks for some until then is the next one.
fn free_groups_below(control: &File, top: &Path, has_room: impl Fn() -> bool) -> bool {
    // SAFETY: the set is initialised before it is used; the default disposition of this signal ends the process.
    unsafe {
        let mut alarm: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut alarm);
        libc::sigaddset(&mut alarm, libc::SIGALRM);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(PATIENCE_SECONDS);
        libc::sigprocmask(libc::SIG_UNBLOCK, &alarm, std::ptr::null_mut());
    }
    // Gone with the holder's own end, where it came to that. It takes no memory to ask.
    if rustix::fs::fgetxattr_query(control, marker::NAME) == Err(rustix::io::Errno::NODATA) {
        return true;
    }
    for _ in 0..WAITS {
        if has_room() {
            break;
        }
        std::thread::sleep(AGAIN);
    }
    loop {
        let done = match Marker::find(control) {
            Ok(Some(Marker::OomKiller { off_below })) => turn_oom_killers_on_below(top, &off_below),
            found => found.map(drop),
        };
        match done {
            // There was no memory for it, or none to put the answer into.
            Err(Errno(libc::ENOMEM | libc::EFAULT)) => std::thread::sleep(AGAIN),
            Err(Errno(libc::ENOENT | libc::ENODEV)) | Ok(()) => return true,
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_of_ours_are_known() {
        assert_eq!(
            [&b"0\n"[..], b"4096", b"max\n", b"", b"99999999999999999999999"].map(number),
            [0, 4096, u64::MAX, u64::MAX, u64::MAX]
        );
        let ours = Ours::new().unwrap();
        assert!(!ours.has(b"max\n") && !ours.has(b"0\n"));
        let known = || {
            assert!(ours.has(b"4096\n"));
            Ok(())
        };
        ours.change(4096, known).unwrap();
        assert!(ours.change(8192, || Err(Errno(libc::ENODEV))).is_err());
        assert!(ours.has(b"4096\n") && ours.has(b"8192\nmore") && !ours.has(b"max\n"));
        ours.change(8192, || Ok(())).unwrap();
        assert!(!ours.has(b"4096\n") && ours.has(b"8192\n"));
    }
}
