//! cloud-hypervisor's command line: `--memory-zone` names a file as memory. It maps the file at an address that suits
//! huge pages, but for itself alone unless it is told otherwise.

use super::vmm::{Amended, Memory, copies};

/// `--memory-zone`, which begins at byte `begin` of `text`.
pub fn zone(mut text: Vec<u8>, begin: usize, memory: &Memory) -> Amended {
    let pairs = pairs(&text[begin..]);
    let last = |key: &[u8]| pairs.iter().rev().find(|pair| pair.0 == key).map(|pair| pair.1.as_slice());
    if !last(b"file").is_some_and(|path| memory.is_at(path)) {
        return Amended::unchanged(text);
    }
    let note = match last(b"shared") {
        None => {
            text.extend(b",shared=on");
            None
        }
        Some(value) if matches!(value.to_ascii_lowercase().as_slice(), b"off" | b"false") => Some(copies("shared=off")),
        Some(_) => None,
    };
    if last(b"size").is_none() {
        text.extend(format!(",size={}", memory.size).bytes());
    }
    Amended { text, note, uses: true }
}

/// As a value with a comma is written, unless `before` has opened a quotation.
pub fn quoted(value: &[u8], before: &[u8]) -> Vec<u8> {
    let open = before.iter().filter(|&&byte| byte == b'"').count() % 2 == 1;
    if open || !value.contains(&b',') { value.to_vec() } else { [b"\"", value, b"\""].concat() }
}

/// Reads pairs as cloud-hypervisor does (its crate `option_parser`): commas separate outside of brackets and quotation
/// marks, and the marks are no part of a value.
fn pairs(text: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut pairs = Vec::new();
    let mut word = Vec::new();
    let (mut depth, mut quotation) = (0, false);
    let mut finish = |word: &mut Vec<u8>| {
        let (key, value) = match word.iter().position(|&byte| byte == b'=') {
            Some(equals) => (word[..equals].to_vec(), word[equals + 1..].trim_ascii().to_vec()),
            None => (word.clone(), Vec::new()),
        };
        pairs.push((key, value));
        word.clear();
    };
    for &byte in text {
        match byte {
            b'"' => quotation = !quotation,
            b',' if depth == 0 && !quotation => finish(&mut word),
            _ => {
                depth += i32::from(byte == b'[') - i32::from(byte == b']');
                word.push(byte);
            }
        }
    }
    finish(&mut word);
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[track_caller]
    fn becomes(before: &str, after: &str, noted: bool) {
        let memory = Memory { path: Path::new("/p,f"), size: 4 << 20, descriptor: 7, tmpfs: true };
        let amended = zone(before.into(), 0, &memory);
        assert_eq!(String::from_utf8(amended.text).unwrap(), after);
        assert_eq!(amended.note.is_some(), noted, "{:?}", amended.note);
    }

    #[test]
    fn what_is_missing_is_added_and_what_was_given_is_kept() {
        becomes(r#"id=m,size=4M,file="/p,f""#, r#"id=m,size=4M,file="/p,f",shared=on"#, false);
        becomes("file=/dev/fd/7,id=m", "file=/dev/fd/7,id=m,shared=on,size=4194304", false);
        let given = r#"id=m,size=1G,"file=/p,f",shared=on"#;
        becomes(given, given, false);
        for off in ["off", "false", "OFF"] {
            let private = format!("size=1G,file=/dev/fd/7,shared={off}");
            becomes(&private, &private, true);
        }
    }

    #[test]
    fn other_files_are_left_alone() {
        for other in ["", "id=m,size=4M", "size=4M,file=/p,f", "size=4M,file=/dev/fd/70", "file=[/p,f]"] {
            becomes(other, other, false);
        }
    }

    #[test]
    fn commas_are_quoted_once() {
        assert_eq!(quoted(b"/a,b", b"file="), b"\"/a,b\"");
        assert_eq!(quoted(b"/a,b", b"file=\""), b"/a,b");
        assert_eq!(quoted(b"/ab", b"file="), b"/ab");
    }
}
