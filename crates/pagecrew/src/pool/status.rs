//! How a pool stands at one moment, for clients as a JSON object and for others as samples of metrics.

use super::state::{Condition, Counters, Node, State};
use crate::stats::{Figure, Kind, Metric, Number, Part, Sample, Unit, figures, samples};
use crate::sys::clock;
use crate::units::Bytes;
use std::fmt::Write;
use std::path::PathBuf;

/// Version of the JSON object: counted up when a key changes its name or its meaning.
pub const STATUS_VERSION: u32 = 2;

figures! {
    /// The pool as a whole, in bytes.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Sums: Pool, "pagecrew_pool_", [], "" {
        size_bytes: u64, Gauge Bytes, "Memory that is to be kept ready.";
        ready_bytes: u64, Gauge Bytes, "Memory that is ready.";
        filling_bytes: u64, Gauge Bytes, "Memory that is still to be filled.";
        taken_bytes: u64, Gauge Bytes, "Memory that is taken.";
        limit_bytes: u64, Gauge Bytes, "The most that may be ready and taken together.";
        floor_bytes: u64, Gauge Bytes, "Free memory of the machine that filling leaves alone.";
        available_bytes: u64, Gauge Bytes, "Memory of the machine that the pool could still get.";
    }
}

figures! {
    /// A node of a pool, in bytes.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct NodeStatus: Pool, "pagecrew_pool_node_", ["node"], "nodes[]." {
        size_bytes: u64, Gauge Bytes, "Memory that is to be kept ready on the node.";
        ready_bytes: u64, Gauge Bytes, "Memory that is ready for the node.";
        here_bytes: u64, Gauge Bytes, "The part of what is ready that the kernel says is on the node.";
        unverified_bytes: u64, Gauge Bytes, "The part of what is ready of which the kernel does not say where it is.";
        filling_bytes: u64, Gauge Bytes, "Memory that is still to be filled on the node.";
        taken_bytes: u64, Gauge Bytes, "Memory of the node that is taken.";
    }
    with {
        /// The kernel's number of the node.
        pub node: usize,
        /// The files that wait there, the largest first.
        pub files: Vec<FileStatus>,
    }
}

figures! {
    /// A file that waits, in bytes.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
    pub struct FileStatus: Pool, none, [], "nodes[].files[]." {
        size_bytes: u64, Gauge Bytes, "The size of a file that waits.";
        filled_bytes: u64, Gauge Bytes, "The part of it that is filled.";
    }
}

figures! {
    /// Somebody who has taken memory.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct UserStatus: Pool, "pagecrew_pool_user_", ["user"], "users[]." {
        taken_bytes: u64, Gauge Bytes, "Memory on the user's account.";
        files: u64, Gauge Count, "Files on the user's account.";
        quota_bytes: Option<u64>, Gauge Bytes, "The most that the user may have taken; absent without a quota.";
    }
    with {
        /// The number of the user.
        pub user: u32,
    }
}

figures! {
    /// A file that somebody has.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct TakenStatus: Pool, none, [], "taken[]." {
        size_bytes: u64, Gauge Bytes, "The size of a file that is taken, as it was handed out.";
        held_ns key "held_seconds": u64, Gauge Seconds, "Time since it was handed out.";
    }
    with {
        /// The number of the user on whose account it is.
        pub user: u32,
        /// The kernel's number of its node.
        pub node: usize,
        /// Its name.
        pub file: String,
    }
}

/// The share of one CPU that filling may take.
const BUDGET: &Metric = &Metric {
    part: Part::Pool,
    kind: Kind::Gauge,
    unit: Unit::Ratio,
    name: Some("pagecrew_pool_budget_cpu_ratio"),
    labels: &[],
    json: Some("budget_cpu_ratio"),
    help: "The share of one CPU that filling may take.",
};

/// What JSON says in words.
const WAITING: &Metric = &Metric {
    part: Part::Pool,
    kind: Kind::Gauge,
    unit: Unit::Count,
    name: Some("pagecrew_pool_waiting"),
    labels: &[],
    json: None,
    help: "1 while filling waits for something, which pool status says in words, otherwise 0.",
};

/// How a pool stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The server's process.
    pub pid: u32,
    /// What the memory is made of.
    pub backing: &'static str,
    /// Where the pool is.
    pub directory: PathBuf,
    /// The share of one CPU that filling may take.
    pub cpu: f64,
    /// How filling stands, in words: `full`, `filling`, or `waiting: REASON`.
    pub state: String,
    /// The pool as a whole.
    pub sums: Sums,
    /// Its nodes.
    pub nodes: Vec<NodeStatus>,
    /// Who has taken something.
    pub users: Vec<UserStatus>,
    /// What is taken, the longest held first.
    pub taken: Vec<TakenStatus>,
    /// What has been done.
    pub counters: Counters,
}

/// What the state itself doesn't know.
pub(super) struct Facts {
    pub backing: &'static str,
    pub directory: PathBuf,
    pub limit: usize,
    pub available: u64,
}

impl Status {
    /// The status of a pool in this state; with `viewer`, of users and their files only what is his.
    pub(super) fn new<F: Clone>(state: &State<F>, facts: Facts, viewer: Option<u32>) -> Status {
        let seen = |user: u32| viewer.is_none_or(|viewer| viewer == user);
        let now = clock::since_1970();
        let taken = state.taken.values().filter(|taken| seen(taken.user)).map(|taken| TakenStatus {
            size_bytes: taken.size as u64,
            held_ns: now.saturating_sub(taken.since).saturating_mul(1_000_000_000),
            user: taken.user,
            node: taken.node,
            file: taken.name.clone(),
        });
        let mut taken: Vec<TakenStatus> = taken.collect();
        taken.sort_by_key(|taken| std::cmp::Reverse(taken.held_ns));
        let nodes: Vec<NodeStatus> = state.nodes.iter().map(|(&number, node)| of_node(state, number, node)).collect();
        let users = state.accounts.users().filter(|&(user, ..)| seen(user)).map(|(user, bytes, files)| UserStatus {
            taken_bytes: bytes as u64,
            files: files as u64,
            quota_bytes: state.settings.quotas.of(user).map(|quota| quota as u64),
            user,
        });
        let sums = Sums {
            size_bytes: state.settings.sizes.values().sum::<usize>() as u64,
            ready_bytes: state.ready() as u64,
            filling_bytes: nodes.iter().map(|node| node.filling_bytes).sum(),
            taken_bytes: state.taken_bytes() as u64,
            limit_bytes: facts.limit as u64,
            floor_bytes: state.settings.floor,
            available_bytes: facts.available,
        };
        Status {
            pid: std::process::id(),
            backing: facts.backing,
            directory: facts.directory,
            cpu: state.settings.cpu,
            state: condition(&state.condition),
            sums,
            users: users.collect(),
            taken,
            nodes,
            counters: state.counters,
        }
    }

    /// Every metric of a pool.
    pub fn metrics() -> impl Iterator<Item = &'static Metric> {
        let parts = [
            Sums::METRICS,
            NodeStatus::METRICS,
            FileStatus::METRICS,
            UserStatus::METRICS,
            TakenStatus::METRICS,
            Counters::METRICS,
        ];
        parts.into_iter().flatten().chain([BUDGET, WAITING])
    }

    /// The samples of the metrics that OpenMetrics has. Users are told apart by their numbers.
    pub fn samples(&self) -> Vec<Sample> {
        let waiting = u64::from(self.state.starts_with("waiting"));
        let single = |metric: &'static Metric, number| Sample { metric, labels: Vec::new(), number };
        samples(self.sums.figures(), &[])
            .chain(self.nodes.iter().flat_map(|node| {
                let labels = [node.node.to_string()];
                samples(node.figures(), &labels).collect::<Vec<_>>()
            }))
            .chain(self.users.iter().flat_map(|user| {
                let labels = [user.user.to_string()];
                samples(user.figures(), &labels).collect::<Vec<_>>()
            }))
            .chain(samples(self.counters.figures(), &[]))
            .chain([single(BUDGET, Number::Real(self.cpu)), single(WAITING, WAITING.number(waiting))])
            .collect()
    }

    /// The object, without the first `from` of the users and of the taken files; its fields are described in `docs/pool.md`.
    pub fn json(&self, from: usize) -> String {
        let mut text = String::new();
        // Writing to a string can't fail.
        let _ = self.write_json(&mut text, from);
        text
    }

    fn write_json(&self, out: &mut String, from: usize) -> std::fmt::Result {
        write!(out, "{{\"version\":{STATUS_VERSION},\"pid\":{},\"backing\":{}", self.pid, quoted(self.backing))?;
        write!(out, ",\"directory\":{}", quoted(&self.directory.to_string_lossy()))?;
        write_figures(out, self.sums.figures())?;
        write!(out, ",\"{}\":{},\"state\":{}", BUDGET.key(), self.cpu, quoted(&self.state))?;
        write!(out, ",\"nodes\":[")?;
        for (index, node) in self.nodes.iter().enumerate() {
            write!(out, "{}{{\"node\":{}", comma(index), node.node)?;
            write_figures(out, node.figures())?;
            write!(out, ",\"files\":[")?;
            for (index, file) in node.files.iter().take(FILES_SHOWN).enumerate() {
                write!(out, "{}{{", comma(index))?;
                write_members(out, file.figures())?;
                write!(out, "}}")?;
            }
            write!(out, "]}}")?;
        }
        write!(out, "],\"users\":[")?;
        for (index, user) in self.users.iter().skip(from).take(STATUS_SHOWN).enumerate() {
            write!(out, "{}{{\"user\":{}", comma(index), user.user)?;
            write_figures(out, user.figures())?;
            write!(out, "}}")?;
        }
        write!(out, "],\"taken\":[")?;
        for (index, taken) in self.taken.iter().skip(from).take(STATUS_SHOWN).enumerate() {
            write!(out, "{}{{\"user\":{},\"node\":{}", comma(index), taken.user, taken.node)?;
            write!(out, ",\"file\":{}", quoted(&taken.file))?;
            write_figures(out, taken.figures())?;
            write!(out, "}}")?;
        }
        write!(out, "],\"counters\":{{")?;
        write_members(out, self.counters.figures())?;
        write!(out, "}}}}")
    }
}

/// An answer is one packet; on a machine with many nodes the sums say enough.
const FILES_SHOWN: usize = 32;
/// The most users, and the most taken files, that an answer has. Others are asked for from a number on.
pub const STATUS_SHOWN: usize = 100;

fn of_node<F>(state: &State<F>, number: usize, node: &Node<F>) -> NodeStatus {
    let size = state.settings.sizes.get(&number).copied().unwrap_or(0);
    let taken: usize = state.taken.values().filter(|taken| taken.node == number).map(|taken| taken.size).sum();
    let mut files: Vec<FileStatus> = node
        .waiting
        .iter()
        .map(|ready| FileStatus { size_bytes: ready.size as u64, filled_bytes: ready.filled as u64 })
        .collect();
    files.sort_unstable_by(|one, other| other.cmp(one));
    NodeStatus {
        size_bytes: size as u64,
        ready_bytes: node.filled() as u64,
        here_bytes: node.filled().saturating_sub(node.unverified()) as u64,
        unverified_bytes: node.unverified() as u64,
        filling_bytes: size.saturating_sub(node.filled()) as u64,
        taken_bytes: taken as u64,
        node: number,
        files,
    }
}

fn comma(index: usize) -> &'static str {
    if index > 0 { "," } else { "" }
}

/// The figures as members of an object, separated by commas.
fn write_members(out: &mut String, figures: impl Iterator<Item = Figure>) -> std::fmt::Result {
    for (index, (metric, value)) in figures.enumerate() {
        let value = value.map_or("null".to_owned(), |value| metric.number(value).to_string());
        write!(out, "{}\"{}\":{value}", comma(index), metric.key())?;
    }
    Ok(())
}

/// The figures as further members of an object.
fn write_figures(out: &mut String, figures: impl Iterator<Item = Figure>) -> std::fmt::Result {
    write!(out, ",")?;
    write_members(out, figures)
}

/// In words.
fn condition(condition: &Condition) -> String {
    match condition {
        Condition::Full => "full".into(),
        Condition::Filling => "filling".into(),
        Condition::Waiting(why) => format!("waiting: {why}"),
    }
}

/// How it stands, in a few words.
pub(super) fn in_short<F: Clone>(state: &State<F>) -> String {
    let size: usize = state.settings.sizes.values().sum();
    let [size, ready, taken] = [size, state.ready(), state.taken_bytes()].map(|bytes| Bytes(bytes as u64));
    format!("{}, {ready} of {size} ready, {taken} taken", condition(&state.condition))
}

/// `text` as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::super::quota::Quotas;
    use super::super::state::Settings;
    use super::*;
    use std::collections::BTreeMap;
    use std::time::Duration;

    #[test]
    fn strings_keep_their_quotes() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }

    #[test]
    fn a_pool_on_many_nodes_fits_an_answer() {
        let sizes: BTreeMap<usize, usize> = (0..16).map(|node| (node, 1 << 40)).collect();
        let settings = Settings {
            sizes,
            files: BTreeMap::new(),
            cpu: 0.25,
            floor: 1 << 30,
            below_floor: false,
            unused: Duration::ZERO,
            quotas: Quotas::default(),
        };
        let mut state: State<()> = State::new(settings, 64);
        (1..2000).for_each(|user| state.accounts.charge(user, 1 << 40, None).unwrap());
        let facts = Facts { backing: "tmpfs", directory: "/run/x".into(), limit: 1 << 44, available: 1 << 43 };
        let status = Status::new(&state, facts, None);
        let text = status.json(0);
        assert!(text.len() < super::super::protocol::ANSWER_MOST - 100, "{}", text.len());
        assert!(text.starts_with("{\"version\":2,") && text.ends_with("}}"));
        let sums = "\"size_bytes\":17592186044416,\"ready_bytes\":0,\"filling_bytes\":17592186044416,";
        assert!(text.contains(sums) && text.contains("\"budget_cpu_ratio\":0.25,"), "{text}");
        // The others are in the answers that follow.
        let users = |from: usize| status.json(from).matches("\"user\":").count();
        assert_eq!([0, 1900, 1950, 1999, 5000].map(users), [100, 99, 49, 0, 0]);
        // Samples have no such bound.
        let users = status.samples().into_iter().filter(|sample| sample.metric.key() == "files").count();
        assert_eq!(users, 1999);
    }
}
