//! What the kernel counts of its reclaim, and the watermarks of its zones: `/proc/vmstat`, `/proc/zoneinfo` and the threads that reclaim.

use super::procfs::{self, Buffer};
use super::{Errno, PAGE_SIZE, activity};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What was counted since the machine was started, in `/proc/vmstat`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that were reclaimed, by whomever.
    pub reclaimed: u64,
    /// Of them, by tasks for themselves.
    pub reclaimed_by_tasks: u64,
    /// How often tasks had to reclaim for themselves. Those that are at the limit of a control group are not counted.
    pub stalls: u64,
    /// Bytes that came back from swap.
    pub swapped_in: u64,
}

/// `/proc/vmstat`, kept open.
#[derive(Debug)]
pub struct VmStat {
    file: File,
    room: Vec<u8>,
}

impl VmStat {
    /// Opens it.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn open() -> Result<VmStat, Errno> {
        Ok(VmStat { file: File::open("/proc/vmstat")?, room: vec![0; 32 << 10] })
    }

    /// As it is now. The more CPUs there are, the longer that takes: the kernel adds up what each of them has counted.
    ///
    /// # Errors
    /// Those of `read`; `EILSEQ` where what there has to be is not there.
    pub fn read(&mut self) -> Result<Counts, Errno> {
        // A read returns a page of it at most.
        let mut count = 0;
        loop {
            match self.file.read_at(&mut self.room[count..], count as u64)? {
                0 => break,
                more => count += more,
            }
        }
        let text = std::str::from_utf8(&self.room[..count]).map_err(|_| Errno(libc::EILSEQ))?;
        counts(text).ok_or(Errno(libc::EILSEQ))
    }
}

/// `None` where a counter that every kernel has is missing.
fn counts(text: &str) -> Option<Counts> {
    let apart = activity::parse(text);
    let by_tasks = apart.direct_reclaimed.unwrap_or(0);
    Some(Counts {
        reclaimed: apart.background_reclaimed?.saturating_add(by_tasks),
        reclaimed_by_tasks: by_tasks,
        stalls: apart.stalls?,
        swapped_in: apart.swapped_in.unwrap_or(0),
    })
}

/// `vm.watermark_scale_factor`: how far the watermarks are apart, in ten thousandths of the memory (4.6). `root` is `/`, or the top of a made-up
/// tree.
///
/// # Errors
/// Those of `read`; `EILSEQ` where it is no number.
pub fn scale_factor(root: &Path) -> Result<u64, Errno> {
    let text = procfs::text_under(root, "proc/sys/vm/watermark_scale_factor", 64)?;
    text.trim().parse().map_err(|_| Errno(libc::EILSEQ))
}

/// What a node has, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Free memory.
    pub free: u64,
    /// Pages of files on the lists that reclaim takes from.
    pub files: u64,
}

/// The memory of the node with the kernel's number `node` (`/sys/devices/system/node/nodeN/vmstat`, 2.6.38).
///
/// # Errors
/// Those of `read`; `ENOENT` where there is no such node, `EILSEQ` where what there has to be is not there.
pub fn node_memory(node: usize) -> Result<NodeMemory, Errno> {
    let mut buffer = Buffer::new();
    let mut room = [0; 64];
    let path = procfs::path(&mut room, &["/sys/devices/system/node/node"], node as u64, "/vmstat");
    parse_node_memory(procfs::read(path, &mut buffer)?).ok_or(Errno(libc::EILSEQ))
}

fn parse_node_memory(text: &str) -> Option<NodeMemory> {
    let pages = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64);
    let files = pages("nr_inactive_file ")?.saturating_add(pages("nr_active_file ")?);
    Some(NodeMemory { free: bytes(pages("nr_free_pages ")?), files: bytes(files) })
}

/// A zone of memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// Its node.
    pub node: usize,
    /// What the kernel's page allocator has of it.
    pub managed: u64,
    /// Where tasks reclaim for themselves.
    pub min: u64,
    /// Where reclaim in the background begins.
    pub low: u64,
    /// Where it ends.
    pub high: u64,
}

/// The zones that have memory (`/proc/zoneinfo`; `managed`: 3.9).
///
/// # Errors
/// Those of `read`; `EILSEQ` where there is nothing of that.
pub fn zones() -> Result<Vec<Zone>, Errno> {
    zones_under(Path::new("/"))
}

/// The same of a made-up tree.
///
/// # Errors
/// As [`zones`].
pub fn zones_under(root: &Path) -> Result<Vec<Zone>, Errno> {
    let zones = parse_zones(&procfs::text_under(root, "proc/zoneinfo", ZONEINFO_MOST)?);
    if zones.is_empty() { Err(Errno(libc::EILSEQ)) } else { Ok(zones) }
}

/// With a line for each CPU of each zone: more than thousands of CPUs have.
const ZONEINFO_MOST: usize = 64 << 20;

fn parse_zones(text: &str) -> Vec<Zone> {
    let mut zones: Vec<Zone> = Vec::new();
    for line in text.lines() {
        // Node 0, zone   Normal
        if let Some(rest) = line.strip_prefix("Node ")
            && let Some((node, _)) = rest.split_once(',')
            && let Ok(node) = node.trim().parse()
        {
            zones.push(Zone { node, managed: 0, min: 0, low: 0, high: 0 });
            continue;
        }
        let mut words = line.split_ascii_whitespace();
        if let (Some(zone), Some(name), Some(pages)) = (zones.last_mut(), words.next(), words.next())
            && let Ok(pages) = pages.parse::<u64>()
        {
            let bytes = pages.saturating_mul(PAGE_SIZE as u64);
            match name {
                "min" => zone.min = bytes,
                "low" => zone.low = bytes,
                "high" => zone.high = bytes,
                "managed" => zone.managed = bytes,
                _ => {}
            }
        }
    }
    // ZONE_DEVICE and what is movable only on request may have no page.
    zones.retain(|zone| zone.managed > 0);
    zones
}

/// The kernel's threads that reclaim in the background: node and thread, in the order of the nodes. Empty in a PID namespace of its own.
pub fn kswapds() -> Vec<(usize, libc::pid_t)> {
    kswapds_under(Path::new("/"))
}

/// The same of a made-up tree.
pub fn kswapds_under(root: &Path) -> Vec<(usize, libc::pid_t)> {
    let mut found: Vec<_> =
        std::fs::read_dir(root.join("proc")).into_iter().flatten().flatten().filter_map(kswapd).collect();
    found.sort_unstable();
    found
}

fn kswapd(entry: std::fs::DirEntry) -> Option<(usize, libc::pid_t)> {
    let thread = entry.file_name().to_str()?.parse().ok()?;
    let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
    let node = name.trim_end().strip_prefix("kswapd")?.parse().ok()?;
    // Anybody may call himself so; only the kernel's own threads have no program.
    let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
    is_of_kernel(&stat).then_some((node, thread))
}

/// Whether a line of `/proc/PID/stat` is that of a thread of the kernel (`PF_KTHREAD`).
fn is_of_kernel(stat: &str) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    let flags = || stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(6)?.parse::<u64>().ok();
    flags().is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// What a thread has had of the CPUs, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// For so long it has run.
    pub ran_ns: u64,
    /// For so long it was ready to, and another one had the CPU.
    pub waited_ns: u64,
}

/// Those of `thread` (`/proc/PID/schedstat`).
///
/// # Errors
/// Those of `read`; `ENOENT` where the thread has gone or the kernel does not count, `EILSEQ` where there are no such numbers.
pub fn cpu_times(thread: libc::pid_t) -> Result<CpuTimes, Errno> {
    let mut buffer = [0; 128];
    let mut room = [0; 32];
    let path = procfs::path(&mut room, &["/proc/"], thread as u64, "/schedstat");
    parse_cpu_times(procfs::read(path, &mut buffer)?)
}

/// The same of a made-up tree.
///
/// # Errors
/// As [`cpu_times`].
pub fn cpu_times_under(root: &Path, thread: libc::pid_t) -> Result<CpuTimes, Errno> {
    parse_cpu_times(&procfs::text_under(root, &format!("proc/{thread}/schedstat"), 128)?)
}

fn parse_cpu_times(text: &str) -> Result<CpuTimes, Errno> {
    let mut times = text.split_ascii_whitespace().map_while(|ns| ns.parse::<u64>().ok());
    match (times.next(), times.next()) {
        (Some(ran_ns), Some(waited_ns)) => Ok(CpuTimes { ran_ns, waited_ns }),
        _ => Err(Errno(libc::EILSEQ)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn all_counters_are_read() {
        let mut file = VmStat::open().unwrap();
        file.read().unwrap();
        let whole = std::fs::read_to_string("/proc/vmstat").unwrap();
        let last = whole.lines().last().unwrap().split(' ').next().unwrap();
        assert!(String::from_utf8_lossy(&file.room).contains(&format!("\n{last} ")), "{last}");
    }

    #[test]
    fn this_machine() {
        let counts = VmStat::open().unwrap().read().unwrap();
        assert!(counts.reclaimed >= counts.reclaimed_by_tasks);
        let zones = zones().unwrap();
        assert!(zones.iter().all(|zone| zone.min <= zone.low && zone.low <= zone.high && zone.high <= zone.managed));
        let all: u64 = zones.iter().map(|zone| zone.managed).sum();
        // A kernel was seen that counts most of a virtual machine's memory in no zone, and more as free than all zones have.
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let free =
            text.lines().find_map(|line| line.strip_prefix("MemFree:")?.strip_suffix(" kB")?.trim().parse().ok());
        let free: u64 = free.unwrap();
        assert!(free << 10 > all || all == procfs::memory_info().unwrap().total, "{all}");
        assert!(node_memory(zones[0].node).unwrap().free < all);
        assert!(node_memory(1 << 20).is_err());
        for (_, thread) in kswapds() {
            assert!(cpu_times(thread).unwrap().ran_ns > 0);
        }
    }

    #[test]
    fn counters_of_kernels() {
        let now = "nr_free_pages 5\nworkingset_refault_file 2\npswpin 7\nallocstall_dma 0\n\
                   allocstall_normal 3\nallocstall_movable 4\npgsteal_kswapd 10\npgsteal_direct 20\npgsteal_khugepaged 30\n\
                   pgsteal_proactive 40\npgsteal_anon 50\npgsteal_file 60\n";
        let expected = Counts { reclaimed: 100 * PAGE, reclaimed_by_tasks: 20 * PAGE, stalls: 7, swapped_in: 7 * PAGE };
        assert_eq!(counts(now), Some(expected));
        // 4.9 had one sum of stalls.
        let before = "pswpin 7\nallocstall 7\npgsteal_kswapd 80\npgsteal_direct 20\n";
        assert_eq!(counts(before), Some(expected));
        for text in ["", "pgsteal_kswapd 1\n", "allocstall 1\n", "pgsteal_kswapd x\nallocstall 1\n", "pgsteal_kswapd"] {
            assert_eq!(counts(text), None, "{text:?}");
        }
    }

    #[test]
    fn zones_of_nodes() {
        let text = "Node 0, zone      DMA\n  per-node stats\n      nr_inactive_anon 1\n  pages free     3840\n        boost    0\n        min      11\n\
                    \x20       low      14\n        high     17\n        spanned  4095\n        present  3998\n        managed  3840\n\
                    \x20       cma      0\n        protection: (0, 3, 4, 5)\n      nr_free_pages 3840\n  pagesets\n    cpu: 0\n\
                    \x20             count:    0\n              high:     13\nNode 0, zone  Movable\n  pages free     0\n        min      32\n\
                    \x20       managed  0\nNode 1, zone   Normal\n  pages free     9\n        min      5\n        low      6\n        high     7\n\
                    \x20       managed  100\n";
        let expected = [
            Zone { node: 0, managed: 3840 * PAGE, min: 11 * PAGE, low: 14 * PAGE, high: 17 * PAGE },
            Zone { node: 1, managed: 100 * PAGE, min: 5 * PAGE, low: 6 * PAGE, high: 7 * PAGE },
        ];
        assert_eq!(parse_zones(text), expected);
        assert_eq!(parse_zones("min 5\nNode x, zone\n managed 5\n"), []);
    }

    #[test]
    fn made_up_trees() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(zones_under(root.path()), Err(Errno(libc::ENOENT)));
        assert_eq!(scale_factor(root.path()), Err(Errno(libc::ENOENT)));
        assert_eq!(kswapds_under(root.path()), []);
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("proc/sys/vm/watermark_scale_factor", "10\n");
        put("proc/zoneinfo", "garbage");
        for (pid, name, flags) in [(45, "kswapd1\n", 2_103_360), (44, "kswapd0\n", 2_103_360), (46, "kswapd2\n", 0)] {
            put(&format!("proc/{pid}/comm"), name);
            put(&format!("proc/{pid}/stat"), &format!("{pid} (x) S 2 0 0 0 -1 {flags} 0"));
        }
        put("proc/44/schedstat", "12345 6 7\n");
        put("proc/45/schedstat", "");
        assert_eq!(scale_factor(root.path()), Ok(10));
        assert_eq!(zones_under(root.path()), Err(Errno(libc::EILSEQ)));
        assert_eq!(kswapds_under(root.path()), [(0, 44), (1, 45)]);
        assert_eq!(
            (cpu_times_under(root.path(), 44), cpu_times_under(root.path(), 45)),
            (Ok(CpuTimes { ran_ns: 12345, waited_ns: 6 }), Err(Errno(libc::EILSEQ)))
        );
        for text in ["", "5", "5 x", "x 5 6"] {
            assert_eq!(parse_cpu_times(text), Err(Errno(libc::EILSEQ)), "{text:?}");
        }
    }

    #[test]
    fn memory_of_a_node() {
        let text = "nr_free_pages 7\nnr_inactive_anon 100\nnr_active_anon 100\nnr_inactive_file 3\nnr_active_file 2\n";
        assert_eq!(parse_node_memory(text), Some(NodeMemory { free: 7 * PAGE, files: 5 * PAGE }));
        for text in ["", "nr_free_pages 7\n", "nr_free_pages x\nnr_inactive_file 3\nnr_active_file 2\n"] {
            assert_eq!(parse_node_memory(text), None, "{text:?}");
        }
    }

    #[test]
    fn threads_of_the_kernel() {
        assert!(is_of_kernel("45 (kswapd0) S 2 0 0 0 -1 2103360 0 0"));
        assert!(!is_of_kernel("45 (kswapd0) S 2 0 0 0 -1 4194304 0 0"));
        assert!(!is_of_kernel("45 (a) 2103360) S 2 0 0 0 -1 4194304 0 0"));
        assert!(!is_of_kernel("") && !is_of_kernel("45 (kswapd0"));
    }

    proptest! {
        #[test]
        fn nothing_makes_them_panic(text in "(Node [0-9]{1,30}, zone x\n|[a-z_]{0,14} ?-?[0-9]{0,25}\n|[ -~]{0,20}\n){0,30}") {
            counts(&text);
            parse_zones(&text);
            is_of_kernel(&text);
            let _ = (parse_node_memory(&text), parse_cpu_times(&text));
        }
    }
}
