//! The server of `pagecrew pool` for as long as a bench lasts, with everything of it in one directory.

use super::keep::until_the_end;
use super::say;
use crate::program::pagecrew;
use anyhow::{Context, Result, bail};
use pagecrew::pool::Client;
use pagecrew::sys::mount;
use std::fs::{self, File};
use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the server may take until it listens, and how long to end, which includes that its memory goes back.
const PATIENCE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(2);

/// The exit status of a command that this kernel or this user can't have.
const NOT_POSSIBLE: i32 = 3;

/// What clients connect to, of a server in `base`.
pub fn socket(base: &Path) -> PathBuf {
    base.join("socket")
}

/// Runs `pagecrew pool serve` with `options`, says so by an empty line, or says why it can't be had here, and ends it
/// at the end of its input. Nothing of it is left then.
pub fn run(base: &Path, options: &[String], input: impl BufRead) -> Result<()> {
    let directory = base.join("run");
    fs::create_dir(base).with_context(|| base.display().to_string())?;
    let result = serve(base, &directory, options, input);
    // A server that was killed leaves its mount.
    let _ = mount::detach(&directory.join("mem"));
    fs::remove_dir_all(base).with_context(|| base.display().to_string()).and(result)
}

fn serve(base: &Path, directory: &Path, options: &[String], input: impl BufRead) -> Result<()> {
    let socket = socket(base);
    let log = base.join("log");
    let output = File::create(&log)?;
    // What an operator has set must not count.
    let settings = base.join("pagecrew.toml");
    File::create(&settings)?;
    let mut command = pagecrew(&["pool", "serve"]);
    command.arg("--directory").arg(directory).arg("--socket").arg(&socket);
    command.arg("--config").arg(&settings).args(options);
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    // SAFETY: between fork and exec the closure makes system calls and touches no memory of its parent's.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            // What this process ignores, its child would.
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
    let mut server = command.spawn().context("pagecrew pool serve can't be started")?;
    let served = until_it_listens(&mut server, &socket).and_then(|ended| match ended {
        None => say("").and_then(|()| until_the_end(input)),
        Some(status) if status.code() == Some(NOT_POSSIBLE) => say(last_words(&log)),
        Some(status) => bail!("pagecrew pool serve: {status}: {}", last_words(&log)),
    });
    let status = end(&mut server)?;
    match status.code() {
        Some(0 | NOT_POSSIBLE) => served,
        _ => served.and_then(|()| bail!("pagecrew pool serve: {status}: {}", last_words(&log))),
    }
}

/// Waits until `server` listens, or has ended: then its status comes back.
fn until_it_listens(server: &mut Child, socket: &Path) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = server.try_wait()? {
            return Ok(Some(status));
        }
        if Client::connect(socket).is_ok() {
            return Ok(None);
        }
        if start.elapsed() > PATIENCE {
            bail!("pagecrew pool serve doesn't listen after {PATIENCE:?}");
        }
        std::thread::sleep(STEP);
    }
}

/// Has `server` end, and sees to it.
fn end(server: &mut Child) -> Result<ExitStatus> {
    if server.try_wait()?.is_none() {
        // SAFETY: no memory is involved; the child was not waited for, so the number is still its own.
        unsafe { libc::kill(server.id() as i32, libc::SIGTERM) };
    }
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = server.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(STEP);
    }
    server.kill()?;
    Ok(server.wait()?)
}

/// The last line of `log`, as people read it.
fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    line.trim().trim_start_matches("pagecrew: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_said_last() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        assert_eq!(last_words(&log), "it said nothing");
        fs::write(&log, "pagecrew: started\npagecrew: mounting a tmpfs takes root\n\n").unwrap();
        assert_eq!(last_words(&log), "mounting a tmpfs takes root");
    }

    #[test]
    fn a_directory_that_is_there_already_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        assert!(run(directory.path(), &[], &b""[..]).is_err());
        assert!(directory.path().is_dir());
    }
}
