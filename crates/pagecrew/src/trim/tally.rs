//! What trimming has found and done.

/// Counts for one process, or the sums for several. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Huge pages of anonymous memory at the last scan.
    pub huge_pages: u64,
    /// Huge pages that were looked at.
    pub looked_at: u64,
    /// Those that turned out to be used.
    pub used: u64,
    /// Those that turned out to be under-used.
    pub under_used: u64,
    /// Those that were split.
    pub split: u64,
    /// The zero part of the under-used ones, as far as the samples tell, in bytes.
    pub could_go_bytes: u64,
    /// What the kernel has put the shared zero page in the place of, as its page map says after each split, in bytes.
    pub gone_bytes: u64,
    /// Memory of the process that was read.
    pub read_bytes: u64,
    /// The part of it that was read of pages which turned out to be used.
    pub read_of_used_bytes: u64,
    /// CPU time of the thread that trims, the kernel's part included.
    pub cpu_ns: u64,
    /// The part of it that the kernel took to split.
    pub split_ns: u64,
    /// Huge pages that were left as they are, by reason.
    pub left: Left,
}

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

impl Tally {
    /// What stays of a process that is gone: what was done, and nothing of what is.
    pub(super) fn of_former(&self) -> Tally {
        let left = Left { excluded: 0, file: 0, special: 0, resting: 0, unreadable: 0, ..self.left };
        Tally { huge_pages: 0, left, ..*self }
    }
}

impl Left {
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
        let former = one.of_former();
        assert_eq!((former.huge_pages, former.gone_bytes), (0, one.gone_bytes));
        assert_eq!(former.left.counts()[..6], [0, 0, 0, 0, 0, one.left.locked]);
    }
}
