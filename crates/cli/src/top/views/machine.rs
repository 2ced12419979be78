//! Rows about the machine that more than one view has.

use super::super::model::Model;
use super::super::sample::NodeNow;
use super::super::text::{Piece, Row, Tone, bytes, piece};

/// The machine's memory and swap.
pub fn memory(model: &Model) -> Row {
    let Some(memory) = model.sample.memory else {
        return Row::about("memory", [piece(Tone::Warn, "/proc/meminfo can't be read")]);
    };
    let mut pieces = vec![piece(
        Tone::Plain,
        format!("{} available of {}", bytes(Some(memory.available)), bytes(Some(memory.total))),
    )];
    let used = memory.swap.saturating_sub(memory.free_swap);
    pieces.push(match memory.swap {
        0 => piece(Tone::Dim, ", no swap"),
        swap => piece(
            if used > 0 { Tone::Warn } else { Tone::Plain },
            format!(", {} of {} swap used", bytes(Some(used)), bytes(Some(swap))),
        ),
    });
    Row::about("memory", pieces)
}

/// What the place of a node's free memory between the watermarks means.
pub fn standing(node: &NodeNow) -> Piece {
    match node.watermarks {
        None => piece(Tone::Dim, "watermarks not known"),
        Some([min, _, _]) if node.memory.free < min => piece(Tone::Bad, "below min: tasks reclaim"),
        Some([_, low, _]) if node.memory.free < low => piece(Tone::Warn, "below low: kswapd reclaims"),
        Some([_, _, high]) if node.memory.free < high => piece(Tone::Good, "between low and high"),
        Some(_) => piece(Tone::Good, "above high"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::model;
    use super::*;

    #[test]
    fn free_memory_between_the_watermarks() {
        let node = |free| {
            let mut node = NodeNow { watermarks: Some([10, 20, 30]), ..NodeNow::default() };
            node.memory.free = free;
            standing(&node)
        };
        assert_eq!([node(0), node(9)].map(|piece| piece.tone), [Tone::Bad; 2]);
        assert!(node(10).text.contains("kswapd") && node(19).text.contains("kswapd"));
        assert_eq!((node(20).text.as_str(), node(30).text.as_str()), ("between low and high", "above high"));
        assert_eq!(standing(&NodeNow::default()).text, "watermarks not known");
    }

    #[test]
    fn memory_with_and_without_swap() {
        let mut model = model(1, 0);
        assert_eq!(memory(&model).text(), "memory     20 GiB available of 64 GiB, 1 GiB of 8 GiB swap used");
        model.sample.memory.as_mut().unwrap().swap = 0;
        assert_eq!(memory(&model).text(), "memory     20 GiB available of 64 GiB, no swap");
        model.sample.memory = None;
        assert!(memory(&model).text().contains("can't be read"));
    }
}
