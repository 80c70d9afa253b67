//! What is done with arbitrary bytes that come from elsewhere, with everything asserted that has to
//! hold whatever they are.
//!
//! `fuzz/` runs these functions under libFuzzer (`make fuzz`), this crate's own test runs them over
//! their seeds and some thousand mutations, so that they stay true between two runs of a fuzzer.
//! Each takes its input from the front by [`Input`], and every input means something, so that a
//! mutation is rarely wasted.
#![forbid(unsafe_code)]

pub mod handshake;
mod input;
pub mod records;
pub mod registration;
pub mod wire;

use std::fs;
use std::path::Path;

pub use input::Input;

/// The environment variable that says where a fuzzer's corpus is.
pub const CORPUS: &str = "LAXITY_FUZZ_CORPUS";

/// Adds the seeds of `target` to the corpus that [`CORPUS`] names, if it names one: for the target
/// itself, as it starts.
///
/// # Panics
/// If they cannot be written.
pub fn write_seeds(target: &str) {
    let Some(folder) = std::env::var_os(CORPUS) else {
        return;
    };
    let folder = Path::new(&folder);
    fs::create_dir_all(folder).expect("the corpus can be made");
    for (_, seeds) in seeds().iter().filter(|(name, _)| *name == target) {
        for (number, seed) in seeds.iter().enumerate() {
            let path = folder.join(format!("seed-{number:03}"));
            fs::write(path, seed).expect("the corpus can be written");
        }
    }
}

/// The seeds of every target: inputs that get far.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    vec![
        ("wire", wire::seeds()),
        ("registration", registration::seeds()),
        ("records", records::seeds()),
        ("handshake", handshake::seeds()),
    ]
}
