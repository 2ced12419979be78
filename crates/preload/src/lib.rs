//! The malloc family and the exit hooks over the pagecrew library, for `LD_PRELOAD`: a thin shell.
//!
//! Requests at and above a threshold come from a [`Region`](pagecrew::region::Region); smaller ones stay with the program's own malloc.
//! Whether a pointer is ours is one comparison with the arena's range. Mappings that a program makes itself become eligible for huge pages
//! (`mmap.rs`).

mod early;
mod exit;
mod fork;
mod heap;
mod kernel;
mod libc_blocks;
mod malloc;
mod mmap;
mod next;
mod pthread;
mod state;
mod thresholds;

/// Everything that this library allocates for itself.
#[global_allocator]
static HEAP: heap::Heap = heap::Heap::new();
