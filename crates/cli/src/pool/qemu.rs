//! QEMU's command line: which of its options name a file as memory, and what they need.

use super::vmm::{Amended, Memory, copies};
use serde_json::{Map, Value};

/// The object that is a file. By itself it maps the file for QEMU alone; and a file on a tmpfs at any address of 4 KiB,
/// so that no huge page can be mapped, which is slower than memory that nobody has filled. (For hugetlbfs it sees to
/// the address.)
const BACKEND: &[u8] = b"memory-backend-file";
const ALIGN: u64 = 2 << 20;
/// How a switch may be off.
const OFF: [&[u8]; 4] = [b"off", b"no", b"false", b"n"];

/// `-object` as pairs of key and value.
pub fn object(mut text: Vec<u8>, memory: &Memory) -> Amended {
    let Pairs { pairs, separated } = pairs(&text);
    // Of a key that is given twice, the last one counts.
    let last = |key: &[u8]| pairs.iter().rev().find(|pair| pair.key == key).map(|pair| pair.value.as_slice());
    if last(b"qom-type") != Some(BACKEND) || !last(b"mem-path").is_some_and(|path| memory.is_at(path)) {
        return Amended::unchanged(text);
    }
    let mut missing = Vec::new();
    let share = last(b"share");
    if share.is_none() {
        missing.push("share=on".to_owned());
    }
    if memory.tmpfs && last(b"align").is_none() {
        missing.push("align=2M".into());
    }
    if last(b"size").is_none() {
        missing.push(format!("size={}", memory.size));
    }
    let note = share.filter(|value| OFF.contains(value)).map(|_| copies("share=off"));
    for (index, pair) in missing.iter().enumerate() {
        if index > 0 || !separated {
            text.push(b',');
        }
        text.extend(pair.bytes());
    }
    Amended { text, note, uses: true }
}

/// `-object` as JSON.
pub fn json_object(text: Vec<u8>, memory: &Memory) -> Amended {
    let Ok(mut object) = serde_json::from_slice::<Map<String, Value>>(&text) else {
        let note = hidden(&text, memory);
        return Amended { text, note, uses: false };
    };
    let is = |key: &str, test: &dyn Fn(&[u8]) -> bool| {
        object.get(key).and_then(Value::as_str).is_some_and(|value| test(value.as_bytes()))
    };
    if !is("qom-type", &|kind| kind == BACKEND) || !is("mem-path", &|path| memory.is_at(path)) {
        return Amended::unchanged(text);
    }
    let given = object.len();
    let private = object.entry("share").or_insert(true.into()) == &Value::Bool(false);
    if memory.tmpfs {
        object.entry("align").or_insert(ALIGN.into());
    }
    object.entry("size").or_insert(memory.size.into());
    let text = if object.len() == given { text } else { Value::Object(object).to_string().into_bytes() };
    Amended { text, note: private.then(|| copies("\"share\": false")), uses: true }
}

/// `-mem-path`, which maps the file for QEMU alone and has no option to do otherwise.
pub fn mem_path(text: Vec<u8>, memory: &Memory) -> Amended {
    let uses = memory.is_at(&text);
    let note = "with -mem-path, each page is copied when it is written, into memory that is not the pool's; instead: \
                -object memory-backend-file,id=pool,mem-path={path},size={size} -machine memory-backend=pool";
    Amended { text, note: uses.then(|| note.into()), uses }
}

/// What is said of a word that can't be put right: a command for a shell, or JSON with single quotation marks.
pub fn hidden(text: &[u8], memory: &Memory) -> Option<String> {
    let has = |part: &[u8]| text.windows(part.len()).any(|window| window == part);
    let complete = has(b"share") && (has(b"align") || !memory.tmpfs);
    let wanted = if memory.tmpfs { "share=on and align=2M" } else { "share=on" };
    (has(BACKEND) && !complete).then(|| {
        format!("a memory-backend-file within a longer text is left as it is; it needs {wanted}, or it is slow")
    })
}

/// `-m`'s value, in which `size` stands for a number of bytes, with the unit that keeps it from being taken for one of
/// MiB.
pub fn with_unit(word: &[u8], size: &[u8]) -> Vec<u8> {
    let unit = |part: &[u8]| if part.ends_with(size) { [part, b"B"].concat() } else { part.to_vec() };
    word.split(|&byte| byte == b',').map(unit).collect::<Vec<_>>().join(&b","[..])
}

/// As a comma is written within a value.
pub fn doubled_commas(value: &[u8]) -> Vec<u8> {
    value.iter().flat_map(|&byte| std::iter::repeat_n(byte, if byte == b',' { 2 } else { 1 })).collect()
}

/// As a text is written between the quotation marks of JSON.
pub fn json_text(value: &[u8]) -> Vec<u8> {
    // What is not UTF-8 can't be written in JSON at all.
    let Ok(text) = std::str::from_utf8(value) else { return value.to_vec() };
    let text = Value::from(text).to_string();
    text.as_bytes()[1..text.len() - 1].to_vec()
}

struct Pair {
    key: Vec<u8>,
    value: Vec<u8>,
}

struct Pairs {
    pairs: Vec<Pair>,
    /// The text ends with a comma that separates, so that another pair may follow at once: one comma more would make
    /// both of them part of the last value.
    separated: bool,
}

/// Reads pairs as QEMU does (`util/keyval.c`): a value goes to the next comma that is not doubled, and the first one
/// may go without its key, `qom-type`. Old versions take a key alone for a switch that is on.
fn pairs(text: &[u8]) -> Pairs {
    let mut pairs = Vec::new();
    let mut rest = text;
    let mut separated = true;
    while !rest.is_empty() {
        let length = rest.iter().position(|byte| b"=,".contains(byte)).unwrap_or(rest.len());
        let key = match rest.get(length) {
            Some(b'=') => rest[..length].to_vec(),
            _ if pairs.is_empty() => b"qom-type".to_vec(),
            _ => rest[..length].to_vec(),
        };
        if rest.get(length) == Some(&b'=') {
            rest = &rest[length + 1..];
        } else if !pairs.is_empty() {
            rest = &rest[length..];
        }
        let mut value = Vec::new();
        separated = false;
        while let Some((&byte, behind)) = rest.split_first() {
            rest = behind;
            if byte == b',' {
                match rest.strip_prefix(b",") {
                    Some(behind) => rest = behind,
                    None => {
                        separated = true;
                        break;
                    }
                }
            }
            value.push(byte);
        }
        pairs.push(Pair { key, value });
    }
    Pairs { pairs, separated }
}

/// The value that QEMU would find in an `-object`.
#[cfg(test)]
pub fn value_of(text: &[u8], key: &[u8]) -> Option<Vec<u8>> {
    pairs(text).pairs.into_iter().rev().find(|pair| pair.key == key).map(|pair| pair.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn memory(tmpfs: bool) -> Memory<'static> {
        Memory { path: Path::new("/p,f"), size: 4 << 20, descriptor: 7, tmpfs }
    }

    #[track_caller]
    fn becomes(tmpfs: bool, before: &str, after: &str, noted: bool) {
        let amended = object(before.into(), &memory(tmpfs));
        assert_eq!(String::from_utf8(amended.text).unwrap(), after);
        assert_eq!(amended.note.is_some(), noted, "{:?}", amended.note);
    }

    #[test]
    fn what_is_missing_is_added() {
        let begin = "memory-backend-file,id=m,mem-path=/p,,f";
        becomes(true, begin, &format!("{begin},share=on,align=2M,size=4194304"), false);
        becomes(false, begin, &format!("{begin},share=on,size=4194304"), false);
        for given in ["share=on", "align=4M", "size=1G"] {
            let rest = ["share=on", "align=2M", "size=4194304"].into_iter().filter(|pair| pair[..3] != given[..3]);
            let after = format!("{begin},{given},{}", rest.collect::<Vec<_>>().join(","));
            becomes(true, &format!("{begin},{given}"), &after, false);
        }
    }

    #[test]
    fn what_was_given_is_kept() {
        let full = "mem-path=/p,,f,qom-type=memory-backend-file,size=1G,align=4K,share=yes";
        becomes(true, full, full, false);
        for off in ["off", "no", "false", "n"] {
            let private = format!("memory-backend-file,mem-path=/p,,f,size=1G,align=2M,share=on,share={off}");
            becomes(true, &private, &private, true);
        }
        // A switch without a value, as old versions have it, and a separator at the end.
        let bare = "memory-backend-file,mem-path=/p,,f,size=1G,share";
        becomes(false, bare, bare, false);
        becomes(false, &format!("{bare},"), &format!("{bare},"), false);
        becomes(true, &format!("{bare},"), &format!("{bare},align=2M"), false);
    }

    #[test]
    fn commas_at_the_end_are_not_run_together() {
        becomes(
            false,
            "memory-backend-file,size=4M,mem-path=/p,,f,",
            "memory-backend-file,size=4M,mem-path=/p,,f,share=on",
            false,
        );
        // Here the path ends with a comma and is another file's.
        becomes(false, "memory-backend-file,mem-path=/p,,f,,", "memory-backend-file,mem-path=/p,,f,,", false);
    }

    #[test]
    fn other_objects_and_other_files_are_left_alone() {
        for other in [
            "",
            ",",
            "memory-backend-ram,mem-path=/p,,f",
            "memory-backend-file",
            "memory-backend-file,mem-path=/p",
            "memory-backend-file,mem-path=/p,f",
            "memory-backend-file,mem-path=/dev/fd/8",
            "memory-backend-file,mem-path=/p,,f,qom-type=secret",
        ] {
            becomes(true, other, other, false);
        }
        for way in ["/dev/fd/7", "/proc/self/fd/7"] {
            assert!(object(format!("memory-backend-file,mem-path={way}").into(), &memory(true)).uses);
        }
    }

    #[test]
    fn objects_as_json() {
        let of = |text: &str, tmpfs| json_object(text.into(), &memory(tmpfs));
        let text = r#"{"qom-type":"memory-backend-file","mem-path":"/p,f","size":4194304}"#;
        let read = |amended: Amended| serde_json::from_slice::<Value>(&amended.text).unwrap();
        let object = read(of(text, true));
        assert_eq!(
            (&object["share"], &object["align"], &object["size"]),
            (&true.into(), &ALIGN.into(), &4194304.into())
        );
        assert_eq!(read(of(text, false))["align"], Value::Null);
        let full =
            r#"{ "qom-type":"memory-backend-file", "mem-path":"/dev/fd/7", "size":1, "share":false, "align":4096 }"#;
        let amended = of(full, true);
        assert!(amended.text == full.as_bytes() && amended.note.is_some() && amended.uses);
        for other in [r#"{"qom-type":"memory-backend-file"}"#, r#"{"qom-type":"secret","mem-path":"/p,f"}"#, "{", "{}"]
        {
            assert_eq!(of(other, true), Amended::unchanged(other.into()));
        }
        assert!(of("{'qom-type':'memory-backend-file','mem-path':'/p,f'}", true).note.is_some());
    }

    #[test]
    fn units_behind_a_number_of_bytes() {
        let of = |word: &str| String::from_utf8(with_unit(word.as_bytes(), b"{size}")).unwrap();
        assert_eq!(of("{size}"), "{size}B");
        assert_eq!(of("size={size},maxmem={size}G,{size}"), "size={size}B,maxmem={size}G,{size}B");
        assert_eq!(of("4G,,"), "4G,,");
    }

    #[test]
    fn within_longer_texts_only_what_is_missing_is_noted() {
        let noted = |text: &str, tmpfs| hidden(text.as_bytes(), &memory(tmpfs)).is_some();
        let text = "qemu -object memory-backend-file,mem-path=/p";
        assert!(noted(text, true) && noted(&format!("{text},share=on"), true) && !noted("qemu", true));
        assert!(!noted(&format!("{text},share=on"), false) && !noted(&format!("{text},share=on,align=2M"), true));
    }
}
