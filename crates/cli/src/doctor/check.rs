//! One thing that was looked at.

use pagecrew::sys::Errno;
use serde::Serialize;

/// How it stands with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// There and usable.
    Ok,
    /// There, and not usable as things are set.
    Off,
    /// Not there.
    Missing,
}

impl State {
    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Off => "off",
            State::Missing => "missing",
        }
    }
}

/// What was looked at and what was found.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What it is.
    pub name: &'static str,
    /// How it stands with it.
    pub state: State,
    /// What was found, in figures where there are any.
    pub found: String,
    /// What its absence costs; empty where it is there.
    pub cost: &'static str,
    /// How to get it; empty where it is there.
    pub remedy: &'static str,
    /// Whether `run` does not work without it.
    pub needed: bool,
}

impl Check {
    /// It is there.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, state: State::Ok, found: found.into(), cost: "", remedy: "", needed: false }
    }

    /// It could be there.
    pub fn off(name: &'static str, found: impl Into<String>, cost: &'static str, remedy: &'static str) -> Check {
        Check { name, state: State::Off, found: found.into(), cost, remedy, needed: false }
    }

    /// It is not there.
    pub fn missing(name: &'static str, found: impl Into<String>, cost: &'static str, remedy: &'static str) -> Check {
        Check { state: State::Missing, ..Check::off(name, found, cost, remedy) }
    }

    /// The result of trying: a refusal for lack of rights can be changed, everything else is the kernel's age.
    pub fn tried(name: &'static str, result: Result<(), Errno>, cost: &'static str, remedy: &'static str) -> Check {
        match result {
            Ok(()) => Check::ok(name, "works"),
            Err(error @ Errno(libc::EPERM | libc::EACCES)) => Check::off(name, error.to_string(), cost, remedy),
            Err(error) => Check::missing(name, error.to_string(), cost, remedy),
        }
    }

    /// Without it, `run` does not work.
    pub fn needed(self) -> Check {
        Check { needed: true, ..self }
    }
}
