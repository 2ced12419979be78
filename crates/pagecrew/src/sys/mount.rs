//! File systems in memory: mounting and unmounting them, and what is mounted at a path.

use super::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A kind of file system whose files are memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFs {
    /// Of pages that are allocated when they are touched, huge ones where the mount says so (`huge=always`, 4.8).
    Tmpfs,
    /// Of huge pages that the administrator has set apart (`vm.nr_hugepages`).
    Hugetlbfs,
}

impl MemoryFs {
    /// Its name as the kernel knows it.
    pub fn name(self) -> &'static str {
        match self {
            MemoryFs::Tmpfs => "tmpfs",
            MemoryFs::Hugetlbfs => "hugetlbfs",
        }
    }
}

/// What may not be done with the files of such a mount: be executed, be devices, give rights.
const FLAGS: MountFlags = MountFlags::NOEXEC.union(MountFlags::NODEV).union(MountFlags::NOSUID);

/// Mounts a file system of `kind` with `options` at the directory `target`.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` where the kernel doesn't know one of the options, `ENODEV` where it doesn't know the kind.
pub fn mount(kind: MemoryFs, target: &Path, options: &str) -> Result<(), Errno> {
    let options = CString::new(options).map_err(|_| Errno(libc::EINVAL))?;
    Ok(rustix::mount::mount("pagecrew", target, kind.name(), FLAGS, options.as_c_str())?)
}

/// A file system of `kind` with these `options` that is mounted nowhere (`fsopen`, 5.2): its root directory. It goes with the last descriptor
/// of something in it.
///
/// # Errors
/// As [`mount`], and `ENOSYS` on kernels before 5.2.
pub fn unattached(kind: MemoryFs, options: &[(&str, &str)]) -> Result<OwnedFd, Errno> {
    let context = rustix::mount::fsopen(kind.name(), FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(context.as_fd(), *key, *value)?;
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    Ok(rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

/// Changes the options of what is mounted at `target`.
///
/// # Errors
/// `EINVAL` where more is in use than the new size, else as [`mount`].
pub fn remount(target: &Path, options: &str) -> Result<(), Errno> {
    let options = CString::new(options).map_err(|_| Errno(libc::EINVAL))?;
    Ok(rustix::mount::mount_remount(target, FLAGS, options.as_c_str())?)
}

/// Takes what is mounted at `target` out of sight. Files that somebody has open or mapped stay his, and its memory goes back with the last
/// of them.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` where nothing is mounted.
pub fn detach(target: &Path) -> Result<(), Errno> {
    Ok(rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}

/// What is mounted at `target`, if something is.
///
/// # Errors
/// `EBUSY` where it is of a kind that isn't one of ours, else those of `stat` and `statfs`.
pub fn mounted_at(target: &Path) -> Result<Option<MemoryFs>, Errno> {
    let own = std::fs::symlink_metadata(target)?;
    let parent = std::fs::symlink_metadata(target.parent().ok_or(Errno(libc::EINVAL))?)?;
    if own.dev() == parent.dev() {
        return Ok(None);
    }
    let kind = rustix::fs::statfs(target.as_os_str().as_bytes())?.f_type as i64;
    match kind {
        libc::TMPFS_MAGIC => Ok(Some(MemoryFs::Tmpfs)),
        libc::HUGETLBFS_MAGIC => Ok(Some(MemoryFs::Hugetlbfs)),
        _ => Err(Errno(libc::EBUSY)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_seen_changed_and_detached() {
        let target = std::env::temp_dir().join(format!("pagecrew-mount-{}", std::process::id()));
        std::fs::create_dir_all(&target).unwrap();
        assert_eq!(mounted_at(&target), Ok(None));
        match mount(MemoryFs::Tmpfs, &target, "size=4194304,mode=0711") {
            // Without the right to mount there is nothing more to see.
            Err(error) => assert_eq!(error, Errno(libc::EPERM)),
            Ok(()) => {
                assert_eq!(mounted_at(&target), Ok(Some(MemoryFs::Tmpfs)));
                std::fs::write(target.join("file"), vec![1; 2 << 20]).unwrap();
                assert_eq!(remount(&target, "size=1048576"), Err(Errno(libc::EINVAL)));
                remount(&target, "size=8388608").unwrap();
                detach(&target).unwrap();
                assert_eq!(mounted_at(&target), Ok(None));
            }
        }
        assert_eq!(mount(MemoryFs::Tmpfs, &target, "size=\0"), Err(Errno(libc::EINVAL)));
        std::fs::remove_dir(&target).unwrap();
        assert_eq!(mounted_at(&target), Err(Errno(libc::ENOENT)));
    }
}
