//! NUMA policies of ranges and threads (`mbind(2)`, `get_mempolicy(2)`), and the nodes that pages lie on (`move_pages(2)` as a
//! question). Nodes are named by the kernel's numbers here. Containers often have these calls refused (`EPERM`, `ENOSYS`).

use super::Errno;
use super::memory::Range;

/// The kernel has at most so many nodes (`MAX_NUMNODES`).
pub const MOST_NODES: usize = 1024;
const WORDS: usize = MOST_NODES / 64;

/// A set of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMask([u64; WORDS]);

impl NodeMask {
    /// The empty set.
    pub const EMPTY: NodeMask = NodeMask([0; WORDS]);

    /// The set of `node` alone; empty if there can be no such node.
    pub fn of(node: usize) -> NodeMask {
        let mut mask = NodeMask::EMPTY;
        if let Some(word) = mask.0.get_mut(node / 64) {
            *word |= 1 << (node % 64);
        }
        mask
    }

    /// Whether `node` is in the set.
    pub fn contains(&self, node: usize) -> bool {
        self.0.get(node / 64).is_some_and(|word| word >> (node % 64) & 1 == 1)
    }

    /// Whether no node is in the set.
    pub fn is_empty(&self) -> bool {
        *self == NodeMask::EMPTY
    }
}

// Modes and flags of `linux/mempolicy.h`.
const DEFAULT: i32 = 0;
const PREFERRED: i32 = 1;
const BIND: i32 = 2;
const LOCAL: i32 = 4;
const MODE_FLAGS: i32 = 0xe000;
const MEMS_ALLOWED: usize = 1 << 2;

/// Whether a policy of `mode` and `nodes` says no more than the default: from the node of the CPU that touches a page first.
pub fn is_default(mode: i32, nodes: &NodeMask) -> bool {
    // Before 5.14 the kernel reports `MPOL_LOCAL` as a preference for no node.
    matches!(mode & !MODE_FLAGS, DEFAULT | LOCAL) || (mode & !MODE_FLAGS == PREFERRED && nodes.is_empty())
}

fn get_policy(flags: usize) -> Result<(i32, NodeMask), Errno> {
    let (mut mode, mut nodes) = (DEFAULT, NodeMask::EMPTY);
    // With this flag the kernel wants no room for a mode.
    let room = if flags == MEMS_ALLOWED { std::ptr::null_mut() } else { &raw mut mode };
    // SAFETY: both places are valid for what the kernel writes, the mask for its `MOST_NODES` bits.
    let result =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, room, nodes.0.as_mut_ptr(), MOST_NODES, 0usize, flags) };
    Errno::check(result).map(|_| (mode, nodes))
}

/// Whether the calling thread has the default policy (2.6.7). Threads and programs that it starts inherit another one, as from `numactl`.
///
/// # Errors
/// `ENOSYS` on kernels without NUMA, `EPERM` where a filter of system calls refuses it.
pub fn thread_has_default_policy() -> Result<bool, Errno> {
    get_policy(0).map(|(mode, nodes)| is_default(mode, &nodes))
}

/// The nodes that the calling thread's cpuset allows (2.6.24).
///
/// # Errors
/// As [`thread_has_default_policy`].
pub fn allowed_nodes() -> Result<NodeMask, Errno> {
    get_policy(MEMS_ALLOWED).map(|(_, nodes)| nodes)
}

fn set_policy(range: Range, mode: i32, nodes: &NodeMask) -> Result<(), Errno> {
    // The kernel takes one bit less than it is told.
    let (mask, bits) = if nodes.is_empty() { (std::ptr::null(), 0) } else { (nodes.0.as_ptr(), MOST_NODES + 1) };
    // SAFETY: where pages come from changes no contents; the mask is valid for its bits.
    let result = unsafe { libc::syscall(libc::SYS_mbind, range.start, range.len, mode, mask, bits, 0usize) };
    Errno::check(result).map(drop)
}

/// Has the pages of `range` come from `node` as long as that has some, and from the nearest node otherwise, when they are touched for
/// the first time (2.6.7). A range of a file in memory keeps that for whoever maps the file.
///
/// # Errors
/// `ENOSYS` on kernels without NUMA, `EINVAL` where there is no such node or it has no memory, `EPERM` where a filter refuses it.
pub fn prefer(range: Range, node: usize) -> Result<(), Errno> {
    set_policy(range, PREFERRED, &NodeMask::of(node))
}

/// As [`prefer`], from no other node: where `node` has nothing left and nothing to reclaim, the kernel kills a process.
///
/// # Errors
/// As [`prefer`].
pub fn bind(range: Range, node: usize) -> Result<(), Errno> {
    set_policy(range, BIND, &NodeMask::of(node))
}

/// Has the pages of `range` come from where the policy of the touching thread says (2.6.7). Unmapped parts don't matter.
///
/// # Errors
/// As [`prefer`].
pub fn follow_threads(range: Range) -> Result<(), Errno> {
    set_policy(range, DEFAULT, &NodeMask::EMPTY)
}

/// Which nodes the pages of a range lie on. Pages that were looked at are counted, not bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// Pages on each node.
    nodes: Vec<usize>,
    /// Pages that are not there: never touched, swapped, or the shared zero page.
    pub absent: usize,
    /// Pages of which the kernel does not say.
    pub unknown: usize,
}

impl Placement {
    /// Pages on `node`.
    pub fn on(&self, node: usize) -> usize {
        self.nodes.get(node).copied().unwrap_or(0)
    }

    /// Pages on other nodes.
    pub fn elsewhere(&self, node: usize) -> usize {
        self.nodes.iter().sum::<usize>() - self.on(node)
    }

    /// The nodes with pages, and how many.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.nodes.iter().copied().enumerate().filter(|&(_, pages)| pages > 0)
    }

    fn note(&mut self, status: i32) {
        match usize::try_from(status) {
            Ok(node) => {
                self.nodes.resize(self.nodes.len().max(node + 1), 0);
                self.nodes[node] += 1;
            }
            Err(_) if matches!(-status, libc::ENOENT | libc::EFAULT) => self.absent += 1,
            Err(_) => self.unknown += 1,
        }
    }
}

/// Pages that one system call asks for.
const AT_ONCE: usize = 128;

/// Tells `each`, for every `step` bytes of `range`, the node of the page there, or the negative error number that the kernel has for it
/// (2.6.18). Moves nothing and touches nothing.
///
/// # Errors
/// `ENOSYS` on kernels without NUMA or page migration, `EPERM` where a filter of system calls refuses it.
pub fn page_nodes(range: Range, step: usize, mut each: impl FnMut(usize, i32)) -> Result<(), Errno> {
    assert!(step > 0, "a step leads on");
    let mut start = range.start;
    while start < range.end() {
        let count = (range.end() - start).div_ceil(step).min(AT_ONCE);
        let pages: [usize; AT_ONCE] = std::array::from_fn(|index| start + index * step);
        // What the kernel does not fill in is no node.
        let mut status = [-libc::EINVAL; AT_ONCE];
        // SAFETY: with no nodes to move to, the kernel only reads `count` addresses and writes as many numbers.
        let result = unsafe {
            libc::syscall(libc::SYS_move_pages, 0, count, pages.as_ptr(), 0usize, status.as_mut_ptr(), 0usize)
        };
        Errno::check(result)?;
        pages.iter().zip(status).take(count).for_each(|(&page, status)| each(page, status));
        start += count * step;
    }
    Ok(())
}

/// Which nodes the pages of `range` lie on, one page for every `step` bytes (2.6.18).
///
/// # Errors
/// As [`page_nodes`].
pub fn placement(range: Range, step: usize) -> Result<Placement, Errno> {
    let mut placement = Placement::default();
    page_nodes(range, step, |_, status| placement.note(status))?;
    Ok(placement)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::PAGE_SIZE;
    use crate::sys::memory::{self, Protection};

    #[test]
    fn masks_have_the_nodes_that_they_were_made_of() {
        for node in [0, 63, 64, 1023] {
            let mask = NodeMask::of(node);
            assert!(mask.contains(node) && !mask.contains(node + 1) && !mask.is_empty());
        }
        assert!(NodeMask::of(MOST_NODES).is_empty() && !NodeMask::EMPTY.contains(MOST_NODES));
    }

    #[test]
    fn policies_that_say_nothing_are_the_default() {
        assert!(is_default(DEFAULT, &NodeMask::EMPTY) && is_default(LOCAL, &NodeMask::EMPTY));
        assert!(is_default(PREFERRED, &NodeMask::EMPTY) && !is_default(PREFERRED, &NodeMask::of(1)));
        assert!(!is_default(BIND, &NodeMask::of(0)) && !is_default(BIND | 0x8000, &NodeMask::of(0)));
    }

    #[test]
    fn touched_pages_are_on_a_node_and_others_are_absent() {
        let range = Range { start: memory::map(300 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 300 * PAGE_SIZE };
        for page in (0..300).step_by(2) {
            // SAFETY: the page was mapped above and belongs to this test.
            unsafe { ((range.start + page * PAGE_SIZE) as *mut u8).write(1) };
        }
        // A container may refuse the call.
        if let Ok(placement) = placement(range, PAGE_SIZE) {
            let there: usize = placement.nodes().map(|(_, pages)| pages).sum();
            assert!(there == 150 && placement.absent == 150 || placement.nodes().count() == 1, "{placement:?}");
            assert_eq!(there + placement.absent + placement.unknown, 300);
            let (node, pages) = placement.nodes().next().unwrap();
            assert_eq!((placement.on(node), placement.elsewhere(node)), (pages, there - pages));
        }
        // SAFETY: nobody else knows of the range.
        unsafe { memory::unmap(range).unwrap() };
    }

    #[test]
    fn a_range_is_bound_to_a_node_that_is_there_and_to_no_other() {
        let range = Range { start: memory::map(4 * PAGE_SIZE, Protection::ReadWrite).unwrap(), len: 4 * PAGE_SIZE };
        if let Ok(allowed) = allowed_nodes() {
            let node = (0..MOST_NODES).find(|&node| allowed.contains(node)).unwrap();
            prefer(range, node).unwrap();
            bind(range, node).unwrap();
            follow_threads(range).unwrap();
            assert!(prefer(range, MOST_NODES - 1).is_err());
        }
        // SAFETY: nobody else knows of the range.
        unsafe { memory::unmap(range).unwrap() };
    }
}
