//! The preload library's own small heap: everything that Rust code in it allocates. It never touches the program's malloc, which may be in the middle of something when it calls us.
//!
//! A reservation of its own that grows page by page, cut into blocks of powers of two, with a list of free blocks for each size.
//! The library's needs are small and similar in size: about 200 bytes for each span in use.

use pagecrew::sys::memory::{self, Protection, Range};
use pagecrew::sys::{PAGE_SIZE, procfs};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is reserved in one piece: enough for some 300,000 spans. A quarter where the address space has no room.
const RESERVE: usize = 64 << 20;
const RESERVE_LEAST: usize = 1 << 20;
/// When that is used up, the heap goes on in further pieces of this size, wherever they are.
const FURTHER: usize = 16 << 20;
/// The heap grows by this much at a time.
const STEP: usize = 256 << 10;
/// The smallest block is 2^5 bytes.
const SMALLEST: u32 = 5;
const CLASSES: usize = 32 - SMALLEST as usize;

struct Inner {
    /// Addresses of the first free block of each size; each block holds the address of the next.
    free: [usize; CLASSES],
    /// The next address that was never used, up to where the heap is accessible, up to where it may become so.
    next: usize,
    accessible: usize,
    end: usize,
}

/// The heap.
pub struct Heap {
    inner: Mutex<Inner>,
    start: AtomicUsize,
    len: AtomicUsize,
    /// The guard that is held from before a fork until after it.
    held: UnsafeCell<Option<MutexGuard<'static, Inner>>>,
}

// SAFETY: `held` is only used between the handlers of one fork, by the thread that forks, while it holds the lock.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap without address space.
    pub const fn new() -> Heap {
        Heap {
            inner: Mutex::new(Inner { free: [0; CLASSES], next: 0, accessible: 0, end: 0 }),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            held: UnsafeCell::new(None),
        }
    }

    /// Whether `address` was allocated here.
    fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.start.load(Ordering::Relaxed)) < self.len.load(Ordering::Relaxed)
    }

    /// Whether nobody holds the heap at this moment.
    pub fn unlocked(&self) -> bool {
        self.inner.try_lock().is_ok()
    }

    /// Whether the heap has outgrown its first piece.
    pub fn outgrown(&self) -> bool {
        !self.contains(self.lock().end.wrapping_sub(1))
    }

    /// The addresses of the heap's first piece.
    pub fn range(&self) -> Range {
        Range { start: self.start.load(Ordering::Relaxed), len: self.len.load(Ordering::Relaxed) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the heap still for a fork.
    pub fn before_fork(&'static self) {
        let guard = self.lock();
        // SAFETY: the lock is held, so this is the only thread here.
        unsafe { *self.held.get() = Some(guard) };
    }

    /// Opens the heap again, in the parent and in the child.
    pub fn after_fork(&'static self) {
        // SAFETY: this thread holds the lock since `before_fork`.
        drop(unsafe { (*self.held.get()).take() });
    }

    fn class(size: usize) -> usize {
        (size.max(1).next_power_of_two().trailing_zeros().max(SMALLEST) - SMALLEST) as usize
    }

    /// `size` bytes, aligned to the next power of two (up to a page).
    pub fn allocate(&self, size: usize) -> *mut u8 {
        let class = Self::class(size);
        if size > FURTHER {
            return null_mut();
        }
        let mut inner = self.lock();
        let head = inner.free[class];
        if head != 0 {
            // SAFETY: a free block of the heap holds the address of the next one.
            inner.free[class] = unsafe { *(head as *const usize) };
            return head as *mut u8;
        }
        let block = 1usize << (class as u32 + SMALLEST);
        // Smaller blocks are cut from a page at a time, so that blocks are aligned to their size without gaps.
        let take = block.max(PAGE_SIZE);
        let place = |inner: &Inner| {
            let start = inner.next.next_multiple_of(take.min(STEP));
            (start, start + take)
        };
        let (mut start, mut end) = place(&inner);
        if end > inner.end {
            if !self.reserve(&mut inner, take) {
                return null_mut();
            }
            (start, end) = place(&inner);
        }
        if end > inner.accessible && !Self::extend(&mut inner, end) {
            return null_mut();
        }
        inner.next = end;
        for address in (start + block..end).step_by(block) {
            // SAFETY: the page was just taken, and is accessible and unused.
            unsafe { *(address as *mut usize) = inner.free[class] };
            inner.free[class] = address;
        }
        start as *mut u8
    }

    /// Reserves the first or a further piece with room for `take` bytes.
    fn reserve(&self, inner: &mut Inner, take: usize) -> bool {
        let first = self.len.load(Ordering::Relaxed) == 0;
        // A program whose address space is limited needs it for itself.
        let wanted = if first { RESERVE } else { FURTHER + take };
        let mut len = if limited_address_space() { RESERVE_LEAST.max(2 * take) } else { wanted };
        while len >= RESERVE_LEAST.max(2 * take) {
            if let Ok(start) = memory::map(len, Protection::None) {
                (inner.next, inner.accessible, inner.end) = (start, start, start + len);
                if first {
                    self.len.store(len, Ordering::Relaxed);
                    self.start.store(start, Ordering::Relaxed);
                }
                return true;
            }
            len /= 4;
        }
        false
    }

    fn extend(inner: &mut Inner, end: usize) -> bool {
        let target = end.next_multiple_of(STEP).min(inner.end);
        let range = Range { start: inner.accessible, len: target - inner.accessible };
        // SAFETY: address space of this heap that nobody uses yet.
        let granted = unsafe { memory::protect(range, Protection::ReadWrite) }.is_ok();
        if granted {
            inner.accessible = target;
        }
        granted
    }

    /// Takes back a block of `size` bytes.
    ///
    /// # Safety
    /// The block came from [`Heap::allocate`] with a size of the same class and is not used any more.
    unsafe fn release(&self, block: *mut u8, class: usize) {
        let mut inner = self.lock();
        // SAFETY: the block is unused, at least 32 bytes long, and aligned to its size.
        unsafe { *block.cast::<usize>() = inner.free[class] };
        inner.free[class] = block as usize;
    }
}

/// Whether the address space of this process is limited (`RLIMIT_AS`).
pub fn limited_address_space() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) == 0 && limit.rlim_cur != libc::RLIM_INFINITY }
}

/// Whether what this process may write to is limited (`RLIMIT_DATA`, for all private mappings since Linux 4.7) to less than the machine has. What
/// is kept for reuse counts against that, and nobody would give it back for a small block that the program's own malloc lacks: that one is
/// asked without a detour.
pub fn limited_data() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_DATA, &mut limit) == 0 };
    known
        && limit.rlim_cur != libc::RLIM_INFINITY
        && procfs::memory_info().is_ok_and(|memory| limit.rlim_cur < memory.total)
}

// SAFETY: blocks are disjoint, at least as long as asked for, and aligned to their size, which is at least the alignment asked
// for as long as that is no more than a page; a larger one is refused. Nothing here unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > PAGE_SIZE { null_mut() } else { self.allocate(layout.size().max(layout.align())) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: by the trait's contract the block came from `alloc` with this layout.
        unsafe { self.release(block, Self::class(layout.size().max(layout.align()))) };
    }
}
