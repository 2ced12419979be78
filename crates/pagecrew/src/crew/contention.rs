//! Whether others want the CPUs that helpers would work on.
//!
//! The idle class alone does not keep helpers out of the way. One that is runnable and gets no CPU time keeps its process from ending
//! and from running another program, for seconds, and keeps what it holds in the kernel. So a helper looks whether there is a CPU
//! for it before it begins and every few milliseconds while it works, and keeps away while there is none. What it leaves, the
//! watcher sees to. Tasks of the idle class count like all others: nobody says which they are.

use super::governor::{Load, keep_away_ns};
use crate::sys::sched::{self, CpuSet};
use crate::sys::{clock, procfs};
#[cfg(test)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A helper that works looks again after this long.
const LOOK_NS: u64 = 2_000_000;
/// So many looks in a row have to find the CPUs taken: something that runs for a moment is no reason.
const LOOKS: usize = 3;
/// And so far apart they are.
const APART_NS: u64 = 20_000;

/// See the module.
pub(super) struct Contention {
    /// Until when helpers keep away.
    until_ns: AtomicU64,
    /// How often in a row they were turned away.
    times: AtomicU32,
    /// Whether helpers work whoever wants the CPUs: what a test of their class needs.
    #[cfg(test)]
    disregarded: AtomicBool,
}

/// When a helper last found a CPU for itself.
#[derive(Debug, Default)]
pub(super) struct Found {
    at_ns: u64,
    idle: Idle,
}

/// How much the process's CPUs were idle lately, where they are only some of the machine's.
#[derive(Debug, Default)]
struct Idle {
    /// When it was last read, and the sum then.
    at_ns: u64,
    sum_ns: u64,
    /// What came of it, in thousandths of a CPU.
    milli: Option<u64>,
}

impl Idle {
    /// Takes note of the CPUs' idle time until `now`. The kernel counts it in steps of 10 ms, so it is compared over more than that.
    fn note(&mut self, now: u64, sum_ns: Option<u64>) {
        let since = now - self.at_ns;
        let Some(sum_ns) = sum_ns else {
            *self = Idle::default();
            return;
        };
        self.milli = (since < IDLE_MOST_NS).then(|| sum_ns.saturating_sub(self.sum_ns) * 1000 / since.max(1));
        (self.at_ns, self.sum_ns) = (now, sum_ns);
    }

    fn look(&mut self, cpus: &CpuSet) -> Option<u64> {
        let now = clock::now_ns();
        if now >= self.at_ns + IDLE_LEAST_NS {
            self.note(now, sched::idle_ns(cpus));
        }
        self.milli
    }
}

const IDLE_LEAST_NS: u64 = 50_000_000;
/// What is older than this says nothing of lately.
const IDLE_MOST_NS: u64 = 2_000_000_000;

impl Contention {
    pub fn new() -> Contention {
        Contention {
            until_ns: AtomicU64::new(0),
            times: AtomicU32::new(0),
            #[cfg(test)]
            disregarded: AtomicBool::new(false),
        }
    }

    /// From now on, helpers work whoever wants the CPUs.
    #[cfg(test)]
    pub fn disregard(&self) {
        self.disregarded.store(true, Ordering::Relaxed);
    }

    /// Whether helpers keep away at this moment.
    pub fn now(&self) -> bool {
        #[cfg(test)]
        if self.disregarded.load(Ordering::Relaxed) {
            return false;
        }
        clock::now_ns() < self.until_ns.load(Ordering::Relaxed)
    }

    /// Whether there is a CPU for a helper in a process that may use `own` of a machine's `cpus`; `crew` says how many of the crew's
    /// threads are at work, this one included, and how many of them come before it. Reads a file.
    pub fn leaves_room(
        &self,
        found: &mut Found,
        own: impl FnOnce() -> CpuSet,
        cpus: usize,
        crew: impl Fn() -> (usize, usize),
    ) -> bool {
        if clock::now_ns() < found.at_ns + LOOK_NS {
            return true;
        }
        if self.now() {
            return false;
        }
        #[cfg(test)]
        if self.disregarded.load(Ordering::Relaxed) {
            return true;
        }
        let own = own();
        for look in 0..LOOKS {
            if look > 0 {
                // Whoever called this helper may be about to sleep, and may wait for its CPU.
                std::thread::yield_now();
                let apart = clock::now_ns() + APART_NS;
                while clock::now_ns() < apart {
                    std::hint::spin_loop();
                }
            }
            let (crew, before) = crew();
            // Without /proc nobody knows, and the idle class has to do.
            let restricted = own.count() < cpus;
            let room = |running| {
                let load = Load { cpus: own.count().min(cpus), running, crew };
                load.leaves_room(before) || (restricted && load.leaves_room_within(before, found.idle.look(&own)))
            };
            if procfs::running_tasks().map_or(true, room) {
                found.at_ns = clock::now_ns();
                self.times.store(0, Ordering::Relaxed);
                return true;
            }
        }
        found.at_ns = 0;
        self.taken();
        false
    }

    /// The CPUs are taken: a helper was found not to run, or has found none for itself.
    pub fn taken(&self) {
        if !self.now() {
            let times = self.times.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            self.until_ns.store(clock::now_ns() + keep_away_ns(times), Ordering::Relaxed);
        }
    }

    /// The others are gone: for a process that has stopped them, and for a forked child.
    pub fn over(&self) {
        self.until_ns.store(0, Ordering::Relaxed);
        self.times.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_helper_keeps_away_from_cpus_that_are_taken() {
        let (contention, mut found) = (Contention::new(), Found::default());
        let own = sched::affinity().unwrap();
        let leaves = |found: &mut Found, crew| contention.leaves_room(found, || own, own.count(), || (crew, 0));
        // As if all tasks were the crew's.
        let (all, none) = (1 << 20, 0);
        assert!(leaves(&mut found, all));
        assert!(!contention.now());
        // It was looked at only just now.
        assert!(leaves(&mut found, none));
        found = Found::default();
        // A while ago is not just now.
        found.at_ns = clock::now_ns() - LOOK_NS;
        let before = clock::now_ns();
        assert!(!contention.leaves_room(&mut found, CpuSet::new, 0, || (1, 0)));
        let until = contention.until_ns.load(Ordering::Relaxed);
        assert!(until > before);
        // A slow machine may take so long to come here.
        assert!(contention.now() || clock::now_ns() >= until);
        assert!(until <= clock::now_ns() + keep_away_ns(1), "they come back before long");
        // Nobody looks again meanwhile, on a slow machine either.
        assert!(!leaves(&mut found, all) || clock::now_ns() >= until);
        contention.over();
        assert!(!contention.now());
        assert!(leaves(&mut found, all));
    }

    #[test]
    fn what_runs_for_a_moment_only_is_looked_at_again_a_little_later() {
        // On a busy machine they may be far apart by themselves; not every time.
        for _ in 0..100 {
            let (contention, looks) = (Contention::new(), std::cell::RefCell::new(Vec::new()));
            let crew = || {
                looks.borrow_mut().push(clock::now_ns());
                (1, 0)
            };
            assert!(!contention.leaves_room(&mut Found::default(), CpuSet::new, 0, crew));
            let looks = looks.into_inner();
            assert_eq!(looks.len(), LOOKS);
            assert!(looks.windows(2).all(|pair| pair[1] - pair[0] >= APART_NS), "{looks:?}");
        }
    }

    #[test]
    fn a_process_on_some_of_the_cpus_has_room_where_they_are_idle() {
        let leaves = |cpus: usize, idle_milli: u64| {
            let idle = Idle { at_ns: clock::now_ns(), sum_ns: 0, milli: Some(idle_milli) };
            Contention::new().leaves_room(&mut Found { at_ns: 0, idle }, CpuSet::new, cpus, || (0, 0))
        };
        // By the number of running tasks, nothing is ever left of no CPU.
        assert!(leaves(4, 1000));
        assert!(!leaves(4, 0));
        assert!(!leaves(0, 1000), "it has all CPUs there are");
    }

    #[test]
    fn idle_time_is_read_anew_after_a_while() {
        let cpus = sched::affinity().unwrap();
        let mut idle = Idle::default();
        assert_eq!(idle.look(&cpus), None, "nothing is known of the time before");
        let first = idle.at_ns;
        assert_eq!((idle.look(&cpus), idle.at_ns), (None, first));
        std::thread::sleep(std::time::Duration::from_nanos(IDLE_LEAST_NS));
        assert!(idle.look(&cpus).is_some_and(|milli| milli <= 1500 * cpus.count() as u64), "{idle:?}");
        assert!(idle.at_ns >= first + IDLE_LEAST_NS);
    }

    #[test]
    fn idle_time_counts_only_if_it_is_of_lately() {
        let mut idle = Idle::default();
        let ms = 1_000_000;
        idle.note(10_000 * ms, Some(500 * ms));
        assert_eq!(idle.milli, None);
        idle.note(10_100 * ms, Some(650 * ms));
        assert_eq!(idle.milli, Some(1500));
        idle.note(13_100 * ms, Some(3_650 * ms));
        assert_eq!(idle.milli, None);
        idle.note(13_200 * ms, Some(3_650 * ms));
        assert_eq!(idle.milli, Some(0));
        idle.note(13_300 * ms, None);
        assert_eq!(idle.milli, None);
        idle.note(20_000 * ms, Some(0));
        idle.note(20_000 * ms + IDLE_MOST_NS, Some(0));
        assert_eq!(idle.milli, None, "just too long ago");
    }
}
