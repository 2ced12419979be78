//! Telling the service manager how it stands (`sd_notify(3)`), if one has asked; and hearing that from others.

use pagecrew::sys::clock::now_ns;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A service manager that has stopped is waited for no longer.
const PATIENCE: Duration = Duration::from_millis(20);

/// The variable with the socket's name.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// It is served, from the beginning or again.
pub fn ready() {
    tell("READY=1");
}

/// The settings are read again; [`ready`] follows.
pub fn reloading() {
    tell(&format!("RELOADING=1\nMONOTONIC_USEC={}", now_ns() / 1000));
}

/// It is not served yet, and will be within `time` or say so again.
pub fn more_time(time: Duration) {
    tell(&format!("EXTEND_TIMEOUT_USEC={}", time.as_micros()));
}

/// It ends.
pub fn stopping() {
    tell("STOPPING=1");
}

/// What `systemctl status` is to show. Waits for nobody: the next one says more.
pub fn status(text: &str) {
    if let Some(socket) = std::env::var_os(VARIABLE) {
        let _ = send(&socket, &format!("STATUS={}", text.replace('\n', "; ")), false);
    }
}

fn tell(state: &str) {
    // A service manager that doesn't hear waits, or doesn't; there is nothing to be done about it here.
    if let Some(socket) = std::env::var_os(VARIABLE) {
        let _ = send(&socket, state, true);
    }
}

/// A name that begins with `@` is none in the file system.
fn send(socket: &OsStr, state: &str, wait: bool) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_nonblocking(!wait)?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

/// What a service says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It is served, from the beginning or again.
    Ready,
    /// It takes no longer than so until it is.
    More(Duration),
    /// What there is to show of it.
    Status(String),
}

/// A socket at which a service says how it stands. Its file goes with it.
#[derive(Debug)]
pub struct Hearer {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Hearer {
    /// More messages than this are heard the next time.
    const MOST: usize = 64;

    /// Takes the place of whatever is at `path`, where nobody else can make a file.
    pub fn bind(path: &Path) -> io::Result<Hearer> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixDatagram::bind(path)?;
        socket.set_nonblocking(true)?;
        Ok(Hearer { socket, path: path.to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Readable when something was said.
    pub fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// What was said since the last time.
    pub fn heard(&self) -> Vec<Said> {
        let mut room = [0; 4096];
        let mut said = Vec::new();
        for _ in 0..Hearer::MOST {
            let Ok(count) = self.socket.recv(&mut room) else { break };
            said.extend(parse(&String::from_utf8_lossy(&room[..count])));
        }
        said
    }
}

impl Drop for Hearer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What is understood of a message; the rest is nobody's business here.
fn parse(text: &str) -> impl Iterator<Item = Said> + '_ {
    text.lines().filter_map(|line| match line.split_once('=')? {
        ("READY", "1") => Some(Said::Ready),
        ("EXTEND_TIMEOUT_USEC", time) => Some(Said::More(Duration::from_micros(time.parse().ok()?))),
        ("STATUS", status) => Some(Said::Status(status.to_owned())),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_in_order_and_nonsense_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        std::fs::write(&path, "left by somebody").unwrap();
        let hearer = Hearer::bind(&path).unwrap();
        assert_eq!(hearer.heard(), []);
        for text in [
            "EXTEND_TIMEOUT_USEC=1500000",
            "RELOADING=1\nMONOTONIC_USEC=7",
            "READY=1\nSTATUS=a = b\n",
            "READY=2",
            "=",
            "",
            "\u{0}\u{ff}",
        ] {
            send(hearer.path().as_os_str(), text, true).unwrap();
        }
        let expected = [Said::More(Duration::from_millis(1500)), Said::Ready, Said::Status("a = b".into())];
        assert_eq!(hearer.heard(), expected);
        drop(hearer);
        assert!(!path.exists());
    }

    fn received(socket: &UnixDatagram) -> String {
        let mut room = [0; 100];
        let length = socket.recv(&mut room).unwrap();
        String::from_utf8_lossy(&room[..length]).into_owned()
    }

    #[test]
    fn sockets_with_and_without_a_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1", true).unwrap();
        assert_eq!(received(&socket), "READY=1");
        let name = format!("pagecrew-notify-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), "STATUS=x", true).unwrap();
        assert_eq!(received(&socket), "STATUS=x");
        drop(socket);
        assert!(send(OsStr::new(&format!("@{name}")), "STATUS=x", true).is_err());
    }
}
