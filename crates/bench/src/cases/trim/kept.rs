//! Changes to the system that are undone when they are dropped, and also where this process is interrupted, fails or is
//! killed.

use crate::contestant::Contestant;
use crate::program::{Running, worker};
use anyhow::Result;
use std::path::Path;

/// A change. A process of its own makes it and undoes it when this one lets go of it, for whatever reason.
pub struct Kept(Option<Running>);

impl Kept {
    /// Writes `value` to the file `path`.
    ///
    /// # Errors
    /// If that is refused.
    pub fn setting(path: &Path, value: &str) -> Result<Kept> {
        Kept::start(&["keep-setting", &path.to_string_lossy(), value])
    }

    /// Makes the control group `path`. Whatever is in it at the end is killed.
    ///
    /// # Errors
    /// If that is refused.
    pub fn group(path: &Path) -> Result<Kept> {
        Kept::start(&["keep-group", &path.to_string_lossy()])
    }

    fn start(arguments: &[&str]) -> Result<Kept> {
        let mut keeper = Kept(Some(Running::start(&mut worker(&Contestant::plain(""), arguments))?));
        if let Some(running) = &mut keeper.0 {
            running.figure()?;
        }
        Ok(keeper)
    }

    /// Undoes the change.
    ///
    /// # Errors
    /// If that fails.
    pub fn undo(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |keeper| keeper.wait().map(drop))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // It must not be killed, which is what dropping it would do.
        if let Some(keeper) = self.0.take() {
            let _ = keeper.wait();
        }
    }
}
