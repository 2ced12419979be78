//! An area: 2 MiB of frames, with a bit that says used and a bit that says dirty for each, and a count.
//!
//! **Claim, then take.** Whoever wants frames first raises the count of used frames, then looks for as many clear bits. Whoever gives
//! frames back first clears their bits, then lowers the count. So there are never fewer clear bits than the count promises, and whoever
//! has a claim finds frames, if not at the first look: others may have taken what he saw, and then what they had claimed is left.
//! Nobody waits for anybody, so a signal handler may do all of this while the thread that it interrupted is at it.
//!
//! An area whose bits are all zero is free, known to be zero, and without memory behind it: what a fresh mapping is.
//!
//! Source: LLFree (Wrenger and others, 2023), whose areas have a bit per frame and a counter.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Frames in a word of bits.
pub(super) const WORD: usize = 64;
/// Words of bits; fewer in the model, which looks at every interleaving.
pub(super) const WORDS: usize = if cfg!(loom) { 1 } else { 8 };
/// Frames of an area.
pub(super) const FRAMES: usize = WORD * WORDS;
/// The order of a whole area.
pub(super) const WHOLE: u32 = FRAMES.trailing_zeros();

/// The count of used frames in [`Area::entry`].
const USED: u32 = 0x3ff;
/// There may be memory behind it.
const BACKED: u32 = 1 << 28;
/// Frames were taken since somebody looked.
const TOUCHED: u32 = 1 << 29;
/// It is free and on its way back to the kernel.
const HELD: u32 = 1 << 30;

const ALL: u32 = FRAMES as u32;

/// Which frames are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Any, dirty ones first.
    Any,
    /// Only those that are known to be zero.
    Zeroed,
    /// Only those that are not.
    Dirty,
}

/// See the module.
#[repr(C, align(64))]
pub(super) struct Area {
    used: [AtomicU64; WORDS],
    dirty: [AtomicU64; WORDS],
    entry: AtomicU32,
}

/// Frames in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WordFrames {
    pub word: usize,
    /// Which ones.
    pub mask: u64,
    /// Which of them are known to be zero.
    pub zeroed: u64,
}

/// What an area has, as far as that can be told while others change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub free: usize,
    /// Of the free ones, those known to be zero.
    pub zeroed: usize,
    pub backed: bool,
    /// Whether it is on its way back to the kernel: its frames are neither free nor anybody's.
    pub held: bool,
}

/// The lowest `most` bits of `bits`.
fn lowest(bits: u64, most: u32) -> u64 {
    if bits.count_ones() <= most {
        return bits;
    }
    let mut rest = bits;
    (0..most).for_each(|_| rest &= rest - 1);
    bits & !rest
}

/// The first aligned run of `1 << order` bits that are all set, as a mask.
fn run(bits: u64, order: u32) -> Option<u64> {
    let mut starts = bits;
    let mut aligned = u64::MAX;
    for step in 0..order {
        starts &= starts >> (1 << step);
        aligned &= ALIGNED[step as usize];
    }
    let starts = starts & aligned;
    let len = 1u32 << order;
    (starts != 0).then(|| (u64::MAX >> (64 - len)) << starts.trailing_zeros())
}

/// Positions that are multiples of 2, 4, 8, 16, 32 and 64.
const ALIGNED: [u64; 6] = [
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];

impl Area {
    #[cfg(any(test, loom))]
    pub fn new() -> Area {
        Area {
            used: std::array::from_fn(|_| AtomicU64::new(0)),
            dirty: std::array::from_fn(|_| AtomicU64::new(0)),
            entry: AtomicU32::new(0),
        }
    }

    /// How many frames are free and not claimed.
    pub fn free(&self) -> u32 {
        ALL - (self.entry.load(Ordering::Acquire) & USED)
    }

    /// Claims up to `most` frames, at least `least` or none.
    fn claim(&self, least: u32, most: u32) -> u32 {
        let mut entry = self.entry.load(Ordering::Relaxed);
        loop {
            let count = most.min(ALL - (entry & USED));
            if count < least || count == 0 {
                return 0;
            }
            let claimed = (entry + count) | BACKED | TOUCHED;
            match self.entry.compare_exchange_weak(entry, claimed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return count,
                Err(now) => entry = now,
            }
        }
    }

    /// Gives up the claim to `count` frames whose bits are clear. Returns whether the area was full.
    pub fn release(&self, count: u32) -> bool {
        self.entry.fetch_sub(count, Ordering::AcqRel) & USED == ALL
    }

    /// Takes up to `most` frames of a kind; `each` hears of them word by word. Returns how many, and whether the area was full for a moment
    /// because more were claimed than there are of the kind.
    pub fn take(&self, most: u32, kind: Kind, mut each: impl FnMut(WordFrames)) -> (u32, bool) {
        // No more than there seem to be: what is claimed is nobody else's meanwhile, even if it is of another kind.
        let claimed = match kind {
            Kind::Any => self.claim(1, most),
            _ => self.claim(1, most.min(self.count(kind))),
        };
        let (mut left, mut was_full) = (claimed, false);
        match kind {
            Kind::Any => {
                left -= self.collect(left, Kind::Dirty, &mut each);
                while left > 0 {
                    left -= self.collect(left, Kind::Any, &mut each);
                }
            }
            Kind::Zeroed | Kind::Dirty if left > 0 => {
                left -= self.collect(left, kind, &mut each);
                if left > 0 {
                    was_full = self.release(left);
                }
            }
            _ => {}
        }
        (claimed - left, was_full)
    }

    /// How many free frames of a kind there are at this moment.
    fn count(&self, kind: Kind) -> u32 {
        let of_kind = |word: usize| self.of_kind(word, self.used[word].load(Ordering::Relaxed), kind).count_ones();
        (0..WORDS).map(of_kind).sum()
    }

    /// The frames of a kind in a word whose `used` bits are these.
    fn of_kind(&self, word: usize, used: u64, kind: Kind) -> u64 {
        match kind {
            Kind::Any => !used,
            Kind::Zeroed => !used & !self.dirty[word].load(Ordering::Relaxed),
            Kind::Dirty => !used & self.dirty[word].load(Ordering::Relaxed),
        }
    }

    /// Looks once for up to `most` frames of a kind that were claimed. Returns how many were taken.
    fn collect(&self, most: u32, kind: Kind, each: &mut impl FnMut(WordFrames)) -> u32 {
        let mut left = most;
        for word in 0..WORDS {
            while left > 0 {
                let used = self.used[word].load(Ordering::Relaxed);
                let mask = lowest(self.of_kind(word, used, kind), left);
                if mask == 0 {
                    break;
                }
                let taken = self.used[word].compare_exchange(used, used | mask, Ordering::Acquire, Ordering::Relaxed);
                if taken.is_ok() {
                    // Taken frames are this caller's, so their bits stand still. A frame that became dirty since it was looked at
                    // is not of the kind any more.
                    let dirty = self.dirty[word].load(Ordering::Relaxed);
                    let odd = if kind == Kind::Zeroed { mask & dirty } else { 0 };
                    if odd != 0 {
                        self.used[word].fetch_and(!odd, Ordering::Release);
                    }
                    let mask = mask & !odd;
                    if mask != 0 {
                        left -= mask.count_ones();
                        each(WordFrames { word, mask, zeroed: mask & !dirty });
                    }
                }
            }
        }
        most - left
    }

    /// Clears the bits of frames that are `taken.mask` of a word and no more in use, those that are not `taken.zeroed` dirty. The claim
    /// to them is given up by [`Area::release`], after this. Returns those that were free already: nobody had them.
    pub fn put(&self, taken: WordFrames) -> u64 {
        let dirty = taken.mask & !taken.zeroed;
        if dirty & !self.dirty[taken.word].load(Ordering::Relaxed) != 0 {
            self.dirty[taken.word].fetch_or(dirty, Ordering::Relaxed);
        }
        let before = self.used[taken.word].fetch_and(!taken.mask, Ordering::Release);
        taken.mask & !before
    }

    /// Takes note that frames of a word, which the caller has, are zero now.
    pub fn clean(&self, word: usize, mask: u64) {
        self.dirty[word].fetch_and(!mask, Ordering::Relaxed);
    }

    /// Takes an aligned run of `1 << order` frames. Returns the first one and whether all are known to be zero.
    ///
    /// # Errors
    /// Where there is none; whether the area was full for a moment because the run was claimed.
    pub fn take_run(&self, order: u32) -> Result<(u32, bool), bool> {
        if order == WHOLE {
            return self.take_whole().map(|zeroed| (0, zeroed)).ok_or(false);
        }
        let count = 1 << order;
        if self.claim(count, count) == 0 {
            return Err(false);
        }
        let found = if order < WORD.trailing_zeros() { self.run_in_word(order) } else { self.run_of_words(order) };
        found.ok_or_else(|| self.release(count))
    }

    fn run_in_word(&self, order: u32) -> Option<(u32, bool)> {
        (0..WORDS).find_map(|word| {
            loop {
                let used = self.used[word].load(Ordering::Relaxed);
                let mask = run(!used, order)?;
                if self.used[word].compare_exchange(used, used | mask, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    let zeroed = self.dirty[word].load(Ordering::Relaxed) & mask == 0;
                    return Some(((word * WORD) as u32 + mask.trailing_zeros(), zeroed));
                }
            }
        })
    }

    fn run_of_words(&self, order: u32) -> Option<(u32, bool)> {
        let words = (1usize << order) / WORD;
        (0..WORDS).step_by(words).find_map(|first| {
            let run = &self.used[first..first + words];
            let full =
                |word: &AtomicU64| word.compare_exchange(0, u64::MAX, Ordering::Acquire, Ordering::Relaxed).is_ok();
            let taken = run.iter().take_while(|word| full(word)).count();
            if taken < words {
                run[..taken].iter().for_each(|word| word.store(0, Ordering::Release));
                return None;
            }
            let zeroed = self.dirty[first..first + words].iter().all(|word| word.load(Ordering::Relaxed) == 0);
            Some(((first * WORD) as u32, zeroed))
        })
    }

    /// Clears the bits of an aligned run that begins at frame `start`; the claim is given up by [`Area::release`], after this.
    pub fn put_run(&self, start: u32, order: u32) {
        let (word, len) = (start as usize / WORD, 1u32 << order);
        if order == WHOLE {
            // The bits of a whole area were never set.
            self.dirty.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        } else if order < WORD.trailing_zeros() {
            let mask = (u64::MAX >> (64 - len)) << (start % WORD as u32);
            self.put(WordFrames { word, mask, zeroed: 0 });
        } else {
            for word in word..word + len as usize / WORD {
                self.put(WordFrames { word, mask: u64::MAX, zeroed: 0 });
            }
        }
    }

    /// Takes the whole area, if all of it is free. Returns whether it is known to be zero. No bits are set: nobody has a claim.
    fn take_whole(&self) -> Option<bool> {
        (self.claim(ALL, ALL) != 0).then(|| self.dirty.iter().all(|word| word.load(Ordering::Relaxed) == 0))
    }

    /// Forgets that frames were taken lately. Returns whether some were.
    pub fn look(&self) -> bool {
        let touched = self.entry.load(Ordering::Relaxed) & TOUCHED != 0;
        if touched {
            self.entry.fetch_and(!TOUCHED, Ordering::Relaxed);
        }
        touched
    }

    /// Takes an area to give its memory back: one that is free, has memory behind it, and of which nothing was taken since
    /// [`Area::look`]; with `touched`, that doesn't matter.
    pub fn hold(&self, touched: bool) -> bool {
        let entry = self.entry.load(Ordering::Relaxed);
        (entry == BACKED || (touched && entry == BACKED | TOUCHED))
            && self.entry.compare_exchange(entry, BACKED | HELD | ALL, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Whether there may be memory behind it.
    pub fn is_backed(&self) -> bool {
        self.entry.load(Ordering::Relaxed) & BACKED != 0
    }

    /// The memory of an area that is held has gone back: its frames are free and zero.
    pub fn discarded(&self) {
        self.dirty.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.entry.store(0, Ordering::Release);
    }

    /// Makes the area what it is when nobody has any of its frames but those in `used`, or somebody has it whole (`None`): for a forked
    /// child, where the threads are gone that had claims. Frames that somebody had and nobody has are dirty.
    pub fn rebuild(&self, used: Option<[u64; WORDS]>) {
        let entry = self.entry.load(Ordering::Relaxed);
        let Some(used) = used else {
            self.used.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.entry.store(ALL | BACKED | TOUCHED, Ordering::Release);
            return;
        };
        let whole = entry & USED == ALL;
        for (word, &used) in used.iter().enumerate() {
            let before = if whole { u64::MAX } else { self.used[word].load(Ordering::Relaxed) };
            self.dirty[word].fetch_or(before & !used, Ordering::Relaxed);
            self.used[word].store(used, Ordering::Relaxed);
        }
        let count: u32 = used.iter().map(|used| used.count_ones()).sum();
        self.entry.store(count | (entry & BACKED) | TOUCHED, Ordering::Release);
    }

    /// What the area has.
    pub fn counts(&self) -> Counts {
        let entry = self.entry.load(Ordering::Acquire);
        let free = (ALL - (entry & USED)) as usize;
        let clean = |(used, dirty): (&AtomicU64, &AtomicU64)| {
            (!used.load(Ordering::Relaxed) & !dirty.load(Ordering::Relaxed)).count_ones() as usize
        };
        // The bits of a whole area that is taken are not set.
        let zeroed = if free == 0 { 0 } else { self.used.iter().zip(&self.dirty).map(clean).sum() };
        Counts { free, zeroed: zeroed.min(free), backed: entry & BACKED != 0, held: entry & HELD != 0 }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taken(area: &Area, most: u32, kind: Kind) -> Vec<(u32, bool)> {
        let mut frames = Vec::new();
        area.take(most, kind, |taken| {
            for bit in (0..64).filter(|bit| taken.mask >> bit & 1 != 0) {
                frames.push(((taken.word * WORD) as u32 + bit, taken.zeroed >> bit & 1 != 0));
            }
        });
        frames
    }

    fn give(area: &Area, frame: u32, zeroed: bool) -> bool {
        let mask = 1 << (frame % 64);
        assert_eq!(
            area.put(WordFrames { word: frame as usize / WORD, mask, zeroed: if zeroed { mask } else { 0 } }),
            0
        );
        area.release(1)
    }

    #[test]
    fn runs_are_found_where_they_are_aligned() {
        assert_eq!(run(0b1111_0110, 1), Some(0b0011_0000));
        assert_eq!(run(0b1111_0110, 2), Some(0b1111_0000));
        assert_eq!(run(0b0111_1000, 2), None);
        assert_eq!(run(u64::MAX, 5), Some(u64::MAX >> 32));
        assert_eq!(run(u64::MAX << 1, 5), Some(u64::MAX << 32));
        assert_eq!(lowest(0b1011_0100, 2), 0b0001_0100);
        assert_eq!((lowest(5, 64), lowest(5, 0)), (5, 0));
    }

    #[test]
    fn dirty_frames_are_taken_before_those_that_are_zero() {
        let area = Area::new();
        assert_eq!(taken(&area, 3, Kind::Any), [(0, true), (1, true), (2, true)]);
        assert!(!give(&area, 1, false) && !give(&area, 2, true));
        assert_eq!(taken(&area, 1, Kind::Any), [(1, false)]);
        give(&area, 1, false);
        assert_eq!(taken(&area, 2, Kind::Zeroed), [(2, true), (3, true)]);
        assert_eq!(taken(&area, 9, Kind::Dirty), [(1, false)]);
        assert_eq!(area.counts(), Counts { free: 508, zeroed: 508, backed: true, held: false });
    }

    #[test]
    fn an_idle_area_is_held_and_comes_back_zero() {
        let area = Area::new();
        assert!(!area.hold(true));
        let frames = taken(&area, 512, Kind::Any);
        assert_eq!((frames.len(), area.free()), (512, 0));
        let full: Vec<bool> = frames.iter().map(|&(frame, _)| give(&area, frame, false)).collect();
        assert!(full[0] && !full[1..].contains(&true));
        assert!(!area.hold(false) && area.look() && !area.look());
        assert!(area.hold(false) && taken(&area, 1, Kind::Any).is_empty());
        assert!(area.counts().held);
        area.discarded();
        assert_eq!(area.counts(), Counts { free: 512, zeroed: 512, backed: false, held: false });
    }

    #[test]
    fn what_nobody_had_is_not_taken_back() {
        let area = Area::new();
        assert_eq!(taken(&area, 2, Kind::Any).len(), 2);
        assert_eq!(area.put(WordFrames { word: 0, mask: 0b111, zeroed: 0 }), 0b100);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Take(u32, Kind),
        Run(u32),
        Give(usize, bool),
        Clean(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let kind = prop_oneof![Just(Kind::Any), Just(Kind::Zeroed), Just(Kind::Dirty)];
        prop_oneof![
            (1u32..100, kind).prop_map(|(most, kind)| Step::Take(most, kind)),
            (0..=WHOLE).prop_map(Step::Run),
            (any::<usize>(), any::<bool>()).prop_map(|(index, zeroed)| Step::Give(index, zeroed)),
            any::<usize>().prop_map(Step::Clean),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 100 } else { 1000 }))]
        #[test]
        fn behaves_as_a_set_of_frames(steps in prop::collection::vec(step(), 1..200)) {
            let area = Area::new();
            let mut dirty = vec![false; FRAMES];
            let mut used = vec![false; FRAMES];
            // First frame, order, whether it is a run; whether its frames are still zero.
            let mut owned: Vec<(u32, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Take(most, kind) => {
                        let of_kind = |&frame: &usize| !used[frame] && match kind {
                            Kind::Any => true,
                            Kind::Zeroed => !dirty[frame],
                            Kind::Dirty => dirty[frame],
                        };
                        let there = (0..FRAMES).filter(of_kind).count();
                        let frames = taken(&area, most, kind);
                        prop_assert_eq!(frames.len(), there.min(most as usize));
                        for (frame, zeroed) in frames {
                            prop_assert!(!used[frame as usize] && zeroed != dirty[frame as usize]);
                            used[frame as usize] = true;
                            owned.push((frame, 0));
                        }
                    }
                    Step::Run(order) => {
                        let len = 1usize << order;
                        let fits = (0..FRAMES).step_by(len).any(|start| !used[start..start + len].contains(&true));
                        let found = area.take_run(order);
                        prop_assert_eq!(found.is_ok(), fits);
                        if let Ok((start, zeroed)) = found {
                            let range = start as usize..start as usize + len;
                            prop_assert!((start as usize).is_multiple_of(len) && !used[range.clone()].contains(&true));
                            prop_assert_eq!(zeroed, !dirty[range.clone()].contains(&true));
                            used[range].fill(true);
                            owned.push((start, order));
                        }
                    }
                    Step::Give(index, zeroed) if !owned.is_empty() => {
                        let (start, order) = owned.swap_remove(index % owned.len());
                        let range = start as usize..start as usize + (1 << order);
                        used[range.clone()].fill(false);
                        if order == 0 {
                            let zeroed = zeroed && !dirty[start as usize];
                            dirty[start as usize] |= !zeroed;
                            give(&area, start, zeroed);
                        } else {
                            dirty[range].fill(true);
                            area.put_run(start, order);
                            area.release(1 << order);
                        }
                    }
                    Step::Clean(index) if !owned.is_empty() => {
                        let (start, order) = owned[index % owned.len()];
                        if order == 0 {
                            dirty[start as usize] = false;
                            area.clean(start as usize / WORD, 1 << (start % 64));
                        }
                    }
                    _ => {}
                }
                let free = used.iter().filter(|&&used| !used).count();
                let zeroed = used.iter().zip(&dirty).filter(|&(&used, &dirty)| !used && !dirty).count();
                let counts = area.counts();
                prop_assert_eq!((counts.free, counts.zeroed), (free, zeroed));
            }
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    fn take(area: &Area, most: u32, kind: Kind) -> u64 {
        let mut all = 0;
        area.take(most, kind, |taken| {
            assert_eq!(all & taken.mask, 0);
            all |= taken.mask;
        });
        all
    }

    fn give(area: &Area, mask: u64) {
        if mask != 0 {
            assert_eq!(area.put(WordFrames { word: 0, mask, zeroed: 0 }), 0);
            area.release(mask.count_ones());
        }
    }

    /// All but `free` frames are used.
    fn scarce(free: u32) -> Arc<Area> {
        let area = Arc::new(Area::new());
        assert_eq!(take(&area, ALL - free, Kind::Any).count_ones(), ALL - free);
        area
    }

    #[test]
    fn no_frame_is_had_twice_or_lost() {
        loom::model(|| {
            let area = scarce(2);
            let other = {
                let area = area.clone();
                loom::thread::spawn(move || {
                    let mine = take(&area, 1, Kind::Any);
                    assert_eq!(mine.count_ones(), 1);
                    give(&area, mine);
                })
            };
            let mine = take(&area, 1, Kind::Any);
            assert_eq!(mine.count_ones(), 1);
            give(&area, mine);
            other.join().unwrap();
            assert_eq!(area.counts().free, 2);
        });
    }

    #[test]
    fn what_two_take_is_different() {
        loom::model(|| {
            let area = scarce(3);
            let other = {
                let area = area.clone();
                loom::thread::spawn(move || take(&area, 2, Kind::Any))
            };
            let mine = take(&area, 2, Kind::Any);
            let theirs = other.join().unwrap();
            assert_eq!((mine & theirs, (mine | theirs).count_ones()), (0, 3));
        });
    }

    /// One thread wants a whole area while another still gives a frame back.
    #[test]
    fn a_whole_area_is_had_by_one_alone() {
        loom::model(|| {
            let area = Arc::new(Area::new());
            let mine = take(&area, 1, Kind::Any);
            let other = {
                let area = area.clone();
                loom::thread::spawn(move || area.take_run(WHOLE).is_ok())
            };
            give(&area, mine);
            let again = take(&area, 1, Kind::Any);
            let whole = other.join().unwrap();
            assert!(!(whole && again != 0));
            give(&area, again);
            assert_eq!(area.free(), if whole { 0 } else { ALL });
        });
    }
}
