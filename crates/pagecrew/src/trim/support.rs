//! Whether this kernel puts the shared zero page in the place of the zero part of a huge page when it splits one (6.12).

use crate::sys::memory::{self, Advice, Protection, Range};
use crate::sys::pagemap::{Category, Pagemap};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, check_page_size};
use std::fmt;
use std::time::Duration;

/// What came of trying it on a huge page of this process's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// So many bytes went back of a huge page with one byte in it.
    Works(usize),
    /// The page was split and nothing went back.
    NothingBack,
    /// There was no huge page to be had. Other processes may still have some.
    NoHugePage,
    /// The kernel refused.
    Refused(Errno),
}

/// The kernel can't do it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    release: String,
    support: Support,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let release = &self.release;
        match self.support {
            Support::Refused(error) => {
                write!(f, "huge pages can't be split here ({error}); Linux 6.12 or later can, this is {release}")
            }
            _ => write!(
                f,
                "the zero part of huge pages can't be given back: that needs Linux 6.12 or later, this is {release}"
            ),
        }
    }
}

impl std::error::Error for Unsupported {}

/// Something else may hold a reference to the page for a moment, and then the kernel does not split it.
const ATTEMPTS: usize = 5;

/// Makes a huge page with a single byte in it, has the kernel split it, and counts the shared zero pages in its place.
pub fn attempt() -> Support {
    if let Err(error) = check_page_size() {
        return Support::Refused(error.into());
    }
    let len = 2 * HUGE_PAGE_SIZE;
    let mapping = match memory::map(len, Protection::ReadWrite) {
        Ok(start) => Range { start, len },
        Err(error) => return Support::Refused(error),
    };
    let result = split_one(Range { start: mapping.start.next_multiple_of(HUGE_PAGE_SIZE), len: HUGE_PAGE_SIZE });
    // SAFETY: the mapping was made above, and nobody else knows of it.
    let _ = unsafe { memory::unmap(mapping) };
    result.unwrap_or_else(Support::Refused)
}

fn split_one(huge: Range) -> Result<Support, Errno> {
    let pagemap = Pagemap::own()?;
    // SAFETY: memory of the caller's that nobody else knows; none of this advice changes contents.
    let advise = |range: Range, advice: Advice| unsafe { memory::advise(range, advice) };
    // A kernel without transparent huge pages refuses, and then there is none to be had.
    let _ = advise(huge, Advice::HugePage);
    // SAFETY: inside memory of the caller's that can be written.
    unsafe { (huge.start as *mut u8).write_volatile(1) };
    if pagemap.bytes_of(huge, Category::Huge)? == 0 {
        // Works whatever the mode is; where it fails, what follows says so.
        let _ = advise(huge, Advice::Collapse);
        if pagemap.bytes_of(huge, Category::Huge)? == 0 {
            return Ok(Support::NoHugePage);
        }
    }
    for _ in 0..ATTEMPTS {
        advise(Range { start: huge.start, len: PAGE_SIZE }, Advice::Cold)?;
        match pagemap.bytes_of(huge, Category::Zero)? {
            0 => std::thread::sleep(Duration::from_millis(1)),
            bytes => return Ok(Support::Works(bytes)),
        }
    }
    Ok(Support::NothingBack)
}

/// Tries it.
///
/// # Errors
/// If it doesn't work; where there was no huge page to try it on, by the kernel's version.
pub fn check() -> Result<(), Unsupported> {
    let release = release();
    match attempt() {
        Support::Works(_) => Ok(()),
        Support::NoHugePage if is_at_least_6_12(&release) => Ok(()),
        support => Err(Unsupported { release, support }),
    }
}

fn release() -> String {
    let mut buffer = crate::sys::procfs::Buffer::new();
    let text = crate::sys::procfs::read(c"/proc/sys/kernel/osrelease", &mut buffer).unwrap_or("an unknown version");
    text.trim().to_owned()
}

fn is_at_least_6_12(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        for (release, enough) in
            [("6.12.0-rc1", true), ("6.18.5", true), ("7.0", true), ("6.2.1-12", false), ("5.15", false), ("", false)]
        {
            assert_eq!(is_at_least_6_12(release), enough, "{release}");
        }
    }

    #[test]
    fn what_the_attempt_finds_agrees_with_the_version() {
        match attempt() {
            Support::Works(bytes) => assert!(is_at_least_6_12(&release()) && bytes > HUGE_PAGE_SIZE / 2),
            Support::NoHugePage => {}
            other => assert!(!is_at_least_6_12(&release()), "{other:?}"),
        }
    }

    #[test]
    fn the_message_says_what_is_needed_and_what_there_is() {
        let old = Unsupported { release: "6.1.0".into(), support: Support::NothingBack };
        assert!(old.to_string().contains("6.12") && old.to_string().contains("6.1.0"));
    }
}
