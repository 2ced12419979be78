//! What can go wrong.

use super::allocator::Places;
use crate::region::AllocateError;
use crate::sys::Errno;
use std::fmt;

/// There is no free frame, or no free run of that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfFrames {
    /// What was asked for: `1 << order` frames.
    pub order: u32,
}

impl fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.order {
            0 => write!(f, "every frame is in use"),
            order => {
                write!(f, "no {} frames in a row are free; raise the limit or ask for a lower order", 1u64 << order)
            }
        }
    }
}

impl std::error::Error for OutOfFrames {}

/// What is wrong with a frame that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// Nobody has it: freed twice, or never handed out.
    NotAllocated,
    /// It was allocated with another order.
    Order,
    /// There is no frame of this number.
    OutOfRange,
}

/// A frame could not be given back. Nothing was done with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeError {
    /// The number that was given back.
    pub frame: u32,
    /// What is wrong with it.
    pub problem: Problem,
    /// Where it was allocated and freed last; known in debug builds.
    pub places: Places,
}

impl fmt::Display for FreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problem {
            Problem::NotAllocated => write!(f, "frame {} is not allocated (freed twice?)", self.frame)?,
            Problem::Order => write!(f, "frame {} was allocated with another order", self.frame)?,
            Problem::OutOfRange => write!(f, "there is no frame {}", self.frame)?,
        }
        self.places.fmt(f)
    }
}

impl std::error::Error for FreeError {}

/// Why there are no frames at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildError {
    /// A limit of zero, or of more than 2^30 frames.
    Limit(usize),
    /// The region has no room for the frames.
    Region(AllocateError),
    /// The kernel has none for the book-keeping.
    Kernel(Errno),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Limit(bytes) => {
                write!(f, "frames can't have a limit of {bytes} bytes; 2 MiB to 4 TiB are possible")
            }
            BuildError::Region(error) => write!(f, "no memory for the frames: {error}"),
            BuildError::Kernel(error) => write!(f, "no memory for the book-keeping of frames: {error}"),
        }
    }
}

impl std::error::Error for BuildError {}

impl From<Errno> for BuildError {
    fn from(error: Errno) -> BuildError {
        BuildError::Kernel(error)
    }
}

impl From<AllocateError> for BuildError {
    fn from(error: AllocateError) -> BuildError {
        BuildError::Region(error)
    }
}
