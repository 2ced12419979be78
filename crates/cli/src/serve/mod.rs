//! `pagecrew serve`: the services of a machine under one supervisor.

pub mod config;
mod directory;
pub mod gateway;
mod member;
mod metrics;
mod part;
mod report;
mod supervisor;

use crate::failure::Failure;
use crate::metrics::{Address, Listener};
use crate::output::note;
use crate::service::{Event, Service};
use crate::settings::{AGAIN, PROTOCOL, option, options, wrong};
use config::{Config, TABLE};
use directory::Directory;
use member::Member;
use metrics::Board;
use pagecrew::sys::child;
use pagecrew::sys::clock::now_ns;
use part::Part;
use report::Reporter;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use supervisor::Supervisor;

/// Run the services of this machine together: pool, trim and reclaim
///
/// Each is a process of its own, with no more rights than it needs, and is started again when it ends. One that can't work here, or whose
/// settings are wrong, is left out, and the others go on. One endpoint has the metrics of all.
#[derive(clap::Args, Clone, Default)]
#[command(after_help = "\
Examples:
  pagecrew serve                              what /etc/pagecrew/pagecrew.toml has settings for, and reclaim
  pagecrew serve --service reclaim --service trim
  pagecrew serve --metrics 9753               all metrics at http://127.0.0.1:9753/metrics
  pagecrew serve --json                       for programs: one object a line, whenever something changes
  systemctl enable --now pagecrew             as long as the machine runs

SIGHUP reads the settings again, here and in every service; a service that was added or taken out starts or ends. \
SIGTERM and SIGINT end all of them. It takes root.")]
pub struct Arguments {
    #[arg(long, value_name = "NAME", help = TABLE.help("services", &format!("pool, trim or reclaim; {AGAIN}")))]
    service: Vec<String>,
    #[arg(long, value_name = "ADDRESS", help = TABLE.help("metrics", PROTOCOL))]
    metrics: Option<String>,
    #[arg(long, value_name = "DIR", help = TABLE.help("directory", ""))]
    directory: Option<PathBuf>,
    /// Settings to begin with [default: /etc/pagecrew/pagecrew.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON object a line, whenever something changes, instead of sentences
    #[arg(long)]
    json: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
struct Job {
    services: Vec<Part>,
    metrics: Option<Address>,
    directory: PathBuf,
    /// Services for which the file says where their metrics are, which does not count here.
    own_metrics: Vec<Part>,
}

fn job(arguments: &Arguments, mut config: Config) -> Result<Job, Failure> {
    let given = options("--service", &arguments.service, Part::parse)?;
    if !given.is_empty() {
        config.services = Some(given);
    }
    let metrics = option("--metrics", &arguments.metrics, Address::parse)?;
    let directory = arguments.directory.as_ref().map(std::path::absolute).transpose();
    let directory = directory.map_err(|error| wrong("--directory", error))?;
    Ok(Job {
        services: config.wanted(),
        metrics: metrics.or(config.metrics),
        directory: directory.or(config.directory).unwrap_or_else(|| config::DIRECTORY.into()),
        own_metrics: config.own_metrics,
    })
}

/// What is to be done, by the command line and the file as it is now, if every service could begin with it.
fn read(arguments: &Arguments) -> Result<Job, Failure> {
    let file = arguments.config.as_deref();
    let job = job(arguments, Config::read(file)?)?;
    job.services.iter().try_for_each(|part| part.check(file))?;
    Ok(job)
}

/// `pagecrew serve`.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    // Services are started in this directory, but may look for it by another path.
    let config = arguments.config.as_ref().map(std::path::absolute).transpose();
    let config = config.map_err(|error| Failure::Usage(format!("--config: {error}")))?;
    let mut job = read(arguments)?;
    if !child::may_confine() {
        return Err(Failure::Impossible(
            "pagecrew serve takes root, with CAP_SETPCAP: it gives each service the rights that it needs, and no other"
                .into(),
        ));
    }
    raise_limits();
    let again = arguments.clone();
    let mut service = Service::begin(move || read(&again))?;
    // Signals are heard from here on.
    let mut newer = None;
    let wait = |time: Duration| {
        service.starting();
        match service.wait(Some(now_ns() + time.as_nanos() as u64), []) {
            Event::Stop => return false,
            Event::Reload(read) => newer = Some(read),
            Event::Due(_) => {}
        }
        true
    };
    let Some(directory) = Directory::take(&job.directory, wait)? else { return Ok(ExitCode::SUCCESS) };
    match newer {
        Some(Ok(newer)) => job = Job { directory: job.directory, ..newer },
        Some(Err(error)) => note(&format!("the settings stay as they are: {error}")),
        None => {}
    }
    let listener = job.metrics.as_ref().map(Listener::new).transpose()?;
    let board = Board::default();
    let own_metrics = board.serve(&directory.own_metrics())?;
    if let Some(listener) = &listener {
        note(&format!("metrics at {}", listener.address));
    }
    say_own_metrics(&job, &[]);
    let mut members: Vec<Member> = Part::SERVICES.into_iter().map(Member::new).collect();
    members.extend(listener.is_some().then(|| Member::new(Part::Metrics)));
    let reporter = Reporter { json: arguments.json };
    let mut supervisor = Supervisor {
        service,
        directory,
        config,
        listener,
        members,
        board,
        reporter,
        job,
        settled: false,
        status: String::new(),
    };
    let result = supervisor.run();
    let ended = supervisor.end();
    drop(own_metrics);
    result.and(ended)?;
    Ok(ExitCode::SUCCESS)
}

/// What services need in the place of rights that they don't get: the pool moves its filler back from the idle class, and guards lock their
/// few pages. Where that is refused, services say so themselves.
fn raise_limits() {
    for (resource, wanted) in [(Resource::Nice, Some(20)), (Resource::Memlock, None)] {
        let now = getrlimit(resource);
        let raised = |limit: Option<u64>| limit.zip(wanted).map(|(limit, wanted)| limit.max(wanted));
        let _ = setrlimit(resource, Rlimit { current: raised(now.current), maximum: raised(now.maximum) });
    }
}

/// Says once of each service that its own setting does not count.
fn say_own_metrics(job: &Job, said: &[Part]) {
    for part in job.own_metrics.iter().filter(|part| job.services.contains(part) && !said.contains(part)) {
        note(&format!("metrics in [{part}] does not count here: metrics in [serve] is for all services"));
    }
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

    fn parse(arguments: &[&str], text: &str) -> Result<Job, String> {
        let command = Command::try_parse_from([&["serve"], arguments].concat()).map_err(|error| error.to_string())?;
        job(&command.arguments, Config::parse(text)?).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let text = "[serve]\nservices = [\"pool\"]\nmetrics = 9753\ndirectory = \"/d\"\n";
        let from_file = parse(&[], text).unwrap();
        assert_eq!((from_file.services, from_file.directory), (vec![Part::Pool], "/d".into()));
        assert_eq!(from_file.metrics, Some(Address::parse("9753").unwrap()));
        let words = ["--service", "trim", "--service=reclaim", "--metrics", "/m", "--directory=/e"];
        let given = parse(&words, text).unwrap();
        assert_eq!((given.services, given.directory), (vec![Part::Reclaim, Part::Trim], "/e".into()));
        assert_eq!(given.metrics, Some(Address::Socket("/m".into())));
        let nothing = parse(&[], "").unwrap();
        assert_eq!((nothing.services, nothing.directory), (vec![Part::Reclaim], config::DIRECTORY.into()));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (arguments, word) in [
            (&["--service", "pol"][..], "--service: there is no service 'pol'"),
            (&["--service", "metrics"], "--service"),
            (&["--metrics", "0.0.0.0:1"], "--metrics: '0.0.0.0:1'"),
            (&["--metrics"], "--metrics"),
            (&["pool"], "pool"),
        ] {
            let error = parse(arguments, "").unwrap_err();
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn every_service_has_to_be_able_to_begin_with_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            super::read(&Arguments { config: Some(file.clone()), ..Arguments::default() })
                .map_err(|error| (error.status(), error.to_string()))
        };
        assert_eq!(read("[pool]\nsize = \"64M\"\n[trim]\nall = true\n").unwrap().services, Part::SERVICES);
        for (text, word) in [
            ("[serve]\nservices = [\"pool\"]\n", "how much is to be kept ready"),
            ("[serve]\nservices = [\"trim\"]\n", "which processes"),
            ("[pool]\nsize = \"64M\"\nfiles = [\"128M\"]\n", "the files are 128 MiB together"),
            ("[trim]\nall = true\nmax-zero = 512\n", "line 3: trim.max-zero: '512' is not"),
            ("[reclaim]\nmost = 50\n", "line 2: reclaim.most: '50' is more than 10 percent"),
            ("[reclaim]\n\nmots = 50\n", "line 3: reclaim.mots"),
            ("[serv]\n", "line 1: serv"),
            ("x", "line 1: "),
        ] {
            let (status, error) = read(text).err().unwrap_or_else(|| panic!("{text} was taken"));
            assert!(status == 2 && error.contains(word), "{text}: {error}");
        }
        assert!(!error_of_missing().is_empty());
    }

    fn error_of_missing() -> String {
        let missing = Arguments { config: Some("/no/such/file".into()), ..Arguments::default() };
        read(&missing).unwrap_err().to_string()
    }
}
