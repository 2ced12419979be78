//! The machine: kernel, CPUs, nodes, memory.

use super::check::Check;
use pagecrew::crew::zero::{self, Use};
use pagecrew::sys::memory::Range;
use pagecrew::sys::numa;
use pagecrew::sys::topology::{self, Topology};
use pagecrew::sys::zero::Method;
use pagecrew::sys::{self, cgroup, procfs, sched};
use pagecrew::units::Bytes;
use std::ffi::CStr;

/// All of them.
pub fn checks() -> Vec<Check> {
    vec![
        kernel(),
        page_size(),
        cpus(),
        nodes(),
        zeroing(),
        available_memory(),
        pressure(),
        memory_controller(),
        cpu_quota(),
    ]
}

/// The kernel's release.
pub fn kernel() -> Check {
    const NAME: &str = "kernel";
    // SAFETY: all zeroes is a valid `utsname`; the call fills its fields with C strings.
    let (result, release) = unsafe {
        let mut about: libc::utsname = std::mem::zeroed();
        let result = libc::uname(&mut about);
        (result, CStr::from_ptr(about.release.as_ptr()).to_string_lossy().into_owned())
    };
    assert_eq!(result, 0, "uname can't fail with a valid address");
    Check::ok(NAME, format!("Linux {release}"))
}

/// Whether pages have the size that everything here is built for.
pub fn page_size() -> Check {
    const NAME: &str = "page size";
    match sys::check_page_size() {
        Ok(()) => Check::ok(NAME, format!("{} bytes", sys::PAGE_SIZE)).needed(),
        Err(error) => Check::missing(
            NAME,
            format!("pages of {} bytes", error.found),
            "nothing works; programs under the preload library have their own malloc for everything",
            "start a kernel with pages of 4096 bytes (on Debian for aarch64: linux-image-arm64)",
        )
        .needed(),
    }
}

fn cpus() -> Check {
    const NAME: &str = "CPUs";
    match sched::affinity() {
        Ok(set) if set.count() > 1 => Check::ok(NAME, format!("{} CPUs allowed", set.count())),
        Ok(_) => Check::off(
            NAME,
            "1 CPU allowed",
            "work is only put off until the program is idle, never done beside it",
            "allow more CPUs: taskset, the cpuset of the control group, or more CPUs for the virtual machine",
        ),
        Err(error) => Check::missing(
            NAME,
            error.to_string(),
            "at most one helper is started",
            "machines with more than 1024 CPUs are not supported",
        ),
    }
}

/// The nodes, and whether the kernel says where memory is.
fn nodes() -> Check {
    const NAME: &str = "NUMA nodes";
    let names = |nodes: Vec<usize>| nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let (memory, cpus) = (topology::nodes_with_memory(), topology::nodes_with_cpus());
    if memory.len() == 1 {
        return Check::ok(NAME, format!("all memory is on node {}", memory[0]));
    }
    let used = Topology::read().nodes();
    let allowed = if used < memory.len() { format!(", {used} of these used") } else { String::new() };
    let found = format!("memory on {}{allowed}; CPUs on {}", names(memory), names(cpus));
    let says = match super::scratch::Scratch::new(1 << 20) {
        Err(_) => Ok(()),
        Ok(scratch) => {
            let page = Range { len: pagecrew::sys::PAGE_SIZE, ..scratch.range() };
            // SAFETY: the page is mapped for reading and writing, and nobody else knows it.
            unsafe { zero::zero(page, Use::Soon) };
            numa::placement(page, page.len).map(drop)
        }
    };
    match (says, numa::thread_has_default_policy()) {
        (Err(error), _) | (_, Err(error)) => Check::off(
            NAME,
            format!("{found}; not verified: {error}"),
            "memory lies where it is touched first, and a pool can't say on which node its memory is",
            "allow the NUMA system calls: --cap-add SYS_NICE, or a seccomp profile with mbind, get_mempolicy and move_pages",
        ),
        (Ok(()), Ok(true)) => Check::ok(NAME, format!("{found}; placement verified")),
        (Ok(()), Ok(false)) => Check::ok(NAME, format!("{found}; memory follows the policy of this process")),
    }
}

/// Zeroes until the library has settled on the fastest way, and says which it is.
fn zeroing() -> Check {
    const NAME: &str = "fastest way of zeroing";
    const LEN: usize = 4 << 20;
    const TRIALS_MAX: usize = 64;
    let methods: Vec<_> = Method::all().map(|method| format!("{method:?}")).collect();
    let mut settled = None;
    if let Ok(scratch) = super::scratch::Scratch::new(LEN) {
        let range = Range { start: scratch.range().start, len: LEN };
        for _ in 0..TRIALS_MAX {
            // SAFETY: the range is mapped for reading and writing, and nobody else knows it.
            unsafe { zero::zero(range, Use::Later) };
            settled = zero::settled_method();
            if settled.is_some() {
                break;
            }
        }
    }
    let fastest = settled.unwrap_or(Method::Cached);
    Check::ok(NAME, format!("{fastest:?} of {}", methods.join(", ")))
}

fn available_memory() -> Check {
    const NAME: &str = "available memory";
    match procfs::memory_info() {
        Ok(memory) => Check::ok(NAME, format!("{} of {}", Bytes(memory.available), Bytes(memory.total))),
        Err(error) => Check::off(
            NAME,
            error.to_string(),
            "memory is kept for reuse without regard to what the machine has left",
            "make /proc/meminfo readable",
        ),
    }
}

fn pressure() -> Check {
    const NAME: &str = "memory pressure (PSI)";
    match procfs::memory_stall_us() {
        Ok(stalled) => Check::ok(NAME, format!("{:.1} s stalled since boot", stalled as f64 / 1e6)),
        Err(error) => Check::off(
            NAME,
            error.to_string(),
            "pressure is seen only in the available memory and in the control group's usage",
            "boot with psi=1 (kernel 4.20 with CONFIG_PSI)",
        ),
    }
}

fn memory_controller() -> Check {
    const NAME: &str = "control group's memory";
    let limit = match cgroup::memory() {
        Some(memory) => format!("{} used of {}", Bytes(memory.used), Bytes(memory.limit)),
        None => "no limit".to_owned(),
    };
    match cgroup::memory_controller() {
        Ok("none") => Check::ok(NAME, "no control group"),
        Ok(version) => Check::ok(NAME, format!("{version}, {limit}")),
        Err(error) => Check::off(
            NAME,
            error.to_string(),
            "a memory limit of the control group is not seen before it is hit",
            "make /proc/self/cgroup readable",
        ),
    }
}

fn cpu_quota() -> Check {
    const NAME: &str = "control group's CPU quota";
    match cgroup::cpu() {
        None => Check::ok(NAME, "none"),
        Some(cpu) if cpu.quota_milli > 1000 => {
            Check::ok(NAME, format!("{:.1} CPUs, held back {} times", cpu.quota_milli as f64 / 1000.0, cpu.throttled))
        }
        Some(cpu) => Check::off(
            NAME,
            format!("{:.1} CPUs, held back {} times", cpu.quota_milli as f64 / 1000.0, cpu.throttled),
            "background work uses up the program's own quota: it gains time at its large frees and loses it elsewhere",
            "raise the quota above one CPU (cpu.max; CPUQuota= in a systemd unit)",
        ),
    }
}
