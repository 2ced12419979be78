//! Trimming many processes within one budget.
//!
//! Who runs a fleet says which processes belong to it and calls [`Fleet::turn`] again and again; each turn is one search of a process or a few
//! looks at one's huge pages. Nothing here sleeps or makes a system call by itself, so that a fleet of ten thousand is simulated with
//! the same code.

use super::budget::Budget;
use super::options::Options;
use super::plan::{self, Experience, Found};
use super::tally::Tally;
use super::target::Target;
use super::trimmer::{Clock, Step, Trimmer};
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

/// The processes that are trimmed, and the budget for it.
pub struct Fleet<T> {
    options: Options,
    members: BTreeMap<Id, Member<T>>,
    /// When each is searched next, but for those that are out.
    agenda: BTreeSet<(u64, Reverse<u64>, Id)>,
    /// Those with huge pages that are due.
    with_due: BTreeSet<Id>,
    budget: Budget,
    /// As long as there is something to do, the budget is only kept for the books.
    urgent: bool,
    scan_ns: u64,
    all_ns: u64,
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
            urgent: false,
            scan_ns: 0,
            all_ns: 0,
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
        let (former, agenda, with_due) = (&mut self.former, &mut self.agenda, &mut self.with_due);
        self.members.retain(|&id, member| {
            let stays = stays(id, member);
            if !stays {
                *former += member.trimmer.tally().of_former();
                agenda.remove(&member.turn_of(id));
                with_due.remove(&id);
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
        self.all_ns
    }

    /// Processes that were never searched.
    pub fn unsearched(&self) -> usize {
        self.agenda.iter().take_while(|&&(at_ns, ..)| at_ns == 0).count()
    }

    /// Charges CPU time that was used for the fleet elsewhere.
    pub fn charge(&mut self, cpu_ns: u64, clock: &impl Clock) {
        self.all_ns += cpu_ns;
        self.scan_ns += cpu_ns;
        self.budget.charge(cpu_ns, 0, clock.now_ns());
    }

    /// Memory is needed now: every process is searched at once, nothing rests, and until everything was looked at the budget does not
    /// hold anything up (the processes would wait for us).
    pub fn hurry(&mut self) {
        self.urgent = true;
        self.current = None;
        self.agenda.clear();
        for (&id, member) in self.members.iter_mut().filter(|(_, member)| !member.out()) {
            member.trimmer.wake_all();
            member.next_scan_ns = 0;
            self.agenda.insert(member.turn_of(id));
        }
    }

    /// Does a little: searches a process or looks at a few huge pages of one.
    pub fn turn(&mut self, clock: &impl Clock) -> Turn {
        let now = clock.now_ns();
        let wait = self.budget.wait(now);
        if wait > Duration::ZERO && !self.urgent {
            return Turn::Spent(wait);
        }
        let before = clock.cpu_ns();
        let due = !self.with_due.is_empty();
        let next = self.agenda.first().copied();
        let scan = next.filter(|&(at_ns, ..)| {
            at_ns <= now && (!due || self.urgent || plan::scan_first(self.scan_ns, self.all_ns))
        });
        if let Some((.., id)) = scan {
            self.search(id, clock);
            self.scan_ns += clock.cpu_ns() - before;
        } else if due {
            self.look(clock);
        } else {
            self.urgent = false;
            let wait =
                next.map_or(self.options.interval, |(at_ns, ..)| Duration::from_nanos(at_ns.saturating_sub(now)));
            return Turn::Idle(wait);
        }
        let spent = clock.cpu_ns() - before;
        self.all_ns += spent;
        self.budget.charge(spent, 0, clock.now_ns());
        Turn::Worked
    }

    fn search(&mut self, id: Id, clock: &impl Clock) {
        let Some(member) = self.members.get_mut(&id) else { return };
        self.agenda.remove(&member.turn_of(id));
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
            Err(error) => self.leave(id, error),
        }
    }

    /// Nothing is done with a process any more.
    fn leave(&mut self, id: Id, error: Errno) {
        let Some(member) = self.members.get_mut(&id) else { return };
        match error.0 {
            _ if !member.trimmer.target().alive() => member.ended = true,
            libc::ESRCH | libc::ENOENT => member.ended = true,
            _ => member.error = Some(error),
        }
        self.agenda.remove(&member.turn_of(id));
        self.with_due.remove(&id);
    }

    fn look(&mut self, clock: &impl Clock) {
        if !self.current.is_some_and(|(id, left)| left > 0 && self.with_due.contains(&id)) {
            let candidates = self.with_due.iter().filter_map(|id| Some((*id, &self.members.get(id)?.experience)));
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
            Ok(Step::Ended) => self.leave(id, Errno(libc::ESRCH)),
            Err(error) => self.leave(id, error),
        }
    }
}
