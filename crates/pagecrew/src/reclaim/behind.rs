//! Drop-behind: what programs have used of a file, and will not use again, leaves the page cache before it takes others' place. For programs that
//! somebody names: backups and the like.
//!
//! While the machine has demand, the descriptors of such programs are looked at a few times a second: where a file is used from one end to the
//! other, what is behind the position is dropped ([`super::behind_plan`]). Nothing is asked of the program, and what is mapped or has yet to be
//! written stays. Files are opened for a moment only, so that nobody's unmounting fails for it.

use super::behind_plan::{Drop as Dropping, Reading};
use crate::stats::figures;
use crate::sys::clock::{now_ns, thread_cpu_ns};
use crate::sys::process::start_ticks;
use crate::sys::thread::leave_descriptors;
use crate::sys::{Errno, page_cache, process_list};
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// From one look to the next, and no less than so many times what one takes.
const LOOK: Duration = Duration::from_millis(250);
const LOOK_SHARE: u32 = 50;
/// So often it is looked which processes there are.
const PROCESSES: Duration = Duration::from_secs(2);
/// So many are looked at, at most, and so many descriptors of each.
const PROCESSES_MOST: usize = 64;
const DESCRIPTORS_MOST: usize = 1024;

figures! {
    /// How it stands with drop-behind.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct BehindStanding: Reclaim, "pagecrew_reclaim_behind_", [], "behind." {
        processes: u64, Gauge Count, "Processes whose files are dropped behind them while the machine has demand (setting drop-behind).";
        dropped_bytes: u64, Counter Bytes, "What they have used of files and was dropped behind them, as far as it was in the page cache.";
        refused: u64, Counter Count, "Looks at such a process that were refused: that takes CAP_SYS_PTRACE.";
        cpu_ns key "cpu_seconds": u64, Counter Seconds, "CPU time of that.";
    }
}

/// Drops behind programs with certain names, until this is dropped.
pub struct Behind {
    shared: Arc<Shared>,
    thread: thread::Thread,
}

struct Shared {
    demand: AtomicBool,
    ending: AtomicBool,
    names: Mutex<Vec<String>>,
    standing: Mutex<BehindStanding>,
}

impl Behind {
    /// Begins, for programs with these names (`/proc/PID/comm`).
    ///
    /// # Errors
    /// If there can't be a thread for it.
    pub fn start(names: Vec<String>) -> Result<Behind, Errno> {
        let shared = Arc::new(Shared {
            demand: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            names: Mutex::new(names),
            standing: Mutex::default(),
        });
        let run = {
            let shared = shared.clone();
            move || Thread { shared, processes: HashMap::new(), looked_ns: None }.run()
        };
        let thread = thread::Builder::new().name("behind".to_owned()).spawn(run)?.thread().clone();
        Ok(Behind { shared, thread })
    }

    /// From now on for these.
    pub fn change(&self, names: Vec<String>) {
        *self.shared.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
        self.thread.unpark();
    }

    /// Whether the machine has demand. Waits for nobody.
    pub fn demand(&self, demand: bool) {
        if self.shared.demand.swap(demand, Relaxed) != demand {
            self.thread.unpark();
        }
    }

    /// What says how it stands, for as long as that is wanted.
    pub fn standing(&self) -> impl Fn() -> BehindStanding + Send + Sync + use<> {
        let shared = self.shared.clone();
        move || *shared.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.shared.ending.store(true, Relaxed);
        // It has nothing to undo, so nobody waits for it.
        self.thread.unpark();
    }
}

/// What is known of a process, which has a number and was started at a time.
#[derive(Default)]
struct Process {
    used: Option<u64>,
    readings: HashMap<Key, Reading>,
}

/// A descriptor of a process, and the file that it is of.
type Key = (i32, u64, u64);

struct Thread {
    shared: Arc<Shared>,
    processes: HashMap<(u32, u64), Process>,
    /// When it was looked which there are.
    looked_ns: Option<u64>,
}

impl Thread {
    fn run(mut self) {
        // Files may be those of a server that does not answer, and then this thread can't be ended, not by SIGKILL either. With a table of its own it keeps
        // nobody from seeing that the process is at its end. (Before Linux 5.9 it has none.)
        let _ = leave_descriptors();
        while !self.shared.ending.load(Relaxed) {
            let names = self.shared.names.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if !self.shared.demand.load(Relaxed) || names.is_empty() {
                self.processes.clear();
                self.looked_ns = None;
                self.note(|standing| standing.processes = 0);
                thread::park();
                continue;
            }
            let (begin, cpu) = (now_ns(), thread_cpu_ns());
            if self.looked_ns.is_none_or(|at| begin.saturating_sub(at) >= PROCESSES.as_nanos() as u64) {
                self.look_around(&names);
                self.looked_ns = Some(begin);
            }
            let (mut dropped, mut refused) = (0, 0);
            self.processes.retain(|&(pid, started), process| {
                match process.look(pid, started) {
                    Ok(bytes) => dropped += bytes,
                    Err(Errno(libc::EACCES | libc::EPERM)) => refused += 1,
                    // It has gone.
                    Err(_) => return false,
                }
                true
            });
            let processes = self.processes.len() as u64;
            let cpu_ns = thread_cpu_ns() - cpu;
            self.note(|standing| {
                standing.processes = processes;
                standing.dropped_bytes += dropped;
                standing.refused += refused;
                standing.cpu_ns += cpu_ns;
            });
            thread::park_timeout(LOOK.max(Duration::from_nanos(now_ns() - begin) * LOOK_SHARE));
        }
    }

    fn note(&self, change: impl FnOnce(&mut BehindStanding)) {
        change(&mut self.shared.standing.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Finds the processes with these names.
    fn look_around(&mut self, names: &[String]) {
        let root = Path::new("/");
        let meant = |pid: u32| {
            let meant = names.contains(&process_list::name(root, pid).ok()?);
            if meant { Some((pid, start_ticks(pid as i32).ok()?)) } else { None }
        };
        let found: Vec<_> = process_list::pids(root).unwrap_or_default().into_iter().filter_map(meant).collect();
        self.processes.retain(|key, _| found.contains(key));
        for key in found {
            if self.processes.len() < PROCESSES_MOST {
                self.processes.entry(key).or_default();
            }
        }
    }
}

impl Process {
    /// Looks at the files of process `pid`, and drops what is behind it. Returns how many bytes that were.
    fn look(&mut self, pid: u32, started: u64) -> Result<u64, Errno> {
        let at = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
        let used = || used(&std::fs::read_to_string(at("io"))?).ok_or(Errno(libc::EILSEQ));
        let before = self.used.replace(used()?);
        if start_ticks(pid as i32)? != started {
            return Err(Errno(libc::ESRCH));
        }
        let (mut readings, mut found) = (HashMap::new(), Vec::new());
        for entry in std::fs::read_dir(at("fd"))?.flatten().take(DESCRIPTORS_MOST) {
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            // Nothing is opened by that: what it is, is not known yet.
            let Ok(place) = rustix::fs::open(entry.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else {
                continue;
            };
            let place = File::from(place);
            let Ok(facts) = place.metadata() else { continue };
            if !facts.is_file() {
                continue;
            }
            let text = std::fs::read_to_string(at(&format!("fdinfo/{number}")));
            let Some(position) = text.ok().as_deref().and_then(position) else { continue };
            found.push(((number, facts.dev(), facts.ino()), place, position));
        }
        // All that was used between the last look's beginning and now: no less than what the positions have moved.
        let since = used()?.saturating_sub(before.unwrap_or(u64::MAX));
        let mut dropped = 0;
        for (key, place, position) in found {
            let mut reading = self.readings.remove(&key).unwrap_or_else(|| Reading::new(position));
            if let Some(Dropping { range, new }) = reading.note(position, since) {
                // What may not be opened, or has gone, stays.
                dropped += if drop_behind(&place, &range).is_ok() { new } else { 0 };
            }
            readings.insert(key, reading);
        }
        self.readings = readings;
        Ok(dropped)
    }
}

/// Drops `range` of the file at `place`.
fn drop_behind(place: &File, range: &Range<u64>) -> Result<(), Errno> {
    // Nobody waits: not for what is no regular file after all, nor for whoever has a lease (who is asked for it).
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let path = format!("/proc/thread-self/fd/{}", place.as_raw_fd());
    page_cache::drop_range(&File::from(rustix::fs::open(path, flags, Mode::empty())?), range)
}

/// What a process has read and written in all, by its `io`.
fn used(text: &str) -> Option<u64> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(field("rchar:")?.saturating_add(field("wchar:")?))
}

/// Where a descriptor is in its file, by its `fdinfo`.
fn position(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("pos:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_the_kernel_says_of_a_process() {
        assert_eq!(used("rchar: 5\nwchar: 7\nsyscr: 1\nread_bytes: 9\n"), Some(12));
        assert_eq!(used("rchar: 5\n"), None);
        assert_eq!(position("pos:\t4096\nflags:\t0100000\nmnt_id:\t25\n"), Some(4096));
        assert_eq!(position("flags: 0\n"), None);
    }

    #[test]
    fn what_this_process_has_read_is_dropped_behind_it() {
        let Some(file) = page_cache::file(64 * MIB) else { return };
        let mut reader = File::open(file.path()).unwrap();
        let pid = std::process::id();
        let started = start_ticks(pid as i32).unwrap();
        let mut process = Process::default();
        process.look(pid, started).unwrap();
        let mut chunk = vec![0; MIB];
        (0..60).for_each(|_| reader.read_exact(&mut chunk).unwrap());
        // Other tests of this process may use files as well.
        assert!(process.look(pid, started).unwrap() >= 58 * MIB as u64);
        assert_eq!(page_cache::cached(file.as_file(), 64 * MIB), 6 * MIB);
        assert_eq!(process.look(pid, started + 1), Err(Errno(libc::ESRCH)));
    }

    #[test]
    fn nobody_is_looked_at_without_demand() {
        let behind = Behind::start(vec!["no such name".to_owned()]).unwrap();
        let standing = behind.standing();
        behind.demand(true);
        behind.demand(false);
        behind.change(Vec::new());
        behind.demand(true);
        drop(behind);
        assert_eq!((standing().dropped_bytes, standing().refused), (0, 0));
    }
}
