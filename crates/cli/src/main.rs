//! The `pagecrew` command: a thin shell, one module a subcommand.

mod dispatch;
mod doctor;
mod failure;
mod figures;
mod inspect;
mod metrics;
mod notify;
mod output;
#[cfg(test)]
mod patience;
mod pool;
mod preload;
mod published;
mod reclaim;
mod rereading;
mod run;
mod serve;
mod service;
mod settings;
mod signals;
mod stats;
mod supervised;
mod top;
mod trim;
mod values;

use clap::{Parser, Subcommand};
use failure::Failure;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagecrew run redis-server redis.conf   run a program with faster large memory
  pagecrew run --stats python3 job.py    the same, and say at the end what was gained
  pagecrew stats                         the processes that run under pagecrew now
  pagecrew top                           a machine's memory, live
  pagecrew trim --all --dry-run          what under-used huge pages could give back
  pagecrew pool serve --size 16G         keep zeroed memory ready for virtual machines
  pagecrew serve                         the services of this machine, as /etc/pagecrew/pagecrew.toml says
  pagecrew reclaim                       memory is free before programs have to reclaim it, with no number to tune
  pagecrew doctor                        what this kernel and this user allow
  pagecrew bench free --quick            measure on this machine

Exit status: 0 done, 1 failed, 2 wrong usage, 3 not possible on this kernel or with these permissions. \
`pagecrew run` and `pagecrew pool exec` pass on the program's own exit status or signal.";

/// Takes memory work off a program's critical path: large frees return at once, large allocations come back already zeroed,
/// and spare CPU does the work in the background.
#[derive(Parser)]
#[command(name = "pagecrew", version, after_help = EXAMPLES, arg_required_else_help = true, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// At its end, a service waits no longer for whoever reads what it said.
const LAST_WORDS: Duration = Duration::from_millis(30);

#[derive(Subcommand)]
enum Command {
    Run(run::Arguments),
    Stats(stats::Arguments),
    Top(top::Arguments),
    Trim(trim::Arguments),
    Pool(pool::Arguments),
    Reclaim(reclaim::Arguments),
    Serve(serve::Arguments),
    Settings(settings::Arguments),
    Doctor(doctor::Arguments),
    Bench(dispatch::BenchArguments),
    Demo(dispatch::DemoArguments),
    #[command(hide = true)]
    BenchWorker(dispatch::WorkerArguments),
    #[command(hide = true)]
    PoolFill,
    #[command(hide = true)]
    ServeMetrics(serve::gateway::Arguments),
}

impl Command {
    /// Whether the command does anything to memory, which takes pages of the size that the library is built for.
    fn takes_pages(&self) -> bool {
        !matches!(self, Command::Doctor(_) | Command::Stats(_) | Command::Top(_) | Command::Settings(_))
    }
}

fn main() -> ExitCode {
    signals::end_quietly_on_a_closed_pipe();
    failure::report_panics_in_one_line();
    supervised::take_name();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return failure::wrong_usage(&error),
    };
    if arguments.command.takes_pages()
        && let Err(error) = pagecrew::sys::check_page_size()
    {
        return Failure::Impossible(error.to_string()).report();
    }
    let result = match arguments.command {
        Command::Run(arguments) => run::run(arguments),
        Command::Stats(arguments) => stats::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Top(arguments) => top::run(&arguments),
        Command::Trim(arguments) => trim::run(arguments),
        Command::Pool(arguments) => pool::run(arguments),
        Command::Reclaim(arguments) => reclaim::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Settings(arguments) => settings::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Bench(arguments) => dispatch::bench(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Demo(arguments) => dispatch::demo(&arguments).map(|()| ExitCode::SUCCESS),
        Command::BenchWorker(arguments) => dispatch::worker(&arguments).map(|()| ExitCode::SUCCESS),
        Command::ServeMetrics(arguments) => serve::gateway::run(&arguments),
        Command::PoolFill => pool::fill().map(|()| ExitCode::SUCCESS),
    };
    let status = result.unwrap_or_else(Failure::report);
    output::flush(LAST_WORDS);
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
