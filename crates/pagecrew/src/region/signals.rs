//! Reading the signals that retention depends on. Each is read no more often than it can matter.

use super::policy::Signals;
use crate::control::arbiter;
use crate::stats;
use crate::sys::{cgroup, clock, procfs};

/// The slow signals as last read, and when.
#[derive(Debug)]
pub struct SignalReader {
    total: usize,
    available: usize,
    group: Option<cgroup::Memory>,
    stall_us: Option<u64>,
    stalled: bool,
    read_ns: u64,
}

/// The machine's signals are read again after this long.
const SLOW_NS: u64 = 100_000_000;
/// Near a limit, after this long: at 10 GB/s, a program uses up 50 MB meanwhile.
const NEAR_NS: u64 = 5_000_000;
/// More than this part of the machine's memory is more than any rule here asks for.
const PLENTY_SHARE: u64 = 4;
/// Waiting for memory for more than this share of the time counts as a stall, in percent.
const STALL_PERCENT: u64 = 10;

impl SignalReader {
    /// Nothing read yet. A machine whose memory can't be read counts as without bounds; the program's own peak still holds.
    pub fn new() -> SignalReader {
        SignalReader {
            total: usize::MAX / 4,
            available: usize::MAX / 4,
            group: None,
            stall_us: None,
            stalled: false,
            read_ns: 0,
        }
    }

    /// The signals at time `now`, with `retained` bytes retained. `None` if the process's own size can't be read.
    pub fn read(&mut self, retained: usize, now: u64) -> Option<Signals> {
        let age = now.saturating_sub(self.read_ns);
        if self.read_ns == 0 || age >= if self.near_limit() { NEAR_NS } else { SLOW_NS } {
            self.read_machine(now);
        }
        let (resident, highest) = procfs::resident_and_peak().ok()?;
        let Self { total, available, group, stalled, .. } = *self;
        Some(Signals { resident, highest, retained, total, available, group, stalled })
    }

    /// What was read is not relied on any more: the program is about to grow.
    pub fn read_anew(&mut self) {
        self.read_ns = 0;
        self.stall_us = None;
    }

    /// Whether so little is left below a limit that a tenth of a second may use it up.
    pub fn near_limit(&self) -> bool {
        self.group.is_some_and(|group| group.limit.saturating_sub(group.used) < group.limit / 4)
            || self.available < self.total / 8
    }

    fn read_machine(&mut self, now: u64) {
        if let Ok(memory) = procfs::memory_info() {
            // Where there is plenty, it is no matter what is kept free ahead.
            let plenty = memory.available > memory.total / PLENTY_SHARE;
            let ahead = if plenty { None } else { stats::read_ahead() };
            let available = arbiter::available(&memory, ahead, clock::now_ns());
            (self.total, self.available) = (memory.total as usize, available as usize);
        }
        self.group = cgroup::memory();
        // Of the program's own group where that is known: what others wait for does not hurt it, nor is it always its fault.
        let stall_us = cgroup::memory_stall_us().or_else(|| procfs::memory_stall_us().ok());
        if let (Some(before), Some(after)) = (self.stall_us, stall_us) {
            let elapsed_us = (now - self.read_ns) / 1000;
            self.stalled = (after - before.min(after)) * 100 > elapsed_us * STALL_PERCENT;
        }
        (self.stall_us, self.read_ns) = (stall_us, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_read() {
        let mut reader = SignalReader::new();
        let signals = reader.read(0, clock::now_ns()).unwrap();
        assert!(signals.resident > 0 && signals.resident < signals.total && signals.available <= signals.total);
        assert!(!signals.stalled);
    }
}
