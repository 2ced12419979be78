//! The front of a server: who is connected, whose request is next, and the threads that do what is asked.
//!
//! One of a few threads waits for all connections at once, the others do what is asked and answer, and which one waits changes (`duties`). Each
//! user has his turn (`turns`); where one may hold up what he asks for, it is answered when an errand is done (`errands`), and no thread waits
//! for that. A connection has one request at a time; the next one is read when the first is answered. So whoever crashes, floods, or does not
//! read holds up nobody but himself, and what a connection costs is one descriptor, and what its client has not read.
//!
//! **How many.** A user has so many connections, and all users together leave some to root (`capacity`); one that has nothing and asks nothing for
//! [`IDLE`] is ended. One that was ended counts for as long as its client has something to read: that is memory of this process's control group;
//! and for as long as what its client has sent can't be closed.

use super::duties::{Duties, Duty};
use super::protocol::{Answer, Code, REQUEST_MOST};
use super::server::{Done, Reply, Shared};
use super::unread::Unread;
use crate::sys::seqpacket::Peer;
use crate::sys::stranger::{Listener, Stranger};
use crate::sys::{Errno, clock, closing};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A connection that has no file and asks nothing for so long is ended.
const IDLE: Duration = Duration::from_secs(60);
/// How often that is looked at, while there are connections.
const SWEEP: Duration = Duration::from_secs(5);
/// So long nobody is taken in after there was no descriptor or no memory for one more.
const NO_ROOM: Duration = Duration::from_millis(50);
/// One that waits, and those that do what is asked: all of it is done in microseconds, but for making a file.
const THREADS: usize = 5;
/// What one of them needs of a stack.
const STACK: usize = 256 << 10;
/// Whoever has not read so many bytes of answers gets no more.
const UNREAD_MOST: usize = 32 << 10;
/// So many who were sent away may leave that unread.
const SENT_AWAY_MOST: usize = 64;
/// Connections that are taken in before others are looked at.
const AT_ONCE: usize = 64;

/// What the listener and the call to wake up are to epoll; connections have smaller numbers.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// A client, until it or the server ends the connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub number: u64,
    socket: Stranger,
    pub peer: Peer,
    /// The user who pays for what the peer takes.
    pub account: u32,
    /// When it was last heard of.
    heard_ns: AtomicU64,
}

impl Connection {
    /// Whether all that it was told has been read.
    fn is_read(&self) -> bool {
        self.socket.unread() == 0
    }

    /// Those of these groups that the peer is in. It may be in 65,536, so nobody remembers them.
    pub fn is_in(&self, mut groups: Vec<u32>) -> Vec<u32> {
        if !groups.is_empty() {
            let all = self.socket.peer_groups();
            groups.retain(|group| *group == self.peer.group || all.contains(group));
        }
        groups
    }
}

/// What the threads share.
struct Common {
    shared: Arc<Shared>,
    poll: OwnedFd,
    wake: OwnedFd,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Those that have ended, with answers that were not read.
    unread: Mutex<Unread<Arc<Connection>>>,
    duties: Duties<Box<Watch>, Arc<Connection>>,
}

/// What whoever waits for connections knows. One thread has it at a time.
struct Watch {
    listener: Listener,
    next_number: u64,
    next_sweep_ns: u64,
    /// When somebody is taken in again; 0 where that is now.
    no_room_ns: u64,
}

/// The threads of a server's front.
pub(super) struct Front {
    common: Arc<Common>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Front {
    /// Serves those who connect to `listener`.
    ///
    /// # Errors
    /// Where there are no descriptors or threads to be had.
    pub fn start(shared: Arc<Shared>, listener: Listener) -> Result<Front, Errno> {
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        listener.do_not_wait()?;
        epoll::add(&poll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&poll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let watch = Watch { listener, next_number: 0, next_sweep_ns: 0, no_room_ns: 0 };
        let common = Arc::new(Common {
            shared,
            poll,
            wake,
            connections: Mutex::new(HashMap::new()),
            unread: Mutex::default(),
            duties: Duties::new(Box::new(watch)),
        });
        let mut front = Front { common: common.clone(), threads: Vec::new() };
        let bell = Arc::downgrade(&common);
        let ring = move || {
            if let Some(common) = bell.upgrade() {
                common.duties.errand_is_done();
            }
        };
        common.shared.errands.on_done(Some(Box::new(ring)));
        for _ in 0..THREADS {
            let common = common.clone();
            let builder = std::thread::Builder::new().name("pool-worker".into()).stack_size(STACK);
            front.threads.push(builder.spawn(move || common.work())?);
        }
        Ok(front)
    }
}

impl Drop for Front {
    /// Ends all connections; requests that have begun are done and answered. What those had taken who have left by themselves goes back;
    /// the others' stays.
    fn drop(&mut self) {
        let common = &self.common;
        common.duties.end();
        let _ = rustix::io::write(&common.wake, &1u64.to_ne_bytes());
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
        // Nobody connects any more.
        drop(common.duties.take_watch());
        common.shared.errands.on_done(None);
        for reply in common.shared.settle() {
            let _ = common.send(reply);
        }
        for (_, connection) in lock(&common.connections).drain() {
            if connection.socket.is_left() {
                common.shared.left(connection.number);
            }
            connection.socket.end();
        }
    }
}

impl Common {
    /// Waits until somebody asks for something, or until it is over. Returns who does, the first one first, with whose account it is.
    fn wait(&self, watch: &mut Watch) -> Vec<(u32, Arc<Connection>)> {
        let mut events = Vec::with_capacity(AT_ONCE);
        loop {
            let now = clock::now_ns();
            let nobody = lock(&self.connections).is_empty() && lock(&self.unread).len() == 0;
            if now >= watch.next_sweep_ns && !nobody {
                self.end_idle(now);
                let gone = lock(&self.unread).take_read(now, |one| one.is_read());
                drop(gone);
                watch.next_sweep_ns = now + SWEEP.as_nanos() as u64;
            }
            // With nobody there, nothing happens before somebody comes.
            let mut due = if nobody { u64::MAX } else { watch.next_sweep_ns };
            if watch.no_room_ns > 0 && now >= watch.no_room_ns {
                watch.no_room_ns = 0;
                let _ = epoll::modify(&self.poll, &watch.listener, EventData::new_u64(LISTENER), EventFlags::IN);
            } else if watch.no_room_ns > 0 {
                due = due.min(watch.no_room_ns);
            }
            let pause = clock::timespec(due.saturating_sub(now));
            events.clear();
            let timeout = (due != u64::MAX).then_some(&pause);
            // Interrupted is as good as late.
            let _ = epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), timeout);
            let mut asking = Vec::new();
            while let Some(Event { data, .. }) = events.pop() {
                match data.u64() {
                    WAKE => return Vec::new(),
                    LISTENER => {
                        if !self.take_in(watch) {
                            let none = EventFlags::empty();
                            let _ = epoll::modify(&self.poll, &watch.listener, EventData::new_u64(LISTENER), none);
                            watch.no_room_ns = clock::now_ns() + NO_ROOM.as_nanos() as u64;
                        }
                    }
                    number => {
                        let connection = lock(&self.connections).get(&number).cloned();
                        asking.extend(connection.map(|connection| (connection.account, connection)));
                    }
                }
            }
            if !asking.is_empty() {
                // The first one to ask was the last one to be looked at.
                asking.reverse();
                return asking;
            }
        }
    }

    /// Takes in some of those who want to connect. Returns whether there was room for them.
    fn take_in(&self, watch: &mut Watch) -> bool {
        for _ in 0..AT_ONCE {
            let mut socket = match watch.listener.accept() {
                Ok(socket) => socket,
                Err(Errno(libc::EAGAIN)) => return true,
                Err(_) => return false,
            };
            let Ok(peer) = socket.peer() else { continue };
            let number = watch.next_number;
            watch.next_number += 1;
            let heard_ns = AtomicU64::new(clock::now_ns());
            let account = self.shared.broker().state.settings.quotas.subordinates.account_of(peer.user);
            socket.set_account(account);
            let connection = Arc::new(Connection { number, socket, peer, account, heard_ns });
            if !self.has_room(account) {
                self.shared.broker().state.counters.refused += 1;
                self.send_away(connection);
                continue;
            }
            lock(&self.connections).insert(number, connection.clone());
            let events = EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT;
            if epoll::add(&self.poll, &*connection.socket, EventData::new_u64(number), events).is_err() {
                lock(&self.connections).remove(&number);
                return false;
            }
        }
        true
    }

    fn has_room(&self, account: u32) -> bool {
        let unclosed = closing::unclosed(account);
        let connections = lock(&self.connections);
        let mut unread = lock(&self.unread);
        let capacity = &self.shared.capacity;
        let own = connections.values().filter(|one| one.account == account).count() + unclosed.connections;
        let own = |unread: &Unread<_>| own + unread.of(account);
        let all = connections.len() + unclosed.descriptors;
        let takes_in = |unread: &Unread<_>| capacity.takes_in(account, all + unread.len(), own(unread));
        let mut has_room = takes_in(&unread);
        let mut gone = Vec::new();
        if !has_room {
            gone = unread.take_read(clock::now_ns(), |one| one.is_read());
            has_room = takes_in(&unread);
        }
        // What others leave unread is no reason to refuse somebody who has few himself.
        if !has_room && capacity.takes_in(account, all, own(&unread)) {
            gone.extend(unread.take_most());
            has_room = takes_in(&unread);
        }
        drop((connections, unread));
        // Closing them takes a while.
        drop(gone);
        has_room
    }

    /// There is no room for whoever has connected. Somebody who leaves unread what he is told is told no more.
    fn send_away(&self, connection: Arc<Connection>) {
        let unread = lock(&self.unread).of(connection.account);
        if unread < SENT_AWAY_MOST {
            let message = "too many connections; close some".into();
            let answer = Answer::Error { code: Code::TooMany, message };
            let _ = connection.socket.send(answer.to_string().as_bytes(), None);
            self.keep_unread(connection);
        }
    }

    /// A connection has ended, but not what its client has to read.
    fn keep_unread(&self, connection: Arc<Connection>) {
        if !connection.is_read() {
            connection.socket.end();
            lock(&self.unread).push(connection.account, connection);
        }
    }

    /// Ends connections that have nothing and ask nothing.
    fn end_idle(&self, now_ns: u64) {
        let idle = |connection: &Arc<Connection>| {
            now_ns.saturating_sub(connection.heard_ns.load(Ordering::Relaxed)) >= IDLE.as_nanos() as u64
        };
        let idle: Vec<_> = lock(&self.connections).values().filter(|connection| idle(connection)).cloned().collect();
        if idle.is_empty() {
            return;
        }
        let holding = self.shared.holding();
        // A worker may be at one of them; it then finds it ended.
        idle.iter().filter(|connection| !holding.contains(&connection.number)).for_each(|one| one.socket.end());
    }

    /// The life of a thread.
    fn work(&self) {
        let mut room = vec![0; REQUEST_MOST];
        while let Some(duty) = self.duties.next(|| self.shared.errands.next_done()) {
            let asking = match duty {
                Duty::GoOn(done) => {
                    self.go_on(done);
                    continue;
                }
                Duty::Watch(mut watch) => {
                    let asking = self.wait(&mut watch);
                    self.duties.hand_over(watch, asking)
                }
                Duty::Turn(connection) => Some(connection),
            };
            if let Some(connection) = asking
                && !self.answer(&connection, &mut room)
            {
                self.leave(&connection);
            }
        }
    }

    /// Goes on with a request, and answers it if that was all.
    fn go_on(&self, done: Done) {
        if let Some(reply) = self.shared.go_on(done) {
            let client = reply.client.clone();
            if !self.send(reply) {
                self.leave(&client);
            }
        }
    }

    /// A client has left, or is no longer answered.
    fn leave(&self, connection: &Arc<Connection>) {
        // First off the list, so that nobody is told of it once more.
        lock(&self.connections).remove(&connection.number);
        self.shared.left(connection.number);
        self.keep_unread(connection.clone());
    }

    /// Reads a request and answers it, or will. Returns whether the connection goes on.
    fn answer(&self, connection: &Arc<Connection>, room: &mut [u8]) -> bool {
        connection.heard_ns.store(clock::now_ns(), Ordering::Relaxed);
        if connection.socket.unread() > UNREAD_MOST {
            return false;
        }
        match connection.socket.receive(room) {
            Err(Errno(libc::EAGAIN)) => self.hear(connection),
            Ok(packet) if packet.len > 0 => {
                let bytes = (!packet.cut).then_some(&room[..packet.len]);
                self.shared.request(bytes, connection).is_none_or(|reply| self.send(reply))
            }
            _ => false,
        }
    }

    /// Answers a request, and hears the next one. Returns whether the connection goes on.
    fn send(&self, reply: Reply) -> bool {
        let Reply { client, answer, file } = reply;
        let sent = client.socket.send(answer.to_string().as_bytes(), file.as_ref().map(std::os::fd::AsFd::as_fd));
        // Not before: it would take a CPU that the client can have.
        self.shared.wake_keeper();
        drop(file);
        if sent.is_err() {
            // Nobody has heard of a file that was handed out with it.
            self.shared.unheard(&answer);
            return false;
        }
        self.hear(&client)
    }

    /// Waits for the next request.
    fn hear(&self, connection: &Connection) -> bool {
        let events = EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT;
        epoll::modify(&self.poll, &*connection.socket, EventData::new_u64(connection.number), events).is_ok()
    }
}
