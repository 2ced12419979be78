//! Where metrics are served: a Unix socket, or a port that only this machine reaches.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// An address that only this machine reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// The path of a Unix socket.
    Socket(PathBuf),
    /// A port of a loopback address; of port 0, the kernel chooses one.
    Port(SocketAddr),
}

impl Address {
    /// The address in `text`: a path with a `/` in it, `PORT`, `127.0.0.1:PORT` or `[::1]:PORT`.
    pub fn parse(text: &str) -> Result<Address, String> {
        if text.contains('/') {
            let path = std::path::absolute(text).map_err(|error| format!("'{text}': {error}"))?;
            return Ok(Address::Socket(path));
        }
        if let Ok(port) = text.parse::<u16>() {
            return Ok(Address::Port((Ipv4Addr::LOCALHOST, port).into()));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Address::Port(address)),
            Ok(_) => Err(format!("'{text}' can be reached from other machines: only 127.0.0.1 and [::1] are served")),
            Err(_) => {
                Err(format!("'{text}' is no path with a '/', no port, and neither 127.0.0.1:PORT nor [::1]:PORT"))
            }
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Socket(path) => path.display().fmt(f),
            Address::Port(address) => write!(f, "http://{address}/metrics"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_ports_of_this_machine() {
        let port = |text: &str| match Address::parse(text) {
            Ok(Address::Port(address)) => address.to_string(),
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(
            [port("9750"), port("127.0.0.1:1"), port("[::1]:80")],
            ["127.0.0.1:9750", "127.0.0.1:1", "[::1]:80"]
        );
        assert_eq!(Address::parse("/run/x"), Ok(Address::Socket("/run/x".into())));
        let here = std::env::current_dir().unwrap();
        assert_eq!(Address::parse("./x"), Ok(Address::Socket(here.join("x"))));
    }

    #[test]
    fn other_machines_are_not_served() {
        for text in ["0.0.0.0:9750", "[::]:9750", "192.168.0.1:80", "[::ffff:192.168.0.1]:80", "8.8.8.8:53"] {
            let reason = Address::parse(text).unwrap_err();
            assert!(reason.contains(text) && reason.contains("other machines"), "{reason}");
        }
        for text in
            ["", "socket", "65536", "-1", ":9750", "localhost:80", "127.0.0.1", "[::1]", "127.0.0.1:99999", "1 "]
        {
            let reason = Address::parse(text).unwrap_err();
            assert!(reason.contains("PORT"), "{reason}");
        }
    }
}
