//! The settings of a machine, in a file.

use crate::failure::Failure;
use serde::{Deserialize, Deserializer};
use std::io::ErrorKind;
use std::path::Path;

const DEFAULT: &str = "/etc/pagecrew/trim.toml";

/// What the file may say; the command line goes before it.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    pub max_zero: Option<usize>,
    /// Percent of one CPU, as a number or a text.
    #[serde(deserialize_with = "number_or_text")]
    pub cpu: Option<String>,
    #[serde(deserialize_with = "number_or_text")]
    pub read: Option<String>,
    #[serde(deserialize_with = "number_or_text")]
    pub interval: Option<String>,
    /// Ranges and mappings to leave alone in every process.
    pub exclude: Vec<String>,
    /// Names of processes to leave alone.
    pub never: Vec<String>,
}

fn number_or_text<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    match toml::Value::deserialize(value)? {
        toml::Value::String(text) => Ok(Some(text)),
        toml::Value::Integer(number) => Ok(Some(number.to_string())),
        toml::Value::Float(number) => Ok(Some(number.to_string())),
        other => Err(serde::de::Error::custom(format!("{} is neither a number nor a text", other.type_str()))),
    }
}

impl Config {
    /// Reads `file`, or the machine's if there is one.
    pub fn read(file: Option<&Path>) -> Result<Config, Failure> {
        let path = file.unwrap_or(Path::new(DEFAULT));
        match std::fs::read_to_string(path) {
            Ok(text) => Config::parse(&text).map_err(|reason| Failure::Usage(format!("{}: {reason}", path.display()))),
            Err(error) if file.is_none() && error.kind() == ErrorKind::NotFound => Ok(Config::default()),
            Err(error) => Err(Failure::Usage(format!("{}: {error}", path.display()))),
        }
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Config, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_everything() {
        let text = "max-zero = 450\ncpu = 2\nread = \"64M\"\ninterval = 30\nexclude = [\"heap\"]\nnever = [\"qemu\"]\n";
        let config = Config::parse(text).unwrap();
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
