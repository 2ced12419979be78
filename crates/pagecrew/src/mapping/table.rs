//! The mappings that are known: disjoint ranges in the order of their addresses, in a fixed place.
//!
//! The table is a hint. A program can change its address space by direct system calls and by calls too small to be noted, so
//! whatever is done because of an entry must be harmless where the entry is wrong. A table that is full forgets.

use crate::sys::memory::Range;

/// The most entries.
pub const ENTRIES: usize = 2048;

/// What is known of a private anonymous mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing was advised. Each such mapping is an entry of its own, since it will be advised as a whole, and its neighbour may be
    /// another thread's.
    Plain,
    /// It was made eligible for huge pages here. Neighbours are one entry.
    Eligible,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    start: usize,
    end: usize,
    kind: Kind,
}

const NONE: Entry = Entry { start: 0, end: 0, kind: Kind::Plain };

/// The table. It is large and lives in a static.
pub struct Table {
    /// Sorted and disjoint.
    entries: [Entry; ENTRIES],
    len: usize,
    eligible: usize,
}

impl Table {
    /// An empty table.
    pub const fn new() -> Table {
        Table { entries: [NONE; ENTRIES], len: 0, eligible: 0 }
    }

    /// Bytes that are eligible.
    pub fn eligible_bytes(&self) -> usize {
        self.eligible
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.len, self.eligible) = (0, 0);
    }

    fn entries(&self) -> &[Entry] {
        &self.entries[..self.len]
    }

    /// The first entry that ends behind `address`.
    fn first_behind(&self, address: usize) -> usize {
        self.entries().partition_point(|entry| entry.end <= address)
    }

    /// Calls `each` for every entry that has a part in `range`, whole.
    pub fn touching(&self, range: Range, mut each: impl FnMut(Range, Kind)) {
        let behind = self.entries()[self.first_behind(range.start)..].iter();
        for entry in behind.take_while(|entry| entry.start < range.end()) {
            each(Range { start: entry.start, len: entry.end - entry.start }, entry.kind);
        }
    }

    /// Calls `each` for every entry.
    pub fn all(&self, each: impl FnMut(Range, Kind)) {
        self.touching(Range { start: 0, len: usize::MAX }, each);
    }

    /// Whether all of `range` is known, and if so, whether all of it is eligible.
    pub fn covers(&self, range: Range) -> Option<Kind> {
        let (mut at, mut kind) = (range.start, Kind::Eligible);
        self.touching(range, |entry, its_kind| {
            if entry.start <= at {
                at = entry.end();
                if its_kind == Kind::Plain {
                    kind = Kind::Plain;
                }
            }
        });
        (range.len > 0 && at >= range.end()).then_some(kind)
    }

    /// Takes note that `range` is of `kind`, whatever was known of it. Forgets it where there is no room.
    pub fn insert(&mut self, range: Range, kind: Kind) {
        self.remove(range);
        if range.len == 0 {
            return;
        }
        let at = self.first_behind(range.start);
        let (mut start, mut end) = (range.start, range.end());
        let (mut from, mut to) = (at, at);
        let joins = |entry: &Entry| kind == Kind::Eligible && entry.kind == kind;
        if at > 0 && self.entries[at - 1].end == start && joins(&self.entries[at - 1]) {
            from -= 1;
            start = self.entries[from].start;
        }
        if at < self.len && self.entries[at].start == end && joins(&self.entries[at]) {
            to += 1;
            end = self.entries[at].end;
        }
        if self.replace(from, to, &[Entry { start, end, kind }]) && kind == Kind::Eligible {
            self.eligible += range.len;
        }
    }

    /// Forgets what is known of `range`.
    pub fn remove(&mut self, range: Range) {
        let (first, end) = (self.first_behind(range.start), range.end());
        let last = first + self.entries()[first..].partition_point(|entry| entry.start < end);
        if first == last || range.len == 0 {
            return;
        }
        let (left, right) = (self.entries[first], self.entries[last - 1]);
        for entry in &self.entries[first..last] {
            if entry.kind == Kind::Eligible {
                self.eligible -= entry.end.min(end) - entry.start.max(range.start);
            }
        }
        let left = Entry { end: range.start, ..left };
        let right = Entry { start: end, ..right };
        let rest = [left, right];
        let kept = match (left.start < left.end, right.start < right.end) {
            (true, true) => &rest[..],
            (true, false) => &rest[..1],
            (false, true) => &rest[1..],
            (false, false) => &rest[..0],
        };
        if !self.replace(first, last, kept) {
            // An entry in two pieces without room for the second.
            if right.kind == Kind::Eligible {
                self.eligible -= right.end - right.start;
            }
            self.replace(first, last, &rest[..1]);
        }
    }

    /// Puts `new` in the place of the entries from `from` to `to`. Returns false where there is no room.
    fn replace(&mut self, from: usize, to: usize, new: &[Entry]) -> bool {
        let len = self.len - (to - from) + new.len();
        if len > ENTRIES {
            return false;
        }
        self.entries.copy_within(to..self.len, from + new.len());
        self.entries[from..from + new.len()].copy_from_slice(new);
        self.len = len;
        true
    }
}

impl Default for Table {
    fn default() -> Table {
        Table::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: usize, len: usize) -> Range {
        Range { start, len }
    }

    fn listed(table: &Table) -> Vec<(usize, usize, Kind)> {
        let mut list = Vec::new();
        table.all(|range, kind| list.push((range.start, range.len, kind)));
        list
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(usize, usize, bool),
        Remove(usize, usize),
    }

    const SPACE: usize = 64;

    fn step() -> impl Strategy<Value = Step> {
        let place = (0..SPACE, 0..12usize);
        prop_oneof![
            (place.clone(), any::<bool>()).prop_map(|((start, len), kind)| Step::Insert(start, len, kind)),
            place.prop_map(|(start, len)| Step::Remove(start, len)),
        ]
    }

    proptest! {
        /// The table says of every unit what a table with one entry a unit says.
        #[test]
        fn agrees_with_a_model(steps in prop::collection::vec(step(), 0..200), question in (0..SPACE, 0..12usize)) {
            let mut table = Box::new(Table::new());
            let mut model: [Option<(Kind, usize)>; SPACE + 12] = [None; SPACE + 12];
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(start, len, eligible) => {
                        let kind = if eligible { Kind::Eligible } else { Kind::Plain };
                        table.insert(range(start, len), kind);
                        // Plain ones keep apart.
                        model[start..start + len].fill(Some((kind, if eligible { 0 } else { number + 1 })));
                    }
                    Step::Remove(start, len) => {
                        table.remove(range(start, len));
                        model[start..start + len].fill(None);
                    }
                }
                let mut expected: Vec<(usize, usize, (Kind, usize))> = Vec::new();
                for (at, known) in model.iter().enumerate() {
                    let Some(known) = *known else { continue };
                    match expected.last_mut() {
                        Some((start, len, last)) if *last == known && *start + *len == at => *len += 1,
                        _ => expected.push((at, 1, known)),
                    }
                }
                let expected: Vec<_> = expected.into_iter().map(|(start, len, (kind, _))| (start, len, kind)).collect();
                prop_assert_eq!(listed(&table), expected);
                let eligible = model.iter().filter(|known| **known == Some((Kind::Eligible, 0))).count();
                prop_assert_eq!(table.eligible_bytes(), eligible);
            }
            let (start, len) = question;
            let asked = &model[start..start + len];
            let all = |wanted| len > 0 && asked.iter().all(|known| known.map(|(kind, _)| kind) == Some(wanted));
            let known = len > 0 && asked.iter().all(Option::is_some);
            let expected = if all(Kind::Eligible) { Some(Kind::Eligible) } else { known.then_some(Kind::Plain) };
            prop_assert_eq!(table.covers(range(start, len)), expected);
        }
    }

    #[test]
    fn a_full_table_forgets_and_stays_right() {
        let mut table = Box::new(Table::new());
        for index in 0..ENTRIES + 5 {
            table.insert(range(8 * index, 6), Kind::Eligible);
        }
        assert_eq!((listed(&table).len(), table.eligible_bytes()), (ENTRIES, 6 * ENTRIES));
        assert_eq!(table.covers(range(8 * ENTRIES, 1)), None);
        // In two pieces, of which the second finds no room.
        table.remove(range(81, 1));
        assert_eq!((table.covers(range(80, 1)), table.covers(range(82, 1))), (Some(Kind::Eligible), None));
        assert_eq!((listed(&table).len(), table.eligible_bytes()), (ENTRIES, 6 * ENTRIES - 5));
        table.clear();
        assert_eq!((listed(&table).len(), table.eligible_bytes()), (0, 0));
    }
}
