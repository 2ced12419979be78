//! The loop over all services: what has happened to them, and what is done about it.

use super::config::TABLE;
use super::directory::Directory;
use super::member::{Member, News, Setting};
use super::metrics::Board;
use super::part::Part;
use super::report::Reporter;
use super::{Job, say_own_metrics};
use crate::failure::Failure;
use crate::metrics::Listener;
use crate::notify;
use crate::output::note;
use crate::service::{self, Service};
use crate::settings::note_fixed;
use pagecrew::control::supervision::{End, Event, Phase};
use pagecrew::sys::clock::now_ns;
use std::path::PathBuf;
use std::time::Duration;

/// A process that was killed ends within so long, unless it waits for something in the kernel.
const LAST: Duration = Duration::from_secs(5);

/// See the module.
pub struct Supervisor {
    pub service: Service<Job>,
    pub directory: Directory,
    pub config: Option<PathBuf>,
    pub listener: Option<Listener>,
    /// Every service, whether it is to run or not.
    pub members: Vec<Member>,
    pub board: Board,
    pub reporter: Reporter,
    pub job: Job,
    /// Nobody is on his way to be ready, and the service manager was told so.
    pub settled: bool,
    /// What the service manager was told last.
    pub status: String,
}

impl Supervisor {
    /// Supervises until it is told to end.
    pub fn run(&mut self) -> Result<(), Failure> {
        for index in 0..self.members.len() {
            let part = self.members[index].part;
            if part == Part::Metrics || self.job.services.contains(&part) {
                self.happened(index, Event::Wanted(true))?;
            }
        }
        let mut served = false;
        loop {
            self.tell()?;
            if self.settled && !served {
                served = true;
                self.begun()?;
            }
            match self.wait() {
                service::Event::Stop => return Ok(()),
                service::Event::Reload(read) => self.reload(read)?,
                service::Event::Due(_) => self.see_to()?,
            }
        }
    }

    fn wait(&mut self) -> service::Event<Job> {
        let until = self.members.iter().filter_map(|member| member.life.next_ns()).min();
        let descriptors = self.members.iter().flat_map(Member::descriptors);
        self.service.wait(until, descriptors.map(|descriptor| (descriptor, libc::POLLIN)))
    }

    fn see_to(&mut self) -> Result<(), Failure> {
        (0..self.members.len()).try_for_each(|index| self.with(index, Member::see_to))
    }

    fn happened(&mut self, index: usize, event: Event) -> Result<(), Failure> {
        self.with(index, |member, setting| member.happened(event, setting))
    }

    fn with(&mut self, index: usize, what: impl FnOnce(&mut Member, &Setting<'_>) -> Vec<News>) -> Result<(), Failure> {
        let setting =
            Setting { directory: &self.directory, config: self.config.as_deref(), listener: self.listener.as_ref() };
        let member = &mut self.members[index];
        for news in what(member, &setting) {
            match news {
                News::Phase(before, phase) => self.reporter.phase(member, before, phase)?,
                News::More(time) if !self.settled => self.service.more_time(time),
                News::More(_) | News::Status => {}
                News::NotStarted(errno) => note(&format!("{} can't be started: {errno}", member.part)),
            }
        }
        Ok(())
    }

    /// Tells the service manager and whoever asks for metrics how all of them stand.
    fn tell(&mut self) -> Result<(), Failure> {
        let services = || self.members.iter().filter(|member| member.part != Part::Metrics && member.life.wanted());
        self.board.write(services().map(|member| (member.part, member.life.standing())).collect());
        let standings: Vec<String> =
            services().map(|member| format!("{}: {}", member.part, member.standing())).collect();
        let status = standings.join("; ");
        if status != self.status {
            notify::status(&status);
            self.status = status;
        }
        if !self.settled && self.members.iter().all(|member| !member.life.pending()) {
            self.settled = true;
            self.service.ready();
        }
        Ok(())
    }

    /// All have begun for the first time, or have failed to.
    ///
    /// # Errors
    /// If nobody is left.
    fn begun(&mut self) -> Result<(), Failure> {
        let services = || self.members.iter().filter(|member| self.job.services.contains(&member.part));
        let of =
            |phases: &[Phase]| services().filter(|member| phases.contains(&member.life.phase())).collect::<Vec<_>>();
        let (there, given_up) = (of(&[Phase::Ready, Phase::Reloading]), of(&[Phase::GivenUp]));
        let how = |member: &Member| format!("{}: {}", member.part, member.how_it_ended());
        if given_up.len() < services().count() {
            let names: Vec<&str> = there.iter().map(|member| member.part.name()).collect();
            let names = if names.is_empty() { "nothing yet".into() } else { names.join(", ") };
            let others: Vec<String> = services()
                .filter(|member| there.iter().all(|there| there.part != member.part))
                .map(|member| format!("; {}", how(member)))
                .collect();
            return self.reporter.all("served", &format!("served: {names}{}", others.concat()));
        }
        let message = format!(
            "no service can be run here ({})",
            given_up.iter().map(|member| how(member)).collect::<Vec<_>>().join("; ")
        );
        match given_up.iter().all(|member| member.life.last() == Some(End::Status(2))) {
            true => Err(Failure::Usage(message)),
            false => Err(Failure::Impossible(message)),
        }
    }

    /// Goes on with settings that were read again. Where they make no sense, all stays as it is. The service manager is told when all services have
    /// taken them over.
    fn reload(&mut self, read: Result<Job, Failure>) -> Result<(), Failure> {
        self.settled = false;
        let job = match read {
            Ok(job) => job,
            Err(error) => return self.reporter.all("refused", &format!("the settings stay as they are: {error}")),
        };
        note_fixed(&TABLE.fixed(|key| match key {
            "metrics" => job.metrics != self.job.metrics,
            "directory" => job.directory != self.job.directory,
            _ => false,
        }));
        say_own_metrics(&job, &self.job.own_metrics);
        let names = job.services.iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
        let others = job.services != self.job.services;
        self.job = Job { metrics: self.job.metrics.clone(), directory: self.job.directory.clone(), ..job };
        for index in 0..self.members.len() {
            let Member { part, life, .. } = &self.members[index];
            let wanted = *part == Part::Metrics || self.job.services.contains(part);
            let event = if wanted && life.wanted() { Event::Reload } else { Event::Wanted(wanted) };
            self.happened(index, event)?;
        }
        let change = if others { format!("; from now on: {names}") } else { String::new() };
        self.reporter.all("reloaded", &format!("the settings were read again{change}"))
    }

    /// Ends all of them, and waits until they have.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.service.stopping();
        let mut result = (0..self.members.len()).try_for_each(|index| self.happened(index, Event::Wanted(false)));
        let patience = |member: &Member| member.part.terms().stop + LAST;
        let patience = self.members.iter().filter(|member| member.life.runs()).map(patience).max().unwrap_or_default();
        let until_ns = now_ns() + patience.as_nanos() as u64;
        while let Some(member) = self.members.iter().find(|member| member.life.runs()) {
            if now_ns() >= until_ns {
                let what = format!("{} (process {}) does not end", member.part, member.pid().unwrap_or(0));
                return Err(Failure::Failed(format!("{what}: it waits for something in the kernel")));
            }
            // A killed one has no time of its own.
            let until = self.members.iter().filter_map(|member| member.life.next_ns()).min().unwrap_or(until_ns);
            let descriptors = self.members.iter().flat_map(Member::descriptors);
            self.service.wait(Some(until), descriptors.map(|descriptor| (descriptor, libc::POLLIN)));
            // A reader of standard output that is gone is no reason to leave somebody behind.
            result = self.see_to().and(result);
        }
        result
    }
}
