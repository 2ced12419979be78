//! The memory of another process, added up: `/proc/PID/smaps_rollup` (4.14).
//!
//! To read it costs the more the more memory the process has: the kernel looks at each page table entry. The process goes on meanwhile, since
//! 5.10 also where it maps memory.

use super::{Errno, procfs};
use std::path::Path;

/// Bytes of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rollup {
    /// Anonymous memory.
    pub anonymous: u64,
    /// The part of it in huge pages.
    pub anon_huge: u64,
}

/// The sums for process `pid`. `root` is `/`, or the top of a made-up tree.
///
/// # Errors
/// `EACCES` without the right to trace the process, `ENOENT` and `ESRCH` where it has gone or is a thread of the kernel, `EILSEQ` where the sums are
/// not there.
pub fn rollup(root: &Path, pid: u32) -> Result<Rollup, Errno> {
    let text = procfs::text_under(root, &format!("proc/{pid}/smaps_rollup"), 4096)?;
    parse(&text).ok_or(Errno(libc::EILSEQ))
}

fn parse(text: &str) -> Option<Rollup> {
    let field = |name: &str| -> Option<u64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        rest.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Rollup { anonymous: field("Anonymous")?, anon_huge: field("AnonHugePages")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sums_of_a_process() {
        let text = "55d6-7fff ---p 00000000 00:00 0    [rollup]\nRss:                1616 kB\nPss_Anon:            112 kB\n\
                    Anonymous:           112 kB\nLazyFree:              0 kB\nAnonHugePages:      64 kB\n";
        assert_eq!(parse(text), Some(Rollup { anonymous: 112 << 10, anon_huge: 64 << 10 }));
        for end in 0..text.len() - 1 {
            assert_eq!(parse(&text[..end]), None, "{}", &text[..end]);
        }
    }

    #[test]
    fn this_process_and_one_that_is_not_there() {
        let rollup_ = rollup(Path::new("/"), std::process::id()).unwrap();
        assert!(rollup_.anonymous > 0 && rollup_.anon_huge <= rollup_.anonymous);
        assert!(rollup(Path::new("/"), u32::MAX).is_err());
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "((Anonymous|AnonHugePages):? -?[0-9]{0,25}( kB)?\n|[ -~]{0,20}\n){0,6}") {
            parse(&text);
        }
    }
}
