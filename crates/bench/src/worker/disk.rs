//! A fast disk full of files, on a machine with little memory.

use super::huge::{Huge, Pages};
use super::keep::until_the_end;
use super::say;
use anyhow::{Context, Result, bail, ensure};
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::mount::{self, MemoryFs};
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE, procfs};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// So many files are on the disk.
pub const FILES: usize = 4;
/// A call reads or writes so much.
pub const CHUNK: usize = 1 << 20;
/// Of the disk, so much is the file system's own.
const OVERHEAD: usize = 10;

/// So long a disk that readers still have is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// The file system of the disk below the directory that it is kept at.
pub fn files(base: &Path) -> PathBuf {
    base.join("files")
}

/// The file on that disk that no reader reads.
pub fn own(base: &Path) -> PathBuf {
    files(base).join("own")
}

/// Makes a disk of `bytes` in memory with a file system full of files, and one more of `own` bytes, below the directory `base`, says so, and
/// takes all of it away at the end of its input: the disk is a file in a file system in memory, and read past the page cache, as one of NVMe would be.
pub fn keep(base: &Path, bytes: usize, own: usize, input: impl BufRead) -> Result<()> {
    let mut disk = Disk { base: base.to_owned(), memory: false, device: None, mounted: false };
    disk.make(bytes, own)?;
    let said = say("").and_then(|()| until_the_end(input));
    disk.remove().and(said)
}

/// What there is of it.
struct Disk {
    base: PathBuf,
    memory: bool,
    device: Option<String>,
    mounted: bool,
}

impl Disk {
    fn make(&mut self, bytes: usize, own: usize) -> Result<()> {
        let memory = self.base.join("memory");
        fs::create_dir(&memory)?;
        fs::create_dir(files(&self.base))?;
        mount::mount(MemoryFs::Tmpfs, &memory, "mode=0700,size=100%").context("a file system in memory")?;
        self.memory = true;
        let image = memory.join("disk");
        let mut file = OpenOptions::new().write(true).create_new(true).open(&image)?;
        let chunk = vec![0x5a; CHUNK];
        for _ in 0..bytes / CHUNK {
            file.write_all(&chunk).context("the disk")?;
        }
        let device = output(Command::new("losetup").args(["--show", "--find", "--direct-io=on"]).arg(&image))?;
        self.device = Some(device.trim().to_owned());
        output(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(device.trim()))?;
        output(Command::new("mount").args(["-o", "noatime"]).arg(device.trim()).arg(files(&self.base)))?;
        self.mounted = true;
        let each = (bytes / OVERHEAD * (OVERHEAD - 1)).saturating_sub(own) / FILES;
        let chunk = Aligned::new()?;
        let readers = (0..FILES).map(|number| (files(&self.base).join(number.to_string()), each));
        for (path, len) in readers.chain([(self::own(&self.base), own)]) {
            // Past the page cache, which is to be empty of them.
            let mut file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path)?;
            for _ in 0..len / CHUNK {
                file.write_all(chunk.bytes()).context("the files")?;
            }
        }
        Ok(())
    }

    /// Takes away what there is.
    fn remove(&mut self) -> Result<()> {
        if self.mounted {
            // Readers that were killed a moment ago are at their end.
            let until = now_ns() + PATIENCE.as_nanos() as u64;
            while let Err(error) = output(Command::new("umount").arg(files(&self.base))) {
                ensure!(now_ns() < until, error);
                std::thread::sleep(Duration::from_millis(50));
            }
            self.mounted = false;
        }
        if let Some(device) = self.device.take() {
            output(Command::new("losetup").args(["--detach", &device]))?;
        }
        if std::mem::take(&mut self.memory) {
            mount::detach(&self.base.join("memory"))?;
        }
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// What a command says, or what went wrong with it.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("{name} can't be started"))?;
    if !output.status.success() {
        bail!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Bytes that begin where a page does, as `O_DIRECT` wants them.
struct Aligned(Huge);

impl Aligned {
    fn new() -> Result<Aligned> {
        let memory = Huge::new(HUGE_PAGE_SIZE, Pages::Small)?;
        (0..CHUNK).step_by(8).for_each(|offset| memory.write(offset, offset as u8));
        Ok(Aligned(memory))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: inside the mapping, which lives as long as this and is written to no more.
        unsafe { std::slice::from_raw_parts(self.0.start() as *const u8, CHUNK) }
    }
}

/// Reads `bytes` of the files in `directory` slowly, as a machine at rest does, and says how many MiB are free then.
pub fn read_slowly(directory: &Path, bytes: usize) -> Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut left = bytes / CHUNK;
    'files: for number in (0..FILES).cycle() {
        let mut file = File::open(directory.join(number.to_string()))?;
        // Nothing of it is there yet, wherever that may be.
        // SAFETY: no memory is involved.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        while file.read(&mut chunk)? > 0 {
            left = left.saturating_sub(1);
            if left == 0 {
                break 'files;
            }
            std::thread::sleep(Duration::from_millis(8));
        }
    }
    let free = fs::read_to_string("/proc/meminfo")?;
    let kib =
        free.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    say(kib.context("no MemFree in /proc/meminfo")? / 1024.0)
}

/// Takes all of the memory that is available but for `left` bytes, so that it can't be had back, says so, and waits for the end of its
/// input.
pub fn lock(left: usize, input: impl BufRead) -> Result<()> {
    let available = procfs::memory_info()?.available as usize;
    let len = available.saturating_sub(left) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    ensure!(len > 0, "there is nothing to take: {} pages are available", available / PAGE_SIZE);
    let memory = Huge::new(len, Pages::Huge)?;
    // SAFETY: the mapping is this function's own.
    let locked = unsafe { libc::mlock(memory.start() as *const _, len) };
    ensure!(locked == 0, "memory can't be locked: {}", std::io::Error::last_os_error());
    say("")?;
    until_the_end(input)
}
