//! As [`CpuStacks`](super::CpuStacks), several for each CPU: one a class.

use super::head::{Head, View};
use super::sequence::{self, Stacks};
use super::{MOST_CPUS, NONE};
use crate::sys::words::Words;
use crate::sys::{Errno, membarrier, rseq, sched, topology};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// A class is a byte.
pub const MOST_CLASSES: usize = 256;
/// The longest stack.
pub const MOST_SLOTS: usize = 64;

/// Where a CPU's line lies among its stacks. Programs use the first bytes of pages most, so what lies at the beginning of one shares the
/// few places that the processor's first cache has for those.
const LINE: usize = 11 * 64;

/// A stack and its slots. It is an even number of lines long, and the first one begins at an odd line: none begins at a page.
const STACK: usize = 384;
const FIRST_STACK: usize = LINE + size_of::<Line>();
const _: () = assert!(size_of::<Head>() + MOST_SLOTS * size_of::<u32>() <= STACK);
const _: () = assert!(STACK.is_multiple_of(128) && !FIRST_STACK.is_multiple_of(128));

/// All stacks of a CPU lie in 2^this bytes.
const STRIDE_LOG2: u32 = 17;
const _: () = assert!(FIRST_STACK + MOST_CLASSES * STACK <= 1 << STRIDE_LOG2);

/// What each CPU has besides its stacks.
#[repr(C, align(64))]
pub struct Line {
    /// What the owner counts.
    pub counts: [AtomicUsize; 8],
    /// A bit for each class whose stack is open. What is drained from everywhere is left as if it had never been opened, so that those who
    /// drain look at no others, and those who push have nothing to say.
    opened: [AtomicU64; MOST_CLASSES / 64],
}

impl Line {
    fn open(&self, class: u8) {
        self.opened[class as usize / 64].fetch_or(1 << (class % 64), Ordering::Relaxed);
    }

    fn close(&self, class: u8) {
        self.opened[class as usize / 64].fetch_and(!(1 << (class % 64)), Ordering::Relaxed);
    }

    fn opened(&self) -> impl Iterator<Item = u8> + '_ {
        self.opened.iter().enumerate().flat_map(|(index, word)| {
            let mut bits = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some((64 * index as u32 + bit) as u8)
            })
        })
    }
}

/// A stack for each class and each CPU that the machine may ever have. Those that nobody used have no memory.
pub struct ClassStacks {
    memory: Words,
    /// The first stack of the first CPU.
    first: *const u8,
    cpus: u32,
    rseq: Option<isize>,
    /// How many numbers the stacks of each class take.
    slots: &'static [u8; MOST_CLASSES],
    /// Of which CPUs a stack was ever opened.
    used: Box<[AtomicBool]>,
    /// Whether somebody is draining.
    draining: AtomicBool,
}

// SAFETY: what `first` points to are atomics; the sequences change them on their own CPU only, as the module says.
unsafe impl Send for ClassStacks {}
// SAFETY: as above.
unsafe impl Sync for ClassStacks {}

impl ClassStacks {
    /// Empty stacks that take so many numbers each.
    ///
    /// # Errors
    /// `ENOMEM` if there is no address space.
    ///
    /// # Panics
    /// If one is to take more than 64.
    pub fn new(slots: &'static [u8; MOST_CLASSES]) -> Result<ClassStacks, Errno> {
        let usable = rseq::prepare().is_ok() && membarrier::register().is_ok();
        ClassStacks::with(slots, if usable { rseq::offset() } else { None })
    }

    fn with(slots: &'static [u8; MOST_CLASSES], rseq: Option<isize>) -> Result<ClassStacks, Errno> {
        assert!(slots.iter().all(|&slots| slots as usize <= MOST_SLOTS));
        let cpus = topology::possible_cpus().clamp(1, MOST_CPUS);
        // One more than there are, so that the first one can begin at a multiple of its length.
        let memory = Words::new(((cpus + 1) << STRIDE_LOG2) / size_of::<u64>())?;
        let first = (memory.range().start.next_multiple_of(1 << STRIDE_LOG2) + FIRST_STACK) as *const u8;
        let used = (0..cpus).map(|_| AtomicBool::new(false)).collect();
        Ok(ClassStacks { memory, first, cpus: cpus as u32, rseq, slots, used, draining: AtomicBool::new(false) })
    }

    /// The number of CPUs.
    #[inline(always)]
    pub fn cpus(&self) -> usize {
        self.cpus as usize
    }

    /// Whether the stacks work in restartable sequences.
    pub fn restartable(&self) -> bool {
        self.rseq.is_some()
    }

    /// The CPU that the calling thread runs on at this moment.
    pub fn here(&self) -> usize {
        self.cpu().unwrap_or_else(|| sched::current_cpu().min(self.cpus() - 1))
    }

    /// As [`ClassStacks::here`], where there are restartable sequences.
    #[inline(always)]
    pub fn cpu(&self) -> Option<usize> {
        // SAFETY: `rseq` is this process's offset.
        Some(unsafe { rseq::cpu(self.rseq?) as usize }.min(self.cpus() - 1))
    }

    #[inline(always)]
    fn stacks(&self, rseq: isize, class: u8) -> Stacks {
        // SAFETY: the stack lies within the room of the first CPU.
        let base = unsafe { self.first.add(class as usize * STACK) }.cast();
        Stacks { base, cpus: self.cpus, rseq }
    }

    /// The line of the CPU to which `stack` belongs.
    ///
    /// # Safety
    /// It is one of these.
    #[inline(always)]
    unsafe fn line_of(&self, stack: *const Head) -> &Line {
        // SAFETY: what a CPU has begins at a multiple of its length, its line lies there, and is mapped as long as `self` lives.
        unsafe { &*stack.map_addr(|address| address & !((1 << STRIDE_LOG2) - 1)).byte_add(LINE).cast::<Line>() }
    }

    /// The line of `cpu`.
    pub fn line(&self, cpu: usize) -> &Line {
        assert!(cpu < self.cpus());
        // SAFETY: the memory has room for each CPU's.
        unsafe { self.line_of(self.first.add(cpu << STRIDE_LOG2).cast()) }
    }

    /// Of which CPUs a stack was ever used.
    pub fn used(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.cpus()).filter(|&cpu| self.used[cpu].load(Ordering::Relaxed))
    }

    fn view(&self, cpu: usize, class: usize) -> View<'_> {
        assert!(cpu < self.cpus() && class < MOST_CLASSES);
        // SAFETY: the memory holds a head and its slots at each place of each CPU, lives as long as `self`, and all bytes of it are valid
        // as atomics.
        unsafe {
            let head = self.first.add((cpu << STRIDE_LOG2) + class * STACK).cast::<Head>();
            View { head: &*head, slots: std::slice::from_raw_parts(head.add(1).cast::<AtomicU32>(), MOST_SLOTS) }
        }
    }

    /// # Safety
    /// There are restartable sequences.
    #[inline(always)]
    unsafe fn rseq(&self) -> isize {
        // SAFETY: by the function's own contract.
        unsafe { self.rseq.unwrap_unchecked() }
    }

    /// Takes the number that was put last on this CPU's stack of `class`, if there is one. With it comes the CPU's line.
    ///
    /// # Safety
    /// [`ClassStacks::restartable`] says so; [`ClassStacks::pop_slowly`] does it anywhere.
    #[inline(always)]
    pub unsafe fn pop(&self, class: u8) -> Option<(u32, &Line)> {
        // SAFETY: the stacks are mapped, and `rseq` is where this process's threads have their registered area.
        let (number, stack) = unsafe { sequence::pop::<STRIDE_LOG2>(self.stacks(self.rseq(), class)) };
        // SAFETY: the sequence named the stack.
        (number != NONE).then(|| (number, unsafe { self.line_of(stack) }))
    }

    /// Puts `number` on this CPU's stack of `class`. Returns the CPU's line if there was room. `None` as well for a stack that is not open,
    /// where [`ClassStacks::push_slowly`] may do it.
    ///
    /// # Safety
    /// As [`ClassStacks::pop`].
    #[inline(always)]
    pub unsafe fn push(&self, class: u8, number: u32) -> Option<&Line> {
        // SAFETY: as in `pop`.
        let (length, stack) = unsafe { sequence::push::<STRIDE_LOG2>(self.stacks(self.rseq(), class), number) };
        // SAFETY: the sequence named the stack.
        (length != 0).then(|| unsafe { self.line_of(stack) })
    }

    /// As [`ClassStacks::pop`], with and without restartable sequences.
    #[cold]
    pub fn pop_slowly(&self, class: u8) -> Option<(u32, &Line)> {
        if self.restartable() {
            // SAFETY: there are sequences.
            return unsafe { self.pop(class) };
        }
        let (mut number, cpu) = ([NONE], self.here());
        (self.view(cpu, class as usize).pop_held(&mut number) == 1).then(|| (number[0], self.line(cpu)))
    }

    /// As [`ClassStacks::push`], with and without restartable sequences; a stack that is not open is opened.
    #[cold]
    pub fn push_slowly(&self, class: u8, number: u32) -> Option<&Line> {
        let cpu = self.here();
        self.open(cpu, class);
        if self.restartable() {
            // SAFETY: there are sequences.
            return unsafe { self.push(class, number) };
        }
        (self.view(cpu, class as usize).push_held(&[number]) == 1).then(|| self.line(cpu))
    }

    /// Opens the stack of `class` of `cpu`, unless somebody is at it.
    fn open(&self, cpu: usize, class: u8) {
        let (head, slots) = (self.view(cpu, class as usize).head, self.slots[class as usize]);
        if head.limit() == 0 && slots > 0 && head.hold() {
            self.used[cpu].store(true, Ordering::Relaxed);
            self.line(cpu).open(class);
            head.open(slots as u32);
        }
    }

    /// How many numbers are on the stack of `class` of `cpu` at this moment.
    fn len(&self, cpu: usize, class: usize) -> usize {
        self.view(cpu, class).head.length.load(Ordering::Relaxed) as usize
    }

    /// Takes everything that is on this CPU's stacks, number by number. Returns how many there were.
    pub fn drain_here(&self, mut each: impl FnMut(u32)) -> usize {
        let (cpu, mut sum) = (self.here(), 0);
        if !self.used[cpu].load(Ordering::Relaxed) {
            return 0;
        }
        for class in self.line(cpu).opened() {
            // A thread that is moved to another CPU meanwhile takes what is there; it stops when it has taken as much as it saw.
            for _ in 0..self.len(cpu, class as usize) {
                let Some((number, _)) = self.pop_slowly(class) else { break };
                sum += 1;
                each(number);
            }
        }
        sum
    }

    /// Empties the stacks of all CPUs. Stacks that somebody else is draining, or, without rseq, using, are left out.
    /// Costs an inter-processor interrupt to each CPU that runs a thread of this process. May be called in a signal handler. Returns how
    /// many numbers there were. `closed` is called when nobody can put or take any more, and before `each`.
    pub fn drain(&self, closed: impl FnOnce(), mut each: impl FnMut(u32)) -> usize {
        if self.draining.swap(true, Ordering::Acquire) {
            return 0;
        }
        let all = || self.used().flat_map(|cpu| self.line(cpu).opened().map(move |class| (cpu, class)));
        let some = all().filter(|&(cpu, class)| self.view(cpu, class as usize).head.close()).count() > 0;
        let mut sum = 0;
        if some {
            let alone = self.rseq.is_none() || membarrier::restart_sequences().is_ok();
            if alone {
                closed();
            }
            for (cpu, class) in all() {
                let view = self.view(cpu, class as usize);
                if !view.head.closed() {
                    continue;
                }
                if !alone {
                    view.head.reopen();
                    continue;
                }
                let mut numbers = [0; MOST_SLOTS];
                let count = view.empty(&mut numbers);
                self.line(cpu).close(class);
                view.head.retire();
                sum += count;
                numbers[..count].iter().for_each(|&number| each(number));
            }
        }
        self.draining.store(false, Ordering::Release);
        sum
    }

    /// In a forked child: opens what a thread of the parent was draining or using, and registers with the kernel anew. What is on the
    /// stacks stays there.
    ///
    /// # Safety
    /// Called by the child's only thread.
    pub unsafe fn after_fork(&self) {
        if self.rseq.is_some() {
            // It was granted to the parent, on the same kernel.
            let _ = membarrier::register();
        }
        self.draining.store(false, Ordering::Relaxed);
        let all = self.used().flat_map(|cpu| (0..MOST_CLASSES).map(move |class| self.view(cpu, class)));
        all.filter(|view| view.head.held()).for_each(|view| view.head.reopen());
    }

    /// Where the stacks lie.
    pub fn range(&self) -> crate::sys::memory::Range {
        self.memory.range()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sys::stop_on_drop::StopOnDrop;
    use std::sync::atomic::AtomicU8;

    static SLOTS: [u8; MOST_CLASSES] = {
        let mut slots = [0; MOST_CLASSES];
        (slots[0], slots[1], slots[2]) = (4, 64, 2);
        slots
    };

    fn pop(stacks: &ClassStacks, class: u8) -> u32 {
        stacks.pop_slowly(class).map_or(NONE, |(number, _)| number)
    }

    fn push(stacks: &ClassStacks, class: u8, number: u32) -> bool {
        stacks.push_slowly(class, number).is_some()
    }

    fn both() -> [ClassStacks; 2] {
        [ClassStacks::new(&SLOTS).unwrap(), ClassStacks::with(&SLOTS, None).unwrap()]
    }

    fn pinned<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        crate::sys::cpu_stack::tests::pinned(work)
    }

    #[test]
    fn each_class_has_its_own_stack_and_its_own_limit() {
        for stacks in both() {
            pinned(|| {
                assert_eq!((pop(&stacks, 1), push(&stacks, 3, 1)), (NONE, false), "no such class");
                assert_eq!([1, 2, 3].map(|number| push(&stacks, 2, number)), [true, true, false]);
                assert!(push(&stacks, 1, 7) && pop(&stacks, 0) == NONE);
                assert_eq!([pop(&stacks, 2), pop(&stacks, 2), pop(&stacks, 2), pop(&stacks, 1)], [2, 1, NONE, 7]);
            });
        }
    }

    #[test]
    fn draining_here_and_from_anywhere_gives_everything_once() {
        for stacks in both() {
            let fill = || pinned(|| (0..9).filter(|&number| push(&stacks, number as u8 % 3, number)).count());
            let count = fill();
            assert_eq!(count, 8, "the last class has room for two");
            let mut all = Vec::new();
            assert_eq!(stacks.drain(|| (), |number| all.push(number)), 8);
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
            pinned(|| {
                assert!(push(&stacks, 0, 1) && push(&stacks, 1, 2));
                all.clear();
                assert_eq!(stacks.drain_here(|number| all.push(number)), 2);
                assert_eq!((all.as_slice(), pop(&stacks, 0)), (&[1, 2][..], NONE));
            });
        }
    }

    #[test]
    fn stacks_that_were_never_used_have_no_memory() {
        let stacks = ClassStacks::new(&SLOTS).unwrap();
        pinned(|| assert!(push(&stacks, 0, 1)));
        let present = crate::sys::pagemap::Category::Present;
        assert!(crate::sys::pagemap::bytes_of(stacks.range(), present).unwrap() <= 2 * crate::sys::PAGE_SIZE);
    }

    #[test]
    fn a_child_finds_what_was_there_and_opens_what_was_being_drained() {
        for stacks in both() {
            pinned(|| {
                assert!(push(&stacks, 0, 1) && push(&stacks, 0, 2));
                assert!(stacks.view(stacks.here(), 0).head.close());
                assert_eq!((pop(&stacks, 0), push(&stacks, 0, 3)), (NONE, false));
                // SAFETY: no other thread knows of these stacks.
                unsafe { stacks.after_fork() };
                assert_eq!([pop(&stacks, 0), pop(&stacks, 0), pop(&stacks, 0)], [2, 1, NONE]);
            });
        }
    }

    /// Threads wherever the kernel has them run, and somebody who drains: each number is in one place at any time.
    #[test]
    fn no_number_is_lost_or_doubled() {
        const NUMBERS: u32 = 200;
        for stacks in both() {
            let owned: Vec<AtomicU8> = (0..NUMBERS).map(|_| AtomicU8::new(0)).collect();
            let take =
                |number: u32| assert_eq!(owned[number as usize].swap(1, Ordering::SeqCst), 0, "{number} doubled");
            let give = |number: u32| assert_eq!(owned[number as usize].swap(0, Ordering::SeqCst), 1, "{number} lost");
            let stop = AtomicBool::new(false);
            let mut left: Vec<u32> = std::thread::scope(|scope| {
                let running = StopOnDrop(&stop);
                let workers: Vec<_> = (0..4u32)
                    .map(|worker| {
                        let (stacks, stop, take, give) = (&stacks, &stop, &take, &give);
                        scope.spawn(move || {
                            let mut mine: Vec<u32> = (worker * NUMBERS / 4..(worker + 1) * NUMBERS / 4).collect();
                            mine.iter().for_each(|&number| take(number));
                            let mut round = worker as usize;
                            while !stop.load(Ordering::Relaxed) {
                                round = round.wrapping_mul(0x9e37_79b9).wrapping_add(0x7f4a_7c15);
                                let class = ((round >> 8) % 3) as u8;
                                if (round >> 4) & 1 == 0 {
                                    let number = pop(stacks, class);
                                    if number != NONE {
                                        take(number);
                                        mine.push(number);
                                    }
                                } else if let Some(number) = mine.pop() {
                                    give(number);
                                    if !push(stacks, class, number) {
                                        take(number);
                                        mine.push(number);
                                    }
                                }
                            }
                            mine
                        })
                    })
                    .collect();
                let mut kept = Vec::new();
                for round in 0..300 {
                    let mut each = |number| {
                        take(number);
                        kept.push(number);
                    };
                    if round % 3 == 0 {
                        stacks.drain_here(&mut each)
                    } else {
                        stacks.drain(|| (), &mut each)
                    };
                    while let Some(number) = kept.pop() {
                        give(number);
                        if !push(&stacks, 1, number) {
                            take(number);
                            kept.push(number);
                            break;
                        }
                    }
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
                drop(running);
                workers.into_iter().for_each(|worker| kept.extend(worker.join().unwrap()));
                kept
            });
            stacks.drain(|| (), |number| left.push(number));
            left.sort_unstable();
            assert_eq!(left, (0..NUMBERS).collect::<Vec<_>>());
        }
    }
}
