//! Which part of a zone is in which state: a pure state machine in offsets, without a system call of its own.
//!
//! The zone is covered by segments without gap or overlap, so the sum over the states is the zone's length at any time, less what
//! was given up. Behind `top`, nothing was ever handed out, and no segment says so.
//!
//! ```text
//!  Reserved --allocate--> InUse <--> Cached        (by whoever has the span, without the zone's lock)
//!     ^                     |
//!     |                  release
//!     |                     v
//!     |                   Dirty --begin_zeroing--> Zeroing --finish_zeroing--> Zeroed
//!     |                     |                        |                          |
//!     |                     +--------allocate--------+--------------------------+--> InUse
//!     +--finish_discard-- Discarding <--begin_discard / release of what is altered
//!     |
//!     +--give_up--> GivenUp
//! ```
//!
//! **Transitions return effects**: [`Grant`] says which pieces have to be made accessible and which helpers to be revoked, a discard which
//! range goes back. The caller does that without the zone's lock, and reports a failure with [`SpanMap::undo`] or [`SpanMap::lose`].
//!
//! `Zeroing` and `Discarding` are transitions that somebody is at; they count as `Dirty`, since that is what they hold. A segment
//! that is being zeroed may be allocated (its helper is revoked); one that is being discarded may not, because a discard that
//! was delayed would take the new owner's data.

use super::bins::{self, Bins};
use super::bits::Bits;
use super::classes;
use super::colour::{COLOURED_LEAST, COLOURED_MOST, ROOM};
use super::links::Links;
use super::page_map::PageMap;
use crate::stats::ZoneBytes;
use crate::sys::Errno;
use crate::sys::memory::Range;
use std::ops::Deref;
use std::sync::Arc;

/// State of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Address space without pages; reads as zero once it is accessible.
    Reserved,
    /// Handed out.
    InUse,
    /// Handed out to a cache, in which it waits for the next user.
    Cached,
    /// Free, backed by pages, contents unknown.
    Dirty,
    /// Free, backed by pages that are all zero.
    Zeroed,
    /// Free, being zeroed by the helper with this number.
    Zeroing(u8),
    /// Free, being given back.
    Discarding,
    /// Not the zone's any more: others may have mapped something there.
    GivenUp,
    /// Could not be mapped anew. It counts as in use, and nobody has its address.
    Lost,
}

/// How the kernel's mapping of a segment differs from the zone's own. Joined segments have the marks of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Marks {
    /// Its pages were moved here, so that its mapping does not merge with its neighbours'.
    pub moved: bool,
    /// The program gave advice on it, locked it or changed its protection; never reused as it is.
    pub altered: bool,
    /// Its last page is a guard; only of a span in use.
    pub guarded: bool,
    /// It was address space when it was handed out: its pages say how much of it is used. Only of a span in use.
    pub fresh: bool,
    /// A child that is forked now finds it zero. Only of free memory.
    pub wiped: bool,
}

impl Marks {
    /// Whether the range has to be mapped anew when it becomes address space again.
    pub fn remap(self) -> bool {
        self.moved || self.altered
    }

    fn join(self, other: Marks) -> Marks {
        Marks { moved: self.moved || other.moved, altered: self.altered || other.altered, ..Marks::default() }
    }

    /// The marks that stay with memory when its user gives it back.
    fn lasting(self) -> Marks {
        self.join(Marks::default())
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
    /// Of a span, its size class and one; 0 for a span that no cache takes.
    pub class: u8,
}

impl Segment {
    fn free(len: usize, state: State, marks: Marks) -> Segment {
        Segment { len, state, marks, class: 0 }
    }

    /// What the program may use of a span, in bytes.
    pub fn usable(&self) -> usize {
        if self.marks.guarded { self.len - PAGE } else { self.len }
    }

    fn handed_out(&self) -> bool {
        matches!(self.state, State::InUse | State::Cached)
    }
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
    /// The marks before.
    pub marks: Marks,
}

impl Piece {
    /// How much of it may have pages, in bytes: all or nothing.
    pub fn backed(&self) -> usize {
        if self.state == State::Reserved { 0 } else { self.len }
    }
}

/// The most pieces that a span is put together from.
const PIECES: usize = 16;

/// The pieces of a span in order. They lie in place: nothing here may need memory to give memory.
#[derive(Clone, Copy)]
pub struct Pieces {
    list: [Piece; PIECES],
    count: usize,
}

impl Pieces {
    fn new() -> Pieces {
        let none = Piece { offset: 0, len: 0, state: State::Reserved, marks: Marks::default() };
        Pieces { list: [none; PIECES], count: 0 }
    }

    fn push(&mut self, piece: Piece) {
        self.list[self.count] = piece;
        self.count += 1;
    }

    /// Bytes that may have pages.
    pub fn backed(&self) -> usize {
        self.iter().map(Piece::backed).sum()
    }
}

impl Deref for Pieces {
    type Target = [Piece];

    fn deref(&self) -> &[Piece] {
        &self.list[..self.count]
    }
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.deref().fmt(f)
    }
}

impl PartialEq for Pieces {
    fn eq(&self, other: &Pieces) -> bool {
        **self == **other
    }
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

/// What a span has to be.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Length in bytes, whole pages.
    pub len: usize,
    /// Alignment of its offset.
    pub align: usize,
    /// What it is wanted for.
    pub want: Want,
    /// Its size class and one, or 0.
    pub class: u8,
    /// Whether pieces in state `Zeroing` may be part of it: their helpers can be revoked.
    pub revocable: bool,
    /// Whether memory without pages may be part of it.
    pub fresh: bool,
    /// The most bytes of free memory that may be moved to where there is none, in whole granules.
    pub transfer: usize,
}

/// Free memory that is to be moved to where a span begins its use: its pages go from one granule to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Transfer {
    /// Offset in the zone of where they are.
    pub from: usize,
    /// Offset of where they are to be: granules of which the span has at least a part.
    pub to: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Room for this many of them in a grant.
pub const TRANSFERS: usize = 8;

/// An allocated span. Its pieces are the effects: what was `Reserved` is to be made accessible, what was `Zeroing` to be revoked. And there
/// are the transfers: the caller reports each with [`SpanMap::finish_discard`] or [`SpanMap::keep`], and then all of them with
/// [`SpanMap::finish_transfers`].
#[derive(Debug, PartialEq)]
pub struct Grant {
    /// Offset in the zone.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// Its pieces in order.
    pub pieces: Pieces,
    transfers: [Transfer; TRANSFERS],
    transfer_count: usize,
    /// Where what is left of granules that pages are on their way to lies, before and behind the span. Nobody may look at it before they
    /// are there.
    rests: [Option<usize>; 2],
}

impl Grant {
    /// Room for what is about to be allocated.
    pub fn new() -> Grant {
        let transfers = [Transfer::default(); TRANSFERS];
        Grant { offset: 0, len: 0, pieces: Pieces::new(), transfers, transfer_count: 0, rests: [None; 2] }
    }

    /// What is to be moved.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers[..self.transfer_count]
    }

    /// Whether pages are on their way to the granule at `offset`.
    fn brings(&self, offset: usize) -> bool {
        self.transfers().iter().any(|transfer| (transfer.to..transfer.to + transfer.len).contains(&offset))
    }
}

impl Default for Grant {
    fn default() -> Grant {
        Grant::new()
    }
}

/// The map of one zone.
pub struct SpanMap {
    len: usize,
    /// What is given back begins and ends at multiples of this, and a page that is touched may bring all others of its granule.
    granule: usize,
    /// Whether what is not in use may be accessible.
    loose: bool,
    /// Nothing behind this offset was ever handed out.
    top: usize,
    /// Up to here the map may have memory.
    mapped: usize,
    /// Up to here the map can be written to.
    opened: usize,
    /// What begins where.
    map: Arc<PageMap>,
    /// The pages at which something begins.
    heads: Bits,
    /// The segments that can be handed out, by length: reserved, dirty, zeroed, being zeroed.
    available: Box<[Bins]>,
    links: Links,
    bytes: ZoneBytes,
    /// Bytes handed out; retained; being discarded.
    used: usize,
    retained: usize,
    discarding: usize,
    /// Segments whose pages were moved to where they are.
    moved: usize,
}

/// How many candidates a search looks at before it takes the next kind: bounds the time under the zone's lock.
const CANDIDATES: usize = 16;
/// How many segments a run may be put together from, for the same reason.
const RUN: usize = 12;
/// How many segments are looked at for whole granules to give back: one shorter than two may have none.
const DISCARD_CANDIDATES: usize = 64;

/// Spans of this length and more with small pages don't begin at distances of a power of two, but so much further apart. It is the step
/// between sizes there: what is cut off fits other spans.
const SPREAD_LEAST: usize = 2 << 20;
const SPREAD: usize = 64 << 10;
/// Longer spans with huge pages are joined with what is free around them at once.
const JOINED_LEAST: usize = COLOURED_MOST + ROOM;

/// The map of so much address space may keep its memory: a thousandth of it.
const MAPPED_MOST: usize = 32 << 20;

/// The map is opened for so much address space at a time.
const OPENED: usize = 64 << 20;

/// Where segments begin and end.
const PAGE: usize = crate::sys::PAGE_SIZE;

impl SpanMap {
    /// A zone of `len` bytes in which everything is reserved, and what is given back is a multiple of `granule` long.
    ///
    /// # Errors
    /// `ENOMEM` without address space for the map.
    ///
    /// # Panics
    /// If `len` is not a multiple of `granule`, that not one of a page, or either is 0.
    pub fn new(len: usize, granule: usize) -> Result<SpanMap, Errno> {
        SpanMap::on(PageMap::new(len / PAGE)?, granule)
    }

    /// As [`SpanMap::new`] for a zone of which `map` is the map: nothing begins there yet.
    ///
    /// # Errors
    /// As [`SpanMap::new`].
    ///
    /// # Panics
    /// As [`SpanMap::new`].
    pub fn on(map: PageMap, granule: usize) -> Result<SpanMap, Errno> {
        let pages = map.pages();
        let spans = SpanMap::of(map, Bits::new(pages)?, Links::new(pages)?, granule);
        Ok(SpanMap { loose: true, opened: pages * PAGE, ..spans })
    }

    /// As [`SpanMap::on`] where what can be written to is accounted: nothing may be accessible that is not in use or retained, and `map` is
    /// [closed](PageMap::closed).
    ///
    /// # Errors
    /// As [`SpanMap::new`].
    ///
    /// # Panics
    /// As [`SpanMap::new`].
    pub fn exact(map: PageMap, granule: usize) -> Result<SpanMap, Errno> {
        let pages = map.pages();
        Ok(SpanMap::of(map, Bits::closed(pages)?, Links::closed(pages)?, granule))
    }

    fn of(map: PageMap, heads: Bits, links: Links, granule: usize) -> SpanMap {
        let pages = map.pages();
        let len = pages * PAGE;
        assert!(len > 0 && granule.is_power_of_two() && granule >= PAGE && len.is_multiple_of(granule));
        assert!(pages < u32::MAX as usize);
        SpanMap {
            len,
            granule,
            loose: false,
            top: 0,
            mapped: 0,
            opened: 0,
            map: Arc::new(map),
            heads,
            available: (0..4).map(|_| Bins::new()).collect(),
            links,
            bytes: ZoneBytes { reserved: len as u64, ..ZoneBytes::default() },
            used: 0,
            retained: 0,
            discarding: 0,
            moved: 0,
        }
    }

    /// Whether the map can be written to up to `end`, which it is made to where need be.
    fn opens(&mut self, end: usize) -> bool {
        if end <= self.opened {
            return true;
        }
        let to = end.next_multiple_of(OPENED).min(self.len);
        let (from_page, to_page) = (self.opened / PAGE, to / PAGE);
        let opened = self.map.open(from_page, to_page).is_ok()
            && self.links.open(from_page, to_page).is_ok()
            && self.heads.open(from_page, to_page).is_ok();
        if opened {
            self.opened = to;
        }
        opened
    }

    /// What lies where, for those who look without the zone's lock.
    pub fn page_map(&self) -> Arc<PageMap> {
        self.map.clone()
    }

    /// Where the map itself lies.
    pub fn own_memory(&self) -> impl Iterator<Item = Range> + '_ {
        self.heads.ranges().chain([self.map.range(), self.links.range()])
    }

    /// Nothing behind this offset was ever handed out.
    pub fn top(&self) -> usize {
        self.top
    }

    /// Where the zone ends: behind that, everything was given up.
    pub fn end(&self) -> usize {
        self.len
    }

    /// Bytes in each state.
    pub fn bytes(&self) -> ZoneBytes {
        self.bytes
    }

    /// Bytes that are free and backed by pages, those on their way back to the kernel excluded.
    pub fn retained(&self) -> usize {
        self.retained
    }

    /// Bytes handed out, to the program and to caches.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes on their way back to the kernel.
    pub fn discarding(&self) -> usize {
        self.discarding
    }

    /// Segments whose pages were moved to where they are: each may take two mappings.
    pub fn moved(&self) -> usize {
        self.moved
    }

    /// The segment that begins at `offset`.
    fn at(&self, offset: usize) -> Option<Segment> {
        if offset < self.top { self.map.get(offset / PAGE) } else { None }
    }

    /// The span in use that begins at `offset`.
    pub fn in_use_at(&self, offset: usize) -> Option<Segment> {
        self.at(offset).filter(|segment| offset.is_multiple_of(PAGE) && segment.state == State::InUse)
    }

    /// The segment that `offset` lies in, and where it begins.
    pub fn segment_of(&self, offset: usize) -> Option<(usize, Segment)> {
        if offset >= self.top {
            let rest = Segment::free(self.len.checked_sub(self.top)?, State::Reserved, Marks::default());
            return (offset < self.len).then_some((self.top, rest));
        }
        let start = self.heads.before(offset / PAGE + 1)? * PAGE;
        Some((start, self.at(start)?))
    }

    /// The segment that ends at `offset`, and where it begins.
    fn before(&self, offset: usize) -> Option<(usize, Segment)> {
        let start = self.heads.before(offset / PAGE)? * PAGE;
        // While a range is being cut out, the segment before may end short of it.
        self.at(start).filter(|segment| start + segment.len == offset).map(|segment| (start, segment))
    }

    /// All segments below `top` in order, with their offsets.
    pub fn segments(&self) -> impl Iterator<Item = (usize, Segment)> + '_ {
        self.segments_from(0)
    }

    fn segments_from(&self, mut offset: usize) -> impl Iterator<Item = (usize, Segment)> + '_ {
        std::iter::from_fn(move || {
            let segment = self.at(offset)?;
            let at = offset;
            offset += segment.len;
            Some((at, segment))
        })
    }

    /// Free segments that are backed by pages, with their offsets.
    pub fn backed(&self) -> impl Iterator<Item = (usize, Segment)> + '_ {
        self.segments().filter(|(_, segment)| {
            matches!(segment.state, State::Dirty | State::Zeroed | State::Zeroing(_) | State::Discarding)
        })
    }

    /// The first free segment that is backed by pages from that on which begins at `offset`.
    pub fn next_backed(&self, offset: usize) -> Option<(usize, Segment)> {
        self.segments_from(offset).find(|(_, segment)| {
            matches!(segment.state, State::Dirty | State::Zeroed | State::Zeroing(_) | State::Discarding)
        })
    }

    /// All spans that were handed out, those in caches included, with their offsets.
    pub fn handed_out(&self) -> impl Iterator<Item = (usize, Segment)> + '_ {
        self.segments().filter(|(_, segment)| segment.handed_out())
    }

    fn index(state: State) -> Option<usize> {
        match state {
            State::Reserved => Some(0),
            State::Dirty => Some(1),
            State::Zeroed => Some(2),
            State::Zeroing(_) => Some(3),
            State::InUse | State::Cached | State::Discarding | State::GivenUp | State::Lost => None,
        }
    }

    /// Adds a segment to the sums, or takes it out of them.
    fn tally(&mut self, segment: &Segment, add: bool) {
        if segment.marks.moved {
            self.moved = if add { self.moved + 1 } else { self.moved - 1 };
        }
        let bytes = match segment.state {
            State::Reserved => &mut self.bytes.reserved,
            State::InUse | State::Cached | State::Lost => &mut self.bytes.in_use,
            State::Zeroed => &mut self.bytes.retained_zeroed,
            State::Dirty | State::Zeroing(_) | State::Discarding => &mut self.bytes.retained_dirty,
            State::GivenUp => return,
        };
        let len = segment.len as u64;
        *bytes = if add { *bytes + len } else { *bytes - len };
        let backed = match segment.state {
            State::Reserved | State::GivenUp | State::Lost => return,
            State::InUse | State::Cached => &mut self.used,
            State::Discarding => &mut self.discarding,
            State::Dirty | State::Zeroed | State::Zeroing(_) => &mut self.retained,
        };
        *backed = if add { *backed + segment.len } else { *backed - segment.len };
    }

    fn put(&mut self, offset: usize, segment: Segment) {
        debug_assert!(segment.len > 0 && segment.len.is_multiple_of(PAGE) && offset + segment.len <= self.top);
        self.tally(&segment, true);
        if segment.state == State::Reserved && offset + segment.len == self.top && !segment.marks.remap() {
            self.top = offset;
            return;
        }
        let page = offset / PAGE;
        if let Some(index) = Self::index(segment.state) {
            self.available[index].insert(&self.links, page, segment.len / PAGE);
        }
        self.map.set(page, &segment);
        self.heads.insert(page);
    }

    fn take(&mut self, offset: usize) -> Segment {
        let page = offset / PAGE;
        let segment = self.at(offset).expect("a segment begins here");
        if let Some(index) = Self::index(segment.state) {
            self.available[index].remove(&self.links, page, segment.len / PAGE);
        }
        self.tally(&segment, false);
        self.map.clear(page);
        self.heads.remove(page);
        segment
    }

    /// Puts a free segment back, joined with neighbours of the same state. What has to be mapped anew stays apart: each such segment is
    /// one mapping, and only its own range is mapped anew.
    fn put_joined(&mut self, mut offset: usize, mut segment: Segment) {
        debug_assert!(Self::index(segment.state).is_some());
        // A few zero pages that came with a huge page would keep the rest of it from going back.
        let granule = self.granule;
        let absorbed = |segment: &Segment, neighbour: &Segment| {
            segment.state == State::Dirty && neighbour.state == State::Zeroed && neighbour.len < granule
        };
        let alike = |neighbour: &Segment, segment: &Segment| {
            (neighbour.state == segment.state || absorbed(segment, neighbour))
                && !neighbour.marks.remap()
                && !segment.marks.remap()
                && neighbour.marks.wiped == segment.marks.wiped
        };
        // Behind what was absorbed may be more of the same.
        while let Some((before, neighbour)) = self.before(offset)
            && alike(&neighbour, &segment)
        {
            self.take(before);
            offset = before;
            segment.len += neighbour.len;
        }
        while let Some(neighbour) = self.at(offset + segment.len)
            && alike(&neighbour, &segment)
        {
            self.take(offset + segment.len);
            segment.len += neighbour.len;
        }
        self.put(offset, segment);
    }

    /// Cuts the segment around `offset` there, so that one begins at `offset`.
    fn split_at(&mut self, offset: usize) {
        if offset >= self.top {
            return;
        }
        let (start, segment) = self.segment_of(offset).expect("inside the zone");
        if start != offset {
            let len = offset - start;
            self.take(start);
            self.put(offset, Segment { len: segment.len - len, ..segment });
            self.put(start, Segment { len, ..segment });
        }
    }

    /// Whether the segment may become part of a span.
    fn fits(state: State, request: &Request) -> bool {
        match state {
            State::Reserved => request.fresh || request.want == Want::AddressSpace,
            State::Dirty | State::Zeroed => request.want != Want::AddressSpace,
            State::Zeroing(_) => request.want != Want::AddressSpace && request.revocable,
            State::InUse | State::Cached | State::Discarding | State::GivenUp | State::Lost => false,
        }
    }

    /// Where the span fits in one segment of the given kind: the shortest of those that are looked at.
    fn fit_in_one(&self, index: usize, request: &Request) -> Option<usize> {
        let place = |page: usize| {
            let (offset, size) = (page * PAGE, self.map.get(page)?.len);
            let start = offset.next_multiple_of(request.align);
            (start + request.len <= offset + size).then_some((size, start))
        };
        let bins = &self.available[index];
        let mut best: Option<(usize, usize)> = None;
        for page in bins.from(&self.links, request.len / PAGE).take(CANDIDATES) {
            let Some(found) = place(page) else { continue };
            best = Some(best.map_or(found, |best| best.min(found)));
            // Those of the next bins are longer.
            if best.is_some_and(|(size, _)| size == request.len || !bins::alike(size / PAGE, found.0 / PAGE)) {
                break;
            }
        }
        // With a large alignment all of those may fail; one with room for the worst case can't.
        let roomy = (request.len + request.align - PAGE) / PAGE;
        best.or_else(|| bins.from(&self.links, roomy).take(CANDIDATES).find_map(place)).map(|(_, start)| start)
    }

    /// The run of segments around `offset` that fit, as far as needed for `len`: through memory that is backed in both directions
    /// first, then through address space.
    fn run_around(&self, offset: usize, len: usize, request: &Request) -> (usize, usize) {
        let (mut start, mut end, mut count) = (offset, offset, 0);
        for reserved_too in [false, true] {
            let fits = |segment: &Segment| {
                Self::fits(segment.state, request) && (reserved_too || segment.state != State::Reserved)
            };
            while end - start < len
                && count < RUN
                && let Some(segment) = self.at(end).filter(fits)
            {
                (end, count) = (end + segment.len, count + 1);
            }
            while end - start < len
                && count < RUN
                && let Some((before, _)) = self.before(start).filter(|(_, segment)| fits(segment))
            {
                (start, count) = (before, count + 1);
            }
        }
        if end == self.top && request.fresh && end - start < len {
            end = (start + len).min(self.len);
        }
        (start, end)
    }

    /// Where the span fits in a run of segments that holds as much retained memory as can be found quickly.
    fn fit_in_run(&self, request: &Request) -> Option<usize> {
        let Request { len, align, .. } = *request;
        // Dirty segments that lie side by side are one, but for those that were moved: without other kinds there is no run.
        let others = request.fresh || self.bytes.retained_zeroed > 0 || !self.available[3].is_empty();
        if !others && self.moved == 0 {
            return None;
        }
        // Below that, extending a small piece would cost more in fragmentation than it saves in page faults.
        let least = (len / 8 / PAGE).max(1);
        let kinds: &[usize] = if request.revocable { &[1, 2, 3] } else { &[1, 2] };
        kinds.iter().flat_map(|&kind| self.available[kind].down_to(&self.links, least).take(CANDIDATES)).find_map(
            |page| {
                let (start, end) = self.run_around(page * PAGE, len + align - PAGE, request);
                let aligned = start.next_multiple_of(align);
                (aligned + len <= end).then_some(aligned)
            },
        )
    }

    /// Hands out a span; `None` if there is no room. The caller makes accessible what was `Reserved` and revokes the helpers of what
    /// was `Zeroing`, or calls [`SpanMap::undo`].
    ///
    /// # Panics
    /// If the length is 0 or not whole pages.
    pub fn allocate(&mut self, request: &Request) -> Option<Grant> {
        let mut grant = Grant::new();
        self.allocate_into(request, &mut grant).then_some(grant)
    }

    /// As [`SpanMap::allocate`], with room for the grant that need not be moved; says whether there is one.
    ///
    /// # Panics
    /// As [`SpanMap::allocate`].
    pub fn allocate_into(&mut self, request: &Request, grant: &mut Grant) -> bool {
        assert!(request.len > 0 && request.len.is_multiple_of(PAGE));
        let request =
            Request { align: request.align.max(PAGE), len: self.len_here(request.len, request.class), ..*request };
        let Request { len, want, .. } = request;
        let order: &[usize] = match want {
            Want::Any => &[1, 2],
            Want::Zeroes => &[2, 1],
            Want::AddressSpace => &[],
        };
        let offset = order
            .iter()
            .find_map(|&index| self.fit_in_one(index, &request))
            .or_else(|| if order.is_empty() { None } else { self.fit_in_run(&request) })
            .or_else(|| {
                let fresh = || self.fit_in_one(0, &request).or_else(|| self.fit_at_top(&request));
                let offset = if request.fresh { fresh() } else { None };
                offset.map(|offset| self.with_what_lies_before(offset, &request))
            });
        // With what its last granule has behind it.
        let (granule, zone_end) = (self.granule, self.len);
        let end = |offset: usize| (offset + len).next_multiple_of(granule).min(zone_end);
        let Some(offset) = offset.filter(|&offset| self.opens(end(offset))) else { return false };
        (grant.offset, grant.len) = (offset, len);
        let marks = self.cut_out(offset, len, &mut grant.pieces);
        let fresh = grant.pieces.backed() == 0;
        let span = Segment { len, state: State::InUse, marks: Marks { fresh, ..marks }, class: request.class };
        self.put(offset, span);
        self.find_transfers(if want == Want::Any { request.transfer } else { 0 }, grant);
        self.keep_rest_of_granules(grant);
        if !grant.transfers().is_empty() {
            // Of pages that were moved there, nothing says whether the program uses them.
            self.map.set(offset / PAGE, &Segment { marks, ..span });
        }
        true
    }

    /// What was address space around a new span in the huge pages that it begins and ends in gets pages with it: zero pages, which
    /// come first for the next request, or those that are moved there.
    fn keep_rest_of_granules(&mut self, grant: &mut Grant) {
        let (offset, end) = (grant.offset, grant.offset + grant.len);
        let reserved = |piece: Option<&Piece>| piece.is_some_and(|piece| piece.state == State::Reserved);
        grant.rests = [None; 2];
        if !self.loose {
            return;
        }
        let behind = (end, end.next_multiple_of(self.granule).min(self.len), end - PAGE, grant.pieces.last());
        let before = (offset & !(self.granule - 1), offset, offset, grant.pieces.first());
        for (rest, (from, to, page, piece)) in [behind, before].into_iter().enumerate() {
            if from < to && reserved(piece) {
                let brought = grant.brings(page);
                self.give_reserved_pages(from, to, if brought { State::Discarding } else { State::Zeroed });
                grant.rests[rest] = brought.then_some(from);
            }
        }
    }

    /// Says that every transfer of a grant was reported: what came with the span is free memory like any other.
    pub fn finish_transfers(&mut self, grant: &Grant) {
        grant.rests.into_iter().flatten().for_each(|offset| self.keep(offset));
    }

    /// Finds up to `most` bytes of free memory to be moved to granules that a new span has a part of and that have no page.
    fn find_transfers(&mut self, most: usize, grant: &mut Grant) {
        grant.transfer_count = 0;
        if most < self.granule || !self.loose {
            return;
        }
        let mut most = most;
        for index in 0..grant.pieces.len() {
            let piece = grant.pieces[index];
            if piece.state != State::Reserved || piece.marks.remap() {
                continue;
            }
            let (mut to, end) = self.empty_granules(piece.offset, piece.offset + piece.len);
            while to < end
                && most >= self.granule
                && grant.transfer_count < TRANSFERS
                && let Some((from, len)) = self.begin_transfer((end - to).min(most))
            {
                grant.transfers[grant.transfer_count] = Transfer { from, to, len };
                grant.transfer_count += 1;
                (to, most) = (to + len, most - len);
            }
        }
    }

    /// The granules without a page of which `[start, end)`, which was address space and is a span's now, is at least a part.
    fn empty_granules(&self, start: usize, end: usize) -> (usize, usize) {
        let mask = self.granule - 1;
        let (first, last) = (start & !mask, end.next_multiple_of(self.granule));
        let reserved = |at: usize, from: usize, to: usize| {
            from == to
                || at >= self.top
                || self.segment_of(at).is_some_and(|(begin, segment)| {
                    let whole = begin <= from && to <= begin + segment.len;
                    whole && segment.state == State::Reserved && !segment.marks.remap()
                })
        };
        let first = if reserved(first, first, start) { first } else { first + self.granule };
        let last = if last <= self.len && reserved(end, end, last) { last } else { end & !mask };
        (first, last)
    }

    /// Takes whole granules of dirty memory, no more than `most` bytes, to be moved elsewhere: from the end of one of the longest segments,
    /// as what is discarded. Returns offset and length.
    fn begin_transfer(&mut self, most: usize) -> Option<(usize, usize)> {
        let most = most & !(self.granule - 1);
        let whole = |page: usize| {
            let (start, segment) = (page * PAGE, self.map.get(page)?);
            let (first, last) = (start.next_multiple_of(self.granule), (start + segment.len) & !(self.granule - 1));
            (first < last && !segment.marks.remap()).then(|| (first.max(last.saturating_sub(most)), last))
        };
        let candidates = self.available[1].down_to(&self.links, self.granule / PAGE);
        let (from, to) = candidates.take(CANDIDATES).find_map(whole)?;
        self.begin_discard_of(from, to);
        Some((from, to - from))
    }

    /// Says that what was to be discarded at `offset`, or to be moved from there, still has its pages.
    ///
    /// # Panics
    /// If nothing was.
    pub fn keep(&mut self, offset: usize) {
        let segment = self.take(offset);
        assert!(segment.state == State::Discarding);
        self.put_joined(offset, Segment { state: State::Dirty, ..segment });
    }

    /// The length of a span here. With small pages a long one has a little more, of which only the addresses are used: programs use the first
    /// bytes of a block most, and with distances of a power of two those of many blocks share a few entries of the processor's TLB. A short one
    /// has room for its block's line.
    fn len_here(&self, len: usize, class: u8) -> usize {
        match len {
            _ if self.granule > PAGE || class == 0 => len,
            SPREAD_LEAST.. => len + SPREAD,
            ..COLOURED_LEAST => len + ROOM,
            _ => len,
        }
    }

    /// Whether a span of this length is long for this zone: it is touched whole, which costs far more than a lock, and would keep the memory
    /// around it in pieces while it waits in a cache.
    pub fn is_long(&self, len: usize) -> bool {
        self.granule > PAGE && len > JOINED_LEAST
    }

    /// The class of a span that became so long here.
    fn class_here(&self, len: usize, class: u8) -> u8 {
        if self.is_long(len) { 0 } else { class }
    }

    /// The class of a span that was handed out here with this length.
    pub fn class_of(&self, len: usize) -> u8 {
        classes::class_of(match len {
            _ if self.granule > PAGE => len,
            _ if len >= SPREAD_LEAST + SPREAD => len - SPREAD,
            // A short one has the room, and the classes of longer ones are further apart than that.
            _ => len.saturating_sub(ROOM),
        })
    }

    /// No cache takes the span in use at `offset` when it comes back.
    pub fn take_class(&mut self, offset: usize) {
        if let Some(segment) = self.in_use_at(offset) {
            self.map.set(offset / PAGE, &Segment { class: 0, ..segment });
        }
    }

    /// Puts a free segment back, joined with others where its state allows that.
    fn put_free(&mut self, offset: usize, segment: Segment) {
        if segment.state == State::Discarding { self.put(offset, segment) } else { self.put_joined(offset, segment) }
    }

    /// Makes free memory in `state` of the address space that lies in `[from, to)` at the end of it that a span was just cut out of.
    fn give_reserved_pages(&mut self, from: usize, to: usize, state: State) {
        if from >= to {
            return;
        }
        if from == self.top {
            self.top = to;
            self.bytes.reserved -= (to - from) as u64;
            self.put_free(from, Segment::free(to - from, state, Marks::default()));
            return;
        }
        // Whichever of its ends is at the span, the segment that reaches there.
        for at in [from, to - PAGE] {
            if let Some((start, segment)) = self.segment_of(at)
                && segment.state == State::Reserved
                && start < self.top
            {
                let first = start.max(from);
                self.split_at(first);
                // At its end may be the hole of which the span is made.
                if to < start + segment.len {
                    self.split_at(to);
                }
                let segment = self.take(first);
                self.put_free(first, Segment { state, ..segment });
            }
        }
    }

    /// From now on, nothing may be accessible that is not in use or retained.
    pub fn be_exact(&mut self) {
        self.loose = false;
    }

    /// Where a span in address space at `offset` may begin as well: at free memory right before it, however little that is. Otherwise
    /// such rests would add up.
    fn with_what_lies_before(&self, mut offset: usize, request: &Request) -> usize {
        for _ in 0..RUN / 2 {
            let before = self.before(offset).filter(|(start, segment)| {
                let little = Self::fits(segment.state, request) && segment.len < request.len;
                little && start.is_multiple_of(request.align)
            });
            let Some((start, _)) = before else { break };
            offset = start;
        }
        offset
    }

    /// Where the span fits behind everything that was ever handed out.
    fn fit_at_top(&self, request: &Request) -> Option<usize> {
        let start = self.top.checked_next_multiple_of(request.align)?;
        (start.checked_add(request.len)? <= self.len).then_some(start)
    }

    /// Removes all that is in `[offset, offset + len)`, for the caller to put something in its place. What remains of a segment
    /// that was being zeroed is dirty. Returns the marks of all of it.
    fn cut_out(&mut self, offset: usize, len: usize, pieces: &mut Pieces) -> Marks {
        let end = offset + len;
        if end > self.top {
            // What lies behind the top becomes segments first: a gap before the span, and its part of the span.
            let top = self.top;
            self.top = end;
            self.mapped = self.mapped.max(end.next_multiple_of(self.granule));
            for (from, to) in [(top, offset.max(top)), (offset.max(top), end)] {
                if from < to {
                    self.map.set(from / PAGE, &Segment::free(to - from, State::Reserved, Marks::default()));
                    self.available[0].insert(&self.links, from / PAGE, (to - from) / PAGE);
                    self.heads.insert(from / PAGE);
                }
            }
        }
        pieces.count = 0;
        if let Some((start, segment)) = self.segment_of(offset)
            && start + segment.len >= end
        {
            // What nearly always happens: all of it lies in one segment.
            self.take(start);
            self.put_rest(end, Segment { len: start + segment.len - end, ..segment });
            self.put_rest(start, Segment { len: offset - start, ..segment });
            pieces.push(Piece { offset, len, state: segment.state, marks: segment.marks });
            return segment.marks.lasting();
        }
        self.split_at(offset);
        self.split_at(end);
        let (mut at, mut marks) = (offset, Marks::default());
        while at < end {
            let segment = self.take(at);
            marks = marks.join(segment.marks);
            pieces.push(Piece { offset: at, len: segment.len, state: segment.state, marks: segment.marks });
            at += segment.len;
        }
        for piece in pieces.iter() {
            if let State::Zeroing(helper) = piece.state {
                self.return_to_dirty(offset, end, helper);
            }
        }
        marks
    }

    /// Puts back what is left of a segment that something was cut out of, if anything.
    fn put_rest(&mut self, offset: usize, rest: Segment) {
        match rest.state {
            _ if rest.len == 0 => {}
            // Its helper is revoked.
            State::Zeroing(_) => self.put_joined(offset, Segment { state: State::Dirty, ..rest }),
            _ => self.put(offset, rest),
        }
    }

    /// The parts of a revoked segment that were not allocated, on either side of the allocated range, are dirty again.
    fn return_to_dirty(&mut self, start: usize, end: usize, helper: u8) {
        let before = self.before(start);
        let after = self.at(end).map(|segment| (end, segment));
        for (at, segment) in before.into_iter().chain(after) {
            if segment.state == State::Zeroing(helper) {
                self.take(at);
                self.put_joined(at, Segment { state: State::Dirty, ..segment });
            }
        }
    }

    /// Takes back the span that begins at `offset`: it is retained. One that the program altered goes back instead; its range is returned,
    /// as offset and length, for the caller to discard.
    ///
    /// # Panics
    /// If no span that was handed out begins there.
    pub fn release(&mut self, offset: usize) -> Option<(usize, usize)> {
        let segment = self.take(offset);
        assert!(segment.handed_out());
        let marks = segment.marks.lasting();
        if marks.altered {
            self.put(offset, Segment::free(segment.len, State::Discarding, marks));
            return Some((offset, segment.len));
        }
        self.put_joined(offset, Segment::free(segment.len, State::Dirty, marks));
        None
    }

    /// As [`SpanMap::release`] for a span that its user could not have altered, or that has to wait: it is retained. Returns its length.
    ///
    /// # Panics
    /// If no span that was handed out begins there.
    pub fn release_retained(&mut self, offset: usize) -> usize {
        let segment = self.take(offset);
        assert!(segment.handed_out());
        self.put_joined(offset, Segment::free(segment.len, State::Dirty, segment.marks.lasting()));
        segment.len
    }

    /// Takes back the span at `offset`, whose pages have gone elsewhere: nothing of it is retained. Returns its length, for the caller to
    /// discard.
    ///
    /// # Panics
    /// If no span in use begins there.
    pub fn release_unbacked(&mut self, offset: usize) -> usize {
        let segment = self.take(offset);
        assert!(segment.handed_out());
        self.put(offset, Segment::free(segment.len, State::Discarding, segment.marks.lasting()));
        segment.len
    }

    /// Undoes an allocation that could not be made accessible: every piece gets its state back, and nothing is to be moved.
    pub fn undo(&mut self, grant: &Grant) {
        self.take(grant.offset);
        self.put_back(&grant.pieces);
        grant.transfers().iter().for_each(|transfer| self.keep(transfer.from));
        self.finish_transfers(grant);
    }

    fn put_back(&mut self, pieces: &Pieces) {
        for piece in pieces.iter() {
            let state = if let State::Zeroing(_) = piece.state { State::Dirty } else { piece.state };
            self.put_joined(piece.offset, Segment::free(piece.len, state, piece.marks));
        }
    }

    /// Makes the span at `offset` `len` bytes long where it is. Returns the pieces added; `None` if its neighbours are taken.
    ///
    /// # Panics
    /// If no span in use begins there, or `len` is not more than it has.
    pub fn grow(&mut self, offset: usize, len: usize, class: u8, revocable: bool) -> Option<Pieces> {
        let segment = self.in_use_at(offset).expect("a span in use begins here");
        assert!(len > segment.len && len.is_multiple_of(PAGE));
        let class = self.class_here(len, class);
        let request = Request { len, align: PAGE, want: Want::Any, class, revocable, fresh: true, transfer: 0 };
        let (end, wanted_end) = (offset + segment.len, offset.checked_add(len).filter(|&end| end <= self.len)?);
        let (mut at, mut count) = (end, 0);
        while at < wanted_end && at < self.top {
            let next = self.at(at).filter(|next| Self::fits(next.state, &request))?;
            (at, count) = (at + next.len, count + 1);
            if count > RUN {
                return None;
            }
        }
        if !self.opens(wanted_end) {
            return None;
        }
        let mut pieces = Pieces::new();
        let marks = self.cut_out(end, wanted_end - end, &mut pieces);
        self.take(offset);
        let marks = Marks { guarded: segment.marks.guarded, ..segment.marks.join(marks) };
        self.put(offset, Segment { len, state: State::InUse, marks, class });
        Some(pieces)
    }

    /// Undoes [`SpanMap::grow`] of the span at `offset`, which was `before`, and what it got could not be made accessible.
    pub fn undo_growth(&mut self, offset: usize, before: Segment, pieces: &Pieces) {
        self.take(offset);
        self.put(offset, before);
        self.put_back(pieces);
    }

    /// Makes the span at `offset` `len` bytes long, no longer than it is. What is cut off is treated as by [`SpanMap::release`].
    ///
    /// # Panics
    /// If no span in use begins there.
    pub fn shrink(&mut self, offset: usize, len: usize, class: u8) -> Option<(usize, usize)> {
        let segment = self.in_use_at(offset).expect("a span in use begins here");
        assert!(len > 0 && len <= segment.len);
        let class = self.class_here(len, class);
        self.take(offset);
        let marks = Marks { fresh: false, ..segment.marks };
        if len == segment.len {
            self.put(offset, Segment { marks, class, ..segment });
            return None;
        }
        self.put(offset + len, Segment { len: segment.len - len, ..segment });
        self.put(offset, Segment { len, class, marks, ..segment });
        self.release(offset + len)
    }

    /// Sets marks on the span in use at `offset`, and takes those away that are not set.
    pub fn mark(&mut self, offset: usize, marks: Marks) {
        if let Some(segment) = self.in_use_at(offset) {
            self.tally(&segment, false);
            let segment = Segment { marks, ..segment };
            self.tally(&segment, true);
            self.map.set(offset / PAGE, &segment);
        }
    }

    /// Says that the program altered the span that `offset` lies in.
    pub fn mark_altered(&mut self, offset: usize) {
        if let Some((start, segment)) = self.segment_of(offset)
            && segment.handed_out()
        {
            self.map.mark_altered(start / PAGE);
        }
    }

    /// Takes a piece of up to `most` bytes of dirty memory, of one of the longest segments and that of at least `least`, to be zeroed by
    /// `helper`. `find` is called with the offset and length of such segments until it says where in one the piece is, if anywhere. Returns
    /// its offset and length.
    pub fn begin_zeroing(
        &mut self,
        most: usize,
        least: usize,
        helper: u8,
        mut find: impl FnMut(usize, usize) -> Option<Range>,
    ) -> Option<(usize, usize)> {
        let candidates = self.available[1].down_to(&self.links, least / PAGE).take(CANDIDATES);
        let segments = candidates.filter_map(|page| Some((page * PAGE, self.map.get(page)?.len)));
        let Range { start, len } =
            segments.filter(|&(_, len)| len >= least).find_map(|(offset, len)| find(offset, len))?;
        let len = len.min((most & !(PAGE - 1)).max(PAGE));
        self.split_at(start);
        self.split_at(start + len);
        let segment = self.take(start);
        self.put(start, Segment { state: State::Zeroing(helper), ..segment });
        Some((start, len))
    }

    /// Says that the helper has zeroed what it took at `offset`. Returns false if it was revoked meanwhile.
    pub fn finish_zeroing(&mut self, offset: usize, helper: u8, whole: bool) -> bool {
        match self.at(offset) {
            Some(segment) if segment.state == State::Zeroing(helper) => {
                self.take(offset);
                let state = if whole { State::Zeroed } else { State::Dirty };
                self.put_joined(offset, Segment { state, ..segment });
                whole
            }
            _ => false,
        }
    }

    /// Takes about `most` bytes of retained memory to be discarded, from the end of one of the longest segments, so that what stays is
    /// packed low. Whole granules unless `in_need`: the kernel takes the rest of a huge page only when it is short of memory. Where the zone
    /// is exact, no huge page reaches into address space, so what lies beside nothing in use goes back whatever its length. Returns offset
    /// and length of one piece; `None` when there is none.
    pub fn begin_discard(&mut self, most: usize, in_need: bool) -> Option<(usize, usize)> {
        let granule = if in_need { PAGE } else { self.granule };
        let most = most.checked_next_multiple_of(granule).unwrap_or(usize::MAX).max(granule);
        let whole = |page: usize| {
            let (start, len) = (page * PAGE, self.map.get(page)?.len);
            // What has to be mapped anew is discarded whole, and a huge page is cut for it.
            let remap = self.map.get(page)?.marks.remap();
            let end = start + len;
            let (first, last) = if remap {
                (start, end)
            } else {
                let in_use = |beside: Option<Segment>| beside.is_some_and(|segment| segment.state == State::InUse);
                let whole_from = self.loose || in_use(self.before(start).map(|(_, segment)| segment));
                let whole_to = self.loose || in_use(self.at(end));
                (
                    if whole_from { start.next_multiple_of(granule) } else { start },
                    if whole_to { end & !(granule - 1) } else { end },
                )
            };
            // From a granule's begin on, or what is cut off leaves a part of a huge page.
            let from = last.saturating_sub(most) & !(granule - 1);
            (first < last).then(|| (start, if remap { first } else { first.max(from) }, last))
        };
        let least = if self.loose { granule / PAGE } else { 1 };
        let longest =
            |kind: usize| self.available[kind].down_to(&self.links, least).take(DISCARD_CANDIDATES).find_map(whole);
        let (_, from, to) = longest(1).or_else(|| longest(2))?;
        self.begin_discard_of(from, to);
        Some((from, to - from))
    }

    /// Takes `[from, to)`, which is a part of one free segment.
    fn begin_discard_of(&mut self, from: usize, to: usize) {
        self.split_at(from);
        self.split_at(to);
        let segment = self.take(from);
        self.put(from, Segment { state: State::Discarding, ..segment });
    }

    /// The marks of what is being discarded at `offset`.
    ///
    /// # Panics
    /// If nothing is being discarded there.
    pub fn discarding_marks(&self, offset: usize) -> Marks {
        let segment = self.at(offset).expect("a segment begins here");
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
        self.put_joined(offset, Segment::free(len, State::Reserved, marks));
    }

    /// Gives the memory of the map itself back, once much of the zone is address space again.
    pub fn give_back_map(&mut self) {
        if self.mapped - self.top > MAPPED_MOST {
            // Links of runs that left their lists are left as they were, and nobody reads them.
            self.map.forget(self.top / PAGE, self.mapped / PAGE);
            self.links.forget(self.top / PAGE, self.mapped / PAGE);
            self.mapped = self.top;
        }
    }

    /// Gives up all that is only address space, for `unmap` to take it from the region. The zone ends where the last segment does.
    pub fn give_up(&mut self, mut unmap: impl FnMut(usize, usize)) {
        let mut offset = 0;
        while let Some(segment) = self.at(offset) {
            if segment.state == State::Reserved {
                self.take(offset);
                self.put(offset, Segment::free(segment.len, State::GivenUp, Marks::default()));
                unmap(offset, segment.len);
            }
            offset += segment.len;
        }
        let rest = self.len - self.top;
        if rest > 0 {
            unmap(self.top, rest);
            self.bytes.reserved -= rest as u64;
            self.len = self.top;
            self.map.close_from(self.top / PAGE);
            self.links.close_from(self.top / PAGE);
        }
    }

    /// Whether what lies at `offset` is the zone's.
    pub fn owns(&self, offset: usize) -> bool {
        self.segment_of(offset).is_some_and(|(_, segment)| segment.state != State::GivenUp)
    }

    /// Takes what is being discarded at `offset` out of use for good: it could not be mapped anew.
    pub fn lose(&mut self, offset: usize) {
        let segment = self.take(offset);
        self.put(offset, Segment::free(segment.len, State::Lost, Marks::default()));
    }

    /// Says whether a child that is forked now finds the free segment at `offset` zero.
    pub fn set_wiped(&mut self, offset: usize, wiped: bool) {
        if let Some(segment) = self.at(offset) {
            self.map.set(offset / PAGE, &Segment { marks: Marks { wiped, ..segment.marks }, ..segment });
        }
    }

    /// In a forked child: what its parent had wiped is address space; whatever else a helper of the parent was at is dirty.
    pub fn after_fork(&mut self) {
        let mut offset = 0;
        while let Some(segment) = self.at(offset) {
            let wiped = segment.marks.wiped && !segment.marks.remap();
            let state = match segment.state {
                // Nobody is left to map it anew, and it can't be used as it is.
                State::Discarding if segment.marks.altered => State::Lost,
                State::Dirty | State::Zeroed | State::Zeroing(_) | State::Discarding if wiped => State::Reserved,
                State::Zeroing(_) | State::Discarding => State::Dirty,
                state => state,
            };
            if state != segment.state {
                self.take(offset);
                let marks = Marks { wiped: false, ..segment.marks };
                let segment = Segment::free(segment.len, state, marks);
                if state == State::Lost { self.put(offset, segment) } else { self.put_joined(offset, segment) }
            }
            // It may have been joined with the one behind it.
            offset = self.segment_of(offset).map_or(self.len, |(start, segment)| start + segment.len);
        }
    }

    /// Checks all that must hold; for tests.
    ///
    /// # Panics
    /// If something does not.
    #[cfg(test)]
    pub fn check(&self) {
        let mut sum = ZoneBytes { reserved: (self.len - self.top) as u64, ..ZoneBytes::default() };
        let (mut at, mut given_up, mut listed) = (0, 0, 0);
        let (mut used, mut retained, mut discarding) = (0, 0, 0);
        let mut previous = None;
        for (offset, segment) in self.segments() {
            assert_eq!(offset, at, "a gap or an overlap");
            assert!(segment.len > 0 && segment.len.is_multiple_of(PAGE));
            assert_eq!(self.heads.before(offset / PAGE), previous.map(|at: usize| at / PAGE));
            assert_eq!(self.segment_of(offset + segment.len - 1), Some((offset, segment)));
            let bytes = match segment.state {
                State::Reserved => &mut sum.reserved,
                State::InUse | State::Cached | State::Lost => &mut sum.in_use,
                State::Zeroed => &mut sum.retained_zeroed,
                State::GivenUp => &mut given_up,
                _ => &mut sum.retained_dirty,
            };
            *bytes += segment.len as u64;
            match segment.state {
                State::InUse | State::Cached => used += segment.len,
                State::Discarding => discarding += segment.len,
                State::Dirty | State::Zeroed | State::Zeroing(_) => retained += segment.len,
                State::Reserved => assert!(offset + segment.len < self.top, "belongs behind the top"),
                State::GivenUp | State::Lost => {}
            }
            if let Some(index) = Self::index(segment.state) {
                let page = offset / PAGE;
                assert!(self.available[index].from(&self.links, segment.len / PAGE).any(|found| found == page));
                listed += 1;
            }
            at += segment.len;
            previous = Some(offset);
        }
        assert_eq!((at, sum), (self.top, self.bytes));
        assert_eq!(sum.total() + given_up, self.len as u64);
        assert_eq!(listed, self.available.iter().map(|bins| bins.from(&self.links, 1).count()).sum::<usize>());
        assert_eq!((self.used(), self.retained(), self.discarding()), (used, retained, discarding));
        assert_eq!(self.moved(), self.segments().filter(|(_, segment)| segment.marks.moved).count());
        let of = |states: fn(State) -> bool| self.segments().filter(move |(_, segment)| states(segment.state));
        let backed = |state| matches!(state, State::Dirty | State::Zeroed | State::Zeroing(_) | State::Discarding);
        assert!(of(backed).eq(self.backed()) && self.next_backed(0) == of(backed).next());
        assert!(of(|state| matches!(state, State::InUse | State::Cached)).eq(self.handed_out()));
        let rest = Segment::free(self.len - self.top, State::Reserved, Marks::default());
        assert_eq!(self.segment_of(self.top), (rest.len > 0).then_some((self.top, rest)));
        assert_eq!(self.segment_of(self.len), None);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::memory;
    use proptest::prelude::*;

    const G: usize = 4096;

    fn map() -> SpanMap {
        SpanMap::new(64 * G, G).unwrap()
    }

    /// All of it has its pages.
    fn all(start: usize, len: usize) -> Option<Range> {
        Some(Range { start, len })
    }

    fn request(pages: usize, want: Want) -> Request {
        Request { len: pages * G, align: 1, want, class: 0, revocable: true, fresh: true, transfer: 0 }
    }

    fn allocate(map: &mut SpanMap, pages: usize, want: Want) -> Grant {
        let grant = map.allocate(&request(pages, want)).unwrap();
        map.check();
        grant
    }

    fn piece(page: usize, pages: usize, state: State) -> Piece {
        Piece { offset: page * G, len: pages * G, state, marks: Marks::default() }
    }

    #[test]
    fn an_exact_map_is_opened_as_far_as_it_is_used() {
        let (pages, some) = (4 * OPENED / G, 3);
        let mut map = SpanMap::exact(PageMap::closed(pages).unwrap(), G).unwrap();
        let first = allocate(&mut map, some, Want::Any);
        assert_eq!(map.opened, OPENED);
        // Whatever is written behind a map's open part ends the process.
        assert!(map.grow(first.offset, OPENED + some * G, 0, true).is_some());
        map.check();
        assert_eq!(map.opened, 2 * OPENED);
        let last = allocate(&mut map, pages - OPENED / G - some, Want::Zeroes);
        assert_eq!((last.offset + last.len, map.opened), (4 * OPENED, 4 * OPENED));
        assert!(map.allocate(&request(1, Want::Any)).is_none());
        give_back(&mut map, last.offset);
        give_back(&mut map, first.offset);
        assert_eq!((map.top(), map.opened), (0, 4 * OPENED));
    }

    /// Gives a span back to the kernel.
    fn give_back(map: &mut SpanMap, offset: usize) {
        let len = map.release_unbacked(offset);
        map.finish_discard(offset, len, false);
        map.check();
    }

    /// As [`give_back`] for a span that the program has altered: it may begin and end anywhere in a granule.
    fn map_anew(map: &mut SpanMap, offset: usize) {
        map.mark_altered(offset);
        let len = map.release_unbacked(offset);
        map.finish_discard(offset, len, true);
        map.check();
    }

    #[test]
    fn retained_memory_is_used_before_address_space() {
        let mut map = map();
        let first = allocate(&mut map, 8, Want::Any);
        assert_eq!(*first.pieces, [piece(0, 8, State::Reserved)]);
        map.release(first.offset);
        let again = allocate(&mut map, 8, Want::Any);
        assert_eq!(*again.pieces, [piece(0, 8, State::Dirty)]);
        let fresh = |map: &SpanMap, offset| map.in_use_at(offset).unwrap().marks.fresh;
        assert!(!fresh(&map, again.offset));
        let other = allocate(&mut map, 8, Want::Any);
        assert!(fresh(&map, other.offset));
    }

    #[test]
    fn without_fresh_memory_only_what_is_retained_is_handed_out() {
        let mut map = map();
        let retained_only = |pages| Request { fresh: false, ..request(pages, Want::Any) };
        assert_eq!(map.allocate(&retained_only(1)), None);
        let span = allocate(&mut map, 8, Want::Any);
        let wall = allocate(&mut map, 1, Want::Any);
        map.release(span.offset);
        assert_eq!(map.allocate(&retained_only(9)), None);
        assert_eq!(map.allocate(&retained_only(8)).unwrap().offset, span.offset);
        map.release(wall.offset);
        assert_eq!(map.allocate(&retained_only(2)), None, "one page and what lies behind it");
        map.check();
    }

    #[test]
    fn zeroes_come_from_zeroed_memory_and_the_rest_from_dirty() {
        let mut map = map();
        let (a, wall, b) =
            (allocate(&mut map, 4, Want::Any), allocate(&mut map, 1, Want::Any), allocate(&mut map, 4, Want::Any));
        let last = allocate(&mut map, 1, Want::Any);
        map.release(a.offset);
        let (offset, len) = map.begin_zeroing(usize::MAX, G, 3, all).unwrap();
        assert!(map.finish_zeroing(offset, 3, true));
        map.release(b.offset);
        assert_eq!((offset, len), (a.offset, 4 * G));
        assert_eq!(allocate(&mut map, 4, Want::Any).pieces[0].state, State::Dirty);
        assert_eq!(allocate(&mut map, 4, Want::Zeroes).pieces[0].state, State::Zeroed);
        assert!(map.in_use_at(wall.offset).is_some() && map.in_use_at(last.offset).is_some());
    }

    #[test]
    fn memory_of_which_little_is_there_is_passed_over() {
        let mut map = map();
        let (a, _wall) = (allocate(&mut map, 8, Want::Any), allocate(&mut map, 1, Want::Any));
        let (b, _last) = (allocate(&mut map, 4, Want::Any), allocate(&mut map, 1, Want::Any));
        map.release(a.offset);
        map.release(b.offset);
        // The last quarter of the longer one, in pieces of a page; then none of it.
        let behind = |start: usize, len: usize| Some(Range { start: start + 6 * G, len: len.checked_sub(6 * G)? });
        assert_eq!(map.begin_zeroing(G, G, 3, behind), Some((a.offset + 6 * G, G)));
        let other = |start: usize, len: usize| (start == b.offset).then_some(Range { start, len });
        assert_eq!(map.begin_zeroing(8 * G, G, 4, other), Some((b.offset, 4 * G)));
        assert_eq!(map.begin_zeroing(8 * G, G, 5, |_, _| None), None);
        assert_eq!((map.retained(), map.discarding()), (12 * G, 0));
        map.check();
    }

    #[test]
    fn a_span_can_be_put_together_from_retained_and_reserved_memory() {
        let mut map = map();
        let small = allocate(&mut map, 4, Want::Any);
        map.release(small.offset);
        let large = allocate(&mut map, 10, Want::Any);
        let states: Vec<State> = large.pieces.iter().map(|piece| piece.state).collect();
        assert_eq!((large.offset, states), (0, vec![State::Dirty, State::Reserved]));
    }

    #[test]
    fn memory_that_is_being_zeroed_is_taken_from_its_helper() {
        let mut map = map();
        let span = allocate(&mut map, 8, Want::Any);
        map.release(span.offset);
        assert_eq!(map.begin_zeroing(5 * G - 1, G, 0, all), Some((0, 4 * G)), "whole pages");
        let grant = allocate(&mut map, 6, Want::Zeroes);
        assert_eq!(grant.pieces[0], piece(0, 4, State::Zeroing(0)));
        assert!(!map.finish_zeroing(0, 0, true), "the helper was revoked");
        map.check();
        // Where helpers can't be revoked, it is left alone.
        let mut map = SpanMap::new(64 * G, G).unwrap();
        let span = allocate(&mut map, 8, Want::Any);
        map.release(span.offset);
        map.begin_zeroing(8 * G, G, 0, all).unwrap();
        let grant = map.allocate(&Request { revocable: false, ..request(6, Want::Zeroes) }).unwrap();
        assert_eq!(grant.pieces[0].state, State::Reserved);
    }

    #[test]
    fn what_is_left_of_a_piece_whose_helper_was_revoked_is_dirty() {
        // A map of one free segment from page 1 to 8, of which `zeroing` is being zeroed, that hands out 6 or fewer pages at even ones.
        let left = |zeroing: Range, pages: usize| {
            let mut map = SpanMap::new(64 * G, G).unwrap();
            let [_, span, _wall] = [1, 8, 1].map(|pages| allocate(&mut map, pages, Want::Any).offset);
            assert_eq!(map.release(span), None);
            map.begin_zeroing(zeroing.len, G, 0, |_, _| Some(zeroing)).unwrap();
            let aligned = Request { align: 2 * G, fresh: false, ..request(pages, Want::Any) };
            let grant = map.allocate(&aligned).unwrap();
            assert!(grant.pieces.iter().any(|piece| matches!(piece.state, State::Zeroing(_))), "{:?}", grant.pieces);
            map.check();
            assert!(map.segments().all(|(_, segment)| !matches!(segment.state, State::Zeroing(_))));
            (grant.offset / G, map.bytes().retained_dirty as usize / G)
        };
        assert_eq!(left(Range { start: G, len: 8 * G }, 3), (2, 5), "both sides of one piece");
        assert_eq!(left(Range { start: G, len: 4 * G }, 6), (2, 2), "its beginning, before other memory");
        assert_eq!(left(Range { start: 4 * G, len: 5 * G }, 6), (2, 2), "its end, behind other memory");
    }

    #[test]
    fn memory_that_is_being_discarded_is_never_handed_out() {
        let mut map = SpanMap::new(8 * G, G).unwrap();
        let span = allocate(&mut map, 8, Want::Any);
        map.release(span.offset);
        assert_eq!(map.begin_discard(6 * G, false), Some((2 * G, 6 * G)));
        assert_eq!(map.allocate(&request(3, Want::Any)), None);
        map.finish_discard(2 * G, 6 * G, false);
        map.check();
        assert!(map.allocate(&request(8, Want::Any)).is_some());
    }

    #[test]
    fn only_whole_granules_go_back() {
        let mut map = SpanMap::new(64 * G, 8 * G).unwrap();
        let (first, span) = (allocate(&mut map, 3, Want::Any), allocate(&mut map, 20, Want::Any));
        let wall = allocate(&mut map, 1, Want::Any);
        map.release(span.offset);
        assert_eq!(map.begin_discard(1, false), Some((8 * G, 8 * G)), "pages 3 to 22 hold one whole granule");
        map.check();
        assert_eq!(map.begin_discard(usize::MAX, false), None);
        map.finish_discard(8 * G, 8 * G, false);
        map.release(first.offset);
        assert_eq!(map.begin_discard(1, false), Some((0, 8 * G)));
        map.release(wall.offset);
        assert_eq!(map.begin_discard(usize::MAX, false), Some((16 * G, 8 * G)));
        map.check();
    }

    #[test]
    fn where_access_is_exact_what_no_span_shares_a_granule_with_goes_back() {
        let mut map = SpanMap::new(64 * G, 8 * G).unwrap();
        map.be_exact();
        let [_first, span, wall] = [3, 6, 2].map(|pages| allocate(&mut map, pages, Want::Any));
        map.release(span.offset);
        assert_eq!(map.begin_discard(usize::MAX, false), None, "both neighbours may have parts of its huge pages");
        map.release(wall.offset);
        assert_eq!(map.begin_discard(1, false), Some((8 * G, 3 * G)), "from a granule on");
        map.check();
        map.finish_discard(8 * G, 3 * G, false);
        assert_eq!(map.begin_discard(usize::MAX, false), None, "the first is still in use");
        map.release(0);
        assert_eq!(map.begin_discard(usize::MAX, false), Some((0, 8 * G)));
        map.check();
    }

    #[test]
    fn what_comes_with_a_granule_is_used_before_another_one_is_touched() {
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        for count in 1..=20 {
            let span = map.allocate(&request(21, Want::Any)).unwrap();
            map.check();
            assert_eq!(span.offset, (count - 1) * 21 * G);
            assert_eq!(map.retained(), (count * 21).next_multiple_of(8) * G - count * 21 * G);
        }
        // The same in a hole.
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let hole = map.allocate(&request(160, Want::Any)).unwrap();
        allocate(&mut map, 16, Want::Any);
        give_back(&mut map, hole.offset);
        for count in 1..=8 {
            let span = map.allocate(&request(20, Want::Any)).unwrap();
            map.check();
            assert_eq!(span.offset, (count - 1) * 20 * G);
        }
        assert_eq!(map.retained(), 0);
    }

    #[test]
    fn zero_pages_do_not_keep_the_rest_of_their_granule() {
        // Whichever side what is freed later lies on.
        for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
            let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
            let aligned = Request { align: 8 * G, ..request(13, Want::Any) };
            let spans = [(); 4].map(|()| map.allocate(&aligned).unwrap().offset);
            assert_eq!(map.retained(), 4 * 3 * G);
            order.iter().for_each(|&which| assert_eq!(map.release(spans[which]), None));
            map.check();
            assert_eq!(map.begin_discard(usize::MAX, false), Some((0, 64 * G)));
        }
    }

    #[test]
    fn zero_pages_of_a_whole_granule_stay_zero() {
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let [zero, behind, _wall] = [8, 8, 8].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map.release(zero);
        assert_eq!(map.begin_zeroing(usize::MAX, G, 3, all), Some((zero, 8 * G)));
        assert!(map.finish_zeroing(zero, 3, true));
        map.release(behind);
        map.check();
        assert_eq!((map.bytes().retained_zeroed, map.bytes().retained_dirty), (8 * G as u64, 8 * G as u64));
    }

    #[test]
    fn marks_of_joined_segments_are_those_of_both() {
        let none = Marks::default();
        let (moved, altered) = (Marks { moved: true, ..none }, Marks { altered: true, ..none });
        assert_eq!([none.join(moved), moved.join(none), moved.join(moved)], [moved; 3]);
        assert_eq!([none.join(altered), altered.join(none), altered.join(altered)], [altered; 3]);
        assert_eq!(moved.join(altered), Marks { moved: true, altered: true, ..none });
        assert_eq!(Marks { guarded: true, fresh: true, wiped: true, ..altered }.lasting(), altered);
        assert_eq!([none, moved, altered].map(Marks::remap), [false, true, true]);
    }

    #[test]
    fn a_guard_takes_a_page_of_its_span() {
        let span = |guarded| Segment {
            len: 4 * G,
            state: State::InUse,
            marks: Marks { guarded, ..Marks::default() },
            class: 0,
        };
        assert_eq!([false, true].map(|guarded| span(guarded).usable()), [4 * G, 3 * G]);
        // It keeps it as it grows, until it is freed.
        let mut map = map();
        let offset = allocate(&mut map, 4, Want::Any).offset;
        map.mark(offset, Marks { guarded: true, ..Marks::default() });
        assert!(map.grow(offset, 6 * G, 0, true).is_some());
        assert_eq!(map.in_use_at(offset).unwrap().usable(), 5 * G);
        assert_eq!(map.release_retained(offset), 6 * G);
        let offset = allocate(&mut map, 6, Want::Any).offset;
        assert_eq!(map.in_use_at(offset).unwrap().usable(), 6 * G);
    }

    #[test]
    fn pieces_are_compared_and_shown_as_far_as_there_are_some() {
        let pieces = |list: &[Piece]| {
            let mut pieces = Pieces::new();
            list.iter().for_each(|&piece| pieces.push(piece));
            pieces
        };
        let [first, second] = [piece(0, 2, State::Dirty), piece(2, 1, State::Reserved)];
        assert_eq!(pieces(&[first, second]), pieces(&[first, second]));
        assert_ne!(pieces(&[first, second]), pieces(&[first]));
        assert_ne!(pieces(&[first]), pieces(&[second]));
        assert_eq!(format!("{:?}", pieces(&[first, second])), format!("{:?}", [first, second]));
        assert_eq!(pieces(&[first, second]).backed(), 2 * G, "what is reserved has no pages");
    }

    /// Adds `count` free pages, each a segment of its own: zeroed and dirty ones take turns.
    fn add_pieces(map: &mut SpanMap, count: usize) {
        let spans: Vec<usize> = (0..count).map(|_| allocate(map, 1, Want::Any).offset).collect();
        for &zeroed in spans.iter().step_by(2) {
            map.release(zeroed);
            assert_eq!(map.begin_zeroing(G, G, 0, all), Some((zeroed, G)));
            assert!(map.finish_zeroing(zeroed, 0, true));
        }
        spans.iter().skip(1).step_by(2).for_each(|&dirty| assert_eq!(map.release(dirty), None));
        map.check();
        assert_eq!(map.segments().filter(|(_, segment)| segment.len == G).count(), map.segments().count());
    }

    /// A map of which the first pages are such.
    fn piecewise(count: usize) -> SpanMap {
        let mut map = SpanMap::new(256 * G, G).unwrap();
        add_pieces(&mut map, count);
        map
    }

    #[test]
    fn a_span_is_put_together_from_a_dozen_segments_at_most() {
        let retained_only = |pages| Request { fresh: false, ..request(pages, Want::Any) };
        assert_eq!(piecewise(20).allocate(&retained_only(12)).unwrap().pieces.len(), 12);
        assert_eq!(piecewise(20).allocate(&retained_only(13)), None);
        assert_eq!(piecewise(11).allocate(&retained_only(12)), None, "there are only eleven");
        // The same where a span grows.
        let grown = |pages: usize| {
            let mut map = SpanMap::new(256 * G, G).unwrap();
            allocate(&mut map, 1, Want::Any);
            add_pieces(&mut map, 20);
            map.grow(0, (1 + pages) * G, 0, true).map(|pieces| pieces.len())
        };
        assert_eq!([grown(11), grown(12), grown(13)], [Some(11), Some(12), None]);
    }

    /// A map of segments side by side, behind `before` pages in use and before one more: `d` is dirty, `z` zeroed.
    fn laid_out(before: usize, segments: &[(char, usize)]) -> SpanMap {
        let mut map = SpanMap::new(256 * G, G).unwrap();
        if before > 0 {
            allocate(&mut map, before, Want::Any);
        }
        let spans: Vec<_> =
            segments.iter().map(|&(kind, pages)| (kind, allocate(&mut map, pages, Want::Any))).collect();
        allocate(&mut map, 1, Want::Any);
        for (_, span) in spans.iter().filter(|(kind, _)| *kind == 'z') {
            map.release(span.offset);
            assert!(map.begin_zeroing(span.len, G, 3, all).is_some());
            assert!(map.finish_zeroing(span.offset, 3, true));
        }
        spans.iter().filter(|(kind, _)| *kind == 'd').for_each(|(_, span)| assert_eq!(map.release(span.offset), None));
        map.check();
        map
    }

    #[test]
    fn a_run_has_what_it_takes_and_no_more() {
        let retained = |pages| Request { fresh: false, ..request(pages, Want::Any) };
        let mut map = laid_out(0, &[('d', 4), ('z', 8), ('d', 9)]);
        assert_eq!(map.allocate(&retained(17)).unwrap().offset, 4 * G);
        let mut map = laid_out(0, &[('z', 8), ('d', 9)]);
        assert_eq!(map.allocate(&retained(18)), None);
        // At the end of what was ever handed out, address space is part of it.
        let mut map = laid_out(64, &[('z', 8), ('d', 9)]);
        let wall = map.top() - G;
        assert_eq!(wall, (64 + 8 + 9) * G);
        give_back(&mut map, wall);
        assert_eq!((map.top(), map.allocate(&request(32, Want::Any)).unwrap().offset), (wall, 64 * G));
        map.check();
    }

    #[test]
    fn a_run_at_the_end_begins_where_its_alignment_is() {
        let mut map = laid_out(65, &[('z', 8), ('d', 9)]);
        let wall = map.top() - G;
        give_back(&mut map, wall);
        assert_eq!(map.allocate(&Request { align: 2 * G, ..request(32, Want::Any) }).unwrap().offset, 66 * G);
        map.check();
    }

    #[test]
    fn segments_that_were_moved_stay_apart_and_make_a_run() {
        let mut map = SpanMap::new(64 * G, G).unwrap();
        let [one, other, _wall] = [8, 8, 1].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        for span in [one, other] {
            map.mark(span, Marks { moved: true, ..Marks::default() });
            assert_eq!(map.release(span), None);
        }
        assert_eq!(map.segments().count(), 3);
        let retained = Request { fresh: false, ..request(12, Want::Any) };
        assert_eq!(map.allocate(&retained).map(|grant| grant.pieces.len()), Some(2));
        map.check();
    }

    #[test]
    fn a_run_goes_through_retained_memory_before_address_space() {
        let mut map = laid_out(0, &[('z', 4), ('d', 8), ('r', 8)]);
        give_back(&mut map, 12 * G);
        assert_eq!(map.allocate(&request(12, Want::Any)).unwrap().offset, 0);
        map.check();
    }

    #[test]
    fn what_is_being_zeroed_is_taken_only_where_it_can_be_revoked() {
        for (revocable, offset) in [(true, Some(0)), (false, None)] {
            let mut map = laid_out(0, &[('z', 4), ('d', 8)]);
            assert_eq!(map.begin_zeroing(usize::MAX, G, 5, all), Some((4 * G, 8 * G)));
            let request = Request { fresh: false, revocable, ..request(12, Want::Any) };
            assert_eq!(map.allocate(&request).map(|grant| grant.offset), offset);
            let request = Request { want: Want::AddressSpace, revocable: true, ..request };
            assert_eq!(map.allocate(&request), None);
            map.check();
        }
    }

    #[test]
    fn many_segments_that_are_too_short_or_lie_badly_hide_none_that_fits() {
        let retained = |pages, align| Request { fresh: false, align: align * G, ..request(pages, Want::Any) };
        // Behind each of them lies a page in use.
        let scattered = |lengths: &[usize]| {
            let mut map = SpanMap::new(1024 * G, G).unwrap();
            let spans: Vec<_> = lengths
                .iter()
                .map(|&pages| {
                    let span = allocate(&mut map, pages, Want::Any);
                    allocate(&mut map, 1, Want::Any);
                    span.offset
                })
                .collect();
            spans.iter().for_each(|&span| assert_eq!(map.release(span), None));
            (map, spans)
        };
        let mut lengths = vec![1; CANDIDATES + 1];
        lengths.extend([34, 35, 50]);
        let (mut map, spans) = scattered(&lengths);
        assert_eq!(map.allocate(&retained(33, 1)).unwrap().offset, spans[CANDIDATES + 1]);
        // Segments of 7 pages at odd places have none for 4 pages aligned to 8.
        let mut lengths = vec![1];
        lengths.extend([7; 2 * CANDIDATES + 1]);
        lengths.push(11);
        let (mut map, spans) = scattered(&lengths);
        let last = spans.last().unwrap();
        assert_eq!(map.allocate(&retained(4, 8)).unwrap().offset, last.next_multiple_of(8 * G));
    }

    #[test]
    fn a_span_in_address_space_begins_with_the_rests_before_it() {
        // They are too short to be looked for.
        let place = |pieces: usize, align: usize| {
            let mut map = piecewise(pieces);
            let grant = map.allocate(&Request { align: align * G, ..request(32, Want::Any) }).unwrap();
            map.check();
            (grant.offset / G, grant.pieces.len())
        };
        assert_eq!(place(1, 1), (0, 2));
        assert_eq!(place(3, 1), (0, 4));
        assert_eq!(place(8, 1), (2, 7), "six of them");
        assert_eq!(place(3, 4), (4, 1), "not where the alignment is missing");
    }

    #[test]
    fn the_shortest_segment_is_taken_whatever_came_first() {
        for order in [[34, 35, 50], [35, 34, 50], [50, 35, 34]] {
            let mut map = SpanMap::new(256 * G, G).unwrap();
            let spans = order.map(|pages| {
                let span = allocate(&mut map, pages, Want::Any);
                allocate(&mut map, 1, Want::Any);
                span
            });
            spans.iter().for_each(|span| assert_eq!(map.release(span.offset), None));
            let shortest = spans.iter().find(|span| span.len == 34 * G).unwrap();
            assert_eq!(allocate(&mut map, 33, Want::Any).offset, shortest.offset);
        }
    }

    #[test]
    fn spans_have_the_length_and_the_class_of_their_zone() {
        let (small, huge) = (map(), SpanMap::new(64 * G, 8 * G).unwrap());
        assert_eq!([small.len_here(70 * G, 0), huge.len_here(70 * G, 0), huge.len_here(70 * G, 5)], [70 * G; 3]);
        let lengths = [16 * G, COLOURED_LEAST - G, COLOURED_LEAST, SPREAD_LEAST - G, SPREAD_LEAST, 2 * SPREAD_LEAST];
        let more = lengths.map(|len| small.len_here(len, 5) - len);
        assert_eq!(more, [ROOM, ROOM, 0, 0, 64 << 10, 64 << 10]);
        assert_eq!(lengths.map(|len| huge.len_here(len, 5) - len), [0; 6]);
        let joined = (1 << 20) + G;
        assert_eq!(
            [joined, joined + G].map(|len| (small.class_here(len, 5), huge.class_here(len, 5))),
            [(5, 5), (5, 0)]
        );
        for size in (16 * G..64 << 20).step_by(7 * G) {
            let (len, class) = classes::span_for(size).unwrap();
            assert_eq!(small.class_of(small.len_here(len, class)), class, "{size}");
            assert_eq!(huge.class_of(huge.len_here(len, class)), class, "{size}");
        }
    }

    #[test]
    fn a_span_that_no_cache_takes_any_more_has_no_class() {
        let mut map = map();
        allocate(&mut map, 1, Want::Any);
        let span = map.allocate(&Request { class: 3, ..request(20, Want::Any) }).unwrap();
        assert_eq!(map.in_use_at(span.offset).unwrap().class, 3);
        map.take_class(span.offset);
        assert_eq!(map.in_use_at(span.offset).unwrap().class, 0);
        map.take_class(span.offset + G);
        map.check();
    }

    #[test]
    fn what_is_cut_off_a_span_says_nothing_of_how_it_was_used() {
        let mut map = map();
        let span = allocate(&mut map, 8, Want::Any).offset;
        assert!(map.in_use_at(span).unwrap().marks.fresh);
        assert_eq!(map.shrink(span, 8 * G, 0), None);
        assert!(!map.in_use_at(span).unwrap().marks.fresh);
        assert_eq!(map.shrink(span, 3 * G, 0), None);
        assert_eq!((map.in_use_at(span).unwrap().len, map.retained()), (3 * G, 5 * G));
        map.check();
        let other = map.allocate(&Request { class: 4, ..request(20, Want::Any) }).unwrap().offset;
        let before = map.in_use_at(other).unwrap();
        assert_eq!((map.shrink(other, before.len, 3), before.class), (None, 4));
        assert_eq!(map.in_use_at(other).unwrap().class, 3);
        let mut map = SpanMap::new(64 * G, G).unwrap();
        let span = allocate(&mut map, 20, Want::Any).offset;
        assert!(map.in_use_at(span).unwrap().marks.fresh);
        assert_eq!(map.shrink(span, 17 * G, 1), None);
        let left = map.in_use_at(span).unwrap();
        assert_eq!((left.class, left.marks.fresh), (1, false));
        map.check();
    }

    #[test]
    fn the_map_of_much_address_space_gives_its_own_memory_back() {
        for (pages, kept) in [(MAPPED_MOST / G, true), (MAPPED_MOST / G + 1, false)] {
            let mut map = SpanMap::new(2 * MAPPED_MOST, G).unwrap();
            let span = allocate(&mut map, pages, Want::Any);
            give_back(&mut map, span.offset);
            assert_eq!((map.top(), map.mapped), (0, pages * G));
            map.give_back_map();
            assert_eq!(map.mapped, if kept { pages * G } else { 0 });
            assert_eq!(allocate(&mut map, pages, Want::Any).offset, 0);
        }
    }

    #[test]
    fn what_is_given_back_of_the_map_lies_behind_all_that_was_handed_out() {
        let resident = |range: Range| {
            let mut pages = vec![0; range.len / PAGE];
            memory::residence(range, &mut pages).unwrap();
            pages.iter().filter(|&&page| page & 1 != 0).count()
        };
        // Each of these has its word and its link in a page of its own.
        const LEN: usize = 512;
        const COUNT: usize = 32;
        let mut map = SpanMap::new(4 * MAPPED_MOST, G).unwrap();
        let wall = allocate(&mut map, LEN, Want::Any).offset;
        let spans = [(); COUNT].map(|()| allocate(&mut map, LEN, Want::Any).offset);
        for &span in spans.iter().step_by(2).chain(spans.iter().skip(1).step_by(2)) {
            assert_eq!(map.release(span), None);
        }
        let all = COUNT * LEN * G;
        assert_eq!(map.begin_discard(usize::MAX, false), Some((LEN * G, all)));
        let mapped = map.mapped;
        map.give_back_map();
        assert_eq!(map.mapped, mapped, "as long as that is being discarded");
        assert!(resident(map.map.range()) > COUNT && resident(map.links.range()) > COUNT / 2);
        map.finish_discard(LEN * G, all, false);
        assert_eq!(map.top(), LEN * G);
        map.give_back_map();
        assert_eq!(map.mapped, map.top());
        assert_eq!(resident(map.map.range()), 1);
        assert!(resident(map.links.range()) <= 1);
        assert_eq!(map.in_use_at(wall).unwrap().len, LEN * G);
        map.check();
        // A little is kept, wherever it lies.
        let mut map = SpanMap::new(4 * MAPPED_MOST, G).unwrap();
        let [_wall, span] = [MAPPED_MOST / G, 16].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        give_back(&mut map, span);
        let mapped = map.mapped;
        map.give_back_map();
        assert_eq!((map.mapped, map.top()), (mapped, MAPPED_MOST));
    }

    #[test]
    fn less_than_a_granule_stays_although_it_could_be_mapped_anew() {
        let mut map = SpanMap::new(256 * G, 8 * G).unwrap();
        let [span, _wall] = [3, 5].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map.mark(span, Marks { moved: true, ..Marks::default() });
        assert_eq!((map.release(span), map.retained()), (None, 3 * G));
        assert_eq!(
            (map.begin_discard(usize::MAX, false), map.begin_discard(usize::MAX, true)),
            (None, Some((span, 3 * G)))
        );
    }

    #[test]
    fn memory_goes_back_from_the_end_of_the_longest_segment() {
        let mut map = SpanMap::new(256 * G, 4 * G).unwrap();
        let spans = [8, 40, 16].map(|pages| {
            let span = allocate(&mut map, pages, Want::Any);
            allocate(&mut map, 4, Want::Any);
            span.offset
        });
        spans.iter().for_each(|&offset| assert_eq!(map.release(offset), None));
        assert_eq!(map.begin_discard(5 * G, false), Some((spans[1] + 32 * G, 8 * G)), "whole granules");
        assert_eq!(map.begin_discard(0, false), Some((spans[1] + 28 * G, 4 * G)), "one at least");
        assert_eq!(map.begin_discard(5 * G, true), Some((spans[1] + 23 * G, 5 * G)), "in need, any pages");
        assert_eq!(map.begin_discard(usize::MAX, true), Some((spans[1], 23 * G)));
        map.check();
    }

    #[test]
    fn the_map_says_where_its_zone_ends_and_where_it_lies_itself() {
        let map = map();
        assert_eq!((map.end(), map.top()), (64 * G, 0));
        let own: Vec<Range> = map.own_memory().collect();
        assert!(own.contains(&map.map.range()) && own.contains(&map.links.range()) && own.len() > 2);
    }

    #[test]
    fn an_altered_span_goes_back_whole() {
        let mut map = map();
        let span = allocate(&mut map, 8, Want::Any);
        map.mark_altered(span.offset + 5 * G);
        assert_eq!(map.release(span.offset), Some((0, 8 * G)));
        assert!(map.discarding_marks(0).remap());
        map.finish_discard(0, 8 * G, true);
        map.check();
        assert_eq!(map.bytes().reserved, 64 * G as u64);
        let span = allocate(&mut map, 8, Want::Any);
        map.release_unbacked(span.offset);
        map.lose(span.offset);
        map.check();
        assert!(allocate(&mut map, 1, Want::Any).offset >= 8 * G, "what is lost is never handed out");
    }

    #[test]
    fn what_cannot_be_made_accessible_is_undone() {
        let mut map = map();
        let span = allocate(&mut map, 4, Want::Any);
        map.release(span.offset);
        let before = map.bytes();
        let grant = allocate(&mut map, 8, Want::Any);
        map.undo(&grant);
        map.check();
        assert_eq!(map.bytes(), before);
        let span = allocate(&mut map, 4, Want::Any);
        let (segment, before) = (map.in_use_at(span.offset).unwrap(), map.bytes());
        let pieces = map.grow(span.offset, 9 * G, 0, true).unwrap();
        map.undo_growth(span.offset, segment, &pieces);
        map.check();
        assert_eq!(map.bytes(), before);
    }

    #[test]
    fn what_is_only_address_space_can_be_given_up() {
        let mut map = map();
        let (first, gap, last) =
            (allocate(&mut map, 8, Want::Any), allocate(&mut map, 2, Want::Any), allocate(&mut map, 4, Want::Any));
        give_back(&mut map, gap.offset);
        let mut given_up = Vec::new();
        map.give_up(|offset, len| given_up.push((offset, len)));
        assert_eq!(given_up, [(8 * G, 2 * G), (14 * G, 50 * G)]);
        map.check();
        assert_eq!(map.bytes().total(), 12 * G as u64);
        assert_eq!(map.allocate(&request(1, Want::Any)), None);
        assert_eq!(map.grow(first.offset, 9 * G, 0, true), None);
        assert!(
            map.owns(0) && map.owns(last.offset) && !map.owns(gap.offset) && !map.owns(60 * G) && !map.owns(64 * G)
        );
        // What was in use then is used again, and only that.
        give_back(&mut map, first.offset);
        assert_eq!(allocate(&mut map, 8, Want::Any).offset, 0);
        map.give_up(|offset, len| panic!("{offset} {len} was given up twice"));
        // With the address space goes what the map had for it.
        let mut map = SpanMap::new(4 * MAPPED_MOST, G).unwrap();
        allocate(&mut map, 8, Want::Any);
        map.give_up(|_, _| ());
        assert_eq!([map.map.range().len, map.links.range().len], [PAGE; 2]);
        map.check();
    }

    #[test]
    fn what_could_not_be_mapped_anew_is_never_handed_out() {
        // Whoever was to map it anew gave up, or is not there after a fork.
        let by_fork = |map: &mut SpanMap, _| map.after_fork();
        let lose: [fn(&mut SpanMap, usize); 2] = [SpanMap::lose, by_fork];
        for lose in lose {
            let mut map = SpanMap::new(64 * G, G).unwrap();
            let [span, wall] = [8, 1].map(|pages| allocate(&mut map, pages, Want::Any).offset);
            map.mark_altered(span);
            assert_eq!(map.release(span), Some((span, 8 * G)));
            lose(&mut map, span);
            map.check();
            assert_eq!((map.discarding(), map.bytes().in_use), (0, 9 * G as u64));
            assert_eq!(map.allocate(&Request { fresh: false, ..request(1, Want::Any) }), None);
            assert!(allocate(&mut map, 8, Want::Any).offset > wall);
        }
        // What was only to be discarded still has its pages.
        let mut map = SpanMap::new(64 * G, G).unwrap();
        let [span, _wall] = [8, 1].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map.release(span);
        assert_eq!(map.begin_discard(usize::MAX, false), Some((span, 8 * G)));
        map.after_fork();
        assert_eq!((map.retained(), map.bytes().retained_dirty), (8 * G, 8 * G as u64));
    }

    #[test]
    fn free_granules_are_moved_to_where_a_span_has_none() {
        let mut map = SpanMap::new(64 * G, 4 * G).unwrap();
        let spans: Vec<_> = (0..4).map(|_| allocate(&mut map, 8, Want::Any).offset).collect();
        map.release(spans[0]);
        map.release(spans[2]);
        let transfer = |pages| Request { transfer: pages * G, ..request(10, Want::Any) };
        let grant = map.allocate(&transfer(100)).unwrap();
        assert_eq!((grant.offset, grant.pieces.backed()), (32 * G, 0));
        let sum = |grant: &Grant| grant.transfers().iter().map(|transfer| transfer.len).sum::<usize>();
        assert_eq!(sum(&grant), 12 * G, "the granule that it ends in as well");
        assert_eq!(map.bytes().retained_zeroed, 0, "what is left of that granule has what was moved there");
        assert_eq!((map.retained(), map.discarding()), ((16 - 12) * G, (12 + 2) * G), "nobody may have it yet");
        grant.transfers().iter().for_each(|transfer| map.finish_discard(transfer.from, transfer.len, false));
        map.finish_transfers(&grant);
        map.check();
        assert_eq!((map.retained(), map.discarding()), (6 * G, 0));
        // Where that was not wanted, nothing is; where it fails, or the whole is undone, everything is as it was.
        let before = map.bytes();
        let grant = map.allocate(&transfer(0)).unwrap();
        assert_eq!(sum(&grant), 0);
        map.undo(&grant);
        let grant = map.allocate(&transfer(4)).unwrap();
        assert_eq!(sum(&grant), 4 * G);
        map.undo(&grant);
        map.check();
        assert_eq!(map.bytes().total(), before.total());
        assert_eq!(map.discarding(), 0);
    }

    /// A map in granules of 8 pages with one hole of `hole` pages at the beginning and two dirty segments of 32 behind it.
    fn with_a_hole(hole: usize) -> SpanMap {
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let spans = [hole, 8, 32, 8, 32, 8].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map_anew(&mut map, spans[0]);
        [2, 4].iter().for_each(|&dirty| assert_eq!(map.release(spans[dirty]), None));
        map.check();
        map
    }

    fn lengths(grant: &Grant) -> Vec<usize> {
        grant.transfers().iter().map(|transfer| transfer.len / G).collect()
    }

    #[test]
    fn pages_are_moved_to_whole_granules_of_which_nobody_has_a_page() {
        let transfer = Request { transfer: usize::MAX, ..request(45, Want::Any) };
        let mut map = with_a_hole(64);
        let grant = map.allocate(&transfer).unwrap();
        assert_eq!((grant.offset, lengths(&grant)), (0, vec![32, 16]));
        assert_eq!(grant.transfers().iter().map(|transfer| transfer.to / G).collect::<Vec<_>>(), [0, 32]);
        assert!(!map.in_use_at(0).unwrap().marks.fresh, "nothing says whether its user touches them");
        grant.transfers().iter().for_each(|transfer| map.finish_discard(transfer.from, transfer.len, false));
        assert_eq!((map.retained(), map.discarding()), (16 * G, 3 * G));
        map.finish_transfers(&grant);
        map.check();
        assert_eq!((map.retained(), map.discarding()), ((16 + 3) * G, 0));
        // The first granule is another span's as well.
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let [_, hole, _, dirty, _] = [5, 43, 8, 32, 8].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map_anew(&mut map, hole);
        assert_eq!(map.release(dirty), None);
        let grant = map.allocate(&Request { len: 40 * G, ..transfer }).unwrap();
        assert_eq!((grant.offset, grant.transfers()[0].to, lengths(&grant)), (5 * G, 8 * G, vec![32]));
        // No more of them than a grant has room for.
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let hole = allocate(&mut map, 128, Want::Any).offset;
        let spans = [8; 2 * TRANSFERS + 4].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map_anew(&mut map, hole);
        spans.iter().skip(1).step_by(2).for_each(|&span| assert_eq!(map.release(span), None));
        let grant = map.allocate(&Request { len: 100 * G, ..transfer }).unwrap();
        assert_eq!((grant.offset, lengths(&grant)), (0, vec![8; TRANSFERS]));
        // What is left of the last granule has pages, if only zero ones.
        let mut map = with_a_hole(46);
        assert_eq!(lengths(&map.allocate(&transfer).unwrap()).iter().sum::<usize>(), 40);
        let mut map = with_a_hole(64);
        let eight = Request { transfer: 8 * G, ..transfer };
        assert_eq!(lengths(&map.allocate(&eight).unwrap()), [8]);
        let mut map = with_a_hole(64);
        let less = Request { transfer: 8 * G - 1, ..transfer };
        assert_eq!(lengths(&map.allocate(&less).unwrap()), []);
        let mut map = with_a_hole(64);
        map.be_exact();
        assert_eq!(lengths(&map.allocate(&transfer).unwrap()), [], "nothing else may become accessible");
    }

    #[test]
    fn the_rest_of_a_granule_in_address_space_comes_with_a_span() {
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let [_, hole, _wall] = [5, 11, 8].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        assert_eq!(hole, 5 * G, "behind the first, in its granule");
        map_anew(&mut map, hole);
        let zeroed = |map: &SpanMap| map.bytes().retained_zeroed as usize / G;
        assert_eq!(zeroed(&map), 0);
        let grant = map.allocate(&Request { align: 2 * G, ..request(4, Want::Any) }).unwrap();
        map.check();
        assert_eq!((grant.offset, zeroed(&map)), (6 * G, 1 + 6), "before it and behind it");
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let [_, hole, behind] = [5, 6, 13].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map_anew(&mut map, hole);
        let grant = map.allocate(&Request { align: 2 * G, ..request(4, Want::Any) }).unwrap();
        map.check();
        assert_eq!((grant.offset, zeroed(&map)), (6 * G, 2), "as far as it is nobody's");
        assert_eq!(map.in_use_at(behind).unwrap().len, 13 * G);
        // What was retained had pages without the rest.
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        let [first, hole, _wall] = [5, 11, 8].map(|pages| allocate(&mut map, pages, Want::Any).offset);
        map_anew(&mut map, hole);
        assert_eq!(map.release(first), None);
        assert_eq!((allocate(&mut map, 2, Want::Any).offset, zeroed(&map)), (0, 0));
        // Nor may more be accessible than is in use, where that is counted.
        let mut map = SpanMap::new(512 * G, 8 * G).unwrap();
        map.be_exact();
        allocate(&mut map, 5, Want::Any);
        assert_eq!(zeroed(&map), 0);
    }

    #[test]
    fn alignment_up_to_the_zone() {
        let mut map = SpanMap::new(1024 * G, G).unwrap();
        allocate(&mut map, 1, Want::Any);
        let grant = map.allocate(&Request { align: 256 * G, ..request(1, Want::Any) }).unwrap();
        assert_eq!(grant.offset, 256 * G);
        map.check();
        assert_eq!(allocate(&mut map, 255, Want::Any).offset, G, "the gap before it is used");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate {
            pages: usize,
            align: u32,
            zero: bool,
            fresh: bool,
            transfer: usize,
        },
        Release(usize),
        /// Into a cache and out again, or from there back into the zone.
        Cache(usize, bool),
        Grow(usize, usize),
        Shrink(usize, usize),
        Alter(usize),
        /// Its pages come from elsewhere.
        Move(usize),
        BeginZeroing(usize),
        FinishZeroing(bool),
        BeginDiscard(usize),
        FinishDiscard(usize, bool),
        Fork,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1usize..20, 0u32..6, any::<bool>(), 0..4, 0usize..40).prop_map(|(pages, align, zero, fresh, transfer)| {
                Step::Allocate { pages, align, zero, fresh: fresh > 0, transfer }
            }),
            3 => any::<usize>().prop_map(Step::Release),
            1 => (any::<usize>(), any::<bool>()).prop_map(|(which, back)| Step::Cache(which, back)),
            1 => (any::<usize>(), 1usize..20).prop_map(|(which, more)| Step::Grow(which, more)),
            1 => (any::<usize>(), 1usize..20).prop_map(|(which, pages)| Step::Shrink(which, pages)),
            1 => any::<usize>().prop_map(Step::Alter),
            1 => any::<usize>().prop_map(Step::Move),
            2 => (1usize..20).prop_map(Step::BeginZeroing),
            2 => any::<bool>().prop_map(Step::FinishZeroing),
            2 => (1usize..20).prop_map(Step::BeginDiscard),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, remapped)| Step::FinishDiscard(which, remapped)),
            1 => Just(Step::Fork),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        /// Against a model with one state a page: spans never overlap, contents are what the states say, sums add up.
        #[test]
        fn any_sequence_agrees_with_a_model(granule in 0u32..4, steps in steps()) {
            let pages = 128;
            let mut map = SpanMap::new(pages * G, G << granule).unwrap();
            let words = map.page_map();
            // The model's memory: None for reserved (reads as zero), Some(true) for zero pages, Some(false) for unknown contents.
            let mut memory: Vec<Option<bool>> = vec![None; pages];
            let mut spans: Vec<(usize, usize)> = Vec::new();
            let mut zeroing: Option<(usize, usize)> = None;
            let mut discards: Vec<(usize, usize)> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate { pages: len, align, zero, fresh, transfer } => {
                        let want = if zero { Want::Zeroes } else { Want::Any };
                        let request =
                            Request { len: len * G, align: G << align, want, class: 9, revocable: true, fresh, transfer: transfer * G };
                        if let Some(grant) = map.allocate(&request) {
                            prop_assert_eq!(grant.offset % (G << align), 0);
                            let asked = len;
                            let len = grant.len / G;
                            prop_assert_eq!(len - asked, usize::from(granule == 0), "room for the block's line");
                            let (start, end) = (grant.offset / G, grant.offset / G + len);
                            prop_assert!(spans.iter().all(|&(at, n)| end <= at || at + n <= start), "overlaps a span in use");
                            prop_assert!(discards.iter().all(|&(at, n)| end <= at || at + n <= start), "overlaps a discard");
                            let mut at = start;
                            for piece in grant.pieces.iter() {
                                prop_assert_eq!(piece.offset, at * G);
                                prop_assert!(fresh || piece.state != State::Reserved);
                                for &page in &memory[at..at + piece.len / G] {
                                    match piece.state {
                                        State::Reserved => prop_assert_eq!(page, None),
                                        State::Zeroed => prop_assert_eq!(page, Some(true)),
                                        State::Dirty | State::Zeroing(_) => prop_assert!(page.is_some()),
                                        _ => prop_assert!(false, "handed out"),
                                    }
                                }
                                if let State::Zeroing(_) = piece.state { zeroing = None; }
                                at += piece.len / G;
                            }
                            prop_assert_eq!(at, end);
                            let (mut moved, granule_pages) = (0, 1 << granule);
                            for &Transfer { from, to, len: bytes } in grant.transfers() {
                                let (from, to, pages) = (from / G, to / G, bytes / G);
                                prop_assert!(from % granule_pages == 0 && to % granule_pages == 0 && pages % granule_pages == 0);
                                prop_assert!(memory[from..from + pages].iter().all(Option::is_some), "nothing to move");
                                prop_assert!(memory[to..to + pages].iter().all(Option::is_none), "there is something already");
                                prop_assert!(to < end && start < to + pages, "not for this span");
                                prop_assert!(spans.iter().all(|&(at, n)| from + pages <= at || at + n <= from), "from a span in use");
                                prop_assert!(from + pages <= start || end <= from, "from the span itself");
                                memory[to..to + pages].fill(Some(false));
                                moved += pages;
                            }
                            prop_assert!(moved <= transfer);
                            memory[start..end].fill(Some(false));
                            spans.push((start, len));
                            // What came with its granules.
                            for (offset, segment) in map.segments().filter(|(_, segment)| segment.state == State::Zeroed) {
                                for page in &mut memory[offset / G..(offset + segment.len) / G] {
                                    prop_assert_ne!(*page, Some(false));
                                    *page = Some(true);
                                }
                            }
                            // Every other transfer fails, and what is there comes by touching it.
                            for transfer in grant.transfers() {
                                if (transfer.from / G / granule_pages).is_multiple_of(2) {
                                    map.keep(transfer.from);
                                } else {
                                    discards.push((transfer.from / G, transfer.len / G));
                                }
                            }
                            map.finish_transfers(&grant);
                        }
                    }
                    Step::Release(which) if !spans.is_empty() => {
                        let (start, len) = spans.swap_remove(which % spans.len());
                        if let Some(discard) = map.release(start * G) {
                            prop_assert_eq!(discard, (start * G, len * G));
                            discards.push((start, len));
                        }
                    }
                    Step::Cache(which, back) if !spans.is_empty() => {
                        let index = which % spans.len();
                        let (start, len) = spans[index];
                        if let Some(cacheable) = words.retire(start) {
                            prop_assert_eq!(cacheable.bytes(), len * G);
                            prop_assert!(map.in_use_at(start * G).is_none());
                            if back {
                                spans.swap_remove(index);
                                prop_assert_eq!(map.release(start * G), None);
                            } else {
                                prop_assert_eq!(words.employ_checked(start).bytes(), len * G);
                            }
                        }
                    }
                    Step::Grow(which, more) if !spans.is_empty() => {
                        let index = which % spans.len();
                        let (start, len) = spans[index];
                        if let Some(pieces) = map.grow(start * G, (len + more) * G, 0, true) {
                            prop_assert!(spans.iter().enumerate().all(|(other, &(at, n))| other == index || start + len + more <= at || at + n <= start));
                            if pieces.iter().any(|piece| matches!(piece.state, State::Zeroing(_))) { zeroing = None; }
                            memory[start + len..start + len + more].fill(Some(false));
                            spans[index].1 = len + more;
                        }
                    }
                    Step::Shrink(which, to) if !spans.is_empty() => {
                        let index = which % spans.len();
                        let (start, len) = spans[index];
                        let to = to.min(len);
                        if let Some((offset, bytes)) = map.shrink(start * G, to * G, 0) {
                            discards.push((offset / G, bytes / G));
                        }
                        spans[index].1 = to;
                    }
                    Step::Alter(which) if !spans.is_empty() => {
                        let (start, len) = spans[which % spans.len()];
                        map.mark_altered((start + which % len) * G);
                        prop_assert!(words.retire(start).is_none());
                    }
                    Step::Move(which) if !spans.is_empty() => {
                        let (start, _) = spans[which % spans.len()];
                        let marks = map.in_use_at(start * G).unwrap().marks;
                        map.mark(start * G, Marks { moved: true, ..marks });
                        prop_assert!(words.retire(start).is_none());
                    }
                    Step::BeginZeroing(most) if zeroing.is_none() => {
                        // As a zone in which every third page begins memory of which little is there.
                        let find = |start: usize, len: usize| {
                            let skip = if (start / G).is_multiple_of(3) { G } else { 0 };
                            Some(Range { start: start + skip, len: len - skip }).filter(|range| range.len > 0)
                        };
                        zeroing = map.begin_zeroing(most * G, G, 7, find).map(|(offset, len)| (offset / G, len / G));
                    }
                    Step::FinishZeroing(whole) => {
                        if let Some((start, len)) = zeroing.take() {
                            prop_assert_eq!(map.finish_zeroing(start * G, 7, whole), whole);
                            if whole { memory[start..start + len].fill(Some(true)); }
                        }
                    }
                    Step::BeginDiscard(most) => {
                        if let Some((offset, len)) = map.begin_discard(most * G, false) {
                            discards.push((offset / G, len / G));
                        }
                    }
                    Step::FinishDiscard(which, remapped) if !discards.is_empty() => {
                        let (start, len) = discards.swap_remove(which % discards.len());
                        map.finish_discard(start * G, len * G, remapped || map.discarding_marks(start * G).remap());
                        memory[start..start + len].fill(None);
                    }
                    Step::Fork => {
                        // Advice is refused for every third range.
                        let backed: Vec<(usize, usize)> = map.backed().map(|(offset, segment)| (offset, segment.len)).collect();
                        for (index, &(offset, len)) in backed.iter().enumerate() {
                            let remap = map.at(offset).unwrap().marks.remap();
                            let wiped = index % 3 != 2 && !remap;
                            map.set_wiped(offset, wiped);
                            if wiped { memory[offset / G..(offset + len) / G].fill(None); }
                        }
                        map.after_fork();
                        (zeroing, discards) = (None, Vec::new());
                        prop_assert_eq!(map.discarding(), 0);
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

    fn request(want: Want) -> Request {
        Request { len: GRANULE, align: 1, want, class: 0, revocable: true, fresh: true, transfer: 0 }
    }

    fn take_in(zone: &Zone, map: &mut SpanMap) {
        zone.ahead.collect(ZONE, |done| {
            map.finish_zeroing(done.range.start, done.slot as u8, done.whole);
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
            let mut map = SpanMap::new(GRANULE, GRANULE).unwrap();
            let span = map.allocate(&request(Want::Any)).unwrap();
            map.release(span.offset);
            let zone = Zone { map: Mutex::new(map), ahead: Ahead::new(), memory: Mutex::new(7) };
            zone.ahead.set_out(|slot| {
                let all = |start, len| Some(Range { start, len });
                let (start, len) = zone.map.lock().unwrap().begin_zeroing(GRANULE, GRANULE, slot as u8, all)?;
                Some(Range { start, len })
            });
            let zone = Arc::new(zone);
            let helper = {
                let zone = zone.clone();
                loom::thread::spawn(move || help(&zone))
            };
            let mut map = zone.map.lock().unwrap();
            take_in(&zone, &mut map);
            let grant = map.allocate(&request(Want::Zeroes)).unwrap();
            if let State::Zeroing(slot) = grant.pieces[0].state {
                let barrier = || {
                    drop(zone.memory.lock().unwrap());
                    Ok::<(), ()>(())
                };
                assert_ne!(zone.ahead.revoke_with(slot.into(), barrier), Revoked::StillAtIt);
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
