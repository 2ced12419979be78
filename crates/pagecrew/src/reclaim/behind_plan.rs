//! What a program has behind it that uses a file from one end to the other: pure, positions come in as numbers.

use std::ops::Range;

/// So much has to be used in a row before anything is dropped: programs read the beginnings of many files.
const RUN: u64 = 32 << 20;
/// So much right behind the position stays.
const KEPT: u64 = 2 << 20;
/// What is dropped begins and ends at multiples of this.
const PART: u64 = 1 << 20;

/// A file in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    position: u64,
    /// Where it began to be used in a row.
    since: u64,
    /// What is before this was dropped, or is not known to be of no use.
    dropped: u64,
    /// Where the last part that was dropped began: what had yet to be written then can go once it is.
    again: u64,
}

/// What is to be dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drop {
    /// All of it; the last part once more.
    pub range: Range<u64>,
    /// Bytes that were not dropped before.
    pub new: u64,
}

impl Reading {
    /// One that is at `position` when it is first seen.
    pub fn new(position: u64) -> Reading {
        let dropped = position.next_multiple_of(PART);
        Reading { position, since: position, dropped, again: dropped }
    }

    /// It is at `position` now, and its program has read and written `used` bytes in all since the last look. Returns what may be dropped.
    pub fn note(&mut self, position: u64, used: u64) -> Option<Drop> {
        let moved = position.checked_sub(self.position);
        // Whoever goes back, or further than he has read, jumps.
        if moved.is_none_or(|moved| moved > used) {
            *self = Reading::new(position);
            return None;
        }
        self.position = position;
        let end = position.saturating_sub(KEPT) / PART * PART;
        if position - self.since < RUN || end <= self.dropped {
            return None;
        }
        let dropped = std::mem::replace(&mut self.dropped, end);
        Some(Drop { range: std::mem::replace(&mut self.again, dropped)..end, new: end - dropped })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_was_read_in_a_row_is_dropped_but_for_the_end() {
        let mut reading = Reading::new(MIB / 2);
        assert_eq!(reading.note(20 * MIB, 20 * MIB), None);
        assert_eq!(reading.note(40 * MIB, 20 * MIB), Some(Drop { range: MIB..38 * MIB, new: 37 * MIB }));
        assert_eq!(reading.note(40 * MIB, 0), None);
        // And the last part once more, and no more than once.
        assert_eq!(reading.note(45 * MIB + 5, 6 * MIB), Some(Drop { range: MIB..43 * MIB, new: 5 * MIB }));
        assert_eq!(reading.note(50 * MIB, 6 * MIB), Some(Drop { range: 38 * MIB..48 * MIB, new: 5 * MIB }));
    }

    #[test]
    fn whoever_jumps_begins_anew() {
        for (position, used) in [(10 * MIB, 0), (400 * MIB, 20 * MIB)] {
            let mut reading = Reading::new(0);
            assert_eq!(reading.note(40 * MIB, 40 * MIB), Some(Drop { range: 0..38 * MIB, new: 38 * MIB }));
            assert_eq!(reading.note(position, used), None);
            assert_eq!(reading, Reading::new(position));
        }
    }

    proptest! {
        #[test]
        fn nothing_is_dropped_twice_or_ahead(steps in proptest::collection::vec((0u64..200 * MIB, 0u64..200 * MIB), 1..100)) {
            let mut reading = Reading::new(0);
            let mut last: Option<Range<u64>> = None;
            for (position, used) in steps {
                let anew = position < reading.position || position - reading.position > used;
                if let Some(Drop { range, new }) = reading.note(position, used) {
                    let new = range.end - new..range.end;
                    prop_assert!(!anew && new.start < new.end && range.start <= new.start && range.end + KEPT <= position);
                    prop_assert!(last.as_ref().is_none_or(|last| last.end == new.start && range.start == last.start));
                    last = Some(new);
                }
                if anew {
                    last = None;
                }
            }
        }
    }
}
