//! Huge pages: whether they can be had, found and split.

use super::check::Check;
use super::scratch::Scratch;
use pagecrew::sys::pagemap::{Category, Pagemap};
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use pagecrew::trim::support::{self, Support};

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![mode(), scan(), zero_subpages()]
}

const MODE_FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

fn mode() -> Check {
    const NAME: &str = "transparent huge pages";
    const COST: &str = "large memory is made of small pages: more page faults and slower access";
    let text = match std::fs::read_to_string(MODE_FILE) {
        Ok(text) => text,
        Err(error) => {
            return Check::missing(NAME, error.to_string(), COST, "needs a kernel with CONFIG_TRANSPARENT_HUGEPAGE");
        }
    };
    // SAFETY: reads a flag of this process; takes no pointers.
    if unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } == 1 {
        return Check::off(
            NAME,
            "off for this process",
            COST,
            "start it where PR_SET_THP_DISABLE has not been set (by a container run-time or a service manager)",
        );
    }
    match chosen(&text) {
        Some("never") => {
            Check::off(NAME, "never", COST, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        }
        mode => Check::ok(NAME, mode.unwrap_or("unknown mode")),
    }
}

/// The word in brackets.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(mode, _)| mode)
}

fn scan() -> Check {
    // The request itself: `sys::pagemap::bytes_of` has another way to find what is present.
    let tried =
        Scratch::new(PAGE_SIZE).and_then(|scratch| Pagemap::own()?.bytes_of(scratch.range(), Category::Present));
    Check::tried("PAGEMAP_SCAN", tried.map(drop), "huge pages that are mostly zero can't be found", "needs Linux 6.7")
}

fn zero_subpages() -> Check {
    const NAME: &str = "zero part of huge pages";
    const COST: &str = "the zero part of a huge page can't be given back";
    const REMEDY: &str = "needs Linux 6.12";
    match support::attempt() {
        Support::Works(bytes) => {
            Check::ok(NAME, format!("{} of {} pages given back", bytes / PAGE_SIZE, HUGE_PAGE_SIZE / PAGE_SIZE))
        }
        Support::NothingBack => Check::missing(NAME, "a split gave nothing back", COST, REMEDY),
        Support::NoHugePage => {
            Check::off(NAME, "no huge page could be had to try it", COST, "turn transparent huge pages on")
        }
        Support::Refused(error) => Check::missing(NAME, error.to_string(), COST, REMEDY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
    }
}
