//! What this machine has room for, and bringing it into a state in which runs can be compared.

use crate::contestant::Contestant;
use crate::program;
use crate::report::Report;
use anyhow::Result;
use pagecrew::sys::{procfs, sched};
use pagecrew::units::Bytes;

/// The largest of `wanted` halved as often as it takes to leave this machine a quarter of its available memory.
pub fn affordable(wanted: usize, report: &Report) -> usize {
    let size = affordable_now(wanted);
    if size < wanted {
        report.note(&format!(
            "{} of memory are available, so {} stand in for {}",
            Bytes(available() as u64),
            Bytes(size as u64),
            Bytes(wanted as u64)
        ));
    }
    size
}

fn affordable_now(wanted: usize) -> usize {
    fitting(wanted, available())
}

fn available() -> usize {
    procfs::memory_info().map_or(usize::MAX, |memory| memory.available as usize)
}

fn fitting(wanted: usize, available: usize) -> usize {
    let mut size = wanted;
    while size > 1 << 20 && size > available / 4 * 3 {
        size /= 2;
    }
    size
}

/// Touches `bytes` of memory in a throwaway process. The first touch of a page after a virtual machine's start has the host
/// find memory for it, which takes many times as long as anything measured here.
///
/// # Errors
/// If the process fails.
pub fn warm(bytes: usize, report: &Report) -> Result<()> {
    report.expect(1, "warming the memory up");
    touch(bytes)?;
    report.step();
    Ok(())
}

/// The same before each run whose time depends on how fast it gets its first memory. A virtual machine may tell its host
/// within seconds which pages are free (free page reporting), and the host takes them: without this, a run would profit from
/// a predecessor that gave its memory back late, and suffer from one that gave it back early.
///
/// # Errors
/// If the process fails.
pub fn warm_for_a_run(bytes: usize) -> Result<()> {
    touch(affordable_now(bytes))
}

fn touch(bytes: usize) -> Result<()> {
    program::run(&mut program::worker(&Contestant::plain("glibc"), &["warm", &bytes.to_string()]))?;
    Ok(())
}

/// The CPUs that this process may run on.
///
/// # Errors
/// If the kernel doesn't tell.
pub fn cpus() -> Result<Vec<usize>> {
    let set = sched::affinity()?;
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| set.contains(cpu)).collect())
}

/// Whether programs that ask for huge pages get them.
pub fn has_huge_pages() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|text| !text.contains("[never]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_halved_until_they_fit() {
        assert_eq!(fitting(8 << 30, 22 << 30), 8 << 30);
        assert_eq!(fitting(8 << 30, 8 << 30), 4 << 30);
        assert_eq!(fitting(8 << 30, 0), 1 << 20);
    }

    #[test]
    fn there_is_a_cpu() {
        assert!(!cpus().unwrap().is_empty());
    }
}
