//! The settings of a machine, in a file.

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Key, Setting, Table};
use crate::trim::parse_name;
use crate::values::{parse_control_group, parse_percent};
use pagecrew::reclaim::{Choice, Options};
use std::path::Path;

/// `[reclaim]`.
pub const TABLE: Table = Table {
    name: "reclaim",
    help: "`pagecrew reclaim`.",
    keys: &[
        Key {
            name: "most",
            example: "\"2.5%\"",
            wrong: &["0", "\"10.1%\"", "[]"],
            default: "2.5%",
            help: "The most of the memory, and of a control group's limit, that is kept free ahead of demand, up to 10 percent; up to as much again is free while the kernel reclaims. Of a small group, up to 16 MiB or 2.5 times the share.",
            live: true,
        },
        Key {
            name: "groups",
            example: "[\"/system.slice/db.service\"]",
            wrong: &["\"db\"", "[[]]", "[\"\"]"],
            default: "all",
            help: "Control groups whose memory is reclaimed ahead of their demand at their own limits: \"all\" that have one, \"none\", or those with these names or directories, with those below them.",
            live: true,
        },
        Key {
            name: "drop-behind",
            example: "[\"rsync\", \"tar\"]",
            wrong: &["\"rsync\"", "[[]]", "[\"\"]"],
            default: "none",
            help: "Programs (by their names in /proc/PID/comm) that use files from one end to the other and not again: while the machine has demand, what they have used leaves the page cache behind them. In the unit, that takes CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH besides.",
            live: true,
        },
        Key {
            name: "metrics",
            example: "9752",
            wrong: &["\"0.0.0.0:9752\""],
            default: "nowhere",
            help: "Where metrics are served (docs/metrics.md): a port of this machine, PORT, 127.0.0.1:PORT or [::1]:PORT, or the path of a socket.",
            live: false,
        },
    ],
    check: |settings| Config::of(settings).map(drop),
};

/// What the file may say; the command line goes before it.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Config {
    /// As a share of the memory.
    pub most: Option<f64>,
    /// Which control groups.
    pub groups: Option<Choice>,
    /// Names of programs behind which is dropped what they have used.
    pub drop_behind: Option<Vec<String>>,
    /// Where metrics are served.
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
            match setting.key() {
                "most" => config.most = Some(setting.parse(parse_most)?),
                "groups" => config.groups = Some(groups(setting)?),
                "drop-behind" => {
                    let names = setting.items()?.iter().map(|item| item.parse(parse_name)).collect::<Result<_, _>>()?;
                    config.drop_behind = Some(names);
                }
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

/// A word or an array of names.
fn groups(setting: Setting<'_>) -> Result<Choice, String> {
    match setting.text() {
        Ok(word) => choice(&[word])
            .ok_or_else(|| setting.error("this is neither all nor none; names stand in an array: [\"NAME\"]")),
        Err(_) => Ok(Choice::Named(
            setting.items()?.iter().map(|item| item.parse(parse_control_group)).collect::<Result<_, _>>()?,
        )),
    }
}

/// How much may be kept free.
pub fn parse_most(text: &str) -> Result<f64, String> {
    match parse_percent(text)? {
        most if most > Options::MOST => Err(format!("'{text}' is more than {} percent", Options::MOST * 100.0)),
        most => Ok(most),
    }
}

/// What a word stands for.
pub fn choice(words: &[String]) -> Option<Choice> {
    match words {
        [word] if word == "all" => Some(Choice::All),
        [word] if word == "none" => Some(Choice::None),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_file_says() {
        let config = Config::parse("most = 5\nmetrics = 9750\n").unwrap();
        assert_eq!((config.most, config.metrics), (Some(0.05), Some(Address::parse("9750").unwrap())));
        assert_eq!(Config::parse("").unwrap(), Config::default());
        let names = Config::parse("drop-behind = [\"rsync\", \"a-name-of-sixteen\"]").unwrap().drop_behind;
        assert_eq!(names, Some(vec!["rsync".to_owned(), "a-name-of-sixte".to_owned()]));
        for (text, groups) in [
            ("groups = \"all\"", Choice::All),
            ("groups = \"none\"", Choice::None),
            ("groups = [\"a\", \"/b\"]", Choice::Named(vec!["a".into(), "/b".into()])),
            ("groups = [\"all\"]", Choice::Named(vec!["all".into()])),
        ] {
            assert_eq!(Config::parse(text).unwrap().groups, Some(groups), "{text}");
        }
        for (text, word) in
            [("groups = \"db\"", "neither all nor none"), ("groups = [[]]", "groups"), ("groups = true", "array")]
        {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        for (text, word) in [
            ("mots = 1", "mots"),
            ("drop-behind = [\"\"]", "at least one character"),
            ("most = []", "array"),
            ("most = 50", "line 1: most: '50' is more than 10 percent"),
            ("metrics = \"x\"", "metrics"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
