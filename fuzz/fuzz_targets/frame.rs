//! Programs that use frames in any manner, beside a model.

#![no_main]

#[path = "../../crates/pagecrew/tests/replay/mod.rs"]
mod replay;

libfuzzer_sys::fuzz_target!(|program: &[u8]| replay::run(program));
