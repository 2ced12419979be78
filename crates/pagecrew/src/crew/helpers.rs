//! The crew: a board of jobs, the helper threads that work on it, and a watcher.
//!
//! Helpers do the heavy work in the idle class, on CPUs that nobody else wants. The watcher does next to nothing, in the
//! ordinary class: it looks at the signals, tells the employer what helpers have finished, and sees to it that what the employer
//! keeps stays within its bounds even where helpers get no CPU time at all.
//!
//! **A helper takes no lock that anybody else waits for.** It may be stopped at any instruction for as long as others want the CPU, so
//! it announces, hands over and rings by atomics, and whatever needs a lock is done by others.

use super::bell::Bell;
use super::boost::Boost;
use super::contention::{Contention, Found};
use super::governor::{Demand, MAX_HELPERS, Means, chunk_bytes, helpers_wanted};
use super::job::{Chunk, GRAIN, Job, Left};
use super::operation::{Bypass, OPERATIONS, Operation};
use crate::stats::{Counters, StatsPage};
use crate::sys::memory::Range;
use crate::sys::sched::{self, Class, CpuSet};
use crate::sys::thread::{self, Thread};
use crate::sys::topology::Topology;
use crate::sys::{cgroup, clock, membarrier, rseq};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Jobs that can be open at a time. More than that are done by whoever brings them.
const PLACES: usize = 64;

/// A helper without work ends after this long.
const LINGER: Duration = Duration::from_secs(30);
/// And after this long where it has to stay in the idle class: a process can't end before such a thread has had its turn.
const LINGER_IDLE: Duration = Duration::from_millis(50);
/// While the CPUs are others', the watcher does a chunk of what was left this often: a twentieth of its time. What can't wait that long,
/// the employer sees to.
const LEFT_NS: u64 = 50_000;
const LEFT_PAUSE: Duration = Duration::from_millis(4);

/// How long a waiting caller gives helpers to end their last chunks before it takes them over: twice a chunk's usual time.
const PATIENCE_NS: u64 = 200_000;

/// The rate that is assumed before anything was measured: 10 GB/s.
const FIRST_RATE: usize = 10_000;

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

/// The watcher's place among the crew's threads, behind the helpers'.
const WATCHER: usize = MAX_HELPERS;
/// Threads that the crew may have.
const THREADS: usize = MAX_HELPERS + 1;

/// Time slices of the watcher: as short as can be (6.12).
const WATCHER_SLICE_NS: u64 = 100_000;

/// What others may know of one of the crew's threads.
struct Helper {
    /// Its kernel thread number; 0 when there is no such helper.
    thread: AtomicI32,
    /// An address in its stack.
    stack: AtomicUsize,
    boost: Boost,
    /// Whether it works or is about to.
    at_work: AtomicBool,
}

/// What starting threads takes. Only threads that start some hold its lock.
struct Starting {
    /// A thread could not be started; not tried again before this time.
    retry_ns: u64,
    handles: [Option<Thread>; THREADS],
}

struct Place {
    job: Job<MAX_HELPERS>,
    /// Written by whoever claimed the place before it is published; read by those inside.
    task: UnsafeCell<Task>,
    /// Whether a caller waits for the end, which makes chunks short.
    waiting: AtomicBool,
}

// SAFETY: `task` is written only in the phase `Setup`, which one thread owns; it is read only by threads inside the job, which
// they enter after its publication. The phase is changed with release and acquire ordering.
unsafe impl Sync for Place {}

struct Shared<E> {
    employer: E,
    // On the heap, and built there: the first large request may come from a thread with a stack of a few kilobytes.
    places: Box<[Place]>,
    helpers: Box<[Helper]>,
    /// Where helpers listen, and where the watcher does.
    bell: Bell,
    watcher_bell: Bell,
    starting: Mutex<Starting>,
    stop: AtomicBool,
    /// Bytes a microsecond of each operation, one thread, as last measured.
    rates: [AtomicUsize; OPERATIONS],
    limit: Option<usize>,
    cpus: CpuSet,
    topology: Topology,
    quota_milli: AtomicU64,
    contention: Contention,
    /// Whether helpers can be revoked: 0 unknown, 1 yes, 2 no. Registered anew in a forked child.
    revocation: AtomicU32,
}

/// A handle to the crew of an [`Employer`]. Dropping the last one outside a helper ends the helpers.
pub struct Crew<E: Employer> {
    shared: Arc<Shared<E>>,
    owner: bool,
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
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const NO_QUOTA: u64 = u64::MAX;

impl<E: Employer> Crew<E> {
    /// A crew without helpers yet; they come with the first large job. `limit` bounds their number. Helpers will run on `cpus`,
    /// which should be what the process was started with: a program may pin the very thread that brings the work.
    pub fn new(employer: E, limit: Option<usize>, cpus: CpuSet, topology: Topology) -> Crew<E> {
        let task = Task { operation: Operation::Discard, range: Range { start: 0, len: 0 }, node: 0, report: false };
        let shared = Shared {
            employer,
            places: (0..PLACES)
                .map(|_| Place { job: Job::new(), task: UnsafeCell::new(task), waiting: AtomicBool::new(false) })
                .collect(),
            helpers: (0..THREADS)
                .map(|_| Helper {
                    thread: AtomicI32::new(0),
                    stack: AtomicUsize::new(0),
                    boost: Boost::new(),
                    at_work: AtomicBool::new(false),
                })
                .collect(),
            bell: Bell::new(),
            watcher_bell: Bell::new(),
            starting: Mutex::new(Starting { retry_ns: 0, handles: std::array::from_fn(|_| None) }),
            stop: AtomicBool::new(false),
            rates: std::array::from_fn(|_| AtomicUsize::new(FIRST_RATE)),
            limit,
            cpus,
            topology,
            quota_milli: AtomicU64::new(NO_QUOTA),
            contention: Contention::new(),
            revocation: AtomicU32::new(0),
        };
        Crew { shared: Arc::new(shared), owner: true }
    }

    /// The employer.
    pub fn employer(&self) -> &E {
        &self.shared.employer
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

    unsafe fn run_with(&self, task: Task) {
        let place = self.worth_sharing(&task).then(|| self.open(task, true)).flatten();
        let Some(place) = place else {
            // SAFETY: by the caller's contract.
            unsafe { task.operation.perform(task.range, None) };
            self.count(task.operation, task.range.len, self.on_watcher(), 0);
            if task.report {
                self.employer().finished(task);
            }
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

    /// Puts `task` on the board for the helpers and returns at once; the employer will hear when it is finished. Without room on
    /// the board or helpers, it is done here and now.
    ///
    /// # Safety
    /// As [`Crew::run`], until it was reported as finished.
    pub unsafe fn submit(&self, task: Task) {
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

    fn assist_with(&self, wanted: impl Fn(Operation) -> bool, mut enough: impl FnMut() -> bool) -> bool {
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
        let open =
            |place: &&Place| place.job.has_chunks() && !place.waiting.load(Ordering::Relaxed) && place.job.enter();
        let left = |place: &Place| {
            // SAFETY: this thread is inside the job.
            let task = unsafe { *place.task.get() };
            let left = if task.operation == operation { place.job.left() * GRAIN } else { 0 };
            self.leave(place, task);
            left.min(task.range.len)
        };
        self.shared.places.iter().filter(open).map(left).sum()
    }

    /// Wakes or starts helpers for `bytes` of work, or leaves it to the watcher while others want the CPUs. Returns whether there is
    /// somebody to do it.
    pub fn call(&self, bytes: usize, operation: Operation) -> bool {
        if self.shared.contention.now() && self.leave_to_watcher() {
            return true;
        }
        let demand = Demand { bytes, rate: self.shared.rates[operation.index()].load(Ordering::Relaxed) };
        let quota = self.shared.quota_milli.load(Ordering::Relaxed);
        let means = Means {
            cpus: self.shared.cpus.count(),
            quota_milli: (quota != NO_QUOTA).then_some(quota),
            limit: self.shared.limit,
        };
        let wanted = helpers_wanted(demand, means);
        if wanted == 0 {
            return false;
        }
        let listeners = self.shared.bell.ring(wanted);
        if listeners >= wanted {
            return true;
        }
        let mut starting = lock(&self.shared.starting);
        while self.shared.bell.listeners() < wanted && self.start_helper(&mut starting) {}
        self.shared.bell.listeners() > 0
    }

    /// Has the watcher look, now and then as [`Employer::watch`] says. Returns whether there is one.
    pub fn watch(&self) -> bool {
        self.ring_watcher() || self.start_watcher()
    }

    /// Has the watcher look, if there is one: what a helper may call.
    pub fn ring_watcher(&self) -> bool {
        // From now on it may want a CPU, and is none of those that helpers make room for.
        self.shared.helpers[WATCHER].at_work.store(true, Ordering::Relaxed);
        self.shared.watcher_bell.ring(1) > 0
    }

    /// Starts the watcher, if there is none. Returns whether there is one.
    fn start_watcher(&self) -> bool {
        if self.shared.limit == Some(0) {
            return false;
        }
        let mut starting = lock(&self.shared.starting);
        let bell = &self.shared.watcher_bell;
        bell.listeners() > 0 || self.start(&mut starting, WATCHER, bell, "pagecrew/watch".to_owned(), Crew::watch_over)
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

    /// Whether the crew's lock is held by nobody at this moment.
    pub fn unlocked(&self) -> bool {
        self.shared.starting.try_lock().is_ok()
    }

    /// Whether every thread has come as far as to say which thread it is.
    pub fn all_started(&self) -> bool {
        let deadline = clock::now_ns() + 10_000_000;
        while self.helper_threads().any(|thread| thread < 0) {
            if clock::now_ns() > deadline {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// The kernel thread numbers of the helpers and the watcher; -1 for one that is only just starting.
    pub fn helper_threads(&self) -> impl Iterator<Item = i32> + '_ {
        self.shared.helpers.iter().map(|helper| helper.thread.load(Ordering::Acquire)).filter(|&thread| thread != 0)
    }

    /// The stacks of the helpers and the watcher, thread-local storage included, with room to spare on both sides.
    pub fn helper_stacks(&self) -> impl Iterator<Item = Range> + '_ {
        let alive = |helper: &&Helper| helper.thread.load(Ordering::Acquire) != 0;
        self.shared.helpers.iter().filter(alive).map(|helper| {
            let inside = helper.stack.load(Ordering::Acquire);
            Range { start: inside.saturating_sub(2 * thread::STACK_SIZE), len: 4 * thread::STACK_SIZE }
        })
    }

    /// Whether others want the CPUs, so that helpers keep away for a while.
    pub fn contended(&self) -> bool {
        self.shared.contention.now()
    }

    /// The threads that wanted the CPUs have been stopped.
    pub fn uncontended(&self) {
        self.shared.contention.over();
    }

    /// Lets helpers that are at work have CPU time soon, where the user may: the process is about to end, which it can't before each of
    /// them has had some.
    pub fn hurry(&self) {
        let at_work = |&worker: &usize| self.shared.helpers[worker].at_work.load(Ordering::Relaxed);
        (0..MAX_HELPERS).filter(at_work).for_each(|worker| self.boost(worker));
    }

    /// Whether a helper can be stopped in the middle of zeroing, so that nobody ever waits for it.
    pub fn revocation(&self) -> bool {
        match self.shared.revocation.load(Ordering::Relaxed) {
            0 => {
                let works = rseq::prepare().is_ok() && membarrier::register().is_ok();
                self.shared.revocation.store(if works { 1 } else { 2 }, Ordering::Relaxed);
                works
            }
            known => known == 1,
        }
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
        shared.bell.reset();
        shared.watcher_bell.reset();
        shared.helpers.iter().for_each(|helper| {
            helper.thread.store(0, Ordering::Relaxed);
            helper.at_work.store(false, Ordering::Relaxed);
        });
        shared.contention.over();
        shared.contention.seen_to();
        shared.places.iter().for_each(|place| place.job.reset());
        shared.revocation.store(0, Ordering::Relaxed);
    }

    fn counters(&self) -> &Counters {
        self.shared.employer.counters()
    }

    /// Whether a waiting caller is better off with helpers.
    fn worth_sharing(&self, task: &Task) -> bool {
        let rate = self.shared.rates[task.operation.index()].load(Ordering::Relaxed).max(1);
        self.shared.limit != Some(0)
            && task.range.len / rate >= 200
            && self.shared.cpus.count() > 1
            && !self.shared.contention.now()
            && (task.operation.bypass() != Bypass::Revoke || self.revocation() || self.can_boost())
    }

    /// Opens a place for `task`; `None` if all are taken.
    fn open(&self, task: Task, waiting: bool) -> Option<&Place> {
        // Helpers hand over to it what they have finished, and what they have to leave.
        if (task.report || !waiting) && self.shared.watcher_bell.listeners() == 0 {
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
    fn chunk(&self, place: &Place, operation: Operation) -> usize {
        let rate = self.shared.rates[operation.index()].load(Ordering::Relaxed);
        let helpers = &self.shared.helpers[..MAX_HELPERS];
        let takers = 1 + helpers.iter().filter(|helper| helper.thread.load(Ordering::Relaxed) != 0).count();
        let waiting = place.waiting.load(Ordering::Relaxed);
        chunk_bytes(operation.grain(), rate, place.job.left() * GRAIN, takers, waiting) / GRAIN
    }

    /// Performs one chunk. Returns whether it was done whole.
    ///
    /// # Safety
    /// The calling thread is inside the job and took the chunk.
    unsafe fn perform(&self, place: &Place, task: &Task, chunk: Chunk, worker: Option<usize>) -> bool {
        let begin = chunk.start * GRAIN;
        let range = Range { start: task.range.start + begin, len: (chunk.len * GRAIN).min(task.range.len - begin) };
        let stoppable = worker.is_some() && task.operation.bypass() == Bypass::Revoke;
        let start = clock::now_ns();
        // SAFETY: the range was given to the crew, and this chunk of it to this thread.
        let whole = unsafe { task.operation.perform(range, stoppable.then(|| place.job.revoked())) };
        let took = clock::now_ns() - start;
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
    fn measure(&self, operation: Operation, bytes: usize, took_ns: u64) {
        let rate = &self.shared.rates[operation.index()];
        let now = bytes * 1000 / (took_ns.max(1000) as usize);
        rate.store(((rate.load(Ordering::Relaxed) + now) / 2).max(1), Ordering::Relaxed);
    }

    /// Whether the calling thread is the watcher, for whom no thread of the program waits.
    fn on_watcher(&self) -> bool {
        self.shared.helpers[WATCHER].thread.load(Ordering::Relaxed) == sched::thread_id()
    }

    /// Counts the time since `begin` as waited for, on a thread of the program.
    fn count_wait(&self, begin: u64) {
        if !self.on_watcher() {
            self.counters().caller_wait_ns.add(clock::now_ns() - begin);
        }
    }

    /// Counts `bytes`, by the crew's own threads or not; with a time, nobody waited for it.
    fn count(&self, operation: Operation, bytes: usize, background: bool, background_ns: u64) {
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

    /// Leaves a job as a thread that may take locks.
    fn leave(&self, place: &Place, task: Task) {
        if place.job.leave() == Left::Last {
            place.job.release();
            if task.report {
                self.employer().finished(task);
            }
        }
    }

    /// Leaves a job as a helper.
    fn leave_as_helper(&self, place: &Place, task: Task) {
        if place.job.leave() == Left::Open {
            return;
        }
        if !task.report {
            place.job.release();
            return;
        }
        place.job.hand_over();
        if !self.ring_watcher() {
            // No thread could be started for it.
            self.collect();
        }
    }

    /// Called by a waiting caller for whom no chunk is left: does what helpers still hold, without waiting for those that don't
    /// run.
    ///
    /// # Safety
    /// As [`Crew::run`]; the calling thread is inside the job.
    unsafe fn pass_stragglers(&self, place: &Place, task: &Task) {
        let holders = || (0..MAX_HELPERS).filter_map(|worker| Some((worker, place.job.held_by(worker)?)));
        let deadline = clock::now_ns() + PATIENCE_NS;
        while holders().next().is_some() && clock::now_ns() < deadline {
            std::hint::spin_loop();
        }
        if holders().next().is_none() {
            return;
        }
        self.shared.contention.taken();
        let mut bypass = task.operation.bypass();
        if bypass == Bypass::Revoke {
            place.job.revoked().store(1, Ordering::SeqCst);
            if !self.revocation() || membarrier::restart_sequences().is_err() {
                // Without the barrier the flag only stops a helper before its next chunk.
                bypass = Bypass::Wait;
            }
        }
        for (worker, chunk) in holders() {
            self.boost(worker);
            if bypass == Bypass::Wait {
                while place.job.held_by(worker) == Some(chunk) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                continue;
            }
            self.counters().stragglers_bypassed.add(1);
            // SAFETY: discarding twice is harmless while the range belongs to the job, which it does while this thread is inside;
            // a helper at zeroing was revoked and writes no more.
            unsafe { self.perform(place, task, chunk, None) };
        }
    }

    /// Whether this process may move a helper back to the ordinary class.
    fn can_boost(&self) -> bool {
        // SAFETY: geteuid takes nothing and cannot fail. The real answer comes from the kernel when it is tried.
        unsafe { libc::geteuid() == 0 }
    }

    /// Moves a helper to the ordinary class, so that it lets go soon of the kernel's locks that it may hold. An ordinary user is
    /// refused, and then it takes as long as it takes, with nobody waiting.
    fn boost(&self, worker: usize) {
        let helper = &self.shared.helpers[worker];
        let thread = helper.thread.load(Ordering::Acquire);
        if thread > 0 && helper.boost.up(|| sched::set_class(thread, Class::Normal).is_ok()) {
            self.counters().boosts.add(1);
        }
    }

    /// Starts one more helper. Returns whether that was possible.
    fn start_helper(&self, starting: &mut Starting) -> bool {
        let free = |&number: &usize| self.shared.helpers[number].thread.load(Ordering::Acquire) == 0;
        let Some(number) = (0..MAX_HELPERS).find(free) else { return false };
        let name = format!("pagecrew/{number}");
        let started = self.start(starting, number, &self.shared.bell, name, move |crew| crew.help(number));
        if started {
            self.counters().helper_starts.add(1);
        }
        started
    }

    /// Starts thread `number` of the crew, which listens at `bell` for all its `life`. Returns whether that was possible.
    fn start(
        &self,
        starting: &mut Starting,
        number: usize,
        bell: &Bell,
        name: String,
        life: impl FnOnce(&Crew<E>) + Send + 'static,
    ) -> bool {
        let now = clock::now_ns();
        if self.shared.stop.load(Ordering::Relaxed) || now < starting.retry_ns {
            return false;
        }
        bell.join();
        let place = &self.shared.helpers[number];
        // Marked as taken until the thread has written its own number.
        place.thread.store(-1, Ordering::Release);
        let crew = Crew { shared: self.shared.clone(), owner: false };
        let body = move || {
            let me = &crew.shared.helpers[number];
            let inside = 0u8;
            me.stack.store((&raw const inside) as usize, Ordering::Release);
            me.thread.store(sched::thread_id(), Ordering::Release);
            // The program's descriptors are its own: what this thread opens takes no number of theirs, and nobody closes it.
            let _ = thread::leave_descriptors();
            life(&crew);
        };
        match thread::spawn(name, body) {
            Ok(handle) => {
                // A former thread of this number has ended or is about to.
                if let Some(former) = starting.handles[number].replace(handle) {
                    former.detach();
                }
                true
            }
            Err(_) => {
                bell.unjoin();
                place.thread.store(0, Ordering::Release);
                starting.retry_ns = now + 1_000_000_000;
                false
            }
        }
    }

    /// The life of the watcher.
    fn watch_over(&self) {
        let _ = sched::set_affinity(&self.shared.cpus);
        // It has little to do and should come to it soon. Where the kernel doesn't know of slices, it comes a little later.
        let _ = sched::set_slice(WATCHER_SLICE_NS);
        let bell = &self.shared.watcher_bell;
        let mut last_work = clock::now_ns();
        let mut next_left = 0;
        let me = &self.shared.helpers[WATCHER];
        loop {
            me.at_work.store(true, Ordering::Relaxed);
            let heard = bell.hear();
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
            if over && bell.end(heard) {
                me.thread.store(0, Ordering::Release);
                return;
            }
            if !over && pause > Duration::ZERO {
                bell.sleep(heard, pause);
            }
        }
    }

    /// Sees to what helpers have left to those who want the CPUs: calls helpers once they need no longer keep away, and until then
    /// does a little of it. Returns whether there is more. Called by the watcher.
    fn see_to_what_was_left(&self, next_ns: &mut u64) -> bool {
        let contention = &self.shared.contention;
        if !contention.left() {
            return false;
        }
        let left = || self.shared.places.iter().filter(|place| place.job.has_chunks());
        if left().next().is_none() {
            contention.seen_to();
            return false;
        }
        let now = clock::now_ns();
        if contention.now() {
            if now >= *next_ns {
                self.assist_with(|_| true, || clock::now_ns() >= now + LEFT_NS);
                *next_ns = now + LEFT_PAUSE.as_nanos() as u64;
            }
            return true;
        }
        contention.seen_to();
        self.call(left().map(|place| place.job.left() * GRAIN).sum(), Operation::Discard);
        false
    }

    /// Whether there is a CPU for helper `number`, which is about to work.
    fn has_room(&self, number: usize, found: &mut Found, cpus: usize) -> bool {
        self.shared.helpers[number].at_work.store(true, Ordering::Relaxed);
        let at_work = |helper: &&Helper| helper.at_work.load(Ordering::Relaxed);
        // The watcher, too, which is often on its way back to sleep when a helper that it has called begins.
        let helpers = &self.shared.helpers;
        let room = self.shared.contention.leaves_room(found, cpus, || {
            (helpers.iter().filter(at_work).count(), helpers[..number].iter().filter(at_work).count())
        });
        if room || !self.leave_to_watcher() {
            return true;
        }
        self.counters().turned_away.add(1);
        false
    }

    /// Has the watcher see to what helpers leave. Returns whether there is a watcher.
    fn leave_to_watcher(&self) -> bool {
        self.shared.contention.leave();
        self.ring_watcher()
    }

    /// The life of helper `number`: it works in the idle class and sleeps in the ordinary one, where the user may go back to that.
    fn help(&self, number: usize) {
        let me = &self.shared.helpers[number];
        let node = number % self.shared.topology.nodes();
        self.settle_on(node);
        self.revocation();
        let cpus = sched::online_cpus();
        let (mut idle, mut found) = (false, Found::default());
        let mut quota_read = 0;
        let mut last_work = clock::now_ns();
        loop {
            let heard = self.shared.bell.hear();
            if clock::now_ns() >= quota_read + 10_000_000_000 {
                quota_read = clock::now_ns();
                self.shared.quota_milli.store(cgroup::cpu().map_or(NO_QUOTA, |cpu| cpu.quota_milli), Ordering::Relaxed);
            }
            if self.has_room(number, &mut found, cpus) {
                idle = idle || sched::set_class(0, Class::Idle).is_ok();
                let room = |found: &mut Found| self.has_room(number, found, cpus);
                if self.work_on_board(number, node, || room(&mut found)) || self.employer().work_ahead(self) {
                    last_work = clock::now_ns();
                    continue;
                }
            }
            me.at_work.store(false, Ordering::Relaxed);
            idle = idle && sched::set_class(0, Class::Normal).is_err();
            let linger = if idle { LINGER_IDLE } else { LINGER };
            let over =
                self.shared.stop.load(Ordering::SeqCst) || clock::now_ns() - last_work >= linger.as_nanos() as u64;
            if over && self.shared.bell.end(heard) {
                me.thread.store(0, Ordering::Release);
                return;
            }
            if !over {
                self.shared.bell.sleep(heard, linger);
            }
        }
    }

    /// Works on open jobs until none has chunks left or there is no `room` for it any more. Returns whether there was one.
    fn work_on_board(&self, number: usize, node: usize, mut room: impl FnMut() -> bool) -> bool {
        let me = &self.shared.helpers[number];
        let idle = || {
            let _ = sched::set_class(0, Class::Idle);
        };
        let mut worked = false;
        me.boost.down(idle);
        for prefer_own in [true, false] {
            for place in &self.shared.places {
                if !place.job.has_chunks() || !place.job.enter() {
                    continue;
                }
                // SAFETY: this thread is inside the job.
                let task = unsafe { *place.task.get() };
                if prefer_own && task.node != node && self.shared.topology.nodes() > 1 {
                    self.leave_as_helper(place, task);
                    continue;
                }
                while room()
                    && let Some(chunk) = place.job.take(self.chunk(place, task.operation), Some(number))
                {
                    worked = true;
                    // SAFETY: this thread is inside the job and took the chunk.
                    let whole = unsafe { self.perform(place, &task, chunk, Some(number)) };
                    me.boost.down(idle);
                    if !whole {
                        break;
                    }
                    place.job.done(number);
                }
                self.leave_as_helper(place, task);
            }
        }
        worked
    }

    /// Restricts the calling helper to the CPUs of its node that the process may use, or to all of those.
    fn settle_on(&self, node: usize) {
        let shared = &self.shared;
        let own = shared.topology.cpus(node).intersection(&shared.cpus);
        let cpus = if shared.topology.nodes() > 1 && own.count() > 0 { own } else { shared.cpus };
        let _ = sched::set_affinity(&cpus);
    }
}

impl<E: Employer> Drop for Crew<E> {
    fn drop(&mut self) {
        if !self.owner {
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.hurry();
        self.shared.bell.ring(THREADS);
        self.shared.watcher_bell.ring(1);
        let handles: Vec<_> = lock(&self.shared.starting).handles.iter_mut().filter_map(Option::take).collect();
        for handle in handles {
            handle.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};
    use crate::sys::procfs;

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
        let before = procfs::resident_bytes().unwrap();
        // SAFETY: the range is this test's, which does not use it again.
        unsafe { crew.run(task(Operation::Discard, range)) };
        let after = procfs::resident_bytes().unwrap();
        assert!(after + (200 << 20) < before, "{before} -> {after}");
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
            unsafe { crate::sys::zero::zero(range, crate::sys::zero::Use::Later) };
            clock::now_ns() - begin
        };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
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
            stop.store(true, Ordering::Relaxed);
            times.sort_unstable();
            // The caller has at least half a CPU; a helper of the idle class that it waited for would cost it hundreds of ms.
            assert!(times[10] < 6 * alone + 30_000_000, "alone {alone} ns, beside bystanders {times:?}");
        });
    }

    #[test]
    fn helpers_work_in_the_idle_class_and_without_signals() {
        let crew = crew(None);
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

    /// Threads on every CPU and more: helpers keep away, and the work is done all the same.
    #[test]
    fn work_left_to_others_is_done_by_the_watcher() {
        let crew = crew(None);
        let range = filled(64 << 20);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
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
            stop.store(true, Ordering::Relaxed);
            assert!(bytes(range).iter().all(|&byte| byte == 0));
            assert!(crew.counters().turned_away.get() > 0);
        });
    }
}
