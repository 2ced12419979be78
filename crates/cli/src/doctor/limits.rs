//! Settings that limit address space and mappings.

use super::check::Check;
use pagecrew::sys::memory::{self, Protection, Range};
use pagecrew::units::Bytes;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![reservation(), overcommit(), mappings(), address_space()]
}

/// The largest reservation that is tried, and the smallest that is of use.
const RESERVATION: std::ops::RangeInclusive<u32> = 30..=46;

/// Address space that can be had at once without memory behind it, in powers of two.
fn largest_reservation() -> Option<u64> {
    RESERVATION.rev().map(|shift| 1usize << shift).find_map(|len| {
        let start = memory::map(len, Protection::None).ok()?;
        // SAFETY: nobody else knows the mapping.
        let _ = unsafe { memory::unmap(Range { start, len }) };
        Some(len as u64)
    })
}

fn reservation() -> Check {
    const NAME: &str = "address space to reserve";
    match largest_reservation() {
        Some(len) => Check::ok(NAME, Bytes(len).to_string()),
        None => Check::off(
            NAME,
            "less than 1 GiB",
            "large allocations stay with the program's own malloc",
            "raise the limit on address space: ulimit -v unlimited",
        ),
    }
}

/// The number in a file below `/proc/sys/vm`.
fn setting(name: &str) -> Result<u64, String> {
    let text = std::fs::read_to_string(format!("/proc/sys/vm/{name}")).map_err(|error| error.to_string())?;
    text.trim().parse().map_err(|_| format!("'{}' is not a number", text.trim()))
}

fn overcommit() -> Check {
    const NAME: &str = "overcommit";
    const COST: &str = "free memory that is kept for reuse counts against the machine's commit limit";
    const REMEDY: &str = "as root: sysctl vm.overcommit_memory=0; or keep little with --retain";
    match setting("overcommit_memory") {
        Ok(0) => Check::ok(NAME, "heuristic (0)"),
        Ok(1) => Check::ok(NAME, "always (1)"),
        Ok(2) => Check::off(NAME, "strict (2)", COST, REMEDY),
        Ok(other) => Check::ok(NAME, other.to_string()),
        Err(why) => Check::off(NAME, why, "not known", "make /proc/sys/vm/overcommit_memory readable"),
    }
}

fn mappings() -> Check {
    const NAME: &str = "mappings per process";
    /// The kernel's own default.
    const USUAL: u64 = 65530;
    const COST: &str = "large spans may have to stay with the program's own malloc, and memory is moved less often";
    const REMEDY: &str = "as root: sysctl vm.max_map_count=65530";
    match setting("max_map_count") {
        Ok(count) if count >= USUAL => Check::ok(NAME, format!("vm.max_map_count {count}")),
        Ok(count) => Check::off(NAME, format!("vm.max_map_count {count}"), COST, REMEDY),
        Err(why) => Check::off(NAME, why, "not known", "make /proc/sys/vm/max_map_count readable"),
    }
}

fn address_space() -> Check {
    const NAME: &str = "limit on address space";
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call only writes to `limit`.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
    assert_eq!(result, 0, "getrlimit can't fail with a valid address");
    if limit.rlim_cur == libc::RLIM_INFINITY {
        return Check::ok(NAME, "unlimited");
    }
    Check::off(
        NAME,
        Bytes(limit.rlim_cur).to_string(),
        "less address space is reserved; what does not fit stays with the program's own malloc",
        "ulimit -v unlimited",
    )
}
