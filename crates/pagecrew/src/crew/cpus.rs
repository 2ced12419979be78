//! The CPUs that the threads of a crew may run on. They come and go: CPUs go offline and come online, and an administrator changes
//! cpusets.

use crate::sys::clock;
use crate::sys::sched::{self, AtomicCpuSet, CpuSet};
use crate::sys::topology::Topology;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was read is believed this long.
const FRESH_NS: u64 = 1_000_000_000;

/// See the module. Read by any thread without a lock; while it changes, a reader sees some of the new CPUs and some of the old ones,
/// which does no harm: where a thread really runs is the kernel's decision.
pub(super) struct Cpus {
    /// What the process was allowed when it began, CPUs that were offline included.
    allowed: CpuSet,
    /// Of these, the ones that can be used at present.
    now: AtomicCpuSet,
    /// The CPUs of each node that are online, where there are several nodes.
    of_nodes: Box<[AtomicCpuSet]>,
    read_ns: AtomicU64,
}

impl Cpus {
    /// For a process that is allowed `allowed`, on a machine that was just read.
    pub fn new(allowed: CpuSet, topology: &Topology) -> Cpus {
        let present = sched::affinity().unwrap_or_default().intersection(&allowed);
        let nodes = if topology.nodes() > 1 { topology.nodes() } else { 0 };
        Cpus {
            now: AtomicCpuSet::new(if present.count() > 0 { &present } else { &allowed }),
            of_nodes: (0..nodes).map(|node| AtomicCpuSet::new(topology.cpus(node))).collect(),
            allowed,
            read_ns: AtomicU64::new(clock::now_ns()),
        }
    }

    /// Lets the calling thread run on all that the process may use. Where no CPU of them is online any more, the kernel refuses, and the
    /// thread runs where the one may that started it.
    pub fn settle_anywhere(&self) {
        let _ = sched::set_affinity(&self.allowed);
    }

    /// Looks what can be used now, unless somebody did so a moment ago. Called by a thread that has settled anywhere.
    pub fn look(&self, topology: &Topology) {
        let now = clock::now_ns();
        let last = self.read_ns.load(Ordering::Relaxed);
        if now < last + FRESH_NS
            || self.read_ns.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        if let Ok(present) = sched::affinity() {
            self.now.store(&present);
        }
        for (node, cpus) in self.of_nodes.iter().enumerate() {
            cpus.store(&topology.cpus_online(node));
        }
    }

    /// The CPUs that can be used.
    pub fn now(&self) -> CpuSet {
        self.now.load()
    }

    /// The CPUs of `node` that can be used; all that can be used on a machine with one node.
    pub fn of_node(&self, node: usize) -> CpuSet {
        match self.of_nodes.get(node) {
            Some(cpus) => cpus.load().intersection(&self.now()),
            None => self.now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.insert(cpu));
        set
    }

    #[test]
    fn what_is_allowed_and_can_be_used_is_followed() {
        let (own, topology) = (sched::affinity().unwrap(), Topology::uniform(2, 4));
        let mut allowed = own;
        // One that this machine doesn't have, as one that is offline.
        allowed.insert(1023);
        std::thread::spawn(move || {
            let cpus = Cpus::new(allowed, &topology);
            assert_eq!(cpus.now(), own);
            assert_eq!(
                (cpus.of_node(0), cpus.of_node(1)),
                (own.intersection(&set(&[0, 1, 2, 3])), own.intersection(&set(&[4, 5, 6, 7])))
            );
            // Another program takes CPUs away, and gives them back.
            let one = set(&[sched::current_cpu()]);
            sched::set_affinity(&one).unwrap();
            cpus.look(&topology);
            assert_eq!(cpus.now(), own, "read a moment ago");
            cpus.read_ns.store(0, Ordering::Relaxed);
            cpus.look(&topology);
            assert_eq!(cpus.now(), one);
            cpus.settle_anywhere();
            cpus.read_ns.store(0, Ordering::Relaxed);
            cpus.look(&topology);
            assert_eq!(cpus.now(), own);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_process_that_is_allowed_nothing_that_is_online_keeps_what_it_is_allowed() {
        let cpus = Cpus::new(set(&[1000, 1001]), &Topology::uniform(1, 2));
        assert_eq!(cpus.now(), set(&[1000, 1001]));
        assert_eq!(cpus.of_node(0), set(&[1000, 1001]));
    }
}
