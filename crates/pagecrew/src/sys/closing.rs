//! Closing what may be slow to close: connections of strangers, with descriptors in them that nobody has read (see [`stranger`](super::stranger)).
//!
//! Each is closed by the end of a thread that nobody waits for and that has nothing else open: for whoever ends, the kernel does not wait until a
//! network has taken what a socket lingers for. Of such threads an account has few, so what comes beyond that waits; and where much waits, one
//! thread takes it all (`next_load`), into a table of descriptors of its own, where it keeps no room from others.
//!
//! A thread gets its table by copying the process's up to some number, 64 at least before Linux 6.12, and what it has a copy of for that moment it may
//! be the last to close. So numbers below 64 are taken for good ([`LowNumbers`]) before the first stranger comes, whose connections have larger ones, and
//! what is to be closed gets one of the low ones for that. Where it is more than one connection, that is a socket through which they come.

use super::seqpacket::{DESCRIPTORS_MOST, Socket};
use super::{Errno, clock, sched, thread};
use rustix::io::DupFlags;
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So many threads of one account close one connection each.
const ALONE: usize = 8;
/// So many more do that for [`LOAD_LEAST`] connections each; as many again for twice as many each, and so on, until it is [`LOAD_MOST`], or this
/// part of what the process may have of descriptors: what waits for a thread is in its table.
const ALIKE: usize = 4;
const LOAD_LEAST: usize = 32;
const LOAD_MOST: usize = 8 * DESCRIPTORS_MOST;
const PART: u64 = 32;
/// So many threads there are for one account, at most: as many connections then as it may have descriptors in sockets (524,288 by systemd's
/// default, `RLIMIT_NOFILE`), where each has one in it. And so many for all.
const THREADS_OF_ONE: usize = 288;
const THREADS: usize = 1024;
/// From one look at which of the threads have gone to the next one, at least.
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

    /// The same, whatever the kernel refuses.
    pub(super) fn take(like: &Socket) -> Option<LowNumbers> {
        if descriptors_most() < 16 * LOW as u64 {
            return None;
        }
        let copy = || rustix::io::fcntl_dupfd_cloexec(like, 0).ok();
        let mut held: Vec<OwnedFd> = std::iter::from_fn(copy).take_while(|copy| copy.as_raw_fd() < LOW).collect();
        // Of these the first, so that as little as possible is below it.
        let slot = (held.len() > 1).then(|| held.remove(0))?;
        Some(LowNumbers { held, slot: Mutex::new(slot) })
    }
}

/// How many connections one more thread of an account takes that has so many threads, and so many connections that wait, where the process may have
/// `most` descriptors; `None` where there is none.
fn next_load(threads: usize, waiting: usize, most: u64) -> Option<usize> {
    let part = usize::try_from(most / PART).unwrap_or(usize::MAX).max(1);
    let load = match threads.checked_sub(ALONE) {
        None => 1,
        Some(more) => (LOAD_LEAST << (more / ALIKE).min(8)).min(LOAD_MOST).min(part),
    };
    (threads < THREADS_OF_ONE && waiting >= load).then_some(load)
}

/// What is being closed, or is to be, by the accounts of those who have sent it. A thread counts until it has gone: its end is what closes, and may
/// take as long as a file system in user space likes.
#[derive(Debug)]
struct Closing<T, D> {
    threads: Vec<Closer<T>>,
    waiting: Vec<(u32, D)>,
    /// When it was last looked which threads have gone.
    looked_ns: u64,
    /// No thread could be started since then.
    has_failed: bool,
}

#[derive(Debug)]
struct Closer<T> {
    account: u32,
    thread: T,
    /// How many it closes.
    connections: usize,
}

/// How much there is that can't be closed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unclosed {
    /// Descriptors in this process's table, of all accounts.
    pub descriptors: usize,
    /// Connections of the account that was asked for.
    pub connections: usize,
}

impl<T, D> Closing<T, D> {
    const fn new() -> Closing<T, D> {
        Closing { threads: Vec::new(), waiting: Vec::new(), looked_ns: 0, has_failed: false }
    }

    fn waiting_of(&self, account: u32) -> usize {
        self.waiting.iter().filter(|(of, _)| *of == account).count()
    }

    fn unclosed(&self, account: u32) -> Unclosed {
        let threads = self.threads.iter().filter(|closer| closer.account == account);
        Unclosed {
            descriptors: self.waiting.len(),
            connections: threads.map(|closer| closer.connections).sum::<usize>() + self.waiting_of(account),
        }
    }

    /// One more is to be closed.
    fn push(&mut self, account: u32, connection: D, most: u64, start: impl FnMut(Vec<D>) -> Result<T, Vec<D>>) {
        self.waiting.push((account, connection));
        self.begin(account, most, start);
    }

    /// Begins to close what there may be threads for: `start` says which thread it is, or gives back what it can't close now.
    fn begin(&mut self, account: u32, most: u64, mut start: impl FnMut(Vec<D>) -> Result<T, Vec<D>>) {
        while !self.has_failed {
            let threads = self.threads.iter().filter(|closer| closer.account == account).count();
            let load = next_load(threads, self.waiting_of(account), most).filter(|_| self.threads.len() < THREADS);
            let Some(connections) = load else { return };
            let mut load = Vec::with_capacity(connections);
            for (of, connection) in std::mem::take(&mut self.waiting) {
                if of == account && load.len() < connections {
                    load.push(connection);
                } else {
                    self.waiting.push((of, connection));
                }
            }
            match start(load) {
                Ok(thread) => self.threads.push(Closer { account, thread, connections }),
                Err(load) => {
                    self.waiting.extend(load.into_iter().map(|connection| (account, connection)));
                    self.has_failed = true;
                }
            }
        }
    }

    /// Finds out which threads have gone, and begins to close what waits. There may be much of that, so a moment after the last time it does nothing.
    fn go_on(
        &mut self,
        now_ns: u64,
        most: u64,
        lives: impl Fn(&T) -> bool,
        mut start: impl FnMut(Vec<D>) -> Result<T, Vec<D>>,
    ) {
        if now_ns.saturating_sub(self.looked_ns) < LOOK.as_nanos() as u64 {
            return;
        }
        (self.looked_ns, self.has_failed) = (now_ns, false);
        self.threads.retain(|closer| lives(&closer.thread));
        let mut accounts: Vec<u32> = self.waiting.iter().map(|(account, _)| *account).collect();
        accounts.sort_unstable();
        accounts.dedup();
        accounts.into_iter().for_each(|account| self.begin(account, most, &mut start));
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

/// Closes a connection of `account`, or will. Takes no longer than some system calls.
pub fn close(account: u32, connection: OwnedFd, low: Option<Arc<LowNumbers>>) {
    closing().push(account, (connection, low), descriptors_most(), start);
}

/// What can't be closed yet, because of what was sent.
pub fn unclosed(account: u32) -> Unclosed {
    let mut closing = closing();
    if closing.threads.is_empty() && closing.waiting.is_empty() {
        return Unclosed { descriptors: 0, connections: 0 };
    }
    let lives = |thread: &ThreadId| Path::new(&format!("/proc/self/task/{thread}")).exists();
    closing.go_on(clock::now_ns(), descriptors_most(), lives, start);
    closing.unclosed(account)
}

/// So many descriptors this process may have.
fn descriptors_most() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Has a thread close all of these, however long that takes, while others go on. Gives them back where that can't be done now.
fn start(mut load: Vec<Waiting>) -> Result<ThreadId, Vec<Waiting>> {
    if load.len() > 1 {
        return start_for_many(load);
    }
    let Some((connection, low)) = load.pop() else { return Err(load) };
    let started = CloserThread::start(&connection, low.as_deref(), 0);
    match started {
        Some(started) => {
            drop(connection);
            Ok(started.thread)
        }
        None => Err(vec![(connection, low)]),
    }
}

fn start_for_many(load: Vec<Waiting>) -> Result<ThreadId, Vec<Waiting>> {
    let start = || {
        let (inside, outside) = Socket::pair().ok()?;
        let packets = load.chunks(DESCRIPTORS_MOST);
        let started = CloserThread::start(inside.as_fd(), load[0].1.as_deref(), packets.len())?;
        drop(inside);
        for packet in packets {
            let descriptors: Vec<_> = packet.iter().map(|(connection, _)| connection.as_fd()).collect();
            // Where one can't be sent, the thread misses it.
            let _ = outside.send_descriptors(&descriptors);
        }
        drop(outside);
        (started.has_received.recv() == Ok(load.len())).then_some(started)
    };
    match start() {
        // The thread has all of them. It ends when this is dropped, after those here.
        Some(started) => {
            drop(load);
            Ok(started.thread)
        }
        // If it has some of them, so have we.
        None => Err(load),
    }
}

/// A thread whose end closes what it has, and that ends when this is dropped.
struct CloserThread {
    thread: ThreadId,
    /// How much it has received.
    has_received: Receiver<usize>,
    _ends: Sender<()>,
}

impl CloserThread {
    /// Starts one that has `descriptor` alone, and what comes through it in so many packets.
    fn start(descriptor: impl AsFd, low: Option<&LowNumbers>, packets: usize) -> Option<CloserThread> {
        let Some(low) = low else { return CloserThread::of(descriptor.as_fd().as_raw_fd(), packets) };
        let mut slot = low.slot.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::io::dup3(&descriptor, &mut slot, DupFlags::CLOEXEC).ok()?;
        let started = CloserThread::of(slot.as_raw_fd(), packets);
        // Not the last one: it is open still where it came from.
        let _ = rustix::io::dup3(&low.held[0], &mut slot, DupFlags::CLOEXEC);
        started
    }

    /// The number is open until this returns.
    fn of(number: RawFd, packets: usize) -> Option<CloserThread> {
        let (has_parted, parted) = channel();
        let (receives, has_received) = channel();
        let (ends, is_to_end) = channel::<()>();
        let close = move || {
            // A table of its own, with this alone in it: if the process is killed meanwhile, everything else is closed at once.
            // Whoever waits for that does not wait for what others have closed meanwhile, and is in the table for a moment.
            let tell = |parted: Result<ThreadId, Errno>| {
                let _ = has_parted.send(parted);
            };
            match thread::keep_descriptor(number, || tell(Ok(sched::thread_id()))) {
                // SAFETY: it is open in this thread's table, and nobody closes it there before the thread has ended.
                Ok(()) => drop(receives.send(receive(unsafe { BorrowedFd::borrow_raw(number) }, packets))),
                Err(error) => return tell(Err(error)),
            }
            // The last one to close it is the one that may have to wait.
            let _ = is_to_end.recv();
            // The end of the thread closes what is left in its table. Closed before, a socket that lingers would keep it here.
        };
        std::thread::Builder::new().name("closes".into()).stack_size(STACK).spawn(close).ok()?;
        match parted.recv() {
            Ok(Ok(thread)) => Some(CloserThread { thread, has_received, _ends: ends }),
            _ => None,
        }
    }
}

/// Receives so many packets, and leaves what was in them open. Returns how many descriptors that were.
fn receive(socket: BorrowedFd<'_>, packets: usize) -> usize {
    let receive = |_| {
        let descriptors = Socket::receive_descriptors(socket).unwrap_or_default();
        let count = descriptors.len();
        descriptors.into_iter().for_each(std::mem::forget);
        count
    };
    (0..packets).map(receive).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::io::Read;

    /// What a service may have of descriptors.
    const MOST: u64 = 65536;

    fn later(looks: u64) -> u64 {
        1_000_000_000 + looks * LOOK.as_nanos() as u64
    }

    /// Account 1 sends what is never closed.
    #[test]
    fn whoever_sends_what_is_never_closed_has_few_threads_and_the_others_have_theirs() {
        let mut closing = Closing::new();
        for number in 0..30 {
            closing.push(1, number, MOST, |_| Ok(()));
        }
        assert_eq!((closing.threads.len(), closing.waiting.len()), (ALONE, 22));
        assert_eq!(closing.unclosed(1), Unclosed { descriptors: 22, connections: 30 });
        assert_eq!(closing.unclosed(2), Unclosed { descriptors: 22, connections: 0 });
        closing.push(2, 100, MOST, |_| Ok(()));
        assert_eq!((closing.threads.len(), closing.unclosed(2).connections), (9, 1));
        closing.go_on(later(1), MOST, |_| true, |_| Ok(()));
        assert_eq!(closing.waiting.len(), 22);
        // The threads come to their end; that is not looked for all the time.
        closing.go_on(later(1) + 1, MOST, |_| false, |_| Ok(()));
        assert_eq!(closing.waiting.len(), 22);
        for (look, left) in (2..).zip([14, 6, 0]) {
            closing.go_on(later(look), MOST, |_| false, |_| Ok(()));
            assert_eq!(closing.waiting.len(), left);
        }
        (5..20).for_each(|look| closing.go_on(later(look), MOST, |_| false, |_| Ok(())));
        assert_eq!(closing.unclosed(1), Unclosed { descriptors: 0, connections: 0 });
        // Where no thread can be started it waits, and is not lost.
        closing.push(1, 7, MOST, Err);
        closing.go_on(later(20), MOST, |_| true, Err);
        assert_eq!(closing.waiting, [(1, 7)]);
    }

    #[test]
    fn however_many_there_are_few_take_room_from_others() {
        for (connections, most) in [(524_288, 1 << 20), (524_288, MOST), (30_000, 4096), (8_000, 1024)] {
            let (mut threads, mut waiting) = (0, 0);
            for number in 1..=connections {
                waiting += 1;
                while let Some(load) = next_load(threads, waiting, most) {
                    (threads, waiting) = (threads + 1, waiting - load);
                }
                assert!(waiting < LOAD_MOST && waiting as u64 <= most / PART, "{number} of {most}");
            }
            assert!(threads < THREADS_OF_ONE);
        }
        assert_eq!(next_load(THREADS_OF_ONE, usize::MAX, MOST), None);
        let mut closing = Closing::new();
        (0..5000).for_each(|number| closing.push(1, number, MOST, |load| Ok(load.len())));
        assert_eq!(closing.unclosed(1).connections, 5000);
        assert!(closing.threads.iter().all(|closer| closer.connections == closer.thread));
        // Another one's go to threads of their own.
        (0..ALONE + 5).for_each(|number| closing.push(2, number, MOST, |load| Ok(load.len())));
        assert_eq!(closing.unclosed(2).connections, ALONE + 5);
        assert_eq!(closing.threads.iter().filter(|closer| closer.account == 2).count(), ALONE);
        // Nor are there more threads than there may be, whoever has sent it all.
        (3..3 + THREADS as u32).for_each(|account| closing.push(account, 0, MOST, |load| Ok(load.len())));
        assert_eq!(closing.threads.len(), THREADS);
    }

    #[test]
    fn much_goes_at_once_where_there_is_a_thread_for_it() {
        let mut closing = Closing::new();
        let mut sizes = Vec::new();
        let mut start = |load: Vec<usize>| {
            sizes.push(load.len());
            Ok(())
        };
        for number in 0..ALONE + ALIKE * LOAD_LEAST + 2 * LOAD_LEAST - 1 {
            closing.push(1, number, MOST, &mut start);
        }
        let large = closing.waiting.len();
        closing.push(1, 0, MOST, &mut start);
        assert_eq!((large, closing.waiting.len()), (2 * LOAD_LEAST - 1, 0));
        let expected: Vec<usize> = [[1; ALONE].as_slice(), &[LOAD_LEAST; ALIKE], &[2 * LOAD_LEAST]].concat();
        assert_eq!(sizes, expected);
        // Where that fails, they wait, and are not lost.
        let mut closing: Closing<(), usize> = Closing::new();
        (0..ALONE).for_each(|number| closing.push(1, number, MOST, |_| Ok(())));
        (0..2 * DESCRIPTORS_MOST).for_each(|number| closing.push(1, number, MOST, Err));
        assert_eq!(closing.unclosed(1).connections, ALONE + 2 * DESCRIPTORS_MOST);
        assert_eq!(closing.waiting.len(), 2 * DESCRIPTORS_MOST);
    }

    #[test]
    fn a_thread_closes_all_that_it_was_given() {
        let (readers, writers): (Vec<_>, Vec<_>) = (0..300).map(|_| std::io::pipe().unwrap()).unzip();
        let low = LowNumbers::take(&Socket::pair().unwrap().0).map(Arc::new);
        let load: Vec<Waiting> = writers.into_iter().map(|writer| (writer.into(), low.clone())).collect();
        let Ok(_) = start(load) else { return eprintln!("left out: a thread has no table of its own here") };
        for mut reader in readers {
            // Waits until the last one who can write has closed it.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn until_it_ends_it_has_them_and_the_process_does_not() {
        let (readers, writers): (Vec<_>, Vec<_>) = (0..10).map(|_| std::io::pipe().unwrap()).unzip();
        let (inside, outside) = Socket::pair().unwrap();
        let Some(started) = CloserThread::start(&inside, None, 1) else {
            return eprintln!("left out: a thread has no table of its own here");
        };
        let descriptors: Vec<_> = writers.iter().map(AsFd::as_fd).collect();
        outside.send_descriptors(&descriptors).unwrap();
        assert_eq!(started.has_received.recv(), Ok(10));
        drop(writers);
        let open = || {
            let mut waiting: Vec<_> = readers.iter().map(|reader| PollFd::new(reader, PollFlags::empty())).collect();
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            // Those that nobody can write to any more.
            10 - poll(&mut waiting, Some(&now)).unwrap()
        };
        assert_eq!(open(), 10);
        // Its own socket, and those.
        let count = std::fs::read_dir(format!("/proc/self/task/{}/fd", started.thread)).unwrap().count();
        assert_eq!(count, 11);
        drop(started);
        for mut reader in readers {
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }
}
