//! What may be set.

use super::sample::SUBPAGES;
use crate::sys::memory::Range;
use std::time::Duration;

/// A mapping or a part of the address space that is not to be touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exclusion {
    /// These addresses.
    Range(Range),
    /// Every mapping with this name, as `/proc/PID/maps` has it; the brackets of names such as `[heap]` may be left out.
    Mapping(String),
}

impl Exclusion {
    /// Reads `START-END` (hexadecimal addresses, with or without `0x`), or else takes the text for a mapping's name.
    ///
    /// # Errors
    /// An empty text, and a range that ends before it begins.
    pub fn parse(text: &str) -> Result<Exclusion, String> {
        let text = text.trim();
        if text.is_empty() {
            return Err("an exclusion is START-END or the name of a mapping".into());
        }
        let address = |text: &str| usize::from_str_radix(text.trim_start_matches("0x"), 16).ok();
        match text.split_once('-').map(|(start, end)| (address(start), address(end))) {
            Some((Some(start), Some(end))) if start < end => Ok(Exclusion::Range(Range { start, len: end - start })),
            Some((Some(_), Some(_))) => Err(format!("'{text}' ends before it begins")),
            _ => Ok(Exclusion::Mapping(text.to_owned())),
        }
    }

    /// Whether the mapping called `name` is meant.
    pub fn is_mapping(&self, name: &str) -> bool {
        match self {
            Exclusion::Mapping(excluded) => {
                fn bare(name: &str) -> &str {
                    name.trim_start_matches('[').trim_end_matches(']')
                }
                !name.is_empty() && (excluded == name || bare(excluded) == bare(name))
            }
            Exclusion::Range(_) => false,
        }
    }

    /// Whether any of `range` is meant.
    pub fn touches(&self, range: Range) -> bool {
        match self {
            Exclusion::Range(excluded) => excluded.start < range.end() && range.start < excluded.end(),
            Exclusion::Mapping(_) => false,
        }
    }
}

/// How to trim.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// A huge page is under-used when more than this many of its 512 subpages are zero. The source's `max_ptes_none`; 409 is what Meta
    /// ran.
    pub max_zero: usize,
    /// Only say what could go.
    pub dry_run: bool,
    /// What to leave alone in every process.
    pub exclude: Vec<Exclusion>,
    /// Share of one CPU that may be used; `None` for as much as there is.
    pub cpu: Option<f64>,
    /// Bytes a second that may be read of the processes' memory; `None` for no bound.
    pub traffic: Option<usize>,
    /// How often a process is searched for huge pages.
    pub interval: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_zero: 409,
            dry_run: false,
            exclude: Vec::new(),
            cpu: Some(0.01),
            traffic: Some(256 << 20),
            interval: Duration::from_secs(10),
        }
    }
}

impl Options {
    /// The largest threshold that a page can pass.
    pub const MAX_ZERO_MOST: usize = SUBPAGES - 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusions() {
        let range = Exclusion::parse("0x7f0000000000-7f0000400000").unwrap();
        assert_eq!(range, Exclusion::Range(Range { start: 0x7f00_0000_0000, len: 4 << 20 }));
        assert!(range.touches(Range { start: 0x7f00_003f_f000, len: 1 << 21 }) && !range.is_mapping("7f"));
        assert!(!range.touches(Range { start: 0x7f00_0040_0000, len: 1 << 21 }));
        for (text, name, meant) in [
            ("heap", "[heap]", true),
            ("[heap]", "[heap]", true),
            ("[anon:table]", "[anon:table]", true),
            ("anon:table", "[anon:table]", true),
            ("anon:tab", "[anon:table]", false),
            ("/dev/shm/a-b", "/dev/shm/a-b", true),
            ("heap", "", false),
        ] {
            assert_eq!(Exclusion::parse(text).unwrap().is_mapping(name), meant, "{text} of {name}");
        }
        assert!(Exclusion::parse(" ").is_err() && Exclusion::parse("2000-1000").is_err());
    }
}
