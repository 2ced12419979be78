//! Who reclaims in the background: the kernel's threads, and what `pagecrew reclaim` makes of the demand.

use super::super::model::{Count, Model};
use super::super::service::Figures;
use super::super::text::{Piece, Row, Table, Tone, byte_rate, bytes, percent, piece, rate};
use super::stalls::{tone_of_busy, with_history};
use super::{Look, Page, figures, missing};
use pagecrew::stats::Part;

pub fn page(model: &Model, look: &Look) -> Page {
    let mut body = vec![Row::about("reclaim", [short(model)])];
    if let Some(found) = model.answers.reclaim.here() {
        body.push(Row::about("why", [piece(Tone::Plain, why(found))]));
        body.push(Row::default());
        body.extend(figures(Part::Reclaim, found));
    }
    body.push(Row::default());
    let by = |label: &str, count: Count, text: String| {
        with_history(Row(vec![piece(Tone::Dim, format!("{label:21}{text:14}"))]), model.history(count), look)
    };
    let background = model.rate(Count::BackgroundReclaimed);
    body.push(by("in the background", Count::BackgroundReclaimed, byte_rate(background)));
    body.push(by("by tasks", Count::DirectReclaimed, byte_rate(model.rate(Count::DirectReclaimed))));
    body.push(by("stalls", Count::Stalls, rate(model.rate(Count::Stalls))));
    body.push(Row::default());
    if model.sample.kswapds.is_empty() {
        body.push(Row::of(
            Tone::Dim,
            "no thread of the kernel's is to be seen here: this is a PID namespace of its own",
        ));
        return Page { head: Vec::new(), body };
    }
    let mut table = Table::new(&["thread", ">pid", ">busy", ">in all"]);
    for (thread, busy) in model.sample.kswapds.iter().zip(&model.kswapds) {
        let ran = thread.run_ns.map_or("-".into(), |ns| format!("{:.1} s", ns as f64 / 1e9));
        table.add([
            piece(Tone::Plain, format!("kswapd{}", thread.node)),
            piece(Tone::Plain, thread.pid.to_string()),
            piece(tone_of_busy(*busy), percent(*busy)),
            piece(Tone::Plain, ran),
        ]);
    }
    let (heading, rows) = table.rows(look.width);
    body.push(heading);
    body.extend(rows);
    Page { head: Vec::new(), body }
}

/// What it does, in a few words.
pub fn short(model: &Model) -> Piece {
    if let Some(missing) =
        missing(&model.answers.reclaim, "no metrics are served", "pagecrew serve, or metrics = 9752 in [reclaim]")
    {
        return missing;
    }
    let Some(found) = model.answers.reclaim.here() else { return Piece::default() };
    let gap = bytes(found.whole("gap_bytes"));
    match state(found) {
        State::Rest => piece(Tone::Good, format!("at rest, {gap} kept free ahead")),
        State::Demand => {
            piece(Tone::Good, format!("{gap} kept free ahead of {} a second", bytes(found.whole("demand_bytes"))))
        }
        State::Bounded => piece(Tone::Warn, format!("{gap} kept free ahead, the most that may be")),
        State::Scarce => piece(Tone::Warn, format!("{gap} kept free ahead, the rest is left to files")),
        State::Saturated => piece(Tone::Warn, format!("{gap} kept free ahead, kswapd works all the time")),
        State::Hurts => piece(Tone::Warn, "holds back: memory comes back from swap"),
    }
}

/// What the law has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Rest,
    Demand,
    Bounded,
    Scarce,
    Saturated,
    Hurts,
}

fn state(found: &Figures) -> State {
    let is = |name: &str| found.whole(name).unwrap_or(0) > 0;
    if is("hurts") {
        State::Hurts
    } else if is("saturated") {
        State::Saturated
    } else if is("bounded") {
        State::Bounded
    } else if is("scarce") {
        State::Scarce
    } else if found.whole("factor") == found.whole("own_factor") {
        State::Rest
    } else {
        State::Demand
    }
}

/// Why the setting is as it is.
fn why(found: &Figures) -> String {
    let number = |name: &str| found.whole(name).map_or("-".into(), |number| number.to_string());
    let demand = format!(
        "{} a second are taken, and reclaim takes {:.0} ms to come to its full rate",
        bytes(found.whole("demand_bytes")),
        found.value("lead_seconds").unwrap_or(0.0) * 1e3
    );
    match state(found) {
        State::Rest => format!(
            "what the operator's setting ({}) keeps free is enough for the demand there is",
            number("own_factor")
        ),
        State::Demand => demand,
        State::Bounded => format!("{demand}: more than the setting `most` allows"),
        State::Scarce => {
            format!("{demand}: more than a quarter of what is or could be free, and the rest is left to files")
        }
        State::Saturated => "tasks wait although kswapd works all the time: a wider gap would not help".into(),
        State::Hurts => "memory came back from swap: for half a minute the operator's setting holds".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::{figures as made_up, model};
    use super::super::super::service::Service;
    use super::super::View;
    use super::super::tests::{LOOK, text};
    use super::*;

    #[test]
    fn threads_and_the_standing() {
        let text = text(View::Reclaim, &model(2, 0), &LOOK);
        for expected in [
            "reclaim    1 GiB kept free ahead of 2 GiB a second\n",
            "why        2 GiB a second are taken, and reclaim takes 50 ms to come to its full rate\n",
            "factor                            120  vm.watermark_scale_factor as it is set.\n",
            "in the background    100 MiB/s     █",
            "kswapd1   41  25.0 %   4.8 s\n",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
    }

    #[test]
    fn every_cause_is_told() {
        let told = |more: &str, factor: u32| {
            let lines = format!("pagecrew_reclaim_factor {factor}\npagecrew_reclaim_own_factor 10\n{more}");
            let mut model = model(0, 0);
            model.answers.reclaim = made_up(Part::Reclaim, &lines);
            (short(&model).text, why(model.answers.reclaim.here().unwrap()))
        };
        assert!(told("", 10).0.starts_with("at rest") && told("", 10).1.contains("(10)"));
        assert!(told("", 90).1.contains("are taken"));
        assert!(told("pagecrew_reclaim_bounded 1\n", 250).1.contains("`most`"));
        assert!(told("pagecrew_reclaim_scarce 1\n", 250).1.contains("left to files"));
        assert!(told("pagecrew_reclaim_saturated 1\n", 250).0.contains("all the time"));
        assert!(told("pagecrew_reclaim_hurts 1\n", 10).0.contains("swap"));
        let mut model = model(0, 0);
        model.answers.reclaim = Service::Absent;
        let text = text(View::Reclaim, &model, &LOOK);
        assert!(text.contains("no metrics are served") && text.contains("PID namespace"), "{text}");
    }
}
