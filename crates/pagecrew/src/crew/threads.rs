//! The crew's threads: starting and calling them, and what is known of them.

use super::boost::Boost;
use super::crew::{Crew, lock};
use super::employer::Employer;
use super::eventcount::EventCount;
use super::governor::{Demand, Means, helpers_wanted};
use super::kind::{Kind, WORKERS};
use super::operation::Operation;
use crate::sys::clock;
use crate::sys::memory::Range;
use crate::sys::sched::{self, Class};
use crate::sys::thread::{self, Thread};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

/// The watcher's place among the crew's threads, behind the helpers'.
pub(super) const WATCHER: usize = WORKERS;
/// Threads that the crew may have.
pub(super) const THREADS: usize = WORKERS + 1;

/// What others may know of one of the crew's threads.
pub(super) struct Helper {
    /// Its kernel thread number; 0 when there is no such helper.
    pub(super) thread: AtomicI32,
    /// An address in its stack.
    pub(super) stack: AtomicUsize,
    pub(super) boost: Boost,
    /// Whether it works or is about to.
    pub(super) at_work: AtomicBool,
}

/// What starting threads takes. Only threads that start some hold its lock.
pub(super) struct Starting {
    /// A thread could not be started; not tried again before this time.
    pub(super) retry_ns: u64,
    pub(super) handles: [Option<Thread>; THREADS],
}

impl Helper {
    pub fn new() -> Helper {
        Helper {
            thread: AtomicI32::new(0),
            stack: AtomicUsize::new(0),
            boost: Boost::new(),
            at_work: AtomicBool::new(false),
        }
    }
}

impl Starting {
    pub fn new() -> Starting {
        Starting { retry_ns: 0, handles: std::array::from_fn(|_| None) }
    }
}

impl<E: Employer> Crew<E> {
    /// Wakes or starts helpers for `bytes` of work, or leaves it to the watcher while others want the CPUs. Returns whether there is
    /// somebody to do it.
    pub fn call(&self, bytes: usize, operation: Operation) -> bool {
        if self.shared.contention.now() && self.leave_to_watcher() {
            return true;
        }
        let demand = Demand { bytes, rate: self.shared.rates[operation.index()].load(Ordering::Relaxed) };
        let means = Means {
            cpus: self.shared.cpus.now().count(),
            quota: self.shared.quota.helpers(),
            limit: self.shared.limit,
        };
        let wanted = helpers_wanted(demand, means);
        if wanted == 0 {
            return self.shared.limit != Some(0) && self.leave_to_watcher();
        }
        let kind = Kind::of(operation);
        let events = &self.shared.events[kind.index()];
        let listeners = events.notify(wanted);
        if listeners >= wanted {
            return true;
        }
        let mut starting = lock(&self.shared.starting);
        while events.listeners() < wanted && self.start_helper(&mut starting, kind) {}
        events.listeners() > 0
    }

    /// Has the watcher look, now and then as [`Employer::watch`] says. Returns whether there is one.
    pub fn watch(&self) -> bool {
        self.notify_watcher() || self.start_watcher()
    }

    /// Has the watcher look, if there is one: what a helper may call.
    pub fn notify_watcher(&self) -> bool {
        // From now on it may want a CPU, and is none of those that helpers make room for.
        self.shared.helpers[WATCHER].at_work.store(true, Ordering::Relaxed);
        self.shared.watcher_events.notify(1) > 0
    }

    /// Has the watcher see to what helpers leave. Returns whether there is a watcher.
    pub(super) fn leave_to_watcher(&self) -> bool {
        self.shared.left.leave(0);
        self.notify_watcher()
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

    /// Lets helpers that are at work have CPU time soon, where the user may: the process is about to end, which it can't before each of
    /// them has had some.
    pub fn boost_all(&self) {
        let at_work = |&worker: &usize| self.shared.helpers[worker].at_work.load(Ordering::Relaxed);
        (0..WORKERS).filter(at_work).for_each(|worker| self.boost(worker));
    }

    /// Whether this process may move a helper back to the ordinary class.
    pub(super) fn can_boost(&self) -> bool {
        // SAFETY: geteuid takes nothing and cannot fail. The real answer comes from the kernel when it is tried.
        unsafe { libc::geteuid() == 0 }
    }

    /// Moves a helper of the idle class to the ordinary one, so that it soon lets go of what it holds. An ordinary user is refused, and
    /// then it takes as long as it takes, with nobody waiting.
    pub(super) fn boost(&self, worker: usize) {
        let helper = &self.shared.helpers[worker];
        let thread = helper.thread.load(Ordering::Acquire);
        let idle = Kind::of_worker(worker) == Kind::Zeroer;
        if idle && thread > 0 && helper.boost.up(|| sched::set_class(thread, Class::Normal).is_ok()) {
            self.counters().boosts.add(1);
        }
    }

    /// Ends every thread of the crew and waits for that; none is started any more. What is left to do, callers do.
    pub fn dismiss(&self) {
        self.boost_all();
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.events.iter().for_each(|events| _ = events.notify(THREADS));
        self.shared.watcher_events.notify(1);
        let handles: Vec<_> = lock(&self.shared.starting).handles.iter_mut().filter_map(Option::take).collect();
        for handle in handles {
            handle.join();
        }
    }

    /// Starts the watcher, if there is none. Returns whether there is one.
    pub(super) fn start_watcher(&self) -> bool {
        if self.shared.limit == Some(0) {
            return false;
        }
        let mut starting = lock(&self.shared.starting);
        let events = &self.shared.watcher_events;
        events.listeners() > 0
            || self.start(&mut starting, WATCHER, events, "pagecrew/watch".to_owned(), Crew::watch_over)
    }

    /// Starts one more helper of `kind`. Returns whether that was possible.
    pub(super) fn start_helper(&self, starting: &mut Starting, kind: Kind) -> bool {
        let free = |&number: &usize| self.shared.helpers[number].thread.load(Ordering::Acquire) == 0;
        let Some(number) = kind.workers().find(free) else { return false };
        let name = format!("pagecrew/{number}");
        let started =
            self.start(starting, number, &self.shared.events[kind.index()], name, move |crew| crew.help(number));
        if started {
            self.counters().helper_starts.add(1);
        }
        started
    }

    /// Starts thread `number` of the crew, which listens at `events` for all its `life`. Returns whether that was possible.
    pub(super) fn start(
        &self,
        starting: &mut Starting,
        number: usize,
        events: &EventCount,
        name: String,
        life: impl FnOnce(&Crew<E>) + Send + 'static,
    ) -> bool {
        let now = clock::now_ns();
        if self.shared.stop.load(Ordering::Relaxed) || now < starting.retry_ns {
            return false;
        }
        events.join();
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
                events.unjoin();
                place.thread.store(0, Ordering::Release);
                starting.retry_ns = now + 1_000_000_000;
                false
            }
        }
    }
}
