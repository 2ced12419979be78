//! What an operator says of a pool.

use super::quota::Quotas;
use crate::sys::mount::MemoryFs;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Where a pool is, unless it is told otherwise.
pub const DIRECTORY: &str = "/run/pagecrew/pool";
/// The socket of the pool in [`DIRECTORY`].
pub const SOCKET: &str = "/run/pagecrew/pool/socket";

/// What the memory of a pool is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// The transparent huge pages of a tmpfs where the kernel has them, else the reserved ones.
    #[default]
    Auto,
    /// A tmpfs mounted `huge=always`.
    Tmpfs,
    /// The huge pages that the administrator has set apart (`vm.nr_hugepages`).
    Hugetlbfs,
}

impl Backing {
    /// Its name in options and in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Backing::Auto => "auto",
            Backing::Tmpfs => "tmpfs",
            Backing::Hugetlbfs => "hugetlbfs",
        }
    }

    /// The one with this name.
    pub fn named(name: &str) -> Option<Backing> {
        [Backing::Auto, Backing::Tmpfs, Backing::Hugetlbfs].into_iter().find(|backing| backing.name() == name)
    }
}

impl From<MemoryFs> for Backing {
    fn from(kind: MemoryFs) -> Backing {
        match kind {
            MemoryFs::Tmpfs => Backing::Tmpfs,
            MemoryFs::Hugetlbfs => Backing::Hugetlbfs,
        }
    }
}

/// How much is to be kept ready, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sizes {
    /// So much in all, the same on each node that has memory.
    Total(usize),
    /// So much on each of these nodes, nothing on others.
    Nodes(BTreeMap<usize, usize>),
}

/// The settings of a pool. Sizes are in bytes and multiples of 2 MiB.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Where its lock, its mount and its socket are; made if it isn't there.
    pub directory: PathBuf,
    /// The socket.
    pub socket: PathBuf,
    /// The socket's permissions: who may write to it may take memory.
    pub socket_mode: u32,
    /// The socket's group; none: this process's.
    pub socket_group: Option<u32>,
    /// What the memory is made of.
    pub backing: Backing,
    /// How much is kept ready.
    pub sizes: Sizes,
    /// Files that are always to be among it, each a size and how many of it; shared out among the nodes.
    pub files: Vec<(usize, usize)>,
    /// Processor time that filling may take, as a share of one CPU.
    pub cpu: f64,
    /// Free memory of the machine that filling leaves alone, and below which what is ready is given back; none:
    /// [`super::gate::default_floor`].
    pub floor: Option<usize>,
    /// Whether what is asked for and not ready may come from below the floor.
    pub below_floor: bool,
    /// The most that the pool and those who took of it may have together; none: all of the machine's memory.
    pub limit: Option<usize>,
    /// A file that was taken by its path goes when nobody has had it open for so long.
    pub unused: Duration,
    /// How much each user may have taken.
    pub quotas: Quotas,
    /// The command that runs [`super::fill`] with the socket on its standard input.
    pub filler: Vec<OsString>,
}

/// What filling takes of one CPU by default.
pub const CPU: f64 = 0.25;
/// How long a file may be unused by default.
pub const UNUSED: Duration = Duration::from_secs(60);

impl Default for Options {
    /// Nothing is kept ready, and only this process's user may connect.
    fn default() -> Options {
        Options {
            directory: DIRECTORY.into(),
            socket: SOCKET.into(),
            socket_mode: 0o600,
            socket_group: None,
            backing: Backing::Auto,
            sizes: Sizes::Total(0),
            files: Vec::new(),
            cpu: CPU,
            floor: None,
            below_floor: false,
            limit: None,
            unused: UNUSED,
            quotas: Quotas::default(),
            filler: Vec::new(),
        }
    }
}
