//! How much longer everything may take in a test: `scripts/guests.sh` says so of a machine that is emulated.

/// Times as long.
pub fn patience() -> u32 {
    std::env::var("patience").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}
