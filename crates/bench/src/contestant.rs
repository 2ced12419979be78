//! Whose memory a measured program runs on: Pagecrew's, or that of a malloc which a user would preload instead.

use crate::report::Report;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A name for the tables and the environment that a program gets.
#[derive(Debug, Clone)]
pub struct Contestant {
    pub name: String,
    preload: Vec<PathBuf>,
    variables: Vec<(&'static str, OsString)>,
}

/// Variables that change what a malloc or Pagecrew does: a measured program gets only those that its contestant sets.
fn is_tuning(variable: &str) -> bool {
    const PREFIXES: [&str; 5] = ["PAGECREW_", "MALLOC_", "MIMALLOC_", "TCMALLOC_", "JE_MALLOC_"];
    const NAMES: [&str; 4] = ["LD_PRELOAD", "LD_AUDIT", "GLIBC_TUNABLES", "PYTHONMALLOC"];
    NAMES.contains(&variable) || PREFIXES.iter().any(|prefix| variable.starts_with(prefix))
}

impl Contestant {
    /// The program's own malloc: nothing is preloaded.
    pub fn plain(name: &str) -> Contestant {
        Contestant { name: name.to_owned(), preload: Vec::new(), variables: Vec::new() }
    }

    /// Pagecrew's preload library over the program's own malloc.
    ///
    /// # Errors
    /// If the library can't be found.
    pub fn pagecrew() -> Result<Contestant> {
        Ok(Contestant { preload: vec![preload_library()?], ..Contestant::plain("pagecrew") })
    }

    /// The same contestant with another environment variable.
    pub fn with(mut self, variable: &'static str, value: impl Into<OsString>) -> Contestant {
        self.variables.push((variable, value.into()));
        self
    }

    /// This contestant in front of `below`, whose malloc it then stands on.
    pub fn over(mut self, below: &Contestant) -> Contestant {
        self.name = format!("{} over {}", self.name, below.name);
        self.preload.extend(below.preload.iter().cloned());
        self.variables.extend(below.variables.iter().cloned());
        self
    }

    /// This contestant with its libraries copied to `directory`, for a user who can't read them where they are.
    ///
    /// # Errors
    /// If they can't be copied.
    pub fn copied_to(&self, directory: &Path) -> Result<Contestant> {
        let mut copied = self.clone();
        for path in &mut copied.preload {
            let copy = directory.join(path.file_name().context("a library without a name")?);
            std::fs::copy(&*path, &copy).with_context(|| format!("copying {}", path.display()))?;
            *path = copy;
        }
        Ok(copied)
    }

    /// Gives `command` this contestant's environment.
    pub fn prepare(&self, command: &mut Command) {
        for (variable, _) in std::env::vars_os() {
            if variable.to_str().is_some_and(is_tuning) {
                command.env_remove(variable);
            }
        }
        if !self.preload.is_empty() {
            let list: Vec<_> = self.preload.iter().map(|path| path.as_os_str()).collect();
            command.env("LD_PRELOAD", list.join(":".as_ref()));
        }
        for (variable, value) in &self.variables {
            command.env(variable, value);
        }
    }
}

/// The preload library: what `PAGECREW_PRELOAD` names, beside this executable, or where `make install` puts it.
fn preload_library() -> Result<PathBuf> {
    const FILE: &str = "libpagecrew_preload.so";
    if let Some(path) = std::env::var_os("PAGECREW_PRELOAD") {
        let path = PathBuf::from(path);
        if path.is_file() {
            return Ok(path.canonicalize()?);
        }
        bail!("PAGECREW_PRELOAD names {}, which is not there", path.display());
    }
    let executable = std::env::current_exe().context("this executable's path is not known")?;
    let directory = executable.parent().unwrap_or(Path::new("/"));
    let places = [directory.join(FILE), directory.join("../lib/pagecrew").join(FILE)];
    places
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .with_context(|| format!("{FILE} is neither beside {} nor in ../lib/pagecrew", executable.display()))
}

/// A malloc that Debian ships as a library.
struct Library {
    name: &'static str,
    files: &'static [&'static str],
    package: &'static str,
}

const LIBRARIES: [Library; 3] = [
    Library { name: "jemalloc", files: &["libjemalloc.so.2"], package: "libjemalloc2" },
    Library {
        name: "mimalloc",
        files: &["libmimalloc.so.2.0", "libmimalloc.so.2", "libmimalloc.so.3"],
        package: "libmimalloc2.0",
    },
    Library { name: "tcmalloc", files: &["libtcmalloc_minimal.so.4"], package: "libtcmalloc-minimal4" },
];

/// The mallocs that are installed here.
#[derive(Debug, Clone, Default)]
pub struct Peers(Vec<Contestant>);

impl Peers {
    /// Looks for each; `report` hears of those that are missing.
    pub fn find(report: &Report) -> Peers {
        let mut found = Vec::new();
        for library in &LIBRARIES {
            match locate(library.files) {
                Some(path) => {
                    found.push(Contestant { preload: vec![path], ..Contestant::plain(library.name) });
                }
                None => report.note(&format!(
                    "{} is not installed (package {}); comparisons with it are left out",
                    library.name, library.package
                )),
            }
        }
        Peers(found)
    }

    /// The one called `name`, if it is installed.
    pub fn named(&self, name: &str) -> Option<&Contestant> {
        self.0.iter().find(|peer| peer.name == name)
    }

    /// All of them as users get them.
    pub fn all(&self) -> &[Contestant] {
        &self.0
    }
}

/// The first of `files` in a directory of shared libraries.
fn locate(files: &[&str]) -> Option<PathBuf> {
    let mut directories = vec![PathBuf::from("/usr/lib"), PathBuf::from("/usr/lib64"), PathBuf::from("/usr/local/lib")];
    let triplet = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    directories.insert(0, triplet.into());
    files
        .iter()
        .flat_map(|file| directories.iter().map(move |directory| directory.join(file)))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn environment(contestant: &Contestant) -> HashMap<String, Option<String>> {
        let mut command = Command::new("true");
        contestant.prepare(&mut command);
        let text = |value: &std::ffi::OsStr| value.to_string_lossy().into_owned();
        command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect()
    }

    fn library(name: &str, path: &str) -> Contestant {
        Contestant { preload: vec![path.into()], ..Contestant::plain(name) }
    }

    #[test]
    fn one_malloc_over_another() {
        let below = library("tcmalloc", "/b.so").with("TCMALLOC_X", "1");
        let both = library("pagecrew", "/a.so").with("PAGECREW_RETAIN", "0").over(&below);
        assert_eq!(both.name, "pagecrew over tcmalloc");
        let environment = environment(&both);
        assert_eq!(environment["LD_PRELOAD"].as_deref(), Some("/a.so:/b.so"));
        assert_eq!(environment["PAGECREW_RETAIN"].as_deref(), Some("0"));
        assert_eq!(environment["TCMALLOC_X"].as_deref(), Some("1"));
    }

    #[test]
    fn only_what_tunes_a_malloc_is_taken_out_of_the_environment() {
        for variable in ["LD_PRELOAD", "PAGECREW_RETAIN", "MALLOC_CONF", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"] {
            assert!(is_tuning(variable), "{variable}");
        }
        for variable in ["PATH", "HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"] {
            assert!(!is_tuning(variable), "{variable}");
        }
    }
}
