//! Zeroing on the spot what a pool had not ready: in parallel, by whoever asked, on his CPU and in his control group.

use super::error::Error;
use crate::crew::{Crew, Idle, Operation, Task};
use crate::sys::memory::Range;
use crate::sys::shared_file::{self, Mapped};
use crate::sys::topology::Topology;
use crate::sys::{Errno, sched};
use std::fs::File;

/// So much is zeroed between two questions whether it is still wanted.
const PIECE: usize = 256 << 20;

/// Backs `file` from `ready` to `size`, both in bytes and multiples of 2 MiB, as long as that is `wanted`.
///
/// # Errors
/// [`Error::NotFilled`] where there is not enough memory.
pub(super) fn complete(file: &File, ready: usize, size: usize, mut wanted: impl FnMut() -> bool) -> Result<(), Error> {
    if ready >= size {
        return Ok(());
    }
    let backed = || shared_file::backed_bytes(file).unwrap_or(0).min(size);
    let not_filled = |_: Errno| Error::NotFilled { size, backed: backed() };
    let mapped = Mapped::new(file, ready, size - ready).map_err(not_filled)?;
    let crew = crew().map_err(not_filled)?;
    let range = mapped.range();
    // From the end on: a virtual machine monitor that has just been started may be at the same from the beginning on, and then the two
    // meet once instead of page by page.
    for start in (range.start..range.end()).step_by(PIECE).rev() {
        if !wanted() {
            return Ok(());
        }
        let piece = Range { start, len: PIECE.min(range.end() - start) };
        // SAFETY: the range is mapped read-write until after the crew was dropped, and populating changes no contents.
        unsafe { crew.run(Task { operation: Operation::Populate, range: piece, node: 0, report: false }) };
    }
    drop(crew);
    match backed() {
        all if all == size => Ok(()),
        _ => Err(not_filled(Errno(0))),
    }
}

/// Helpers of the idle class, where there are CPUs for them.
fn crew() -> Result<Crew<Idle>, Errno> {
    Ok(Crew::new(Idle::new()?, None, sched::with_offline(sched::affinity()?), Topology::read()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> File {
        let path = format!("/dev/shm/pagecrew-{name}-{}", std::process::id());
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file
    }

    #[test]
    fn what_is_missing_is_backed_and_nothing_else() {
        let file = file("complete");
        for (ready, size) in [(0, 16 << 20), (16 << 20, 64 << 20), (64 << 20, 64 << 20)] {
            file.set_len(96 << 20).unwrap();
            complete(&file, ready, size, || true).unwrap();
            assert_eq!(shared_file::backed_bytes(&file), Ok(size));
        }
    }

    #[test]
    fn what_is_no_longer_wanted_is_left() {
        let file = file("unwanted");
        file.set_len(8 << 20).unwrap();
        complete(&file, 0, 8 << 20, || false).unwrap();
        assert_eq!(shared_file::backed_bytes(&file), Ok(0));
    }

    #[test]
    fn what_is_not_there_to_be_had_is_an_error() {
        // A file shorter than what is asked for: what lies behind its end can't be backed.
        let file = file("short");
        file.set_len(8 << 20).unwrap();
        let error = complete(&file, 0, 16 << 20, || true).unwrap_err();
        assert_eq!(error, Error::NotFilled { size: 16 << 20, backed: 8 << 20 });
    }
}
