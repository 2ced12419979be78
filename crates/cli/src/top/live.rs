//! The loop on a terminal: keys, signals and time.

use super::draw::{Ability, draw};
use super::keys::Keys;
use super::screen::{Action, Rows, Screen};
use super::terminal::Terminal;
use super::watch::Watch;
use crate::failure::Failure;
use crate::signals::{self, SignalDescriptor, SignalSet};
use pagecrew::sys::clock::now_ns;
use rustix::io::Errno;
use std::io;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::time::Duration;

/// The second look comes soon, since only then there are rates and answers.
const SECOND_NS: u64 = 300_000_000;
/// How long an Escape waits for what may follow.
const ESCAPE_NS: u64 = 100_000_000;

/// How it ends.
enum End {
    Quit,
    /// By this signal.
    Signal(i32),
}

/// Shows `watch` on the terminal until it ends.
pub fn run(
    mut watch: Watch,
    screen: Screen,
    ability: Ability,
    interval: Duration,
    before: &SignalSet,
    set: &SignalSet,
) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::Failed(format!("the terminal: {error}"));
    let descriptor = SignalDescriptor::new(set).map_err(|error| Failure::Failed(format!("signals: {error}")))?;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = crate::output::printable(host.trim_end());
    watch.look();
    let terminal = Terminal::enter().map_err(failed)?;
    let mut live =
        Live { watch, terminal, screen, ability, host, keys: Keys::default(), rows: Rows::default(), interval };
    let end = live.go_on(&descriptor, before, set);
    live.terminal.leave();
    match end.map_err(failed)? {
        End::Quit => Ok(ExitCode::SUCCESS),
        End::Signal(signal) => {
            // As whoever has sent it expects: by it. It waits until signals come again.
            signals::raise(signal);
            before.restore();
            Ok(ExitCode::FAILURE)
        }
    }
}

struct Live {
    watch: Watch,
    terminal: Terminal,
    screen: Screen,
    ability: Ability,
    host: String,
    keys: Keys,
    rows: Rows,
    interval: Duration,
}

impl Live {
    fn go_on(&mut self, descriptor: &SignalDescriptor, before: &SignalSet, set: &SignalSet) -> io::Result<End> {
        let interval = self.interval.as_nanos() as u64;
        let mut look_ns = now_ns() + interval.min(SECOND_NS);
        let mut escape_ns = None;
        let mut drawn = self.draw()?;
        loop {
            let until = escape_ns.map_or(look_ns, |escape: u64| escape.min(look_ns));
            let (keys, writable) = self.wait(descriptor, until);
            while let Some(signal) = descriptor.take() {
                match signal {
                    libc::SIGWINCH => self.terminal.redraw()?,
                    libc::SIGCONT => self.terminal.take_again()?,
                    libc::SIGTSTP => self.suspend(before, set)?,
                    end => return Ok(End::Signal(end)),
                }
                drawn = false;
            }
            if writable {
                self.terminal.write()?;
            }
            let mut pressed = Vec::new();
            if keys {
                let mut room = [0; 256];
                // Not by way of a buffer, which would keep keys that nobody waits for.
                match rustix::io::read(io::stdin(), &mut room) {
                    // Whoever was there is gone.
                    Ok(0) => return Ok(End::Quit),
                    Ok(count) => pressed = self.keys.take(&room[..count]),
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(_) => return Ok(End::Quit),
                }
                escape_ns = self.keys.waits().then(|| now_ns() + ESCAPE_NS);
            }
            if escape_ns.is_some_and(|escape| now_ns() >= escape) {
                escape_ns = None;
                pressed.extend(self.keys.give_up());
            }
            for key in pressed {
                match self.screen.press(key, self.rows) {
                    Action::Nothing => continue,
                    Action::Draw => {}
                    Action::Redraw => self.terminal.redraw()?,
                    Action::Suspend => signals::stop_this_group(),
                    Action::Quit => return Ok(End::Quit),
                }
                drawn = false;
            }
            let now = now_ns();
            if now >= look_ns {
                // Where it was stopped for long, nothing is made up for.
                look_ns = now.max(look_ns + interval).min(now + interval);
                if !self.screen.held {
                    self.watch.look();
                    drawn = false;
                }
            }
            if !drawn {
                drawn = self.draw()?;
            }
        }
    }

    /// Waits for keys, for a signal, for room where something is to be written, or until the time `until`. Returns whether there are keys, and
    /// whether there is room.
    fn wait(&self, descriptor: &SignalDescriptor, until: u64) -> (bool, bool) {
        let poll = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut polled = vec![poll(descriptor.as_raw_fd(), libc::POLLIN), poll(io::stdin().as_raw_fd(), libc::POLLIN)];
        if self.terminal.waits() {
            polled.push(poll(self.terminal.descriptor(), libc::POLLOUT));
        }
        signals::poll(&mut polled, Some(Duration::from_nanos(until.saturating_sub(now_ns()))));
        let happened = |index: usize| polled.get(index).is_some_and(|polled| polled.revents != 0);
        (happened(1), happened(2))
    }

    fn draw(&mut self) -> io::Result<bool> {
        let Live { watch, terminal, screen, ability, host, rows, .. } = self;
        terminal.draw(|frame| *rows = draw(frame, &watch.model, screen, host, *ability))
    }

    /// Stops as any program does at Ctrl-Z.
    fn suspend(&mut self, before: &SignalSet, set: &SignalSet) -> io::Result<()> {
        self.terminal.suspend(|| {
            signals::raise(libc::SIGTSTP);
            before.restore();
            // Here it has stopped and goes on.
            set.block();
        })
    }
}
