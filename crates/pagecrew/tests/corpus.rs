//! The programs that the fuzzer has found worth keeping, and some that are made up here, whatever they do.

#![cfg(not(loom))]

mod replay;

use std::path::Path;

#[test]
fn the_fuzzers_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/frame");
    let mut count = 0;
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        replay::run(&std::fs::read(&path).unwrap());
        count += 1;
    }
    assert!(count >= 20, "only {count} programs are in {}", corpus.display());
}

#[test]
fn programs_without_rhyme_or_reason() {
    let mut random = 0x2545_f491_4f6c_dd1du64;
    for _ in 0..if cfg!(debug_assertions) { 20 } else { 300 } {
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u8
        };
        let program: Vec<u8> = (0..1000).map(|_| next()).collect();
        replay::run(&program);
    }
}
