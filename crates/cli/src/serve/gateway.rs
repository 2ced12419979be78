//! The process that joins the metrics of all services. It has no capabilities, and nobody of the others is beside the socket that users
//! reach.

use super::directory::{OWN, metrics_in};
use super::part::Part;
use crate::failure::Failure;
use crate::metrics::{Listener, Service, text};
use crate::service::{self, Event};
use pagecrew::metrics::UP;
use pagecrew::stats::{Number, Sample};
use pagecrew::sys::clock::now_ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// All services together are waited for no longer.
const PATIENCE: Duration = Duration::from_millis(700);
/// The longest answer, many times that of a pool with the most users.
const MOST: usize = 16 << 20;
/// How an exposition ends.
const END: &str = "# EOF\n";

/// Join the metrics of services; standard input is the socket to serve them at
#[derive(clap::Args)]
pub struct Arguments {
    directory: PathBuf,
}

/// `pagecrew serve-metrics`, as the supervisor starts it.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    // It has no settings.
    let mut service = service::Service::begin(|| Ok(()))?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| Failure::Failed(format!("standard input: {error}")))?;
    let listener = Listener::inherited(socket)?;
    let mut gateway = Gateway { directory: arguments.directory.clone(), services: Vec::new() };
    let metrics = Service::start_text(listener, move || gateway.exposition(), Arc::default())?;
    service.ready();
    loop {
        match service.wait(None, []) {
            Event::Stop => break,
            Event::Reload(_) => service.reloaded(),
            Event::Due(_) => {}
        }
    }
    service.stopping();
    drop(metrics);
    Ok(ExitCode::SUCCESS)
}

struct Gateway {
    directory: PathBuf,
    /// The services that there are, as the supervisor has said last.
    services: Vec<Part>,
}

impl Gateway {
    /// The metrics of the supervisor and of every service that answers in time.
    fn exposition(&mut self) -> String {
        let names = Part::SERVICES.map(Part::name).into_iter().chain([OWN]);
        let mut answers = fetch(names.map(|name| (name, metrics_in(&self.directory, name))), PATIENCE);
        let own = answers.remove(OWN);
        if let Some(own) = &own {
            self.services = services_in(own);
        }
        let up = |part: &Part| Sample {
            metric: UP,
            labels: vec![part.name().to_owned()],
            number: Number::Whole(answers.contains_key(part.name()).into()),
        };
        let up = text(self.services.iter().map(up).collect());
        let theirs = self.services.iter().filter_map(|part| answers.get(part.name()));
        join([&up].into_iter().chain(own.as_ref()).chain(theirs))
    }
}

/// One exposition out of several, each of which is one. Each part has metrics of its own, so none is there twice.
fn join<'a>(parts: impl Iterator<Item = &'a String>) -> String {
    let mut joined: String = parts.filter_map(|part| part.strip_suffix(END)).collect();
    joined.push_str(END);
    joined
}

/// The services that the supervisor's exposition is about.
fn services_in(text: &str) -> Vec<Part> {
    let name = |line: &str| Some(line.strip_prefix("pagecrew_serve_ready{service=\"")?.split_once('"')?.0.to_owned());
    text.lines().filter_map(name).filter_map(|name| Part::parse(&name).ok()).collect()
}

/// Somebody who was asked, and what has come so far.
struct Asked {
    name: &'static str,
    socket: OwnedFd,
    answer: Vec<u8>,
}

/// The expositions at these sockets, of those who answer within `patience`.
fn fetch(sockets: impl Iterator<Item = (&'static str, PathBuf)>, patience: Duration) -> BTreeMap<&'static str, String> {
    let until_ns = now_ns() + patience.as_nanos() as u64;
    let ask = |(name, path): (_, PathBuf)| Some(Asked { name, socket: ask(&path).ok()?, answer: Vec::new() });
    let mut asked: Vec<Asked> = sockets.filter_map(ask).collect();
    let mut answers = BTreeMap::new();
    while !asked.is_empty() {
        let left = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
        if left.is_zero() {
            break;
        }
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut waits: Vec<PollFd<'_>> = asked.iter().map(|asked| PollFd::new(&asked.socket, PollFlags::IN)).collect();
        // Interrupted is asked again.
        let _ = poll(&mut waits, Some(&time));
        let ready: Vec<bool> = waits.iter().map(|wait| !wait.revents().is_empty()).collect();
        drop(waits);
        let mut ready = ready.into_iter();
        asked.retain_mut(|asked| match ready.next() {
            Some(true) => match asked.go_on() {
                Progress::More => true,
                Progress::Done(text) => {
                    answers.insert(asked.name, text);
                    false
                }
                Progress::Nonsense => false,
            },
            _ => true,
        });
    }
    answers
}

/// Asks for the metrics at the socket `path`.
fn ask(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    // It fits into any buffer.
    rustix::net::send(&socket, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", SendFlags::NOSIGNAL)?;
    Ok(socket)
}

enum Progress {
    More,
    Done(String),
    Nonsense,
}

impl Asked {
    fn go_on(&mut self) -> Progress {
        let mut room = [0; 64 << 10];
        match rustix::net::recv(&self.socket, &mut room[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => exposition(&self.answer).map_or(Progress::Nonsense, Progress::Done),
            Ok((count, _)) if self.answer.len() + count <= MOST => {
                self.answer.extend_from_slice(&room[..count]);
                Progress::More
            }
            Err(Errno::AGAIN | Errno::INTR) => Progress::More,
            Ok(_) | Err(_) => Progress::Nonsense,
        }
    }
}

/// The exposition in an answer that is whole.
fn exposition(answer: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    (head.starts_with("HTTP/1.1 200 ") && body.ends_with(END)).then(|| body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::metrics::{Board, all};
    use super::*;
    use crate::metrics::Address;
    use crate::metrics::check::{assert_complete, families};
    use crate::patience::patience;
    use pagecrew::control::supervision::Standing;
    use pagecrew::stats::Part as Registered;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Instant;

    fn directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        (directory, path)
    }

    fn gateway(path: &Path) -> Gateway {
        Gateway { directory: path.to_owned(), services: Vec::new() }
    }

    fn sample(name: &str, value: u64) -> Vec<Sample> {
        let metric = pagecrew::metrics::all().into_iter().find(|metric| metric.name == Some(name)).unwrap();
        vec![Sample { metric, labels: Vec::new(), number: Number::Whole(value) }]
    }

    fn service(path: &Path, name: &str, samples: Vec<Sample>) -> Service {
        Service::start(Listener::new(&Address::Socket(metrics_in(path, name))).unwrap(), move || samples.clone())
            .unwrap()
    }

    fn up(text: &str) -> Vec<(String, String)> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("pagecrew_serve_up{service=\""));
        lines.map(|line| line.split_once("\"} ").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap()).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn the_metrics_of_the_supervisor_are_what_is_registered() {
        let mut samples =
            all(&[(Part::Pool, Standing { ready: 1, ..Standing::default() }), (Part::Trim, Standing::default())]);
        samples.push(Sample { metric: UP, labels: vec!["pool".into()], number: Number::Whole(1) });
        assert_complete(Registered::Serve, samples);
    }

    #[test]
    fn all_that_answer_are_joined_and_those_that_do_not_are_down() {
        let (_directory, path) = directory();
        let mut gateway = gateway(&path);
        assert_eq!(gateway.exposition(), END);
        let board = Board::default();
        let _own = board.serve(&metrics_in(&path, OWN)).unwrap();
        let ready = Standing { ready: 1, ..Standing::default() };
        board.write(vec![(Part::Reclaim, ready), (Part::Pool, ready), (Part::Trim, Standing::default())]);
        let _pool = service(&path, "pool", sample("pagecrew_pool_takes", 7));
        let reclaim = service(&path, "reclaim", sample("pagecrew_reclaim_stalls", 3));
        // One that has the socket and is stopped.
        let stopped = UnixListener::bind(metrics_in(&path, "trim")).unwrap();
        let begin = Instant::now();
        let text = gateway.exposition();
        assert!(begin.elapsed() < Duration::from_millis(1000) * patience(), "{:?}", begin.elapsed());
        assert_eq!(up(&text), pairs(&[("reclaim", "1"), ("pool", "1"), ("trim", "0")]));
        assert!(text.contains("pagecrew_pool_takes_total 7\n") && text.contains("pagecrew_reclaim_stalls_total 3\n"));
        assert!(text.contains("pagecrew_serve_ready{service=\"trim\"} 0\n"));
        // One exposition, in which nothing is there twice.
        assert!(families(&text).len() > 5);
        assert_eq!(text.matches(END).count(), 1);
        drop((stopped, reclaim));
        let begin = Instant::now();
        let text = gateway.exposition();
        assert_eq!(up(&text), pairs(&[("reclaim", "0"), ("pool", "1"), ("trim", "0")]));
        assert!(begin.elapsed() < PATIENCE * patience(), "nobody was there to wait for");
        // Of one that is not to run, nothing is said.
        board.write(vec![(Part::Pool, ready)]);
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(up(&gateway.exposition()), pairs(&[("pool", "1")]));
    }

    #[test]
    fn nonsense_is_left_out() {
        let (_directory, path) = directory();
        let board = Board::default();
        let _own = board.serve(&metrics_in(&path, OWN)).unwrap();
        board.write(vec![(Part::Pool, Standing::default())]);
        for answer in [
            "",
            "x",
            "HTTP/1.1 500 No\r\n\r\nx 1\n# EOF\n",
            "HTTP/1.1 200 OK\r\n\r\nx 1\n",
            "HTTP/1.1 200 OK\r\n\r\n\u{e9}",
        ] {
            let listener = UnixListener::bind(metrics_in(&path, "pool")).unwrap();
            let answering = std::thread::spawn(move || {
                let (mut stream, _): (UnixStream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1000]);
                let _ = stream.write_all(answer.as_bytes());
            });
            let text = gateway(&path).exposition();
            assert_eq!(up(&text), pairs(&[("pool", "0")]), "{answer}");
            assert!(!text.contains("x 1"));
            answering.join().unwrap();
            std::fs::remove_file(metrics_in(&path, "pool")).unwrap();
        }
    }
}
