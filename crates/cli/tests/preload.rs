//! The command together with the real preload library, where that has been built into the same directory
//! (`cargo build -p pagecrew-preload`).

mod common;

use common::{compile, directory, err, pagecrew};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Allocates, fills and frees 64 MiB, and once more as zeroes.
const LARGE: &str = r#"
#include <stdlib.h>
#include <string.h>
int main(void) {
    size_t size = 64 << 20;
    for (int round = 0; round < 4; round++) {
        char *block = malloc(size);
        if (!block) return 1;
        memset(block, 1, size);
        free(block);
        block = calloc(1, size);
        if (!block || block[size / 2]) return 2;
        free(block);
    }
    return 6;
}
"#;

fn library() -> Option<PathBuf> {
    let library = Path::new(env!("CARGO_BIN_EXE_pagecrew")).with_file_name("libpagecrew_preload.so");
    let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().ok()?;
    let built = String::from_utf8_lossy(&symbols.stdout).lines().any(|line| line.ends_with(" malloc"));
    built.then_some(library)
}

#[test]
fn a_program_with_large_memory_is_counted() {
    let Some(library) = library() else {
        eprintln!("left out: the preload library has not been built");
        return;
    };
    let (file, counters) = (directory().join("large.json"), directory().join("counters"));
    let program = compile("large", LARGE, &["-O0"]);
    let output = pagecrew(&["run", "--stats", "--stats-json", file.to_str().unwrap(), program.to_str().unwrap()])
        .env("PAGECREW_PRELOAD", library)
        .env("PAGECREW_STATS_DIR", &counters)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", err(&output));
    let document: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let counter = |name: &str| document["counters"][name].as_u64().unwrap();
    assert_eq!((counter("allocations"), counter("frees")), (8, 8), "{document:#}");
    assert!(counter("reused_bytes") >= 64 << 20, "{document:#}");
    assert!(err(&output).contains("memory handed out"), "{}", err(&output));
    assert_eq!(std::fs::read_dir(&counters).unwrap().count(), 0, "the counters were left behind");
}
