//! What the memory controller says of one group: the texts of the files in its directory, of both versions.
//!
//! Version 2 has `memory.events.local` (5.2; before, `memory.events` counts for the groups below as well) and `memory.stat` with the fields
//! of 5.9; version 1 has `memory.failcnt` and the fields that begin with `total_`. A field that a kernel does not have counts as 0.

use super::{PAGE_SIZE, procfs};

/// `memory.stat`, as far as reclaim ahead of demand needs it. In bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// Page cache that was used once at most, lately.
    pub inactive_file: u64,
    /// Page cache that has to be written before it can go, or is being written.
    pub unwritten: u64,
    /// Memory that came back, so far, after it was reclaimed too early: page cache of the working set (version 2 alone says so), and
    /// anonymous memory.
    pub returned: u64,
}

/// What the text of `memory.stat` says. Version 1 has the sums of a group and those below it in fields of their own.
pub fn stat(text: &str, version_1: bool) -> Stat {
    let mut stat = Stat::default();
    let bytes = |value: u64| value.saturating_mul(PAGE_SIZE as u64);
    for line in text.lines() {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let Ok(value) = value.trim().parse::<u64>() else { continue };
        let name = match (name.strip_prefix("total_"), version_1) {
            (Some(name), true) => name,
            (None, false) => name,
            _ => continue,
        };
        match name {
            "inactive_file" => stat.inactive_file = value,
            "file_dirty" | "file_writeback" | "dirty" | "writeback" => {
                stat.unwritten = stat.unwritten.saturating_add(value)
            }
            "workingset_restore_file" | "workingset_refault_anon" | "workingset_restore" => {
                stat.returned = stat.returned.saturating_add(bytes(value));
            }
            _ => {}
        }
    }
    stat
}

/// What a group has taken, by its `memory.stat`. In bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taking {
    /// Page cache on the kernel's lists.
    pub files: u64,
    /// What its tasks have taken so far: only a difference says something. In version 1, where the kernel counts a folio of any size once, it is
    /// too little for what is read in large ones.
    pub taken: u64,
    /// In version 1, what of its page cache has come back after it was reclaimed, which is counted by its size (5.9).
    pub back: u64,
}

/// What the text of `memory.stat` says of that. `None` where it has not what every kernel's has.
pub fn taking(text: &str, version_1: bool) -> Option<Taking> {
    let pages = |name: &str| field(text, name).map(|pages| pages.saturating_mul(PAGE_SIZE as u64));
    let files = |inactive: &str, active: &str| Some(field(text, inactive)?.saturating_add(field(text, active)?));
    if version_1 {
        return Some(Taking {
            files: files("total_inactive_file", "total_active_file")?,
            taken: pages("total_pgpgin")?,
            back: pages("total_workingset_refault_file").unwrap_or(0),
        });
    }
    // What it has, and what was reclaimed of it.
    let has = field(text, "anon")?.saturating_add(field(text, "file")?);
    let taken = has.saturating_add(pages("pgsteal")?);
    Some(Taking { files: files("inactive_file", "active_file")?, taken, back: 0 })
}

/// How often tasks were at the limit, `memory.max` or `memory.high`, so far: the text of `memory.events.local` or `memory.events`. `None` where
/// it does not say.
pub fn times_at_limit(text: &str) -> Option<u64> {
    let of = |name: &str| field(text, name);
    Some(of("high")?.saturating_add(of("max")?))
}

/// How often the group had used up its CPU quota (`nr_throttled` in the text of `cpu.stat`).
pub fn throttled(text: &str) -> Option<u64> {
    field(text, "nr_throttled")
}

/// For how long some task of the group has waited for memory so far, in microseconds (the text of `memory.pressure`, 4.20).
pub fn stall_us(text: &str) -> Option<u64> {
    procfs::parse_stall(text)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    /// `memory.stat` of version 2, of 5.10 to 6.18.
    const V2: &str = "anon 4096\nfile 8192\nkernel_stack 0\nfile_mapped 0\nfile_dirty 4096\nfile_writeback 8192\ninactive_anon 1\nactive_anon 2\n\
                      inactive_file 400000\nactive_file 100000\nunevictable 0\nworkingset_refault_anon 3\nworkingset_refault_file 1000\n\
                      workingset_activate_file 9\nworkingset_restore_anon 2\nworkingset_restore_file 5\nworkingset_nodereclaim 0\npgsteal 7\n";
    /// `memory.stat` of version 1, of 6.18.
    const V1: &str = "cache 1\nrss 2\ndirty 1\nwriteback 1\nworkingset_refault_anon 1\ninactive_file 5\nhierarchical_memory_limit 268435456\n\
                      total_cache 8192\ntotal_dirty 4096\ntotal_writeback 8192\ntotal_workingset_refault_anon 3\n\
                      total_workingset_refault_file 1000\ntotal_inactive_file 400000\ntotal_active_file 100000\n";

    #[test]
    fn statistics_of_both_versions() {
        let common = Stat { inactive_file: 400_000, unwritten: 12_288, returned: 8 * PAGE };
        assert_eq!(stat(V2, false), common);
        assert_eq!(stat(V1, true), Stat { returned: 3 * PAGE, ..common });
        // Files and the rest together: before 5.9.
        assert_eq!(
            stat("inactive_file 7\nworkingset_restore 2\n", false),
            Stat { inactive_file: 7, unwritten: 0, returned: 2 * PAGE }
        );
        for (text, version_1) in
            [("", false), ("inactive_file", false), ("inactive_file x\n", false), (V1, false), (V2, true)]
        {
            assert_eq!(stat(text, version_1).returned, if text == V1 { PAGE } else { 0 }, "{text}");
        }
    }

    #[test]
    fn what_groups_of_both_versions_take() {
        assert_eq!(taking(V2, false), Some(Taking { files: 500_000, taken: 4096 + 8192 + 7 * PAGE, back: 0 }));
        let text = format!("{V1}total_pgpgin 9\n");
        let of_v1 = Taking { files: 500_000, taken: 9 * PAGE, back: 1000 * PAGE };
        assert_eq!(taking(&text, true), Some(of_v1));
        let old = text.replace("total_workingset_refault_file", "total_workingset_refault");
        assert_eq!(taking(&old, true), Some(Taking { back: 0, ..of_v1 }));
        for (text, version_1) in
            [("", false), ("", true), (V1, true), (V1, false), (V2, true), ("anon 1\nfile x\n", false)]
        {
            assert_eq!(taking(text, version_1), None, "{text}");
        }
    }

    #[test]
    fn events_of_every_kernel() {
        assert_eq!(times_at_limit("low 0\nhigh 3\nmax 40\noom 0\noom_kill 0\n"), Some(43));
        assert_eq!(
            times_at_limit("low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\noom_group_kill 0\nsock_throttled 0\n"),
            Some(7)
        );
        for text in
            ["", "high 3\n", "max 4\n", "high 3\nmax \n", "high 3\nmax x\n", "maximum 3\nhigher 4\n", "high 3\nma"]
        {
            assert_eq!(times_at_limit(text), None, "{text:?}");
        }
        assert_eq!(throttled("usage_usec 7\nnr_periods 5\nnr_throttled 4\nthrottled_usec 9\n"), Some(4));
        assert_eq!(throttled("usage_usec 7\n"), None);
    }

    proptest! {
        #[test]
        fn nothing_makes_them_panic(text in "(total_)?([a-z_]{0,24} ?-?[0-9]{0,25}\n|[ -~]{0,30}\n){0,40}", cut in 0usize..400) {
            for text in [&text[..], V1.get(..cut).unwrap_or(V1), V2.get(..cut).unwrap_or(V2)] {
                stat(text, true);
                stat(text, false);
                taking(text, true);
                taking(text, false);
                times_at_limit(text);
                throttled(text);
                stall_us(text);
            }
        }
    }
}
