//! Policy: whether a program gave most of its memory back and lets it be. In what is left of its huge pages there is little else than what
//! nobody uses, and the kernel would make more of them by and by: khugepaged fills up whatever has one page in use.

/// A program that has had no more than this part of its peak for [`REST_NS`] is at rest.
const REST_SHARE: usize = 4;
const REST_NS: u64 = 5_000_000_000;

/// Since when a program has had little of what it once had.
#[derive(Debug, Default)]
pub struct Rest {
    since_ns: Option<u64>,
}

impl Rest {
    /// Whether it is at rest at time `now`, in nanoseconds, with `resident` bytes of the `peak` that it once had. To be asked about once a second.
    pub fn is_at_rest(&mut self, resident: usize, peak: usize, now: u64) -> bool {
        if resident > peak / REST_SHARE {
            self.since_ns = None;
            return false;
        }
        now - *self.since_ns.get_or_insert(now) >= REST_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_at_rest_that_has_little_of_its_peak_for_seconds() {
        const S: u64 = 1_000_000_000;
        let mut rest = Rest::default();
        assert!(!rest.is_at_rest(900, 1000, S));
        assert!(!rest.is_at_rest(250, 1000, 2 * S) && !rest.is_at_rest(100, 1000, 6 * S));
        // It used more in between.
        assert!(!rest.is_at_rest(251, 1000, 7 * S) && !rest.is_at_rest(100, 1000, 8 * S));
        assert!(!rest.is_at_rest(100, 1000, 13 * S - 1) && rest.is_at_rest(250, 1000, 13 * S));
        assert!(rest.is_at_rest(10, 1000, 1000 * S) && !rest.is_at_rest(400, 1000, 1001 * S));
    }
}
