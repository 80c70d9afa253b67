//! Checks the Helm chart, the manifests for kustomize and the alerts, without a cluster
//! (tests/kubernetes). Skipped if PyPI can't be reached, or without Prometheus or kubectl.

use std::process::Command;

use laxity_tests::{Need, skip};

use crate::process::{Said, binary};
use crate::sources::root;

#[test]
fn the_chart_renders_what_is_committed_and_what_kubernetes_and_our_programs_accept() {
    let programs = binary("laxityd");
    let programs = programs.parent().expect("a folder");
    let environment = programs.ancestors().nth(1).expect("a target folder").join("kubernetes");
    let folder = root().join("tests/kubernetes");
    let setup = Said::of(Command::new(folder.join("setup.sh")).arg(&environment));
    if !setup.status.success() {
        return skip(Need::Machine, format!("no environment for the chart: {}", setup.all()));
    }
    let _ = binary("laxity-coordinator");
    let mut check = Command::new(environment.join("bin/python"));
    let said = Said::of(check.arg(folder.join("check.py")).arg(programs)).good().stdout;
    assert!(said.contains("alerts: tested"), "{said}");
}
