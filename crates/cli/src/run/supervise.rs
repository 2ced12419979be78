//! Staying in between while a program runs, to read its counters at the end, and being as invisible as possible meanwhile:
//! signals are passed on in both directions and the exit status is the program's.

use super::environment::Environment;
use super::launch::Program;
use crate::failure::Failure;
use crate::published;
use crate::signals::{self, SignalSet};
use pagecrew::stats::Snapshot;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::FromRawFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With this exit status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

/// All that is known about a program that has ended.
pub struct Outcome {
    /// Its process number.
    pub pid: u32,
    /// How it ended.
    pub ending: Ending,
    /// From before it was started until it was gone.
    pub wall: Duration,
    /// CPU time in user mode.
    pub user: Duration,
    /// CPU time in the kernel.
    pub system: Duration,
    /// The most resident memory that it, or one of the processes that it started and waited for, had at one time, in bytes.
    pub peak_rss: u64,
    /// Page faults without input or output.
    pub minor_faults: u64,
    /// Page faults that waited for a disk.
    pub major_faults: u64,
    /// Its counters; `None`: it published none, because it had no large memory.
    pub snapshot: Option<Snapshot>,
}

/// What people and supervisors send to a program under the number that they know, which is ours.
const FORWARDED: [i32; 6] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGINT, libc::SIGQUIT];

/// Runs `program` and waits for its end. Whoever kills this command without a chance to react (`SIGKILL`) means the
/// program, so it goes too.
pub fn run(program: &Program, mut environment: Environment) -> Result<Outcome, Failure> {
    // SAFETY: getpid cannot fail.
    let parent = unsafe { libc::getpid() };
    let prepare = || {
        // SAFETY: no pointers.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            if libc::getppid() != parent {
                libc::_exit(1);
            }
        }
        // The library leaves this one process's counters behind for us; those of the processes that it starts are their
        // own affair.
        environment.set("PAGECREW_STATS_KEEP", std::process::id().to_string());
        environment
    };
    let mut snapshot = None;
    let ended = attend(program, prepare, |_| {}, |child| snapshot = take_counters(child))?;
    Ok(Outcome {
        pid: ended.pid,
        ending: ended.ending,
        wall: ended.wall,
        user: duration(ended.usage.ru_utime),
        system: duration(ended.usage.ru_stime),
        peak_rss: ended.usage.ru_maxrss.unsigned_abs() * 1024,
        minor_faults: ended.usage.ru_minflt.unsigned_abs(),
        major_faults: ended.usage.ru_majflt.unsigned_abs(),
        snapshot,
    })
}

/// What the kernel says of a program that has ended.
pub struct Ended {
    pid: u32,
    /// How it ended.
    pub ending: Ending,
    wall: Duration,
    usage: libc::rusage,
}

/// Runs `program` in the environment that `prepare` makes, in the child, and waits for its end; then calls `at_end`
/// with its number, which can't be another's yet. Once it runs, does something `meanwhile`, which gets to ask whether
/// there is still time for it: not when the program has ended, or a signal waits to be passed on.
pub fn attend(
    program: &Program,
    prepare: impl FnOnce() -> Environment,
    meanwhile: impl FnOnce(&dyn Fn() -> bool),
    at_end: impl FnOnce(u32),
) -> Result<Ended, Failure> {
    let failed = |what: &'static str| move |error: io::Error| Failure::Failed(format!("{what}: {error}"));
    let begin = Instant::now();
    // An inherited "ignored" for SIGCHLD would have the kernel throw the exit status away.
    // SAFETY: the default disposition runs no code.
    let child_disposition = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let signals = SignalSet::of(&[&FORWARDED[..], &[libc::SIGCHLD]].concat());
    let before = signals.block();
    let (mut reader, writer) = pipe().map_err(failed("pipe"))?;
    // SAFETY: no other thread of this process runs code of its own, so its child may do anything that it could do
    // itself.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(failed("fork")(io::Error::last_os_error())),
        0 => become_program(program, prepare, child_disposition, &before, writer),
        child => child,
    };
    drop(writer);
    // The reader of our standard error may be gone by the time that there is something to say; the exit status has to
    // be passed on all the same.
    signals::survive_a_closed_pipe();

    let mut error = [0; 4];
    if reader.read_exact(&mut error).is_ok() {
        reap(child).map_err(failed("wait"))?;
        before.restore();
        return Err(program.failure(&io::Error::from_raw_os_error(i32::from_ne_bytes(error))));
    }
    meanwhile(&|| !signals.pending() && !has_ended(child).unwrap_or(true));
    wait_for_end(child, &signals).map_err(failed("wait"))?;
    let wall = begin.elapsed();
    // Now the child is a zombie: its number can't be another's yet, and its start time can still be read.
    at_end(child as u32);
    let (ending, usage) = reap(child).map_err(failed("wait"))?;
    Ok(Ended { pid: child as u32, ending, wall, usage })
}

/// The child's part.
fn become_program(
    program: &Program,
    prepare: impl FnOnce() -> Environment,
    child_disposition: usize,
    mask: &SignalSet,
    mut writer: File,
) -> ! {
    // SAFETY: `child_disposition` is what was in force at the start, of which `exec` keeps only "ignored".
    unsafe { libc::signal(libc::SIGCHLD, child_disposition) };
    let environment = prepare();
    mask.restore();
    let error = program.replace_this_process(&environment);
    let _ = writer.write_all(&error.raw_os_error().unwrap_or(libc::EINVAL).to_ne_bytes());
    // SAFETY: ends this process at once, without running what its parent had registered for its own end.
    unsafe { libc::_exit(127) }
}

/// A pipe that a successful `exec` closes.
fn pipe() -> io::Result<(File, File)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors, which are ours alone afterwards.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])))
    }
}

/// Passes signals on until `child` has ended, and leaves it unreaped.
fn wait_for_end(child: i32, signals: &SignalSet) -> io::Result<()> {
    while !has_ended(child)? {
        let info = signals.wait();
        // SAFETY: for a signal that a process sent, this field holds the sender; for others it is not looked at.
        let sender = unsafe { info.si_pid() };
        if info.si_signo != libc::SIGCHLD && should_forward(info.si_code, sender, child) {
            // SAFETY: no pointers; the child has not been reaped, so the number is still its own.
            unsafe { libc::kill(child, info.si_signo) };
        }
    }
    Ok(())
}

/// A signal from the terminal (Ctrl-C, hang-up) goes to the whole process group, so the child has had it; and a child
/// that signals its own group has meant and reached itself.
fn should_forward(code: i32, sender: i32, child: i32) -> bool {
    let from_kernel = code > 0;
    !from_kernel && sender != child
}

fn has_ended(child: i32) -> io::Result<bool> {
    let options = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    loop {
        // SAFETY: all zeroes is a valid `siginfo_t`; the call writes only to it. A number of 0 in it means: still
        // running.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            if libc::waitid(libc::P_PID, child as u32, &mut info, options) == 0 {
                return Ok(info.si_pid() != 0);
            }
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn reap(child: i32) -> io::Result<(Ending, libc::rusage)> {
    loop {
        let mut status = 0;
        // SAFETY: all zeroes is a valid `rusage`; the call writes only to it and to `status`.
        let (result, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (libc::wait4(child, &mut status, 0, &mut usage), usage)
        };
        if result == child {
            let ending = if libc::WIFSIGNALED(status) {
                Ending::Killed(libc::WTERMSIG(status))
            } else {
                Ending::Exited(libc::WEXITSTATUS(status) as u8)
            };
            return Ok((ending, usage));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Reads the counters that process `pid`, a zombie, left behind, and removes them.
fn take_counters(pid: u32) -> Option<Snapshot> {
    let (directory, snapshot) = published::read(pid).ok()?;
    let _ = std::fs::remove_file(directory.join(pid.to_string()));
    Some(snapshot)
}

fn duration(time: libc::timeval) -> Duration {
    Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
}

/// How this process is to end after a program that ended like that: with its exit status, or by its signal at once.
pub fn end_like(ending: Ending) -> ExitCode {
    match ending {
        Ending::Exited(status) => ExitCode::from(status),
        Ending::Killed(signal) => die_of(signal),
    }
}

/// Ends this process by `signal`, as the program was ended, but without another core dump.
fn die_of(signal: i32) -> ExitCode {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `none` is valid for the call; the default disposition runs no code; the rest takes no pointers.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::signal(signal, libc::SIG_DFL);
        SignalSet::of(&[]).restore();
        libc::kill(libc::getpid(), signal);
    }
    // A process that is process 1 of a container can't be killed by its own signal; this is how a shell says the same.
    ExitCode::from(128u8.wrapping_add(signal as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signals_that_the_child_has_not_had_are_forwarded() {
        const FROM_KERNEL: i32 = 0x80;
        const FROM_USER: i32 = 0;
        assert!(should_forward(FROM_USER, 10, 20));
        assert!(!should_forward(FROM_USER, 20, 20));
        assert!(!should_forward(FROM_KERNEL, 0, 20));
    }
}
