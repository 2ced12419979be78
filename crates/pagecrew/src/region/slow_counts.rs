//! Counts of requests that no cache served, by CPU: the counters that others read lie in lines that all CPUs would fight for.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// What was counted is added to the counters after so many calls, or bytes.
const CALLS: u32 = 64;
const BYTES: u64 = 64 << 20;

/// What was counted on a CPU. An update that is lost to a thread that was moved here meanwhile makes a number for people wrong by one.
#[derive(Default)]
#[repr(align(64))]
struct Cpu {
    calls: AtomicU32,
    /// Handed out and taken back since then.
    bytes: AtomicU64,
    counts: [AtomicU64; 4],
}

/// What was counted since the last time.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub allocations: u64,
    pub allocated_bytes: u64,
    pub reused_bytes: u64,
    pub frees: u64,
}

/// The counts of all CPUs.
pub(super) struct SlowCounts(Box<[Cpu]>);

impl SlowCounts {
    /// For CPUs with numbers below `cpus`.
    pub fn new(cpus: usize) -> SlowCounts {
        SlowCounts((0..cpus.max(1)).map(|_| Cpu::default()).collect())
    }

    /// A CPU that came later shares the last one's.
    fn at(&self, cpu: usize) -> &Cpu {
        &self.0[cpu.min(self.0.len() - 1)]
    }

    /// Adds what was done with a span of `len` bytes to the counts of a CPU. Returns whether it is time to take them.
    pub fn add(&self, cpu: usize, len: usize, what: Counts) -> bool {
        let state = self.at(cpu);
        let (calls, bytes) = (state.calls.load(Relaxed) + 1, state.bytes.load(Relaxed) + len as u64);
        state.calls.store(calls, Relaxed);
        state.bytes.store(bytes, Relaxed);
        let amounts = [what.allocations, what.allocated_bytes, what.reused_bytes, what.frees];
        for (count, amount) in state.counts.iter().zip(amounts) {
            count.store(count.load(Relaxed).wrapping_add(amount), Relaxed);
        }
        calls >= CALLS || bytes >= BYTES
    }

    /// What was counted on a CPU since the last call; `None` for nothing.
    pub fn take(&self, cpu: usize) -> Option<Counts> {
        let state = self.at(cpu);
        if state.calls.load(Relaxed) == 0 {
            return None;
        }
        state.calls.store(0, Relaxed);
        state.bytes.store(0, Relaxed);
        let [allocations, allocated_bytes, reused_bytes, frees] =
            [0, 1, 2, 3].map(|count| state.counts[count].swap(0, Relaxed));
        Some(Counts { allocations, allocated_bytes, reused_bytes, frees })
    }

    /// The numbers of the CPUs.
    pub fn cpus(&self) -> std::ops::Range<usize> {
        0..self.0.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_taken_once_and_in_time() {
        let counts = SlowCounts::new(2);
        let one = Counts { allocations: 1, allocated_bytes: 100, reused_bytes: 40, frees: 0 };
        assert!((1..CALLS).all(|_| !counts.add(1, 100, one)));
        assert!(counts.add(1, 100, one));
        let calls = u64::from(CALLS);
        let all = Counts { allocations: calls, allocated_bytes: 100 * calls, reused_bytes: 40 * calls, frees: 0 };
        assert_eq!((counts.take(0), counts.take(1), counts.take(1)), (None, Some(all), None));
        let freed = Counts { frees: 1, ..Counts::default() };
        assert!(counts.add(0, BYTES as usize, freed), "much at once");
        assert!(!counts.add(77, 1, freed), "a CPU that came later");
        assert_eq!([counts.take(0), counts.take(1)], [Some(freed); 2]);
    }
}
