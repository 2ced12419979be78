//! One run of a measured program.

use crate::contestant::Contestant;
use anyhow::{Context, Result, bail};
use pagecrew::sys::clock;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

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

/// This executable as a worker with `arguments`, on `contestant`'s memory.
pub fn worker(contestant: &Contestant, arguments: &[&str]) -> Command {
    let mut command = Command::new(THIS_EXECUTABLE);
    command.arg("bench-worker").args(arguments);
    contestant.prepare(&mut command);
    command
}

/// Runs `command` to its end and returns what it printed and used.
///
/// # Errors
/// If it can't be started or fails.
pub fn run(command: &mut Command) -> Result<Outcome> {
    let mut running = Running::start(command)?;
    let mut output = String::new();
    running.output.read_to_string(&mut output)?;
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
        let name = match command.get_program() {
            program if program == THIS_EXECUTABLE => format!("bench worker {:?}", command.get_args().nth(1)),
            program => program.display().to_string(),
        };
        // SAFETY: between fork and exec the closure makes one system call and touches no memory of its parent's.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
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

    /// Ends its input and waits for it.
    ///
    /// # Errors
    /// If it fails.
    pub fn wait(mut self) -> Result<Usage> {
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
        let status = ExitStatus::from_raw(status);
        if !status.success() {
            bail!("{} failed: {status}", self.name);
        }
        let faults = (usage.ru_minflt + usage.ru_majflt) as u64;
        Ok(Usage { seconds, faults, peak_mib: usage.ru_maxrss as f64 / 1024.0 })
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
}
