//! Connections of those who are not to be trusted.
//!
//! A packet on a Unix socket may bring descriptors. Whoever takes it out of the socket, or closes the socket while it is in there, has to close
//! them; and where nobody else has them any more, closing one may take as long as who sent it likes: until a network has taken what a
//! socket lingers for (`SO_LINGER`), or until a file system in user space has answered. Room for none of them in a receive is no help: then the
//! kernel closes them, in the thread that receives.
//!
//! So nothing of the sort may get in ([`Socket::refuse_descriptors`], Linux 6.16). On older kernels a packet is looked at before it is taken out.
//! A connection with descriptors in it is over, and is closed by somebody for whom nobody waits ([`closing`]).

use super::Errno;
use super::closing::{self, LowNumbers};
use super::seqpacket::{Packet, Socket};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A socket to which strangers connect. Dropping it takes no longer than a few system calls for each of those who wait to be accepted.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    /// See [`Socket::refuse_descriptors`].
    refuses: bool,
    low: Option<Arc<LowNumbers>>,
}

impl Listener {
    /// Lets others connect to `socket`, with no numbers that are `low`.
    ///
    /// # Errors
    /// Those of [`Socket::listen`].
    pub fn new(socket: Socket, low: Option<LowNumbers>) -> Result<Listener, Errno> {
        let refuses = socket.refuse_descriptors();
        let low = low.map(Arc::new);
        socket.listen()?;
        Ok(Listener { socket, refuses, low })
    }

    /// Takes in who has connected.
    ///
    /// # Errors
    /// Those of [`Socket::accept`].
    pub fn accept(&self) -> Result<Stranger, Errno> {
        let socket = self.socket.accept()?;
        if !self.refuses {
            // What can't be told from the end would hide what comes behind it.
            socket.tell_packets_from_the_end()?;
        }
        Ok(Stranger { socket: Some(socket), refuses: self.refuses, low: self.low.clone(), account: 0 })
    }

    /// See [`Socket::do_not_wait`].
    ///
    /// # Errors
    /// Those of `fcntl`.
    pub fn do_not_wait(&self) -> Result<(), Errno> {
        self.socket.do_not_wait()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Nobody comes any more; the kernel would close what those have sent who are there.
        self.socket.end();
        if !self.refuses && self.do_not_wait().is_ok() {
            while let Ok(stranger) = self.accept() {
                drop(stranger);
            }
        }
    }
}

/// An accepted connection of somebody who may send whatever he likes. Dropping it takes no longer than a few system calls.
#[derive(Debug)]
pub struct Stranger {
    /// Until it is dropped.
    socket: Option<Socket>,
    /// No descriptors can be in it.
    refuses: bool,
    low: Option<Arc<LowNumbers>>,
    /// On whose account it is.
    account: u32,
}

impl Stranger {
    /// From now on it is on this account. Without, it is on root's.
    pub fn set_account(&mut self, account: u32) {
        self.account = account;
    }

    /// Puts the next packet into `room`, without waiting. What brings descriptors stays where it is.
    ///
    /// # Errors
    /// `EAGAIN` where there is no packet, `ECONNRESET` where the other end went with something unread, `EPROTO` where the next packet brings
    /// descriptors.
    pub fn receive(&self, room: &mut [u8]) -> Result<Packet, Errno> {
        if !self.refuses && self.peek_bytes(&mut [0])?.brings {
            return Err(Errno(libc::EPROTO));
        }
        self.receive_bytes(room)
    }

    /// Takes out what can be taken out without harm. Returns whether that is all.
    fn clear(&self) -> bool {
        // Nobody adds anything behind this.
        self.end();
        loop {
            match self.peek_bytes(&mut [0]) {
                Ok(peeked) if peeked.brings => return false,
                Ok(peeked) if peeked.is_there && self.receive_bytes(&mut [0]).is_ok() => {}
                _ => return true,
            }
        }
    }
}

impl Deref for Stranger {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        self.socket.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let is_harmless = self.refuses || self.clear();
        if let Some(socket) = self.socket.take().filter(|_| !is_harmless) {
            closing::close(self.account, socket.into(), self.low.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    /// A socket that, when it is closed by the last one who has it, is waited for as long as nobody reads.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (unread, _) = listener.accept().unwrap();
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 1 << 16]).is_ok() {}
        let linger = libc::linger { l_onoff: 1, l_linger: 1000 };
        // SAFETY: the option's value is valid and of the length that is said.
        let result = unsafe {
            let value = (&raw const linger).cast();
            libc::setsockopt(sender.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, size_of_val(&linger) as u32)
        };
        assert_eq!(result, 0);
        (sender.into(), unread)
    }

    /// Listens as on a kernel that refuses nothing, with somebody who has connected.
    fn listener(name: &str) -> (Listener, Socket) {
        let path = std::env::temp_dir().join(format!("pagecrew-stranger-{name}-{}", std::process::id()));
        let socket = Socket::bind(&path).unwrap();
        socket.listen().unwrap();
        let client = Socket::connect(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let low = LowNumbers::take(&socket).map(Arc::new);
        (Listener { socket, refuses: false, low }, client)
    }

    /// Whether there is a thread that closes something.
    fn is_closing() -> bool {
        let names = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path().join("comm"));
        names.filter_map(|path| std::fs::read_to_string(path).ok()).any(|name| name == "closes\n")
    }

    fn eventually(what: &str, found: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !found() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends `packets`, and behind them what is slow to close, has `close` done to those who are sent it, and lets it be closed at last.
    fn is_not_waited_for(name: &str, packets: &[&[u8]], close: impl FnOnce(Listener)) {
        let (listener, client) = listener(name);
        let (slow, mut unread) = lingering();
        for packet in packets {
            client.send(packet, None).unwrap();
        }
        client.send(b"x", Some(slow.as_fd())).unwrap();
        drop(slow);
        let begin = Instant::now();
        close(listener);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        // The latter where something was never read.
        assert!(matches!(client.send(b"x", None), Err(Errno(libc::EPIPE | libc::ECONNRESET))));
        // Nobody has read anything yet.
        eventually("threads wait for it", || !is_closing());
        while unread.read(&mut [0; 1 << 16]).unwrap() > 0 {}
    }

    #[test]
    fn what_is_slow_to_close_is_closed_by_nobody_who_is_waited_for() {
        is_not_waited_for("slow", &[b"harmless"], |listener| {
            let stranger = listener.accept().unwrap();
            let mut room = [0; 16];
            assert_eq!(stranger.receive(&mut room).unwrap().len, 8);
            assert_eq!(stranger.receive(&mut room).err(), Some(Errno(libc::EPROTO)));
        });
        // Of those who were never accepted, neither.
        is_not_waited_for("waiting", &[b"harmless"], drop);
        // An empty packet is not the end.
        is_not_waited_for("empty", &[b"", b""], |listener| {
            let stranger = listener.accept().unwrap();
            assert_eq!(stranger.receive(&mut [0; 16]).unwrap().len, 0);
        });
        eventually("a thread counts that has gone", || closing::unclosed(0).connections == 0);
    }

    #[test]
    fn what_was_never_read_is_no_harm() {
        let (listener, client) = listener("unread");
        for _ in 0..50 {
            client.send(b"harmless", None).unwrap();
        }
        assert!(listener.accept().unwrap().clear());
        assert_eq!(client.send(b"x", None), Err(Errno(libc::EPIPE)));
    }

    #[test]
    fn where_the_kernel_refuses_descriptors_whoever_sends_them_is_told() {
        let path = std::env::temp_dir().join(format!("pagecrew-stranger-refuses-{}", std::process::id()));
        let listener = Listener::new(Socket::bind(&path).unwrap(), LowNumbers::hold()).unwrap();
        let client = Socket::connect(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let (other, _) = Socket::pair().unwrap();
        let sent = client.send(b"x", Some(other.as_fd()));
        assert_eq!(sent, if listener.refuses { Err(Errno(libc::EPERM)) } else { Ok(()) });
        // The other way is open. (Whoever goes with something unread has the other end told of that first.)
        let stranger = listener.accept().unwrap();
        stranger.send(b"y", Some(other.as_fd())).unwrap();
        assert!(client.receive(&mut [0]).unwrap().descriptor.is_some());
    }
}
