//! What came of it, for people and for programs.

use super::session::{Report, Row};
use crate::figures::{object, seconds};
use crate::output::{printable, render, table};
use pagecrew::trim::{BUDGET, Left, Tally};
use pagecrew::units::Bytes;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// The JSON object of a report.
pub fn json(report: &Report) -> Value {
    let process = |row: &Row| {
        let mut object = counts(&row.tally);
        object.insert("pid".into(), row.pid.into());
        object.insert("name".into(), row.name.as_str().into());
        object.insert("ended".into(), row.ended.into());
        object.insert("error".into(), row.error.clone().into());
        Value::Object(object)
    };
    let mut document = json!({
        "dry_run": report.options.dry_run,
        "max_zero": report.options.max_zero,
        BUDGET.key(): report.options.cpu,
        "processes": report.rows.iter().map(process).collect::<Vec<_>>(),
        "totals": counts(&report.total),
    });
    if let Some(members) = document.as_object_mut() {
        members.extend(object(report.overview.figures()));
    }
    document
}

fn counts(tally: &Tally) -> Map<String, Value> {
    let left: Map<String, Value> =
        Left::NAMES.iter().zip(tally.left.counts()).map(|(name, count)| (name.to_string(), count.into())).collect();
    let mut counts = object(tally.figures());
    counts.insert("left".into(), Value::Object(left));
    counts
}

/// A report for the service manager, with so many groups held.
pub fn in_short(report: &Report, holding: u64) -> String {
    let groups = match holding {
        0 => String::new(),
        1 => ", 1 group held at its limit".into(),
        count => format!(", {count} groups held at their limits"),
    };
    let processes = match report.overview.members {
        1 => "1 process".into(),
        count => format!("{count} processes"),
    };
    format!("{processes} trimmed, {} gone in all{groups}", Bytes(report.total.gone_bytes))
}

/// The table of a report.
pub fn text(report: &Report) -> String {
    let rows = &report.rows;
    if rows.is_empty() {
        return "none of these processes has memory that could be in huge pages\n".into();
    }
    let without = rows.iter().filter(|row| !worth_showing(row)).count();
    let others = match without {
        0 => String::new(),
        1 => "1 process has no huge pages\n".into(),
        count => format!("{count} processes have no huge pages\n"),
    };
    if without == rows.len() {
        return others;
    }
    let dry_run = report.options.dry_run;
    let mut table = table(&["pid", "name", "huge pages", "under-used", "could go", "gone", "cpu time", "left alone"]);
    for row in rows.iter().filter(|row| worth_showing(row)) {
        table.add_row(cells([row.pid.to_string(), row.name.clone()], &row.tally, &remarks(row), dry_run));
    }
    if rows.len() > without + 1 {
        table.add_row(cells(["".into(), "all".into()], &report.total, "", dry_run));
    }
    render(&table) + &others
}

fn worth_showing(row: &Row) -> bool {
    row.tally.huge_pages + row.tally.looked_at + row.tally.left.file > 0 || row.error.is_some()
}

fn cells(names: [String; 2], tally: &Tally, remarks: &str, dry_run: bool) -> Vec<String> {
    let gone = if dry_run { "-".into() } else { Bytes(tally.gone_bytes).to_string() };
    let [pid, name] = names;
    vec![
        pid,
        name,
        tally.huge_pages.to_string(),
        tally.under_used.to_string(),
        Bytes(tally.could_go_bytes).to_string(),
        gone,
        seconds(Duration::from_nanos(tally.cpu_ns)),
        remarks.to_owned(),
    ]
}

/// Why some or all of it was left as it is.
fn remarks(row: &Row) -> String {
    let counts = Left::NAMES.iter().zip(row.tally.left.counts()).filter(|&(_, count)| count > 0);
    let mut remarks: Vec<String> = counts.map(|(name, count)| format!("{count} {name}")).collect();
    if row.ended {
        remarks.push("ended meanwhile".into());
    }
    remarks.extend(row.error.as_deref().map(printable));
    remarks.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::check::assert_registered;
    use pagecrew::stats::Part;
    use pagecrew::trim::{Options, Overview};

    #[test]
    fn remarks_name_the_reasons() {
        let left = Left { shared: 3, locked: 2, ..Left::default() };
        let tally = Tally { left, ..Tally::default() };
        let row = Row { pid: 1, name: "x".into(), tally, ended: true, error: None };
        assert_eq!(remarks(&row), "2 locked, 3 shared, ended meanwhile");
    }

    #[test]
    fn in_short_it_says_how_many_and_how_much() {
        let overview = Overview { members: 1, ..Overview::default() };
        let total = Tally { gone_bytes: 3 << 20, ..Tally::default() };
        let mut report = Report { overview, options: Options::default(), rows: Vec::new(), total };
        assert_eq!(in_short(&report, 0), "1 process trimmed, 3 MiB gone in all");
        report.overview.members = 12;
        assert_eq!(in_short(&report, 1), "12 processes trimmed, 3 MiB gone in all, 1 group held at its limit");
    }

    #[test]
    fn the_object_has_every_count() {
        let object = counts(&Tally { gone_bytes: 7, cpu_ns: 2_500_000_000, ..Tally::default() });
        assert_eq!((object["gone_bytes"].as_u64(), object["left"].as_object().unwrap().len()), (Some(7), 9));
        assert_eq!(object["cpu_seconds"].as_f64(), Some(2.5));
    }

    #[test]
    fn the_document_is_what_is_registered() {
        let tally = Tally::default();
        let row = Row { pid: 1, name: "x".into(), tally, ended: false, error: None };
        let options = Options { cpu: Some(0.01), ..Options::default() };
        let mut document = json(&Report { overview: Overview::default(), options, rows: vec![row], total: tally });
        // A process has what the totals have.
        let mut process = document["processes"][0].take();
        let members = process.as_object_mut().unwrap();
        let own: Vec<bool> = ["pid", "name", "ended", "error"].map(|key| members.remove(key).is_some()).into();
        assert_eq!(own, [true; 4]);
        assert_eq!(process, document["totals"]);
        // The reasons are told apart by a label.
        let left = document["totals"]["left"].as_object_mut().unwrap();
        assert!(left.keys().all(|reason| Left::NAMES.contains(&reason.as_str())) && left.len() == 9);
        *left = [("REASON".to_owned(), 0.into())].into_iter().collect();
        assert_registered(Part::Trim, &document, &["max_zero"]);
    }

    #[test]
    fn a_dry_run_claims_nothing() {
        let tally = Tally { could_go_bytes: 1 << 20, ..Tally::default() };
        let names = || ["1".to_owned(), "x".to_owned()];
        assert_eq!(cells(names(), &tally, "", true)[4..6], ["1 MiB", "-"]);
        assert_eq!(cells(names(), &tally, "", false)[4..6], ["1 MiB", "0 B"]);
    }
}
