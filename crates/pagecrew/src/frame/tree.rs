//! A tree: 32 areas, and which of them to look at.
//!
//! All of this is advice but for one rule: **an area with free frames is available.** Whoever takes the last frame of an area strikes it
//! out and looks at it again; whoever gives the first one back to a full area writes it in after that. So of the two that come last, one
//! sees what the other did.

use super::area::{Area, Kind, WordFrames};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// Areas of a tree.
pub(super) const TREE: usize = 32;

/// What a search passes over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Skip {
    /// Areas that a CPU has reserved or gives frames back to: whoever took from one would share its lines with that CPU.
    Busy,
    /// Areas that a CPU has reserved.
    Reserved,
    Nothing,
}

/// See the module. Each word has a bit for each area.
#[repr(C)]
pub(super) struct Tree {
    /// Areas that may have free frames; each that has some is here.
    available: AtomicU32,
    /// Areas that may have free frames that are known to be zero.
    zeroed: AtomicU32,
    /// Areas that a CPU takes frames from.
    reserved: AtomicU32,
    /// Areas that a CPU gives frames back to at this time.
    given: AtomicU32,
}

fn bit(area: usize) -> u32 {
    1 << (area % TREE)
}

impl Tree {
    #[cfg(any(test, loom))]
    fn new() -> Tree {
        let word = || AtomicU32::new(0);
        Tree { available: word(), zeroed: word(), reserved: word(), given: word() }
    }

    /// Areas that may have frames of a kind, as bits.
    pub fn candidates(&self, kind: Kind, skip: Skip) -> u32 {
        let mut areas = self.available.load(Ordering::Acquire);
        if kind == Kind::Zeroed {
            areas &= self.zeroed.load(Ordering::Acquire);
        }
        if skip != Skip::Nothing {
            areas &= !self.reserved.load(Ordering::Relaxed);
        }
        if skip == Skip::Busy {
            areas &= !self.given.load(Ordering::Relaxed);
        }
        areas
    }

    /// Takes up to `most` frames of a kind from area number `number`; `each` hears of them word by word. Returns how many.
    pub fn take(&self, number: usize, area: &Area, most: u32, kind: Kind, each: impl FnMut(WordFrames)) -> u32 {
        let (count, was_full) = area.take(most, kind, each);
        if was_full {
            self.write_in(number);
        }
        count
    }

    /// Takes an aligned run of `1 << order` frames. Returns the first one and whether all are known to be zero.
    pub fn take_run(&self, number: usize, area: &Area, order: u32) -> Option<(u32, bool)> {
        match area.take_run(order) {
            Ok(found) => {
                self.exhausted(number, area);
                Some(found)
            }
            Err(was_full) => {
                if was_full {
                    self.write_in(number);
                }
                None
            }
        }
    }

    /// Gives up the claim to `count` frames of an area, whose bits are clear.
    pub fn release(&self, number: usize, area: &Area, count: u32, zeroed: bool) {
        if area.release(count) {
            self.write_in(number);
        }
        if zeroed && self.zeroed.load(Ordering::Relaxed) & bit(number) == 0 {
            self.zeroed.fetch_or(bit(number), Ordering::AcqRel);
        }
    }

    fn write_in(&self, number: usize) {
        self.available.fetch_or(bit(number), Ordering::AcqRel);
    }

    /// Takes note that an area may have nothing left.
    pub fn exhausted(&self, number: usize, area: &Area) {
        if area.free() == 0 {
            self.available.fetch_and(!bit(number), Ordering::AcqRel);
            if area.free() > 0 {
                self.write_in(number);
            }
        }
    }

    /// Takes note that an area may have no frames left that are known to be zero.
    pub fn without_zeroed(&self, number: usize, area: &Area) {
        self.zeroed.fetch_and(!bit(number), Ordering::AcqRel);
        if area.counts().zeroed > 0 {
            self.zeroed.fetch_or(bit(number), Ordering::AcqRel);
        }
    }

    /// An area's frames are all free and zero from now on.
    pub fn opened(&self, number: usize) {
        self.zeroed.fetch_or(bit(number), Ordering::AcqRel);
        self.write_in(number);
    }

    /// Reserves an area, if nobody has.
    pub fn reserve(&self, number: usize) -> bool {
        self.reserved.fetch_or(bit(number), Ordering::Relaxed) & bit(number) == 0
    }

    pub fn unreserve(&self, number: usize) {
        self.reserved.fetch_and(!bit(number), Ordering::Relaxed);
    }

    /// Takes note that a CPU gives frames back to an area, or no longer does.
    pub fn set_given(&self, number: usize, given: bool) {
        if given {
            self.given.fetch_or(bit(number), Ordering::Relaxed);
        } else {
            self.given.fetch_and(!bit(number), Ordering::Relaxed);
        }
    }

    /// In a forked child: brings the words up to date with an area that was rebuilt, and that no CPU is at.
    pub fn rebuilt(&self, number: usize, area: &Area) {
        let counts = area.counts();
        let set = |word: &AtomicU32, on: bool| match on {
            true => word.fetch_or(bit(number), Ordering::Relaxed),
            false => word.fetch_and(!bit(number), Ordering::Relaxed),
        };
        set(&self.available, counts.free > 0);
        set(&self.zeroed, counts.zeroed > 0);
        set(&self.reserved, false);
        set(&self.given, false);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_search_passes_over_what_others_are_at() {
        let tree = Tree::new();
        (3..9).for_each(|area| tree.opened(area));
        assert!(tree.reserve(4) && !tree.reserve(4));
        tree.set_given(6, true);
        let areas = |skip| tree.candidates(Kind::Any, skip);
        assert_eq!(
            [areas(Skip::Nothing), areas(Skip::Reserved), areas(Skip::Busy)],
            [0b1_1111_1000, 0b1_1110_1000, 0b1_1010_1000]
        );
        tree.unreserve(4);
        tree.set_given(6, false);
        assert_eq!(areas(Skip::Busy), areas(Skip::Nothing));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    struct Grove {
        tree: Tree,
        area: Area,
    }

    impl Grove {
        /// An area of which all but `free` frames are used.
        fn scarce(free: u32) -> Arc<Grove> {
            let grove = Grove { tree: Tree::new(), area: Area::new() };
            grove.tree.opened(0);
            let count = super::super::area::FRAMES as u32 - free;
            assert_eq!(grove.tree.take(0, &grove.area, count, Kind::Any, |_| {}), count);
            Arc::new(grove)
        }

        /// Takes up to `most` frames as a CPU does, and strikes the area out where it has nothing left.
        fn take(&self, most: u32, kind: Kind) -> u64 {
            let mut mask = 0;
            self.tree.take(0, &self.area, most, kind, |taken| mask |= taken.mask);
            self.tree.exhausted(0, &self.area);
            mask
        }

        fn give(&self, mask: u64) {
            if mask != 0 {
                self.area.put(WordFrames { word: 0, mask, zeroed: 0 });
                self.tree.release(0, &self.area, mask.count_ones(), false);
            }
        }

        /// Once nobody is at it, an area with free frames is available.
        fn is_sound(&self) -> bool {
            self.area.free() == 0 || self.tree.candidates(Kind::Any, Skip::Nothing) & 1 != 0
        }
    }

    #[test]
    fn what_is_given_back_while_the_last_is_taken_is_found() {
        loom::model(|| {
            let grove = Grove::scarce(2);
            let mine = grove.take(1, Kind::Any);
            let other = {
                let grove = grove.clone();
                loom::thread::spawn(move || grove.take(1, Kind::Any))
            };
            grove.give(mine);
            other.join().unwrap();
            assert!(grove.is_sound());
        });
    }

    /// One that claims a dirty frame, finds it gone and another one zero, gives its claim up while a third finds the area full.
    #[test]
    fn a_claim_that_is_given_up_leaves_the_area_available() {
        loom::model(|| {
            let grove = Grove::scarce(2);
            let (dirty, zero) = (grove.take(1, Kind::Any), grove.take(1, Kind::Any));
            grove.give(dirty);
            let other = {
                let grove = grove.clone();
                loom::thread::spawn(move || grove.tree.take(0, &grove.area, 1, Kind::Dirty, |_| {}))
            };
            let mine = grove.take(1, Kind::Any);
            grove.area.put(WordFrames { word: 0, mask: zero, zeroed: zero });
            grove.tree.release(0, &grove.area, 1, true);
            let again = grove.take(1, Kind::Any);
            let theirs = other.join().unwrap();
            assert_eq!(mine.count_ones() + again.count_ones() + theirs + grove.area.free(), 2);
            assert!(grove.is_sound());
        });
    }
}
