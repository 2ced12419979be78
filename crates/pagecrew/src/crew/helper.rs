//! The life of a helper.

use super::contention::Found;
use super::crew::{Crew, Shared};
use super::employer::Employer;
use super::kind::Kind;
use super::operation::Bypass;
use super::threads::Helper;
use crate::sys::clock;
use crate::sys::sched::{self, Class};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A helper without work ends after this long.
pub(super) const LINGER: Duration = Duration::from_secs(30);
/// And after this long where it has to stay in the idle class: a process can't end before such a thread has had its turn.
const LINGER_IDLE: Duration = Duration::from_millis(50);
/// Time slices of a helper that works inside the kernel (6.12). It yields before each chunk, which is far shorter, so it is seldom
/// preempted in the middle of one, where it holds locks.
const SLICE_NS: u64 = 3_000_000;

impl<E: Employer> Crew<E> {
    /// The life of helper `number`. One that zeroes works in the idle class and sleeps in the ordinary one, where the user may go back to
    /// that. The other kind stays as it is.
    pub(super) fn help(&self, number: usize) {
        let me = &self.shared.helpers[number];
        let kind = Kind::of_worker(number);
        let events = &self.shared.events[kind.index()];
        if kind == Kind::Kernel {
            // Before it touches anything. Where that is refused, it is as good as any thread of the program.
            let _ = sched::set_ordinary(SLICE_NS);
        }
        let node = self.settle(number);
        if E::ZEROES && kind == Kind::Zeroer {
            self.revocation();
        }
        let cpus = sched::online_cpus();
        let (mut idle, mut found) = (false, Found::default());
        let mut last_work = clock::now_ns();
        loop {
            let seen = events.prepare();
            if self.has_room(number, &mut found, cpus) {
                idle = idle || (kind == Kind::Zeroer && sched::set_class(0, Class::Idle).is_ok());
                let room = |found: &mut Found| self.has_room(number, found, cpus);
                if self.work_on_board(number, node, || room(&mut found))
                    || (kind == Kind::Zeroer && self.employer().work_ahead(self))
                {
                    last_work = clock::now_ns();
                    continue;
                }
            }
            me.at_work.store(false, Ordering::Relaxed);
            idle = idle && sched::set_class(0, Class::Normal).is_err();
            let linger = if idle { LINGER_IDLE } else { LINGER };
            let over =
                self.shared.stop.load(Ordering::SeqCst) || clock::now_ns() - last_work >= linger.as_nanos() as u64;
            if over && events.end(seen) {
                me.thread.store(0, Ordering::Release);
                return;
            }
            if !over {
                events.wait(seen, linger);
            }
        }
    }

    /// Whether there is a CPU for helper `number`, which is about to work.
    fn has_room(&self, number: usize, found: &mut Found, cpus: usize) -> bool {
        self.shared.helpers[number].at_work.store(true, Ordering::Relaxed);
        let at_work = |helper: &&Helper| helper.at_work.load(Ordering::Relaxed);
        // The watcher, too, which is often on its way back to sleep when a helper that it has called begins.
        let helpers = &self.shared.helpers;
        let before = || helpers[..number].iter().filter(at_work).count();
        let crew = || (helpers.iter().filter(at_work).count(), before());
        let room = before() < self.shared.quota.look()
            && self.shared.contention.leaves_room(found, || self.shared.cpus.now(), cpus, crew);
        if room || !self.leave_to_watcher() {
            return true;
        }
        self.counters().turned_away.add(1);
        false
    }

    /// Works on open jobs until none has chunks left or there is no `room` for it any more. Returns whether there was one.
    fn work_on_board(&self, number: usize, node: usize, mut room: impl FnMut() -> bool) -> bool {
        let me = &self.shared.helpers[number];
        let kind = Kind::of_worker(number);
        let lower = || {
            let _ = sched::set_class(0, Class::Idle);
        };
        let mut worked = false;
        me.boost.down(lower);
        for prefer_own in [true, false] {
            for place in &self.shared.places {
                if !place.job.has_chunks() || !place.job.enter() {
                    continue;
                }
                // SAFETY: this thread is inside the job.
                let task = unsafe { *place.task.get() };
                let others = prefer_own && task.node != node && self.shared.topology.nodes() > 1;
                if others || Kind::of(task.operation) != kind {
                    self.leave_as_helper(place, task);
                    continue;
                }
                if task.operation.bypass() == Bypass::Revoke {
                    // Whoever takes a chunk back relies on it.
                    self.revocation();
                }
                while room()
                    && self.begin_chunk(kind)
                    && let Some(chunk) = place.job.take(self.chunk(place, task.operation), Some(number))
                {
                    worked = true;
                    // SAFETY: this thread is inside the job and took the chunk.
                    let whole = unsafe { self.perform(place, &task, chunk, Some(number)) };
                    me.boost.down(lower);
                    if !whole {
                        place.job.let_go(number);
                        break;
                    }
                    place.job.done(number);
                }
                self.leave_as_helper(place, task);
            }
        }
        worked
    }

    /// Called before a chunk is taken. A helper that will hold locks of the kernel is preempted here, if at all: there it holds none.
    fn begin_chunk(&self, kind: Kind) -> bool {
        if kind == Kind::Kernel {
            std::thread::yield_now();
        }
        true
    }

    /// The node whose jobs helper `number` prefers: one with CPUs that the process may use, if there is one.
    fn node_of_helper(&self, number: usize) -> usize {
        let Shared { topology, cpus, .. } = &*self.shared;
        if topology.nodes() == 1 {
            return 0;
        }
        let usable = |&node: &usize| cpus.of_node(node).count() > 0;
        let count = (0..topology.nodes()).filter(usable).count().max(1);
        (0..topology.nodes()).filter(usable).nth(number % count).unwrap_or(0)
    }

    /// Restricts the calling helper to the CPUs of a node that the process may use, where that has any. Returns the node.
    fn settle(&self, number: usize) -> usize {
        let Shared { topology, cpus, .. } = &*self.shared;
        cpus.settle_anywhere();
        cpus.look(topology);
        let node = self.node_of_helper(number);
        let own = cpus.of_node(node);
        if topology.nodes() > 1 && own.count() > 0 {
            // One that has just gone offline: anywhere will do.
            let _ = sched::set_affinity(&own);
        }
        node
    }
}
