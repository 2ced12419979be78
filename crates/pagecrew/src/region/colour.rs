//! Where a block begins in its span: at one of the lines of its first page, each at another.
//!
//! Programs go through their blocks in steps of a page or of a power of two. If all blocks begin at a page, what they touch lies in
//! few of the sets of the processor's caches, which hold a dozen lines each. A span for a block has a page more than the block, and the address of the span
//! says by how many lines the block is moved into it; so it is the same again when the span comes back.
//!
//! Source: cache colouring in the slab allocator (Jeff Bonwick, 1994).

use crate::sys::PAGE_SIZE;
use std::ptr::NonNull;

/// A span that caches take is longer than the block by so many bytes.
pub(super) const ROOM: usize = PAGE_SIZE;

/// Spans for longer blocks have no room: a block that fills the caches by itself gains nothing, and one that is as long as its huge pages stays so.
pub(super) const COLOURED_MOST: usize = 1 << 20;

/// The bytes that processors cache together.
const LINE: usize = 64;
/// The bits of an address that say the line of its page.
const LINES: usize = PAGE_SIZE - LINE;

/// Where a block of `size` bytes begins in the span at `span`, of which `usable` bytes can be used: at a page where there is no room.
#[inline(always)]
pub fn begin(span: NonNull<u8>, usable: usize, size: usize) -> NonNull<u8> {
    if usable - size < LINES {
        return span;
    }
    // The golden ratio of the range: neighbours, and what lies at distances of a power of two, come out evenly spread.
    let page = (span.as_ptr() as usize / PAGE_SIZE) as u32;
    let line = page.wrapping_mul(0x9E37_79B9) >> (u32::BITS - (PAGE_SIZE / LINE).ilog2());
    // SAFETY: that is less than `LINES` bytes, which the span has more than the block.
    unsafe { span.add(line as usize * LINE) }
}

/// The address of the span of the block at `address`, or something that is no span's address if no block can begin there.
#[inline(always)]
pub fn span_of(address: usize) -> usize {
    address & !LINES
}

/// How far the block at `address` is into its span, in bytes.
#[inline(always)]
pub fn of(address: usize) -> usize {
    address & LINES
}

/// The bytes from the beginning of a span that a block of `size` bytes may lie in, whole pages; the span is `len` bytes long.
pub(super) fn to_be_zeroed(size: usize, len: usize) -> usize {
    (size + LINES).next_multiple_of(PAGE_SIZE).min(len)
}
