//! What is done to files that users have, where that may take as long as a user likes.
//!
//! Whoever has a file open can keep the kernel's lock of it for as long as he wants: a `write` to it holds the lock while it waits for its
//! source, which may be a file of a file system in user space that never answers. Whoever wants to change the file's owner, mode or length
//! then waits, and can't be killed meanwhile. So that is done here, one after the other, by a thread of the account that the file is on: its
//! user holds up himself.
//!
//! **Life of a thread.** It is started by an account's first errand and ends when it has had none for [`LINGER`]. It has a table of files of
//! its own, with nothing in it: a server that was killed lets go of its lock and its socket even if such a thread of its is still waiting. So
//! an errand opens what it needs by its path, and has nothing of the server's but memory.

use crate::sys::thread;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So long a thread waits for its account's next errand.
const LINGER: Duration = Duration::from_secs(5);
/// So long somebody waits for his errand, which takes microseconds where its user holds nothing up.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many may wait at once. The others of those who do what clients ask go on, and serve other users.
const WAITERS: usize = 2;
/// So many errands of one account are kept; further ones are refused, and come again with a later look.
const KEPT: usize = 1024;
/// What a thread needs of a stack.
const STACK: usize = 64 << 10;

type Errand = Box<dyn FnOnce() + Send>;

/// An account that has a thread.
struct Account {
    errands: Sender<Errand>,
    /// Errands that are not done, the one that it is at included.
    pending: usize,
    /// When it came to that one.
    begun: Instant,
}

#[derive(Default)]
struct Common {
    accounts: Mutex<HashMap<u32, Account>>,
    /// What came of errands for which nobody waited.
    late: Mutex<Vec<(u64, bool)>>,
    waiters: Mutex<usize>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Errands(Arc<Common>);

/// What somebody who waits and the thread have between them.
#[derive(Default)]
struct Shelf {
    place: Mutex<Place>,
    filled: Condvar,
}

#[derive(Default, Clone, Copy)]
enum Place {
    #[default]
    Awaited,
    Done(bool),
    /// Nobody waits.
    Left,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Errands {
    /// Has `errand` done for `account`. Returns what came of it, if that is known in a moment and the caller wants to wait for it; else
    /// [`Errands::late`] has it, by its `number`.
    pub fn run(
        &self,
        account: u32,
        number: u64,
        wait: bool,
        errand: impl FnOnce() -> bool + Send + 'static,
    ) -> Option<bool> {
        let waiter = wait.then(|| Waiter::new(&self.0)).flatten();
        let shelf = Arc::new(Shelf::default());
        if waiter.is_none() {
            *lock(&shelf.place) = Place::Left;
        }
        let (common, on) = (self.0.clone(), shelf.clone());
        let done = Box::new(move || {
            let done = errand();
            let mut place = lock(&on.place);
            match *place {
                Place::Left => lock(&common.late).push((number, done)),
                _ => *place = Place::Done(done),
            }
            on.filled.notify_one();
        });
        let Some(patience) = self.put(account, done) else { return Some(false) };
        let awaited = |place: &mut Place| matches!(place, Place::Awaited);
        let place = lock(&shelf.place);
        let place = shelf.filled.wait_timeout_while(place, patience, awaited);
        let mut place = place.unwrap_or_else(PoisonError::into_inner).0;
        match *place {
            Place::Done(done) => Some(done),
            _ => {
                *place = Place::Left;
                None
            }
        }
    }

    /// As [`Errands::run`], where nobody wants to know.
    pub fn send(&self, account: u32, errand: impl FnOnce() + Send + 'static) {
        let _ = self.put(account, Box::new(errand));
    }

    /// What has come of errands since the last call, for which nobody has waited to the end.
    pub fn late(&self) -> Vec<(u64, bool)> {
        std::mem::take(&mut lock(&self.0.late))
    }

    /// Puts an errand behind the others of its account. Returns how long it is worth waiting for, or `None` if it will not be done.
    fn put(&self, account: u32, errand: Errand) -> Option<Duration> {
        let mut accounts = lock(&self.0.accounts);
        let of = match accounts.entry(account) {
            Entry::Occupied(of) => of.into_mut(),
            Entry::Vacant(place) => {
                let (errands, heard) = channel();
                let common = self.0.clone();
                let builder = std::thread::Builder::new().name("pool-errands".into()).stack_size(STACK);
                builder.spawn(move || common.work(account, &heard)).ok()?;
                place.insert(Account { errands, pending: 0, begun: Instant::now() })
            }
        };
        if of.pending == KEPT {
            return None;
        }
        if of.pending == 0 {
            of.begun = Instant::now();
        }
        of.errands.send(errand).ok()?;
        of.pending += 1;
        // Where it has been at one for long, its user holds it up.
        Some(PATIENCE.saturating_sub(of.begun.elapsed()))
    }
}

impl Common {
    /// The life of a thread.
    fn work(&self, account: u32, errands: &Receiver<Errand>) {
        // Where it is refused, nothing but that a killed server would end later.
        let _ = thread::leave_descriptors();
        loop {
            match errands.recv_timeout(LINGER) {
                Ok(errand) => {
                    errand();
                    if let Some(of) = lock(&self.accounts).get_mut(&account) {
                        (of.pending, of.begun) = (of.pending - 1, Instant::now());
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut accounts = lock(&self.accounts);
                    if accounts.get(&account).is_none_or(|of| of.pending == 0) {
                        accounts.remove(&account);
                        return;
                    }
                }
            }
        }
    }
}

/// One of those who may wait.
struct Waiter<'c>(&'c Common);

impl Waiter<'_> {
    fn new(common: &Common) -> Option<Waiter<'_>> {
        let mut waiters = lock(&common.waiters);
        (*waiters < WAITERS).then(|| {
            *waiters += 1;
            Waiter(common)
        })
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        *lock(&self.0.waiters) -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::sync::Barrier;

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
    fn whoever_waits_hears_of_it_at_once() {
        let errands = Errands::default();
        let answers = [true, false, true].map(|done| errands.run(7, 1, true, move || done));
        assert_eq!(answers, [Some(true), Some(false), Some(true)]);
        assert!(errands.late().is_empty());
    }

    #[test]
    fn an_account_that_is_held_up_holds_up_nobody_else() {
        let errands = Errands::default();
        let gate = Arc::new(Barrier::new(2));
        let held = |number| {
            let gate = gate.clone();
            errands.run(7, number, true, move || gate.wait().is_leader() | true)
        };
        assert_eq!(held(1), None);
        // That is known now, so nobody waits for the next one.
        let before = Instant::now();
        assert_eq!(held(2), None);
        assert!(before.elapsed() < PATIENCE / 2, "{:?}", before.elapsed());
        assert_eq!(errands.run(8, 3, true, || true), Some(true));
        assert!(errands.late().is_empty());
        gate.wait();
        gate.wait();
        let mut late = Vec::new();
        eventually("both are done", || {
            late.extend(errands.late());
            (late.len() == 2).then_some(())
        });
        assert_eq!(late, [(1, true), (2, true)]);
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_open() {
        let errands = Errands::default();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let gate = Arc::new(Barrier::new(2));
        let of_thread = gate.clone();
        let opens = || File::open("/proc/self/stat").is_ok();
        assert_eq!(
            errands.run(7, 1, false, move || {
                of_thread.wait();
                opens()
            }),
            None
        );
        // The thread is there, and had a copy of both ends.
        eventually("the thread has parted", || {
            let of_tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
            of_tasks
                .filter(|task| {
                    std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "pool-errands")
                })
                .any(|task| std::fs::read_dir(task.join("fd")).is_ok_and(|files| files.count() == 0))
                .then_some(())
        });
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        gate.wait();
        let late = eventually("the errand is done", || errands.late().pop());
        assert_eq!(late, (1, true), "it opens what it needs");
    }
}
