//! Every metric of all parts in one list. Each is defined beside its numbers, and nowhere else.

use crate::control::supervision;
use crate::group::Holds;
use crate::pool;
use crate::reclaim::{BehindStanding, GroupStanding, Standing};
use crate::stats::{Counters, Elsewhere, Kind, Metric, NodeMemory, Part, Unit, Usage, ZoneBytes};
use crate::trim::{self, Left, Overview, Tally};
use std::fmt::Write;

/// Every metric, part by part.
pub fn all() -> Vec<&'static Metric> {
    let run = [Counters::METRICS, ZoneBytes::METRICS, Usage::METRICS, NodeMemory::METRICS, Elsewhere::METRICS];
    let trim = [Overview::METRICS, Tally::METRICS, Holds::METRICS];
    let mut all: Vec<&'static Metric> = run.into_iter().chain(trim).flatten().collect();
    all.extend([Left::AT_SCAN, Left::AT_LOOK, trim::BUDGET]);
    all.extend(pool::Status::metrics());
    all.extend(Standing::METRICS);
    all.extend(GroupStanding::METRICS);
    all.extend(BehindStanding::METRICS);
    all.push(UP);
    all.extend(supervision::Standing::METRICS);
    all
}

/// Whether a service answers, as whoever joins the metrics of several finds it.
pub const UP: &Metric = &Metric {
    part: Part::Serve,
    kind: Kind::Gauge,
    unit: Unit::Count,
    name: Some("pagecrew_serve_up"),
    labels: &["service"],
    json: None,
    help: "1 if the service has answered this scrape in time; else 0.",
};

/// The metrics of one part.
pub fn of(part: Part) -> impl Iterator<Item = &'static Metric> {
    all().into_iter().filter(move |metric| metric.part == part)
}

/// The page that documents them: `docs/metrics.md`.
pub fn page() -> String {
    let mut page = BEGINNING.to_owned();
    for (part, title, about) in PARTS {
        // Writing to a string can't fail.
        let _ = write!(page, "\n## {title}\n\n{about}\n\n");
        let exposed = of(part).any(|metric| metric.name.is_some());
        let heading = if exposed { "| OpenMetrics " } else { "" };
        let line = if exposed { "|---" } else { "" };
        let _ = writeln!(page, "{heading}| JSON | kind | unit | meaning |\n{line}|---|---|---|---|");
        for metric in of(part) {
            if exposed {
                let _ = write!(page, "| {} ", name(metric));
            }
            let json = metric.json.map_or(String::new(), |place| format!("`{place}`"));
            let unit = metric.unit.suffix().unwrap_or("");
            let _ = writeln!(page, "| {json} | {} | {unit} | {} |", metric.kind.name(), metric.help);
        }
    }
    page
}

/// The name of the samples, with the labels.
fn name(metric: &Metric) -> String {
    let Some(name) = metric.name else { return String::new() };
    let total = if metric.kind == Kind::Counter { "_total" } else { "" };
    match metric.labels {
        [] => format!("`{name}{total}`"),
        labels => format!("`{name}{total}{{{}}}`", labels.join(",")),
    }
}

const BEGINNING: &str = "\
# Metrics

Every number that Pagecrew gives to programs, by part. Sizes are in bytes and end in `_bytes`, times are in seconds and end in
`_seconds`, shares end in `_ratio`, where 1 is all; everything else is a count. A counter only grows, from 0 on, as long as the process
that counts runs. This page is made from the list in the library (`pagecrew::metrics`); a test holds it to that.

OpenMetrics are served where that is asked for:

```sh
pagecrew serve --metrics 9753                                     # http://127.0.0.1:9753/metrics, all services in one
pagecrew pool serve --size 16G --metrics 9750                     # one by itself
pagecrew trim --all --watch --metrics /run/pagecrew-trim/metrics  # a Unix socket, for its owner alone
curl --unix-socket /run/pagecrew-trim/metrics http://localhost/metrics
```

`--metrics ADDRESS`, or `metrics` in the file of settings, is a path with a `/` in it, `PORT`, `127.0.0.1:PORT` or `[::1]:PORT`. Other machines
are not served: put a proxy before it for them. Every user of the machine can read from a port; a socket has mode 0600 and stands where nobody
else can change names. A request has at most 8 KiB and a connection 5 seconds; of more than 16 connections at a time, the oldest ends.
Scrapes within a tenth of a second get the same figures. Under `pagecrew serve` each service
also has a socket of its own, `/run/pagecrew/serve/SERVICE.metrics`, for root. The format is OpenMetrics 1.0.0, which Prometheus reads:

```yaml
scrape_configs:
  - job_name: pagecrew
    static_configs:
      - targets: [\"127.0.0.1:9753\"]
```
";

const PARTS: [(Part, &str, &str); 5] = [
    (
        Part::Serve,
        "pagecrew serve",
        "OpenMetrics only, and with them all those of the services that run under it: pool, trim and reclaim. A service that does not answer\n\
         within 0.7 s is left out of that scrape.",
    ),
    (
        Part::Pool,
        "pagecrew pool serve",
        "JSON: `pagecrew pool status --json`, which has at most 32 waiting files of a node. `node` is the kernel's\n\
         number of the node; `user` is the user's number in JSON, and in OpenMetrics the name, or the number where there is no name. All figures\n\
         are of one moment.",
    ),
    (
        Part::Trim,
        "pagecrew trim",
        "JSON: `pagecrew trim --json`, where the objects in `processes[]` have the keys of `totals`. OpenMetrics: `pagecrew trim --watch`, the sums\n\
         over all processes since it began, renewed each second. The first five REASONs in `left` are those of the\n\
         last scan, which go up and down; `left` in OpenMetrics has the reason as a label.",
    ),
    (
        Part::Reclaim,
        "pagecrew reclaim",
        "JSON: the lines of `pagecrew reclaim --json`, one whenever something changes. All figures are of the last look, and there is none while\n\
         nothing is reclaimed; the counters begin at 0 when it is started. `event` says what\n\
         the line is: `ready`, `begun` (demand), `changed`, `ended` (with `lasted_seconds`), `theirs` (somebody else has set the factor), and in the\n\
         end `end`; `cause` says what decides: `rest`, `demand`, `bounded`, `scarce` or `saturated`. Lines of control groups have other keys:\n\
         `group-begun`, `group-ended`, `group-held`, `group-let-go`, `groups-too-many`, `groups-unwatched`, `groups-uninterruptible`. `groups` is in the line `groups-end`,\n\
         and `behind` in the last one, `behind-end`.",
    ),
    (
        Part::Run,
        "pagecrew run",
        "JSON: `pagecrew stats --json` while a program runs (`counters`, `zones` and, on machines with several nodes, `nodes` and\n\
         `elsewhere_bytes`), and `pagecrew run --stats-json FILE` when it has ended (all but the last two).",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_name_says_the_unit_and_is_used_once() {
        let (mut names, mut places) = (BTreeSet::new(), BTreeSet::new());
        for metric in all() {
            for called in metric.name.into_iter().chain(metric.json.map(|_| metric.key())) {
                let suffix = [Unit::Bytes, Unit::Seconds, Unit::Ratio]
                    .into_iter()
                    .find(|unit| unit.suffix().is_some_and(|suffix| called.ends_with(&format!("_{suffix}"))));
                assert_eq!(suffix.unwrap_or(Unit::Count), metric.unit, "{called}");
                assert!(
                    !["_total", "_ns", "_count", "_sum", "_info"].iter().any(|end| called.ends_with(end)),
                    "{called}"
                );
            }
            let Some(name) = metric.name else { continue };
            let part = format!("pagecrew_{:?}_", metric.part).to_lowercase();
            assert!(name.starts_with(&part), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert!(names.insert(name), "{name} is there twice");
        }
        for metric in all().into_iter().filter(|metric| *metric != Left::AT_LOOK) {
            let Some(place) = metric.json else { continue };
            assert!(places.insert((metric.part, place)), "{place} is there twice");
        }
        assert!(all().len() > 70 && names.len() > 40);
    }

    #[test]
    fn each_is_shown_and_explained() {
        for metric in all() {
            assert!(metric.name.is_some() || metric.json.is_some(), "{metric:?}");
            assert!(
                metric.help.ends_with('.') && metric.help.len() > 10 && !metric.help.contains(['|', '\n']),
                "{metric:?}"
            );
        }
    }

    /// The names of samples in a text, wherever they stand.
    fn named(text: &str) -> BTreeSet<&str> {
        let parts = [Part::Run, Part::Trim, Part::Pool, Part::Reclaim, Part::Serve];
        let beginnings = parts.map(|part| format!("pagecrew_{part:?}_").to_lowercase());
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        words.filter(|word| beginnings.iter().any(|beginning| word.starts_with(beginning.as_str()))).collect()
    }

    #[test]
    fn the_dashboard_and_the_alerts_use_metrics_that_there_are() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let there: BTreeSet<String> = all()
            .into_iter()
            .filter_map(|metric| Some((metric.name?, metric.kind == Kind::Counter)))
            .map(|(name, counts)| if counts { format!("{name}_total") } else { name.to_owned() })
            .collect();
        for (file, least) in [("contrib/grafana/pagecrew.json", 20), ("contrib/prometheus/pagecrew.rules.yml", 7)] {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            let named = named(&text);
            assert!(named.len() >= least, "{file}: {named:?}");
            // Whatever else begins like a metric would be one that was mistyped.
            let others = text.matches("pagecrew_").count();
            let all_of_them: usize = text
                .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                .filter(|word| named.contains(word))
                .count();
            assert_eq!(others, all_of_them, "{file}");
            for name in named {
                assert!(there.contains(name), "{file}: there is no {name}");
            }
        }
    }

    /// `PAGECREW_WRITE_DOCS=1 cargo test -p pagecrew --lib metrics` writes the page anew.
    #[test]
    fn the_page_is_what_the_list_says() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let path = root.join("docs/metrics.md");
        if std::env::var_os("PAGECREW_WRITE_DOCS").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(
            written == page(),
            "docs/metrics.md is out of date: PAGECREW_WRITE_DOCS=1 cargo test -p pagecrew --lib metrics"
        );
    }
}
