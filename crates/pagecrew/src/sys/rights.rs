//! What a process may do beside its user's rights (capabilities).

use super::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Gives up `CAP_SYS_ADMIN`, which is most of what root may do: for the calling thread and for threads and processes that it starts from now on,
/// until one of those executes a program as root.
///
/// # Errors
/// `EPERM` where a filter of system calls refuses it.
pub fn give_up_admin() -> Result<(), Errno> {
    let CapabilitySets { effective, permitted, inheritable } = capabilities(None).map_err(Errno::from)?;
    let without = |set: CapabilitySet| set.difference(CapabilitySet::SYS_ADMIN);
    let sets = CapabilitySets {
        effective: without(effective),
        permitted: without(permitted),
        inheritable: without(inheritable),
    };
    set_capabilities(None, sets).map_err(Errno::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_is_gone_for_this_thread_and_those_that_it_starts() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            give_up_admin().unwrap();
            let expected = before.effective.difference(CapabilitySet::SYS_ADMIN);
            let child = std::thread::spawn(|| capabilities(None).unwrap()).join().unwrap();
            assert_eq!((capabilities(None).unwrap().effective, child.effective), (expected, expected));
            // The right is gone for good.
            assert!(!before.permitted.contains(CapabilitySet::SYS_ADMIN) || set_capabilities(None, before).is_err());
        })
        .join()
        .unwrap();
    }
}
