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
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So many of an owner's files can be held up before his others are.
const THREADS: usize = 8;
/// So long a request waits for all of its errands. Where nothing is held up, one takes as long as the kernel takes.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);
/// So many may wait at once. The others of those who do what clients ask go on, and serve other users.
const WAITERS: usize = 2;
/// So many errands of one owner are kept; further ones are refused.
const KEPT: usize = 1024;
/// What a thread needs of a stack.
const STACK: usize = 64 << 10;

type Errand = Box<dyn FnOnce() + Send>;

/// An owner of files to which something is being done.
struct Owner {
    threads: usize,
    waiting: VecDeque<Errand>,
    /// When an errand of his was done the last time.
    done: Instant,
}

struct Common<T> {
    owners: Mutex<HashMap<u32, Owner>>,
    /// What came of errands for which nobody waited.
    late: Mutex<Vec<T>>,
    waiters: Mutex<usize>,
}

/// What came of an errand.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Result<T> {
    Done(T),
    /// [`Errands::late`] will have it.
    Later,
    /// There is no thread to be had, or too much is held up. It will not be done.
    Refused,
}

/// See the module. An errand comes to a `T`.
pub(super) struct Errands<T>(Arc<Common<T>>);

/// What somebody who waits and the thread have between them.
struct Shelf<T> {
    place: Mutex<Place<T>>,
    filled: Condvar,
}

enum Place<T> {
    Awaited,
    Done(T),
    /// Nobody waits.
    Left,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + 'static> Errands<T> {
    pub fn new() -> Errands<T> {
        let (owners, late, waiters) = (Mutex::new(HashMap::new()), Mutex::new(Vec::new()), Mutex::new(0));
        Errands(Arc::new(Common { owners, late, waiters }))
    }

    /// Has `errand` done to a file of `owner`'s, and waits for it `until` then, if it is worth that.
    pub fn run(&self, owner: u32, until: Option<Instant>, errand: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let waiter = until.and_then(|until| Waiter::new(&self.0.waiters, until));
        let place = if waiter.is_some() { Place::Awaited } else { Place::Left };
        let shelf = Arc::new(Shelf { place: Mutex::new(place), filled: Condvar::new() });
        let (common, on) = (self.0.clone(), shelf.clone());
        let errand = Box::new(move || {
            let done = errand();
            let mut place = lock(&on.place);
            match *place {
                Place::Left => lock(&common.late).push(done),
                _ => *place = Place::Done(done),
            }
            on.filled.notify_one();
        });
        let Some(patience) = self.put(owner, errand) else { return Result::Refused };
        let Some(waiter) = waiter else { return Result::Later };
        let patience = patience.min(waiter.until.saturating_duration_since(Instant::now()));
        let awaited = |place: &mut Place<T>| matches!(place, Place::Awaited);
        let place = shelf.filled.wait_timeout_while(lock(&shelf.place), patience, awaited);
        let mut place = place.unwrap_or_else(PoisonError::into_inner).0;
        match std::mem::replace(&mut *place, Place::Left) {
            Place::Done(done) => Result::Done(done),
            _ => Result::Later,
        }
    }

    /// What has come of errands since the last call, for which nobody has waited to the end.
    pub fn late(&self) -> Vec<T> {
        std::mem::take(&mut lock(&self.0.late))
    }

    /// Has an errand done, now or after others. Returns how long it is worth waiting for, or `None` if it will not be done.
    fn put(&self, owner: u32, errand: Errand) -> Option<Duration> {
        let mut owners = lock(&self.0.owners);
        let of = match owners.entry(owner) {
            Entry::Occupied(of) => of.into_mut(),
            Entry::Vacant(place) => place.insert(Owner { threads: 0, waiting: VecDeque::new(), done: Instant::now() }),
        };
        let (threads, kept) = (of.threads, of.waiting.len());
        if kept == KEPT {
            return None;
        }
        of.waiting.push_back(errand);
        if threads == THREADS {
            // Where nothing was done for long, their user holds them up.
            return Some(PATIENCE.saturating_sub(of.done.elapsed()));
        }
        let common = self.0.clone();
        let builder = std::thread::Builder::new().name("pool-errands".into()).stack_size(STACK);
        match builder.spawn(move || common.work(owner)) {
            Ok(_) => of.threads += 1,
            Err(_) if threads > 0 => {}
            Err(_) => {
                owners.remove(&owner);
                return None;
            }
        }
        Some(PATIENCE)
    }
}

impl<T> Common<T> {
    /// The life of a thread.
    fn work(&self, owner: u32) {
        let _ = thread::leave_descriptors();
        let next = || {
            let mut owners = lock(&self.owners);
            let of = owners.get_mut(&owner)?;
            of.done = Instant::now();
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
            errand();
        }
    }
}

/// One of those who may wait.
struct Waiter<'c> {
    waiters: &'c Mutex<usize>,
    until: Instant,
}

impl Waiter<'_> {
    fn new(waiters: &Mutex<usize>, until: Instant) -> Option<Waiter<'_>> {
        let mut now = lock(waiters);
        (*now < WAITERS).then(|| {
            *now += 1;
            Waiter { waiters, until }
        })
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        *lock(self.waiters) -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::sync::Barrier;

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(20))
    }

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
        let errands = Errands::new();
        let answers = [1, 2, 3].map(|number| errands.run(7, soon(), move || number));
        assert_eq!(answers, [1, 2, 3].map(Result::Done));
        assert!(errands.late().is_empty());
        eventually("the last thread has ended", || lock(&errands.0.owners).is_empty().then_some(()));
    }

    #[test]
    fn files_that_are_held_up_hold_up_nothing_but_many_others_of_their_owner() {
        let errands = Errands::new();
        let gate = Arc::new(Barrier::new(THREADS + 1));
        for number in 0..THREADS {
            let gate = gate.clone();
            // Whoever waits for it leaves in time.
            let until = Some(Instant::now() + Duration::from_millis(5));
            let held = errands.run(7, until, move || {
                gate.wait();
                number
            });
            assert_eq!(held, Result::Later);
            if number < THREADS - 1 {
                assert_eq!(errands.run(7, soon(), || 100), Result::Done(100), "after {number}");
            }
        }
        std::thread::sleep(PATIENCE);
        // That it is so is known now, so nobody waits for it.
        let before = Instant::now();
        assert_eq!(errands.run(7, soon(), || 200), Result::Later);
        assert!(before.elapsed() < PATIENCE / 2, "{:?}", before.elapsed());
        assert_eq!(errands.run(8, soon(), || 300), Result::Done(300));
        assert!(errands.late().is_empty());
        // What is kept is bounded.
        (1..KEPT).for_each(|_| assert_eq!(errands.run(7, None, || 400), Result::Later));
        assert_eq!(errands.run(7, None, || 500), Result::Refused);
        gate.wait();
        let mut late = Vec::new();
        eventually("all are done", || {
            late.extend(errands.late());
            (late.len() == THREADS + KEPT).then_some(())
        });
        late.sort_unstable();
        assert_eq!((late[THREADS - 1], late[THREADS], late[THREADS + 1]), (THREADS - 1, 200, 400));
    }

    #[test]
    fn two_wait_and_the_others_go_on() {
        let errands = Errands::new();
        let gate = Arc::new(Barrier::new(3));
        std::thread::scope(|scope| {
            for owner in [1, 2] {
                let gate = gate.clone();
                let errands = &errands;
                scope.spawn(move || {
                    let until = Some(Instant::now() + PATIENCE);
                    assert_eq!(errands.run(owner, until, move || _ = gate.wait()), Result::Later);
                });
            }
            eventually("both wait", || (*lock(&errands.0.waiters) == WAITERS).then_some(()));
            assert_eq!(errands.run(3, soon(), || ()), Result::Later);
        });
        gate.wait();
        let mut late = 0;
        eventually("all are done", || {
            late += errands.late().len();
            (late == 3).then_some(())
        });
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_open() {
        let errands = Errands::new();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let gate = Arc::new(Barrier::new(2));
        let of_thread = gate.clone();
        let opens = || File::open("/proc/self/stat").is_ok();
        let held = errands.run(7, None, move || {
            of_thread.wait();
            opens()
        });
        assert_eq!(held, Result::Later);
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
        assert!(eventually("the errand is done", || errands.late().pop()), "it opens what it needs");
    }
}
