//! Tests of the files' meaning, their search, and the messages about mistakes.

use std::fs;
use std::time::Duration;

use laxity_shm::layout::Mode;
use laxity_shm::record::Stage;

use super::*;
use crate::locate::{BUILTIN, Folders};

fn error(text: &str) -> String {
    let origin = Origin::File("p.toml".into());
    Profile::parse("p", origin, text).unwrap_err().to_string()
}

fn builtin() -> Vec<Profile> {
    let parsed = |(name, text): &(&str, &str)| Profile::parse(name, Origin::Builtin, text).unwrap();
    BUILTIN.iter().map(parsed).collect()
}

#[test]
fn every_builtin_profile_parses_and_describes_itself() {
    let profiles = builtin();
    let names: Vec<&str> = profiles.iter().map(|p| p.name.as_str()).collect();
    let expected = ["default", "dynamo", "mooncake", "nccl", "nixl", "perftest", "ucx", "wide-ep"];
    assert_eq!(names, expected);
    assert_eq!(profiles.len(), BUILTIN.len());
    assert!(profiles.iter().all(|p| !p.description.is_empty()));
}

#[test]
fn the_file_of_the_default_profile_says_what_the_code_says() {
    let builtin = builtin().swap_remove(0);
    let code = Profile { description: builtin.description.clone(), ..Profile::default() };
    assert_eq!(builtin, code);
    let empty = Profile::parse("default", Origin::Builtin, "").unwrap();
    assert_eq!((empty.stage, empty.qp), (code.stage, code.qp));
}

#[test]
fn profiles_classify_as_documented() {
    let profiles = builtin();
    let profile = |name: &str| profiles.iter().find(|p| p.name == name).unwrap();
    assert_eq!(profile("mooncake").stage.write, Stage::P2d);
    assert_eq!(profile("mooncake").stage.read, Stage::KvReuse);
    assert_eq!(profile("mooncake").qp.pin_variables, ["MC_IB_TC"]);
    let nccl = profile("nccl");
    let all = [nccl.stage.write, nccl.stage.read, nccl.stage.send, nccl.stage.atomic];
    assert_eq!(all, [Stage::Collective; 4]);
    assert_eq!(nccl.qp.stage, Stage::Collective);
    assert_eq!(profile("dynamo").stage.read, Stage::P2d);
    assert_eq!(profile("nixl").stage.read, Stage::KvReuse);
    assert_eq!(profile("ucx").qp.default_traffic_class, 106);
    assert_eq!(profile("perftest").stage.send, Stage::Collective);
    let sets_classes = profiles.iter().filter(|profile| profile.class_variables);
    assert_eq!(sets_classes.map(|p| p.name.as_str()).collect::<Vec<_>>(), ["wide-ep"]);
    assert_eq!(profile("wide-ep").stage.atomic, Stage::Collective);
}

#[test]
fn a_class_is_a_pin_if_the_library_would_not_have_set_it_or_a_variable_asks_for_it() {
    let ucx = Profile::load("ucx").unwrap().qp;
    assert!(!ucx.is_pin(106, |_| false));
    assert!(ucx.is_pin(0, |_| false), "somebody took the default away");
    assert!(ucx.is_pin(106, |name| name == "UCX_IB_TRAFFIC_CLASS"));
    assert!(!ucx.is_pin(106, |name| name == "NCCL_IB_TC"));
}

#[test]
fn everything_that_may_stand_in_a_file_is_read() {
    let text = r#"
description = "mine"
slo_ttft = "1.5s"
mode = "observe"
[stage]
write = "weights"
[qp]
stage = "collective"
default_traffic_class = 255
pin_variables = []
"#;
    let profile = Profile::parse("p", Origin::Builtin, text).unwrap();
    assert_eq!(profile.slo_ttft, Some(Duration::from_millis(1500)));
    assert_eq!(profile.mode, Some(Mode::Observe));
    assert_eq!(profile.stage.write, Stage::Weights);
    assert_eq!(profile.stage.read, Stage::KvReuse, "left out, so as in default");
    assert_eq!(profile.qp.default_traffic_class, 255);
    assert!(profile.qp.pin_variables.is_empty());
}

#[test]
fn a_mistake_is_named_by_file_line_and_key_with_what_to_write() {
    let said = error("[stage]\nread = \"kv_reuse\"\nwrite = \"p3d\"\n");
    assert_eq!(
        said,
        "p.toml, line 3, `stage.write`: no stage is called `p3d`; write kv_reuse, collective, p2d, \
         weights, background"
    );
    let said = error("# comment\nslo_ttft = \"500\"\n");
    assert!(said.starts_with("p.toml, line 2, `slo_ttft`:"), "{said}");
    assert!(said.contains("ms"), "{said}");
    let said = error("[qp]\ndefault_traffic_class = 256");
    assert!(said.starts_with("p.toml, line 2, `qp.default_traffic_class`:"), "{said}");
    assert!(said.contains("0 to 255"), "{said}");
    let said = error("[qp]\nstages = \"p2d\"\n");
    assert!(said.starts_with("p.toml, line 2, `qp.stages`: unknown field"), "{said}");
    assert!(said.contains("default_traffic_class"), "{said}");
    let said = error("mode = \"on\"");
    assert!(said.contains("off, observe or enforce"), "{said}");
    let said = error("slo_ttft = \"0ms\"");
    assert!(said.contains("leave it out"), "{said}");
    let said = error("[qp]\npin_variables = [\"A=1\"]\n");
    assert!(said.contains("the name alone"), "{said}");
    let said = error("description = \"no end\n[stage]\n");
    assert!(said.starts_with("p.toml, line 1"), "{said}");
}

#[test]
fn broken_text_is_an_error_and_never_a_panic() {
    let whole = BUILTIN[0].1;
    for end in (0..whole.len()).filter(|&end| whole.is_char_boundary(end)) {
        let _ = Profile::parse("p", Origin::Builtin, &whole[..end]);
        let _ = Profile::parse("p", Origin::Builtin, &whole[end..]);
    }
}

#[test]
fn the_first_folder_wins_then_the_second_then_the_builtin_one() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let folders = Folders(vec![first.path().into(), second.path().into()]);
    assert_eq!(folders.load("nccl").unwrap().origin, Origin::Builtin);

    let file = second.path().join("nccl.toml");
    fs::write(&file, "description = \"second\"").unwrap();
    let found = folders.load("nccl").unwrap();
    assert_eq!((found.description.as_str(), found.origin), ("second", Origin::File(file.clone())));

    fs::write(first.path().join("nccl.toml"), "description = \"first\"").unwrap();
    assert_eq!(folders.load("nccl").unwrap().description, "first");

    let path = file.display().to_string();
    let found = folders.load(&path).unwrap();
    assert_eq!((found.name.as_str(), found.description.as_str()), ("nccl", "second"));
}

#[test]
fn names_are_those_of_the_folders_and_the_builtin_ones() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ours.toml"), "").unwrap();
    fs::write(folder.path().join("nccl.toml"), "").unwrap();
    fs::write(folder.path().join("README"), "").unwrap();
    let names = Folders(vec![folder.path().into(), "/nowhere".into()]).names();
    let expected =
        ["default", "dynamo", "mooncake", "nccl", "nixl", "ours", "perftest", "ucx", "wide-ep"];
    assert_eq!(names, expected);
}

#[test]
fn what_is_not_found_says_where_it_was_looked_for_and_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let folders = Folders(vec![folder.path().into()]);
    let said = folders.load("monkcake").unwrap_err().to_string();
    assert!(said.contains("monkcake.toml") && said.contains("mooncake, nccl"), "{said}");
    let said = folders.load("/nowhere/x.toml").unwrap_err().to_string();
    assert!(said.contains("/nowhere/x.toml"), "{said}");
}

#[test]
fn what_is_no_profile_file_is_refused_without_waiting_or_reading_it_all() {
    let folder = tempfile::tempdir().unwrap();
    let folders = Folders(Vec::new());
    for path in ["/dev/zero", "/dev", "/proc/self/mem/x/"] {
        assert!(folders.load(path).is_err(), "{path}");
    }
    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = folders.load(&fifo.display().to_string()).unwrap_err();
    assert!(said.to_string().contains("it is a FIFO"), "{said}");
    let large = folder.path().join("large");
    fs::write(&large, vec![b'#'; FILE_BYTES_MAX as usize + 1]).unwrap();
    let said = folders.load(&large.display().to_string()).unwrap_err();
    assert!(matches!(said, ProfileError::TooLarge { .. }), "{said}");
    let binary = folder.path().join("binary");
    fs::write(&binary, [0xff, 0xfe]).unwrap();
    let said = folders.load(&binary.display().to_string()).unwrap_err().to_string();
    assert!(said.contains("UTF-8"), "{said}");
}
