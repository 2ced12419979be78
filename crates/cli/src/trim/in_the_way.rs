//! Processes that have kept a thread waiting for too long: their memory was locked. They are left alone while the thread waits, and for a pause
//! that doubles each time, since each costs others two seconds, or five where its group is held. A user who has several of them has all of his
//! left alone, so that nobody keeps others' from being trimmed by having many.

use super::select::About;
use pagecrew::pool::Subordinates;
use pagecrew::trim::Id;
use std::collections::BTreeMap;

/// The pauses, from the first to the longest.
const PAUSE_NS: u64 = 10_000_000_000;
const PAUSE_MOST_NS: u64 = 3_600_000_000_000;
/// A user with so many of them has all of his left alone. Root is many: services, and containers without users of their own.
const MANY: usize = 2;
const MANY_OF_ROOT: usize = 8;

/// See the module.
#[derive(Debug, Default)]
pub struct InTheWay {
    known: BTreeMap<Id, Known>,
    /// Whose the users of user namespaces are.
    subordinates: Subordinates,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    owner: u32,
    pause_ns: u64,
    /// When it is no longer left alone; never while a thread waits for it.
    until_ns: Option<u64>,
}

impl InTheWay {
    /// A thread waits for `id`.
    pub fn came(&mut self, id: Id) {
        self.subordinates = subordinates();
        // One that has gone meanwhile is nobody's.
        let user = About::of(id.pid).map_or(0, |about| about.user);
        self.add(id, user);
    }

    fn add(&mut self, id: Id, user: u32) {
        let owner = self.subordinates.account_of(user);
        let pause_ns = self.known.get(&id).map_or(PAUSE_NS, |known| (2 * known.pause_ns).min(PAUSE_MOST_NS));
        self.known.insert(id, Known { owner, pause_ns, until_ns: None });
    }

    /// No thread waits for `id` now.
    pub fn went(&mut self, id: Id, now_ns: u64) {
        if let Some(known) = self.known.get_mut(&id) {
            known.until_ns = Some(now_ns + known.pause_ns);
        }
    }

    /// Nor has one waited for it at all.
    pub fn forget(&mut self, id: Id) {
        self.known.remove(&id);
    }

    /// Whether `id`, a process of `user`'s, is to be left alone now.
    pub fn leaves_alone(&mut self, id: Id, user: u32, now_ns: u64) -> bool {
        // How long it was left alone the last time is known for as long again.
        self.known.retain(|_, known| known.until_ns.is_none_or(|until_ns| now_ns < until_ns + known.pause_ns));
        let counts = |known: &Known| known.until_ns.is_none_or(|until_ns| now_ns < until_ns);
        let owner = self.subordinates.account_of(user);
        let of_owner = self.known.values().filter(|known| known.owner == owner && counts(known)).count();
        let many = if owner == 0 { MANY_OF_ROOT } else { MANY };
        self.known.get(&id).is_some_and(counts) || of_owner >= many
    }
}

/// What `/etc/subuid` says, by `/etc/passwd` alone: nobody is asked who may not answer.
fn subordinates() -> Subordinates {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let users = read("/etc/passwd");
    let number = |name: &str| {
        let user = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        user.split(':').nth(1)?.parse().ok()
    };
    Subordinates::read(&read("/etc/subuid"), number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(pid: i32) -> Id {
        Id { pid, start_ticks: 1 }
    }

    #[test]
    fn it_is_left_alone_while_a_thread_waits_and_for_longer_each_time() {
        let mut known = InTheWay::default();
        assert!(!known.leaves_alone(id(1), 1000, 0));
        known.add(id(1), 1000);
        assert!(known.leaves_alone(id(1), 1000, u64::MAX / 2) && !known.leaves_alone(id(2), 1000, 0));
        known.went(id(1), 0);
        assert!(known.leaves_alone(id(1), 1000, PAUSE_NS - 1) && !known.leaves_alone(id(1), 1000, PAUSE_NS));
        // Once more, soon after: twice as long.
        known.add(id(1), 1000);
        known.went(id(1), PAUSE_NS);
        assert!(known.leaves_alone(id(1), 1000, 3 * PAUSE_NS - 1) && !known.leaves_alone(id(1), 1000, 3 * PAUSE_NS));
        // Long after it is like the first time.
        assert!(!known.leaves_alone(id(1), 1000, 100 * PAUSE_NS));
        known.add(id(1), 1000);
        known.went(id(1), 100 * PAUSE_NS);
        assert!(!known.leaves_alone(id(1), 1000, 101 * PAUSE_NS));
        for _ in 0..100 {
            known.add(id(1), 1000);
        }
        known.went(id(1), 0);
        assert!(!known.leaves_alone(id(1), 1000, PAUSE_MOST_NS));
    }

    #[test]
    fn who_has_several_has_all_of_his_left_alone() {
        let subordinates = Subordinates::read("1000:100000:65536", |_| None);
        let mut known = InTheWay { subordinates, ..InTheWay::default() };
        known.add(id(1), 1000);
        known.add(id(2), 100_007);
        for (user, alone) in [(1000, true), (100_000, true), (1001, false), (0, false)] {
            assert_eq!(known.leaves_alone(id(3), user, 0), alone, "{user}");
        }
        known.went(id(2), 0);
        assert!(known.leaves_alone(id(3), 1000, 1) && !known.leaves_alone(id(3), 1000, PAUSE_NS));
        known.forget(id(1));
        assert!(!known.leaves_alone(id(1), 1000, PAUSE_NS));
        (10..10 + MANY_OF_ROOT as i32 - 1).for_each(|pid| known.add(id(pid), 0));
        assert!(!known.leaves_alone(id(3), 0, 0));
        known.add(id(99), 0);
        assert!(known.leaves_alone(id(3), 0, 0));
    }
}
