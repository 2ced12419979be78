//! Programs that `run` can't help, and how it says so.

mod common;

use common::{NOTHING, compile, directory, executable, fails, pagecrew};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

fn run(program: &Path) -> Command {
    pagecrew(&["run", program.to_str().unwrap()])
}

fn works(program: &Path) {
    let output = run(program).output().unwrap();
    assert!(output.status.success(), "{}", common::err(&output));
}

#[test]
fn an_ordinary_program_works() {
    works(&compile("ordinary", NOTHING, &[]));
    works(&compile("fixed", NOTHING, &["-no-pie"]));
}

#[test]
fn a_static_program() {
    fails(run(&compile("static", NOTHING, &["-static"])), 3, &["statically linked"]);
    fails(run(&compile("static-pie", NOTHING, &["-static-pie"])), 3, &["statically linked"]);
}

#[test]
fn a_musl_program() {
    let flags = ["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"];
    fails(run(&compile("musl", NOTHING, &flags)), 3, &["musl", "glibc"]);
}

#[test]
fn a_program_whose_loader_is_missing() {
    let flags = ["-Wl,--dynamic-linker=/no/such/loader.so"];
    fails(run(&compile("loaderless", NOTHING, &flags)), 2, &["/no/such/loader.so"]);
}

#[test]
fn a_go_program() {
    let program = compile("go", NOTHING, &[]);
    let section = directory().join("section");
    std::fs::write(&section, "\u{ff} Go buildinf:").unwrap();
    let added = format!(".go.buildinfo={}", section.display());
    let status = Command::new("objcopy").args(["--add-section", &added]).arg(&program).status().unwrap();
    assert!(status.success());
    fails(run(&program), 3, &["Go program", "malloc"]);
}

#[test]
fn a_program_for_another_machine() {
    let mut bytes = std::fs::read(compile("native", NOTHING, &[])).unwrap();
    bytes[18] = 21; // e_machine: PowerPC 64
    fails(run(&executable("foreign", &bytes)), 3, &["powerpc64"]);
}

#[test]
fn a_32_bit_program() {
    // A header and nothing else: class 1, little-endian, ET_EXEC, EM_386, version 1.
    let mut bytes = vec![0; 52];
    bytes[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
    (bytes[16], bytes[18], bytes[20], bytes[40]) = (2, 3, 1, 52);
    fails(run(&executable("bits32", &bytes)), 3, &["32-bit"]);
}

#[test]
fn damaged_files() {
    let whole = std::fs::read(compile("whole", NOTHING, &[])).unwrap();
    for length in [4, 5, 16, 40, 63, 64, 100, 700] {
        fails(run(&executable(&format!("cut-{length}"), &whole[..length])), 2, &["damaged"]);
    }
    let mut noise = b"\x7fELF\x02\x01\x01\0".to_vec();
    noise.extend((0..4000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8));
    fails(run(&executable("noise", &noise)), 2, &["noise"]);
    fails(run(&executable("data", b"GIF89a\0\0\0")), 2, &["neither a program nor a script"]);
    let object = compile("object.o", NOTHING, &["-c"]);
    std::fs::set_permissions(&object, std::fs::Permissions::from_mode(0o755)).unwrap();
    fails(run(&object), 2, &["object file"]);
}

#[test]
fn a_set_user_id_program() {
    let program = compile("setuid", NOTHING, &[]);
    let set_bits = |mode| std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
    // To the user who runs it anyway: nothing changes, so the loader goes along.
    set_bits(0o4755);
    works(&program);
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        chown(&program, Some(1), None).unwrap();
        set_bits(0o4755);
        fails(run(&program), 3, &["set-user-ID"]);
        chown(&program, Some(0), Some(5)).unwrap();
        set_bits(0o2755);
        fails(run(&program), 3, &["set-group-ID"]);
    }
}

#[test]
fn scripts_are_followed_to_their_interpreter() {
    let program = compile("interpreter", NOTHING, &["-static"]);
    let first = executable("first", format!("#!{}\n", program.display()));
    let second = executable("second", format!("#! {} -x\n", first.display()));
    fails(run(&second), 3, &["second is run by", "interpreter", "statically linked"]);
    works(&executable("shell", "#!/bin/sh\nexit 0\n"));
    works(&executable("env", "#!/usr/bin/env sh\nexit 0\n"));
    works(&executable("bare", "exit 0\n"));
    works(&executable("empty", ""));
}

#[test]
fn scripts_that_lead_nowhere() {
    fails(run(&executable("lost", "#!/no/such/interpreter\n")), 2, &["lost", "/no/such/interpreter", "not found"]);
    fails(run(&executable("lost-env", "#!/usr/bin/env no-such-name\n")), 2, &["no-such-name", "not found in PATH"]);
    fails(run(&executable("unnamed", "#!\n")), 2, &["no interpreter"]);
    let circle = directory().join("circle");
    executable("circle", format!("#!{}\n", circle.display()));
    fails(run(&circle), 2, &["too many interpreters"]);
}
