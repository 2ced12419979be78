//! How a command fails: one line on standard error and an exit status that says of which kind the failure is.

use crate::output;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

/// Why a command ends without having done its work.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was tried and did not work: exit status 1.
    Failed(String),
    /// What was asked for makes no sense: exit status 2.
    Usage(String),
    /// This kernel, these permissions or this program rule it out: exit status 3.
    Impossible(String),
}

impl Failure {
    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Failed(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Impossible(_) => 3,
        }
    }

    /// Writes the line and returns the exit status.
    pub fn report(self) -> ExitCode {
        output::note(&self.to_string());
        ExitCode::from(self.status())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Failed(message) | Failure::Usage(message) | Failure::Impossible(message)) = self;
        f.write_str(message)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::Failed(format!("{error:#}"))
    }
}

/// Reports what the argument parser found. Help and version are its errors too, and go to standard output in full.
pub fn wrong_usage(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(2)
        }
        _ => Failure::Usage(format!("{} (see --help)", first_paragraph(&error.to_string()))).report(),
    }
}

/// The parser's messages go over several paragraphs, of which the first says what is wrong.
fn first_paragraph(text: &str) -> String {
    let lines = text.lines().take_while(|line| !line.trim().is_empty());
    let joined = lines.map(str::trim).collect::<Vec<_>>().join(" ");
    joined.strip_prefix("error: ").unwrap_or(&joined).to_owned()
}

/// A defect in this program is still one line, and its exit status is 1.
pub fn report_panics_in_one_line() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let constant = payload.downcast_ref::<&str>().copied();
        let message = constant.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown cause");
        let place = panic.location().map(|location| format!(" ({location})")).unwrap_or_default();
        output::note(&format!("internal error: {message}{place}"));
        output::flush(Duration::from_millis(100));
        std::process::exit(1);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_paragraph_is_one_line() {
        let text =
            "error: the following required arguments were not provided:\n  <PROGRAM>...\n\nUsage: pagecrew run\n";
        assert_eq!(first_paragraph(text), "the following required arguments were not provided: <PROGRAM>...");
        assert_eq!(first_paragraph(""), "");
    }

    #[test]
    fn statuses() {
        let statuses = [Failure::Failed, Failure::Usage, Failure::Impossible].map(|kind| kind(String::new()).status());
        assert_eq!(statuses, [1, 2, 3]);
    }
}
