//! Fuzzes both ends of the control socket, and the conditions in the addresses of the web pages.
//!
//! The first byte selects the kind of input: a request line as the daemon reads it, the answers of
//! a daemon as `laxity` reads them, or the conditions of a page. Answers pass through a real socket
//! and the real client.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use laxity_wire::control::{REQUEST_BYTES_MAX, VERSION, parse_request};
use laxity_wire::explain::{ExplainedFlow, Explanation, FlowQuery, FlowWait};
use laxity_wire::sentences::FlowReports;
use laxity_wire::trace::{SubmitOutcome, TraceEvent, TraceKind, TracePage, TracedFlow};
use laxity_wire::{ControlClient, ControlError, Envelope, Request, Response, Status};

use crate::Input;
use crate::input::put_packet;

/// Long enough for a busy machine. All bytes are there before the client reads.
const PATIENCE: Duration = Duration::from_secs(5);

fn line(message: impl serde::Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Envelope::new(message)).expect("plain data");
    line.push(b'\n');
    line
}

fn request(bytes: &[u8]) {
    match parse_request(bytes) {
        Ok(request) => {
            let again = line(&request);
            assert_eq!(parse_request(&again), Ok(request), "what was read can be written");
            let inner = &again[..again.len() - 1];
            assert!(!inner.contains(&b'\n'), "a request is one line");
        }
        Err(problem) => {
            assert!(!problem.is_empty());
            // The daemon answers with the problem, which the client has to read.
            assert!(problem.len() <= 8 * REQUEST_BYTES_MAX, "{} bytes", problem.len());
        }
    }
}

/// Returns a client, and the daemon's end of its connection.
fn connection() -> (ControlClient, UnixStream) {
    static LISTENER: OnceLock<(UnixListener, PathBuf)> = OnceLock::new();
    let (listener, path) = LISTENER.get_or_init(|| {
        let name = format!("laxity-fuzz-{}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        (UnixListener::bind(&path).expect("a folder for sockets"), path)
    });
    let client = ControlClient::connect(path, PATIENCE).expect("it listens");
    let (daemon, _) = listener.accept().expect("one has connected");
    (client, daemon)
}

fn check_error(error: &ControlError) {
    match error {
        ControlError::Malformed { problem, .. } => assert!(!problem.is_empty()),
        ControlError::Broken { .. } | ControlError::Refused(_) => {}
        other => panic!("all bytes were there: {other}"),
    }
    let text = error.to_string();
    assert!(text.starts_with("the connection to laxityd") || text.starts_with("laxityd"));
}

/// Checks that an answer is written and read back as itself, as `--json` shows it.
fn check_written(answer: &Response) {
    let read = |line: &[u8]| serde_json::from_slice::<Envelope<Response>>(line);
    let once = line(answer);
    let again = read(&once).expect("what was read can be written").body;
    // A decimal fraction may differ in its last digit.
    let without_loads = |mut answer: Response| {
        if let Response::Status(status) = &mut answer {
            status.ports.iter_mut().for_each(|port| port.load = 0.0);
        }
        answer
    };
    assert_eq!(without_loads(again), without_loads(answer.clone()));
}

fn check_words(told: &Explanation, status: &Status) {
    let reports = FlowReports::of(told, status);
    assert_eq!(reports.flows.len(), told.flows.len());
    for report in &reports.flows {
        assert!(!report.text.is_empty() && report.text.iter().all(|words| !words.is_empty()));
    }
    serde_json::to_vec(&reports).expect("plain data");
}

/// Reads up to three answers, and puts an explanation into words.
fn answers(mut input: Input<'_>) {
    let (mut client, mut daemon) = connection();
    let mut asked = Vec::new();
    while !input.is_empty() && asked.len() < 3 {
        let which = input.byte() % 4;
        daemon.write_all(input.packet()).expect("less than a socket's buffer");
        let _ = daemon.write_all(b"\n");
        asked.push(which);
    }
    daemon.shutdown(Shutdown::Write).expect("it is open");
    let (mut status, mut told) = (Status::default(), Explanation::default());
    for which in asked {
        let answer = match which {
            0 => client.status().map(|it| {
                status = it;
                Response::Status(Box::new(status.clone()))
            }),
            1 => client.explain(FlowQuery::default()).map(|it| {
                told = it;
                Response::Explanation(Box::new(told.clone()))
            }),
            2 => client.trace_read().map(|it| Response::Trace(Box::new(it))),
            _ => client.call(&Request::Reload),
        };
        match answer {
            Ok(answer) => check_written(&answer),
            Err(error) => check_error(&error),
        }
    }
    check_words(&told, &status);
}

/// Parses the conditions of both pages.
fn conditions(query: &str) {
    if let Some(wanted) = laxity_daemon::web::wanted(query) {
        let FlowQuery { flow, request, batch, pid } = wanted;
        let pid = pid.map(u64::from);
        let named = [("flow", flow), ("request", request), ("batch", batch), ("pid", pid)];
        let given = named.iter().filter_map(|(name, value)| Some(format!("{name}={}", (*value)?)));
        let again = given.collect::<Vec<String>>().join("&");
        assert_eq!(laxity_daemon::web::wanted(&again), Some(wanted));
    }
    if let Some(wanted) = laxity_coordinator::web::wanted(query) {
        assert!(query.contains("batch="));
        let tenant: String = wanted.tenant.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let again = format!("batch={}&tenant={tenant}", wanted.batch);
        assert_eq!(laxity_coordinator::web::wanted(&again), Some(wanted));
    }
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => request(input.take(usize::MAX)),
        1 => conditions(&String::from_utf8_lossy(input.take(usize::MAX))),
        _ => answers(input),
    }
}

fn explained() -> Explanation {
    let flow = TracedFlow {
        flow: 9 << 50,
        pid: 12,
        nic: 0,
        ingress: false,
        stage: "p2d".into(),
        layer: 3,
        batch: 7,
        request: 8,
        bytes: 1 << 30,
        deadline_ns: 5_000_000,
        standing: SubmitOutcome::BehindOthers,
        permitted: 0,
        level: 2,
        in_flight_bytes: 1 << 20,
        window_bytes: 1 << 22,
        ahead: 4,
    };
    let wait = FlowWait { obstacle: "window".into(), rule: "laxity".into(), ..FlowWait::default() };
    let flow = |number, wait| ExplainedFlow {
        flow: TracedFlow { flow: number, ..flow.clone() },
        client: 1,
        trace_id: String::new(),
        completed_bytes: 0,
        since_ns: 1,
        wait,
    };
    Explanation { now_ns: 9_000_000, flows: vec![flow(1, Some(wait)), flow(2, None)], count: 2 }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let status: Status =
        serde_json::from_str(include_str!("../../cli/src/host/overview/fixtures/eight_nics.json"))
            .expect("a status");
    // The file is larger than an input of the fuzzer.
    let ports = status.ports.into_iter().take(1).collect();
    let clients = status.clients.into_iter().take(1).collect();
    let status = Status { ports, clients, ..status };
    let told = explained();
    let submitted = TraceKind::Submitted(told.flows[0].flow.clone());
    let events = vec![TraceEvent { at_ns: 5, what: submitted }];
    let page = TracePage { events, ..TracePage::default() };
    let requests = [
        Request::Status,
        Request::Bypass { on: true },
        Request::SetMode { mode: "observe".into() },
        Request::TraceStart { seconds: 10, events: 1000, attended: true },
        Request::Explain(FlowQuery { pid: Some(12), ..FlowQuery::default() }),
    ];
    let with = |kind: u8, rest: &[u8]| [&[kind], rest].concat();
    let mut seeds: Vec<Vec<u8>> = requests.iter().map(|request| with(0, &line(request))).collect();
    seeds.push(with(0, format!("{{\"v\":{},\"op\":\"status\"}}", VERSION + 1).as_bytes()));
    seeds.push(with(1, b"flow=1&request=2&batch=3&pid=4"));
    seeds.push(with(1, b"batch=3&tenant=a%20b"));
    let answer = |parts: &[(u8, Response)]| {
        let mut seed = vec![2];
        for (which, response) in parts {
            seed.push(*which);
            put_packet(&mut seed, &line(response));
        }
        seed
    };
    let status = (0, Response::Status(Box::new(status)));
    let told = (1, Response::Explanation(Box::new(told)));
    seeds.push(answer(&[status, told.clone()]));
    seeds.push(answer(&[told, (2, Response::Trace(Box::new(page)))]));
    let done = Response::done("read again");
    seeds.push(answer(&[(3, done), (3, Response::error("no such policy"))]));
    seeds
}
