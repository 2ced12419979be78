//! What can go wrong with a pool: what was tried, on what, and what to do about it.

use super::protocol::Code;
use crate::sys::Errno;
use crate::units::Bytes;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why a pool can't be served, or something can't be had from one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Mounting was refused.
    MayNotMount(PathBuf),
    /// The directory, or one above it, belongs to others, or others may write to it.
    NotOwn(PathBuf),
    /// There are no huge pages of either kind; why.
    NoHugePages(String),
    /// The mount has another backing, and there are files that somebody still has.
    OtherBacking {
        /// The mount.
        mount: PathBuf,
        /// How many.
        files: usize,
    },
    /// Another server has the directory.
    Served {
        /// Which.
        directory: PathBuf,
        /// The server's process, if it has said.
        pid: Option<u32>,
    },
    /// Nobody serves a pool at this socket.
    NotServed(PathBuf),
    /// This user may not use the socket.
    MayNotConnect(PathBuf),
    /// A size that no file can have.
    Size(usize),
    /// There is no such node, or it has no memory.
    Node {
        /// The node that was asked for.
        node: usize,
        /// Those that have memory.
        nodes: Vec<usize>,
    },
    /// The server's answer.
    Refused {
        /// Of what kind.
        code: Code,
        /// In words.
        message: String,
    },
    /// The server went, or what it sent makes no sense.
    Answer(String),
    /// A file could not be filled on the spot.
    NotFilled {
        /// Bytes that were asked for.
        size: usize,
        /// Bytes that are backed.
        backed: usize,
    },
    /// A system call failed.
    System {
        /// What was to be done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The kernel's answer.
        errno: Errno,
    },
}

impl Error {
    /// `node` is none of the `nodes` that have memory.
    pub(super) fn no_such_node<'n>(node: usize, nodes: impl IntoIterator<Item = &'n usize>) -> Error {
        Error::Node { node, nodes: nodes.into_iter().copied().collect() }
    }

    /// Whether it is this kernel or these permissions that rule it out.
    pub fn is_impossible(&self) -> bool {
        match self {
            Error::MayNotMount(_) | Error::NoHugePages(_) | Error::MayNotConnect(_) => true,
            Error::Refused { code, .. } => *code == Code::Denied,
            _ => false,
        }
    }

    /// Whether what was asked for makes no sense.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Error::Size(_) | Error::Node { .. } | Error::NotOwn(_) | Error::Refused { code: Code::BadRequest, .. }
        )
    }

    /// For `map_err`: `action` on `path` failed.
    pub(super) fn system<E: Into<Errno>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
        move |error| Error::System { action, path: path.to_owned(), errno: error.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::MayNotMount(path) => {
                write!(
                    f,
                    "a pool needs a mount of its own at {}, which takes CAP_SYS_ADMIN: run it as root",
                    path.display()
                )
            }
            Error::NotOwn(path) => write!(
                f,
                "{} is another user's, or others may write to it: choose a --directory and a --socket where only this user and root may write",
                path.display()
            ),
            Error::NoHugePages(why) => write!(f, "there are no huge pages to fill a pool with: {why}"),
            Error::OtherBacking { mount, files } => write!(
                f,
                "{} has the other backing, and {files} of its files are still taken: release them first, or choose that backing",
                mount.display()
            ),
            Error::Served { directory, pid } => {
                write!(f, "{} is already served", directory.display())?;
                match pid {
                    Some(pid) => write!(f, " by process {pid}; choose another --directory for a second pool"),
                    None => write!(f, "; choose another --directory for a second pool"),
                }
            }
            Error::NotServed(socket) => {
                write!(f, "no pool is served at {}; start one with: pagecrew pool serve --size 16G", socket.display())
            }
            Error::MayNotConnect(socket) => write!(
                f,
                "this user may not use {}: see the server's --socket-mode and --socket-group, or be root",
                socket.display()
            ),
            Error::Size(size) => write!(f, "{size} bytes are not a multiple of 2 MiB, and at least that"),
            Error::Node { node, nodes } => {
                let nodes = nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                write!(f, "node {node} has no memory; nodes with memory: {nodes}")
            }
            Error::Refused { message, .. } | Error::Answer(message) => f.write_str(message),
            Error::NotFilled { size, backed } => write!(
                f,
                "of {} only {} could be had: the machine, this process's control group or the pool's limit has no more",
                Bytes(*size as u64),
                Bytes(*backed as u64)
            ),
            Error::System { action, path, errno } => write!(f, "{action} {}: {errno}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_failure_is_told_apart() {
        let refused = |code| Error::Refused { code, message: "no".into() };
        assert!(Error::MayNotMount("/x".into()).is_impossible() && refused(Code::Denied).is_impossible());
        assert!(Error::Size(1).is_usage() && refused(Code::BadRequest).is_usage());
        for error in [Error::NotServed("/x".into()), refused(Code::NoMemory), Error::Answer("gone".into())] {
            assert!(!error.is_impossible() && !error.is_usage(), "{error}");
        }
    }

    #[test]
    fn a_message_names_the_thing_and_the_way_out() {
        let served = Error::Served { directory: "/run/p".into(), pid: Some(7) }.to_string();
        assert!(served.contains("/run/p") && served.contains("process 7") && served.contains("--directory"));
        let error = Error::system("making", Path::new("/a/b"))(Errno(libc::ENOSPC)).to_string();
        assert!(error.starts_with("making /a/b: No space left"), "{error}");
    }
}
