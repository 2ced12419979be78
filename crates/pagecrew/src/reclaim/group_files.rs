//! What a group tells of itself, and how memory of it is reclaimed without its tasks: `memory.reclaim` (version 2, 5.19), or
//! `memory.force_empty` cut short (version 1).
//!
//! A limit is never changed for that: a lowered one could kill. The kernel refuses nothing here that a group would need: what is reclaimed is
//! what its tasks would have reclaimed next.

use super::group_plan::Detail;
use crate::group::{Group, Version};
use crate::sys::Errno;
use crate::sys::cgroup::NO_LIMIT;
use crate::sys::clock::now_ns;
use crate::sys::group_memory::{self, Stat};
use crate::sys::interrupt::Interrupter;
use rustix::event::epoll::EventFlags;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Where the kernel comes by each time that it has reclaimed a little of a group, in a write that has no end of its own.
pub(super) const PIECE: &str = "vmscan/mm_vmscan_memcg_reclaim_end";
/// A piece is no less than this (32 pages); more, where the page cache has large folios.
const PIECE_LEAST: f64 = 32.0 * 4096.0;
/// A write of version 1 is cut short after so many of them, whatever they were.
const PIECES_MOST: f64 = 128.0;
/// Protection is looked for in so many groups below at most.
const BELOW_MOST: usize = 1000;

/// Where the kernel says that tasks of a group were at its limit.
#[derive(Debug, Clone)]
pub struct Signal {
    file: Arc<File>,
    version: Version,
}

impl Signal {
    /// That of a group.
    ///
    /// # Errors
    /// `ENOENT` or `ENODEV` if the group has gone, `EOPNOTSUPP` where the kernel says nothing of it.
    pub fn of(group: &Group) -> Result<Signal, Errno> {
        let open = |name: &str| File::open(group.path().join(name)).map_err(Errno::from);
        let file = match group.version() {
            // Events of the groups below count for their own limits.
            Version::V2 => open("memory.events.local").or_else(|_| open("memory.events"))?,
            Version::V1 => {
                let pressure = open("memory.pressure_level")?;
                group.notify(&pressure, " low").map_err(|_| Errno(libc::EOPNOTSUPP))?
            }
        };
        let signal = Signal { file: Arc::new(file), version: group.version() };
        signal.clear();
        Ok(signal)
    }

    /// The descriptor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What it is polled for, once. Files of groups can be read at any time: what is new there is something exceptional.
    pub fn events(&self) -> EventFlags {
        let ready = match self.version {
            Version::V1 => EventFlags::IN,
            Version::V2 => EventFlags::PRI,
        };
        ready | EventFlags::ONESHOT
    }

    /// Forgets what was said by now.
    pub fn clear(&self) {
        let _ = match self.version {
            Version::V1 => std::io::Read::read(&mut &*self.file, &mut [0; 8]),
            Version::V2 => self.file.read_at(&mut [0; 512], 0),
        };
    }
}

/// How a group was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The limit at which its tasks reclaim for themselves; `None` where there is none.
    pub limit: Option<u64>,
    /// What is charged.
    pub usage: u64,
    /// How often tasks were at the limit so far.
    pub stalls: u64,
}

/// The files of a group that is looked at again and again.
#[derive(Debug)]
pub struct Files {
    usage: File,
    limits: Vec<File>,
    with_swap: Option<WithSwap>,
    stalls: Stalls,
    stat: File,
    pressure: Option<File>,
    cpu: Option<File>,
    /// What is protected in the groups below.
    protected_below: u64,
    protections: Vec<File>,
    reclaim: Reclaim,
    room: Vec<u8>,
}

/// Version 1 has a limit of memory and swap together as well, where it accounts swap. The kernel charges that one first: where both limits are the
/// same, as in a container that may not swap, it alone counts how often tasks were at it (Linux 6.18 does not).
#[derive(Debug)]
struct WithSwap {
    usage: File,
    limit: File,
    failures: File,
}

impl WithSwap {
    fn open(group: &Group) -> Option<WithSwap> {
        let read = |name: &str| File::open(group.path().join(name)).ok();
        Some(WithSwap {
            usage: read("memory.memsw.usage_in_bytes")?,
            limit: read("memory.memsw.limit_in_bytes")?,
            failures: read("memory.memsw.failcnt")?,
        })
    }
}

#[derive(Debug)]
enum Stalls {
    FailureCount(File),
    Events(Signal),
}

#[derive(Debug)]
enum Reclaim {
    Bytes(File),
    Everything {
        file: File,
        /// What a piece was.
        piece: f64,
        /// What is charged in a second while nothing is reclaimed, in bytes.
        rate: f64,
        /// What was charged after the last write, and when.
        last: Option<(u64, u64)>,
    },
}

/// What a write has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes.
    pub reclaimed: u64,
    /// Whether the kernel has found as much as it was asked for.
    pub enough: bool,
}

impl Files {
    /// Opens those of a group, with the signal of the same group.
    ///
    /// # Errors
    /// `ENOENT` or `ENODEV` if the group has gone; `EACCES` or `EROFS` where nothing may be reclaimed.
    pub fn open(group: &Group, signal: &Signal) -> Result<Files, Errno> {
        let read = |name: &str| File::open(group.path().join(name)).map_err(Errno::from);
        let write = |name: &str| OpenOptions::new().write(true).open(group.path().join(name)).map_err(Errno::from);
        let optional = |names: &[&str]| -> Vec<File> { names.iter().filter_map(|name| read(name).ok()).collect() };
        match group.version() {
            Version::V1 => Ok(Files {
                usage: read("memory.usage_in_bytes")?,
                limits: vec![read("memory.limit_in_bytes")?],
                with_swap: WithSwap::open(group),
                stalls: Stalls::FailureCount(read("memory.failcnt")?),
                stat: read("memory.stat")?,
                pressure: None,
                cpu: None,
                protected_below: 0,
                protections: Vec::new(),
                reclaim: Reclaim::Everything {
                    file: write("memory.force_empty")?,
                    piece: PIECE_LEAST,
                    rate: 0.0,
                    last: None,
                },
                room: vec![0; 16 << 10],
            }),
            Version::V2 => Ok(Files {
                usage: read("memory.current")?,
                limits: optional(&["memory.high", "memory.max"]),
                with_swap: None,
                stalls: Stalls::Events(signal.clone()),
                stat: read("memory.stat")?,
                pressure: read("memory.pressure").ok(),
                cpu: read("cpu.stat").ok(),
                protected_below: protected_below(group),
                protections: optional(&["memory.low", "memory.min"]),
                reclaim: Reclaim::Bytes(write("memory.reclaim")?),
                room: vec![0; 16 << 10],
            }),
        }
    }

    /// A look, which costs a few microseconds.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn look(&mut self) -> Result<Found, Errno> {
        let room = &mut self.room;
        let mut only = |file: &File| number(file, &mut *room)?.ok_or(Errno(libc::EILSEQ));
        // First, so that what is charged meanwhile does not count as swapped.
        let with_swap = match &self.with_swap {
            Some(WithSwap { usage, limit, failures }) => Some((only(usage)?, only(limit)?, only(failures)?)),
            None => None,
        };
        let usage = only(&self.usage)?;
        let mut limit = NO_LIMIT;
        for file in &self.limits {
            limit = limit.min(number(file, room)?.unwrap_or(NO_LIMIT));
        }
        let stalls = match &self.stalls {
            Stalls::FailureCount(file) => number(file, room)?,
            Stalls::Events(signal) => group_memory::times_at_limit(text(&signal.file, room)?),
        };
        let mut stalls = stalls.ok_or(Errno(libc::EILSEQ))?;
        if let Some((with_swap, limit_with_swap, failures)) = with_swap {
            if limit_with_swap < NO_LIMIT {
                limit = limit.min(limit_with_swap.saturating_sub(with_swap.saturating_sub(usage)));
            }
            stalls = stalls.saturating_add(failures);
        }
        Ok(Found { limit: (limit < NO_LIMIT).then_some(limit), usage, stalls })
    }

    /// What takes tens of microseconds to find out, and more on machines with many CPUs: the kernel adds up what each of them has counted.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn detail(&mut self) -> Result<Detail, Errno> {
        let version_1 = matches!(self.reclaim, Reclaim::Everything { .. });
        let Stat { inactive_file, unwritten, returned } =
            group_memory::stat(text(&self.stat, &mut self.room)?, version_1);
        let mut own = 0;
        for file in &self.protections {
            own = own.max(number(file, &mut self.room)?.unwrap_or(u64::MAX));
        }
        let mut optional = |file: &Option<File>, parse: fn(&str) -> Option<u64>| {
            file.as_ref().and_then(|file| parse(text(file, &mut self.room).ok()?))
        };
        Ok(Detail {
            spare: inactive_file.saturating_sub(unwritten),
            returned,
            waited_us: optional(&self.pressure, group_memory::stall_us),
            throttled: optional(&self.cpu, group_memory::throttled).unwrap_or(0),
            protected: own.max(self.protected_below),
        })
    }

    /// Reclaims about `bytes` of the group. Where the kernel takes no number (version 1), it is cut short after as many pieces as that should
    /// be, and how much it was is an estimate.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn reclaim(&mut self, bytes: u64, interrupter: Option<&Interrupter>) -> Result<Outcome, Errno> {
        match (&mut self.reclaim, interrupter) {
            (Reclaim::Bytes(file), _) => match file.write_at(bytes.to_string().as_bytes(), 0).map_err(Errno::from) {
                Ok(_) => Ok(Outcome { reclaimed: bytes, enough: true }),
                // As much as there was; nobody says how much.
                Err(Errno(libc::EAGAIN)) => Ok(Outcome { reclaimed: 0, enough: false }),
                Err(Errno(libc::EINTR)) => Ok(Outcome { reclaimed: 0, enough: true }),
                Err(error) => Err(error),
            },
            (Reclaim::Everything { file, piece, rate, last }, Some(interrupter)) => {
                let before = number(&self.usage, &mut self.room)?.unwrap_or(0);
                let pieces = (bytes as f64 / *piece).clamp(1.0, PIECES_MOST).floor();
                let begin = now_ns();
                if let Some((usage, at)) = *last
                    && begin > at
                {
                    let grown = before.saturating_sub(usage) as f64 * 1e9 / (begin - at) as f64;
                    *rate = if *rate == 0.0 { grown } else { 0.8 * *rate + 0.2 * grown };
                }
                let result = interrupter.after(pieces as u64, || file.write_at(b"0", 0).map_err(Errno::from))?;
                let end = now_ns();
                let after = number(&self.usage, &mut self.room)?.unwrap_or(0);
                *last = Some((after, end));
                let meanwhile = *rate * (end - begin) as f64 / 1e9;
                let reclaimed = (before as f64 + meanwhile - after as f64).max(0.0);
                *piece = (0.8 * *piece + 0.2 * reclaimed / pieces).max(PIECE_LEAST);
                match result {
                    // It comes to its end by itself where nothing is left to reclaim.
                    Ok(_) => Ok(Outcome { reclaimed: reclaimed as u64, enough: false }),
                    Err(Errno(libc::EINTR)) => Ok(Outcome { reclaimed: reclaimed as u64, enough: true }),
                    Err(error) => Err(error),
                }
            }
            (Reclaim::Everything { .. }, None) => Err(Errno(libc::ENOSYS)),
        }
    }
}

/// What is protected in the groups right below, together.
fn protected_below(group: &Group) -> u64 {
    let Ok(entries) = fs::read_dir(group.path()) else { return 0 };
    let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let of = |directory: fs::DirEntry| {
        let protection = |name: &str| {
            let text = fs::read_to_string(directory.path().join(name)).ok()?;
            if text.trim() == "max" { Some(u64::MAX) } else { text.trim().parse().ok() }
        };
        protection("memory.low").max(protection("memory.min")).unwrap_or(0)
    };
    directories.take(BELOW_MOST).map(of).fold(0, u64::saturating_add)
}

fn text<'r>(file: &File, room: &'r mut [u8]) -> Result<&'r str, Errno> {
    let count = file.read_at(room, 0)?;
    std::str::from_utf8(&room[..count]).map_err(|_| Errno(libc::EILSEQ))
}

/// The number in a file that has only one; `None` for `max`.
fn number(file: &File, room: &mut [u8]) -> Result<Option<u64>, Errno> {
    match text(file, room)?.lines().next().unwrap_or("").trim() {
        "max" => Ok(None),
        text => text.parse().map(Some).map_err(|_| Errno(libc::EILSEQ)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A made-up group: a directory of plain files.
    struct MadeUp(tempfile::TempDir);

    impl MadeUp {
        fn new(files: &[(&str, &str)]) -> MadeUp {
            let made_up = MadeUp(tempfile::tempdir().unwrap());
            files.iter().for_each(|(name, text)| made_up.write(name, text));
            made_up
        }

        fn v2() -> MadeUp {
            MadeUp::new(&[
                ("cgroup.procs", ""),
                ("memory.current", "262144000\n"),
                ("memory.high", "max\n"),
                ("memory.max", "268435456\n"),
                ("memory.low", "0\n"),
                ("memory.min", "4096\n"),
                ("memory.events.local", "low 0\nhigh 2\nmax 5\noom 0\n"),
                ("memory.stat", "inactive_file 9000\nfile_dirty 1000\nworkingset_restore_file 2\n"),
                ("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=77\nfull avg10=0.00 total=5\n"),
                ("cpu.stat", "usage_usec 5\nnr_throttled 3\n"),
                ("memory.reclaim", ""),
            ])
        }

        fn v1() -> MadeUp {
            MadeUp::new(&[
                ("cgroup.procs", ""),
                ("memory.usage_in_bytes", "262144000\n"),
                ("memory.limit_in_bytes", "268435456\n"),
                ("memory.failcnt", "9\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 9000\ntotal_dirty 1000\n"),
                ("memory.force_empty", ""),
            ])
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.0.path().join(name), text).unwrap();
        }

        fn open(&self) -> Result<Files, Errno> {
            let group = Group::at(self.0.path()).unwrap().unwrap();
            let signal = match group.version() {
                // Registering needs the kernel.
                Version::V1 => Signal { file: Arc::new(File::open("/dev/null").unwrap()), version: Version::V1 },
                Version::V2 => Signal::of(&group)?,
            };
            Files::open(&group, &signal)
        }
    }

    #[test]
    fn a_group_of_version_2() {
        let made_up = MadeUp::v2();
        let mut files = made_up.open().unwrap();
        assert_eq!(files.look(), Ok(Found { limit: Some(256 * MIB), usage: 250 * MIB, stalls: 7 }));
        let detail = Detail { spare: 8000, returned: 8192, waited_us: Some(77), throttled: 3, protected: 4096 };
        assert_eq!(files.detail(), Ok(detail));
        assert_eq!(files.reclaim(5 * MIB, None), Ok(Outcome { reclaimed: 5 * MIB, enough: true }));
        assert_eq!(fs::read_to_string(made_up.0.path().join("memory.reclaim")).unwrap(), (5 * MIB).to_string());
        // Whoever has set memory.high, that is the limit; and what is set later counts.
        made_up.write("memory.high", "209715200\n");
        assert_eq!(files.look().unwrap().limit, Some(200 * MIB));
        made_up.write("memory.high", "max\n");
        made_up.write("memory.max", "max\n");
        assert_eq!(files.look().unwrap().limit, None);
        made_up.write("memory.min", "max\n");
        assert_eq!(files.detail().unwrap().protected, u64::MAX);
    }

    #[test]
    fn what_is_protected_below_counts() {
        let made_up = MadeUp::v2();
        for (name, low) in [("a", "1000\n"), ("b", "5000\n"), ("c", "x")] {
            fs::create_dir(made_up.0.path().join(name)).unwrap();
            made_up.write(&format!("{name}/memory.low"), low);
        }
        assert_eq!(made_up.open().unwrap().detail().unwrap().protected, 6000);
    }

    #[test]
    fn kernels_that_say_less() {
        let made_up = MadeUp::v2();
        for name in ["memory.pressure", "cpu.stat", "memory.low", "memory.min"] {
            fs::remove_file(made_up.0.path().join(name)).unwrap();
        }
        // Before 5.2.
        fs::rename(made_up.0.path().join("memory.events.local"), made_up.0.path().join("memory.events")).unwrap();
        let mut files = made_up.open().unwrap();
        assert_eq!(files.look().unwrap().stalls, 7);
        assert_eq!(files.detail(), Ok(Detail { spare: 8000, returned: 8192, ..Detail::default() }));
        fs::remove_file(made_up.0.path().join("memory.reclaim")).unwrap();
        assert_eq!(made_up.open().err(), Some(Errno(libc::ENOENT)));
    }

    #[test]
    fn nonsense_is_an_error() {
        for (name, text) in [
            ("memory.current", ""),
            ("memory.current", "max\n"),
            ("memory.max", "x\n"),
            ("memory.events.local", "high 1\n"),
            ("memory.max", "-1\n"),
        ] {
            let made_up = MadeUp::v2();
            made_up.write(name, text);
            assert_eq!(made_up.open().unwrap().look(), Err(Errno(libc::EILSEQ)), "{name} {text:?}");
        }
        let made_up = MadeUp::v2();
        fs::write(made_up.0.path().join("memory.stat"), [0xff; 100]).unwrap();
        assert_eq!(made_up.open().unwrap().detail(), Err(Errno(libc::EILSEQ)));
    }

    #[test]
    fn a_group_of_version_1() {
        let made_up = MadeUp::v1();
        let mut files = made_up.open().unwrap();
        assert_eq!(files.look(), Ok(Found { limit: Some(256 * MIB), usage: 250 * MIB, stalls: 9 }));
        assert_eq!(files.detail(), Ok(Detail { spare: 8000, ..Detail::default() }));
        assert_eq!(files.reclaim(MIB, None), Err(Errno(libc::ENOSYS)));
        made_up.write("memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(files.look().unwrap().limit, None);
    }

    #[test]
    fn in_version_1_the_limit_of_memory_and_swap_counts_too() {
        let made_up = MadeUp::v1();
        made_up.write("memory.usage_in_bytes", "209715200\n");
        made_up.write("memory.memsw.usage_in_bytes", "209715200\n");
        made_up.write("memory.memsw.limit_in_bytes", "268435456\n");
        made_up.write("memory.memsw.failcnt", "2\n");
        let mut files = made_up.open().unwrap();
        assert_eq!(files.look(), Ok(Found { limit: Some(256 * MIB), usage: 200 * MIB, stalls: 11 }));
        // What is swapped takes room, too.
        made_up.write("memory.memsw.usage_in_bytes", "262144000\n");
        assert_eq!(files.look(), Ok(Found { limit: Some(206 * MIB), usage: 200 * MIB, stalls: 11 }));
        made_up.write("memory.memsw.limit_in_bytes", "536870912\n");
        assert_eq!(files.look().unwrap().limit, Some(256 * MIB));
        made_up.write("memory.memsw.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(files.look().unwrap().limit, Some(256 * MIB));
        made_up.write("memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(files.look().unwrap().limit, None);
    }
}
