//! Pressure, and who reclaims, swaps and refaults how much.

use super::super::model::{Count, Model};
use super::super::rates::History;
use super::super::text::{Piece, Row, Table, Tone, byte_rate, history, percent, piece, rate, width};
use super::{Look, Page, machine};
use pagecrew::sys::psi::Resource;

/// Columns of a number beside a history.
const NUMBER: usize = 14;

pub fn page(model: &Model, look: &Look) -> Page {
    let mut body = vec![machine::memory(model), Row::default()];
    body.extend(pressure(model, look));
    body.push(Row::default());
    for (label, count) in ROWS {
        body.push(row(model, label, count, look));
    }
    let busy = piece(tone_of_busy(model.kswapd.last()), format!("{:NUMBER$}", percent(model.kswapd.last())));
    body.push(with_history(Row(vec![label("kswapd busy"), busy]), &model.kswapd, look));
    Page { head: Vec::new(), body }
}

const ROWS: [(&str, Count); 9] = [
    ("stalls (allocstall)", Count::Stalls),
    ("reclaimed by tasks", Count::DirectReclaimed),
    ("  of scanned", Count::DirectScanned),
    ("in the background", Count::BackgroundReclaimed),
    ("  of scanned", Count::BackgroundScanned),
    ("swapped in", Count::SwappedIn),
    ("swapped out", Count::SwappedOut),
    ("refaults of files", Count::RefaultedFile),
    ("refaults of anon", Count::RefaultedAnon),
];

fn label(text: &str) -> Piece {
    piece(Tone::Dim, format!("{text:21}"))
}

fn row(model: &Model, name: &str, count: Count, look: &Look) -> Row {
    with_history(Row(vec![label(name), number(model, count)]), model.history(count), look)
}

/// The rate now, in its unit, with a tone where somebody suffers.
pub fn number(model: &Model, count: Count) -> Piece {
    let now = model.rate(count);
    let suffers = now.is_some_and(|rate| rate > 0.0);
    let text = if count == Count::Stalls { rate(now) } else { byte_rate(now) };
    let tone = match count {
        Count::Stalls | Count::DirectReclaimed | Count::DirectScanned | Count::SwappedIn if suffers => Tone::Bad,
        Count::RefaultedAnon | Count::RefaultedFile | Count::SwappedOut if suffers => Tone::Warn,
        _ => Tone::Plain,
    };
    piece(tone, format!("{text:NUMBER$}"))
}

/// Somebody who works all the time may be too slow.
pub fn tone_of_busy(share: Option<f64>) -> Tone {
    if share.is_some_and(|share| share >= 0.9) { Tone::Warn } else { Tone::Plain }
}

/// Puts the history behind the number. Two values or less are none.
pub fn with_history(mut row: Row, values: &History, look: &Look) -> Row {
    if values.len() > 2 {
        let used: usize = row.0.iter().map(|piece| width(&piece.text)).sum();
        row.0.push(piece(Tone::Dim, history(values.iter(), look.width.saturating_sub(used).min(120), look.unicode)));
    }
    row
}

/// The table of pressure.
fn pressure(model: &Model, look: &Look) -> Vec<Row> {
    if model.sample.pressure.iter().all(Option::is_none) {
        return vec![Row::of(
            Tone::Dim,
            "pressure     not known: it is off (psi=1 on the kernel's command line turns it on)",
        )];
    }
    let mut table =
        Table::new(&["pressure", ">some now", ">avg10", ">avg60", ">avg300", ">full now", ">avg10", "   some"]);
    for (index, resource) in Resource::ALL.into_iter().enumerate() {
        let Some(now) = &model.sample.pressure[index] else { continue };
        let full = now.full.as_ref().map(|full| full.avg10);
        let shares = [
            model.some[index].last(),
            Some(now.some.avg10),
            Some(now.some.avg60),
            Some(now.some.avg300),
            model.full[index],
            full,
        ];
        let cells = shares.map(|share| piece(tone_of_pressure(share), percent(share)));
        let past = history(model.some[index].iter(), 14, look.unicode);
        let past = if model.some[index].len() > 2 { past } else { String::new() };
        let past = [piece(Tone::Dim, format!("   {past}"))];
        table.add([piece(Tone::Dim, resource.name())].into_iter().chain(cells).chain(past));
    }
    let (heading, rows) = table.rows(look.width);
    std::iter::once(heading).chain(rows).collect()
}

/// A tenth of the time is a lot.
pub fn tone_of_pressure(share: Option<f64>) -> Tone {
    match share {
        Some(share) if share >= 0.1 => Tone::Bad,
        Some(share) if share >= 0.01 => Tone::Warn,
        _ => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::model::Model;
    use super::super::super::model::made_up::{answers, model, sample};
    use super::super::View;
    use super::super::tests::{LOOK, text};

    #[test]
    fn rates_stand_beside_their_histories() {
        let text = text(View::Stalls, &model(2, 0), &LOOK);
        for expected in [
            "memory       2.0 %  1.2 %  0.0 %   0.0 %     1.0 %  1.2 %     ██████████████\n",
            "stalls (allocstall)  5.0/s         ███████████████████\n",
            "reclaimed by tasks   1 MiB/s       █",
            "in the background    100 MiB/s     █",
            "swapped in           0 B/s         ▁",
            "swapped out          4 KiB/s       █",
            "refaults of files    8 MiB/s       █",
            "kswapd busy          25.0 %        █",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
    }

    #[test]
    fn a_machine_that_knows_nothing() {
        let mut model = Model::default();
        let mut sample = sample(1, 0);
        sample.pressure = [None; 3];
        sample.activity = Default::default();
        model.next(sample, Vec::new(), answers());
        let text = text(View::Stalls, &model, &LOOK);
        assert!(text.contains("psi=1") && text.contains("swapped in           -\n"), "{text}");
    }
}
