//! How much each user may have taken: pure bookkeeping.

use crate::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// So many files a user may have taken at once, whatever their sizes: each costs the server and the kernel a little.
pub const FILES_MOST: usize = 1024;

const ROOT: u32 = 0;

/// What users may have taken at once, in bytes. None is no bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Of users that aren't named, except root.
    pub default: Option<usize>,
    /// Of those that are, by their numbers.
    pub users: BTreeMap<u32, usize>,
    /// Of groups, by their numbers: what all of their members may have together, besides what each may have.
    pub groups: BTreeMap<u32, GroupQuota>,
    /// Whose account other users' memory is on.
    pub subordinates: Subordinates,
}

/// What the members of a group may have together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupQuota {
    /// In bytes.
    pub most: usize,
    /// The users.
    pub members: BTreeSet<u32>,
}

/// Users that are others' in user namespaces (`subuid(5)`), and whose they are: what they take is on the account of the one to whom they
/// belong, who would have thousands of quotas otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subordinates(Vec<(std::ops::Range<u32>, u32)>);

impl Subordinates {
    /// What a file such as `/etc/subuid` says; `number` is a user's number by his name. Lines that make no sense are passed over, as the kernel's
    /// own tools do it. Root's own are left out: they are machines' and containers' of the system, each for itself.
    pub fn read(text: &str, number: impl Fn(&str) -> Option<u32>) -> Subordinates {
        let range = |line: &str| {
            let mut fields = line.split(':');
            let owner = fields.next().filter(|owner| !owner.is_empty())?;
            let (first, count): (u32, u32) = (fields.next()?.trim().parse().ok()?, fields.next()?.trim().parse().ok()?);
            let owner = owner.parse().ok().or_else(|| number(owner)).filter(|owner| *owner != ROOT)?;
            // User 0 is nobody's.
            (first > ROOT).then(|| (first..first.saturating_add(count), owner))
        };
        Subordinates(text.lines().filter_map(range).collect())
    }

    /// Whose account `user`'s memory is on: his own, unless he is somebody's.
    pub fn account_of(&self, user: u32) -> u32 {
        self.0.iter().find(|(range, owner)| range.contains(&user) && *owner != user).map_or(user, |(_, owner)| *owner)
    }
}

impl Quotas {
    /// What `user` may have. The default doesn't bind root, who is bound only by an entry of its own.
    pub fn of(&self, user: u32) -> Option<usize> {
        self.users.get(&user).copied().or(if user == ROOT { None } else { self.default })
    }

    /// `user` gets one more file of `bytes` in `accounts`, or it is said why not and nothing changes. What is over a quota that was lowered
    /// stays.
    ///
    /// # Errors
    /// What would be exceeded: the user's own, or that of a group that he is in.
    pub fn charge(&self, accounts: &mut Accounts, user: u32, bytes: usize) -> Result<(), Exceeded> {
        for (&group, quota) in self.groups.iter().filter(|(_, quota)| quota.members.contains(&user)) {
            let taken = quota.members.iter().fold(0_usize, |sum, &member| sum.saturating_add(accounts.shared(member)));
            if taken.checked_add(bytes).is_none_or(|sum| sum > quota.most) {
                return Err(Exceeded::Group { group, taken, quota: quota.most, asked: bytes });
            }
        }
        accounts.charge(user, bytes, self.of(user))
    }
}

/// Why a user doesn't get a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exceeded {
    /// It would be more memory than the user may have.
    Bytes {
        /// What the user has.
        taken: usize,
        /// What the user may have.
        quota: usize,
        /// What was asked for.
        asked: usize,
    },
    /// It would be more memory than the members of one of the user's groups may have together.
    Group {
        /// The group's number.
        group: u32,
        /// What its members have.
        taken: usize,
        /// What they may have.
        quota: usize,
        /// What was asked for.
        asked: usize,
    },
    /// The user has [`FILES_MOST`] files.
    Files {
        /// What the user has.
        files: usize,
    },
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: usize| Bytes(bytes as u64);
        match *self {
            Exceeded::Bytes { taken, quota, asked } => write!(
                f,
                "{} more would exceed your quota of {}, of which {} are taken; release some or ask the operator",
                bytes(asked),
                bytes(quota),
                bytes(taken)
            ),
            Exceeded::Group { group, taken, quota, asked } => write!(
                f,
                "{} more would exceed the quota of {} of group {group}, of which its members have {}; release some or ask the operator",
                bytes(asked),
                bytes(quota),
                bytes(taken)
            ),
            Exceeded::Files { files } => {
                write!(f, "you have {files} files, and no user may have more than {FILES_MOST}; release some")
            }
        }
    }
}

impl std::error::Error for Exceeded {}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Account {
    /// What was handed out.
    bytes: usize,
    /// What the user has added to that.
    added: usize,
    files: usize,
}

impl Account {
    fn all(self) -> usize {
        self.bytes.saturating_add(self.added)
    }
}

/// What each user has. Whoever has nothing is not in it, so it is no larger than what there is to take.
#[derive(Debug, Clone, Default)]
pub struct Accounts(BTreeMap<u32, Account>);

impl Accounts {
    /// Nobody has anything.
    pub fn new() -> Accounts {
        Accounts::default()
    }

    fn account(&self, user: u32) -> Account {
        self.0.get(&user).copied().unwrap_or_default()
    }

    /// `user` gets one more file of `bytes`, or it is said why not and nothing changes. What is over a quota that was
    /// lowered stays.
    pub fn charge(&mut self, user: u32, bytes: usize, quota: Option<usize>) -> Result<(), Exceeded> {
        let account = self.account(user);
        let (taken, files) = (account.all(), account.files);
        if files >= FILES_MOST {
            return Err(Exceeded::Files { files });
        }
        let quota = quota.unwrap_or(usize::MAX);
        match taken.checked_add(bytes) {
            Some(sum) if sum <= quota => {
                self.put_down(user, bytes);
                Ok(())
            }
            _ => Err(Exceeded::Bytes { taken, quota, asked: bytes }),
        }
    }

    /// `user` has one more file of `bytes`, whatever that makes: it is there.
    pub fn put_down(&mut self, user: u32, bytes: usize) {
        let account = self.0.entry(user).or_default();
        account.bytes = account.bytes.saturating_add(bytes);
        account.files += 1;
    }

    /// What `user` has added to a file that was handed out is now `after` bytes instead of `before`.
    pub fn added(&mut self, user: u32, before: usize, after: usize) {
        let Some(account) = self.0.get_mut(&user) else { return };
        account.added = account.added.saturating_sub(before).saturating_add(after);
    }

    /// A file of `bytes` that `user` had, and has added nothing to, is gone.
    pub fn refund(&mut self, user: u32, bytes: usize) {
        let Some(account) = self.0.get_mut(&user) else { return };
        account.bytes = account.bytes.saturating_sub(bytes);
        account.files -= 1;
        if account.files == 0 {
            self.0.remove(&user);
        }
    }

    /// Bytes that are put down to `user`.
    pub fn bytes(&self, user: u32) -> usize {
        self.account(user).all()
    }

    /// Of these, what counts for what users share: what was handed out. What a user has added and can't be made to give back yet is on that user's
    /// account alone, or one could keep all others from being served. Root may add what it likes, and has it counted.
    pub fn shared(&self, user: u32) -> usize {
        let account = self.account(user);
        if user == ROOT { account.all() } else { account.bytes }
    }

    /// The same of all together.
    pub fn shared_by_all(&self) -> usize {
        self.0.keys().fold(0, |sum, &user| sum.saturating_add(self.shared(user)))
    }

    /// Everybody who has something: the user, bytes, and files.
    pub fn users(&self) -> impl Iterator<Item = (u32, usize, usize)> {
        self.0.iter().map(|(&user, account)| (user, account.all(), account.files))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::HUGE_PAGE_SIZE;
    use proptest::prelude::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn root_is_bound_only_by_an_entry_of_its_own() {
        let mut quotas = Quotas::default();
        assert_eq!((quotas.of(0), quotas.of(1000)), (None, None));
        quotas.default = Some(8 * GIB);
        quotas.users.insert(1001, 32 * GIB);
        assert_eq!((quotas.of(0), quotas.of(1000), quotas.of(1001)), (None, Some(8 * GIB), Some(32 * GIB)));
        quotas.users.insert(0, GIB);
        assert_eq!(quotas.of(0), Some(GIB));
    }

    #[test]
    fn users_in_namespaces_are_on_the_account_of_their_owner() {
        let text = "alice:100000:65536\nroot:1000000:65536\n\n1001:165536:65536:x\nbob:300000\nbob:x:1\n:7:7\nnobody-of-that-name:7:7\nbob:0:5\n\
            bob:4294967290:100";
        let number = |name: &str| {
            [("alice", 1000), ("bob", 1002), ("root", 0)].iter().find(|user| user.0 == name).map(|user| user.1)
        };
        let all = Subordinates::read(text, number);
        let accounts = [0, 3, 7, 1000, 100_000, 165_535, 165_536, 231_072, 300_000, 1_000_000, 4_294_967_294];
        let expected = [0, 3, 7, 1000, 1000, 1000, 1001, 231_072, 300_000, 1_000_000, 1002];
        assert_eq!(accounts.map(|user| all.account_of(user)), expected);
        assert_eq!(Subordinates::default().account_of(100_000), 100_000);
    }

    proptest! {
        #[test]
        fn no_file_of_subordinates_is_too_odd(text in "[a-z0-9:\n -]{0,200}", user: u32) {
            let all = Subordinates::read(&text, |name| name.len().try_into().ok());
            prop_assert!(user == 0 || all.account_of(user) != 0 || user == all.account_of(user));
            prop_assert_eq!(all.account_of(0), 0);
        }
    }

    #[test]
    fn the_last_byte_of_a_quota_can_be_had_and_no_more() {
        let mut accounts = Accounts::new();
        accounts.charge(7, 3 * GIB, Some(4 * GIB)).unwrap();
        let refused = Exceeded::Bytes { taken: 3 * GIB, quota: 4 * GIB, asked: 2 * GIB };
        assert_eq!(accounts.charge(7, 2 * GIB, Some(4 * GIB)), Err(refused));
        assert_eq!((accounts.account(7).bytes, accounts.account(7).files), (3 * GIB, 1));
        accounts.charge(7, GIB, Some(4 * GIB)).unwrap();
        assert!(accounts.charge(7, HUGE_PAGE_SIZE, Some(4 * GIB)).is_err());
        // One user's memory is not another's, and a quota of nothing is one.
        accounts.charge(8, 4 * GIB, Some(4 * GIB)).unwrap();
        assert!(accounts.charge(9, HUGE_PAGE_SIZE, Some(0)).is_err());
        // The quota was lowered meanwhile.
        assert!(accounts.charge(7, 0, Some(GIB)).is_err());
        assert!(refused.to_string().contains("2 GiB more would exceed your quota of 4 GiB, of which 3 GiB are taken"));
    }

    #[test]
    fn members_of_a_group_share_what_it_may_have() {
        let group = |most, members: &[u32]| GroupQuota { most, members: members.iter().copied().collect() };
        let quotas = Quotas {
            default: Some(4 * GIB),
            groups: [(36, group(6 * GIB, &[7, 8])), (37, group(5 * GIB, &[8, 9]))].into(),
            ..Quotas::default()
        };
        let mut accounts = Accounts::new();
        quotas.charge(&mut accounts, 7, 4 * GIB).unwrap();
        assert!(matches!(quotas.charge(&mut accounts, 7, GIB), Err(Exceeded::Bytes { .. })));
        let refused = Exceeded::Group { group: 36, taken: 4 * GIB, quota: 6 * GIB, asked: 3 * GIB };
        assert_eq!(quotas.charge(&mut accounts, 8, 3 * GIB), Err(refused));
        assert!(refused.to_string().contains("of group 36, of which its members have 4 GiB"), "{refused}");
        quotas.charge(&mut accounts, 8, 2 * GIB).unwrap();
        // Somebody in another group of his, and in none.
        assert!(matches!(quotas.charge(&mut accounts, 9, 4 * GIB), Err(Exceeded::Group { group: 37, .. })));
        quotas.charge(&mut accounts, 9, 3 * GIB).unwrap();
        quotas.charge(&mut accounts, 10, 4 * GIB).unwrap();
        accounts.refund(8, 2 * GIB);
        quotas.charge(&mut accounts, 8, GIB).unwrap();
        assert!(quotas.charge(&mut accounts, 8, usize::MAX).is_err());
    }

    #[test]
    fn what_a_user_adds_is_on_no_others_account() {
        let members = [7, 8].into();
        let quotas = Quotas { groups: [(36, GroupQuota { most: 6 * GIB, members })].into(), ..Quotas::default() };
        let mut accounts = Accounts::new();
        quotas.charge(&mut accounts, 7, GIB).unwrap();
        quotas.charge(&mut accounts, 0, GIB).unwrap();
        accounts.added(7, 0, 40 * GIB);
        accounts.added(0, 0, 2 * GIB);
        assert_eq!((accounts.bytes(7), accounts.shared_by_all()), (41 * GIB, 4 * GIB));
        assert!(accounts.charge(7, GIB, Some(41 * GIB)).is_err());
        quotas.charge(&mut accounts, 8, 5 * GIB).unwrap();
        accounts.added(7, 40 * GIB, 0);
        accounts.refund(7, GIB);
        assert_eq!((accounts.bytes(7), accounts.shared_by_all()), (0, 8 * GIB));
    }

    #[test]
    fn sums_do_not_overflow() {
        let mut accounts = Accounts::new();
        accounts.charge(7, usize::MAX, None).unwrap();
        assert!(matches!(accounts.charge(7, 1, None), Err(Exceeded::Bytes { quota: usize::MAX, .. })));
        accounts.refund(7, usize::MAX);
        // Nothing is there to be given back.
        accounts.refund(7, GIB);
        assert_eq!((accounts.account(7).bytes, accounts.account(7).files, accounts.users().count()), (0, 0, 0));
    }

    #[test]
    fn files_are_bounded_whatever_their_sizes() {
        let mut accounts = Accounts::new();
        (0..FILES_MOST).for_each(|_| accounts.charge(7, HUGE_PAGE_SIZE, None).unwrap());
        assert_eq!(accounts.charge(7, HUGE_PAGE_SIZE, None), Err(Exceeded::Files { files: FILES_MOST }));
        accounts.refund(7, HUGE_PAGE_SIZE);
        accounts.charge(7, HUGE_PAGE_SIZE, None).unwrap();
    }

    proptest! {
        #[test]
        fn accounts_are_the_sums_of_what_was_taken(
            steps in proptest::collection::vec((0u32..4, 0usize..64, any::<bool>()), 1..400),
            quota in proptest::option::of(0usize..1000),
        ) {
            let mut accounts = Accounts::new();
            let mut model: Vec<(u32, usize)> = Vec::new();
            for (user, units, give) in steps {
                let sum = |model: &[(u32, usize)]| model.iter().filter(|file| file.0 == user).map(|file| file.1).sum();
                let before: usize = sum(&model);
                if give {
                    if let Some(index) = model.iter().position(|file| file.0 == user) {
                        accounts.refund(user, model.swap_remove(index).1);
                    }
                } else if accounts.charge(user, units, quota).is_ok() {
                    prop_assert!(quota.is_none_or(|quota| before + units <= quota));
                    model.push((user, units));
                } else {
                    prop_assert!(quota.is_some_and(|quota| before + units > quota));
                }
                prop_assert_eq!(accounts.account(user).bytes, sum(&model));
                prop_assert_eq!(accounts.account(user).files, model.iter().filter(|file| file.0 == user).count());
                let all: usize = model.iter().map(|file| file.1).sum();
                prop_assert_eq!(accounts.users().map(|(_, bytes, _)| bytes).sum::<usize>(), all);
                prop_assert_eq!(accounts.users().map(|(_, _, files)| files).sum::<usize>(), model.len());
                prop_assert!(accounts.users().all(|(_, _, files)| files > 0));
            }
        }
    }
}
