//! Policy: whether memory is short enough for a program's zero pages to be missed by others.

use crate::sys::cgroup;
use crate::sys::procfs::MemoryInfo;

/// Memory is short when less than this part of the machine's is available, or of the control group's limit is left.
const SHARE: u64 = 8;

/// Whether memory is short on this machine or in this control group. What can't be read is not short.
pub fn is_short(machine: Option<MemoryInfo>, group: Option<cgroup::Memory>) -> bool {
    machine.is_some_and(|memory| memory.available < memory.total / SHARE)
        || group.is_some_and(|group| group.limit.saturating_sub(group.used) < group.limit / SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_must_be_left_of_both() {
        let machine =
            |available| Some(MemoryInfo { total: 800, available, swap: 0, free_swap: 0, files: 0, reclaimable: 0 });
        let group = |used| Some(cgroup::Memory { limit: 80, used });
        assert!(!is_short(None, None) && !is_short(machine(100), group(70)));
        assert!(is_short(machine(99), None) && is_short(machine(800), group(71)) && is_short(None, group(90)));
    }
}
