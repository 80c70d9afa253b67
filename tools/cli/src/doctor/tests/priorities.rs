//! Tests of the checks of NICs' priorities, with outputs of tools.

use super::*;

/// Findings about the NIC's priorities, where the kernel says nothing.
fn priorities(host: &Host, status: Option<&Status>, tool: fabric::Tool<'_>) -> Vec<Finding> {
    let unsupported = |_: &str| Err(laxity_nic::DcbError::Unsupported);
    levels::priorities(&host.root(), &fabric::ports(&host.root()), status, &unsupported, tool)
}

#[test]
fn trust_is_what_a_tool_says_and_unknown_without_one() {
    let host = Host::new().roce("mlx5_0", "eth0", &[]);
    let trust = |tool: fabric::Tool<'_>| priorities(&host, Some(&status()), tool);
    let unknown = trust(&nothing);
    assert_eq!(severity(&unknown, "trust"), Severity::Info);
    assert!(text(&unknown).contains("PFC unreadable here; ECN unreadable here"));

    let qos = |state: &str| {
        let text = format!(
            "DCBX mode: OS controlled\nPriority trust state: {state}\nPFC \
             configuration:\n\tpriority    0   1   2   3   4   5   6   7\n\tenabled     0   0   \
             0   1   0   0   0   0\n"
        );
        move |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| text.clone())
    };
    let dscp = trust(&qos("dscp"));
    assert_eq!(severity(&dscp, "trust"), Severity::Ok);
    assert!(text(&dscp).contains("PFC on priorities 3"), "{dscp:?}");
    assert_eq!(severity(&trust(&qos("pcp")), "trust"), Severity::Warn);

    let dcb = |program: &str, arguments: &[&str]| {
        (program == "dcb" && arguments[2] == "app").then(|| "dscp-prio 46:5 \n".to_owned())
    };
    assert_eq!(severity(&trust(&dcb), "trust"), Severity::Ok);
    let order = |program: &str, arguments: &[&str]| {
        (program == "dcb" && arguments[2] == "apptrust").then(|| "order: pcp \n".to_owned())
    };
    assert_eq!(severity(&trust(&order), "trust"), Severity::Warn);
}

/// An output of `mlnx_qos` that trusts DSCP, with the default map and PFC on the priorities whose
/// bit is set. Each priority has a queue of its own, or all share one.
fn mlnx_qos(pfc: [u8; 8], is_one_queue: bool) -> String {
    let mut text = "Priority trust state: dscp\ndscp2prio mapping:\n".to_owned();
    for priority in 0..8_u8 {
        let dscps: Vec<String> = (0..8).map(|at| format!("{:02},", 8 * priority + at)).collect();
        text.push_str(&format!("\tprio:{priority} dscp:{}\n", dscps.concat()));
    }
    let bits: Vec<String> = pfc.iter().map(u8::to_string).collect();
    text.push_str(&format!("PFC configuration:\n\tenabled     {}\n", bits.join("   ")));
    for priority in 0..8 {
        let queue = if is_one_queue { 0 } else { priority };
        text.push_str(&format!("tc: {queue} ratelimit: unlimited, tsa: vendor\n"));
        text.push_str(&format!("\t priority:  {priority}\n"));
    }
    text
}

#[test]
fn a_level_outside_of_the_lossless_priority_is_an_error_whatever_the_marking_unless_it_is_off() {
    let host = Host::new().roce("mlx5_0", "eth0", &[]);
    let text_of = mlnx_qos([0, 0, 0, 1, 0, 0, 0, 0], false);
    let tool = |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| text_of.clone());
    let with = |marking: &str| {
        let mut status = status();
        status.marking = marking.into();
        priorities(&host, Some(&status), &tool)
    };
    for marking in ["levels", "", "preserve"] {
        let findings = with(marking);
        assert_eq!(severity(&findings, "levels"), Severity::Error, "{marking}");
        let found = text(&findings);
        assert!(found.contains("not in a lossless priority: ") && found.contains("DSCP 34"));
        assert!(found.contains("DSCP 26, priority 3, queue 3, lossless"), "{found}");
    }
    assert_eq!(severity(&with("off"), "levels"), Severity::Info);
    assert_eq!(severity(&priorities(&host, None, &tool), "levels"), Severity::Error);

    let all = mlnx_qos([1; 8], false);
    let tool = |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| all.clone());
    let lossless = priorities(&host, None, &tool);
    assert!(!text(&lossless).contains("not in a lossless priority"), "{lossless:?}");
}

#[test]
fn levels_of_different_dscps_in_one_queue_are_an_error_but_the_scavenger_may_join_the_lowest() {
    let host = Host::new().roce("mlx5_0", "eth0", &[]);
    let of = |text: String, status: Option<&Status>| {
        let tool = |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| text.clone());
        priorities(&host, status, &tool)
    };
    let joined = of(mlnx_qos([0; 8], false), None);
    assert_eq!(severity(&joined, "levels"), Severity::Warn, "{joined:?}");
    assert!(text(&joined).contains("share a queue: P8 (DSCP 10) and scavenger (DSCP 8)"));
    let one = of(mlnx_qos([0; 8], true), None);
    assert_eq!(severity(&one, "levels"), Severity::Error);
    assert!(text(&one).contains("P1 (DSCP 46) and P2 (DSCP 34)"), "{one:?}");
    let pcp = of(mlnx_qos([0; 8], false).replace("trust state: dscp", "trust state: pcp"), None);
    assert_eq!(severity(&pcp, "levels"), Severity::Error, "a NIC that sorts by PCP has one queue");
    assert!(text(&pcp).contains("P1 (DSCP 46) and P2 (DSCP 34)") && text(&pcp).contains("dcb"));
    let mut same = status();
    for level in &mut same.ports[0].levels {
        level.dscp = 26;
    }
    let meant = of(mlnx_qos([0; 8], true), Some(&same));
    assert_eq!(severity(&meant, "levels"), Severity::Ok, "one DSCP for all is meant");
}

#[test]
fn outputs_that_were_recorded_on_another_machine_count_and_programs_of_this_one_do_not() {
    let root = Root::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/image"));
    let ask = |program: &str, arguments: &[&str]| root.ask(program, arguments);
    let unsupported = |_: &str| Err(laxity_nic::DcbError::Unsupported);
    let found = levels::priorities(&root, &fabric::ports(&root), None, &unsupported, &ask);
    assert_eq!(severity(&found, "trust"), Severity::Ok, "{found:?}");
    // Each member of the bond has outputs of another tool.
    let found = text(&found);
    assert!(found.contains("P1: DSCP 46, priority 5, queue 5, lossy"), "{found}");
    assert!(found.contains("P1: DSCP 46, priority 3, lossless"), "by default-prio: {found}");
    assert_eq!((ask("true", &[]), ask("mlnx_qos", &["-i", "eth1"])), (None, None));
}
