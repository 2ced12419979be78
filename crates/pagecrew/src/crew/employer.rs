//! Who has the crew work, and what there is to do.

use super::crew::Crew;
use super::operation::Operation;
use crate::stats::{Counters, StatsPage};
use crate::sys::memory::Range;
use std::time::Duration;

/// A piece of work: an operation on a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// What to do.
    pub operation: Operation,
    /// Where: page aligned, at most 16 TiB.
    pub range: Range,
    /// The NUMA node whose helpers should prefer it.
    pub node: usize,
    /// Whether [`Employer::finished`] wants to hear of it.
    pub report: bool,
}

/// What the watcher does next when it has looked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tick {
    /// Look again at once.
    Again,
    /// Nothing to do before this much time has passed.
    Wait(Duration),
    /// Nothing to do until somebody calls.
    Rest,
}

/// Who has the work done: hears when a job is finished and decides what helpers do when nobody waits.
pub trait Employer: Send + Sync + Sized + 'static {
    /// Whether helpers get ready at their start for zeroing that can be taken back, so that no thread of the program has to. In a process
    /// with threads that takes milliseconds, which an employer that has nothing zeroed doesn't want to wait for.
    const ZEROES: bool = true;

    /// The last thread at `task` has left it: the range belongs to the employer again. Not called by helpers, as long as there is a
    /// watcher.
    fn finished(&self, task: Task);

    /// Called by helpers when the board is empty. Returns whether there was something to do; takes no lock.
    fn work_ahead(&self, crew: &Crew<Self>) -> bool;

    /// Called by the watcher, after [`Crew::watch`] and then whenever the time that it returned has passed.
    fn watch(&self, crew: &Crew<Self>) -> Tick;

    /// Where to count.
    fn counters(&self) -> &Counters;
}

/// An employer that needs nothing besides [`Crew::run`]; for a crew of its own.
pub struct Idle(StatsPage);

impl Idle {
    /// # Errors
    /// If there is no memory for the counters.
    pub fn new() -> Result<Idle, crate::sys::Errno> {
        StatsPage::new().map(Idle)
    }
}

impl Employer for Idle {
    const ZEROES: bool = false;

    fn finished(&self, _: Task) {}

    fn work_ahead(&self, _: &Crew<Idle>) -> bool {
        false
    }

    fn watch(&self, _: &Crew<Idle>) -> Tick {
        Tick::Rest
    }

    fn counters(&self) -> &Counters {
        &self.0.counters
    }
}
