//! Changes outside this program that must not outlive the bench, however that ends: each is made by a process of its
//! own, which undoes it when its input ends. No signal that a person ends a bench with ends it before.

use super::disk::output;
use super::say;
use anyhow::{Context, Error, Result, ensure};
use pagecrew::sys::mount::{self, MemoryFs};
use pagecrew::sys::vmstat;
use std::fs;
use std::io::{BufRead, ErrorKind};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the kernel may take to let go of a control group whose last process has ended.
const PATIENCE: Duration = Duration::from_secs(5);

/// Lives on where its parent is killed, or a person interrupts the whole group.
pub fn ignore_ends() {
    // SAFETY: neither the constants nor SIG_IGN refer to memory.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, 0);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// Writes `value` to the file `path`, says so, and at the end of its input writes back what was there.
pub fn setting(path: &Path, value: &str, input: impl BufRead) -> Result<()> {
    let name = || path.display().to_string();
    let before = fs::read_to_string(path).with_context(name)?;
    fs::write(path, value).with_context(name)?;
    let said = say("").and_then(|()| until_the_end(input));
    fs::write(path, before.trim_end()).with_context(name)?;
    said
}

/// Gives the kernel's reclaim threads the nice value `value`, says so, and at the end of its input gives them back the one that each had.
pub fn nice_kswapd(value: i32, input: impl BufRead) -> Result<()> {
    let mut threads = Vec::new();
    for (_, thread) in vmstat::kswapds() {
        // SAFETY: no memory is involved. What is no nice value is an error, and the thread is the kernel's own and stays.
        threads.push((thread, unsafe { libc::getpriority(libc::PRIO_PROCESS, thread as libc::id_t) }));
    }
    ensure!(!threads.is_empty(), "the kernel's reclaim threads can't be seen");
    let set = |thread: libc::pid_t, value| {
        // SAFETY: as above.
        match unsafe { libc::setpriority(libc::PRIO_PROCESS, thread as libc::id_t, value) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()).with_context(|| format!("nice {value} for kswapd")),
        }
    };
    let given = threads.iter().try_for_each(|&(thread, _)| set(thread, value));
    let said = given.and_then(|()| say("")).and_then(|()| until_the_end(input));
    threads.iter().try_for_each(|&(thread, before)| set(thread, before)).and(said)
}

/// Makes the control group `path`, says so, and at the end of its input ends what is in it and removes it.
pub fn group(path: &Path, input: impl BufRead) -> Result<()> {
    let name = || path.display().to_string();
    fs::create_dir(path).with_context(name)?;
    let said = say("").and_then(|()| until_the_end(input));
    let start = Instant::now();
    loop {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && start.elapsed() < PATIENCE => {
                end_members(path);
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other.with_context(name).and(said),
        }
    }
}

/// Makes the directory `path`, mounts a hugetlbfs with pages of 2 MiB there, says so, and removes both at the end of its input.
pub fn hugetlbfs(path: &Path, input: impl BufRead) -> Result<()> {
    let name = || path.display().to_string();
    fs::create_dir(path).with_context(name)?;
    let kept = match mount::mount(MemoryFs::Hugetlbfs, path, "pagesize=2M,mode=0700") {
        Ok(()) => {
            let said = say("").and_then(|()| until_the_end(input));
            mount::detach(path).map_err(Error::from).and(said)
        }
        Err(error) => Err(error.into()),
    };
    kept.with_context(|| format!("a hugetlbfs at {}", path.display())).and(fs::remove_dir(path).with_context(name))
}

/// Adds `bytes` of swap in compressed memory (zram, 4.2), says so, and takes it away at the end of its input.
pub fn swap(bytes: usize, input: impl BufRead) -> Result<()> {
    const ADD: &str = "/sys/class/zram-control/hot_add";
    // Reading it makes a device.
    let number: u32 = fs::read_to_string(ADD).context(ADD)?.trim().parse().context(ADD)?;
    let device = format!("/dev/zram{number}");
    let make = || -> Result<()> {
        fs::write(format!("/sys/block/zram{number}/disksize"), bytes.to_string()).context("the size of zram")?;
        output(Command::new("mkswap").arg(&device))?;
        output(Command::new("swapon").args(["--priority", "100", &device])).map(drop)
    };
    let made = make();
    let on = made.is_ok();
    let said = made.and_then(|()| say("")).and_then(|()| until_the_end(input));
    let off = if on { output(Command::new("swapoff").arg(&device)).map(drop) } else { Ok(()) };
    let removed = fs::write("/sys/class/zram-control/hot_remove", number.to_string()).context("zram");
    off.and(removed).and(said)
}

/// Kills what is in the control group `path`.
fn end_members(path: &Path) {
    for member in fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
        if let Some(process) = member.parse().ok().filter(|&process: &i32| process > 1) {
            // SAFETY: no memory is involved; the group was made for processes of the bench only.
            unsafe { libc::kill(process, libc::SIGKILL) };
        }
    }
}

/// Waits until nobody can write to `input` any more.
pub fn until_the_end(mut input: impl BufRead) -> Result<()> {
    let mut line = String::new();
    while input.read_line(&mut line)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufReader, Read};

    /// Input that ends, but not before `look` has been at what is there until then.
    struct Looking<F: FnMut()>(F);

    impl<F: FnMut()> Read for Looking<F> {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            (self.0)();
            Ok(0)
        }
    }

    #[test]
    fn a_setting_is_changed_for_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("setting");
        fs::write(&path, "511\n").unwrap();
        let mut meanwhile = String::new();
        setting(&path, "409", BufReader::new(Looking(|| meanwhile = fs::read_to_string(&path).unwrap()))).unwrap();
        assert_eq!((meanwhile.as_str(), fs::read_to_string(&path).unwrap().as_str()), ("409", "511"));
        assert!(setting(Path::new("/nonexistent/setting"), "409", &b""[..]).is_err());
    }

    #[test]
    fn a_group_is_there_for_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("group");
        let mut meanwhile = false;
        group(&path, BufReader::new(Looking(|| meanwhile = path.is_dir()))).unwrap();
        assert!(meanwhile && !path.exists());
    }

    #[test]
    fn a_hugetlbfs_is_there_for_a_while_or_nothing_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("huge");
        let mut meanwhile = None;
        let look = Looking(|| meanwhile = mount::mounted_at(&path).unwrap());
        let kept = hugetlbfs(&path, BufReader::new(look));
        // Not everybody may mount.
        assert_eq!(kept.is_ok(), meanwhile == Some(MemoryFs::Hugetlbfs), "{kept:?}");
        assert!(!path.exists());
    }
}
