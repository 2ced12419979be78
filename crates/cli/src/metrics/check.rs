//! What tests ask of expositions and documents: that they have what is registered, and nothing else.

use super::text;
use pagecrew::metrics;
use pagecrew::stats::{Metric, Part, Sample};
use serde_json::Value;
use std::collections::BTreeSet;

/// A family of an exposition, as a scraper reads it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Family {
    pub name: String,
    pub kind: String,
    pub unit: String,
    pub help: String,
    /// The names of the labels of each sample, and its value.
    pub samples: Vec<(Vec<String>, String)>,
}

/// The families of an exposition. Panics where it isn't one.
pub fn families(text: &str) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    let text = text.strip_suffix("# EOF\n").expect("no end");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let (word, rest) = rest.split_once(' ').unwrap();
            let (name, value) = rest.split_once(' ').unwrap();
            if families.last().is_none_or(|family| family.name != name) {
                assert!(families.iter().all(|family| family.name != name), "{name} is there twice");
                families.push(Family { name: name.to_owned(), ..Family::default() });
            }
            let family = families.last_mut().unwrap();
            match word {
                "HELP" => family.help = value.to_owned(),
                "TYPE" => family.kind = value.to_owned(),
                "UNIT" => family.unit = value.to_owned(),
                _ => panic!("{line}"),
            }
            continue;
        }
        let family = families.last_mut().unwrap();
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) =
            series.split_once('{').map_or((series, ""), |(name, rest)| (name, rest.strip_suffix('}').unwrap()));
        let total = if family.kind == "counter" { "_total" } else { "" };
        assert_eq!(name, format!("{}{total}", family.name));
        assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
        let labels = labels.split_inclusive("\",").filter(|label| !label.is_empty());
        family
            .samples
            .push((labels.map(|label| label.split('=').next().unwrap().to_owned()).collect(), value.to_owned()));
    }
    families
}

/// Fails unless `samples` are all of a part's metrics that OpenMetrics has, and no other, as the registry describes them.
pub fn assert_complete(part: Part, samples: Vec<Sample>) {
    let families = families(&text(samples));
    let registered: Vec<&Metric> = metrics::of(part).filter(|metric| metric.name.is_some()).collect();
    let names: Vec<&str> = families.iter().map(|family| family.name.as_str()).collect();
    assert_eq!(names, registered.iter().filter_map(|metric| metric.name).collect::<Vec<_>>());
    for (family, metric) in families.iter().zip(registered) {
        assert_eq!((family.kind.as_str(), family.help.as_str()), (metric.kind.name(), metric.help), "{family:?}");
        assert_eq!(family.unit, metric.unit.suffix().unwrap_or(""), "{family:?}");
        assert!(family.samples.iter().all(|(labels, _)| labels == metric.labels), "{family:?}");
    }
}

/// The places of all numbers in a document.
fn places(value: &Value, place: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            let dot = if place.is_empty() { "" } else { "." };
            members.iter().for_each(|(key, value)| places(value, &format!("{place}{dot}{key}"), found));
        }
        Value::Array(items) => items.iter().for_each(|item| places(item, &format!("{place}[]"), found)),
        Value::Number(_) => drop(found.insert(place.to_owned())),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Fails unless `document` has the numbers that a part's metrics have in JSON, and no others but those at the places `others`.
pub fn assert_registered(part: Part, document: &Value, others: &[&str]) {
    let mut found = BTreeSet::new();
    places(document, "", &mut found);
    for other in others {
        assert!(found.remove(*other), "no {other} in {document}");
    }
    let registered = metrics::of(part).filter_map(|metric| metric.json).map(str::to_owned).collect();
    assert_eq!(found, registered);
}
