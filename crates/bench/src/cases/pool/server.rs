//! `pagecrew pool serve` as an operator runs it.

use crate::kept::Kept;
use crate::program::pagecrew;
use crate::worker::pool_socket;
use anyhow::{Context, Result, bail};
use pagecrew::pool::Client;
use pagecrew::sys::topology;
use pagecrew::units::Bytes;
use serde::Deserialize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Filling memory that the host has to find first takes long; more than this, no machine needs.
const PATIENCE: Duration = Duration::from_secs(600);
const STEP: Duration = Duration::from_millis(10);

/// What the server says about itself, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Status {
    #[serde(rename = "size_bytes")]
    pub size: usize,
    #[serde(rename = "ready_bytes")]
    pub ready: usize,
    #[serde(rename = "taken_bytes")]
    pub taken: usize,
    pub state: String,
    pub directory: PathBuf,
}

impl Status {
    fn parse(text: &str) -> Result<Status> {
        serde_json::from_str(text).with_context(|| format!("'{text}' is not the status of a pool"))
    }
}

/// A server with a directory and a socket of its own. It is ended where it is dropped, or where this process is.
pub struct Server {
    keeper: Kept,
    client: Client,
    socket: PathBuf,
    node: usize,
    size: usize,
}

pub enum Started {
    Serving(Box<Server>),
    /// This machine or this user can't have it.
    Refused(String),
}

impl Started {
    /// The server, where it can be had.
    ///
    /// # Errors
    /// If it is refused.
    pub fn serving(self) -> Result<Server> {
        match self {
            Started::Serving(server) => Ok(*server),
            Started::Refused(refusal) => bail!("{refusal}"),
        }
    }
}

impl Server {
    /// Starts one for a single file of `size` bytes, so all of its memory is on one node.
    ///
    /// # Errors
    /// If it fails.
    pub fn start(size: usize, options: &[&str]) -> Result<Started> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let base = std::env::temp_dir().join(format!("pagecrew-bench-{}-pool-{number}", std::process::id()));
        let node = topology::nodes_with_memory().first().copied().unwrap_or(0);
        let own = ["--node", &format!("{node}={size}"), "--file", &size.to_string()];
        let (keeper, refusal) = Kept::pool(&base, &[&own[..], options].concat())?;
        if !refusal.is_empty() {
            keeper.undo()?;
            return Ok(Started::Refused(refusal));
        }
        let socket = pool_socket(&base);
        let client = Client::connect(&socket)?;
        Ok(Started::Serving(Box::new(Server { keeper, client, socket, node, size })))
    }

    /// What clients connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where its memory is.
    pub fn node(&self) -> usize {
        self.node
    }

    /// Has its file ready.
    ///
    /// # Errors
    /// If it doesn't come to that.
    pub fn fill(&self) -> Result<()> {
        self.start_to_fill()?;
        self.until(|status| status.ready == self.size && status.taken == 0)
            .with_context(|| format!("a pool of {}", Bytes(self.size as u64)))
    }

    /// Has it keep nothing, and waits until all of its memory is free.
    ///
    /// # Errors
    /// If it doesn't come to that.
    pub fn empty(&self) -> Result<()> {
        self.client.resize(0, Some(self.node))?;
        self.until(|status| status.ready == 0 && status.taken == 0).context("a pool that is emptied")
    }

    /// Has it fill its file from now on.
    ///
    /// # Errors
    /// If it refuses.
    pub fn start_to_fill(&self) -> Result<()> {
        self.client.resize(self.size, Some(self.node))?;
        Ok(())
    }

    /// What it says about itself.
    ///
    /// # Errors
    /// If it has ended.
    pub fn status(&self) -> Result<Status> {
        Status::parse(&self.client.status()?)
    }

    /// Bytes of the files that wait that have memory, to the last page: the server counts whole pieces.
    ///
    /// # Errors
    /// If it has ended.
    pub fn backed(&self) -> Result<usize> {
        let waiting = self.status()?.directory.join("mem/ready");
        let files = std::fs::read_dir(&waiting).with_context(|| waiting.display().to_string())?;
        // One that went meanwhile has none.
        Ok(files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks() as usize * 512)).sum())
    }

    fn until(&self, reached: impl Fn(&Status) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let status = self.status()?;
            if reached(&status) {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                bail!("after {PATIENCE:?} it is still like this: {status:?}");
            }
            std::thread::sleep(STEP);
        }
    }

    /// `pagecrew pool exec` of a command that is still to be added.
    pub fn exec(&self) -> Command {
        let (size, node) = (self.size.to_string(), self.node.to_string());
        let mut command = pagecrew(&["pool", "exec", "--size", &size, "--node", &node]);
        command.arg("--socket").arg(&self.socket).arg("--");
        command
    }

    /// Ends it; nothing of it is left.
    ///
    /// # Errors
    /// If it failed.
    pub fn stop(self) -> Result<()> {
        let Server { keeper, client, .. } = self;
        drop(client);
        keeper.undo()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_status_says() {
        let text = r#"{"version":2,"pid":7,"backing":"tmpfs","directory":"/run/x","size_bytes":8388608,
            "ready_bytes":4194304,"filling_bytes":2097152,"taken_bytes":2097152,"limit_bytes":0,"floor_bytes":9,
            "available_bytes":1,"budget_cpu_ratio":0.25,"state":"waiting: memory is short",
            "nodes":[{"node":0,"size_bytes":1,"ready_bytes":1,"filling_bytes":1,"taken_bytes":1,"files":[]}],
            "users":[],"counters":{"takes":1}}"#;
        let state = "waiting: memory is short".to_owned();
        let expected =
            Status { size: 8 << 20, ready: 4 << 20, taken: 2 << 20, state, directory: PathBuf::from("/run/x") };
        assert_eq!(Status::parse(text).unwrap(), expected);
        assert!(Status::parse("{}").is_err() && Status::parse("full").is_err());
    }
}
