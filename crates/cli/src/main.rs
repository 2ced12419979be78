//! The `pagecrew` command.
fn main() {}
