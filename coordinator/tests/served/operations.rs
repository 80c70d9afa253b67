//! Tests of the files that are shipped with the program: configuration, unit, dashboard, manual.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use laxity_coordinator::config::Config;
use laxity_tests::{Need, skip};

const SAMPLE: &str = include_str!("../../../dist/laxity-coordinator.toml");
const UNIT: &str = include_str!("../../../dist/laxity-coordinator.service");
const DASHBOARD: &str = include_str!("../../../dist/grafana/laxity.json");

fn dist(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("coordinator/ has a parent").join("dist").join(name)
}

fn coordinator(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_laxity-coordinator"))
        .args(arguments)
        .env_remove("LAXITY_LOG")
        .output()
        .expect("it runs");
    let said = String::from_utf8(output.stdout).expect("text");
    (output.status.success(), said)
}

#[test]
fn the_sample_is_accepted() {
    let path = dist("laxity-coordinator.toml");
    let (accepted, said) = coordinator(&["--check", "--config", &path.to_string_lossy()]);
    assert!(accepted && said.contains("valid"), "{said}");
}

#[test]
fn the_sample_has_the_same_keys_as_show_config() {
    let keys = |text: &str| {
        let mut table = String::new();
        let mut keys = BTreeSet::new();
        for line in text.lines() {
            let line = line.strip_prefix("# ").unwrap_or(line);
            if line.starts_with('[') {
                line.clone_into(&mut table);
            } else if let Some((key, _)) = line.split_once(" = ")
                && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
            {
                keys.insert(format!("{table} {key}"));
            }
        }
        keys
    };
    let full = concat!(
        "[policy]\ncorrection_permille = 1\n[[tenant]]\nname = \"a\"\nhosts = [\"a-*\"]\n",
        "drop_budget = 1\n",
        "[tls]\ncert = \"c\"\nkey = \"k\"\nclient_ca = \"a\"\n",
        "[etcd]\nendpoints = [\"http://a\"]\nadvertise = \"a:1\"\nca = \"a\"\ncert = \"c\"\nkey \
         = \"k\"\n",
    );
    let full = Config::parse(full, "test").expect("valid").to_toml();
    assert_eq!(keys(SAMPLE), keys(&full));
}

/// Collects the metrics of the dashboard's queries, without the suffixes of histograms.
fn queried(value: &serde_json::Value, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    serde_json::Value::String(text) if key == "expr" || key == "query" => {
                        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
                        found.extend(words.filter(|it| it.starts_with("laxity_")).map(|word| {
                            let bare = ["_bucket", "_sum", "_count"];
                            let bare = bare.iter().find_map(|end| word.strip_suffix(end));
                            bare.unwrap_or(word).to_owned()
                        }));
                    }
                    value => queried(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| queried(value, found)),
        _ => {}
    }
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_that_exist() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let pages =
        [include_str!("../../../docs/metrics.md"), include_str!("../../../docs/coordinator.md")];
    // Other tests compare both pages with the code.
    let documented: BTreeSet<&str> = pages
        .iter()
        .flat_map(|page| page.lines())
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|rest| rest.split_once('`').map(|(name, _)| name))
        .collect();
    let mut asked = BTreeSet::new();
    let alerts =
        serde_json::json!({ "expr": include_str!("../../../dist/prometheus/alerts.yaml") });
    queried(&alerts, &mut asked);
    assert!(asked.len() >= 10, "{asked:?}");
    queried(&dashboard, &mut asked);
    assert!(asked.len() > 20, "{asked:?}");
    for name in &asked {
        assert!(documented.contains(name.as_str()), "{name} does not exist");
    }
    for name in documented.iter().filter(|it| it.starts_with("laxity_coordinator_")) {
        assert!(asked.contains(*name), "{name} is not on the dashboard");
    }
    let panels = dashboard["panels"].as_array().expect("panels");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let title = &panel["title"];
        assert!(panel["description"].is_string(), "{title} says not what it shows");
        assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{title} has no unit");
        assert!(panel["targets"].as_array().is_some_and(|it| !it.is_empty()), "{title}");
    }
}

#[test]
fn the_unit_is_as_hardened_as_that_of_laxityd() {
    let of_laxityd = include_str!("../../../dist/laxityd.service");
    let hardening = [
        "Protect", "Private", "Restrict", "NoNew", "Capability", "Lock", "MemoryDeny", "SystemCall",
    ];
    let lines = of_laxityd
        .lines()
        .filter(|line| hardening.iter().any(|start| line.starts_with(start)))
        // laxityd needs these for its thread, its clients and the host's interfaces.
        .filter(|line| {
            !["sched_setaffinity", "ProtectProc=default", "AF_NETLINK"]
                .iter()
                .any(|own| line.contains(own))
        });
    for line in lines {
        assert!(UNIT.lines().any(|own| own == line), "{line} is missing");
    }
    assert!(UNIT.contains("User=laxity") && UNIT.contains("Type=notify"));
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
