//! Is a control group held at its limit, and where is it to be held: pure arithmetic.
//!
//! What counts is memory that the kernel can't simply take: a group may be full of page cache all its life, and nobody waits.

use crate::sys::PAGE_SIZE;
use std::time::Duration;

/// How a group stands at its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Neither of the others.
    Quiet,
    /// Memory that the kernel can't drop is at seven eighths of where tasks are held, or above.
    Near,
    /// Tasks of the group are held.
    Held,
}

/// What is known of a group. Each is asked for only where it decides: some cost the kernel much more than others.
pub trait Numbers {
    /// Whether tasks sleep at the limit, if the kernel tells (version 1).
    fn sleeping(&mut self) -> Option<bool>;
    /// Where tasks are held; `None` if they aren't.
    fn line(&mut self) -> Option<u64>;
    /// What is charged to the group.
    fn usage(&mut self) -> Option<u64>;
    /// What of it the kernel can drop or write back, without swap.
    fn cache(&mut self) -> u64;
    /// What of it the kernel can write to swap.
    fn swappable(&mut self) -> u64;
    /// Whether tasks had to reclaim since the last look.
    fn reclaims(&mut self) -> bool;
}

/// From here on a group is near `line`.
fn near(line: u64) -> u64 {
    line / 8 * 7
}

/// How a group stands. Where the kernel doesn't tell that tasks sleep, they are held if the group is at the line and next to
/// nothing can be taken from it: a sixty-fourth, or a sixteenth if the tasks are busy taking it.
pub fn standing(numbers: &mut impl Numbers) -> Standing {
    let sleeping = numbers.sleeping();
    if sleeping == Some(true) {
        return Standing::Held;
    }
    let (Some(line), Some(usage)) = (numbers.line(), numbers.usage()) else { return Standing::Quiet };
    if usage < near(line) {
        return Standing::Quiet;
    }
    let fixed = usage.saturating_sub(numbers.cache());
    if fixed < near(line) {
        return Standing::Quiet;
    }
    if sleeping.is_some() || usage < line {
        return Standing::Near;
    }
    let busy = numbers.reclaims();
    let held = |fixed| fixed >= line - line / 64 || (busy && fixed >= line - line / 16);
    // With swap, the kernel makes room. It does that better without the zeroes, but nobody waits for them to go.
    if held(fixed) && held(fixed.saturating_sub(numbers.swappable())) { Standing::Held } else { Standing::Near }
}

/// What `memory.high` is to be below a `memory.max` of `max` bytes, so that tasks slow down before one of them is killed.
pub fn high_below(max: u64) -> u64 {
    whole_pages(max.saturating_sub((max / 8).max(4 << 20)).max(max / 2))
}

/// A step down of `memory.high` is a sixty-fourth of `memory.max`, but at least and at most this: milliseconds for the kernel where it only has
/// to drop pages, and not seconds where it has to write them first.
const STEP_LEAST: u64 = 4 << 20;
const STEP_MOST: u64 = 32 << 20;

/// A step that took longer than this is followed by a shorter one, and by a longer one where it took an eighth of it: whoever writes the file
/// waits for what is reclaimed, and has signals to hear meanwhile.
const STEP_SLOW: Duration = Duration::from_millis(20);
/// However slow the swap device is, this is written to it in a fraction of that.
const STEP_SHORT: u64 = 256 << 10;

/// How far `memory.high` is lowered at a time.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    /// No further than this.
    most: u64,
}

impl Default for Steps {
    /// Nothing is known yet of how long they take.
    fn default() -> Steps {
        Steps { most: STEP_MOST }
    }
}

impl Steps {
    /// The next step from a `memory.high` of `high` bytes to [`high_below`] `max`, in a group with `usage` bytes: the kernel
    /// reclaims what is above it at once, so a group full of page cache is not brought down by an eighth at once.
    pub fn next_high(self, high: u64, usage: u64, max: u64) -> u64 {
        let step = (max / 64).clamp(STEP_LEAST, STEP_MOST);
        // The first one leaves as much below `max` as a few pages take, huge ones included.
        let step = if high >= max { step.min(self.most).max(STEP_LEAST) } else { step.min(self.most) };
        whole_pages(high.min(usage).min(max).saturating_sub(step)).max(high_below(max))
    }

    /// The last one took so long.
    pub fn took(&mut self, time: Duration) {
        if time > STEP_SLOW {
            self.most = (self.most / 4).max(STEP_SHORT);
        } else if time < STEP_SLOW / 8 {
            self.most = (self.most * 2).min(STEP_MOST);
        }
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes / PAGE_SIZE as u64 * PAGE_SIZE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Numbers that are given, in MiB, and which of the costly ones were asked for.
    #[derive(Default, Clone)]
    struct Given {
        sleeping: Option<bool>,
        line: Option<u64>,
        usage: Option<u64>,
        cache: u64,
        swappable: u64,
        reclaims: bool,
        asked: Vec<&'static str>,
    }

    impl Numbers for Given {
        fn sleeping(&mut self) -> Option<bool> {
            self.sleeping
        }
        fn line(&mut self) -> Option<u64> {
            self.line
        }
        fn usage(&mut self) -> Option<u64> {
            self.usage
        }
        fn cache(&mut self) -> u64 {
            self.asked.push("cache");
            self.cache
        }
        fn swappable(&mut self) -> u64 {
            self.asked.push("swappable");
            self.swappable
        }
        fn reclaims(&mut self) -> bool {
            self.asked.push("reclaims");
            self.reclaims
        }
    }

    /// A group of version 2 with a line at 640 MiB.
    fn group(usage: u64, cache: u64) -> Given {
        Given { line: Some(640 * MIB), usage: Some(usage * MIB), cache: cache * MIB, ..Given::default() }
    }

    #[test]
    fn a_group_with_room_costs_one_number() {
        let mut given = group(559, 0);
        assert_eq!(standing(&mut given), Standing::Quiet);
        assert!(given.asked.is_empty());
        assert_eq!(standing(&mut Given { usage: Some(u64::MAX), ..Given::default() }), Standing::Quiet);
        assert_eq!(standing(&mut Given { usage: None, ..group(0, 0) }), Standing::Quiet);
    }

    #[test]
    fn page_cache_is_quiet_however_full() {
        for (usage, cache, reclaims) in [(640, 630, true), (700, 141, true), (560, 1, false)] {
            let mut given = Given { reclaims, ..group(usage, cache) };
            assert_eq!(standing(&mut given), Standing::Quiet, "{usage} {cache}");
            assert_eq!(given.asked, ["cache"]);
        }
    }

    #[test]
    fn what_cannot_be_taken_is_near_and_then_held() {
        let of = |usage, cache, reclaims| standing(&mut Given { reclaims, ..group(usage, cache) });
        assert_eq!(of(560, 0, false), Standing::Near);
        // Below the line nobody waits.
        assert_eq!(of(639, 0, true), Standing::Near);
        assert_eq!(of(640, 0, false), Standing::Held);
        assert_eq!(of(640, 10, false), Standing::Held);
        // The rest is little, and lasts as long as nobody takes it.
        assert_eq!(of(640, 11, false), Standing::Near);
        assert_eq!(of(640, 40, true), Standing::Held);
        assert_eq!(of(640, 41, true), Standing::Near);
        assert_eq!(of(900, 300, true), Standing::Held);
    }

    #[test]
    fn what_can_be_swapped_holds_nobody_but_is_near() {
        let of = |swappable| standing(&mut Given { swappable: swappable * MIB, ..group(650, 0) });
        assert_eq!([of(0), of(20), of(21), of(4000)], [Standing::Held, Standing::Held, Standing::Near, Standing::Near]);
        let mut near = group(600, 0);
        assert_eq!(standing(&mut near), Standing::Near);
        assert_eq!(near.asked, ["cache"]);
    }

    #[test]
    fn version_1_tells_itself_who_sleeps() {
        let of = |sleeping, cache| standing(&mut Given { sleeping: Some(sleeping), ..group(640, cache) });
        assert_eq!([of(true, 640), of(false, 0), of(false, 600)], [Standing::Held, Standing::Near, Standing::Quiet]);
    }

    #[test]
    fn tiny_limits_and_a_line_that_has_moved() {
        let of = |line, usage, cache| {
            standing(&mut Given { line: Some(line), usage: Some(usage), cache, ..Given::default() })
        };
        assert_eq!(of(0, 0, 0), Standing::Held);
        assert_eq!(of(4096, 4096, 0), Standing::Held);
        assert_eq!(of(4096, 4096, 4096), Standing::Quiet);
        // Numbers that were not read at the same time.
        assert_eq!(of(4096, 4096, 1 << 30), Standing::Quiet);
        assert_eq!(of(64 * MIB, 100 * MIB, 0), Standing::Held);
        assert_eq!(of(200 * MIB, 100 * MIB, 0), Standing::Quiet);
        assert_eq!(of(u64::MAX, u64::MAX - 1, 0), Standing::Near);
    }

    #[test]
    fn high_stays_between_half_of_max_and_max() {
        assert_eq!(high_below(64 << 20), 56 << 20);
        assert_eq!(high_below(16 << 20), 12 << 20);
        assert_eq!(high_below(6 << 20), 3 << 20);
        assert_eq!(high_below(1 << 20), 512 << 10);
        assert_eq!(high_below(0), 0);
        assert!(high_below(u64::MAX) < u64::MAX);
    }

    #[test]
    fn high_comes_down_in_steps_and_goes_up_at_once() {
        const GIB: u64 = 1 << 30;
        const LIMIT: u64 = 4 * GIB;
        let next_high = |high, usage, max| Steps::default().next_high(high, usage, max);
        let mut steps = Vec::new();
        let mut high = u64::MAX;
        while steps.last() != Some(&high) {
            steps.push(high);
            // As much cache as may be.
            high = next_high(high, high.min(LIMIT), LIMIT);
        }
        let expected: Vec<u64> = (1..=16).map(|step| LIMIT - step * 32 * MIB).collect();
        assert_eq!(steps[1..], expected);
        // There is nothing to reclaim on the way.
        assert_eq!(next_high(u64::MAX, GIB, 64 * GIB), 56 * GIB);
        assert_eq!(next_high(u64::MAX, 20 << 20, 20 << 20), high_below(20 << 20));
        // The limit was raised, or lowered.
        assert_eq!(next_high(56 * GIB, 56 * GIB, 128 * GIB), 112 * GIB);
        assert_eq!(next_high(56 * GIB, 8 * GIB, 8 * GIB), 8 * GIB - 32 * MIB);
        assert_eq!(next_high(1024 * GIB, 1024 * GIB, 1024 * GIB), 1024 * GIB - 32 * MIB);
        assert_eq!(next_high(5000, 0, 4096), 0);
    }

    #[test]
    fn steps_are_as_long_as_the_kernel_does_in_milliseconds() {
        const LIMIT: u64 = 4 << 30;
        // So many bytes a second, however they are got.
        for rate in [1_u64 << 20, 20 << 20, 500 << 20, 20 << 30] {
            let mut steps = Steps::default();
            let times: Vec<Duration> = std::iter::repeat_with(|| {
                let high = LIMIT - STEP_MOST;
                let time = Duration::from_secs_f64((high - steps.next_high(high, LIMIT, LIMIT)) as f64 / rate as f64);
                steps.took(time);
                time
            })
            .take(40)
            .collect();
            let slow = times.iter().skip(8).filter(|time| **time > Duration::from_millis(60)).count();
            assert!(slow == 0 || rate == 1 << 20, "{rate}: {times:?}");
        }
        let mut steps = Steps::default();
        (0..9).for_each(|_| steps.took(Duration::from_secs(1)));
        let high = LIMIT - STEP_MOST;
        assert_eq!(high - steps.next_high(high, LIMIT, LIMIT), STEP_SHORT);
        // But for the first one.
        assert_eq!(LIMIT - steps.next_high(u64::MAX, LIMIT, LIMIT), STEP_LEAST);
        (0..9).for_each(|_| steps.took(Duration::ZERO));
        assert_eq!(high - steps.next_high(high, LIMIT, LIMIT), STEP_MOST);
    }
}
