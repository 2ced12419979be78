//! Page frames: 4 KiB pages in a few nanoseconds, arrays of them for about one nanosecond each, known to be zero where that is asked
//! for, from any thread and from signal handlers.
//!
//! ```text
//!  alloc, free                alloc_zeroed              orders 1 to 9, 1 GiB
//!      |                           |                           |
//!  stack of the CPU        stack of the CPU                    |
//!  (any frame)             (frames known to be zero)           |
//!      |  refill, flush            |  refill                   |
//!      +------------- zone of the node: areas of 2 MiB --------+
//!                                  |
//!                     memory of a region, never touched or given back
//! ```
//!
//! In front stands a stack of frame numbers per CPU, worked on in restartable sequences ([`crate::sys::cpu_stack`]): no lock and no atomic
//! instruction. Stacks are filled and relieved by halves from the zones, whose areas have two bits for each frame, used and
//! dirty, that are changed 64 at a time. A byte for each frame says whether somebody has it, so that a frame that is
//! freed twice is seen at once. Together that is less than 0.1 % of the memory.
//!
//! **Zeroes.** A frame is known to be zero when its memory was never touched, went back to the kernel, or was zeroed by a helper.
//! [`Frames::alloc_zeroed`] hands such frames out without touching them. As far as zeroes are asked for, helpers zero free frames
//! ahead at a bounded rate, whole idle areas first.
//!
//! **Memory.** Areas are opened one by one as they are needed. An area of which nothing was used for the decay time goes back to the kernel;
//! under memory pressure, all free areas do. The stacks of CPUs that do nothing are emptied.
//!
//! **Threads and signals.** Frames may be allocated and freed in a signal handler, in any manner and at any instant: there is no lock that
//! the interrupted thread could hold. When memory is short, an allocation may wait for up to 100 ms. Building, dropping, forking,
//! [`Frames::stats`] and [`Frames::trim`] are for ordinary code.
//!
//! ```
//! use pagecrew::frame::{Frames, Options};
//! use pagecrew::region::{self, Region};
//! use std::sync::Arc;
//!
//! let region = Arc::new(Region::new(region::Options::default())?);
//! let frames = Frames::new(region, Options { limit: 64 << 20, ..Options::default() })?;
//! let mut frame = frames.take_zeroed()?;
//! assert!(frame.iter().all(|&byte| byte == 0));
//! frame[0] = 1;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Sources: fast per-CPU and bulk page allocation (Mel Gorman, 2017), PG_zero (Liang Li, 2020), LLFree (Wrenger and others, 2023).

mod allocator;
mod area;
mod background;
mod error;
mod fork;
mod handle;
mod pieces;
mod policy;
mod runs;
mod shortage;
mod stats;
mod table;
mod tree;
mod zone;

pub use allocator::Places;
pub use error::{BuildError, FreeError, OutOfFrames, Problem};
pub use fork::FrameForkGuard;
pub use handle::Frame;
pub use stats::{Stats, ZoneStats};

use crate::crew::Crew;
use crate::region::Region;
use crate::sys::topology::Topology;
use crate::sys::{PAGE_SIZE, procfs, sched};
use allocator::Allocator;
use background::{Background, FrameCrew};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// The highest order of a run within an area: 2 MiB.
pub const AREA_ORDER: u32 = area::WHOLE;
/// The order of 1 GiB, the only one above [`AREA_ORDER`].
pub const GIANT_ORDER: u32 = 18;

/// What can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The most memory that the frames take together, in bytes; rounded up to 2 MiB, and with several nodes to 64 MiB for each. Only address
    /// space until it is used.
    pub limit: usize,
    /// Whether all of it can be used from the start. Otherwise areas are opened as they are needed, which keeps what is used together.
    pub fixed: bool,
    /// How many bytes a second helpers may zero ahead; 0 for none.
    pub zero_rate: usize,
    /// Free memory that nothing needed for this long goes back to the kernel.
    pub decay: Duration,
    /// The most helper threads; `None`: one less than the CPUs that the process may use, at least one.
    pub helpers: Option<usize>,
}

/// The limit where none is said, on a machine with `total` bytes of memory: the region refuses what is larger than that.
fn default_limit(total: u64) -> usize {
    (total / 2).clamp(1 << 21, 1 << 30) as usize
}

impl Default for Options {
    /// A limit of 1 GiB, or of half of the machine's memory where that is less.
    fn default() -> Options {
        let total = procfs::memory_info().map_or(u64::MAX, |memory| memory.total);
        Options {
            limit: default_limit(total),
            fixed: false,
            zero_rate: 4 << 30,
            decay: Duration::from_secs(10),
            helpers: None,
        }
    }
}

/// Page frames. See the module's description.
///
/// Frames are known by their numbers, from 0 up to the limit; [`Frames::address`] says where one is. When this is dropped, their memory
/// goes back to the region, whether they were freed or not.
pub struct Frames {
    // Before the allocator: its threads use it.
    crew: FrameCrew,
    allocator: Arc<Allocator>,
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames").field("stats", &self.stats()).finish()
    }
}

impl Frames {
    /// Frames in memory of `region`, with a zone for each NUMA node of this machine.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(region: Arc<Region>, options: Options) -> Result<Frames, BuildError> {
        Frames::with(region, options, Topology::read())
    }

    /// Frames with a zone for each node of `topology`.
    ///
    /// # Errors
    /// As [`Frames::new`].
    pub fn with(region: Arc<Region>, options: Options, topology: Topology) -> Result<Frames, BuildError> {
        let allocator = Arc::new(Allocator::new(region, &options, &topology)?);
        let background = Background::new(allocator.clone(), &options)?;
        let crew = Crew::new(
            background,
            options.helpers,
            sched::with_offline(sched::affinity().unwrap_or_default()),
            topology,
        );
        allocator.connect(crew.watcher_events());
        // From now on, so that nobody has to start it in a signal handler. Without it, nothing is zeroed ahead or given back.
        crew.watch();
        Ok(Frames { crew, allocator })
    }

    /// A frame; its contents are undefined.
    ///
    /// # Errors
    /// [`OutOfFrames`] when every frame is in use, or in the hands of another thread that is about to use it or to put it back.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc(&self) -> Result<u32, OutOfFrames> {
        self.allocator.alloc()
    }

    /// A frame that is zero.
    ///
    /// # Errors
    /// As [`Frames::alloc`].
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc_zeroed(&self) -> Result<u32, OutOfFrames> {
        self.allocator.alloc_zeroed()
    }

    /// Gives a frame back.
    ///
    /// # Safety
    /// Nobody uses its memory any more, and no other thread frees it at the same time: of two that do, neither may be told, and the frame
    /// may be handed out twice.
    ///
    /// # Errors
    /// [`FreeError`] if nobody has a frame of this number, or not as a single frame.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub unsafe fn free(&self, frame: u32) -> Result<(), FreeError> {
        self.allocator.free(frame)
    }

    /// Fills `into` with the numbers of frames; their contents are undefined. Returns how many there were: fewer only when every frame
    /// is in use.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub fn alloc_bulk(&self, into: &mut [u32]) -> usize {
        self.allocator.alloc_bulk(into)
    }

    /// Gives frames back.
    ///
    /// # Safety
    /// As [`Frames::free`].
    ///
    /// # Errors
    /// As [`Frames::free`], for the first that could not be freed. All others are free.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline(always)]
    pub unsafe fn free_bulk(&self, frames: &[u32]) -> Result<(), FreeError> {
        self.allocator.free_bulk(frames)
    }

    /// `1 << order` frames in a row, aligned to their size: orders 0 to [`AREA_ORDER`] (2 MiB), and [`GIANT_ORDER`] (1 GiB). Returns
    /// the first one. Their contents are undefined.
    ///
    /// # Errors
    /// [`OutOfFrames`] when there is no such run, and for other orders.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn alloc_order(&self, order: u32) -> Result<u32, OutOfFrames> {
        self.allocator.alloc_order(order, false)
    }

    /// As [`Frames::alloc_order`]; the frames are zero.
    ///
    /// # Errors
    /// As [`Frames::alloc_order`].
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn alloc_order_zeroed(&self, order: u32) -> Result<u32, OutOfFrames> {
        self.allocator.alloc_order(order, true)
    }

    /// Gives frames back that were allocated together.
    ///
    /// # Safety
    /// As [`Frames::free`].
    ///
    /// # Errors
    /// [`FreeError`] if `frame` is not the first of a run that was allocated with this order.
    #[cfg_attr(debug_assertions, track_caller)]
    pub unsafe fn free_order(&self, frame: u32, order: u32) -> Result<(), FreeError> {
        self.allocator.free_order(frame, order)
    }

    /// A frame that frees itself.
    ///
    /// # Errors
    /// As [`Frames::alloc`].
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn take(&self) -> Result<Frame<'_>, OutOfFrames> {
        self.alloc().map(|number| Frame::new(self, number))
    }

    /// A frame that is zero and frees itself.
    ///
    /// # Errors
    /// As [`Frames::alloc`].
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn take_zeroed(&self) -> Result<Frame<'_>, OutOfFrames> {
        self.alloc_zeroed().map(|number| Frame::new(self, number))
    }

    /// Where a frame is: [`PAGE_SIZE`] bytes.
    ///
    /// # Panics
    /// If there is no frame of this number.
    #[inline]
    pub fn address(&self, frame: u32) -> NonNull<u8> {
        assert!(frame < self.allocator.frames(), "there are {} frames, and no frame {frame}", self.allocator.frames());
        NonNull::new((self.allocator.base() + frame as usize * PAGE_SIZE) as *mut u8)
            .expect("nothing is mapped at address 0")
    }

    /// The frame that `address` lies in; `None` if that is none of these.
    #[inline]
    pub fn number(&self, address: *const u8) -> Option<u32> {
        let frame = (address as usize).checked_sub(self.allocator.base())? / PAGE_SIZE;
        u32::try_from(frame).ok().filter(|&frame| frame < self.allocator.frames())
    }

    /// The counters. The background is held still meanwhile.
    pub fn stats(&self) -> Stats {
        let _still = self.crew.employer().hold();
        Stats { metadata: self.allocator.metadata(), ..self.allocator.stats() }
    }

    /// The number of zones: one for each NUMA node.
    pub fn zones(&self) -> usize {
        self.allocator.zones.len()
    }

    /// The figures of one zone.
    ///
    /// # Panics
    /// If there is no zone of this number.
    pub fn zone_stats(&self, zone: usize) -> ZoneStats {
        self.allocator.zone_stats(zone)
    }

    /// Puts what is on the CPUs' stacks back into the zones.
    pub fn drain(&self) {
        self.allocator.drain(|_| true);
    }

    /// Gives the memory of everything back that is free, and returns when it is back, or after a moment where a helper that is at it
    /// does not run.
    pub fn trim(&self) {
        self.crew.employer().trim(&self.crew);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_with_no_limit_said_fit_the_machine() {
        assert_eq!(default_limit(u64::MAX), 1 << 30);
        assert_eq!(default_limit(2 << 30), 1 << 30);
        assert_eq!(default_limit(512 << 20), 256 << 20);
        assert_eq!(default_limit(0), 2 << 20);
    }
}
