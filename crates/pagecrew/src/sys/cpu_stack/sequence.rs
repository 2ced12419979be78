//! The sequences. Each is a run of instructions from label 3 to label 4 of which the last one commits. Label 66 is its descriptor
//! (`struct rseq_cs`), label 5 where the kernel has a thread go on that it disturbed: the four bytes before it are what the kernel
//! checks (`RSEQ_SIG`). Label 6 is where there is nothing to take or no room.
//!
//! **Why they are sound.** The CPU's number is compared with the number of stacks, so only a stack is read or written, and the limit of
//! an open one is at most the number of its slots. Between the first and the last instruction no other thread writes to an open stack
//! of this CPU, by the protocol of the module. Whatever a sequence writes before it commits is nobody's, so it may begin anew as often
//! as it likes.

use super::arch::{copy, copying, pop, pop_many, push, push_many, sequence};
use super::head::Head;
use std::mem::offset_of;

const LIMIT: usize = offset_of!(Head, limit);
const FLOOR: usize = offset_of!(Head, floor);
const LENGTH: usize = offset_of!(Head, length);
const FIRST: usize = size_of::<Head>();

/// Which stacks, one for each CPU, 2^`STRIDE` bytes from one to the next, and how a thread finds out on which CPU it is.
#[derive(Clone, Copy)]
pub struct Stacks {
    /// The head of the first CPU's.
    pub base: *const Head,
    pub cpus: u32,
    pub rseq: isize,
}

/// The number that was taken, and where the stack is; only a stack that had one is named.
///
/// # Safety
/// The stacks are mapped, and `rseq` is the distance of the thread's registered area from its thread pointer.
#[inline(always)]
pub unsafe fn pop<const STRIDE: u32>(stacks: Stacks) -> (u32, *const Head) {
    let (number, stack): (u32, *const Head);
    // SAFETY: by the function's own contract, and as the module says.
    unsafe { sequence!(stacks, FLOOR, pop, stack = out(reg) stack, scratch = out(reg) number, length = out(reg) _,) };
    (number, stack)
}

/// The length of the stack on which `number` was put, 0 if there was no room, and where it is; only a stack that had room is named.
///
/// # Safety
/// As [`pop`].
#[inline(always)]
pub unsafe fn push<const STRIDE: u32>(stacks: Stacks, number: u32) -> (u32, *const Head) {
    let (length, stack): (u32, *const Head);
    // SAFETY: by the function's own contract, and as the module says.
    unsafe {
        sequence!(stacks, LIMIT, push, stack = out(reg) stack, scratch = out(reg) _, length = out(reg) length, number = in(reg) number,)
    };
    (length, stack)
}

/// # Safety
/// As [`pop`]; `into` has room for `wanted` numbers.
#[inline]
pub unsafe fn pop_many<const STRIDE: u32>(stacks: Stacks, into: *mut u32, wanted: usize) -> usize {
    let count: usize;
    // SAFETY: by the function's own contract, and as the module says.
    unsafe {
        copying!(stacks, FLOOR, pop_many, count = out(reg) count, wanted = in(reg) wanted, from = out(reg) _, to = in(reg) into,)
    };
    count
}

/// # Safety
/// As [`pop`]; `numbers` has `wanted` of them.
#[inline]
pub unsafe fn push_many<const STRIDE: u32>(stacks: Stacks, numbers: *const u32, wanted: usize) -> usize {
    let count: usize;
    // SAFETY: by the function's own contract, and as the module says.
    unsafe {
        copying!(stacks, LIMIT, push_many, count = out(reg) count, wanted = in(reg) wanted, from = in(reg) numbers, to = out(reg) _,)
    };
    count
}
