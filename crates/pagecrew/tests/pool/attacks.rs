//! What a user may try who wants more of a pool than he was given, or wants others to get nothing. After each trial, all the memory in the
//! pool's mount, as the kernel counts it, is on somebody's account, and others are served as before.

use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::process::{ChildStdin, ChildStdout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What the attacker may have.
const QUOTA: usize = 16 * MIB;
/// A user who does nothing wrong.
const OTHER: u32 = 65_000;
/// What the pool keeps ready.
const READY: usize = 32 * MIB;
/// So long something may be on nobody's account. In a guest, everything takes longer (`scripts/guests.sh`).
fn late() -> Duration {
    Duration::from_secs(1) * patience()
}

/// Another process of another user, which does one of [`ATTACKS`], says so, and goes on when it is told to.
struct Attacker {
    process: Child,
    tell: Option<ChildStdin>,
    hear: BufReader<ChildStdout>,
}

impl Attacker {
    fn start(place: &PoolDirectory, attack: &str) -> Attacker {
        Attacker::start_as(NOBODY, place, attack)
    }

    fn start_as(user: u32, place: &PoolDirectory, attack: &str) -> Attacker {
        let command = this_test("attacks::the_attacker");
        let mut process = Command::new(&command[0])
            .args(&command[1..])
            .env("POOL", &place.0)
            .env("ATTACK", attack)
            .env("ATTACKER", user.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, hear) = (process.stdin.take(), BufReader::new(process.stdout.take().unwrap()));
        Attacker { process, tell, hear }
    }

    /// Waits until it has come to its next rest.
    fn rested(&mut self) {
        let mut said = String::new();
        while !said.ends_with("rests\n") {
            assert!(self.hear.read_line(&mut said).unwrap() > 0, "the attacker has failed: {said}");
        }
    }

    /// Has it go on.
    fn go_on(&mut self) {
        self.tell.as_mut().unwrap().write_all(b"x").unwrap();
    }

    /// Lets it end.
    fn end(mut self) {
        drop(self.tell.take());
        assert!(self.process.wait().unwrap().success(), "the attacker has failed");
    }
}

/// In the attacker: says that it has come to a rest, and waits until it is told to go on.
fn rest() {
    println!("rests");
    let _ = std::io::stdin().read(&mut [0]);
}

/// Bytes in the pool's mount, whoever has them and by whatever name.
fn in_mount(place: &PoolDirectory) -> usize {
    let facts = rustix::fs::statvfs(place.mount()).unwrap();
    ((facts.f_blocks - facts.f_bfree) * facts.f_frsize) as usize
}

/// Whether all there is stays on the accounts, and the attacker within what he may have, but for moments.
fn all_is_counted(place: &PoolDirectory, client: &Client, attack: &str) {
    let deadline = Instant::now() + 2 * late();
    all_is_counted_while(place, client, attack, || Instant::now() < deadline);
}

/// The same for as long as something is done.
fn all_is_counted_during(place: &PoolDirectory, attack: &str, doing: impl FnOnce()) {
    /// Also where it fails.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let client = Client::connect(&place.socket()).unwrap();
            all_is_counted_while(place, &client, attack, || !is_over.load(Ordering::Relaxed));
        });
        let _over = Over(&is_over);
        doing();
    });
}

fn all_is_counted_while(place: &PoolDirectory, client: &Client, attack: &str, goes_on: impl Fn() -> bool) {
    let mut since: [Option<Instant>; 2] = [None; 2];
    while goes_on() {
        let status = status(client);
        let (held, counted) = (in_mount(place), READY + figure(&status, "taken_bytes"));
        // What he keeps locked, nobody can take from him: then it is only counted.
        let bound = if attack == LOCKED { usize::MAX } else { QUOTA };
        let excess = [
            (held.saturating_sub(counted), "bytes are on nobody's account"),
            (bytes_of(&status, NOBODY).saturating_sub(bound), "bytes beyond the quota"),
        ];
        for (since, (bytes, what)) in since.iter_mut().zip(excess) {
            if bytes == 0 {
                *since = None;
            } else {
                let since = *since.get_or_insert_with(Instant::now);
                assert!(since.elapsed() < late(), "{attack}: {bytes} {what}: {status}");
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes on a user's account.
fn bytes_of(status: &str, user: u32) -> usize {
    let account = status.split("\"users\":").nth(1).and_then(|users| users.split(&format!("\"user\":{user},")).nth(1));
    account.map_or(0, |account| figure(account, "taken_bytes"))
}

/// Whether root is served in time, with what was ready.
fn others_are_served(client: &Client, attack: &str) {
    wait_until_full(client);
    let before = Instant::now();
    let taken = client.take(&request(4 * MIB, Until::Closed)).unwrap();
    assert!(before.elapsed() < late() && taken.ready == 4 * MIB, "{attack}: {:?}, {taken:?}", before.elapsed());
    client.release(&taken.path).unwrap();
}

type Attack = fn(&Path, &Client);

const LOCKED: &str = "files are kept locked by writes that never end";
const ATTRIBUTES: &str = "attributes are written until there is no room for more";

/// The trials: each uses up to its quota, tries to have more, and rests with whatever it has got hold of.
const ATTACKS: [(&str, Attack); 26] = [
    ("a path descriptor is kept, and opened again when the file was released", path_descriptor),
    ("the mode is changed back all the time while the file is taken away", mode_changed_back),
    ("memory is reserved beyond the end", reserved_beyond_the_end),
    ("memory is reserved beyond the end of a file that was released", reserved_after_release),
    ("the file is made longer and touched", made_longer),
    ("the file is written to beyond its end", written_beyond),
    ("the file is emptied, released and filled again", emptied_and_filled),
    ("another name is made for the file", another_name),
    ("the names of files are changed", names_changed),
    ("the file is kept mapped", kept_mapped),
    ("the file is opened by another process's descriptors", opened_by_proc),
    ("the file is passed to a process that outlives its taker", passed_on),
    ("the file is left in a message that nobody receives", left_in_a_message),
    ("the file is left with an io_uring", left_with_a_ring),
    ("an access list lets others open it", access_list),
    ("a lease, a lock of each kind and a watch are put on the file", leases_and_locks),
    (LOCKED, kept_locked),
    (ATTRIBUTES, attributes),
    ("the lock of the directory is taken", directory_lock),
    ("files that wait are looked for", waiting_files),
    ("connections are made until there are no more, and nothing is read", connections),
    ("requests are sent whose answers are never read", unread_answers),
    ("connections are left with answers that nobody reads", left_with_answers),
    ("descriptors are sent along with requests", descriptors_sent),
    ("descriptors are sent that take for ever to close", slow_descriptors_sent),
    ("paths are released that are no file of one's own", odd_paths),
];

#[test]
fn nobody_gets_more_than_his_quota_whatever_he_tries() {
    let names: Vec<&str> = ATTACKS.iter().map(|&(name, _)| name).collect();
    try_all(&names, Backing::Tmpfs);
}

/// Reserved pages are few and everybody's who can map them; a user of the pool gets those that he may have.
#[test]
#[ignore = "reserves 2 GiB of huge pages"]
fn nobody_gets_more_than_his_quota_of_reserved_pages() {
    const PAGES: usize = 1024;
    const SETTING: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    /// Also where the test fails.
    struct Reserved(String);
    impl Drop for Reserved {
        fn drop(&mut self) {
            let _ = std::fs::write(SETTING, &self.0);
        }
    }
    let Ok(before) = std::fs::read_to_string(SETTING) else {
        return eprintln!("left out: no huge pages can be reserved");
    };
    let _reserved = Reserved(before);
    let there = || std::fs::read_to_string(SETTING).unwrap().trim().parse::<usize>().unwrap();
    if std::fs::write(SETTING, PAGES.to_string()).is_err() || there() < PAGES {
        return eprintln!("left out: {} of {PAGES} huge pages can be reserved", there());
    }
    // What is written and what attributes take needs another file system.
    let names = ATTACKS.iter().map(|&(name, _)| name).filter(|&name| name != LOCKED && name != ATTRIBUTES);
    try_all(&names.collect::<Vec<_>>(), Backing::Hugetlbfs);
}

fn try_all(names: &[&str], backing: Backing) {
    // Most of a trial is waiting.
    const AT_ONCE: usize = 8;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    try_it(name, backing);
                }
            });
        }
    });
}

/// One trial, against a pool of its own.
fn try_it(name: &str, backing: Backing) {
    let number = ATTACKS.iter().position(|(attack, _)| *attack == name).unwrap();
    let place = PoolDirectory::new(&format!("attacked-{number}"));
    let quotas = Quotas { default: Some(QUOTA), ..Quotas::default() };
    let Some(server) = serve(Options { quotas, unused: Duration::ZERO, backing, ..place.options(READY) }) else {
        return;
    };
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    if name == ATTRIBUTES {
        // By default there is room for an eighth of the machine's memory.
        rustix::mount::mount_remount(place.mount(), rustix::mount::MountFlags::empty(), "nr_inodes=1000").unwrap();
    }
    // Somebody who does nothing wrong, and is never to be refused.
    let mut other = Attacker::start_as(OTHER, &place, "take and give back");
    other.rested();
    let mut attacker = Attacker::start(&place, name);
    all_is_counted_during(&place, name, || attacker.rested());
    all_is_counted(&place, &client, name);
    other.end();
    others_are_served(&client, name);
    attacker.end();
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    all_is_counted(&place, &client, name);
    drop(client);
    assert_eq!(server.stop(), Ok(0), "{name}");
    assert_eq!(place.mounts(), 0, "{name}");
}

/// What its owner has done to a file while no server was there: the next one starts at once, and counts what was handed out.
#[test]
fn a_successor_knows_what_was_handed_out_whatever_became_of_it() {
    for attack in ["made longer", "emptied", "leased", "made longer and leased"] {
        let place = PoolDirectory::new("succeeded");
        let Some(server) = serve(place.options(READY)) else { return };
        let mut attacker = Attacker::start(&place, attack);
        attacker.rested();
        assert_eq!(server.stop(), Ok(1));
        attacker.go_on();
        attacker.rested();
        let before = Instant::now();
        let server = serve(place.options(READY)).unwrap();
        assert!(before.elapsed() < late(), "{attack}: {:?}", before.elapsed());
        let client = Client::connect(&place.socket()).unwrap();
        assert_eq!(figure(&status(&client), "taken_bytes"), 4 * MIB, "{attack}");
        if attack == "made longer and leased" {
            // Nobody can open it before the kernel ends the lease, but it is his no longer.
            let file = std::fs::read_dir(place.mount().join("taken")).unwrap().next().unwrap().unwrap();
            wait_for(&client, "taken away", |_| is_nobodys(&file.path()));
        } else {
            all_is_counted(&place, &client, attack);
        }
        others_are_served(&client, attack);
        attacker.end();
        drop(client);
        server.stop().unwrap();
    }
}

/// What a user has made of a file that is kept locked is on that user's account, and keeps nobody else from what the pool may give.
#[test]
fn what_is_kept_locked_does_not_use_up_the_limit_of_all() {
    let place = PoolDirectory::new("limited");
    let limit = Some(READY + 2 * QUOTA);
    let Some(server) = serve(Options { limit, ..place.options(READY) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    let mut attacker = Attacker::start(&place, "made longer and kept locked");
    attacker.rested();
    wait_for(&client, "counted", |status| bytes_of(status, NOBODY) > READY + 2 * QUOTA);
    // Also what was not ready can be had by whoever was promised it.
    let other = client.take(&request(READY + QUOTA / 2, Until::Closed)).unwrap();
    assert!(other.ready < READY + QUOTA / 2);
    touch(&other.file, READY + QUOTA / 2);
    assert_eq!(code(client.take(&request(QUOTA + QUOTA / 2, Until::Closed))), Code::Limit);
    attacker.end();
    drop(other);
    drop(client);
    server.stop().unwrap();
}

/// Nor does a server that ends, or one that begins, wait for whoever keeps a file locked.
#[test]
fn servers_end_and_begin_while_a_file_is_kept_locked() {
    let place = PoolDirectory::new("locked");
    let Some(server) = serve(place.options(READY)) else { return };
    let mut attacker = Attacker::start(&place, "kept locked and released");
    attacker.rested();
    let before = Instant::now();
    assert_eq!(server.stop(), Ok(1));
    let server = serve(place.options(READY)).unwrap();
    assert!(before.elapsed() < late(), "{:?}", before.elapsed());
    let client = Client::connect(&place.socket()).unwrap();
    assert_eq!(figure(&status(&client), "taken_bytes"), 4 * MIB);
    others_are_served(&client, "kept locked");
    attacker.end();
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    drop(client);
    assert_eq!(server.stop(), Ok(0));
}

/// Users that are his in namespaces are on their owner's account.
#[test]
fn a_user_with_many_numbers_has_one_quota() {
    let place = PoolDirectory::new("numbers");
    let subordinates = Subordinates::read(&format!("{NOBODY}:70000:10"), |_| None);
    let quotas = Quotas { default: Some(QUOTA), subordinates, ..Quotas::default() };
    let Some(server) = serve(Options { quotas, ..place.options(READY) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let mut others: Vec<Attacker> =
        [NOBODY, 70_001, 70_002].iter().map(|&user| Attacker::start_as(user, &place, "take what is left")).collect();
    others.iter_mut().for_each(Attacker::rested);
    let status = status(&client);
    assert!(status.contains(&format!("{{\"user\":{NOBODY},\"taken_bytes\":{QUOTA},\"files\":2,")), "{status}");
    others.into_iter().for_each(Attacker::end);
    // Whose number is nobody's has a quota of his own.
    let mut other = Attacker::start_as(70_010, &place, "take what is left");
    other.rested();
    assert_eq!(figure(&client.status().unwrap(), "taken_bytes"), QUOTA + QUOTA / 2);
    other.end();
    drop(client);
    server.stop().unwrap();
}

#[test]
#[ignore = "the attacker of other tests"]
fn the_attacker() {
    let (Some(directory), Ok(name)) = (place_of_parent(), std::env::var("ATTACK")) else { return };
    let user = std::env::var("ATTACKER").unwrap().parse().unwrap();
    let _ = PAGE.set(page_that_never_comes());
    // SAFETY: take numbers; from here on this process is an ordinary user's.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(user, user, user), 0);
        assert_eq!(libc::setresuid(user, user, user), 0);
        // Else what is said of this process in /proc stays root's.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
    let client = Client::connect(&directory.join("socket")).unwrap();
    match ATTACKS.iter().find(|(attack, _)| *attack == name) {
        Some((_, attack)) => attack(&directory, &client),
        None => while_nobody_serves(&name, &directory, &client),
    }
}

fn take(client: &Client, size: usize) -> pagecrew::pool::Taken {
    client.take(&request(size, Until::Unused)).unwrap()
}

/// As `open`, with flags of its own.
fn open(path: impl AsRef<Path>, flags: i32) -> Result<File, Errno> {
    let path = std::ffi::CString::new(path.as_ref().to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero, and the descriptor is this function's own.
    unsafe {
        match libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) {
            -1 => Err(Errno::last()),
            descriptor => Ok(File::from(OwnedFd::from_raw_fd(descriptor))),
        }
    }
}

fn by_number(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// What somebody reserves in one call, which the kernel ends before anybody else can do anything about the file: on an emulated machine, where
/// 512 MiB take it 5 to 19 s, so much less.
fn much(mib: usize) -> usize {
    mib * MIB / patience() as usize
}

/// Between two tries of somebody who tries again and again.
fn pause() {
    std::thread::sleep(Duration::from_millis(300) * patience());
}

/// Reserves memory beyond the end of a file.
fn reserve(file: &File, offset: usize, len: usize) -> i32 {
    // SAFETY: takes no pointers.
    unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, offset as i64, len as i64) }
}

fn path_descriptor(_: &Path, client: &Client) {
    let mut kept = Vec::new();
    for _ in 0..8 {
        let taken = take(client, 8 * MIB);
        kept.push(open(&taken.path, libc::O_PATH).unwrap());
        client.release(&taken.path).unwrap();
        drop(taken);
        // Until it is no longer on the account, or never will be.
        let deadline = Instant::now() + 3 * late();
        while figure(&status(client), "taken_bytes") > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let opened: Vec<File> = kept.iter().filter_map(|file| open(by_number(file), libc::O_RDWR).ok()).collect();
    assert!(opened.is_empty(), "a released file was opened again");
    // Nor by waiting until it is thought unused.
    let taken = take(client, 8 * MIB);
    let kept = open(&taken.path, libc::O_PATH).unwrap();
    drop(taken);
    std::thread::sleep(3 * late());
    let again = open(by_number(&kept), libc::O_RDWR);
    assert!(again.is_err(), "an unused file was opened again");
    rest();
}

fn mode_changed_back(_: &Path, client: &Client) {
    for _ in 0..20 {
        let taken = take(client, 8 * MIB);
        let kept = open(&taken.path, libc::O_PATH).unwrap();
        let path = taken.path.clone();
        drop(taken);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = std::fs::set_permissions(by_number(&kept), std::fs::Permissions::from_mode(0o666));
                }
            });
            // On a slow machine, nobody has had it open for so long that it has gone by itself.
            let _ = client.release(&path);
            stop.store(true, Ordering::Relaxed);
        });
        assert!(open(by_number(&kept), libc::O_RDWR).is_err());
    }
    rest();
}

fn reserved_beyond_the_end(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    reserve(&taken.file, 8 * MIB, much(512));
    rest();
}

fn reserved_after_release(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    client.release(&taken.path).unwrap();
    for _ in 0..6 {
        reserve(&taken.file, 8 * MIB, much(256));
        pause();
    }
    rest();
}

fn made_longer(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    for _ in 0..6 {
        let _ = taken.file.set_len(much(256) as u64);
        let _ = reserve(&taken.file, 0, much(256));
        pause();
    }
    // What does it again and again loses the file.
    assert!(open(&taken.path, libc::O_RDWR).is_err() && taken.file.metadata().unwrap().len() == 0);
    rest();
}

fn written_beyond(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    for place in 0..200 {
        let _ = taken.file.write_all_at(&[1; 4096], (8 * MIB + place * 2 * MIB) as u64);
    }
    rest();
}

fn emptied_and_filled(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    taken.file.set_len(0).unwrap();
    client.release(&taken.path).unwrap();
    let other = client.take(&request(16 * MIB, Until::Unused));
    assert_eq!(code(other), Code::Quota, "what is still open was not counted");
    taken.file.set_len(8 * MIB as u64).unwrap();
    reserve(&taken.file, 0, 8 * MIB);
    rest();
}

fn another_name(directory: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    let link = |to: &Path| {
        let (from, to) = (by_number(&taken.file), to.to_str().unwrap().to_owned());
        let (from, to) = (std::ffi::CString::new(from).unwrap(), std::ffi::CString::new(to).unwrap());
        // SAFETY: both paths end with a zero.
        unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) }
    };
    for to in ["mem/taken/x", "mem/ready/x", "mem/x", "x"] {
        assert_eq!(link(&directory.join(to)), -1, "{to}");
    }
    assert_eq!(link(Path::new("/tmp/pagecrew-linked")), -1);
    rest();
}

fn names_changed(directory: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    let name = taken.path.file_name().unwrap().to_str().unwrap();
    // Another user's, and smaller.
    let other = taken.path.with_file_name(name.replace("-u65534-", "-u0-"));
    assert!(name.contains("-u65534-") && std::fs::rename(&taken.path, other).is_err());
    assert!(std::fs::remove_file(&taken.path).is_err());
    assert!(std::fs::write(directory.join("mem/taken").join(name.replace("-u65534-", "-u0-")), b"x").is_err());
    assert!(std::fs::create_dir(directory.join("mem/taken/x")).is_err());
    rest();
}

fn kept_mapped(_: &Path, client: &Client) {
    let taken = take(client, 16 * MIB);
    let _mapped = Mapped::new(&taken.file, 0, 16 * MIB).unwrap();
    client.release(&taken.path).unwrap();
    drop(taken);
    assert_eq!(code(client.take(&request(2 * MIB, Until::Unused))), Code::Quota, "what is mapped was not counted");
    rest();
}

fn opened_by_proc(_: &Path, client: &Client) {
    let taken = take(client, 16 * MIB);
    let mut child = Command::new("sleep").arg("1000").stdin(Stdio::from(taken.file)).spawn().unwrap();
    client.release(&taken.path).unwrap();
    // A descriptor that is open can be had from whoever has it, but not opened anew.
    let path = format!("/proc/{}/fd/0", child.id());
    assert!(open(&path, libc::O_RDWR).is_err());
    assert_eq!(code(client.take(&request(2 * MIB, Until::Unused))), Code::Quota);
    rest();
    child.kill().unwrap();
    child.wait().unwrap();
}

fn passed_on(_: &Path, client: &Client) {
    let taken = take(client, 16 * MIB);
    // It is another process that has it, and a connection that is still open asks for more.
    let mut child =
        Command::new("sleep").arg("1000").stdin(Stdio::from(taken.file.try_clone().unwrap())).spawn().unwrap();
    drop(taken);
    std::thread::sleep(2 * late());
    assert_eq!(code(client.take(&request(2 * MIB, Until::Unused))), Code::Quota);
    rest();
    child.kill().unwrap();
    child.wait().unwrap();
}

fn left_in_a_message(_: &Path, client: &Client) {
    let taken = take(client, 16 * MIB);
    let (one, _other) = Socket::pair().unwrap();
    one.send(b"x", Some(taken.file.as_fd())).unwrap();
    client.release(&taken.path).unwrap();
    drop(taken);
    assert_eq!(code(client.take(&request(2 * MIB, Until::Unused))), Code::Quota);
    rest();
}

fn left_with_a_ring(_: &Path, client: &Client) {
    const REGISTER_FILES: i32 = 2;
    let taken = take(client, 16 * MIB);
    let mut parameters = [0u32; 30];
    let descriptors = [taken.file.as_raw_fd()];
    // SAFETY: the parameters are as long as the kernel's, and the descriptors are one.
    let registered = unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr());
        ring >= 0 && libc::syscall(libc::SYS_io_uring_register, ring, REGISTER_FILES, descriptors.as_ptr(), 1) == 0
    };
    client.release(&taken.path).unwrap();
    drop(taken);
    if registered {
        assert_eq!(code(client.take(&request(2 * MIB, Until::Unused))), Code::Quota);
    }
    rest();
}

fn access_list(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    // The owner, user 1 and the mask may read and write.
    let entries: [(u16, u16, u32); 5] = [(1, 6, !0), (2, 6, 1), (4, 0, !0), (16, 6, !0), (32, 0, !0)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&rights.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    let name = c"system.posix_acl_access";
    // SAFETY: the name ends with a zero, and the list has its length.
    unsafe { libc::fsetxattr(taken.file.as_raw_fd(), name.as_ptr(), list.as_ptr().cast(), list.len(), 0) };
    let kept = open(&taken.path, libc::O_PATH).unwrap();
    client.release(&taken.path).unwrap();
    drop(taken);
    assert!(open(by_number(&kept), libc::O_RDWR).is_err() && open(by_number(&kept), libc::O_RDONLY).is_err());
    rest();
}

fn leases_and_locks(_: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    let descriptor = taken.file.as_raw_fd();
    let reader = open(&taken.path, libc::O_RDONLY).unwrap();
    let path = std::ffi::CString::new(taken.path.to_str().unwrap()).unwrap();
    // SAFETY: take numbers and a path that ends with a zero.
    unsafe {
        libc::fcntl(descriptor, libc::F_SETLEASE, libc::F_WRLCK);
        libc::fcntl(reader.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK);
        libc::flock(descriptor, libc::LOCK_EX);
        let watches = libc::inotify_init1(libc::IN_CLOEXEC);
        libc::inotify_add_watch(watches, path.as_ptr(), libc::IN_ALL_EVENTS);
    }
    // Others' names can't be watched.
    let parent = std::ffi::CString::new(taken.path.parent().unwrap().to_str().unwrap()).unwrap();
    // SAFETY: as above.
    let watched = unsafe { libc::inotify_add_watch(libc::inotify_init1(0), parent.as_ptr(), libc::IN_CREATE) };
    assert_eq!(watched, -1);
    client.release(&taken.path).unwrap();
    rest();
}

/// Fills the room that the file system has for names and attributes, and what there is more of it each time.
fn attributes(_: &Path, client: &Client) {
    // The kernel has bounds for neither: the test has.
    const MOST: usize = 6000;
    let taken = take(client, 2 * MIB);
    let write = |number: usize| {
        let name = format!("user.{number}");
        rustix::fs::fsetxattr(&taken.file, name, &[7; 60 << 10], rustix::fs::XattrFlags::empty())
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while number < MOST && !over.load(Ordering::Relaxed) {
                match write(number) {
                    Ok(()) => number += 1,
                    Err(rustix::io::Errno::NOSPC) => {}
                    // A kernel without them, or the file is no longer his.
                    Err(_) => break,
                }
            }
        });
        rest();
        over.store(true, Ordering::Relaxed);
    });
}

/// The address of a page that whoever reads it waits for, until this process ends. An ordinary user has such a page by a file system in user
/// space; this one was made by root, since that takes less of a test.
static PAGE: std::sync::OnceLock<usize> = std::sync::OnceLock::new();

fn page_that_never_comes() -> usize {
    const API: libc::c_ulong = 0xc018_aa3f;
    const REGISTER: libc::c_ulong = 0xc020_aa00;
    let page = pagecrew::sys::memory::map(4096, pagecrew::sys::memory::Protection::ReadWrite).unwrap();
    let (mut api, mut register) = ([0xaa_u64, 0, 0], [page as u64, 4096, 1, 0]);
    // SAFETY: takes places of the sizes that the calls want; the page is this function's own.
    unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
        assert_eq!(libc::ioctl(descriptor, API, api.as_mut_ptr()), 0);
        assert_eq!(libc::ioctl(descriptor, REGISTER, register.as_mut_ptr()), 0);
    }
    page
}

/// Has a thread keep a file locked: a write holds the lock while it waits for its source.
fn keep_locked(file: &File) {
    let (file, page) = (file.try_clone().unwrap(), PAGE.get().unwrap());
    let locked = || {
        let of_tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let waiting = |task: &Path| std::fs::read_to_string(task.join("syscall")).unwrap_or_default();
        of_tasks.filter(|task| waiting(&task.path()).starts_with(&format!("{} ", libc::SYS_pwrite64))).count()
    };
    let before = locked();
    std::thread::spawn(move || {
        // SAFETY: the page is mapped for good, and nobody ever writes to it.
        let source = unsafe { std::slice::from_raw_parts(*page as *const u8, 4096) };
        let _ = file.write_at(source, 0);
    });
    let deadline = Instant::now() + 20 * late();
    while locked() <= before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Asks for a release, by a connection of its own, and does not wait for the answer: it comes when that is done.
fn release_unanswered(directory: &Path, path: &Path) -> Socket {
    let socket = Socket::connect(&directory.join("socket")).unwrap();
    socket.send(format!("release path={}", path.display()).as_bytes(), None).unwrap();
    socket
}

fn kept_locked(directory: &Path, client: &Client) {
    // Each by a connection of its own.
    let files: Vec<_> = (0..3).map(|_| take(client, 4 * MIB)).collect();
    files.iter().for_each(|taken| keep_locked(&taken.file));
    let asked: Vec<Socket> = files.iter().map(|taken| release_unanswered(directory, &taken.path)).collect();
    std::thread::sleep(Duration::from_millis(100));
    // On his account as long as he has them.
    assert_eq!(code(client.take(&request(8 * MIB, Until::Unused))), Code::Quota);
    // One that he leaves with the connection that it was to stay for, and has made longer before.
    let other = Client::connect(&directory.join("socket")).unwrap();
    let taken = other.take(&request(2 * MIB, Until::Closed)).unwrap();
    taken.file.set_len(64 * MIB as u64).unwrap();
    keep_locked(&taken.file);
    drop(other);
    // And one that he goes on making longer behind them, until it is taken from him.
    let grown = take(client, 2 * MIB);
    for _ in 0..6 {
        let _ = reserve(&grown.file, 0, much(256));
        pause();
    }
    assert!(open(&grown.path, libc::O_RDWR).is_err() && grown.file.metadata().unwrap().len() == 0);
    rest();
    drop(asked);
}

fn directory_lock(directory: &Path, _: &Client) {
    assert!(open(directory.join("lock"), libc::O_RDONLY).is_err());
    rest();
}

fn waiting_files(directory: &Path, _: &Client) {
    for place in ["ready", "taken"] {
        assert!(std::fs::read_dir(directory.join("mem").join(place)).is_err(), "{place}");
    }
    assert!(open(directory.join("mem"), libc::O_TMPFILE | libc::O_RDWR).is_err());
    assert!(open(directory.join("mem/taken"), libc::O_TMPFILE | libc::O_RDWR).is_err());
    rest();
}

fn connections(directory: &Path, _: &Client) {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: takes a valid place.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    let sockets: Vec<Socket> = (0..3000).map_while(|_| Socket::connect(&directory.join("socket")).ok()).collect();
    for socket in &sockets {
        let _ = socket.send(b"status", None);
    }
    rest();
}

fn unread_answers(directory: &Path, _: &Client) {
    let sockets: Vec<Socket> = (0..50).map_while(|_| Socket::connect(&directory.join("socket")).ok()).collect();
    for socket in &sockets {
        (0..1000).map_while(|_| socket.send(b"status", None).ok()).count();
    }
    rest();
}

/// What nobody reads is memory of the server's.
fn left_with_answers(directory: &Path, _: &Client) {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: takes a valid place.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    let connect = || Socket::connect(&directory.join("socket"));
    // Each asks, and says that it has no more to ask, and so is ended by the server.
    let left: Vec<Socket> = std::iter::repeat_with(|| {
        let socket = connect().unwrap();
        let asked = socket.send(b"status", None).is_ok();
        rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).unwrap();
        asked.then_some(socket)
    })
    .take(2000)
    .flatten()
    .collect();
    let answered = |socket: &Socket| {
        let mut room = vec![0; 65536];
        let len = socket.receive(&mut room).map_or(0, |packet| packet.len);
        String::from_utf8_lossy(&room[..len]).contains("\"version\"")
    };
    let ask = || {
        let socket = connect().unwrap();
        socket.send(b"status", None).is_ok() && answered(&socket)
    };
    let deadline = Instant::now() + 20 * late();
    while ask() {
        assert!(Instant::now() < deadline, "{} have something to read, and more are answered", left.len());
        std::thread::sleep(Duration::from_millis(50));
    }
    let count = left.iter().filter(|socket| answered(socket)).count();
    assert!(count < 1200, "{count} were answered");
    // All is read, which is seen a moment later.
    drop(left);
    let deadline = Instant::now() + late();
    while !ask() {
        assert!(Instant::now() < deadline, "nobody is answered any more");
        std::thread::sleep(Duration::from_millis(10));
    }
    rest();
}

fn descriptors_sent(directory: &Path, client: &Client) {
    let connect = || Socket::connect(&directory.join("socket")).unwrap();
    // Whoever sends one is told that nobody takes it (6.16), or is not heard any more.
    let refused =
        |socket: &Socket, request: &str, file: &dyn AsFd| match socket.send(request.as_bytes(), Some(file.as_fd())) {
            Err(error) => error == Errno(libc::EPERM),
            Ok(()) => socket.receive(&mut [0; 65536]).map_or(true, |answer| answer.len == 0),
        };
    let (mut reader, writer) = std::io::pipe().unwrap();
    assert!(refused(&connect(), "status", &writer));
    drop(writer);
    // The server has closed it, or never had it: the pipe's end is seen.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    let taken = take(client, 16 * MIB);
    assert!(refused(&connect(), &format!("release path={}", taken.path.display()), &taken.file));
    client.release(&taken.path).unwrap();
    drop(taken);
    let deadline = Instant::now() + 3 * late();
    while figure(&status(client), "taken_bytes") > 0 {
        assert!(Instant::now() < deadline, "the server has a descriptor that was sent to it");
        std::thread::sleep(Duration::from_millis(10));
    }
    rest();
}

/// A socket of which the last one who closes it waits for as long as nobody reads at the other end.
fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let unread = listener.accept().unwrap().0;
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 1 << 16]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 1000 };
    let (level, option) = (libc::SOL_SOCKET, libc::SO_LINGER);
    // SAFETY: the option's value is valid and of the length that is said.
    let result = unsafe {
        libc::setsockopt(sender.as_raw_fd(), level, option, (&raw const linger).cast(), size_of_val(&linger) as u32)
    };
    assert_eq!(result, 0);
    (sender, unread)
}

fn slow_descriptors_sent(directory: &Path, _: &Client) {
    let mut unread = Vec::new();
    // More than there are workers, and more than there may be connections: some with a request, and some that go at once.
    let mut sockets = Vec::new();
    for number in 0..100 {
        let Ok(socket) = Socket::connect(&directory.join("socket")) else { break };
        let (slow, reader) = lingering();
        let _ = socket.send(b"status", Some(slow.as_fd()));
        // Should it be the last one who does that, nobody else waits for it here either.
        std::thread::spawn(move || drop(slow));
        unread.push(reader);
        if number % 2 == 0 {
            sockets.push(socket);
        }
    }
    // Whoever closes what this account has sent waits by now. More than all users together may have connections, where there are few descriptors.
    let (_reader, writer) = std::io::pipe().unwrap();
    for _ in 0..2000 {
        let Ok(socket) = Socket::connect(&directory.join("socket")) else { break };
        let _ = socket.send(b"status", Some(writer.as_fd()));
    }
    rest();
}

fn odd_paths(directory: &Path, client: &Client) {
    let taken = take(client, 8 * MIB);
    let name = taken.path.file_name().unwrap().to_str().unwrap();
    for path in ["mem/ready/../taken/", "mem/taken/../taken/", "mem/taken/x/../"] {
        let path = PathBuf::from(format!("{}/{path}{name}", directory.display()));
        assert!(client.release(&path).is_err(), "{}", path.display());
    }
    for path in ["", "/", "mem/taken", "mem/taken/", "mem/taken/..", "lock", "socket"] {
        assert!(client.release(&directory.join(path)).is_err(), "{path}");
    }
    rest();
}

/// Writes to each page of a file that nobody makes shorter.
fn touch(file: &File, len: usize) {
    let mapped = Mapped::new(file, 0, len).unwrap();
    let start = mapped.range().start;
    // SAFETY: mapped until this function returns.
    (0..len).step_by(4096).for_each(|offset| unsafe { ((start + offset) as *mut u8).write(1) });
}

/// Makes a file longer, keeps it locked before it is put back, and uses all of it.
fn longer_and_locked(client: &Client) {
    // Several times what the pool may give.
    const LEN: usize = 256 * MIB;
    for _ in 0..5 {
        let taken = take(client, 4 * MIB);
        taken.file.set_len(LEN as u64).unwrap();
        keep_locked(&taken.file);
        if taken.file.metadata().unwrap().len() == LEN as u64 {
            touch(&taken.file, LEN);
            return rest();
        }
    }
    panic!("the file was put back before it was locked, each time");
}

/// Takes a little and gives it back, all the time, until it is to end. Never to be refused.
fn take_and_give_back(client: &Client) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            rest();
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            let taken = client.take(&request(4 * MIB, Until::Unused)).unwrap();
            client.release(&taken.path).unwrap();
            drop(taken);
            // No more than a user may have at once, however long it takes until the kernel has it back.
            std::thread::sleep(Duration::from_millis(100) * patience());
        }
    });
}

/// What is done to a file of 4 MiB between two servers.
fn while_nobody_serves(attack: &str, directory: &Path, client: &Client) {
    if attack == "take what is left" {
        let taken = client.take(&request(QUOTA / 2, Until::Unused));
        assert!(taken.is_ok() || code(taken) == Code::Quota);
        return rest();
    }
    if attack == "take and give back" {
        return take_and_give_back(client);
    }
    if attack == "made longer and kept locked" {
        return longer_and_locked(client);
    }
    let taken = take(client, 4 * MIB);
    if attack == "kept locked and released" {
        keep_locked(&taken.file);
        let _asked = release_unanswered(directory, &taken.path);
        std::thread::sleep(Duration::from_millis(100));
        return rest();
    }
    rest();
    if attack.starts_with("made longer") {
        taken.file.set_len(64 * MIB as u64).unwrap();
        reserve(&taken.file, 0, 64 * MIB);
    }
    match attack {
        "made longer" => {}
        "emptied" => taken.file.set_len(0).unwrap(),
        "leased" | "made longer and leased" => {
            let descriptor = taken.file.as_raw_fd();
            // SAFETY: takes no pointers.
            let leased = unsafe { libc::fcntl(descriptor, libc::F_SETLEASE, libc::F_WRLCK) };
            // Whoever wants to open it is signalled to us.
            // SAFETY: as above.
            unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
            assert_eq!(leased, 0);
        }
        other => panic!("there is no attack called {other}"),
    }
    rest();
}
