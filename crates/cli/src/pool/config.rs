//! The settings of a pool: from the machine's file, and from the command line, which goes before it.

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Key, Setting, Table};
use crate::values::{members_of, parse_group, parse_percent, parse_user};
use pagecrew::pool::{Backing, GroupQuota, Options, Quotas, Sizes};
use pagecrew::sys::HUGE_PAGE_SIZE;
use pagecrew::units::{Bytes, parse_duration, parse_size};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What one of the two says.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Config {
    pub size: Option<usize>,
    pub nodes: BTreeMap<usize, usize>,
    pub backing: Option<Backing>,
    /// Sizes, and how many of each.
    pub files: Vec<(usize, usize)>,
    /// As a share of one CPU.
    pub cpu: Option<f64>,
    pub floor: Option<usize>,
    /// What has to be ready before the service manager is told that it is served.
    pub ready: Option<usize>,
    pub below_floor: Option<bool>,
    pub limit: Option<usize>,
    pub unused: Option<Duration>,
    pub directory: Option<PathBuf>,
    pub socket: Option<PathBuf>,
    pub socket_mode: Option<u32>,
    pub socket_group: Option<u32>,
    pub quotas: Quotas,
    pub metrics: Option<Address>,
}

/// `[pool]`.
pub const TABLE: Table = Table {
    name: "pool",
    help: "`pagecrew pool serve`: memory that is ready before it is asked for. Sizes are multiples of 2 MiB.",
    keys: &[
        Key {
            name: "size",
            example: "\"16G\"",
            wrong: &["\"3M\"", "0", "[1]"],
            default: "",
            help: "How much is kept ready in all, spread evenly over the NUMA nodes.",
            live: true,
        },
        Key {
            name: "nodes",
            example: "{ 0 = \"16G\", 1 = \"8G\" }",
            wrong: &["{ a = \"8G\" }", "{ 0 = \"1M\" }", "\"8G\""],
            default: "",
            help: "How much is kept ready on which node, instead of size.",
            live: true,
        },
        Key {
            name: "files",
            example: "[\"8G:1\", \"2G:4\"]",
            wrong: &["[\"8G:0\"]", "[\"3M\"]", "\"8G\""],
            default: "what was asked for lately",
            help: "Files that are always among what is ready, and how many of each.",
            live: true,
        },
        Key {
            name: "backing",
            example: "\"auto\"",
            wrong: &["\"disk\""],
            default: "auto",
            help: "What the memory is made of: tmpfs (huge pages as they come), hugetlbfs (those that are reserved), or auto, whichever there is.",
            live: false,
        },
        Key {
            name: "cpu",
            example: "25",
            wrong: &["0", "101", "\"much\""],
            default: "25",
            help: "CPU time that filling may take, in percent of one CPU, up to 100.",
            live: true,
        },
        Key {
            name: "floor",
            example: "\"2G\"",
            wrong: &["\"12Q\"", "-1"],
            default: "5 % of memory, 512M at least",
            help: "So much free memory of the machine is left to others.",
            live: true,
        },
        Key {
            name: "below-floor",
            example: "false",
            wrong: &["1"],
            default: "false",
            help: "Whether what is asked for and not ready may leave less than the floor; otherwise it is refused.",
            live: true,
        },
        Key {
            name: "limit",
            example: "\"32G\"",
            wrong: &["\"3M\"", "-1"],
            default: "all memory",
            help: "The most that is ready and taken together.",
            live: false,
        },
        Key {
            name: "unused",
            example: "\"60s\"",
            wrong: &["\"soon\""],
            default: "60s",
            help: "What `pool take` handed out goes back when nobody has had it open for so long.",
            live: true,
        },
        Key {
            name: "ready",
            example: "\"8G\"",
            wrong: &["\"3M\""],
            default: "nothing",
            help: "So much has to be ready before the service manager starts what comes after this service.",
            live: false,
        },
        Key {
            name: "quota",
            example: "{ default = \"8G\", alice = \"32G\", \"@kvm\" = \"64G\" }",
            wrong: &["{ default = \"x\" }", "\"x\""],
            default: "none",
            help: "The most that a user may have taken, by name or number; of @GROUP, the most that its members may have together. The default doesn't bind root.",
            live: true,
        },
        Key {
            name: "socket-group",
            example: "\"kvm\"",
            wrong: &["\"no such group\""],
            default: "root alone may take memory",
            help: "The group that may take memory, by name or number.",
            live: false,
        },
        Key {
            name: "socket-mode",
            example: "\"0660\"",
            wrong: &["\"0888\"", "\"1777\""],
            default: "0600; with socket-group 0660",
            help: "The socket's permissions, in octal.",
            live: false,
        },
        Key {
            name: "directory",
            example: "\"/run/pagecrew/pool\"",
            wrong: &["\"\""],
            default: "/run/pagecrew/pool",
            help: "Where the files are.",
            live: false,
        },
        Key {
            name: "socket",
            example: "\"/run/pagecrew/pool/socket\"",
            wrong: &["\"\"", "true"],
            default: "socket in the directory",
            help: "Where clients find the pool.",
            live: false,
        },
        Key {
            name: "metrics",
            example: "9750",
            wrong: &["\"0.0.0.0:9750\"", "[]"],
            default: "nowhere",
            help: "Where metrics are served (docs/metrics.md): a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or the path of a socket.",
            live: false,
        },
    ],
    check: |settings| Config::of(settings).map(drop),
};

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        settings::load(file, &TABLE, Config::of)
    }

    /// What the settings of a table say.
    pub fn of(settings: Vec<Setting>) -> Result<Config, String> {
        let mut config = Config::default();
        settings.into_iter().try_for_each(|setting| config.take_in(setting))?;
        Ok(config)
    }

    /// Reads the text of a table.
    #[cfg(test)]
    pub fn parse(text: &str) -> Result<Config, String> {
        Config::of(settings::read(text)?)
    }

    fn take_in(&mut self, setting: Setting) -> Result<(), String> {
        match setting.key() {
            "size" if !self.nodes.is_empty() => return Err(setting.error("size and nodes exclude each other")),
            "size" => self.size = Some(setting.parse(parse_file_size)?),
            "nodes" => {
                for member in setting.members()? {
                    let node = parse_node(member.key()).map_err(|reason| member.error(reason))?;
                    self.nodes.insert(node, member.parse(parse_file_size)?);
                }
            }
            "backing" => self.backing = Some(setting.parse(parse_backing)?),
            "files" => {
                for item in setting.items()? {
                    self.files.push(item.parse(parse_files)?);
                }
            }
            "cpu" => self.cpu = Some(setting.parse(parse_percent)?),
            "ready" => self.ready = Some(setting.parse(parse_file_size)?),
            "floor" => self.floor = Some(setting.parse(parse_size)?),
            "below-floor" => self.below_floor = Some(setting.flag()?),
            "limit" => self.limit = Some(setting.parse(parse_file_size)?),
            "unused" => self.unused = Some(setting.parse(parse_duration)?),
            "directory" => self.directory = Some(setting.parse(parse_path)?),
            "socket" => self.socket = Some(setting.parse(parse_path)?),
            "socket-mode" => self.socket_mode = Some(setting.parse(parse_mode)?),
            "socket-group" => self.socket_group = Some(setting.parse(parse_group)?),
            "quota" if setting.is_table() => {
                for member in setting.members()? {
                    let user = Some(member.key()).filter(|user| *user != "default");
                    member.parse(|size| self.set_quota(user, size))?;
                }
            }
            "quota" => setting.parse(|size| self.set_quota(None, size))?,
            "metrics" => self.metrics = Some(setting.parse(Address::parse)?),
            _ => return Err(setting.unknown(&TABLE)),
        }
        Ok(())
    }

    /// What users may have who are not named, or one who is; of `@NAME`, what the members of a group may have together.
    pub fn set_quota(&mut self, user: Option<&str>, size: &str) -> Result<(), String> {
        let size = parse_size(size).map_err(|error| error.to_string())?;
        match user {
            Some(name) if name.starts_with('@') => {
                let group = parse_group(&name[1..])?;
                let quota = GroupQuota { most: size, members: members_of(group)? };
                drop(self.quotas.groups.insert(group, quota));
            }
            Some(user) => drop(self.quotas.users.insert(parse_user(user)?, size)),
            None => self.quotas.default = Some(size),
        }
        Ok(())
    }

    /// This, and where it says nothing, what `base` says.
    pub fn or(self, base: Config) -> Config {
        // How much and on which nodes is one setting.
        let (size, nodes) = match (self.size, self.nodes.is_empty()) {
            (None, true) => (base.size, base.nodes),
            _ => (self.size, self.nodes),
        };
        let mut quotas = base.quotas;
        quotas.default = self.quotas.default.or(quotas.default);
        quotas.users.extend(self.quotas.users);
        quotas.groups.extend(self.quotas.groups);
        Config {
            size,
            nodes,
            backing: self.backing.or(base.backing),
            files: if self.files.is_empty() { base.files } else { self.files },
            cpu: self.cpu.or(base.cpu),
            floor: self.floor.or(base.floor),
            ready: self.ready.or(base.ready),
            below_floor: self.below_floor.or(base.below_floor),
            limit: self.limit.or(base.limit),
            unused: self.unused.or(base.unused),
            directory: self.directory.or(base.directory),
            socket: self.socket.or(base.socket),
            socket_mode: self.socket_mode.or(base.socket_mode),
            socket_group: self.socket_group.or(base.socket_group),
            quotas,
            metrics: self.metrics.or(base.metrics),
        }
    }

    /// The pool that is described, if it can be one; `filler` is the command of its filler.
    pub fn options(self, filler: Vec<OsString>) -> Result<Options, String> {
        let sizes = match self.size {
            Some(size) => Sizes::Total(size),
            None if !self.nodes.is_empty() => Sizes::Nodes(self.nodes),
            None => {
                return Err(format!(
                    "how much is to be kept ready? --size 16G, or size = \"16G\" in [pool] of {}",
                    settings::MACHINE
                ));
            }
        };
        let total = match &sizes {
            Sizes::Total(size) => *size,
            Sizes::Nodes(nodes) => nodes.values().fold(0_usize, |sum, size| sum.saturating_add(*size)),
        };
        if let Some(ready) = self.ready.filter(|ready| *ready > total) {
            let [ready, total] = [ready, total].map(|size| Bytes(size as u64));
            return Err(format!("{ready} would never be ready: only {total} are kept"));
        }
        let of_files = |sum: usize, &(size, count): &(usize, usize)| sum.saturating_add(size.saturating_mul(count));
        let files = self.files.iter().fold(0, of_files);
        if files > total {
            let [files, total] = [files, total].map(|size| Bytes(size as u64));
            return Err(format!("the files are {files} together, and only {total} are to be kept ready"));
        }
        let defaults = Options::default();
        let directory = self.directory.unwrap_or(defaults.directory);
        // A group that may not use the socket would be none.
        let mode = if self.socket_group.is_some() { 0o660 } else { defaults.socket_mode };
        Ok(Options {
            socket: absolute(self.socket.unwrap_or_else(|| directory.join("socket")))?,
            directory: absolute(directory)?,
            socket_mode: self.socket_mode.unwrap_or(mode),
            socket_group: self.socket_group,
            backing: self.backing.unwrap_or(defaults.backing),
            sizes,
            files: self.files,
            cpu: self.cpu.unwrap_or(defaults.cpu),
            floor: self.floor,
            below_floor: self.below_floor.unwrap_or(defaults.below_floor),
            limit: self.limit,
            unused: self.unused.unwrap_or(defaults.unused),
            quotas: self.quotas,
            filler,
        })
    }
}

/// Clients get to hear these paths, who may be anywhere.
fn absolute(path: PathBuf) -> Result<PathBuf, String> {
    std::path::absolute(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A size that a file of a pool can have.
pub fn parse_file_size(text: &str) -> Result<usize, String> {
    match parse_size(text).map_err(|error| error.to_string())? {
        size if size < HUGE_PAGE_SIZE => Err(format!("'{text}' is less than 2 MiB, a huge page")),
        size if !size.is_multiple_of(HUGE_PAGE_SIZE) => {
            Err(format!("'{text}' is not a multiple of 2 MiB, which huge pages have"))
        }
        size => Ok(size),
    }
}

/// `8G:2`, or `8G` for one.
pub fn parse_files(text: &str) -> Result<(usize, usize), String> {
    let (size, count) = text.split_once(':').unwrap_or((text, "1"));
    match count.parse() {
        Ok(0) | Err(_) => Err(format!("'{text}' is not a size and a count from 1 on, such as 8G:2")),
        Ok(count) => Ok((parse_file_size(size)?, count)),
    }
}

/// `1=8G`.
pub fn parse_node_size(text: &str) -> Result<(usize, usize), String> {
    let (node, size) =
        text.split_once('=').ok_or_else(|| format!("'{text}' is not a node and a size, such as 1=8G"))?;
    Ok((parse_node(node)?, parse_file_size(size)?))
}

fn parse_node(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("'{text}' is not the number of a node"))
}

pub fn parse_backing(text: &str) -> Result<Backing, String> {
    Backing::named(text).ok_or_else(|| format!("'{text}' is none of auto, tmpfs, hugetlbfs"))
}

/// Permissions in octal, with or without the sign that TOML has for that.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777 && !digits.starts_with('+'));
    mode.ok_or_else(|| format!("'{text}' is not a mode in octal, such as 0660"))
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("a path has at least one character".into()) } else { Ok(text.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn a_file_with_everything() {
        let text = r#"
            nodes = { 0 = "8G", 1 = 4294967296 }
            backing = "hugetlbfs"
            files = ["4G:2", "2G"]
            cpu = 12.5
            floor = "1G"
            ready = "2G"
            below-floor = true
            limit = "24G"
            unused = 90
            directory = "/srv/pool"
            socket = "/srv/socket"
            socket-mode = "0660"
            socket-group = "root"
            quota = { default = "8G", root = "32G", 4711 = "1M", "@root" = "64G" }
            metrics = 9750
        "#;
        let config = Config::parse(text).unwrap();
        assert_eq!(config.metrics, Some(Address::parse("127.0.0.1:9750").unwrap()));
        let options = config.options(vec!["x".into()]).unwrap();
        let expected = Options {
            directory: "/srv/pool".into(),
            socket: "/srv/socket".into(),
            socket_mode: 0o660,
            socket_group: Some(0),
            backing: Backing::Hugetlbfs,
            sizes: Sizes::Nodes([(0, 8 * GIB), (1, 4 * GIB)].into()),
            files: vec![(4 * GIB, 2), (2 * GIB, 1)],
            cpu: 0.125,
            floor: Some(GIB),
            below_floor: true,
            limit: Some(24 * GIB),
            unused: Duration::from_secs(90),
            quotas: Quotas {
                default: Some(8 * GIB),
                users: [(0, 32 * GIB), (4711, 1 << 20)].into(),
                groups: [(0, GroupQuota { most: 64 * GIB, members: members_of(0).unwrap() })].into(),
                ..Quotas::default()
            },
            filler: vec!["x".into()],
        };
        assert_eq!(options, expected);
        let mentioned: Vec<&str> = TABLE.keys.iter().map(|key| key.name).filter(|key| *key != "size").collect();
        assert!(mentioned.iter().all(|key| text.contains(&format!(" {key} = "))), "{mentioned:?}");
    }

    #[test]
    fn the_examples_hold_together() {
        let lines =
            TABLE.keys.iter().filter(|key| key.name != "size").map(|key| format!("{} = {}\n", key.name, key.example));
        // Whoever may not exist here is root.
        let text: String = lines.map(|line| line.replace("kvm", "root").replace("alice", "root")).collect();
        assert!(Config::parse(&text).unwrap().options(Vec::new()).is_ok(), "{text}");
    }

    #[test]
    fn a_size_is_enough() {
        let options = Config::parse("size = \"16G\"").unwrap().options(Vec::new()).unwrap();
        assert_eq!(options, Options { sizes: Sizes::Total(16 * GIB), ..Options::default() });
        assert!(Config::default().options(Vec::new()).unwrap_err().contains("--size"));
    }

    #[test]
    fn each_bad_value_is_named_with_its_line_its_key_and_the_reason() {
        for (line, key, word) in [
            ("size = \"12Q\"", "size", "'12Q' is not a size"),
            ("size = \"3M\"", "size", "'3M' is not a multiple of 2 MiB"),
            ("size = \"1M\"", "size", "less than 2 MiB"),
            ("size = 0", "size", "less than 2 MiB"),
            ("size = [1]", "size", "array"),
            ("nodes = { a = \"8G\" }", "nodes.a", "number of a node"),
            ("nodes = { 0 = \"8GG\" }", "nodes.0", "'8GG' is not a size"),
            ("nodes = \"8G\"", "nodes", "not a table"),
            ("backing = \"disk\"", "backing", "none of auto, tmpfs, hugetlbfs"),
            ("files = [\"8G\", \"8G:x\"]", "files", "8G:2"),
            ("files = [\"8G:0\"]", "files", "from 1 on"),
            ("files = \"8G\"", "files", "not an array"),
            ("cpu = 0", "cpu", "percentage"),
            ("cpu = \"much\"", "cpu", "percentage"),
            ("floor = \"12Q\"", "floor", "'12Q' is not a size"),
            ("below-floor = 1", "below-floor", "neither true nor false"),
            ("ready = 1", "ready", "less than 2 MiB"),
            ("limit = -1", "limit", "'-1' is not a size"),
            ("unused = \"soon\"", "unused", "'soon' is not a duration"),
            ("directory = \"\"", "directory", "character"),
            ("socket = true", "socket", "boolean"),
            ("socket-mode = \"0888\"", "socket-mode", "octal"),
            ("socket-mode = 0o1777", "socket-mode", "octal"),
            ("socket-group = \"no such group\"", "socket-group", "no group 'no such group'"),
            ("quota = { default = \"x\" }", "quota.default", "'x' is not a size"),
            ("quota = { nobody-of-that-name = \"1G\" }", "quota.nobody-of-that-name", "no user"),
            ("quota = { \"@no-such-group\" = \"1G\" }", "quota.@no-such-group", "no group"),
            ("quota = \"x\"", "quota", "'x' is not a size"),
            ("metrics = \"0.0.0.0:9750\"", "metrics", "other machines"),
            ("metrics = []", "metrics", "array"),
            ("sise = \"8G\"", "sise", "there are size, nodes"),
        ] {
            let error = Config::parse(&format!("# a pool\n\n{line}\n")).unwrap_err();
            assert!(error.starts_with(&format!("line 3: {key}: ")) && error.contains(word), "{line}: {error}");
        }
        let unclosed = Config::parse("cpu = 1\nsize = \"8G\n").unwrap_err();
        assert!(unclosed.starts_with("line 2: "), "{unclosed}");
        let both = Config::parse("size = \"8G\"\nnodes = { 0 = \"8G\" }").unwrap_err();
        assert_eq!(both, "line 1: size: size and nodes exclude each other");
    }

    #[test]
    fn the_file_is_named_too() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pool.toml");
        std::fs::write(&file, "[pool]\ncpu = 5\nfloor = \"12Q\"\n").unwrap();
        let Err(Failure::Usage(message)) = Config::read(Some(&file)) else { panic!("taken") };
        assert!(
            message.starts_with(&format!("{}: line 3: pool.floor: '12Q' is not a size", file.display())),
            "{message}"
        );
    }

    #[test]
    fn modes() {
        for text in ["660", "0660", "0o660"] {
            assert_eq!(parse_mode(text), Ok(0o660));
        }
        assert!(["", "0o", "+660", "-1", "8", "1000"].iter().all(|text| parse_mode(text).is_err()));
        let mode = |text: &str| Config::parse(text).unwrap().options(Vec::new()).unwrap().socket_mode;
        assert_eq!(mode("size = \"2M\""), 0o600);
        assert_eq!(mode("size = \"2M\"\nsocket-group = 0"), 0o660);
        assert_eq!(mode("size = \"2M\"\nsocket-group = 0\nsocket-mode = 0o600"), 0o600);
    }

    #[test]
    fn what_goes_before_replaces() {
        let base = "nodes = { 0 = \"8G\" }\nfiles = [\"2G\"]\ncpu = 5\nquota = { default = \"1G\", 7 = \"2G\" }";
        let base = || Config::parse(base).unwrap();
        let first = Config::parse("size = \"4G\"\nquota = { 7 = \"3G\" }").unwrap().or(base());
        assert_eq!((first.size, first.nodes.len(), first.files.len()), (Some(4 * GIB), 0, 1));
        assert_eq!(first.quotas, Quotas { default: Some(GIB), users: [(7, 3 * GIB)].into(), ..Quotas::default() });
        assert_eq!(Config::default().or(base()), base());
        assert_eq!(base().or(Config::parse("size = \"4G\"\ncpu = 6").unwrap()), base());
    }

    #[test]
    fn files_fit_into_what_is_kept() {
        let of = |text: &str| Config::parse(text).unwrap().options(Vec::new());
        assert!(of("size = \"16G\"\nfiles = [\"4G:4\"]").is_ok());
        assert!(of("size = \"16G\"\nfiles = [\"4G:4\", \"2M\"]").unwrap_err().contains("16 GiB"));
        assert!(of("nodes = { 0 = \"4G\" }\nfiles = [\"1T:99999999999\"]").is_err());
    }

    #[test]
    fn a_relative_path_is_made_absolute() {
        let options = Config::parse("size = \"2M\"\ndirectory = \"p\"").unwrap().options(Vec::new()).unwrap();
        let expected = std::env::current_dir().unwrap().join("p");
        assert_eq!((options.socket, options.directory), (expected.join("socket"), expected));
    }
}
