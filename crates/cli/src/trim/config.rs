//! The settings of a machine, in a file.

use super::select::{Selection, parse_name};
use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Key, Setting, Table};
use crate::values::{parse_control_group, parse_percent, parse_user};
use pagecrew::trim::{Exclusion, Options};
use pagecrew::units::{parse_duration, parse_size};
use std::path::Path;
use std::time::Duration;

/// `[trim]`.
pub const TABLE: Table = Table {
    name: "trim",
    help: "`pagecrew trim`: which processes, where the command line says nothing of that, and how. All of it counts for `--watch` as well.",
    keys: &[
        Key {
            name: "names",
            example: "[\"redis-server\", \"java\"]",
            wrong: &["\"java\"", "[[]]"],
            default: "none",
            help: "Processes with these names.",
            live: true,
        },
        Key {
            name: "users",
            example: "[\"postgres\", 4711]",
            wrong: &["[\"no such user\"]", "\"postgres\""],
            default: "none",
            help: "Processes of these users, by name or number.",
            live: true,
        },
        Key {
            name: "groups",
            example: "[\"/system.slice/db.service\"]",
            wrong: &["\"/db\""],
            default: "none",
            help: "Processes of these control groups and those below them, by path or name; with `--watch`, a group that comes later or again, too.",
            live: true,
        },
        Key { name: "all", example: "false", wrong: &["1"], default: "false", help: "Every process.", live: true },
        Key {
            name: "hold",
            example: "true",
            wrong: &["\"yes\""],
            default: "true",
            help: "Whether groups wait at their memory limits until something was given back; otherwise the kernel kills there as it would without.",
            live: true,
        },
        Key {
            name: "never",
            example: "[\"qemu-system-x86\"]",
            wrong: &["\"java\""],
            default: "none",
            help: "Names of processes to leave alone, whatever else is said.",
            live: true,
        },
        Key {
            name: "exclude",
            example: "[\"[heap]\"]",
            wrong: &["[\"2000-1000\"]", "[\"\"]", "\"heap\""],
            default: "none",
            help: "Ranges START-END and names of mappings to leave alone in every process.",
            live: true,
        },
        Key {
            name: "max-zero",
            example: "409",
            wrong: &["512", "-1", "\"many\""],
            default: "409",
            help: "Huge pages with more zero subpages than this, of 512, are split; at most 511.",
            live: true,
        },
        Key {
            name: "cpu",
            example: "1",
            wrong: &["0", "101", "[]"],
            default: "1 with --watch, else as much as it takes",
            help: "CPU time that it may take, in percent of one CPU, up to 100.",
            live: true,
        },
        Key {
            name: "read",
            example: "\"256M\"",
            wrong: &["0", "\"12Q\""],
            default: "256M with --watch, else no limit",
            help: "Bytes of the processes' memory that it may read in a second.",
            live: true,
        },
        Key {
            name: "interval",
            example: "\"10s\"",
            wrong: &["\"99ms\"", "\"soon\""],
            default: "10s",
            help: "How often a process is searched for huge pages, and how often it is said what went; 100 ms at least.",
            live: true,
        },
        Key {
            name: "metrics",
            example: "9751",
            wrong: &["\"0.0.0.0:9751\""],
            default: "nowhere",
            help: "Where a watch serves metrics (docs/metrics.md): a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or the path of a socket.",
            live: false,
        },
    ],
    check: |settings| Config::of(settings)?.missing.map_or(Ok(()), Err),
};

/// What the command line or the file says; the one goes before the other.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Config {
    pub selection: Selection,
    /// Which of the users can't be found, and why. It is no matter where others are meant.
    pub missing: Option<String>,
    /// Whether groups are held at their limits.
    pub hold: Option<bool>,
    pub max_zero: Option<usize>,
    /// As a share of one CPU.
    pub cpu: Option<f64>,
    /// In bytes a second.
    pub read: Option<usize>,
    pub interval: Option<Duration>,
    /// What to leave alone in every process.
    pub exclude: Vec<Exclusion>,
    /// Where a watch serves its metrics.
    pub metrics: Option<Address>,
}

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        settings::load(file, &TABLE, Config::of)
    }

    /// What the settings of a table say.
    pub fn of(settings: Vec<Setting>) -> Result<Config, String> {
        let mut config = Config::default();
        for setting in settings {
            let selection = &mut config.selection;
            match setting.key() {
                "names" => selection.names = all(setting, parse_name)?,
                "users" => {
                    for user in setting.items()? {
                        match user.parse(parse_user) {
                            Ok(user) => selection.users.push(user),
                            Err(error) => config.missing = config.missing.or(Some(error)),
                        }
                    }
                }
                "groups" => selection.groups = all(setting, parse_control_group)?,
                "all" => selection.all = setting.flag()?,
                "never" => selection.never = all(setting, parse_name)?,
                "hold" => config.hold = Some(setting.flag()?),
                "max-zero" => config.max_zero = Some(setting.parse(parse_max_zero)?),
                "cpu" => config.cpu = Some(setting.parse(parse_percent)?),
                "read" => config.read = Some(setting.parse(parse_read)?),
                "interval" => config.interval = Some(setting.parse(parse_interval)?),
                "exclude" => config.exclude = all(setting, Exclusion::parse)?,
                "metrics" => config.metrics = Some(setting.parse(Address::parse)?),
                _ => return Err(setting.unknown(&TABLE)),
            }
        }
        Ok(config)
    }

    /// This, and where it says nothing, what `base` says. What is to be left alone adds up.
    pub fn or(self, base: Config) -> Config {
        let selects = self.selection.is_some();
        Config {
            missing: if selects { self.missing } else { base.missing },
            selection: self.selection.or(base.selection),
            hold: self.hold.or(base.hold),
            max_zero: self.max_zero.or(base.max_zero),
            cpu: self.cpu.or(base.cpu),
            read: self.read.or(base.read),
            interval: self.interval.or(base.interval),
            exclude: [self.exclude, base.exclude].concat(),
            metrics: self.metrics.or(base.metrics),
        }
    }

    /// Reads the text of a table.
    #[cfg(test)]
    pub fn parse(text: &str) -> Result<Config, String> {
        Config::of(settings::read(text)?)
    }
}

/// What `parse` makes of each value of an array.
fn all<T>(setting: Setting, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    setting.items()?.iter().map(|item| item.parse(&parse)).collect()
}

/// Zero subpages of a huge page.
pub fn parse_max_zero(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= Options::MAX_ZERO_MOST);
    count.ok_or_else(|| format!("'{text}' is not a number up to {}", Options::MAX_ZERO_MOST))
}

/// Bytes a second.
pub fn parse_read(text: &str) -> Result<usize, String> {
    match parse_size(text).map_err(|error| error.to_string())? {
        0 => Err("nothing could be looked at with 0".into()),
        bytes => Ok(bytes),
    }
}

/// How often processes are searched.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    match parse_duration(text).map_err(|error| error.to_string())? {
        time if time < INTERVAL_LEAST => Err(format!("'{text}' is less than {} ms", INTERVAL_LEAST.as_millis())),
        time => Ok(time),
    }
}

const INTERVAL_LEAST: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_everything() {
        let text = "max-zero = 450\ncpu = 2\nread = \"64M\"\ninterval = 30\nexclude = [\"heap\"]\nnever = [\"qemu\"]\n\
            names = [\"a\"]\nusers = [\"root\", 7]\ngroups = [\"/g\"]\nall = true\nhold = false\nmetrics = 9750\n";
        let selection = Selection {
            pids: Vec::new(),
            groups: vec!["/g".into()],
            users: vec![0, 7],
            names: vec!["a".into()],
            all: true,
            never: vec!["qemu".into()],
        };
        let expected = Config {
            selection,
            missing: None,
            hold: Some(false),
            max_zero: Some(450),
            cpu: Some(0.02),
            read: Some(64 << 20),
            interval: Some(Duration::from_secs(30)),
            exclude: vec![Exclusion::Mapping("heap".into())],
            metrics: Some(Address::parse("9750").unwrap()),
        };
        assert_eq!(Config::parse(text), Ok(expected));
        assert_eq!(Config::parse(""), Ok(Config::default()));
        assert!(TABLE.keys.iter().all(|key| text.contains(&format!("{} = ", key.name))));
    }

    #[test]
    fn what_goes_before_replaces_and_what_is_left_alone_adds_up() {
        let base = "names = [\"a\"]\nall = true\ncpu = 2\nread = \"1M\"\nexclude = [\"heap\"]\nnever = [\"b\"]\nhold = false\n";
        let base = || Config::parse(base).unwrap();
        let text = "users = [7]\ncpu = 3\nexclude = [\"1000-2000\"]\nnever = [\"c\"]\n";
        let first = Config::parse(text).unwrap().or(base());
        let Selection { names, users, all, never, .. } = first.selection;
        assert_eq!((names.len(), &users[..], all, never), (0, &[7][..], false, vec!["c".into(), "b".into()]));
        assert_eq!((first.cpu, first.read, first.exclude.len()), (Some(0.03), Some(1 << 20), 2));
        assert_eq!(first.hold, Some(false));
        assert_eq!(Config::default().or(base()), base());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, word) in [
            ("max-zeros = 1", "line 1: max-zeros"),
            ("max-zero = 512", "line 1: max-zero: '512' is not a number up to 511"),
            ("cpu = []", "array"),
            ("=", "1"),
            ("names = \"x\"", "names"),
            ("names = [\"x\",\n\"\"]", "line 2: names: "),
            ("all = 1", "neither true nor false"),
            ("read = 0", "line 1: read: nothing could be looked at"),
            ("interval = \"1ms\"", "line 1: interval: '1ms' is less than 100 ms"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(matches!(Config::read(Some(Path::new("/no/such/file"))), Err(Failure::Usage(_))));
    }

    #[test]
    fn a_user_who_is_gone_matters_only_where_he_is_meant() {
        let base = || Config::parse("users = [\"root\",\n\"no such user\", 7]\n").unwrap();
        assert_eq!(base().selection.users, [0, 7]);
        assert!(base().missing.is_some_and(|error| error.starts_with("line 2: users: there is no user")));
        assert!(Config::default().or(base()).missing.is_some());
        assert_eq!(Config::parse("all = true\n").unwrap().or(base()).missing, None);
    }
}
