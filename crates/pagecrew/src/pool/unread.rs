//! Connections that have ended, with answers that were not read. They take memory of the kernel's as long as that lasts, so they count for their
//! user's account like connections that he has.

use std::collections::HashMap;
use std::time::Duration;

/// From one look at which answers were read to the next one, at least.
const READ: Duration = Duration::from_millis(50);

/// See the module. What stands for a connection is `C`.
pub(super) struct Unread<C> {
    of: HashMap<u32, Vec<C>>,
    /// When it was last looked which of them have been read.
    looked_ns: u64,
}

impl<C> Default for Unread<C> {
    /// Nobody has left anything unread.
    fn default() -> Unread<C> {
        Unread { of: HashMap::new(), looked_ns: 0 }
    }
}

impl<C> Unread<C> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.of.values().map(Vec::len).sum()
    }

    /// How many of them are the account's.
    pub fn of(&self, account: u32) -> usize {
        self.of.get(&account).map_or(0, Vec::len)
    }

    /// Adds one of the account's.
    pub fn push(&mut self, account: u32, connection: C) {
        self.of.entry(account).or_default().push(connection);
    }

    /// Takes those out that have been read, where that was not looked for a moment ago.
    pub fn take_read(&mut self, now_ns: u64, is_read: impl Fn(&C) -> bool) -> Vec<C> {
        if now_ns.saturating_sub(self.looked_ns) < READ.as_nanos() as u64 {
            return Vec::new();
        }
        self.looked_ns = now_ns;
        let read = self.of.values_mut().flat_map(|all| all.extract_if(.., |one| is_read(one))).collect();
        self.of.retain(|_, all| !all.is_empty());
        read
    }

    /// Takes those of the account out that has most: room for somebody who has few.
    pub fn take_most(&mut self) -> Vec<C> {
        let most = self.of.iter().max_by_key(|(_, all)| all.len()).map(|(&account, _)| account);
        most.and_then(|account| self.of.remove(&account)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Accounts 1 to 3 with this many each; a connection is its account.
    fn with(counts: [usize; 3]) -> Unread<u32> {
        let mut unread = Unread::default();
        for (account, count) in (1..).zip(counts) {
            (0..count).for_each(|_| unread.push(account, account));
        }
        unread
    }

    #[test]
    fn room_is_made_by_whoever_has_most_and_nobody_elses_count_changes() {
        let mut unread = with([60, 3, 40]);
        assert_eq!((unread.len(), unread.of(1), unread.of(2), unread.of(9)), (103, 60, 3, 0));
        assert_eq!(unread.take_most(), [1; 60]);
        // A second account of the attacker's does not wipe out what the first has left, nor the other way round.
        assert_eq!((unread.of(1), unread.of(2), unread.of(3)), (0, 3, 40));
        assert_eq!(unread.take_most(), [3; 40]);
        assert_eq!(unread.take_most(), [2; 3]);
        assert!(unread.take_most().is_empty());
    }

    #[test]
    fn what_was_read_no_longer_counts_and_that_is_not_asked_all_the_time() {
        let mut unread = with([2, 3, 0]);
        assert_eq!(unread.take_read(1000 * MS, |&account| account == 2), [2; 3]);
        assert_eq!((unread.len(), unread.of(1), unread.of(2)), (2, 2, 0));
        assert!(unread.take_read(1049 * MS, |_| panic!("asked again")).is_empty());
        assert_eq!(unread.take_read(1050 * MS, |_| true), [1; 2]);
        assert_eq!(unread.len(), 0);
        // A clock that goes back, as in a virtual machine that was moved.
        assert!(unread.take_read(0, |_| true).is_empty());
    }
}
