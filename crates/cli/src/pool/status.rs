//! `pagecrew pool status`: how it stands, for people and for programs.

use super::{ServerAddress, failure};
use crate::failure::Failure;
use crate::output::{print, printable, render, table};
use crate::signals::SignalSet;
use nix::unistd::{Uid, User};
use pagecrew::pool::{Client, STATUS_SHOWN};
use pagecrew::units::Bytes;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

/// Say what is ready, being filled and taken
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool status
  pagecrew pool status --watch            again each second
  pagecrew pool status --json | jq '.ready_bytes, .taken_bytes'")]
pub struct Arguments {
    /// JSON instead of a table, sizes in bytes
    #[arg(long)]
    json: bool,
    /// Again each second, until it is stopped
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    place: ServerAddress,
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
        let json = whole(&client)?;
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

/// All of the answer, which comes in parts where there are many users or taken files.
fn whole(client: &Client) -> Result<String, Failure> {
    let mut json = client.status().map_err(failure)?;
    let mut from = STATUS_SHOWN;
    while let Some(longer) = joined(&json, from, |from| client.status_from(from).ok())? {
        (json, from) = (longer, from + STATUS_SHOWN);
    }
    Ok(json)
}

/// The answer `json` with what is in the next one, from number `from` on; `None` where it is whole, or there is no next one.
fn joined(json: &str, from: usize, next: impl FnOnce(usize) -> Option<String>) -> Result<Option<String>, Failure> {
    const LISTS: [&str; 2] = ["users", "taken"];
    let parse = |json: &str| -> Result<Value, Failure> {
        serde_json::from_str(json).map_err(|error| Failure::Failed(format!("the pool's answer '{json}': {error}")))
    };
    let mut whole = parse(json)?;
    let is_full = |list: &str| whole[list].as_array().is_some_and(|list| list.len() >= from);
    if !LISTS.into_iter().any(is_full) {
        return Ok(None);
    }
    let Some(next) = next(from) else { return Ok(None) };
    let mut next = parse(&next)?;
    for list in LISTS {
        if let (Some(list), Some(more)) = (whole[list].as_array_mut(), next[list].as_array_mut()) {
            list.append(more);
        }
    }
    Ok(Some(whole.to_string()))
}

/// How much is ready and how much is kept, in all or on a node, by what a server has answered.
pub fn ready_of(json: &str, node: Option<usize>) -> Result<(u64, u64), Failure> {
    let status: Status = read(json)?;
    let Some(number) = node else { return Ok((status.ready_bytes, status.size_bytes)) };
    match status.nodes.iter().find(|node| node.node == number) {
        Some(node) => Ok((node.ready_bytes, node.size_bytes)),
        None => Err(Failure::Usage(format!("the pool has no node {number}"))),
    }
}

/// The server's answer. What a newer one adds is for newer commands.
#[derive(Deserialize)]
struct Status {
    pid: u32,
    backing: String,
    directory: String,
    size_bytes: u64,
    ready_bytes: u64,
    filling_bytes: u64,
    taken_bytes: u64,
    limit_bytes: u64,
    available_bytes: u64,
    state: String,
    nodes: Vec<Node>,
    users: Vec<Holder>,
    taken: Vec<TakenFile>,
    counters: Counters,
}

#[derive(Deserialize)]
struct Node {
    node: usize,
    size_bytes: u64,
    ready_bytes: u64,
    /// Of what is ready.
    here_bytes: u64,
    unverified_bytes: u64,
    filling_bytes: u64,
    taken_bytes: u64,
    files: Vec<Waiting>,
}

#[derive(Deserialize)]
struct Waiting {
    size_bytes: u64,
    filled_bytes: u64,
}

#[derive(Deserialize)]
struct Holder {
    user: u32,
    taken_bytes: u64,
    files: u64,
    quota_bytes: Option<u64>,
}

#[derive(Deserialize)]
struct TakenFile {
    user: u32,
    node: usize,
    file: String,
    size_bytes: u64,
    held_seconds: f64,
}

#[derive(Deserialize)]
struct Counters {
    takes: u64,
    handed_out_bytes: u64,
    handed_out_ready_bytes: u64,
    refused: u64,
    elsewhere_bytes: u64,
}

fn read(json: &str) -> Result<Status, Failure> {
    serde_json::from_str(json).map_err(|error| Failure::Failed(format!("the pool's answer '{json}': {error}")))
}

/// What a server has answered, for people.
pub fn text(json: &str) -> Result<String, Failure> {
    let status = read(json)?;
    let mut text = format!(
        "pool at {} ({}, served by process {}): {}\n",
        printable(&status.directory),
        printable(&status.backing),
        status.pid,
        printable(&status.state)
    );
    let sizes = [status.ready_bytes, status.size_bytes, status.taken_bytes, status.limit_bytes, status.available_bytes]
        .map(Bytes);
    let [ready, size, taken, limit, available] = sizes;
    let filling = if status.filling_bytes > 0 {
        format!(", {} to be filled", Bytes(status.filling_bytes))
    } else {
        String::new()
    };
    // Writing to a string can't fail.
    let _ = writeln!(text, "{ready} of {size} ready{filling}; {taken} taken; {limit} at most, {available} available");
    text += &counts(&status.counters);
    if status.counters.elsewhere_bytes > 0 {
        let _ = writeln!(text, "{} came from other nodes and went back", Bytes(status.counters.elsewhere_bytes));
    }

    let mut nodes = table(&["node", "size", "ready", "there", "filling", "taken", "files"]);
    for node in &status.nodes {
        let [size, ready, filling, taken] = [node.size_bytes, node.ready_bytes, node.filling_bytes, node.taken_bytes]
            .map(|size| Bytes(size).to_string());
        let there = match node.unverified_bytes {
            0 => Bytes(node.here_bytes).to_string(),
            unknown => format!("{} ({} not verified)", Bytes(node.here_bytes), Bytes(unknown)),
        };
        nodes.add_row([node.node.to_string(), size, ready, there, filling, taken, files(&node.files)]);
    }
    text += &format!("\n{}", render(&nodes));
    if !status.users.is_empty() {
        let mut users = table(&["user", "taken", "files", "quota"]);
        for user in &status.users {
            let quota = user.quota_bytes.map_or("-".to_owned(), |quota| Bytes(quota).to_string());
            users.add_row([name(user.user), Bytes(user.taken_bytes).to_string(), user.files.to_string(), quota]);
        }
        text += &format!("\n{}", render(&users));
    }
    if !status.taken.is_empty() {
        let mut taken = table(&["taken by", "since", "size", "node", "file"]);
        for file in &status.taken {
            let size = Bytes(file.size_bytes).to_string();
            taken.add_row([
                name(file.user),
                age(file.held_seconds),
                size,
                file.node.to_string(),
                printable(&file.file),
            ]);
        }
        text += &format!("\n{}", render(&taken));
        let all: u64 = status.users.iter().map(|user| user.files).sum();
        if all > status.taken.len() as u64 {
            let _ = writeln!(text, "and {} more", all - status.taken.len() as u64);
        }
    }
    Ok(text)
}

/// How long ago that is, as people say it.
fn age(seconds: f64) -> String {
    match seconds as u64 {
        few @ 0..120 => format!("{few} s"),
        few @ 120..7200 => format!("{} min", few / 60),
        few @ 7200..172_800 => format!("{} h", few / 3600),
        many => format!("{} days", many / 86_400),
    }
}

fn counts(counters: &Counters) -> String {
    let refused = if counters.refused > 0 { format!("; {} refused", counters.refused) } else { String::new() };
    match counters.handed_out_bytes {
        0 => format!("nothing was asked for so far{refused}\n"),
        bytes => {
            let percent = 100.0 * counters.handed_out_ready_bytes as f64 / bytes as f64;
            let (takes, bytes) = (counters.takes, Bytes(bytes));
            let files = if takes == 1 { "file" } else { "files" };
            format!("asked for so far: {bytes} in {takes} {files}, of which {percent:.0} % were ready{refused}\n")
        }
    }
}

/// The files that wait: those that are filled as `2x 8 GiB`, the others with how far they are.
fn files(files: &[Waiting]) -> String {
    let mut groups: Vec<(u64, u64, u64)> = Vec::new();
    for file in files {
        match groups.iter_mut().find(|(size, filled, _)| (*size, *filled) == (file.size_bytes, file.filled_bytes)) {
            Some((_, _, count)) => *count += 1,
            None => groups.push((file.size_bytes, file.filled_bytes, 1)),
        }
    }
    let show = |&(size, filled, count): &(u64, u64, u64)| match Bytes(size) {
        all if filled == size => format!("{count}x {all}"),
        all => format!("{count}x {all} ({} filled)", Bytes(filled)),
    };
    groups.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// The name of a user, or the number where there is no name.
pub fn name(user: u32) -> String {
    match User::from_uid(Uid::from_raw(user)) {
        Ok(Some(user)) => printable(&user.name),
        Ok(None) | Err(_) => user.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"version":2,"pid":4711,"backing":"tmpfs","directory":"/run/p","size_bytes":17179869184,
        "ready_bytes":12884901888,"filling_bytes":4294967296,"taken_bytes":8589934592,"limit_bytes":34359738368,"floor_bytes":1,"available_bytes":2147483648,
        "budget_cpu_ratio":0.25,"state":"filling","nodes":[{"node":0,"size_bytes":17179869184,"ready_bytes":12884901888,"here_bytes":10737418240,"unverified_bytes":2147483648,"filling_bytes":4294967296,
        "taken_bytes":8589934592,"files":[{"size_bytes":4294967296,"filled_bytes":4294967296},{"size_bytes":4294967296,"filled_bytes":4294967296},
        {"size_bytes":8589934592,"filled_bytes":4294967296}]}],"users":[{"user":0,"taken_bytes":8589934592,"files":1,"quota_bytes":null},
        {"user":3999999999,"taken_bytes":2097152,"files":2,"quota_bytes":4194304}],"taken":[{"user":0,"node":0,"file":"0123456789abcdef-n0","size_bytes":8589934592,"held_seconds":7300.0}],"counters":{"takes":3,"handed_out_bytes":1000,
        "handed_out_ready_bytes":980,"refused":7,"released":1,"filled_bytes":1,"given_back_bytes":0,"elsewhere_bytes":2097152,"cpu_seconds":0.5}}"#;

    #[test]
    fn long_answers_are_put_together() {
        let answer = |users: std::ops::Range<u32>, taken: std::ops::Range<u32>| {
            let list = |range: std::ops::Range<u32>| Value::from(range.collect::<Vec<_>>());
            serde_json::json!({"users": list(users), "taken": list(taken)}).to_string()
        };
        let (first, second) = (answer(0..2, 0..4), answer(0..0, 4..5));
        let whole = joined(&first, 4, |from| (from == 4).then_some(second)).unwrap().unwrap();
        assert_eq!(whole, answer(0..2, 0..5));
        assert_eq!(joined(&whole, 8, |_| panic!("it is whole")).unwrap(), None);
        // Of an older server, the first one has to do.
        assert_eq!(joined(&first, 4, |_| None).unwrap(), None);
        assert!(joined("nonsense", 4, |_| None).is_err());
    }

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
            "root      2 h    8 GiB  0     0123456789abcdef-n0\n",
            "and 2 more\n",
        ] {
            assert!(text.contains(expected), "'{expected}' in {text}");
        }
        assert!(text.lines().all(|line| line == line.trim_end()));
    }

    #[test]
    fn a_pool_that_nobody_has_asked() {
        let json = JSON
            .replace("\"handed_out_bytes\":1000", "\"handed_out_bytes\":0")
            .replace("\"filling_bytes\":4294967296", "\"filling_bytes\":0");
        let text = text(&json).unwrap();
        assert!(text.contains("nothing was asked for so far; 7 refused") && !text.contains("to be filled"), "{text}");
    }

    #[test]
    fn what_is_no_status_is_a_failure() {
        assert!(matches!(text("{}"), Err(Failure::Failed(_))));
        assert!(matches!(text("x\u{1b}"), Err(Failure::Failed(_))));
    }
}
