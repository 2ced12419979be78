//! `pagecrew pool exec`: a command that has memory of the pool as long as it runs.

use super::vmm::{self, Memory};
use super::{ServerAddress, failure, take};
use crate::failure::Failure;
use crate::inspect;
use crate::output::note;
use crate::run::environment::Environment;
use crate::run::launch::Program;
use crate::run::supervise;
use pagecrew::pool::{Backing, Request, Taken, Until};
use std::ffi::OsString;
use std::os::fd::{AsRawFd, RawFd};
use std::process::ExitCode;

/// Run a command with memory of the pool, and give it back when the command ends
///
/// {path}, {size} (in bytes) and {fd} (the number of a descriptor that the command inherits) in the command's arguments
/// are replaced. For QEMU and cloud-hypervisor what they need to use the memory as it is, is added where it is missing:
/// share=on, align=2M and size to QEMU's memory-backend-file, the unit to its -m {size}, and shared=on and size to
/// cloud-hypervisor's --memory-zone.
#[derive(clap::Args)]
#[command(
    override_usage = "pagecrew pool exec --size SIZE [OPTIONS] -- CMD [ARGS]...",
    after_help = "\
Examples:
  pagecrew pool exec --size 8G -- qemu-system-x86_64 -m {size} -machine memory-backend=mem \\
    -object memory-backend-file,id=mem,mem-path={path},prealloc=on ...
  pagecrew pool exec --size 8G -- cloud-hypervisor --memory size=0 \\
    --memory-zone id=mem,file={path} ...
  pagecrew pool exec --size 1G -- ./program --heap /dev/fd/{fd}
  pagecrew pool exec --size 1G --as-is -- ./script

The command also finds path and size in PAGECREW_POOL_PATH and PAGECREW_POOL_SIZE.

Exit status: the command's own; if a signal ended it, the same signal ends pagecrew. Signals are passed on. \
If pagecrew itself is killed (SIGKILL), the command lives on and has the memory as long as it has the file open."
)]
pub struct Arguments {
    /// How much: a multiple of 2 MiB
    #[arg(long, value_name = "SIZE")]
    size: String,
    /// Of this NUMA node [default: whichever has it ready]
    #[arg(long, value_name = "N")]
    node: Option<usize>,
    /// Only replace what is in braces, if there is any, and add nothing
    #[arg(long)]
    as_is: bool,
    #[command(flatten)]
    place: ServerAddress,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let size = take::size(&arguments.size)?;
    let command = &arguments.command;
    if !arguments.as_is && !vmm::uses_memory(command) {
        return Err(Failure::Usage(
            "the command's arguments have none of {path}, {size} and {fd}, so it would not use the memory (or: --as-is)"
                .into(),
        ));
    }
    let name = &command[0];
    let file = inspect::find(name).map_err(|why| Failure::Usage(format!("{}: {why}", name.to_string_lossy())))?;

    let client = arguments.place.connect()?;
    let request = Request { size, node: arguments.node, until: Until::Closed };
    let taken = client.take_unfinished(&request).map_err(failure)?;
    let memory = Memory {
        path: &taken.path,
        size: taken.size,
        descriptor: taken.file.as_raw_fd(),
        tmpfs: taken.backing != Backing::Hugetlbfs,
    };
    let filled = vmm::fill_in(command, &memory, arguments.as_is);
    filled.notes.iter().for_each(|line| note(line));
    let program = Program::new(&file, &filled.words)?;
    let mut environment = Environment::inherited();
    environment.set("PAGECREW_POOL_PATH", taken.path.as_os_str());
    environment.set("PAGECREW_POOL_SIZE", taken.size.to_string());
    let inherited = vmm::uses_descriptor(command).then_some(memory.descriptor);
    let prepare = || {
        inherited.iter().copied().for_each(keep_open_across_exec);
        environment
    };
    // This process has the file open meanwhile, so that it counts as used even where another server takes the place of
    // this one.
    let ended = supervise::attend(&program, prepare, |wanted| complete(&taken, wanted), |_| {})?;
    let Taken { file, path, .. } = taken;
    drop(file);
    if client.release(&path).is_err() {
        // The server that handed it out is gone. Where no other one has come, there is nobody to give it back to.
        let _ = arguments.place.connect().map(|client| client.release(&path));
    }
    Ok(supervise::end_like(ended.ending))
}

/// Zeroes what was not ready, while the command starts. What can't be had now the command finds out when it touches it, as it would
/// without a pool.
fn complete(taken: &Taken, wanted: &dyn Fn() -> bool) {
    if let Err(error) = taken.complete(wanted) {
        note(&error.to_string());
    }
}

fn keep_open_across_exec(descriptor: RawFd) {
    // SAFETY: no pointers; whatever the number stands for, all that changes is that this process's next program has it,
    // too.
    unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) };
}
