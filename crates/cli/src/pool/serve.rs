//! `pagecrew pool serve`.

use super::config::{self, Config, TABLE};
use super::subordinates::{self, SUBUID};
use super::{failure, metrics, progress};
use crate::failure::Failure;
use crate::metrics::{Address, Listener};
use crate::notify;
use crate::output::note;
use crate::service::{Event, Service};
use crate::settings::{AGAIN, PROTOCOL, note_fixed, option, options, wrong};
use crate::values::{groups_of, parse_group, parse_percent};
use indicatif::ProgressBar;
use pagecrew::pool::{Options, Progress, Server, Tell};
use pagecrew::sys::clock::now_ns;
use pagecrew::units::{Bytes, parse_duration, parse_size};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

/// Keep memory ready, in files that were zeroed before anybody asks
///
/// Fills files of huge pages on a file system of its own, in the idle class and with a bounded share of one CPU, as
/// long as enough memory is free and nobody waits for memory. A file is handed out once and never comes back. Needs
/// root.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "\
Examples:
  pagecrew pool serve --size 16G
  pagecrew pool serve --size 24G --file 8G:2    (two files of 8 GiB are always among it)
  pagecrew pool serve --node 0=16G --node 1=8G --backing hugetlbfs
  pagecrew pool serve --size 16G --metrics 9750 (OpenMetrics at http://127.0.0.1:9750/metrics)
  pagecrew pool serve --size 16G --socket-group kvm --quota 8G --quota alice=32G
  systemctl enable --now pagecrew-pool          (settings: /etc/pagecrew/pagecrew.toml)

SIGHUP reads the file again; size, nodes, files, cpu, floor, below-floor, unused and quota take effect at once. \
SIGTERM and SIGINT end it: what is ready is given back, what is taken stays with those who have it.")]
pub struct Arguments {
    #[arg(long, value_name = "SIZE", conflicts_with = "node", help = TABLE.help("size", "a multiple of 2 MiB, as all sizes here"))]
    size: Option<String>,
    #[arg(long, value_name = "N=SIZE", help = TABLE.help("nodes", &format!("such as 0=8G; {AGAIN}")))]
    node: Vec<String>,
    #[arg(long, value_name = "BACKING", help = TABLE.help("backing", ""))]
    backing: Option<String>,
    #[arg(long, value_name = "SIZE[:COUNT]", help = TABLE.help("files", &format!("such as 8G:2; {AGAIN}")))]
    file: Vec<String>,
    #[arg(long, value_name = "PERCENT", help = TABLE.help("cpu", ""))]
    cpu: Option<String>,
    #[arg(long, value_name = "SIZE", help = TABLE.help("floor", ""))]
    floor: Option<String>,
    /// Give out more than is ready even where that leaves less than the floor
    #[arg(long)]
    below_floor: bool,
    #[arg(long, value_name = "SIZE", help = TABLE.help("ready", ""))]
    ready: Option<String>,
    #[arg(long, value_name = "SIZE", help = TABLE.help("limit", ""))]
    limit: Option<String>,
    #[arg(long, value_name = "TIME", help = TABLE.help("unused", ""))]
    unused: Option<String>,
    #[arg(long, value_name = "DIR", help = TABLE.help("directory", ""))]
    directory: Option<PathBuf>,
    #[arg(long, value_name = "PATH", help = TABLE.help("socket", ""))]
    socket: Option<PathBuf>,
    #[arg(long, value_name = "MODE", help = TABLE.help("socket-mode", ""))]
    socket_mode: Option<String>,
    #[arg(long, value_name = "GROUP", help = TABLE.help("socket-group", ""))]
    socket_group: Option<String>,
    #[arg(long, value_name = "[USER=|@GROUP=]SIZE", help = TABLE.help("quota", &format!("without a name, of each user; {AGAIN}")))]
    quota: Vec<String>,
    #[arg(long, value_name = "ADDRESS", help = TABLE.help("metrics", PROTOCOL))]
    metrics: Option<String>,
    /// Settings to begin with [default: /etc/pagecrew/pagecrew.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Serves until it is told to end.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let settings = settings(arguments)?;
    let again = arguments.clone();
    let mut service = Service::begin(move || self::settings(&again))?;
    let mut subordinates = subordinates::Watch::new(SUBUID.into())?;
    let listener = settings.metrics.as_ref().map(Listener::new).transpose()?;
    let server = Server::start(settings.options.clone(), Tell { log, standing: notify::status }).map_err(failure)?;
    let metrics = listener.map(|listener| metrics::serve(listener, &server)).transpose()?;
    if let Some(metrics) = &metrics {
        log(&format!("metrics at {}", metrics.address()));
    }
    let bar = BAR.get_or_init(progress::bar);
    let mut served = false;
    let mut standstill = Standstill::new(now_ns());
    loop {
        if !served {
            let Progress { ready, waiting, .. } = server.progress();
            served = ready >= settings.ready;
            if !served && standstill.lasts(ready, now_ns()) {
                served = true;
                log(&format!(
                    "{} of {} that were to be ready are, and it goes no further{}: what comes after the pool is no longer kept waiting",
                    Bytes(ready as u64),
                    Bytes(settings.ready as u64),
                    waiting.map_or(String::new(), |why| format!(" ({why})"))
                ));
            }
            if served { service.ready() } else { service.starting() }
        }
        let look = (!served).then_some(LOOK);
        let pause = [progress::show(bar, &server), look].into_iter().flatten().min();
        match service.wait(pause.map(|pause| now_ns() + pause.as_nanos() as u64), subordinates.descriptors()) {
            Event::Due(_) => match subordinates.changed() {
                None => {}
                Some(Ok(now)) => server.set_subordinates(now),
                Some(Err(error)) => note(&format!("whose users in user namespaces are stays as it is: {error}")),
            },
            Event::Reload(read) => {
                reload(&server, read, &settings);
                subordinates.read_again();
                service.reloaded();
            }
            Event::Stop => break,
        }
    }
    bar.finish_and_clear();
    // A second signal ends us at once; the next server cleans up.
    service.stopping();
    drop(metrics);
    let left = server.stop().map_err(failure)?;
    match left {
        0 => {}
        1 => note("1 file is still taken; the next server takes it over"),
        _ => note(&format!("{left} files are still taken; the next server takes them over")),
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails as the service would for the settings of `file`.
pub fn check(file: Option<&Path>) -> Result<(), Failure> {
    settings(&Arguments { config: file.map(Path::to_owned), ..Arguments::default() }).map(drop)
}

/// Whether filling goes on, before the service is said to be served: a machine must not wait for ever in the middle of its start.
struct Standstill {
    /// The most that was ready, and since when.
    most: usize,
    since_ns: u64,
}

impl Standstill {
    /// So long nothing may come.
    const MOST: Duration = Duration::from_secs(60);

    fn new(now_ns: u64) -> Standstill {
        Standstill { most: 0, since_ns: now_ns }
    }

    /// Whether nothing has come for too long, with `ready` bytes ready now.
    fn lasts(&mut self, ready: usize, now_ns: u64) -> bool {
        if ready > self.most {
            *self = Standstill { most: ready, since_ns: now_ns };
        }
        now_ns.saturating_sub(self.since_ns) >= Standstill::MOST.as_nanos() as u64
    }
}

/// How often it is looked whether enough is ready to say that it is served.
const LOOK: Duration = Duration::from_millis(250);

/// Shown while the pool is filled for the first time, where somebody may be looking.
static BAR: OnceLock<ProgressBar> = OnceLock::new();

fn log(line: &str) {
    match BAR.get() {
        Some(bar) => bar.suspend(|| note(line)),
        None => note(line),
    }
}

/// Goes on with settings that were read again. Where they make no sense, all stays as it is.
fn reload(server: &Server, read: Result<Settings, Failure>, running: &Settings) {
    let result = read.and_then(|settings| {
        server.reconfigure(&settings.options).map_err(failure)?;
        Ok(settings)
    });
    match result {
        Ok(settings) => {
            log("the settings were read again");
            note_fixed(&fixed_settings(running, &settings));
        }
        Err(error) => note(&format!("the settings stay as they are: {error}")),
    }
}

/// What differs between two settings and does not change in a running server.
fn fixed_settings(running: &Settings, wanted: &Settings) -> Vec<&'static str> {
    let (metrics, ready) = (running.metrics != wanted.metrics, running.ready != wanted.ready);
    let (running, wanted) = (&running.options, &wanted.options);
    TABLE.fixed(|name| match name {
        "metrics" => metrics,
        "ready" => ready,
        "directory" => running.directory != wanted.directory,
        "socket" => running.socket != wanted.socket,
        "socket-mode" => running.socket_mode != wanted.socket_mode,
        "socket-group" => running.socket_group != wanted.socket_group,
        "backing" => running.backing != wanted.backing,
        "limit" => running.limit != wanted.limit,
        _ => false,
    })
}

/// The pool, and what belongs to the service.
struct Settings {
    options: Options,
    /// How much is to be ready before it is said to be served.
    ready: usize,
    metrics: Option<Address>,
}

fn settings(arguments: &Arguments) -> Result<Settings, Failure> {
    let config = given(arguments)?.or(Config::read(arguments.config.as_deref())?);
    let (ready, metrics) = (config.ready.unwrap_or(0), config.metrics.clone());
    let mut options = config.options(filler()).map_err(Failure::Usage)?;
    // What a former server handed out counts for the groups of whoever has it, also of those that no file of groups tells.
    for user in pagecrew::pool::holders(&options.directory) {
        for group in groups_of(user) {
            if let Some(quota) = options.quotas.groups.get_mut(&group).filter(|_| user != 0) {
                quota.members.insert(user);
            }
        }
    }
    options.quotas.subordinates = subordinates::read(Path::new(SUBUID))?;
    Ok(Settings { options, ready, metrics })
}

/// This program itself, also where another version has taken its place in the file system.
fn filler() -> Vec<OsString> {
    vec!["/proc/self/exe".into(), "pool-fill".into()]
}

/// What the command line says.
fn given(arguments: &Arguments) -> Result<Config, Failure> {
    let mut config = Config {
        size: option("--size", &arguments.size, config::parse_file_size)?,
        nodes: options("--node", &arguments.node, config::parse_node_size)?.into_iter().collect(),
        backing: option("--backing", &arguments.backing, config::parse_backing)?,
        files: options("--file", &arguments.file, config::parse_files)?,
        cpu: option("--cpu", &arguments.cpu, parse_percent)?,
        floor: option("--floor", &arguments.floor, parse_size)?,
        ready: option("--ready", &arguments.ready, config::parse_file_size)?,
        below_floor: arguments.below_floor.then_some(true),
        limit: option("--limit", &arguments.limit, config::parse_file_size)?,
        unused: option("--unused", &arguments.unused, parse_duration)?,
        directory: arguments.directory.clone(),
        socket: arguments.socket.clone(),
        socket_mode: option("--socket-mode", &arguments.socket_mode, config::parse_mode)?,
        socket_group: option("--socket-group", &arguments.socket_group, parse_group)?,
        metrics: option("--metrics", &arguments.metrics, Address::parse)?,
        ..Config::default()
    };
    for quota in &arguments.quota {
        let (user, size) = quota.split_once('=').map_or((None, quota.as_str()), |(user, size)| (Some(user), size));
        config.set_quota(user, size).map_err(|reason| wrong("--quota", reason))?;
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use pagecrew::pool::{Backing, Sizes};

    #[derive(Parser, Debug)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    const FILE: &str = "[pool]\nsize = \"4G\"\ncpu = 5\nquota = { default = \"1G\" }\nsocket-mode = \"0666\"\n";

    fn parse(arguments: &[&str]) -> Result<Options, String> {
        parse_all(arguments).map(|settings| settings.options)
    }

    fn parse_all(arguments: &[&str]) -> Result<Settings, String> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pool.toml");
        std::fs::write(&file, FILE).unwrap();
        let words = [&["serve", "--config", file.to_str().unwrap()], arguments].concat();
        let command = Command::try_parse_from(words).map_err(|error| error.to_string())?;
        settings(&command.arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let from_file = parse(&[]).unwrap();
        assert_eq!((from_file.sizes, from_file.cpu, from_file.socket_mode), (Sizes::Total(4 << 30), 0.05, 0o666));
        assert_eq!(from_file.filler.len(), 2);
        let options = parse(&[
            "--node=0=2M",
            "--node",
            "1=4M",
            "--backing=tmpfs",
            "--file",
            "2M:2",
            "--cpu=7%",
            "--floor=3",
            "--below-floor",
            "--limit=8M",
            "--unused=5s",
            "--directory=/d",
            "--socket-mode=600",
            "--socket-group=0",
            "--quota=2G",
            "--quota",
            "root=3G",
        ])
        .unwrap();
        assert_eq!(options.sizes, Sizes::Nodes([(0, 2 << 20), (1, 4 << 20)].into()));
        assert_eq!((options.backing, options.files, options.cpu), (Backing::Tmpfs, vec![(2 << 20, 2)], 0.07));
        assert!(options.below_floor && !from_file.below_floor);
        assert_eq!((options.floor, options.limit, options.unused), (Some(3), Some(8 << 20), Duration::from_secs(5)));
        assert_eq!((options.socket.to_str(), options.socket_mode), (Some("/d/socket"), 0o600));
        assert_eq!((options.quotas.default, options.quotas.users.get(&0)), (Some(2 << 30), Some(&(3 << 30))));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (arguments, word) in [
            (&["--size", "1G", "--node", "0=1G"][..], "--size"),
            (&["--size", "3M"], "--size: '3M' is not a multiple of 2 MiB"),
            (&["--size", "1M"], "--size: '1M' is less than 2 MiB"),
            (&["--size", "lots"], "--size: 'lots'"),
            (&["--node", "8G"], "--node: '8G'"),
            (&["--node", "x=8G"], "--node: 'x'"),
            (&["--file", "8G:0"], "--file: '8G:0'"),
            (&["--file", "8G"], "4 GiB"),
            (&["--backing", "disk"], "--backing: 'disk'"),
            (&["--cpu", "0"], "--cpu: '0'"),
            (&["--floor", "x"], "--floor: 'x'"),
            (&["--limit", "3M"], "--limit: '3M'"),
            (&["--ready", "1"], "--ready: '1'"),
            (&["--ready", "8G"], "never"),
            (&["--unused", "soon"], "--unused: 'soon'"),
            (&["--socket-mode", "rw"], "--socket-mode: 'rw'"),
            (&["--socket-group", "no such group"], "--socket-group: there is no group"),
            (&["--quota", "no such user=1G"], "--quota: there is no user"),
            (&["--quota", "root=x"], "--quota: 'x'"),
            (&["--metrics", "0.0.0.0:9750"], "--metrics: '0.0.0.0:9750' can be reached from other machines"),
            (&["--metrics", "everywhere"], "--metrics: 'everywhere'"),
        ] {
            let error = parse(arguments).err().unwrap_or_else(|| panic!("{arguments:?} was taken"));
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn a_start_does_not_wait_for_ever() {
        let second = 1_000_000_000;
        let mut standstill = Standstill::new(0);
        // However slow, as long as something comes.
        assert!((1..100).all(|number| !standstill.lasts(number as usize, number * 59 * second)));
        let last = 99 * 59 * second;
        assert!(!standstill.lasts(5, last + 59 * second) && standstill.lasts(99, last + 60 * second));
    }

    #[test]
    fn what_needs_a_new_start_is_named() {
        let running = parse_all(&[]).unwrap();
        let live = parse_all(&["--size=2G", "--cpu=9", "--floor=1G", "--unused=1", "--quota=1G"]).unwrap();
        assert!(fixed_settings(&running, &live).is_empty());
        let fixed = [
            "--directory=/d",
            "--backing=tmpfs",
            "--limit=8G",
            "--ready=1G",
            "--socket-mode=0",
            "--socket-group=0",
            "--metrics=9750",
        ];
        let fixed = fixed_settings(&running, &parse_all(&fixed).unwrap());
        let all: Vec<&str> = TABLE.keys.iter().filter(|key| !key.live).map(|key| key.name).collect();
        assert_eq!(fixed, all);
    }
}
