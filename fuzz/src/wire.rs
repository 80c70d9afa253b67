//! See `laxity_fuzz::wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| laxity_fuzz::wire::run(bytes));
