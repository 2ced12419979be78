//! The plans of many groups, done: who listens, and who reclaims.
//!
//! One thread listens to the kernel. A few *writers* take the groups whose turn it is: a write may take long, and the threads that see to nodes,
//! signals and groups never wait for one. While no group has demand, all of them sleep.
//!
//! A write may also never come to its end: where what is reclaimed goes to a swap device that hangs. Then its thread can't be ended, not by SIGKILL
//! either. So these threads have a table of descriptors of their own, in which all their files are, and keep nobody from seeing that the rest of the process is
//! at its end (the guards do). Before Linux 5.9 they have none.
//!
//! While the machine has demand, the listening thread looks a few times a second which group takes most, and holds it to what it has
//! ([`super::group_share`]): to the writers, that is a limit like others.

use super::group_files::{PIECE, Signal};
use super::group_member::{Member, Next, Turn};
use super::group_plan::Pause;
use super::group_share::{Held, Share, Taker};
use super::group_support::{self, Unserved};
use super::group_survey::{Found, Survey};
use super::group_tree::{Change, Choice, Tree};
use super::group_turns::Turns;
use crate::control::budget::Budget;
use crate::group::{Group, Version};
use crate::stats::figures;
use crate::sys::Errno;
use crate::sys::clock::{now_ns, thread_cpu_ns, timespec};
use crate::sys::interrupt::Interrupter;
use crate::sys::thread::part_with;
use crate::sys::{process, sched, tracepoint};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// After so long it is asked again which groups there are, where the kernel refused to say.
const RETRY: Duration = Duration::from_secs(60);
/// So many groups are served at most.
const GROUPS_MOST: usize = 1000;
/// Writers, at most; and no more than half as many as CPUs, so that the other half is always left to those who work (but for the only one).
const WRITERS_MOST: usize = 8;
/// How nice a writer is. Among readers that want all CPUs, an ordinary thread gets to run when it is its turn: by then the room is used up. What
/// a writer does, those who wait would otherwise do.
const NICE: i32 = -8;
/// Of all CPUs, so much is for writers, over some seconds. It binds where there is one.
const CPUS: f64 = 0.5;
/// At the end, writers are waited for so long. They have nothing to undo.
const PATIENCE: Duration = Duration::from_millis(20);

/// From one survey to the next, while somebody is held and until then: he is taking from others. And no less than so many times what one takes.
const SURVEY: Duration = Duration::from_millis(250);
const SEARCH: Duration = Duration::from_millis(50);
const SURVEY_SHARE: u32 = 50;

/// What may be done for groups.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupOptions {
    /// For which.
    pub choice: Choice,
    /// The most that is kept free below a limit, where 1 is all of the limit.
    pub most: f64,
}

figures! {
    /// How it stands with groups.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct GroupStanding: Reclaim, "pagecrew_reclaim_groups_", [], "groups." {
        listened_to: u64, Gauge Count, "Control groups with a limit of their own that are listened to.";
        awake: u64, Gauge Count, "Control groups that are looked at, because their tasks were at the limit lately.";
        ahead_bytes: u64, Gauge Bytes, "Memory that is to be free below the limits of all groups together.";
        episodes: u64, Counter Count, "Times that reclaim ahead of a group's demand began.";
        looks: u64, Counter Count, "Looks at groups.";
        writes: u64, Counter Count, "Times that the kernel was asked to reclaim memory of a group.";
        reclaimed_bytes: u64, Counter Bytes, "Memory of groups that was reclaimed ahead.";
        stalls: u64, Counter Count, "Times that tasks of groups were at the limit and had to reclaim for themselves, while their group was looked at.";
        hurts: u64, Counter Count, "Times that a group was left alone for a while because what was reclaimed came back.";
        held_bytes: u64, Gauge Bytes, "What the control group may have that takes most of what is taken while the machine has demand; 0 while none is held.";
        holds: u64, Counter Count, "Times that a control group was held to what it had, because it took most of what was taken.";
        in_vain: u64, Counter Count, "Times that a group was left alone for a while because there was nothing to reclaim but what is in use.";
        cpu_ns key "cpu_seconds": u64, Counter Seconds, "CPU time of looks and writes.";
    }
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupEvent {
    /// Memory of a group is reclaimed ahead, since there is demand.
    Begun {
        /// Its directory.
        group: PathBuf,
        /// What it takes in a second, in bytes.
        demand: u64,
        /// What is kept free below its limit.
        ahead: u64,
    },
    /// No longer.
    Ended {
        /// Its directory.
        group: PathBuf,
        /// From the first write on.
        lasted: Duration,
        /// Bytes.
        reclaimed: u64,
        /// How often its tasks had to reclaim for themselves.
        stalls: u64,
        /// Why it is left alone although there may be demand.
        pause: Option<Pause>,
    },
    /// A group takes most of what is taken while the machine has demand, and gets no more than it has.
    Held {
        /// Its directory.
        group: PathBuf,
        /// What it has, in bytes.
        share: u64,
    },
    /// No longer.
    LetGo {
        /// Its directory.
        group: PathBuf,
    },
    /// There are more groups than are served.
    TooMany,
    /// Groups are not served for now, or not all of them, since the kernel refuses to say which there are. It is tried again.
    Unwatched(Errno),
    /// Groups of version 1 are not served, since the kernel refuses what cuts its reclaim short there (a tracepoint, `perf_event_open`).
    Uninterruptible(Errno),
}

/// Who is told. Called by any of the threads, which wait until it returns. It may find none of the process's files open.
pub type Listener = Box<dyn Fn(GroupEvent) + Send + Sync>;

/// Reclaims ahead of the demand of control groups, until this is dropped. There is nothing to undo.
pub struct Groups {
    shared: Arc<Shared>,
    /// Written to when options or the machine's demand have changed, and at the end. The listening thread has its own.
    bell: Arc<OwnedFd>,
}

/// A group's place among all.
struct GroupPlace {
    path: PathBuf,
    signal: Signal,
    /// `None` while a writer is at it.
    member: Option<Box<Member>>,
    /// What it is held to.
    share: Option<u64>,
    /// For a while, as of its last turn.
    left_alone: bool,
    /// The kernel has said something that was not looked at yet.
    heard: bool,
}

struct State {
    options: GroupOptions,
    /// Their files are the threads'. When the last one ends, there are none.
    places: BTreeMap<u64, GroupPlace>,
    by_path: HashMap<PathBuf, u64>,
    next: u64,
    turns: Turns,
    budget: Budget,
    /// No writer gets a turn before this, since the budget is used up.
    rest_until_ns: u64,
    /// The group that is held.
    held: Option<PathBuf>,
    standing: GroupStanding,
    too_many: bool,
    /// A group was left out since it was last looked which there are, because there were too many.
    left_out: bool,
    /// It was said that the kernel does not tell which groups there are.
    unwatched: bool,
    /// It was said that groups of version 1 are not served.
    uninterruptible: bool,
    /// Until when somebody waits by the time; others wait until they are needed.
    timed: Option<u64>,
    changed: bool,
    ending: bool,
    /// How many threads there are.
    threads: usize,
}

/// What the threads share with whoever has begun it all.
struct Shared {
    state: Mutex<State>,
    turn: Condvar,
    ended: Condvar,
    demand: AtomicBool,
    tell: Listener,
}

/// What the threads share. Their files are in their own table.
struct Threads {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    bell: OwnedFd,
}

impl Deref for Threads {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// What the listening thread does while the machine has demand.
struct Surveys {
    survey: Survey,
    share: Share<PathBuf>,
    next_ns: u64,
}

impl Surveys {
    /// `None` where groups do not say what they take.
    fn new() -> Option<Surveys> {
        Some(Surveys { survey: Survey::new()?, share: Share::default(), next_ns: now_ns() })
    }
}

/// What the listening thread hears.
const BELL: u64 = 0;
const TREE: u64 = 1;
/// Numbers of groups begin here.
const FIRST: u64 = 2;

impl Shared {
    fn thread(self: &Arc<Self>, name: String, life: impl FnOnce(Arc<Shared>) + Send + 'static) -> Result<(), Errno> {
        let shared = self.clone();
        shared.lock().threads += 1;
        let live = move || {
            life(shared.clone());
            let mut state = shared.lock();
            state.threads -= 1;
            if state.threads == 0 {
                // No other thread can close their files.
                state.places.clear();
            }
            drop(state);
            shared.ended.notify_all();
        };
        let started = thread::Builder::new().name(name).spawn(live);
        if started.is_err() {
            self.lock().threads -= 1;
        }
        started.map(drop).map_err(Errno::from)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Groups {
    /// Begins. To be called by a thread of the ordinary class. Those who reclaim come before ordinary threads, where this process may do that
    /// (`CAP_SYS_NICE`).
    ///
    /// # Errors
    /// Where groups can't be served here; see [`Unserved`].
    pub fn start(options: GroupOptions, tell: Listener) -> Result<Groups, Unserved> {
        group_support::attempt()?;
        // There is one open for each group.
        process::raise_descriptor_limit();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Errno::from);
        let bell = Arc::new(bell.map_err(Unserved::Refused)?);
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let state = State {
            options: options.clone(),
            places: BTreeMap::new(),
            by_path: HashMap::new(),
            next: FIRST,
            turns: Turns::default(),
            budget: Budget::new(Some(cpus as f64 * CPUS), None, now_ns()),
            rest_until_ns: 0,
            held: None,
            standing: GroupStanding::default(),
            too_many: false,
            left_out: false,
            unwatched: false,
            uninterruptible: false,
            timed: None,
            changed: false,
            ending: false,
            threads: 0,
        };
        let (turn, ended) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { state: Mutex::new(state), turn, ended, demand: AtomicBool::new(false), tell });
        let (begun, has_begun) = channel();
        let of_listener = bell.clone();
        let life = move |shared: Arc<Shared>| {
            let threads = Threads::begin(shared, of_listener.as_fd(), (cpus / 2).clamp(1, WRITERS_MOST));
            drop(of_listener);
            let _ = begun.send(threads.as_ref().map(drop).map_err(|errno| *errno));
            if let Ok(threads) = threads {
                threads.listener();
            }
        };
        let groups = Groups { shared, bell };
        groups.shared.thread("groups".to_owned(), life).map_err(Unserved::Refused)?;
        // Until here, the bell is open.
        let begun = has_begun.recv().unwrap_or(Err(Errno(libc::ECHILD)));
        begun.map(|()| groups).map_err(Unserved::Refused)
    }

    /// Goes on with other options.
    pub fn change(&self, options: GroupOptions) {
        let mut state = self.shared.lock();
        state.changed |= state.options != options;
        state.options = options;
        drop(state);
        self.ring();
    }

    /// Whether the machine has demand: reclaim in the background works for those who take memory. Waits for nobody.
    pub fn demand(&self, demand: bool) {
        if self.shared.demand.swap(demand, Relaxed) != demand {
            self.ring();
        }
    }

    /// Begins to end: no write is begun any more. Does not wait for one that is under way; [dropping](Drop) it does, for a moment.
    pub fn end(&self) {
        self.shared.lock().ending = true;
        self.shared.turn.notify_all();
        self.ring();
    }

    /// What says how it stands, for as long as that is wanted.
    pub fn standing(&self) -> impl Fn() -> GroupStanding + Send + Sync + use<> {
        let shared = self.shared.clone();
        move || shared.lock().standing
    }

    fn ring(&self) {
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.end();
        // One that is in the middle of a write ends with it, or with the process.
        let state = self.shared.lock();
        let _ = self.shared.ended.wait_timeout_while(state, PATIENCE, |state| state.threads > 0);
    }
}

impl Threads {
    /// The calling thread becomes the one that listens, and starts so many writers, or fewer. `bell` is open until this returns.
    fn begin(shared: Arc<Shared>, bell: BorrowedFd<'_>, writers: usize) -> Result<Arc<Threads>, Errno> {
        let bell = part_with(bell)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &bell, EventData::new_u64(BELL), EventFlags::IN)?;
        let threads = Arc::new(Threads { shared, epoll, bell });
        for number in 0..writers {
            let of_writer = threads.clone();
            match threads.shared.thread(format!("groups/{number}"), move |_| of_writer.writer()) {
                Err(errno) if number == 0 => return Err(errno),
                // Fewer will do.
                _ => {}
            }
        }
        Ok(threads)
    }

    /// Hears what the kernel says of a group, once.
    fn listen(&self, number: u64, signal: &Signal) {
        // One that has gone meanwhile says nothing any more.
        let _ = epoll::modify(&self.epoll, signal.file(), EventData::new_u64(number), signal.events());
    }

    /// The life of the thread that listens.
    fn listener(&self) {
        let mut tree = None;
        self.look_around(&mut tree);
        // Which groups there are is asked again where the kernel refused to say.
        let retry = |tree: &Option<Tree>| tree.is_none().then(|| now_ns() + RETRY.as_nanos() as u64);
        let mut retry_ns = retry(&tree);
        let mut events = Vec::with_capacity(256);
        let mut surveys: Option<Surveys> = None;
        loop {
            events.clear();
            let survey_ns = surveys.as_ref().map(|surveys| surveys.next_ns);
            let next_ns = survey_ns.into_iter().chain(retry_ns).min();
            let pause = next_ns.map(|next_ns| timespec(next_ns.saturating_sub(now_ns())));
            // Interrupted is as good as late.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), pause.as_ref());
            let mut anew = retry_ns.is_some_and(|retry_ns| now_ns() >= retry_ns);
            for event in &events {
                match event.data.u64() {
                    BELL => {
                        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
                        let mut state = self.lock();
                        if state.ending {
                            return;
                        }
                        anew |= std::mem::take(&mut state.changed);
                    }
                    TREE => match tree.as_mut().map(Tree::changes) {
                        Some(Some(changes)) => {
                            self.follow(changes);
                            if tree.as_ref().is_some_and(|tree| tree.left_out() > 0) {
                                self.too_many();
                            }
                        }
                        _ => anew = true,
                    },
                    number => self.heard(number),
                }
            }
            anew |= self.has_room_again();
            if anew {
                // Whoever is held may not be meant any more.
                surveys = None;
                self.hold(None);
                self.look_around(&mut tree);
                retry_ns = retry(&tree);
            }
            let demand = self.demand.load(Relaxed);
            if demand || surveys.as_ref().is_some_and(|surveys| surveys.share.holds()) {
                match &mut surveys {
                    None => surveys = Surveys::new(),
                    Some(surveys) if now_ns() >= surveys.next_ns => self.survey(surveys, demand, tree.as_ref()),
                    Some(_) => {}
                }
            } else if surveys.take().is_some() {
                self.hold(None);
            }
        }
    }

    /// Finds out which group takes most, and holds it if it has its share.
    fn survey(&self, surveys: &mut Surveys, demand: bool, tree: Option<&Tree>) {
        let (begin, cpu) = (now_ns(), thread_cpu_ns());
        let held = match surveys.survey.look(begin, demand) {
            Ok(Found { machine, taker }) => {
                let meant = |taker: &Taker<PathBuf>| tree.is_some_and(|tree| tree.means(&taker.group));
                let left_alone = {
                    let mut state = self.lock();
                    let held = state.held.clone();
                    held.and_then(|group| state.place(&group)).is_some_and(|place| place.left_alone)
                };
                surveys.share.note(machine, taker.filter(meant), left_alone)
            }
            // The machine's state is not known, so nobody is held.
            Err(_) => None,
        };
        self.hold(held);
        let now = now_ns();
        let least = if surveys.share.holds() { SURVEY } else { SEARCH };
        let pause = least.max(Duration::from_nanos(now - begin) * SURVEY_SHARE);
        surveys.next_ns = now + pause.as_nanos() as u64;
        self.lock().standing.cpu_ns += thread_cpu_ns() - cpu;
    }

    /// This group is held from now on, and no other.
    fn hold(&self, held: Option<&Held<PathBuf>>) {
        let before = self.lock().held.take_if(|before| held.is_none_or(|held| held.group != *before));
        if let Some(group) = before {
            let mut state = self.lock();
            state.standing.held_bytes = 0;
            let was_held = state.place(&group).is_some_and(|place| place.share.take().is_some());
            drop(state);
            // Without a limit of its own it is served no longer.
            self.look_at(&group);
            if was_held {
                (self.tell)(GroupEvent::LetGo { group });
            }
        }
        let Some(Held { group, share, .. }) = held else { return };
        self.lock().held = Some(group.clone());
        self.look_at(group);
        let mut state = self.lock();
        // It may have gone, or there are too many.
        let Some(number) = state.by_path.get(group).copied() else { return };
        let Some(place) = state.places.get_mut(&number) else { return };
        let new = place.share.replace(*share).is_none();
        // The kernel says nothing of a limit that it does not know.
        if place.member.as_ref().is_some_and(|member| !member.awake()) {
            place.heard = true;
            state.turns.at(number, now_ns());
            self.turn.notify_one();
        }
        state.standing.held_bytes = *share;
        state.standing.holds += u64::from(new);
        drop(state);
        if new {
            (self.tell)(GroupEvent::Held { group: group.clone(), share: *share });
        }
    }

    /// Finds out anew which groups there are.
    fn look_around(&self, tree: &mut Option<Tree>) {
        let choice = {
            let mut state = self.lock();
            state.left_out = false;
            state.options.choice.clone()
        };
        match Tree::new(choice) {
            Ok((new, changes)) => {
                let _ = epoll::add(&self.epoll, &new, EventData::new_u64(TREE), EventFlags::IN);
                if new.left_out() > 0 {
                    self.too_many();
                }
                *tree = Some(new);
                self.keep_only(&changes);
                self.follow(changes);
                self.lock().unwatched = false;
            }
            Err(errno) => {
                *tree = None;
                if !std::mem::replace(&mut self.lock().unwatched, true) {
                    (self.tell)(GroupEvent::Unwatched(errno));
                }
            }
        }
    }

    /// Whether groups were left out, and others have gone since.
    fn has_room_again(&self) -> bool {
        let state = self.lock();
        state.left_out && state.places.len() <= GROUPS_MOST / 8 * 7
    }

    fn too_many(&self) {
        if !std::mem::replace(&mut self.lock().too_many, true) {
            (self.tell)(GroupEvent::TooMany);
        }
    }

    /// The kernel says that tasks of the group were at its limit (and in version 1 that it has gone).
    fn heard(&self, number: u64) {
        let mut state = self.lock();
        let Some(place) = state.places.get_mut(&number) else { return };
        place.heard = true;
        state.turns.at(number, now_ns());
        drop(state);
        self.turn.notify_one();
    }

    fn follow(&self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Look(path) => self.look_at(&path),
                Change::Gone(path) => self.forget(&path),
            }
        }
    }

    /// Serves the group from now on, if it has a limit or is held, and no longer if not.
    fn look_at(&self, path: &Path) {
        let held = self.lock().held.as_deref() == Some(path);
        let group = Group::at(path).ok().flatten().filter(|group| held || group.limit().is_some());
        let Some(group) = group.filter(group_support::serves) else { return self.forget(path) };
        {
            let mut state = self.lock();
            if state.by_path.contains_key(path) || state.ending {
                return;
            }
            if state.places.len() >= GROUPS_MOST {
                state.left_out = true;
                drop(state);
                return self.too_many();
            }
        }
        // It may take long (version 1), and no other thread adds groups.
        let signal = match Signal::of(&group) {
            Ok(signal) => signal,
            Err(Errno(libc::EMFILE | libc::ENFILE)) => return self.too_many(),
            // It has gone meanwhile.
            Err(_) => return,
        };
        let mut state = self.lock();
        let number = state.next;
        if epoll::add(&self.epoll, signal.file(), EventData::new_u64(number), signal.events()).is_err() {
            return;
        }
        state.next += 1;
        let member = Member::new(group, signal.clone(), state.options.most);
        state.places.insert(
            number,
            GroupPlace {
                path: path.to_owned(),
                signal,
                member: Some(Box::new(member)),
                share: None,
                left_alone: false,
                heard: false,
            },
        );
        state.by_path.insert(path.to_owned(), number);
        state.standing.listened_to += 1;
    }

    fn forget(&self, path: &Path) {
        let mut state = self.lock();
        let Some(number) = state.by_path.remove(path) else { return };
        state.turns.forget(number);
        state.standing.listened_to -= 1;
        let Some(place) = state.places.remove(&number) else { return };
        // Whoever is at it finds out that it has gone.
        if let Some(member) = place.member {
            state.leave(&member);
        }
        let _ = epoll::delete(&self.epoll, place.signal.file());
    }

    /// Forgets all groups that are not among those to be looked at.
    fn keep_only(&self, changes: &[Change]) {
        let state = self.lock();
        let of = |change: &Change| if let Change::Look(path) = change { Some(path.clone()) } else { None };
        let there: HashSet<PathBuf> = changes.iter().filter_map(of).collect();
        let gone: Vec<PathBuf> = state.by_path.keys().filter(|path| !there.contains(*path)).cloned().collect();
        drop(state);
        for path in gone {
            self.forget(&path);
        }
    }

    /// Says once that groups of version 1 are not served.
    fn say_uninterruptible(&self, errno: Errno) {
        // For want of something else, that passes.
        let passes = matches!(errno, Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM));
        if !passes && !std::mem::replace(&mut self.lock().uninterruptible, true) {
            (self.tell)(GroupEvent::Uninterruptible(errno));
        }
    }

    /// The life of a writer.
    fn writer(&self) {
        // Where that is refused, it is as urgent as others.
        let _ = sched::set_nice_of(0, NICE);
        // Groups of version 1 need one, and are not served without.
        let mut interrupter = None;
        let mut state = self.lock();
        while !state.ending {
            let now = now_ns();
            let until = state.rest_until_ns;
            let number = if now < until { None } else { state.turns.take(now) };
            let Some(number) = number else {
                state = self.wait(state, now);
                continue;
            };
            let most = state.options.most;
            let Some((heard, share, mut member)) = state.taken(number) else { continue };
            if state.turns.next_ns().is_some() {
                self.turn.notify_one();
            }
            drop(state);
            if interrupter.is_none() && member.group.version() == Version::V1 {
                interrupter = tracepoint::number(PIECE)
                    .and_then(Interrupter::new)
                    .inspect_err(|&errno| self.say_uninterruptible(errno))
                    .ok();
            }
            let begin = thread_cpu_ns();
            let turn = member.turn(heard, most, share, interrupter.as_ref(), &self.tell);
            state = self.lock();
            state.charge(thread_cpu_ns() - begin, &turn);
            let next = match turn.next {
                Next::Gone => None,
                Next::Step { next_ns, listen } => {
                    if listen {
                        self.listen(number, &member.signal);
                    }
                    next_ns
                }
            };
            state.standing.ahead_bytes = state.standing.ahead_bytes + turn.ahead - member.ahead;
            state.standing.awake = state.standing.awake + u64::from(turn.awake) - u64::from(turn.was_awake);
            member.ahead = turn.ahead;
            state.turns.done(number, next);
            match state.places.get_mut(&number) {
                Some(place) => {
                    place.left_alone = turn.left_alone;
                    place.member = Some(member);
                }
                // It was forgotten meanwhile.
                None => {
                    state.turns.forget(number);
                    state.leave(&member);
                }
            }
            if turn.next == Next::Gone {
                let path = state.places.get(&number).map(|place| place.path.clone());
                drop(state);
                if let Some(path) = path {
                    self.forget(&path);
                }
                state = self.lock();
            }
        }
    }

    /// Waits until there may be a turn. One writer waits by the time, the others until they are called.
    fn wait<'s>(&'s self, mut state: MutexGuard<'s, State>, now: u64) -> MutexGuard<'s, State> {
        let next = state.turns.next_ns().map(|next| next.max(state.rest_until_ns));
        match next.filter(|next| state.timed.is_none_or(|timed| *next < timed)) {
            Some(next) => {
                state.timed = Some(next);
                let time = Duration::from_nanos(next.saturating_sub(now));
                let mut state = self.turn.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
                if state.timed == Some(next) {
                    state.timed = None;
                }
                state
            }
            None => self.turn.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl State {
    /// The group whose turn it is, whether the kernel has said something of it, and what it is held to.
    fn taken(&mut self, number: u64) -> Option<(bool, Option<u64>, Box<Member>)> {
        let place = self.places.get_mut(&number)?;
        Some((std::mem::take(&mut place.heard), place.share, place.member.take()?))
    }

    fn place(&mut self, path: &Path) -> Option<&mut GroupPlace> {
        self.places.get_mut(self.by_path.get(path)?)
    }

    fn charge(&mut self, cpu_ns: u64, turn: &Turn) {
        let standing = &mut self.standing;
        standing.looks += 1;
        standing.cpu_ns += cpu_ns;
        standing.writes += u64::from(turn.wrote);
        standing.reclaimed_bytes += turn.reclaimed;
        standing.stalls += turn.stalls;
        standing.episodes += u64::from(turn.begun);
        standing.hurts += u64::from(turn.paused == Some(Pause::Hurts));
        standing.in_vain += u64::from(turn.paused == Some(Pause::Nothing));
        let now = now_ns();
        self.budget.charge(cpu_ns, 0, now);
        self.rest_until_ns = now + self.budget.wait(now).as_nanos() as u64;
    }

    /// A member that is served no longer adds nothing to the standing.
    fn leave(&mut self, member: &Member) {
        self.standing.ahead_bytes -= member.ahead;
        self.standing.awake -= u64::from(member.awake());
    }
}
