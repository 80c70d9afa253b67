//! Sends spans to an OpenTelemetry collector: OTLP over HTTP with JSON, one POST for each part of
//! the spans (opentelemetry-proto, `docs/specification.md`, "OTLP/HTTP").
//!
//! A collector refuses bodies above 20 MiB by default, so a long trace goes in parts. Neither TLS
//! nor credentials are supported: a collector on the host adds both.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;

use crate::cluster::tables::clean;
use crate::scrape;

const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of spans in one POST. A span has up to a few kilobytes.
const SPANS_MAX: usize = 2000;
/// Longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 4096;
/// The path that OTLP adds to the address of a collector.
const PATH: &str = "/v1/traces";

/// Why a collector did not accept all spans.
#[derive(Debug, Error)]
pub(crate) enum CollectorError {
    #[error(
        "cannot reach the collector: {0}; does it listen there for OTLP over HTTP (port 4318)? \
         `--otlp FILE` writes a file instead"
    )]
    Unreachable(String),
    #[error(
        "the collector at {url} answered `{said}`; its log may say why. `--otlp FILE` writes a \
         file instead"
    )]
    Refused { url: String, said: String },
    #[error("the collector at {url} refused {spans} spans: `{why}`. `--otlp FILE` writes a file")]
    Partial { url: String, spans: u64, why: String },
}

/// The target of spans: a file, or the URL of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SpansTarget {
    File(PathBuf),
    /// The URL of a collector's traces.
    Collector(String),
}

impl FromStr for SpansTarget {
    type Err = String;

    fn from_str(named: &str) -> Result<Self, String> {
        if named.starts_with("https://") {
            return Err("TLS is not supported here: name a collector on this host by http://, \
                        which passes spans on, or a file"
                .to_owned());
        }
        if !named.starts_with("http://") {
            return Ok(Self::File(named.into()));
        }
        let base = named.trim_end_matches('/');
        let base = base.strip_suffix(PATH).unwrap_or(base);
        Ok(Self::Collector(format!("{base}{PATH}")))
    }
}

impl fmt::Display for SpansTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Collector(url) => url.fmt(f),
        }
    }
}

impl SpansTarget {
    /// Reports whether it is this file.
    pub(super) fn is(&self, file: &Path) -> bool {
        matches!(self, Self::File(path) if path == file)
    }
}

fn connect(url: &str) -> Result<(SocketAddr, TcpStream), CollectorError> {
    let open = || {
        let address = scrape::address(url)?;
        let stream = TcpStream::connect_timeout(&address, PATIENCE)
            .map_err(|error| format!("{address}: {error}"))?;
        Ok((address, stream))
    };
    open().map_err(CollectorError::Unreachable)
}

/// Checks whether something listens at `url`.
///
/// # Errors
/// [`CollectorError::Unreachable`].
pub(super) fn check(url: &str) -> Result<(), CollectorError> {
    connect(url).map(drop)
}

/// Sends the spans of a document of [`super::otlp::spans`]. Returns how many there were.
///
/// # Errors
/// The collector can't be reached, or refused some of the spans.
pub(super) fn send(url: &str, document: &Value) -> Result<usize, CollectorError> {
    const SPANS: &str = "/resourceSpans/0/scopeSpans/0/spans";
    let none = Vec::new();
    let spans = document.pointer(SPANS).and_then(Value::as_array).unwrap_or(&none);
    let mut frame = document.clone();
    for part in spans.chunks(SPANS_MAX) {
        if let Some(place) = frame.pointer_mut(SPANS) {
            *place = json!(part);
        }
        post(url, &frame.to_string())?;
    }
    Ok(spans.len())
}

fn post(url: &str, body: &str) -> Result<(), CollectorError> {
    let (address, mut stream) = connect(url)?;
    let rest = url.strip_prefix("http://").unwrap_or(url);
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let head = format!(
        "POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut talk = || {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // A collector that refuses the request may answer and close before it has read all of it.
        let written =
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let mut answer = Vec::new();
        let read = (&mut stream).take(ANSWER_BYTES_MAX).read_to_end(&mut answer);
        if answer.is_empty() {
            written?;
            read?;
        }
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = talk()
        .map_err(|error: io::Error| CollectorError::Unreachable(format!("{address}: {error}")))?;
    let said = answer.lines().next().unwrap_or_default();
    let url = url.to_owned();
    if !said.split(' ').nth(1).is_some_and(|code| code.starts_with('2')) {
        return Err(CollectorError::Refused { url, said: clean(said) });
    }
    match refused_spans(&answer) {
        (0, _) => Ok(()),
        (spans, why) => Err(CollectorError::Partial { url, spans, why: clean(&why) }),
    }
}

/// Returns how many spans an answer refuses, and why (OTLP/HTTP, *Partial Success*). The body may
/// be chunked, so its JSON is looked for.
fn refused_spans(answer: &str) -> (u64, String) {
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let json = body.find('{').zip(body.rfind('}')).and_then(|(first, last)| body.get(first..=last));
    let told: Value = json.and_then(|it| serde_json::from_str(it).ok()).unwrap_or_default();
    let told = &told["partialSuccess"];
    // JSON has 64-bit integers as strings in Protobuf's mapping.
    let count = &told["rejectedSpans"];
    let spans = count.as_u64().or_else(|| count.as_str()?.parse().ok()).unwrap_or(0);
    (spans, told["errorMessage"].as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::net::TcpListener;

    use super::*;

    /// Answers each of `count` requests with `status`. Returns the URL and the requests.
    fn collector(
        status: &'static str,
        count: usize,
    ) -> (String, std::thread::JoinHandle<Vec<(String, Value)>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let serve = move || {
            let one = |_| {
                let (stream, _) = listener.accept().expect("a client");
                let mut stream = BufReader::new(stream);
                let (mut head, mut length) = (String::new(), 0);
                while !head.ends_with("\r\n\r\n") {
                    let mut line = String::new();
                    stream.read_line(&mut line).expect("a line");
                    if let Some(bytes) = line.strip_prefix("Content-Length: ") {
                        length = bytes.trim().parse().expect("a number");
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).expect("the body");
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}");
                stream.get_mut().write_all(answer.as_bytes()).expect("a reader");
                (head, serde_json::from_slice(&body).expect("JSON"))
            };
            (0..count).map(one).collect()
        };
        (url, std::thread::spawn(serve))
    }

    fn document(spans: usize) -> Value {
        let spans: Vec<Value> = (0..spans).map(|n| json!({"spanId": n})).collect();
        json!({"resourceSpans": [{"resource": "kept", "scopeSpans": [{"spans": spans}]}]})
    }

    #[test]
    fn all_spans_reach_the_collector_in_parts_that_it_takes() {
        let (url, heard) = collector("200 OK", 2);
        let Ok(SpansTarget::Collector(url)) = url.parse() else { panic!("{url}") };
        assert_eq!(send(&url, &document(SPANS_MAX + 1)).expect("it takes them"), SPANS_MAX + 1);
        let heard = heard.join().expect("it heard");
        let mut ids = Vec::new();
        for (head, body) in &heard {
            assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
            assert!(head.contains("Content-Type: application/json\r\n"), "{head}");
            assert_eq!(body["resourceSpans"][0]["resource"], "kept");
            let spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array();
            ids.extend(spans.expect("spans").iter().filter_map(|span| span["spanId"].as_u64()));
        }
        assert!(ids.into_iter().eq(0..=SPANS_MAX as u64));
    }

    #[test]
    fn a_collector_that_refuses_or_is_not_there_is_said_with_what_to_do() {
        let (url, heard) = collector("415 Unsupported Media Type", 1);
        let refused = send(&url, &document(1)).expect_err("it refuses").to_string();
        assert!(refused.contains("415 Unsupported Media Type"), "{refused}");
        heard.join().expect("it heard");
        let gone = check(&url).expect_err("it has ended").to_string();
        assert!(gone.contains("4318") && gone.contains("--otlp FILE"), "{gone}");
    }

    #[test]
    fn spans_that_a_collector_did_not_take_are_counted() {
        let answer = |body: &str| refused_spans(&format!("HTTP/1.1 200 OK\r\n\r\n{body}"));
        let told = r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}"#;
        assert_eq!(answer(told), (3, "too old".to_owned()));
        assert_eq!(answer(&format!("43\r\n{told}\r\n0\r\n\r\n")).0, 3);
        for whole in ["{}", "", r#"{"partialSuccess":{}}"#, "}{"] {
            assert_eq!(answer(whole).0, 0, "{whole}");
        }
    }

    #[test]
    fn a_url_is_a_collector_and_anything_else_a_file() {
        let parsed = |named: &str| named.parse::<SpansTarget>().map(|target| target.to_string());
        let url = || Ok("http://c:4318/v1/traces".to_owned());
        for named in ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"] {
            assert_eq!(parsed(named), url());
        }
        assert_eq!("a.json".parse(), Ok(SpansTarget::File("a.json".into())));
        assert!(parsed("https://c:4318").is_err_and(|why| why.contains("http://")));
    }
}
