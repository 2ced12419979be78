//! Where the services of this machine are asked: the sockets of `pagecrew serve`, the addresses in the file of settings, and the pool's own socket.

use super::service::{Figures, Service};
use crate::metrics::{Address, scrape};
use crate::output::printable;
use crate::pool;
use crate::settings::{self, TABLES};
use pagecrew::pool::{Client, Error};
use pagecrew::stats::Part;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Where `pagecrew serve` has a socket for each of its services.
pub const SOCKETS: &str = crate::serve::config::DIRECTORY;
/// How long a service may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The name of a part's service: that of its socket and of its table of settings.
fn name(part: Part) -> &'static str {
    match part {
        Part::Run => "run",
        Part::Trim => "trim",
        Part::Pool => "pool",
        Part::Reclaim => "reclaim",
        Part::Serve => "serve",
    }
}

/// The places where one part may be served.
pub struct Addresses {
    part: Part,
    socket: PathBuf,
    settings: PathBuf,
    /// When the settings were written that were read last, and how long they were.
    read: Option<(SystemTime, u64)>,
    /// What they say, or what is wrong with them.
    configured: Result<Option<Address>, String>,
}

impl Addresses {
    /// Those of `part`, with the sockets in `sockets` and the file `settings`, which need not be there.
    pub fn new(part: Part, sockets: &Path, settings: &Path) -> Addresses {
        let socket = sockets.join(format!("{}.metrics", name(part)));
        Addresses { part, socket, settings: settings.to_owned(), read: None, configured: Ok(None) }
    }

    /// Reads the settings again if they have changed.
    fn refresh(&mut self) {
        let facts = std::fs::metadata(&self.settings).ok();
        let read = facts.and_then(|facts| Some((facts.modified().ok()?, facts.len())));
        if read == self.read {
            return;
        }
        self.read = read;
        self.configured = match std::fs::read_to_string(&self.settings) {
            Ok(text) => configured(&text, name(self.part)).map_err(|why| format!("{}: {why}", self.settings.display())),
            // Whoever may not read it does not know of it.
            Err(_) => Ok(None),
        };
    }

    /// Asks.
    pub fn ask(&mut self) -> Service<Figures> {
        self.refresh();
        let mut answer = Service::Absent;
        let configured = self.configured.as_ref().ok().cloned().flatten();
        for address in std::iter::once(Address::Socket(self.socket.clone())).chain(configured) {
            let found = match scrape(&address, PATIENCE) {
                Ok(exposition) => match Figures::of(self.part, &exposition) {
                    Some(figures) => return Service::Here(figures),
                    None => Service::Wrong(format!("there are no metrics of {} at {address}", name(self.part))),
                },
                Err(reason) => reason.into(),
            };
            if found != Service::Absent {
                answer = match found {
                    Service::Wrong(reason) => Service::Wrong(printable(&reason)),
                    other => other,
                };
            }
        }
        match (&self.configured, answer) {
            (Err(reason), Service::Absent) => Service::Wrong(printable(reason)),
            (_, answer) => answer,
        }
    }
}

/// The address in the table `table` of a file of settings.
fn configured(text: &str, table: &str) -> Result<Option<Address>, String> {
    let Some(table) = TABLES.iter().find(|known| known.name == table) else { return Ok(None) };
    let settings = settings::members_of(text, table)?.unwrap_or_default();
    let metrics = settings.iter().find(|setting| setting.key() == "metrics");
    metrics.map(|setting| setting.parse(Address::parse)).transpose()
}

/// How a pool stands.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolStatus {
    /// The server's answer.
    pub document: Value,
    /// As `pagecrew pool status` shows it.
    pub lines: Vec<String>,
}

/// The pool, connected to as long as it answers.
pub struct Pool {
    socket: PathBuf,
    client: Option<Client>,
}

impl Pool {
    /// The one whose socket is at `socket`.
    pub fn new(socket: PathBuf) -> Pool {
        Pool { socket, client: None }
    }

    /// Asks. May wait for as long as the server does not answer.
    pub fn ask(&mut self) -> Service<PoolStatus> {
        let client = match self.client.take().map_or_else(|| Client::connect(&self.socket), Ok) {
            Ok(client) => client,
            Err(Error::NotServed(_)) => return Service::Absent,
            Err(Error::MayNotConnect(_)) => return Service::Refused,
            Err(error) => return Service::Wrong(printable(&error.to_string())),
        };
        match client.status() {
            Ok(json) => {
                self.client = Some(client);
                status(&json)
            }
            Err(Error::NotServed(_)) => Service::Absent,
            Err(error) => Service::Wrong(printable(&error.to_string())),
        }
    }
}

fn status(json: &str) -> Service<PoolStatus> {
    match (serde_json::from_str(json), pool::status_text(json)) {
        (Ok(document), Ok(text)) => {
            Service::Here(PoolStatus { document, lines: text.lines().map(str::to_owned).collect() })
        }
        _ => Service::Wrong("the pool's answer is not one of this version's".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Listener, Service as Server};
    use pagecrew::stats::{Number, Sample};
    use std::os::unix::net::UnixListener;

    fn serve(path: &Path, name: &str, part: Part) -> Server {
        let metric = pagecrew::metrics::of(part).find(|metric| metric.name == Some(name)).unwrap();
        let source = move || vec![Sample { metric, labels: Vec::new(), number: Number::Whole(7) }];
        Server::start(Listener::new(&Address::Socket(path.to_owned())).unwrap(), source).unwrap()
    }

    #[test]
    fn the_socket_of_serve_comes_before_the_settings() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let settings = directory.join("settings");
        let mut addresses = Addresses::new(Part::Reclaim, &directory, &settings);
        assert_eq!(addresses.ask(), Service::Absent);
        // Somewhere else, as the settings say from now on.
        let other = directory.join("other");
        let server = serve(&other, "pagecrew_reclaim_factor", Part::Reclaim);
        std::fs::write(&settings, format!("[reclaim]\nmetrics = {:?}\n", other.display().to_string())).unwrap();
        assert_eq!(addresses.ask().here().unwrap().whole("factor"), Some(7));
        let own = serve(&directory.join("reclaim.metrics"), "pagecrew_reclaim_own_factor", Part::Reclaim);
        assert_eq!(addresses.ask().here().unwrap().whole("own_factor"), Some(7));
        drop(own);
        assert_eq!(addresses.ask().here().unwrap().whole("own_factor"), None);
        drop(server);
        assert_eq!(addresses.ask(), Service::Absent);
        // Somebody else's metrics.
        let _server = serve(&other, "pagecrew_trim_members", Part::Trim);
        assert!(matches!(addresses.ask(), Service::Wrong(reason) if reason.contains("no metrics of reclaim")));
        std::fs::write(&settings, "[reclaim]\nmetrics = []\n").unwrap();
        assert!(matches!(addresses.ask(), Service::Wrong(reason) if reason.contains("line 2")));
    }

    #[test]
    fn what_settings_say() {
        let port = Address::parse("9752").unwrap();
        assert_eq!(configured("[reclaim]\nmetrics = 9752\n", "reclaim"), Ok(Some(port)));
        for text in ["", "[reclaim]\n", "[trim]\nmetrics = 9752\n", "[reclaim]\nunknown = 1\n"] {
            assert_eq!(configured(text, "reclaim"), Ok(None), "{text}");
        }
        assert!(configured("=", "reclaim").is_err() && configured("[nonsense]\n", "reclaim").is_err());
    }

    #[test]
    fn a_pool_that_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert_eq!(Pool::new(path.clone()).ask(), Service::Absent);
        // A socket of another kind.
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(Pool::new(path).ask(), Service::Wrong(_)));
        assert!(matches!(status("{}"), Service::Wrong(_)) && matches!(status("x"), Service::Wrong(_)));
    }
}
