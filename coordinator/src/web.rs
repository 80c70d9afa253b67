//! The coordinator's web page: read-only, on its own port, without content from other sites
//! ([`laxity_listen::page`]).
//!
//! The coordinator's thread serves the page. So the state is built at most once a second, and the
//! builds take at most one part in [`SHARE`] of the thread's time. Explanations have a budget, and
//! connections are limited.

mod state;

use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use laxity_listen::http::{Answer, HttpListener};
use laxity_listen::page::{self, Page};
use laxity_listen::{BUCKET, History};
use laxity_wire::v1;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::Serialize;

use crate::pace::Pace;
use crate::shared::Shared;

const PAGE: Page =
    Page { html: include_str!("web/page.html"), script: include_str!("web/page.js") };

/// Shortest time between two builds of the state.
const STATE_AGE_MIN: Duration = Duration::from_secs(1);
/// A state is used for at least this many times the duration of its build, from the build's
/// beginning.
const SHARE: u32 = 50;
/// Maximum number of explanations per second, for all readers together.
const EXPLAIN_PER_S: u32 = 20;

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
    let answer = move |request: &Request<Incoming>| ready(asked.answer(request));
    tokio::join!(listener.serve("the page", page::LIMITS, answer), sample(site));
}

async fn sample(site: Arc<Site>) {
    let mut ticks = tokio::time::interval(BUCKET);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let (counters, _) = site.shared.cluster().counters();
        site.history.lock().close([counters.ended.in_time, counters.ended.late]);
    }
}

struct Site {
    shared: Arc<Shared>,
    names: Vec<String>,
    /// The newest state and the instant until which it is used.
    state: Mutex<Option<(Bytes, Instant)>>,
    explanations: Mutex<Pace>,
    /// Requests that ended in time and late.
    history: Mutex<History<2>>,
}

fn json(status: StatusCode, body: &impl Serialize) -> Answer {
    page::json(status, serde_json::to_vec(body).unwrap_or_default())
}

fn problem(status: StatusCode, error: &str) -> Answer {
    json(status, &serde_json::json!({ "error": error }))
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
        let mut cached = self.state.lock();
        let begun = Instant::now();
        if let Some((json, until)) = &*cached
            && begun < *until
        {
            return json.clone();
        }
        let made = state::state(&self.shared, &self.history);
        let json = Bytes::from(serde_json::to_vec(&made).unwrap_or_default());
        let until = begun + STATE_AGE_MIN.max(begun.elapsed() * SHARE);
        *cached = Some((json.clone(), until));
        json
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

/// Parses `batch=ID&tenant=NAME`.
pub fn wanted(query: &str) -> Option<v1::ExplainRequest> {
    let mut wanted = v1::ExplainRequest::default();
    let mut named = false;
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("batch", id)) => {
                wanted.batch = id.parse().ok()?;
                named = true;
            }
            Some(("tenant", name)) => {
                wanted.tenant = percent_decode_str(name).decode_utf8().ok()?.into_owned();
            }
            _ => {}
        }
    }
    named.then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_or_refused_and_never_guessed() {
        let read = |query| wanted(query).map(|it| (it.batch, it.tenant));
        assert_eq!(read("batch=18446744073709551615"), Some((u64::MAX, String::new())));
        assert_eq!(read("tenant=a%20b%C3%BC&batch=7"), Some((7, "a bü".to_owned())));
        for wrong in ["", "batch=", "batch=-1", "batch=1&tenant=%ff", "tenant=a"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_page_has_nothing_inline_and_nothing_from_elsewhere() {
        laxity_tests::browser::assert_own_content(PAGE.html, PAGE.script);
    }
}
