//! Tests the Python package as a wheel that is installed in an environment without other parts of
//! Laxity, with the real `laxityd` (mooncake-adapter/tests). Skipped if PyPI can't be reached.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use laxity_tests::{Need, skip};

use crate::process::{Said, binary};
use crate::sources::root;

fn run(program: impl AsRef<OsStr>, arguments: &[&str], folder: &Path) -> Said {
    Said::of(Command::new(program).args(arguments).current_dir(folder))
}

pub(crate) fn wheel(builder: &Path, wheels: &Path) -> PathBuf {
    let programs = binary("laxity");
    let programs = programs.parent().and_then(Path::to_str).expect("a folder");
    run(root().join("mooncake-adapter/bundle.sh"), &[programs], root()).good();
    let to = wheels.to_str().expect("UTF-8");
    let build = ["build", "--profile", "dev", "--locked", "--out", to];
    run(builder.join("bin/maturin"), &build, &root().join("mooncake-adapter")).good();
    let mut built = std::fs::read_dir(wheels).expect("wheels").flatten();
    let wheel = built.next().expect("a wheel").path();
    assert!(built.next().is_none(), "one wheel");
    wheel
}

/// Returns the environment that has maturin, or why there is none.
pub(crate) fn builder() -> Result<PathBuf, String> {
    let target = binary("laxityd");
    // The path is target/<profile>/laxityd.
    let target = target.ancestors().nth(2).expect("a target folder");
    let folder = target.join("python");
    let script = root().join("mooncake-adapter/setup.sh");
    let output = run(script, &[folder.to_str().expect("UTF-8")], root());
    if output.status.success() { Ok(folder) } else { Err(output.all()) }
}

#[test]
fn the_wheel_works_in_an_environment_of_its_own() {
    let builder = match builder() {
        Ok(builder) => builder,
        Err(reason) => return skip(Need::Machine, reason),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let wheels = folder.path().join("wheels");
    let package = root().join("mooncake-adapter");
    let wheel = wheel(&builder, &wheels);

    let clean = folder.path().join("clean");
    let venv = ["-m", "venv", clean.to_str().expect("UTF-8")];
    run("python3", &venv, folder.path()).good();
    let pip = clean.join("bin/pip");
    let wanted = format!("{}[test]", wheel.display());
    let alone = package.join("tests/alone.txt");
    let alone = alone.to_str().expect("UTF-8");
    for what in [&[wanted.as_str()][..], &["--no-deps", "-r", alone]] {
        let output = run(&pip, &[&["install", "--quiet"], what].concat(), folder.path());
        if !output.status.success() {
            let why = format!("pip can't install {what:?}: {}", output.all());
            return skip(Need::Machine, why);
        }
    }

    // The folder has no sources, so the package is the installed one.
    let mut pytest = Command::new(clean.join("bin/python"));
    pytest
        .args(["-m", "pytest", "-q", "-rs", "--strict-markers", "-p"])
        .args(["no:cacheprovider", "-c"])
        .arg(package.join("pyproject.toml"))
        .arg(package.join("tests"))
        .current_dir(folder.path())
        .env("LAXITY_BIN", binary("laxityd").parent().expect("a folder"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let output = Said::of(&mut pytest);
    let text = output.all();
    println!("{text}");
    assert!(output.status.success(), "pytest says no: see above");
    // With `-rs`, pytest prints "SKIPPED [1] tests/…: the reason".
    for line in text.lines().filter(|line| line.starts_with("SKIPPED")) {
        skip(Need::Machine, line);
    }
}
