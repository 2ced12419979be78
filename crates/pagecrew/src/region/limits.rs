//! What is known of the limits of the machine and the control group, and what follows from it for a program that comes near one.
//!
//! **Who knows what.** The watcher looks, a few times a second; the program's own threads only read what it found, since no file is opened on
//! them. What nobody has looked at yet may be near, which costs nothing in a small program. In a program that may fill its group again, as
//! far as is known, memory that waits for its way back may be what is missing: such a program is *cramped*, has just what it asks for, and
//! keeps nothing.
//!
//! A program that has only grown so far may grow up to its group's limit, so a limit counts as near for it, however far it is. Once it has
//! given something back, that says no more than what is left below the limit, and so it is looked at again.

use super::policy::{Signals, slack};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// A program that has less in use may have spans a little longer than what it asked for before anybody has looked at its limits.
const UNLOOKED_MOST: usize = 32 << 20;
/// After so much that was given back, a limit that was always near so far is looked at again.
const WORTH_LOOK_MOST: usize = 4 << 30;

/// What may be there beyond the target is at most this part of what is left below the control group's limit, and a program that comes so
/// near to all of it is cramped.
const ROOM_SHARE: usize = 16;

/// See the module.
pub(super) struct Limits {
    /// Whether a limit is near; until somebody has looked, it may be.
    near: AtomicBool,
    looked: AtomicBool,
    cramped: AtomicBool,
    /// Bytes that the program has given back since a limit was last found near, and how many are worth another look.
    came_back: AtomicUsize,
    worth_look: AtomicUsize,
    /// Bytes that the control group had left below its limit at the last look.
    room: AtomicUsize,
    /// What may be in use below that limit, if all of it has pages.
    most_in_use: AtomicUsize,
}

impl Limits {
    /// Nobody has looked.
    pub fn new() -> Limits {
        let [near, looked, cramped] = [true, false, false].map(AtomicBool::new);
        let [room, most_in_use] = [usize::MAX; 2].map(AtomicUsize::new);
        let [came_back, worth_look] = [0, UNLOOKED_MOST].map(AtomicUsize::new);
        Limits { near, looked, cramped, came_back, worth_look, room, most_in_use }
    }

    /// In a forked child: nobody has looked. Where nobody ever will, what was `read_once` stands.
    pub fn after_fork(&self, read_once: bool) {
        self.near.store(true, Relaxed);
        self.looked.store(false, Relaxed);
        self.cramped.store(false, Relaxed);
        self.came_back.store(0, Relaxed);
        self.worth_look.store(UNLOOKED_MOST, Relaxed);
        if !read_once {
            self.room.store(usize::MAX, Relaxed);
            self.most_in_use.store(usize::MAX, Relaxed);
        }
    }

    /// Somebody has looked, and found a limit `near` or not.
    pub fn set_near(&self, near: bool) {
        self.near.store(near, Relaxed);
        self.looked.store(true, Relaxed);
        let worth = self.worth_look.load(Relaxed);
        let gave_back = self.came_back.swap(0, Relaxed) >= worth;
        let worth = match near {
            false => UNLOOKED_MOST,
            // Where it stays near, each look is worth less than the one before.
            true if gave_back => (2 * worth).min(WORTH_LOOK_MOST),
            true => worth,
        };
        self.worth_look.store(worth, Relaxed);
    }

    /// The program has given `bytes` back.
    pub fn note_came_back(&self, bytes: usize) {
        if self.near() {
            self.came_back.fetch_add(bytes, Relaxed);
        }
    }

    /// Whether the program has given back so much that it does not only grow.
    pub fn gave_back(&self) -> bool {
        self.came_back.load(Relaxed) >= self.worth_look.load(Relaxed)
    }

    /// Takes note of what is left below the control group's limit.
    pub fn note_room(&self, signals: &Signals) {
        let room = signals.group.map_or(usize::MAX, |group| group.limit.saturating_sub(group.used) as usize);
        self.room.store(room, Relaxed);
        // What is in use may have no pages yet.
        self.most_in_use.store(room.saturating_add(signals.resident), Relaxed);
    }

    /// The program is cramped, or is not. Returns what it was.
    pub fn set_cramped(&self, cramped: bool) -> bool {
        self.cramped.swap(cramped, Relaxed)
    }

    /// Whether the control group has no room for more than what the program asks for: spans have just that length then, those of which a
    /// huge page would bring more have small pages, and none waits in a cache.
    pub fn cramped(&self) -> bool {
        self.cramped.load(Relaxed)
    }

    /// Whether a limit is near, or nobody knows.
    pub fn near(&self) -> bool {
        self.near.load(Relaxed)
    }

    /// Whether every page counts, those in the middle of huge pages included.
    pub fn short_of_room(&self) -> bool {
        self.cramped() || (self.near() && self.looked.load(Relaxed))
    }

    /// Whether a span may not be longer than what was asked for, in a program that has `in_use` bytes in use: there is no room, or nobody
    /// has looked yet whether there is, and the program is large enough for that to matter.
    pub fn counts_every_page(&self, in_use: impl FnOnce() -> usize) -> bool {
        self.cramped() || (self.near() && in_use() >= UNLOOKED_MOST)
    }

    /// Whether a program that has `in_use` bytes in use is so large that its limits matter, and nobody has looked at them since it did more
    /// than grow.
    pub fn wants_look(&self, in_use: impl FnOnce() -> usize) -> bool {
        if self.looked.load(Relaxed) { self.near() && self.gave_back() } else { in_use() >= UNLOOKED_MOST }
    }

    /// Whether a program that once had `resident` bytes resident had about as much as its group's limit leaves room for: it may have that
    /// again before the next look.
    pub fn fills_group(&self, resident: usize) -> bool {
        let most = self.most_in_use.load(Relaxed);
        resident > most - most / ROOM_SHARE
    }

    /// What a program may have beyond its `peak`: near a limit, nothing. One that grows towards its group's limit may be there before the
    /// next look.
    pub fn slack(&self, peak: usize) -> usize {
        if self.near() || self.cramped() { 0 } else { slack(peak).min(self.room.load(Relaxed) / ROOM_SHARE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::cgroup;

    const M: usize = 1 << 20;

    fn signals(resident: usize, group: Option<(usize, usize)>) -> Signals {
        let group = group.map(|(limit, used)| cgroup::Memory { limit: (limit * M) as u64, used: (used * M) as u64 });
        let resident = resident * M;
        Signals { resident, highest: resident, retained: 0, total: 1 << 40, available: 1 << 40, group, stalled: false }
    }

    fn looked_at(signals: &Signals) -> Limits {
        let limits = Limits::new();
        limits.set_near(false);
        limits.note_room(signals);
        limits
    }

    #[test]
    fn before_anybody_looks_a_large_program_gets_no_more_than_it_asks_for() {
        let limits = Limits::new();
        assert!(limits.near() && !limits.short_of_room());
        assert_eq!([31, 32].map(|mib| limits.counts_every_page(|| mib * M)), [false, true]);
        assert_eq!([31, 32].map(|mib| limits.wants_look(|| mib * M)), [false, true]);
        assert_eq!((limits.slack(100 * M), limits.fills_group(1 << 40)), (0, false));
        limits.set_near(false);
        assert!(!limits.counts_every_page(|| 1 << 40) && !limits.wants_look(|| 1 << 40));
        assert_eq!(limits.slack(100 * M), slack(100 * M));
    }

    #[test]
    fn a_program_that_has_had_nearly_all_of_its_group_fills_it() {
        // 100 MiB of its own, 200 of others, and 20 more that it may have.
        let limits = looked_at(&signals(100, Some((320, 300))));
        let most = 112 * M + M / 2;
        assert_eq!([most, most + 1].map(|resident| limits.fills_group(resident)), [false, true]);
        assert!(!looked_at(&signals(100, None)).fills_group(1 << 40));
    }

    #[test]
    fn slack_is_a_part_of_the_room_and_nothing_where_there_is_none() {
        let limits = looked_at(&signals(100, Some((320, 300))));
        assert_eq!(limits.slack(100 * M), 20 * M / ROOM_SHARE);
        // What was read of the room may be old: whoever is cramped gets nothing of it.
        assert!(!limits.set_cramped(true) && limits.cramped() && limits.short_of_room());
        assert_eq!(limits.slack(100 * M), 0);
        assert!(limits.set_cramped(false) && limits.slack(100 * M) > 0);
        limits.set_near(true);
        assert_eq!(limits.slack(100 * M), 0);
    }

    #[test]
    fn a_program_that_gives_back_is_looked_at_again_each_time_later_while_a_limit_stays_near() {
        let limits = Limits::new();
        limits.note_came_back(100 * M);
        limits.set_near(true);
        assert!(!limits.gave_back() && !limits.wants_look(|| 1 << 40), "it was looked at just now");
        // How often it is looked at while it gives back so many MiB.
        let looks = |near: bool, mib: usize| {
            (0..mib / 4).fold(0, |looks, _| {
                limits.note_came_back(4 * M);
                let look = limits.wants_look(|| 1 << 40) && limits.gave_back();
                if look {
                    limits.set_near(near);
                }
                looks + usize::from(look)
            })
        };
        assert_eq!(looks(true, 32 + 64 + 128), 2, "the first time after 64 MiB, since it had given back before");
        assert_eq!(looks(true, 100 << 10), 28, "at last, each 4 GiB");
        assert_eq!(looks(false, 100 << 10), 1, "it is not near, and that is known");
        limits.set_near(true);
        assert_eq!(looks(true, 36), 1);
    }

    #[test]
    fn a_child_knows_only_what_nobody_will_look_for_again() {
        for read_once in [false, true] {
            let limits = looked_at(&signals(100, Some((320, 300))));
            limits.set_cramped(true);
            limits.after_fork(read_once);
            assert_eq!((limits.near(), limits.cramped(), limits.fills_group(113 * M)), (true, false, read_once));
        }
    }
}
