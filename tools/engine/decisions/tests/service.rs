//! A real service over HTTP, good and bad, and a replica that asks it: what comes of each question,
//! and that the replica waits for none.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use laxity_decisions::{Carrier, Client, Counts, Endpoint, Failure};
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::meta::external::{Invalid, Question};
use laxity_requests::hmas::meta::{External, Guards, UNANSWERED};
use laxity_requests::hmas::perception::{Paced, Unknown};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Measured;
use laxity_requests::hmas::qos::Long;
use laxity_requests::hmas::{Agent, Config, Journal};
use laxity_requests::iteration::{Event, Iteration as _};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use serde_json::{Value, json};

const POOL: [Kind; 3] = [Kind::Fcfs, Kind::Edf, Kind::TwoLane];

/// What a service does with a question.
#[derive(Clone)]
enum Does {
    /// Says this, as a model would.
    Says(&'static str),
    /// Answers with this status and text.
    Answers(u16, String),
    /// Says this after a while.
    Waits(Duration, &'static str),
}

/// A chat endpoint on this host, what it was sent, and its thread's end.
struct Service {
    address: SocketAddr,
    sent: Arc<Mutex<Vec<(HeaderMap, Value)>>>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

fn chat(content: &str) -> String {
    json!({ "choices": [{ "message": { "role": "assistant", "content": content } }] }).to_string()
}

impl Service {
    fn start(does: Does) -> Self {
        let sent: Arc<Mutex<Vec<(HeaderMap, Value)>>> = Arc::default();
        let kept = Arc::clone(&sent);
        let answer = move |headers: HeaderMap, body: String| {
            let (does, kept) = (does.clone(), Arc::clone(&kept));
            async move {
                let body = serde_json::from_str(&body).expect("JSON");
                kept.lock().expect("not poisoned").push((headers, body));
                match does {
                    Does::Says(content) => (StatusCode::OK, chat(content)),
                    Does::Answers(status, text) => {
                        (StatusCode::from_u16(status).expect("a status"), text)
                    }
                    Does::Waits(time, content) => {
                        tokio::time::sleep(time).await;
                        (StatusCode::OK, chat(content))
                    }
                }
            }
        };
        let app = Router::new().route("/v1/chat/completions", post(answer));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (told, address) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
                let listener = listener.expect("a port");
                told.send(listener.local_addr().expect("bound"))
                    .expect("asked for");
                tokio::select! {
                    _ = stopped => {}
                    served = axum::serve(listener, app) => served.expect("it serves"),
                }
            });
        });
        Self {
            address: address.recv().expect("it is bound"),
            sent,
            _stop: stop,
        }
    }

    fn client(&self, timeout: Duration) -> Client {
        let url = format!("http://{}/v1", self.address);
        Client::new(Endpoint::new(&url, "some-model", timeout).expect("an address"))
    }

    fn asked(&self) -> usize {
        self.sent.lock().expect("not poisoned").len()
    }
}

fn question() -> Question {
    Question {
        number: 1,
        current: Kind::Fcfs,
        pool: POOL.to_vec(),
        view: Long::default(),
    }
}

/// Long enough for a machine that is busy, where an answer is to come.
const AMPLE: Duration = Duration::from_secs(60);

fn ask(does: Does, timeout: Duration) -> (Result<String, Failure>, Counts) {
    let service = Service::start(does);
    let client = service.client(timeout);
    let came = client.ask_blocking(&question());
    (came, client.counts())
}

fn counts(asked: u64, with: impl FnOnce(&mut Counts)) -> Counts {
    let mut counts = Counts {
        asked,
        ..Counts::default()
    };
    with(&mut counts);
    counts
}

#[test]
fn a_good_answer_is_given_and_the_question_is_what_an_openai_endpoint_takes() {
    let service = Service::start(Does::Says(
        r#"{"policy": "two_lane", "lane_split_ms": 700}"#,
    ));
    let url = format!("http://{}", service.address);
    let endpoint = Endpoint::new(&url, "some-model", AMPLE).expect("an address");
    let client = Client::new(endpoint.with_key("sk-7").expect("a header"));
    let text = client.ask_blocking(&question()).expect("an answer");
    assert_eq!(text, r#"{"policy": "two_lane", "lane_split_ms": 700}"#);
    assert_eq!(client.counts(), counts(1, |c| c.answered = 1));
    let sent = service.sent.lock().expect("not poisoned");
    let (headers, body) = &sent[0];
    assert_eq!(headers["authorization"], "Bearer sk-7");
    assert_eq!(headers["content-type"], "application/json");
    assert_eq!(headers["host"], service.address.to_string());
    assert_eq!(body["model"], "some-model");
    let form = &body["response_format"]["json_schema"];
    assert_eq!(form["strict"], true);
    let names = &form["schema"]["properties"]["policy"]["enum"];
    assert_eq!(*names, json!(["fcfs", "edf", "two_lane"]));
}

#[test]
fn an_answer_that_is_late_is_not_waited_for() {
    let begun = Instant::now();
    let late = Does::Waits(AMPLE, r#"{"policy": "edf"}"#);
    let (came, counted) = ask(late, Duration::from_millis(150));
    assert_eq!(came, Err(Failure::Late(Duration::from_millis(150))));
    assert_eq!(counted, counts(1, |c| c.late = 1));
    assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
}

#[test]
fn garbage_is_no_decision() {
    for says in [
        "edf",
        "",
        "{\"policy\": 3}",
        "I think {\"policy\": \"edf\"}",
    ] {
        let (came, counted) = ask(Does::Says(says), AMPLE);
        let is_form = matches!(came, Err(Failure::Invalid(Invalid::Form(_))));
        assert!(is_form, "{says}: {came:?}");
        assert_eq!(counted, counts(1, |c| c.invalid = 1));
    }
    for text in ["<html>", "{}", r#"{"choices": []}"#, "\u{0}"] {
        let (came, _) = ask(Does::Answers(200, text.to_owned()), AMPLE);
        let is_endpoint = matches!(came, Err(Failure::Invalid(Invalid::Endpoint(_))));
        assert!(is_endpoint, "{text}: {came:?}");
    }
}

#[test]
fn a_policy_that_does_not_exist_or_is_not_in_the_pool_is_no_decision() {
    let (came, counted) = ask(Does::Says(r#"{"policy": "round_robin"}"#), AMPLE);
    let why = came.expect_err("there is none").to_string();
    assert!(why.contains("round_robin"), "{why}");
    assert_eq!(counted, counts(1, |c| c.invalid = 1));
    let (came, _) = ask(Does::Says(r#"{"policy": "mlfq"}"#), AMPLE);
    assert_eq!(came, Err(Failure::Invalid(Invalid::Pool("mlfq"))));
}

#[test]
fn an_error_of_the_service_is_told_with_what_it_says() {
    let error = r#"{"error": {"message": "the model some-model does not exist"}}"#;
    for status in [400, 404, 500, 503] {
        let (came, counted) = ask(Does::Answers(status, error.to_owned()), AMPLE);
        let says = error.to_owned();
        assert_eq!(came, Err(Failure::Refused { status, says }));
        assert_eq!(counted, counts(1, |c| c.refused = 1));
    }
}

#[test]
fn nothing_that_a_service_says_steers_a_terminal() {
    let error = "{\n\"why\": \"\u{1b}[2Jno é\u{9b}1m\u{202e}\"}";
    let (came, _) = ask(Does::Answers(503, error.to_owned()), AMPLE);
    let says = r#"{\n"why": "\u{1b}[2Jno é\u{9b}1m\u{202e}"}"#.to_owned();
    assert_eq!(came, Err(Failure::Refused { status: 503, says }));
    let (came, counted) = ask(Does::Says(r#"{"policy": "\u001b[2J"}"#), AMPLE);
    let why = came.expect_err("there is no such policy").to_string();
    assert!(why.contains(r"\u{1b}[2J"), "{why}");
    assert!(!why.contains(char::is_control), "{why}");
    assert_eq!(counted, counts(1, |c| c.invalid = 1));
}

#[test]
fn an_answer_without_an_end_is_not_read_to_its_end() {
    let (came, counted) = ask(Does::Answers(200, "x".repeat(1 << 20)), AMPLE);
    assert!(matches!(came, Err(Failure::TooLong(_))), "{came:?}");
    assert_eq!(counted, counts(1, |c| c.invalid = 1));
}

#[test]
fn a_service_that_is_not_there_is_told_by_its_address() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", gone.local_addr().expect("bound"));
    drop(gone);
    let client = Client::new(Endpoint::new(&url, "m", AMPLE).expect("an address"));
    let why = client
        .ask_blocking(&question())
        .expect_err("nobody is there");
    assert!(why.to_string().contains(&url), "{why}");
    assert_eq!(client.counts(), counts(1, |c| c.unreachable = 1));
}

const EVERY: Span = Span::from_millis(2_000);

/// A replica whose controller asks a service, with requests that are late: the rules would say EDF.
struct Asking {
    replica: Replica,
    journal: Journal,
    now: Time,
    next: u64,
    client: Arc<Client>,
    _carrier: Carrier,
}

impl Asking {
    fn new(client: Client) -> Self {
        let selector = External::new(&Kind::ALL);
        let client = Arc::new(client);
        let carrier = Carrier::start(Arc::clone(&client), selector.mailbox()).expect("a thread");
        let config = Config {
            guards: Guards {
                every: EVERY,
                bypass: None,
                ..Guards::default()
            },
            ..Config::default()
        };
        let perception = Box::new(Paced::new(Unknown, Span::ZERO));
        let cognition = Cognition::new(perception, Box::new(Measured::default()));
        let agent = Agent::new(config, cognition, Box::new(selector));
        let journal = agent.journal();
        Self {
            replica: Replica::new(Pool::new(1_000, 16), 10, Box::new(agent)),
            journal,
            now: Time::ZERO,
            next: 0,
            client,
            _carrier: carrier,
        }
    }

    /// A request of one token that is late whatever happens, and an iteration of 50 ms.
    fn step(&mut self) {
        let id = RequestId(self.next);
        self.next += 1;
        self.replica.handle(
            self.now,
            &Event::Arrived(Spec {
                id,
                arrival: self.now,
                prompt: 16,
                output_max: 4,
                ready: 0,
                generated: 0,
                class: ClassId(0),
                application: ApplicationId(0),
                importance: Importance::Low,
                slo: Slo::Interactive { ttft: 1, tbt: 1 },
            }),
        );
        let plan = self.replica.plan(self.now).expect("somebody waits");
        let took = Span::from_millis(50);
        self.now = self.now + took;
        let last = plan.chunks.iter().filter(|chunk| chunk.last);
        let finished: Vec<RequestId> = last.map(|chunk| chunk.request).collect();
        assert!(finished.contains(&id), "nobody waits for a decision");
        self.replica
            .handle(self.now, &Event::Done { took, finished });
    }

    /// Steps so long in the replica's time; the clock of the machine goes on only where it is told
    /// to.
    fn run(&mut self, span: Span) {
        let until = self.now + span;
        while self.now < until {
            self.step();
        }
    }

    /// Until the service answered so often, or nothing came of it.
    fn answered(&self, count: u64) {
        let begun = Instant::now();
        while self.client.counts().asked < count {
            assert!(begun.elapsed() < AMPLE, "{}", self.client.counts());
            std::thread::sleep(Duration::from_millis(2));
        }
        // It is counted just before it is put back.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The first decision is due after `EVERY`, and once a second is looked.
const FIRST: Span = Span::from_millis(3_500);

#[test]
fn a_replica_takes_up_what_the_service_says() {
    let service = Service::start(Does::Says(r#"{"policy": "wfq"}"#));
    let mut asking = Asking::new(service.client(AMPLE));
    asking.run(FIRST);
    asking.answered(1);
    asking.run(Span::from_millis(1_200));
    let log = asking.journal.read();
    assert_eq!(log.switches.len(), 1, "{:?}", log.switches);
    assert_eq!(log.switches[0].to, Kind::Wfq);
    assert!(
        log.asked >= 1 && log.rejected.is_empty(),
        "{:?}",
        log.rejected
    );
}

#[test]
fn a_replica_that_gets_no_answer_goes_on_and_goes_by_its_rules() {
    let never = Service::start(Does::Waits(AMPLE, r#"{"policy": "wfq"}"#));
    let mut asking = Asking::new(never.client(AMPLE));
    let begun = Instant::now();
    asking.run(Span::from_millis(8_000));
    assert!(
        begun.elapsed() < AMPLE / 2,
        "it waited: {:?}",
        begun.elapsed()
    );
    let log = asking.journal.read();
    assert!(log.rejected.iter().all(|why| why == UNANSWERED));
    assert!(!log.rejected.is_empty());
    assert_eq!(
        log.switches.first().map(|s| s.to),
        Some(Kind::Edf),
        "{log:?}"
    );
    assert!(never.asked() <= 1, "one question is under way at a time");
}

#[test]
fn a_replica_goes_by_its_rules_where_the_service_says_nonsense_or_fails() {
    let nonsense = Does::Says(r#"{"policy": "fastest"}"#);
    let broken = Does::Answers(500, "out of memory".to_owned());
    for (does, told) in [(nonsense, "fastest"), (broken, "500: out of memory")] {
        let service = Service::start(does);
        let mut asking = Asking::new(service.client(AMPLE));
        asking.run(FIRST);
        asking.answered(1);
        asking.run(Span::from_millis(1_200));
        let log = asking.journal.read();
        assert!(log.rejected[0].contains(told), "{:?}", log.rejected);
        assert_eq!(
            log.switches.first().map(|s| s.to),
            Some(Kind::Edf),
            "{log:?}"
        );
    }
}
