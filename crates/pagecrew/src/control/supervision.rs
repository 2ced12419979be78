//! The life of a service that another process keeps going: a pure state machine. What has happened goes in with the time; what is to be
//! done comes out.
//!
//! ```text
//!  Off --wanted--> Starting --ready--> Ready <--> Reloading
//!   ^                 |  \               |            |        told to end: Ending, and if that takes too long: Killed
//!   |            late |   \--------------+------------+--ended--> Waiting --time--> Starting
//!   +---not wanted----+                                      \--status 2 or 3--> GivenUp --reload--> Starting
//! ```
//!
//! A service that ends by itself is started again after a pause, which doubles each time in a row ([`Backoff`]). Exit statuses 2 (wrong
//! settings) and 3 (not possible here) are the same the next time: then it is given up until the settings are read again.

use super::backoff::Backoff;
use crate::stats::figures;
use std::time::Duration;

/// How long what may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// From the start until it is ready, unless it asks for more.
    pub start: Duration,
    /// From SIGTERM until it is killed.
    pub stop: Duration,
    /// From SIGHUP until nobody waits for its answer any more.
    pub reload: Duration,
    /// The first pause before it is started again, and the longest.
    pub pauses: (Duration, Duration),
}

impl Default for Terms {
    fn default() -> Terms {
        Terms {
            start: Duration::from_secs(90),
            stop: Duration::from_secs(10),
            reload: Duration::from_secs(10),
            // A guard has undone what its killed process did well before the first one is over.
            pauses: (Duration::from_millis(500), Duration::from_secs(60)),
        }
    }
}

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With an exit status.
    Status(i32),
    /// By a signal.
    Signal(i32),
    /// It could not be started.
    NotStarted,
    /// It was not ready in time, and was ended for that.
    Late,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It is to run, or is not to.
    Wanted(bool),
    /// The settings are to be read again.
    Reload,
    /// It has said that it is ready, or again after a reload.
    Ready,
    /// It has asked for more time until it is ready.
    More(Duration),
    /// Its process has ended, or there is none.
    Ended(End),
    /// Time has passed.
    Time,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start a process. If that fails, [`End::NotStarted`] follows.
    Start,
    /// Have it read its settings again.
    Reload,
    /// Tell it to end.
    Terminate,
    /// End it.
    Kill,
}

/// Where in its life it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It is not wanted.
    Off,
    /// It was started.
    Starting,
    /// It serves.
    Ready,
    /// It serves, and reads its settings again.
    Reloading,
    /// It was told to end.
    Ending,
    /// It was killed, and has not ended yet.
    Killed,
    /// It has ended by itself, and is started again later.
    Waiting,
    /// It has ended by itself, and is not started again before the settings are read again.
    GivenUp,
}

figures! {
    /// How a service stands, as its supervisor sees it.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Standing: Serve, "pagecrew_serve_", ["service"], none {
        ready: u64, Gauge Count, "1 while the service has said that it serves; else 0.";
        given_up: u64, Gauge Count, "1 while the service is not started again, because its exit status was 2 or 3; else 0.";
        restarts: u64, Counter Count, "Times that the service was started again after it had ended by itself.";
    }
}

/// A service.
#[derive(Debug, Clone)]
pub struct Supervision {
    terms: Terms,
    phase: Phase,
    /// When the phase is over, whatever happens.
    until_ns: Option<u64>,
    wanted: bool,
    backoff: Backoff,
    /// It is to read its settings again once it is ready.
    reload: bool,
    /// It has ended by itself, or was late, since it was ready or wanted last.
    failed: bool,
    last: Option<End>,
    restarts: u64,
}

impl Supervision {
    /// A service that is not wanted yet.
    pub fn new(terms: Terms) -> Supervision {
        Supervision {
            backoff: Backoff::new(terms.pauses.0, terms.pauses.1),
            terms,
            phase: Phase::Off,
            until_ns: None,
            wanted: false,
            reload: false,
            failed: false,
            last: None,
            restarts: 0,
        }
    }

    /// Takes note of what has happened at the time `now_ns`. Returns what is to be done about it.
    pub fn note(&mut self, event: Event, now_ns: u64) -> Option<Action> {
        match event {
            Event::Wanted(true) => {
                if !std::mem::replace(&mut self.wanted, true) {
                    self.failed = false;
                }
                (self.phase == Phase::Off).then(|| self.start(now_ns))
            }
            Event::Wanted(false) => {
                self.wanted = false;
                self.reload = false;
                match self.phase {
                    Phase::Starting | Phase::Ready | Phase::Reloading => Some(self.end(now_ns)),
                    Phase::Waiting | Phase::GivenUp => self.rest(Phase::Off),
                    Phase::Off | Phase::Ending | Phase::Killed => None,
                }
            }
            Event::Reload => match self.phase {
                Phase::Ready => Some(self.begin_reload(now_ns)),
                Phase::Starting | Phase::Reloading => {
                    self.reload = true;
                    None
                }
                Phase::Waiting | Phase::GivenUp => {
                    self.failed = false;
                    Some(self.start(now_ns))
                }
                Phase::Off | Phase::Ending | Phase::Killed => None,
            },
            Event::Ready => match self.phase {
                Phase::Starting | Phase::Reloading => {
                    self.failed = false;
                    if std::mem::take(&mut self.reload) {
                        return Some(self.begin_reload(now_ns));
                    }
                    self.rest(Phase::Ready)
                }
                _ => None,
            },
            Event::More(time) => {
                if self.phase == Phase::Starting {
                    self.until_ns = self.until_ns.max(Some(after(now_ns, time)));
                }
                None
            }
            Event::Ended(end) => self.ended(end, now_ns),
            Event::Time if self.until_ns.is_none_or(|until_ns| now_ns < until_ns) => None,
            Event::Time => match self.phase {
                Phase::Starting => {
                    (self.failed, self.last) = (true, Some(End::Late));
                    Some(self.end(now_ns))
                }
                // What was to be read again meanwhile it may have begun to read before that.
                Phase::Reloading if std::mem::take(&mut self.reload) => Some(self.begin_reload(now_ns)),
                // It goes on as it is, and answers later or never.
                Phase::Reloading => self.rest(Phase::Ready),
                Phase::Ending => {
                    (self.phase, self.until_ns) = (Phase::Killed, None);
                    Some(Action::Kill)
                }
                Phase::Waiting => Some(self.start(now_ns)),
                Phase::Off | Phase::Ready | Phase::Killed | Phase::GivenUp => self.rest(self.phase),
            },
        }
    }

    fn ended(&mut self, end: End, now_ns: u64) -> Option<Action> {
        match self.phase {
            Phase::Starting | Phase::Ready | Phase::Reloading => {
                self.last = Some(end);
                match end {
                    End::Status(2 | 3) => self.rest(Phase::GivenUp),
                    _ => self.pause(now_ns),
                }
            }
            Phase::Ending | Phase::Killed if !self.wanted => self.rest(Phase::Off),
            // It was late.
            Phase::Ending | Phase::Killed if self.failed => self.pause(now_ns),
            // It was not wanted for a moment.
            Phase::Ending | Phase::Killed => Some(self.start(now_ns)),
            Phase::Off | Phase::Waiting | Phase::GivenUp => None,
        }
    }

    fn start(&mut self, now_ns: u64) -> Action {
        self.restarts += u64::from(self.phase == Phase::Waiting);
        (self.phase, self.until_ns) = (Phase::Starting, Some(after(now_ns, self.terms.start)));
        // It reads them anyway.
        self.reload = false;
        Action::Start
    }

    fn begin_reload(&mut self, now_ns: u64) -> Action {
        (self.phase, self.until_ns) = (Phase::Reloading, Some(after(now_ns, self.terms.reload)));
        Action::Reload
    }

    fn end(&mut self, now_ns: u64) -> Action {
        (self.phase, self.until_ns) = (Phase::Ending, Some(after(now_ns, self.terms.stop)));
        Action::Terminate
    }

    fn pause(&mut self, now_ns: u64) -> Option<Action> {
        self.failed = true;
        self.backoff.in_vain(Duration::ZERO, now_ns);
        (self.phase, self.until_ns) = (Phase::Waiting, Some(self.backoff.until_ns()));
        None
    }

    fn rest(&mut self, phase: Phase) -> Option<Action> {
        (self.phase, self.until_ns) = (phase, None);
        None
    }

    /// Where in its life it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// When [`Event::Time`] is due.
    pub fn next_ns(&self) -> Option<u64> {
        self.until_ns
    }

    /// Whether it is to run.
    pub fn wanted(&self) -> bool {
        self.wanted
    }

    /// How it has ended by itself the last time, if it ever has.
    pub fn last(&self) -> Option<End> {
        self.last
    }

    /// Whether there is a process of it.
    pub fn runs(&self) -> bool {
        !matches!(self.phase, Phase::Off | Phase::Waiting | Phase::GivenUp)
    }

    /// Whether it is on its way to be ready, and has not failed on it.
    pub fn pending(&self) -> bool {
        match self.phase {
            Phase::Starting | Phase::Ending | Phase::Killed => self.wanted && !self.failed,
            Phase::Reloading => true,
            Phase::Off | Phase::Ready | Phase::Waiting | Phase::GivenUp => false,
        }
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        Standing {
            ready: matches!(self.phase, Phase::Ready | Phase::Reloading).into(),
            given_up: (self.phase == Phase::GivenUp).into(),
            restarts: self.restarts,
        }
    }
}

fn after(now_ns: u64, time: Duration) -> u64 {
    now_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    /// A made-up process.
    #[derive(Debug, Clone, Copy)]
    struct Process {
        since_ns: u64,
        /// Asked to end at that time.
        told_ns: Option<u64>,
        killed: bool,
        said_ready: bool,
        reloads: u32,
    }

    /// What processes of a service do, by the time for which they run.
    #[derive(Debug, Clone, Copy)]
    struct Habits {
        /// Ready after so long; `None`: never.
        ready: Option<u64>,
        /// Ends by itself after so long.
        ends: Option<(u64, End)>,
        /// Takes so long to end when told; `None`: takes no notice.
        stops: Option<u64>,
    }

    const SOUND: Habits = Habits { ready: Some(20 * MS), ends: None, stops: Some(30 * MS) };

    /// A service, its processes and the time.
    struct World {
        service: Supervision,
        habits: Habits,
        process: Option<Process>,
        now_ns: u64,
        starts: Vec<u64>,
        kills: u32,
    }

    impl World {
        fn new(habits: Habits) -> World {
            let service = Supervision::new(Terms::default());
            World { service, habits, process: None, now_ns: 7 * SECOND, starts: Vec::new(), kills: 0 }
        }

        fn tell(&mut self, event: Event) {
            let action = self.service.note(event, self.now_ns);
            match action {
                None => {}
                Some(Action::Start) => {
                    assert!(self.process.is_none(), "two at a time");
                    self.starts.push(self.now_ns);
                    let since_ns = self.now_ns;
                    self.process =
                        Some(Process { since_ns, told_ns: None, killed: false, said_ready: false, reloads: 0 });
                }
                Some(Action::Reload) => {
                    self.process.as_mut().expect("nobody to tell").reloads += 1;
                    self.tell(Event::Ready);
                }
                Some(Action::Terminate) => {
                    let process = self.process.as_mut().expect("nobody to end");
                    process.told_ns = process.told_ns.or(Some(self.now_ns));
                }
                Some(Action::Kill) => {
                    self.kills += 1;
                    self.process.as_mut().expect("nobody to kill").killed = true;
                }
            }
            assert_eq!(self.service.runs(), self.process.is_some());
        }

        /// In steps of 10 ms.
        fn pass(&mut self, time: u64) -> &mut World {
            let end = self.now_ns + time;
            while self.now_ns < end {
                self.now_ns += 10 * MS;
                if let Some(process) = self.process {
                    let age = self.now_ns - process.since_ns;
                    let told = process.told_ns.zip(self.habits.stops);
                    let ended = match self.habits.ends {
                        _ if process.killed => Some(End::Signal(9)),
                        Some((after, end)) if age >= after => Some(end),
                        _ => told.filter(|(told, takes)| self.now_ns - told >= *takes).map(|_| End::Status(0)),
                    };
                    if let Some(end) = ended {
                        self.process = None;
                        self.tell(Event::Ended(end));
                    } else if !process.said_ready && self.habits.ready.is_some_and(|ready| age >= ready) {
                        self.process = Some(Process { said_ready: true, ..process });
                        self.tell(Event::Ready);
                    }
                }
                if self.service.next_ns().is_some_and(|next| next <= self.now_ns) {
                    self.tell(Event::Time);
                    assert!(self.service.next_ns().is_none_or(|next| next > self.now_ns), "time stands still");
                }
            }
            self
        }
    }

    #[test]
    fn a_sound_service_is_started_once_and_nothing_is_waited_for() {
        let mut world = World::new(SOUND);
        assert!(!world.service.pending());
        world.tell(Event::Wanted(true));
        assert!(world.service.pending());
        world.pass(SECOND);
        assert_eq!((world.service.phase(), world.service.next_ns()), (Phase::Ready, None));
        world.tell(Event::Wanted(true));
        world.pass(3600 * SECOND);
        assert_eq!((world.starts.len(), world.service.pending()), (1, false));
        world.tell(Event::Wanted(false));
        world.pass(100 * MS);
        assert_eq!(
            (world.service.phase(), world.kills, world.service.standing()),
            (Phase::Off, 0, Standing::default())
        );
    }

    #[test]
    fn one_that_dies_now_and_then_is_back_at_once() {
        for end in [End::Signal(9), End::Status(0), End::Status(1)] {
            let mut world = World::new(Habits { ends: Some((120 * SECOND, end)), ..SOUND });
            world.tell(Event::Wanted(true));
            world.pass(3600 * SECOND);
            assert!(world.starts.len() >= 29, "{end:?}: {}", world.starts.len());
            assert!(world.starts.windows(2).all(|two| two[1] - two[0] <= 121 * SECOND), "{:?}", world.starts);
            assert_eq!(
                (world.service.last(), world.service.standing().restarts),
                (Some(end), world.starts.len() as u64 - 1)
            );
        }
    }

    #[test]
    fn one_that_dies_again_and_again_is_left_for_longer_each_time() {
        let mut world = World::new(Habits { ends: Some((10 * MS, End::Status(1))), ready: None, ..SOUND });
        world.tell(Event::Wanted(true));
        world.pass(100 * MS);
        // Nobody waits for it any more.
        assert!(!world.service.pending());
        world.pass(3600 * SECOND);
        let pauses: Vec<u64> = world.starts.windows(2).map(|two| (two[1] - two[0]) / SECOND).collect();
        assert_eq!(pauses[..8], [0, 1, 2, 4, 8, 16, 32, 60]);
        assert!(pauses[8..].iter().all(|pause| *pause == 60), "{pauses:?}");
        // Somebody has done something about it.
        world.habits = SOUND;
        world.tell(Event::Reload);
        world.pass(100 * MS);
        assert_eq!(world.service.phase(), Phase::Ready);
    }

    #[test]
    fn what_would_be_the_same_is_not_tried_again_before_a_reload() {
        for status in [2, 3] {
            let mut world = World::new(Habits { ends: Some((50 * MS, End::Status(status))), ready: None, ..SOUND });
            world.tell(Event::Wanted(true));
            world.pass(3600 * SECOND);
            assert_eq!((world.starts.len(), world.service.phase(), world.service.next_ns()), (1, Phase::GivenUp, None));
            assert_eq!((world.service.standing().given_up, world.service.pending()), (1, false));
            world.tell(Event::Reload);
            world.pass(SECOND);
            assert_eq!((world.starts.len(), world.service.phase()), (2, Phase::GivenUp));
            world.habits = SOUND;
            world.tell(Event::Reload);
            world.pass(SECOND);
            assert_eq!((world.service.phase(), world.service.standing().restarts), (Phase::Ready, 0));
            world.tell(Event::Wanted(false));
            world.pass(SECOND);
            assert_eq!(world.service.phase(), Phase::Off);
        }
    }

    #[test]
    fn one_that_is_never_ready_is_ended_and_tried_again() {
        let mut world = World::new(Habits { ready: None, ..SOUND });
        world.tell(Event::Wanted(true));
        world.pass(89 * SECOND);
        assert!(world.service.pending());
        world.tell(Event::More(Duration::from_secs(10)));
        world.pass(9 * SECOND);
        assert_eq!(world.starts.len(), 1);
        world.pass(2 * SECOND);
        assert_eq!((world.starts.len(), world.service.last(), world.service.pending()), (2, Some(End::Late), false));
        // Less time than it has anyway is no matter.
        world.tell(Event::More(Duration::from_millis(1)));
        world.pass(80 * SECOND);
        assert_eq!((world.starts.len(), world.kills), (2, 0));
    }

    #[test]
    fn one_that_does_not_end_is_killed() {
        let mut world = World::new(Habits { stops: None, ..SOUND });
        world.tell(Event::Wanted(true));
        world.pass(SECOND);
        world.tell(Event::Wanted(false));
        world.pass(9 * SECOND);
        assert_eq!((world.kills, world.service.phase()), (0, Phase::Ending));
        world.pass(2 * SECOND);
        assert_eq!((world.kills, world.service.phase()), (1, Phase::Off));
    }

    #[test]
    fn a_reload_reaches_it_once_it_can_hear() {
        let mut world = World::new(SOUND);
        world.tell(Event::Wanted(true));
        // It would die of the signal.
        world.tell(Event::Reload);
        assert_eq!(world.process.unwrap().reloads, 0);
        world.pass(SECOND);
        assert_eq!((world.process.unwrap().reloads, world.service.phase()), (1, Phase::Ready));
        world.tell(Event::Reload);
        assert_eq!(world.process.unwrap().reloads, 2);
        // One that does not answer is no reason to wait for ever.
        let mut deaf = Supervision::new(Terms::default());
        for (event, now_ns) in [(Event::Wanted(true), 0), (Event::Ready, 1)] {
            deaf.note(event, now_ns);
        }
        assert_eq!(deaf.note(Event::Reload, 2), Some(Action::Reload));
        assert!(deaf.pending());
        assert_eq!(deaf.note(Event::Time, 3), None);
        assert_eq!(deaf.note(Event::Time, 20 * SECOND), None);
        assert_eq!((deaf.phase(), deaf.pending()), (Phase::Ready, false));
    }

    #[test]
    fn a_reload_while_another_one_takes_long_is_not_lost() {
        let mut slow = Supervision::new(Terms::default());
        for (event, now_ns) in [(Event::Wanted(true), 0), (Event::Ready, 1)] {
            slow.note(event, now_ns);
        }
        assert_eq!(slow.note(Event::Reload, 2), Some(Action::Reload));
        assert_eq!(slow.note(Event::Reload, 3), None);
        // Nobody waits for the first one any more, and it is told of the second.
        assert_eq!(slow.note(Event::Time, 20 * SECOND), Some(Action::Reload));
        assert!(slow.pending());
        assert_eq!((slow.note(Event::Ready, 21 * SECOND), slow.phase()), (None, Phase::Ready));
    }

    #[test]
    fn one_that_is_wanted_again_while_it_ends_comes_back() {
        let mut world = World::new(SOUND);
        world.tell(Event::Wanted(true));
        world.pass(SECOND);
        world.tell(Event::Wanted(false));
        world.tell(Event::Wanted(true));
        world.pass(SECOND);
        assert_eq!(
            (world.starts.len(), world.service.phase(), world.service.standing().restarts),
            (2, Phase::Ready, 0)
        );
    }

    proptest! {
        #[test]
        fn whatever_happens_there_is_one_process_or_none_and_in_the_end_what_is_wanted(
            steps in proptest::collection::vec((0u8..8, 0u64..20_000, proptest::option::of(0u64..100_000), proptest::option::of(0u64..30_000)), 1..40),
        ) {
            let mut world = World::new(SOUND);
            for (what, milliseconds, ready, stops) in steps {
                let end = match what {
                    0 => Some((milliseconds * MS, End::Signal(9))),
                    1 => Some((milliseconds * MS, End::Status(3))),
                    _ => None,
                };
                world.habits = Habits { ready: ready.map(|ready| ready * MS), ends: end, stops: stops.map(|stops| stops * MS) };
                match what {
                    2 | 3 => world.tell(Event::Wanted(true)),
                    4 => world.tell(Event::Wanted(false)),
                    5 => world.tell(Event::Reload),
                    6 => world.tell(Event::More(Duration::from_millis(milliseconds))),
                    _ => {}
                }
                world.pass(milliseconds * MS);
            }
            world.habits = SOUND;
            world.tell(Event::Wanted(true));
            world.tell(Event::Reload);
            world.pass(300 * SECOND);
            prop_assert!(world.service.phase() == Phase::Ready, "{:?}", world.service);
            world.habits.stops = None;
            world.tell(Event::Wanted(false));
            world.pass(11 * SECOND);
            prop_assert_eq!(world.service.phase(), Phase::Off);
        }
    }
}
