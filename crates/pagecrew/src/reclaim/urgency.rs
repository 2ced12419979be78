//! How urgent the kernel's reclaim threads are, as this process changes it.
//!
//! A thread that reclaims for all gets as much of a CPU as each of those who take the memory. Where they want all CPUs, that is far less than
//! reclaim needs, so what is free runs out however much it was, and they reclaim for themselves. So the threads come before others (nice -20):
//! what they do would be done by those who wait for it. That is so at rest as well, where they sleep: a demand begins before anybody has heard of
//! it.

use crate::group::{Guard, Lock, Marker, URGENT, Undo, change_nice};
use crate::sys::sched;

/// The name of the lock.
const NAME: &str = "kswapd_nice";

/// The threads. They are as nice as before as soon as this is dropped or the process has ended, whatever the way: a child process, the
/// *guard*, sees to that. If both are killed at once, the next one finds out by what is written in the lock's file. A thread that the operator
/// has made more or less nice than the first one is left alone.
#[derive(Debug)]
pub struct Urgency {
    threads: Vec<i32>,
    before: i32,
    urgent: bool,
    guard: Option<Guard>,
    /// Free when the guard has ended; dropped after it.
    lock: Lock,
}

impl Urgency {
    /// Takes the kernel's `threads`. `None` where that can't be had (it takes `CAP_SYS_NICE`), somebody else has them, or they are as urgent as they
    /// can be.
    pub fn take(threads: Vec<i32>) -> Option<Urgency> {
        Urgency::take_as(threads, NAME)
    }

    fn take_as(threads: Vec<i32>, name: &str) -> Option<Urgency> {
        let lock = Lock::named(name).ok()??;
        if let Some(Marker::Nice { before }) = lock.marker() {
            change_nice(&threads, URGENT, before);
            // Where that is not allowed, somebody who may is to find it.
            if threads.iter().any(|&thread| sched::nice_of(thread) == Ok(URGENT)) {
                return None;
            }
        }
        lock.mark(None).ok()?;
        let before = sched::nice_of(*threads.first()?).ok().filter(|nice| *nice != URGENT)?;
        // Whether it may: nothing is changed by that.
        sched::set_nice_of(threads[0], before).ok()?;
        let guard = Guard::start(&lock.file, &lock.file, Undo::Nice { threads: &threads, before }).ok()?;
        Some(Urgency { threads, before, urgent: false, guard: Some(guard), lock })
    }

    /// Whether the threads come before others.
    pub fn urgent(&self) -> bool {
        self.urgent
    }

    /// Whether the guard lives. Without it the threads would stay as they are if this process were killed, so they are made urgent no more: drop
    /// this then, and take them anew.
    pub fn guarded(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::lives)
    }

    /// The threads come before others, or are as they were.
    pub fn set(&mut self, urgent: bool) {
        // Without the guard they would stay so if this process were killed.
        if urgent == self.urgent || urgent && !self.guarded() {
            return;
        }
        if urgent {
            if self.lock.mark(Some(&Marker::Nice { before: self.before })).is_err() {
                return;
            }
            change_nice(&self.threads, self.before, URGENT);
        } else {
            change_nice(&self.threads, URGENT, self.before);
            let _ = self.lock.mark(None);
        }
        self.urgent = urgent;
    }
}

impl Drop for Urgency {
    fn drop(&mut self) {
        self.set(false);
        // The guard does the same once more, so nobody else may have the threads before it has ended. It shares the lock.
        drop(self.guard.take());
        self.lock.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    /// Processes that stand for the kernel's threads; `None` where nobody may change how urgent they are.
    fn threads(count: usize) -> Option<Vec<Child>> {
        let start = |_| Command::new("sleep").arg("600").spawn().unwrap();
        let mut children: Vec<Child> = (0..count).map(start).collect();
        let may = sched::set_nice_of(children[0].id() as i32, -1)
            .and_then(|()| sched::set_nice_of(children[0].id() as i32, 0));
        if may.is_err() {
            end(&mut children);
            return None;
        }
        Some(children)
    }

    fn end(children: &mut [Child]) {
        for child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn numbers(children: &[Child]) -> Vec<i32> {
        children.iter().map(|child| child.id() as i32).collect()
    }

    fn nice(children: &[Child]) -> Vec<i32> {
        children.iter().map(|child| sched::nice_of(child.id() as i32).unwrap()).collect()
    }

    #[test]
    fn they_are_as_before_in_the_end() {
        let Some(mut children) = threads(3) else { return };
        let name = format!("test-nice-{}", children[0].id());
        sched::set_nice_of(children[2].id() as i32, 3).unwrap();
        let mut urgency = Urgency::take_as(numbers(&children), &name).unwrap();
        assert!(Urgency::take_as(numbers(&children), &name).is_none(), "taken");
        assert_eq!(nice(&children), [0, 0, 3]);
        urgency.set(true);
        assert_eq!(nice(&children), [-20, -20, 3], "what the operator has set apart stays");
        urgency.set(false);
        assert_eq!(nice(&children), [0, 0, 3]);
        urgency.set(true);
        // What somebody else sets meanwhile is theirs.
        sched::set_nice_of(children[1].id() as i32, -5).unwrap();
        drop(urgency);
        assert_eq!(nice(&children), [0, -5, 3]);
        // They can't be more urgent.
        sched::set_nice_of(children[0].id() as i32, -20).unwrap();
        assert!(Urgency::take_as(numbers(&children), &name).is_none());
        assert_eq!(nice(&children), [-20, -5, 3]);
        end(&mut children);
    }

    #[test]
    fn what_was_left_by_a_process_and_its_guard_is_put_back_by_the_next() {
        let Some(mut children) = threads(2) else { return };
        let name = format!("test-nice-{}", children[0].id());
        let mut urgency = Urgency::take_as(numbers(&children), &name).unwrap();
        urgency.set(true);
        // SAFETY: a child that was not waited for.
        assert_eq!(unsafe { libc::kill(urgency.guard.as_ref().unwrap().process, libc::SIGKILL) }, 0);
        while urgency.guarded() {
            std::thread::yield_now();
        }
        // Without a guard nothing is changed any more, but put back.
        urgency.set(false);
        urgency.set(true);
        assert_eq!(nice(&children), [0, 0]);
        let path = urgency.lock.path().to_owned();
        drop(urgency);
        std::fs::write(&path, "nice 0\n").unwrap();
        sched::set_nice_of(children[0].id() as i32, -20).unwrap();
        sched::set_nice_of(children[1].id() as i32, -7).unwrap();
        let next = Urgency::take_as(numbers(&children), &name).unwrap();
        assert_eq!((next.before, nice(&children)), (0, vec![0, -7]));
        drop(next);
        end(&mut children);
    }

    #[test]
    #[ignore = "the process that another test kills"]
    fn a_process_that_changes_it() {
        let Ok(number) = std::env::var("PAGECREW_TEST_THREAD") else { return };
        let mut urgency = once_free(number.parse().unwrap());
        for urgent in [true, false].into_iter().cycle() {
            urgency.set(urgent);
        }
    }

    /// Takes over from one that was killed, whose guard has the lock until it has done its work. All is as it was before.
    fn once_free(thread: i32) -> Urgency {
        let begin = Instant::now();
        let urgency = loop {
            match Urgency::take_as(vec![thread], &format!("test-nice-{thread}")) {
                Some(urgency) => break urgency,
                None => std::thread::sleep(Duration::from_micros(50)),
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "the guard of one that was killed has the lock still");
        };
        assert_eq!((urgency.before, sched::nice_of(thread).unwrap()), (0, 0));
        urgency
    }

    // The process of each round takes over from the one before, and not this one, which would fork a guard each time (see `factor`).
    #[test]
    fn whenever_it_is_killed_they_are_as_before() {
        let Some(mut children) = threads(1) else { return };
        let number = children[0].id().to_string();
        for round in 0..100u64 {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "reclaim::urgency::tests::a_process_that_changes_it", "--ignored", "--quiet"]);
            command.env("PAGECREW_TEST_THREAD", &number).stdout(Stdio::null());
            let mut process = command.spawn().unwrap();
            while nice(&children) == [0] {
                assert_eq!(process.try_wait().unwrap(), None, "round {round}: it ended by itself");
                std::thread::sleep(Duration::from_micros(50));
            }
            std::thread::sleep(Duration::from_micros(round * 7919 % 3000));
            process.kill().unwrap();
            process.wait().unwrap();
            let killed = Instant::now();
            while nice(&children) != [0] {
                assert!(killed.elapsed() < Duration::from_secs(30), "round {round}: {:?}", nice(&children));
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        drop(once_free(children[0].id() as i32));
        end(&mut children);
    }
}
