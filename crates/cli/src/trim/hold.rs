//! Holding control groups at their memory limits until something was given back, instead of having the kernel kill in them.

use super::Job;
use super::worker::Worker;
use crate::failure::Failure;
use crate::output::{Sparing, note};
use pagecrew::group::relief::{Rushed, Todo};
use pagecrew::group::{Group, HoldError, Holder, Holds, Relief, Standing};
use pagecrew::sys::Errno;
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use std::os::fd::RawFd;
use std::path::Path;

/// A group that is not held is looked for so often, or more rarely where that takes more than a thousandth of a CPU.
const RETRY_NS: u64 = 1_000_000_000;
const RETRY_COSTS: u64 = 1000;

/// The control groups of a job, as far as they are to be held.
#[derive(Default)]
pub struct Wards {
    wards: Vec<Ward>,
    tickets: u64,
    /// What it has come to, and how often.
    held: u64,
    let_go: u64,
}

/// A control group, which may come, go, and come back.
struct Ward {
    name: String,
    holder: Option<Holder>,
    relief: Relief,
    /// Whether holding changes the group, until somebody takes that over.
    may_change: bool,
    /// Somebody has.
    taken_over: bool,
    /// When it is looked for again, while it is not held.
    retry_ns: u64,
    /// Of the rush that goes on.
    ticket: Option<u64>,
    /// Why it is not held.
    said: Sparing,
}

impl Wards {
    /// Holds the groups of `job`, if it is to change anything.
    ///
    /// # Errors
    /// If the rights for that are missing for all of them. What may pass, such as another process that holds a group, is tried again.
    pub fn begin(&mut self, job: &Job) -> Result<(), Failure> {
        self.change(job);
        let is_final =
            |error: &HoldError| matches!(error, HoldError::Refused(_, Errno(libc::EACCES | libc::EPERM | libc::EROFS)));
        let results: Vec<_> = self.wards.iter_mut().map(Ward::renew).collect();
        if !results.is_empty() && results.iter().all(|result| result.as_ref().is_err_and(is_final)) {
            let refused = results.into_iter().find_map(Result::err).map(|error| format!("{error} (or: --no-hold)"));
            return Err(Failure::Impossible(refused.unwrap_or_default()));
        }
        for (ward, result) in self.wards.iter_mut().zip(results) {
            ward.say_why(result);
        }
        Ok(())
    }

    /// From now on, this is the job: groups that it does not have any more are let go, and those that somebody else has changed may be held again.
    pub fn change(&mut self, job: &Job) {
        let wanted = job.hold && !job.options.dry_run;
        let names = if wanted { job.selection.groups() } else { &[] };
        self.wards.retain(|ward| names.contains(&ward.name));
        for name in names {
            if !self.wards.iter().any(|ward| ward.name == *name) {
                self.wards.push(Ward::new(name));
            }
        }
        for ward in self.wards.iter_mut().filter(|ward| ward.taken_over) {
            ward.holder = None;
        }
        // Together they may not have more of the budget than one by itself.
        let share = job.options.cpu.unwrap_or(1.0) / self.wards.len().max(1) as f64;
        self.wards.iter_mut().for_each(|ward| ward.relief.set_share(share));
    }

    /// Holds groups that have come, or come back.
    pub fn renew(&mut self) {
        let now = now_ns();
        // Those that were just looked for in vain are looked for in their own time.
        for ward in self.wards.iter_mut().filter(|ward| ward.holder.is_some() || now >= ward.retry_ns) {
            let result = ward.renew();
            ward.say_why(result);
        }
    }

    /// What came of it so far.
    pub fn holds(&self) -> Holds {
        let holds = |ward: &&Ward| !ward.taken_over && ward.holder.as_ref().is_some_and(Holder::holding);
        let holding = self.wards.iter().filter(holds);
        Holds { holding: holding.count() as u64, held: self.held, let_go: self.let_go }
    }

    /// When to see to them again if nothing happens.
    pub fn next_turn_ns(&self) -> Option<u64> {
        let now = now_ns();
        let next = |ward: &Ward| if ward.holder.is_some() { ward.relief.next_turn_ns(now) } else { ward.retry_ns };
        self.wards.iter().map(next).min()
    }

    /// What may tell that one of them is to be looked at sooner.
    pub fn descriptors(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        let now = now_ns();
        let listening = self.wards.iter().filter(move |ward| ward.relief.listens(now));
        let holders = listening.filter_map(|ward| ward.holder.as_ref());
        let guards = self.wards.iter().filter_map(|ward| ward.holder.as_ref()?.guard_descriptor());
        holders.flat_map(Holder::descriptors).chain(guards.map(|guard| (guard, libc::POLLIN)))
    }

    /// Looks at those whose turn it is, or that have something to tell because one of their descriptors is `ready`, and does what is to be done
    /// about them.
    pub fn see_to(&mut self, ready: &[RawFd], worker: &mut Worker) {
        for ward in &mut self.wards {
            let (begin_ns, now) = (thread_cpu_ns(), now_ns());
            if ward.lost_its_guard(ready) {
                // If this process were killed now, the group would stay as it is.
                let result = ward.renew();
                ward.say_why(result);
            }
            let due = now >= ward.relief.next_look_ns() || (ward.relief.listens(now) && ward.tells(ready));
            let missing = ward.holder.is_none() && now >= ward.retry_ns;
            if missing || (due && ward.holder.as_ref().is_some_and(Holder::gone)) {
                // Perhaps there is a new one of its name, which needs to be held from its first moment on.
                let result = ward.renew();
                ward.say_why(result);
                let cpu_ns = thread_cpu_ns() - begin_ns;
                ward.retry_ns = now_ns() + RETRY_NS.max(cpu_ns * RETRY_COSTS);
                continue;
            }
            let Some(holder) = ward.holder.as_mut().filter(|_| due) else { continue };
            let standing = holder.look();
            let cpu_ns = thread_cpu_ns() - begin_ns;
            let todo = ward.relief.looked(standing, holder.holding(), cpu_ns, now_ns());
            self.held += u64::from(todo.rush && standing == Standing::Held);
            self.let_go += u64::from(todo.let_go);
            ward.does(todo, worker, &mut self.tickets);
        }
    }

    /// A rush has begun.
    pub fn rushing(&mut self, ticket: u64) {
        if let Some(ward) = self.wards.iter_mut().find(|ward| ward.ticket == Some(ticket)) {
            ward.relief.begun(now_ns());
        }
    }

    /// A rush has come to its end.
    pub fn rushed(&mut self, ticket: u64, rushed: Rushed, worker: &mut Worker) {
        let Some(ward) = self.wards.iter_mut().find(|ward| ward.ticket == Some(ticket)) else { return };
        ward.ticket = None;
        let standing = ward.holder.as_mut().map_or(Standing::Quiet, Holder::look);
        let todo = ward.relief.rushed(rushed, standing, now_ns());
        self.let_go += u64::from(todo.let_go);
        ward.does(todo, worker, &mut self.tickets);
    }
}

/// The group at `path` was held by a process that was killed together with its guard, and is not any more.
pub fn say_undone(path: &Path) {
    note(&format!("{}: was held by a process that was killed; that is undone", path.display()));
}

impl Ward {
    fn new(name: &str) -> Ward {
        Ward {
            name: name.to_owned(),
            holder: None,
            relief: Relief::new(1.0),
            may_change: false,
            taken_over: false,
            retry_ns: 0,
            ticket: None,
            said: Sparing::default(),
        }
    }

    /// Holds the group if it is not held: it may have come, be another one of the same name, or have lost its guard.
    fn renew(&mut self) -> Result<(), HoldError> {
        let same = self.holder.as_ref().is_some_and(|holder| !holder.gone());
        if same && self.holder.as_ref().is_some_and(Holder::guarded) {
            return Ok(());
        }
        self.holder = None;
        if !same {
            // Whatever is found under that name has nothing to do with the one before.
            self.ticket = None;
            self.relief.anew(now_ns());
        }
        let Ok(group) = Group::find(&self.name) else {
            self.said.note(&format!("{}: no such control group; it is looked for again", self.name));
            return Ok(());
        };
        // Nothing to be held at; and to ask who is in a large hierarchy takes long.
        if group.limit().is_none() {
            return Ok(());
        }
        if group.processes().is_ok_and(|pids| pids.contains(&(std::process::id() as i32))) {
            let path = group.path().display();
            self.said.note(&format!("{path}: this command is in the group itself, so it can't hold it at its limit"));
            return Ok(());
        }
        match Holder::new(&group) {
            Ok(holder) => {
                if holder.found_one_left() {
                    say_undone(group.path());
                }
                (self.may_change, self.taken_over) = (holder.may_change(), false);
                self.holder = Some(holder);
                Ok(())
            }
            // Nothing to be held at.
            Err(HoldError::NoLimit(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Says once why the group is not held.
    fn say_why(&mut self, result: Result<(), HoldError>) {
        if let Err(error) = result {
            self.said.note(&format!("{error}; it is tried again"));
        }
    }

    /// Whether one of the `ready` descriptors tells something about the group.
    fn tells(&self, ready: &[RawFd]) -> bool {
        self.holder.iter().flat_map(Holder::descriptors).any(|(descriptor, _)| ready.contains(&descriptor))
    }

    /// Whether it is said by the `ready` descriptors that the guard has ended.
    fn lost_its_guard(&self, ready: &[RawFd]) -> bool {
        let guard = self.holder.as_ref().and_then(Holder::guard_descriptor);
        guard.is_some_and(|guard| ready.contains(&guard))
    }

    fn does(&mut self, todo: Todo, worker: &mut Worker, tickets: &mut u64) {
        if todo.calm_down
            && let Some(ticket) = self.ticket.take()
        {
            worker.calm_down(ticket);
        }
        if todo.rush {
            *tickets += 1;
            self.ticket = Some(*tickets);
            worker.rush(*tickets, &self.name, self.relief.urgent());
        }
        if todo.hurry
            && let Some(ticket) = self.ticket
        {
            worker.hurry(ticket);
        }
        let Some(holder) = &mut self.holder else { return };
        // What fails here fails because the group has gone, and then there is nothing to hold.
        if todo.let_go {
            let _ = holder.let_go();
        }
        if todo.hold_again {
            let _ = holder.again();
        }
        if todo.given_up {
            self.said.note(&format!(
                "{}: at its memory limit, and there is nothing to give back: left to the kernel",
                self.name
            ));
        }
        if self.may_change && !holder.may_change() {
            (self.may_change, self.taken_over) = (false, true);
            note(&format!(
                "{}: somebody else has given it a memory.high: it stays like that, and the group is not held any more",
                self.name
            ));
        }
    }
}
