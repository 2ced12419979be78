//! One group that is served: a turn is a look and, where the plan says so, a write.

use super::group_files::{Files, Signal};
use super::group_plan::{Look, Pause, Plan, limit_of_held};
use super::groups::{GroupEvent, Listener};
use crate::group::Group;
use crate::sys::Errno;
use crate::sys::clock::now_ns;
use crate::sys::interrupt::Interrupter;
use std::time::Duration;

/// Nothing is said of what is over sooner.
const TELL_AFTER: Duration = Duration::from_millis(100);

/// A group that could not be looked at for want of something else is looked at again after so long.
const AGAIN: Duration = Duration::from_secs(5);

/// A group that is served.
pub(super) struct Member {
    pub group: Group,
    pub signal: Signal,
    plan: Plan,
    files: Option<Files>,
    reclaimed: u64,
    busy_ns: u64,
    /// Of the last look.
    stalls: Option<u64>,
    episode: Option<Episode>,
    /// What it adds to the standing.
    pub ahead: u64,
}

#[derive(Clone, Copy)]
struct Episode {
    since_ns: u64,
    reclaimed: u64,
    stalls: u64,
    /// That it has begun was said.
    told: bool,
}

/// What came of a turn.
pub(super) struct Turn {
    pub next: Next,
    /// Bytes.
    pub reclaimed: u64,
    pub wrote: bool,
    /// An episode has begun.
    pub begun: bool,
    pub stalls: u64,
    /// Why it is left alone for a while, from now on.
    pub paused: Option<Pause>,
    pub ahead: u64,
    pub was_awake: bool,
    pub awake: bool,
    /// It is left alone for a while.
    pub left_alone: bool,
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// A turn at that time or, if `listen` says so, when the kernel says something.
    Step { next_ns: Option<u64>, listen: bool },
    /// Nothing: it is not there any more.
    Gone,
}

impl Member {
    /// Nothing is known of it yet. At most `most` of its limit is to be free.
    pub fn new(group: Group, signal: Signal, most: f64) -> Member {
        Member {
            group,
            signal,
            plan: Plan::new(most),
            files: None,
            reclaimed: 0,
            busy_ns: 0,
            stalls: None,
            episode: None,
            ahead: 0,
        }
    }

    /// Whether it is looked at.
    pub fn awake(&self) -> bool {
        self.plan.awake()
    }

    /// A turn: a look, and a write if that is to be done. A group that is held may have no more than its `share`, whatever its limit is.
    pub fn turn(
        &mut self,
        heard: bool,
        most: f64,
        share: Option<u64>,
        interrupter: Option<&Interrupter>,
        tell: &Listener,
    ) -> Turn {
        let mut turn = Turn {
            next: Next::Gone,
            reclaimed: 0,
            wrote: false,
            begun: false,
            stalls: 0,
            paused: None,
            ahead: 0,
            was_awake: self.plan.awake(),
            awake: false,
            left_alone: false,
        };
        self.plan.change(most);
        if heard {
            self.plan.woken(now_ns());
        }
        let held_to = share.map(|share| limit_of_held(share, most));
        if let Err(error) = self.try_turn(&mut turn, held_to, interrupter, tell) {
            self.plan.stop();
            turn.next = match error {
                // What is missing for a moment says nothing of the group.
                Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EINTR) => {
                    Next::Step { next_ns: Some(now_ns() + AGAIN.as_nanos() as u64), listen: true }
                }
                // It has gone, has lost its limit, or does not let itself be reclaimed.
                _ => Next::Gone,
            };
            (turn.ahead, turn.awake) = (0, false);
            self.end(None, tell);
        }
        turn
    }

    fn try_turn(
        &mut self,
        turn: &mut Turn,
        held_to: Option<u64>,
        interrupter: Option<&Interrupter>,
        tell: &Listener,
    ) -> Result<(), Errno> {
        self.signal.clear();
        let files = match &mut self.files {
            Some(files) => files,
            none => none.insert(Files::open(&self.group, &self.signal)?),
        };
        let found = files.look()?;
        let at_ns = now_ns();
        turn.stalls = self.stalls.replace(found.stalls).map_or(0, |before| found.stalls.saturating_sub(before));
        let limit = found.limit.into_iter().chain(held_to).min().ok_or(Errno(libc::ENODEV))?;
        let look = Look {
            at_ns,
            limit,
            held: held_to == Some(limit),
            usage: found.usage,
            reclaimed: self.reclaimed,
            stalls: found.stalls,
            busy_ns: self.busy_ns,
        };
        let detail = if self.plan.wants_detail(at_ns) { Some(files.detail()?) } else { None };
        let before = self.plan.paused();
        let mut step = self.plan.note(look, detail);
        if step.reclaim > 0 {
            if self.episode.is_none() {
                self.episode =
                    Some(Episode { since_ns: at_ns, reclaimed: self.reclaimed, stalls: found.stalls, told: false });
                turn.begun = true;
            }
            turn.wrote = true;
            let outcome = files.reclaim(step.reclaim, interrupter)?;
            let now = now_ns();
            self.busy_ns += now - at_ns;
            self.reclaimed += outcome.reclaimed;
            turn.reclaimed = outcome.reclaimed;
            self.plan.written(now, outcome.enough);
            let (demand, ahead) = (self.plan.demand(), self.plan.target());
            // Not before it is known how much is taken.
            if let Some(episode) = &mut self.episode
                && !episode.told
                && at_ns - episode.since_ns >= TELL_AFTER.as_nanos() as u64
            {
                episode.told = true;
                // Of one that is held, that was said.
                if held_to != Some(limit) {
                    tell(GroupEvent::Begun { group: self.group.path().to_owned(), demand, ahead });
                }
            }
            // Others may be due by now. What is to be done next, a look says.
            step.next_ns = Some(now);
        }
        let pause = self.plan.paused();
        turn.paused = pause.filter(|_| before != pause);
        turn.next = Next::Step { next_ns: step.next_ns, listen: step.listen };
        turn.ahead = self.plan.target();
        turn.awake = self.plan.awake();
        turn.left_alone = pause.is_some();
        if !turn.awake {
            self.end(pause, tell);
        }
        Ok(())
    }

    /// It is looked at no longer.
    fn end(&mut self, pause: Option<Pause>, tell: &Listener) {
        self.files = None;
        let stalls = self.stalls.take().unwrap_or(0);
        if let Some(episode) = self.episode.take().filter(|episode| episode.told) {
            tell(GroupEvent::Ended {
                group: self.group.path().to_owned(),
                lasted: Duration::from_nanos(now_ns() - episode.since_ns),
                reclaimed: self.reclaimed - episode.reclaimed,
                stalls: stalls.saturating_sub(episode.stalls),
                pause,
            });
        }
    }
}
