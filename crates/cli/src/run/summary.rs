//! What is said about a program when it has ended.

use super::supervise::{Ending, Outcome};
use crate::figures::{object, seconds, zones};
use crate::output::printable;
use pagecrew::stats::{Snapshot, Usage};
use pagecrew::units::Bytes;
use serde_json::Value;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

/// The summary for people.
pub fn text(name: &OsStr, outcome: &Outcome) -> String {
    let name = Path::new(name).file_name().unwrap_or(name);
    let ending = match outcome.ending {
        Ending::Exited(status) => format!("exit status {status}"),
        Ending::Killed(signal) => format!("ended by signal {signal}"),
    };
    let mut text = format!("pagecrew: {} ({ending}, {})\n", printable(&name.to_string_lossy()), seconds(outcome.wall));
    let mut line = |label: &str, value: String| {
        let _ = writeln!(text, "  {label:<28}{value}");
    };
    match &outcome.snapshot {
        Some(snapshot) => memory_lines(snapshot, &mut line),
        None => line("large memory", "none used (processes that it started are not counted)".into()),
    }
    line("peak resident memory", Bytes(outcome.peak_rss).to_string());
    line("page faults", format!("{} ({} from disk)", outcome.minor_faults, outcome.major_faults));
    line("CPU time", format!("{} user, {} system", seconds(outcome.user), seconds(outcome.system)));
    text
}

fn memory_lines(snapshot: &Snapshot, line: &mut impl FnMut(&str, String)) {
    let count = |name: &str| snapshot.counter(name);
    let bytes = |name: &str| Bytes(snapshot.counter(name));
    let time = |nanoseconds: u64| seconds(Duration::from_nanos(nanoseconds));
    line("memory handed out", format!("{} in {} allocations", bytes("allocated_bytes"), count("allocations")));
    line("  reused, no page faults", share(count("reused_bytes"), count("allocated_bytes")));
    line("  from a CPU's cache", format!("{} allocations", count("cached_allocations")));
    if count("transferred_bytes") > 0 {
        line("  moved there when free", bytes("transferred_bytes").to_string());
    }
    line("  zeroing skipped", bytes("zeroing_skipped_bytes").to_string());
    line("given back in background", bytes("discarded_in_background_bytes").to_string());
    line("zeroed in background", bytes("zeroed_in_background_bytes").to_string());
    line("time not waited for", time(count("background_discard_ns") + count("background_zero_ns")));
    line("time waited for", time(count("caller_wait_ns")));
    line("stragglers bypassed", count("stragglers_bypassed").to_string());
    line("helpers started", count("helper_starts").to_string());
    if count("mapped_eligible_bytes") > 0 {
        line("its own mappings", format!("{} eligible for huge pages", bytes("mapped_eligible_bytes")));
    }
    if count("trimmed_huge_pages") > 0 {
        line("huge pages trimmed", format!("{}: {}", count("trimmed_huge_pages"), bytes("trimmed_bytes")));
    }
    if count("elsewhere_bytes") > 0 {
        line("on another NUMA node", format!("{} when it ended", bytes("elsewhere_bytes")));
    }
    if count("fallbacks") > 0 {
        line("left to the program's malloc", format!("{} large allocations", count("fallbacks")));
    }
}

fn share(part: u64, whole: u64) -> String {
    let percent = if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 };
    format!("{} ({percent:.0} %)", Bytes(part))
}

fn document(name: &OsStr, outcome: &Outcome) -> Value {
    let (status, signal) = match outcome.ending {
        Ending::Exited(status) => (Some(status), None),
        Ending::Killed(signal) => (None, Some(signal)),
    };
    let usage = Usage {
        wall_ns: outcome.wall.as_nanos() as u64,
        user_ns: outcome.user.as_nanos() as u64,
        system_ns: outcome.system.as_nanos() as u64,
        peak_rss_bytes: outcome.peak_rss,
        minor_faults: outcome.minor_faults,
        major_faults: outcome.major_faults,
    };
    let mut document = object(usage.figures());
    let more = [
        ("program", name.to_string_lossy().into()),
        ("pid", outcome.pid.into()),
        ("exit_status", status.into()),
        ("signal", signal.into()),
        ("counters", outcome.snapshot.as_ref().map(|snapshot| object(snapshot.figures())).into()),
        ("zones", outcome.snapshot.as_ref().map(zones).unwrap_or_default().into()),
    ];
    document.extend(more.map(|(key, value): (&str, Value)| (key.to_owned(), value)));
    Value::Object(document)
}

/// Writes the summary for programs: one JSON object. `counters` is null where the program used no large memory.
pub fn write_json(mut file: std::fs::File, name: &OsStr, outcome: &Outcome) -> std::io::Result<()> {
    file.write_all(format!("{:#}\n", document(name, outcome)).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::check::assert_registered;
    use pagecrew::stats::{Counters, Part, ZoneBytes};
    use serde_json::json;

    fn outcome(snapshot: Option<Snapshot>) -> Outcome {
        Outcome {
            pid: 7,
            ending: Ending::Exited(3),
            wall: Duration::from_millis(1500),
            user: Duration::from_millis(900),
            system: Duration::from_millis(200),
            peak_rss: 3 << 30,
            minor_faults: 12,
            major_faults: 1,
            snapshot,
        }
    }

    fn snapshot() -> Snapshot {
        let counters = std::array::from_fn(|index| (index as u64 + 1) << 30);
        Snapshot { counters, zones: vec![ZoneBytes { reserved: 1, in_use: 2, retained_dirty: 3, retained_zeroed: 4 }] }
    }

    #[test]
    fn the_text_has_the_figures_that_matter() {
        let text = text("/usr/bin/job".as_ref(), &outcome(Some(snapshot())));
        for expected in ["pagecrew: job (exit status 3, 1.50 s)", "reused", "(120 %)", "peak resident memory", "3 GiB"]
        {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn without_large_memory_it_says_so() {
        assert!(text("x".as_ref(), &outcome(None)).contains("none used"));
        assert_eq!(document("x".as_ref(), &outcome(None))["counters"], Value::Null);
    }

    #[test]
    fn the_document_is_what_is_registered() {
        let mut document = document("x".as_ref(), &outcome(Some(snapshot())));
        // What only `pagecrew stats` says, on machines with several nodes.
        document["nodes"] = json!([{ "resident_bytes": 0 }]);
        document["elsewhere_bytes"] = 0.into();
        assert_registered(Part::Run, &document, &["pid", "exit_status"]);
    }

    #[test]
    fn the_document_has_every_counter() {
        let document = document("x".as_ref(), &outcome(Some(snapshot())));
        for metric in Counters::METRICS {
            assert!(document["counters"][metric.key()].is_number(), "{}", metric.key());
        }
        assert_eq!((&document["wall_seconds"], &document["peak_rss_bytes"]), (&json!(1.5), &json!(3_u64 << 30)));
        assert_eq!((&document["exit_status"], &document["signal"]), (&json!(3), &Value::Null));
        assert_eq!(document["zones"][0]["retained_zeroed_bytes"], 4);
    }
}
