//! One comparison: ours, theirs, how many times better, and whether that is enough.

use crate::figures::{median, readable, rounded, times_less};
use serde::Serialize;

/// What a comparison has to reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// It is shown for information.
    None,
    /// At least this many times better.
    Ratio(f64),
    /// Our figure is at most this, whatever theirs is.
    Ours(f64),
    /// Our figure is at most this much above theirs.
    Extra(f64),
    /// Our figure is at most this many times theirs.
    Times(f64),
}

/// A finished comparison of two figures of which the smaller one is better.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub bench: &'static str,
    pub case: String,
    pub ours: f64,
    pub peer: String,
    pub theirs: f64,
    pub unit: &'static str,
    /// How many times better ours is.
    pub ratio: f64,
    pub better: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_ms: Option<f64>,
    pub bar: Option<f64>,
    /// Which figure the bar is for: `ratio` has to be at least that; `ours`, `extra_ms` and `times_theirs` at most.
    pub bar_for: Option<&'static str>,
    pub met: Option<bool>,
}

/// What is compared; [`Comparison::row`] puts two figures in.
#[derive(Debug, Clone)]
pub struct Comparison {
    bench: &'static str,
    case: String,
    unit: &'static str,
    resolution: f64,
    bar: Bar,
}

impl Comparison {
    /// A comparison in `unit`, without a bar.
    pub fn new(bench: &'static str, case: impl Into<String>, unit: &'static str) -> Comparison {
        Comparison { bench, case: case.into(), unit, resolution: 1e-6, bar: Bar::None }
    }

    pub fn bar(mut self, bar: Bar) -> Comparison {
        self.bar = bar;
        self
    }

    /// Says what this measurement can't tell from zero.
    pub fn resolution(mut self, resolution: f64) -> Comparison {
        self.resolution = resolution;
        self
    }

    /// The comparison of `ours` with `theirs`, which is `peer`'s figure.
    pub fn row(&self, ours: f64, peer: &str, theirs: f64) -> Row {
        self.rounds(&[ours], peer, &[theirs])
    }

    /// The comparison of the same rounds of both. A machine that is faster or slower for a while is so for both sides of a round, so the
    /// ratio is the median of the rounds' ratios.
    ///
    /// # Panics
    /// If there is no round.
    pub fn rounds(&self, ours: &[f64], peer: &str, theirs: &[f64]) -> Row {
        let middle = |of: fn(f64, f64, f64) -> f64| {
            let each: Vec<f64> =
                ours.iter().zip(theirs).map(|(&ours, &theirs)| of(ours, theirs, self.resolution)).collect();
            median(&each)
        };
        let ratio = middle(times_less);
        let extra = middle(|ours, theirs, _| ours - theirs);
        let (ours, theirs) = (median(ours), median(theirs));
        let (bar, bar_for, met) = match self.bar {
            Bar::None => (None, None, None),
            Bar::Ratio(least) => (Some(least), Some("ratio"), Some(ratio >= least)),
            Bar::Ours(most) => (Some(most), Some("ours"), Some(ours <= most)),
            Bar::Extra(most) => (Some(most), Some("extra_ms"), Some(extra <= most)),
            Bar::Times(most) => (Some(most), Some("times_theirs"), Some(ours <= theirs * most)),
        };
        Row {
            bench: self.bench,
            case: self.case.clone(),
            ours: rounded(ours),
            peer: peer.to_owned(),
            theirs: rounded(theirs),
            unit: self.unit,
            ratio: rounded(ratio),
            better: "lower",
            extra_ms: matches!(self.bar, Bar::Extra(_)).then(|| rounded(extra)),
            bar,
            bar_for,
            met,
        }
    }
}

impl Row {
    /// Headings of [`Row::cells`].
    pub const HEADINGS: [&'static str; 6] = ["case", "pagecrew", "against", "theirs", "times better", "at least"];

    /// The row as a line of a table for people.
    pub fn cells(&self) -> [String; 6] {
        let times = match self.extra_ms {
            Some(extra) => format!("{}x ({extra:+.2} ms)", readable(self.ratio)),
            None => format!("{}x", readable(self.ratio)),
        };
        let bar = match (self.bar, self.bar_for) {
            (Some(bar), Some("ratio")) => format!("{bar}x"),
            (Some(bar), Some("extra_ms")) => format!("at most +{bar} ms"),
            (Some(bar), Some("times_theirs")) => format!("at most {bar}x theirs"),
            (Some(bar), _) => format!("at most {bar} {}", self.unit).trim_end().to_owned(),
            (None, _) => String::new(),
        };
        let verdict = match self.met {
            Some(true) => " met",
            Some(false) => " MISSED",
            None => "",
        };
        [
            self.case.clone(),
            self.figure(self.ours),
            self.peer.clone(),
            self.figure(self.theirs),
            times,
            format!("{bar}{verdict}"),
        ]
    }

    /// Headings of [`Row::before_and_after`].
    pub const BEFORE_AND_AFTER: [&'static str; 4] = ["", "without", "with pagecrew", "times less"];

    /// The row as a line of a table that shows what changed.
    pub fn before_and_after(&self) -> [String; 4] {
        let excess = if self.met == Some(false) { " TOO MUCH" } else { "" };
        let times = format!("{}x{excess}", readable(self.ratio));
        [self.case.clone(), self.figure(self.theirs), self.figure(self.ours), times]
    }

    /// A figure with its unit; counts of things have none.
    fn figure(&self, value: f64) -> String {
        match self.unit {
            "" => format!("{value:.0}"),
            unit => format!("{} {unit}", readable(value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_rounds_and_not_of_medians() {
        // The machine becomes half as fast in the middle of the third round.
        let comparison = Comparison::new("alloc", "test", "ms").bar(Bar::Ratio(1.0));
        let row = comparison.rounds(&[1.0, 1.0, 1.0, 2.0, 2.0], "x", &[1.0, 1.0, 2.0, 2.0, 2.0]);
        assert_eq!((row.ours, row.theirs, row.ratio, row.met), (1.0, 2.0, 1.0, Some(true)));
        let extra =
            Comparison::new("alloc", "test", "ms").bar(Bar::Extra(3.0)).rounds(&[5.0, 9.0, 9.0], "x", &[1.0, 7.0, 8.0]);
        assert_eq!((extra.extra_ms, extra.met), (Some(2.0), Some(true)));
    }

    #[test]
    fn the_json_has_the_fields_that_the_design_names() {
        let row = Comparison::new("free", "8 GiB", "ms").bar(Bar::Ratio(1.85)).row(2.0, "munmap", 4.0);
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(
            text,
            r#"{"bench":"free","case":"8 GiB","ours":2.0,"peer":"munmap","theirs":4.0,"unit":"ms","ratio":2.0,"#
                .to_owned()
                + r#""better":"lower","bar":1.85,"bar_for":"ratio","met":true}"#
        );
    }

    #[test]
    fn each_kind_of_bar_is_judged_by_its_figure() {
        let compare = |bar| Comparison::new("alloc", "x", "ms").bar(bar);
        assert_eq!(compare(Bar::None).row(1.0, "p", 2.0).met, None);
        assert_eq!(compare(Bar::Ratio(1.0)).row(2.0, "p", 1.9).met, Some(false));
        assert_eq!(compare(Bar::Ours(64.0)).row(64.0, "p", 1.0).met, Some(true));
        let start = compare(Bar::Extra(3.0)).row(14.5, "p", 12.0);
        assert_eq!((start.met, start.extra_ms), (Some(true), Some(2.5)));
        assert_eq!(compare(Bar::Times(1.1)).row(109.0, "p", 100.0).met, Some(true));
        assert_eq!(compare(Bar::Times(1.1)).row(111.0, "p", 100.0).met, Some(false));
    }

    #[test]
    fn counts_have_no_unit() {
        let row = Comparison::new("trim", "killed", "").bar(Bar::Ours(0.0)).resolution(1.0).row(0.0, "p", 5.0);
        assert_eq!(row.cells(), ["killed", "0", "p", "5", "5.00x", "at most 0 met"]);
    }

    #[test]
    fn before_and_after_stand_in_that_order() {
        let faults = Comparison::new("demo", "Redis: page faults", "").row(1000.0, "without", 250_000.0);
        assert_eq!(faults.before_and_after(), ["Redis: page faults", "250000", "1000", "250x"]);
        let peak = Comparison::new("demo", "peak", "MiB").bar(Bar::Times(1.1)).row(300.0, "without", 200.0);
        assert_eq!(peak.before_and_after(), ["peak", "200 MiB", "300 MiB", "0.667x TOO MUCH"]);
    }

    #[test]
    fn cells_say_what_was_missed() {
        let row = Comparison::new("alloc", "calloc", "ms").bar(Bar::Ratio(40.0)).row(10.0, "glibc", 270.0);
        assert_eq!(row.cells(), ["calloc", "10.0 ms", "glibc", "270 ms", "27.0x", "40x MISSED"]);
        let row = Comparison::new("alloc", "start", "ms").bar(Bar::Extra(3.0)).row(12.5, "without", 12.0);
        assert_eq!(row.cells()[4..], ["0.960x (+0.50 ms)", "at most +3 ms met"]);
    }
}
