//! The first line of a script.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// The kernel looks at this many bytes of a file (`BINPRM_BUF_SIZE`).
pub const LINE_MAX: usize = 256;

/// What runs a script.
#[derive(Debug, PartialEq, Eq)]
pub enum Interpreter {
    /// The file at this path.
    At(OsString),
    /// What `PATH` has under this name: `#!/usr/bin/env NAME`.
    Named(OsString),
}

/// The interpreter that `head`, the first bytes of a file that starts with `#!`, asks for.
pub fn interpreter(head: &[u8]) -> Option<Interpreter> {
    let line = head.strip_prefix(b"#!")?.split(|&byte| byte == b'\n' || byte == 0).next()?;
    let mut words = line.split(|&byte| byte == b' ' || byte == b'\t').filter(|word| !word.is_empty());
    let path = words.next()?;
    let env = path.rsplit(|&byte| byte == b'/').next() == Some(b"env");
    match env.then(|| name_for_env(words)).flatten() {
        Some(name) => Some(Interpreter::Named(OsStr::from_bytes(name).to_owned())),
        None => Some(Interpreter::At(OsStr::from_bytes(path).to_owned())),
    }
}

/// The program that `env` starts when given `words`: behind its options and assignments. `None` where that can't be told; then
/// `env` itself is looked at, which is an ordinary program.
fn name_for_env<'l>(words: impl Iterator<Item = &'l [u8]>) -> Option<&'l [u8]> {
    for word in words {
        match word {
            // `-S` makes env split the rest of the line; `-i` and `-v` have no argument of their own.
            b"-S" | b"--split-string" | b"-i" | b"-v" | b"-vS" | b"-iS" | b"-" | b"--" => {}
            _ if word.starts_with(b"-S") => return Some(&word[2..]),
            _ if word.starts_with(b"-") => return None,
            _ if word.contains(&b'=') => {}
            name => return Some(name),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Option<Interpreter> {
        interpreter(line.as_bytes())
    }

    #[test]
    fn a_path_with_and_without_an_argument() {
        let shell = Some(Interpreter::At("/bin/sh".into()));
        assert_eq!(read("#!/bin/sh\necho"), shell);
        assert_eq!(read("#! \t/bin/sh -e \n"), shell);
        assert_eq!(read("#!/bin/sh"), shell);
    }

    #[test]
    fn env_in_its_forms() {
        let python = Some(Interpreter::Named("python3".into()));
        for line in ["env python3", "/usr/bin/env python3", "/usr/bin/env -S python3 -u", "/bin/env -S A=1 python3 -u"]
        {
            assert_eq!(read(&format!("#!{line}\n")), python, "{line}");
        }
        assert_eq!(read("#!/usr/bin/env -Spython3 -u\n"), python);
        assert_eq!(read("#!/usr/bin/env --chdir=/ x\n"), Some(Interpreter::At("/usr/bin/env".into())));
        assert_eq!(read("#!/usr/bin/env\n"), Some(Interpreter::At("/usr/bin/env".into())));
    }

    #[test]
    fn nothing_behind_the_mark() {
        for line in ["#!", "#!\n/bin/sh", "#!   \n", "#!\0/bin/sh"] {
            assert_eq!(read(line), None, "{line:?}");
        }
    }
}
