//! The life of each request as OpenTelemetry spans, in the JSON of OTLP
//! (opentelemetry-proto, `trace.proto`; numbers of 64 bits are text).
//!
//! A request belongs to the trace that its engine named, else to one of its own. Its first span
//! lasts from the request's first hint to its last and has the parts of its time. Below it are a
//! span for each layer of its batches and for each flow that it waited for. Each permit of a flow
//! is an event of the flow's span. A flow of a whole batch is written once, for the first of its
//! requests: copies would fill memory.

use std::collections::{BTreeMap, HashSet};
use std::time::{SystemTime, UNIX_EPOCH};

use laxity_shm::sleep::now_ns;
use laxity_wire::sentences::level;
use serde_json::{Value, json};

use super::lives::{Life, Lives};
use super::parts::{Ended, PARTS, Parts};
use super::why::{PermittedByKind, why};

/// `Span.kind`: an operation inside one process.
const INTERNAL: u8 = 1;
/// `Status.code` of an error.
const ERROR: u8 = 2;

/// Returns the Unix time at which CLOCK_MONOTONIC was zero, in nanoseconds.
pub(super) fn epoch_ns() -> u64 {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (unix.as_nanos() as u64).saturating_sub(now_ns())
}

fn text(key: &str, value: impl Into<String>) -> Value {
    json!({"key": key, "value": {"stringValue": value.into()}})
}

fn number(key: &str, value: u64) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

/// The spans of one request.
struct RequestSpans<'a> {
    lives: &'a Lives,
    permitted: &'a PermittedByKind,
    nics: &'a [String],
    epoch_ns: u64,
    trace_id: String,
    /// The id of the first span, from which the others count. An engine's trace has spans of
    /// several hosts.
    span_id: u64,
    /// The span of the engine that the first span is below, or empty.
    parent: String,
    spans: Vec<Value>,
}

impl RequestSpans<'_> {
    fn unix(&self, at_ns: u64) -> String {
        (self.epoch_ns + at_ns).to_string()
    }

    fn id(&self, span: usize) -> String {
        format!("{:016x}", self.span_id.wrapping_add(span as u64).max(1))
    }

    /// Adds a span below the root, which is the first span.
    fn span(&mut self, name: &str, (begin_ns, end_ns): (u64, u64), attributes: &[Value]) {
        let mut span = json!({
            "traceId": self.trace_id, "spanId": self.id(self.spans.len()),
            "name": name, "kind": INTERNAL, "attributes": attributes,
            "startTimeUnixNano": self.unix(begin_ns), "endTimeUnixNano": self.unix(end_ns),
        });
        let parent = if self.spans.is_empty() { self.parent.clone() } else { self.id(0) };
        if !parent.is_empty() {
            span["parentSpanId"] = json!(parent);
        }
        self.spans.push(span);
    }

    /// Marks the last span as late, if what it shows ended after its deadline.
    fn judge(&mut self, deadline_ns: u64, end_ns: u64) {
        if let Some(span) = self.spans.last_mut()
            && deadline_ns != 0
            && end_ns > deadline_ns
        {
            span["status"] = json!({"code": ERROR, "message": "after its deadline"});
        }
    }

    fn flow(&mut self, life: &Life) {
        let flow = &life.flow;
        let end_ns = life.end_ns(self.lives.last_ns);
        let permitted_ns = life.permits.first().map_or(end_ns, |permit| permit.at_ns);
        let nic = self.nics.get(usize::from(flow.nic)).cloned().unwrap_or_default();
        let direction = if flow.ingress { "ingress" } else { "egress" };
        let attributes = [
            text("laxity.stage", &flow.stage),
            text("laxity.port", format!("{nic} {direction}")),
            text("laxity.level", level(life.level())),
            number("laxity.layer", flow.layer.into()),
            number("laxity.bytes", flow.bytes),
            number("laxity.waited_ns", permitted_ns.saturating_sub(life.submitted_ns)),
            number("process.pid", flow.pid.into()),
        ];
        self.span(&flow.stage, (life.submitted_ns, end_ns), &attributes);
        let permits = life.permits.iter().enumerate().map(|(index, permit)| {
            json!({
                "name": "permit", "timeUnixNano": self.unix(permit.at_ns),
                "attributes": [
                    number("laxity.bytes", permit.bytes),
                    text("laxity.level", level(permit.level)),
                    text("laxity.why", why(self.permitted, life, index)),
                ],
            })
        });
        let permits: Vec<Value> = permits.collect();
        if let Some(span) = self.spans.last_mut() {
            span["events"] = json!(permits);
        }
        self.judge(flow.deadline_ns, end_ns);
    }
}

/// Returns the spans of the requests that ended in the trace. `nics` has the names of the NICs by
/// number.
pub(super) fn spans(
    lives: &Lives,
    ended: &[Ended<'_>],
    parts: &BTreeMap<u64, Parts>,
    nics: &[String],
    epoch_ns: u64,
) -> Value {
    let permitted = PermittedByKind::of(lives);
    let (mut spans, mut written) = (Vec::new(), HashSet::new());
    for request in ended {
        let (begin_ns, end_ns) = (request.begin_ns, request.end_ns);
        // Requests of different times can have the same number.
        let begun = epoch_ns + begin_ns;
        let own = || (format!("{begun:016x}{:016x}", request.request), String::new());
        let (trace_id, parent) = lives.traces.get(&request.request).cloned().unwrap_or_else(own);
        // An odd factor keeps different times apart and spreads them.
        let span_id = (begun ^ request.request).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut trace = RequestSpans {
            lives,
            permitted: &permitted,
            nics,
            epoch_ns,
            trace_id,
            span_id,
            parent,
            spans: Vec::new(),
        };
        let mut attributes = vec![number("laxity.request", request.request)];
        let parts = parts.get(&request.request).into_iter().flatten();
        let name = |part| format!("laxity.{part}_ns");
        attributes.extend(PARTS.iter().zip(parts).map(|(part, ns)| number(&name(part), *ns)));
        trace.span("request", (begin_ns, end_ns), &attributes);
        trace.judge(request.deadline_ns, end_ns);
        for (spell, layer) in &request.layers {
            let attributes = [number("laxity.layer", (*layer).into())];
            trace.span("layer", (spell.begin_ns, spell.end_ns), &attributes);
        }
        for life in &request.flows {
            if written.insert(std::ptr::from_ref(*life)) {
                trace.flow(life);
            }
        }
        spans.append(&mut trace.spans);
    }
    json!({"resourceSpans": [{
        "resource": {"attributes": [text("service.name", "laxity")]},
        "scopeSpans": [{
            "scope": {"name": "laxity trace", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans,
        }],
    }]})
}
