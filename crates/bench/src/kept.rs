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
        Ok(Kept::start(&["keep-setting", &path.to_string_lossy(), value])?.0)
    }

    /// Gives the kernel's reclaim threads the nice value `value`.
    ///
    /// # Errors
    /// If that is refused.
    pub fn nice_kswapd(value: i32) -> Result<Kept> {
        Ok(Kept::start(&["keep-nice", &value.to_string()])?.0)
    }

    /// Has DAMON page out what nobody has used for a second.
    ///
    /// # Errors
    /// If that is refused, or somebody else has set DAMON up.
    pub fn damos() -> Result<Kept> {
        Ok(Kept::start(&["keep-damos"])?.0)
    }

    /// Makes the control group `path`. Whatever is in it at the end is killed.
    ///
    /// # Errors
    /// If that is refused.
    pub fn group(path: &Path) -> Result<Kept> {
        Ok(Kept::start(&["keep-group", &path.to_string_lossy()])?.0)
    }

    /// Mounts a hugetlbfs at the directory `path`, which it makes. Who has a file of it open at the end keeps that.
    ///
    /// # Errors
    /// If that is refused.
    pub fn hugetlbfs(path: &Path) -> Result<Kept> {
        Ok(Kept::start(&["keep-hugetlbfs", &path.to_string_lossy()])?.0)
    }

    /// Adds `bytes` of swap in compressed memory.
    ///
    /// # Errors
    /// If that is refused, or programs that it takes are missing.
    pub fn swap(bytes: usize) -> Result<Kept> {
        Ok(Kept::start(&["keep-swap", &bytes.to_string()])?.0)
    }

    /// Makes a fast disk of `bytes` in memory, full of files, one of them of `own` bytes, below the directory `base`.
    ///
    /// # Errors
    /// If that is refused, or programs that it takes are missing.
    pub fn disk(base: &Path, bytes: usize, own: usize) -> Result<Kept> {
        Ok(Kept::start(&["keep-disk", &base.to_string_lossy(), &bytes.to_string(), &own.to_string()])?.0)
    }

    /// Runs `pagecrew pool serve` with `options` and with all its files in the directory `base`, which it makes. Beside
    /// that comes what the server says where it can't be had here; nothing where it serves.
    ///
    /// # Errors
    /// If it fails.
    pub fn pool(base: &Path, options: &[&str]) -> Result<(Kept, String)> {
        Kept::start(&[&["keep-pool", &base.to_string_lossy()], options].concat())
    }

    /// The change that the worker `arguments` has made, and the line that it said then.
    fn start(arguments: &[&str]) -> Result<(Kept, String)> {
        let mut running = Running::start(&mut worker(&Contestant::plain(""), arguments))?;
        let line = running.line();
        let kept = Kept(Some(running));
        Ok((kept, line?))
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
