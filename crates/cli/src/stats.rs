//! `pagecrew stats`: the counters of running processes, from outside.

use crate::failure::Failure;
use crate::figures::{object, value, zones};
use crate::output::{print, printable, render, table};
use crate::published;
use pagecrew::stats::{self, Elsewhere, NodeMemory, ReadError, Snapshot};
use pagecrew::sys::numa_maps::{self, Spread};
use pagecrew::sys::topology;
use pagecrew::units::Bytes;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

/// Show the counters of running processes
///
/// Reads what processes under `pagecrew run` count, from outside and while they run. Without PID: a table of this user's.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew stats                   this user's processes under pagecrew
  pagecrew stats 4711              all counters of one
  pagecrew stats 4711 --watch      again each second until it ends
  pagecrew stats 4711 --json | jq .counters.frees")]
pub struct Arguments {
    /// The process
    pid: Option<u32>,
    /// JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Again each second; with PID until it ends
    #[arg(long)]
    watch: bool,
}

const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// `pagecrew stats`.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let directory = stats::directory();
    let mut shown = false;
    loop {
        let text = match arguments.pid {
            Some(pid) => match published::read(pid) {
                Ok((_, snapshot)) => one(pid, &snapshot, arguments),
                // Watching ends with the process.
                Err(ReadError::NotThere(_) | ReadError::Ended(_)) if shown => return Ok(()),
                Err(error) => return Err(Failure::Failed(error.to_string())),
            },
            None => all(&directory, arguments)?,
        };
        if shown && !arguments.json {
            print(between_tables())?;
        }
        print(&text)?;
        if !arguments.watch {
            return Ok(());
        }
        shown = true;
        std::thread::sleep(WATCH_INTERVAL);
    }
}

/// A terminal is cleared and written anew from its top; in a file, an empty line separates.
fn between_tables() -> &'static str {
    if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "\n" }
}

/// A document for programs: one line where more may follow.
fn json_text(document: &Value, watch: bool) -> String {
    if watch { format!("{document}\n") } else { format!("{document:#}\n") }
}

fn one(pid: u32, snapshot: &Snapshot, arguments: &Arguments) -> String {
    if arguments.json {
        return json_text(&document(pid, snapshot), arguments.watch);
    }
    let mut table = table(&["counter", "value", "meaning"]);
    for (metric, number) in snapshot.figures() {
        table.add_row([metric.key(), &value(metric.unit, number.unwrap_or(0)), metric.help]);
    }
    let mut text = format!("{} ({pid})\n\n{}", name(pid), render(&table));
    for (index, zone) in snapshot.zones.iter().enumerate() {
        let [reserved, in_use, dirty, zeroed] =
            [zone.reserved, zone.in_use, zone.retained_dirty, zone.retained_zeroed].map(Bytes);
        text += &format!(
            "\nzone {index}: {in_use} in use, {zeroed} retained zeroed, {dirty} retained dirty, {reserved} reserved\n"
        );
    }
    if let Some(spread) = spread(pid) {
        text += "\n";
        for (node, bytes) in &spread.nodes {
            let _ = writeln!(text, "node {node}: {} of the whole process", Bytes(*bytes));
        }
        let _ = writeln!(text, "on another node than asked for: {}", Bytes(spread.elsewhere));
    }
    text
}

/// Where the memory of the process lies, on a machine with several nodes; `None` where the kernel doesn't say.
fn spread(pid: u32) -> Option<Spread> {
    (topology::nodes_with_memory().len() > 1).then(|| numa_maps::read(Some(pid), None).ok())?
}

fn document(pid: u32, snapshot: &Snapshot) -> Value {
    let mut document =
        json!({ "pid": pid, "name": name(pid), "counters": object(snapshot.figures()), "zones": zones(snapshot) });
    if let (Some(spread), Some(members)) = (spread(pid), document.as_object_mut()) {
        members.extend(places(&spread));
    }
    document
}

/// The members of the document about where the memory lies.
fn places(spread: &Spread) -> Map<String, Value> {
    let node = |(node, bytes): (&usize, &u64)| {
        let mut memory = object(NodeMemory { resident_bytes: *bytes }.figures());
        memory.insert("node".into(), (*node).into());
        Value::Object(memory)
    };
    let mut members = object(Elsewhere { elsewhere_bytes: spread.elsewhere }.figures());
    members.insert("nodes".into(), spread.nodes.iter().map(node).collect());
    members
}

fn all(directory: &Path, arguments: &Arguments) -> Result<String, Failure> {
    let processes = processes(directory)?;
    if arguments.json {
        let documents = processes.iter().map(|(pid, snapshot)| document(*pid, snapshot)).collect();
        return Ok(json_text(&Value::Array(documents), arguments.watch));
    }
    if processes.is_empty() {
        return Ok("no process of this user is using large memory under pagecrew\n".into());
    }
    let mut table = table(&["pid", "name", "in use", "retained", "reused", "in background"]);
    for (pid, snapshot) in processes {
        let now = snapshot.bytes();
        let background =
            snapshot.counter("discarded_in_background_bytes") + snapshot.counter("zeroed_in_background_bytes");
        let sizes =
            [now.in_use, now.retained_dirty + now.retained_zeroed, snapshot.counter("reused_bytes"), background];
        let sizes = sizes.map(|size| Bytes(size).to_string());
        table.add_row([vec![pid.to_string(), name(pid)], sizes.to_vec()].concat());
    }
    Ok(render(&table))
}

/// Every process that publishes in `directory`, by number. A process may end between the listing and the reading.
fn processes(directory: &Path) -> Result<Vec<(u32, Snapshot)>, Failure> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::Failed(format!("{}: {error}", directory.display()))),
    };
    let mut pids: Vec<u32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    Ok(pids.into_iter().filter_map(|pid| Some((pid, stats::read(directory, pid).ok()?))).collect())
}

/// The process's name (15 bytes of it).
fn name(pid: u32) -> String {
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    printable(String::from_utf8_lossy(&name).trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(json: bool) -> Arguments {
        Arguments { pid: None, json, watch: false }
    }

    #[test]
    fn a_process_that_publishes_is_listed() {
        let directory = tempfile::tempdir().unwrap();
        let page = stats::StatsPage::new().unwrap();
        page.share(directory.path()).unwrap();
        page.counters.reused_bytes.add(5 << 20);
        std::fs::write(directory.path().join("README"), "").unwrap();
        let text = all(directory.path(), &arguments(false)).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains(&std::process::id().to_string()) && text.contains("5 MiB"), "{text}");
        let text = all(directory.path(), &arguments(true)).unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document[0]["counters"]["reused_bytes"], 5 << 20);
        page.unshare();
        assert!(all(directory.path(), &arguments(false)).unwrap().starts_with("no process"));
    }

    #[test]
    fn places_are_told_by_node() {
        let spread = Spread { nodes: [(0, 5), (2, 7)].into(), elsewhere: 3 };
        let expected = json!({
            "nodes": [{ "node": 0, "resident_bytes": 5 }, { "node": 2, "resident_bytes": 7 }],
            "elsewhere_bytes": 3,
        });
        assert_eq!(Value::Object(places(&spread)), expected);
    }

    #[test]
    fn a_missing_directory_means_no_process() {
        assert_eq!(processes(Path::new("/no/such/directory")).unwrap(), []);
    }
}
