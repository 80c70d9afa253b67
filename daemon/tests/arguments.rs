//! Tests of the program's output for valid and invalid arguments.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

use std::process::{Command, Output};

use laxity_trial::certs;

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
    assert!(text.contains("policy = \"mfs\"") && text.contains("socket = \"x.sock\""), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shown.toml");
    std::fs::write(&file, text).unwrap();
    let checked = laxityd(&["--config", file.to_str().unwrap(), "--check-config"]);
    assert!(checked.status.success());
}

#[test]
fn the_environment_gives_the_address_of_metrics_below_the_command_line() {
    let shown = |address: &str, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_laxityd"));
        let command = command.arg("--show-config").args(arguments).env("LAXITY_METRICS", address);
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        text.lines().find(|line| line.starts_with("metrics = ")).map(str::to_owned)
    };
    let expected = |address: &str| Some(format!("metrics = \"{address}\""));
    assert_eq!(shown("192.0.2.1:7475", &[]), expected("192.0.2.1:7475"));
    let option = ["--metrics", "127.0.0.1:1"];
    assert_eq!(shown("192.0.2.1:7475", &option), expected("127.0.0.1:1"));
    assert_eq!(shown("", &[]), expected("127.0.0.1:7475"));
}

#[test]
fn a_wrong_file_is_named_with_its_line_and_the_exit_code_is_not_zero() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("laxityd.toml");
    std::fs::write(&file, "mode = \"enforce\"\n\n[[nic]]\nname = \"a\"\nrate = \"fast\"\n")
        .unwrap();
    let checked = laxityd(&["--config", file.to_str().unwrap(), "--check-config"]);
    assert_eq!(checked.status.code(), Some(1));
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(said.contains("laxityd.toml:5") && said.contains("`fast`"), "{said}");
}

#[test]
fn the_sample_configuration_is_the_defaults() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/laxityd.toml");
    let from_sample = laxityd(&["--config", sample, "--show-config"]);
    assert!(from_sample.status.success(), "{}", String::from_utf8_lossy(&from_sample.stderr));
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

/// Returns whether `--check-config` accepts a `[coordinator]` section with `PLACE` in it, and its
/// output.
fn check_coordinator(section: &str, more: &[&str]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let subjects = [
        certs::Subject::Daemon("a".into()),
        certs::Subject::Daemon("b".into()),
        certs::Subject::Viewer("v".into()),
        certs::Subject::Coordinator(vec!["c".into()]),
    ];
    certs::make(folder.path(), &subjects, 1).unwrap();
    let theirs = folder.path().join("theirs");
    certs::make(&theirs, &subjects[..1], 1).unwrap();
    std::fs::write(folder.path().join("broken"), "nonsense").unwrap();
    let file = folder.path().join("laxityd.toml");
    let place = folder.path().display().to_string();
    // A rate that the kernel may not know is warned of.
    let nic = "[[nic]]\nname = \"eth0\"\nrate = \"1Gbit\"\n";
    let section = section.replace("PLACE", &place);
    std::fs::write(&file, format!("[coordinator]\n{section}{nic}")).unwrap();
    let more: Vec<String> = more.iter().map(|it| it.replace("PLACE", &place)).collect();
    let mut arguments = vec!["--check-config", "--config", file.to_str().unwrap()];
    arguments.extend(more.iter().map(String::as_str));
    let checked = laxityd(&arguments);
    let said = String::from_utf8(checked.stderr).unwrap();
    (checked.status.success(), said)
}

#[test]
fn in_the_clear_to_another_host_only_if_asked_for_and_loudly() {
    let (accepted, said) = check_coordinator("endpoint = \"http://10.0.0.1:7471\"\n", &[]);
    assert!(!accepted, "{said}");
    assert!(
        said.contains("laxityd.toml:2: coordinator.endpoint: 10.0.0.1 is another host")
            && said.contains("insecure = true"),
        "{said}"
    );
    let asked = "endpoint = \"http://10.0.0.1:7471\"\ninsecure = true\n";
    let (accepted, said) = check_coordinator(asked, &[]);
    assert!(accepted && said.contains("WITHOUT TLS"), "{said}");
    let (accepted, said) = check_coordinator("endpoint = \"http://127.0.0.1:7471\"\n", &[]);
    assert!(accepted && said.is_empty(), "{said}");
}

#[test]
fn certificates_that_cannot_be_used_are_named_with_their_line_and_setting() {
    let head = "endpoint = \"https://10.0.0.1:7471\"\nca = \"PLACE/ca.crt\"\n";
    let shown = |stem: &str| {
        format!("cert = \"PLACE/{stem}.crt\"\nkey = \"PLACE/{stem}.key\"\nhost = \"a\"\n")
    };
    let own = shown("daemon-a");
    let (accepted, said) = check_coordinator(&format!("{head}{own}"), &[]);
    assert!(accepted && said.is_empty(), "{said}");
    let (accepted, said) = check_coordinator(head, &[]);
    assert!(accepted && said.contains("coordinator.cert: there is none"), "{said}");
    let endpoint = "endpoint = \"https://10.0.0.1:7471\"\n";
    for (lines, words) in [
        (endpoint.to_owned(), [":2: coordinator.endpoint", "needs coordinator.ca"]),
        (
            format!("{head}cert = \"PLACE/daemon-a.crt\"\n"),
            [":4: coordinator.cert", "coordinator.key, too"],
        ),
        (format!("{head}{own}server_name = \"a b\"\n"), [":7: coordinator.server_name", "`a b`"]),
        (
            format!("{endpoint}ca = \"PLACE/gone\"\n{own}"),
            [":3: coordinator.ca", "gone: cannot be read: No such file"],
        ),
        (format!("{endpoint}ca = \"PLACE\"\n{own}"), [":3: coordinator.ca", "it is a folder"]),
        (
            format!("{endpoint}ca = \"PLACE/broken\"\n{own}"),
            [":3: coordinator.ca", "holds no certificate"],
        ),
        (
            format!("{head}cert = \"PLACE/daemon-a.key\"\nkey = \"PLACE/daemon-a.key\"\n"),
            [":4: coordinator.cert", "holds no certificate"],
        ),
        (
            format!("{head}cert = \"PLACE/daemon-a.crt\"\nkey = \"PLACE/broken\"\n"),
            [":5: coordinator.key", "no private key"],
        ),
        (
            format!("{head}cert = \"PLACE/daemon-a.crt\"\nkey = \"PLACE/daemon-b.key\"\n"),
            [":5: coordinator.key", "belong together"],
        ),
        (
            format!("{head}{}", shown("daemon-b")),
            [":4: coordinator.cert", "only laxity://daemon/b"],
        ),
        (
            format!("{head}{}", shown("viewer-v")),
            [":4: coordinator.cert", "this host needs laxity://daemon/a"],
        ),
        (format!("{head}{}", shown("coordinator-c")), [":4: coordinator.cert", "lacks clientAuth"]),
        (
            format!("{head}{}", shown("ca")),
            [":4: coordinator.cert", "certificate of an authority (CA)"],
        ),
        (
            format!("{head}{}", shown("theirs/daemon-a")),
            [":4: coordinator.cert", "not in coordinator.ca"],
        ),
        (
            format!("{endpoint}ca = \"PLACE/daemon-a.crt\"\n{own}"),
            [":3: coordinator.ca", "no certificate of an authority"],
        ),
        (
            format!("endpoint = \"http://127.0.0.1:1\"\nca = \"PLACE/ca.crt\"\n{own}"),
            [":2: coordinator.endpoint", "http:// is without TLS"],
        ),
    ] {
        let (accepted, said) = check_coordinator(&lines, &[]);
        assert!(!accepted, "{lines}");
        for word in words {
            assert!(said.contains(word), "{word}: {said}\n{lines}");
        }
    }
    let set = "coordinator.key=PLACE/daemon-b.key";
    let (accepted, said) = check_coordinator(&format!("{head}{own}"), &["--set", set]);
    assert!(!accepted && said.contains("--set coordinator.key="), "{said}");
}
