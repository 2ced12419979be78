//! The thread of a watch that searches and looks. It may have to wait for another process's locks, so nothing that can't wait is done
//! there: signals and control groups are seen to by the thread that has started it.
//!
//! It has a table of open files of its own. A thread that waits for such a lock can't be ended, not by SIGKILL either, until it has it; with
//! the process's table it would keep the guards of held groups from seeing that the process is at its end. (In containers that is refused.)
//!
//! A thread that waits too long is left behind, with the process that it waits for: another one takes its place, which leaves that process
//! alone (`in_the_way.rs`), and all of its user's if there are several. So nobody can keep others' from being trimmed.

use super::Job;
use super::in_the_way::InTheWay;
use super::metrics::{Board, Figures};
use super::noted::Whereabouts;
use super::session::{Earlier, Report, Session};
use crate::failure::Failure;
use nix::sched::CloneFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use pagecrew::group::relief::Rushed;
use pagecrew::group::rushes::{Rush, Rushes};
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use pagecrew::sys::thread::keep_descriptor;
use pagecrew::trim::{Id, Kernel, Turn};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Looking for processes may take this share of the budget.
const REFRESH: f64 = 0.1;
/// How often the figures are renewed.
const FIGURES_NS: u64 = 1_000_000_000;
/// So long it works before it hears what there is to hear.
const SLICE_NS: u64 = 5_000_000;
/// A thread that is at one process for so long is left behind; so many of them at most.
const LONG_NS: u64 = 2_000_000_000;
/// In the first of a rush's processes it may be there for longer. A task that `memory.high` puts to sleep sleeps in its page fault, with a lock of
/// its memory, for two seconds at most; if khugepaged wants that memory meanwhile, it waits for the second sleep as well, and whoever else
/// reads it waits for khugepaged.
const LONG_OF_HELD_NS: u64 = 5_000_000_000;
const BEHIND_MOST: usize = 32;
/// Where no other thread can be had, it is tried again after so long.
const AGAIN_NS: u64 = 10_000_000_000;

/// What it is told.
enum Command {
    /// Memory of the control group is needed now.
    Rush(Rush),
    /// Tasks wait for that rush now.
    Hurry {
        ticket: u64,
    },
    /// That rush is over.
    CalmDown {
        ticket: u64,
    },
    Change(Box<Job>),
    /// To be told apart from nothing at all.
    Wake,
}

/// What it says.
pub enum Said {
    /// It has found the processes for the first time, and can begin.
    Begun,
    /// The rush has begun.
    Rushing { ticket: u64 },
    /// A rush has come to its end.
    Rushed { ticket: u64, rushed: Rushed },
    /// An interval is over.
    Interval(Box<Report>),
    /// Nobody is left who was asked for by number.
    Over,
    /// It can't begin.
    Failed(Failure),
    /// Something does not work now; it is tried again.
    Trouble(String),
    /// It has ended.
    Ended(Box<Report>),
}

/// A handle to the thread.
pub struct Worker {
    line: Line,
    job: Job,
    board: Board,
    /// Those that are not over.
    rushes: BTreeSet<u64>,
    /// The one that goes on, and since when.
    rushing: Option<(u64, u64)>,
    /// Its last report of an interval.
    last: Option<Box<Report>>,
    earlier: Earlier,
    in_the_way: Arc<Mutex<InTheWay>>,
    /// Threads that wait, each for a process.
    behind: Vec<(Id, Arc<Shared>)>,
    /// No other thread is tried before this.
    again_ns: u64,
}

/// The connection to one thread.
struct Line {
    commands: Sender<Command>,
    said: Receiver<Said>,
    shared: Arc<Shared>,
}

struct Shared {
    /// It has come to its end.
    over: AtomicBool,
    whereabouts: Whereabouts,
    /// Ready when something was said.
    event: EventFd,
}

impl Worker {
    /// Starts it. To be called while this process has few files open: where a kernel (before 5.9) can't do better, copies of them are the
    /// thread's for good.
    pub fn start(job: Job, board: Board) -> Result<Worker, Failure> {
        let (earlier, in_the_way) = (Earlier::nothing(), Arc::default());
        let line = Line::start(&job, &board, earlier, &in_the_way, true)?;
        let (rushes, behind) = (BTreeSet::new(), Vec::new());
        Ok(Worker { line, job, board, rushes, rushing: None, last: None, earlier, in_the_way, behind, again_ns: 0 })
    }

    /// Ready when there is something to hear.
    pub fn descriptor(&self) -> (RawFd, libc::c_short) {
        (self.line.shared.event.as_fd().as_raw_fd(), libc::POLLIN)
    }

    /// When to hear it even if that is not ready.
    pub fn next_look_ns(&self) -> Option<u64> {
        let at = self.line.shared.whereabouts.at().filter(|_| self.behind.len() < BEHIND_MOST);
        at.map(|(_, since_ns)| self.leaves_ns(since_ns))
    }

    /// When the thread is left behind that has been at one process since then.
    fn leaves_ns(&self, since_ns: u64) -> u64 {
        let of_held = self.rushing.map_or(0, |(_, begin_ns)| begin_ns + LONG_OF_HELD_NS);
        (since_ns + LONG_NS).max(of_held).max(self.again_ns)
    }

    /// What it has said since the last time. If it is in somebody's hands for too long, another one takes its place.
    pub fn heard(&mut self) -> Vec<Said> {
        let _ = self.line.shared.event.read();
        let mut said: Vec<Said> = self.line.said.try_iter().collect();
        for one in &said {
            match one {
                Said::Rushing { ticket } if self.rushing.is_none_or(|(of, _)| of != *ticket) => {
                    self.rushing = Some((*ticket, now_ns()));
                }
                Said::Rushed { ticket, .. } => self.over(*ticket),
                Said::Interval(report) => self.last = Some(report.clone()),
                _ => {}
            }
        }
        let mut in_the_way = self.in_the_way.lock().unwrap_or_else(PoisonError::into_inner);
        self.behind.retain(|(id, shared)| {
            let over = shared.over.load(Ordering::Relaxed);
            if over {
                in_the_way.went(*id, now_ns());
            }
            !over
        });
        drop(in_the_way);
        if let Some((id, since_ns)) = self.line.shared.whereabouts.at()
            && now_ns() >= self.leaves_ns(since_ns)
            && self.behind.len() < BEHIND_MOST
        {
            said.extend(self.leave_behind(id));
        }
        said
    }

    /// Goes on without the thread that is at the process `id`. Says what that comes to.
    fn leave_behind(&mut self, id: Id) -> Vec<Said> {
        let name = format!("process {}", id.pid);
        // As far as it was written down.
        let mut figures = Figures::default();
        self.board.change(|now| figures = *now);
        let (total, overview) = match &self.last {
            Some(report) if report.total.cpu_ns > figures.total.cpu_ns => (report.total, report.overview),
            _ => (figures.total, figures.overview),
        };
        let earlier = self.earlier.and(total, overview);
        self.in_the_way.lock().unwrap_or_else(PoisonError::into_inner).came(id);
        match Line::start(&self.job, &self.board, earlier, &self.in_the_way, false) {
            Ok(line) => {
                let left = std::mem::replace(&mut self.line, line);
                left.shared.whereabouts.stop();
                let _ = left.commands.send(Command::Wake);
                self.behind.push((id, left.shared));
                self.earlier = earlier;
                self.rushing = None;
                let what = "its memory is locked (it may wait for a disk or a server itself), and the others are searched without it";
                let over = |ticket| Said::Rushed { ticket, rushed: Rushed::default() };
                let mut said = vec![Said::Trouble(format!("{name}: {what}"))];
                said.extend(std::mem::take(&mut self.rushes).into_iter().map(over));
                said
            }
            Err(failure) => {
                self.again_ns = now_ns() + AGAIN_NS;
                self.in_the_way.lock().unwrap_or_else(PoisonError::into_inner).forget(id);
                let what = "its memory is locked, and no process is searched meanwhile";
                vec![Said::Trouble(format!("{name}: {what}: {failure}"))]
            }
        }
    }

    /// Searches the processes of `group` past the budget, before all others if tasks wait for it; [`Said::Rushing`] and
    /// [`Said::Rushed`] follow with the same `ticket`.
    pub fn rush(&mut self, ticket: u64, group: &str, urgent: bool) {
        self.rushes.insert(ticket);
        self.tell(Command::Rush(Rush { ticket, group: group.to_owned(), urgent }));
    }

    /// Tasks wait for that rush now. [`Said::Rushing`] follows once more.
    pub fn hurry(&self, ticket: u64) {
        self.tell(Command::Hurry { ticket });
    }

    /// Nobody waits for that rush any more, and nothing is said of it.
    pub fn calm_down(&mut self, ticket: u64) {
        self.over(ticket);
        self.tell(Command::CalmDown { ticket });
    }

    fn over(&mut self, ticket: u64) {
        self.rushes.remove(&ticket);
        self.rushing = self.rushing.filter(|(of, _)| *of != ticket);
    }

    /// From now on, this is the job.
    pub fn change(&mut self, job: Job) {
        self.job = job.clone();
        self.tell(Command::Change(Box::new(job)));
    }

    /// Ends it and returns its last report, unless it waits for something longer than `patience`: it then goes with the process.
    pub fn end(self, patience: Duration) -> Option<Box<Report>> {
        self.line.shared.whereabouts.stop();
        self.tell(Command::Wake);
        let until = now_ns() + patience.as_nanos() as u64;
        loop {
            let left = Duration::from_nanos(until.saturating_sub(now_ns()));
            match self.line.said.recv_timeout(left) {
                Ok(Said::Ended(report)) => return Some(report),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn tell(&self, command: Command) {
        // If it has ended, it has said why.
        let _ = self.line.commands.send(command);
    }
}

impl Line {
    /// The `first` one of a watch finds out whether it makes sense at all.
    fn start(
        job: &Job,
        board: &Board,
        earlier: Earlier,
        in_the_way: &Arc<Mutex<InTheWay>>,
        first: bool,
    ) -> Result<Line, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::Failed(format!("the thread that searches: {error}"));
        let event =
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(|error| failed(&error))?;
        let shared = Arc::new(Shared { over: AtomicBool::new(false), whereabouts: Whereabouts::default(), event });
        let (commands, heard) = channel();
        let (saying, said) = channel();
        let session = Session::new(job.clone(), shared.whereabouts.clone(), in_the_way.clone(), earlier);
        let thread = Thread {
            session,
            commands: heard,
            said: saying,
            shared: shared.clone(),
            rushes: Rushes::default(),
            board: board.clone(),
            first,
        };
        let (parted, has_parted) = channel::<()>();
        let builder = std::thread::Builder::new().name("trim".into());
        let run = move || {
            let event = thread.shared.event.as_fd().as_raw_fd();
            // Refused by the filters of containers, where it goes on with the process's table.
            let mut parted = Some(parted);
            if keep_descriptor(event, || drop(parted.take())).is_err() {
                let _ = nix::sched::unshare(CloneFlags::CLONE_FILES);
            }
            drop(parted);
            thread.run();
        };
        builder.spawn(run).map_err(|error| failed(&error))?;
        // What is opened from here on is not the thread's: this ends when the other side is dropped.
        let _ = has_parted.recv();
        Ok(Line { commands, said, shared })
    }
}

/// How things stood when a rush began.
struct Before {
    members: BTreeSet<Id>,
    begin_ns: u64,
    split_ns: u64,
    gone_bytes: u64,
}

struct Thread {
    session: Session,
    commands: Receiver<Command>,
    said: Sender<Said>,
    shared: Arc<Shared>,
    rushes: Rushes,
    /// Where it writes down its figures.
    board: Board,
    first: bool,
}

impl Thread {
    fn say(&self, said: Said) {
        let _ = self.said.send(said);
        let _ = self.shared.event.write(1);
    }

    fn run(mut self) {
        if let Err(failure) = self.watch() {
            self.say(Said::Failed(failure));
        }
        self.say(Said::Ended(Box::new(self.session.report())));
        self.shared.over.store(true, Ordering::Relaxed);
    }

    fn interval(&self) -> Duration {
        self.session.job().options.interval
    }

    /// Finds the processes that are meant. Returns when that is to be done again.
    fn refresh(&mut self) -> u64 {
        let (cost, trouble) = self.session.refresh();
        if let Some(failure) = trouble {
            self.say(Said::Trouble(failure.to_string()));
        }
        let share = self.session.job().options.cpu.unwrap_or(1.0);
        now_ns() + self.interval().max(cost.div_f64(REFRESH * share)).as_nanos() as u64
    }

    fn watch(&mut self) -> Result<(), Failure> {
        match self.session.refresh().1 {
            Some(failure) if self.first && self.session.fleet.members().next().is_none() => return Err(failure),
            Some(failure) => self.say(Said::Trouble(failure.to_string())),
            None => {}
        }
        if self.first {
            self.session.check()?;
        }
        self.say(Said::Begun);
        let mut before: Option<Before> = None;
        let mut next_report = now_ns() + self.interval().as_nanos() as u64;
        let mut next_refresh = next_report;
        let mut next_figures = 0;
        let mut pause = Duration::ZERO;
        loop {
            // Perhaps it was left behind meanwhile: what it has to say is of no interest then.
            if self.shared.whereabouts.stopped() {
                return Ok(());
            }
            if now_ns() >= next_figures {
                next_figures = now_ns() + FIGURES_NS;
                self.write_down();
            }
            let next = next_refresh.min(next_report).min(if self.session.job().metrics.is_some() {
                next_figures
            } else {
                u64::MAX
            });
            let wait = if self.rushes.is_empty() {
                pause.min(Duration::from_nanos(next.saturating_sub(now_ns())))
            } else {
                Duration::ZERO
            };
            let mut command = self.commands.recv_timeout(wait).ok();
            while let Some(now) = command {
                match now {
                    Command::Rush(rush) => self.rushes.ask(rush),
                    Command::Hurry { ticket } => {
                        if self.rushes.hurry(ticket) {
                            self.say(Said::Rushing { ticket });
                        }
                    }
                    Command::CalmDown { ticket } => {
                        if self.rushes.calm_down(ticket) {
                            self.session.fleet.calm_down();
                        }
                    }
                    Command::Change(job) => {
                        self.session.change(*job);
                        (next_refresh, next_report) = (0, now_ns() + self.interval().as_nanos() as u64);
                    }
                    Command::Wake => {}
                }
                command = self.commands.try_recv().ok();
            }
            if self.shared.whereabouts.stopped() {
                return Ok(());
            }
            // All that this process does counts for the budget, but what it answers scrapers with.
            self.session.charge_all_but(self.board.scraped_ns());
            if let Some(begin) = self.rushes.turn() {
                if begin.in_place_of.is_some() {
                    self.session.fleet.calm_down();
                }
                before = Some(self.begin(begin.rush));
            }
            pause = self.work();
            if !self.session.fleet.rushing()
                && let Some((ticket, before)) = self.rushes.over().zip(before.take())
            {
                self.say(Said::Rushed { ticket, rushed: self.came_since(&before) });
            }
            if now_ns() >= next_refresh {
                next_refresh = self.refresh();
                let nobody = self.session.fleet.members().next().is_none() && !self.session.waits();
                if self.session.job().selection.only_numbers() && nobody {
                    self.say(Said::Over);
                }
            }
            if now_ns() >= next_report {
                next_report = now_ns() + self.interval().as_nanos() as u64;
                self.say(Said::Interval(Box::new(self.session.report())));
            }
        }
    }

    /// Renews the figures.
    fn write_down(&mut self) {
        if self.session.job().metrics.is_none() {
            return;
        }
        let (overview, total, cpu) = (self.session.overview(), self.session.total(), self.session.job().options.cpu);
        self.board.change(|figures| (figures.overview, figures.total, figures.cpu) = (overview, total, cpu));
    }

    /// Works for a slice at most. Returns how long there is nothing to do.
    fn work(&mut self) -> Duration {
        let until = now_ns() + SLICE_NS;
        while now_ns() < until && !self.shared.whereabouts.stopped() {
            match self.session.fleet.turn(&Kernel) {
                Turn::Worked => {}
                Turn::Spent(wait) | Turn::Idle(wait) => return wait,
            }
        }
        Duration::ZERO
    }

    fn begin(&mut self, rush: Rush) -> Before {
        let begin_ns = thread_cpu_ns();
        self.say(Said::Rushing { ticket: rush.ticket });
        // Since it was asked for, the group may have been taken out of the settings.
        let is_meant = self.session.job().selection.groups().contains(&rush.group);
        // What was started since the last time is what needs the memory.
        let members = if is_meant { self.session.refresh_group(&rush.group) } else { Ok(BTreeSet::new()) };
        let members = members.unwrap_or_else(|failure| {
            self.say(Said::Trouble(failure.to_string()));
            BTreeSet::new()
        });
        let gone_bytes = self.session.fleet.gone_of(|id| members.contains(&id));
        self.session.fleet.rush(|id| members.contains(&id));
        Before { begin_ns, split_ns: self.session.total().split_ns, gone_bytes, members }
    }

    fn came_since(&self, before: &Before) -> Rushed {
        let gone = self.session.fleet.gone_of(|id| before.members.contains(&id));
        Rushed {
            gone_bytes: gone.saturating_sub(before.gone_bytes),
            cpu_ns: thread_cpu_ns() - before.begin_ns,
            split_ns: self.session.total().split_ns - before.split_ns,
        }
    }
}
