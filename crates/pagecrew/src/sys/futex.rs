//! Sleeping until a word changes (`futex`, 2.6).

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` is `expected`, at most for `timeout`. May return early; the caller looks again.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos() as libc::c_long };
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time are valid for the call. Whatever the kernel says, the caller looks at the word again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, &raw const timeout) };
}

/// Wakes up to `most` threads that sleep at `word`.
pub fn wake(word: &AtomicU32, most: u32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: only the word's address is used.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, most) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn a_sleeper_wakes_when_it_is_called_and_not_before() {
        let word = AtomicU32::new(0);
        wait(&word, 1, Duration::from_secs(60));
        let begin = Instant::now();
        wait(&word, 0, Duration::from_millis(20));
        assert!(begin.elapsed() >= Duration::from_millis(19));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.load(Ordering::SeqCst) == 0 {
                    wait(&word, 0, Duration::from_secs(60));
                }
            });
            std::thread::sleep(Duration::from_millis(10));
            word.store(1, Ordering::SeqCst);
            wake(&word, u32::MAX >> 1);
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
