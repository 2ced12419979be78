//! Policy: how many helpers a demand is worth, and how large a chunk is. Pure functions, so that machines of any size can be
//! simulated.

use crate::sys::HUGE_PAGE_SIZE;

/// What there is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Bytes not yet taken, over all jobs.
    pub bytes: usize,
    /// What one thread does in a microsecond, in bytes, as last measured.
    pub rate: usize,
}

/// What there is to do it with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Means {
    /// CPUs that the process may run on.
    pub cpus: usize,
    /// Helpers that the CPU bandwidth limit of the process's cgroup leaves room for (`Quota::helpers`).
    pub quota: usize,
    /// The user's own bound on helpers.
    pub limit: Option<usize>,
}

/// A helper is worth waking for this much work, in microseconds: several times what waking it costs.
const WORTH_US: usize = 200;

/// The most helpers of a kind, however large the machine: behind this many the kernel's own locks are the limit (Aaron Lu found 4 to
/// 16 threads a node best), and the machine is not ours alone.
pub const MAX_HELPERS: usize = 16;

/// How many helpers should be at `demand`.
///
/// One CPU is left to the thread that caused the work, where there is more than one.
pub fn helpers_wanted(demand: Demand, means: Means) -> usize {
    let cpus = means.cpus.saturating_sub(1).clamp(1, MAX_HELPERS);
    let most = cpus.min(means.quota).min(means.limit.unwrap_or(MAX_HELPERS));
    let worth = demand.bytes / (demand.rate.max(1) * WORTH_US);
    worth.clamp(1, most.max(1)).min(most)
}

/// Whether `bytes` for whose end nobody waits are worth a wake-up of a helper: a millisecond of one thread. What is less, the caller or the
/// watcher does in passing.
pub fn worth_a_wake_up(demand: Demand) -> bool {
    demand.bytes / demand.rate.max(1) >= WORTH_LEFT_US
}

const WORTH_LEFT_US: usize = 1000;

/// The CPU bandwidth limit of a control group, and what is used of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The limit, in thousandths of a CPU.
    pub milli: u64,
    /// What others than helpers have used lately, in thousandths of a CPU.
    pub used_milli: u64,
    /// Whether the group was held back lately.
    pub held_back: bool,
}

impl Quota {
    /// Helpers that may work at a time: what they run, the program can't. With less than a CPU left, only beside a program that uses next
    /// to nothing, whose quota would be left over.
    pub fn helpers(&self) -> usize {
        if self.held_back {
            return 0;
        }
        let left = (self.milli.saturating_sub(self.used_milli) / 1000) as usize;
        let nearly_idle = self.used_milli < self.milli / 8;
        left.max(usize::from(nearly_idle))
    }
}

/// Who wants the machine's CPUs at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// CPUs that are online and the process may use.
    pub cpus: usize,
    /// Tasks that run or wait for a CPU, all of the machine.
    pub running: usize,
    /// Of those, this crew's own: helpers that are at work, and its watcher.
    pub crew: usize,
}

impl Load {
    /// Whether there is a CPU that nobody else wants, for the one of the crew's helpers at work that `before` others come before.
    ///
    /// A thread of the idle class that others keep from running is worse than none: a process can't end, nor run another program,
    /// before each of its threads has had a moment of CPU time, and that moment may come after seconds.
    pub fn leaves_room(&self, before: usize) -> bool {
        let others = self.running.saturating_sub(self.crew);
        before < self.cpus.saturating_sub(others)
    }

    /// The same for a process that may use only some of the machine's CPUs: the running tasks may be on the others. `idle_milli` is the
    /// time that its own CPUs were idle lately, in thousandths of a CPU, if that is known. Where it isn't, every running task
    /// counts as if it were on them.
    pub fn leaves_room_within(&self, before: usize, idle_milli: Option<u64>) -> bool {
        // A CPU that helpers were at is one that others did not want.
        let idle = idle_milli.map_or(0, |milli| ((milli + IDLE_ENOUGH) / 1000) as usize);
        self.leaves_room(before) || before < idle
    }
}

/// A CPU that was idle for nine tenths of the time counts as idle.
const IDLE_ENOUGH: u64 = 100;

/// How long helpers keep away when they have found the CPUs taken for the `times`-th time in a row, in nanoseconds.
pub fn keep_away_ns(times: u32) -> u64 {
    KEEP_AWAY_NS << times.saturating_sub(1).min(KEEP_AWAY_DOUBLED)
}

/// The first time they keep away for 5 ms: about a time slice of others.
const KEEP_AWAY_NS: u64 = 5_000_000;
/// And at most for 640 ms.
const KEEP_AWAY_DOUBLED: u32 = 7;

/// Time that a chunk should take, in microseconds.
const CHUNK_US: usize = 1000;
/// The same for what is given back while nobody waits.
const CHUNK_LEFT_US: usize = 200;
/// The same where somebody waits for zeroes: a helper of the idle class finishes one within its first time slice.
const CHUNK_WAITING_US: usize = 100;
/// The smallest chunk where somebody waits for zeroes: below it, taking it weighs.
const CHUNK_MIN: usize = 256 << 10;

/// What a chunk costs besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grain {
    /// Hardly anything: writing can begin and end anywhere.
    Fine,
    /// A system call, an interrupt to every other CPU of the process (its TLB), and the lock of each page table that two threads
    /// share. So chunks are whole page tables, and long where somebody waits and takes part: what a helper holds then, others can
    /// do again. Where nobody waits, a helper that is stopped keeps no more than a short chunk from the machine.
    PageTable,
}

/// Size of the next chunk in bytes, given what one thread does in a microsecond (`rate`), what is left to take, who takes part,
/// and whether somebody waits. Towards the end chunks get smaller, so that all end together.
pub fn chunk_bytes(grain: Grain, rate: usize, left: usize, takers: usize, waiting: bool) -> usize {
    let fine = waiting && grain == Grain::Fine;
    let time = match (grain, waiting) {
        (Grain::Fine, true) => CHUNK_WAITING_US,
        (Grain::PageTable, false) => CHUNK_LEFT_US,
        _ => CHUNK_US,
    };
    let wanted = (rate * time).min(left / (2 * takers.max(1)));
    if fine && wanted < HUGE_PAGE_SIZE {
        wanted.next_power_of_two().clamp(CHUNK_MIN, HUGE_PAGE_SIZE)
    } else {
        (wanted / HUGE_PAGE_SIZE).max(1) * HUGE_PAGE_SIZE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn wanted(bytes: usize, cpus: usize) -> usize {
        helpers_wanted(Demand { bytes, rate: 10_000 }, Means { cpus, quota: usize::MAX, limit: None })
    }

    #[test]
    fn one_cpu_is_left_to_the_program() {
        assert_eq!(wanted(8 * GIB, 2), 1);
        assert_eq!(wanted(8 * GIB, 16), 15);
        assert_eq!(wanted(8 * GIB, 1), 1);
    }

    #[test]
    fn helpers_grow_with_the_work_and_never_past_the_most() {
        assert_eq!(wanted(1 << 20, 256), 1);
        for cpus in [2, 8, 64, 256] {
            let mut before = 0;
            for shift in 20..44 {
                let now = wanted(1 << shift, cpus);
                assert!(
                    now >= before && now <= MAX_HELPERS && (now < cpus || cpus == 1),
                    "{cpus} CPUs, 2^{shift} bytes: {now}"
                );
                before = now;
            }
        }
    }

    #[test]
    fn a_bandwidth_limit_counts_like_fewer_cpus() {
        let wanted = |milli, used_milli, held_back| {
            let quota = Quota { milli, used_milli, held_back }.helpers();
            helpers_wanted(Demand { bytes: 64 * GIB, rate: 10_000 }, Means { cpus: 64, quota, limit: None })
        };
        assert_eq!((wanted(4000, 1000, false), wanted(4000, 1001, false), wanted(4000, 0, true)), (3, 2, 0));
        // No more than one CPU and a program that uses it; and one that doesn't.
        assert_eq!((wanted(1000, 600, false), wanted(500, 500, false), wanted(500, 20, false)), (0, 0, 1));
        assert_eq!((wanted(800, 99, false), wanted(800, 100, false)), (1, 0), "next to nothing is less than an eighth");
        // Others of the group may use more than the limit for a moment.
        assert_eq!(wanted(2000, 5000, false), 0);
    }

    #[test]
    fn less_than_a_millisecond_is_no_wake_up_worth() {
        let worth = |bytes, rate| worth_a_wake_up(Demand { bytes, rate });
        assert!(!worth(9_999_999, 10_000) && worth(10_000_000, 10_000) && worth(1000, 0) && !worth(0, 1));
    }

    #[test]
    fn the_user_has_the_last_word() {
        let demand = Demand { bytes: 64 * GIB, rate: 10_000 };
        let with = |limit| helpers_wanted(demand, Means { cpus: 64, quota: usize::MAX, limit: Some(limit) });
        assert_eq!((with(0), with(3), with(1000)), (0, 3, MAX_HELPERS));
    }

    #[test]
    fn helpers_work_on_cpus_that_nobody_else_wants() {
        let room = |cpus, others, helpers| {
            let load = Load { cpus, running: others + helpers, crew: helpers };
            (0..helpers).filter(|&before| load.leaves_room(before)).count()
        };
        // Beside the program's own thread.
        assert_eq!((room(2, 1, 1), room(16, 1, 15)), (1, 15));
        // Every CPU has somebody else.
        assert_eq!((room(2, 2, 1), room(2, 5, 1), room(1, 1, 1)), (0, 0, 0));
        for cpus in [1usize, 2, 64, 256] {
            for others in 0..2 * cpus {
                for helpers in 1..=MAX_HELPERS {
                    let working = room(cpus, others, helpers);
                    assert!(working == helpers || working == cpus.saturating_sub(others), "{cpus} {others} {helpers}");
                }
            }
        }
        // A count that was read while tasks came and went.
        assert!(Load { cpus: 2, running: 0, crew: 1 }.leaves_room(0));
    }

    #[test]
    fn of_a_machine_s_tasks_only_those_on_the_own_cpus_count_where_that_is_known() {
        // Four of 64 CPUs, and forty tasks somewhere.
        let load = Load { cpus: 4, running: 41, crew: 1 };
        assert!(!load.leaves_room_within(0, None) && !load.leaves_room_within(0, Some(899)));
        assert!(load.leaves_room_within(0, Some(900)) && !load.leaves_room_within(1, Some(1800)));
        assert!(load.leaves_room_within(1, Some(1900)));
        // Fewer tasks than own CPUs, wherever they are.
        assert!(Load { running: 4, ..load }.leaves_room_within(0, None));
    }

    #[test]
    fn helpers_that_were_turned_away_come_back_less_and_less_often() {
        let times: Vec<u64> = (0..9).map(keep_away_ns).collect();
        assert!(times.windows(2).all(|pair| pair[0] <= pair[1]));
        assert_eq!(
            (times[1], times[2], times[8], keep_away_ns(u32::MAX)),
            (5_000_000, 10_000_000, 640_000_000, 640_000_000)
        );
    }

    #[test]
    fn chunks_take_a_millisecond_or_a_tenth_of_one() {
        assert_eq!(chunk_bytes(Grain::Fine, 10_000, 8 * GIB, 2, false), 4 * HUGE_PAGE_SIZE);
        assert_eq!(chunk_bytes(Grain::Fine, 1, 8 * GIB, 2, false), HUGE_PAGE_SIZE);
        assert_eq!(chunk_bytes(Grain::Fine, 10_000, 8 * GIB, 2, true), 1 << 20);
        assert_eq!(chunk_bytes(Grain::Fine, 450_000, 8 * GIB, 2, true), 21 * HUGE_PAGE_SIZE);
        assert_eq!(chunk_bytes(Grain::Fine, 10_000, 64 << 20, 8, false), 2 * HUGE_PAGE_SIZE, "half of each one's part");
        // A chunk that was preempted makes the next ones small, but never so small that taking it weighs.
        assert_eq!(chunk_bytes(Grain::Fine, 1, 8 * GIB, 2, true), CHUNK_MIN);
    }

    #[test]
    fn page_tables_are_never_shared_by_two_chunks() {
        for left in [1, HUGE_PAGE_SIZE, GIB, 8 * GIB] {
            for rate in [1, 1_000, 35_000, 450_000] {
                let chunk = chunk_bytes(Grain::PageTable, rate, left, 2, true);
                assert!(chunk > 0 && chunk.is_multiple_of(HUGE_PAGE_SIZE), "{left} at {rate}: {chunk}");
            }
        }
        assert_eq!(chunk_bytes(Grain::PageTable, 35_000, 8 * GIB, 2, true), 16 * HUGE_PAGE_SIZE);
        assert_eq!(chunk_bytes(Grain::PageTable, 35_000, 8 * GIB, 2, false), 3 * HUGE_PAGE_SIZE);
    }

    /// Threads of very different speed on a simulated machine end within a chunk of each other, which fixed slices do not.
    #[test]
    fn a_slow_thread_does_not_hold_the_end_back() {
        for (threads, grain) in [2usize, 8, 32].into_iter().flat_map(|n| [(n, Grain::Fine), (n, Grain::PageTable)]) {
            // Thread 0 is ten times slower than the rest.
            let speed = |thread: usize| if thread == 0 { 1_000 } else { 10_000 };
            let (mut left, mut clock) = (8 * GIB, vec![0usize; threads]);
            while left > 0 {
                let thread = (0..threads).min_by_key(|&thread| clock[thread]).unwrap();
                let chunk = chunk_bytes(grain, speed(thread), left, threads, true).min(left);
                left -= chunk;
                clock[thread] += chunk / speed(thread);
            }
            let ideal = 8 * GIB / (10_000 * (threads - 1) + 1_000);
            let end = clock.iter().max().unwrap();
            assert!(*end <= ideal + 2_500, "{threads} threads, {grain:?}: {end} us, ideal {ideal} us");
        }
    }
}
