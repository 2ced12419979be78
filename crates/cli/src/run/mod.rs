//! `pagecrew run`: starts an unmodified program with the preload library.

pub mod environment;
pub mod launch;
mod options;
mod summary;
pub mod supervise;

use crate::failure::Failure;
use crate::{inspect, output, preload};
use environment::Environment;
use launch::Program;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagecrew run redis-server redis.conf
  pagecrew run --stats python3 job.py --stats      (job.py gets the second)
  pagecrew run --retain 4G --decay 30s ./server    (keep up to 4 GiB for reuse)
  pagecrew run --stats-json out.json ./job
  LD_PRELOAD=libjemalloc.so.2 pagecrew run ./job   (small memory from jemalloc)

Options come before PROGRAM; what follows it belongs to it. Each can also be set in the environment, \
such as PAGECREW_RETAIN=4G; the command line wins. Programs that PROGRAM starts run in the same way.

Exit status: the program's own; if a signal ended it, the same signal ends pagecrew. 2 if there is no \
such program or an option is wrong, 3 if pagecrew can't help this program (static, set-user-ID, 32-bit, \
musl, Go) or its library is missing.";

/// Run a dynamically linked program with faster large memory
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = "pagecrew run [OPTIONS] [--] PROGRAM [ARGS]...")]
pub struct Arguments {
    #[command(flatten)]
    region: options::RegionOptions,
    /// Say at the end, on standard error, what was gained
    #[arg(long)]
    stats: bool,
    /// Write all counters, exit status, time and memory to this file at the end, as JSON
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Starts the program; without statistics it takes this process's place.
pub fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let settings = arguments.region.check()?;
    report_environment()?;

    let name = &arguments.command[0];
    let file = inspect::find(name).map_err(|why| Failure::Usage(format!("{}: {why}", name.to_string_lossy())))?;
    inspect::check(&file)?;
    let library = library()?;

    let mut environment = Environment::inherited();
    environment.put_library_first(&library);
    for (variable, value) in &settings {
        environment.set(variable, value);
    }
    // What is wrong has been reported; neither the program nor those that it starts need to say it again.
    environment.set("PAGECREW_CHECKED", "1");
    let program = Program::new(&file, &arguments.command)?;

    if !arguments.stats && arguments.stats_json.is_none() {
        let error = program.replace_this_process(&environment);
        return Err(program.failure(&error));
    }
    // Found out before the program runs for hours.
    let json = arguments.stats_json.as_deref().map(create).transpose()?;
    let outcome = supervise::run(&program, environment)?;
    if arguments.stats {
        output::block(&summary::text(name, &outcome));
    }
    if let Some((path, file)) = json
        && let Err(error) = summary::write_json(file, name, &outcome)
    {
        output::note(&format!("{}: {error}", path.display()));
    }
    Ok(supervise::end_like(outcome.ending))
}

fn create(path: &Path) -> Result<(&Path, File), Failure> {
    let file = File::create(path).map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
    Ok((path, file))
}

/// The preload library, in a form that `LD_PRELOAD` can hold.
fn library() -> Result<PathBuf, Failure> {
    let library = preload::find().map_err(|why| Failure::Impossible(why.to_string()))?;
    inspect::check_library(&library)?;
    if !environment::fits_preload(&library) {
        return Err(Failure::Impossible(format!(
            "{}: LD_PRELOAD can't hold a path with a blank or a colon; install pagecrew elsewhere or set PAGECREW_PRELOAD",
            library.display()
        )));
    }
    Ok(library)
}

/// Reports what is wrong with the variables that the program would inherit: values are errors; a name that nothing reads may
/// be a slip of the pen, or from another version.
fn report_environment() -> Result<(), Failure> {
    use pagecrew::region::{OptionError, Options};
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let mut wrong = None;
    Options::from_environment(variables, |error| match error {
        OptionError::Unknown(_) => output::note(&format!("warning: {error}")),
        OptionError::Value { .. } => wrong = wrong.take().or(Some(error.to_string())),
    });
    wrong.map_or(Ok(()), |error| Err(Failure::Usage(error)))
}
