//! Whose turn it is among control groups whose processes are searched past the budget: those first for which tasks wait. Pure.

use std::collections::VecDeque;

/// A search that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rush {
    /// By this, whoever asked knows it.
    pub ticket: u64,
    /// The control group's name.
    pub group: String,
    /// Tasks are held until it brings something.
    pub urgent: bool,
}

/// One that begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begin {
    /// Which one.
    pub rush: Rush,
    /// The ticket of the one that gives way to it, and begins again later.
    pub in_place_of: Option<u64>,
}

/// All that were asked for. One goes on at a time, until it is over, or until tasks wait for another one and none for it.
#[derive(Debug, Default)]
pub struct Rushes {
    current: Option<Rush>,
    /// The urgent ones before all others, and each kind in the order in which they came.
    waiting: VecDeque<Rush>,
}

impl Rushes {
    /// One more, which waits for its turn.
    pub fn ask(&mut self, rush: Rush) {
        let place = self.waiting.iter().position(|other| rush.urgent && !other.urgent).unwrap_or(self.waiting.len());
        self.waiting.insert(place, rush);
    }

    /// Tasks wait for the one with that ticket now. Returns whether it goes on already.
    pub fn hurry(&mut self, ticket: u64) -> bool {
        if let Some(rush) = self.current.as_mut().filter(|rush| rush.ticket == ticket) {
            rush.urgent = true;
            return true;
        }
        if let Some(rush) =
            self.waiting.iter().position(|rush| rush.ticket == ticket).and_then(|at| self.waiting.remove(at))
        {
            self.ask(Rush { urgent: true, ..rush });
        }
        false
    }

    /// The one with that ticket is of no more interest. Returns whether it goes on, and is to be ended.
    pub fn calm_down(&mut self, ticket: u64) -> bool {
        self.waiting.retain(|rush| rush.ticket != ticket);
        self.current.take_if(|rush| rush.ticket == ticket).is_some()
    }

    /// The one that begins now, if it is another one's turn.
    pub fn turn(&mut self) -> Option<Begin> {
        let awaited = self.waiting.front().is_some_and(|rush| rush.urgent);
        let ousted = self.current.take_if(|rush| awaited && !rush.urgent);
        let in_place_of = ousted.as_ref().map(|rush| rush.ticket);
        if let Some(rush) = ousted {
            self.ask(rush);
        }
        if self.current.is_some() {
            return None;
        }
        self.current = self.waiting.pop_front();
        self.current.clone().map(|rush| Begin { rush, in_place_of })
    }

    /// The one that goes on has come to its end. Returns its ticket, if there is one.
    pub fn over(&mut self) -> Option<u64> {
        self.current.take().map(|rush| rush.ticket)
    }

    /// Whether there is none, neither one that goes on nor one that waits.
    pub fn is_empty(&self) -> bool {
        self.current.is_none() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn rush(ticket: u64, urgent: bool) -> Rush {
        Rush { ticket, group: format!("g{ticket}"), urgent }
    }

    fn next(rushes: &mut Rushes) -> Option<(u64, Option<u64>)> {
        rushes.turn().map(|begin| (begin.rush.ticket, begin.in_place_of))
    }

    #[test]
    fn those_that_tasks_wait_for_come_first() {
        let mut rushes = Rushes::default();
        for (ticket, urgent) in [(1, false), (2, true), (3, false), (4, true)] {
            rushes.ask(rush(ticket, urgent));
        }
        for ticket in [2, 4, 1, 3] {
            assert_eq!(next(&mut rushes), Some((ticket, None)));
            assert_eq!(next(&mut rushes), None);
            assert_eq!(rushes.over(), Some(ticket));
        }
        assert!(rushes.is_empty() && rushes.turn().is_none() && rushes.over().is_none());
    }

    #[test]
    fn one_that_nobody_waits_for_gives_way_and_begins_again() {
        let mut rushes = Rushes::default();
        rushes.ask(rush(1, false));
        assert_eq!(next(&mut rushes), Some((1, None)));
        rushes.ask(rush(2, true));
        assert_eq!(next(&mut rushes), Some((2, Some(1))));
        // Nor does one urgent one give way to another.
        rushes.ask(rush(3, true));
        assert_eq!((next(&mut rushes), rushes.over()), (None, Some(2)));
        assert_eq!((next(&mut rushes), rushes.over()), (Some((3, None)), Some(3)));
        assert_eq!(next(&mut rushes), Some((1, None)));
    }

    #[test]
    fn tasks_may_begin_to_wait_later() {
        let mut rushes = Rushes::default();
        for ticket in 1..=3 {
            rushes.ask(rush(ticket, false));
        }
        assert_eq!(next(&mut rushes), Some((1, None)));
        assert!(rushes.hurry(1) && !rushes.hurry(3) && !rushes.hurry(7));
        // Both are urgent now.
        assert_eq!((next(&mut rushes), rushes.over()), (None, Some(1)));
        assert_eq!(next(&mut rushes), Some((3, None)));
        assert!(!rushes.calm_down(2) && rushes.calm_down(3) && !rushes.calm_down(3));
        assert!(rushes.is_empty());
    }

    proptest! {
        /// Whatever is asked for, each is begun and comes to its end, or was called off; and no task waits for one behind one for which none does.
        #[test]
        fn none_is_lost_and_no_task_waits_behind_nobody(steps in prop::collection::vec((0_u8..5, 0_u64..6, any::<bool>()), 1..200)) {
            let (mut rushes, mut open, mut current) = (Rushes::default(), BTreeMap::new(), None);
            let mut ticket = 0;
            for (step, which, urgent) in steps {
                let chosen = ticket - which.min(ticket);
                match step {
                    0 | 1 => {
                        ticket += 1;
                        rushes.ask(rush(ticket, urgent));
                        open.insert(ticket, urgent);
                    }
                    2 => {
                        prop_assert_eq!(rushes.hurry(chosen), current == Some(chosen));
                        open.entry(chosen).and_modify(|urgent| *urgent = true);
                    }
                    3 => {
                        prop_assert_eq!(rushes.calm_down(chosen), current == Some(chosen));
                        open.remove(&chosen);
                        current.take_if(|ticket| *ticket == chosen);
                    }
                    _ => {
                        prop_assert_eq!(rushes.over(), current);
                        open.remove(&current.take().unwrap_or(0));
                    }
                }
                if let Some(begin) = rushes.turn() {
                    prop_assert!(open.contains_key(&begin.rush.ticket));
                    prop_assert_eq!(begin.in_place_of, current);
                    current = Some(begin.rush.ticket);
                }
                prop_assert_eq!((current.is_none(), rushes.is_empty()), (open.is_empty(), open.is_empty()));
                let awaited = current.is_some_and(|ticket| open[&ticket]);
                prop_assert!(awaited || open.values().all(|urgent| !urgent));
            }
        }
    }
}
