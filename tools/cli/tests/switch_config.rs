//! Tests of `laxity switch-config`: the form of each vendor, as snapshots, and errors. The tests
//! beside the code have the order of the queues.

use std::process::{Command, Output};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/laxityd.toml");

fn switch_config(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
    command.args(["switch-config", "--control", "/nowhere/control.sock"]).args(arguments);
    command.output().expect("laxity runs")
}

fn good(arguments: &[&str]) -> String {
    let seen = switch_config(arguments);
    assert!(seen.status.success(), "{}", String::from_utf8_lossy(&seen.stderr));
    String::from_utf8(seen.stdout).expect("UTF-8")
}

/// Returns the error of arguments that must be refused.
fn refused(arguments: &[&str]) -> String {
    let seen = switch_config(arguments);
    assert_eq!(seen.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(seen.stderr).expect("UTF-8")
}

#[test]
fn each_vendor_has_its_form_for_one_queue_and_for_several_of_which_some_are_lossless() {
    for vendor in
        ["sonic", "cumulus", "arista", "generic", "mlnx-qos", "dcb", "systemd", "systemd-mlnx-qos"]
    {
        let form = |options: &[&str]| {
            let form = good(&[&["--vendor", vendor, "--config", SAMPLE][..], options].concat());
            format!("{}:\n{form}", options.join(" "))
        };
        let forms = [
            form(&["--queues", "1"]),
            form(&["--queues", "4", "--pfc", "2,3"]),
            form(&["--queues", "8"]),
        ];
        insta::assert_snapshot!(vendor, forms.join("\n"));
    }
    let none = refused(&["--vendor", "generic", "--queues", "2", "--pfc", "3"]);
    assert!(none.contains("0 to 1"), "{none}");
}

#[test]
fn other_levels_give_another_configuration_and_no_daemon_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laxityd.toml");
    let fewer = "[levels]\ncount = 3\ndscp = [40, 0, 30]\nscavenger_dscp = 30\n";
    std::fs::write(&path, fewer).expect("written");
    let other = good(&["--vendor", "generic", "--config", path.to_str().expect("UTF-8")]);
    insta::assert_snapshot!("other_levels", other);

    let seen = switch_config(&["--vendor", "generic"]);
    let said = String::from_utf8_lossy(&seen.stderr);
    assert!(said.contains("a daemon without a configuration (cannot reach"), "{said}");
    let same = switch_config(&["--vendor", "generic", "--config", SAMPLE]);
    assert_eq!(seen.stdout, same.stdout, "the defaults are the sample's");
}

#[test]
fn a_subnet_manager_gets_the_order_of_the_service_levels_with_any_number_of_lanes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("laxityd.toml");
    std::fs::write(&path, "[levels]\nsl = [3, 3, 2, 1, 1, 0, 0, 0]\n").expect("written");
    let arguments = ["--vendor", "opensm", "--config", path.to_str().expect("UTF-8")];
    let of_lanes = |lanes| good(&[&arguments[..], &["--queues", lanes]].concat());
    insta::assert_snapshot!("opensm", ["1", "2", "4", "8"].map(of_lanes).join("\n"));

    let none = refused(&["--vendor", "opensm", "--config", SAMPLE]);
    assert!(none.contains("laxityd.toml has no service levels; set `[levels] sl`"), "{none}");
    assert!(refused(&[&arguments[..], &["--pfc", "3"]].concat()).contains("InfiniBand"));
    std::fs::write(&path, "[levels]\nsl = [16]\n").expect("written");
    assert!(refused(&arguments).contains("16, the service level of P1, is above 15"));
}
