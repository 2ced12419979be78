//! A program with a working set in the page cache and small allocations, whom others' reading should not hurt.

use super::block::{Block, Origin};
use super::delays::reclaim_ns_of_this_thread;
use super::keep::until_the_end;
use super::say;
use anyhow::{Context, Result, bail};
use pagecrew::sys::PAGE_SIZE;
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::shared_file::Mapped;
use std::fs::File;
use std::hint::black_box;
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// All of the working set is used within so long.
const ROUND: Duration = Duration::from_millis(500);
/// So many parts of it are used one after the other, each with a pause behind it.
const PARTS: usize = 50;
/// A small allocation, and the time from one to the next.
const SMALL: usize = 64 << 10;
const EACH: Duration = Duration::from_millis(1);

/// Uses all of the file at `path`, again and again, and takes and gives back a little memory a thousand times a second, from when it says so
/// to the end of its input. Says how often it had to wait for the disk, and the time in microseconds that 999 of 1,000 allocations took at
/// most: with all that they waited for, and without what they waited for a CPU, which others use; and the seconds for which it has reclaimed for
/// itself, 0 where the kernel does not say.
pub fn run(path: &Path, input: impl BufRead) -> Result<()> {
    let file = File::options().read(true).write(true).open(path).with_context(|| path.display().to_string())?;
    let len = file.metadata()?.len() as usize;
    let mapped = Mapped::unchanged(&file, 0, len)?;
    let pages: Vec<usize> = (0..len).step_by(PAGE_SIZE).map(|offset| mapped.range().start + offset).collect();
    // Used more than once, it counts as a working set.
    (0..3).for_each(|_| use_all(&pages));
    let over = AtomicBool::new(false);
    let before = waits()?;
    let (taken, reclaim_ns) = std::thread::scope(|scope| -> Result<(Vec<(u64, u64)>, u64)> {
        let all = scope.spawn(|| {
            for part in pages.chunks(pages.len().div_ceil(PARTS).max(1)).cycle().take_while(|_| !over.load(Relaxed)) {
                use_all(part);
                std::thread::sleep(ROUND / PARTS as u32);
            }
            reclaim_ns_of_this_thread()
        });
        let small = scope.spawn(|| -> Result<(Vec<(u64, u64)>, u64)> {
            let mut taken = Vec::new();
            let turns = Turns::of_this_thread()?;
            while !over.load(Relaxed) {
                let (waited, begin) = (turns.waited_ns()?, now_ns());
                let block = Block::new(Origin::Map, SMALL)?.without_huge_pages();
                block.touch();
                drop(block);
                let all = now_ns() - begin;
                taken.push((all, all.saturating_sub(turns.waited_ns()? - waited)));
                std::thread::sleep(EACH);
            }
            Ok((taken, reclaim_ns_of_this_thread()))
        });
        say("")?;
        until_the_end(input)?;
        over.store(true, Relaxed);
        let (taken, reclaim_ns) = small.join().unwrap_or_else(|_| bail!("a thread panicked"))?;
        Ok((taken, reclaim_ns + all.join().unwrap_or(0)))
    })?;
    say(waits()? - before)?;
    let (all, without): (Vec<u64>, Vec<u64>) = taken.into_iter().unzip();
    for samples in [all, without] {
        say(slowest_of_thousand(samples).context("nothing was allocated")? as f64 / 1e3)?;
    }
    say(reclaim_ns as f64 / 1e9)
}

/// For how long a thread was ready to run and another one had the CPU.
struct Turns(File);

impl Turns {
    fn of_this_thread() -> Result<Turns> {
        const PATH: &str = "/proc/thread-self/schedstat";
        File::open(PATH).context(PATH).map(Turns)
    }

    fn waited_ns(&self) -> Result<u64> {
        let mut buffer = [0; 128];
        let count = self.0.read_at(&mut buffer, 0)?;
        let text = std::str::from_utf8(&buffer[..count])?;
        // Time on a CPU, time waiting for one, and how often.
        text.split_ascii_whitespace().nth(1).and_then(|ns| ns.parse().ok()).context("schedstat")
    }
}

fn use_all(pages: &[usize]) {
    for &page in pages {
        // SAFETY: a page of the mapping, which is there as long as its user; the file is not made shorter.
        black_box(unsafe { std::ptr::read_volatile(page as *const u8) });
    }
}

/// How often this process had to wait for a disk.
fn waits() -> Result<i64> {
    // SAFETY: all zeroes is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a place for the result.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } != 0 {
        return Err(std::io::Error::last_os_error()).context("getrusage");
    }
    Ok(usage.ru_majflt)
}

/// What 999 of 1,000 are at most.
fn slowest_of_thousand(mut samples: Vec<u64>) -> Option<u64> {
    samples.sort_unstable();
    samples.get((samples.len() * 999).div_ceil(1000).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagecrew::sys::sched::{self, CpuSet};

    #[test]
    fn of_a_thousand_the_slowest_is_left_out() {
        assert_eq!(slowest_of_thousand(Vec::new()), None);
        assert_eq!(slowest_of_thousand(vec![7]), Some(7));
        assert_eq!(slowest_of_thousand((1..=1000).rev().collect()), Some(999));
        assert_eq!(slowest_of_thousand((1..=3000).collect()), Some(2997));
    }

    #[test]
    fn the_time_for_which_others_had_the_cpu_is_known() {
        let turns = Turns::of_this_thread().unwrap();
        let before = turns.waited_ns().unwrap();
        // On one CPU with another thread that never sleeps.
        let over = AtomicBool::new(false);
        let mut one = CpuSet::new();
        one.insert(sched::current_cpu());
        std::thread::scope(|scope| {
            let affinity = sched::affinity().unwrap();
            sched::set_affinity(&one).unwrap();
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    std::hint::spin_loop()
                }
            });
            let begin = now_ns();
            while now_ns() - begin < 200_000_000 {}
            over.store(true, Relaxed);
            sched::set_affinity(&affinity).unwrap();
        });
        let waited = turns.waited_ns().unwrap() - before;
        assert!(waited > 20_000_000, "{waited} ns");
    }

    #[test]
    fn a_file_that_is_in_memory_is_not_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 3 * PAGE_SIZE]).unwrap();
        run(file.path(), &b""[..]).unwrap_or_else(|error| assert!(error.to_string().contains("nothing"), "{error}"));
        assert!(run(Path::new("/nonexistent"), &b""[..]).is_err());
    }
}
