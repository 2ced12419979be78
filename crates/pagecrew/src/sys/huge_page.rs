//! Whether anonymous memory gets huge pages: the system's setting and this process's.

use super::procfs;
use std::ffi::CStr;

/// Who gets huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Whatever is large enough.
    Always,
    /// What was advised (`MADV_HUGEPAGE`).
    Advised,
    /// Nothing.
    Never,
}

/// One word for all sizes, and since 6.8 one for each.
const ALL: &CStr = c"/sys/kernel/mm/transparent_hugepage/enabled";
const THIS: &CStr = c"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";

/// The setting for huge pages of 2 MiB in this process, as it is now.
pub fn setting() -> Setting {
    // SAFETY: reads a flag of this process; takes no pointers.
    if unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) } == 1 {
        return Setting::Never;
    }
    let mut buffer = procfs::Buffer::new();
    let own = procfs::read(THIS, &mut buffer).ok().and_then(chosen).and_then(meaning);
    own.or_else(|| procfs::read(ALL, &mut buffer).ok().and_then(chosen).and_then(meaning)).unwrap_or(Setting::Never)
}

/// The word in brackets.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

/// `None` for a size that goes by the setting for all.
fn meaning(word: &str) -> Option<Setting> {
    match word {
        "always" => Some(Setting::Always),
        "madvise" => Some(Setting::Advised),
        "never" => Some(Setting::Never),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        for (text, expected) in [
            ("always [madvise] never\n", Some(Setting::Advised)),
            ("[always] inherit madvise never\n", Some(Setting::Always)),
            ("always [inherit] madvise never\n", None),
            ("always madvise [never]\n", Some(Setting::Never)),
            ("", None),
        ] {
            assert_eq!(chosen(text).and_then(meaning), expected, "{text}");
        }
    }
}
