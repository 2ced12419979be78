//! `pagecrew top`: a machine's memory as it is now, on a terminal, as text or as JSON.

mod candidates;
mod document;
mod draw;
mod feed;
mod keys;
mod live;
mod model;
mod programs;
mod rates;
mod sample;
mod screen;
mod service;
mod sources;
mod terminal;
mod text;
mod views;
mod walker;
mod watch;

use crate::failure::Failure;
use crate::output::print;
use crate::settings;
use crate::signals::SignalSet;
use draw::Ability;
use pagecrew::sys::clock::since_1970;
use pagecrew::units::parse_duration;
use programs::Sort;
use screen::Screen;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use text::ascii;
use views::{Look, View};
use watch::Watch;

/// Show a machine's memory live: nodes and watermarks, stalls and pressure, programs, and what pagecrew's services do
///
/// Works without any service, and for any user; root sees other users' programs and processes besides. Nothing is changed by looking.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew top                          until q; ? says what other keys do
  pagecrew top --view programs          begin with a view
  pagecrew top --once                   everything as text, with rates over one second; needs no terminal
  pagecrew top --once --view nodes      one view of it
  pagecrew top --once --json | jq .per_second
  pagecrew top --json --interval 10s    an object a line, each ten seconds

Without colours where NO_COLOR is set; as text, again and again, where the terminal is a dumb one (TERM=dumb).")]
pub struct Arguments {
    /// Time between two looks, from 100ms to 1h
    #[arg(long, value_name = "TIME", default_value = "1s")]
    interval: String,
    /// Print once and end: two looks, an interval apart
    #[arg(long)]
    once: bool,
    /// JSON: an object a line each interval, or one with --once
    #[arg(long, conflicts_with_all = ["view", "no_color"])]
    json: bool,
    /// Begin with this view; with --once, print only this one [default: overview; with --once all others]
    #[arg(long, value_name = "VIEW")]
    view: Option<View>,
    /// No colours
    #[arg(long)]
    no_color: bool,
    /// The file of settings that says where services serve their metrics [default: /etc/pagecrew/pagecrew.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

const INTERVAL_LEAST: Duration = Duration::from_millis(100);
const INTERVAL_MOST: Duration = Duration::from_secs(3600);
/// Of text that is printed, where there is no terminal to say it.
const COLUMNS: usize = 120;

/// `pagecrew top`.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let interval = interval(&arguments.interval)?;
    let settings = arguments.config.as_deref().unwrap_or(Path::new(settings::MACHINE));
    if arguments.config.is_some()
        && let Err(error) = std::fs::metadata(settings)
    {
        return Err(Failure::Usage(format!("{}: {error}", settings.display())));
    }
    if arguments.once {
        return once(&mut Watch::start(settings)?, arguments, interval);
    }
    if arguments.json {
        return again_and_again(&mut Watch::start(settings)?, arguments, interval);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::Usage(
            "top draws on a terminal, and standard input and output are not one: pagecrew top --once prints text, --json objects".into(),
        ));
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let terminal = variable("TERM");
    if is_dumb(&terminal) {
        return again_and_again(&mut Watch::start(settings)?, arguments, interval);
    }
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(variable).into_iter().find(|value| !value.is_empty());
    let ability = ability(&terminal, &variable("NO_COLOR"), arguments.no_color, &locale.unwrap_or_default());
    // Before there are threads, which take over what is blocked.
    let set = SignalSet::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGTSTP, libc::SIGCONT, libc::SIGWINCH]);
    let before = set.block();
    let screen = Screen { view: arguments.view.unwrap_or_default(), ..Screen::default() };
    live::run(Watch::start(settings)?, screen, ability, interval, &before, &set)
}

fn interval(text: &str) -> Result<Duration, Failure> {
    match parse_duration(text) {
        Ok(interval) if (INTERVAL_LEAST..=INTERVAL_MOST).contains(&interval) => Ok(interval),
        Ok(_) => Err(Failure::Usage(format!("--interval: '{text}' is not from 100ms to 1h"))),
        Err(error) => Err(Failure::Usage(format!("--interval: {error}"))),
    }
}

/// A terminal of which nothing is known but that it prints.
fn is_dumb(terminal: &str) -> bool {
    matches!(terminal, "" | "dumb" | "unknown")
}

/// What a terminal can show, by what the environment says.
fn ability(terminal: &str, no_color: &str, option: bool, locale: &str) -> Ability {
    let monochrome = terminal.starts_with("vt") || terminal.ends_with("-m") || terminal.ends_with("-mono");
    let locale = locale.to_ascii_lowercase().replace('-', "");
    Ability {
        colour: !option && no_color.is_empty() && !monochrome,
        // The console's font has few of the characters.
        unicode: locale.contains("utf8") && terminal != "linux",
    }
}

/// Looks twice, and prints what came of it.
fn once(watch: &mut Watch, arguments: &Arguments, interval: Duration) -> Result<ExitCode, Failure> {
    watch.look();
    // From what was seen, which may have taken its time.
    let begin = std::time::Instant::now();
    watch.wait_for_answers();
    std::thread::sleep(interval.saturating_sub(begin.elapsed()));
    watch.look();
    print(&if arguments.json {
        format!("{:#}\n", document::document(&watch.model, since_1970()))
    } else {
        as_text(watch, arguments.view)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Prints at each look, until it is ended.
fn again_and_again(watch: &mut Watch, arguments: &Arguments, interval: Duration) -> Result<ExitCode, Failure> {
    watch.look();
    watch.wait_for_answers();
    loop {
        std::thread::sleep(interval);
        watch.look();
        print(&if arguments.json {
            format!("{}\n", document::document(&watch.model, since_1970()))
        } else {
            as_text(watch, Some(arguments.view.unwrap_or_default())) + "\n"
        })?;
    }
}

/// A view as text, or all but the overview, each under its name.
fn as_text(watch: &Watch, view: Option<View>) -> String {
    let columns = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(0, |size| usize::from(size.ws_col));
    let width = if columns == 0 { COLUMNS } else { columns };
    text_of(&watch.model, view, width)
}

fn text_of(model: &model::Model, view: Option<View>, width: usize) -> String {
    let look = Look { width, unicode: false, sort: Sort::default() };
    let rows = |view: View| {
        view.page(model, &look).rows().map(|row| ascii(&row.text()).into_owned() + "\n").collect::<String>()
    };
    match view {
        Some(view) => rows(view),
        None => {
            let section = |view: &View| format!("== {}\n{}", view.name(), rows(*view));
            View::ALL[1..].iter().map(section).collect::<Vec<_>>().join("\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(arguments: &[&str]) -> Result<Arguments, String> {
        let command = Command::try_parse_from([&["top"], arguments].concat());
        command.map(|command| command.arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn options() {
        assert_eq!(parse(&["--view", "stalls"]).ok().unwrap().view, Some(View::Stalls));
        for (arguments, word) in [
            (&["--view", "x"][..], "overview"),
            (&["--json", "--view", "nodes"], "--view"),
            (&["--json", "--no-color"], "--no-color"),
            (&["--interval"], "--interval"),
            (&["more"], "more"),
        ] {
            assert!(parse(arguments).err().unwrap().contains(word), "{arguments:?}");
        }
        for (text, good) in
            [("1s", true), ("100ms", true), ("1h", true), ("0", false), ("99ms", false), ("61m", false), ("x", false)]
        {
            assert_eq!(interval(text).is_ok(), good, "{text}");
        }
    }

    #[test]
    fn what_terminals_can_show() {
        let all = Ability { colour: true, unicode: true };
        assert_eq!(ability("xterm-256color", "", false, "en_US.UTF-8"), all);
        assert_eq!(ability("xterm", "", false, "C.utf8"), all);
        for (terminal, no_color, option) in
            [("xterm", "1", false), ("xterm", "", true), ("vt100", "", false), ("xterm-m", "", false)]
        {
            assert!(!ability(terminal, no_color, option, "C.UTF-8").colour, "{terminal}");
        }
        assert!(!ability("xterm", "", false, "C").unicode && !ability("linux", "", false, "C.UTF-8").unicode);
        assert!(["", "dumb", "unknown"].into_iter().all(is_dumb) && !is_dumb("xterm"));
    }

    #[test]
    fn text_is_plain_and_has_every_view() {
        let mut model = model::made_up::model(2, 3);
        model.programs[0].name = "日本é".into();
        let text = text_of(&model, None, 120);
        for view in &View::ALL[1..] {
            assert!(text.contains(&format!("== {}\n", view.name())), "{text}");
        }
        assert!(text.is_ascii() && text.lines().all(|line| line == line.trim_end()), "{text}");
        let one = text_of(&model, Some(View::Overview), 80);
        assert!(!one.contains("==") || one.contains("[="), "{one}");
    }
}
