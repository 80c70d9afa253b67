//! Access to the files of this repository, for tests of their form.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn root() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests/ has a parent")
}

pub(crate) fn text(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(root().join(path)).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

/// Returns the files that git tracks or would track and that have one of `extensions`, sorted.
/// Paths are from the root.
pub(crate) fn files(extensions: &[&str]) -> Vec<PathBuf> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let mut git = Command::new("git");
    let listed = git.args(arguments).current_dir(root()).output();
    let listed = listed.expect("git runs");
    assert!(listed.status.success(), "{listed:?}");
    let listed = String::from_utf8(listed.stdout).expect("UTF-8");
    let ends = |path: &PathBuf| {
        let extension = path.extension().unwrap_or_default();
        extensions.iter().any(|wanted| extension == *wanted) && root().join(path).is_file()
    };
    let mut files: Vec<_> = listed.split('\0').map(PathBuf::from).filter(ends).collect();
    files.sort();
    files.dedup();
    files
}

/// Fails with a line for each element of `wrong`, if there are any.
#[track_caller]
pub(crate) fn none(what: &str, wrong: &[String]) {
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}
