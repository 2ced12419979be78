//! What users of a region rely on.

use super::*;
use crate::sys::alone::alone;
use crate::sys::userfaultfd::Userfaultfd;
use crate::sys::{huge_page, pagemap, procfs};
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn region(change: impl FnOnce(&mut Options)) -> Region {
    let mut options = Options::default();
    change(&mut options);
    Region::new(options).unwrap()
}

fn bytes(pointer: NonNull<u8>, len: usize) -> &'static mut [u8] {
    // SAFETY: the tests' own spans, used by one thread at a time and not behind their end.
    unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), len) }
}

fn free(region: &Region, pointer: NonNull<u8>) {
    // SAFETY: the test does not use the span again.
    unsafe { region.free(pointer).unwrap() };
}

fn balanced(region: &Region) {
    let total: u64 = region.snapshot().zones.iter().map(|zone| zone.total()).sum();
    assert!(total > 0 && total <= region.range().len as u64);
}

fn eventually(what: &str, limit: Duration, mut reached: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn spans_have_the_size_and_alignment_that_was_asked_for() {
    let region = region(|_| {});
    for shift in [12, 16, 21, 25, 30] {
        for size in [1, 4096, MIB, 2 * MIB - 1, 2 * MIB + 1, 33 * MIB] {
            let span = region.allocate(size, 1 << shift).unwrap();
            assert_eq!(span.as_ptr() as usize % (1 << shift), 0);
            assert!(size <= 32 * MIB || (span.as_ptr() as usize).is_multiple_of(HUGE_PAGE_SIZE));
            assert!(region.usable_size(span).unwrap() >= size);
            bytes(span, size)[size - 1] = 1;
            free(&region, span);
        }
    }
    balanced(&region);
    assert_eq!(region.allocate(0, 1), Err(AllocateError::Unsupported { size: 0, align: 1 }));
    assert!(region.allocate(1, 3).is_err() && region.allocate(1, 2 * MAX_ALIGN).is_err());
    assert!(region.allocate(usize::MAX, 1).is_err() && region.allocate(1 << 60, 1).is_err());
}

#[test]
fn zeroed_spans_are_zero_whatever_was_there_before() {
    for zero in [false, true] {
        let region = region(|options| options.zero = zero);
        for round in 0..30usize {
            let size = (round % 7 + 1) * 5 * MIB + 4096 * round;
            let span = region.allocate_zeroed(size, 1).unwrap();
            assert!(bytes(span, size).iter().all(|&byte| byte == 0), "round {round}");
            bytes(span, size).fill(0xff);
            free(&region, span);
            if round % 5 == 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        balanced(&region);
    }
}

#[test]
fn a_freed_span_is_reused_with_its_pages() {
    let region = region(|_| {});
    // Where other tests press for memory, a freed span is just being given back.
    eventually("the span is there again", Duration::from_secs(20), || {
        let first = region.allocate(64 * MIB, 1).unwrap();
        bytes(first, 64 * MIB).fill(1);
        free(&region, first);
        let before = region.snapshot().counter("reused_bytes");
        let second = region.allocate(64 * MIB, 1).unwrap();
        let reused = region.snapshot().counter("reused_bytes") - before;
        free(&region, second);
        first == second && reused == 64 << 20
    });
}

#[test]
fn zeroing_in_the_background_is_not_repeated_by_the_caller() {
    let region = region(|_| {});
    let skipped = || region.snapshot().counter("zeroing_skipped_bytes");
    // Other tests may want every CPU for a while, and helpers keep away then.
    let deadline = Instant::now() + Duration::from_secs(300);
    while skipped() < 100 << 20 {
        assert!(Instant::now() < deadline, "{} of 100 MiB in five minutes", skipped() >> 20);
        let span = region.allocate_zeroed(32 * MIB, 1).unwrap();
        bytes(span, 32 * MIB).fill(7);
        free(&region, span);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn frees_that_call_the_watcher_in_vain_call_it_ever_less() {
    let region = region(|_| {});
    let core = region.core();
    core.note_want(super::spans::Want::Zeroes, 64 * MIB, &[]);
    let (begin, mut calls) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_millis(100) {
        if core.calls_for_zeroing(4 * MIB) {
            calls += 1;
            // Whoever frees has it back by now: there is nothing to set out.
            core.zero_ahead(&region.crew, clock::now_ns());
        }
    }
    assert!((1..=20).contains(&calls), "{calls} calls");
    core.note_want(super::spans::Want::Zeroes, 64 * MIB, &[]);
    assert!(core.calls_for_zeroing(4 * MIB) && !core.calls_for_zeroing(4 * MIB));
}

#[test]
fn pages_of_a_sparse_table_stay_unbacked_when_it_is_reused() {
    let region = region(|options| options.huge_pages = false);
    let size = 512 * MIB;
    // Other tests of this process allocate too, so only this region counts.
    let resident = || pagemap::bytes_of(region.range(), pagemap::Category::Present).unwrap();
    let mut before = resident();
    for round in 0..4 {
        let table = region.allocate_zeroed(size, 1).unwrap();
        for place in (0..size).step_by(64 << 10) {
            assert_eq!(bytes(table, size)[place], 0);
            bytes(table, size)[place] = 9;
        }
        if round == 0 {
            before = resident();
        }
        free(&region, table);
    }
    assert!(resident() < before + 16 * MIB, "{before} -> {}", resident());
}

#[test]
fn wrong_pointers_are_told_apart() {
    let region = region(|_| {});
    let span = region.allocate(4 * MIB, 1).unwrap();
    let inside = NonNull::new(span.as_ptr().wrapping_add(4096)).unwrap();
    let address = span.as_ptr() as usize;
    // SAFETY: none of these is accepted.
    unsafe {
        assert_eq!(region.free(inside), Err(PointerError::Inside { address: address + 4096, start: address }));
        assert_eq!(region.free(NonNull::dangling()), Err(PointerError::Foreign(1)));
        region.free(span).unwrap();
        assert_eq!(region.free(span), Err(PointerError::NotInUse(address)));
    }
    assert_eq!(region.usable_size(span), Err(PointerError::NotInUse(address)));
    balanced(&region);
}

#[test]
fn without_retention_memory_is_back_when_free_returns() {
    let region = region(|options| options.retain = Some(0));
    let span = region.allocate(512 * MIB, 1).unwrap();
    bytes(span, 512 * MIB).fill(1);
    let resident = || pagemap::bytes_of(region.range(), pagemap::Category::Present).unwrap();
    assert_eq!(resident(), 512 * MIB);
    free(&region, span);
    assert!(resident() < 64 * MIB, "{}", resident());
    let states = region.snapshot().bytes();
    assert_eq!(states.in_use, 0);
    eventually("everything is reserved again", Duration::from_secs(5), || {
        let states = region.snapshot().bytes();
        states.reserved == states.total()
    });
}

#[test]
fn retained_memory_decays_without_a_call() {
    // Little as well as much: many processes with little of it have much together.
    for size in [8 * MIB, 24 * MIB, 256 * MIB] {
        let region = region(|options| options.decay = Duration::from_millis(400));
        let span = region.allocate(size, 1).unwrap();
        bytes(span, size).fill(1);
        free(&region, span);
        eventually("it is reserved again", Duration::from_secs(20), || {
            let states = region.snapshot().bytes();
            states.reserved == states.total()
        });
    }
}

#[test]
fn retention_does_not_raise_the_peak() {
    let region = region(|_| {});
    // Each span is a little larger than the last, so that none fits where the one before was.
    let mut most = 0;
    for step in 0..40 {
        let size = 64 * MIB + step * 2 * MIB;
        let span = region.allocate(size, 1).unwrap();
        bytes(span, size).fill(1);
        let states = region.snapshot().bytes();
        most = most.max(states.in_use + states.retained_dirty + states.retained_zeroed);
        free(&region, span);
    }
    assert!(most <= 2 * (142 << 20), "{} MiB backed", most >> 20);
}

#[test]
fn resizing_keeps_contents_in_place_and_moved() {
    let region = region(|_| {});
    let mut span = region.allocate(3 * MIB, 1).unwrap();
    let mut size = 3 * MIB;
    bytes(span, size).iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 4096) as u8);
    // The second span stands in the way, so that the first growth has to move.
    let wall = region.allocate(2 * MIB, 1).unwrap();
    for to in [5 * MIB, 40 * MIB, 300 * MIB, 7 * MIB, MIB, 4096, 9 * MIB, 2 * MIB] {
        // SAFETY: the test uses the new span only.
        span = unsafe { region.resize(span, to, 0).unwrap() };
        let kept = size.min(to).min(4096);
        assert!(bytes(span, kept).iter().all(|&byte| byte == 0));
        assert!(region.usable_size(span).unwrap() >= to);
        for page in 0..size.min(to).min(3 * MIB) / 4096 {
            assert_eq!(bytes(span, to)[page * 4096], page as u8, "page {page} after resizing to {to}");
        }
        for page in 0..to / 4096 {
            bytes(span, to)[page * 4096] = page as u8;
        }
        size = to;
        balanced(&region);
    }
    assert!(region.snapshot().counter("moved_bytes") > 0 && region.snapshot().counter("grown_in_place_bytes") > 0);
    free(&region, span);
    free(&region, wall);
    let wrong = NonNull::<u8>::dangling();
    // SAFETY: a foreign pointer is refused.
    assert_eq!(unsafe { region.resize(wrong, MIB, 0) }, Err(ResizeError::Pointer(PointerError::Foreign(1))));
}

#[test]
fn growing_makes_room_for_what_it_needs() {
    let region = region(|_| {});
    let first = region.allocate(256 * MIB, 1).unwrap();
    bytes(first, 256 * MIB).fill(1);
    let span = region.allocate(100 * MIB, 1).unwrap();
    bytes(span, 100 * MIB).fill(2);
    free(&region, first);
    // SAFETY: the test's own span.
    let span = unsafe { region.resize(span, 340 * MIB, 0) }.unwrap();
    bytes(span, 340 * MIB).fill(3);
    let states = region.snapshot().bytes();
    // The peak was 356 MiB, and a twenty-fourth part of it may be there beyond.
    let backed = states.in_use + states.retained_dirty + states.retained_zeroed;
    assert!(backed <= 375 << 20, "{} MiB backed", backed >> 20);
    free(&region, span);
}

#[test]
fn moved_spans_do_not_use_up_the_mappings() {
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let region = region(|_| {});
    let before = mappings();
    for _ in 0..300 {
        let span = region.allocate(4 * MIB, 1).unwrap();
        let wall = region.allocate(2 * MIB, 1).unwrap();
        // SAFETY: the test uses the new span only.
        let span = unsafe { region.resize(span, 12 * MIB, 0).unwrap() };
        bytes(span, 12 * MIB)[11 * MIB] = 1;
        free(&region, wall);
        free(&region, span);
    }
    region.trim();
    eventually("no moved mapping is left", Duration::from_secs(5), || mappings() < before + 60);
}

#[test]
fn a_full_arena_is_an_error_and_recovers() {
    let region = region(|_| {});
    if region.core().arena.exact() {
        // Then the kernel's word comes before the arena's end.
        return;
    }
    // As much as one request may be, until there is no room. Address space only: nothing is touched.
    let size = procfs::memory_info().unwrap().total as usize / 2;
    let mut spans: Vec<_> = std::iter::from_fn(|| region.allocate(size, 1).ok()).collect();
    assert!(spans.len() >= 8, "{}", spans.len());
    assert_eq!(region.allocate(size, 1), Err(AllocateError::OutOfMemory { size }));
    free(&region, spans.pop().unwrap());
    region.trim();
    eventually("it fits again", Duration::from_secs(10), || {
        region.allocate(size, 1).is_ok_and(|span| {
            spans.push(span);
            true
        })
    });
    spans.into_iter().for_each(|span| free(&region, span));
}

#[test]
fn an_arena_has_nothing_that_no_zone_has() {
    for nodes in 1..=8 {
        let core = Core::new(Options::default(), &Topology::uniform(nodes, 3)).unwrap();
        let of_zones: usize = core.zones.iter().map(|zone| zone.range.len).sum();
        assert_eq!(core.arena.range().len, of_zones, "{nodes} nodes");
        assert_eq!(core.zones.last().unwrap().range.end(), core.arena.range().end());
    }
}

#[test]
fn a_tightened_region_gives_up_what_it_does_not_use() {
    let region = region(|_| {});
    let span = region.allocate(8 * MIB, 1).unwrap();
    bytes(span, 8 * MIB).fill(5);
    let gap = region.allocate(4 * MIB, 1).unwrap();
    let last = region.allocate(6 * MIB, 1).unwrap();
    let kept: usize = [span, last].map(|span| region.usable_size(span).unwrap()).iter().sum();
    free(&region, gap);
    assert!(region.tighten() && !region.tighten());
    assert_eq!(region.snapshot().bytes().total(), kept as u64);
    assert_eq!(region.usable_size(gap), Err(PointerError::Foreign(gap.as_ptr() as usize)));
    free(&region, last);
    assert!(bytes(span, 8 * MIB).iter().all(|&byte| byte == 5));
    assert!(region.allocate(64 * MIB, 1).is_err());
    let behind = NonNull::new(span.as_ptr().wrapping_add(1 << 32)).unwrap();
    // What others have there now is freed without a lock of ours.
    let locks: Vec<_> = region.core().zones.iter().map(|zone| zone.lock()).collect();
    assert_eq!(region.usable_size(behind), Err(PointerError::Foreign(behind.as_ptr() as usize)));
    drop(locks);
    free(&region, span);
    region.trim();
    eventually("the same place is usable again", Duration::from_secs(5), || match region.allocate_zeroed(8 * MIB, 1) {
        Ok(span) => {
            assert!(bytes(span, 8 * MIB).iter().all(|&byte| byte == 0));
            free(&region, span);
            true
        }
        Err(_) => false,
    });
}

#[test]
fn guards_stand_behind_every_span() {
    // Under strict overcommit, a child needs as much as all tests together have.
    if !alone("region::tests::guards_stand_behind_every_span") {
        return;
    }
    let region = region(|options| options.guards = true);
    for size in [MIB, 2 * MIB, 3 * MIB + 4096] {
        let span = region.allocate(size, 1).unwrap();
        bytes(span, size).fill(1);
        // SAFETY: the child only writes and exits; the write is meant to fail.
        let status = unsafe {
            let child = libc::fork();
            assert!(child >= 0, "no child: {}", std::io::Error::last_os_error());
            if child == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                span.as_ptr().add(size).write_volatile(1);
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        // Where the kernel has no guards, the span is not lengthened for one.
        if region.core().guards {
            assert!(libc::WIFSIGNALED(status), "a write behind {size} bytes went through");
        }
        free(&region, span);
        let again = region.allocate(size + 8192, 1).unwrap();
        bytes(again, size + 8192).fill(2);
        free(&region, again);
    }
}

/// Spans of many sizes, each with its own contents until it is freed.
fn mixture(region: &Region) {
    let mut seed = 1u64;
    let mut random = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize % below
    };
    let mut slots: [Option<(NonNull<u8>, usize, u8)>; 12] = [None; 12];
    for round in 0..600 {
        let slot = &mut slots[random(12)];
        if let Some((span, size, value)) = slot.take() {
            let mut pages = bytes(span, size).iter().step_by(PAGE_SIZE);
            assert!(pages.all(|&byte| byte == value), "somebody else's memory, or none");
            free(region, span);
        }
        let (size, value) = (MIB + random(31 * MIB), (round % 255 + 1) as u8);
        let span = region.allocate(size, 1).unwrap();
        bytes(span, size).iter_mut().step_by(PAGE_SIZE).for_each(|byte| *byte = value);
        *slot = Some((span, size, value));
    }
    slots.into_iter().flatten().for_each(|(span, ..)| free(region, span));
    balanced(region);
}

#[test]
fn free_memory_is_moved_to_where_it_is_needed() {
    let region = region(|_| {});
    mixture(&region);
    let can = Userfaultfd::new().inspect(|descriptor| descriptor.close()).is_ok();
    let huge = huge_page::setting() != huge_page::Setting::Never;
    let moved = region.snapshot().counter("transferred_bytes");
    let whole = !region.core().arena.exact();
    assert_eq!(moved > 0, can && huge && whole, "{moved} bytes");
    // For a program that wants that no more, as one that has its system calls filtered.
    region.stop_transfers();
    mixture(&region);
    assert_eq!(region.snapshot().counter("transferred_bytes"), moved);
}

#[test]
fn an_altered_span_is_never_reused_as_it_is() {
    let region = region(|_| {});
    let span = region.allocate(8 * MIB, 1).unwrap();
    bytes(span, 8 * MIB).fill(1);
    // SAFETY: the span's own pages.
    unsafe { libc::mprotect(span.as_ptr().cast(), 8 * MIB, libc::PROT_READ) };
    region.mark_altered(span.as_ptr() as usize, 8 * MIB);
    free(&region, span);
    assert_eq!(region.snapshot().bytes().retained_dirty, region.core().discarding() as u64);
    for _ in 0..20 {
        let span = region.allocate(8 * MIB, 1).unwrap();
        bytes(span, 8 * MIB).fill(2);
        free(&region, span);
    }
}

#[test]
fn eight_nodes_have_zones_of_their_own() {
    let region = Region::with(Options::default(), sched::affinity().unwrap(), Topology::uniform(8, 1)).unwrap();
    assert_eq!(region.snapshot().zones.len(), 16);
    let spans: Vec<_> = (0..64).map(|step| region.allocate((step % 5 + 1) * MIB, 1).unwrap()).collect();
    balanced(&region);
    spans.into_iter().for_each(|span| free(&region, span));
    balanced(&region);
}

#[test]
fn nodes_have_lanes_and_spans_of_each_come_back_to_it() {
    let region = Region::with(Options::default(), sched::affinity().unwrap(), Topology::uniform(2, 4)).unwrap();
    let core = region.core();
    assert_eq!((core.lanes.count(), region.snapshot().zones.len()), (4, 16));
    let mut spans = Vec::new();
    for step in 0..400 {
        // Every CPU goes on to the next lane now and then.
        if step % 40 == 0 {
            (0..100_000).for_each(|round| core.lanes.found_locked(round % 2));
        }
        let size = (step % 37 + 1) * 96 * 1024;
        let span = region.allocate(size, if step % 3 == 0 { 8192 } else { 1 }).unwrap();
        bytes(span, size).fill(step as u8);
        spans.push((span, size, step as u8));
        if step % 2 == 1 {
            let (span, size, value) = spans.swap_remove(step % spans.len());
            assert!(bytes(span, size).iter().all(|&byte| byte == value));
            free(&region, span);
        }
    }
    let used: Vec<_> = region.snapshot().zones.iter().map(|zone| zone.in_use > 0).collect();
    assert!(used.iter().filter(|&&used| used).count() > 1, "{used:?}");
    balanced(&region);
    for (span, size, value) in spans {
        assert!(bytes(span, size).iter().all(|&byte| byte == value));
        free(&region, span);
    }
    region.trim();
    assert_eq!((region.snapshot().bytes().in_use, core.retained()), (0, 0));
    balanced(&region);
}

#[test]
fn memory_of_another_lane_is_used_before_the_peak_is_raised() {
    // What other tests take counts as the program's growth elsewhere, for which memory goes back.
    if !alone("region::tests::memory_of_another_lane_is_used_before_the_peak_is_raised") {
        return;
    }
    // While tasks wait for memory, other tests' among them, what is free goes back at once, and there is nothing to be taken.
    let stall_us = || procfs::memory_stall_us().unwrap_or(0);
    let (begin, before) = (Instant::now(), stall_us());
    while !second_lane_takes_from_the_first() {
        // Longer than the other tests take.
        if begin.elapsed() > Duration::from_secs(120) {
            let stalled = Duration::from_micros(stall_us() - before);
            assert!(stalled > begin.elapsed() / 10, "what the first lane had went back, and nobody waited for memory");
            return;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Has the second of two lanes come to the size of the first one, which is at rest. Returns whether it had the first one's memory for that.
fn second_lane_takes_from_the_first() -> bool {
    let region = Region::with(
        Options { huge_pages: false, ..Options::default() },
        sched::affinity().unwrap(),
        Topology::uniform(1, 2),
    )
    .unwrap();
    let core = region.core();
    // An alignment of its own keeps a span out of the caches. Each is touched at once: what the watcher finds to have no pages does not
    // count, and on a slow machine it finds it while the next one is asked for.
    let fill = || {
        let touched = |_| region.allocate(MIB, 8192).inspect(|&span| bytes(span, MIB).fill(1)).unwrap();
        (0..40).map(touched).collect::<Vec<_>>()
    };
    let first = fill();
    first.into_iter().for_each(|span| free(&region, span));
    let peak = 40 * MIB;
    // There are two lanes here, however many CPUs the machine has, and not every CPU comes to the second one.
    let allowed = sched::affinity().unwrap();
    let elsewhere = (0..crate::sys::topology::possible_cpus()).filter(|&cpu| allowed.contains(cpu)).find(|&cpu| {
        (0..100_000).for_each(|_| {
            if core.lanes.of(cpu) == 0 {
                core.lanes.found_locked(cpu);
            }
        });
        core.lanes.of(cpu) != 0
    });
    let mut only = sched::CpuSet::new();
    only.insert(elsewhere.expect("no CPU comes to the second lane"));
    sched::set_affinity(&only).unwrap();
    let again = fill();
    sched::set_affinity(&allowed).unwrap();
    let going = core.discarding() as u64;
    let seen = region.snapshot();
    let gone = going + seen.counter("discarded_in_background_bytes") + seen.counter("discarded_by_caller_bytes");
    again.into_iter().for_each(|span| free(&region, span));
    // Otherwise all that the first lane had must go, since the peak is not raised. A little always may: what is free is estimated.
    gone <= peak as u64 / 2
}

#[test]
fn a_large_program_that_never_freed_anything_has_caches() {
    let region = region(|_| {});
    let kept: Vec<_> = (0..1000).map(|_| region.allocate(64 << 10, 1).unwrap()).collect();
    eventually("a pair is served by a cache", Duration::from_secs(20), || {
        let pair = region.allocate(MIB, 1).unwrap();
        free(&region, pair);
        free(&region, region.allocate(MIB, 1).unwrap());
        region.snapshot().counter("cached_allocations") > 0
    });
    kept.into_iter().for_each(|span| free(&region, span));
}

#[test]
fn blocks_of_a_power_of_two_do_not_begin_at_its_multiples() {
    // Each zone has places of its own, so all come from one.
    let options = Options { huge_pages: false, ..Options::default() };
    let region = Region::with(options, sched::affinity().unwrap(), Topology::uniform(1, 1)).unwrap();
    let spans: Vec<_> = (0..8).map(|_| region.allocate(4 * MIB, 1).unwrap()).collect();
    let offsets: std::collections::HashSet<_> = spans.iter().map(|span| span.as_ptr() as usize % (4 * MIB)).collect();
    assert_eq!(offsets.len(), spans.len());
    for &span in &spans {
        // SAFETY: the test's own span.
        assert_eq!(unsafe { region.resize(span, 4 * MIB - 1, 0) }, Ok(span));
        assert!(region.usable_size(span).unwrap() >= 4 * MIB);
        free(&region, span);
    }
}

#[test]
fn a_block_at_any_line_stays_where_it_is_when_it_is_resized_to_its_own_size() {
    let region = region(|options| options.huge_pages = false);
    let mut with_room = 0;
    for size in (64 << 10..2 * MIB).step_by(3 * 1024) {
        let span = region.allocate(size, 1).unwrap();
        let colour = region.usable_size(span).unwrap().saturating_sub(size).min(4032);
        with_room += usize::from(colour == 4032);
        // SAFETY: the test's own span.
        assert_eq!(unsafe { region.resize(span, size, colour) }, Ok(span), "{size} bytes, {colour} in");
        free(&region, span);
    }
    assert!(with_room > 100);
    assert_eq!(region.snapshot().counter("grown_in_place_bytes"), 0);
}

#[test]
fn dropping_a_region_ends_its_helpers() {
    let region = region(|_| {});
    let span = region.allocate(128 * MIB, 1).unwrap();
    bytes(span, 128 * MIB).fill(1);
    free(&region, span);
    let range = region.range();
    drop(region);
    assert!(!std::fs::read_to_string("/proc/self/maps").unwrap().contains(&format!("{:x}-", range.start)));
}

/// Threads that allocate, check, resize and free at random; the bytes that each wrote are still there when it looks again.
#[test]
fn a_program_is_not_taken_to_have_had_more_than_it_had() {
    let region = region(|_| {});
    let (live, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (region, live, most) = (&region, &live, &most);
            scope.spawn(move || {
                let mut seed = thread + 1;
                let mut random = move |below: usize| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed as usize % below
                };
                let mut slots = [None; 16];
                for _ in 0..if cfg!(debug_assertions) { 2_000 } else { 50_000 } {
                    let slot = &mut slots[random(16)];
                    if let Some(span) = slot.take() {
                        live.fetch_sub(region.usable_size(span).unwrap(), Ordering::SeqCst);
                        free(region, span);
                    }
                    let span = region.allocate((64 << 10) + random(2 * MIB), 1).unwrap();
                    let now = region.usable_size(span).unwrap();
                    most.fetch_max(live.fetch_add(now, Ordering::SeqCst) + now, Ordering::SeqCst);
                    *slot = Some(span);
                }
                slots.into_iter().flatten().for_each(|span| free(region, span));
            });
        }
    });
    let (peak, most) = (region.core().retention.peak_in_use(), most.into_inner());
    // What was freed on a CPU counts as in use until it is summed up there, and so does what a zone that somebody is at has not added yet.
    let not_summed_up = region.core().caches.used().count() * (8 << 20) + region.core().zones.len() * most / 64;
    assert!(peak <= most + not_summed_up, "{} MiB instead of {} MiB", peak >> 20, most >> 20);
    // What a helper is draining itself at that moment is left out.
    eventually("nothing counts as in use or cached", Duration::from_secs(5), || {
        region.core().drain_caches();
        region.core().sum_up_all();
        (region.core().in_use(), region.core().cached()) == (0, 0)
    });
}

#[test]
fn a_storm_loses_no_byte() {
    let region = region(|options| options.decay = Duration::from_millis(50));
    let steps = if cfg!(debug_assertions) { 300 } else { 3000 };
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let region = &region;
            scope.spawn(move || {
                let mut seed = thread + 1;
                let mut random = move || {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed as usize
                };
                let mut held: Vec<(NonNull<u8>, usize, u8)> = Vec::new();
                let check = |span: NonNull<u8>, size: usize, mark: u8| {
                    for place in (0..size).step_by(4096) {
                        assert_eq!(bytes(span, size)[place], mark, "thread {thread}");
                    }
                };
                for step in 0..steps {
                    let size = (random() % 1000 + 1) * 8192;
                    let mark = (step % 255) as u8 + 1;
                    match random() % 4 {
                        0 | 1 if held.len() < 8 => {
                            let zeroed = random() % 2 == 0;
                            let span = if zeroed { region.allocate_zeroed(size, 1) } else { region.allocate(size, 1) }
                                .unwrap();
                            if zeroed {
                                check(span, size, 0);
                            }
                            bytes(span, size).iter_mut().step_by(4096).for_each(|byte| *byte = mark);
                            held.push((span, size, mark));
                        }
                        2 if !held.is_empty() => {
                            let which = random() % held.len();
                            let (span, old, mark) = held[which];
                            // SAFETY: the span is this thread's.
                            let span = unsafe { region.resize(span, size, 0).unwrap() };
                            check(span, old.min(size), mark);
                            bytes(span, size).iter_mut().step_by(4096).for_each(|byte| *byte = mark);
                            held[which] = (span, size, mark);
                        }
                        _ if !held.is_empty() => {
                            let (span, size, mark) = held.swap_remove(random() % held.len());
                            check(span, size, mark);
                            free(region, span);
                        }
                        _ => {}
                    }
                }
                held.into_iter().for_each(|(span, size, mark)| {
                    check(span, size, mark);
                    free(region, span);
                });
            });
        }
    });
    balanced(&region);
    assert_eq!(region.snapshot().bytes().in_use, 0);
}

#[test]
fn nodes_whose_number_is_no_power_of_two_share_the_arena() {
    let region = Region::with(Options::default(), sched::affinity().unwrap(), Topology::uniform(3, 3)).unwrap();
    let mut numbers = 1u64;
    let mut next = |most: usize| {
        numbers = numbers.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (numbers >> 33) as usize % most
    };
    let mut spans: Vec<Option<(NonNull<u8>, usize)>> = vec![None; 24];
    for step in 0..3000 {
        let slot = next(spans.len());
        let size = 64 * 1024 + next(if step % 5 == 0 { 40 * MIB } else { 4 * MIB });
        let span = match spans[slot].take() {
            // SAFETY: the span is this test's own.
            Some((span, _)) if step % 3 == 0 => unsafe { region.resize(span, size, 0).unwrap() },
            Some((span, _)) => {
                free(&region, span);
                continue;
            }
            None if step % 2 == 0 => region.allocate_zeroed(size, 1).unwrap(),
            None => region.allocate(size, 1).unwrap(),
        };
        bytes(span, size).iter_mut().step_by(PAGE_SIZE).for_each(|byte| *byte = 1);
        spans[slot] = Some((span, size));
    }
    spans.into_iter().flatten().for_each(|(span, _)| free(&region, span));
    balanced(&region);
}
