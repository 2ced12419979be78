//! What a server knows: the files that wait and those that are taken, who has what, and what was done. Pure: a file is whatever its
//! mechanism knows it by, `F`.

use super::demand::Demand;
use super::ledger::{Entry, Holding};
use super::protocol::Code;
use super::quota::{Accounts, Quotas};
use super::stock::{self, Refill, Step, Waiting};
use crate::stats::figures;
use crate::sys::HUGE_PAGE_SIZE;
use std::collections::{BTreeMap, BTreeSet};
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ready<F> {
    pub id: u64,
    pub file: F,
    pub size: usize,
    /// Bytes from its beginning on that are backed and zero.
    pub filled: usize,
    /// Of these, bytes of which the kernel did not say that they are on the file's node.
    pub unverified: usize,
}

/// A file that no longer waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenUp<F> {
    pub node: usize,
    /// Bytes at its beginning that stay; with 0 it goes whole.
    pub keep: usize,
    pub ready: Ready<F>,
}

/// A file that somebody has, until nobody has.
#[derive(Debug)]
pub(super) struct TakenFile<F> {
    /// The server's own descriptor, by which it sees whether others have one. `None` until it is made, and as long as the owner keeps it from
    /// being opened.
    pub file: Option<F>,
    /// The file's name, which says the rest.
    pub name: String,
    /// Bytes that were handed out.
    pub handed_out: usize,
    /// Bytes that it counts as: what was handed out, and what its owner was seen to have added and has not given back.
    pub size: usize,
    /// On whose account it is.
    pub user: u32,
    /// When it was handed out, in seconds since 1970.
    pub since: u64,
    pub node: usize,
    pub life: Life,
    /// How often it was found larger than it was when it was handed out.
    pub offences: u32,
    /// Bytes of memory in it when it was last looked at.
    pub backed: usize,
    /// Who owned it when it was last looked at and was somebody's: of one account, its user and those who are his in namespaces.
    pub owner: u32,
    pub put_back: PutBack,
    /// Bytes that were promised with it, and that its taker has not touched yet, as far as was seen.
    pub promised: usize,
}

/// A file that somebody has, as it is found.
#[derive(Debug)]
pub(super) struct Found<F> {
    /// Its name, under which it stays.
    pub name: String,
    pub entry: Entry,
    /// `None` where its owner keeps everybody from opening it for the moment, by a lease. The kernel bounds that (`fs.lease-break-time`).
    pub file: Option<F>,
    /// Whether it is no longer its owner's.
    pub going: bool,
}

impl<F> TakenFile<F> {
    /// Whether it is where its name says, and nobody is about to change that or its size.
    pub fn is_settled(&self) -> bool {
        !matches!(self.life, Life::Arriving(_) | Life::Leaving | Life::Emptying)
    }
}

/// Whether a file that was found larger is being put back to its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PutBack {
    No,
    Underway,
    /// That was tried in vain.
    Failed,
}

/// How long a taken file stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// It is being handed out, for as long as this connection is open or until nobody has it open.
    Arriving(Option<u64>),
    /// As long as a connection is open.
    Connection(u64),
    /// Until nobody has had it open for the time that the settings say; since when that is so.
    Path(Option<u64>),
    /// It is being taken from its owner.
    Leaving,
    /// It couldn't be taken from him, which is tried again.
    Unseized,
    /// It is its owner's no longer, and goes when nobody has it open any more.
    Going,
    /// Nobody has it any more, and its memory goes back to the kernel.
    Emptying,
}

/// The files that wait on a node, and what its clients ask for.
#[derive(Debug)]
pub(super) struct Node<F> {
    pub demand: Demand,
    pub wanted: Vec<usize>,
    pub waiting: Vec<Ready<F>>,
    pub refill: Refill,
}

impl<F> Node<F> {
    fn new(most: usize) -> Node<F> {
        Node { demand: Demand::new(most), wanted: Vec::new(), waiting: Vec::new(), refill: Refill::default() }
    }

    /// The files that wait, as the policy sees them.
    pub fn stock(&self) -> Vec<Waiting> {
        self.waiting.iter().map(|ready| Waiting { id: ready.id, size: ready.size, filled: ready.filled }).collect()
    }

    /// What is to be done next to the files that wait.
    pub fn next_step(&mut self) -> Step {
        let stock = self.stock();
        self.refill.next(&self.wanted, self.demand.next(), &stock)
    }

    pub fn filled(&self) -> usize {
        self.waiting.iter().map(|ready| ready.filled).sum()
    }

    /// Of what is filled, bytes of which the kernel did not say that they are on this node.
    pub fn unverified(&self) -> usize {
        self.waiting.iter().map(|ready| ready.unverified).sum()
    }

    /// Takes the waiting file `id` out.
    pub fn remove(&mut self, id: u64) -> Option<Ready<F>> {
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
pub(super) struct State<F> {
    pub settings: Settings,
    pub nodes: BTreeMap<usize, Node<F>>,
    pub taken: BTreeMap<u64, TakenFile<F>>,
    pub accounts: Accounts,
    /// Who was seen to be in groups that have a quota, by the groups' numbers.
    joined: BTreeMap<u32, BTreeSet<u32>>,
    /// Bytes of memory in each user's taken files, when they were last looked at.
    backed: BTreeMap<u32, usize>,
    pub condition: Condition,
    pub counters: Counters,
    /// What the filler is at.
    pub filling: Option<Filling>,
    /// When something was handed out the last time.
    pub taken_ns: u64,
}

impl<F: Clone> State<F> {
    /// Nothing waits and nothing is taken. So many files may wait on each node ([`Demand::new`]).
    pub fn new(settings: Settings, most: usize) -> State<F> {
        let nodes = settings.sizes.keys().map(|&node| (node, Node::new(most))).collect();
        let mut state = State {
            settings,
            nodes,
            taken: BTreeMap::new(),
            accounts: Accounts::new(),
            joined: BTreeMap::new(),
            backed: BTreeMap::new(),
            condition: Condition::Filling,
            counters: Counters::default(),
            filling: None,
            taken_ns: 0,
        };
        state.plan();
        state
    }

    /// Other settings from now on.
    pub fn change(&mut self, settings: Settings) {
        self.settings = settings;
        for (group, members) in std::mem::take(&mut self.joined) {
            members.into_iter().for_each(|account| self.join(account, &[group]));
        }
        self.plan();
    }

    /// The kernel says that `account` is in `groups`: what it takes counts for them, whatever was known of their members when the settings were
    /// read. It may have become one since, or is listed where only the system's login looks.
    pub fn join(&mut self, account: u32, groups: &[u32]) {
        if account == 0 {
            return;
        }
        for group in groups {
            if let Some(quota) = self.settings.quotas.groups.get_mut(group)
                && quota.members.insert(account)
            {
                self.joined.entry(*group).or_default().insert(account);
            }
        }
    }

    /// Decides anew which files are to wait: to be called when sizes or files have changed.
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
    pub fn waiting(&self, number: usize, id: u64) -> Option<&Ready<F>> {
        self.nodes.get(&number)?.waiting.iter().find(|ready| ready.id == id)
    }

    /// Bytes that wait, filled.
    pub fn ready(&self) -> usize {
        self.nodes.values().map(Node::filled).sum()
    }

    /// Bytes that waiting files get from what the filler is at.
    pub fn being_filled(&self) -> usize {
        let waits = |id: u64| self.nodes.values().any(|node| node.waiting.iter().any(|ready| ready.id == id));
        self.filling.filter(|filling| waits(filling.id)).map_or(0, |filling| filling.bytes)
    }

    /// Bytes that a waiting file has, with those that the filler is at.
    pub fn filled_soon(&self, ready: &Ready<F>) -> usize {
        ready.filled + self.filling.filter(|filling| filling.id == ready.id).map_or(0, |filling| filling.bytes)
    }

    /// Bytes that are taken.
    pub fn taken_bytes(&self) -> usize {
        self.taken.values().map(|taken| taken.size).sum()
    }

    /// Of these, what counts against the pool's limit ([`Accounts::shared`]).
    pub fn shared_bytes(&self) -> usize {
        self.accounts.shared_by_all()
    }

    /// Bytes that were promised to those who have taken files, and that they have not touched yet.
    pub fn promised(&self) -> usize {
        self.taken.values().map(|taken| taken.promised).sum()
    }

    /// The taken files of which it is to be seen how much of what was promised is touched by now.
    pub fn completing(&self) -> Vec<(u64, F)> {
        let completing = self.taken.iter().filter(|(_, taken)| taken.promised > 0);
        completing.filter_map(|(&id, taken)| Some((id, taken.file.clone()?))).collect()
    }

    /// Notes how much of taken files was backed a moment ago.
    pub fn note_backed(&mut self, backed: &[(u64, usize)]) {
        for (id, backed) in backed {
            if let Some(taken) = self.taken.get_mut(id) {
                // What was touched once is nobody's promise any more.
                taken.promised = taken.promised.min(taken.size.saturating_sub(*backed));
            }
        }
    }

    /// Bytes that waiting files may still get where no more than `limit` may be in files. What is taken counts whole: whoever has it may
    /// not have touched all of it, or have given a part back to the kernel for a while.
    pub fn room(&self, limit: usize) -> usize {
        let room = limit.saturating_sub(self.shared_bytes() + self.ready());
        room / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE
    }

    /// Takes the waiting file out that the filler is at, if what it is about to get is more than `room` bytes: to be cut to what it has.
    pub fn give_up_filling(&mut self, room: usize) -> Option<GivenUp<F>> {
        let Filling { id, .. } = self.filling.filter(|filling| filling.bytes > room)?;
        let found = self.nodes.iter_mut().find_map(|(&number, node)| Some((number, node.remove(id)?)));
        let (node, ready) = found?;
        self.filling = Some(Filling { id, bytes: 0 });
        Some(GivenUp { node, keep: ready.filled, ready })
    }

    /// The node for a request that names none: the one that has most of it ready, and most besides.
    pub fn best_node(&self, size: usize) -> Option<usize> {
        let value = |node: &Node<F>| {
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

    /// The waiting file that a request of `user`'s is to get, if there is one and enough stays for others.
    pub fn choose(&self, number: usize, user: u32, size: usize, now_ns: u64) -> Option<&Ready<F>> {
        let kept = self.settings.sizes.get(&number).copied().unwrap_or(0);
        let node = self.nodes.get(&number)?;
        let stock = node.stock();
        let id = stock::choose(&stock, size)?;
        let needs = node.demand.needs_of_others(user, kept, now_ns);
        stock::spares(&stock, id, needs).then(|| node.waiting.iter().find(|ready| ready.id == id))?
    }

    /// Takes out waiting files with `bytes` of filled memory, or all there are, those of the node `last` last.
    pub fn give_up(&mut self, bytes: usize, last: Option<usize>) -> Vec<GivenUp<F>> {
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
    pub fn adopt(&mut self, found: Found<F>) {
        let Found { name, entry: Entry { id, node, holding }, file, going } = found;
        let Some(Holding { size, user, since, .. }) = holding else { return };
        // The connection that a file was to stay for has ended with the former server.
        let life = if going { Life::Going } else { Life::Path(None) };
        let taken = TakenFile {
            file,
            name,
            handed_out: size,
            size,
            user,
            since,
            node,
            life,
            offences: 0,
            backed: 0,
            owner: user,
            put_back: PutBack::No,
            // How much of it is touched is seen before anybody else is promised anything.
            promised: if going { 0 } else { size },
        };
        // Twice the same number: root has made one of them.
        self.forget(id);
        self.taken.insert(id, taken);
        self.accounts.put_down(user, size);
    }

    /// Counts a file as `size` bytes of its user's, if that is more than it was counted as.
    pub fn charge_more(&mut self, id: u64, size: usize) {
        if self.taken.get(&id).is_some_and(|taken| taken.size < size) {
            self.charge(id, size);
        }
    }

    /// Counts a file as `size` bytes of its user's.
    pub fn charge(&mut self, id: u64, size: usize) {
        if let Some(taken) = self.taken.get_mut(&id) {
            let added = |size: usize| size.saturating_sub(taken.handed_out);
            self.accounts.added(taken.user, added(taken.size), added(size));
            taken.size = size.max(taken.handed_out);
        }
    }

    /// Notes that a taken file has so much memory.
    pub fn note_memory(&mut self, id: u64, backed: usize) {
        let Some(taken) = self.taken.get_mut(&id) else { return };
        let sum = self.backed.entry(taken.user).or_default();
        *sum = (*sum - taken.backed).saturating_add(backed);
        taken.backed = backed;
    }

    /// Whether a user's files have more memory than was handed out with all of them, as far as was seen.
    pub fn is_beyond(&self, user: u32) -> bool {
        self.backed.get(&user).is_some_and(|&backed| backed > self.accounts.bytes(user))
    }

    /// Whether the file of this name is known.
    pub fn knows(&self, name: &str) -> bool {
        let entry = Entry::read(name).and_then(|entry| self.taken.get(&entry.id));
        entry.map_or_else(|| self.taken.values().any(|taken| taken.name == name), |taken| taken.name == name)
    }

    /// Takes the entry of a taken file out, which is its user's no longer.
    pub fn forget(&mut self, id: u64) -> Option<TakenFile<F>> {
        self.note_memory(id, 0);
        self.charge(id, 0);
        let taken = self.taken.remove(&id)?;
        if self.backed.get(&taken.user) == Some(&0) {
            self.backed.remove(&taken.user);
        }
        self.accounts.refund(taken.user, taken.size);
        Some(taken)
    }
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub Code, pub String);

#[cfg(test)]
impl Settings {
    /// So much on each node, and no bounds.
    pub fn plain(sizes: BTreeMap<usize, usize>) -> Settings {
        Settings {
            sizes,
            files: BTreeMap::new(),
            cpu: 1.0,
            floor: 0,
            below_floor: false,
            unused: Duration::ZERO,
            quotas: Quotas::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Until;
    use super::super::quota::GroupQuota;
    use super::*;

    fn state(nodes: usize, pages: usize) -> State<()> {
        State::new(Settings::plain((0..nodes).map(|node| (node, pages * HUGE_PAGE_SIZE)).collect()), 64)
    }

    /// A file of `user`'s, as a former server left it.
    fn found(id: u64, size: usize, user: u32) -> Found<()> {
        let entry = Entry { id, node: 0, holding: Some(Holding { size, user, since: 7, until: Until::Unused }) };
        Found { name: entry.to_string(), entry, file: None, going: false }
    }

    #[test]
    fn who_is_seen_in_a_group_shares_its_quota_after_a_reload_as_well() {
        const PAGE: usize = HUGE_PAGE_SIZE;
        let with_groups = |members: &[u32]| {
            let quota = GroupQuota { most: 6 * PAGE, members: members.iter().copied().collect() };
            let quotas = Quotas { groups: [(36, quota)].into(), ..Quotas::default() };
            Settings { quotas, ..Settings::plain(BTreeMap::from([(0, 0)])) }
        };
        let mut state: State<u32> = State::new(with_groups(&[7]), 64);
        let charge = |state: &mut State<u32>, user, pages: usize| {
            let State { settings, accounts, .. } = state;
            settings.quotas.charge(accounts, user, pages * PAGE).is_ok()
        };
        assert!(charge(&mut state, 7, 4));
        state.join(8, &[4, 36]);
        state.join(0, &[36]);
        assert!(!charge(&mut state, 8, 3) && charge(&mut state, 0, 9));
        state.change(with_groups(&[7]));
        assert!(!charge(&mut state, 8, 3) && charge(&mut state, 8, 2));
        state.change(Settings::plain(BTreeMap::from([(0, 0)])));
        assert!(charge(&mut state, 8, 9));
    }

    #[test]
    fn a_request_goes_to_the_node_that_has_it_ready() {
        let mut state = state(3, 64);
        let put = |state: &mut State<()>, node: usize, id, size: usize, filled: usize| {
            let ready =
                Ready { id, file: (), size: size * HUGE_PAGE_SIZE, filled: filled * HUGE_PAGE_SIZE, unverified: 0 };
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
            |id, size, filled| Ready { id, file: (), size: size * PAGE, filled: filled * PAGE, unverified: 0 };
        state.nodes.get_mut(&0).unwrap().waiting.extend([waiting(1, 16, 4), waiting(2, 8, 8)]);
        assert_eq!(state.room(20 * PAGE), 8 * PAGE);
        // Whoever has a file may touch all of it, whatever is backed now; of any size, where root has made it.
        state.adopt(found(3, 3 * PAGE + 1, 0));
        assert_eq!((state.room(20 * PAGE), state.room(8 * PAGE)), (4 * PAGE, 0));
        // What the filler is about to back is left to it as long as there is room.
        assert!(state.give_up_filling(0).is_none());
        state.filling = Some(Filling { id: 1, bytes: 4 * PAGE });
        let soon = state.nodes[&0].waiting.iter().map(|ready| state.filled_soon(ready) / PAGE);
        assert_eq!(soon.collect::<Vec<_>>(), [8, 8]);
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
}
