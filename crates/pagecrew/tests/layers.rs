//! The rules of `ARCHITECTURE.md` that can be checked: a layer uses only layers that stand before it, and policy is free of
//! system calls and of `unsafe`.

use std::path::{Path, PathBuf};

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The layers in the order in which `lib.rs` declares them.
fn layers() -> Vec<String> {
    let text = std::fs::read_to_string(source().join("lib.rs")).unwrap();
    text.lines().filter_map(|line| Some(line.strip_prefix("pub mod ")?.strip_suffix(';')?.to_owned())).collect()
}

fn files(layer: &str) -> Vec<PathBuf> {
    let single = source().join(format!("{layer}.rs"));
    if single.exists() {
        return vec![single];
    }
    below(&source().join(layer))
}

fn below(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .flat_map(|path| if path.is_dir() { below(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|kind| kind == "rs"))
        .collect()
}

/// The code of a file, without its comments.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// The layers that a file names as `crate::layer`.
fn uses(path: &Path) -> Vec<String> {
    code(path)
        .split("crate::")
        .skip(1)
        .map(|rest| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect())
        .collect()
}

#[test]
fn a_layer_uses_only_layers_before_it() {
    let layers = layers();
    assert!(layers.len() >= 5, "{layers:?}");
    for (index, layer) in layers.iter().enumerate() {
        for path in files(layer) {
            for used in uses(&path) {
                let place = layers.iter().position(|other| *other == used);
                assert!(
                    place.is_some_and(|place| place <= index),
                    "{} uses {used}, which does not stand before {layer}",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn the_architecture_names_the_layers_in_this_order() {
    let text = std::fs::read_to_string(source().join("../../../ARCHITECTURE.md")).unwrap();
    let mut from = 0;
    for layer in layers() {
        let found = text[from..].find(&format!("| `{layer}`"));
        from +=
            found.unwrap_or_else(|| panic!("{layer} is missing from ARCHITECTURE.md, or stands in the wrong place"));
    }
}

#[test]
fn policy_and_bookkeeping_need_neither_unsafe_nor_the_system() {
    const FILES: [&str; 48] = [
        "units.rs",
        "crew/governor.rs",
        "crew/job.rs",
        "region/churn.rs",
        "region/lanes.rs",
        "region/limits.rs",
        "region/reuse.rs",
        "region/options.rs",
        "region/policy.rs",
        "region/spans.rs",
        "mapping/policy.rs",
        "mapping/table.rs",
        "frame/area.rs",
        "frame/tree.rs",
        "frame/policy.rs",
        "control/arbiter.rs",
        "control/backoff.rs",
        "control/budget.rs",
        "control/lead.rs",
        "control/pressure.rs",
        "control/repeats.rs",
        "control/supervision.rs",
        "group/held.rs",
        "group/relief.rs",
        "group/rushes.rs",
        "trim/credit.rs",
        "trim/history.rs",
        "trim/options.rs",
        "trim/plan.rs",
        "trim/rest.rs",
        "trim/sample.rs",
        "trim/shortage.rs",
        "pool/broker.rs",
        "pool/capacity.rs",
        "pool/demand.rs",
        "pool/gate.rs",
        "pool/ledger.rs",
        "pool/protocol.rs",
        "pool/quota.rs",
        "pool/rest.rs",
        "pool/state.rs",
        "pool/stock.rs",
        "pool/turns.rs",
        "reclaim/group_plan.rs",
        "reclaim/group_turns.rs",
        "reclaim/looks.rs",
        "reclaim/plan.rs",
        "reclaim/watermarks.rs",
    ];
    for file in FILES {
        let code = code(&source().join(file));
        for forbidden in ["unsafe", "libc::", "std::fs", "Instant::now"] {
            assert!(!code.contains(forbidden), "{file} has {forbidden}");
        }
    }
}
