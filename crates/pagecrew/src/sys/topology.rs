//! NUMA nodes and their CPUs, from `/sys/devices/system/node`.
//!
//! A [`Topology`] counts the nodes that have memory, from 0 on and without holes. Each CPU belongs to one of them: to its own node, or,
//! where that has no memory, to the nearest node with memory. Only the functions that say so use the kernel's numbers.

use super::numa::{self, NodeMask};
use super::procfs::{self, Buffer};
use super::sched::CpuSet;
use std::collections::BTreeMap;

/// More nodes with memory than this are not used; their CPUs belong to the nearest of those that are.
pub const MAX_NODES: usize = 16;

/// A file of sysfs about nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum File {
    /// The nodes that are there.
    Online,
    /// The nodes with memory (3.8).
    HasMemory,
    /// The CPUs of a node that are online.
    Cpus(usize),
    /// The distances of a node to all that are online.
    Distances(usize),
}

impl File {
    fn read(self) -> Option<String> {
        let mut buffer = Buffer::new();
        let mut room = [0u8; 64];
        let mut of_node = |node: usize, suffix: &str| {
            let path = procfs::path(&mut room, &["/sys/devices/system/node/node"], node as u64, suffix);
            procfs::read(path, &mut buffer).ok().map(str::to_owned)
        };
        match self {
            File::Cpus(node) => of_node(node, "/cpulist"),
            File::Distances(node) => of_node(node, "/distance"),
            File::Online => procfs::read(c"/sys/devices/system/node/online", &mut buffer).ok().map(str::to_owned),
            File::HasMemory => {
                procfs::read(c"/sys/devices/system/node/has_memory", &mut buffer).ok().map(str::to_owned)
            }
        }
    }
}

/// The nodes with memory of a machine, and which CPUs belong to them. See the module.
#[derive(Debug, Clone)]
pub struct Topology {
    /// The kernel's number of each node.
    numbers: Vec<usize>,
    /// The CPUs of each node that were online when this was read.
    cpus: Vec<CpuSet>,
    /// For each node of the kernel's numbers, the node that its CPUs belong to.
    homes: BTreeMap<usize, usize>,
    /// For each node, all nodes, the nearest first.
    nearest: Vec<Vec<usize>>,
    /// Whether there is no such machine.
    made_up: bool,
}

impl Topology {
    /// This machine's, without the nodes that the calling thread's cpuset excludes; one node with every CPU where sysfs is not there.
    pub fn read() -> Topology {
        // Of a machine with one node nothing else has to be known.
        Topology::parse(&mut File::read, || numa::allowed_nodes().ok())
    }

    fn parse(read: &mut dyn FnMut(File) -> Option<String>, allowed: impl FnOnce() -> Option<NodeMask>) -> Topology {
        let mut numbers = |file| read(file).map(|text| list(&text).collect::<Vec<_>>()).filter(|list| !list.is_empty());
        let online = numbers(File::Online).unwrap_or_else(|| vec![0]);
        let mut memory = online.clone();
        if online.len() > 1 {
            let with_memory = numbers(File::HasMemory).unwrap_or_default();
            retain_unless_empty(&mut memory, |node| with_memory.contains(node));
            if memory.len() > 1
                && let Some(allowed) = allowed()
            {
                retain_unless_empty(&mut memory, |&node| allowed.contains(node));
            }
        }
        memory.truncate(MAX_NODES);
        let mut distances = BTreeMap::new();
        for &node in online.iter().filter(|_| memory.len() > 1) {
            // The columns are the online nodes, in their order.
            let text = read(File::Distances(node)).unwrap_or_default();
            let row = text.split_ascii_whitespace().map(|word| word.parse::<u32>().unwrap_or(u32::MAX));
            distances.extend(online.iter().zip(row).map(|(&other, distance)| ((node, other), distance)));
        }
        let distance = |from: usize, to: usize| match distances.get(&(from, to)) {
            _ if from == to => 0,
            Some(&distance) => distance,
            None => u32::MAX,
        };
        let homes: BTreeMap<usize, usize> = online
            .iter()
            .map(|&node| (node, (0..memory.len()).min_by_key(|&index| distance(node, memory[index])).unwrap_or(0)))
            .collect();
        let mut cpus = vec![CpuSet::new(); memory.len()];
        for (&node, &home) in &homes {
            match read(File::Cpus(node)) {
                Some(text) => list(&text).for_each(|cpu| cpus[home].insert(cpu)),
                None if online.len() == 1 => (0..libc::CPU_SETSIZE as usize).for_each(|cpu| cpus[home].insert(cpu)),
                None => {}
            }
        }
        let nearest =
            (0..memory.len()).map(|node| nearest(node, memory.len(), |other| distance(memory[node], memory[other])));
        Topology { nearest: nearest.collect(), numbers: memory, cpus, homes, made_up: false }
    }

    /// A made-up machine of `nodes` nodes with `cpus_each` CPUs, for tests and simulations.
    pub fn uniform(nodes: usize, cpus_each: usize) -> Topology {
        assert!((1..=MAX_NODES).contains(&nodes), "1 to {MAX_NODES} nodes");
        let mut cpus = vec![CpuSet::new(); nodes];
        (0..nodes * cpus_each).for_each(|cpu| cpus[cpu / cpus_each].insert(cpu));
        let nearest = (0..nodes).map(|node| nearest(node, nodes, |other| u32::from(other != node))).collect();
        let homes = (0..nodes).map(|node| (node, node)).collect();
        Topology { numbers: (0..nodes).collect(), cpus, homes, nearest, made_up: true }
    }

    /// Number of nodes, at least 1.
    pub fn nodes(&self) -> usize {
        self.numbers.len()
    }

    /// The kernel's number of `node`.
    pub fn number(&self, node: usize) -> usize {
        self.numbers[node]
    }

    /// The CPUs of `node` that were online when this was read.
    pub fn cpus(&self, node: usize) -> &CpuSet {
        &self.cpus[node]
    }

    /// The CPUs of `node` that are online now. Reads a file for each node whose CPUs belong to it; of a made-up machine, all are online.
    pub fn cpus_online(&self, node: usize) -> CpuSet {
        if self.made_up {
            return self.cpus[node];
        }
        let mut online = CpuSet::new();
        let numbers = self.homes.iter().filter(|&(_, &home)| home == node).map(|(&number, _)| number);
        numbers
            .filter_map(|number| File::Cpus(number).read())
            .for_each(|text| list(&text).for_each(|cpu| online.insert(cpu)));
        online
    }

    /// The node that `cpu` belongs to; `None` for a CPU that was not online. [`Topology::home`] says it once the CPU runs something.
    pub fn node_of(&self, cpu: usize) -> Option<usize> {
        (0..self.nodes()).find(|&node| self.cpus[node].contains(cpu))
    }

    /// The node that the CPUs of the node belong to that has the kernel's number `number`. The first for a node that was not there when this
    /// was read.
    pub fn home(&self, number: usize) -> usize {
        self.homes.get(&number).copied().unwrap_or(0)
    }

    /// All nodes, `node` itself first, then by their distance from it.
    pub fn nearest(&self, node: usize) -> &[usize] {
        &self.nearest[node]
    }
}

/// Nodes 0 to `count` by their distance from `node`. Nodes that are equally far come in the order of their numbers, from `node` on, so
/// that not all nodes fall back on the same one.
fn nearest(node: usize, count: usize, distance: impl Fn(usize) -> u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&other| (distance(other), (other + count - node) % count));
    order
}

fn retain_unless_empty(list: &mut Vec<usize>, keep: impl Fn(&usize) -> bool) {
    if list.iter().any(&keep) {
        list.retain(keep);
    }
}

/// The kernel's numbers of the nodes that have memory (3.8); node 0 where sysfs is not there.
pub fn nodes_with_memory() -> Vec<usize> {
    some_nodes(File::HasMemory.read())
}

/// The kernel's numbers of the nodes that have CPUs (2.6.24); node 0 where sysfs is not there.
pub fn nodes_with_cpus() -> Vec<usize> {
    let mut buffer = Buffer::new();
    some_nodes(procfs::read(c"/sys/devices/system/node/has_cpu", &mut buffer).ok().map(str::to_owned))
}

fn some_nodes(text: Option<String>) -> Vec<usize> {
    let nodes: Vec<usize> = list(text.as_deref().unwrap_or("")).filter(|&node| node < numa::MOST_NODES).collect();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// One more than the highest number that a CPU of this machine may ever have.
pub fn possible_cpus() -> usize {
    let mut buffer = Buffer::new();
    let last = procfs::read(c"/sys/devices/system/cpu/possible", &mut buffer).ok().and_then(|text| list(text).last());
    last.map_or_else(super::sched::possible_cpus, |last| last + 1)
}

/// The numbers of a kernel list such as `0-3,8,10-11`.
fn list(text: &str) -> impl Iterator<Item = usize> + '_ {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
        })
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists() {
        assert_eq!(list("0-3,8,10-11\n").collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(list("").count(), 0);
        assert_eq!(list("\n").count(), 0);
    }

    #[test]
    fn this_machine_has_its_current_cpu_on_a_node() {
        let topology = Topology::read();
        let cpu = crate::sys::sched::current_cpu();
        assert!(topology.node_of(cpu).is_some_and(|node| topology.cpus(node).contains(cpu)));
        let (_, number) = crate::sys::sched::current_cpu_and_node();
        assert!(topology.home(number) < topology.nodes());
    }

    #[test]
    fn a_made_up_machine() {
        let topology = Topology::uniform(8, 32);
        assert_eq!((topology.nodes(), topology.node_of(0), topology.node_of(255)), (8, Some(0), Some(7)));
        assert_eq!((topology.cpus(3).count(), topology.node_of(256)), (32, None));
        assert_eq!(topology.nearest(6), [6, 7, 0, 1, 2, 3, 4, 5]);
    }

    /// A tree of files: the nodes that are online and have memory, and for each node its CPUs and its distances.
    fn tree(online: &str, memory: Option<&str>, nodes: &[(usize, &str, &str)]) -> Topology {
        let mut read = |file: File| {
            let of = |number: usize| nodes.iter().find(|(node, ..)| *node == number);
            match file {
                File::Online => Some(format!("{online}\n")),
                File::HasMemory => memory.map(|text| format!("{text}\n")),
                File::Cpus(node) => of(node).map(|(_, cpus, _)| format!("{cpus}\n")),
                File::Distances(node) => of(node).map(|(.., distances)| format!("{distances}\n")),
            }
        };
        Topology::parse(&mut read, || None)
    }

    fn places(topology: &Topology, cpus: &[usize]) -> Vec<Option<usize>> {
        cpus.iter().map(|&cpu| topology.node_of(cpu).map(|node| topology.number(node))).collect()
    }

    #[test]
    fn numbers_of_nodes_have_holes() {
        let topology =
            tree("0,3,7", Some("0,3,7"), &[(0, "0-1", "10 20 30"), (3, "2-3", "20 10 20"), (7, "4", "30 20 10")]);
        assert_eq!(topology.nodes(), 3);
        assert_eq!(places(&topology, &[0, 3, 4, 5]), [Some(0), Some(3), Some(7), None]);
        assert_eq!((topology.nearest(2), topology.home(7), topology.home(3)), (&[2, 1, 0][..], 2, 1));
    }

    #[test]
    fn cpus_without_memory_belong_to_the_nearest_node_that_has_some() {
        // Node 2 has no memory and is nearest to 3; node 1 has no CPUs.
        let topology = tree(
            "0-3",
            Some("0-1,3"),
            &[(0, "0-1", "10 20 30 40"), (1, "", "20 10 30 40"), (2, "2-3", "40 30 10 20"), (3, "4-5", "40 30 20 10")],
        );
        assert_eq!(topology.nodes(), 3);
        assert_eq!(places(&topology, &[0, 2, 3, 4]), [Some(0), Some(3), Some(3), Some(3)]);
        assert_eq!((topology.cpus(1).count(), topology.home(2), topology.number(2)), (0, 2, 3));
        assert_eq!(topology.nearest(0), [0, 1, 2]);
    }

    #[test]
    fn one_node_with_memory_has_every_cpu() {
        let topology = tree("0-1", Some("1"), &[(0, "0-1", ""), (1, "2", "")]);
        assert_eq!((topology.nodes(), topology.number(0), topology.cpus(0).count()), (1, 1, 3));
        let topology = tree("0", None, &[]);
        assert_eq!((topology.nodes(), topology.node_of(1000)), (1, Some(0)));
    }

    #[test]
    fn what_a_kernel_does_not_say_is_made_up() {
        // Before 3.8 there is no list of nodes with memory; distances may be missing, or not numbers.
        let topology = tree("0-1", None, &[(0, "0", ""), (1, "1", "x y")]);
        assert_eq!((topology.nodes(), places(&topology, &[0, 1])), (2, vec![Some(0), Some(1)]));
        assert_eq!(topology.nearest(1), [1, 0]);
        // A CPU of a node that came later is at home on the first.
        assert_eq!(topology.home(9), 0);
    }

    #[test]
    fn more_nodes_than_there_is_room_for_are_folded_onto_the_nearest() {
        let row = |node: usize| {
            (0..80).map(|other: usize| (10 + other.abs_diff(node)).to_string()).collect::<Vec<_>>().join(" ")
        };
        let nodes: Vec<(usize, String, String)> = (0..80).map(|node| (node, node.to_string(), row(node))).collect();
        let nodes: Vec<(usize, &str, &str)> =
            nodes.iter().map(|(node, cpus, row)| (*node, &cpus[..], &row[..])).collect();
        let topology = tree("0-79", Some("0-79"), &nodes);
        assert_eq!((topology.nodes(), topology.home(79), topology.home(7)), (MAX_NODES, MAX_NODES - 1, 7));
        assert_eq!(topology.cpus(MAX_NODES - 1).count(), 80 - MAX_NODES + 1);
    }

    #[test]
    fn nodes_that_a_cpuset_excludes_are_not_used() {
        let mut read = |file: File| match file {
            File::Online | File::HasMemory => Some("0-2".to_owned()),
            File::Cpus(node) => Some(node.to_string()),
            File::Distances(node) => Some(["10 20 30", "20 10 15", "30 15 10"][node].to_owned()),
        };
        let topology = Topology::parse(&mut read, || Some(NodeMask::of(1)));
        assert_eq!((topology.nodes(), topology.number(0), topology.cpus(0).count()), (1, 1, 3));
        // A set that has none of them is one of another kind.
        let topology = Topology::parse(&mut read, || Some(NodeMask::of(9)));
        assert_eq!(topology.nodes(), 3);
    }
}
