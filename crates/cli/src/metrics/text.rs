//! Samples as OpenMetrics text.

use pagecrew::metrics;
use pagecrew::stats::{Kind, Metric, Number, Sample};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// The exposition of `samples`, metric by metric in the order of [`metrics::all`].
pub fn text(samples: Vec<Sample>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Samples(samples)));
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Samples(Vec<Sample>);

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in metrics::all() {
            let Some(name) = metric.name else { continue };
            let mut samples = self.0.iter().filter(|sample| sample.metric.name == metric.name).peekable();
            if samples.peek().is_none() {
                continue;
            }
            let unit = metric.unit.suffix().map(|suffix| Unit::Other(suffix.to_owned()));
            let suffix = unit.as_ref().map_or(String::new(), |unit| format!("_{}", unit.as_str()));
            let name = name.strip_suffix(suffix.as_str()).unwrap_or(name);
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut family = encoder.encode_descriptor(name, metric.help, unit.as_ref(), kind)?;
            for sample in samples {
                one(&mut family, metric, sample)?;
            }
        }
        Ok(())
    }
}

fn one(family: &mut MetricEncoder<'_>, metric: &Metric, sample: &Sample) -> fmt::Result {
    let labels: Vec<(&str, &str)> =
        metric.labels.iter().zip(&sample.labels).map(|(name, value)| (*name, value.as_str())).collect();
    let mut labelled = family.encode_family(&labels)?;
    match (metric.kind, sample.number) {
        (Kind::Counter, Number::Whole(number)) => labelled.encode_counter::<NoLabelSet, _, u64>(&number, None),
        (Kind::Counter, Number::Real(number)) => labelled.encode_counter::<NoLabelSet, _, u64>(&number, None),
        (Kind::Gauge, Number::Whole(number)) => labelled.encode_gauge(&number),
        (Kind::Gauge, Number::Real(number)) => labelled.encode_gauge(&number),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::*;
    use pagecrew::stats::Part;

    fn sample(name: &str, labels: &[&str], number: Number) -> Sample {
        let metric = metrics::all().into_iter().find(|metric| metric.name == Some(name)).unwrap();
        Sample { metric, labels: labels.iter().map(|label| (*label).to_owned()).collect(), number }
    }

    #[test]
    fn what_a_scraper_gets() {
        let samples = vec![
            sample("pagecrew_pool_user_taken_bytes", &["a\"b\\c\nd"], Number::Whole(u64::MAX)),
            sample("pagecrew_pool_cpu_seconds", &[], Number::Real(1.5)),
            sample("pagecrew_pool_user_taken_bytes", &["7"], Number::Whole(3)),
        ];
        let expected = "\
# HELP pagecrew_pool_user_taken_bytes Memory on the user's account.
# TYPE pagecrew_pool_user_taken_bytes gauge
# UNIT pagecrew_pool_user_taken_bytes bytes
pagecrew_pool_user_taken_bytes{user=\"a\\\"b\\\\c\\nd\"} 18446744073709551615
pagecrew_pool_user_taken_bytes{user=\"7\"} 3
# HELP pagecrew_pool_cpu_seconds CPU time of the filler.
# TYPE pagecrew_pool_cpu_seconds counter
# UNIT pagecrew_pool_cpu_seconds seconds
pagecrew_pool_cpu_seconds_total 1.5
# EOF
";
        assert_eq!(text(samples), expected);
        assert_eq!(text(Vec::new()), "# EOF\n");
    }

    #[test]
    fn programs_under_run_have_no_exposition() {
        check::assert_complete(Part::Run, Vec::new());
    }
}
