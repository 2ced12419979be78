//! What is done to files that users have or had, where that may take as long as a user likes, or as his memory is large.
//!
//! Whoever has a file open can keep the kernel's lock of it for as long as he wants: a `write` to it holds the lock while it waits for its
//! source, which may be a file of a file system in user space that never answers. Whoever wants to change the file's owner, mode or length
//! then waits, and can't be killed meanwhile. So that is done here, by threads that are of no use to anybody else: up to [`THREADS`] for the
//! files of an owner, of an account up to [`THREADS_OF_ACCOUNT`], and what more there is to do to these waits for them. Giving the memory of a file back that nobody has any more is
//! nothing that he could hold up, but takes milliseconds for each GiB.
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
/// And so many of an account, on which the files of many owners may be (user namespaces).
const THREADS_OF_ACCOUNT: usize = 64;
/// So many errands of one owner are kept; further ones are refused.
const KEPT: usize = 1024;
/// What a thread needs of a stack.
const STACK: usize = 64 << 10;

type Bell = Box<dyn Fn() + Send>;
type Errand<T> = Box<dyn FnOnce() -> T + Send>;

/// An account to whose files something is being done.
struct Account<T> {
    threads: usize,
    owners: HashMap<u32, Owner<T>>,
}

/// An owner of some of them.
struct Owner<T> {
    /// Threads that are at a file of his.
    busy: usize,
    waiting: VecDeque<Errand<T>>,
}

impl<T> Account<T> {
    /// An errand that nothing of its owner's holds up, and whose it is.
    fn next(&mut self) -> Option<(u32, Errand<T>)> {
        let (&number, owner) = self.owners.iter_mut().find(|(_, of)| of.busy < THREADS && !of.waiting.is_empty())?;
        owner.busy += 1;
        owner.waiting.pop_front().map(|errand| (number, errand))
    }

    /// An errand of the owner's is done.
    fn done(&mut self, number: u32) {
        if let Entry::Occupied(mut owner) = self.owners.entry(number) {
            owner.get_mut().busy -= 1;
            if owner.get().busy == 0 && owner.get().waiting.is_empty() {
                owner.remove();
            }
        }
    }
}

struct Common<T> {
    accounts: Mutex<HashMap<u32, Account<T>>>,
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
        let (accounts, done) = (Mutex::new(HashMap::new()), Mutex::new(VecDeque::new()));
        Errands(Arc::new(Common { accounts, done, bell: Mutex::new(None) }))
    }

    /// Has `bell` called each time when an errand is done, or nothing from now on. It is called by threads that have none of the process's
    /// files, so it must neither use nor close any.
    pub fn on_done(&self, bell: Option<Bell>) {
        *lock(&self.0.bell) = bell;
    }

    /// Has `errand` done to a file of `owner`'s on an account, now or after others: [`Errands::next_done`] has what it comes to. Returns whether
    /// it will be done: not where there is no thread to be had, or too much is held up.
    pub fn run(&self, account: u32, owner: u32, errand: impl FnOnce() -> T + Send + 'static) -> bool {
        let mut accounts = lock(&self.0.accounts);
        let of = accounts.entry(account).or_insert_with(|| Account { threads: 0, owners: HashMap::new() });
        let his = of.owners.entry(owner).or_insert_with(|| Owner { busy: 0, waiting: VecDeque::new() });
        if his.waiting.len() == KEPT {
            return false;
        }
        his.waiting.push_back(Box::new(errand));
        // Whoever is at one of them goes on with this.
        if his.busy == THREADS || of.threads == THREADS_OF_ACCOUNT {
            return true;
        }
        let common = self.0.clone();
        let builder = std::thread::Builder::new().name("pool-errands".into()).stack_size(STACK);
        if builder.spawn(move || common.work(account)).is_ok() {
            of.threads += 1;
        } else if of.threads == 0 {
            accounts.remove(&account);
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
        while !lock(&self.0.accounts).is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl<T> Common<T> {
    /// The life of a thread.
    fn work(&self, account: u32) {
        let _ = thread::leave_descriptors();
        let mut last = None;
        while let Some((owner, errand)) = self.next(account, last) {
            last = Some(owner);
            let done = errand();
            lock(&self.done).push_back(done);
            if let Some(bell) = &*lock(&self.bell) {
                bell();
            }
        }
    }

    /// The thread's next errand, where its last one was one of `last`'s. With none, it ends.
    fn next(&self, account: u32, last: Option<u32>) -> Option<(u32, Errand<T>)> {
        let mut accounts = lock(&self.accounts);
        let of = accounts.get_mut(&account)?;
        if let Some(last) = last {
            of.done(last);
        }
        let next = of.next();
        if next.is_none() {
            of.threads -= 1;
            if of.threads == 0 {
                accounts.remove(&account);
            }
        }
        next
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
            assert!(errands.run(number % 2, number % 3, move || number));
        }
        errands.settle(Duration::from_secs(20));
        let mut done: Vec<u32> = std::iter::from_fn(|| errands.next_done()).collect();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..200) && rung.load(Ordering::SeqCst) == 200);
        assert!(lock(&errands.0.accounts).is_empty());
    }

    #[test]
    fn files_that_are_held_up_hold_up_nothing_but_many_others_of_their_owner() {
        let errands = Errands::new();
        let gate = Arc::new(Barrier::new(THREADS + 1));
        for number in 0..THREADS {
            let gate = gate.clone();
            assert!(errands.run(7, 7, move || {
                gate.wait();
                number
            }));
            if number < THREADS - 1 {
                assert!(errands.run(7, 7, || 100));
                assert_eq!(eventually("one is held up, and the next one isn't", || errands.next_done()), 100);
            }
        }
        // What is kept is bounded.
        eventually("all threads are at one", || {
            lock(&errands.0.accounts)[&7].owners[&7].waiting.is_empty().then_some(())
        });
        (0..KEPT).for_each(|_| assert!(errands.run(7, 7, || 200)));
        assert!(!errands.run(7, 7, || 300));
        assert!(errands.run(7, 8, || 400));
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
    fn an_account_with_many_owners_has_no_more_threads_than_others() {
        let errands = Errands::new();
        let owners = 3 * THREADS_OF_ACCOUNT;
        let gate = Arc::new((Mutex::new(true), std::sync::Condvar::new()));
        for owner in 0..owners as u32 {
            let gate = gate.clone();
            assert!(errands.run(7, owner, move || {
                drop(gate.1.wait_while(gate.0.lock().unwrap(), |closed| *closed).unwrap());
                1
            }));
        }
        assert_eq!(lock(&errands.0.accounts)[&7].threads, THREADS_OF_ACCOUNT);
        assert!(errands.run(8, 8, || 2));
        assert_eq!(eventually("another account's is done", || errands.next_done()), 2);
        *gate.0.lock().unwrap() = false;
        gate.1.notify_all();
        let mut done = 0;
        eventually("all are done", || {
            done += std::iter::from_fn(|| errands.next_done()).sum::<usize>();
            (done == owners).then_some(())
        });
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_open() {
        let errands = Errands::new();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let gate = Arc::new(Barrier::new(2));
        let of_thread = gate.clone();
        let opens = || File::open("/proc/self/stat").is_ok();
        assert!(errands.run(7, 7, move || {
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
