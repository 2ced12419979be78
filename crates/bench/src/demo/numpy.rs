//! A NumPy job that finds clusters.

use super::{Metric, Program};
use crate::contestant::Contestant;
use crate::machine;
use crate::program;
use crate::python;
use crate::report::Report;
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;

const SCRIPT: &str = include_str!("../../scripts/clusters.py");

/// Memory that the job needs for each point.
const BYTES_PER_POINT: usize = 128;

pub fn prepare(report: &Report) -> Result<Option<Program>> {
    let Some(python) = python::with_numpy() else {
        report.note(python::MISSING);
        return Ok(None);
    };
    let points = machine::affordable((1 << 23) * BYTES_PER_POINT, report) / BYTES_PER_POINT;
    let metrics = [Metric::new("time", "s")].into_iter().chain(Metric::faults_and_peak()).collect();
    let mut expected = None::<String>;
    let run = move |contestant: &Contestant, pause: Duration| {
        let mut command = Command::new(&python);
        command.args(["-c", SCRIPT, &points.to_string(), &pause.as_secs().to_string()]);
        contestant.prepare(&mut command);
        let outcome = program::run(&mut command)?;
        let (found, resident) = outcome.output.trim_end().split_once('\n').context("the job printed no result")?;
        let expected = expected.get_or_insert_with(|| found.to_owned());
        ensure!(expected == found, "the results differ: {found} instead of {expected}");
        let usage = outcome.usage;
        let seconds = usage.seconds - pause.as_secs_f64();
        Ok((vec![seconds, usage.faults as f64, usage.peak_mib], Some(resident.parse()?)))
    };
    Ok(Some(Program { name: "NumPy", metrics, run: Box::new(run) }))
}
