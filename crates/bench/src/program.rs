//! One run of a measured program.

use crate::contestant::Contestant;
use anyhow::{Context, Result, bail};
use pagecrew::sys::clock;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

/// What a program used, as the kernel tells its parent (`wait4`).
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// From its start until its parent could go on, in seconds.
    pub seconds: f64,
    /// Page faults, those that waited for a device included.
    pub faults: u64,
    /// The most memory that it had resident, in MiB.
    pub peak_mib: f64,
}

/// What a program left behind.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub output: String,
    pub usage: Usage,
}

impl Outcome {
    /// The numbers on the lines of the output.
    pub fn figures(&self) -> Result<Vec<f64>> {
        figures(&self.output)
    }
}

/// The numbers in `text`, one a line.
fn figures(text: &str) -> Result<Vec<f64>> {
    text.lines().map(figure).collect()
}

fn figure(line: &str) -> Result<f64> {
    line.trim().parse().with_context(|| format!("'{line}' is not a figure"))
}

/// This very executable, even if another one has taken its place since it was started.
const THIS_EXECUTABLE: &str = "/proc/self/exe";

/// The command of this executable that a worker is.
const WORKER: &str = "bench-worker";

/// This executable as a worker with `arguments`, on `contestant`'s memory.
pub fn worker(contestant: &Contestant, arguments: &[&str]) -> Command {
    let mut command = Command::new(THIS_EXECUTABLE);
    command.arg(WORKER).args(arguments);
    contestant.prepare(&mut command);
    command
}

/// This executable with `arguments`, as a user would run it.
pub fn pagecrew(arguments: &[&str]) -> Command {
    let mut command = Command::new(THIS_EXECUTABLE);
    command.args(arguments);
    Contestant::plain("pagecrew").prepare(&mut command);
    command
}

/// What people call the program of `command`.
fn name(command: &Command) -> String {
    if command.get_program() != THIS_EXECUTABLE {
        return command.get_program().display().to_string();
    }
    let mut arguments = command.get_args();
    match arguments.next() {
        Some(first) if first != WORKER => format!("pagecrew {}", first.display()),
        _ => format!("bench worker {}", arguments.next().unwrap_or_default().display()),
    }
}

/// Runs `command` to its end and returns what it printed and used.
///
/// # Errors
/// If it can't be started or fails.
pub fn run(command: &mut Command) -> Result<Outcome> {
    let mut running = Running::start(command)?;
    let output = running.rest()?;
    let usage = running.wait()?;
    Ok(Outcome { output, usage })
}

/// A program that runs beside its parent. It is killed where it is dropped, or where its parent dies.
pub struct Running {
    name: String,
    child: Option<Child>,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    started_ns: u64,
}

impl Running {
    /// Starts `command` with pipes as its input and output.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start(command: &mut Command) -> Result<Running> {
        Running::start_ending_by(command, libc::SIGKILL)
    }

    /// The same for one that gets `signal` where its parent dies: it may have others to end.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn start_ending_by(command: &mut Command, signal: i32) -> Result<Running> {
        let name = name(command);
        // SAFETY: between fork and exec the closure makes one system call and touches no memory of its parent's.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, signal);
                Ok(())
            });
        }
        let started_ns = clock::now_ns();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{name} can't be started"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("a child without the pipe it was given")?);
        Ok(Running { name, child: Some(child), input, output, started_ns })
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Reads its next line.
    ///
    /// # Errors
    /// If it ended instead.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("{} ended before it said what it was to say", self.name);
        }
        Ok(line.trim_end().to_owned())
    }

    /// Reads its next line, which is a number.
    ///
    /// # Errors
    /// If it ended or said something else.
    pub fn figure(&mut self) -> Result<f64> {
        figure(&self.line()?)
    }

    /// Tells it to go on.
    ///
    /// # Errors
    /// If it doesn't listen any more.
    pub fn go(&mut self) -> Result<()> {
        let input = self.input.as_mut().context("a child whose input is closed")?;
        input.write_all(b"\n")?;
        Ok(input.flush()?)
    }

    /// Ends its input.
    pub fn hush(&mut self) {
        self.input = None;
    }

    /// Reads what it still says until it ends.
    ///
    /// # Errors
    /// If that is not text.
    pub fn rest(&mut self) -> Result<String> {
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Sends it `signal`.
    ///
    /// # Errors
    /// If it is no longer there.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let child = self.child.as_ref().with_context(|| format!("{} was waited for already", self.name))?;
        // SAFETY: no memory is involved; the child was not waited for, so the number is still its own.
        let sent = unsafe { libc::kill(child.id() as i32, signal) };
        if sent == 0 {
            return Ok(());
        }
        Err(std::io::Error::last_os_error()).with_context(|| format!("a signal for {}", self.name))
    }

    /// Waits until it has ended, for `limit` at most; whether it has.
    ///
    /// # Errors
    /// If the kernel has no process descriptors (5.3).
    pub fn ends_within(&self, limit: Duration) -> Result<bool> {
        // SAFETY: no memory is involved.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, self.pid(), 0) };
        if descriptor < 0 {
            return Err(std::io::Error::last_os_error()).with_context(|| format!("watching {}", self.name));
        }
        // SAFETY: the descriptor is new and nobody else's.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
        let mut poll = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = limit.as_millis().min(i32::MAX as u128) as i32;
        // SAFETY: one valid `pollfd`. A signal counts as the end of the time, and no handler of ours returns.
        Ok(unsafe { libc::poll(&mut poll, 1, milliseconds) } > 0)
    }

    /// Ends its input and waits for it.
    ///
    /// # Errors
    /// If it fails.
    pub fn wait(self) -> Result<Usage> {
        let name = self.name.clone();
        let (status, usage) = self.end()?;
        if !status.success() {
            bail!("{name} failed: {status}");
        }
        Ok(usage)
    }

    /// Ends its input, waits for it, and says how it ended.
    ///
    /// # Errors
    /// If it can't be waited for.
    pub fn end(mut self) -> Result<(ExitStatus, Usage)> {
        drop(self.input.take());
        let Some(child) = self.child.take() else { bail!("{} was waited for already", self.name) };
        let mut status = 0;
        // SAFETY: all zeroes is a valid `rusage`.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both places are valid; the child is ours and nobody else waits for it.
        while unsafe { libc::wait4(child.id() as i32, &mut status, 0, &mut usage) } < 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error).with_context(|| format!("waiting for {}", self.name));
            }
        }
        let seconds = (clock::now_ns() - self.started_ns) as f64 / 1e9;
        let faults = (usage.ru_minflt + usage.ru_majflt) as u64;
        let usage = Usage { seconds, faults, peak_mib: usage.ru_maxrss as f64 / 1024.0 };
        Ok((ExitStatus::from_raw(status), usage))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Whether `program` can be found on the search path.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(OsStr::new(program)).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_usage_of_a_program() {
        let outcome = run(Command::new("sh").args(["-c", "echo 1.5; echo 2"])).unwrap();
        assert_eq!(outcome.figures().unwrap(), [1.5, 2.0]);
        assert!(outcome.usage.seconds > 0.0 && outcome.usage.faults > 0 && outcome.usage.peak_mib > 0.1);
    }

    #[test]
    fn what_fails_or_talks_nonsense_is_an_error() {
        assert!(run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err().to_string().contains('3'));
        assert!(run(&mut Command::new("/nonexistent")).is_err());
        assert!(run(Command::new("echo").arg("soon")).unwrap().figures().is_err());
    }

    #[test]
    fn a_conversation() {
        let mut running = Running::start(Command::new("sh").args(["-c", "echo 7; read x; echo 8; read x"])).unwrap();
        assert_eq!(running.figure().unwrap(), 7.0);
        running.go().unwrap();
        assert_eq!(running.figure().unwrap(), 8.0);
        running.go().unwrap();
        running.wait().unwrap();
    }

    #[test]
    fn a_program_that_is_ended() {
        let mut running = Running::start(Command::new("sh").args(["-c", "echo 1; echo 2; read x"])).unwrap();
        assert_eq!(running.figure().unwrap(), 1.0);
        assert!(!running.ends_within(Duration::from_millis(10)).unwrap());
        running.signal(libc::SIGKILL).unwrap();
        assert!(running.ends_within(Duration::from_secs(60)).unwrap());
        assert_eq!(running.rest().unwrap(), "2\n");
        assert_eq!(running.end().unwrap().0.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn what_people_call_a_program() {
        assert_eq!(name(&worker(&Contestant::plain("x"), &["warm", "1"])), "bench worker warm");
        assert_eq!(name(&pagecrew(&["trim", "--all"])), "pagecrew trim");
        assert_eq!(name(&Command::new("redis-server")), "redis-server");
    }
}
