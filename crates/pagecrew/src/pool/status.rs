//! How a pool stands, as a JSON object.

use super::state::{Condition, Node, State};
use std::fmt::Write;
use std::path::Path;

/// What the state itself doesn't know.
pub(super) struct Facts<'f> {
    pub backing: &'f str,
    pub directory: &'f Path,
    pub limit: usize,
    pub available: u64,
}

/// The object; its fields are described in `docs/pool.md`.
pub(super) fn json(state: &State, facts: &Facts<'_>) -> String {
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = write_json(&mut text, state, facts);
    text
}

fn write_json(out: &mut String, state: &State, facts: &Facts<'_>) -> std::fmt::Result {
    let nodes = || state.nodes.iter();
    let size: usize = state.settings.sizes.values().sum();
    let filling: usize = nodes().map(|(number, node)| missing(state, *number, node)).sum();
    write!(out, "{{\"version\":1,\"pid\":{},\"backing\":{},", std::process::id(), quoted(facts.backing))?;
    write!(out, "\"directory\":{},", quoted(&facts.directory.to_string_lossy()))?;
    write!(out, "\"size\":{size},\"ready\":{},\"filling\":{filling},", state.ready())?;
    write!(out, "\"taken\":{},\"limit\":{},", state.taken_bytes(), facts.limit)?;
    write!(out, "\"floor\":{},\"available\":{},", state.settings.floor, facts.available)?;
    write!(out, "\"cpu\":{},\"state\":{},\"nodes\":[", state.settings.cpu, quoted(&condition(&state.condition)))?;
    for (index, (number, node)) in nodes().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let size = state.settings.sizes.get(number).copied().unwrap_or(0);
        let taken: usize = state.taken.values().filter(|taken| taken.node == *number).map(|taken| taken.size).sum();
        write!(out, "{comma}{{\"node\":{number},\"size\":{size},\"ready\":{},", node.filled())?;
        let unverified = node.unverified();
        write!(out, "\"here\":{},\"unverified\":{unverified},", node.filled().saturating_sub(unverified))?;
        write!(out, "\"filling\":{},\"taken\":{taken},\"files\":[", missing(state, *number, node))?;
        let mut files: Vec<_> = node.waiting.iter().map(|ready| (ready.size, ready.filled)).collect();
        files.sort_unstable_by(|one, other| other.cmp(one));
        for (index, (size, filled)) in files.iter().take(FILES_SHOWN).enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(out, "{comma}{{\"size\":{size},\"filled\":{filled}}}")?;
        }
        write!(out, "]}}")?;
    }
    write!(out, "],\"users\":[")?;
    for (index, (user, bytes, files)) in state.accounts.users().take(USERS_SHOWN).enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let quota = state.settings.quotas.of(user).map_or("null".into(), |quota| quota.to_string());
        write!(out, "{comma}{{\"user\":{user},\"taken\":{bytes},\"files\":{files},\"quota\":{quota}}}")?;
    }
    let counters = &state.counters;
    write!(out, "],\"counters\":{{\"takes\":{},\"bytes_taken\":{},", counters.takes, counters.bytes_taken)?;
    write!(out, "\"bytes_ready_at_take\":{},\"refused\":{},", counters.bytes_ready_at_take, counters.refused)?;
    write!(out, "\"released\":{},\"filled_bytes\":{},", counters.released, counters.filled_bytes)?;
    write!(out, "\"elsewhere_bytes\":{},", counters.elsewhere_bytes)?;
    write!(out, "\"given_back_bytes\":{},\"cpu_ns\":{}}}}}", counters.given_back_bytes, counters.cpu_ns)
}

/// An answer is one packet; on a machine with many nodes the sums say enough.
const FILES_SHOWN: usize = 64;
const USERS_SHOWN: usize = 100;

/// Bytes that are still to be filled on a node.
fn missing(state: &State, number: usize, node: &Node) -> usize {
    state.settings.sizes.get(&number).copied().unwrap_or(0).saturating_sub(node.filled())
}

/// In words.
pub(super) fn condition(condition: &Condition) -> String {
    match condition {
        Condition::Full => "full".into(),
        Condition::Filling => "filling".into(),
        Condition::Waiting(why) => format!("waiting: {why}"),
    }
}

/// `text` as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::super::quota::Quotas;
    use super::super::state::Settings;
    use super::*;
    use std::collections::BTreeMap;
    use std::time::Duration;

    #[test]
    fn strings_keep_their_quotes() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }

    #[test]
    fn a_pool_on_many_nodes_fits_an_answer() {
        let sizes: BTreeMap<usize, usize> = (0..16).map(|node| (node, 1 << 40)).collect();
        let settings = Settings {
            sizes,
            files: BTreeMap::new(),
            cpu: 0.25,
            floor: 1 << 30,
            below_floor: false,
            unused: Duration::ZERO,
            quotas: Quotas::default(),
        };
        let mut state = State::new(settings);
        (1..2000).for_each(|user| state.accounts.charge(user, 1 << 40, None).unwrap());
        let facts = Facts { backing: "tmpfs", directory: Path::new("/run/x"), limit: 1 << 44, available: 1 << 43 };
        let text = json(&state, &facts);
        assert!(text.len() < super::super::protocol::ANSWER_MOST - 100, "{}", text.len());
        assert!(text.starts_with("{\"version\":1,") && text.ends_with("}}"));
        assert!(text.contains("\"size\":17592186044416,\"ready\":0,\"filling\":17592186044416,"), "{text}");
    }
}
