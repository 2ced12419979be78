//! What the compiler makes of the fast paths of frames: no atomic instruction, no call, and not many instructions at all.
//!
//! The functions below are what a program's own code becomes; `objdump` says what that is.

#![cfg(all(target_arch = "x86_64", not(debug_assertions)))]

use pagecrew::frame::Frames;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hint::black_box;
use std::process::Command;

/// The number of a frame, or one that no frame has.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn golden_alloc(frames: &Frames) -> u32 {
    frames.alloc().unwrap_or(u32::MAX)
}

/// As `golden_alloc`, for a frame that is zero.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn golden_alloc_zeroed(frames: &Frames) -> u32 {
    frames.alloc_zeroed().unwrap_or(u32::MAX)
}

/// Whether the frame could be freed.
///
/// # Safety
/// Nobody uses its memory any more.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn golden_free(frames: &Frames, frame: u32) -> bool {
    // SAFETY: by the function's own contract.
    unsafe { frames.free(frame) }.is_ok()
}

/// The instructions of a function of this test program, by address.
fn disassembled(function: &str) -> BTreeMap<u64, String> {
    let program = std::env::current_exe().unwrap();
    let mut objdump = Command::new("objdump");
    objdump.args(["-d", "--no-show-raw-insn"]).arg(format!("--disassemble={function}")).arg(program);
    let output = objdump.output().expect("objdump comes with gcc");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let instruction = |line: &str| {
        let (address, instruction) = line.split_once(":\t")?;
        Some((u64::from_str_radix(address.trim(), 16).ok()?, instruction.trim().to_owned()))
    };
    let found: BTreeMap<_, _> = text.lines().filter_map(instruction).collect();
    assert!(!found.is_empty(), "{function} is not in {text}");
    found
}

/// Where a jump goes.
fn target(instruction: &str) -> Option<u64> {
    let operand = instruction.strip_prefix('j')?.split_whitespace().nth(1)?;
    u64::from_str_radix(operand.trim_start_matches("0x"), 16).ok()
}

/// Whether an instruction is the last one of a sequence: the store to the length of the CPU's stack.
fn commits(instruction: &str) -> bool {
    let Some(operands) = instruction.strip_prefix("mov ") else { return false };
    let (from, to) = operands.trim().split_once(',').unwrap_or_default();
    let half = from.starts_with("%e") || (from.starts_with("%r") && from.ends_with('d'));
    half && to.starts_with("0x8(%r")
}

/// Whether an instruction is atomic.
fn atomic(instruction: &str) -> bool {
    instruction.contains("lock") || (instruction.starts_with("xchg") && instruction.contains('('))
}

/// The shortest way from the beginning through a sequence to the end that calls nothing.
fn fast_path(code: &BTreeMap<u64, String>) -> Option<Vec<String>> {
    let first = *code.keys().next()?;
    let mut ways = VecDeque::from([(first, false, Vec::new())]);
    let mut seen = BTreeSet::new();
    while let Some((address, committed, mut way)) = ways.pop_front() {
        let Some(instruction) = code.get(&address) else { continue };
        if !seen.insert((address, committed)) || instruction.starts_with("call") {
            continue;
        }
        let committed = committed || commits(instruction);
        way.push(instruction.clone());
        if instruction.starts_with("ret") {
            if committed {
                return Some(way);
            }
            continue;
        }
        if let Some(target) = target(instruction) {
            ways.push_back((target, committed, way.clone()));
        }
        if !instruction.starts_with("jmp")
            && let Some((&next, _)) = code.range(address + 1..).next()
        {
            ways.push_back((next, committed, way));
        }
    }
    None
}

#[test]
fn the_fast_paths_have_no_atomic_instruction_and_no_call() {
    // So that the functions are there.
    black_box((golden_alloc as *const (), golden_alloc_zeroed as *const (), golden_free as *const ()));
    for (function, most) in [("golden_alloc", 40), ("golden_alloc_zeroed", 40), ("golden_free", 48)] {
        let code = disassembled(function);
        let odd: Vec<_> = code.values().filter(|instruction| atomic(instruction)).collect();
        assert!(odd.is_empty(), "{function} has {odd:?}");
        let way = fast_path(&code).unwrap_or_else(|| panic!("{function} has no way without a call: {code:#?}"));
        assert!(way.iter().any(|instruction| instruction.contains("%fs:")), "{function}: {way:#?}");
        assert!(way.len() <= most, "{function} takes {} instructions: {way:#?}", way.len());
    }
}

#[test]
fn an_atomic_instruction_would_be_seen() {
    assert!(atomic("lock cmpxchg %ecx,(%rdi)") && atomic("xchg   %eax,(%rdi)") && !atomic("xchg   %ax,%ax"));
    let code = |lines: &[&str]| lines.iter().enumerate().map(|(at, line)| (at as u64, line.to_string())).collect();
    assert!(fast_path(&code(&["mov    %ecx,0x8(%rdi)", "ret"])).is_some());
    assert!(fast_path(&code(&["call   99", "mov    %ecx,0x8(%rdi)", "ret"])).is_none());
    assert!(fast_path(&code(&["jne    2", "mov    %r8d,0x8(%r9)", "ret"])).is_some_and(|way| way.len() == 3));
}
