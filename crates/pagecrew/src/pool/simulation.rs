//! Pools of one node and of eight, and those who ask them, for half a day in a second: what is ready when it is asked for.

use super::demand::{Demand, FILES_MOST, LATELY_MOST, whole};
use super::stock::{Refill, Step, Waiting, choose, give_up, next_step, spares};
use crate::sys::HUGE_PAGE_SIZE;
use crate::sys::clock::thread_cpu_ns;
use std::time::Duration;

const GIB: usize = 1 << 30;

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
pub(super) struct Pool {
    pub(super) size: usize,
    pub(super) demand: Demand,
    pub(super) wanted: Vec<usize>,
    pub(super) stock: Vec<Waiting>,
    pub(super) turns: Refill,
    pub(super) last: u64,
    pub(super) asked: usize,
    pub(super) possible: usize,
    pub(super) ready: usize,
    pub(super) zeroed: usize,
}

impl Pool {
    /// Nothing is in it, and nothing has been done.
    pub(super) fn empty() -> Pool {
        let (demand, wanted, stock) = (Demand::new(FILES_MOST), Vec::new(), Vec::new());
        let turns = Refill::default();
        Pool { size: 0, demand, wanted, stock, turns, last: 0, asked: 0, possible: 0, ready: 0, zeroed: 0 }
    }

    fn new(size: usize) -> Pool {
        let mut demand = Demand::new(FILES_MOST);
        let wanted = demand.wanted(&[], size);
        let mut pool = Pool { size, demand, wanted, ..Pool::empty() };
        pool.refill();
        pool.zeroed = 0;
        pool
    }

    pub(super) fn step(&mut self) -> bool {
        let step = self.turns.next(&self.wanted, self.demand.next(), &self.stock);
        self.change(step);
        step != Step::Nothing
    }

    fn change(&mut self, step: Step) {
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
                self.turns.filled(id, file.size - file.filled);
                self.zeroed += file.size - file.filled;
                file.filled = file.size;
            }
            Step::Nothing => {}
        }
    }

    pub(super) fn sum(&self) -> usize {
        self.stock.iter().map(|file| file.size).sum()
    }

    pub(super) fn refill(&mut self) {
        while self.step() {}
    }

    fn take(&mut self, size: usize) {
        self.ready += self.take_as(7, size);
        self.asked += size;
        self.possible += size.min(self.size);
    }

    fn take_as(&mut self, user: u32, size: usize) -> usize {
        self.take_at(user, size, 0)
    }

    /// As a server does it. Returns how much of it was ready.
    fn take_at(&mut self, user: u32, size: usize, now_ns: u64) -> usize {
        let needs = self.demand.needs_of_others(user, self.size, now_ns);
        let chosen = choose(&self.stock, size).filter(|&id| spares(&self.stock, id, needs));
        let place = chosen.and_then(|id| self.stock.iter().position(|file| file.id == id));
        let ready = place.map_or(0, |at| self.stock.remove(at).filled.min(size));
        self.demand.note(user, size, now_ns);
        self.demand.served(user, ready, now_ns);
        self.wanted = self.demand.wanted(&[], self.size);
        ready
    }

    /// Fills up to `bytes`, in pieces as a filler does it, with all the steps on the way.
    fn fill(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let step = self.turns.next(&self.wanted, self.demand.next(), &self.stock);
            match step {
                Step::Fill { id } => {
                    let file = self.stock.iter_mut().find(|file| file.id == id).unwrap();
                    let piece = (file.size - file.filled).min(32 << 20).min(bytes);
                    file.filled += piece;
                    self.turns.filled(id, piece);
                    self.zeroed += piece;
                    bytes -= piece;
                }
                Step::Nothing => return,
                step => self.change(step),
            }
        }
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
fn shares(size: usize, bursts: bool, from: usize, requests: usize, next: &mut dyn FnMut(usize) -> usize) -> (f64, f64) {
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
                // More than the two take, and less than he takes but where he takes small ones.
                pool.fill(GIB);
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

/// The same where filling is slower than they take together: each has what he asks for as far as that is no more than a third of what is filled,
/// but for some that is zeroed in vain. Where there is enough for him, the two have what they have alone.
#[test]
fn filling_that_is_behind_is_shared_by_bytes() {
    const MIB: usize = 1 << 20;
    const TICK_NS: u64 = 75_000_000;
    const TICKS: u64 = 1000;
    let quiet = [[4, 8, 16], [2, 6, 32]];
    let hostile: [fn(&mut Numbers) -> usize; 4] = [
        |_| HUGE_PAGE_SIZE,
        |_| 128 * MIB,
        |numbers| [4, 8, 16, 2, 6, 32][numbers.below(6)] * MIB,
        |numbers| (1 + numbers.below(64)) * HUGE_PAGE_SIZE,
    ];
    // `rate` is the MiB that are filled in a second. Returns the share that the two had ready, and what would be fair.
    let share = |rate: usize, greed: Option<fn(&mut Numbers) -> usize>| {
        let (mut numbers, mut greedy, mut pool) = (Numbers(4), Numbers(5), Pool::new(512 * MIB));
        let (mut asked, mut ready, mut left) = ([0; 2], 0, 0);
        for tick in 0..TICKS {
            let user = tick as usize % 2;
            let size = quiet[user][numbers.below(3)] * MIB;
            let had = pool.take_at(user as u32, size, tick * TICK_NS);
            if tick >= TICKS / 4 {
                asked[user] += size;
                ready += had;
            }
            // He asks 20 times as often.
            for part in 0..20 {
                if let Some(greed) = greed {
                    pool.take_at(9, greed(&mut greedy), tick * TICK_NS + part * (TICK_NS / 20));
                }
                left += rate * MIB / 1000 * TICK_NS as usize / 20_000_000;
                pool.fill(whole(left));
                left -= whole(left);
            }
        }
        let seconds = (TICKS - TICKS / 4) * TICK_NS / 1_000_000_000;
        let third = rate * MIB / 3 * seconds as usize;
        let all = asked.iter().sum::<usize>() as f64;
        (ready as f64 / all, asked.iter().map(|&asked| asked.min(third)).sum::<usize>() as f64 / all)
    };
    for rate in [50, 150, 300, 600] {
        let alone = share(rate, None).0;
        for (number, greed) in hostile.into_iter().enumerate() {
            let (beside, fair) = share(rate, Some(greed));
            let least = if fair < 1.0 { 0.8 * fair.min(alone) } else { alone - 0.05 };
            assert!(beside >= least, "{rate} MiB/s, greed {number}: {beside} instead of {alone}");
        }
    }
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
    let mut demand = Demand::new(FILES_MOST);
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
