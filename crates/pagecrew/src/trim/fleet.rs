//! Trimming many processes within one budget.
//!
//! Who runs a fleet says which processes belong to it and calls [`Fleet::turn`] again and again; each turn is one search of a process or a few
//! looks at one's huge pages. Nothing here sleeps or makes a system call by itself, so that a fleet of ten thousand is simulated with
//! the same code.

use super::options::Options;
use super::plan::{self, Experience, Found};
use super::tally::Tally;
use super::target::Target;
use super::trimmer::{Clock, Step, Trimmer};
use crate::control::Budget;
use crate::sys::Errno;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Looks at one process before the next choice.
const QUANTUM: usize = 32;

/// What names a process for good: its number and when it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    /// The number.
    pub pid: i32,
    /// Clock ticks since the machine was started.
    pub start_ticks: u64,
}

/// A process of the fleet.
pub struct Member<T> {
    trimmer: Trimmer<T>,
    experience: Experience,
    /// How much memory it has, as far as known when it was admitted: of those whose turn it is, the largest are searched first.
    size: u64,
    next_scan_ns: u64,
    pause: Duration,
    ended: bool,
    error: Option<Errno>,
}

impl<T: Target> Member<T> {
    /// What is known and done.
    pub fn trimmer(&self) -> &Trimmer<T> {
        &self.trimmer
    }

    /// The same, to change what is left alone.
    pub fn trimmer_mut(&mut self) -> &mut Trimmer<T> {
        &mut self.trimmer
    }

    /// Whether it ended while it belonged to the fleet.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Why nothing is done with it any more.
    pub fn error(&self) -> Option<Errno> {
        self.error
    }

    fn out(&self) -> bool {
        self.ended || self.error.is_some()
    }

    fn turn_of(&self, id: Id) -> (u64, Reverse<u64>, Id) {
        (self.next_scan_ns, Reverse(self.size), id)
    }
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Something was done; there may be more to do at once.
    Worked,
    /// Nothing may be done before this much time has passed: the budget is used up.
    Spent(Duration),
    /// Nothing is to be done before this much time has passed.
    Idle(Duration),
}

/// CPU time: for searches, and for everything.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    scan_ns: u64,
    all_ns: u64,
}

/// Some of the processes have memory that is needed now. Each of them is searched once, and what is due is looked at; until then the
/// budget is only kept for the books, and the others wait.
struct Rush {
    members: BTreeSet<Id>,
    /// Those that were not searched yet, the largest first.
    unsearched: BTreeSet<(Reverse<u64>, Id)>,
    spent: Spent,
}

/// What is done next.
enum Next {
    Search(Id),
    Look,
    Nothing,
}

/// The processes that are trimmed, and the budget for it.
pub struct Fleet<T> {
    options: Options,
    members: BTreeMap<Id, Member<T>>,
    /// When each is searched next, but for those that are out.
    agenda: BTreeSet<(u64, Reverse<u64>, Id)>,
    /// Those with huge pages that are due.
    with_due: BTreeSet<Id>,
    budget: Budget,
    rush: Option<Rush>,
    spent: Spent,
    /// CPU time that was charged besides, for what was done elsewhere.
    elsewhere_ns: u64,
    /// Who is looked at, and how many looks are left of its quantum.
    current: Option<(Id, usize)>,
    /// The sums of those that have left.
    former: Tally,
}

impl<T: Target> Fleet<T> {
    /// A fleet without processes.
    pub fn new(options: Options, clock: &impl Clock) -> Fleet<T> {
        let budget = Budget::new(options.cpu, options.traffic, clock.now_ns());
        Fleet {
            options,
            members: BTreeMap::new(),
            agenda: BTreeSet::new(),
            with_due: BTreeSet::new(),
            budget,
            rush: None,
            spent: Spent::default(),
            elsewhere_ns: 0,
            current: None,
            former: Tally::default(),
        }
    }

    /// Whether `id` belongs to it.
    pub fn has(&self, id: Id) -> bool {
        self.members.contains_key(&id)
    }

    /// Adds a process that has about `size` bytes of memory; it is searched soon. One that belongs to the fleet already stays as it is.
    pub fn admit(&mut self, id: Id, target: T, size: u64) -> &mut Member<T> {
        let seed = (id.pid as u64) << 32 ^ id.start_ticks;
        let trimmer = Trimmer::new(target, self.options.clone(), seed);
        let pause = self.options.interval;
        let experience = Experience::default();
        let member = Member { trimmer, experience, size, next_scan_ns: 0, pause, ended: false, error: None };
        let agenda = &mut self.agenda;
        self.members.entry(id).or_insert_with(|| {
            agenda.insert(member.turn_of(id));
            member
        })
    }

    /// Lets those processes go for which `stays` is false; what they came to stays in the sums.
    pub fn retain(&mut self, mut stays: impl FnMut(Id, &mut Member<T>) -> bool) {
        let (former, agenda, with_due, rush) = (&mut self.former, &mut self.agenda, &mut self.with_due, &mut self.rush);
        self.members.retain(|&id, member| {
            let stays = stays(id, member);
            if !stays {
                *former += member.trimmer.tally().of_former();
                agenda.remove(&member.turn_of(id));
                with_due.remove(&id);
                if let Some(rush) = rush {
                    rush.members.remove(&id);
                    rush.unsearched.remove(&(Reverse(member.size), id));
                }
            }
            stays
        });
    }

    /// The processes.
    pub fn members(&self) -> impl Iterator<Item = (Id, &Member<T>)> {
        self.members.iter().map(|(&id, member)| (id, member))
    }

    /// The sums over all processes that ever belonged to it.
    pub fn total(&self) -> Tally {
        self.members.values().fold(self.former, |mut sum, member| {
            sum += *member.trimmer.tally();
            sum
        })
    }

    /// Huge pages that wait for a look.
    pub fn due(&self) -> usize {
        self.with_due.iter().filter_map(|id| self.members.get(id)).map(|member| member.trimmer.due()).sum()
    }

    /// CPU time that was charged to the budget, in nanoseconds.
    pub fn charged_ns(&self) -> u64 {
        self.spent.all_ns + self.elsewhere_ns
    }

    /// Processes that were never searched.
    pub fn unsearched(&self) -> usize {
        self.agenda.iter().take_while(|&&(at_ns, ..)| at_ns == 0).count()
    }

    /// Charges CPU time that was used to find processes.
    pub fn charge(&mut self, cpu_ns: u64, clock: &impl Clock) {
        self.spent.all_ns += cpu_ns;
        self.spent.scan_ns += cpu_ns;
        self.budget.charge(cpu_ns, 0, clock.now_ns());
    }

    /// Charges what is left of `cpu_ns`, the CPU time that was used for the fleet so far, here and elsewhere, after what was charged before.
    pub fn charge_up_to(&mut self, cpu_ns: u64, clock: &impl Clock) {
        let left = cpu_ns.saturating_sub(self.charged_ns());
        if left > 0 {
            self.elsewhere_ns += left;
            self.budget.charge(left, 0, clock.now_ns());
        }
    }

    /// This one takes the place of another, to which `charged_ns` was charged: nothing is saved up.
    pub fn go_on_after(&mut self, charged_ns: u64, clock: &impl Clock) {
        if charged_ns > 0 {
            self.elsewhere_ns = charged_ns;
            self.budget.use_up(clock.now_ns());
        }
    }

    /// What [`Options`] say from now on. What was looked at stays known.
    pub fn reconfigure(&mut self, options: Options, clock: &impl Clock) {
        let now = clock.now_ns();
        self.budget = Budget::new(options.cpu, options.traffic, now);
        for (&id, member) in self.members.iter_mut() {
            member.trimmer.reconfigure(options.clone());
            if self.agenda.remove(&member.turn_of(id)) {
                member.pause = options.interval;
                member.next_scan_ns = member.next_scan_ns.min(now + options.interval.as_nanos() as u64);
                self.agenda.insert(member.turn_of(id));
            }
        }
        self.options = options;
    }

    /// The memory of those processes for which `needed` is true is needed now: somebody waits for it. Each is searched once, nothing
    /// rests, and until everything of them was looked at the budget holds nothing up and the others wait. In the place of a rush before.
    pub fn rush(&mut self, needed: impl Fn(Id) -> bool) {
        self.current = None;
        let mut rush = Rush { members: BTreeSet::new(), unsearched: BTreeSet::new(), spent: Spent::default() };
        for (&id, member) in self.members.iter_mut().filter(|(id, member)| needed(**id) && !member.out()) {
            member.trimmer.wake_all();
            rush.members.insert(id);
            rush.unsearched.insert((Reverse(member.size), id));
        }
        self.rush = Some(rush);
    }

    /// Whether there is a [`rush`](Fleet::rush).
    pub fn rushing(&self) -> bool {
        self.rush.is_some()
    }

    /// Ends a [`rush`](Fleet::rush): nobody waits any more.
    pub fn calm_down(&mut self) {
        self.rush = None;
        self.current = None;
    }

    /// What has gone of those processes for which `counts` is true, in bytes.
    pub fn gone_of(&self, counts: impl Fn(Id) -> bool) -> u64 {
        let members = self.members.iter().filter(|(id, _)| counts(**id));
        members.map(|(_, member)| member.trimmer.tally().gone_bytes).sum()
    }

    fn next_in(&self, rush: &Rush) -> Next {
        let due = self.with_due.iter().any(|id| rush.members.contains(id));
        match rush.unsearched.first() {
            Some(&(_, id)) if !due || plan::scan_first(rush.spent.scan_ns, rush.spent.all_ns) => Next::Search(id),
            _ if due => Next::Look,
            _ => Next::Nothing,
        }
    }

    fn next_at(&self, now_ns: u64) -> Next {
        let due = !self.with_due.is_empty();
        match self.agenda.first() {
            Some(&(at_ns, _, id))
                if at_ns <= now_ns && (!due || plan::scan_first(self.spent.scan_ns, self.spent.all_ns)) =>
            {
                Next::Search(id)
            }
            _ if due => Next::Look,
            _ => Next::Nothing,
        }
    }

    /// Does a little: searches a process or looks at a huge page of one.
    pub fn turn(&mut self, clock: &impl Clock) -> Turn {
        let now = clock.now_ns();
        let mut next = Next::Nothing;
        if let Some(rush) = &self.rush {
            next = self.next_in(rush);
            if matches!(next, Next::Nothing) {
                self.calm_down();
            }
        }
        if self.rush.is_none() {
            let wait = self.budget.wait(now);
            if wait > Duration::ZERO {
                return Turn::Spent(wait);
            }
            next = self.next_at(now);
        }
        let before = clock.cpu_ns();
        match next {
            Next::Search(id) => self.search(id, clock),
            Next::Look => self.look(clock),
            Next::Nothing => {
                let until = |&(at_ns, ..): &(u64, _, _)| Duration::from_nanos(at_ns.saturating_sub(now));
                return Turn::Idle(self.agenda.first().map_or(self.options.interval, until));
            }
        }
        let spent = clock.cpu_ns() - before;
        let search_ns = if matches!(next, Next::Search(_)) { spent } else { 0 };
        let rush = self.rush.as_mut().map(|rush| &mut rush.spent);
        for sum in rush.into_iter().chain([&mut self.spent]) {
            sum.all_ns += spent;
            sum.scan_ns += search_ns;
        }
        self.budget.charge(spent, 0, clock.now_ns());
        Turn::Worked
    }

    fn search(&mut self, id: Id, clock: &impl Clock) {
        let Some(member) = self.members.get_mut(&id) else { return };
        self.agenda.remove(&member.turn_of(id));
        if let Some(rush) = &mut self.rush {
            rush.unsearched.remove(&(Reverse(member.size), id));
        }
        match member.trimmer.scan(clock) {
            Ok(due) => {
                member.pause = plan::pause(due > 0, member.pause, self.options.interval);
                member.next_scan_ns = clock.now_ns() + member.pause.as_nanos() as u64;
                self.agenda.insert(member.turn_of(id));
                if due > 0 {
                    self.with_due.insert(id)
                } else {
                    self.with_due.remove(&id)
                };
            }
            Err(error) => self.leave(id, error, clock.now_ns()),
        }
    }

    /// Nothing is done with a process any more; for a while, if what went wrong says nothing of the process.
    fn leave(&mut self, id: Id, error: Errno, now_ns: u64) {
        let Some(member) = self.members.get_mut(&id) else { return };
        self.agenda.remove(&member.turn_of(id));
        self.with_due.remove(&id);
        match error.0 {
            _ if !member.trimmer.target().alive() => member.ended = true,
            libc::ESRCH | libc::ENOENT => member.ended = true,
            libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::EINTR => {
                member.pause = plan::pause(false, member.pause, self.options.interval);
                member.next_scan_ns = now_ns + member.pause.as_nanos() as u64;
                self.agenda.insert(member.turn_of(id));
            }
            _ => member.error = Some(error),
        }
        if let Some(rush) = &mut self.rush {
            rush.unsearched.remove(&(Reverse(member.size), id));
        }
    }

    fn look(&mut self, clock: &impl Clock) {
        if !self.current.is_some_and(|(id, left)| left > 0 && self.with_due.contains(&id)) {
            let meant = |id: &&Id| self.rush.as_ref().is_none_or(|rush| rush.members.contains(id));
            let due = self.with_due.iter().filter(meant);
            let candidates = due.filter_map(|id| Some((*id, &self.members.get(id)?.experience)));
            self.current = plan::best(candidates).map(|id| (id, QUANTUM));
        }
        let Some((id, left)) = &mut self.current else { return };
        *left -= 1;
        let id = *id;
        let Some(member) = self.members.get_mut(&id) else { return };
        let before = *member.trimmer.tally();
        let step = member.trimmer.step(clock);
        let after = member.trimmer.tally();
        let split_ns = after.split_ns - before.split_ns;
        let bytes = match self.options.dry_run {
            true => after.could_go_bytes - before.could_go_bytes,
            false => after.gone_bytes - before.gone_bytes,
        };
        member.experience.learn(Found {
            looks: 1,
            hits: after.under_used - before.under_used,
            bytes,
            look_ns: after.cpu_ns - before.cpu_ns - split_ns,
            split_ns,
        });
        self.budget.charge(0, after.read_bytes - before.read_bytes, clock.now_ns());
        if member.trimmer.due() == 0 {
            self.with_due.remove(&id);
        }
        match step {
            Ok(Step::Looked | Step::Nothing) => {}
            Ok(Step::Ended) => self.leave(id, Errno(libc::ESRCH), clock.now_ns()),
            Err(error) => self.leave(id, error, clock.now_ns()),
        }
    }
}
