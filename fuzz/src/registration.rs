//! See `laxity_fuzz::registration`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| laxity_fuzz::registration::run(bytes));
