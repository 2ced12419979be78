//! The settings of a machine, in a file.

use super::part::Part;
use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Key, Setting, Table};
use crate::{pool, trim};
use std::path::{Path, PathBuf};

/// Where its sockets are.
pub const DIRECTORY: &str = "/run/pagecrew/serve";

/// `[serve]`.
pub const TABLE: Table = Table {
    name: "serve",
    help: "`pagecrew serve`: the services of the machine together. Each of them reads its own table below, of which `metrics` does not count then.",
    keys: &[
        Key {
            name: "services",
            example: "[\"pool\", \"trim\", \"reclaim\"]",
            wrong: &["[]", "[\"pol\"]", "\"pool\""],
            default: "reclaim; pool where [pool] says how much; trim where [trim] says which processes",
            help: "Which services.",
            live: true,
        },
        Key {
            name: "metrics",
            example: "9753",
            wrong: &["\"0.0.0.0:9753\""],
            default: "nowhere",
            help: "Where the metrics of all services are served (docs/metrics.md): a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or the path of a socket.",
            live: false,
        },
        Key {
            name: "directory",
            example: "\"/run/pagecrew/serve\"",
            wrong: &["\"here\""],
            default: DIRECTORY,
            help: "Where the sockets between the services are.",
            live: false,
        },
    ],
    check: |settings| Config::default().take_all_in(settings),
};

/// What the file may say; the command line goes before it.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Config {
    /// Which services, where it says so.
    pub services: Option<Vec<Part>>,
    /// Where metrics are served.
    pub metrics: Option<Address>,
    pub directory: Option<PathBuf>,
    /// Services other than reclaim that the file has enough settings for.
    set_up: Vec<Part>,
    /// Services for which it says where their metrics are.
    pub own_metrics: Vec<Part>,
}

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        settings::load_text(file, Config::parse)
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Config, String> {
        let mut config = Config::default();
        config.take_all_in(settings::members_of(text, &TABLE)?.unwrap_or_default())?;
        // Whether the values make sense is seen for those that are to run (`Part::check`).
        let wants = |config: &Config, part| config.services.as_ref().is_none_or(|services| services.contains(&part));
        let begins: [(Part, &Table, &[&str]); 3] = [
            (Part::Pool, &pool::config::TABLE, &["size", "nodes"]),
            (Part::Trim, &trim::config::TABLE, &["names", "users", "groups", "all"]),
            (Part::Reclaim, &crate::reclaim::config::TABLE, &[]),
        ];
        for (part, table, begins) in begins {
            if !wants(&config, part) {
                continue;
            }
            let settings = settings::keys_of(text, table)?;
            let asks = |keys: &[&str]| settings.iter().any(|setting| keys.contains(&setting.key()) && setting.asks());
            config.set_up.extend(asks(begins).then_some(part));
            config.own_metrics.extend(asks(&["metrics"]).then_some(part));
        }
        Ok(config)
    }

    fn take_all_in(&mut self, settings: Vec<Setting>) -> Result<(), String> {
        settings.into_iter().try_for_each(|setting| self.take_in(setting))
    }

    fn take_in(&mut self, setting: Setting) -> Result<(), String> {
        match setting.key() {
            "services" => {
                let none = setting.error("no service is left to run");
                let services: Vec<Part> =
                    setting.items()?.iter().map(|item| item.parse(Part::parse)).collect::<Result<_, _>>()?;
                if services.is_empty() {
                    return Err(none);
                }
                self.services = Some(services);
            }
            "metrics" => self.metrics = Some(setting.parse(Address::parse)?),
            "directory" => {
                let absolute = |text: &str| match Path::new(text).is_absolute() {
                    true => Ok(PathBuf::from(text)),
                    false => Err(format!("'{text}' does not begin with /")),
                };
                self.directory = Some(setting.parse(absolute)?);
            }
            _ => return Err(setting.unknown(&TABLE)),
        }
        Ok(())
    }

    /// The services that are to run, each once, in the order in which they are started.
    pub fn wanted(&self) -> Vec<Part> {
        let is_wanted = |part: &Part| match &self.services {
            Some(services) => services.contains(part),
            None => *part == Part::Reclaim || self.set_up.contains(part),
        };
        Part::SERVICES.into_iter().filter(is_wanted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_hold() {
        let text: String = TABLE.keys.iter().map(|key| format!("{} = {}\n", key.name, key.example)).collect();
        let config = Config::parse(&format!("[serve]\n{text}")).unwrap();
        assert_eq!(config.wanted(), Part::SERVICES);
        assert_eq!((config.directory, config.metrics.is_some()), (Some(DIRECTORY.into()), true));
    }

    #[test]
    fn without_a_word_those_run_that_there_are_settings_for() {
        let wanted = |text: &str| Config::parse(text).unwrap().wanted();
        assert_eq!(wanted(""), [Part::Reclaim]);
        // As `pagecrew settings` prints it.
        assert_eq!(wanted("[serve]\n[pool]\n[trim]\n[reclaim]\n"), [Part::Reclaim]);
        assert_eq!(wanted("[pool]\nsize = \"2M\"\n"), [Part::Reclaim, Part::Pool]);
        assert_eq!(wanted("[pool]\nnodes = { 0 = \"2M\" }\n[trim]\nnames = [\"a\"]\n"), Part::SERVICES);
        assert_eq!(wanted("[pool]\ncpu = 5\n[trim]\nall = false\ncpu = 5\n"), [Part::Reclaim]);
        assert_eq!(wanted("[trim]\nall = true\n"), [Part::Reclaim, Part::Trim]);
        assert_eq!(wanted("[serve]\nservices = [\"trim\", \"trim\"]\n[pool]\nsize = \"2M\"\n"), [Part::Trim]);
    }

    #[test]
    fn what_is_wrong_has_its_line() {
        for (text, error) in [
            ("[serve]\nservices = []", "line 2: serve.services: no service is left to run"),
            (
                "[serve]\nservices = [\"pool\",\n\"pol\"]",
                "line 3: serve.services: there is no service 'pol'; there are pool, trim and reclaim",
            ),
            ("[serve]\nservices = \"pool\"", "line 2: serve.services: this string is not an array"),
            ("[serve]\nmetrics = \"0.0.0.0:1\"", "line 2: serve.metrics: '0.0.0.0:1' can be reached"),
            ("[serve]\ndirectory = \"here\"", "line 2: serve.directory: 'here' does not begin with /"),
            (
                "\n[serve]\nservice = []",
                "line 3: serve.service: there is no such setting; there are services, metrics, directory",
            ),
            ("[pool]\nflor = 1", "line 2: pool.flor: "),
            ("[trim]\ncpuu = 1", "line 2: trim.cpuu: "),
        ] {
            let found = Config::parse(text).unwrap_err();
            assert!(found.starts_with(error), "{text}: {found}");
        }
        // Of a service that is not to run, nothing has to be right; values are seen to by those that are.
        assert!(Config::parse("[serve]\nservices = [\"trim\"]\n[pool]\nflor = \"12Q\"").is_ok());
        assert!(Config::parse("[trim]\nusers = [\"no such user\"]\n[reclaim]\nmost = 50").is_ok());
    }

    #[test]
    fn metrics_of_single_services_are_noticed() {
        let config =
            Config::parse("[pool]\nmetrics = 9750\n[trim]\nmetrics = 9751\n[reclaim]\nmetrics = 9752\n").unwrap();
        assert_eq!(config.own_metrics, [Part::Pool, Part::Trim, Part::Reclaim]);
    }
}
