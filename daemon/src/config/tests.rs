//! Tests of reading, showing, overriding and reloading configurations, with their errors.

use laxity_policy::{Level, PolicyKind};
use laxity_quantity::Rate;
use laxity_shm::layout::LEVELS;

use super::*;

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
        granularity = "coflow"
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
fn what_is_wrong_is_shown_with_its_line_and_what_would_be_right() {
    let long = format!("socket = \"/run/{}\"\n", "x".repeat(103));
    let nics = "[[nic]]\nname = \"a\"\nrate = \"1Gbit\"\n\n[[nic]]\nname = \"b\"\nrate = \
                \"1Gbit\"\nchunk = \"2MiB\"\nwindow = \"1MiB\"\n";
    let levels = |more: &str| format!("[levels]\n{more}\n");
    for (text, place, words) in [
        ("[scheduler]\n\nspin = 3\n", "3: ", "spin = 3"),
        ("[scheduler]\nspin = 3\n", "2: ", "spin_us"),
        ("[scheduler]\nspin = 3\n", "2: ", "--check-config"),
        ("[[nic]]\nname = \"a\"\nrate = \"100 furlongs\"\n", "3: ", "Gbit"),
        (nics, "9: nic.1.window", "less than a chunk,"),
        (&long[..], "1: socket", "107"),
        (&levels("count = 4")[..], "1: levels.dscp: has 8 entries for 4", ""),
        (&levels("count = 1\ndscp = [46]")[..], "2: levels.count", ""),
        (&levels("count = 3\ndscp = [46, 10, 46]")[..], "3: levels.dscp", "P1 and P3"),
        (
            &levels("count = 3\nscavenger_dscp = 34\ndscp = [46, 34, 10]")[..],
            "3: levels.scavenger_dscp",
            "P2",
        ),
        ("mode = \"off\"\nmetrics = \"everywhere\"\n", "2: metrics", ""),
        ("policy = \"fastest\"\n", "1: ", "two_class"),
        ("mode = \"off\"\n[nic\n", "2: ", ""),
        ("[tuning]\ncompletion_timeout = \"0s\"\n", "2: tuning.completion_timeout", ""),
        ("[tuning]\novercommit = 0\n", "2: tuning.overcommit: must be at least 1", ""),
        ("[scheduler]\nclients_per_uid_max = 0\n", "2: scheduler.clients_per_uid_max", ""),
        ("[scheduler]\nclients_per_uid_max = 257\n", "2: scheduler.clients_per_uid_max", ""),
        ("log = \"inof\"\n", "1: log: ", "inof"),
        ("log = \"info,wran\"\n", "1: log: ", "wran"),
        ("log = \"laxity_daemon::driver\"\n", "1: log: ", "warn, info"),
        ("log = \"\"\n", "1: log: ", "warn, info"),
        ("log = \"laxity_daemon=inof\"\n", "1: log: ", "inof"),
    ] {
        let shown = Config::parse(text, "laxityd.toml").unwrap_err().to_string();
        let start = format!("laxityd.toml:{place}");
        assert!(shown.starts_with(&start) && shown.contains(words), "{shown}");
    }
    for right in [
        "log = \"off\"",
        "log = \"WARN\"",
        "log = \"info,laxity_daemon::driver=debug\"",
        "log = \"laxity_daemon[x]=trace\"",
        "[scheduler]\nclients_per_uid_max = 1",
        "[scheduler]\nclients_per_uid_max = 256",
        "[levels]\ncount = 4\nscavenger_dscp = 10\ndscp = [46, 10, 10, 10]",
        "[levels]\ncount = 2\ndscp = [0, 0]\nscavenger_dscp = 0",
    ] {
        Config::parse(right, "x").unwrap();
    }
}

#[test]
fn assignments_override_single_keys_and_name_themselves_when_wrong() {
    let set = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
        Config::default().with_assignments(&sets)
    };
    let config =
        set(&["scheduler.spin_us=0", "nic.0.rate=25Gbit", "policy=mfs", "slo_ttft=1s"]).unwrap();
    assert_eq!(config.scheduler.spin_us, 0);
    assert_eq!(config.nic[0].rate.bytes_per_s, 3_125_000_000);
    assert_eq!(config.policy, PolicyKind::Mfs);
    assert_eq!(config.slo_ttft, Some(Nanos(1_000_000_000)));
    for bad in ["spin", "scheduler.spin=1", "nic.7.rate=1Gbit", "mode.x=1", "mode=fast"] {
        let text = set(&[bad]).unwrap_err().to_string();
        assert!(text.starts_with(&format!("--set {bad}: ")), "{text}");
    }
}

#[test]
fn a_reload_takes_what_can_change_and_names_what_cannot() {
    let running = Config::default();
    let mut file = running.clone();
    file.policy = PolicyKind::TwoClass;
    file.nic[0].rate = Rate(1000).into();
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
fn what_will_not_do_what_it_says_is_warned_of() {
    let warned = |text: &str| Config::parse(text, "x").unwrap().warnings();
    assert_eq!(warned("[access]\ncontrol_mode = \"0660\""), Vec::<String>::new());
    assert_eq!(warned("[scheduler]\ncpu = 0"), Vec::<String>::new());
    for (text, key, way_out) in [
        ("[tuning]\nmlu = \"per_flow\"", "tuning.mlu", "remove it"),
        ("[coordinator]\nfetch_wait_max = \"250ms\"", "coordinator.fetch_wait_max", "remove it"),
        ("[scheduler]\ncpu = 100000", "scheduler.cpu", "100000"),
        ("[[nic]]\nname = \"a\"\nrate = 100", "nic.0.rate: ", "100Gbit"),
        ("[access]\ncontrol_mode = \"0777\"", "access.control_mode: 0777", "0660"),
        ("[access]\ncontrol_mode = \"0662\"", "access.control_mode: 0662", "0660"),
        ("[access]\nanyone = true\nsocket_mode = \"0600\"", "access.socket_mode: 0600", "0666"),
    ] {
        let warned = warned(text);
        assert!(
            warned.len() == 1 && warned[0].contains(key) && warned[0].contains(way_out),
            "{text}: {warned:?}"
        );
    }
}

#[test]
fn what_show_config_prints_has_every_key_those_without_a_value_as_comments() {
    let shown = Config::default().to_toml();
    for line in [
        "# slo_ttft = ", "# cpu = ", "# clients_per_uid_max = 128", "# chunk = \"1MiB\"",
        "# window = \"4MiB\"", "# addresses = [\"10.0.0.7\"]",
    ] {
        assert!(shown.lines().any(|l| l.starts_with(line)), "no `{line}` in\n{shown}");
    }
    // Each comment has to be valid TOML once its `#` is removed.
    let on: String = shown
        .lines()
        .map(|line| line.strip_prefix("# ").unwrap_or(line).to_owned() + "\n")
        .collect();
    let config = Config::parse(&on, "x").unwrap_or_else(|error| panic!("{error}\n{on}"));
    assert!(config.slo_ttft.is_some() && config.scheduler.cpu.is_some());
    assert_eq!(config.nic[0].chunk_bytes(), Config::default().nic[0].chunk_bytes());
    assert_eq!(config.nic[0].window.map(|w| w.0), Some(4 << 20));
    // A key with a value has no comment.
    assert!(!config.to_toml().contains('#'), "{}", config.to_toml());
}

#[test]
fn the_sample_file_has_the_keys_of_show_config_with_their_defaults() {
    let sample = include_str!("../../../dist/laxityd.toml");
    assert_eq!(Config::parse(sample, "sample").unwrap(), Config::default());
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
    assert_eq!(keys(sample), keys(&Config::default().to_toml()));
}

#[test]
fn a_stage_that_is_not_marked_by_message_has_the_dscp_of_its_levels() {
    let of = |text, collective| {
        let config = Config::parse(text, "x").unwrap();
        config.dscp_of_stages(Level(collective))
    };
    assert_eq!(of("", 2), [26, 34, 10, 8, 8]);
    // Levels that do not exist or share the scavenger's DSCP count as the scavenger.
    let shared = "[levels]\ncount = 4\nscavenger_dscp = 10\ndscp = [46, 20, 10, 10]\n";
    assert_eq!(of(shared, 2), [10, 20, 20, 10, 10]);
}

#[test]
fn service_levels_are_set_only_where_the_operator_names_one_for_each_level() {
    let of = |text: &str| Config::parse(text, "x").map(|config| config.sl_of_stages(Level(2)));
    assert_eq!(of("").unwrap(), None);
    let named = "[levels]\nsl = [5, 4, 3, 2, 2, 1, 1, 0]\n";
    assert_eq!(of(named).unwrap(), Some([3, 4, 0, 0, 0]));
    assert_eq!(of(&format!("marking = \"off\"\n{named}")).unwrap(), None);
    for (text, expected) in [("sl = [1, 2]", "one per level"), ("sl = [16]", "one per level")] {
        let wrong = of(&format!("[levels]\n{text}\n")).unwrap_err().to_string();
        assert!(wrong.contains("levels.sl") && wrong.contains(expected), "{wrong}");
    }
    let wrong = of("[levels]\nsl = [16, 4, 3, 2, 2, 1, 1, 0]\n").unwrap_err().to_string();
    assert!(wrong.contains("levels.sl") && wrong.contains("15"), "{wrong}");
}

#[test]
fn a_region_lists_the_dscp_of_the_scavenger_first_and_then_those_of_the_levels() {
    let config = Config::parse("[levels]\ncount = 3\ndscp = [46, 34, 10]\n", "x").unwrap();
    assert_eq!(config.dscp_of_region()[..5], [8, 46, 34, 10, 8]);
}

#[test]
fn classes_are_preserved_by_default_and_without_marking_every_dscp_is_none() {
    assert_eq!(Config::parse("", "x").unwrap().marking, Marking::Preserve);
    let levels = Config::parse("marking = \"levels\"\n", "x").unwrap();
    assert_eq!((levels.marking, levels.dscp_of_region()[2]), (Marking::Levels, 34));
    let off = Config::parse("marking = \"off\"\n", "x").unwrap();
    assert_eq!((off.dscp_of_region(), off.dscp_of_stages(Level(2))), ([0; LEVELS], [0; 5]));
    let wrong = Config::parse("marking = \"keep\"\n", "x").unwrap_err().to_string();
    assert!(wrong.contains("preserve") && wrong.contains("x:1:"), "{wrong}");
}
