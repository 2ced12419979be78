//! Who has the memory of each NUMA node: `/sys/devices/system/node/nodeN/meminfo`.

use super::{Errno, numa, procfs};
use std::path::Path;

/// More than any kernel's file has.
const FILE_MOST: usize = 16 << 10;

/// Memory of a node in bytes. `None` is what this kernel does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number.
    pub number: usize,
    /// All of it.
    pub total: u64,
    /// What nobody has.
    pub free: u64,
    /// Anonymous memory of processes.
    pub anon: Option<u64>,
    /// The part of it in huge pages.
    pub anon_huge: Option<u64>,
    /// Caches of files, without shared memory.
    pub file: Option<u64>,
    /// Shared memory and files in memory (tmpfs).
    pub shmem: Option<u64>,
    /// What the kernel has for its own objects.
    pub slab: Option<u64>,
}

/// The nodes with memory, by number; the machine as node 0 on kernels without NUMA. `root` is `/`, or the top of a made-up tree.
///
/// # Errors
/// Those of reading `/proc/meminfo`, where sysfs has no node either; `EILSEQ` where that has not what every kernel's has.
pub fn read(root: &Path) -> Result<Vec<Node>, Errno> {
    let entries = std::fs::read_dir(root.join("sys/devices/system/node")).into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node")?.parse::<usize>().ok();
    let mut numbers: Vec<usize> = entries.filter_map(number).filter(|&number| number < numa::MOST_NODES).collect();
    numbers.sort_unstable();
    let node = |&number: &usize| {
        let text =
            procfs::text_under(root, &format!("sys/devices/system/node/node{number}/meminfo"), FILE_MOST).ok()?;
        parse(number, &text).filter(|node| node.total > 0)
    };
    let nodes: Vec<Node> = numbers.iter().filter_map(node).collect();
    if !nodes.is_empty() {
        return Ok(nodes);
    }
    let text = procfs::text_under(root, "proc/meminfo", FILE_MOST)?;
    parse(0, &text).map(|node| vec![node]).ok_or(Errno(libc::EILSEQ))
}

/// `None` where what every kernel says is missing.
fn parse(number: usize, text: &str) -> Option<Node> {
    // The last line may be cut in the middle of its number.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    // Node 0 MemFree:  123 kB, or without the node.
    let field = |name: &str| -> Option<u64> {
        let of_line = |line: &str| {
            let line =
                line.strip_prefix("Node ").map_or(line, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
            let kib = line.strip_prefix(name)?.strip_prefix(':')?.split_ascii_whitespace().next()?;
            kib.parse::<u64>().ok()?.checked_mul(1024)
        };
        whole.lines().find_map(of_line)
    };
    let shmem = field("Shmem");
    // Of a node; of a machine, what is cached and what is in buffers.
    let pages = field("FilePages").or_else(|| Some(field("Cached")?.saturating_add(field("Buffers")?)));
    Some(Node {
        number,
        total: field("MemTotal")?,
        free: field("MemFree")?,
        anon: field("AnonPages"),
        anon_huge: field("AnonHugePages"),
        file: pages.map(|pages| pages.saturating_sub(shmem.unwrap_or(0))),
        shmem,
        slab: field("Slab"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    const NODE: &str = "Node 1 MemTotal:       2048 kB\nNode 1 MemFree:         512 kB\nNode 1 FilePages:      100 kB\nNode 1 AnonPages:       50 kB\n\
                        Node 1 Shmem:           10 kB\nNode 1 Slab:             7 kB\nNode 1 AnonHugePages:    40 kB\n";

    #[test]
    fn lines_of_a_node_and_of_a_machine() {
        let expected = Node {
            number: 1,
            total: 2 << 20,
            free: 512 << 10,
            anon: Some(50 << 10),
            anon_huge: Some(40 << 10),
            file: Some(90 << 10),
            shmem: Some(10 << 10),
            slab: Some(7 << 10),
        };
        assert_eq!(parse(1, NODE), Some(expected));
        let machine = NODE.replace("Node 1 ", "").replace("FilePages:      100", "Buffers: 30 kB\nCached:   70");
        assert_eq!(parse(1, &machine), Some(expected));
        // Cut somewhere: what is there is right, or it is not taken at all.
        for end in 0..NODE.len() {
            if let Some(node) = parse(1, &NODE[..end]) {
                assert_eq!((node.total, node.free), (expected.total, expected.free));
                assert!(node.slab.is_none_or(|slab| Some(slab) == expected.slab));
            }
        }
        for text in [
            "",
            "MemTotal: x kB\nMemFree: 1 kB\n",
            "Node\nNode 1\n",
            "MemTotal: 99999999999999999999 kB\nMemFree: 1 kB\n",
        ] {
            assert_eq!(parse(0, text), None, "{text:?}");
        }
    }

    #[test]
    fn trees_with_and_without_nodes() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(read(root.path()), Err(Errno(libc::ENOENT)));
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), "MemTotal: 8 kB\n").unwrap();
        assert_eq!(read(root.path()), Err(Errno(libc::EILSEQ)));
        fs::write(root.path().join("proc/meminfo"), "MemTotal: 8 kB\nMemFree: 4 kB\n").unwrap();
        assert_eq!(read(root.path()).unwrap(), [Node { total: 8 << 10, free: 4 << 10, ..Node::default() }]);
        // Ten comes behind two, a node without memory is left out, and so is what is none.
        for (name, text) in [
            ("node10", NODE),
            ("node2", NODE),
            ("node3", "Node 3 MemTotal: 0 kB\nNode 3 MemFree: 0 kB\n"),
            ("nodex", NODE),
            ("node99999999", NODE),
            ("node4", "\0garbage"),
        ] {
            let directory = root.path().join("sys/devices/system/node").join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("meminfo"), text).unwrap();
        }
        let numbers: Vec<usize> = read(root.path()).unwrap().iter().map(|node| node.number).collect();
        assert_eq!(numbers, [2, 10]);
    }

    #[test]
    fn this_machine() {
        let nodes = read(Path::new("/")).unwrap();
        assert!(nodes.iter().all(|node| node.free < node.total && node.anon.is_some() && node.file.is_some()));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "((Node [0-9]{0,3} )?(MemTotal|MemFree|Shmem|FilePages): -?[0-9]{0,25} kB\n|[ -~]{0,20}\n){0,12}") {
            parse(0, &text);
        }
    }
}
