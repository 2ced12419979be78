//! Tests that need a process of their own: what other tests of the same process take, and whom they fork, is all the same process's otherwise.

/// Runs the test with this path again, in a process of its own, and says whether this is that one already.
pub(crate) fn alone(test: &str) -> bool {
    const ALONE: &str = "PAGECREW_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}
