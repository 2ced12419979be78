//! The server: what clients ask is taken in by the front, and done here; what is to be kept ready, by the keeper.

use super::broker::{Action, Asker, Broker, Event, Handing, Now, Offenders, Survey, Wish, spread};
use super::capacity::Capacity;
use super::errands::Errands;
use super::error::Error;
use super::front::{Connection, Front};
use super::gate;
use super::keeper::Keeper;
use super::ledger::Entry;
use super::options::{Options, Sizes};
use super::protocol::{Answer, Code, REQUEST_MOST, Request};
use super::quota::Subordinates;
use super::state::{Condition, Life, Ready, Refusal, Settings, State, TakenFile};
use super::status::{Facts, Status};
use super::store::{self, Left, Store, Waiting};
use crate::control::arbiter;
use crate::stats;
use crate::sys::closing::LowNumbers;
use crate::sys::mount::MemoryFs;
use crate::sys::sched::{self, Class};
use crate::sys::seqpacket::Socket;
use crate::sys::stranger::Listener;
use crate::sys::{Errno, HUGE_PAGE_SIZE, cgroup, clock, process, procfs, shared_file, topology};
use crate::units::Bytes;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::{File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the threads of a server share.
pub(super) struct Shared {
    pub store: Store,
    pub directory: PathBuf,
    pub capacity: Capacity,
    /// Whether the machine has nodes to choose from.
    pub several_nodes: bool,
    broker: Mutex<Broker<Arc<File>>>,
    pub errands: Errands<Done>,
    /// Those that go on when an errand is done, by number.
    tasks: Mutex<(u64, HashMap<u64, Task>)>,
    /// The keeper sleeps on it.
    wake: OwnedFd,
    /// See [`Shared::total`].
    total: AtomicU64,
    /// See [`Shared::group_decides`].
    group_decides: AtomicBool,
    pub stop: AtomicBool,
    /// The filler's process, or 0.
    pub filler: AtomicI32,
    pub tell: Tell,
}

/// How a server says things, from any thread and in the middle of its work: nobody may keep it waiting.
#[derive(Debug, Clone, Copy)]
pub struct Tell {
    /// What an operator may want to know, a line at a time.
    pub log: fn(&str),
    /// How the pool stands, in a few words, whenever a look at the machine finds that this has changed: every 250 ms while it is filled,
    /// and once a second at rest.
    pub standing: fn(&str),
}

/// What came of actions for whoever caused them.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub answer: Option<Answer>,
    /// What goes with the answer.
    pub file: Option<File>,
    /// Why filling is to be left for a moment.
    pub hold: Option<String>,
}

/// Actions that are done for a client, or that nobody waits for.
#[derive(Default)]
pub(super) struct Task {
    actions: VecDeque<Action<Arc<File>>>,
    outcome: Outcome,
    client: Option<Arc<Connection>>,
}

/// What an errand has come to, and the number of the client's task that goes on with it.
pub(super) type Done = (Event<Arc<File>>, Option<u64>);

/// What a client is answered, and what goes with the answer.
pub(super) struct Reply {
    pub client: Arc<Connection>,
    pub answer: Answer,
    pub file: Option<File>,
}

/// So long a server that stops waits for what users may hold up.
const PATIENCE: Duration = Duration::from_millis(100);

/// How far a pool is filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are ready.
    pub ready: usize,
    /// Bytes that are to be.
    pub size: usize,
    /// Why nothing is filled, in words.
    pub waiting: Option<String>,
}

/// Says how a pool stands, from any thread. It is to be dropped before the server is stopped: it keeps the pool's directory locked.
pub struct Observer(Arc<Shared>);

impl Observer {
    /// How the pool stands now.
    pub fn status(&self) -> Status {
        self.0.status(None)
    }
}

/// A pool that is served until it is stopped.
pub struct Server {
    shared: Arc<Shared>,
    socket: PathBuf,
    front: Option<Front>,
    keeper: Option<JoinHandle<()>>,
}

impl Shared {
    /// The books; whoever panicked with them has left nothing half done.
    pub fn broker(&self) -> MutexGuard<'_, Broker<Arc<File>>> {
        self.broker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the keeper look at once.
    pub fn wake_keeper(&self) {
        // Full is awake enough.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub fn wake(&self) -> &OwnedFd {
        &self.wake
    }

    /// Memory that files of this pool could still get, in bytes.
    pub fn available(&self) -> u64 {
        match self.store.kind() {
            // Of a mount that was made with a smaller limit, that one counts: it can't be changed.
            MemoryFs::Hugetlbfs => {
                let free = store::reserved_pages().map_or(0, |pages| (pages.free * HUGE_PAGE_SIZE) as u64);
                free.min(self.room())
            }
            MemoryFs::Tmpfs => {
                let machine = procfs::memory_info().map_or(u64::MAX, |memory| {
                    self.total.store(memory.total, Ordering::Relaxed);
                    arbiter::available(&memory, stats::read_ahead(), clock::now_ns())
                });
                let group = cgroup::memory().map_or(u64::MAX, |group| group.limit.saturating_sub(group.used));
                self.group_decides.store(group < machine, Ordering::Relaxed);
                machine.min(group)
            }
        }
    }

    /// Whether it was the limit on this process's group that said what is [available](Shared::available), when that was last asked.
    pub fn group_decides(&self) -> bool {
        self.group_decides.load(Ordering::Relaxed)
    }

    /// Memory of the machine, as it was when it was last asked what is [available](Shared::available). Some may be added.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Bytes that the mount has room for. What users have added to their files is nobody else's for the moment, however much the machine has.
    fn room(&self) -> u64 {
        let facts = self.mount_facts().filter(|facts| facts.f_blocks > 0);
        facts.map_or(u64::MAX, |facts| facts.f_bfree.saturating_mul(facts.f_frsize))
    }

    /// The number of `node`, if the machine has several.
    pub fn node(&self, node: usize) -> Option<usize> {
        self.several_nodes.then_some(node)
    }

    /// How it stands now; with `viewer`, of users and their files only what is his.
    fn status(&self, viewer: Option<u32>) -> Status {
        let available = self.available();
        let (backing, directory) = (self.store.kind().name(), self.directory.clone());
        let broker = self.broker();
        Status::new(&broker.state, Facts { backing, directory, limit: broker.limit, available }, viewer)
    }

    /// Notes how much of what was promised is touched by now, and says what memory could be had. With the books locked, so that nothing is
    /// promised twice in between; and in this order: what is touched meanwhile counts twice rather than never.
    pub fn survey(&self, state: &mut State<Arc<File>>) -> u64 {
        let backed = |(id, file): &(u64, Arc<File>)| Some((*id, shared_file::backed_bytes(file).ok()?));
        let backed: Vec<(u64, usize)> = state.completing().iter().filter_map(backed).collect();
        state.note_backed(&backed);
        self.available() + self.set_apart(state)
    }

    /// Bytes that the kernel has set apart for taken files: on hugetlbfs it does that as soon as they are mapped, and of these nobody else can have
    /// any; but they were promised already.
    fn set_apart(&self, state: &State<Arc<File>>) -> u64 {
        let MemoryFs::Hugetlbfs = self.store.kind() else { return 0 };
        let Some(facts) = self.mount_facts() else { return 0 };
        let in_mount = (facts.f_blocks.saturating_sub(facts.f_bfree) * facts.f_frsize) as usize;
        let promised = state.promised();
        // What a former server has filled is there before this one has looked at it.
        let waiting = state.nodes.values().flat_map(|node| &node.waiting);
        let of = |ready: &Ready<Arc<File>>| {
            shared_file::backed_bytes(&ready.file).unwrap_or(0).max(state.filled_soon(ready))
        };
        let there = waiting.map(of).sum::<usize>() + state.taken_bytes().saturating_sub(promised);
        in_mount.saturating_sub(there).min(promised) as u64
    }

    fn mount_facts(&self) -> Option<rustix::fs::StatVfs> {
        rustix::fs::statvfs(self.store.mount()).ok()
    }

    /// Does what is to be done about `event`.
    pub fn happened(&self, event: Event<Arc<File>>) -> Outcome {
        let actions = self.broker().handle(event, now());
        self.perform(actions)
    }

    /// Performs `actions`, and what follows from each before the next one. What comes of errands is seen to later ([`Shared::go_on`]).
    pub fn perform(&self, actions: Vec<Action<Arc<File>>>) -> Outcome {
        let task = Task { actions: actions.into(), ..Task::default() };
        self.do_all(task).map(|task| task.outcome).unwrap_or_default()
    }

    /// Does what is left of a task. `None` where a client's goes on when an errand is done: whatever his file's owner holds up, no thread
    /// waits for it.
    fn do_all(&self, mut task: Task) -> Option<Task> {
        while let Some(action) = task.actions.pop_front() {
            let (owner, refused, errand): (_, _, Box<dyn FnOnce() -> Event<Arc<File>> + Send>) = match action {
                Action::Seize { owner, id, name } => {
                    let path = self.store.taken_path(&name);
                    (owner, Event::Seized(id, false), Box::new(move || Event::Seized(id, store::seize(&path))))
                }
                Action::Shrink { owner, id, name, size } => {
                    let path = self.store.taken_path(&name);
                    (owner, Event::Shrunk(id, false), Box::new(move || Event::Shrunk(id, store::shrink(&path, size))))
                }
                Action::TakeBack { owner, id, name } => {
                    let path = self.store.taken_path(&name);
                    let take_back = move || Event::TakenBack(id, store::take_back(&path));
                    (owner, Event::TakenBack(id, false), Box::new(take_back))
                }
                action => {
                    let follow = self.perform_one(action, &mut task.outcome);
                    follow.into_iter().rev().for_each(|action| task.actions.push_front(action));
                    continue;
                }
            };
            let number = task.client.is_some().then(|| self.put_off(std::mem::take(&mut task)));
            let account = self.broker().state.settings.quotas.subordinates.account_of(owner);
            if self.errands.run(account, owner, move || (errand(), number)) {
                if number.is_some() {
                    return None;
                }
                continue;
            }
            if let Some(put_off) = number.and_then(|number| self.take_up(number)) {
                task = put_off;
            }
            let follow = self.broker().handle(refused, now());
            follow.into_iter().rev().for_each(|action| task.actions.push_front(action));
        }
        Some(task)
    }

    /// Keeps a task until an errand is done. Returns its number.
    fn put_off(&self, task: Task) -> u64 {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.0 += 1;
        let number = tasks.0;
        tasks.1.insert(number, task);
        number
    }

    /// Takes out a task that was put off.
    fn take_up(&self, number: u64) -> Option<Task> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&number)
    }

    /// Goes on with what an errand was for. Returns the answer that a client gets now, if any.
    pub fn go_on(&self, (event, task): Done) -> Option<Reply> {
        let actions = self.broker().handle(event, now());
        let Some(mut task) = task.and_then(|number| self.take_up(number)) else {
            self.perform(actions);
            return None;
        };
        actions.into_iter().rev().for_each(|action| task.actions.push_front(action));
        self.do_all(task).and_then(|task| self.reply(task))
    }

    /// What the client of a task that is done is answered.
    fn reply(&self, task: Task) -> Option<Reply> {
        let Outcome { answer, file, .. } = task.outcome;
        let none = || Answer::Error { code: Code::Failed, message: "there is no answer to that".into() };
        let (answer, file) = (answer.unwrap_or_else(none), file);
        if matches!(answer, Answer::Error { .. }) {
            self.broker().state.counters.refused += 1;
        }
        Some(Reply { client: task.client?, answer, file })
    }

    /// Performs an action. Returns what follows from what came of it.
    fn perform_one(&self, action: Action<Arc<File>>, outcome: &mut Outcome) -> Vec<Action<Arc<File>>> {
        let event = match action {
            Action::Survey(wish) => {
                let id = match self.store.new_id() {
                    Ok(id) => id,
                    Err(error) => return vec![Action::Refuse(Refusal(Code::Failed, error.to_string()))],
                };
                let mut broker = self.broker();
                let available = self.survey(&mut broker.state);
                // Of reserved pages, the former counts that.
                let room = if broker.reserved { u64::MAX } else { self.room() };
                return broker.handle(Event::Take(wish, Some(Survey { available, room, id })), now());
            }
            Action::Cut(given_up) => {
                // Cut first, even if it goes whole: the filler may have it, and could go on filling what is behind the end.
                let cut = self.store.resize(&given_up.ready.file, given_up.keep, None);
                Some(Event::Cut(given_up, cut.is_ok()))
            }
            Action::Resize { node, mut ready, size } => match self.store.resize(&ready.file, size, self.node(node)) {
                Ok(()) => {
                    (ready.size, ready.filled) = (size, ready.filled.min(size));
                    ready.unverified = ready.unverified.min(ready.filled);
                    Some(Event::Waits(node, ready))
                }
                Err(error) => Some(Event::NotResized(node, ready, error.to_string())),
            },
            Action::Make { node, size } => {
                let create = |id| Ok((id, self.store.create(id, size, node, self.several_nodes)?));
                match self.store.new_id().and_then(create) {
                    Ok((id, file)) => {
                        Some(Event::Waits(node, Ready { id, file: Arc::new(file), size, filled: 0, unverified: 0 }))
                    }
                    Err(error) => {
                        outcome.hold = Some(error.to_string());
                        None
                    }
                }
            }
            Action::CutBehind { node, ready } => {
                if shared_file::backed_bytes(&ready.file).is_ok_and(|backed| backed > ready.filled) {
                    let _ = shared_file::punch(&ready.file, ready.filled, ready.size - ready.filled);
                }
                Some(Event::Waits(node, ready))
            }
            Action::Remove { id, node } => {
                self.store.remove_ready(id, node);
                None
            }
            Action::Close(file) => {
                // Where root has removed its name by hand, nobody else empties it. Somebody may keep it (`O_PATH`).
                if file.metadata().is_ok_and(|facts| facts.nlink() == 0) {
                    let _ = file.set_len(0);
                }
                None
            }
            Action::Boost => {
                let _ = sched::set_class(self.filler.load(Ordering::Relaxed), Class::Normal);
                None
            }
            Action::HandOut(handing) => Some(self.hand_out(handing, outcome)),
            // Errands, which whoever calls this sees to.
            Action::Seize { .. } | Action::Shrink { .. } | Action::TakeBack { .. } => None,
            Action::AskIfUnused { id, file } => {
                shared_file::unused_by_others(&file).unwrap_or(false).then_some(Event::Unused(id))
            }
            Action::Give { name, node, size, ready } => {
                let path = self.store.taken_path(&name).to_string_lossy().into_owned();
                let backing = self.store.kind().into();
                outcome.answer = Some(Answer::Taken { size, ready, node, backing, path });
                None
            }
            Action::Released(size) => {
                outcome.answer = Some(Answer::Released { size });
                None
            }
            Action::Resized(size) => {
                outcome.answer = Some(Answer::Resized { size });
                None
            }
            Action::Refuse(Refusal(code, message)) => {
                outcome.file = None;
                outcome.answer = Some(Answer::Error { code, message });
                None
            }
            Action::Hold(why) => {
                outcome.hold = Some(why);
                None
            }
            Action::Log(line) => {
                (self.tell.log)(&line);
                None
            }
        };
        event.map_or_else(Vec::new, |event| self.broker().handle(event, now()))
    }

    /// Makes a file its client's.
    fn hand_out(&self, mut handing: Handing<Arc<File>>, outcome: &mut Outcome) -> Event<Arc<File>> {
        let Handing { entry, size, .. } = handing;
        let own = match &handing.file {
            Some(file) if handing.fits => Ok(file.clone()),
            Some(file) => self.store.resize(file, size, self.node(entry.node)).map(|()| file.clone()),
            None => self.store.create(entry.id, size, entry.node, self.several_nodes).map(Arc::new),
        };
        let handed = own.and_then(|own| {
            handing.file = Some(own);
            self.store.hand_out(&entry, &entry.to_string(), handing.peer)
        });
        match handed {
            Ok(file) => {
                outcome.file = Some(file);
                Event::HandedOut(handing)
            }
            Err(error) => Event::NotHandedOut(handing, error.to_string()),
        }
    }

    /// Does what `bytes` ask for, if these are a request; `None` were too many. Returns the answer, unless the client gets it later
    /// ([`Shared::go_on`]).
    pub fn request(&self, bytes: Option<&[u8]>, client: &Arc<Connection>) -> Option<Reply> {
        let refused = |message: String| Answer::Error { code: Code::BadRequest, message };
        let request = match bytes {
            None => Err(refused(format!("a request has no more than {REQUEST_MOST} bytes"))),
            Some(bytes) => Request::read(bytes).map_err(|error| refused(error.to_string())),
        };
        let mut task = Task { client: Some(client.clone()), ..Task::default() };
        match request.map(|request| self.begin(request, client)) {
            Ok(Ok(event)) => task.actions = self.broker().handle(event, now()).into(),
            Ok(Err(answer)) | Err(answer) => task.outcome.answer = Some(answer),
        }
        self.do_all(task).and_then(|task| self.reply(task))
    }

    /// What a request of somebody who is connected is to the broker, or the answer.
    fn begin(&self, request: Request, connection: &Connection) -> Result<Event<Arc<File>>, Answer> {
        let Connection { number, peer, .. } = *connection;
        // As it is now: since he has connected, he may have been made somebody's.
        let account = self.broker().state.settings.quotas.subordinates.account_of(peer.user);
        let asker = Asker { connection: number, peer, account };
        match request {
            Request::Take { size, node, until } => {
                let with_quotas = self.broker().state.settings.quotas.groups.keys().copied().collect();
                let groups = connection.is_in(with_quotas);
                self.broker().state.join(account, &groups);
                Ok(Event::Take(Wish { asker, size, node, until }, None))
            }
            Request::Release { path } => match self.store.taken_name(Path::new(&path)) {
                Some(name) => Ok(Event::Release(asker, name.to_owned(), self.store.owner(name))),
                None => {
                    let message = format!("{path} is not a file that is taken from this pool");
                    Err(Answer::Error { code: Code::NotFound, message })
                }
            },
            Request::Resize { size, node } => Ok(Event::Resize { peer, size, node }),
            Request::Status { from } => {
                let all = peer.user == 0 || peer.user == store::own_user();
                Err(Answer::Status { json: self.status((!all).then_some(account)).json(from) })
            }
        }
    }

    /// Takes back what nobody has heard of.
    pub fn unheard(&self, answer: &Answer) {
        if let Answer::Taken { path, .. } = answer
            && let Some(entry) = self.store.taken_name(Path::new(path)).and_then(Entry::read)
        {
            self.happened(Event::Unheard(entry.id));
            self.wake_keeper();
        }
    }

    /// Waits a moment for errands that are under way, and for those that follow from them. Returns what clients are answered.
    pub fn settle(&self) -> Vec<Reply> {
        let until = Instant::now() + PATIENCE;
        let mut replies = Vec::new();
        loop {
            self.errands.settle(until.saturating_duration_since(Instant::now()));
            let done: Vec<Done> = std::iter::from_fn(|| self.errands.next_done()).collect();
            if done.is_empty() {
                return replies;
            }
            replies.extend(done.into_iter().filter_map(|done| self.go_on(done)));
        }
    }

    /// Takes back what nobody has any more, where the errands for that have not come to it.
    fn empty_the_rest(&self) {
        let emptying = |(&id, taken): (&u64, &TakenFile<Arc<File>>)| {
            (taken.life == Life::Emptying).then(|| (id, self.store.taken_path(&taken.name)))
        };
        let emptying: Vec<_> = self.broker().state.taken.iter().filter_map(emptying).collect();
        for (id, path) in emptying {
            self.happened(Event::TakenBack(id, store::take_back(&path)));
        }
    }

    /// The connections that hold something.
    pub fn holding(&self) -> HashSet<u64> {
        let of =
            |taken: &TakenFile<_>| if let Life::Connection(connection) = taken.life { Some(connection) } else { None };
        self.broker().state.taken.values().filter_map(of).collect()
    }

    /// Takes back what a connection has held that its client has left.
    pub fn left(&self, connection: u64) {
        self.happened(Event::Left(connection));
        self.wake_keeper();
    }
}

fn now() -> Now {
    Now { ns: clock::now_ns(), since_1970: clock::since_1970() }
}

/// `files` shared out among `nodes`.
fn spread_files(files: &[(usize, usize)], nodes: &[usize]) -> BTreeMap<usize, Vec<(usize, usize)>> {
    let mut result: BTreeMap<usize, Vec<(usize, usize)>> = nodes.iter().map(|&node| (node, Vec::new())).collect();
    let mut next = nodes.iter().cycle();
    for &(size, count) in files {
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        (0..count).filter_map(|_| next.next()).for_each(|&node| *counts.entry(node).or_default() += 1);
        for (node, count) in counts {
            result.entry(node).or_default().push((size, count));
        }
    }
    result
}

/// The settings out of the options, for a machine with memory on `nodes`.
fn settings(options: &Options, nodes: &[usize], total: u64) -> Result<Settings, Error> {
    let odd = |size: usize| !size.is_multiple_of(HUGE_PAGE_SIZE);
    let sizes = match &options.sizes {
        Sizes::Total(size) if odd(*size) => return Err(Error::Size(*size)),
        Sizes::Total(size) => spread(*size, nodes),
        Sizes::Nodes(sizes) => {
            if let Some((&node, _)) = sizes.iter().find(|(node, _)| !nodes.contains(node)) {
                return Err(Error::no_such_node(node, nodes));
            }
            if let Some(&size) = sizes.values().find(|&&size| odd(size)) {
                return Err(Error::Size(size));
            }
            nodes.iter().map(|node| (*node, sizes.get(node).copied().unwrap_or(0))).collect()
        }
    };
    if let Some(&(size, _)) = options.files.iter().find(|(size, _)| *size == 0 || odd(*size)) {
        return Err(Error::Size(size));
    }
    Ok(Settings {
        sizes,
        files: spread_files(&options.files, nodes),
        cpu: options.cpu,
        floor: options.floor.map_or_else(|| gate::default_floor(total), |floor| floor as u64),
        below_floor: options.below_floor,
        unused: options.unused,
        quotas: options.quotas.clone(),
    })
}

impl Server {
    /// Takes possession of the directory, takes over what a former server left there, and serves. Says by `tell` what there is to say.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn start(options: Options, tell: Tell) -> Result<Server, Error> {
        let memory = procfs::memory_info().map_err(Error::system("reading", Path::new("/proc/meminfo")))?;
        let nodes = topology::nodes_with_memory();
        let settings = settings(&options, &nodes, memory.total)?;
        let limit = options.limit.unwrap_or(memory.total as usize) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
        // Before there are files, which have their numbers for long.
        let low = LowNumbers::hold();
        let (store, left) = Store::open(&options.directory, options.backing, limit)?;
        let capacity = Capacity::of(process::raise_descriptor_limit());
        let reserved = store.kind() == MemoryFs::Hugetlbfs;
        let own_user = store::own_user();
        let mut broker = Broker {
            state: State::new(settings, capacity.wait_on_each(nodes.len())),
            limit,
            capacity,
            reserved,
            own_user,
            offenders: Offenders::default(),
        };
        let nothing_left = left.ready.is_empty() && left.taken.is_empty();
        adopt(&mut broker.state, left, &store);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("making an event descriptor for", &options.directory))?;
        let (listener, socket) = listen(&options, low).inspect_err(|_| {
            // A server that is none leaves nothing but what it has found.
            if nothing_left {
                let _ = store.close();
            }
        })?;
        let taken = broker.state.taken.len();
        let shared = Arc::new(Shared {
            store,
            directory: options.directory,
            capacity,
            several_nodes: nodes.len() > 1,
            broker: Mutex::new(broker),
            errands: Errands::new(),
            tasks: Mutex::default(),
            wake,
            total: AtomicU64::new(memory.total),
            group_decides: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            filler: AtomicI32::new(0),
            tell,
        });
        let size: usize = shared.broker().state.settings.sizes.values().sum();
        let log = tell.log;
        log(&format!(
            "{} are to be kept ready at {} ({}), socket {}",
            Bytes(size as u64),
            shared.store.mount().display(),
            shared.store.kind().name(),
            options.socket.display()
        ));
        match taken {
            0 => {}
            1 => log("1 file of a former server is still taken"),
            _ => log(&format!("{taken} files of a former server are still taken")),
        }
        let thread = |error: Errno| Error::system("starting a thread for", &shared.directory)(error);
        let mut server = Server { shared: shared.clone(), socket, front: None, keeper: None };
        let keeper = Keeper::new(shared.clone(), options.filler);
        let keeper = std::thread::Builder::new().name("pool-keeper".into()).spawn(move || keeper.run());
        server.keeper = Some(keeper.map_err(Errno::from).map_err(thread)?);
        server.front = Some(Front::start(shared.clone(), listener).map_err(thread)?);
        Ok(server)
    }

    /// Changes what can change while it is served: sizes, files, CPU, floor, the time that a file may be unused, quotas.
    ///
    /// # Errors
    /// If a size or a node makes no sense; then nothing changes.
    pub fn reconfigure(&self, options: &Options) -> Result<(), Error> {
        let memory = procfs::memory_info().map_err(Error::system("reading", Path::new("/proc/meminfo")))?;
        let settings = settings(options, &topology::nodes_with_memory(), memory.total)?;
        let mut broker = self.shared.broker();
        broker.state.change(settings);
        drop(broker);
        self.shared.wake_keeper();
        Ok(())
    }

    /// From now on, users in user namespaces are these users'. What is taken stays on the account that it is on.
    pub fn set_subordinates(&self, subordinates: Subordinates) {
        self.shared.broker().state.settings.quotas.subordinates = subordinates;
    }

    /// Something that says how it stands.
    pub fn observer(&self) -> Observer {
        Observer(self.shared.clone())
    }

    /// How far it is filled.
    pub fn progress(&self) -> Progress {
        let state = &self.shared.broker().state;
        let waiting = match &state.condition {
            Condition::Waiting(why) => Some(why.clone()),
            Condition::Full | Condition::Filling => None,
        };
        Progress { ready: state.ready(), size: state.settings.sizes.values().sum(), waiting }
    }

    /// Stops: what is ready goes back, and what is taken stays with those who have it. Returns the number of files that are taken: these stay
    /// where they are, for the next server to take over, which knows whose they are; without any, the mount goes, too.
    ///
    /// # Errors
    /// If the mount can't be removed.
    pub fn stop(mut self) -> Result<usize, Error> {
        self.end_threads();
        let shared = &self.shared;
        // Those who are no longer connected are not answered.
        drop(shared.settle());
        shared.happened(Event::Stop);
        drop(shared.settle());
        shared.empty_the_rest();
        let left = shared.broker().state.taken.len();
        if left == 0 {
            shared.store.close()?;
        }
        Ok(left)
    }

    fn end_threads(&mut self) {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::SeqCst);
        let _ = std::fs::remove_file(&self.socket);
        drop(self.front.take());
        shared.wake_keeper();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_threads();
    }
}

/// Takes over what a former server left: what waited waits, once the filler has looked at it, and what was taken is whose it was.
fn adopt(state: &mut State<Arc<File>>, left: Left, store: &Store) {
    for Waiting { id, node, file, size } in left.ready {
        match state.nodes.get_mut(&node) {
            Some(of) => of.waiting.push(Ready { id, file, size, filled: 0, unverified: 0 }),
            None => store.remove_ready(id, node),
        }
    }
    left.taken.into_iter().for_each(|found| state.adopt(found));
}

/// Listens at the socket, and says where it really is.
fn listen(options: &Options, low: Option<LowNumbers>) -> Result<(Listener, PathBuf), Error> {
    let (Some(directory), Some(name)) = (options.socket.parent(), options.socket.file_name()) else {
        return Err(Error::NotOwn(options.socket.clone()));
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let path = &store::make_socket_directory(directory)?.join(name);
    // The directory is locked, so whoever made it is gone. Where it is elsewhere, somebody may be there.
    if Socket::is_served(path) {
        return Err(Error::Served { directory: path.clone(), pid: None });
    }
    match std::fs::symlink_metadata(path) {
        Ok(facts) if std::os::unix::fs::FileTypeExt::is_socket(&facts.file_type()) => {
            std::fs::remove_file(path).map_err(Error::system("removing", path))?;
        }
        _ => {}
    }
    // Follows no link, and fails where anything is there.
    let socket = Socket::bind(path).map_err(Error::system("making the socket", path))?;
    // It is this server's own, and nobody else can put another one in its place. Nobody can connect before it listens, thus with other
    // permissions than these.
    let permit = || {
        std::os::unix::fs::lchown(path, None, options.socket_group)?;
        std::fs::set_permissions(path, Permissions::from_mode(options.socket_mode))
    };
    permit().map_err(Error::system("setting the permissions of", path))?;
    let listener = Listener::new(socket, low).map_err(Error::system("listening at", path))?;
    Ok((listener, path.clone()))
}
