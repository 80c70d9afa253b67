//! The coordinator's web page: read-only, on its own port, without content from other sites
//! ([`laxity_listen::page`]).
//!
//! The coordinator's thread serves the page. So the state is built at most once a second and within
//! [`SHARE`], explanations have a budget, and connections are limited.

mod history;
mod state;

use std::future::ready;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use laxity_listen::http::{Answer, HttpListener};
use laxity_listen::page::{self, Page};
use laxity_wire::v1;
use serde::Serialize;

use self::history::History;
use crate::shared::Shared;

const PAGE: Page =
    Page { html: include_str!("web/page.html"), script: include_str!("web/page.js") };

/// Shortest time between two builds of the state.
const STATE_AGE_MIN: Duration = Duration::from_secs(1);
/// A build of the state is followed by a pause of this many times its duration.
const SHARE: u32 = 50;
/// Maximum number of explanations per second, for all readers together.
const EXPLAIN_PER_S: u32 = 20;

/// The web page's bound address.
pub(crate) struct Web {
    listener: HttpListener,
}

impl Web {
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = HttpListener::bind(address)?;
        Ok(Self { listener })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the task is aborted.
    pub(crate) async fn serve(self, shared: Arc<Shared>) {
        let names = shared.config().web.names.clone();
        let site = Arc::new(Site {
            shared,
            names,
            state: Mutex::default(),
            budget: Mutex::new(ExplanationBudget::new(Instant::now())),
            history: Mutex::new(History::new()),
        });
        let _sampler = Aborted(tokio::spawn(sample(Arc::clone(&site))));
        let answer = move |request: &Request<Incoming>| ready(site.answer(request));
        self.listener.serve("the page", page::LIMITS, answer).await;
    }
}

/// A task that is aborted when this value is dropped.
struct Aborted(tokio::task::JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn sample(site: Arc<Site>) {
    let mut ticks = tokio::time::interval(history::EVERY);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let (counters, _) = site.shared.cluster().counters();
        let mut history = site.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.close(counters.ended);
    }
}

struct ExplanationBudget {
    left: u32,
    since: Instant,
}

impl ExplanationBudget {
    const fn new(now: Instant) -> Self {
        Self { left: EXPLAIN_PER_S, since: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        let more = self.left > 0;
        self.left = self.left.saturating_sub(1);
        more
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
    budget: Mutex<ExplanationBudget>,
    history: Mutex<History>,
}

fn json(status: StatusCode, body: &impl Serialize) -> Answer {
    page::json(status, serde_json::to_vec(body).unwrap_or_default())
}

#[derive(Serialize)]
struct Problem {
    error: String,
}

fn problem(status: StatusCode, error: impl Into<String>) -> Answer {
    let error = error.into();
    json(status, &Problem { error })
}

impl Site {
    fn answer(&self, request: &Request<Incoming>) -> Answer {
        PAGE.answer(request, &self.names).unwrap_or_else(|| match request.uri().path() {
            "/api/state" => page::json(StatusCode::OK, self.state()),
            "/api/explain" => self.explain(request.uri().query().unwrap_or_default()),
            _ => page::not_found(),
        })
    }

    fn state(&self) -> Bytes {
        let mut cached = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
        let exhausted = {
            let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
            !budget.take(Instant::now())
        };
        if exhausted {
            return problem(
                StatusCode::TOO_MANY_REQUESTS,
                "too many explanations are asked for; try again in a second",
            );
        }
        let now = self.shared.now();
        let told = self.shared.cluster().explain(now, &wanted);
        match told {
            Ok(told) => json(StatusCode::OK, &told),
            Err(error) => problem(StatusCode::NOT_FOUND, error),
        }
    }
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
    fn explanations_are_rationed_by_the_second() {
        let start = Instant::now();
        let mut budget = ExplanationBudget::new(start);
        let granted = (0..100).filter(|_| budget.take(start)).count();
        assert_eq!(granted, EXPLAIN_PER_S as usize);
        assert!(budget.take(start + Duration::from_secs(1)));
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
