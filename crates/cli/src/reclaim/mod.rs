//! `pagecrew reclaim`: memory is free before it is taken, for as long as it is.

pub mod config;
mod groups;
mod metrics;

use crate::failure::Failure;
use crate::figures::{counted, object, seconds};
use crate::metrics::Address;
use crate::notify;
use crate::output::{note, print};
use crate::service::{self, Service};
use crate::settings::{AGAIN, PROTOCOL, note_fixed, option, options, wrong};
use crate::trim::parse_name;
use crate::values::parse_control_group;
use config::{Config, TABLE};
use groups::GroupReporter;
use metrics::Board;
use pagecrew::control::lead::Cause;
use pagecrew::reclaim::support::Threads;
use pagecrew::reclaim::{
    Behind, BehindStanding, Choice, Event, GroupOptions, GroupStanding, Groups, Options, ReclaimError, Reclaimer,
    Standing,
};
use pagecrew::units::Bytes;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Keep memory free ahead of those who take it, so that they need not reclaim it themselves
///
/// The kernel begins to reclaim in the background when little is left, and programs that take memory fast have used that up before it got
/// anywhere: they wait, and reclaim for themselves. While there is such demand, this has the kernel begin earlier
/// (vm.watermark_scale_factor), by as much as the demand needs. Without demand the setting is as it was before. While this runs, the kernel's
/// reclaim threads (kswapd) have nice -20. While nothing is reclaimed, it sleeps. Both are put back when it ends and
/// when it is killed (if its guard is killed as well, when it is started again).
///
/// A control group at its own limit has no reclaim in the background at all. While the tasks of one are at the limit, some of its page cache
/// is reclaimed before they need the room (memory.reclaim). No limit is ever changed. While the machine has demand, a group that takes most of
/// it, and has half of all page cache, is held to what it has.
#[derive(clap::Args, Clone, Default)]
#[command(after_help = "\
Examples:
  pagecrew reclaim                            as long as it runs, and say what came of it
  pagecrew reclaim --most 5%                  up to 5 % of the memory free ahead of demand
  pagecrew reclaim --groups db.slice          of control groups, only this one and those below it
  pagecrew reclaim --groups none              for the machine's own limits only
  pagecrew reclaim --drop-behind rsync        what rsync has read makes room for others
  pagecrew reclaim --json --metrics 9752      for programs
  systemctl enable --now pagecrew-reclaim     as long as the machine runs

It is for the machine, not for a container, and takes root.")]
pub struct Arguments {
    #[arg(long, value_name = "PERCENT", help = TABLE.help("most", ""))]
    most: Option<String>,
    #[arg(long, value_name = "NAME", help = TABLE.help("groups", AGAIN))]
    groups: Vec<String>,
    #[arg(long, value_name = "NAME", help = TABLE.help("drop-behind", AGAIN))]
    drop_behind: Vec<String>,
    #[arg(long, value_name = "ADDRESS", help = TABLE.help("metrics", PROTOCOL))]
    metrics: Option<String>,
    /// Settings to begin with [default: /etc/pagecrew/pagecrew.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON object a line, whenever something changes, instead of sentences
    #[arg(long)]
    json: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
struct Job {
    options: Options,
    groups: Choice,
    drop_behind: Vec<String>,
    metrics: Option<Address>,
}

fn job(arguments: &Arguments, config: Config) -> Result<Job, Failure> {
    let most = option("--most", &arguments.most, config::parse_most)?.or(config.most);
    let metrics = option("--metrics", &arguments.metrics, Address::parse)?.or(config.metrics);
    let groups = match &arguments.groups[..] {
        [] => config.groups.unwrap_or_default(),
        words => match config::choice(words) {
            Some(choice) => choice,
            None if words.iter().any(|word| word == "all" || word == "none") => {
                return Err(wrong("--groups", "all and none stand by themselves"));
            }
            None => Choice::Named(options("--groups", words, parse_control_group)?),
        },
    };
    let most = most.unwrap_or(Options::default().most);
    let drop_behind = match &arguments.drop_behind[..] {
        [] => config.drop_behind.unwrap_or_default(),
        names => options("--drop-behind", names, parse_name)?,
    };
    Ok(Job { options: Options { most }, groups, drop_behind, metrics })
}

impl Job {
    fn for_groups(&self) -> GroupOptions {
        GroupOptions { choice: self.groups.clone(), most: self.options.most }
    }
}

fn read(arguments: &Arguments) -> Result<Job, Failure> {
    job(arguments, Config::read(arguments.config.as_deref())?)
}

/// Fails as the service would for the settings of `file`.
pub fn check(file: Option<&Path>) -> Result<(), Failure> {
    read(&Arguments { config: file.map(Path::to_owned), ..Arguments::default() }).map(drop)
}

impl From<ReclaimError> for Failure {
    fn from(error: ReclaimError) -> Failure {
        match error {
            ReclaimError::Unsupported(_) => Failure::Impossible(error.to_string()),
            ReclaimError::Factor(_)
            | ReclaimError::Counts(_)
            | ReclaimError::NodeGone(_)
            | ReclaimError::NodeAdded(_) => Failure::Failed(error.to_string()),
        }
    }
}

/// `pagecrew reclaim`.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut job = read(arguments)?;
    // Before there are threads, which would keep the rights that only this takes.
    let threads = Threads::listen().map_err(ReclaimError::from)?;
    let again = arguments.clone();
    let mut service = Service::begin(move || read(&again))?;
    let mut reclaimer = Reclaimer::new(threads, job.options)?;
    if reclaimer.found_one_left() {
        note("vm.watermark_scale_factor was as a killed pagecrew reclaim had left it, and was put back first");
    }
    let board = Board::default();
    board.write(reclaimer.standing());
    let of_groups = GroupReporter::new(arguments.json);
    let groups = match Groups::start(job.for_groups(), of_groups.listener()) {
        Ok(groups) => Some(groups),
        Err(error) => {
            if job.groups != Choice::None {
                note(&format!("control groups are left to themselves: {error}"));
            }
            None
        }
    };
    let standing_of_groups: metrics::OfGroups = match &groups {
        Some(groups) => Arc::new(groups.standing()),
        None => Arc::new(GroupStanding::default),
    };
    let behind = Behind::start(job.drop_behind.clone())
        .map_err(|errno| Failure::Failed(format!("a thread that drops behind: {errno}")))?;
    let standing_behind: metrics::OfBehind = Arc::new(behind.standing());
    let serve = |address| board.serve(address, standing_of_groups.clone(), standing_behind.clone());
    let metrics = job.metrics.as_ref().map(serve).transpose()?;
    let mut reporter = Reporter { json: arguments.json, bounded: false };
    reporter.ready(&reclaimer)?;
    service.ready();
    let result: Result<(), Failure> = loop {
        match service.wait(reclaimer.next_look_ns(), reclaimer.descriptors()) {
            service::Event::Stop => break Ok(()),
            service::Event::Due(_) => {}
            service::Event::Reload(read) => {
                match read {
                    Ok(read) => {
                        note_fixed(&TABLE.fixed(|key| key == "metrics" && read.metrics != job.metrics));
                        (job.options, job.groups, job.drop_behind) = (read.options, read.groups, read.drop_behind);
                        behind.change(job.drop_behind.clone());
                        reclaimer.change(job.options);
                        if let Some(groups) = &groups {
                            groups.change(job.for_groups());
                        }
                        note("the settings were read again");
                    }
                    Err(error) => note(&format!("the settings stay as they are: {error}")),
                }
                service.reloaded();
            }
        }
        // Also after a reload: what was readable meanwhile is not readable once more.
        match reclaimer.see_to() {
            Ok(event) => {
                if let Some(groups) = &groups {
                    groups.demand(reclaimer.has_demand());
                }
                behind.demand(reclaimer.has_demand());
                board.write(reclaimer.standing());
                if let Some(event) = event {
                    reporter.say(event, &reclaimer)?;
                }
            }
            Err(error) => break Err(error.into()),
        }
    };
    // First of all, the setting is put back. The threads for groups end meanwhile: the kernel is slow to let go of a tracepoint.
    if let Some(groups) = &groups {
        groups.end();
    }
    let standing = reclaimer.standing();
    let standing = Standing { factor: standing.own_factor, ..standing };
    drop(reclaimer);
    drop((groups, behind));
    service.stopping();
    drop(metrics);
    result?;
    reporter.end(standing)?;
    of_groups.end(standing_of_groups())?;
    end_behind(arguments.json, standing_behind())?;
    Ok(ExitCode::SUCCESS)
}

/// Says what came of drop-behind, in the end.
fn end_behind(json: bool, standing: BehindStanding) -> Result<(), Failure> {
    if json {
        let object = json!({ "event": "behind-end", "behind": object(standing.figures()) });
        return print(&format!("{object}\n"));
    }
    let BehindStanding { dropped_bytes, refused, .. } = standing;
    if dropped_bytes > 0 {
        note(&format!("{} of page cache dropped behind programs", Bytes(dropped_bytes)));
    }
    if refused > 0 {
        note("files of some programs could not be looked at: drop-behind takes CAP_SYS_PTRACE");
    }
    Ok(())
}

/// Says what happens.
struct Reporter {
    json: bool,
    /// That there is more demand than may be met was said.
    bounded: bool,
}

/// How it stands, for the service manager.
fn in_short(cause: Cause, standing: Standing) -> String {
    let (gap, demand) = (Bytes(standing.gap_bytes), Bytes(standing.demand_bytes));
    if standing.hurts > 0 {
        return "holds back: memory comes back from swap".into();
    }
    match cause {
        Cause::Rest => format!("waits for demand, {gap} kept free ahead"),
        Cause::Demand => format!("{gap} kept free ahead of {demand} a second"),
        Cause::Bounded => format!("{gap} kept free ahead of {demand} a second, the most that may be (setting most)"),
        Cause::Scarce => format!("{gap} kept free ahead of {demand} a second, the rest is left to files"),
        Cause::Saturated => format!("{gap} kept free ahead of {demand} a second, and kswapd works all the time"),
    }
}

impl Reporter {
    fn ready(&self, reclaimer: &Reclaimer) -> Result<(), Failure> {
        let standing = reclaimer.standing();
        notify::status(&in_short(reclaimer.cause(), standing));
        if self.json {
            return line("ready", reclaimer.cause(), standing, &[]);
        }
        let (gap, factor) = (Bytes(standing.gap_bytes), standing.factor);
        note(&format!("waiting for demand; without, {gap} is kept free ahead (vm.watermark_scale_factor {factor})"));
        Ok(())
    }

    fn say(&mut self, event: Event, reclaimer: &Reclaimer) -> Result<(), Failure> {
        let standing = reclaimer.standing();
        notify::status(&in_short(reclaimer.cause(), standing));
        if self.json {
            return match event {
                Event::Begun => line("begun", reclaimer.cause(), standing, &[]),
                Event::Changed => line("changed", reclaimer.cause(), standing, &[]),
                Event::Theirs => line("theirs", reclaimer.cause(), standing, &[]),
                Event::Ended { lasted, .. } => {
                    line("ended", reclaimer.cause(), standing, &[("lasted_seconds", lasted.as_secs_f64().into())])
                }
            };
        }
        let Standing { factor, demand_bytes, gap_bytes, .. } = standing;
        match event {
            Event::Begun => note(&format!(
                "{} a second are taken: {} is kept free ahead (vm.watermark_scale_factor {factor})",
                Bytes(demand_bytes),
                Bytes(gap_bytes)
            )),
            Event::Changed => {
                let why = match reclaimer.cause() {
                    Cause::Bounded => "more than what may be kept free is good for (setting most)",
                    Cause::Scarce => "more than a quarter of what is or could be free is good for",
                    Cause::Rest | Cause::Demand | Cause::Saturated => return Ok(()),
                };
                if !std::mem::replace(&mut self.bounded, true) {
                    note(&format!("{} a second are taken, {why}", Bytes(demand_bytes)));
                }
            }
            Event::Ended { lasted, reclaimed, stalls } => {
                self.bounded = false;
                note(&format!(
                    "over after {}: {} reclaimed, {stalls} times by those who took it; vm.watermark_scale_factor is {factor} again",
                    seconds(lasted),
                    Bytes(reclaimed)
                ));
            }
            Event::Theirs => {
                note(&format!("somebody has set vm.watermark_scale_factor to {factor}; that counts from now on"))
            }
        }
        Ok(())
    }

    fn end(&self, standing: Standing) -> Result<(), Failure> {
        if self.json {
            return line("end", Cause::Rest, standing, &[]);
        }
        let Standing { reclaimed_bytes, reclaimed_by_tasks_bytes, demands, .. } = standing;
        note(&format!(
            "{} reclaimed in {} of demand, {} of it by those who took it",
            Bytes(reclaimed_bytes),
            counted(demands, "span"),
            Bytes(reclaimed_by_tasks_bytes)
        ));
        Ok(())
    }
}

/// A line of JSON.
fn line(event: &str, cause: Cause, standing: Standing, more: &[(&str, Value)]) -> Result<(), Failure> {
    let mut object = object(standing.figures());
    let cause = match cause {
        Cause::Rest => "rest",
        Cause::Demand => "demand",
        Cause::Bounded => "bounded",
        Cause::Scarce => "scarce",
        Cause::Saturated => "saturated",
    };
    object.insert("event".into(), event.into());
    object.insert("cause".into(), cause.into());
    object.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    print(&format!("{}\n", Value::Object(object)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn each_cause_has_its_words() {
        let standing = Standing { gap_bytes: 64 << 20, demand_bytes: 5 << 30, ..Standing::default() };
        let said = |cause| in_short(cause, standing);
        assert_eq!(said(Cause::Rest), "waits for demand, 64 MiB kept free ahead");
        assert_eq!(said(Cause::Demand), "64 MiB kept free ahead of 5 GiB a second");
        assert!(said(Cause::Bounded).contains("setting most") && said(Cause::Scarce).contains("files"));
        assert!(said(Cause::Saturated).contains("kswapd"));
        assert!(in_short(Cause::Demand, Standing { hurts: 1, ..standing }).contains("swap"));
    }

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(arguments: &[&str]) -> Result<Job, String> {
        let command = Command::try_parse_from([&["reclaim"], arguments].concat()).map_err(|error| error.to_string())?;
        job(&command.arguments, Config::parse("most = 1\n").unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        assert_eq!(parse(&[]).unwrap().options.most, 0.01);
        assert_eq!(parse(&["--most", "5%"]).unwrap().options.most, 0.05);
    }

    #[test]
    fn programs_to_drop_behind_are_named() {
        let names = |arguments: &[&str]| parse(arguments).unwrap().drop_behind;
        assert_eq!(names(&[]), [""; 0]);
        assert_eq!(names(&["--drop-behind", "rsync", "--drop-behind", "tar"]), ["rsync", "tar"]);
        assert!(parse(&["--drop-behind", ""]).is_err());
    }

    #[test]
    fn groups_are_named_or_all_or_none() {
        let groups = |arguments: &[&str]| parse(arguments).unwrap().groups;
        assert_eq!(groups(&[]), Choice::All);
        assert_eq!(groups(&["--groups", "all"]), Choice::All);
        assert_eq!(groups(&["--groups", "none"]), Choice::None);
        assert_eq!(groups(&["--groups", "a", "--groups", "/b"]), Choice::Named(vec!["a".into(), "/b".into()]));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (arguments, word) in [
            (&["--most", "0"][..], "--most"),
            (&["--most", "11%"], "more than 10 percent"),
            (&["--most", "x"], "percentage"),
            (&["--metrics", "0.0.0.0:9750"], "--metrics"),
            (&["--groups", "a", "--groups", "none"], "by themselves"),
            (&["--groups", ""], "empty"),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }
}
