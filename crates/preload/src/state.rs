//! The process's region: made by the first large request, gone with the process.

use crate::heap::limited_data;
use crate::mmap::MAPPINGS;
use crate::next;
use pagecrew::region::{CpuCaches, Options, Region, Trim};
use pagecrew::stats;
use pagecrew::sys::memory::Range;
use pagecrew::sys::sched::{self, CpuSet};
use pagecrew::sys::topology::Topology;
use pagecrew::sys::{check_page_size, membarrier};
use pagecrew::trim::{self, SpanTrimmer};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Requests of at least this many bytes are ours; nothing is before the environment was read.
pub static THRESHOLD: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The arena; empty before there is one.
pub static ARENA_START: AtomicUsize = AtomicUsize::new(0);
pub static ARENA_LEN: AtomicUsize = AtomicUsize::new(0);
static REGION: AtomicPtr<Region> = AtomicPtr::new(std::ptr::null_mut());
/// The region's caches: null before there is one, and where there are no restartable sequences.
static CACHES: AtomicPtr<CpuCaches> = AtomicPtr::new(std::ptr::null_mut());

/// Set in a forked child, whose counters become readable with its first large request: most children only call `exec`.
static UNSHARED: AtomicBool = AtomicBool::new(false);
/// Set in a forked child for good.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Set where the process has its system calls filtered.
static FILTERED: AtomicBool = AtomicBool::new(false);
/// Whether the program has given a thread a NUMA policy.
static OWN_POLICY: AtomicBool = AtomicBool::new(false);

/// Set where the main thread has ended and the process goes on.
static MAIN_ENDED: AtomicBool = AtomicBool::new(false);

const NONE: u32 = 0;
const MAKING: u32 = 1;
const MADE: u32 = 2;
const OFF: u32 = 3;
static MAKING_STATE: AtomicU32 = AtomicU32::new(NONE);

/// What was found out when the library was loaded.
pub struct Start {
    pub options: Options,
    /// The CPUs that the process was started with: later, a program may pin the thread that brings the work.
    cpus: CpuSet,
    pub stats_directory: PathBuf,
    /// The process whose counters stay behind when it ends.
    pub keep_stats_of: Option<i32>,
}

static START: OnceLock<Start> = OnceLock::new();

/// The process that this memory belongs to. A child made by `vfork` has another number and must leave everything alone.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Whether `address` lies in the arena.
#[inline(always)]
pub fn ours(address: usize) -> bool {
    address.wrapping_sub(ARENA_START.load(Ordering::Relaxed)) < ARENA_LEN.load(Ordering::Relaxed)
}

/// Whether any of `[address, address + len)` lies in the arena.
pub fn touches(address: usize, len: usize) -> bool {
    let (start, arena) = (ARENA_START.load(Ordering::Relaxed), ARENA_LEN.load(Ordering::Relaxed));
    arena > 0 && address < start + arena && address.saturating_add(len) > start
}

/// The region, if there is one already.
pub fn existing_region() -> Option<&'static Region> {
    // SAFETY: the pointer is null or a leaked box.
    unsafe { REGION.load(Ordering::Acquire).as_ref() }
}

/// The caches of the region, if there is one already and they have restartable sequences.
#[inline(always)]
pub fn caches() -> Option<&'static CpuCaches> {
    // SAFETY: the pointer is null or to a part of a leaked box.
    unsafe { CACHES.load(Ordering::Acquire).as_ref() }
}

/// The region, made now if need be; `None` where none can be had, and while another thread is making it.
pub fn region() -> Option<&'static Region> {
    let region = existing_region().or_else(make)?;
    if UNSHARED.load(Ordering::Relaxed) && UNSHARED.swap(false, Ordering::Relaxed) {
        share_stats(region);
    }
    Some(region)
}

#[cold]
fn make() -> Option<&'static Region> {
    let start = START.get()?;
    if MAKING_STATE.compare_exchange(NONE, MAKING, Ordering::Acquire, Ordering::Relaxed).is_err() {
        return existing_region();
    }
    if limited_data() {
        MAKING_STATE.store(OFF, Ordering::Release);
        return None;
    }
    let mut options = start.options.clone();
    if MAIN_ENDED.load(Ordering::Relaxed) {
        options.helpers = Some(0);
    }
    let Ok(region) = Region::with(options, sched::with_offline(start.cpus), Topology::read()) else {
        MAKING_STATE.store(OFF, Ordering::Release);
        return None;
    };
    adopt_process();
    share_stats(&region);
    if start.options.trim == Trim::On {
        region.set_hook(Box::new(SpanTrimmer::new(trim::Options::default()).and(mappings)));
    }
    let region: &'static Region = Box::leak(Box::new(region));
    crate::libc_blocks::prepare(region);
    let range = region.range();
    ARENA_START.store(range.start, Ordering::Relaxed);
    ARENA_LEN.store(range.len, Ordering::Relaxed);
    REGION.store(std::ptr::from_ref(region).cast_mut(), Ordering::Release);
    if region.caches().restartable() {
        CACHES.store(std::ptr::from_ref(region.caches()).cast_mut(), Ordering::Release);
    }
    MAKING_STATE.store(MADE, Ordering::Release);
    if FILTERED.load(Ordering::SeqCst) {
        region.stop_transfers();
    }
    if OWN_POLICY.load(Ordering::SeqCst) {
        region.leave_placement();
    }
    Some(region)
}

/// From now on, memory comes from where the program's own NUMA policy says.
pub fn leaves_placement_to_program() {
    OWN_POLICY.store(true, Ordering::SeqCst);
    if let Some(region) = existing_region() {
        region.leave_placement();
    }
}

/// From now on, free pages are not moved about: that takes a system call that nobody expects of a malloc.
pub fn moves_no_pages_any_more() {
    FILTERED.store(true, Ordering::SeqCst);
    if let Some(region) = existing_region() {
        region.stop_transfers();
    }
}

fn mappings(list: &mut Vec<Range>) {
    MAPPINGS.eligible(list);
}

/// From now on, what the program maps itself is much: it is counted, and trimmed where that is wanted.
pub fn look_after_mappings() {
    let Some(region) = region() else { return };
    if START.get().is_some_and(|start| start.options.trim == Trim::Auto) {
        region.set_hook(Box::new(SpanTrimmer::new(trim::Options::default()).and(mappings).sparingly()));
    }
    if START.get().is_some_and(|start| start.options.trim != Trim::Off) {
        region.wake_hook();
    }
}

/// Lets others read the counters. Where that is not possible the program runs on, and should not notice.
fn share_stats(region: &Region) {
    if let Some(start) = START.get() {
        let _ = region.stats().share(&start.stats_directory);
    }
}

/// The main thread ends before the others: from now on there are no helpers.
pub fn main_thread_ends() {
    MAIN_ENDED.store(true, Ordering::Relaxed);
    if let Some(region) = existing_region() {
        region.dismiss_crew();
    }
}

/// The start, once the library was loaded.
pub fn start() -> Option<&'static Start> {
    START.get()
}

/// The process locked its memory, what it will map included: an arena would count against what it may lock.
pub fn no_region_any_more() {
    let _ = MAKING_STATE.compare_exchange(NONE, OFF, Ordering::Relaxed, Ordering::Relaxed);
}

/// Whether the calling process is the one that owns this memory.
pub fn own_process() -> bool {
    // SAFETY: getpid takes nothing and cannot fail.
    PROCESS.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// Whether this process was forked and has not called `exec` since.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Takes note that this process owns its memory: at the start, and in a forked child.
pub fn adopt_process() {
    // SAFETY: as above.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// In a forked child: if another thread of the parent was making the region at that moment, the child goes without one.
pub fn after_fork_in_child() {
    adopt_process();
    UNSHARED.store(true, Ordering::Relaxed);
    FORKED.store(true, Ordering::Relaxed);
    MAIN_ENDED.store(false, Ordering::Relaxed);
    let _ = MAKING_STATE.compare_exchange(MAKING, OFF, Ordering::Relaxed, Ordering::Relaxed);
}

/// Runs when the library is loaded, before the program's own initialisers.
extern "C" fn load() {
    next::look_up();
    // With other pages than ours, the program has its own malloc for everything. The command says why, where it is used.
    if check_page_size().is_err() {
        return;
    }
    adopt_process();
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    // The command has checked and reported already; otherwise this is the only place.
    let report = std::env::var_os("PAGECREW_CHECKED").is_none();
    let options = Options::from_environment(variables, |error| {
        if report {
            eprintln!("pagecrew: {error}");
        }
    });
    let (threshold, mmap, huge_pages) = (options.threshold, options.mmap, options.huge_pages);
    let _ = START.set(Start {
        options,
        cpus: sched::affinity().unwrap_or_default(),
        stats_directory: stats::directory(),
        keep_stats_of: std::env::var("PAGECREW_STATS_KEEP").ok().and_then(|text| text.parse().ok()),
    });
    // While there is one thread that costs nothing. With several, the kernel waits until each CPU was at another task: 10 to 30 milliseconds, which
    // the first large request would take. Where it can't be had, there are no caches of spans.
    let _ = membarrier::register();
    // Before the program can register any: so ours run last before a fork and first after it, and no other handler runs while
    // the region is held.
    crate::thresholds::load();
    crate::fork::install();
    crate::exit::install();
    crate::kernel::look_up();
    crate::mmap::start(mmap, huge_pages);
    THRESHOLD.store(threshold, Ordering::Release);
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;
