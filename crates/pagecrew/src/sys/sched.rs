//! Scheduling classes and affinity of threads.

use super::{Errno, procfs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The calling thread's kernel thread number.
pub fn thread_id() -> i32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// The classes that Pagecrew uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// `SCHED_OTHER`: the ordinary class.
    Normal,
    /// `SCHED_IDLE` (2.6.23): weight 3 where an ordinary thread has 1024; runs on CPU that nobody else wants.
    Idle,
}

/// Moves thread `id` (0: the calling one) to `class`.
///
/// # Errors
/// `EPERM` for the way back from [`Class::Idle`] without `CAP_SYS_NICE` or a sufficient `RLIMIT_NICE`; `ESRCH` if the thread ended.
pub fn set_class(id: i32, class: Class) -> Result<(), Errno> {
    let policy = match class {
        Class::Normal => libc::SCHED_OTHER,
        Class::Idle => libc::SCHED_IDLE,
    };
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: `parameter` outlives the call.
    Errno::check(unsafe { libc::syscall(libc::SYS_sched_setscheduler, id, policy, &parameter) }).map(drop)
}

/// The kernel's `struct sched_attr` in its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// `SCHED_FLAG_RESET_ON_FORK`, which a thread without privileges can't take back.
const RESET_ON_FORK: u64 = 1;

fn attributes() -> Result<Attributes, Errno> {
    let size = size_of::<Attributes>();
    let mut attributes = Attributes::default();
    // SAFETY: the structure has room for `size` bytes.
    Errno::check(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) })?;
    Ok(attributes)
}

fn set_attributes(attributes: &Attributes) -> Result<(), Errno> {
    // SAFETY: the structure is valid for its size, which it holds.
    Errno::check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const *attributes, 0) }).map(drop)
}

/// Moves the calling thread to the ordinary class, as nice as it is, with time slices of `slice_ns` nanoseconds (6.12; older kernels
/// take no notice of those). A thread of the idle class stays there: its process is to have no CPU time that others want.
///
/// # Errors
/// `EPERM` where a filter of system calls refuses it.
pub fn set_ordinary(slice_ns: u64) -> Result<(), Errno> {
    let attributes = attributes()?;
    if attributes.policy == libc::SCHED_IDLE as u32 {
        return Ok(());
    }
    let nice = if attributes.policy == libc::SCHED_DEADLINE as u32 { 0 } else { attributes.nice };
    let flags = attributes.flags & RESET_ON_FORK;
    let size = attributes.size;
    set_attributes(&Attributes { size, flags, nice, runtime: slice_ns, ..Attributes::default() })
}

/// Asks for time slices of `ns` nanoseconds for the calling thread: one that runs for a moment now and then gets that moment
/// sooner, and no more of the CPU than others (6.12; older kernels take no notice).
///
/// # Errors
/// `EINVAL` for a thread that is not in the ordinary class.
pub fn set_slice(ns: u64) -> Result<(), Errno> {
    let mut attributes = attributes()?;
    if attributes.policy != libc::SCHED_OTHER as u32 {
        return Err(Errno(libc::EINVAL));
    }
    attributes.runtime = ns;
    set_attributes(&attributes)
}

/// How nice the thread `id` is (0: the calling one): from -20, which comes before all other ordinary ones, to 19. May be called after a fork of a
/// process with several threads.
///
/// # Errors
/// `ESRCH` if the thread ended.
pub fn nice_of(id: i32) -> Result<i32, Errno> {
    // The system call itself, which never returns anything below zero, unlike the C library's function.
    // SAFETY: passes numbers only.
    let found = Errno::check(unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, id) })?;
    Ok(20 - found as i32)
}

/// Makes the thread `id` so nice. May be called after a fork of a process with several threads.
///
/// # Errors
/// `EACCES` or `EPERM` without `CAP_SYS_NICE` or a sufficient `RLIMIT_NICE`; `ESRCH` if the thread ended.
pub fn set_nice_of(id: i32, nice: i32) -> Result<(), Errno> {
    // SAFETY: passes numbers only.
    Errno::check(unsafe { libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, id, nice) }).map(drop)
}

/// Has the calling thread run before all ordinary ones, and so at once when it wakes up (`SCHED_FIFO`). What it starts is ordinary. If it ran for
/// `most` without a pause, this process would be ended (`RLIMIT_RTTIME`, 2.6.25): by mistake it may not keep a CPU from everybody.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE`, or where the control group has no time for such threads.
pub fn set_real_time(most: Duration) -> Result<(), Errno> {
    let limit = most.as_micros() as libc::rlim_t;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: `limit` outlives the call.
    Errno::check(unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &limit) }.into())?;
    let (size, policy) = (size_of::<Attributes>() as u32, libc::SCHED_FIFO as u32);
    set_attributes(&Attributes { size, policy, flags: RESET_ON_FORK, priority: 1, ..Attributes::default() })
}

/// A set of CPUs: the largest that glibc's own calls know, 1024.
#[derive(Clone, Copy)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// The empty set.
    pub fn new() -> CpuSet {
        // SAFETY: all zeroes is the empty set.
        CpuSet(unsafe { std::mem::zeroed() })
    }

    /// Adds `cpu`, if it is below 1024.
    pub fn insert(&mut self, cpu: usize) {
        if cpu < libc::CPU_SETSIZE as usize {
            // SAFETY: the index is in the set's bounds.
            unsafe { libc::CPU_SET(cpu, &mut self.0) }
        }
    }

    /// Whether `cpu` is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        // SAFETY: the index is in the set's bounds.
        cpu < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    /// Number of CPUs in the set.
    pub fn count(&self) -> usize {
        // SAFETY: only reads the set.
        unsafe { libc::CPU_COUNT(&self.0) as usize }
    }

    /// The CPUs in both sets.
    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        let mut both = CpuSet::new();
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&cpu| self.contains(cpu) && other.contains(cpu))
            .for_each(|cpu| both.insert(cpu));
        both
    }
}

impl PartialEq for CpuSet {
    fn eq(&self, other: &CpuSet) -> bool {
        // SAFETY: only reads the sets.
        unsafe { libc::CPU_EQUAL(&self.0, &other.0) }
    }
}

impl Eq for CpuSet {}

/// A [`CpuSet`] that threads read while another writes: one that reads meanwhile gets some CPUs of the old set and some of the new one.
#[derive(Debug)]
pub struct AtomicCpuSet([AtomicU64; CPU_WORDS]);

/// Words of 64 CPUs in a set.
const CPU_WORDS: usize = libc::CPU_SETSIZE as usize / 64;

impl AtomicCpuSet {
    /// One that holds `set`.
    pub fn new(set: &CpuSet) -> AtomicCpuSet {
        let atomic = AtomicCpuSet(std::array::from_fn(|_| AtomicU64::new(0)));
        atomic.store(set);
        atomic
    }

    /// Replaces it by `set`.
    pub fn store(&self, set: &CpuSet) {
        for (index, word) in self.0.iter().enumerate() {
            let bits = (0..64).filter(|bit| set.contains(index * 64 + bit)).fold(0, |bits, bit| bits | 1 << bit);
            word.store(bits, Ordering::Relaxed);
        }
    }

    /// What it holds.
    pub fn load(&self) -> CpuSet {
        let mut set = CpuSet::new();
        for (index, word) in self.0.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                set.insert(index * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        set
    }
}

impl std::fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries((0..libc::CPU_SETSIZE as usize).filter(|&cpu| self.contains(cpu))).finish()
    }
}

impl Default for CpuSet {
    fn default() -> CpuSet {
        CpuSet::new()
    }
}

/// The CPUs that the calling thread may run on, cpuset included.
///
/// # Errors
/// `EINVAL` on machines with more than 1024 possible CPUs.
pub fn affinity() -> Result<CpuSet, Errno> {
    affinity_of(0)
}

fn affinity_of(id: i32) -> Result<CpuSet, Errno> {
    let mut set = CpuSet::new();
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: `set` has room for `size` bytes.
    Errno::check(unsafe { libc::sched_getaffinity(id, size, &mut set.0) } as libc::c_long).map(|_| set)
}

/// `now`, which [`affinity`] has said, with the CPUs that come to it when they come online. Only a process's main thread is asked for
/// them: `now` itself where that is allowed other CPUs, or where `/proc/self/status` can't be read.
pub fn with_offline(now: CpuSet) -> CpuSet {
    // SAFETY: takes nothing.
    if affinity_of(unsafe { libc::getpid() }) != Ok(now) {
        return now;
    }
    let mut buffer = procfs::Buffer::new();
    let text = procfs::read_lossy(c"/proc/self/status", &mut buffer).ok();
    let allowed = text.and_then(|text| parse_allowed(&text));
    allowed.filter(|allowed| allowed.intersection(&now) == now).unwrap_or(now)
}

/// The set in a status file: words of 32 CPUs in hexadecimal, the last CPUs first.
fn parse_allowed(text: &str) -> Option<CpuSet> {
    let words = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
    let mut set = CpuSet::new();
    for (index, word) in words.trim().rsplit(',').enumerate() {
        let bits = u32::from_str_radix(word, 16).ok()?;
        (0..32).filter(|bit| bits & 1 << bit != 0).for_each(|bit| set.insert(index * 32 + bit));
    }
    Some(set)
}

/// Restricts the calling thread to `set`.
///
/// # Errors
/// `EINVAL` where no CPU of the set may be used.
pub fn set_affinity(set: &CpuSet) -> Result<(), Errno> {
    set_affinity_of(0, set)
}

/// Restricts the thread with the kernel's number `id` to `set`; 0 is the calling one.
///
/// # Errors
/// `EINVAL` where no CPU of the set may be used, `ESRCH` where there is no such thread, `EPERM` where it is another user's.
pub fn set_affinity_of(id: i32, set: &CpuSet) -> Result<(), Errno> {
    // SAFETY: `set` is valid for its size.
    Errno::check(unsafe { libc::sched_setaffinity(id, size_of::<libc::cpu_set_t>(), &set.0) } as libc::c_long).map(drop)
}

/// CPUs of the machine that are online. Reads a file.
pub fn online_cpus() -> usize {
    // SAFETY: takes a number and returns one.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN).max(1) as usize }
}

/// How long the CPUs of `set` were idle since the machine started, all together, in nanoseconds (`/proc/stat`, in steps of 10 ms); `None`
/// where that isn't said of each. Reads a file.
pub fn idle_ns(set: &CpuSet) -> Option<u64> {
    // A line has up to a hundred bytes.
    let mut buffer = vec![0; 64 << 10];
    parse_idle(procfs::read(c"/proc/stat", &mut buffer).ok()?, set)
}

fn parse_idle(text: &str, set: &CpuSet) -> Option<u64> {
    const TICK_NS: u64 = 10_000_000;
    let (mut seen, mut ticks) = (0, 0);
    for line in text.lines().skip(1).take_while(|line| line.starts_with("cpu")) {
        let mut fields = line["cpu".len()..].split_ascii_whitespace();
        let cpu: usize = fields.next()?.parse().ok()?;
        if set.contains(cpu) {
            seen += 1;
            // user, nice, system, idle, iowait
            ticks += fields.clone().nth(3)?.parse::<u64>().ok()? + fields.nth(4)?.parse::<u64>().ok()?;
        }
    }
    (seen == set.count()).then_some(ticks * TICK_NS)
}

/// The CPU that the calling thread runs on at this moment.
pub fn current_cpu() -> usize {
    // SAFETY: takes nothing; glibc answers from the rseq area or the vDSO.
    unsafe { libc::sched_getcpu().max(0) as usize }
}

/// The CPU that the calling thread runs on at this moment, and the kernel's number of its NUMA node (`getcpu`, 2.6.19). A system call:
/// the kernel knows the node of a CPU that came online a moment ago as well.
pub fn current_cpu_and_node() -> (usize, usize) {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: both places are valid for a number.
    unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, 0usize) };
    (cpu as usize, node as usize)
}

/// As [`current_cpu`], read where the kernel keeps it for restartable sequences, once [`super::rseq::prepare`] was called. A huge number
/// in a thread that isn't registered there.
#[inline(always)]
pub fn this_cpu() -> usize {
    match super::rseq::offset() {
        // SAFETY: the offset is what the call said.
        Some(offset) => unsafe { super::rseq::cpu(offset) as usize },
        None => current_cpu(),
    }
}

/// CPUs that the machine may have, whether they are online or not.
pub fn possible_cpus() -> usize {
    // SAFETY: takes a constant and returns a number.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF).max(1) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_always_become_idle() {
        std::thread::spawn(|| {
            set_class(0, Class::Idle).unwrap();
            // The way back depends on rights; both answers are right, any other is not.
            assert!(matches!(set_class(thread_id(), Class::Normal), Ok(()) | Err(Errno(libc::EPERM))));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_of_any_class_but_the_idle_one_becomes_ordinary_and_as_nice_as_it_was() {
        let now = || attributes().map(|attributes| (attributes.policy as i32, attributes.nice)).unwrap();
        std::thread::spawn(move || {
            // SAFETY: takes no pointers; about the calling thread alone.
            unsafe { libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, 7) };
            let parameter = libc::sched_param { sched_priority: 0 };
            // SAFETY: `parameter` outlives the call.
            unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_BATCH, &parameter) };
            assert_eq!(now(), (libc::SCHED_BATCH, 7));
            set_ordinary(3_000_000).unwrap();
            assert_eq!(now(), (libc::SCHED_OTHER, 7));
            set_class(0, Class::Idle).unwrap();
            set_ordinary(3_000_000).unwrap();
            assert_eq!(now().0, libc::SCHED_IDLE);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_is_as_nice_as_it_was_set() {
        std::thread::spawn(|| {
            set_nice_of(0, 7).unwrap();
            assert_eq!((nice_of(0).unwrap(), attributes().unwrap().nice), (7, 7));
            assert_eq!(nice_of(i32::MAX), Err(Errno(libc::ESRCH)));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn only_an_ordinary_thread_has_slices() {
        std::thread::spawn(|| {
            set_slice(100_000).unwrap();
            set_class(0, Class::Idle).unwrap();
            assert_eq!(set_slice(100_000), Err(Errno(libc::EINVAL)));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn idle_time_of_some_cpus() {
        let text = "cpu  9 9 9 90 9 0 0\ncpu0 1 0 1 30 3 0 0\ncpu2 1 0 1 20 2 0 0\ncpu5 1 0 1 40 4 0 0\nintr 5\n";
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|&cpu| set.insert(cpu));
            set
        };
        assert_eq!(parse_idle(text, &set(&[0, 5])), Some(770_000_000));
        assert_eq!((parse_idle(text, &set(&[0, 1])), parse_idle("", &set(&[0]))), (None, None));
        assert!(idle_ns(&affinity().unwrap()).is_some());
    }

    #[test]
    fn allowed_cpus_in_a_status_file() {
        let text = |mask: &str| format!("Name:\tcat\nCpus_allowed:\t{mask}\nCpus_allowed_list:\t0\n");
        let cpus =
            |mask| parse_allowed(&text(mask)).map(|set| (0..1024).filter(|&cpu| set.contains(cpu)).collect::<Vec<_>>());
        assert_eq!(cpus("5"), Some(vec![0, 2]));
        assert_eq!(cpus("80000000,00000000,00000003"), Some(vec![0, 1, 95]));
        assert_eq!((cpus("x"), parse_allowed("Name:\tcat\n")), (None, None));
        // SAFETY: takes nothing.
        let main = affinity_of(unsafe { libc::getpid() }).unwrap();
        assert_eq!(with_offline(main).intersection(&main), main);
        let other = CpuSet::new();
        assert_eq!(with_offline(other), other);
    }

    #[test]
    fn a_set_for_several_threads_holds_what_was_stored() {
        let mut set = CpuSet::new();
        [0, 63, 64, 500, 1023].into_iter().for_each(|cpu| set.insert(cpu));
        let atomic = AtomicCpuSet::new(&set);
        assert_eq!(atomic.load(), set);
        atomic.store(&CpuSet::new());
        assert_eq!(atomic.load(), CpuSet::new());
    }

    #[test]
    fn affinity_has_the_current_cpu() {
        let set = affinity().unwrap();
        assert!(set.count() >= 1 && set.contains(current_cpu()));
        assert_eq!(set.intersection(&CpuSet::new()).count(), 0);
    }
}
