//! The filler: a process of its own that backs files with zeroed huge pages, in the idle class.
//!
//! Of its own, because a thread of the idle class may be stopped anywhere for as long as others want the CPUs, and what it holds in
//! the kernel then is held: its process's address space, which every thread of a server needs to allocate, among it. What the filler
//! holds, nobody waits for, except who takes the very file that it is at; then it is moved to the ordinary class until it has finished.

use crate::crew::{Crew, Idle, Operation, Task};
use crate::sys::memory::{self, Advice, Range};
use crate::sys::pagemap::{self, Category};
use crate::sys::sched::{self, Class};
use crate::sys::seqpacket::{Packet, Socket};
use crate::sys::shared_file::{self, Mapped};
use crate::sys::topology::Topology;
use crate::sys::{Errno, HUGE_PAGE_SIZE, PAGE_SIZE, clock, numa};
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

/// What the filler is to do to the file that comes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes.
    pub len: u64,
    /// The node that its memory is to be of, by the kernel's number; [`ANY_NODE`] where it does not matter.
    pub node: u64,
    /// How many threads may be at it besides the filler's own.
    pub helpers: u64,
}

/// No node in particular.
pub(super) const ANY_NODE: u64 = u64::MAX;

/// Why less was filled than was ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Short {
    /// No more could be had.
    NothingLeft = 0,
    /// The rest could be had in small pages only.
    Fragmented = 1,
    /// The rest could be had on other nodes only.
    Elsewhere = 2,
}

/// What came of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    /// Bytes from the order's offset on that are backed by zeroed huge pages. Behind them there may be small ones.
    pub filled: u64,
    /// What became of the rest.
    pub short: Short,
    /// Of the rest, bytes that are on other nodes.
    pub elsewhere: u64,
    /// Of what is filled, bytes of which the kernel does not say the node.
    pub unverified: u64,
    /// CPU time that it took.
    pub cpu_ns: u64,
}

impl Order {
    fn bytes(self) -> [u8; 32] {
        words([self.offset, self.len, self.node, self.helpers])
    }

    fn read(bytes: &[u8]) -> Option<Order> {
        let [offset, len, node, helpers] = numbers(bytes)?;
        Some(Order { offset, len, node, helpers })
    }
}

impl Done {
    fn bytes(self) -> [u8; 40] {
        words([self.filled, self.short as u64, self.elsewhere, self.unverified, self.cpu_ns])
    }

    fn read(bytes: &[u8]) -> Option<Done> {
        let [filled, short, elsewhere, unverified, cpu_ns] = numbers(bytes)?;
        let short = match short {
            0 => Short::NothingLeft,
            1 => Short::Fragmented,
            2 => Short::Elsewhere,
            _ => return None,
        };
        Some(Done { filled, short, elsewhere, unverified, cpu_ns })
    }
}

fn words<const N: usize, const B: usize>(numbers: [u64; N]) -> [u8; B] {
    let mut bytes = [0; B];
    for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    if bytes.len() != 8 * N {
        return None;
    }
    let mut numbers = [0; N];
    for (number, word) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = u64::from_ne_bytes(word.try_into().ok()?);
    }
    Some(numbers)
}

/// The server's end of a filler.
#[derive(Debug)]
pub(super) struct Filler {
    process: Child,
    socket: Socket,
}

impl Filler {
    /// Starts one.
    ///
    /// # Errors
    /// Those of starting a program.
    pub fn start(command: &[OsString]) -> Result<Filler, Errno> {
        let (program, arguments) = command.split_first().ok_or(Errno(libc::ENOENT))?;
        let (socket, other) = Socket::pair()?;
        let process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::null())
            .current_dir("/")
            .spawn()
            .map_err(Errno::from)?;
        Ok(Filler { process, socket })
    }

    /// Has it fill a part of `file`.
    ///
    /// # Errors
    /// If it is gone.
    pub fn order(&self, file: &File, order: Order) -> Result<(), Errno> {
        self.socket.send(&order.bytes(), Some(file.as_fd()))
    }

    /// Waits for the end of the order.
    ///
    /// # Errors
    /// If it is gone.
    pub fn done(&self) -> Result<Done, Errno> {
        let mut room = [0; 64];
        let packet = self.socket.receive(&mut room)?;
        Done::read(&room[..packet.len]).ok_or(Errno(libc::ECONNRESET))
    }

    /// Can be read when the order is done.
    pub fn signal(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // It may be stopped in the middle of an order, and then would end late.
        let _ = self.process.kill();
        let _ = sched::set_class(self.pid(), Class::Normal);
        let _ = self.process.wait();
    }
}

/// The life of a filler: it does what comes over `socket` until that is closed, in the idle class. For a process of its own, with one
/// thread so far.
///
/// # Errors
/// If `socket` is no socket of a server's, or there is no memory for the crew.
pub fn fill(socket: OwnedFd) -> Result<(), Errno> {
    // It ends with the server and not before, whatever a terminal sends to both.
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // What it is at can be done again; whatever else runs here can't.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let socket = Socket::from(socket);
    let _ = sched::set_class(0, Class::Idle);
    let mut crew: Option<(u64, Crew<Idle>)> = None;
    let mut room = [0; 64];
    loop {
        let packet = match socket.receive(&mut room) {
            // The server is gone, perhaps without having read what was done last.
            Ok(Packet { len: 0, .. }) | Err(Errno(libc::ECONNRESET)) => return Ok(()),
            result => result?,
        };
        let (Some(order), Some(file)) = (Order::read(&room[..packet.len]), packet.descriptor) else {
            return Err(Errno(libc::EPROTO));
        };
        let helpers = crew.as_ref().map(|(helpers, _)| *helpers);
        if helpers != Some(order.helpers) {
            let limit = Some(order.helpers as usize);
            crew = Some((
                order.helpers,
                Crew::new(Idle::new()?, limit, sched::with_offline(sched::affinity()?), Topology::read()),
            ));
        }
        let before = clock::process_cpu_ns();
        let done = crew.as_ref().map_or(NOTHING, |(_, crew)| fill_part(&file.into(), order, crew));
        let done = Done { cpu_ns: clock::process_cpu_ns() - before, ..done };
        match socket.send(&done.bytes(), None) {
            Err(Errno(libc::EPIPE)) => return Ok(()),
            result => result?,
        }
    }
}

/// Nothing was filled.
const NOTHING: Done = Done { filled: 0, short: Short::NothingLeft, elsewhere: 0, unverified: 0, cpu_ns: 0 };

/// Backs a part of `file` with huge pages of the node that the order says, and looks where they are. What came in small pages or from other
/// nodes stays for the moment: the file may be somebody's by now, who has written to it.
fn fill_part(file: &File, order: Order, crew: &Crew<Idle>) -> Done {
    let (offset, len) = (order.offset as usize, order.len as usize);
    if len == 0 || !offset.is_multiple_of(HUGE_PAGE_SIZE) || !len.is_multiple_of(HUGE_PAGE_SIZE) {
        return NOTHING;
    }
    let Ok(mapped) = Mapped::unchanged(file, offset, len) else { return NOTHING };
    let range = mapped.range();
    let node = (order.node != ANY_NODE).then_some(order.node as usize);
    // A preference takes from other nodes rather than from the caches of files on this one.
    let bound = node.filter(|&node| numa::bind(range, node).is_ok());
    let near = node.map_or(0, |node| crew.topology().home(node));
    let task = Task { operation: Operation::Populate, range, node: near, report: false };
    // SAFETY: the range is mapped read-write until this function returns, which the crew's `run` doesn't outlast; contents don't change.
    unsafe { crew.run(task) };
    let (backed, step) = match huge_prefix(range) {
        // A kernel that doesn't say (before 6.7, without rights) is taken at its word.
        Err(_) => (shared_file::backed_bytes(file).unwrap_or(0).saturating_sub(offset).min(len), PAGE_SIZE),
        Ok(whole) if whole == len => (len, HUGE_PAGE_SIZE),
        Ok(whole) => (collapse(range, whole), HUGE_PAGE_SIZE),
    };
    if let Some(node) = bound {
        // Whoever takes the file must not be killed because the node is full. A preference that was possible before is so again.
        let _ = numa::prefer(range, node);
    }
    let backed = backed / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    let Placed { filled, elsewhere, unverified } = match node {
        Some(node) => placed(Range { len: backed, ..range }, step, node),
        None => Placed { filled: backed, elsewhere: 0, unverified: 0 },
    };
    let rest = Range { start: range.start + filled, len: len - filled };
    let present = || pagemap::bytes_of(rest, Category::Present).is_ok_and(|bytes| bytes > 0);
    let short = match elsewhere {
        0 if filled < len && present() => Short::Fragmented,
        0 => Short::NothingLeft,
        _ => Short::Elsewhere,
    };
    Done { filled: filled as u64, short, elsewhere: elsewhere as u64, unverified: unverified as u64, cpu_ns: 0 }
}

/// Where the pages of a range are.
#[derive(Debug, Default, PartialEq, Eq)]
struct Placed {
    /// Bytes up to the first huge page that is elsewhere.
    filled: usize,
    /// Bytes behind that which are elsewhere.
    elsewhere: usize,
    /// Of `filled`, bytes of which the kernel does not say it.
    unverified: usize,
}

/// Looks every `step` bytes of `range`, which is backed, whether the page there is of `node`.
fn placed(range: Range, step: usize, node: usize) -> Placed {
    let mut pages = vec![0; range.len / step];
    let mut index = 0;
    let answered = numa::page_nodes(Range { len: pages.len() * step, ..range }, step, |_, status| {
        pages[index] = status;
        index += 1;
    });
    match answered {
        Ok(()) => judge(&pages, step, node),
        Err(_) => Placed { filled: range.len, elsewhere: 0, unverified: range.len },
    }
}

/// What the nodes of pages of `step` bytes mean for a file that is to be of `node`; negative numbers are none.
fn judge(pages: &[i32], step: usize, node: usize) -> Placed {
    let is_elsewhere = |status: &&i32| usize::try_from(**status).is_ok_and(|other| other != node);
    let whole = pages.iter().position(|status| is_elsewhere(&status)).unwrap_or(pages.len());
    let filled = whole * step / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    let (good, rest) = pages.split_at(filled / step);
    Placed {
        filled,
        elsewhere: rest.iter().filter(is_elsewhere).count() * step,
        unverified: good.iter().filter(|status| **status < 0).count() * step,
    }
}

/// Bytes at the beginning of `range` that are in huge pages.
fn huge_prefix(range: Range) -> Result<usize, Errno> {
    let mut prefix = 0;
    pagemap::own_huge_pages(range, |run| {
        if run.start == range.start + prefix {
            prefix += run.len;
        }
    })?;
    Ok(prefix)
}

/// Asks the kernel to make huge pages of the small ones from `prefix` on, as far as that goes. Returns the bytes that then are in huge
/// pages.
fn collapse(range: Range, mut prefix: usize) -> usize {
    while prefix < range.len {
        let page = Range { start: range.start + prefix, len: HUGE_PAGE_SIZE };
        // SAFETY: this kind of advice changes no contents.
        let result = unsafe { memory::advise(page, Advice::Collapse) };
        let now = huge_prefix(range).unwrap_or(0);
        if result.is_err() || now <= prefix {
            break;
        }
        prefix = now;
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_their_ends_pass_whole() {
        let order = Order { offset: 1 << 40, len: 2 << 20, node: 3, helpers: 1 };
        assert_eq!(Order::read(&order.bytes()), Some(order));
        for short in [Short::NothingLeft, Short::Fragmented, Short::Elsewhere] {
            let done = Done { filled: 7, short, elsewhere: 3, unverified: 2, cpu_ns: u64::MAX };
            assert_eq!(Done::read(&done.bytes()), Some(done));
        }
        assert_eq!((Order::read(&[0; 31]), Done::read(&[])), (None, None));
    }

    #[test]
    fn a_page_of_another_node_ends_what_is_filled() {
        const HUGE: usize = HUGE_PAGE_SIZE;
        assert_eq!(judge(&[1, 1, 1], HUGE, 1), Placed { filled: 3 * HUGE, elsewhere: 0, unverified: 0 });
        assert_eq!(
            judge(&[1, -2, 0, 1, 0], HUGE, 1),
            Placed { filled: 2 * HUGE, elsewhere: 2 * HUGE, unverified: HUGE }
        );
        assert_eq!(judge(&[0], HUGE, 1), Placed { filled: 0, elsewhere: HUGE, unverified: 0 });
        // Of a huge page in small ones, one is enough.
        let mut small = [3; 1024];
        small[600] = 2;
        assert_eq!(judge(&small, PAGE_SIZE, 3), Placed { filled: HUGE, elsewhere: PAGE_SIZE, unverified: 0 });
        assert_eq!(judge(&[], HUGE, 0), Placed::default());
    }

    #[test]
    fn a_filler_fills_and_ends_with_its_server() {
        let path = format!("/dev/shm/pagecrew-fill-{}", std::process::id());
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(8 << 20).unwrap();
        let (server, filler) = Socket::pair().unwrap();
        let life = std::thread::spawn(|| {
            // A thread stands in for the process: what it changes for itself is its own.
            let socket = Socket::from(OwnedFd::from(filler));
            let mut room = [0; 64];
            let crew = Crew::new(Idle::new().unwrap(), Some(0), sched::affinity().unwrap(), Topology::read());
            while let Ok(packet) = socket.receive(&mut room)
                && packet.len > 0
            {
                let order = Order::read(&room[..packet.len]).unwrap();
                let done = fill_part(&packet.descriptor.unwrap().into(), order, &crew);
                socket.send(&done.bytes(), None).unwrap();
            }
        });
        let ask = |order: Order| {
            server.send(&order.bytes(), Some(file.as_fd())).unwrap();
            let mut room = [0; 64];
            let len = server.receive(&mut room).unwrap().len;
            Done::read(&room[..len]).unwrap()
        };
        // /dev/shm may have no huge pages; then it is said so.
        let done = ask(Order { offset: 2 << 20, len: 4 << 20, node: 0, helpers: 0 });
        assert_eq!(shared_file::backed_bytes(&file), Ok(4 << 20));
        assert!(done.filled == 4 << 20 || done.short == Short::Fragmented);
        assert_eq!(done.elsewhere, 0);
        // What lies behind the end can't be filled.
        assert_eq!(ask(Order { offset: 16 << 20, len: 2 << 20, node: 0, helpers: 0 }).filled, 0);
        // Nor can a piece of a page.
        assert_eq!(ask(Order { offset: 0, len: 4096, node: 0, helpers: 0 }).filled, 0);
        drop(server);
        life.join().unwrap();
    }
}
