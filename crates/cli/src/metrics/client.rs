//! A scraper: asks a service of this machine for its metrics. What it answers is bounded, and so is the time that it may take.

use super::address::Address;
use super::exposition::Exposition;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest answer that is read.
const ANSWER_MOST: usize = 4 << 20;

/// Why there are no metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoMetrics {
    /// Nobody serves them there.
    NotServed,
    /// This user may not ask.
    Refused,
    /// There was no answer in time.
    Silent,
    /// The answer is not what such a service answers, or the connection failed.
    Wrong(String),
}

impl From<std::io::Error> for NoMetrics {
    fn from(error: std::io::Error) -> NoMetrics {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::NotADirectory => NoMetrics::NotServed,
            ErrorKind::PermissionDenied => NoMetrics::Refused,
            ErrorKind::WouldBlock | ErrorKind::TimedOut => NoMetrics::Silent,
            _ => NoMetrics::Wrong(error.to_string()),
        }
    }
}

/// The metrics that are served at `address`, if they are there within `patience`.
///
/// # Errors
/// See [`NoMetrics`].
pub fn scrape(address: &Address, patience: Duration) -> Result<Exposition, NoMetrics> {
    let until = Instant::now() + patience;
    let answer = match address {
        Address::Socket(path) => {
            let mut stream = connect(path)?;
            ask(&mut stream, until, |stream, left| {
                stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)))
            })?
        }
        Address::Port(address) => {
            let mut stream = TcpStream::connect_timeout(address, patience)?;
            ask(&mut stream, until, |stream, left| {
                stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)))
            })?
        }
    };
    let body = body(&answer).map_err(|reason| NoMetrics::Wrong(reason.to_owned()))?;
    Exposition::parse(body).map_err(NoMetrics::Wrong)
}

/// Connects without waiting for whoever listens: where too many wait already, it is as if he did not answer.
fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(|errno| match errno {
        // What is no socket of this kind is nobody's who serves metrics.
        Errno::PROTOTYPE => Errno::CONNREFUSED,
        errno => errno,
    })?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Sends the request and reads the answer to its end.
fn ask<S: Read + Write>(
    stream: &mut S,
    until: Instant,
    limit: impl Fn(&S, Duration) -> std::io::Result<()>,
) -> Result<Vec<u8>, NoMetrics> {
    // A time-out of zero would be none.
    let left = || until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()).ok_or(NoMetrics::Silent);
    limit(stream, left()?)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut room = vec![0; 64 << 10];
    loop {
        limit(stream, left()?)?;
        match stream.read(&mut room) {
            Ok(0) => return Ok(answer),
            Ok(count) if answer.len() + count > ANSWER_MOST => {
                return Err(NoMetrics::Wrong("the answer is too long".into()));
            }
            Ok(count) => answer.extend_from_slice(&room[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The body of a whole answer with the metrics.
fn body(answer: &[u8]) -> Result<&str, &'static str> {
    let text = std::str::from_utf8(answer).map_err(|_| "the answer is no text")?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or("the answer is no HTTP")?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.")).ok_or("the answer is no HTTP")?;
    if status.split(' ').nth(1) != Some("200") {
        return Err("there are no metrics");
    }
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("the answer is no HTTP")?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = Some(value.trim().parse().map_err(|_| "the answer has no length")?),
            "content-type" if !value.trim_start().starts_with("application/openmetrics-text") => {
                return Err("the answer is no OpenMetrics text");
            }
            _ => {}
        }
    }
    if length == Some(body.len()) { Ok(body) } else { Err("the answer is not whole") }
}

#[cfg(test)]
mod tests {
    use super::super::http;
    use super::super::{Listener, Service};
    use super::*;
    use pagecrew::stats::{Number, Part, Sample};
    use std::os::unix::net::UnixListener;

    const SOON: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_service_is_scraped_at_a_port_and_at_a_socket() {
        let directory = tempfile::tempdir().unwrap();
        let socket = Address::Socket(directory.path().canonicalize().unwrap().join("x.metrics"));
        assert_eq!(scrape(&socket, SOON), Err(NoMetrics::NotServed));
        for address in [socket, Address::parse("0").unwrap()] {
            let metric = pagecrew::metrics::of(Part::Pool).find(|m| m.name == Some("pagecrew_pool_takes")).unwrap();
            let source = move || vec![Sample { metric, labels: Vec::new(), number: Number::Whole(7) }];
            let service = Service::start(Listener::new(&address).unwrap(), source).unwrap();
            let exposition = scrape(service.address(), SOON).unwrap();
            assert_eq!(exposition.named("pagecrew_pool_takes_total").next().unwrap().value, 7.0);
            let address = service.address().clone();
            drop(service);
            assert_eq!(scrape(&address, SOON), Err(NoMetrics::NotServed));
        }
    }

    #[test]
    fn who_does_not_answer_is_left_in_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("silent");
        let listener = UnixListener::bind(&path).unwrap();
        // The usual queue is longer than many processes have descriptors.
        rustix::net::listen(&listener, 8).unwrap();
        let begin = Instant::now();
        assert_eq!(scrape(&Address::Socket(path.clone()), SHORT), Err(NoMetrics::Silent));
        // With a full queue nobody can even connect.
        let mut waiting = Vec::new();
        while let Ok(stream) = connect(&path) {
            waiting.push(stream);
        }
        assert_eq!(scrape(&Address::Socket(path), SHORT), Err(NoMetrics::Silent));
        assert!(begin.elapsed() < SOON);
        drop(listener);
    }

    /// What comes of an answer that ends, or of one that goes on byte by byte.
    fn answered(answer: &'static [u8], slowly: bool) -> Result<Exposition, NoMetrics> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 1024]);
            if !slowly {
                let _ = stream.write_all(answer);
                return;
            }
            while stream.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let result = scrape(&Address::Socket(path), if slowly { SHORT } else { SOON });
        server.join().unwrap();
        result
    }

    #[test]
    fn a_wrong_answer_is_none() {
        assert_eq!(answered(b"", true), Err(NoMetrics::Silent));
        for answer in [
            &b""[..],
            b"garbage",
            b"\xff\xfe\r\n\r\n",
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\n# EOF\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n# EOF\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n# EOF\n",
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n# EOF\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na 1\n",
        ] {
            assert!(matches!(answered(answer, false), Err(NoMetrics::Wrong(_))), "{}", String::from_utf8_lossy(answer));
        }
        assert!(answered(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n# EOF\n", false).is_ok());
        assert_eq!(body(&http::metrics("a 1\n# EOF\n")), Ok("a 1\n# EOF\n"));
    }
}
