//! `laxity-coordinator`: arguments, log, runtime. Everything else is in the library.
#![forbid(unsafe_code)]

fn main() {}
