//! The mappings of this process (`/proc/self/maps`), read piece by piece.

use super::Errno;
use super::memory::Range;

/// Calls `each` for every private anonymous mapping that can be read and written, the main stack excepted.
///
/// # Errors
/// Those of opening and reading `/proc/self/maps`.
pub fn private_anonymous(mut each: impl FnMut(Range)) -> Result<(), Errno> {
    // SAFETY: the path is a C string; the descriptor is ours and closed below; reads stay within the buffer.
    unsafe {
        let file = libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(Errno::last());
        }
        let mut buffer = vec![0u8; 8192];
        let mut filled = 0;
        let result = loop {
            let count = libc::read(file, buffer.as_mut_ptr().add(filled).cast(), buffer.len() - filled);
            if count <= 0 {
                break if count == 0 { Ok(()) } else { Err(Errno::last()) };
            }
            filled += count as usize;
            let mut begin = 0;
            while let Some(end) = buffer[begin..filled].iter().position(|&byte| byte == b'\n') {
                if let Some(range) = std::str::from_utf8(&buffer[begin..begin + end]).ok().and_then(parse) {
                    each(range);
                }
                begin += end + 1;
            }
            // The rest of an incomplete line; a line longer than the buffer can only be one with a long path: not anonymous.
            buffer.copy_within(begin..filled, 0);
            filled -= begin;
            if filled == buffer.len() {
                filled = 0;
            }
        };
        libc::close(file);
        result
    }
}

/// The range of a line, if it is a private anonymous read-write mapping.
fn parse(line: &str) -> Option<Range> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or("");
    let anonymous = inode == "0" && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:"));
    if !rights.starts_with("rw") || !rights.ends_with('p') || !anonymous {
        return None;
    }
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some(Range { start, len: end.checked_sub(start)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};

    #[test]
    fn lines() {
        let found = |line| parse(line).map(|range| (range.start, range.len));
        assert_eq!(found("7f0000000000-7f0000002000 rw-p 00000000 00:00 0 "), Some((0x7f00_0000_0000, 0x2000)));
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0                          [heap]"), Some((0x1000, 0x2000)));
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0   [stack]"), None);
        assert_eq!(found("1000-3000 rw-s 00000000 00:01 0   /dev/zero (deleted)"), None);
        assert_eq!(found("1000-3000 rw-p 00000000 fe:00 77  /lib/x.so"), None);
        assert_eq!(found("1000-3000 r--p 00000000 00:00 0 "), None);
        assert_eq!(found("garbage"), None);
        assert_eq!(found("3000-1000 rw-p 0 0:0 0"), None);
    }

    #[test]
    fn a_new_mapping_is_found() {
        let range = Range { start: map(64 << 20, Protection::ReadWrite).unwrap(), len: 64 << 20 };
        let mut found = false;
        private_anonymous(|mapping| found |= mapping.start <= range.start && range.end() <= mapping.end()).unwrap();
        assert!(found);
        // SAFETY: the test's own mapping.
        unsafe { unmap(range).unwrap() };
    }
}
