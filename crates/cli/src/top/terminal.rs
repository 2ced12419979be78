//! The terminal: taken over, drawn on, and given back as it was, whatever the end is.
//!
//! What is drawn is written without waiting: a terminal that takes nothing any more (a connection that stands still) holds up neither keys nor
//! signals. Until all of it is written, nothing new is drawn.

use crate::signals;
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{Frame, TerminalOptions, Viewport};
use rustix::termios::{self, OptionalActions, Termios};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The other screen, and no cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// Colours, cursor and screen as before. A terminal that has one screen goes on below what was drawn.
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[9999;1H\r\n\x1b[?1049l";
/// At the end, a terminal that takes nothing is left after so long.
const LEAVE_PATIENCE: Duration = Duration::from_millis(200);
/// Where a terminal does not say how large it is.
const SIZE: (u16, u16) = (80, 24);

/// The mode that the terminal was in and the descriptor that is written to, for as long as it is taken over: a panic needs them.
static TAKEN: Mutex<Option<(Termios, RawFd)>> = Mutex::new(None);

/// Where the drawing is collected.
#[derive(Clone, Default)]
struct Collected(Rc<RefCell<Vec<u8>>>);

impl Write for Collected {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The terminal of this process.
pub struct Terminal {
    file: File,
    collected: Collected,
    screen: ratatui::Terminal<CrosstermBackend<Collected>>,
}

impl Terminal {
    /// Takes over the terminal that standard input and output are.
    ///
    /// # Errors
    /// Those of asking for its mode and of setting it.
    pub fn enter() -> io::Result<Terminal> {
        let stdout = io::stdout();
        // An open file of our own: that nobody waits would else hold for the shell as well. Whoever may not open it writes as anybody does.
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open("/proc/self/fd/1")
            .or_else(|_| stdout.as_fd().try_clone_to_owned().map(File::from))?;
        let collected = Collected::default();
        let viewport = Viewport::Fixed(area());
        let backend = CrosstermBackend::new(collected.clone());
        let screen = ratatui::Terminal::with_options(backend, TerminalOptions { viewport })?;
        let mut terminal = Terminal { file, collected, screen };
        give_back_at_a_panic();
        terminal.take()?;
        Ok(terminal)
    }

    /// Sets the mode, and begins with an empty screen.
    fn take(&mut self) -> io::Result<()> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        set_taken(Some((before, self.file.as_raw_fd())));
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        self.collected.write_all(ENTER)?;
        self.redraw()
    }

    /// Begins anew with an empty screen of the size that it has now.
    pub fn redraw(&mut self) -> io::Result<()> {
        self.screen.resize(area())?;
        self.collected.write_all(b"\x1b[2J")?;
        self.write()
    }

    /// After it was stopped from outside, and another program may have set the mode.
    pub fn take_again(&mut self) -> io::Result<()> {
        let saved = taken().map(|(before, _)| before);
        self.take()?;
        // What was found may be our own mode.
        if let Some(before) = saved {
            set_taken(Some((before, self.file.as_raw_fd())));
        }
        Ok(())
    }

    /// Draws, unless what was drawn before is not written yet. Returns whether it did.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<bool> {
        if self.waits() {
            return Ok(false);
        }
        self.screen.draw(draw)?;
        self.write()?;
        Ok(true)
    }

    /// Whether there is something left to be written.
    pub fn waits(&self) -> bool {
        !self.collected.0.borrow().is_empty()
    }

    /// Writes what can be without waiting.
    pub fn write(&mut self) -> io::Result<()> {
        let mut bytes = self.collected.0.borrow_mut();
        let mut written = 0;
        let result = loop {
            if written == bytes.len() {
                break Ok(());
            }
            match self.file.write(&bytes[written..]) {
                Ok(0) => break Err(ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        bytes.drain(..written);
        result
    }

    /// Gives it back as it was.
    pub fn leave(&mut self) {
        let Some((before, _)) = taken() else { return };
        let _ = self.collected.write_all(LEAVE);
        let until = Instant::now() + LEAVE_PATIENCE;
        while self.write().is_ok() && self.waits() && Instant::now() < until {
            let mut one = [libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
            signals::poll(&mut one, Some(Duration::from_millis(20)));
        }
        self.collected.0.borrow_mut().clear();
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &before);
        set_taken(None);
    }

    /// Gives it back, has `stop` stop this process, and takes it over again when it goes on.
    pub fn suspend(&mut self, stop: impl FnOnce()) -> io::Result<()> {
        self.leave();
        stop();
        self.take()
    }

    /// What can be written to when the terminal takes more.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.leave();
    }
}

fn set_taken(value: Option<(Termios, RawFd)>) {
    if let Ok(mut taken) = TAKEN.lock() {
        *taken = value;
    }
}

fn taken() -> Option<(Termios, RawFd)> {
    TAKEN.lock().ok()?.clone()
}

/// The whole terminal.
fn area() -> Rect {
    let size = termios::tcgetwinsize(io::stdout()).map_or(SIZE, |size| match (size.ws_col, size.ws_row) {
        (0, _) | (_, 0) => SIZE,
        size => size,
    });
    Rect::new(0, 0, size.0, size.1)
}

/// Before what else is done at a panic. It may be on any thread, and in the middle of anything.
fn give_back_at_a_panic() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if let Ok(mut taken) = TAKEN.try_lock()
                && let Some((before, file)) = taken.take()
            {
                // SAFETY: the descriptor is open for as long as the terminal is taken over; the bytes are valid for the call.
                unsafe { libc::write(file, LEAVE.as_ptr().cast(), LEAVE.len()) };
                let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &before);
            }
            next(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::text::Text;

    #[test]
    fn what_is_collected_is_what_was_drawn() {
        let collected = Collected::default();
        let options = TerminalOptions { viewport: Viewport::Fixed(Rect::new(0, 0, 10, 2)) };
        let mut screen = ratatui::Terminal::with_options(CrosstermBackend::new(collected.clone()), options).unwrap();
        screen.draw(|frame| frame.render_widget("hello", frame.area())).unwrap();
        let text = String::from_utf8(collected.0.take()).unwrap();
        assert!(text.contains("hello"), "{text:?}");
        // The same once more is nearly nothing.
        screen.draw(|frame| frame.render_widget("hello", frame.area())).unwrap();
        assert!(!String::from_utf8(collected.0.take()).unwrap().contains("hello"));
    }

    #[test]
    fn a_terminal_that_takes_nothing_holds_up_nobody() {
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
        let collected = Collected::default();
        let options = TerminalOptions { viewport: Viewport::Fixed(Rect::new(0, 0, 200, 60)) };
        let screen = ratatui::Terminal::with_options(CrosstermBackend::new(collected.clone()), options).unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut terminal = Terminal { file, collected, screen };
        let begin = Instant::now();
        let mut drawn = 0;
        for round in 0..1000 {
            let text = ['a', 'b'][round % 2].to_string().repeat(200);
            let rows = vec![text.as_str(); 60].join("\n");
            drawn += usize::from(terminal.draw(|frame| frame.render_widget(Text::from(rows), frame.area())).unwrap());
        }
        assert!(begin.elapsed() < Duration::from_secs(20));
        assert!(terminal.waits() && drawn < 100, "{drawn}");
        // Whoever reads again gets all of it, and then new things are drawn.
        let reading = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut reader = reader;
            io::Read::read_to_end(&mut reader, &mut bytes).unwrap();
            bytes.len()
        });
        while terminal.waits() {
            terminal.write().unwrap();
        }
        assert!(terminal.draw(|frame| frame.render_widget("c", frame.area())).unwrap());
        drop(terminal);
        assert!(reading.join().unwrap() > 10_000);
    }

    /// Run by the test below, on a terminal of its own.
    #[test]
    #[ignore = "it is for another test"]
    fn panics_on_a_terminal() {
        crate::failure::report_panics_in_one_line();
        let mut terminal = Terminal::enter().unwrap();
        terminal.draw(|frame| frame.render_widget("hello", frame.area())).unwrap();
        // On a thread that has nothing to do with the terminal.
        let _ = std::thread::spawn(|| panic!("on purpose")).join();
    }

    #[test]
    fn a_panic_gives_it_back() {
        use std::os::fd::{FromRawFd, OwnedFd};
        use std::process::Command;
        let (mut master, mut slave) = (0, 0);
        let none = std::ptr::null_mut();
        // SAFETY: both places are valid for the descriptors; the other arguments may be null.
        assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, none, none.cast(), none.cast()) }, 0);
        // SAFETY: both descriptors are new and nobody else's.
        let (master, slave) =
            unsafe { (File::from(OwnedFd::from_raw_fd(master)), File::from(OwnedFd::from_raw_fd(slave))) };
        let before = termios::tcgetattr(&slave).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "top::terminal::tests::panics_on_a_terminal", "--ignored", "--nocapture"]);
        let stdio = || slave.try_clone().unwrap();
        let mut child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        drop(command);
        // As much as there is until nobody has the other end any more.
        let reading = std::thread::spawn(move || {
            let (mut text, mut room, mut master) = (Vec::new(), [0; 4096], master);
            while let Ok(count @ 1..) = io::Read::read(&mut master, &mut room) {
                text.extend_from_slice(&room[..count]);
            }
            String::from_utf8_lossy(&text).into_owned()
        });
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let after = termios::tcgetattr(&slave).unwrap();
        assert_eq!(
            (after.local_modes, after.input_modes, after.output_modes),
            (before.local_modes, before.input_modes, before.output_modes)
        );
        drop(slave);
        let text = reading.join().unwrap();
        let (entered, left) = (text.find("\x1b[?1049h").unwrap(), text.rfind("\x1b[?1049l").unwrap());
        let told = text.find("internal error: on purpose").unwrap_or_else(|| panic!("{text:?}"));
        assert!(entered < left && left < told && text.contains("hello") && text.contains("\x1b[?25h"), "{text:?}");
    }
}
