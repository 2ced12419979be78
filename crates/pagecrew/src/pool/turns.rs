//! Whose request is next: each user in turn, whatever the others have asked for. Pure.
//!
//! Of one user, requests are done in the order in which they came. Somebody with a thousand of them is a thousand times as late himself, and
//! nobody else.

use std::collections::{HashMap, VecDeque};

/// See the module.
#[derive(Debug)]
pub(super) struct Turns<T> {
    /// Users with something to do, the next one first.
    users: VecDeque<u32>,
    waiting: HashMap<u32, VecDeque<T>>,
}

impl<T> Turns<T> {
    pub fn new() -> Turns<T> {
        Turns { users: VecDeque::new(), waiting: HashMap::new() }
    }

    /// `user` has one more.
    pub fn push(&mut self, user: u32, request: T) {
        let of_user = self.waiting.entry(user).or_default();
        if of_user.is_empty() {
            self.users.push_back(user);
        }
        of_user.push_back(request);
    }

    /// The next one.
    pub fn pop(&mut self) -> Option<T> {
        let user = self.users.pop_front()?;
        let of_user = self.waiting.get_mut(&user)?;
        let request = of_user.pop_front();
        match of_user.is_empty() {
            true => drop(self.waiting.remove(&user)),
            false => self.users.push_back(user),
        }
        request
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whoever_asks_a_thousand_times_holds_up_himself() {
        let mut turns = Turns::new();
        (0..1000).for_each(|number| turns.push(7, number));
        turns.push(8, 5000);
        turns.push(9, 6000);
        let order: Vec<i32> = (0..5).filter_map(|_| turns.pop()).collect();
        assert_eq!(order, [0, 5000, 6000, 1, 2]);
    }

    proptest! {
        /// Nothing is lost, each user's own order is kept, and nobody has two turns while another one waits for his.
        #[test]
        fn each_user_in_turn(steps in prop::collection::vec(prop::option::of(0u32..4), 0..200)) {
            let (mut turns, mut model): (_, Vec<(u32, usize)>) = (Turns::new(), Vec::new());
            let mut passed_over: HashMap<u32, Vec<u32>> = HashMap::new();
            for (number, step) in steps.into_iter().enumerate() {
                if let Some(user) = step {
                    turns.push(user, (user, number));
                    model.push((user, number));
                    continue;
                }
                let Some((user, number)) = turns.pop() else {
                    prop_assert!(model.is_empty());
                    continue;
                };
                let first = model.iter().position(|(other, _)| *other == user);
                prop_assert_eq!(first.map(|place| model.remove(place)), Some((user, number)));
                passed_over.remove(&user);
                for other in 0..4 {
                    if model.iter().any(|(of, _)| *of == other) {
                        let before = passed_over.entry(other).or_default();
                        prop_assert!(other == user || !before.contains(&user), "{} waits while {} has two turns", other, user);
                        if other != user {
                            before.push(user);
                        }
                    }
                }
            }
        }
    }
}
