//! The board of jobs: how a task gets there, how a chunk of it is done and counted, and how its caller gets past helpers that don't
//! run.

use super::crew::Crew;
use super::employer::{Employer, Task};
use super::governor::chunk_bytes;
use super::job::{Chunk, GRAIN, Job, Left};
use super::kind::{Kind, WORKERS};
use super::operation::{Bypass, Operation};
use super::threads::WATCHER;
use crate::stats::Counters;
use crate::sys::memory::Range;
use crate::sys::{Errno, clock, membarrier, sched};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Jobs that can be open at a time. More than that are done by whoever brings them.
pub(super) const PLACES: usize = 64;

/// How long a waiting caller gives helpers to end their last chunks before it takes them over: twice a chunk's usual time.
const PATIENCE_NS: u64 = 200_000;

/// Where one job is open at a time.
pub(super) struct Place {
    pub(super) job: Job<WORKERS>,
    /// Written by whoever claimed the place before it is published; read by those inside.
    pub(super) task: UnsafeCell<Task>,
    /// Whether a caller waits for the end, which makes chunks short.
    pub(super) waiting: AtomicBool,
}

// SAFETY: `task` is written only in the phase `Setup`, which one thread owns; it is read only by threads inside the job, which
// they enter after its publication. The phase is changed with release and acquire ordering.
unsafe impl Sync for Place {}

impl Place {
    pub fn new() -> Place {
        let task = Task { operation: Operation::Discard, range: Range { start: 0, len: 0 }, node: 0, report: false };
        Place { job: Job::new(), task: UnsafeCell::new(task), waiting: AtomicBool::new(false) }
    }
}

impl<E: Employer> Crew<E> {
    /// Whether a waiting caller is better off with helpers.
    pub(super) fn worth_sharing(&self, task: &Task) -> bool {
        let rate = self.shared.rates[task.operation.index()].load(Ordering::Relaxed).max(1);
        self.shared.limit != Some(0)
            && task.range.len / rate >= 200
            && self.shared.cpus.now().count() > 1
            && !self.shared.contention.now()
            && self.shared.quota.helpers() > 0
            && (task.operation.bypass() != Bypass::Revoke || self.revocation() || self.can_boost())
    }

    /// Opens a place for `task`; `None` if all are taken.
    pub(super) fn open(&self, task: Task, waiting: bool) -> Option<&Place> {
        // Helpers hand over to it what they have finished, and what they have to leave.
        if (task.report || !waiting) && self.shared.watcher_events.listeners() == 0 {
            self.start_watcher();
        }
        let place = self.shared.places.iter().find(|place| place.job.claim())?;
        // SAFETY: the phase is `Setup`, which belongs to this thread.
        unsafe { *place.task.get() = task };
        place.waiting.store(waiting, Ordering::Relaxed);
        place.job.publish(task.range.len.div_ceil(GRAIN), waiting);
        Some(place)
    }

    /// Size of the next chunk of `place` in grains.
    pub(super) fn chunk(&self, place: &Place, operation: Operation) -> usize {
        let rate = self.shared.rates[operation.index()].load(Ordering::Relaxed);
        let helpers = &self.shared.helpers[Kind::of(operation).workers()];
        let takers = 1 + helpers.iter().filter(|helper| helper.thread.load(Ordering::Relaxed) != 0).count();
        let waiting = place.waiting.load(Ordering::Relaxed);
        chunk_bytes(operation.grain(), rate, place.job.left() * GRAIN, takers, waiting) / GRAIN
    }

    /// Performs one chunk. Returns whether it was done whole.
    ///
    /// # Safety
    /// The calling thread is inside the job and took the chunk.
    pub(super) unsafe fn perform(&self, place: &Place, task: &Task, chunk: Chunk, worker: Option<usize>) -> bool {
        let begin = chunk.start * GRAIN;
        let range = Range { start: task.range.start + begin, len: (chunk.len * GRAIN).min(task.range.len - begin) };
        let stoppable = worker.is_some() && task.operation.bypass() == Bypass::Revoke;
        let start = clock::now_ns();
        // SAFETY: the range was given to the crew, and this chunk of it to this thread.
        let whole = unsafe { task.operation.perform(range, stoppable.then(|| place.job.revoked())) };
        let took = clock::now_ns() - start;
        if worker.is_some() {
            self.shared.quota.worked(took);
        }
        if whole {
            self.measure(task.operation, range.len, took);
            let waiting = place.waiting.load(Ordering::Relaxed);
            let background = worker.is_some() || self.on_watcher();
            self.count(task.operation, range.len, background, if waiting { 0 } else { took });
        }
        whole
    }

    /// Takes the last chunk into account in the rate of `operation`: halfway, so that one preempted chunk makes the next ones
    /// smaller and a few good ones make them large again.
    pub(super) fn measure(&self, operation: Operation, bytes: usize, took_ns: u64) {
        let rate = &self.shared.rates[operation.index()];
        let now = bytes * 1000 / (took_ns.max(1000) as usize);
        rate.store(((rate.load(Ordering::Relaxed) + now) / 2).max(1), Ordering::Relaxed);
    }

    /// Leaves a job as a thread that may take locks.
    pub(super) fn leave(&self, place: &Place, task: Task) {
        if place.job.leave() == Left::Last {
            place.job.release();
            if task.report {
                self.employer().finished(task);
            }
        }
    }

    /// Leaves a job as a helper.
    pub(super) fn leave_as_helper(&self, place: &Place, task: Task) {
        if place.job.leave() == Left::Open {
            return;
        }
        if !task.report {
            place.job.release();
            return;
        }
        place.job.hand_over();
        if !self.notify_watcher() {
            // No thread could be started for it.
            self.collect();
        }
    }

    /// Called by a waiting caller for whom no chunk is left: does what helpers still hold, without waiting for those that don't
    /// run.
    ///
    /// # Safety
    /// As [`Crew::run`]; the calling thread is inside the job.
    pub(super) unsafe fn pass_stragglers(&self, place: &Place, task: &Task) {
        // SAFETY: by the function's own contract.
        unsafe { self.pass_stragglers_with(place, task, membarrier::restart_sequences) }
    }

    /// The same with a `barrier` that restarts the sequences of all threads, or fails.
    unsafe fn pass_stragglers_with(&self, place: &Place, task: &Task, barrier: impl FnOnce() -> Result<(), Errno>) {
        let holders =
            || Kind::of(task.operation).workers().filter_map(|worker| Some((worker, place.job.held_by(worker)?)));
        let deadline = clock::now_ns() + PATIENCE_NS;
        while holders().next().is_some() && clock::now_ns() < deadline {
            std::hint::spin_loop();
        }
        if holders().next().is_none() {
            return;
        }
        self.shared.contention.taken();
        let mut bypass = task.operation.bypass();
        if bypass == Bypass::Revoke && !self.revocation() {
            bypass = Bypass::Wait;
        }
        if bypass == Bypass::Revoke {
            place.job.revoked().store(1, Ordering::SeqCst);
            if barrier().is_err() {
                self.revocation_failed();
                bypass = Bypass::Wait;
            }
        }
        for (worker, chunk) in holders() {
            self.boost(worker);
            if bypass == Bypass::Wait {
                while place.job.is_at(worker, chunk) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                // Where the barrier has failed, a helper may see the flag all the same, and leave the rest.
                if place.job.held_by(worker) != Some(chunk) {
                    continue;
                }
            }
            self.counters().stragglers_bypassed.add(1);
            // SAFETY: discarding twice is harmless while the range belongs to the job, which it does while this thread is inside;
            // a helper at zeroing was revoked and writes no more.
            unsafe { self.perform(place, task, chunk, None) };
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        self.shared.employer.counters()
    }

    /// Whether the calling thread is the watcher, for whom no thread of the program waits.
    pub(super) fn on_watcher(&self) -> bool {
        self.shared.helpers[WATCHER].thread.load(Ordering::Relaxed) == sched::thread_id()
    }

    /// Counts the time since `begin` as waited for, on a thread of the program.
    pub(super) fn count_wait(&self, begin: u64) {
        if !self.on_watcher() {
            self.counters().caller_wait_ns.add(clock::now_ns() - begin);
        }
    }

    /// Counts `bytes`, by the crew's own threads or not; with a time, nobody waited for it.
    pub(super) fn count(&self, operation: Operation, bytes: usize, background: bool, background_ns: u64) {
        let (counters, bytes) = (self.counters(), bytes as u64);
        match (operation, background) {
            (Operation::Discard, true) => {
                counters.discarded_in_background_bytes.add(bytes);
                counters.background_discard_ns.add(background_ns);
            }
            (Operation::Discard, false) => counters.discarded_by_caller_bytes.add(bytes),
            (Operation::Zero, true) => counters.zeroed_by_helpers_bytes.add(bytes),
            (Operation::Zero, false) => counters.zeroed_by_caller_bytes.add(bytes),
            (Operation::Populate, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::crew::MISSING;
    use super::*;
    use crate::crew::Idle;
    use crate::sys::memory::{Protection, map, unmap};
    use crate::sys::topology::Topology;

    const LEN: usize = 4 << 20;

    /// What a caller finds who comes to a job of which a helper has a chunk; `helper` is what the helper does with it, and says whether that is
    /// all of it.
    fn beside(crew: &Crew<Idle>, barrier: Result<(), Errno>, helper: impl Fn(&Place, Range) -> bool + Send) -> bool {
        let range = Range { start: map(LEN, Protection::ReadWrite).unwrap(), len: LEN };
        // SAFETY: a fresh mapping of that length, which only this function uses.
        let bytes = unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, LEN) };
        bytes.fill(0xa5);
        let task = Task { operation: Operation::Zero, range, node: 0, report: false };
        let place = crew.open(task, true).unwrap();
        let worker = Kind::of(task.operation).workers().start;
        std::thread::scope(|scope| {
            assert!(place.job.enter());
            let chunk = place.job.take(LEN / GRAIN / 2, Some(worker)).unwrap();
            scope.spawn(move || {
                let whole = helper(place, Range { len: chunk.len * GRAIN, ..range });
                if whole {
                    place.job.done(worker)
                } else {
                    place.job.let_go(worker)
                }
                crew.leave_as_helper(place, task);
            });
            while let Some(chunk) = place.job.take(LEN / GRAIN, None) {
                // SAFETY: as a caller's.
                unsafe { crew.perform(place, &task, chunk, None) };
            }
            // SAFETY: this thread is inside the job.
            unsafe { crew.pass_stragglers_with(place, &task, || barrier) };
            crew.leave(place, task);
        });
        let zeroed = bytes.iter().all(|&byte| byte == 0);
        // SAFETY: the function is done with it.
        unsafe { unmap(range).unwrap() };
        zeroed
    }

    fn crew() -> Crew<Idle> {
        Crew::new(Idle::new().unwrap(), None, sched::affinity().unwrap(), Topology::read())
    }

    #[test]
    fn a_caller_whose_barrier_fails_does_what_a_helper_has_let_go_of() {
        let crew = crew();
        if !crew.revocation() {
            return;
        }
        let lets_go = |place: &Place, _| {
            while place.job.revoked().load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            // The caller waits meanwhile.
            std::thread::sleep(Duration::from_millis(5));
            false
        };
        assert!(beside(&crew, Err(Errno(libc::EPERM)), lets_go));
        assert!(!crew.revocation(), "a barrier that failed is not tried again");
    }

    #[test]
    fn without_barriers_a_helper_is_left_to_do_what_it_has() {
        let crew = crew();
        crew.shared.revocation.store(MISSING, Ordering::Relaxed);
        let late = |place: &Place, range: Range| {
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(place.job.revoked().load(Ordering::SeqCst), 0, "it could not be told in time");
            // SAFETY: the helper's chunk.
            unsafe { Operation::Zero.perform(range, Some(place.job.revoked())) }
        };
        assert!(beside(&crew, Ok(()), late));
    }
}
