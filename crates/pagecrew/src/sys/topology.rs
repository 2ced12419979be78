//! NUMA nodes and their CPUs, from `/sys/devices/system/node`.

use super::procfs::{self, Buffer};
use super::sched::CpuSet;

/// More nodes than this are folded onto the first ones.
pub const MAX_NODES: usize = 16;

/// The nodes of a machine and which CPUs are theirs.
#[derive(Clone)]
pub struct Topology {
    nodes: usize,
    cpus: Vec<CpuSet>,
}

impl Topology {
    /// This machine's; one node with every CPU where sysfs is not there.
    pub fn read() -> Topology {
        let mut buffer = Buffer::new();
        let online = procfs::read(c"/sys/devices/system/node/online", &mut buffer).unwrap_or("0");
        let nodes = list(online).last().map_or(1, |last| (last + 1).min(MAX_NODES));
        let mut topology = Topology { nodes, cpus: vec![CpuSet::new(); nodes] };
        for node in 0..nodes {
            let mut path = [0u8; 64];
            let path = procfs::path(&mut path, &["/sys/devices/system/node/node"], node as u64, "/cpulist");
            match procfs::read(path, &mut buffer) {
                Ok(cpus) => list(cpus).for_each(|cpu| topology.cpus[node].insert(cpu)),
                Err(_) if nodes == 1 => (0..libc::CPU_SETSIZE as usize).for_each(|cpu| topology.cpus[0].insert(cpu)),
                Err(_) => {}
            }
        }
        topology
    }

    /// A made-up machine of `nodes` nodes with `cpus_each` CPUs, for tests and simulations.
    pub fn uniform(nodes: usize, cpus_each: usize) -> Topology {
        assert!((1..=MAX_NODES).contains(&nodes), "1 to {MAX_NODES} nodes");
        let mut topology = Topology { nodes, cpus: vec![CpuSet::new(); nodes] };
        (0..nodes * cpus_each).for_each(|cpu| topology.cpus[cpu / cpus_each].insert(cpu));
        topology
    }

    /// Number of nodes, at least 1.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The CPUs of `node`.
    pub fn cpus(&self, node: usize) -> &CpuSet {
        &self.cpus[node]
    }

    /// The node of `cpu`; 0 for a CPU that no node has.
    pub fn node_of(&self, cpu: usize) -> usize {
        (0..self.nodes).find(|&node| self.cpus[node].contains(cpu)).unwrap_or(0)
    }
}

/// The nodes that have memory (3.8); node 0 where sysfs is not there.
pub fn nodes_with_memory() -> Vec<usize> {
    let mut buffer = Buffer::new();
    let text = procfs::read(c"/sys/devices/system/node/has_memory", &mut buffer).unwrap_or("0");
    let nodes: Vec<usize> = list(text).filter(|&node| node < MAX_NODES).collect();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// One more than the highest number that a CPU of this machine may ever have.
pub fn possible_cpus() -> usize {
    let mut buffer = Buffer::new();
    let last = procfs::read(c"/sys/devices/system/cpu/possible", &mut buffer).ok().and_then(|text| list(text).last());
    last.map_or_else(super::sched::online_cpus, |last| last + 1)
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
    }

    #[test]
    fn this_machine_has_its_current_cpu_on_a_node() {
        let topology = Topology::read();
        let cpu = crate::sys::sched::current_cpu();
        assert!(topology.cpus(topology.node_of(cpu)).contains(cpu));
    }

    #[test]
    fn a_made_up_machine() {
        let topology = Topology::uniform(8, 32);
        assert_eq!((topology.nodes(), topology.node_of(0), topology.node_of(255)), (8, 0, 7));
        assert_eq!(topology.cpus(3).count(), 32);
    }
}
