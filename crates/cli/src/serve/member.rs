//! One service of a supervisor: its process, what it says, and where in its life it is.

use super::directory::Directory;
use super::part::Part;
use crate::metrics::Listener;
use crate::notify::{self, Hearer, Said};
use crate::supervised;
use pagecrew::control::Supervision;
use pagecrew::control::supervision::{Action, End, Event, Phase};
use pagecrew::sys::Errno;
use pagecrew::sys::child::{Child, Rights};
use pagecrew::sys::clock::now_ns;
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// What members are started with.
pub struct Setting<'a> {
    pub directory: &'a Directory,
    /// The file of settings, where one was named.
    pub config: Option<&'a Path>,
    /// Where the metrics of all are served, if they are.
    pub listener: Option<&'a Listener>,
}

/// What has come of something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// It is elsewhere in its life: where it was before, and where it is.
    Phase(Phase, Phase),
    /// It takes so long until it is ready.
    More(Duration),
    /// It says something else of itself.
    Status,
    /// No process can be started.
    NotStarted(Errno),
}

/// See the module.
#[derive(Debug)]
pub struct Member {
    pub part: Part,
    pub life: Supervision,
    process: Option<Child>,
    hearer: Option<Hearer>,
    /// What it has said of itself last.
    status: Option<String>,
}

impl Member {
    /// One that does not run yet.
    pub fn new(part: Part) -> Member {
        Member { part, life: Supervision::new(part.terms()), process: None, hearer: None, status: None }
    }

    /// The number of its process.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::pid)
    }

    /// What is readable when there is something to see to.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        let hearer = self.hearer.as_ref().map(Hearer::descriptor);
        hearer.into_iter().chain(self.process.as_ref().map(Child::descriptor))
    }

    /// Sees to what it says, to its end, and to the time.
    pub fn see_to(&mut self, setting: &Setting<'_>) -> Vec<News> {
        let mut news = Vec::new();
        // What it said before it ended comes first.
        let ended = self.process.as_mut().and_then(Child::ended);
        for said in self.hearer.as_ref().map(Hearer::heard).unwrap_or_default() {
            match said {
                Said::Ready => self.tell(Event::Ready, setting, &mut news),
                Said::More(time) => {
                    self.tell(Event::More(time), setting, &mut news);
                    news.push(News::More(time));
                }
                Said::Status(status) => {
                    self.status = Some(status);
                    news.push(News::Status);
                }
            }
        }
        if let Some(status) = ended {
            (self.process, self.hearer, self.status) = (None, None, None);
            self.tell(Event::Ended(end(status)), setting, &mut news);
        }
        self.tell(Event::Time, setting, &mut news);
        news
    }

    /// Does what follows from `event`.
    pub fn happened(&mut self, event: Event, setting: &Setting<'_>) -> Vec<News> {
        let mut news = Vec::new();
        self.tell(event, setting, &mut news);
        news
    }

    fn tell(&mut self, event: Event, setting: &Setting<'_>, news: &mut Vec<News>) {
        let before = self.life.phase();
        let action = self.life.note(event, now_ns());
        let mut failed = None;
        match (action, &self.process) {
            (None, _) => {}
            (Some(Action::Start), _) => failed = self.start(setting).err(),
            (Some(Action::Reload), Some(process)) => process.signal(libc::SIGHUP),
            (Some(Action::Terminate), Some(process)) => process.signal(libc::SIGTERM),
            (Some(Action::Kill), Some(process)) => process.signal(libc::SIGKILL),
            // The machine acts on processes that there are.
            (Some(Action::Reload | Action::Terminate | Action::Kill), None) => {}
        }
        if self.life.phase() != before {
            news.push(News::Phase(before, self.life.phase()));
        }
        if let Some(errno) = failed {
            news.push(News::NotStarted(errno));
            self.tell(Event::Ended(End::NotStarted), setting, news);
        }
    }

    fn start(&mut self, setting: &Setting<'_>) -> Result<(), Errno> {
        let hearer = Hearer::bind(&setting.directory.notify(self.part)).map_err(Errno::from)?;
        // This program itself, also where another version has taken its place in the file system.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("pagecrew").args(self.part.command()).stdin(Stdio::null());
        match (self.part, setting.listener) {
            (Part::Metrics, Some(listener)) => {
                command.arg(setting.directory.path());
                command.stdin(Stdio::from(listener.socket.try_clone().map_err(Errno::from)?));
            }
            _ => {
                command.arg("--metrics").arg(setting.directory.metrics(self.part));
                if let Some(config) = setting.config {
                    command.arg("--config").arg(config);
                }
            }
        }
        // What it says goes to standard error. Standard output is the supervisor's.
        command.stdout(Stdio::null());
        command.env(notify::VARIABLE, hearer.path()).env(supervised::VARIABLE, self.part.name());
        for variable in ["WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(variable);
        }
        let rights = Rights { capabilities: self.part.capabilities(), kept: Some(setting.directory.lives()) };
        self.process = Some(Child::start(command, rights)?);
        self.hearer = Some(hearer);
        Ok(())
    }

    /// How it stands, in a few words.
    pub fn standing(&self) -> String {
        match self.life.phase() {
            Phase::Off => "off".into(),
            Phase::Starting => "starts".into(),
            Phase::Ready | Phase::Reloading => self.status.clone().unwrap_or_else(|| "served".into()),
            Phase::Ending | Phase::Killed => "ends".into(),
            Phase::Waiting => format!("starts again soon, {}", self.how_it_ended()),
            Phase::GivenUp => format!("off until the next reload, {}", self.how_it_ended()),
        }
    }

    /// How it has ended by itself.
    pub fn how_it_ended(&self) -> String {
        match self.life.last() {
            None => "it has not ended yet".into(),
            Some(End::Status(status)) => format!("it has ended with status {status}"),
            Some(End::Signal(signal)) => format!("it was ended by signal {signal}"),
            Some(End::NotStarted) => "it could not be started".into(),
            Some(End::Late) => format!("it was not ready within {} s", self.part.terms().start.as_secs()),
        }
    }
}

fn end(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Status(code),
        (None, Some(signal)) => End::Signal(signal),
        (None, None) => End::Status(1),
    }
}
