//! What can be done with mappings of our own.

use super::check::Check;
use super::scratch::Scratch;
use pagecrew::sys::memory::{self, Advice};
use pagecrew::sys::userfaultfd::Userfaultfd;
use pagecrew::sys::{Errno, PAGE_SIZE};

const LEN: usize = 16 * PAGE_SIZE;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![
        Check::tried(
            "MADV_DONTNEED",
            advised(Advice::DontNeed),
            "nothing can be given back",
            "let the seccomp filter pass madvise",
        )
        .needed(),
        Check::tried(
            "MADV_POPULATE_WRITE",
            advised(Advice::PopulateWrite),
            "memory is backed by touching every page, which takes longer",
            "needs Linux 5.14",
        ),
        Check::tried(
            "MADV_DONTNEED_LOCKED",
            advised(Advice::DontNeedLocked),
            "large memory that a program locks and then frees is mapped anew, which takes longer",
            "needs Linux 5.18",
        ),
        Check::tried(
            "MREMAP_DONTUNMAP",
            moved(),
            "realloc of large memory copies where it could move pages",
            "needs Linux 5.7",
        ),
        Check::tried(
            "MADV_WIPEONFORK",
            advised(Advice::WipeOnFork),
            "fork copies the page tables of free memory too and takes longer",
            "needs Linux 4.14",
        ),
        Check::tried(
            "UFFDIO_MOVE",
            Userfaultfd::new().map(Userfaultfd::close),
            "programs of varying large sizes have huge pages zeroed that could be moved",
            "needs Linux 6.17, and no filter of system calls",
        ),
        Check::tried("MADV_GUARD_INSTALL", advised(Advice::GuardInstall), "--guards has no effect", "needs Linux 6.13"),
    ]
}

fn advised(advice: Advice) -> Result<(), Errno> {
    let mut scratch = Scratch::new(LEN)?;
    scratch.write(0, 1);
    scratch.advise(advice)
}

fn moved() -> Result<(), Errno> {
    let (mut from, to) = (Scratch::new(LEN)?, Scratch::new(LEN)?);
    from.write(0, 1);
    // SAFETY: nobody else knows either mapping, and they are equally long.
    unsafe { memory::move_pages(from.range(), to.range().start) }
}
