//! What an ELF file says about itself.

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadCacheOps};
use object::{Endianness, ReadRef};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The first bytes of every ELF file.
pub const MAGIC: &[u8] = &elf::ELFMAG;

/// This machine's number in ELF headers.
#[cfg(target_arch = "x86_64")]
pub const NATIVE_MACHINE: u16 = elf::EM_X86_64;
/// This machine's number in ELF headers.
#[cfg(target_arch = "aarch64")]
pub const NATIVE_MACHINE: u16 = elf::EM_AARCH64;

/// The kernel refuses a loader path that is longer (`PATH_MAX`).
const LOADER_MAX: u64 = 4096;

/// What decides whether a library can be put in front of a program's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Of 64-bit class. (An x32 program is not, though its machine is x86-64.)
    pub bits64: bool,
    /// The machine that it is for.
    pub machine: u16,
    /// The dynamic loader that it asks for; `None`: it is statically linked.
    pub loader: Option<PathBuf>,
    /// Made by the Go compiler.
    pub go: bool,
}

/// Why a file is no program.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAProgram {
    /// Cut off or overwritten.
    Damaged(&'static str),
    /// An object file or a memory dump.
    Kind(&'static str),
}

impl fmt::Display for NotAProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAProgram::Damaged(what) => write!(f, "the file is damaged ({what})"),
            NotAProgram::Kind(kind) => write!(f, "it is {kind}"),
        }
    }
}

/// Looks into a file. Only the parts that matter are read, whatever its size.
pub fn examine(file: impl ReadCacheOps) -> Result<Image, NotAProgram> {
    let cache = ReadCache::new(file);
    let data = &cache;
    let ident = data.read_bytes_at(0, 16).map_err(|()| NotAProgram::Damaged("header cut off"))?;
    if !ident.starts_with(MAGIC) {
        return Err(NotAProgram::Damaged("not an ELF file"));
    }
    match ident[4] {
        elf::ELFCLASS32 => image::<FileHeader32<Endianness>, _>(data),
        elf::ELFCLASS64 => image::<FileHeader64<Endianness>, _>(data),
        _ => Err(NotAProgram::Damaged("unknown class")),
    }
}

fn image<'d, H: FileHeader<Endian = Endianness>, R: ReadRef<'d>>(data: R) -> Result<Image, NotAProgram> {
    let damaged = |what| move |_: object::read::Error| NotAProgram::Damaged(what);
    let header = H::parse(data).map_err(damaged("header"))?;
    let endian = header.endian().map_err(damaged("byte order"))?;
    match header.e_type(endian) {
        elf::ET_EXEC | elf::ET_DYN => {}
        elf::ET_REL => return Err(NotAProgram::Kind("an object file that has not been linked")),
        elf::ET_CORE => return Err(NotAProgram::Kind("a memory dump")),
        _ => return Err(NotAProgram::Damaged("unknown type")),
    }
    // The kernel refuses more of them too, and the count of the extended form could be anything.
    if header.e_phnum(endian) == elf::PN_XNUM {
        return Err(NotAProgram::Damaged("too many program headers"));
    }
    let segments = header.program_headers(endian, data).map_err(damaged("program headers"))?;
    // Such a program starts, and is ended by a signal when it comes to what is missing.
    let length = data.len().map_err(|()| NotAProgram::Damaged("length"))?;
    let ends_beyond = |segment: &H::ProgramHeader| {
        let [offset, size]: [u64; 2] = [segment.p_offset(endian).into(), segment.p_filesz(endian).into()];
        segment.p_type(endian) == elf::PT_LOAD && offset.saturating_add(size) > length
    };
    if segments.iter().any(ends_beyond) {
        return Err(NotAProgram::Damaged("contents cut off"));
    }
    let mut loader = None;
    if let Some(segment) = segments.iter().find(|segment| segment.p_type(endian) == elf::PT_INTERP) {
        if segment.p_filesz(endian).into() > LOADER_MAX {
            return Err(NotAProgram::Damaged("loader path"));
        }
        let path = segment.interpreter(endian, data).map_err(damaged("loader path"))?;
        loader = path.map(|path| PathBuf::from(std::ffi::OsStr::from_bytes(path)));
    }
    Ok(Image {
        bits64: header.is_type_64(),
        machine: header.e_machine(endian),
        loader,
        go: made_by_go(header, endian, data),
    })
}

/// Whether the file has a section that only Go's linker makes. The kernel never looks at sections, so what is wrong with them
/// is no reason to refuse a program.
fn made_by_go<'d, H: FileHeader<Endian = Endianness>, R: ReadRef<'d>>(header: &H, endian: Endianness, data: R) -> bool {
    // A count of zero means that the real one, which could be anything, stands elsewhere: no ordinary program has that many.
    if header.e_shnum(endian) == 0 {
        return false;
    }
    let Ok(sections) = header.sections(endian, data) else { return false };
    [&b".go.buildinfo"[..], b".note.go.buildid"].iter().any(|name| sections.section_by_name(endian, name).is_some())
}

/// The machine's name for people.
pub fn machine_name(machine: u16) -> String {
    match machine {
        elf::EM_386 => "x86, 32 bits".into(),
        elf::EM_X86_64 => "x86_64".into(),
        elf::EM_ARM => "arm, 32 bits".into(),
        elf::EM_AARCH64 => "aarch64".into(),
        elf::EM_RISCV => "riscv".into(),
        elf::EM_PPC64 => "powerpc64".into(),
        elf::EM_S390 => "s390".into(),
        elf::EM_MIPS => "mips".into(),
        elf::EM_LOONGARCH => "loongarch".into(),
        other => format!("ELF machine {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// A little-endian 64-bit program for this machine with one program header: a loader path behind it.
    fn program(loader: &str) -> Vec<u8> {
        let mut bytes = Vec::from(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        bytes.extend(elf::ET_DYN.to_le_bytes());
        bytes.extend(NATIVE_MACHINE.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        // Entry, program headers, section headers.
        [0u64, 64, 0].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        // Sizes and counts: header, program headers, section headers.
        [64u16, 56, 1, 64, 0, 0].iter().for_each(|half| bytes.extend(half.to_le_bytes()));
        bytes.extend(elf::PT_INTERP.to_le_bytes());
        bytes.extend(4u32.to_le_bytes());
        let length = loader.len() as u64 + 1;
        [120u64, 0, 0, length, length, 1].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(loader.as_bytes());
        bytes.push(0);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Image, NotAProgram> {
        examine(Cursor::new(bytes.to_vec()))
    }

    #[test]
    fn a_dynamic_program() {
        let image = read(&program("/lib64/ld-linux-x86-64.so.2")).unwrap();
        assert_eq!(image.loader, Some("/lib64/ld-linux-x86-64.so.2".into()));
        assert!(image.bits64 && image.machine == NATIVE_MACHINE && !image.go);
    }

    #[test]
    fn this_very_test_is_a_dynamic_program() {
        let image = examine(std::fs::File::open("/proc/self/exe").unwrap()).unwrap();
        assert!(image.bits64 && image.machine == NATIVE_MACHINE && image.loader.is_some() && !image.go);
    }

    #[test]
    fn without_a_loader_it_is_static() {
        let mut bytes = program("/lib/ld.so");
        bytes[64..68].copy_from_slice(&elf::PT_LOAD.to_le_bytes());
        assert_eq!(read(&bytes).unwrap().loader, None);
        // Of which a part is missing.
        bytes[96..104].copy_from_slice(&1000u64.to_le_bytes());
        assert_eq!(read(&bytes), Err(NotAProgram::Damaged("contents cut off")));
    }

    #[test]
    fn what_is_no_program_is_named() {
        let mut bytes = program("/lib/ld.so");
        bytes[16] = elf::ET_REL as u8;
        assert_eq!(read(&bytes), Err(NotAProgram::Kind("an object file that has not been linked")));
        bytes[16] = elf::ET_CORE as u8;
        assert_eq!(read(&bytes), Err(NotAProgram::Kind("a memory dump")));
    }

    #[test]
    fn a_file_cut_off_anywhere_is_an_error() {
        let bytes = program("/lib/ld.so");
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn absurd_sizes_and_counts_are_errors() {
        let mut long = program("/lib/ld.so");
        long[96..104].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(read(&long), Err(NotAProgram::Damaged("loader path")));
        let mut many = program("/lib/ld.so");
        many[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
        assert_eq!(read(&many), Err(NotAProgram::Damaged("too many program headers")));
    }

    /// Random bytes (xorshift, fixed seed) all over a real program and a made-up one: whatever comes out, it comes out.
    #[test]
    fn garbage_never_panics() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut real = std::fs::read("/bin/true").unwrap_or_else(|_| program("/lib/ld.so"));
        let sections = real.len().saturating_sub(2 << 10);
        real.drain(4096.min(sections)..sections);
        for base in [program("/lib/ld.so"), real] {
            for _ in 0..20_000 {
                let mut bytes = base.clone();
                for _ in 0..random() % 8 + 1 {
                    // Mostly in the headers, where it matters.
                    let bound = if random() % 4 == 0 { bytes.len() } else { 128.min(bytes.len()) };
                    bytes[random() as usize % bound] = random() as u8;
                }
                bytes.truncate(bytes.len() - (random() % 3) as usize * (random() as usize % bytes.len()) / 2);
                let _ = read(&bytes);
            }
        }
        for _ in 0..2_000 {
            let mut bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
            bytes.splice(0..bytes.len().min(5), *b"\x7fELF\x02");
            let _ = read(&bytes);
        }
    }
}
