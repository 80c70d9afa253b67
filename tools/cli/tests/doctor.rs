//! Tests of the command `laxity doctor`. The checks have tests beside their code.

use std::process::{Command, Output};

fn doctor(folder: &std::path::Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_laxity"))
        .args(["doctor", "--root"])
        .arg(folder)
        .args(arguments)
        .env("LAXITY_CONTROL", folder.join("control.sock"))
        .env("LAXITY_SOCKET", folder.join("laxityd.sock"))
        .output()
        .expect("laxity runs")
}

#[test]
fn without_a_daemon_it_fails_and_says_how_to_start_one_on_a_page_without_colours() {
    let folder = tempfile::tempdir().unwrap();
    let seen = doctor(folder.path(), &[]);
    assert_eq!(seen.status.code(), Some(1));
    let page = String::from_utf8(seen.stdout).unwrap();
    assert!(page.contains("ERROR  daemon"), "{page}");
    assert!(page.contains("systemctl enable --now laxityd"), "{page}");
    assert!(!page.contains('\x1b'), "no terminal, no colours");
}

#[test]
fn json_has_every_finding_with_its_severity_reason_and_action() {
    let folder = tempfile::tempdir().unwrap();
    let seen = doctor(folder.path(), &["--json"]);
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert_eq!(report["worst"], "error");
    let findings = report["findings"].as_array().unwrap();
    for id in ["device", "daemon", "registration", "library", "profile", "coverage", "memlock"] {
        let finding = findings.iter().find(|finding| finding["id"] == id);
        let finding = finding.unwrap_or_else(|| panic!("{id} is missing"));
        for key in ["severity", "subject", "found", "why", "action"] {
            assert!(finding[key].is_string(), "{id}.{key}");
        }
    }
}
