//! The settings of a machine, in a file.

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Key, Setting, Table};
use std::path::Path;

/// `[trim]`.
pub const TABLE: Table = Table {
    name: "trim",
    help: "`pagecrew trim`: which processes, where the command line says nothing of that, and how. All of it counts for `--watch` as well.",
    keys: &[
        Key {
            name: "names",
            example: "[\"redis-server\", \"java\"]",
            default: "none",
            help: "Processes with these names.",
            live: true,
        },
        Key {
            name: "users",
            example: "[\"postgres\", 4711]",
            default: "none",
            help: "Processes of these users, by name or number.",
            live: true,
        },
        Key {
            name: "groups",
            example: "[\"/system.slice/db.service\"]",
            default: "none",
            help: "Processes of these control groups and those below them, by path or name; with `--watch`, a group that comes later or again, too.",
            live: true,
        },
        Key { name: "all", example: "false", default: "false", help: "Every process.", live: true },
        Key {
            name: "hold",
            example: "true",
            default: "true",
            help: "Whether groups wait at their memory limits until something was given back; otherwise the kernel kills there as it would without.",
            live: true,
        },
        Key {
            name: "never",
            example: "[\"qemu-system-x86\"]",
            default: "none",
            help: "Names of processes to leave alone, whatever else is said.",
            live: true,
        },
        Key {
            name: "exclude",
            example: "[\"[heap]\"]",
            default: "none",
            help: "Ranges START-END and names of mappings to leave alone in every process.",
            live: true,
        },
        Key {
            name: "max-zero",
            example: "409",
            default: "409",
            help: "Huge pages with more zero subpages than this, of 512, are split; at most 511.",
            live: true,
        },
        Key {
            name: "cpu",
            example: "1",
            default: "1 with --watch",
            help: "CPU time that it may take, in percent of one CPU, up to 100.",
            live: true,
        },
        Key {
            name: "read",
            example: "\"256M\"",
            default: "256M with --watch",
            help: "Bytes of the processes' memory that it may read in a second.",
            live: true,
        },
        Key {
            name: "interval",
            example: "\"10s\"",
            default: "10s",
            help: "How often a process is searched for huge pages, and how often it is said what went; 100 ms at least.",
            live: true,
        },
        Key {
            name: "metrics",
            example: "9751",
            default: "nowhere",
            help: "Where a watch serves metrics (docs/metrics.md): a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or the path of a socket.",
            live: false,
        },
    ],
};

/// What the file may say; the command line goes before it.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Config {
    pub names: Vec<String>,
    pub users: Vec<String>,
    pub groups: Vec<String>,
    pub all: bool,
    pub hold: Option<bool>,
    pub max_zero: Option<usize>,
    /// Percent of one CPU.
    pub cpu: Option<String>,
    pub read: Option<String>,
    pub interval: Option<String>,
    /// Ranges and mappings to leave alone in every process.
    pub exclude: Vec<String>,
    /// Names of processes to leave alone.
    pub never: Vec<String>,
    /// Where a watch serves its metrics.
    pub metrics: Option<Address>,
}

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        settings::load(file, &TABLE, Config::of)
    }

    /// Whether it says which processes are meant.
    pub fn selects(&self) -> bool {
        let Config { names, users, groups, all, .. } = self;
        *all || [names, users, groups].into_iter().any(|list| !list.is_empty())
    }

    /// What the settings of a table say.
    pub fn of(settings: Vec<Setting>) -> Result<Config, String> {
        let texts = |setting: Setting| setting.items()?.iter().map(Setting::text).collect::<Result<Vec<_>, _>>();
        let mut config = Config::default();
        for setting in settings {
            match setting.key() {
                "names" => config.names = texts(setting)?,
                "users" => config.users = texts(setting)?,
                "groups" => config.groups = texts(setting)?,
                "all" => config.all = setting.flag()?,
                "hold" => config.hold = Some(setting.flag()?),
                "max-zero" => config.max_zero = Some(setting.parse(str::parse)?),
                "cpu" => config.cpu = Some(setting.text()?),
                "read" => config.read = Some(setting.text()?),
                "interval" => config.interval = Some(setting.text()?),
                "exclude" => config.exclude = texts(setting)?,
                "never" => config.never = texts(setting)?,
                "metrics" => config.metrics = Some(setting.parse(Address::parse)?),
                _ => return Err(setting.unknown(&TABLE)),
            }
        }
        Ok(config)
    }

    /// Reads the text of a table.
    #[cfg(test)]
    pub fn parse(text: &str) -> Result<Config, String> {
        Config::of(settings::read(text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_everything() {
        let text = "max-zero = 450\ncpu = 2\nread = \"64M\"\ninterval = 30\nexclude = [\"heap\"]\nnever = [\"qemu\"]\n\
            names = [\"a\"]\nusers = [\"root\", 7]\ngroups = [\"/g\"]\nall = true\nhold = false\nmetrics = 9750\n";
        let config = Config::parse(text).unwrap();
        assert_eq!(config.metrics, Some(Address::parse("9750").unwrap()));
        let texts = [config.cpu, config.read, config.interval].map(Option::unwrap);
        assert_eq!((config.max_zero, texts), (Some(450), ["2", "64M", "30"].map(str::to_owned)));
        assert_eq!((config.exclude, config.never), (vec!["heap".to_owned()], vec!["qemu".to_owned()]));
        assert_eq!([config.names, config.users, config.groups].concat(), ["a", "root", "7", "/g"]);
        assert_eq!((config.all, config.hold), (true, Some(false)));
        assert_eq!(Config::parse("").unwrap(), Config::default());
        assert!(TABLE.keys.iter().all(|key| text.contains(&format!("{} = ", key.name))));
    }

    #[test]
    fn the_examples_hold() {
        let text: String = TABLE.keys.iter().map(|key| format!("{} = {}\n", key.name, key.example)).collect();
        assert!(Config::parse(&text).is_ok(), "{text}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("max-zeros = 1", "max-zeros"),
            ("max-zero = -1", "max-zero"),
            ("cpu = []", "array"),
            ("=", "1"),
            ("names = \"x\"", "names"),
            ("all = 1", "neither true nor false"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(matches!(Config::read(Some(Path::new("/no/such/file"))), Err(Failure::Usage(_))));
    }
}
