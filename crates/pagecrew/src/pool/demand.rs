//! What users have asked for lately of one NUMA node, and which sizes should wait for it: pure arithmetic.

use crate::sys::HUGE_PAGE_SIZE;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// A pool has at most so many files, each of which costs a descriptor and a look at it at each request.
pub const FILES_MOST: usize = 4096;
/// The last requests that add up to so many times the memory that is to be divided say what is asked for. If it was
/// less, a pool of a few files would follow every chance; if it was more, it would be late to see a change.
const TURNS: usize = 4;
/// But no fewer than this, and no more.
const LATELY_LEAST: usize = 32;
pub(super) const LATELY_MOST: usize = 512;
/// Larger than any memory, and small enough to be calculated with.
const SIZE_MOST: usize = 1 << 56;
/// Sizes of which nothing is known are halves of what is left, down to this.
const LADDER_LEAST: usize = 64 << 20;
/// While nothing was asked for, so much waits in one file: cutting off what is too much is quick, and whoever tries a pool for the first
/// time may ask for all of it.
const FIRST_MOST: usize = 16 << 30;
/// Room for a ladder that begins at any size.
const LADDER_STEPS: usize = 64;
/// A file that was wanted before counts for this much more than one that would take its place, in quarters. Otherwise
/// chance would have files converted back and forth.
const KEPT: u64 = 6;
const NEW: u64 = 4;
/// The first file of a size that was asked for more than once counts for so many times more: one that is there is
/// better than one more of those that are.
const FIRST: u64 = 4;

/// So many users are remembered, those who asked last.
const USERS_MOST: usize = 64;
/// Whoever has asked for nothing for so long is not waited for.
pub(super) const ACTIVE: Duration = Duration::from_secs(1800);
/// What somebody got counts for half after so long.
const HALF: Duration = Duration::from_secs(300);
/// Of a user's last requests, those that say how much the next one may be.
const NEXT: usize = 16;
/// Filling may be so far behind whoever asks often: as much as he asked for in so long, he may ask for again before more is ready.
const BEHIND: Duration = Duration::from_secs(5);

/// A file is kept for what a user may ask for next if it is no more than so many times as large; for what he may ask for after that, so many.
const KEEPS: usize = 8;
const KEEPS_MORE: usize = 2;

/// What one user asked for lately.
#[derive(Debug, Clone)]
struct Requests {
    user: u32,
    /// When the last one came.
    last_ns: u64,
    /// And when each came; the last one first.
    sizes: VecDeque<(usize, u64)>,
    /// Bytes that were ready for him at the time `had_ns`; half as many each [`HALF`].
    had: usize,
    had_ns: u64,
}

impl Requests {
    /// What may be asked for before filling comes to it, but no more than `share` in all: as much as one of the last requests, and as many as
    /// came lately.
    fn next(&self, share: usize, now_ns: u64) -> Vec<usize> {
        let last = || self.sizes.iter().take(NEXT).enumerate();
        // Of equals the last one.
        let Some((largest, &(size, _))) = last().rev().max_by_key(|(_, (size, _))| *size) else { return Vec::new() };
        let mut next = vec![whole(size.min(share))];
        let mut left = share - next[0];
        for (place, &(size, came)) in last() {
            let lately = now_ns.saturating_sub(came) <= BEHIND.as_nanos() as u64;
            if place != largest && lately && size <= left {
                next.push(size);
                left -= size;
            }
        }
        next.retain(|size| *size > 0);
        next
    }

    /// What was ready for him lately.
    fn had(&self, now_ns: u64) -> usize {
        let halves = now_ns.saturating_sub(self.had_ns) / HALF.as_nanos() as u64;
        self.had.checked_shr(halves.try_into().unwrap_or(u32::MAX)).unwrap_or(0)
    }
}

/// What was asked for lately, of one node.
#[derive(Debug, Clone)]
pub struct Demand {
    /// How many files may wait.
    most: usize,
    /// Of each user, those who asked last first. Each on a list of his own, so that nobody's many requests make others' forgotten.
    lately: VecDeque<Requests>,
    /// How many files of which sizes were wanted the last time because they had been asked for.
    kept: BTreeMap<usize, usize>,
    /// Which of what was wanted the last time are for what each user may ask for next.
    next: Vec<(u32, Range<usize>)>,
}

/// What a user may ask for next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Need {
    /// So much of it.
    pub size: usize,
    /// The largest file that is kept for it: to have a little ready is not worth what others would get of a large one.
    pub largest: usize,
}

/// A size as a candidate for one more file. The order of the fields is the order of candidates: the heaviest first, of
/// equals the smaller.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    weight: u64,
    size: std::cmp::Reverse<usize>,
    times: usize,
    files: usize,
}

/// The next size with at most three significant bits: 4, 5, 6, 7, 8, 10, 12, 14, 16, ...
fn rounded(size: usize) -> usize {
    let step = (size.max(1).next_power_of_two() >> 3).max(HUGE_PAGE_SIZE);
    size.next_multiple_of(step)
}

pub(super) fn whole(size: usize) -> usize {
    size - size % HUGE_PAGE_SIZE
}

impl Demand {
    /// Nothing is known yet. At most so many files are to wait, [`FILES_MOST`] at most and one at least.
    pub fn new(most: usize) -> Demand {
        let most = most.clamp(1, FILES_MOST);
        Demand { most, lately: VecDeque::new(), kept: BTreeMap::new(), next: Vec::new() }
    }

    /// Takes note of a request of `user`'s of `size` at the time `now_ns`.
    pub fn note(&mut self, user: u32, size: usize, now_ns: u64) {
        debug_assert!(size.is_multiple_of(HUGE_PAGE_SIZE));
        let known = self.lately.iter().position(|requests| requests.user == user);
        let mut requests = known.and_then(|place| self.lately.remove(place)).unwrap_or(Requests {
            user,
            last_ns: now_ns,
            sizes: VecDeque::new(),
            had: 0,
            had_ns: now_ns,
        });
        requests.last_ns = now_ns;
        requests.sizes.truncate(LATELY_MOST - 1);
        requests.sizes.push_front((size.min(SIZE_MOST), now_ns));
        self.lately.truncate(USERS_MOST - 1);
        self.lately.push_front(requests);
    }

    /// Takes note that `bytes` were ready for `user` at the time `now_ns`, who has just asked.
    pub fn served(&mut self, user: u32, bytes: usize, now_ns: u64) {
        if let Some(requests) = self.lately.iter_mut().find(|requests| requests.user == user) {
            (requests.had, requests.had_ns) = (requests.had(now_ns).saturating_add(bytes), now_ns);
        }
    }

    /// What is to stay ready for others than `user`: for each who has asked lately and has had less ready than he, as much as that one may ask
    /// for next, but no more than his share of the `size` that is kept ready. What is behind that, anybody may have; so somebody who takes
    /// and takes gets what is refilled for him, and what he asks for beyond is zeroed for him on the spot.
    pub fn needs_of_others(&self, user: u32, size: usize, now_ns: u64) -> Vec<Need> {
        let of_user = self.lately.iter().find(|requests| requests.user == user);
        let had = of_user.map_or(0, |requests| requests.had(now_ns));
        let others = || self.active(now_ns).filter(|requests| requests.user != user);
        let share = size / (others().count() + 1);
        let of = |requests: &Requests| {
            let next = requests.next(share, now_ns).into_iter().enumerate();
            let times = |place: usize| if place == 0 { KEEPS } else { KEEPS_MORE };
            next.map(|(place, size)| Need { size, largest: size * times(place) }).collect::<Vec<_>>()
        };
        others().filter(|requests| requests.had(now_ns) < had).flat_map(of).collect()
    }

    /// Who has asked lately.
    fn active(&self, now_ns: u64) -> impl Iterator<Item = &Requests> {
        let lately = self.lately.iter();
        lately.filter(move |requests| now_ns.saturating_sub(requests.last_ns) < ACTIVE.as_nanos() as u64)
    }

    /// How often which sizes were asked for lately: of each user's requests as many as of any other's, as far as he has them. Sizes that came
    /// only once are rounded up, so that a pool for sizes of all kinds has a few that suit most of them.
    fn times(&self, room: usize) -> BTreeMap<usize, usize> {
        let (mut exact, mut sum, mut count) = (BTreeMap::new(), 0_usize, 0);
        let longest = self.lately.iter().map(|requests| requests.sizes.len()).max().unwrap_or(0);
        let in_turn =
            (0..longest).flat_map(|turn| self.lately.iter().filter_map(move |requests| requests.sizes.get(turn)));
        for size in in_turn.map(|&(size, _)| size).take(LATELY_MOST) {
            if count >= LATELY_LEAST && sum >= TURNS.saturating_mul(room) {
                break;
            }
            count += 1;
            sum = sum.saturating_add(size);
            *exact.entry(size).or_insert(0) += 1;
        }
        let mut times = BTreeMap::new();
        for (size, count) in exact {
            *times.entry(if count == 1 { rounded(size) } else { size }).or_insert(0) += count;
        }
        times
    }

    /// Which of the sizes that were wanted the last time are for what each user may ask for next.
    pub fn next(&self) -> &[(u32, Range<usize>)] {
        &self.next
    }

    /// The sizes of the files to keep, the most important first. They add up to `size` (rounded down to 2 MiB), and are
    /// at most [`FILES_MOST`]. Those in `files` (a size and how many) come first, as far as they fit. Then, where there are several
    /// users, what each may ask for next, within his share. The rest is divided by what was asked for lately.
    pub fn wanted(&mut self, files: &[(usize, usize)], size: usize) -> Vec<usize> {
        let mut rest = whole(size);
        let (mut wanted, mut told) = (Vec::new(), BTreeMap::new());
        let most = self.most - LADDER_STEPS.min((self.most / 2).max(1));
        for &(size, count) in files {
            let size = whole(size);
            let fit = rest.checked_div(size).unwrap_or(0).min(count).min(most - wanted.len());
            wanted.extend(std::iter::repeat_n(size, fit));
            rest -= fit * size;
            *told.entry(size).or_insert(0) += fit;
        }
        let now = self.lately.front().map_or(0, |requests| requests.last_ns);
        self.next.clear();
        let users = self.active(now).count();
        if users > 1 {
            let share = rest / users;
            // Whoever had least comes first, so that what was filled for him is not taken for another one's of the same size.
            let mut next: Vec<_> = self.active(now).collect();
            next.sort_by_key(|requests| requests.had(now));
            let next: Vec<_> = next.iter().map(|requests| (requests.user, requests.next(share, now))).collect();
            for (user, sizes) in next {
                let begin = wanted.len();
                for size in sizes.into_iter().take(most - begin) {
                    wanted.push(size);
                    rest -= size;
                    *told.entry(size).or_insert(0) += 1;
                }
                self.next.push((user, begin..wanted.len()));
            }
        }
        let room = rest;
        let times = self.times(room);
        let candidate = |size: usize, times: usize, files: usize| {
            let kept = if files < self.kept.get(&size).copied().unwrap_or(0) { KEPT } else { NEW };
            let first = if files == 0 && times >= 2 { FIRST } else { 1 };
            let weight = ((times as u64) << 20) * kept * first / (files as u64 + 1);
            Candidate { weight, size: std::cmp::Reverse(size), times, files }
        };
        // The method of D'Hondt: each file goes to the size that has most requests a file then.
        let mut heap: BinaryHeap<_> =
            times.iter().map(|(&size, &times)| candidate(size, times, told.get(&size).copied().unwrap_or(0))).collect();
        let mut kept = BTreeMap::new();
        while wanted.len() < most
            && let Some(Candidate { size: std::cmp::Reverse(size), times, files, .. }) = heap.pop()
        {
            // What is larger than everything gets everything, if it is what is asked for most: it is ready in part.
            let fit = if rest == room { size.min(room) } else { size };
            // A size has to be asked for a few times before all of a large pool follows.
            if fit > rest || fit == 0 || files >= 2 * times * times {
                continue;
            }
            wanted.push(fit);
            rest -= fit;
            *kept.entry(size).or_insert(0) = files + 1;
            heap.push(candidate(size, times, files + 1));
        }
        self.kept = kept;
        // What is too small for any of them is best at hand in one file, to be made longer; what is not much, to be made shorter.
        let in_one = match times.first_key_value() {
            Some((&least, _)) => rest < least,
            None => wanted.is_empty() && rest <= FIRST_MOST,
        };
        if rest > 0 && in_one {
            wanted.push(rest);
            return wanted;
        }
        while rest > 0 {
            let half = whole(rest / 2);
            let last = half < LADDER_LEAST || wanted.len() + 1 == self.most;
            let step = if last { rest } else { rest - half };
            wanted.push(step);
            rest -= step;
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    trait Gib {
        fn map_gib(self) -> Vec<usize>;
    }

    impl Gib for Vec<usize> {
        fn map_gib(self) -> Vec<usize> {
            self.into_iter().map(|size| size * GIB).collect()
        }
    }

    fn after(requests: &[usize]) -> Demand {
        let mut demand = Demand::new(FILES_MOST);
        requests.iter().for_each(|&size| demand.note(7, size, 0));
        demand
    }

    #[test]
    fn one_file_waits_as_long_as_nothing_is_known_and_halves_of_a_large_pool() {
        let wanted = |size| Demand::new(FILES_MOST).wanted(&[], size).iter().map(|size| size >> 20).collect::<Vec<_>>();
        assert_eq!(wanted(32 * GIB), [16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 64]);
        for (size, one) in [(16 * GIB, 16384), (127 << 20, 126), (3 << 20, 2)] {
            assert_eq!(wanted(size), [one]);
        }
        assert_eq!(wanted(1 << 20), []);
        // Beside files that were told, the rest is anybody's.
        let told = Demand::new(FILES_MOST).wanted(&[(GIB, 1)], GIB + (130 << 20));
        assert_eq!(told, [GIB, 66 << 20, 64 << 20]);
    }

    #[test]
    fn sizes_that_are_told_come_first_as_far_as_they_fit() {
        let wanted = |files: &[(usize, usize)], size| after(&[2 * GIB; 9]).wanted(files, size);
        assert_eq!(wanted(&[(8 * GIB, 2)], 24 * GIB)[..3], [8 * GIB, 8 * GIB, 2 * GIB]);
        assert_eq!(wanted(&[(8 * GIB, 2), (3 * GIB, 5)], 15 * GIB), [8 * GIB, 3 * GIB, 3 * GIB, GIB]);
        // They count as files for what is asked for.
        let mut demand = after(&[2 * GIB, 4 * GIB].repeat(8));
        assert_eq!(demand.wanted(&[(2 * GIB, 3)], 14 * GIB), [2 * GIB, 2 * GIB, 2 * GIB, 4 * GIB, 4 * GIB]);
        assert!(wanted(&[(HUGE_PAGE_SIZE, usize::MAX), (0, 7)], 1 << 40).len() <= FILES_MOST);
    }

    #[test]
    fn no_more_files_are_wanted_than_there_is_room_for() {
        for most in 0..70 {
            let mut demand = Demand::new(most);
            for told in [&[][..], &[(HUGE_PAGE_SIZE, usize::MAX)]] {
                for asked in 0..3 {
                    let wanted = demand.wanted(told, 1 << 40);
                    assert!(wanted.len() <= most.max(1) && wanted.iter().sum::<usize>() == 1 << 40, "{most} {asked}");
                    (1..6).for_each(|user| demand.note(user * (asked + 1), HUGE_PAGE_SIZE << user, 0));
                }
            }
        }
    }

    #[test]
    fn memory_is_divided_by_what_is_asked_for() {
        let mut demand = after(&[4, 4, 8, 4, 4, 8, 4, 4, 16, 4, 4, 8].repeat(5).map_gib());
        let mut wanted = demand.wanted(&[], 64 * GIB);
        wanted.sort_unstable();
        assert_eq!(wanted, [4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 16].to_vec().map_gib());
        // What is left is too small for any.
        assert_eq!(after(&[3 * GIB; 9]).wanted(&[], 10 * GIB), [3 * GIB, 3 * GIB, 3 * GIB, GIB]);
        // What is larger than everything is ready in part.
        assert_eq!(after(&[32 * GIB; 9]).wanted(&[], 10 * GIB), [10 * GIB]);
        assert_eq!(after(&[whole(usize::MAX); 9]).wanted(&[], 10 * GIB), [10 * GIB]);
        assert_eq!(after(&[32, 2, 2, 32, 2].repeat(4).map_gib()).wanted(&[], 4 * GIB), [2 * GIB, 2 * GIB]);
    }

    #[test]
    fn one_odd_request_does_not_convert_a_pool() {
        let wanted = after(&[GIB]).wanted(&[], 32 * GIB);
        assert_eq!(wanted[..4], [GIB, GIB, 15 * GIB, 15 * GIB / 2]);
        let mut demand = after(&[4 * GIB; 60]);
        let before = demand.wanted(&[], 32 * GIB);
        demand.note(7, 30 * GIB, 0);
        assert_eq!(demand.wanted(&[], 32 * GIB), before);
    }

    #[test]
    fn what_others_may_ask_for_next_stays_ready() {
        let mut demand = Demand::new(FILES_MOST);
        let need = |size| Need { size, largest: 8 * size };
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 0), []);
        demand.note(1, 8 * GIB, 0);
        demand.note(2, 60 * GIB, 0);
        demand.served(2, 60 * GIB, 0);
        // Whoever has had more leaves to the other one what that may ask for, and not the other way round.
        assert_eq!(
            (demand.needs_of_others(2, 64 * GIB, 0), demand.needs_of_others(1, 64 * GIB, 0)),
            (vec![need(8 * GIB)], vec![])
        );
        // No more than a share, however much was asked for; nothing for whoever has been away.
        demand.served(1, 61 * GIB, 5);
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 5), [need(32 * GIB)]);
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 5 + ACTIVE.as_nanos() as u64), []);
        // What was long ago counts for less.
        let later = 7 * HALF.as_nanos() as u64;
        demand.note(2, 8 * GIB, later);
        demand.served(2, GIB, later);
        demand.note(1, 8 * GIB, later);
        assert_eq!(
            (demand.needs_of_others(2, 64 * GIB, later), demand.needs_of_others(1, 64 * GIB, later)),
            (vec![need(8 * GIB)], vec![])
        );
        // Of whoever asks often, as much as he asked for lately, within his share.
        (0..3).for_each(|_| demand.note(1, 6 * GIB, later));
        let more = |size| Need { size, largest: 2 * size };
        let needs = [need(8 * GIB), more(6 * GIB), more(6 * GIB), more(6 * GIB)];
        assert_eq!(demand.needs_of_others(2, 64 * GIB, later), needs);
        assert_eq!(demand.needs_of_others(2, 30 * GIB, later), needs[..2]);
        assert_eq!(demand.needs_of_others(2, 64 * GIB, later + BEHIND.as_nanos() as u64 + 1), needs[..1]);
        // Others are remembered as far as there is room for them.
        (0..200).for_each(|user| demand.note(user, HUGE_PAGE_SIZE, later));
        assert_eq!(demand.lately.len(), USERS_MOST);
    }
}
