//! Processes, with a note of which one a thread is at: one whose memory is locked, by itself or by the kernel on its behalf, can keep the thread for
//! as long as it likes (a server that does not answer, a page fault that nobody handles).

use pagecrew::sys::Errno;
use pagecrew::sys::clock::now_ns;
use pagecrew::sys::memory::Range;
use pagecrew::sys::pagemap::{Category, HugeKind};
use pagecrew::trim::target::Mapping;
use pagecrew::trim::{Id, Other, Target, TargetError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Where a thread is, for others to read: at which process, and since when. At none where it works by itself. And whether it is to stop, which
/// it looks at between two processes.
#[derive(Debug, Clone, Default)]
pub struct Whereabouts(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    at: Mutex<Option<(Id, u64)>>,
    stop: AtomicBool,
}

impl Whereabouts {
    /// The process, and the time at which the thread came to it.
    pub fn at(&self) -> Option<(Id, u64)> {
        *self.0.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread stop.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }

    /// Whether it is to.
    pub fn stopped(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }

    /// Does something at a process.
    pub fn while_at<T>(&self, id: Id, something: impl FnOnce() -> T) -> T {
        self.set(Some((id, now_ns())));
        let result = something();
        self.set(None);
        result
    }

    fn set(&self, at: Option<(Id, u64)>) {
        *self.0.at.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }
}

/// A process, with a note of every call that may have to wait for it.
#[derive(Debug)]
pub struct Noted {
    other: Other,
    id: Id,
    whereabouts: Whereabouts,
}

impl Noted {
    /// See [`Other::open`].
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn open(id: Id, only_look: bool, whereabouts: &Whereabouts) -> Result<Noted, TargetError> {
        let other = whereabouts.while_at(id, || Other::open(id.pid, only_look))?;
        Ok(Noted { other, id, whereabouts: whereabouts.clone() })
    }

    fn noted<T>(&self, something: impl FnOnce(&Other) -> T) -> T {
        self.whereabouts.while_at(self.id, || something(&self.other))
    }
}

impl Target for Noted {
    fn mappings(&self) -> Result<Vec<Mapping>, Errno> {
        self.noted(Other::mappings)
    }

    fn huge_pages(&self, range: Range, each: &mut dyn FnMut(Range, HugeKind)) -> Result<(), Errno> {
        self.noted(|other| other.huge_pages(range, each))
    }

    fn exclusive(&self, address: usize) -> Result<Option<bool>, Errno> {
        self.noted(|other| other.exclusive(address))
    }

    fn read(&self, pieces: &[Range], room: &mut [u8]) -> Result<usize, Errno> {
        self.noted(|other| other.read(pieces, room))
    }

    fn split(&self, part: Range) -> Result<(), Errno> {
        self.noted(|other| other.split(part))
    }

    fn bytes_of(&self, range: Range, category: Category) -> Result<usize, Errno> {
        self.noted(|other| other.bytes_of(range, category))
    }

    fn alive(&self) -> bool {
        self.noted(Other::alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_at_a_process_while_it_is() {
        let whereabouts = Whereabouts::default();
        let id = Id { pid: std::process::id() as i32, start_ticks: 7 };
        let noted = Noted::open(id, true, &whereabouts).unwrap();
        assert_eq!(whereabouts.at(), None);
        let before = now_ns();
        let seen = noted.noted(|_| whereabouts.at()).unwrap();
        assert!(seen.0 == id && (before..=now_ns()).contains(&seen.1));
        assert!(noted.alive() && !noted.mappings().unwrap().is_empty());
        assert_eq!(whereabouts.at(), None);
    }
}
