//! Unix sockets that keep packets apart (`SOCK_SEQPACKET`), with a descriptor in a packet where one is to be passed on, and with the
//! kernel's word for who is at the other end.

use super::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// So many descriptors can be in one packet (`SCM_MAX_FD`).
pub const DESCRIPTORS_MOST: usize = 253;

/// Who is at the other end of a connection (`SO_PEERCRED`): as it was when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process; 0 where this process can't see that one.
    pub pid: i32,
    /// Its effective user.
    pub user: u32,
    /// Its effective group.
    pub group: u32,
}

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Its length.
    pub len: usize,
    /// Whether it was longer than there was room for; the rest is lost.
    pub cut: bool,
    /// The first descriptor that came with it; others are closed.
    pub descriptor: Option<OwnedFd>,
}

/// A packet that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peeked {
    /// Whether there is one at all. If not, the other end has been closed, which looks like an empty packet otherwise. Known where
    /// [`Socket::tell_packets_from_the_end`] was called.
    pub is_there: bool,
    /// Whether it brings descriptors.
    pub brings: bool,
}

/// One end of a connection, or what others connect to.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl From<OwnedFd> for Socket {
    fn from(descriptor: OwnedFd) -> Socket {
        Socket(descriptor)
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> OwnedFd {
        socket.0
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    /// Makes `path`, which must not be there yet, a socket. Whoever may write to it may connect once it listens.
    ///
    /// # Errors
    /// `EADDRINUSE` where it is there, `ENAMETOOLONG` for more than 107 bytes, else those of creating a file.
    pub fn bind(path: &Path) -> Result<Socket, Errno> {
        let address = SocketAddrUnix::new(path)?;
        let socket = new()?;
        rustix::net::bind(&socket, &address)?;
        Ok(Socket(socket))
    }

    /// Lets others connect.
    ///
    /// # Errors
    /// `EINVAL` where the socket is connected itself.
    pub fn listen(&self) -> Result<(), Errno> {
        Ok(rustix::net::listen(&self.0, BACKLOG)?)
    }

    /// From now on, nobody can send descriptors to those who are accepted here: `sendmsg` fails with `EPERM` (`SO_PASSRIGHTS`, 6.16). To be called
    /// before [`Socket::listen`]. Returns whether the kernel has that.
    pub fn refuse_descriptors(&self) -> bool {
        // The same on every architecture that this is built for; no library has it yet.
        const SO_PASSRIGHTS: libc::c_int = 83;
        let none: libc::c_int = 0;
        let len = size_of_val(&none) as libc::socklen_t;
        // SAFETY: the option's value is valid, and its length is what is said.
        unsafe {
            libc::setsockopt(self.0.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const none).cast(), len) == 0
        }
    }

    /// Connects to whoever listens at `path`.
    ///
    /// # Errors
    /// `ENOENT` and `ECONNREFUSED` where nobody does, `EACCES` where this user may not.
    pub fn connect(path: &Path) -> Result<Socket, Errno> {
        Socket::connect_within(path, None)
    }

    /// As [`connect`](Socket::connect), of which each step takes no longer than `patience`, as does everything that is received and sent.
    ///
    /// # Errors
    /// Besides those, `EAGAIN` where there was no room for one more.
    pub fn connect_within(path: &Path, patience: Option<Duration>) -> Result<Socket, Errno> {
        let address = SocketAddrUnix::new(path)?;
        let socket = Socket(new()?);
        if patience.is_some() {
            socket.set_patience(patience)?;
        }
        rustix::net::connect(&socket.0, &address)?;
        Ok(socket)
    }

    /// From now on, waiting for the other end fails with `EAGAIN` when it has taken so long.
    ///
    /// # Errors
    /// Those of `setsockopt`.
    pub fn set_patience(&self, patience: Option<Duration>) -> Result<(), Errno> {
        // None at all would be for ever.
        let patience = patience.map(|patience| patience.max(Duration::from_millis(1)));
        for side in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&self.0, side, patience)?;
        }
        Ok(())
    }

    /// Whether somebody listens at `path`. Waits for nobody.
    pub fn is_served(path: &Path) -> bool {
        let Ok(address) = SocketAddrUnix::new(path) else { return false };
        let Ok(socket) = new() else { return false };
        let waits_not = rustix::io::ioctl_fionbio(&socket, true);
        // Somebody who has no room for one more is there, too.
        waits_not.is_ok() && matches!(rustix::net::connect(&socket, &address), Ok(()) | Err(rustix::io::Errno::AGAIN))
    }

    /// Two ends of a connection.
    ///
    /// # Errors
    /// `EMFILE` where there are no descriptors left.
    pub fn pair() -> Result<(Socket, Socket), Errno> {
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Socket(one), Socket(other)))
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// `EINVAL` after [`Socket::end`]; `EAGAIN` after [`Socket::do_not_wait`] where nobody is there; `EMFILE`, `ENFILE` and `ENOMEM` where there is no room for one more.
    pub fn accept(&self) -> Result<Socket, Errno> {
        loop {
            match rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
                // Somebody who has gone again meanwhile.
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                result => return Ok(Socket(result?)),
            }
        }
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn peer(&self) -> Result<Peer, Errno> {
        let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        // SAFETY: the answer and its length are valid places, and the length is that of the answer.
        let result = unsafe {
            libc::getsockopt(self.0.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut len)
        };
        Errno::check(result.into())?;
        Ok(Peer { pid: peer.pid, user: peer.uid, group: peer.gid })
    }

    /// The groups of whoever has connected, besides [`Peer::group`], as they were then (`SO_PEERGROUPS`, Linux 4.13). Empty where the kernel does
    /// not say.
    pub fn peer_groups(&self) -> Vec<u32> {
        const SO_PEERGROUPS: libc::c_int = 59;
        let mut groups = vec![0_u32; 32];
        loop {
            let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
            // SAFETY: the answer and its length are valid places, and the length is that of the answer.
            let result = unsafe {
                libc::getsockopt(
                    self.0.as_raw_fd(),
                    libc::SOL_SOCKET,
                    SO_PEERGROUPS,
                    groups.as_mut_ptr().cast(),
                    &mut len,
                )
            };
            let count = len as usize / size_of::<u32>();
            match Errno::check(result.into()) {
                Ok(_) => {
                    groups.truncate(count);
                    return groups;
                }
                Err(Errno(libc::ERANGE)) if count > groups.len() => groups.resize(count, 0),
                Err(_) => return Vec::new(),
            }
        }
    }

    /// Sends `bytes`, with `descriptor` if there is one, as one packet. Doesn't wait: who doesn't read has no room for more.
    ///
    /// # Errors
    /// `EAGAIN` where there is no room, `EPIPE` where nobody is there any more, `EMSGSIZE` where the packet is too large.
    pub fn send(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        self.send_with(bytes, descriptor.as_slice(), &mut room)
    }

    /// Sends a packet with so many descriptors, [`DESCRIPTORS_MOST`] at most.
    ///
    /// # Errors
    /// Those of [`Socket::send`], and `ETOOMANYREFS` where this user has as many in sockets as he may have.
    pub fn send_descriptors(&self, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MOST))];
        self.send_with(b"*", descriptors, &mut room)
    }

    fn send_with(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        room: &mut [MaybeUninit<u8>],
    ) -> Result<(), Errno> {
        let mut control = SendAncillaryBuffer::new(room);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags))?;
        Ok(())
    }

    /// Waits for a packet and puts it into `room`. Of length 0 where the other end has been closed.
    ///
    /// # Errors
    /// `ECONNRESET` where the other end went with something unread.
    pub fn receive(&self, room: &mut [u8]) -> Result<Packet, Errno> {
        // Room for several: what doesn't fit is closed by the kernel, and what fits and isn't wanted, here.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut descriptor = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                for other in descriptors {
                    descriptor.get_or_insert(other);
                }
            }
        }
        Ok(Packet { len: received.bytes, cut: received.flags.contains(ReturnFlags::TRUNC), descriptor })
    }

    /// Waits for a packet at this end of a connection, and returns the descriptors that are in it; where there is no room for all of them, the others are closed.
    ///
    /// # Errors
    /// Those of [`Socket::receive`].
    pub fn receive_descriptors(end: BorrowedFd<'_>) -> Result<Vec<OwnedFd>, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MOST))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(end, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        Ok(rights.flatten().collect())
    }

    /// As [`Socket::receive`] without waiting, and without room for descriptors: the kernel closes those that came along.
    ///
    /// # Errors
    /// `EAGAIN` where there is no packet, `ECONNRESET` where the other end went with something unread.
    pub fn receive_bytes(&self, room: &mut [u8]) -> Result<Packet, Errno> {
        let mut control = RecvAncillaryBuffer::default();
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::DONTWAIT)
        })?;
        Ok(Packet { len: received.bytes, cut: received.flags.contains(ReturnFlags::TRUNC), descriptor: None })
    }

    /// What the next packet is, which stays where it is; nothing waits.
    ///
    /// # Errors
    /// Those of [`Socket::receive_bytes`].
    pub fn peek_bytes(&self, room: &mut [u8]) -> Result<Peeked, Errno> {
        // No room for descriptors.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(room)], &mut control, flags)
        })?;
        let brings = received.flags.contains(ReturnFlags::CTRUNC);
        let is_signed = control.drain().any(|message| matches!(message, RecvAncillaryMessage::ScmCredentials(_)));
        Ok(Peeked { is_there: is_signed || received.bytes > 0, brings })
    }

    /// From now on every packet says who has sent it (`SO_PASSCRED`), and the end of the connection doesn't.
    ///
    /// # Errors
    /// Those of `setsockopt`.
    pub fn tell_packets_from_the_end(&self) -> Result<(), Errno> {
        Ok(sockopt::set_socket_passcred(&self.0, true)?)
    }

    /// From now on, nobody waits at this end for a packet or for a connection.
    ///
    /// # Errors
    /// Those of `fcntl`.
    pub fn do_not_wait(&self) -> Result<(), Errno> {
        let flags = rustix::fs::fcntl_getfl(&self.0)?;
        Ok(rustix::fs::fcntl_setfl(&self.0, flags | rustix::fs::OFlags::NONBLOCK)?)
    }

    /// Bytes of the kernel's memory in which there is what was sent and the other end has not read; none once that is closed. They are on the account
    /// of whoever has sent it, also when this end is closed.
    pub fn unread(&self) -> usize {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the answer is a valid place of the type that this request writes.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if result < 0 { 0 } else { bytes.max(0) as usize }
    }

    /// Whether the other end has been closed.
    pub fn is_left(&self) -> bool {
        let mut one = [PollFd::new(&self.0, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut one, Some(&now)), Ok(1..))
    }

    /// Ends the connection for everybody who has this end, those included who wait for a packet or for a connection.
    pub fn end(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

fn new() -> Result<OwnedFd, Errno> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn packets_stay_apart_and_bring_a_descriptor() {
        let (one, other) = Socket::pair().unwrap();
        let mut file = tempfile();
        file.write_all(b"contents").unwrap();
        one.send(b"first", None).unwrap();
        one.send(b"second", Some(file.as_fd())).unwrap();
        let mut room = [0; 16];
        let packet = other.receive(&mut room).unwrap();
        assert_eq!((&room[..packet.len], packet.cut, packet.descriptor.is_none()), (&b"first"[..], false, true));
        let packet = other.receive(&mut room[..3]).unwrap();
        assert_eq!((&room[..packet.len], packet.cut), (&b"sec"[..], true));
        let mut passed = std::fs::File::from(packet.descriptor.unwrap());
        passed.rewind().unwrap();
        let mut text = String::new();
        passed.read_to_string(&mut text).unwrap();
        assert_eq!(text, "contents");
        assert!(!other.is_left());
        drop(one);
        assert!(other.is_left());
        assert_eq!(other.receive(&mut room).unwrap().len, 0);
        assert_eq!(other.send(b"x", None), Err(Errno(libc::EPIPE)));
    }

    fn tempfile() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("pagecrew-packet-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    #[test]
    fn whoever_connects_is_known_and_a_listener_can_be_ended() {
        let path = std::env::temp_dir().join(format!("pagecrew-listen-{}", std::process::id()));
        let listener = Socket::bind(&path).unwrap();
        assert_eq!(Socket::bind(&path).err(), Some(Errno(libc::EADDRINUSE)));
        assert_eq!(Socket::connect(&path).err(), Some(Errno(libc::ECONNREFUSED)));
        listener.listen().unwrap();
        let client = Socket::connect(&path).unwrap();
        let peer = listener.accept().unwrap().peer().unwrap();
        // SAFETY: takes nothing and cannot fail.
        let user = unsafe { libc::geteuid() };
        assert_eq!((peer.pid, peer.user), (std::process::id() as i32, user));
        drop(client);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                loop {
                    if let Err(error) = listener.accept() {
                        break error;
                    }
                }
            });
            listener.end();
            assert_eq!(waiting.join().unwrap(), Errno(libc::EINVAL));
        });
        drop(listener);
        assert_eq!(Socket::connect(&path).err(), Some(Errno(libc::ECONNREFUSED)));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Socket::connect(&path).err(), Some(Errno(libc::ENOENT)));
    }

    #[test]
    fn who_does_not_read_is_not_waited_for() {
        let (one, other) = Socket::pair().unwrap();
        assert_eq!(one.unread(), 0);
        let error = (0..1_000_000).find_map(|_| one.send(&[0; 4096], None).err());
        assert_eq!(error, Some(Errno(libc::EAGAIN)));
        let unread = one.unread();
        assert!(unread > 4096);
        other.receive(&mut [0; 4096]).unwrap();
        assert!(one.unread() < unread);
        // An end that was ended is still read.
        one.end();
        assert!(one.unread() > 0);
        drop(other);
        assert_eq!(one.unread(), 0);
    }
}
