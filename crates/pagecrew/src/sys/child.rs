//! Child processes with rights of their own: fewer capabilities than this process has, none to be gained, and an end with this process.

use super::Errno;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::CapabilitySets;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};

pub use rustix::thread::CapabilitySet as Capabilities;

/// What a child is given.
#[derive(Debug, Clone, Copy)]
pub struct Rights<'a> {
    /// The most that it can ever have (its bounding set). A child of root has all of these.
    pub capabilities: Capabilities,
    /// Stays open in the child, whatever else is closed.
    pub kept: Option<BorrowedFd<'a>>,
}

/// Whether this process may start children with fewer rights: it is root's, and has `CAP_SETPCAP`.
pub fn may_confine() -> bool {
    let effective = rustix::thread::capabilities(None).map(|sets| sets.effective);
    rustix::process::geteuid().is_root() && effective.is_ok_and(|set| set.contains(Capabilities::SETPCAP))
}

/// A child process.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    descriptor: OwnedFd,
}

impl Child {
    /// Starts `command` with these rights and no other, with no signal blocked, and in a process group of its own: what a terminal sends to
    /// this process does not reach it. It gets SIGTERM when the calling thread ends.
    ///
    /// # Errors
    /// Those of starting a program; `EPERM` where its rights can't be set ([`may_confine`]); `ENOSYS` before 5.3 (`pidfd_open`).
    pub fn start(mut command: Command, rights: Rights<'_>) -> Result<Child, Errno> {
        let parent = rustix::process::getpid();
        let (capabilities, kept) = (rights.capabilities, rights.kept.map(|kept| kept.as_raw_fd()));
        command.process_group(0);
        // SAFETY: `confine` makes system calls and nothing else, which is what is allowed after a fork. `kept` is open until the child was
        // started, since `rights` borrows it.
        unsafe { command.pre_exec(move || confine(parent, capabilities, kept)) };
        let mut process = command.spawn().map_err(Errno::from)?;
        // Its number is its own until it was waited for.
        let opened = Pid::from_raw(process.id() as i32)
            .ok_or(Errno(libc::ESRCH))
            .and_then(|pid| Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?));
        match opened {
            Ok(descriptor) => Ok(Child { process, descriptor }),
            Err(errno) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(errno)
            }
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Readable when it has ended.
    pub fn descriptor(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// Sends it a signal. One that has ended gets none.
    pub fn signal(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = rustix::process::pidfd_send_signal(self.descriptor.as_fd(), signal);
        }
    }

    /// What it has ended with; `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }
}

/// In the child, before the program is there.
fn confine(parent: Pid, capabilities: Capabilities, kept: Option<RawFd>) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    // The parent may have ended before that, and then nobody would tell.
    if rustix::process::getppid() != Some(parent) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    if let Some(kept) = kept {
        // SAFETY: `Child::start` says that it is open.
        rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(kept) }, FdFlags::empty())?;
    }
    for number in 0..u64::BITS {
        let one = Capabilities::from_bits_retain(1 << number);
        match rustix::thread::capability_is_in_bounding_set(one) {
            Ok(true) if !capabilities.contains(one) => rustix::thread::remove_capability_from_bounding_set(one)?,
            Ok(_) => {}
            // The kernel has no more.
            Err(_) => break,
        }
    }
    // What can be inherited would be had beyond the bounding set.
    let sets = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(None, CapabilitySets { inheritable: Capabilities::empty(), ..sets })?;
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the set is initialised before it is used. Last, so that a signal finds all of that done.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    fn status_of(mut child: Child) -> ExitStatus {
        loop {
            if let Some(status) = child.ended() {
                return status;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_has_the_rights_that_it_is_given_and_no_other() {
        let capabilities = Capabilities::LEASE | Capabilities::SYS_NICE;
        let started = Child::start(shell("cat /proc/self/status"), Rights { capabilities, kept: None });
        if !may_confine() {
            assert_eq!(started.err(), Some(Errno(libc::EPERM)));
            return;
        }
        let mut child = started.unwrap();
        let mut text = String::new();
        child.process.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(status_of(child).success());
        let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
        let expected = format!("{:016x}", capabilities.bits());
        assert_eq!(["CapPrm:", "CapEff:", "CapBnd:"].map(of), [&*expected, &*expected, &*expected]);
        assert_eq!(["CapInh:", "CapAmb:", "SigBlk:"].map(of), ["0000000000000000"; 3]);
        assert_eq!(of("NoNewPrivs:"), "1");
    }

    #[test]
    fn what_is_kept_stays_open_and_its_end_is_told() {
        let file = std::fs::File::open("/dev/null").unwrap();
        if !may_confine() {
            return;
        }
        for (kept, expected) in [(Some(file.as_fd()), 0), (None, 1)] {
            let script = format!("[ -e /proc/self/fd/{} ]", file.as_raw_fd());
            let child = Child::start(shell(&script), Rights { capabilities: Capabilities::empty(), kept }).unwrap();
            let mut poll = libc::pollfd { fd: child.descriptor(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid entry.
            assert_eq!(unsafe { libc::poll(&mut poll, 1, 20_000) }, 1);
            assert_eq!(status_of(child).code(), Some(expected));
        }
        let rights = Rights { capabilities: Capabilities::empty(), kept: None };
        let child = Child::start(shell("exec sleep 100"), rights).unwrap();
        child.signal(libc::SIGTERM);
        assert_eq!(status_of(child).signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let rights = Rights { capabilities: Capabilities::empty(), kept: None };
        let error = Child::start(Command::new("/no/such/program"), rights).err();
        assert!(error == Some(Errno(libc::ENOENT)) || !may_confine(), "{error:?}");
    }
}
