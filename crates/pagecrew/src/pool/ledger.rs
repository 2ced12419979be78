//! What is written down of each file of a pool, in its name: which it is, how large, of which node, whose, and how long it stays.
//!
//! The directories are the server's alone, so nobody else can change a name, and a rename is whole or has not happened, whenever a server is
//! killed. So names are the books: a server that starts knows what the one before it knew, whatever the owners of files have done to
//! these meanwhile. Nothing here makes a system call.
//!
//! One thing is not in the name: that a file was released, and is counted as the user's until nothing is left of it. That is in its owner and
//! mode (`store`), since to change a name the kernel locks the file together with the directory, and whoever has the file open can keep it
//! from being locked.
//!
//! ```text
//!     ready/0123456789abcdef-n0                                       waits
//!     taken/0123456789abcdef-n0-33554432-u1000-t1750000000-unused     user 1000 has it since that second, and until nobody has had it open for a while
//! ```

use super::protocol::Until;
use std::fmt;

/// What a name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Which file; random.
    pub id: u64,
    /// The node that it is of.
    pub node: usize,
    /// Who has it; `None` while it waits.
    pub holding: Option<Holding>,
}

/// Who has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holding {
    /// Bytes that were handed out, whatever the file has now.
    pub size: usize,
    /// On whose account.
    pub user: u32,
    /// When it was handed out, in seconds since 1970.
    pub since: u64,
    /// For how long.
    pub until: Until,
}

const UNTIL: [(Until, &str); 2] = [(Until::Closed, "closed"), (Until::Unused, "unused")];

impl Entry {
    /// What `name` says, if it is one that [`Entry`] writes.
    pub fn read(name: &str) -> Option<Entry> {
        let mut fields = name.split('-');
        let id = u64::from_str_radix(fields.next()?, 16).ok()?;
        let node = fields.next()?.strip_prefix('n')?.parse().ok()?;
        let holding = match fields.next() {
            None => None,
            Some(size) => {
                let size = size.parse().ok()?;
                let user = fields.next()?.strip_prefix('u')?.parse().ok()?;
                let since = fields.next()?.strip_prefix('t')?.parse().ok()?;
                let word = fields.next()?;
                let until = UNTIL.iter().find(|(_, name)| *name == word)?.0;
                Some(Holding { size, user, since, until })
            }
        };
        let entry = Entry { id, node, holding };
        // One entry has one name: no signs, no zeroes in front, nothing behind.
        (entry.to_string() == name).then_some(entry)
    }
}

impl fmt::Display for Entry {
    /// The name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-n{}", self.id, self.node)?;
        let Some(Holding { size, user, since, until }) = self.holding else { return Ok(()) };
        let until = UNTIL.iter().find(|(which, _)| *which == until).map_or("", |(_, word)| word);
        write!(f, "-{size}-u{user}-t{since}-{until}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_says_all_of_it(
            id: u64, node: usize, size: usize, user: u32, since: u64, closed: bool, waits: bool,
        ) {
            let until = if closed { Until::Closed } else { Until::Unused };
            let entry = Entry { id, node, holding: (!waits).then_some(Holding { size, user, since, until }) };
            let name = entry.to_string();
            prop_assert_eq!(Entry::read(&name), Some(entry));
            // A name in a directory, and a word of a monitor's options.
            prop_assert!(name.len() < 255 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'));
        }

        #[test]
        fn what_nobody_wrote_is_no_entry(name in "[-0-9a-fntu+closeduns]{0,60}") {
            if let Some(entry) = Entry::read(&name) {
                prop_assert_eq!(entry.to_string(), name);
            }
        }
    }

    #[test]
    fn one_entry_has_one_name() {
        let good = "0123456789abcdef-n0-33554432-u1000-t0-unused";
        assert!(Entry::read(good).is_some() && Entry::read("0123456789abcdef-n1").is_some());
        for bad in [
            "",
            "0123456789abcdef",
            "0123456789ABCDEF-n0",
            "123456789abcdef-n0",
            "0123456789abcdef-n00",
            "0123456789abcdef-n+0",
            "0123456789abcdef-n0-",
            "0123456789abcdef-n0-33554432",
            "0123456789abcdef-n0-33554432-u1000",
            "0123456789abcdef-n0-33554432-u1000-unused",
            "0123456789abcdef-n0-33554432-u1000-t1",
            "0123456789abcdef-n0-33554432-u1000-t-1-unused",
            "0123456789abcdef-n0-33554432-u1000-t1-often",
            "0123456789abcdef-n0-33554432-u4294967296-t1-unused",
            "0123456789abcdef-n0-33554432-u1000-t1-unused-",
        ] {
            assert_eq!(Entry::read(bad), None, "{bad}");
        }
    }
}
