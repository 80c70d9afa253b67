//! Runs `laxity_fuzz::texts` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: laxity_fuzz::write_seeds("texts"),
    |bytes: &[u8]| laxity_fuzz::texts::run(bytes)
);
