//! A frame that frees itself.

use super::Frames;
use crate::sys::PAGE_SIZE;
use std::ops::{Deref, DerefMut};

/// A frame that belongs to whoever has this, and goes back when it is dropped. Its memory is [`PAGE_SIZE`] bytes.
#[derive(Debug)]
pub struct Frame<'f> {
    frames: &'f Frames,
    number: u32,
}

impl<'f> Frame<'f> {
    pub(super) fn new(frames: &'f Frames, number: u32) -> Frame<'f> {
        Frame { frames, number }
    }

    /// The frame's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The frame's number, which its holder frees from now on ([`Frames::free`]).
    pub fn into_number(self) -> u32 {
        let number = self.number;
        std::mem::forget(self);
        number
    }
}

impl Deref for Frame<'_> {
    type Target = [u8; PAGE_SIZE];

    fn deref(&self) -> &[u8; PAGE_SIZE] {
        // SAFETY: the frame is mapped, readable, and this handle's alone; what it holds are bytes of whatever value.
        unsafe { self.frames.address(self.number).cast().as_ref() }
    }
}

impl DerefMut for Frame<'_> {
    fn deref_mut(&mut self) -> &mut [u8; PAGE_SIZE] {
        // SAFETY: as above, and the handle is borrowed by one alone.
        unsafe { self.frames.address(self.number).cast().as_mut() }
    }
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle's borrows have ended.
        let freed = unsafe { self.frames.free(self.number) };
        debug_assert!(freed.is_ok(), "{freed:?}");
    }
}
