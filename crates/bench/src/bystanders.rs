//! Programs that need nothing but their CPU, one on each, and how far they get.

use crate::contestant::Contestant;
use crate::machine;
use crate::program::{Running, worker};
use crate::worker::BYSTANDER_STRIDE;
use anyhow::{Result, ensure};
use pagecrew::sys::PAGE_SIZE;
use pagecrew::sys::clock::now_ns;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// New programs need a moment until they run at full speed.
const SETTLE: Duration = Duration::from_millis(300);

/// One program pinned to each CPU. They are ended where this is dropped.
pub struct Bystanders {
    counters: Counters,
    programs: Vec<Running>,
}

impl Bystanders {
    /// Starts them; they run at full speed when this returns.
    ///
    /// # Errors
    /// If they can't be started.
    pub fn start() -> Result<Bystanders> {
        let counters = Counters::new()?;
        let cpus = machine::cpus()?;
        ensure!(cpus.len() * BYSTANDER_STRIDE <= PAGE_SIZE, "more CPUs than there are counters");
        let start = |(index, cpu): (usize, &usize)| {
            let arguments = ["bystander", &cpu.to_string(), &counters.path(), &index.to_string()];
            Running::start(&mut worker(&Contestant::plain("bystander"), &arguments))
        };
        let programs = cpus.iter().enumerate().map(start).collect::<Result<_>>()?;
        std::thread::sleep(SETTLE);
        Ok(Bystanders { counters, programs })
    }

    /// What they have done until now.
    pub fn sample(&self) -> Sample {
        self.counters.sample(self.programs.len())
    }
}

/// What each bystander had done at a time.
pub struct Sample {
    pub time_ns: u64,
    pub work: Vec<u64>,
}

/// A page that the bystanders count in.
struct Counters {
    file: OwnedFd,
    page: usize,
}

impl Counters {
    fn new() -> Result<Counters> {
        // SAFETY: the name is a C string.
        let file = unsafe { libc::memfd_create(c"pagecrew bystanders".as_ptr(), libc::MFD_CLOEXEC) };
        ensure!(file >= 0, "no memory for the counters: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // SAFETY: a new mapping of the file, which is made long enough first.
        let page = unsafe {
            libc::ftruncate(file.as_raw_fd(), PAGE_SIZE as i64);
            libc::mmap(std::ptr::null_mut(), PAGE_SIZE, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        ensure!(page != libc::MAP_FAILED, "the counters can't be mapped: {}", std::io::Error::last_os_error());
        Ok(Counters { file, page: page as usize })
    }

    /// The page as a file that a child of this process can open.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    fn sample(&self, count: usize) -> Sample {
        let counter = |index: usize| {
            // SAFETY: aligned, inside the mapping, and only ever used as an atomic number.
            unsafe { &*((self.page + index * BYSTANDER_STRIDE) as *const AtomicU64) }.load(Ordering::Relaxed)
        };
        Sample { time_ns: now_ns(), work: (0..count).map(counter).collect() }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it is left.
        unsafe { libc::munmap(self.page as *mut _, PAGE_SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_start_at_zero_and_have_a_path() {
        let counters = Counters::new().unwrap();
        assert_eq!(counters.sample(2).work, [0, 0]);
        assert!(std::fs::metadata(counters.path()).is_ok());
    }
}
