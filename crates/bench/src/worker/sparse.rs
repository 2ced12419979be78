//! Programs that use little of each of their huge pages.

use super::huge::{Huge, Pages};
use super::say;
use anyhow::{Result, ensure};
use pagecrew::sys::{HUGE_PAGE_SIZE, PAGE_SIZE};
use std::io::BufRead;

/// A byte is written this often, in bytes: `stress --vm-stride 50K`, about 40 of the 512 pages of 4 KiB in a huge page.
pub const STRIDE: usize = 50 << 10;

/// Of so many pages of 4 KiB one is looked at byte by byte. Has no divisor in common with a huge page or with the
/// stride.
const SAMPLE: usize = 13;

/// Pages of 4 KiB that [`mark`] writes to in `bytes`.
pub const fn marked_pages(bytes: usize) -> usize {
    bytes.div_ceil(STRIDE)
}

/// What stands in the byte at a multiple of the stride: never zero.
fn mark_at(offset: usize) -> u8 {
    (offset / STRIDE % 251) as u8 + 1
}

/// Writes a byte every [`STRIDE`], from `from` to the end.
pub fn mark(memory: &Huge, from: usize) {
    for offset in (from..memory.len()).step_by(STRIDE) {
        memory.write(offset, mark_at(offset - from));
    }
}

/// How many of the bytes that [`mark`] wrote have changed.
pub fn wrong_marks(memory: &Huge, from: usize) -> usize {
    let wrong = |&offset: &usize| memory.read(offset) != mark_at(offset - from);
    (from..memory.len()).step_by(STRIDE).filter(wrong).count()
}

/// How many of the other bytes are no longer zero, in a sample of the pages of 4 KiB.
pub fn wrong_zeroes(memory: &Huge, from: usize) -> usize {
    let zeroes = |page: usize| (page..page + PAGE_SIZE).filter(|offset| !(offset - from).is_multiple_of(STRIDE));
    let pages = (from..memory.len()).step_by(SAMPLE * PAGE_SIZE);
    pages.flat_map(zeroes).filter(|&offset| memory.read(offset) != 0).count()
}

/// Marks `bytes` in huge pages and says where they begin. When a line comes, says how many bytes are not what they have
/// to be.
pub fn run(bytes: usize, mut input: impl BufRead) -> Result<()> {
    let memory = Huge::new(bytes, Pages::Huge)?;
    mark(&memory, 0);
    say(memory.start() as f64)?;
    input.read_line(&mut String::new())?;
    say((wrong_marks(&memory, 0) + wrong_zeroes(&memory, 0)) as f64)
}

/// What `stress --vm 1 --vm-stride 50K` does in huge pages: gets `bytes`, marks them, looks at all the marks, and gives
/// them back, for `rounds` rounds. Says how many rounds it did.
pub fn stress(bytes: usize, rounds: usize) -> Result<()> {
    for round in 0..rounds {
        let memory = Huge::new(bytes.next_multiple_of(HUGE_PAGE_SIZE), Pages::Huge)?;
        mark(&memory, 0);
        let wrong = wrong_marks(&memory, 0);
        ensure!(wrong == 0, "{wrong} bytes changed in round {round}");
    }
    say(rounds as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_is_seen_wherever_it_matters() {
        let memory = Huge::new(2 * HUGE_PAGE_SIZE, Pages::Small).unwrap();
        mark(&memory, HUGE_PAGE_SIZE);
        assert_eq!(wrong_marks(&memory, HUGE_PAGE_SIZE) + wrong_zeroes(&memory, HUGE_PAGE_SIZE), 0);
        memory.write(HUGE_PAGE_SIZE + STRIDE, 0);
        assert_eq!(wrong_marks(&memory, HUGE_PAGE_SIZE), 1);
        memory.write(HUGE_PAGE_SIZE + SAMPLE * PAGE_SIZE + 7, 1);
        memory.write(HUGE_PAGE_SIZE + 1, 1);
        assert_eq!(wrong_zeroes(&memory, HUGE_PAGE_SIZE), 2);
    }

    #[test]
    fn each_mark_is_in_a_page_of_its_own() {
        const { assert!(STRIDE > PAGE_SIZE) };
        assert_eq!(marked_pages(HUGE_PAGE_SIZE), 41);
        assert_eq!(marked_pages(STRIDE), 1);
    }

    #[test]
    fn the_program_ends_when_its_input_does() {
        run(HUGE_PAGE_SIZE, &b""[..]).unwrap();
    }
}
