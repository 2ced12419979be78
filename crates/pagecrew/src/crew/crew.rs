//! The crew: a board of jobs, the helper threads that work on it, and a watcher.
//!
//! Helpers do the heavy work, on CPUs that nobody else wants. The watcher does next to nothing: it looks at the signals, tells the employer what helpers have finished, and sees to it that what the employer
//! keeps stays within its bounds even where helpers get no CPU time at all.
//!
//! **A helper takes no lock that anybody else waits for.** It may be stopped at any instruction for as long as others want the CPU, so
//! it announces, hands over and notifies by atomics, and whatever needs a lock is done by others.

use super::board::{PLACES, Place};
use super::contention::Contention;
use super::cpus::Cpus;
use super::employer::{Employer, Task};
use super::eventcount::EventCount;
use super::governor::{Demand, worth_a_wake_up};
use super::job::GRAIN;
use super::kind::KINDS;
use super::left::LeftWork;
use super::operation::{OPERATIONS, Operation};
use super::quota::QuotaWatch;
use super::threads::{Helper, Starting, THREADS};
use crate::sys::sched::CpuSet;
use crate::sys::topology::Topology;
use crate::sys::{clock, membarrier, rseq};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The watcher comes soon if it looks by itself within this time.
const SOON_NS: u64 = 25_000_000;

/// The rate that is assumed before anything was measured: 10 GB/s.
const FIRST_RATE: usize = 10_000;

/// Whether helpers can be revoked: not known yet, yes, no, and no for good since a barrier failed.
const UNKNOWN: u32 = 0;
const WORKS: u32 = 1;
pub(super) const MISSING: u32 = 2;
const FAILED: u32 = 3;

pub(super) struct Shared<E> {
    pub(super) employer: E,
    // On the heap, and built there: the first large request may come from a thread with a stack of a few kilobytes.
    pub(super) places: Box<[Place]>,
    pub(super) helpers: Box<[Helper]>,
    /// Where the helpers of each kind listen, and where the watcher does.
    pub(super) events: [EventCount; KINDS],
    pub(super) watcher_events: Arc<EventCount>,
    pub(super) starting: Mutex<Starting>,
    pub(super) stop: AtomicBool,
    /// Bytes a microsecond of each operation, one thread, as last measured.
    pub(super) rates: [AtomicUsize; OPERATIONS],
    pub(super) limit: Option<usize>,
    pub(super) cpus: Cpus,
    pub(super) topology: Topology,
    pub(super) quota: QuotaWatch,
    /// Bytes of each operation that were put on the board without a wake-up.
    pub(super) pending: [AtomicUsize; OPERATIONS],
    pub(super) left: LeftWork,
    pub(super) contention: Contention,
    /// Whether helpers can be revoked: one of the constants above. Registered anew in a forked child.
    pub(super) revocation: AtomicU32,
}

/// A handle to the crew of an [`Employer`]. Dropping the last one outside a helper ends the helpers.
pub struct Crew<E: Employer> {
    pub(super) shared: Arc<Shared<E>>,
    pub(super) owner: bool,
}

/// Has no thread started while the process forks.
pub struct ForkGuard<'c> {
    starting: MutexGuard<'c, Starting>,
}

impl ForkGuard<'_> {
    /// From now on, no helper is started any more.
    pub fn no_more_helpers(&mut self) {
        self.starting.retry_ns = u64::MAX;
    }
}

/// A lock whose holder panicked is as good as any other: nothing here panics with a half-made change.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: Employer> Crew<E> {
    /// A crew without helpers yet; they come with the first large job. `limit` bounds their number. Helpers will run on `cpus`,
    /// which should be what the process was started with ([`with_offline`](crate::sys::sched::with_offline)): a program may pin the very thread that brings the work.
    pub fn new(employer: E, limit: Option<usize>, cpus: CpuSet, topology: Topology) -> Crew<E> {
        let shared = Shared {
            employer,
            places: (0..PLACES).map(|_| Place::new()).collect(),
            helpers: (0..THREADS).map(|_| Helper::new()).collect(),
            events: std::array::from_fn(|_| EventCount::new()),
            watcher_events: Arc::new(EventCount::new()),
            starting: Mutex::new(Starting::new()),
            stop: AtomicBool::new(false),
            rates: std::array::from_fn(|_| AtomicUsize::new(FIRST_RATE)),
            limit,
            cpus: Cpus::new(cpus, &topology),
            topology,
            quota: QuotaWatch::new(),
            pending: std::array::from_fn(|_| AtomicUsize::new(0)),
            left: LeftWork::new(),
            contention: Contention::new(),
            revocation: AtomicU32::new(UNKNOWN),
        };
        Crew { shared: Arc::new(shared), owner: true }
    }

    /// The employer.
    pub fn employer(&self) -> &E {
        &self.shared.employer
    }

    /// What the watcher listens to: for an employer that has to call it from where it has no crew at hand, as from a signal handler.
    pub(crate) fn watcher_events(&self) -> Arc<EventCount> {
        self.shared.watcher_events.clone()
    }

    /// The machine's nodes, as the crew sees them.
    pub fn topology(&self) -> &Topology {
        &self.shared.topology
    }

    /// Does `task` and returns when it is done, with the calling thread taking part and not waiting for helpers that don't run.
    /// A range that was discarded may still have a straggler at it: it belongs to the employer again when
    /// [`Employer::finished`] says so, which may be later than the return.
    ///
    /// # Safety
    /// The range is mapped read-write and, unless the operation is [`Operation::Populate`], nobody else uses it: until the return,
    /// and in the case of [`Operation::Discard`] until it was reported as finished.
    pub unsafe fn run(&self, task: Task) {
        let begin = clock::now_ns();
        // SAFETY: by the function's own contract.
        unsafe { self.run_with(task) };
        self.count_wait(begin);
    }

    pub(super) unsafe fn run_with(&self, task: Task) {
        let place = self.worth_sharing(&task).then(|| self.open(task, true)).flatten();
        let Some(place) = place else {
            // SAFETY: by the caller's contract.
            unsafe { self.run_alone(task) };
            return;
        };
        self.call(task.range.len, task.operation);
        // SAFETY: this thread has published the task and is inside the job.
        let task = unsafe { *place.task.get() };
        while let Some(chunk) = place.job.take(self.chunk(place, task.operation), None) {
            // SAFETY: by the caller's contract, and a chunk is taken by one thread alone.
            unsafe { self.perform(place, &task, chunk, None) };
        }
        // SAFETY: as above.
        unsafe { self.pass_stragglers(place, &task) };
        self.leave(place, task);
    }

    /// Does `task` on the calling thread.
    unsafe fn run_alone(&self, task: Task) {
        // SAFETY: by the caller's contract.
        unsafe { task.operation.perform(task.range, None) };
        self.count(task.operation, task.range.len, self.on_watcher(), 0);
        if task.report {
            self.employer().finished(task);
        }
    }

    /// Whether `task`, with what was left before it, is worth a wake-up.
    fn worth_calling(&self, task: &Task) -> bool {
        let index = task.operation.index();
        let pending = &self.shared.pending[index];
        let bytes = pending.fetch_add(task.range.len, Ordering::Relaxed) + task.range.len;
        let worth = worth_a_wake_up(Demand { bytes, rate: self.shared.rates[index].load(Ordering::Relaxed) });
        if worth {
            pending.store(0, Ordering::Relaxed);
        }
        worth
    }

    /// Puts `task` on the board for the helpers, or for the watcher's next look if it is small, and returns at once; the employer will hear when it is finished. Without room on
    /// the board or helpers, it is done here and now.
    ///
    /// # Safety
    /// As [`Crew::run`], until it was reported as finished.
    pub unsafe fn submit(&self, task: Task) {
        if !self.worth_calling(&task) {
            let soon = clock::now_ns() + SOON_NS;
            if !self.shared.left.is_due(soon) || self.open(task, false).is_none() {
                // SAFETY: by the function's own contract.
                unsafe { self.run_alone(task) };
            } else if !self.shared.left.leave(soon) {
                // It has gone to rest meanwhile.
                self.notify_watcher();
            }
            return;
        }
        let place = if self.shared.limit == Some(0) { None } else { self.open(task, false) };
        if place.is_none() || !self.call(task.range.len, task.operation) {
            // SAFETY: by the function's own contract. Where the task is on the board already, its chunks are taken there.
            unsafe {
                match place {
                    None => self.run_with(task),
                    Some(place) => {
                        if place.job.enter() {
                            let task = *place.task.get();
                            while let Some(chunk) = place.job.take(self.chunk(place, task.operation), None) {
                                self.perform(place, &task, chunk, None);
                            }
                            self.leave(place, task);
                        }
                    }
                }
            }
        }
    }

    /// Takes chunks of open jobs of `operation` for which nobody waits until `enough` says so or none is left; where somebody waits,
    /// he is at it himself. Returns whether it did anything.
    pub fn assist(&self, operation: Operation, enough: impl FnMut() -> bool) -> bool {
        self.assist_with(|other| other == operation, enough)
    }

    pub(super) fn assist_with(&self, wanted: impl Fn(Operation) -> bool, mut enough: impl FnMut() -> bool) -> bool {
        let begin = clock::now_ns();
        let mut helped = false;
        self.collect();
        for place in &self.shared.places {
            if enough() {
                break;
            }
            if !place.job.has_chunks() || !place.job.enter() {
                continue;
            }
            // SAFETY: this thread is inside the job.
            let task = unsafe { *place.task.get() };
            if wanted(task.operation) && !place.waiting.load(Ordering::Relaxed) {
                while !enough()
                    && let Some(chunk) = place.job.take(self.chunk(place, task.operation), None)
                {
                    // SAFETY: whoever published the task gave the range to the crew, and a chunk is taken by one thread alone.
                    unsafe { self.perform(place, &task, chunk, None) };
                    helped = true;
                }
            }
            self.leave(place, task);
        }
        if helped {
            self.count_wait(begin);
        }
        helped
    }

    /// Bytes of open jobs of `operation` that nobody has taken yet, and for whose end nobody waits.
    pub fn backlog(&self, operation: Operation) -> usize {
        self.untaken(operation, |place| !place.waiting.load(Ordering::Relaxed))
    }

    /// Bytes of open jobs of `operation` that nobody has taken yet, of those jobs that are `wanted`.
    pub(super) fn untaken(&self, operation: Operation, wanted: impl Fn(&Place) -> bool) -> usize {
        let open = |place: &&Place| place.job.has_chunks() && wanted(place) && place.job.enter();
        let left = |place: &Place| {
            // SAFETY: this thread is inside the job.
            let task = unsafe { *place.task.get() };
            let left = if task.operation == operation { place.job.left() * GRAIN } else { 0 };
            self.leave(place, task);
            left.min(task.range.len)
        };
        self.shared.places.iter().filter(open).map(left).sum()
    }

    /// Tells the employer what helpers have finished.
    pub fn collect(&self) {
        for place in self.shared.places.iter().filter(|place| place.job.take_over()) {
            // SAFETY: this thread has taken the place over, so it is nobody else's.
            let task = unsafe { *place.task.get() };
            place.job.release();
            self.employer().finished(task);
        }
    }

    /// Whether others want the CPUs, so that helpers keep away for a while.
    pub fn contended(&self) -> bool {
        self.shared.contention.now() || self.shared.quota.helpers() == 0
    }

    /// The threads that wanted the CPUs have been stopped.
    pub fn uncontended(&self) {
        self.shared.contention.over();
    }

    /// Whether a helper can be stopped in the middle of zeroing, so that nobody ever waits for it.
    pub fn revocation(&self) -> bool {
        match self.shared.revocation.load(Ordering::Relaxed) {
            UNKNOWN => {
                let works = rseq::prepare().is_ok() && membarrier::register().is_ok();
                let known = if works { WORKS } else { MISSING };
                // A barrier may fail meanwhile, which must not be forgotten.
                let change =
                    self.shared.revocation.compare_exchange(UNKNOWN, known, Ordering::Relaxed, Ordering::Relaxed);
                works && change != Err(FAILED)
            }
            known => known == WORKS,
        }
    }

    /// A barrier has failed: from now on, helpers can't be revoked, in this process and in those that it forks.
    pub fn revocation_failed(&self) {
        self.shared.revocation.store(FAILED, Ordering::Relaxed);
    }

    /// Whether the crew's lock is held by nobody at this moment.
    pub fn unlocked(&self) -> bool {
        self.shared.starting.try_lock().is_ok()
    }

    /// Has no thread started until the guard is dropped, for `fork`.
    pub fn hold_for_fork(&self) -> ForkGuard<'_> {
        ForkGuard { starting: lock(&self.shared.starting) }
    }

    /// Makes the crew of a forked child a new one: no helpers, an empty board. Jobs that were open in the parent are forgotten.
    ///
    /// # Safety
    /// Called in the child by its only thread, after the guard of [`Crew::hold_for_fork`] was dropped.
    pub unsafe fn forget_helpers(&self) {
        let shared = &self.shared;
        let mut starting = lock(&shared.starting);
        for handle in &mut starting.handles {
            // Not joined or detached: the thread does not exist here, and libc would touch its former stack.
            *handle = None;
        }
        starting.retry_ns = 0;
        shared.events.iter().for_each(EventCount::reset);
        shared.watcher_events.reset();
        shared.helpers.iter().for_each(|helper| {
            helper.thread.store(0, Ordering::Relaxed);
            helper.at_work.store(false, Ordering::Relaxed);
        });
        shared.stop.store(false, Ordering::Relaxed);
        shared.contention.over();
        shared.left.reset();
        shared.quota.reset();
        shared.places.iter().for_each(|place| place.job.reset());
        if shared.revocation.load(Ordering::Relaxed) != FAILED {
            shared.revocation.store(UNKNOWN, Ordering::Relaxed);
        }
    }
}

impl<E: Employer> Drop for Crew<E> {
    fn drop(&mut self) {
        if self.owner {
            self.dismiss();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::employer::Idle;
    use super::*;
    use crate::sys::memory::{Protection, Range, map, unmap};
    use crate::sys::stop_on_drop::StopOnDrop;
    use crate::sys::{pagemap, sched};
    use std::time::Duration;

    fn crew(limit: Option<usize>) -> Crew<Idle> {
        Crew::new(Idle::new().unwrap(), limit, sched::affinity().unwrap(), Topology::read())
    }

    fn filled(len: usize) -> Range {
        let range = Range { start: map(len, Protection::ReadWrite).unwrap(), len };
        bytes(range).fill(0xa5);
        range
    }

    fn bytes(range: Range) -> &'static mut [u8] {
        // SAFETY: the tests' own mappings, used by one thread at a time.
        unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len) }
    }

    fn task(operation: Operation, range: Range) -> Task {
        Task { operation, range, node: 0, report: false }
    }

    #[test]
    fn a_range_is_zeroed_whole_with_and_without_helpers() {
        for limit in [Some(0), Some(1), Some(4), None] {
            let crew = crew(limit);
            let range = filled(96 << 20);
            for round in 0..5 {
                // SAFETY: the range is this test's.
                unsafe { crew.run(task(Operation::Zero, range)) };
                assert!(bytes(range).iter().all(|&byte| byte == 0), "limit {limit:?}, round {round}");
                bytes(range).fill(0xa5);
            }
            // SAFETY: the test is done with it.
            unsafe { unmap(range).unwrap() };
        }
    }

    #[test]
    fn discarded_memory_is_back_when_the_call_returns() {
        let crew = crew(None);
        let range = filled(256 << 20);
        // Other tests of this process allocate too, so only this range counts.
        let present = || pagemap::bytes_of(range, pagemap::Category::Present).unwrap();
        assert_eq!(present(), range.len);
        // SAFETY: the range is this test's, which does not use it again.
        unsafe { crew.run(task(Operation::Discard, range)) };
        assert_eq!(present(), 0);
    }

    #[test]
    fn without_helpers_a_submitted_job_is_done_at_once() {
        let crew = crew(Some(0));
        let range = filled(8 << 20);
        // SAFETY: the range is this test's.
        unsafe { crew.submit(task(Operation::Zero, range)) };
        assert!(bytes(range).iter().all(|&byte| byte == 0));
        assert_eq!(crew.helper_threads().count(), 0);
    }

    /// What is less than a wake-up is worth is done at once, or by the watcher if that comes soon; no helper is started for it.
    #[test]
    fn little_work_calls_nobody() {
        let crew = crew(None);
        let (range, wait) = (filled(1 << 20), Duration::from_millis(1));
        let zeroed = || bytes(range).iter().all(|&byte| byte == 0);
        // SAFETY: the range is this test's.
        unsafe { crew.submit(task(Operation::Zero, range)) };
        assert!(zeroed() && crew.helper_threads().count() == 0);

        bytes(range).fill(0xa5);
        assert!(crew.watch());
        while crew.shared.helpers[super::super::threads::WATCHER].at_work.load(Ordering::Relaxed) {
            std::thread::sleep(wait);
        }
        // As if it had said that it looks in a moment.
        crew.shared.left.rest(clock::now_ns() + SOON_NS);
        // SAFETY: as above; the end is waited for below.
        unsafe { crew.submit(task(Operation::Zero, range)) };
        assert!(crew.backlog(Operation::Zero) == range.len && crew.shared.left.is_there());
        assert!(crew.notify_watcher());
        while !crew.shared.places.iter().all(|place| place.job.is_free()) {
            std::thread::sleep(wait);
        }
        assert!(zeroed() && crew.counters().helper_starts.get() == 0);
    }

    #[test]
    fn much_little_work_is_worth_a_call() {
        let crew = crew(None);
        let range = filled(1 << 20);
        let mut calls = 0;
        for _ in 0..200 {
            calls += usize::from(crew.worth_calling(&task(Operation::Zero, range)));
        }
        // Ten megabytes each, at the rate that is assumed at first.
        assert_eq!(calls, 20);
    }

    #[test]
    fn more_jobs_than_places_are_all_done() {
        let crew = crew(None);
        let ranges: Vec<_> = (0..3 * PLACES).map(|_| filled(1 << 20)).collect();
        for &range in &ranges {
            // SAFETY: the range is this test's, which waits for the end below.
            unsafe { crew.submit(task(Operation::Zero, range)) };
        }
        crew.assist(Operation::Zero, || false);
        let deadline = clock::now_ns() + 60_000_000_000;
        while ranges.iter().any(|&range| bytes(range).iter().any(|&byte| byte != 0)) {
            assert!(clock::now_ns() < deadline, "not done after a minute");
            std::thread::yield_now();
        }
    }

    /// CPU-bound threads on every core, so that helpers hardly run: the caller must not be held back by them.
    #[test]
    fn a_caller_is_not_held_back_by_helpers_that_do_not_run() {
        let crew = crew(None);
        let range = filled(64 << 20);
        let alone = {
            let begin = clock::now_ns();
            // SAFETY: the range is this test's.
            unsafe { crate::crew::zero::zero(range, crate::crew::zero::Use::Later) };
            clock::now_ns() - begin
        };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = StopOnDrop(&stop);
            for _ in 0..sched::affinity().unwrap().count() {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop()
                    }
                });
            }
            let mut times: Vec<u64> = (0..21)
                .map(|_| {
                    bytes(range).fill(0xa5);
                    crew.shared.contention.over();
                    let begin = clock::now_ns();
                    // SAFETY: the range is this test's.
                    unsafe { crew.run(task(Operation::Zero, range)) };
                    let took = clock::now_ns() - begin;
                    assert!(bytes(range).iter().all(|&byte| byte == 0));
                    took
                })
                .collect();
            drop(running);
            times.sort_unstable();
            // The caller has at least half a CPU; a helper of the idle class that it waited for would cost it hundreds of ms.
            assert!(times[10] < 6 * alone + 30_000_000, "alone {alone} ns, beside bystanders {times:?}");
        });
    }

    #[test]
    fn helpers_that_zero_work_in_the_idle_class_and_without_signals() {
        let crew = crew(None);
        // Other tests may take the CPUs for longer than this one waits.
        crew.shared.contention.disregard();
        let range = filled(64 << 20);
        let deadline = clock::now_ns() + 60_000_000_000;
        let class = |thread| {
            // SAFETY: takes a thread number and returns a policy.
            unsafe { libc::sched_getscheduler(thread) }
        };
        let helper = |thread: &i32| {
            let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
            name.starts_with("pagecrew/") && name != "pagecrew/watch\n"
        };
        let mut worked_idle = false;
        while !worked_idle {
            assert!(clock::now_ns() < deadline, "no helper was seen at work within a minute");
            // SAFETY: the range is this test's, which waits for the end below.
            unsafe { crew.submit(task(Operation::Zero, range)) };
            while crew.shared.places.iter().any(|place| place.job.has_chunks()) && clock::now_ns() < deadline {
                worked_idle |= crew.helper_threads().any(|thread| thread > 0 && class(thread) == libc::SCHED_IDLE);
            }
            crew.shared.contention.over();
        }
        for thread in crew.helper_threads().filter(helper) {
            let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
            // Everything but SIGKILL, SIGSTOP and the two numbers that glibc keeps for itself.
            assert_eq!(u64::from_str_radix(blocked, 16).unwrap() | 0x1_8004_0100, u64::MAX, "{blocked}");
        }
        // With nothing to do, one either sleeps in the ordinary class or ends soon: else the process could not end.
        while crew.helper_threads().any(|thread| thread < 0 || class(thread) == libc::SCHED_IDLE) {
            assert!(clock::now_ns() < deadline, "a helper without work stays in the idle class");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Here whoever waits takes no part himself, as if he got no CPU time: all of it is theirs. So this needs a CPU that has time to spare within a minute;
    /// without one, whoever waits does the work.
    #[test]
    fn helpers_that_were_turned_away_come_back_to_a_job_that_somebody_waits_for() {
        let crew = crew(None);
        if crew.shared.cpus.now().count() < 2 {
            return;
        }
        let range = filled(256 << 20);
        let place = crew.open(task(Operation::Discard, range), true).unwrap();
        crew.shared.contention.taken();
        crew.shared.left.leave(0);
        assert!(crew.watch());
        let deadline = clock::now_ns() + 60_000_000_000;
        while place.job.has_chunks() {
            assert!(clock::now_ns() < deadline, "{} bytes are left", place.job.left() * GRAIN);
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: this thread has published the task and is inside the job.
        unsafe { crew.pass_stragglers(place, &*place.task.get()) };
        // SAFETY: as above.
        crew.leave(place, unsafe { *place.task.get() });
        assert_eq!(pagemap::bytes_of(range, pagemap::Category::Present).unwrap(), 0);
    }

    /// Threads on every CPU and more: helpers keep away, and the work is done all the same.
    #[test]
    fn work_left_to_others_is_done_by_the_watcher() {
        let crew = crew(None);
        let range = filled(64 << 20);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = StopOnDrop(&stop);
            for _ in 0..2 * sched::online_cpus() {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop()
                    }
                });
            }
            // SAFETY: the range is this test's, which waits for the end below.
            unsafe { crew.submit(task(Operation::Zero, range)) };
            let deadline = clock::now_ns() + 60_000_000_000;
            while !crew.shared.places.iter().all(|place| place.job.is_free()) {
                assert!(clock::now_ns() < deadline, "not done after a minute");
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(running);
            assert!(bytes(range).iter().all(|&byte| byte == 0));
            assert!(crew.counters().turned_away.get() > 0);
        });
    }
}
