//! Programs that start with more privileges than their caller has. The kernel marks them (`AT_SECURE`), and the loader then
//! ignores `LD_PRELOAD`.

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Why the loader would ignore `LD_PRELOAD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The file's set-user-ID bit.
    SetUser,
    /// The file's set-group-ID bit.
    SetGroup,
    /// The file's capabilities.
    Capabilities,
    /// The caller itself runs with real and effective IDs that differ.
    Caller,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const IGNORED: &str = "for such programs the loader ignores LD_PRELOAD, by which pagecrew works";
        match self {
            Cause::SetUser => write!(f, "is set-user-ID: {IGNORED}; run it as the user whose rights it takes"),
            Cause::SetGroup => {
                write!(f, "is set-group-ID: {IGNORED}; run it with the group whose rights it takes (sg)")
            }
            Cause::Capabilities => write!(
                f,
                "has file capabilities: {IGNORED}; run it as root, or a copy without them that gets ambient capabilities (setpriv --ambient-caps)"
            ),
            Cause::Caller => write!(f, "would run with real and effective user or group that differ: {IGNORED}"),
        }
    }
}

/// Who starts the program.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    real_user: u32,
    effective_user: u32,
    real_group: u32,
    effective_group: u32,
    /// `PR_SET_NO_NEW_PRIVS`: the bits have no effect.
    no_new_privileges: bool,
}

/// What a file asks for.
#[derive(Debug, Clone, Copy)]
struct Demand<'x> {
    mode: u32,
    user: u32,
    group: u32,
    capabilities: Option<&'x [u8]>,
    /// The file system is mounted `nosuid`.
    nosuid: bool,
}

impl Identity {
    /// This process's.
    pub fn current() -> Identity {
        // SAFETY: these calls take no pointers and cannot fail; prctl with this option reads one flag.
        unsafe {
            Identity {
                real_user: libc::getuid(),
                effective_user: libc::geteuid(),
                real_group: libc::getgid(),
                effective_group: libc::getegid(),
                no_new_privileges: libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1,
            }
        }
    }

    /// The reason why the program in `file`, found at `path`, would be marked.
    pub fn gained_by(&self, path: &Path, file: &File) -> Option<Cause> {
        let about = file.metadata().ok()?;
        let mut room = [0; 64];
        self.cause(&Demand {
            mode: about.mode(),
            user: about.uid(),
            group: about.gid(),
            capabilities: capabilities(path, &mut room),
            nosuid: mounted_nosuid(file),
        })
    }

    /// The rule of the kernel's `cap_bprm_creds_from_file`: marked is what gets an effective ID that differs from the caller's
    /// *real* one, or, unless the real user is root, capabilities from the file. So a set-user-ID-root program that root
    /// starts is not marked, and one for another user is.
    fn cause(&self, demand: &Demand<'_>) -> Option<Cause> {
        let bits_count = !demand.nosuid && !self.no_new_privileges;
        let set_user = bits_count && demand.mode & libc::S_ISUID != 0;
        // Without the group's execute bit, the bit means mandatory locking.
        let set_group = bits_count && demand.mode & libc::S_ISGID != 0 && demand.mode & libc::S_IXGRP != 0;
        let user = if set_user { demand.user } else { self.effective_user };
        let group = if set_group { demand.group } else { self.effective_group };
        if user != self.real_user {
            return Some(if set_user { Cause::SetUser } else { Cause::Caller });
        }
        if group != self.real_group {
            return Some(if set_group { Cause::SetGroup } else { Cause::Caller });
        }
        let granted = !demand.nosuid && self.real_user != 0 && demand.capabilities.is_some_and(grants);
        granted.then_some(Cause::Capabilities)
    }
}

/// Whether the value of `security.capability` (a `struct vfs_cap_data`) gives any: the effective flag or a permitted bit. Each
/// of one or two halves has a word of permitted and one of inheritable bits.
fn grants(value: &[u8]) -> bool {
    let word = |index: usize| Some(u32::from_le_bytes(*value.get(4 * index..)?.first_chunk()?));
    const EFFECTIVE: u32 = 1;
    word(0).is_some_and(|magic| magic & EFFECTIVE != 0) || [1, 3].into_iter().filter_map(word).any(|half| half != 0)
}

/// The attribute's value in `room`; `None` where there is none.
fn capabilities<'r>(path: &Path, room: &'r mut [u8; 64]) -> Option<&'r [u8]> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: both names are C strings and `room` has the length that is given.
    let length =
        unsafe { libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), room.as_mut_ptr().cast(), room.len()) };
    room.get(..usize::try_from(length).ok()?)
}

fn mounted_nosuid(file: &File) -> bool {
    // SAFETY: all zeroes is a valid `statvfs`, the descriptor is open, and the call writes only to `about`.
    unsafe {
        let mut about: libc::statvfs = std::mem::zeroed();
        libc::fstatvfs(file.as_raw_fd(), &mut about) == 0 && about.f_flag & libc::ST_NOSUID != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Demand<'static> = Demand { mode: 0o755, user: 0, group: 0, capabilities: None, nosuid: false };
    /// `cap_net_raw+ep`, version 2.
    const NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn user(id: u32) -> Identity {
        Identity { real_user: id, effective_user: id, real_group: id, effective_group: id, no_new_privileges: false }
    }

    #[test]
    fn set_user_bits_count_where_the_user_changes() {
        let set_root = Demand { mode: 0o4755, ..PLAIN };
        let set_daemon = Demand { user: 1, ..set_root };
        assert_eq!(user(1000).cause(&PLAIN), None);
        assert_eq!(user(1000).cause(&set_root), Some(Cause::SetUser));
        assert_eq!(user(0).cause(&set_root), None);
        assert_eq!(user(0).cause(&set_daemon), Some(Cause::SetUser));
        assert_eq!(user(1000).cause(&Demand { nosuid: true, ..set_root }), None);
        assert_eq!(Identity { no_new_privileges: true, ..user(1000) }.cause(&set_root), None);
    }

    #[test]
    fn set_group_bits_count_where_the_group_may_execute() {
        let set_tty = Demand { mode: 0o2755, group: 5, ..PLAIN };
        assert_eq!(user(0).cause(&set_tty), Some(Cause::SetGroup));
        assert_eq!(user(0).cause(&Demand { mode: 0o2745, ..set_tty }), None);
        assert_eq!(user(5).cause(&set_tty), None);
    }

    #[test]
    fn file_capabilities_count_except_for_root() {
        let raw = Demand { capabilities: Some(&NET_RAW), ..PLAIN };
        assert_eq!(user(1000).cause(&raw), Some(Cause::Capabilities));
        assert_eq!(user(0).cause(&raw), None);
        assert_eq!(user(1000).cause(&Demand { nosuid: true, ..raw }), None);
    }

    #[test]
    fn a_caller_with_two_identities_is_marked_whatever_it_runs() {
        assert_eq!(Identity { effective_user: 0, ..user(1000) }.cause(&PLAIN), Some(Cause::Caller));
    }

    #[test]
    fn capability_values() {
        assert!(grants(&NET_RAW));
        let mut permitted_only = NET_RAW;
        permitted_only[0] = 0;
        assert!(grants(&permitted_only));
        permitted_only[5] = 0;
        assert!(!grants(&permitted_only));
        for length in 0..NET_RAW.len() {
            grants(&NET_RAW[..length]);
        }
    }
}
