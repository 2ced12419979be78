//! Finding a program's file as `execvp` does.

use std::ffi::{CString, OsStr};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Why no file can be run under a name.
#[derive(Debug, PartialEq, Eq)]
pub enum NotRunnable {
    /// There is no such file.
    Absent,
    /// No directory of `PATH` has one.
    AbsentFromPath,
    /// There is one without execute permission.
    NoPermission,
    /// It is a directory, a socket or the like.
    OtherKind,
}

impl fmt::Display for NotRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotRunnable::Absent => "not found",
            NotRunnable::AbsentFromPath => "not found in PATH",
            NotRunnable::NoPermission => "not executable",
            NotRunnable::OtherKind => "not a file that can be run",
        })
    }
}

/// Where glibc looks when there is no `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The file that `name` stands for: itself where it has a slash, otherwise the first executable one in the directories of
/// `PATH`, where an empty entry is the current directory.
pub fn find(name: &OsStr) -> Result<PathBuf, NotRunnable> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    find_in(name, &path)
}

fn find_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, NotRunnable> {
    if name.as_bytes().contains(&b'/') {
        let file = PathBuf::from(name);
        return runnable(&file).map(|()| file);
    }
    if name.is_empty() {
        return Err(NotRunnable::Absent);
    }
    let mut result = NotRunnable::AbsentFromPath;
    for directory in path.as_bytes().split(|&byte| byte == b':') {
        let directory = if directory.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(directory) };
        let file = Path::new(directory).join(name);
        match runnable(&file) {
            Ok(()) => return Ok(file),
            // As `execvp`: go on, but remember that there was one.
            Err(NotRunnable::NoPermission) => result = NotRunnable::NoPermission,
            Err(_) => {}
        }
    }
    Err(result)
}

/// Whether the kernel would let this user run the file at `path`.
pub fn runnable(path: &Path) -> Result<(), NotRunnable> {
    match path.metadata() {
        Ok(about) if !about.is_file() => return Err(NotRunnable::OtherKind),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Err(NotRunnable::NoPermission),
        Err(_) => return Err(NotRunnable::Absent),
    }
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| NotRunnable::Absent)?;
    // SAFETY: the name is a C string.
    let allowed = unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, libc::AT_EACCESS) } == 0;
    if allowed { Ok(()) } else { Err(NotRunnable::NoPermission) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(directory: &Path, name: &str, mode: u32) -> PathBuf {
        let path = directory.join(name);
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn the_first_executable_file_in_path_wins() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        file(first.path(), "tool", 0o644);
        let executable = file(second.path(), "tool", 0o755);
        file(first.path(), "data", 0o644);
        let path = std::env::join_paths([first.path(), Path::new("/no/such"), second.path()]).unwrap();
        assert_eq!(find_in("tool".as_ref(), &path), Ok(executable));
        assert_eq!(find_in("data".as_ref(), &path), Err(NotRunnable::NoPermission));
        assert_eq!(find_in("none".as_ref(), &path), Err(NotRunnable::AbsentFromPath));
        assert_eq!(find_in("".as_ref(), &path), Err(NotRunnable::Absent));
    }

    #[test]
    fn a_name_with_a_slash_is_a_path() {
        let directory = tempfile::tempdir().unwrap();
        let plain = file(directory.path(), "data", 0o644);
        assert_eq!(find_in(plain.as_os_str(), "".as_ref()), Err(NotRunnable::NoPermission));
        assert_eq!(find_in("/".as_ref(), "".as_ref()), Err(NotRunnable::OtherKind));
        assert_eq!(find_in("./no/such".as_ref(), "".as_ref()), Err(NotRunnable::Absent));
    }
}
