//! Tests of `laxity run`: what the command gets, and the messages if something is wrong.
//!
//! Any shared library serves as liblaxity.so here, since `run` only preloads it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A folder with an empty library, and a `laxity run` that uses it and finds no daemon.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().expect("a folder") };
        place.build("library.c", "int laxity_nothing;", &["-shared", "-fPIC"], &place.library());
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn library(&self) -> PathBuf {
        self.path("liblaxity.so")
    }

    fn build(&self, source: &str, text: &str, flags: &[&str], out: &Path) {
        let source = self.path(source);
        fs::write(&source, text).expect("source written");
        let built = Command::new("cc").args(flags).arg("-o").args([out, &source]).status();
        assert!(built.expect("cc runs").success());
    }

    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
        for variable in [
            "LD_PRELOAD", "LAXITY_PROFILE", "LAXITY_PROFILE_DIR", "LAXITY_MODE", "LAXITY_NAME",
            "LAXITY_REPORT", "LAXITY_SLO_TTFT", "MC_IB_TC", "NCCL_IB_TC", "NCCL_GIN_IB_TC",
            "UCX_IB_TRAFFIC_CLASS",
        ] {
            command.env_remove(variable);
        }
        command
            .env("LAXITY_LIBRARY", self.library())
            .env("LAXITY_SOCKET", self.path("nobody.sock"))
            .stdin(Stdio::null())
            .arg("run")
            .args(arguments);
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.run(arguments).output().expect("laxity runs")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn value(environment: &Output, name: &str) -> Option<String> {
    let prefix = format!("{name}=");
    let text = text(&environment.stdout);
    text.lines().find_map(|line| line.strip_prefix(&prefix).map(str::to_owned))
}

#[test]
fn the_command_gets_the_library_and_the_options_as_variables() {
    let place = Place::new();
    let report = place.path("report.json");
    let line = "--profile nccl --slo-ttft 0.5s --mode observe --name job --socket relative.sock";
    let words: Vec<&str> = line.split(' ').collect();
    let rest = ["--report", report.to_str().unwrap(), "--", "env"];
    let seen = place.output(&[&words[..], &rest].concat());
    assert!(seen.status.success(), "{}", text(&seen.stderr));
    let library = place.library().display().to_string();
    assert_eq!(value(&seen, "LD_PRELOAD"), Some(library));
    assert_eq!(value(&seen, "LAXITY_PROFILE").as_deref(), Some("nccl"));
    assert_eq!(value(&seen, "LAXITY_SLO_TTFT").as_deref(), Some("500ms"));
    assert_eq!(value(&seen, "LAXITY_MODE").as_deref(), Some("observe"));
    assert_eq!(value(&seen, "LAXITY_NAME").as_deref(), Some("job"));
    assert_eq!(value(&seen, "LAXITY_REPORT"), Some(report.display().to_string()));
    let socket = std::env::current_dir().unwrap().join("relative.sock");
    assert_eq!(value(&seen, "LAXITY_SOCKET"), Some(socket.display().to_string()));
}

#[test]
fn jobs_of_mooncake_and_nixl_get_their_libraries_behind_the_other_where_there_are_some() {
    let place = Place::new();
    let library = place.library().display().to_string();
    let preloaded = |profile: &str| {
        let seen = place.output(&["--profile", profile, "--", "env"]);
        let said = text(&seen.stderr);
        assert!(seen.status.success(), "{said}");
        for name in ["liblaxity_mooncake.so", "liblaxity_nixl.so"] {
            let lacks = profile != "nccl" && !place.path(name).exists();
            let wants = lacks && (profile == "mooncake" || name == "liblaxity_nixl.so");
            assert_eq!(said.contains(&format!("{name} is not there")), wants, "{profile}: {said}");
        }
        value(&seen, "LD_PRELOAD")
    };
    assert_eq!(preloaded("mooncake").as_ref(), Some(&library));
    let second = place.path("liblaxity_mooncake.so");
    fs::copy(place.library(), &second).expect("copied");
    let both = format!("{library}:{}", second.display());
    assert_eq!(preloaded("mooncake"), Some(both.clone()));
    assert_eq!(preloaded("nixl").as_ref(), Some(&library));
    let third = place.path("liblaxity_nixl.so");
    fs::copy(place.library(), &third).expect("copied");
    assert_eq!(preloaded("mooncake"), Some(format!("{both}:{}", third.display())));
    let with_third = Some(format!("{library}:{}", third.display()));
    assert_eq!(preloaded("nixl"), with_third);
    assert_eq!(preloaded("dynamo"), with_third);
    assert_eq!(preloaded("nccl"), Some(library));
}

#[test]
fn without_options_only_the_profile_and_the_library_are_set_and_the_environment_stays() {
    let place = Place::new();
    let seen = place
        .run(&["env"])
        .env("LAXITY_MODE", "observe")
        .env("LAXITY_PROFILE_DIR", "/nowhere")
        .output()
        .unwrap();
    assert_eq!(value(&seen, "LAXITY_PROFILE").as_deref(), Some("default"));
    assert_eq!(value(&seen, "LAXITY_MODE").as_deref(), Some("observe"));
    assert_eq!(value(&seen, "LAXITY_PROFILE_DIR").as_deref(), Some("/nowhere"));
    for unset in ["LAXITY_SLO_TTFT", "LAXITY_NAME", "LAXITY_REPORT"] {
        assert_eq!(value(&seen, unset), None);
    }
}

#[test]
fn what_was_preloaded_before_stays_behind_the_library_in_its_order() {
    let place = Place::new();
    let (first, second) = (place.path("first.so"), place.path("second.so"));
    for other in [&first, &second] {
        fs::copy(place.library(), other).unwrap();
    }
    let before = format!("{} {}", first.display(), second.display());
    let seen = place.run(&["env"]).env("LD_PRELOAD", before).output().unwrap();
    let expected = [place.library(), first, second].map(|p| p.display().to_string());
    assert_eq!(value(&seen, "LD_PRELOAD"), Some(expected.join(":")));
    assert!(!text(&seen.stderr).contains("ld.so"), "{}", text(&seen.stderr));
}

#[test]
fn the_library_is_really_loaded_into_the_command() {
    let place = Place::new();
    let seen = place.output(&["cat", "/proc/self/maps"]);
    assert!(text(&seen.stdout).contains("liblaxity.so"));
}

#[test]
fn exit_codes_signals_and_the_process_id_are_those_of_the_command() {
    let place = Place::new();
    assert_eq!(place.output(&["--", "sh", "-c", "exit 42"]).status.code(), Some(42));
    let killed = place.output(&["--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(killed.status.signal(), Some(15));
    let child = place
        .run(&["sh", "-c", "echo $$"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let id = child.id();
    let printed = child.wait_with_output().unwrap().stdout;
    assert_eq!(text(&printed).trim(), id.to_string());
}

#[test]
fn options_behind_the_command_are_the_commands() {
    let place = Place::new();
    let seen = place.output(&["echo", "--profile", "nonsense", "-x", "--", "y"]);
    assert_eq!(text(&seen.stdout).trim(), "--profile nonsense -x -- y");
    let wrong = place.output(&["--profle", "nccl", "echo"]);
    assert_eq!(wrong.status.code(), Some(2), "a misspelt option is no command");
}

#[test]
fn without_a_daemon_the_command_runs_with_a_warning_unless_one_is_required() {
    let place = Place::new();
    let seen = place.output(&["echo", "ran"]);
    assert_eq!(text(&seen.stdout), "ran\n");
    let said = text(&seen.stderr);
    assert!(said.contains("warning") && said.contains("nobody.sock"), "{said}");
    assert!(said.contains("unscheduled"), "{said}");

    let refused = place.output(&["--require", "echo", "ran"]);
    assert_eq!(refused.status.code(), Some(125));
    assert_eq!(text(&refused.stdout), "");
    assert!(text(&refused.stderr).contains("--require"));

    let off = place.output(&["--mode", "off", "echo", "ran"]);
    assert_eq!(text(&off.stderr), "", "who schedules nothing needs no daemon");
}

#[test]
fn a_command_that_cannot_be_started_is_told_from_one_that_is_not_there() {
    let place = Place::new();
    let missing = place.output(&["no-such-command"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).contains("no such command"));

    let file = place.path("data");
    fs::write(&file, "data").unwrap();
    let data = place.output(&[file.to_str().unwrap()]);
    assert_eq!(data.status.code(), Some(126));
    assert!(text(&data.stderr).contains("chmod"));

    let script = place.path("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let script = place.output(&[script.to_str().unwrap()]);
    assert_eq!(script.status.code(), Some(127));
    assert!(text(&script.stderr).contains("interpreter"));
}

#[test]
fn mistakes_are_found_before_the_command_starts() {
    let place = Place::new();
    let broken = place.path("broken.toml");
    fs::write(&broken, "[stage]\nwrite = \"soon\"\n").unwrap();
    let broken = broken.display().to_string();
    let no_library = place.path("none.so").display().to_string();
    let no_folder = place.path("none/report").display().to_string();
    let long = "x".repeat(28);
    for (arguments, words) in [
        (["--profile", "monkcake"], "mooncake"),
        (["--profile", &broken], "line 2, `stage.write`"),
        (["--library", &no_library], "none.so is no file"),
        (["--library", "/etc/passwd"], "no shared library"),
        (["--report", &no_folder], "folder that exists"),
        (["--name", &long], "1 to 27 bytes"),
        (["--slo-ttft", "0s"], "zero"),
    ] {
        let refused = place.output(&[&arguments[..], &["echo", "ran"]].concat());
        assert_eq!(refused.status.code(), Some(125), "{arguments:?}");
        assert_eq!(text(&refused.stdout), "", "{arguments:?}");
        let said = text(&refused.stderr);
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    for arguments in [["--slo-ttft", "500"], ["--mode", "fast"]] {
        let refused = place.output(&[&arguments[..], &["echo"]].concat());
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}");
    }
    let refused = place.run(&["echo"]).env("LAXITY_MODE", "fast").output().unwrap();
    assert_eq!(refused.status.code(), Some(125));
    assert!(text(&refused.stderr).contains("off, observe or enforce"));
}

#[test]
fn a_profile_named_by_path_is_passed_on_as_an_absolute_one() {
    let place = Place::new();
    fs::write(place.path("mine.toml"), "").unwrap();
    let seen = place
        .run(&["--profile", "./mine.toml", "env"])
        .current_dir(place.folder.path())
        .output()
        .unwrap();
    let expected = place.path("mine.toml").display().to_string();
    assert_eq!(value(&seen, "LAXITY_PROFILE"), Some(expected));
}

#[test]
fn a_library_that_would_be_ignored_and_a_pinned_class_are_warned_of() {
    let place = Place::new();
    let fixed = place.path("fixed");
    place.build("fixed.c", "int main(void) { return 7; }", &["-static"], &fixed);
    let seen = place.output(&[fixed.to_str().unwrap()]);
    assert_eq!(seen.status.code(), Some(7), "it runs all the same");
    assert!(text(&seen.stderr).contains("linked statically"));

    let script = place.path("script");
    fs::write(&script, "#!/bin/sh\nexit 9\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let seen = place.output(&["--mode", "off", script.to_str().unwrap()]);
    assert_eq!((seen.status.code(), text(&seen.stderr).as_str()), (Some(9), ""));

    let pinned =
        place.run(&["--profile", "mooncake", "true"]).env("MC_IB_TC", "106").output().unwrap();
    assert!(text(&pinned.stderr).contains("MC_IB_TC=106 pins"));
}

#[test]
fn profiles_are_listed_and_shown() {
    let laxity = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
        command.arg("profiles").args(arguments).output().unwrap()
    };
    let list = text(&laxity(&[]).stdout);
    for name in ["default", "dynamo", "mooncake", "nccl", "nixl", "perftest", "ucx", "wide-ep"] {
        assert!(list.contains(name), "{list}");
    }
    assert!(text(&laxity(&["ucx"]).stdout).contains("default_traffic_class = 106"));
    assert_eq!(laxity(&["nonsense"]).status.code(), Some(1));
}

#[test]
fn the_profile_for_wide_expert_parallelism_sets_class_variables_that_are_unset() {
    let place = Place::new();
    let roce = ["--profile", "wide-ep", "--link", "roce", "--", "env"];
    let seen = place.run(&roce).env("NCCL_IB_TC", "106").output().unwrap();
    assert!(seen.status.success(), "{}", text(&seen.stderr));
    assert_eq!(value(&seen, "NCCL_IB_TC").as_deref(), Some("106"), "somebody chose it");
    assert_eq!(value(&seen, "NCCL_GIN_IB_TC").as_deref(), Some("136"));
    assert_eq!(value(&seen, "MC_IB_TC").as_deref(), Some("40"));
    assert_eq!(value(&seen, "NVSHMEM_IB_SL"), None);
    let said = text(&seen.stderr);
    let notice = said.lines().find(|line| line.contains("class variables set")).expect("a notice");
    assert!(notice.contains("1 kept") && notice.contains("a daemon without a configuration"));

    let verbose = place.output(&[&["--verbose"], &roce[..]].concat());
    assert!(text(&verbose.stderr).contains("136: NCCL_IB_TC NCCL_GIN_IB_TC"));
    let others = place.output(&["--profile", "nccl", "--link", "roce", "--", "env"]);
    assert_eq!(value(&others, "NCCL_GIN_IB_TC"), None, "only a profile that asks for it");
    let observed = place.output(&[&["--mode", "observe"], &roce[..]].concat());
    assert_eq!(value(&observed, "NCCL_GIN_IB_TC"), None, "observing marks nothing");
    let infiniband = ["--profile", "wide-ep", "--link", "infiniband"];
    let named = ["--service-level", "collective=1", "--", "env"];
    let seen = place.output(&[&infiniband[..], &named[..]].concat());
    assert_eq!(value(&seen, "NVSHMEM_IB_SL").as_deref(), Some("1"));
    assert_eq!(value(&seen, "NVSHMEM_IB_TRAFFIC_CLASS"), None, "it would break IBGDA");
}
