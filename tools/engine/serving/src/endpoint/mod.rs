//! The endpoint. It has OpenAI's completions, streamed or not, with objectives in headers.
//!
//! `x-llm-d-slo-ttft-ms` is the objective of the first token, `x-llm-d-slo-tpot-ms` that of each
//! later one (or their older names without `llm-d`), and `x-slo-ttlt-ms` that of the last token for
//! clients that only wait for it. `x-laxity-importance` says which requests are relegated first.
//! Features that are not supported (several answers, log probabilities, stop words …) are rejected,
//! and unknown fields are ignored. Requests beyond the configured number get status 429. A client
//! that closes its connection ends its request, whose blocks are free with the next iteration.

mod answer;
mod ask;
pub mod tokens;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::carry::Carrier;
use crate::clock;
use crate::config::{Config, Role};
use crate::engine::sequence::{Failure, Outlet, Output, Submission};
use crate::engine::{EngineCommand, Handle};
use answer::Writer;
use ask::{CompletionRequest, Objection};

#[derive(Clone)]
struct EndpointState {
    config: Arc<Config>,
    engine: Handle,
    metrics: Option<PrometheusHandle>,
    started: u64,
}

/// Serves until `stop` completes.
pub async fn serve(
    listener: TcpListener,
    config: Arc<Config>,
    engine: Handle,
    metrics: Option<PrometheusHandle>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let started = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let completes = config.role != Role::Prefill;
    let state = EndpointState { config, engine, metrics, started };
    let mut routes = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(show_metrics))
        .route("/v1/models", get(models));
    if completes {
        routes = routes.route("/v1/completions", post(completion));
    }
    let routes =
        routes.fallback(nowhere).method_not_allowed_fallback(other_method).with_state(state);
    axum::serve(listener, routes).with_graceful_shutdown(stop).await
}

fn json_response(status: StatusCode, value: &serde_json::Value) -> Response {
    let kind = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, kind)], value.to_string()).into_response()
}

impl Objection {
    fn response(&self) -> Response {
        let mut response = json_response(self.status, &self.json());
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

async fn nowhere(request: Request) -> Response {
    let what = format!(
        "there is no {} here; there are /v1/completions (not of a prefill process), /v1/models, \
         /health and /metrics",
        request.uri().path()
    );
    Objection::new(StatusCode::NOT_FOUND, "not_found", None, what).response()
}

async fn other_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let what = format!("{method} is not answered at {path}: completions are POST, all else GET");
    Objection::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", None, what).response()
}

async fn health(State(state): State<EndpointState>) -> Response {
    let gauges = &state.engine.gauges;
    if gauges.ended.load(Ordering::Acquire) {
        return json_response(
            StatusCode::SERVICE_UNAVAILABLE,
            &json!({"status": "the engine has ended; its log says why"}),
        );
    }
    json_response(
        StatusCode::OK,
        &json!({
            "status": "ok",
            "role": state.config.role,
            "requests": gauges.open.load(Ordering::Relaxed),
            "kv_blocks_used": gauges.blocks_used(),
            "kv_blocks": state.config.kv.blocks,
        }),
    )
}

async fn show_metrics(State(state): State<EndpointState>) -> Response {
    let gauges = &state.engine.gauges;
    metrics::gauge!("laxity_engine_kv_blocks_used").set(gauges.blocks_used() as f64);
    if let Some(counts) = gauges.carrier.get().map(Carrier::counts) {
        for ((stage, dscp), bytes) in counts.sent_bytes {
            let labels = [("stage", stage.to_string()), ("dscp", dscp.to_string())];
            metrics::counter!("laxity_engine_sent_bytes_total", &labels).absolute(bytes);
        }
        metrics::counter!("laxity_engine_parcels_total").absolute(counts.parcels);
        metrics::counter!("laxity_engine_parcels_lost_total").absolute(counts.lost);
        metrics::counter!("laxity_engine_scheduled_bytes_total").absolute(counts.scheduled_bytes);
        metrics::counter!("laxity_engine_bypassed_bytes_total").absolute(counts.bypassed_bytes);
        metrics::counter!("laxity_engine_unscheduled_ms_total")
            .absolute(counts.unscheduled_ns / 1_000_000);
    }
    match &state.metrics {
        Some(metrics) => metrics.render().into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn models(State(state): State<EndpointState>) -> Response {
    let model = &state.config.model;
    let one = json!({
        "id": model.name,
        "object": "model",
        "created": state.started,
        "owned_by": "laxity",
        "max_model_len": model.context,
    });
    json_response(StatusCode::OK, &json!({"object": "list", "data": [one]}))
}

async fn completion(State(state): State<EndpointState>, request: Request) -> Response {
    let start = Instant::now();
    let arrival = clock::now();
    match begin(&state, request, arrival).await {
        Ok((asked, outputs)) => {
            metrics::counter!("laxity_engine_requests_total").increment(1);
            let response = respond(&state, &asked, outputs, start).await;
            response.unwrap_or_else(|objection| objection.response())
        }
        Err(objection) => {
            metrics::counter!("laxity_engine_refused_total", "code" => objection.code).increment(1);
            objection.response()
        }
    }
}

async fn begin(
    state: &EndpointState,
    request: Request,
    arrival: laxity_requests::Time,
) -> Result<(CompletionRequest, mpsc::Receiver<Output>), Objection> {
    let (head, body) = request.into_parts();
    let most = state.config.limits.body_bytes_max;
    let body = read(body, most).await?;
    let slo = ask::slo(&head.headers, &state.config.limits)?;
    let importance = ask::importance(&head.headers)?;
    let prefill = ask::prefill(&head.headers, &state.config)?;
    let asked = CompletionRequest::read(&body, &state.config)?;
    let gauges = &state.engine.gauges;
    let most = state.config.limits.requests_max;
    if gauges.open.load(Ordering::Relaxed) >= most {
        let what = format!(
            "{most} requests are being served already (limits.requests_max); try again later"
        );
        return Err(Objection::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", None, what));
    }
    // There is room for each token and the end.
    let (outlet, outputs) = mpsc::channel(asked.output_max as usize + 2);
    let submission = Submission {
        output_max: asked.output_max,
        arrival,
        prefill,
        slo,
        importance,
        stop: (!asked.ignore_eos).then_some(tokens::END),
        outlet: Outlet::Here(outlet),
    };
    if !state.engine.command(EngineCommand::Submit(asked.prompt.clone(), submission)) {
        return Err(failed(&Failure::Unavailable("the engine has ended".to_owned())));
    }
    Ok((asked, outputs))
}

/// Maximum number of bytes of a body that is too long that are read before the error is sent. If a
/// connection is closed with unread bytes, the answer is lost.
const THROWN_AWAY_BYTES_MAX: usize = 64 << 20;
const THROWN_AWAY_FOR: Duration = Duration::from_secs(10);

async fn read(body: Body, most: usize) -> Result<Vec<u8>, Objection> {
    let mut parts = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(part) = parts.next().await {
        let part = part.map_err(|error| {
            let what = format!("the body did not come as announced: {error}");
            Objection::new(StatusCode::BAD_REQUEST, "body_incomplete", None, what)
        })?;
        if whole.len() + part.len() > most {
            drop(whole);
            let mut left = THROWN_AWAY_BYTES_MAX;
            let rest = async {
                while left > 0
                    && let Some(Ok(part)) = parts.next().await
                {
                    left = left.saturating_sub(part.len());
                }
            };
            // A client that is slower than this may lose the answer.
            let _ = tokio::time::timeout(THROWN_AWAY_FOR, rest).await;
            let what = format!("the body is longer than {most} bytes (limits.body_bytes_max)");
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            return Err(Objection::new(status, "body_too_long", None, what));
        }
        whole.extend_from_slice(&part);
    }
    Ok(whole)
}

fn failed(failure: &Failure) -> Objection {
    let (status, code, what) = match failure {
        Failure::TooLong => {
            let what = "prompt and answer together do not fit into the KV cache (kv.blocks × \
                        kv.block_tokens tokens)";
            (StatusCode::BAD_REQUEST, "context_length_exceeded", what.to_owned())
        }
        Failure::Unavailable(why) => {
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable", format!("not now: {why}"))
        }
        Failure::Internal(why) => {
            let what = format!("the engine failed: {why}");
            (StatusCode::INTERNAL_SERVER_ERROR, "internal_error", what)
        }
    };
    let param = matches!(failure, Failure::TooLong).then_some("max_tokens");
    Objection::new(status, code, param, what)
}

fn vanished() -> Objection {
    failed(&Failure::Internal("it ended in the middle of an answer".to_owned()))
}

async fn respond(
    state: &EndpointState,
    asked: &CompletionRequest,
    mut outputs: mpsc::Receiver<Output>,
    start: Instant,
) -> Result<Response, Objection> {
    let mut writer = Writer::new(&state.config.model.name, asked);
    // The status depends on the first output, because a failure before the first token is no
    // stream.
    let first = outputs.recv().await.ok_or_else(vanished)?;
    if let Output::Failed(failure) = &first {
        return Err(failed(failure));
    }
    metrics::histogram!("laxity_engine_ttft_seconds").record(start.elapsed().as_secs_f64());
    if asked.stream {
        let all = tokio_stream::once(first).chain(ReceiverStream::new(outputs));
        let lines = all.map(move |output| Ok::<_, Infallible>(writer.event(&output)));
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        return Ok((headers, Body::from_stream(lines)).into_response());
    }
    let mut next = first;
    loop {
        match next {
            Output::Failed(failure) => return Err(failed(&failure)),
            Output::Token(_) => writer.take(&next),
            Output::Finished(_) => {
                writer.take(&next);
                return Ok(json_response(StatusCode::OK, &writer.whole()));
            }
        }
        next = outputs.recv().await.ok_or_else(vanished)?;
    }
}

/// Time that open answers have to end when the process stops.
pub const GRACE: Duration = Duration::from_secs(5);
