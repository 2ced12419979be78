//! Dropping what of a file is in the page cache.

use super::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Drops what of `range` is in the page cache, but for what is mapped or has yet to be written (`POSIX_FADV_DONTNEED`).
///
/// # Errors
/// `ESPIPE` for what is no file, `EINVAL` for a range that no file can have.
pub fn drop_range(file: &File, range: &Range<u64>) -> Result<(), Errno> {
    let number = |value: u64| libc::off_t::try_from(value).map_err(|_| Errno(libc::EINVAL));
    let (offset, len) = (number(range.start)?, number(range.end.saturating_sub(range.start))?);
    if len == 0 {
        // To the kernel, that is all behind the offset.
        return Ok(());
    }
    // SAFETY: no memory is involved.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        error => Err(Errno(error)),
    }
}

/// Bytes of the first `len` of a file that are in the page cache. It has to be open for both, reading and writing.
#[cfg(test)]
pub(crate) fn cached(file: &File, len: usize) -> usize {
    let mapped = super::shared_file::Mapped::unchanged(file, 0, len).unwrap();
    let mut pages = vec![0u8; len.div_ceil(super::PAGE_SIZE)];
    // SAFETY: the mapping is there, and there is a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(mapped.range().start as *mut _, len, pages.as_mut_ptr()) }, 0);
    pages.iter().filter(|page| **page & 1 > 0).count() * super::PAGE_SIZE
}

/// A file of `len` bytes that are in the page cache and need not be written any more, beside this program. `None`, which is said, where files
/// are in memory only, and where this user can make none.
#[cfg(test)]
pub(crate) fn file(len: usize) -> Option<tempfile::NamedTempFile> {
    use std::io::Write;
    let program = std::env::current_exe().unwrap();
    let Ok(mut file) = tempfile::NamedTempFile::new_in(program.parent().unwrap()) else {
        eprintln!("left out: no file can be made beside {}", program.display());
        return None;
    };
    file.write_all(&vec![7; len]).unwrap();
    file.as_file().sync_all().unwrap();
    drop_range(file.as_file(), &(0..len as u64)).unwrap();
    let on_disk = cached(file.as_file(), len) < len;
    std::fs::read(file.path()).unwrap();
    if !on_disk {
        eprintln!("left out: files are in memory here");
    }
    on_disk.then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_was_dropped_is_cached_no_longer() {
        let Some(file) = file(4 * MIB) else { return };
        let file = file.as_file();
        assert_eq!(cached(file, 4 * MIB), 4 * MIB);
        drop_range(file, &(MIB as u64..3 * MIB as u64)).unwrap();
        drop_range(file, &(MIB as u64..MIB as u64)).unwrap();
        assert_eq!(cached(file, 4 * MIB), 2 * MIB);
        assert_eq!(drop_range(file, &(u64::MAX..u64::MAX)), Err(Errno(libc::EINVAL)));
    }
}
