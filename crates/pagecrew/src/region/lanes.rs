//! Lanes: each node has several pairs of zones, so that threads on different CPUs need not wait for one lock.
//!
//! More zones mean more places in which free memory lies about, so a program gets them only where its threads do wait for each other. All
//! CPUs begin with the first lane. A CPU on which threads find the zone locked again and again goes on with another lane, and with the next
//! one if it meets others there as well, each time later than before. Which lane a span came from is what its address says; it goes back there
//! whoever frees it.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

/// What a thread that found its zone locked adds to its CPU's score; one that found it open takes one off.
const WAITED: u32 = 4;
/// A CPU whose score is higher takes another lane.
const SCORE_MOST: u32 = 256;
/// Then it takes so many times as much: spans of its former lane are still given back there, and others do the same at that time.
const PATIENCE: u32 = 8;
/// After that many times, a CPU stays where it is: there are fewer lanes than CPUs that want one.
const MOVES_MOST: u32 = 6;

/// Which lane each CPU uses.
pub(super) struct Lanes {
    count: usize,
    cpus: Box<[Cpu]>,
    /// CPUs that have left the first lane.
    left: AtomicUsize,
}

/// Updates that are lost to a thread that was moved here meanwhile only change when the CPU takes another lane.
#[derive(Default)]
#[repr(align(64))]
struct Cpu {
    moves: AtomicU32,
    score: AtomicU32,
}

/// How many lanes a node has, a power of two: no more than its CPUs, nor than `most`.
pub(super) fn count(cpus_of_node: usize, most: usize) -> usize {
    let wanted = cpus_of_node.min(most).max(1);
    1 << wanted.ilog2()
}

impl Lanes {
    /// `count` lanes a node, for CPUs with numbers below `cpus`.
    ///
    /// # Panics
    /// If `count` is no power of two.
    pub fn new(count: usize, cpus: usize) -> Lanes {
        assert!(count.is_power_of_two());
        Lanes { count, cpus: (0..cpus).map(|_| Cpu::default()).collect(), left: AtomicUsize::new(0) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many are used, at most.
    pub fn used(&self) -> usize {
        (1 + self.left.load(Relaxed)).min(self.count)
    }

    /// The lane of a CPU after so many moves. CPUs that meet in one lane don't meet in the next one.
    fn lane_after(&self, cpu: usize, moves: usize) -> usize {
        match moves {
            0 => 0,
            _ => (cpu + (moves - 1) * (1 + cpu / self.count)) & (self.count - 1),
        }
    }

    /// The lane of a CPU.
    pub fn of(&self, cpu: usize) -> usize {
        match self.cpus.get(cpu) {
            Some(state) if self.count > 1 => self.lane_after(cpu, state.moves.load(Relaxed) as usize),
            _ => 0,
        }
    }

    /// A thread on this CPU found the zone of its lane open.
    pub fn found_open(&self, cpu: usize) {
        if let Some(state) = self.cpus.get(cpu) {
            let score = state.score.load(Relaxed);
            if score > 0 {
                state.score.store(score - 1, Relaxed);
            }
        }
    }

    /// A thread on this CPU found the zone of its lane locked.
    pub fn found_locked(&self, cpu: usize) {
        let Some(state) = self.cpus.get(cpu).filter(|_| self.count > 1) else { return };
        let (score, moves) = (state.score.load(Relaxed) + WAITED, state.moves.load(Relaxed));
        if score > Self::most(moves) && moves < MOVES_MOST {
            state.moves.store(moves + 1, Relaxed);
            state.score.store(0, Relaxed);
            if moves == 0 {
                self.left.fetch_add(1, Relaxed);
            }
        } else {
            state.score.store(score.min(Self::most(MOVES_MOST)), Relaxed);
        }
    }

    fn most(moves: u32) -> u32 {
        SCORE_MOST * PATIENCE.pow(moves)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Threads on `cpus` CPUs that hold their lane's lock for `held` percent of the time: how many share the fullest lane after a while, and
    /// how often CPUs moved in all.
    fn crowd(cpus: usize, count: usize, held: u64, rounds: usize) -> (usize, u32) {
        let lanes = Lanes::new(count, cpus);
        let mut state = 7u64;
        let mut percent = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % 100
        };
        for _ in 0..rounds {
            for cpu in 0..cpus {
                let others = (0..cpus).filter(|&other| other != cpu && lanes.of(other) == lanes.of(cpu)).count();
                let locked = (0..others).any(|_| percent() < held);
                if locked { lanes.found_locked(cpu) } else { lanes.found_open(cpu) }
            }
        }
        let fullest = (0..count).map(|lane| (0..cpus).filter(|&cpu| lanes.of(cpu) == lane).count()).max().unwrap();
        (fullest, lanes.cpus.iter().map(|cpu| cpu.moves.load(Relaxed)).sum())
    }

    #[test]
    fn a_node_has_no_more_lanes_than_cpus() {
        assert_eq!([0, 1, 2, 3, 4, 7, 64].map(|cpus| count(cpus, 8)), [1, 1, 2, 2, 4, 4, 8]);
        assert_eq!([count(64, 1), count(64, 3)], [1, 2]);
    }

    #[test]
    fn threads_that_do_not_meet_stay_in_one_lane() {
        assert_eq!(crowd(1, 1, 90, 10_000), (1, 0));
        assert_eq!(crowd(2, 2, 10, 100_000), (2, 0));
        assert_eq!(crowd(8, 8, 2, 100_000), (8, 0));
    }

    #[test]
    fn threads_that_meet_all_the_time_part() {
        assert_eq!(crowd(2, 2, 60, 10_000).0, 1);
        assert_eq!(crowd(8, 8, 30, 10_000).0, 1);
        // Where there are more CPUs than lanes, they spread, and come to rest.
        let (fullest, moves) = crowd(64, 8, 30, 100_000);
        assert!(fullest <= 16, "{fullest}");
        assert!(moves <= 64 * MOVES_MOST, "{moves}");
    }

    #[test]
    fn two_cpus_that_have_the_same_lane_part() {
        let lanes = Lanes::new(4, 16);
        for (one, other) in [(0, 4), (1, 5), (3, 11), (0, 12)] {
            assert!(
                (1..6).any(|moves| lanes.lane_after(one, moves) != lanes.lane_after(other, moves)),
                "{one} {other}"
            );
        }
        assert_eq!(lanes.of(99), 0, "a CPU that came later");
        // The first move spreads them by number, the next ones by what lies above.
        assert_eq!([0, 1, 2, 3, 4].map(|moves| lanes.lane_after(9, moves)), [0, 1, 0, 3, 2]);
    }

    #[test]
    fn a_cpu_takes_the_next_lane_after_so_many_waits_each_time_later() {
        let lanes = Lanes::new(4, 8);
        assert_eq!((lanes.count(), lanes.used()), (4, 1));
        let locked = |times: usize| {
            (0..times).for_each(|_| lanes.found_locked(5));
            lanes.of(5)
        };
        assert_eq!([locked(64), locked(1)], [0, 1]);
        assert_eq!([locked(512), locked(1)], [1, 3]);
        assert_eq!(lanes.used(), 2);
        assert_eq!([locked(4096), locked(1)], [3, 1]);
        lanes.cpus[5].moves.store(MOVES_MOST, Relaxed);
        let last = lanes.of(5);
        lanes.cpus[5].score.store(Lanes::most(MOVES_MOST), Relaxed);
        assert_eq!(locked(2), last, "it stays where it is");
        assert_eq!(lanes.cpus[5].score.load(Relaxed), Lanes::most(MOVES_MOST));
        assert_eq!([0, 1, 7, 8].map(|cpu| lanes.of(cpu)), [0; 4], "the others are where they were");
    }

    #[test]
    fn an_open_lock_takes_a_quarter_of_a_wait_back() {
        let lanes = Lanes::new(4, 8);
        lanes.found_open(5);
        (0..64).for_each(|_| lanes.found_locked(5));
        (0..4).for_each(|_| lanes.found_open(5));
        lanes.found_locked(5);
        assert_eq!(lanes.of(5), 0);
        lanes.found_locked(5);
        assert_eq!(lanes.of(5), 1);
        // Of CPUs that nobody knew of.
        lanes.found_open(8);
        lanes.found_locked(8);
    }

    #[test]
    fn where_there_is_one_lane_nobody_moves() {
        let lanes = Lanes::new(1, 8);
        (0..1000).for_each(|_| lanes.found_locked(3));
        assert_eq!((lanes.of(3), lanes.cpus[3].moves.load(Relaxed)), (0, 0));
        let counts = [(0, 8), (1, 8), (3, 8), (12, 8), (12, 6), (12, 0)].map(|(cpus, most)| count(cpus, most));
        assert_eq!(counts, [1, 1, 2, 8, 4, 1]);
    }
}
