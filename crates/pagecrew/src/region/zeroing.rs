//! Zeroes: cleaning what a zeroed span is made of, and having helpers zero retained memory before anybody asks.

use super::core::{Core, Inner, RegionCrew, Zone, lock};
use super::policy::ZeroDemand;
use super::spans::{Grant, Piece, State, Want};
use crate::control::Backoff;
use crate::crew::ahead::{Ahead, Done};
use crate::crew::zero::{self, Use};
use crate::crew::{Employer, Operation, Task};
use crate::sys::memory::Range;
use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE, clock, memory};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What a helper zeroes ahead at a time.
const ZERO_STEP: usize = 4 << 20;
/// Less than this is zeroed by its next user, through the caches.
const ZERO_LEAST: usize = 1 << 20;
/// Zeroing less than this is done by the caller alone, through the caches.
const ZERO_ALONE: usize = 16 << 20;
/// Less than this is not zeroed ahead.
pub(super) const ZERO_SOON: usize = 4 << 20;
/// A free range at least this long is looked at for pages that were never touched before it is zeroed, unless such spans are used whole.
const SCAN_LEAST: usize = 4 << 20;

/// A free that calls the watcher, which then finds nothing to set out, is not followed by another call for so long, and longer each time: a program
/// that frees a block and asks for it again, over and over, would call it each time.
const VAIN_FIRST: Duration = Duration::from_micros(250);
const VAIN_MOST: Duration = Duration::from_millis(8);

/// No time.
const NEVER: u64 = u64::MAX;

/// In search of a piece to be zeroed ahead, so many huge pages are looked at for what of them is there: it is done with the zone locked.
const LOOK_WINDOWS: usize = 16;

/// What is known of the demand for zeroes, and what is being done about it.
pub(super) struct Zeroing {
    /// Zeroed bytes asked for since the watcher last set some out.
    wanted: AtomicUsize,
    /// From when on a free calls the watcher, since more memory would be set out if there were any: zeroes were asked for since the watcher's last
    /// look, or it found too little for them. [`NEVER`] where it may set out nothing, and once it was called.
    call_from_ns: AtomicU64,
    /// Bytes zeroed ahead that were used where zeroes were not needed, since then.
    wasted: AtomicUsize,
    demand: Mutex<Demand>,
    pub ahead: Ahead,
    /// Whether memory can be taken from a helper that is zeroing it.
    revocable: AtomicBool,
}

/// What the watcher knows of it.
struct Demand {
    zeroes: ZeroDemand,
    /// Of frees that call the watcher.
    calls: Backoff,
}

impl Demand {
    fn new() -> Demand {
        Demand { zeroes: ZeroDemand::default(), calls: Backoff::new(VAIN_FIRST, VAIN_MOST) }
    }
}

impl Zeroing {
    pub fn new() -> Zeroing {
        Zeroing {
            wanted: AtomicUsize::new(0),
            call_from_ns: AtomicU64::new(NEVER),
            wasted: AtomicUsize::new(0),
            demand: Mutex::new(Demand::new()),
            ahead: Ahead::new(),
            revocable: AtomicBool::new(false),
        }
    }

    /// In a forked child: nothing was asked for, and there is no helper.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: a thread of the parent may have held the lock; here nobody is inside or waiting, by the function's own contract.
        unsafe { std::ptr::write((&raw const self.demand).cast_mut(), Mutex::new(Demand::new())) };
        self.revocable.store(false, Ordering::Relaxed);
        self.ahead.reset();
    }
}

impl Core {
    /// Zeroes the dirty pieces of the first `usable` bytes of a span; behind them may be a guard. Returns the bytes that were
    /// retained and known to be zero.
    pub fn clear(&self, crew: &RegionCrew, zone: &Zone, grant: &Grant, usable: usize) -> usize {
        let end = grant.offset + usable;
        let within = |piece: &Piece| Piece { len: piece.len.min(end.saturating_sub(piece.offset)), ..*piece };
        let pieces: Vec<Piece> = grant.pieces.iter().map(within).filter(|piece| piece.len > 0).collect();
        let dirty = |piece: &&Piece| matches!(piece.state, State::Dirty | State::Zeroing(_));
        let total: usize = pieces.iter().filter(dirty).map(|piece| piece.len).sum();
        let mut skipped: usize =
            pieces.iter().filter(|piece| piece.state == State::Zeroed).map(|piece| piece.len).sum();
        let used_whole = self.density.is_dense(grant.len);
        for piece in pieces.iter().filter(dirty) {
            let range = zone.at(piece.offset, piece.len);
            if piece.len < SCAN_LEAST || used_whole {
                self.zero(crew, range, total, zone.node);
                continue;
            }
            // A program that touches little of a large table leaves most of it without pages, and those read as zero already: writing
            // zeroes there would give the table pages that it never had. Where few pages are, they go back.
            let mut rest = range;
            while rest.len > 0 {
                let (part, sparse) = first_by_use(rest, 2);
                rest = Range { start: part.end(), len: rest.len - part.len };
                // SAFETY: the range is part of a span that belongs to the calling allocation.
                if sparse && unsafe { memory::discard(part) }.is_ok() {
                    skipped += part.len;
                } else {
                    self.zero(crew, part, total, zone.node);
                }
            }
        }
        skipped
    }

    fn zero(&self, crew: &RegionCrew, range: Range, total: usize, node: usize) {
        if total < ZERO_ALONE || range.len < HUGE_PAGE_SIZE {
            // SAFETY: the range is part of a span that belongs to the calling allocation.
            unsafe { zero::zero(range, if total < ZERO_ALONE { Use::Soon } else { Use::Later }) };
            self.counters().zeroed_by_caller_bytes.add(range.len as u64);
        } else {
            // SAFETY: as above.
            unsafe { crew.run(Task { operation: Operation::Zero, range, node, report: false }) };
        }
    }

    /// Whether memory can be taken from a helper that is zeroing it.
    pub fn can_revoke(&self) -> bool {
        self.zeroing.revocable.load(Ordering::Relaxed)
    }

    /// Takes note of what a span was wanted for and of what it consists.
    pub fn note_want(&self, want: Want, usable: usize, pieces: &[Piece]) {
        if want == Want::Zeroes {
            self.zeroing.wanted.fetch_add(usable, Ordering::Relaxed);
            self.zeroing.call_from_ns.store(0, Ordering::Relaxed);
            self.caches.set_zeroes_wanted(true);
            return;
        }
        let zeroed = pieces.iter().filter(|piece| matches!(piece.state, State::Zeroed | State::Zeroing(_)));
        let wasted: usize = zeroed.map(|piece| piece.len).sum();
        if wasted > 0 {
            self.zeroing.wasted.fetch_add(wasted, Ordering::Relaxed);
        }
    }

    /// Sets out dirty memory for helpers to zero, as much as is worth having. Called by the watcher.
    pub fn zero_ahead(&self, crew: &RegionCrew, now: u64) {
        // Before what is wanted is read: who asks after that says so again.
        let call_from_ns = self.zeroing.call_from_ns.swap(NEVER, Ordering::Relaxed);
        let wanted = self.zeroing.wanted.swap(0, Ordering::Relaxed);
        let wasted = self.zeroing.wasted.swap(0, Ordering::Relaxed);
        let mut demand = lock(&self.zeroing.demand);
        if wanted > 0 {
            demand.zeroes.note(wanted, now);
        }
        demand.zeroes.wasted(wasted);
        let goal = demand.zeroes.goal(now);
        drop(demand);
        if goal == 0 {
            self.caches.set_zeroes_wanted(false);
        }
        if !self.options.zero {
            return;
        }
        if crew.contended() || self.limits().near() || self.cramped() {
            // Nobody will take it soon, or it may have to go back at any moment.
            self.call_off_zeroing();
            return;
        }
        let revocable = crew.revocation() && zero::revocable() && !self.zeroing.ahead.has_failed();
        self.zeroing.revocable.store(revocable, Ordering::Relaxed);
        let zeroed: u64 = self.zones.iter().map(|zone| self.take_in_all(zone)).sum();
        let mut missing = goal.saturating_sub(zeroed as usize + self.zeroing.ahead.under_way());
        let mut set_out = false;
        for zone in &self.zones {
            let mut inner = zone.lock();
            while missing > 0 {
                // A helper must not wait for the kernel with a lock, nor add to what the program has: it gets only what is there. What
                // isn't stays as it is: whoever asks for it next gives it back himself, and until then it takes nothing.
                let mut windows = LOOK_WINDOWS;
                let out = self.zeroing.ahead.set_out(|slot| {
                    let (offset, len) = inner.map.begin_zeroing(ZERO_STEP, ZERO_LEAST, slot as u8, |offset, len| {
                        let found = first_resident(zone.at(offset, len), ZERO_STEP, &mut windows)?;
                        Some(Range { start: found.start - zone.range.start, ..found })
                    })?;
                    missing = missing.saturating_sub(len);
                    Some(zone.at(offset, len))
                });
                if !out {
                    break;
                }
                set_out = true;
            }
            self.publish(zone, &mut inner);
        }
        if missing > 0 {
            let calls = &mut lock(&self.zeroing.demand).calls;
            let next = match (set_out, call_from_ns) {
                (true, _) => {
                    calls.worth_it();
                    0
                }
                // It was called, or there was enough before.
                (false, NEVER) => {
                    calls.in_vain(Duration::ZERO, now);
                    calls.until_ns()
                }
                // It has looked by itself; who frees calls as before.
                (false, from_ns) => from_ns,
            };
            self.zeroing.call_from_ns.fetch_min(next, Ordering::Relaxed);
        }
        if set_out {
            crew.call(0, Operation::Zero);
        }
    }

    /// Takes in what helpers have zeroed of a zone. Returns how much of it is zeroed then, in bytes.
    fn take_in_all(&self, zone: &Zone) -> u64 {
        let mut inner = zone.lock();
        self.take_in(zone, &mut inner);
        self.publish(zone, &mut inner);
        inner.map.bytes().retained_zeroed
    }

    /// Calls off what is set out for zeroing and not begun, and takes in what is done.
    pub fn call_off_zeroing(&self) {
        self.zeroing.ahead.call_off();
        self.zones.iter().for_each(|zone| {
            self.take_in_all(zone);
        });
    }

    /// Takes in what helpers have zeroed of a zone, which is locked.
    pub fn take_in(&self, zone: &Zone, inner: &mut Inner) {
        self.zeroing.ahead.collect(zone.range, |Done { slot, range, whole, took_ns }| {
            if inner.map.finish_zeroing(range.start - zone.range.start, slot as u8, whole) {
                self.counters().zeroed_in_background_bytes.add(range.len as u64);
                self.counters().background_zero_ns.add(took_ns);
            }
        });
    }

    /// Zeroes what is set out, until that is revoked. Returns whether all of it was zeroed, and the nanoseconds that it took.
    fn zero_piece(&self, range: Range, revoked: &AtomicU32) -> (bool, u64) {
        let begin = clock::now_ns();
        // SAFETY: a range in state `Zeroing` is used by nobody else until it is revoked; where it can't be revoked, nobody takes it.
        let whole = unsafe {
            if self.can_revoke() {
                zero::zero_unless(range, revoked)
            } else {
                zero::zero(range, Use::Later);
                true
            }
        };
        (whole, clock::now_ns() - begin)
    }

    /// Whether zeroing some of `freed` bytes ahead is worth a call of the watcher, which is left to the caller: of several, one is told so.
    pub fn calls_for_zeroing(&self, freed: usize) -> bool {
        if !self.options.zero || freed < ZERO_STEP {
            return false;
        }
        let call = &self.zeroing.call_from_ns;
        let from_ns = call.load(Ordering::Relaxed);
        from_ns != NEVER
            && clock::now_ns() >= from_ns
            && call.compare_exchange(from_ns, NEVER, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// A helper's part: zeroes a piece that was set out. Returns whether there was one.
    pub fn zero_one_ahead(&self, crew: &RegionCrew) -> bool {
        let worked = self.zeroing.ahead.work(|_, range, revoked| self.zero_piece(range, revoked));
        // In time for the watcher to set more out.
        if worked && self.zeroing.ahead.ready() <= 2 {
            crew.notify_watcher();
        }
        worked
    }
}

/// The first part of a range, of up to `most` bytes, of which any page is there, so that writing to it gives it no huge page that it did
/// not have. Looks at no more than `windows` huge pages, of which it takes off what it has looked at.
fn first_resident(range: Range, most: usize, windows: &mut usize) -> Option<Range> {
    let mut rest = range;
    while rest.len > 0 && *windows > 0 {
        let (part, sparse) = first_by_use(Range { len: rest.len.min(most), ..rest }, 1);
        *windows = windows.saturating_sub(part.len.div_ceil(HUGE_PAGE_SIZE));
        if !sparse {
            return Some(part);
        }
        rest = Range { start: part.end(), len: rest.len - part.len };
    }
    None
}

/// The first part of a range that is alike in whether less than one page of `of` is there, and whether it is less. Says nothing about what
/// lies in them: a page may be swapped out.
fn first_by_use(range: Range, of: usize) -> (Range, bool) {
    let mut part = Range { start: range.start, len: 0 };
    let mut kind = None;
    let mut pages = [0u8; HUGE_PAGE_SIZE / PAGE_SIZE];
    while part.end() < range.end() {
        // One that crosses into another huge page might say that half of each is there, and cut both.
        let end = (part.end() + 1).next_multiple_of(HUGE_PAGE_SIZE).min(range.end());
        let window = Range { start: part.end(), len: end - part.end() };
        let count = window.len / PAGE_SIZE;
        let known = memory::residence(window, &mut pages).is_ok();
        let there = pages[..count].iter().filter(|&&page| page & 1 != 0).count();
        let sparse = known && there * of < count;
        if *kind.get_or_insert(sparse) != sparse {
            break;
        }
        part.len += window.len;
    }
    (part, kind.unwrap_or(false))
}
