//! The socket that clients connect to.

use super::address::Address;
use crate::failure::Failure;
use pagecrew::pool;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::Permissions;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// A socket that listens, and doesn't wait for anybody. Dropping it removes its file, if it has one.
#[derive(Debug)]
pub struct Listener {
    pub socket: OwnedFd,
    /// Where it is.
    pub address: Address,
    /// Whether the file is another process's.
    inherited: bool,
}

impl Listener {
    /// Listens at `address`.
    pub fn new(address: &Address) -> Result<Listener, Failure> {
        match address {
            Address::Port(wanted) => {
                let failed = |error: std::io::Error| failure(&wanted.to_string(), &error);
                let listener = TcpListener::bind(wanted).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                let address = Address::Port(listener.local_addr().map_err(failed)?);
                Ok(Listener { socket: listener.into(), address, inherited: false })
            }
            Address::Socket(path) => {
                let path = place(path)?;
                let socket = listen(&path).map_err(|error| failure(&path.display().to_string(), &error))?;
                Ok(Listener { socket, address: Address::Socket(path), inherited: false })
            }
        }
    }

    /// One that the process has that started this one; its file, if it has one, stays.
    pub fn inherited(socket: OwnedFd) -> Result<Listener, Failure> {
        let failed = |error: std::io::Error| failure("standard input", &error);
        if !rustix::net::sockopt::socket_acceptconn(&socket).map_err(|errno| failed(errno.into()))? {
            return Err(failed(Errno::INVAL.into()));
        }
        Ok(Listener { socket, address: Address::Socket("/proc/self/fd/0".into()), inherited: true })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Socket(path) = &self.address
            && !self.inherited
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn failure(place: &str, error: &std::io::Error) -> Failure {
    let message = format!("metrics: {place}: {error}");
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => Failure::Impossible(message),
        _ => Failure::Failed(message),
    }
}

/// The path by the way that no link changes, in a directory where nobody else can make or change names.
fn place(path: &Path) -> Result<PathBuf, Failure> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Failure::Usage(format!("metrics: {} is not the path of a socket", path.display())));
    };
    std::fs::create_dir_all(directory).map_err(|error| failure(&directory.display().to_string(), &error))?;
    let directory = pool::socket_directory(directory).map_err(|error| match error {
        pool::Error::NotOwn(path) => Failure::Usage(format!(
            "metrics: {} is another user's, or others may write to it: choose a directory where only this user and root may write",
            path.display()
        )),
        error => Failure::Failed(format!("metrics: {error}")),
    })?;
    Ok(directory.join(name))
}

/// A socket at `path` that only this user may connect to. One that nobody listens at any more is replaced.
fn listen(path: &Path) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    match rustix::net::connect(&new()?, &address) {
        // With a full backlog it is somebody's as well.
        Ok(()) | Err(Errno::AGAIN) => return Err(Errno::ADDRINUSE.into()),
        Err(_) => {}
    }
    if std::fs::symlink_metadata(path).is_ok_and(|facts| facts.file_type().is_socket()) {
        std::fs::remove_file(path)?;
    }
    let socket = new()?;
    rustix::net::bind(&socket, &address)?;
    // Nobody can connect before it listens.
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_is_its_owners_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("new/socket");
        let address = Address::Socket(path.clone());
        let listener = Listener::new(&address).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(listener.address, address);
        assert!(UnixStream::connect(&path).is_ok());
        let Err(Failure::Failed(message)) = Listener::new(&address) else { panic!("two at one place") };
        assert!(message.contains("in use"), "{message}");
        drop(listener);
        assert!(!path.exists());
        // What somebody who was killed has left behind is replaced; other files are not.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(Listener::new(&address).unwrap());
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::new(&address), Err(Failure::Failed(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_directory_that_others_may_change_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        let result = Listener::new(&Address::Socket(directory.path().join("socket")));
        match result {
            Err(Failure::Usage(message)) => assert!(message.contains("others may write to it"), "{message}"),
            // In a user namespace it can't be told whose the directories are.
            Ok(_) => assert_ne!(
                std::fs::read_to_string("/proc/self/uid_map").unwrap().split_whitespace().last(),
                Some("4294967295")
            ),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_port_is_chosen_and_taken() {
        let listener = Listener::new(&Address::parse("0").unwrap()).unwrap();
        let Address::Port(address) = listener.address else { panic!() };
        assert_ne!(address.port(), 0);
        let Err(Failure::Failed(message)) = Listener::new(&Address::Port(address)) else { panic!("two at one port") };
        assert!(message.contains(&address.to_string()), "{message}");
    }
}
