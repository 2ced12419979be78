//! When filling pauses: pure arithmetic.
//!
//! Pause filling briefly after a take: even idle-class work contends for bandwidth and kernel locks with a VM that starts. On a machine with
//! two CPUs QEMU's start takes 60 ms beside the filler, and 37 ms without. Requests that never end must not keep filling from its half of
//! the time.

use std::time::Duration;

/// So long filling rests after something was taken, and so long it then may go on, whatever is taken.
const REST: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rest {
    until_ns: u64,
}

impl Rest {
    /// How long filling has to rest at the time `now_ns`, if something was taken the last time at `taken_ns`; 0 for never.
    pub fn wait(&mut self, taken_ns: u64, now_ns: u64) -> Duration {
        let rest = REST.as_nanos() as u64;
        if taken_ns >= self.until_ns + rest {
            self.until_ns = taken_ns + rest;
        }
        Duration::from_nanos(self.until_ns.saturating_sub(now_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn filling_rests_after_something_was_taken_and_not_otherwise() {
        let mut rest = Rest::default();
        assert_eq!(rest.wait(0, 1000 * MS), Duration::ZERO);
        assert_eq!(rest.wait(1000 * MS, 1000 * MS), REST);
        assert_eq!(rest.wait(1000 * MS, 1240 * MS), Duration::from_millis(10));
        assert_eq!(rest.wait(1000 * MS, 1250 * MS), Duration::ZERO);
        // It was told late, and no longer matters.
        assert_eq!(rest.wait(2000 * MS, 2300 * MS), Duration::ZERO);
        // The next one, as soon as it has had time to fill.
        assert_eq!(rest.wait(2400 * MS, 2400 * MS), Duration::ZERO);
        assert_eq!(rest.wait(2500 * MS, 2510 * MS), REST - Duration::from_millis(10));
    }

    proptest! {
        /// However often something is taken, filling has half of the time; however rarely, each start its rest.
        #[test]
        fn filling_has_half_of_the_time(every_ms in 1u64..2000) {
            let (mut rest, mut taken_ns, mut rested) = (Rest::default(), 0, 0);
            let ticks = 100_000;
            for tick in 1000..1000 + ticks {
                if tick % every_ms == 0 {
                    taken_ns = tick * MS;
                }
                rested += u64::from(!rest.wait(taken_ns, tick * MS).is_zero());
            }
            prop_assert!(rested <= ticks / 2 + 250, "{} of {}", rested, ticks);
            if every_ms >= 500 {
                prop_assert!(rested + 250 >= ticks / every_ms * 250, "{} of {}", rested, ticks);
            }
        }
    }
}
