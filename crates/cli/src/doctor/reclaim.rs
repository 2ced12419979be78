//! Whether memory can be kept free ahead of demand.

use super::check::Check;
use pagecrew::reclaim::Unsupported;
use pagecrew::reclaim::support;
use pagecrew::sys::Errno;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![reclaim(support::attempt(None).map(|threads| threads.len()))]
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
        Err(error) => {
            Check::missing(NAME, error.to_string(), COST, "needs Linux 4.6 and CONFIG_PERF_EVENTS with tracepoints")
        }
    }
}

/// What is said to those who may not.
const REFUSED: [Errno; 3] = [Errno(libc::EACCES), Errno(libc::EPERM), Errno(libc::EROFS)];

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn what_came_of_trying_is_told_apart() {
        let state = |attempt| reclaim(attempt).state;
        assert_eq!(state(Ok(2)), State::Ok);
        assert_eq!(state(Err(Unsupported::NoThreads)), State::Off);
        assert_eq!(state(Err(Unsupported::Setting(Errno(libc::EACCES)))), State::Off);
        assert_eq!(state(Err(Unsupported::Events(Errno(libc::ENOENT)))), State::Missing);
    }
}
