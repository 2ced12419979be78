//! The setting that says how far apart the watermarks are, `vm.watermark_scale_factor` (4.6), as this process changes it.

use crate::group::{Guard, Lock, LockError, Marker, Ours, Undo};
use crate::sys::Errno;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where it is.
pub const PATH: &str = "/proc/sys/vm/watermark_scale_factor";

/// Why the setting can't be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FactorError {
    /// Another process changes it.
    Taken,
    /// A file can't be opened, read or written.
    Refused(PathBuf, Errno),
    /// There can be no guard, without which a kill would leave the setting changed.
    NoGuard(Errno),
}

impl fmt::Display for FactorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FactorError::Taken => write!(f, "another pagecrew reclaim runs already"),
            FactorError::Refused(path, errno) => write!(f, "{}: {errno}", path.display()),
            FactorError::NoGuard(errno) => {
                write!(
                    f,
                    "no guard process can be started, and without one a kill would leave the setting changed: {errno}"
                )
            }
        }
    }
}

impl std::error::Error for FactorError {}

/// The setting. It has its operator's value again as soon as this is dropped or the process has ended, whatever the way: a child process, the
/// *guard*, sees to that. If both are killed at once, the next one finds out by what is written in the lock's file, and begins with the
/// operator's value.
#[derive(Debug)]
pub struct Factor {
    control: File,
    path: PathBuf,
    /// The operator's.
    before: u64,
    now: u64,
    ours: Ours,
    /// `None` once somebody else has changed the setting: then it is theirs.
    guard: Option<Guard>,
    found_one_left: bool,
    /// Free when the guard has ended; dropped after it.
    lock: Lock,
}

impl Factor {
    /// Takes the machine's setting.
    ///
    /// # Errors
    /// See [`FactorError`].
    pub fn take() -> Result<Factor, FactorError> {
        Factor::take_at(Path::new(PATH), "watermark_scale_factor")
    }

    fn take_at(path: &Path, name: &str) -> Result<Factor, FactorError> {
        let refused = |errno| FactorError::Refused(path.to_owned(), errno);
        let control = OpenOptions::new().read(true).write(true).open(path).map_err(Errno::from).map_err(refused)?;
        let lock = Lock::named(name)?.ok_or(FactorError::Taken)?;
        let mut found = read(&control).map_err(refused)?;
        let mut found_one_left = false;
        // Any other number is somebody else's.
        if let Some(Marker::High { before: Some(before), ours }) = lock.marker()
            && found != before
            && ours.contains(&Some(found))
        {
            write(&control, before).map_err(refused)?;
            (found, found_one_left) = (before, true);
        }
        lock.mark(None)?;
        let ours = Ours::new().map_err(FactorError::NoGuard)?;
        let undo = Undo::Number { before: &text(found), ours: &ours };
        let guard = Guard::start(&control, &lock.file, undo).map_err(FactorError::NoGuard)?;
        let path = path.to_owned();
        Ok(Factor { control, path, before: found, now: found, ours, guard: Some(guard), found_one_left, lock })
    }

    /// The operator's value.
    pub fn before(&self) -> u64 {
        self.before
    }

    /// The value that it has, unless somebody else has changed it.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Whether the setting was still as a process had left it that was killed together with its guard. The operator's was put back first.
    pub fn found_one_left(&self) -> bool {
        self.found_one_left
    }

    /// Whether the guard lives, where there has to be one. Without it the setting would stay changed if this process were killed: drop this
    /// then, and take it anew.
    pub fn guarded(&self) -> bool {
        self.guard.as_ref().is_none_or(Guard::lives)
    }

    /// Gives the setting this value. Returns false, from then on always, where somebody else has changed it: then it is theirs.
    ///
    /// # Errors
    /// [`FactorError::Refused`].
    pub fn set(&mut self, value: u64) -> Result<bool, FactorError> {
        if self.guard.is_none() {
            return Ok(false);
        }
        let refused = |errno| FactorError::Refused(self.path.clone(), errno);
        if read(&self.control).map_err(refused)? != self.now {
            self.guard = None;
            self.lock.mark(None)?;
            return Ok(false);
        }
        if value != self.now {
            let marker = Marker::High { before: Some(self.before), ours: [Some(self.now), Some(value)] };
            self.lock.mark(Some(&marker))?;
            self.ours.change(value, || write(&self.control, value)).map_err(refused)?;
            self.now = value;
            if value == self.before {
                self.lock.mark(None)?;
            }
        }
        Ok(true)
    }
}

impl Factor {
    /// Puts it back, for good, and lets others take it.
    pub fn release(&mut self) {
        let _ = self.set(self.before);
        // It writes once more, so nobody else may have the setting before it has ended.
        drop(self.guard.take());
        self.lock.release();
    }
}

impl Drop for Factor {
    fn drop(&mut self) {
        self.release();
    }
}

impl From<LockError> for FactorError {
    fn from(LockError(path, errno): LockError) -> FactorError {
        FactorError::Refused(path, errno)
    }
}

fn read(control: &File) -> Result<u64, Errno> {
    let mut buffer = [0; 32];
    let count = control.read_at(&mut buffer, 0)?;
    let text = std::str::from_utf8(&buffer[..count]).map_err(|_| Errno(libc::EILSEQ))?;
    text.lines().next().and_then(|line| line.trim().parse().ok()).ok_or(Errno(libc::EILSEQ))
}

fn text(value: u64) -> String {
    format!("{value}\n")
}

fn write(control: &File, value: u64) -> Result<(), Errno> {
    Ok(control.write_all_at(text(value).as_bytes(), 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// A made-up setting, and a name for its lock.
    fn setting(value: u64) -> (tempfile::NamedTempFile, String) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text(value)).unwrap();
        let name = file.path().file_name().unwrap().to_str().unwrap().to_owned();
        (file, name)
    }

    fn value(file: &tempfile::NamedTempFile) -> u64 {
        read(file.as_file()).unwrap()
    }

    #[test]
    fn it_is_the_operators_again_in_the_end() {
        let (file, name) = setting(10);
        let mut factor = Factor::take_at(file.path(), &name).unwrap();
        assert_eq!((factor.before(), factor.now(), factor.guarded()), (10, 10, true));
        assert_eq!(Factor::take_at(file.path(), &name).err(), Some(FactorError::Taken));
        for wanted in [200, 123, 200] {
            assert_eq!(factor.set(wanted), Ok(true));
            assert_eq!((factor.now(), value(&file)), (wanted, wanted));
        }
        drop(factor);
        assert_eq!(value(&file), 10);
        assert!(!Factor::take_at(file.path(), &name).unwrap().found_one_left());
    }

    #[test]
    fn what_somebody_else_has_set_is_theirs() {
        let (file, name) = setting(10);
        let mut factor = Factor::take_at(file.path(), &name).unwrap();
        assert_eq!(factor.set(200), Ok(true));
        std::fs::write(file.path(), text(77)).unwrap();
        assert_eq!((factor.set(300), value(&file)), (Ok(false), 77));
        // Not even if it is what it was in between.
        std::fs::write(file.path(), text(200)).unwrap();
        assert_eq!((factor.set(300), value(&file)), (Ok(false), 200));
        drop(factor);
        assert_eq!(value(&file), 200);
        let next = Factor::take_at(file.path(), &name).unwrap();
        assert_eq!((next.before(), next.found_one_left()), (200, false));
    }

    #[test]
    fn the_guard_alone_puts_it_back() {
        let (file, name) = setting(10);
        let mut factor = Factor::take_at(file.path(), &name).unwrap();
        assert_eq!(factor.set(200), Ok(true));
        // As if this process had ended.
        factor.guard = None;
        assert_eq!((value(&file), factor.lock.marker()), (10, None));
    }

    #[test]
    fn what_was_left_by_a_process_and_its_guard_is_put_back_by_the_next() {
        let (file, name) = setting(10);
        for (found, before) in [(200, 10), (300, 10), (77, 77), (10, 10)] {
            let mut factor = Factor::take_at(file.path(), &name).unwrap();
            assert_eq!(factor.set(200), Ok(true));
            // SAFETY: a child that was not waited for.
            assert_eq!(unsafe { libc::kill(factor.guard.as_ref().unwrap().process, libc::SIGKILL) }, 0);
            while factor.guarded() {
                std::thread::yield_now();
            }
            let path = factor.lock.path().to_owned();
            drop(factor);
            std::fs::write(&path, "high 10 200 300\n").unwrap();
            std::fs::write(file.path(), text(found)).unwrap();
            let next = Factor::take_at(file.path(), &name).unwrap();
            assert_eq!(
                (next.before(), value(&file), next.found_one_left()),
                (before, before, found != before),
                "{found}"
            );
            drop(next);
            std::fs::write(file.path(), text(10)).unwrap();
        }
    }

    #[test]
    #[ignore = "the process that another test kills"]
    fn a_process_that_changes_it() {
        let Some(path) = std::env::var_os("PAGECREW_TEST_SETTING") else { return };
        let path = PathBuf::from(path);
        let mut factor = once_free(&path, path.file_name().unwrap().to_str().unwrap());
        for value in (11..=1000).cycle() {
            assert_eq!(factor.set(value), Ok(true));
        }
    }

    /// Takes it over from one that was killed, whose guard has the lock until it has done its work. It is as it was before.
    fn once_free(path: &Path, name: &str) -> Factor {
        let begin = Instant::now();
        let factor = loop {
            match Factor::take_at(path, name) {
                Err(FactorError::Taken) if begin.elapsed() < Duration::from_secs(30) => {
                    std::thread::sleep(Duration::from_micros(50));
                }
                taken => break taken.unwrap(),
            }
        };
        let now = read(&File::open(path).unwrap()).unwrap();
        assert_eq!((factor.before(), now, factor.found_one_left()), (10, 10, false));
        factor
    }

    // The process of each round looks at what the round before has left, not this one: it would fork a guard a round, and the tests beside
    // it would have to copy every page that they write to, 300 times.
    #[test]
    fn whenever_it_is_killed_it_is_the_operators_again() {
        let (file, name) = setting(10);
        for round in 0..300u64 {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "reclaim::factor::tests::a_process_that_changes_it", "--ignored", "--quiet"]);
            command.env("PAGECREW_TEST_SETTING", file.path()).stdout(std::process::Stdio::null());
            let mut child = command.spawn().unwrap();
            while value(&file) == 10 {
                assert_eq!(child.try_wait().unwrap(), None, "round {round}: it ended by itself");
                std::thread::sleep(Duration::from_micros(50));
            }
            std::thread::sleep(Duration::from_micros(round * 7919 % 3000));
            child.kill().unwrap();
            child.wait().unwrap();
            let killed = Instant::now();
            while value(&file) != 10 {
                assert!(killed.elapsed() < Duration::from_secs(30), "round {round}: it is {}", value(&file));
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        once_free(file.path(), &name);
    }

    #[test]
    fn the_kernel_makes_of_it_what_we_think() {
        use crate::reclaim::watermarks::Watermarks;
        use crate::sys::vmstat::Zone;
        let zones = crate::sys::vmstat::zones().unwrap();
        let factor = read(&File::open(PATH).unwrap()).unwrap();
        for zone in &zones {
            let gap = Watermarks::of(0, &[Zone { node: 0, ..*zone }]).gap(factor);
            // Both round to pages.
            assert!(gap.abs_diff(zone.low - zone.min) <= 8192, "{gap}, {zone:?}");
        }
    }

    #[test]
    fn without_the_setting_there_is_an_error() {
        let missing = Path::new("/proc/sys/vm/no_such_setting");
        let error = Factor::take_at(missing, "no-such-setting").err().unwrap();
        assert!(error.to_string().contains("no_such_setting: No such file"), "{error}");
        let (file, name) = setting(10);
        std::fs::write(file.path(), "ten\n").unwrap();
        assert!(matches!(Factor::take_at(file.path(), &name), Err(FactorError::Refused(..))));
    }
}
