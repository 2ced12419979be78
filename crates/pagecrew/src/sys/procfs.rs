//! Small files of `/proc` and `/sys`, read anew each time: no file is kept open (a program may close every descriptor that it
//! does not know).

use super::Errno;
use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Room for one small file, on the heap: it may be read on a stack of a few kilobytes.
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// An empty buffer.
    pub fn new() -> Buffer {
        Buffer(vec![0; 4096])
    }
}

impl Default for Buffer {
    fn default() -> Buffer {
        Buffer::new()
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Reads the beginning of the file at `path`, as much as fits `buffer`.
///
/// # Errors
/// Those of `open` and `read`; `EILSEQ` for contents that are not UTF-8.
pub fn read<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b str, Errno> {
    std::str::from_utf8(read_bytes(path, buffer)?).map_err(|_| Errno(libc::EILSEQ))
}

/// As [`read`], of a file in which there may be a process's name, which may be anything.
///
/// # Errors
/// Those of `open` and `read`.
pub fn read_lossy<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<std::borrow::Cow<'b, str>, Errno> {
    read_bytes(path, buffer).map(String::from_utf8_lossy)
}

fn read_bytes<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
    // SAFETY: the path is a C string; the descriptor is ours alone and closed below; the buffer has the length that is given.
    let count = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(Errno::last());
        }
        let count = libc::read(file, buffer.as_mut_ptr().cast(), buffer.len());
        let error = Errno::last();
        libc::close(file);
        if count < 0 {
            return Err(error);
        }
        count as usize
    };
    Ok(&buffer[..count])
}

/// The beginning of the file `path` under the directory `root`, up to `most` bytes, for those who may allocate. What is not UTF-8 is replaced.
///
/// # Errors
/// Those of `open` and `read`.
pub fn text_under(root: &Path, path: &str, most: usize) -> Result<String, Errno> {
    let mut bytes = Vec::with_capacity(most.min(4096));
    File::open(root.join(path))?.take(most as u64).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Puts `prefixes`, `number` and `suffix` together as a C string in `room`, cut off where the room ends.
pub fn path<'r>(room: &'r mut [u8], prefixes: &[&str], number: u64, suffix: &str) -> &'r CStr {
    use std::io::Write;
    let last = room.len() - 1;
    let mut rest = &mut room[..last];
    for prefix in prefixes {
        let _ = rest.write_all(prefix.as_bytes());
    }
    let _ = write!(rest, "{number}{suffix}");
    let written = last - rest.len();
    room[written] = 0;
    CStr::from_bytes_until_nul(room).unwrap_or(c"")
}

/// Resident memory of this process in bytes (`/proc/self/statm`).
///
/// # Errors
/// Those of [`read`].
pub fn resident_bytes() -> Result<usize, Errno> {
    // On the stack: the end of a process may ask for this where nothing can be allocated.
    let mut buffer = [0; 128];
    let pages = read(c"/proc/self/statm", &mut buffer)?
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|text| text.parse::<usize>().ok());
    Ok(pages.ok_or(Errno(libc::EILSEQ))? * super::PAGE_SIZE)
}

/// Resident memory of this process, and the most that it ever was since the last `exec`, in bytes (`/proc/self/status`).
///
/// # Errors
/// Those of [`read`].
pub fn resident_and_peak() -> Result<(usize, usize), Errno> {
    let mut buffer = Buffer::new();
    let text = read(c"/proc/self/status", &mut buffer)?;
    let field = |name: &str| -> Option<usize> {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(rest.split_ascii_whitespace().next()?.parse::<usize>().ok()? * 1024)
    };
    field("VmRSS:").zip(field("VmHWM:")).ok_or(Errno(libc::EILSEQ))
}

/// How many descriptors this process can have before the kernel makes its table of them longer (`/proc/self/status`).
///
/// # Errors
/// Those of [`read`].
pub fn descriptor_table() -> Result<usize, Errno> {
    let mut buffer = Buffer::new();
    let text = read(c"/proc/self/status", &mut buffer)?;
    let size = text.lines().find_map(|line| line.strip_prefix("FDSize:")).and_then(|size| size.trim().parse().ok());
    size.ok_or(Errno(libc::EILSEQ))
}

/// Tasks of the machine that run or wait for a CPU at this moment, the calling one included (`/proc/loadavg`).
///
/// # Errors
/// Those of [`read`].
pub fn running_tasks() -> Result<usize, Errno> {
    let mut buffer = [0; 128];
    let text = read(c"/proc/loadavg", &mut buffer)?;
    let running = || text.split_ascii_whitespace().nth(3)?.split('/').next()?.parse().ok();
    running().ok_or(Errno(libc::EILSEQ))
}

/// The machine's memory (`/proc/meminfo`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// `MemTotal` in bytes.
    pub total: u64,
    /// `MemAvailable` in bytes: what can be had without swapping.
    pub available: u64,
    /// `SwapTotal` in bytes.
    pub swap: u64,
    /// `SwapFree` in bytes.
    pub free_swap: u64,
    /// `Active(file)` and `Inactive(file)` in bytes: caches of files.
    pub files: u64,
    /// `KReclaimable` (4.20) in bytes, or `SReclaimable`: what else the kernel has that it can do without.
    pub reclaimable: u64,
}

/// Reads `/proc/meminfo`.
///
/// # Errors
/// Those of [`read`].
pub fn memory_info() -> Result<MemoryInfo, Errno> {
    let mut buffer = Buffer::new();
    parse_memory_info(read(c"/proc/meminfo", &mut buffer)?).ok_or(Errno(libc::EILSEQ))
}

/// The same of a made-up tree, or of `/`.
///
/// # Errors
/// As [`memory_info`].
pub fn memory_info_under(root: &Path) -> Result<MemoryInfo, Errno> {
    parse_memory_info(&text_under(root, "proc/meminfo", 16 << 10)?).ok_or(Errno(libc::EILSEQ))
}

fn parse_memory_info(text: &str) -> Option<MemoryInfo> {
    let field = |name: &str| -> Option<u64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(rest.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    Some(MemoryInfo {
        total: field("MemTotal:")?,
        available: field("MemAvailable:")?,
        swap: field("SwapTotal:").unwrap_or(0),
        free_swap: field("SwapFree:").unwrap_or(0),
        files: ["Active(file):", "Inactive(file):"].into_iter().filter_map(field).sum(),
        reclaimable: field("KReclaimable:").or_else(|| field("SReclaimable:")).unwrap_or(0),
    })
}

/// Memory of a NUMA node, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMemory {
    /// All of it.
    pub total: u64,
    /// What nobody has.
    pub free: u64,
    /// What caches of files have.
    pub files: u64,
}

/// The memory of the node with the kernel's number `node` (`/sys/devices/system/node/nodeN/meminfo`).
///
/// # Errors
/// Those of [`read`]; `ENOENT` where there is no such node.
pub fn node_memory(node: usize) -> Result<NodeMemory, Errno> {
    let mut buffer = Buffer::new();
    let mut room = [0; 64];
    let path = path(&mut room, &["/sys/devices/system/node/node"], node as u64, "/meminfo");
    parse_node_memory(read(path, &mut buffer)?).ok_or(Errno(libc::EILSEQ))
}

fn parse_node_memory(text: &str) -> Option<NodeMemory> {
    // Node 0 MemFree:  123 kB
    let field = |name: &str| -> Option<u64> {
        let mut words = text.lines().map(|line| line.split_ascii_whitespace().skip(2));
        let kib = words.find_map(|mut words| (words.next()? == name).then(|| words.next())?)?;
        Some(kib.parse::<u64>().ok()? * 1024)
    };
    let files = ["Active(file):", "Inactive(file):"].into_iter().filter_map(field).sum();
    Some(NodeMemory { total: field("MemTotal:")?, free: field("MemFree:")?, files })
}

/// Free huge pages of 2 MiB of the node with the kernel's number `node`, of those that are reserved (2.6.32).
///
/// # Errors
/// As [`node_memory`].
pub fn node_free_huge_pages(node: usize) -> Result<usize, Errno> {
    let mut buffer = Buffer::new();
    let mut room = [0; 96];
    let suffix = "/hugepages/hugepages-2048kB/free_hugepages";
    let path = path(&mut room, &["/sys/devices/system/node/node"], node as u64, suffix);
    read(path, &mut buffer)?.trim().parse().map_err(|_| Errno(libc::EILSEQ))
}

/// Total time in microseconds that some task has waited for memory (`/proc/pressure/memory`, 4.20).
///
/// # Errors
/// `ENOENT` or `EOPNOTSUPP` where pressure information is off.
pub fn memory_stall_us() -> Result<u64, Errno> {
    let mut buffer = Buffer::new();
    parse_stall(read(c"/proc/pressure/memory", &mut buffer)?).ok_or(Errno(libc::EILSEQ))
}

/// The time in a file of pressure information.
pub(super) fn parse_stall(text: &str) -> Option<u64> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    some.split_ascii_whitespace().find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

/// Nanoseconds that the calling thread has run and has waited to run (`/proc/thread-self/schedstat`).
///
/// # Errors
/// Those of [`read`].
pub fn run_and_wait_ns() -> Result<(u64, u64), Errno> {
    let mut buffer = Buffer::new();
    let mut fields = read(c"/proc/thread-self/schedstat", &mut buffer)?.split_ascii_whitespace().map(str::parse::<u64>);
    match (fields.next(), fields.next()) {
        (Some(Ok(run)), Some(Ok(wait))) => Ok((run, wait)),
        _ => Err(Errno(libc::EILSEQ)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_resident_in_less_than_the_machine_has() {
        let info = memory_info().unwrap();
        assert!(resident_bytes().unwrap() > 100 << 10);
        assert!((resident_bytes().unwrap() as u64) < info.total);
        assert!(info.available <= info.total);
        let (resident, peak) = resident_and_peak().unwrap();
        assert!(resident > 100 << 10 && resident <= peak + (1 << 20));
    }

    #[test]
    fn pressure_lines() {
        let text =
            "some avg10=0.12 avg60=0.00 avg300=0.00 total=4711\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n";
        assert_eq!(parse_stall(text), Some(4711));
        assert_eq!(parse_stall("full avg10=0.00 total=9"), None);
        assert_eq!(parse_memory_info("MemTotal: 10 kB\nMemFree: 5 kB\n"), None);
    }

    #[test]
    fn lines_of_a_node() {
        let text = "Node 1 MemTotal:  2048 kB\nNode 1 MemFree:  512 kB\nNode 1 Active(file):  7 kB\nNode 1 Inactive(file):  1 kB\n";
        let expected = NodeMemory { total: 2 << 20, free: 512 << 10, files: 8 << 10 };
        assert_eq!(parse_node_memory(text), Some(expected));
        assert_eq!(parse_node_memory("Node 1 MemTotal:  2048 kB\n"), None);
        assert!(node_memory(1 << 20).is_err());
    }

    #[test]
    fn texts_of_any_root() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("x"), b"ab\xffcd").unwrap();
        assert_eq!(text_under(root.path(), "x", 4), Ok("ab\u{fffd}c".into()));
        assert_eq!(text_under(root.path(), "y", 4), Err(Errno(libc::ENOENT)));
        assert_eq!(memory_info_under(Path::new("/")).unwrap().total, memory_info().unwrap().total);
        assert_eq!(memory_info_under(root.path()), Err(Errno(libc::ENOENT)));
    }

    #[test]
    fn a_missing_file_is_an_error() {
        assert_eq!(read(c"/proc/self/no-such-file", &mut Buffer::new()), Err(Errno(libc::ENOENT)));
    }

    #[test]
    fn paths_are_cut_where_the_room_ends() {
        assert_eq!(path(&mut [0; 32], &["/a", "/b"], 12, "/c"), c"/a/b12/c");
        assert_eq!(path(&mut [0; 5], &["/abcdefg"], 1, ""), c"/abc");
    }
}
