//! The host's web page: read-only, and only if the configuration names an address
//! ([`laxity_listen::page`]).
//!
//! It shows the status, as `laxity status` does, and what was permitted in the last hour. The
//! scheduler is asked at most once a second, however many browsers there are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode};
use laxity_listen::http::{Answer, HttpListener};
use laxity_listen::page::{self, Page};
use laxity_policy::Stage;
use laxity_wire::Status;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::service::Service;

const PAGE: Page =
    Page { html: include_str!("web/page.html"), script: include_str!("web/page.js") };

/// How long a state is shown.
const STATE_AGE_MAX: Duration = Duration::from_secs(1);
/// The time of one bucket of the history.
const BUCKET: Duration = Duration::from_secs(10);
/// Maximum number of complete buckets: an hour.
const BUCKETS_MAX: usize = 360;

/// Bytes permitted by stage, then bytes that went out unscheduled and flows that missed their
/// deadline.
type BucketSums = [u64; Stage::ALL.len() + 2];

fn sums(status: &Status) -> BucketSums {
    let mut sums = BucketSums::default();
    for port in &status.ports {
        for (sum, stage) in sums.iter_mut().zip(&port.stages) {
            *sum += stage.permitted_bytes;
        }
    }
    sums[Stage::ALL.len()] = status.totals.bypassed_bytes;
    sums[Stage::ALL.len() + 1] = status.totals.deadline_misses;
    sums
}

/// What happened in each [`BUCKET`], newest last.
#[derive(Debug, Default)]
struct PermitHistory {
    buckets: VecDeque<BucketSums>,
    before: BucketSums,
}

impl PermitHistory {
    fn since(&self, now: &BucketSums) -> BucketSums {
        std::array::from_fn(|index| now[index].saturating_sub(self.before[index]))
    }

    fn close(&mut self, now: BucketSums) {
        self.buckets.push_back(self.since(&now));
        if self.buckets.len() > BUCKETS_MAX {
            self.buckets.pop_front();
        }
        self.before = now;
    }

    /// Returns all buckets. The last one is not complete.
    fn buckets(&self, now: &BucketSums) -> Vec<BucketSums> {
        self.buckets.iter().copied().chain([self.since(now)]).collect()
    }
}

/// The page's data: `GET /api/state`.
#[derive(Serialize)]
struct HostState<'a> {
    status: &'a Status,
    bucket_s: u64,
    buckets: Vec<BucketSums>,
}

struct HostPage {
    names: Vec<String>,
    service: Arc<Service>,
    history: Mutex<PermitHistory>,
    /// The newest answer and the instant at which it was made.
    state: tokio::sync::Mutex<Option<(Instant, Result<Bytes, String>)>>,
}

/// Serves the page at `listener`, once there is one, while the future is polled. `names` are those
/// by which browsers may ask for it.
pub(crate) async fn serve(
    listener: impl Future<Output = HttpListener>,
    names: Vec<String>,
    service: Arc<Service>,
) {
    let (history, state) = (Mutex::default(), tokio::sync::Mutex::default());
    let site = Arc::new(HostPage { names, service, history, state });
    let asked = Arc::clone(&site);
    let answer = move |request: &Request<Incoming>| {
        let known = PAGE.answer(request, &asked.names);
        let is_state = request.uri().path() == "/api/state";
        let site = Arc::clone(&asked);
        async move {
            match known {
                Some(answer) => answer,
                None if is_state => site.state().await,
                None => page::not_found(),
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

    fn told(&self, status: &Status) -> Bytes {
        let buckets = self.history.lock().buckets(&sums(status));
        let state = HostState { status, bucket_s: BUCKET.as_secs(), buckets };
        serde_json::to_vec(&state).unwrap_or_default().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_what_came_since_the_one_before_and_an_hour_is_kept() {
        let now = |bytes: u64| [bytes; Stage::ALL.len() + 2];
        let mut history = PermitHistory::default();
        assert_eq!(history.buckets(&now(3)), [now(3)]);
        history.close(now(5));
        assert_eq!(history.buckets(&now(9)), [now(5), now(4)]);
        for n in 0..1000 {
            history.close(now(n));
        }
        assert_eq!(history.buckets(&now(0)).len(), BUCKETS_MAX + 1);
    }

    #[test]
    fn the_page_has_nothing_inline_and_nothing_from_elsewhere() {
        laxity_tests::browser::assert_own_content(PAGE.html, PAGE.script);
    }
}
