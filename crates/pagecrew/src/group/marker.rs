//! What a hold writes beside the file that it changes, so that a later one knows the change for ours if both the holder and its guard were
//! killed: an extended attribute of the file itself (`user.*` on control groups: Linux 5.7), which goes with the group. Where there are
//! none, nothing is written, and such a hold looks like its operator's wish.

use crate::sys::Errno;
use rustix::fs::XattrFlags;
use std::ffi::CStr;
use std::fs::File;

/// The attribute.
pub(super) const NAME: &CStr = c"user.pagecrew.hold";

/// What a hold has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Marker {
    /// The OOM killer is off (version 1). Somebody else had turned it off in these groups below, by their numbers.
    OomKiller { off_below: Vec<u64> },
    /// `memory.high` (version 2) was `before`, and is one of `ours`; `None` is `max`.
    High { before: Option<u64>, ours: [Option<u64>; 2] },
    /// Threads of the kernel were `before` nice, and are as urgent as they can be.
    Nice { before: i32 },
}

impl Marker {
    pub(super) fn text(&self) -> String {
        let number = |number: &Option<u64>| number.map_or("max".into(), |number| number.to_string());
        match self {
            Marker::OomKiller { off_below } => {
                off_below.iter().fold("oom_killer".to_owned(), |text, number| format!("{text} {number}"))
            }
            Marker::High { before, ours: [last, next] } => {
                format!("high {} {} {}", number(before), number(last), number(next))
            }
            Marker::Nice { before } => format!("nice {before}"),
        }
    }

    /// `None` for a text that no hold writes.
    pub(super) fn parse(text: &str) -> Option<Marker> {
        let mut words = text.split(' ');
        let number = |word: &str| if word == "max" { Some(None) } else { word.parse().ok().map(Some) };
        match words.next()? {
            "oom_killer" => {
                let off_below = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
                Some(Marker::OomKiller { off_below })
            }
            "high" => {
                let mut next = || number(words.next()?);
                let marker = Marker::High { before: next()?, ours: [next()?, next()?] };
                words.next().is_none().then_some(marker)
            }
            "nice" => {
                let before = words.next()?.parse().ok().filter(|nice| (-20..20).contains(nice))?;
                words.next().is_none().then_some(Marker::Nice { before })
            }
            _ => None,
        }
    }

    /// Writes it beside `file`. Where that is not possible there is none.
    pub fn write(&self, file: &File) {
        let _ = rustix::fs::fsetxattr(file, NAME, self.text().as_bytes(), XattrFlags::empty());
    }

    /// The one beside `file`, if there is one, or it can't be said.
    pub fn read(file: &File) -> Option<Marker> {
        Marker::find(file).ok().flatten()
    }

    /// The one beside `file`, if there is one.
    ///
    /// # Errors
    /// `ENOMEM` and `EFAULT` where there is no memory for the answer.
    pub fn find(file: &File) -> Result<Option<Marker>, Errno> {
        // Of most files there is none, and then it takes no memory to be told so.
        let length = match rustix::fs::fgetxattr_query(file, NAME) {
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => return Ok(None),
            length => length?,
        };
        let mut text = vec![0; length];
        let length = rustix::fs::fgetxattr(file, NAME, &mut text[..])?;
        Ok(std::str::from_utf8(&text[..length]).ok().and_then(Marker::parse))
    }

    /// Takes away the one beside `file`.
    pub fn remove(file: &File) {
        let _ = rustix::fs::fremovexattr(file, NAME);
    }

    /// Whether markers can be written beside `file`.
    ///
    /// # Errors
    /// `EOPNOTSUPP` on kernels before 5.7.
    #[cfg(test)]
    pub fn possible(file: &File) -> Result<(), Errno> {
        rustix::fs::fsetxattr(file, c"user.pagecrew.test", b"", XattrFlags::empty())?;
        Ok(rustix::fs::fremovexattr(file, c"user.pagecrew.test")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_says_what_was_written() {
        for marker in [
            Marker::OomKiller { off_below: vec![] },
            Marker::OomKiller { off_below: vec![7, 1 << 60] },
            Marker::High { before: None, ours: [Some(4096), None] },
            Marker::High { before: Some(1), ours: [None, Some(8192)] },
            Marker::Nice { before: 0 },
            Marker::Nice { before: -5 },
        ] {
            assert_eq!(Marker::parse(&marker.text()), Some(marker));
        }
        for text in [
            "",
            "high",
            "high 1 2",
            "high 1 2 x",
            "high 1 2 3 4",
            "oom_killer x",
            "nice",
            "nice x",
            "nice 20",
            "nice 1 2",
            "other",
        ] {
            assert_eq!(Marker::parse(text), None, "{text}");
        }
    }

    #[test]
    fn it_is_beside_the_file_until_it_is_taken_away() {
        let file = tempfile::tempfile().unwrap();
        if Marker::possible(&file).is_err() {
            return;
        }
        let marker = Marker::High { before: Some(5), ours: [Some(6), None] };
        assert_eq!(Marker::read(&file), None);
        marker.write(&file);
        assert_eq!(Marker::read(&file), Some(marker));
        Marker::remove(&file);
        assert_eq!(Marker::read(&file), None);
    }
}
