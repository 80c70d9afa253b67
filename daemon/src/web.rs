//! The host's web page: read-only, and only if the configuration names an address
//! ([`laxity_listen::page`]).
//!
//! It shows the status, as `laxity status` does, what was permitted in the last hour, and why flows
//! wait, as `laxity explain` does. However many browsers there are, the scheduler is asked for the
//! page's state at most once a second, and to explain flows at most ten times.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use laxity_listen::http::{Answer, HttpListener};
use laxity_listen::page::{self, Page};
use laxity_listen::{BUCKET, History};
use laxity_policy::Stage;
use laxity_wire::Status;
use laxity_wire::explain::FlowQuery;
use laxity_wire::sentences::FlowReports;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::service::Service;

const PAGE: Page =
    Page { html: include_str!("web/page.html"), script: include_str!("web/page.js") };

const STATE_AGE_MAX: Duration = Duration::from_secs(1);
/// The least time between two questions about flows.
const EXPLANATIONS_APART: Duration = Duration::from_millis(100);
/// What the history counts: bytes permitted by stage, then bytes that went out unscheduled and
/// flows that missed their deadline.
const COUNTERS: usize = Stage::ALL.len() + 2;

fn sums(status: &Status) -> [u64; COUNTERS] {
    let mut sums = [0; COUNTERS];
    for port in &status.ports {
        for (sum, stage) in sums.iter_mut().zip(&port.stages) {
            *sum += stage.permitted_bytes;
        }
    }
    sums[Stage::ALL.len()] = status.totals.bypassed_bytes;
    sums[Stage::ALL.len() + 1] = status.totals.deadline_misses;
    sums
}

/// The page's data: `GET /api/state`.
#[derive(Serialize)]
struct HostState<'a> {
    status: &'a Status,
    bucket_s: u64,
    buckets: Vec<[u64; COUNTERS]>,
}

struct HostPage {
    names: Vec<String>,
    service: Arc<Service>,
    history: Mutex<History<COUNTERS>>,
    /// The newest answer and the instant at which it was made.
    state: tokio::sync::Mutex<Option<(Instant, Result<Bytes, String>)>>,
    /// When the scheduler may be asked about flows again.
    explanations: tokio::sync::Mutex<Instant>,
}

/// Serves the page at `listener`, once there is one, while the future is polled. `names` are those
/// by which browsers may ask for it.
pub(crate) async fn serve(
    listener: impl Future<Output = HttpListener>,
    names: Vec<String>,
    service: Arc<Service>,
) {
    let (history, state) = (Mutex::default(), tokio::sync::Mutex::default());
    let explanations = tokio::sync::Mutex::new(Instant::now());
    let site = Arc::new(HostPage { names, service, history, state, explanations });
    let asked = Arc::clone(&site);
    let answer = move |request: &Request<Incoming>| {
        let known = PAGE.answer(request, &asked.names);
        let uri = request.uri().clone();
        let site = Arc::clone(&asked);
        async move {
            match (known, uri.path()) {
                (Some(answer), _) => answer,
                (None, "/api/state") => site.state().await,
                (None, "/api/explain") => site.explain(uri.query().unwrap_or_default()).await,
                (None, _) => page::not_found(),
            }
        }
    };
    tokio::select! {
        () = async { listener.await.serve("the page", page::LIMITS, answer).await } => {}
        () = site.remember() => {}
    }
}

impl HostPage {
    /// Closes the buckets of the history.
    async fn remember(&self) {
        let mut ticks = interval(BUCKET);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            if let Ok(status) = self.service.status().await {
                self.history.lock().close(sums(&status));
            }
        }
    }

    async fn state(&self) -> Answer {
        let mut last = self.state.lock().await;
        let fresh = last.take().filter(|(made, _)| made.elapsed() < STATE_AGE_MAX);
        // Readers that queued while the scheduler hung get the same problem, and don't ask again.
        let (made, told) = match fresh {
            Some(fresh) => fresh,
            None => {
                let told = self.service.status().await.map(|status| self.told(&status));
                (Instant::now(), told)
            }
        };
        *last = Some((made, told.clone()));
        match told {
            Ok(body) => page::json(StatusCode::OK, body),
            Err(problem) => page::plain(StatusCode::SERVICE_UNAVAILABLE, &problem),
        }
    }

    async fn explain(&self, query: &str) -> Answer {
        let Some(wanted) = wanted(query) else {
            let how =
                "ask with flow=NUMBER, request=ID, batch=ID or pid=PID, or for all that waits";
            return page::plain(StatusCode::BAD_REQUEST, how);
        };
        let mut next = self.explanations.lock().await;
        sleep_until(*next).await;
        // A browser that hangs up ends this function at any `await`.
        *next = Instant::now() + EXPLANATIONS_APART;
        match (self.service.explain(wanted).await, self.service.status().await) {
            (Ok(told), Ok(status)) => {
                let reports = serde_json::to_value(FlowReports::of(&told, &status));
                page::json(StatusCode::OK, for_browsers(reports.unwrap_or_default()))
            }
            (Err(problem), _) | (_, Err(problem)) => {
                page::plain(StatusCode::SERVICE_UNAVAILABLE, &problem)
            }
        }
    }

    fn told(&self, status: &Status) -> Bytes {
        let buckets = self.history.lock().buckets(sums(status));
        let state = HostState { status, bucket_s: BUCKET.as_secs(), buckets };
        serde_json::to_vec(&state).unwrap_or_default().into()
    }
}

/// Returns reports as JSON whose flow numbers are text, because JavaScript rounds those of 2⁵³ and
/// more.
fn for_browsers(mut reports: serde_json::Value) -> Vec<u8> {
    for flow in reports["flows"].as_array_mut().into_iter().flatten() {
        flow["flow"] = flow["flow"].to_string().into();
    }
    reports.to_string().into_bytes()
}

/// Parses conditions such as `pid=12&batch=3`.
pub fn wanted(query: &str) -> Option<FlowQuery> {
    let mut wanted = FlowQuery::default();
    for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        match name {
            "flow" => wanted.flow = Some(value.parse().ok()?),
            "request" => wanted.request = Some(value.parse().ok()?),
            "batch" => wanted.batch = Some(value.parse().ok()?),
            "pid" => wanted.pid = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    Some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_gets_every_digit_of_a_flow_number() {
        let json = for_browsers(serde_json::json!({"flows": [{"flow": (9_u64 << 50) + 1}]}));
        assert!(String::from_utf8_lossy(&json).contains(r#""flow":"10133099161583617""#));
    }

    #[test]
    fn a_question_about_flows_has_the_conditions_of_the_address_and_no_others() {
        let meant = FlowQuery { pid: Some(12), batch: Some(3), ..FlowQuery::default() };
        assert_eq!(wanted("pid=12&batch=3"), Some(meant));
        assert_eq!(wanted(""), Some(FlowQuery::default()));
        for wrong in ["pid=-1", "flow=x", "bypass=on", "request="] {
            assert_eq!(wanted(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_page_has_nothing_inline_and_nothing_from_elsewhere() {
        laxity_tests::browser::assert_own_content(PAGE.html, PAGE.script);
    }
}
