//! Python with and without NumPy.

use crate::program;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why the NumPy rows are left out.
pub const MISSING: &str = "no Python with NumPy and pandas in .venv (make setup); what needs it is left out";

/// A Python that has NumPy and pandas: the active virtual environment's, or that of `.venv` here or above this executable.
pub fn with_numpy() -> Option<PathBuf> {
    let mut environments = Vec::new();
    environments.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    let executable = std::env::current_exe().unwrap_or_default();
    let current = std::env::current_dir().unwrap_or_default();
    for place in current.ancestors().take(1).chain(executable.ancestors().skip(1)) {
        environments.push(place.join(".venv"));
    }
    environments.iter().map(|environment| environment.join("bin/python")).find(|python| has_numpy(python))
}

fn has_numpy(python: &Path) -> bool {
    has(python, "numpy, pandas")
}

/// Whether `python` has `modules`, which are separated by commas.
pub fn has(python: &Path, modules: &str) -> bool {
    python.is_file() && program::run(Command::new(python).args(["-c", &format!("import {modules}")])).is_ok()
}

/// The interpreter behind `python3`, which may be a script that looks for one.
pub fn interpreter() -> Option<PathBuf> {
    let script = "import os, sys; print(os.path.realpath(sys.executable))";
    let outcome = program::run(Command::new("python3").args(["-c", script])).ok()?;
    Some(PathBuf::from(outcome.output.trim())).filter(|path| path.is_file())
}
