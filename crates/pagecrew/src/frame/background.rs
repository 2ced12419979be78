//! What is done with frames while nobody asks: zeroing ahead, giving idle areas back, and emptying the stacks of idle CPUs.
//!
//! All of it is set out by the crew's watcher and done by its helpers, on CPUs that nobody else wants. A program that finds nothing takes
//! what is being zeroed away from them at once ([`Allocator::take_zeroing_back`]); what is on its way back to the kernel it waits for.

use super::Options;
use super::allocator::Allocator;
use super::area::FRAMES;
use super::policy;
use super::tree::TREE;
use crate::crew::zero::{self, Use};
use crate::crew::{Crew, Employer, Operation, Task, Tick};
use crate::region::policy::ZeroDemand;
use crate::region::signals::SignalReader;
use crate::stats::{Counters, StatsPage};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, clock};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Between two looks while zeroes are in demand, and the least there is between two looks.
const ZEROING_PAUSE: Duration = Duration::from_millis(5);
/// Between two looks at whether memory is short, while there is something to give back.
const PRESSURE_PAUSE: Duration = Duration::from_millis(250);
/// With nothing to do at all: until somebody calls.
const REST: Duration = Duration::from_secs(3600);
/// Areas that are given back in one job: what a helper does in a few milliseconds.
const JOB: usize = 8;
/// Fewer dirty frames than this in an area are not worth a piece.
const PIECE_LEAST: usize = 16;
/// Areas that are looked at for dirty frames at a time: a fraction of a millisecond.
const SCAN_MOST: usize = 2048;

pub(super) type FrameCrew = Crew<Background>;

/// The crew's employer.
pub(super) struct Background {
    pub allocator: Arc<Allocator>,
    stats: StatsPage,
    zero_rate: usize,
    decay: Duration,
    look: Mutex<Look>,
}

/// What the watcher remembers.
pub(super) struct Look {
    demand: ZeroDemand,
    zeroed_ns: u64,
    /// The tree from which on dirty frames are looked for.
    cursor: usize,
    /// When idle areas and stacks are looked at next.
    decay_ns: u64,
    pressure_ns: u64,
    signals: SignalReader,
    /// Whether there was free memory that was not idle long enough.
    idle_left: bool,
    /// What was on each CPU's stacks at the last look.
    lengths: Vec<(usize, usize)>,
}

impl Background {
    pub fn new(allocator: Arc<Allocator>, options: &Options) -> Result<Background, Errno> {
        let now = clock::now_ns();
        let look = Look {
            demand: ZeroDemand::default(),
            zeroed_ns: now,
            cursor: 0,
            decay_ns: now,
            pressure_ns: now,
            signals: SignalReader::new(),
            idle_left: false,
            lengths: vec![(0, 0); allocator.stacks.cpus()],
        };
        let stats = StatsPage::new()?;
        // What is to go back at once goes back at the next look.
        let decay = options.decay.max(2 * ZEROING_PAUSE);
        Ok(Background { allocator, stats, zero_rate: options.zero_rate, decay, look: Mutex::new(look) })
    }

    /// Keeps the watcher from looking.
    pub fn hold(&self) -> MutexGuard<'_, Look> {
        self.look.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets dirty frames out for helpers to zero, as much as is worth having. Returns whether zeroes are in demand.
    fn zero_ahead(&self, crew: &FrameCrew, look: &mut Look, now: u64) -> bool {
        let allocator = &self.allocator;
        let wanted = allocator.zeroes_wanted.swap(0, Ordering::Relaxed) * PAGE_SIZE;
        if wanted > 0 {
            look.demand.note(wanted, now);
        }
        let goal = look.demand.goal(now) / PAGE_SIZE;
        let since = Duration::from_nanos(now - look.zeroed_ns);
        look.zeroed_ns = now;
        if goal == 0 || self.zero_rate == 0 {
            return false;
        }
        if crew.contended() {
            allocator.pieces.ahead.call_off();
            return true;
        }
        let mut missing = goal.saturating_sub(allocator.known_zeroed(goal) + allocator.pieces.under_way());
        missing = missing.min(policy::allowance(self.zero_rate, since) / PAGE_SIZE);
        let mut set_out = false;
        // Whole areas first: they are the largest and the coldest. Areas that CPUs are at only where there is nothing else.
        for (least, busy_too) in [(FRAMES, false), (PIECE_LEAST, false), (PIECE_LEAST, true)] {
            let areas =
                allocator.zones.iter().flat_map(|zone| zone.with_free(allocator.tables(), busy_too, look.cursor));
            for area in areas.take(SCAN_MOST) {
                if missing == 0 {
                    break;
                }
                let counts = allocator.tables().areas[area].counts();
                if counts.backed && counts.free - counts.zeroed >= least {
                    let count = allocator.set_out(area, missing.min(FRAMES) as u32);
                    if count == 0 {
                        // Every slot is taken.
                        break;
                    }
                    missing = missing.saturating_sub(count);
                    set_out = true;
                }
            }
        }
        // In a large zone, the next look goes on where this one ended.
        look.cursor = if missing > 0 { look.cursor.wrapping_add(SCAN_MOST / TREE) } else { 0 };
        if set_out {
            crew.call(0, Operation::Zero);
        }
        true
    }

    /// Empties the stacks of CPUs on which nothing has happened since the last time.
    fn settle_stacks(&self, look: &mut Look) {
        let allocator = &self.allocator;
        let lengths = |cpu: usize| (allocator.stacks.len(cpu), allocator.zeroed.len(cpu));
        let last = &look.lengths;
        let idle = |cpu: usize| last[cpu] != (0, 0) && last[cpu] == lengths(cpu);
        allocator.drain(idle);
        for (cpu, last) in look.lengths.iter_mut().enumerate() {
            let now = lengths(cpu);
            if now == (0, 0) {
                for stacks in [&allocator.stacks, &allocator.zeroed] {
                    stacks.set_limit(cpu, policy::shrunk(stacks.limit(cpu)));
                }
            }
            *last = now;
        }
    }

    /// Has the memory of free areas given back: of those that were idle since the last time, or of all of them. Returns whether there
    /// is free memory left.
    fn give_back(&self, crew: &FrameCrew, all: bool) -> bool {
        let allocator = &self.allocator;
        let mut left = false;
        for (node, zone) in allocator.zones.iter().enumerate() {
            zone.forget_places(allocator.tables());
            let mut run = 0..0;
            for area in zone.with_free(allocator.tables(), false, 0) {
                if allocator.tables().areas[area].hold(all) {
                    allocator.held_areas.fetch_add(1, Ordering::AcqRel);
                    if run.end != area || run.len() == JOB {
                        self.discard(crew, run, node);
                        run = area..area;
                    }
                    run.end = area + 1;
                } else {
                    let area = &allocator.tables().areas[area];
                    area.look();
                    left |= area.is_backed();
                }
            }
            self.discard(crew, run, node);
        }
        left
    }

    fn discard(&self, crew: &FrameCrew, areas: std::ops::Range<usize>, node: usize) {
        if !areas.is_empty() {
            let range = self.allocator.range_of(areas.start * FRAMES, areas.len() * FRAMES);
            // SAFETY: areas that are held are nobody's until they are reported.
            unsafe { crew.submit(Task { operation: Operation::Discard, range, node, report: true }) };
        }
    }

    /// Gives back everything that is free and returns when it is back, or after a moment if a helper that is at it doesn't run.
    pub fn trim(&self, crew: &FrameCrew) {
        for _ in 0..1000 {
            self.allocator.moving(|| {
                self.allocator.take_zeroing_back();
                self.allocator.drain(|_| true);
                self.give_back(crew, true);
            });
            crew.assist(Operation::Discard, || false);
            if self.allocator.held_areas.load(Ordering::Acquire) + self.allocator.pieces.under_way() == 0 {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Whether the machine or the control group is short of memory.
    fn pressed(look: &mut Look, now: u64) -> bool {
        // How much is free doesn't matter: what counts is whether the machine or the group has less left than it should.
        look.signals.read(PAGE_SIZE, now).is_some_and(|signals| signals.pressure())
    }
}

impl Employer for Background {
    fn finished(&self, task: Task) {
        let first = (task.range.start - self.allocator.base()) / HUGE_PAGE_SIZE;
        let count = task.range.len / HUGE_PAGE_SIZE;
        (first..first + count).for_each(|area| self.allocator.tables().discarded(area));
        self.allocator.counters.given_back.add((count * FRAMES) as u64);
        self.allocator.held_areas.fetch_sub(count, Ordering::AcqRel);
    }

    fn work_ahead(&self, crew: &FrameCrew) -> bool {
        let pieces = &self.allocator.pieces;
        let worked = pieces.work(
            |range, revoked| {
                // SAFETY: frames in a piece are nobody's until it was revoked or is done.
                unsafe {
                    if crew.revocation() && zero::revocable() {
                        zero::zero_unless(range, revoked)
                    } else {
                        zero::zero(range, Use::Later);
                        true
                    }
                }
            },
            clock::now_ns,
        );
        // In time for the watcher to set more out.
        if worked && pieces.ahead.ready() <= 2 {
            crew.notify_watcher();
        }
        worked
    }

    fn watch(&self, crew: &FrameCrew) -> Tick {
        self.allocator.moving(|| self.look(crew))
    }

    fn counters(&self) -> &Counters {
        &self.stats.counters
    }
}

impl Background {
    /// The watcher's look: at what is to be zeroed, to be given back, and on stacks. Says when to look again.
    fn look(&self, crew: &FrameCrew) -> Tick {
        let allocator = &self.allocator;
        let now = clock::now_ns();
        let mut look = self.hold();
        allocator.take_in_pieces();
        let zeroing = self.zero_ahead(crew, &mut look, now) || allocator.pieces.under_way() > 0;
        if let Err(early) = allocator.next_look.begin(now) {
            let early = Duration::from_nanos(early);
            return Tick::Wait(if zeroing { early.min(ZEROING_PAUSE) } else { early });
        }
        let called = allocator.attention.swap(false, Ordering::Relaxed);
        if now >= look.pressure_ns {
            look.pressure_ns = now + PRESSURE_PAUSE.as_nanos() as u64;
            if Self::pressed(&mut look, now) {
                allocator.drain(|_| true);
                self.give_back(crew, true);
            }
        }
        if now >= look.decay_ns {
            look.decay_ns = now + (self.decay / 2).as_nanos() as u64;
            self.settle_stacks(&mut look);
            look.idle_left = self.give_back(crew, false);
        }
        let until_decay = Duration::from_nanos(look.decay_ns.saturating_sub(now));
        if zeroing || called || look.idle_left {
            let pause = if zeroing { ZEROING_PAUSE } else { PRESSURE_PAUSE.min(until_decay) };
            allocator.next_look.again_at(now + pause.as_nanos() as u64);
            return Tick::Wait(pause);
        }
        // What is free on a stack, or was when nobody looked, is found at the next decay.
        let rest = if allocator.nothing_backed() { REST } else { until_decay };
        if allocator.next_look.rest(|| allocator.attention.load(Ordering::Relaxed)) {
            Tick::Wait(rest)
        } else {
            Tick::Again
        }
    }
}
