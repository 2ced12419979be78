//! The thread that answers scrapers. Nothing else waits for a client. Bounded are the bytes of a request and the pieces in which it comes, the time
//! of a connection, the connections at a time, and those in a second. So a client that is slow, floods or sends nonsense delays at most other scrapers.

use super::address::Address;
use super::http::{self, HEAD_MOST, Outcome};
use super::listener::Listener;
use super::text::text;
use crate::failure::Failure;
use pagecrew::control::Bucket;
use pagecrew::stats::Sample;
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Connections at a time; one more ends the one that has been there longest.
const MOST: usize = 16;
/// How long a connection may last.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections in a second that are accepted; others wait.
const RATE: f64 = 200.0;
/// A request comes in so many pieces at most.
const PIECES_MOST: u32 = 64;
/// How long the figures of one scrape are good for the next one.
const FRESH: Duration = Duration::from_millis(100);
/// Before it is tried again to accept where there was no descriptor left.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Metrics that are served until this is dropped.
#[derive(Debug)]
pub struct Service {
    address: Address,
    wake: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Serves what `source` says to those who connect to `listener`. `source` is called by a thread of its own when somebody asks.
    pub fn start(listener: Listener, source: impl FnMut() -> Vec<Sample> + Send + 'static) -> Result<Service, Failure> {
        Service::start_counted(listener, source, Arc::default())
    }

    /// As [`start`](Service::start), with the CPU time that answering takes, in nanoseconds, in `cpu_ns`.
    pub fn start_counted(
        listener: Listener,
        mut source: impl FnMut() -> Vec<Sample> + Send + 'static,
        cpu_ns: Arc<AtomicU64>,
    ) -> Result<Service, Failure> {
        Service::start_text(listener, move || text(source()), cpu_ns)
    }

    /// The same of whole expositions.
    pub fn start_text(
        listener: Listener,
        source: impl FnMut() -> String + Send + 'static,
        cpu_ns: Arc<AtomicU64>,
    ) -> Result<Service, Failure> {
        let failed = |error: std::io::Error| Failure::Failed(format!("metrics: {error}"));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| failed(errno.into()))?;
        let woken = wake.try_clone().map_err(failed)?;
        let address = listener.address.clone();
        let mut scrapers = Scrapers {
            listener,
            connections: Vec::with_capacity(MOST),
            accepts: Bucket::new(RATE, Duration::from_secs(1), now_ns()),
            text: String::new(),
            text_ns: None,
            source,
            cpu_ns,
        };
        let body = move || scrapers.serve(&woken);
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(body).map_err(failed)?;
        Ok(Service { address, wake, thread: Some(thread) })
    }

    /// Where they are served.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How far a connection is.
enum Stage {
    /// The bytes of the request so far, and in how many pieces they came.
    Reading(Vec<u8>, u32),
    /// The response, and how much of it was sent.
    Writing(Vec<u8>, usize),
}

struct Connection {
    socket: OwnedFd,
    until_ns: u64,
    stage: Stage,
}

/// The connections, the oldest first.
struct Scrapers<S> {
    listener: Listener,
    connections: Vec<Connection>,
    accepts: Bucket,
    text: String,
    /// When the text was made.
    text_ns: Option<u64>,
    source: S,
    /// CPU time of this thread.
    cpu_ns: Arc<AtomicU64>,
}

impl<S: FnMut() -> String> Scrapers<S> {
    /// Goes on until `wake` can be read.
    fn serve(&mut self, wake: &OwnedFd) {
        let mut no_room_ns = 0_u64;
        loop {
            let now = now_ns();
            self.cpu_ns.store(thread_cpu_ns(), Ordering::Relaxed);
            self.connections.retain(|connection| connection.until_ns > now);
            let hold = self.accepts.wait(now).max(Duration::from_nanos(no_room_ns.saturating_sub(now)));
            let ends = self.connections.iter().map(|connection| Duration::from_nanos(connection.until_ns - now));
            let pause = ends.chain((!hold.is_zero()).then_some(hold)).min();
            let (woken, wanted, ready) = self.wait(wake, pause, hold.is_zero());
            if woken {
                return;
            }
            // From behind, so that the places before stay what they are.
            for place in ready.into_iter().rev() {
                if !self.go_on(place) {
                    self.connections.remove(place);
                }
            }
            if wanted && !self.accept() {
                no_room_ns = now_ns() + NO_ROOM.as_nanos() as u64;
            }
        }
    }

    /// Waits, for `pause` at most. Returns whether `wake` can be read, whether a connection can be accepted, and which connections can go on.
    fn wait(&self, wake: &OwnedFd, pause: Option<Duration>, accepting: bool) -> (bool, bool, Vec<usize>) {
        let mut waits = vec![PollFd::new(wake, PollFlags::IN)];
        waits.extend(self.connections.iter().map(|connection| match connection.stage {
            Stage::Reading(..) => PollFd::new(&connection.socket, PollFlags::IN),
            Stage::Writing(..) => PollFd::new(&connection.socket, PollFlags::OUT),
        }));
        if accepting {
            waits.push(PollFd::new(&self.listener.socket, PollFlags::IN));
        }
        let pause =
            pause.map(|pause| Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() });
        if poll(&mut waits, pause.as_ref()).is_err() {
            // Interrupted.
            return (false, false, Vec::new());
        }
        let mut happened = waits.iter().map(|wait| !wait.revents().is_empty());
        let woken = happened.next().unwrap_or(false);
        let happened: Vec<bool> = happened.collect();
        let (connections, listener) = happened.split_at(self.connections.len());
        let ready = connections.iter().enumerate().filter_map(|(place, ready)| ready.then_some(place));
        (woken, listener.contains(&true), ready.collect())
    }

    /// Accepts a connection. Returns false where there was no room for one.
    fn accept(&mut self) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.listener.socket, flags) {
            Ok(socket) => {
                let now = now_ns();
                self.accepts.charge(1.0, now);
                if self.connections.len() >= MOST {
                    self.connections.remove(0);
                }
                let until_ns = now + PATIENCE.as_nanos() as u64;
                self.connections.push(Connection { socket, until_ns, stage: Stage::Reading(Vec::new(), 0) });
                true
            }
            // The client has gone again.
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => true,
            Err(_) => false,
        }
    }

    /// Reads or writes what can be without waiting. Returns whether the connection stays.
    fn go_on(&mut self, place: usize) -> bool {
        if let Some(Connection { socket, stage: Stage::Reading(bytes, pieces), .. }) = self.connections.get_mut(place) {
            let mut room = [0; HEAD_MOST];
            let left = HEAD_MOST.saturating_sub(bytes.len());
            match rustix::net::recv(&*socket, &mut room[..left], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return false,
                Ok((count, _)) => bytes.extend_from_slice(&room[..count]),
                Err(errno) => return waits(errno),
            }
            *pieces += 1;
            let response = match http::judge(bytes) {
                Outcome::More => return *pieces < PIECES_MOST,
                Outcome::Metrics => http::metrics(self.fresh_text()),
                Outcome::Refused(status) => http::refused(status),
            };
            if let Some(connection) = self.connections.get_mut(place) {
                connection.stage = Stage::Writing(response, 0);
            }
        }
        let Some(Connection { socket, stage: Stage::Writing(response, sent), .. }) = self.connections.get_mut(place)
        else {
            return false;
        };
        match rustix::net::send(&*socket, &response[*sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => {
                *sent += count;
                *sent < response.len()
            }
            Err(errno) => waits(errno),
        }
    }

    /// The text, made anew unless it was made a moment ago.
    fn fresh_text(&mut self) -> &str {
        let now = now_ns();
        if self.text_ns.is_none_or(|made| now - made >= FRESH.as_nanos() as u64) {
            self.text = (self.source)();
            self.text_ns = Some(now);
        }
        &self.text
    }
}

/// Whether an error only says that it is not time yet.
fn waits(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::INTR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patience::patience;
    use pagecrew::stats::{Number, Part};
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Shutdown, TcpStream};
    use std::time::Instant;

    /// A service whose exposition says how often it was made, and is as long as that of a pool with many users.
    fn service() -> (Service, Arc<AtomicU64>) {
        let made = Arc::new(AtomicU64::new(0));
        let count = made.clone();
        let metric = |name: &str| pagecrew::metrics::of(Part::Pool).find(|metric| metric.name == Some(name)).unwrap();
        let (takes, files) = (metric("pagecrew_pool_takes"), metric("pagecrew_pool_user_files"));
        let source = move || {
            let number = Number::Whole(count.fetch_add(1, Ordering::Relaxed) + 1);
            let user = |user: u32| Sample { metric: files, labels: vec![user.to_string()], number };
            std::iter::once(Sample { metric: takes, labels: Vec::new(), number }).chain((0..20_000).map(user)).collect()
        };
        let listener = Listener::new(&Address::parse("0").unwrap()).unwrap();
        (Service::start(listener, source).unwrap(), made)
    }

    fn connect(service: &Service) -> TcpStream {
        let Address::Port(address) = service.address() else { panic!() };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn ask(service: &Service, request: &[u8]) -> String {
        let mut stream = connect(service);
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn scrape(service: &Service) -> String {
        let begin = Instant::now();
        let answer = ask(service, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"), "{} bytes", answer.len());
        assert!(begin.elapsed() < PATIENCE * patience(), "{:?}", begin.elapsed());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        body.to_owned()
    }

    #[test]
    fn each_scrape_is_answered_and_those_at_the_same_moment_alike() {
        let (service, made) = service();
        assert!(scrape(&service).contains("pagecrew_pool_takes_total 1\n"));
        for _ in 0..5 {
            scrape(&service);
        }
        assert!(made.load(Ordering::Relaxed) <= 6);
        std::thread::sleep(FRESH);
        let before = made.load(Ordering::Relaxed);
        assert!(scrape(&service).contains(&format!("pagecrew_pool_takes_total {}\n", before + 1)));
        assert!(ask(&service, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(&service, b"DELETE /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(ask(&service, b"\x16\x03\x01\x02\x00\n\n").starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn a_request_may_come_in_pieces() {
        let (service, _) = service();
        let mut stream = connect(&service);
        for byte in b"GET /metrics HTTP/1.1\r\n\r\n" {
            stream.write_all(&[*byte]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("# EOF\n"));
    }

    #[test]
    fn not_in_any_number_of_pieces() {
        let (service, _) = service();
        let mut stream = connect(&service);
        let ended = (0..HEAD_MOST).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            stream.write_all(b"G").is_err()
        });
        assert!(ended && stream.read(&mut [0; 100]).map_or(true, |count| count == 0));
        scrape(&service);
    }

    #[test]
    fn who_says_nothing_or_too_much_holds_up_nobody() {
        let (service, _) = service();
        let silent: Vec<TcpStream> = (0..100).map(|_| connect(&service)).collect();
        scrape(&service);
        // A line of a MiB: whatever is answered, the connection ends.
        let mut endless = connect(&service);
        let _ = endless.write_all(&[b'a'; 1 << 20]);
        let ended = endless.read_to_end(&mut Vec::new());
        assert!(
            ended.as_ref().map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |count| *count < 1000),
            "{ended:?}"
        );
        scrape(&service);
        // Those who were there first had to go; the last ones have to when their time is over.
        let mut first = &silent[0];
        assert!(matches!(first.read(&mut [0]), Ok(0)));
        let begin = Instant::now();
        let mut last = &silent[99];
        assert!(matches!(last.read(&mut [0]), Ok(0)) && begin.elapsed() < PATIENCE + Duration::from_secs(5));
    }

    #[test]
    fn who_does_not_read_holds_up_nobody() {
        let (service, _) = service();
        let slow: Vec<TcpStream> = (0..MOST).map(|_| connect(&service)).collect();
        for mut stream in &slow {
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        }
        for _ in 0..10 {
            scrape(&service);
        }
        // Gone in the middle of a request or an answer.
        for stream in &slow {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(slow);
        scrape(&service);
    }

    #[test]
    fn a_flood_is_slowed_down() {
        let (service, made) = service();
        let begin = Instant::now();
        let Address::Port(address) = *service.address() else { panic!() };
        let mut answered = 0;
        while begin.elapsed() < Duration::from_secs(3) {
            let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else { continue };
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
            match stream.read_to_end(&mut Vec::new()) {
                Ok(_) => answered += 1,
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionReset), "{error}")
                }
            }
        }
        let most = RATE * (begin.elapsed().as_secs_f64() + 1.0) + 1.0;
        assert!(answered > 10 && f64::from(answered) <= most, "{answered} of {most}");
        assert_eq!(made.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn it_ends_while_somebody_is_there() {
        let (service, _) = service();
        let mut waiting = connect(&service);
        waiting.write_all(b"GET").unwrap();
        let begin = Instant::now();
        drop(service);
        assert!(begin.elapsed() < Duration::from_secs(2));
        assert!(!matches!(waiting.read(&mut [0]), Ok(1..)));
    }
}
