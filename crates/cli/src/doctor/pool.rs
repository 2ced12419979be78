//! Whether a pool of ready memory can be served.

use super::check::Check;
use pagecrew::pool::support::{self, Support};
use pagecrew::sys::Errno;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![pool(support::attempt())]
}

fn pool(support: Support) -> Check {
    const NAME: &str = "pool of ready memory";
    const COST: &str = "pagecrew pool serve doesn't work; virtual machines zero their memory when they start";
    const HUGE: &str = "as root: echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled (where it is deny), or sysctl \
                        vm.nr_hugepages=COUNT";
    match support {
        Support::Works(backing) => Check::ok(NAME, format!("on {}", backing.name())),
        Support::NoHugePage => Check::off(NAME, "files get no huge pages", COST, HUGE),
        Support::Refused(error @ Errno(libc::EPERM | libc::EACCES)) => {
            Check::off(NAME, error.to_string(), COST, "run it as root: a pool needs a mount of its own (CAP_SYS_ADMIN)")
        }
        Support::Refused(error) => Check::missing(
            NAME,
            error.to_string(),
            COST,
            "needs Linux 5.2 and CONFIG_TRANSPARENT_HUGEPAGE, or reserved huge pages",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;
    use pagecrew::pool::Backing;

    #[test]
    fn what_came_of_trying_is_told_apart() {
        let state = |support| pool(support).state;
        assert_eq!(state(Support::Works(Backing::Tmpfs)), State::Ok);
        assert_eq!(state(Support::NoHugePage), State::Off);
        assert_eq!(state(Support::Refused(Errno(libc::EPERM))), State::Off);
        assert_eq!(state(Support::Refused(Errno(libc::EINVAL))), State::Missing);
    }
}
