//! May the pool fill now, or must it give memory back? Pure arithmetic.
//!
//! Two things decide. The *floor*: so much memory is left to others, and what is missing to that goes back at once. And
//! *pressure*: tasks that wait for memory. Filling itself can make tasks wait (the filler, as the kernel compacts
//! memory for its huge pages), and what others wait for may not be memory that the pool could give (their own control
//! group may be full; any user can have such a one). So pressure that comes with filling and goes with it only slows
//! filling down, and nothing goes back for it; other pressure counts only where the machine itself reclaims memory
//! meanwhile; and then no more than half of what waits goes back while there is memory enough.

use crate::control::{Backoff, Pressure};
use crate::sys::HUGE_PAGE_SIZE;
use std::fmt;
use std::time::Duration;

/// Tasks wait for memory if they did for this share of the time, in percent.
const PRESSURE: u64 = 10;
/// Shares of less time than this say nothing.
const WINDOW: Duration = Duration::from_millis(500);
/// So long after it was allowed, filling may still go on.
const SETTLE: Duration = Duration::from_secs(1);
/// The first wait after trouble, and the longest.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// The longest wait after pressure that filling itself has made.
const PAUSE_OWN_MOST: Duration = Duration::from_secs(4);
/// Under pressure, one part in so many goes back at a time, but no less than `GIVE_LEAST`.
const GIVE_PARTS: u64 = 8;
const GIVE_LEAST: u64 = 64 << 20;
/// Memory is enough if one part in so many of it is available over the floor.
const PLENTY_PARTS: u64 = 8;

/// What is known at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readings {
    /// The time.
    pub now_ns: u64,
    /// All memory of the machine or the control group, the lesser.
    pub total: u64,
    /// What is available of it without hurting anybody. Memory that waits in the pool is not.
    pub available: u64,
    /// For how long some task has waited for memory since the machine was started; `None` where the kernel doesn't say.
    pub stall_us: Option<u64>,
    /// Bytes that were reclaimed since then because the machine was short of memory, not one of its control groups; `None` where that is not
    /// known.
    pub reclaimed: Option<u64>,
}

/// Why the pool isn't filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Too little memory would be left.
    Floor,
    /// Tasks wait for memory, or did a moment ago.
    Pressure,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Floor => "free memory is at the floor",
            Reason::Pressure => "memory pressure",
        })
    }
}

/// What the pool is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The next piece may be filled.
    Fill,
    /// Nothing.
    Wait(Reason),
    /// So many bytes have to go back.
    GiveBack(u64),
}

/// What is left to others if nobody says: a twentieth of memory, but 512 MiB at least, and never more than half.
pub fn default_floor(total: u64) -> u64 {
    (total / 20).max(512 << 20).min(total / 2)
}

/// Filling ends so far above the floor that not every little thing others do makes the pool give something back.
fn margin(total: u64) -> u64 {
    (total / 256).max(64 << 20).min(total / 16)
}

/// How much may be filled on a node with `total` bytes of memory, of which `free` are free and `files` in caches of files. Filling takes from
/// this node alone, so some of it has to stay.
pub(super) fn room_on_node(total: u64, free: u64, files: u64) -> u64 {
    // Not all that lies in caches can be had at once.
    (free + files / 2).saturating_sub(margin(total))
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Decides at each look.
#[derive(Debug, Clone)]
pub struct Gate {
    floor: u64,
    /// The margin is to be twice as large before filling begins again.
    held: bool,
    stalls: Pressure,
    /// Bytes that had been reclaimed when pressure was judged last.
    reclaimed: Option<u64>,
    /// When filling was allowed the last time.
    filled_ns: Option<u64>,
    /// Nothing is filled meanwhile, for this reason.
    wait: Backoff,
    reason: Reason,
    /// What may go back in this time of pressure while memory is enough; `None` if there is none.
    spare: Option<u64>,
}

impl Gate {
    /// Leaves `floor` bytes to others.
    pub fn new(floor: u64) -> Gate {
        Gate {
            floor,
            held: false,
            stalls: Pressure::new(PRESSURE, WINDOW),
            reclaimed: None,
            filled_ns: None,
            wait: Backoff::new(PAUSE, PAUSE_OWN_MOST),
            reason: Reason::Floor,
            spare: None,
        }
    }

    /// From now on, leaves `floor` bytes to others.
    pub fn set_floor(&mut self, floor: u64) {
        self.floor = floor;
    }

    /// Nothing is filled for a while, for twice as long as the last time if that was not long ago.
    fn pause(&mut self, reason: Reason, most: Duration, now_ns: u64) {
        if self.wait.ready(now_ns) {
            self.wait.in_vain(most, now_ns);
        } else {
            self.wait.go_on(now_ns);
        }
        self.reason = reason;
    }

    /// Whether tasks waited for memory since the last look that was long enough ago, and whether that may come from
    /// filling. `None`: nothing new is known.
    fn pressure(&mut self, readings: Readings) -> Option<(bool, bool)> {
        self.reclaimed = self.reclaimed.or(readings.reclaimed);
        let spell = self.stalls.note(readings.now_ns, readings.stall_us)?;
        let settles = |filled_ns: u64| filled_ns.saturating_add(nanoseconds(SETTLE));
        let own = self.filled_ns.is_some_and(|filled_ns| settles(filled_ns) > spell.since_ns);
        let before = std::mem::replace(&mut self.reclaimed, readings.reclaimed);
        let of_machine = before.zip(readings.reclaimed).is_none_or(|(before, now)| now > before);
        Some((spell.waited && (own || of_machine), own))
    }

    /// What to do now, if `ready` bytes wait that could go back, and the next piece to be filled takes `next`; 0 if
    /// none is to be filled and this is but a look at the machine.
    pub fn judge(&mut self, readings: Readings, ready: u64, next: u64) -> Decision {
        let Readings { now_ns, total, available, .. } = readings;
        let pages = |bytes: u64| bytes.min(ready).next_multiple_of(HUGE_PAGE_SIZE as u64).min(ready);
        let pressure = self.pressure(readings);
        if available < self.floor {
            self.held = true;
            if ready == 0 {
                return Decision::Wait(Reason::Floor);
            }
            self.pause(Reason::Floor, PAUSE_MOST, now_ns);
            return Decision::GiveBack(pages(self.floor - available));
        }
        match pressure {
            Some((true, true)) => self.pause(Reason::Pressure, PAUSE_OWN_MOST, now_ns),
            Some((true, false)) => {
                self.pause(Reason::Pressure, PAUSE_MOST, now_ns);
                let plenty = available - self.floor >= total / PLENTY_PARTS;
                let spare = self.spare.get_or_insert(ready / 2);
                let give = pages((ready / GIVE_PARTS).max(GIVE_LEAST));
                if give > 0 && (!plenty || *spare >= give) {
                    *spare = spare.saturating_sub(give);
                    self.held = true;
                    return Decision::GiveBack(give);
                }
            }
            Some((false, _)) if self.wait.ready(now_ns) => self.spare = None,
            _ => {}
        }
        if !self.wait.ready(now_ns) {
            return Decision::Wait(self.reason);
        }
        let margin = margin(total) * if self.held { 2 } else { 1 };
        if available.saturating_sub(next) < self.floor.saturating_add(margin) {
            self.held = true;
            return Decision::Wait(Reason::Floor);
        }
        if next > 0 {
            self.held = false;
            self.filled_ns = Some(now_ns);
        }
        Decision::Fill
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn at(now_ns: u64, available: u64, stall_us: u64) -> Readings {
        Readings { now_ns, total: 16 * GIB, available, stall_us: Some(stall_us), reclaimed: None }
    }

    #[test]
    fn floors_for_machines_of_all_sizes() {
        let floors = [0, GIB / 2, 4 * GIB, 24 * GIB, 4096 * GIB].map(|total| default_floor(total) / MIB);
        assert_eq!(floors, [0, 256, 512, 1228, 209_715]);
    }

    #[test]
    fn a_node_is_never_filled_to_its_last_page() {
        assert_eq!(room_on_node(2 * GIB, GIB, 0), GIB - 64 * MIB);
        assert_eq!(room_on_node(2 * GIB, 32 * MIB, 128 * MIB), 32 * MIB);
        assert_eq!(room_on_node(2 * GIB, 64 * MIB, 0), 0);
        assert_eq!(room_on_node(512 * GIB, GIB, GIB), 0);
    }

    #[test]
    fn filling_ends_at_the_margin_and_begins_again_at_twice_that() {
        let mut gate = Gate::new(GIB);
        assert_eq!(gate.judge(at(0, 2 * GIB, 0), 0, GIB - 64 * MIB), Decision::Fill);
        assert_eq!(gate.judge(at(1, 2 * GIB, 0), 0, GIB - 62 * MIB), Decision::Wait(Reason::Floor));
        assert_eq!(gate.judge(at(2, 2 * GIB, 0), 0, GIB - 64 * MIB), Decision::Wait(Reason::Floor));
        assert_eq!(gate.judge(at(3, 2 * GIB, 0), 0, GIB - 128 * MIB), Decision::Fill);
        assert_eq!(gate.judge(at(4, 2 * GIB, 0), 0, GIB - 64 * MIB), Decision::Fill);
        gate.set_floor(3 * GIB);
        assert_eq!(gate.judge(at(5, 2 * GIB, 0), 0, 2 * MIB), Decision::Wait(Reason::Floor));
        // More than there is.
        gate.set_floor(u64::MAX);
        assert_eq!(gate.judge(at(6, 2 * GIB, 0), GIB, u64::MAX), Decision::GiveBack(GIB));
    }

    #[test]
    fn what_is_missing_to_the_floor_goes_back_as_far_as_it_is_there() {
        let mut gate = Gate::new(GIB);
        assert_eq!(gate.judge(at(0, GIB - 1, 0), 8 * MIB, MIB), Decision::GiveBack(2 * MIB));
        assert_eq!(gate.judge(at(1, GIB - 9 * MIB, 0), 8 * MIB, MIB), Decision::GiveBack(8 * MIB));
        assert_eq!(gate.judge(at(2, GIB - 9 * MIB, 0), 0, MIB), Decision::Wait(Reason::Floor));
        // A wait follows, each time a longer one.
        assert_eq!(gate.judge(at(SECOND, 9 * GIB, 0), 0, MIB), Decision::Wait(Reason::Floor));
        assert_eq!(gate.judge(at(SECOND + 1, 9 * GIB, 0), 0, MIB), Decision::Fill);
        assert_eq!(gate.judge(at(2 * SECOND, 0, 0), 2 * MIB, MIB), Decision::GiveBack(2 * MIB));
        assert_eq!(gate.judge(at(4 * SECOND - 1, 9 * GIB, 0), 0, MIB), Decision::Wait(Reason::Floor));
        assert_eq!(gate.judge(at(4 * SECOND, 9 * GIB, 0), 0, MIB), Decision::Fill);
    }

    #[test]
    fn pressure_is_a_share_of_the_time_since_the_last_look() {
        let judge = |passed_ns: u64, stall_us: u64| {
            let mut gate = Gate::new(GIB);
            gate.judge(at(100 * SECOND, 2 * GIB, 7_000_000), GIB, MIB);
            gate.filled_ns = None;
            gate.judge(at(100 * SECOND + passed_ns, 2 * GIB, 7_000_000 + stall_us), GIB, MIB)
        };
        assert_eq!(judge(SECOND, 100_000), Decision::Fill);
        assert_eq!(judge(SECOND, 100_001), Decision::GiveBack(128 * MIB));
        assert_eq!(judge(10 * SECOND, 1_000_000), Decision::Fill);
        // A look with nothing to fill is no filling.
        let mut gate = Gate::new(GIB);
        (0..9).for_each(|second| assert_eq!(gate.judge(at(second * SECOND, 2 * GIB, 0), GIB, 0), Decision::Fill));
        assert_eq!(gate.judge(at(9 * SECOND, 2 * GIB, 500_000), GIB, 0), Decision::GiveBack(128 * MIB));
        // Too short a time to tell.
        assert_eq!(judge(SECOND / 2 - 1, 400_000), Decision::Fill);
        let blind = Readings { stall_us: None, ..at(0, 2 * GIB, 0) };
        assert_eq!(Gate::new(GIB).judge(blind, GIB, MIB), Decision::Fill);
        assert_eq!(Reason::Pressure.to_string(), "memory pressure");
    }

    #[test]
    fn who_waits_at_the_limit_of_a_group_takes_nothing_from_the_pool() {
        for (reclaims, expected) in [(0, Decision::Fill), (1, Decision::GiveBack(128 * MIB))] {
            let mut gate = Gate::new(GIB);
            let mut judge = |second: u64| {
                let readings = Readings {
                    reclaimed: Some(MIB + second * reclaims),
                    ..at(second * SECOND, 4 * GIB, second * 900_000)
                };
                gate.judge(readings, GIB, 0)
            };
            let decided: Vec<Decision> = (1..5).map(&mut judge).collect();
            assert!(decided.contains(&expected), "{decided:?}");
            if reclaims == 0 {
                assert!(decided.iter().all(|decision| *decision == expected), "{decided:?}");
            }
        }
    }

    /// A machine, looked at ten times a second.
    struct Machine {
        gate: Gate,
        now_ns: u64,
        total: u64,
        others: u64,
        /// What the pool may have.
        size: u64,
        ready: u64,
        piece: u64,
        stall_us: u64,
        filled: u64,
        given: u64,
    }

    impl Machine {
        fn new(total: u64, size: u64) -> Machine {
            Machine {
                gate: Gate::new(default_floor(total)),
                now_ns: 1000 * SECOND,
                total,
                others: total / 4,
                size,
                ready: 0,
                piece: (total / 4096).clamp(2 * MIB, GIB),
                stall_us: 0,
                filled: 0,
                given: 0,
            }
        }

        fn available(&self) -> u64 {
            self.total.saturating_sub(self.others + self.ready)
        }

        fn look(&mut self) -> Decision {
            self.now_ns += SECOND / 10;
            let (available, stall_us) = (self.available(), Some(self.stall_us));
            let signals = Readings { now_ns: self.now_ns, total: self.total, available, stall_us, reclaimed: None };
            let verdict = self.gate.judge(signals, self.ready, self.piece);
            match verdict {
                Decision::Fill if self.ready + self.piece <= self.size => {
                    self.ready += self.piece;
                    self.filled += self.piece;
                }
                Decision::GiveBack(bytes) => {
                    assert!(bytes > 0 && bytes <= self.ready);
                    self.ready -= bytes;
                    self.given += bytes;
                }
                _ => {}
            }
            verdict
        }

        fn looks(&mut self, count: usize) {
            for _ in 0..count {
                self.look();
            }
        }
    }

    const TOTALS: [u64; 5] = [4 * GIB, 24 * GIB, 256 * GIB, 1024 * GIB, 4096 * GIB];

    #[test]
    fn constant_others_see_the_pool_come_to_rest() {
        for total in TOTALS {
            for part in 0..100 {
                let mut machine = Machine::new(total, total);
                machine.looks(5000);
                machine.others = total * part / 100;
                machine.looks(20);
                // Whatever had to go back has, and comes back at most once.
                let (filled, given, ready) = (machine.filled, machine.given, machine.ready);
                machine.looks(20_000);
                let room = total - machine.others - default_floor(total).min(total - machine.others);
                assert_eq!(machine.given, given, "{total} {part}");
                assert_eq!(machine.filled - filled, machine.ready - ready);
                assert!(machine.ready <= room && machine.ready + 2 * margin(total) + 2 * machine.piece >= room);
            }
        }
    }

    #[test]
    fn nothing_is_filled_after_a_give_back_before_the_margin_is_there() {
        for total in TOTALS {
            let (mut machine, floor) = (Machine::new(total, total), default_floor(total));
            machine.looks(5000);
            machine.others += total / 10;
            assert!(matches!(machine.look(), Decision::GiveBack(_)));
            machine.looks(1000);
            let filled = machine.filled;
            // Little by little there is more.
            while machine.filled == filled {
                machine.others -= 2 * MIB;
                let before = machine.available();
                if machine.look() == Decision::Fill {
                    assert!(before - machine.piece >= floor + 2 * margin(total), "{total}");
                }
                assert!(before <= floor + 2 * margin(total) + machine.piece + 2 * MIB, "{total}");
            }
        }
    }

    proptest! {
            #![proptest_config(ProptestConfig::with_cases(40))]
            #[test]
            fn whatever_others_do_the_floor_is_theirs_after_one_look(
                which in 0..TOTALS.len(),
                steps in proptest::collection::vec((0u64..90, 1usize..200, 0u64..8), 1..40),
            ) {
                let total = TOTALS[which];
                let mut machine = Machine::new(total, total / 2);
                let floor = default_floor(total);
                for (part, looks, during) in steps {
                    // They go there in eight strides, the first of them at once and the others while memory goes back.
                    let (from, to) = (machine.others as i64, (total * part / 100) as i64);
                    for look in 0..looks {
                        let stride = (look as i64 + 1).min(during as i64 + 1);
    let others = (from + (to - from) * stride / (during as i64 + 1)) as u64;
                        // Nobody has what isn't there.
                        machine.others = others.min(total - machine.ready);
                        let (missing, ready) = (floor.saturating_sub(machine.available()), machine.ready);
                        machine.look();
                        // What they had taken before the look is back, or nothing is left to give.
                        prop_assert!(machine.available() >= floor || machine.ready == 0);
                        prop_assert!(ready - machine.ready.min(ready) < missing + 2 * MIB);
                    }
                }
            }
        }

    #[test]
    fn others_that_come_and_go_cost_less_and_less() {
        for total in TOTALS {
            let mut machine = Machine::new(total, total);
            machine.looks(5000);
            let before = machine.given;
            // A program that takes a tenth every other second, for ten minutes.
            for look in 0..6000 {
                machine.others = if look / 10 % 2 == 0 { total / 4 } else { total / 4 + total / 10 };
                machine.look();
            }
            // It would be 300 tenths without waiting.
            assert!(machine.given - before <= total * 2, "{total} {}", machine.given - before);
        }
    }

    #[test]
    fn pressure_from_outside_stops_filling_and_takes_a_part_at_a_time() {
        let mut machine = Machine::new(24 * GIB, 15 * GIB);
        machine.looks(5000);
        assert_eq!(machine.ready / MIB * MIB, machine.filled);
        machine.others = machine.total - default_floor(machine.total) - machine.ready - 128 * MIB;
        machine.looks(100);
        let (ready, filled) = (machine.ready, machine.filled);
        let mut shares = Vec::new();
        for _ in 0..100 {
            machine.stall_us += 50_000;
            let before = machine.ready;
            if let Decision::GiveBack(bytes) = machine.look() {
                shares.push(bytes);
                assert!(bytes >= before.min(64 * MIB) && bytes <= (before / 8).max(64 * MIB) + 2 * MIB);
            }
        }
        // At most twice a second, as long as memory is scarce; half stays if there is plenty.
        assert!((5..=20).contains(&shares.len()), "{shares:?}");
        assert!(machine.ready < ready && machine.ready >= ready / 2 - machine.total / 8, "{}", machine.ready);
        assert_eq!(machine.filled, filled);
        // It is over.
        machine.others = machine.total / 4;
        let mut waited = 0;
        while machine.look() != Decision::Fill {
            waited += 1;
        }
        assert!((5..=25).contains(&waited), "{waited}");
    }

    #[test]
    fn pressure_that_memory_could_not_relieve_takes_half_at_most() {
        for total in TOTALS {
            let mut machine = Machine::new(total, total / 4);
            machine.looks(5000);
            let ready = machine.ready;
            for _ in 0..2 {
                // A control group that is at its own limit, for ten minutes.
                for _ in 0..6000 {
                    machine.stall_us += 90_000;
                    machine.look();
                }
                assert!(machine.ready >= ready / 2, "{total} {}", machine.ready);
                assert!(machine.ready < ready - ready / 3, "{total} {}", machine.ready);
                // What went comes back when that is over.
                machine.looks(5000);
                assert!(machine.ready > ready - machine.piece);
            }
        }
    }

    #[test]
    fn filling_that_makes_tasks_wait_itself_slows_down_and_goes_on() {
        for total in TOTALS {
            let mut machine = Machine::new(total, total / 4);
            let mut looks = 0;
            while machine.ready + machine.piece <= machine.size {
                let filled = machine.filled;
                machine.look();
                // Each piece is one long stall, that of the next look too.
                machine.stall_us += if machine.filled > filled { 200_000 } else { 0 };
                looks += 1;
                assert_eq!(machine.given, 0, "{total}");
                assert!(looks < 20_000, "{total}");
            }
            // Without stalls it would be one piece a look.
            let pieces = machine.filled / machine.piece;
            assert!(looks > 2 * pieces, "{total} {looks} {pieces}");
        }
    }

    #[test]
    fn waits_double_as_long_as_trouble_comes_back() {
        let (mut gate, mut now, mut stall, mut waits) = (Gate::new(GIB), 1000 * SECOND, 0, Vec::new());
        let calm = |gate: &mut Gate, now: &mut u64, stall: u64| {
            let start = *now;
            while gate.judge(at(*now, 2 * GIB, stall), 0, MIB) != Decision::Fill {
                *now += SECOND / 10;
            }
            (*now - start).div_ceil(SECOND)
        };
        for _ in 0..9 {
            // A moment of filling, then of none, and then others wait for all of a second.
            calm(&mut gate, &mut now, stall);
            gate.filled_ns = None;
            now += SECOND;
            stall += 1_000_000;
            assert_eq!(gate.judge(at(now, 2 * GIB, stall), 0, MIB), Decision::Wait(Reason::Pressure));
            waits.push(calm(&mut gate, &mut now, stall));
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        now += 61 * SECOND;
        gate.judge(at(now, 2 * GIB, stall), 0, MIB);
        gate.filled_ns = None;
        now += SECOND;
        gate.judge(at(now, 2 * GIB, stall + 1_000_000), 0, MIB);
        assert_eq!(calm(&mut gate, &mut now, stall + 1_000_000), 1);
    }
}
