//! Programs that use enough of each of their huge pages, in ways that are more or less easy to see.

use super::huge::{Huge, Pages};
use super::random::Random;
use super::say;
use anyhow::{Result, bail};
use pagecrew::sys::PAGE_SIZE;
use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers in a page of 4 KiB, and in a cache line.
const PAGE: usize = PAGE_SIZE / size_of::<u64>();
const LINE: usize = 64 / size_of::<u64>();

/// How the memory is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Every byte is random.
    Random,
    /// In each page of 4 KiB, one cache line at a random place is; the rest is zero.
    Line,
    /// 60 of 100 pages of 4 KiB are zero, the others random: not enough to be under-used.
    Zeroes,
}

impl Kind {
    pub fn named(name: &str) -> Result<Kind> {
        Ok(match name {
            "random" => Kind::Random,
            "line" => Kind::Line,
            "zeroes" => Kind::Zeroes,
            other => bail!("memory is used in the manner random, line or zeroes, not '{other}'"),
        })
    }

    /// Calls `each` with the contents of every page of 4 KiB in `words`, which are always the same.
    fn pages(self, words: &[AtomicU64], mut each: impl FnMut(&[AtomicU64], [u64; PAGE])) {
        let mut random = Random::new(words.len() as u64);
        for page in words.chunks(PAGE) {
            let used = match self {
                Kind::Random => 0..PAGE,
                Kind::Line => {
                    let first = random.below((PAGE / LINE) as u64) as usize * LINE;
                    first..first + LINE
                }
                Kind::Zeroes if random.below(100) < 60 => 0..0,
                Kind::Zeroes => 0..PAGE,
            };
            let mut contents = [0; PAGE];
            contents[used].iter_mut().for_each(|word| *word = random.next() | 1);
            each(page, contents);
        }
    }
}

/// Fills `bytes` in huge pages in the manner of `kind` and says where they begin. When a line comes, says how many
/// numbers are not what they have to be.
pub fn run(kind: Kind, bytes: usize, mut input: impl BufRead) -> Result<()> {
    let memory = Huge::new(bytes, Pages::Huge)?;
    let words = memory.words(bytes);
    kind.pages(words, |page, contents| {
        page.iter().zip(contents).filter(|(_, value)| *value != 0).for_each(|(word, value)| {
            word.store(value, Ordering::Relaxed);
        });
    });
    say(memory.start() as f64)?;
    input.read_line(&mut String::new())?;
    let mut wrong = 0;
    kind.pages(words, |page, contents| {
        wrong += page.iter().zip(contents).filter(|(word, value)| word.load(Ordering::Relaxed) != *value).count();
    });
    say(wrong as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagecrew::sys::HUGE_PAGE_SIZE;

    /// Pages of 4 KiB with contents, and numbers that are not zero, in one huge page.
    fn used(kind: Kind) -> (usize, usize) {
        let memory = Huge::new(HUGE_PAGE_SIZE, Pages::Small).unwrap();
        let (mut pages, mut words) = (0, 0);
        kind.pages(memory.words(HUGE_PAGE_SIZE), |_, contents| {
            let used = contents.iter().filter(|&&word| word != 0).count();
            words += used;
            pages += usize::from(used > 0);
        });
        (pages, words)
    }

    #[test]
    fn each_kind_uses_what_it_says() {
        assert_eq!(used(Kind::Random), (512, 512 * PAGE));
        assert_eq!(used(Kind::Line), (512, 512 * LINE));
        let (pages, words) = used(Kind::Zeroes);
        assert!((150..260).contains(&pages), "{pages}");
        assert_eq!(words, pages * PAGE);
        assert!(Kind::named("full").is_err());
    }

    #[test]
    fn the_program_ends_when_its_input_does() {
        run(Kind::Line, HUGE_PAGE_SIZE, &b""[..]).unwrap();
    }
}
