//! What goes to standard output and standard error. Nothing here panics where one of them is closed.

use crate::failure::Failure;
use crate::signals;
use crate::supervised;
use pagecrew::sys::clock::now_ns;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// So many pieces wait to be written for a service; what comes then is lost, and counted.
const WAITING_MOST: usize = 64;

/// Where a service's words go, once it has begun.
static OUTLET: OnceLock<Outlet> = OnceLock::new();

/// The service ends already.
static ENDING: AtomicBool = AtomicBool::new(false);

/// A thread that writes, so that nobody else has to wait for whoever reads: a stopped reader, a terminal that was held with Ctrl-S, a full
/// disk. It ends with the process, in the middle of a write if need be.
struct Outlet {
    queue: SyncSender<Piece>,
    lost: AtomicU64,
}

enum Piece {
    Output(Vec<u8>),
    Note(Vec<u8>),
    /// Answered when all that was said before is written.
    Flush(SyncSender<()>),
}

impl Outlet {
    fn say(&self, piece: Piece) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let line = format!("pagecrew: {lost} lines of output are missing here: nobody read them\n");
            if self.queue.try_send(Piece::Note(line.into_bytes())).is_err() {
                self.lost.fetch_add(lost, Ordering::Relaxed);
            }
        }
        if self.queue.try_send(piece).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// From here on, this process never waits for whoever reads its output: it is a service. A reader of its standard output that goes away ends
/// it like SIGTERM.
pub fn never_wait() -> std::io::Result<()> {
    let (queue, pieces) = sync_channel(WAITING_MOST);
    std::thread::Builder::new().name("output".into()).spawn(move || {
        let mut broken = false;
        for piece in pieces {
            match piece {
                Piece::Output(_) if broken => {}
                Piece::Output(text) => match write_out(&text) {
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                        broken = true;
                        if !ENDING.load(Ordering::Relaxed) {
                            signals::end_this_process();
                        }
                    }
                    Err(error) => write_note(format!("pagecrew: standard output: {error}\n").as_bytes()),
                    Ok(()) => {}
                },
                Piece::Note(line) => write_note(&line),
                Piece::Flush(done) => drop(done.send(())),
            }
        }
    })?;
    let _ = OUTLET.set(Outlet { queue, lost: AtomicU64::new(0) });
    Ok(())
}

/// The service ends: a reader that goes away from here on changes nothing.
pub fn ending() {
    ENDING.store(true, Ordering::Relaxed);
}

/// Waits until a service's words are written, but no longer than `patience`.
pub fn flush(patience: Duration) {
    let Some(outlet) = OUTLET.get() else { return };
    let until = Instant::now() + patience;
    let (done, written) = sync_channel(1);
    let mut piece = Piece::Flush(done);
    loop {
        match outlet.queue.try_send(piece) {
            Ok(()) => break,
            Err(TrySendError::Full(back)) if Instant::now() < until => piece = back,
            Err(_) => return,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = written.recv_timeout(until.saturating_duration_since(Instant::now()));
}

fn write_out(text: &[u8]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush())
}

fn write_note(line: &[u8]) {
    // There is nobody left to tell where this fails.
    let _ = std::io::stderr().write_all(line);
}

/// Writes `text` to standard output. A reader that has gone away (`| head`) is no failure.
pub fn print(text: &str) -> Result<(), Failure> {
    if let Some(outlet) = OUTLET.get() {
        outlet.say(Piece::Output(text.as_bytes().to_vec()));
        return Ok(());
    }
    match write_out(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|error| Failure::Failed(format!("standard output: {error}"))),
    }
}

/// Writes `message` as one line to standard error, with the command's name in front, and that of the service where several write to one log.
pub fn note(message: &str) {
    let service = supervised::name().map_or(String::new(), |name| format!(" {name}"));
    let line = format!("pagecrew{service}: {}\n", printable(&message.replace('\n', "; "))).into_bytes();
    match OUTLET.get() {
        Some(outlet) => outlet.say(Piece::Note(line)),
        None => write_note(&line),
    }
}

/// Notes of what may happen again and again: each is written once an hour at most.
#[derive(Default)]
pub struct Sparing {
    said: Vec<(String, u64)>,
}

impl Sparing {
    const AGAIN_NS: u64 = 3_600_000_000_000;
    /// So many different ones are known, which bounds what is kept of names that others choose.
    const MOST: usize = 64;

    /// Writes `message` as [`note`] does, unless that was done within the last hour.
    pub fn note(&mut self, message: &str) {
        if self.is_new(message, now_ns()) {
            note(message);
        }
    }

    fn is_new(&mut self, message: &str, now_ns: u64) -> bool {
        self.said.retain(|(_, at_ns)| now_ns < at_ns + Self::AGAIN_NS);
        let is_new = self.said.len() < Self::MOST && self.said.iter().all(|(said, _)| said != message);
        if is_new {
            self.said.push((message.to_owned(), now_ns));
        }
        is_new
    }
}

/// Writes `text`, which has several lines, to standard error.
pub fn block(text: &str) {
    write_note(text.as_bytes());
}

/// `text` without control characters, which could play tricks on a terminal: names of processes and files may hold any.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A table in the style of all of this command's tables.
pub fn table(headings: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(headings);
    table
}

/// The text of a table, without the blanks that pad its last column.
pub fn render(table: &comfy_table::Table) -> String {
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\u{1b}[2Jb\tc é"), "a?[2Jb?c é");
    }

    #[test]
    fn what_happens_again_and_again_is_said_once_an_hour() {
        let mut sparing = Sparing::default();
        let hour = Sparing::AGAIN_NS;
        assert!(sparing.is_new("a", 5) && sparing.is_new("b", 6));
        assert!(!sparing.is_new("a", 7) && !sparing.is_new("b", hour) && !sparing.is_new("a", hour + 4));
        assert!(sparing.is_new("a", hour + 5));
        // Of more than can be known, what is new waits.
        assert!(
            (0..2 * Sparing::MOST).filter(|number| sparing.is_new(&number.to_string(), hour + 7)).count()
                < Sparing::MOST
        );
    }

    #[test]
    fn tables_have_no_trailing_blanks() {
        let mut table = table(&["a", "b"]);
        table.add_row(["long name", "x"]);
        assert!(render(&table).lines().all(|line| line == line.trim_end()), "{}", render(&table));
    }
}
