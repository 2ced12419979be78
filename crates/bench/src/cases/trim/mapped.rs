//! How much memory a part of another program really has.

use anyhow::{Context, Result};

/// A range of a process's addresses.
#[derive(Debug, Clone, Copy)]
pub struct Mapped {
    pub pid: u32,
    pub start: usize,
    pub len: usize,
}

/// What backs a range, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backing {
    /// Memory of every kind. The page of zeroes that all processes share is none.
    pub resident: usize,
    /// Huge pages.
    pub huge: usize,
}

impl Mapped {
    /// What backs the range now, by the kernel's own walk over the page tables.
    ///
    /// # Errors
    /// If the process has ended or is somebody else's.
    pub fn backing(&self) -> Result<Backing> {
        let path = format!("/proc/{}/smaps", self.pid);
        backing(&std::fs::read_to_string(&path).context(path)?, self.start, self.start + self.len)
    }
}

/// Sums up the mappings of `smaps` that lie between `start` and `end`.
fn backing(smaps: &str, start: usize, end: usize) -> Result<Backing> {
    let mut sum = Backing { resident: 0, huge: 0 };
    let mut inside = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(key) = words.next() else { continue };
        if let Some((from, to)) = key.split_once('-').filter(|_| !key.ends_with(':')) {
            inside = usize::from_str_radix(from, 16)? >= start && usize::from_str_radix(to, 16)? <= end;
        }
        let field = match key {
            "Rss:" => &mut sum.resident,
            "AnonHugePages:" => &mut sum.huge,
            _ => continue,
        };
        if inside {
            *field += words.next().context(key.to_owned())?.parse::<usize>()? << 10;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Running;

    const SMAPS: &str = "\
400000-600000 r-xp 00000000 fe:00 17 /usr/bin/a-b
Size:               2048 kB
Rss:                1000 kB
AnonHugePages:         0 kB
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 
Rss:                2052 kB
Pss:                2052 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac sd hg
7f0000400000-7f0000600000 rw-p 00000000 00:00 0 
Rss:                   4 kB
AnonHugePages:         0 kB
7f0000600000-7f0000800000 rw-p 00000000 00:00 0 
Rss:                2048 kB
AnonHugePages:      2048 kB
";

    #[test]
    fn only_what_lies_in_the_range_counts() {
        let found = backing(SMAPS, 0x7f00_0000_0000, 0x7f00_0060_0000).unwrap();
        assert_eq!(found, Backing { resident: 2056 << 10, huge: 2 << 20 });
        assert_eq!(backing("", 0, usize::MAX).unwrap(), Backing { resident: 0, huge: 0 });
    }

    #[test]
    fn a_real_program() {
        let arguments = ["-c", "echo 0; read x"];
        let mut shell = Running::start(std::process::Command::new("sh").args(arguments)).unwrap();
        shell.figure().unwrap();
        let all = Mapped { pid: shell.pid(), start: 0, len: usize::MAX }.backing().unwrap();
        assert!((100 << 10..16 << 20).contains(&all.resident), "{all:?}");
    }
}
