//! What a program may have beyond its slack where giving memory back for want of room costs it too much: it frees and asks again so fast that
//! what goes back is touched anew at once. In a mixture of sizes, such pieces are a matter of where they lie, not of how many.
//!
//! What went back for want of room and is touched again is counted on the program's own threads. A window in which that is too much grants
//! room at once: at several gigabytes a second, waiting for the watcher would cost as much as the room saves. The watcher takes it away by and
//! by once the program does it no more.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Length of a window.
const WINDOW_NS: u64 = 20_000_000;
/// Bytes in a window that are given back and touched again at about a tenth of a processor's time: 512 MiB/s.
const HIGH: usize = (512 << 20) / (1_000_000_000 / WINDOW_NS as usize);
/// Of one request, no more than this counts: something large that is freed and asked for again once is no habit.
const EVENT_MOST: usize = HIGH / 4;
/// Below this part of [`HIGH`], what was granted fades, in so many windows.
const LOW_SHARE: usize = 8;
const FADES: usize = 128;
/// At most this part of the peak, and no more than this: a large program's own slack is as much. Where there are more lanes than two, pieces
/// lie about in each: up to twice the part, and for each two as much.
const SHARE: usize = 8;
const MOST: usize = 16 << 20;

/// Counts what goes back and is touched again, and what the program may have because of that. Pure but for its atomics; updates that are lost
/// to another thread delay a grant.
#[derive(Debug, Default)]
pub(super) struct Churn {
    /// Bytes that went back for want of room and were not touched again yet.
    gone: AtomicUsize,
    /// Bytes that were touched again since the window began.
    window: AtomicUsize,
    window_begin_ns: AtomicU64,
    /// The same since the watcher's last look.
    seen: AtomicUsize,
    seen_ns: AtomicU64,
    extra: AtomicUsize,
}

/// The most that a program of this peak, whose threads use so many lanes, may have beyond its slack, in bytes.
pub(super) fn most(peak: usize, lanes: usize) -> usize {
    let pairs = lanes.div_ceil(2).max(1);
    (peak / SHARE * pairs.min(2)).min(MOST * pairs)
}

impl Churn {
    /// What the program may have beyond its slack, in bytes.
    pub fn extra(&self) -> usize {
        self.extra.load(Relaxed)
    }

    /// `bytes` go back for want of room.
    pub fn gave_back(&self, bytes: usize) {
        self.gone.fetch_add(bytes, Relaxed);
    }

    /// A program that may have [`most`] is about to touch `bytes` for the first time; `now` says the time in nanoseconds.
    pub fn touches(&self, bytes: usize, most: usize, now: impl FnOnce() -> u64) {
        let gone = self.gone.load(Relaxed);
        let again = bytes.min(gone);
        if again == 0 {
            return;
        }
        self.gone.store(gone - again, Relaxed);
        let again = again.min(EVENT_MOST);
        self.seen.fetch_add(again, Relaxed);
        let now = now();
        if now.saturating_sub(self.window_begin_ns.load(Relaxed)) > WINDOW_NS {
            self.window_begin_ns.store(now, Relaxed);
            self.window.store(again, Relaxed);
        } else if self.window.fetch_add(again, Relaxed) + again > HIGH {
            self.window.store(0, Relaxed);
            let grant = |extra: usize| Some((extra + most / 2).min(most));
            let _ = self.extra.fetch_update(Relaxed, Relaxed, grant);
        }
    }

    /// The watcher's look, at time `now`: takes back what a program that may have [`most`] does not need any more.
    pub fn look(&self, most: usize, now: u64) {
        let elapsed = now.saturating_sub(self.seen_ns.load(Relaxed));
        if elapsed < WINDOW_NS {
            return;
        }
        self.seen_ns.store(now, Relaxed);
        self.gone.store(0, Relaxed);
        let windows = (elapsed / WINDOW_NS).min(FADES as u64) as usize;
        if self.seen.swap(0, Relaxed) / windows < HIGH / LOW_SHARE {
            let fade = most.div_ceil(FADES) * windows;
            let _ = self.extra.fetch_update(Relaxed, Relaxed, |extra| Some(extra.saturating_sub(fade)));
        }
    }

    /// In a forked child.
    pub fn after_fork(&self) {
        for count in [&self.gone, &self.window, &self.seen, &self.extra] {
            count.store(0, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const M: usize = 1 << 20;
    const MS: u64 = 1_000_000;

    fn give_and_touch(churn: &Churn, bytes: usize, peak: usize, now: u64) {
        churn.gave_back(bytes);
        churn.touches(bytes, most(peak, 1), || now);
    }

    #[test]
    fn room_grows_with_the_lanes_that_are_used_and_is_a_part_of_the_peak() {
        assert_eq!([0, 1, 2, 3, 8].map(|lanes| most(96 * M, lanes) / M), [12, 12, 12, 24, 24]);
        assert_eq!([1, 2, 4, 8].map(|lanes| most(1 << 30, lanes) / M), [16, 16, 32, 64]);
    }

    #[test]
    fn memory_that_went_is_missed_once() {
        let churn = Churn::default();
        churn.gave_back(10 * M);
        churn.touches(3 * M, most(96 * M, 1), || MS);
        assert_eq!(churn.gone.load(Relaxed), 7 * M);
        churn.touches(8 * M, most(96 * M, 1), || MS);
        assert_eq!(churn.gone.load(Relaxed), 0);
        churn.touches(8 * M, most(96 * M, 1), || unreachable!("nothing is missing"));
    }

    #[test]
    fn a_program_that_churns_gets_room_within_milliseconds_and_loses_it_again() {
        let churn = Churn::default();
        let mut now = 100 * MS;
        churn.look(most(96 * M, 1), now);
        // 2 GiB a second, in huge pages.
        while churn.extra() < 12 * M {
            now += MS;
            give_and_touch(&churn, 2 * M, 96 * M, now);
            assert!(now < 120 * MS);
        }
        // It stays as long as that goes on, however slowly.
        for _ in 0..200 {
            now += 20 * MS;
            give_and_touch(&churn, 2 * M, 96 * M, now);
            churn.look(most(96 * M, 1), now);
        }
        assert_eq!(churn.extra(), 12 * M);
        churn.look(most(96 * M, 1), now + 600 * MS);
        assert!((1..12 * M).contains(&churn.extra()));
        churn.look(most(96 * M, 1), now + 3_000 * MS);
        assert_eq!(churn.extra(), 0);
    }

    #[test]
    fn what_is_only_given_back_or_only_touched_is_no_churn() {
        let churn = Churn::default();
        (0..100).for_each(|_| churn.touches(32 * M, most(1 << 30, 1), || MS));
        (0..100).for_each(|_| churn.gave_back(32 * M));
        assert_eq!(churn.extra(), 0);
    }

    #[test]
    fn one_large_block_that_is_asked_for_again_is_no_habit() {
        let churn = Churn::default();
        for round in 0..3 {
            give_and_touch(&churn, 1 << 30, 4 << 30, round * MS);
        }
        assert_eq!(churn.extra(), 0);
        (3..10).for_each(|round| give_and_touch(&churn, 1 << 30, 4 << 30, round * MS));
        assert!((1..=MOST).contains(&churn.extra()));
    }

    #[test]
    fn what_is_spread_over_seconds_is_no_churn() {
        let churn = Churn::default();
        for round in 0..1000 {
            give_and_touch(&churn, M, 48 * M, round * 10 * MS);
            churn.look(most(48 * M, 1), round * 10 * MS);
        }
        assert_eq!(churn.extra(), 0);
    }

    #[test]
    fn room_is_granted_in_halves_where_a_window_has_too_much() {
        let churn = Churn::default();
        (0..10).for_each(|_| give_and_touch(&churn, M, 96 * M, 100 * MS));
        give_and_touch(&churn, HIGH - 10 * M, 96 * M, 100 * MS + WINDOW_NS);
        assert_eq!(churn.extra(), 0, "just not too much in just one window");
        give_and_touch(&churn, 1, 96 * M, 100 * MS + WINDOW_NS);
        assert_eq!(churn.extra(), 6 * M);
        (0..10).for_each(|_| give_and_touch(&churn, M, 96 * M, 110 * MS));
        assert_eq!(churn.extra(), 6 * M, "it begins anew");
        give_and_touch(&churn, M, 96 * M, 100 * MS + WINDOW_NS + 1);
        assert_eq!(churn.extra(), 6 * M, "in the next window");
        (0..4).for_each(|_| give_and_touch(&churn, 100 * M, 96 * M, 100 * MS + WINDOW_NS + 2));
        assert_eq!(churn.extra(), 12 * M);
        (0..40).for_each(|_| give_and_touch(&churn, M, 96 * M, 100 * MS + WINDOW_NS + 3));
        assert_eq!(churn.extra(), 12 * M, "there is no more");
        churn.after_fork();
        assert_eq!(churn.extra(), 0);
    }

    #[test]
    fn what_is_touched_again_counts_once() {
        let churn = Churn::default();
        churn.gave_back(10 * M);
        (0..20).for_each(|_| churn.touches(M, most(96 * M, 1), || 100 * MS));
        assert_eq!(churn.extra(), 0);
        churn.gave_back(10 * M);
        churn.look(most(96 * M, 1), 200 * MS);
        churn.gave_back(10 * M);
        churn.look(most(96 * M, 1), 200 * MS + WINDOW_NS);
        (0..20).for_each(|_| churn.touches(M, most(96 * M, 1), || 300 * MS));
        assert_eq!(churn.extra(), 0, "what went back before the watcher's look is forgotten");
    }

    #[test]
    fn room_fades_in_a_hundred_and_twenty_eight_windows_where_little_comes_back() {
        let granted = || {
            let churn = Churn::default();
            churn.look(most(128 * M, 1), 100 * MS);
            churn.extra.store(16 * M, Relaxed);
            churn
        };
        let left = |touched: usize, elapsed: u64| {
            let churn = granted();
            churn.seen.store(touched, Relaxed);
            churn.look(most(128 * M, 1), 100 * MS + elapsed);
            churn.extra()
        };
        let step = 16 * M / 128;
        assert_eq!(left(0, WINDOW_NS - 1), 16 * M);
        assert_eq!(left(0, WINDOW_NS), 16 * M - step);
        assert_eq!(left(0, 100 * WINDOW_NS), 16 * M - 100 * step);
        assert_eq!([left(0, 128 * WINDOW_NS), left(0, 1000 * WINDOW_NS)], [0, 0]);
        let enough = HIGH / LOW_SHARE;
        assert_eq!(left(enough, WINDOW_NS), 16 * M);
        assert_eq!(left(enough - 1, WINDOW_NS), 16 * M - step);
        assert_eq!(left(2 * enough, 2 * WINDOW_NS), 16 * M);
        assert_eq!(left(2 * enough - 2, 2 * WINDOW_NS), 16 * M - 2 * step);
    }
}
