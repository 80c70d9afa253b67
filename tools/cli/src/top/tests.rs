//! Tests of the screen, as snapshots at two sizes, and of the keys.

use laxity_wire::{
    ClientStatus, LevelStatus, PermittedBytes, PortStatus, StageStatus, Totals, WaitStatus,
};

use super::*;

const MIB: u64 = 1 << 20;

fn client(id: u64, name: &str, waiting: u64, permitted: u64) -> ClientStatus {
    ClientStatus {
        id,
        pid: 4000 + id as u32,
        uid: 1000,
        name: name.into(),
        mode: "enforce".into(),
        attached_ms: 90_000,
        lanes: 4,
        flows: waiting + 2,
        waiting_flows: waiting,
        submitted_bytes: permitted + waiting * MIB,
        permitted_bytes: permitted,
        completed_bytes: permitted,
        ..ClientStatus::default()
    }
}

/// A host with two NICs, of which one sends more than it can.
fn status(seconds: u64) -> Status {
    let permitted = seconds * 1000 * MIB;
    let level = |name: &str, dscp, waiting, permitted_bytes| LevelStatus {
        level: name.into(),
        dscp,
        waiting_flows: waiting,
        waiting_bytes: waiting * MIB,
        permitted_bytes,
        ..LevelStatus::default()
    };
    let stage = |name: &str, waiting, p99_ns| StageStatus {
        stage: name.into(),
        waiting_flows: waiting,
        waiting_bytes: waiting * MIB,
        permitted_bytes: permitted / 2,
        wait: WaitStatus { flows: 9, mean_ns: 900, p50_ns: 256, p99_ns },
        ..StageStatus::default()
    };
    let port = |nic, name: &str, direction: &str, busy: u64| PortStatus {
        nic,
        name: name.into(),
        direction: direction.into(),
        rate_bytes_per_s: 50_000_000_000,
        in_flight_bytes: busy * 4 * MIB,
        window_bytes: 4 * MIB,
        load: 0.5,
        waiting_flows: busy * 8,
        waiting_bytes: busy * 8 * MIB,
        levels: vec![
            level("P2", 34, busy * 3, busy * permitted),
            level("P3", 26, busy * 5, 0),
            level("scavenger", 8, 0, 0),
        ],
        stages: vec![
            stage("kv_reuse", busy * 5, 4_194_304),
            stage("collective", busy * 3, 65_536),
            stage("p2d", 0, 0),
        ],
        permitted: vec![PermittedBytes {
            stage: "collective".into(),
            level: "P2".into(),
            bytes: busy * permitted,
        }],
        promotions: 7,
        ..PortStatus::default()
    };
    let mut owing = client(3, "decode", 2, permitted / 8);
    (owing.owed_bytes, owing.held) = (3 * MIB, true);
    let totals = Totals {
        flows: 120_000,
        permitted_bytes: permitted,
        credited_bytes: permitted / 4,
        pruned_requests: 2,
        ..Totals::default()
    };
    Status {
        version: "1.2.3".into(),
        pid: 77,
        uptime_ms: seconds * 1000,
        policy: "laxity".into(),
        mode: "enforce".into(),
        clients: vec![
            client(1, "prefill", 6, permitted / 2),
            client(2, "prefill", 0, permitted / 4),
            owing,
        ],
        ports: vec![
            port(0, "mlx5_0", "egress", 1),
            port(0, "mlx5_0", "ingress", 0),
            port(1, "mlx5_1", "egress", 0),
            port(1, "mlx5_1", "ingress", 0),
        ],
        totals,
        ..Status::default()
    }
}

fn top(view: View) -> Top {
    let mut top = Top::new(view, 2, status(60));
    top.take(Ok(status(62)), Duration::from_secs(2));
    top
}

fn press(top: &mut Top, keys: &[KeyCode]) {
    for key in keys {
        assert!(top.key(KeyEvent::new(*key, KeyModifiers::NONE)), "{key:?} ends it");
    }
}

#[test]
fn every_view_fits_a_small_terminal() {
    for &view in View::value_variants() {
        insta::assert_snapshot!(format!("80x24_{}", view.name()), once(&top(view), 80, 24));
    }
}

#[test]
fn every_view_uses_a_large_terminal() {
    for view in [View::Clients, View::Levels] {
        insta::assert_snapshot!(format!("160x50_{}", view.name()), once(&top(view), 160, 50));
    }
}

#[test]
fn details_of_a_port_say_which_stage_was_permitted_at_which_level() {
    let mut top = top(View::Ports);
    press(&mut top, &[KeyCode::Enter]);
    insta::assert_snapshot!("80x24_port", once(&top, 80, 24));
    press(&mut top, &[KeyCode::Esc]);
    assert_eq!(top.detail, None);
}

#[test]
fn a_job_opens_its_clients_and_a_client_its_details() {
    let mut top = top(View::Jobs);
    press(&mut top, &[KeyCode::Enter]);
    assert_eq!((top.view, top.filter.as_str()), (View::Clients, "prefill"));
    let pids = |top: &Top| -> Vec<String> {
        top.rows().iter().map(|line| line.cells[1].text.clone()).collect()
    };
    assert_eq!(pids(&top), ["4001", "4002"], "the one that waits comes first");
    press(&mut top, &[KeyCode::Down, KeyCode::Enter]);
    let shown = once(&top, 80, 24);
    assert!(shown.contains("pid 4002, uid 1000"), "{shown}");
    top.take(Ok(Status::default()), Duration::from_secs(1));
    assert!(once(&top, 80, 24).contains("no longer there"));
}

#[test]
fn rows_are_sorted_and_filtered_by_keys() {
    let mut top = top(View::Clients);
    let first = |top: &Top| top.rows()[0].cells[1].text.clone();
    assert_eq!(first(&top), "4001", "most bytes wait there");
    press(&mut top, &[KeyCode::Char('r')]);
    assert_eq!(first(&top), "4002");
    // The next column but one is `why`, where the longest text is last.
    press(&mut top, &[KeyCode::Char('s'), KeyCode::Char('s'), KeyCode::Char('r')]);
    assert_eq!(first(&top), "4001", "{:?}", top.rows());
    let keys: Vec<KeyCode> = "/owes".chars().map(KeyCode::Char).collect();
    press(&mut top, &keys);
    assert_eq!(top.rows().len(), 1);
    assert_eq!(first(&top), "4003");
    press(&mut top, &[KeyCode::Char('q'), KeyCode::Esc]);
    assert_eq!(top.rows().len(), 3, "a letter of a filter does not end it");
    assert!(!top.key(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE)));
    assert!(!top.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
}

#[test]
fn rates_are_those_since_the_last_answer_of_the_same_daemon() {
    let mut top = top(View::Ports);
    let shown = |top: &Top| top.rows()[0].cells[5].text.clone();
    assert_eq!(shown(&top), "0.98 GiB", "2000 MiB in two seconds");
    assert_eq!(top.rows()[0].cells[1].text, "2 %");
    let other = Status { pid: 78, ..status(1) };
    top.take(Ok(other), Duration::from_secs(1));
    assert_eq!(shown(&top), "–");
    top.take(Err(ControlError::Refused("it stops".into())), Duration::from_secs(1));
    assert!(once(&top, 80, 24).starts_with("NO ANSWER, values are old: laxityd refused: it stops"));
}

#[test]
fn observed_bytes_count_as_sent_and_not_as_waiting_for_a_permit() {
    let observed = |status: Status, bytes: u64| {
        let mut client = client(1, "job", 1, 0);
        client.submitted_bytes += bytes;
        client.observed_bytes = bytes;
        Status { clients: vec![client], ..status }
    };
    let mut top = Top::new(View::Clients, 1, observed(status(1), 10 * MIB));
    top.take(Ok(observed(status(2), 30 * MIB)), Duration::from_secs(2));
    let cells = &top.rows()[0].cells;
    assert_eq!((cells[4].text.as_str(), cells[5].text.as_str()), ("1 MiB", "10 MiB"));
}
