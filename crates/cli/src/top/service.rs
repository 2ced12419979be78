//! How a service stands, seen from outside, and its figures.

use crate::metrics::{Exposition, NoMetrics};
use pagecrew::metrics;
use pagecrew::stats::{Kind, Metric, Part};
use serde_json::{Map, Value};

/// What a service has answered.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Service<T> {
    /// Nobody has asked yet.
    #[default]
    NotAsked,
    /// It does not run, or serves nothing.
    Absent,
    /// This user may not ask.
    Refused,
    /// It does not answer.
    Silent,
    /// It answers nonsense, or can't be asked, for this reason.
    Wrong(String),
    /// Its answer.
    Here(T),
}

impl<T> Service<T> {
    /// The answer.
    pub fn here(&self) -> Option<&T> {
        match self {
            Service::Here(answer) => Some(answer),
            _ => None,
        }
    }

    /// In a word, for programs.
    pub fn word(&self) -> &'static str {
        match self {
            Service::NotAsked => "not asked",
            Service::Absent => "absent",
            Service::Refused => "refused",
            Service::Silent => "silent",
            Service::Wrong(_) => "wrong",
            Service::Here(_) => "here",
        }
    }
}

impl From<NoMetrics> for Service<Figures> {
    fn from(reason: NoMetrics) -> Service<Figures> {
        match reason {
            NoMetrics::NotServed => Service::Absent,
            NoMetrics::Refused => Service::Refused,
            NoMetrics::Silent => Service::Silent,
            NoMetrics::Wrong(reason) => Service::Wrong(reason),
        }
    }
}

/// The registered metrics among what a part serves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures(Vec<Figure>);

#[derive(Debug, Clone, PartialEq)]
struct Figure {
    metric: &'static Metric,
    /// The values of its labels.
    labels: Vec<String>,
    value: f64,
}

impl Figures {
    /// Those of `part`. What another version has more of is left out; `None` where nothing is left.
    pub fn of(part: Part, exposition: &Exposition) -> Option<Figures> {
        let mut found = Vec::new();
        for metric in metrics::of(part) {
            let Some(name) = metric.name else { continue };
            let total = if metric.kind == Kind::Counter { "_total" } else { "" };
            for sample in exposition.named(&format!("{name}{total}")) {
                let labels: Option<Vec<String>> =
                    metric.labels.iter().map(|label| sample.labels.get(*label).cloned()).collect();
                if let Some(labels) = labels.filter(|labels| labels.len() == sample.labels.len()) {
                    found.push(Figure { metric, labels, value: sample.value });
                }
            }
        }
        (!found.is_empty()).then_some(Figures(found))
    }

    /// The value of a metric without labels: its name in OpenMetrics, without what its part begins with and without `_total`.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|figure| figure.labels.is_empty() && short(figure.metric) == name).map(|figure| figure.value)
    }

    /// The same as a whole number.
    pub fn whole(&self, name: &str) -> Option<u64> {
        self.value(name).filter(|value| *value >= 0.0).map(|value| value as u64)
    }

    /// All of them by these names; where there is a label, by its values.
    pub fn object(&self) -> Map<String, Value> {
        let mut object = Map::new();
        for figure in &self.0 {
            let value = number(figure.value);
            match figure.labels.as_slice() {
                [] => drop(object.insert(short(figure.metric).to_owned(), value)),
                labels => {
                    let inner = object.entry(short(figure.metric)).or_insert_with(|| Value::Object(Map::new()));
                    if let Value::Object(inner) = inner {
                        inner.insert(labels.join(","), value);
                    }
                }
            }
        }
        object
    }
}

/// The name in OpenMetrics without what all of its part begin with.
fn short(metric: &Metric) -> &'static str {
    metric.name.and_then(|name| name.strip_prefix("pagecrew_")?.split_once('_')).map_or("", |(_, name)| name)
}

/// A number of JSON: a whole one where it is one.
pub fn number(value: f64) -> Value {
    // What is larger than this is not exact.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && (0.0..EXACT).contains(&value) { (value as u64).into() } else { value.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(part: Part, text: &str) -> Option<Figures> {
        Figures::of(part, &Exposition::parse(&format!("{text}# EOF\n")).unwrap())
    }

    #[test]
    fn what_is_registered_is_taken_by_its_name() {
        let found = figures(
            Part::Trim,
            "pagecrew_trim_members 3\npagecrew_trim_cpu_seconds_total 0.5\npagecrew_trim_huge_pages_left_total{reason=\"busy\"} 9\n\
             pagecrew_trim_huge_pages_left_total{reason=\"shared\"} 8\npagecrew_trim_unknown 1\nother 5\npagecrew_pool_size_bytes 5\n",
        )
        .unwrap();
        assert_eq!(
            (found.value("members"), found.whole("members"), found.value("cpu_seconds")),
            (Some(3.0), Some(3), Some(0.5))
        );
        let expected =
            serde_json::json!({ "members": 3, "cpu_seconds": 0.5, "huge_pages_left": { "busy": 9, "shared": 8 } });
        assert_eq!(Value::Object(found.object()), expected);
        assert_eq!((found.value("huge_pages_left"), found.value("size_bytes")), (None, None));
    }

    #[test]
    fn what_is_not_registered_is_nobodys() {
        assert_eq!(figures(Part::Trim, ""), None);
        assert_eq!(figures(Part::Reclaim, "pagecrew_trim_members 3\n"), None);
        // A counter has its ending, a label its name, and there is no other label.
        for text in [
            "pagecrew_reclaim_stalls 3\n",
            "pagecrew_trim_members{x=\"y\"} 3\n",
            "pagecrew_trim_huge_pages_left_total 3\n",
            "pagecrew_trim_huge_pages_left_total{why=\"busy\"} 3\n",
        ] {
            assert_eq!(figures(Part::Trim, text), None, "{text}");
        }
    }

    #[test]
    fn numbers_are_whole_where_they_can_be() {
        assert_eq!([number(3.0), number(0.5), number(-1.0)].map(|n| n.to_string()), ["3", "0.5", "-1.0"]);
    }
}
