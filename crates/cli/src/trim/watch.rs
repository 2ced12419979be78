//! Trimming for as long as it is wanted.

use super::config::TABLE;
use super::hold::{Wards, say_undone};
use super::metrics::Board;
use super::session::Report;
use super::worker::{Said, Worker};
use super::{Arguments, Job, show};
use crate::failure::Failure;
use crate::notify;
use crate::output::{Sparing, note, print};
use crate::service::{Event, Service};
use crate::settings::note_fixed;
use pagecrew::group;
use pagecrew::sys::clock::now_ns;
use pagecrew::units::Bytes;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// At the end, the last report is waited for no longer than this.
const PATIENCE: Duration = Duration::from_millis(50);
/// And at the beginning, so long for the first search of all processes, before the watch counts as ready.
const BEGIN: Duration = Duration::from_secs(20);
/// A thread that has said nothing for so long beyond the interval waits for something.
const STUCK: Duration = Duration::from_secs(30);
/// What has gone is said after an interval, then after twice as long, and so on up to once an hour.
const NOTE_MOST: Duration = Duration::from_secs(3600);

/// `pagecrew trim --watch`. Ends with status 0 when it is told to, and when the processes that it was told by number have ended.
pub fn run(arguments: &Arguments, mut job: Job) -> Result<ExitCode, Failure> {
    let again = arguments.clone();
    let mut service = Service::begin(move || super::read(&again))?;
    if !arguments.cgroup.is_empty() {
        job.selection.check_groups()?;
    }
    let board = Board::default();
    // Before there is anything open that it should not have.
    let mut worker = Worker::start(job.clone(), board.clone())?;
    let metrics = job.metrics.as_ref().map(|address| board.serve(address)).transpose()?;
    // Of any watch before this one: nobody else does it, whichever groups this one is to hold.
    if !job.options.dry_run {
        group::undo_what_was_left().iter().for_each(|path| say_undone(path));
    }
    // Groups don't wait for the first search, in which a process may be in the way for long.
    let mut wards = Wards::default();
    wards.begin(&job)?;
    let mut reporter = Reporter::new(&job);
    let mut next_renewal = now_ns() + job.options.interval.as_nanos() as u64;
    let mut ready_by = Some(now_ns() + BEGIN.as_nanos() as u64);
    let mut heard_ns = now_ns();
    let result = 'watch: loop {
        let others = wards.next_turn_ns().into_iter().chain(ready_by).chain(worker.next_look_ns());
        let until = others.fold(next_renewal, u64::min);
        let ready = match service.wait(Some(until), wards.descriptors().chain([worker.descriptor()])) {
            Event::Due(ready) => ready,
            Event::Stop => break Ok(()),
            Event::Reload(read) => {
                match read {
                    Ok(read) => {
                        note_fixed(&TABLE.fixed(|key| key == "metrics" && read.metrics != job.metrics));
                        job = Job { metrics: job.metrics.clone(), ..read };
                        wards.change(&job);
                        wards.renew();
                        note("the settings were read again");
                        worker.change(job.clone());
                    }
                    Err(error) => note(&format!("the settings stay as they are: {error}")),
                }
                service.reloaded();
                // Whatever is ready still is the next time.
                Vec::new()
            }
        };
        let heard = worker.heard();
        if !heard.is_empty() {
            heard_ns = now_ns();
        } else if now_ns() > heard_ns + (STUCK + 2 * job.options.interval).as_nanos() as u64 {
            reporter.stuck();
        }
        if ready_by.is_some_and(|by| now_ns() >= by) {
            ready_by = None;
            service.ready();
        }
        for said in heard {
            match said {
                Said::Begun => {
                    if ready_by.take().is_some() {
                        service.ready();
                    }
                }
                Said::Rushing { ticket } => wards.rushing(ticket),
                Said::Rushed { ticket, rushed } => wards.rushed(ticket, rushed, &mut worker),
                Said::Interval(report) => {
                    notify::status(&show::in_short(&report, wards.holds().holding));
                    reporter.interval(report)?;
                }
                Said::Over => break 'watch Ok(()),
                Said::Failed(failure) => break 'watch Err(failure),
                Said::Trouble(what) => reporter.trouble(what),
                Said::Ended(_) => {}
            }
        }
        wards.see_to(&ready, &mut worker);
        board.change(|figures| figures.holds = wards.holds());
        if now_ns() >= next_renewal {
            next_renewal = now_ns() + job.options.interval.as_nanos() as u64;
            wards.renew();
        }
    };
    // First of all, nobody waits for us any more.
    drop(wards);
    service.stopping();
    drop(metrics);
    let last = worker.end(PATIENCE);
    result?;
    reporter.end(last)?;
    Ok(ExitCode::SUCCESS)
}

/// Says how it stands: to programs each time, to people the table at a terminal and at the end, and otherwise what went.
struct Reporter {
    json: bool,
    /// What had gone when that was said last, when it may be said again, and how long that is then.
    said_gone: u64,
    next_ns: u64,
    pause: Duration,
    last: Option<Box<Report>>,
    /// What does not work.
    trouble: Sparing,
}

impl Reporter {
    fn new(job: &Job) -> Reporter {
        Reporter {
            json: job.json,
            said_gone: 0,
            next_ns: 0,
            pause: job.options.interval,
            last: None,
            trouble: Sparing::default(),
        }
    }

    fn interval(&mut self, report: Box<Report>) -> Result<(), Failure> {
        let gone = report.total.gone_bytes;
        if self.json {
            print(&format!("{}\n", show::json(&report)))?;
        } else if std::io::stdout().is_terminal() {
            print(&format!("\x1b[H\x1b[2J{}", show::text(&report)))?;
        } else if gone > self.said_gone && now_ns() >= self.next_ns {
            note(&format!("{} gone, {} in all", Bytes(gone - self.said_gone), Bytes(gone)));
            self.said_gone = gone;
            self.next_ns = now_ns() + self.pause.as_nanos() as u64;
            self.pause = (2 * self.pause).min(NOTE_MOST);
        }
        self.last = Some(report);
        Ok(())
    }

    /// Something does not work.
    fn trouble(&mut self, what: String) {
        self.trouble.note(&format!("{what}; it is tried again"));
    }

    /// The thread that searches is not heard of.
    fn stuck(&mut self) {
        self.trouble.note(
            "no process is searched: the search waits for one whose memory is locked (it may wait for a disk or a server itself)",
        );
    }

    /// The last word: `report`, or where the thread that searches does not answer, what it said last.
    fn end(&mut self, report: Option<Box<Report>>) -> Result<(), Failure> {
        let Some(report) = report.or(self.last.take()) else { return Ok(()) };
        if self.json {
            return print(&format!("{}\n", show::json(&report)));
        }
        let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        print(&format!("{clear}{}", show::text(&report)))
    }
}
