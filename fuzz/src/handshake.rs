//! See `laxity_fuzz::handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("handshake"),
    |bytes: &[u8]| laxity_fuzz::handshake::run(bytes)
);
