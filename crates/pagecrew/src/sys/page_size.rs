//! Whether the kernel's pages have the size that this code is built for. On aarch64 that is chosen when a kernel is built.

use super::{Errno, PAGE_SIZE};
use std::fmt;

/// The kernel has pages of another size than [`PAGE_SIZE`], with which nothing here works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSizeError {
    /// The size of the kernel's pages, in bytes.
    pub found: usize,
}

impl fmt::Display for PageSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this kernel has pages of {} bytes and Pagecrew takes pages of {PAGE_SIZE}: start a kernel that has those \
             (on Debian for aarch64: linux-image-arm64 instead of linux-image-arm64-16k)",
            self.found
        )
    }
}

impl std::error::Error for PageSizeError {}

impl From<PageSizeError> for Errno {
    /// `EOPNOTSUPP`.
    fn from(_: PageSizeError) -> Errno {
        Errno(libc::EOPNOTSUPP)
    }
}

/// Checks that the kernel's pages have [`PAGE_SIZE`] bytes.
///
/// # Errors
/// If they have not.
pub fn check_page_size() -> Result<(), PageSizeError> {
    // SAFETY: takes no pointers; Linux knows this name.
    check(unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize)
}

fn check(found: usize) -> Result<(), PageSizeError> {
    if found == PAGE_SIZE { Ok(()) } else { Err(PageSizeError { found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_size_is_an_error_that_says_what_helps() {
        assert_eq!((check_page_size(), check(PAGE_SIZE)), (Ok(()), Ok(())));
        let error = check(16384).unwrap_err();
        assert_eq!(error, PageSizeError { found: 16384 });
        assert!(error.to_string().contains("pages of 16384 bytes"), "{error}");
        assert_eq!(Errno::from(error), Errno(libc::EOPNOTSUPP));
    }
}
