//! Policy: whether a program's zero pages would be missed: by others, because memory is short, or by itself no longer, because it gave most of
//! its memory back.

use crate::sys::cgroup;
use crate::sys::procfs::MemoryInfo;

/// Memory is short when less than this part of the machine's is available, or of the control group's limit is left.
const SHARE: u64 = 8;

/// Whether memory is short on this machine or in this control group. What can't be read is not short.
pub fn is_short(machine: Option<MemoryInfo>, group: Option<cgroup::Memory>) -> bool {
    machine.is_some_and(|memory| memory.available < memory.total / SHARE)
        || group.is_some_and(|group| group.limit.saturating_sub(group.used) < group.limit / SHARE)
}

/// A program that has had no more than this part of its peak for [`REST_NS`] is at rest.
const REST_SHARE: usize = 4;
const REST_NS: u64 = 5_000_000_000;

/// Whether a program gave most of its memory back and lets it be. In what is left of its huge pages there is little else than what nobody
/// uses, and the kernel would make more of them by and by (khugepaged fills up whatever has one page in use).
#[derive(Debug, Default)]
pub struct Rest {
    since_ns: Option<u64>,
}

impl Rest {
    /// Whether it is at rest at time `now`, in nanoseconds, with `resident` bytes of the `peak` that it once had. To be asked about once a second.
    pub fn is_at_rest(&mut self, resident: usize, peak: usize, now: u64) -> bool {
        if resident > peak / REST_SHARE {
            self.since_ns = None;
            return false;
        }
        now - *self.since_ns.get_or_insert(now) >= REST_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_at_rest_that_has_little_of_its_peak_for_seconds() {
        const S: u64 = 1_000_000_000;
        let mut rest = Rest::default();
        assert!(!rest.is_at_rest(900, 1000, S));
        assert!(!rest.is_at_rest(250, 1000, 2 * S) && !rest.is_at_rest(100, 1000, 6 * S));
        // It used more in between.
        assert!(!rest.is_at_rest(251, 1000, 7 * S) && !rest.is_at_rest(100, 1000, 8 * S));
        assert!(!rest.is_at_rest(100, 1000, 13 * S - 1) && rest.is_at_rest(250, 1000, 13 * S));
        assert!(rest.is_at_rest(10, 1000, 1000 * S) && !rest.is_at_rest(400, 1000, 1001 * S));
    }

    #[test]
    fn an_eighth_must_be_left_of_both() {
        let machine = |available| Some(MemoryInfo { total: 800, available, swap: 0 });
        let group = |used| Some(cgroup::Memory { limit: 80, used });
        assert!(!is_short(None, None) && !is_short(machine(100), group(70)));
        assert!(is_short(machine(99), None) && is_short(machine(800), group(71)) && is_short(None, group(90)));
    }
}
