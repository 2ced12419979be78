//! Whether `run` has what it needs of ours: the library, and a place for the counters.

use super::check::Check;
use crate::{inspect, preload};
use pagecrew::stats::{self, StatsPage};
use std::path::Path;
use std::process::{Command, Stdio};

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![library(), counters()]
}

fn library() -> Check {
    const NAME: &str = "preload library";
    let missing = |found: String| {
        Check::missing(
            NAME,
            found,
            "nothing works without it",
            "install libpagecrew_preload.so beside the pagecrew command or in ../lib, or set PAGECREW_PRELOAD",
        )
        .needed()
    };
    let path = match preload::find() {
        Ok(path) => path,
        Err(why) => return missing(why.to_string()),
    };
    if let Err(why) = inspect::check_library(&path) {
        return missing(why.to_string());
    }
    match load(&path) {
        Ok(()) => Check::ok(NAME, path.display().to_string()).needed(),
        Err(why) => missing(why),
    }
}

/// Loads the library into a program that does nothing. What the loader does not like goes to standard error.
fn load(path: &Path) -> Result<(), String> {
    let program = inspect::find("true".as_ref()).map_err(|why| format!("true: {why}"))?;
    let output = Command::new(program)
        .env("LD_PRELOAD", path)
        .env("PAGECREW_CHECKED", "1")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    match (output.status.success(), complaint.lines().next()) {
        (true, None) => Ok(()),
        (_, Some(line)) => Err(line.to_owned()),
        (false, None) => Err(format!("a program that does nothing ended with {} under it", output.status)),
    }
}

fn counters() -> Check {
    const NAME: &str = "counters readable from outside";
    let directory = stats::directory();
    let tried = || -> Result<(), String> {
        let page = StatsPage::new().map_err(|error| error.to_string())?;
        page.share(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let result = stats::read(&directory, std::process::id());
        page.unshare();
        result.map(drop).map_err(|error| error.to_string())
    };
    match tried() {
        Ok(()) => Check::ok(NAME, directory.display().to_string()),
        Err(why) => Check::off(
            NAME,
            why,
            "`pagecrew stats` and `run --stats` have nothing to read",
            "mount a tmpfs on /dev/shm (mode 1777), or set PAGECREW_STATS_DIR to a directory of your own with mode 0700",
        ),
    }
}
