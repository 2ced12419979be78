//! A C++ program: RocksDB, by its own benchmark `db_bench`. Its memtables, and the buffers with which it merges
//! files, are what is large.

use super::{Metric, Program};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{self, on_path};
use crate::report::Report;
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;

const VALUE_BYTES: usize = 800;
/// What the data base takes on top of one copy of its values while it merges files.
const ROOM: usize = 4;
const READS: usize = 200_000;

pub fn prepare(report: &Report) -> Result<Option<Program>> {
    if !on_path("db_bench") {
        report.note("db_bench is not installed (package rocksdb-tools); RocksDB is left out");
        return Ok(None);
    }
    let values = machine::affordable((1 << 20) * VALUE_BYTES * ROOM, report) / VALUE_BYTES / ROOM;
    let metrics = ["fillrandom", "overwrite", "the whole job"]
        .map(|name| Metric::new(name, "s"))
        .into_iter()
        .chain(Metric::faults_and_peak())
        .collect();
    let mut expected = None::<String>;
    let run = move |contestant: &Contestant, _pause: Duration| {
        // In memory, so that the speed of a disk does not count.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let mut command = Command::new("db_bench");
        command.arg(format!("--db={}", directory.path().display())).args([
            "--benchmarks=fillrandom,overwrite,readrandom",
            "--seed=7",
            "--write_buffer_size=67108864",
            "--max_write_buffer_number=4",
            "--cache_size=536870912",
            "--compaction_readahead_size=8388608",
            "--compression_type=none",
            "--disable_wal=1",
            &format!("--num={values}"),
            &format!("--reads={READS}"),
            &format!("--value_size={VALUE_BYTES}"),
        ]);
        command.stderr(std::process::Stdio::null());
        contestant.prepare(&mut command);
        let outcome = program::run(&mut command)?;
        let usage = outcome.usage;
        let found = found(&outcome.output).context("db_bench did not say what it found")?;
        let expected = expected.get_or_insert_with(|| found.to_owned());
        ensure!(expected == found, "the results differ: {found} instead of {expected}");
        let step = |name| step_seconds(&outcome.output, name).with_context(|| format!("db_bench printed no {name}"));
        let (fill, overwrite) = (step("fillrandom")?, step("overwrite")?);
        Ok((vec![fill, overwrite, usage.seconds, usage.faults as f64, usage.peak_mib], None))
    };
    Ok(Some(Program { name: "RocksDB", metrics, run: Box::new(run) }))
}

/// The seconds on the line of the step called `name`: `fillrandom : 2.8 micros/op 356126 ops/sec 4.212 seconds ...`.
fn step_seconds(output: &str, name: &str) -> Option<f64> {
    let line = output.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split(" seconds ").next()?.split_whitespace().last()?.parse().ok()
}

/// How many of the keys that were read are there, in parentheses on the last step's line.
fn found(output: &str) -> Option<&str> {
    let line = output.lines().find(|line| line.starts_with("readrandom"))?;
    Some(line.split_once('(')?.1.trim_end_matches(')'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_db_bench() {
        let output = "\
fillrandom   :       2.808 micros/op 356126 ops/sec 4.212 seconds 1500000 operations;  277.1 MB/s
readrandom   :      17.255 micros/op 57954 ops/sec 5.176 seconds 300000 operations;   38.9 MB/s (258857 of 300000 found)
";
        assert_eq!(step_seconds(output, "fillrandom"), Some(4.212));
        assert_eq!(step_seconds(output, "overwrite"), None);
        assert_eq!(found(output), Some("258857 of 300000 found"));
        assert_eq!(found("fillrandom : 1"), None);
    }
}
