//! A virtual machine that is started and never run: what matters is how long it takes until its monitor answers.

use super::monitor::Monitor;
use super::server::Server;
use crate::program::Running;
use anyhow::{Context, Result, bail};
use pagecrew::sys::clock::now_ns;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub const PROGRAM: &str = "qemu-system-x86_64";

/// How much room QEMU has for translated code, all of which mem-lock pins.
#[derive(Clone, Copy)]
pub enum Translator {
    /// As much as it takes by itself: 1 GiB.
    Usual,
    /// 32 MiB. Where the CPU runs the guest, there is none.
    Small,
}

impl Translator {
    fn option(self) -> &'static str {
        match self {
            Translator::Usual => "tcg",
            Translator::Small => "tcg,tb-size=32",
        }
    }
}

/// Memory that the host has to find first takes long; a machine that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// So long may it take to end.
const END: Duration = Duration::from_secs(60);

/// Where its memory comes from.
#[derive(Clone, Copy)]
pub enum Memory<'m> {
    /// A file of a pool, all of which QEMU wants to have at the start.
    Pool(&'m Server),
    /// QEMU's own, which it gets at the start by so many threads.
    Own { threads: usize },
    /// QEMU's own, page by page as the guest touches it.
    Untouched,
    /// Files of a mounted hugetlbfs, which QEMU has filled at the start by so many threads.
    Hugetlbfs { mount: &'m Path, threads: usize },
}

/// A virtual machine of `size` bytes. What is `locked` QEMU pins all of.
#[derive(Clone, Copy)]
pub struct Guest<'m> {
    pub size: usize,
    pub locked: bool,
    pub translator: Translator,
    pub memory: Memory<'m>,
}

impl Guest<'_> {
    /// Starts it, and returns the seconds until its monitor answered. It is gone then.
    ///
    /// # Errors
    /// If it fails.
    pub fn seconds_to_monitor(&self) -> Result<f64> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        let descriptor = theirs.as_raw_fd();
        let mut command = self.command(descriptor);
        let keep_open = move || {
            // SAFETY: no memory is involved; the descriptor is open in the child as it was in its parent.
            match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: between fork and exec the closure makes one system call.
        unsafe { command.pre_exec(keep_open) };
        let start = now_ns();
        // What stands between must be able to end QEMU, too.
        let running = Running::start_ending_by(&mut command, libc::SIGTERM)?;
        drop(theirs);
        let mut monitor = Monitor::new(ours);
        let answered = monitor.wait_until_it_answers().map(|()| (now_ns() - start) as f64 / 1e9);
        let ended = answered.and_then(|seconds| monitor.quit().map(|()| seconds));
        if ended.is_err() {
            running.signal(libc::SIGTERM)?;
        }
        if !running.ends_within(END)? {
            bail!("{PROGRAM} doesn't end");
        }
        let status = running.end()?.0;
        let seconds = ended.with_context(|| format!("{PROGRAM}: {status}"))?;
        if !status.success() {
            bail!("{PROGRAM}: {status}");
        }
        Ok(seconds)
    }

    /// QEMU with its monitor at the other end of the open `descriptor`.
    fn command(&self, descriptor: i32) -> Command {
        let mut command = match self.memory {
            Memory::Pool(server) => {
                let mut command = server.exec();
                command.arg(PROGRAM);
                command
            }
            _ => Command::new(PROGRAM),
        };
        command.args(["-accel", self.translator.option(), "-S", "-machine", "memory-backend=m"]);
        command.args(["-nodefaults", "-nographic", "-no-user-config"]);
        command.args(["-m", &format!("{}M", self.size >> 20), "-object", &self.backend()]);
        command.args(["-chardev", &format!("socket,id=q,fd={descriptor}"), "-mon", "chardev=q,mode=control"]);
        if self.locked {
            command.args(["-overcommit", "mem-lock=on"]);
        }
        command
    }

    fn backend(&self) -> String {
        let size = self.size;
        match self.memory {
            Memory::Pool(_) => {
                format!("memory-backend-file,id=m,size={size},mem-path={{path}},share=on,prealloc=on")
            }
            Memory::Own { threads } => {
                format!("memory-backend-ram,id=m,size={size},prealloc=on,prealloc-threads={threads}")
            }
            Memory::Untouched => format!("memory-backend-ram,id=m,size={size}"),
            Memory::Hugetlbfs { mount, threads } => {
                let file = format!("memory-backend-file,id=m,size={size},mem-path={}", mount.display());
                format!("{file},share=on,prealloc=on,prealloc-threads={threads}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::on_path;

    const SIZE: usize = 64 << 20;

    fn arguments(guest: &Guest) -> String {
        let command = guest.command(7);
        command.get_args().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_qemu_is_told() {
        let guest =
            Guest { size: SIZE, locked: true, translator: Translator::Small, memory: Memory::Own { threads: 3 } };
        let told = arguments(&guest);
        assert!(told.contains("-m 64M -object memory-backend-ram,id=m,size=67108864,prealloc=on,prealloc-threads=3"));
        assert!(told.contains("tb-size=32") && told.contains("fd=7") && told.ends_with("-overcommit mem-lock=on"));
        let memory = Memory::Hugetlbfs { mount: Path::new("/huge"), threads: 2 };
        let told = arguments(&Guest { size: SIZE, locked: false, translator: Translator::Usual, memory });
        assert!(told.contains("mem-path=/huge,share=on,prealloc=on,prealloc-threads=2") && !told.contains("mem-lock"));
    }

    #[test]
    fn a_machine_comes_up_or_it_is_said_why_not() {
        if !on_path(PROGRAM) {
            return;
        }
        let guest =
            Guest { size: SIZE, locked: false, translator: Translator::Usual, memory: Memory::Own { threads: 2 } };
        assert!(guest.seconds_to_monitor().unwrap() > 0.0);
        let memory = Memory::Hugetlbfs { mount: Path::new("/nonexistent/huge"), threads: 2 };
        let error = Guest { memory, ..guest }.seconds_to_monitor().unwrap_err();
        assert_eq!(error.to_string(), format!("{PROGRAM}: exit status: 1"));
    }
}
