//! How much of one control group is reclaimed ahead of its demand, and when it is looked at: pure, time and counters come in as numbers.
//!
//! A kernel has no reclaim in the background for groups: at a group's limit, its tasks reclaim for themselves. So memory below the limit is
//! kept free while there is demand: *demand x lead time* ([`crate::control::lead`]), and no more than a share of the limit, since what is
//! free is page cache that the group does not have. Only page cache that was used once at most counts as reclaimable, half of it at a time:
//! the rest may be the working set.
//!
//! At rest nothing is looked at: the kernel says when tasks were at the limit, and that is when everything begins.

use crate::control::backoff::Backoff;
use crate::control::lead::{self, Bounds, Lead};
use crate::control::pressure::Pressure;
use std::time::Duration;

/// Of a smaller group, a share is less than what the kernel charges at once on a few CPUs.
pub const LIMIT_LEAST: u64 = 32 << 20;
/// If the share of a limit is less than this, up to so many shares are kept free.
const SMALL: f64 = (16 << 20) as f64;
const SMALL_SHARES: f64 = 2.5;
/// One write asks for so much at most: a group can't be removed meanwhile.
pub const WRITE_MOST: u64 = 16 << 20;
/// And for so much at least: the kernel reclaims no less at once.
const WRITE_LEAST: u64 = 32 * 4096;
/// A task at the limit reclaims about so much for itself (64 pages, what the kernel charges at once).
pub const AT_LIMIT: u64 = 64 * 4096;
/// What is to be free is not made free again before less than this share of it is: few writes do more than many.
const BEGIN: f64 = 0.75;
/// From the wake-up on, until it is known how much is taken.
const FIRST: Duration = Duration::from_micros(1500);
/// A group is looked at no more often than this.
const LOOK_LEAST: Duration = Duration::from_micros(200);
/// And, while demand begins and in general, no less often than these.
const BEGINNING: Duration = Duration::from_millis(200);
const SOON: Duration = Duration::from_millis(10);
const LATER: Duration = Duration::from_millis(100);
/// What takes long to find out is looked at this often.
const DETAIL: Duration = Duration::from_millis(100);
/// A group is at rest when it had no demand for so long; for less, where nothing had to be reclaimed.
const REST: Duration = Duration::from_secs(1);
const REST_IN_VAIN: Duration = Duration::from_millis(100);
/// Its demand declines slowly, which is no reason to look at it for longer than this after something was taken.
const QUIET: Duration = Duration::from_secs(5);
/// After wake-ups that led to nothing, the kernel is not listened to for so long: tasks are at the limit now and then, and need no help.
const DOZE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Memory that comes back was reclaimed too early. If it is more than this share of what was reclaimed, and more than a little, the group is
/// left alone for a while.
const RETURNED_SHARE: u64 = 20;
const RETURNED_LEAST: u64 = 1 << 20;
/// So it is where tasks wait for memory for so much of the time (percent) although none of them was at the limit: they wait for what comes
/// back.
const WAITING: u64 = 10;
const WAITING_WINDOW: Duration = Duration::from_millis(500);
const HURT: Duration = Duration::from_secs(30);
/// A group that has used up its CPU quota gets no CPU of others for so long.
const THROTTLED: Duration = Duration::from_secs(1);
/// Where the kernel has found nothing to reclaim.
const NOTHING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A group as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// When.
    pub at_ns: u64,
    /// The limit at which tasks have to reclaim.
    pub limit: u64,
    /// It is held to that, and the kernel knows nothing of it.
    pub held: bool,
    /// What is charged.
    pub usage: u64,
    /// Bytes that were reclaimed ahead so far.
    pub reclaimed: u64,
    /// How often tasks were at the limit so far.
    pub stalls: u64,
    /// Time that reclaim ahead has taken so far, in nanoseconds.
    pub busy_ns: u64,
}

/// What takes longer to find out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Detail {
    /// Page cache that was used once at most and need not be written first.
    pub spare: u64,
    /// Bytes that came back so far after they were reclaimed too early.
    pub returned: u64,
    /// Time that some task of the group has waited for memory so far, in microseconds. `None` where the kernel does not say.
    pub waited_us: Option<u64>,
    /// How often the group had used up its CPU quota so far.
    pub throttled: u64,
    /// So much of the group is protected from reclaim.
    pub protected: u64,
}

/// Why a group is left alone although there may be demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// What was reclaimed has come back, or tasks wait for what comes back.
    Hurts,
    /// There is nothing to reclaim but what is in use.
    Nothing,
    /// It has used up its CPU quota.
    Throttled,
    /// Its demand needs no help.
    Doze,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Bytes to reclaim now; then the group is looked at again at once.
    pub reclaim: u64,
    /// When to look again; `None`: when the kernel says that tasks were at the limit.
    pub next_ns: Option<u64>,
    /// Whether to look sooner if the kernel says so.
    pub listen: bool,
}

/// From a wake-up until the group is at rest again.
#[derive(Debug, Clone)]
struct Episode {
    since_ns: u64,
    /// When demand was last seen.
    busy_ns: u64,
    /// Whether something was reclaimed.
    reclaimed: bool,
    /// The last detail, and when it was found out.
    detail: Option<(Detail, Look)>,
    pressure: Pressure,
    /// How often tasks were at the limit when the span of the pressure began.
    stalls: u64,
    /// From one look to the next, while nothing is taken.
    pause: Duration,
}

/// The plan for one group.
#[derive(Debug, Clone)]
pub struct Plan {
    share: f64,
    protected: u64,
    law: Option<(Lead, Look)>,
    episode: Option<Episode>,
    /// Until when it is left alone, and why.
    paused: Option<(u64, Pause)>,
    nothing: Backoff,
    doze: Backoff,
    target: u64,
}

impl Plan {
    /// For a group at rest, of whose limit at most `share` is kept free.
    pub fn new(share: f64) -> Plan {
        Plan {
            share,
            protected: 0,
            law: None,
            episode: None,
            paused: None,
            nothing: Backoff::new(NOTHING.0, NOTHING.1),
            doze: Backoff::new(DOZE.0, DOZE.1),
            target: 0,
        }
    }

    /// From now on at most `share` of the limit.
    pub fn change(&mut self, share: f64) {
        if share == self.share {
            return;
        }
        self.share = share;
        // Its bounds follow at the next look.
        if let Some((_, look)) = &mut self.law {
            look.limit = 0;
        }
    }

    /// The kernel has said that tasks were at the limit. A look follows.
    pub fn woken(&mut self, now_ns: u64) {
        if self.paused.is_none() {
            self.episode.get_or_insert_with(|| Episode::new(now_ns)).busy_ns = now_ns;
        }
    }

    /// The group is looked at no longer, until the kernel says something again.
    pub fn stop(&mut self) {
        self.rest();
    }

    /// Whether the next look needs a detail.
    pub fn wants_detail(&self, now_ns: u64) -> bool {
        let old = |episode: &Episode| episode.detail.is_none_or(|(_, look)| passed(look.at_ns, now_ns) >= DETAIL);
        match self.paused {
            // The look that ends a pause may begin an episode.
            Some((until, _)) => now_ns >= until,
            None => self.episode.as_ref().is_some_and(old),
        }
    }

    /// What is kept free below the limit.
    pub fn target(&self) -> u64 {
        self.target
    }

    /// What the group takes in a second, in bytes.
    pub fn demand(&self) -> u64 {
        self.law.as_ref().map_or(0, |(law, _)| law.demand())
    }

    /// Why it is left alone, if it is.
    pub fn paused(&self) -> Option<Pause> {
        self.paused.map(|(_, pause)| pause)
    }

    /// Whether it is looked at.
    pub fn awake(&self) -> bool {
        self.episode.is_some()
    }

    /// Takes note of a look, with a detail if that was wanted. Says what is to be done.
    pub fn note(&mut self, look: Look, detail: Option<Detail>) -> Step {
        let now = look.at_ns;
        if let Some((until, _)) = self.paused {
            if now < until {
                return Step { reclaim: 0, next_ns: Some(until), listen: false };
            }
            self.paused = None;
            if self.law.as_ref().is_none_or(|(_, last)| look.stalls == last.stalls) {
                return self.rest();
            }
            self.episode = Some(Episode::new(now));
        }
        let Some(episode) = &mut self.episode else { return self.rest() };
        if let Some(detail) = detail {
            self.protected = detail.protected;
            if let Some(pause) = episode.judge(&look, detail) {
                self.follow(look);
                return self.pause(now, pause);
            }
        }
        let (taken, cause) = self.follow(look);
        let Some(episode) = &mut self.episode else { return self.rest() };
        if taken >= WRITE_LEAST && cause != lead::Cause::Rest {
            episode.busy_ns = now;
        }
        let since = passed(episode.since_ns, now);
        let most = bounds(look.limit, self.share, self.protected).most;
        self.target = match cause {
            _ if since < FIRST => most,
            lead::Cause::Rest => 0,
            _ => self.law.as_ref().map_or(0, |(law, _)| law.gap().bytes),
        };
        if self.target == 0 {
            let rest = if episode.reclaimed { REST } else { REST_IN_VAIN };
            if passed(episode.busy_ns, now) <= rest {
                return episode.at(now, if since < BEGINNING { SOON } else { LATER });
            }
            return if episode.reclaimed { self.rest() } else { self.pause(now, Pause::Doze) };
        }
        if passed(episode.busy_ns, now) > QUIET {
            return self.rest();
        }
        let free = look.limit.saturating_sub(look.usage);
        let begin = (self.target as f64 * BEGIN) as u64;
        if free < begin {
            let spare = episode.detail.map_or(0, |(detail, _)| detail.spare) / 2;
            let reclaim = (self.target - free).min(WRITE_MOST).min(spare);
            if reclaim < WRITE_LEAST.min(self.target - free) {
                return self.pause(now, Pause::Nothing);
            }
            episode.reclaimed = true;
            self.doze.worth_it();
            return Step { reclaim, next_ns: Some(now), listen: true };
        }
        let most = if since < BEGINNING { SOON } else { LATER };
        // Demand declines slowly. Where nothing is taken any more, its looks become rare all the same.
        episode.pause = if taken == 0 {
            (2 * episode.pause).clamp(LOOK_LEAST, most)
        } else {
            let demand = self.law.as_ref().map_or(1, |(law, _)| law.demand()).max(1);
            Duration::from_secs_f64((free - begin) as f64 / demand as f64).clamp(LOOK_LEAST, most)
        };
        let pause = if since < FIRST { FIRST } else { episode.pause };
        episode.at(now, pause)
    }

    /// Takes note that the kernel has found less than it was asked for, or as much.
    pub fn written(&mut self, now_ns: u64, enough: bool) {
        if enough {
            self.nothing.worth_it();
        } else {
            self.pause(now_ns, Pause::Nothing);
        }
    }

    /// Has the law take note of a look. Returns what was taken since the last one, and why the gap is as it is.
    fn follow(&mut self, look: Look) -> (u64, lead::Cause) {
        let seen = lead::Look {
            at_ns: look.at_ns,
            free: look.limit.saturating_sub(look.usage),
            files: look.usage,
            reclaimed: look.reclaimed.saturating_add(look.stalls.saturating_mul(AT_LIMIT)),
            stalls: look.stalls,
            busy_ns: look.busy_ns,
        };
        let bounds = bounds(look.limit, self.share, self.protected);
        match &mut self.law {
            Some((law, last)) if last.limit > 0 => {
                if last.limit != look.limit {
                    law.recount(look.limit.saturating_sub(last.usage));
                }
                law.bound(bounds);
                let gap = law.note(seen);
                let reclaimed = look.reclaimed.saturating_sub(last.reclaimed);
                let stalls = look.stalls.saturating_sub(last.stalls);
                let grown = look.usage.saturating_add(reclaimed).saturating_sub(last.usage);
                *last = look;
                (grown.saturating_add(stalls.saturating_mul(AT_LIMIT)), gap.cause)
            }
            law => {
                *law = Some((Lead::new(bounds, seen), look));
                (0, lead::Cause::Rest)
            }
        }
    }

    fn pause(&mut self, now_ns: u64, pause: Pause) -> Step {
        let after = |time: Duration| now_ns + time.as_nanos() as u64;
        let until = match pause {
            Pause::Hurts => after(HURT),
            Pause::Throttled => after(THROTTLED),
            Pause::Nothing | Pause::Doze => {
                let (backoff, first) = match pause {
                    Pause::Nothing => (&mut self.nothing, NOTHING.0),
                    _ => (&mut self.doze, DOZE.0),
                };
                backoff.in_vain(Duration::ZERO, now_ns);
                backoff.until_ns().max(after(first))
            }
        };
        self.paused = Some((until, pause));
        self.episode = None;
        self.target = 0;
        Step { reclaim: 0, next_ns: Some(until), listen: false }
    }

    fn rest(&mut self) -> Step {
        self.episode = None;
        self.target = 0;
        Step { reclaim: 0, next_ns: None, listen: true }
    }
}

impl Episode {
    fn new(now_ns: u64) -> Episode {
        Episode {
            since_ns: now_ns,
            busy_ns: now_ns,
            reclaimed: false,
            detail: None,
            pressure: Pressure::new(WAITING, WAITING_WINDOW),
            stalls: 0,
            pause: LOOK_LEAST,
        }
    }

    fn at(&self, now_ns: u64, pause: Duration) -> Step {
        Step { reclaim: 0, next_ns: Some(now_ns + pause.as_nanos() as u64), listen: true }
    }

    /// Takes note of a detail. Says whether the group is to be left alone, and why.
    fn judge(&mut self, look: &Look, detail: Detail) -> Option<Pause> {
        let before = self.detail.replace((detail, *look));
        let spell = self.pressure.note(look.at_ns, detail.waited_us);
        let at_limit = look.stalls > self.stalls;
        if spell.is_some() || before.is_none() {
            self.stalls = look.stalls;
        }
        let (before, then) = before?;
        if detail.throttled > before.throttled {
            return Some(Pause::Throttled);
        }
        let reclaimed = look.reclaimed.saturating_sub(then.reclaimed);
        let returned = detail.returned.saturating_sub(before.returned);
        let returns = reclaimed > 0 && returned > RETURNED_LEAST && returned > reclaimed / RETURNED_SHARE;
        // Where it is held, tasks wait for the machine's memory.
        let waits = reclaimed > 0 && !at_limit && !look.held && spell.is_some_and(|spell| spell.waited);
        (returns || waits).then_some(Pause::Hurts)
    }
}

fn passed(since_ns: u64, now_ns: u64) -> Duration {
    Duration::from_nanos(now_ns.saturating_sub(since_ns))
}

/// The limit that stands for a group which is held to `usage`: so far above it that, with the most kept free that may be, `usage` is left. Nothing is
/// taken from a group that takes nothing further, and uses what it has again and again.
pub fn limit_of_held(usage: u64, share: f64) -> u64 {
    // What is kept free is a share of the limit, so this comes nearer with each step.
    (0..8).fold(usage, |limit, _| usage.saturating_add(bounds(limit, share, 0).most))
}

/// What may be free below a limit. A group is never taken below what is protected of it. A small group is read as fast as a large one, so of a
/// small one the share is larger.
fn bounds(limit: u64, share: f64, protected: u64) -> Bounds {
    let share = (limit as f64 * share).max(SMALL.min(limit as f64 * share * SMALL_SHARES));
    let most = if limit < LIMIT_LEAST { 0 } else { (share as u64).min(limit.saturating_sub(protected)) };
    Bounds { least: (limit / 1000).max(2 * WRITE_LEAST).min(most), most }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_a_group_that_is_held_has_is_not_kept_free(usage in 0u64..1 << 50, share in 0.0f64..0.1) {
            for usage in [usage, usage >> 20, usage >> 30] {
                let limit = limit_of_held(usage, share);
                let kept = bounds(limit, share, 0).most;
                prop_assert!(limit.saturating_sub(kept) >= usage - usage / 100_000, "{usage} {limit} {kept}");
                // No more than that is added.
                prop_assert!(limit - usage <= kept.max(usage / 5), "{usage} {limit} {kept}");
            }
        }
    }
}
