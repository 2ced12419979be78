//! Holding a control group at its memory limit until something was given back, instead of having the kernel kill in it.

use super::Job;
use super::session::Session;
use crate::failure::Failure;
use crate::output::note;
use crate::signals::SignalSet;
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use pagecrew::sys::memcg::{Hold, HoldError, Wake};
use pagecrew::trim::{Kernel, Turn};
use std::time::Duration;

/// Between two looks for signals: while there is a group to hold, one waits for its files and not for them. A group that stays near its limit is
/// not signalled again, so for a while after that the looks are closer together.
const SLICE: Duration = Duration::from_millis(100);
const CLOSE_SLICE: Duration = Duration::from_millis(10);
const ALERT: Duration = Duration::from_secs(1);
/// A group that is only near its limit may cost more than the budget as long as a quarter of the CPU time goes into splits. Where it doesn't,
/// it is left for a pause that doubles each time, until the pauses are so long that the budget pays for what lies between them.
const WORTHWHILE: u64 = 4;
const PAUSE_NEAR: Duration = Duration::from_millis(10);
const PAUSE_NEAR_MOST: Duration = Duration::from_secs(1);
/// How often a held group is searched in vain before it is let go, and how long between: something may be at its pages for a moment.
const IN_VAIN: usize = 3;
const BETWEEN: Duration = Duration::from_millis(20);
/// After it was let go, the kernel has this long to make room its own way.
const LET_GO: Duration = Duration::from_secs(2);

/// Waits between two rounds of a watch, and sees to the group meanwhile if there is one to hold.
pub struct Waiter {
    hold: Option<Hold>,
    /// Not before this time is a group that is merely near its limit seen to again, and how long it is left after the next time in vain.
    near_ns: u64,
    pause: Duration,
    /// Until this time the group has been near its limit lately.
    alert_ns: u64,
}

impl Waiter {
    /// Holds the group of `job`, if it has one and is to change anything.
    pub fn new(job: &Job, wanted: bool) -> Result<Waiter, Failure> {
        let group = job.selection.group().filter(|_| wanted && !job.options.dry_run);
        let hold = match group.map(|group| (group, group.processes())) {
            Some((group, Ok(pids))) if pids.contains(&(std::process::id() as i32)) => {
                note(&format!(
                    "{}: this command is in the group itself, so it can't hold it at its limit",
                    group.path().display()
                ));
                None
            }
            Some((group, _)) => match group.hold() {
                Ok(hold) => Some(hold),
                // Nothing to be held at.
                Err(HoldError::NoLimit(_)) => None,
                Err(error) => return Err(Failure::Impossible(format!("{error} (or: --no-hold)"))),
            },
            None => None,
        };
        Ok(Waiter { hold, near_ns: 0, pause: PAUSE_NEAR, alert_ns: 0 })
    }

    /// Waits for `pause`, or until one of `signals` has come: returns whether it has.
    pub fn wait(&mut self, pause: Duration, session: &mut Session, signals: &SignalSet) -> bool {
        let Some(hold) = &mut self.hold else { return signals.wait_for(pause).is_some() };
        let until = now_ns() + pause.as_nanos() as u64;
        loop {
            if signals.wait_for(Duration::ZERO).is_some() {
                return true;
            }
            let now = now_ns();
            let left = Duration::from_nanos(until.saturating_sub(now));
            let slice = if now < self.alert_ns { CLOSE_SLICE } else { SLICE };
            let begin_ns = thread_cpu_ns();
            let wake = hold.wait(left.min(slice));
            session.fleet.charge(thread_cpu_ns() - begin_ns, &Kernel);
            if wake != Wake::Quiet && now >= self.near_ns {
                self.alert_ns = now + ALERT.as_nanos() as u64;
            }
            match wake {
                Wake::Held => relieve(hold, session),
                Wake::Near if now_ns() >= self.near_ns => {
                    let spent = squeeze(session);
                    if WORTHWHILE * spent.split_ns >= spent.cpu_ns {
                        self.pause = PAUSE_NEAR;
                        continue;
                    }
                    let share = session.job().options.cpu.unwrap_or(1.0);
                    let paid = Duration::from_nanos(spent.cpu_ns).div_f64(share);
                    self.near_ns = now_ns() + self.pause.as_nanos() as u64;
                    self.pause = (2 * self.pause).min(paid.max(PAUSE_NEAR_MOST));
                }
                Wake::Near | Wake::Quiet => {}
            }
            if now_ns() >= until {
                return false;
            }
        }
    }
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

/// Tasks of the group sleep until memory of it is free: gives back what there is, and where there is nothing, leaves it to the kernel.
fn relieve(hold: &mut Hold, session: &mut Session) {
    for attempt in 0..IN_VAIN {
        if squeeze(session).gone_bytes > 0 || !hold.held() {
            return;
        }
        if attempt + 1 < IN_VAIN {
            std::thread::sleep(BETWEEN);
        }
    }
    note("the group is at its memory limit and there is nothing to give back: left to the kernel");
    // Where the group has gone, there is nothing to hold.
    let _ = hold.let_go();
    std::thread::sleep(LET_GO);
    let _ = hold.again();
}
