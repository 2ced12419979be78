//! What is done about a group at its limit: when it is looked at, when memory of it is searched for past the budget (a *rush*), and when
//! it is left to the kernel. Pure: what it decides, others do, and a rush goes on beside the looks.

use super::held::Standing;
use crate::control::Backoff;
use std::time::Duration;

/// Between two looks at a group, and while it was near its limit lately: version 2 doesn't signal that.
const SLICE: Duration = Duration::from_millis(100);
const CLOSE_SLICE: Duration = Duration::from_millis(10);
const ALERT: Duration = Duration::from_secs(1);
/// Looks take at most this share of the budget: the kernel may signal a group full of page cache a hundred times a second.
const LOOKS: f64 = 0.25;
/// They may take all of it if they are further apart than this: where looks are dear, everything is, and in version 2 a task may come from
/// `memory.high` to where it is killed in four sleeps of up to two seconds each, while its memory has still to be searched.
const REST_LONG: Duration = Duration::from_millis(500);
/// What was not used for looks is there for later ones, up to what is had in this time. For looks at what the kernel has signalled, such as that
/// tasks are held, there is more of it: a program whose memory was given back may be at its limit again at once, many times in a row.
const SAVED: Duration = Duration::from_millis(50);
const SAVED_FOR_SIGNALS: Duration = Duration::from_millis(200);
/// Longest time between two looks, whatever they cost.
const REST_MOST: Duration = Duration::from_secs(2);
/// Near the limit, exceed the budget only while a quarter of the time goes into splits; otherwise back off exponentially, until this
/// share of the budget pays for the attempts.
const WORTHWHILE: u64 = 4;
const ATTEMPTS: f64 = 0.5;
const NEAR_FIRST: Duration = Duration::from_millis(10);
const NEAR_MOST: Duration = Duration::from_secs(1);
/// The same of a held group, whose tasks go on meanwhile with what was found: a little each time is not worth searching all the time. They use
/// that up within milliseconds and then sleep, so the first pauses are short.
const LITTLE_FIRST: Duration = Duration::from_millis(5);
const LITTLE_MOST: Duration = Duration::from_secs(1);
/// Where a search takes long, the pauses grow to so many times what it took.
const LITTLE_PAID: u64 = 4;
/// How often a held group is searched in vain before it is let go, and how long between: something may be at its pages for a moment.
const IN_VAIN: usize = 3;
const BETWEEN: Duration = Duration::from_millis(20);
/// Held tasks wait no longer without a pause for a rush that brings nothing: it may be stuck. On a slow machine with more to do than it can,
/// two seconds went by before the first memory was found.
const PATIENCE: Duration = Duration::from_secs(5);
/// And no longer than this for one that has not begun, since memory of other groups is searched first.
const QUEUE: Duration = Duration::from_secs(30);
/// A group that was let go is left to the kernel for so long.
const LET_GO_FIRST: Duration = Duration::from_secs(2);
const LET_GO_MOST: Duration = Duration::from_secs(64);

/// What a rush came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rushed {
    /// Memory of the group that has gone.
    pub gone_bytes: u64,
    /// CPU time that it took, and the part of that for splits.
    pub cpu_ns: u64,
    /// See `cpu_ns`.
    pub split_ns: u64,
}

impl Rushed {
    fn worthwhile(self) -> bool {
        WORTHWHILE * self.split_ns >= self.cpu_ns
    }
}

/// What is to be done now, all of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Todo {
    /// The group is held again.
    pub hold_again: bool,
    /// The group is let go.
    pub let_go: bool,
    /// Memory of it is searched for, past the budget. [`Relief::begun`] is to be told when that begins, and [`Relief::rushed`] what came of it.
    pub rush: bool,
    /// Tasks wait for the rush that was asked for, whether or not it has begun. If it has, [`Relief::begun`] is to be told once more.
    pub hurry: bool,
    /// The rush is over, whatever it was at.
    pub calm_down: bool,
    /// It was let go because there was nothing to give back, for the first time in a while: somebody should know.
    pub given_up: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Calm,
    /// A rush, begun when the group was near its limit.
    Near,
    /// A rush that held tasks wait for, since this time, whether it has begun, and what was tried before it.
    Held {
        since_ns: u64,
        begun: bool,
        tried: Tried,
    },
    /// Held, between two rushes.
    Between {
        until_ns: u64,
        tried: Tried,
    },
}

impl State {
    /// Tasks wait for a rush that was asked for.
    fn waiting(since_ns: u64, tried: Tried) -> State {
        State::Held { since_ns, begun: false, tried }
    }
}

/// Rushes in vain for tasks that are held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tried {
    times: usize,
    cpu_ns: u64,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Relief {
    /// The share of one CPU that may be used.
    share: f64,
    state: State,
    near: Backoff,
    held: Backoff,
    little: Backoff,
    /// Until this time the group has been near its limit lately.
    alert_ns: u64,
    /// When the last look was, when all looks will be paid for by what they have cost, and before when there is none: a little earlier.
    looked_ns: u64,
    paid_ns: u64,
    rest_ns: u64,
}

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl Relief {
    /// For a budget of `share` of one CPU.
    pub fn new(share: f64) -> Relief {
        Relief {
            share,
            state: State::Calm,
            near: Backoff::new(NEAR_FIRST, NEAR_MOST),
            held: Backoff::new(LET_GO_FIRST, LET_GO_MOST),
            little: Backoff::new(LITTLE_FIRST, LITTLE_MOST),
            alert_ns: 0,
            looked_ns: 0,
            paid_ns: 0,
            rest_ns: 0,
        }
    }

    /// From now on, the budget is `share` of one CPU.
    pub fn set_share(&mut self, share: f64) {
        self.share = share;
    }

    /// It is another group now, with the name of the one before: a rush for that one is no longer of interest, and where nothing could be
    /// done there, this one is left to the kernel for the first pause at most.
    pub fn anew(&mut self, now_ns: u64) {
        self.state = State::Calm;
        self.near.worth_it();
        self.little.worth_it();
        self.held.shorten(now_ns);
        (self.alert_ns, self.looked_ns, self.paid_ns, self.rest_ns) = (0, 0, 0, 0);
    }

    /// When the group is to be looked at, whatever happens.
    pub fn next_look_ns(&self) -> u64 {
        let close = self.looked_ns < self.alert_ns || self.state != State::Calm;
        let next = self.looked_ns + ns(if close { CLOSE_SLICE } else { SLICE });
        match self.state {
            State::Between { until_ns, .. } => until_ns.max(self.rest_ns),
            State::Calm | State::Near | State::Held { .. } => next.max(self.rest_ns),
        }
    }

    /// When to come back if nothing happens until then: for the next look, or because it [listens](Relief::listens) again.
    pub fn next_turn_ns(&self, now_ns: u64) -> u64 {
        let next = self.next_look_ns();
        if self.listens(now_ns) { next } else { next.min(self.listens_ns()) }
    }

    fn listens_ns(&self) -> u64 {
        (self.rest_ns + ns(SAVED)).saturating_sub(ns(SAVED_FOR_SIGNALS))
    }

    /// Whether it may be looked at already if the kernel says that something has happened.
    pub fn listens(&self, now_ns: u64) -> bool {
        now_ns >= self.listens_ns()
    }

    /// It was looked at, which took `cpu_ns` of CPU time: it stands like this, and is `holding`, not let go.
    pub fn looked(&mut self, standing: Standing, holding: bool, cpu_ns: u64, now_ns: u64) -> Todo {
        self.looked_ns = now_ns;
        let rest = self.paid(cpu_ns, LOOKS).min(REST_LONG).max(self.paid(cpu_ns, 1.0).min(REST_MOST));
        self.paid_ns = (self.paid_ns.max(now_ns) + ns(rest)).min(now_ns + ns(REST_MOST + SAVED));
        self.rest_ns = self.paid_ns.saturating_sub(ns(SAVED));
        let ready = self.held.ready(now_ns);
        let mut todo = Todo::default();
        if standing != Standing::Held
            && let State::Held { since_ns, .. } = &mut self.state
        {
            // What is found helps already: the patience is with tasks that wait without a pause.
            *since_ns = now_ns;
        }
        match (standing, self.state) {
            (Standing::Held, State::Held { since_ns, begun, tried })
                if now_ns >= since_ns + ns(if begun { PATIENCE } else { QUEUE }) =>
            {
                todo.calm_down = true;
                self.give_up(tried.cpu_ns, now_ns, &mut todo);
            }
            (Standing::Held, State::Held { .. }) => {}
            // What it finds is needed by now.
            (Standing::Held, State::Near) => {
                self.state = State::waiting(now_ns, Tried::default());
                todo.hurry = true;
            }
            (Standing::Held, State::Between { until_ns, tried }) => {
                if now_ns >= until_ns {
                    self.state = State::waiting(now_ns, tried);
                    todo.rush = true;
                }
            }
            (Standing::Held, State::Calm) if ready => {
                self.state = State::waiting(now_ns, Tried::default());
                todo.rush = true;
            }
            // It came back to where nothing could be done.
            (Standing::Held, State::Calm) => todo.let_go = holding,
            (Standing::Near | Standing::Quiet, State::Between { .. }) => self.state = State::Calm,
            (Standing::Near, _) => todo.hold_again = ready && !holding,
            (Standing::Quiet, _) => todo.hold_again = !holding,
        }
        if standing == Standing::Near && self.state == State::Calm && self.near.ready(now_ns) {
            self.alert_ns = now_ns + ns(ALERT);
            self.state = State::Near;
            todo.rush = true;
        }
        todo
    }

    /// Whether tasks wait for the rush that was asked for.
    pub fn urgent(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// The rush that was asked for has begun.
    pub fn begun(&mut self, now_ns: u64) {
        if let State::Held { since_ns, begun, .. } = &mut self.state {
            (*since_ns, *begun) = (now_ns, true);
        }
    }

    /// The rush is over, and came to this; the group stands like this now.
    pub fn rushed(&mut self, rushed: Rushed, standing: Standing, now_ns: u64) -> Todo {
        let mut todo = Todo::default();
        match std::mem::replace(&mut self.state, State::Calm) {
            State::Calm | State::Between { .. } => {}
            State::Near if rushed.worthwhile() => {
                self.near.worth_it();
                self.paid_ns = 0;
                self.look_again(now_ns);
            }
            State::Near => {
                let paid = self.paid(rushed.cpu_ns, ATTEMPTS);
                self.near.in_vain(paid, now_ns);
            }
            State::Held { .. } if rushed.gone_bytes > 0 => {
                // Looks that have led to something are not what the budget is to bound.
                self.paid_ns = 0;
                self.look_again(now_ns);
                if rushed.worthwhile() {
                    self.held.worth_it();
                    self.little.worth_it();
                } else {
                    // It ends no episode: some page that was just touched is nearly always there to be found.
                    let paid = Duration::from_nanos(LITTLE_PAID * rushed.cpu_ns);
                    self.little.in_vain(paid, now_ns);
                    self.state = State::Between { until_ns: self.little.until_ns(), tried: Tried::default() };
                }
            }
            State::Held { .. } if standing != Standing::Held => self.look_again(now_ns),
            State::Held { tried, .. } => {
                let tried = Tried { times: tried.times + 1, cpu_ns: tried.cpu_ns + rushed.cpu_ns };
                if tried.times < IN_VAIN {
                    self.state = State::Between { until_ns: now_ns + ns(BETWEEN), tried };
                } else {
                    self.give_up(tried.cpu_ns, now_ns, &mut todo);
                }
            }
        }
        todo
    }

    fn give_up(&mut self, cpu_ns: u64, now_ns: u64, todo: &mut Todo) {
        self.state = State::Calm;
        let paid = self.paid(cpu_ns, ATTEMPTS);
        todo.given_up = self.held.in_vain(paid, now_ns);
        todo.let_go = true;
    }

    /// Looks again at once: what was found is no longer true.
    fn look_again(&mut self, now_ns: u64) {
        (self.looked_ns, self.rest_ns) = (0, 0);
        self.alert_ns = now_ns + ns(ALERT);
    }

    /// The time after which a part of the budget has paid for so much CPU time.
    fn paid(&self, cpu_ns: u64, part: f64) -> Duration {
        Duration::from_nanos(cpu_ns).div_f64(part * self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    /// A made-up group, and somebody who does what is decided.
    struct Run {
        relief: Relief,
        now_ns: u64,
        holding: bool,
        /// When the rush that goes on will be over; never where whoever is at it is stuck.
        rush_ends_ns: Option<u64>,
        rush_takes_ns: u64,
        /// How long it is before one begins, if that is never told.
        queue_ns: u64,
        brings: Rushed,
        looks: Vec<u64>,
        rushes: usize,
        let_go: Vec<u64>,
        given_up: usize,
        cpu_ns: u64,
    }

    impl Run {
        fn new(rush_takes_ns: u64, brings: Rushed) -> Run {
            Run {
                relief: Relief::new(0.01),
                now_ns: 1000 * SECOND,
                holding: true,
                rush_ends_ns: None,
                rush_takes_ns,
                queue_ns: 0,
                brings,
                looks: Vec::new(),
                rushes: 0,
                let_go: Vec::new(),
                given_up: 0,
                cpu_ns: 0,
            }
        }

        fn does(&mut self, todo: Todo) {
            assert!(!todo.let_go || !(todo.hold_again || todo.rush), "{todo:?}");
            if todo.calm_down {
                self.rush_ends_ns = None;
            }
            if todo.rush {
                assert_eq!(self.rush_ends_ns, None, "two at once");
                self.rush_ends_ns = Some((self.now_ns + self.queue_ns).saturating_add(self.rush_takes_ns));
                self.rushes += 1;
            }
            if (todo.rush || todo.hurry) && self.queue_ns == 0 {
                self.relief.begun(self.now_ns);
            }
            if todo.let_go {
                self.let_go.push(self.now_ns);
                self.holding = false;
            }
            self.holding |= todo.hold_again;
            self.given_up += usize::from(todo.given_up);
        }

        /// For `time`, in which the group stands as `standing` says.
        fn pass(&mut self, time: u64, look_ns: u64, mut standing: impl FnMut(&Run) -> Standing) {
            let end = self.now_ns + time;
            while self.now_ns < end {
                let next = self.relief.next_look_ns().max(self.now_ns).min(self.rush_ends_ns.unwrap_or(u64::MAX));
                self.now_ns = (next + 1).max(self.now_ns + 1);
                if self.rush_ends_ns.is_some_and(|at| self.now_ns >= at) {
                    self.rush_ends_ns = None;
                    self.cpu_ns += self.brings.cpu_ns;
                    let todo = self.relief.rushed(self.brings, standing(self), self.now_ns);
                    self.does(todo);
                } else {
                    self.looks.push(self.now_ns);
                    self.cpu_ns += look_ns;
                    let standing = standing(self);
                    let todo = self.relief.looked(standing, self.holding, look_ns, self.now_ns);
                    self.does(todo);
                }
            }
        }
    }

    #[test]
    fn what_is_signalled_after_a_rest_is_heard_before_the_next_look() {
        let mut relief = Relief::new(0.01);
        // A look of 800 us is paid for by a rest of 320 ms, of which 50 ms were saved for any look, and 200 ms for those that are asked for.
        relief.looked(Standing::Quiet, true, 800_000, SECOND);
        assert!(!relief.listens(SECOND) && relief.next_look_ns() == SECOND + 270 * MS);
        assert_eq!(relief.next_turn_ns(SECOND), SECOND + 120 * MS);
        assert!(relief.listens(SECOND + 120 * MS));
        assert_eq!(relief.next_turn_ns(SECOND + 120 * MS), SECOND + 270 * MS);
        // Cheap ones are heard at once, until what was saved is used up.
        let mut relief = Relief::new(0.01);
        let heard = (0..20).filter(|look| {
            let now = SECOND + look * MS;
            let listens = relief.listens(now);
            if listens {
                relief.looked(Standing::Quiet, true, 100_000, now);
            }
            listens
        });
        assert!((5..10).contains(&heard.count()));
    }

    #[test]
    fn a_quiet_group_is_looked_at_and_nothing_else_is_done() {
        let mut run = Run::new(MS, Rushed::default());
        run.pass(100 * SECOND, 5_000, |_| Standing::Quiet);
        assert_eq!((run.rushes, run.let_go.len(), run.holding), (0, 0, true));
        assert!((900..=1001).contains(&run.looks.len()), "{} looks", run.looks.len());
        // Where a look is dear, there are fewer, but two in a second as long as the budget pays for them.
        let mut run = Run::new(MS, Rushed::default());
        run.pass(100 * SECOND, 3 * MS, |_| Standing::Quiet);
        assert!((200..=202).contains(&run.looks.len()) && run.cpu_ns <= SECOND, "{} looks", run.looks.len());
        // And one in two seconds, whether or not it does.
        let mut run = Run::new(MS, Rushed::default());
        run.pass(100 * SECOND, 20 * MS, |_| Standing::Quiet);
        assert!(run.looks.windows(2).all(|pair| pair[1] - pair[0] <= 2 * SECOND + MS));
        assert!((50..=52).contains(&run.looks.len()), "{} looks", run.looks.len());
    }

    #[test]
    fn held_tasks_wait_for_memory_that_there_is() {
        let brings = Rushed { gone_bytes: 1 << 20, cpu_ns: 5 * MS, split_ns: 4 * MS };
        let mut run = Run::new(5 * MS, brings);
        // Held again and again, until it was relieved twenty times.
        run.pass(10 * SECOND, 5_000, |run| {
            if run.rushes < 20 || run.rush_ends_ns.is_some() { Standing::Held } else { Standing::Quiet }
        });
        assert_eq!((run.rushes, run.let_go.len(), run.given_up), (20, 0, 0));
        // As fast as it goes.
        assert!(run.looks[..20].iter().all(|&at| at < 1001 * SECOND));
    }

    #[test]
    fn what_cannot_be_helped_is_left_to_the_kernel_soon_and_tried_again_ever_less() {
        let mut run = Run::new(2 * MS, Rushed { cpu_ns: 2 * MS, ..Rushed::default() });
        run.pass(600 * SECOND, 5_000, |_| Standing::Held);
        assert!(run.let_go[0] < 1000 * SECOND + 200 * MS, "{}", run.let_go[0] - 1000 * SECOND);
        assert_eq!((run.given_up, run.holding), (1, false));
        // 2, 4, 8, 16, 32, 64, 64, ... seconds.
        assert!((12..=16).contains(&(run.rushes / IN_VAIN)), "{} rushes", run.rushes);
        assert!(run.cpu_ns < 600 * SECOND / 100, "{} ns", run.cpu_ns);
        // It is held again once there is room.
        run.pass(SECOND, 5_000, |_| Standing::Quiet);
        assert!(run.holding);
    }

    #[test]
    fn another_group_of_the_same_name_waits_for_the_first_pause_at_most() {
        let mut run = Run::new(2 * MS, Rushed { cpu_ns: 2 * MS, ..Rushed::default() });
        run.pass(200 * SECOND, 5_000, |_| Standing::Held);
        let before = run.rushes;
        run.relief.anew(run.now_ns);
        (run.holding, run.rush_ends_ns) = (true, None);
        run.pass(
            2 * SECOND + 200 * MS,
            5_000,
            |run| if run.rushes == before { Standing::Quiet } else { Standing::Held },
        );
        assert_eq!((run.rushes, run.holding), (before, true));
        run.pass(200 * MS, 5_000, |_| Standing::Held);
        assert_eq!(run.rushes, before + IN_VAIN);
        // A rush that still goes on for the one before is nobody's any more.
        let mut relief = Relief::new(0.01);
        assert!(relief.looked(Standing::Held, true, 0, SECOND).rush);
        relief.anew(SECOND);
        assert_eq!(relief.rushed(Rushed::default(), Standing::Quiet, SECOND + MS), Todo::default());
    }

    #[test]
    fn a_little_at_a_time_is_searched_for_once_a_second() {
        // One page of a hundred, made huge again meanwhile.
        let brings = Rushed { gone_bytes: 1 << 20, cpu_ns: 200 * MS, split_ns: MS };
        let mut run = Run::new(200 * MS, brings);
        run.pass(100 * SECOND, 5_000, |_| Standing::Held);
        assert!((80..=100).contains(&run.rushes), "{} rushes", run.rushes);
        assert_eq!((run.let_go.len(), run.given_up, run.holding), (0, 0, true));
    }

    #[test]
    fn tasks_sleep_for_milliseconds_where_the_last_rush_brought_little() {
        let brings = Rushed { gone_bytes: 1 << 20, cpu_ns: 4 * MS, split_ns: MS / 2 };
        let mut run = Run::new(4 * MS, brings);
        // Rushes of 4 ms, and between them 5, 10, 20 and 40 ms.
        run.pass(94 * MS, 5_000, |_| Standing::Held);
        assert_eq!((run.rushes, run.holding), (5, true));
    }

    #[test]
    fn a_rush_that_helps_may_take_its_time() {
        // On a slow machine: ten seconds, in which tasks are held again and again for a moment.
        let brings = Rushed { gone_bytes: 1 << 20, cpu_ns: 9 * SECOND, split_ns: 8 * SECOND };
        let mut run = Run::new(10 * SECOND, brings);
        let now_and_then = |run: &Run| match run.now_ns / (500 * MS) % 2 {
            0 => Standing::Held,
            _ => Standing::Near,
        };
        run.pass(9 * SECOND, 5_000, now_and_then);
        assert_eq!((run.rushes, run.let_go.len(), run.given_up, run.holding), (1, 0, 0, true));
    }

    #[test]
    fn nobody_waits_for_a_rush_that_is_stuck() {
        let mut run = Run::new(u64::MAX / 2, Rushed::default());
        run.pass(7 * SECOND, 5_000, |_| Standing::Held);
        let waited = run.let_go[0] - 1000 * SECOND;
        assert!(waited < 5 * SECOND + 100 * MS, "{waited} ns");
        assert_eq!(run.given_up, 1);
        assert!(run.looks.windows(2).all(|pair| pair[1] - pair[0] <= 2 * SECOND));
    }

    #[test]
    fn a_rush_that_has_to_wait_for_others_is_waited_for_but_not_for_ever() {
        let brings = Rushed { gone_bytes: 1 << 20, cpu_ns: 5 * MS, split_ns: 4 * MS };
        let mut run = Run::new(5 * MS, brings);
        run.queue_ns = 20 * SECOND;
        run.pass(19 * SECOND, 5_000, |_| Standing::Held);
        assert_eq!((run.rushes, run.let_go.len()), (1, 0));
        let mut run = Run::new(5 * MS, brings);
        run.queue_ns = 1000 * SECOND;
        run.pass(40 * SECOND, 5_000, |_| Standing::Held);
        let waited = run.let_go[0] - 1000 * SECOND;
        assert!((30 * SECOND..31 * SECOND).contains(&waited), "{waited} ns");
    }

    #[test]
    fn near_the_limit_the_budget_holds_unless_it_pays() {
        // Nothing to find: the attempts cost no more than half of the budget.
        let mut run = Run::new(10 * MS, Rushed { cpu_ns: 10 * MS, ..Rushed::default() });
        run.pass(600 * SECOND, 5_000, |_| Standing::Near);
        assert!(run.cpu_ns < 600 * SECOND / 100, "{} ns, {} rushes", run.cpu_ns, run.rushes);
        assert!(run.rushes > 100);
        // What is found is taken at once, again and again.
        let mut run = Run::new(10 * MS, Rushed { gone_bytes: 1, cpu_ns: 10 * MS, split_ns: 5 * MS });
        run.pass(SECOND, 5_000, |_| Standing::Near);
        assert!(run.rushes > 30, "{} rushes", run.rushes);
    }

    #[test]
    fn a_rush_of_a_near_group_serves_one_that_is_held_meanwhile() {
        let mut relief = Relief::new(0.01);
        let now = 1000 * SECOND;
        assert_eq!(relief.looked(Standing::Near, true, 0, now), Todo { rush: true, ..Todo::default() });
        assert!(!relief.urgent());
        assert_eq!(relief.looked(Standing::Held, true, 0, now + MS), Todo { hurry: true, ..Todo::default() });
        assert!(relief.urgent());
        let todo = relief.rushed(Rushed::default(), Standing::Held, now + 2 * MS);
        assert_eq!(todo, Todo::default());
        let again = relief.next_look_ns();
        assert_eq!(again, now + 22 * MS);
        assert_eq!(relief.looked(Standing::Held, true, 0, again), Todo { rush: true, ..Todo::default() });
        // What a rush says that was called off is not heard.
        let mut relief = Relief::new(0.01);
        assert_eq!(relief.rushed(Rushed::default(), Standing::Held, now), Todo::default());
    }

    #[test]
    fn a_little_that_takes_long_to_find_is_paid_for_and_ends_no_episode() {
        let mut relief = Relief::new(0.01);
        let mut now = 100 * SECOND;
        let found = Rushed { gone_bytes: 4096, cpu_ns: 2 * SECOND, split_ns: 0 };
        let mut pauses = Vec::new();
        for _ in 0..20 {
            assert!(relief.looked(Standing::Held, true, 0, now).rush);
            now += 2 * SECOND;
            relief.rushed(found, Standing::Held, now);
            let next = relief.next_look_ns();
            pauses.push(next - now);
            now = next;
        }
        assert_eq!((pauses[0], pauses[19]), (5 * MS, LITTLE_PAID * found.cpu_ns));
        // In vain three times: let go, and said, as nothing that was worth it has been found before.
        relief.held.in_vain(Duration::ZERO, now);
        let before = relief.held.until_ns();
        relief.state = State::waiting(now, Tried::default());
        relief.rushed(found, Standing::Held, now);
        assert_eq!(relief.held.until_ns(), before);
    }
}
