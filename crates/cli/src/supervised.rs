//! Whether this process is a service of a `pagecrew serve`.

use std::sync::OnceLock;

/// The variable in which the supervisor says so: the service's name.
pub const VARIABLE: &str = "PAGECREW_SERVE";

/// Calls this process what an operator knows it by: it was started by a path that says nothing.
pub fn take_name() {
    if name().is_some() {
        let _ = rustix::thread::set_name(c"pagecrew");
    }
}

/// The service's name; `None` where nobody supervises it.
pub fn name() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    let read = || {
        std::env::var(VARIABLE)
            .ok()
            .filter(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()))
    };
    NAME.get_or_init(read).as_deref()
}
