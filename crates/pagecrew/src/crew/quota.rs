//! What the CPU bandwidth limit of the process's control group leaves to helpers.
//!
//! The idle class is no help here: whatever a helper runs is taken from the quota, and a group that has used it up stands still, the
//! program's own threads included. The policy is [`Quota`](super::governor::Quota); here is what is read for it, and when.

use super::governor::Quota;
use crate::sys::{cgroup, clock};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// A limit is looked at this often while there is work: every usual period.
const LOOK_NS: u64 = 100_000_000;
/// Whether there is one at all, this often.
const LOOK_FOR_NS: u64 = 10_000_000_000;
/// After the group was held back, helpers keep away for this long.
const HELD_BACK_NS: u64 = 1_000_000_000;

/// See the module. Takes no lock: helpers look.
pub(super) struct QuotaWatch {
    due_ns: AtomicU64,
    looking: AtomicBool,
    /// How many helpers may work at a time.
    helpers: AtomicUsize,
    last_ns: AtomicU64,
    last_used_ns: AtomicU64,
    last_throttled: AtomicU64,
    held_back_ns: AtomicU64,
    /// CPU time that helpers have used.
    crew_ns: AtomicU64,
}

impl QuotaWatch {
    pub fn new() -> QuotaWatch {
        QuotaWatch {
            due_ns: AtomicU64::new(0),
            looking: AtomicBool::new(false),
            helpers: AtomicUsize::new(usize::MAX),
            last_ns: AtomicU64::new(0),
            last_used_ns: AtomicU64::new(0),
            last_throttled: AtomicU64::new(0),
            held_back_ns: AtomicU64::new(0),
            crew_ns: AtomicU64::new(0),
        }
    }

    /// How many helpers may work at a time, as last looked at.
    pub fn helpers(&self) -> usize {
        self.helpers.load(Ordering::Relaxed)
    }

    /// A helper has worked for `ns`.
    pub fn worked(&self, ns: u64) {
        self.crew_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The same, looked at anew if it is time. Reads files.
    pub fn look(&self) -> usize {
        let now = clock::now_ns();
        if now >= self.due_ns.load(Ordering::Relaxed) && !self.looking.swap(true, Ordering::Acquire) {
            self.note(now, cgroup::cpu());
            self.looking.store(false, Ordering::Release);
        }
        self.helpers()
    }

    fn note(&self, now: u64, limit: Option<cgroup::Cpu>) {
        let Some(limit) = limit else {
            self.helpers.store(usize::MAX, Ordering::Relaxed);
            self.due_ns.store(now + LOOK_FOR_NS, Ordering::Relaxed);
            return;
        };
        let crew_ns = self.crew_ns.swap(0, Ordering::Relaxed);
        let used_ns = limit.used_us.map_or_else(clock::process_cpu_ns, |us| us * 1000);
        let since = now - self.last_ns.swap(now, Ordering::Relaxed);
        let used = used_ns.saturating_sub(self.last_used_ns.swap(used_ns, Ordering::Relaxed)).saturating_sub(crew_ns);
        let throttled = limit.throttled > self.last_throttled.swap(limit.throttled, Ordering::Relaxed);
        // The first reading says nothing of lately.
        let first = since == now;
        if throttled && !first {
            self.held_back_ns.store(now + HELD_BACK_NS, Ordering::Relaxed);
        }
        let quota = Quota {
            milli: limit.quota_milli,
            used_milli: if first { limit.quota_milli } else { used * 1000 / since.max(1) },
            held_back: now < self.held_back_ns.load(Ordering::Relaxed),
        };
        self.helpers.store(quota.helpers(), Ordering::Relaxed);
        self.due_ns.store(now + LOOK_NS, Ordering::Relaxed);
    }

    /// In a forked child: nobody is looking.
    pub fn reset(&self) {
        self.looking.store(false, Ordering::Relaxed);
        self.due_ns.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Looks 100 ms apart at a group of `milli`, of which others use `used_milli` and helpers `crew_milli`.
    fn after(milli: u64, used_milli: u64, crew_milli: u64, throttled: impl Fn(u64) -> u64) -> Vec<usize> {
        let watch = QuotaWatch::new();
        let look = |tick: u64| {
            let used_us = Some(tick * 100 * (used_milli + crew_milli));
            watch.worked(if tick > 0 { crew_milli * 100 * 1000 } else { 0 });
            watch.note(
                (1000 + tick * 100) * MS,
                Some(cgroup::Cpu { quota_milli: milli, throttled: throttled(tick), used_us }),
            );
            watch.helpers()
        };
        (0..20).map(look).collect()
    }

    #[test]
    fn helpers_work_within_what_the_quota_leaves() {
        // At first nothing is known of the use.
        assert_eq!(after(4000, 1000, 0, |_| 7)[..3], [0, 3, 3]);
        // What they use themselves doesn't count against them.
        assert_eq!(after(4000, 1000, 2000, |_| 7)[2], 3);
        assert_eq!(after(2000, 1500, 0, |_| 0)[2], 0);
        // No more than one CPU: only where the program is nearly idle.
        assert_eq!((after(1000, 900, 0, |_| 0)[2], after(500, 10, 0, |_| 0)[2]), (0, 1));
    }

    #[test]
    fn a_group_that_was_held_back_has_no_helpers_for_a_while() {
        let helpers = after(4000, 500, 0, |tick| u64::from(tick >= 3));
        assert_eq!((helpers[2], helpers[3], helpers[12], helpers[13]), (3, 0, 0, 3));
    }

    #[test]
    fn without_a_limit_nothing_is_left_out() {
        let watch = QuotaWatch::new();
        watch.note(5, None);
        assert_eq!(watch.helpers(), usize::MAX);
        assert_eq!(watch.due_ns.load(Ordering::Relaxed), 5 + LOOK_FOR_NS);
    }

    #[test]
    fn a_limit_is_looked_at_often() {
        let watch = QuotaWatch::new();
        watch.note(5, Some(cgroup::Cpu { quota_milli: 1000, throttled: 0, used_us: Some(0) }));
        assert_eq!(watch.due_ns.load(Ordering::Relaxed), 5 + LOOK_NS);
    }

    #[test]
    fn one_at_a_time_looks_and_only_when_it_is_due() {
        let watch = QuotaWatch::new();
        let due = || watch.due_ns.load(Ordering::Relaxed);
        watch.looking.store(true, Ordering::Relaxed);
        watch.helpers.store(3, Ordering::Relaxed);
        assert_eq!((watch.look(), due()), (3, 0), "somebody is looking");
        watch.reset();
        watch.look();
        let next = due();
        assert!(next > clock::now_ns() && !watch.looking.load(Ordering::Relaxed));
        watch.helpers.store(3, Ordering::Relaxed);
        assert_eq!((watch.look(), due()), (3, next), "it is not due");
    }
}
