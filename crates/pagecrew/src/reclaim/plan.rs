//! When the nodes are looked at and which value the setting gets: pure, time and counters come in as numbers.
//!
//! A kernel has one setting for all nodes, so the node that needs most decides, within what every node can bear. While no node's reclaim in the background works and no
//! demand is left, nothing is looked at: the kernel says when a node's free memory has come to its low watermark, and that is when
//! everything begins. How much is taken is not known then, and what the kernel keeps free by itself lasts for milliseconds. So the first guess
//! is the most that may be, until a look has shown more: that costs a machine at rest next to nothing, since nothing can be reclaimed in
//! so short a time, and too little would cost those who take memory what this is for.

use super::watermarks::Watermarks;
use crate::control::lead::{Bounds, Cause, Lead, Look};
use crate::stats::Ahead;
use std::time::Duration;

/// From the wake-up on, until the first look that can say how much is taken. Longer than the kernel takes to add up its counters, and a
/// fraction of what a fast device takes to fill the kernel's own gap (4 ms at 6 GiB/s, of 24 GiB).
const FIRST: Duration = Duration::from_micros(1500);
/// Looks follow one another at these times while demand begins.
const SOON: Duration = Duration::from_millis(10);
/// So long.
const BEGINNING: Duration = Duration::from_millis(200);
/// And then at these.
const LATER: Duration = Duration::from_millis(100);
/// Nothing is looked at any more when all nodes were at rest for so long.
const REST: Duration = Duration::from_secs(1);
/// Memory that comes back from swap was reclaimed too early. If it is more than this share of what is reclaimed, and more than a little, the
/// kernel's own distance does for a while: to keep more free would only swap out more.
const SWAPPED_SHARE: u64 = 20;
const SWAPPED_LEAST: u64 = 1 << 20;
const HURT: Duration = Duration::from_secs(30);

/// A node, as the plan sees it.
#[derive(Debug, Clone)]
struct Node {
    watermarks: Watermarks,
    law: Lead,
    cause: Cause,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The value that the setting is to have.
    pub factor: u64,
    /// Whether that is only a guess: nothing is known yet.
    pub guess: bool,
    /// When to look next; `None`: when a node's reclaim wakes up.
    pub next_ns: Option<u64>,
}

/// The plan for all nodes.
#[derive(Debug, Clone)]
pub struct Plan {
    nodes: Vec<Node>,
    /// The operator's own value.
    own: u64,
    /// The share of a node's memory that its gap may be.
    most: f64,
    /// Since when it is awake.
    awake_ns: Option<u64>,
    /// When a node was last seen not to be at rest, or woken up.
    busy_ns: u64,
    /// Until when the operator's value does, because more would hurt.
    hurt_ns: u64,
    /// Bytes that all nodes had reclaimed at the last look.
    reclaimed: u64,
    step: Step,
}

impl Plan {
    /// The plan for nodes with these watermarks, which were looked at just now. `own` is the value that the setting has while there is no
    /// demand. At most `most`, a share of each node's memory, is kept free between its watermarks min and low.
    ///
    /// # Panics
    /// If there are not as many looks as nodes.
    pub fn new(watermarks: Vec<Watermarks>, looks: &[Look], own: u64, most: f64) -> Plan {
        assert_eq!(watermarks.len(), looks.len());
        let node = |(watermarks, &look): (Watermarks, &Look)| {
            let law = Lead::new(bounds(&watermarks, own, most), look);
            Node { law, watermarks, cause: Cause::Rest }
        };
        let nodes: Vec<Node> = watermarks.into_iter().zip(looks).map(node).collect();
        let reclaimed = looks.iter().map(|look| look.reclaimed).sum();
        let step = Step { factor: own, guess: false, next_ns: None };
        Plan { nodes, own, most, awake_ns: None, busy_ns: 0, hurt_ns: 0, reclaimed, step }
    }

    /// From now on at most `most` of each node's memory.
    pub fn change(&mut self, most: f64) {
        self.most = most;
        self.bound();
    }

    /// These are the nodes' watermarks now.
    ///
    /// # Panics
    /// If there are not as many as nodes.
    pub fn renew(&mut self, watermarks: Vec<Watermarks>) {
        assert_eq!(watermarks.len(), self.nodes.len());
        for (node, watermarks) in self.nodes.iter_mut().zip(watermarks) {
            node.watermarks = watermarks;
        }
        self.bound();
    }

    fn bound(&mut self) {
        for node in &mut self.nodes {
            node.law.bound(bounds(&node.watermarks, self.own, self.most));
        }
    }

    /// Whether it looks, and need not be told that reclaim has woken up.
    pub fn is_awake(&self) -> bool {
        self.awake_ns.is_some()
    }

    /// Reclaim has woken up on a node. Returns the value that the setting is to have at once. A look at all nodes follows, by
    /// [`note`](Plan::note).
    pub fn woken(&mut self, now_ns: u64) -> u64 {
        self.busy_ns = now_ns;
        if self.awake_ns.is_none() {
            self.awake_ns = Some(now_ns);
            if !self.hurts(now_ns) {
                (self.step.factor, self.step.guess) = (self.most(), true);
            }
        }
        self.step.factor
    }

    /// Takes note of a look at all nodes, in their order, since whose last one `swapped_in` bytes came back from swap. Says what is to be done.
    pub fn note(&mut self, now_ns: u64, looks: &[Look], swapped_in: u64) -> Step {
        let mut factor = self.own;
        let before = std::mem::replace(&mut self.reclaimed, looks.iter().map(|look| look.reclaimed).sum());
        // What came back while nothing was looked at says nothing of what is set now.
        let watched = self.step.next_ns.is_some();
        if watched && swapped_in > SWAPPED_LEAST && swapped_in > self.reclaimed.saturating_sub(before) / SWAPPED_SHARE {
            self.hurt_ns = now_ns + HURT.as_nanos() as u64;
        }
        for (node, &look) in self.nodes.iter_mut().zip(looks) {
            let gap = node.law.note(look);
            node.cause = gap.cause;
            if gap.cause != Cause::Rest {
                self.busy_ns = now_ns;
                factor = factor.max(node.watermarks.factor(gap.bytes));
            }
        }
        let passed = |since_ns: u64| Duration::from_nanos(now_ns.saturating_sub(since_ns));
        let guess = self.step.guess && self.awake_ns.is_some_and(|since| passed(since) < FIRST);
        factor = if guess { self.most() } else { factor.min(self.most()) };
        if self.hurts(now_ns) {
            factor = self.own;
        }
        let after = |time: Duration| now_ns + time.as_nanos() as u64;
        let next = match self.awake_ns {
            None => None,
            Some(_) if passed(self.busy_ns) > REST => {
                self.awake_ns = None;
                None
            }
            // The first look only begins a span of time.
            Some(since) if passed(since) < FIRST => Some(after(FIRST)),
            Some(since) if passed(since) < BEGINNING => Some(after(SOON)),
            Some(_) => Some(after(LATER)),
        };
        self.step = Step { factor, guess, next_ns: next };
        self.step
    }

    /// The most that the setting gets, which is the first guess: no more than what each node's memory is good for, since all have it. One that is
    /// nearly full would lose the files that it has.
    fn most(&self) -> u64 {
        let with_memory = self.nodes.iter().filter(|node| node.watermarks.managed() > 0);
        let most = with_memory.map(|node| node.watermarks.factor(node.law.most())).min();
        most.unwrap_or(self.own).max(self.own)
    }

    /// Whether the operator's value does for now, because memory came back from swap.
    pub fn hurts(&self, now_ns: u64) -> bool {
        now_ns < self.hurt_ns
    }

    /// What was said last.
    pub fn step(&self) -> Step {
        self.step
    }

    /// The operator's own value.
    pub fn own(&self) -> u64 {
        self.own
    }

    /// The distance between the watermarks for a value of the setting, over all nodes.
    pub fn gap(&self, factor: u64) -> u64 {
        self.nodes.iter().map(|node| node.watermarks.gap(factor)).sum()
    }

    /// What is kept free with a value of the setting at the time `now_ns`, for others to read; `None` where that is no more than with the
    /// operator's.
    pub fn ahead(&self, factor: u64, now_ns: u64) -> Option<Ahead> {
        let (own_gap, gap) = (self.gap(self.own), self.gap(factor));
        let min = self.nodes.iter().map(|node| node.watermarks.min()).sum();
        (gap > own_gap).then_some(Ahead { at_ns: now_ns, min, own_gap, gap })
    }

    /// What is taken of all nodes in a second, in bytes.
    pub fn demand(&self) -> u64 {
        self.nodes.iter().map(|node| node.law.demand()).sum()
    }

    /// The longest lead time of those that a gap follows from.
    pub fn lead(&self) -> Duration {
        self.nodes.iter().map(|node| node.law.lead()).max().unwrap_or_default()
    }

    /// What the node that needs most needs.
    pub fn cause(&self) -> Cause {
        let rank = |cause: &Cause| match cause {
            Cause::Rest => 0,
            Cause::Demand => 1,
            Cause::Bounded => 2,
            Cause::Scarce => 3,
            Cause::Saturated => 4,
        };
        self.nodes.iter().map(|node| node.cause).max_by_key(rank).unwrap_or(Cause::Rest)
    }
}

fn bounds(watermarks: &Watermarks, own: u64, most: f64) -> Bounds {
    let least = watermarks.gap(own);
    Bounds { least, most: ((watermarks.managed() as f64 * most) as u64).max(least) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::lead::model::{GIB, KSWAPD, MIB, MS, Node as Model};
    use crate::sys::vmstat::Zone;

    /// A machine whose nodes share one setting, under a plan.
    struct Machine {
        nodes: Vec<Model>,
        watermarks: Vec<Watermarks>,
        plan: Plan,
        factor: u64,
        looks: u64,
        changes: Vec<u64>,
        swapped_in: u64,
        now_ms: u64,
    }

    const OWN: u64 = 10;

    impl Machine {
        fn new(nodes: usize, memory: u64, wakes_in_ms: u64) -> Machine {
            let watermarks: Vec<_> = (0..nodes)
                .map(|node| Watermarks::of(node, &[Zone { node, managed: memory, min: memory / 400, low: 0, high: 0 }]))
                .collect();
            let nodes = vec![Model::new(memory, wakes_in_ms, KSWAPD); nodes];
            let looks: Vec<Look> = nodes.iter().map(|node| node.look).collect();
            let plan = Plan::new(watermarks.clone(), &looks, OWN, 0.025);
            Machine { nodes, watermarks, plan, factor: OWN, looks: 0, changes: Vec::new(), swapped_in: 0, now_ms: 0 }
        }

        /// `load` says how many bytes are wanted a second, of which node and in which millisecond.
        fn run(&mut self, milliseconds: u64, load: impl Fn(usize, u64) -> u64) -> &mut Machine {
            for now in 0..milliseconds {
                let now_ns = self.now_ms * MS;
                let woken: Vec<bool> = self.nodes.iter_mut().map(|node| std::mem::take(&mut node.woken)).collect();
                let woken = woken.contains(&true);
                if woken {
                    let factor = self.plan.woken(now_ns);
                    self.set(factor);
                }
                if woken || self.plan.step().next_ns.is_some_and(|next| next <= now_ns) {
                    let looks: Vec<Look> = self.nodes.iter().map(|node| node.look).collect();
                    let step = self.plan.note(now_ns, &looks, std::mem::take(&mut self.swapped_in));
                    assert!(step.next_ns.is_none_or(|next| next > now_ns));
                    self.looks += 1;
                    self.set(step.factor);
                }
                for (number, node) in self.nodes.iter_mut().enumerate() {
                    node.step(load(number, now));
                }
                self.now_ms += 1;
            }
            self
        }

        fn set(&mut self, factor: u64) {
            if factor != self.factor {
                self.factor = factor;
                self.changes.push(self.now_ms);
                for (node, watermarks) in self.nodes.iter_mut().zip(&self.watermarks) {
                    node.gap = watermarks.gap(factor);
                }
            }
        }

        fn stalls(&self) -> u64 {
            self.nodes.iter().map(|node| node.look.stalls).sum()
        }
    }

    #[test]
    fn a_node_that_has_grown_is_reckoned_with() {
        let mut machine = Machine::new(1, 4 * GIB, 20);
        let before = machine.plan.gap(100);
        let grown = Zone { node: 0, managed: 64 * GIB, min: GIB / 10, low: 0, high: 0 };
        machine.plan.renew(vec![Watermarks::of(0, &[grown])]);
        assert_eq!(machine.plan.gap(100) / before, 16);
    }

    #[test]
    fn nothing_is_looked_at_while_nothing_happens() {
        let mut machine = Machine::new(2, 64 * GIB, 10);
        machine.run(600_000, |_, _| 0);
        assert_eq!((machine.looks, machine.factor), (0, OWN));
        // What little goes on wakes the kernel's threads now and then. It needs no more than there is.
        machine.run(600_000, |_, _| 10 * MIB);
        assert_eq!((machine.factor, machine.stalls()), (OWN, 0));
        assert!(machine.looks < 600 * 15, "{}", machine.looks);
    }

    #[test]
    fn the_node_that_needs_most_decides() {
        for nodes in [1, 2, 8] {
            for memory in [4 * GIB, 24 * GIB, 96 * GIB] {
                let mut machine = Machine::new(nodes, memory, 10);
                let load = |node: usize, _| if node == nodes - 1 { 4 * GIB } else { 0 };
                machine.run(1000, load);
                let before = machine.stalls();
                machine.run(60_000, load);
                assert_eq!(machine.stalls(), before, "{nodes} nodes");
                // A minute and a half later it is as it was, and nothing is looked at.
                machine.run(90_000, |_, _| 0);
                assert_eq!((machine.factor, machine.plan.step().next_ns), (OWN, None), "{nodes} nodes");
                let looks = machine.looks;
                machine.run(60_000, |_, _| 0);
                assert_eq!(machine.looks, looks);
            }
        }
    }

    #[test]
    fn a_load_that_comes_and_goes_is_no_reason_to_swing() {
        let mut machine = Machine::new(2, 24 * GIB, 20);
        let load = |node: usize, now: u64| if (now / 5000 + node as u64).is_multiple_of(2) { 5 * GIB } else { 0 };
        machine.run(10_000, load).changes.clear();
        let before = machine.stalls();
        machine.run(300_000, load);
        assert_eq!(machine.stalls(), before);
        // The load changes 120 times. What changes is the lead time, every half minute.
        assert!(machine.changes.len() <= 15, "{:?}", machine.changes);
    }

    #[test]
    fn no_more_than_it_may() {
        let mut machine = Machine::new(1, 8 * GIB, 300);
        machine.run(120_000, |_, _| 7 * GIB);
        let gap = machine.watermarks[0].gap(machine.factor);
        assert!(gap as f64 <= 0.025 * 8.0 * GIB as f64 * 1.01, "{gap}");
        assert!(
            matches!(machine.plan.cause(), Cause::Bounded | Cause::Scarce | Cause::Saturated),
            "{:?}",
            machine.plan.cause()
        );
        machine.plan.change(0.005);
        machine.run(1000, |_, _| 7 * GIB);
        assert!(machine.watermarks[0].gap(machine.factor) as f64 <= 0.005 * 8.0 * GIB as f64 * 1.01);
    }

    #[test]
    fn a_node_that_is_nearly_full_loses_no_files_for_the_others() {
        let memory = 64 * GIB;
        let zone = |node| Zone { node, managed: memory, min: memory / 400, low: 0, high: 0 };
        // The last one has no memory at all.
        let watermarks = [vec![zone(0)], vec![zone(1)], vec![]];
        let watermarks: Vec<_> = (0..).zip(&watermarks).map(|(node, zones)| Watermarks::of(node, zones)).collect();
        let free = memory / 200;
        let look = |free, files| Look { at_ns: 0, free, files, reclaimed: 0, stalls: 0, busy_ns: 0 };
        let woken = |files: u64| {
            let looks = [look(free, 60 * GIB), look(free, files), look(0, 0)];
            Plan::new(watermarks.clone(), &looks, OWN, 0.025).woken(0)
        };
        assert_eq!(woken(60 * GIB), 250);
        for files in [GIB / 4, GIB, 4 * GIB] {
            let factor = woken(files);
            // The thread goes on until as much again is free.
            let high = 2 * watermarks[1].gap(factor - 1);
            assert!(factor > OWN && high <= (free + files) / 2, "{files}: {factor}");
        }
        assert_eq!(woken(0), watermarks[1].factor(free / 4).max(OWN));
    }

    #[test]
    fn where_memory_comes_back_from_swap_no_more_is_kept_free() {
        let mut machine = Machine::new(1, 24 * GIB, 20);
        machine.run(10_000, |_, _| 5 * GIB);
        assert!(machine.factor > 5 * OWN);
        // A little of it comes back on any machine.
        machine.swapped_in = MIB;
        machine.run(1000, |_, _| 5 * GIB);
        assert!(machine.factor > 5 * OWN);
        machine.swapped_in = GIB;
        machine.run(200, |_, _| 5 * GIB);
        assert_eq!(machine.factor, OWN);
        machine.run(29_000, |_, _| 5 * GIB);
        assert_eq!(machine.factor, OWN);
        machine.run(2000, |_, _| 5 * GIB);
        assert!(machine.factor > 5 * OWN);
        // What came back while the machine was at rest is no reason.
        machine.run(90_000, |_, _| 0);
        assert_eq!(machine.plan.step().next_ns, None);
        machine.swapped_in = GIB;
        machine.run(1000, |_, _| 5 * GIB);
        assert!(machine.factor > 5 * OWN);
    }
}
