//! Loads that take memory fast where little is left, and what that costs those who take it.

use super::delays::reclaim_ns_of_this_thread;
use super::disk::{CHUNK, FILES};
use super::huge::{Huge, Pages};
use super::say;
use anyhow::{Context, Result, bail, ensure};
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::shared_file::Mapped;
use pagecrew::sys::vmstat::VmStat;
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

/// So many directories with so many empty files each: together they take half a gigabyte of the kernel's own memory once they were looked at.
const DIRECTORIES: usize = 96;
const NAMES: usize = 4096;
/// Of each file so much is written.
const WRITTEN: usize = 512 << 20;
/// All memory of a load of memory is used so often.
const ROUNDS: usize = 3;

/// What is done with the files of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// They are read.
    Cached,
    /// They are read, and leave nothing in the page cache (Linux 6.14).
    Uncached,
    /// They are mapped, and each page is used.
    Mapped,
    /// They are written over.
    Written,
    /// Many small ones beside them are looked at.
    Names,
}

impl Kind {
    /// The one with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn named(argument: &str) -> Result<Kind> {
        Ok(match argument {
            "cached" => Kind::Cached,
            "uncached" => Kind::Uncached,
            "mapped" => Kind::Mapped,
            "written" => Kind::Written,
            "names" => Kind::Names,
            other => bail!("there is no load called '{other}'"),
        })
    }
}

/// Has `threads` threads use the files in `directory` from one end to the other at once, each from another place on where there are more of
/// them than files. Says what [`costs`] says.
pub fn of_files(directory: &Path, threads: usize, kind: Kind) -> Result<()> {
    if kind == Kind::Names {
        make_names(directory)?;
    }
    costs(threads, |number| use_files(directory, number, kind))
}

/// Has `threads` threads use `bytes` of memory, as far as these are whole huge pages, each a part of them, again and again.
pub fn of_memory(bytes: usize, threads: usize) -> Result<()> {
    let bytes = bytes / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    let memory = Huge::new(bytes, Pages::Small)?;
    let part = bytes / threads.max(1) / PAGE_SIZE * PAGE_SIZE;
    costs(threads, |number| {
        for round in 0..ROUNDS {
            for offset in (number * part..(number + 1) * part).step_by(PAGE_SIZE) {
                // The rest of the page is zero, so it takes next to nothing where it is compressed.
                memory.write(offset, (offset / PAGE_SIZE + round) as u8);
            }
        }
        Ok(())
    })
}

/// Says the seconds that it took until all threads had done, how often tasks had to reclaim for themselves meanwhile, how many MiB these have
/// reclaimed, the machine's CPU time in seconds, and the seconds for which the threads have reclaimed, all together: 0 where the kernel
/// does not say.
fn costs(threads: usize, load: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let mut vmstat = VmStat::open()?;
    let before = vmstat.read()?;
    let busy = busy_seconds()?;
    let start = now_ns();
    let one = |number: usize| load(number).map(|()| reclaim_ns_of_this_thread());
    let reclaim_ns = std::thread::scope(|scope| -> Result<u64> {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || one(number))).collect();
        let mut sum = 0;
        for thread in threads {
            sum += thread.join().unwrap_or_else(|_| bail!("a thread panicked"))?;
        }
        Ok(sum)
    })?;
    let seconds = (now_ns() - start) as f64 / 1e9;
    let after = vmstat.read()?;
    say(seconds)?;
    say(after.stalls - before.stalls)?;
    say((after.reclaimed_by_tasks - before.reclaimed_by_tasks) as f64 / f64::from(1 << 20))?;
    say(busy_seconds()? - busy)?;
    say(reclaim_ns as f64 / 1e9)
}

/// CPU time that the machine has spent on anything, in seconds.
fn busy_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("no CPUs in /proc/stat")?;
    // user, nice, system, idle, waiting for devices, interrupts, and soft ones. What the host took is nobody's here.
    let ticks: Vec<f64> = line.split_whitespace().map_while(|ticks| ticks.parse().ok()).collect();
    ensure!(ticks.len() >= 7, "/proc/stat: {line}");
    Ok((ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / 100.0)
}

fn use_files(directory: &Path, number: usize, kind: Kind) -> Result<()> {
    if kind == Kind::Names {
        return (0..DIRECTORIES).try_for_each(|index| look_at_names(directory, (number * 7 + index) % DIRECTORIES));
    }
    let path = directory.join((number % FILES).to_string());
    let mut file = OpenOptions::new().read(true).write(matches!(kind, Kind::Written | Kind::Mapped)).open(path)?;
    let len = file.metadata()?.len();
    // A tenth of the file apart.
    let begin = (number / FILES) as u64 * (len / 10) % len.max(1);
    file.seek(SeekFrom::Start(begin))?;
    let mut chunk = vec![0; CHUNK];
    match kind {
        Kind::Cached => while file.read(&mut chunk)? > 0 {},
        Kind::Uncached => while read_uncached(&file, &mut chunk)? > 0 {},
        Kind::Written => {
            for _ in 0..WRITTEN.min((len - begin) as usize) / CHUNK {
                file.write_all(&chunk)?;
            }
        }
        Kind::Mapped => {
            let mapped = Mapped::unchanged(&file, 0, len as usize)?;
            for offset in (begin as usize..len as usize).step_by(PAGE_SIZE) {
                let page = (mapped.range().start + offset) as *const u8;
                // SAFETY: inside the mapping, which is there as long as its user; the file is not made shorter.
                black_box(unsafe { std::ptr::read_volatile(page) });
            }
        }
        Kind::Names => {}
    }
    Ok(())
}

/// Reads the next bytes of `file`, at its position; returns how many.
fn read_uncached(file: &File, chunk: &mut [u8]) -> Result<usize> {
    const RWF_DONTCACHE: libc::c_int = 0x80;
    let part = libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: chunk.len() };
    // SAFETY: one part, which is writable and as long as it says; -1 stands for the file's own position.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &part, 1, -1, RWF_DONTCACHE) };
    ensure!(read >= 0, "RWF_DONTCACHE: {}", std::io::Error::last_os_error());
    Ok(read as usize)
}

/// The small files, unless they are there already.
fn make_names(directory: &Path) -> Result<()> {
    for index in 0..DIRECTORIES {
        let inside = directory.join(format!("names-{index}"));
        match fs::create_dir(&inside) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(error).with_context(|| inside.display().to_string()),
        }
        for name in 0..NAMES {
            File::create(inside.join(name.to_string()))?;
        }
    }
    Ok(())
}

fn look_at_names(directory: &Path, index: usize) -> Result<()> {
    let inside = directory.join(format!("names-{index}"));
    (0..NAMES).try_for_each(|name| Ok(fs::metadata(inside.join(name.to_string())).map(drop)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_of_files_comes_to_its_end() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..FILES {
            fs::write(directory.path().join(number.to_string()), vec![1; 3 * CHUNK]).unwrap();
        }
        for kind in ["cached", "mapped", "written"].map(|name| Kind::named(name).unwrap()) {
            (0..2 * FILES).for_each(|number| use_files(directory.path(), number, kind).unwrap());
        }
        // They were written over, and are as long as before.
        let text = fs::read(directory.path().join("0")).unwrap();
        assert!(text.len() == 3 * CHUNK && text.iter().all(|byte| *byte == 0));
        assert!(Kind::named("other").is_err());
    }

    #[test]
    fn memory_is_used_to_its_end() {
        [8 * CHUNK, 8 * CHUNK + 5 * PAGE_SIZE + 1].into_iter().for_each(|bytes| of_memory(bytes, 3).unwrap());
    }
}
