//! DAMON has the kernel page out what nobody has used lately (DAMOS, by its files in sysfs: Linux 5.18): another way to have memory free before
//! somebody takes it.

use super::keep::until_the_end;
use super::say;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::BufRead;
use std::ops::RangeInclusive;
use std::path::Path;

/// Where DAMON is set up.
pub const ADMIN: &str = "/sys/kernel/mm/damon/admin";
/// What memory there is.
pub const IOMEM: &str = "/proc/iomem";

/// All of the machine's memory is looked at, and what was not used for a second goes, up to 1 GiB a second and half of the time: the intervals
/// are the kernel's own for its proactive reclaim, and the rest is as much as readers of a fast disk would want of it.
const SETTINGS: [(&str, &str); 12] = [
    ("monitoring_attrs/intervals/sample_us", "5000"),
    ("monitoring_attrs/intervals/aggr_us", "100000"),
    ("schemes/0/action", "pageout"),
    ("schemes/0/access_pattern/sz/min", "4096"),
    ("schemes/0/access_pattern/sz/max", "18446744073709551615"),
    ("schemes/0/access_pattern/nr_accesses/min", "0"),
    ("schemes/0/access_pattern/nr_accesses/max", "0"),
    ("schemes/0/access_pattern/age/min", "10"),
    ("schemes/0/access_pattern/age/max", "4294967295"),
    ("schemes/0/quotas/ms", "500"),
    ("schemes/0/quotas/bytes", "1073741824"),
    ("schemes/0/quotas/reset_interval_ms", "1000"),
];

/// Has it do so, says so, and ends it at the end of its input. `admin` and `iomem` are [`ADMIN`] and [`IOMEM`].
///
/// # Errors
/// If somebody else has set DAMON up, or the kernel refuses.
pub fn keep(admin: &Path, iomem: &Path, input: impl BufRead) -> Result<()> {
    let memory = memory(&fs::read_to_string(iomem).with_context(|| iomem.display().to_string())?);
    ensure!(!memory.is_empty(), "{} shows no memory", iomem.display());
    let all = admin.join("kdamonds");
    let number = all.join("nr_kdamonds");
    let there = fs::read_to_string(&number).with_context(|| number.display().to_string())?;
    ensure!(there.trim() == "0", "DAMON is in use: {} is {}", number.display(), there.trim());
    write(&number, "1")?;
    let started = start(&all.join("0"), &memory);
    let said = started.and_then(|()| say("")).and_then(|()| until_the_end(input));
    // One that never began can't be ended.
    let _ = write(&all.join("0/state"), "off");
    write(&number, "0").and(said)
}

fn start(kdamond: &Path, memory: &[RangeInclusive<u64>]) -> Result<()> {
    write(&kdamond.join("contexts/nr_contexts"), "1")?;
    let context = kdamond.join("contexts/0");
    let set = |name: &str, value: &str| write(&context.join(name), value);
    set("operations", "paddr")?;
    set("targets/nr_targets", "1")?;
    set("targets/0/regions/nr_regions", &memory.len().to_string())?;
    for (index, range) in memory.iter().enumerate() {
        set(&format!("targets/0/regions/{index}/start"), &range.start().to_string())?;
        set(&format!("targets/0/regions/{index}/end"), &(range.end() + 1).to_string())?;
    }
    set("schemes/nr_schemes", "1")?;
    SETTINGS.iter().try_for_each(|(name, value)| set(name, value))?;
    write(&kdamond.join("state"), "on")
}

fn write(path: &Path, value: &str) -> Result<()> {
    fs::write(path, value).with_context(|| format!("{value} for {}", path.display()))
}

/// The ranges of the machine's memory; none where they are not shown.
fn memory(iomem: &str) -> Vec<RangeInclusive<u64>> {
    let range = |line: &str| {
        let (range, name) = line.split_once(" : ")?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let range = number(start)?..=number(end)?;
        (name == "System RAM" && *range.end() > 0).then_some(range)
    };
    // What is part of another one begins with spaces.
    iomem.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const MEMORY: &str = "00000000-00000fff : Reserved\n00001000-0009ffff : System RAM\n000a0000-000fffff : Reserved\n\
                          00100000-7fffffff : System RAM\n  01000000-020067ff : Kernel code\nfec00000-fec003ff : IOAPIC 0\n";

    /// Files as the kernel would have them, each made beforehand.
    fn made_up(kdamonds: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let context = directory.path().join("kdamonds/0/contexts/0");
        for name in ["monitoring_attrs/intervals", "targets/0/regions/0", "targets/0/regions/1", "schemes/0/quotas"] {
            fs::create_dir_all(context.join(name)).unwrap();
        }
        for name in ["sz", "nr_accesses", "age"] {
            fs::create_dir_all(context.join("schemes/0/access_pattern").join(name)).unwrap();
        }
        fs::write(directory.path().join("kdamonds/nr_kdamonds"), kdamonds).unwrap();
        fs::write(directory.path().join("iomem"), MEMORY).unwrap();
        (directory, context)
    }

    #[test]
    fn all_memory_is_looked_at_and_what_is_unused_goes() {
        let (directory, context) = made_up("0\n");
        let read = |name: &str| fs::read_to_string(context.join(name)).unwrap();
        keep(directory.path(), &directory.path().join("iomem"), &b""[..]).unwrap();
        assert_eq!(read("operations"), "paddr");
        assert_eq!(read("schemes/0/action"), "pageout");
        let ranges = ["0/start", "0/end", "1/start", "1/end"].map(|name| read(&format!("targets/0/regions/{name}")));
        assert_eq!(ranges, ["4096", "655360", "1048576", "2147483648"]);
        let of_all = |name: &str| fs::read_to_string(directory.path().join("kdamonds").join(name)).unwrap();
        assert_eq!((of_all("0/state").as_str(), of_all("nr_kdamonds").as_str()), ("off", "0"));
    }

    #[test]
    fn one_that_is_in_use_is_left_alone() {
        let (directory, context) = made_up("1\n");
        let error = keep(directory.path(), &directory.path().join("iomem"), &b""[..]).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error:#}");
        assert!(!context.join("operations").exists());
        assert_eq!(fs::read_to_string(directory.path().join("kdamonds/nr_kdamonds")).unwrap(), "1\n");
    }

    #[test]
    fn addresses_that_are_not_shown_are_no_memory() {
        // To whoever may not see them, all are 0.
        assert_eq!(memory("00000000-00000000 : System RAM\n"), Vec::new());
        assert_eq!(memory("garbage\n12 : System RAM\nzz-1 : System RAM\n"), Vec::new());
    }
}
