//! Policy of retention and of zeroing ahead: pure functions and small state machines over numbers and the time.
//!
//! Three rules answer "who gets hurt by memory that is kept":
//! 1. What is kept raises the program's peak by no more than [`slack`], and by what `churn.rs` grants meanwhile: other than that, live and
//!    retained memory together stay below the most that the program has itself had live at once.
//! 2. What nothing needed for the decay time goes back, whether the program calls or not.
//! 3. The machine and the control group come first: little available memory, a near limit or stalls end retention at once.

use crate::sys::cgroup;
use std::time::Duration;

/// What retention depends on, at one time. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signals {
    /// Resident memory of the process.
    pub resident: usize,
    /// The most that was ever resident, retained memory included.
    pub highest: usize,
    /// Of that, free memory that is retained.
    pub retained: usize,
    /// The machine's memory.
    pub total: usize,
    /// What the machine could still give.
    pub available: usize,
    /// The control group's limit that is closest to being reached.
    pub group: Option<cgroup::Memory>,
    /// Whether tasks of the program's control group, or of this machine where groups don't say so, lately waited for memory for more than a
    /// tenth of the time.
    pub stalled: bool,
}

/// The machine keeps this part of its memory available, whatever is retained.
const FLOOR_SHARE: usize = 20;
/// The control group keeps this part of its limit free, and no less than what a program may touch for the first time before a
/// helper has looked again.
const GROUP_SHARE: u64 = 16;
const GROUP_LEAST: u64 = 64 << 20;
/// The most that a program had resident before anything of it was retained: what the kernel says now (`highest`), unless that is
/// still what it said when the region was made (`at_start`), since it remembers what the process was before `exec`; then, what is
/// known to have been in use.
pub fn first_peak(at_start: usize, highest: usize, in_use: usize) -> usize {
    if highest > at_start { highest } else { in_use }
}

/// Growth outside the region between two looks that says nothing about the next look, in bytes.
const GROWTH_NOISE: usize = 1 << 20;

impl Signals {
    /// Memory that the program itself holds.
    pub fn live(&self) -> usize {
        self.resident.saturating_sub(self.retained)
    }

    /// Memory of the program that is not in the region, of which `used` bytes are in use.
    pub fn outside(&self, used: usize) -> usize {
        self.live().saturating_sub(used)
    }

    /// The most that the program certainly had live at once since the last look: the most that was in use in the region since then
    /// (`most_used`, now `used`), and the less of what it had outside it then (`outside`) and now; but no more than was ever
    /// resident. With the more of the two, a program that frees a span and then grows outside would count both. At the first
    /// look (`outside` is `None`) nothing is known of the time before.
    pub fn peak_live(&self, used: usize, most_used: usize, outside: Option<usize>) -> usize {
        let before = outside.unwrap_or(0);
        let spike = (self.outside(used).min(before) + most_used).min(self.highest);
        spike.max(self.live())
    }

    /// How much may be retained, in bytes. `peak` is the most that was ever live; `limit` is the user's bound, half of the usable
    /// memory where there is none.
    pub fn retain_target(&self, peak: usize, limit: Option<usize>) -> usize {
        let usable = self.group.map_or(self.total, |group| self.total.min(group.limit as usize));
        let bound = limit.unwrap_or(usable / 2);
        if self.cramped(peak) {
            return 0;
        }
        let own_peak = peak.saturating_sub(self.live());
        own_peak.min(bound).min(self.machine_allows()).min(self.group_allows())
    }

    /// Whether the program, back at its own peak, would come so near the control group's limit that memory on its way back might
    /// be what is missing. Where it lives without Pagecrew, it has to live with it.
    pub fn cramped(&self, peak: usize) -> bool {
        self.group.is_some_and(|group| {
            let others = group.used.saturating_sub(self.resident as u64);
            others + peak as u64 + group_reserve(group.limit) > group.limit
        })
    }

    fn machine_allows(&self) -> usize {
        if self.stalled {
            return 0;
        }
        // What is retained counts as taken already, so all of it could stay while the floor holds.
        (self.retained + self.available).saturating_sub(self.total / FLOOR_SHARE)
    }

    fn group_allows(&self) -> usize {
        self.group.map_or(usize::MAX, |group| {
            let spare = (self.retained as u64 + group.limit).saturating_sub(group.used);
            (spare as usize).saturating_sub(group_reserve(group.limit) as usize)
        })
    }

    /// Whether the machine or the control group, and not the program's own peak, is what bounds retention below what is retained.
    pub fn pressure(&self) -> bool {
        self.machine_allows().min(self.group_allows()) < self.retained
    }
}

/// What a control group of this limit keeps free.
fn group_reserve(limit: u64) -> u64 {
    (limit / GROUP_SHARE).max(GROUP_LEAST)
}

/// How much the program is about to grow outside the region before the next look: as much as since the last one, when it was
/// `before` bytes there and now is `now`.
pub fn expected_growth(before: usize, now: usize) -> usize {
    Some(now.saturating_sub(before)).filter(|&growth| growth > GROWTH_NOISE).unwrap_or(0)
}

/// How much more than its peak a program of that peak may have, its retained memory included, where nothing is short: a program whose sizes
/// vary leaves gaps that its next request does not fit into, and giving each of them back costs it more in page faults than the memory is
/// worth. Every malloc keeps more than that.
pub fn slack(peak: usize) -> usize {
    let small = (peak / SLACK_SMALL).min(SLACK_MOST).saturating_sub(peak / SLACK_FADES);
    small.max(peak / SLACK_SHARE)
}

/// A small program may have half as much again, up to 8 MiB, which fades as it grows: a large one may have a twenty-fourth part.
const SLACK_SMALL: usize = 2;
const SLACK_MOST: usize = 8 << 20;
const SLACK_FADES: usize = 16;
const SLACK_SHARE: usize = 24;

/// Windows that the decay time is cut into.
const WINDOWS: usize = 8;

/// Finds memory that was not needed for the whole of the decay time: the least that was retained at any moment of it.
#[derive(Debug)]
pub struct LowWater {
    decay_ns: u64,
    least: [usize; WINDOWS],
    /// The window that is filled now, counted from the first.
    window: u64,
}

impl LowWater {
    /// Nothing retained so far, at time `now` in nanoseconds.
    pub fn new(decay: Duration, now: u64) -> LowWater {
        let decay_ns = decay.as_nanos().min(u64::MAX as u128 / 2) as u64;
        let mut low = LowWater { decay_ns, least: [0; WINDOWS], window: 0 };
        low.window = now / low.window_ns();
        low
    }

    /// Length of a window in nanoseconds.
    pub fn window_ns(&self) -> u64 {
        (self.decay_ns / WINDOWS as u64).max(1)
    }

    /// Takes note that `retained` bytes are retained at time `now`. It has to hear of every low, so it is called whenever less is
    /// retained, besides regularly.
    pub fn note(&mut self, retained: usize, now: u64) {
        let window = (now / self.window_ns()).max(self.window);
        // Windows in which nobody called had what is retained now or more; the call that lowered it would have been noted.
        for passed in (self.window + 1..=window).rev().take(WINDOWS) {
            self.least[(passed % WINDOWS as u64) as usize] = retained;
        }
        self.window = window;
        let current = &mut self.least[(window % WINDOWS as u64) as usize];
        *current = (*current).min(retained);
    }

    /// Bytes of `retained` that were not needed for the decay time. Whoever discards them says so by [`LowWater::discarded`].
    pub fn surplus(&self, retained: usize) -> usize {
        if self.decay_ns == 0 { retained } else { self.least.into_iter().min().unwrap_or(0).min(retained) }
    }

    /// Takes note that `bytes` less are retained, for another reason than need.
    pub fn discarded(&mut self, bytes: usize) {
        self.least.iter_mut().for_each(|least| *least = least.saturating_sub(bytes));
    }
}

/// Length of the window in which demand for zeroed memory is summed up.
const DEMAND_WINDOW_NS: u64 = 100_000_000;
/// After this many windows without demand, a tenth of it is left.
const DEMAND_DECAY_WINDOWS: u64 = 50;

/// How much zeroed memory the program asks for: rises at once, falls slowly.
#[derive(Debug, Default)]
pub struct ZeroDemand {
    window: u64,
    sum: usize,
    level: usize,
}

impl ZeroDemand {
    /// Takes note that `bytes` of zeroes were asked for at time `now`.
    pub fn note(&mut self, bytes: usize, now: u64) {
        self.advance(now);
        self.sum = self.sum.saturating_add(bytes);
        self.level = self.level.max(self.sum);
    }

    /// Takes note that `bytes` that were zeroed ahead were used where zeroes were not needed: that much less is worth having.
    pub fn wasted(&mut self, bytes: usize) {
        self.level = self.level.saturating_sub(bytes);
    }

    /// Bytes that are worth having zeroed at time `now`.
    pub fn goal(&mut self, now: u64) -> usize {
        self.advance(now);
        self.level
    }

    fn advance(&mut self, now: u64) {
        let window = now / DEMAND_WINDOW_NS;
        let passed = window.saturating_sub(self.window);
        if passed == 0 {
            return;
        }
        // 0.955 ^ 50 is a tenth.
        self.level = (0..passed.min(8 * DEMAND_DECAY_WINDOWS)).fold(self.level, |level, _| level - level.div_ceil(22));
        (self.window, self.sum) = (window, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: usize = 1 << 30;

    fn signals() -> Signals {
        Signals {
            resident: 4 * G,
            highest: 4 * G,
            retained: G,
            total: 64 * G,
            available: 40 * G,
            group: None,
            stalled: false,
        }
    }

    #[test]
    fn slack_is_half_of_little_and_a_small_part_of_much() {
        let mib = |peak: usize| slack(peak << 20) >> 20;
        assert_eq!([0, 8, 32, 64, 128, 256, 1024, 36 << 10].map(mib), [0, 3, 6, 4, 5, 10, 42, 1536]);
        assert!((0..4096).all(|peak| mib(peak) <= 8 || mib(peak) <= peak / 24));
    }

    #[test]
    fn retention_stays_below_the_programs_own_peak() {
        assert_eq!(signals().retain_target(5 * G, None), 2 * G);
        assert_eq!(signals().retain_target(3 * G, None), 0);
        assert_eq!(signals().retain_target(60 * G, Some(G)), G);
    }

    #[test]
    fn a_peak_between_two_looks_is_not_missed() {
        let signals = Signals { resident: 4 * G, highest: 9 * G, retained: 3 * G, ..signals() };
        assert_eq!(signals.peak_live(0, 2 * G, None), 2 * G);
        // One gigabyte outside the region, and four in it a moment ago.
        assert_eq!(signals.peak_live(0, 4 * G, Some(G)), 5 * G);
        // Outside the region it has only grown since.
        assert_eq!(signals.peak_live(0, 4 * G, Some(G / 4)), 4 * G + G / 4);
        // A span that was never touched was never resident.
        assert_eq!(signals.peak_live(0, 40 * G, Some(G)), 9 * G);
        assert_eq!(signals.peak_live(G, G, Some(0)), G);
    }

    #[test]
    fn pressure_ends_retention() {
        assert_eq!(Signals { stalled: true, ..signals() }.retain_target(60 * G, None), 0);
        let scarce = Signals { available: 2 * G, ..signals() };
        assert!(scarce.retain_target(60 * G, None) == 0 && scarce.pressure());
        let near = cgroup::Memory { limit: 5 * G as u64, used: 4 * G as u64 + G as u64 / 2 };
        let limited = Signals { group: Some(near), ..signals() };
        assert_eq!(limited.retain_target(4 * G, None), G);
        let others =
            Signals { group: Some(cgroup::Memory { used: 4 * G as u64 + G as u64 * 3 / 4, ..near }), ..signals() };
        assert_eq!(others.group_allows(), G + G / 4 - 5 * G / 16);
        assert!(!limited.pressure() && others.pressure());
        let at = Signals { group: Some(cgroup::Memory { limit: 4 * G as u64, used: 4 * G as u64 }), ..signals() };
        assert!(at.retain_target(60 * G, None) < G && at.pressure());
        assert!(!signals().pressure());
        let just = Signals { available: 64 * G / FLOOR_SHARE, ..signals() };
        assert!(!just.pressure() && Signals { available: just.available - 1, ..just }.pressure());
    }

    #[test]
    fn a_program_that_needs_its_group_up_to_the_limit_retains_nothing() {
        let m = 1 << 20;
        let group = |limit, used| Some(cgroup::Memory { limit, used });
        let own = Signals { resident: 100 << 20, retained: 50 << 20, group: group(302 * m, 110 * m), ..signals() };
        assert!(own.cramped(300 << 20) && own.retain_target(300 << 20, None) == 0);
        assert!(!own.cramped(200 << 20) && own.retain_target(200 << 20, None) > 0);
        // Others in the group count as well.
        assert!(Signals { group: group(302 * m, 200 * m), ..own }.cramped(200 << 20));
        assert!(!Signals { group: None, ..own }.cramped(300 << 20));
        // Of 302 MiB, 64 are kept free, and 10 belong to others.
        assert!(!own.cramped(228 << 20) && own.cramped((228 << 20) + 1));
        assert_eq!([64 * m, 4096 * m].map(group_reserve), [64 * m, 256 * m]);
    }

    #[test]
    fn what_a_process_was_before_exec_is_not_its_peak() {
        assert_eq!(first_peak(10 << 20, 300 << 20, 290 << 20), 300 << 20);
        assert_eq!(first_peak(4 * G, 4 * G, 290 << 20), 290 << 20);
    }

    #[test]
    fn growth_is_expected_to_go_on_and_noise_is_not() {
        assert_eq!(expected_growth(G, G + (20 << 20)), 20 << 20);
        assert_eq!(expected_growth(G, G + (20 << 10)), 0);
        assert_eq!(expected_growth(G, 0), 0);
        assert_eq!([0, 1].map(|more| expected_growth(G, G + GROWTH_NOISE + more)), [0, GROWTH_NOISE + 1]);
    }

    proptest! {
        #[test]
        fn the_target_never_breaks_a_rule(
            resident in 0..256 * G, share in 0usize..=100, available in 0..256 * G, peak in 0..256 * G,
            limit in 1..256 * G, used_share in 0usize..=100, limited: bool,
        ) {
            let retained = resident / 100 * share;
            let group = cgroup::Memory { limit: limit as u64, used: (limit / 100 * used_share) as u64 };
            let signals = Signals { resident, highest: resident, retained, total: 256 * G, available, group: limited.then_some(group), stalled: false };
            let target = signals.retain_target(peak, None);
            prop_assert!(target == 0 || signals.live() + target <= peak);
            prop_assert!(target <= 128 * G);
            // If it were filled up to the target, the floor would hold.
            prop_assert!(target == 0 || retained + available >= target + 256 * G / FLOOR_SHARE);
        }
    }

    #[test]
    fn only_what_was_never_needed_decays() {
        let second = 1_000_000_000;
        let mut low = LowWater::new(Duration::from_secs(8), 100 * second);
        // A program that uses all but 1 GiB of 4 GiB once a second.
        for step in 0..60u64 {
            low.note(if step % 2 == 0 { 4 * G } else { G }, 100 * second + step * second / 2);
        }
        assert_eq!(low.surplus(4 * G), G);
        low.discarded(G);
        assert_eq!(low.surplus(3 * G), 0);
        // Then it is idle: all of it goes once the decay time has passed, and not before.
        low.note(3 * G, 131 * second);
        low.note(3 * G, 136 * second);
        assert_eq!(low.surplus(3 * G), 0);
        low.note(3 * G, 140 * second);
        assert_eq!(low.surplus(3 * G), 3 * G);
    }

    #[test]
    fn without_decay_time_all_goes_at_once() {
        assert_eq!(LowWater::new(Duration::ZERO, 5).surplus(G), G);
    }

    #[test]
    fn what_was_retained_in_a_burst_is_not_surplus_before_the_decay_time() {
        let mut low = LowWater::new(Duration::from_secs(8), 0);
        low.note(4 * G, 1_000_000_000);
        assert_eq!(low.surplus(4 * G), 0);
        low.note(4 * G, 7_900_000_000);
        assert_eq!(low.surplus(4 * G), 0);
        low.note(4 * G, 9_000_000_000);
        assert_eq!(low.surplus(4 * G), 4 * G);
    }

    #[test]
    fn demand_for_zeroes_rises_at_once_and_falls_slowly() {
        let mut demand = ZeroDemand::default();
        assert_eq!(demand.goal(0), 0);
        demand.note(G, 1_000_000_000);
        assert_eq!(demand.goal(1_000_000_000), G);
        assert!(demand.goal(2_000_000_000) > G / 2);
        let later = demand.goal(6_000_000_000);
        assert!(later > G / 20 && later < G / 5, "{later}");
        assert_eq!(demand.goal(3_600_000_000_000), 0);
    }

    #[test]
    fn zeroing_for_a_program_that_does_not_want_zeroes_ends() {
        let mut demand = ZeroDemand::default();
        demand.note(G, 1_000_000_000);
        demand.wasted(G / 2);
        assert_eq!(demand.goal(1_000_000_000), G / 2);
        demand.wasted(G);
        assert_eq!(demand.goal(1_000_000_000), 0);
    }
}
