//! What is done to files that users have, where that may take as long as a user likes.
//!
//! Whoever has a file open can keep the kernel's lock of it for as long as he wants: a `write` to it holds the lock while it waits for its
//! source, which may be a file of a file system in user space that never answers. Whoever wants to change the file's owner, mode or length
//! then waits, and can't be killed meanwhile. So that is done here, by threads that are of no use to anybody else: up to [`THREADS`] for the
//! files of an owner, and what more there is to do to his files waits for them.
//!
//! **Life of a thread.** It is started for an errand, does what has waited meanwhile, and ends. It has a table of files of its own, with
//! nothing in it: a server that was killed lets go of its lock and its socket even if such a thread of its is still waiting (from Linux 5.9
//! on; before, the lock stays). So an errand opens what it needs by its path, and has nothing of the server's but memory.

use crate::sys::thread;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So many of an owner's files can be held up before his others are.
const THREADS: usize = 8;
/// So many errands of one owner are kept; further ones are refused.
const KEPT: usize = 1024;
/// What a thread needs of a stack.
const STACK: usize = 64 << 10;

type Bell = Box<dyn Fn() + Send>;
type Errand<T> = Box<dyn FnOnce() -> T + Send>;

/// An owner of files to which something is being done.
struct Owner<T> {
    threads: usize,
    waiting: VecDeque<Errand<T>>,
}

struct Common<T> {
    owners: Mutex<HashMap<u32, Owner<T>>>,
    /// What errands have come to.
    done: Mutex<VecDeque<T>>,
    /// Called when there is one more of these.
    bell: Mutex<Option<Bell>>,
}

/// See the module. An errand comes to a `T`.
pub(super) struct Errands<T>(Arc<Common<T>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + 'static> Errands<T> {
    pub fn new() -> Errands<T> {
        let (owners, done) = (Mutex::new(HashMap::new()), Mutex::new(VecDeque::new()));
        Errands(Arc::new(Common { owners, done, bell: Mutex::new(None) }))
    }

    /// Has `bell` called each time when an errand is done, or nothing from now on. It is called by threads that have none of the process's
    /// files, so it must neither use nor close any.
    pub fn on_done(&self, bell: Option<Bell>) {
        *lock(&self.0.bell) = bell;
    }

    /// Has `errand` done to a file of `owner`'s, now or after others: [`Errands::next_done`] has what it comes to. Returns whether it will be
    /// done: not where there is no thread to be had, or too much is held up.
    pub fn run(&self, owner: u32, errand: impl FnOnce() -> T + Send + 'static) -> bool {
        let mut owners = lock(&self.0.owners);
        let of = match owners.entry(owner) {
            Entry::Occupied(of) => of.into_mut(),
            Entry::Vacant(place) => place.insert(Owner { threads: 0, waiting: VecDeque::new() }),
        };
        if of.waiting.len() == KEPT {
            return false;
        }
        of.waiting.push_back(Box::new(errand));
        if of.threads == THREADS {
            return true;
        }
        let common = self.0.clone();
        let builder = std::thread::Builder::new().name("pool-errands".into()).stack_size(STACK);
        if builder.spawn(move || common.work(owner)).is_ok() {
            of.threads += 1;
        } else if of.threads == 0 {
            owners.remove(&owner);
            return false;
        }
        true
    }

    /// What the next errand has come to that is done.
    pub fn next_done(&self) -> Option<T> {
        lock(&self.0.done).pop_front()
    }

    /// Waits until all errands are done, but no longer than that.
    pub fn settle(&self, most: Duration) {
        let until = Instant::now() + most;
        while !lock(&self.0.owners).is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl<T> Common<T> {
    /// The life of a thread.
    fn work(&self, owner: u32) {
        let _ = thread::leave_descriptors();
        let next = || {
            let mut owners = lock(&self.owners);
            let of = owners.get_mut(&owner)?;
            let errand = of.waiting.pop_front();
            if errand.is_none() {
                of.threads -= 1;
                if of.threads == 0 {
                    owners.remove(&owner);
                }
            }
            errand
        };
        while let Some(errand) = next() {
            let done = errand();
            lock(&self.done).push_back(done);
            if let Some(bell) = &*lock(&self.bell) {
                bell();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = found() {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn each_is_done_once_and_heard_of() {
        let errands = Errands::new();
        let rung = Arc::new(AtomicUsize::new(0));
        let bell = rung.clone();
        errands.on_done(Some(Box::new(move || _ = bell.fetch_add(1, Ordering::SeqCst))));
        for number in 0..200 {
            assert!(errands.run(number % 3, move || number));
        }
        errands.settle(Duration::from_secs(20));
        let mut done: Vec<u32> = std::iter::from_fn(|| errands.next_done()).collect();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..200) && rung.load(Ordering::SeqCst) == 200);
        assert!(lock(&errands.0.owners).is_empty());
    }

    #[test]
    fn files_that_are_held_up_hold_up_nothing_but_many_others_of_their_owner() {
        let errands = Errands::new();
        let gate = Arc::new(Barrier::new(THREADS + 1));
        for number in 0..THREADS {
            let gate = gate.clone();
            assert!(errands.run(7, move || {
                gate.wait();
                number
            }));
            if number < THREADS - 1 {
                assert!(errands.run(7, || 100));
                assert_eq!(eventually("one is held up, and the next one isn't", || errands.next_done()), 100);
            }
        }
        // What is kept is bounded.
        eventually("all threads are at one", || lock(&errands.0.owners)[&7].waiting.is_empty().then_some(()));
        (0..KEPT).for_each(|_| assert!(errands.run(7, || 200)));
        assert!(!errands.run(7, || 300));
        assert!(errands.run(8, || 400));
        assert_eq!(eventually("another owner's is done", || errands.next_done()), 400);
        errands.settle(Duration::from_millis(5));
        assert_eq!(errands.next_done(), None);
        gate.wait();
        let mut done = Vec::new();
        eventually("all are done", || {
            done.extend(errands.next_done());
            (done.len() == THREADS + KEPT).then_some(())
        });
        assert_eq!(done.iter().filter(|&&done| done == 200).count(), KEPT);
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_open() {
        let errands = Errands::new();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let gate = Arc::new(Barrier::new(2));
        let of_thread = gate.clone();
        let opens = || File::open("/proc/self/stat").is_ok();
        assert!(errands.run(7, move || {
            of_thread.wait();
            opens()
        }));
        // The thread is there, and shared both ends.
        let parted = |task: std::path::PathBuf| {
            std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "pool-errands")
                && std::fs::read_dir(task.join("fd")).is_ok_and(|files| files.count() == 0)
        };
        eventually("the thread has parted", || {
            let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            tasks.any(|task| parted(task.path())).then_some(())
        });
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        gate.wait();
        assert!(eventually("the errand is done", || errands.next_done()), "it opens what it needs");
    }
}
