//! What the tests of the command share.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// A directory for the files of this test run.
pub fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        // The tests of one file run in one process and all end with it.
        extern "C" fn remove() {
            let _ = std::fs::remove_dir_all(directory_if_made());
        }
        // SAFETY: `remove` does not unwind: it only removes files and ignores errors.
        unsafe { libc::atexit(remove) };
        directory
    })
}

fn directory_if_made() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{}", std::process::id()))
}

/// Compiles `source` with gcc and `flags` into a file called `name`.
pub fn compile(name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let input = directory().join(format!("{name}.c"));
    std::fs::write(&input, source).unwrap();
    let file = directory().join(name);
    let output = Command::new("gcc").arg("-o").arg(&file).arg(&input).args(flags).output().expect("gcc is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    file
}

/// A program that does nothing.
pub const NOTHING: &str = "int main(void) { return 0; }\n";

/// Copies a file that is to be run.
///
/// By a process of its own: nothing is run that anybody has open for writing, and the test beside this one, when it starts
/// a program, has a copy of every descriptor that is open here until that program runs.
pub fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success(), "cp {from:?} {to:?}");
}

/// Writes an executable file.
pub fn executable(name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let written = directory().join(format!("{name}.written"));
    std::fs::write(&written, contents).unwrap();
    let file = directory().join(name);
    copy(&written, &file);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// A library that does nothing in place of the preload library: these tests are about the command.
pub fn empty_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| compile("empty.so", "", &["-shared", "-fPIC"]))
}

/// The command with `arguments`, in an environment without settings of ours.
pub fn pagecrew(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagecrew"));
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.to_string_lossy().starts_with("PAGECREW_")) {
        command.env_remove(name);
    }
    command.env_remove("LD_PRELOAD").env("PAGECREW_PRELOAD", empty_library()).args(arguments);
    command
}

/// Standard output.
pub fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error.
pub fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that `command` fails with exit status `status` and one line on standard error that contains every one of `words`.
#[track_caller]
pub fn fails(mut command: Command, status: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let line = err(&output);
    assert_eq!(output.status.code(), Some(status), "{line}");
    assert!(line.starts_with("pagecrew: ") && line.lines().count() == 1, "not one line: {line}");
    for word in words {
        assert!(line.contains(word), "no '{word}' in: {line}");
    }
}

/// What is answered to a scraper at `stream`: the exposition.
pub fn scrape(mut stream: impl std::io::Read + std::io::Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert!(text.ends_with("# EOF\n"), "{text}");
    text.to_owned()
}

/// The address in what a server of metrics has said.
pub fn metrics_port(said: &str) -> std::net::SocketAddr {
    let address = said.split("metrics at http://").nth(1).and_then(|rest| rest.split('/').next());
    address.unwrap_or_else(|| panic!("no address in {said}")).parse().unwrap()
}
