//! The client's side: a connection to a pool, and the memory that it hands out.

use super::error::Error;
use super::options::Backing;
use super::protocol::{ANSWER_MOST, Answer, Until};
use super::{completion, protocol};
use crate::sys::memory::{self, Advice};
use crate::sys::seqpacket::Socket;
use crate::sys::shared_file::Mapped;
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, numa, topology};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is wanted of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Bytes, a multiple of 2 MiB.
    pub size: usize,
    /// The NUMA node that they are to be of; none: whichever has them ready.
    pub node: Option<usize>,
    /// When they go back.
    pub until: Until,
}

/// Memory of a pool, all of it zero, in a file that nobody had before.
#[derive(Debug)]
pub struct Taken {
    /// The file, open for reading and writing.
    pub file: File,
    /// Where it is: mode 0600, and this user's.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: usize,
    /// Bytes from its beginning that were ready; the others were not backed yet.
    pub ready: usize,
    /// The NUMA node that it is of.
    pub node: usize,
    /// What it is made of.
    pub backing: Backing,
}

impl Taken {
    /// Zeroes what was not ready: this thread does, with helpers of this process, as long as it is `wanted`, which is asked now and then.
    /// Others may use the memory meanwhile.
    ///
    /// # Errors
    /// [`Error::NotFilled`] where there was less than the server thought. What is backed stays so.
    pub fn complete(&self, wanted: impl FnMut() -> bool) -> Result<(), Error> {
        completion::complete(&self.file, self.ready, self.size, wanted)
    }

    /// Bytes that are not on the node that it is of, as where that had less than was asked for; 0 on a machine whose memory is all on one
    /// node. `None` where the kernel does not say (`move_pages`, 2.6.18, and `MADV_POPULATE_READ`, 5.14). For memory that is complete.
    pub fn elsewhere(&self) -> Option<usize> {
        if topology::nodes_with_memory().len() < 2 {
            return Some(0);
        }
        let mapped = Mapped::new(&self.file, 0, self.size).ok()?;
        // The kernel says it of what is in the page tables of who asks.
        // SAFETY: reading changes no contents.
        unsafe { memory::advise(mapped.range(), Advice::PopulateRead) }.ok()?;
        let step = if self.backing == Backing::Hugetlbfs { HUGE_PAGE_SIZE } else { PAGE_SIZE };
        let placement = numa::placement(mapped.range(), step).ok()?;
        (placement.absent + placement.unknown == 0).then(|| placement.elsewhere(self.node) * step)
    }
}

/// A connection to a pool. What was taken [`Until::Closed`] goes back when it is dropped. A server that was started anew, or that has ended a
/// connection which was long idle, is connected to again with the next request.
#[derive(Debug)]
pub struct Client {
    socket: RefCell<Socket>,
    path: PathBuf,
    /// So long it waits for an answer.
    patience: Cell<Option<Duration>>,
    room: RefCell<Vec<u8>>,
}

impl Client {
    /// Connects to the pool whose socket is at `path`; see [`super::SOCKET`].
    ///
    /// # Errors
    /// [`Error::NotServed`] where there is no pool, [`Error::MayNotConnect`] where this user may not use it.
    pub fn connect(path: &Path) -> Result<Client, Error> {
        Client::connect_within(path, None)
    }

    /// As [`connect`](Client::connect), for whoever does not wait for a server longer than `patience`: it may have been stopped. Nor does it for
    /// answers.
    ///
    /// # Errors
    /// As [`connect`](Client::connect), and [`Error::System`] with `EAGAIN`.
    pub fn connect_within(path: &Path, patience: Option<Duration>) -> Result<Client, Error> {
        let (socket, room) = (RefCell::new(connect(path, patience)?), RefCell::new(vec![0; ANSWER_MOST]));
        Ok(Client { socket, path: path.to_owned(), patience: Cell::new(patience), room })
    }

    /// From now on it waits so long for an answer, or for ever. When an answer has not come in time, the connection is over, with what was taken
    /// [`Until::Closed`] on it.
    pub fn set_patience(&self, patience: Option<Duration>) {
        self.patience.set(patience);
        // It fails for what is no socket, which this is.
        let _ = self.socket.borrow().set_patience(patience);
    }

    /// Takes memory, all of it backed: what is not ready is zeroed here and now.
    ///
    /// # Errors
    /// [`Error::Refused`] where it can't be had, [`Error::NotFilled`] where there was less than the server thought; nothing is taken then.
    pub fn take(&self, request: &Request) -> Result<Taken, Error> {
        let taken = self.take_unfinished(request)?;
        taken.complete(|| true).inspect_err(|_| drop(self.release(&taken.path)))?;
        Ok(taken)
    }

    /// Takes memory of which what is not ready reads as zero, and is backed when it is touched, or by [`Taken::complete`].
    ///
    /// # Errors
    /// [`Error::Refused`] where it can't be had.
    pub fn take_unfinished(&self, request: &Request) -> Result<Taken, Error> {
        let Request { size, node, until } = *request;
        if size == 0 || !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return Err(Error::Size(size));
        }
        match self.ask(&protocol::Request::Take { size, node, until })? {
            (Answer::Taken { size, ready, node, backing, path }, Some(descriptor)) => {
                Ok(Taken { file: descriptor.into(), path: path.into(), size, ready, node, backing })
            }
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Gives the file at `path` back, which was taken by this user. Its memory is free when nobody has it open or mapped any more.
    /// Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::Refused`] where there is no such file or it is another user's.
    pub fn release(&self, path: &Path) -> Result<usize, Error> {
        let path = path.to_str().ok_or_else(|| Error::Answer(format!("{} is no file of a pool", path.display())))?;
        match self.ask(&protocol::Request::Release { path: path.to_owned() })? {
            (Answer::Released { size }, _) => Ok(size),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Has `size` bytes kept ready from now on, on `node` or in all. Returns what is kept ready in all.
    ///
    /// # Errors
    /// [`Error::Refused`] for anybody but root and the server's own user.
    pub fn resize(&self, size: usize, node: Option<usize>) -> Result<usize, Error> {
        if !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return Err(Error::Size(size));
        }
        match self.ask(&protocol::Request::Resize { size, node })? {
            (Answer::Resized { size }, _) => Ok(size),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// How it stands, as a JSON object.
    ///
    /// # Errors
    /// [`Error::Answer`] where the server went meanwhile.
    pub fn status(&self) -> Result<String, Error> {
        self.status_from(0)
    }

    /// As [`status`](Client::status), without the first `from` of the users and of the taken files: an answer has [`STATUS_SHOWN`] of each at
    /// most.
    ///
    /// # Errors
    /// As [`status`](Client::status); [`Error::Refused`] by servers that have no such request.
    ///
    /// [`STATUS_SHOWN`]: super::STATUS_SHOWN
    pub fn status_from(&self, from: usize) -> Result<String, Error> {
        match self.ask(&protocol::Request::Status { from })? {
            (Answer::Status { json }, _) => Ok(json),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    fn ask(&self, request: &protocol::Request) -> Result<(Answer, Option<OwnedFd>), Error> {
        let gone = |errno: Errno| match errno {
            Errno(libc::EAGAIN) => Error::Answer(format!("the pool at {} does not answer", self.path.display())),
            _ => Error::Answer(format!("the pool at {} has ended", self.path.display())),
        };
        let request = request.to_string();
        let mut socket = self.socket.borrow_mut();
        if socket.send(request.as_bytes(), None).is_err() {
            // Nobody has read it.
            *socket = connect(&self.path, self.patience.get())?;
            socket.send(request.as_bytes(), None).map_err(gone)?;
        }
        let mut room = self.room.borrow_mut();
        // The answer would come later, and be taken for the next one's.
        let packet = socket.receive(&mut room).inspect_err(|_| socket.end()).map_err(gone)?;
        if packet.len == 0 {
            return Err(gone(Errno(0)));
        }
        let answer = Answer::read(&room[..packet.len]).map_err(|error| {
            Error::Answer(format!("what listens at {} is not a pool: {error}", self.path.display()))
        })?;
        match answer {
            Answer::Error { code, message } => Err(Error::Refused { code, message }),
            answer => Ok((answer, packet.descriptor)),
        }
    }
}

fn connect(path: &Path, patience: Option<Duration>) -> Result<Socket, Error> {
    Socket::connect_within(path, patience).map_err(|errno| match errno {
        Errno(libc::ENOENT | libc::ECONNREFUSED | libc::ENOTDIR) => Error::NotServed(path.to_owned()),
        Errno(libc::EACCES | libc::EPERM) => Error::MayNotConnect(path.to_owned()),
        errno => Error::System { action: "connecting to", path: path.to_owned(), errno },
    })
}

fn unexpected(answer: &Answer) -> Error {
    Error::Answer(format!("the pool answered '{answer}', which is no answer to what was asked"))
}
