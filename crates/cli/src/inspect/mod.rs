//! Whether `run` can help a program, found out before it is started: the file is found as `execvp` finds it, scripts are
//! followed to their interpreter, and the ELF file at the end is looked into.

mod elf;
mod lookup;
mod privilege;
mod script;

use crate::failure::Failure;
use elf::Image;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use lookup::find;

/// Interpreters may themselves be scripts; the kernel gives up at the same depth.
const MAX_DEPTH: usize = 5;

/// Checks that pagecrew's library will work in the program at `path`. `Usage` where the file can't be run at all, `Impossible`
/// where it runs but the library would have no effect.
pub fn check(path: &Path) -> Result<(), Failure> {
    check_within(path, path, MAX_DEPTH)
}

/// `path` is what `asked` leads to; `depth` more interpreters may follow.
fn check_within(asked: &Path, path: &Path, depth: usize) -> Result<(), Failure> {
    let named = if asked == path {
        path.display().to_string()
    } else {
        format!("{} is run by {}, which", asked.display(), path.display())
    };
    let is = |what: &dyn std::fmt::Display| format!("{named} {what}");
    let file = match File::open(path) {
        Ok(file) => file,
        // Executable but not readable: it can be run and not be looked into.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(()),
        Err(error) => return Err(Failure::Usage(format!("{}: {error}", path.display()))),
    };
    let next = match next_step(&file).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))? {
        Step::Elf => None,
        Step::Script(interpreter) => Some(interpreter),
        Step::Broken(why) => return Err(Failure::Usage(is(&why))),
    };
    let Some(interpreter) = next else {
        let privileges = privilege::Identity::current().gained_by(path, &file);
        let image = elf::examine(file).map_err(|why| Failure::Usage(is(&format!("can't be run: {why}"))))?;
        return check_image(path, &image, privileges).map_err(|why| match why {
            Obstacle::LoaderMissing(_) => Failure::Usage(is(&why)),
            _ => Failure::Impossible(is(&why)),
        });
    };
    if depth == 0 {
        return Err(Failure::Usage(format!("{}: too many interpreters in a row", asked.display())));
    }
    let interpreter = match interpreter {
        script::Interpreter::At(path) => PathBuf::from(path),
        script::Interpreter::Named(name) => find(&name)
            .map_err(|why| Failure::Usage(format!("{} is a script for {}: {why}", path.display(), quoted(&name))))?,
    };
    lookup::runnable(&interpreter).map_err(|why| {
        Failure::Usage(format!("{} is a script for {}: {why}", path.display(), interpreter.display()))
    })?;
    check_within(asked, &interpreter, depth - 1)
}

fn quoted(name: &OsStr) -> String {
    format!("'{}'", name.to_string_lossy())
}

enum Step {
    Elf,
    Script(script::Interpreter),
    Broken(&'static str),
}

/// What the first bytes say that `file` is, as the kernel and `execvp` judge it.
fn next_step(file: &File) -> std::io::Result<Step> {
    let mut head = Vec::with_capacity(script::LINE_MAX);
    file.take(script::LINE_MAX as u64).read_to_end(&mut head)?;
    if head.starts_with(elf::MAGIC) {
        return Ok(Step::Elf);
    }
    if head.starts_with(b"#!") {
        return Ok(
            script::interpreter(&head).map_or(Step::Broken("has no interpreter in its first line"), Step::Script)
        );
    }
    // A text file without a first line of that kind is a shell script for `execvp`. It runs binary files in the same way, and
    // the shell then says what it thinks of them; a clear line is better.
    if head.contains(&0) {
        return Ok(Step::Broken("is neither a program nor a script"));
    }
    Ok(Step::Script(script::Interpreter::At(OsString::from("/bin/sh"))))
}

/// Why pagecrew's library would have no effect in a program.
#[derive(Debug, PartialEq, Eq)]
enum Obstacle {
    Go,
    Bits32,
    Machine(String),
    Musl,
    Static,
    Privileged(privilege::Cause),
    LoaderMissing(PathBuf),
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Obstacle::Go => f.write_str(
                "is a Go program: its run-time takes memory from the kernel itself and never calls malloc, so there is nothing that `run` could speed up; GOGC and GOMEMLIMIT govern its memory",
            ),
            Obstacle::Bits32 => f.write_str(
                "is a 32-bit program: pagecrew keeps memory in a large address space, which needs 64 bits; use its 64-bit build",
            ),
            Obstacle::Machine(machine) => {
                write!(f, "is built for another kind of machine ({machine}); use its build for {}", std::env::consts::ARCH)
            }
            Obstacle::Musl => f.write_str(
                "is linked with the musl C library, and pagecrew's library works with glibc; use its glibc build",
            ),
            Obstacle::Static => f.write_str(
                "is statically linked: without a dynamic loader nothing can take the place of its malloc; use a dynamically linked build",
            ),
            Obstacle::Privileged(cause) => cause.fmt(f),
            Obstacle::LoaderMissing(loader) => write!(f, "needs the loader {}, which is not there", loader.display()),
        }
    }
}

fn check_image(path: &Path, image: &Image, privileges: Option<privilege::Cause>) -> Result<(), Obstacle> {
    if image.go {
        return Err(Obstacle::Go);
    }
    if !image.bits64 {
        return Err(Obstacle::Bits32);
    }
    if image.machine != elf::NATIVE_MACHINE {
        return Err(Obstacle::Machine(elf::machine_name(image.machine)));
    }
    let Some(loader) = &image.loader else {
        // The loader itself has none. Called as a program (`ld-linux-x86-64.so.2 PROGRAM`) it honours LD_PRELOAD.
        return if file_name(path).starts_with("ld-linux") { Ok(()) } else { Err(Obstacle::Static) };
    };
    if file_name(loader).starts_with("ld-musl") {
        return Err(Obstacle::Musl);
    }
    if let Some(cause) = privileges {
        return Err(Obstacle::Privileged(cause));
    }
    if !loader.exists() {
        return Err(Obstacle::LoaderMissing(loader.clone()));
    }
    Ok(())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Checks that the file at `path` is a library that this machine's loader can put in front of a program.
pub fn check_library(path: &Path) -> Result<(), Failure> {
    let wrong = |why: String| Failure::Impossible(format!("{} is no library for this machine: {why}", path.display()));
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let image = elf::examine(file).map_err(|why| wrong(why.to_string()))?;
    if image.bits64 && image.machine == elf::NATIVE_MACHINE {
        Ok(())
    } else {
        Err(wrong(format!("it is for {}", elf::machine_name(image.machine))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        Image { bits64: true, machine: elf::NATIVE_MACHINE, loader: Some(std::env::current_exe().unwrap()), go: false }
    }

    fn obstacle(change: impl FnOnce(&mut Image)) -> Obstacle {
        let mut image = image();
        change(&mut image);
        check_image(Path::new("/bin/x"), &image, None).unwrap_err()
    }

    #[test]
    fn an_ordinary_program_is_fine() {
        assert_eq!(check_image(Path::new("/bin/x"), &image(), None), Ok(()));
        check(&std::env::current_exe().unwrap()).unwrap();
    }

    #[test]
    fn every_obstacle_is_seen() {
        assert_eq!(obstacle(|image| image.go = true), Obstacle::Go);
        assert_eq!(obstacle(|image| image.bits64 = false), Obstacle::Bits32);
        assert!(matches!(obstacle(|image| image.machine = 8), Obstacle::Machine(_)));
        assert_eq!(obstacle(|image| image.loader = None), Obstacle::Static);
        assert_eq!(obstacle(|image| image.loader = Some("/lib/ld-musl-x86_64.so.1".into())), Obstacle::Musl);
        assert!(matches!(obstacle(|image| image.loader = Some("/no/ld.so".into())), Obstacle::LoaderMissing(_)));
        let cause = Some(privilege::Cause::SetUser);
        let privileged = check_image(Path::new("/bin/x"), &image(), cause);
        assert_eq!(privileged, Err(Obstacle::Privileged(privilege::Cause::SetUser)));
    }

    #[test]
    fn the_loader_called_as_a_program_is_fine() {
        let loader = Image { loader: None, ..image() };
        assert_eq!(check_image(Path::new("/lib64/ld-linux-x86-64.so.2"), &loader, None), Ok(()));
    }
}
