//! What a program that runs under `run` gets, and what its end looks like from outside.

mod common;

use common::{compile, directory, empty_library, err, executable, fails, out, pagecrew};
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Both ways of running a program: in place of the command, and below it.
const WAYS: [&[&str]; 2] = [&["run"], &["run", "--stats"]];

fn run(way: &[&str], arguments: &[&str]) -> Command {
    pagecrew(&[way, arguments].concat())
}

fn kill(child: &Child, signal: i32) {
    // SAFETY: no pointers; the child has not been waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Starts a program that prints a line when it is ready.
fn start(mut command: Command) -> (Child, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

#[test]
fn exit_statuses_are_passed_on() {
    for way in WAYS {
        for status in [0, 1, 3, 255] {
            let output = run(way, &["sh", "-c", &format!("exit {status}")]).output().unwrap();
            assert_eq!(output.status.code(), Some(status), "{way:?}");
        }
    }
}

#[test]
fn signals_are_passed_on() {
    for way in WAYS {
        for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM, libc::SIGPIPE] {
            let output = run(way, &["sh", "-c", &format!("kill -{signal} $$")]).output().unwrap();
            assert_eq!(output.status.signal(), Some(signal), "{way:?}");
            assert!(!output.status.core_dumped() || way.len() == 1);
        }
    }
}

#[test]
fn signals_to_the_command_reach_the_program() {
    let signals = [("TERM", libc::SIGTERM), ("HUP", libc::SIGHUP), ("USR1", libc::SIGUSR1), ("INT", libc::SIGINT)];
    for way in WAYS {
        for (name, signal) in signals {
            let script = format!("trap 'exit 7' {name}; echo ready; while :; do sleep 0.01; done");
            let mut command = run(way, &["sh", "-c", &script]);
            // A shell can't trap what was ignored when it began, as under nohup or in the background of another shell. In the child alone: other
            // tests look at the signals of this process.
            // SAFETY: `signal` may be called between fork and exec.
            unsafe {
                command.pre_exec(move || {
                    libc::signal(signal, libc::SIG_DFL);
                    Ok(())
                })
            };
            let (mut child, line) = start(command);
            assert_eq!(line, "ready");
            kill(&child, signal);
            assert_eq!(child.wait().unwrap().code(), Some(7), "{way:?} {name}");
        }
    }
}

#[test]
fn a_signal_that_the_program_does_not_handle_ends_both() {
    let (mut child, _) = start(run(WAYS[1], &["sh", "-c", "echo; exec sleep 60"]));
    kill(&child, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
}

#[test]
fn the_program_does_not_outlive_a_killed_command() {
    let (mut child, program) = start(run(WAYS[1], &["sh", "-c", "echo $$; exec sleep 60"]));
    kill(&child, libc::SIGKILL);
    child.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let runs = || {
        let state = std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap_or_default();
        !state.is_empty() && !state.contains(") Z ")
    };
    while runs() {
        assert!(Instant::now() < deadline, "process {program} still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn without_statistics_the_program_takes_the_place_of_the_command() {
    let (mut child, program) = start(run(WAYS[0], &["sh", "-c", "echo $$"]));
    assert_eq!(program, child.id().to_string());
    child.wait().unwrap();
}

#[test]
fn options_behind_the_program_are_the_programs() {
    for way in WAYS {
        for arguments in [
            &["echo", "--stats", "--retain", "x", "-h", "--"][..],
            &["--", "echo", "--stats", "--retain", "x", "-h", "--"],
        ] {
            assert_eq!(
                out(&run(way, arguments).output().unwrap()),
                "--stats --retain x -h --\n",
                "{way:?} {arguments:?}"
            );
        }
    }
}

#[test]
fn options_reach_the_program_as_variables_and_win_over_the_environment() {
    let mut command = run(&["run", "--retain", "4G", "--huge-pages=off"], &["env"]);
    let output = command.env("PAGECREW_RETAIN", "1G").env("PAGECREW_DECAY", "3s").output().unwrap();
    let text = out(&output);
    let mut ours: Vec<_> = text.lines().filter(|line| line.starts_with("PAGECREW_")).collect();
    ours.retain(|line| !line.starts_with("PAGECREW_PRELOAD="));
    ours.sort_unstable();
    assert_eq!(ours, ["PAGECREW_CHECKED=1", "PAGECREW_DECAY=3s", "PAGECREW_HUGE_PAGES=off", "PAGECREW_RETAIN=4G"]);
}

#[test]
fn only_the_program_below_keeps_its_counters() {
    let text = out(&run(WAYS[1], &["sh", "-c", "echo $$; echo $PAGECREW_STATS_KEEP"]).output().unwrap());
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], lines[1]);
    assert_eq!(out(&run(WAYS[0], &["sh", "-c", "echo $PAGECREW_STATS_KEEP"]).output().unwrap()), "\n");
}

#[test]
fn what_was_preloaded_comes_behind() {
    let other = compile("other.so", "", &["-shared", "-fPIC"]);
    let show = ["sh", "-c", "echo $LD_PRELOAD"];
    let text = out(&run(WAYS[0], &show).env("LD_PRELOAD", &other).output().unwrap());
    let ours = empty_library().canonicalize().unwrap();
    assert_eq!(text.trim(), format!("{}:{}", ours.display(), other.display()));
    // `run` below `run` does not add it again.
    let nested = [&["run", env!("CARGO_BIN_EXE_pagecrew"), "run"], &show[..]].concat();
    assert_eq!(out(&pagecrew(&nested).output().unwrap()).trim(), ours.display().to_string());
}

#[test]
fn the_library_is_loaded() {
    let maps = out(&run(WAYS[0], &["cat", "/proc/self/maps"]).output().unwrap());
    assert!(maps.contains("empty.so"), "{maps}");
}

#[test]
fn signal_dispositions_are_those_that_the_command_was_started_with() {
    let show = ["grep", "^Sig[BI]", "/proc/self/status"];
    for ignored in [None, Some(libc::SIGPIPE), Some(libc::SIGCHLD), Some(libc::SIGHUP)] {
        let prepare = |command: &mut Command| {
            // SAFETY: `signal` may be called between fork and exec.
            unsafe {
                command.pre_exec(move || {
                    ignored.map(|signal| libc::signal(signal, libc::SIG_IGN));
                    Ok(())
                })
            };
            out(&command.output().unwrap())
        };
        let expected = prepare(Command::new(show[0]).args(&show[1..]));
        for way in WAYS {
            assert_eq!(prepare(&mut run(way, &show)), expected, "{way:?} {ignored:?}");
        }
    }
}

#[test]
fn no_descriptor_of_ours_stays_open() {
    let count = |command: &mut Command| out(&command.output().unwrap()).lines().count();
    let expected = count(Command::new("ls").arg("/proc/self/fd"));
    let file = directory().join("descriptors.json");
    let ways = [WAYS[0], WAYS[1], &["run", "--stats-json", file.to_str().unwrap()]];
    for way in ways {
        assert_eq!(count(&mut run(way, &["ls", "/proc/self/fd"])), expected, "{way:?}");
    }
}

#[test]
fn a_script_without_an_interpreter_is_run_by_the_shell() {
    let script = executable("script", "echo \"$1\"; exit 5\n");
    for way in WAYS {
        let output = run(way, &[script.to_str().unwrap(), "argument"]).output().unwrap();
        assert_eq!((out(&output).as_str(), output.status.code()), ("argument\n", Some(5)), "{way:?}");
    }
}

#[test]
fn what_the_kernel_refuses_at_the_last_moment_is_said() {
    // The loader is there; that it is none is found out by the kernel.
    let loader = executable("no-loader", "text");
    let flag = format!("-Wl,--dynamic-linker={}", loader.display());
    let program = compile("refused", common::NOTHING, &[&flag]);
    for way in WAYS {
        fails(run(way, &[program.to_str().unwrap()]), 2, &["refused can't be run"]);
    }
}

#[test]
fn the_summary_is_on_standard_error_and_the_programs_output_alone_on_standard_output() {
    let output = run(WAYS[1], &["echo", "hello"]).output().unwrap();
    assert_eq!(out(&output), "hello\n");
    let text = err(&output);
    assert!(text.starts_with("pagecrew: echo (exit status 0") && text.contains("peak resident memory"), "{text}");
    assert!(text.contains("none used"), "{text}");
}

#[test]
fn a_closed_standard_error_does_not_change_the_exit_status() {
    let mut child = run(WAYS[1], &["sh", "-c", "sleep 0.1; exit 9"]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

#[test]
fn the_json_summary_has_status_time_and_memory() {
    let file = directory().join("summary.json");
    let output = run(&["run", "--stats-json", file.to_str().unwrap()], &["sh", "-c", "exit 4"]).output().unwrap();
    assert_eq!((output.status.code(), err(&output).as_str()), (Some(4), ""));
    let document: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(document["exit_status"], 4);
    assert!(document["signal"].is_null() && document["counters"].is_null());
    assert!(
        document["wall_seconds"].as_f64().unwrap() > 0.0 && document["peak_rss_bytes"].as_u64().unwrap() > 100 << 10
    );
}
