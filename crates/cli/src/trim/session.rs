//! The processes that are trimmed, and those that can't be.

use super::Job;
use super::in_the_way::InTheWay;
use super::noted::{Noted, Whereabouts};
use super::select::Found;
use crate::failure::Failure;
use pagecrew::sys::{Errno, clock};
use pagecrew::trim::protect::{self, Protected};
use pagecrew::trim::{Fleet, Id, Kernel, Options, Other, Overview, Tally, Target, TargetError};
use rustix::process::{Resource, getrlimit};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why nothing is done with a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// It wants to be left alone.
    Protected,
    /// It has a name that is to be left alone.
    Never,
    /// A thread has waited for its memory for long, or for that of others of its user's.
    InTheWay,
    /// It can't be trimmed.
    Target(TargetError),
}

impl Refused {
    /// The reason, for people and programs.
    pub fn reason(&self) -> String {
        match self {
            Refused::Protected => "the process itself has asked to be left alone".into(),
            Refused::Never => "its name is one of those to leave alone".into(),
            Refused::InTheWay => "its memory, or that of others of its user's, was locked for long (they may wait for a disk or a server): left alone for a while".into(),
            Refused::Target(error) => error.to_string(),
        }
    }
}

/// How it stands.
#[derive(Clone)]
pub struct Report {
    pub overview: Overview,
    pub options: Options,
    /// What came of each process, the most gain first.
    pub rows: Vec<Row>,
    /// The sums, those included that have ended.
    pub total: Tally,
}

/// One process of a report.
#[derive(Clone)]
pub struct Row {
    pub pid: i32,
    pub name: String,
    pub tally: Tally,
    pub ended: bool,
    pub error: Option<String>,
}

/// What a process wants left alone. Its user may have the directory locked in which that is said.
fn protected(id: Id, whereabouts: &Whereabouts) -> Protected {
    whereabouts.while_at(id, || protect::of(id.pid, id.start_ticks))
}

/// All there is to know between the first look and the last.
pub struct Session {
    pub fleet: Fleet<Noted>,
    job: Job,
    whereabouts: Whereabouts,
    in_the_way: Arc<Mutex<InTheWay>>,
    /// What sessions before this one have done.
    earlier: Earlier,
    names: BTreeMap<Id, String>,
    refused: BTreeMap<Id, Refused>,
}

/// What was done before a session, by others in its place.
#[derive(Debug, Clone, Copy)]
pub struct Earlier {
    begin: Instant,
    /// CPU time of this process before the first one.
    before_ns: u64,
    total: Tally,
    budget_cpu_ns: u64,
}

impl Earlier {
    /// Nothing.
    pub fn nothing() -> Earlier {
        Earlier { begin: Instant::now(), before_ns: clock::process_cpu_ns(), total: Tally::default(), budget_cpu_ns: 0 }
    }

    /// All that was known of the one that is left behind, which began with this.
    pub fn and(self, total: Tally, overview: Overview) -> Earlier {
        Earlier { total: total.of_former(), budget_cpu_ns: overview.budget_cpu_ns, ..self }
    }
}

impl Session {
    /// For a thread whose `whereabouts` others can read. Those `in_the_way` are left alone.
    pub fn new(job: Job, whereabouts: Whereabouts, in_the_way: Arc<Mutex<InTheWay>>, earlier: Earlier) -> Session {
        let mut fleet = Fleet::new(job.options.clone(), &Kernel);
        fleet.go_on_after(earlier.budget_cpu_ns, &Kernel);
        Session { fleet, job, whereabouts, in_the_way, earlier, names: BTreeMap::new(), refused: BTreeMap::new() }
    }

    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Finds the processes that are meant: takes in the new ones and lets those go that have ended. Returns the CPU time that it took, and
    /// what was in the way of finding all of them.
    pub fn refresh(&mut self) -> (Duration, Option<Failure>) {
        let before = clock::thread_cpu_ns();
        let (found, trouble) = self.job.selection.processes();
        let ids: BTreeSet<Id> = found.iter().map(|found| found.id).collect();
        self.refused.retain(|id, _| ids.contains(id));
        let (refused, whereabouts) = (&mut self.refused, &self.whereabouts);
        self.fleet.retain(|id, member| {
            if whereabouts.stopped() {
                return true;
            }
            let protected = protected(id, whereabouts);
            if protected == Protected::All {
                refused.insert(id, Refused::Protected);
                return false;
            }
            member.trimmer_mut().exclude(exclusions(protected));
            ids.contains(&id) && !member.ended() && member.trimmer().target().alive()
        });
        self.take_in(found);
        self.names.retain(|id, _| ids.contains(id));
        let spent = clock::thread_cpu_ns() - before;
        self.fleet.charge(spent, &Kernel);
        (Duration::from_nanos(spent), trouble)
    }

    /// Takes in those of the control group `name` that are new, and returns all that are in it now.
    pub fn refresh_group(&mut self, name: &str) -> Result<BTreeSet<Id>, Failure> {
        let before = clock::thread_cpu_ns();
        let found = self.job.selection.processes_in(name)?;
        let ids: BTreeSet<Id> = found.iter().map(|found| found.id).collect();
        // Those that run another program by now are taken in as that.
        self.fleet.retain(|id, member| !ids.contains(&id) || member.trimmer().target().alive());
        self.take_in(found);
        self.fleet.charge(clock::thread_cpu_ns() - before, &Kernel);
        Ok(ids)
    }

    /// Charges all the CPU time that this process has used since the first session began, on whichever of its threads, but `asked_ns`.
    pub fn charge_all_but(&mut self, asked_ns: u64) {
        let used_ns = clock::process_cpu_ns().saturating_sub(self.earlier.before_ns);
        self.fleet.charge_up_to(used_ns.saturating_sub(asked_ns), &Kernel);
    }

    /// From now on, this is the job. Which processes belong to it is found by the next [`refresh`](Session::refresh).
    pub fn change(&mut self, job: Job) {
        if self.job.options != job.options {
            self.fleet.reconfigure(job.options.clone(), &Kernel);
        }
        // Who was refused may be meant otherwise now.
        self.refused.clear();
        self.job = job;
    }

    fn take_in(&mut self, found: Vec<Found>) {
        let open_files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let mut room = Other::room(self.fleet.members().count() as u64, open_files);
        for found in found {
            if self.whereabouts.stopped() {
                return;
            }
            if self.fleet.has(found.id) {
                continue;
            }
            let admitted = if room == 0 {
                Err(Refused::Target(TargetError::Kernel(found.id.pid, Errno(libc::EMFILE))))
            } else {
                self.admit(&found)
            };
            match admitted {
                Ok(()) => {
                    room -= 1;
                    self.refused.remove(&found.id);
                }
                Err(Refused::Target(TargetError::Ended(_))) => continue,
                Err(reason) => {
                    self.refused.insert(found.id, reason);
                }
            }
            self.names.insert(found.id, found.name);
        }
    }

    fn admit(&mut self, found: &Found) -> Result<(), Refused> {
        if found.never {
            return Err(Refused::Never);
        }
        let mut in_the_way = self.in_the_way.lock().unwrap_or_else(PoisonError::into_inner);
        if in_the_way.leaves_alone(found.id, found.user, clock::now_ns()) {
            return Err(Refused::InTheWay);
        }
        drop(in_the_way);
        let protected = protected(found.id, &self.whereabouts);
        if protected == Protected::All {
            return Err(Refused::Protected);
        }
        let noted = Noted::open(found.id, self.job.options.dry_run, &self.whereabouts).map_err(Refused::Target)?;
        // Between the two it may have ended and its number be another's, or it may run a program that is to be left alone.
        if !found.stands() {
            return Err(Refused::Target(TargetError::Ended(found.id.pid)));
        }
        self.fleet.admit(found.id, noted, found.anonymous).trimmer_mut().exclude(exclusions(protected));
        Ok(())
    }

    /// Says what is wrong if there is no process that can be trimmed, or if one is missing that was asked for by its number.
    pub fn check(&self) -> Result<(), Failure> {
        let known = |pid: &i32| self.names.keys().any(|id| id.pid == *pid);
        if let Some(missing) = self.job.selection.pids().iter().find(|pid| !known(pid)) {
            let why = if *missing == std::process::id() as i32 { "is this very command" } else { "is not there" };
            return Err(Failure::Failed(format!("process {missing} {why}")));
        }
        let explicit = |id: &Id| self.job.selection.pids().contains(&id.pid);
        let failed = |refused: &Refused| match refused {
            Refused::Target(TargetError::Thread(_) | TargetError::Kernel(..)) => true,
            Refused::Target(_) | Refused::Protected | Refused::Never | Refused::InTheWay => false,
        };
        if let Some((_, refused)) = self.refused.iter().find(|(id, refused)| explicit(id) && failed(refused)) {
            return Err(Failure::Failed(refused.reason()));
        }
        let rights =
            |refused: &&Refused| matches!(refused, Refused::Target(TargetError::Access(_) | TargetError::Advice(_)));
        let lacking = || self.refused.iter().filter(|(_, refused)| rights(refused));
        let asked_for = lacking().find(|(id, _)| explicit(id));
        let any = if self.fleet.members().next().is_none() { lacking().next() } else { None };
        match asked_for.or(any) {
            Some((_, refused)) => Err(Failure::Impossible(refused.reason())),
            None => Ok(()),
        }
    }

    /// Whether a process that is in the way may be trimmed later.
    pub fn waits(&self) -> bool {
        self.refused.values().any(|refused| *refused == Refused::InTheWay)
    }

    /// How it stands now.
    pub fn report(&self) -> Report {
        let (overview, options) = (self.overview(), self.job.options.clone());
        Report { overview, options, rows: self.rows(), total: self.total() }
    }

    fn rows(&self) -> Vec<Row> {
        let name = |id: &Id| self.names.get(id).cloned().unwrap_or_default();
        let mut rows: Vec<Row> = self
            .fleet
            .members()
            .map(|(id, member)| Row {
                pid: id.pid,
                name: name(&id),
                tally: *member.trimmer().tally(),
                ended: member.ended(),
                error: match (member.error(), member.trimmer().fruitless()) {
                    (Some(error), _) => Some(TargetError::Kernel(id.pid, error).to_string()),
                    (None, true) => Some("the kernel splits its huge pages and gives nothing back".into()),
                    (None, false) => None,
                },
            })
            .collect();
        rows.extend(self.refused.iter().map(|(id, refused)| Row {
            pid: id.pid,
            name: name(id),
            tally: Tally::default(),
            ended: false,
            error: Some(refused.reason()),
        }));
        rows.sort_by_key(|row| {
            std::cmp::Reverse((row.tally.gone_bytes, row.tally.could_go_bytes, row.tally.huge_pages))
        });
        rows
    }

    /// The sums, those included that have ended.
    pub fn total(&self) -> Tally {
        let mut total = self.earlier.total;
        total += self.fleet.total();
        total
    }

    /// The command and its processes as a whole.
    pub fn overview(&self) -> Overview {
        Overview {
            elapsed_ns: self.earlier.begin.elapsed().as_nanos() as u64,
            members: self.fleet.members().count() as u64,
            refused: self.refused.len() as u64,
            due: self.fleet.due() as u64,
            budget_cpu_ns: self.fleet.charged_ns(),
        }
    }
}

fn exclusions(protected: Protected) -> Vec<pagecrew::trim::Exclusion> {
    match protected {
        Protected::Some(exclusions) => exclusions,
        Protected::Nothing | Protected::All => Vec::new(),
    }
}
