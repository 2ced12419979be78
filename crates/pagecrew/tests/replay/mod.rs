//! Bytes as a program that uses frames, beside a model that says what has to come of it.
//!
//! The fuzzer (`fuzz/`) makes such programs up; the test `corpus` runs those that it has found worth keeping.

use pagecrew::frame::{AREA_ORDER, Frames, Options, Problem};
use pagecrew::region::{self, Region};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Areas that a program has: few enough for it to use all of them up.
const AREAS: usize = 3;

/// One for all programs: each of them leaves everything free.
fn frames() -> MutexGuard<'static, Frames> {
    static FRAMES: OnceLock<Mutex<Frames>> = OnceLock::new();
    let make = || {
        let region = Arc::new(Region::new(region::Options::default()).expect("there is address space"));
        let options = Options { limit: AREAS << 21, decay: Duration::from_millis(50), ..Options::default() };
        Mutex::new(Frames::new(region, options).expect("there is memory"))
    };
    FRAMES.get_or_init(make).lock().expect("a program that failed ended the process")
}

/// What the program has, and what must be so.
struct Model<'f> {
    frames: &'f Frames,
    used: Vec<bool>,
    owned: Vec<(u32, u32)>,
}

impl Model<'_> {
    fn free(&self) -> usize {
        self.used.iter().filter(|&&used| !used).count()
    }

    fn word(&self, frame: u32) -> &AtomicUsize {
        // SAFETY: the frame is mapped as long as there are frames, and aligned.
        unsafe { AtomicUsize::from_ptr(self.frames.address(frame).as_ptr().cast()) }
    }

    fn take(&mut self, first: u32, order: u32, zeroed: bool) {
        assert_eq!(first as usize % (1 << order), 0, "{first} of order {order} is not aligned");
        for frame in first..first + (1 << order) {
            assert!(!std::mem::replace(&mut self.used[frame as usize], true), "{frame} is had already");
            assert!(!zeroed || self.word(frame).load(Ordering::Relaxed) == 0, "{frame} is not zero");
            self.word(frame).store(frame as usize + 1, Ordering::Relaxed);
        }
        self.owned.push((first, order));
    }

    fn give(&mut self, index: usize) {
        let (first, order) = self.owned.swap_remove(index);
        for frame in first..first + (1 << order) {
            assert_eq!(self.word(frame).load(Ordering::Relaxed), frame as usize + 1, "{frame} was written to");
            self.used[frame as usize] = false;
        }
        // SAFETY: nothing of it is used any more.
        unsafe { self.frames.free_order(first, order) }.expect("it was allocated with this order");
    }

    fn step(&mut self, operation: u8, argument: u8) {
        let argument = argument as usize;
        match operation % 10 {
            0 | 1 => {
                let zeroed = operation % 10 == 1;
                let found = if zeroed { self.frames.alloc_zeroed() } else { self.frames.alloc() };
                assert_eq!(found.is_ok(), self.free() > 0);
                if let Ok(frame) = found {
                    self.take(frame, 0, zeroed);
                }
            }
            2 => {
                let mut array = vec![0; 3 * argument];
                let count = self.frames.alloc_bulk(&mut array);
                assert_eq!(count, array.len().min(self.free()));
                array[..count].iter().for_each(|&frame| self.take(frame, 0, false));
            }
            3 | 4 => {
                let (order, zeroed) = (argument as u32 % (AREA_ORDER + 1), operation % 10 == 4);
                let run = 1usize << order;
                let fits = (0..self.used.len()).step_by(run).any(|at| !self.used[at..at + run].contains(&true));
                let found = if zeroed { self.frames.alloc_order_zeroed(order) } else { self.frames.alloc_order(order) };
                assert_eq!(found.is_ok(), fits, "order {order}");
                if let Ok(frame) = found {
                    self.take(frame, order, zeroed);
                }
            }
            5 if !self.owned.is_empty() => self.give(argument * 7 % self.owned.len()),
            6 => {
                let (mut array, mut kept) = (Vec::new(), Vec::new());
                for &(frame, order) in &self.owned {
                    if order == 0 && array.len() < 3 * argument {
                        self.used[frame as usize] = false;
                        array.push(frame);
                    } else {
                        kept.push((frame, order));
                    }
                }
                self.owned = kept;
                // SAFETY: nothing of these is used any more.
                unsafe { self.frames.free_bulk(&array) }.expect("all were allocated");
            }
            7 => {
                // One that is not the program's, or not so.
                let frame = (argument * 11) as u32;
                if !self.owned.contains(&(frame, 0)) {
                    // SAFETY: it is refused.
                    let problem = unsafe { self.frames.free(frame) }.expect_err("nobody has it so").problem;
                    let is_run = self.owned.iter().any(|&(first, order)| first == frame && order > 0);
                    let range = frame as usize >= self.used.len();
                    let expected = match (range, is_run) {
                        (true, _) => Problem::OutOfRange,
                        (_, true) => Problem::Order,
                        _ => Problem::NotAllocated,
                    };
                    assert_eq!(problem, expected, "{frame}");
                }
            }
            8 => self.frames.drain(),
            _ => {
                if argument.is_multiple_of(8) {
                    self.frames.trim();
                }
            }
        }
    }
}

/// Runs a program.
///
/// # Panics
/// If anything comes of it that must not.
pub fn run(program: &[u8]) {
    let frames = frames();
    let mut model = Model { frames: &frames, used: vec![false; frames.stats().limit], owned: Vec::new() };
    program.chunks_exact(2).take(2000).for_each(|step| model.step(step[0], step[1]));
    let stats = frames.stats();
    let parts = stats.allocated + stats.free + stats.stacked + stats.zeroing + stats.giving_back;
    assert_eq!(stats.open, parts, "{stats:?}");
    while !model.owned.is_empty() {
        model.give(0);
    }
}
