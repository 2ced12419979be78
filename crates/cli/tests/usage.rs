//! Wrong usage: exit statuses and messages.

mod common;

use common::{directory, err, fails, out, pagecrew};
use std::process::{Command, Stdio};

fn run(arguments: &[&str]) -> Command {
    pagecrew(&[&["run"], arguments].concat())
}

#[test]
fn help_and_version_go_to_standard_output() {
    for arguments in [&["--help"][..], &["--version"], &["run", "--help"], &["help", "doctor"]] {
        let output = pagecrew(arguments).output().unwrap();
        assert!(output.status.success() && err(&output).is_empty(), "{arguments:?}");
        assert!(out(&output).contains("agecrew"), "{arguments:?}");
    }
}

#[test]
fn the_hidden_command_is_hidden() {
    let help = out(&pagecrew(&["--help"]).output().unwrap());
    for command in ["bench-worker", "pool-fill", "serve-metrics"] {
        assert!(!help.contains(command), "{command}");
    }
}

#[test]
fn without_a_command_the_help_is_the_answer() {
    let output = pagecrew(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("Usage:"));
}

#[test]
fn nonsense_is_named() {
    fails(pagecrew(&["rnu"]), 2, &["rnu"]);
    fails(run(&[]), 2, &["PROGRAM"]);
    fails(run(&["--nonsense", "true"]), 2, &["--nonsense"]);
    fails(run(&["--retain"]), 2, &["--retain"]);
    fails(run(&["--retain", "lots", "true"]), 2, &["--retain", "lots"]);
    fails(run(&["--threshold", "1K", "true"]), 2, &["--threshold", "64K"]);
    fails(run(&["--huge-pages", "maybe", "true"]), 2, &["--huge-pages", "maybe"]);
    fails(pagecrew(&["stats", "me"]), 2, &["me"]);
    fails(pagecrew(&["bench", "no-such-bench"]), 2, &["no-such-bench"]);
    fails(pagecrew(&["bench", "trim", "--only", "cells"]), 2, &["--only", "run or reclaim"]);
    fails(pagecrew(&["bench", "run", "reclaim", "--only", "cells"]), 2, &["--only", "alone"]);
    fails(pagecrew(&["serve", "--service", "pol"]), 2, &["--service", "pol", "pool, trim and reclaim"]);
    fails(pagecrew(&["serve", "--metrics", "8.8.8.8:53"]), 2, &["--metrics", "other machines"]);
    fails(pagecrew(&["serve", "--config", "/no/such/file"]), 2, &["/no/such/file"]);
    fails(pagecrew(&["serve", "pool"]), 2, &["pool"]);
    fails(pagecrew(&["top", "--once", "--interval", "soon"]), 2, &["--interval", "soon"]);
    fails(pagecrew(&["top", "--once", "--view", "everything"]), 2, &["--view", "everything"]);
    fails(pagecrew(&["top", "--once", "--config", "/no/such/file"]), 2, &["/no/such/file"]);
}

#[test]
fn top_needs_a_terminal_or_once() {
    let mut command = pagecrew(&["top"]);
    command.stdin(Stdio::null());
    fails(command, 2, &["terminal", "--once", "--json"]);
    let output = pagecrew(&["top", "--once", "--interval", "100ms", "--json"]).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success() && err(&output).is_empty(), "{}", err(&output));
    let document: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert!(document["memory"]["total_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{document}");
    assert!(document["interval_seconds"].as_f64().is_some_and(|seconds| seconds >= 0.1), "{document}");
}

#[test]
fn a_service_with_wrong_settings_begins_nothing() {
    let (settings, place) = (directory().join("settings"), directory().join("place"));
    let serve = |text: &str| {
        std::fs::write(&settings, text).unwrap();
        let words = ["serve", "--config", settings.to_str().unwrap(), "--directory", place.to_str().unwrap()];
        pagecrew(&words)
    };
    fails(serve("[serve]\nservices = [\"pool\"]\n"), 2, &["how much is to be kept ready"]);
    fails(serve("[serve]\n\nservices = []\n"), 2, &["settings: line 3: serve.services"]);
    fails(serve("[pool]\nsize = \"64M\"\nflor = 1\n"), 2, &["settings: line 3: pool.flor", "no such setting"]);
    assert!(!place.exists());
}

#[test]
fn the_gateway_takes_a_socket_that_listens() {
    let mut command = pagecrew(&["serve-metrics", "/tmp"]);
    command.stdin(Stdio::null());
    fails(command, 1, &["standard input"]);
}

#[test]
fn a_bad_value_in_the_environment_is_an_error() {
    let mut command = run(&["true"]);
    command.env("PAGECREW_DECAY", "soon");
    fails(command, 2, &["PAGECREW_DECAY", "soon"]);
}

#[test]
fn an_unknown_name_in_the_environment_is_a_warning() {
    let output = run(&["true"]).env("PAGECREW_RETIAN", "1G").output().unwrap();
    assert!(output.status.success());
    assert_eq!(err(&output), "pagecrew: warning: PAGECREW_RETIAN is not an option of pagecrew\n");
}

#[test]
fn a_program_that_is_not_there() {
    fails(run(&["no-such-program"]), 2, &["no-such-program", "not found"]);
    fails(run(&["./no/such/program"]), 2, &["./no/such/program", "not found"]);
    fails(run(&["--", "--no-such-program"]), 2, &["--no-such-program", "not found"]);
    fails(run(&[""]), 2, &["not found"]);
    fails(run(&["--stats", "no-such-program"]), 2, &["not found"]);
}

#[test]
fn a_file_that_is_no_program() {
    let plain = directory().join("plain");
    std::fs::write(&plain, "echo\n").unwrap();
    fails(run(&[plain.to_str().unwrap()]), 2, &["plain", "not executable"]);
    fails(run(&["/"]), 2, &["not a file"]);
}

#[test]
fn a_library_that_is_not_there() {
    let mut command = run(&["true"]);
    command.env("PAGECREW_PRELOAD", "/no/such/library.so");
    fails(command, 3, &["/no/such/library.so", "PAGECREW_PRELOAD"]);
    // Without a hint it is looked for around the command: a copy of the command in a place of its own has none.
    let alone = directory().join("alone/bin/pagecrew");
    std::fs::create_dir_all(alone.parent().unwrap()).unwrap();
    common::copy(env!("CARGO_BIN_EXE_pagecrew").as_ref(), &alone);
    let mut command = Command::new(&alone);
    command.env_remove("PAGECREW_PRELOAD").args(["run", "true"]);
    fails(command, 3, &["alone/bin/libpagecrew_preload.so", "alone/lib/pagecrew/libpagecrew_preload.so"]);
}

#[test]
fn a_library_that_the_loader_could_not_use() {
    let wrong = directory().join("wrong.so");
    std::fs::write(&wrong, "not a library").unwrap();
    let mut command = run(&["true"]);
    command.env("PAGECREW_PRELOAD", &wrong);
    fails(command, 3, &["wrong.so"]);
    let blank = directory().join("a blank.so");
    std::fs::copy(common::empty_library(), &blank).unwrap();
    let mut command = run(&["true"]);
    command.env("PAGECREW_PRELOAD", &blank);
    fails(command, 3, &["blank", "LD_PRELOAD"]);
}

#[test]
fn a_summary_file_that_cannot_be_made() {
    fails(run(&["--stats-json", "/no/such/file", "true"]), 1, &["/no/such/file"]);
}

#[test]
fn statistics_of_a_process_that_has_none() {
    fails(pagecrew(&["stats", "1"]), 1, &["not running under pagecrew"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    for arguments in [&["--help"][..], &["doctor"], &["stats"], &["top", "--once", "--interval", "100ms"]] {
        let mut child = pagecrew(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(err(&output), "", "{arguments:?}");
    }
}
