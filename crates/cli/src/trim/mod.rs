//! `pagecrew trim`: the zero part of under-used huge pages goes back to the system, from any process, while it runs.

pub mod config;
mod hold;
mod metrics;
mod pass;
mod select;
mod session;
mod show;
mod watch;
mod worker;

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings;
use crate::values::parse_percent;
use config::Config;
use pagecrew::sys::process;
use pagecrew::trim::{Exclusion, Options, support};
use pagecrew::units::{parse_duration, parse_size};
use select::{Selection, Wanted};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Give back the zero part of under-used huge pages of running processes
///
/// Looks at a few bytes of each huge page. Of one that is mostly zero, the kernel (Linux 6.12 or later) keeps only what is not zero;
/// it compares the contents itself, so no write is lost, and no process is stopped. What went is counted afterwards.
#[derive(clap::Args, Default)]
#[command(after_help = "\
Examples:
  pagecrew trim --all --dry-run             what each process could give back
  pagecrew trim --pid 4711                  one process, now
  pagecrew trim --user redis --watch        one user's, as long as this runs, with 1 % of one CPU
  pagecrew trim --cgroup /db --watch        a control group's: held at its limit, not killed
  systemctl enable --now pagecrew-trim      those that /etc/pagecrew/pagecrew.toml says

A process protects itself by a file: touch /dev/shm/pagecrew-UID/no-trim/PID; with lines START-END or [mapping] in it, \
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
    /// The processes of a control group and those below it, by path or name; may be given more than once
    #[arg(long, value_name = "GROUP", group = "selection")]
    cgroup: Vec<String>,
    /// The processes of a user, by name or number; may be given more than once
    #[arg(long, value_name = "USER", group = "selection")]
    user: Vec<String>,
    /// The processes with a name; may be given more than once
    #[arg(long, value_name = "NAME", group = "selection")]
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
    /// Split huge pages with more than this many zero subpages, of 512 [default: 409]
    #[arg(long, value_name = "COUNT")]
    max_zero: Option<usize>,
    /// Leave this alone in every process: START-END or a mapping's name; may be given more than once
    #[arg(long, value_name = "RANGE|MAPPING")]
    exclude: Vec<String>,
    /// Leave processes with this name alone; may be given more than once
    #[arg(long, value_name = "NAME")]
    never: Vec<String>,
    /// CPU time to use at most, in percent of one CPU [default: 1% with --watch; else as much as it takes]
    #[arg(long, value_name = "PERCENT")]
    cpu: Option<String>,
    /// Bytes to read of the processes' memory at most, per second [default: 256M with --watch; else no limit]
    #[arg(long, value_name = "SIZE")]
    read: Option<String>,
    /// With --watch: how often a process is searched for huge pages [default: 10s]
    #[arg(long, value_name = "TIME", requires = "watch")]
    interval: Option<String>,
    /// With --watch: let the kernel kill at the limits of groups as it would without
    #[arg(long, requires = "watch")]
    no_hold: bool,
    /// With --watch: serve metrics (OpenMetrics, GET /metrics) at a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or at the
    /// path of a socket
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
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

fn job(arguments: &Arguments, config: Config) -> Result<Job, Failure> {
    let usage = |option: &str| {
        let option = option.to_owned();
        move |reason: String| Failure::Usage(format!("{option}: {reason}"))
    };
    let max_zero = arguments.max_zero.or(config.max_zero).unwrap_or(Options::default().max_zero);
    if max_zero > Options::MAX_ZERO_MOST {
        return Err(usage("--max-zero")(format!("{max_zero} is more than {}", Options::MAX_ZERO_MOST)));
    }
    let cpu =
        arguments.cpu.clone().or(config.cpu).map(|text| parse_percent(&text).map_err(usage("--cpu"))).transpose()?;
    let read = arguments.read.clone().or(config.read).map(|text| match parse_size(&text) {
        Ok(0) => Err(usage("--read")("nothing could be looked at with 0".into())),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(usage("--read")(error.to_string())),
    });
    let interval = arguments.interval.clone().or(config.interval).map(|text| match parse_duration(&text) {
        Ok(time) if time < INTERVAL_LEAST => {
            Err(usage("--interval")(format!("{text} is less than {} ms", INTERVAL_LEAST.as_millis())))
        }
        Ok(time) => Ok(time),
        Err(error) => Err(usage("--interval")(error.to_string())),
    });
    let exclude: Result<Vec<_>, _> =
        arguments.exclude.iter().chain(&config.exclude).map(|text| Exclusion::parse(text)).collect();
    let metrics =
        arguments.metrics.as_ref().map(|text| Address::parse(text).map_err(usage("--metrics"))).transpose()?;
    let defaults = Options::default();
    let options = Options {
        max_zero,
        dry_run: arguments.dry_run,
        exclude: exclude.map_err(usage("--exclude"))?,
        // What runs unattended is bounded; one pass is what somebody waits for.
        cpu: cpu.or(defaults.cpu.filter(|_| arguments.watch)),
        traffic: read.transpose()?.or(defaults.traffic.filter(|_| arguments.watch)),
        interval: interval.transpose()?.unwrap_or(defaults.interval),
    };
    let never = [arguments.never.clone(), config.never].concat();
    let given = Wanted {
        pids: arguments.pid.clone(),
        groups: arguments.cgroup.clone(),
        users: arguments.user.clone(),
        names: arguments.name.clone(),
        all: arguments.all,
    };
    let selection = if given != Wanted::default() {
        Selection::new(given, never, "--user")?
    } else {
        let Config { groups, users, names, all, .. } = config;
        let wanted = Wanted { pids: Vec::new(), groups, users, names, all };
        if wanted == Wanted::default() {
            return Err(Failure::Usage(format!(
                "which processes? --pid, --cgroup, --user, --name or --all, or names, users, groups or all in [trim] of {}",
                settings::MACHINE
            )));
        }
        Selection::new(wanted, never, "users")?
    };
    let hold = !arguments.no_hold && config.hold.unwrap_or(true);
    Ok(Job { selection, options, hold, json: arguments.json, metrics: metrics.or(config.metrics) })
}

const INTERVAL_LEAST: Duration = Duration::from_millis(100);

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
