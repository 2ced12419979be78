//! How many frames a CPU keeps at hand, and how much is zeroed ahead: pure functions.

use std::time::Duration;

/// The fewest frames that a stack takes.
pub const STACK_LEAST: usize = 32;

/// What an empty stack is filled with, and a full one relieved of: half of what it takes. With less, a program that goes up and down
/// by a few frames would come to the zone again and again; with more, the next operation of the other kind would.
pub fn batch(limit: usize) -> usize {
    (limit / 2).max(1)
}

/// The limit of a stack that was empty or full again since anybody looked: as the kernel's does since 6.7, it follows the demand.
pub fn grown(limit: usize, most: usize) -> usize {
    (2 * limit).clamp(STACK_LEAST.min(most), most)
}

/// The limit of a stack that nobody used for a while.
pub fn shrunk(limit: usize) -> usize {
    (limit / 2).max(STACK_LEAST.min(limit))
}

/// How many bytes may be zeroed ahead in the time since the last look at `rate` bytes a second: no more than a moment's worth, so that
/// a long rest is not followed by a burst.
pub fn allowance(rate: usize, since_last: Duration) -> usize {
    const MOMENT: Duration = Duration::from_millis(50);
    (rate as f64 * since_last.min(MOMENT).as_secs_f64()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_follows_the_demand_within_its_bounds() {
        let mut limit = STACK_LEAST;
        for _ in 0..10 {
            limit = grown(limit, 384);
        }
        assert_eq!((limit, batch(limit)), (384, 192));
        for _ in 0..10 {
            limit = shrunk(limit);
        }
        assert_eq!((limit, batch(limit)), (STACK_LEAST, STACK_LEAST / 2));
        // A stack that is bounded to less stays there.
        assert_eq!((grown(8, 8), shrunk(8), batch(1)), (8, 8, 1));
    }

    #[test]
    fn a_rest_is_not_made_up_for() {
        assert_eq!(allowance(1 << 30, Duration::from_millis(10)), (1usize << 30) / 100);
        assert_eq!(allowance(1 << 30, Duration::from_secs(3600)), (1usize << 30) / 20);
        assert_eq!(allowance(0, Duration::from_secs(1)), 0);
    }

    /// A machine of 256 CPUs that each go up and down by their own number of frames: how often they come to the zone.
    #[test]
    fn few_operations_come_to_the_zone() {
        let (mut operations, mut visits) = (0u64, 0u64);
        for cpu in 0..256usize {
            let (mut length, mut limit) = (0usize, STACK_LEAST);
            for round in 0..200usize {
                let swing = 1 + (cpu * 7 + round * 13) % 300;
                for step in 0..2 * swing {
                    operations += 1;
                    if step < swing && length == 0 {
                        (visits, length, limit) = (visits + 1, batch(limit), grown(limit, 384));
                    } else if step >= swing && length >= limit {
                        (visits, length, limit) = (visits + 1, length - batch(limit), grown(limit, 384));
                    }
                    length = if step < swing { length - 1 } else { length + 1 };
                }
            }
        }
        assert!(visits * 200 < operations, "{visits} visits in {operations} operations");
    }
}
