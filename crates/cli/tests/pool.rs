//! `pagecrew pool` as people and supervisors use it. As root; without the right to mount, only what is refused is tested.

mod common;

use common::{directory, err, fails, metrics_port, out, pagecrew, scrape};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

fn pool(arguments: &[&str]) -> Command {
    pagecrew(&[&["pool"], arguments].concat())
}

/// A server in a directory of its own, ended with it.
struct Served {
    process: Child,
    directory: PathBuf,
    log: PathBuf,
}

impl Served {
    /// Starts one and waits until it answers. None where this user may not mount.
    fn start(name: &str, arguments: &[&str]) -> Option<Served> {
        Served::start_with(name, arguments, |_| {})
    }

    fn start_with(name: &str, arguments: &[&str], prepare: impl FnOnce(&mut Command)) -> Option<Served> {
        let place = directory().join(name);
        std::fs::create_dir_all(&place).unwrap();
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o755)).unwrap();
        let log = directory().join(format!("{name}.log"));
        let mut command =
            pool(&[&["serve", "--directory", place.to_str().unwrap(), "--cpu", "100"], arguments].concat());
        command.stdin(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        prepare(&mut command);
        let mut served = Served { process: command.spawn().unwrap(), directory: place, log };
        served.wait_until(|served| {
            if let Some(status) = served.process.try_wait().unwrap() {
                let log = std::fs::read_to_string(&served.log).unwrap();
                assert_eq!(status.code(), Some(3), "{log}");
                return true;
            }
            served.socket().exists()
        });
        if served.process.try_wait().unwrap().is_some() {
            eprintln!("left out: {}", std::fs::read_to_string(&served.log).unwrap());
            return None;
        }
        Some(served)
    }

    fn wait_until(&mut self, mut is: impl FnMut(&mut Served) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is(self) {
            assert!(Instant::now() < deadline, "{}", std::fs::read_to_string(&self.log).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// A client's command.
    fn client(&self, arguments: &[&str]) -> Command {
        let mut command = pool(arguments);
        command.env("PAGECREW_POOL_SOCKET", self.socket());
        command
    }

    fn status(&self) -> serde_json::Value {
        let output = self.client(&["status", "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", err(&output));
        serde_json::from_str(&out(&output)).unwrap()
    }

    fn wait_for(&mut self, name: &str, value: u64) {
        self.wait_until(|served| served.status()[name].as_u64() == Some(value));
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no pointers; the process is this test's child and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }

    /// What the server has said.
    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn mounts(&self) -> usize {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().filter(|line| line.contains(self.directory.to_str().unwrap())).count()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let mount = self.directory.join("mem");
        let _ = Command::new("umount").arg("-l").arg(mount).stderr(Stdio::null()).status();
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn memory_is_taken_used_and_given_back() {
    let Some(mut served) = Served::start("take", &["--size", "32M", "--unused", "1s"]) else { return };
    served.wait_for("ready_bytes", 32 * MIB);
    let output = served.client(&["take", "--size", "8M"]).output().unwrap();
    let path = PathBuf::from(out(&output).trim_end());
    assert!(output.status.success() && err(&output).is_empty(), "{}", err(&output));
    let facts = std::fs::metadata(&path).unwrap();
    assert_eq!((facts.len(), facts.blocks() * 512, facts.mode() & 0o777), (8 * MIB, 8 * MIB, 0o600));
    assert_eq!(served.status()["taken_bytes"].as_u64(), Some(8 * MIB));
    let output = served.client(&["release", path.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success() && !path.exists());
    served.wait_for("taken_bytes", 0);
    let output = served.client(&["take", "--size", "4M", "--json"]).output().unwrap();
    let taken: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!((taken["size_bytes"].as_u64(), taken["backing"].as_str()), (Some(4 * MIB), Some("tmpfs")));
    // Nobody opens it.
    served.wait_for("taken_bytes", 0);
    assert!(!Path::new(taken["path"].as_str().unwrap()).exists());
    served.wait_for("ready_bytes", 32 * MIB);
    assert!(served.client(&["resize", "--size", "8M"]).output().unwrap().status.success());
    served.wait_for("ready_bytes", 8 * MIB);
    let table = out(&served.client(&["status"]).output().unwrap());
    assert!(table.contains("8 MiB") && table.contains("full"), "{table}");
    fails(served.client(&["release", path.to_str().unwrap()]), 1, &["not a file that is taken"]);
    fails(served.client(&["take", "--size", "1M"]), 2, &["2 MiB"]);
    fails(served.client(&["take", "--size", "2M", "--node", "77"]), 2, &["node 77"]);
    fails(served.client(&["take", "--size", "512T"]), 1, &["limit"]);
    served.signal(libc::SIGTERM);
    assert_eq!(served.process.wait().unwrap().code(), Some(0), "{}", served.log());
    assert_eq!((served.mounts(), served.socket().exists()), (0, false));
}

#[test]
fn a_command_has_the_memory_as_long_as_it_runs() {
    let Some(mut served) = Served::start("exec", &["--size", "16M"]) else { return };
    served.wait_for("ready_bytes", 16 * MIB);
    let exec = |script: &str| {
        let mut command =
            served.client(&["exec", "--size", "4M", "--", "sh", "-c", script, "name", "{path}", "{size}", "{fd}"]);
        command.stdout(Stdio::piped()).output().unwrap()
    };
    let output = exec(
        r#"test "$(stat -c %s "$1")" = "$2" && test "$1" = "$PAGECREW_POOL_PATH" && echo hello > "$1" &&
        head -c 5 "/dev/fd/$3"; exit 7"#,
    );
    assert_eq!((out(&output).as_str(), output.status.code()), ("hello", Some(7)), "{}", err(&output));
    assert_eq!(exec("kill -USR2 $$").status.signal(), Some(libc::SIGUSR2));
    // It has nothing of the pool's open that it was not given.
    let output =
        served.client(&["exec", "--size", "2M", "--as-is", "--", "ls", "-l", "/proc/self/fd"]).output().unwrap();
    assert!(output.status.success() && !out(&output).contains("/mem/"), "{}", out(&output));
    assert_eq!(served.status()["taken_bytes"].as_u64(), Some(0));

    // Told to end, it tells the command, and the memory is back when it has ended.
    let mut command = served.client(&["exec", "--size", "4M", "--", "sleep", "100", "{path}"]);
    let mut child = command.args(["--", "x"]).stderr(Stdio::null()).spawn().unwrap();
    child.wait().unwrap();
    let mut child =
        served.client(&["exec", "--size", "4M", "--", "sh", "-c", "sleep 100 < $0", "{path}"]).spawn().unwrap();
    served.wait_for("taken_bytes", 4 * MIB);
    // SAFETY: no pointers; the process is this test's child.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    child.wait().unwrap();
    served.wait_until(|served| {
        // The shell is gone, and what it has started has the file until it is, too.
        let _ = Command::new("pkill").args(["-f", "^sleep 100$"]).status();
        served.status()["taken_bytes"].as_u64() == Some(0)
    });
    // Killed, it leaves the command alone, which keeps what it has.
    let script = "echo $$; exec sleep 50 < $0";
    let mut command = served.client(&["exec", "--size", "4M", "--", "sh", "-c", script, "{path}"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    let pid: i32 = line.trim().parse().unwrap();
    let open = |pid: i32| {
        std::fs::read_link(format!("/proc/{pid}/fd/0")).is_ok_and(|path| path.to_string_lossy().contains("/mem/taken/"))
    };
    served.wait_until(|_| open(pid));
    child.kill().unwrap();
    child.wait().unwrap();
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(served.status()["taken_bytes"].as_u64(), Some(4 * MIB));
    // SAFETY: no pointers; the process was started by this test's child a moment ago, and is still there.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    served.wait_for("taken_bytes", 0);

    fails(served.client(&["exec", "--size", "2M", "--", "true"]), 2, &["{path}"]);
    fails(served.client(&["exec", "--size", "2M", "--", "no-such-program", "{path}"]), 2, &["no-such-program"]);
    assert_eq!(served.status()["taken_bytes"].as_u64(), Some(0));
}

#[test]
fn a_supervisor_is_told_and_the_settings_are_read_again() {
    let file = directory().join("pool-settings.toml");
    std::fs::write(&file, "[pool]\nsize = \"8M\"\nunused = \"5s\"\n").unwrap();
    let notifications = directory().join("notify");
    let supervisor = UnixDatagram::bind(&notifications).unwrap();
    supervisor.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let prepare = |command: &mut Command| {
        command.env("NOTIFY_SOCKET", &notifications);
    };
    let Some(mut served) = Served::start_with("reload", &["--config", file.to_str().unwrap()], prepare) else { return };
    let told = |what: &str| {
        let mut room = [0; 4096];
        loop {
            let len = supervisor.recv(&mut room).unwrap_or_else(|error| panic!("never told {what}: {error}"));
            if String::from_utf8_lossy(&room[..len]).contains(what) {
                return;
            }
        }
    };
    told("READY=1");
    served.wait_for("ready_bytes", 8 * MIB);
    std::fs::write(&file, "[pool]\nsize = \"24M\"\n").unwrap();
    served.signal(libc::SIGHUP);
    told("RELOADING=1");
    served.wait_for("ready_bytes", 24 * MIB);
    // An error in it changes nothing.
    std::fs::write(&file, "[pool]\nsize = \"24M\"\nfloor = \"12Q\"\n").unwrap();
    served.signal(libc::SIGHUP);
    served.wait_until(|served| served.log().contains("line 3") && served.log().contains("12Q"));
    assert_eq!(served.status()["ready_bytes"].as_u64(), Some(24 * MIB));
    served.signal(libc::SIGINT);
    told("STOPPING=1");
    assert_eq!(served.process.wait().unwrap().code(), Some(0));
}

/// Whoever comes after the pool can wait for it, or have the service manager wait.
#[test]
fn enough_can_be_waited_for() {
    let notifications = directory().join("notify-ready");
    let supervisor = UnixDatagram::bind(&notifications).unwrap();
    supervisor.set_nonblocking(true).unwrap();
    let prepare = |command: &mut Command| {
        command.env("NOTIFY_SOCKET", &notifications);
    };
    let Some(mut served) = Served::start_with("ready", &["--size", "64M", "--ready", "48M"], prepare) else { return };
    served.wait_until(|_| {
        let mut room = [0; 4096];
        std::iter::from_fn(|| supervisor.recv(&mut room).ok().map(|len| room[..len].to_vec()))
            .any(|told| String::from_utf8_lossy(&told).contains("READY=1"))
    });
    assert!(served.status()["ready_bytes"].as_u64().unwrap() >= 48 * MIB);
    let run = |arguments: &[&str]| served.client(&[&["wait"], arguments].concat()).output().unwrap();
    assert!(run(&["--size", "64M"]).status.success());
    assert!(run(&["--size", "2M", "--node", "0", "--timeout", "0"]).status.success());
    fails(served.client(&["wait", "--size", "66M"]), 2, &["66 MiB", "64 MiB", "resize"]);
    fails(served.client(&["wait", "--size", "2M", "--node", "999"]), 2, &["999"]);
    // More than can be filled while all is taken.
    let taken = served.client(&["take", "--size", "64M"]).output().unwrap();
    assert!(taken.status.success(), "{}", err(&taken));
    let path = out(&taken);
    assert!(served.client(&["release", path.trim()]).output().unwrap().status.success());
    assert!(run(&["--size", "64M", "--timeout", "60s"]).status.success());
    let nowhere = directory().join("nowhere");
    let nowhere = ["wait", "--size", "2M", "--socket", nowhere.to_str().unwrap()];
    fails(pool(&nowhere), 1, &["nowhere"]);
    let begin = Instant::now();
    fails(pool(&[&nowhere[..], &["--timeout", "300ms"]].concat()), 1, &["nowhere"]);
    assert!(begin.elapsed() >= Duration::from_millis(300));
    // A server that is there and does nothing.
    served.signal(libc::SIGSTOP);
    fails(served.client(&["wait", "--size", "2M", "--timeout", "300ms"]), 1, &["does not answer"]);
    served.signal(libc::SIGCONT);
}

#[test]
fn what_is_wrong_with_a_file_is_named_with_its_line() {
    let file = directory().join("wrong.toml");
    for (text, words) in [
        ("size = \"8G\"\nfloor = \"12Q\"\n", ["line 3", "floor", "12Q"]),
        ("size = \"3M\"\n", ["line 2", "size", "2 MiB"]),
        ("\n\nsise = \"8G\"\n", ["line 4", "sise", "wrong.toml"]),
        ("size = \"8G\"\n[pool.quota]\ndefault = true\n", ["line 4", "default", "wrong.toml"]),
        ("size = \"8G\"\ncpu = 0\n", ["line 3", "cpu", "percent"]),
        ("size = \"8G\"\n[pol]\n", ["line 3", "[pool], [trim]", "wrong.toml"]),
    ] {
        std::fs::write(&file, format!("[pool]\n{text}")).unwrap();
        fails(pool(&["serve", "--config", file.to_str().unwrap()]), 2, &words);
    }
    fails(pool(&["serve", "--config", "/no/such/file"]), 2, &["/no/such/file"]);
    let place = directory().join("nothing");
    fails(pool(&["serve", "--directory", place.to_str().unwrap(), "--config", "/dev/null"]), 2, &["size"]);
    assert!(!place.exists());
}

#[test]
fn without_a_server_or_rights_one_is_told_what_to_do() {
    let nowhere = directory().join("nowhere");
    for arguments in [&["status"][..], &["take", "--size", "2M"], &["exec", "--size", "2M", "--", "true", "{path}"]] {
        let mut command = pool(arguments);
        command.env("PAGECREW_POOL_SOCKET", &nowhere);
        fails(command, 1, &["nowhere", "pagecrew pool serve"]);
    }
    let Some(served) = Served::start("rights", &["--size", "2M"]) else { return };
    // One directory, one server.
    let place = served.directory.to_str().unwrap();
    let pid = served.process.id().to_string();
    fails(pool(&["serve", "--size", "2M", "--directory", place]), 1, &["already served", &pid]);
    // Another user, where he can run this at all.
    let program = PathBuf::from(env!("CARGO_BIN_EXE_pagecrew"));
    let open = |path: &Path| std::fs::metadata(path).is_ok_and(|facts| facts.mode() & 0o005 == 0o005);
    if program.ancestors().all(open) && directory().ancestors().all(open) {
        let mut command = served.client(&["take", "--size", "2M"]);
        command.uid(NOBODY).gid(NOBODY);
        fails(command, 3, &["socket", "may"]);
        let mut command = pool(&["serve", "--size", "2M", "--directory", "/run/pagecrew-of-nobody/pool"]);
        command.uid(NOBODY).gid(NOBODY);
        fails(command, 3, &["root"]);
    }
    // What starts the filler is the server alone.
    let mut command = pagecrew(&["pool-fill"]);
    command.stdin(Stdio::null());
    fails(command, 1, &["standard input"]);
    assert!(!out(&pagecrew(&["--help"]).output().unwrap()).contains("pool-fill"));
}

#[test]
fn metrics_are_scraped_at_a_port() {
    let arguments = ["--size", "16M", "--quota", "root=64M", "--metrics", "0"];
    let Some(mut served) = Served::start("metrics-port", &arguments) else { return };
    served.wait_for("ready_bytes", 16 * MIB);
    let output = served.client(&["take", "--size", "4M"]).output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    served.wait_for("ready_bytes", 16 * MIB);
    served.wait_until(|served| served.log().contains("metrics at "));
    let port = metrics_port(&served.log());
    let text = scrape(TcpStream::connect(port).unwrap());
    // The same figures as those of the status.
    let status = served.status();
    let line = |name: &str, expected: &serde_json::Value| {
        let name = format!("pagecrew_pool_{name} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok());
        assert!(value.is_some() && value == expected.as_f64(), "{name}is {value:?}, not {expected}");
    };
    for name in ["size_bytes", "ready_bytes", "filling_bytes", "taken_bytes", "limit_bytes", "floor_bytes"] {
        line(name, &status[name]);
    }
    for name in ["takes", "handed_out_bytes", "handed_out_ready_bytes", "refused", "filled_bytes", "cpu_seconds"] {
        line(&format!("{name}_total"), &status["counters"][name]);
    }
    for node in status["nodes"].as_array().unwrap() {
        line(&format!("node_ready_bytes{{node=\"{}\"}}", node["node"]), &node["ready_bytes"]);
    }
    line("user_taken_bytes{user=\"root\"}", &(4 * MIB).into());
    line("user_quota_bytes{user=\"root\"}", &(64 * MIB).into());
    line("budget_cpu_ratio", &status["budget_cpu_ratio"]);

    // Those who are no scrapers: silent, endless, mad, or not reading.
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(port).unwrap()).collect();
    let _ = TcpStream::connect(port).unwrap().write_all(&[b'G'; 1 << 20]);
    TcpStream::connect(port).unwrap().write_all(b"\0\xff\r\n\r\n").unwrap();
    let deaf: Vec<TcpStream> = (0..10).map(|_| TcpStream::connect(port).unwrap()).collect();
    for mut one in &deaf {
        one.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    for _ in 0..10 {
        let begin = Instant::now();
        let output = served.client(&["take", "--size", "2M"]).output().unwrap();
        assert!(output.status.success(), "{}", err(&output));
        assert!(scrape(TcpStream::connect(port).unwrap()).contains("pagecrew_pool_takes_total"));
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
        assert!(served.client(&["release", out(&output).trim_end()]).output().unwrap().status.success());
    }
    drop((silent, deaf));
    served.signal(libc::SIGTERM);
    assert_eq!(served.process.wait().unwrap().code(), Some(0), "{}", served.log());
    assert!(TcpStream::connect(port).is_err());
}

#[test]
fn metrics_are_scraped_at_a_socket() {
    let socket = directory().join("metrics.socket");
    let file = directory().join("metrics.toml");
    std::fs::write(&file, format!("[pool]\nsize = \"2M\"\nmetrics = \"{}\"\n", socket.display())).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    let Some(mut served) = Served::start("metrics-socket", &config) else { return };
    served.wait_until(|served| served.log().contains("metrics at "));
    assert_eq!(std::fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    let text = scrape(UnixStream::connect(&socket).unwrap());
    assert!(text.contains("\npagecrew_pool_size_bytes 2097152\n"), "{text}");
    // A second one there is refused before it has made anything; so is one for other machines.
    let other = directory().join("metrics-other");
    let place = ["serve", "--size", "2M", "--config", "/dev/null", "--directory", other.to_str().unwrap(), "--metrics"];
    fails(pool(&[&place[..], &[socket.to_str().unwrap()]].concat()), 1, &["metrics.socket", "in use"]);
    fails(pool(&[&place[..], &["0.0.0.0:9750"]].concat()), 2, &["--metrics", "other machines"]);
    assert!(!other.exists());
    // What is read again does not move it.
    std::fs::write(&file, "[pool]\nsize = \"4M\"\nmetrics = 0\n").unwrap();
    served.signal(libc::SIGHUP);
    served.wait_until(|served| served.log().contains("metrics can't change while it runs"));
    scrape(UnixStream::connect(&socket).unwrap());
    served.signal(libc::SIGTERM);
    assert_eq!(served.process.wait().unwrap().code(), Some(0), "{}", served.log());
    assert!(!socket.exists());
}
