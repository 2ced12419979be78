//! Telling the service manager how it stands (`sd_notify(3)`), if one has asked.

use pagecrew::sys::clock::now_ns;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// A service manager that has stopped is waited for no longer.
const PATIENCE: Duration = Duration::from_millis(20);

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

/// What `systemctl status` is to show.
pub fn status(text: &str) {
    tell(&format!("STATUS={}", text.replace('\n', "; ")));
}

fn tell(state: &str) {
    // A service manager that doesn't hear waits, or doesn't; there is nothing to be done about it here.
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = send(&socket, state);
    }
}

/// A name that begins with `@` is none in the file system.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        send(path.as_os_str(), "READY=1").unwrap();
        assert_eq!(received(&socket), "READY=1");
        let name = format!("pagecrew-notify-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), "STATUS=x").unwrap();
        assert_eq!(received(&socket), "STATUS=x");
        drop(socket);
        assert!(send(OsStr::new(&format!("@{name}")), "STATUS=x").is_err());
    }
}
