//! Whether memory can be kept free ahead of demand, on the machine and in control groups.

use super::check::Check;
use pagecrew::group::Version;
use pagecrew::reclaim::{Unserved, Unsupported};
use pagecrew::reclaim::{group_support, support};
use pagecrew::sys::Errno;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![reclaim(support::attempt().map(|threads| threads.len())), groups(group_support::attempt())]
}

fn groups(attempt: Result<Vec<Version>, Unserved>) -> Check {
    const NAME: &str = "reclaim ahead in groups";
    const COST: &str = "tasks of control groups at their limits reclaim for themselves, as without pagecrew reclaim";
    match attempt {
        Ok(versions) => {
            let names: Vec<&str> = versions.iter().map(|version| file(*version)).collect();
            Check::ok(NAME, names.join(", "))
        }
        Err(error @ Unserved::Refused(_)) => {
            Check::off(NAME, error.to_string(), COST, "run it as root, outside a container")
        }
        Err(error) => {
            Check::missing(NAME, error.to_string(), COST, "needs the memory controller of cgroup v2, and Linux 5.19")
        }
    }
}

fn file(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.force_empty (version 1)",
        Version::V2 => "memory.reclaim",
    }
}

fn reclaim(attempt: Result<usize, Unsupported>) -> Check {
    const NAME: &str = "reclaim ahead of demand";
    const COST: &str = "pagecrew reclaim doesn't work; programs that take memory fast reclaim it themselves";
    match attempt {
        Ok(1) => Check::ok(NAME, "1 node"),
        Ok(nodes) => Check::ok(NAME, format!("{nodes} nodes")),
        Err(error @ Unsupported::NoThreads) => Check::off(NAME, error.to_string(), COST, "run it outside a container"),
        Err(error @ (Unsupported::Events(errno) | Unsupported::Setting(errno))) if REFUSED.contains(&errno) => {
            Check::off(NAME, error.to_string(), COST, "run it as root, outside a container")
        }
        Err(error) => Check::missing(NAME, error.to_string(), COST, "needs Linux 4.6 and CONFIG_PERF_EVENTS"),
    }
}

/// What is said to those who may not.
const REFUSED: [Errno; 3] = [Errno(libc::EACCES), Errno(libc::EPERM), Errno(libc::EROFS)];

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn groups_that_can_be_served_are_told_apart() {
        assert_eq!(groups(Ok(vec![Version::V2])).found, "memory.reclaim");
        for (attempt, state) in [
            (Ok(vec![Version::V2]), State::Ok),
            (Err(Unserved::NoController), State::Missing),
            (Err(Unserved::TooOld), State::Missing),
            (Err(Unserved::Refused(Errno(libc::EACCES))), State::Off),
        ] {
            assert_eq!(groups(attempt.clone()).state, state, "{attempt:?}");
        }
    }

    #[test]
    fn what_came_of_trying_is_told_apart() {
        let state = |attempt| reclaim(attempt).state;
        assert_eq!(state(Ok(2)), State::Ok);
        assert_eq!(state(Err(Unsupported::NoThreads)), State::Off);
        assert_eq!(state(Err(Unsupported::Setting(Errno(libc::EACCES)))), State::Off);
        assert_eq!(state(Err(Unsupported::Events(Errno(libc::ENOENT)))), State::Missing);
    }
}
