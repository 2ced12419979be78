//! The life of the watcher.

use super::crew::Crew;
use super::employer::{Employer, Tick};
use super::governor::{Demand, worth_a_wake_up};
use super::helper::LINGER;
use super::operation::Operation;
use super::threads::WATCHER;
use crate::sys::{clock, sched};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// While the CPUs are others', the watcher does a chunk of what was left this often: a twentieth of its time. What can't wait that long,
/// the employer sees to.
const LEFT_NS: u64 = 50_000;
const LEFT_PAUSE: Duration = Duration::from_millis(4);

/// Time slices of the watcher: as short as can be (6.12).
const WATCHER_SLICE_NS: u64 = 100_000;

impl<E: Employer> Crew<E> {
    /// The life of the watcher.
    pub(super) fn watch_over(&self) {
        self.shared.cpus.settle_anywhere();
        // It has little to do and should come to it soon. Where the kernel doesn't know of slices, it comes a little later.
        let _ = sched::set_slice(WATCHER_SLICE_NS);
        let events = &self.shared.watcher_events;
        let mut last_work = clock::now_ns();
        let mut next_left = 0;
        let me = &self.shared.helpers[WATCHER];
        loop {
            me.at_work.store(true, Ordering::Relaxed);
            let seen = events.prepare();
            self.shared.cpus.look(&self.shared.topology);
            self.collect();
            let tick = self.employer().watch(self);
            let left = self.see_to_what_was_left(&mut next_left);
            let now = clock::now_ns();
            let pause = match tick {
                Tick::Again => Duration::ZERO,
                Tick::Wait(pause) if left => pause.min(LEFT_PAUSE),
                Tick::Rest if left => LEFT_PAUSE,
                Tick::Wait(pause) => pause,
                Tick::Rest => LINGER,
            };
            if tick != Tick::Rest || left {
                last_work = now;
            }
            let over = self.shared.stop.load(Ordering::SeqCst) || now - last_work >= LINGER.as_nanos() as u64;
            me.at_work.store(false, Ordering::Relaxed);
            if over {
                self.shared.left.rest(u64::MAX);
            }
            let nothing_left = self.shared.stop.load(Ordering::SeqCst) || !self.shared.left.is_there();
            if over && nothing_left && events.end(seen) {
                me.thread.store(0, Ordering::Release);
                return;
            }
            if !over && pause > Duration::ZERO {
                let due = if pause == LINGER { u64::MAX } else { now + pause.as_nanos() as u64 };
                // What was left since the look, by somebody who saw the time before this one.
                let pause = if self.shared.left.rest(due) { pause.min(LEFT_PAUSE) } else { pause };
                events.wait(seen, pause);
            }
        }
    }

    /// Sees to what helpers have left to those who want the CPUs: calls helpers once they need no longer keep away, and until then
    /// does a little of it. Returns whether there is more. Called by the watcher.
    fn see_to_what_was_left(&self, next_ns: &mut u64) -> bool {
        // Before the look at the board: what comes there behind it is left anew.
        if !self.shared.left.take() || !self.shared.places.iter().any(|place| place.job.has_chunks()) {
            return false;
        }
        let now = clock::now_ns();
        if self.shared.contention.now() || self.shared.quota.look() == 0 {
            self.shared.left.leave(now);
            if now >= *next_ns {
                self.assist_with(|_| true, || clock::now_ns() >= now + LEFT_NS);
                *next_ns = now + LEFT_PAUSE.as_nanos() as u64;
            }
            return true;
        }
        for operation in [Operation::Discard, Operation::Zero, Operation::Populate] {
            let index = operation.index();
            // Whoever waits for a job takes part in it, and had helpers as well before they were turned away.
            let bytes = self.untaken(operation, |_| true);
            let demand = Demand { bytes, rate: self.shared.rates[index].load(Ordering::Relaxed) };
            self.shared.pending[index].store(0, Ordering::Relaxed);
            if !worth_a_wake_up(demand) || !self.call(demand.bytes, operation) {
                self.assist(operation, || false);
            }
        }
        false
    }
}
