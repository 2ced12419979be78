//! The nodes: what they have, and where their free memory stands between the watermarks.

use super::super::model::Model;
use super::super::text::{Row, Table, Tone, bytes, marks, piece};
use super::{Look, Page, machine, reclaim};

pub fn page(model: &Model, look: &Look) -> Page {
    let factor = model.sample.factor.map_or("not known".into(), |factor| factor.to_string());
    let mut head = vec![
        machine::memory(model),
        Row::about("gap", [piece(Tone::Plain, format!("vm.watermark_scale_factor {factor}"))]),
        Row::about("reclaim", [reclaim::short(model)]),
        Row::default(),
    ];
    if model.sample.nodes.is_empty() {
        return Page {
            head,
            body: vec![Row::of(Tone::Warn, "neither /sys/devices/system/node nor /proc/meminfo can be read")],
        };
    }
    let mut table = Table::new(&[
        "node", ">total", ">free", ">min", ">low", ">high", ">file", ">anon", ">slab", ">huge", ">shared",
    ]);
    let mut bars = Vec::new();
    for node in &model.sample.nodes {
        let memory = &node.memory;
        let [min, low, high] = node.watermarks.map_or([None; 3], |marks| marks.map(Some));
        let sizes = [
            Some(memory.total),
            Some(memory.free),
            min,
            low,
            high,
            memory.file,
            memory.anon,
            memory.slab,
            memory.anon_huge,
            memory.shmem,
        ];
        let cells = sizes.map(|size| piece(Tone::Plain, bytes(size)));
        table.add([piece(Tone::Plain, memory.number.to_string())].into_iter().chain(cells));
        let Some(watermarks) = node.watermarks else { continue };
        let state = machine::standing(node);
        let bar = marks(memory.free, watermarks, look.width.saturating_sub(12 + 27).clamp(6, 60));
        bars.push(Row(vec![
            piece(Tone::Dim, format!("node {:<5}", memory.number)),
            piece(state.tone, bar),
            piece(Tone::Plain, "  "),
            state,
        ]));
    }
    let (heading, rows) = table.rows(look.width);
    head.push(heading);
    let mut body = rows;
    if !bars.is_empty() {
        body.push(Row::default());
        body.push(Row::of(Tone::Dim, "Free memory (=) from 0 to twice the high watermark: m min, l low, h high"));
        body.extend(bars);
    }
    Page { head, body }
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::model;
    use super::super::View;
    use super::super::tests::{LOOK, text};

    #[test]
    fn each_node_has_a_row_and_a_bar() {
        let text = text(View::Nodes, &model(8, 0), &LOOK);
        assert_eq!(text.lines().filter(|line| line.contains("64 GiB")).count(), 9, "{text}");
        assert!(
            text.contains("7     64 GiB  350 MiB  64 MiB  128 MiB  192 MiB  20 GiB  30 GiB  2 GiB  20 GiB\n"),
            "{text}"
        );
        let bar = |node: &str| text.lines().find(|line| line.starts_with(node)).unwrap();
        assert!(bar("node 0 ").ends_with("below min: tasks reclaim") && bar("node 0 ").contains("[......"), "{text}");
        assert!(bar("node 2 ").ends_with("below low: kswapd reclaims"), "{text}");
        assert!(bar("node 3 ").ends_with("between low and high"), "{text}");
        assert!(bar("node 7 ").ends_with("above high"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_machine_without_nodes_or_watermarks() {
        assert!(text(View::Nodes, &model(0, 0), &LOOK).contains("can be read"));
        let mut model = model(1, 0);
        model.sample.nodes[0].watermarks = None;
        model.sample.factor = None;
        let text = text(View::Nodes, &model, &LOOK);
        assert!(text.contains("vm.watermark_scale_factor not known") && !text.contains('['), "{text}");
    }
}
