//! Runs `laxity_fuzz::http` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("http"),
    |bytes: &[u8]| laxity_fuzz::http::run(bytes)
);
