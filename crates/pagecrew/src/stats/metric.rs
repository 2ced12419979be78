//! What a number is: its name, its unit and its meaning, said once for every way in which it is shown.
//!
//! Numbers and their metrics are defined together, by the macro [`figures`]. The list of all metrics is [`crate::metrics::all`].

use std::fmt;

/// The part of Pagecrew that a metric belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// `pagecrew run`, seen by `pagecrew stats`.
    Run,
    /// `pagecrew trim`.
    Trim,
    /// `pagecrew pool serve`.
    Pool,
    /// `pagecrew reclaim`.
    Reclaim,
    /// `pagecrew serve`.
    Serve,
}

/// How a metric changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, from 0 on.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Kind {
    /// The name in OpenMetrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

/// The unit of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Things and events.
    Count,
    /// Bytes.
    Bytes,
    /// Seconds. What is counted as an integer is counted in nanoseconds.
    Seconds,
    /// A share, where 1 is all.
    Ratio,
}

impl Unit {
    /// The last word of the names of metrics with this unit, if it has one.
    pub fn suffix(self) -> Option<&'static str> {
        match self {
            Unit::Count => None,
            Unit::Bytes => Some("bytes"),
            Unit::Seconds => Some("seconds"),
            Unit::Ratio => Some("ratio"),
        }
    }
}

/// What a number is.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// To what it belongs.
    pub part: Part,
    /// How it changes.
    pub kind: Kind,
    /// Its unit.
    pub unit: Unit,
    /// The name in OpenMetrics, without the `_total` that counters get there. `None`: it is in JSON only.
    pub name: Option<&'static str>,
    /// What its values are told apart by in OpenMetrics.
    pub labels: &'static [&'static str],
    /// The place in the JSON document, such as `nodes[].ready_bytes`. `None`: it is in OpenMetrics only.
    pub json: Option<&'static str>,
    /// One sentence.
    pub help: &'static str,
}

impl Metric {
    /// The key in JSON; empty where there is none.
    pub fn key(&self) -> &'static str {
        self.json.map_or("", |place| place.rsplit('.').next().unwrap_or(place))
    }

    /// `value` as it is shown: times, which are counted in nanoseconds, in seconds.
    pub fn number(&self, value: u64) -> Number {
        match self.unit {
            Unit::Seconds => Number::Real(value as f64 / 1e9),
            Unit::Count | Unit::Bytes | Unit::Ratio => Number::Whole(value),
        }
    }
}

/// A value as it is shown. Its text is a number in JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// A count or a size.
    Whole(u64),
    /// A time in seconds or a share.
    Real(f64),
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => number.fmt(f),
            Number::Real(number) => number.fmt(f),
        }
    }
}

/// A value of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Of which.
    pub metric: &'static Metric,
    /// The values of its labels.
    pub labels: Vec<String>,
    /// The value.
    pub number: Number,
}

/// A number with its metric; `None` where there is no such number.
pub type Figure = (&'static Metric, Option<u64>);

/// The samples that `figures` make with these values of their labels: those that OpenMetrics has.
pub fn samples(figures: impl IntoIterator<Item = Figure>, labels: &[String]) -> impl Iterator<Item = Sample> {
    figures.into_iter().filter(|(metric, _)| metric.name.is_some()).filter_map(move |(metric, value)| {
        Some(Sample { metric, labels: labels.to_vec(), number: metric.number(value?) })
    })
}

/// Defines a struct of numbers, and the metric that each of them is.
///
/// After the name stand the part, the beginning of the names in OpenMetrics, the labels, and the beginning of the places in JSON; `none`
/// where the numbers are not shown. A field that is called differently there says so: by `key` in both, by `name` in OpenMetrics. Fields that
/// are no metrics follow after `with`.
macro_rules! figures {
    (
        $(#[$about:meta])*
        pub struct $struct:ident: $part:ident, $names:tt, $labels:tt, $places:tt {
            $($field:ident $(key $key:literal)? $(name $metric:literal)?: $type:ty, $kind:ident $unit:ident, $help:literal;)*
        }
        $(with { $($(#[$more_about:meta])* pub $more:ident: $more_type:ty,)* })?
    ) => {
        $(#[$about])*
        pub struct $struct {
            $(#[doc = $help] pub $field: $type,)*
            $($($(#[$more_about])* pub $more: $more_type,)*)?
        }

        impl $struct {
            /// What the numbers are, in their order.
            pub const METRICS: &'static [$crate::stats::Metric] = &[$($crate::stats::Metric {
                part: $crate::stats::Part::$part,
                kind: $crate::stats::Kind::$kind,
                unit: $crate::stats::Unit::$unit,
                name: $crate::stats::figures!(@place $names, $field $($key)? $($metric)?),
                labels: &$labels,
                json: $crate::stats::figures!(@place $places, $field $($key)?),
                help: $help,
            },)*];

            /// The numbers, with what they are.
            pub fn figures(&self) -> impl Iterator<Item = $crate::stats::Figure> + use<> {
                let values: [Option<u64>; Self::METRICS.len()] = [$(self.$field.into(),)*];
                Self::METRICS.iter().zip(values)
            }
        }
    };
    (@place none, $($name:tt)+) => { None };
    (@place $beginning:literal, $($name:tt)+) => { Some(concat!($beginning, $crate::stats::figures!(@last $($name)+))) };
    (@last $field:ident) => { stringify!($field) };
    (@last $field:ident $name:literal) => { $name };
    (@last $field:ident $key:literal $name:literal) => { $name };
}
pub(crate) use figures;

#[cfg(test)]
mod tests {
    use super::*;

    figures! {
        /// Numbers of every kind.
        #[derive(Debug, Default)]
        pub struct Account: Pool, "x_user_", ["user"], "users[]." {
            taken_bytes: u64, Gauge Bytes, "What is taken.";
            looked_at key "seen" name "pages_seen": u64, Counter Count, "What was seen.";
            cpu_ns key "cpu_seconds": u64, Counter Seconds, "What it took.";
            quota_bytes: Option<u64>, Gauge Bytes, "What may be taken.";
        }
        with {
            /// Whose.
            pub user: u32,
        }
    }

    figures! {
        /// A number that is in JSON only.
        pub struct Hidden: Run, none, [], "" {
            wall_ns key "wall_seconds": u64, Gauge Seconds, "How long it took.";
        }
    }

    #[test]
    fn names_places_and_keys() {
        let of = |metric: &Metric| (metric.name, metric.json, metric.key());
        let [taken, seen, cpu, _] = Account::METRICS else { panic!() };
        assert_eq!(of(taken), (Some("x_user_taken_bytes"), Some("users[].taken_bytes"), "taken_bytes"));
        assert_eq!(of(seen), (Some("x_user_pages_seen"), Some("users[].seen"), "seen"));
        assert_eq!(of(cpu), (Some("x_user_cpu_seconds"), Some("users[].cpu_seconds"), "cpu_seconds"));
        assert_eq!(of(&Hidden::METRICS[0]), (None, Some("wall_seconds"), "wall_seconds"));
    }

    #[test]
    fn samples_are_what_there_is_in_seconds() {
        let some = Account { taken_bytes: 3, looked_at: 4, cpu_ns: 1_500_000_000, quota_bytes: None, user: 7 };
        let samples: Vec<Sample> = samples(some.figures(), &[some.user.to_string()]).collect();
        let numbers: Vec<Number> = samples.iter().map(|sample| sample.number).collect();
        assert_eq!(numbers, [Number::Whole(3), Number::Whole(4), Number::Real(1.5)]);
        assert!(samples.iter().all(|sample| sample.labels == ["7"]));
        assert_eq!(super::samples(Hidden { wall_ns: 1 }.figures(), &[]).count(), 0);
    }

    #[test]
    fn texts_are_numbers() {
        let texts = [Number::Whole(u64::MAX), Number::Real(0.25), Number::Real(1e-9)].map(|number| number.to_string());
        assert_eq!(texts, ["18446744073709551615", "0.25", "0.000000001"]);
    }
}
