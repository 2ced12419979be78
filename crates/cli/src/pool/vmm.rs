//! The command line of a program that is to use a file of the pool: placeholders are replaced, and what QEMU and
//! cloud-hypervisor need so that they use the memory as it is, is added. Text in, text out.

use super::{cloud_hypervisor, qemu};
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// The memory that a command is to use.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    pub path: &'a Path,
    /// In bytes.
    pub size: usize,
    /// The number of the descriptor under which the command inherits the file.
    pub descriptor: RawFd,
    /// On a tmpfs, and not on hugetlbfs.
    pub tmpfs: bool,
}

impl Memory<'_> {
    /// The path, as it was given or as the descriptor has it, is this file's.
    pub fn is_at(&self, path: &[u8]) -> bool {
        let descriptor = self.descriptor;
        path == self.path.as_os_str().as_bytes()
            || path == format!("/dev/fd/{descriptor}").as_bytes()
            || path == format!("/proc/self/fd/{descriptor}").as_bytes()
    }
}

/// A command that uses the memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    pub words: Vec<OsString>,
    /// What can't be put right, each in one line.
    pub notes: Vec<String>,
}

/// What has become of one word.
#[derive(Debug, PartialEq, Eq)]
pub struct Amended {
    pub text: Vec<u8>,
    pub note: Option<String>,
    /// It has a program use the memory.
    pub uses: bool,
}

impl Amended {
    /// A word that is nobody's business.
    pub fn unchanged(text: Vec<u8>) -> Amended {
        Amended { text, note: None, uses: false }
    }
}

/// What is said where `option` has the program map the file for itself alone.
pub fn copies(option: &str) -> String {
    format!("with {option}, each page is copied when it is written, into memory that is not the pool's; leave it out")
}

const PATH: &[u8] = b"{path}";
const SIZE: &[u8] = b"{size}";
const DESCRIPTOR: &[u8] = b"{fd}";

/// Whether an argument of `words`, a program and its arguments, has a placeholder.
pub fn uses_memory(words: &[OsString]) -> bool {
    words.iter().skip(1).any(|word| [PATH, SIZE, DESCRIPTOR].iter().any(|part| contains(word.as_bytes(), part)))
}

/// Whether an argument of `words`, a program and its arguments, is to have the descriptor's number.
pub fn uses_descriptor(words: &[OsString]) -> bool {
    words.iter().skip(1).any(|word| contains(word.as_bytes(), DESCRIPTOR))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Puts the memory's path, size and descriptor where `words`, a program and its arguments, has placeholders, and adds
/// what is missing unless all else is to be left `as_is`.
pub fn fill_in(words: &[OsString], memory: &Memory, as_is: bool) -> Command {
    let roles = roles(words);
    let words = || words.iter().map(|word| word.as_bytes()).zip(&roles);
    let fill = |(word, role): (&[u8], &Role)| Amended::unchanged(substitute(word, memory, *role));
    let mut filled: Vec<Amended> = words().map(fill).collect();
    if !as_is {
        filled = filled.into_iter().zip(words()).map(|(word, (_, role))| amend(word.text, memory, *role)).collect();
        // Only now is it known whose -m it is.
        if filled.iter().zip(&roles).any(|(word, role)| word.uses && role.is_of_qemu()) {
            for (filled, (word, role)) in
                filled.iter_mut().zip(words()).filter(|(_, (_, role))| **role == Role::RamSize)
            {
                filled.text = substitute(&qemu::with_unit(word, SIZE), memory, *role);
            }
        }
    }
    let mut notes: Vec<String> = filled.iter_mut().filter_map(|word| word.note.take()).collect();
    notes.dedup();
    Command { words: filled.into_iter().map(|word| OsString::from_vec(word.text)).collect(), notes }
}

/// What a word of a command line is, going by the option before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Program,
    Plain,
    /// QEMU's `-object`, as pairs of key and value.
    Object,
    /// The same as JSON.
    JsonObject,
    /// QEMU's `-mem-path`.
    MemPath,
    /// QEMU's `-m`.
    RamSize,
    /// cloud-hypervisor's `--memory-zone`, which begins at this byte of the word.
    Zone(usize),
}

impl Role {
    fn is_of_qemu(self) -> bool {
        matches!(self, Role::Object | Role::JsonObject | Role::MemPath | Role::RamSize)
    }
}

const ZONE: &[u8] = b"--memory-zone";
const ZONE_IS: &[u8] = b"--memory-zone=";

fn roles(words: &[OsString]) -> Vec<Role> {
    let mut roles = Vec::with_capacity(words.len());
    let mut option: &[u8] = b"";
    for word in words.iter().map(|word| word.as_bytes()) {
        let role = match option {
            _ if roles.is_empty() => Role::Program,
            b"-object" | b"--object" if word.starts_with(b"{") => Role::JsonObject,
            b"-object" | b"--object" => Role::Object,
            b"-mem-path" | b"--mem-path" => Role::MemPath,
            b"-m" | b"--m" => Role::RamSize,
            // One option may have several zones behind it.
            ZONE if !word.starts_with(b"-") => Role::Zone(0),
            _ if word.starts_with(ZONE_IS) => Role::Zone(ZONE_IS.len()),
            _ => Role::Plain,
        };
        match role {
            Role::Zone(0) => {}
            Role::Plain => option = word,
            _ => option = b"",
        }
        roles.push(role);
    }
    roles
}

/// `word` with the memory's values in the place of the placeholders, written so that the option that it belongs to
/// reads them as they are.
fn substitute(word: &[u8], memory: &Memory, role: Role) -> Vec<u8> {
    if role == Role::Program {
        return word.to_vec();
    }
    let mut text = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some(&byte) = rest.first() {
        if let Some(behind) = rest.strip_prefix(PATH) {
            let path = memory.path.as_os_str().as_bytes();
            text.extend(match role {
                Role::Object => qemu::doubled_commas(path),
                Role::JsonObject => qemu::json_text(path),
                Role::Zone(_) => cloud_hypervisor::quoted(path, &text),
                Role::Program | Role::Plain | Role::MemPath | Role::RamSize => path.to_vec(),
            });
            rest = behind;
        } else if let Some(behind) = rest.strip_prefix(SIZE) {
            text.extend(memory.size.to_string().bytes());
            rest = behind;
        } else if let Some(behind) = rest.strip_prefix(DESCRIPTOR) {
            text.extend(memory.descriptor.to_string().bytes());
            rest = behind;
        } else {
            text.push(byte);
            rest = &rest[1..];
        }
    }
    text
}

/// `text` with what is missing in it.
fn amend(text: Vec<u8>, memory: &Memory, role: Role) -> Amended {
    match role {
        Role::Object => qemu::object(text, memory),
        Role::JsonObject => qemu::json_object(text, memory),
        Role::MemPath => qemu::mem_path(text, memory),
        Role::Zone(begin) => cloud_hypervisor::zone(text, begin, memory),
        Role::Plain if contains(&text, memory.path.as_os_str().as_bytes()) => {
            let note = qemu::hidden(&text, memory);
            Amended { text, note, uses: false }
        }
        Role::Program | Role::Plain | Role::RamSize => Amended::unchanged(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn memory(path: &str, tmpfs: bool) -> Memory<'_> {
        Memory { path: Path::new(path), size: 4 << 20, descriptor: 7, tmpfs }
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[track_caller]
    fn becomes(before: &[&str], after: &[&str], notes: usize) {
        let command = fill_in(&words(before), &memory("/p/f", true), false);
        assert_eq!(command.words, words(after));
        assert_eq!(command.notes.len(), notes, "{:?}", command.notes);
    }

    #[test]
    fn placeholders_anywhere_but_in_the_programs_name() {
        becomes(
            &["x{path}", "a{path}b", "{size}{fd}", "{", "{pat", "{}", "path}"],
            &["x{path}", "a/p/fb", "41943047", "{", "{pat", "{}", "path}"],
            0,
        );
        for (list, memory, descriptor) in [
            (&["x", "{path}"][..], true, false),
            (&["x", "a{fd}"], true, true),
            (&["x", "--", "{size}K"], true, false),
            (&["{path}", "{pth}", "{ path}"], false, false),
        ] {
            assert_eq!((uses_memory(&words(list)), uses_descriptor(&words(list))), (memory, descriptor), "{list:?}");
        }
    }

    #[test]
    fn objects_of_qemu() {
        let full = "memory-backend-file,id=m,mem-path=/p/f,share=on,align=2M,size=4194304";
        for option in ["-object", "--object"] {
            becomes(&["q", option, "memory-backend-file,id=m,mem-path={path}"], &["q", option, full], 0);
        }
        becomes(
            &["taskset", "1", "q", "-object", "memory-backend-file,size=4M,mem-path=/dev/fd/{fd},id=m"],
            &["taskset", "1", "q", "-object", "memory-backend-file,size=4M,mem-path=/dev/fd/7,id=m,share=on,align=2M"],
            0,
        );
        // The value of another option, or another file.
        for unchanged in [
            &["q", "-device", "qom-type=memory-backend-file,mem-path=/g"][..],
            &["q", "-object", "memory-backend-file,mem-path=/g"],
        ] {
            becomes(unchanged, unchanged, 0);
        }
    }

    #[test]
    fn a_plain_number_is_no_number_of_bytes_to_qemu() {
        let object = "memory-backend-file,mem-path=/p/f,size=4M,share=on,align=2M";
        becomes(
            &["q", "-m", "{size},slots=2,maxmem={size}", "-object", object],
            &["q", "-m", "4194304B,slots=2,maxmem=4194304B", "-object", object],
            0,
        );
        becomes(&["q", "-object", object, "-m", "{size}K"], &["q", "-object", object, "-m", "4194304K"], 0);
        // Anybody else's -m.
        becomes(&["x", "-m", "{size}", "{path}"], &["x", "-m", "4194304", "/p/f"], 0);
    }

    #[test]
    fn json_objects_of_qemu() {
        let command = fill_in(
            &words(&[
                "q",
                "-object",
                r#"{"qom-type":"memory-backend-file","id":"m","mem-path":"{path}","size":{size}}"#,
            ]),
            &memory("/p/\"f,", true),
            false,
        );
        let object: serde_json::Value = serde_json::from_slice(command.words[2].as_bytes()).unwrap();
        let expected = serde_json::json!({
            "qom-type": "memory-backend-file", "id": "m", "mem-path": "/p/\"f,", "size": 4 << 20,
            "share": true, "align": 2 << 20,
        });
        assert_eq!(object, expected);
    }

    #[test]
    fn zones_of_cloud_hypervisor() {
        becomes(
            &["c", "--memory-zone", "id=a,size=4M,file={path}", "id=b,file={path}", "--cpus", "file={path}"],
            &[
                "c",
                "--memory-zone",
                "id=a,size=4M,file=/p/f,shared=on",
                "id=b,file=/p/f,shared=on,size=4194304",
                "--cpus",
                "file=/p/f",
            ],
            0,
        );
        becomes(
            &["c", "--memory-zone=size=4M,file={path}", "file={path}"],
            &["c", "--memory-zone=size=4M,file=/p/f,shared=on", "file=/p/f"],
            0,
        );
    }

    #[test]
    fn what_cannot_be_put_right_is_said_once() {
        let private = "memory-backend-file,mem-path={path},share=off,align=2M,size=4M";
        let kept = private.replace("{path}", "/p/f");
        becomes(&["q", "-object", private, "-object", private], &["q", "-object", &kept, "-object", &kept], 1);
        becomes(&["q", "-mem-path", "{path}", "-m", "{size}"], &["q", "-mem-path", "/p/f", "-m", "4194304B"], 1);
        let script = "qemu -object memory-backend-file,mem-path={path}";
        becomes(&["sh", "-c", script], &["sh", "-c", &script.replace("{path}", "/p/f")], 1);
    }

    #[test]
    fn as_it_is_only_placeholders_are_replaced() {
        let before = ["q", "-m", "{size}", "-object", "memory-backend-file,mem-path={path}", "-mem-path", "{path}"];
        let command = fill_in(&words(&before), &memory("/a,b", true), true);
        let after = ["q", "-m", "4194304", "-object", "memory-backend-file,mem-path=/a,,b", "-mem-path", "/a,b"];
        assert_eq!(command, Command { words: words(&after), notes: Vec::new() });
    }

    /// Texts of what may confuse: the marks of every notation, and the placeholders themselves.
    fn odd() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            ",",
            ",,",
            "=",
            "{",
            "}",
            "\"",
            "\\",
            "[",
            "]",
            "-",
            "/",
            " ",
            "x",
            "é",
            "\n",
            "{path}",
            "{size}",
            "{fd}",
            "share=on",
            "share=off",
            "-object",
            "-m",
            "--memory-zone",
            "memory-backend-file",
            "mem-path=",
            "file=",
        ]);
        prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_the_path_qemu_reads_it_back(path in odd(), rest in odd(), tmpfs: bool) {
            let path = format!("/{path}");
            let memory = memory(&path, tmpfs);
            let object = "memory-backend-file,id=m,mem-path={path}".to_owned() + if rest.is_empty() { "" } else { "," };
            let command = fill_in(&words(&["q", "-object", &object]), &memory, false);
            let text = command.words[2].as_bytes();
            let read = |key: &str| qemu::value_of(text, key.as_bytes());
            prop_assert_eq!(read("mem-path"), Some(path.clone().into_bytes()));
            prop_assert_eq!(read("share"), Some(b"on".to_vec()));
            prop_assert_eq!(read("size"), Some(b"4194304".to_vec()));
            prop_assert_eq!(read("align"), tmpfs.then(|| b"2M".to_vec()));
            // A second time, there is nothing left to do.
            prop_assert_eq!(&fill_in(&words(&["q", "-object"]), &memory, false).words[..], &command.words[..2]);
            prop_assert_eq!(qemu::object(text.to_vec(), &memory).text, text);

            let id = serde_json::json!(rest);
            let json = format!(r#"{{"qom-type":"memory-backend-file","mem-path":"{{path}}","id":{id}}}"#);
            let command = fill_in(&words(&["q", "-object", &json]), &memory, false);
            let object: serde_json::Value = serde_json::from_slice(command.words[2].as_bytes()).unwrap();
            prop_assert_eq!(object["mem-path"].as_str(), Some(path.as_str()));
            prop_assert_eq!(object["share"].as_bool(), Some(true));
        }

        #[test]
        fn odd_command_lines_keep_their_shape(list in prop::collection::vec(odd(), 1..6), path in odd(), as_is: bool) {
            let before = words(&list.iter().map(String::as_str).collect::<Vec<_>>());
            let path = format!("/{path}");
            let after = fill_in(&before, &memory(&path, true), as_is).words;
            prop_assert_eq!(before.len(), after.len());
            prop_assert_eq!(&before[0], &after[0]);
            for (before, after) in before.iter().zip(&after).filter(|_| !uses_memory(&before)) {
                prop_assert_eq!(before, after);
            }
        }
    }
}
