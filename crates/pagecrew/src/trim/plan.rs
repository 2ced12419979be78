//! Which process is worth the next look: pure arithmetic.
//!
//! CPU is what is scarce, so what counts is the memory that comes back for it: the share of under-used pages among those that were looked
//! at lately, what each gave back, and what looking and splitting cost. A process that is not known yet is taken to be a bit better than
//! most, so that it is tried before those that are known to give nothing; and nobody's experience lasts for ever.

use std::time::Duration;

/// What a process that nobody has looked at is expected to be like: one page in four gives back a MiB.
const LOOKS: f64 = 4.0;
const HITS: f64 = 1.0;
const BYTES_OF_HIT: f64 = 1048576.0;
/// A look and a split as they cost on ordinary machines, in nanoseconds.
const LOOK_NS: f64 = 25_000.0;
const SPLIT_NS: f64 = 600_000.0;
/// Once this many looks are known, all of them count half.
const LOOKS_MOST: f64 = 1024.0;

/// What came of looking at a process's huge pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experience {
    looks: f64,
    hits: f64,
    bytes: f64,
    look_ns: f64,
    split_ns: f64,
}

impl Default for Experience {
    fn default() -> Experience {
        Experience {
            looks: LOOKS,
            hits: HITS,
            bytes: HITS * BYTES_OF_HIT,
            look_ns: LOOKS * LOOK_NS,
            split_ns: HITS * SPLIT_NS,
        }
    }
}

/// What a few looks have found and cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Found {
    /// Pages that were looked at.
    pub looks: u64,
    /// Those that were under-used.
    pub hits: u64,
    /// What went back.
    pub bytes: u64,
    /// CPU time of the looks.
    pub look_ns: u64,
    /// CPU time of the splits.
    pub split_ns: u64,
}

impl Experience {
    /// Adds what was found.
    pub fn learn(&mut self, found: Found) {
        self.looks += found.looks as f64;
        self.hits += found.hits as f64;
        self.bytes += found.bytes as f64;
        self.look_ns += found.look_ns as f64;
        self.split_ns += found.split_ns as f64;
        if self.looks > LOOKS_MOST {
            for sum in [&mut self.looks, &mut self.hits, &mut self.bytes, &mut self.look_ns, &mut self.split_ns] {
                *sum /= 2.0;
            }
        }
    }

    /// Bytes that a nanosecond of CPU is expected to bring back.
    pub fn benefit(&self) -> f64 {
        self.bytes / (self.look_ns + self.split_ns).max(1.0)
    }
}

/// The process with the most benefit, of those that have something to look at.
pub fn best<'e, I>(candidates: impl Iterator<Item = (I, &'e Experience)>) -> Option<I> {
    candidates.max_by(|a, b| a.1.benefit().total_cmp(&b.1.benefit())).map(|(index, _)| index)
}

/// Searching for huge pages may take this share of all CPU time as long as there are pages to look at.
const SCANS: f64 = 0.25;

/// Whether the next thing to do is to search a process whose turn it is, rather than to look at a page.
pub fn scan_first(scan_ns: u64, all_ns: u64) -> bool {
    scan_ns as f64 <= SCANS * all_ns as f64
}

/// A process in which nothing is due is searched again after this many intervals at the latest.
const PAUSE_MOST: u32 = 32;

/// After which time a process is searched again: at each interval if there was something to look at, else after twice the pause.
pub fn pause(found: bool, last: Duration, interval: Duration) -> Duration {
    if found { interval } else { (2 * last).clamp(interval, PAUSE_MOST * interval) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(looks: u64, hits: u64) -> Experience {
        let mut experience = Experience::default();
        for _ in 0..looks / 64 {
            let hits = hits * 64 / looks;
            let found =
                Found { looks: 64, hits, bytes: hits * 1_900_000, look_ns: 64 * 20_000, split_ns: hits * 500_000 };
            experience.learn(found);
        }
        experience
    }

    #[test]
    fn what_gives_much_comes_first_then_the_unknown_then_what_gives_nothing() {
        let (sparse, unknown, dense) = (after(640, 600), Experience::default(), after(640, 0));
        assert!(sparse.benefit() > unknown.benefit() && unknown.benefit() > dense.benefit());
        let all = [&dense, &sparse, &unknown];
        assert_eq!(best(all.into_iter().enumerate()), Some(1));
        assert_eq!(best(std::iter::empty::<(usize, &Experience)>()), None);
    }

    #[test]
    fn a_process_that_changes_its_ways_is_noticed() {
        let mut process = after(64_000, 0);
        let dense = process.benefit();
        let mut looks = 0;
        while process.benefit() < Experience::default().benefit() {
            process.learn(Found { looks: 1, hits: 1, bytes: 1_900_000, look_ns: 70_000, split_ns: 500_000 });
            looks += 1;
        }
        assert!(dense < 1.0 && looks < 200, "{dense} {looks}");
    }

    #[test]
    fn searches_become_rare_where_nothing_is_found() {
        let interval = Duration::from_secs(10);
        let mut pauses = vec![interval];
        for _ in 0..7 {
            pauses.push(pause(false, *pauses.last().unwrap(), interval));
        }
        assert_eq!(pauses.iter().map(Duration::as_secs).collect::<Vec<_>>(), [10, 20, 40, 80, 160, 320, 320, 320]);
        assert_eq!(pause(true, pauses[7], interval), interval);
        assert!(scan_first(0, 0) && scan_first(24, 100) && !scan_first(26, 100));
    }
}
