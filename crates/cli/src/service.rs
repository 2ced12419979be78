//! The loop that every service has: it waits for signals, for descriptors and for a time, and tells the service manager how it stands.

use crate::failure::Failure;
use crate::notify;
use crate::output;
use crate::rereading::Rereading;
use crate::signals::{self, SignalDescriptor, SignalSet};
use crate::supervised;
use pagecrew::sys::clock::now_ns;
use std::cell::Cell;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Why a wait is over.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<S> {
    /// SIGTERM or SIGINT: the service is to end.
    Stop,
    /// SIGHUP has come, and the settings were read again; [`reloaded`](Service::reloaded) follows when that was seen to.
    Reload(Result<S, Failure>),
    /// These descriptors are ready, or it is time.
    Due(Vec<RawFd>),
}

/// A service, from its beginning to its end. Its settings are an `S`.
pub struct Service<S> {
    signals: SignalDescriptor,
    /// Those of them that end it.
    ends: SignalSet,
    before: SignalSet,
    rereading: Rereading<S>,
    /// Whether it has said that it is served.
    served: Cell<bool>,
}

impl<S: Send + 'static> Service<S> {
    /// Signals wait from here on until they are asked for. To be called before there are threads, which take over what is blocked. `read` has the
    /// settings as they are now; it is called on a thread of its own.
    pub fn begin(read: impl Fn() -> Result<S, Failure> + Send + Sync + 'static) -> Result<Service<S>, Failure> {
        signals::survive_a_closed_pipe();
        let set = SignalSet::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
        let before = set.block();
        let signals = SignalDescriptor::new(&set).map_err(|error| Failure::Failed(format!("signals: {error}")))?;
        // Whoever reads what it says may be stopped, and nobody waits for him.
        output::never_wait().map_err(|error| Failure::Failed(format!("the thread that writes: {error}")))?;
        let ends = SignalSet::of(&[libc::SIGINT, libc::SIGTERM]);
        let rereading = Rereading::new(read)?;
        Ok(Service { signals, ends, before, rereading, served: Cell::new(false) })
    }

    /// It is served: the service manager may start what needs it.
    pub fn ready(&self) {
        self.served.set(true);
        notify::ready();
    }

    /// It takes its time until it is served; to be called again and again until then.
    pub fn starting(&self) {
        notify::more_time(Duration::from_secs(10));
    }

    /// It takes no longer than `time` until it is served, or says so again.
    pub fn more_time(&self, time: Duration) {
        notify::more_time(time);
    }

    /// The settings that were read again are in force, or refused. A service that was not served yet is not served by that.
    pub fn reloaded(&self) {
        if self.served.get() {
            self.ready();
        }
    }

    /// It ends. A second signal ends this process at once; the next one cleans up. A supervised service takes no notice of a second one: it
    /// may get one from the supervisor and one from the service manager, and is killed when its time is over.
    pub fn stopping(&self) {
        output::ending();
        notify::stopping();
        if supervised::name().is_none() {
            self.before.restore();
        }
    }

    /// Waits for a signal, for one of `descriptors` with its events, or until the time `until_ns`, whichever is first.
    pub fn wait(
        &mut self,
        until_ns: Option<u64>,
        descriptors: impl IntoIterator<Item = (RawFd, libc::c_short)>,
    ) -> Event<S> {
        let own = [self.signals.as_raw_fd(), self.rereading.descriptor()].map(|fd| (fd, libc::POLLIN));
        let polled = own.into_iter().chain(descriptors).map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
        let mut polled: Vec<_> = polled.collect();
        let timeout = until_ns.map(|until| Duration::from_nanos(until.saturating_sub(now_ns())));
        signals::poll(&mut polled, timeout);
        match self.signals.take() {
            // The kernel has this one come first. However often it comes, the end goes before it.
            Some(libc::SIGHUP) if self.ends.pending() => {
                while self.signals.take().is_some_and(|signal| signal == libc::SIGHUP) {}
                Event::Stop
            }
            Some(libc::SIGHUP) => {
                if self.served.get() {
                    notify::reloading();
                }
                self.rereading.begin();
                Event::Due(Vec::new())
            }
            Some(_) => Event::Stop,
            None => {
                if let Some(read) = self.rereading.take() {
                    return Event::Reload(read);
                }
                let ready = |polled: &&libc::pollfd| polled.revents & polled.events != 0;
                Event::Due(polled.iter().skip(own.len()).filter(ready).map(|polled| polled.fd).collect())
            }
        }
    }
}
