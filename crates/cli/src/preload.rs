//! Where the preload library is.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// The library's file name.
pub const LIBRARY: &str = "libpagecrew_preload.so";

/// The library is in none of the places where it could be.
#[derive(Debug, PartialEq, Eq)]
pub struct NotFound(Vec<PathBuf>);

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<_> = self.0.iter().map(|place| place.display().to_string()).collect();
        write!(
            f,
            "the preload library was not found; looked for {}; build it with `cargo build -p pagecrew-preload` or set PAGECREW_PRELOAD",
            places.join(", ")
        )
    }
}

/// The places where the library may be, best first. One that the user names is the only one.
fn places(named: Option<OsString>, executable_directory: Option<&Path>) -> Vec<PathBuf> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return vec![PathBuf::from(named)];
    }
    let beside = executable_directory.map(|directory| {
        let lib = directory.parent().unwrap_or(directory).join("lib");
        [directory.join(LIBRARY), lib.join("pagecrew").join(LIBRARY), lib.join(LIBRARY)]
    });
    beside.into_iter().flatten().collect()
}

/// The library's absolute path: the program may change its directory and start others.
pub fn find() -> Result<PathBuf, NotFound> {
    let executable = std::env::current_exe().ok();
    let places = places(std::env::var_os("PAGECREW_PRELOAD"), executable.as_deref().and_then(Path::parent));
    let found = places.iter().find(|place| place.is_file()).and_then(|place| place.canonicalize().ok());
    found.ok_or(NotFound(places))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_in_order() {
        let places = places(None, Some(Path::new("/usr/bin")));
        let expected = ["/usr/bin", "/usr/lib/pagecrew", "/usr/lib"].map(|place| Path::new(place).join(LIBRARY));
        assert_eq!(places, expected);
    }

    #[test]
    fn a_named_library_is_the_only_place() {
        assert_eq!(places(Some("/x.so".into()), Some(Path::new("/usr/bin"))), [PathBuf::from("/x.so")]);
        assert!(places(Some("".into()), None).is_empty());
        assert!(NotFound(vec!["/x.so".into()]).to_string().contains("/x.so"));
    }
}
