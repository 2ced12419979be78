//! What trimming needs of a process: its huge pages, a look at them, and the kernel to split them.
//!
//! The trait stands between the trimmer and the kernel, so that the trimmer is tested against kernels and processes that this machine
//! doesn't have.

use crate::sys::Errno;
use crate::sys::memory::Range;
use crate::sys::pagemap::{Category, HugeKind, Pagemap};
use crate::sys::process::Process;
use std::fmt;

/// A mapping that may have huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Where it is.
    pub range: Range,
    /// What the kernel or the program calls it: a path, `[heap]`, `[anon:NAME]`, or nothing.
    pub name: String,
    /// What it is made of.
    pub kind: MappingKind,
}

/// What a mapping is made of, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingKind {
    /// Private anonymous memory that can be read.
    Anonymous,
    /// A file or shared memory.
    File,
    /// Memory that nobody may read.
    Unreadable,
    /// Memory whose page faults another process handles (userfaultfd), or of reserved huge pages (hugetlb).
    Special,
}

/// A process as the trimmer sees it.
pub trait Target {
    /// Its mappings that are long enough for a huge page.
    ///
    /// # Errors
    /// `ESRCH` where it has ended; `EACCES` or `EPERM` where it may not be looked at.
    fn mappings(&self) -> Result<Vec<Mapping>, Errno>;

    /// Calls `each` for every run of huge pages of one kind in `range`.
    ///
    /// # Errors
    /// Those of [`Pagemap::huge_pages`].
    fn huge_pages(&self, range: Range, each: &mut dyn FnMut(Range, HugeKind)) -> Result<(), Errno>;

    /// Whether no other process maps the page at `address`; `None` if there is none.
    ///
    /// # Errors
    /// Those of [`Pagemap::exclusive`].
    fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno>;

    /// Reads `pieces` into `room`.
    ///
    /// # Errors
    /// Those of [`Process::read`].
    fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno>;

    /// Has the kernel split the huge page that `part` belongs to.
    ///
    /// # Errors
    /// Those of [`Process::cold`].
    fn split(&self, part: Range) -> Result<(), Errno>;

    /// Bytes of `range` that are of `category`.
    ///
    /// # Errors
    /// Those of [`Pagemap::bytes_of`].
    fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno>;

    /// Whether it still runs, and runs the program that it ran when it was opened.
    fn alive(&self) -> bool;
}

/// Why a process can't be trimmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetError {
    /// There is no such process, or it has ended.
    Ended(i32),
    /// The number is a thread's.
    Thread(i32),
    /// The right to look at its memory is missing.
    Access(i32),
    /// The right to give it advice is missing.
    Advice(i32),
    /// The kernel refused otherwise.
    Kernel(i32, Errno),
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetError::Ended(pid) => write!(f, "process {pid} has ended"),
            TargetError::Thread(pid) => write!(f, "{pid} is a thread and not a process"),
            TargetError::Access(pid) => write!(
                f,
                "the memory of process {pid} may not be read: that needs CAP_SYS_PTRACE, or the same user and \
                 kernel.yama.ptrace_scope 0"
            ),
            TargetError::Advice(pid) => {
                write!(f, "process {pid} may not be given advice: that needs CAP_SYS_NICE (root has it)")
            }
            TargetError::Kernel(pid, error) => write!(f, "process {pid}: {error}"),
        }
    }
}

impl std::error::Error for TargetError {}

/// Another process, or this one, by its number.
#[derive(Debug)]
pub struct Other {
    process: Process,
    pagemap: Pagemap,
}

impl Other {
    /// Opens process `pid`, and sees whether it may be trimmed: reading it, and advising it unless `only_look`.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn open(pid: i32, only_look: bool) -> Result<Other, TargetError> {
        let error = |error: Errno| match error.0 {
            libc::ESRCH | libc::ENOENT => TargetError::Ended(pid),
            libc::EACCES | libc::EPERM => TargetError::Access(pid),
            _ => TargetError::Kernel(pid, error),
        };
        let process = Process::open(pid).map_err(|refused| match refused.0 {
            // The latter since 6.14.
            libc::EINVAL | libc::ENOENT => TargetError::Thread(pid),
            _ => error(refused),
        })?;
        let other = Other { pagemap: Pagemap::of(pid).map_err(error)?, process };
        // The page map may be opened with fewer rights than reading takes. An address that nothing is mapped at shows which there are.
        let nowhere = Range { start: 0, len: 1 };
        match other.process.read(&[nowhere], &mut [0]) {
            Err(refused @ Errno(libc::EPERM | libc::EACCES | libc::ESRCH | libc::ENOSYS)) => {
                return Err(error(refused));
            }
            _ if only_look => return Ok(other),
            _ => {}
        }
        match other.process.cold(Range { start: 0, len: crate::sys::PAGE_SIZE }) {
            Err(Errno(libc::EPERM | libc::EACCES)) => Err(TargetError::Advice(pid)),
            Err(refused @ Errno(libc::ESRCH | libc::ENOSYS)) => Err(error(refused)),
            // Nothing is mapped there.
            _ => Ok(other),
        }
    }

    /// How many more processes a process may open that has `members` open already and a limit of `open_files`: enough is left for everything
    /// else, since a search opens one more.
    pub fn room(members: u64, open_files: u64) -> u64 {
        const EACH: u64 = 2;
        const OTHERS: u64 = 64;
        (open_files.saturating_sub(OTHERS) / EACH).saturating_sub(members)
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Whether somebody handles page faults of this process: it has a descriptor for that.
    fn has_userfaultfd(&self) -> bool {
        let Ok(files) = std::fs::read_dir(format!("/proc/{}/fd", self.pid())) else { return true };
        files.flatten().any(|file| {
            std::fs::read_link(file.path()).is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]")
        })
    }
}

impl Target for Other {
    fn mappings(&self) -> Result<Vec<Mapping>, Errno> {
        let file = |name: &str| {
            let text = std::fs::read(format!("/proc/{}/{name}", self.pid())).map_err(Errno::from)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        let text: Result<String, Errno> = file("maps");
        // Of a process that runs another program by now, these are others' mappings.
        if !self.pagemap.lives() {
            return Err(Errno(libc::ESRCH));
        }
        let mut mappings: Vec<Mapping> = text?.lines().filter_map(mapping).collect();
        // The flags of mappings are only in a file that takes the kernel a walk through all page tables.
        if self.has_userfaultfd() {
            let flagged: Result<String, Errno> = file("smaps");
            let special = with_faults_handled(&flagged?);
            for mapping in &mut mappings {
                if special.contains(&mapping.range.start) {
                    mapping.kind = MappingKind::Special;
                }
            }
        }
        Ok(mappings)
    }

    fn huge_pages(&self, range: Range, each: &mut dyn FnMut(Range, HugeKind)) -> Result<(), Errno> {
        self.pagemap.huge_pages(range, each)
    }

    fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno> {
        self.pagemap.exclusive(address)
    }

    fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
        let count = self.process.read(pieces, room)?;
        // Behind its back, the number could have become another's.
        if self.process.alive() { Ok(count) } else { Err(Errno(libc::ESRCH)) }
    }

    fn split(&self, part: Range) -> Result<(), Errno> {
        self.process.cold(part)
    }

    fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno> {
        self.pagemap.bytes_of(range, category)
    }

    fn alive(&self) -> bool {
        self.process.alive() && self.pagemap.lives()
    }
}

fn range(text: &str) -> Option<Range> {
    let (start, end) = text.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some(Range { start, len: end.checked_sub(start)? })
}

/// The mapping of a line of `/proc/PID/maps`, if it is long enough for a huge page.
fn mapping(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        rest = rest.trim_start();
        let (field, behind) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = behind;
        field
    };
    let (place, rights, _, _, inode) = (field(), field(), field(), field(), field());
    let range = range(place)?;
    let name = rest.trim_start();
    let first = range.start.checked_next_multiple_of(crate::sys::HUGE_PAGE_SIZE)?;
    if first.checked_add(crate::sys::HUGE_PAGE_SIZE)? > range.end() {
        return None;
    }
    let kind = match rights {
        _ if name.starts_with("/anon_hugepage") => MappingKind::Special,
        _ if inode != "0" || !rights.ends_with('p') => MappingKind::File,
        rights if rights.starts_with('r') => MappingKind::Anonymous,
        _ => MappingKind::Unreadable,
    };
    Some(Mapping { range, name: name.to_owned(), kind })
}

/// The first addresses of the mappings in `/proc/PID/smaps` whose page faults somebody handles.
fn with_faults_handled(text: &str) -> Vec<usize> {
    let mut start = None;
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_ascii_whitespace().any(|flag| matches!(flag, "um" | "uw" | "ui")) {
                found.extend(start);
            }
        } else if let Some(place) = line.split(' ').next().and_then(range) {
            start = Some(place.start);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn descriptors_bound_how_many_are_open() {
        assert_eq!([Other::room(0, 1024), Other::room(470, 1024), Other::room(481, 1024)], [480, 10, 0]);
        assert_eq!((Other::room(0, 10), Other::room(7, u64::MAX)), (0, (u64::MAX - 64) / 2 - 7));
    }

    #[test]
    fn lines_of_maps() {
        let of = |line| mapping(line).map(|mapping| (mapping.range.start, mapping.kind, mapping.name));
        let start = 0x7f00_0000_0000;
        assert_eq!(
            of("7f0000000000-7f0000400000 rw-p 00000000 00:00 0 "),
            Some((start, MappingKind::Anonymous, String::new()))
        );
        assert_eq!(
            of("7f0000000000-7f0000400000 r--p 00000000 00:00 0                  [anon:my heap]"),
            Some((start, MappingKind::Anonymous, "[anon:my heap]".into()))
        );
        assert_eq!(
            of("7f0000000000-7f0000400000 rw-s 00000000 00:01 12  /dev/zero (deleted)"),
            Some((start, MappingKind::File, "/dev/zero (deleted)".into()))
        );
        assert_eq!(
            of("7f0000000000-7f0000400000 rw-p 00000000 00:0f 4711  /anon_hugepage (deleted)").unwrap().1,
            MappingKind::Special
        );
        assert_eq!(of("7f0000000000-7f0000400000 ---p 00000000 00:00 0").unwrap().1, MappingKind::Unreadable);
        // No room for a huge page.
        assert_eq!(of("7f0000001000-7f0000300000 rw-p 00000000 00:00 0"), None);
        for garbage in ["", "x", "1-", "7f0000400000-7f0000000000 rw-p 0 0 0", "0-ffffffffffffffffff rw-p"] {
            assert_eq!(of(garbage), None, "{garbage}");
        }
    }

    #[test]
    fn mappings_whose_faults_are_handled() {
        let text = "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nSize: 4096 kB\nVmFlags: rd wr mr um \n\
                    7f0000800000-7f0000c00000 rw-p 00000000 00:00 0\nSize: 4096 kB\nVmFlags: rd wr mr \n";
        assert_eq!(with_faults_handled(text), [0x7f00_0000_0000]);
        assert_eq!(with_faults_handled("VmFlags: um\n"), [0; 0]);
    }

    #[test]
    fn this_process_is_a_target() {
        let this = Other::open(std::process::id() as i32, false).unwrap();
        assert!(this.alive() && !this.mappings().unwrap().is_empty());
        assert_eq!(Other::open(i32::MAX, true).err(), Some(TargetError::Ended(i32::MAX)));
    }

    #[test]
    fn a_process_that_runs_another_program_is_another_one() {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        // A shell that says that it runs, and becomes another program once it is told to.
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo; read line; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let mut line = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        let other = Other::open(child.id() as i32, true).unwrap();
        assert!(other.alive() && other.mappings().is_ok());
        child.stdin.as_mut().unwrap().write_all(b"go\nx").unwrap();
        // What comes back comes from the other program.
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        assert!(!other.alive());
        assert_eq!(other.mappings(), Err(Errno(libc::ESRCH)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text: String, line in "[0-9a-f]{0,17}-[0-9a-f]{0,17} .{0,40}") {
            mapping(&text);
            mapping(&line);
            with_faults_handled(&text);
        }
    }
}
