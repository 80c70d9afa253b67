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
fn a_level_that_is_none_is_refused_from_the_environment_too() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxityd"));
    let refused = command.arg("--check-config").env("LAXITY_LOG", "wran").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("`wran` is not a level"), "{said}");
}

#[test]
fn manual_pages_and_completions_name_flags_and_keys() {
    let text = |arguments: &[&str]| String::from_utf8(laxityd(arguments).stdout).unwrap();
    let program = text(&["--manual", "laxityd.8"]);
    assert!(program.contains("check\\-config") && !program.contains("manual"), "{program}");
    let configuration = text(&["--manual", "laxityd.toml.5"]);
    assert!(configuration.contains("completion_timeout"), "{configuration}");
    assert!(text(&["--completions", "fish"]).contains("show-config"));
}

/// Returns whether `--check-config` accepts a `[coordinator]` section with `PLACE` in it, and its
/// output.
fn check_coordinator(section: &str, more: &[&str]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let subjects = ["a", "b"].map(|host| certs::Subject::Daemon(host.into()));
    certs::make(folder.path(), &subjects, 1).unwrap();
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
    let pair = |cert: &str, key: &str| {
        format!("cert = \"PLACE/{cert}.crt\"\nkey = \"PLACE/{key}.key\"\nhost = \"a\"\n")
    };
    let own = pair("daemon-a", "daemon-a");
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
            format!("{endpoint}ca = \"PLACE/broken\"\n{own}"),
            [":3: coordinator.ca", "holds no certificate"],
        ),
        (
            format!("{head}{}", pair("daemon-b", "daemon-b")),
            [":4: coordinator.cert", "only laxity://daemon/b"],
        ),
        (
            format!("{head}{}", pair("daemon-a", "daemon-b")),
            [":5: coordinator.key", "belong together"],
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
