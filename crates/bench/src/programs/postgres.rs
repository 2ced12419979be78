//! PostgreSQL: a server of its own, which listens on a socket in its directory and nowhere else.

use super::{Done, Run};
use crate::contestant::Contestant;
use crate::program::{self, Running};
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use pagecrew::sys::clock::now_ns;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const ROWS: &str = include_str!("../../scripts/programs/rows.sql");
const SORT: &str = include_str!("../../scripts/programs/sort.sql");

/// pgbench: branches of the bank, connections, and what each of these does.
const SCALE: &str = "5";
const CLIENTS: &str = "4";
const TRANSACTIONS: &str = "800";

/// What the balance of the bank is at the end: the same every time.
const BALANCES: &str = "select sum(abalance), (select count(*) from pgbench_history) from pgbench_accounts";

/// Transactions of a bank.
pub fn transactions(report: &Report) -> Result<Option<Run>> {
    let Some(postgres) = Installation::find(report) else { return Ok(None) };
    let master = Cluster::new(&postgres)?;
    master.with_server(&Contestant::plain(""), |cluster| {
        Ok((0.0, cluster.client("pgbench", &["-i", "-q", "-s", SCALE])?))
    })?;
    Ok(Some(Box::new(move |contestant| {
        let cluster = master.copy()?;
        cluster.with_server(contestant, |cluster| {
            let start = now_ns();
            let load = ["-n", "-c", CLIENTS, "-t", TRANSACTIONS, "--random-seed=7"];
            cluster.client("pgbench", &load)?;
            let seconds = (now_ns() - start) as f64 / 1e9;
            Ok((seconds, cluster.client("psql", &["-Atc", BALANCES])?))
        })
    })))
}

/// A table of two million rows, sorted in memory.
pub fn sort(report: &Report) -> Result<Option<Run>> {
    let Some(postgres) = Installation::find(report) else { return Ok(None) };
    let master = Cluster::new(&postgres)?;
    master.with_server(&Contestant::plain(""), |cluster| Ok((0.0, cluster.script(ROWS)?)))?;
    Ok(Some(Box::new(move |contestant| {
        master.with_server(contestant, |cluster| {
            let start = now_ns();
            let output = cluster.script(SORT)?;
            Ok(((now_ns() - start) as f64 / 1e9, output))
        })
    })))
}

/// Where its programs are, and whom they run as.
#[derive(Clone)]
struct Installation {
    programs: PathBuf,
    /// It refuses to be run by root: user and group in whose place.
    user: Option<(u32, u32)>,
}

impl Installation {
    fn find(report: &Report) -> Option<Installation> {
        let missing = |what: &str| {
            report.note(&format!("{what} (package postgresql); PostgreSQL is left out"));
            None
        };
        // Debian keeps them off the search path, in a directory for each version.
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let newest = versions.map(|entry| entry.path().join("bin")).filter(|path| path.join("initdb").is_file()).max();
        let on_path = std::env::var_os("PATH").unwrap_or_default();
        let on_path = std::env::split_paths(&on_path).find(|path| path.join("initdb").is_file());
        let Some(programs) = newest.or(on_path) else { return missing("there is no initdb") };
        // SAFETY: no memory is involved.
        let root = unsafe { libc::geteuid() } == 0;
        let user = root.then(|| account("postgres"));
        if user == Some(None) {
            return missing("there is no user postgres");
        }
        Some(Installation { programs, user: user.flatten() })
    }

    /// One of its programs, in `directory`.
    fn command(&self, program: &str, directory: &Path) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.current_dir(directory).env("LC_ALL", "C.UTF-8").env("HOME", directory).stderr(Stdio::null());
        command.env("PGHOST", directory).env("PGUSER", "bench").env("PGDATABASE", "postgres");
        Contestant::plain("").prepare(&mut command);
        self.as_user(&mut command);
        command
    }

    fn as_user(&self, command: &mut Command) {
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
    }
}

/// User and group of the account `name`.
fn account(name: &str) -> Option<(u32, u32)> {
    let accounts = std::fs::read_to_string("/etc/passwd").ok()?;
    let fields = accounts.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == name)?;
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

/// What a server works on.
struct Cluster {
    postgres: Installation,
    directory: TempDir,
}

impl Cluster {
    /// An empty one.
    fn new(postgres: &Installation) -> Result<Cluster> {
        let cluster = Cluster::in_a_directory(postgres)?;
        let arguments = ["-D", "data", "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-sync"];
        program::run(cluster.command("initdb").args(arguments)).context("making a PostgreSQL cluster")?;
        Ok(cluster)
    }

    fn in_a_directory(postgres: &Installation) -> Result<Cluster> {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        if let Some((user, group)) = postgres.user {
            std::os::unix::fs::chown(directory.path(), Some(user), Some(group))?;
        }
        Ok(Cluster { postgres: postgres.clone(), directory })
    }

    /// Another one with the same contents.
    fn copy(&self) -> Result<Cluster> {
        let copy = Cluster::in_a_directory(&self.postgres)?;
        let mut command = Command::new("cp");
        command.arg("-a").arg(self.directory.path().join("data")).arg(copy.directory.path());
        program::run(&mut command)?;
        Ok(copy)
    }

    fn command(&self, program: &str) -> Command {
        self.postgres.command(program, self.directory.path())
    }

    /// What a client prints.
    fn client(&self, program: &str, arguments: &[&str]) -> Result<String> {
        Ok(program::run(self.command(program).args(arguments))?.output)
    }

    /// What the statements of `text` give.
    fn script(&self, text: &str) -> Result<String> {
        std::fs::write(self.directory.path().join("script.sql"), text)?;
        self.client("psql", &["-qAt", "-v", "ON_ERROR_STOP=1", "-f", "script.sql"])
    }

    /// Has `work` done, which says how many seconds count and what came out of it, by a server with the memory of `contestant`.
    fn with_server(
        &self,
        contestant: &Contestant,
        work: impl FnOnce(&Cluster) -> Result<(f64, String)>,
    ) -> Result<Done> {
        let server = self.start(contestant)?;
        let result = work(self);
        server.signal(libc::SIGINT)?;
        ensure!(server.ends_within(Duration::from_secs(60))?, "postgres does not end");
        let (status, mut usage) = server.end()?;
        let (seconds, output) = result?;
        usage.seconds = seconds;
        let mut hasher = DefaultHasher::new();
        (output, status.code()).hash(&mut hasher);
        Ok(Done { usage, result: hasher.finish() })
    }

    /// The memory at the peak is that of the largest process of the server, once it has ended.
    fn start(&self, contestant: &Contestant) -> Result<Running> {
        let directory = self.directory.path();
        let mut command = self.command("postgres");
        command.args(["-D", "data", "-c", "listen_addresses=", "-c", "fsync=off", "-c", "autovacuum=off", "-k"]);
        command.arg(directory).stderr(std::fs::File::create(directory.join("log"))?);
        contestant.copied_to(directory)?.prepare(&mut command);
        let server = Running::start(&mut command)?;
        for _ in 0..1000 {
            if self.client("psql", &["-Atc", "select 1"]).is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
        bail!("postgres does not answer: {}", log.lines().last().unwrap_or("it logged nothing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_has_a_number() {
        assert_eq!(account("root"), Some((0, 0)));
        assert_eq!(account("no such user"), None);
    }
}
