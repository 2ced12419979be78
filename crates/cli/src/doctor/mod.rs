//! `pagecrew doctor`: what this kernel and this user can do, found out by trying it wherever that is possible.

mod check;
mod huge_pages;
mod install;
mod limits;
mod machine;
mod mappings;
mod other_process;
mod pool;
mod reclaim;
mod scratch;
mod threads;

use crate::failure::Failure;
use crate::output::{print, render, table};
use check::{Check, State};
use std::process::ExitCode;

/// Say what this kernel and this user allow
///
/// Tries each thing that pagecrew makes use of and says what is off, what that costs and how to turn it on.
#[derive(clap::Args)]
#[command(after_help = "\
States: ok; off: can be turned on, see below the table; missing: this kernel or this machine does not have it.

Exit status: 0 if `pagecrew run` works here, 3 if something that it needs is missing.

Examples:
  pagecrew doctor
  pagecrew doctor --json | jq '.checks[] | select(.state != \"ok\")'")]
pub struct Arguments {
    /// JSON instead of a table
    #[arg(long)]
    json: bool,
}

fn all_checks() -> Vec<Check> {
    let pages = machine::page_size();
    if pages.state != State::Ok {
        // Nothing else can be tried.
        return vec![machine::kernel(), pages];
    }
    [
        install::checks(),
        machine::checks(),
        threads::checks(),
        mappings::checks(),
        huge_pages::checks(),
        other_process::checks(),
        pool::checks(),
        reclaim::checks(),
        limits::checks(),
    ]
    .concat()
}

/// `pagecrew doctor`.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let checks = all_checks();
    print(&if arguments.json { json(&checks) } else { text(&checks) })?;
    Ok(ExitCode::from(if ready(&checks) { 0 } else { 3 }))
}

/// Whether everything that `run` needs is there.
fn ready(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.state == State::Ok || !check.needed)
}

fn json(checks: &[Check]) -> String {
    format!("{:#}\n", serde_json::json!({ "ready": ready(checks), "checks": checks }))
}

fn text(checks: &[Check]) -> String {
    let mut table = table(&["what", "state", "found"]);
    for check in checks {
        table.add_row([check.name, check.state.name(), &check.found]);
    }
    let mut text = render(&table);
    let mut wanting = checks.iter().filter(|check| check.state != State::Ok).peekable();
    if wanting.peek().is_some() {
        text += "\nWhat is not ok, what that costs, and what helps:\n";
    }
    for check in wanting {
        text += &format!("\n  {} ({})\n    {}\n    {}\n", check.name, check.state.name(), check.cost, check.remedy);
    }
    text += if ready(checks) { "\n`pagecrew run` works here.\n" } else { "\n`pagecrew run` does not work here.\n" };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_has_its_own_name_and_says_what_helps() {
        let checks = all_checks();
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len());
        for check in &checks {
            let explained = !check.cost.is_empty() && !check.remedy.is_empty();
            assert!(!check.found.is_empty() && (check.state == State::Ok || explained), "{check:?}");
        }
        serde_json::from_str::<serde_json::Value>(&json(&checks)).unwrap();
    }

    #[test]
    fn only_what_run_needs_decides() {
        let optional = Check::missing("a", "-", "slower", "nothing");
        let needed = Check::missing("b", "-", "nothing works", "install it").needed();
        assert!(ready(std::slice::from_ref(&optional)));
        assert!(!ready(&[Check::ok("c", "-"), needed.clone()]));
        assert!(text(&[optional]).contains("slower") && text(&[needed]).contains("does not work"));
    }
}
