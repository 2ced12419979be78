//! Which group's turn it is: pure, the time comes in as a number.
//!
//! A group is *due* at a time, when what is free of it is about to be used up. The one that is due first is first, so that no group waits for
//! another one that has more time. While somebody is at a group nobody else gets it.

use std::collections::{BTreeMap, BTreeSet};

/// The turns of groups, which have numbers.
#[derive(Debug, Default)]
pub struct Turns {
    due: BTreeSet<(u64, u64)>,
    of: BTreeMap<u64, Turn>,
}

/// A group's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    At(u64),
    /// Somebody is at it; when it is due again, if that is known already.
    Taken(Option<u64>),
}

impl Turns {
    /// The group `group` is due at `at_ns`, or when it was due anyway if that is sooner. Where somebody is at it, when that is over.
    pub fn at(&mut self, group: u64, at_ns: u64) {
        match self.of.get_mut(&group) {
            Some(Turn::Taken(next)) => *next = Some(next.map_or(at_ns, |next| next.min(at_ns))),
            Some(Turn::At(due)) if *due <= at_ns => {}
            Some(Turn::At(due)) => {
                self.due.remove(&(*due, group));
                self.due.insert((at_ns, group));
                *due = at_ns;
            }
            None => {
                self.due.insert((at_ns, group));
                self.of.insert(group, Turn::At(at_ns));
            }
        }
    }

    /// Takes the group that is due first, if one is.
    pub fn take(&mut self, now_ns: u64) -> Option<u64> {
        let &(at, group) = self.due.first()?;
        if at > now_ns {
            return None;
        }
        self.due.pop_first();
        self.of.insert(group, Turn::Taken(None));
        Some(group)
    }

    /// Whoever had `group` is done with it; it is due again at `next_ns`, if at all.
    pub fn done(&mut self, group: u64, next_ns: Option<u64>) {
        let Some(&Turn::Taken(meanwhile)) = self.of.get(&group) else { return };
        self.of.remove(&group);
        if let Some(next) = meanwhile.into_iter().chain(next_ns).min() {
            self.at(group, next);
        }
    }

    /// The group has gone. Whoever has it may go on until it is done.
    pub fn forget(&mut self, group: u64) {
        if let Some(Turn::At(at)) = self.of.remove(&group) {
            self.due.remove(&(at, group));
        }
    }

    /// When the next group is due.
    pub fn next_ns(&self) -> Option<u64> {
        self.due.first().map(|&(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_one_that_is_due_first_is_first() {
        let mut turns = Turns::default();
        for (group, at) in [(1, 30), (2, 10), (3, 20), (2, 40), (1, 5)] {
            turns.at(group, at);
        }
        assert_eq!((turns.next_ns(), turns.take(4)), (Some(5), None));
        assert_eq!(
            [turns.take(20), turns.take(20), turns.take(20), turns.take(100)],
            [Some(1), Some(2), Some(3), None]
        );
        turns.done(1, None);
        turns.done(2, Some(7));
        // Heard of while somebody is at it.
        turns.at(3, 50);
        turns.done(3, Some(60));
        assert_eq!([turns.take(100), turns.take(100), turns.take(100)], [Some(2), Some(3), None]);
    }

    #[test]
    fn a_group_that_has_gone_has_no_turn() {
        let mut turns = Turns::default();
        turns.at(1, 5);
        turns.forget(1);
        turns.forget(1);
        assert_eq!((turns.take(10), turns.next_ns()), (None, None));
        turns.at(1, 5);
        assert_eq!(turns.take(10), Some(1));
        turns.forget(1);
        turns.done(1, Some(3));
        assert_eq!(turns.take(10), None);
    }

    proptest! {
        #[test]
        fn nobody_is_taken_twice_or_lost(steps in proptest::collection::vec((0u64..6, 0u64..50, 0u8..4), 1..300)) {
            let mut turns = Turns::default();
            let mut due: BTreeMap<u64, u64> = BTreeMap::new();
            let mut taken: BTreeMap<u64, Option<u64>> = BTreeMap::new();
            for (group, time, kind) in steps {
                match kind {
                    0 => {
                        turns.at(group, time);
                        match taken.get_mut(&group) {
                            Some(next) => *next = Some(next.map_or(time, |next| next.min(time))),
                            None => {
                                let at = due.entry(group).or_insert(time);
                                *at = time.min(*at);
                            }
                        }
                    }
                    1 => {
                        let expected = due.iter().map(|(&group, &at)| (at, group)).min().filter(|&(at, _)| at <= time);
                        prop_assert_eq!(turns.take(time), expected.map(|(_, group)| group));
                        if let Some((_, group)) = expected {
                            due.remove(&group);
                            taken.insert(group, None);
                        }
                    }
                    2 => {
                        turns.done(group, Some(time));
                        if let Some(next) = taken.remove(&group) {
                            due.insert(group, next.map_or(time, |next| next.min(time)));
                        }
                    }
                    _ => {
                        turns.forget(group);
                        due.remove(&group);
                        taken.remove(&group);
                    }
                }
                prop_assert_eq!(turns.next_ns(), due.values().min().copied());
            }
        }
    }
}
