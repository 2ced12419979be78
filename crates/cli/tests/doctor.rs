//! `doctor` as a whole.

mod common;

use common::{out, pagecrew};
use serde_json::Value;

#[test]
fn the_table_and_the_document_agree() {
    let (table, document) =
        (pagecrew(&["doctor"]).output().unwrap(), pagecrew(&["doctor", "--json"]).output().unwrap());
    assert_eq!(table.status.code(), Some(0), "{}", out(&table));
    let (table, document) = (out(&table), serde_json::from_slice::<Value>(&document.stdout).unwrap());
    assert_eq!(document["ready"], true);
    for check in document["checks"].as_array().unwrap() {
        assert!(table.contains(check["name"].as_str().unwrap()), "{check}");
        assert!(["ok", "off", "missing"].contains(&check["state"].as_str().unwrap()), "{check}");
    }
}

#[test]
fn without_the_library_run_is_not_possible() {
    let output = pagecrew(&["doctor"]).env("PAGECREW_PRELOAD", "/no/such/library.so").output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(out(&output).contains("/no/such/library.so"));
}

#[test]
fn an_address_space_limit_is_seen() {
    let mut command = std::process::Command::new("sh");
    let command = command.args(["-c", "ulimit -v 1000000; exec \"$0\" doctor", env!("CARGO_BIN_EXE_pagecrew")]);
    let text = out(&command.env("PAGECREW_PRELOAD", common::empty_library()).output().unwrap());
    assert!(text.contains("limit on address space (off)"), "{text}");
}
