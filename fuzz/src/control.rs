//! Runs `laxity_fuzz::control` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("control"),
    |bytes: &[u8]| laxity_fuzz::control::run(bytes)
);
