//! On which NUMA nodes the memory of a process lies, mapping by mapping (`/proc/PID/numa_maps`, 2.6.14). The kernel walks every page table
//! for it: milliseconds for each GiB of small pages.

use super::Errno;
use super::memory::Range;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};

/// Bytes of a process on each node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spread {
    /// By the kernel's number of the node.
    pub nodes: BTreeMap<usize, u64>,
    /// Of these, bytes on another node than the one that their mapping prefers. A mapping that prefers none, or several, has none.
    pub elsewhere: u64,
}

impl Spread {
    /// Adds a line of the file.
    fn add(&mut self, line: &str) {
        let (mut preferred, mut page) = (None, 4096);
        let mut pages = Vec::new();
        for word in line.split_ascii_whitespace().skip(1) {
            if let Some(kilobytes) = word.strip_prefix("kernelpagesize_kB=") {
                page = kilobytes.parse().map_or(page, |kilobytes: u64| kilobytes << 10);
            } else if let Some(policy) = word.strip_prefix("prefer") {
                // Behind the name, there may be flags.
                preferred = policy.rsplit(':').next().and_then(|node| node.parse::<usize>().ok());
            } else if let Some((node, count)) = word.strip_prefix('N').and_then(|word| word.split_once('='))
                && let (Ok(node), Ok(count)) = (node.parse::<usize>(), count.parse::<u64>())
            {
                pages.push((node, count));
            }
        }
        for (node, count) in pages {
            *self.nodes.entry(node).or_default() += count * page;
            if preferred.is_some_and(|preferred| preferred != node) {
                self.elsewhere += count * page;
            }
        }
    }
}

/// The memory of `process`, or of the calling one; only that of mappings that begin `within` a range, if there is one.
///
/// # Errors
/// `ENOENT` on kernels without NUMA and where the process has ended; `EACCES` for a process of another user.
pub fn read(process: Option<u32>, within: Option<Range>) -> Result<Spread, Errno> {
    let path = process.map_or("/proc/self/numa_maps".into(), |process| format!("/proc/{process}/numa_maps"));
    let mut file = BufReader::new(File::open(path).map_err(Errno::from)?);
    let mut spread = Spread::default();
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line).map_err(Errno::from)? > 0 {
        // Names of files may be anything; what is read here is not.
        let text = String::from_utf8_lossy(&line);
        let begins = |range: Range| {
            let start = text.split_ascii_whitespace().next().and_then(|word| usize::from_str_radix(word, 16).ok());
            start.is_some_and(|start| start >= range.start && start < range.end())
        };
        if within.is_none_or(begins) {
            spread.add(&text);
        }
        line.clear();
    }
    Ok(spread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE_SIZE;
    use crate::sys::memory::{self, Protection};

    fn spread(lines: &[&str]) -> Spread {
        let mut spread = Spread::default();
        lines.iter().for_each(|line| spread.add(line));
        spread
    }

    #[test]
    fn lines_of_the_kernel() {
        let file = "7f10 default file=/usr/lib/N7=3 mapped=40 N0=38 N2=2 kernelpagesize_kB=4";
        assert_eq!(spread(&[file]), Spread { nodes: [(0, 38 << 12), (2, 2 << 12)].into(), elsewhere: 0 });
        let ours = "7f20 prefer:1 anon=520 dirty=520 active=0 N0=8 N1=512 kernelpagesize_kB=4";
        assert_eq!(spread(&[ours]), Spread { nodes: [(0, 8 << 12), (1, 512 << 12)].into(), elsewhere: 8 << 12 });
        let huge = "7f30 prefer=static:0 file=/anon_hugepage huge anon=2 dirty=2 N0=1 N1=1 kernelpagesize_kB=2048";
        assert_eq!(spread(&[huge]), Spread { nodes: [(0, 2 << 20), (1, 2 << 20)].into(), elsewhere: 2 << 20 });
        let several = "7f40 prefer (many):0-1 anon=1 N3=1 kernelpagesize_kB=4";
        assert_eq!(spread(&[several]), Spread { nodes: [(3, 4096)].into(), elsewhere: 0 });
        assert_eq!(spread(&["7f50 default", "", "7f60 prefer:x Nx=1 N1= kernelpagesize_kB=?"]), Spread::default());
        assert_eq!(spread(&[file, ours, huge]).nodes[&0], (46 << 12) + (2 << 20));
    }

    #[test]
    fn own_memory_is_found_where_it_is() {
        let range = Range { start: memory::map(64 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 64 * PAGE_SIZE };
        // SAFETY: the range was mapped above and belongs to this test.
        unsafe { std::ptr::write_bytes(range.start as *mut u8, 1, range.len) };
        match read(None, Some(range)) {
            Ok(part) => {
                let sum = |spread: &Spread| spread.nodes.values().sum::<u64>();
                let whole = sum(&read(None, None).unwrap());
                // The kernel may have united the mapping with one before it, which does not begin in the range.
                assert!(whole >= range.len as u64 && sum(&part) <= whole, "{} of {whole}", sum(&part));
            }
            Err(error) => assert_eq!(error, Errno(libc::ENOENT)),
        }
        // SAFETY: nobody else knows of the range.
        unsafe { memory::unmap(range).unwrap() };
    }
}
