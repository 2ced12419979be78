//! The settings of a machine, in a file.

use crate::failure::Failure;
use crate::metrics::Address;
use crate::settings::{self, Setting};
use std::path::Path;

const DEFAULT: &str = "/etc/pagecrew/trim.toml";

/// What the file may say; the command line goes before it.
#[derive(Debug, Default, PartialEq)]
pub struct Config {
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

const KEYS: [&str; 7] = ["max-zero", "cpu", "read", "interval", "exclude", "never", "metrics"];

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        settings::load(file, Path::new(DEFAULT), Config::parse)
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Config, String> {
        let texts = |setting: Setting| setting.items()?.iter().map(Setting::text).collect::<Result<Vec<_>, _>>();
        let mut config = Config::default();
        for setting in settings::read(text)? {
            match setting.key() {
                "max-zero" => config.max_zero = Some(setting.parse(str::parse)?),
                "cpu" => config.cpu = Some(setting.text()?),
                "read" => config.read = Some(setting.text()?),
                "interval" => config.interval = Some(setting.text()?),
                "exclude" => config.exclude = texts(setting)?,
                "never" => config.never = texts(setting)?,
                "metrics" => config.metrics = Some(setting.parse(Address::parse)?),
                _ => return Err(setting.unknown(&KEYS)),
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_everything() {
        let text = "max-zero = 450\ncpu = 2\nread = \"64M\"\ninterval = 30\nexclude = [\"heap\"]\nnever = [\"qemu\"]\nmetrics = 9750\n";
        let config = Config::parse(text).unwrap();
        assert_eq!(config.metrics, Some(Address::parse("9750").unwrap()));
        let texts = [config.cpu, config.read, config.interval].map(Option::unwrap);
        assert_eq!((config.max_zero, texts), (Some(450), ["2", "64M", "30"].map(str::to_owned)));
        assert_eq!((config.exclude, config.never), (vec!["heap".to_owned()], vec!["qemu".to_owned()]));
        assert_eq!(Config::parse("").unwrap(), Config::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in
            [("max-zeros = 1", "max-zeros"), ("max-zero = -1", "max-zero"), ("cpu = []", "array"), ("=", "1")]
        {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(matches!(Config::read(Some(Path::new("/no/such/file"))), Err(Failure::Usage(_))));
    }
}
