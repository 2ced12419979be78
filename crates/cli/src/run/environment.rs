//! The environment that a program gets.

use std::collections::HashSet;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const LD_PRELOAD: &str = "LD_PRELOAD";

/// Variables in their order.
#[derive(Debug, Clone)]
pub struct Environment(Vec<(OsString, OsString)>);

impl Environment {
    /// This process's own.
    pub fn inherited() -> Environment {
        Environment(std::env::vars_os().collect())
    }

    /// Sets `name`, in place of whatever it was.
    pub fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.retain(|(existing, _)| existing != name);
        self.0.push((name.into(), value.into()));
    }

    fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.iter().find(|(existing, _)| existing == name).map(|(_, value)| value.as_os_str())
    }

    /// Puts `library` in front of what `LD_PRELOAD` has: a malloc that stands there becomes the one below ours.
    pub fn put_library_first(&mut self, library: &Path) {
        let existing = self.get(LD_PRELOAD).map(OsStr::to_owned).unwrap_or_default();
        self.set(LD_PRELOAD, with_library_first(library, &existing));
    }

    /// As `execve` takes it. A name or value with a NUL byte can't have come from the kernel and is left out.
    pub fn strings(&self) -> Vec<CString> {
        let join = |(name, value): &(OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
        self.0.iter().filter_map(|variable| CString::new(join(variable)).ok()).collect()
    }
}

/// The loader splits `LD_PRELOAD` at these.
fn separates(byte: &u8) -> bool {
    matches!(byte, b' ' | b':')
}

/// Whether `LD_PRELOAD` can hold `library`'s path.
pub fn fits_preload(library: &Path) -> bool {
    !library.as_os_str().as_bytes().iter().any(separates)
}

/// `library` and behind it every entry of `existing` that is another library: it may be there already, because a program
/// under `run` started `run`.
fn with_library_first(library: &Path, existing: &OsStr) -> OsString {
    let mut seen = HashSet::from([library.to_owned()]);
    let mut value = library.as_os_str().as_bytes().to_vec();
    for entry in existing.as_bytes().split(separates).filter(|entry| !entry.is_empty()) {
        let path = PathBuf::from(OsStr::from_bytes(entry));
        if seen.insert(path.canonicalize().unwrap_or(path)) {
            value.push(b':');
            value.extend_from_slice(entry);
        }
    }
    OsString::from_vec(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_preloaded_stays_behind_the_library() {
        let ours = Path::new("/x/ours.so");
        assert_eq!(with_library_first(ours, "".as_ref()), "/x/ours.so");
        assert_eq!(
            with_library_first(ours, "libjemalloc.so.2 /y/b.so".as_ref()),
            "/x/ours.so:libjemalloc.so.2:/y/b.so"
        );
        assert_eq!(with_library_first(ours, ":/y/b.so:/x/ours.so::".as_ref()), "/x/ours.so:/y/b.so");
    }

    #[test]
    fn paths_that_the_variable_cannot_hold() {
        assert!(fits_preload(Path::new("/opt/a.so")));
        assert!(!fits_preload(Path::new("/opt/a b/a.so")) && !fits_preload(Path::new("/opt/a:b.so")));
    }

    #[test]
    fn setting_replaces() {
        let mut environment =
            Environment(vec![("A".into(), "1".into()), ("A".into(), "2".into()), ("B".into(), "".into())]);
        environment.set("A", "3");
        assert_eq!(environment.strings(), [c"B=".to_owned(), c"A=3".to_owned()]);
    }
}
