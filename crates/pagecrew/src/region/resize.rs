//! Spans that become longer or shorter: where they are, by moving their pages, or by a copy.

use super::core::{Core, Need, Zone};
use super::spans::{Grant, Marks, Segment, Want};
use super::{AllocateError, PointerError, Region};
use crate::crew::Employer;
use crate::sys::memory::{self, Range};
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE};
use std::fmt;
use std::ptr::NonNull;

/// A span shorter than this is copied: it costs no more, and leaves no mapping of its own.
const MOVE_LEAST: usize = HUGE_PAGE_SIZE;
/// A span that grows to this begins at a huge page from then on, so that it can be moved whole when it grows again.
const ALIGN_LEAST: usize = 2 * HUGE_PAGE_SIZE;

impl Region {
    /// Makes the span at `pointer` at least `size` bytes long, keeping its contents up to the shorter length: where it is if
    /// the address space behind it is free, else by moving its pages. Returns where it is now; if that is another place, the old
    /// pointer is not to be used any more.
    ///
    /// A block in it that begins `colour` bytes after it (see [`super::colour`]) has `size` bytes afterwards, and begins as far after it as before.
    ///
    /// # Safety
    /// Nobody else uses the span meanwhile.
    ///
    /// # Errors
    /// [`ResizeError`]; the span is as it was then.
    pub unsafe fn resize(&self, pointer: NonNull<u8>, size: usize, colour: usize) -> Result<NonNull<u8>, ResizeError> {
        let core = self.core();
        let refused = ResizeError::Memory(AllocateError::OutOfMemory { size });
        let used = size.checked_add(colour).ok_or(refused)?;
        let (plain_len, plain_class) = core.span_for(size.max(1)).ok_or(refused)?;
        // What grows to where spans have no room for a colour has to ask for it.
        let asked = if plain_len >= used { size } else { used };
        let (len, class) = core.span_for(asked.max(1)).filter(|&(len, _)| !core.exceeds_memory(len)).ok_or(refused)?;
        core.counters().reallocations.add(1);
        let to = Size { asked, used, len, class, plain_class };
        // SAFETY: by the function's own contract; a span that could not be resized is as it was.
        unsafe {
            match self.resize_once(pointer, to) {
                Err(ResizeError::Memory(_)) if self.reclaim_all() => self.resize_once(pointer, to),
                result => result,
            }
        }
    }

    /// # Safety
    /// As [`Region::resize`].
    unsafe fn resize_once(&self, pointer: NonNull<u8>, to: Size) -> Result<NonNull<u8>, ResizeError> {
        let core = self.core();
        let (zone, offset, span) = self.span_at(pointer)?;
        if to.len == span.len || (to.class > 0 && to.class == span.class) {
            return Ok(pointer);
        }
        // Among small pages a span has room for the colour that its class doesn't tell.
        if to.plain_class > 0 && to.plain_class == span.class && span.usable() >= to.used {
            return Ok(pointer);
        }
        if to.len < span.len {
            self.shrink(zone, offset, &span, to);
            return Ok(pointer);
        }
        // What has outgrown small pages goes where huge pages are, once.
        let huge = zone.huge || core.wants_huge_pages(to.len);
        if huge == zone.huge
            && let Some(grown) = self.grow(zone, offset, &span, to)
        {
            return grown.then_some(pointer).ok_or(ResizeError::Memory(AllocateError::OutOfMemory { size: to.asked }));
        }
        // A huge page that only partly belongs to the span would be cut in two.
        let whole = !zone.huge || offset.is_multiple_of(HUGE_PAGE_SIZE);
        if span.len >= MOVE_LEAST && whole && core.may_move() {
            // SAFETY: by the function's own contract.
            if let Some(moved) = unsafe { self.move_to(zone, offset, &span, to, huge) } {
                return Ok(moved);
            }
        }
        // SAFETY: by the function's own contract.
        unsafe { self.copy_to(pointer, span.usable(), to, huge) }
    }

    fn shrink(&self, zone: &Zone, offset: usize, span: &Segment, to: Size) {
        let core = self.core();
        let mut inner = zone.lock();
        core.remove_guard(zone, &mut inner, offset);
        let discard = inner.map.shrink(offset, to.len, to.class);
        core.publish(zone, &mut inner);
        drop(inner);
        if core.guarded() {
            core.install_guard(zone, offset, to.len);
        }
        if let Some((offset, len)) = discard {
            core.discard(&self.crew, zone, offset, len);
        }
        core.settle_retained(&self.crew, span.len - to.len);
    }

    /// Grows the span where it is. `None` if its neighbours are taken; whether the kernel granted the memory otherwise.
    fn grow(&self, zone: &Zone, offset: usize, span: &Segment, to: Size) -> Option<bool> {
        let core = self.core();
        let mut inner = zone.lock();
        core.remove_guard(zone, &mut inner, offset);
        let before = inner.map.in_use_at(offset)?;
        let grown = inner.map.grow(offset, to.len, to.class, core.can_revoke());
        if let Some(pieces) = &grown {
            core.revoke(pieces);
        }
        core.publish(zone, &mut inner);
        drop(inner);
        let granted = grown.as_ref().is_some_and(|pieces| core.commit(zone, pieces));
        if let Some(pieces) = grown.as_ref().filter(|_| !granted) {
            let mut inner = zone.lock();
            inner.map.undo_growth(offset, before, pieces);
            core.publish(zone, &mut inner);
        }
        if core.guarded() {
            core.install_guard(zone, offset, if granted { to.len } else { span.len });
        }
        let fresh = to.len - span.len - grown?.backed();
        if granted {
            core.counters().grown_in_place_bytes.add((to.len - span.len) as u64);
            core.reserve_headroom(&self.crew, zone, fresh);
        }
        Some(granted)
    }

    /// Moves the span's pages to a longer span. `None` where there is none to be had or the kernel refuses.
    ///
    /// # Safety
    /// As [`Region::resize`].
    unsafe fn move_to(&self, zone: &Zone, offset: usize, span: &Segment, to: Size, huge: bool) -> Option<NonNull<u8>> {
        let core = self.core();
        let align = if huge { HUGE_PAGE_SIZE } else { PAGE_SIZE };
        // Pages stay on their node, so the longer span has to be of that node as well.
        let node = Some(zone.node);
        let need = Need { len: to.len, class: 0, align, want: Want::AddressSpace, huge, node };
        let mut grant = Grant::new();
        let new_zone = core.allocate(self.crew.topology(), need, &mut grant)?;
        let new = Self::pointer(new_zone.range.start + grant.offset);
        if new_zone.node != zone.node {
            // SAFETY: the new span is this call's own.
            let _ = unsafe { self.free(new) };
            return None;
        }
        let mut inner = zone.lock();
        core.remove_guard(zone, &mut inner, offset);
        drop(inner);
        let from = Range { len: span.usable(), ..zone.at(offset, span.len) };
        // SAFETY: `from` is the span of the caller, which does not use it meanwhile; the new span belongs to this call.
        if unsafe { core.move_mapping(zone, from, new.as_ptr() as usize) }.is_err() {
            if core.guarded() {
                core.install_guard(zone, offset, span.len);
            }
            // A kernel that is out of memory may have unmapped the new span before it gave up: it is mapped anew.
            Self::mark_moved(new_zone, grant.offset, false);
            // SAFETY: the new span is this call's own.
            let _ = unsafe { self.free(new) };
            return None;
        }
        core.counters().moved_bytes.add(span.len as u64);
        // Advice and locks move with the pages.
        Self::mark_moved(new_zone, grant.offset, span.marks.altered);
        let mut inner = zone.lock();
        let len = inner.map.release_unbacked(offset);
        core.publish(zone, &mut inner);
        drop(inner);
        core.discard(&self.crew, zone, offset, len);
        core.reserve_headroom(&self.crew, new_zone, to.len - span.len);
        Some(new)
    }

    /// The span's mapping does not merge with its neighbours' from now on.
    fn mark_moved(zone: &Zone, offset: usize, altered: bool) {
        let mut inner = zone.lock();
        let guarded = inner.map.in_use_at(offset).is_some_and(|span| span.marks.guarded);
        inner.map.mark(offset, Marks { moved: true, altered, guarded, ..Marks::default() });
    }

    /// # Safety
    /// As [`Region::resize`]; the span has `usable` bytes.
    unsafe fn copy_to(
        &self,
        pointer: NonNull<u8>,
        usable: usize,
        to: Size,
        huge: bool,
    ) -> Result<NonNull<u8>, ResizeError> {
        let align = if to.len >= ALIGN_LEAST && huge { HUGE_PAGE_SIZE } else { 1 };
        let new = self.allocate(to.asked, align)?;
        let count = usable.min(to.used);
        // SAFETY: both spans are at least `count` bytes long and different; the old one belongs to the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(pointer.as_ptr(), new.as_ptr(), count);
            self.free(pointer)?;
        }
        self.core().counters().copied_bytes.add(count as u64);
        Ok(new)
    }
}

impl Core {
    /// Moves the pages of a span of `zone` to a span that is at least as long.
    ///
    /// # Safety
    /// Both are the caller's.
    unsafe fn move_mapping(&self, zone: &Zone, from: Range, to: usize) -> Result<(), Errno> {
        if zone.huge {
            self.transfers.disown(from);
        }
        // SAFETY: by the function's own contract.
        let moved = unsafe { memory::move_pages(from, to) };
        if zone.huge {
            self.transfers.adopt(from);
        }
        moved
    }

    /// Whether spans end with a guard.
    fn guarded(&self) -> bool {
        self.guards
    }
}

/// What a span is to become.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// What to ask for, and what is used of it from its beginning, in bytes.
    asked: usize,
    used: usize,
    /// Length and class of a span for it.
    len: usize,
    class: u8,
    /// The class of a span for as many bytes without a colour.
    plain_class: u8,
}

/// Why a span could not be resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeError {
    /// The pointer is wrong.
    Pointer(PointerError),
    /// There is no memory.
    Memory(AllocateError),
}

impl From<PointerError> for ResizeError {
    fn from(error: PointerError) -> ResizeError {
        ResizeError::Pointer(error)
    }
}

impl From<AllocateError> for ResizeError {
    fn from(error: AllocateError) -> ResizeError {
        ResizeError::Memory(error)
    }
}

impl fmt::Display for ResizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ResizeError::Pointer(error) => error.fmt(f),
            ResizeError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ResizeError {}
