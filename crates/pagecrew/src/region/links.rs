//! What a free run of pages holds of the list that it is in: one word for each page, of which that of a run's first page is used.

use crate::sys::Errno;
use crate::sys::memory::Range;
use crate::sys::words::Words;
use std::sync::atomic::Ordering::Relaxed;

/// The runs after and before each run in its list. Changed by one thread at a time, which its owner sees to.
pub(super) struct Links(Words);

impl Links {
    /// Links for `pages` pages.
    ///
    /// # Errors
    /// `ENOMEM` without address space.
    pub fn new(pages: usize) -> Result<Links, Errno> {
        Words::new(pages).map(Links)
    }

    /// As [`Links::new`], to be [opened](Links::open) before they are set.
    ///
    /// # Errors
    /// As [`Links::new`].
    pub fn closed(pages: usize) -> Result<Links, Errno> {
        Words::closed(pages).map(Links)
    }

    /// Links of pages `[from, to)` can be set from now on.
    ///
    /// # Errors
    /// Those of [`Words::open`].
    pub fn open(&self, from: usize, to: usize) -> Result<(), Errno> {
        self.0.open(from, to)
    }

    /// The next and the previous run.
    pub fn get(&self, at: usize) -> (u32, u32) {
        let word = self.0.at(at).load(Relaxed);
        (word as u32, (word >> 32) as u32)
    }

    pub fn set(&self, at: usize, next: u32, previous: u32) {
        self.0.at(at).store(u64::from(next) | u64::from(previous) << 32, Relaxed);
    }

    pub fn set_next(&self, at: usize, next: u32) {
        self.set(at, next, self.get(at).1);
    }

    pub fn set_previous(&self, at: usize, previous: u32) {
        self.set(at, self.get(at).0, previous);
    }

    /// Gives the memory back that says that nothing lies in pages `[from, to)`.
    pub fn forget(&self, from: usize, to: usize) {
        self.0.forget(from, to);
    }

    /// Where the links lie.
    pub fn range(&self) -> Range {
        self.0.range()
    }

    /// The zone ends at page `at` from now on.
    pub fn close_from(&self, at: usize) {
        // SAFETY: links are only used with the zone locked, and nothing lies there.
        unsafe { self.0.close_from(at) };
    }
}
