//! A job: a range that several threads take chunks of, and who may still be at it.
//!
//! **Life.** `Free` -claim-> `Setup` -publish-> `Open` -(the last taker leaves and nothing is left to take)-> `Finishing`
//! -release-> `Free`. `Setup` and `Finishing` belong to one thread alone. A helper that finishes a job of which the employer
//! has to hear hands it over to the first thread of the ordinary class that takes it over: telling the employer takes locks.
//! In `Open`, the number of threads inside is part of the same word as the phase, so that entering and ending exclude each
//! other.
//!
//! **Announcing before taking.** A helper writes down which chunk it is about to take *before* it moves the cursor past it. So
//! when a waiting caller has seen the cursor at the end, every chunk that some helper has taken and not done is written
//! down, wherever that helper was stopped. What is written down may also be a chunk that the helper then did not get; doing
//! such a one again is harmless, because for as long as the caller is inside, the range belongs to the job.

use super::sync::{AtomicU32, AtomicU64, Ordering};

/// The grain of chunks: one page. Both halves of an announcement count in it, so a job may be 16 TiB long.
pub(super) const GRAIN: usize = crate::sys::PAGE_SIZE;

const PHASE: u64 = 0b11 << 62;
const FREE: u64 = 0;
const SETUP: u64 = 1 << 62;
const OPEN: u64 = 2 << 62;
const FINISHING: u64 = 3 << 62;
/// Finished by a helper, and nobody's until it is taken over.
const HANDED_OVER: u64 = FINISHING | 1;

/// In an announcement, in the half of the length: the helper was revoked there and has let go. No chunk is so long.
const LET_GO: u64 = 1 << 31;

/// A chunk of a job: where it begins and how long it is, in grains from the start of the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub start: usize,
    pub len: usize,
}

impl Chunk {
    fn pack(self) -> u64 {
        debug_assert!((self.len as u64) < LET_GO);
        (self.start as u64) << 32 | self.len as u64
    }

    fn unpack(word: u64) -> Option<Chunk> {
        let chunk = Chunk { start: (word >> 32) as usize, len: (word & (LET_GO - 1)) as usize };
        (chunk.len > 0).then_some(chunk)
    }
}

/// What leaving a job means for the one who left.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Others are still inside, or chunks are left for whoever comes next.
    Open,
    /// The job is done and this thread has to finish it and then [`Job::release`] it.
    Last,
}

/// One place on the board. `WORKERS` is how many helpers there can be.
pub(super) struct Job<const WORKERS: usize> {
    /// Phase and number of threads inside.
    state: AtomicU64,
    /// First grain that nobody has taken.
    cursor: AtomicU64,
    /// Length in grains.
    end: AtomicU64,
    /// Set when the waiting caller takes back what helpers hold.
    revoked: AtomicU32,
    /// What each helper has announced; 0 for nothing.
    held: [AtomicU64; WORKERS],
}

impl<const WORKERS: usize> Job<WORKERS> {
    pub fn new() -> Self {
        Job {
            state: AtomicU64::new(FREE),
            cursor: AtomicU64::new(0),
            end: AtomicU64::new(0),
            revoked: AtomicU32::new(0),
            held: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Takes a free place. Whoever gets it publishes it next.
    pub fn claim(&self) -> bool {
        self.state.compare_exchange(FREE, SETUP, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Opens a claimed place with `len` grains to take; with `inside`, the publisher has entered it already.
    pub fn publish(&self, len: usize, inside: bool) {
        debug_assert!(len <= u32::MAX as usize);
        self.cursor.store(0, Ordering::Relaxed);
        self.end.store(len as u64, Ordering::Relaxed);
        self.revoked.store(0, Ordering::Relaxed);
        self.held.iter().for_each(|held| held.store(0, Ordering::Relaxed));
        self.state.store(OPEN | u64::from(inside), Ordering::Release);
    }

    /// Whether there is something to take.
    pub fn has_chunks(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE == OPEN && self.left() > 0
    }

    /// Grains that nobody has taken yet; only a hint outside the job.
    pub fn left(&self) -> usize {
        self.end.load(Ordering::Relaxed).saturating_sub(self.cursor.load(Ordering::Acquire)) as usize
    }

    /// Enters the job, if it is open.
    pub fn enter(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & PHASE == OPEN {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Takes the next chunk of at most `len` grains. A helper gives its number, under which the chunk is announced. `None` when
    /// nothing is left or the job was revoked.
    pub fn take(&self, len: usize, worker: Option<usize>) -> Option<Chunk> {
        let end = self.end.load(Ordering::Relaxed);
        let mut cursor = self.cursor.load(Ordering::Acquire);
        while cursor < end && self.revoked.load(Ordering::Relaxed) == 0 {
            let chunk = Chunk { start: cursor as usize, len: len.clamp(1, (end - cursor) as usize) };
            if let Some(worker) = worker {
                self.held[worker].store(chunk.pack(), Ordering::Relaxed);
            }
            // Release: the announcement above is visible to whoever reads the cursor behind this chunk.
            match self.cursor.compare_exchange(cursor, cursor + chunk.len as u64, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(chunk),
                Err(now) => cursor = now,
            }
        }
        if let Some(worker) = worker {
            self.held[worker].store(0, Ordering::Release);
        }
        None
    }

    /// Says that helper `worker` has done what it held.
    pub fn done(&self, worker: usize) {
        self.held[worker].store(0, Ordering::Release);
    }

    /// Says that helper `worker` was revoked in the middle of what it held: that stands for the caller to read, and to do, but the helper
    /// writes there no more.
    pub fn let_go(&self, worker: usize) {
        self.held[worker].fetch_or(LET_GO, Ordering::Release);
    }

    /// The chunk that helper `worker` holds or is about to take, or was revoked in the middle of.
    pub fn held_by(&self, worker: usize) -> Option<Chunk> {
        Chunk::unpack(self.held[worker].load(Ordering::Acquire))
    }

    /// Whether helper `worker` may be writing to `chunk`, or come to it.
    pub fn is_at(&self, worker: usize, chunk: Chunk) -> bool {
        self.held[worker].load(Ordering::Acquire) == chunk.pack()
    }

    /// The flag that tells helpers inside to stop.
    pub fn revoked(&self) -> &AtomicU32 {
        &self.revoked
    }

    /// Leaves the job.
    pub fn leave(&self) -> Left {
        // Acquire: a thread that left before moved the cursor before, and the last one has to see that.
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            // Only a thread inside moves the cursor, and if this is the only one, it can't move between here and the exchange,
            // unless somebody enters, which makes the exchange fail.
            let last = state == OPEN | 1 && self.left() == 0;
            let next = if last { FINISHING } else { state - 1 };
            match self.state.compare_exchange_weak(state, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return if last { Left::Last } else { Left::Open },
                Err(now) => state = now,
            }
        }
    }

    /// Leaves a job that this thread has to finish to another one.
    pub fn hand_over(&self) {
        self.state.store(HANDED_OVER, Ordering::Release);
    }

    /// Takes over what a helper has finished: this thread has to release it then.
    pub fn take_over(&self) -> bool {
        self.state.load(Ordering::Relaxed) == HANDED_OVER
            && self.state.compare_exchange(HANDED_OVER, FINISHING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives a finished place free.
    pub fn release(&self) {
        self.state.store(FREE, Ordering::Release);
    }

    /// Makes the place free whatever it was: for a forked child, where none of the threads inside exists.
    pub fn reset(&self) {
        self.held.iter().for_each(|held| held.store(0, Ordering::Relaxed));
        self.state.store(FREE, Ordering::Release);
    }

    /// Whether the place is free.
    #[cfg(test)]
    pub fn is_free(&self) -> bool {
        self.state.load(Ordering::Acquire) == FREE
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_job_once_and_the_last_one_out_finishes() {
        let job = Job::<2>::new();
        assert!(!job.enter() && job.is_free());
        assert!(job.claim() && !job.claim());
        assert!(!job.enter());
        job.publish(10, true);
        assert!(job.enter());
        let mut covered = [0; 10];
        for worker in [None, Some(1), None, Some(1), None] {
            if let Some(chunk) = job.take(3, worker) {
                covered[chunk.start..chunk.start + chunk.len].iter_mut().for_each(|times| *times += 1);
            }
        }
        assert_eq!(covered, [1; 10]);
        assert_eq!(job.held_by(1), Some(Chunk { start: 9, len: 1 }));
        job.done(1);
        assert_eq!(job.held_by(1), None);
        assert_eq!((job.leave(), job.leave()), (Left::Open, Left::Last));
        assert!(!job.is_free() && !job.claim() && !job.enter(), "it is being finished");
        job.release();
        assert!(job.is_free());
    }

    #[test]
    fn a_job_that_is_left_early_stays_open_for_the_next() {
        let job = Job::<1>::new();
        job.claim();
        job.publish(2, false);
        assert!(job.enter());
        assert!(job.take(1, None).is_some());
        assert_eq!(job.leave(), Left::Open);
        assert!(job.has_chunks() && job.enter());
        assert!(job.take(1, None).is_some() && job.take(1, None).is_none());
        assert_eq!(job.leave(), Left::Last);
    }

    #[test]
    fn a_job_that_was_handed_over_is_taken_over_once() {
        let job = Job::<1>::new();
        assert!(job.claim() && !job.take_over());
        job.publish(1, true);
        assert!(job.take(1, None).is_some() && !job.take_over());
        assert_eq!(job.leave(), Left::Last);
        assert!(!job.take_over());
        job.hand_over();
        assert!(!job.claim() && !job.enter() && !job.has_chunks());
        assert!(job.take_over() && !job.take_over());
        job.release();
        assert!(job.is_free());
    }

    #[test]
    fn only_an_open_job_has_chunks_and_only_while_some_are_left() {
        let job = Job::<1>::new();
        job.claim();
        job.publish(1, true);
        assert!(job.has_chunks() && job.take(1, None).is_some() && !job.has_chunks());
        job.publish(5, true);
        job.reset();
        assert!(job.is_free() && job.left() == 5 && !job.has_chunks());
    }

    #[test]
    fn a_revoked_job_hands_out_nothing() {
        let job = Job::<1>::new();
        job.claim();
        job.publish(5, true);
        job.revoked().store(1, Ordering::SeqCst);
        assert_eq!(job.take(1, Some(0)), None);
        assert_eq!(job.held_by(0), None);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    const CELLS: usize = 2;

    struct Model {
        job: Job<1>,
        /// How often each grain was worked on. The lock stands for the restartable sequence: "read the flag and write" is
        /// one step that the barrier can't fall into.
        cells: Mutex<[u8; CELLS]>,
        finished: AtomicU32,
    }

    fn model() -> Arc<Model> {
        let model = Model { job: Job::new(), cells: Mutex::new([0; CELLS]), finished: AtomicU32::new(0) };
        model.job.claim();
        Arc::new(model)
    }

    fn leave(model: &Model) {
        if model.job.leave() == Left::Last {
            model.finished.fetch_add(1, Ordering::SeqCst);
            model.job.release();
        }
    }

    /// A helper that may be stopped anywhere, since loom tries every place where the other thread can overtake it.
    fn helper(model: &Model, revocable: bool) {
        if !model.job.enter() {
            return;
        }
        while let Some(chunk) = model.job.take(1, Some(0)) {
            let mut cells = model.cells.lock().unwrap();
            if revocable && model.job.revoked().load(Ordering::Relaxed) != 0 {
                drop(cells);
                model.job.let_go(0);
                break;
            }
            cells[chunk.start] += 1;
            drop(cells);
            model.job.done(0);
        }
        leave(model);
    }

    /// Whether the caller revokes what a helper holds, and whether the barrier behind that works.
    #[derive(Clone, Copy, PartialEq)]
    enum Revoke {
        Not,
        Works,
        Fails,
    }

    /// The caller's part: take what is left, then do again what a helper still holds, then look at the result.
    fn caller(model: &Model, revoke: Revoke) -> [u8; CELLS] {
        while let Some(chunk) = model.job.take(1, None) {
            model.cells.lock().unwrap()[chunk.start] += 1;
        }
        if let Some(chunk) = model.job.held_by(0) {
            if revoke != Revoke::Not {
                model.job.revoked().store(1, Ordering::SeqCst);
            }
            if revoke == Revoke::Works {
                drop(model.cells.lock().unwrap());
            }
            while revoke == Revoke::Fails && model.job.is_at(0, chunk) {
                thread::yield_now();
            }
            if let Some(chunk) = model.job.held_by(0) {
                model.cells.lock().unwrap()[chunk.start] += 1;
            }
        }
        let result = *model.cells.lock().unwrap();
        leave(model);
        result
    }

    #[test]
    fn when_the_caller_goes_on_every_grain_is_done() {
        loom::model(|| {
            let shared = model();
            shared.job.publish(CELLS, true);
            let other = shared.clone();
            let thread = thread::spawn(move || helper(&other, false));
            let result = caller(&shared, Revoke::Not);
            assert!(result.iter().all(|&times| times >= 1), "{result:?}");
            thread.join().unwrap();
            assert_eq!(shared.finished.load(Ordering::SeqCst), 1);
            assert!(shared.job.is_free());
        });
    }

    #[test]
    fn behind_a_revocation_no_helper_writes_any_more() {
        loom::model(|| revocation(Revoke::Works, CELLS));
    }

    /// Then the lock is no step that the barrier falls into: the caller waits until the helper is out of it. With one grain, which either has:
    /// there are many more ways to wait.
    #[test]
    fn where_the_barrier_fails_the_caller_waits_until_the_helper_has_let_go() {
        loom::model(|| revocation(Revoke::Fails, 1));
    }

    fn revocation(revoke: Revoke, grains: usize) {
        let shared = model();
        shared.job.publish(grains, true);
        let other = shared.clone();
        let thread = thread::spawn(move || helper(&other, true));
        let result = caller(&shared, revoke);
        assert!(result[..grains].iter().all(|&times| times >= 1), "{result:?}");
        let revoked = shared.job.revoked().load(Ordering::SeqCst) == 1;
        thread.join().unwrap();
        if revoked {
            assert_eq!(*shared.cells.lock().unwrap(), result);
        }
        assert_eq!(shared.finished.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn two_takers_without_a_caller_finish_exactly_once() {
        loom::model(|| {
            let shared = model();
            shared.job.publish(CELLS, false);
            let other = shared.clone();
            let thread = thread::spawn(move || {
                if other.job.enter() {
                    // A program thread that helps with the backlog leaves before the end.
                    if let Some(chunk) = other.job.take(1, None) {
                        other.cells.lock().unwrap()[chunk.start] += 1;
                    }
                    leave(&other);
                }
            });
            helper(&shared, false);
            thread.join().unwrap();
            helper(&shared, false);
            assert_eq!(*shared.cells.lock().unwrap(), [1; CELLS]);
            assert_eq!(shared.finished.load(Ordering::SeqCst), 1);
        });
    }
}
