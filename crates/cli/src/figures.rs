//! How counters and times are shown, to people and as JSON.

use pagecrew::stats::{Counters, Snapshot, Unit, ZoneBytes};
use pagecrew::units::Bytes;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// A time with three digits or so, whatever its size.
pub fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        long if long >= 100.0 => format!("{long:.0} s"),
        long if long >= 1.0 => format!("{long:.2} s"),
        short if short >= 1e-3 => format!("{:.1} ms", short * 1e3),
        short => format!("{:.0} us", short * 1e6),
    }
}

/// The counters of `snapshot` by name. Times end in `_ns` and sizes in `_bytes`.
pub fn counters(snapshot: &Snapshot) -> Map<String, Value> {
    Counters::DESCRIPTIONS
        .iter()
        .zip(snapshot.counters)
        .map(|(about, value)| (about.name.into(), value.into()))
        .collect()
}

/// The states of each zone of `snapshot`, in bytes.
pub fn zones(snapshot: &Snapshot) -> Vec<Value> {
    let zone = |zone: &ZoneBytes| {
        json!({
            "reserved": zone.reserved,
            "in_use": zone.in_use,
            "retained_dirty": zone.retained_dirty,
            "retained_zeroed": zone.retained_zeroed,
        })
    };
    snapshot.zones.iter().map(zone).collect()
}

/// A counter's value for people.
pub fn value(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Count => value.to_string(),
        Unit::Bytes => Bytes(value).to_string(),
        Unit::Nanoseconds => seconds(Duration::from_nanos(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_every_size() {
        let of = |seconds_: f64| seconds(Duration::from_secs_f64(seconds_));
        assert_eq!(
            [of(0.0), of(0.0000421), of(0.25), of(2.5), of(1234.5)],
            ["0 us", "42 us", "250.0 ms", "2.50 s", "1234 s"]
        );
    }

    #[test]
    fn values_in_their_units() {
        assert_eq!(value(Unit::Count, 12), "12");
        assert_eq!(value(Unit::Bytes, 3 << 20), "3 MiB");
        assert_eq!(value(Unit::Nanoseconds, 1_500_000_000), "1.50 s");
    }
}
