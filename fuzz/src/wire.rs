//! Runs `laxity_fuzz::wire` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("wire"),
    |bytes: &[u8]| laxity_fuzz::wire::run(bytes)
);
