//! The views: rows of text out of what is known. Nothing here draws or reads anything.

mod machine;
mod nodes;
mod overview;
mod pool;
mod programs;
mod reclaim;
mod stalls;
mod trim;

use super::model::Model;
use super::programs::Sort;
use super::service::{Figures, Service};
use super::text::{Piece, Row, Tone, piece};
use pagecrew::metrics;
use pagecrew::stats::{Part, Unit};

/// A view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum View {
    /// Everything in a few lines
    #[default]
    Overview,
    /// The memory of each NUMA node, and its watermarks
    Nodes,
    /// Pressure, and who reclaims, swaps and refaults how much
    Stalls,
    /// The programs under pagecrew run
    Programs,
    /// Who has huge pages, and what pagecrew trim does about it
    Trim,
    /// What pagecrew pool has ready
    Pool,
    /// Who reclaims in the background, and what pagecrew reclaim does
    Reclaim,
}

impl View {
    /// All of them, in the order of their keys.
    pub const ALL: [View; 7] =
        [View::Overview, View::Nodes, View::Stalls, View::Programs, View::Trim, View::Pool, View::Reclaim];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            View::Overview => "Overview",
            View::Nodes => "Nodes",
            View::Stalls => "Stalls",
            View::Programs => "Programs",
            View::Trim => "Trim",
            View::Pool => "Pool",
            View::Reclaim => "Reclaim",
        }
    }

    /// What it shows.
    pub fn page(self, model: &Model, look: &Look) -> Page {
        match self {
            View::Overview => overview::page(model, look),
            View::Nodes => nodes::page(model, look),
            View::Stalls => stalls::page(model, look),
            View::Programs => programs::page(model, look),
            View::Trim => trim::page(model, look),
            View::Pool => pool::page(model),
            View::Reclaim => reclaim::page(model, look),
        }
    }
}

/// For what a view is made.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Columns.
    pub width: usize,
    /// Whether the terminal shows more than ASCII.
    pub unicode: bool,
    /// The order of programs.
    pub sort: Sort,
}

/// What a view shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// What stays where the rest is scrolled.
    pub head: Vec<Row>,
    /// The rest.
    pub body: Vec<Row>,
}

impl Page {
    /// All rows.
    pub fn rows(self) -> impl Iterator<Item = Row> {
        self.head.into_iter().chain(self.body)
    }
}

/// Why there is no answer of `who`, in a few words; `None` where there is one.
fn missing<T>(service: &Service<T>, who: &str, how: &str) -> Option<Piece> {
    match service {
        Service::Here(_) => None,
        Service::NotAsked => Some(piece(Tone::Dim, "not asked yet")),
        Service::Absent => Some(piece(Tone::Dim, format!("{who} ({how})"))),
        Service::Refused => Some(piece(Tone::Warn, "this user may not ask it: run this as root")),
        Service::Silent => Some(piece(Tone::Bad, "it does not answer")),
        Service::Wrong(reason) => Some(piece(Tone::Warn, reason.clone())),
    }
}

/// The figures of a part as rows, those with labels left out: the key, the value and the meaning.
fn figures(part: Part, figures: &Figures) -> Vec<Row> {
    let row = |metric: &'static pagecrew::stats::Metric| {
        let name = metric.name?.strip_prefix("pagecrew_")?.split_once('_')?.1;
        let value = figures.value(name)?;
        let shown = match metric.unit {
            Unit::Bytes => super::text::bytes(Some(value as u64)),
            Unit::Ratio => super::text::percent(Some(value)),
            Unit::Seconds => format!("{value:.3} s"),
            Unit::Count => format!("{value:.0}"),
        };
        Some(Row(vec![piece(Tone::Plain, format!("{name:27}{shown:>10}  ")), piece(Tone::Dim, metric.help)]))
    };
    metrics::of(part).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::super::model::made_up::{figures as made_up, model};
    use super::*;

    pub const LOOK: Look =
        Look { width: 80, unicode: true, sort: Sort { key: super::super::programs::Key::InUse, reversed: false } };

    /// The text of a view.
    pub fn text(view: View, model: &Model, look: &Look) -> String {
        view.page(model, look).rows().map(|row| row.text() + "\n").collect()
    }

    #[test]
    fn every_view_has_something_to_say_of_any_machine() {
        for model in [Model::default(), model(0, 0), model(1, 3), model(8, 1000)] {
            for view in View::ALL {
                for width in [10, 40, 80, 200] {
                    let look = Look { width, unicode: width > 40, ..LOOK };
                    let text = text(view, &model, &look);
                    assert!(!text.trim().is_empty(), "{view:?}");
                    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{view:?}: {text}");
                }
            }
        }
    }

    #[test]
    fn why_there_is_no_answer() {
        let why = |service: Service<u32>| missing(&service, "it does not run", "pagecrew x").map(|piece| piece.text);
        assert_eq!(why(Service::Here(1)), None);
        assert_eq!(why(Service::Absent).unwrap(), "it does not run (pagecrew x)");
        assert!(
            why(Service::Refused).unwrap().contains("root") && why(Service::Silent).unwrap().contains("not answer")
        );
        assert_eq!(why(Service::Wrong("line 7".into())).unwrap(), "line 7");
    }

    #[test]
    fn figures_have_their_units() {
        let found = made_up(
            Part::Trim,
            "pagecrew_trim_gone_bytes_total 2097152\npagecrew_trim_budget_cpu_ratio 0.01\npagecrew_trim_cpu_seconds_total 1.5\n",
        );
        let rows: Vec<String> = figures(Part::Trim, found.here().unwrap()).iter().map(Row::text).collect();
        assert!(rows[0].starts_with("gone_bytes                      2 MiB  What"), "{rows:?}");
        assert!(
            rows.iter().any(|row| row.contains("1.0 %")) && rows.iter().any(|row| row.contains("1.500 s")),
            "{rows:?}"
        );
    }
}
