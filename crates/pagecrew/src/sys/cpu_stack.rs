//! Stacks of numbers, one for each CPU, in restartable sequences (kernel 4.18, glibc 2.35): no atomic instruction, no lock, and as good
//! in a signal handler as anywhere.
//!
//! A sequence reads which CPU it is on, works on that CPU's stack, and ends with one store to the stack's length. A thread that is
//! preempted, moved to another CPU or interrupted by a signal before that store begins anew, so each operation happens whole or not
//! at all, on the stack of the CPU on which it ended.
//!
//! **Life of a stack.** It is open: its floor is 0 and its limit is what the owner set. [`CpuStacks::drain`] closes it (nothing is below
//! the limit, nothing above the floor), restarts the sequences of all threads (`membarrier`), has it alone then, empties it, and opens
//! it again. A sequence reads the bound *before* the length: one that finds the stack open again finds it empty, too.
//!
//! Where there is no rseq, each stack has a try-lock, and whoever doesn't get it finds the stack empty or full.

use super::memory::{self, Protection, Range};
use super::{Errno, PAGE_SIZE, membarrier, round_up, rseq, sched, topology};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

/// What [`CpuStacks::pop`] returns for a stack that is empty or closed; no number may be this.
pub const NONE: u32 = u32::MAX;

/// Numbers that fit into a stack.
pub const SLOTS: usize = 496;

/// One stack: a line for what is looked at, then the numbers.
#[repr(C, align(64))]
struct Stack {
    /// Pushes go on below this length; 0 while it is closed.
    limit: AtomicU32,
    /// Pops go on above this length; [`CLOSED`] while it is closed.
    floor: AtomicU32,
    length: AtomicU32,
    /// Whether a thread is draining it, or, without rseq, using it.
    held: AtomicU32,
    /// The limit when it is open.
    open_limit: AtomicU32,
    unused: [u32; 11],
    slots: [AtomicU32; SLOTS],
}

const CLOSED: u32 = u32::MAX;
const STRIDE_LOG2: u32 = 11;
const LIMIT: usize = offset_of!(Stack, limit);
const FLOOR: usize = offset_of!(Stack, floor);
const LENGTH: usize = offset_of!(Stack, length);
const FIRST: usize = offset_of!(Stack, slots);

const _: () = assert!(size_of::<Stack>() == 1 << STRIDE_LOG2);

/// A stack for each CPU that the machine may ever have.
pub struct CpuStacks {
    base: *const Stack,
    cpus: u32,
    /// Where the thread pointer's `struct rseq` is; `None` without.
    rseq: Option<isize>,
}

// SAFETY: what `base` points to are atomics; the sequences change them on their own CPU only, as the module says.
unsafe impl Send for CpuStacks {}
// SAFETY: as above.
unsafe impl Sync for CpuStacks {}

impl CpuStacks {
    /// Empty stacks for up to `limit` numbers each.
    ///
    /// # Errors
    /// `ENOMEM` if there is no address space.
    ///
    /// # Panics
    /// If `limit` is more than [`SLOTS`].
    pub fn new(limit: usize) -> Result<CpuStacks, Errno> {
        let usable = rseq::prepare().is_ok() && membarrier::register().is_ok();
        CpuStacks::with(limit, if usable { rseq::offset() } else { None })
    }

    fn with(limit: usize, rseq: Option<isize>) -> Result<CpuStacks, Errno> {
        assert!(limit <= SLOTS, "a stack has {SLOTS} slots, not {limit}");
        let cpus = topology::possible_cpus();
        let base = memory::map(Self::bytes(cpus), Protection::ReadWrite)? as *const Stack;
        let stacks = CpuStacks { base, cpus: cpus as u32, rseq };
        for stack in stacks.all() {
            stack.limit.store(limit as u32, Ordering::Relaxed);
            stack.open_limit.store(limit as u32, Ordering::Relaxed);
        }
        Ok(stacks)
    }

    fn bytes(cpus: usize) -> usize {
        round_up(cpus * size_of::<Stack>(), PAGE_SIZE).expect("a machine has no more CPUs than fit into memory")
    }

    /// Bytes that the stacks take.
    pub fn size(&self) -> usize {
        Self::bytes(self.cpus as usize)
    }

    /// The number of stacks.
    pub fn cpus(&self) -> usize {
        self.cpus as usize
    }

    /// Whether the stacks work in restartable sequences.
    pub fn restartable(&self) -> bool {
        self.rseq.is_some()
    }

    #[inline(always)]
    fn stacks(&self, rseq: isize) -> Stacks {
        Stacks { base: self.base, cpus: self.cpus, rseq }
    }

    fn all(&self) -> &[Stack] {
        // SAFETY: the mapping has room for `cpus` stacks, lives as long as `self`, and all its bytes are valid as atomics.
        unsafe { std::slice::from_raw_parts(self.base, self.cpus as usize) }
    }

    /// The CPU that the calling thread runs on at this moment.
    #[inline]
    pub fn here(&self) -> usize {
        match self.rseq {
            // SAFETY: `rseq` is this process's offset.
            Some(offset) => (unsafe { rseq::cpu(offset) } as usize).min(self.cpus() - 1),
            None => sched::current_cpu().min(self.cpus() - 1),
        }
    }

    /// Takes the number that was put last on this CPU; [`NONE`] if there is none.
    #[inline(always)]
    pub fn pop(&self) -> u32 {
        match self.rseq {
            // SAFETY: the stacks are mapped, and `rseq` is where this process's threads have their registered area.
            Some(rseq) => unsafe { sequence::pop(self.stacks(rseq)) },
            None => self.pop_held(),
        }
    }

    /// Puts `number` on this CPU's stack. Returns whether there was room.
    #[inline(always)]
    pub fn push(&self, number: u32) -> bool {
        match self.rseq {
            // SAFETY: as in `pop`.
            Some(rseq) => unsafe { sequence::push(self.stacks(rseq), number) },
            None => self.push_many_held(&[number]) == 1,
        }
    }

    /// Takes up to as many numbers as `into` has room for, those first that were put last. Returns how many.
    #[inline]
    pub fn pop_many(&self, into: &mut [u32]) -> usize {
        match self.rseq {
            // SAFETY: as in `pop`; `into` has room for as many numbers as it says.
            Some(rseq) => unsafe { sequence::pop_many(self.stacks(rseq), into.as_mut_ptr(), into.len()) },
            None => self.pop_many_held(into),
        }
    }

    /// Puts as many of the first of `numbers` as there is room for. Returns how many.
    #[inline]
    pub fn push_many(&self, numbers: &[u32]) -> usize {
        match self.rseq {
            // SAFETY: as in `pop`; `numbers` has as many as it says.
            Some(rseq) => unsafe { sequence::push_many(self.stacks(rseq), numbers.as_ptr(), numbers.len()) },
            None => self.push_many_held(numbers),
        }
    }

    /// What is on the stack of `cpu` at this moment.
    pub fn len(&self, cpu: usize) -> usize {
        self.all()[cpu].length.load(Ordering::Relaxed) as usize
    }

    /// Whether there is nothing on any stack at this moment.
    pub fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// What is on all stacks at this moment.
    pub fn total(&self) -> usize {
        self.all().iter().map(|stack| stack.length.load(Ordering::Relaxed) as usize).sum()
    }

    /// How many numbers the stack of `cpu` takes.
    pub fn limit(&self, cpu: usize) -> usize {
        self.all()[cpu].open_limit.load(Ordering::Relaxed) as usize
    }

    /// Has the stack of `cpu` take up to `limit` numbers from now on.
    pub fn set_limit(&self, cpu: usize, limit: usize) {
        let stack = &self.all()[cpu];
        let limit = limit.min(SLOTS) as u32;
        let before = stack.open_limit.swap(limit, Ordering::Relaxed);
        // One that is closed stays so, and opens with the new limit.
        let _ = stack.limit.compare_exchange(before, limit, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Empties the stacks of the CPUs that `wanted` names: `each` gets what is on them. A stack that somebody else is draining, or,
    /// without rseq, using, is left out. Costs an inter-processor interrupt to each CPU that runs a thread of this process. May be
    /// called in a signal handler. Returns how many numbers there were.
    pub fn drain(&self, wanted: impl Fn(usize) -> bool, mut each: impl FnMut(&[u32])) -> usize {
        let hold = |stack: &Stack| stack.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let chosen = |cpu: usize, stack: &Stack| stack.length.load(Ordering::Relaxed) > 0 && wanted(cpu);
        let mut held = [0u64; MOST_CPUS / 64];
        for (cpu, stack) in self.all().iter().enumerate().take(MOST_CPUS) {
            if chosen(cpu, stack) && hold(stack) {
                stack.floor.store(CLOSED, Ordering::SeqCst);
                stack.limit.store(0, Ordering::SeqCst);
                held[cpu / 64] |= 1 << (cpu % 64);
            }
        }
        let mine =
            || self.all().iter().enumerate().take(MOST_CPUS).filter(|&(cpu, _)| held[cpu / 64] >> (cpu % 64) & 1 != 0);
        if mine().next().is_none() {
            return 0;
        }
        let alone = self.rseq.is_none() || membarrier::restart_sequences().is_ok();
        let mut sum = 0;
        for (_, stack) in mine() {
            if alone {
                let mut numbers = [0; SLOTS];
                let length = stack.length.load(Ordering::Relaxed) as usize;
                for (number, slot) in numbers.iter_mut().zip(&stack.slots[..length]) {
                    *number = slot.load(Ordering::Relaxed);
                }
                stack.length.store(0, Ordering::Relaxed);
                sum += length;
                each(&numbers[..length]);
            }
            stack.limit.store(stack.open_limit.load(Ordering::Relaxed), Ordering::Release);
            stack.floor.store(0, Ordering::Release);
            stack.held.store(0, Ordering::Release);
        }
        sum
    }

    /// In a forked child: forgets what is on the stacks and who was at them, and registers with the kernel anew.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        if self.rseq.is_some() {
            // It was granted to the parent, on the same kernel.
            let _ = membarrier::register();
        }
        for stack in self.all() {
            stack.length.store(0, Ordering::Relaxed);
            stack.limit.store(stack.open_limit.load(Ordering::Relaxed), Ordering::Relaxed);
            stack.floor.store(0, Ordering::Relaxed);
            stack.held.store(0, Ordering::Relaxed);
        }
    }

    /// Without rseq: has `work` done with this CPU's stack, if nobody is at it.
    fn hold<T>(&self, work: impl FnOnce(&Stack) -> T) -> Option<T> {
        let stack = &self.all()[self.here()];
        stack.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let result = work(stack);
        stack.held.store(0, Ordering::Release);
        Some(result)
    }

    #[cold]
    fn pop_held(&self) -> u32 {
        let mut number = [NONE];
        self.pop_many_held(&mut number);
        number[0]
    }

    #[cold]
    fn pop_many_held(&self, into: &mut [u32]) -> usize {
        self.hold(|stack| {
            let length = stack.length.load(Ordering::Relaxed) as usize;
            let count = into.len().min(length);
            for (number, slot) in into.iter_mut().zip(&stack.slots[length - count..length]) {
                *number = slot.load(Ordering::Relaxed);
            }
            stack.length.store((length - count) as u32, Ordering::Relaxed);
            count
        })
        .unwrap_or(0)
    }

    #[cold]
    fn push_many_held(&self, numbers: &[u32]) -> usize {
        self.hold(|stack| {
            let length = stack.length.load(Ordering::Relaxed) as usize;
            let room = (stack.limit.load(Ordering::Relaxed) as usize).saturating_sub(length);
            let count = numbers.len().min(room);
            for (number, slot) in numbers[..count].iter().zip(&stack.slots[length..]) {
                slot.store(*number, Ordering::Relaxed);
            }
            stack.length.store((length + count) as u32, Ordering::Relaxed);
            count
        })
        .unwrap_or(0)
    }
}

/// CPUs whose stacks can be drained; Linux is not built for more.
const MOST_CPUS: usize = 8192;

impl Drop for CpuStacks {
    fn drop(&mut self) {
        // SAFETY: the owner goes away, and with it everybody who may use the stacks.
        let _ = unsafe { memory::unmap(Range { start: self.base as usize, len: self.size() }) };
    }
}

/// Which stacks, and how a thread finds out on which CPU it is.
#[derive(Clone, Copy)]
struct Stacks {
    base: *const Stack,
    cpus: u32,
    rseq: isize,
}

/// The sequences. Each is a run of instructions from label 3 to label 4 of which the last one commits. Label 66 is its descriptor
/// (`struct rseq_cs`), label 5 where the kernel has a thread go on that it disturbed: the four bytes before it are what the kernel
/// checks (`RSEQ_SIG`). Label 6 is where there is nothing to take or no room.
///
/// **Why they are sound.** The CPU's number is compared with the number of stacks, so only a stack is read or written, and the limit of
/// an open one is at most the number of its slots. Between the first and the last instruction no other thread writes to an open stack
/// of this CPU, by the protocol of the module. Whatever a sequence writes before it commits is nobody's, so it may begin anew as often
/// as it likes.
mod sequence {
    use super::arch::{copy, copying, pop, pop_many, push, push_many, sequence};
    use super::{FLOOR, LIMIT, Stacks};

    /// # Safety
    /// The stacks are mapped, and `rseq` is the distance of the thread's registered area from its thread pointer.
    #[inline(always)]
    pub unsafe fn pop(stacks: Stacks) -> u32 {
        let number: u64;
        // SAFETY: by the function's own contract, and as the module says.
        unsafe { sequence!(stacks, FLOOR, pop, scratch = out(reg) number, length = out(reg) _,) };
        number as u32
    }

    /// # Safety
    /// As [`pop`].
    #[inline(always)]
    pub unsafe fn push(stacks: Stacks, number: u32) -> bool {
        // Not 0 where it was pushed, 0 otherwise.
        let done: u64;
        // SAFETY: by the function's own contract, and as the module says.
        unsafe {
            sequence!(stacks, LIMIT, push, scratch = out(reg) _, length = out(reg) done, number = in(reg) number,)
        };
        done != 0
    }

    /// # Safety
    /// As [`pop`]; `into` has room for `wanted` numbers.
    #[inline]
    pub unsafe fn pop_many(stacks: Stacks, into: *mut u32, wanted: usize) -> usize {
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
    pub unsafe fn push_many(stacks: Stacks, numbers: *const u32, wanted: usize) -> usize {
        let count: usize;
        // SAFETY: by the function's own contract, and as the module says.
        unsafe {
            copying!(stacks, LIMIT, push_many, count = out(reg) count, wanted = in(reg) wanted, from = in(reg) numbers, to = out(reg) _,)
        };
        count
    }
}

/// What the sequences are on x86-64. Each operation finds its bound in `{scratch}` and the length in `{length}`, leaves the new length
/// there, and says what is done where it jumps to label 6.
#[cfg(target_arch = "x86_64")]
mod arch {
    macro_rules! sequence {
        ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
            std::arch::asm!(
                ".pushsection __rseq_cs,\"aw\",@progbits",
                ".balign 32",
                "66: .long 0, 0",
                ".quad 3f, 4f - 3f, 5f",
                ".popsection",
                ".pushsection .text.unlikely,\"ax\",@progbits",
                ".long 0x53053053",
                "5: jmp 2f",
                ".popsection",
                "2: lea {scratch}, [rip + 66b]",
                "mov fs:[{rseq} + 8], {scratch}",
                "3: mov {stack:e}, fs:[{rseq} + 4]",
                "cmp {stack:e}, {cpus:e}",
                "jae 6f",
                "shl {stack}, {stride}",
                "add {stack}, {base}",
                "mov {scratch:e}, [{stack} + {bound}]",
                "mov {length:e}, [{stack} + {at}]",
                $operation!(whole),
                "mov [{stack} + {at}], {length:e}",
                "4:",
                ".pushsection .text.unlikely,\"ax\",@progbits",
                $operation!(none),
                "jmp 7f",
                ".popsection",
                "7:",
                $($operands)*
                stack = out(reg) _,
                rseq = in(reg) $stacks.rseq,
                cpus = in(reg) $stacks.cpus,
                base = in(reg) $stacks.base,
                stride = const super::STRIDE_LOG2,
                bound = const $bound,
                at = const super::LENGTH,
                first = const super::FIRST,
                options(nostack)
            )
        };
    }

    macro_rules! copying {
        ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
            sequence!(
                $stacks,
                $bound,
                $operation,
                $($operands)*
                scratch = out(reg) _,
                length = out(reg) _,
                done = out(reg) _,
                four = out(xmm_reg) _,
            )
        };
    }

    macro_rules! pop {
        (whole) => {
            concat!(
                "cmp {length:e}, {scratch:e}\n",
                "jbe 6f\n",
                "mov {scratch:e}, [{stack} + 4*{length} + {first} - 4]\n",
                "dec {length:e}",
            )
        };
        (none) => {
            "6: mov {scratch:e}, -1"
        };
    }

    macro_rules! push {
        (whole) => {
            concat!(
                "cmp {length:e}, {scratch:e}\n",
                "jae 6f\n",
                "mov [{stack} + 4*{length:r} + {first}], {number:e}\n",
                "inc {length:e}",
            )
        };
        (none) => {
            "6: xor {length:e}, {length:e}"
        };
    }

    macro_rules! pop_many {
        (whole) => {
            concat!(
                "cmp {length:e}, {scratch:e}\n",
                "jbe 6f\n",
                "mov {count:e}, {length:e}\n",
                "cmp {count}, {wanted}\n",
                "cmova {count}, {wanted}\n",
                "sub {length:e}, {count:e}\n",
                "lea {from}, [{stack} + 4*{length} + {first}]\n",
                copy!(),
            )
        };
        (none) => {
            "6: xor {count:e}, {count:e}"
        };
    }

    macro_rules! push_many {
        (whole) => {
            concat!(
                "mov {count:e}, {scratch:e}\n",
                "sub {count:e}, {length:e}\n",
                "jbe 6f\n",
                "cmp {count}, {wanted}\n",
                "cmova {count}, {wanted}\n",
                "lea {to}, [{stack} + 4*{length} + {first}]\n",
                "add {length:e}, {count:e}\n",
                copy!(),
            )
        };
        (none) => {
            "6: xor {count:e}, {count:e}"
        };
    }

    /// Copies `{count}` numbers from `{from}` to `{to}`: odd ones first, then four at a time.
    macro_rules! copy {
        () => {
            concat!(
                "xor {done:e}, {done:e}\n",
                "mov {scratch:e}, {count:e}\n",
                "and {scratch:e}, 3\n",
                "jz 9f\n",
                "8: movd {four}, dword ptr [{from} + 4*{done}]\n",
                "movd dword ptr [{to} + 4*{done}], {four}\n",
                "inc {done:e}\n",
                "cmp {done:e}, {scratch:e}\n",
                "jne 8b\n",
                "9: cmp {done:e}, {count:e}\n",
                "je 22f\n",
                "88: movups {four}, [{from} + 4*{done}]\n",
                "movups [{to} + 4*{done}], {four}\n",
                "add {done:e}, 4\n",
                "cmp {done:e}, {count:e}\n",
                "jne 88b\n",
                "22:",
            )
        };
    }

    pub(super) use {copy, copying, pop, pop_many, push, push_many, sequence};
}

/// As on x86-64. The bound is read with acquire ordering, so that the length is no older than it.
#[cfg(target_arch = "aarch64")]
mod arch {
    macro_rules! sequence {
        ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
            std::arch::asm!(
                ".pushsection __rseq_cs,\"aw\",@progbits",
                ".balign 32",
                "66: .long 0, 0",
                ".quad 3f, 4f - 3f, 5f",
                ".popsection",
                "2: adrp {scratch}, 66b",
                "add {scratch}, {scratch}, :lo12:66b",
                "str {scratch}, [{area}, 8]",
                "3: ldr {stack:w}, [{area}, 4]",
                "cmp {stack:w}, {cpus:w}",
                "b.hs 6f",
                "add {stack}, {base}, {stack}, lsl {stride}",
                "add {scratch}, {stack}, {bound}",
                "ldar {scratch:w}, [{scratch}]",
                "ldr {length:w}, [{stack}, {at}]",
                $operation!(whole),
                "str {length:w}, [{stack}, {at}]",
                "4: b 7f",
                ".inst 0xd428bc00",
                "5: b 2b",
                $operation!(none),
                "7:",
                $($operands)*
                stack = out(reg) _,
                area = in(reg) crate::sys::rseq::at($stacks.rseq),
                cpus = in(reg) $stacks.cpus,
                base = in(reg) $stacks.base,
                stride = const super::STRIDE_LOG2,
                bound = const $bound,
                at = const super::LENGTH,
                first = const super::FIRST,
                options(nostack)
            )
        };
    }

    macro_rules! copying {
        ($stacks:expr, $bound:expr, $operation:ident, $($operands:tt)*) => {
            sequence!(
                $stacks,
                $bound,
                $operation,
                $($operands)*
                scratch = out(reg) _,
                length = out(reg) _,
                done = out(reg) _,
            )
        };
    }

    macro_rules! pop {
        (whole) => {
            concat!(
                "cmp {length:w}, {scratch:w}\n",
                "b.ls 6f\n",
                "sub {length:w}, {length:w}, 1\n",
                "add {scratch}, {stack}, {length}, lsl 2\n",
                "ldr {scratch:w}, [{scratch}, {first}]",
            )
        };
        (none) => {
            "6: mov {scratch:w}, -1"
        };
    }

    macro_rules! push {
        (whole) => {
            concat!(
                "cmp {length:w}, {scratch:w}\n",
                "b.hs 6f\n",
                "add {scratch}, {stack}, {length}, lsl 2\n",
                "str {number:w}, [{scratch}, {first}]\n",
                "add {length:w}, {length:w}, 1",
            )
        };
        (none) => {
            "6: mov {length:w}, wzr"
        };
    }

    macro_rules! pop_many {
        (whole) => {
            concat!(
                "cmp {length:w}, {scratch:w}\n",
                "b.ls 6f\n",
                "mov {count:w}, {length:w}\n",
                "cmp {count}, {wanted}\n",
                "csel {count}, {count}, {wanted}, lo\n",
                "cbz {count}, 6f\n",
                "sub {length:w}, {length:w}, {count:w}\n",
                "add {from}, {stack}, {length}, lsl 2\n",
                "add {from}, {from}, {first}\n",
                copy!(),
            )
        };
        (none) => {
            "6: mov {count}, xzr"
        };
    }

    macro_rules! push_many {
        (whole) => {
            concat!(
                "subs {count:w}, {scratch:w}, {length:w}\n",
                "b.ls 6f\n",
                "cmp {count}, {wanted}\n",
                "csel {count}, {count}, {wanted}, lo\n",
                "cbz {count}, 6f\n",
                "add {to}, {stack}, {length}, lsl 2\n",
                "add {to}, {to}, {first}\n",
                "add {length:w}, {length:w}, {count:w}\n",
                copy!(),
            )
        };
        (none) => {
            "6: mov {count}, xzr"
        };
    }

    macro_rules! copy {
        () => {
            concat!(
                "mov {done:w}, wzr\n",
                "8: ldr {scratch:w}, [{from}, {done:w}, uxtw 2]\n",
                "str {scratch:w}, [{to}, {done:w}, uxtw 2]\n",
                "add {done:w}, {done:w}, 1\n",
                "cmp {done:w}, {count:w}\n",
                "b.ne 8b",
            )
        };
    }

    pub(super) use {copy, copying, pop, pop_many, push, push_many, sequence};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::sched::CpuSet;
    use std::sync::atomic::{AtomicBool, AtomicU8};

    fn both(limit: usize) -> Vec<CpuStacks> {
        vec![CpuStacks::new(limit).unwrap(), CpuStacks::with(limit, None).unwrap()]
    }

    /// The same, and the sequences alone, on an area that only looks like the kernel's: for a thread that nobody disturbs, as good as any.
    /// Machines that have no rseq run their sequences so.
    fn all_kinds(limit: usize, test: impl Fn(&CpuStacks) + Sync) {
        both(limit).iter().for_each(|stacks| pinned(|| test(stacks)));
        pinned(|| {
            let area = [0u64; 8];
            let offset = area.as_ptr() as isize - rseq::at(0) as isize;
            test(&CpuStacks::with(limit, Some(offset)).unwrap());
            assert_ne!(std::hint::black_box(area)[1], 0, "no sequence was announced");
        });
    }

    fn pinned<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let work = || {
                let mut one = CpuSet::new();
                one.insert(sched::current_cpu());
                sched::set_affinity(&one).unwrap();
                work()
            };
            scope.spawn(work).join().unwrap()
        })
    }

    #[test]
    fn what_was_put_last_is_taken_first() {
        all_kinds(4, |stacks| {
            assert_eq!(stacks.pop(), NONE);
            assert_eq!([7, 8, 9, 10, 11].map(|number| stacks.push(number)), [true, true, true, true, false]);
            assert_eq!((stacks.pop(), stacks.total(), stacks.len(stacks.here())), (10, 3, 3));
            let mut two = [0; 2];
            assert_eq!((stacks.pop_many(&mut two), two), (2, [8, 9]));
            assert_eq!((stacks.pop(), stacks.pop(), stacks.is_empty()), (7, NONE, true));
        });
    }

    #[test]
    fn many_at_a_time_are_as_good_as_one_at_a_time() {
        all_kinds(SLOTS, |stacks| {
            for count in (0..40).chain([SLOTS - 1, SLOTS, SLOTS + 1, 1000]) {
                let numbers: Vec<u32> = (0..count as u32).map(|number| number * 3).collect();
                let fit = count.min(SLOTS);
                assert_eq!(stacks.push_many(&numbers), fit);
                let mut into = vec![NONE; count + 3];
                let (half, rest) = into.split_at_mut(fit / 2);
                assert_eq!(stacks.pop_many(half), fit / 2);
                assert_eq!(half, &numbers[fit - fit / 2..fit]);
                assert_eq!(stacks.pop_many(rest), fit - fit / 2);
                assert_eq!(rest[..fit - fit / 2], numbers[..fit - fit / 2]);
                assert!(rest[fit - fit / 2..].iter().all(|&number| number == NONE));
            }
        });
    }

    #[test]
    fn a_lower_limit_holds_from_then_on() {
        for stacks in both(8) {
            pinned(|| {
                assert_eq!(stacks.push_many(&[1, 2, 3, 4, 5]), 5);
                stacks.set_limit(stacks.here(), 3);
                assert!(!stacks.push(6) && stacks.push_many(&[6, 7]) == 0);
                assert_eq!((stacks.pop(), stacks.pop(), stacks.pop()), (5, 4, 3));
                assert_eq!(stacks.push_many(&[6, 7]), 1);
                assert_eq!(stacks.drain(|_| true, |numbers| assert_eq!(numbers, [1, 2, 6])), 3);
                assert_eq!(stacks.push_many(&[1, 2, 3, 4]), 3);
            });
        }
    }

    /// Threads that are moved about, preempted and drained from outside: each number is in one place at any time.
    #[test]
    fn no_number_is_lost_or_doubled() {
        const NUMBERS: usize = 3000;
        for stacks in both(64) {
            let owned: Vec<AtomicU8> = (0..NUMBERS).map(|_| AtomicU8::new(0)).collect();
            let stop = AtomicBool::new(false);
            let take =
                |number: u32| assert_eq!(owned[number as usize].swap(1, Ordering::SeqCst), 0, "{number} doubled");
            let give = |number: u32| assert_eq!(owned[number as usize].swap(0, Ordering::SeqCst), 1, "{number} lost");
            let cpus = sched::affinity().unwrap();
            let left = std::thread::scope(|scope| {
                let workers: Vec<_> = (0..4)
                    .map(|worker: usize| {
                        let (stacks, stop, take, give) = (&stacks, &stop, &take, &give);
                        scope.spawn(move || {
                            let each = NUMBERS / 4;
                            let mut mine: Vec<u32> = (worker * each..(worker + 1) * each).map(|n| n as u32).collect();
                            mine.iter().for_each(|&number| take(number));
                            let mut round = worker;
                            while !stop.load(Ordering::Relaxed) {
                                round = round.wrapping_mul(0x9e37_79b9).wrapping_add(0x7f4a_7c15);
                                let many = 1 + (round >> 8) % 20;
                                match (round >> 4) % 4 {
                                    0 => {
                                        if let Some(number) = mine.pop() {
                                            give(number);
                                            if !stacks.push(number) {
                                                take(number);
                                                mine.push(number);
                                            }
                                        }
                                    }
                                    1 => {
                                        let number = stacks.pop();
                                        if number != NONE {
                                            take(number);
                                            mine.push(number);
                                        }
                                    }
                                    2 => {
                                        let some = mine.split_off(mine.len().saturating_sub(many));
                                        some.iter().for_each(|&number| give(number));
                                        let pushed = stacks.push_many(&some);
                                        some[pushed..].iter().for_each(|&number| take(number));
                                        mine.extend(&some[pushed..]);
                                    }
                                    _ => {
                                        let mut some = [0; 20];
                                        let popped = stacks.pop_many(&mut some[..many]);
                                        some[..popped].iter().for_each(|&number| take(number));
                                        mine.extend(&some[..popped]);
                                    }
                                }
                            }
                            mine
                        })
                    })
                    .collect();
                let mover = scope.spawn(|| {
                    let threads = || std::fs::read_dir("/proc/self/task").unwrap().flatten();
                    let me = sched::thread_id();
                    let (mut kept, mut drained) = (Vec::new(), 0);
                    for round in 0..400usize {
                        for thread in threads() {
                            let id: i32 = thread.file_name().to_str().unwrap().parse().unwrap();
                            let mut one = CpuSet::new();
                            one.insert((round + id as usize) % sched::online_cpus());
                            let worker = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
                            if id != me && worker.starts_with("sys::cpu_stack") {
                                let _ = sched::set_affinity_of(id, if round % 7 == 0 { &cpus } else { &one });
                            }
                        }
                        let mut some = Vec::new();
                        let wanted = |cpu: usize| (cpu + round).is_multiple_of(2);
                        drained += stacks.drain(wanted, |numbers| some.extend_from_slice(numbers));
                        let pushed = stacks.push_many(&some);
                        some[pushed..].iter().for_each(|&number| take(number));
                        kept.extend_from_slice(&some[pushed..]);
                        std::thread::sleep(std::time::Duration::from_micros(500));
                    }
                    stop.store(true, Ordering::Relaxed);
                    assert!(drained > 0);
                    kept
                });
                let mut left = mover.join().unwrap();
                workers.into_iter().for_each(|worker| left.extend(worker.join().unwrap()));
                left
            });
            let mut all = left;
            stacks.drain(|_| true, |numbers| all.extend_from_slice(numbers));
            all.sort_unstable();
            assert_eq!(all, (0..NUMBERS as u32).collect::<Vec<_>>());
        }
    }
}
