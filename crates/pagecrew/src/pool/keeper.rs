//! The keeper: a thread that has files filled, gives memory back when the machine needs it, and sees to what is taken.

use super::broker::{self, Action, Event, Filled, Seen};
use super::filler::{ANY_NODE, Done, Filler, Order, Short};
use super::gate::{self, Decision, Gate, Readings};
use super::rest::Rest;
use super::server::Shared;
use super::state::{Condition, GivenUp, Life, Settings, TakenFile};
use super::{status, store};
use crate::control::arbiter::{Courtesy, Sums};
use crate::control::{Backoff, Bucket, Repeats};
use crate::sys::mount::MemoryFs;
use crate::sys::sched::{self, Class};
use crate::sys::vmstat::{self, VmStat};
use crate::sys::{HUGE_PAGE_SIZE, clock, procfs, shared_file};
use crate::units::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
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
/// At most so many looks are left out while everything is ready and nothing is taken, and none in which programs could use up what stands above
/// the floor, at so many bytes a second.
const LEFT_OUT: u32 = LOOKS - 1;
const USED_UP: u64 = 8 << 30;
/// What filling may save up of its share, in time.
const SAVED: Duration = Duration::from_millis(200);
/// A piece that takes so long, and whose filler waits for a CPU for more than half of that, is one for which others leave no CPU time.
const CROWDED: Duration = Duration::from_secs(1);
/// How long nothing is filled after nothing could be had, at first and at most.
const RETRY: Duration = Duration::from_secs(2);
const RETRY_MOST: Duration = Duration::from_secs(300);
/// How often the log says what goes on for long.
const SAY: Duration = Duration::from_secs(60);

/// A reason to leave filling for a while, which gets longer each time in a row.
#[derive(Debug)]
struct Setback {
    backoff: Backoff,
    why: &'static str,
}

impl Default for Setback {
    fn default() -> Setback {
        Setback { backoff: Backoff::new(RETRY, RETRY_MOST), why: "" }
    }
}

impl Setback {
    fn happened(&mut self, why: &'static str, now_ns: u64) {
        self.backoff.in_vain(Duration::ZERO, now_ns);
        self.why = why;
    }

    fn lasts(&self, now_ns: u64) -> bool {
        !self.backoff.ready(now_ns)
    }

    fn over(&mut self) {
        self.backoff.worth_it();
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
    begun_ns: u64,
    /// For how long the filler had waited for a CPU by then; `None` where the kernel does not count that.
    waited_ns: Option<u64>,
}

/// See the module.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    command: Vec<OsString>,
    filler: Option<Filler>,
    piece: Option<Piece>,
    /// Whether others left it no CPU time for the last piece that it was at.
    crowded: bool,
    setback: Setback,
    /// Nodes that have nothing left.
    full_nodes: BTreeMap<usize, Setback>,
    gate: Gate,
    rest: Rest,
    courtesy: Courtesy,
    /// What the machine reclaims; `None` where that can't be read.
    vmstat: Option<VmStat>,
    /// For how long tasks had waited for memory at the last look, and what the machine had reclaimed when that was more than before.
    stall_us: Option<u64>,
    reclaimed: Option<u64>,
    /// Bytes that were filled.
    filled: u64,
    /// Memory of the machine.
    bucket: Bucket,
    /// The settings that gate and bucket were made for.
    cpu: f64,
    floor: u64,
    next_look_ns: u64,
    /// Before this time a look may be [skipped](Keeper::is_above_floor).
    look_by_ns: u64,
    /// Looks so far, those that were left out included; and from how many on all that is taken is looked at again.
    looks: u32,
    all_at: u32,
    /// The node whose turn it is.
    turn: usize,
    /// Whether it was said that all is ready.
    said_full: bool,
    given_back: Sum,
    /// Why nothing was filled, as it was said.
    waits: Repeats,
    /// How it stands, as it was said.
    standing: String,
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
        let Settings { cpu, floor, .. } = shared.broker().state.settings;
        let now = clock::now_ns();
        Keeper {
            command,
            filler: None,
            piece: None,
            crowded: false,
            setback: Setback::default(),
            full_nodes: BTreeMap::new(),
            gate: Gate::new(floor),
            rest: Rest::default(),
            courtesy: Courtesy::default(),
            vmstat: VmStat::open().ok(),
            stall_us: None,
            reclaimed: None,
            filled: 0,
            bucket: Bucket::new(cpu * 1e9, SAVED, now),
            cpu,
            floor,
            next_look_ns: 0,
            look_by_ns: 0,
            looks: 0,
            all_at: 0,
            turn: 0,
            said_full: false,
            given_back: Sum::default(),
            waits: Repeats::new(SAY),
            standing: String::new(),
            shared,
        }
    }

    /// Keeps until the server is stopped.
    pub fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let now = clock::now_ns();
            if !self.is_at_rest() {
                self.next_look_ns = self.next_look_ns.min(now + LOOK.as_nanos() as u64);
            }
            if now >= self.next_look_ns {
                let skips = now < self.look_by_ns && self.is_at_rest() && self.is_above_floor();
                let left_out = if skips { 0 } else { self.full_look() };
                self.looks += 1 + left_out;
                self.say_standing();
                self.next_look_ns = clock::now_ns() + (LOOK * (1 + left_out)).as_nanos() as u64;
            }
            let next = if self.piece.is_some() { self.see_to_piece() } else { self.step() };
            if let Next::Wait(pause) = next {
                let look = Duration::from_nanos(self.next_look_ns.saturating_sub(clock::now_ns()));
                self.sleep(pause.min(look));
            }
        }
    }

    /// Says how the pool stands, if that is not as it was said.
    fn say_standing(&mut self) {
        let standing = status::in_short(&self.shared.broker().state);
        if standing != self.standing {
            (self.shared.tell.standing)(&standing);
            self.standing = standing;
        }
    }

    /// Looks. Returns how many looks may be left out then.
    fn full_look(&mut self) -> u32 {
        let spare = self.look();
        self.look_by_ns = clock::now_ns() + (LOOK * (1 + LEFT_OUT)).as_nanos() as u64;
        if self.is_at_rest() { left_out(spare) } else { 0 }
    }

    /// Whether memory still stands above the floor, by the machine's own figure. On a small machine, programs may use that up so soon that looks
    /// can't be left out, and of all that a look at rest does this alone can't wait; it costs a fraction of that.
    fn is_above_floor(&self) -> bool {
        !self.shared.group_decides() && procfs::memory_info().is_ok_and(|memory| memory.available >= self.floor)
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

    /// While the filler is at a piece: says so if others leave it no CPU time.
    fn see_to_piece(&mut self) -> Next {
        if let (Some(piece), Some(filler)) = (&self.piece, &self.filler)
            && is_crowded_out(piece, filler)
        {
            self.crowded = true;
            return self.wait(NO_CPU);
        }
        Next::Wait(LOOK)
    }

    /// The filler is done with a piece, or gone.
    fn filled(&mut self) {
        let (Some(piece), Some(filler)) = (self.piece.take(), &self.filler) else { return };
        let now = clock::now_ns();
        let Ok(Done { filled, short: why, elsewhere, unverified, cpu_ns }) = filler.done() else {
            self.shared.broker().state.filling = None;
            // It may have ended while its file could get pages of the one node only.
            self.shared.store.prefer(&piece.file, self.shared.node(piece.node));
            self.filler = None;
            self.shared.filler.store(0, Ordering::Relaxed);
            self.setback.happened("the filler has ended and is started again", now);
            (self.shared.tell.log)("the filler has ended; another is started");
            return;
        };
        self.crowded = is_crowded_out(&piece, filler);
        let Piece { node, id, offset, len, .. } = piece;
        let (filled, unverified) = (filled as usize, unverified as usize);
        let done = Filled { node, id, offset, len, filled, elsewhere, unverified, cpu_ns };
        self.filled += filled as u64;
        let short = self.shared.broker().filled(done);
        self.bucket.charge(cpu_ns as f64, now);
        if filled >= len {
            self.setback.over();
            self.full_nodes.remove(&node);
        }
        if !short.is_empty() {
            self.shared.perform(short);
            match why {
                Short::Fragmented => self.setback.happened(FRAGMENTED, now),
                Short::NothingLeft => self.setback.happened(NOTHING_LEFT, now),
                // The others can be filled meanwhile.
                Short::Elsewhere => self.full_nodes.entry(node).or_default().happened(NODE_FULL, now),
            }
        }
    }

    /// Does the next thing that brings the files nearer to what is wanted.
    fn step(&mut self) -> Next {
        let now = clock::now_ns();
        let is_full = |node: usize| self.full_nodes.get(&node).is_some_and(|full| full.lasts(now));
        let next = self.shared.broker().next_step(self.turn, is_full);
        match next {
            broker::NextStep::Nothing => {
                self.full();
                Next::Wait(LOOK * (1 + LEFT_OUT))
            }
            broker::NextStep::NodeIsFull(node) => self.wait(&format!("node {node} {NODE_FULL}")),
            broker::NextStep::Fill { node, id } => self.fill(node, id),
            broker::NextStep::Do(actions) => match self.shared.perform(actions).hold {
                Some(why) => self.wait(&why),
                None => Next::Again,
            },
        }
    }

    /// Everything is as it is wanted.
    fn full(&mut self) {
        let mut broker = self.shared.broker();
        broker.state.condition = Condition::Full;
        let ready = broker.state.ready();
        drop(broker);
        if !self.said_full && ready > 0 {
            self.said_full = true;
            (self.shared.tell.log)(&format!("{} are ready", Bytes(ready as u64)));
        }
    }

    /// Says why nothing is filled.
    fn wait(&mut self, why: &str) -> Next {
        let condition = Condition::Waiting(why.to_owned());
        let mut broker = self.shared.broker();
        if broker.state.condition != condition {
            broker.state.condition = condition;
            drop(broker);
            // Where filling itself causes what it waits for, that happens with each piece.
            match self.waits.happened(why, clock::now_ns()) {
                None => {}
                Some(1) => (self.shared.tell.log)(&format!("filling waits: {why}")),
                Some(times) => {
                    (self.shared.tell.log)(&format!("filling waits: {why} ({times} times since that was said)"))
                }
            }
        }
        Next::Wait(LOOK)
    }

    /// Has the next piece of a file filled, if that may be.
    fn fill(&mut self, node: usize, id: u64) -> Next {
        self.follow_settings();
        let now = clock::now_ns();
        if self.setback.lasts(now) {
            return self.wait(self.setback.why);
        }
        let taken_ns = {
            let state = &mut self.shared.broker().state;
            if state.condition == Condition::Full {
                state.condition = Condition::Filling;
            }
            state.taken_ns
        };
        match self.rest.wait(taken_ns, now).max(self.bucket.wait(now)).max(self.give_way(now)) {
            Duration::ZERO => {}
            pause => return Next::Wait(pause),
        }
        let helpers = (self.cpu.ceil() as u64).saturating_sub(1);
        let most = PIECE * (1 + helpers as usize);
        let missing = self.shared.broker().state.waiting(node, id).map(|ready| ready.size - ready.filled);
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
                    (self.shared.tell.log)(&format!("the filler can't be started: {error}"));
                    self.setback.happened("the filler can't be started", now);
                    return Next::Again;
                }
            }
        }
        // Before anybody can be in a hurry for this piece, who moves it to the ordinary class.
        let _ = self.filler.as_ref().map(|filler| sched::set_class(filler.pid(), Class::Idle));
        let (file, offset, len) = {
            let mut broker = self.shared.broker();
            match broker.begin(node, id, len) {
                broker::Begun::Fill { file, offset, len } => {
                    if !self.crowded {
                        broker.state.condition = Condition::Filling;
                    }
                    (file, offset, len)
                }
                broker::Begun::Over => return Next::Again,
                broker::Begun::NoRoom(actions) => {
                    drop(broker);
                    self.shared.perform(actions);
                    return self.wait(NOTHING_LEFT);
                }
            }
        };
        let order = Order {
            offset: offset as u64,
            len: len as u64,
            node: self.shared.node(node).map_or(ANY_NODE, |node| node as u64),
            helpers,
        };
        if self.filler.as_ref().is_some_and(|filler| filler.order(&file, order).is_err()) {
            // It is gone, or does not hear: another one is started.
            self.filler = None;
            self.shared.filler.store(0, Ordering::Relaxed);
            self.shared.broker().state.filling = None;
            self.setback.happened("the filler has ended and is started again", now);
            return Next::Again;
        }
        let waited_ns = self.filler.as_ref().and_then(waited_for_cpu);
        self.piece = Some(Piece { node, id, file, offset, len, begun_ns: clock::now_ns(), waited_ns });
        self.courtesy.begin();
        self.turn = self.turn.wrapping_add(1);
        Next::Wait(LOOK)
    }

    /// How long filling gives way to programs for which the machine reclaims memory.
    fn give_way(&mut self, now_ns: u64) -> Duration {
        if self.courtesy.due(now_ns)
            && let Some(counts) = self.vmstat.as_mut().and_then(|vmstat| vmstat.read().ok())
        {
            self.courtesy.note(Sums { at_ns: now_ns, reclaimed: counts.reclaimed, filled: self.filled });
        }
        self.courtesy.wait(now_ns)
    }

    fn follow_settings(&mut self) {
        let Settings { cpu, floor, .. } = self.shared.broker().state.settings;
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
        let state = &mut self.shared.broker().state;
        let available = self.shared.survey(state);
        (state.ready(), available.saturating_sub(state.promised() as u64))
    }

    /// Whether `len` bytes more may be filled at the time `now`, with `ready` bytes ready and `available` ones that nobody was promised.
    fn decide(&mut self, ready: usize, len: usize, available: u64, now_ns: u64) -> Decision {
        let stall_us = procfs::memory_stall_us().ok();
        if stall_us != self.stall_us {
            // Only then is it asked for.
            self.reclaimed = self.vmstat.as_mut().and_then(|vmstat| Some(vmstat.read().ok()?.reclaimed));
            self.stall_us = stall_us;
        }
        let readings = Readings { now_ns, total: self.shared.total(), available, stall_us, reclaimed: self.reclaimed };
        self.gate.judge(readings, ready as u64, len as u64)
    }

    fn give_back(&mut self, bytes: u64) {
        let actions = self.shared.broker().give_up(bytes as usize);
        let given = |action: &Action<Arc<File>>| match action {
            Action::Cut(GivenUp { keep, ready, .. }) => ready.filled - keep,
            _ => 0,
        };
        let bytes = actions.iter().map(given).sum();
        self.shared.perform(actions);
        self.say_given_back(bytes);
    }

    /// Says what is given back: `bytes` more now, and what was not said yet, if it is time to.
    fn say_given_back(&mut self, bytes: usize) {
        if let Some(bytes) = self.given_back.add(bytes, clock::now_ns()) {
            (self.shared.tell.log)(&format!("{} are given back: the machine needs memory", Bytes(bytes as u64)));
        }
    }

    /// Whether everything is as it is wanted, and nobody has anything.
    fn is_at_rest(&self) -> bool {
        let state = &self.shared.broker().state;
        state.condition == Condition::Full && state.taken.is_empty()
    }

    /// Looks at the machine and at what is taken. Returns how many bytes stand above the floor.
    fn look(&mut self) -> u64 {
        self.follow_settings();
        let (ready, available) = self.supply();
        if self.shared.store.kind() == MemoryFs::Tmpfs
            && let Decision::GiveBack(bytes) = self.decide(ready, 0, available, clock::now_ns())
        {
            self.give_back(bytes);
        }
        self.say_given_back(0);
        let all = self.looks >= self.all_at;
        if all {
            self.all_at = self.looks + LOOKS;
        }
        self.look_at_taken(all);
        available.saturating_sub(self.floor)
    }

    /// Lets those go that nobody has any more, and takes back what their owners have added to them. Whether somebody has a file open is
    /// asked of `all`, or of those that are going.
    fn look_at_taken(&self, all: bool) {
        if all {
            let _ = self.shared.store.keep_room_for_files();
            self.find_strays();
        }
        self.open_the_rest();
        // Whether somebody has it open is a question to the kernel by itself.
        let asked = |taken: &TakenFile<Arc<File>>| all && matches!(taken.life, Life::Path(_));
        let file = |(id, taken): (&u64, &TakenFile<Arc<File>>)| {
            // One that is held up while it is taken from its owner may still grow.
            let file = taken.file.clone().filter(|_| taken.is_settled() || taken.life == Life::Leaving)?;
            Some((*id, file, asked(taken)))
        };
        let files: Vec<_> = self.shared.broker().state.taken.iter().filter_map(file).collect();
        for (id, file, asked) in files {
            let Ok(facts) = file.metadata() else { continue };
            // Where the kernel can't tell, it stays until it is released.
            let unused = asked.then(|| shared_file::unused_by_others(&file).unwrap_or(false));
            drop(file);
            self.shared.happened(Event::Seen(id, seen(&facts, self.looks, unused)));
        }
    }

    /// Opens files that could not be opened when they were found.
    fn open_the_rest(&self) {
        let closed = |(id, taken): (&u64, &TakenFile<Arc<File>>)| {
            let closed = taken.file.is_none() && taken.is_settled();
            closed.then(|| (*id, taken.name.clone()))
        };
        let closed: Vec<_> = self.shared.broker().state.taken.iter().filter_map(closed).collect();
        for (id, name) in closed {
            if let Some(file) = self.shared.store.open_taken(&name) {
                self.shared.happened(Event::Opened(id, Arc::new(file)));
                continue;
            }
            match self.shared.store.facts(&name) {
                // Its owner keeps it from being opened, but not from being looked at.
                Ok(facts) => drop(self.shared.happened(Event::Seen(id, seen(&facts, self.looks, None)))),
                // A former server's thread has taken it back meanwhile, or root has removed it by hand.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.shared.happened(Event::TakenBack(id, true));
                }
                Err(_) => {}
            }
        }
    }

    /// Takes files among the taken ones in that nobody handed out.
    fn find_strays(&self) {
        // An entry goes only after its name, so what is not known any more is not found any more.
        for mut found in self.shared.store.taken_besides(|name| self.shared.broker().state.knows(name)) {
            let Some(holding) = &mut found.entry.holding else { continue };
            if let Some(facts) = found.file.as_ref().and_then(|file| file.metadata().ok()) {
                (holding.size, holding.user) = (facts.len() as usize, facts.uid());
            }
            self.shared.happened(Event::Found(found));
        }
    }
}

/// How many looks may be left out where so many bytes stand above the floor.
fn left_out(spare: u64) -> u32 {
    let looks = u128::from(spare) * 1_000_000_000 / u128::from(USED_UP) / LOOK.as_nanos();
    (looks.saturating_sub(1)).min(u128::from(LEFT_OUT)) as u32
}

fn seen(facts: &Metadata, look: u32, unused: Option<bool>) -> Seen {
    let (len, backed) = (facts.len() as usize, facts.blocks() as usize * 512);
    Seen { len, backed, owner: facts.uid(), seized: store::is_seized(facts), look, unused }
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

/// Whether `filler`, which is of the idle class, has waited for a CPU for most of the time that it is at this piece.
fn is_crowded_out(piece: &Piece, filler: &Filler) -> bool {
    let long = clock::now_ns() - piece.begun_ns;
    let waited = || Some(waited_for_cpu(filler)?.saturating_sub(piece.waited_ns?));
    long >= CROWDED.as_nanos() as u64 && waited().is_some_and(|waited| waited > long / 2)
}

/// For how long `filler` has waited for a CPU so far; `None` where the kernel does not count that.
fn waited_for_cpu(filler: &Filler) -> Option<u64> {
    vmstat::cpu_times(filler.pid()).ok().map(|times| times.waited_ns)
}

const NO_CPU: &str = "other programs take all CPU time";
const NODE_FULL: &str = "has no memory left for the pool";
const FRAGMENTED: &str = "memory is too fragmented for huge pages";
const NONE_RESERVED: &str = "too few huge pages are reserved (sysctl vm.nr_hugepages=COUNT)";
const NOTHING_LEFT: &str = "no more memory can be had: the pool's limit, or that of the server's control group";

const _: () = assert!(PIECE.is_multiple_of(HUGE_PAGE_SIZE));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_to_wait_is_explained_to_operators() {
        let page = include_str!("../../../../docs/operations.md");
        let reasons = [NODE_FULL, FRAGMENTED, NONE_RESERVED, NOTHING_LEFT].map(str::to_owned);
        let of_gate = [gate::Reason::Floor, gate::Reason::Pressure].map(|reason| reason.to_string());
        for reason in reasons.into_iter().chain(of_gate) {
            let line = page.lines().find(|line| line.starts_with("| `filling waits: ") && line.contains(&reason));
            assert!(line.is_some(), "nothing says what '{reason}' means");
        }
    }

    #[test]
    fn the_less_stands_above_the_floor_the_more_often_it_is_looked() {
        assert_eq!([0, 1, 2, 4, 6, 8, 1000].map(|gib| left_out(gib << 30)), [0, 0, 0, 1, 2, 3, 3]);
    }

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
