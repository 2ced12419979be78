//! How counters and times are shown, to people and as JSON.

use pagecrew::stats::{Figure, Metric, Number, Snapshot, Unit};
use pagecrew::units::Bytes;
use serde_json::{Map, Value};
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

/// So many of what is called `one`, in the plural where it is not one.
pub fn counted(number: u64, one: &str) -> String {
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

/// Figures as a JSON object, by their keys. What there is not is null.
pub fn object(figures: impl Iterator<Item = Figure>) -> Map<String, Value> {
    let value = |metric: &Metric, value: Option<u64>| match value.map(|value| metric.number(value)) {
        None => Value::Null,
        Some(Number::Whole(number)) => number.into(),
        Some(Number::Real(number)) => number.into(),
    };
    figures.map(|(metric, number)| (metric.key().to_owned(), value(metric, number))).collect()
}

/// The states of each zone of `snapshot`.
pub fn zones(snapshot: &Snapshot) -> Vec<Value> {
    snapshot.zones.iter().map(|zone| Value::Object(object(zone.figures()))).collect()
}

/// A number for people; times are in nanoseconds.
pub fn value(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Count | Unit::Ratio => value.to_string(),
        Unit::Bytes => Bytes(value).to_string(),
        Unit::Seconds => seconds(Duration::from_nanos(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        assert_eq!([0, 1, 2].map(|number| counted(number, "span")), ["0 spans", "1 span", "2 spans"]);
    }

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
        assert_eq!(value(Unit::Seconds, 1_500_000_000), "1.50 s");
    }
}
