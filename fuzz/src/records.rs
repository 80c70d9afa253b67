//! See `laxity_fuzz::records`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| laxity_fuzz::records::run(bytes));
