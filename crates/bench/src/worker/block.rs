//! Memory as a C program gets it.

use anyhow::{Result, ensure};
use pagecrew::sys::memory::{self, Protection, Range};
use pagecrew::sys::{PAGE_SIZE, round_up};
use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;

/// Where memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `malloc`, given back by `free`.
    Malloc,
    /// `calloc`, given back by `free`.
    Calloc,
    /// `mmap`, given back by `munmap`.
    Map,
}

/// A piece of memory that this program owns. Dropping it gives it back.
pub struct Block {
    start: usize,
    len: usize,
    origin: Origin,
}

impl Block {
    /// `len` bytes from `origin`.
    ///
    /// # Errors
    /// If there is no such memory.
    pub fn new(origin: Origin, len: usize) -> Result<Block> {
        let start = match origin {
            // SAFETY: malloc and calloc may be called with any size.
            Origin::Malloc => unsafe { libc::malloc(len) as usize },
            // SAFETY: as above.
            Origin::Calloc => unsafe { libc::calloc(1, len) as usize },
            Origin::Map => memory::map(len, Protection::ReadWrite)?,
        };
        ensure!(start != 0, "no memory for {len} bytes");
        Ok(Block { start: black_box(start), len, origin })
    }

    /// The first `len` bytes of `file`.
    ///
    /// # Errors
    /// If it can't be mapped.
    pub fn of_file(file: &File, len: usize) -> Result<Block> {
        let (protection, descriptor) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a new mapping, which takes the place of no other.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, descriptor, 0) };
        ensure!(start != libc::MAP_FAILED, "the file can't be mapped: {}", std::io::Error::last_os_error());
        Ok(Block { start: start as usize, len, origin: Origin::Map })
    }

    /// Asks for 4 KiB pages throughout, as a program does that fears huge ones.
    pub fn without_huge_pages(self) -> Block {
        self.advise(libc::MADV_NOHUGEPAGE);
        self
    }

    /// Asks for huge pages.
    pub fn with_huge_pages(self) -> Block {
        self.advise(libc::MADV_HUGEPAGE);
        self
    }

    /// Where the kernel has no huge pages it refuses, and there is nothing to ask for.
    fn advise(&self, advice: libc::c_int) {
        let start = round_up(self.start, PAGE_SIZE).unwrap_or(self.start);
        let len = (self.start + self.len - start) & !(PAGE_SIZE - 1);
        // SAFETY: whole pages inside memory that is ours; the advice does not change contents.
        unsafe { libc::madvise(start as *mut _, len, advice) };
    }

    /// Writes to each page.
    pub fn touch(&self) {
        self.mark(0, self.len);
    }

    /// Writes to the first byte and to the one in the middle.
    pub fn touch_two_bytes(&self) {
        for offset in [0, self.len / 2] {
            // SAFETY: the byte lies inside memory that is ours; no block is empty.
            unsafe { ((self.start + offset) as *mut u8).write_volatile(1) };
        }
    }

    /// As [`Block::touch`], by as many threads as there are CPUs.
    pub fn touch_in_parallel(&self) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
        let share = (self.len / threads).next_multiple_of(PAGE_SIZE);
        std::thread::scope(|scope| {
            for index in 0..threads {
                scope.spawn(move || {
                    self.mark((share * index).min(self.len), (share * (index + 1)).min(self.len));
                });
            }
        });
    }

    /// Writes a mark to each page from `from` to `to`, which can be checked by [`Block::check`].
    pub fn mark(&self, from: usize, to: usize) {
        assert!(to <= self.len);
        for offset in (from..to).step_by(PAGE_SIZE) {
            // SAFETY: the byte lies inside memory that is ours; parallel callers mark disjoint parts.
            unsafe { ((self.start + offset) as *mut u8).write_volatile(Self::mark_at(offset)) };
        }
    }

    /// Whether each page still has its mark.
    pub fn check(&self) -> bool {
        (0..self.len).step_by(PAGE_SIZE).all(|offset| {
            // SAFETY: the byte lies inside memory that is ours.
            unsafe { ((self.start + offset) as *const u8).read_volatile() == Self::mark_at(offset) }
        })
    }

    /// Never zero, and different from the neighbours'.
    fn mark_at(offset: usize) -> u8 {
        (offset / PAGE_SIZE % 251) as u8 + 1
    }

    /// Grows or shrinks the block by `realloc`.
    ///
    /// # Errors
    /// If there is no such memory.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        assert_ne!(self.origin, Origin::Map);
        // SAFETY: the block came from malloc or calloc and is ours.
        let start = unsafe { libc::realloc(self.start as *mut _, len) as usize };
        ensure!(start != 0, "no memory for {len} bytes");
        self.start = black_box(start);
        self.len = len;
        Ok(())
    }

    /// Leaves the block for the kernel to take back when the process ends.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: the block came from malloc or calloc, and nobody uses it after its owner.
            Origin::Malloc | Origin::Calloc => unsafe { libc::free(self.start as *mut _) },
            // SAFETY: the mapping is ours, and nobody uses it after its owner.
            Origin::Map => unsafe {
                let _ = memory::unmap(Range { start: self.start, len: self.len });
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn marks_survive_growth_and_damage_is_seen() {
        let mut block = Block::new(Origin::Malloc, 1 << 20).unwrap().without_huge_pages();
        block.touch_in_parallel();
        block.resize(4 << 20).unwrap();
        block.mark(1 << 20, 4 << 20);
        assert!(block.check());
        // SAFETY: inside the block.
        unsafe { ((block.start + PAGE_SIZE) as *mut u8).write_volatile(0) };
        assert!(!block.check());
    }

    #[test]
    fn every_origin_gives_memory_that_can_be_touched() {
        for origin in [Origin::Malloc, Origin::Calloc, Origin::Map] {
            let block = Block::new(origin, 3 * PAGE_SIZE).unwrap();
            block.touch();
            assert!(block.check());
        }
    }

    #[test]
    fn what_is_written_to_a_file_s_block_is_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(3 * PAGE_SIZE as u64).unwrap();
        let block = Block::of_file(&file, 3 * PAGE_SIZE).unwrap();
        block.touch();
        let mut contents = Vec::new();
        file.read_to_end(&mut contents).unwrap();
        let marks: Vec<u8> = contents.into_iter().step_by(PAGE_SIZE).collect();
        assert_eq!(marks, [1, 2, 3]);
    }
}
