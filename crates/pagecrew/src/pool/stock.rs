//! Which files the pool of one NUMA node keeps ready: pure arithmetic.
//!
//! Memory in a file can't be moved to another file. A file can be made longer, and what is new then has to be zeroed
//! (about 110 ms a GiB of one CPU); or shorter, which is quick (4 ms a GiB), but what was cut off has to be zeroed anew
//! in another file. So it matters which sizes wait.

use crate::sys::HUGE_PAGE_SIZE;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

/// A pool has at most so many files, each of which costs a descriptor and a look at it at each request.
pub const FILES_MOST: usize = 4096;
/// The last requests that add up to so many times the memory that is to be divided say what is asked for. If it was
/// less, a pool of a few files would follow every chance; if it was more, it would be late to see a change.
const TURNS: usize = 4;
/// But no fewer than this, and no more.
const LATELY_LEAST: usize = 32;
const LATELY_MOST: usize = 512;
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
const ACTIVE: Duration = Duration::from_secs(1800);
/// What somebody got counts for half after so long.
const HALF: Duration = Duration::from_secs(300);
/// Of a user's last requests, those that say how much the next one may be.
const NEXT: usize = 16;

/// What one user asked for lately.
#[derive(Debug, Clone)]
struct Requests {
    user: u32,
    /// When the last one came.
    last_ns: u64,
    /// The last one first.
    sizes: VecDeque<usize>,
    /// Bytes that were ready for him at the time `had_ns`; half as many each [`HALF`].
    had: usize,
    had_ns: u64,
}

impl Requests {
    /// As much as may be asked for next, but no more than `share`.
    fn next(&self, share: usize) -> usize {
        whole(self.sizes.iter().take(NEXT).max().copied().unwrap_or(0).min(share))
    }

    /// What was ready for him lately.
    fn had(&self, now_ns: u64) -> usize {
        let halves = now_ns.saturating_sub(self.had_ns) / HALF.as_nanos() as u64;
        self.had.checked_shr(halves.try_into().unwrap_or(u32::MAX)).unwrap_or(0)
    }
}

/// What was asked for lately, of one node.
#[derive(Debug, Clone, Default)]
pub struct Demand {
    /// Of each user, those who asked last first. Each on a list of his own, so that nobody's many requests make others' forgotten.
    lately: VecDeque<Requests>,
    /// How many files of which sizes were wanted the last time because they had been asked for.
    kept: BTreeMap<usize, usize>,
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

fn whole(size: usize) -> usize {
    size - size % HUGE_PAGE_SIZE
}

impl Demand {
    /// Nothing is known yet.
    pub fn new() -> Demand {
        Demand::default()
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
        requests.sizes.push_front(size.min(SIZE_MOST));
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
    pub fn needs_of_others(&self, user: u32, size: usize, now_ns: u64) -> Vec<usize> {
        let of_user = self.lately.iter().find(|requests| requests.user == user);
        let had = of_user.map_or(0, |requests| requests.had(now_ns));
        let others = || self.active(now_ns).filter(|requests| requests.user != user);
        let share = size / (others().count() + 1);
        others().filter(|requests| requests.had(now_ns) < had).map(|requests| requests.next(share)).collect()
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
        for &size in in_turn.take(LATELY_MOST) {
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

    /// The sizes of the files to keep, the most important first. They add up to `size` (rounded down to 2 MiB), and are
    /// at most [`FILES_MOST`]. Those in `files` (a size and how many) come first, as far as they fit. Then, where there are several
    /// users, one for what each may ask for next, within his share. The rest is divided by what was asked for lately.
    pub fn wanted(&mut self, files: &[(usize, usize)], size: usize) -> Vec<usize> {
        let mut rest = whole(size);
        let (mut wanted, mut told) = (Vec::new(), BTreeMap::new());
        let most = FILES_MOST - LADDER_STEPS;
        for &(size, count) in files {
            let size = whole(size);
            let fit = rest.checked_div(size).unwrap_or(0).min(count).min(most - wanted.len());
            wanted.extend(std::iter::repeat_n(size, fit));
            rest -= fit * size;
            *told.entry(size).or_insert(0) += fit;
        }
        let now = self.lately.front().map_or(0, |requests| requests.last_ns);
        let users = self.active(now).count();
        if users > 1 {
            let share = rest / users;
            for next in self.active(now).map(|requests| requests.next(share)).filter(|next| *next > 0) {
                if wanted.len() < most {
                    wanted.push(next);
                    rest -= next;
                    *told.entry(next).or_insert(0) += 1;
                }
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
            let step = if half >= LADDER_LEAST { rest - half } else { rest };
            wanted.push(step);
            rest -= step;
        }
        wanted
    }
}

/// A file that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Which it is.
    pub id: u64,
    /// How long it is.
    pub size: usize,
    /// How much of it, from the beginning, is backed and zero.
    pub filled: usize,
}

impl Waiting {
    fn is_full(&self) -> bool {
        self.filled >= self.size
    }
}

/// What to do to the files that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Create an empty file of this size.
    Create {
        /// How long it shall be.
        size: usize,
    },
    /// Make a file longer or shorter.
    Resize {
        /// Which.
        id: u64,
        /// How long it shall be.
        size: usize,
    },
    /// Give a file up.
    Drop {
        /// Which.
        id: u64,
    },
    /// Fill a file, or go on with it.
    Fill {
        /// Which.
        id: u64,
    },
    /// Everything is there and full.
    Nothing,
}

/// Which file stands for which that is wanted.
struct Assignment {
    /// For each size that is wanted, the file that has it, the fullest for the most important.
    places: Vec<Option<Waiting>>,
    /// What has no place, the fullest first.
    surplus: Vec<Waiting>,
}

fn assign(wanted: &[usize], stock: &[Waiting]) -> Assignment {
    let mut fullest_last = stock.to_vec();
    fullest_last.sort_by_key(|file| (file.filled, file.size, std::cmp::Reverse(file.id)));
    let mut by_size: BTreeMap<usize, Vec<Waiting>> = BTreeMap::new();
    for file in fullest_last {
        by_size.entry(file.size).or_default().push(file);
    }
    let places = wanted.iter().map(|size| by_size.get_mut(size)?.pop()).collect();
    let mut surplus: Vec<_> = by_size.into_values().flatten().collect();
    surplus.sort_by_key(|file| std::cmp::Reverse((file.filled, file.size, file.id)));
    Assignment { places, surplus }
}

/// Which file is filled next, so that no size has all of the filling: who takes one small file after the other would have them filled anew
/// all the time, ahead of others' large ones. Of the sizes that are missing, one is filled of which fewest were filled since nothing was missing.
#[derive(Debug, Clone, Default)]
pub struct Refill {
    /// How many files of which sizes were filled since nothing was missing.
    done: BTreeMap<usize, usize>,
    /// As many as of the size that had the last turn: where a size begins that is new.
    last: usize,
    /// The file that is being filled, and its size.
    at: Option<(u64, usize)>,
}

impl Refill {
    /// As [`next_step`], in turn.
    pub fn next(&mut self, wanted: &[usize], stock: &[Waiting]) -> Step {
        let goes_on =
            |&(id, size): &(u64, usize)| stock.iter().any(|file| file.id == id && file.size == size && !file.is_full());
        // One that was taken meanwhile was filled for somebody, too.
        if let Some((_, size)) = self.at.take_if(|at| !goes_on(at)) {
            *self.done.entry(size).or_insert(self.last) += 1;
        }
        let missing = missing_sizes(wanted, stock);
        // Or more sizes came up than there can be files.
        if missing.is_empty() || self.done.len() > FILES_MOST {
            self.done.clear();
            self.last = 0;
        }
        let done = |size: usize| self.done.get(&size).copied().unwrap_or(self.last);
        let least = missing.iter().map(|&size| done(size)).min().unwrap_or(0);
        let step = step_of(wanted, stock, |size| done(size) == least);
        self.last = self.last.max(least);
        if let Step::Fill { id } = step {
            self.at = stock.iter().find(|file| file.id == id).map(|file| (id, file.size));
        }
        step
    }
}

/// Sizes of which fewer files are full than are wanted.
fn missing_sizes(wanted: &[usize], stock: &[Waiting]) -> BTreeSet<usize> {
    let mut full: BTreeMap<usize, usize> = BTreeMap::new();
    stock.iter().filter(|file| file.is_full()).for_each(|file| *full.entry(file.size).or_insert(0) += 1);
    let is_missing = |size: &&usize| match full.get_mut(size) {
        Some(left) if *left > 0 => {
            *left -= 1;
            false
        }
        _ => true,
    };
    wanted.iter().filter(is_missing).copied().collect()
}

/// The next thing to do so that what waits becomes what is `wanted`, with the least zeroing. Files never add up to more
/// than what is wanted, or than what they added up to before. What is there is used up only as the files that take its
/// place are made, one by one.
pub fn next_step(wanted: &[usize], stock: &[Waiting]) -> Step {
    step_of(wanted, stock, |_| true)
}

/// The same, for sizes that have a turn.
fn step_of(wanted: &[usize], stock: &[Waiting], has_turn: impl Fn(usize) -> bool) -> Step {
    let (target, sum) = (wanted.iter().sum::<usize>(), stock.iter().map(|file| file.size).sum::<usize>());
    let Assignment { places, surplus } = assign(wanted, stock);
    // The fullest becomes the largest: of all ways to make these files into those, that keeps most of what is zero.
    let mut missing: Vec<_> = (0..wanted.len()).filter(|&index| places[index].is_none()).collect();
    missing.sort_by_key(|&index| std::cmp::Reverse(wanted[index]));
    let shed = || {
        if surplus.len() > missing.len() {
            return Step::Drop { id: surplus[surplus.len() - 1].id };
        }
        let pairs = surplus.iter().zip(&missing).map(|(file, &index)| (file, wanted[index]));
        pairs
            .filter(|(file, size)| file.size > *size)
            .min_by_key(|(file, size)| file.filled.saturating_sub(*size))
            .map_or(Step::Nothing, |(file, size)| Step::Resize { id: file.id, size })
    };
    if sum > target {
        return shed();
    }
    for (index, &size) in wanted.iter().enumerate() {
        match places[index] {
            Some(file) if file.is_full() => {}
            _ if !has_turn(size) => {}
            Some(file) => return Step::Fill { id: file.id },
            None => {
                let rank = missing.iter().position(|other| *other == index);
                let (step, more) = match rank.and_then(|rank| surplus.get(rank)) {
                    Some(file) => (Step::Resize { id: file.id, size }, size.saturating_sub(file.size)),
                    None => (Step::Create { size }, size),
                };
                return if sum + more > target { shed() } else { step };
            }
        }
    }
    Step::Nothing
}

/// Milliseconds a GiB that whoever takes a file waits: for what is zeroed on the spot, by two CPUs, and for what is cut
/// off.
const ZERO_COST: usize = 60;
const CUT_COST: usize = 4;

/// The file to hand out for a request of `size`: it is then made that long, longer or shorter. It is the one with the
/// least wait for whoever asks, of equals the smallest. None: nothing that waits is filled, or to zero it all on the spot is no longer a wait
/// than to cut what there is, as where little is asked for and only a large file waits.
pub fn choose(stock: &[Waiting], size: usize) -> Option<u64> {
    let wait = |file: &Waiting| {
        let (missing, cut) = (size.saturating_sub(file.filled), file.filled.saturating_sub(size));
        missing.saturating_mul(ZERO_COST).saturating_add(cut.saturating_mul(CUT_COST))
    };
    let better = |file: &&Waiting| file.filled > 0 && wait(file) < size.saturating_mul(ZERO_COST);
    stock.iter().filter(better).min_by_key(|file| (wait(file), file.size, file.id)).map(|file| file.id)
}

/// Whether others' `needs` are served as well without the file `id` as with it, each by a file of its own.
pub fn spares(stock: &[Waiting], id: u64, mut needs: Vec<usize>) -> bool {
    if needs.is_empty() {
        return true;
    }
    needs.sort_unstable();
    let served = |without: Option<u64>| {
        let mut filled: Vec<usize> =
            stock.iter().filter(|file| Some(file.id) != without).map(|file| file.filled).collect();
        filled.sort_unstable();
        // The largest first: the smallest file that has all of it, or the fullest.
        let serve = |need: &usize| {
            let enough = filled.partition_point(|filled| filled < need);
            let place = enough.min(filled.len().checked_sub(1)?);
            Some(filled.remove(place).min(*need))
        };
        needs.iter().rev().map_while(serve).sum::<usize>()
    };
    served(Some(id)) >= served(None)
}

/// Files to give up so that at least `bytes` of filled memory go back (everything, if that is not enough), the least
/// important first, and how long each stays: 0 if it is dropped. Only the last can stay in part: it is to be cut, and
/// is then full.
pub fn give_up(wanted: &[usize], stock: &[Waiting], bytes: usize) -> Vec<(u64, usize)> {
    let Assignment { places, surplus } = assign(wanted, stock);
    let mut missing = bytes;
    let mut given = Vec::new();
    for file in surplus.iter().rev().chain(places.iter().rev().flatten()) {
        if missing == 0 {
            break;
        }
        if file.filled > 0 {
            given.push((file.id, whole(file.filled.saturating_sub(missing))));
            missing = missing.saturating_sub(file.filled);
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::thread_cpu_ns;
    use proptest::prelude::*;

    const GIB: usize = 1 << 30;

    fn after(requests: &[usize]) -> Demand {
        let mut demand = Demand::new();
        requests.iter().for_each(|&size| demand.note(7, size, 0));
        demand
    }

    fn waiting(files: &[(usize, usize)]) -> Vec<Waiting> {
        files.iter().zip(1..).map(|(&(size, filled), id)| Waiting { id, size, filled }).collect()
    }

    #[test]
    fn one_file_waits_as_long_as_nothing_is_known_and_halves_of_a_large_pool() {
        let wanted = |size| Demand::new().wanted(&[], size).iter().map(|size| size >> 20).collect::<Vec<_>>();
        assert_eq!(wanted(32 * GIB), [16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 64]);
        for (size, one) in [(16 * GIB, 16384), (127 << 20, 126), (3 << 20, 2)] {
            assert_eq!(wanted(size), [one]);
        }
        assert_eq!(wanted(1 << 20), []);
        // Beside files that were told, the rest is anybody's.
        let told = Demand::new().wanted(&[(GIB, 1)], GIB + (130 << 20));
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
    fn files_become_what_is_wanted_with_the_least_zeroing() {
        // One that is full already.
        let stock = waiting(&[(8 * GIB, 8 * GIB)]);
        assert_eq!(next_step(&[8 * GIB], &stock), Step::Nothing);
        assert_eq!(next_step(&[8 * GIB, GIB], &stock), Step::Create { size: GIB });
        assert_eq!(next_step(&[4 * GIB, 4 * GIB], &stock), Step::Resize { id: 1, size: 4 * GIB });
        assert_eq!(next_step(&[], &stock), Step::Drop { id: 1 });
        // The larger becomes the larger, and the empty one goes.
        let stock = waiting(&[(2 * GIB, 2 * GIB), (4 * GIB, 4 * GIB), (6 * GIB, 0)]);
        assert_eq!(next_step(&[3 * GIB, 9 * GIB], &stock), Step::Drop { id: 3 });
        assert_eq!(next_step(&[3 * GIB, 9 * GIB], &stock[..2]), Step::Resize { id: 1, size: 3 * GIB });
        assert_eq!(next_step(&[9 * GIB, 3 * GIB], &stock[..2]), Step::Resize { id: 2, size: 9 * GIB });
        // The most important first, and of equals the fullest.
        let stock = waiting(&[(4 * GIB, 0), (2 * GIB, 0), (4 * GIB, GIB), (4 * GIB, 4 * GIB)]);
        assert_eq!(next_step(&[4 * GIB, 4 * GIB, 2 * GIB, 4 * GIB], &stock), Step::Fill { id: 3 });
        assert_eq!(next_step(&[4 * GIB, 2 * GIB, 4 * GIB, 4 * GIB], &stock), Step::Fill { id: 2 });
    }

    #[test]
    fn what_is_ready_stays_until_what_takes_its_place_is_made() {
        // All of one size are to be of another: one at a time.
        let stock = waiting(&[(4 * GIB, 4 * GIB); 4]);
        let Step::Drop { id } = next_step(&[8 * GIB, 8 * GIB], &stock) else { panic!() };
        let stock: Vec<_> = stock.into_iter().filter(|file| file.id != id).collect();
        let Step::Resize { id, size } = next_step(&[8 * GIB, 8 * GIB], &stock) else { panic!() };
        let stock: Vec<_> =
            stock.into_iter().map(|file| if file.id == id { Waiting { size, ..file } } else { file }).collect();
        assert_eq!(next_step(&[8 * GIB, 8 * GIB], &stock), Step::Fill { id });
    }

    #[test]
    fn whoever_asks_waits_as_short_as_can_be() {
        let stock = waiting(&[(8 * GIB, 8 * GIB), (4 * GIB, 3 * GIB), (4 * GIB, 4 * GIB), (GIB, GIB), (2 * GIB, 0)]);
        assert_eq!(choose(&stock, 4 * GIB), Some(3));
        assert_eq!(choose(&stock, 3 * GIB), Some(2));
        assert_eq!(choose(&stock, 5 * GIB), Some(1));
        // To zero 80 MiB costs as much as to cut 1,200.
        assert_eq!(choose(&stock, GIB + (80 << 20)), Some(4));
        assert_eq!(choose(&stock, 2 * GIB), Some(2));
        assert_eq!(choose(&stock, 64 * GIB), Some(1));
        assert_eq!(choose(&waiting(&[(8 * GIB, GIB), (4 * GIB, GIB)]), 2 * GIB), Some(2));
        assert_eq!(choose(&stock[4..], 2 * GIB), None);
        assert_eq!(choose(&[], 2 * GIB), None);
    }

    #[test]
    fn what_matters_least_is_given_up_first() {
        let wanted = [4 * GIB, 2 * GIB, 8 * GIB];
        let stock = waiting(&[
            (8 * GIB, 5 * GIB),
            (2 * GIB, 2 * GIB),
            (4 * GIB, 4 * GIB),
            (4 * GIB, GIB),
            (GIB, 0),
            (3 * GIB, GIB),
        ]);
        assert_eq!(give_up(&wanted, &stock, 0), []);
        assert_eq!(give_up(&wanted, &stock, 1), [(6, GIB - HUGE_PAGE_SIZE)]);
        assert_eq!(give_up(&wanted, &stock, 4 * GIB), [(6, 0), (4, 0), (1, 3 * GIB)]);
        assert_eq!(give_up(&wanted, &stock, 64 * GIB), [(6, 0), (4, 0), (1, 0), (2, 0), (3, 0)]);
    }

    trait Gib {
        fn map_gib(self) -> Vec<usize>;
    }

    impl Gib for Vec<usize> {
        fn map_gib(self) -> Vec<usize> {
            self.into_iter().map(|size| size * GIB).collect()
        }
    }

    /// Sizes in units of 2 MiB, small ones more often.
    fn sizes(most: usize) -> impl Strategy<Value = Vec<usize>> {
        let size = prop_oneof![Just(1usize), Just(2), 1usize..8, 1usize..100];
        proptest::collection::vec(size.prop_map(|size| size * HUGE_PAGE_SIZE), 0..most)
    }

    fn stocks(most: usize) -> impl Strategy<Value = Vec<Waiting>> {
        (sizes(most), proptest::collection::vec(0usize..5, most)).prop_map(|(sizes, filled)| {
            let part = |(&size, &quarters): (&usize, &usize)| (size, whole(size / 4 * quarters));
            waiting(&sizes.iter().zip(&filled).map(part).collect::<Vec<_>>())
        })
    }

    proptest! {
        #[test]
        fn what_is_wanted_adds_up(
            requests in sizes(80),
            told in proptest::collection::vec((0usize..64, 0usize..9000), 0..3),
            size in prop_oneof![0usize..64 << 20, 0usize..2 << 30, 0usize..1 << 45],
        ) {
            let told: Vec<_> = told.into_iter().map(|(size, count)| (size * HUGE_PAGE_SIZE, count)).collect();
            let mut demand = after(&requests);
            let wanted = demand.wanted(&told, size);
            prop_assert_eq!(wanted.iter().sum::<usize>(), whole(size));
            prop_assert!(wanted.len() <= FILES_MOST);
            prop_assert!(wanted.iter().all(|&size| size > 0 && whole(size) == size));
            // To ask again changes nothing.
            prop_assert_eq!(sorted(&demand.wanted(&told, size)), sorted(&wanted));
        }

        #[test]
        fn steps_lead_to_what_is_wanted(wanted in sizes(24), stock in stocks(24)) {
            let (target, mut steps) = (wanted.iter().sum::<usize>(), 0);
            let mut pool = Pool { wanted, stock, last: 1000, ..Pool::default() };
            let before = pool.stock.clone();
            let mut sum = pool.sum();
            while pool.step() {
                prop_assert!(pool.sum() <= sum.max(target));
                sum = pool.sum();
                steps += 1;
                prop_assert!(steps <= 2 * (before.len() + pool.wanted.len()));
            }
            prop_assert_eq!(sorted(&pool.stock.iter().map(|file| file.size).collect::<Vec<_>>()), sorted(&pool.wanted));
            prop_assert!(pool.stock.iter().all(Waiting::is_full));
            // Nothing that has its place was touched.
            let full = |size: &usize| before.iter().filter(|file| file.size == *size && file.is_full()).count();
            let same = pool.wanted.iter().filter(|size| full(size) > 0).map(|size| {
                let wanted = pool.wanted.iter().filter(|other| *other == size).count();
                size * wanted.min(full(size)) / wanted
            });
            prop_assert!(pool.zeroed + same.sum::<usize>() <= target + pool.wanted.len());
        }

        #[test]
        fn no_other_way_to_pair_files_zeroes_less(
            wanted in sizes(6), stock in stocks(6), order in Just((0..6).collect::<Vec<usize>>()).prop_shuffle(),
        ) {
            // None has its place.
            let stock: Vec<_> = stock.into_iter().filter(|file| !wanted.contains(&file.size)).collect();
            let kept = |(&size, &index): (&usize, &usize)| stock.get(index).map_or(0, |file| file.filled.min(size));
            let other = wanted.iter().zip(&order).map(kept).sum::<usize>();
            let mut pool = Pool { wanted, stock: stock.clone(), last: 1000, ..Pool::default() };
            pool.refill();
            prop_assert!(pool.zeroed + other <= pool.sum());
        }

        #[test]
        fn enough_is_given_up_and_no_more(wanted in sizes(12), stock in stocks(12), pages in 0usize..400) {
            let bytes = pages * HUGE_PAGE_SIZE;
            let given = give_up(&wanted, &stock, bytes);
            let filled = |id: u64| stock.iter().find(|file| file.id == id).unwrap().filled;
            let back: usize = given.iter().map(|&(id, stays)| filled(id) - stays).sum();
            prop_assert_eq!(back, bytes.min(stock.iter().map(|file| file.filled).sum()));
            let cut = given.iter().position(|&(_, stays)| stays > 0);
            prop_assert!(cut.is_none_or(|index| index == given.len() - 1));
        }
    }

    fn sorted(sizes: &[usize]) -> Vec<usize> {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes
    }

    /// Numbers that look random, the same in each run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((u128::from(self.0 >> 11) * bound as u128) >> 53) as usize
        }

        fn share(&mut self) -> f64 {
            self.below(1 << 30) as f64 / (1u64 << 30) as f64
        }
    }

    /// The pool of one node, and what it has done.
    #[derive(Default)]
    struct Pool {
        size: usize,
        demand: Demand,
        wanted: Vec<usize>,
        stock: Vec<Waiting>,
        turns: Refill,
        last: u64,
        asked: usize,
        possible: usize,
        ready: usize,
        zeroed: usize,
    }

    impl Pool {
        fn new(size: usize) -> Pool {
            let mut demand = Demand::new();
            let wanted = demand.wanted(&[], size);
            let mut pool = Pool { size, demand, wanted, ..Pool::default() };
            pool.refill();
            pool.zeroed = 0;
            pool
        }

        fn step(&mut self) -> bool {
            let step = self.turns.next(&self.wanted, &self.stock);
            let at = |id: u64| self.stock.iter().position(|file| file.id == id).unwrap();
            match step {
                Step::Create { size } => {
                    self.last += 1;
                    self.stock.push(Waiting { id: self.last, size, filled: 0 });
                }
                Step::Resize { id, size } => {
                    let at = at(id);
                    let file = &mut self.stock[at];
                    *file = Waiting { size, filled: file.filled.min(size), ..*file };
                }
                Step::Drop { id } => {
                    let at = at(id);
                    self.stock.remove(at);
                }
                Step::Fill { id } => {
                    let at = at(id);
                    let file = &mut self.stock[at];
                    self.zeroed += file.size - file.filled;
                    file.filled = file.size;
                }
                Step::Nothing => return false,
            }
            true
        }

        fn sum(&self) -> usize {
            self.stock.iter().map(|file| file.size).sum()
        }

        fn refill(&mut self) {
            while self.step() {}
        }

        fn take(&mut self, size: usize) {
            self.ready += self.take_as(7, size);
            self.asked += size;
            self.possible += size.min(self.size);
        }

        /// As a server does it. Returns how much of it was ready.
        fn take_as(&mut self, user: u32, size: usize) -> usize {
            let needs = self.demand.needs_of_others(user, self.size, 0);
            let chosen = choose(&self.stock, size).filter(|&id| spares(&self.stock, id, needs));
            let place = chosen.and_then(|id| self.stock.iter().position(|file| file.id == id));
            let ready = place.map_or(0, |at| self.stock.remove(at).filled.min(size));
            self.demand.note(user, size, 0);
            self.demand.served(user, ready, 0);
            self.wanted = self.demand.wanted(&[], self.size);
            ready
        }
    }

    fn flavour(numbers: &mut Numbers) -> usize {
        match numbers.below(10) {
            0..6 => 4 * GIB,
            6..9 => 8 * GIB,
            _ => 16 * GIB,
        }
    }

    fn any(numbers: &mut Numbers) -> usize {
        whole((256.0 * 2f64.powf(8.0 * numbers.share())) as usize * (1 << 20))
    }

    /// Asks `requests` times for what `next` says, and counts from the request `from` on. The pool is full at each
    /// request, or only after bursts of up to half of it. The share of what could be ready that was, and of what was
    /// asked for that was zeroed by whomever.
    fn shares(
        size: usize,
        bursts: bool,
        from: usize,
        requests: usize,
        next: &mut dyn FnMut(usize) -> usize,
    ) -> (f64, f64) {
        let (mut pool, mut left) = (Pool::new(size), 0);
        for request in 0..requests {
            if request == from {
                (pool.asked, pool.possible, pool.ready, pool.zeroed) = (0, 0, 0, 0);
            }
            let size = next(request);
            if size > left {
                pool.refill();
                left = if bursts { pool.size / 2 } else { 0 };
            }
            left = left.saturating_sub(size);
            pool.take(size);
        }
        let asked = pool.asked as f64;
        (pool.ready as f64 / pool.possible as f64, (pool.zeroed + pool.asked - pool.ready) as f64 / asked)
    }

    /// Every size of a pool that is simulated, in GiB, with requests one by one and in bursts.
    fn pools() -> impl Iterator<Item = (usize, bool)> {
        [8, 16, 32, 64, 100, 1024].into_iter().flat_map(|gib| [(gib, false), (gib, true)])
    }

    #[test]
    fn one_size_is_always_ready_and_nothing_is_zeroed_twice() {
        for (gib, bursts) in pools() {
            for mib in [512, 4 << 10, 5402, 16 << 10].into_iter().filter(|mib| gib * 1024 / mib <= 128) {
                // The files that there are before anything is known are too few for the first burst.
                let from = if bursts { gib * 512 / mib + 1 } else { 1 };
                let requests = from + 8 * gib * 1024 / mib + 100;
                let (ready, zeroed) = shares(gib * GIB, bursts, from, requests, &mut |_| mib << 20);
                // What a pool begins with is zeroed anew once, and once more what is cut off of a first file that is the whole pool, while
                // eight times as much is handed out.
                let anew = if gib <= 16 { 2.0 } else { 1.0 };
                assert!(ready >= 0.99 && zeroed <= 1.01 + anew / 8.0, "{gib} {bursts} {mib}: {ready} {zeroed}");
            }
        }
    }

    #[test]
    fn a_mix_of_flavours_is_ready_and_files_are_not_converted_back_and_forth() {
        let mut numbers = Numbers(1);
        for (gib, bursts) in pools() {
            let (ready, zeroed) = shares(gib * GIB, bursts, 100, 1000, &mut |_| flavour(&mut numbers));
            // Where all three have room.
            assert!(gib < 32 || ready >= 0.95, "{gib} {bursts}: {ready}");
            assert!(zeroed <= if gib < 1024 { 1.3 } else { 1.03 }, "{gib} {bursts}: {zeroed}");
        }
    }

    #[test]
    fn sizes_of_all_kinds_find_one_that_suits() {
        let mut numbers = Numbers(2);
        for (gib, bursts) in pools() {
            let (ready, zeroed) = shares(gib * GIB, bursts, 100, 1000, &mut |_| any(&mut numbers));
            let least = match gib {
                0..64 => 0.5,
                64..100 => 0.65,
                100..1024 => 0.8,
                _ => 0.98,
            };
            assert!(ready >= least && zeroed <= 1.5, "{gib} {bursts}: {ready} {zeroed}");
        }
    }

    #[test]
    fn a_change_of_flavours_is_followed_within_twenty_requests() {
        for (gib, _) in pools().filter(|(_, bursts)| !bursts) {
            for (old, new) in [(8, 4), (4, 8), (16, 1), (2, 16), (6, 7)] {
                let after = &mut |request| if request < 300 { old * GIB } else { new * GIB };
                let (ready, _) = shares(gib * GIB, false, 320, 350, after);
                assert!(ready >= 0.99, "{gib} {old} {new}: {ready}");
            }
        }
    }

    /// Two who ask for a machine now and then, and a third who takes and takes: small files, large ones, or those of others' sizes, and gives
    /// them back at once. The two have as much ready as without him, within a twentieth.
    #[test]
    fn nobody_gets_less_for_another_ones_greed() {
        let hostile: [fn(&mut Numbers) -> usize; 4] =
            [|_| HUGE_PAGE_SIZE, |_| 16 * GIB, |numbers| [4, 8][numbers.below(2)] * GIB, any];
        let share = |gib: usize, greed: Option<fn(&mut Numbers) -> usize>| {
            let (mut numbers, mut pool) = (Numbers(4), Pool::new(gib * GIB));
            let (mut asked, mut ready) = (0, 0);
            for request in 0..400 {
                let size = [4, 8][request % 2] * GIB;
                let had = pool.take_as(request as u32 % 2, size);
                if request >= 100 {
                    (asked, ready) = (asked + size, ready + had);
                }
                for _ in 0..20 {
                    if let Some(greed) = greed {
                        pool.take_as(9, greed(&mut numbers));
                    }
                    // What is refilled between two of his requests is less than he takes.
                    pool.step();
                    pool.step();
                }
            }
            ready as f64 / asked as f64
        };
        for gib in [24, 64] {
            let alone = share(gib, None);
            for (number, greed) in hostile.into_iter().enumerate() {
                let beside = share(gib, Some(greed));
                assert!(beside >= alone - 0.05, "{gib} GiB, greed {number}: {beside} instead of {alone}");
            }
        }
    }

    #[test]
    fn small_requests_leave_large_files_whole() {
        let stock = waiting(&[(16 * GIB, 16 * GIB)]);
        assert_eq!((choose(&stock, HUGE_PAGE_SIZE), choose(&stock, 512 << 20)), (None, None));
        assert_eq!((choose(&stock, 2 * GIB), choose(&stock, 12 * GIB)), (Some(1), Some(1)));
    }

    #[test]
    fn what_others_may_ask_for_next_stays_ready() {
        let mut demand = Demand::new();
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 0), []);
        demand.note(1, 8 * GIB, 0);
        demand.note(2, 60 * GIB, 0);
        demand.served(2, 60 * GIB, 0);
        // Whoever has had more leaves to the other one what that may ask for, and not the other way round.
        assert_eq!(
            (demand.needs_of_others(2, 64 * GIB, 0), demand.needs_of_others(1, 64 * GIB, 0)),
            (vec![8 * GIB], vec![])
        );
        // No more than a share, however much was asked for; nothing for whoever has been away.
        demand.served(1, 61 * GIB, 5);
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 5), [32 * GIB]);
        assert_eq!(demand.needs_of_others(1, 64 * GIB, 5 + ACTIVE.as_nanos() as u64), []);
        // What was long ago counts for less.
        let later = 7 * HALF.as_nanos() as u64;
        demand.note(2, 8 * GIB, later);
        demand.served(2, GIB, later);
        demand.note(1, 8 * GIB, later);
        assert_eq!(
            (demand.needs_of_others(2, 64 * GIB, later), demand.needs_of_others(1, 64 * GIB, later)),
            (vec![8 * GIB], vec![])
        );
        // Others are remembered as far as there is room for them.
        (0..200).for_each(|user| demand.note(user, HUGE_PAGE_SIZE, later));
        assert_eq!(demand.lately.len(), USERS_MOST);
    }

    #[test]
    fn a_file_is_spared_that_nobody_else_needs() {
        let stock = waiting(&[(8 * GIB, 8 * GIB), (4 * GIB, 4 * GIB), (4 * GIB, 4 * GIB), (16 * GIB, 2 * GIB)]);
        let spares = |id, needs: &[usize]| spares(&stock, id, needs.to_vec());
        assert!(
            spares(1, &[]) && spares(1, &[4 * GIB, 4 * GIB]) && spares(2, &[8 * GIB]) && spares(2, &[8 * GIB, 4 * GIB])
        );
        assert!(!spares(1, &[8 * GIB]) && !spares(2, &[4 * GIB, 4 * GIB, 8 * GIB]));
        // Half of what somebody needs is better than nothing, and what helps nobody can be had.
        assert!(!spares(1, &[12 * GIB]) && spares(4, &[4 * GIB]) && spares(2, &[12 * GIB]));
    }

    #[test]
    fn a_host_of_eight_nodes() {
        let mut numbers = Numbers(3);
        let mut pools: Vec<_> = (0..8).map(|_| Pool::new(1024 * GIB)).collect();
        for request in 0..10_000 {
            let node = numbers.below(8);
            let size = flavour(&mut numbers);
            pools[node].take(size);
            // One is refilled at a time.
            pools[request % 8].refill();
        }
        let sum = |of: fn(&Pool) -> usize| pools.iter().map(of).sum::<usize>() as f64;
        let (asked, ready, zeroed) = (sum(|pool| pool.asked), sum(|pool| pool.ready), sum(|pool| pool.zeroed));
        assert!(ready / asked >= 0.98 && zeroed / asked <= 1.3, "{} {}", ready / asked, zeroed / asked);
    }

    /// The shortest time of a few that a call takes.
    fn shortest(mut call: impl FnMut()) -> Duration {
        let time = |_| {
            let start = thread_cpu_ns();
            call();
            Duration::from_nanos(thread_cpu_ns() - start)
        };
        (0..20).map(time).min().unwrap()
    }

    #[test]
    fn the_largest_pools_cost_little() {
        let mut demand = Demand::new();
        (0..LATELY_MOST).for_each(|request| demand.note(7, (request % 256 + 1) * HUGE_PAGE_SIZE, 0));
        let wanted = demand.wanted(&[], 1 << 40);
        assert!(wanted.len() > FILES_MOST / 2, "{}", wanted.len());
        let file = |(index, &size): (usize, &usize)| Waiting { id: index as u64, size, filled: size };
        let stock: Vec<_> = wanted.iter().enumerate().map(file).collect();
        let times = [
            shortest(|| assert_eq!(demand.wanted(&[], 1 << 40).len(), wanted.len())),
            shortest(|| assert_eq!(next_step(&wanted, &stock), Step::Nothing)),
            shortest(|| assert!(choose(&stock, 5 << 20).is_some())),
            shortest(|| assert!(!give_up(&wanted, &stock, 1 << 30).is_empty())),
        ];
        let most = Duration::from_millis(if cfg!(debug_assertions) { 50 } else { 1 });
        assert!(times.iter().all(|time| *time < most), "{times:?}");
    }
}
