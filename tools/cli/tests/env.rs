//! Tests of `laxity env`: its formats, and its defaults against the daemon's.

use std::process::{Command, Output};

fn env(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
    for variable in ["NCCL_IB_TC", "LAXITY_PROFILE_DIR"] {
        command.env_remove(variable);
    }
    command
        .args(["env", "--socket", "/nowhere/laxityd.sock"])
        .args(arguments)
        .output()
        .expect("laxity runs")
}

fn text(arguments: &[&str]) -> String {
    let seen = env(arguments);
    assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
    String::from_utf8(seen.stdout).expect("UTF-8")
}

#[test]
fn a_shell_can_evaluate_it_and_docker_and_kubernetes_can_take_it() {
    let script = text(&["--link", "roce"]);
    let run = Command::new("sh").args(["-ec", &format!("{script}\necho $NCCL_IB_TC")]).output();
    assert_eq!(run.expect("sh runs").stdout, b"136\n");
    let docker = text(&["--link", "roce", "--format", "docker"]);
    let words: Vec<&str> = docker.split_whitespace().collect();
    assert!(words.chunks(2).all(|pair| pair[0] == "--env" && pair[1].contains('=')), "{docker}");
    let k8s = text(&["--link", "roce", "--format", "k8s"]);
    assert!(k8s.contains("- name: NCCL_IB_TC\n  value: \"136\"\n"), "{k8s}");
}

#[test]
fn json_has_every_variable_with_what_happens_to_it_and_where_that_is_written() {
    let rows = text(&["--link", "infiniband", "--service-level", "p2d=2", "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_str(&rows).expect("JSON");
    let rows = rows.as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).expect("a row");
    assert_eq!(row("MC_IB_SL")["value"], "2");
    assert_eq!(
        (&row("NCCL_IB_SL")["outcome"], &row("NCCL_IB_SL")["value"]),
        (&serde_json::json!("left"), &serde_json::Value::Null,)
    );
    assert!(rows.iter().all(|row| row["source"] != "" && row["library"] != ""));
}

#[test]
fn a_profile_without_class_variables_is_refused() {
    let seen = env(&["--profile", "mooncake"]);
    assert_eq!(seen.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&seen.stderr).contains("class_variables = true"));
}

#[test]
fn without_a_daemon_the_classes_are_those_of_the_daemons_own_defaults() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/laxityd.toml");
    let sample = std::fs::read_to_string(sample).expect("the sample configuration");
    let sample: toml::Table = sample.parse().expect("TOML");
    let dscps = sample["levels"]["dscp"].as_array().expect("a list");
    let dscp = |row: usize| dscps[row].as_integer().expect("a number");
    let rows = text(&["--link", "roce", "--format", "json"]);
    let rows: serde_json::Value = serde_json::from_str(&rows).expect("JSON");
    let class = |name: &str| {
        let mut rows = rows.as_array().expect("rows").iter();
        let row = rows.find(|row| row["name"] == name).expect("a row");
        row["value"].as_str().expect("a value").parse::<i64>().expect("a number")
    };
    assert_eq!(class("NCCL_IB_TC"), dscp(1) << 2, "collectives have P2");
    assert_eq!(class("MC_IB_TC"), dscp(dscps.len() - 1) << 2, "p2d has the lowest level");
}
