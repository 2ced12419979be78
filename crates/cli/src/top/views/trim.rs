//! Who has huge pages, and what `pagecrew trim` does about it.

use super::super::candidates::Report;
use super::super::model::Model;
use super::super::text::{Piece, Row, Table, Tone, bytes, percent, piece};
use super::{Look, Page, figures, missing};
use pagecrew::stats::Part;

/// Candidates that are shown above the figures of trim, where there are any.
const ABOVE: usize = 10;

pub fn page(model: &Model, look: &Look) -> Page {
    let mut body = vec![Row::about("trim", [short(model)]), candidates_in_short(model)];
    let figures = model.answers.trim.here().map(|found| figures(Part::Trim, found));
    if let Some(report) = model.answers.candidates.here() {
        if report.denied > 0 {
            let text = format!("not allowed to look at: {} (other users' processes take root)", report.denied);
            body.push(Row::about("", [piece(Tone::Warn, text)]));
        }
        body.push(Row::default());
        body.extend(candidates(report, if figures.is_some() { ABOVE } else { usize::MAX }, look));
    }
    if let Some(figures) = figures {
        body.push(Row::default());
        body.extend(figures);
    }
    Page { head: Vec::new(), body }
}

/// The table of the first ones.
fn candidates(report: &Report, most: usize, look: &Look) -> Vec<Row> {
    let mut table = Table::new(&[">pid", "name", ">huge pages", ">anonymous", ">in huge pages"]);
    for candidate in report.candidates.iter().take(most) {
        let share = candidate.memory.anon_huge as f64 / candidate.memory.anonymous.max(1) as f64;
        table.add(
            [
                candidate.pid.to_string(),
                candidate.name.clone(),
                bytes(Some(candidate.memory.anon_huge)),
                bytes(Some(candidate.memory.anonymous)),
                percent(Some(share.min(1.0))),
            ]
            .map(|text| piece(Tone::Plain, text)),
        );
    }
    let (heading, mut rows) = table.rows(look.width);
    if rows.is_empty() {
        return rows;
    }
    rows.insert(0, heading);
    if let Some(more) = report.candidates.len().checked_sub(most).filter(|more| *more > 0) {
        rows.push(Row::of(Tone::Dim, format!("and {more} more")));
    }
    rows.push(Row::of(Tone::Dim, "What they could give back: pagecrew trim --all --dry-run"));
    rows
}

/// What trim does, in a few words.
pub fn short(model: &Model) -> Piece {
    if let Some(missing) =
        missing(&model.answers.trim, "no metrics are served", "pagecrew serve, or metrics = 9751 in [trim]")
    {
        return missing;
    }
    let whole = |name: &str| model.answers.trim.here().and_then(|figures| figures.whole(name));
    let held = whole("holding").filter(|held| *held > 0).map_or(String::new(), |held| format!(", {held} groups held"));
    piece(
        Tone::Good,
        format!("{} processes, {} gone so far{held}", whole("members").unwrap_or(0), bytes(whole("gone_bytes"))),
    )
}

/// The processes with huge pages, in a line.
pub fn candidates_in_short(model: &Model) -> Row {
    if let Some(missing) = missing(&model.answers.candidates, "no process", "nobody has huge pages") {
        return Row::about("huge pages", [missing]);
    }
    let Some(report) = model.answers.candidates.here() else { return Row::default() };
    let first = report.candidates.first();
    let mut text = first.map_or("in no process that was looked at".to_owned(), |first| {
        let most = format!("{} ({}) has most, {}", first.name, first.pid, bytes(Some(first.memory.anon_huge)));
        match report.candidates.len() {
            1 => format!("in 1 process: {} ({}), {}", first.name, first.pid, bytes(Some(first.memory.anon_huge))),
            count => format!("in {count} processes; {most}"),
        }
    });
    if report.waiting > 0 {
        text += &format!("; {} not looked at yet", report.waiting);
    }
    let denied = match report.denied {
        0 => piece(Tone::Plain, ""),
        denied => piece(Tone::Warn, format!("; {denied} not allowed")),
    };
    Row::about("huge pages", [piece(Tone::Plain, text), denied])
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::model;
    use super::super::super::service::Service;
    use super::super::View;
    use super::super::tests::{LOOK, text};

    #[test]
    fn candidates_and_what_trim_has_done() {
        let text = text(View::Trim, &model(1, 0), &LOOK);
        for expected in [
            "trim       3 processes, 1 GiB gone so far\n",
            "huge pages in 30 processes; name-1 (1) has most, 2.0 GiB; 3 not looked at yet; 12 not allowed\n",
            "           not allowed to look at: 12 (other users' processes take root)\n",
            "  1  name-1      2.0 GiB      8 GiB         24.4 %\n",
            "and 20 more\n",
            "\nmembers  ",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
    }

    #[test]
    fn without_trim_and_without_candidates() {
        let mut model = model(1, 0);
        model.answers.trim = Service::Absent;
        model.answers.candidates = Service::Here(Default::default());
        let shown = text(View::Trim, &model, &LOOK);
        assert!(shown.contains("no metrics are served (pagecrew serve") && shown.contains("in no process"), "{shown}");
        model.answers.candidates = Service::Wrong("/proc: no".into());
        assert!(text(View::Trim, &model, &LOOK).contains("/proc: no"));
    }
}
