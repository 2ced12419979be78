//! What the kernel counts of reclaim, swap and refaults, each kept apart: `/proc/vmstat` for those who watch a machine. (`vmstat` has the sums
//! of them that a service decides by.)

use super::{Errno, PAGE_SIZE, procfs};
use std::path::Path;

/// More than any kernel's file has.
const FILE_MOST: usize = 64 << 10;

/// What was counted since the machine was started. `None` is what this kernel does not count. Reclaim inside control groups at their own limits
/// is not counted in any of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    /// How often tasks had to reclaim for themselves (`allocstall_*`).
    pub stalls: Option<u64>,
    /// Bytes that tasks looked at to reclaim for themselves.
    pub direct_scanned: Option<u64>,
    /// Bytes that tasks reclaimed for themselves.
    pub direct_reclaimed: Option<u64>,
    /// Bytes that the kernel's threads looked at, or somebody who asked for reclaim (`kswapd`, `khugepaged`, `proactive`).
    pub background_scanned: Option<u64>,
    /// Bytes that were reclaimed that way.
    pub background_reclaimed: Option<u64>,
    /// Bytes that came back from swap.
    pub swapped_in: Option<u64>,
    /// Bytes that went to swap.
    pub swapped_out: Option<u64>,
    /// Bytes of anonymous memory that were reclaimed and soon needed again (5.9).
    pub refaulted_anon: Option<u64>,
    /// Bytes of files that were reclaimed and soon read again (3.15; before 5.9 together with the other ones).
    pub refaulted_file: Option<u64>,
}

/// As it is now. `root` is `/`, or the top of a made-up tree.
///
/// # Errors
/// Those of `open` and `read`.
pub fn read(root: &Path) -> Result<Activity, Errno> {
    Ok(parse(&procfs::text_under(root, "proc/vmstat", FILE_MOST)?))
}

pub(super) fn parse(text: &str) -> Activity {
    let mut activity = Activity::default();
    // The last line may be cut in the middle of its number.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines() {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let Ok(count) = value.trim().parse::<u64>() else { continue };
        let add = |place: &mut Option<u64>, amount: u64| *place = Some(place.unwrap_or(0).saturating_add(amount));
        let bytes = count.saturating_mul(PAGE_SIZE as u64);
        match name {
            "pgscan_direct" => activity.direct_scanned = Some(bytes),
            "pgsteal_direct" => activity.direct_reclaimed = Some(bytes),
            "pgscan_kswapd" | "pgscan_khugepaged" | "pgscan_proactive" => add(&mut activity.background_scanned, bytes),
            "pgsteal_kswapd" | "pgsteal_khugepaged" | "pgsteal_proactive" => {
                add(&mut activity.background_reclaimed, bytes);
            }
            // From a disk, and from compressed memory (zswap).
            "pswpin" | "zswpin" => add(&mut activity.swapped_in, bytes),
            "pswpout" => activity.swapped_out = Some(bytes),
            "workingset_refault_anon" => activity.refaulted_anon = Some(bytes),
            "workingset_refault_file" | "workingset_refault" => activity.refaulted_file = Some(bytes),
            name if name == "allocstall" || name.starts_with("allocstall_") => add(&mut activity.stalls, count),
            _ => {}
        }
    }
    activity
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn counters_of_kernels() {
        // 5.10.
        let old = "workingset_refault_anon 1\nworkingset_refault_file 2\npswpin 3\npswpout 4\nallocstall_dma 0\nallocstall_normal 5\n\
                   allocstall_movable 6\npgsteal_kswapd 7\npgsteal_direct 8\npgscan_kswapd 9\npgscan_direct 10\npgscan_direct_throttle 11\n\
                   pgscan_anon 12\npgsteal_anon 13\n";
        let expected = Activity {
            stalls: Some(11),
            direct_scanned: Some(10 * PAGE),
            direct_reclaimed: Some(8 * PAGE),
            background_scanned: Some(9 * PAGE),
            background_reclaimed: Some(7 * PAGE),
            swapped_in: Some(3 * PAGE),
            swapped_out: Some(4 * PAGE),
            refaulted_anon: Some(PAGE),
            refaulted_file: Some(2 * PAGE),
        };
        assert_eq!(parse(old), expected);
        // 6.18 counts who reclaims apart.
        let new = format!(
            "{old}pgsteal_khugepaged 100\npgsteal_proactive 200\npgscan_khugepaged 300\npgscan_proactive 400\nallocstall_device 1\nzswpin 50\n"
        );
        let expected = Activity {
            swapped_in: Some(53 * PAGE),
            stalls: Some(12),
            background_scanned: Some(709 * PAGE),
            background_reclaimed: Some(307 * PAGE),
            ..expected
        };
        assert_eq!(parse(&new), expected);
        // Without swap.
        let activity = parse("pgsteal_kswapd 1\npgscan_kswapd 1\nallocstall_normal 0\n");
        assert_eq!((activity.swapped_in, activity.stalls, activity.refaulted_anon), (None, Some(0), None));
    }

    #[test]
    fn a_number_that_was_cut_is_not_taken() {
        assert_eq!(parse("pswpin 123\npswpout 12").swapped_out, None);
        for text in ["", "pswpin", "pswpin x\n", "pswpin -1\n", "pswpin 99999999999999999999\n", "\0\0\n"] {
            assert_eq!(parse(text), Activity::default(), "{text:?}");
        }
        assert_eq!(parse(&format!("pswpin {}\n", u64::MAX)).swapped_in, Some(u64::MAX));
    }

    #[test]
    fn this_machine_counts_all_of_it_but_swap() {
        let activity = read(Path::new("/")).unwrap();
        assert!(activity.stalls.is_some() && activity.direct_scanned.is_some() && activity.refaulted_file.is_some());
        assert_eq!(read(tempfile::tempdir().unwrap().path()), Err(Errno(libc::ENOENT)));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "((pgscan_|pgsteal_|allocstall_)[a-z]{0,9} -?[0-9]{0,25}\n|[ -~]{0,20}\n){0,30}") {
            parse(&text);
        }
    }
}
