//! Trimming one process: find its huge pages, look at some of each, have the kernel split those that are under-used, and see what came of
//! it.
//!
//! **Life of a huge page here.** A scan finds it. If nobody has excluded it, it is anonymous, and it doesn't rest, it is *due*. A look
//! reads a few of its subpages ([`super::sample`]) and calls it used or under-used. An under-used one is split by the advice that one
//! of its zero subpages is cold: the kernel then compares the contents of all of them under its own locks and puts the shared zero
//! page in the place of those that are zero, so what was read before is only a hint, and no write is lost. Afterwards the page map
//! says what has really gone, and that is what is counted. What came of it is remembered ([`super::history`]).

use super::credit::{Credit, READ_OF_USED};
use super::history::{History, Outcome};
use super::options::{Exclusion, Options};
use super::sample::{Draw, FIRST, Random, SUBPAGES, Verdict, expected_zero, judge};
use super::tally::{Left, Tally};
use super::target::{MappingKind, Target};
use crate::sys::memory::Range;
use crate::sys::pagemap::{Category, HugeKind};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, clock};

/// What is read of a subpage first: what the CPU fetches at a time.
const LINE: usize = 64;
/// So many subpages that look zero are read to their ends, a few at a time.
const CHECKS: usize = 12;
const CHUNK: usize = 4;
/// The most that is read at a time.
const ROOM: usize = SUBPAGES * LINE;
const _: () = assert!(ROOM >= CHUNK * PAGE_SIZE);
/// A scan notes so many huge pages to look at (2 TiB); the next one finds the rest.
const DUE_MOST: usize = 1 << 20;
/// After so many splits in a row that gave nothing back, none is tried any more: the kernel doesn't do it for this process.
const FRUITLESS_MOST: u32 = 4;

/// The time, and the CPU time of the thread that trims.
pub trait Clock {
    /// Nanoseconds since some instant.
    fn now_ns(&self) -> u64;
    /// CPU time of the calling thread in nanoseconds.
    fn cpu_ns(&self) -> u64;
}

/// The kernel's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kernel;

impl Clock for Kernel {
    fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    fn cpu_ns(&self) -> u64 {
        clock::thread_cpu_ns()
    }
}

/// What a look was at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A huge page.
    Looked,
    /// Nothing is due.
    Nothing,
    /// The process has ended or runs another program.
    Ended,
}

/// What was seen of a huge page.
struct Look {
    verdict: Verdict,
    /// Zero subpages, by what was read.
    zero: usize,
    /// One of them.
    zero_at: Option<usize>,
    read: usize,
}

/// The trimming of one process.
pub struct Trimmer<T> {
    target: T,
    options: Options,
    /// What the process itself wants left alone.
    own_exclusions: Vec<Exclusion>,
    history: History,
    /// At the next search, no page rests.
    emergency: bool,
    /// Huge pages to look at, in no order.
    due: Vec<usize>,
    tally: Tally,
    random: Random,
    draw: Draw,
    credit: Credit,
    /// Splits in a row that gave nothing back.
    fruitless: u32,
    /// What is read; there only as long as something is due.
    room: Vec<u8>,
}

impl<T: Target> Trimmer<T> {
    /// A trimmer that knows nothing of `target` yet. `seed` decides which subpages are looked at.
    ///
    /// # Panics
    /// If `options.max_zero` is more than [`Options::MAX_ZERO_MOST`].
    pub fn new(target: T, options: Options, seed: u64) -> Trimmer<T> {
        assert!(options.max_zero <= Options::MAX_ZERO_MOST);
        Trimmer {
            target,
            options,
            own_exclusions: Vec::new(),
            history: History::default(),
            emergency: false,
            due: Vec::new(),
            tally: Tally::default(),
            random: Random::new(seed),
            draw: Draw::default(),
            credit: Credit::new(),
            fruitless: 0,
            room: Vec::new(),
        }
    }

    /// The process.
    pub fn target(&self) -> &T {
        &self.target
    }

    /// What was found and done so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Huge pages that wait for a look.
    pub fn due(&self) -> usize {
        self.due.len()
    }

    /// Whether the kernel splits pages of this process and gives nothing back.
    pub fn fruitless(&self) -> bool {
        self.fruitless >= FRUITLESS_MOST
    }

    /// From the next scan on, these options count.
    ///
    /// # Panics
    /// As [`Trimmer::new`].
    pub fn reconfigure(&mut self, options: Options) {
        assert!(options.max_zero <= Options::MAX_ZERO_MOST);
        self.options = options;
    }

    /// From the next scan on, these are left alone, besides those of the options.
    pub fn exclude(&mut self, exclusions: Vec<Exclusion>) {
        self.own_exclusions = exclusions;
    }

    /// Everything may be looked at again at the next scan, whatever came of it before.
    pub fn wake_all(&mut self) {
        self.emergency = true;
    }

    /// Searches the process for huge pages. Returns how many are due.
    ///
    /// # Errors
    /// `ESRCH` where it has ended, and whatever the kernel says otherwise.
    pub fn scan(&mut self, clock: &impl Clock) -> Result<usize, Errno> {
        let begin = clock.cpu_ns();
        let result = self.search(clock.now_ns());
        self.tally.cpu_ns += clock.cpu_ns() - begin;
        result
    }

    fn search(&mut self, now_ns: u64) -> Result<usize, Errno> {
        let mappings = self.target.mappings()?;
        self.due.clear();
        let mut huge_pages = 0;
        let mut left = Left { file: 0, excluded: 0, special: 0, resting: 0, unreadable: 0, ..self.tally.left };
        let exclusions = || self.options.exclude.iter().chain(&self.own_exclusions);
        for mapping in mappings {
            let excluded = exclusions().any(|exclusion| exclusion.is_mapping(&mapping.name));
            let (history, due) = (&mut self.history, &mut self.due);
            self.target.huge_pages(mapping.range, &mut |run, kind| {
                let count = (run.len / HUGE_PAGE_SIZE) as u64;
                match (mapping.kind, kind) {
                    (_, HugeKind::Zero) => return,
                    (MappingKind::Special, _) => {
                        left.special += count;
                        return;
                    }
                    (MappingKind::File, _) | (_, HugeKind::File) => {
                        left.file += count;
                        return;
                    }
                    (MappingKind::Unreadable, _) => {
                        huge_pages += count;
                        left.unreadable += count;
                        return;
                    }
                    (MappingKind::Anonymous, HugeKind::Anonymous) => huge_pages += count,
                }
                for page in (run.start..run.end()).step_by(HUGE_PAGE_SIZE) {
                    let range = Range { start: page, len: HUGE_PAGE_SIZE };
                    if excluded || exclusions().any(|exclusion| exclusion.touches(range)) {
                        left.excluded += 1;
                    } else if history.due(page, now_ns, self.emergency) {
                        if due.len() < DUE_MOST {
                            due.push(page);
                        }
                    } else {
                        left.resting += 1;
                    }
                }
            })?;
        }
        self.history.prune(now_ns);
        self.emergency = false;
        self.tally.huge_pages = huge_pages;
        self.tally.left = left;
        // So that the first few say something about all.
        for place in (1..self.due.len()).rev() {
            self.due.swap(place, self.random.below(place + 1));
        }
        Ok(self.due.len())
    }

    /// Looks at one huge page that is due, and has it split if it is under-used.
    ///
    /// # Errors
    /// Those that say that the process can't be trimmed at all; what is the matter with one page is counted.
    pub fn step(&mut self, clock: &impl Clock) -> Result<Step, Errno> {
        let begin = clock.cpu_ns();
        let result = match self.due.pop() {
            None => Ok(Step::Nothing),
            Some(page) => match self.look(page, clock) {
                Ok(outcome) => {
                    self.history.note(page, outcome, clock.now_ns());
                    Ok(Step::Looked)
                }
                Err(Errno(libc::ESRCH)) => Ok(Step::Ended),
                // Of a process that ended or runs another program, nothing is left of what the page map was opened for.
                Err(Errno(libc::EIO)) => Ok(Step::Ended),
                Err(error) => Err(error),
            },
        };
        self.tally.cpu_ns += clock.cpu_ns() - begin;
        if result == Ok(Step::Ended) {
            self.due.clear();
        }
        if self.due.is_empty() {
            (self.due, self.room) = (Vec::new(), Vec::new());
        }
        result
    }

    fn look(&mut self, page: usize, clock: &impl Clock) -> Result<Outcome, Errno> {
        match self.target.exclusive(page)? {
            Some(true) => {}
            Some(false) => {
                self.tally.left.shared += 1;
                return Ok(Outcome::Left);
            }
            None => {
                self.tally.left.vanished += 1;
                return Ok(Outcome::Left);
            }
        }
        let look = match self.examine(page) {
            Ok(look) => look,
            Err(Errno(libc::EFAULT)) => {
                self.tally.left.vanished += 1;
                return Ok(Outcome::Left);
            }
            Err(error) => return Err(error),
        };
        self.tally.looked_at += 1;
        self.tally.read_bytes += look.read as u64;
        let Some(zero_at) = look.zero_at.filter(|_| look.verdict == Verdict::UnderUsed) else {
            self.credit.used(look.read);
            self.tally.used += 1;
            self.tally.read_of_used_bytes += look.read as u64;
            return Ok(Outcome::Used);
        };
        self.tally.under_used += 1;
        self.tally.could_go_bytes += (look.zero * PAGE_SIZE) as u64;
        if self.options.dry_run || self.fruitless() {
            return Ok(Outcome::Left);
        }
        self.split(page, zero_at, clock)
    }

    /// Has the kernel split the huge page at `page`, of which the subpage at `zero_at` was zero.
    fn split(&mut self, page: usize, zero_at: usize, clock: &impl Clock) -> Result<Outcome, Errno> {
        let begin = clock.cpu_ns();
        let result = self.target.split(Range { start: zero_at, len: PAGE_SIZE });
        self.tally.split_ns += clock.cpu_ns() - begin;
        let left = &mut self.tally.left;
        match result {
            Ok(()) => {}
            Err(Errno(libc::EINVAL)) => {
                left.locked += 1;
                return Ok(Outcome::Left);
            }
            Err(Errno(libc::ENOMEM | libc::EFAULT)) => {
                left.vanished += 1;
                return Ok(Outcome::Left);
            }
            Err(Errno(libc::EAGAIN | libc::EINTR | libc::EBUSY)) => {
                left.busy += 1;
                return Ok(Outcome::Left);
            }
            Err(error) => return Err(error),
        }
        let whole = Range { start: page, len: HUGE_PAGE_SIZE };
        if self.target.bytes_of(whole, Category::Huge)? > 0 {
            // Refused without a word: something holds a reference to it.
            left.busy += 1;
            return Ok(Outcome::Left);
        }
        let gone = self.target.bytes_of(whole, Category::Zero)?;
        if gone == 0 && self.target.bytes_of(whole, Category::Present)? == 0 {
            // The program has unmapped it meanwhile.
            left.vanished += 1;
            return Ok(Outcome::Left);
        }
        self.fruitless = if gone == 0 { self.fruitless + 1 } else { 0 };
        self.tally.split += 1;
        self.tally.gone_bytes += gone as u64;
        Ok(Outcome::Split)
    }

    /// Looks at as many subpages of the huge page at `page` as it takes.
    fn examine(&mut self, page: usize) -> Result<Look, Errno> {
        let max_zero = self.options.max_zero;
        self.room.resize(ROOM, 0);
        let mut look = Look { verdict: Verdict::Used, zero: 0, zero_at: None, read: 0 };
        self.draw.restart();
        // Which of the drawn ones are not zero for certain, in the order in which they were drawn.
        let mut in_use = [false; SUBPAGES];
        let (mut lines, mut zero_lines) = (0, 0);
        loop {
            let count = (2 * lines).max(FIRST);
            zero_lines += self.read_lines(page, lines, count, &mut in_use, &mut look)?;
            lines = count;
            match judge(lines, zero_lines, max_zero) {
                Verdict::Used => return Ok(look),
                Verdict::UnderUsed => break,
                Verdict::Open => {}
            }
        }
        // By its lines it is under-used. A few of those that look zero, read to their ends, tell whether lines can be trusted here.
        let checks = ((READ_OF_USED - look.read) / PAGE_SIZE).min(CHECKS);
        let (mut place, mut zero, mut checked) = (0, 0, 0);
        while checked < checks && place < lines && zero == checked {
            let (read, found) = self.read_whole(page, &mut place, lines, checks - checked, &in_use, &mut look)?;
            (checked, zero) = (checked + read, zero + found);
        }
        if zero == checked {
            (look.verdict, look.zero) = (Verdict::UnderUsed, expected_zero(lines, zero_lines));
            return Ok(look);
        }
        // They can't: all of each that is drawn has to be read.
        if !self.credit.suffices() {
            return Ok(look);
        }
        let mut count = place.next_power_of_two().max(FIRST);
        loop {
            while judge(place, zero, max_zero) != Verdict::Used && place < count {
                zero += self.read_whole(page, &mut place, count, CHUNK, &in_use, &mut look)?.1;
            }
            if judge(place, zero, max_zero) == Verdict::Used {
                return Ok(look);
            }
            match judge(count, zero, max_zero) {
                Verdict::Open => count *= 2,
                verdict => {
                    (look.verdict, look.zero) = (verdict, expected_zero(count, zero));
                    return Ok(look);
                }
            }
        }
    }

    /// Reads a line of each subpage from the number `from` in the order of drawing up to `to`. Returns how many are zero.
    fn read_lines(
        &mut self,
        page: usize,
        from: usize,
        to: usize,
        in_use: &mut [bool; SUBPAGES],
        look: &mut Look,
    ) -> Result<usize, Errno> {
        let mut pieces = [Range { start: 0, len: LINE }; SUBPAGES];
        let new = self.draw.up_to(to, &mut self.random);
        debug_assert_eq!(new.len(), to - from);
        for (piece, &subpage) in pieces.iter_mut().zip(new) {
            piece.start = page + usize::from(subpage) * PAGE_SIZE;
        }
        let pieces = &mut pieces[..to - from];
        for piece in pieces.iter_mut() {
            piece.start += self.random.below(PAGE_SIZE / LINE) * LINE;
        }
        let room = &mut self.room[..pieces.len() * LINE];
        whole(self.target.read(pieces, room)?, room.len())?;
        look.read += room.len();
        let mut zero = 0;
        for (line, in_use) in room.chunks_exact(LINE).zip(&mut in_use[from..to]) {
            *in_use = !is_zero(line);
            zero += usize::from(!*in_use);
        }
        Ok(zero)
    }

    /// Reads all of the next `most` subpages of which nothing speaks against being zero, from the number `place` in the order of drawing on
    /// and before `to`. Returns how many were read and how many are zero.
    fn read_whole(
        &mut self,
        page: usize,
        place: &mut usize,
        to: usize,
        most: usize,
        in_use: &[bool; SUBPAGES],
        look: &mut Look,
    ) -> Result<(usize, usize), Errno> {
        self.draw.up_to(to, &mut self.random);
        let mut pieces = [Range { start: 0, len: PAGE_SIZE }; CHUNK];
        let mut count = 0;
        while *place < to && count < most.min(CHUNK) {
            if !in_use[*place] {
                pieces[count].start = page + self.draw.at(*place) * PAGE_SIZE;
                count += 1;
            }
            *place += 1;
        }
        if count == 0 {
            return Ok((0, 0));
        }
        let room = &mut self.room[..count * PAGE_SIZE];
        whole(self.target.read(&pieces[..count], room)?, room.len())?;
        look.read += room.len();
        let mut zero = 0;
        for (piece, bytes) in pieces.iter().zip(room.chunks_exact(PAGE_SIZE)) {
            if is_zero(bytes) {
                look.zero_at = Some(piece.start);
                zero += 1;
            }
        }
        Ok((count, zero))
    }
}

/// Whether all of what was asked for was there.
fn whole(read: usize, wanted: usize) -> Result<(), Errno> {
    if read == wanted { Ok(()) } else { Err(Errno(libc::EFAULT)) }
}

/// Whether `bytes` are all zero. Blocks of a line, so that it ends early and is fast until then.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks_exact(LINE).all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}
