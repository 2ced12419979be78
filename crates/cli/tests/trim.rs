//! Trimming real processes: what goes, what must not, who refuses, and what happens while they do as they like.
//!
//! Where this kernel can't (Linux 6.12, huge pages) or the user may not (CAP_SYS_NICE, CAP_SYS_PTRACE), the tests that need it say so and pass.

mod common;

use common::{compile, directory, err, fails, metrics_port, out, pagecrew, scrape};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

fn program(name: &str, source: &str, file: &OnceLock<PathBuf>) -> PathBuf {
    file.get_or_init(|| compile(name, source, &["-O2", "-pthread"])).clone()
}

fn sparse_program() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    program("sparse", include_str!("trim/sparse.c"), &FILE)
}

/// Whether trimming works here at all.
fn works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    let works = *WORKS.get_or_init(|| {
        // SAFETY: takes nothing and cannot fail.
        let root = unsafe { libc::geteuid() } == 0;
        root && pagecrew::trim::support::check().is_ok()
    });
    // Each test that has nothing to try says so.
    if !works {
        eprintln!("left out: this takes root and Linux 6.12 with transparent huge pages");
    }
    works
}

/// A program that runs beside the test; killed where the test fails.
struct Target {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Target {
    fn start(command: &mut Command) -> Target {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Target { child, output }
    }

    /// Huge pages with a byte every 50 KiB, once they are there. Returns their address, too.
    fn sparse(mib: usize, manner: &str) -> (Target, usize) {
        Target::with_stride(mib, 50 << 10, manner)
    }

    fn with_stride(mib: usize, stride: usize, manner: &str) -> (Target, usize) {
        Target::of(&sparse_program(), mib, stride, manner)
    }

    fn of(program: &Path, mib: usize, stride: usize, manner: &str) -> (Target, usize) {
        let mut command = Command::new(program);
        command.args([&mib.to_string(), &stride.to_string()]).args((!manner.is_empty()).then_some(manner));
        let mut target = Target::start(&mut command);
        let line = target.line();
        let address = line.strip_prefix("ready 0x").unwrap_or_else(|| panic!("{line}"));
        (target, usize::from_str_radix(address, 16).unwrap())
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn resident(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Tells it to check its memory, and hears that all of it is there.
    fn intact(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.trim(), self.child.wait().unwrap().success()), ("intact", true));
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn trim(arguments: &[&str]) -> Output {
    pagecrew(&[&["trim"], arguments].concat()).output().unwrap()
}

/// The object of a pass.
fn trimmed(arguments: &[&str]) -> Value {
    let output = trim(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", err(&output));
    serde_json::from_str(&out(&output)).unwrap()
}

fn count(object: &Value, name: &str) -> u64 {
    let place = name.split('/').fold(&object["totals"], |place, name| &place[name]);
    place.as_u64().unwrap_or_else(|| panic!("no {name} in {object}"))
}

const MIB: usize = 64;
const PAGES: u64 = MIB as u64 / 2;

#[test]
fn the_zero_part_goes_and_the_rest_stays() {
    if !works() {
        return;
    }
    let (target, _) = Target::sparse(MIB, "");
    let before = target.resident();
    let object = trimmed(&["--pid", &target.pid()]);
    assert!(count(&object, "under_used") >= PAGES && count(&object, "huge_pages") >= PAGES, "{object}");
    let (split, gone) = (count(&object, "split"), count(&object, "gone_bytes"));
    // Something else may hold on to a page for a moment.
    assert!(split >= PAGES * 9 / 10 && split + count(&object, "left/busy") >= PAGES, "{object}");
    assert!(gone >= split * 470 * 4096, "{object}");
    let went = before - target.resident();
    assert!(went + (1 << 20) >= gone && went <= gone + (1 << 20), "{went} and {gone}");
    target.intact();
}

#[test]
fn a_dry_run_and_dense_memory_change_nothing() {
    if !works() {
        return;
    }
    let (target, _) = Target::sparse(MIB, "");
    let before = target.resident();
    let object = trimmed(&["--pid", &target.pid(), "--dry-run"]);
    assert!(count(&object, "could_go_bytes") > PAGES * 400 * 4096 && count(&object, "gone_bytes") == 0, "{object}");
    assert!(target.resident().abs_diff(before) < 1 << 20);
    let text = out(&trim(&["--pid", &target.pid(), "--dry-run"]));
    assert!(text.contains("under-used") && text.contains(&target.pid()) && text.contains("sparse"), "{text}");
    target.intact();
    let (target, _) = Target::with_stride(MIB, 64, "");
    let object = trimmed(&["--pid", &target.pid()]);
    assert_eq!((count(&object, "under_used"), count(&object, "used") >= PAGES), (0, true), "{object}");
    assert!(count(&object, "read_of_used_bytes") / count(&object, "used") <= 65536, "{object}");
    target.intact();
}

#[test]
fn locked_and_shared_pages_are_left_and_counted() {
    if !works() {
        return;
    }
    for (manner, reason) in [("locked", "left/locked"), ("shared", "left/shared")] {
        let (target, _) = Target::sparse(MIB, manner);
        let object = trimmed(&["--pid", &target.pid()]);
        assert!(count(&object, reason) >= PAGES && count(&object, "gone_bytes") == 0, "{object}");
        let text = out(&trim(&["--pid", &target.pid()]));
        assert!(text.contains(reason.trim_start_matches("left/")), "{text}");
        target.intact();
    }
}

#[test]
fn what_is_excluded_or_protects_itself_is_left() {
    if !works() {
        return;
    }
    let (target, start) = Target::sparse(MIB, "");
    let half = format!("{start:x}-{:x}", start + (MIB << 19));
    let object = trimmed(&["--pid", &target.pid(), "--exclude", &half]);
    assert!(count(&object, "left/excluded") >= PAGES / 2 && count(&object, "split") <= PAGES / 2 + 2, "{object}");
    // By the name that it has given itself, and by a file that anything can make.
    let object = trimmed(&["--pid", &target.pid(), "--never", "sparse"]);
    let reason = object["processes"][0]["error"].as_str().unwrap();
    assert!(count(&object, "looked_at") == 0 && reason.contains("name"), "{object}");
    let directory = Path::new("/dev/shm/pagecrew-0/no-trim");
    std::fs::create_dir_all(directory).unwrap();
    let file = directory.join(target.pid());
    std::fs::write(&file, "").unwrap();
    let object = trimmed(&["--pid", &target.pid()]);
    std::fs::remove_file(&file).unwrap();
    assert!(count(&object, "looked_at") == 0, "{object}");
    assert!(object["processes"][0]["error"].as_str().unwrap().contains("left alone"), "{object}");
    target.intact();
}

#[test]
fn nonsense_and_what_is_not_there_get_one_line() {
    // This machine may have settings of its own.
    let none = directory().join("none.toml");
    std::fs::write(&none, "").unwrap();
    fails(pagecrew(&["trim", "--config", none.to_str().unwrap()]), 2, &["--pid"]);
    fails(pagecrew(&["trim", "--all", "--max-zero", "many"]), 2, &["many"]);
    fails(pagecrew(&["trim", "--all", "--exclude", "2000-1000"]), 2, &["2000-1000"]);
    fails(pagecrew(&["trim", "--all", "--config", "/no/such/file"]), 2, &["/no/such/file"]);
    let file = directory().join("trim.toml");
    std::fs::write(&file, "[trim]\nmax-zeros = 3\n").unwrap();
    fails(pagecrew(&["trim", "--all", "--config", file.to_str().unwrap()]), 2, &["max-zeros"]);
    // A kernel that can't trim at all says that first.
    if works() {
        fails(pagecrew(&["trim", "--cgroup", "/no/such/group"]), 2, &["/no/such/group"]);
        fails(pagecrew(&["trim", "--pid", "2147483647"]), 1, &["2147483647", "not there"]);
    }
}

#[test]
fn without_the_right_it_says_which_is_missing() {
    if !works() || Command::new("setpriv").arg("--version").output().is_err() {
        return;
    }
    let without = |right: &str, pid: &str| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--bounding-set=-{right}"), &format!("--inh-caps=-{right}")]);
        command.args([env!("CARGO_BIN_EXE_pagecrew"), "trim", "--pid", pid]);
        command
    };
    let (target, _) = Target::sparse(2, "");
    fails(without("sys_nice", &target.pid()), 3, &["CAP_SYS_NICE", &target.pid()]);
    // Looking needs no such right.
    let mut dry = without("sys_nice", &target.pid());
    assert!(dry.arg("--dry-run").output().unwrap().status.success());
    let mut other = Command::new("setpriv");
    other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "60"]);
    let other = Target::start(&mut other);
    let name = || std::fs::read_to_string(format!("/proc/{}/comm", other.pid())).unwrap();
    while name().trim() != "sleep" {
        std::thread::yield_now();
    }
    fails(without("sys_ptrace", &other.pid()), 3, &["CAP_SYS_PTRACE", &other.pid()]);
    target.intact();
}

#[test]
fn a_watch_goes_on_until_it_is_told_to_end() {
    if !works() {
        return;
    }
    let (first, _) = Target::sparse(MIB, "");
    let arguments = ["trim", "--watch", "--pid", &first.pid(), "--interval", "200ms", "--cpu", "50", "--json"];
    let mut watch = Target::start(&mut pagecrew(&arguments));
    let object = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    let begin = Instant::now();
    loop {
        let now = object(&watch.line());
        if count(&now, "split") >= PAGES * 9 / 10 {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{now}");
    }
    // SAFETY: the process is this test's own child.
    unsafe { libc::kill(watch.child.id() as i32, libc::SIGTERM) };
    let mut rest = String::new();
    watch.output.read_to_string(&mut rest).unwrap();
    assert!(watch.child.wait().unwrap().success());
    object(rest.lines().last().unwrap());
    first.intact();
    // And with the last of the processes that it was told.
    let (target, _) = Target::sparse(2, "");
    let mut watch =
        Target::start(&mut pagecrew(&["trim", "--watch", "--pid", &target.pid(), "--interval", "100ms", "--json"]));
    object(&watch.line());
    target.intact();
    watch.output.read_to_string(&mut rest).unwrap();
    assert!(watch.child.wait().unwrap().success());
}

/// A process whose memory is locked for long, as it is by a server that does not answer, keeps nobody else from being trimmed, and is trimmed
/// itself when it can be.
#[test]
fn a_process_that_is_in_the_way_is_left_behind() {
    static LOCKED: OnceLock<PathBuf> = OnceLock::new();
    static SPARSE: OnceLock<PathBuf> = OnceLock::new();
    if !works() {
        return;
    }
    let locked = program("locked", include_str!("trim/locked.c"), &LOCKED);
    // Of a name of their own: another test trims by the other one.
    let sparse = program("sparse-beside", include_str!("trim/sparse.c"), &SPARSE);
    let start = || Target::of(&sparse, MIB, 50 << 10, "").0;
    let (first, second) = (start(), start());
    let pids = [first.pid(), second.pid()];
    let options = ["--interval", "200ms", "--cpu", "50", "--json"];
    let watch = pagecrew(&[&["trim", "--watch", "--pid", &pids[0], "--pid", &pids[1]], &options[..]].concat());
    let mut command = Command::new(locked);
    command.arg(&pids[0]).arg(watch.get_program()).args(watch.get_args()).env_remove("LD_PRELOAD");
    let mut watch = Target::start(command.stderr(Stdio::piped()));
    let log = watch.child.stderr.take().unwrap();
    let begin = Instant::now();
    // The line that says that so many were split.
    let until_split = |watch: &mut Target, pages: u64| loop {
        let line = watch.line();
        assert!(!line.is_empty() && begin.elapsed() < Duration::from_secs(100), "{pages} pages: {line}");
        let now: Value = serde_json::from_str(&line).unwrap();
        if count(&now, "split") >= pages * 9 / 10 {
            return now;
        }
    };
    let now = until_split(&mut watch, PAGES);
    let of = |now: &Value| {
        let processes = now["processes"].as_array().unwrap();
        processes
            .iter()
            .find(|process| process["pid"].as_u64() == Some(u64::from(first.child.id())))
            .unwrap()
            .to_string()
    };
    assert!(of(&now).contains("was locked for long"), "{now}");
    // It is not locked any more.
    drop(watch.child.stdin.take());
    until_split(&mut watch, 2 * PAGES);
    // SAFETY: the process is this test's own child, and passes it on.
    unsafe { libc::kill(watch.child.id() as i32, libc::SIGTERM) };
    assert!(watch.child.wait().unwrap().success());
    let log = std::io::read_to_string(log).unwrap();
    assert!(log.contains(&format!("process {}: its memory is locked", pids[0])), "{log}");
    first.intact();
    second.intact();
}

/// Which processes, by a file that changes: those that it names come in, what makes no sense changes nothing, and the end comes soon.
#[test]
fn a_watch_reads_its_settings_again() {
    if !works() {
        return;
    }
    let (target, _) = Target::sparse(MIB, "");
    let name = std::fs::read_to_string(format!("/proc/{}/comm", target.pid())).unwrap();
    let file = directory().join("trim-settings.toml");
    let write = |names: &str| {
        std::fs::write(&file, format!("[trim]\nnames = [{names}]\ninterval = \"100ms\"\ncpu = 50\n")).unwrap()
    };
    write("\"no such name\"");
    let mut command = pagecrew(&["trim", "--watch", "--json", "--config", file.to_str().unwrap()]);
    let mut watch = Target::start(command.stderr(std::process::Stdio::piped()));
    let log = watch.child.stderr.take().unwrap();
    let object = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    assert_eq!(object(&watch.line())["processes"], Value::Array(vec![]));
    // SAFETY: the process is this test's own child.
    let signal = |watch: &Target, signal| unsafe { libc::kill(watch.child.id() as i32, signal) };
    write(&format!("\"{}\"", name.trim()));
    signal(&watch, libc::SIGHUP);
    let begin = Instant::now();
    while count(&object(&watch.line()), "split") < PAGES * 9 / 10 {
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    write("1 2");
    signal(&watch, libc::SIGHUP);
    watch.line();
    let begin = Instant::now();
    signal(&watch, libc::SIGTERM);
    assert!(watch.child.wait().unwrap().success());
    // It takes 60 ms at the most; others may want the CPUs.
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    let log = std::io::read_to_string(log).unwrap();
    assert!(log.contains("read again") && log.contains("stay as they are") && log.contains("line 2"), "{log}");
    target.intact();
    fails(pagecrew(&["trim", "--watch", "--config", "/dev/null"]), 2, &["--pid", "[trim]"]);
}

#[test]
fn a_watch_serves_metrics() {
    if !works() {
        return;
    }
    let (target, _) = Target::sparse(32, "");
    let arguments =
        ["trim", "--watch", "--cpu", "100", "--interval", "1s", "--pid", &target.pid(), "--metrics", "[::1]:0"];
    let mut watch = pagecrew(&arguments);
    let mut watch = watch.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(watch.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let port = metrics_port(&line);
    let value = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok());
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let text = loop {
        let text = scrape(std::net::TcpStream::connect(port).unwrap());
        // Before the first look, there is nothing yet.
        if text.contains("pagecrew_trim_gone_bytes_total")
            && value(&text, "pagecrew_trim_gone_bytes_total") >= (16 << 20) as f64
        {
            break text;
        }
        assert!(Instant::now() < deadline, "{text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!((value(&text, "pagecrew_trim_members"), value(&text, "pagecrew_trim_budget_cpu_ratio")), (1.0, 1.0));
    let (all, split) =
        (value(&text, "pagecrew_trim_cpu_seconds_total"), value(&text, "pagecrew_trim_split_seconds_total"));
    assert!(split > 0.0 && split <= all && all <= value(&text, "pagecrew_trim_budget_cpu_seconds_total"), "{text}");
    assert!(value(&text, "pagecrew_trim_huge_pages_split_total") >= 8.0, "{text}");
    // It ends with the process that it is for.
    target.intact();
    assert!(watch.wait().unwrap().success());
    assert!(std::net::TcpStream::connect(port).is_err());
}

#[test]
fn one_percent_of_a_cpu_is_one_percent() {
    if !works() {
        return;
    }
    let (target, _) = Target::with_stride(256, 64, "");
    // What a report costs is not to be saved on. An emulated machine takes ten times as long for each, and has a tenth of them.
    let patience = std::env::var("patience").ok().and_then(|text| text.parse::<u32>().ok()).unwrap_or(1);
    let interval = format!("{}ms", 100 * patience);
    let mut watch = Target::start(&mut pagecrew(&["trim", "--watch", "--pid", &target.pid(), "--interval", &interval]));
    let ticks = |pid: &str| -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = text.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    // Starting the program is none of it.
    std::thread::sleep(Duration::from_millis(500));
    let before = ticks(&watch.pid());
    std::thread::sleep(Duration::from_secs(5));
    // What was saved up for ten seconds may be used at once, and the last piece may go beyond.
    let used = ticks(&watch.pid()) - before;
    assert!(used <= 20, "{used} ticks of 10 ms in 5 s");
    watch.child.kill().unwrap();
    target.intact();
}

/// Passes over `target` one after the other until it has ended. Returns how many huge pages were split.
fn trim_until_it_ends(target: &mut Target) -> u64 {
    let mut split = 0;
    while target.child.try_wait().unwrap().is_none() {
        // Before the threads of the target, which are more than there are CPUs.
        let mut command = Command::new("nice");
        command.args(["-n", "-15", env!("CARGO_BIN_EXE_pagecrew"), "trim", "--pid", &target.pid(), "--json"]);
        let output = command.output().unwrap();
        match output.status.code() {
            Some(0) => split += count(&serde_json::from_str(&out(&output)).unwrap(), "split"),
            Some(1) => assert!(err(&output).contains("is not there"), "{}", err(&output)),
            status => panic!("{status:?}: {}", err(&output)),
        }
    }
    split
}

fn no_write_is_lost(writes: u64) {
    if !works() {
        return;
    }
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let mut command = Command::new(program("writers", include_str!("trim/writers.c"), &FILE));
    let mut target = Target::start(command.args(["64", "16", &writes.to_string()]));
    assert_eq!(target.line(), "ready");
    let split = trim_until_it_ends(&mut target);
    let line = target.line();
    eprintln!("{writes} writes, {split} huge pages split meanwhile: {line}");
    assert!(target.child.wait().unwrap().success() && line.starts_with("0 lost") && split > 20, "{split}: {line}");
}

#[test]
fn no_write_of_sixteen_threads_is_lost() {
    no_write_is_lost(100_000_000);
}

#[test]
#[ignore = "takes minutes"]
fn no_write_of_a_billion_is_lost() {
    no_write_is_lost(1_000_000_000);
}

#[test]
fn a_process_may_do_as_it_likes_meanwhile() {
    if !works() {
        return;
    }
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let file = program("restless", include_str!("trim/restless.c"), &FILE);
    for _ in 0..3 {
        let mut target = Target::start(Command::new(&file).arg("20"));
        let split = trim_until_it_ends(&mut target);
        assert_eq!((target.line().as_str(), target.child.wait().unwrap().success()), ("done", true));
        assert!(split > 0);
    }
}
