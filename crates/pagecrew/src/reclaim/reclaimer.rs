//! The plan, done: it waits for the kernel's reclaim to wake up, looks, and sets.

use super::factor::{Factor, FactorError};
use super::looks::{Found, Looks};
use super::plan::Plan;
use super::support::{AT_WORK, STILL_AT_WORK, Thread, Threads, Unsupported};
use super::urgency::Urgency;
use super::watermarks::Watermarks;
use crate::control::lead::Cause;
use crate::stats::{Publisher, figures};
use crate::sys::Errno;
use crate::sys::clock::now_ns;
use crate::sys::vmstat::{self, Counts, VmStat};
use crate::sys::{memory, sched, topology};
use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Far longer than a look takes, also on a machine that is emulated, or whose CPUs are somebody else's most of the time.
const RUNS_MOST: Duration = Duration::from_secs(1);
/// The kernel's threads are tried to be had so often while there is demand.
const URGENCY_AGAIN: Duration = Duration::from_secs(10);

/// What may be done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// The most that is kept free ahead of demand, of each node's memory; where 1 is all. Up to as much again is free while the kernel
    /// reclaims.
    pub most: f64,
}

impl Options {
    /// Nobody would want more; and more than the setting can say.
    pub const MOST: f64 = 0.1;
}

impl Default for Options {
    fn default() -> Options {
        Options { most: 0.025 }
    }
}

figures! {
    /// How it stands, as it was seen at the last look: there is none while nothing is reclaimed.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Standing: Reclaim, "pagecrew_reclaim_", [], "" {
        factor: u64, Gauge Count, "vm.watermark_scale_factor as it is set.";
        own_factor: u64, Gauge Count, "vm.watermark_scale_factor while there is no demand: the operator's.";
        gap_bytes: u64, Gauge Bytes, "Memory between the watermarks min and low, which is free ahead of demand, on all nodes.";
        demand_bytes: u64, Gauge Bytes, "Memory that is taken in a second; what was taken at the peak counts for a while.";
        lead_ns key "lead_seconds": u64, Gauge Seconds, "Time that reclaim in the background takes to come to its full rate, as it was found out.";
        demands: u64, Counter Count, "Times that demand began.";
        changes: u64, Counter Count, "Times that the setting was changed.";
        hurts: u64, Gauge Count, "1 while no more is kept free for some time, because memory has come back from swap; else 0.";
        bounded: u64, Gauge Count, "1 while the demand needs more than may be kept free (setting most); else 0.";
        scarce: u64, Gauge Count, "1 while the demand needs more than a quarter of what is or could be free, and the rest is left to files; else 0.";
        urgent: u64, Gauge Count, "1 while the kernel's reclaim threads come before other programs (nice -20); else 0.";
        saturated: u64, Gauge Count, "1 while tasks wait although reclaim in the background works all the time, so that more is of no use; else 0.";
        looks: u64, Counter Count, "Looks at the nodes.";
        reclaimed_bytes: u64, Counter Bytes, "Memory that was reclaimed while it was looked, by whomever.";
        reclaimed_by_tasks_bytes: u64, Counter Bytes, "Of that, memory that tasks had to reclaim for themselves.";
        stalls: u64, Counter Count, "Times that tasks had to reclaim for themselves (allocstall).";
    }
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// More is kept free, since there is demand.
    Begun,
    /// It is more or less than it was.
    Changed,
    /// The setting is the operator's again, after so long, with what came of it.
    Ended {
        /// From the first change on.
        lasted: Duration,
        /// Bytes.
        reclaimed: u64,
        /// See [`Standing::stalls`].
        stalls: u64,
    },
    /// Somebody else has changed the setting. What it is now counts as the operator's.
    Theirs,
}

/// Why it can't be done, or no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReclaimError {
    /// Not here.
    Unsupported(Unsupported),
    /// The setting can't be had.
    Factor(FactorError),
    /// What the kernel counts can't be read.
    Counts(Errno),
    /// The reclaim thread of the node with this number has ended: the node was taken out of the machine.
    NodeGone(usize),
    /// The node with this number was added to the machine.
    NodeAdded(usize),
}

impl fmt::Display for ReclaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReclaimError::Unsupported(error) => error.fmt(f),
            ReclaimError::Factor(error) => error.fmt(f),
            ReclaimError::Counts(errno) => write!(f, "the kernel's counters of reclaim can't be read: {errno}"),
            ReclaimError::NodeGone(node) => {
                write!(f, "node {node} was taken out of the machine: start it again for the nodes there are now")
            }
            ReclaimError::NodeAdded(node) => {
                write!(f, "node {node} was added to the machine: start it again for the nodes there are now")
            }
        }
    }
}

impl std::error::Error for ReclaimError {}

impl From<Unsupported> for ReclaimError {
    fn from(error: Unsupported) -> ReclaimError {
        ReclaimError::Unsupported(error)
    }
}

impl From<FactorError> for ReclaimError {
    fn from(error: FactorError) -> ReclaimError {
        ReclaimError::Factor(error)
    }
}

/// A span of demand.
#[derive(Debug, Clone, Copy)]
struct Demand {
    since_ns: u64,
    before: Standing,
}

/// Keeps more free ahead of demand on this machine, as long as there is demand. Dropping it puts the setting back.
#[derive(Debug)]
pub struct Reclaimer {
    options: Options,
    /// The nodes' threads, and when they are at work.
    nodes: Vec<Node>,
    /// The nodes that had memory when this began.
    with_memory: Vec<usize>,
    vmstat: VmStat,
    counts: Counts,
    looks: Looks,
    plan: Plan,
    factor: Factor,
    /// `None` where the kernel's threads may not be more urgent.
    urgency: Option<Urgency>,
    /// When it was last tried to have that.
    urgency_tried_ns: Option<u64>,
    /// Others judge by it what is available. Taken away once the setting was put back.
    publisher: Publisher,
    standing: Standing,
    /// The value of the setting that was told of last. Guesses are not.
    said: u64,
    demand: Option<Demand>,
}

#[derive(Debug)]
struct Node {
    thread: Thread,
    last: Found,
}

impl Node {
    fn look(&mut self) -> Found {
        // A node that was taken out stays as it was.
        let memory = vmstat::node_memory(self.thread.node).unwrap_or(self.last.memory);
        let times = vmstat::cpu_times(self.thread.number);
        let busy_ns = times.map_or(self.last.busy_ns, |times| times.ran_ns.saturating_add(times.waited_ns));
        self.last = Found { memory, busy_ns };
        self.last
    }
}

impl Reclaimer {
    /// Takes the setting, and begins to wait. The calling thread is the one that is to [see to it](Reclaimer::see_to), and runs before all
    /// ordinary ones from now on, where that is allowed: among those it would wait for its turn for as long as what is free lasts.
    ///
    /// # Errors
    /// See [`ReclaimError`].
    pub fn new(threads: Threads, options: Options) -> Result<Reclaimer, ReclaimError> {
        let mut nodes: Vec<Node> =
            threads.0.into_iter().map(|thread| Node { thread, last: Found::default() }).collect();
        let factor = Factor::take()?;
        let own = factor.before();
        let urgency = Urgency::take(numbers(&nodes));
        // What it needs at a wake-up must be there after a night of rest, when memory is short.
        let _ = memory::keep_what_is_used();
        let mut vmstat = VmStat::open().map_err(ReclaimError::Counts)?;
        let counts = vmstat.read().map_err(ReclaimError::Counts)?;
        let found: Vec<Found> = nodes.iter_mut().map(Node::look).collect();
        let looks = Looks::new(now_ns(), counts, &found);
        let plan = Plan::new(watermarks(&nodes)?, looks.nodes(), own, options.most);
        let mut reclaimer = Reclaimer {
            options,
            nodes,
            with_memory: topology::nodes_with_memory(),
            vmstat,
            counts,
            looks,
            plan,
            factor,
            urgency,
            urgency_tried_ns: None,
            publisher: Publisher::new(),
            standing: Standing::default(),
            said: own,
            demand: None,
        };
        reclaimer.hurry();
        reclaimer.stand();
        // From here on it only looks, and waits in between.
        let _ = sched::set_real_time(RUNS_MOST);
        Ok(reclaimer)
    }

    /// Whether the setting was still as a process had left it that was killed together with its guard.
    pub fn found_one_left(&self) -> bool {
        self.factor.found_one_left()
    }

    /// Goes on with other options.
    pub fn change(&mut self, options: Options) {
        self.options = options;
        self.plan.change(options.most);
    }

    /// What is readable when there is something to [see to](Reclaimer::see_to). Nothing while there is demand: a look is never far then, and
    /// threads that come and go without getting anywhere would have one follow the other.
    pub fn descriptors(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        let listens = self.plan.cause() == Cause::Rest;
        self.nodes.iter().filter(move |_| listens).map(|node| (node.thread.runs.as_raw_fd(), libc::POLLIN))
    }

    /// When to see to it even if nothing is readable.
    pub fn next_look_ns(&self) -> Option<u64> {
        self.plan.step().next_ns
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether reclaim works for those who take memory, and nothing speaks against it.
    pub fn has_demand(&self) -> bool {
        self.plan.cause() != Cause::Rest && !self.plan.hurts(now_ns())
    }

    /// Why the setting is as it is.
    pub fn cause(&self) -> Cause {
        self.plan.cause()
    }

    /// Looks, if reclaim has woken up or it is time, and sets what follows from that.
    ///
    /// # Errors
    /// See [`ReclaimError`]. Once more may do.
    pub fn see_to(&mut self) -> Result<Option<Event>, ReclaimError> {
        let now = now_ns();
        // Of each, since all are readable until that was taken.
        let woken = self.nodes.iter().filter(|node| node.thread.runs.take()).count() > 0;
        let mut begins = false;
        if woken {
            // Before anything else: what is free lasts for milliseconds.
            begins = !self.plan.is_awake();
            let factor = self.plan.woken(now);
            if !self.set(factor)? {
                return Ok(Some(Event::Theirs));
            }
        }
        if !woken && self.plan.step().next_ns.is_none_or(|next| now < next) {
            // Nothing to see, unless what was waited for has ended.
            return match self.nodes.iter().find(|node| !node.thread.lives()) {
                Some(gone) => Err(ReclaimError::NodeGone(gone.thread.node)),
                None => Ok(None),
            };
        }
        let counts = self.vmstat.read().map_err(ReclaimError::Counts)?;
        let found: Vec<Found> = self.nodes.iter_mut().map(Node::look).collect();
        let at = now_ns();
        self.looks.note(at, counts, &found);
        let before = std::mem::replace(&mut self.counts, counts);
        let standing = &mut self.standing;
        standing.looks += 1;
        standing.reclaimed_bytes += counts.reclaimed.saturating_sub(before.reclaimed);
        standing.reclaimed_by_tasks_bytes += counts.reclaimed_by_tasks.saturating_sub(before.reclaimed_by_tasks);
        standing.stalls += counts.stalls.saturating_sub(before.stalls);
        let swapped_in = counts.swapped_in.saturating_sub(before.swapped_in);
        if begins {
            if let Some(new) = topology::nodes_with_memory().iter().find(|node| !self.with_memory.contains(node)) {
                return Err(ReclaimError::NodeAdded(*new));
            }
            // A node may have grown since the last time, or its watermarks may be others.
            self.plan.renew(watermarks(&self.nodes)?);
        }
        let step = self.plan.note(at, self.looks.nodes(), swapped_in);
        if !self.set(step.factor)? {
            return Ok(Some(Event::Theirs));
        }
        self.listen();
        self.hurry();
        self.stand();
        Ok(if step.guess { None } else { self.changed(at, step.factor) })
    }

    /// Gives the setting this value, with a guard. Returns false where somebody else has set it: then it is theirs, and is taken as it is.
    fn set(&mut self, factor: u64) -> Result<bool, ReclaimError> {
        if !self.factor.guarded() {
            self.take_again()?;
        } else if factor != self.factor.now() {
            if factor > self.factor.now() {
                // Nobody is to see less available memory and not know why.
                self.publisher.publish(self.plan.ahead(factor, now_ns()));
            }
            if !self.factor.set(factor)? {
                self.take_again()?;
                return Ok(false);
            }
            self.standing.changes += 1;
        }
        Ok(true)
    }

    /// Hears of a thread at work soon, but where it is known to be.
    fn listen(&mut self) {
        let every = if self.plan.is_awake() { STILL_AT_WORK } else { AT_WORK };
        for node in &mut self.nodes {
            // One that is gone is told by the next look.
            let _ = node.thread.runs.every(every);
        }
    }

    /// The kernel's threads come before others, at rest as well: when they wake up, what is free is used up before anybody else could make them
    /// so. Where more reclaim would hurt, they don't.
    fn hurry(&mut self) {
        let now = now_ns();
        let urgent = !self.plan.hurts(now);
        if let Some(urgency) = self.urgency.take_if(|urgency| urgent && !urgency.guarded()) {
            // Its guard was killed. Another one takes its place once the threads are as before.
            drop(urgency);
            self.urgency_tried_ns = None;
        }
        if self.urgency.is_none() && urgent && self.may_try_urgency(now) {
            self.urgency = Urgency::take(numbers(&self.nodes));
        }
        if let Some(urgency) = &mut self.urgency {
            urgency.set(urgent);
        }
    }

    /// Whether it is time to try to have the threads, where that was in vain: a guard of the process before may not be done with them yet.
    fn may_try_urgency(&mut self, now_ns: u64) -> bool {
        let may =
            self.urgency_tried_ns.is_none_or(|tried| now_ns.saturating_sub(tried) >= URGENCY_AGAIN.as_nanos() as u64);
        if may {
            self.urgency_tried_ns = Some(now_ns);
        }
        may
    }

    /// What that is in the life of a demand.
    fn changed(&mut self, now_ns: u64, factor: u64) -> Option<Event> {
        let before = std::mem::replace(&mut self.said, factor);
        match self.demand {
            _ if factor == before => None,
            None => {
                self.standing.demands += 1;
                self.demand = Some(Demand { since_ns: now_ns, before: self.standing });
                Some(Event::Begun)
            }
            Some(Demand { since_ns, before }) if factor == self.plan.own() => {
                self.demand = None;
                Some(Event::Ended {
                    lasted: Duration::from_nanos(now_ns - since_ns),
                    reclaimed: self.standing.reclaimed_bytes - before.reclaimed_bytes,
                    stalls: self.standing.stalls - before.stalls,
                })
            }
            Some(_) => Some(Event::Changed),
        }
    }

    /// The setting is somebody else's now, or has lost its guard: it is taken anew, as it is then.
    fn take_again(&mut self) -> Result<(), ReclaimError> {
        self.factor.release();
        self.factor = Factor::take()?;
        let own = self.factor.before();
        self.plan = Plan::new(watermarks(&self.nodes)?, self.looks.nodes(), own, self.options.most);
        (self.demand, self.said) = (None, own);
        self.listen();
        self.hurry();
        self.stand();
        Ok(())
    }

    fn stand(&mut self) {
        self.publisher.publish(self.plan.ahead(self.factor.now(), now_ns()));
        self.standing.factor = self.factor.now();
        self.standing.own_factor = self.plan.own();
        self.standing.gap_bytes = self.plan.gap(self.factor.now());
        self.standing.demand_bytes = self.plan.demand();
        self.standing.hurts = self.plan.hurts(now_ns()).into();
        self.standing.urgent = self.urgency.as_ref().is_some_and(Urgency::urgent).into();
        self.standing.bounded = (self.plan.cause() == Cause::Bounded).into();
        self.standing.scarce = (self.plan.cause() == Cause::Scarce).into();
        self.standing.saturated = (self.plan.cause() == Cause::Saturated).into();
        self.standing.lead_ns = self.plan.lead().as_nanos() as u64;
    }
}

fn numbers(nodes: &[Node]) -> Vec<i32> {
    nodes.iter().map(|node| node.thread.number).collect()
}

fn watermarks(nodes: &[Node]) -> Result<Vec<Watermarks>, ReclaimError> {
    let zones = vmstat::zones().map_err(ReclaimError::Counts)?;
    Ok(nodes.iter().map(|node| Watermarks::of(node.thread.node, &zones)).collect())
}
