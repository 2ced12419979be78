//! The measured programs. Each calls malloc and its relatives as a C program does, and prints its figures, one a line.

mod block;
mod burst;
mod bystander;
mod cell;
mod churn;
mod damos;
mod delays;
mod dense;
mod disk;
mod frames;
mod grow;
mod huge;
mod idle;
mod keep;
mod load;
mod neighbour;
mod pairs;
mod pool;
mod random;
mod release;
mod serve;
mod small;
mod sparse;
mod table;

use anyhow::{Context, Result, bail};
use block::{Block, Origin};
pub use bystander::STRIDE as BYSTANDER_STRIDE;
pub use cell::Touch;
pub use delays::{Delays, SETTING as DELAYS};
pub use disk::{files as files_of_disk, own as file_of_neighbour};
pub use frames::LARGEST_BATCH;
use huge::Pages;
pub use serve::socket as pool_socket;
pub use small::Kind as SmallKind;
pub use sparse::marked_pages;
use std::fmt::Display;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
pub use table::Kind as TableKind;

/// Runs the worker that `args` name.
pub fn run(args: &[String]) -> Result<()> {
    let args = Arguments(args);
    match args.text(0)? {
        "warm" => warm(args.number(1)?),
        "release" => release::until_the_caller_goes_on(args.origin(1)?, args.number(2)?),
        "release-back" => release::until_the_memory_is_back(args.origin(1)?, args.number(2)?),
        "release-exit" => release::by_exit(args.number(1)?),
        "release-beside" => release::beside_others(args.origin(1)?, args.number(2)?),
        "idle" => idle::run(args.number(1)?, Duration::from_secs(args.number(2)? as u64)),
        "churn" => churn::run(args.number(1)?, Duration::from_millis(args.number(2)? as u64)),
        "grow" => grow::run(args.number(1)?, args.number(2)?),
        "frames" => frames::run(args.text(1)?, args.text(2)?, args.number(3)?),
        "frames-metadata" => frames::metadata(),
        "burst" => burst::run(args.thread(1)?, args.number(2)? as u64),
        "cell" => cell::run(&cell::Cell {
            low: args.number(1)?,
            high: args.number(2)?,
            touch: Touch::named(args.text(3)?)?,
            threads: args.number(4)?,
            slots: args.number(5)?,
            rounds: args.number(6)?,
            limit_ns: args.number(7)? as u64,
            idle_threads: args.number(8)?,
            live_spans: args.number(9)?,
            freed_before: args.number(10)?,
        }),
        "small" => small::run(small::Kind::named(args.text(1)?)?, args.number(2)?, args.number(3)? as u64),
        "pairs" => pairs::run(args.number(1)?, args.number(2)?),
        "bystander" => bystander::run(args.number(1)?, args.text(2)?, args.number(3)?),
        "keep-setting" => {
            keep::ignore_ends();
            keep::setting(Path::new(args.text(1)?), args.text(2)?, std::io::stdin().lock())
        }
        "keep-nice" => {
            keep::ignore_ends();
            keep::nice_kswapd(args.text(1)?.parse()?, std::io::stdin().lock())
        }
        "keep-damos" => {
            keep::ignore_ends();
            damos::keep(Path::new(damos::ADMIN), Path::new(damos::IOMEM), std::io::stdin().lock())
        }
        "keep-group" => {
            keep::ignore_ends();
            keep::group(Path::new(args.text(1)?), std::io::stdin().lock())
        }
        "keep-hugetlbfs" => {
            keep::ignore_ends();
            keep::hugetlbfs(Path::new(args.text(1)?), std::io::stdin().lock())
        }
        "keep-disk" => {
            keep::ignore_ends();
            disk::keep(Path::new(args.text(1)?), args.number(2)?, args.number(3)?, std::io::stdin().lock())
        }
        "lock" => disk::lock(args.number(1)?, std::io::stdin().lock()),
        "neighbour" => neighbour::run(Path::new(args.text(1)?), std::io::stdin().lock()),
        "load" => load::of_files(Path::new(args.text(1)?), args.number(2)?, load::Kind::named(args.text(3)?)?),
        "load-memory" => load::of_memory(args.number(1)?, args.number(2)?),
        "keep-swap" => {
            keep::ignore_ends();
            keep::swap(args.number(1)?, std::io::stdin().lock())
        }
        "read-slowly" => disk::read_slowly(Path::new(args.text(1)?), args.number(2)?),
        "keep-pool" => {
            keep::ignore_ends();
            serve::run(Path::new(args.text(1)?), args.from(2), std::io::stdin().lock())
        }
        "pool-take" => pool::take(Path::new(args.text(1)?), args.number(2)?, args.number(3)?),
        "pool-heap" => pool::heap(Path::new(args.text(1)?), args.number(2)?, args.number(3)?),
        "own-zeroes" => pool::own_zeroes(args.number(1)?),
        "own-heap" => pool::own_heap(args.number(1)?, args.pages(2)?),
        "trim-sparse" => sparse::run(args.number(1)?, std::io::stdin().lock()),
        "trim-stress" => sparse::stress(args.number(1)?, args.number(2)?),
        "trim-dense" => dense::run(dense::Kind::named(args.text(1)?)?, args.number(2)?, std::io::stdin().lock()),
        "trim-table" => {
            let kind = TableKind::named(args.text(1)?)?;
            table::run(kind, args.number(2)?, args.pages(3)?, std::io::stdin().lock())
        }
        other => bail!("there is no bench worker called '{other}'"),
    }
}

/// Has the machine find pages for `bytes` once. In huge pages: those the kernel hands out again first, whole or in parts, while small
/// ones go to the end of its lists.
fn warm(bytes: usize) -> Result<()> {
    Block::new(Origin::Map, bytes)?.with_huge_pages().touch_in_parallel();
    Ok(())
}

/// Prints a figure, or a line of text, so that a waiting parent has it at once.
fn say(what: impl Display) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{what}")?;
    Ok(output.flush()?)
}

/// A worker's arguments.
struct Arguments<'a>(&'a [String]);

impl<'a> Arguments<'a> {
    fn text(&self, index: usize) -> Result<&'a str> {
        Ok(self.0.get(index).with_context(|| format!("a bench worker needs an argument number {index}"))?)
    }

    fn number(&self, index: usize) -> Result<usize> {
        let text = self.text(index)?;
        text.parse().with_context(|| format!("'{text}' is not a number"))
    }

    /// All from number `index` on.
    fn from(&self, index: usize) -> &'a [String] {
        self.0.get(index..).unwrap_or_default()
    }

    fn origin(&self, index: usize) -> Result<Origin> {
        match self.text(index)? {
            "malloc" => Ok(Origin::Malloc),
            "map" => Ok(Origin::Map),
            other => bail!("memory comes from malloc or map, not from '{other}'"),
        }
    }

    /// Whether it is the main thread.
    fn thread(&self, index: usize) -> Result<bool> {
        match self.text(index)? {
            "main" => Ok(true),
            "other" => Ok(false),
            other => bail!("a thread is main or other, not '{other}'"),
        }
    }

    fn pages(&self, index: usize) -> Result<Pages> {
        match self.text(index)? {
            "huge" => Ok(Pages::Huge),
            "small" => Ok(Pages::Small),
            other => bail!("pages are huge or small, not '{other}'"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(args: &[&str]) -> Result<()> {
        run(&args.iter().map(|arg| arg.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_that_no_worker_understands() {
        let nonsense = [
            &[][..],
            &["dance"],
            &["warm"],
            &["warm", "much"],
            &["release", "heap", "4096"],
            &["cell", "1", "1", "half", "0", "1", "1", "1", "0", "0", "0"],
            &["small", "dance", "1", "1"],
            &["burst", "no", "1"],
            &["trim-table", "half", "4", "x"],
            &["pool-take", "/nonexistent/socket", "2097152", "0"],
            &["keep-pool", "/nonexistent/base"],
            &["keep-disk", "/nonexistent/base", "1048576", "65536"],
            &["neighbour", "/nonexistent"],
            &["load", "/nonexistent", "2", "cached"],
            &["load", "/nonexistent", "2", "half"],
            &["read-slowly", "/nonexistent", "1048576"],
        ];
        for args in nonsense {
            assert!(call(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn the_workers_work() {
        call(&["warm", "8388608"]).unwrap();
        call(&["release", "malloc", "8388608"]).unwrap();
        call(&["release", "map", "8388608"]).unwrap();
        call(&["grow", "1048576", "8388608"]).unwrap();
        call(&["pairs", "64", "1000"]).unwrap();
        call(&["idle", "67108864", "0"]).unwrap();
        call(&["cell", "65536", "1048576", "whole", "2", "4", "100", "1000000000", "3", "5", "20971520"]).unwrap();
        call(&["burst", "main", "1000000"]).unwrap();
        call(&["burst", "other", "1000000"]).unwrap();
        call(&["small", "larson", "2", "1000000"]).unwrap();
        call(&["small", "alloc-test", "1", "1000000"]).unwrap();
        call(&["trim-stress", "8388608", "2"]).unwrap();
        call(&["own-zeroes", "8388608"]).unwrap();
        call(&["own-heap", "8388608", "huge"]).unwrap();
        call(&["frames-metadata"]).unwrap();
        for source in ["pagecrew", "malloc", "locked"] {
            for (what, number) in [("pair", "1000"), ("all", "3000"), ("cold", "3000")] {
                call(&["frames", source, what, number]).unwrap();
            }
        }
        assert!(call(&["frames", "sky", "pair", "1"]).is_err() && call(&["frames", "locked", "dance", "1"]).is_err());
    }
}
