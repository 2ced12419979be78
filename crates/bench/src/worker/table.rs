//! A hash table that is looked up at random, in huge pages or in small ones.

use super::huge::{Huge, Pages};
use super::random::{Random, mix};
use super::say;
use super::sparse::{mark, wrong_marks, wrong_zeroes};
use anyhow::{Result, bail, ensure};
use pagecrew::sys::clock::now_ns;
use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering};

/// Look-ups in a window: some 25 ms. Whoever compares two programs has them take turns, window by window, and the
/// shorter those are, the less of what disturbs the machine for a while falls on one side only.
const LOOKUPS: u64 = 100_000;

/// What the program has beside its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: the table fills its memory.
    Dense,
    /// As much memory again, of which it wrote one byte every 50 KiB and never touches one again.
    Half,
}

impl Kind {
    pub fn named(name: &str) -> Result<Kind> {
        Ok(match name {
            "dense" => Kind::Dense,
            "half" => Kind::Half,
            other => bail!("a table's memory is dense or half so, not '{other}'"),
        })
    }

    /// Bytes of the table in a program of `bytes`.
    pub const fn table(self, bytes: usize) -> usize {
        match self {
            Kind::Dense => bytes,
            Kind::Half => bytes / 2,
        }
    }
}

/// Keys in an array with as many free places, each at the first free place from where its first bits point to. No key
/// is zero.
struct Table<'m> {
    places: &'m [AtomicU64],
    shift: u32,
    keys: u64,
}

impl<'m> Table<'m> {
    /// Fills `places`, of which there are a power of two.
    fn new(places: &'m [AtomicU64]) -> Table<'m> {
        assert!(places.len().is_power_of_two());
        let table = Table { places, shift: 64 - places.len().ilog2(), keys: places.len() as u64 / 2 };
        for key in (1..=table.keys).map(mix) {
            table.place(key).store(key, Ordering::Relaxed);
        }
        table
    }

    /// Where `key` is, or the free place where it would have to be.
    #[inline(always)]
    fn place(&self, key: u64) -> &AtomicU64 {
        let mut index = (key >> self.shift) as usize;
        loop {
            let place = &self.places[index];
            let found = place.load(Ordering::Relaxed);
            if found == key || found == 0 {
                return place;
            }
            index = (index + 1) % self.places.len();
        }
    }

    /// Looks up `count` keys at random, each when the one before was found; whether all of them were there.
    fn look_up(&self, random: &mut Random, count: u64) -> bool {
        let (mut wanted, mut found) = (0u64, 0u64);
        for _ in 0..count {
            let key = mix(random.below(self.keys) + 1);
            let value = self.place(key).load(Ordering::Relaxed);
            wanted = wanted.wrapping_add(key);
            found = found.wrapping_add(value);
            // Nothing changes by this, but only the value says so: programs seldom know what they want next before they
            // have it.
            random.disturb(key ^ value);
        }
        wanted == found
    }
}

/// Fills `bytes` with a table and what `kind` has beside it, and says where they begin. Answers each line with the
/// nanoseconds that a look-up took in a window of them. At the end of its input everything that it wrote has to be
/// there.
pub fn run(kind: Kind, bytes: usize, pages: Pages, mut input: impl BufRead) -> Result<()> {
    let memory = Huge::new(bytes, pages)?;
    let end = kind.table(bytes);
    let places = memory.words(end);
    ensure!(places.len().is_power_of_two(), "a table of {end} bytes has not a power of two of places");
    let table = Table::new(places);
    mark(&memory, end);
    let mut random = Random::new(1);
    table.look_up(&mut random, LOOKUPS);
    say(memory.start() as f64)?;
    let mut line = String::new();
    while input.read_line(&mut line)? > 0 {
        let start = now_ns();
        ensure!(table.look_up(&mut random, LOOKUPS), "the table has lost a key");
        say((now_ns() - start) as f64 / LOOKUPS as f64)?;
    }
    let all = (1..=table.keys).map(mix).all(|key| table.place(key).load(Ordering::Relaxed) == key);
    ensure!(all, "the table has lost a key");
    let wrong = wrong_marks(&memory, end) + wrong_zeroes(&memory, end);
    ensure!(wrong == 0, "{wrong} bytes beside the table have changed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagecrew::sys::HUGE_PAGE_SIZE;

    #[test]
    fn every_key_is_found_and_a_lost_one_is_missed() {
        let memory = Huge::new(HUGE_PAGE_SIZE, Pages::Small).unwrap();
        let places = &memory.words(HUGE_PAGE_SIZE)[..1024];
        let table = Table::new(places);
        assert_eq!(places.iter().filter(|place| place.load(Ordering::Relaxed) != 0).count(), 512);
        let mut random = Random::new(3);
        assert!(table.look_up(&mut random, 10_000));
        table.place(mix(1)).store(0, Ordering::Relaxed);
        assert!(!table.look_up(&mut random, 10_000));
    }

    #[test]
    fn the_program_answers_lines() {
        run(Kind::Half, 2 * HUGE_PAGE_SIZE, Pages::Huge, &b"\n"[..]).unwrap();
        run(Kind::Dense, HUGE_PAGE_SIZE, Pages::Small, &b""[..]).unwrap();
        assert!(run(Kind::Dense, 3 * HUGE_PAGE_SIZE, Pages::Small, &b""[..]).is_err());
        assert!(Kind::named("sparse").is_err());
    }
}
