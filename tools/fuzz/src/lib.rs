//! Fuzz targets: functions that process arbitrary bytes from outside and assert everything that has
//! to hold for any input.
//!
//! `fuzz/` runs these functions under libFuzzer (`make fuzz`). This crate's test runs them over
//! their seeds and thousands of mutations, so that they stay correct between two runs of a fuzzer.
//! Each target takes its input from the front by [`Input`]. Any bytes are a valid input, so few
//! mutations are wasted.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

pub mod control;
pub mod handshake;
pub mod hints;
pub mod http;
mod input;
pub mod records;
pub mod registration;
pub mod texts;
pub mod wire;

use std::fs;
use std::path::Path;

pub use input::Input;

pub const CORPUS: &str = "LAXITY_FUZZ_CORPUS";

/// Adds the seeds of `target` to the corpus that [`CORPUS`] names, if it is set. Each target calls
/// this when it starts.
///
/// # Panics
/// Panics if the seeds can't be written.
pub fn write_seeds(target: &str) {
    let Some(folder) = std::env::var_os(CORPUS) else { return };
    let folder = Path::new(&folder);
    fs::create_dir_all(folder).expect("the corpus can be made");
    for (_, seeds) in seeds().iter().filter(|(name, _)| *name == target) {
        for (number, seed) in seeds.iter().enumerate() {
            let path = folder.join(format!("seed-{number:03}"));
            fs::write(path, seed).expect("the corpus can be written");
        }
    }
}

/// Returns the seeds of every target, which are inputs that reach much of the code.
pub fn seeds() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    vec![
        ("wire", wire::seeds()),
        ("registration", registration::seeds()),
        ("records", records::seeds()),
        ("handshake", handshake::seeds()),
        ("control", control::seeds()),
        ("http", http::seeds()),
        ("texts", texts::seeds()),
        ("hints", hints::seeds()),
    ]
}
