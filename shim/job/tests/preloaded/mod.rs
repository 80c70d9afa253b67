//! Helpers for tests of preloaded libraries as files.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Returns the path of a library, which is next to the test's directory or in it.
pub(crate) fn library(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("deps");
    [deps.join(name), deps.join("..").join(name)]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{name} is built with its tests"))
}

/// Returns the output of a program, which must succeed.
pub(crate) fn output(command: &mut Command) -> Output {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    output
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the symbols that a library exports.
pub(crate) fn exported(name: &str) -> BTreeSet<String> {
    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(library(name)));
    let last = |line: &str| line.split_whitespace().last().map(str::to_owned);
    text(&symbols.stdout).lines().filter_map(last).collect()
}

/// Checks that a process which doesn't use a library's functions has no output, even with a missing
/// profile. None of the library's code may run.
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
