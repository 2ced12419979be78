//! `pagecrew trim` as a user runs it.

use crate::contestant::Contestant;
use crate::program::{self, Running, pagecrew, worker};
use anyhow::{Context, Result, bail, ensure};
use pagecrew::sys::HUGE_PAGE_SIZE;
use serde::Deserialize;

/// The exit status of a command that this kernel or this user can't have.
const NOT_POSSIBLE: i32 = 3;

/// What was found and done, as far as it is measured here.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Counts {
    pub huge_pages: u64,
    pub under_used: u64,
    pub used: u64,
    pub split: u64,
    pub gone_bytes: u64,
    pub read_of_used_bytes: u64,
    pub cpu_seconds: f64,
    pub split_seconds: f64,
}

#[derive(Deserialize)]
struct Process {
    pid: u32,
    error: Option<String>,
}

/// The object that `pagecrew trim --json` prints.
#[derive(Deserialize)]
struct Pass {
    processes: Vec<Process>,
    totals: Counts,
}

impl Counts {
    /// What an object says, if nothing went wrong.
    fn parse(line: &str) -> Result<Counts> {
        let pass: Pass = serde_json::from_str(line).with_context(|| format!("'{line}' is not what trim prints"))?;
        for process in pass.processes {
            if let Some(error) = process.error {
                bail!("trim of process {}: {error}", process.pid);
            }
        }
        Ok(pass.totals)
    }
}

/// Why `pagecrew trim` can't do anything here; `None` where it can.
pub fn refusal() -> Result<Option<String>> {
    let mut target =
        Running::start(&mut worker(&Contestant::plain(""), &["trim-sparse", &HUGE_PAGE_SIZE.to_string()]))?;
    target.figure()?;
    let output = pagecrew(&["trim", "--json", "--pid", &target.pid().to_string()]).output()?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().trim_start_matches("pagecrew: ").to_owned();
    ensure!(output.status.code() == Some(NOT_POSSIBLE), "pagecrew trim failed: {}: {said}", output.status);
    Ok(Some(said))
}

/// One pass over process `pid`.
///
/// # Errors
/// If it fails.
pub fn pass(pid: u32) -> Result<Counts> {
    one_pass(pid, &[])
}

/// One pass over process `pid` that changes nothing.
///
/// # Errors
/// If it fails.
pub fn dry_run(pid: u32) -> Result<Counts> {
    one_pass(pid, &["--dry-run"])
}

fn one_pass(pid: u32, options: &[&str]) -> Result<Counts> {
    let pid = pid.to_string();
    let arguments = [&["trim", "--json", "--pid", &pid], options].concat();
    Counts::parse(program::run(&mut pagecrew(&arguments))?.output.trim())
}

/// `pagecrew trim --watch`. It is killed where it is dropped.
pub struct Watch(Running);

impl Watch {
    /// Watches `what`, an option and its value, and is at it when this returns.
    ///
    /// # Errors
    /// If it can't.
    pub fn start(what: [&str; 2]) -> Result<Watch> {
        let options = ["trim", "--watch", "--json", "--interval", "1s"];
        let mut watch = Watch(Running::start(&mut pagecrew(&[&options[..], &what].concat()))?);
        Counts::parse(&watch.0.line()?)?;
        Ok(watch)
    }

    /// Lets it do nothing until [`Watch::resume`].
    ///
    /// # Errors
    /// If it has ended.
    pub fn pause(&self) -> Result<()> {
        self.0.signal(libc::SIGSTOP)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// If it has ended.
    pub fn resume(&self) -> Result<()> {
        self.0.signal(libc::SIGCONT)
    }

    /// Ends it, and returns what it did all in all.
    ///
    /// # Errors
    /// If it failed.
    pub fn stop(mut self) -> Result<Counts> {
        self.0.signal(libc::SIGTERM)?;
        let rest = self.0.rest()?;
        self.0.wait()?;
        Counts::parse(rest.lines().last().context("trim --watch ended without a last line")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(error: &str) -> String {
        let counts = r#""huge_pages":8,"looked_at":8,"under_used":5,"used":3,"split":5,"could_go_bytes":9,
            "gone_bytes":8,"read_bytes":7,"read_of_used_bytes":6,"cpu_seconds":0.5,"split_seconds":0.25,
            "left":{"excluded":0,"file":0,"locked":0,"shared":0,"busy":0,"resting":0,"unreadable":0}"#;
        let process = format!(r#"{{"pid":7,"name":"x",{counts},"ended":false,"error":{error}}}"#);
        format!(r#"{{"elapsed_seconds":0.1,"processes":[{process}],"totals":{{{counts}}}}}"#)
    }

    #[test]
    fn what_trim_prints() {
        let counts = Counts::parse(&line("null")).unwrap();
        assert_eq!((counts.huge_pages, counts.under_used, counts.used, counts.split), (8, 5, 3, 5));
        assert_eq!((counts.gone_bytes, counts.read_of_used_bytes), (8, 6));
        assert_eq!((counts.cpu_seconds, counts.split_seconds), (0.5, 0.25));
    }

    #[test]
    fn what_went_wrong_is_said() {
        let error = Counts::parse(&line("\"it may not be read\"")).unwrap_err();
        assert_eq!(error.to_string(), "trim of process 7: it may not be read");
        assert!(Counts::parse("").is_err());
    }
}
