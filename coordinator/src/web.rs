//! The coordinator's web page: read-only, on its own port, without content from other sites.
//!
//! * *Untrusted text.* Names of hosts and ports come from daemons. They never become HTML: the page
//!   is three fixed files, data is JSON, and the script sets text only. A Content-Security-Policy
//!   without inline code and with Trusted Types is the second defence.
//! * *Readers* are all who reach the address, so it is loopback unless `insecure` is set. The
//!   `Host` of a request has to be an address, `localhost` or one of `names`. So a foreign site
//!   reads nothing by DNS rebinding.
//! * *Cost.* The coordinator's thread serves the page. So the state is built at most once a second
//!   and within [`SHARE`], explanations have a budget, and connections are limited.

pub mod config;
mod history;
mod state;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{HOST, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode, header};
use laxity_listen::http::{Answer, HttpLimits, HttpListener};
use laxity_wire::v1;
use parking_lot::Mutex;
use serde::Serialize;

use self::history::History;
use crate::pace::Pace;
use crate::shared::Shared;

const PAGE: &str = include_str!("web/page.html");
const STYLE: &str = include_str!("web/page.css");
const SCRIPT: &str = include_str!("web/page.js");

/// Limits of the browsers' connections. A browser whose connection is closed opens a new one.
const LIMITS: HttpLimits = HttpLimits {
    connections_max: 64,
    head_max: Duration::from_secs(10),
    connection_max: Duration::from_secs(120),
    keep_alive: true,
};
/// Shortest time between two builds of the state.
const STATE_AGE_MIN: Duration = Duration::from_secs(1);
/// A build of the state is followed by a pause of this many times its duration.
const SHARE: u32 = 50;
/// Maximum number of explanations per second, for all readers together.
const EXPLAIN_PER_S: u32 = 20;

/// Forbids content from other sites, inline code, text as markup, frames and forms.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; \
img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
require-trusted-types-for 'script'; trusted-types 'none'";

/// Serves the page at `listener` until the task is aborted.
pub(crate) async fn serve(listener: HttpListener, shared: Arc<Shared>) {
    let site = Arc::new(Site {
        names: shared.config().web.names.clone(),
        shared,
        state: Mutex::default(),
        explanations: Mutex::default(),
        history: Mutex::default(),
    });
    let asked = Arc::clone(&site);
    let answer = move |request: &Request<Incoming>| asked.answer(request);
    tokio::join!(listener.serve("the page", LIMITS, answer), sample(site));
}

async fn sample(site: Arc<Site>) {
    let mut ticks = tokio::time::interval(history::EVERY);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let (counters, _) = site.shared.cluster().counters();
        site.history.lock().close(counters.ended);
    }
}

/// The newest state and the instant until which it is used.
#[derive(Default)]
struct Cached {
    json: Bytes,
    until: Option<Instant>,
}

struct Site {
    shared: Arc<Shared>,
    names: Vec<String>,
    state: Mutex<Cached>,
    explanations: Mutex<Pace>,
    history: Mutex<History>,
}

fn answer(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    for (name, value) in [
        ("content-type", kind),
        ("cache-control", "no-store"),
        ("content-security-policy", CONTENT_SECURITY_POLICY),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}

fn json(status: StatusCode, body: &impl Serialize) -> Answer {
    match serde_json::to_vec(body) {
        Ok(bytes) => answer(status, "application/json", bytes),
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn plain(status: StatusCode, text: &str) -> Answer {
    answer(status, "text/plain; charset=utf-8", format!("{text}\n"))
}

fn problem(status: StatusCode, error: &str) -> Answer {
    json(status, &serde_json::json!({ "error": error }))
}

impl Site {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        let host = request.headers().get(HOST).and_then(|it| it.to_str().ok());
        if !host.is_some_and(|host| is_asked_for_by(host, &self.names)) {
            return plain(
                StatusCode::MISDIRECTED_REQUEST,
                "this name is not one of the coordinator's page: ask for its address, or add the \
                 name to web.names",
            );
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "this page only shows");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        let query = request.uri().query().unwrap_or_default();
        match request.uri().path() {
            "/" => answer(StatusCode::OK, "text/html; charset=utf-8", PAGE),
            "/page.css" => answer(StatusCode::OK, "text/css; charset=utf-8", STYLE),
            "/page.js" => answer(StatusCode::OK, "text/javascript; charset=utf-8", SCRIPT),
            "/api/state" => answer(StatusCode::OK, "application/json", self.state()),
            "/api/explain" => self.explain(query),
            _ => plain(StatusCode::NOT_FOUND, "there is nothing here; the page is at /"),
        }
    }

    fn state(&self) -> Bytes {
        let mut cached = self.state.lock();
        let begun = Instant::now();
        if cached.until.is_none_or(|until| begun >= until) {
            let made = state::state(&self.shared, &self.history);
            cached.json = serde_json::to_vec(&made).unwrap_or_default().into();
            let took = begun.elapsed();
            cached.until = Some(begun + STATE_AGE_MIN.max(took * SHARE));
        }
        cached.json.clone()
    }

    fn explain(&self, query: &str) -> Answer {
        let Some(wanted) = wanted(query) else {
            return problem(
                StatusCode::BAD_REQUEST,
                "ask with ?batch=ID, and &tenant=NAME where two tenants use the same id",
            );
        };
        let now = self.shared.now();
        if !self.explanations.lock().admits(now, EXPLAIN_PER_S) {
            return problem(
                StatusCode::TOO_MANY_REQUESTS,
                "too many explanations are asked for; try again in a second",
            );
        }
        let told = self.shared.cluster().explain(now, &wanted);
        match told {
            Ok(told) => json(StatusCode::OK, &told),
            Err(error) => problem(StatusCode::NOT_FOUND, &error),
        }
    }
}

/// Reports whether a `Host` header names an address, `localhost` or one of `names`.
fn is_asked_for_by(host: &str, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok()
        || names.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Parses `batch=ID&tenant=NAME`.
fn wanted(query: &str) -> Option<v1::ExplainRequest> {
    let mut wanted = v1::ExplainRequest::default();
    let mut named = false;
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("batch", id)) => {
                wanted.batch = id.parse().ok()?;
                named = true;
            }
            Some(("tenant", name)) => wanted.tenant = unescaped(name)?,
            _ => {}
        }
    }
    named.then_some(wanted)
}

/// Decodes percent-encoding (RFC 3986 §2.1).
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let byte = digit(digits[0])? * 16 + digit(digits[1])?;
        bytes.push(byte as u8);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_known_reads_nothing() {
        let names = ["laxity.example".to_owned()];
        for known in [
            "127.0.0.1:7473", "[::1]:7473", "10.0.0.7", "localhost:1", "LOCALHOST",
            "laxity.example:443",
        ] {
            assert!(is_asked_for_by(known, &names), "{known}");
        }
        for foreign in
            ["evil.example:7473", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b"]
        {
            assert!(!is_asked_for_by(foreign, &names), "{foreign}");
        }
    }

    #[test]
    fn a_query_is_read_or_refused_and_never_guessed() {
        let read = |query| wanted(query).map(|it| (it.batch, it.tenant));
        assert_eq!(read("batch=18446744073709551615"), Some((u64::MAX, String::new())));
        assert_eq!(read("tenant=a%20b%C3%BC&batch=7"), Some((7, "a bü".to_owned())));
        for wrong in [
            "", "batch=", "batch=-1", "batch=1&tenant=%", "batch=1&tenant=%f",
            "batch=1&tenant=%ff", "batch=1&tenant=%+1", "tenant=a",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_page_has_nothing_inline_and_nothing_from_elsewhere() {
        for forbidden in ["<style", "style=", "onclick", "onload", "http:", "https:", "//cdn"] {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
        for forbidden in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
            assert!(!SCRIPT.contains(forbidden), "{forbidden}");
        }
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
    }
}
