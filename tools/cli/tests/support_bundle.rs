//! Tests of `laxity support-bundle`: the archive is unpacked and searched for planted secrets.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Output};

const SECRET: &str = "planted-secret-4711";
const ADDRESS: &str = "10.77.66.55";

fn script(folder: &Path, name: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).expect("executable");
}

/// Runs the command in a folder where `journalctl` has a secret. The copy of `laxity` has a
/// `laxityd` beside it, which prints a configuration with a secret.
fn bundle(folder: &Path, arguments: &[&str]) -> Output {
    let trace = folder.join("trace.json");
    std::fs::write(&trace, format!("{{\"password\": \"{SECRET}\"}}")).expect("written");
    bundle_with(folder, &[&["--trace", "trace.json"], arguments].concat())
}

/// Runs the command with these arguments only.
fn bundle_with(folder: &Path, arguments: &[&str]) -> Output {
    let copy = folder.join("laxity");
    std::fs::copy(env!("CARGO_BIN_EXE_laxity"), &copy).expect("a copy");
    let shown = format!("echo 'metrics = \"\"'; echo '# TOKEN={SECRET}'; echo 'x = \"{ADDRESS}\"'");
    script(folder, "laxityd", &shown);
    let journal = format!("echo \"laxityd: {ADDRESS} sent Authorization: Bearer {SECRET}\"");
    script(folder, "journalctl", &journal);
    let path = std::env::var("PATH").unwrap_or_default();
    Command::new(copy)
        .args(["support-bundle", "-o", "bundle.tar.gz"])
        .args(["--control", "/nowhere/control.sock"])
        .args(arguments)
        .current_dir(folder)
        .env("PATH", format!("{}:{path}", folder.display()))
        .env("HF_TOKEN", SECRET)
        .output()
        .expect("laxity runs")
}

fn unpacked(archive: &Path) -> BTreeMap<String, String> {
    let file = std::fs::File::open(archive).expect("an archive");
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let entries = archive.entries().expect("entries").map(|entry| {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a path").display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("text");
        (name.trim_start_matches("laxity-support/").to_owned(), text)
    });
    entries.collect()
}

#[test]
fn the_archive_has_no_planted_secret_and_lists_what_is_in_it_and_what_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let seen = bundle(folder.path(), &[]);
    assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
    let files = unpacked(&folder.path().join("bundle.tar.gz"));
    for (name, text) in &files {
        assert!(!text.contains(SECRET), "{name}: {text}");
        assert!(!text.contains(ADDRESS), "{name}: {text}");
    }
    assert!(files["journal-laxityd.txt"].contains("[address-"), "{files:?}");
    assert!(files["doctor.json"].contains("\"findings\""));
    assert!(files["versions.txt"].starts_with("laxity 0."));

    let manifest: serde_json::Value = serde_json::from_str(&files["manifest.json"]).expect("JSON");
    let names = |key: &str| -> Vec<String> {
        let rows = manifest[key].as_array().expect(key);
        rows.iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect()
    };
    let listed = names("files");
    assert_eq!(listed.len() + 1, files.len(), "the manifest does not list itself");
    assert!(listed.iter().all(|name| files.contains_key(name)), "{listed:?}");
    let missing = names("missing");
    for name in ["status.json", "metrics.txt"] {
        assert!(missing.contains(&name.to_owned()), "without a daemon: {missing:?}");
    }
    // Two units, the configuration, and the trace.
    assert!(manifest["secrets_removed"].as_u64() >= Some(4), "{manifest}");
    let said = String::from_utf8_lossy(&seen.stdout);
    assert!(said.contains("not had: status.json: ") && said.contains("cannot reach"), "{said}");
}

#[test]
fn the_coordinators_configuration_and_the_last_trace_are_in_it_where_they_exist() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    let etcd = format!("listen = \"{ADDRESS}:7471\"\n[etcd]\npassword = \"{SECRET}\"\n");
    std::fs::write(path.join("coordinator.toml"), etcd).expect("written");
    let named = ["--coordinator-config", "coordinator.toml"];
    assert!(bundle(path, &named).status.success());
    let files = unpacked(&path.join("bundle.tar.gz"));
    let config = &files["coordinator.toml"];
    assert!(config.contains("[etcd]") && config.contains(":7471"), "{config}");
    assert!(files.values().all(|text| !text.contains(SECRET) && !text.contains(ADDRESS)));
    let source = |files: &BTreeMap<String, String>, name: &str| -> Option<String> {
        let manifest: serde_json::Value = serde_json::from_str(&files["manifest.json"]).ok()?;
        let rows = manifest["files"].as_array()?.clone();
        let row = rows.into_iter().find(|row| row["name"].as_str() == Some(name))?;
        Some(row["source"].as_str()?.to_owned())
    };
    assert_eq!(source(&files, "coordinator.toml").as_deref(), Some("coordinator.toml"));

    // The program knows its defaults, and checks the file.
    script(path, "laxity-coordinator", &format!("echo \"# $*\"; echo 'listen = \"{ADDRESS}\"'"));
    std::fs::write(path.join("laxity-trace.json"), "{\"traceEvents\": []}").expect("written");
    let seen = bundle_with(path, &named);
    assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
    let files = unpacked(&path.join("bundle.tar.gz"));
    let config = &files["coordinator.toml"];
    assert!(config.starts_with("# --show-config --config coordinator.toml"), "{config}");
    assert!(!config.contains(ADDRESS), "{config}");
    assert_eq!(files["trace.json"], "{\"traceEvents\": []}");
    let said = source(&files, "trace.json").expect("it is listed");
    assert_eq!(said, "laxity-trace.json, written 0 min ago");
    // Most hosts have no coordinator, and no trace was recorded: neither is missing.
    script(path, "laxity-coordinator", "exit 1");
    std::fs::remove_file(path.join("laxity-trace.json")).expect("it was there");
    let said = String::from_utf8_lossy(&bundle_with(path, &[]).stdout).into_owned();
    assert!(!said.contains("coordinator.toml") && !said.contains("trace"), "{said}");
}

#[test]
fn addresses_stay_only_if_they_are_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    assert!(bundle(folder.path(), &["--with-addresses"]).status.success());
    let files = unpacked(&folder.path().join("bundle.tar.gz"));
    assert!(files["laxityd.toml"].contains(ADDRESS), "{files:?}");
    assert!(files.values().all(|text| !text.contains(SECRET)));
}

#[test]
fn a_configuration_that_laxityd_refuses_is_taken_as_it_was_written_and_the_archive_can_be_piped() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("broken.toml");
    std::fs::write(&file, format!("polciy = 7\npassword = \"{SECRET}\"\n")).expect("written");
    bundle(folder.path(), &[]);
    script(folder.path(), "laxityd", "echo 'laxityd: unknown key polciy' >&2; exit 1");
    let output = Command::new(folder.path().join("laxity"))
        .args(["support-bundle", "-o", "-", "--control", "/nowhere/control.sock", "--config"])
        .arg(&file)
        .current_dir(folder.path())
        .env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()))
        .output()
        .expect("laxity runs");
    assert!(output.status.success(), "{output:?}");
    let archive = folder.path().join("piped.tar.gz");
    std::fs::write(&archive, &output.stdout).expect("written");
    let parts = unpacked(&archive);
    let written = &parts["laxityd-as-written.toml"];
    assert!(written.contains("polciy = 7") && !written.contains(SECRET), "{written}");
    assert!(parts["manifest.json"].contains("unknown key polciy"), "why it is not as shown");
}
