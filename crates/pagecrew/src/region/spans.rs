//! Which part of a zone is in which state: pure bookkeeping in offsets, without a system call.
//!
//! The zone is covered by segments without gap or overlap, so the sum over the states is the zone's length at any time, less what
//! was given up.
//!
//! ```text
//!  Reserved --allocate--> InUse --release--> Dirty --begin_zeroing--> Zeroing --finish_zeroing--> Zeroed
//!     ^                     ^                 | |                        |                          |
//!     |                     +----allocate-----|-+-----(revoked)----------+--------------------------+
//!     +--finish_discard-- Discarding <--begin_discard / release / shrink---------------------------+
//!     |
//!     +--give_up--> GivenUp
//! ```
//!
//! `Zeroing` and `Discarding` are transitions that a helper is at; they count as `Dirty`, since that is what they hold. A segment
//! that is being zeroed may be allocated (its helper is revoked); one that is being discarded may not, because a discard that
//! was delayed would take the new owner's data.

use crate::stats::ZoneBytes;
use std::collections::{BTreeMap, BTreeSet};

/// State of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Address space without pages; reads as zero once it is accessible.
    Reserved,
    /// Handed out.
    InUse,
    /// Free, backed by pages, contents unknown.
    Dirty,
    /// Free, backed by pages that are all zero.
    Zeroed,
    /// Free, being zeroed by the helper with this number.
    Zeroing(usize),
    /// Free, being given back.
    Discarding,
    /// Not the zone's any more: others may have mapped something there.
    GivenUp,
}

/// How the kernel's mapping of a segment differs from the zone's own. Joined segments have the marks of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Marks {
    /// Its pages were moved here, so that its mapping does not merge with its neighbours'.
    pub moved: bool,
    /// The program gave advice on it, locked it or changed its protection; never reused as it is.
    pub altered: bool,
    /// A guard page lies behind what the program may use of it; only of a span in use.
    pub guarded: bool,
    /// What lies behind what the program may use has no pages and can't get any; only of a span in use.
    pub bare: bool,
}

impl Marks {
    /// Whether the range has to be mapped anew when it becomes address space again.
    pub fn remap(self) -> bool {
        self.moved || self.altered
    }

    fn join(self, other: Marks) -> Marks {
        Marks {
            moved: self.moved || other.moved,
            altered: self.altered || other.altered,
            guarded: self.guarded || other.guarded,
            bare: self.bare || other.bare,
        }
    }
}

/// A run of the zone in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Length in bytes.
    pub len: usize,
    /// State.
    pub state: State,
    /// How it is mapped.
    pub marks: Marks,
    /// Of a segment in use, what the program may use, in bytes. Of free memory, what is backed by pages: all of it or, of what is
    /// only address space, nothing.
    pub usable: usize,
}

/// A piece of what was allocated, with the state that it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the zone.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// The state before.
    pub state: State,
    /// How much of it was backed by pages, at most: all or nothing.
    pub backed: usize,
}

/// What the memory is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Any contents.
    Any,
    /// Zeroes: pages known to be zero are preferred.
    Zeroes,
    /// Address space without pages.
    AddressSpace,
}

/// An allocated span.
#[derive(Debug, PartialEq, Eq)]
pub struct Grant {
    /// Offset in the zone.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// Its pieces in order.
    pub pieces: Vec<Piece>,
    /// The marks of all of them.
    pub marks: Marks,
}

/// The map of one zone.
pub struct SpanMap {
    len: usize,
    granule: usize,
    segments: BTreeMap<usize, Segment>,
    /// The segments that can be handed out, by length and offset: reserved, dirty, zeroed, being zeroed.
    available: [BTreeSet<(usize, usize)>; 4],
    bytes: ZoneBytes,
    /// Bytes in use by the program; backed bytes that are retained; backed bytes that are being discarded.
    used: usize,
    retained: usize,
    discarding: usize,
}

/// How many candidates a search looks at before it takes the next kind: bounds the time under the zone's lock.
const CANDIDATES: usize = 32;
/// How many segments a run may be put together from in one direction, for the same reason. A free span is up to two segments.
const RUN: usize = 128;

/// Where segments may begin and end. Spans do so at multiples of the granule; when one is free, the end of its last granule may be
/// without pages, and is a segment of its own then.
const PAGE: usize = crate::sys::PAGE_SIZE;

impl SpanMap {
    /// A zone of `len` bytes in which everything is reserved, and every span is a multiple of `granule` long.
    ///
    /// # Panics
    /// If `len` is not a multiple of `granule`, that not one of a page, or either is 0.
    pub fn new(len: usize, granule: usize) -> SpanMap {
        assert!(len > 0 && granule.is_power_of_two() && granule >= PAGE && len.is_multiple_of(granule));
        let mut map = SpanMap {
            len,
            granule,
            segments: BTreeMap::new(),
            available: Default::default(),
            bytes: ZoneBytes::default(),
            used: 0,
            retained: 0,
            discarding: 0,
        };
        map.put(0, Segment { len, state: State::Reserved, marks: Marks::default(), usable: 0 });
        map
    }

    /// Bytes in each state.
    pub fn bytes(&self) -> ZoneBytes {
        self.bytes
    }

    /// Bytes that are free and backed by pages, those on their way back to the kernel excluded.
    pub fn retained(&self) -> usize {
        self.retained
    }

    /// Bytes that the program may use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes on their way back to the kernel.
    pub fn discarding(&self) -> usize {
        self.discarding
    }

    /// The segment in use that begins at `offset`.
    pub fn in_use_at(&self, offset: usize) -> Option<Segment> {
        self.segments.get(&offset).copied().filter(|segment| segment.state == State::InUse)
    }

    /// The segment that `offset` lies in, and where it begins.
    pub fn segment_of(&self, offset: usize) -> Option<(usize, Segment)> {
        self.segments.range(..=offset).next_back().map(|(&start, &segment)| (start, segment))
    }

    /// Free segments that are backed by pages, with their offsets.
    pub fn backed(&self) -> impl Iterator<Item = (usize, Segment)> + '_ {
        self.segments.iter().map(|(&offset, &segment)| (offset, segment)).filter(|(_, segment)| {
            matches!(segment.state, State::Dirty | State::Zeroed | State::Zeroing(_) | State::Discarding)
        })
    }

    /// All segments in use, with their offsets.
    pub fn in_use(&self) -> impl Iterator<Item = (usize, Segment)> + '_ {
        self.segments
            .iter()
            .map(|(&offset, &segment)| (offset, segment))
            .filter(|(_, segment)| segment.state == State::InUse)
    }

    fn index(state: State) -> Option<usize> {
        match state {
            State::Reserved => Some(0),
            State::Dirty => Some(1),
            State::Zeroed => Some(2),
            State::Zeroing(_) => Some(3),
            State::InUse | State::Discarding | State::GivenUp => None,
        }
    }

    /// Adds a segment to the sums, or takes it out of them.
    fn tally(&mut self, segment: &Segment, add: bool) {
        let bytes = match segment.state {
            State::Reserved => &mut self.bytes.reserved,
            State::InUse => &mut self.bytes.in_use,
            State::Zeroed => &mut self.bytes.retained_zeroed,
            State::Dirty | State::Zeroing(_) | State::Discarding => &mut self.bytes.retained_dirty,
            State::GivenUp => return,
        };
        let len = segment.len as u64;
        *bytes = if add { *bytes + len } else { *bytes - len };
        let backed = match segment.state {
            State::Reserved | State::GivenUp => return,
            State::InUse => &mut self.used,
            State::Discarding => &mut self.discarding,
            State::Dirty | State::Zeroed | State::Zeroing(_) => &mut self.retained,
        };
        *backed = if add { *backed + segment.usable } else { *backed - segment.usable };
    }

    fn put(&mut self, offset: usize, segment: Segment) {
        debug_assert!(segment.len > 0 && segment.len.is_multiple_of(PAGE));
        debug_assert!(match segment.state {
            State::InUse => segment.usable <= segment.len,
            State::Reserved | State::GivenUp => segment.usable == 0,
            _ => segment.usable == segment.len,
        });
        if let Some(index) = Self::index(segment.state) {
            self.available[index].insert((segment.len, offset));
        }
        self.tally(&segment, true);
        self.segments.insert(offset, segment);
    }

    fn take(&mut self, offset: usize) -> Segment {
        let segment = self.segments.remove(&offset).expect("a segment begins here");
        if let Some(index) = Self::index(segment.state) {
            self.available[index].remove(&(segment.len, offset));
        }
        self.tally(&segment, false);
        segment
    }

    /// Puts a free segment back, joined with neighbours of the same state.
    fn put_joined(&mut self, mut offset: usize, mut segment: Segment) {
        debug_assert!(Self::index(segment.state).is_some());
        // While a range is being cut out, the segment before may end short of this one.
        if let Some((&before, &neighbour)) = self.segments.range(..offset).next_back()
            && neighbour.state == segment.state
            && before + neighbour.len == offset
        {
            self.take(before);
            offset = before;
            segment.len += neighbour.len;
            segment.usable += neighbour.usable;
            segment.marks = segment.marks.join(neighbour.marks);
        }
        if let Some(&neighbour) = self.segments.get(&(offset + segment.len))
            && neighbour.state == segment.state
        {
            self.take(offset + segment.len);
            segment.len += neighbour.len;
            segment.usable += neighbour.usable;
            segment.marks = segment.marks.join(neighbour.marks);
        }
        self.put(offset, segment);
    }

    /// Cuts the segment around `offset` there, so that one begins at `offset`.
    fn split_at(&mut self, offset: usize) {
        if offset == self.len {
            return;
        }
        let (start, segment) = self.segment_of(offset).expect("inside the zone");
        if start != offset {
            self.take(start);
            let len = offset - start;
            let usable = segment.usable.min(len);
            self.put(start, Segment { len, usable, ..segment });
            self.put(offset, Segment { len: segment.len - len, usable: segment.usable - usable, ..segment });
        }
    }

    /// Whether the segment may become part of a span. One that is being zeroed only where its helper can be revoked.
    fn usable_for(state: State, want: Want, revocable: bool) -> bool {
        match state {
            State::Reserved => true,
            State::Dirty | State::Zeroed => want != Want::AddressSpace,
            State::Zeroing(_) => want != Want::AddressSpace && revocable,
            State::InUse | State::Discarding | State::GivenUp => false,
        }
    }

    /// Where a span of `len` fits in one segment of the given kind: the smallest that is large enough.
    fn fit_in_one(&self, index: usize, len: usize, align: usize) -> Option<usize> {
        let fits = |&(size, offset): &(usize, usize)| {
            let start = offset.next_multiple_of(align);
            (start + len <= offset + size).then_some(start)
        };
        let candidates = &self.available[index];
        let close = candidates.range((len, 0)..).take(CANDIDATES).find_map(fits);
        // With a large alignment the close ones may all fail; one with room for the worst case can't.
        close.or_else(|| candidates.range((len + align - PAGE, 0)..).find_map(fits))
    }

    /// The run of usable segments around `offset`, as far as needed for `len`: through memory that is backed in both directions
    /// first, then through address space.
    fn run_around(&self, offset: usize, len: usize, want: Want, revocable: bool) -> (usize, usize) {
        let (mut start, mut end) = (offset, offset);
        for reserved_too in [false, true] {
            let usable = |segment: &Segment| {
                Self::usable_for(segment.state, want, revocable) && (reserved_too || segment.state != State::Reserved)
            };
            for (&at, segment) in self.segments.range(end..).take(RUN).take_while(|(_, segment)| usable(segment)) {
                if end - start >= len {
                    break;
                }
                end = at + segment.len;
            }
            for (&at, _) in self.segments.range(..start).rev().take(RUN).take_while(|(_, segment)| usable(segment)) {
                if end - start >= len {
                    break;
                }
                start = at;
            }
        }
        (start, end)
    }

    /// Where a span of `len` fits in a run of segments that holds as much retained memory as can be found quickly.
    fn fit_in_run(&self, len: usize, align: usize, want: Want, revocable: bool) -> Option<usize> {
        let largest = |index: usize| self.available[index].iter().rev().take(CANDIDATES);
        let zeroing = largest(3).filter(|_| revocable);
        for &(size, offset) in largest(1).chain(largest(2)).chain(zeroing) {
            // Below that, extending a small piece would cost more in fragmentation than it saves in page faults.
            if size < len / 8 {
                continue;
            }
            let (start, end) = self.run_around(offset, len + align - PAGE, want, revocable);
            let aligned = start.next_multiple_of(align);
            if aligned + len <= end {
                return Some(aligned);
            }
        }
        None
    }

    /// Hands out `len` bytes aligned to `align`, of which the program may use `usable`; `None` if there is no room. With
    /// `revocable`, pieces in state `Zeroing` may be part of it, and the caller revokes their helpers before it opens the lock.
    ///
    /// # Panics
    /// If `len` is 0 or not a multiple of the granule.
    pub fn allocate(&mut self, len: usize, usable: usize, align: usize, want: Want, revocable: bool) -> Option<Grant> {
        assert!(len > 0 && len.is_multiple_of(self.granule) && usable <= len);
        let align = align.max(self.granule);
        let order: &[usize] = match want {
            Want::Any => &[1, 2],
            Want::Zeroes => &[2, 1],
            Want::AddressSpace => &[],
        };
        let offset = order
            .iter()
            .find_map(|&index| self.fit_in_one(index, len, align))
            .or_else(|| if order.is_empty() { None } else { self.fit_in_run(len, align, want, revocable) })
            .or_else(|| self.fit_in_one(0, len, align))?;
        let (pieces, marks) = self.cut_out(offset, len);
        self.put(offset, Segment { len, state: State::InUse, marks, usable });
        Some(Grant { offset, len, pieces, marks })
    }

    /// Removes all that is in `[offset, offset + len)`, for the caller to put something in its place. What remains of a segment
    /// that was being zeroed is dirty.
    fn cut_out(&mut self, offset: usize, len: usize) -> (Vec<Piece>, Marks) {
        self.split_at(offset);
        self.split_at(offset + len);
        let (mut pieces, mut marks) = (Vec::new(), Marks::default());
        let mut at = offset;
        while at < offset + len {
            let segment = self.take(at);
            marks = marks.join(segment.marks);
            pieces.push(Piece { offset: at, len: segment.len, state: segment.state, backed: segment.usable });
            at += segment.len;
        }
        for piece in &pieces {
            if let State::Zeroing(helper) = piece.state {
                self.return_to_dirty(offset, offset + len, helper);
            }
        }
        (pieces, marks)
    }

    /// The parts of a revoked segment that were not allocated, on either side of the allocated range, are dirty again.
    fn return_to_dirty(&mut self, start: usize, end: usize, helper: usize) {
        let before = self.segments.range(..start).next_back().map(|(&at, &segment)| (at, segment));
        let after = self.segments.get(&end).map(|&segment| (end, segment));
        for (at, segment) in before.into_iter().chain(after) {
            if segment.state == State::Zeroing(helper) {
                self.take(at);
                self.put_joined(at, Segment { state: State::Dirty, ..segment });
            }
        }
    }

    /// Takes back the span that begins at `offset`, of which the first `backed` bytes may have pages: the first `keep` bytes are
    /// retained, the rest of those with pages is to be discarded. Returns what is to be discarded, as offset and length.
    ///
    /// # Panics
    /// If no span in use begins there.
    pub fn release(&mut self, offset: usize, backed: usize, keep: usize) -> Option<(usize, usize)> {
        assert!(self.in_use_at(offset).is_some());
        let segment = self.take(offset);
        let marks = Marks { guarded: false, bare: false, ..segment.marks };
        // What will be mapped anew is discarded whole.
        let backed = if marks.remap() { segment.len } else { backed.min(segment.len).next_multiple_of(PAGE) };
        let keep = if keep >= backed { backed } else { keep & !(self.granule - 1) };
        if backed < segment.len {
            let len = segment.len - backed;
            self.put_joined(offset + backed, Segment { len, state: State::Reserved, marks, usable: 0 });
        }
        if keep < backed {
            let len = backed - keep;
            self.put(offset + keep, Segment { len, state: State::Discarding, marks, usable: len });
        }
        if keep > 0 {
            self.put_joined(offset, Segment { len: keep, state: State::Dirty, marks, usable: keep });
        }
        (keep < backed).then_some((offset + keep, backed - keep))
    }

    /// Undoes an allocation that could not be made accessible: every piece gets its state back.
    pub fn undo(&mut self, grant: &Grant) {
        let segment = self.take(grant.offset);
        for piece in &grant.pieces {
            let state = if let State::Zeroing(_) = piece.state { State::Dirty } else { piece.state };
            let usable = piece.backed;
            self.put_joined(piece.offset, Segment { len: piece.len, state, marks: segment.marks, usable });
        }
    }

    /// Makes the span at `offset` `len` bytes long where it is. Returns the pieces added; `None` if its neighbours are taken.
    ///
    /// # Panics
    /// If no span in use begins there, or `len` is not more than it has.
    pub fn grow(&mut self, offset: usize, len: usize, usable: usize, revocable: bool) -> Option<Vec<Piece>> {
        let segment = self.in_use_at(offset).expect("a span in use begins here");
        assert!(len > segment.len && len.is_multiple_of(self.granule));
        let (end, wanted_end) = (offset + segment.len, offset.checked_add(len)?);
        let mut at = end;
        while at < wanted_end {
            let next = self.segments.get(&at)?;
            if !Self::usable_for(next.state, Want::Any, revocable) {
                return None;
            }
            at += next.len;
        }
        self.take(offset);
        let (pieces, marks) = self.cut_out(end, wanted_end - end);
        self.put(offset, Segment { len, state: State::InUse, marks: segment.marks.join(marks), usable });
        Some(pieces)
    }

    /// Makes the span at `offset` `len` bytes long, no longer than it is, of which `usable` may be used; `backed` bytes of it may
    /// have had pages. As with [`SpanMap::release`], the first `keep` bytes of what is cut off are retained and the rest is to be
    /// discarded.
    ///
    /// # Panics
    /// If no span in use begins there.
    pub fn shrink(
        &mut self,
        offset: usize,
        len: usize,
        usable: usize,
        backed: usize,
        keep: usize,
    ) -> Option<(usize, usize)> {
        let segment = self.in_use_at(offset).expect("a span in use begins here");
        assert!(len > 0 && len <= segment.len && usable <= len);
        self.take(offset);
        self.put(offset, Segment { len, usable, ..segment });
        if len == segment.len {
            return None;
        }
        let beyond = backed.saturating_sub(len);
        self.put(offset + len, Segment { len: segment.len - len, usable: 0, ..segment });
        self.release(offset + len, beyond, keep)
    }

    /// Sets marks on the span that `offset` lies in.
    pub fn mark(&mut self, offset: usize, marks: Marks) {
        if let Some((start, segment)) = self.segment_of(offset) {
            self.take(start);
            self.put(start, Segment { marks: segment.marks.join(marks), ..segment });
        }
    }

    /// Says that no guard lies behind the span at `offset` any more, and that there may be pages.
    pub fn unmark_tail(&mut self, offset: usize) {
        if let Some(segment) = self.segments.get_mut(&offset) {
            (segment.marks.guarded, segment.marks.bare) = (false, false);
        }
    }

    /// Takes up to `most` bytes of dirty memory to be zeroed by `helper`. Returns offset and length.
    pub fn begin_zeroing(&mut self, most: usize, helper: usize) -> Option<(usize, usize)> {
        let most = (most & !(self.granule - 1)).max(self.granule);
        let &(size, offset) = self.available[1].iter().next_back()?;
        let len = size.min(most);
        self.split_at(offset + len);
        let segment = self.take(offset);
        self.put(offset, Segment { state: State::Zeroing(helper), ..segment });
        Some((offset, len))
    }

    /// Says that the helper has zeroed what it took at `offset`. Returns false if it was revoked meanwhile.
    pub fn finish_zeroing(&mut self, offset: usize, helper: usize, whole: bool) -> bool {
        match self.segments.get(&offset) {
            Some(segment) if segment.state == State::Zeroing(helper) => {
                let segment = self.take(offset);
                let state = if whole { State::Zeroed } else { State::Dirty };
                self.put_joined(offset, Segment { state, ..segment });
                whole
            }
            _ => false,
        }
    }

    /// Takes about `most` bytes of retained memory to be discarded, from the end of the zone so that what stays is packed low.
    /// Returns offset and length of one piece; `None` when nothing is retained.
    pub fn begin_discard(&mut self, most: usize) -> Option<(usize, usize)> {
        let most = (most & !(self.granule - 1)).max(self.granule);
        let (start, segment) = self
            .segments
            .iter()
            .rev()
            .map(|(&offset, &segment)| (offset, segment))
            .find(|(_, segment)| matches!(segment.state, State::Dirty | State::Zeroed))?;
        // At a whole granule, so that no huge page is cut in two.
        let end = start + segment.len;
        let offset = (end.saturating_sub(most) & !(self.granule - 1)).max(start);
        let len = end - offset;
        self.split_at(offset);
        let segment = self.take(offset);
        self.put(offset, Segment { state: State::Discarding, ..segment });
        Some((offset, len))
    }

    /// The marks of what is being discarded at `offset`.
    ///
    /// # Panics
    /// If nothing is being discarded there.
    pub fn discarding_marks(&self, offset: usize) -> Marks {
        let segment = self.segments[&offset];
        assert_eq!(segment.state, State::Discarding);
        segment.marks
    }

    /// Says that the `len` bytes at `offset` are address space again; with `remapped`, by a fresh mapping.
    ///
    /// # Panics
    /// If they were not being discarded.
    pub fn finish_discard(&mut self, offset: usize, len: usize, remapped: bool) {
        let segment = self.take(offset);
        assert!(segment.state == State::Discarding && segment.len == len);
        let marks = if remapped { Marks::default() } else { segment.marks };
        self.put_joined(offset, Segment { state: State::Reserved, marks, usable: 0, ..segment });
    }

    /// Gives up all that is only address space. Returns where, as offset and length.
    pub fn give_up(&mut self) -> Vec<(usize, usize)> {
        let reserved: Vec<_> = self.available[0].iter().map(|&(len, offset)| (offset, len)).collect();
        for &(offset, len) in &reserved {
            self.take(offset);
            self.put(offset, Segment { len, state: State::GivenUp, marks: Marks::default(), usable: 0 });
        }
        reserved
    }

    /// Whether what lies at `offset` is the zone's.
    pub fn owns(&self, offset: usize) -> bool {
        offset < self.len && self.segment_of(offset).is_some_and(|(_, segment)| segment.state != State::GivenUp)
    }

    /// Takes the free segment at `offset` out of use for good: it counts as in use, and nobody has its address.
    pub fn lose(&mut self, offset: usize) {
        let segment = self.take(offset);
        self.put(offset, Segment { state: State::InUse, marks: Marks::default(), usable: 0, len: segment.len });
    }

    /// In a forked child: what its parent wiped or was mapped anew (`wiped`) is address space; whatever else a helper of the parent was at is dirty.
    pub fn after_fork(&mut self, wiped: impl Fn(&Segment) -> bool) {
        let backed: Vec<(usize, Segment)> = self.backed().collect();
        for (offset, segment) in backed {
            let state = match segment.state {
                _ if wiped(&segment) => State::Reserved,
                State::Zeroed => State::Zeroed,
                _ => State::Dirty,
            };
            // Taking the old one may have been done by a join with its neighbour.
            if self.segments.get(&offset).is_some_and(|now| now.state == segment.state && now.len == segment.len) {
                self.take(offset);
                let segment = match state {
                    State::Reserved => Segment { state, marks: Marks::default(), usable: 0, ..segment },
                    _ => Segment { state, ..segment },
                };
                self.put_joined(offset, segment);
            }
        }
    }

    /// Checks all that must hold; for tests.
    ///
    /// # Panics
    /// If something does not.
    #[cfg(test)]
    pub fn check(&self) {
        let mut at = 0;
        let mut sum = ZoneBytes::default();
        let (mut indexed, mut given_up) = (0, 0);
        for (&offset, segment) in &self.segments {
            assert_eq!(offset, at, "a gap or an overlap");
            assert!(segment.len > 0 && segment.len.is_multiple_of(PAGE));
            if segment.state == State::InUse {
                assert!(segment.len.is_multiple_of(self.granule) && offset.is_multiple_of(self.granule));
                assert!(segment.usable <= segment.len);
            } else {
                let backed = !matches!(segment.state, State::Reserved | State::GivenUp);
                assert_eq!(segment.usable, if backed { segment.len } else { 0 });
            }
            match segment.state {
                State::Reserved => sum.reserved += segment.len as u64,
                State::InUse => sum.in_use += segment.len as u64,
                State::Zeroed => sum.retained_zeroed += segment.len as u64,
                State::GivenUp => given_up += segment.len,
                _ => sum.retained_dirty += segment.len as u64,
            }
            if let Some(index) = Self::index(segment.state) {
                assert!(self.available[index].contains(&(segment.len, offset)));
                indexed += 1;
            }
            at += segment.len;
        }
        assert_eq!((at, sum, sum.total()), (self.len, self.bytes, (self.len - given_up) as u64));
        assert_eq!(indexed, self.available.iter().map(BTreeSet::len).sum::<usize>());
        let backed = |wanted: fn(State) -> bool| -> usize {
            self.segments.values().filter(|segment| wanted(segment.state)).map(|segment| segment.usable).sum()
        };
        assert_eq!(self.discarding, backed(|state| state == State::Discarding));
        assert_eq!(self.used, backed(|state| state == State::InUse));
        assert_eq!(self.retained, backed(|state| matches!(state, State::Dirty | State::Zeroed | State::Zeroing(_))));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: usize = 4096;

    fn map() -> SpanMap {
        SpanMap::new(64 * G, G)
    }

    fn allocate(map: &mut SpanMap, granules: usize, want: Want) -> Grant {
        let grant = map.allocate(granules * G, granules * G, 1, want, true).unwrap();
        map.check();
        grant
    }

    #[test]
    fn retained_memory_is_used_before_address_space() {
        let mut map = map();
        let first = allocate(&mut map, 8, Want::Any);
        assert_eq!(first.pieces, [Piece { offset: 0, len: 8 * G, state: State::Reserved, backed: 0 }]);
        map.release(first.offset, usize::MAX, usize::MAX);
        let again = allocate(&mut map, 8, Want::Any);
        assert_eq!(again.pieces, [Piece { offset: 0, len: 8 * G, state: State::Dirty, backed: 8 * G }]);
    }

    #[test]
    fn zeroes_come_from_zeroed_memory_and_the_rest_from_dirty() {
        let mut map = map();
        let (a, b) = (allocate(&mut map, 4, Want::Any), allocate(&mut map, 4, Want::Any));
        let gap = allocate(&mut map, 1, Want::Any);
        map.release(a.offset, usize::MAX, usize::MAX);
        let (offset, len) = map.begin_zeroing(usize::MAX, 3).unwrap();
        assert!(map.finish_zeroing(offset, 3, true));
        map.release(b.offset, usize::MAX, usize::MAX);
        assert_eq!((offset, len), (a.offset, 4 * G));
        assert_eq!(allocate(&mut map, 4, Want::Any).pieces[0].state, State::Dirty);
        assert_eq!(allocate(&mut map, 4, Want::Zeroes).pieces[0].state, State::Zeroed);
        assert!(map.in_use_at(gap.offset).is_some());
    }

    #[test]
    fn a_span_can_be_put_together_from_retained_and_reserved_memory() {
        let mut map = map();
        let small = allocate(&mut map, 4, Want::Any);
        map.release(small.offset, usize::MAX, usize::MAX);
        let large = allocate(&mut map, 10, Want::Any);
        let states: Vec<State> = large.pieces.iter().map(|piece| piece.state).collect();
        assert_eq!((large.offset, states), (0, vec![State::Dirty, State::Reserved]));
    }

    #[test]
    fn memory_that_is_being_zeroed_is_taken_from_its_helper() {
        let mut map = map();
        let span = allocate(&mut map, 8, Want::Any);
        map.release(span.offset, usize::MAX, usize::MAX);
        map.begin_zeroing(4 * G, 0).unwrap();
        let grant = allocate(&mut map, 6, Want::Zeroes);
        assert_eq!(grant.pieces[0], Piece { offset: 0, len: 4 * G, state: State::Zeroing(0), backed: 4 * G });
        assert!(!map.finish_zeroing(0, 0, true), "the helper was revoked");
        map.check();
        // Where helpers can't be revoked, it is left alone.
        let mut map = SpanMap::new(64 * G, G);
        let span = map.allocate(8 * G, 8 * G, 1, Want::Any, false).unwrap();
        map.release(span.offset, usize::MAX, usize::MAX);
        map.begin_zeroing(8 * G, 0).unwrap();
        assert_eq!(map.allocate(6 * G, 6 * G, 1, Want::Zeroes, false).unwrap().pieces[0].state, State::Reserved);
    }

    #[test]
    fn memory_that_is_being_discarded_is_never_handed_out() {
        let mut map = SpanMap::new(8 * G, G);
        let span = allocate(&mut map, 8, Want::Any);
        assert_eq!(map.release(span.offset, 8 * G, 2 * G), Some((2 * G, 6 * G)));
        assert_eq!(map.allocate(3 * G, 3 * G, 1, Want::Any, true), None);
        map.finish_discard(2 * G, 6 * G, false);
        map.check();
        assert!(map.allocate(8 * G, 8 * G, 1, Want::Any, true).is_some());
    }

    #[test]
    fn what_cannot_be_made_accessible_is_undone() {
        let mut map = map();
        let span = allocate(&mut map, 4, Want::Any);
        map.release(span.offset, usize::MAX, usize::MAX);
        let before = map.bytes();
        let grant = allocate(&mut map, 8, Want::Any);
        map.undo(&grant);
        map.check();
        assert_eq!(map.bytes(), before);
    }

    #[test]
    fn what_is_only_address_space_can_be_given_up() {
        let mut map = map();
        let (first, gap, last) =
            (allocate(&mut map, 8, Want::Any), allocate(&mut map, 2, Want::Any), allocate(&mut map, 4, Want::Any));
        let (offset, len) = map.release(gap.offset, usize::MAX, 0).unwrap();
        map.finish_discard(offset, len, false);
        let mut given_up = map.give_up();
        given_up.sort_unstable();
        assert_eq!(given_up, [(8 * G, 2 * G), (14 * G, 50 * G)]);
        map.check();
        assert_eq!(map.bytes().total(), 12 * G as u64);
        assert_eq!(map.allocate(G, G, 1, Want::Any, true), None);
        assert_eq!(map.grow(first.offset, 9 * G, 9 * G, true), None);
        assert!(
            map.owns(0) && map.owns(last.offset) && !map.owns(gap.offset) && !map.owns(60 * G) && !map.owns(64 * G)
        );
        // What was in use then is used again, and only that.
        let (offset, len) = map.release(first.offset, usize::MAX, 0).unwrap();
        map.finish_discard(offset, len, false);
        map.check();
        assert_eq!(allocate(&mut map, 8, Want::Any).offset, 0);
    }

    #[test]
    fn alignment_up_to_the_zone() {
        let mut map = SpanMap::new(1024 * G, G);
        allocate(&mut map, 1, Want::Any);
        let grant = map.allocate(G, G, 256 * G, Want::Any, true).unwrap();
        assert_eq!(grant.offset, 256 * G);
        map.check();
    }

    /// What the model remembers of a span: where, how long.
    #[derive(Debug, Clone)]
    enum Step {
        Allocate(usize, u32, bool),
        Release(usize, usize, usize),
        Grow(usize, usize),
        Shrink(usize, usize, usize),
        BeginZeroing(usize),
        FinishZeroing(bool),
        BeginDiscard(usize),
        FinishDiscard(usize, bool),
        Fork,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1usize..20, 0u32..6, any::<bool>()).prop_map(|(len, align, zero)| Step::Allocate(len, align, zero)),
            3 => (any::<usize>(), 0usize..20, 0usize..20).prop_map(|(which, bare, keep)| Step::Release(which, bare, keep)),
            1 => (any::<usize>(), 1usize..20).prop_map(|(which, more)| Step::Grow(which, more)),
            1 => (any::<usize>(), 1usize..20, 0usize..20).prop_map(|(which, len, keep)| Step::Shrink(which, len, keep)),
            2 => (1usize..20).prop_map(Step::BeginZeroing),
            2 => any::<bool>().prop_map(Step::FinishZeroing),
            1 => (1usize..20).prop_map(Step::BeginDiscard),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, remapped)| Step::FinishDiscard(which, remapped)),
            1 => Just(Step::Fork),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        /// Against a model with one state a granule: spans never overlap, contents are what the states say, sums add up.
        #[test]
        fn any_sequence_agrees_with_a_model(steps in steps()) {
            let granules = 128;
            let mut map = SpanMap::new(granules * G, G);
            // The model's memory: None for reserved (reads as zero), Some(true) for zero pages, Some(false) for unknown contents.
            let mut memory: Vec<Option<bool>> = vec![None; granules];
            let mut spans: Vec<(usize, usize)> = Vec::new();
            let mut zeroing: Option<(usize, usize)> = None;
            let mut discards: Vec<(usize, usize)> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate(len, align, zero) => {
                        let want = if zero { Want::Zeroes } else { Want::Any };
                        if let Some(grant) = map.allocate(len * G, len * G, G << align, want, true) {
                            prop_assert_eq!(grant.offset % (G << align), 0);
                            let (start, end) = (grant.offset / G, grant.offset / G + len);
                            prop_assert!(spans.iter().all(|&(at, n)| end <= at || at + n <= start), "overlaps a span in use");
                            prop_assert!(discards.iter().all(|&(at, n)| end <= at || at + n <= start), "overlaps a discard");
                            let mut at = start;
                            for piece in &grant.pieces {
                                prop_assert_eq!(piece.offset, at * G);
                                for &granule in &memory[at..at + piece.len / G] {
                                    match piece.state {
                                        State::Reserved => prop_assert_eq!(granule, None),
                                        State::Zeroed => prop_assert_eq!(granule, Some(true)),
                                        State::Dirty | State::Zeroing(_) => prop_assert!(granule.is_some()),
                                        State::InUse | State::Discarding | State::GivenUp => prop_assert!(false, "handed out"),
                                    }
                                }
                                if let State::Zeroing(_) = piece.state { zeroing = None; }
                                at += piece.len / G;
                            }
                            prop_assert_eq!(at, end);
                            memory[start..end].fill(Some(false));
                            spans.push((start, len));
                        }
                    }
                    Step::Release(which, bare, keep) if !spans.is_empty() => {
                        let (start, len) = spans.swap_remove(which % spans.len());
                        // The program never touched the end of it.
                        let backed = len - bare.min(len);
                        memory[start + backed..start + len].fill(None);
                        if let Some((offset, bytes)) = map.release(start * G, backed * G, keep * G) {
                            prop_assert_eq!(offset / G + bytes / G, start + backed);
                            discards.push((offset / G, bytes / G));
                        }
                    }
                    Step::Grow(which, more) if !spans.is_empty() => {
                        let index = which % spans.len();
                        let (start, len) = spans[index];
                        if let Some(pieces) = map.grow(start * G, (len + more) * G, (len + more) * G, true) {
                            prop_assert!(spans.iter().enumerate().all(|(other, &(at, n))| other == index || start + len + more <= at || at + n <= start));
                            if pieces.iter().any(|piece| matches!(piece.state, State::Zeroing(_))) { zeroing = None; }
                            memory[start + len..start + len + more].fill(Some(false));
                            spans[index].1 = len + more;
                        }
                    }
                    Step::Shrink(which, to, keep) if !spans.is_empty() => {
                        let index = which % spans.len();
                        let (start, len) = spans[index];
                        let to = to.min(len);
                        if let Some((offset, bytes)) = map.shrink(start * G, to * G, to * G, len * G, keep * G) {
                            discards.push((offset / G, bytes / G));
                        }
                        spans[index].1 = to;
                    }
                    Step::BeginZeroing(most) if zeroing.is_none() => {
                        zeroing = map.begin_zeroing(most * G, 7).map(|(offset, len)| (offset / G, len / G));
                    }
                    Step::FinishZeroing(whole) => {
                        if let Some((start, len)) = zeroing.take() {
                            prop_assert_eq!(map.finish_zeroing(start * G, 7, whole), whole);
                            if whole { memory[start..start + len].fill(Some(true)); }
                        }
                    }
                    Step::BeginDiscard(most) => {
                        if let Some((offset, len)) = map.begin_discard(most * G) {
                            discards.push((offset / G, len / G));
                        }
                    }
                    Step::FinishDiscard(which, remapped) if !discards.is_empty() => {
                        let (start, len) = discards.swap_remove(which % discards.len());
                        map.finish_discard(start * G, len * G, remapped);
                        memory[start..start + len].fill(None);
                    }
                    Step::Fork => {
                        let wiped: Vec<(usize, usize)> = map.backed().map(|(offset, segment)| (offset / G, segment.len / G)).collect();
                        map.after_fork(|_| true);
                        for (start, len) in wiped { memory[start..start + len].fill(None); }
                        (zeroing, discards) = (None, Vec::new());
                        prop_assert_eq!(map.retained() + map.discarding(), 0);
                    }
                    _ => {}
                }
                map.check();
            }
        }
    }
}

/// The hand-over of memory that a helper is zeroing to a thread that allocates it, in every interleaving.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::crew::ahead::{Ahead, Revoked};
    use crate::sys::memory::Range;
    use loom::sync::atomic::Ordering;
    use loom::sync::{Arc, Mutex};

    const GRANULE: usize = 4096;
    const ZONE: Range = Range { start: 0, len: GRANULE };

    struct Zone {
        map: Mutex<SpanMap>,
        ahead: Ahead,
        /// The memory: one number. The lock stands for the restartable sequence: the flag is read and the zero written in one
        /// step, which the barrier (taking and opening the lock) can't fall into.
        memory: Mutex<u32>,
    }

    fn take_in(zone: &Zone, map: &mut SpanMap) {
        zone.ahead.collect(ZONE, |done| {
            map.finish_zeroing(done.range.start, done.slot, done.whole);
        });
    }

    /// What a helper does, without the zone's lock.
    fn help(zone: &Zone) {
        zone.ahead.work(|_, _, revoked| {
            let mut memory = zone.memory.lock().unwrap();
            let whole = revoked.load(Ordering::Relaxed) == 0;
            if whole {
                *memory = 0;
            }
            (whole, 1)
        });
    }

    #[test]
    fn an_owner_never_sees_a_zero_that_is_not_its_own() {
        loom::model(|| {
            let mut map = SpanMap::new(GRANULE, GRANULE);
            let span = map.allocate(GRANULE, GRANULE, 1, Want::Any, true).unwrap();
            map.release(span.offset, usize::MAX, usize::MAX);
            let zone = Zone { map: Mutex::new(map), ahead: Ahead::new(), memory: Mutex::new(7) };
            zone.ahead.set_out(|slot| {
                let (start, len) = zone.map.lock().unwrap().begin_zeroing(GRANULE, slot)?;
                Some(Range { start, len })
            });
            let zone = Arc::new(zone);
            let helper = {
                let zone = zone.clone();
                loom::thread::spawn(move || help(&zone))
            };
            let mut map = zone.map.lock().unwrap();
            take_in(&zone, &mut map);
            let grant = map.allocate(GRANULE, GRANULE, 1, Want::Zeroes, true).unwrap();
            if let State::Zeroing(slot) = grant.pieces[0].state {
                let barrier = || {
                    drop(zone.memory.lock().unwrap());
                    Ok::<(), ()>(())
                };
                assert_ne!(zone.ahead.revoke_with(slot, barrier), Revoked::StillAtIt);
            }
            drop(map);
            if grant.pieces[0].state == State::Zeroed {
                assert_eq!(*zone.memory.lock().unwrap(), 0, "handed out as zero");
            }
            *zone.memory.lock().unwrap() = 42;
            helper.join().unwrap();
            assert_eq!(*zone.memory.lock().unwrap(), 42, "a late zero");
            let mut map = zone.map.lock().unwrap();
            take_in(&zone, &mut map);
            assert_eq!(map.in_use_at(0).unwrap().len, GRANULE);
            assert_eq!(zone.ahead.under_way(), 0);
        });
    }
}
