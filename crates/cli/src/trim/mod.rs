//! `pagecrew trim`: the zero part of under-used huge pages goes back to the system, from any process, while it runs.

pub mod config;
mod hold;
mod in_the_way;
mod metrics;
mod noted;
mod pass;
mod select;
mod session;
mod show;
mod watch;
mod worker;

pub use select::parse_name;

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, AGAIN, PROTOCOL, option, options};
use crate::values::{parse_control_group, parse_percent, parse_user};
use config::{Config, TABLE};
use pagecrew::sys::process;
use pagecrew::trim::{Exclusion, Options, support};
use select::Selection;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Give back the zero part of under-used huge pages of running processes
///
/// Looks at a few bytes of each huge page. Of one that is mostly zero, the kernel (Linux 6.12 or later) keeps only what is not zero;
/// it compares the contents itself, so no write is lost, and no process is stopped. What went is counted afterwards.
#[derive(clap::Args, Clone, Default)]
#[command(after_help = "\
Examples:
  pagecrew trim --all --dry-run             what each process could give back
  pagecrew trim --pid 4711                  one process, now
  pagecrew trim --user redis --watch        one user's, as long as this runs, with 1 % of one CPU
  pagecrew trim --cgroup /db --watch        a control group's: held at its limit, not killed
  systemctl enable --now pagecrew-trim      those that /etc/pagecrew/pagecrew.toml says

A process protects itself by a file, /dev/shm/pagecrew-UID/no-trim/PID (make the directories with mode 700); with lines START-END or [mapping] in it, \
only those are left alone.

Other processes' memory takes CAP_SYS_PTRACE and CAP_SYS_NICE, which root has.")]
#[group(skip)]
#[command(
    group(clap::ArgGroup::new("selection").multiple(true)),
    override_usage = "pagecrew trim [--pid PID|--cgroup GROUP|--user USER|--name NAME|--all] [OPTIONS]"
)]
pub struct Arguments {
    /// A process; may be given more than once
    #[arg(long, value_name = "PID", group = "selection", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Vec<i32>,
    #[arg(long, value_name = "GROUP", group = "selection", help = TABLE.help("groups", AGAIN))]
    cgroup: Vec<String>,
    #[arg(long, value_name = "USER", group = "selection", help = TABLE.help("users", AGAIN))]
    user: Vec<String>,
    #[arg(long, value_name = "NAME", group = "selection", help = TABLE.help("names", AGAIN))]
    name: Vec<String>,
    /// Every process
    #[arg(long, group = "selection")]
    all: bool,
    /// Go on until stopped, instead of one pass
    #[arg(long)]
    watch: bool,
    /// Change nothing, only say what could go
    #[arg(long)]
    dry_run: bool,
    #[arg(long, value_name = "COUNT", help = TABLE.help("max-zero", ""))]
    max_zero: Option<String>,
    #[arg(long, value_name = "RANGE|MAPPING", help = TABLE.help("exclude", AGAIN))]
    exclude: Vec<String>,
    #[arg(long, value_name = "NAME", help = TABLE.help("never", AGAIN))]
    never: Vec<String>,
    #[arg(long, value_name = "PERCENT", help = TABLE.help("cpu", ""))]
    cpu: Option<String>,
    #[arg(long, value_name = "SIZE", help = TABLE.help("read", ""))]
    read: Option<String>,
    #[arg(long, value_name = "TIME", requires = "watch", help = TABLE.help("interval", "with --watch"))]
    interval: Option<String>,
    /// With --watch: let the kernel kill at the limits of groups as it would without
    #[arg(long, requires = "watch")]
    no_hold: bool,
    #[arg(long, value_name = "ADDRESS", requires = "watch", help = TABLE.help("metrics", PROTOCOL))]
    metrics: Option<String>,
    /// Settings to begin with [default: /etc/pagecrew/pagecrew.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// JSON instead of a table; with --watch one object a line, each interval
    #[arg(long)]
    json: bool,
}

/// A command line that makes sense, with the settings that it leaves open.
#[derive(Clone)]
struct Job {
    selection: Selection,
    options: Options,
    /// Whether groups are held at their limits.
    hold: bool,
    json: bool,
    /// Where metrics are served, with `--watch`.
    metrics: Option<Address>,
}

/// `pagecrew trim`.
pub fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let job = read(&arguments)?;
    support::check().map_err(|error| Failure::Impossible(error.to_string()))?;
    // Each process takes two descriptors, and there may be ten thousand.
    process::raise_descriptor_limit();
    if arguments.watch { watch::run(&arguments, job) } else { pass::run(job) }
}

/// What is to be done, by the command line and the file as it is now.
fn read(arguments: &Arguments) -> Result<Job, Failure> {
    job(arguments, Config::read(arguments.config.as_deref())?)
}

/// Fails as a watch would for the settings of `file`.
pub fn check(file: Option<&Path>) -> Result<(), Failure> {
    read(&Arguments { watch: true, config: file.map(Path::to_owned), ..Arguments::default() }).map(drop)
}

fn job(arguments: &Arguments, file: Config) -> Result<Job, Failure> {
    let config = given(arguments)?.or(file);
    if let Some(missing) = config.missing {
        return Err(Failure::Usage(missing));
    }
    if !config.selection.is_some() {
        return Err(Failure::Usage(format!(
            "which processes? --pid, --cgroup, --user, --name or --all, or names, users, groups or all in [trim] of {}",
            settings::MACHINE
        )));
    }
    let defaults = Options::default();
    let options = Options {
        max_zero: config.max_zero.unwrap_or(defaults.max_zero),
        dry_run: arguments.dry_run,
        exclude: config.exclude,
        // What runs unattended is bounded; one pass is what somebody waits for.
        cpu: config.cpu.or(defaults.cpu.filter(|_| arguments.watch)),
        traffic: config.read.or(defaults.traffic.filter(|_| arguments.watch)),
        interval: config.interval.unwrap_or(defaults.interval),
    };
    Ok(Job {
        selection: config.selection,
        options,
        hold: config.hold.unwrap_or(true),
        json: arguments.json,
        metrics: config.metrics,
    })
}

/// What the command line says.
fn given(arguments: &Arguments) -> Result<Config, Failure> {
    Ok(Config {
        selection: Selection {
            pids: arguments.pid.clone(),
            groups: options("--cgroup", &arguments.cgroup, parse_control_group)?,
            users: options("--user", &arguments.user, parse_user)?,
            names: options("--name", &arguments.name, parse_name)?,
            all: arguments.all,
            never: options("--never", &arguments.never, parse_name)?,
        },
        missing: None,
        hold: arguments.no_hold.then_some(false),
        max_zero: option("--max-zero", &arguments.max_zero, config::parse_max_zero)?,
        cpu: option("--cpu", &arguments.cpu, parse_percent)?,
        read: option("--read", &arguments.read, config::parse_read)?,
        interval: option("--interval", &arguments.interval, config::parse_interval)?,
        exclude: options("--exclude", &arguments.exclude, Exclusion::parse)?,
        metrics: option("--metrics", &arguments.metrics, Address::parse)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(arguments: &[&str]) -> Result<Job, String> {
        let command = Command::try_parse_from([&["trim"], arguments].concat()).map_err(|error| error.to_string())?;
        let config = Config::parse("max-zero = 300\ncpu = \"5%\"\nexclude = [\"heap\"]\nnever = [\"a\"]\n").unwrap();
        job(&command.arguments, config).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let job = parse(&["--pid", "1", "--max-zero", "450", "--read", "1M", "--exclude", "1000-2000"]).unwrap();
        assert_eq!((job.options.max_zero, job.options.cpu, job.options.traffic), (450, Some(0.05), Some(1 << 20)));
        assert_eq!(job.options.exclude.len(), 2);
        assert_eq!(parse(&["--all"]).unwrap().options.max_zero, 300);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (arguments, word) in [
            (&[][..], "--pid"),
            (&["--watch", "--json"], "--pid"),
            (&["--pid", "0"], "0"),
            (&["--pid", "x"], "x"),
            (&["--all", "--max-zero", "512"], "511"),
            (&["--all", "--cpu", "0"], "percentage"),
            (&["--all", "--cpu", "101%"], "percentage"),
            (&["--all", "--read", "0"], "0"),
            (&["--all", "--interval", "1s"], "--watch"),
            (&["--all", "--watch", "--interval", "1ms"], "100 ms"),
            (&["--all", "--no-hold"], "--watch"),
            (&["--all", "--metrics", "9750"], "--watch"),
            (&["--all", "--watch", "--metrics", "0.0.0.0:9750"], "--metrics: '0.0.0.0:9750'"),
            (&["--all", "--exclude", ""], "START-END"),
            (&["--user", "no such user"], "no such user"),
        ] {
            let error = parse(arguments).err().unwrap_or_else(|| panic!("{arguments:?} was taken"));
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }
}
