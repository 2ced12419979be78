//! Pressure stall information of the machine: for how long tasks have waited for a resource (`/proc/pressure`, 4.20).

use super::{Errno, procfs};
use std::path::Path;

/// What tasks wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// A CPU.
    Cpu,
    /// Memory: reclaim, refaults and swap.
    Memory,
    /// Storage.
    Io,
}

impl Resource {
    /// All of them.
    pub const ALL: [Resource; 3] = [Resource::Memory, Resource::Cpu, Resource::Io];

    /// The name of its file.
    pub fn name(self) -> &'static str {
        match self {
            Resource::Cpu => "cpu",
            Resource::Memory => "memory",
            Resource::Io => "io",
        }
    }
}

/// One line of a file. Shares of time are between 0 and 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stalled {
    /// Share of the last 10 seconds.
    pub avg10: f64,
    /// Share of the last minute.
    pub avg60: f64,
    /// Share of the last five minutes.
    pub avg300: f64,
    /// Microseconds since the machine was started.
    pub total_us: u64,
}

/// How long tasks have waited for one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// While at least one task waited.
    pub some: Stalled,
    /// While all tasks that had something to do waited. Of the CPU since 5.13.
    pub full: Option<Stalled>,
}

/// The pressure of `resource`. `root` is `/`, or the top of a made-up tree.
///
/// # Errors
/// `ENOENT` or `EOPNOTSUPP` where pressure information is off; `EILSEQ` where the file has no line of it.
pub fn read(root: &Path, resource: Resource) -> Result<Pressure, Errno> {
    let text = procfs::text_under(root, &format!("proc/pressure/{}", resource.name()), 1024)?;
    parse(&text).ok_or(Errno(libc::EILSEQ))
}

fn parse(text: &str) -> Option<Pressure> {
    let line = |name: &str| text.lines().find_map(|line| stalled(line.strip_prefix(name)?.strip_prefix(' ')?));
    Some(Pressure { some: line("some")?, full: line("full") })
}

/// `avg10=0.00 avg60=0.00 avg300=0.00 total=0`; `None` unless everything is there.
fn stalled(fields: &str) -> Option<Stalled> {
    let mut found = Stalled::default();
    let mut seen = 0;
    for field in fields.split_ascii_whitespace() {
        let (name, value) = field.split_once('=')?;
        let share = || value.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent)).map(|p| p / 100.0);
        match name {
            "avg10" => found.avg10 = share()?,
            "avg60" => found.avg60 = share()?,
            "avg300" => found.avg300 = share()?,
            "total" => found.total_us = value.parse().ok()?,
            _ => continue,
        }
        seen += 1;
    }
    (seen == 4).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_of_kernels() {
        let some = Stalled { avg10: 0.125, avg60: 0.01, avg300: 0.0, total_us: 4711 };
        // 5.10 has no full line of the CPU.
        assert_eq!(parse("some avg10=12.50 avg60=1.00 avg300=0.00 total=4711\n"), Some(Pressure { some, full: None }));
        let text =
            "some avg10=12.50 avg60=1.00 avg300=0.00 total=4711\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n";
        let full = Stalled { total_us: 9, ..Stalled::default() };
        assert_eq!(parse(text), Some(Pressure { some, full: Some(full) }));
    }

    #[test]
    fn what_is_cut_or_nonsense_is_no_pressure() {
        let text = "some avg10=1.00 avg60=1.00 avg300=0.00 total=4711";
        for end in 0..text.len() {
            let cut = parse(&text[..end]);
            // Only the last number may be cut without a trace.
            assert!(cut.is_none() || end > text.len() - 4, "{}", &text[..end]);
        }
        for text in [
            "some avg10=nan avg60=0 avg300=0 total=1",
            "some avg10=101 avg60=0 avg300=0 total=1",
            "some avg10=-1 avg60=0 avg300=0 total=1",
            "something avg10=0 avg60=0 avg300=0 total=1",
            "full avg10=0 avg60=0 avg300=0 total=1",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn this_machine_and_one_without() {
        let none = tempfile::tempdir().unwrap();
        for resource in Resource::ALL {
            if let Ok(pressure) = read(Path::new("/"), resource) {
                assert!(pressure.some.avg10 <= 1.0);
            }
            assert_eq!(read(none.path(), resource), Err(Errno(libc::ENOENT)));
        }
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "((some|full) (avg10|avg60|total)=-?[0-9.]{0,25} ?\n?|[ -~]{0,20}\n){0,12}") {
            parse(&text);
        }
    }
}
