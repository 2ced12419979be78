//! What can be set, under one name on the command line (`--retain`), in the environment (`PAGECREW_RETAIN`) and here.

use crate::units::{ParseError, parse_duration, parse_size};
use std::fmt;
use std::time::Duration;

/// The settings of a [`Region`](super::Region) and of the preload library over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Allocations of at least this many bytes come from the region; smaller ones stay with the program's own malloc.
    pub threshold: usize,
    /// The most free memory that is kept for reuse, in bytes; `None`: half of what the process may use at all.
    pub retain: Option<usize>,
    /// Retained memory that nothing needed for this long goes back.
    pub decay: Duration,
    /// The most helper threads; `None`: one less than the CPUs that the process may use, at least one.
    pub helpers: Option<usize>,
    /// Whether retained memory is zeroed in the background, as far as the program asks for zeroed memory.
    pub zero: bool,
    /// Whether spans of 2 MiB and more may be backed by huge pages.
    pub huge_pages: bool,
    /// Whether mappings that the program makes itself may be backed by huge pages, too.
    pub mmap: bool,
    /// Whether every span is followed by a page whose access is a fault (6.13).
    pub guards: bool,
    /// Whether a process that exits gives large memory back in parallel first.
    pub exit: bool,
    /// Whether the zero part of under-used huge pages goes back while the program has them (6.12).
    pub trim: Trim,
}

/// When under-used huge pages are trimmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trim {
    /// Where the program maps much memory itself, while memory is short or once it has given most of its own back.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            threshold: 64 << 10,
            retain: None,
            decay: Duration::from_secs(10),
            helpers: None,
            zero: true,
            huge_pages: true,
            mmap: true,
            guards: false,
            exit: true,
            trim: Trim::Auto,
        }
    }
}

/// Name and meaning of an option.
#[derive(Debug, Clone, Copy)]
pub struct Name {
    /// The environment variable.
    pub variable: &'static str,
    /// One line for people.
    pub help: &'static str,
}

/// Every option that the environment can set.
pub const NAMES: [Name; 10] = [
    Name { variable: "PAGECREW_THRESHOLD", help: "serve allocations of at least this size [64K, the least]" },
    Name {
        variable: "PAGECREW_RETAIN",
        help: "keep at most this much free memory for reuse [auto: half of the memory that may be used]",
    },
    Name { variable: "PAGECREW_DECAY", help: "give back what was not needed for this long [10s]" },
    Name { variable: "PAGECREW_HELPERS", help: "at most this many helper threads of a kind [auto: CPUs - 1, 1 to 16]" },
    Name { variable: "PAGECREW_ZERO", help: "zero free memory in the background: on or off [on]" },
    Name { variable: "PAGECREW_HUGE_PAGES", help: "let large spans be backed by huge pages: on or off [on]" },
    Name { variable: "PAGECREW_MMAP", help: "the same for memory that the program maps itself: on or off [on]" },
    Name { variable: "PAGECREW_GUARDS", help: "a guard page behind every span: on or off [off]" },
    Name { variable: "PAGECREW_EXIT", help: "give memory back in parallel when the program exits: on or off [on]" },
    Name {
        variable: "PAGECREW_TRIM",
        help: "give back the zero part of huge pages that are mostly zero (Linux 6.12): on, off, or auto, when memory is short or the program has given most of its own back [auto]",
    },
];

/// Variables that belong to the command and not to the region.
const OTHERS: [&str; 7] = [
    "PAGECREW_STATS_DIR",
    "PAGECREW_STATS_KEEP",
    "PAGECREW_PRELOAD",
    "PAGECREW_CHECKED",
    "PAGECREW_POOL_SOCKET",
    "PAGECREW_POOL_PATH",
    "PAGECREW_POOL_SIZE",
];

/// The smallest threshold: below it, a page-granular allocator wastes more than it saves.
const THRESHOLD_MIN: usize = 64 << 10;

/// What is wrong with an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionError {
    /// No option has this name.
    Unknown(String),
    /// The value can't be used.
    Value {
        /// The variable.
        variable: String,
        /// Why.
        reason: String,
    },
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionError::Unknown(name) => write!(f, "{name} is not an option of pagecrew"),
            OptionError::Value { variable, reason } => write!(f, "{variable}: {reason}"),
        }
    }
}

impl std::error::Error for OptionError {}

fn switch(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "on" | "1" | "yes" | "true" => Ok(true),
        "off" | "0" | "no" | "false" => Ok(false),
        _ => Err(format!("'{text}' is neither on nor off")),
    }
}

fn automatic<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if text.trim().eq_ignore_ascii_case("auto") { Ok(None) } else { parse(text).map(Some) }
}

impl Options {
    /// Sets the option that `variable` names.
    ///
    /// # Errors
    /// [`OptionError`] where there is no such option or the value can't be used; nothing is changed then.
    pub fn set(&mut self, variable: &str, text: &str) -> Result<(), OptionError> {
        let size = |text: &str| parse_size(text).map_err(|error: ParseError| error.to_string());
        let count = |text: &str| text.trim().parse::<usize>().map_err(|_| format!("'{text}' is not a number"));
        let result = match variable {
            "PAGECREW_THRESHOLD" => size(text).and_then(|bytes| match bytes {
                THRESHOLD_MIN.. => {
                    self.threshold = bytes;
                    Ok(())
                }
                _ => Err(format!("'{text}' is below the least, 64K")),
            }),
            "PAGECREW_RETAIN" => automatic(text, size).map(|value| self.retain = value),
            "PAGECREW_DECAY" => parse_duration(text).map_err(|error| error.to_string()).map(|value| self.decay = value),
            "PAGECREW_HELPERS" => automatic(text, count).map(|value| self.helpers = value),
            "PAGECREW_ZERO" => switch(text).map(|value| self.zero = value),
            "PAGECREW_HUGE_PAGES" => switch(text).map(|value| self.huge_pages = value),
            "PAGECREW_MMAP" => switch(text).map(|value| self.mmap = value),
            "PAGECREW_GUARDS" => switch(text).map(|value| self.guards = value),
            "PAGECREW_EXIT" => switch(text).map(|value| self.exit = value),
            "PAGECREW_TRIM" => automatic(text, switch).map(|value| {
                self.trim = match value {
                    None => Trim::Auto,
                    Some(true) => Trim::On,
                    Some(false) => Trim::Off,
                }
            }),
            _ => return Err(OptionError::Unknown(variable.to_owned())),
        };
        result.map_err(|reason| OptionError::Value { variable: variable.to_owned(), reason })
    }

    /// The options that the variables of an environment set; the rest have their defaults. Variables that do not start with
    /// `PAGECREW_` are passed over, and `problem` hears of each one that is wrong.
    pub fn from_environment(
        variables: impl IntoIterator<Item = (String, String)>,
        mut problem: impl FnMut(OptionError),
    ) -> Options {
        let mut options = Options::default();
        for (variable, value) in variables {
            if variable.starts_with("PAGECREW_")
                && !OTHERS.contains(&variable.as_str())
                && let Err(error) = options.set(&variable, &value)
            {
                problem(error);
            }
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> (Options, Vec<String>) {
        let mut problems = Vec::new();
        let owned = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let options = Options::from_environment(owned, |error| problems.push(error.to_string()));
        (options, problems)
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        assert_eq!(read(&[("PATH", "/bin")]), (Options::default(), vec![]));
    }

    #[test]
    fn every_named_variable_can_be_set() {
        let values = ["2M", "auto", "250ms", "3", "off", "off", "off", "on", "off", "on"];
        let variables: Vec<_> = NAMES.iter().map(|name| name.variable).zip(values).collect();
        let (options, problems) = read(&variables);
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(
            options,
            Options {
                threshold: 2 << 20,
                retain: None,
                decay: Duration::from_millis(250),
                helpers: Some(3),
                zero: false,
                huge_pages: false,
                mmap: false,
                guards: true,
                exit: false,
                trim: Trim::On,
            }
        );
    }

    #[test]
    fn what_is_wrong_is_reported_and_changes_nothing() {
        let (options, problems) = read(&[
            ("PAGECREW_RETIAN", "1G"),
            ("PAGECREW_DECAY", "soon"),
            ("PAGECREW_THRESHOLD", "1K"),
            ("PAGECREW_STATS_DIR", "/x"),
        ]);
        assert_eq!(options, Options::default());
        assert_eq!(problems[0], "PAGECREW_RETIAN is not an option of pagecrew");
        assert!(problems[1].starts_with("PAGECREW_DECAY: 'soon' is not a duration"), "{}", problems[1]);
        assert!(problems[2].contains("64K"), "{}", problems[2]);
        assert_eq!(problems.len(), 3);
    }
}
