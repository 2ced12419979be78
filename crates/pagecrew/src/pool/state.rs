//! What a server knows: the files that wait and those that are taken, who has what, and what was done. Kept under one lock, which nobody
//! holds while memory is allocated, zeroed or freed.

use super::demand::Demand;
use super::ledger::{Entry, Holding};
use super::protocol::Code;
use super::quota::{Accounts, Quotas};
use super::stock::{self, Refill, Step, Waiting};
use super::store::Found;
use crate::stats::figures;
use crate::sys::{HUGE_PAGE_SIZE, shared_file};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

/// The settings that can change while a pool is served.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    /// Bytes to keep ready on each node that has memory.
    pub sizes: BTreeMap<usize, usize>,
    /// Files to keep on each node.
    pub files: BTreeMap<usize, Vec<(usize, usize)>>,
    pub cpu: f64,
    pub floor: u64,
    pub below_floor: bool,
    pub unused: Duration,
    pub quotas: Quotas,
}

/// A file that waits, full or being filled.
#[derive(Debug)]
pub(super) struct Ready {
    pub id: u64,
    pub file: Arc<File>,
    pub size: usize,
    /// Bytes from its beginning on that are backed and zero.
    pub filled: usize,
    /// Of these, bytes of which the kernel did not say that they are on the file's node.
    pub unverified: usize,
}

/// A file that no longer waits.
#[derive(Debug)]
pub(super) struct GivenUp {
    pub node: usize,
    /// Bytes at its beginning that stay; with 0 it goes whole.
    pub keep: usize,
    pub ready: Ready,
}

/// A file that somebody has, until nobody has.
#[derive(Debug)]
pub(super) struct TakenFile {
    /// The server's own descriptor, by which it sees whether others have one. `None` as long as the owner keeps it from being opened.
    pub file: Option<Arc<File>>,
    /// The file's name, which says the rest.
    pub name: String,
    pub size: usize,
    /// On whose account it is.
    pub user: u32,
    /// When it was handed out, in seconds since 1970.
    pub since: u64,
    pub node: usize,
    pub life: Life,
    /// How often it was found larger than it was when it was handed out.
    pub offences: u32,
    /// Whether its taker may still be backing it.
    pub completing: bool,
}

/// How long a taken file stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// It is being handed out.
    Arriving,
    /// As long as a connection is open.
    Connection(u64),
    /// Until nobody has had it open for the time that the settings say; since when that is so.
    Path(Option<u64>),
    /// It is to be its owner's no longer, and goes when nobody has it open any more.
    Going,
}

/// The files that wait on a node, and what its clients ask for.
#[derive(Debug)]
pub(super) struct Node {
    pub demand: Demand,
    pub wanted: Vec<usize>,
    pub waiting: Vec<Ready>,
    pub refill: Refill,
}

impl Node {
    fn new() -> Node {
        Node { demand: Demand::new(), wanted: Vec::new(), waiting: Vec::new(), refill: Refill::default() }
    }

    /// The files that wait, as the policy sees them.
    pub fn stock(&self) -> Vec<Waiting> {
        self.waiting.iter().map(|ready| Waiting { id: ready.id, size: ready.size, filled: ready.filled }).collect()
    }

    /// What is to be done next to the files that wait.
    pub fn next_step(&mut self) -> Step {
        let stock = self.stock();
        self.refill.next(&self.wanted, &stock)
    }

    pub fn filled(&self) -> usize {
        self.waiting.iter().map(|ready| ready.filled).sum()
    }

    /// Of what is filled, bytes of which the kernel did not say that they are on this node.
    pub fn unverified(&self) -> usize {
        self.waiting.iter().map(|ready| ready.unverified).sum()
    }

    /// Takes the waiting file `id` out.
    pub fn remove(&mut self, id: u64) -> Option<Ready> {
        let place = self.waiting.iter().position(|ready| ready.id == id)?;
        Some(self.waiting.swap_remove(place))
    }
}

figures! {
    /// What has been done since the server was started. Times are in nanoseconds.
    #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
    pub struct Counters: Pool, "pagecrew_pool_", [], "counters." {
        takes: u64, Counter Count, "Files that were handed out.";
        handed_out_bytes: u64, Counter Bytes, "Memory that was handed out.";
        handed_out_ready_bytes: u64, Counter Bytes, "The part of it that was ready.";
        refused: u64, Counter Count, "Requests that were refused.";
        released: u64, Counter Count, "Files that their owners have released.";
        filled_bytes: u64, Counter Bytes, "Memory that was filled ahead of time.";
        elsewhere_bytes: u64, Counter Bytes, "Memory that came from another node than it was to be of, and went back.";
        given_back_bytes: u64, Counter Bytes, "Memory that was ready and went back to the machine.";
        cpu_ns key "cpu_seconds": u64, Counter Seconds, "CPU time of the filler.";
    }
}

/// How filling stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    Full,
    Filling,
    /// Why nothing is filled, in words.
    Waiting(String),
}

/// An order that the filler has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Filling {
    /// The file; it may have been handed out meanwhile.
    pub id: u64,
    /// Bytes of it that are being backed.
    pub bytes: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub settings: Settings,
    pub nodes: BTreeMap<usize, Node>,
    pub taken: BTreeMap<u64, TakenFile>,
    pub accounts: Accounts,
    pub condition: Condition,
    pub counters: Counters,
    /// What the filler is at.
    pub filling: Option<Filling>,
    /// When something was handed out the last time.
    pub taken_ns: u64,
}

impl State {
    /// Nothing waits and nothing is taken.
    pub fn new(settings: Settings) -> State {
        let nodes = settings.sizes.keys().map(|&node| (node, Node::new())).collect();
        let mut state = State {
            settings,
            nodes,
            taken: BTreeMap::new(),
            accounts: Accounts::new(),
            condition: Condition::Filling,
            counters: Counters::default(),
            filling: None,
            taken_ns: 0,
        };
        state.plan();
        state
    }

    /// Decides anew which files are to wait: to be called when the settings have changed.
    pub fn plan(&mut self) {
        for (number, node) in &mut self.nodes {
            let size = self.settings.sizes.get(number).copied().unwrap_or(0);
            let files = self.settings.files.get(number).map_or(&[][..], Vec::as_slice);
            node.wanted = node.demand.wanted(files, size);
        }
    }

    /// The same of one node, which was asked for `size` bytes.
    pub fn note_demand(&mut self, number: usize, user: u32, size: usize, now_ns: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.demand.note(user, size, now_ns);
        let files = self.settings.files.get(&number).map_or(&[][..], Vec::as_slice);
        node.wanted = node.demand.wanted(files, self.settings.sizes.get(&number).copied().unwrap_or(0));
    }

    /// The file `id` of `number`'s, if it waits.
    pub fn waiting(&self, number: usize, id: u64) -> Option<&Ready> {
        self.nodes.get(&number)?.waiting.iter().find(|ready| ready.id == id)
    }

    /// Bytes that wait, filled.
    pub fn ready(&self) -> usize {
        self.nodes.values().map(Node::filled).sum()
    }

    /// Bytes that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.taken.values().map(|taken| taken.size).sum()
    }

    /// Bytes that were promised to those who have taken files, and that they have not touched yet.
    pub fn promised(&mut self) -> usize {
        let mut promised = 0;
        for taken in self.taken.values_mut().filter(|taken| taken.completing) {
            let backed =
                taken.file.as_deref().map_or(taken.size, |file| shared_file::backed_bytes(file).unwrap_or(taken.size));
            promised += taken.size.saturating_sub(backed);
            taken.completing = backed < taken.size;
        }
        promised
    }

    /// Bytes that waiting files may still get where no more than `limit` may be in files. What is taken counts whole: whoever has it may
    /// not have touched all of it, or have given a part back to the kernel for a while.
    pub fn room(&self, limit: usize) -> usize {
        let room = limit.saturating_sub(self.taken_bytes() + self.ready());
        room / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE
    }

    /// Takes the waiting file out that the filler is at, if what it is about to get is more than `room` bytes: to be cut to what it has.
    pub fn give_up_filling(&mut self, room: usize) -> Option<GivenUp> {
        let Filling { id, .. } = self.filling.filter(|filling| filling.bytes > room)?;
        let found = self.nodes.iter_mut().find_map(|(&number, node)| Some((number, node.remove(id)?)));
        let (node, ready) = found?;
        self.filling = Some(Filling { id, bytes: 0 });
        Some(GivenUp { node, keep: ready.filled, ready })
    }

    /// The node for a request that names none: the one that has most of it ready, and most besides.
    pub fn best_node(&self, size: usize) -> Option<usize> {
        let value = |node: &Node| {
            let stock = node.stock();
            let chosen = stock::choose(&stock, size).and_then(|id| stock.iter().find(|waiting| waiting.id == id));
            (chosen.map_or(0, |waiting| waiting.filled.min(size)), node.filled())
        };
        // The first of several that are equal.
        let mut best: Option<(usize, (usize, usize))> = None;
        for (&number, node) in &self.nodes {
            let value = value(node);
            if best.is_none_or(|(_, best)| value > best) {
                best = Some((number, value));
            }
        }
        best.map(|(number, _)| number)
    }

    /// Takes the waiting file out that a request of `user`'s is to get, if there is one and enough stays for others.
    pub fn choose(&mut self, number: usize, user: u32, size: usize, now_ns: u64) -> Option<Ready> {
        let kept = self.settings.sizes.get(&number).copied().unwrap_or(0);
        let node = self.nodes.get_mut(&number)?;
        let stock = node.stock();
        let id = stock::choose(&stock, size)?;
        let needs = node.demand.needs_of_others(user, kept, now_ns);
        let ready = if stock::spares(&stock, id, needs) { node.remove(id) } else { None }?;
        node.demand.served(user, ready.filled.min(size), now_ns);
        Some(ready)
    }

    /// Takes out waiting files with `bytes` of filled memory, or all there are, those of the node `last` last.
    pub fn give_up(&mut self, bytes: usize, last: Option<usize>) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        let mut missing = bytes;
        let mut order: Vec<usize> = self.nodes.keys().copied().collect();
        order.sort_by_key(|&node| Some(node) == last);
        for number in order {
            let Some(node) = self.nodes.get_mut(&number).filter(|_| missing > 0) else { continue };
            for (id, keep) in stock::give_up(&node.wanted, &node.stock(), missing) {
                let Some(ready) = node.remove(id) else { continue };
                missing = missing.saturating_sub(ready.filled - keep);
                given_up.push(GivenUp { node: number, keep, ready });
            }
        }
        given_up
    }

    /// Puts a file that is there down to its user, whatever the quota says.
    pub fn adopt(&mut self, found: Found) {
        let Found { name, entry: Entry { id, node, holding }, file, going } = found;
        let Some(Holding { size, user, since, .. }) = holding else { return };
        let file = file.map(Arc::new);
        // The connection that a file was to stay for has ended with the former server.
        let life = if going { Life::Going } else { Life::Path(None) };
        let taken = TakenFile { file, name, size, user, since, node, life, offences: 0, completing: false };
        if let Some(before) = self.taken.insert(id, taken) {
            // Twice the same name, in two places: root has made one of them.
            self.accounts.refund(before.user, before.size);
        }
        self.accounts.put_down(user, size);
    }

    /// Counts a file as `size` bytes of its user's, if that is more than it was counted as.
    pub fn charge_more(&mut self, id: u64, size: usize) {
        if let Some(taken) = self.taken.get_mut(&id).filter(|taken| taken.size < size) {
            self.accounts.refund(taken.user, taken.size);
            self.accounts.put_down(taken.user, size);
            taken.size = size;
        }
    }

    /// Whether the file of this name is known.
    pub fn knows(&self, name: &str) -> bool {
        let entry = Entry::read(name).and_then(|entry| self.taken.get(&entry.id));
        entry.map_or_else(|| self.taken.values().any(|taken| taken.name == name), |taken| taken.name == name)
    }

    /// Takes the entry of a taken file out, which is its user's no longer.
    pub fn forget(&mut self, id: u64) -> Option<TakenFile> {
        let taken = self.taken.remove(&id)?;
        self.accounts.refund(taken.user, taken.size);
        Some(taken)
    }
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub Code, pub String);

#[cfg(test)]
mod tests {
    use super::super::protocol::Until;
    use super::*;
    use proptest::prelude::*;

    fn state(nodes: usize, pages: usize) -> State {
        State::new(Settings {
            sizes: (0..nodes).map(|node| (node, pages * HUGE_PAGE_SIZE)).collect(),
            files: BTreeMap::new(),
            cpu: 1.0,
            floor: 0,
            below_floor: false,
            unused: Duration::ZERO,
            quotas: Quotas::default(),
        })
    }

    fn file() -> Arc<File> {
        Arc::new(File::open("/dev/null").unwrap())
    }

    /// A file of `user`'s, as a former server left it.
    fn found(id: u64, size: usize, user: u32) -> Found {
        let entry = Entry { id, node: 0, holding: Some(Holding { size, user, since: 7, until: Until::Unused }) };
        Found { name: entry.to_string(), entry, file: None, going: false }
    }

    #[test]
    fn a_request_goes_to_the_node_that_has_it_ready() {
        let mut state = state(3, 64);
        let put = |state: &mut State, node: usize, id, size: usize, filled: usize| {
            let ready =
                Ready { id, file: file(), size: size * HUGE_PAGE_SIZE, filled: filled * HUGE_PAGE_SIZE, unverified: 0 };
            state.nodes.get_mut(&node).unwrap().waiting.push(ready);
        };
        assert_eq!(state.best_node(HUGE_PAGE_SIZE), Some(0));
        put(&mut state, 1, 1, 8, 4);
        put(&mut state, 2, 2, 8, 8);
        assert_eq!(state.best_node(8 * HUGE_PAGE_SIZE), Some(2));
        // Of those that have all of it, the one that has most besides.
        put(&mut state, 1, 3, 32, 32);
        assert_eq!(state.best_node(4 * HUGE_PAGE_SIZE), Some(1));
    }

    #[test]
    fn filling_gets_what_nobody_was_promised() {
        const PAGE: usize = HUGE_PAGE_SIZE;
        let mut state = state(1, 64);
        let waiting =
            |id, size, filled| Ready { id, file: file(), size: size * PAGE, filled: filled * PAGE, unverified: 0 };
        state.nodes.get_mut(&0).unwrap().waiting.extend([waiting(1, 16, 4), waiting(2, 8, 8)]);
        assert_eq!(state.room(20 * PAGE), 8 * PAGE);
        // Whoever has a file may touch all of it, whatever is backed now; of any size, where root has made it.
        state.adopt(found(3, 3 * PAGE + 1, 0));
        assert_eq!((state.room(20 * PAGE), state.room(8 * PAGE)), (4 * PAGE, 0));
        // What the filler is about to back is left to it as long as there is room.
        assert!(state.give_up_filling(0).is_none());
        state.filling = Some(Filling { id: 1, bytes: 4 * PAGE });
        assert!(state.give_up_filling(4 * PAGE).is_none());
        let given_up = state.give_up_filling(3 * PAGE).unwrap();
        assert_eq!((given_up.ready.id, given_up.keep), (1, 4 * PAGE));
        // Cut, it can't get more.
        state.nodes.get_mut(&0).unwrap().waiting.push(Ready { size: 4 * PAGE, ..given_up.ready });
        assert!(state.give_up_filling(0).is_none());
        // Of a file that was handed out, its owner gets it.
        state.filling = Some(Filling { id: 3, bytes: PAGE });
        assert!(state.give_up_filling(0).is_none());
    }

    #[derive(Debug, Clone)]
    enum Event {
        Put { node: usize, pages: usize, filled: usize },
        Take { node: usize, user: u32, pages: usize },
        Adopt { id: u64, user: u32, pages: usize },
        ChargeMore { which: usize, pages: usize },
        Forget { which: usize },
        GiveUp { pages: usize, last: usize },
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..2usize, 1..20usize, 0..20usize).prop_map(|(node, pages, filled)| Event::Put {
                node,
                pages,
                filled: filled.min(pages)
            }),
            (0..2usize, 0..3u32, 1..20usize).prop_map(|(node, user, pages)| Event::Take { node, user, pages }),
            (1000..1010u64, 0..3u32, 1..20usize).prop_map(|(id, user, pages)| Event::Adopt { id, user, pages }),
            (any::<usize>(), 1..40usize).prop_map(|(which, pages)| Event::ChargeMore { which, pages }),
            any::<usize>().prop_map(|which| Event::Forget { which }),
            (0..40usize, 0..2usize).prop_map(|(pages, last)| Event::GiveUp { pages, last }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever happens: no file is in two places, each user has on his account what he has taken, and as much is given up as was asked
        /// for.
        #[test]
        fn every_byte_is_on_one_account(events in prop::collection::vec(any_event(), 1..60)) {
            let mut state = state(2, 64);
            let mut next = 0;
            for event in events {
                match event {
                    Event::Put { node, pages, filled } => {
                        next += 1;
                        let (size, filled) = (pages * HUGE_PAGE_SIZE, filled * HUGE_PAGE_SIZE);
                        state.nodes.get_mut(&node).unwrap().waiting.push(Ready { id: next, file: file(), size, filled, unverified: 0 });
                    }
                    Event::Take { node, user, pages } => {
                        let size = pages * HUGE_PAGE_SIZE;
                        state.note_demand(node, user, size, 0);
                        let Some(ready) = state.choose(node, user, size, 0) else { continue };
                        state.accounts.charge(user, size, None).unwrap();
                        let (file, life, name) = (Some(ready.file), Life::Path(None), String::new());
                        let taken = TakenFile { file, name, size, user, since: 7, node, life, offences: 0, completing: false };
                        prop_assert!(state.taken.insert(ready.id, taken).is_none());
                    }
                    Event::Adopt { id, user, pages } => state.adopt(found(id, pages * HUGE_PAGE_SIZE, user)),
                    Event::ChargeMore { which, pages } => {
                        let id = state.taken.keys().nth(which % state.taken.len().max(1)).copied().unwrap_or(0);
                        state.charge_more(id, pages * HUGE_PAGE_SIZE);
                    }
                    Event::Forget { which } => {
                        let id = state.taken.keys().nth(which % state.taken.len().max(1)).copied();
                        prop_assert_eq!(id.and_then(|id| state.forget(id)).is_some(), id.is_some());
                    }
                    Event::GiveUp { pages, last } => {
                        let (ready, bytes) = (state.ready(), pages * HUGE_PAGE_SIZE);
                        let given_up = state.give_up(bytes, Some(last));
                        let given: usize = given_up.iter().map(|given| given.ready.filled - given.keep).sum();
                        prop_assert!(given >= bytes.min(ready) && given <= ready);
                        prop_assert!(given_up.iter().rev().skip(1).all(|given| given.keep == 0));
                        for GivenUp { node, keep, mut ready } in given_up {
                            if keep > 0 {
                                (ready.size, ready.filled) = (keep, keep);
                                state.nodes.get_mut(&node).unwrap().waiting.push(ready);
                            }
                        }
                        prop_assert_eq!(state.ready(), ready - given);
                    }
                }
                let charged: usize = state.accounts.users().map(|(_, bytes, _)| bytes).sum();
                prop_assert_eq!(charged, state.taken_bytes());
                let waiting: Vec<u64> = state.nodes.values().flat_map(Node::stock).map(|file| file.id).collect();
                prop_assert!(waiting.iter().all(|id| !state.taken.contains_key(id)));
            }
        }
    }
}
