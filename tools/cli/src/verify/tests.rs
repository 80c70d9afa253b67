//! Tests of the contradictions that are found, with outputs of `ethtool` and `mlnx_qos`.

use laxity_wire::{LevelStatus, PermittedBytes, PortStatus};

use super::*;

const QOS: &str = include_str!("../doctor/qos/fixtures/mlnx_qos_lossless.txt");
const MIB: u64 = 1 << 20;

/// A daemon that permitted these bytes of collectives at P2 (DSCP 34).
fn status(bytes: u64) -> Status {
    let level =
        |name: &str, dscp| LevelStatus { level: name.into(), dscp, ..LevelStatus::default() };
    let permitted = PermittedBytes { stage: "collective".into(), level: "P2".into(), bytes };
    let port = PortStatus {
        name: "eth0".into(),
        direction: "egress".into(),
        levels: vec![level("P2", 34), level("P3", 26), level("scavenger", 8)],
        permitted: vec![permitted],
        ..PortStatus::default()
    };
    let (mode, marking) = ("enforce".into(), "levels".into());
    Status { mode, marking, ports: vec![port], ..Status::default() }
}

fn nic() -> DaemonNic {
    let map = qos::mlnx_qos(QOS);
    DaemonNic { name: "eth0".into(), interface: Some("eth0".into()), device: None, map }
}

fn seen(permitted: u64, ethtool_says: &str) -> Observed {
    let counters = ethtool(&format!("NIC statistics:\n{ethtool_says}"));
    Observed { status: status(permitted), counters: [("eth0".to_owned(), counters)].into() }
}

/// Compares two moments. The second is `now` with this many permitted bytes.
fn after(permitted: u64, was: &str, now: &str, nic: &DaemonNic) -> VerifyReport {
    let report = compare(
        &[DaemonNic { map: nic.map.clone(), ..self::nic() }],
        &seen(MIB, was),
        &seen(MIB + permitted, now),
        5,
    );
    assert!(!page(&report).is_empty() && json(&report).is_ok());
    report
}

#[test]
fn default_is_the_only_interface_of_a_host_without_rdma() {
    let host = tempfile::tempdir().expect("a folder");
    let eth0 = host.path().join("sys/class/net/eth0");
    std::fs::create_dir_all(eth0.join("device")).expect("created");
    std::fs::write(eth0.join("operstate"), "up").expect("written");
    let mut status = status(MIB);
    status.ports[0].name = "default".into();
    let root = Root::new(host.path());
    let found = nics(&root, &[], &status, &|_| Err(DcbError::Unsupported), &|_, _| None);
    assert_eq!(found[0].interface.as_deref(), Some("eth0"));
}

fn errors(report: &VerifyReport) -> Vec<&Finding> {
    report.findings.iter().filter(|finding| finding.severity == Severity::Error).collect()
}

const BEFORE: &str = "     tx_prio0_bytes: 7\n     tx_prio1_bytes: 0\n     tx_prio3_bytes: 0\n     \
                      tx_prio4_bytes: 500\n     rx_prio4_pause: 9\n     rx_prio3_discards: 0\n";

#[test]
fn bytes_that_leave_at_the_levels_priority_contradict_nothing() {
    let now = BEFORE.replace("tx_prio4_bytes: 500", "tx_prio4_bytes: 68000000");
    let report = after(64 * MIB, BEFORE, &now, &nic());
    assert!(errors(&report).is_empty(), "{:?}", report.findings);
    let row = &report.nics[0].levels[0];
    assert_eq!((row.dscp, row.priority, row.queue), (34, Some(4), Some(4)));
    assert_eq!(row.permitted_bytes, 64 * MIB);
    let sent = report.nics[0].priorities.iter().find(|row| row.priority == 4);
    assert_eq!(sent.and_then(|row| row.sent_bytes), Some(67_999_500));
    assert_eq!(report.nics[0].cnp_sent, None, "nothing says it");
    assert!(page(&report).contains("CNPs sent: not measured"));
}

#[test]
fn bytes_that_leave_at_another_priority_are_a_contradiction_with_a_next_step() {
    let now = BEFORE.replace("tx_prio0_bytes: 7", "tx_prio0_bytes: 68000000");
    let report = after(64 * MIB, BEFORE, &now, &nic());
    let [error] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert!(error.found.contains("64 MiB were permitted") && error.found.contains("others 64."));
    assert!(error.action.contains("laxity doctor"));

    // Classes that programs chose are meant to stay.
    let mut kept = seen(65 * MIB, &now);
    kept.status.marking = "preserve".into();
    let report = compare(&[nic()], &seen(MIB, BEFORE), &kept, 5);
    assert!(errors(&report).is_empty() && page(&report).contains("preserve"), "{}", page(&report));

    // Nothing is compared where Laxity does not mark packets.
    let mut observing = seen(65 * MIB, &now);
    observing.status.mode = "observe".into();
    let report = compare(&[nic()], &seen(MIB, BEFORE), &observing, 5);
    assert!(errors(&report).is_empty() && page(&report).contains("not enforce"));
}

#[test]
fn pauses_without_pfc_and_losses_with_it_are_contradictions() {
    let paused = BEFORE.replace("rx_prio4_pause: 9", "rx_prio4_pause: 12");
    let report = after(0, BEFORE, &paused, &nic());
    let [error] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert!(error.found.contains("paused priority 4 3 times"), "{error:?}");

    let lost = BEFORE.replace("rx_prio3_discards: 0", "rx_prio3_discards: 5");
    let report = after(0, BEFORE, &lost, &nic());
    let [error] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert!(error.found.contains("priority 3 is lossless") && error.found.contains("5 packets"));
}

#[test]
fn congestion_notifications_without_ecn_are_a_contradiction() {
    let (was, now) = (format!("{BEFORE} np_cnp_sent: 4\n"), format!("{BEFORE} np_cnp_sent: 6\n"));
    let mut nic = nic();
    assert!(errors(&after(0, &was, &now, &nic)).is_empty(), "it is unknown whether ECN is on");
    nic.map.ecn = Some(0);
    let report = after(0, &was, &now, &nic);
    let [error] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert!(error.found.starts_with("2 CNPs"), "{error:?}");
    nic.map.ecn = Some(1 << 4);
    assert!(errors(&after(0, &was, &now, &nic)).is_empty());
}

#[test]
fn what_is_not_counted_is_not_measured_and_no_contradiction() {
    let report = after(64 * MIB, "     tx_bytes: 5\n", "     tx_bytes: 9\n", &nic());
    assert!(errors(&report).is_empty());
    assert!(page(&report).contains("not measured: the driver has no byte counters by priority"));
    let unknown = DaemonNic { map: PriorityMap::default(), ..nic() };
    let report = after(64 * MIB, BEFORE, BEFORE, &unknown);
    assert!(errors(&report).is_empty());
    assert!(page(&report).contains("unknown which priority"), "{}", page(&report));
}

#[test]
fn the_nic_of_a_daemon_is_the_device_or_the_interface_of_its_name_and_counters_are_in_sysfs() {
    let folder = tempfile::tempdir().expect("a folder");
    let port = folder.path().join("sys/class/infiniband/mlx5_0/ports/1");
    for (file, text) in [
        ("hw_counters/np_cnp_sent", "17\n"),
        ("hw_counters/lifespan", "none"),
        ("gid_attrs/ndevs/0", "eth0\n"),
        ("link_layer", "Ethernet"),
    ] {
        let path = port.join(file);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(path, text).expect("written");
    }
    let root = Root::new(folder.path());
    let query = |_: &str| Err(DcbError::Unsupported);
    let tool = |program: &str, _: &[&str]| (program == "mlnx_qos").then(|| QOS.to_owned());
    let mut status = status(0);
    status.ports[0].name = "mlx5_0".into();
    let nics = nics(&root, &fabric::ports(&root), &status, &query, &tool);
    assert_eq!(nics[0].interface.as_deref(), Some("eth0"));
    assert_eq!(nics[0].map.priority(34), Some(4));
    assert_eq!(counters(&root, &nics[0], &tool), [("np_cnp_sent".to_owned(), 17)].into());

    let function = folder.path().join("sys/class/infiniband/mlx5_1");
    for made in ["ports/1", "device/physfn/infiniband/mlx5_0"] {
        std::fs::create_dir_all(function.join(made)).expect("made");
    }
    status.ports[0].name = "default".into();
    let nics = super::nics(&root, &fabric::ports(&root), &status, &query, &tool);
    let device = nics[0].device.as_ref().map(|(device, _)| device.as_str());
    assert_eq!(device, Some("mlx5_0"), "it is the only one that owns its port");
}
