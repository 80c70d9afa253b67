//! Runs `laxity_fuzz::records` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("records"),
    |bytes: &[u8]| laxity_fuzz::records::run(bytes)
);
