//! On which NUMA node the memory of a zone lies: on its own, whoever touches a page first.
//!
//! Without a policy of the range, a page comes from the node of the CPU that touches it first, which may be a helper's, or that of a
//! thread that has moved since it asked. So each zone's addresses get a preference for the zone's node once, when they are reserved, and
//! again where they are mapped anew. A preference, never more: where the node has nothing left, the nearest one helps out.
//!
//! A policy of the program's own, as from `numactl`, is for all of its memory, and a policy of a range would overrule it. So where the
//! program has one, nothing is said of any range.

use crate::sys::memory::Range;
use crate::sys::numa;
use crate::sys::topology::Topology;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the module.
pub(super) struct Placement {
    /// The kernel's number of each node.
    numbers: Box<[usize]>,
    /// Whether ranges are placed.
    on: AtomicBool,
}

impl Placement {
    /// For the nodes of `topology`. Where there is only one, nothing is placed and the kernel is asked nothing.
    pub fn new(topology: &Topology) -> Placement {
        let several = topology.nodes() > 1;
        // Where the policy can't be read, there may be one.
        let on = several && numa::thread_has_default_policy() == Ok(true);
        Placement { numbers: (0..topology.nodes()).map(|node| topology.number(node)).collect(), on: on.into() }
    }

    /// Whether ranges are placed.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Has pages of `range` come from `node`, if ranges are placed.
    pub fn place(&self, node: usize, range: Range) {
        if self.is_on() {
            // Where it is refused, pages come from the node of the CPU that touches them first.
            let _ = numa::prefer(range, self.numbers[node]);
        }
    }

    /// Nothing is placed from now on. Returns whether ranges were.
    pub fn leave(&self) -> bool {
        self.on.swap(false, Ordering::Relaxed)
    }

    /// Undoes [`Placement::place`].
    pub fn follow_threads(range: Range) {
        if range.len > 0 {
            // Refused as the placement was.
            let _ = numa::follow_threads(range);
        }
    }
}
