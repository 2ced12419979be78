//! The region's options on the command line: one for each name that the library has, so that none can be forgotten.

use crate::failure::Failure;
use clap::{Arg, ArgMatches, Command};
use pagecrew::region::{NAMES, OptionError, Options};

/// The options that were given: variable and value.
#[derive(Debug, Default)]
pub struct RegionOptions(Vec<(&'static str, String)>);

/// `PAGECREW_HUGE_PAGES` is `--huge-pages`.
fn flag(variable: &'static str) -> String {
    variable.trim_start_matches("PAGECREW_").to_ascii_lowercase().replace('_', "-")
}

fn value_name(variable: &str) -> &'static str {
    match variable {
        "PAGECREW_THRESHOLD" => "SIZE",
        "PAGECREW_RETAIN" => "SIZE|auto",
        "PAGECREW_DECAY" => "TIME",
        "PAGECREW_HELPERS" => "COUNT|auto",
        "PAGECREW_ZERO" | "PAGECREW_HUGE_PAGES" | "PAGECREW_MMAP" | "PAGECREW_GUARDS" | "PAGECREW_EXIT" => "on|off",
        "PAGECREW_TRIM" => "auto|on|off",
        _ => "VALUE",
    }
}

/// `help` as a sentence of this command's help, where each begins with a capital letter.
fn capitalised(help: &str) -> String {
    let mut letters = help.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}

impl clap::Args for RegionOptions {
    fn augment_args(command: Command) -> Command {
        NAMES.iter().fold(command, |command, name| {
            command.arg(
                Arg::new(name.variable)
                    // The parser wants names that live as long as the process, and is made once in it.
                    .long(&*flag(name.variable).leak())
                    .value_name(value_name(name.variable))
                    .allow_hyphen_values(true)
                    .help(capitalised(name.help)),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        RegionOptions::augment_args(command)
    }
}

impl clap::FromArgMatches for RegionOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<RegionOptions, clap::Error> {
        let given = |name: &str| matches.get_one::<String>(name).cloned();
        Ok(RegionOptions(NAMES.iter().filter_map(|name| Some((name.variable, given(name.variable)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = RegionOptions::from_arg_matches(matches)?;
        Ok(())
    }
}

impl RegionOptions {
    /// The variables to set, if every value can be used.
    pub fn check(self) -> Result<Vec<(&'static str, String)>, Failure> {
        let mut options = Options::default();
        for (variable, value) in &self.0 {
            options.set(variable, value).map_err(|error| match error {
                OptionError::Value { reason, .. } => Failure::Usage(format!("--{}: {reason}", flag(variable))),
                OptionError::Unknown(_) => Failure::Usage(error.to_string()),
            })?;
        }
        Ok(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};

    fn parse(arguments: &[&str]) -> Result<Vec<(&'static str, String)>, Failure> {
        let command = RegionOptions::augment_args(Command::new("x").no_binary_name(true));
        RegionOptions::from_arg_matches(&command.try_get_matches_from(arguments).unwrap()).unwrap().check()
    }

    #[test]
    fn every_option_of_the_region_has_a_flag_and_a_value_name() {
        for name in NAMES {
            assert_ne!(value_name(name.variable), "VALUE", "{}", name.variable);
            assert!(!flag(name.variable).contains('_'));
        }
        let settings = parse(&["--retain", "auto", "--huge-pages=off", "--decay", "30s"]).unwrap();
        let expected = [("PAGECREW_RETAIN", "auto"), ("PAGECREW_DECAY", "30s"), ("PAGECREW_HUGE_PAGES", "off")];
        assert_eq!(settings, expected.map(|(name, value)| (name, value.to_owned())));
    }

    #[test]
    fn a_bad_value_names_the_flag() {
        let Err(Failure::Usage(message)) = parse(&["--huge-pages", "maybe"]) else { panic!("accepted") };
        assert_eq!(message, "--huge-pages: 'maybe' is neither on nor off");
        assert!(parse(&["--retain", "-1"]).is_err());
    }
}
