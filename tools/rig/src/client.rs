//! Clients of an endpoint. A client is a process in the namespace of a host. It reads one job from
//! standard input and writes its answers as lines.
//!
//! Requests are streamed and greedy, have the header `x-llm-d-slo-ttft-ms`, and use one connection
//! each. A request is sent at its arrival time, however many are active (an open loop), or else
//! after the answer to the previous one. The client measures TTFT from the arrival time.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use laxity_shm::sleep::now_ns;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::error::LabError;
use crate::message;

pub const ENDPOINT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8000);

/// Pause between two attempts to reach an endpoint that is not up yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Gives every socket of this host a buffer of `bytes` in each direction, unless the socket sets
/// its own. Otherwise TCP's auto-tuning would put megabytes into the fabric's queues. Returns
/// whether the kernel accepted the value.
fn bound_buffers(bytes: u32) -> bool {
    let value = format!("4096 {bytes} {bytes}");
    let set = |name| std::fs::write(Path::new("/proc/sys/net/ipv4").join(name), &value);
    ["tcp_wmem", "tcp_rmem"].iter().all(|name| set(name).is_ok())
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    Buffers(u32),
    /// Wait until the endpoint answers.
    Await,
    Metrics,
    Ask {
        questions: Vec<Question>,
        /// Time zero, as CLOCK_MONOTONIC in ns. `None` sends each request after the answer to the
        /// previous one.
        begin_ns: Option<u64>,
    },
}

impl Job {
    pub const fn answers(&self) -> usize {
        match self {
            Self::Ask { questions, .. } => questions.len(),
            Self::Buffers(_) | Self::Await | Self::Metrics => 1,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Question {
    pub id: u64,
    /// Arrival time, in ns after time zero.
    pub at_ns: u64,
    pub prompt: Vec<u32>,
    pub output_tokens: u32,
    pub ttft_ms: f64,
    /// The prefill host that a router chose, if any.
    pub prefill: Option<usize>,
    /// Whether the decode host has to compute the prompt, too. vLLM's front door understands this.
    #[serde(default)]
    pub local: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub id: u64,
    pub begin_ns: u64,
    pub first_ns: Option<u64>,
    pub end_ns: u64,
    pub tokens: Vec<u32>,
    /// The error, if the request failed.
    pub error: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Said {
    /// Whether the kernel accepted the buffer size.
    Buffers(bool),
    There,
    Metrics(String),
    /// A request received its first token. The run may end before the request does.
    First {
        id: u64,
        first_ns: u64,
    },
    Answered(Answer),
    Failed(String),
}

/// *client*: does one job. This process is in the host's namespace already.
pub fn run() -> Result<(), LabError> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(LabError::system("reading the job"))?;
    let job: Job = serde_json::from_str(&line)
        .map_err(|error| LabError::unreadable("reading the job", error))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LabError::system("starting the client's runtime"))?;
    let outcome = match job {
        Job::Buffers(bytes) => {
            say(&Said::Buffers(bound_buffers(bytes)));
            Ok(())
        }
        Job::Await => runtime.block_on(there()),
        Job::Metrics => runtime.block_on(metrics()),
        Job::Ask { questions, begin_ns } => runtime.block_on(ask_all(questions, begin_ns)),
    };
    if let Err(error) = outcome {
        say(&Said::Failed(error.to_string()));
    }
    Ok(())
}

fn say(said: &Said) {
    // If the write fails, the controller is gone and this process ends soon, too.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(&message::line(said)).and_then(|()| out.flush());
}

/// The reason why a request to the endpoint failed. The texts contain their causes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("connecting to {endpoint}: {cause}")]
    Connect { endpoint: SocketAddr, cause: std::io::Error },
    #[error("making the request: {0}")]
    Make(hyper::http::Error),
    #[error("{}{}", .0, .0.source().map_or_else(String::new, |cause| format!(": {cause}")))]
    Http(hyper::Error),
    #[error("{status}: {said}")]
    Refused { status: StatusCode, said: String },
    #[error("{0}")]
    Event(String),
    #[error("the stream ended without [DONE]")]
    NotDone,
    #[error("a client's task ended early: {0}")]
    Task(tokio::task::JoinError),
}

async fn send(
    endpoint: SocketAddr,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, RequestError> {
    let failed = |cause| RequestError::Connect { endpoint, cause };
    let stream = TcpStream::connect(endpoint).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(RequestError::Http)?;
    // An end of the connection also ends the response, where the reader notices it.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(RequestError::Http)
}

fn request(endpoint: SocketAddr, method: Method, path: &str) -> hyper::http::request::Builder {
    Request::builder().method(method).uri(path).header(header::HOST, endpoint.to_string())
}

async fn text_of(body: Incoming) -> Result<String, RequestError> {
    let body = body.collect().await.map_err(RequestError::Http)?.to_bytes();
    Ok(String::from_utf8_lossy(&body).into_owned())
}

pub(crate) async fn get(endpoint: SocketAddr, path: &str) -> Result<String, RequestError> {
    let request = request(endpoint, Method::GET, path);
    let request = request.body(Full::default()).map_err(RequestError::Make)?;
    let response = send(endpoint, request).await?;
    let status = response.status();
    let said = text_of(response.into_body()).await?;
    if status != StatusCode::OK {
        return Err(RequestError::Refused { status, said });
    }
    Ok(said)
}

async fn there() -> Result<(), RequestError> {
    while get(ENDPOINT, "/health").await.is_err() {
        sleep(LOOK_EVERY).await;
    }
    say(&Said::There);
    Ok(())
}

async fn metrics() -> Result<(), RequestError> {
    say(&Said::Metrics(get(ENDPOINT, "/metrics").await?));
    Ok(())
}

async fn ask_all(questions: Vec<Question>, begin_ns: Option<u64>) -> Result<(), RequestError> {
    let Some(begin_ns) = begin_ns else {
        for question in questions {
            say(&Said::Answered(ask(ENDPOINT, question, now_ns(), say_first).await));
        }
        return Ok(());
    };
    let mut tasks = tokio::task::JoinSet::new();
    for question in questions {
        let due_ns = begin_ns + question.at_ns;
        tasks.spawn(async move {
            let now = now_ns();
            sleep(Duration::from_nanos(due_ns.saturating_sub(now))).await;
            say(&Said::Answered(ask(ENDPOINT, question, due_ns, say_first).await));
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(RequestError::Task)?;
    }
    Ok(())
}

fn say_first(id: u64, first_ns: u64) {
    say(&Said::First { id, first_ns });
}

/// Sends a request that arrived at `begin_ns`, and returns its answer. `first` gets the number of
/// the request and the time of its first token.
pub(crate) async fn ask(
    endpoint: SocketAddr,
    question: Question,
    begin_ns: u64,
    first: fn(u64, u64),
) -> Answer {
    let mut answer = Answer { id: question.id, begin_ns, ..Answer::default() };
    let wanted = question.output_tokens as usize;
    if let Err(error) = stream(endpoint, question, &mut answer, first).await {
        answer.error = Some(error.to_string());
    } else if answer.tokens.len() != wanted {
        answer.error =
            Some(format!("{} tokens came, and {wanted} were asked for", answer.tokens.len()));
    }
    answer.end_ns = now_ns();
    answer
}

async fn stream(
    endpoint: SocketAddr,
    question: Question,
    answer: &mut Answer,
    first: fn(u64, u64),
) -> Result<(), RequestError> {
    let body = json!({
        "prompt": question.prompt,
        "max_tokens": question.output_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "return_token_ids": true,
    });
    let request = request(endpoint, Method::POST, "/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-llm-d-slo-ttft-ms", format!("{:.3}", question.ttft_ms));
    let request = match question.prefill {
        _ if question.local => request.header("x-laxity-prefill", "local"),
        Some(host) => request.header("x-laxity-prefill", host),
        None => request,
    };
    let request = request.body(Full::from(body.to_string())).map_err(RequestError::Make)?;
    let response = send(endpoint, request).await?;
    let status = response.status();
    let mut body = response.into_body();
    if status != StatusCode::OK {
        return Err(RequestError::Refused { status, said: text_of(body).await? });
    }
    let mut events = Events::default();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.map_err(RequestError::Http)?.into_data() else { continue };
        for event in events.push(&bytes) {
            let tokens = tokens(&event)?;
            if !tokens.is_empty() && answer.first_ns.is_none() {
                let first_ns = now_ns();
                answer.first_ns = Some(first_ns);
                first(answer.id, first_ns);
            }
            answer.tokens.extend(tokens);
        }
    }
    if !events.done {
        return Err(RequestError::NotDone);
    }
    Ok(())
}

/// Returns the tokens of a server-sent event.
fn tokens(event: &str) -> Result<Vec<u32>, RequestError> {
    let event: Value = serde_json::from_str(event)
        .map_err(|error| RequestError::Event(format!("an event that is no JSON: {error}")))?;
    if let Some(error) = event.get("error") {
        let message = error["message"].as_str().unwrap_or("an error");
        return Err(RequestError::Event(message.to_owned()));
    }
    let tokens = event["choices"][0]["token_ids"].as_array();
    let number = |token: &Value| token.as_u64().and_then(|token| u32::try_from(token).ok());
    let missing = || RequestError::Event("a token that is no number".to_owned());
    tokens.into_iter().flatten().map(|token| number(token).ok_or_else(missing)).collect()
}

/// A parser of server-sent events that arrive in parts.
#[derive(Debug, Default)]
struct Events {
    rest: Vec<u8>,
    done: bool,
}

impl Events {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.rest.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = self.rest.drain(..end + 2).take(end).collect();
            let text = String::from_utf8_lossy(&event);
            match text.strip_prefix("data: ") {
                Some("[DONE]") => self.done = true,
                Some(data) => events.push(data.to_owned()),
                None => {}
            }
        }
        events
    }
}

pub fn different(expected: &BTreeMap<u64, &[u32]>, answers: &[Answer]) -> Vec<u64> {
    complete(answers)
        .filter(|(id, tokens)| expected.get(id).is_some_and(|expected| expected != tokens))
        .map(|(id, _)| id)
        .collect()
}

/// Returns the answers without an error, with the numbers of their requests.
pub fn complete(answers: &[Answer]) -> impl Iterator<Item = (u64, &[u32])> {
    answers
        .iter()
        .filter(|answer| answer.error.is_none())
        .map(|answer| (answer.id, &answer.tokens[..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_cut_wherever_they_are_cut_on_their_way() {
        let text = b"data: {\"choices\":[{\"token_ids\":[1,2]}]}\n\ndata: \
            {\"choices\":[{\"token_ids\":[3]}]}\n\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let mut events = Events::default();
            let all: Vec<u32> = text
                .chunks(size)
                .flat_map(|bytes| events.push(bytes))
                .flat_map(|event| tokens(&event).unwrap())
                .collect();
            assert_eq!(all, [1, 2, 3], "cut every {size} bytes");
            assert!(events.done);
        }
        let error = tokens(r#"{"error":{"message":"not now"}}"#).unwrap_err();
        assert_eq!(error.to_string(), "not now");
    }

    #[test]
    fn one_other_token_makes_an_answer_a_different_one() {
        let answer = |id, tokens: &[u32], error: Option<&str>| Answer {
            id,
            tokens: tokens.to_vec(),
            error: error.map(str::to_owned),
            ..Answer::default()
        };
        let reference = BTreeMap::from([(1, &[5, 6][..]), (2, &[7, 8])]);
        let same = [answer(2, &[7, 8], None), answer(1, &[5, 6], None)];
        assert!(different(&reference, &same).is_empty());
        let other = [answer(1, &[5, 9], None), answer(2, &[7], Some("gone"))];
        assert_eq!(different(&reference, &other), [1], "an error is no answer");
    }
}
