//! Threads: restartable sequences and scheduling classes.

use super::check::Check;
use pagecrew::sys::sched::{self, Class};
use pagecrew::sys::{Errno, membarrier, rseq};
use std::ffi::CStr;

/// All of them.
pub fn checks() -> Vec<Check> {
    let mut checks = vec![restartable_sequences(), taking_back()];
    checks.extend(scheduling_classes());
    checks
}

fn restartable_sequences() -> Check {
    const NAME: &str = "restartable sequences";
    // SAFETY: glibc returns a constant C string.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy();
    match rseq::prepare() {
        Ok(()) => Check::ok(NAME, format!("registered by glibc {version}")),
        Err(error) => Check::off(
            NAME,
            format!("{error} (glibc {version})"),
            "an allocation may have to wait for a helper that was preempted",
            "needs glibc 2.35, and GLIBC_TUNABLES without glibc.pthread.rseq=0",
        ),
    }
}

/// With it, nobody waits for a preempted helper, whatever rights the user has.
fn taking_back() -> Check {
    let result = membarrier::register().and_then(|()| membarrier::restart_sequences());
    Check::tried(
        "membarrier for sequences",
        result,
        "an allocation may have to wait for a helper that was preempted",
        "needs Linux 5.10 and a seccomp filter that lets membarrier pass",
    )
}

/// Tried in a thread of its own, since an ordinary user can't undo the first step.
fn scheduling_classes() -> [Check; 2] {
    let tried = std::thread::spawn(|| {
        let idle = sched::set_class(0, Class::Idle);
        (idle, idle.and_then(|()| sched::set_class(0, Class::Normal)))
    });
    let (idle, back) = tried.join().unwrap_or((Err(Errno(libc::EAGAIN)), Err(Errno(libc::EAGAIN))));
    [
        Check::tried(
            "idle scheduling class",
            idle,
            "helpers compete with the program and with everybody else",
            "let the seccomp filter pass sched_setscheduler",
        ),
        Check::tried(
            "way back from the idle class",
            back,
            "a helper that is needed at once can't be hurried, its work is taken back and done again instead; and it ends 50 ms after its work",
            "CAP_SYS_NICE, or RLIMIT_NICE of 20 (`ulimit -e 20`; LimitNICE=20 in a systemd unit; `nice 0` in limits.conf)",
        ),
    ]
}
