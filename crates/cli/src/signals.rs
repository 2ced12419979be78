//! Signal dispositions that must not leak into, or be lost on the way to, the programs that `run` starts.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What this process inherited for `SIGPIPE`. Rust's run-time sets it to ignored before `main`, and an ignored signal stays
/// ignored across `exec`; the program has to get what it would have had without us.
static INHERITED_PIPE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);

extern "C" fn record_pipe_disposition() {
    // SAFETY: all zeroes is a valid `sigaction`, and the call only writes the current one to it.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action);
        action
    };
    INHERITED_PIPE.store(action.sa_sigaction, Ordering::Relaxed);
}

/// The C library calls what stands in this section before `main`, thus before Rust's run-time.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD_PIPE_DISPOSITION: extern "C" fn() = record_pipe_disposition;

fn set_pipe_disposition(handler: usize) {
    // SAFETY: `handler` is SIG_DFL, SIG_IGN or what was in force at the start; none of them runs code of ours.
    unsafe { libc::signal(libc::SIGPIPE, handler) };
}

/// Lets a write to a closed pipe end this process, as it ends any filter.
pub fn end_quietly_on_a_closed_pipe() {
    set_pipe_disposition(libc::SIG_DFL);
}

/// Lets a write to a closed pipe be an error: a process that waits for another must outlive its readers.
pub fn survive_a_closed_pipe() {
    set_pipe_disposition(libc::SIG_IGN);
}

/// Gives back the disposition that this process was started with.
pub fn restore_pipe_disposition() {
    set_pipe_disposition(INHERITED_PIPE.load(Ordering::Relaxed));
}

/// Ends this process as whoever asks for its end does. Where SIGTERM is waited for, that is in order.
pub fn end_this_process() {
    // SAFETY: sends a signal to this very process.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
}

/// Has `signal` come to this thread, once it is not blocked there.
pub fn raise(signal: i32) {
    // SAFETY: sends a signal to this very thread.
    unsafe { libc::raise(signal) };
}

/// Asks all processes of the job to stop, this one among them, as the terminal does at Ctrl-Z.
pub fn stop_this_group() {
    // SAFETY: sends a signal to the processes of this job, which is what the user asks for.
    unsafe { libc::kill(0, libc::SIGTSTP) };
}

/// Waits until one of `polled` is ready, or `timeout` has passed.
pub fn poll(polled: &mut [libc::pollfd], timeout: Option<Duration>) {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array has the length that is given, the time is valid for the call, and no mask of signals is passed.
    unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, time, std::ptr::null()) };
}

/// Signals that are blocked, to be waited for beside other descriptors (`signalfd(2)`).
pub struct SignalDescriptor(OwnedFd);

impl SignalDescriptor {
    /// For those of `set`.
    pub fn new(set: &SignalSet) -> io::Result<SignalDescriptor> {
        // SAFETY: the set is valid for the call; the new descriptor belongs to nobody else.
        unsafe {
            match libc::signalfd(-1, &set.0, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                descriptor => Ok(SignalDescriptor(OwnedFd::from_raw_fd(descriptor))),
            }
        }
    }

    /// Takes one that has come: its number.
    pub fn take(&self) -> Option<i32> {
        // SAFETY: all zeroes is a valid value, and the kernel writes no more than its size.
        let (count, info) = unsafe {
            let mut info: libc::signalfd_siginfo = std::mem::zeroed();
            (libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), size_of_val(&info)), info)
        };
        (count > 0).then_some(info.ssi_signo as i32)
    }
}

impl AsRawFd for SignalDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A set of signals.
pub struct SignalSet(libc::sigset_t);

impl SignalSet {
    /// The set of `signals`.
    pub fn of(signals: &[i32]) -> SignalSet {
        // SAFETY: `sigemptyset` initialises the set before anything reads it.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for &signal in signals {
                libc::sigaddset(&mut set, signal);
            }
            SignalSet(set)
        }
    }

    /// Blocks the set's signals in addition to those that are blocked, and returns what was blocked before.
    pub fn block(&self) -> SignalSet {
        let mut before = SignalSet::of(&[]);
        // SAFETY: both sets are valid for the call.
        unsafe { libc::sigprocmask(libc::SIG_BLOCK, &self.0, &mut before.0) };
        before
    }

    /// Makes this set the one that is blocked.
    pub fn restore(&self) {
        // SAFETY: the set is valid for the call.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }

    /// Whether one of the set's signals, all of which are blocked, waits to be taken.
    pub fn pending(&self) -> bool {
        let mut pending = SignalSet::of(&[]);
        // SAFETY: both sets are valid for the calls.
        unsafe {
            libc::sigpending(&mut pending.0);
            (1..=libc::SIGRTMAX())
                .any(|signal| libc::sigismember(&pending.0, signal) == 1 && libc::sigismember(&self.0, signal) == 1)
        }
    }

    /// Takes one of the set's signals, all of which are blocked, if there is one before `timeout` has passed. Returns its number.
    pub fn wait_for(&self, timeout: Duration) -> Option<i32> {
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos() as libc::c_long,
        };
        // SAFETY: the set and the time are valid for the call; nothing is wanted of the answer but that there is one.
        let signal = unsafe { libc::sigtimedwait(&self.0, std::ptr::null_mut(), &time) };
        (signal > 0).then_some(signal)
    }

    /// Waits until one of the set's signals, all of which are blocked, is there and takes it.
    pub fn wait(&self) -> libc::siginfo_t {
        loop {
            // SAFETY: the set and the place for the answer are valid for the call.
            unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                if libc::sigwaitinfo(&self.0, &mut info) > 0 {
                    return info;
                }
            }
        }
    }
}
