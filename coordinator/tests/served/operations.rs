//! Tests of the files that are shipped with the program: configuration, unit, dashboard, manual.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use laxity_tests::{Need, skip};

const DASHBOARD: &str = include_str!("../../../dist/grafana/laxity.json");

fn dist(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("coordinator/ has a parent").join("dist").join(name)
}

/// Runs the program to its end. Returns whether it succeeded, and all that it printed.
pub(crate) fn coordinator(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_laxity-coordinator"))
        .args(arguments)
        .env_remove("LAXITY_LOG")
        .output()
        .expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).expect("text"))
}

/// Returns the metrics that a text names, without the suffixes of histograms.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let metrics = words.filter(|word| word.starts_with("laxity_"));
    let suffixes = ["_bucket", "_sum", "_count"];
    let bare = |word| suffixes.iter().find_map(|end| str::strip_suffix(word, end)).unwrap_or(word);
    metrics.map(bare).collect()
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_that_exist() {
    let (dashboard, alerts) =
        (named(DASHBOARD), named(include_str!("../../../dist/prometheus/alerts.yaml")));
    // Other tests compare both pages with the code.
    let pages = concat!(
        include_str!("../../../docs/metrics.md"),
        include_str!("../../../docs/coordinator.md")
    );
    let rows = pages.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let documented: BTreeSet<&str> = rows.collect();
    assert!(alerts.len() >= 10 && dashboard.len() > 20, "{alerts:?} {dashboard:?}");
    for name in alerts.union(&dashboard) {
        assert!(documented.contains(name), "{name} does not exist");
    }
    for name in documented.iter().filter(|it| it.starts_with("laxity_coordinator_")) {
        assert!(alerts.contains(name) || dashboard.contains(name), "{name} is not shown");
    }
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let title = &panel["title"];
        assert!(panel["description"].is_string(), "{title} says not what it shows");
        assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{title} has no unit");
        assert!(panel["targets"].as_array().is_some_and(|it| !it.is_empty()), "{title}");
    }
}

#[test]
fn systemd_accepts_the_unit() {
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(dist("laxity-coordinator.service"))
        .output();
    let Ok(output) = verified else {
        return skip(Need::Machine, "there is no systemd-analyze here");
    };
    let said = String::from_utf8_lossy(&output.stderr);
    // The program is not installed here, and older releases lack some settings of restarts.
    let complaints: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("laxity-coordinator.service"))
        .filter(|line| {
            !line.contains("is not executable") && !line.contains("Unknown key 'Restart")
        })
        .collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
    let unit = include_str!("../../../dist/laxity-coordinator.service");
    assert!(unit.contains("User=laxity") && unit.contains("Type=notify"));
}

#[test]
fn manual_pages_and_completions_are_made_from_the_flags() {
    let (made, page) = coordinator(&["--manual", "laxity-coordinator.8"]);
    assert!(made && page.contains("\\-\\-web") && page.contains("/etc/laxity/coordinator.toml"));
    let (made, page) = coordinator(&["--manual", "laxity-coordinator.toml.5"]);
    assert!(made && page.contains("drop_budget = "));
    for shell in ["bash", "zsh", "fish"] {
        let (made, script) = coordinator(&["--completions", shell]);
        assert!(made && script.contains("laxity-coordinator"), "{shell}");
    }
}
