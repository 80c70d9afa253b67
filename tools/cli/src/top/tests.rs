//! Tests of the screen, as snapshots at two sizes, and of the keys.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;

use laxity_wire::control::{Envelope, Request, Response, parse_request};
use laxity_wire::explain::{ExplainedFlow, FlowQuery, FlowWait};
use laxity_wire::trace::{SubmitOutcome, TracedFlow};
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
        rate_in_force_bytes_per_s: 50_000_000_000,
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
fn d_opens_the_clients_of_a_job_and_the_details_of_a_client() {
    let mut top = top(View::Jobs);
    press(&mut top, &[KeyCode::Char('d')]);
    assert_eq!((top.view, top.filter.as_str()), (View::Clients, "prefill"));
    let pids = |top: &Top| -> Vec<String> {
        top.rows().iter().map(|line| line.cells[1].text.clone()).collect()
    };
    assert_eq!(pids(&top), ["4001", "4002"], "the one that waits comes first");
    press(&mut top, &[KeyCode::Down, KeyCode::Char('d')]);
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

/// A flow of client 1 that waits, the older the smaller its number.
fn waiting(number: u64) -> ExplainedFlow {
    ExplainedFlow {
        flow: TracedFlow {
            flow: 1_125_899_906_842_600 + number,
            pid: 4001,
            nic: 0,
            ingress: false,
            stage: "kv_reuse".into(),
            layer: 3,
            batch: 9,
            request: 7,
            bytes: 4 * MIB,
            deadline_ns: 2_000_000_000,
            standing: SubmitOutcome::BehindOthers,
            permitted: MIB,
            level: 3,
            in_flight_bytes: 4 * MIB,
            window_bytes: 4 * MIB,
            ahead: number,
        },
        client: 1,
        trace_id: String::new(),
        completed_bytes: 0,
        since_ns: 1_000_000_000 + number * 1_000_000,
        wait: Some(FlowWait {
            obstacle: if number == 0 { "window" } else { "order" }.into(),
            level: 3,
            rule: "laxity".into(),
            begin_by_ns: 1_950_000_000,
            ahead_bytes: number * 3 * MIB,
            ..FlowWait::default()
        }),
    }
}

fn told(flows: Vec<ExplainedFlow>) -> Explanation {
    Explanation { now_ns: 1_900_000_000, count: flows.len() as u64, flows }
}

/// Lets the opened flows take what the daemon would answer.
fn answer(top: &mut Top, flows: Vec<ExplainedFlow>) {
    let status = top.now.clone();
    let list = top.flows.as_mut().expect("flows are shown");
    list.queries(&status);
    list.take(&status, vec![told(flows)]);
}

#[test]
fn a_job_opens_its_flows_with_the_explanation_of_the_selected_one() {
    let mut top = top(View::Jobs);
    press(&mut top, &[KeyCode::Enter]);
    let status = top.now.clone();
    let queries = top.flows.as_mut().expect("flows are shown").queries(&status);
    let of = |pid| FlowQuery { pid: Some(pid), ..FlowQuery::default() };
    assert_eq!(queries, [of(4001), of(4002)], "the process with the most waiting flows first");
    let sent = ExplainedFlow { wait: None, since_ns: 1, ..waiting(9) };
    answer(&mut top, vec![waiting(2), sent, waiting(0), waiting(1)]);
    insta::assert_snapshot!("80x24_flows", once(&top, 80, 24));
    press(&mut top, &[KeyCode::Down, KeyCode::Enter]);
    insta::assert_snapshot!("80x24_flow", once(&top, 80, 24));
    press(&mut top, &[KeyCode::Esc]);
    assert!(once(&top, 80, 24).contains("to permit"), "back at the list");
    press(&mut top, &[KeyCode::Esc]);
    assert!(top.flows.is_none() && top.view == View::Jobs, "back at the jobs");
}

#[test]
fn a_client_opens_only_its_own_flows() {
    let mut top = top(View::Clients);
    press(&mut top, &[KeyCode::Down, KeyCode::Enter]);
    let status = top.now.clone();
    let list = top.flows.as_mut().expect("flows are shown");
    assert_eq!(list.queries(&status).len(), 1);
    assert_eq!(list.owner, FlowsOwner::Client(3, "decode".into()));
    let own = ExplainedFlow { client: 3, ..waiting(5) };
    answer(&mut top, vec![waiting(0), own.clone()]);
    assert_eq!(top.flows.as_ref().map(FlowList::flows), Some(&[own][..]));
    let shown = once(&top, 80, 24);
    assert!(shown.contains("client decode (3): 2 of 4 flows wait"), "{shown}");
    top.take(Ok(Status::default()), Duration::from_secs(1));
    answer(&mut top, Vec::new());
    let shown = once(&top, 80, 24);
    assert!(shown.contains("client decode (3) has left; Esc goes back"), "{shown}");
}

#[test]
fn the_selected_flow_stays_selected_while_it_lasts() {
    let mut top = top(View::Jobs);
    press(&mut top, &[KeyCode::Enter]);
    answer(&mut top, vec![waiting(0), waiting(1), waiting(2)]);
    press(&mut top, &[KeyCode::Down, KeyCode::Enter]);
    answer(&mut top, vec![waiting(1), waiting(2)]);
    let list = top.flows.as_ref().expect("flows are shown");
    assert_eq!((list.selected, list.is_open), (0, true), "its predecessor went");
    answer(&mut top, vec![waiting(2)]);
    let list = top.flows.as_ref().expect("flows are shown");
    assert_eq!((list.selected, list.is_open), (0, false), "it ended, so the list is shown");
}

#[test]
fn opened_flows_come_from_the_daemon_and_its_silence_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let daemon = std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        let mut stream = BufReader::new(stream);
        let mut asked = Vec::new();
        for number in 0..2 {
            let mut line = Vec::new();
            stream.read_until(b'\n', &mut line).expect("a request");
            asked.push(parse_request(&line).expect("a request"));
            let response = Response::Explanation(Box::new(told(vec![waiting(number)])));
            let mut answer = serde_json::to_vec(&Envelope::new(response)).expect("JSON");
            answer.push(b'\n');
            stream.get_mut().write_all(&answer).expect("a reader");
        }
        asked
    });
    let mut top = top(View::Jobs);
    press(&mut top, &[KeyCode::Enter]);
    let endpoint = Endpoint::new(path, 2000);
    let mut asker = DaemonConnection { endpoint: &endpoint, client: None };
    top.ask_flows(&mut asker);
    let of = |pid| Request::Explain(FlowQuery { pid: Some(pid), ..FlowQuery::default() });
    assert_eq!(daemon.join().expect("it answered"), [of(4001), of(4002)]);
    assert_eq!(top.flows.as_ref().map(|list| list.flows().len()), Some(2), "{:?}", top.problem);
    top.ask_flows(&mut asker);
    assert!(once(&top, 80, 24).starts_with("NO ANSWER, values are old"), "{:?}", top.problem);
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
