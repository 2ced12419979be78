//! A program that is one command.

use super::{Done, Run};
use crate::contestant::Contestant;
use crate::program::{Running, on_path};
use crate::report::Report;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A command in a directory of its own, which is in memory where that can be, so that the speed of a disk does not count.
pub struct Job {
    directory: TempDir,
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, &'static str)>,
    /// Of the output, only that many lines are compared.
    lines: usize,
    /// A file that it writes.
    output: Option<&'static str>,
    /// A command that is run after it, untimed, whose output is compared in its place.
    check: Vec<&'static str>,
}

impl Job {
    /// A job whose command is still to be said.
    ///
    /// # Errors
    /// If no directory can be made.
    pub fn new() -> Result<Job> {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        Ok(Job {
            directory,
            arguments: Vec::new(),
            variables: vec![("LC_ALL", "C.UTF-8")],
            lines: usize::MAX,
            output: None,
            check: Vec::new(),
        })
    }

    /// Where it runs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Puts a file there.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn file(self, name: &str, text: &str) -> Result<Job> {
        let path = self.directory().join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(self)
    }

    /// Adds the program or arguments to the command.
    pub fn command(mut self, arguments: &[&str]) -> Job {
        self.arguments.extend(arguments.iter().map(OsString::from));
        self
    }

    /// Adds a program that is a path.
    pub fn program(mut self, path: PathBuf) -> Job {
        self.arguments.push(path.into_os_string());
        self
    }

    pub fn variable(mut self, name: &'static str, value: &'static str) -> Job {
        self.variables.push((name, value));
        self
    }

    pub fn compare_lines(mut self, lines: usize) -> Job {
        self.lines = lines;
        self
    }

    pub fn compare_file(mut self, name: &'static str) -> Job {
        self.output = Some(name);
        self
    }

    pub fn check_by(mut self, arguments: &[&'static str]) -> Job {
        self.check = arguments.to_vec();
        self
    }

    /// What runs it.
    pub fn ready(self) -> Run {
        Box::new(move |contestant| self.start(contestant))
    }

    fn prepared(&self, arguments: &[OsString]) -> Command {
        let (program, arguments) = arguments.split_first().map_or((OsString::new(), &[][..]), |(p, a)| (p.clone(), a));
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.directory()).envs(self.variables.iter().copied());
        command
    }

    fn start(&self, contestant: &Contestant) -> Result<Done> {
        let mut done = start(&mut self.prepared(&self.arguments), contestant, self.lines)?;
        let mut hasher = DefaultHasher::new();
        done.result.hash(&mut hasher);
        if let Some(output) = self.output {
            let path = self.directory().join(output);
            hasher.write(&std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
            std::fs::remove_file(path)?;
        }
        if !self.check.is_empty() {
            let arguments: Vec<_> = self.check.iter().map(OsString::from).collect();
            start(&mut self.prepared(&arguments), &Contestant::plain(""), usize::MAX)?.result.hash(&mut hasher);
        }
        done.result = hasher.finish();
        Ok(done)
    }
}

/// Runs `arguments` to its end, whatever that is.
#[cfg(test)]
pub fn run(arguments: &[&str], contestant: &Contestant) -> Result<Done> {
    start(Command::new(arguments[0]).args(&arguments[1..]), contestant, usize::MAX)
}

/// Runs `command`; the result has the first `lines` lines of its output and its exit status.
fn start(command: &mut Command, contestant: &Contestant, lines: usize) -> Result<Done> {
    contestant.prepare(command);
    let mut running = Running::start(command)?;
    let output = running.rest()?;
    let (status, usage) = running.end()?;
    let mut hasher = DefaultHasher::new();
    output.lines().take(lines).for_each(|line| line.hash(&mut hasher));
    (status.code(), std::os::unix::process::ExitStatusExt::signal(&status)).hash(&mut hasher);
    Ok(Done { usage, result: hasher.finish() })
}

/// The first of `programs` that is on the search path. Where none is, `report` hears which package has it.
pub fn installed(programs: &[&'static str], name: &str, package: &str, report: &Report) -> Option<&'static str> {
    let found = programs.iter().copied().find(|program| on_path(program));
    if found.is_none() {
        report.note(&format!("{name} is not installed (package {package}); it is left out"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(job: &Job) -> u64 {
        job.start(&Contestant::plain("")).unwrap().result
    }

    #[test]
    fn output_files_and_status_count() {
        let job = |script: &str| Job::new().unwrap().command(&["sh", "-c", script]);
        let echo = result(&job("echo 1"));
        assert_eq!(echo, result(&job("echo 1")));
        assert_ne!(echo, result(&job("echo 2")));
        assert_ne!(echo, result(&job("echo 1; exit 1")));
        assert_eq!(result(&job("echo 1; echo $$").compare_lines(1)), result(&job("echo 1").compare_lines(1)));
        let wrote = |what: &str| result(&job(&format!("echo {what} >file")).compare_file("file"));
        assert_eq!(wrote("a"), wrote("a"));
        assert_ne!(wrote("a"), wrote("b"));
        let checked = |what: &str| result(&job(&format!("echo {what} >file")).check_by(&["cat", "file"]));
        assert_ne!(checked("a"), checked("b"));
    }
}
