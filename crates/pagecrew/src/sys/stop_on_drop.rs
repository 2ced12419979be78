//! Threads of a test that go on until it has seen enough.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when it is dropped. For threads of a scope that go on until it is set: a test that fails before is seen to fail, where the scope
/// would wait for them for ever.
pub(crate) struct StopOnDrop<'f>(pub &'f AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
