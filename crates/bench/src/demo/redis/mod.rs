//! Redis: a data set is loaded, overwritten, saved and flushed.

mod client;

use super::{Metric, Program};
use crate::contestant::Contestant;
use crate::machine;
use crate::noise::Noise;
use crate::program::{Running, Usage, on_path};
use crate::programs;
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use client::{Client, Reply};
use pagecrew::sys::clock::now_ns;
use pagecrew::units::Bytes;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Values of one size.
struct Group {
    prefix: &'static str,
    /// Size of a value.
    bytes: usize,
    /// The part of the data set that they make up.
    share: f64,
}

/// What people keep in Redis: many small values, and most of the memory in few large ones.
const GROUPS: [Group; 4] = [
    Group { prefix: "page", bytes: 1 << 10, share: 0.10 },
    Group { prefix: "image", bytes: 256 << 10, share: 0.10 },
    Group { prefix: "model", bytes: 2 << 20, share: 0.40 },
    Group { prefix: "video", bytes: 16 << 20, share: 0.40 },
];

pub fn prepare(report: &Report) -> Result<Option<Program>> {
    if !installed(report) {
        return Ok(None);
    }
    let data_set = DataSet::new(machine::affordable(2 << 30, report));
    let names = [
        format!("load {}", Bytes(data_set.bytes() as u64)),
        "overwrite every key".to_owned(),
        "BGSAVE".to_owned(),
        "FLUSHALL".to_owned(),
        "load again".to_owned(),
        "FLUSHALL ASYNC until freed".to_owned(),
    ];
    let metrics = names.into_iter().map(|name| Metric::new(name, "ms")).chain(Metric::faults_and_peak()).collect();
    let run = move |contestant: &Contestant, pause: Duration| session(contestant, pause, &data_set);
    Ok(Some(Program { name: "Redis", metrics, run: Box::new(run) }))
}

/// The data set of [`run`].
const SMALLER: usize = 256 << 20;

/// The same life of a server as one run with one time, the sum of its steps; nothing where it is not installed.
///
/// # Errors
/// Never. The signature is that of all programs.
pub fn run(report: &Report) -> Result<Option<programs::Run>> {
    if !installed(report) {
        return Ok(None);
    }
    let data_set = DataSet::new(SMALLER);
    let run = move |contestant: &Contestant| {
        let (mut figures, _) = session(contestant, Duration::ZERO, &data_set)?;
        let (Some(peak_mib), Some(faults)) = (figures.pop(), figures.pop()) else { bail!("Redis gave no figures") };
        let seconds = figures.iter().sum::<f64>() / 1e3;
        // The session itself looks at what the server has.
        Ok(programs::Done { usage: Usage { seconds, faults: faults as u64, peak_mib }, result: 0 })
    };
    Ok(Some(Box::new(run)))
}

fn installed(report: &Report) -> bool {
    let found = on_path("redis-server");
    if !found {
        report.note("redis-server is not installed (package redis-server); Redis is left out");
    }
    found
}

/// The keys, and random bytes of which each value is a piece.
struct DataSet {
    counts: [usize; GROUPS.len()],
    noise: Vec<u8>,
}

impl DataSet {
    fn new(bytes: usize) -> DataSet {
        let counts = GROUPS.map(|group| (bytes as f64 * group.share / group.bytes as f64) as usize);
        let mut noise = Noise::new();
        let noise = (0..(17 << 20) / 8).flat_map(|_| noise.number().to_le_bytes()).collect();
        DataSet { counts, noise }
    }

    fn bytes(&self) -> usize {
        GROUPS.iter().zip(self.counts).map(|(group, count)| group.bytes * count).sum()
    }

    fn keys(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The value of key `index` of `group` in a `version` of the data set.
    fn value(&self, group: &Group, index: usize, version: usize) -> &[u8] {
        let room = self.noise.len() - group.bytes;
        let start = (index * 977 + version * 4241) % room;
        &self.noise[start..start + group.bytes]
    }

    /// Sets every key.
    fn load(&self, client: &mut Client, version: usize) -> Result<()> {
        for (group, count) in GROUPS.iter().zip(self.counts) {
            for index in 0..count {
                let key = format!("{}:{index}", group.prefix);
                client.send(&[b"SET", key.as_bytes(), self.value(group, index, version)])?;
            }
        }
        client.expect_ok()
    }

    /// Whether the server has every key, and the right value in one of each group.
    fn check(&self, client: &mut Client, version: usize) -> Result<()> {
        let keys = client.call(&[b"DBSIZE"])?;
        ensure!(keys == Reply::Number(self.keys() as i64), "{keys:?} keys instead of {}", self.keys());
        for (group, count) in GROUPS.iter().zip(self.counts).filter(|(_, count)| *count > 0) {
            let key = format!("{}:{}", group.prefix, count / 2);
            let reply = client.call(&[b"GET", key.as_bytes()])?;
            ensure!(reply == Reply::Bytes(self.value(group, count / 2, version).to_vec()), "{key} has another value");
        }
        Ok(())
    }
}

/// One server's life: the milliseconds of each step, page faults, peak; and what is resident after the pause.
fn session(contestant: &Contestant, pause: Duration, data_set: &DataSet) -> Result<(Vec<f64>, Option<f64>)> {
    let directory = tempfile::tempdir()?;
    let server = start(contestant, directory.path())?;
    let mut client = Client::connect(&directory.path().join("socket"))?;
    let mut times = Vec::new();
    let mut timed = |client: &mut Client, step: &dyn Fn(&mut Client) -> Result<()>| {
        let start = now_ns();
        step(client)?;
        times.push((now_ns() - start) as f64 / 1e6);
        anyhow::Ok(())
    };
    timed(&mut client, &|client| data_set.load(client, 0))?;
    timed(&mut client, &|client| data_set.load(client, 1))?;
    data_set.check(&mut client, 1)?;
    timed(&mut client, &save)?;
    timed(&mut client, &|client| client.ask_ok(&[b"FLUSHALL", b"SYNC"]))?;
    timed(&mut client, &|client| data_set.load(client, 2))?;
    data_set.check(&mut client, 2)?;
    timed(&mut client, &flush_in_background)?;
    std::thread::sleep(pause);
    let resident = resident_mib(server.pid())?;
    client.send(&[b"SHUTDOWN", b"NOSAVE"])?;
    client.close()?;
    let usage = server.wait()?;
    times.extend([usage.faults as f64, usage.peak_mib]);
    Ok((times, Some(resident)))
}

/// Starts a server that listens on `directory`/socket and nowhere else.
fn start(contestant: &Contestant, directory: &Path) -> Result<Running> {
    let mut command = Command::new("redis-server");
    command.current_dir(directory).stderr(Stdio::null());
    command.args(["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no", "--daemonize", "no"]);
    command.args(["--rdbcompression", "no", "--logfile", "log"]);
    contestant.prepare(&mut command);
    let server = Running::start(&mut command)?;
    for _ in 0..1000 {
        if Client::connect(&directory.join("socket")).is_ok() {
            return Ok(server);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let log = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
    bail!("redis-server does not answer: {}", log.lines().last().unwrap_or("it logged nothing"))
}

/// BGSAVE from the command until the child has written everything.
fn save(client: &mut Client) -> Result<()> {
    client.ask_ok(&[b"BGSAVE"])?;
    while field(client, "persistence", "rdb_bgsave_in_progress")? != "0" {
        std::thread::sleep(Duration::from_millis(2));
    }
    let status = field(client, "persistence", "rdb_last_bgsave_status")?;
    ensure!(status == "ok", "BGSAVE ended with '{status}': is there room for the data set in the temporary directory?");
    Ok(())
}

/// FLUSHALL ASYNC from the command until its thread has freed everything.
fn flush_in_background(client: &mut Client) -> Result<()> {
    client.ask_ok(&[b"FLUSHALL", b"ASYNC"])?;
    while field(client, "memory", "lazyfree_pending_objects")? != "0" {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A field of the server's INFO.
fn field(client: &mut Client, section: &str, name: &str) -> Result<String> {
    let Reply::Bytes(info) = client.call(&[b"INFO", section.as_bytes()])? else { bail!("INFO {section} was refused") };
    let info = String::from_utf8_lossy(&info);
    let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(value.with_context(|| format!("INFO {section} has no {name}"))?.trim().to_owned())
}

/// What process `pid` has resident.
fn resident_mib(pid: u32) -> Result<f64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    let pages: f64 = statm.split_whitespace().nth(1).context("an empty statm")?.parse()?;
    Ok(pages / 256.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_set_has_the_size_that_was_asked_for() {
        let data_set = DataSet::new(512 << 20);
        let bytes = data_set.bytes() as f64 / f64::from(512 << 20);
        assert!((0.9..=1.0).contains(&bytes), "{bytes}");
        assert_eq!(data_set.value(&GROUPS[3], 5, 0).len(), GROUPS[3].bytes);
        assert_ne!(data_set.value(&GROUPS[0], 5, 0), data_set.value(&GROUPS[0], 5, 1));
    }
}
