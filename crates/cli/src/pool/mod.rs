//! `pagecrew pool`: memory that is ready and zeroed before a virtual machine or a big process asks.

mod cloud_hypervisor;
pub mod config;
mod exec;
mod metrics;
mod progress;
mod qemu;
pub mod serve;
mod status;
mod subordinates;
mod take;
mod vmm;
mod wait;

use crate::failure::Failure;
use nix::unistd::{Gid, Group, Uid, User};
use pagecrew::pool::{self, Client, Error};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

pub use status::text as status_text;

/// Keep memory ready and zeroed before a virtual machine or a big process asks
///
/// A server fills files of huge pages in the background. Whoever takes one starts at once, instead of waiting until
/// gigabytes are zeroed.
#[derive(clap::Args)]
#[command(
    arg_required_else_help = true,
    after_help = "\
Examples:
  pagecrew pool serve --size 16G          keep 16 GiB ready (as root)
  pagecrew pool exec --size 8G -- qemu-system-x86_64 -m {size} -machine memory-backend=mem \\
    -object memory-backend-file,id=mem,mem-path={path},prealloc=on ...
  pagecrew pool take --size 8G            the path of a file, for anything that maps one
  pagecrew pool status --watch            what is ready, being filled and taken

Whoever may write to the server's socket may take memory: root, or see pool serve --socket-group."
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Serve(Box<serve::Arguments>),
    Take(take::TakeArguments),
    Exec(exec::Arguments),
    Release(take::ReleaseArguments),
    Resize(take::ResizeArguments),
    Status(status::Arguments),
    Wait(wait::Arguments),
}

/// `pagecrew pool`.
pub fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let done = |()| ExitCode::SUCCESS;
    match arguments.command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Take(arguments) => take::take(&arguments).map(done),
        Command::Exec(arguments) => exec::run(&arguments),
        Command::Release(arguments) => take::release(&arguments).map(done),
        Command::Resize(arguments) => take::resize(&arguments).map(done),
        Command::Status(arguments) => status::run(&arguments).map(done),
        Command::Wait(arguments) => wait::run(&arguments).map(done),
    }
}

/// `pagecrew pool-fill`: the process that fills the files, started by the server with a socket as its standard input.
pub fn fill() -> Result<(), Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::Failed(format!(
            "standard input is not the socket of a pool's server, which alone starts this: {error}"
        ))
    };
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| failed(&error))?;
    pool::fill(socket).map_err(|error| failed(&error))
}

/// Where the server is.
#[derive(clap::Args)]
struct ServerAddress {
    /// The server's socket [default: $PAGECREW_POOL_SOCKET, else /run/pagecrew/pool/socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl ServerAddress {
    fn connect(&self) -> Result<Client, Failure> {
        self.connect_within(None)
    }

    fn connect_within(&self, patience: Option<Duration>) -> Result<Client, Failure> {
        Client::connect_within(&self.socket.clone().unwrap_or_else(socket), patience).map_err(failure)
    }
}

/// Where the server is if nobody says otherwise.
pub fn socket() -> PathBuf {
    let variable = std::env::var_os("PAGECREW_POOL_SOCKET").filter(|path| !path.is_empty());
    variable.map_or_else(|| pool::SOCKET.into(), PathBuf::from)
}

/// How the command fails.
fn failure(error: Error) -> Failure {
    match &error {
        Error::MayNotConnect(socket) => {
            Failure::Impossible(format!("this user may not use {}: {}", socket.display(), who_may(socket)))
        }
        Error::System { errno, .. } if [libc::EACCES, libc::EPERM].contains(&errno.0) => {
            Failure::Impossible(format!("{error}; run it as root"))
        }
        error if error.is_usage() => Failure::Usage(error.to_string()),
        error if error.is_impossible() => Failure::Impossible(error.to_string()),
        error => Failure::Failed(error.to_string()),
    }
}

/// Who may write to the socket at `path`.
fn who_may(path: &Path) -> String {
    let Ok(facts) = std::fs::metadata(path) else { return "its directory is closed to others than root".into() };
    let group = match Group::from_gid(Gid::from_raw(facts.gid())) {
        Ok(Some(group)) => group.name,
        Ok(None) | Err(_) => facts.gid().to_string(),
    };
    let owner = match User::from_uid(Uid::from_raw(facts.uid())) {
        Ok(Some(user)) => user.name,
        Ok(None) | Err(_) => facts.uid().to_string(),
    };
    if facts.mode() & 0o020 != 0 {
        format!("only {owner} and the members of the group {group} may")
    } else {
        format!("only {owner} may; the server's --socket-group admits a group")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn who_may_use_a_socket() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("socket");
        std::fs::write(&file, "").unwrap();
        let with = |mode| {
            std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            who_may(&file)
        };
        assert!(with(0o660).contains("members of the group"));
        assert!(with(0o600).contains("--socket-group"));
        assert!(who_may(&directory.path().join("missing")).contains("root"));
    }

    #[test]
    fn failures_keep_their_kinds() {
        let kinds = [
            (Error::NotServed("/s".into()), 1),
            (Error::Size(3), 2),
            (Error::MayNotConnect("/s".into()), 3),
            (Error::MayNotMount("/m".into()), 3),
            (Error::System { action: "making", path: "/x".into(), errno: pagecrew::sys::Errno(libc::EACCES) }, 3),
            (Error::System { action: "making", path: "/x".into(), errno: pagecrew::sys::Errno(libc::ENOSPC) }, 1),
        ];
        for (error, status) in kinds {
            assert_eq!(failure(error.clone()).status(), status, "{error}");
        }
        let message = failure(Error::NotServed("/s".into())).to_string();
        assert_eq!(message, "no pool is served at /s; start one with: pagecrew pool serve --size 16G");
    }
}
