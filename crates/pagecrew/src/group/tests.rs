//! Groups of the kernel, where some can be made, and directories of plain files like those of a group.

use super::hold::{Reclaimable, reclaimable};
use super::*;
use crate::sys::PAGE_SIZE;
use std::ffi::c_int;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
const LIMIT: usize = 16 << 20;

/// A directory name that no other test of any process has.
fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("pagecrew-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Waits until the kernel tells something about the group.
fn wait(hold: &mut Hold, timeout: Duration) {
    let polled = |(fd, events)| libc::pollfd { fd, events, revents: 0 };
    let mut polled: Vec<_> = hold.descriptors().map(polled).collect();
    // SAFETY: the descriptors are open, and the array has the length that is given.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout.as_millis() as c_int) };
    hold.heard();
}

/// Whether `condition` becomes true while there is patience.
fn comes_true(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < patience {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    condition()
}

/// A group of version 1 that is removed at the end, with those below it and whatever is in them.
struct TestGroup(Group);

impl TestGroup {
    /// `None` where no group can be made: without the rights, or without version 1.
    fn new(limit: usize) -> Option<TestGroup> {
        let name = unique();
        fs::create_dir(Path::new("/sys/fs/cgroup/memory").join(&name)).ok()?;
        let group = TestGroup(Group::find(&name).unwrap());
        group.write("memory.limit_in_bytes", &limit.to_string());
        Some(group)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.path.join(file), text).unwrap();
    }

    fn below(&self, name: &str) -> PathBuf {
        let path = self.0.path.join(name);
        fs::create_dir(&path).unwrap();
        path
    }

    fn oom_kill_disable(&self) -> u64 {
        oom_kill_disable(&self.0.path)
    }
}

fn oom_kill_disable(path: &Path) -> u64 {
    field(&fs::read_to_string(path.join("memory.oom_control")).unwrap(), "oom_kill_disable").unwrap()
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        for process in self.0.processes().unwrap_or_default() {
            // SAFETY: a process that a test has put into its own group.
            unsafe { libc::kill(process, libc::SIGKILL) };
        }
        for (path, _) in groups(&self.0.path).unwrap_or_default().iter().rev() {
            // A process that was killed leaves its group a moment later.
            comes_true(PATIENCE, || fs::remove_dir(path).is_ok());
        }
    }
}

/// A child process in a group, which touches memory when it is told to, and exits when it is told to.
struct Eater {
    process: libc::pid_t,
    go: UnixStream,
}

impl Eater {
    fn new(group: &Path, bytes: usize) -> Eater {
        let (go, told) = UnixStream::pair().unwrap();
        // SAFETY: the child makes raw system calls only, touches memory that it has mapped itself, and exits.
        let process = unsafe {
            let process = libc::fork();
            if process == 0 {
                let mut byte = 0u8;
                let mut wait = || libc::read(told.as_raw_fd(), (&raw mut byte).cast(), 1);
                let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                if wait() == 1 {
                    let memory = libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0).cast::<u8>();
                    libc::madvise(memory.cast(), bytes, libc::MADV_NOHUGEPAGE);
                    for at in (0..bytes).step_by(PAGE_SIZE) {
                        memory.add(at).write_volatile(1);
                    }
                }
                wait();
                libc::_exit(7);
            }
            process
        };
        assert!(process > 0);
        let eater = Eater { process, go };
        fs::write(group.join("cgroup.procs"), process.to_string()).unwrap();
        eater
    }

    fn go(&self) {
        (&self.go).write_all(&[1]).unwrap();
    }

    /// The status that it has ended with, if it has within `patience`.
    fn status(&mut self, patience: Duration) -> Option<i32> {
        let mut status = 0;
        // SAFETY: the test's own child, which nobody else waits for; 0 once it was waited for.
        let ended = || self.process > 0 && unsafe { libc::waitpid(self.process, &mut status, libc::WNOHANG) } != 0;
        if !comes_true(patience, ended) {
            return None;
        }
        self.process = 0;
        Some(status)
    }
}

impl Drop for Eater {
    fn drop(&mut self) {
        if self.process > 0 {
            // SAFETY: the test's own child, which was not waited for yet.
            unsafe {
                libc::kill(self.process, libc::SIGKILL);
                libc::waitpid(self.process, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// A group that is held.
fn held(group: &Group) -> Hold {
    let mut hold = group.hold().unwrap();
    hold.take(56 << 20).unwrap();
    hold
}

fn wait_for_sleepers(hold: &mut Hold) {
    let begin = Instant::now();
    while hold.sleeping() == Some(false) {
        wait(hold, Duration::from_secs(1));
        assert!(begin.elapsed() < PATIENCE, "nothing sleeps");
    }
}

#[test]
fn texts_of_the_kernel() {
    let text = "oom_kill_disable 1\nunder_oom 0\noom_kill 5\n";
    assert_eq!(field(text, "oom_kill_disable"), Some(1));
    assert_eq!(field(text, "oom_kill"), Some(5));
    assert_eq!(field(text, "oom"), None);
    assert_eq!(number("4096\n"), Ok(Some(4096)));
    assert_eq!(number("max\n"), Ok(None));
    assert_eq!(number("many\n"), Err(Errno(libc::EILSEQ)));
    assert_eq!(numbers_of_processes("7\n0\n12\n\n").collect::<Vec<_>>(), [7, 12]);
}

#[test]
fn what_can_be_taken_by_memory_stat() {
    let v2 = "anon 1\nfile 90\ninactive_anon 4\nactive_anon 8\ninactive_file 16\nactive_file 32\nslab_reclaimable 64\n";
    assert_eq!(reclaimable(v2, Version::V2), Reclaimable { cache: 112, swappable: 12 });
    assert_eq!(reclaimable("anon 1\ninactive_file 16\n", Version::V2), Reclaimable { cache: 16, swappable: 0 });
    let v1 = "inactive_file 1\nactive_file 2\ntotal_inactive_file 16\ntotal_active_file 32\ntotal_active_anon 5\n";
    assert_eq!(reclaimable(v1, Version::V1), Reclaimable { cache: 48, swappable: 5 });
    assert_eq!(reclaimable("", Version::V1), Reclaimable::default());
}

#[test]
fn groups_are_found_by_name_and_by_directory_and_nothing_else_is() {
    let error = Group::find("no/such-group").unwrap_err();
    let GroupError::NotFound { tried, .. } = &error else { panic!("{error:?}") };
    assert!(tried.iter().all(|path| path.ends_with("no/such-group")), "{tried:?}");
    assert!(error.to_string().contains("no/such-group") && error.to_string().contains("; give"), "{error}");
    assert!(matches!(Group::find("/proc/self/status"), Err(GroupError::NotFound { .. })));
    assert_eq!(Group::find(""), Err(GroupError::NotFound { name: String::new(), tried: vec![] }));
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let name = group.0.path.file_name().unwrap().to_str().unwrap();
    for name in [name, &format!("/{name}"), group.0.path.to_str().unwrap()] {
        assert_eq!(Group::find(name).unwrap(), group.0);
    }
    assert_eq!(group.0.version(), Version::V1);
    if Path::new("/sys/fs/cgroup/cpu/cgroup.procs").exists() && !Path::new("/sys/fs/cgroup/cpu/memory.stat").exists() {
        let found = Group::find("/sys/fs/cgroup/cpu");
        assert_eq!(found, Err(GroupError::OtherController("/sys/fs/cgroup/cpu".into())));
    }
}

#[test]
fn processes_and_usage_include_the_groups_below() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    assert_eq!(group.0.limit(), Some(LIMIT as u64));
    assert_eq!(group.0.processes(), Ok(vec![]));
    let eaters = [Eater::new(&group.0.path, 4 << 20), Eater::new(&group.below("a"), 4 << 20)];
    eaters.iter().for_each(Eater::go);
    let mut expected: Vec<i32> = eaters.iter().map(|eater| eater.process).collect();
    expected.sort();
    assert_eq!(group.0.processes(), Ok(expected));
    assert!(comes_true(PATIENCE, || (8 << 20..=LIMIT as u64).contains(&group.0.usage().unwrap())));
    drop(eaters);
    let gone = group.0.clone();
    drop(group);
    assert_eq!(gone.processes(), Err(Errno(libc::ENOENT)));
    assert_eq!((gone.usage(), gone.limit()), (Err(Errno(libc::ENOENT)), None));
}

#[test]
fn a_group_without_a_limit_is_not_held() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    group.write("memory.limit_in_bytes", "-1");
    assert_eq!(group.0.limit(), None);
    assert_eq!(group.0.hold().unwrap_err(), HoldError::NoLimit(group.0.path.clone()));
    assert_eq!(group.oom_kill_disable(), 0);
}

#[test]
fn tasks_are_held_at_the_limit_until_there_is_memory() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let mut hold = group.0.hold().unwrap();
    assert_eq!(group.oom_kill_disable(), 0);
    hold.take(0).unwrap();
    assert_eq!((group.oom_kill_disable(), hold.most(), hold.high()), (1, Some(LIMIT as u64), None));
    assert_eq!(hold.sleeping(), Some(false));
    let mut eater = Eater::new(&group.0.path, 2 * LIMIT);
    eater.go();
    wait_for_sleepers(&mut hold);
    assert_eq!(eater.status(Duration::from_millis(100)), None);
    assert_eq!(hold.sleeping(), Some(true));
    group.write("memory.limit_in_bytes", &(4 * LIMIT).to_string());
    eater.go();
    let status = eater.status(PATIENCE).unwrap();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "status {status:#x}");
    assert_eq!(hold.sleeping(), Some(false));
    drop(hold);
    assert_eq!(group.oom_kill_disable(), 0);
}

#[test]
fn the_threshold_is_told_before_the_limit() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let mut hold = held(&group.0);
    let eater = Eater::new(&group.0.path, LIMIT / 16 * 15);
    let begin = Instant::now();
    eater.go();
    wait(&mut hold, PATIENCE);
    assert!(begin.elapsed() < PATIENCE / 2, "only after {:?}", begin.elapsed());
    assert!(hold.usage().unwrap() >= LIMIT as u64 / 8 * 7);
    assert!(comes_true(PATIENCE, || hold.usage().unwrap() - hold.reclaimable().cache >= LIMIT as u64 / 16 * 15));
}

#[test]
fn tasks_that_are_let_go_meet_the_oom_killer() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let mut hold = held(&group.0);
    for _ in 0..2 {
        let mut eater = Eater::new(&group.0.path, 2 * LIMIT);
        eater.go();
        wait_for_sleepers(&mut hold);
        hold.let_go().unwrap();
        let status = eater.status(PATIENCE).unwrap();
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "status {status:#x}");
        assert_eq!(group.oom_kill_disable(), 0);
        hold.take(0).unwrap();
        assert_eq!(group.oom_kill_disable(), 1);
    }
}

#[test]
fn one_at_a_time_holds_a_group_and_finds_it_as_it_was_again() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let hold = held(&group.0);
    assert_eq!(group.0.hold().unwrap_err(), HoldError::Taken(group.0.path.join("memory.oom_control")));
    drop(hold);
    group.write("memory.oom_control", "1");
    let mut hold = held(&group.0);
    hold.let_go().unwrap();
    assert!(!hold.may_change());
    assert_eq!(group.oom_kill_disable(), 1);
    drop(hold);
    assert_eq!(group.oom_kill_disable(), 1);
}

#[test]
fn groups_that_come_below_a_held_one_keep_their_oom_killer() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let own = group.below("own");
    fs::write(own.join("memory.oom_control"), "1").unwrap();
    let mut hold = held(&group.0);
    let first = group.below("first");
    assert_eq!(oom_kill_disable(&first), 1);
    hold.heard();
    assert_eq!(oom_kill_disable(&first), 0);
    fs::write(first.join("memory.oom_control"), "1").unwrap();
    let second = group.below("second");
    drop(hold);
    assert_eq!([&own, &first, &second].map(|path| oom_kill_disable(path)), [1, 1, 0]);
}

#[test]
fn a_group_may_go_while_it_is_held() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let mut hold = held(&group.0);
    drop(group);
    hold.heard();
    assert_eq!((hold.usage(), hold.most(), hold.sleeping()), (None, None, Some(false)));
    assert_eq!(hold.let_go(), Err(Errno(libc::ENODEV)));
}

#[test]
fn the_guard_has_nothing_of_this_process_and_ends_with_the_hold() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    let hold = held(&group.0);
    let guard = hold.guard.as_ref().unwrap().process;
    let entry = |name: &str| PathBuf::from(format!("/proc/{guard}/{name}"));
    assert_eq!(fs::read_to_string(entry("comm")).unwrap(), "pagecrew/guard\n");
    // Its line, the file that it writes to, that of the lock, and what the group uses.
    assert_eq!(fs::read_dir(entry("fd")).unwrap().count(), 4);
    assert_eq!(fs::read_link(entry("cwd")).unwrap(), Path::new("/"));
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: the guard is this process's child, and was not waited for.
        assert_eq!(unsafe { libc::kill(guard, signal) }, 0);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(entry("exe").exists());
    drop(hold);
    assert!(!entry("comm").exists());
}

/// Not a test: the process that is killed below while it holds a group.
#[test]
#[ignore = "started by another test"]
fn a_process_that_holds() {
    let Some(path) = std::env::var_os("PAGECREW_TEST_GROUP") else { return };
    let group = Group::find(path.to_str().unwrap()).unwrap();
    if std::env::var_os("PAGECREW_TEST_INSIDE").is_some() {
        fs::write(group.path.join("cgroup.procs"), "0").unwrap();
    }
    let _hold = held(&group);
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn a_holder_that_is_killed_leaves_no_task_held() {
    for inside in [false, true] {
        let Some(group) = TestGroup::new(2 * LIMIT) else { return };
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("{}::a_process_that_holds", module_path!().split_once("::").unwrap().1);
        command.env("PAGECREW_TEST_GROUP", &group.0.path).args(["--exact", &name, "--ignored", "--quiet"]);
        if inside {
            command.env("PAGECREW_TEST_INSIDE", "1");
        }
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let held = comes_true(PATIENCE, || group.oom_kill_disable() == 1);
        // Made without an OOM killer, too.
        let late = group.below("late");
        assert!(!held || oom_kill_disable(&late) == 1);
        let mut eater = Eater::new(&group.0.path, 4 * LIMIT);
        eater.go();
        let text = || fs::read_to_string(group.0.path.join("memory.oom_control")).unwrap();
        let stuck = comes_true(PATIENCE, || field(&text(), "under_oom") == Some(1));
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(held && stuck, "held {held}, stuck {stuck}");
        assert!(comes_true(Duration::from_secs(1), || group.oom_kill_disable() == 0), "inside: {inside}");
        assert!(comes_true(Duration::from_secs(1), || oom_kill_disable(&late) == 0), "inside: {inside}");
        let status = eater.status(PATIENCE).unwrap();
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "status {status:#x}");
    }
}

/// The children of a process.
fn children(process: u32) -> Vec<i32> {
    let numbers = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = |number: &i32| {
        let text = fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        text.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1)?.parse().ok())
    };
    numbers.filter(|number| parent(number) == Some(process)).collect()
}

/// Starts a process that holds the group at `path`, and once that is `held` kills it, together with its guard.
fn killed_with_its_guard(path: &Path, held: impl Fn() -> bool) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("{}::a_process_that_holds", module_path!().split_once("::").unwrap().1);
    command.env("PAGECREW_TEST_GROUP", path).args(["--exact", &name, "--ignored", "--quiet"]);
    let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    assert!(comes_true(PATIENCE, held));
    // The guard first: it would have time otherwise.
    for guard in children(holder.id()) {
        // SAFETY: a child of a process of this test's.
        unsafe { libc::kill(guard, libc::SIGKILL) };
    }
    holder.kill().unwrap();
    holder.wait().unwrap();
    // The guard's end takes a moment, and until then it has the group.
    assert!(comes_true(PATIENCE, || !matches!(
        Group::find(path.to_str().unwrap()).unwrap().hold_lock(),
        Err(HoldError::Taken(_))
    )));
}

#[test]
fn a_hold_without_holder_and_guard_is_undone_by_the_next() {
    let Some(group) = TestGroup::new(LIMIT) else { return };
    // Somebody else's wish, for a group below.
    let own = group.below("own");
    fs::write(own.join("memory.oom_control"), "1").unwrap();
    killed_with_its_guard(&group.0.path, || group.oom_kill_disable() == 1);
    let late = group.below("late");
    assert_eq!([group.oom_kill_disable(), oom_kill_disable(&late)], [1, 1]);
    if marker::Marker::possible(&fs::File::open(group.0.path.join("memory.oom_control")).unwrap()).is_err() {
        return;
    }
    let mut hold = group.0.hold().unwrap();
    assert!(hold.found_one_left() && hold.may_change());
    assert_eq!([&group.0.path, &own, &late].map(|path| oom_kill_disable(path)), [0, 1, 0]);
    hold.take(0).unwrap();
    assert_eq!(group.oom_kill_disable(), 1);
    drop(hold);
    assert_eq!(group.oom_kill_disable(), 0);
    // What was undone leaves nothing: from here on it is the operator's wish.
    group.write("memory.oom_control", "1");
    let hold = group.0.hold().unwrap();
    assert!(!hold.found_one_left() && !hold.may_change());
}

#[test]
fn all_holds_without_holder_and_guard_are_undone_and_no_others() {
    let Some(top) = TestGroup::new(LIMIT) else { return };
    let [killed, held, never] = ["killed", "held", "never"].map(|name| top.below(name));
    for path in [&killed, &held] {
        fs::write(path.join("memory.limit_in_bytes"), LIMIT.to_string()).unwrap();
    }
    killed_with_its_guard(&killed, || oom_kill_disable(&killed) == 1);
    if marker::Marker::possible(&fs::File::open(killed.join("memory.oom_control")).unwrap()).is_err() {
        return;
    }
    let mut hold = Group::find(held.to_str().unwrap()).unwrap().hold().unwrap();
    hold.take(0).unwrap();
    // An operator's own.
    fs::write(never.join("memory.oom_control"), "1").unwrap();
    assert_eq!(super::hold::undo_what_was_left_below(&top.0.path), std::slice::from_ref(&killed));
    assert_eq!([&killed, &held, &never].map(|path| oom_kill_disable(path)), [0, 1, 1]);
    assert!(super::hold::undo_what_was_left_below(&top.0.path).is_empty());
}

#[test]
fn memory_high_without_holder_and_guard_is_restored_by_the_next() {
    for somebody_else in [false, true] {
        let files = MadeUp::new("99000000000\n", "67108864\n");
        if marker::Marker::possible(&fs::File::open(files.0.join("memory.high")).unwrap()).is_err() {
            return;
        }
        killed_with_its_guard(&files.0, || files.high() != "99000000000");
        if somebody_else {
            files.write("memory.high", "33554432\n");
        }
        let hold = files.group().hold().unwrap();
        assert_eq!((hold.found_one_left(), hold.may_change()), (!somebody_else, !somebody_else));
        assert_eq!(files.high(), if somebody_else { "33554432" } else { "99000000000" });
        drop(hold);
        let hold = files.group().hold().unwrap();
        assert!(!hold.found_one_left());
    }
}

/// A directory of plain files like those of a group of version 2. What is written to a plain file replaces the beginning of
/// what it has, so only first lines are looked at.
struct MadeUp(PathBuf);

impl MadeUp {
    fn new(high: &str, max: &str) -> MadeUp {
        let group = MadeUp(std::env::temp_dir().join(unique()));
        fs::create_dir(&group.0).unwrap();
        group.write("cgroup.procs", "5\n");
        group.write("memory.current", "1048576\n");
        group.write("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n");
        group.write("memory.high", high);
        group.write("memory.max", max);
        group
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }

    fn high(&self) -> String {
        fs::read_to_string(self.0.join("memory.high")).unwrap().lines().next().unwrap().to_owned()
    }

    fn group(&self) -> Group {
        Group::find(self.0.to_str().unwrap()).unwrap()
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn version_2_is_held_by_memory_high() {
    let files = MadeUp::new("max\n", "67108864\n");
    let group = files.group();
    assert_eq!((group.version(), group.limit(), group.usage()), (Version::V2, Some(64 << 20), Ok(1 << 20)));
    assert_eq!(group.processes(), Ok(vec![5]));
    let mut hold = group.hold().unwrap();
    assert_eq!((files.high().as_str(), hold.high(), hold.most(), hold.sleeping()), ("max", None, Some(64 << 20), None));
    // In whole pages, as the kernel would round it.
    hold.take((56 << 20) + 5).unwrap();
    assert_eq!((files.high().as_str(), hold.high()), ("58720256", Some(56 << 20)));
    hold.take(48 << 20).unwrap();
    assert_eq!(files.high(), "50331648");
    hold.let_go().unwrap();
    assert_eq!((files.high().as_str(), hold.high()), ("max", None));
    hold.take(56 << 20).unwrap();
    drop(hold);
    assert_eq!(files.high(), "max");
}

#[test]
fn numbers_of_version_2() {
    let files = MadeUp::new("max\n", "67108864\n");
    let mut hold = files.group().hold().unwrap();
    assert_eq!((hold.usage(), hold.times_over_high()), (Some(1 << 20), 0));
    assert_eq!(hold.reclaimable(), Reclaimable::default());
    files.write("memory.stat", "inactive_file 4096\n");
    files.write("memory.events", "low 0\nhigh 17\nmax 0\n");
    assert_eq!((hold.times_over_high(), hold.reclaimable().cache), (17, 4096));
    files.write("memory.swap.max", "8192\n");
    files.write("memory.swap.current", "8192\n");
    assert_eq!(hold.free_swap(), 0);
    files.write("memory.max", "max\n");
    files.write("memory.current", "\n");
    assert_eq!((hold.most(), hold.usage()), (None, None));
    // Those of the groups below are left out where the kernel can.
    files.write("memory.events.local", "low 0\nhigh 3\nmax 0\n");
    files.write("memory.max", "67108864\n");
    drop(hold);
    assert_eq!(files.group().hold().unwrap().times_over_high(), 3);
}

#[test]
fn the_guard_restores_memory_high() {
    let files = MadeUp::new("99000000000\n", "67108864\n");
    let mut hold = held(&files.group());
    hold.take(48 << 20).unwrap();
    assert_eq!(files.high(), "50331648");
    // As if this process had ended: the guard alone is left to do it.
    hold.guard = None;
    assert_eq!(files.high(), "99000000000");
}

#[test]
fn what_somebody_else_writes_to_memory_high_stays() {
    // Before each step that would write.
    for step in 0..4 {
        let files = MadeUp::new("max\n", "67108864\n");
        let mut hold = held(&files.group());
        files.write("memory.high", "33554432\n");
        match step {
            0 => hold.take(48 << 20).unwrap(),
            1 => hold.let_go().unwrap(),
            2 => hold.guard = None,
            _ => {}
        }
        assert_eq!(hold.may_change(), step > 1);
        hold.take(48 << 20).unwrap();
        assert!(!hold.may_change());
        drop(hold);
        assert_eq!(files.high(), "33554432");
    }
    // Also while the group is let go.
    let files = MadeUp::new("max\n", "67108864\n");
    let mut hold = held(&files.group());
    hold.let_go().unwrap();
    files.write("memory.high", "33554432\n");
    hold.take(48 << 20).unwrap();
    assert!(!hold.may_change());
    drop(hold);
    assert_eq!(files.high(), "33554432");
}

#[test]
fn memory_high_is_left_where_it_is_below_max() {
    let files = MadeUp::new("33554432\n", "67108864\n");
    let hold = held(&files.group());
    assert_eq!((hold.may_change(), hold.high(), files.high()), (false, Some(32 << 20), "33554432".to_owned()));
    drop(hold);
    assert_eq!(files.high(), "33554432");
    let files = MadeUp::new("max\n", "max\n");
    assert_eq!(files.group().hold().unwrap_err(), HoldError::NoLimit(files.0.clone()));
}
