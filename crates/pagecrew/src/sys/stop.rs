//! Stopping every other thread of a process that is about to end, so that nobody can see its memory go.
//!
//! Each thread gets a signal whose handler never returns. The signal is the one that glibc keeps for `setuid` in all threads: no
//! program can block or handle it through libc, so every thread that runs or waits in user mode stops. One that is held in
//! the kernel does not answer; then the caller is told so and must leave the memory alone.

use super::clock;
use super::sched::thread_id;
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// glibc's `SIGSETXID`.
const SIGNAL: i32 = 33;
/// More threads than this are not stopped.
const THREADS: usize = 4096;

/// `struct sigaction` as the kernel has it.
#[repr(C)]
struct KernelAction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

const SA_RESTORER: libc::c_ulong = 0x0400_0000;

static STOPPED: AtomicUsize = AtomicUsize::new(0);
/// Set by the one thread that stops the others.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Scratch memory that is not on the stack: a process may end on one of a few kilobytes.
struct Scratch<T>(UnsafeCell<T>);

// SAFETY: used by the one thread that `BEGUN` lets through.
unsafe impl<T> Sync for Scratch<T> {}

static SIGNALLED: Scratch<[i32; THREADS]> = Scratch(UnsafeCell::new([0; THREADS]));
static DIRECTORY: Scratch<[u64; 1024]> = Scratch(UnsafeCell::new([0; 1024]));

/// Runs in every other thread, with all signals blocked. Nothing brings it back; the process ends around it.
extern "C" fn stop_here() {
    STOPPED.fetch_add(1, Ordering::SeqCst);
    loop {
        // SAFETY: no descriptors and no timeout: waits without touching memory.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
    }
}

/// Calls `each` with every thread of this process. Returns false if the list can't be read.
fn threads(mut each: impl FnMut(i32)) -> bool {
    const PATH: &CStr = c"/proc/self/task";
    // SAFETY: the path is a C string; the descriptor is ours and closed below; the kernel writes at most the buffer's length,
    // and records as linux_dirent64 describes: the length at offset 16, the name, ended by a zero, at offset 19.
    unsafe {
        let directory = libc::open(PATH.as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if directory < 0 {
            return false;
        }
        let buffer = &mut *DIRECTORY.0.get();
        let complete = loop {
            let count = libc::syscall(libc::SYS_getdents64, directory, buffer.as_mut_ptr(), size_of_val(buffer));
            if count <= 0 {
                break count == 0;
            }
            let bytes = buffer.as_ptr().cast::<u8>();
            let mut at = 0;
            while at < count as usize {
                let record = bytes.add(at);
                if let Ok(name) = CStr::from_ptr(record.add(19).cast()).to_str()
                    && let Ok(thread) = name.parse()
                {
                    each(thread);
                }
                at += record.add(16).cast::<u16>().read_unaligned() as usize;
            }
        };
        libc::close(directory);
        complete
    }
}

/// Stops every thread but the calling one and those that `spared` names. Returns whether all of them have stopped within
/// `patience_ns`. There is no way back: the process must end next, whatever the answer. Allocates nothing.
pub fn stop_others(spared: impl Fn(i32) -> bool, patience_ns: u64) -> bool {
    let own = thread_id();
    if BEGUN.swap(true, Ordering::SeqCst) {
        return false;
    }
    // SAFETY: the flag above lets one thread of the process come here, once.
    let signalled = unsafe { &mut *SIGNALLED.0.get() };
    let mut count = 0;
    let deadline = clock::now_ns() + patience_ns;
    // SAFETY: getpid takes nothing.
    let process = unsafe { libc::getpid() };
    loop {
        let (mut fresh, mut fits) = (false, true);
        let complete = threads(|thread| {
            if thread == own || spared(thread) || signalled[..count].contains(&thread) {
                return;
            }
            if count == THREADS {
                fits = false;
                return;
            }
            if count == 0 {
                install();
            }
            fresh = true;
            // SAFETY: sends a signal to a thread of this process. One that has just ended is not there to answer.
            if unsafe { libc::syscall(libc::SYS_tgkill, process, thread, SIGNAL) } == 0 {
                signalled[count] = thread;
                count += 1;
            }
        });
        if !complete || !fits {
            return false;
        }
        // A thread may have started others before it stopped, so only a round without a new one ends it.
        if !fresh && STOPPED.load(Ordering::SeqCst) >= count {
            return true;
        }
        if clock::now_ns() >= deadline {
            return false;
        }
        // SAFETY: takes nothing.
        unsafe { libc::sched_yield() };
    }
}

/// Installs the handler for the signal, past libc, which keeps it to itself.
fn install() {
    let action = KernelAction {
        handler: stop_here as *const () as usize,
        flags: SA_RESTORER | libc::SA_ONSTACK as libc::c_ulong,
        // The kernel asks for one on x86-64; the handler never returns to it.
        restorer: stop_here as *const () as usize,
        mask: u64::MAX,
    };
    // SAFETY: the action is laid out as the kernel expects and outlives the call.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, SIGNAL, &raw const action, 0, 8) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a child process, since there is no way back: threads that count stand still once they were stopped.
    #[test]
    fn stopped_threads_stand_still() {
        // SAFETY: the child only uses what works after a fork of a threaded process: threads of its own, memory, `_exit`.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0, "no child: {}", std::io::Error::last_os_error());
            if child == 0 {
                extern "C" fn count(counter: *mut libc::c_void) -> *mut libc::c_void {
                    loop {
                        // SAFETY: the counter is a static.
                        unsafe { &*(counter as *const AtomicUsize) }.fetch_add(1, Ordering::Relaxed);
                    }
                }
                static COUNTERS: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
                for counter in &COUNTERS {
                    let mut thread = 0;
                    let argument = (counter as *const AtomicUsize).cast_mut().cast();
                    if libc::pthread_create(&mut thread, std::ptr::null(), count, argument) != 0 {
                        libc::_exit(3);
                    }
                }
                while COUNTERS.iter().any(|counter| counter.load(Ordering::Relaxed) == 0) {}
                let stopped = stop_others(|_| false, 5_000_000_000);
                let before: Vec<usize> = COUNTERS.iter().map(|counter| counter.load(Ordering::Relaxed)).collect();
                libc::usleep(20_000);
                let after: Vec<usize> = COUNTERS.iter().map(|counter| counter.load(Ordering::Relaxed)).collect();
                libc::_exit(if !stopped { 1 } else { 2 * i32::from(before != after) });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        }
    }
}
