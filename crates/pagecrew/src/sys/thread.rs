//! Background threads that no signal ever reaches.
//!
//! They are made with `pthread_create` itself: the standard library's threads register destructors of thread-local storage, for
//! which libc calls the program's `calloc` from the new thread, and no thread of ours may use the program's allocator.

use super::Errno;
use super::sched::thread_id;
use std::ffi::{CString, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// Stack of a background thread in bytes: they call nothing deep.
pub const STACK_SIZE: usize = 256 << 10;

/// A thread that was started and can be waited for.
#[derive(Debug)]
pub struct Thread(libc::pthread_t);

impl Thread {
    /// Waits until the thread has ended.
    pub fn join(self) {
        // SAFETY: the thread was started joinable and is joined once, since this takes `self`.
        unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
    }

    /// Lets the thread go: what it used is freed when it ends.
    pub fn detach(self) {
        // SAFETY: as in `join`.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// `CLOSE_RANGE_UNSHARE`.
const UNSHARE: u32 = 1 << 1;

/// Gives the calling thread an empty table of file descriptors of its own (`close_range` with `CLOSE_RANGE_UNSHARE`, 5.9).
///
/// # Errors
/// `ENOSYS` on older kernels, `ENOMEM`.
pub fn leave_descriptors() -> Result<(), Errno> {
    // SAFETY: the new table is this thread's alone, so closing everything in it closes nothing of anybody else's.
    Errno::check(unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, UNSHARE) }).map(drop)
}

/// Gives the calling thread a table of file descriptors of its own that has `kept` alone. `parted` is called when it has one: what is opened from
/// then on is not in it. To close what was in it takes as long as that takes, where nobody else has it any more.
///
/// # Errors
/// As [`leave_descriptors`]: the table is still shared then.
pub fn keep_descriptor(kept: RawFd, parted: impl FnOnce()) -> Result<(), Errno> {
    let kept = kept as u32;
    // SAFETY: the new table is this thread's alone, so closing everything in it closes nothing of anybody else's.
    Errno::check(unsafe { libc::syscall(libc::SYS_close_range, kept + 1, u32::MAX, UNSHARE) })?;
    parted();
    if kept > 0 {
        // SAFETY: as above.
        let _ = unsafe { libc::syscall(libc::SYS_close_range, 0, kept - 1, 0) };
    }
    Ok(())
}

/// Gives the calling thread, and those that it starts from then on, a table of file descriptors of their own, with one in it that is of use: that of
/// `kept`, which is returned. Standard input and output are nothing there. Where there can't be such a table, what is returned is a copy in the one that is
/// shared with others. `kept` is to stay open until this returns.
///
/// # Errors
/// `EMFILE` where there is no descriptor left.
pub fn part_with(kept: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let number = kept.as_raw_fd();
    if keep_descriptor(number, || ()).is_err() {
        return rustix::io::fcntl_dupfd_cloexec(kept, 0).map_err(Errno::from);
    }
    // Whatever is said there by mistake is not to get into some file that has such a number.
    while let Ok(nothing) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        if nothing.as_raw_fd() > 2 {
            break;
        }
        std::mem::forget(nothing);
    }
    // SAFETY: the number is the same as in the other table, and in this one nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The thread that is starting a background thread; 0 for none.
static SPAWNING: AtomicI32 = AtomicI32::new(0);

/// Whether the calling thread is inside [`spawn`]: what libc allocates then belongs to the new thread.
pub fn spawning() -> bool {
    match SPAWNING.load(Ordering::Relaxed) {
        0 => false,
        thread => thread == thread_id(),
    }
}

struct Start {
    name: CString,
    body: Box<dyn FnOnce() + Send>,
}

extern "C" fn start(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` passes a leaked box, which this thread alone takes over.
    let Start { name, body } = *unsafe { Box::from_raw(argument.cast::<Start>()) };
    // SAFETY: the name is a C string; the kernel copies its first 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    drop(name);
    body();
    std::ptr::null_mut()
}

/// Starts a thread called `name` (15 bytes are visible) with every signal blocked from its first instruction on. One thread at a
/// time may call this. A panic in `body` ends the process.
///
/// # Errors
/// `EAGAIN` at `RLIMIT_NPROC` or the cgroup's `pids.max`, or without room for its stack.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<Thread, Errno> {
    let name = CString::new(name).map_err(|_| Errno(libc::EINVAL))?;
    let argument = Box::into_raw(Box::new(Start { name, body: Box::new(body) }));
    // SAFETY: every pointer is valid for the calls; the masks are set by sigfillset and pthread_sigmask before they are used;
    // `argument` is taken over by the new thread, or taken back below if there is none.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_attr_init(&mut attributes);
        // A program with much static thread-local storage needs more.
        let mut stack = STACK_SIZE;
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        SPAWNING.store(thread_id(), Ordering::Relaxed);
        let error = loop {
            libc::pthread_attr_setstacksize(&mut attributes, stack);
            match libc::pthread_create(&mut thread, &attributes, start, argument.cast()) {
                libc::EINVAL if stack < 64 << 20 => stack *= 4,
                error => break error,
            }
        };
        SPAWNING.store(0, Ordering::Relaxed);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        libc::pthread_attr_destroy(&mut attributes);
        if error == 0 {
            return Ok(Thread(thread));
        }
        drop(Box::from_raw(argument));
        Err(Errno(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_thread_that_parts_has_one_descriptor_and_shares_it_with_those_that_it_starts() {
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let part = || {
            let kept = part_with(writer.as_fd()).unwrap();
            if kept.as_raw_fd() != writer.as_raw_fd() {
                return eprintln!("left out: a thread has no table of its own here");
            }
            // Three that are nothing, and the directory that is read.
            let open = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
            assert_eq!(open(), 5);
            let child = std::thread::spawn(move || {
                assert_eq!(open(), 5);
                drop(kept);
            });
            child.join().unwrap();
            assert_eq!(open(), 4);
            let second = std::fs::read_link("/proc/thread-self/fd/2").unwrap();
            assert_eq!(second, std::path::Path::new("/dev/null"));
        };
        std::thread::scope(|scope| scope.spawn(part).join().unwrap());
        // Nobody else's are closed.
        writer.write_all(b"x").unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 1);
    }

    #[test]
    fn a_background_thread_blocks_signals_and_its_parent_does_not() {
        let blocked = || {
            // SAFETY: reads the calling thread's mask into a valid set.
            unsafe {
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut set);
                libc::sigismember(&set, libc::SIGUSR1) == 1
            }
        };
        let before = blocked();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = spawn("pagecrew/test".into(), move || {
            let name = std::fs::read_to_string(format!("/proc/self/task/{}/comm", thread_id())).unwrap();
            sender.send((blocked(), name)).unwrap();
        });
        thread.unwrap().join();
        assert_eq!(receiver.recv().unwrap(), (true, "pagecrew/test\n".to_owned()));
        assert_eq!(blocked(), before);
        assert!(!spawning());
    }
}
