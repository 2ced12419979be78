//! Connections of those who are not to be trusted.
//!
//! A packet on a Unix socket may bring descriptors. Whoever takes it out of the socket, or closes the socket while it is in there, has to close
//! them; and where nobody else has them any more, closing one may take as long as who sent it likes: until a network has taken what a
//! socket lingers for (`SO_LINGER`), or until a file system in user space has answered. Room for none of them in a receive is no help: then the
//! kernel closes them, in the thread that receives.
//!
//! So nothing of the sort may get in ([`Socket::refuse_descriptors`], Linux 6.16). On older kernels a packet is looked at before it is taken out.
//! A connection with descriptors in it is over, and is closed by the end of a thread that nobody waits for and that has nothing else open: for
//! whoever ends, the kernel does not wait until a network has taken what a socket lingers for.
//!
//! A thread gets its table by copying the process's up to some number, 64 at least before Linux 6.12, and what it has a copy of for that moment it may
//! be the last to close. So numbers below 64 are taken for good ([`LowNumbers`]) before the first stranger comes, whose connections have larger ones, and
//! what is to be closed gets one of the low ones for that.

use super::seqpacket::{Packet, Socket};
use super::{Errno, clock, sched, thread};
use rustix::io::DupFlags;
use rustix::process::{Resource, getrlimit};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So many threads may be at closing what one account has sent, and so many in all. What comes beyond that waits, still open.
const THREADS_OF_ONE: usize = 8;
const THREADS: usize = 256;
/// From one look at which of them have gone to the next one, at least.
const LOOK: Duration = Duration::from_millis(50);
/// What such a thread needs of a stack.
const STACK: usize = 64 << 10;
/// Connections of strangers have no numbers below this, where the process may have several times as many descriptors.
const LOW: i32 = 64;

/// The low numbers of descriptors that nothing else has, each of which stands for the same thing.
#[derive(Debug)]
pub struct LowNumbers {
    held: Vec<OwnedFd>,
    /// One that something to be closed can have for a moment.
    slot: Mutex<OwnedFd>,
}

impl LowNumbers {
    /// All that are free. To be called before there is anything that will be closed while strangers come. `None` where the kernel lets strangers send
    /// nothing that is slow to close, or where there are too few descriptors for that.
    pub fn hold() -> Option<LowNumbers> {
        let (one, _) = Socket::pair().ok()?;
        if one.refuse_descriptors() { None } else { LowNumbers::take(&one) }
    }

    fn take(like: &Socket) -> Option<LowNumbers> {
        if getrlimit(Resource::Nofile).current.is_some_and(|most| most < 16 * LOW as u64) {
            return None;
        }
        let copy = || rustix::io::fcntl_dupfd_cloexec(like, 0).ok();
        let mut held: Vec<OwnedFd> = std::iter::from_fn(copy).take_while(|copy| copy.as_raw_fd() < LOW).collect();
        // Of these the first, so that as little as possible is below it.
        let slot = (held.len() > 1).then(|| held.remove(0))?;
        Some(LowNumbers { held, slot: Mutex::new(slot) })
    }
}

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
            closing().close(self.account, (socket.into(), self.low.take()), start);
        }
    }
}

/// What is being closed, or is to be, by the accounts of those who have sent it. Each thread counts until it has gone: its end is what closes, and
/// may take as long as a file system in user space likes.
#[derive(Debug)]
struct Closing<T, D> {
    threads: Vec<(u32, T)>,
    waiting: Vec<(u32, D)>,
    /// When it was last looked which threads have gone.
    looked_ns: u64,
}

impl<T, D> Closing<T, D> {
    const fn new() -> Closing<T, D> {
        Closing { threads: Vec::new(), waiting: Vec::new(), looked_ns: 0 }
    }

    /// How many there are in all, and of the account.
    fn count(&self, account: u32) -> (usize, usize) {
        let all = || self.threads.iter().map(|(of, _)| *of).chain(self.waiting.iter().map(|(of, _)| *of));
        (all().count(), all().filter(|&of| of == account).count())
    }

    /// Begins to close `descriptor`, if there may be a thread for it, or has it wait: `start` says which thread that is, or gives back what it can't
    /// close now.
    fn close(&mut self, account: u32, descriptor: D, start: impl FnOnce(D) -> Result<T, D>) {
        let of_one = self.threads.iter().filter(|(of, _)| *of == account).count();
        let has_room = self.threads.len() < THREADS && of_one < THREADS_OF_ONE;
        match if has_room { start(descriptor) } else { Err(descriptor) } {
            Ok(thread) => self.threads.push((account, thread)),
            Err(descriptor) => self.waiting.push((account, descriptor)),
        }
    }

    /// Finds out which threads have gone, and begins to close what waits. There may be much of that, so a moment after the last time it does nothing.
    fn go_on(&mut self, now_ns: u64, lives: impl Fn(&T) -> bool, mut start: impl FnMut(D) -> Result<T, D>) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK.as_nanos() as u64 {
            return;
        }
        self.looked_ns = now_ns;
        self.threads.retain(|(_, thread)| lives(thread));
        for (account, descriptor) in std::mem::take(&mut self.waiting) {
            self.close(account, descriptor, &mut start);
        }
    }
}

/// That of this process.
static CLOSING: Mutex<Closing<ThreadId, Waiting>> = Mutex::new(Closing::new());

/// The number of a thread.
type ThreadId = i32;
type Waiting = (OwnedFd, Option<Arc<LowNumbers>>);

fn closing() -> MutexGuard<'static, Closing<ThreadId, Waiting>> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many connections that are over can't be closed yet, in all and of the account, because of what was sent through them. Each of them has a
/// descriptor still, or a thread.
pub fn unclosed(account: u32) -> (usize, usize) {
    let mut closing = closing();
    if closing.threads.is_empty() && closing.waiting.is_empty() {
        return (0, 0);
    }
    let lives = |thread: &ThreadId| Path::new(&format!("/proc/self/task/{thread}")).exists();
    closing.go_on(clock::now_ns(), lives, start);
    closing.count(account)
}

fn start((descriptor, low): Waiting) -> Result<ThreadId, Waiting> {
    start_closing(descriptor, low.as_deref()).map_err(|descriptor| (descriptor, low))
}

/// Starts a thread that has `number` alone and whose end closes it. Returns its number, and what it waits for before it ends: that is dropped.
fn closing_thread(number: RawFd) -> Option<(ThreadId, Sender<()>)> {
    let (has_parted, parted) = channel();
    let (may_close, is_closed_here) = channel::<()>();
    let close = move || {
        // A table of its own, with this alone in it: if the process is killed meanwhile, everything else is closed at once.
        // Whoever waits for that does not wait for what others have closed meanwhile, and is in the table for a moment.
        let tell = |parted| {
            let _ = has_parted.send(parted);
        };
        if let Err(error) = thread::keep_descriptor(number, || tell(Ok(sched::thread_id()))) {
            tell(Err(error));
        }
        // The last one to close it is the one that may have to wait.
        let _ = is_closed_here.recv();
        // The end of the thread closes what is left in its table. Closed before, a socket that lingers would keep it here.
    };
    std::thread::Builder::new().name("closes".into()).stack_size(STACK).spawn(close).ok()?;
    match parted.recv() {
        Ok(Ok(thread)) => Some((thread, may_close)),
        _ => None,
    }
}

/// Has a thread close `descriptor`, however long that takes, while others go on. Gives it back where that can't be done now.
fn start_closing(descriptor: OwnedFd, low: Option<&LowNumbers>) -> Result<ThreadId, OwnedFd> {
    let Some(low) = low else {
        return match closing_thread(descriptor.as_raw_fd()) {
            Some((thread, _ends)) => {
                drop(descriptor);
                Ok(thread)
            }
            None => Err(descriptor),
        };
    };
    let mut slot = low.slot.lock().unwrap_or_else(PoisonError::into_inner);
    if rustix::io::dup3(&descriptor, &mut slot, DupFlags::CLOEXEC).is_err() {
        return Err(descriptor);
    }
    let started = match closing_thread(slot.as_raw_fd()) {
        Some(started) => {
            drop(descriptor);
            Ok(started)
        }
        None => Err(descriptor),
    };
    // Not the last one, either: the thread has one, or it stays open.
    let _ = rustix::io::dup3(&low.held[0], &mut slot, DupFlags::CLOEXEC);
    started.map(|(thread, _ends)| thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

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
        eventually("a thread counts that has gone", || unclosed(0) == (0, 0));
    }

    /// Account 1 sends what is never closed.
    #[test]
    fn whoever_sends_what_is_never_closed_has_few_threads_and_the_others_have_theirs() {
        let mut closing = Closing::new();
        let later = |looks: u64| 1_000_000_000 + looks * LOOK.as_nanos() as u64;
        for number in 0..100 {
            closing.close(1, number, |_| Ok(()));
        }
        assert_eq!((closing.threads.len(), closing.waiting.len()), (THREADS_OF_ONE, 92));
        assert_eq!((closing.count(1), closing.count(2)), ((100, 100), (100, 0)));
        closing.close(2, 100, |_| Ok(()));
        assert_eq!((closing.threads.len(), closing.count(2)), (9, (101, 1)));
        closing.go_on(later(1), |_| true, |_| Ok(()));
        assert_eq!(closing.waiting.len(), 92);
        // The threads come to their end; that is not looked for all the time.
        closing.go_on(later(1) + 1, |_| false, |_| Ok(()));
        assert_eq!(closing.waiting.len(), 92);
        for (look, left) in (2..).zip([84, 76, 68]) {
            closing.go_on(later(look), |_| false, |_| Ok(()));
            assert_eq!(closing.waiting.len(), left);
        }
        (5..20).for_each(|look| closing.go_on(later(look), |_| false, |_| Ok(())));
        assert_eq!(closing.count(1), (0, 0));
        // Where no thread can be started it waits, and is not lost.
        closing.close(1, 7, Err);
        closing.go_on(later(20), |_| true, Err);
        assert_eq!(closing.waiting, [(1, 7)]);
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
