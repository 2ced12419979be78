//! A made-up machine for the broker: files as the kernel has them, a filler, workers that are at several requests at once, clients who do
//! what they like with what they have, and servers that are killed in the middle of everything. After each step the books are compared
//! with the files.

use super::broker::{
    Action, Asker, Begun, Broker, Event, Filled, Handing, NextStep, Now, Offenders, Seen, Survey, Wish,
};
use super::capacity::Capacity;
use super::ledger::{Entry, Holding};
use super::protocol::{Code, Until};
use super::quota::Quotas;
use super::state::{Found, GivenUp, Life, Ready, Refusal, Settings, State};
use crate::sys::HUGE_PAGE_SIZE;
use crate::sys::seqpacket::Peer;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const PAGE: usize = HUGE_PAGE_SIZE;
const LIMIT: usize = 64 * PAGE;
const MEMORY: usize = 62 * PAGE;
const WORKERS: usize = 3;
const USERS: u32 = 4;
const UNUSED: Duration = Duration::from_secs(5);

fn quota(user: u32) -> usize {
    [usize::MAX, 40 * PAGE, 24 * PAGE, 8 * PAGE][user as usize]
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum FileAt {
    Ready(u64, usize),
    Taken(String),
    /// In the same place, seized.
    Going(String),
    /// It has no name.
    Gone,
}

/// A file as the kernel has it. Its number is never used again.
#[derive(Debug, Clone)]
struct File {
    place: FileAt,
    len: usize,
    backed: usize,
    /// What its owner has made of it that nobody gave him; from memory of its own, for it says nothing about who was promised what.
    grown: usize,
    owner: u32,
    /// Whose it was.
    user: u32,
    /// Clients who have it open.
    opened: usize,
    /// Whether it was ever somebody's.
    used: bool,
}

impl File {
    fn seen(&self, unused: Option<bool>) -> Seen {
        let seized = matches!(self.place, FileAt::Going(_));
        let (len, backed) = (self.len, self.backed + self.grown);
        Seen { len, backed, owner: self.owner, seized, look: 0, unused }
    }
}

/// What is done to a file where others may be at it.
#[derive(Debug, Clone, Copy)]
enum Errand {
    Seize,
    Shrink(usize),
    TakeBack,
}

enum Do {
    Action(Action<usize>),
    Event(Event<usize>),
}

/// What somebody's thread is at.
#[derive(Default)]
struct Worker {
    queue: VecDeque<Do>,
    asker: Option<Asker>,
    /// The request, for what is refused.
    wish: Option<Wish>,
    /// A descriptor that is on its way to a client.
    file: Option<usize>,
}

struct World {
    broker: Broker<usize>,
    files: Vec<File>,
    workers: Vec<Worker>,
    /// What is held up, and of which server.
    errands: VecDeque<(u64, String, Errand, usize)>,
    /// What the filler is at: node, id, file, where, how much.
    piece: Option<(usize, u64, usize, usize, usize)>,
    /// Who is connected: the account of each.
    connections: BTreeMap<u64, u32>,
    next: u64,
    now: Now,
    random: u64,
    /// What has happened.
    kills: usize,
    given: usize,
    refused: BTreeMap<&'static str, usize>,
}

fn broker() -> Broker<usize> {
    let quotas = Quotas { users: (1..USERS).map(|user| (user, quota(user))).collect(), ..Quotas::default() };
    let settings = Settings {
        floor: 4 * PAGE as u64,
        unused: UNUSED,
        quotas,
        ..Settings::plain(BTreeMap::from([(0, 16 * PAGE), (1, 8 * PAGE)]))
    };
    let capacity = Capacity::of(1024);
    Broker {
        state: State::new(settings, 64),
        limit: LIMIT,
        capacity,
        reserved: false,
        own_user: 99,
        offenders: Offenders::default(),
    }
}

impl World {
    fn new() -> World {
        World {
            broker: broker(),
            files: Vec::new(),
            workers: (0..=WORKERS).map(|_| Worker::default()).collect(),
            errands: VecDeque::new(),
            piece: None,
            connections: BTreeMap::new(),
            next: 0,
            now: Now { ns: 1, since_1970: 1000 },
            random: 1,
            kills: 0,
            given: 0,
            refused: BTreeMap::new(),
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((u128::from(self.random >> 11) * bound as u128) >> 53) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn available(&self) -> usize {
        MEMORY - self.files.iter().map(|file| file.backed).sum::<usize>()
    }

    fn make(&mut self, place: FileAt, len: usize) -> usize {
        self.files.push(File { place, len, backed: 0, grown: 0, owner: 99, user: 99, opened: 0, used: false });
        self.files.len() - 1
    }

    /// One step of one of those who are there.
    fn step(&mut self, choice: u32) {
        self.random ^= u64::from(choice) << 16;
        self.now.ns += self.below(300_000_000) as u64;
        match self.below(100) {
            0..25 => self.ask(),
            25..60 => self.work(),
            60..70 => self.keep(),
            70..76 => self.fill(),
            76..88 => self.play(),
            88..93 => self.leave(),
            93..97 => self.look(),
            97..99 => self.errand(),
            _ if self.one_in(4) => self.kill(),
            _ => self.now.ns += UNUSED.as_nanos() as u64,
        }
        self.check();
    }

    fn idle_worker(&self) -> Option<usize> {
        (0..WORKERS).find(|&worker| self.workers[worker].queue.is_empty())
    }

    /// A client asks for something.
    fn ask(&mut self) {
        let Some(worker) = self.idle_worker() else { return };
        let account = self.below(USERS as usize) as u32;
        let connection = match self.connections.iter().find(|(_, user)| **user == account) {
            // One request of a connection at a time.
            Some((&number, _)) if !self.is_busy(number) => number,
            _ => self.number(),
        };
        self.connections.insert(connection, account);
        let peer = Peer { pid: 0, user: account, group: 0 };
        let asker = Asker { connection, peer, account };
        let taken: Vec<String> = self.broker.state.taken.values().map(|taken| taken.name.clone()).collect();
        let worker_of = &mut self.workers[worker];
        *worker_of = Worker { asker: Some(asker), ..Worker::default() };
        let event = if self.below(3) == 0 && !taken.is_empty() {
            let name = taken[self.below(taken.len())].clone();
            Event::Release(asker, name, Some(account))
        } else {
            let size = (1 + self.below(12)) * PAGE;
            let node = [None, Some(0), Some(1)][self.below(3)];
            let until = [Until::Closed, Until::Unused][self.below(2)];
            let wish = Wish { asker, size, node, until };
            self.workers[worker].wish = Some(wish);
            Event::Take(wish, None)
        };
        self.workers[worker].queue.push_back(Do::Event(event));
    }

    fn is_busy(&self, connection: u64) -> bool {
        let at = |worker: &Worker| worker.asker.is_some_and(|asker| asker.connection == connection);
        self.workers.iter().any(|worker| !worker.queue.is_empty() && at(worker))
    }

    /// One of the threads, the keeper's included, does the next thing that it is at.
    fn work(&mut self) {
        let busy: Vec<usize> = (0..=WORKERS).filter(|&worker| !self.workers[worker].queue.is_empty()).collect();
        if busy.is_empty() {
            return;
        }
        let worker = busy[self.below(busy.len())];
        self.work_at(worker);
    }

    fn work_at(&mut self, worker: usize) {
        let Some(next) = self.workers[worker].queue.pop_front() else { return };
        let event = match next {
            Do::Event(event) => Some(event),
            Do::Action(action) => self.perform(worker, action),
        };
        if let Some(event) = event {
            self.handle(worker, event);
        }
    }

    fn handle(&mut self, worker: usize, event: Event<usize>) {
        let actions = self.broker.handle(event, self.now);
        for action in actions.into_iter().rev() {
            if let Action::Refuse(Refusal(code, message)) = &action {
                self.refusal(worker, *code, message);
            }
            self.workers[worker].queue.push_front(Do::Action(action));
        }
    }

    fn perform(&mut self, worker: usize, action: Action<usize>) -> Option<Event<usize>> {
        match action {
            Action::Survey(wish) => {
                let backed: Vec<(u64, usize)> =
                    self.broker.state.completing().iter().map(|&(id, file)| (id, self.files[file].backed)).collect();
                self.broker.state.note_backed(&backed);
                let survey = Survey { available: self.available() as u64, room: u64::MAX, id: self.number() };
                self.handle(worker, Event::Take(wish, Some(survey)));
                None
            }
            Action::Cut(given_up) => {
                let GivenUp { keep, ref ready, .. } = given_up;
                let file = &mut self.files[ready.file];
                assert!(matches!(file.place, FileAt::Ready(..)), "{file:?}");
                (file.len, file.backed) = (keep, file.backed.min(keep));
                Some(Event::Cut(given_up, true))
            }
            Action::Resize { node, mut ready, size } => {
                if self.one_in(10) {
                    return Some(Event::NotResized(node, ready, "no memory".into()));
                }
                let file = &mut self.files[ready.file];
                assert!(matches!(file.place, FileAt::Ready(..)), "{file:?}");
                (file.len, file.backed) = (size, file.backed.min(size));
                (ready.size, ready.filled) = (size, ready.filled.min(size));
                Some(Event::Waits(node, ready))
            }
            Action::Make { node, size } => {
                let id = self.number();
                let file = self.make(FileAt::Ready(id, node), size);
                Some(Event::Waits(node, Ready { id, file, size, filled: 0, unverified: 0 }))
            }
            Action::CutBehind { node, ready } => {
                let file = &mut self.files[ready.file];
                assert!(matches!(file.place, FileAt::Ready(..)), "{file:?}");
                file.backed = file.backed.min(ready.filled);
                Some(Event::Waits(node, ready))
            }
            Action::Remove { id, node } => {
                if let Some(file) = self.files.iter_mut().find(|file| file.place == FileAt::Ready(id, node)) {
                    // Its memory goes with the last descriptor, and nobody has any but the server.
                    (file.place, file.backed) = (FileAt::Gone, 0);
                }
                None
            }
            Action::Close(_) => None,
            Action::HandOut(handing) => Some(self.hand_out(worker, handing)),
            Action::Seize { id, name, .. } => self.run(id, name, Errand::Seize),
            Action::Shrink { id, name, size, .. } => self.run(id, name, Errand::Shrink(size)),
            Action::TakeBack { id, name, .. } => self.run(id, name, Errand::TakeBack),
            Action::AskIfUnused { id, file } => {
                let file = &self.files[file];
                assert!(
                    !matches!(file.place, FileAt::Taken(_)),
                    "what its owner can still open is no longer his: {file:?}"
                );
                (file.opened == 0).then_some(Event::Unused(id))
            }
            Action::Give { name, size, .. } => {
                let file = self.workers[worker].file.take().expect("a descriptor goes with it");
                self.given += 1;
                // Root may have released it already.
                assert!([FileAt::Taken(name.clone()), FileAt::Going(name.clone())].contains(&self.files[file].place));
                assert!(self.files[file].len == size || self.files[file].grown > 0);
                let id = Entry::read(&name).unwrap().id;
                if self.one_in(10) {
                    self.files[file].opened -= 1;
                    return Some(Event::Unheard(id));
                }
                // Whoever has it can touch all of it.
                if self.one_in(2) {
                    let missing = size - self.files[file].backed.min(size);
                    assert!(self.available() >= missing, "{missing} promised, {} there", self.available());
                    self.files[file].backed = self.files[file].backed.max(size);
                }
                None
            }
            Action::Refuse(_)
            | Action::Released(_)
            | Action::Resized(_)
            | Action::Hold(_)
            | Action::Log(_)
            | Action::Boost => None,
        }
    }

    /// Does what may be held up; then the others do not wait for it.
    fn run(&mut self, id: u64, name: String, errand: Errand) -> Option<Event<usize>> {
        if self.one_in(4) {
            self.errands.push_back((id, name, errand, self.kills));
            return None;
        }
        Some(self.run_now(id, name, errand))
    }

    fn run_now(&mut self, id: u64, name: String, errand: Errand) -> Event<usize> {
        match errand {
            Errand::Seize => self.seize(id, name),
            Errand::Shrink(size) => self.shrink(id, name, size),
            Errand::TakeBack => self.take_back(id, name),
        }
    }

    /// Nobody has it any more, and its owner can't open it.
    fn take_back(&mut self, id: u64, name: String) -> Event<usize> {
        if self.one_in(10) {
            return Event::TakenBack(id, false);
        }
        // A former server's thread may have done it already.
        let going = FileAt::Going(name);
        if let Some(file) = self.files.iter_mut().find(|file| file.place == going) {
            assert_eq!(file.opened, 0, "somebody can see it: {file:?}");
            (file.len, file.backed, file.grown, file.place) = (0, 0, 0, FileAt::Gone);
        }
        Event::TakenBack(id, true)
    }

    fn seize(&mut self, id: u64, name: String) -> Event<usize> {
        if self.one_in(20) {
            return Event::Seized(id, false);
        }
        if let Some(file) = self.files.iter_mut().find(|file| file.place == FileAt::Taken(name.clone())) {
            (file.place, file.owner) = (FileAt::Going(name), 99);
        }
        Event::Seized(id, true)
    }

    fn shrink(&mut self, id: u64, name: String, size: usize) -> Event<usize> {
        let places = [FileAt::Taken(name.clone()), FileAt::Going(name)];
        let can = !self.one_in(10);
        let file = self.files.iter_mut().find(|file| can && places.contains(&file.place));
        let done = file.is_some();
        if let Some(file) = file {
            (file.len, file.backed, file.grown) = (file.len.min(size), file.backed.min(size), 0);
        }
        Event::Shrunk(id, done)
    }

    /// An errand that was held up is done, and the keeper hears of it.
    fn errand(&mut self) {
        if let Some((id, name, errand, server)) = self.errands.pop_front() {
            let event = self.run_now(id, name, errand);
            if server == self.kills {
                self.workers[WORKERS].queue.push_back(Do::Event(event));
            }
        }
    }

    fn hand_out(&mut self, worker: usize, mut handing: Handing<usize>) -> Event<usize> {
        let Handing { entry, size, peer, .. } = handing;
        let fails = self.one_in(20);
        if handing.file.is_none() {
            if fails {
                return Event::NotHandedOut(handing, "no file".into());
            }
            handing.file = Some(self.make(FileAt::Ready(entry.id, entry.node), size));
        }
        let number = handing.file.unwrap();
        assert_eq!(self.files[number].place, FileAt::Ready(entry.id, entry.node));
        assert!(!self.files[number].used, "handed out twice");
        if self.one_in(20) {
            return Event::NotHandedOut(handing, "not that size".into());
        }
        let file = &mut self.files[number];
        (file.len, file.backed) = (size, file.backed.min(size));
        (file.place, file.used) = (FileAt::Taken(entry.to_string()), true);
        if fails {
            return Event::NotHandedOut(handing, "not his".into());
        }
        (file.owner, file.user, file.opened) = (peer.user, peer.user, 1);
        self.workers[worker].file = Some(number);
        Event::HandedOut(handing)
    }

    /// Nobody is refused what he should have.
    fn refusal(&mut self, worker: usize, code: Code, message: &str) {
        *self.refused.entry(code.name()).or_default() += 1;
        let wish = self.workers[worker].wish;
        match code {
            Code::Quota => {
                let Wish { asker, size, .. } = wish.unwrap();
                let had = self.broker.state.accounts.users().find(|(user, ..)| *user == asker.account);
                assert!(had.map_or(0, |(_, bytes, _)| bytes) + size > quota(asker.account), "{message}");
            }
            Code::Limit => assert!(self.broker.state.shared_bytes() + wish.unwrap().size > LIMIT, "{message}"),
            Code::NoMemory => assert!(wish.unwrap().size > self.broker.state.ready(), "{message}"),
            Code::Denied | Code::NotFound => assert!(wish.is_none(), "{message}"),
            Code::Failed => {}
            other => panic!("{other:?}: {message}"),
        }
    }

    /// Clients do something with what they have, or had.
    fn play(&mut self) {
        let theirs: Vec<usize> = (0..self.files.len()).filter(|&file| self.files[file].used).collect();
        if theirs.is_empty() {
            return;
        }
        // Of late ones rather than of the oldest.
        let back = self.below(theirs.len().min(12));
        let number = theirs[theirs.len() - 1 - back];
        let available = self.available();
        let (what, amount) = (self.below(5), (1 + self.below(20)) * PAGE);
        let on_its_way = self.workers.iter().any(|worker| worker.file == Some(number));
        let promised: usize = self.broker.state.promised();
        let file = &mut self.files[number];
        let can_open = matches!(file.place, FileAt::Taken(_)) && file.owner != 99;
        match what {
            0 if can_open => file.opened += 1,
            1 | 2 if file.opened > usize::from(on_its_way) => file.opened -= 1,
            // Longer, or reserved beyond its end.
            3 if file.opened > 0 && file.user != 0 => {
                file.grown += amount;
                file.len += amount * (amount / PAGE % 2);
            }
            // What was cut off by somebody is touched again; what was promised to others is not for him.
            4 if file.opened > 0 => {
                let more = file.len.saturating_sub(file.grown).saturating_sub(file.backed);
                if more <= available.saturating_sub(promised) {
                    file.backed += more;
                }
            }
            _ => {}
        }
    }

    /// A client's connection ends, and with it what it has open.
    fn leave(&mut self) {
        let Some(worker) = self.idle_worker() else { return };
        let quiet: Vec<u64> = self.connections.keys().copied().filter(|&number| !self.is_busy(number)).collect();
        if quiet.is_empty() {
            return;
        }
        let number = quiet[self.below(quiet.len())];
        let account = self.connections.remove(&number);
        let on_their_way: Vec<usize> = self.workers.iter().filter_map(|worker| worker.file).collect();
        for number in 0..self.files.len() {
            if Some(self.files[number].user) == account && !on_their_way.contains(&number) && !self.one_in(3) {
                self.files[number].opened = 0;
            }
        }
        self.workers[worker] = Worker::default();
        self.workers[worker].queue.push_back(Do::Event(Event::Left(number)));
    }

    /// The keeper looks at a file that is taken: what it has seen is told a little later.
    fn look(&mut self) {
        let ids: Vec<u64> = self.broker.state.taken.keys().copied().collect();
        if ids.is_empty() || !self.workers[WORKERS].queue.is_empty() {
            return;
        }
        let id = ids[self.below(ids.len())];
        let all = self.below(2) == 0;
        self.look_at(id, all);
    }

    fn look_at(&mut self, id: u64, all: bool) {
        let taken = &self.broker.state.taken[&id];
        if !taken.is_settled() && taken.life != Life::Leaving {
            return;
        }
        let event = match taken.file {
            // Its lease goes on, or is over.
            None => {
                let named = |file: &File| {
                    [FileAt::Taken(taken.name.clone()), FileAt::Going(taken.name.clone())].contains(&file.place)
                };
                match self.files.iter().position(named) {
                    // A former server's thread has taken it back.
                    None => Event::TakenBack(id, true),
                    Some(number) if self.below(2) == 0 => Event::Opened(id, number),
                    Some(number) => Event::Seen(id, self.files[number].seen(None)),
                }
            }
            Some(number) => {
                let file = &self.files[number];
                let unused = (all && matches!(taken.life, Life::Path(_))).then_some(file.opened == 0);
                Event::Seen(id, file.seen(unused))
            }
        };
        self.workers[WORKERS].queue.push_back(Do::Event(event));
    }

    /// The keeper brings the files nearer to what is wanted.
    fn keep(&mut self) {
        if !self.workers[WORKERS].queue.is_empty() {
            return;
        }
        if self.one_in(6) {
            let bytes = self.below(10) * PAGE;
            let actions = self.broker.give_up(bytes);
            self.workers[WORKERS].queue.extend(actions.into_iter().map(Do::Action));
            return;
        }
        if self.piece.is_some() {
            return;
        }
        let full = self.below(8);
        let turn = self.below(2);
        match self.broker.next_step(turn, |node| node == full) {
            NextStep::Nothing | NextStep::NodeIsFull(_) => {}
            NextStep::Do(actions) => self.workers[WORKERS].queue.extend(actions.into_iter().map(Do::Action)),
            NextStep::Fill { node, id } => {
                let spare = self.available().saturating_sub(self.broker.state.promised() + 4 * PAGE);
                let most = spare.min((1 + self.below(8)) * PAGE) / PAGE * PAGE;
                if most == 0 {
                    return;
                }
                match self.broker.begin(node, id, most) {
                    Begun::Fill { file, offset, len } => self.piece = Some((node, id, file, offset, len)),
                    Begun::Over => {}
                    Begun::NoRoom(actions) => self.workers[WORKERS].queue.extend(actions.into_iter().map(Do::Action)),
                }
            }
        }
    }

    /// The filler is done with its piece, or with a part of it.
    fn fill(&mut self) {
        if !self.workers[WORKERS].queue.is_empty() {
            return;
        }
        let Some((node, id, number, offset, len)) = self.piece.take() else { return };
        if self.one_in(10) {
            // It was killed.
            self.broker.state.filling = None;
            return;
        }
        let short = self.one_in(5);
        let available = self.available();
        let file = &mut self.files[number];
        // No further than the file goes by now. It may be somebody's by now, whose promise it keeps.
        let filled = if short { len / 2 / PAGE * PAGE } else { len };
        let end = (offset + filled).min(file.len.saturating_sub(if file.used { file.grown } else { 0 }));
        let more = end.saturating_sub(file.backed);
        assert!(file.place == FileAt::Gone || more <= available, "the filler has taken what was promised");
        if file.place != FileAt::Gone {
            file.backed += more;
        }
        let done = Filled { node, id, offset, len, filled, elsewhere: 0, unverified: 0, cpu_ns: 1 };
        let actions = self.broker.filled(done);
        self.workers[WORKERS].queue.extend(actions.into_iter().map(Do::Action));
    }

    /// Kills the server. The next one finds what the names say, and that is what this one knew.
    fn kill(&mut self) {
        self.kills += 1;
        // What was on its way to clients never comes.
        for worker in &mut self.workers {
            if let Some(file) = worker.file {
                self.files[file].opened -= 1;
            }
            *worker = Worker::default();
        }
        self.piece = None;
        // Threads that are held up end under the next server, which hears nothing of it.
        self.connections.clear();
        let before = std::mem::replace(&mut self.broker, broker());
        for number in 0..self.files.len() {
            let File { place, len, .. } = self.files[number].clone();
            let (name, going) = match place {
                FileAt::Gone => continue,
                FileAt::Ready(id, node) => {
                    let actions = if len == 0 {
                        vec![Action::Remove { id, node }]
                    } else {
                        let ready = Ready { id, file: number, size: len, filled: 0, unverified: 0 };
                        self.broker.handle(Event::Waits(node, ready), self.now)
                    };
                    actions.into_iter().for_each(|action| drop(self.perform(WORKERS, action)));
                    continue;
                }
                FileAt::Taken(name) => (name, false),
                FileAt::Going(name) => (name, true),
            };
            let entry = Entry::read(&name).unwrap();
            let Holding { size, user, since, .. } = entry.holding.unwrap();
            let known = before.state.taken.get(&entry.id).expect("the former server had it on an account");
            assert_eq!((size, user, since, &name), (known.handed_out, known.user, known.since, &known.name));
            let file = (!self.one_in(8)).then_some(number);
            self.broker.state.adopt(Found { name, entry, file, going });
        }
    }

    /// The books and the files agree.
    fn check(&self) {
        let state = &self.broker.state;
        let mut accounts: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for taken in state.taken.values() {
            let account = accounts.entry(taken.user).or_default();
            *account = (account.0 + taken.size, account.1 + 1);
        }
        let kept: BTreeMap<u32, (usize, usize)> =
            state.accounts.users().map(|(user, bytes, files)| (user, (bytes, files))).collect();
        assert_eq!(accounts, kept, "each account is the sum of its files");
        let handed_out = |user: Option<u32>| -> usize {
            let of_user = state.taken.values().filter(|taken| user.is_none_or(|user| taken.user == user));
            of_user.map(|taken| taken.handed_out).sum()
        };
        for &user in accounts.keys() {
            assert!(handed_out(Some(user)) <= quota(user), "{user} has {}", handed_out(Some(user)));
        }
        assert!(handed_out(None) + state.ready() <= LIMIT);
        let mut ids: BTreeSet<u64> = state.taken.keys().copied().collect();
        let waiting = state.nodes.values().flat_map(|node| &node.waiting);
        for ready in waiting {
            assert!(ids.insert(ready.id), "{} is in two places", ready.id);
            let file = &self.files[ready.file];
            assert!(
                matches!(file.place, FileAt::Ready(..)) && !file.used && file.len == ready.size,
                "{file:?} {ready:?}"
            );
            assert!(
                ready.filled <= file.backed || self.piece.is_some_and(|(_, id, ..)| id == ready.id),
                "{file:?} {ready:?}"
            );
        }
        for file in &self.files {
            let (FileAt::Taken(name) | FileAt::Going(name)) = &file.place else {
                assert!(file.backed + file.grown == 0 || !file.used, "memory that nobody knows of: {file:?}");
                continue;
            };
            let taken = state.taken.get(&Entry::read(name).unwrap().id);
            let taken = taken.unwrap_or_else(|| panic!("{file:?} is on nobody's account"));
            assert!(file.backed <= taken.size, "{file:?}");
        }
    }

    /// Everybody closes what he has, and all that is under way comes to its end: nothing is left.
    fn end(&mut self) {
        self.connections.clear();
        while self.workers.iter().any(|worker| !worker.queue.is_empty()) {
            (0..=WORKERS).for_each(|worker| self.work_at(worker));
        }
        self.fill();
        self.files.iter_mut().for_each(|file| file.opened = 0);
        for number in 0..=self.next {
            self.workers[0].queue.push_back(Do::Event(Event::Left(number)));
        }
        // A seizure that fails is tried again, and what is held up ends. A file that could not be emptied is opened again first, which may take some looks.
        for _ in 0..64 {
            while !self.errands.is_empty() {
                self.errand();
            }
            for id in self.broker.state.taken.keys().copied().collect::<Vec<_>>() {
                self.look_at(id, true);
            }
            while self.workers.iter().any(|worker| !worker.queue.is_empty()) {
                (0..=WORKERS).for_each(|worker| self.work_at(worker));
            }
            self.check();
            self.now.ns += UNUSED.as_nanos() as u64;
        }
        assert!(self.broker.state.taken.is_empty(), "{:?}", self.broker.state.taken);
        let actions = self.broker.handle(Event::Stop, self.now);
        actions.into_iter().for_each(|action| drop(self.perform(0, action)));
        for file in &self.files {
            assert_eq!((&file.place, file.backed, file.grown), (&FileAt::Gone, 0, 0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens, in whatever order.
    #[test]
    fn the_books_are_right(choices in prop::collection::vec(any::<u32>(), 1..300)) {
        let mut world = World::new();
        choices.into_iter().for_each(|choice| world.step(choice));
        world.end();
    }
}

/// A thousand kills at random moments, and between them all that there should be.
#[test]
fn a_thousand_servers_are_killed_and_nothing_is_lost() {
    let (mut kills, mut given, mut refused) = (0, 0, BTreeSet::new());
    for seed in 0..100_u32 {
        let mut world = World::new();
        (0..4500).for_each(|step| world.step(step + 4500 * seed));
        kills += world.kills;
        given += world.given;
        refused.extend(world.refused.keys().copied());
        world.end();
    }
    let all = ["denied", "failed", "limit", "no-memory", "not-found", "quota"];
    assert!(kills >= 1000 && given >= 5_000 && refused.iter().eq(&all), "{kills} {given} {refused:?}");
}
