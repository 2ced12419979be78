use super::*;
use crate::sys::sched::CpuSet;
use crate::sys::stop_on_drop::StopOnDrop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize};

fn both(limit: usize) -> Vec<CpuStacks> {
    vec![CpuStacks::new(limit).unwrap(), CpuStacks::with(limit, None).unwrap()]
}

/// The same, and the sequences alone, on an area that only looks like the kernel's: for a thread that nobody disturbs, as good as any.
/// Machines that have no rseq run their sequences so.
fn all_kinds(limit: usize, test: impl Fn(&CpuStacks) + Sync) {
    both(limit).iter().for_each(|stacks| pinned(|| test(stacks)));
    pinned(|| {
        let area = [0u64; 8];
        let offset = area.as_ptr() as isize - rseq::at(0) as isize;
        test(&CpuStacks::with(limit, Some(offset)).unwrap());
        assert_ne!(std::hint::black_box(area)[1], 0, "no sequence was announced");
    });
}

pub fn pinned<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let work = || {
            let mut one = CpuSet::new();
            one.insert(sched::current_cpu());
            sched::set_affinity(&one).unwrap();
            work()
        };
        scope.spawn(work).join().unwrap()
    })
}

#[test]
fn what_was_put_last_is_taken_first() {
    all_kinds(4, |stacks| {
        assert_eq!(stacks.pop(), NONE);
        assert_eq!([7, 8, 9, 10, 11].map(|number| stacks.push(number)), [true, true, true, true, false]);
        assert_eq!((stacks.pop(), stacks.total(), stacks.len(stacks.here())), (10, 3, 3));
        let mut two = [0; 2];
        assert_eq!((stacks.pop_many(&mut two), two), (2, [8, 9]));
        assert_eq!((stacks.pop(), stacks.pop(), stacks.is_empty()), (7, NONE, true));
    });
}

#[test]
fn many_at_a_time_are_as_good_as_one_at_a_time() {
    all_kinds(SLOTS, |stacks| {
        for count in (0..40).chain([SLOTS - 1, SLOTS, SLOTS + 1, 1000]) {
            let numbers: Vec<u32> = (0..count as u32).map(|number| number * 3).collect();
            let fit = count.min(SLOTS);
            assert_eq!(stacks.push_many(&numbers), fit);
            let mut into = vec![NONE; count + 3];
            let (half, rest) = into.split_at_mut(fit / 2);
            assert_eq!(stacks.pop_many(half), fit / 2);
            assert_eq!(half, &numbers[fit - fit / 2..fit]);
            assert_eq!(stacks.pop_many(rest), fit - fit / 2);
            assert_eq!(rest[..fit - fit / 2], numbers[..fit - fit / 2]);
            assert!(rest[fit - fit / 2..].iter().all(|&number| number == NONE));
        }
    });
}

#[test]
fn a_lower_limit_holds_from_then_on() {
    for stacks in both(8) {
        pinned(|| {
            assert_eq!(stacks.push_many(&[1, 2, 3, 4, 5]), 5);
            stacks.set_limit(stacks.here(), 3);
            assert!(!stacks.push(6) && stacks.push_many(&[6, 7]) == 0);
            assert_eq!((stacks.pop(), stacks.pop(), stacks.pop()), (5, 4, 3));
            assert_eq!(stacks.push_many(&[6, 7]), 1);
            assert_eq!(stacks.drain(|_| true, |numbers| assert_eq!(numbers, [1, 2, 6])), 3);
            assert_eq!(stacks.push_many(&[1, 2, 3, 4]), 3);
        });
    }
}

/// Threads that are moved about, preempted and drained from outside: each number is in one place at any time.
#[test]
fn no_number_is_lost_or_doubled() {
    const NUMBERS: usize = 3000;
    for stacks in both(64) {
        let owned: Vec<AtomicU8> = (0..NUMBERS).map(|_| AtomicU8::new(0)).collect();
        let stop = AtomicBool::new(false);
        let take = |number: u32| assert_eq!(owned[number as usize].swap(1, Ordering::SeqCst), 0, "{number} doubled");
        let give = |number: u32| assert_eq!(owned[number as usize].swap(0, Ordering::SeqCst), 1, "{number} lost");
        let cpus = sched::affinity().unwrap();
        let threads = Mutex::new(Vec::new());
        let left = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|worker: usize| {
                    let (stacks, stop, threads, take, give) = (&stacks, &stop, &threads, &take, &give);
                    scope.spawn(move || {
                        threads.lock().unwrap().push(sched::thread_id());
                        let each = NUMBERS / 4;
                        let mut mine: Vec<u32> = (worker * each..(worker + 1) * each).map(|n| n as u32).collect();
                        mine.iter().for_each(|&number| take(number));
                        let mut round = worker;
                        while !stop.load(Ordering::Relaxed) {
                            round = round.wrapping_mul(0x9e37_79b9).wrapping_add(0x7f4a_7c15);
                            let many = 1 + (round >> 8) % 20;
                            match (round >> 4) % 4 {
                                0 => {
                                    if let Some(number) = mine.pop() {
                                        give(number);
                                        if !stacks.push(number) {
                                            take(number);
                                            mine.push(number);
                                        }
                                    }
                                }
                                1 => {
                                    let number = stacks.pop();
                                    if number != NONE {
                                        take(number);
                                        mine.push(number);
                                    }
                                }
                                2 => {
                                    let some = mine.split_off(mine.len().saturating_sub(many));
                                    some.iter().for_each(|&number| give(number));
                                    let pushed = stacks.push_many(&some);
                                    some[pushed..].iter().for_each(|&number| take(number));
                                    mine.extend(&some[pushed..]);
                                }
                                _ => {
                                    let mut some = [0; 20];
                                    let popped = stacks.pop_many(&mut some[..many]);
                                    some[..popped].iter().for_each(|&number| take(number));
                                    mine.extend(&some[..popped]);
                                }
                            }
                        }
                        mine
                    })
                })
                .collect();
            let mover = scope.spawn(|| {
                let running = StopOnDrop(&stop);
                let (mut kept, mut drained) = (Vec::new(), 0);
                for round in 0..400usize {
                    for (worker, &id) in threads.lock().unwrap().iter().enumerate() {
                        let mut one = CpuSet::new();
                        one.insert((round + worker) % sched::online_cpus());
                        let _ = sched::set_affinity_of(id, if round % 7 == 0 { &cpus } else { &one });
                    }
                    let mut some = Vec::new();
                    let wanted = |cpu: usize| (cpu + round).is_multiple_of(2);
                    drained += stacks.drain(wanted, |numbers| some.extend_from_slice(numbers));
                    let pushed = stacks.push_many(&some);
                    some[pushed..].iter().for_each(|&number| take(number));
                    kept.extend_from_slice(&some[pushed..]);
                    std::thread::sleep(std::time::Duration::from_micros(500));
                }
                drop(running);
                assert!(drained > 0);
                kept
            });
            let mut left = mover.join().unwrap();
            workers.into_iter().for_each(|worker| left.extend(worker.join().unwrap()));
            left
        });
        let mut all = left;
        stacks.drain(|_| true, |numbers| all.extend_from_slice(numbers));
        all.sort_unstable();
        assert_eq!(all, (0..NUMBERS as u32).collect::<Vec<_>>());
    }
}

/// How many numbers [`pairs_under_forced_preemption`] has. All of them fit on one stack.
const FEW: usize = 256;

/// What its signal handler has to know.
struct Interrupted {
    stacks: CpuStacks,
    /// 1 for a number that a thread or a handler has.
    owned: [AtomicU8; FEW],
    /// 1 for a number that a handler could not put back.
    left: [AtomicU8; FEW],
}

impl Interrupted {
    fn take(&self) -> Option<u32> {
        let number = self.stacks.pop();
        (number != NONE).then(|| {
            assert_eq!(self.owned[number as usize].swap(1, Ordering::SeqCst), 0, "{number} doubled");
            number
        })
    }

    fn give(&self, number: u32) -> bool {
        assert_eq!(self.owned[number as usize].swap(0, Ordering::SeqCst), 1, "{number} lost");
        let put = self.stacks.push(number);
        if !put {
            self.owned[number as usize].store(1, Ordering::SeqCst);
        }
        put
    }
}

/// Threads for which there are too few CPUs, moved from one to another and interrupted by signals whose handlers take and put as well:
/// `PAGECREW_TEST_PAIRS` pairs, or 100,000, in the way that `PAGECREW_TEST_STACKS` says, if it does.
#[test]
fn pairs_under_forced_preemption() {
    static STATE: AtomicPtr<Interrupted> = AtomicPtr::new(std::ptr::null_mut());
    static SIGNALS: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn interrupted(_: libc::c_int) {
        // SAFETY: the state is there before the first signal and never goes.
        let state = unsafe { &*STATE.load(Ordering::SeqCst) };
        SIGNALS.fetch_add(1, Ordering::Relaxed);
        if let Some(number) = state.take()
            && !state.give(number)
        {
            state.left[number as usize].store(1, Ordering::SeqCst);
        }
    }
    let wanted: usize = std::env::var("PAGECREW_TEST_PAIRS").map_or(100_000, |pairs| pairs.parse().unwrap());
    let state: &Interrupted = Box::leak(Box::new(Interrupted {
        stacks: CpuStacks::new(SLOTS).unwrap(),
        owned: [const { AtomicU8::new(0) }; FEW],
        left: [const { AtomicU8::new(0) }; FEW],
    }));
    // Asked for before they are used: where this thread is moved meanwhile, what it has put is on a CPU that the others come to.
    let affinity = sched::affinity().unwrap();
    let cpus: Vec<usize> = (0..topology::possible_cpus()).filter(|&cpu| affinity.contains(cpu)).collect();
    assert_eq!(state.stacks.push_many(&(0..FEW as u32).collect::<Vec<_>>()), FEW);
    STATE.store(std::ptr::from_ref(state).cast_mut(), Ordering::SeqCst);
    // SAFETY: no other test uses this signal; the handler allocates nothing and takes no lock.
    unsafe { libc::signal(libc::SIGWINCH, interrupted as *const () as libc::sighandler_t) };
    let pairs = AtomicUsize::new(0);
    let threads = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for worker in 0..2 * cpus.len() + 1 {
            let (pairs, threads, cpus) = (&pairs, &threads, &cpus);
            scope.spawn(move || {
                // SAFETY: takes nothing.
                threads.lock().unwrap().push((unsafe { libc::pthread_self() }, sched::thread_id()));
                let mut round = worker;
                while pairs.load(Ordering::Relaxed) < wanted {
                    for _ in 0..64 {
                        if let Some(number) = state.take() {
                            while !state.give(number) {
                                std::hint::spin_loop();
                            }
                            pairs.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // To where others are, with what this one has put elsewhere.
                    round += 1;
                    let mut one = CpuSet::new();
                    one.insert(cpus[round % cpus.len()]);
                    sched::set_affinity(&one).unwrap();
                }
                // From here on, nobody sends this thread a signal.
                threads.lock().unwrap().retain(|&(_, id)| id != sched::thread_id());
            });
        }
        scope.spawn(|| {
            while pairs.load(Ordering::Relaxed) < wanted {
                for &(thread, _) in threads.lock().unwrap().iter() {
                    // SAFETY: a thread that is on the list waits for the lock before it ends.
                    unsafe { libc::pthread_kill(thread, libc::SIGWINCH) };
                }
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        });
    });
    let mut all: Vec<u32> = (0..FEW as u32).filter(|&n| state.left[n as usize].load(Ordering::SeqCst) == 1).collect();
    state.stacks.drain(|_| true, |numbers| all.extend_from_slice(numbers));
    all.sort_unstable();
    assert_eq!(all, (0..FEW as u32).collect::<Vec<_>>());
    // SAFETY: all zeroes is a valid `rusage`; the call only writes to it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0);
        usage
    };
    let (preemptions, signals) = (usage.ru_nivcsw, SIGNALS.load(Ordering::Relaxed));
    let how = if state.stacks.restartable() { "in restartable sequences" } else { "under try-locks" };
    let pairs = pairs.into_inner();
    println!("{pairs} pairs {how}, {preemptions} preemptions, {signals} signals: nothing lost or doubled");
    // What was asked for by name must have happened.
    if let Ok(kind) = std::env::var("PAGECREW_TEST_STACKS") {
        assert_eq!(how, kind);
        assert!(preemptions as usize >= wanted / 1000 && signals >= wanted / 1000);
    }
}
