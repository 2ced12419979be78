//! The keeper: a thread that has files filled, gives memory back when the machine needs it, and sees to what is taken.

use super::filler::{ANY_NODE, Done, Filler, Order, Short};
use super::gate::{self, Decision, Gate, Readings};
use super::rest::Rest;
use super::server::Shared;
use super::state::{Condition, Filling, GivenUp, Life, Ready, Settings, State, TakenFile};
use super::stock::Step;
use super::store::own_user;
use crate::control::Bucket;
use crate::sys::mount::MemoryFs;
use crate::sys::{HUGE_PAGE_SIZE, clock, procfs, shared_file};
use crate::units::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What one thread fills at a time: a few milliseconds of CPU.
const PIECE: usize = 32 << 20;
/// How often the machine is looked at, and what is taken and going.
const LOOK: Duration = Duration::from_millis(250);
/// And what is taken and staying, in looks.
const LOOKS: u32 = 4;
/// What filling may save up of its share, in time.
const SAVED: Duration = Duration::from_millis(200);
/// How long nothing is filled after nothing could be had, at first and at most.
const RETRY: Duration = Duration::from_secs(2);
const RETRY_MOST: Duration = Duration::from_secs(300);
/// How often the log says what goes on for long.
const SAY: Duration = Duration::from_secs(60);
/// A taken file that was found too large so often is taken away.
const OFFENCES: u32 = 3;

/// A reason to leave filling for a while, which gets longer each time in a row.
#[derive(Debug, Default)]
struct Setback {
    until_ns: u64,
    times: u32,
    why: &'static str,
}

impl Setback {
    fn happened(&mut self, why: &'static str, now_ns: u64) {
        let pause = RETRY.saturating_mul(1 << self.times.min(16)).min(RETRY_MOST);
        *self = Setback { until_ns: now_ns + pause.as_nanos() as u64, times: self.times + 1, why };
    }

    fn over(&mut self) {
        *self = Setback::default();
    }
}

/// What happens in many small pieces, and is said at once and then once a minute.
#[derive(Debug, Default)]
struct Sum {
    bytes: usize,
    said_ns: Option<u64>,
}

impl Sum {
    /// Adds `bytes`. Returns all that was not said yet, when it is time to say it.
    fn add(&mut self, bytes: usize, now_ns: u64) -> Option<usize> {
        self.bytes += bytes;
        let quiet = self.said_ns.is_some_and(|said| now_ns - said < SAY.as_nanos() as u64);
        if self.bytes == 0 || quiet {
            return None;
        }
        self.said_ns = Some(now_ns);
        Some(std::mem::take(&mut self.bytes))
    }
}

/// What the filler is at.
struct Piece {
    node: usize,
    id: u64,
    /// Keeps the file while the filler has it.
    file: Arc<File>,
    offset: usize,
    len: usize,
}

/// See the module.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    command: Vec<OsString>,
    filler: Option<Filler>,
    piece: Option<Piece>,
    setback: Setback,
    /// Nodes that have nothing left.
    full_nodes: BTreeMap<usize, Setback>,
    gate: Gate,
    rest: Rest,
    /// Memory of the machine.
    total: u64,
    bucket: Bucket,
    /// The settings that gate and bucket were made for.
    cpu: f64,
    floor: u64,
    next_look_ns: u64,
    looks: u32,
    /// The node whose turn it is.
    turn: usize,
    /// Whether it was said that all is ready.
    said_full: bool,
    given_back: Sum,
}

/// What comes next.
enum Next {
    /// Something was done; there may be more.
    Again,
    /// Nothing before so much time has passed or somebody calls.
    Wait(Duration),
}

impl Keeper {
    pub fn new(shared: Arc<Shared>, command: Vec<OsString>) -> Keeper {
        let Settings { cpu, floor, .. } = shared.state().settings;
        let now = clock::now_ns();
        Keeper {
            command,
            filler: None,
            piece: None,
            setback: Setback::default(),
            full_nodes: BTreeMap::new(),
            gate: Gate::new(floor),
            rest: Rest::default(),
            total: procfs::memory_info().map_or(u64::MAX, |memory| memory.total),
            bucket: Bucket::new(cpu * 1e9, SAVED, now),
            cpu,
            floor,
            next_look_ns: 0,
            looks: 0,
            turn: 0,
            said_full: false,
            given_back: Sum::default(),
            shared,
        }
    }

    /// Keeps until the server is stopped.
    pub fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let now = clock::now_ns();
            if now >= self.next_look_ns {
                self.look();
                self.next_look_ns = clock::now_ns() + LOOK.as_nanos() as u64;
            }
            let next = if self.piece.is_some() { Next::Wait(LOOK) } else { self.step() };
            if let Next::Wait(pause) = next {
                let look = Duration::from_nanos(self.next_look_ns.saturating_sub(clock::now_ns()));
                self.sleep(pause.min(look));
            }
        }
    }

    /// Sleeps for `pause`, or until somebody calls or the filler is done.
    fn sleep(&mut self, pause: Duration) {
        let done = {
            let mut sources = vec![PollFd::new(self.shared.wake(), PollFlags::IN)];
            let filler = self.filler.as_ref().filter(|_| self.piece.is_some());
            if let Some(filler) = filler {
                sources.push(PollFd::from_borrowed_fd(filler.signal(), PollFlags::IN));
            }
            let time = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: pause.subsec_nanos().into() };
            // Interrupted is woken.
            let _ = poll(&mut sources, Some(&time));
            sources.get(1).is_some_and(|filler| !filler.revents().is_empty())
        };
        let _ = rustix::io::read(self.shared.wake().as_fd(), &mut [0; 8]);
        if done {
            self.filled();
        }
    }

    /// The filler is done with a piece, or gone.
    fn filled(&mut self) {
        let (Some(piece), Some(filler)) = (self.piece.take(), &self.filler) else { return };
        let now = clock::now_ns();
        let done = filler.done();
        let mut state = self.shared.state();
        state.filling = None;
        let Ok(Done { filled, short: why, elsewhere, unverified, cpu_ns }) = done else {
            drop(state);
            // It may have ended while its file could get pages of the one node only.
            self.shared.store.prefer(&piece.file, self.shared.node(piece.node));
            self.filler = None;
            self.shared.filler.store(0, Ordering::Relaxed);
            self.setback.happened("the filler has ended and is started again", now);
            (self.shared.log)("the filler has ended; another is started");
            return;
        };
        state.counters.filled_bytes += filled;
        state.counters.elsewhere_bytes += elsewhere;
        state.counters.cpu_ns += cpu_ns;
        let filled = filled as usize;
        let whole = filled >= piece.len;
        // It may have been handed out meanwhile, and then is as its owner has it.
        let short = state.nodes.get_mut(&piece.node).and_then(|node| {
            let ready = node.waiting.iter_mut().find(|ready| ready.id == piece.id)?;
            ready.filled = (piece.offset + filled).min(ready.size);
            ready.unverified = (ready.unverified + unverified as usize).min(ready.filled);
            // It may have been cut meanwhile, and then has all that it could get.
            if whole || ready.filled == ready.size { None } else { node.remove(piece.id) }
        });
        drop(state);
        self.bucket.charge(cpu_ns as f64, now);
        if whole {
            self.setback.over();
            self.full_nodes.remove(&piece.node);
        }
        if let Some(ready) = short {
            // A file of small pages is slower than none, and one of another node is none of this: what there is of them goes back, while nobody
            // else can get at the file.
            let _ = shared_file::punch(&ready.file, piece.offset + filled, piece.len - filled);
            match why {
                Short::Fragmented => self.setback.happened(FRAGMENTED, now),
                Short::NothingLeft => self.setback.happened(NOTHING_LEFT, now),
                // The others can be filled meanwhile.
                Short::Elsewhere => self.full_nodes.entry(piece.node).or_default().happened(NODE_FULL, now),
            }
            self.put(piece.node, ready);
        }
    }

    /// Does the next thing that brings the files nearer to what is wanted.
    fn step(&mut self) -> Next {
        let (node, step) = {
            let mut state = self.shared.state();
            let mut steps: Vec<(usize, Step)> =
                state.nodes.iter_mut().map(|(&number, node)| (number, node.next_step())).collect();
            let turn = self.turn % steps.len().max(1);
            steps.rotate_left(turn);
            steps.retain(|(_, step)| *step != Step::Nothing);
            let now = clock::now_ns();
            let is_full = |node: usize| self.full_nodes.get(&node).is_some_and(|full| now < full.until_ns);
            // A node that is full holds up no other.
            let first = steps.iter().find(|&&(node, step)| !(matches!(step, Step::Fill { .. }) && is_full(node)));
            match (first.copied(), steps.first().copied()) {
                (Some(found), _) => found,
                (None, Some((node, _))) => {
                    drop(state);
                    return self.wait(&format!("node {node} {NODE_FULL}"));
                }
                (None, None) => {
                    drop(state);
                    self.full();
                    return Next::Wait(LOOK);
                }
            }
        };
        match step {
            Step::Nothing => {}
            Step::Create { size } => match self.shared.store.create(size, node, self.shared.several_nodes) {
                Ok((id, file)) => {
                    let ready = Ready { id, file: Arc::new(file), size, filled: 0, unverified: 0 };
                    self.put(node, ready);
                }
                Err(error) => {
                    (self.shared.log)(&error.to_string());
                    return self.wait("a file could not be made");
                }
            },
            Step::Drop { id } => {
                if let Some(ready) = self.take_out(node, id) {
                    self.discard(node, ready);
                }
            }
            Step::Resize { id, size } => {
                if let Some(mut ready) = self.take_out(node, id) {
                    let resized = self.shared.store.resize(&ready.file, size, self.shared.node(node));
                    if let Err(error) = resized {
                        (self.shared.log)(&error.to_string());
                        self.discard(node, ready);
                        return self.wait("the size of a file could not be changed");
                    }
                    (ready.size, ready.filled) = (size, ready.filled.min(size));
                    ready.unverified = ready.unverified.min(ready.filled);
                    self.put(node, ready);
                }
            }
            Step::Fill { id } => return self.fill(node, id),
        }
        Next::Again
    }

    /// Everything is as it is wanted.
    fn full(&mut self) {
        let mut state = self.shared.state();
        state.condition = Condition::Full;
        let ready = state.ready();
        drop(state);
        if !self.said_full && ready > 0 {
            self.said_full = true;
            (self.shared.log)(&format!("{} are ready", Bytes(ready as u64)));
        }
    }

    fn take_out(&self, node: usize, id: u64) -> Option<Ready> {
        self.shared.state().nodes.get_mut(&node)?.remove(id)
    }

    fn put(&self, node: usize, ready: Ready) {
        if let Some(node) = self.shared.state().nodes.get_mut(&node) {
            node.waiting.push(ready);
        }
    }

    /// Gives a file back.
    fn discard(&self, node: usize, ready: Ready) {
        self.shared.give_back(vec![GivenUp { node, keep: 0, ready }]);
    }

    /// Says why nothing is filled.
    fn wait(&mut self, why: &str) -> Next {
        let condition = Condition::Waiting(why.to_owned());
        let mut state = self.shared.state();
        if state.condition != condition {
            state.condition = condition;
            drop(state);
            (self.shared.log)(&format!("filling waits: {why}"));
        }
        Next::Wait(LOOK)
    }

    /// Has the next piece of a file filled, if that may be.
    fn fill(&mut self, node: usize, id: u64) -> Next {
        self.follow_settings();
        let now = clock::now_ns();
        if now < self.setback.until_ns {
            return self.wait(self.setback.why);
        }
        let taken_ns = {
            let mut state = self.shared.state();
            if state.condition == Condition::Full {
                state.condition = Condition::Filling;
            }
            state.taken_ns
        };
        match self.rest.wait(taken_ns, now).max(self.bucket.wait(now)) {
            Duration::ZERO => {}
            pause => return Next::Wait(pause),
        }
        let helpers = (self.cpu.ceil() as u64).saturating_sub(1);
        let most = PIECE * (1 + helpers as usize);
        let missing = self.shared.state().waiting(node, id).map(|ready| ready.size - ready.filled);
        let Some(len) = missing.map(|missing| most.min(missing)) else { return Next::Again };
        let (ready, available) = self.supply();
        let reserved = self.shared.store.kind() == MemoryFs::Hugetlbfs;
        if reserved && available < len as u64 {
            return self.wait(NONE_RESERVED);
        }
        // Reserved pages are set apart for this very use: whatever the machine is short of, it couldn't have them.
        match if reserved { Decision::Fill } else { self.decide(ready, len, available, now) } {
            Decision::Fill => {}
            Decision::Wait(reason) => return self.wait(&reason.to_string()),
            Decision::GiveBack(bytes) => {
                self.give_back(bytes);
                return Next::Wait(LOOK);
            }
        }
        let len = match self.shared.node(node).map(|node| room_on_node(node, reserved)) {
            Some(0) => {
                self.full_nodes.entry(node).or_default().happened(NODE_FULL, now);
                return Next::Again;
            }
            Some(room) => len.min(room),
            None => len,
        };
        if self.filler.is_none() {
            match Filler::start(&self.command) {
                Ok(filler) => {
                    self.shared.filler.store(filler.pid(), Ordering::Relaxed);
                    self.filler = Some(filler);
                }
                Err(error) => {
                    (self.shared.log)(&format!("the filler can't be started: {error}"));
                    self.setback.happened("the filler can't be started", now);
                    return Next::Again;
                }
            }
        }
        let mut state = self.shared.state();
        // Handed out or cut meanwhile?
        let Some(ready) = state.waiting(node, id).filter(|ready| ready.filled < ready.size) else { return Next::Again };
        let (file, offset, missing) = (ready.file.clone(), ready.filled, ready.size - ready.filled);
        let len = len.min(missing).min(state.room(self.shared.limit));
        if len == 0 {
            // A former server may have filled it further.
            let unknown = shared_file::backed_bytes(&file).is_ok_and(|backed| backed > offset);
            drop(state);
            if unknown && let Some(ready) = self.take_out(node, id) {
                let _ = shared_file::punch(&ready.file, ready.filled, ready.size - ready.filled);
                self.put(node, ready);
            }
            return self.wait(NOTHING_LEFT);
        }
        (state.filling, state.condition) = (Some(Filling { id, bytes: len }), Condition::Filling);
        drop(state);
        let order = Order {
            offset: offset as u64,
            len: len as u64,
            node: self.shared.node(node).map_or(ANY_NODE, |node| node as u64),
            helpers,
        };
        // One that is gone is found out when its end is read.
        let _ = self.filler.as_ref().map(|filler| filler.order(&file, order));
        self.piece = Some(Piece { node, id, file, offset, len });
        self.turn = self.turn.wrapping_add(1);
        Next::Wait(LOOK)
    }

    fn follow_settings(&mut self) {
        let Settings { cpu, floor, .. } = self.shared.state().settings;
        if cpu != self.cpu {
            self.cpu = cpu;
            self.bucket = Bucket::new(cpu * 1e9, SAVED, clock::now_ns());
        }
        if floor != self.floor {
            self.floor = floor;
            self.gate.set_floor(floor);
        }
    }

    /// Bytes that are ready, and those that could still be had and that nobody was promised.
    fn supply(&self) -> (usize, u64) {
        let (ready, promised) = {
            let mut state = self.shared.state();
            (state.ready(), state.promised())
        };
        (ready, self.shared.available().saturating_sub(promised as u64))
    }

    /// Whether `len` bytes more may be filled at the time `now`, with `ready` bytes ready and `available` ones that nobody was promised.
    fn decide(&mut self, ready: usize, len: usize, available: u64, now_ns: u64) -> Decision {
        let stall_us = procfs::memory_stall_us().ok();
        let readings = Readings { now_ns, total: self.total, available, stall_us };
        self.gate.judge(readings, ready as u64, len as u64)
    }

    fn give_back(&mut self, bytes: u64) {
        let given = self.shared.state().give_up(bytes as usize, None);
        let bytes = self.shared.give_back(given);
        self.say_given_back(bytes);
    }

    /// Says what is given back: `bytes` more now, and what was not said yet, if it is time to.
    fn say_given_back(&mut self, bytes: usize) {
        if let Some(bytes) = self.given_back.add(bytes, clock::now_ns()) {
            (self.shared.log)(&format!("{} are given back: the machine needs memory", Bytes(bytes as u64)));
        }
    }

    /// Looks at the machine and at what is taken.
    fn look(&mut self) {
        self.follow_settings();
        let (ready, available) = self.supply();
        if self.shared.store.kind() == MemoryFs::Tmpfs
            && let Decision::GiveBack(bytes) = self.decide(ready, 0, available, clock::now_ns())
        {
            self.give_back(bytes);
        }
        self.say_given_back(0);
        self.looks = self.looks.wrapping_add(1);
        self.look_at_taken(self.looks.is_multiple_of(LOOKS));
    }

    /// Lets those go that nobody has any more, and takes back what their owners have added to them. Whether somebody has a file open is
    /// asked of `all`, or of those that are going.
    fn look_at_taken(&self, all: bool) {
        let (ids, unused) = {
            let mut state = self.shared.state();
            if all {
                self.find_strays(&mut state);
            }
            self.open_the_rest(&mut state);
            let ids = state.taken.iter().filter(|(_, taken)| taken.life != Life::Arriving).map(|(id, _)| *id);
            (ids.collect::<Vec<_>>(), state.settings.unused.as_nanos() as u64)
        };
        let now = clock::now_ns();
        for id in ids {
            let facts = |taken: &TakenFile| (taken.file.clone(), taken.life, taken.size, taken.user);
            let found = self.shared.state().taken.get(&id).map(facts);
            let Some((Some(file), life, size, user)) = found else { continue };
            self.take_excess(id, &file, size, user);
            match life {
                Life::Connection(_) | Life::Arriving => {}
                Life::Going => self.shared.take_back(id),
                Life::Path(_) if !all => {}
                Life::Path(since) => {
                    // Where the kernel can't tell, it stays until it is released.
                    let used = !shared_file::unused_by_others(&file).unwrap_or(false);
                    let since = if used { None } else { since.or(Some(now)) };
                    let over = since.is_some_and(|since| now - since >= unused);
                    let mut state = self.shared.state();
                    // Released meanwhile?
                    let Some(taken) = state.taken.get_mut(&id).filter(|taken| taken.life == life) else { continue };
                    taken.life = if over { Life::Going } else { Life::Path(since) };
                    drop(state);
                    if over {
                        self.shared.let_go(id);
                    }
                }
            }
        }
    }

    /// Opens files that could not be opened when they were found.
    fn open_the_rest(&self, state: &mut State) {
        for taken in state.taken.values_mut().filter(|taken| taken.file.is_none()) {
            taken.file = self.shared.store.open_taken(&taken.name, taken.life == Life::Going).map(Arc::new);
        }
    }

    /// Takes files among the taken ones in that nobody handed out: root's virtual machine monitor makes one where the name that it was told is
    /// gone again. They are their owners' until nobody has them open.
    fn find_strays(&self, state: &mut State) {
        // With the state locked: an entry goes only after its name.
        for mut found in self.shared.store.taken_besides(|name| state.knows(name)) {
            let Some(holding) = &mut found.entry.holding else { continue };
            if let Some(facts) = found.file.as_ref().and_then(|file| file.metadata().ok()) {
                (holding.size, holding.user) = (facts.len() as usize, facts.uid());
            }
            (self.shared.log)(&format!("user {} has made a file of his own among those that are taken", holding.user));
            state.adopt(found);
        }
    }

    /// The owner of a file has made it larger, or has memory reserved beyond its end, which is memory that he was not given: it goes back,
    /// and the file is taken away from whoever does it again and again. Root, who may have all of the machine's memory, has it counted.
    fn take_excess(&self, id: u64, file: &File, size: usize, user: u32) {
        let Ok(facts) = file.metadata() else { return };
        let (len, backed) = (facts.len() as usize, facts.blocks() as usize * 512);
        if len <= size && backed <= size {
            return;
        }
        let mut state = self.shared.state();
        if user == 0 || user == own_user() {
            state.charge_more(id, len.max(backed));
            return;
        }
        let Some(taken) = state.taken.get_mut(&id) else { return };
        taken.offences += 1;
        let taken_away = taken.offences >= OFFENCES && taken.life != Life::Going;
        if taken_away {
            taken.life = Life::Going;
        }
        let gone = taken_away || taken.offences > OFFENCES;
        // Whoever never stops is not to fill the log.
        let said = taken.offences <= OFFENCES;
        drop(state);
        let keep = if gone { 0 } else { size };
        let _ = file.set_len(keep as u64);
        let _ = shared_file::punch_from(file, keep);
        if taken_away {
            self.shared.let_go(id);
        }
        if said {
            let what = if gone { "taken away" } else { "put back to its size" };
            (self.shared.log)(&format!("user {user} has made a file larger than was handed out: it is {what}"));
        }
    }
}

/// Bytes that may be filled on a node, whole huge pages; what the kernel does not say is no limit.
fn room_on_node(node: usize, reserved: bool) -> usize {
    let room = if reserved {
        procfs::node_free_huge_pages(node).map(|pages| (pages * HUGE_PAGE_SIZE) as u64)
    } else {
        procfs::node_memory(node).map(|memory| gate::room_on_node(memory.total, memory.free, memory.files))
    };
    room.map_or(usize::MAX, |room| room as usize) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE
}

const NODE_FULL: &str = "has no memory left for the pool";
const FRAGMENTED: &str = "memory is too fragmented for huge pages";
const NONE_RESERVED: &str = "too few huge pages are reserved (sysctl vm.nr_hugepages=COUNT)";
const NOTHING_LEFT: &str = "no more memory can be had: the pool's limit, or that of the server's control group";

const _: () = assert!(PIECE.is_multiple_of(HUGE_PAGE_SIZE));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_for_long_is_said_at_once_and_then_summed_up() {
        const SECOND: u64 = 1_000_000_000;
        let mut sum = Sum::default();
        assert_eq!(sum.add(0, 5 * SECOND), None);
        assert_eq!(sum.add(7, 6 * SECOND), Some(7));
        assert_eq!((sum.add(3, 7 * SECOND), sum.add(4, 65 * SECOND)), (None, None));
        assert_eq!(sum.add(1, 66 * SECOND), Some(8));
        assert_eq!((sum.add(0, 300 * SECOND), sum.add(2, 301 * SECOND)), (None, Some(2)));
    }
}
