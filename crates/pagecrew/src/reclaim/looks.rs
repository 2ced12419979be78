//! What the kernel counts for the whole machine, node by node: pure arithmetic.
//!
//! Reclaim is counted in one sum for all nodes. What was added to it since the last look is put down to the nodes by the time for which
//! their reclaim has worked meanwhile; where none has, to all alike.

use crate::control::lead::Look;
use crate::sys::vmstat::{Counts, NodeMemory};

/// A node, as it was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Found {
    /// What it has.
    pub memory: NodeMemory,
    /// Time for which the node's reclaim in the background has worked, or has waited for a CPU, in nanoseconds.
    pub busy_ns: u64,
}

/// The nodes, from one look to the next.
#[derive(Debug, Clone)]
pub struct Looks {
    counts: Counts,
    nodes: Vec<Look>,
}

impl Looks {
    /// As they are seen for the first time.
    pub fn new(at_ns: u64, counts: Counts, found: &[Found]) -> Looks {
        let look = |&Found { memory, busy_ns }: &Found| Look {
            at_ns,
            free: memory.free,
            files: memory.files,
            reclaimed: 0,
            stalls: 0,
            busy_ns,
        };
        Looks { counts, nodes: found.iter().map(look).collect() }
    }

    /// As they were seen last, in the order in which they were found.
    pub fn nodes(&self) -> &[Look] {
        &self.nodes
    }

    /// Takes note of a look at all nodes. Counters that go back count as unchanged.
    pub fn note(&mut self, at_ns: u64, counts: Counts, found: &[Found]) {
        let before = std::mem::replace(&mut self.counts, counts);
        let reclaimed = counts.reclaimed.saturating_sub(before.reclaimed);
        let stalls = counts.stalls.saturating_sub(before.stalls);
        let worked: Vec<u64> =
            self.nodes.iter().zip(found).map(|(node, found)| found.busy_ns.saturating_sub(node.busy_ns)).collect();
        let all: u64 = worked.iter().sum();
        let nodes = self.nodes.len() as u64;
        for ((node, found), worked) in self.nodes.iter_mut().zip(found).zip(worked) {
            let share = |value: u64| match all {
                0 => value / nodes,
                all => (u128::from(value) * u128::from(worked) / u128::from(all)) as u64,
            };
            node.at_ns = at_ns;
            (node.free, node.files) = (found.memory.free, found.memory.files);
            node.reclaimed += share(reclaimed);
            // Whoever waited did so at a node where memory was short. Better all of those than none.
            if all == 0 || worked > 0 {
                node.stalls += stalls;
            }
            node.busy_ns = node.busy_ns.max(found.busy_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(reclaimed: u64, stalls: u64) -> Counts {
        Counts { reclaimed, stalls, ..Counts::default() }
    }

    fn found(free: u64, busy_ns: u64) -> Found {
        Found { memory: NodeMemory { free, files: 10 * free }, busy_ns }
    }

    #[test]
    fn one_node_has_all_of_it() {
        let mut looks = Looks::new(0, counts(500, 5), &[found(100, 10)]);
        looks.note(7, counts(1500, 8), &[found(90, 30)]);
        assert_eq!(looks.nodes(), [Look { at_ns: 7, free: 90, files: 900, reclaimed: 1000, stalls: 3, busy_ns: 30 }]);
        looks.note(8, counts(1400, 9), &[found(90, 20)]);
        assert_eq!(looks.nodes(), [Look { at_ns: 8, free: 90, files: 900, reclaimed: 1000, stalls: 4, busy_ns: 30 }]);
    }

    #[test]
    fn what_was_reclaimed_is_that_of_the_nodes_that_worked() {
        let mut looks = Looks::new(0, counts(0, 0), &[found(1, 0), found(2, 0), found(3, 0)]);
        looks.note(1, counts(900, 3), &[found(1, 20), found(2, 0), found(3, 10)]);
        let of = |looks: &Looks| looks.nodes().iter().map(|look| (look.reclaimed, look.stalls)).collect::<Vec<_>>();
        assert_eq!(of(&looks), [(600, 3), (0, 0), (300, 3)]);
        looks.note(2, counts(1200, 4), &[found(1, 20), found(2, 0), found(3, 10)]);
        assert_eq!(of(&looks), [(700, 4), (100, 1), (400, 4)]);
    }
}
