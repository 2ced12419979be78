//! Tests against made-up processes and kernels, with a clock that stands still but for what things cost.

use super::credit::READ_OF_USED;
use super::fleet::{Fleet, Id, Turn};
use super::options::{Exclusion, Options};
use super::sample::SUBPAGES;
use super::target::{Mapping, MappingKind, Target};
use super::trimmer::{Clock, Step, Trimmer};
use crate::sys::memory::Range;
use crate::sys::pagemap::{Category, HugeKind};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const START: usize = 0x7f00_0000_0000;
const SECOND: u64 = 1_000_000_000;

/// What things cost, in nanoseconds, about as measured.
const SCAN: u64 = 60_000;
const SCAN_PAGE: u64 = 300;
const READ_PIECE: u64 = 450;
const READ_PER_KIB: u64 = 60;
const SPLIT: u64 = 480_000;
const VERIFY: u64 = 8_000;

#[derive(Default)]
struct FakeClock {
    now_ns: Cell<u64>,
    cpu_ns: Cell<u64>,
}

impl FakeClock {
    fn work(&self, ns: u64) {
        self.cpu_ns.set(self.cpu_ns.get() + ns);
        self.now_ns.set(self.now_ns.get() + ns);
    }

    fn pass(&self, time: Duration) {
        self.now_ns.set(self.now_ns.get() + time.as_nanos() as u64);
    }
}

impl Clock for FakeClock {
    fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    fn cpu_ns(&self) -> u64 {
        self.cpu_ns.get()
    }
}

/// What the kernel does with a page besides splitting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Ordinary,
    Shared,
    Locked,
    /// Something holds a reference.
    Pinned,
    /// Gone when it is read.
    Vanishing,
    /// Gone when it is split.
    Unmapped,
    /// Huge again after this many seconds.
    Returning(u16),
}

#[derive(Debug, Clone, Copy)]
struct Page {
    /// Zero subpages, which are spread all over it.
    zero: u16,
    salt: u16,
    /// Whether what isn't zero has one byte that isn't, somewhere, and not all.
    one_byte: bool,
    manner: Manner,
    /// When it was last split, in seconds; huge if it never was.
    split_at: Option<u32>,
    splits: u16,
}

impl Page {
    fn new(zero: usize) -> Page {
        Page { zero: zero as u16, salt: 77, one_byte: false, manner: Manner::Ordinary, split_at: None, splits: 0 }
    }

    fn is_zero(&self, subpage: usize) -> bool {
        // A permutation, since the factor is odd.
        (subpage * 301 + usize::from(self.salt)) % SUBPAGES < usize::from(self.zero)
    }

    fn is_huge(&self, now_ns: u64) -> bool {
        match (self.split_at, self.manner) {
            (None, _) => true,
            (Some(at), Manner::Returning(after)) => now_ns / SECOND >= u64::from(at) + u64::from(after),
            (Some(_), _) => false,
        }
    }
}

struct Process {
    pages: RefCell<Vec<Page>>,
    kind: MappingKind,
    name: &'static str,
    /// What a search costs before it comes to the pages.
    search_ns: u64,
    /// Before 6.12, a split maps nothing to the zero page.
    old_kernel: bool,
    /// What the next calls fail with, from this many calls on.
    fails: Cell<Option<(u32, i32)>>,
    alive: Cell<bool>,
    splits: Cell<u32>,
    clock: Rc<FakeClock>,
}

impl Process {
    fn new(pages: Vec<Page>, clock: &Rc<FakeClock>) -> Process {
        Process {
            pages: RefCell::new(pages),
            kind: MappingKind::Anonymous,
            name: "",
            search_ns: SCAN,
            old_kernel: false,
            fails: Cell::new(None),
            alive: Cell::new(true),
            splits: Cell::new(0),
            clock: clock.clone(),
        }
    }

    fn call(&self) -> Result<(), Errno> {
        match self.fails.get() {
            Some((0, error)) => {
                self.alive.set(!matches!(error, libc::ESRCH));
                Err(Errno(error))
            }
            Some((calls, error)) => {
                self.fails.set(Some((calls - 1, error)));
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn page(&self, address: usize) -> Page {
        self.pages.borrow()[(address - START) / HUGE_PAGE_SIZE]
    }
}

impl Target for Process {
    fn mappings(&self) -> Result<Vec<Mapping>, Errno> {
        self.clock.work(self.search_ns);
        self.call()?;
        let len = self.pages.borrow().len() * HUGE_PAGE_SIZE;
        Ok(vec![Mapping { range: Range { start: START, len }, name: self.name.to_owned(), kind: self.kind }])
    }

    fn huge_pages(&self, range: Range, each: &mut dyn FnMut(Range, HugeKind)) -> Result<(), Errno> {
        for page in (range.start..range.end()).step_by(HUGE_PAGE_SIZE) {
            self.clock.work(SCAN_PAGE);
            if self.page(page).is_huge(self.clock.now_ns()) {
                each(Range { start: page, len: HUGE_PAGE_SIZE }, HugeKind::Anonymous);
            }
        }
        Ok(())
    }

    fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno> {
        self.call()?;
        Ok(Some(self.page(address).manner != Manner::Shared))
    }

    fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
        self.call()?;
        let mut done = 0;
        for piece in pieces {
            self.clock.work(READ_PIECE + READ_PER_KIB * piece.len as u64 / 1024);
            let page = self.page(piece.start);
            if page.manner == Manner::Vanishing {
                return if done == 0 { Err(Errno(libc::EFAULT)) } else { Ok(done) };
            }
            let (at, subpage) = (piece.start % PAGE_SIZE, piece.start % HUGE_PAGE_SIZE / PAGE_SIZE);
            let room = &mut room[done..done + piece.len];
            let fill = !page.is_zero(subpage) && !page.one_byte;
            room.fill(fill.into());
            let byte = subpage * 67 % PAGE_SIZE;
            if !page.is_zero(subpage) && (at..at + piece.len).contains(&byte) {
                room[byte - at] = 1;
            }
            done += piece.len;
        }
        Ok(done)
    }

    fn split(&self, part: Range) -> Result<(), Errno> {
        self.call()?;
        let now = self.clock.now_ns();
        let page = &mut self.pages.borrow_mut()[(part.start - START) / HUGE_PAGE_SIZE];
        match page.manner {
            Manner::Locked => return Err(Errno(libc::EINVAL)),
            Manner::Pinned => return Ok(()),
            _ => {}
        }
        self.clock.work(SPLIT);
        self.splits.set(self.splits.get() + 1);
        page.split_at = Some((now / SECOND) as u32);
        page.splits += 1;
        Ok(())
    }

    fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno> {
        self.clock.work(VERIFY);
        self.call()?;
        let page = self.page(range.start);
        Ok(match category {
            Category::Present if page.manner == Manner::Unmapped => 0,
            Category::Present => HUGE_PAGE_SIZE,
            Category::Huge if page.manner == Manner::Unmapped => 0,
            Category::Zero if page.manner == Manner::Unmapped => 0,
            Category::Huge if page.split_at.is_none() => HUGE_PAGE_SIZE,
            Category::Zero if page.split_at.is_some() && !self.old_kernel => usize::from(page.zero) * PAGE_SIZE,
            Category::Huge | Category::Zero => 0,
        })
    }

    fn alive(&self) -> bool {
        self.alive.get()
    }
}

/// One pass over `process`.
fn pass(process: Process, options: Options) -> Trimmer<Process> {
    let clock = process.clock.clone();
    let mut trimmer = Trimmer::new(process, options, 1);
    trimmer.scan(&*clock).unwrap();
    while trimmer.step(&*clock) == Ok(Step::Looked) {}
    trimmer
}

fn pages(counts: &[(usize, usize)]) -> Vec<Page> {
    counts.iter().flat_map(|&(count, zero)| vec![Page::new(zero); count]).collect()
}

#[test]
fn the_zero_part_of_under_used_pages_goes_and_nothing_else_is_touched() {
    let process = Process::new(pages(&[(10, 472), (10, 0), (5, 200), (1, 512)]), &Rc::default());
    let trimmer = pass(process, Options::default());
    let tally = trimmer.tally();
    assert_eq!((tally.huge_pages, tally.looked_at, tally.under_used, tally.used, tally.split), (26, 26, 11, 15, 11));
    assert_eq!(tally.gone_bytes, ((10 * 472 + 512) * PAGE_SIZE) as u64);
    let error = (tally.could_go_bytes as f64 / tally.gone_bytes as f64 - 1.0).abs();
    assert!(error < 0.1, "{tally:?}");
    let split = |page: &Page| page.split_at.is_some();
    assert!(trimmer.target().pages.borrow().iter().all(|page| split(page) == (page.zero > 409)));
}

#[test]
fn the_threshold_is_where_it_was_set() {
    for max_zero in [100, 409, 500] {
        let options = Options { max_zero, ..Options::default() };
        let process = Process::new(pages(&[(300, max_zero), (300, max_zero + 1)]), &Rc::default());
        let tally = *pass(process, options).tally();
        // Whether a page so near the threshold is split is decided by nearly all of it.
        assert!((290..=310).contains(&tally.under_used), "{max_zero}: {tally:?}");
    }
}

#[test]
fn a_dry_run_splits_nothing() {
    let process = Process::new(pages(&[(20, 472)]), &Rc::default());
    let trimmer = pass(process, Options { dry_run: true, ..Options::default() });
    let tally = trimmer.tally();
    assert_eq!((tally.under_used, tally.split, tally.gone_bytes), (20, 0, 0));
    assert!(tally.could_go_bytes > 20 * 400 * PAGE_SIZE as u64);
    assert_eq!(trimmer.target().splits.get(), 0);
}

#[test]
fn a_kernel_that_gives_nothing_back_is_left_alone_after_a_few_pages() {
    let process = Process { old_kernel: true, ..Process::new(pages(&[(50, 500)]), &Rc::default()) };
    let trimmer = pass(process, Options::default());
    assert!(trimmer.fruitless() && trimmer.target().splits.get() == 4 && trimmer.tally().gone_bytes == 0);
    assert_eq!(trimmer.tally().under_used, 50);
}

#[test]
fn what_can_not_be_split_is_counted_by_its_reason() {
    let of = |manner: Manner| {
        let mut pages = pages(&[(3, 500)]);
        pages.iter_mut().for_each(|page| page.manner = manner);
        *pass(Process::new(pages, &Rc::default()), Options::default()).tally()
    };
    assert_eq!(of(Manner::Shared).left.shared, 3);
    assert_eq!(of(Manner::Shared).read_bytes, 0);
    assert_eq!(of(Manner::Locked).left.locked, 3);
    assert_eq!(of(Manner::Pinned).left.busy, 3);
    assert_eq!(of(Manner::Vanishing).left.vanished, 3);
    assert_eq!((of(Manner::Unmapped).left.vanished, of(Manner::Unmapped).split), (3, 0));
    let kind = |kind: MappingKind| {
        let process = Process { kind, ..Process::new(pages(&[(3, 500)]), &Rc::default()) };
        let tally = *pass(process, Options::default()).tally();
        assert_eq!((tally.looked_at, tally.read_bytes), (0, 0));
        tally.left
    };
    assert_eq!(kind(MappingKind::File).file, 3);
    assert_eq!(kind(MappingKind::Special).special, 3);
    assert_eq!(kind(MappingKind::Unreadable).unreadable, 3);
}

#[test]
fn what_is_excluded_is_neither_read_nor_split() {
    let half = Range { start: START + 2 * HUGE_PAGE_SIZE + PAGE_SIZE, len: PAGE_SIZE };
    let options = Options { exclude: vec![Exclusion::Range(half)], ..Options::default() };
    let tally = *pass(Process::new(pages(&[(4, 500)]), &Rc::default()), options.clone()).tally();
    assert_eq!((tally.left.excluded, tally.split), (1, 3));
    let named = Process { name: "[anon:table]", ..Process::new(pages(&[(4, 500)]), &Rc::default()) };
    let options = Options { exclude: vec![Exclusion::Mapping("anon:table".into())], ..Options::default() };
    assert_eq!(pass(named, options).tally().left.excluded, 4);
    // By the process itself, between two scans.
    let clock = Rc::default();
    let mut trimmer = Trimmer::new(Process::new(pages(&[(4, 500)]), &clock), Options::default(), 1);
    trimmer.exclude(vec![Exclusion::Range(Range { start: START, len: 4 * HUGE_PAGE_SIZE })]);
    assert_eq!(trimmer.scan(&*clock), Ok(0));
}

#[test]
fn a_process_may_end_run_another_program_or_take_its_rights_away_at_any_call() {
    for error in [libc::ESRCH, libc::EIO, libc::EPERM, libc::EFAULT, libc::ENOMEM, libc::EINVAL, libc::EAGAIN] {
        for calls in 0..60 {
            let process = Process::new(pages(&[(3, 500), (3, 0)]), &Rc::default());
            process.fails.set(Some((calls, error)));
            let clock = process.clock.clone();
            let mut fleet = Fleet::new(Options { cpu: None, ..Options::default() }, &*clock);
            fleet.admit(Id { pid: 1, start_ticks: 1 }, process, 0);
            let mut turns = 0;
            while fleet.turn(&*clock) == Turn::Worked {
                turns += 1;
                assert!(turns < 100, "{error} after {calls}");
            }
            let (_, member) = fleet.members().next().unwrap();
            let tally = member.trimmer().tally();
            assert!(tally.looked_at == tally.used + tally.under_used && tally.split <= tally.under_used);
            if error == libc::ESRCH && !member.trimmer().target().alive() {
                assert!(member.ended() && member.error().is_none());
            }
        }
    }
}

#[test]
fn what_goes_wrong_for_reasons_of_the_machine_is_tried_again() {
    for error in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
        let process = Process::new(pages(&[(3, 500)]), &Rc::default());
        process.fails.set(Some((0, error)));
        let clock = process.clock.clone();
        let mut fleet = Fleet::new(Options { cpu: None, ..Options::default() }, &*clock);
        fleet.admit(Id { pid: 1, start_ticks: 1 }, process, 0);
        assert_eq!(fleet.turn(&*clock), Turn::Worked);
        let Turn::Idle(wait) = fleet.turn(&*clock) else { panic!("it waits") };
        let (_, member) = fleet.members().next().unwrap();
        assert_eq!((member.error(), member.ended(), wait >= Options::default().interval), (None, false, true));
        member.trimmer().target().fails.set(None);
        clock.pass(wait);
        while fleet.turn(&*clock) == Turn::Worked {}
        assert!(fleet.total().gone_bytes > 0);
    }
}

#[test]
fn of_pages_that_are_used_little_is_read() {
    let layouts: [(&str, usize, bool); 6] = [
        ("dense", 0, false),
        ("dense by one byte in each subpage", 0, true),
        ("half", 256, false),
        ("half, by one byte", 256, true),
        ("next to the threshold", 400, false),
        ("next to the threshold, by one byte", 400, true),
    ];
    for (name, zero, one_byte) in layouts {
        let mut pages = pages(&[(400, zero)]);
        for (salt, page) in pages.iter_mut().enumerate() {
            (page.salt, page.one_byte) = (salt as u16 * 31, one_byte);
        }
        let tally = *pass(Process::new(pages, &Rc::default()), Options::default()).tally();
        let each = tally.read_of_used_bytes / tally.used.max(1);
        assert!(each <= (READ_OF_USED + HUGE_PAGE_SIZE / 400) as u64 && tally.used >= 370, "{name}: {each} {tally:?}");
    }
}

#[test]
fn our_own_cpu_is_less_than_a_third_of_the_kernel_s() {
    for one_byte in [false, true] {
        let mut pages = pages(&[(400, 472)]);
        for (salt, page) in pages.iter_mut().enumerate() {
            (page.salt, page.one_byte) = (salt as u16 * 31, one_byte);
        }
        let tally = *pass(Process::new(pages, &Rc::default()), Options::default()).tally();
        assert!(tally.split >= 396, "{tally:?}");
        let share = (tally.cpu_ns - tally.split_ns) as f64 / tally.split_ns as f64;
        assert!(share < 0.3, "{share}");
    }
}

/// Runs `fleet` for `time`, and calls `each` every second.
fn watch(
    fleet: &mut Fleet<Process>,
    clock: &FakeClock,
    time: Duration,
    mut each: impl FnMut(&mut Fleet<Process>, u64),
) {
    let (begin, mut second) = (clock.now_ns(), 0);
    while clock.now_ns() < begin + time.as_nanos() as u64 {
        if (clock.now_ns() - begin) / SECOND > second {
            second = (clock.now_ns() - begin) / SECOND;
            each(fleet, second);
        }
        match fleet.turn(clock) {
            Turn::Worked => {}
            Turn::Spent(pause) | Turn::Idle(pause) => {
                clock.pass(pause.clamp(Duration::from_micros(1), Duration::from_secs(1)))
            }
        }
    }
}

#[test]
fn what_comes_back_huge_is_split_less_and_less() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::new(Options { cpu: Some(0.5), ..Options::default() }, &*clock);
    let mut pages = pages(&[(10, 500)]);
    pages.iter_mut().for_each(|page| page.manner = Manner::Returning(1));
    fleet.admit(Id { pid: 1, start_ticks: 1 }, Process::new(pages, &clock), 0);
    watch(&mut fleet, &clock, Duration::from_secs(24 * 3600), |_, _| {});
    let (_, member) = fleet.members().next().unwrap();
    let most = member.trimmer().target().pages.borrow().iter().map(|page| page.splits).max();
    assert!(most <= Some(9), "{most:?} splits of one page in a day");
}

#[test]
fn in_an_emergency_the_budget_waits_and_is_paid_afterwards() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::new(Options { cpu: Some(0.001), ..Options::default() }, &*clock);
    fleet.admit(Id { pid: 1, start_ticks: 1 }, Process::new(pages(&[(100, 500)]), &clock), 0);
    while fleet.turn(&*clock) == Turn::Worked {}
    assert!(fleet.total().split < 40, "{:?}", fleet.total());
    fleet.rush(|_| true);
    while fleet.turn(&*clock) == Turn::Worked {}
    assert_eq!(fleet.total().split, 100);
    assert!(matches!(fleet.turn(&*clock), Turn::Spent(_)));
}

#[test]
fn a_rush_takes_what_was_split_before_and_came_back() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::new(Options { cpu: None, ..Options::default() }, &*clock);
    let mut pages = pages(&[(10, 500)]);
    pages.iter_mut().for_each(|page| page.manner = Manner::Returning(1));
    fleet.admit(Id { pid: 1, start_ticks: 1 }, Process::new(pages, &clock), 0);
    // In the second and third one, nobody has seen before that they are huge again.
    for round in 1..=3 {
        fleet.rush(|_| true);
        while fleet.turn(&*clock) == Turn::Worked {}
        assert_eq!(fleet.total().split, 10 * round);
        clock.pass(Duration::from_secs(2));
    }
}

#[test]
fn what_is_used_elsewhere_is_paid_as_well_and_nothing_twice() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::<Process>::new(Options { cpu: Some(0.01), ..Options::default() }, &*clock);
    // A hundred milliseconds are saved up; of 150 in all, 50 are a debt for five seconds.
    fleet.charge(30_000_000, &*clock);
    fleet.charge_up_to(150_000_000, &*clock);
    assert_eq!(fleet.charged_ns(), 150_000_000);
    assert_eq!(fleet.turn(&*clock), Turn::Spent(Duration::from_secs(5)));
    fleet.charge_up_to(120_000_000, &*clock);
    fleet.charge_up_to(150_000_000, &*clock);
    assert_eq!(fleet.turn(&*clock), Turn::Spent(Duration::from_secs(5)));
    // Nor is anything saved up for whoever takes its place.
    let mut next = Fleet::<Process>::new(Options { cpu: Some(0.01), ..Options::default() }, &*clock);
    next.go_on_after(150_000_000, &*clock);
    assert_eq!(next.charged_ns(), 150_000_000);
    assert!(matches!(next.turn(&*clock), Turn::Idle(_)));
    next.charge_up_to(160_000_000, &*clock);
    assert_eq!(next.turn(&*clock), Turn::Spent(Duration::from_secs(1)));
}

/// Two hundred processes whose searches alone take longer than the interval between two, and the memory of one is needed: its zeroes go before
/// many others were searched, a rush of all of them ends, and searching never takes the place of looking.
#[test]
fn searches_never_keep_looks_from_their_turn() {
    let clock = Rc::<FakeClock>::default();
    let interval = Duration::from_millis(100);
    let mut fleet = Fleet::new(Options { cpu: None, interval, ..Options::default() }, &*clock);
    for pid in 1..=200 {
        let mut process = Process::new(pages(&[(3, 500)]), &clock);
        process.search_ns = SECOND / 1000;
        fleet.admit(Id { pid, start_ticks: 1 }, process, pid as u64);
    }
    let needed = |id: Id| id.pid == 7;
    let begin = clock.now_ns();
    fleet.rush(needed);
    while fleet.rushing() {
        assert_eq!(fleet.turn(&*clock), Turn::Worked);
        assert!(clock.now_ns() < begin + SECOND / 10);
    }
    assert_eq!(fleet.gone_of(needed), fleet.total().gone_bytes);
    assert_eq!(fleet.total().split, 3);
    // All of them: the first memory comes before all were searched, and it comes to an end.
    let begin = clock.now_ns();
    fleet.rush(|_| true);
    let mut first = None;
    while fleet.rushing() {
        fleet.turn(&*clock);
        if fleet.total().split > 3 {
            first.get_or_insert(clock.now_ns() - begin);
        }
        assert!(clock.now_ns() < begin + 2 * SECOND);
    }
    assert_eq!(fleet.total().split, 600);
    assert!(first < Some(SECOND / 100), "{first:?}");
    // And the whole machine, without a rush and always behind with its searches.
    let looked = fleet.total().looked_at;
    for pid in 201..=400 {
        let mut process = Process::new(pages(&[(20, 0)]), &clock);
        process.search_ns = SECOND / 1000;
        fleet.admit(Id { pid, start_ticks: 1 }, process, pid as u64);
    }
    watch(&mut fleet, &clock, Duration::from_secs(10), |_, _| {});
    assert!(fleet.total().looked_at > looked + 1000, "{:?}", fleet.total());
}

#[test]
fn a_rush_ends_with_those_it_is_for() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::new(Options::default(), &*clock);
    for pid in 1..=3 {
        fleet.admit(Id { pid, start_ticks: 1 }, Process::new(pages(&[(50, 500)]), &clock), 1);
    }
    fleet.rush(|id| id.pid == 2);
    fleet.turn(&*clock);
    assert!(fleet.rushing());
    fleet.retain(|id, _| id.pid != 2);
    while fleet.rushing() {
        fleet.turn(&*clock);
    }
    fleet.rush(|id| id.pid == 4);
    fleet.turn(&*clock);
    assert!(!fleet.rushing());
    fleet.rush(|_| true);
    fleet.calm_down();
    assert!(!fleet.rushing());
}

#[test]
fn other_options_count_from_then_on() {
    let clock = Rc::<FakeClock>::default();
    let mut fleet = Fleet::new(Options { cpu: None, max_zero: 511, ..Options::default() }, &*clock);
    fleet.admit(Id { pid: 1, start_ticks: 1 }, Process::new(pages(&[(50, 500)]), &clock), 1);
    while fleet.turn(&*clock) == Turn::Worked {}
    assert_eq!(fleet.total().split, 0);
    let interval = Duration::from_secs(1);
    fleet.reconfigure(Options { cpu: None, interval, ..Options::default() }, &*clock);
    fleet.rush(|_| true);
    while fleet.turn(&*clock) == Turn::Worked {}
    assert_eq!(fleet.total().split, 50);
    assert!(matches!(fleet.turn(&*clock), Turn::Idle(pause) if pause <= interval));
}

/// A made-up machine of ten thousand processes: a tenth of them sparse, a third with a little to gain, the rest dense; some whose pages
/// `khugepaged` makes huge again; some end and others begin. With 1 % of one CPU.
#[test]
fn a_fleet_of_ten_thousand() {
    const PROCESSES: usize = 10_000;
    const TIME: Duration = Duration::from_secs(1800);
    let clock = Rc::<FakeClock>::default();
    let mut random = super::sample::Random::new(42);
    let mut numbers = 1..;
    let mut made = |random: &mut super::sample::Random| {
        let kind = random.below(100);
        // Few are large.
        let count = 4 << (random.below(1 << 10).max(1).ilog2() as usize).min(9) >> random.below(8);
        let page = |random: &mut super::sample::Random| {
            let sparse = match kind {
                0..10 => random.below(10) < 9,
                10..40 => random.below(20) == 0,
                _ => false,
            };
            let zero = if sparse { 430 + random.below(80) } else { random.below(300) };
            let manner = if kind == 0 { Manner::Returning(5) } else { Manner::Ordinary };
            Page { salt: random.below(SUBPAGES) as u16, manner, ..Page::new(zero) }
        };
        let pages: Vec<Page> = (0..count.max(1)).map(|_| page(random)).collect();
        let id = Id { pid: numbers.next().unwrap(), start_ticks: 1 };
        (id, Process::new(pages, &clock), kind)
    };
    let options = Options { cpu: Some(0.01), ..Options::default() };
    let mut fleet = Fleet::new(options, &*clock);
    let mut kinds = BTreeMap::new();
    let mut admit = |fleet: &mut Fleet<Process>, random: &mut super::sample::Random| {
        let (id, process, kind) = made(random);
        let size = process.pages.borrow().len() as u64;
        kinds.insert(id.pid, kind);
        fleet.admit(id, process, size);
    };
    for _ in 0..PROCESSES {
        admit(&mut fleet, &mut random);
    }
    let mut at_half = None;
    watch(&mut fleet, &clock, TIME, |fleet, second| {
        // One in ten thousand ends each second, and another begins.
        let victim = fleet.members().nth(random.below(PROCESSES)).map(|(id, _)| id);
        fleet.retain(|id, _| Some(id) != victim);
        admit(fleet, &mut random);
        if second == TIME.as_secs() / 2 {
            at_half = Some((fleet.total(), clock.cpu_ns()));
        }
    });
    let total = fleet.total();
    // The budget, with what was saved up at the beginning and the last piece.
    let granted = 0.01 * (TIME + Duration::from_secs(10)).as_nanos() as f64 + (SPLIT + SCAN) as f64 * 2.0;
    assert!(clock.cpu_ns() as f64 <= granted, "{} of {granted}", clock.cpu_ns());
    // Nothing but splitting, with nothing to look for, would have brought this much.
    let (half, half_cpu) = at_half.unwrap();
    let most = half_cpu as f64 / SPLIT as f64 * 470.0 * PAGE_SIZE as f64;
    let share = half.gone_bytes as f64 / most;
    assert!(share > 0.5, "in the first half, {share:.2} of what was possible: {half:?}");
    // Whoever was there from the beginning was searched.
    assert_eq!(fleet.unsearched(), 0);
    // What comes back was not split again and again.
    let returning = fleet.members().filter(|(id, _)| kinds[&id.pid] == 0);
    let most = returning
        .flat_map(|(_, member)| member.trimmer().target().pages.borrow().clone())
        .map(|page| page.splits)
        .max();
    assert!(most <= Some(4), "{most:?}");
    // Dense processes were looked at no more than it takes to know.
    let looked = |range: std::ops::Range<usize>| -> u64 {
        let members = fleet.members().filter(|(id, _)| range.contains(&kinds[&id.pid]));
        members.map(|(_, member)| member.trimmer().tally().looked_at).sum()
    };
    let (sparse, dense) = (looked(0..10), looked(40..100));
    eprintln!(
        "{share:.2} of the most in the first half; {sparse} looks at sparse processes, {dense} at dense ones; {total:?}"
    );
}
