//! Which files the pool of one NUMA node keeps ready: pure arithmetic.
//!
//! Memory in a file can't be moved to another file. A file can be made longer, and what is new then has to be zeroed
//! (about 110 ms a GiB of one CPU); or shorter, which is quick (4 ms a GiB), but what was cut off has to be zeroed anew
//! in another file. So it matters which sizes wait.

use super::demand::{Need, whole};
use std::collections::BTreeMap;
use std::ops::Range;

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

/// Which file is filled next, so that nobody has all of the filling. First come those for what users may ask for next, the users in turn; then
/// the others, the sizes in turn: who takes one small file after the other would have them filled anew all the time, ahead of others' large ones.
#[derive(Debug, Clone, Default)]
pub struct Refill {
    users: Shares<u32>,
    sizes: Shares<usize>,
    /// The file that is being filled, and whose turn it is.
    at: Option<(u64, Turn)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    User(u32),
    Size(usize),
}

/// How many bytes were filled for whom: fair queueing by the time of the end (Demers, Keshav and Shenker, 1989). Whoever would have had fewest at the end
/// of the file that he misses has the next turn. So of a small file and a large one the small one is first, two large ones are filled
/// one after the other, and whoever is always missing something has no more than any other who is.
#[derive(Debug, Clone)]
struct Shares<T> {
    done: BTreeMap<T, u64>,
    /// The fewest that anybody had who missed something, and so where somebody begins who missed nothing meanwhile: nothing is saved up.
    begin: u64,
}

impl<T> Default for Shares<T> {
    fn default() -> Shares<T> {
        Shares { done: BTreeMap::new(), begin: 0 }
    }
}

impl<T: Ord + Copy> Shares<T> {
    fn filled(&mut self, whose: T, bytes: usize) {
        let done = self.of(whose) + bytes as u64;
        self.done.insert(whose, done);
    }

    fn of(&self, whose: T) -> u64 {
        self.done.get(&whose).map_or(self.begin, |done| self.begin.max(*done))
    }

    /// Whose turn it is of those who are `missing` so many bytes.
    fn next(&mut self, missing: impl Iterator<Item = (T, usize)>) -> Option<T> {
        let ends: Vec<_> = missing.map(|(whose, bytes)| (self.of(whose), bytes, whose)).collect();
        let Some(begin) = ends.iter().map(|(done, ..)| *done).min() else {
            *self = Shares::default();
            return None;
        };
        self.begin = begin;
        self.done.retain(|_, done| *done > begin);
        ends.into_iter().map(|(done, bytes, whose)| (done + bytes as u64, whose)).min().map(|(_, whose)| whose)
    }
}

impl Refill {
    /// `bytes` of the file `id` were filled.
    pub fn filled(&mut self, id: u64, bytes: usize) {
        match self.at {
            Some((at, Turn::User(user))) if at == id => self.users.filled(user, bytes),
            Some((at, Turn::Size(size))) if at == id => self.sizes.filled(size, bytes),
            _ => {}
        }
    }

    /// As [`next_step`], in turn; `next` are the places of what is for each user.
    pub fn next(&mut self, wanted: &[usize], next: &[(u32, Range<usize>)], stock: &[Waiting]) -> Step {
        let places = assign(wanted, stock).places;
        let missing = |place: usize| {
            let left = wanted[place] - places[place].map_or(0, |file| file.filled.min(wanted[place]));
            (left > 0).then_some(left)
        };
        let of_user = |(user, range): &(u32, Range<usize>)| Some((*user, range.clone().find_map(missing)?));
        let of_users: Vec<_> = next.iter().filter_map(of_user).collect();
        let mut turn = None;
        let mut step = Step::Nothing;
        if let Some(user) = self.users.next(of_users.into_iter()) {
            let range = next.iter().find(|(other, _)| *other == user).map_or(0..0, |(_, range)| range.clone());
            turn = Some(Turn::User(user));
            step = step_of(wanted, stock, |place| range.contains(&place));
        }
        if step == Step::Nothing {
            let mut of_sizes = BTreeMap::new();
            for (place, &size) in wanted.iter().enumerate() {
                if let Some(left) = missing(place) {
                    of_sizes.entry(size).or_insert(left);
                }
            }
            let size = self.sizes.next(of_sizes.into_iter());
            turn = size.map(Turn::Size);
            step = step_of(wanted, stock, |place| Some(wanted[place]) == size);
        }
        if let Step::Fill { id } = step {
            self.at = turn.map(|turn| (id, turn));
        }
        step
    }
}

/// The next thing to do so that what waits becomes what is `wanted`, with the least zeroing. Files never add up to more
/// than what is wanted, or than what they added up to before. What is there is used up only as the files that take its
/// place are made, one by one.
pub fn next_step(wanted: &[usize], stock: &[Waiting]) -> Step {
    step_of(wanted, stock, |_| true)
}

/// The same, for places that have a turn.
fn step_of(wanted: &[usize], stock: &[Waiting], mut has_turn: impl FnMut(usize) -> bool) -> Step {
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
            _ if !has_turn(index) => {}
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
/// least cost, of equals the smallest. None: nothing that waits is filled, or to zero it all on the spot costs no more than to cut what
/// there is, as where little is asked for and only a large file waits.
///
/// What is zeroed on the spot costs whoever asks. What is cut costs him little, and others more the less is ready: it is zeroed anew
/// in another file, and they wait for that as long as filling is behind.
pub fn choose(stock: &[Waiting], size: usize) -> Option<u64> {
    let sum = |of: fn(&Waiting) -> usize| stock.iter().map(of).sum::<usize>();
    let (all, filled) = (sum(|file| file.size), sum(|file| file.filled));
    let behind = (all.saturating_sub(filled) as f64 / all.max(1) as f64 * (ZERO_COST - CUT_COST) as f64) as usize;
    let cost = |file: &Waiting| {
        let (missing, cut) = (size.saturating_sub(file.filled), file.filled.saturating_sub(size));
        missing.saturating_mul(ZERO_COST).saturating_add(cut.saturating_mul(CUT_COST + behind))
    };
    let better = |file: &&Waiting| file.filled > 0 && cost(file) < size.saturating_mul(ZERO_COST);
    stock.iter().filter(better).min_by_key(|file| (cost(file), file.size, file.id)).map(|file| file.id)
}

/// Whether others' `needs` are served as well without the file `id` as with it, each by a file of its own.
pub fn spares(stock: &[Waiting], id: u64, mut needs: Vec<Need>) -> bool {
    if needs.is_empty() {
        return true;
    }
    needs.sort_unstable();
    let served = |without: Option<u64>| {
        let mut filled: Vec<usize> =
            stock.iter().filter(|file| Some(file.id) != without).map(|file| file.filled).collect();
        filled.sort_unstable();
        // The largest first: the smallest file that has all of it, or the fullest.
        let serve = |&Need { size, largest }: &Need| {
            let place = filled.partition_point(|filled| *filled < size).min(filled.len().checked_sub(1)?);
            Some(if filled[place] <= largest { filled.remove(place).min(size) } else { 0 })
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
    use crate::pool::demand::{Demand, FILES_MOST};
    use crate::pool::simulation::Pool;
    use crate::sys::HUGE_PAGE_SIZE;
    use proptest::prelude::*;

    const GIB: usize = 1 << 30;

    fn after(requests: &[usize]) -> Demand {
        let mut demand = Demand::new(FILES_MOST);
        requests.iter().for_each(|&size| demand.note(7, size, 0));
        demand
    }

    fn waiting(files: &[(usize, usize)]) -> Vec<Waiting> {
        files.iter().zip(1..).map(|(&(size, filled), id)| Waiting { id, size, filled }).collect()
    }

    #[test]
    fn whoever_misses_something_gets_an_equal_part_of_the_filling() {
        const PIECE: usize = 32;
        // What each misses, and what is left of his file; the last one comes late.
        let size = [2, 8, 128, 8];
        let (mut shares, mut left, mut got) = (Shares::default(), size, [0; 4]);
        for turn in 0..10_000 {
            let missing = (0..4).filter(|&user| user < 3 || turn >= 5_000).map(|user| (user, left[user]));
            let user = shares.next(missing).unwrap();
            let piece = left[user].min(PIECE);
            shares.filled(user, piece);
            got[user] += piece;
            left[user] -= piece;
            if left[user] == 0 {
                left[user] = size[user];
            }
            if turn == 4_999 {
                assert!(got[..3].iter().all(|bytes| bytes.abs_diff(got[0]) <= size[2]), "{got:?}");
                got = [0; 4];
            }
        }
        // Who missed nothing before has no more for it.
        assert!(got.iter().all(|bytes| bytes.abs_diff(got[0]) <= 2 * size[2]) && got[3] > 5_000, "{got:?}");
        // Of a small file and a large one that is begun the small one is first; then the large one goes on.
        let mut shares = Shares::default();
        assert_eq!(shares.next([(1, 128)].into_iter()), Some(1));
        shares.filled(1, PIECE);
        assert_eq!(shares.next([(1, 96), (2, 8)].into_iter()), Some(2));
        shares.filled(2, 8);
        assert_eq!((shares.next([(1, 96)].into_iter()), shares.next([].into_iter())), (Some(1), None));
    }

    #[test]
    fn what_is_cut_costs_more_the_less_is_ready() {
        // To zero 2 GiB costs as much as to cut 30, while all is ready.
        let stock = |full: usize| -> Vec<_> {
            let files = [(5 * GIB, 5 * GIB)].into_iter();
            waiting(
                &files.chain((0..4).map(|place| (5 * GIB, if place < full { 5 * GIB } else { 0 }))).collect::<Vec<_>>(),
            )
        };
        assert_eq!((choose(&stock(4), 2 * GIB), choose(&stock(1), 2 * GIB)), (Some(1), Some(1)));
        assert_eq!((choose(&stock(4), GIB), choose(&stock(0), 3 * GIB)), (Some(1), Some(1)));
        assert_eq!((choose(&stock(0), 2 * GIB), choose(&stock(0), GIB)), (None, None));
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

    #[test]
    fn small_requests_leave_large_files_whole() {
        let stock = waiting(&[(16 * GIB, 16 * GIB)]);
        assert_eq!((choose(&stock, HUGE_PAGE_SIZE), choose(&stock, 512 << 20)), (None, None));
        assert_eq!((choose(&stock, 2 * GIB), choose(&stock, 12 * GIB)), (Some(1), Some(1)));
    }

    #[test]
    fn a_file_is_spared_that_nobody_else_needs() {
        let stock = waiting(&[(8 * GIB, 8 * GIB), (4 * GIB, 4 * GIB), (4 * GIB, 4 * GIB), (16 * GIB, 2 * GIB)]);
        let up_to = |id, needs: &[usize], times: usize| {
            spares(&stock, id, needs.iter().map(|&size| Need { size, largest: size * times }).collect())
        };
        let spares = |id, needs: &[usize]| up_to(id, needs, 8);
        assert!(
            spares(1, &[]) && spares(1, &[4 * GIB, 4 * GIB]) && spares(2, &[8 * GIB]) && spares(2, &[8 * GIB, 4 * GIB])
        );
        assert!(!spares(1, &[8 * GIB]) && !spares(2, &[4 * GIB, 4 * GIB, 8 * GIB]));
        // Half of what somebody needs is better than nothing, and what helps nobody can be had.
        assert!(!spares(1, &[12 * GIB]) && spares(4, &[4 * GIB]) && spares(2, &[12 * GIB]));
        // A file that is much larger than what somebody needs is not kept for that.
        let (all, few) = ([GIB; 4], [GIB; 3]);
        assert!(!up_to(1, &all, 8) && up_to(1, &all, 7) && up_to(1, &few, 8));
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
            let mut pool = Pool { wanted, stock, last: 1000, ..Pool::empty() };
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
            let mut pool = Pool { wanted, stock: stock.clone(), last: 1000, ..Pool::empty() };
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
}
