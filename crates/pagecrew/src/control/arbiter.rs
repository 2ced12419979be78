//! How services of one machine keep from chasing each other: pure arithmetic.
//!
//! The kernel's figure of available memory falls when the watermarks rise, although nobody has taken anything. So when `pagecrew reclaim` keeps
//! more free ahead of demand, a pool would give memory back, and programs under `run` theirs, to have it again a minute later. Both judge by
//! [`available`] instead: as it would be with the operator's own setting.
//!
//! And filling a pool takes memory as fast as programs do. While the machine reclaims for programs, it goes on slowly ([`Courtesy`]).

use crate::stats::Ahead;
use crate::sys::procfs::MemoryInfo;
use std::time::Duration;

/// What was published longer ago is void. It is published anew at least ten times as often.
const FRESH: Duration = Duration::from_secs(1);
/// More than this part of the memory is never kept free ahead.
const MOST_SHARE: u64 = 8;

/// What programs could have of the machine's `memory`, with no more kept free ahead than the operator's own setting makes. Never less than
/// what the kernel says. What was published is void where it is old, from the future, or makes no sense.
pub fn available(memory: &MemoryInfo, ahead: Option<Ahead>, now_ns: u64) -> u64 {
    let is_sound = |ahead: &Ahead| {
        let age = now_ns.checked_sub(ahead.at_ns);
        age.is_some_and(|age| u128::from(age) <= FRESH.as_nanos())
            && ahead.gap <= memory.total / MOST_SHARE
            && ahead.min <= memory.total
    };
    let hidden = ahead.filter(is_sound).map_or(0, |ahead| hidden(&ahead, memory.files, memory.reclaimable));
    memory.available.max(memory.available.saturating_add(hidden).min(memory.total))
}

/// By how much the kernel's figure of available memory is lower for what is kept free ahead.
///
/// The kernel takes what lies below the watermark high off what is free, and of caches of files and what else is reclaimable it leaves out the
/// watermark low, but no more than half (`si_mem_available`, 4.6). High is two gaps above min, and low one.
fn hidden(ahead: &Ahead, files: u64, reclaimable: u64) -> u64 {
    let left_out = |cache: u64, gap: u64| (cache / 2).min(ahead.min.saturating_add(gap));
    let more = |cache: u64| left_out(cache, ahead.gap).saturating_sub(left_out(cache, ahead.own_gap));
    2 * ahead.gap.saturating_sub(ahead.own_gap) + more(files) + more(reclaimable)
}

/// What was counted by a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    /// When.
    pub at_ns: u64,
    /// Bytes that the machine has reclaimed, for whomever.
    pub reclaimed: u64,
    /// Bytes that were filled in the background.
    pub filled: u64,
}

/// So long it is counted before anything follows.
const WINDOW: Duration = Duration::from_secs(1);
/// Reclaim for programs that is no reason to hold back, in bytes a second.
const LITTLE: u64 = 64 << 20;

/// Filling in the background gives way to programs for which the machine reclaims more than for filling: then one piece in a second is filled.
#[derive(Debug, Clone, Default)]
pub struct Courtesy {
    since: Option<Sums>,
    slow: bool,
    /// A piece was begun since then.
    begun: bool,
}

impl Courtesy {
    /// Whether it is time to [`note`](Courtesy::note) what was counted.
    pub fn due(&self, now_ns: u64) -> bool {
        self.since.is_none_or(|since| now_ns >= end(&since))
    }

    /// Takes note of what was counted by now.
    pub fn note(&mut self, now: Sums) {
        let since = *self.since.get_or_insert(now);
        let passed_ns = now.at_ns.saturating_sub(since.at_ns);
        if passed_ns > 0 {
            let own = now.filled.saturating_sub(since.filled);
            let others = now.reclaimed.saturating_sub(since.reclaimed).saturating_sub(own);
            let little = u128::from(LITTLE) * u128::from(passed_ns) / 1_000_000_000;
            self.slow = others > own && u128::from(others) > little;
        }
        (self.since, self.begun) = (Some(now), false);
    }

    /// How long nothing is begun.
    pub fn wait(&self, now_ns: u64) -> Duration {
        match self.since {
            Some(since) if self.slow && self.begun => Duration::from_nanos(end(&since).saturating_sub(now_ns)),
            _ => Duration::ZERO,
        }
    }

    /// A piece was begun.
    pub fn begin(&mut self) {
        self.begun = true;
    }
}

fn end(since: &Sums) -> u64 {
    since.at_ns.saturating_add(WINDOW.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn memory(available: u64, files: u64) -> MemoryInfo {
        MemoryInfo { total: 24 * GIB, available, swap: 0, free_swap: 0, files, reclaimable: 0 }
    }

    fn ahead(at_ns: u64, gap: u64) -> Option<Ahead> {
        Some(Ahead { at_ns, min: 60 * MIB, own_gap: 24 * MIB, gap })
    }

    #[test]
    fn what_is_kept_free_ahead_is_available() {
        // Much in caches: the kernel leaves out of them what lies below the watermark low.
        assert_eq!(available(&memory(GIB, 4 * GIB), ahead(0, 600 * MIB), SECOND), GIB + 3 * 576 * MIB);
        // Little in them: half of it, whatever is kept free.
        assert_eq!(available(&memory(GIB, 100 * MIB), ahead(0, 600 * MIB), SECOND), GIB + 2 * 576 * MIB);
        let both = MemoryInfo { reclaimable: 4 * GIB, ..memory(GIB, 4 * GIB) };
        assert_eq!(available(&both, ahead(0, 600 * MIB), SECOND), GIB + 4 * 576 * MIB);
        // The operator's own setting is no reason to add anything, nor is a smaller one.
        for gap in [0, 24 * MIB] {
            assert_eq!(available(&memory(GIB, 4 * GIB), ahead(0, gap), SECOND), GIB);
        }
        // There is no more than there is.
        assert_eq!(available(&memory(24 * GIB - 1, 4 * GIB), ahead(0, 600 * MIB), SECOND), 24 * GIB);
    }

    #[test]
    fn what_is_missing_old_or_senseless_is_void() {
        let now = 100 * SECOND;
        let sound = |ahead| available(&memory(GIB, 4 * GIB), ahead, now) > GIB;
        assert!(sound(ahead(now, 600 * MIB)) && sound(ahead(now - SECOND, 600 * MIB)));
        assert!(!sound(None) && !sound(ahead(now - SECOND - 1, 600 * MIB)) && !sound(ahead(now + 1, 600 * MIB)));
        assert!(!sound(ahead(now, 3 * GIB + 1)) && !sound(ahead(now, u64::MAX)));
        assert!(!sound(Some(Ahead { min: u64::MAX, ..ahead(now, 600 * MIB).unwrap() })));
    }

    proptest! {
        #[test]
        fn it_is_never_less_than_the_kernel_says_nor_more_than_there_is(
            total in 1u64..1 << 50, part in 0u64..101, files in 0u64..1 << 51, reclaimable: u64,
            at_ns in 0..4 * SECOND, min: u64, own_gap: u64, gap: u64,
        ) {
            let memory = MemoryInfo { total, available: total / 100 * part, swap: 0, free_swap: 0, files, reclaimable };
            let found = available(&memory, Some(Ahead { at_ns, min, own_gap, gap }), 2 * SECOND);
            prop_assert!(found >= memory.available && found <= memory.available.max(total));
        }
    }

    /// Filling for `seconds` beside programs for which `others` bytes a second are reclaimed. Returns the bytes that were filled.
    fn fill(courtesy: &mut Courtesy, sums: &mut Sums, seconds: u64, others: u64) -> u64 {
        const PIECE: u64 = 32 * MIB;
        let before = sums.filled;
        for _ in 0..seconds * 100 {
            // 10 ms, in which a piece can be filled. The machine reclaims what is filled, and what programs take.
            if courtesy.due(sums.at_ns) {
                courtesy.note(*sums);
            }
            if courtesy.wait(sums.at_ns).is_zero() {
                courtesy.begin();
                sums.filled += PIECE;
                sums.reclaimed += PIECE;
            }
            sums.reclaimed += others / 100;
            sums.at_ns += SECOND / 100;
        }
        sums.filled - before
    }

    #[test]
    fn filling_is_slow_beside_programs_and_not_for_its_own_sake() {
        let (mut courtesy, mut sums) = (Courtesy::default(), Sums { at_ns: 5 * SECOND, reclaimed: GIB, filled: 0 });
        let full = 100 * 32 * MIB;
        assert_eq!(fill(&mut courtesy, &mut sums, 10, 0), 10 * full);
        // What little is reclaimed for others anyway.
        assert_eq!(fill(&mut courtesy, &mut sums, 10, 60 * MIB), 10 * full);
        // Programs read from a fast disk: it gives way within a second, goes on slowly, and is back within a second.
        let beside = fill(&mut courtesy, &mut sums, 100, 6 * GIB);
        assert!((100 * 32 * MIB..2 * full + 100 * 32 * MIB).contains(&beside), "{}", beside / MIB);
        assert!(fill(&mut courtesy, &mut sums, 10, 0) >= 8 * full);
        // After a long time in which nothing was filled.
        sums.at_ns += 3600 * SECOND;
        assert_eq!(fill(&mut courtesy, &mut sums, 1, 0), full);
    }
}
