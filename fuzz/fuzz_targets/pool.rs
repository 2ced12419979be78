//! Packets of a pool's protocol: whatever the bytes are, they are read to an end, and what is understood is written as it is read.

#![no_main]

use pagecrew::pool::{Answer, Packet};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = Packet::read(bytes) {
        assert_eq!(Packet::read(request.to_string().as_bytes()), Ok(request));
    }
    if let Ok(answer) = Answer::read(bytes) {
        assert_eq!(Answer::read(answer.to_string().as_bytes()), Ok(answer));
    }
});
