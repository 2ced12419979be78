//! Holding a control group at its memory limit until something was given back, instead of having the kernel kill in it.

use super::Job;
use super::session::Session;
use crate::failure::Failure;
use crate::output::note;
use crate::signals::SignalSet;
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use pagecrew::sys::memcg::HoldError;
use pagecrew::trim::{Backoff, Holder, Holds, Kernel, Standing, Turn};
use std::time::Duration;

/// Between two looks at a group, and while it was near its limit lately: cgroup v2 doesn't signal that.
const SLICE: Duration = Duration::from_millis(100);
const CLOSE_SLICE: Duration = Duration::from_millis(10);
const ALERT: Duration = Duration::from_secs(1);
/// Looks take at most this share of the budget: the kernel may signal a group full of page cache a hundred times a second.
const LOOKS: f64 = 0.25;
/// Longest time between two looks: the kernel doesn't have a task of cgroup v2 sleep longer than that at a time either.
const REST_MOST: Duration = Duration::from_secs(2);
/// Near the limit, exceed the budget only while a quarter of the time goes into splits; otherwise back off exponentially, until this
/// share of the budget pays for the attempts.
const WORTHWHILE: u64 = 4;
const ATTEMPTS: f64 = 0.5;
const NEAR_FIRST: Duration = Duration::from_millis(10);
const NEAR_MOST: Duration = Duration::from_secs(1);
/// How often a held group is searched in vain before it is let go, and how long between: something may be at its pages for a moment.
const IN_VAIN: usize = 3;
const BETWEEN: Duration = Duration::from_millis(20);
/// A group that was let go is left to the kernel for so long.
const LET_GO_FIRST: Duration = Duration::from_secs(2);
const LET_GO_MOST: Duration = Duration::from_secs(64);

/// Waits between two rounds of a watch, and sees to the group meanwhile if there is one to hold.
pub struct Waiter {
    holder: Option<Holder>,
    near: Backoff,
    held: Backoff,
    /// Until this time the group has been near its limit lately.
    alert_ns: u64,
    /// When the last look was, and before when there is none, by what it has cost.
    looked_ns: u64,
    rest_ns: u64,
    /// Whether holding changes the group; somebody may take that over.
    may_change: bool,
    /// How often it has come to what.
    holds: Holds,
}

impl Waiter {
    /// Holds the group of `job`, if it has one and is to change anything.
    pub fn new(job: &Job, wanted: bool) -> Result<Waiter, Failure> {
        let group = job.selection.group().filter(|_| wanted && !job.options.dry_run);
        let holder = match group.map(|group| (group, group.processes())) {
            Some((group, Ok(pids))) if pids.contains(&(std::process::id() as i32)) => {
                note(&format!(
                    "{}: this command is in the group itself, so it can't hold it at its limit",
                    group.path().display()
                ));
                None
            }
            Some((group, _)) => match Holder::new(group) {
                Ok(holder) => Some(holder),
                // Nothing to be held at.
                Err(HoldError::NoLimit(_)) => None,
                Err(error) => return Err(Failure::Impossible(format!("{error} (or: --no-hold)"))),
            },
            None => None,
        };
        Ok(Waiter {
            may_change: holder.as_ref().is_some_and(Holder::may_change),
            holder,
            near: Backoff::new(NEAR_FIRST, NEAR_MOST),
            held: Backoff::new(LET_GO_FIRST, LET_GO_MOST),
            alert_ns: 0,
            looked_ns: 0,
            rest_ns: 0,
            holds: Holds::default(),
        })
    }

    /// What came of holding the group so far.
    pub fn holds(&self) -> Holds {
        let holding = self.holder.as_ref().is_some_and(Holder::holding);
        Holds { holding: holding.into(), ..self.holds }
    }

    /// Waits for `pause`, or until one of `signals` has come: returns whether it has.
    pub fn wait(&mut self, pause: Duration, session: &mut Session, signals: &SignalSet) -> bool {
        if self.holder.is_none() {
            return signals.wait_for(pause).is_some();
        }
        let until = now_ns() + pause.as_nanos() as u64;
        loop {
            let rest = self.rest_ns.min(until).saturating_sub(now_ns());
            if signals.wait_for(Duration::from_nanos(rest)).is_some() {
                return true;
            }
            if now_ns() >= self.rest_ns {
                let standing = self.look(until, session);
                self.see_to(standing, session);
            }
            if now_ns() >= until {
                return false;
            }
        }
    }

    /// How the group stands once its files have something to tell, or when it is time for a look, at `until` at the latest.
    fn look(&mut self, until: u64, session: &mut Session) -> Standing {
        let Some(holder) = &mut self.holder else { return Standing::Quiet };
        let (now, begin_ns) = (now_ns(), thread_cpu_ns());
        let slice = if now < self.alert_ns { CLOSE_SLICE } else { SLICE };
        let next = (self.looked_ns + slice.as_nanos() as u64).min(until);
        holder.wait(Duration::from_nanos(next.saturating_sub(now)));
        let standing = holder.look();
        let spent_ns = thread_cpu_ns() - begin_ns;
        session.fleet.charge(spent_ns, &Kernel);
        self.looked_ns = now_ns();
        let rest = paid(spent_ns, LOOKS, session).min(REST_MOST);
        self.rest_ns = self.looked_ns + rest.as_nanos() as u64;
        standing
    }

    /// Looks again at once: what was found is no longer true.
    fn look_again(&mut self) {
        (self.looked_ns, self.rest_ns) = (0, 0);
        self.alert_ns = now_ns() + ALERT.as_nanos() as u64;
    }

    /// Does what is to be done about a group that stands like this.
    fn see_to(&mut self, standing: Standing, session: &mut Session) {
        let Some(holder) = &mut self.holder else { return };
        if self.may_change && !holder.may_change() {
            self.may_change = false;
            note(
                "somebody else has changed the group's memory.high: it stays like that, and the group is not held any more",
            );
        }
        let now = now_ns();
        let ready = self.held.ready(now);
        // What fails here fails because the group has gone, and then there is nothing to hold.
        let _ = match standing {
            Standing::Held if ready => return self.relieve(session),
            // It came back to where nothing could be done.
            Standing::Held if holder.holding() => holder.let_go(),
            Standing::Near if ready && !holder.holding() => holder.again(),
            Standing::Quiet if !holder.holding() => holder.again(),
            _ => Ok(()),
        };
        if standing == Standing::Near && self.near.ready(now) {
            self.alert_ns = now + ALERT.as_nanos() as u64;
            let spent = squeeze(session);
            if WORTHWHILE * spent.split_ns >= spent.cpu_ns {
                self.near.worth_it();
                self.look_again();
            } else {
                self.near.in_vain(paid(spent.cpu_ns, ATTEMPTS, session), now_ns());
            }
        }
    }

    /// Tasks of the group wait until memory of it is free: gives back what there is, and where there is nothing, leaves it to the kernel.
    fn relieve(&mut self, session: &mut Session) {
        let Some(holder) = &mut self.holder else { return };
        self.holds.held += 1;
        let mut cpu_ns = 0;
        for attempt in 0..IN_VAIN {
            let spent = squeeze(session);
            cpu_ns += spent.cpu_ns;
            if spent.gone_bytes > 0 {
                self.held.worth_it();
                return self.look_again();
            }
            if holder.look() != Standing::Held {
                return self.look_again();
            }
            if attempt + 1 < IN_VAIN {
                std::thread::sleep(BETWEEN);
            }
        }
        if self.held.in_vain(paid(cpu_ns, ATTEMPTS, session), now_ns()) {
            note("the group is at its memory limit and there is nothing to give back: left to the kernel");
        }
        self.holds.let_go += 1;
        let _ = holder.let_go();
    }
}

/// The time after which a share of the budget has paid for so much CPU time.
fn paid(cpu_ns: u64, share: f64, session: &Session) -> Duration {
    Duration::from_nanos(cpu_ns).div_f64(share * session.job().options.cpu.unwrap_or(1.0))
}

/// What came of it, and what it cost.
struct Squeezed {
    gone_bytes: u64,
    cpu_ns: u64,
    split_ns: u64,
}

/// Looks at everything now, whatever the budget.
fn squeeze(session: &mut Session) -> Squeezed {
    let (before, begin_ns) = (session.total(), thread_cpu_ns());
    // What was started since the last time is what needs the memory.
    if let Err(error) = session.refresh() {
        note(&error.to_string());
    }
    session.fleet.hurry();
    while session.fleet.turn(&Kernel) == Turn::Worked {}
    let after = session.total();
    Squeezed {
        gone_bytes: after.gone_bytes - before.gone_bytes,
        cpu_ns: thread_cpu_ns() - begin_ns,
        split_ns: after.split_ns - before.split_ns,
    }
}
