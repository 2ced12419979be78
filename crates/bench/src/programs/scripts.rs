//! Jobs in languages that are run from source: Java, JavaScript, Python and R.

use super::Run;
use super::job::{Job, installed};
use crate::python;
use crate::report::Report;
use anyhow::{Result, ensure};
use std::process::Command;

/// The Java program makes that many arrays.
const ARRAYS: &str = "8000";

pub fn java(report: &Report) -> Result<Option<Run>> {
    let package = "default-jdk-headless";
    let programs = ["java", "javac"].map(|program| installed(&[program], program, package, report));
    let [Some(java), Some(javac)] = programs else { return Ok(None) };
    let job = Job::new()?.file("Arrays.java", include_str!("../../scripts/programs/Arrays.java"))?;
    let compiled = Command::new(javac).arg("Arrays.java").current_dir(job.directory()).status()?;
    ensure!(compiled.success(), "javac failed: {compiled}");
    Ok(Some(job.command(&[java, "-XX:+UseG1GC", "-Xms3g", "-Xmx3g", "Arrays", ARRAYS]).ready()))
}

pub fn node(report: &Report) -> Result<Option<Run>> {
    let Some(node) = installed(&["node", "nodejs"], "Node", "nodejs", report) else { return Ok(None) };
    let job = Job::new()?.file("buffers.js", include_str!("../../scripts/programs/buffers.js"))?;
    Ok(Some(job.command(&[node, "buffers.js", "80"]).ready()))
}

pub fn r(report: &Report) -> Result<Option<Run>> {
    let Some(r) = installed(&["Rscript"], "R", "r-base-core", report) else { return Ok(None) };
    let job = Job::new()?.file("job.R", include_str!("../../scripts/programs/job.R"))?;
    Ok(Some(job.command(&[r, "--vanilla", "job.R", "400000"]).ready()))
}

/// A Python job that needs `module`, of this many rows, of whose output that many lines are compared.
fn python(report: &Report, module: &str, script: &str, arguments: &[&str], lines: usize) -> Result<Option<Run>> {
    let found = python::with_numpy().filter(|python| python::has(python, module));
    let Some(python) = found else {
        report.note(&format!("no Python with {module} in .venv (make setup); it is left out"));
        return Ok(None);
    };
    let job = Job::new()?.file("job.py", script)?.program(python).command(&["job.py"]).command(arguments);
    // Otherwise Python's sets and dictionaries are in another order each time.
    Ok(Some(job.variable("PYTHONHASHSEED", "0").compare_lines(lines).ready()))
}

pub fn polars(report: &Report) -> Result<Option<Run>> {
    python(report, "polars", include_str!("../../scripts/programs/polars_job.py"), &["1500000"], usize::MAX)
}

pub fn duckdb(report: &Report) -> Result<Option<Run>> {
    python(report, "duckdb", include_str!("../../scripts/programs/duckdb_job.py"), &["3000000"], usize::MAX)
}

pub fn pandas(report: &Report) -> Result<Option<Run>> {
    python(report, "pandas", include_str!("../../scripts/data_frames.py"), &["500000"], usize::MAX)
}

pub fn pyarrow(report: &Report) -> Result<Option<Run>> {
    python(report, "pyarrow", include_str!("../../scripts/programs/pyarrow_job.py"), &["700000"], usize::MAX)
}

/// The second line of its output is the memory that it has left, which may differ.
pub fn numpy(report: &Report) -> Result<Option<Run>> {
    python(report, "numpy", include_str!("../../scripts/clusters.py"), &["2000000", "0"], 1)
}

pub fn scikit_learn(report: &Report) -> Result<Option<Run>> {
    python(report, "sklearn", include_str!("../../scripts/programs/scikit_job.py"), &["6000"], usize::MAX)
}
