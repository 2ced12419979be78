//! Test: the crew beside programs that take every CPU all of a sudden. A helper that is preempted inside the kernel holds locks of the
//! address space, and the program's next call there waits for it. Helpers don't keep away here, so that only their class counts.

use super::{Crew, Idle, Operation, Task};
use crate::sys::memory::{self, Advice, Protection, Range, map, unmap};
use crate::sys::topology::Topology;
use crate::sys::{clock, sched};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What helpers give back while the hogs come.
const LEN: usize = 128 << 20;
/// Hogs a CPU.
const HOGS: usize = 3;
const ROUNDS: usize = 25;
/// How long hogs stay if no call of ours has returned before.
const STAY_NS: u64 = 6_000_000_000;

/// Processes that take every CPU while a word that they share with us says so.
struct Hogs {
    word: Range,
    children: Vec<i32>,
}

impl Hogs {
    fn start() -> Hogs {
        // SAFETY: a fresh mapping, shared with the children.
        let word = unsafe {
            let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), 4096, rights, flags, -1, 0)
        };
        assert_ne!(word, libc::MAP_FAILED);
        let mut hogs = Hogs { word: Range { start: word as usize, len: 4096 }, children: Vec::new() };
        for _ in 0..HOGS * sched::affinity().unwrap().count() {
            // SAFETY: the child calls nothing but what a child of a process with threads may.
            hogs.children.push(unsafe {
                let parent = libc::getpid();
                let child = libc::fork();
                // Whoever ends the process -1 ends all there are.
                assert!(child >= 0, "no child: {}", std::io::Error::last_os_error());
                if child == 0 {
                    // Other tests ask who has their files.
                    libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
                    while libc::getppid() == parent {
                        let begin = clock::now_ns();
                        while hogs.word().load(Ordering::Relaxed) == 1 && clock::now_ns() < begin + STAY_NS {}
                        libc::usleep(200);
                    }
                    libc::_exit(0);
                }
                child
            });
        }
        hogs
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped until the hogs are dropped, and used as an atomic by all.
        unsafe { AtomicU32::from_ptr(self.word.start as *mut u32) }
    }

    fn come(&self, come: bool) {
        self.word().store(u32::from(come), Ordering::Relaxed);
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for &child in &self.children {
            // SAFETY: ends a child of ours and waits for it.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
        // SAFETY: nobody uses the word any more.
        let _ = unsafe { unmap(self.word) };
    }
}

/// Calls that need the address space's lock, or that of the mapping that helpers are at.
#[derive(Debug, Clone, Copy)]
enum Call {
    Protect,
    Map,
    Fork,
}

impl Call {
    /// The child, where the call makes one.
    fn make(self, probe: Range) -> Option<libc::pid_t> {
        // SAFETY: the range is the test's, nobody reads or writes it; the child does nothing but end.
        unsafe {
            match self {
                Call::Protect => assert_eq!(libc::mprotect(probe.start as *mut _, probe.len, libc::PROT_READ), 0),
                Call::Map => {
                    unmap(Range { start: map(1 << 20, Protection::ReadWrite).unwrap(), len: 1 << 20 }).unwrap()
                }
                Call::Fork => match libc::fork() {
                    0 => libc::_exit(0),
                    child => {
                        assert!(child > 0);
                        return Some(child);
                    }
                },
            }
        }
        None
    }
}

/// What `call` takes, in nanoseconds and in order, when hogs have just come upon helpers that give memory back.
fn latencies(crew: &Crew<Idle>, hogs: &Hogs, call: Call) -> Vec<u64> {
    let whole = Range { start: map(LEN + (1 << 20), Protection::ReadWrite).unwrap(), len: LEN + (1 << 20) };
    let (range, probe) = (Range { len: LEN, ..whole }, Range { start: whole.start + LEN, len: 1 << 16 });
    let mut times: Vec<u64> = (0..ROUNDS)
        .map(|_| {
            // SAFETY: changes no contents.
            unsafe { memory::advise(range, Advice::PopulateWrite).unwrap() };
            // SAFETY: what the range holds is of no interest, so it doesn't matter when its pages go.
            unsafe { crew.submit(Task { operation: Operation::Discard, range, node: 0, report: false }) };
            let full = crew.backlog(Operation::Discard);
            let deadline = clock::now_ns() + 1_000_000_000;
            while crew.backlog(Operation::Discard) > full.saturating_sub(LEN / 4) && clock::now_ns() < deadline {
                std::hint::spin_loop();
            }
            hogs.come(true);
            std::thread::sleep(Duration::from_millis(6));
            let begin = clock::now_ns();
            let child = call.make(probe);
            let took = clock::now_ns() - begin;
            hogs.come(false);
            // SAFETY: waits for a child of ours, and for no other: those of other tests are theirs.
            child.map(|child| unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) });
            while crew.backlog(Operation::Discard) > 0 && clock::now_ns() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: the range is the test's.
            unsafe { libc::mprotect(probe.start as *mut _, probe.len, libc::PROT_READ | libc::PROT_WRITE) };
            took
        })
        .collect();
    times.sort_unstable();
    times
}

#[test]
fn no_call_into_the_kernel_waits_long_for_a_helper() {
    let hogs = Hogs::start();
    let crew = |helpers| {
        let crew = Crew::new(Idle::new().unwrap(), helpers, sched::affinity().unwrap(), Topology::read());
        crew.shared.contention.disregard();
        crew
    };
    let mut longest = 0;
    for call in [Call::Protect, Call::Map, Call::Fork] {
        let [alone, beside] = [Some(0), None].map(|helpers| latencies(&crew(helpers), &hogs, call));
        let shown = |times: &[u64]| {
            format!("median {} us, longest {} us", times[times.len() / 2] / 1000, times[times.len() - 1] / 1000)
        };
        println!("{call:?}: without helpers {}; with {}", shown(&alone), shown(&beside));
        longest = longest.max(beside[ROUNDS - 1]);
    }
    // A few turns of the hogs and of other tests. A helper of a low weight waits for seconds.
    assert!(longest < 1_000_000_000, "{longest} ns");
}
