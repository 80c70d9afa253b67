//! Tests of the page, with snapshots of a host in trouble and of a calm one.

use laxity_wire::PodStatus;

use super::*;
use crate::doctor::root::Root;

fn shown(status: &Status) -> String {
    page(status, &[], &[], false)
}

/// A host with eight NICs, of which two are busy, and with several problems.
fn busy() -> Status {
    serde_json::from_str(include_str!("fixtures/eight_nics.json")).expect("a status")
}

#[test]
fn a_host_of_eight_nics_fits_a_small_terminal_with_what_is_wrong_first() {
    let process = |pid| Row { pid, readable: true, ..Row::default() };
    let processes: Vec<Row> = (4010..4018).map(process).collect();
    let calm = Status { refused: Vec::new(), cluster: None, ..busy() };
    for (name, status) in [("80x24_trouble", &busy()), ("80x24_calm", &calm)] {
        let page = page(status, &[], &processes, false);
        assert!(rows(&page) < 24, "a terminal breaks long lines: {page}");
        insta::assert_snapshot!(name, page);
    }
    let full = page(&busy(), &[], &processes, true);
    for shown in ["mlx5_7 ingress: 46.6 GiB/s", "4017 ()", "\nprefill "] {
        assert!(full.contains(shown), "{full}");
    }
    let small = Status { ports: busy().ports[..2].to_vec(), ..calm };
    let small = page(&small, &[], &processes[..1], false);
    assert!(small.contains("4010 ()"), "the whole map, if there is room: {small}");
}

#[test]
fn jobs_that_do_not_fit_are_counted_and_pods_are_named() {
    let mut status = busy();
    let client =
        |id: u64| ClientStatus { id, name: format!("job {id}"), ..ClientStatus::default() };
    status.clients = (1..40).map(client).collect();
    status.clients[0].waiting_flows = 1;
    status.clients[0].pod = Some(PodStatus { name: "prefill-0".into(), ..PodStatus::default() });
    let shown = shown(&status);
    assert!(rows(&shown) < 24 && shown.contains("more: laxity status --full"));
    assert!(shown.contains("/prefill-0/, mode"), "{shown}");
}

#[test]
fn one_nic_has_its_levels_and_other_networks_say_what_tells_levels_apart() {
    let image = Root::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/image"));
    let (status, ports) = (busy(), fabric::ports(&image));
    let page = page(&status, &ports, &[], false);
    assert!(page.contains("mlx5_0: InfiniBand: P2-P3 SL 1, scavenger SL 0"), "{page}");
    assert!(page.contains("mlx5_1: software order only: Laxity sets no class on EFA"), "{page}");
    let one = nic(&status, &ports, "mlx5_1").expect("known");
    assert!(one.starts_with("mlx5_1: software order only: Laxity sets no class on EFA"), "{one}");
    assert!(one.contains("mlx5_1 egress") && one.contains("mlx5_1 ingress"), "{one}");
    assert!(!one.contains("mlx5_0") && nic(&status, &ports, "mlx5_9").is_none());
}

#[test]
fn the_page_says_first_whether_anything_is_scheduled() {
    let status = Status { bypass: true, version: "1".into(), ..Status::default() };
    assert!(shown(&status).lines().next().is_some_and(|line| line.contains("BYPASSED")));
    assert!(shown(&status).contains("No client is attached."));
    let off = Status { mode: "off".into(), ..Status::default() };
    assert!(shown(&off).contains("nothing is scheduled"));
}

#[test]
fn a_port_says_what_others_leave_and_nothing_beside_none() {
    let mut port = PortStatus { rate_bytes_per_s: 1000 << 20, ..PortStatus::default() };
    assert_eq!(left_by_others(&port), "", "from a daemon that does not know");
    port.rate_in_force_bytes_per_s = 500 << 20;
    port.foreign_bytes_per_s = 480 << 20;
    assert_eq!(left_by_others(&port), ", 500 MiB/s left (others 480 MiB/s)");
    port.counters_stale = true;
    assert!(left_by_others(&port).contains("stand still"));
}

#[test]
fn nics_that_are_gone_are_named_once() {
    let port = |name: &str, direction: &str, absent| PortStatus {
        name: name.into(),
        direction: direction.into(),
        absent,
        ..PortStatus::default()
    };
    let nic = |name, absent| [port(name, "egress", absent), port(name, "ingress", absent)];
    let ports = [nic("mlx5_0", false), nic("mlx5_1", true), nic("mlx5_2", true)].concat();
    let page = shown(&Status { ports, ..Status::default() });
    assert!(page.contains("mlx5_1, mlx5_2: gone") && page.contains("–/–"), "{page}");
}

#[test]
fn clients_with_an_older_library_are_named_and_others_are_not() {
    let client = |name: &str, library_is_older| ClientStatus {
        name: name.into(),
        library_is_older,
        ..ClientStatus::default()
    };
    let clients = vec![client("old", true), client("new", false)];
    let line = summary(&Status { clients, ..Status::default() }).join("\n");
    assert!(line.contains("laxityd: old (pid 0, ") && !line.contains("new (pid"), "{line}");
}

#[test]
fn what_is_bypassed_is_not_shown_as_nothing() {
    let client = ClientStatus { mode: "enforce".into(), ..ClientStatus::default() };
    let mut status = Status { mode: "enforce".into(), clients: vec![client], ..Status::default() };
    let says = |status: &Status| shown(status).contains("not counted");
    assert!(!says(&status) && shown(&status).contains("0 B bypassed"));
    status.bypass = true;
    assert!(says(&status) && !shown(&status).contains("0 B bypassed,"));
    status.bypass = false;
    // One client runs unscheduled because it asked for that. The others are scheduled.
    status.clients[0].mode = "off".into();
    assert!(says(&status));
}

#[test]
fn each_problem_says_what_to_do() {
    let port = |direction: &str| PortStatus {
        direction: direction.into(),
        rate_bytes_per_s: 12_500_000_000,
        rate_assumed: true,
        ..PortStatus::default()
    };
    let absent = PortStatus { absent: true, ..port("egress") };
    let foreign = PortStatus { foreign_bytes_per_s: 9_000_000_000, ..port("ingress") };
    let client = ClientStatus::default;
    let status = Status {
        ports: vec![port("egress"), port("ingress"), absent, foreign],
        distrusted: vec![DistrustedOwner::default()],
        clients: vec![
            ClientStatus { distrusted: true, ..client() },
            ClientStatus { owed_bytes: 1, held: true, ..client() },
            ClientStatus { owed_bytes: 1, ..client() },
            ClientStatus { limited: true, ..client() },
            ClientStatus { library_is_older: true, ..client() },
        ],
        totals: laxity_wire::Totals {
            unknown_nic_flows: 1,
            garbage_records: 1,
            written_off_bytes: 1,
            ..laxity_wire::Totals::default()
        },
        ..Status::default()
    };
    let problems = problems(&status);
    assert_eq!(problems.len(), 12, "{problems:#?}");
    let remedies = [
        "add its [[nic]]", "set `rate`", "dmesg", "laxity doctor", "restart", "does it hang?",
        "nothing to do", "journalctl",
    ];
    for line in &problems {
        assert!(remedies.iter().any(|remedy| line.contains(remedy)), "no next step: {line}");
    }
}

#[test]
fn the_mode_says_if_it_was_ordered_and_the_full_page_who_ordered_what() {
    let change = laxity_wire::OperatorChange {
        ago_ms: 130_000,
        uid: Some(1000),
        what: "the mode is enforce".into(),
    };
    let status = Status {
        mode: "enforce".into(),
        configured_mode: "observe".into(),
        changes: vec![change],
        ..Status::default()
    };
    assert!(shown(&status).contains("enforce (by command; the configuration has observe)"));
    let full = page(&status, &[], &[], true);
    assert!(full.contains("2 min ago, user 1000: the mode is enforce"), "{full}");
}
