//! `tools/setup.sh` on a machine that lacks everything: what it asks the package manager for.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

/// Puts an executable script into a folder.
fn script(folder: &Path, name: &str, body: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/bash\n{body}\n")).expect("a writable folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("own file");
}

#[test]
fn setup_on_a_bare_machine_installs_all_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let bin = folder.path();
    for tool in ["env", "bash"] {
        symlink(Path::new("/usr/bin").join(tool), bin.join(tool)).expect("a link");
    }
    script(bin, "id", "echo 0");
    script(bin, "cargo", "");
    let log = bin.join("log");
    script(bin, "apt-get", &format!("echo \"$@\" >>{}", log.display()));
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/setup.sh");
    let output = Command::new("/bin/bash")
        .arg(setup)
        .arg("base")
        .env("PATH", bin)
        .output()
        .expect("bash runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaint}");
    let asked = fs::read_to_string(&log).expect("apt-get was called");
    for package in ["gcc", "make", "iproute2", "pkg-config"] {
        assert!(asked.contains(package), "{package} is not in: {asked}");
        assert!(said.contains(package), "{package} is not in: {said}");
    }
}
