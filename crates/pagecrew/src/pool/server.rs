//! The server: what clients ask is taken in by the front, and done here; what is to be kept ready, by the keeper.

use super::capacity::Capacity;
use super::error::Error;
use super::front::{Connection, Front};
use super::gate;
use super::keeper::Keeper;
use super::ledger::{Entry, Holding};
use super::options::{Options, Sizes};
use super::protocol::{Answer, Code, REQUEST_MOST, Request, Until};
use super::state::{Condition, GivenUp, Life, Ready, Refusal, Settings, State, TakenFile};
use super::status::{Facts, Status};
use super::store::{self, Left, Store, Waiting};
use crate::sys::mount::MemoryFs;
use crate::sys::sched::{self, Class};
use crate::sys::seqpacket::{Peer, Socket};
use crate::sys::{Errno, HUGE_PAGE_SIZE, cgroup, clock, process, procfs, topology};
use crate::units::Bytes;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What the threads of a server share.
pub(super) struct Shared {
    pub store: Store,
    pub directory: PathBuf,
    pub limit: usize,
    pub capacity: Capacity,
    /// Whether the machine has nodes to choose from.
    pub several_nodes: bool,
    state: Mutex<State>,
    /// The keeper sleeps on it.
    wake: OwnedFd,
    pub stop: AtomicBool,
    /// The filler's process, or 0.
    pub filler: AtomicI32,
    pub log: fn(&str),
}

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
    /// The state; whoever panicked with it has left nothing half done.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
            MemoryFs::Hugetlbfs => store::reserved_pages().map_or(0, |pages| (pages.free * HUGE_PAGE_SIZE) as u64),
            MemoryFs::Tmpfs => {
                let machine = procfs::memory_info().map_or(u64::MAX, |memory| memory.available);
                let group = cgroup::memory().map_or(u64::MAX, |group| group.limit.saturating_sub(group.used));
                machine.min(group)
            }
        }
    }

    /// The number of `node`, if the machine has several.
    pub fn node(&self, node: usize) -> Option<usize> {
        self.several_nodes.then_some(node)
    }

    /// What is done for whoever is connected.
    fn answer(&self, request: Request, connection: &Connection) -> Result<(Answer, Option<File>), Refusal> {
        match request {
            Request::Take { size, node, until } => {
                let (answer, file) = self.take(connection, size, node, until)?;
                Ok((answer, Some(file)))
            }
            Request::Release { path } => Ok((self.release(connection, Path::new(&path))?, None)),
            Request::Resize { size, node } => Ok((self.resize(connection.peer, size, node)?, None)),
            Request::Status => {
                let all = connection.peer.user == 0 || connection.peer.user == rustix::process::geteuid().as_raw();
                let json = self.status((!all).then_some(connection.account)).json();
                Ok((Answer::Status { json }, None))
            }
        }
    }

    /// How it stands now; with `viewer`, of users and their files only what is his.
    fn status(&self, viewer: Option<u32>) -> Status {
        let facts = Facts {
            backing: self.store.kind().name(),
            directory: self.directory.clone(),
            limit: self.limit,
            available: self.available(),
        };
        Status::new(&self.state(), facts, viewer)
    }

    fn take(
        &self,
        connection: &Connection,
        size: usize,
        node: Option<usize>,
        until: Until,
    ) -> Result<(Answer, File), Refusal> {
        if size == 0 || !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return Err(Refusal(Code::BadRequest, Error::Size(size).to_string()));
        }
        let life = match until {
            Until::Closed => Life::Connection(connection.number),
            Until::Unused => Life::Path(None),
        };
        let (entry, ready, given_up) = self.reserve(connection.account, size, node, until)?;
        let node = entry.node;
        // Freed before the taker needs what it holds.
        self.give_back(given_up);
        self.boost_filler(ready.id);
        let name = entry.to_string();
        let hand_out = || {
            if ready.size != size {
                self.store.resize(&ready.file, size, self.node(node))?;
            }
            self.store.hand_out(&entry, &name, connection.peer)
        };
        match hand_out() {
            Ok(file) => {
                let mut state = self.state();
                state.taken.entry(ready.id).and_modify(|taken| taken.life = life);
                state.counters.takes += 1;
                state.counters.handed_out_bytes += size as u64;
                state.counters.handed_out_ready_bytes += ready.filled.min(size) as u64;
                drop(state);
                let path = self.store.taken_path(&name).to_string_lossy().into_owned();
                let backing = self.store.kind().into();
                Ok((Answer::Taken { size, ready: ready.filled.min(size), node, backing, path }, file))
            }
            Err(error) => {
                self.store.remove_ready(ready.id, node);
                self.state().taken.entry(ready.id).and_modify(|taken| taken.life = Life::Going);
                self.let_go(ready.id);
                (self.log)(&error.to_string());
                Err(Refusal(Code::Failed, error.to_string()))
            }
        }
    }

    /// Lets the filler out of the idle class if it is at the file `id`: it may be stopped in the middle of a page that others wait for then.
    fn boost_filler(&self, id: u64) {
        if self.state().filling.is_some_and(|filling| filling.id == id) {
            let _ = sched::set_class(self.filler.load(Ordering::Relaxed), Class::Normal);
        }
    }

    /// Decides what a request gets and puts it down to `user`: a file that waits or a new one, and those that are given up for it.
    fn reserve(
        &self,
        user: u32,
        size: usize,
        node: Option<usize>,
        until: Until,
    ) -> Result<(Entry, Ready, Vec<GivenUp>), Refusal> {
        let mut state = self.state();
        let state = &mut *state;
        let node = match node {
            Some(node) if !state.nodes.contains_key(&node) => {
                return Err(Refusal(Code::BadRequest, no_such_node(node, state.nodes.keys()).to_string()));
            }
            Some(node) => node,
            None => state.best_node(size).ok_or_else(|| Refusal(Code::Failed, "the pool has no nodes".into()))?,
        };
        let taken = state.taken_bytes();
        if taken.saturating_add(size) > self.limit {
            return Err(Refusal(
                Code::Limit,
                format!(
                    "of the pool's limit of {} {} are taken, so {} can't be had; see pool serve --limit",
                    Bytes(self.limit as u64),
                    Bytes(taken as u64),
                    Bytes(size as u64)
                ),
            ));
        }
        if !self.capacity.hands_out(user, state.taken.len()) {
            let message = "the server has as many files as it may have open; see LimitNOFILE of its service".into();
            return Err(Refusal(Code::TooMany, message));
        }
        let charged = state.settings.quotas.charge(&mut state.accounts, user, size);
        charged.map_err(|error| Refusal(Code::Quota, error.to_string()))?;
        let now = clock::now_ns();
        state.note_demand(node, user, size, now);
        state.taken_ns = now;
        let ready = match state.choose(node, user, size, now) {
            Some(ready) => ready,
            // Nothing is in it yet, so there need be no room for it.
            None => match self.store.create(size, node, self.several_nodes) {
                Ok((id, file)) => Ready { id, file: Arc::new(file), size, filled: 0, unverified: 0 },
                Err(error) => {
                    state.accounts.refund(user, size);
                    return Err(Refusal(Code::Failed, error.to_string()));
                }
            },
        };
        let filled = ready.filled.min(size);
        let given_up = match self.reserve_headroom(state, node, size - filled, taken + size) {
            Ok(given_up) => given_up,
            Err(refusal) => {
                state.accounts.refund(user, size);
                match state.nodes.get_mut(&node).filter(|_| filled > 0) {
                    Some(of) => of.waiting.push(ready),
                    None => self.store.remove_ready(ready.id, node),
                }
                return Err(refusal);
            }
        };
        let since = clock::since_1970();
        let entry = Entry { id: ready.id, node, holding: Some(Holding { size, user, since, until }) };
        let name = entry.to_string();
        let (file, life) = (Some(ready.file.clone()), Life::Arriving);
        let taken = TakenFile { file, name, size, user, since, node, life, offences: 0, completing: filled < size };
        state.taken.insert(ready.id, taken);
        Ok((entry, ready, given_up))
    }

    /// Sees to it that `missing` bytes can be had, with `taken` bytes taken then, and takes out what has to be given up for it.
    fn reserve_headroom(
        &self,
        state: &mut State,
        node: usize,
        missing: usize,
        taken: usize,
    ) -> Result<Vec<GivenUp>, Refusal> {
        let promised = state.promised();
        // Reserved huge pages are nobody else's.
        let floor = match self.store.kind() {
            MemoryFs::Tmpfs if !state.settings.below_floor => state.settings.floor as usize,
            _ => 0,
        };
        let supply = || (self.available() as usize).saturating_sub(promised + floor);
        let available = if missing > 0 { supply() } else { usize::MAX };
        let ready = state.ready();
        if available.saturating_add(ready) < missing {
            return Err(Refusal(
                Code::NoMemory,
                format!(
                    "{} more would be needed, and the machine has {} of them above the floor of {} and {} more ready; see pool serve \
                     --floor and --below-floor",
                    Bytes(missing as u64),
                    Bytes(available as u64),
                    Bytes(floor as u64),
                    Bytes(ready as u64)
                ),
            ));
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

    /// Gives files or parts of them back to the kernel; what stays of them waits again. Returns the bytes.
    pub fn give_back(&self, given_up: Vec<GivenUp>) -> usize {
        let mut bytes = 0;
        for GivenUp { node, keep, mut ready } in given_up {
            bytes += ready.filled - keep;
            self.boost_filler(ready.id);
            // Cut first, even if it goes whole: the filler may have it, and could go on filling what is behind the end.
            let cut = self.store.resize(&ready.file, keep, None);
            if keep > 0 && cut.is_ok() {
                (ready.size, ready.filled) = (keep, keep);
                ready.unverified = ready.unverified.min(keep);
                if let Some(node) = self.state().nodes.get_mut(&node) {
                    node.waiting.push(ready);
                }
            } else {
                self.store.remove_ready(ready.id, node);
            }
        }
        self.state().counters.given_back_bytes += bytes as u64;
        bytes
    }

    fn release(&self, connection: &Connection, path: &Path) -> Result<Answer, Refusal> {
        let none = || Refusal(Code::NotFound, format!("{} is not a file that is taken from this pool", path.display()));
        let name = self.store.taken_name(path).ok_or_else(none)?;
        let (id, size) = {
            let mut state = self.state();
            let of_name = |(_, taken): &(&u64, &mut TakenFile)| taken.name == name && taken.life != Life::Going;
            let (&id, taken) = state.taken.iter_mut().find(of_name).ok_or_else(none)?;
            if connection.account != taken.user && connection.peer.user != 0 {
                return Err(Refusal(Code::Denied, format!("{} is another user's", path.display())));
            }
            taken.life = Life::Going;
            let size = taken.size;
            state.counters.released += 1;
            (id, size)
        };
        self.let_go(id);
        Ok(Answer::Released { size })
    }

    /// Takes a file that is [`Life::Going`] from its owner, and all of its memory back if nobody has it open any more.
    pub fn let_go(&self, id: u64) {
        let Some(name) = self.state().taken.get(&id).map(|taken| taken.name.clone()) else { return };
        // One that is not there any more was removed by root's own hand.
        let _ = self.store.seize(&name);
        self.take_back(id);
        self.wake_keeper();
    }

    /// Forgets a file that is [`Life::Going`], once the kernel has all of its memory back: not while somebody has it open.
    pub fn take_back(&self, id: u64) {
        let found = self.state().taken.get(&id).map(|taken| (taken.name.clone(), taken.file.clone()));
        if let Some((name, Some(file))) = found
            && self.store.take_back(&name, &file)
        {
            let taken = self.state().forget(id);
            drop(taken);
        }
    }

    fn resize(&self, peer: Peer, size: usize, node: Option<usize>) -> Result<Answer, Refusal> {
        if peer.user != 0 && peer.user != store::own_user() {
            return Err(Refusal(Code::Denied, "resizing a pool takes root, or the user that serves it".into()));
        }
        if !size.is_multiple_of(HUGE_PAGE_SIZE) {
            return Err(Refusal(Code::BadRequest, Error::Size(size).to_string()));
        }
        let mut state = self.state();
        match node {
            Some(node) => match state.settings.sizes.get_mut(&node) {
                Some(place) => *place = size,
                None => {
                    let error = no_such_node(node, state.settings.sizes.keys());
                    return Err(Refusal(Code::BadRequest, error.to_string()));
                }
            },
            None => {
                let nodes: Vec<usize> = state.settings.sizes.keys().copied().collect();
                state.settings.sizes = spread(size, &nodes);
            }
        }
        state.plan();
        let size = state.settings.sizes.values().sum();
        drop(state);
        self.wake_keeper();
        Ok(Answer::Resized { size })
    }

    /// Does what `bytes` ask for, if these are a request; `None` were too many.
    pub fn request(&self, bytes: Option<&[u8]>, connection: &Connection) -> (Answer, Option<File>) {
        let request = match bytes {
            None => Err(Refusal(Code::BadRequest, format!("a request has no more than {REQUEST_MOST} bytes"))),
            Some(bytes) => Request::read(bytes).map_err(|error| Refusal(Code::BadRequest, error.to_string())),
        };
        let answer = request.and_then(|request| self.answer(request, connection));
        self.wake_keeper();
        answer.unwrap_or_else(|Refusal(code, message)| {
            self.state().counters.refused += 1;
            (Answer::Error { code, message }, None)
        })
    }

    /// Takes back what nobody has heard of.
    pub fn unheard(&self, answer: &Answer) {
        if let Answer::Taken { path, .. } = answer
            && let Some(entry) = self.store.taken_name(Path::new(path)).and_then(Entry::read)
        {
            self.state().taken.entry(entry.id).and_modify(|taken| taken.life = Life::Going);
            self.let_go(entry.id);
        }
    }

    /// Whether a connection holds something.
    pub fn holds(&self, connection: u64) -> bool {
        self.state().taken.values().any(|taken| taken.life == Life::Connection(connection))
    }

    /// Takes back what a connection has held that its client has left.
    pub fn left(&self, connection: u64) {
        let mut held = Vec::new();
        for (id, taken) in &mut self.state().taken {
            if taken.life == Life::Connection(connection) {
                taken.life = Life::Going;
                held.push(*id);
            }
        }
        held.into_iter().for_each(|id| self.let_go(id));
    }
}

fn no_such_node<'n>(node: usize, nodes: impl IntoIterator<Item = &'n usize>) -> Error {
    Error::Node { node, nodes: nodes.into_iter().copied().collect() }
}

/// `size` bytes on `nodes`, the same on each but for what can't be divided.
fn spread(size: usize, nodes: &[usize]) -> BTreeMap<usize, usize> {
    let pages = size / HUGE_PAGE_SIZE;
    let share = |index: usize| pages / nodes.len() + usize::from(index < pages % nodes.len());
    nodes.iter().enumerate().map(|(index, &node)| (node, share(index) * HUGE_PAGE_SIZE)).collect()
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
                return Err(no_such_node(node, nodes));
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
    /// Takes possession of the directory, takes over what a former server left there, and serves. `log` is called with what an operator
    /// may want to know, a line at a time.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn start(options: Options, log: fn(&str)) -> Result<Server, Error> {
        let memory = procfs::memory_info().map_err(Error::system("reading", Path::new("/proc/meminfo")))?;
        let nodes = topology::nodes_with_memory();
        let settings = settings(&options, &nodes, memory.total)?;
        let limit = options.limit.unwrap_or(memory.total as usize) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
        let (store, left) = Store::open(&options.directory, options.backing, limit)?;
        let mut state = State::new(settings);
        adopt(&mut state, left, &store);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("making an event descriptor for", &options.directory))?;
        let listener = listen(&options)?;
        let taken = state.taken.len();
        let shared = Arc::new(Shared {
            store,
            directory: options.directory,
            limit,
            capacity: Capacity::of(process::raise_descriptor_limit()),
            several_nodes: nodes.len() > 1,
            state: Mutex::new(state),
            wake,
            stop: AtomicBool::new(false),
            filler: AtomicI32::new(0),
            log,
        });
        let size: usize = shared.state().settings.sizes.values().sum();
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
        let mut server = Server { shared: shared.clone(), socket: options.socket, front: None, keeper: None };
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
        let mut state = self.shared.state();
        state.settings = settings;
        state.plan();
        drop(state);
        self.shared.wake_keeper();
        Ok(())
    }

    /// Something that says how it stands.
    pub fn observer(&self) -> Observer {
        Observer(self.shared.clone())
    }

    /// How far it is filled.
    pub fn progress(&self) -> Progress {
        let state = self.shared.state();
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
        let (waiting, going) = {
            let mut state = shared.state();
            let waiting: Vec<(usize, Ready)> = state
                .nodes
                .iter_mut()
                .flat_map(|(&number, node)| node.waiting.drain(..).map(move |ready| (number, ready)))
                .collect();
            let going = state.taken.iter().filter(|(_, taken)| taken.life == Life::Going);
            (waiting, going.map(|(id, _)| *id).collect::<Vec<_>>())
        };
        waiting.iter().for_each(|(node, ready)| shared.store.remove_ready(ready.id, *node));
        drop(waiting);
        going.into_iter().for_each(|id| shared.take_back(id));
        let left = shared.state().taken.len();
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
fn adopt(state: &mut State, left: Left, store: &Store) {
    for Waiting { id, node, file, size } in left.ready {
        match state.nodes.get_mut(&node) {
            Some(of) => of.waiting.push(Ready { id, file: Arc::new(file), size, filled: 0, unverified: 0 }),
            None => store.remove_ready(id, node),
        }
    }
    left.taken.into_iter().for_each(|found| state.adopt(found));
}

fn listen(options: &Options) -> Result<Socket, Error> {
    let (Some(directory), Some(name)) = (options.socket.parent(), options.socket.file_name()) else {
        return Err(Error::NotOwn(options.socket.clone()));
    };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    std::fs::create_dir_all(directory).map_err(Error::system("making the directory", directory))?;
    let path = &store::safe_directory(directory)?.join(name);
    // The directory is locked, so whoever made it is gone. Where it is elsewhere, somebody may be there.
    if Socket::connect(path).is_ok() {
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
    socket.listen().map_err(Error::system("listening at", path))?;
    Ok(socket)
}
