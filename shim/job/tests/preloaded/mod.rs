//! A library that is preloaded, as a file: what tests of each of them need.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Where cargo put a library: next to the test's own directory, or in it.
pub(crate) fn library(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("deps");
    [deps.join(name), deps.join("..").join(name)]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{name} is built with its tests"))
}

/// The output of a program that succeeds.
pub(crate) fn output(command: &mut Command) -> Output {
    let output = command.output().expect("the program starts");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        text(&output.stderr)
    );
    output
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What leaves a library.
pub(crate) fn exported(name: &str) -> BTreeSet<String> {
    let symbols = output(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(library(name)),
    );
    let last = |line: &str| line.split_whitespace().last().map(str::to_owned);
    text(&symbols.stdout).lines().filter_map(last).collect()
}

/// A process that does nothing of what a library is for says nothing, not even of a profile that
/// there isn't: nothing of the library has run.
pub(crate) fn a_process_does_not_notice(name: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report");
    let script = "ls /proc/self/task | wc -l; exec true";
    let alone = output(Command::new("sh").args(["-c", script]));
    let preloaded = output(
        Command::new("sh")
            .args(["-c", script])
            .env("LD_PRELOAD", library(name))
            .env("LAXITY_REPORT", &report)
            .env("LAXITY_PROFILE", "no-such-profile")
            .env("LAXITY_SOCKET", folder.path().join("none.sock")),
    );
    assert_eq!(text(&preloaded.stdout), text(&alone.stdout));
    assert_eq!(text(&preloaded.stderr), text(&alone.stderr));
    assert!(!report.exists());
}
