//! Retention at work: what the policy decides is done with memory that was freed, on the program's own threads and by the watcher.

use super::churn::{self, Churn};
use super::core::{Core, RegionCrew, Zone, lock};
use super::limits::Limits;
use super::options::Options;
use super::policy::{LowWater, expected_growth, first_peak};
use super::signals::SignalReader;
use crate::crew::look::NextLook;
use crate::crew::{Employer, Operation, Task, Tick};
use crate::stats::MAX_ZONES;
use crate::sys::{clock, memory};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Memory that is retained without a watcher: less than a new thread is worth.
const UNWATCHED: usize = 4 << 20;
/// The longest pause between two looks at the signals while something is retained.
const MOST_PAUSE: Duration = Duration::from_millis(20);
/// The shortest one: near a limit of the machine or the control group, and where little is retained.
const LEAST_PAUSE: Duration = Duration::from_millis(5);
/// How often a program that has no room to retain anything is looked at for room, while it is active.
const CRAMPED_PAUSE: Duration = Duration::from_secs(1);
/// Bytes that a program may touch for the first time in a microsecond: 4 GB/s.
const GROWTH_PER_US: usize = 4_000;
/// A program counts as active for this long after its last call.
const ACTIVE_NS: u64 = 1_000_000_000;
/// While fresh memory is being touched, no more than this is left on its way back.
const ROOM_BACKLOG: usize = 8 << 20;
/// How long a program whose group is full waits for what others are giving back for it: they may get no CPU.
const AWAIT_MOST_NS: u64 = 100_000_000;
const AWAIT_STEP: Duration = Duration::from_micros(20);
/// The backlog of memory on its way back may always be this long.
const BACKLOG_LEAST: usize = 64 << 20;

/// What the watcher remembers.
struct Watch {
    signals: SignalReader,
    low_water: LowWater,
    /// Memory of the program outside the region at the last look.
    outside: Option<usize>,
}

impl Watch {
    fn new(options: &Options, now: u64) -> Watch {
        Watch { signals: SignalReader::new(), low_water: LowWater::new(options.decay, now), outside: None }
    }
}

/// What the signals say.
struct Sample {
    /// How much more is retained than may be.
    excess: usize,
    /// How much may be free and backed, on its way back or not.
    bound: usize,
    /// Whether the machine or the control group is the reason.
    pressure: bool,
}

/// What is known of the program's use of memory, and how much may be retained.
pub(super) struct Retention {
    /// The most that was ever in use.
    peak_in_use: AtomicUsize,
    /// The most that was in use since the last look at the signals.
    recent_in_use: AtomicUsize,
    /// The least that was retained since the watcher's last look.
    least_retained: AtomicUsize,
    churn: Churn,
    /// The most that the program ever had live, as far as seen; 0 until something is freed.
    peak_live: AtomicUsize,
    /// The most that the process ever had resident, as the kernel said when the region was made.
    resident_at_start: AtomicUsize,
    /// How much may be in use and retained together, as last computed: the more is in use, the less is retained. No less than what was in use
    /// since then.
    budget: AtomicUsize,
    last_call_ns: AtomicU64,
    next_look: NextLook,
    /// Whether the watcher found nothing at its last look, and looks once more before it rests.
    found_nothing: AtomicBool,
    pub limits: Limits,
    watch: Mutex<Watch>,
}

impl Retention {
    pub fn new(options: &Options) -> Retention {
        let now = clock::now_ns();
        let retention = Retention {
            peak_in_use: AtomicUsize::new(0),
            recent_in_use: AtomicUsize::new(0),
            least_retained: AtomicUsize::new(0),
            churn: Churn::default(),
            peak_live: AtomicUsize::new(0),
            resident_at_start: AtomicUsize::new(memory::peak_resident()),
            budget: AtomicUsize::new(0),
            last_call_ns: AtomicU64::new(now),
            next_look: NextLook::new(),
            found_nothing: AtomicBool::new(false),
            limits: Limits::new(),
            watch: Mutex::new(Watch::new(options, now)),
        };
        if options.helpers == Some(0) {
            retention.look_once();
        }
        retention
    }

    /// Takes note of how much is retained and in use now.
    pub fn note(&self, retained: usize, in_use: usize) {
        // Each is looked at first: it rarely changes, and then no other CPU loses the line.
        if retained < self.least_retained.load(Ordering::Relaxed) {
            self.least_retained.fetch_min(retained, Ordering::Relaxed);
        }
        for most in [&self.peak_in_use, &self.recent_in_use, &self.budget] {
            if in_use > most.load(Ordering::Relaxed) {
                most.fetch_max(in_use, Ordering::Relaxed);
            }
        }
    }

    /// The most that was ever in use, in bytes.
    pub fn peak_in_use(&self) -> usize {
        self.peak_in_use.load(Ordering::Relaxed)
    }

    /// Looks at the group's limit once, before the program begins: for a region without a watcher, since files are not read on the
    /// program's threads.
    fn look_once(&self) {
        if let Some(signals) = lock(&self.watch).signals.read(0, clock::now_ns()) {
            self.limits.note_room(&signals);
        }
    }

    /// In a forked child: nothing is retained, and nothing is known of it yet.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self, options: &Options) {
        let watch = Watch::new(options, clock::now_ns());
        // SAFETY: the watcher of the parent may have held the lock; here nobody is inside or waiting, by the function's own contract.
        unsafe { std::ptr::write((&raw const self.watch).cast_mut(), Mutex::new(watch)) };
        self.peak_live.store(0, Ordering::Relaxed);
        self.resident_at_start.store(0, Ordering::Relaxed);
        self.budget.store(0, Ordering::Relaxed);
        self.churn.after_fork();
        self.next_look.reset();
        self.found_nothing.store(false, Ordering::Relaxed);
        // Without a watcher, nobody reads it again.
        self.limits.after_fork(options.helpers == Some(0));
    }
}

impl Core {
    /// Takes note that the program is active.
    pub fn note_call(&self) {
        let now = clock::coarse_ns();
        if now != self.retention.last_call_ns.load(Ordering::Relaxed) {
            self.retention.last_call_ns.store(now, Ordering::Relaxed);
        }
    }

    /// How much may be retained. On the program's own threads it only follows what is freed and what comes into use; the watcher corrects it
    /// by what the process and the machine really have. No file is read here: the program's descriptors and its stacks, however small, are its
    /// own.
    fn target(&self) -> usize {
        if self.cramped() {
            return 0;
        }
        let most = self.retention.budget.load(Ordering::Relaxed).min(self.retention.peak_in_use());
        most.saturating_sub(self.in_use()).min(self.options.retain.unwrap_or(self.machine() / 2))
    }

    /// Once the program frees something for the first time, takes note of what it had until then.
    fn note_first_peak(&self) {
        if self.retention.peak_live.load(Ordering::Relaxed) == 0 {
            let in_use = self.retention.peak_in_use();
            let at_start = self.retention.resident_at_start.load(Ordering::Relaxed);
            self.retention
                .peak_live
                .fetch_max(first_peak(at_start, memory::peak_resident(), in_use), Ordering::Relaxed);
        }
    }

    /// After `freed` bytes have come back: what is retained beyond the bound goes back, and the watcher is there where it has to be.
    pub fn settle_retained(&self, crew: &RegionCrew, freed: usize) {
        self.sum_up_own();
        // A program that once had as much as its group's limit leaves room for may have it again before the next look. One that touches little
        // of what it has is judged by what it has resident, when the watcher looks.
        if !self.cramped() && self.limits().fills_group(self.resident_peak()) {
            self.set_cramped(true);
        }
        self.note_first_peak();
        self.limits().note_came_back(freed);
        let target = self.target();
        let retained = self.retained();
        let slack = self.slack();
        if retained > target + slack {
            // Not all of it: what was just freed is what is asked for next.
            self.note_lack_of_room(self.discard_down_to(crew, target + slack / 4 * 3, None));
        }
        self.wake(crew, freed);
    }

    /// The most that was ever in use, as far as such memory has pages.
    fn resident_peak(&self) -> usize {
        self.density.share_of(self.retention.peak_in_use())
    }

    /// How much less is in use than there once was: retained memory may fill that, and the sum stays below the peak.
    fn own_room(&self) -> usize {
        self.retention.peak_in_use().saturating_sub(self.in_use())
    }

    /// See [`churn::most`].
    fn room_for_churn(&self) -> usize {
        churn::most(self.retention.peak_in_use(), self.lanes.used())
    }

    fn note_lack_of_room(&self, bytes: usize) {
        if bytes > 0 {
            self.retention.churn.gave_back(self.density.share_of(bytes));
        }
    }

    /// What may be there beyond the target.
    fn slack(&self) -> usize {
        let slack = if self.options.retain == Some(0) { 0 } else { self.limits().slack(self.retention.peak_in_use()) };
        if slack == 0 { 0 } else { slack + self.retention.churn.extra() }
    }

    pub fn limits(&self) -> &Limits {
        &self.retention.limits
    }

    /// See [`Limits::cramped`].
    pub fn cramped(&self) -> bool {
        self.limits().cramped()
    }

    /// See [`Limits::wants_look`].
    pub fn wants_look(&self) -> bool {
        self.limits().wants_look(|| self.in_use())
    }

    fn set_cramped(&self, cramped: bool) {
        let before = self.limits().set_cramped(cramped);
        if cramped != before {
            self.caches.set_open(self.may_cache() && !cramped);
        }
        if cramped {
            self.drain_caches();
        }
    }

    /// Whether `fresh` bytes more would raise the program's peak, with all that is retained.
    pub fn exceeds_peak(&self, fresh: usize) -> bool {
        let peak = self.retention.peak_in_use();
        self.in_use() + self.retained() + fresh > peak + self.slack()
    }

    /// Whether `fresh` bytes more come so near to that bound that something would have to go back soon.
    pub fn lacks_room_for(&self, fresh: usize) -> bool {
        let peak = self.retention.peak_in_use();
        self.retained() > 0 && self.in_use() + self.retained() + fresh > peak + self.slack() / 2
    }

    /// Finds out whether a limit is near, for a program that retains nothing.
    fn look_at_limits(&self, watch: &mut Watch, now: u64) {
        let read = watch.signals.read(0, now);
        watch.signals.read_anew();
        // A program that has only grown so far may grow up to its group's limit: not a page may be missing then.
        let grows = read.is_some_and(|signals| signals.group.is_some()) && !self.limits().gave_back();
        self.limits().set_near(grows || watch.signals.near_limit());
        if let Some(signals) = read {
            self.limits().note_room(&signals);
            self.set_cramped(signals.cramped(self.retention.peak_live.load(Ordering::Relaxed).max(signals.resident)));
        }
    }

    /// Reads the signals and computes the target, with `backlog` bytes on their way back. `None` if memory was freed or
    /// reused meanwhile, so that what was read does not belong together: the target keeps following what is freed and
    /// reused.
    fn sample(&self, watch: &mut Watch, backlog: usize, now: u64) -> Option<Sample> {
        let free = || (self.retained(), self.discarding());
        let before = free();
        // What is on its way back is free already, as far as the program is concerned.
        let still_there = before.0 + backlog;
        // Without /proc, nothing is known of the program, and nothing is retained.
        let read = watch.signals.read(still_there, now);
        self.limits().set_near(watch.signals.near_limit());
        if let Some(signals) = &read {
            self.limits().note_room(signals);
            // A program that is busy may not be seen at rest for long, and what it had live it may have again.
            if signals.cramped(self.retention.peak_live.load(Ordering::Relaxed)) {
                self.set_cramped(true);
            }
        }
        if free() != before {
            return None;
        }
        let mut growth = 0;
        let target = read.map_or(0, |signals| {
            let used = self.in_use();
            let most_used = self.retention.recent_in_use.swap(used, Ordering::Relaxed);
            let outside = signals.outside(used);
            let before = watch.outside.replace(outside);
            let seen = signals.peak_live(used, most_used, before);
            let peak = self.retention.peak_live.fetch_max(seen, Ordering::Relaxed).max(seen);
            growth = before.map_or(0, |before| expected_growth(before, outside));
            self.set_cramped(signals.cramped(peak.max(self.resident_peak())));
            signals.retain_target(peak, self.options.retain).saturating_sub(growth)
        });
        // Pages of retained memory that were never touched make the program look smaller than it is.
        let target = target.min(self.own_room());
        self.retention.budget.store(self.in_use() + target, Ordering::Relaxed);
        let pressure = read.is_some_and(|signals| signals.pressure());
        // No more of it can be there than the process has resident: of a large table of which little was touched, hardly anything is.
        let resident = read.map_or(usize::MAX, |signals| signals.resident);
        let retained = self.retained().min(still_there).min(resident);
        // A hole cut for a few megabytes keeps a large span from fitting where it was, and costs all of it in page faults.
        let slack = if pressure { 0 } else { self.slack().saturating_sub(growth) };
        let excess = retained.saturating_sub(target);
        Some(Sample { excess: if excess > slack { excess } else { 0 }, bound: target + slack, pressure })
    }

    /// Discards retained memory until no more than `target` is retained, that of `last` behind all other. Returns the bytes.
    pub fn discard_down_to(&self, crew: &RegionCrew, target: usize, last: Option<&Zone>) -> usize {
        let mut sum = self.discard_from_zones(crew, target, last);
        if self.retained() > target && self.cached() > 0 && self.drain_caches() {
            sum += self.discard_from_zones(crew, target, last);
        }
        sum
    }

    /// Takes from the zones with most that is retained; those of the kind of `last` come last.
    fn discard_from_zones(&self, crew: &RegionCrew, target: usize, last: Option<&Zone>) -> usize {
        let mut sum = 0;
        let mut without = [false; MAX_ZONES];
        while self.retained() > target {
            let comes_last = |zone: &Zone| zone.huge == last.is_some_and(|last| last.huge);
            let retained = |zone: &Zone| zone.retained.load(Ordering::Relaxed);
            let candidates =
                self.zones.iter().enumerate().filter(|&(number, zone)| !without[number] && retained(zone) > 0);
            let Some((number, zone)) = candidates.max_by_key(|(_, zone)| (!comes_last(zone), retained(zone))) else {
                break;
            };
            let Some(mut inner) = zone.lock_unless(&self.forking) else { return sum };
            let excess = self.retained().saturating_sub(target);
            let Some((offset, len)) = inner.map.begin_discard(excess, self.limits().short_of_room()) else {
                without[number] = true;
                continue;
            };
            self.publish(zone, &mut inner);
            drop(inner);
            self.discard(crew, zone, offset, len);
            sum += len;
        }
        sum
    }

    /// Makes room for `fresh` bytes of `zone` that are about to be touched for the first time: what is retained and what is on its way back
    /// stays, together with them, below the program's own peak.
    pub fn reserve_headroom(&self, crew: &RegionCrew, zone: &Zone, fresh: usize) {
        self.retention.churn.touches(self.density.share_of(fresh), self.room_for_churn(), clock::coarse_ns);
        let target = self.target();
        let retained = self.retained();
        let slack = self.slack();
        if retained > target + slack {
            // What did not fit here may fit next time; what is in the other zone has not been asked for.
            self.note_lack_of_room(self.discard_down_to(crew, target + slack / 4 * 3, Some(zone)));
        }
        // Touching is slower than giving back, so the caller helps a little rather than wait for a helper that may not run.
        let bound = if self.limits().near() { 0 } else { slack.max(ROOM_BACKLOG) };
        self.bound_backlog(crew, bound);
        if self.cramped() {
            self.await_discards(clock::now_ns());
        }
    }

    /// Waits for what others are giving back at this moment: where every page counts, what the caller is about to touch may be what is too
    /// much. Without Pagecrew, it would have given that back itself, before.
    fn await_discards(&self, begin: u64) {
        while self.discarding() > 0 && clock::now_ns() < begin + AWAIT_MOST_NS {
            std::thread::sleep(AWAIT_STEP);
        }
    }

    /// Helps the crew until no more than `bound` bytes wait for their way back.
    fn bound_backlog(&self, crew: &RegionCrew, bound: usize) {
        if self.discarding() > bound && crew.assist(Operation::Discard, || crew.backlog(Operation::Discard) <= bound) {
            self.counters().backlog_assists.add(1);
        }
    }

    /// Has a range discarded that is marked so: by the crew, with the calling thread's help where the backlog has reached its
    /// bound or nothing is to be retained at all.
    pub fn discard(&self, crew: &RegionCrew, zone: &Zone, offset: usize, len: usize) {
        let task = Task { operation: Operation::Discard, range: zone.at(offset, len), node: zone.node, report: true };
        if self.options.retain == Some(0) || self.cramped() {
            // SAFETY: a range in state `Discarding` is used by nobody until it was reported as finished.
            unsafe { crew.run(task) };
            return;
        }
        // SAFETY: as above.
        unsafe { crew.submit(task) };
        // What is on its way back weighs as much as what is retained, so as much of it may be there at a time.
        let bound = self.target().max(BACKLOG_LEAST);
        self.bound_backlog(crew, bound);
    }

    /// Sees to it that the watcher looks at what is retained, and starts zeroing where zeroes are in demand.
    pub fn wake(&self, crew: &RegionCrew, freed: usize) {
        let zeroes = self.calls_for_zeroing(freed);
        // Room may come back: the limit is raised, others leave the group.
        let worth_watching = self.retained() >= UNWATCHED || self.cramped() || self.wants_look();
        if (zeroes || (worth_watching && self.retention.next_look.rests())) && !crew.watch() {
            self.discard_down_to(crew, UNWATCHED, None);
        }
    }

    /// The watcher's look: at what is zeroed ahead and, when it is time, at what is retained. Says when to look again.
    pub fn look(&self, crew: &RegionCrew) -> Tick {
        let now = clock::now_ns();
        self.zero_ahead(crew, now);
        if let Err(early) = self.retention.next_look.begin(now) {
            return Tick::Wait(Duration::from_nanos(early));
        }
        self.sum_up_all();
        self.look_at_small_pages();
        // Asked before the lock is taken: none is held while the crew is called.
        let backlog = crew.backlog(Operation::Discard);
        let mut watch = lock(&self.retention.watch);
        let retained = self.retained();
        let least = self.retention.least_retained.swap(retained, Ordering::Relaxed).min(retained);
        watch.low_water.note(least, now);
        watch.low_water.note(retained, now);
        self.retention.churn.look(self.room_for_churn(), now);
        if retained + backlog == 0 && !self.cramped() {
            if self.wants_look() {
                self.look_at_limits(&mut watch, now);
            }
            drop(watch);
            return self.pause(crew, now);
        }
        let surplus = watch.low_water.surplus(retained);
        let sample = self.sample(&mut watch, backlog, now);
        drop(watch);
        let mut again = false;
        let excess = sample.as_ref().map_or(0, |sample| sample.excess).max(surplus);
        if excess > 0 {
            let gone = self.discard_down_to(crew, self.retained().saturating_sub(excess), None);
            lock(&self.retention.watch).low_water.discarded(gone);
            let pressure = sample.as_ref().is_some_and(|sample| sample.pressure);
            if !pressure && excess > surplus {
                self.note_lack_of_room(gone);
            }
            if pressure && sample.as_ref().is_some_and(|sample| sample.excess >= surplus) {
                self.counters().pressure_trims.add(1);
            } else {
                self.counters().decayed_bytes.add(gone.min(surplus) as u64);
            }
            again = gone > 0;
        }
        if let Some(sample) = sample {
            // What only lacks need may take its time; what there should not be is taken care of even where helpers get no CPU.
            crew.assist(Operation::Discard, || self.watched(crew) <= sample.bound);
        }
        if again { Tick::Again } else { self.pause(crew, now) }
    }

    /// Looks at how much of the memory with small pages has pages.
    fn look_at_small_pages(&self) {
        let used = self.zones.iter().filter(|zone| !zone.huge).map(|zone| zone.at(0, zone.lock().map.top()));
        self.density.look_at_zones(used.filter(|used| used.len > 0));
    }

    /// Bytes that are free and still there, but for those that a thread of the program is giving back at this moment.
    fn watched(&self, crew: &RegionCrew) -> usize {
        self.retained() + crew.backlog(Operation::Discard)
    }

    /// When the watcher should look next.
    fn pause(&self, crew: &RegionCrew, now: u64) -> Tick {
        let watched = self.watched(crew) > 0;
        let active = now < self.retention.last_call_ns.load(Ordering::Relaxed) + ACTIVE_NS;
        let cramped = active && self.cramped();
        // It rests at the second look in a row that finds nothing: a program that frees a block and asks for it again, over and over, would
        // otherwise call it each time.
        let nothing = !watched && !cramped;
        let rests = nothing && self.retention.found_nothing.load(Ordering::Relaxed);
        self.retention.found_nothing.store(nothing && !rests, Ordering::Relaxed);
        if rests {
            return if self.retention.next_look.rest(|| self.watched(crew) > 0) { Tick::Rest } else { Tick::Again };
        }
        // A program that grows outside the region may use up what retention may exceed its target by before the next look, whether
        // or not it calls here meanwhile. In an idle one, what is retained decays, and the looks with it.
        let lead = Duration::from_micros((self.slack() / GROWTH_PER_US) as u64);
        let pause = if cramped && !watched { CRAMPED_PAUSE } else { lead.clamp(LEAST_PAUSE, MOST_PAUSE) };
        self.retention.next_look.again_at(now + pause.as_nanos() as u64);
        Tick::Wait(pause)
    }
}
