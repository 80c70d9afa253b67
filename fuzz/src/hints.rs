//! Runs `laxity_fuzz::hints` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("hints"),
    |bytes: &[u8]| laxity_fuzz::hints::run(bytes)
);
