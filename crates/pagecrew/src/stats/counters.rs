//! What is counted. Every counter only grows, so that two readings can be subtracted.

use super::metric::{Kind, Metric, Part, Unit, figures};
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($field:ident $(key $key:literal)?, $unit:ident, $help:literal;)*) => {
        /// The counters of a process. Times are in nanoseconds.
        #[derive(Debug, Default)]
        #[repr(C)]
        pub struct Counters {
            $(#[doc = $help] pub $field: Counter,)*
        }

        impl Counters {
            /// What the counters are, in the order of [`Counters::values`].
            pub const METRICS: &'static [Metric] = &[$(Metric {
                part: Part::Run,
                kind: Kind::Counter,
                unit: Unit::$unit,
                name: None,
                labels: &[],
                json: figures!(@place "counters.", $field $($key)?),
                help: $help,
            },)*];

            /// The names of the fields, in the same order.
            pub const FIELDS: &'static [&'static str] = &[$(stringify!($field),)*];

            /// Number of counters.
            pub const COUNT: usize = Self::METRICS.len();

            /// Every counter's value now.
            pub fn values(&self) -> [u64; Self::COUNT] {
                [$(self.$field.get(),)*]
            }
        }
    };
}

counters! {
    allocations, Count, "Spans handed out.";
    frees, Count, "Spans taken back.";
    reallocations, Count, "Spans grown, shrunk or moved.";
    fallbacks, Count, "Requests that the region could not serve and passed on.";
    allocated_bytes, Bytes, "Bytes of the spans handed out.";
    reused_bytes, Bytes, "Of those, bytes that were retained: backed by pages already, without a page fault.";
    zeroing_skipped_bytes, Bytes, "Bytes asked for as zeroes that were retained and known to be zero.";
    zeroed_by_caller_bytes, Bytes, "Bytes that an allocating thread zeroed.";
    zeroed_by_helpers_bytes, Bytes, "Bytes that helpers zeroed while an allocating thread was zeroing too.";
    zeroed_in_background_bytes, Bytes, "Bytes zeroed ahead of time, with nobody waiting.";
    discarded_by_caller_bytes, Bytes, "Bytes that a thread of the program gave back to the kernel.";
    discarded_in_background_bytes, Bytes, "Bytes that helpers and the watcher gave back to the kernel.";
    grown_in_place_bytes, Bytes, "Bytes by which spans grew where they were.";
    moved_bytes, Bytes, "Bytes whose pages were moved instead of copied.";
    transferred_bytes, Bytes, "Free huge pages that were moved to where a span needed them, instead of zeroed anew there.";
    copied_bytes, Bytes, "Bytes that had to be copied by a reallocation.";
    background_discard_ns key "background_discard_seconds", Seconds, "Time that helpers and the watcher spent giving memory back with nobody waiting.";
    background_zero_ns key "background_zero_seconds", Seconds, "Time that helpers spent zeroing with nobody waiting.";
    caller_wait_ns key "caller_wait_seconds", Seconds, "Time that threads of the program spent zeroing and giving memory back.";
    backlog_assists, Count, "Frees in which the caller helped because the backlog had reached its bound.";
    stragglers_bypassed, Count, "Chunks taken back from a helper that was not running, instead of waiting for it.";
    boosts, Count, "Helpers moved to the ordinary scheduling class until their chunk was done.";
    helper_starts, Count, "Helper threads started.";
    turned_away, Count, "Times that a helper found every CPU wanted by others and kept away.";
    pressure_trims, Count, "Times that memory pressure or a limit made retained memory go back at once.";
    decayed_bytes, Bytes, "Retained bytes given back because nothing needed them for the decay time.";
    elsewhere_bytes, Bytes, "Of what was backed when the process ended, bytes on another NUMA node than the one they were asked for on. Counted under `run --stats`, on machines with several nodes.";
    mapped_eligible_bytes, Bytes, "Bytes that the program mapped itself and that were made eligible for huge pages.";
    trimmed_huge_pages, Count, "Under-used huge pages of spans in use and of eligible mappings that were split.";
    trimmed_bytes, Bytes, "The zero part of those, which went back to the kernel.";
    cached_allocations, Count, "Of the spans handed out, those that waited on the CPU where they were asked for: without a lock or a system call.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_in_the_order_of_their_metrics() {
        let counters = Counters::default();
        counters.frees.add(3);
        counters.decayed_bytes.add(5);
        let value = |key: &str| {
            let index = Counters::METRICS.iter().position(|metric| metric.key() == key).unwrap();
            counters.values()[index]
        };
        assert_eq!((value("frees"), value("decayed_bytes"), value("allocations")), (3, 5, 0));
    }
}
