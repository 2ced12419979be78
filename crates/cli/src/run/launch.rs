//! Putting a program in this process's place.

use super::environment::Environment;
use crate::failure::Failure;
use crate::signals;
use std::ffi::{CString, OsString, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The shell that runs a text file which does not name its interpreter, as `execvp` has it.
const SHELL: &std::ffi::CStr = c"/bin/sh";

/// A program file and its arguments.
pub struct Program {
    file: CString,
    arguments: Vec<CString>,
}

impl Program {
    /// `command` is the program's name as it was given, followed by its arguments; `file` is where it is.
    pub fn new(file: &Path, command: &[OsString]) -> Result<Program, Failure> {
        let string = |text: &std::ffi::OsStr| {
            CString::new(text.as_bytes()).map_err(|_| Failure::Usage("an argument has a NUL byte".into()))
        };
        Ok(Program {
            file: string(file.as_os_str())?,
            arguments: command.iter().map(|word| string(word)).collect::<Result<_, _>>()?,
        })
    }

    /// Runs the program in this process, with the signal disposition that this process was started with; returns only if that
    /// fails.
    pub fn replace_this_process(&self, environment: &Environment) -> io::Error {
        let environment = environment.strings();
        signals::restore_pipe_disposition();
        let error = execute(&self.file, &self.arguments, &environment);
        if error.raw_os_error() != Some(libc::ENOEXEC) {
            return error;
        }
        let rest = self.arguments.iter().skip(1).cloned();
        let arguments: Vec<_> = [SHELL.to_owned(), self.file.clone()].into_iter().chain(rest).collect();
        execute(SHELL, &arguments, &environment)
    }

    /// Why the program did not start. It has been looked into before, so what remains is the kernel's word.
    pub fn failure(&self, error: &io::Error) -> Failure {
        Failure::Usage(format!("{} can't be run: {error}", self.file.to_string_lossy()))
    }
}

fn execute(file: &std::ffi::CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both arrays end with a null pointer, and the strings that they point to live until the call returns.
    unsafe { libc::execve(file.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}
