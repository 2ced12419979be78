//! Whether a pool can be served here, found out by making a file of one huge page on a file system that is mounted nowhere.

use super::options::Backing;
use super::store;
use crate::sys::memory::{self, Advice};
use crate::sys::mount::{self, MemoryFs};
use crate::sys::pagemap;
use crate::sys::shared_file::Mapped;
use crate::sys::{Errno, HUGE_PAGE_SIZE, check_page_size};
use rustix::fs::{Mode, OFlags, openat};
use std::fs::File;

/// What came of trying it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// A file got a huge page.
    Works(Backing),
    /// There are file systems, and no huge page could be had.
    NoHugePage,
    /// The kernel refused.
    Refused(Errno),
}

/// Tries a tmpfs, and where that fails reserved pages.
pub fn attempt() -> Support {
    if let Err(error) = check_page_size() {
        return Support::Refused(error.into());
    }
    let reserved = || match store::reserved_pages() {
        Some(pages) if pages.free > 0 => Some(one_page(MemoryFs::Hugetlbfs, ("pagesize", "2M"))),
        _ => None,
    };
    match one_page(MemoryFs::Tmpfs, ("huge", "always")) {
        Ok(true) => Support::Works(Backing::Tmpfs),
        tmpfs => match (reserved(), tmpfs) {
            (Some(Ok(true)), _) => Support::Works(Backing::Hugetlbfs),
            (_, Ok(_)) => Support::NoHugePage,
            (_, Err(error)) => Support::Refused(error),
        },
    }
}

/// Whether a file on a file system of `kind` gets a huge page.
fn one_page(kind: MemoryFs, option: (&str, &str)) -> Result<bool, Errno> {
    let root = mount::unattached(kind, &[option])?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = File::from(openat(&root, "page", flags, Mode::RUSR | Mode::WUSR)?);
    file.set_len(HUGE_PAGE_SIZE as u64)?;
    let mapped = Mapped::new(&file, 0, HUGE_PAGE_SIZE)?;
    // SAFETY: this kind of advice changes no contents.
    unsafe { memory::advise(mapped.range(), Advice::PopulateWrite)? };
    let mut huge = 0;
    pagemap::own_huge_pages(mapped.range(), |run| huge += run.len)?;
    Ok(huge == HUGE_PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trying_leaves_nothing_behind() {
        let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap().matches("page").count();
        let before = mounts();
        match attempt() {
            Support::Works(backing) => assert_ne!(backing, Backing::Auto),
            Support::NoHugePage => {}
            Support::Refused(error) => assert_eq!(error, Errno(libc::EPERM)),
        }
        assert_eq!(mounts(), before);
    }
}
