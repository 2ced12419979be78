//! How much a server takes on, by the descriptors that it may have: pure arithmetic. Each connection takes one, and each file that waits or is
//! taken. Whoever uses up what there is for users must not use up what root needs.

use super::quota::FILES_MOST;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Capacity {
    /// Connections at once, of all users, and the part of that which only root has.
    connections: usize,
    connections_of_root: usize,
    /// Connections of one user that isn't root.
    connections_of_user: usize,
    /// Taken files at once, and the part of that which only root has.
    files: usize,
    files_of_root: usize,
    /// Waiting files, of all nodes.
    waiting: usize,
}

const ROOT: u32 = 0;

impl Capacity {
    /// For a process that may have so many descriptors.
    pub fn of(descriptors: usize) -> Capacity {
        // An eighth of them is for the server itself.
        let connections = (descriptors / 4).clamp(4, 8192);
        let connections_of_root = (connections / 4).min(256);
        let files = descriptors / 2;
        Capacity {
            connections,
            connections_of_root,
            connections_of_user: (FILES_MOST + 64).min((connections - connections_of_root) / 2),
            files,
            files_of_root: (files / 4).min(256),
            waiting: descriptors / 8,
        }
    }

    /// So many files may wait on each of this many nodes.
    pub fn wait_on_each(&self, nodes: usize) -> usize {
        (self.waiting / nodes.max(1)).max(1)
    }

    /// Whether one more of `account` may connect where `connected` are, of which `own` are the account's.
    pub fn takes_in(&self, account: u32, connected: usize, own: usize) -> bool {
        match account {
            ROOT => connected < self.connections,
            _ => connected < self.connections - self.connections_of_root && own < self.connections_of_user,
        }
    }

    /// Whether one more file may be handed out to `account` where `taken` are.
    pub fn hands_out(&self, account: u32, taken: usize) -> bool {
        taken < if account == ROOT { self.files } else { self.files - self.files_of_root }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_service_has_room_for_all() {
        let capacity = Capacity::of(65536);
        assert!(capacity.takes_in(7, 8192 - 257, FILES_MOST + 63) && !capacity.takes_in(7, 100, FILES_MOST + 64));
        assert!(
            !capacity.takes_in(7, 8192 - 256, 0) && capacity.takes_in(0, 8191, 8191) && !capacity.takes_in(0, 8192, 0)
        );
        assert!(
            capacity.hands_out(7, 32767 - 256) && !capacity.hands_out(7, 32768 - 256) && capacity.hands_out(0, 32767)
        );
        // Of many nodes, none has all of them.
        assert_eq!([1, 16, 1024].map(|nodes| Capacity::of(4096).wait_on_each(nodes)), [512, 32, 1]);
    }

    proptest! {
        #[test]
        fn root_and_a_second_user_find_room_beside_one_who_takes_all_he_gets(descriptors in 64usize..1 << 20) {
            let capacity = Capacity::of(descriptors);
            let mut greedy = 0;
            while capacity.takes_in(7, greedy, greedy) {
                greedy += 1;
            }
            prop_assert!(greedy > 0 && capacity.takes_in(8, greedy, 0) && capacity.takes_in(0, greedy, 0));
            let mut files = 0;
            while capacity.hands_out(7, files) {
                files += 1;
            }
            prop_assert!(files > 0 && capacity.hands_out(0, files));
            prop_assert!(capacity.connections + capacity.files + capacity.waiting <= descriptors - descriptors / 8);
        }
    }
}
