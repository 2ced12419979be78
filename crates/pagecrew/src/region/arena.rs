//! The address space that spans are cut from: one reservation, divided into zones.
//!
//! A reservation has no access rights, so it counts neither against overcommit nor `RLIMIT_DATA`, and `mlockall` does not fill it.
//! Rights come with use:
//! - as a *frontier*: each zone is accessible up to the highest address ever used, which takes one mapping and few calls;
//! - *exactly*, where accessible memory is accounted (strict overcommit, `RLIMIT_DATA`, `RLIMIT_AS`): what is in use or retained is
//!   accessible, and nothing else.

use crate::sys::memory::{self, Advice, Protection, Range};
use crate::sys::procfs::{self, Buffer};
use crate::sys::{Errno, HUGE_PAGE_SIZE};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Zones are aligned to this, so that the largest alignment that a span can have is the same everywhere.
pub const ZONE_ALIGN: usize = 1 << 30;

/// The frontier moves in steps of this size.
const STEP: usize = 64 << 20;

/// The reservation.
pub struct Arena {
    range: Range,
    exact: AtomicBool,
    /// What was given up; others may have mapped something there.
    given_up: Mutex<Vec<Range>>,
}

/// A limit of this process in bytes; `None` if it has none.
fn limit(resource: libc::__rlimit_resource_t) -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    let result = unsafe { libc::getrlimit(resource, &mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur as usize)
}

fn overcommit_is(mode: &str) -> bool {
    let mut buffer = Buffer::new();
    procfs::read(c"/proc/sys/vm/overcommit_memory", &mut buffer).is_ok_and(|text| text.trim() == mode)
}

/// Whether the kernel grants any request, however large (`vm.overcommit_memory` is 1).
pub fn always_overcommits() -> bool {
    overcommit_is("1")
}

/// Address space used so far, in bytes.
fn address_space_used() -> usize {
    let mut buffer = Buffer::new();
    let text = procfs::read(c"/proc/self/statm", &mut buffer).unwrap_or("");
    text.split_ascii_whitespace().next().and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0)
        * crate::sys::PAGE_SIZE
}

impl Arena {
    /// Reserves `wanted` bytes, or as much as can be had: half, a quarter, and so on, down to `least`. Under `RLIMIT_AS`, a
    /// quarter of what is left, since the program needs address space of its own.
    ///
    /// # Errors
    /// `ENOMEM` if not even `least` can be had.
    pub fn reserve(wanted: usize, least: usize) -> Result<Arena, Errno> {
        let space = limit(libc::RLIMIT_AS);
        let exact = space.is_some() || limit(libc::RLIMIT_DATA).is_some() || overcommit_is("2");
        let mut len = match space {
            Some(space) => wanted.min(space.saturating_sub(address_space_used()) / 4),
            None => wanted,
        } & !(HUGE_PAGE_SIZE - 1);
        let align = if space.is_some() { HUGE_PAGE_SIZE } else { ZONE_ALIGN };
        while len >= least {
            if let Ok(start) = memory::map(len + align, Protection::None) {
                let range = Range { start: start.next_multiple_of(align), len };
                let behind = Range { start: range.end(), len: start + align - range.start };
                for excess in [Range { start, len: range.start - start }, behind] {
                    if excess.len > 0 {
                        // SAFETY: mapped above, and nobody knows of it yet.
                        unsafe { memory::unmap(excess)? };
                    }
                }
                return Ok(Arena { range, exact: AtomicBool::new(exact), given_up: Mutex::new(Vec::new()) });
            }
            len = (len / 2) & !(HUGE_PAGE_SIZE - 1);
        }
        Err(Errno(libc::ENOMEM))
    }

    /// The usable addresses.
    pub fn range(&self) -> Range {
        self.range
    }

    /// It is only `len` bytes long. For an arena that nothing was handed out of.
    ///
    /// # Panics
    /// If that is more than it has.
    pub fn end_at(&mut self, len: usize) {
        assert!(len <= self.range.len);
        let behind = Range { start: self.range.start + len, len: self.range.len - len };
        // SAFETY: it was reserved by this arena, and nobody uses it.
        if behind.len > 0 && unsafe { memory::unmap(behind) }.is_ok() {
            self.range.len = len;
        }
    }

    /// Whether access rights follow use exactly.
    pub fn exact(&self) -> bool {
        self.exact.load(Ordering::Relaxed)
    }

    /// From now on, access rights follow use exactly: the program has set itself a limit. Called with every zone locked.
    pub fn be_exact(&self) {
        self.exact.store(true, Ordering::Relaxed);
    }

    /// Makes `range` accessible, of which `pieces` were not; with a frontier, moves `frontier` (an address) as far as needed,
    /// not past `end`.
    ///
    /// # Errors
    /// `ENOMEM` where the kernel refuses the memory; nothing has changed for the program then.
    pub fn commit(&self, pieces: impl Iterator<Item = Range>, frontier: &mut usize, end: usize) -> Result<(), Errno> {
        for piece in pieces {
            if self.exact() {
                // SAFETY: more rights on address space that nobody uses yet harm nobody.
                unsafe { memory::protect(piece, Protection::ReadWrite)? };
            } else if piece.end() > *frontier {
                let target = piece.end().next_multiple_of(STEP).min(end);
                // SAFETY: as above.
                unsafe { memory::protect(Range { start: *frontier, len: target - *frontier }, Protection::ReadWrite)? };
                *frontier = target;
            }
        }
        Ok(())
    }

    /// Gives `range` up: it belongs to whoever maps something there next.
    ///
    /// # Safety
    /// Nobody uses the range, nor will.
    pub unsafe fn give_up(&self, range: Range) {
        // SAFETY: by the function's own contract.
        if unsafe { memory::unmap(range) }.is_ok() {
            self.given_up.lock().unwrap_or_else(PoisonError::into_inner).push(range);
        }
    }

    /// Makes `range` fresh address space of this arena.
    ///
    /// # Safety
    /// Nobody uses the range.
    ///
    /// # Errors
    /// `ENOMEM` at `vm.max_map_count`; the range must not be used again then.
    pub unsafe fn renew(&self, range: Range, huge_pages: Option<bool>) -> Result<(), Errno> {
        let protection = if self.exact() { Protection::None } else { Protection::ReadWrite };
        // SAFETY: by the function's own contract.
        unsafe { memory::map_fresh(range, protection)? };
        advise_huge_pages(range, huge_pages);
        Ok(())
    }
}

/// Says whether `range` may be backed by huge pages; `None` leaves it to the system's setting.
pub fn advise_huge_pages(range: Range, huge_pages: Option<bool>) {
    if let Some(wanted) = huge_pages {
        let advice = if wanted { Advice::HugePage } else { Advice::NoHugePage };
        // A kernel without transparent huge pages refuses, and then there is nothing to say.
        // SAFETY: this kind of advice changes no contents.
        let _ = unsafe { memory::advise(range, advice) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let given_up = self.given_up.get_mut().unwrap_or_else(PoisonError::into_inner);
        given_up.sort_unstable_by_key(|range| range.start);
        let mut start = self.range.start;
        for hole in given_up.iter().copied().chain([Range { start: self.range.end(), len: 0 }]) {
            if start < hole.start {
                // SAFETY: the owner of the arena goes away with every span in it.
                let _ = unsafe { memory::unmap(Range { start, len: hole.start - start }) };
            }
            start = start.max(hole.end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_halved_until_it_can() {
        let arena = Arena::reserve(1 << 50, 1 << 30).unwrap();
        assert!(arena.range().len >= 1 << 30 && arena.range().start.is_multiple_of(HUGE_PAGE_SIZE));
        assert!(Arena::reserve(1 << 62, 1 << 61).is_err());
    }

    #[test]
    fn what_no_zone_has_belongs_to_others() {
        let mut arena = Arena::reserve(1 << 32, 1 << 30).unwrap();
        let len = arena.range().len - HUGE_PAGE_SIZE;
        arena.end_at(len);
        assert_eq!(arena.range().len, len);
        let behind = Range { start: arena.range().end(), len: HUGE_PAGE_SIZE };
        assert!(memory::residence(behind, &mut [0; 512]).is_err(), "still mapped");
        arena.end_at(len);
    }

    #[test]
    fn the_frontier_moves_as_far_as_needed() {
        let arena = Arena::reserve(1 << 32, 1 << 30).unwrap();
        let start = arena.range().start;
        let mut frontier = start;
        let piece = Range { start: start + (1 << 20), len: 1 << 20 };
        arena.commit([piece].into_iter(), &mut frontier, arena.range().end()).unwrap();
        assert_eq!(frontier, if arena.exact() { start } else { start + STEP });
        // SAFETY: the range was made accessible and belongs to this test.
        unsafe { (piece.start as *mut u8).write(1) };
    }
}
