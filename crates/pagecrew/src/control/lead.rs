//! How much memory has to be free ahead of those who take it, so that reclaim in the background keeps up: pure arithmetic.
//!
//! A kernel begins to reclaim in the background when a node's free memory falls to its low watermark, and lets tasks reclaim for
//! themselves when it falls to the min watermark. Between the two lies a gap, and background reclaim has as long as that lasts to come
//! to its full rate. So the gap that is needed is *demand x lead time*: what is taken in a second, times the seconds from the low
//! watermark to the full rate. A fixed gap is too small for the demand of fast devices, or costs memory all day (the proposal of several
//! kswapd threads, and what its reviewers said of one more number to tune). Here both factors are measured: the demand rises at once and
//! declines slowly; the lead time grows when tasks had to reclaim although the gap was as wanted, and shrinks with care when they had not
//! for long.
//!
//! A gap helps only where reclaim in the background has anything left to give. Where it works all the time and tasks still wait, the law
//! says so ([`Cause::Saturated`]) and leaves the lead time alone.

use std::time::Duration;

/// What was taken in a second counts for so long, and for a third after so much more. Short enough that a minute after the last demand the gap is
/// the kernel's own again, and long enough that a load which pauses for seconds finds the gap as it left it; and that the gap does not swing with a load
/// that does: from one peak of it by half down to the next one it takes half a minute at least.
const HOLD: Duration = Duration::from_secs(25);
const DECLINE: Duration = Duration::from_millis(7500);
/// Lead times from the wake-up of a thread on a free CPU to that of one which waits for its turn among many.
const LEAD_FIRST: f64 = 0.05;
const LEAD_LEAST: f64 = 0.005;
const LEAD_MOST: f64 = 1.0;
/// The lead time grows by this when it was too short, but not before the gap that followed from the last growth had time to fill up.
const GROW: f64 = 1.5;
const SETTLE: Duration = Duration::from_millis(500);
/// Where the kernel's own gap is this many times what the demand needs, and tasks wait, that is not for want of a gap.
const AT_REST: f64 = 4.0;
/// Demand without a task that waited for so long, and a shorter lead time is tried.
const CALM: Duration = Duration::from_secs(30);
const SHRINK: f64 = 0.9;
/// A lead time that was too short is not come closer to than this, until that was forgotten.
const ABOVE_BAD: f64 = 1.25;
const FORGET: Duration = Duration::from_secs(1800);
/// Reclaim in the background that works for this share of the time has nothing left to give.
const SATURATED: f64 = 0.95;
/// Shorter looks say too little: the kernel adds its counters up in batches.
const LOOK_LEAST: Duration = Duration::from_millis(1);
/// The gap in force follows a smaller wish only when that is smaller by this, so that it is not set anew with each look.
const LOWER: f64 = 0.8;
/// And it is set a little larger than the wish, so that a demand which grows slowly does not set it with each look either.
const HIGHER: f64 = 1.1;
/// Reclaim goes on until twice the gap is free. Of what is or could be free, half is left to files at least: a gap that takes more costs those
/// who read them more than it gives, and reclaim that can't come to its end works all the time.
const PARTS_FREE: u64 = 4;

/// What a node's gap may be, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The kernel's own, which holds while there is no demand.
    pub least: u64,
    /// The most that may be kept free for demand.
    pub most: u64,
}

/// What a node was seen to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// When.
    pub at_ns: u64,
    /// Free memory in bytes.
    pub free: u64,
    /// What could be free: pages of files in bytes.
    pub files: u64,
    /// Bytes that were reclaimed by now, by whomever.
    pub reclaimed: u64,
    /// How often tasks had to reclaim for themselves by now.
    pub stalls: u64,
    /// Time for which the node's reclaim in the background has worked by now, or has waited for a CPU, in nanoseconds: a gap helps with neither.
    pub busy_ns: u64,
}

/// Why the gap is as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The kernel's own gap is enough for the demand there is.
    Rest,
    /// As wide as the demand needs.
    Demand,
    /// The demand needs more than may be kept free for it.
    Bounded,
    /// The demand needs more than is left: the rest of what is or could be free is files'.
    Scarce,
    /// Tasks wait, and reclaim in the background works all the time: no gap helps with that.
    Saturated,
}

/// The gap that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// In bytes.
    pub bytes: u64,
    /// Why.
    pub cause: Cause,
}

/// The law for one node.
#[derive(Debug, Clone)]
pub struct Lead {
    bounds: Bounds,
    last: Look,
    /// Bytes a second, and since when nobody has taken so much.
    demand: f64,
    demand_ns: u64,
    /// Seconds.
    lead: f64,
    /// The longest lead time that was too short, and when that was seen.
    bad: Option<(f64, u64)>,
    /// The lead time has been as it is, and the gap has followed from it, since then.
    since_ns: u64,
    /// How long there was demand without a stall.
    calm_ns: u64,
    gap: Gap,
}

impl Lead {
    /// The law for a node that is seen for the first time.
    ///
    /// # Panics
    /// If the least gap is larger than the most.
    pub fn new(bounds: Bounds, first: Look) -> Lead {
        assert!(bounds.least <= bounds.most);
        Lead {
            bounds,
            last: first,
            demand: 0.0,
            demand_ns: first.at_ns,
            lead: LEAD_FIRST,
            bad: None,
            since_ns: first.at_ns,
            calm_ns: 0,
            gap: Gap { bytes: bounds.least, cause: Cause::Rest },
        }
    }

    /// Other bounds from now on.
    ///
    /// # Panics
    /// If the least gap is larger than the most.
    pub fn bound(&mut self, bounds: Bounds) {
        assert!(bounds.least <= bounds.most);
        self.bounds = bounds;
        self.gap.bytes = self.gap.bytes.clamp(bounds.least, bounds.most);
    }

    /// From now on, what was free at the last look counts as this much: what has become more or less of it by now was not taken.
    pub fn recount(&mut self, free: u64) {
        self.last.free = free;
    }

    /// The most that the gap may be now.
    pub fn most(&self) -> u64 {
        (self.last.free.saturating_add(self.last.files) / PARTS_FREE).clamp(self.bounds.least, self.bounds.most)
    }

    /// What is taken in a second, in bytes.
    pub fn demand(&self) -> u64 {
        self.demand as u64
    }

    /// The gap that was wanted last.
    pub fn gap(&self) -> Gap {
        self.gap
    }

    /// The lead time.
    pub fn lead(&self) -> Duration {
        Duration::from_secs_f64(self.lead)
    }

    /// Takes note of a look and says which gap is wanted. Counters that go back, as those of a node that was taken out and put back, count
    /// as unchanged; looks that follow too soon are passed over.
    pub fn note(&mut self, look: Look) -> Gap {
        let passed_ns = look.at_ns.saturating_sub(self.last.at_ns);
        if u128::from(passed_ns) < LOOK_LEAST.as_nanos() {
            return self.gap;
        }
        let before = std::mem::replace(&mut self.last, look);
        let passed = passed_ns as f64 / 1e9;
        let reclaimed = look.reclaimed.saturating_sub(before.reclaimed) as f64;
        // What was reclaimed and is still there was not taken.
        let taken = (reclaimed + before.free as f64 - look.free as f64).max(0.0) / passed;
        self.note_demand(taken, passed_ns);
        let stalled = look.stalls > before.stalls;
        let saturated = look.busy_ns.saturating_sub(before.busy_ns) as f64 >= SATURATED * passed_ns as f64;
        self.learn(stalled, saturated, passed_ns);
        self.gap = self.wanted(stalled && saturated);
        self.gap
    }

    /// So many bytes a second were taken in the time that has passed.
    fn note_demand(&mut self, taken: f64, passed_ns: u64) {
        let now_ns = self.last.at_ns;
        let held_until_ns = self.demand_ns.saturating_add(HOLD.as_nanos() as u64);
        let declines_ns = now_ns.saturating_sub(held_until_ns).min(passed_ns);
        let declined = self.demand * (-(declines_ns as f64 / 1e9) / DECLINE.as_secs_f64()).exp();
        if taken >= declined {
            self.demand_ns = now_ns;
        }
        self.demand = taken.max(declined);
    }

    /// The lead time, by whether tasks waited.
    fn learn(&mut self, stalled: bool, saturated: bool, passed_ns: u64) {
        let now_ns = self.last.at_ns;
        if self.bad.is_some_and(|(_, at_ns)| now_ns - at_ns > FORGET.as_nanos() as u64) {
            self.bad = None;
        }
        if stalled {
            self.calm_ns = 0;
            // With a gap that is smaller than it should be, stalls say nothing of the lead time; nor do they with one that is much larger.
            let as_wanted = match self.gap.cause {
                Cause::Demand => u128::from(now_ns - self.since_ns) >= SETTLE.as_nanos(),
                Cause::Rest => self.demand * self.lead * AT_REST >= self.gap.bytes as f64,
                Cause::Bounded | Cause::Scarce | Cause::Saturated => false,
            };
            if as_wanted && !saturated {
                let bad = self.bad.map_or(self.lead, |(bad, _)| bad.max(self.lead));
                self.bad = Some((bad, now_ns));
                self.lead = (self.lead * GROW).min(LEAD_MOST);
                self.since_ns = now_ns;
            }
        } else if self.gap.cause == Cause::Demand {
            self.calm_ns += passed_ns;
            if u128::from(self.calm_ns) >= CALM.as_nanos() {
                self.calm_ns = 0;
                let least = self.bad.map_or(LEAD_LEAST, |(bad, _)| bad * ABOVE_BAD).min(self.lead);
                self.lead = (self.lead * SHRINK).max(least);
            }
        }
    }

    fn wanted(&mut self, saturated: bool) -> Gap {
        let wish = self.demand * self.lead;
        let held = self.gap.bytes as f64;
        // What is in force stays as long as it is neither too small nor much too large.
        let bytes = if (held * LOWER / HIGHER..=held).contains(&wish) { held } else { wish * HIGHER };
        let (least, most) = (self.bounds.least as f64, self.most() as f64);
        let cause = match () {
            () if saturated => Cause::Saturated,
            () if bytes <= least => Cause::Rest,
            () if bytes > most && most < self.bounds.most as f64 => Cause::Scarce,
            () if bytes > most => Cause::Bounded,
            () => Cause::Demand,
        };
        if self.gap.cause == Cause::Rest && cause != Cause::Rest {
            self.since_ns = self.last.at_ns;
        }
        Gap { bytes: bytes.clamp(least, most) as u64, cause }
    }
}

/// A made-up kernel, for simulations.
#[cfg(test)]
pub(crate) mod model {
    use super::*;

    pub const MS: u64 = 1_000_000;
    pub const MIB: u64 = 1 << 20;
    pub const GIB: u64 = 1 << 30;
    /// What one reclaim thread gives in a second at its best (the proposal's own figures: 2.0 million pages).
    pub const KSWAPD: u64 = 2_000_000 * 4096;
    /// A task that reclaims for itself frees so much at once.
    const BATCH: u64 = 32 * 4096;

    /// A node of a made-up kernel, whose memory is full of clean pages of files.
    #[derive(Debug, Clone)]
    pub struct Node {
        pub bounds: Bounds,
        min: u64,
        /// Between the watermarks min and low.
        pub gap: u64,
        free: u64,
        /// Neither free nor of files.
        programs: u64,
        memory: u64,
        /// From its wake-up to its full rate.
        wakes_in_ms: u64,
        /// Milliseconds until it works; `None` while it sleeps.
        pub kswapd: Option<u64>,
        /// It has woken up; whoever hears that takes it.
        pub woken: bool,
        rate: u64,
        pub look: Look,
        /// Bytes that were had.
        pub taken: u64,
    }

    impl Node {
        pub fn new(memory: u64, wakes_in_ms: u64, rate: u64) -> Node {
            // As a kernel sets them: the watermarks are a thousandth of the memory apart.
            let (min, least) = (memory / 400, memory / 1000);
            let bounds = Bounds { least, most: memory / 20 };
            let free = min + 2 * least;
            let look = Look { at_ns: 0, free, files: memory - free, reclaimed: 0, stalls: 0, busy_ns: 0 };
            Node {
                bounds,
                min,
                gap: least,
                free,
                programs: 0,
                memory,
                wakes_in_ms,
                kswapd: None,
                woken: false,
                rate,
                look,
                taken: 0,
            }
        }

        /// Programs have so much more of what files had, or less.
        pub fn grow(&mut self, bytes: i64) {
            self.programs = self.programs.saturating_add_signed(bytes);
            self.see();
        }

        fn see(&mut self) {
            self.look.free = self.free;
            self.look.files = self.memory.saturating_sub(self.free + self.programs);
        }

        /// Free memory.
        pub fn free(&self) -> u64 {
            self.free
        }

        /// Where tasks reclaim for themselves.
        pub fn min(&self) -> u64 {
            self.min
        }

        /// Somebody has so many bytes for good, of what is free. Returns false where there are none.
        pub fn take(&mut self, bytes: u64) -> bool {
            let there = self.free >= self.min + bytes;
            if there {
                self.free -= bytes;
                self.grow(bytes as i64);
            }
            there
        }

        /// Somebody gives so many back.
        pub fn give(&mut self, bytes: u64) {
            self.free += bytes;
            self.grow(-(bytes as i64));
        }

        /// A millisecond in which `demand` bytes a second are wanted.
        pub fn step(&mut self, demand: u64) {
            let (low, high) = (self.min + self.gap, self.min + 2 * self.gap);
            if self.kswapd.is_none() && self.free < low {
                self.kswapd = Some(self.wakes_in_ms);
                self.woken = true;
            }
            match &mut self.kswapd {
                Some(0) => {
                    let reclaimed = (self.rate / 1000).min((high + BATCH).saturating_sub(self.free));
                    self.free += reclaimed;
                    self.look.reclaimed += reclaimed;
                    self.look.busy_ns += MS * reclaimed * 1000 / self.rate;
                    if self.free >= high {
                        self.kswapd = None;
                    }
                }
                Some(wait) => *wait -= 1,
                None => {}
            }
            let wanted = demand / 1000;
            let at_once = wanted.min(self.free.saturating_sub(self.min));
            self.free -= at_once;
            // The rest costs the tasks most of their time.
            let reclaimed = (wanted - at_once) / 3;
            self.look.reclaimed += reclaimed;
            self.look.stalls += reclaimed.div_ceil(BATCH);
            self.taken += at_once + reclaimed;
            self.look.at_ns += MS;
            self.see();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::model::*;
    use super::*;
    use proptest::prelude::*;

    /// What became of a load under a law.
    #[derive(Debug, Default)]
    struct Outcome {
        stalls: u64,
        taken: u64,
        changes: Vec<u64>,
        cause: Option<Cause>,
    }

    /// `load` says how many bytes are wanted a second, by the millisecond. The law looks as soon as reclaim in the background has
    /// woken up, and while it or the demand goes on.
    fn run(node: &mut Node, law: Option<&mut Lead>, milliseconds: u64, load: impl Fn(u64) -> u64) -> Outcome {
        let (stalls, taken) = (node.look.stalls, node.taken);
        let mut outcome = Outcome::default();
        let mut law = law;
        let mut next = 0;
        let mut awake = false;
        for now in 0..milliseconds {
            let woken = node.kswapd.is_some() && !awake;
            awake = node.kswapd.is_some();
            if let Some(law) = law.as_deref_mut()
                && (now >= next || woken)
            {
                let gap = law.note(node.look);
                if gap.bytes != node.gap {
                    node.gap = gap.bytes;
                    outcome.changes.push(now);
                }
                outcome.cause = Some(gap.cause);
                next = now + if awake { 2 } else { 100 };
            }
            node.step(load(now));
        }
        outcome.stalls = node.look.stalls - stalls;
        outcome.taken = node.taken - taken;
        outcome
    }

    fn law(node: &Node) -> Lead {
        Lead::new(node.bounds, node.look)
    }

    #[test]
    fn a_node_at_rest_has_the_kernels_own_gap() {
        let mut node = Node::new(24 * GIB, 20, KSWAPD);
        let mut law = law(&node);
        let quiet = run(&mut node, Some(&mut law), 60_000, |_| 0);
        assert_eq!((quiet.changes.len(), quiet.cause), (0, Some(Cause::Rest)));
        // What little the machine does by itself needs no more.
        let slow = run(&mut node, Some(&mut law), 60_000, |_| 20 * MIB);
        assert_eq!((slow.stalls, slow.changes.len()), (0, 0));
    }

    #[test]
    fn a_steady_load_costs_a_hundredth_of_the_stalls() {
        let mut hurt = 0;
        // A free CPU, one among few tasks, one among many; machines of 2 CPUs and of the proposal's 52 on two nodes.
        for wakes_in_ms in [2, 10, 30, 60, 120] {
            for (memory, demand) in [(8 * GIB, 2 * GIB), (24 * GIB, 6 * GIB), (64 * GIB, 7 * GIB), (378 * GIB, 7 * GIB)]
            {
                let mut node = Node::new(memory, wakes_in_ms, KSWAPD);
                let mut alone = node.clone();
                let mut law = law(&node);
                // At the first wake-up ever there is only what the kernel left free, whatever is set then.
                run(&mut alone, None, 1_000, |_| demand);
                run(&mut node, Some(&mut law), 1_000, |_| demand);
                let stock = run(&mut alone, None, 120_000, |_| demand);
                let ours = run(&mut node, Some(&mut law), 120_000, |_| demand);
                let case = format!("{wakes_in_ms} ms, {} GiB, {} GiB/s", memory / GIB, demand / GIB);
                assert!(ours.stalls <= stock.stalls / 100, "{case}: {} of {}", ours.stalls, stock.stalls);
                assert!(ours.taken >= stock.taken, "{case}");
                hurt += u32::from(stock.stalls > 1000);
            }
        }
        assert!(hurt >= 10, "{hurt}");
    }

    #[test]
    fn after_a_minute_of_rest_the_gap_is_the_kernels_own() {
        let mut node = Node::new(24 * GIB, 30, KSWAPD);
        let mut law = law(&node);
        run(&mut node, Some(&mut law), 30_000, |_| 6 * GIB);
        assert!(node.gap > 4 * node.bounds.least);
        // A pause of seconds changes little.
        run(&mut node, Some(&mut law), 3_000, |_| 0);
        assert!(node.gap > 3 * node.bounds.least);
        run(&mut node, Some(&mut law), 57_000, |_| 0);
        assert_eq!(node.gap, node.bounds.least);
    }

    #[test]
    fn the_lead_time_is_found_out() {
        for wakes_in_ms in [10, 30, 100, 300] {
            let mut node = Node::new(64 * GIB, wakes_in_ms, KSWAPD);
            let mut law = law(&node);
            run(&mut node, Some(&mut law), 600_000, |_| 3 * GIB);
            let later = run(&mut node, Some(&mut law), 600_000, |_| 3 * GIB);
            let lead = law.lead().as_millis() as u64;
            assert!(lead <= 2 * wakes_in_ms.max(10) && lead >= wakes_in_ms / 2, "{wakes_in_ms}: {lead}");
            assert_eq!(later.stalls, 0, "{wakes_in_ms}");
            // Nothing swings: what is changed is changed for minutes.
            assert!(later.changes.windows(2).all(|two| two[1] - two[0] >= 25_000), "{:?}", later.changes);
        }
    }

    #[test]
    fn where_reclaim_works_all_the_time_a_wider_gap_is_not_tried() {
        // The proposal's load of 58 readers and more: fast devices want more than one reclaim thread can give.
        let mut node = Node::new(378 * GIB, 2, KSWAPD);
        let mut law = law(&node);
        let outcome = run(&mut node, Some(&mut law), 120_000, |_| 13 * GIB);
        assert_eq!(outcome.cause, Some(Cause::Saturated));
        assert_eq!(law.lead(), Duration::from_secs_f64(LEAD_FIRST));
        assert!(node.gap <= node.bounds.most);
    }

    #[test]
    fn where_little_is_left_to_files_they_keep_half_of_it() {
        // One in five of the memory, one in twenty, one in a hundred.
        for (left, gap_most) in [(5, 24 * GIB / 20), (20, 24 * GIB / 80), (100, 24 * GIB / 400)] {
            let mut node = Node::new(24 * GIB, 300, KSWAPD);
            node.grow((24 * GIB - 24 * GIB / left) as i64);
            let mut law = law(&node);
            let outcome = run(&mut node, Some(&mut law), 60_000, |_| 7 * GIB);
            assert!(node.gap > gap_most / 2 && node.gap <= gap_most, "{left}: {}", node.gap / MIB);
            let cause = if gap_most < node.bounds.most { Cause::Scarce } else { Cause::Bounded };
            assert_eq!((outcome.cause, law.most()), (Some(cause), gap_most.min(node.bounds.most)), "{left}");
        }
    }

    /// When a signal turns from up to down, where each way is more than half of how far it reaches.
    fn peaks(values: &[u64]) -> Vec<usize> {
        let reach = values.iter().max().unwrap() - values.iter().min().unwrap();
        let (mut found, mut rises) = (Vec::new(), true);
        let (mut low, mut high) = (values[0], (values[0], 0));
        for (at, &value) in values.iter().enumerate() {
            if value > high.0 {
                high = (value, at);
            }
            low = low.min(value);
            if rises && value + reach / 2 < high.0 {
                found.push(high.1);
                (rises, low) = (false, value);
            } else if !rises && value > low + reach / 2 {
                (rises, high) = (true, (value, at));
            }
        }
        found
    }

    #[test]
    fn whatever_the_load_does_the_gap_does_not_swing_faster_than_in_half_a_minute() {
        let mut swings = 0;
        for seed in 1..20_u64 {
            // Other rates every second to every ten, of which some are none.
            let spell = 1000 + seed * 500;
            let load = |now: u64| {
                let random = (now / spell + 1).wrapping_mul(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
                random.saturating_sub(6) * GIB
            };
            let mut node = Node::new(64 * GIB, 20, KSWAPD);
            let mut law = law(&node);
            let mut gaps = Vec::new();
            for second in 0..900 {
                run(&mut node, Some(&mut law), 1000, |now| load(second * 1000 + now));
                gaps.push(node.gap);
            }
            let peaks = peaks(&gaps);
            assert!(peaks.windows(2).all(|two| two[1] - two[0] >= 30), "{spell} ms: {peaks:?}");
            swings += peaks.len();
        }
        assert!(swings > 0, "no load swings at all");
    }

    #[test]
    fn a_load_that_comes_and_goes_is_followed_at_once() {
        let load = |now: u64| if (now / 20_000).is_multiple_of(2) { 6 * GIB } else { 0 };
        let mut stock = Node::new(24 * GIB, 20, KSWAPD);
        let without = run(&mut stock, None, 400_000, load);
        let mut node = Node::new(24 * GIB, 20, KSWAPD);
        let mut law = law(&node);
        let with = run(&mut node, Some(&mut law), 400_000, load);
        assert!(with.stalls <= without.stalls / 100, "{} of {}", with.stalls, without.stalls);
    }

    proptest! {
        #[test]
        fn the_gap_stays_within_its_bounds_whatever_is_seen(
            looks in proptest::collection::vec(
                ((0u64..u64::MAX, 0u64..1 << 60, 0u64..1 << 34), (0u64..1 << 60, 0u64..1 << 60, 0u64..1 << 60)), 1..100,
            ),
        ) {
            let bounds = Bounds { least: 24 * MIB, most: GIB };
            let mut law = Lead::new(bounds, Look { at_ns: 0, free: 0, files: 0, reclaimed: 0, stalls: 0, busy_ns: 0 });
            for ((at_ns, free, files), (reclaimed, stalls, busy_ns)) in looks {
                let gap = law.note(Look { at_ns, free, files, reclaimed, stalls, busy_ns });
                prop_assert!((bounds.least..=bounds.most).contains(&gap.bytes));
                prop_assert!(law.lead() >= Duration::from_secs_f64(LEAD_LEAST) && law.lead() <= Duration::from_secs_f64(LEAD_MOST));
            }
        }

        #[test]
        fn more_demand_never_means_less_of_a_gap(demand in 1u64..8, wakes_in_ms in 1u64..50) {
            let gap = |demand: u64| {
                let mut node = Node::new(64 * GIB, wakes_in_ms, KSWAPD);
                let mut law = Lead::new(node.bounds, node.look);
                run(&mut node, Some(&mut law), 300, |_| demand * GIB / 2);
                node.gap
            };
            prop_assert!(gap(demand + 1) >= gap(demand));
        }
    }
}
