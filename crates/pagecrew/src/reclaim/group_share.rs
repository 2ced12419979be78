//! Which control group is held to what it has, so that a group that reads without end does not take the others' page cache: pure, what was found
//! comes in as numbers.
//!
//! Readers that wait for their own reclaim are slow, which is what protects their neighbours. Where nobody waits any more, they take as much as
//! the disk gives, and the kernel reclaims it from all. So while there is demand, a group that takes more than half of what is taken, and has
//! half of all page cache already, gets no more than it has: what it takes further is reclaimed from itself, ahead of the others' memory. What
//! others take meanwhile is room that it makes for them, down to half of the page cache: they may take back what they have lost before.
//! One that has less than half may grow up to that, also at others' cost: that is its share.
//!
//! A program that begins takes most, too, until it has what it uses again and again. So nobody is held before half as much was reclaimed as there is
//! page cache, since he takes most. Who needs most of the memory is held all the same for a while, and gets a little more all the time as long as
//! others take nothing: what they have may be of no use to them.
//!
//! One that has nearly all page cache takes it from nobody. It is held for its own sake: it need not wait for what is reclaimed
//! ahead. So while the kernel reclaims all the same, it is held to less, until the kernel need not, or to half of what is page cache or free: on
//! scattered memory, the kernel reclaims for its large folios however much is free.
//!
//! What protects a program whose page cache is worth something to it: what comes back after it was reclaimed ends it for half a minute
//! ([`super::group_plan::Pause::Hurts`]), and what it has by then is its share; so does memory that is free.

use std::time::Duration;

/// Of what is taken, a group that is to be held takes more than this share.
const OF_DEMAND: f64 = 0.5;
/// And of all page cache it has at least this share when that begins, and while it goes on.
const OF_FILES: f64 = 0.5;
const OF_FILES_LATER: f64 = 0.25;
/// Where more than this share of the memory is free, nobody needs to be held.
const AMPLE: f64 = 0.1;
/// What others have taken away from it is theirs, if it is more than this share of what it may have.
const LOST: f64 = 1.0 / 16.0;
/// While others take less than this share of what it takes, it gets this share more each second: half as much again in half a minute.
const OTHERS: f64 = 1.0 / 256.0;
const MORE: f64 = 1.0 / 64.0;
/// Who has all page cache but for this share takes it from nobody. As long as the kernel reclaims all the same, it is held to less: each second by
/// this share of the memory, as what the kernel keeps free is a share of the memory.
const NOBODYS: f64 = 1.0 / 16.0;
const LESS: f64 = 1.0 / 32.0;
/// So long it is not the one that takes most, nor is another held, before it may have more again: loads pause.
const PAUSE: Duration = Duration::from_secs(5);
/// While less than this share of the most that was reclaimed lately is, nothing counts as taken: the one who takes most of nearly nothing is nobody to
/// hold. And what is reclaimed of a group is no demand of the machine any more, so it goes on without such demand, until so little is left of
/// the most that the group has taken.
const LITTLE: f64 = 1.0 / 16.0;
/// Lately: a third of it is left after so long.
const LATELY: Duration = Duration::from_secs(10);

/// The machine, as a survey finds it. In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Whether reclaim in the background works for those who take memory.
    pub demand: bool,
    /// All memory.
    pub total: u64,
    /// What is free of it.
    pub free: u64,
    /// All page cache on the kernel's lists.
    pub files: u64,
    /// Since the last survey.
    pub passed: Duration,
    /// And what the kernel has reclaimed since, by itself and for tasks that take memory.
    pub reclaimed: u64,
}

impl Machine {
    /// `bytes` since the last survey, as bytes a second.
    fn rate(&self, bytes: u64) -> f64 {
        bytes as f64 / self.passed.as_secs_f64().max(1e-3)
    }
}

/// The group that takes more than half of what is taken. In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taker<G> {
    /// Which.
    pub group: G,
    /// What is charged to it.
    pub usage: u64,
    /// Its page cache.
    pub files: u64,
    /// What it has taken since the last survey.
    pub taken: u64,
    /// And what others have.
    pub others: u64,
}

/// Whether a group takes more than half of what all take, of whom each has taken so much.
pub fn most(all: u64, taken: impl IntoIterator<Item = u64>) -> Option<usize> {
    let (index, most) = taken.into_iter().enumerate().max_by_key(|&(_, taken)| taken)?;
    (most as f64 > all as f64 * OF_DEMAND).then_some(index)
}

/// A group that is held.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Held<G> {
    /// Which.
    pub group: G,
    /// What it may have: page cache, and all else that it has.
    pub share: u64,
    /// Its page cache.
    files: u64,
    /// The most that it has taken, in bytes a second.
    most: f64,
    /// Since it was the one that takes most.
    absent: Duration,
}

/// The group that takes most at present.
#[derive(Debug, Clone)]
struct Run<G> {
    group: G,
    /// What was reclaimed since that began, for it and others.
    reclaimed: u64,
    /// Since it last was.
    absent: Duration,
}

/// The one group that is held, if there is one.
#[derive(Debug, Clone)]
pub struct Share<G> {
    held: Option<Held<G>>,
    run: Option<Run<G>>,
    /// The most that was reclaimed lately, in bytes a second.
    most: f64,
}

impl<G> Default for Share<G> {
    /// Nobody is held.
    fn default() -> Share<G> {
        Share { held: None, run: None, most: 0.0 }
    }
}

impl<G: Clone + Eq> Share<G> {
    /// Whether somebody is held.
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Takes note of a survey, and of whether the group that is held is `left_alone` for a while, and has what it can get. Says who is held from
    /// now on, if anybody.
    pub fn note(&mut self, machine: Machine, taker: Option<Taker<G>>, left_alone: bool) -> Option<&Held<G>> {
        if machine.free as f64 > machine.total as f64 * AMPLE {
            self.held = None;
            return None;
        }
        let passed = machine.passed;
        let all = machine.rate(machine.reclaimed);
        let lately = self.most * (-passed.as_secs_f64() / LATELY.as_secs_f64()).exp();
        self.most = all.max(lately);
        let much = all > 0.0 && all >= self.most * LITTLE;
        self.note_run(machine, taker.as_ref().filter(|_| much));
        let has = |taker: &Taker<G>, share: f64| taker.files as f64 >= machine.files as f64 * share;
        let begins = |taker: &Taker<G>| machine.demand && has(taker, OF_FILES) && self.half_was_taken(machine, taker);
        let begins = much && taker.as_ref().is_some_and(begins);
        let little = |held: &Held<G>, taker: &Taker<G>| machine.rate(taker.taken) < held.most * LITTLE;
        self.held = match (self.held.take(), taker) {
            (Some(held), Some(taker)) if held.group == taker.group && !little(&held, &taker) => {
                has(&taker, OF_FILES_LATER).then(|| held.goes_on(machine, &taker, left_alone))
            }
            (_, Some(taker)) if begins => Some(Held {
                share: taker.usage,
                files: taker.files,
                most: machine.rate(taker.taken),
                absent: Duration::ZERO,
                group: taker.group,
            }),
            (Some(held), _) if held.absent + passed < PAUSE => Some(Held { absent: held.absent + passed, ..held }),
            _ => None,
        };
        self.held.as_ref()
    }

    fn note_run(&mut self, machine: Machine, taker: Option<&Taker<G>>) {
        self.run = match (self.run.take(), taker) {
            (Some(run), Some(taker)) if run.group == taker.group => {
                Some(Run { reclaimed: run.reclaimed.saturating_add(machine.reclaimed), absent: Duration::ZERO, ..run })
            }
            (_, Some(taker)) => {
                Some(Run { group: taker.group.clone(), reclaimed: machine.reclaimed, absent: Duration::ZERO })
            }
            (Some(run), None) if run.absent + machine.passed < PAUSE => {
                Some(Run { absent: run.absent + machine.passed, ..run })
            }
            _ => None,
        };
    }

    /// Whether half as much has been reclaimed as there is page cache, since the group takes most.
    fn half_was_taken(&self, machine: Machine, taker: &Taker<G>) -> bool {
        self.run.as_ref().is_some_and(|run| run.group == taker.group && run.reclaimed > machine.files / 2)
    }
}

impl<G> Held<G> {
    fn goes_on(self, machine: Machine, taker: &Taker<G>, left_alone: bool) -> Held<G> {
        let lost = (taker.files as f64) < self.files as f64 * (1.0 - LOST);
        let gained = left_alone && taker.files > self.files;
        let files = if lost || gained { taker.files } else { self.files };
        let alone = (taker.others as f64) < taker.taken as f64 * OTHERS;
        let more = if alone { (files as f64 * MORE * machine.passed.as_secs_f64()) as u64 } else { 0 };
        let half = (machine.files as f64 * OF_FILES) as u64;
        let has_all = taker.files as f64 > machine.files as f64 * (1.0 - NOBODYS);
        let less = if has_all { (machine.total as f64 * LESS * machine.passed.as_secs_f64()) as u64 } else { 0 };
        // What it loses becomes free: of both together, half stays its own, however long the kernel goes on.
        let least = (machine.files.saturating_add(machine.free) as f64 * OF_FILES) as u64;
        let less = less.min(machine.reclaimed).min(files.saturating_sub(least));
        let files = files.saturating_add(more).saturating_sub(taker.others).saturating_sub(less).max(half);
        let share = files.saturating_add(taker.usage.saturating_sub(taker.files));
        Held { share, files, most: self.most.max(machine.rate(taker.taken)), absent: Duration::ZERO, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    /// From one survey to the next.
    const STEP: Duration = Duration::from_millis(250);

    /// A group on a machine that is full of page cache.
    #[derive(Debug, Clone, Default)]
    struct Group {
        /// Page cache that was used once, and that is used again and again.
        once: u64,
        often: u64,
        /// What it has of its working set at most.
        set: u64,
        taken: u64,
        lost: u64,
    }

    impl Group {
        fn files(&self) -> u64 {
            self.once + self.often
        }

        /// Loses `bytes`: what was used once goes first, as far as that is more than half of all it has; so do the kernel's lists.
        fn lose(&mut self, bytes: u64) {
            let once = bytes.min(self.once);
            self.once -= once;
            let often = (bytes - once).min(self.often);
            self.often -= often;
            self.lost += often;
        }
    }

    /// A machine, whose kernel reclaims from all groups in proportion to what they have.
    struct World {
        memory: u64,
        groups: Vec<Group>,
        share: Share<usize>,
        before: Vec<u64>,
        /// What the kernel has reclaimed since the last survey.
        reclaimed: u64,
        /// Without it nobody is held.
        holds: bool,
        held: Vec<Option<usize>>,
    }

    impl World {
        fn new(memory: u64, groups: usize) -> World {
            World {
                memory,
                groups: vec![Group::default(); groups],
                share: Share::default(),
                before: vec![0; groups],
                reclaimed: 0,
                holds: true,
                held: Vec::new(),
            }
        }

        fn free(&self) -> u64 {
            self.memory - self.groups.iter().map(Group::files).sum::<u64>()
        }

        /// A quarter of a second, in which group `number` reads `once` bytes that it does not use again, and what it lacks of its working set.
        fn step(&mut self, once: &[u64]) {
            let held = self.survey();
            // In small portions, as all of them read at once.
            for _ in 0..50 {
                for (number, &read) in once.iter().enumerate() {
                    let group = &mut self.groups[number];
                    let back = (group.set - group.often).min(GIB / 8 / 50);
                    let wanted = read / 50 + back;
                    group.taken += wanted;
                    if let Some(Held { share, .. }) = held.as_ref().filter(|held| held.group == number) {
                        let over = (group.files() + wanted).saturating_sub(*share);
                        group.lose(over);
                    }
                    let short = (wanted + self.memory / 100).saturating_sub(self.free());
                    if short > 0 {
                        self.reclaimed += short;
                        let all: u64 = self.groups.iter().map(Group::files).sum();
                        for group in &mut self.groups {
                            group.lose((short as f64 * group.files() as f64 / all.max(1) as f64).ceil() as u64);
                        }
                    }
                    let group = &mut self.groups[number];
                    group.once += wanted - back;
                    group.often += back;
                }
            }
        }

        fn survey(&mut self) -> Option<Held<usize>> {
            let taken: Vec<u64> = self.groups.iter().map(|group| group.taken).collect();
            let since: Vec<u64> = taken.iter().zip(&self.before).map(|(now, before)| now - before).collect();
            self.before = taken;
            let taker = most(since.iter().sum(), since.iter().copied()).map(|group| Taker {
                group,
                usage: self.groups[group].files(),
                files: self.groups[group].files(),
                taken: since[group],
                others: since.iter().sum::<u64>() - since[group],
            });
            let files = self.groups.iter().map(Group::files).sum();
            // What is reclaimed of a held group is no demand of the machine's.
            let machine = Machine {
                demand: !self.share.holds(),
                total: self.memory,
                free: self.free(),
                files,
                passed: STEP,
                reclaimed: std::mem::take(&mut self.reclaimed),
            };
            let held = self.share.note(machine, taker, false).copied().filter(|_| self.holds);
            self.held.push(held.map(|held| held.group));
            held
        }
    }

    #[test]
    fn a_hog_takes_less_of_its_neighbours_working_set() {
        let mut lost = Vec::new();
        for holds in [false, true] {
            let mut world = World { holds, ..World::new(8 * GIB, 2) };
            world.groups[1].set = 3 * GIB;
            (0..80).for_each(|_| world.step(&[0, 0]));
            assert_eq!(world.groups[1].often, 3 * GIB);
            (0..400).for_each(|_| world.step(&[GIB, 0]));
            lost.push(world.groups[1].lost);
            // The hog is not held below half of the page cache.
            assert!(world.groups[0].files() >= 3 * GIB, "{}", world.groups[0].files() / MIB);
        }
        assert!(lost[1] * 5 < lost[0], "{lost:?}");
    }

    #[test]
    fn a_program_that_begins_gets_its_share() {
        // Old page cache of a group that does nothing any more; then a program fills its own, of half the memory.
        let mut world = World::new(8 * GIB, 2);
        (0..60).for_each(|_| world.step(&[GIB, 0]));
        world.groups[1].set = 7 * GIB / 2;
        (0..600).for_each(|_| world.step(&[0, 0]));
        assert!(world.groups[1].often > 3 * GIB, "{}", world.groups[1].often / MIB);
        assert!(world.held.iter().rev().take(300).all(Option::is_none));
    }

    #[test]
    fn a_program_that_needs_most_of_the_memory_gets_it_within_a_minute() {
        let mut world = World::new(8 * GIB, 2);
        (0..60).for_each(|_| world.step(&[GIB, 0]));
        world.groups[1].set = 6 * GIB;
        (0..4 * 60).for_each(|_| world.step(&[0, 0]));
        assert!(world.groups[1].often > 11 * GIB / 2, "{}", world.groups[1].often / MIB);
    }

    #[test]
    fn whoever_begins_to_take_most_is_held_at_once_instead_of_the_one_before() {
        let mut world = World::new(8 * GIB, 2);
        (0..60).for_each(|_| world.step(&[GIB, 0]));
        assert_eq!(world.held.last(), Some(&Some(0)));
        let before = world.held.len();
        (0..60).for_each(|_| world.step(&[0, GIB]));
        // It has to take all page cache once, and to have half of it.
        let after = world.held[before..].iter().position(|held| *held == Some(1));
        assert!(after.is_some_and(|surveys| surveys < 40), "{after:?}");
    }

    #[test]
    fn a_program_gets_back_what_a_hog_has_taken_from_it() {
        let mut world = World::new(8 * GIB, 2);
        world.groups[0].set = 6 * GIB;
        (0..80).for_each(|_| world.step(&[0, 0]));
        (0..200).for_each(|_| world.step(&[0, GIB]));
        let before = world.groups[0].often;
        assert!(before < 5 * GIB, "{}", before / MIB);
        // The hog has ended, and its page cache is of no use any more.
        (0..4 * 180).for_each(|_| world.step(&[0, 0]));
        assert!(world.groups[0].often > 11 * GIB / 2, "{} of {}", world.groups[0].often / MIB, before / MIB);
    }

    #[test]
    fn of_many_that_take_as_much_none_is_held() {
        let mut world = World::new(8 * GIB, 5);
        (0..400).for_each(|_| world.step(&[GIB / 4; 5]));
        assert!(world.held.iter().all(Option::is_none));
    }

    fn machine(free: u64) -> Machine {
        Machine { demand: true, total: 24 * GIB, free, files: 8 * GIB, passed: STEP, reclaimed: GIB }
    }

    fn taker(group: u8, usage: u64) -> Option<Taker<u8>> {
        Some(Taker { group, usage, files: usage, taken: GIB, others: 0 })
    }

    /// Somebody who is held by now.
    fn holding(taker: Option<Taker<u8>>) -> Share<u8> {
        let mut law = Share::default();
        for survey in 0..5 {
            let held = share(law.note(machine(GIB), taker, false));
            assert_eq!(held.is_some(), survey == 4, "not before more was reclaimed than half of what there is");
        }
        law
    }

    /// Who is held, and to how many whole GiB, since it moves a little.
    fn share(held: Option<&Held<u8>>) -> Option<(u8, u64)> {
        held.map(|held| (held.group, (held.share + GIB / 2) / GIB))
    }

    #[test]
    fn what_was_freed_elsewhere_ends_it() {
        let mut law = holding(taker(1, 5 * GIB));
        assert_eq!(share(law.note(machine(3 * GIB), taker(1, 5 * GIB), false)), None);
        // What it has then is what it may have.
        assert_eq!(share(law.note(machine(GIB), taker(1, 6 * GIB), false)), Some((1, 6)));
    }

    #[test]
    fn a_pause_of_a_second_ends_nothing_and_what_others_have_got_is_theirs() {
        let mut law = holding(taker(1, 5 * GIB));
        for _ in 1..20 {
            assert_eq!(share(law.note(machine(GIB), None, false)), Some((1, 5)));
        }
        assert_eq!(share(law.note(machine(GIB), taker(1, 4 * GIB), false)), Some((1, 4)));
        for _ in 1..20 {
            law.note(machine(GIB), None, false);
        }
        assert_eq!(share(law.note(machine(GIB), None, false)), None, "it takes nothing any more");
    }

    #[test]
    fn somebody_else_who_takes_most_is_held_instead_as_soon_as_half_of_what_there_is_was_taken() {
        let mut law = holding(taker(1, 5 * GIB));
        let fast = Machine { reclaimed: 2 * GIB, ..machine(GIB) };
        for _ in 0..2 {
            assert_eq!(share(law.note(fast, taker(2, 7 * GIB), false)), Some((1, 5)));
        }
        assert_eq!(share(law.note(fast, taker(2, 7 * GIB), false)), Some((2, 7)));
        assert_eq!(share(law.note(machine(GIB), taker(2, GIB), false)), None, "it has little left");
    }

    #[test]
    fn the_one_that_takes_most_of_next_to_nothing_is_not_held() {
        let mut law = holding(taker(1, 5 * GIB));
        let quiet = Machine { reclaimed: GIB / 20, ..machine(GIB) };
        for _ in 1..20 {
            assert_eq!(share(law.note(quiet, taker(2, 5 * GIB), false)), Some((1, 5)), "it may only pause");
        }
        for _ in 0..20 {
            assert_eq!(share(law.note(quiet, taker(2, 5 * GIB), false)), None);
        }
        // Much is what is much by now: that it was more once is forgotten.
        for _ in 0..400 {
            law.note(quiet, taker(2, 5 * GIB), false);
        }
        assert_eq!(share(law.note(quiet, taker(2, 5 * GIB), false)), Some((2, 5)));
    }

    #[test]
    fn without_demand_of_the_machine_it_goes_on_as_long_as_much_is_taken() {
        let rest = Machine { demand: false, ..machine(GIB) };
        let mut law = Share::default();
        for _ in 0..20 {
            assert_eq!(share(law.note(rest, taker(1, 5 * GIB), false)), None, "nobody needs it");
        }
        law.note(machine(GIB), taker(1, 5 * GIB), false);
        let takes = |taken| taker(1, 5 * GIB).map(|taker| Taker { taken, ..taker });
        for _ in 0..50 {
            assert_eq!(share(law.note(rest, takes(GIB / 8), false)), Some((1, 5)));
        }
        for _ in 1..20 {
            assert!(law.note(rest, takes(GIB / 32), false).is_some());
        }
        assert_eq!(share(law.note(rest, takes(GIB / 32), false)), None);
    }

    #[test]
    fn what_is_no_page_cache_may_grow() {
        let mut law = holding(taker(1, 5 * GIB));
        let grown = taker(1, 5 * GIB).map(|taker| Taker { usage: 9 * GIB, others: GIB, ..taker });
        assert_eq!(share(law.note(machine(GIB), grown, false)), Some((1, 8)));
    }

    #[test]
    fn what_others_have_is_theirs_but_for_half() {
        let mut law = holding(taker(1, 6 * GIB));
        for others in [GIB, 9 * GIB] {
            let taker = taker(1, 6 * GIB).map(|taker| Taker { others, ..taker });
            law.note(machine(GIB), taker, false);
        }
        assert_eq!(share(law.held.as_ref()), Some((1, 4)));
    }

    #[test]
    fn what_it_has_got_while_it_was_left_alone_is_its_share() {
        let mut law = holding(taker(1, 5 * GIB));
        assert_eq!(share(law.note(machine(GIB), taker(1, 7 * GIB), false)), Some((1, 5)));
        assert_eq!(share(law.note(machine(GIB), taker(1, 7 * GIB), true)), Some((1, 7)));
    }

    #[test]
    fn while_others_take_nothing_it_gets_more() {
        // Whatever the pace of the surveys is.
        for pace in [1, 5] {
            let mut law = holding(taker(1, 5 * GIB));
            for _ in 0..4 * 30 / pace {
                let files = law.held.as_ref().map_or(0, |held| held.files);
                let reclaimed = GIB * u64::from(pace);
                let machine = Machine { passed: STEP * pace, reclaimed, files: 10 * GIB, ..machine(GIB) };
                let taker = taker(1, files).map(|taker| Taker { taken: GIB * u64::from(pace), ..taker });
                law.note(machine, taker, false);
            }
            assert_eq!(share(law.held.as_ref()), Some((1, 8)));
        }
    }

    #[test]
    fn one_that_has_nearly_all_is_held_to_so_much_that_the_kernel_need_not_reclaim() {
        let mut law = holding(taker(1, 8 * GIB));
        let held = |law: &Share<u8>| law.held.as_ref().map_or(0, |held| held.files);
        for survey in 0..60 {
            let files = held(&law);
            let reclaimed = if files > 7 * GIB { GIB } else { 0 };
            law.note(Machine { reclaimed, files, ..machine(GIB) }, taker(1, files), false);
            assert!(survey < 10 || (13 * GIB / 2..=15 * GIB / 2).contains(&held(&law)), "{}", held(&law) / MIB);
        }
    }

    #[test]
    fn one_that_has_nearly_all_keeps_half_where_the_kernel_never_ends() {
        // Of what is page cache at first, and becomes free.
        let mut law = holding(taker(1, 8 * GIB));
        for _ in 0..60 {
            let files = law.held.as_ref().map_or(0, |held| held.files);
            let machine = Machine { total: 100 * GIB, free: 8 * GIB - files, files, reclaimed: GIB, ..machine(GIB) };
            law.note(machine, taker(1, files), false);
        }
        assert_eq!(share(law.held.as_ref()), Some((1, 4)));
    }

    #[test]
    fn most_is_more_than_half() {
        assert_eq!(most(100, [10, 51, 39]), Some(1));
        assert_eq!(most(100, [50, 50]), None);
        assert_eq!(most(0, [0, 0]), None);
        assert_eq!(most(0, []), None);
    }

    proptest! {
        #[test]
        fn nobody_is_held_to_less_than_half_and_to_less_than_he_has_only_for_others_or_what_the_kernel_reclaims(
            surveys in proptest::collection::vec((0u64..24, 0u64..24, proptest::option::of((0u8..3, 0u64..24, 0u64..24, 0u64..24))), 1..100),
        ) {
            let mut law = Share::default();
            for (free, files, taker) in surveys {
                let machine = Machine {
                    demand: true,
                    total: 24 * GIB,
                    free: free * GIB,
                    files: files * GIB,
                    passed: STEP,
                    reclaimed: 48 * GIB,
                };
                let taker = taker.map(|(group, rest, files, others)| Taker {
                    group,
                    usage: (rest + files) * GIB,
                    files: files * GIB,
                    taken: GIB,
                    others: others * GIB,
                });
                let before = law.held;
                let held = law.note(machine, taker, false).copied();
                if let Some(held) = held {
                    match taker.filter(|taker| taker.group == held.group) {
                        Some(taker) if before.is_some_and(|before| before.group == held.group) => {
                            let before = before.map_or(0, |before| before.files);
                            let nearly_all = taker.files > machine.files / 16 * 15;
                            let less = if nearly_all { machine.total / 128 + 1 } else { 0 };
                            prop_assert!(held.files + less + taker.others >= before.min(taker.files));
                            let least = (machine.files + machine.free) / 2;
                            prop_assert!(held.files + taker.others >= before.min(taker.files).min(least));
                            prop_assert!(held.files >= machine.files / 2);
                            let most = before.max(taker.files).max(machine.files / 2);
                            prop_assert!(held.files <= most + most / 256 + 1);
                            prop_assert_eq!(held.share - held.files, taker.usage - taker.files);
                        }
                        Some(taker) => prop_assert_eq!(held.share, taker.usage),
                        None => prop_assert_eq!(before.map(|before| (before.group, before.share)), Some((held.group, held.share))),
                    }
                    prop_assert!(free * 10 <= 24);
                }
            }
        }
    }
}
