//! Trimming this very process: all of it as a call, or a region's spans as long as it runs. Takes no rights.

use super::fleet::{Fleet, Id, Turn};
use super::options::Options;
use super::rest::Rest;
use super::shortage;
use super::tally::Tally;
use super::target::{Mapping, MappingKind, Other, Target, TargetError};
use super::trimmer::{Clock, Kernel, Step, Trimmer};
use crate::control::arbiter;
use crate::region::{Hook, Region};
use crate::stats::{self, Counters};
use crate::sys::memory::{self, Advice, Range};
use crate::sys::pagemap::{Category, HugeKind, Pagemap};
use crate::sys::procfs::MemoryInfo;
use crate::sys::{Errno, cgroup, process, procfs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Looks at every huge page of this process once, the spans of regions included, and splits those that are under-used.
///
/// # Errors
/// See [`TargetError`]; what is the matter with single pages is counted.
pub fn own_process(options: Options) -> Result<Tally, TargetError> {
    let pid = std::process::id() as i32;
    let other = Other::open(pid, options.dry_run)?;
    once(other, options).map_err(|error| TargetError::Kernel(pid, error))
}

/// Looks at every huge page of a region's spans in use once, and splits those that are under-used. What is free isn't read.
///
/// # Errors
/// `ENOTTY` on kernels before 6.7, and whatever else the kernel says.
pub fn spans(region: &Region, options: Options) -> Result<Tally, Errno> {
    let tally = once(Own::new(region.huge_spans()), options)?;
    region.stats().counters.trimmed_huge_pages.add(tally.split);
    region.stats().counters.trimmed_bytes.add(tally.gone_bytes);
    Ok(tally)
}

fn once<T: Target>(target: T, options: Options) -> Result<Tally, Errno> {
    let mut trimmer = Trimmer::new(target, options, Kernel.now_ns());
    trimmer.scan(&Kernel)?;
    while trimmer.step(&Kernel)? == Step::Looked {}
    Ok(*trimmer.tally())
}

/// The spans of a region, as they were when last asked for. No descriptor of the page map is kept: a program may close all that it doesn't
/// know.
struct Own(Mutex<Vec<Range>>);

impl Own {
    fn new(spans: Vec<Range>) -> Own {
        Own(Mutex::new(spans))
    }

    fn spans(&self) -> MutexGuard<'_, Vec<Range>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for Own {
    fn mappings(&self) -> Result<Vec<Mapping>, Errno> {
        let mapping = |&range: &Range| Mapping { range, name: String::new(), kind: MappingKind::Anonymous };
        Ok(self.spans().iter().map(mapping).collect())
    }

    fn huge_pages(&self, range: Range, each: &mut dyn FnMut(Range, HugeKind)) -> Result<(), Errno> {
        Pagemap::own()?.huge_pages(range, each)
    }

    fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno> {
        Pagemap::own()?.exclusive(address)
    }

    fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
        // Not by the pointers: the program may protect or unmap what is its own at any time.
        process::read_own(pieces, room)
    }

    fn split(&self, part: Range) -> Result<(), Errno> {
        // SAFETY: this kind of advice changes no contents.
        unsafe { memory::advise(part, Advice::Cold) }
    }

    fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno> {
        Pagemap::own()?.bytes_of(range, category)
    }

    fn alive(&self) -> bool {
        true
    }
}

/// One of this process's regions has only itself to trim.
const OWN: Id = Id { pid: 0, start_ticks: 0 };
/// Turns of a call: a few milliseconds.
const TURNS: usize = 4;
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// Trims a region's spans as long as they are in use, with the region's watcher as its thread: see [`Region::set_hook`].
///
/// Source: the kernel's own shrinker ("split underutilized THPs", 2024), which only begins when memory is short.
pub struct SpanTrimmer {
    options: Options,
    watched: Mutex<Watched>,
    /// Adds ranges that are looked at besides the spans.
    more: Option<fn(&mut Vec<Range>)>,
    /// Nothing is looked at as long as memory isn't short and the program isn't at rest.
    sparingly: bool,
}

/// What is known of the program and its pages.
#[derive(Default)]
struct Watched {
    rest: Rest,
    fleet: Option<Fleet<Own>>,
}

/// How often it is looked whether memory is short or the program at rest.
const SPARING_INTERVAL: Duration = Duration::from_secs(1);

impl SpanTrimmer {
    /// With these options; a program's own spans are excluded by their addresses.
    pub fn new(options: Options) -> SpanTrimmer {
        SpanTrimmer { options, watched: Mutex::default(), more: None, sparingly: false }
    }

    /// The ranges that `more` adds are looked at, too. It is called by the watcher.
    pub fn and(self, more: fn(&mut Vec<Range>)) -> SpanTrimmer {
        SpanTrimmer { more: Some(more), ..self }
    }

    /// Only while memory is short, on the machine or in the control group, or the program is at rest ([`Rest`]): what a program has set to zero
    /// on purpose stays in huge pages otherwise.
    pub fn sparingly(self) -> SpanTrimmer {
        SpanTrimmer { sparingly: true, ..self }
    }
}

/// Whether memory is short or the program at rest, at time `now`. What can't be read is neither.
fn is_called_for(rest: &mut Rest, now: u64) -> bool {
    let at_rest = procfs::resident_and_peak().is_ok_and(|(resident, peak)| rest.is_at_rest(resident, peak, now));
    let machine = procfs::memory_info().ok().map(|memory| {
        // Only where it matters: what is kept free ahead of others is not short.
        let ahead = if shortage::is_short(Some(memory), None) { stats::read_ahead() } else { None };
        MemoryInfo { available: arbiter::available(&memory, ahead, now), ..memory }
    });
    at_rest || shortage::is_short(machine, cgroup::memory())
}

impl Hook for SpanTrimmer {
    fn has_more(&self) -> bool {
        self.more.is_some()
    }

    fn run(&self, spans: &dyn Fn() -> Vec<Range>, counters: &Counters) -> Option<Duration> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if self.sparingly && !is_called_for(&mut watched.rest, Kernel.now_ns()) {
            return Some(SPARING_INTERVAL);
        }
        let fleet = watched.fleet.get_or_insert_with(|| {
            let mut fleet = Fleet::new(self.options.clone(), &Kernel);
            fleet.admit(OWN, Own::new(Vec::new()), 0);
            fleet
        });
        let (_, member) = fleet.members().next()?;
        if member.error().is_some() || member.trimmer().fruitless() {
            // This kernel, or what the process was denied, rules it out.
            return None;
        }
        let mut ranges = spans();
        if let Some(more) = self.more {
            more(&mut ranges);
        }
        *member.trimmer().target().spans() = ranges;
        let before = fleet.total();
        let mut pause = Duration::ZERO;
        for _ in 0..TURNS {
            match fleet.turn(&Kernel) {
                Turn::Worked => {}
                Turn::Spent(wait) | Turn::Idle(wait) => {
                    pause = wait.max(LEAST_PAUSE);
                    break;
                }
            }
        }
        let after = fleet.total();
        counters.trimmed_huge_pages.add(after.split - before.split);
        counters.trimmed_bytes.add(after.gone_bytes - before.gone_bytes);
        Some(pause)
    }

    unsafe fn after_fork(&self) {
        // SAFETY: by the function's own contract nobody else is here, although the parent's watcher may have held the lock. What was known of
        // the parent's pages is not given back: it may have been in the middle of a change.
        unsafe { std::ptr::write((&raw const self.watched).cast_mut(), Mutex::default()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::alone::alone;
    use crate::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
    use crate::trim::support;
    use std::time::Instant;

    const PAGES: usize = 32;

    /// A span of huge pages with a byte in every sixteenth subpage, and one that is dense; or nothing where there are no huge pages here.
    fn sparse_and_dense(region: &Region) -> Option<[usize; 2]> {
        // Nor on a kernel that doesn't say what is huge (before 6.7) or splits nothing (before 6.12).
        support::check().ok()?;
        let spans = [0, 1].map(|_| region.allocate(PAGES * HUGE_PAGE_SIZE, 1).unwrap().as_ptr() as usize);
        for (span, stride) in spans.into_iter().zip([16 * PAGE_SIZE, 64]) {
            for at in (0..PAGES * HUGE_PAGE_SIZE).step_by(stride) {
                // SAFETY: inside a span that was handed out to this test.
                unsafe { ((span + at) as *mut u8).write(1) };
            }
        }
        let range = Range { start: spans[0], len: PAGES * HUGE_PAGE_SIZE };
        let huge = Pagemap::own().unwrap().bytes_of(range, Category::Huge).unwrap();
        (huge == range.len).then_some(spans)
    }

    fn check(spans: [usize; 2]) {
        for at in (0..PAGES * HUGE_PAGE_SIZE).step_by(PAGE_SIZE) {
            // SAFETY: inside spans that were handed out to this test.
            let bytes = spans.map(|span| unsafe { ((span + at) as *const u8).read() });
            assert_eq!(bytes, [u8::from(at.is_multiple_of(16 * PAGE_SIZE)), 1]);
        }
    }

    fn region() -> Region {
        Region::new(crate::region::Options::default()).unwrap()
    }

    #[test]
    fn the_sparse_span_shrinks_and_free_memory_is_not_read() {
        // Others of these tests fork: as long as their children live, a page is theirs as well.
        if !alone("trim::own::tests::the_sparse_span_shrinks_and_free_memory_is_not_read") {
            return;
        }
        let region = region();
        let Some(live) = sparse_and_dense(&region) else { return };
        let Some(free) = sparse_and_dense(&region) else { return };
        for span in free {
            // SAFETY: the test doesn't use it again.
            unsafe { region.free(std::ptr::NonNull::new(span as *mut u8).unwrap()).unwrap() };
        }
        let tally = spans(&region, Options::default()).unwrap();
        let passed_over = tally.left.shared + tally.left.vanished;
        assert_eq!(tally.looked_at + passed_over, 2 * PAGES as u64, "{tally:?}");
        assert!(
            tally.used <= PAGES as u64 && tally.under_used <= PAGES as u64 && passed_over < PAGES as u64 / 2,
            "{tally:?}"
        );
        assert!(tally.split + tally.left.busy == tally.under_used && tally.split > PAGES as u64 / 2, "{tally:?}");
        assert_eq!(tally.gone_bytes, tally.split * 480 * PAGE_SIZE as u64);
        assert_eq!(region.snapshot().counter("trimmed_bytes"), tally.gone_bytes);
        check(live);
    }

    #[test]
    fn a_rider_trims_what_is_allocated_while_it_rides() {
        let region = region();
        let options = Options { interval: Duration::from_millis(50), cpu: None, ..Options::default() };
        assert!(region.set_hook(Box::new(SpanTrimmer::new(options.clone()))));
        assert!(!region.set_hook(Box::new(SpanTrimmer::new(options))));
        let Some(live) = sparse_and_dense(&region) else { return };
        let deadline = Instant::now() + Duration::from_secs(60);
        while region.snapshot().counter("trimmed_huge_pages") < PAGES as u64 / 2 {
            assert!(Instant::now() < deadline, "{:?}", region.snapshot());
            std::thread::sleep(Duration::from_millis(20));
        }
        check(live);
    }

    /// The mapping of the test below.
    static OTHER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

    #[test]
    fn other_ranges_are_trimmed_as_well() {
        if !alone("trim::own::tests::other_ranges_are_trimmed_as_well") {
            return;
        }
        let region = region();
        let Some([sparse, dense]) = sparse_and_dense(&region) else { return };
        OTHER.store(sparse, std::sync::atomic::Ordering::Relaxed);
        let more = |list: &mut Vec<Range>| {
            let start = OTHER.load(std::sync::atomic::Ordering::Relaxed);
            list.push(Range { start, len: PAGES * HUGE_PAGE_SIZE });
        };
        let trimmer = SpanTrimmer::new(Options { cpu: None, ..Options::default() }).and(more);
        assert!(trimmer.has_more());
        let counters = Counters::default();
        let deadline = Instant::now() + Duration::from_secs(60);
        while counters.trimmed_huge_pages.get() < PAGES as u64 / 2 {
            assert!(trimmer.run(&Vec::new, &counters).is_some() && Instant::now() < deadline);
        }
        check([sparse, dense]);
    }

    #[test]
    fn this_process_trims_itself_without_rights() {
        let region = region();
        let Some(live) = sparse_and_dense(&region) else { return };
        let dry = own_process(Options { dry_run: true, ..Options::default() }).unwrap();
        assert!(dry.under_used >= PAGES as u64 && dry.split == 0, "{dry:?}");
        check(live);
    }
}
