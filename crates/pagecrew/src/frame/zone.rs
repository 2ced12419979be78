//! A zone: the areas of one NUMA node, and which of them a CPU takes its frames from.
//!
//! Areas are looked for by trees of 32. Each CPU takes from an area of its own as long as there are enough, and not from one that
//! another gives frames back to, so that CPUs share no line of memory.
//!
//! A zone grows: areas behind its frontier exist as address space only, and are opened one at a time when those before it have nothing
//! left.
//!
//! Sources: LLFree (Wrenger and others, 2023) for trees and reservations; the kernel's zones and zone lists.

use super::area::{Area, FRAMES, Kind, WHOLE, WordFrames};
use super::tree::{Skip, TREE, Tree};
use std::sync::atomic::{AtomicU32, Ordering};

/// Areas of 1 GiB.
pub(super) const GIANT_AREAS: usize = 512;

/// No area.
const NOWHERE: u32 = u32::MAX;

/// Where a CPU takes its frames from.
#[repr(align(64))]
struct CpuAreas {
    any: AtomicU32,
    zeroed: AtomicU32,
    /// The area that it gave frames back to last.
    given: AtomicU32,
    /// The tree where runs were found last.
    runs: AtomicU32,
}

/// See the module. Areas are numbered through all zones.
pub(super) struct Zone {
    /// The zone's areas.
    first: usize,
    len: usize,
    /// How many of them are open.
    frontier: AtomicU32,
    places: Box<[CpuAreas]>,
}

/// The tables that all zones share.
#[derive(Clone, Copy)]
pub(super) struct Tables<'t> {
    pub areas: &'t [Area],
    pub trees: &'t [Tree],
}

/// Trees for `areas` areas.
pub(super) fn trees(areas: usize) -> usize {
    areas.div_ceil(TREE)
}

impl Tables<'_> {
    fn tree(&self, area: usize) -> &Tree {
        &self.trees[area / TREE]
    }

    /// Takes up to `most` frames of a kind from `area`; `each` hears of them word by word. Returns how many.
    pub fn take(&self, area: usize, most: u32, kind: Kind, each: impl FnMut(WordFrames)) -> u32 {
        self.tree(area).take(area, &self.areas[area], most, kind, each)
    }

    /// Gives up the claim to `count` frames of `area`, whose bits are clear.
    pub fn release(&self, area: usize, count: u32, zeroed: bool) {
        self.tree(area).release(area, &self.areas[area], count, zeroed);
    }

    /// The memory of an area that was held has gone back.
    pub fn discarded(&self, area: usize) {
        self.areas[area].discarded();
        self.tree(area).opened(area);
    }

    /// In a forked child: brings the tree up to date with an area that was rebuilt.
    pub fn rebuilt(&self, area: usize) {
        self.tree(area).rebuilt(area, &self.areas[area]);
    }
}

impl Zone {
    /// A zone of `len` areas from number `first` on, a multiple of 32, of which `open` are open from the start.
    pub fn new(first: usize, len: usize, open: usize, cpus: usize, tables: Tables) -> Zone {
        debug_assert!(first.is_multiple_of(TREE));
        let place =
            || CpuAreas { any: NOWHERE.into(), zeroed: NOWHERE.into(), given: NOWHERE.into(), runs: AtomicU32::new(0) };
        (first..first + open).for_each(|area| tables.tree(area).opened(area));
        Zone { first, len, frontier: AtomicU32::new(open as u32), places: (0..cpus).map(|_| place()).collect() }
    }

    /// The numbers of the areas that are open.
    pub fn open(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.frontier.load(Ordering::Acquire) as usize
    }

    /// The numbers of all of the zone's frames.
    pub fn frames(&self) -> std::ops::Range<usize> {
        self.first * FRAMES..(self.first + self.len) * FRAMES
    }

    /// Takes up to `most` frames for `cpu`; `each` hears of them with the number of their area. Returns how many.
    pub fn take(
        &self,
        tables: Tables,
        cpu: usize,
        most: u32,
        kind: Kind,
        mut each: impl FnMut(usize, WordFrames),
    ) -> u32 {
        let place = &self.places[cpu];
        let reserved = if kind == Kind::Zeroed { &place.zeroed } else { &place.any };
        let mut left = most;
        loop {
            let area = reserved.load(Ordering::Relaxed);
            if area != NOWHERE {
                let area = area as usize;
                left -= tables.take(area, left, kind, |taken| each(area, taken));
                if left == 0 {
                    return most;
                }
                self.leave(tables, area, kind);
            }
            let found = self
                .own(tables, place, kind)
                .or_else(|| self.find(tables, area, kind, Skip::Busy))
                .or_else(|| (kind == Kind::Any).then(|| self.grow(tables))?)
                .or_else(|| self.find(tables, area, kind, Skip::Reserved));
            let next = found.map_or(NOWHERE, |found| found as u32);
            if reserved.compare_exchange(area, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                if area != NOWHERE {
                    tables.tree(area as usize).unreserve(area as usize);
                }
            } else if let Some(found) = found {
                // A thread that was on this CPU meanwhile, or a signal handler, has found another.
                tables.tree(found).unreserve(found);
            }
            if found.is_none() {
                break;
            }
        }
        // What is left is in areas that others have reserved.
        for area in self.candidates(tables, kind, Skip::Nothing, 0) {
            left -= tables.take(area, left, kind, |taken| each(area, taken));
            if left == 0 {
                break;
            }
            self.leave(tables, area, kind);
        }
        most - left
    }

    fn leave(&self, tables: Tables, area: usize, kind: Kind) {
        let (tree, words) = (tables.tree(area), &tables.areas[area]);
        tree.exhausted(area, words);
        if kind == Kind::Zeroed {
            tree.without_zeroed(area, words);
        }
    }

    /// Open areas that may have frames of a kind, from the tree of the zone with number `from` on.
    fn candidates<'t>(
        &self,
        tables: Tables<'t>,
        kind: Kind,
        skip: Skip,
        from: usize,
    ) -> impl Iterator<Item = usize> + 't {
        let open = self.open();
        let (first, count) = (open.start / TREE, trees(open.len()));
        (0..count).flat_map(move |step| {
            let number = first + (from % count + step) % count;
            let mut areas = tables.trees[number].candidates(kind, skip);
            std::iter::from_fn(move || {
                let bit = (areas != 0).then(|| areas.trailing_zeros())?;
                areas &= areas - 1;
                Some(number * TREE + bit as usize)
            })
        })
    }

    /// Reserves the area that the CPU gives frames back to, if there are some of the kind.
    fn own(&self, tables: Tables, place: &CpuAreas, kind: Kind) -> Option<usize> {
        let area = place.given.load(Ordering::Relaxed);
        let own = (area != NOWHERE && kind == Kind::Any).then_some(area as usize)?;
        (tables.areas[own].free() > 0 && tables.tree(own).reserve(own)).then_some(own)
    }

    /// Reserves an area that may have frames of a kind, from where the last one was on.
    fn find(&self, tables: Tables, last: u32, kind: Kind, skip: Skip) -> Option<usize> {
        let from = if last == NOWHERE { 0 } else { (last as usize - self.first) / TREE };
        self.candidates(tables, kind, skip, from).find(|&area| tables.tree(area).reserve(area))
    }

    /// Takes note that `cpu` gives frames back to `area`.
    pub fn gives(&self, tables: Tables, cpu: usize, area: usize) {
        let given = &self.places[cpu].given;
        if given.load(Ordering::Relaxed) != area as u32 {
            tables.tree(area).set_given(area, true);
            let before = given.swap(area as u32, Ordering::Relaxed);
            if before != NOWHERE {
                let before = before as usize;
                tables.tree(before).set_given(before, false);
            }
        }
    }

    /// Opens an area and reserves it.
    fn grow(&self, tables: Tables) -> Option<usize> {
        let more = |open: u32| ((open as usize) < self.len).then_some(open + 1);
        let open = self.frontier.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).ok()?;
        let area = self.first + open as usize;
        tables.tree(area).reserve(area);
        tables.tree(area).opened(area);
        Some(area)
    }

    /// Takes an aligned run of `1 << order` frames, at most an area. Returns the first one's number and whether all are known to be zero.
    pub fn take_run(&self, tables: Tables, cpu: usize, order: u32) -> Option<(usize, bool)> {
        let hint = &self.places[cpu].runs;
        let from = hint.load(Ordering::Relaxed) as usize;
        let try_at = |area: usize| {
            let (start, zeroed) = tables.tree(area).take_run(area, &tables.areas[area], order)?;
            hint.store(((area - self.first) / TREE) as u32, Ordering::Relaxed);
            Some((area * FRAMES + start as usize, zeroed))
        };
        let grown = || loop {
            let area = self.grow(tables)?;
            let found = try_at(area);
            tables.tree(area).unreserve(area);
            if found.is_some() {
                return found;
            }
        };
        self.candidates(tables, Kind::Any, Skip::Busy, from)
            .find_map(try_at)
            .or_else(grown)
            .or_else(|| self.candidates(tables, Kind::Any, Skip::Nothing, 0).find_map(try_at))
    }

    /// Takes aligned areas of 1 GiB together. Returns the first frame's number and whether all are known to be zero.
    pub fn take_giant(&self, tables: Tables) -> Option<(usize, bool)> {
        let mut start = self.first.next_multiple_of(GIANT_AREAS);
        while start + GIANT_AREAS <= self.first + self.len {
            while self.open().end < start + GIANT_AREAS
                && let Some(area) = self.grow(tables)
            {
                tables.tree(area).unreserve(area);
            }
            let mut all_zeroed = true;
            let take = |&area: &usize| {
                let found = tables.tree(area).take_run(area, &tables.areas[area], WHOLE);
                let zeroed = found.map(|(_, zeroed)| all_zeroed &= zeroed);
                zeroed.is_some()
            };
            let taken = (start..start + GIANT_AREAS).take_while(take).count();
            if taken == GIANT_AREAS {
                return Some((start * FRAMES, all_zeroed));
            }
            (start..start + taken).for_each(|area| tables.release(area, FRAMES as u32, false));
            start += GIANT_AREAS;
        }
        None
    }

    /// Has every CPU look for an area from the beginning on, so that what is used gathers there.
    pub fn forget_places(&self, tables: Tables) {
        for place in &self.places {
            for reserved in [&place.any, &place.zeroed] {
                let area = reserved.swap(NOWHERE, Ordering::Relaxed);
                if area != NOWHERE {
                    tables.tree(area as usize).unreserve(area as usize);
                }
            }
            let area = place.given.swap(NOWHERE, Ordering::Relaxed);
            if area != NOWHERE {
                tables.tree(area as usize).set_given(area as usize, false);
            }
            place.runs.store(0, Ordering::Relaxed);
        }
    }

    /// Open areas that may have frames that are known to be zero.
    pub fn with_zeroed<'t>(&self, tables: Tables<'t>) -> impl Iterator<Item = usize> + 't {
        self.candidates(tables, Kind::Zeroed, Skip::Nothing, 0)
    }

    /// Open areas with free frames; those that no CPU is at, or all of them; from a tree on.
    pub fn with_free<'t>(&self, tables: Tables<'t>, busy_too: bool, from: usize) -> impl Iterator<Item = usize> + 't {
        self.candidates(tables, Kind::Any, if busy_too { Skip::Nothing } else { Skip::Busy }, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::table::Table;

    struct Rig {
        areas: Table<Area>,
        trees: Table<Tree>,
    }

    impl Rig {
        fn new(areas: usize) -> Rig {
            Rig { areas: Table::new(areas).unwrap(), trees: Table::new(trees(areas)).unwrap() }
        }

        fn tables(&self) -> Tables<'_> {
            Tables { areas: &self.areas, trees: &self.trees }
        }
    }

    fn take(zone: &Zone, rig: &Rig, cpu: usize, most: u32, kind: Kind) -> Vec<(usize, u64)> {
        let mut all = Vec::new();
        zone.take(rig.tables(), cpu, most, kind, |area, taken| all.push((area, taken.mask)));
        all
    }

    #[test]
    fn each_cpu_takes_from_an_area_of_its_own() {
        let rig = Rig::new(64);
        let zone = Zone::new(0, 64, 0, 256, rig.tables());
        let areas: Vec<usize> = (0..64).map(|cpu| take(&zone, &rig, cpu, 64, Kind::Any)[0].0).collect();
        assert_eq!(areas, (0..64).collect::<Vec<_>>());
        assert_eq!(zone.open(), 0..64);
        // A 65th CPU has to share; all of them get every frame in the end.
        let all: u32 =
            (64..256).flat_map(|cpu| take(&zone, &rig, cpu, 10_000, Kind::Any)).map(|(_, m)| m.count_ones()).sum();
        assert_eq!(all, 64 * (512 - 64));
        assert!(take(&zone, &rig, 3, 1, Kind::Any).is_empty());
        // The first frame that comes back is found by anybody.
        rig.areas[40].put(WordFrames { word: 3, mask: 4, zeroed: 0 });
        rig.tables().release(40, 1, false);
        assert_eq!(take(&zone, &rig, 255, 9, Kind::Any), [(40, 4)]);
    }

    #[test]
    fn runs_keep_away_from_where_cpus_take_frames() {
        let rig = Rig::new(33);
        let zone = Zone::new(0, 33, 4, 2, rig.tables());
        assert_eq!(take(&zone, &rig, 0, 1, Kind::Any), [(0, 1)]);
        let runs: Vec<_> =
            [9, 3, 8, 9, 9].map(|order| zone.take_run(rig.tables(), 1, order).unwrap().0 / FRAMES).into();
        assert_eq!(runs, [1, 2, 2, 3, 4]);
        // Only when nothing else is left.
        while zone.take_run(rig.tables(), 1, 9).is_some() {}
        let free: u32 = rig.areas.iter().map(Area::free).sum();
        assert_eq!(free, 512 - 8 - 256 + 511);
        assert_eq!(zone.take_run(rig.tables(), 1, 8), Some((256, true)));
        assert_eq!(zone.take_run(rig.tables(), 1, 8), None);
    }

    #[test]
    fn a_gigabyte_is_512_aligned_areas() {
        let rig = Rig::new(1600);
        let zone = Zone::new(32, 1500, 0, 2, rig.tables());
        assert_eq!(take(&zone, &rig, 0, 1, Kind::Any), [(32, 1)]);
        assert_eq!(zone.take_giant(rig.tables()), Some((512 * FRAMES, true)));
        assert_eq!(zone.take_giant(rig.tables()), None);
        (512..1024).for_each(|area| {
            rig.areas[area].put_run(0, WHOLE);
            rig.tables().release(area, FRAMES as u32, false);
        });
        assert_eq!(zone.take_giant(rig.tables()), Some((512 * FRAMES, false)));
    }

    #[test]
    fn zeroed_frames_are_found_while_there_are_any() {
        let rig = Rig::new(40);
        let zone = Zone::new(0, 40, 40, 2, rig.tables());
        let mut taken = 0;
        while let count @ 1.. =
            zone.take(rig.tables(), 0, 100, Kind::Zeroed, |_, taken| assert_eq!(taken.mask, taken.zeroed))
        {
            taken += count;
        }
        assert_eq!(taken, 40 * 512);
        for area in 0..40 {
            (0..8).for_each(|word| assert_eq!(rig.areas[area].put(WordFrames { word, mask: u64::MAX, zeroed: 0 }), 0));
            rig.tables().release(area, 512, false);
        }
        assert_eq!(take(&zone, &rig, 1, 1, Kind::Zeroed), []);
        assert_eq!(take(&zone, &rig, 1, 1, Kind::Any).len(), 1);
    }
}
