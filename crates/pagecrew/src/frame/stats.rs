//! The counters: how many frames there are of which kind.

use super::allocator::Allocator;
use super::area::FRAMES;

/// How many frames there are of which kind, and what was done with them. While other threads allocate, the figures are of slightly different
/// moments; otherwise `open` is the sum of `allocated`, `free`, `stacked`, `zeroing` and `giving_back`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Frames that there can be.
    pub limit: usize,
    /// Frames of the areas that are open.
    pub open: usize,
    /// Frames that the program has.
    pub allocated: usize,
    /// Frames that are free in the zones.
    pub free: usize,
    /// Of those, the ones that are known to be zero.
    pub free_zeroed: usize,
    /// Frames on the CPUs' stacks.
    pub stacked: usize,
    /// Of those, the ones for programs that want zeroes.
    pub stacked_zeroed: usize,
    /// Frames that helpers are zeroing.
    pub zeroing: usize,
    /// Frames that are on their way back to the kernel.
    pub giving_back: usize,
    /// Frames of areas that may have memory behind them.
    pub backed: usize,
    /// How often a stack was empty and was filled.
    pub refills: u64,
    /// How often a stack was full and was relieved.
    pub flushes: u64,
    /// How often the stacks of CPUs were emptied from outside.
    pub drains: u64,
    /// Frames that an allocation had to zero itself.
    pub zeroed_by_caller: u64,
    /// Frames that were zeroed ahead.
    pub zeroed_ahead: u64,
    /// Frames whose memory went back to the kernel.
    pub given_back: u64,
    /// Attempts to free what was not allocated.
    pub free_errors: u64,
    /// Bytes of book-keeping if everything is in use.
    pub metadata: usize,
}

/// How many frames of a zone there are of which kind. `open` is the sum of `free`, `giving_back`, and those that programs, stacks and
/// helpers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZoneStats {
    /// Frames that there can be.
    pub limit: usize,
    /// Frames of the areas that are open.
    pub open: usize,
    /// Frames that are free in the zone.
    pub free: usize,
    /// Of those, the ones that are known to be zero.
    pub free_zeroed: usize,
    /// Frames that are on their way back to the kernel.
    pub giving_back: usize,
    /// Frames of areas that may have memory behind them.
    pub backed: usize,
    /// Areas all of whose frames are free: 2 MiB in a row each.
    pub free_areas: usize,
}

impl Allocator {
    /// Bytes of book-keeping when everything is in use.
    pub fn metadata(&self) -> usize {
        self.states.size() + self.areas.size() + self.trees.size() + self.stacks.size() + self.zeroed.size()
    }

    pub fn zone_stats(&self, zone: usize) -> ZoneStats {
        let zone = &self.zones[zone];
        let mut stats = ZoneStats { limit: zone.frames().len(), ..ZoneStats::default() };
        for area in zone.open() {
            let counts = self.areas[area].counts();
            stats.open += FRAMES;
            stats.free += counts.free;
            stats.free_zeroed += counts.zeroed;
            stats.backed += if counts.backed { FRAMES } else { 0 };
            stats.giving_back += if counts.held { FRAMES } else { 0 };
            stats.free_areas += (counts.free == FRAMES) as usize;
        }
        stats
    }

    pub fn stats(&self) -> Stats {
        let mut stats = Stats { limit: self.frames() as usize, ..Stats::default() };
        for zone in (0..self.zones.len()).map(|zone| self.zone_stats(zone)) {
            stats.open += zone.open;
            stats.free += zone.free;
            stats.free_zeroed += zone.free_zeroed;
            stats.backed += zone.backed;
            stats.giving_back += zone.giving_back;
        }
        stats.stacked = self.stacks.total() + self.zeroed.total();
        stats.stacked_zeroed = self.zeroed.total();
        stats.zeroing = self.pieces.under_way();
        stats.allocated = stats.open.saturating_sub(stats.free + stats.stacked + stats.zeroing + stats.giving_back);
        let counters = &self.counters;
        stats.refills = counters.refills.get();
        stats.flushes = counters.flushes.get();
        stats.drains = counters.drains.get();
        stats.zeroed_by_caller = counters.zeroed_by_caller.get();
        stats.zeroed_ahead = counters.zeroed_ahead.get();
        stats.given_back = counters.given_back.get();
        stats.free_errors = counters.free_errors.get();
        stats
    }
}
