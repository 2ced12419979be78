//! Real programs, each as it is run any number of times: with generated inputs, and with results that are compared.

mod data;
mod job;
mod postgres;
mod scripts;
mod tools;

use crate::contestant::Contestant;
use crate::machine;
use crate::program::Usage;
use crate::report::Report;
use anyhow::{Result, ensure};

/// A program, and what is expected of Pagecrew with it.
#[derive(Clone, Copy)]
pub struct Definition {
    pub name: &'static str,
    /// How many times less time it has to take with Pagecrew.
    pub least: f64,
    /// More memory than it needs at its peak.
    memory: usize,
    /// Finds it and makes its inputs; nothing where it is not installed, which `Report` hears of.
    prepare: fn(&Report) -> Result<Option<Run>>,
}

/// One run.
pub type Run = Box<dyn FnMut(&Contestant) -> Result<Done>>;

/// What one run gave.
pub struct Done {
    pub usage: Usage,
    /// Depends on all that the program printed or wrote, and on its exit status.
    pub result: u64,
}

/// What every program gains that isn't helped: nothing is lost.
const NO_LOSS: f64 = 0.98;

const MIB: usize = 1 << 20;

pub const JAVA: Definition = Definition { name: "Java", least: 1.4, memory: 3400 * MIB, prepare: scripts::java };
pub const NODE: Definition = Definition { name: "Node", least: 3.0, memory: 1400 * MIB, prepare: scripts::node };
pub const POLARS: Definition = Definition { name: "Polars", least: 1.25, memory: 640 * MIB, prepare: scripts::polars };
pub const DUCKDB: Definition = Definition { name: "DuckDB", least: 1.06, memory: 1280 * MIB, prepare: scripts::duckdb };

/// One that must not lose.
const fn unhelped(name: &'static str, mib: usize, prepare: fn(&Report) -> Result<Option<Run>>) -> Definition {
    Definition { name, least: NO_LOSS, memory: mib * MIB, prepare }
}

/// Every program, in the order in which they run. Redis is the demo's, with less data.
pub const ALL: [Definition; 18] = [
    JAVA,
    NODE,
    POLARS,
    DUCKDB,
    unhelped("pandas", 640, scripts::pandas),
    unhelped("PyArrow", 512, scripts::pyarrow),
    unhelped("NumPy", 512, scripts::numpy),
    unhelped("scikit-learn", 256, scripts::scikit_learn),
    unhelped("R", 256, scripts::r),
    unhelped("ImageMagick", 256, tools::image_magick),
    unhelped("ffmpeg", 256, tools::ffmpeg),
    unhelped("sort", 256, tools::sort),
    unhelped("g++", 512, tools::compiler),
    unhelped("git gc", 256, tools::git),
    unhelped("SQLite", 256, tools::sqlite),
    unhelped("PostgreSQL pgbench", 256, postgres::transactions),
    unhelped("PostgreSQL sort", 768, postgres::sort),
    unhelped("Redis", 1024, crate::demo::redis_run),
];

impl Definition {
    /// The program, if it is installed.
    ///
    /// # Errors
    /// If its inputs can't be made.
    pub fn prepare(&self, report: &Report) -> Result<Option<Program>> {
        let run = (self.prepare)(report)?;
        Ok(run.map(|run| Program { definition: *self, run, expected: None }))
    }
}

/// A program that is ready.
pub struct Program {
    pub definition: Definition,
    run: Run,
    expected: Option<u64>,
}

impl Program {
    /// Runs it once with memory that was warmed.
    ///
    /// # Errors
    /// If it can't be run, or its results or its exit status differ from those of the first run.
    pub fn run(&mut self, contestant: &Contestant) -> Result<Usage> {
        machine::warm_for_a_run(self.definition.memory)?;
        self.run_cold(contestant)
    }

    fn run_cold(&mut self, contestant: &Contestant) -> Result<Usage> {
        let done = (self.run)(contestant)?;
        let expected = *self.expected.get_or_insert(done.result);
        ensure!(expected == done.result, "its results or its exit status differ from those of its first run");
        Ok(done.usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that ends with the number of its run, and at last always with 1.
    fn restless() -> Run {
        let mut status = 0;
        Box::new(move |contestant| {
            status = (status + 1).min(2);
            job::run(&["sh", "-c", &format!("echo x; exit {status}")], contestant)
        })
    }

    #[test]
    fn a_run_with_another_exit_status_is_an_error() {
        let definition = unhelped("sh", 1, |_| Ok(Some(restless())));
        let mut program = definition.prepare(&Report::new(true)).unwrap().unwrap();
        program.run_cold(&Contestant::plain("without")).unwrap();
        let error = program.run_cold(&Contestant::plain("without")).unwrap_err();
        assert!(error.to_string().contains("exit status"), "{error}");
    }

    /// With the library that `PAGECREW_PRELOAD` names, if there is one.
    #[test]
    #[ignore = "runs every program that is installed"]
    fn every_program_gives_the_same_twice() {
        let report = Report::new(true);
        let plain = Contestant::plain("without");
        let ours = Contestant::pagecrew().unwrap_or_else(|_| plain.clone());
        let mut failed = Vec::new();
        for definition in ALL {
            let twice = || {
                let Some(mut program) = definition.prepare(&report)? else { return Ok(()) };
                for contestant in [&plain, &ours] {
                    let usage = program.run_cold(contestant)?;
                    println!("{}, {}: {usage:?}", definition.name, contestant.name);
                    ensure!(
                        usage.peak_mib * (MIB as f64) < definition.memory as f64,
                        "it needs {} MiB",
                        usage.peak_mib
                    );
                }
                Ok(())
            };
            if let Err(error) = twice() {
                failed.push(format!("{}: {error:#}", definition.name));
            }
        }
        assert!(failed.is_empty(), "{failed:#?}");
    }

    #[test]
    fn names_are_different() {
        let mut names: Vec<_> = ALL.iter().map(|program| program.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }
}
