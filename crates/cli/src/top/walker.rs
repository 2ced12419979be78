//! Looks at the memory of processes within a budget of CPU time: the kernel takes the longer for a look the more memory a process has.

use super::candidates::{Candidates, Look, Report};
use super::service::Service;
use crate::output::printable;
use pagecrew::control::Bucket;
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use pagecrew::sys::{Errno, process_list, smaps};
use std::path::PathBuf;
use std::time::Duration;

/// The share of one CPU that looks may take.
const SHARE: f64 = 0.002;
/// What was not used for so long is saved: enough to look at hundreds of ordinary processes at the beginning.
const SAVED: Duration = Duration::from_secs(15);
/// After so long it is looked which processes there are.
const LIST_NS: u64 = 10_000_000_000;

/// What has been found so far.
pub struct Walker {
    root: PathBuf,
    candidates: Candidates,
    budget: Bucket,
    listed_ns: Option<u64>,
}

impl Walker {
    /// Of the machine, or of a made-up tree.
    pub fn new(root: PathBuf) -> Walker {
        let budget = Bucket::new(SHARE * 1e9, SAVED, now_ns());
        Walker { root, candidates: Candidates::default(), budget, listed_ns: None }
    }

    /// Goes on for as long as the budget lasts, and says what is known then.
    pub fn step(&mut self) -> Service<Report> {
        // Whatever it takes to list them, one look follows.
        let mut one_more = match self.list() {
            Ok(listed) => listed,
            Err(errno) => return Service::Wrong(format!("/proc: {errno}")),
        };
        while std::mem::take(&mut one_more) || self.budget.wait(now_ns()).is_zero() {
            let Some(pid) = self.candidates.next(now_ns()) else { break };
            let begin = thread_cpu_ns();
            let look = self.look(pid);
            let took = thread_cpu_ns() - begin;
            self.budget.charge(took as f64, now_ns());
            self.candidates.note(pid, now_ns(), took, look);
        }
        Service::Here(self.candidates.report())
    }

    /// Which processes there are, unless that was asked a moment ago. Returns whether it was asked.
    fn list(&mut self) -> Result<bool, Errno> {
        let (now, begin) = (now_ns(), thread_cpu_ns());
        if self.listed_ns.is_some_and(|listed| now - listed < LIST_NS) || !self.budget.wait(now).is_zero() {
            return Ok(false);
        }
        let pids = process_list::pids(&self.root)?;
        let root = &self.root;
        self.candidates
            .note_all(pids.into_iter().filter_map(|pid| Some((pid, process_list::anonymous(root, pid).ok()?))));
        self.listed_ns = Some(now);
        self.budget.charge((thread_cpu_ns() - begin) as f64, now_ns());
        Ok(true)
    }

    /// `None` where the process has gone.
    fn look(&self, pid: u32) -> Option<Look> {
        match smaps::rollup(&self.root, pid) {
            Ok(memory) => Some(Look::Seen(printable(&process_list::name(&self.root, pid).ok()?), memory)),
            Err(Errno(libc::EACCES | libc::EPERM)) => Some(Look::Denied),
            Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn this_machine_is_walked_within_the_budget() {
        // This process is one of those that are looked at, whatever else runs here.
        let memory = std::hint::black_box(vec![1u8; 8 << 20]);
        let begin = thread_cpu_ns();
        let mut walker = Walker::new("/".into());
        let Service::Here(report) = walker.step() else { panic!("no report") };
        assert!(report.processes > 0 && report.waiting < report.processes, "{report:?}");
        // Nothing is due for the next five seconds, except what waited.
        for _ in 0..100 {
            walker.step();
        }
        // What was saved, one look more, and some for the steps themselves. A look at the test's own memory is short.
        assert!(thread_cpu_ns() - begin < 1_000_000_000);
        drop(memory);
    }

    #[test]
    fn a_made_up_machine() {
        let root = tempfile::tempdir().unwrap();
        assert!(matches!(Walker::new(root.path().into()).step(), Service::Wrong(_)));
        let process = |pid: u32, statm: &str, rollup: Option<&str>| {
            let directory = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("comm"), "na\x1bme\n").unwrap();
            fs::write(directory.join("statm"), statm).unwrap();
            if let Some(rollup) = rollup {
                fs::write(directory.join("smaps_rollup"), rollup).unwrap();
            }
        };
        let huge = "Anonymous:  8192 kB\nAnonHugePages:  4096 kB\n";
        process(1, "3000 2100 10 0 0 0 0\n", Some(huge));
        // Small; gone; garbage; without rights, for whoever is not root.
        process(2, "3000 100 10 0 0 0 0\n", Some(huge));
        process(3, "3000 2100 10 0 0 0 0\n", None);
        process(4, "garbage", Some(huge));
        process(5, "3000 2100 10 0 0 0 0\n", Some("garbage"));
        let Service::Here(report) = Walker::new(root.path().into()).step() else { panic!("no report") };
        assert_eq!((report.processes, report.waiting, report.candidates.len()), (1, 0, 1), "{report:?}");
        let candidate = &report.candidates[0];
        assert_eq!((candidate.pid, candidate.name.as_str(), candidate.memory.anon_huge), (1, "na?me", 4 << 20));
    }
}
