//! Pages of 4 KiB, taken and returned in every manner that a network stack or a storage engine has.

use super::say;
use anyhow::{Context, Result, bail};
use pagecrew::frame::{Frames, Options};
use pagecrew::region::{self, Region};
use pagecrew::sys::PAGE_SIZE;
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::sched::{self, CpuSet};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

/// Memory that the pages are of, in bytes.
const LIMIT: usize = 2 << 30;
/// The largest batch.
pub const LARGEST_BATCH: usize = 16_384;

/// Where pages come from.
trait Source: Sync {
    type Page: Copy + Default + Send;

    fn get(&self) -> Self::Page;

    fn put(&self, page: Self::Page);

    fn get_zeroed(&self) -> Self::Page;

    fn get_many(&self, pages: &mut [Self::Page]) {
        pages.iter_mut().for_each(|page| *page = self.get());
    }

    fn put_many(&self, pages: &[Self::Page]) {
        pages.iter().for_each(|&page| self.put(page));
    }

    /// Writes to a page.
    fn write(&self, page: Self::Page);
}

/// The library's own.
struct Ours(Frames);

impl Ours {
    fn new() -> Result<Ours> {
        let region = Arc::new(Region::new(region::Options::default())?);
        Ok(Ours(Frames::new(region, Options { limit: LIMIT, ..Options::default() })?))
    }
}

const ENOUGH: &str = "there are more frames than any bench has at a time";

impl Source for Ours {
    type Page = u32;

    #[inline(always)]
    fn get(&self) -> u32 {
        self.0.alloc().expect(ENOUGH)
    }

    #[inline(always)]
    fn put(&self, page: u32) {
        // SAFETY: no bench touches a page that it has put back.
        unsafe { self.0.free(page) }.expect("it was allocated");
    }

    #[inline(always)]
    fn get_zeroed(&self) -> u32 {
        self.0.alloc_zeroed().expect(ENOUGH)
    }

    #[inline(always)]
    fn get_many(&self, pages: &mut [u32]) {
        assert_eq!(self.0.alloc_bulk(pages), pages.len(), "{ENOUGH}");
    }

    #[inline(always)]
    fn put_many(&self, pages: &[u32]) {
        // SAFETY: as above.
        unsafe { self.0.free_bulk(pages) }.expect("they were allocated");
    }

    fn write(&self, page: u32) {
        // SAFETY: the page is this bench's.
        unsafe { self.0.address(page).write_bytes(0xa5, PAGE_SIZE) };
    }
}

/// The program's malloc, whichever was preloaded.
struct Malloc;

impl Source for Malloc {
    type Page = usize;

    #[inline(always)]
    fn get(&self) -> usize {
        // SAFETY: aligned_alloc may be called with any power of two and a multiple of it.
        let page = unsafe { libc::aligned_alloc(PAGE_SIZE, PAGE_SIZE) } as usize;
        assert!(page != 0, "out of memory");
        page
    }

    #[inline(always)]
    fn put(&self, page: usize) {
        // SAFETY: the page came from `get` or `get_zeroed` and is put back once.
        unsafe { libc::free(page as *mut _) };
    }

    #[inline(always)]
    fn get_zeroed(&self) -> usize {
        // SAFETY: calloc may be called with any size.
        let page = unsafe { libc::calloc(1, PAGE_SIZE) } as usize;
        assert!(page != 0, "out of memory");
        page
    }

    fn write(&self, page: usize) {
        // SAFETY: the page is this bench's.
        unsafe { (page as *mut u8).write_bytes(0xa5, PAGE_SIZE) };
    }
}

/// A list of pages under a lock: what is written in an afternoon.
struct Locked(Mutex<Vec<u32>>);

impl Locked {
    fn new() -> Locked {
        Locked(Mutex::new((0..(LIMIT / PAGE_SIZE) as u32).rev().collect()))
    }
}

impl Source for Locked {
    type Page = u32;

    #[inline(always)]
    fn get(&self) -> u32 {
        self.0.lock().expect("nobody panics").pop().expect(ENOUGH)
    }

    #[inline(always)]
    fn put(&self, page: u32) {
        self.0.lock().expect("nobody panics").push(page);
    }

    #[inline(always)]
    fn get_many(&self, pages: &mut [u32]) {
        let mut list = self.0.lock().expect("nobody panics");
        pages.iter_mut().for_each(|page| *page = list.pop().expect(ENOUGH));
    }

    #[inline(always)]
    fn put_many(&self, pages: &[u32]) {
        self.0.lock().expect("nobody panics").extend_from_slice(pages);
    }

    fn get_zeroed(&self) -> u32 {
        self.get()
    }

    fn write(&self, _: u32) {}
}

/// No pages at all: what the benches themselves take.
struct Nothing;

impl Source for Nothing {
    type Page = u32;

    #[inline(always)]
    fn get(&self) -> u32 {
        black_box(0)
    }

    #[inline(always)]
    fn put(&self, page: u32) {
        black_box(page);
    }

    fn get_zeroed(&self) -> u32 {
        self.get()
    }

    fn write(&self, _: u32) {}
}

/// Runs the bench `what` on `source`, and prints its figures.
pub fn run(source: &str, what: &str, number: usize) -> Result<()> {
    pin(0);
    match source {
        "pagecrew" => measure(&Ours::new()?, what, number),
        "malloc" => measure(&Malloc, what, number),
        "locked" => measure(&Locked::new(), what, number),
        "nothing" => measure(&Nothing, what, number),
        other => bail!("pages come from pagecrew, malloc, locked or nothing, not from '{other}'"),
    }
}

fn measure<S: Source>(source: &S, what: &str, number: usize) -> Result<()> {
    match what {
        "pair" => pair(source, number),
        "batches" => batches(source),
        "all" => all(source, number),
        "bulk" => bulk(source, number),
        "zeroed" => zeroed(source, number),
        "cold" => cold(source, number),
        "threads" => threads(source, number),
        "across" => across(source, number),
        other => bail!("there is no bench of pages called '{other}'"),
    }
}

/// Keeps the calling thread on one of the CPUs that it may use.
fn pin(number: usize) {
    let Ok(cpus) = sched::affinity() else { return };
    let numbers: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| cpus.contains(cpu)).collect();
    let mut one = CpuSet::new();
    one.insert(numbers[number % numbers.len()]);
    let _ = sched::set_affinity(&one);
}

/// Nanoseconds that each of `count` things takes which `work` does together, after one untimed round.
fn each_of(count: usize, mut work: impl FnMut()) -> f64 {
    work();
    let start = now_ns();
    work();
    (now_ns() - start) as f64 / count as f64
}

/// A page that is put back at once.
fn pair<S: Source>(source: &S, count: usize) -> Result<()> {
    say(each_of(count, || (0..count).for_each(|_| source.put(black_box(source.get())))))
}

/// Batches of 1, 2, 4, ... pages, one by one: for each size what a page takes to get, and to put.
fn batches<S: Source>(source: &S) -> Result<()> {
    let mut batch = [S::Page::default(); LARGEST_BATCH];
    let mut size = 1;
    while size <= LARGEST_BATCH {
        let (get, put) = timed_apart(
            &mut batch[..size],
            |batch| batch.iter_mut().for_each(|page| *page = black_box(source.get())),
            |batch| batch.iter().for_each(|&page| source.put(page)),
        );
        say(get)?;
        say(put)?;
        size *= 2;
    }
    Ok(())
}

/// The nanoseconds a page that `get` and `put` take. A look at the clock takes longer than a small batch, so the two are timed together
/// over many batches, and then share that time as they do when they are timed apart.
fn timed_apart<P>(batch: &mut [P], get: impl Fn(&mut [P]), put: impl Fn(&[P])) -> (f64, f64) {
    const TOGETHER: Duration = Duration::from_millis(60);
    const APART: Duration = Duration::from_millis(30);
    let rounds = 4096usize.div_ceil(batch.len());
    let mut both = || {
        for _ in 0..rounds {
            get(batch);
            put(batch);
        }
        rounds * batch.len()
    };
    until(TOGETHER / 4, &mut both);
    let start = now_ns();
    let pages = until(TOGETHER, &mut both);
    let together = (now_ns() - start) as f64 / pages as f64;
    let (mut getting, mut putting) = (0, 0);
    until(APART, &mut || {
        let start = now_ns();
        get(batch);
        let between = now_ns();
        put(batch);
        getting += between - start;
        putting += now_ns() - between;
        1
    });
    let share = getting as f64 / (getting + putting) as f64;
    (together * share, together * (1.0 - share))
}

/// `count` pages one by one: what a page takes to get, to put in the same order, and to put in random order.
fn all<S: Source>(source: &S, count: usize) -> Result<()> {
    let mut pages = vec![S::Page::default(); count];
    let (mut gets, mut puts) = (Vec::new(), Vec::new());
    for round in 0..4 {
        let start = now_ns();
        pages.iter_mut().for_each(|page| *page = black_box(source.get()));
        gets.push((now_ns() - start) as f64 / count as f64);
        if round == 3 {
            shuffle(&mut pages);
        }
        let start = now_ns();
        pages.iter().for_each(|&page| source.put(page));
        puts.push((now_ns() - start) as f64 / count as f64);
    }
    // The first round finds everything cold.
    say(crate::figures::median(&gets[1..]))?;
    say(crate::figures::median(&puts[1..3]))?;
    say(puts[3])
}

fn shuffle<P>(pages: &mut [P]) {
    let mut random = 1usize;
    for index in (1..pages.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pages.swap(index, (random >> 33) % (index + 1));
    }
}

/// Arrays of `size` pages: what a page takes to get and to put; then the same one by one.
fn bulk<S: Source>(source: &S, size: usize) -> Result<()> {
    let mut batch = vec![S::Page::default(); size];
    let (get, put) = timed_apart(&mut batch, |batch| source.get_many(batch), |batch| source.put_many(batch));
    let (single_get, single_put) = timed_apart(
        &mut batch,
        |batch| batch.iter_mut().for_each(|page| *page = black_box(source.get())),
        |batch| batch.iter().for_each(|&page| source.put(page)),
    );
    [get, put, single_get, single_put].into_iter().try_for_each(say)
}

/// Pages that are zero, and pages that need not be, for a program that has `count` at a time, writes to all of them and rests: what one
/// takes to get.
fn zeroed<S: Source>(source: &S, count: usize) -> Result<()> {
    let mut pages = vec![S::Page::default(); count];
    let (mut with_zeroes, mut without) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        for zeroes in [true, false] {
            let start = now_ns();
            match zeroes {
                true => pages.iter_mut().for_each(|page| *page = black_box(source.get_zeroed())),
                false => pages.iter_mut().for_each(|page| *page = black_box(source.get())),
            }
            let took = (now_ns() - start) as f64 / count as f64;
            if zeroes {
                with_zeroes.push(took)
            } else {
                without.push(took)
            }
            pages.iter().for_each(|&page| source.write(page));
            pages.iter().for_each(|&page| source.put(page));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    say(crate::figures::median(&with_zeroes[20..]))?;
    say(crate::figures::median(&without[20..]))
}

/// The first `count` pages of a program that have to be zero.
fn cold<S: Source>(source: &S, count: usize) -> Result<()> {
    let start = now_ns();
    (0..count).for_each(|_| _ = black_box(source.get_zeroed()));
    say((now_ns() - start) as f64 / count as f64)
}

/// How long several threads are looked at.
const WHILE: Duration = Duration::from_millis(300);

/// What a page takes to get and to put, all threads together, when each of `count` threads on a CPU of its own gets and puts 64 at a time.
fn threads<S: Source>(source: &S, count: usize) -> Result<()> {
    let barrier = Barrier::new(count);
    let work = |number: usize| {
        pin_to(number);
        let mut batch = [S::Page::default(); 64];
        let mut round = || {
            for _ in 0..16 {
                batch.iter_mut().for_each(|page| *page = black_box(source.get()));
                batch.iter().for_each(|&page| source.put(page));
            }
            16 * batch.len()
        };
        until(WHILE / 10, &mut round);
        barrier.wait();
        until(WHILE, &mut round)
    };
    let work = &work;
    let pages: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it only counts")).sum()
    });
    say(WHILE.as_nanos() as f64 / pages as f64)
}

/// Repeats `round`, which says how much it did, for `time`. Returns the sum.
fn until(time: Duration, round: &mut impl FnMut() -> usize) -> usize {
    let end = now_ns() + time.as_nanos() as u64;
    let mut sum = 0;
    while now_ns() < end {
        sum += round();
    }
    sum
}

/// As [`pin`] for a thread that has inherited the affinity of a pinned one.
fn pin_to(number: usize) {
    let mut all = CpuSet::new();
    (0..libc::CPU_SETSIZE as usize).for_each(|cpu| all.insert(cpu));
    let _ = sched::set_affinity(&all);
    pin(number);
}

/// A ring from one thread to another, which hands over pages by the burst. Each side looks at what the other says only when it has to.
struct Ring<P> {
    slots: Vec<std::cell::UnsafeCell<P>>,
    /// How many pages were sent, and the producer's last look at how many were received.
    sent: Line,
    received_seen: Line,
    /// How many pages were received.
    received: Line,
}

#[repr(align(128))]
struct Line(AtomicUsize);

/// Moments that a consumer rests that has emptied the ring: a microsecond or two.
const REST: usize = 64;
/// Pages that are handed over together.
const BURST: usize = 64;
const RING: usize = 64 * BURST;

// SAFETY: a slot is written by the one producer before `sent` has passed it, and read by the one consumer before `received` has.
unsafe impl<P: Send> Sync for Ring<P> {}

impl<P: Copy + Default> Ring<P> {
    fn new() -> Ring<P> {
        let line = || Line(AtomicUsize::new(0));
        let slots = (0..RING).map(|_| P::default().into()).collect();
        Ring { slots, sent: line(), received_seen: line(), received: line() }
    }

    /// Fills the next burst, once there is room. Called by one thread.
    fn send(&self, mut page: impl FnMut() -> P) {
        let sent = self.sent.0.load(Ordering::Relaxed);
        while sent - self.received_seen.0.load(Ordering::Relaxed) > RING - BURST {
            self.received_seen.0.store(self.received.0.load(Ordering::Acquire), Ordering::Relaxed);
            std::hint::spin_loop();
        }
        for index in sent..sent + BURST {
            // SAFETY: the slot is free, and this is the only producer.
            unsafe { *self.slots[index % RING].get() = page() };
        }
        self.sent.0.store(sent + BURST, Ordering::Release);
    }

    /// Empties all bursts that there are. Called by one thread.
    fn receive(&self, mut each: impl FnMut(P)) {
        let sent = self.sent.0.load(Ordering::Acquire);
        let mut received = self.received.0.load(Ordering::Relaxed);
        while received < sent {
            for index in received..received + BURST {
                // SAFETY: the slot was filled, and this is the only consumer.
                each(unsafe { *self.slots[index % RING].get() });
            }
            received += BURST;
            self.received.0.store(received, Ordering::Release);
        }
    }

    fn is_empty(&self) -> bool {
        self.sent.0.load(Ordering::Relaxed) == self.received.0.load(Ordering::Acquire)
    }
}

/// What a page takes to get in one thread and to put in another, by way of a ring; with one thread, it does both, half a ring at a
/// time.
fn across<S: Source>(source: &S, threads: usize) -> Result<()> {
    let ring = Ring::<S::Page>::new();
    let pages = if threads == 1 {
        let mut round = || {
            (0..RING / BURST / 2).for_each(|_| ring.send(|| source.get()));
            ring.receive(|page| source.put(page));
            RING / 2
        };
        until(WHILE / 10, &mut round);
        until(WHILE, &mut round)
    } else {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin_to(1);
                while !stop.load(Ordering::Relaxed) {
                    ring.receive(|page| source.put(page));
                    // On the producer's heels, it would wait for each line of the ring by itself.
                    (0..REST).for_each(|_| std::hint::spin_loop());
                }
            });
            // Whoever sends waits for room, so both have done as much but for a ring.
            let mut round = || {
                (0..16).for_each(|_| ring.send(|| source.get()));
                16 * BURST
            };
            until(WHILE / 10, &mut round);
            let pages = until(WHILE, &mut round);
            while !ring.is_empty() {
                std::hint::spin_loop();
            }
            stop.store(true, Ordering::Relaxed);
            pages
        })
    };
    say(WHILE.as_nanos() as f64 / pages as f64)
}

/// Prints the share of the memory that book-keeping takes, in percent.
pub fn metadata() -> Result<()> {
    let stats = Ours::new().context("frames for a look at their book-keeping")?.0.stats();
    say(stats.metadata as f64 * 100.0 / (stats.limit * PAGE_SIZE) as f64)
}
