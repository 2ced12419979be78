//! Spans that wait for their next user on the CPU where they were freed: a pair of malloc and free that finds one there takes no lock and
//! makes no system call.
//!
//! Each CPU has a few slots for each size class. A slot is one atomic word: empty, or the number of a span. Who takes the word out
//! (`swap`) has the span; who finds it empty (`compare_exchange`) may put one in. So any thread may use any CPU's slots at any instant:
//! one that was moved to another CPU meanwhile, a signal handler, whoever drains them. No thread ever waits for another, and a forked
//! child finds them as they were.
//!
//! **Bounds.** A span comes here from its user, so what caches hold is never more than what the program once had. Whoever needs memory
//! that the zones don't have drains the caches first; the watcher drains those on which nothing happens.

use super::classes::{self, slots};
use crate::sys::PAGE_SIZE;
use Ordering::{AcqRel, Acquire, Relaxed, Release};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Classes of spans; in a model two, since every slot is looked at in every interleaving.
const CLASSES: usize = if cfg!(loom) { 2 } else { classes::CLASSES };

/// An empty slot. A span is the number of its first page in the arena and one.
const EMPTY: u32 = 0;

/// All slots of a cache.
const fn total_slots() -> usize {
    let (mut class, mut sum) = (0, 0);
    while class < CLASSES {
        sum += slots(class);
        class += 1;
    }
    sum
}

/// Where the slots of each class begin.
const fn offsets() -> [u16; CLASSES + 1] {
    let mut offsets = [0; CLASSES + 1];
    let mut class = 0;
    while class < CLASSES {
        offsets[class + 1] = offsets[class] + slots(class) as u16;
        class += 1;
    }
    offsets
}

const OFFSETS: [u16; CLASSES + 1] = offsets();

/// What a CPU counts. One thread at a time is on a CPU, so an update that is lost to a move to another CPU is rare, and only a number for
/// people is wrong by one.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tally {
    pub taken: usize,
    pub taken_bytes: usize,
    pub put: usize,
    /// By how much more the slots hold than at the last tally, in bytes, with small pages and with huge pages; wraps.
    pub held_change: [usize; 2],
}

/// The slots of one CPU.
#[repr(align(64))]
pub(super) struct Cache {
    /// How many of a class's slots are probably filled, from the first on. A hint: where to look first.
    filled: [AtomicU32; CLASSES],
    slots: Box<[AtomicU32]>,
    taken: AtomicUsize,
    taken_bytes: AtomicUsize,
    put: AtomicUsize,
    /// Bytes in the slots, about, with small pages and with huge pages.
    held: [AtomicUsize; 2],
    /// `held` at the last tally.
    tallied: [AtomicUsize; 2],
    /// The node of the CPU. Only spans of this node wait here.
    node: usize,
}

/// Calls after which a CPU's counts are added to the region's, at the latest.
const TALLY_CALLS: usize = 64;
/// And bytes by which what the slots hold grows.
const TALLY_BYTES: usize = 4 << 20;

fn bump(counter: &AtomicUsize, by: usize) -> usize {
    let value = counter.load(Relaxed).wrapping_add(by);
    counter.store(value, Relaxed);
    value
}

impl Cache {
    /// An empty cache for a CPU of `node`.
    pub fn new(node: usize) -> Cache {
        Cache {
            filled: std::array::from_fn(|_| AtomicU32::new(0)),
            slots: (0..total_slots()).map(|_| AtomicU32::new(EMPTY)).collect(),
            taken: AtomicUsize::new(0),
            taken_bytes: AtomicUsize::new(0),
            put: AtomicUsize::new(0),
            held: std::array::from_fn(|_| AtomicUsize::new(0)),
            tallied: std::array::from_fn(|_| AtomicUsize::new(0)),
            node,
        }
    }

    pub fn node(&self) -> usize {
        self.node
    }

    fn of(&self, class: usize) -> &[AtomicU32] {
        &self.slots[OFFSETS[class] as usize..OFFSETS[class + 1] as usize]
    }

    /// Takes a span of `class` out, if there is one: the last one put in, as far as the hint is right.
    #[inline(always)]
    pub fn take(&self, class: usize) -> Option<usize> {
        let slots = self.of(class);
        let hint = (self.filled[class].load(Relaxed) as usize).min(slots.len());
        for at in (0..hint).rev() {
            if slots[at].load(Relaxed) != EMPTY {
                let span = slots[at].swap(EMPTY, Acquire);
                if span != EMPTY {
                    self.filled[class].store(at as u32, Relaxed);
                    return Some(span as usize - 1);
                }
            }
        }
        if hint > 0 {
            self.filled[class].store(0, Relaxed);
        }
        None
    }

    /// Puts the span that begins at page `page` of the arena in. Returns whether there was room.
    #[inline(always)]
    pub fn put(&self, class: usize, page: usize) -> bool {
        let slots = self.of(class);
        let hint = (self.filled[class].load(Relaxed) as usize).min(slots.len());
        for at in (hint..slots.len()).chain(0..hint) {
            if slots[at].load(Relaxed) == EMPTY
                && slots[at].compare_exchange(EMPTY, page as u32 + 1, Release, Relaxed).is_ok()
            {
                self.filled[class].store(at.max(hint) as u32 + 1, Relaxed);
                return true;
            }
        }
        false
    }

    /// Counts a span that was taken. Returns whether it is time for a tally.
    #[inline(always)]
    pub fn count_taken(&self, len: usize, huge: bool) -> bool {
        bump(&self.held[huge as usize], len.wrapping_neg());
        bump(&self.taken_bytes, len);
        bump(&self.taken, 1) >= TALLY_CALLS
    }

    /// Counts a span that was put in. Returns whether it is time for a tally.
    #[inline(always)]
    pub fn count_put(&self, len: usize, huge: bool) -> bool {
        let held = bump(&self.held[huge as usize], len);
        let grown = held.wrapping_sub(self.tallied[huge as usize].load(Relaxed)).cast_signed();
        bump(&self.put, 1) >= TALLY_CALLS || grown >= TALLY_BYTES as isize
    }

    /// What was counted since the last call.
    pub fn tally(&self) -> Tally {
        let held_change = [0, 1].map(|kind| {
            let held = self.held[kind].load(Relaxed);
            held.wrapping_sub(self.tallied[kind].swap(held, Relaxed))
        });
        Tally {
            taken: self.taken.swap(0, Relaxed),
            taken_bytes: self.taken_bytes.swap(0, Relaxed),
            put: self.put.swap(0, Relaxed),
            held_change,
        }
    }

    /// Takes every span out, for `release` to give it back to its zone.
    pub fn drain(&self, mut release: impl FnMut(usize)) {
        self.held.iter().for_each(|held| held.store(0, Relaxed));
        for slot in &self.slots {
            if slot.load(Relaxed) != EMPTY {
                let span = slot.swap(EMPTY, AcqRel);
                if span != EMPTY {
                    release(span as usize - 1);
                }
            }
        }
    }
}

/// The largest arena of which spans can wait here, in bytes: 16 TiB.
pub(super) const ARENA_MOST: usize = (u32::MAX as usize - 1) * PAGE_SIZE;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_span_put_in_comes_out_first_and_each_once() {
        let cache = Cache::new(0);
        assert_eq!(cache.take(3), None);
        for page in 0..slots(3) {
            assert!(cache.put(3, page));
        }
        assert!(!cache.put(3, 1000), "full");
        assert_eq!(cache.take(2), None, "another class");
        for page in (0..slots(3)).rev() {
            assert_eq!(cache.take(3), Some(page));
        }
        assert_eq!(cache.take(3), None);
    }

    #[test]
    fn a_wrong_hint_loses_nothing() {
        let cache = Cache::new(0);
        for page in 0..8 {
            assert!(cache.put(65, page));
        }
        // As a thread leaves it that was moved to another CPU in the middle.
        cache.filled[65].store(3, Relaxed);
        assert!(!cache.put(65, 9));
        let mut out: Vec<usize> = std::iter::from_fn(|| cache.take(65)).collect();
        cache.drain(|page| out.push(page));
        out.sort_unstable();
        assert_eq!(out, (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn a_storm_hands_every_span_to_one_thread_at_a_time() {
        use std::sync::atomic::AtomicBool;
        let caches = [Cache::new(0), Cache::new(0)];
        let owned: Vec<AtomicBool> = (0..40).map(|_| AtomicBool::new(false)).collect();
        for page in 0..40 {
            assert!(caches[page % 2].put(0, page));
        }
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let (caches, owned) = (&caches, &owned);
                scope.spawn(move || {
                    for step in 0..20_000 {
                        let cache = &caches[(thread + step) % 2];
                        if let Some(page) = cache.take(0) {
                            assert!(!owned[page].swap(true, Acquire), "two owners");
                            owned[page].store(false, Release);
                            while !caches[step % 2].put(0, page) {}
                        }
                    }
                });
            }
        });
        let mut all = Vec::new();
        caches.iter().for_each(|cache| cache.drain(|page| all.push(page)));
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
    }
}

/// The hand-over of a span from its last user to the next one through a slot, in every interleaving.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Shared {
        cache: Cache,
        memory: UnsafeCell<u32>,
    }

    // SAFETY: loom reports accesses to the cell that are not ordered.
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    unsafe impl Send for Shared {}

    fn use_it(shared: &Shared, page: usize) {
        assert_eq!(page, 5);
        // SAFETY: the span is this thread's.
        shared.memory.with_mut(|memory| unsafe {
            assert_eq!(*memory, 7);
            *memory += 1;
        });
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared { cache: Cache::new(0), memory: UnsafeCell::new(7) })
    }

    #[test]
    fn the_next_user_sees_what_the_last_one_wrote() {
        loom::model(|| {
            let shared = shared();
            let giver = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    // SAFETY: the span is this thread's until it is put in.
                    shared.memory.with_mut(|memory| unsafe { *memory = 7 });
                    assert!(shared.cache.put(1, 5));
                })
            };
            if let Some(page) = shared.cache.take(1) {
                use_it(&shared, page);
            }
            giver.join().unwrap();
        });
    }

    #[test]
    fn a_span_is_taken_or_drained_but_not_both() {
        loom::model(|| {
            let shared = shared();
            assert!(shared.cache.put(1, 5));
            let taker = {
                let shared = shared.clone();
                loom::thread::spawn(move || shared.cache.take(1).map(|page| use_it(&shared, page)).is_some())
            };
            let mut drained = false;
            shared.cache.drain(|page| {
                use_it(&shared, page);
                drained = true;
            });
            assert!(taker.join().unwrap() != drained, "had by both, or lost");
        });
    }
}
