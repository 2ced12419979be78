//! What trimming has found and done.

use crate::stats::{Kind, Metric, Part, Sample, Unit, figures};

figures! {
    /// Counts for one process, or the sums for several. Times are in nanoseconds.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Tally: Trim, "pagecrew_trim_", [], "totals." {
        huge_pages: u64, Gauge Count, "Huge pages of anonymous memory at the last scan.";
        looked_at name "huge_pages_looked_at": u64, Counter Count, "Huge pages that were looked at.";
        used name "huge_pages_used": u64, Counter Count, "Huge pages that turned out to be used.";
        under_used name "huge_pages_under_used": u64, Counter Count, "Huge pages that turned out to be under-used.";
        split name "huge_pages_split": u64, Counter Count, "Huge pages that were split.";
        could_go_bytes: u64, Counter Bytes, "The zero part of the under-used huge pages, as far as the samples tell.";
        gone_bytes: u64, Counter Bytes, "What the kernel has put the shared zero page in the place of, as its page map says after each split.";
        read_bytes: u64, Counter Bytes, "Memory of the processes that was read.";
        read_of_used_bytes: u64, Counter Bytes, "The part of it that was read of huge pages which turned out to be used.";
        cpu_ns key "cpu_seconds": u64, Counter Seconds, "CPU time of the thread that trims, the kernel's part included.";
        split_ns key "split_seconds": u64, Counter Seconds, "The part of it that the kernel took to split.";
    }
    with {
        /// Huge pages that were left as they are, by reason.
        pub left: Left,
    }
}

figures! {
    /// A command that trims, and the processes that it is for. Times are in nanoseconds.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Overview: Trim, "pagecrew_trim_", [], "" {
        elapsed_ns key "elapsed_seconds": u64, Gauge Seconds, "Time since the command began.";
        members: u64, Gauge Count, "Processes that are trimmed.";
        refused: u64, Gauge Count, "Processes that are left alone, or that can't be trimmed.";
        due key "huge_pages_due": u64, Gauge Count, "Huge pages that wait for a look.";
        budget_cpu_ns key "budget_cpu_seconds": u64, Counter Seconds, "CPU time charged to the budget: all that the service uses, to find processes, to search them, to look, to split and to hold groups.";
    }
}

/// The share of one CPU that may be used.
pub const BUDGET: &Metric = &Metric {
    part: Part::Trim,
    kind: Kind::Gauge,
    unit: Unit::Ratio,
    name: Some("pagecrew_trim_budget_cpu_ratio"),
    labels: &[],
    json: Some("budget_cpu_ratio"),
    help: "The share of one CPU that may be used; absent without a limit.",
};

/// Huge pages that were left as they are, by reason. The first five are those of the last scan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Left {
    /// Somebody has excluded them.
    pub excluded: u64,
    /// They belong to a file or to shared memory.
    pub file: u64,
    /// Another process has their contents registered for itself (userfaultfd), or they are reserved huge pages.
    pub special: u64,
    /// They were looked at before and rest.
    pub resting: u64,
    /// They can't be read.
    pub unreadable: u64,
    /// The memory is locked.
    pub locked: u64,
    /// They are shared with a forked process.
    pub shared: u64,
    /// Something holds on to them (direct I/O, a device), or the kernel was at them itself.
    pub busy: u64,
    /// They were not there any more when it was their turn.
    pub vanished: u64,
}

/// So many reasons are those of the last scan.
const OF_SCAN: usize = 5;

impl Tally {
    /// What stays of a process that is gone: what was done, and nothing of what is.
    pub fn of_former(&self) -> Tally {
        let left = Left { excluded: 0, file: 0, special: 0, resting: 0, unreadable: 0, ..self.left };
        Tally { huge_pages: 0, left, ..*self }
    }
}

impl Left {
    /// Those of the last scan.
    pub const AT_SCAN: &'static Metric = &Metric {
        part: Part::Trim,
        kind: Kind::Gauge,
        unit: Unit::Count,
        name: Some("pagecrew_trim_huge_pages_excepted"),
        labels: &["reason"],
        json: Some("totals.left.REASON"),
        help: "Huge pages that the last scan left out: excluded, file, special, resting or unreadable.",
    };

    /// The others.
    pub const AT_LOOK: &'static Metric = &Metric {
        part: Part::Trim,
        kind: Kind::Counter,
        unit: Unit::Count,
        name: Some("pagecrew_trim_huge_pages_left"),
        labels: &["reason"],
        json: Some("totals.left.REASON"),
        help: "Huge pages that were left as they are when it was their turn: locked, shared, busy or vanished.",
    };

    /// The metric of the reason with this place in [`Left::NAMES`].
    fn metric(index: usize) -> &'static Metric {
        if index < OF_SCAN { Left::AT_SCAN } else { Left::AT_LOOK }
    }

    /// A sample for each reason.
    pub fn samples(&self) -> impl Iterator<Item = Sample> + use<> {
        Left::NAMES.iter().zip(self.counts()).enumerate().map(|(index, (name, count))| {
            let metric = Left::metric(index);
            Sample { metric, labels: vec![(*name).to_owned()], number: metric.number(count) }
        })
    }

    /// The reasons, as they are called in output.
    pub const NAMES: [&str; 9] =
        ["excluded", "file", "special", "resting", "unreadable", "locked", "shared", "busy", "vanished"];

    /// The counts in the order of [`Left::NAMES`].
    pub fn counts(&self) -> [u64; 9] {
        let Left { excluded, file, special, resting, unreadable, locked, shared, busy, vanished } = *self;
        [excluded, file, special, resting, unreadable, locked, shared, busy, vanished]
    }

    fn each(&mut self) -> [&mut u64; 9] {
        let Left { excluded, file, special, resting, unreadable, locked, shared, busy, vanished } = self;
        [excluded, file, special, resting, unreadable, locked, shared, busy, vanished]
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.huge_pages += other.huge_pages;
        self.looked_at += other.looked_at;
        self.used += other.used;
        self.under_used += other.under_used;
        self.split += other.split;
        self.could_go_bytes += other.could_go_bytes;
        self.gone_bytes += other.gone_bytes;
        self.read_bytes += other.read_bytes;
        self.read_of_used_bytes += other.read_of_used_bytes;
        self.cpu_ns += other.cpu_ns;
        self.split_ns += other.split_ns;
        for (sum, count) in self.left.each().into_iter().zip(other.left.counts()) {
            *sum += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_have_every_field() {
        let mut one = Tally {
            huge_pages: 1,
            looked_at: 2,
            used: 3,
            under_used: 4,
            split: 5,
            could_go_bytes: 6,
            gone_bytes: 7,
            read_bytes: 8,
            read_of_used_bytes: 9,
            cpu_ns: 10,
            split_ns: 11,
            left: Left::default(),
        };
        one.left.each().into_iter().zip(12..).for_each(|(place, value)| *place = value);
        assert_eq!(one.left.counts(), std::array::from_fn(|index| 12 + index as u64));
        let mut sum = one;
        sum += one;
        let text = |tally: &Tally| format!("{tally:?}");
        let doubled: String = text(&one)
            .split_inclusive(|c: char| !c.is_ascii_digit())
            .map(|part| {
                let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
                match digits.parse::<u64>() {
                    Ok(number) => format!("{}{}", 2 * number, &part[digits.len()..]),
                    Err(_) => part.to_owned(),
                }
            })
            .collect();
        assert_eq!(text(&sum), doubled);
        let gauges = one.left.samples().filter(|sample| sample.metric.kind == Kind::Gauge);
        assert_eq!(gauges.map(|sample| sample.labels.concat()).collect::<Vec<_>>(), Left::NAMES[..5]);
        let former = one.of_former();
        assert_eq!((former.huge_pages, former.gone_bytes), (0, one.gone_bytes));
        assert_eq!(former.left.counts()[..6], [0, 0, 0, 0, 0, one.left.locked]);
    }
}
