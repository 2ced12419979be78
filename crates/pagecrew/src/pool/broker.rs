//! What is done as things happen to a pool: a pure function of what is known ([`State`]) and of one [`Event`] to [`Action`]s.
//!
//! Whoever has an event hands it in with the broker locked, and performs the actions in their order with it unlocked (`server`); what
//! comes of an action is the next event. So nothing waits for memory while the books are locked, several events may be on their way at once,
//! and a server that is killed between two of them has lost nothing: what its successor finds are the names of files (`ledger`), and each
//! action leaves them whole.
//!
//! A file is on one account from the event that promises it until the kernel has all of its memory back ([`Event::TakenBack`]).

use super::capacity::Capacity;
use super::error::Error;
use super::ledger::{Entry, Holding};
use super::protocol::{Code, Until};
use super::state::{Filling, Found, GivenUp, Life, PutBack, Ready, Refusal, State, TakenFile};
use super::stock::Step;
use crate::sys::HUGE_PAGE_SIZE;
use crate::sys::seqpacket::Peer;
use crate::units::Bytes;
use std::collections::BTreeMap;

/// A taken file that was found too large so often is taken away.
const OFFENCES: u32 = 3;
/// Who has more than was handed out to him at so many looks in a row loses all of it.
const BEYOND_LOOKS: u32 = 3;

/// The time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Now {
    /// That only goes forward, in nanoseconds.
    pub ns: u64,
    /// In seconds since 1970.
    pub since_1970: u64,
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asker {
    pub connection: u64,
    pub peer: Peer,
    /// The user who pays for what the peer takes.
    pub account: u32,
}

/// A request for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wish {
    pub asker: Asker,
    pub size: usize,
    /// The node, if that matters.
    pub node: Option<usize>,
    pub until: Until,
}

/// What is looked at for a request of which not all is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Survey {
    /// Bytes that could be had.
    pub available: u64,
    /// Bytes that the mount has room for.
    pub room: u64,
    /// The number of the file, should one have to be made.
    pub id: u64,
}

/// A file on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Handing<F> {
    pub entry: Entry,
    pub size: usize,
    /// `None` if it is yet to be made.
    pub file: Option<F>,
    /// Bytes of it that are ready.
    pub ready: usize,
    /// Whether it has the size that was asked for.
    pub fits: bool,
    pub peer: Peer,
}

/// A taken file as the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    pub len: usize,
    /// Bytes of memory in it, beyond its end included.
    pub backed: usize,
    /// Who owns it.
    pub owner: u32,
    /// Whether it is its owner's no longer: a former server's errand may come to its end under this one.
    pub seized: bool,
    /// The number of the look.
    pub look: u32,
    /// Whether nobody but the server has it open; `None` where that was not asked.
    pub unused: Option<bool>,
}

/// What happens.
#[derive(Debug)]
pub(super) enum Event<F> {
    /// A client asks for memory.
    Take(Wish, Option<Survey>),
    /// A file is its client's, and this is the server's own descriptor of it.
    HandedOut(Handing<F>),
    /// It couldn't be made, or not be handed out. A file that was made is still there.
    NotHandedOut(Handing<F>, String),
    /// A client gives the file of this name back, which is this user's by its owner.
    Release(Asker, String, Option<u32>),
    /// Somebody wants so much kept ready.
    Resize { peer: Peer, size: usize, node: Option<usize> },
    /// What was handed out never reached its client.
    Unheard(u64),
    /// A client has left.
    Left(u64),
    /// A waiting file was cut, or could not be.
    Cut(GivenUp<F>, bool),
    /// A file was made to wait on a node, made longer or shorter, or given back what it was not to have: it waits again.
    Waits(usize, Ready<F>),
    /// The size of a waiting file can't be changed.
    NotResized(usize, Ready<F>, String),
    /// A taken file was looked at.
    Seen(u64, Seen),
    /// A file was found among the taken ones.
    Found(Found<F>),
    /// A file that its owner kept from being opened was opened.
    Opened(u64, F),
    /// A file was taken from its owner, or could not be.
    Seized(u64, bool),
    /// What was added to a file was taken from it, or could not be.
    Shrunk(u64, bool),
    /// Nobody but the server has this seized file open, and since nobody can open it, nobody will.
    Unused(u64),
    /// The kernel has all memory of the file back, and its name is gone; or not yet.
    TakenBack(u64, bool),
    /// The server ends.
    Stop,
}

/// What is to be done about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action<F> {
    /// See how much of what was promised is touched by now and what memory could be had, and ask again before anything else happens.
    /// [`Event::Take`]
    Survey(Wish),
    /// Cut a waiting file to what it is to keep. [`Event::Cut`]
    Cut(GivenUp<F>),
    /// Make a waiting file so long. [`Event::Waits`], [`Event::NotResized`]
    Resize {
        node: usize,
        ready: Ready<F>,
        size: usize,
    },
    /// Make an empty file that waits. [`Event::Waits`]
    Make {
        node: usize,
        size: usize,
    },
    /// Give back what a waiting file has behind what is filled. [`Event::Waits`]
    CutBehind {
        node: usize,
        ready: Ready<F>,
    },
    /// Take the name of a waiting file away.
    Remove {
        id: u64,
        node: usize,
    },
    /// Let the filler out of the idle class: it may be stopped in the middle of a page that others wait for.
    Boost,
    /// Make a file its client's. [`Event::HandedOut`], [`Event::NotHandedOut`]
    HandOut(Handing<F>),
    /// Take a file from its owner: nobody can open it any more. That may take as long as he likes. [`Event::Seized`]
    Seize {
        owner: u32,
        id: u64,
        name: String,
    },
    /// Ask whether nobody has a seized file open. [`Event::Unused`], if so
    AskIfUnused {
        id: u64,
        file: F,
    },
    /// Give a file's memory to the kernel, for good. That takes as long as there is memory in it. [`Event::TakenBack`]
    TakeBack {
        owner: u32,
        id: u64,
        name: String,
    },
    /// Close a file that nobody has any more, or that has no name any more. Not with the books locked: its owner may have attached so much to it that the kernel is at that for long.
    Close(F),
    /// Take from a file what it has beyond so many bytes. That may take as long as its owner likes. [`Event::Shrunk`]
    Shrink {
        owner: u32,
        id: u64,
        name: String,
        size: usize,
    },
    /// The client gets his file.
    Give {
        name: String,
        node: usize,
        size: usize,
        ready: usize,
    },
    /// The client's file of this size is released.
    Released(usize),
    /// So much is kept ready from now on.
    Resized(usize),
    Refuse(Refusal),
    /// Leave filling for a moment, and say why.
    Hold(String),
    Log(String),
}

/// What is next for the filler.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextStep<F> {
    /// Everything is as it is wanted.
    Nothing,
    /// A file of this node would be filled if the node had anything left.
    NodeIsFull(usize),
    Do(Vec<Action<F>>),
    Fill {
        node: usize,
        id: u64,
    },
}

/// Whether the filling of a piece has begun, and what of.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begun<F> {
    /// Fill the file from here on, so far.
    Fill { file: F, offset: usize, len: usize },
    /// The file does not wait any more, or is full.
    Over,
    /// There is no room in the pool's limit.
    NoRoom(Vec<Action<F>>),
}

/// What the filler has done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filled {
    pub node: usize,
    pub id: u64,
    pub offset: usize,
    pub len: usize,
    pub filled: usize,
    pub elsewhere: u64,
    pub unverified: usize,
    pub cpu_ns: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Broker<F> {
    pub state: State<F>,
    /// Bytes that may be ready and taken together.
    pub limit: usize,
    pub capacity: Capacity,
    /// Whether its memory is set apart for it, so that it is nobody else's.
    pub reserved: bool,
    /// The user that serves.
    pub own_user: u32,
    /// Of whom it was said that they have made files larger.
    pub offenders: Offenders,
}

/// Users who have made files larger.
#[derive(Debug, Clone, Default)]
pub(super) struct Offenders(BTreeMap<u32, Offender>);

#[derive(Debug, Clone, Copy, Default)]
struct Offender {
    /// When something was last said of him.
    said_ns: Option<u64>,
    /// At how many looks in a row he had more than was handed out to him, and the number of the last one.
    looks: u32,
    last: u32,
    seen_ns: u64,
}

impl Offenders {
    const PAUSE_NS: u64 = 60_000_000_000;
    /// With so many looks between them, two are not in a row: a second.
    const APART: u32 = 4;

    fn of(&mut self, user: u32, now_ns: u64) -> &mut Offender {
        self.0.retain(|_, offender| now_ns.saturating_sub(offender.seen_ns) < Offenders::PAUSE_NS);
        let offender = self.0.entry(user).or_default();
        offender.seen_ns = now_ns;
        offender
    }

    /// Whether something is to be said of `user` now: once in a while, whatever he does.
    fn may_say(&mut self, user: u32, now_ns: u64) -> bool {
        let offender = self.of(user, now_ns);
        let quiet = offender.said_ns.is_some_and(|said| now_ns.saturating_sub(said) < Offenders::PAUSE_NS);
        if !quiet {
            offender.said_ns = Some(now_ns);
        }
        !quiet
    }

    /// At this `look`, `user` has more than was handed out to him. Returns at how many looks in a row that was so.
    fn goes_on(&mut self, user: u32, look: u32, now_ns: u64) -> u32 {
        let offender = self.of(user, now_ns);
        let since = look.wrapping_sub(offender.last);
        if offender.looks == 0 || since > Offenders::APART {
            offender.looks = 1;
        } else if since > 0 {
            offender.looks += 1;
        }
        offender.last = look;
        offender.looks
    }
}

/// Has a file put back to `size`.
fn shrink<F>(id: u64, taken: &mut TakenFile<F>, size: usize) -> Action<F> {
    taken.put_back = PutBack::Underway;
    Action::Shrink { owner: taken.owner, id, name: taken.name.clone(), size }
}

fn refuse<F>(code: Code, message: impl ToString) -> Vec<Action<F>> {
    vec![Action::Refuse(Refusal(code, message.to_string()))]
}

impl<F: Clone> Broker<F> {
    /// What is to be done about `event`, in this order.
    pub fn handle(&mut self, event: Event<F>, now: Now) -> Vec<Action<F>> {
        match event {
            Event::Take(wish, survey) => self.take(wish, survey, now),
            Event::HandedOut(handing) => self.handed_out(handing),
            Event::NotHandedOut(handing, reason) => self.not_handed_out(handing, reason, now),
            Event::Release(asker, name, owner) => self.release(asker, &name, owner),
            Event::Resize { peer, size, node } => self.resize(peer, size, node),
            Event::Unheard(id) => self.let_go(id).into_iter().collect(),
            Event::Left(connection) => self.left(connection),
            Event::Cut(given_up, done) => self.cut(given_up, done),
            Event::Waits(node, ready) => self.waits(node, ready),
            Event::NotResized(node, ready, reason) => {
                vec![Action::Cut(GivenUp { node, keep: 0, ready }), Action::Hold(reason)]
            }
            Event::Seen(id, seen) => self.seen(id, seen, now),
            Event::Found(found) => self.found(found),
            Event::Opened(id, file) => {
                let Some(taken) = self.state.taken.get_mut(&id) else { return Vec::new() };
                taken.file.get_or_insert(file);
                // What was added to it while it could not be opened.
                if taken.offences >= OFFENCES { vec![shrink(id, taken, 0)] } else { Vec::new() }
            }
            Event::Seized(id, done) => self.seized(id, done),
            Event::Shrunk(id, done) => self.shrunk(id, done),
            Event::Unused(id) => self.unused(id),
            Event::TakenBack(id, done) => self.taken_back(id, done),
            Event::Stop => self.stop(),
        }
    }

    /// Decides what a request gets and puts it down to its account: a file that waits or a new one, and what is given up for it.
    fn take(&mut self, wish: Wish, survey: Option<Survey>, now: Now) -> Vec<Action<F>> {
        let Wish { asker: Asker { connection, peer, account }, size, node, until } = wish;
        if size == 0 || !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return refuse(Code::BadRequest, Error::Size(size));
        }
        let state = &mut self.state;
        let node = match node {
            Some(node) if !state.nodes.contains_key(&node) => {
                return refuse(Code::BadRequest, Error::no_such_node(node, state.nodes.keys()));
            }
            Some(node) => node,
            None => match state.best_node(size) {
                Some(node) => node,
                None => return refuse(Code::Failed, "the pool has no nodes"),
            },
        };
        let taken = state.shared_bytes();
        if taken.saturating_add(size) > self.limit {
            let [limit, taken, size] = [self.limit, taken, size].map(|bytes| Bytes(bytes as u64));
            let message = format!(
                "of the pool's limit of {limit} {taken} are taken, so {size} can't be had; see pool serve --limit"
            );
            return refuse(Code::Limit, message);
        }
        if !self.capacity.hands_out(account, state.taken.len()) {
            return refuse(
                Code::TooMany,
                "the server has as many files as it may have open; see LimitNOFILE of its service",
            );
        }
        let chosen = state.choose(node, account, size, now.ns).map(|ready| (ready.id, ready.filled.min(size)));
        let ready = chosen.map_or(0, |(_, ready)| ready);
        let Survey { available, room, id } = match survey {
            Some(survey) => survey,
            None if ready < size => return vec![Action::Survey(wish)],
            // Nothing has to be had and nothing to be made.
            None => Survey { available: 0, room: 0, id: chosen.map_or(0, |(id, _)| id) },
        };
        if let Err(error) = state.settings.quotas.charge(&mut state.accounts, account, size) {
            return refuse(Code::Quota, error);
        }
        state.note_demand(node, account, size, now.ns);
        state.taken_ns = now.ns;
        let chosen = match (chosen, state.nodes.get_mut(&node)) {
            (Some((id, ready)), Some(of)) => {
                of.demand.served(account, ready, now.ns);
                of.remove(id)
            }
            // Nothing is in a new one, so there need be no room for it.
            _ => None,
        };
        let mut actions = match self.reserve_headroom(node, size - ready, taken + size, available, room) {
            Ok(given_up) => self.cuts(given_up),
            Err(refusal) => {
                self.state.accounts.refund(account, size);
                if let (Some(chosen), Some(of)) = (chosen, self.state.nodes.get_mut(&node)) {
                    of.waiting.push(chosen);
                }
                return vec![Action::Refuse(refusal)];
            }
        };
        let id = chosen.as_ref().map_or(id, |ready| ready.id);
        let fits = chosen.as_ref().is_none_or(|ready| ready.size == size);
        let file = chosen.map(|ready| ready.file);
        let since = now.since_1970;
        let entry = Entry { id, node, holding: Some(Holding { size, user: account, since, until }) };
        let life = Life::Arriving((until == Until::Closed).then_some(connection));
        let (name, promised) = (entry.to_string(), size - ready);
        let taken = TakenFile {
            file: file.clone(),
            name,
            handed_out: size,
            size,
            user: account,
            since,
            node,
            life,
            offences: 0,
            backed: 0,
            owner: peer.user,
            put_back: PutBack::No,
            promised,
        };
        self.state.taken.insert(id, taken);
        actions.extend(self.boost(id));
        // What was given up is free before the taker needs it.
        actions.push(Action::HandOut(Handing { entry, size, file, ready, fits, peer }));
        actions
    }

    /// Sees to it that `missing` bytes can be had of the `available` ones and have `room`, with `taken` bytes taken then, and takes out what has to be given
    /// up for it.
    fn reserve_headroom(
        &mut self,
        node: usize,
        missing: usize,
        taken: usize,
        available: u64,
        room: u64,
    ) -> Result<Vec<GivenUp<F>>, Refusal> {
        let state = &mut self.state;
        let room = room.saturating_sub(state.promised() as u64);
        if missing as u64 > room.saturating_add(state.ready() as u64) {
            let [missing, room] = [missing as u64, room].map(Bytes);
            let message = format!(
                "{missing} more would be needed, and the pool has room for {room}: users have made their files larger, and keep them so"
            );
            return Err(Refusal(Code::NoMemory, message));
        }
        let floor = if self.reserved || state.settings.below_floor { 0 } else { state.settings.floor as usize };
        let available = match missing {
            0 => usize::MAX,
            _ => (available as usize).saturating_sub(state.promised().saturating_add(floor)).min(room as usize),
        };
        let ready = state.ready();
        if available.saturating_add(ready) < missing {
            let [missing, available, floor, ready] =
                [missing, available, floor, ready].map(|bytes| Bytes(bytes as u64));
            let message = format!(
                "{missing} more would be needed, and the machine has {available} of them above the floor of {floor} and {ready} more ready; \
                 see pool serve --floor and --below-floor"
            );
            return Err(Refusal(Code::NoMemory, message));
        }
        let for_memory = missing.saturating_sub(available);
        let for_limit = (taken + ready).saturating_sub(self.limit);
        let mut given_up = match for_memory.max(for_limit) {
            0 => Vec::new(),
            bytes => state.give_up(bytes, Some(node)),
        };
        let left = state.ready();
        let memory = available.saturating_add(ready - left).saturating_sub(missing);
        let room = self.limit.saturating_sub(taken + left).min(memory);
        given_up.extend(state.give_up_filling(room));
        Ok(given_up)
    }

    /// What the filler is at is wanted now.
    fn boost(&self, id: u64) -> Option<Action<F>> {
        self.state.filling.is_some_and(|filling| filling.id == id).then_some(Action::Boost)
    }

    fn handed_out(&mut self, handing: Handing<F>) -> Vec<Action<F>> {
        let Handing { entry: Entry { id, node, .. }, size, file, ready, .. } = handing;
        let state = &mut self.state;
        let Some(taken) = state.taken.get_mut(&id) else { return refuse(Code::Failed, "the file is gone") };
        if let Life::Arriving(connection) = taken.life {
            taken.life = connection.map_or(Life::Path(None), Life::Connection);
        }
        taken.file = file;
        let name = taken.name.clone();
        state.counters.takes += 1;
        state.counters.handed_out_bytes += size as u64;
        state.counters.handed_out_ready_bytes += ready as u64;
        vec![Action::Give { name, node, size, ready }]
    }

    fn not_handed_out(&mut self, handing: Handing<F>, reason: String, now: Now) -> Vec<Action<F>> {
        let Handing { entry: Entry { id, node, .. }, file, peer, .. } = handing;
        let mut actions = vec![Action::Remove { id, node }];
        match (file, self.state.taken.get_mut(&id)) {
            (Some(file), Some(taken)) => {
                taken.file = Some(file);
                actions.extend(self.let_go(id));
            }
            // There never was one.
            _ => drop(self.state.forget(id)),
        }
        // Whoever asks again and again is told each time, and the log once a minute.
        if self.offenders.may_say(peer.user, now.ns) {
            actions.push(Action::Log(reason.clone()));
        }
        actions.extend(refuse(Code::Failed, reason));
        actions
    }

    /// A user may release what is on his account, and those that are his in namespaces what is their own: they may be others' programs.
    fn release(&mut self, asker: Asker, name: &str, owner: Option<u32>) -> Vec<Action<F>> {
        let of_name = |(_, taken): &(&u64, &TakenFile<F>)| {
            taken.name == name && matches!(taken.life, Life::Connection(_) | Life::Path(_))
        };
        let Some((&id, taken)) = self.state.taken.iter().find(of_name) else {
            return refuse(Code::NotFound, format!("{name} is not a file that is taken from this pool"));
        };
        let may = match asker.peer.user {
            0 => true,
            user if user == taken.user => true,
            user => asker.account == taken.user && owner == Some(user),
        };
        if !may {
            return refuse(Code::Denied, format!("{name} is another user's"));
        }
        let size = taken.size;
        self.state.counters.released += 1;
        self.let_go(id).into_iter().chain([Action::Released(size)]).collect()
    }

    fn resize(&mut self, peer: Peer, size: usize, node: Option<usize>) -> Vec<Action<F>> {
        if peer.user != 0 && peer.user != self.own_user {
            return refuse(Code::Denied, "resizing a pool takes root, or the user that serves it");
        }
        if !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return refuse(Code::BadRequest, Error::Size(size));
        }
        let state = &mut self.state;
        match node {
            Some(node) => match state.settings.sizes.get_mut(&node) {
                Some(place) => *place = size,
                None => return refuse(Code::BadRequest, Error::no_such_node(node, state.nodes.keys())),
            },
            None => {
                let nodes: Vec<usize> = state.settings.sizes.keys().copied().collect();
                state.settings.sizes = spread(size, &nodes);
            }
        }
        state.plan();
        vec![Action::Resized(state.settings.sizes.values().sum())]
    }

    /// Takes a file from its owner. Its memory goes back only then: he could open it in between.
    fn let_go(&mut self, id: u64) -> Option<Action<F>> {
        let is_his = |taken: &&mut TakenFile<F>| !matches!(taken.life, Life::Leaving | Life::Going | Life::Emptying);
        let taken = self.state.taken.get_mut(&id).filter(is_his)?;
        taken.life = Life::Leaving;
        Some(Action::Seize { owner: taken.owner, id, name: taken.name.clone() })
    }

    fn seized(&mut self, id: u64, done: bool) -> Vec<Action<F>> {
        if let Some(taken) = self.state.taken.get_mut(&id) {
            taken.life = if done { Life::Going } else { Life::Unseized };
        }
        done.then(|| self.ask_if_unused(id)).flatten().into_iter().collect()
    }

    /// What was added to a file is gone, so it is what was handed out again.
    fn shrunk(&mut self, id: u64, done: bool) -> Vec<Action<F>> {
        if let Some(taken) = self.state.taken.get_mut(&id) {
            taken.put_back = if done { PutBack::No } else { PutBack::Failed };
            let size = taken.handed_out;
            if done {
                self.state.charge(id, size);
            }
        }
        Vec::new()
    }

    /// Sees whether the memory of a seized file can be taken back.
    fn ask_if_unused(&self, id: u64) -> Option<Action<F>> {
        Some(Action::AskIfUnused { id, file: self.state.taken.get(&id)?.file.clone()? })
    }

    /// Nobody has a seized file any more: its memory goes back.
    fn unused(&mut self, id: u64) -> Vec<Action<F>> {
        let Some(taken) = self.state.taken.get_mut(&id).filter(|taken| taken.life == Life::Going) else {
            return Vec::new();
        };
        taken.life = Life::Emptying;
        // Its owner may have attached to it what takes long to free (attributes, policies): that is to wait for the errand, which has it open by
        // itself then, and for nobody else. Where that fails, it is opened again.
        let close = taken.file.take().map(Action::Close);
        close.into_iter().chain([Action::TakeBack { owner: taken.owner, id, name: taken.name.clone() }]).collect()
    }

    /// The memory of a file is the kernel's again; where not, that is tried again.
    fn taken_back(&mut self, id: u64, done: bool) -> Vec<Action<F>> {
        if !done {
            if let Some(taken) = self.state.taken.get_mut(&id) {
                taken.life = Life::Going;
            }
            return Vec::new();
        }
        let taken = self.state.forget(id);
        taken.and_then(|taken| taken.file).map(Action::Close).into_iter().collect()
    }

    /// Takes back what a connection has held that its client has left.
    fn left(&mut self, connection: u64) -> Vec<Action<F>> {
        let held = |(_, taken): &(&u64, &TakenFile<F>)| taken.life == Life::Connection(connection);
        let held: Vec<u64> = self.state.taken.iter().filter(held).map(|(&id, _)| id).collect();
        held.into_iter().flat_map(|id| self.let_go(id)).collect()
    }

    /// Files that are given up, to be cut or to go whole.
    pub fn give_up(&mut self, bytes: usize) -> Vec<Action<F>> {
        let given_up = self.state.give_up(bytes, None);
        self.cuts(given_up)
    }

    fn cuts(&self, given_up: Vec<GivenUp<F>>) -> Vec<Action<F>> {
        let cut = |given_up: GivenUp<F>| self.boost(given_up.ready.id).into_iter().chain([Action::Cut(given_up)]);
        given_up.into_iter().flat_map(cut).collect()
    }

    fn cut(&mut self, given_up: GivenUp<F>, done: bool) -> Vec<Action<F>> {
        let GivenUp { node, keep, mut ready } = given_up;
        self.state.counters.given_back_bytes += (ready.filled - keep) as u64;
        if keep == 0 || !done {
            return vec![Action::Remove { id: ready.id, node }];
        }
        (ready.size, ready.filled) = (keep, keep);
        ready.unverified = ready.unverified.min(keep);
        self.waits(node, ready)
    }

    fn waits(&mut self, node: usize, ready: Ready<F>) -> Vec<Action<F>> {
        match self.state.nodes.get_mut(&node) {
            Some(of) => {
                of.waiting.push(ready);
                // While it was being changed, its place in the limit may have been given away.
                let (state, limit) = (&self.state, self.limit);
                let excess = (state.shared_bytes() + state.ready() + state.being_filled()).saturating_sub(limit);
                if excess > 0 { self.give_up(excess) } else { Vec::new() }
            }
            None => vec![Action::Remove { id: ready.id, node }],
        }
    }

    /// A taken file that has more than its owner was given is put back, and one that nobody has any more goes.
    fn seen(&mut self, id: u64, seen: Seen, now: Now) -> Vec<Action<F>> {
        let unused_ns = self.state.settings.unused.as_nanos() as u64;
        self.state.note_memory(id, seen.backed);
        let Some(taken) = self.state.taken.get_mut(&id) else { return Vec::new() };
        if taken.life == Life::Leaving {
            // Whoever holds that up pays for what he adds meanwhile.
            self.state.charge_more(id, seen.backed);
            return Vec::new();
        }
        if !taken.is_settled() {
            return Vec::new();
        }
        // One that is being taken from somebody belongs to this process already, and is still that one's affair: so after a kill in between.
        if !seen.seized && (seen.owner != self.own_user || taken.user == self.own_user) {
            taken.owner = seen.owner;
        }
        // What was added is counted, whenever that was, and is not to stay.
        let allowed = taken.handed_out;
        let within = seen.len <= allowed && seen.backed <= allowed;
        if within && taken.put_back == PutBack::Failed {
            // Its owner has done it himself.
            taken.put_back = PutBack::No;
            self.state.charge(id, allowed);
        }
        let mut actions = if within { Vec::new() } else { self.excess(id, seen, now) };
        let Some(taken) = self.state.taken.get_mut(&id) else { return actions };
        if seen.seized && taken.user != self.own_user && matches!(taken.life, Life::Path(_) | Life::Unseized) {
            taken.life = Life::Going;
        }
        match (taken.life, seen.unused) {
            (Life::Going, _) => actions.extend(self.ask_if_unused(id)),
            (Life::Unseized, _) => actions.extend(self.let_go(id)),
            (Life::Path(_), Some(false)) => taken.life = Life::Path(None),
            (Life::Path(since), Some(true)) => {
                let since = since.unwrap_or(now.ns);
                taken.life = Life::Path(Some(since));
                if now.ns.saturating_sub(since) >= unused_ns {
                    actions.extend(self.let_go(id));
                }
            }
            _ => {}
        }
        actions
    }

    /// The owner of a file has made it larger, or has memory reserved beyond its end, which is memory that he was not given: it goes back,
    /// and the file is taken away from whoever does it again and again. Root, who may have all of the machine's memory, has it counted. Where
    /// its owner keeps it from being opened as well, it is taken away at once, so that he can't go on with that, and emptied as soon as it can
    /// be opened: that the kernel bounds (`fs.lease-break-time`). As long as he keeps it locked, what is in it is counted.
    ///
    /// Who has made more of his files than his whole account was given, with one file after the other if need be, at [`BEYOND_LOOKS`] looks in a
    /// row loses all of them: nothing else keeps him to what he was given. Others on his account keep theirs; but the files of an account may
    /// change hands at each look, so that at twice as many looks all of them go.
    fn excess(&mut self, id: u64, seen: Seen, now: Now) -> Vec<Action<F>> {
        let Some(taken) = self.state.taken.get_mut(&id) else { return Vec::new() };
        let (user, owner) = (taken.user, taken.owner);
        if user == 0 || user == self.own_user {
            self.state.charge_more(id, seen.len.max(seen.backed));
            return Vec::new();
        }
        let (again, can_open) = (taken.offences >= OFFENCES, taken.file.is_some());
        match taken.put_back {
            PutBack::Underway => {
                self.state.charge_more(id, seen.backed);
                return Vec::new();
            }
            // It is tried again; he has done nothing since.
            PutBack::Failed => {
                let action = shrink(id, taken, if again { 0 } else { taken.handed_out });
                self.state.charge_more(id, seen.backed);
                return vec![action];
            }
            PutBack::No => {}
        }
        taken.offences = if can_open { taken.offences.saturating_add(1) } else { OFFENCES };
        let gone = taken.offences >= OFFENCES;
        let mut actions = Vec::new();
        if can_open {
            let size = if gone { 0 } else { taken.handed_out };
            actions.push(shrink(id, taken, size));
        }
        if gone {
            actions.extend(self.let_go(id));
        }
        if can_open && self.state.is_beyond(user) {
            let looks = self.offenders.goes_on(user, seen.look, now.ns);
            let (who, owner) = if looks < 2 * BEYOND_LOOKS { (owner, Some(owner)) } else { (user, None) };
            let taken = if looks < BEYOND_LOOKS { Vec::new() } else { self.take_all(user, owner) };
            if taken.iter().any(|action| matches!(action, Action::Seize { .. })) {
                actions.push(Action::Log(format!(
                    "user {who} goes on having more than was handed out to him: all of his files are taken away"
                )));
            }
            actions.extend(taken);
        }
        // Whoever never stops, or does it with many files, is not to fill the log.
        if !again && self.offenders.may_say(user, now.ns) {
            actions.push(Action::Log(format!(
                "user {user} has made files larger than they were handed out: they are put back to their size, and taken away after {OFFENCES} times"
            )));
        }
        actions
    }

    /// Takes all files on this account away that are the `owner`'s, or whoever's they are.
    fn take_all(&mut self, user: u32, owner: Option<u32>) -> Vec<Action<F>> {
        let his = |(_, taken): &(&u64, &mut TakenFile<F>)| {
            taken.user == user && owner.is_none_or(|owner| taken.owner == owner) && taken.is_settled()
        };
        let mut ids = Vec::new();
        let mut actions: Vec<_> = (self.state.taken.iter_mut().filter(his))
            .map(|(&id, taken)| {
                ids.push(id);
                taken.offences = OFFENCES;
                shrink(id, taken, 0)
            })
            .collect();
        actions.extend(ids.into_iter().flat_map(|id| self.let_go(id)));
        actions
    }

    /// Takes a file among the taken ones in that nobody handed out: root's virtual machine monitor makes one where the name that it was told
    /// is gone again. It is its owner's until nobody has it open.
    fn found(&mut self, found: Found<F>) -> Vec<Action<F>> {
        let Some(Holding { user, .. }) = found.entry.holding.filter(|_| !self.state.knows(&found.name)) else {
            return Vec::new();
        };
        self.state.adopt(found);
        vec![Action::Log(format!("user {user} has made a file of his own among those that are taken"))]
    }

    fn stop(&mut self) -> Vec<Action<F>> {
        let mut actions = Vec::new();
        for (&node, of) in &mut self.state.nodes {
            actions.extend(of.waiting.drain(..).map(|ready| Action::Remove { id: ready.id, node }));
        }
        let going = self.state.taken.iter().filter(|(_, taken)| taken.life == Life::Going);
        actions.extend(going.filter_map(|(&id, _)| self.ask_if_unused(id)));
        actions
    }

    /// The next thing that brings the files nearer to what is wanted, where nothing is filled on nodes that have nothing left. Of several
    /// nodes, that of the `turn`.
    pub fn next_step(&mut self, turn: usize, is_full: impl Fn(usize) -> bool) -> NextStep<F> {
        let mut steps: Vec<(usize, Step)> =
            self.state.nodes.iter_mut().map(|(&number, node)| (number, node.next_step())).collect();
        let turn = turn % steps.len().max(1);
        steps.rotate_left(turn);
        steps.retain(|(_, step)| *step != Step::Nothing);
        // A node that is full holds up no other.
        let can = |&&(node, step): &&(usize, Step)| !(matches!(step, Step::Fill { .. }) && is_full(node));
        let Some(&(node, step)) = steps.iter().find(can) else {
            return steps.first().map_or(NextStep::Nothing, |&(node, _)| NextStep::NodeIsFull(node));
        };
        let mut take_out = |id| self.state.nodes.get_mut(&node).and_then(|of| of.remove(id));
        let action = match step {
            Step::Nothing => None,
            Step::Fill { id } => return NextStep::Fill { node, id },
            Step::Create { size } => Some(Action::Make { node, size }),
            Step::Drop { id } => take_out(id).map(|ready| Action::Cut(GivenUp { node, keep: 0, ready })),
            Step::Resize { id, size } => take_out(id).map(|ready| Action::Resize { node, ready, size }),
        };
        NextStep::Do(action.into_iter().collect())
    }

    /// Puts `most` bytes of the waiting file `id` down as being filled, or as many as there may be.
    pub fn begin(&mut self, node: usize, id: u64, most: usize) -> Begun<F> {
        let room = self.state.room(self.limit);
        let Some(of) = self.state.nodes.get_mut(&node) else { return Begun::Over };
        // Handed out or cut meanwhile?
        let Some(ready) = of.waiting.iter().find(|ready| ready.id == id && ready.filled < ready.size) else {
            return Begun::Over;
        };
        let (file, offset) = (ready.file.clone(), ready.filled);
        let len = most.min(ready.size - ready.filled).min(room);
        if len == 0 {
            // A former server may have filled it further.
            let ready = of.remove(id);
            return Begun::NoRoom(ready.map(|ready| Action::CutBehind { node, ready }).into_iter().collect());
        }
        self.state.filling = Some(Filling { id, bytes: len });
        Begun::Fill { file, offset, len }
    }

    /// The filler is done with what it was ordered. What it could not fill is not to stay in the file, if that still waits.
    pub fn filled(&mut self, done: Filled) -> Vec<Action<F>> {
        let Filled { node, id, offset, len, filled, elsewhere, unverified, cpu_ns } = done;
        let state = &mut self.state;
        state.filling = None;
        state.counters.filled_bytes += filled as u64;
        state.counters.elsewhere_bytes += elsewhere;
        state.counters.cpu_ns += cpu_ns;
        let Some(of) = state.nodes.get_mut(&node) else { return Vec::new() };
        of.refill.filled(id, filled);
        // It may have been handed out meanwhile, and then is as its owner has it.
        let Some(ready) = of.waiting.iter_mut().find(|ready| ready.id == id) else { return Vec::new() };
        ready.filled = (offset + filled).min(ready.size);
        ready.unverified = (ready.unverified + unverified).min(ready.filled);
        // It may have been cut meanwhile, and then has all that it could get.
        if filled >= len || ready.filled == ready.size {
            return Vec::new();
        }
        // A file of small pages is slower than none, and one of another node is none of this: what there is of them goes back, while nobody
        // else can get at the file.
        of.remove(id).map(|ready| Action::CutBehind { node, ready }).into_iter().collect()
    }
}

/// `size` bytes on `nodes`, the same on each but for what can't be divided.
pub(super) fn spread(size: usize, nodes: &[usize]) -> BTreeMap<usize, usize> {
    let pages = size / HUGE_PAGE_SIZE;
    let share = |index: usize| pages / nodes.len() + usize::from(index < pages % nodes.len());
    nodes.iter().enumerate().map(|(index, &node)| (node, share(index) * HUGE_PAGE_SIZE)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::state::Settings;
    use super::*;

    const ID: u64 = 7;
    const SECOND: u64 = 1_000_000_000;

    /// A pool with one taken file of two huge pages, on user 1000's account.
    fn broker(file: Option<u32>) -> (Broker<u32>, String) {
        let holding = Holding { size: 2 * HUGE_PAGE_SIZE, user: 1000, since: 0, until: Until::Unused };
        let entry = Entry { id: ID, node: 0, holding: Some(holding) };
        let mut state = State::new(Settings::plain(BTreeMap::from([(0, 0)])), 64);
        let name = entry.to_string();
        state.adopt(Found { name: name.clone(), entry, file, going: false });
        let (capacity, offenders) = (Capacity::of(1024), Offenders::default());
        let broker = Broker { state, limit: 1 << 40, capacity, reserved: false, own_user: 0, offenders };
        (broker, name)
    }

    fn at(seconds: u64) -> Now {
        Now { ns: seconds * SECOND, since_1970: seconds }
    }

    fn seen_at(id: u64, pages: usize, backed: usize, look: u32) -> Event<u32> {
        let (len, backed) = (pages * HUGE_PAGE_SIZE, backed * HUGE_PAGE_SIZE);
        Event::Seen(id, Seen { len, backed, owner: 1000, seized: false, look, unused: None })
    }

    fn seen(pages: usize) -> Event<u32> {
        seen_at(ID, pages, 0, 0)
    }

    #[test]
    fn a_user_in_a_namespace_releases_only_what_is_his() {
        // Who asks, on whose account, whose file it is, and whether he may.
        for (user, account, owner, may) in [
            (0, 0, 100_005, true),
            (1000, 1000, 100_005, true),
            (100_005, 1000, 100_005, true),
            (100_005, 1000, 1000, false),
            (100_005, 1000, 100_006, false),
            (1001, 1001, 1001, false),
        ] {
            let (mut broker, name) = broker(Some(1));
            let asker = Asker { connection: 1, peer: Peer { pid: 1, user, group: user }, account };
            let actions = broker.handle(Event::Release(asker, name, Some(owner)), at(1));
            let released = actions.contains(&Action::Released(2 * HUGE_PAGE_SIZE));
            assert_eq!(released, may, "{user} {account} {owner}");
        }
    }

    fn is_shrunk(action: &Action<u32>) -> Option<usize> {
        if let Action::Shrink { size, .. } = action { Some(*size) } else { None }
    }

    #[test]
    fn of_somebody_who_makes_files_larger_again_and_again_it_is_said_once_a_minute() {
        let (mut broker, _) = broker(Some(1));
        let said = |actions: &[Action<u32>]| actions.iter().filter(|action| matches!(action, Action::Log(_))).count();
        let mut look = |seconds, shrunk| {
            let actions = broker.handle(seen(3), at(seconds));
            if shrunk {
                broker.handle(Event::Shrunk(ID, true), at(seconds));
            }
            actions
        };
        let first = look(100, true);
        assert_eq!((is_shrunk(&first[0]), said(&first)), (Some(2 * HUGE_PAGE_SIZE), 1));
        assert_eq!(said(&look(101, true)), 0);
        let third = look(161, true);
        assert!(is_shrunk(&third[0]) == Some(0) && said(&third) == 1);
        assert!(third.iter().any(|action| matches!(action, Action::Seize { .. })));
    }

    #[test]
    fn a_file_that_is_still_being_put_back_is_counted_and_no_further_offence() {
        let (mut broker, _) = broker(Some(1));
        let bytes = |broker: &Broker<u32>| broker.state.accounts.bytes(1000) / HUGE_PAGE_SIZE;
        assert!(!broker.handle(seen_at(ID, 9, 9, 1), at(1)).is_empty());
        for look in 2..20 {
            assert!(broker.handle(seen_at(ID, 9, 7, look), at(1)).is_empty());
        }
        assert_eq!(bytes(&broker), 7);
        // In vain: it is tried again, and that isn't his doing either.
        broker.handle(Event::Shrunk(ID, false), at(1));
        let again = broker.handle(seen_at(ID, 9, 9, 20), at(1));
        assert_eq!((again.len(), is_shrunk(&again[0])), (1, Some(2 * HUGE_PAGE_SIZE)));
        broker.handle(Event::Shrunk(ID, true), at(1));
        assert_eq!((bytes(&broker), broker.state.taken[&ID].offences), (2, 1));
        // While it is taken from him as well.
        let (connection, peer) = (1, Peer { pid: 1, user: 0, group: 0 });
        let name = broker.state.taken[&ID].name.clone();
        broker.handle(Event::Release(Asker { connection, peer, account: 0 }, name, None), at(1));
        assert!(broker.handle(seen_at(ID, 9, 8, 21), at(1)).is_empty());
        assert_eq!(bytes(&broker), 8);
    }

    #[test]
    fn what_one_user_adds_and_keeps_locked_keeps_nobody_else_from_being_served() {
        let (mut broker, _) = broker(Some(1));
        broker.limit = 8 * HUGE_PAGE_SIZE;
        assert!(!broker.handle(seen_at(ID, 40, 40, 1), at(1)).is_empty());
        assert!(broker.handle(seen_at(ID, 40, 40, 2), at(1)).is_empty());
        assert_eq!(broker.state.accounts.bytes(1000), 40 * HUGE_PAGE_SIZE);
        let asker = Asker { connection: 2, peer: Peer { pid: 1, user: 1001, group: 1001 }, account: 1001 };
        let wish = |pages| Wish { asker, size: pages * HUGE_PAGE_SIZE, node: None, until: Until::Unused };
        let survey = Some(Survey { available: 1 << 40, room: 1 << 40, id: 9 });
        let refused = |broker: &mut Broker<u32>, pages| {
            let actions = broker.take(wish(pages), survey, at(2));
            actions.iter().any(|action| matches!(action, Action::Refuse(_)))
        };
        assert!(refused(&mut broker, 7));
        assert!(!refused(&mut broker, 6));
    }

    #[test]
    fn a_file_that_grows_and_can_not_be_opened_is_taken_away() {
        let (mut broker, _) = broker(None);
        assert!(broker.handle(seen(2), at(1)).is_empty());
        let actions = broker.handle(seen(9), at(2));
        assert!(actions.iter().any(|action| matches!(action, Action::Seize { id: ID, .. })));
        broker.handle(Event::Seized(ID, true), at(2));
        // What he keeps of it by his descriptors is emptied as soon as that is possible.
        let opened = broker.handle(Event::Opened(ID, 5), at(40));
        assert_eq!((opened.len(), is_shrunk(&opened[0])), (1, Some(0)));
    }

    /// So many files of two huge pages each, which looks find at `pages(file, look)` of memory. What is to be put back is at once.
    fn looked_at(files: u64, looks: u32, pages: impl Fn(u64, u32) -> usize) -> Broker<u32> {
        let (mut broker, _) = broker(Some(1));
        for id in ID + 1..ID + files {
            let holding = Holding { size: 2 * HUGE_PAGE_SIZE, user: 1000, since: 0, until: Until::Unused };
            let entry = Entry { id, node: 0, holding: Some(holding) };
            broker.state.adopt(Found { name: entry.to_string(), entry, file: Some(1), going: false });
        }
        for look in 1..=looks {
            for file in 0..files {
                let pages = pages(file, look);
                // However long a look takes.
                let now = at(u64::from(look) * 10 + file);
                for action in broker.handle(seen_at(ID + file, pages, pages, look), now) {
                    if let Action::Shrink { id, .. } = action {
                        broker.handle(Event::Shrunk(id, true), now);
                    }
                }
            }
        }
        broker
    }

    fn settled(broker: &Broker<u32>) -> usize {
        broker.state.taken.values().filter(|taken| taken.is_settled()).count()
    }

    #[test]
    fn whoever_goes_on_with_one_file_after_the_other_loses_all_within_a_second() {
        let one_each = |large| move |file, look| if file + 1 == u64::from(look) { large } else { 2 };
        assert_eq!(settled(&looked_at(20, 2, one_each(60))), 20);
        assert_eq!(settled(&looked_at(20, 3, one_each(60))), 0);
        // With pauses of more than a second he keeps them, and as long as all together have no more than they were given.
        assert_eq!(settled(&looked_at(20, 60, |file, look| if file * 6 + 1 == u64::from(look) { 60 } else { 2 })), 20);
        assert_eq!(settled(&looked_at(20, 20, |file, look| if file + 1 == u64::from(look) { 30 } else { 0 })), 20);
        // Nor does he lose anything whose machines have all a wrong size from the beginning.
        assert_eq!(settled(&looked_at(20, 3, |_, look| if look == 1 { 3 } else { 2 })), 20);
    }

    #[test]
    fn others_on_the_same_account_lose_nothing() {
        let (mut broker, _) = broker(Some(1));
        let holding = Holding { size: 2 * HUGE_PAGE_SIZE, user: 1000, since: 0, until: Until::Unused };
        let entry = Entry { id: 8, node: 0, holding: Some(holding) };
        broker.state.adopt(Found { name: entry.to_string(), entry, file: Some(1), going: false });
        for look in 1..=3 {
            broker.handle(seen_at(8, 2, 2, look), at(1));
            let Event::Seen(id, seen) = seen_at(ID, 60, 60, look) else { unreachable!() };
            broker.handle(Event::Seen(id, Seen { owner: 100_005, ..seen }), at(1));
            broker.handle(Event::Shrunk(ID, true), at(1));
        }
        let life = |id| broker.state.taken[&id].life;
        assert_eq!((life(ID), life(8)), (Life::Leaving, Life::Path(None)));
    }

    #[test]
    fn files_that_change_hands_within_an_account_go_all_the_same() {
        let (mut broker, _) = broker(Some(1));
        let holding = Holding { size: 2 * HUGE_PAGE_SIZE, user: 1000, since: 0, until: Until::Unused };
        for id in ID + 1..ID + 20 {
            let entry = Entry { id, node: 0, holding: Some(holding) };
            broker.state.adopt(Found { name: entry.to_string(), entry, file: Some(1), going: false });
        }
        for look in 1..=6 {
            // Another one each time, which belongs to another one each time.
            let id = ID + u64::from(look);
            let Event::Seen(_, seen) = seen_at(id, 60, 60, look) else { unreachable!() };
            broker.handle(Event::Seen(id, Seen { owner: 100_000 + look, ..seen }), at(1));
            broker.handle(Event::Shrunk(id, true), at(1));
        }
        assert_eq!(settled(&broker), 0);
    }

    #[test]
    fn what_is_added_while_it_is_taken_away_is_put_back_as_well() {
        let (mut broker, _) = broker(Some(1));
        let bytes = |broker: &Broker<u32>| broker.state.accounts.bytes(1000) / HUGE_PAGE_SIZE;
        assert!(broker.let_go(ID).is_some());
        // He holds that up, and pays for it.
        assert!(broker.handle(seen_at(ID, 90, 90, 1), at(1)).is_empty());
        assert_eq!(bytes(&broker), 90);
        broker.handle(Event::Seized(ID, true), at(2));
        // Whatever he keeps open of it, it is no larger than it was.
        let actions = broker.handle(seen_at(ID, 90, 90, 2), at(3));
        assert!(actions.iter().any(|action| is_shrunk(action) == Some(2 * HUGE_PAGE_SIZE)), "{}", actions.len());
        broker.handle(Event::Shrunk(ID, true), at(4));
        assert_eq!(bytes(&broker), 2);
        let closed = broker.handle(Event::TakenBack(ID, true), at(5));
        assert!(matches!(closed[..], [Action::Close(1)]) && bytes(&broker) == 0);
    }

    #[test]
    fn nobody_is_promised_what_the_mount_has_no_room_for() {
        // Two pages are promised already.
        let (mut broker, _) = broker(Some(1));
        broker.limit = 100 * HUGE_PAGE_SIZE;
        let peer = Peer { pid: 0, user: 1001, group: 0 };
        let asker = Asker { connection: 1, peer, account: 1001 };
        let wish = Wish { asker, size: 3 * HUGE_PAGE_SIZE, node: None, until: Until::Closed };
        let mut take = |pages: usize| {
            let survey = Survey { available: u64::MAX / 2, room: (pages * HUGE_PAGE_SIZE) as u64, id: 9 };
            broker.handle(Event::Take(wish, Some(survey)), at(1))
        };
        let refused = take(4);
        let [Action::Refuse(Refusal(Code::NoMemory, message))] = &refused[..] else { panic!("{refused:?}") };
        assert!(message.contains("6 MiB more would be needed, and the pool has room for 4 MiB"), "{message}");
        assert!(matches!(take(5)[..], [Action::HandOut(_)]));
    }

    #[test]
    fn what_is_being_taken_from_somebody_is_his_affair_also_after_a_kill_in_between() {
        let (mut broker, _) = broker(Some(1));
        // It belongs to the server by now, and its mode has not been changed yet.
        let Event::Seen(_, seen) = seen_at(ID, 3, 3, 1) else { unreachable!() };
        let actions = broker.handle(Event::Seen(ID, Seen { owner: broker.own_user, ..seen }), at(1));
        let owners = actions.iter().filter_map(|action| match action {
            Action::Seize { owner, .. } | Action::Shrink { owner, .. } | Action::TakeBack { owner, .. } => Some(*owner),
            _ => None,
        });
        assert_eq!(owners.collect::<Vec<_>>(), [1000]);
    }

    #[test]
    fn what_nobody_has_any_more_is_emptied_once_at_a_time() {
        let (mut broker, name) = broker(Some(1));
        assert!(broker.handle(Event::Unused(ID), at(1)).is_empty(), "it is somebody's");
        broker.let_go(ID);
        assert_eq!(broker.handle(Event::Seized(ID, true), at(1)), [Action::AskIfUnused { id: ID, file: 1 }]);
        // Closed first, so that the errand is the last to have it.
        let empty = [Action::Close(1), Action::TakeBack { owner: 1000, id: ID, name }];
        assert_eq!(broker.handle(Event::Unused(ID), at(1)), empty);
        // That takes its time, and is looked at meanwhile.
        let Event::Seen(_, seen) = seen_at(ID, 2, 2, 1) else { unreachable!() };
        let seen = || Event::Seen(ID, Seen { seized: true, ..seen });
        assert!(broker.handle(seen(), at(2)).is_empty());
        assert!(broker.handle(Event::Unused(ID), at(2)).is_empty() && broker.let_go(ID).is_none());
        // In vain: it is tried again.
        assert!(broker.handle(Event::TakenBack(ID, false), at(3)).is_empty());
        assert!(broker.handle(seen(), at(4)).is_empty(), "it is not open");
        assert!(broker.handle(Event::Opened(ID, 1), at(4)).is_empty());
        assert_eq!(broker.handle(seen(), at(4)), [Action::AskIfUnused { id: ID, file: 1 }]);
        assert_eq!(broker.handle(Event::Unused(ID), at(4)), empty);
        assert!(broker.handle(Event::TakenBack(ID, true), at(5)).is_empty());
        assert!(broker.state.taken.is_empty());
    }

    #[test]
    fn what_can_not_be_put_back_now_is_counted_until_it_is() {
        let (mut broker, _) = broker(Some(1));
        let bytes = |broker: &Broker<u32>| broker.state.accounts.bytes(1000) / HUGE_PAGE_SIZE;
        broker.handle(seen_at(ID, 9, 9, 1), at(1));
        // Refused, since too much else of his is held up.
        broker.handle(Event::Shrunk(ID, false), at(1));
        for (look, pages) in [(2, 20), (3, 50)] {
            let tried = broker.handle(seen_at(ID, pages, pages, look), at(1));
            assert_eq!((tried.len(), is_shrunk(&tried[0])), (1, Some(2 * HUGE_PAGE_SIZE)));
            broker.handle(Event::Shrunk(ID, false), at(1));
            assert_eq!(bytes(&broker), pages);
        }
        // He does it himself.
        assert!(broker.handle(seen_at(ID, 2, 2, 4), at(1)).is_empty());
        assert_eq!((bytes(&broker), broker.state.taken[&ID].put_back), (2, PutBack::No));
    }
}
