//! Reading, showing, overriding and reloading configurations, and the errors of each.

use std::path::Path;

use laxity_policy::PolicyKind;

use super::*;

fn error(text: &str) -> String {
    Config::parse(text, "laxityd.toml").unwrap_err().to_string()
}

#[test]
fn an_empty_file_is_the_default_configuration_and_it_is_valid() {
    let config = Config::parse("", "x").unwrap();
    assert_eq!(config, Config::default());
    assert_eq!(config.nic[0].chunk_bytes(), 1 << 20);
    assert_eq!(config.nic[0].window_bytes(), 4 << 20);
}

#[test]
fn what_show_config_prints_reads_back_as_the_same_configuration() {
    let text = r#"
        mode = "observe"
        policy = "mfs"
        slo_ttft = "500ms"
        [scheduler]
        cpu = 1
        [access]
        control_mode = "0600"
        [tuning]
        last_stage = "within_level"
        [[nic]]
        name = "a"
        rate = "100Mbit"
        chunk = "32KiB"
        [[nic]]
        name = "b"
        rate = 125000000
        window = "1MiB"
    "#;
    let config = Config::parse(text, "x").unwrap();
    assert_eq!(Config::parse(&config.to_toml(), "shown").unwrap(), config);
    assert_eq!(config.nic[0].window_bytes(), 128 << 10);
    assert_eq!(config.nic[1].chunk_bytes(), 64 << 10);
    let shown = Config::default().to_toml();
    assert_eq!(Config::parse(&shown, "shown").unwrap(), Config::default());
}

#[test]
fn an_unknown_key_is_shown_with_its_line_and_the_known_ones() {
    let text = error("mode = \"enforce\"\n[scheduler]\nspin = 3\n");
    assert!(text.starts_with("laxityd.toml:3: "), "{text}");
    assert!(
        text.contains("spin = 3") && text.contains("spin_us"),
        "{text}"
    );
    assert!(text.contains("--check-config"), "{text}");
}

#[test]
fn a_bad_unit_is_shown_with_its_line_and_the_right_ones() {
    let text = error("[[nic]]\nname = \"a\"\nrate = \"100 furlongs\"\n");
    assert!(text.starts_with("laxityd.toml:3: "), "{text}");
    assert!(
        text.contains("100 furlongs") && text.contains("Gbit"),
        "{text}"
    );
}

#[test]
fn a_value_that_contradicts_another_is_shown_where_it_stands() {
    let text = error(
        "[[nic]]\nname = \"a\"\nrate = \"1Gbit\"\n\n[[nic]]\nname = \"b\"\nrate = \"1Gbit\"\nchunk = \"2MiB\"\nwindow = \"1MiB\"\n",
    );
    assert!(text.starts_with("laxityd.toml:9: nic.1.window"), "{text}");
    assert!(text.contains("less than a chunk,"), "{text}");
    let text = error(&format!("socket = \"/run/{}\"\n", "x".repeat(103)));
    assert!(text.starts_with("laxityd.toml:1: socket"), "{text}");
    let text = error("[levels]\ncount = 4\n");
    assert!(
        text.starts_with("laxityd.toml:1: levels.dscp: has 8 entries for 4"),
        "{text}"
    );
    let text = error("[levels]\ncount = 1\ndscp = [46]\n");
    assert!(text.starts_with("laxityd.toml:2: levels.count"), "{text}");
    let text = error("mode = \"off\"\nmetrics = \"everywhere\"\n");
    assert!(text.starts_with("laxityd.toml:2: metrics"), "{text}");
}

#[test]
fn an_unknown_policy_lists_those_that_exist() {
    let text = error("policy = \"fastest\"\n");
    assert!(
        text.contains("laxityd.toml:1") && text.contains("two_class"),
        "{text}"
    );
}

#[test]
fn broken_syntax_is_an_error_with_its_line() {
    assert!(error("mode = \"off\"\n[nic\n").starts_with("laxityd.toml:2: "));
}

#[test]
fn assignments_override_single_keys_and_name_themselves_when_wrong() {
    let set = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
        Config::default().with_assignments(&sets)
    };
    let config = set(&[
        "scheduler.spin_us=0",
        "nic.0.rate=25Gbit",
        "policy=mfs",
        "slo_ttft=1s",
    ])
    .unwrap();
    assert_eq!(config.scheduler.spin_us, 0);
    assert_eq!(config.nic[0].rate, Rate(3_125_000_000));
    assert_eq!(config.policy, PolicyKind::Mfs);
    assert_eq!(config.slo_ttft, Some(Nanos(1_000_000_000)));
    for bad in [
        "spin",
        "scheduler.spin=1",
        "nic.7.rate=1Gbit",
        "mode.x=1",
        "mode=fast",
    ] {
        let text = set(&[bad]).unwrap_err().to_string();
        assert!(text.starts_with(&format!("--set {bad}: ")), "{text}");
    }
}

#[test]
fn a_reload_takes_what_can_change_and_names_what_cannot() {
    let running = Config::default();
    let mut file = running.clone();
    file.policy = PolicyKind::TwoClass;
    file.nic[0].rate = Rate(1000);
    file.scheduler.spin_us = 7;
    assert!(file.needs_restart(&running).is_empty());
    assert_eq!(file.reloaded_over(&running), file);

    file.socket = "/elsewhere".into();
    file.scheduler.cpu = Some(3);
    assert_eq!(file.needs_restart(&running), ["socket", "scheduler.cpu"]);
    let effective = file.reloaded_over(&running);
    assert_eq!(effective.socket, running.socket);
    assert_eq!(effective.scheduler.cpu, None);
    assert_eq!(effective.policy, PolicyKind::TwoClass);
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::load(Some(Path::new("/nonexistent/laxityd.toml")), &[]).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/laxityd.toml"));
}
