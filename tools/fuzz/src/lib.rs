//! What is done with arbitrary bytes that come from elsewhere, with everything asserted that has to hold whatever they are.
//!
//! `fuzz/` runs these functions under libFuzzer (`make fuzz`), this crate's own test runs them over their seeds and some thousand
//! mutations, so that they stay true between two runs of a fuzzer. Each takes its input from the front by [`Input`], and every
//! input means something, so that a mutation is rarely wasted.
#![forbid(unsafe_code)]

mod input;
pub mod records;
pub mod registration;
pub mod wire;

pub use input::Input;

/// The seeds of every target: inputs that get far.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    vec![
        ("wire", wire::seeds()),
        ("registration", registration::seeds()),
        ("records", records::seeds()),
    ]
}
