//! Stacks of numbers, one for each CPU, in restartable sequences (kernel 4.18, glibc 2.35): no atomic instruction, no lock, and as good
//! in a signal handler as anywhere.
//!
//! A sequence reads which CPU it is on, works on that CPU's stack, and ends with one store to the stack's length. A thread that is
//! preempted, moved to another CPU or interrupted by a signal before that store begins anew, so each operation happens whole or not
//! at all, on the stack of the CPU on which it ended.
//!
//! How somebody gets a stack alone, to drain it, is said at its head (`head.rs`).

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod arch;
mod class_stacks;
mod head;
mod sequence;
#[cfg(test)]
mod tests;

pub use class_stacks::{ClassStacks, Line, MOST_CLASSES};

use super::memory::{self, Protection, Range};
use super::{Errno, PAGE_SIZE, membarrier, round_up, rseq, sched, topology};
use head::{Head, View};
use sequence::Stacks;
use std::sync::atomic::{AtomicU32, Ordering};

/// What [`CpuStacks::pop`] returns for a stack that is empty or closed; no number may be this.
pub const NONE: u32 = u32::MAX;

/// Numbers that fit into a stack.
pub const SLOTS: usize = 496;

/// What is on a stack that is closed seems to end here.
const CLOSED: u32 = u32::MAX;
const STRIDE_LOG2: u32 = 11;

/// One stack.
#[repr(C)]
struct Stack {
    head: Head,
    slots: [AtomicU32; SLOTS],
}

const _: () = assert!(size_of::<Stack>() == 1 << STRIDE_LOG2);

impl Stack {
    fn view(&self) -> View<'_> {
        View { head: &self.head, slots: &self.slots }
    }
}

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
            stack.head.set_limit(limit as u32);
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
        Stacks { base: self.base.cast(), cpus: self.cpus, rseq }
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
            Some(rseq) => unsafe { sequence::pop::<STRIDE_LOG2>(self.stacks(rseq)).0 },
            None => {
                let mut number = [NONE];
                self.pop_held(&mut number);
                number[0]
            }
        }
    }

    /// Puts `number` on this CPU's stack. Returns whether there was room.
    #[inline(always)]
    pub fn push(&self, number: u32) -> bool {
        match self.rseq {
            // SAFETY: as in `pop`.
            Some(rseq) => unsafe { sequence::push::<STRIDE_LOG2>(self.stacks(rseq), number).0 != 0 },
            None => self.push_held(&[number]) == 1,
        }
    }

    /// Takes up to as many numbers as `into` has room for, those first that were put last. Returns how many.
    #[inline]
    pub fn pop_many(&self, into: &mut [u32]) -> usize {
        match self.rseq {
            // SAFETY: as in `pop`; `into` has room for as many numbers as it says.
            Some(rseq) => unsafe {
                sequence::pop_many::<STRIDE_LOG2>(self.stacks(rseq), into.as_mut_ptr(), into.len())
            },
            None => self.pop_held(into),
        }
    }

    /// Puts as many of the first of `numbers` as there is room for. Returns how many.
    #[inline]
    pub fn push_many(&self, numbers: &[u32]) -> usize {
        match self.rseq {
            // SAFETY: as in `pop`; `numbers` has as many as it says.
            Some(rseq) => unsafe {
                sequence::push_many::<STRIDE_LOG2>(self.stacks(rseq), numbers.as_ptr(), numbers.len())
            },
            None => self.push_held(numbers),
        }
    }

    /// What is on the stack of `cpu` at this moment.
    pub fn len(&self, cpu: usize) -> usize {
        self.all()[cpu].head.length.load(Ordering::Relaxed) as usize
    }

    /// Whether there is nothing on any stack at this moment.
    pub fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// What is on all stacks at this moment.
    pub fn total(&self) -> usize {
        self.all().iter().map(|stack| stack.head.length.load(Ordering::Relaxed) as usize).sum()
    }

    /// How many numbers the stack of `cpu` takes.
    pub fn limit(&self, cpu: usize) -> usize {
        self.all()[cpu].head.limit()
    }

    /// Has the stack of `cpu` take up to `limit` numbers from now on.
    pub fn set_limit(&self, cpu: usize, limit: usize) {
        self.all()[cpu].head.set_limit(limit.min(SLOTS) as u32);
    }

    /// Empties the stacks of the CPUs that `wanted` names: `each` gets what is on them. A stack that somebody else is draining, or,
    /// without rseq, using, is left out. Costs an inter-processor interrupt to each CPU that runs a thread of this process. May be
    /// called in a signal handler. Returns how many numbers there were.
    pub fn drain(&self, wanted: impl Fn(usize) -> bool, mut each: impl FnMut(&[u32])) -> usize {
        let chosen = |cpu: usize, stack: &Stack| stack.head.length.load(Ordering::Relaxed) > 0 && wanted(cpu);
        let mut closed = [0u64; MOST_CPUS / 64];
        for (cpu, stack) in self.all().iter().enumerate().take(MOST_CPUS) {
            if chosen(cpu, stack) && stack.head.close() {
                closed[cpu / 64] |= 1 << (cpu % 64);
            }
        }
        let mine = || {
            self.all().iter().enumerate().take(MOST_CPUS).filter(|&(cpu, _)| closed[cpu / 64] >> (cpu % 64) & 1 != 0)
        };
        if mine().next().is_none() {
            return 0;
        }
        let alone = self.rseq.is_none() || membarrier::restart_sequences().is_ok();
        let mut sum = 0;
        for (_, stack) in mine() {
            let mut numbers = [0; SLOTS];
            let count = if alone { stack.view().empty(&mut numbers) } else { 0 };
            if count > 0 {
                sum += count;
                each(&numbers[..count]);
            }
            stack.head.reopen();
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
            stack.head.length.store(0, Ordering::Relaxed);
            stack.head.reopen();
        }
    }

    #[cold]
    fn pop_held(&self, into: &mut [u32]) -> usize {
        self.all()[self.here()].view().pop_held(into)
    }

    #[cold]
    fn push_held(&self, numbers: &[u32]) -> usize {
        self.all()[self.here()].view().push_held(numbers)
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
