//! Trimming for as long as it is wanted.

use super::hold::Wards;
use super::metrics::Board;
use super::session::{Report, Session};
use super::worker::{Said, Worker};
use super::{Arguments, Job, show};
use crate::failure::Failure;
use crate::output::{note, print};
use crate::service::{Event, Service};
use pagecrew::sys::clock::now_ns;
use pagecrew::units::Bytes;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// At the end, the last report is waited for no longer than this.
const PATIENCE: Duration = Duration::from_millis(50);

/// `pagecrew trim --watch`. Ends with status 0 when it is told to, and when the processes that it was told by number have ended.
pub fn run(arguments: &Arguments, mut job: Job) -> Result<ExitCode, Failure> {
    let service = Service::begin()?;
    if !arguments.cgroup.is_empty() {
        job.selection.check_groups()?;
    }
    let board = Board::default();
    // Before there is anything open that it should not have.
    let worker = Worker::start(Session::new(job.clone()), board.clone())?;
    let metrics = job.metrics.as_ref().map(|address| board.serve(address)).transpose()?;
    let mut wards = Wards::default();
    let mut reporter = Reporter { json: job.json, gone_before: 0, last: None, trouble: None };
    let mut next_renewal = now_ns() + job.options.interval.as_nanos() as u64;
    let result = 'watch: loop {
        let until = wards.next_turn_ns().map_or(next_renewal, |look| look.min(next_renewal));
        let ready = match service.wait(Some(until), wards.descriptors().chain([worker.descriptor()])) {
            Event::Due(ready) => ready,
            Event::Stop => break Ok(()),
            Event::Reload => {
                service.reload(|| match super::read(arguments) {
                    Ok(read) => {
                        if read.metrics != job.metrics {
                            note("metrics can't change while it runs: start it again for that");
                        }
                        job = Job { metrics: job.metrics.clone(), ..read };
                        wards.change(&job);
                        wards.renew(&worker);
                        note("the settings were read again");
                        worker.change(job.clone());
                    }
                    Err(error) => note(&format!("the settings stay as they are: {error}")),
                });
                // Whatever is ready still is the next time.
                Vec::new()
            }
        };
        for said in worker.heard() {
            match said {
                Said::Begun => {
                    if let Err(failure) = wards.begin(&job) {
                        break 'watch Err(failure);
                    }
                    service.ready();
                }
                Said::Rushing { ticket } => wards.rushing(ticket),
                Said::Rushed { ticket, rushed } => wards.rushed(ticket, rushed, &worker),
                Said::Interval(report) => reporter.interval(report)?,
                Said::Over => break 'watch Ok(()),
                Said::Failed(failure) => break 'watch Err(failure),
                Said::Trouble(what) => reporter.trouble(what),
                Said::Ended(_) => {}
            }
        }
        wards.see_to(&ready, &worker);
        board.change(|figures| figures.holds = wards.holds());
        if now_ns() >= next_renewal {
            next_renewal = now_ns() + job.options.interval.as_nanos() as u64;
            wards.renew(&worker);
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
    gone_before: u64,
    last: Option<Box<Report>>,
    /// What did not work last.
    trouble: Option<String>,
}

impl Reporter {
    fn interval(&mut self, report: Box<Report>) -> Result<(), Failure> {
        let gone = report.total.gone_bytes;
        if self.json {
            print(&format!("{}\n", show::json(&report)))?;
        } else if std::io::stdout().is_terminal() {
            print(&format!("\x1b[H\x1b[2J{}", show::text(&report)))?;
        } else if gone > self.gone_before {
            note(&format!("{} gone, {} in all", Bytes(gone - self.gone_before), Bytes(gone)));
        }
        self.gone_before = gone;
        self.last = Some(report);
        Ok(())
    }

    /// Something does not work. Said once, until it is something else.
    fn trouble(&mut self, what: String) {
        if self.trouble.as_ref() != Some(&what) {
            note(&format!("{what}; it is tried again"));
            self.trouble = Some(what);
        }
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
