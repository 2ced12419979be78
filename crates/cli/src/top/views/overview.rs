//! Everything in a few lines.

use super::super::model::{Count, Model};
use super::super::text::{Row, Tone, byte_rate, bytes, history, marks, percent, piece};
use super::stalls::{number, tone_of_busy, tone_of_pressure, with_history};
use super::{Look, Page, machine, pool, programs, reclaim, trim};
use pagecrew::sys::psi::Resource;

/// More nodes than this have a view of their own.
const NODES_MOST: usize = 4;

pub fn page(model: &Model, look: &Look) -> Page {
    let mut body = vec![machine::memory(model)];
    for node in model.sample.nodes.iter().take(NODES_MOST) {
        let state = machine::standing(node);
        let mut pieces = vec![piece(Tone::Plain, format!("{:>8} free  ", bytes(Some(node.memory.free))))];
        if let Some(watermarks) = node.watermarks {
            let bar = marks(node.memory.free, watermarks, look.width.saturating_sub(12 + 15 + 27).clamp(6, 40));
            pieces.push(piece(state.tone, format!("{bar}  ")));
        }
        pieces.push(state);
        body.push(Row::about(&format!("node {}", node.memory.number), pieces));
    }
    if model.sample.nodes.len() > NODES_MOST {
        body.push(Row::about(
            "",
            [piece(Tone::Dim, format!("and {} nodes more (2)", model.sample.nodes.len() - NODES_MOST))],
        ));
    }
    body.push(pressure(model, look));
    body.push(with_history(Row::about("stalls", [number(model, Count::Stalls)]), model.history(Count::Stalls), look));
    let reclaimed = Row::about(
        "reclaimed",
        [
            piece(Tone::Plain, format!("{} in the background, ", byte_rate(model.rate(Count::BackgroundReclaimed)))),
            piece(
                number(model, Count::DirectReclaimed).tone,
                format!("{} by tasks", byte_rate(model.rate(Count::DirectReclaimed))),
            ),
            piece(tone_of_busy(model.kswapd.last()), format!("; kswapd busy {}", percent(model.kswapd.last()))),
        ],
    );
    body.push(reclaimed);
    let part =
        |text: &str, count: Count| piece(number(model, count).tone, format!("{text}{}", byte_rate(model.rate(count))));
    body.push(Row::about(
        "swap",
        [part("", Count::SwappedIn), part(" in, ", Count::SwappedOut), piece(Tone::Plain, " out")],
    ));
    body.push(Row::about(
        "refaults",
        [
            part("", Count::RefaultedFile),
            part(" of files, ", Count::RefaultedAnon),
            piece(Tone::Plain, " of anonymous memory"),
        ],
    ));
    body.push(Row::default());
    body.push(programs::summary(model));
    body.push(trim::candidates_in_short(model));
    body.push(Row::about("trim", [trim::short(model)]));
    body.push(Row::about("pool", [pool::short(model)]));
    body.push(Row::about("reclaim", [reclaim::short(model)]));
    let factor = model.sample.factor.map_or("not known".into(), |factor| factor.to_string());
    body.push(Row::about("gap", [piece(Tone::Plain, format!("vm.watermark_scale_factor {factor}"))]));
    Page { head: Vec::new(), body }
}

/// What tasks wait for, in a line.
fn pressure(model: &Model, look: &Look) -> Row {
    let mut pieces = Vec::new();
    for (index, resource) in Resource::ALL.into_iter().enumerate() {
        let Some(pressure) = &model.sample.pressure[index] else { continue };
        let between = if pieces.is_empty() { "" } else { ", " };
        let now = model.some[index].last().unwrap_or(pressure.some.avg10);
        pieces.push(piece(tone_of_pressure(Some(now)), format!("{between}{} {}", resource.name(), percent(Some(now)))));
    }
    if pieces.is_empty() {
        return Row::about("pressure", [piece(Tone::Dim, "not known: it is off")]);
    }
    if model.some[0].len() > 2 {
        pieces.push(piece(Tone::Dim, "  memory ".to_owned() + &history(model.some[0].iter(), 20, look.unicode)));
    }
    Row::about("pressure", pieces)
}

#[cfg(test)]
mod tests {
    use super::super::super::model::Model;
    use super::super::super::model::made_up::model;
    use super::super::View;
    use super::super::tests::{LOOK, text};

    #[test]
    fn a_machine_at_a_glance_fits_a_small_terminal() {
        let text = text(View::Overview, &model(2, 3), &LOOK);
        for expected in [
            "memory     20 GiB available of 64 GiB, 1 GiB of 8 GiB swap used\n",
            "node 0          0 B free  [....",
            "below min: tasks reclaim\n",
            "pressure   memory 2.0 %, cpu 2.0 %, io 2.0 %",
            "stalls     5.0/s ",
            "reclaimed  100 MiB/s in the background, 1 MiB/s by tasks; kswapd busy 25.0 %\n",
            "swap       0 B/s in, 4 KiB/s out\n",
            "refaults   8 MiB/s of files, 0 B/s of anonymous memory\n",
            "programs   3: 6 MiB in use, 2.2 MiB retained; 3 KiB/s in the background\n",
            "pool       12 GiB of 16 GiB ready, 8 GiB taken: filling\n",
            "trim       3 processes, 1 GiB gone so far\n",
            "reclaim    1 GiB kept free ahead of 2 GiB a second\n",
            "gap        vm.watermark_scale_factor 10\n",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
        assert!(text.lines().count() <= 20, "{text}");
    }

    #[test]
    fn many_nodes_are_left_to_their_view() {
        let text = text(View::Overview, &model(8, 0), &LOOK);
        assert!(text.contains("and 4 nodes more (2)") && text.lines().count() <= 21, "{text}");
        assert!(super::page(&Model::default(), &LOOK).body.len() > 8);
    }
}
