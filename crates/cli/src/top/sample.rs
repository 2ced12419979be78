//! What is read of the machine at one time, and who reads it.

use super::programs::{Programs, Reading};
use crate::output::printable;
use pagecrew::stats;
use pagecrew::sys::activity::{self, Activity};
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::nodes::{self, Node};
use pagecrew::sys::process_list;
use pagecrew::sys::procfs::{self, MemoryInfo};
use pagecrew::sys::psi::{self, Pressure, Resource};
use pagecrew::sys::vmstat::{self, Zone};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The kernel prints a line for each CPU of each zone, under a lock of the zone; and the watermarks hardly ever change by themselves.
const ZONES_NS: u64 = 10_000_000_000;
/// The kernel's threads come and go with nodes.
const THREADS_NS: u64 = 60_000_000_000;

/// A node, with its watermarks: min, low and high, each the sum of its zones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeNow {
    /// Its memory.
    pub memory: Node,
    /// `None` where they can't be read.
    pub watermarks: Option<[u64; 3]>,
}

/// A thread of the kernel that reclaims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kswapd {
    /// Its node.
    pub node: usize,
    /// Its number.
    pub pid: i32,
    /// Nanoseconds for which it has run.
    pub run_ns: Option<u64>,
}

/// What was read at one time. What could not be read is not there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// When.
    pub at_ns: u64,
    /// The machine.
    pub memory: Option<MemoryInfo>,
    /// The nodes with memory, by number.
    pub nodes: Vec<NodeNow>,
    /// `vm.watermark_scale_factor`.
    pub factor: Option<u64>,
    /// In the order of [`Resource::ALL`].
    pub pressure: [Option<Pressure>; 3],
    /// Reclaim, swap and refaults.
    pub activity: Activity,
    /// By node.
    pub kswapds: Vec<Kswapd>,
}

/// Where programs under `run` publish.
#[derive(Debug, Clone)]
pub enum Places {
    /// In this directory.
    One(PathBuf),
    /// In the directory of each user, which stand here.
    All(PathBuf),
}

impl Places {
    /// Those that this user may read: root everybody's.
    pub fn of_this_user() -> Places {
        // SAFETY: geteuid takes nothing and cannot fail.
        let root = unsafe { libc::geteuid() } == 0;
        if root && std::env::var_os("PAGECREW_STATS_DIR").is_none_or(|directory| directory.is_empty()) {
            Places::All(PathBuf::from("/dev/shm"))
        } else {
            Places::One(stats::directory())
        }
    }

    /// Who publishes now, and in which directory.
    fn publishing(&self) -> BTreeMap<u32, PathBuf> {
        let entries = |directory: &Path| std::fs::read_dir(directory).into_iter().flatten().flatten();
        let directories = match self {
            Places::One(directory) => vec![directory.clone()],
            Places::All(top) => {
                let of_user =
                    |name: &str| name.strip_prefix("pagecrew-").is_some_and(|user| user.parse::<u32>().is_ok());
                entries(top).filter(|entry| entry.file_name().to_str().is_some_and(of_user)).map(|e| e.path()).collect()
            }
        };
        let mut publishing = BTreeMap::new();
        for directory in directories {
            for entry in entries(&directory) {
                if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                    publishing.entry(pid).or_insert_with(|| directory.clone());
                }
            }
        }
        publishing
    }
}

/// Reads samples.
pub struct Sampler {
    root: PathBuf,
    places: Places,
    zones: Vec<Zone>,
    /// When the zones were read, with which setting.
    zones_read: Option<(u64, Option<u64>)>,
    kswapds: Vec<(usize, i32)>,
    kswapds_ns: Option<u64>,
    programs: Programs,
}

impl Sampler {
    /// Of the machine, or of a made-up tree.
    pub fn new(root: PathBuf, places: Places) -> Sampler {
        Sampler {
            root,
            places,
            zones: Vec::new(),
            zones_read: None,
            kswapds: Vec::new(),
            kswapds_ns: None,
            programs: Programs::default(),
        }
    }

    /// As it is now.
    pub fn read(&mut self) -> Sample {
        let at_ns = now_ns();
        let root = self.root.clone();
        let factor = vmstat::scale_factor(&root).ok();
        self.read_zones(at_ns, factor);
        Sample {
            at_ns,
            memory: procfs::memory_info_under(&root).ok(),
            nodes: nodes::read(&root).unwrap_or_default().into_iter().map(|node| self.with_watermarks(node)).collect(),
            factor,
            pressure: Resource::ALL.map(|resource| psi::read(&root, resource).ok()),
            activity: activity::read(&root).unwrap_or_default(),
            kswapds: self.read_kswapds(at_ns),
        }
    }

    /// The programs under `run`, as they are now.
    pub fn read_programs(&mut self) -> &Programs {
        let publishing = self.places.publishing();
        let pids: Vec<u32> = publishing.keys().copied().collect();
        for pid in self.programs.due(&pids) {
            let reading = publishing.get(&pid).and_then(|directory| stats::read(directory, pid).ok()).map(|snapshot| {
                let known = self.programs.name(pid).map(str::to_owned);
                let name = known.or_else(|| process_list::name(&self.root, pid).ok()).unwrap_or_default();
                Reading { at_ns: now_ns(), name: printable(&name), snapshot }
            });
            self.programs.note(pid, reading);
        }
        &self.programs
    }

    fn read_zones(&mut self, now: u64, factor: Option<u64>) {
        if self.zones_read.is_none_or(|(at, with)| with != factor || now.saturating_sub(at) >= ZONES_NS) {
            self.zones = vmstat::zones_under(&self.root).unwrap_or_default();
            self.zones_read = Some((now, factor));
        }
    }

    fn with_watermarks(&self, memory: Node) -> NodeNow {
        let of_node = self.zones.iter().filter(|zone| zone.node == memory.number);
        let sum = of_node.fold(None, |sum: Option<[u64; 3]>, zone| {
            let [min, low, high] = sum.unwrap_or_default();
            Some([min.saturating_add(zone.min), low.saturating_add(zone.low), high.saturating_add(zone.high)])
        });
        NodeNow { memory, watermarks: sum }
    }

    fn read_kswapds(&mut self, now: u64) -> Vec<Kswapd> {
        if self.kswapds_ns.is_none_or(|at| now.saturating_sub(at) >= THREADS_NS) {
            self.kswapds = vmstat::kswapds_under(&self.root);
            self.kswapds_ns = Some(now);
        }
        let thread = |&(node, pid): &(usize, i32)| {
            let times = vmstat::cpu_times_under(&self.root, pid).ok();
            Kswapd { node, pid, run_ns: times.map(|times| times.ran_ns) }
        };
        self.kswapds.iter().map(thread).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn sampler(root: &Path) -> Sampler {
        Sampler::new(root.to_owned(), Places::One(root.join("none")))
    }

    #[test]
    fn a_machine_of_which_nothing_can_be_read() {
        let root = tempfile::tempdir().unwrap();
        let mut sampler = sampler(root.path());
        let sample = sampler.read();
        assert_eq!(sample, Sample { at_ns: sample.at_ns, ..Sample::default() });
        assert_eq!(sampler.read_programs().all(), []);
        // Garbage everywhere is the same.
        for file in ["meminfo", "vmstat", "zoneinfo", "sys/vm/watermark_scale_factor", "pressure/memory", "1/comm"] {
            let path = root.path().join("proc").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"\0\xff garbage 1\n\n:\n").unwrap();
        }
        let sample = sampler.read();
        assert_eq!(sample, Sample { at_ns: sample.at_ns, ..Sample::default() });
    }

    #[test]
    fn watermarks_are_the_sums_of_zones_and_read_again_when_the_setting_changes() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let zones = |low: u64| {
            format!(
                "Node 0, zone DMA\n        min 1\n        low {low}\n        high 9\n        managed 100\nNode 0, zone Normal\n        min 10\n\
                 \x20       low 20\n        high 30\n        managed 1000\nNode 1, zone Normal\n        min 5\n        low 6\n        high 7\n        managed 9\n"
            )
        };
        put("proc/meminfo", "MemTotal: 4400 kB\nMemFree: 400 kB\nMemAvailable: 500 kB\n");
        put("proc/zoneinfo", &zones(2));
        put("proc/sys/vm/watermark_scale_factor", "10\n");
        let mut sampler = sampler(root.path());
        let pages = |pages: [u64; 3]| Some(pages.map(|pages| pages << 12));
        assert_eq!(sampler.read().nodes[0].watermarks, pages([11, 22, 39]));
        put("proc/zoneinfo", &zones(3));
        assert_eq!(sampler.read().nodes[0].watermarks, pages([11, 22, 39]));
        put("proc/sys/vm/watermark_scale_factor", "20\n");
        let sample = sampler.read();
        assert_eq!((sample.nodes[0].watermarks, sample.factor), (pages([11, 23, 39]), Some(20)));
        assert_eq!(sample.memory.unwrap().available, 500 << 10);
    }

    #[test]
    fn programs_of_all_users_are_found() {
        let top = tempfile::tempdir().unwrap();
        let page = stats::StatsPage::new().unwrap();
        page.share(&top.path().join("pagecrew-1000")).unwrap();
        for (name, file) in [("pagecrew-x", "1"), ("pagecrew-1001", "1"), ("other-5", "1"), ("pagecrew-1001", "README")]
        {
            fs::create_dir_all(top.path().join(name)).unwrap();
            fs::write(top.path().join(name).join(file), "nonsense").unwrap();
        }
        let mut sampler = Sampler::new("/".into(), Places::All(top.path().into()));
        assert_eq!(sampler.places.publishing().keys().copied().collect::<Vec<_>>(), [1, std::process::id()]);
        let found = sampler.read_programs().all();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].pid, found[0].name.is_empty()), (std::process::id(), false));
        page.unshare();
        assert_eq!(sampler.read_programs().all(), []);
    }

    #[test]
    fn this_machine() {
        let mut sampler = Sampler::new("/".into(), Places::of_this_user());
        let sample = sampler.read();
        assert!(!sample.nodes.is_empty() && sample.memory.is_some() && sample.activity.stalls.is_some());
        assert!(
            sample.nodes.iter().all(|node| node.watermarks.is_some_and(|[min, low, high]| min <= low && low <= high))
        );
    }
}
