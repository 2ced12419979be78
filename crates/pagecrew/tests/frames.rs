//! What users of frames rely on. In a program of its own: the storms take every CPU, which other layers' tests of helpers need.

#![cfg(not(loom))]

use pagecrew::frame::{AREA_ORDER, BuildError, Frames, FreeError, GIANT_ORDER, Options, OutOfFrames, Problem, Stats};
use pagecrew::region::{self, Region};
use pagecrew::sys::memory::Range;
use pagecrew::sys::sched::{self, CpuSet};
use pagecrew::sys::topology::{Topology, possible_cpus};
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE, pagemap};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use stop_on_drop::StopOnDrop;

#[path = "../src/sys/stop_on_drop.rs"]
mod stop_on_drop;

const MIB: usize = 1 << 20;

fn region() -> Arc<Region> {
    Arc::new(Region::new(region::Options::default()).unwrap())
}

/// Frames in one zone, however many nodes the machine has: the tests count frames. tests/numa.rs has those with a zone for each node.
fn frames(options: Options) -> Frames {
    Frames::with(region(), options, one_node()).unwrap()
}

fn one_node() -> Topology {
    Topology::uniform(1, possible_cpus())
}

fn small(mib: usize) -> Frames {
    frames(Options { limit: mib * MIB, ..Options::default() })
}

fn free(frames: &Frames, frame: u32) {
    // SAFETY: the tests use no memory of frames that they have freed.
    unsafe { frames.free(frame) }.unwrap();
}

/// The first eight bytes of a frame.
fn word(frames: &Frames, frame: u32) -> &'static AtomicUsize {
    // SAFETY: the frame is mapped as long as `frames` lives, which the tests see to, and aligned.
    unsafe { AtomicUsize::from_ptr(frames.address(frame).as_ptr().cast()) }
}

fn bytes(frames: &Frames, frame: u32, count: usize) -> &'static mut [u8] {
    // SAFETY: as above; the tests look at frames that they have.
    unsafe { std::slice::from_raw_parts_mut(frames.address(frame).as_ptr(), count * PAGE_SIZE) }
}

fn backed(frames: &Frames) -> usize {
    let limit = frames.stats().limit;
    let range = Range { start: frames.address(0).as_ptr() as usize, len: limit * PAGE_SIZE };
    pagemap::bytes_of(range, pagemap::Category::Present).unwrap()
}

fn adds_up(frames: &Frames) -> Stats {
    let stats = frames.stats();
    let parts = stats.allocated + stats.free + stats.stacked + stats.zeroing + stats.giving_back;
    assert_eq!(parts, stats.open, "{stats:?}");
    stats
}

fn within(time: Duration, mut reached: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !reached() {
        if begin.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

#[test]
fn every_frame_can_be_had_once() {
    let frames = small(8);
    let mut all: Vec<u32> = (0..2048).map(|_| frames.alloc().unwrap()).collect();
    assert_eq!(frames.alloc(), Err(OutOfFrames { order: 0 }));
    assert_eq!(frames.alloc_zeroed(), Err(OutOfFrames { order: 0 }));
    assert_eq!(adds_up(&frames).allocated, 2048);
    all.iter().for_each(|&frame| bytes(&frames, frame, 1).fill(0xa5));
    all.sort_unstable();
    assert_eq!(all, (0..2048).collect::<Vec<_>>());
    all.iter().for_each(|&frame| free(&frames, frame));
    assert_eq!(adds_up(&frames).allocated, 0);
}

#[test]
fn numbers_and_addresses_are_the_same_thing() {
    let frames = small(8);
    let first = frames.address(0).as_ptr();
    assert_eq!(first as usize % HUGE_PAGE_SIZE, 0);
    for frame in [0, 1, 511, 512, 2047] {
        let address = frames.address(frame).as_ptr();
        assert_eq!(address as usize, first as usize + frame as usize * PAGE_SIZE);
        assert_eq!(frames.number(address), Some(frame));
        assert_eq!(frames.number(address.wrapping_add(4095)), Some(frame));
    }
    assert_eq!((frames.number(first.wrapping_sub(1)), frames.number(first.wrapping_add(8 * MIB))), (None, None));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| frames.address(2048))).is_err());
}

#[test]
fn what_is_not_allocated_is_not_freed() {
    let frames = small(4);
    let frame = frames.alloc().unwrap();
    let problem = |result: Result<(), FreeError>| result.unwrap_err().problem;
    // SAFETY: nothing of these is used.
    unsafe {
        frames.free(frame).unwrap();
        assert_eq!(problem(frames.free(frame)), Problem::NotAllocated);
        assert_eq!(problem(frames.free(frame ^ 1)), Problem::NotAllocated);
        assert_eq!(problem(frames.free(1024)), Problem::OutOfRange);
        assert_eq!(problem(frames.free(u32::MAX)), Problem::OutOfRange);
        let run = frames.alloc_order(3).unwrap();
        assert_eq!(problem(frames.free(run)), Problem::Order);
        assert_eq!(problem(frames.free_order(run, 2)), Problem::Order);
        assert_eq!(problem(frames.free_order(run + 1, 0)), Problem::NotAllocated);
        assert_eq!(problem(frames.free_order(run, 300)), Problem::Order);
        frames.free_order(run, 3).unwrap();
        assert_eq!(problem(frames.free_order(run, 3)), Problem::NotAllocated);
    }
    let stats = adds_up(&frames);
    assert_eq!((stats.allocated, stats.free_errors), (0, 9));
}

#[cfg(debug_assertions)]
#[test]
fn a_double_free_names_both_places() {
    let frames = small(4);
    let frame = frames.alloc().unwrap();
    let line = line!() + 1;
    free(&frames, frame);
    // SAFETY: nothing of it is used.
    let error = unsafe { frames.free(frame) }.unwrap_err();
    assert_eq!(error.places.allocated.unwrap().line(), line - 2);
    assert!(error.places.freed.is_some() && error.to_string().contains("frames.rs"), "{error}");
}

#[test]
fn an_array_with_mistakes_is_freed_but_for_those() {
    let frames = small(8);
    let mut all = vec![0; 600];
    assert_eq!(frames.alloc_bulk(&mut all), 600);
    let mut given = all.clone();
    given.extend_from_slice(&[9999, all[3], 5000]);
    given.extend_from_slice(&all[..300]);
    // SAFETY: nothing of these is used.
    let error = unsafe { frames.free_bulk(&given) }.unwrap_err();
    assert_eq!((error.frame, error.problem), (9999, Problem::OutOfRange));
    let stats = adds_up(&frames);
    assert_eq!((stats.allocated, stats.free_errors), (0, 303));
}

#[test]
fn arrays_of_every_length_have_different_frames() {
    let frames = small(64);
    let mut owned = HashSet::new();
    let mut arrays = Vec::new();
    for len in (0..70).chain([100, 247, 248, 249, 496, 500, 1000, 5000]) {
        let mut array = vec![u32::MAX; len];
        let count = frames.alloc_bulk(&mut array);
        assert!(array[..count].iter().all(|&frame| frame < 16384 && owned.insert(frame)), "{len}");
        assert!(count == len || owned.len() == 16384 || len == 0);
        arrays.push(array[..count].to_vec());
    }
    assert_eq!(adds_up(&frames).allocated, owned.len());
    for array in arrays {
        // SAFETY: nothing of these is used.
        unsafe { frames.free_bulk(&array) }.unwrap();
    }
    assert_eq!(adds_up(&frames).allocated, 0);
    // And all of them at once, with nothing left on any stack.
    let mut array = vec![0; 20_000];
    assert_eq!(frames.alloc_bulk(&mut array), 16384);
    assert_eq!(array[..16384].iter().collect::<HashSet<_>>().len(), 16384);
}

#[test]
fn zeroed_frames_are_zero_whatever_was_in_them() {
    let frames = small(16);
    let mut some = vec![0; 1024];
    for round in 0..8 {
        // First of all: a thread that goes from CPU to CPU takes some of every area, and leaves no long run in any.
        let run = frames.alloc_order_zeroed(1 + round % 8).unwrap();
        let zeroed: Vec<u32> = (0..2000).map(|_| frames.alloc_zeroed().unwrap()).collect();
        assert!(zeroed.iter().all(|&frame| bytes(&frames, frame, 1).iter().all(|&byte| byte == 0)), "round {round}");
        assert_eq!(frames.alloc_bulk(&mut some), 1024);
        assert!(bytes(&frames, run, 2 << (round % 8)).iter().all(|&byte| byte == 0), "round {round}");
        bytes(&frames, run, 2 << (round % 8)).fill(0x5a);
        some.iter().chain(&zeroed).for_each(|&frame| bytes(&frames, frame, 1).fill(0xa5));
        // SAFETY: nothing of these is used.
        unsafe {
            frames.free_order(run, 1 + round % 8).unwrap();
            frames.free_bulk(&some).unwrap();
            frames.free_bulk(&zeroed).unwrap();
        }
    }
}

#[test]
fn zeroes_that_are_known_are_not_written_again() {
    let frames = frames(Options { limit: 8 * MIB, zero_rate: 0, ..Options::default() });
    let fresh: Vec<u32> = (0..2048).map(|_| frames.alloc_zeroed().unwrap()).collect();
    assert_eq!((frames.stats().zeroed_by_caller, backed(&frames)), (0, 0));
    fresh.iter().for_each(|&frame| free(&frames, frame));
    // They were in a program's hands: nobody knows.
    let again: Vec<u32> = (0..2048).map(|_| frames.alloc_zeroed().unwrap()).collect();
    assert_eq!(frames.stats().zeroed_by_caller, 2048);
    again.iter().for_each(|&frame| free(&frames, frame));
    frames.trim();
    assert!((0..2048).all(|_| frames.alloc_zeroed().is_ok()));
    assert_eq!(frames.stats().zeroed_by_caller, 2048);
}

#[test]
fn helpers_zero_ahead_what_is_asked_for() {
    let frames = small(64);
    let ask = |count: usize| {
        let zeroed: Vec<u32> = (0..count).map(|_| frames.alloc_zeroed().unwrap()).collect();
        for &frame in &zeroed {
            assert!(bytes(&frames, frame, 1).iter().all(|&byte| byte == 0));
            bytes(&frames, frame, 1).fill(0xa5);
        }
        zeroed.iter().for_each(|&frame| free(&frames, frame));
    };
    // All of it is dirty.
    let all: Vec<u32> = (0..16384).map(|_| frames.alloc().unwrap()).collect();
    all.iter().for_each(|&frame| {
        bytes(&frames, frame, 1).fill(0xa5);
        free(&frames, frame);
    });
    let ahead = || {
        ask(500);
        adds_up(&frames).zeroed_ahead > 2000
    };
    assert!(within(Duration::from_secs(300), ahead), "{:?}", frames.stats());
    assert_eq!(frames.stats().allocated, 0);
}

#[test]
fn what_helpers_are_zeroing_can_be_had_at_once() {
    let frames = small(32);
    let dirty = |frames: &Frames| {
        let all: Vec<u32> = (0..8192).map(|_| frames.alloc().unwrap()).collect();
        all.iter().for_each(|&frame| bytes(frames, frame, 1).fill(0xa5));
        all.iter().for_each(|&frame| free(frames, frame));
    };
    for round in 0..30 {
        dirty(&frames);
        for _ in 0..200 {
            let frame = frames.alloc_zeroed().unwrap();
            assert!(bytes(&frames, frame, 1).iter().all(|&byte| byte == 0));
            free(&frames, frame);
        }
        std::thread::sleep(Duration::from_millis(round % 10));
        // Every frame, at any moment.
        let all: Vec<u32> = (0..8192).map(|_| frames.alloc().unwrap()).collect();
        all.iter().for_each(|&frame| word(&frames, frame).store(frame as usize + 1, Ordering::Relaxed));
        std::thread::sleep(Duration::from_millis(1));
        assert!(all.iter().all(|&frame| word(&frames, frame).load(Ordering::Relaxed) == frame as usize + 1));
        all.iter().for_each(|&frame| free(&frames, frame));
    }
}

#[test]
fn an_idle_pool_gives_its_memory_back_by_itself() {
    let frames = frames(Options { limit: 64 * MIB, decay: Duration::from_millis(400), ..Options::default() });
    let keep = frames.alloc().unwrap();
    word(&frames, keep).store(7, Ordering::Relaxed);
    let all: Vec<u32> = (0..10_000).map(|_| frames.alloc().unwrap()).collect();
    all.iter().for_each(|&frame| word(&frames, frame).store(1, Ordering::Relaxed));
    assert!(backed(&frames) > 30 * MIB);
    all.iter().for_each(|&frame| free(&frames, frame));
    let back = within(Duration::from_secs(20), || backed(&frames) <= 2 * MIB);
    assert!(back, "{} bytes are still there: {:?}", backed(&frames), frames.stats());
    assert_eq!(word(&frames, keep).load(Ordering::Relaxed), 7);
    // The last one, without anything else happening.
    free(&frames, keep);
    // The pages are gone a moment before that is reported.
    let back = within(Duration::from_secs(20), || backed(&frames) == 0 && frames.stats().backed == 0);
    assert!(back, "{} bytes are still there: {:?}", backed(&frames), frames.stats());
    let stats = adds_up(&frames);
    assert_eq!((stats.allocated, stats.stacked, stats.backed), (0, 0, 0), "{stats:?}");
    assert!(stats.given_back >= 10_000);
}

/// Nanoseconds that each watcher of this process has run.
fn watchers() -> HashMap<String, u64> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let watching = tasks.filter(|task| read(task.join("comm")) == "pagecrew/watch\n");
    let ran = |task: &std::path::Path| read(task.join("schedstat")).split(' ').next()?.parse().ok();
    watching.filter_map(|task| Some((task.display().to_string(), ran(&task)?))).collect()
}

#[test]
fn a_watcher_rests_even_if_memory_is_to_go_back_at_once() {
    let frames = frames(Options { limit: 64 * MIB, decay: Duration::ZERO, ..Options::default() });
    let keep = frames.alloc().unwrap();
    let gone = frames.alloc_order(9).unwrap();
    word(&frames, gone).store(1, Ordering::Relaxed);
    // SAFETY: nothing of it is used any more.
    unsafe { frames.free_order(gone, 9) }.unwrap();
    assert!(within(Duration::from_secs(20), || backed(&frames) == 0));
    let (before, begin) = (watchers(), Instant::now());
    std::thread::sleep(Duration::from_millis(500));
    let (after, passed) = (watchers(), begin.elapsed().as_nanos() as u64);
    for (watcher, ran) in after {
        let ran = ran - before.get(&watcher).copied().unwrap_or(0).min(ran);
        assert!(ran < passed * 15 / 100, "{watcher} ran {ran} of {passed} ns");
    }
    free(&frames, keep);
}

#[test]
fn memory_in_use_is_never_given_back() {
    let frames = frames(Options { limit: 64 * MIB, decay: Duration::from_millis(10), ..Options::default() });
    let begin = Instant::now();
    let mut round = 0usize;
    // Longer on a machine so slow that nothing went back until then.
    let nothing_yet = || frames.stats().given_back == 0 && begin.elapsed() < Duration::from_secs(60);
    while begin.elapsed() < Duration::from_secs(2) || nothing_yet() {
        round += 1;
        let some: Vec<u32> = (0..1 + round * 37 % 3000).map(|_| frames.alloc().unwrap()).collect();
        some.iter().for_each(|&frame| word(&frames, frame).store(frame as usize ^ round, Ordering::Relaxed));
        if round.is_multiple_of(7) {
            std::thread::sleep(Duration::from_millis(12));
        }
        if round.is_multiple_of(31) {
            frames.trim();
        }
        assert!(some.iter().all(|&frame| word(&frames, frame).load(Ordering::Relaxed) == frame as usize ^ round));
        some.iter().for_each(|&frame| free(&frames, frame));
    }
    assert!(adds_up(&frames).given_back > 0);
}

#[test]
fn trimmed_memory_is_back_when_the_call_returns() {
    let frames = small(64);
    let all: Vec<u32> = (0..16384).map(|_| frames.alloc().unwrap()).collect();
    all.iter().for_each(|&frame| word(&frames, frame).store(1, Ordering::Relaxed));
    assert_eq!(backed(&frames), 64 * MIB);
    all.iter().for_each(|&frame| free(&frames, frame));
    frames.trim();
    assert_eq!((backed(&frames), adds_up(&frames).free_zeroed), (0, 16384));
}

#[test]
fn a_gigabyte_in_a_row() {
    let frames = small(2560);
    let one = frames.alloc_order(GIANT_ORDER).unwrap();
    let other = frames.alloc_order_zeroed(GIANT_ORDER).unwrap();
    assert_eq!(frames.alloc_order(GIANT_ORDER), Err(OutOfFrames { order: GIANT_ORDER }));
    for frame in [one, other] {
        assert_eq!(frame as usize % (1 << GIANT_ORDER), 0);
        assert_eq!(frames.address(frame).as_ptr() as usize % (1 << 30), 0);
        word(&frames, frame + (1 << GIANT_ORDER) - 1).store(1, Ordering::Relaxed);
    }
    assert_eq!(adds_up(&frames).allocated, 2 << GIANT_ORDER);
    assert!(frames.alloc_order(10).is_err() && frames.alloc_order(64).is_err());
    // SAFETY: nothing of these is used any more.
    unsafe {
        assert_eq!(frames.free_order(one, AREA_ORDER).unwrap_err().problem, Problem::Order);
        frames.free_order(one, GIANT_ORDER).unwrap();
        frames.free_order(other, GIANT_ORDER).unwrap();
    }
    assert_eq!(adds_up(&frames).allocated, 0);
    let again = frames.alloc_order_zeroed(GIANT_ORDER).unwrap();
    let last = word(&frames, again + (1 << GIANT_ORDER) - 1);
    assert_eq!(last.load(Ordering::Relaxed), 0);
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let build = |limit| Frames::with(region(), Options { limit, ..Options::default() }, one_node());
    assert_eq!(build(0).unwrap_err(), BuildError::Limit(0));
    assert_eq!(build(1 << 50).unwrap_err(), BuildError::Limit(1 << 50));
    assert!(matches!(build(1 << 42).unwrap_err(), BuildError::Region(_)));
    assert_eq!(build(1).unwrap().stats().limit, 512);
}

#[test]
fn frames_of_other_nodes_go_home() {
    for nodes in [2, 8] {
        let options = Options { limit: 64 * MIB, ..Options::default() };
        let frames = Frames::with(region(), options, Topology::uniform(nodes, 1)).unwrap();
        let limit = frames.stats().limit;
        assert_eq!((limit, frames.zones()), (nodes * 32 * 512, nodes));
        let mut all: Vec<u32> = (0..limit).map(|_| frames.alloc().unwrap()).collect();
        assert!(frames.alloc().is_err());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), limit);
        // SAFETY: nothing of these is used.
        unsafe {
            frames.free_bulk(&all[..limit / 2]).unwrap();
        }
        all[limit / 2..].iter().for_each(|&frame| free(&frames, frame));
        frames.drain();
        let stats = adds_up(&frames);
        assert_eq!((stats.allocated, stats.stacked), (0, 0));
        for zone in 0..nodes {
            let stats = frames.zone_stats(zone);
            assert_eq!((stats.limit, stats.free, stats.free_areas), (32 * 512, 32 * 512, 32));
        }
    }
}

#[test]
fn a_frame_frees_itself() {
    let frames = small(4);
    {
        let mut one = frames.take().unwrap();
        one.fill(3);
        let other = frames.take_zeroed().unwrap();
        assert!(one.number() != other.number() && one[17] == 3 && other.iter().all(|&byte| byte == 0));
        assert_eq!(frames.stats().allocated, 2);
    }
    assert_eq!(frames.stats().allocated, 0);
    let number = frames.take().unwrap().into_number();
    assert_eq!(frames.stats().allocated, 1);
    free(&frames, number);
}

#[test]
fn book_keeping_is_less_than_a_thousandth() {
    let frames = small(1024);
    let stats = frames.stats();
    assert!(stats.metadata * 1000 < stats.limit * PAGE_SIZE, "{stats:?}");
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(bool),
    Bulk(usize),
    Order(u32, bool),
    Free(usize),
    FreeBulk(usize),
    FreeTwice(usize),
    Drain,
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(Step::Alloc),
        2 => (0usize..400).prop_map(Step::Bulk),
        2 => (0u32..=9, any::<bool>()).prop_map(|(order, zeroed)| Step::Order(order, zeroed)),
        6 => any::<usize>().prop_map(Step::Free),
        2 => (0usize..300).prop_map(Step::FreeBulk),
        1 => any::<usize>().prop_map(Step::FreeTwice),
        1 => Just(Step::Drain),
        1 => Just(Step::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(debug_assertions) { 20 } else { 150 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]
    #[test]
    fn behaves_as_a_set_of_frames(steps in prop::collection::vec(step(), 1..300), mib in 1usize..24) {
        let frames = small(mib);
        let limit = frames.stats().limit;
        let mut used = vec![false; limit];
        let mut owned: Vec<(u32, u32)> = Vec::new();
        let claim = |frames: &Frames, used: &mut Vec<bool>, first: u32, order: u32, zeroed: bool| {
            let run = first as usize..first as usize + (1 << order);
            assert!(run.end <= limit && run.start % (1 << order) == 0, "{first} of order {order}");
            assert!(!used[run.clone()].contains(&true), "{first} of order {order} is had already");
            used[run.clone()].fill(true);
            for frame in run {
                assert!(!zeroed || word(frames, frame as u32).load(Ordering::Relaxed) == 0, "{frame} is not zero");
                word(frames, frame as u32).store(1 + frame, Ordering::Relaxed);
            }
        };
        for step in steps {
            let free_before = used.iter().filter(|&&used| !used).count();
            match step {
                Step::Alloc(zeroed) => {
                    let found = if zeroed { frames.alloc_zeroed() } else { frames.alloc() };
                    prop_assert_eq!(found.is_ok(), free_before > 0);
                    if let Ok(frame) = found {
                        claim(&frames, &mut used, frame, 0, zeroed);
                        owned.push((frame, 0));
                    }
                }
                Step::Bulk(count) => {
                    let mut array = vec![0; count];
                    let got = frames.alloc_bulk(&mut array);
                    prop_assert_eq!(got, count.min(free_before));
                    for &frame in &array[..got] {
                        claim(&frames, &mut used, frame, 0, false);
                        owned.push((frame, 0));
                    }
                }
                Step::Order(order, zeroed) => {
                    let len = 1usize << order;
                    let fits = (0..limit).step_by(len).any(|start| !used[start..start + len].contains(&true));
                    let found = if zeroed { frames.alloc_order_zeroed(order) } else { frames.alloc_order(order) };
                    prop_assert_eq!(found.is_ok(), fits, "order {}", order);
                    if let Ok(frame) = found {
                        claim(&frames, &mut used, frame, order, zeroed);
                        owned.push((frame, order));
                    }
                }
                Step::Free(index) if !owned.is_empty() => {
                    let (frame, order) = owned.swap_remove(index % owned.len());
                    for frame in frame..frame + (1 << order) {
                        prop_assert_eq!(word(&frames, frame).load(Ordering::Relaxed), 1 + frame as usize);
                        used[frame as usize] = false;
                    }
                    // SAFETY: nothing of it is used any more.
                    unsafe { frames.free_order(frame, order) }.unwrap();
                }
                Step::FreeBulk(count) => {
                    let single = owned.iter().filter(|(_, order)| *order == 0).take(count);
                    let array: Vec<u32> = single.map(|&(frame, _)| frame).collect();
                    owned.retain(|(frame, order)| *order > 0 || !array.contains(frame));
                    array.iter().for_each(|&frame| used[frame as usize] = false);
                    // SAFETY: nothing of these is used any more.
                    unsafe { frames.free_bulk(&array) }.unwrap();
                }
                Step::FreeTwice(index) => {
                    let frame = (index % (limit + 9)) as u32;
                    let single = owned.iter().position(|&owned| owned == (frame, 0));
                    // SAFETY: nothing of it is used any more.
                    let freed = unsafe { frames.free(frame) };
                    prop_assert_eq!(freed.is_ok(), single.is_some());
                    if let Some(index) = single {
                        owned.swap_remove(index);
                        used[frame as usize] = false;
                    }
                }
                Step::Drain => frames.drain(),
                Step::Trim => frames.trim(),
                _ => {}
            }
            let stats = adds_up(&frames);
            prop_assert_eq!(stats.allocated, used.iter().filter(|&&used| used).count());
        }
        for (first, order) in owned {
            for frame in first..first + (1 << order) {
                prop_assert_eq!(word(&frames, frame).load(Ordering::Relaxed), 1 + frame as usize);
            }
        }
    }
}

/// Threads that allocate, free, hand frames to each other and are moved from CPU to CPU, while stacks are drained and areas trimmed.
#[test]
fn a_storm_of_threads_loses_and_doubles_nothing() {
    let frames = frames(Options { limit: 160 * MIB, decay: Duration::from_millis(20), ..Options::default() });
    let owner: &[AtomicU32] = &(0..frames.stats().limit).map(|_| AtomicU32::new(0)).collect::<Vec<_>>();
    let stop = AtomicBool::new(false);
    let (sender, receiver) = std::sync::mpsc::sync_channel::<u32>(1000);
    let receiver = std::sync::Mutex::new(receiver);
    let take = |frame: u32, order: u32, me: u32| {
        (frame..frame + (1 << order)).for_each(|frame| {
            assert_eq!(owner[frame as usize].swap(me, Ordering::SeqCst), 0, "{frame} is had twice");
            word(&frames, frame).store(me as usize, Ordering::Relaxed);
        });
    };
    let give = |frame: u32, order: u32, me: u32| {
        (frame..frame + (1 << order)).for_each(|frame| {
            assert_eq!(word(&frames, frame).load(Ordering::Relaxed), me as usize, "{frame} was written to");
            assert_eq!(owner[frame as usize].swap(0, Ordering::SeqCst), me, "{frame} is another's");
        });
        // SAFETY: nothing of it is used any more.
        unsafe { frames.free_order(frame, order) }.unwrap();
    };
    std::thread::scope(|scope| {
        let running = StopOnDrop(&stop);
        for me in 1..=6u32 {
            let (frames, stop, take, give, receiver, sender) =
                (&frames, &stop, &take, &give, &receiver, sender.clone());
            scope.spawn(move || {
                let mut mine: Vec<(u32, u32)> = Vec::new();
                let mut random = me as usize;
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    match (random >> 40) % 16 {
                        0..5 => {
                            if let Ok(frame) = frames.alloc() {
                                take(frame, 0, me);
                                mine.push((frame, 0));
                            }
                        }
                        5 => {
                            if let Ok(frame) = frames.alloc_zeroed() {
                                assert_eq!(word(frames, frame).load(Ordering::Relaxed), 0);
                                take(frame, 0, me);
                                mine.push((frame, 0));
                            }
                        }
                        6 => {
                            let mut array = [0; 100];
                            let count = frames.alloc_bulk(&mut array[..(random >> 20) % 100]);
                            for &frame in &array[..count] {
                                take(frame, 0, me);
                                mine.push((frame, 0));
                            }
                        }
                        7 => {
                            let order = ((random >> 20) % 10) as u32;
                            if let Ok(frame) = frames.alloc_order(order) {
                                take(frame, order, me);
                                mine.push((frame, order));
                            }
                        }
                        8 => {
                            if let Some(place) = mine.iter().rposition(|(_, order)| *order == 0) {
                                let (frame, _) = mine.swap_remove(place);
                                owner[frame as usize].store(100, Ordering::SeqCst);
                                if sender.try_send(frame).is_err() {
                                    owner[frame as usize].store(me, Ordering::SeqCst);
                                    mine.push((frame, 0));
                                }
                            }
                        }
                        9 => {
                            if let Ok(receiver) = receiver.try_lock()
                                && let Ok(frame) = receiver.try_recv()
                            {
                                assert_eq!(owner[frame as usize].swap(0, Ordering::SeqCst), 100);
                                free(frames, frame);
                            }
                        }
                        10 if (random >> 30).is_multiple_of(64) => {
                            let mut one = CpuSet::new();
                            one.insert((random >> 50) % sched::online_cpus());
                            sched::set_affinity(&one).unwrap();
                        }
                        _ => {
                            if !mine.is_empty() {
                                let (frame, order) = mine.swap_remove((random >> 8) % mine.len());
                                give(frame, order, me);
                            }
                        }
                    }
                    if mine.len() > 1500 {
                        mine.drain(..).for_each(|(frame, order)| give(frame, order, me));
                    }
                }
                mine.into_iter().for_each(|(frame, order)| give(frame, order, me));
            });
        }
        for round in 0..200 {
            std::thread::sleep(Duration::from_millis(10));
            if round % 3 == 0 {
                frames.drain()
            } else if round % 20 == 1 {
                frames.trim()
            }
        }
        drop(running);
    });
    drop(sender);
    receiver.into_inner().unwrap().iter().for_each(|frame| free(&frames, frame));
    let stats = adds_up(&frames);
    assert_eq!((stats.allocated, stats.free_errors), (0, 0), "{stats:?}");
    assert!(stats.drains > 0 && stats.given_back > 0, "{stats:?}");
}

/// A thread in a forked child has exactly what the program had, and all the rest is free.
#[test]
fn a_forked_child_has_what_its_parent_had() {
    let region = region();
    let frames = Frames::new(region.clone(), Options { limit: 64 * MIB, ..Options::default() }).unwrap();
    let stop = AtomicBool::new(false);
    let mine: Vec<u32> = (0..1000).map(|_| frames.alloc().unwrap()).collect();
    let run = frames.alloc_order(5).unwrap();
    let whole = frames.alloc_order(9).unwrap();
    mine.iter().chain([&run, &whole]).for_each(|&frame| word(&frames, frame).store(5, Ordering::Relaxed));
    std::thread::scope(|scope| {
        let running = StopOnDrop(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut array = [0; 300];
                    let count = frames.alloc_bulk(&mut array);
                    let one = frames.alloc_zeroed().unwrap();
                    // SAFETY: nothing of these is used.
                    unsafe { frames.free_bulk(&array[..count]) }.unwrap();
                    free(&frames, one);
                }
            });
        }
        for _ in 0..10 {
            let region_guard = region.before_fork();
            let guard = frames.before_fork();
            // SAFETY: the child calls only what is made for it, and ends by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: this is the child's only thread.
                unsafe {
                    region_guard.in_child();
                    guard.in_child();
                    libc::_exit(look_around_in_child(&frames, &mine, run, whole));
                }
            }
            drop(guard);
            drop(region_guard);
            let mut status = 0;
            // SAFETY: the child is ours, and `status` is a valid place.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status), "{status:#x}");
            assert_eq!(libc::WEXITSTATUS(status), 0);
        }
        drop(running);
    });
}

/// 0, or the number of what is wrong.
fn look_around_in_child(frames: &Frames, mine: &[u32], run: u32, whole: u32) -> i32 {
    let stats = frames.stats();
    // Frames in the hands of the parent's other threads are lost to the child: at most an array and one each.
    let allocated = mine.len() + 32 + 512;
    if stats.allocated < allocated || stats.allocated > allocated + 3 * 301 {
        return 1;
    }
    if mine.iter().any(|&frame| word(frames, frame).load(Ordering::Relaxed) != 5) {
        return 2;
    }
    let mut owned = vec![false; stats.limit];
    let mut mark =
        |first: u32, count: u32| (first..first + count).all(|f| !std::mem::replace(&mut owned[f as usize], true));
    if !mine.iter().all(|&frame| mark(frame, 1)) || !mark(run, 32) || !mark(whole, 512) {
        return 3;
    }
    let mut count = 0;
    while let Ok(frame) = frames.alloc_zeroed() {
        count += 1;
        if !mark(frame, 1) || !bytes(frames, frame, 1).iter().all(|&byte| byte == 0) {
            return 4;
        }
    }
    if count + stats.allocated != stats.limit {
        return 5;
    }
    // SAFETY: nothing of these is used any more.
    let freed = unsafe { [frames.free(mine[0]), frames.free_order(run, 5), frames.free_order(whole, 9)] };
    if freed.iter().any(Result::is_err) || frames.alloc_order(9).is_err() {
        return 6;
    }
    0
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);
static SHARED: std::sync::OnceLock<Frames> = std::sync::OnceLock::new();
static OWNERS: std::sync::OnceLock<Vec<AtomicU32>> = std::sync::OnceLock::new();

/// Takes `count` frames and gives them back. Returns how many there were.
fn exchange(me: u32, count: usize) -> usize {
    let (frames, owners) = (SHARED.get().unwrap(), OWNERS.get().unwrap());
    let mut mine = [0; 40];
    let count = count.min(40);
    let mut got = 0;
    while got < count
        && let Ok(frame) = frames.alloc()
    {
        if owners[frame as usize].swap(me, Ordering::SeqCst) != 0 {
            std::process::abort();
        }
        mine[got] = frame;
        got += 1;
    }
    for &frame in &mine[..got] {
        if owners[frame as usize].swap(0, Ordering::SeqCst) != me {
            std::process::abort();
        }
        // SAFETY: nothing of it is used any more.
        if unsafe { frames.free(frame) }.is_err() {
            std::process::abort();
        }
    }
    got
}

extern "C" fn on_signal(_: i32) {
    let number = SIGNALS.fetch_add(1, Ordering::Relaxed);
    HANDLED.fetch_add(exchange(1000 + number as u32, 1 + number % 40), Ordering::Relaxed);
}

/// Signal handlers allocate and free while the code that they interrupt does, at the highest rate that timers give.
#[test]
fn signal_handlers_allocate_while_the_interrupted_code_does() {
    signals(Duration::from_secs(3), usize::MAX);
}

/// The same until handlers have had ten million frames.
#[test]
#[ignore = "takes a minute"]
fn ten_million_frames_in_signal_handlers() {
    signals(Duration::from_secs(300), 10_000_000);
}

fn signals(at_most: Duration, enough: usize) {
    let frames = SHARED.get_or_init(|| small(16));
    OWNERS.get_or_init(|| (0..frames.stats().limit).map(|_| AtomicU32::new(0)).collect());
    let (signals, handled) = (SIGNALS.load(Ordering::Relaxed), HANDLED.load(Ordering::Relaxed));
    // SAFETY: the handler calls only what may be called in one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut());
    }
    let begin = Instant::now();
    // Longer on a machine so slow that few signals have come until then.
    let few = || SIGNALS.load(Ordering::Relaxed) <= signals + 100 && begin.elapsed() < Duration::from_secs(60);
    std::thread::scope(|scope| {
        for me in 1..=3u32 {
            scope.spawn(move || {
                // SAFETY: the event names this thread, and the timer is deleted by it.
                unsafe {
                    let mut event: libc::sigevent = std::mem::zeroed();
                    event.sigev_notify = libc::SIGEV_THREAD_ID;
                    event.sigev_signo = libc::SIGUSR2;
                    event.sigev_notify_thread_id = sched::thread_id();
                    let mut timer = std::mem::zeroed();
                    assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
                    let period = libc::timespec { tv_sec: 0, tv_nsec: 40_000 + 10_000 * i64::from(me) };
                    let spec = libc::itimerspec { it_interval: period, it_value: period };
                    assert_eq!(libc::timer_settime(timer, 0, &spec, std::ptr::null_mut()), 0);
                    let mut round = 0;
                    while few() || begin.elapsed() < at_most && HANDLED.load(Ordering::Relaxed) - handled < enough {
                        round += 1;
                        exchange(me, round % 40);
                        if round % 1000 == 0 {
                            frames.drain();
                        }
                    }
                    libc::timer_delete(timer);
                }
            });
        }
    });
    assert!(SIGNALS.load(Ordering::Relaxed) > signals + 100);
    let stats = adds_up(frames);
    assert_eq!((stats.allocated, stats.free_errors), (0, 0), "{stats:?}");
    assert!(OWNERS.get().unwrap().iter().all(|owner| owner.load(Ordering::Relaxed) == 0));
}

/// CPUs are taken out of the machine and put back while threads that ran on them have frames on their stacks.
#[test]
#[ignore = "takes CPUs out of the machine for moments, where it may"]
fn cpus_that_come_and_go_take_no_frame_with_them() {
    const SWITCH: &str = "/sys/devices/system/cpu/cpu1/online";
    if std::fs::write(SWITCH, "1").is_err() {
        return;
    }
    let frames = small(32);
    let limit = frames.stats().limit;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let running = StopOnDrop(&stop);
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let some: Vec<u32> = (0..300).map(|_| frames.alloc().unwrap()).collect();
                    some.iter().for_each(|&frame| word(&frames, frame).store(frame as usize, Ordering::Relaxed));
                    for frame in some {
                        assert_eq!(word(&frames, frame).load(Ordering::Relaxed), frame as usize);
                        free(&frames, frame);
                    }
                }
            });
        }
        for round in 0..20 {
            std::fs::write(SWITCH, if round % 2 == 0 { "0" } else { "1" }).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        std::fs::write(SWITCH, "0").unwrap();
        drop(running);
    });
    // What is on the stack of the CPU that is gone can be had.
    let all: Vec<u32> = (0..limit).map(|_| frames.alloc().unwrap()).collect();
    std::fs::write(SWITCH, "1").unwrap();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), limit);
    all.iter().for_each(|&frame| free(&frames, frame));
    assert_eq!(adds_up(&frames).allocated, 0);
}
