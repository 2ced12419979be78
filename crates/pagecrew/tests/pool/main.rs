//! A pool as its clients see it: real mounts, real processes, real users. As root; without the right to mount, each test says so and ends.

mod attacks;

use pagecrew::pool::{
    Backing, Client, Code, Error, Options, Quotas, Request, Server, Sizes, Subordinates, Tell, Until,
};
use pagecrew::sys::Errno;
use pagecrew::sys::seqpacket::Socket;
use pagecrew::sys::shared_file::{Mapped, backed_bytes};
use pagecrew::sys::topology;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const NOBODY: u32 = 65534;

/// The filler of the pools here: this very binary, with this one test.
#[test]
#[ignore = "the filler process of the other tests"]
fn the_filler() {
    // SAFETY: where this test is started as a filler, descriptor 0 is the server's socket, and nothing else here reads it.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    match pagecrew::pool::fill(socket) {
        // Started by somebody who runs all tests there are.
        Err(Errno(libc::ENOTSOCK)) => {}
        result => result.unwrap(),
    }
}

/// A command that runs one of the ignored tests of this file.
fn this_test(name: &str) -> Vec<OsString> {
    let program = std::env::current_exe().unwrap();
    [program.as_os_str().to_owned(), "--ignored".into(), "--exact".into(), name.into(), "--nocapture".into()].into()
}

/// Whether a file was taken from its owner, and nobody else may open it.
fn is_nobodys(path: &Path) -> bool {
    let facts = std::fs::metadata(path).unwrap();
    (facts.uid(), facts.mode() & 0o7777) == (0, 0)
}

/// A directory of a pool, cleared away at the end.
struct PoolDirectory(PathBuf);

impl PoolDirectory {
    fn new(name: &str) -> PoolDirectory {
        // Where other users may come, too.
        let path = PathBuf::from(format!("/tmp/pagecrew-pool-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        PoolDirectory(path)
    }

    fn mount(&self) -> PathBuf {
        self.0.join("mem")
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }

    fn options(&self, size: usize) -> Options {
        Options {
            directory: self.0.clone(),
            socket: self.socket(),
            socket_mode: 0o666,
            backing: Backing::Tmpfs,
            // All of it on one node, however many there are.
            sizes: Sizes::Nodes([(topology::nodes_with_memory()[0], size)].into()),
            cpu: 4.0,
            floor: Some(0),
            limit: Some(4096 * MIB),
            unused: Duration::from_secs(60),
            filler: this_test("the_filler"),
            ..Options::default()
        }
    }

    /// What is mounted in this directory.
    fn mounts(&self) -> usize {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().filter(|line| line.contains(self.0.to_str().unwrap())).count()
    }

    fn files(&self) -> usize {
        let count = |name: &str| std::fs::read_dir(self.mount().join(name)).map_or(0, |entries| entries.count());
        count("ready") + count("taken")
    }
}

impl Drop for PoolDirectory {
    fn drop(&mut self) {
        while Command::new("umount")
            .args(["-l".as_ref(), self.mount().as_os_str()])
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
        {}
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Says nothing.
const QUIET: Tell = Tell { log: |_| {}, standing: |_| {} };

/// Starts a server, or says why there can't be one.
fn serve(options: Options) -> Option<Server> {
    match Server::start(options, QUIET) {
        Ok(server) => Some(server),
        Err(error) if error.is_impossible() => {
            eprintln!("left out: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn status(client: &Client) -> String {
    client.status().unwrap()
}

/// A number of the status.
fn figure(status: &str, name: &str) -> usize {
    let place =
        status.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {status}")) + name.len() + 3;
    status[place..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

fn wait_for(client: &Client, what: &str, is: impl Fn(&str) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is(&status(client)) {
        assert!(Instant::now() < deadline, "never {what}: {}", status(client));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn wait_until_full(client: &Client) {
    wait_for(client, "full", |status| status.contains("\"state\":\"full\"") && figure(status, "filling_bytes") == 0);
}

fn request(size: usize, until: Until) -> Request {
    Request { size, node: None, until }
}

fn is_zero(file: &File, size: usize) -> bool {
    let mut room = vec![1; 2 * MIB];
    (0..size).step_by(room.len()).all(|offset| {
        file.read_exact_at(&mut room, offset as u64).unwrap();
        room.iter().all(|&byte| byte == 0)
    })
}

fn code(result: Result<impl std::fmt::Debug, Error>) -> Code {
    match result {
        Err(Error::Refused { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_taken_is_ready_zero_huge_and_ones_own() {
    let place = PoolDirectory::new("take");
    let Some(server) = serve(place.options(64 * MIB)) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    let taken = client.take(&request(32 * MIB, Until::Unused)).unwrap();
    assert_eq!((taken.size, taken.ready, taken.backing), (32 * MIB, 32 * MIB, Backing::Tmpfs));
    assert!(is_zero(&taken.file, taken.size));
    assert_eq!(backed_bytes(&taken.file), Ok(32 * MIB));
    let facts = std::fs::metadata(&taken.path).unwrap();
    assert_eq!((facts.mode() & 0o7777, facts.len() as usize), (0o600, 32 * MIB));
    let mapped = Mapped::new(&taken.file, 0, taken.size).unwrap();
    // SAFETY: mapped read-write as long as `mapped` lives.
    (0..taken.size).step_by(4096).for_each(|offset| unsafe { ((mapped.range().start + offset) as *mut u8).write(1) });
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let of = smaps.split("/mem/taken/").nth(1).unwrap();
    let huge = of.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
    assert_eq!(huge.trim(), "32768 kB");
    wait_until_full(&client);
    let now = status(&client);
    assert_eq!(
        (figure(&now, "ready_bytes"), figure(&now, "taken_bytes"), figure(&now, "takes")),
        (64 * MIB, 32 * MIB, 1)
    );
    assert_eq!(client.release(&taken.path), Ok(32 * MIB));
    assert!(is_nobodys(&taken.path));
    // As long as somebody has it, it is taken.
    assert_eq!(figure(&status(&client), "taken_bytes"), 32 * MIB);
    drop((mapped, taken));
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    drop(client);
    assert_eq!(server.stop(), Ok(0));
    assert_eq!((place.mounts(), place.files()), (0, 0));
}

#[test]
fn what_is_not_ready_is_zeroed_on_the_spot() {
    let place = PoolDirectory::new("more");
    let Some(server) = serve(place.options(16 * MIB)) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    for (size, least) in [(64 * MIB, 8 * MIB), (2 * MIB, 0), (6 * MIB, 0)] {
        let taken = client.take(&request(size, Until::Closed)).unwrap();
        assert!(taken.ready >= least && taken.ready <= size, "{} of {size}", taken.ready);
        assert_eq!((backed_bytes(&taken.file), taken.file.metadata().unwrap().len() as usize), (Ok(size), size));
        assert!(is_zero(&taken.file, size));
    }
    drop(client);
    let client = Client::connect(&place.socket()).unwrap();
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    // What was asked for is what waits from now on.
    client.take(&request(6 * MIB, Until::Closed)).unwrap();
    wait_until_full(&client);
    let again = client.take(&request(6 * MIB, Until::Closed)).unwrap();
    assert_eq!(again.ready, 6 * MIB);
    drop((client, again));
    server.stop().unwrap();
}

#[test]
fn nobody_sees_what_another_wrote() {
    let place = PoolDirectory::new("secret");
    let Some(server) = serve(Options { files: vec![(4 * MIB, 4)], ..place.options(16 * MIB) }) else { return };
    let mut seen = BTreeSet::new();
    for round in 0..100 {
        let client = Client::connect(&place.socket()).unwrap();
        let size = [2, 4, 6, 10][round % 4] * MIB;
        let taken = client.take(&request(size, Until::Closed)).unwrap();
        assert!(is_zero(&taken.file, size), "round {round}");
        assert!(seen.insert((taken.file.metadata().unwrap().ino(), taken.path.clone())), "a file came back");
        taken.file.write_all_at(&vec![0xa5; size], 0).unwrap();
    }
    server.stop().unwrap();
}

#[test]
fn a_file_stays_while_somebody_has_it() {
    let place = PoolDirectory::new("unused");
    let Some(server) = serve(Options { unused: Duration::from_millis(1500), ..place.options(8 * MIB) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let taken = client.take(&request(2 * MIB, Until::Unused)).unwrap();
    let mapped = Mapped::new(&taken.file, 0, 2 * MIB).unwrap();
    let path = taken.path.clone();
    drop(taken);
    std::thread::sleep(Duration::from_secs(4));
    assert!(path.exists(), "taken away from whoever has it mapped");
    drop(mapped);
    wait_for(&client, "gone", |status| figure(status, "taken_bytes") == 0);
    assert!(!path.exists());
    assert_eq!(code(client.release(&path)), Code::NotFound);
    drop(client);
    server.stop().unwrap();
}

#[test]
fn a_server_that_stops_takes_nothing_from_those_who_have_it() {
    let place = PoolDirectory::new("stop");
    let Some(server) = serve(place.options(8 * MIB)) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let used = client.take(&request(2 * MIB, Until::Unused)).unwrap();
    let promised = client.take(&request(2 * MIB, Until::Unused)).unwrap().path;
    used.file.write_all_at(b"mine", 0).unwrap();
    let released = client.take(&request(2 * MIB, Until::Unused)).unwrap();
    client.release(&released.path).unwrap();
    // Whoever was told of it may be about to open it.
    let tied = client.take(&request(2 * MIB, Until::Closed)).unwrap().path;
    assert_eq!(server.stop(), Ok(4));
    let mut text = [0; 4];
    used.file.read_exact_at(&mut text, 0).unwrap();
    assert_eq!((&text, used.path.exists(), promised.exists()), (b"mine", true, true));
    assert!(tied.exists() && is_nobodys(&released.path));
    assert!(matches!(client.status(), Err(Error::NotServed(_))));
    assert!(matches!(Client::connect(&place.socket()), Err(Error::NotServed(_))));
    // The next one takes over, and clients go on with it.
    let server = serve(place.options(8 * MIB)).unwrap();
    assert_eq!(figure(&status(&client), "taken_bytes"), 8 * MIB);
    assert_eq!((place.mounts(), client.release(&promised)), (1, Ok(2 * MIB)));
    assert_eq!((client.release(&used.path), client.release(&tied)), (Ok(2 * MIB), Ok(2 * MIB)));
    // What somebody has open is counted as long as he has, and no longer.
    assert_eq!(figure(&status(&client), "taken_bytes"), 4 * MIB);
    drop((used, released));
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    drop(client);
    assert_eq!(server.stop(), Ok(0));
    assert_eq!(place.mounts(), 0);
}

#[test]
fn one_directory_has_one_server() {
    let place = PoolDirectory::new("two");
    let Some(server) = serve(place.options(2 * MIB)) else { return };
    let own = std::process::id();
    match Server::start(place.options(2 * MIB), QUIET) {
        Err(Error::Served { pid, .. }) => assert_eq!(pid, Some(own)),
        other => panic!("{:?}", other.map(drop)),
    }
    // The first one doesn't notice.
    assert!(Client::connect(&place.socket()).is_ok());
    // Beside it, another pool is nothing special.
    let other = PoolDirectory::new("two-other");
    serve(other.options(2 * MIB)).unwrap().stop().unwrap();
    server.stop().unwrap();
}

/// A hundred clients that all want a file that is ready, at the same moment, and leave when they have it.
#[test]
fn a_hundred_clients_at_once_wait_little() {
    const CLIENTS: usize = 100;
    let place = PoolDirectory::new("crowd");
    let size = CLIENTS * 2 * MIB;
    let Some(server) = serve(Options { files: vec![(2 * MIB, CLIENTS)], ..place.options(size) }) else { return };
    let first = Client::connect(&place.socket()).unwrap();
    wait_until_full(&first);
    let barrier = std::sync::Barrier::new(CLIENTS);
    // What all but one of a hundred have waited at most, and how many had it ready.
    let round = || -> (Duration, usize) {
        let mut times: Vec<(Duration, usize)> = std::thread::scope(|scope| {
            let client = || {
                let client = Client::connect(&place.socket()).unwrap();
                barrier.wait();
                let begin = Instant::now();
                let taken = client.take(&request(2 * MIB, Until::Closed)).unwrap();
                let time = begin.elapsed();
                drop(client);
                // Threads of one process that end hold each other up for longer than a pool does.
                barrier.wait();
                (time, taken.ready)
            };
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        times.sort_unstable();
        let ready = times.iter().filter(|(_, ready)| *ready == 2 * MIB).count();
        println!("median {:?}, 99 % within {:?}, {ready} were ready", times[CLIENTS / 2].0, times[CLIENTS - 2].0);
        (times[CLIENTS - 2].0, ready)
    };
    let is_good =
        |(slowest, ready): (Duration, usize)| slowest <= Duration::from_millis(10) && ready > CLIENTS * 9 / 10;
    // Others use this machine as well: one time in a few has to be good.
    let mut good = false;
    for _ in 0..5 {
        wait_until_full(&first);
        good = is_good(round());
        if good {
            break;
        }
    }
    assert!(good, "it never took as little as it is to");
    drop(first);
    server.stop().unwrap();
}

/// One that is ready, from the request to the open file.
#[test]
fn what_is_ready_is_taken_within_a_millisecond() {
    let place = PoolDirectory::new("quick");
    let Some(server) = serve(Options { files: vec![(64 * MIB, 1)], ..place.options(64 * MIB) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            wait_until_full(&client);
            let begin = Instant::now();
            let taken = client.take(&request(64 * MIB, Until::Closed)).unwrap();
            let time = begin.elapsed();
            assert_eq!(taken.ready, 64 * MIB);
            client.release(&taken.path).unwrap();
            time
        })
        .collect();
    times.sort_unstable();
    println!("median {:?}, longest {:?}", times[10], times[20]);
    assert!(times[10] <= Duration::from_millis(1) * patience(), "{times:?}");
    drop(client);
    server.stop().unwrap();
}

/// How much longer than elsewhere things may take on this machine.
fn patience() -> u32 {
    std::env::var("patience").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Runs one of the ignored tests as another user, with what it needs to know.
fn as_user(user: u32, test: &str, place: &PoolDirectory) -> Child {
    let command = this_test(test);
    Command::new(&command[0])
        .args(&command[1..])
        .env("POOL", &place.0)
        .uid(user)
        .gid(user)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The place of the test that has started this one; none where somebody runs all tests there are.
fn place_of_parent() -> Option<PathBuf> {
    std::env::var_os("POOL").map(PathBuf::from)
}

/// A test binary in a directory that others may not enter can't be run by them.
fn others_can_run_this() -> bool {
    let program = std::env::current_exe().unwrap();
    program
        .ancestors()
        .skip(1)
        .all(|directory| std::fs::metadata(directory).is_ok_and(|facts| facts.mode() & 0o005 == 0o005))
}

#[test]
fn another_user_gets_what_is_his_and_no_more() {
    let place = PoolDirectory::new("user");
    let quotas = Quotas { default: Some(8 * MIB), ..Quotas::default() };
    let Some(server) = serve(Options { quotas, ..place.options(16 * MIB) }) else { return };
    if !others_can_run_this() {
        eprintln!("left out: other users can't run this test");
        return;
    }
    let client = Client::connect(&place.socket()).unwrap();
    let roots = client.take(&request(2 * MIB, Until::Closed)).unwrap();
    std::fs::write(place.0.join("roots"), roots.path.to_str().unwrap()).unwrap();
    assert!(as_user(NOBODY, "the_other_user", &place).wait().unwrap().success());
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 2 * MIB);
    assert!(roots.path.exists());
    drop((client, roots));
    server.stop().unwrap();
}

#[test]
#[ignore = "the other user of a test"]
fn the_other_user() {
    let Some(directory) = place_of_parent() else { return };
    let roots = PathBuf::from(std::fs::read_to_string(directory.join("roots")).unwrap());
    let client = Client::connect(&directory.join("socket")).unwrap();
    let taken = client.take(&request(4 * MIB, Until::Unused)).unwrap();
    let facts = std::fs::metadata(&taken.path).unwrap();
    assert_eq!((facts.uid(), facts.gid(), facts.mode() & 0o7777), (NOBODY, NOBODY, 0o600));
    // By its path, as a virtual machine opens it.
    let mut again = File::options().read(true).write(true).open(&taken.path).unwrap();
    std::io::Write::write_all(&mut again, b"x").unwrap();
    // What is another's stays closed, and so does what waits.
    assert!(File::open(&roots).is_err());
    assert!(std::fs::read_dir(directory.join("mem/ready")).is_err());
    assert!(std::fs::read_dir(directory.join("mem/taken")).is_err());
    assert!(std::fs::remove_file(&taken.path).is_err());
    assert_eq!(code(client.release(&roots)), Code::Denied);
    assert_eq!(code(client.resize(1 << 30, None)), Code::Denied);
    // Of who has what, one sees one's own.
    let status = status(&client);
    assert!(status.contains(taken.path.file_name().unwrap().to_str().unwrap()), "{status}");
    assert!(!status.contains("\"user\":0,"), "{status}");
    // More than the quota isn't had by asking twice, nor by giving back what one still has.
    assert_eq!(code(client.take(&request(6 * MIB, Until::Unused))), Code::Quota);
    client.release(&taken.path).unwrap();
    assert_eq!(code(client.take(&request(6 * MIB, Until::Unused))), Code::Quota);
    drop((taken, again));
    let deadline = Instant::now() + Duration::from_secs(20);
    while client.take(&request(6 * MIB, Until::Closed)).is_err() {
        assert!(Instant::now() < deadline, "what was given back stays on the account");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(code(client.take(&request(4 * MIB, Until::Closed))), Code::Quota);
}

#[test]
fn a_file_that_nobody_handed_out_goes_when_nobody_has_it() {
    let place = PoolDirectory::new("stray");
    let Some(server) = serve(Options { unused: Duration::ZERO, ..place.options(8 * MIB) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let path = client.take(&request(2 * MIB, Until::Closed)).unwrap().path;
    client.release(&path).unwrap();
    assert!(!path.exists());
    // As a machine of root's does it that was told the name of a file which is gone.
    let stray = File::create_new(&path).unwrap();
    stray.set_len(4 * MIB as u64).unwrap();
    wait_for(&client, "found", |status| figure(status, "taken_bytes") == 4 * MIB);
    drop(stray);
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    assert!(!path.exists());
    drop(client);
    server.stop().unwrap();
}

#[test]
fn clients_that_crash_leave_nothing() {
    let place = PoolDirectory::new("crash");
    let Some(server) = serve(place.options(8 * MIB)) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    let mut others = Vec::new();
    for round in 0..40 {
        let mut other = as_user(0, "a_client_that_is_killed", &place);
        if round % 2 == 0 {
            // At any moment, also before it has connected.
            std::thread::sleep(Duration::from_millis(round));
            other.kill().unwrap();
            other.wait().unwrap();
        } else {
            others.push(other);
        }
    }
    wait_for(&client, "taken", |status| figure(status, "taken_bytes") > 0);
    for mut other in others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    wait_until_full(&client);
    let files = std::fs::read_dir(place.mount().join("taken")).unwrap().count();
    assert_eq!(files, 0);
    drop(client);
    server.stop().unwrap();
}

#[test]
#[ignore = "a client of another test"]
fn a_client_that_is_killed() {
    let Some(directory) = place_of_parent() else { return };
    let client = Client::connect(&directory.join("socket")).unwrap();
    let _taken = client.take(&request(2 * MIB, Until::Closed)).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn nonsense_is_answered_and_holds_nobody_up() {
    let place = PoolDirectory::new("nonsense");
    let Some(server) = serve(place.options(8 * MIB)) else { return };
    let mut state = 7u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let words: [&[u8]; 12] = [
        b"take",
        b"release",
        b"resize",
        b"status",
        b" size=",
        b" node=",
        b" until=closed",
        b" path=/",
        b"2097152",
        b"\0",
        b"\xff",
        b"=",
    ];
    for round in 0..300 {
        let socket = Socket::connect(&place.socket()).unwrap();
        let mut packet = Vec::new();
        for _ in 0..1 + random() % 6 {
            match random() % 4 {
                0 => packet.extend((0..random() % 40).map(|_| random() as u8)),
                _ => packet.extend_from_slice(words[random() % words.len()]),
            }
        }
        if round % 50 == 0 {
            packet.resize(5000, b'x');
        }
        let file = File::open("/dev/null").unwrap();
        let brings = round % 3 == 0;
        if packet.is_empty() || socket.send(&packet, brings.then(|| file.as_fd())).is_err() {
            continue;
        }
        // Some don't wait for the answer.
        if round % 4 > 0 {
            let mut room = vec![0; 65536];
            match socket.receive(&mut room) {
                // Whoever sends descriptors (before 6.16) gets none, and may be off before he has read that.
                Ok(answer) => assert!(answer.len > 0 || brings, "no answer to {packet:?}"),
                Err(Errno(libc::ECONNRESET)) if brings => {}
                Err(errno) => panic!("{errno} instead of an answer to {packet:?}"),
            }
        }
    }
    // One asks and asks and never reads.
    let rude = Socket::connect(&place.socket()).unwrap();
    while rude.send(b"status", None).is_ok() {}
    let client = Client::connect(&place.socket()).unwrap();
    let begin = Instant::now();
    client.take(&request(2 * MIB, Until::Closed)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5));
    drop((client, rude));
    let client = Client::connect(&place.socket()).unwrap();
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") <= 8 * MIB);
    for (size, wanted) in [(0, 0), (MIB, 0), (usize::MAX & !(2 * MIB - 1), 1), (1 << 46, 1)] {
        match client.take(&request(size, Until::Closed)) {
            Err(Error::Size(_)) if wanted == 0 => {}
            Err(Error::Refused { code: Code::Limit, .. }) if wanted == 1 => {}
            other => panic!("{size}: {other:?}"),
        }
    }
    let far = Request { size: 2 * MIB, node: Some(63), until: Until::Closed };
    assert_eq!(code(client.take(&far)), Code::BadRequest);
    drop(client);
    server.stop().unwrap();
}

#[test]
fn the_limit_holds_and_what_waits_makes_room() {
    let place = PoolDirectory::new("limit");
    let Some(server) = serve(Options { limit: Some(32 * MIB), ..place.options(24 * MIB) }) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    // 24 wait, so that what is taken takes of that.
    let taken = client.take(&request(28 * MIB, Until::Closed)).unwrap();
    assert_eq!(backed_bytes(&taken.file), Ok(28 * MIB));
    assert_eq!(code(client.take(&request(6 * MIB, Until::Closed))), Code::Limit);
    // Filling finds the mount full, says so and goes on later.
    wait_for(&client, "waiting", |status| status.contains("\"state\":\"waiting: no more memory"));
    let small = client.take(&request(2 * MIB, Until::Closed)).unwrap();
    assert!(is_zero(&small.file, 2 * MIB));
    drop((client, taken, small));
    let client = Client::connect(&place.socket()).unwrap();
    wait_until_full(&client);
    drop(client);
    server.stop().unwrap();
}

#[test]
fn what_a_taker_was_promised_nothing_else_gets() {
    let place = PoolDirectory::new("promised");
    let Some(server) = serve(Options { limit: Some(32 * MIB), cpu: 1.0, ..place.options(24 * MIB) }) else { return };
    // Two who together have just what there may be, and a filler that would like to have it.
    let taker = || {
        let client = Client::connect(&place.socket()).unwrap();
        let mut taken = 0;
        while taken < 60 {
            match client.take(&request(16 * MIB, Until::Closed)) {
                Ok(file) => {
                    assert_eq!(backed_bytes(&file.file), Ok(16 * MIB));
                    let path = file.path.clone();
                    drop(file);
                    client.release(&path).unwrap();
                    taken += 1;
                }
                // What the filler is at while it is released goes a little later.
                Err(Error::Refused { code: Code::Limit, .. }) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => panic!("after {taken}: {error}"),
            }
        }
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|_| drop(scope.spawn(taker)));
    });
    server.stop().unwrap();
}

#[test]
fn free_memory_at_the_floor_is_left_alone_and_given_back() {
    let place = PoolDirectory::new("floor");
    let high = Options { floor: Some(1 << 45), ..place.options(64 * MIB) };
    let Some(server) = serve(high.clone()) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    wait_for(&client, "waiting", |status| status.contains("\"state\":\"waiting: free memory"));
    assert_eq!(figure(&status(&client), "ready_bytes"), 0);
    // Nor is it zeroed on the spot, unless the operator says so.
    assert_eq!(code(client.take(&request(2 * MIB, Until::Closed))), Code::NoMemory);
    server.reconfigure(&Options { below_floor: true, ..high.clone() }).unwrap();
    let taken = client.take(&request(2 * MIB, Until::Closed)).unwrap();
    client.release(&taken.path).unwrap();
    drop(taken);
    server.reconfigure(&place.options(64 * MIB)).unwrap();
    wait_until_full(&client);
    server.reconfigure(&high).unwrap();
    // Files leave the stock first, and count as given back once they are gone.
    let all_went = |status: &str| figure(status, "ready_bytes") == 0 && figure(status, "given_back_bytes") == 64 * MIB;
    wait_for(&client, "given back", all_went);
    drop(client);
    server.stop().unwrap();
}

#[test]
fn the_size_changes_while_it_is_served() {
    let place = PoolDirectory::new("resize");
    let Some(server) = serve(place.options(16 * MIB)) else { return };
    let client = Client::connect(&place.socket()).unwrap();
    for size in [64 * MIB, 0, 8 * MIB, 2 * MIB] {
        assert_eq!(client.resize(size, None), Ok(size));
        wait_for(&client, "resized", |status| {
            figure(status, "ready_bytes") == size && status.contains("\"state\":\"full\"")
        });
        // What is off the books goes a moment later.
        let used = || -> usize {
            let files = std::fs::read_dir(place.mount().join("ready")).unwrap();
            files.filter_map(|file| Some(file.unwrap().metadata().ok()?.blocks() as usize * 512)).sum()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        while used() != size {
            assert!(Instant::now() < deadline, "{} of {size} in use", used());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert!(matches!(client.resize(MIB, None), Err(Error::Size(_))));
    assert_eq!(code(client.resize(2 * MIB, Some(40))), Code::BadRequest);
    drop(client);
    server.stop().unwrap();
}

#[test]
fn reserved_pages_that_are_missing_are_named() {
    let place = PoolDirectory::new("reserved");
    let reserved = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    if reserved.is_ok_and(|text| text.trim() != "0") {
        eprintln!("left out: this machine has reserved huge pages");
        return;
    }
    match Server::start(Options { backing: Backing::Hugetlbfs, ..place.options(2 * MIB) }, QUIET) {
        Err(error @ Error::NoHugePages(_)) => {
            assert!(error.is_impossible() && error.to_string().contains("nr_hugepages"))
        }
        Err(Error::MayNotMount(_)) => {}
        other => panic!("{:?}", other.map(drop)),
    }
    assert_eq!(place.mounts(), 0);
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let place = PoolDirectory::new("open");
    std::fs::set_permissions(&place.0, std::fs::Permissions::from_mode(0o777)).unwrap();
    match Server::start(place.options(2 * MIB), QUIET) {
        Err(error @ Error::NotOwn(_)) => assert!(error.is_usage()),
        other => panic!("{:?}", other.map(drop)),
    }
    // And left as it is.
    assert_eq!(std::fs::metadata(&place.0).unwrap().mode() & 0o777, 0o777);
    assert_eq!(place.mounts(), 0);
}

#[test]
fn a_socket_is_only_where_nobody_else_makes_names() {
    let place = PoolDirectory::new("links");
    let start = |socket: PathBuf| Server::start(Options { socket, ..place.options(2 * MIB) }, QUIET);
    // As /tmp is: nobody changes another's names there, and anybody can be the first to have one.
    let open = place.0.join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o1777)).unwrap();
    match start(open.join("socket")) {
        Err(Error::NotOwn(path)) => assert_eq!(path, open.canonicalize().unwrap()),
        Err(Error::MayNotMount(_)) => return,
        other => panic!("{:?}", other.map(drop)),
    }
    // A link is not followed, wherever it leads.
    let victim = place.0.join("victim");
    std::fs::write(&victim, "whole").unwrap();
    for (name, target) in [("to a file", victim.clone()), ("to nothing", place.0.join("nothing"))] {
        std::os::unix::fs::symlink(target, place.0.join(name)).unwrap();
        assert!(start(place.0.join(name)).is_err(), "a link {name} was followed");
    }
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "whole");
    assert!(!place.0.join("nothing").exists());
    assert_eq!(place.mounts(), 0);
}

#[test]
fn a_user_without_rights_is_told_so() {
    let place = PoolDirectory::new("rights");
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !others_can_run_this() {
        return;
    }
    std::os::unix::fs::chown(&place.0, Some(NOBODY), Some(NOBODY)).unwrap();
    assert!(as_user(NOBODY, "a_server_without_rights", &place).wait().unwrap().success());
}

#[test]
#[ignore = "a server of another test"]
fn a_server_without_rights() {
    let Some(directory) = place_of_parent() else { return };
    let options = Options { directory: directory.clone(), socket: directory.join("socket"), ..Options::default() };
    match Server::start(options, QUIET) {
        Err(error @ Error::MayNotMount(_)) => assert!(error.is_impossible() && error.to_string().contains("root")),
        other => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn what_a_killed_server_left_is_taken_over() {
    let place = PoolDirectory::new("killed");
    let Some(server) = serve(place.options(2 * MIB)) else { return };
    server.stop().unwrap();
    let mut owned: Option<(pagecrew::pool::Taken, u8)> = None;
    for round in 1..=12u8 {
        let mut process = as_user(0, "a_server_that_is_killed", &place);
        let deadline = Instant::now() + Duration::from_secs(30);
        let client = loop {
            match Client::connect(&place.socket()) {
                Ok(client) => break client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        // What was taken from a former server is as it was left, whatever became of that.
        if let Some((taken, mark)) = owned.take() {
            let mut byte = [0];
            taken.file.read_exact_at(&mut byte, 2 * MIB as u64).unwrap();
            assert_eq!((byte[0], taken.path.exists()), (mark, true));
        }
        let taken = client.take(&request(4 * MIB, Until::Unused)).unwrap();
        assert!(is_zero(&taken.file, 4 * MIB), "round {round}");
        taken.file.write_all_at(&vec![round; 4 * MIB], 0).unwrap();
        owned = Some((taken, round));
        std::thread::sleep(Duration::from_millis(u64::from(round) * 7));
        process.kill().unwrap();
        process.wait().unwrap();
    }
    drop(owned);
    // One mount, whoever made it, and nothing in it that nobody has but for the time that it may be unused.
    assert_eq!(place.mounts(), 1);
    let server = serve(Options { unused: Duration::ZERO, ..place.options(8 * MIB) }).unwrap();
    let client = Client::connect(&place.socket()).unwrap();
    wait_for(&client, "given back", |status| figure(status, "taken_bytes") == 0);
    wait_until_full(&client);
    drop(client);
    assert_eq!(server.stop(), Ok(0));
    assert_eq!(place.mounts(), 0);
    // On a busy machine a filler, being of the idle class, is late to see that its server is gone.
    let own = std::process::id().to_string();
    let orphans = || {
        let fillers = Command::new("pgrep").args(["-f", "the_filler"]).output().map(|output| output.stdout);
        let orphan = |pid: &&str| {
            let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("status")).unwrap_or_default();
            stat.lines().any(|line| line == "PPid:\t1") && *pid != own
        };
        String::from_utf8_lossy(&fillers.unwrap_or_default()).lines().filter(orphan).count()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while orphans() > 0 {
        assert!(Instant::now() < deadline, "fillers outlived their servers");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[ignore = "a server of another test"]
fn a_server_that_is_killed() {
    let Some(directory) = place_of_parent() else { return };
    let place = std::mem::ManuallyDrop::new(PoolDirectory(directory));
    let _server = Server::start(place.options(16 * MIB), QUIET).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}
