//! Runs `laxity_fuzz::handshake` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("handshake"),
    |bytes: &[u8]| laxity_fuzz::handshake::run(bytes)
);
