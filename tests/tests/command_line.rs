//! Tests of the command `laxity` with and without a real daemon.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use laxity_client::{Client, Flow, Options, Stage};
use nix::sys::stat::Mode;

use crate::process::{Daemon, Said, binary, laxity, wait_bounded};

#[test]
fn status_and_bypass_speak_to_the_daemon_of_the_named_socket() {
    let (_folder, daemon) = Daemon::alone("");
    let control = daemon.control().display().to_string();

    let page = laxity(&["status", "--control", &control]).good().stdout;
    assert!(page.contains("policy laxity") && page.contains("enforce"), "{page}");
    assert!(page.contains("No client is attached."), "{page}");

    let status = laxity(&["status", "--json", "--control", &control]).json();
    assert_eq!(status["pid"].as_u64(), Some(u64::from(daemon.pid())));
    assert_eq!(status["bypass"].as_bool(), Some(false));
    assert!(status["processes"].is_array(), "the map of what flows: {status}");
    let nic = status["ports"][0]["name"].as_str().expect("a NIC");
    let levels = laxity(&["status", "--nic", nic, "--control", &control]).good().stdout;
    assert!(levels.contains(&format!("{nic} ingress")) && levels.contains("scavenger"), "{levels}");

    laxity(&["bypass", "on", "--control", &control]).good();
    assert!(daemon.status().bypass);
    let page = laxity(&["status", "--control", &control]).stdout;
    assert!(page.lines().next().unwrap().contains("BYPASSED"), "{page}");

    laxity(&["bypass", "off", "--control", &control]).good();
    assert!(!daemon.status().bypass);
}

#[test]
fn what_an_operator_does_with_a_host_works_with_a_real_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let levels = "[levels]\ndscp = [46, 46, 26, 26, 26, 10, 10, 10]\nscavenger_dscp = 10\n";
    let nic = "[[nic]]\nname = \"lo\"\nrate = \"1Gbit\"\n";
    let daemon = Daemon::start(folder.path(), &format!("mode = \"observe\"\n{levels}{nic}"));
    let control = daemon.control().display().to_string();
    let ask = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().collect();
        laxity(&[&words[..], &["--control", &control]].concat())
    };
    let options = Options { socket: daemon.socket(), name: "job".into(), ..Options::default() };
    let client = Client::attach(options);
    let mut lane = client.lane();
    let ticket = lane.submit(&Flow { stage: Stage::P2d, bytes: 1000, ..Flow::default() });
    lane.complete(&ticket, 1000);
    let report = ask("observe report --minutes 1").good().stdout;
    assert!(report.contains("0 of 1 flows would have waited"), "{report}");
    assert!(ask("enforce on").good().stdout.contains("the mode is enforce until"));
    ask("reload").good();
    assert_eq!(daemon.status().mode, "enforce");
    let page = ask("top --once").good().stdout;
    assert!(page.contains("enforce") && page.contains("1 jobs"), "{page}");
    // The queues are those of the levels in force, and not of the default ones.
    let queues = ask("switch-config --vendor generic --queues 4").good().stdout;
    assert!(queues.contains("dscp 10  # P6 P7 P8 scavenger"), "{queues}");
    let verified = ask("verify --seconds 1 --json").good().json();
    assert_eq!(verified["nics"][0]["nic"].as_str(), Some("lo"), "{verified}");
    let bundle = folder.path().join("bundle.tar.gz");
    let config = daemon.config().display().to_string();
    ask(&format!("support-bundle --output {} --config {config}", bundle.display())).good();
    let listed = Said::of(Command::new("tar").arg("-tzf").arg(&bundle)).good().stdout;
    for part in ["manifest.json", "status", "doctor", "verify"] {
        assert!(listed.contains(part), "{part} is not in: {listed}");
    }
}

#[test]
fn the_example_job_ends_well_only_if_a_daemon_scheduled_every_byte() {
    let (folder, daemon) = Daemon::alone("");
    let job = |socket: &Path| {
        let mut command = Command::new(binary("laxity"));
        command.args(["example-job", "--seconds", "1"]).env("LAXITY_SOCKET", socket);
        Said::of(&mut command)
    };
    let said = job(&daemon.socket()).good().stdout;
    assert!(said.contains(" 0 B unscheduled"), "{said}");
    let unscheduled = job(&folder.path().join("nobody.sock"));
    assert_eq!(unscheduled.status.code(), Some(1), "{}", unscheduled.all());
    assert!(unscheduled.stdout.contains("There is no daemon"), "{}", unscheduled.all());
}

/// Returns a command for `laxity` in a folder without the laboratory, with this `PATH`.
fn alone(folder: &Path, path: &str) -> Command {
    let copy = folder.join("laxity");
    if !copy.exists() {
        std::fs::copy(binary("laxity"), &copy).expect("a copy of laxity");
    }
    let mut command = Command::new(copy);
    command.env("PATH", path);
    command
}

#[test]
fn a_command_of_the_laboratory_is_started_or_it_is_said_what_to_install() {
    let folder = tempfile::tempdir().unwrap();
    for words in [&["lab", "run"][..], &["sim", "plans"], &["cluster", "load"]] {
        let output = Said::of(alone(folder.path(), "").args(words));
        let said = &output.stderr;
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("make install-lab"), "{said}");
    }
    let output = Said::of(alone(folder.path(), "").arg("stauts"));
    assert_eq!(output.status.code(), Some(2), "as for other wrong arguments");
    let said = &output.stderr;
    assert!(said.contains("'stauts'") && said.contains("'status'"), "{said}");

    // The found program replaces this one: arguments, output and exit code are its own.
    let path = folder.path().join("path");
    std::fs::create_dir(&path).unwrap();
    let script = "#!/bin/sh\necho \"$@\"\nexit 7\n";
    for name in ["laxity-lab", "laxity-other"] {
        let program = path.join(name);
        std::fs::write(&program, script).unwrap();
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, all).unwrap();
    }
    let path = path.to_str().unwrap();
    for (words, passed) in [
        (&["sim", "run", "--seed", "3"][..], "sim run --seed 3"),
        (&["cluster", "load", "--help"], "cluster-load --help"),
        (&["other", "-v"], "-v"),
    ] {
        let output = Said::of(alone(folder.path(), path).args(words));
        assert_eq!(output.stdout.trim(), passed);
        assert_eq!(output.status.code(), Some(7));
    }
}

#[test]
fn without_a_daemon_the_error_names_the_socket_and_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("nobody.sock").display().to_string();
    let refused = laxity(&["status", "--control", &control]);
    assert_eq!(refused.status.code(), Some(1));
    let message = refused.stderr;
    assert!(message.contains(&control) && message.contains("is it running"), "{message}");
    assert_eq!(message.matches("os error 2").count(), 1, "{message}");
}

#[test]
fn an_unknown_policy_of_the_lab_is_answered_with_the_known_ones() {
    let wrong = laxity(&["lab", "run", "--policies", "none,foo"]);
    assert_eq!(wrong.status.code(), Some(1));
    let message = wrong.stderr;
    assert!(
        message.starts_with("laxity: policies: unknown policy `foo`; known are")
            && message.contains("two_class"),
        "{message}"
    );
}

#[test]
fn completions_and_manual_pages_cover_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("man");
    for (program, commands) in [("laxity", ["bypass", "sim"]), ("laxity-lab", ["verbs", "certs"])] {
        let run = |arguments: &[&str]| {
            Said::of(Command::new(binary(program)).args(arguments)).good().stdout
        };
        for shell in ["bash", "zsh", "fish"] {
            let script = run(&["completions", shell]);
            for command in commands {
                assert!(script.contains(command), "{program} {shell}: {command}");
            }
        }
        run(&["man", "--out", out.to_str().unwrap()]);
    }
    for page in [
        "laxity.1", "laxity-status.1", "laxity-bypass.1", "laxity-lab.1", "laxity-certs.1",
        "laxity-lab-run.1", "laxity-cluster-load.1",
    ] {
        assert!(out.join(page).exists(), "{page} is missing");
    }
    assert!(laxity(&["man"]).stdout.contains(".TH laxity"));
}

#[test]
fn a_wrong_argument_is_answered_with_usage_and_exit_code_two() {
    let wrong = laxity(&["bypass", "perhaps"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(wrong.stderr.contains("on, off"), "{}", wrong.stderr);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for arguments in [&["lab", "run", "--show-config"][..], &["completions", "bash"], &["man"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(binary("laxity"));
        let output = Said::of(command.args(arguments).stdout(writer));
        let said = &output.stderr;
        assert!(output.status.success() && said.is_empty(), "{said}");
    }
}

#[test]
fn a_lab_that_fails_leaves_the_last_report_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (json, html) = (folder.path().join("old.json"), folder.path().join("new.html"));
    std::fs::write(&json, "precious").unwrap();
    let run = |json: &std::path::Path| {
        let mut command = Command::new(binary("laxity"));
        command.args(["lab", "run", "--laxityd", "/nonexistent", "--json"]);
        let output = Said::of(command.arg(json).arg("--html").arg(&html));
        assert_eq!(output.status.code(), Some(1));
        output.stderr
    };
    let said = run(&json);
    assert!(said.contains("/nonexistent"), "{said}");
    assert_eq!(std::fs::read_to_string(&json).unwrap(), "precious");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    // A file that cannot be written is an error before anything runs.
    let said = run(&folder.path().join("none/new.json"));
    assert!(said.contains("cannot write") && said.contains("new.json"), "{said}");
    let said = run(folder.path());
    assert!(said.contains("cannot write"), "{said}");
}

#[test]
fn the_labs_configuration_shows_every_key_those_without_a_value_as_comments() {
    let shown = laxity(&["lab", "run", "--show-config"]).stdout;
    for key in ["requests_per_second", "kill_daemon_at", "laxityd"] {
        assert!(shown.contains(&format!("\n# {key} = ")), "{key} in {shown}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lab.toml");
    // One of the keys needs a coordinator.
    let on = shown.replace("\n# ", "\n").replace("\ncoordinator = false", "\ncoordinator = true");
    std::fs::write(&file, &on).unwrap();
    let file = file.to_str().unwrap();
    let again = laxity(&["lab", "run", "--show-config", "--config", file]);
    let again = again.good().stdout;
    assert!(again.contains("\nkill_daemon_at = ") && !again.contains("# "), "{again}");
}

#[test]
fn a_file_that_never_ends_or_never_begins_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let fifo = fifo.to_str().unwrap();
    let library = binary("liblaxity.so").display().to_string();
    for (arguments, complaint) in [
        (&["lab", "run", "--config", fifo][..], "a FIFO"),
        (&["lab", "run", "--config", "/dev/zero"], "a device"),
        (&["run", "--library", &library, "--profile", fifo, "--", "true"], "a FIFO"),
        (&["run", "--library", fifo, "--", "true"], "is no file"),
        (&["run", "--library", &library, "--", fifo], "not executable"),
    ] {
        let log = folder.path().join("log");
        let child = Command::new(binary("laxity"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .expect("laxity runs");
        let (status, _) = wait_bounded(child);
        let said = std::fs::read_to_string(&log).unwrap();
        assert!(!status.success(), "{arguments:?}");
        assert!(said.contains(complaint), "{arguments:?}: {said}");
    }
}
