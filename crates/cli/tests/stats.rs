//! Counters, from a process that publishes them to the summary and the table.

mod common;

use common::{directory, err, out, pagecrew};
use pagecrew::stats::{StatsPage, ZoneBytes};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Not a test: the program of the tests below, which counts as the preload library does and leaves its file behind.
#[test]
#[ignore = "started by the other tests"]
fn a_program_that_counts() {
    let Some(directory) = std::env::var_os("PAGECREW_STATS_DIR") else { return };
    let page = StatsPage::new().unwrap();
    page.set_zone_count(1);
    page.share(Path::new(&directory)).unwrap();
    page.counters.frees.add(42);
    page.counters.reused_bytes.add(3 << 30);
    page.zones[0].publish(ZoneBytes {
        reserved: 1 << 40,
        in_use: 5 << 20,
        retained_dirty: 0,
        retained_zeroed: 7 << 20,
    });
    // Waits for the end of its input, and leaves the file there without the page.
    let _ = std::io::stdin().read_line(&mut String::new());
    std::mem::forget(page);
}

fn counting_program(command: &mut Command, directory: &Path) {
    command.env("PAGECREW_STATS_DIR", directory).args(["--exact", "a_program_that_counts", "--ignored", "--quiet"]);
}

fn this_program() -> String {
    std::env::current_exe().unwrap().to_str().unwrap().to_owned()
}

fn stats_directory(name: &str) -> PathBuf {
    directory().join(name)
}

#[test]
fn the_summary_has_the_counters_that_were_left_behind_and_removes_them() {
    let (directory, file) = (stats_directory("left"), directory().join("left.json"));
    let mut command = pagecrew(&["run", "--stats", "--stats-json", file.to_str().unwrap(), &this_program()]);
    counting_program(&mut command, &directory);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = err(&output);
    assert!(output.status.success() && text.contains("reused") && text.contains("3 GiB"), "{text}");
    let document: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(document["counters"]["frees"], 42);
    assert_eq!(document["zones"][0]["in_use_bytes"], 5 << 20);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
}

#[test]
fn a_running_process_is_read_from_outside() {
    let directory = stats_directory("running");
    let mut program = Command::new(this_program());
    counting_program(&mut program, &directory);
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let pid = child.id().to_string();
    let stats = |arguments: &[&str]| {
        let output =
            pagecrew(&[&["stats"], arguments].concat()).env("PAGECREW_STATS_DIR", &directory).output().unwrap();
        (output.status.code(), out(&output))
    };
    let counts = |text: &str| {
        serde_json::from_str::<Value>(text).is_ok_and(|document| document["zones"][0]["in_use_bytes"] == 5 << 20)
    };
    let begin = std::time::Instant::now();
    while !counts(&stats(&[&pid, "--json"]).1) {
        assert!(begin.elapsed().as_secs() < 20, "nothing published");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let (_, text) = stats(&[&pid]);
    assert!(text.contains("frees") && text.contains("42") && text.contains("zone 0: 5 MiB in use"), "{text}");
    let (_, text) = stats(&[]);
    assert!(text.contains(&pid) && text.contains("7 MiB"), "{text}");
    let (_, text) = stats(&["--json"]);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()[0]["pid"], child.id());

    // Watching goes on until the process ends, and then ends well.
    let mut watch = pagecrew(&["stats", &pid, "--watch", "--json"])
        .env("PAGECREW_STATS_DIR", &directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watch.stdout.take().unwrap()));
    assert!(counts(&lines.next().unwrap().unwrap()));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(watch.wait().unwrap().success());

    // What is left of a process that has ended is not shown.
    let (status, _) = stats(&[&pid]);
    assert_eq!(status, Some(1));
    assert!(stats(&[]).1.starts_with("no process"));
}
