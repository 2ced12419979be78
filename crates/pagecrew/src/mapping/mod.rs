//! The mappings that a program makes itself: which of them it will use densely, so that huge pages pay, and the advice that makes them
//! eligible.
//!
//! **Life of a mapping here.** Private anonymous memory of 2 MiB and more is noted. What can be read and written becomes *eligible* at once;
//! what is only reserved becomes so when a part of it is made accessible, and then all of it, so that the kernel's mappings stay as
//! few as they were. Whatever the program says about a range itself (advice, locks, keys, a handler for its faults) ends what is known
//! here: the program's own word is the last one.
//!
//! Nothing here is relied on. See [`table`] for why it can't be.
//!
//! Source: "split underutilized THPs" (2024), whose premise is that huge pages for everybody pay once bloat is given back.

pub mod policy;
pub mod table;

use crate::sys::memory::{self, Advice, Range};
use crate::sys::{Errno, PAGE_SIZE, round_up};
use policy::{LEAST, Purpose, Request};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use table::{Kind, Table};

/// A thread that has not got the table after so many looks goes without: a signal handler may have interrupted who holds it.
const PATIENCE: usize = 1000;
/// Entries that one call makes eligible at most.
const AT_ONCE: usize = 8;

/// The whole pages of `len` bytes at `start`; `None` where that is no range.
pub fn pages(start: usize, len: usize) -> Option<Range> {
    let len = round_up(len, PAGE_SIZE)?;
    start.checked_add(len)?;
    Some(Range { start, len })
}

/// What is known of this process's mappings. Safe to use in signal handlers and by forked children; allocates nothing unless it says so.
pub struct Mappings {
    table: UnsafeCell<Table>,
    held: AtomicBool,
    /// Something could not be noted that has to be: what is known is void.
    void: AtomicBool,
    /// Whether mappings are noted, and whether they are made eligible.
    on: AtomicBool,
    advises: AtomicBool,
    /// Bytes of memory that the machine has.
    memory: AtomicUsize,
    /// Bytes that were made eligible in all.
    eligible_bytes: AtomicU64,
}

// SAFETY: the table is only used by who has set `held`.
unsafe impl Sync for Mappings {}

impl Mappings {
    /// Knows nothing and does nothing before [`Mappings::start`].
    pub const fn new() -> Mappings {
        Mappings {
            table: UnsafeCell::new(Table::new()),
            held: AtomicBool::new(false),
            void: AtomicBool::new(false),
            on: AtomicBool::new(false),
            advises: AtomicBool::new(false),
            memory: AtomicUsize::new(0),
            eligible_bytes: AtomicU64::new(0),
        }
    }

    /// From now on mappings are noted, and with `advise` made eligible for huge pages. The machine has `memory` bytes.
    pub fn start(&self, advise: bool, memory: usize) {
        self.memory.store(memory, Ordering::Relaxed);
        self.advises.store(advise, Ordering::Relaxed);
        self.on.store(true, Ordering::Release);
    }

    /// For good: nothing is noted or advised any more.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Relaxed);
        self.void.store(true, Ordering::Relaxed);
    }

    fn on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Bytes that were made eligible so far.
    pub fn eligible_bytes(&self) -> u64 {
        self.eligible_bytes.load(Ordering::Relaxed)
    }

    /// Lets `body` have the table, unless another has it for long.
    fn with<T>(&self, body: impl FnOnce(&mut Table) -> T) -> Option<T> {
        let mut looks = 0;
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            looks += 1;
            if looks == PATIENCE {
                return None;
            }
            std::hint::spin_loop();
        }
        // SAFETY: `held` was set by this thread, and nothing in here runs code of the program's.
        let table = unsafe { &mut *self.table.get() };
        if self.void.load(Ordering::Relaxed) && self.void.swap(false, Ordering::Relaxed) {
            table.clear();
        }
        let result = body(table);
        self.held.store(false, Ordering::Release);
        Some(result)
    }

    /// What a mapping of `len` bytes is for.
    pub fn purpose(&self, request: Request, len: usize) -> Purpose {
        if self.on() { policy::purpose(request, len, self.memory.load(Ordering::Relaxed)) } else { Purpose::Other }
    }

    /// Whether what is used densely is made eligible.
    pub fn advises(&self) -> bool {
        self.on() && self.advises.load(Ordering::Relaxed)
    }

    /// Takes note of a new mapping, and makes it eligible if it will be dense.
    pub fn mapped(&self, range: Range, purpose: Purpose) {
        if !self.on() {
            return;
        }
        let eligible = purpose == Purpose::Dense && self.advises() && self.advise(range);
        // What is not noted is merely passed on later.
        self.with(|table| match purpose {
            Purpose::Other => table.remove(range),
            _ => table.insert(range, if eligible { Kind::Eligible } else { Kind::Plain }),
        });
    }

    /// Takes note that `range` is about to be unmapped or replaced.
    pub fn unmapped(&self, range: Range) {
        if self.on() {
            self.with(|table| table.remove(range));
        }
    }

    /// Takes note that `mremap` is about to be called for `range`: behind the call, its addresses may be another thread's. Returns what was
    /// known of it, for [`Mappings::moved`].
    pub fn moving(&self, range: Range) -> Option<Kind> {
        let known = |table: &mut Table| {
            let kind = table.covers(range);
            table.remove(range);
            kind
        };
        if self.on() { self.with(known).flatten() } else { None }
    }

    /// Takes note that what [`Mappings::moving`] knew as `kind` is at `to` now: all of its new place has the advice that the old one had.
    /// Where the move was refused, it is where it was.
    pub fn moved(&self, to: Range, kind: Option<Kind>) {
        if self.on() {
            self.with(|table| match kind {
                Some(kind) => table.insert(to, kind),
                None => table.remove(to),
            });
        }
    }

    /// Takes note that `range` can be read and written from now on. What was reserved becomes eligible.
    pub fn made_accessible(&self, range: Range) {
        if !self.advises() || range.len < LEAST {
            return;
        }
        let mut found = [Range { start: 0, len: 0 }; AT_ONCE];
        let mut count = 0;
        self.with(|table| {
            table.touching(range, |entry, kind| {
                if kind == Kind::Plain && count < AT_ONCE {
                    found[count] = entry;
                    count += 1;
                }
            });
            found[..count].iter().for_each(|&entry| table.insert(entry, Kind::Eligible));
        });
        for &entry in &found[..count] {
            self.advise(entry);
        }
    }

    /// Takes note that the program has a wish of its own about `range`, which is left alone from now on.
    pub fn left_alone(&self, range: Range) {
        if self.on() && self.with(|table| table.remove(range)).is_none() {
            self.void.store(true, Ordering::Relaxed);
        }
    }

    /// `mremap` takes a range that is one mapping of the kernel's, and has refused one. If the advice that was given here is all that
    /// parts it, it is one afterwards. Returns whether that was tried.
    pub fn unite(&self, range: Range) -> bool {
        // SAFETY: this advice changes no contents, whatever is mapped there.
        self.advises() && range.len > 0 && unsafe { memory::advise(range, Advice::HugePage) }.is_ok()
    }

    /// Whether all of `range` is known as ordinary private anonymous memory.
    pub fn knows(&self, range: Range) -> bool {
        self.on() && self.with(|table| table.covers(range).is_some()).unwrap_or(false)
    }

    /// Adds what is eligible to `list`, which grows before the table is held.
    pub fn eligible(&self, list: &mut Vec<Range>) {
        list.reserve(table::ENTRIES);
        self.with(|table| {
            table.all(|range, kind| {
                if kind == Kind::Eligible && list.len() < list.capacity() {
                    list.push(range);
                }
            });
        });
    }

    /// Makes `range` eligible.
    fn advise(&self, range: Range) -> bool {
        // SAFETY: this advice changes no contents, whatever is mapped there.
        match unsafe { memory::advise(range, Advice::HugePage) } {
            Ok(()) => {
                self.eligible_bytes.fetch_add(range.len as u64, Ordering::Relaxed);
                true
            }
            // This kernel has no huge pages.
            Err(Errno(libc::EINVAL)) => {
                self.advises.store(false, Ordering::Relaxed);
                false
            }
            // Something else was mapped or unmapped meanwhile.
            Err(_) => false,
        }
    }

    /// In a forked child. Another thread of the parent may have held the table, in the middle of a change.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        if self.held.load(Ordering::Relaxed) {
            self.void.store(true, Ordering::Relaxed);
            self.held.store(false, Ordering::Relaxed);
        }
        self.eligible_bytes.store(0, Ordering::Relaxed);
    }
}

impl Default for Mappings {
    fn default() -> Mappings {
        Mappings::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{Protection, map, unmap};

    const LEN: usize = 8 << 20;

    fn started() -> Box<Mappings> {
        let mappings = Box::new(Mappings::new());
        mappings.start(true, 1 << 40);
        mappings
    }

    fn listed(mappings: &Mappings) -> Vec<(usize, usize)> {
        let mut list = Vec::new();
        mappings.eligible(&mut list);
        list.iter().map(|range| (range.start, range.len)).collect()
    }

    /// Whether the kernel has the advice for the mapping at `start`.
    fn advised(start: usize) -> bool {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let header = |line: &&str| {
            let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
            let address = |text| usize::from_str_radix(text, 16);
            bounds.is_some_and(
                |(from, to)| matches!((address(from), address(to)), (Ok(from), Ok(to)) if (from..to).contains(&start)),
            )
        };
        let flags = text.lines().skip_while(|line| !header(line)).find(|line| line.starts_with("VmFlags:"));
        flags.unwrap().split_ascii_whitespace().any(|flag| flag == "hg")
    }

    #[test]
    fn what_is_reserved_becomes_eligible_as_a_whole_when_a_part_is_made_accessible() {
        let mappings = started();
        let range = Range { start: map(LEN, Protection::None).unwrap(), len: LEN };
        mappings.mapped(range, Purpose::Reserve);
        assert_eq!((listed(&mappings), mappings.knows(range)), (vec![], true));
        mappings.made_accessible(Range { start: range.start, len: LEAST - PAGE_SIZE });
        assert!(listed(&mappings).is_empty() && !advised(range.start));
        mappings.made_accessible(Range { start: range.start, len: LEAST });
        assert_eq!(listed(&mappings), [(range.start, LEN)]);
        assert!(advised(range.start) && advised(range.end() - 1));
        assert_eq!(mappings.eligible_bytes(), LEN as u64);
        mappings.made_accessible(range);
        assert_eq!(mappings.eligible_bytes(), LEN as u64, "no advice is given twice");
        // SAFETY: the test's own mapping.
        unsafe { unmap(range).unwrap() };
    }

    #[test]
    fn the_programs_own_word_is_the_last_one() {
        let mappings = started();
        let range = Range { start: map(LEN, Protection::None).unwrap(), len: LEN };
        mappings.mapped(range, Purpose::Reserve);
        mappings.left_alone(range);
        mappings.made_accessible(range);
        assert!(!advised(range.start) && !mappings.knows(range));
        // SAFETY: the test's own mapping.
        unsafe { unmap(range).unwrap() };
    }

    #[test]
    fn a_mapping_of_which_a_part_was_advised_is_one_again() {
        let mappings = started();
        let range = Range { start: map(LEN, Protection::ReadWrite).unwrap(), len: LEN };
        let half = Range { start: range.start, len: LEN / 2 };
        mappings.mapped(half, Purpose::Dense);
        // SAFETY: the test's own mapping; where it is grown, it is unmapped.
        let grow = || unsafe { libc::mremap(range.start as *mut _, LEN, 2 * LEN, libc::MREMAP_MAYMOVE) };
        assert_eq!((grow(), Errno::last()), (libc::MAP_FAILED, Errno(libc::EFAULT)));
        assert!(mappings.unite(range));
        let grown = grow();
        assert_ne!(grown, libc::MAP_FAILED);
        // SAFETY: as above.
        unsafe { unmap(Range { start: grown as usize, len: 2 * LEN }).unwrap() };
    }

    #[test]
    fn moves_keep_what_is_known() {
        let mappings = started();
        let at = |start: usize| Range { start: start << 21, len: 1 << 21 };
        mappings.mapped(at(5), Purpose::Reserve);
        let kind = mappings.moving(at(5));
        assert!(!mappings.knows(at(5)));
        // Another thread has its addresses before this one has said where it went.
        mappings.mapped(at(5), Purpose::Reserve);
        mappings.moved(at(9), kind);
        assert_eq!((mappings.knows(at(5)), mappings.knows(at(9))), (true, true));
        let unknown = mappings.moving(at(3));
        mappings.moved(at(9), unknown);
        assert!(!mappings.knows(at(9)), "something unknown was moved over it");
    }

    #[test]
    fn a_holder_that_does_not_let_go_is_not_waited_for() {
        let mappings = started();
        let range = Range { start: 5 << 21, len: 1 << 21 };
        mappings.mapped(range, Purpose::Reserve);
        mappings.held.store(true, Ordering::Relaxed);
        assert!(!mappings.knows(range));
        mappings.left_alone(Range { start: 5 << 21, len: PAGE_SIZE });
        // SAFETY: no other thread knows of these mappings.
        unsafe { mappings.after_fork() };
        assert!(!mappings.knows(range), "what could not be noted voids the table");
        mappings.mapped(range, Purpose::Reserve);
        assert!(mappings.knows(range));
        mappings.stop();
        assert!(!mappings.knows(range));
    }

    #[test]
    fn lengths_are_whole_pages_and_ranges_do_not_wrap() {
        assert_eq!(pages(PAGE_SIZE, 1), Some(Range { start: PAGE_SIZE, len: PAGE_SIZE }));
        assert_eq!(pages(PAGE_SIZE, usize::MAX), None);
        assert_eq!(pages(usize::MAX - PAGE_SIZE, 2 * PAGE_SIZE), None);
    }
}
