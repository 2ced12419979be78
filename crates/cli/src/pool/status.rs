//! `pagecrew pool status`: how it stands, for people and for programs.

use super::{Place, failure};
use crate::failure::Failure;
use crate::output::{print, printable, render, table};
use crate::signals::SignalSet;
use nix::unistd::{Uid, User};
use pagecrew::units::Bytes;
use serde::Deserialize;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

/// Say what is ready, being filled and taken
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool status
  pagecrew pool status --watch            again each second
  pagecrew pool status --json | jq '.ready, .taken'")]
pub struct Arguments {
    /// JSON instead of a table, sizes in bytes
    #[arg(long)]
    json: bool,
    /// Again each second, until it is stopped
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    place: Place,
}

const WATCH_INTERVAL: Duration = Duration::from_secs(1);

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = arguments.place.connect()?;
    let signals = SignalSet::of(&[libc::SIGINT, libc::SIGTERM]);
    if arguments.watch {
        signals.block();
    }
    let mut shown = false;
    loop {
        let json = client.status().map_err(failure)?;
        if shown && !arguments.json {
            print(if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "\n" })?;
        }
        print(&if arguments.json { format!("{json}\n") } else { text(&json)? })?;
        shown = true;
        if !arguments.watch || signals.wait_for(WATCH_INTERVAL).is_some() {
            return Ok(());
        }
    }
}

/// How much is ready and how much is kept, in all or on a node, by what a server has answered.
pub fn ready_of(json: &str, node: Option<usize>) -> Result<(u64, u64), Failure> {
    let status: Status = read(json)?;
    let Some(number) = node else { return Ok((status.ready, status.size)) };
    match status.nodes.iter().find(|node| node.node == number) {
        Some(node) => Ok((node.ready, node.size)),
        None => Err(Failure::Usage(format!("the pool has no node {number}"))),
    }
}

/// The server's answer. What a newer one adds is for newer commands.
#[derive(Deserialize)]
struct Status {
    pid: u32,
    backing: String,
    directory: String,
    size: u64,
    ready: u64,
    filling: u64,
    taken: u64,
    limit: u64,
    available: u64,
    state: String,
    nodes: Vec<Node>,
    users: Vec<Holder>,
    counters: Counters,
}

#[derive(Deserialize)]
struct Node {
    node: usize,
    size: u64,
    ready: u64,
    /// Of what is ready; a server of an older version says neither.
    #[serde(default)]
    here: u64,
    #[serde(default)]
    unverified: u64,
    filling: u64,
    taken: u64,
    files: Vec<Waiting>,
}

#[derive(Deserialize)]
struct Waiting {
    size: u64,
    filled: u64,
}

#[derive(Deserialize)]
struct Holder {
    user: u32,
    taken: u64,
    files: u64,
    quota: Option<u64>,
}

#[derive(Deserialize)]
struct Counters {
    takes: u64,
    bytes_taken: u64,
    bytes_ready_at_take: u64,
    refused: u64,
    #[serde(default)]
    elsewhere_bytes: u64,
}

fn read(json: &str) -> Result<Status, Failure> {
    serde_json::from_str(json).map_err(|error| Failure::Failed(format!("the pool's answer '{json}': {error}")))
}

fn text(json: &str) -> Result<String, Failure> {
    let status = read(json)?;
    let mut text = format!(
        "pool at {} ({}, served by process {}): {}\n",
        printable(&status.directory),
        printable(&status.backing),
        status.pid,
        printable(&status.state)
    );
    let sizes = [status.ready, status.size, status.taken, status.limit, status.available].map(Bytes);
    let [ready, size, taken, limit, available] = sizes;
    let filling = if status.filling > 0 { format!(", {} to be filled", Bytes(status.filling)) } else { String::new() };
    // Writing to a string can't fail.
    let _ = writeln!(text, "{ready} of {size} ready{filling}; {taken} taken; {limit} at most, {available} available");
    text += &counts(&status.counters);
    if status.counters.elsewhere_bytes > 0 {
        let _ = writeln!(text, "{} came from other nodes and went back", Bytes(status.counters.elsewhere_bytes));
    }

    let mut nodes = table(&["node", "size", "ready", "there", "filling", "taken", "files"]);
    for node in &status.nodes {
        let [size, ready, filling, taken] =
            [node.size, node.ready, node.filling, node.taken].map(|size| Bytes(size).to_string());
        let there = match node.unverified {
            0 => Bytes(node.here).to_string(),
            unknown => format!("{} ({} not verified)", Bytes(node.here), Bytes(unknown)),
        };
        nodes.add_row([node.node.to_string(), size, ready, there, filling, taken, files(&node.files)]);
    }
    text += &format!("\n{}", render(&nodes));
    if !status.users.is_empty() {
        let mut users = table(&["user", "taken", "files", "quota"]);
        for user in &status.users {
            let quota = user.quota.map_or("-".to_owned(), |quota| Bytes(quota).to_string());
            users.add_row([name(user.user), Bytes(user.taken).to_string(), user.files.to_string(), quota]);
        }
        text += &format!("\n{}", render(&users));
    }
    Ok(text)
}

fn counts(counters: &Counters) -> String {
    let refused = if counters.refused > 0 { format!("; {} refused", counters.refused) } else { String::new() };
    match counters.bytes_taken {
        0 => format!("nothing was asked for so far{refused}\n"),
        bytes => {
            let percent = 100.0 * counters.bytes_ready_at_take as f64 / bytes as f64;
            let (takes, bytes) = (counters.takes, Bytes(bytes));
            format!("asked for so far: {bytes} in {takes} files, of which {percent:.0} % were ready{refused}\n")
        }
    }
}

/// The files that wait: those that are filled as `2x 8 GiB`, the others with how far they are.
fn files(files: &[Waiting]) -> String {
    let mut groups: Vec<(u64, u64, u64)> = Vec::new();
    for file in files {
        match groups.iter_mut().find(|(size, filled, _)| (*size, *filled) == (file.size, file.filled)) {
            Some((_, _, count)) => *count += 1,
            None => groups.push((file.size, file.filled, 1)),
        }
    }
    let show = |&(size, filled, count): &(u64, u64, u64)| match Bytes(size) {
        all if filled == size => format!("{count}x {all}"),
        all => format!("{count}x {all} ({} filled)", Bytes(filled)),
    };
    groups.iter().map(show).collect::<Vec<_>>().join(", ")
}

fn name(user: u32) -> String {
    match User::from_uid(Uid::from_raw(user)) {
        Ok(Some(user)) => printable(&user.name),
        Ok(None) | Err(_) => user.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"version":1,"pid":4711,"backing":"tmpfs","directory":"/run/p","size":17179869184,
        "ready":12884901888,"filling":4294967296,"taken":8589934592,"limit":34359738368,"floor":1,"available":2147483648,
        "cpu":0.25,"state":"filling","nodes":[{"node":0,"size":17179869184,"ready":12884901888,"here":10737418240,"unverified":2147483648,"filling":4294967296,
        "taken":8589934592,"files":[{"size":4294967296,"filled":4294967296},{"size":4294967296,"filled":4294967296},
        {"size":8589934592,"filled":4294967296}]}],"users":[{"user":0,"taken":8589934592,"files":1,"quota":null},
        {"user":3999999999,"taken":2097152,"files":2,"quota":4194304}],"counters":{"takes":3,"bytes_taken":1000,
        "bytes_ready_at_take":980,"refused":7,"released":1,"filled_bytes":1,"given_back_bytes":0,"elsewhere_bytes":2097152,"cpu_ns":5}}"#;

    #[test]
    fn a_pool_at_a_glance() {
        let text = text(JSON).unwrap();
        for expected in [
            "pool at /run/p (tmpfs, served by process 4711): filling\n",
            "12 GiB of 16 GiB ready, 4 GiB to be filled; 8 GiB taken; 32 GiB at most, 2 GiB available\n",
            "in 3 files, of which 98 % were ready; 7 refused\n",
            "2x 4 GiB, 1x 8 GiB (4 GiB filled)\n",
            "10 GiB (2 GiB not verified)",
            "2 MiB came from other nodes and went back\n",
            "root ",
            "3999999999 ",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
        assert!(text.lines().all(|line| line == line.trim_end()));
    }

    #[test]
    fn a_pool_that_nobody_has_asked() {
        let json = JSON
            .replace("\"bytes_taken\":1000", "\"bytes_taken\":0")
            .replace("\"filling\":4294967296", "\"filling\":0");
        let text = text(&json).unwrap();
        assert!(text.contains("nothing was asked for so far; 7 refused") && !text.contains("to be filled"), "{text}");
    }

    #[test]
    fn what_is_no_status_is_a_failure() {
        assert!(matches!(text("{}"), Err(Failure::Failed(_))));
        assert!(matches!(text("x\u{1b}"), Err(Failure::Failed(_))));
    }
}
