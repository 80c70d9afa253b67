//! Runs `laxity_fuzz::registration` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("registration"),
    |bytes: &[u8]| laxity_fuzz::registration::run(bytes)
);
