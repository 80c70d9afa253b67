//! What the binary says when it is asked, and when it is asked wrongly.

#![allow(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

use std::process::{Command, Output};

fn laxityd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_laxityd"))
        .args(arguments)
        .env_remove("LAXITY_SOCKET")
        .env_remove("LAXITY_CONTROL")
        .output()
        .unwrap()
}

#[test]
fn show_config_prints_a_file_that_check_config_accepts() {
    let shown = laxityd(&["--show-config", "--set", "policy=mfs", "--socket", "x.sock"]);
    assert!(shown.status.success());
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(
        text.contains("policy = \"mfs\"") && text.contains("socket = \"x.sock\""),
        "{text}"
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shown.toml");
    std::fs::write(&file, text).unwrap();
    let checked = laxityd(&["--config", file.to_str().unwrap(), "--check-config"]);
    assert!(checked.status.success());
}

#[test]
fn a_wrong_file_is_named_with_its_line_and_the_exit_code_is_not_zero() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("laxityd.toml");
    std::fs::write(
        &file,
        "mode = \"enforce\"\n\n[[nic]]\nname = \"a\"\nrate = \"fast\"\n",
    )
    .unwrap();
    let checked = laxityd(&["--config", file.to_str().unwrap(), "--check-config"]);
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(
        said.contains("laxityd.toml:5") && said.contains("`fast`"),
        "{said}"
    );
}

#[test]
fn the_sample_configuration_is_the_defaults() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/laxityd.toml");
    let from_sample = laxityd(&["--config", sample, "--show-config"]);
    assert!(
        from_sample.status.success(),
        "{}",
        String::from_utf8_lossy(&from_sample.stderr)
    );
    let defaults = laxityd(&["--set", "mode=enforce", "--show-config"]);
    let text = |output: Output| String::from_utf8(output.stdout).unwrap();
    assert_eq!(text(from_sample), text(defaults));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_laxityd"))
        .arg("--show-config")
        .stdout(writer)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[test]
fn a_level_that_is_none_is_refused_from_the_environment_too_and_a_core_that_is_none_warned_of() {
    let with = |arguments: &[&str], log: &str| {
        Command::new(env!("CARGO_BIN_EXE_laxityd"))
            .args(arguments)
            .env("LAXITY_LOG", log)
            .output()
            .unwrap()
    };
    let refused = with(&["--check-config"], "wran");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("`wran` is not a level"), "{said}");
    let warned = with(&["--check-config", "--set=scheduler.cpu=100000"], "");
    let said = String::from_utf8_lossy(&warned.stderr);
    assert!(warned.status.success());
    assert!(said.contains("warning: scheduler.cpu"), "{said}");
}

#[test]
fn manual_pages_and_completions_name_every_flag_and_key() {
    let text = |arguments: &[&str]| {
        let output = laxityd(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let program = text(&["--manual", "laxityd.8"]);
    assert!(program.starts_with(".ie") || program.contains(".TH laxityd 8"));
    assert!(program.contains("check\\-config") && !program.contains("manual"));
    let configuration = text(&["--manual", "laxityd.toml.5"]);
    assert!(
        configuration.contains("completion_timeout")
            && configuration.contains(".TH laxityd.toml 5")
    );
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&["--completions", shell]).contains("show-config"));
    }
}
