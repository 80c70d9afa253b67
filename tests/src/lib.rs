//! Lets a test report that it can't run on this machine.
//!
//! A test that needs root, namespaces, QEMU, etcd, a browser or recorded traces calls [`skip`] if
//! they are missing, and returns. The output of a test that passed is not shown, so:
//!
//! * `make test` names a file in `LAXITY_SKIPPED`. Each skipped test adds a line to it, and `make
//!   test` prints their number and reasons at the end.
//! * `LAXITY_REQUIRE=all` makes such a test fail, except for tests with vLLM, which takes 6 GB.
//!   With `LAXITY_REQUIRE=vllm` those fail, too. With `LAXITY_REQUIRE=machine`, tests that lack
//!   the recorded traces may also be skipped. The traces are not part of this repository.

pub mod browser;

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

/// Something that a test needs and lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A privilege or a program: `make setup-…` installs what can be installed.
    Machine,
    /// Recorded traces and profiles, in the folder that `LAXITY_DATA` names.
    Traces,
    /// vLLM, which `make setup-vllm` installs in 6 GB.
    Vllm,
}

/// Records that the calling test can't run here. The caller returns after it.
#[track_caller]
pub fn skip(need: Need, why: impl Display) {
    let required = std::env::var("LAXITY_REQUIRE").unwrap_or_default();
    assert!(
        !is_required(&required, need),
        "LAXITY_REQUIRE={required} asks for this test, and it can't run here: {why}"
    );
    let test = test_name();
    println!("skipped: {test}: {why}");
    let Some(file) = std::env::var_os("LAXITY_SKIPPED") else { return };
    // Each line is written with one call, since tests in other processes append to the same file.
    let line = format!("{test}: {}\n", why.to_string().trim().replace('\n', " "));
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&file)
        .unwrap_or_else(|error| panic!("LAXITY_SKIPPED={}: {error}", file.display()));
    file.write_all(line.as_bytes()).expect("a line in LAXITY_SKIPPED");
}

/// Returns the folder that `LAXITY_DATA` names. Without it, the test is skipped.
#[track_caller]
pub fn recorded_data() -> Option<PathBuf> {
    let folder = std::env::var_os("LAXITY_DATA").map(PathBuf::from);
    if folder.is_none() {
        skip(Need::Traces, "LAXITY_DATA names no folder with recordings");
    }
    folder
}

fn is_required(required: &str, need: Need) -> bool {
    match required {
        "" => false,
        "vllm" => true,
        "all" => need != Need::Vllm,
        "machine" => need == Need::Machine,
        other => panic!("LAXITY_REQUIRE is {other:?}; expected `vllm`, `all` or `machine`"),
    }
}

/// Returns the test's name. nextest sets a variable with it, and libtest names the thread after it.
fn test_name() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .ok()
        .or_else(|| std::thread::current().name().map(str::to_owned))
        .unwrap_or_else(|| "a test".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_cannot_run_passes_only_where_nothing_requires_it() {
        assert!(!is_required("", Need::Machine) && !is_required("", Need::Traces));
        assert!(is_required("all", Need::Machine) && is_required("all", Need::Traces));
        assert!(is_required("machine", Need::Machine) && !is_required("machine", Need::Traces));
        assert!(is_required("vllm", Need::Vllm) && is_required("vllm", Need::Machine));
        assert!(!is_required("all", Need::Vllm) && !is_required("machine", Need::Vllm));
        let typo = std::panic::catch_unwind(|| is_required("al", Need::Machine));
        assert!(typo.is_err(), "a typing error must not let tests be skipped");
    }
}
