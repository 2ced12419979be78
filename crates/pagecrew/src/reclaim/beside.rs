//! A simulation: a pool beside reclaim on a machine whose memory is full of clean pages of files, and programs that read.

use super::plan::Plan;
use super::watermarks::Watermarks;
use crate::control::arbiter;
use crate::control::lead::Look;
use crate::control::lead::model::{GIB, KSWAPD, MIB, MS, Node};
use crate::pool::gate::{Decision, Gate, Readings, default_floor};
use crate::stats::Ahead;
use crate::sys::procfs::MemoryInfo;
use crate::sys::vmstat::Zone;

const MEMORY: u64 = 24 * GIB;
const OWN: u64 = 10;
const PIECE: u64 = 32 * MIB;

/// What the pool is told of what is kept free ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    All,
    /// What was published before its owner was killed.
    Stale(Ahead),
}

struct Machine {
    node: Node,
    watermarks: Watermarks,
    plan: Plan,
    factor: u64,
    gate: Gate,
    told: Told,
    /// What programs have.
    programs: u64,
    size: u64,
    ready: u64,
    filled: u64,
    given: u64,
    now_ms: u64,
}

impl Machine {
    /// With so much in caches of files, beside programs and a pool of 4 GiB that is full.
    fn new(files: u64, told: Told) -> Machine {
        let mut node = Node::new(MEMORY, 20, KSWAPD);
        let zone = Zone { node: 0, managed: MEMORY, min: node.min(), low: 0, high: 0 };
        let watermarks = Watermarks::of(0, &[zone]);
        let plan = Plan::new(vec![watermarks.clone()], &[node.look], OWN, 0.025);
        let size = 4 * GIB;
        let programs = MEMORY - files - size - node.free();
        node.grow((programs + size) as i64);
        let gate = Gate::new(default_floor(MEMORY));
        Machine {
            node,
            watermarks,
            plan,
            factor: OWN,
            gate,
            told,
            programs,
            size,
            ready: size,
            filled: 0,
            given: 0,
            now_ms: 0,
        }
    }

    /// As the kernel computes it.
    fn memory(&self) -> MemoryInfo {
        let (min, gap, free) = (self.node.min(), self.node.gap, self.node.free());
        let files = MEMORY.saturating_sub(free + self.programs + self.ready);
        let available = (free + files - (files / 2).min(min + gap)).saturating_sub(min + 2 * gap);
        MemoryInfo { total: MEMORY, available, swap: 0, free_swap: 0, files, reclaimable: 0 }
    }

    fn set(&mut self, factor: u64) {
        self.factor = factor;
        self.node.gap = self.watermarks.gap(factor);
    }

    fn judge(&mut self) {
        let next = if self.ready + PIECE <= self.size { PIECE } else { 0 };
        // While there is something to fill, it is asked for each piece.
        if !self.now_ms.is_multiple_of(if next > 0 { 20 } else { 250 }) {
            return;
        }
        let now_ns = self.now_ms * MS;
        let ahead = match self.told {
            Told::Nothing => None,
            Told::All => self.plan.ahead(self.factor, now_ns),
            Told::Stale(ahead) => Some(ahead),
        };
        let available = arbiter::available(&self.memory(), ahead, now_ns);
        let readings = Readings { now_ns, total: MEMORY, available, stall_us: Some(0), reclaimed: None };
        match self.gate.judge(readings, self.ready, next) {
            Decision::Fill if next > 0 && self.node.take(PIECE) => {
                self.ready += PIECE;
                self.filled += PIECE;
            }
            Decision::GiveBack(bytes) => {
                self.ready -= bytes;
                self.given += bytes;
                self.node.give(bytes);
            }
            Decision::Fill | Decision::Wait(_) => {}
        }
    }

    /// Programs read so many bytes a second.
    fn run(&mut self, seconds: u64, load: u64) {
        for _ in 0..seconds * 1000 {
            let now_ns = self.now_ms * MS;
            let woken = std::mem::take(&mut self.node.woken);
            if woken {
                let factor = self.plan.woken(now_ns);
                self.set(factor);
            }
            if woken || self.plan.step().next_ns.is_some_and(|next| next <= now_ns) {
                let looks: [Look; 1] = [self.node.look];
                let step = self.plan.note(now_ns, &looks, 0);
                self.set(step.factor);
            }
            self.judge();
            self.node.step(load);
            self.now_ms += 1;
        }
    }

    /// Ten minutes of programs that read for 20 s and rest for 70. Returns how many of the times the pool has given something back.
    fn come_and_go(&mut self) -> usize {
        let mut times = 0;
        for _ in 0..7 {
            let given = self.given;
            self.run(20, 7 * GIB);
            self.run(70, 0);
            times += usize::from(self.given > given);
        }
        times
    }
}

/// So much that the pool's floor is left with some room, and not with what is kept free ahead.
const FILES: u64 = 1900 * MIB;

#[test]
fn a_pool_that_is_told_nothing_gives_back_and_fills_with_every_demand() {
    let mut machine = Machine::new(FILES, Told::Nothing);
    assert_eq!(machine.come_and_go(), 7);
    assert!(machine.given > 7 * PIECE && machine.filled > machine.given / 2, "{} {}", machine.given, machine.filled);
}

#[test]
fn a_pool_that_is_told_what_is_kept_free_ahead_stays_as_it_is() {
    let mut machine = Machine::new(FILES, Told::All);
    assert_eq!(machine.come_and_go(), 0);
    assert_eq!((machine.given, machine.filled, machine.ready), (0, 0, machine.size));
    assert_eq!(machine.factor, OWN);
}

#[test]
fn what_a_killed_one_has_left_is_as_if_it_had_said_nothing() {
    let old = Ahead { at_ns: 0, min: 60 * MIB, own_gap: 24 * MIB, gap: 600 * MIB };
    let (mut stale, mut nothing) = (Machine::new(FILES, Told::Stale(old)), Machine::new(FILES, Told::Nothing));
    for machine in [&mut stale, &mut nothing] {
        machine.run(2, 0);
        machine.come_and_go();
    }
    assert_eq!((stale.given, stale.filled), (nothing.given, nothing.filled));
}

#[test]
fn programs_that_grow_get_what_the_pool_has_whatever_it_is_told() {
    let mut machine = Machine::new(FILES, Told::All);
    machine.run(10, 7 * GIB);
    for _ in 0..40 {
        // Of what can be dropped.
        machine.programs += 50 * MIB;
        machine.node.grow(50 << 20);
        machine.run(1, 7 * GIB);
    }
    machine.run(90, 0);
    // 2000 MiB are theirs. At rest, the floor is left as it would be without reclaim.
    assert!(machine.given > GIB, "{}", machine.given / MIB);
    assert!(machine.memory().available >= default_floor(MEMORY), "{}", machine.memory().available / MIB);
}

#[test]
fn a_pool_that_fills_beside_reclaim_comes_to_rest() {
    let mut machine = Machine::new(4 * FILES, Told::All);
    // As if it had just begun.
    machine.ready = 0;
    machine.node.grow(-(machine.size as i64));
    machine.run(60, 0);
    assert_eq!((machine.ready, machine.given), (machine.size, 0));
    machine.run(120, 0);
    assert_eq!((machine.factor, machine.given, machine.filled), (OWN, 0, machine.size));
}
