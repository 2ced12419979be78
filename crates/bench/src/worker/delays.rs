//! For how long a thread has had to reclaim memory for itself, for the machine or at the limit of its control group: the kernel's accounting of
//! delays (taskstats, 2.6.18), which it does where `kernel.task_delayacct` says so (5.14). Takes root.

use anyhow::{Context, Result, bail, ensure};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The setting that turns the accounting on.
pub const SETTING: &str = "/proc/sys/kernel/task_delayacct";

/// Sizes of the headers of netlink, of its generic family, and of an attribute.
const HEADER: usize = 16;
const GENERIC: usize = 4;
const ATTRIBUTE: usize = 4;
/// `NLMSG_ERROR`, `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY` and its attributes.
const ERROR: u16 = 2;
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_NUMBER: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// `TASKSTATS_CMD_GET`, the thread that is meant, and what is said of it.
const GET: u8 = 1;
const OF_THREAD: u16 = 1;
const ABOUT_THREAD: u16 = 4;
const FIGURES: u16 = 3;
/// Where `freepages_delay_total` is in `struct taskstats` (version 4 and later, but 15, which had others in between): nanoseconds.
const RECLAIM: usize = 320;
const OTHER_VERSION: u16 = 15;

/// What asks the kernel.
pub struct Delays {
    socket: OwnedFd,
    family: u16,
}

impl Delays {
    /// Opens the connection.
    ///
    /// # Errors
    /// Where the kernel has no such accounting.
    pub fn open() -> Result<Delays> {
        // SAFETY: no memory is involved.
        let socket =
            unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_GENERIC) };
        ensure!(socket >= 0, "netlink: {}", std::io::Error::last_os_error());
        // SAFETY: a new descriptor, which nobody else has.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let mut delays = Delays { socket, family: CONTROL };
        let answer = delays.ask(GET_FAMILY, FAMILY_NAME, b"TASKSTATS\0")?;
        let number = attribute(&answer, FAMILY_NUMBER).context("the kernel has no taskstats")?;
        delays.family = u16::from_ne_bytes(number.try_into().context("the number of taskstats")?);
        Ok(delays)
    }

    /// How long the calling thread has reclaimed for itself so far, in nanoseconds.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn reclaim_ns(&self) -> Result<u64> {
        // SAFETY: takes nothing.
        let thread = unsafe { libc::gettid() } as u32;
        let answer = self.ask(GET, OF_THREAD, &thread.to_ne_bytes())?;
        let about = attribute(&answer, ABOUT_THREAD).context("nothing is said of this thread")?;
        reclaim_ns(about).context("taskstats are too short")
    }

    /// The attributes of the answer to a question with one attribute.
    fn ask(&self, command: u8, kind: u16, value: &[u8]) -> Result<Vec<u8>> {
        let question = message(self.family, command, kind, value);
        // SAFETY: the bytes are there, as many as it says.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), question.as_ptr().cast(), question.len(), 0) };
        ensure!(sent == question.len() as isize, "netlink: {}", std::io::Error::last_os_error());
        let mut answer = vec![0; 8 << 10];
        // SAFETY: there is room for as much as it says.
        let count = unsafe { libc::recv(self.socket.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0) };
        ensure!(count >= 0, "netlink: {}", std::io::Error::last_os_error());
        answer.truncate(count as usize);
        attributes(&answer)
    }
}

/// How long the calling thread has reclaimed for itself so far, in nanoseconds; 0 where the kernel does not say.
pub fn reclaim_ns_of_this_thread() -> u64 {
    Delays::open().and_then(|delays| delays.reclaim_ns()).unwrap_or(0)
}

fn message(family: u16, command: u8, kind: u16, value: &[u8]) -> Vec<u8> {
    let len = HEADER + GENERIC + ATTRIBUTE + value.len().next_multiple_of(4);
    let mut message = Vec::with_capacity(len);
    message.extend((len as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // A number and an address, which are of no interest.
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend(((ATTRIBUTE + value.len()) as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(len, 0);
    message
}

/// What a message says behind its headers.
fn attributes(message: &[u8]) -> Result<Vec<u8>> {
    let kind = message.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let body = message.get(HEADER..).context("netlink: a short message")?;
    if kind == Some(ERROR) {
        let code = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_ne_bytes);
        bail!("netlink: {}", std::io::Error::from_raw_os_error(-code));
    }
    Ok(body.get(GENERIC..).unwrap_or_default().to_vec())
}

/// The value of the attribute of this kind.
fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    let number = |bytes: &[u8]| Some(u16::from_ne_bytes(bytes.try_into().ok()?));
    loop {
        let len = usize::from(number(attributes.get(..2)?)?);
        let value = attributes.get(ATTRIBUTE..len)?;
        if number(attributes.get(2..4)?)? & !(libc::NLA_F_NESTED as u16) == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

/// By what is said of a thread.
fn reclaim_ns(about: &[u8]) -> Option<u64> {
    let figures = attribute(about, FIGURES)?;
    let version = u16::from_ne_bytes(figures.get(..2)?.try_into().ok()?);
    if version == OTHER_VERSION {
        return None;
    }
    Some(u64::from_ne_bytes(figures.get(RECLAIM..RECLAIM + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: u16, value: &[u8]) -> Vec<u8> {
        message(7, 1, kind, value)[HEADER + GENERIC..].to_vec()
    }

    #[test]
    fn an_answer_is_read() {
        let mut figures = vec![0; 400];
        figures[RECLAIM..RECLAIM + 8].copy_from_slice(&4711u64.to_ne_bytes());
        let about = [one(1, &[9, 0, 0, 0]), one(2, b"abc"), one(FIGURES, &figures)].concat();
        assert_eq!(reclaim_ns(&about), Some(4711));
        let whole = message(7, 2, ABOUT_THREAD, &about);
        assert_eq!(attribute(&attributes(&whole).unwrap(), ABOUT_THREAD), Some(&about[..]));
        for len in 0..about.len() {
            assert_eq!(reclaim_ns(&about[..len]), None, "{len}");
        }
        let refused = message(ERROR, 0xff, 0xffff, &[]);
        assert!(attributes(&refused).is_err() && attributes(&whole[..7]).is_err());
    }

    #[test]
    fn a_thread_that_does_nothing_has_reclaimed_nothing_since() {
        match Delays::open().and_then(|delays| Ok((delays.reclaim_ns()?, delays.reclaim_ns()?))) {
            Ok((before, after)) => assert_eq!(before, after),
            Err(error) => eprintln!("left out: {error:#}"),
        }
    }
}
