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
        "[[nic]]\nname = \"a\"\nrate = \"1Gbit\"\n\n[[nic]]\nname = \"b\"\nrate = \"1Gbit\"\nchunk \
         = \"2MiB\"\nwindow = \"1MiB\"\n",
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

#[test]
fn a_log_level_that_is_none_is_refused_with_those_that_are() {
    for (bad, word) in [
        ("inof", "inof"),
        ("info,wran", "wran"),
        ("laxity_daemon::driver", "laxity_daemon::driver"),
        ("", ""),
        ("laxity_daemon=inof", "inof"),
    ] {
        let text = error(&format!("log = {bad:?}\n"));
        assert!(text.starts_with("laxityd.toml:1: log: "), "{text}");
        assert!(text.contains(word) && text.contains("warn, info"), "{text}");
    }
    for good in [
        "off",
        "WARN",
        "info,laxity_daemon::driver=debug",
        "laxity_daemon[x]=trace",
    ] {
        Config::parse(&format!("log = {good:?}\n"), "x").unwrap();
    }
}

#[test]
fn levels_that_share_a_dscp_are_adjacent_and_the_scavenger_is_below_all() {
    let text = error("[levels]\ncount = 3\ndscp = [46, 10, 46]\n");
    assert!(text.starts_with("laxityd.toml:3: levels.dscp"), "{text}");
    assert!(text.contains("P1 and P3"), "{text}");
    let text = error("[levels]\ncount = 3\nscavenger_dscp = 34\ndscp = [46, 34, 10]\n");
    assert!(
        text.starts_with("laxityd.toml:3: levels.scavenger_dscp") && text.contains("P2"),
        "{text}"
    );
    let shared = "[levels]\ncount = 4\nscavenger_dscp = 10\ndscp = [46, 10, 10, 10]\n";
    Config::parse(shared, "x").unwrap();
    Config::parse(
        "[levels]\ncount = 2\ndscp = [0, 0]\nscavenger_dscp = 0\n",
        "x",
    )
    .unwrap();
}

#[test]
fn a_timeout_that_writes_everything_off_at_once_is_refused() {
    let text = error("[tuning]\ncompletion_timeout = \"0s\"\n");
    assert!(
        text.starts_with("laxityd.toml:2: tuning.completion_timeout"),
        "{text}"
    );
}

#[test]
fn how_many_windows_may_be_in_flight_is_set_for_all_nics_and_is_at_least_one() {
    let config = Config::parse("[tuning]\novercommit = 3\n", "x").unwrap();
    assert_eq!(config.link(&config.nic[0]).overcommit, 3);
    let default = Config::default();
    assert_eq!(default.link(&default.nic[0]).overcommit, 1);
    let text = error("[tuning]\novercommit = 0\n");
    assert!(
        text.starts_with("laxityd.toml:2: tuning.overcommit: must be at least 1"),
        "{text}"
    );
}

#[test]
fn a_core_that_this_host_does_not_have_is_warned_of() {
    let with = |cpu: usize| Config::parse(&format!("[scheduler]\ncpu = {cpu}\n"), "x").unwrap();
    assert_eq!(with(0).warnings(), Vec::<String>::new());
    let warned = with(100_000).warnings();
    assert!(
        warned.len() == 1 && warned[0].contains("scheduler.cpu") && warned[0].contains("100000"),
        "{warned:?}"
    );
}

#[test]
fn a_rate_without_its_unit_and_sockets_open_to_the_wrong_users_are_warned_of() {
    let warned = |text: &str| Config::parse(text, "x").unwrap().warnings();
    assert_eq!(
        warned("[access]\ncontrol_mode = \"0660\""),
        Vec::<String>::new()
    );
    for (text, key, way_out) in [
        (
            "[[nic]]\nname = \"a\"\nrate = 100",
            "nic.0.rate: ",
            "100Gbit",
        ),
        (
            "[access]\ncontrol_mode = \"0777\"",
            "access.control_mode: 0777",
            "0660",
        ),
        (
            "[access]\ncontrol_mode = \"0662\"",
            "access.control_mode: 0662",
            "0660",
        ),
        (
            "[access]\nanyone = true\nsocket_mode = \"0600\"",
            "access.socket_mode: 0600",
            "0666",
        ),
    ] {
        let warned = warned(text);
        assert!(
            warned.len() == 1 && warned[0].contains(key) && warned[0].contains(way_out),
            "{text}: {warned:?}"
        );
    }
}

#[test]
fn a_share_of_a_user_beyond_all_clients_is_refused() {
    for (share, is_right) in [(0, false), (1, true), (256, true), (257, false)] {
        let text = format!("[scheduler]\nclients_per_uid_max = {share}\n");
        let parsed = Config::parse(&text, "x").map_err(|error| error.to_string());
        assert_eq!(parsed.is_ok(), is_right, "{share}: {parsed:?}");
    }
}

#[test]
fn what_show_config_prints_has_every_key_those_without_a_value_as_comments() {
    let shown = Config::default().to_toml();
    for line in [
        "# slo_ttft = ",
        "# cpu = ",
        "# clients_per_uid_max = 128",
        "# chunk = 1048576",
        "# window = 4194304",
    ] {
        assert!(
            shown.lines().any(|l| l.starts_with(line)),
            "no `{line}` in\n{shown}"
        );
    }
    // Each stands where it could be switched on by taking the mark away.
    let on: String = shown
        .lines()
        .map(|line| line.strip_prefix("# ").unwrap_or(line).to_owned() + "\n")
        .collect();
    let config = Config::parse(&on, "x").unwrap_or_else(|error| panic!("{error}\n{on}"));
    assert!(config.slo_ttft.is_some() && config.scheduler.cpu.is_some());
    assert_eq!(
        config.nic[0].chunk_bytes(),
        Config::default().nic[0].chunk_bytes()
    );
    assert_eq!(config.nic[0].window.map(|w| w.0), Some(4 << 20));
    // What has a value is not shown twice.
    assert!(!config.to_toml().contains('#'), "{}", config.to_toml());
}

#[test]
fn the_sample_file_has_the_same_keys_as_show_config() {
    let keys = |text: &str| {
        let mut table = String::new();
        let mut keys = std::collections::BTreeSet::new();
        for line in text.lines() {
            let line = line.strip_prefix("# ").unwrap_or(line);
            if line.starts_with('[') {
                line.clone_into(&mut table);
            } else if let Some((key, _)) = line.split_once(" = ")
                && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
            {
                keys.insert(format!("{} {key}", table.split(' ').next().unwrap_or("")));
            }
        }
        keys
    };
    assert_eq!(
        keys(include_str!("../../../dist/laxityd.toml")),
        keys(&Config::default().to_toml())
    );
}

#[test]
fn a_stage_that_is_not_marked_by_message_has_the_dscp_of_its_levels() {
    let of = |text, collective| {
        let config = Config::parse(text, "x").unwrap();
        config.dscp_of_stages(Level(collective))
    };
    assert_eq!(of("", 2), [26, 34, 10, 8, 8]);
    // Levels that there are not, or that share the scavenger's DSCP, are the scavenger's.
    let shared = "[levels]\ncount = 4\nscavenger_dscp = 10\ndscp = [46, 20, 10, 10]\n";
    assert_eq!(of(shared, 2), [10, 20, 20, 10, 10]);
    assert_eq!(of("[levels]\ncount = 1\ndscp = [8]\n", 1), [8; 5]);
}
