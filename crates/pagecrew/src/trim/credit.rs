//! What may be read of huge pages that turn out to be used: pure arithmetic.

use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};

/// How much may be read of a huge page that then turns out to be used, on average over all of a process's.
pub const READ_OF_USED: usize = 16 * PAGE_SIZE;

/// Whether one more look at a huge page may read more than [`READ_OF_USED`]. Pages that are dense are recognised by much less; what they
/// leave is what a closer look at another may cost if that is used, too. Each process begins with one such look.
#[derive(Debug, Clone)]
pub struct Credit(isize);

impl Credit {
    /// As much as one huge page is long.
    pub fn new() -> Credit {
        Credit(HUGE_PAGE_SIZE as isize)
    }

    /// Whether all of a huge page may be read.
    pub fn suffices(&self) -> bool {
        self.0 >= HUGE_PAGE_SIZE as isize
    }

    /// A huge page that is used has cost `read` bytes.
    pub fn used(&mut self, read: usize) {
        // What was saved is bounded, so that a program that changes its ways is not read closely for long.
        self.0 = (self.0 + READ_OF_USED as isize - read as isize).min(64 * HUGE_PAGE_SIZE as isize);
    }
}

impl Default for Credit {
    fn default() -> Credit {
        Credit::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_read_of_used_pages_stays_within_the_average(dense: Vec<bool>) {
            let (mut credit, mut read) = (Credit::new(), 0);
            for &dense in &dense {
                // The worst there can be: closely read to its end, and used.
                let cost = if dense { 2048 } else if credit.suffices() { HUGE_PAGE_SIZE } else { READ_OF_USED };
                credit.used(cost);
                read += cost;
            }
            prop_assert!(read <= dense.len() * READ_OF_USED + HUGE_PAGE_SIZE);
        }
    }
}
