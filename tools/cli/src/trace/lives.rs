//! The history of each flow and batch, which is built from the events of a trace.

use std::collections::HashMap;

use laxity_wire::trace::{SubmitOutcome, TraceEvent, TraceKind, TracedFlow};

#[derive(Debug)]
pub(super) struct Life {
    pub(super) flow: TracedFlow,
    pub(super) submitted_ns: u64,
    pub(super) permits: Vec<FlowPermit>,
    pub(super) completed: u64,
    pub(super) ended: Option<FlowEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlowPermit {
    pub(super) at_ns: u64,
    pub(super) bytes: u64,
    pub(super) level: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlowEnd {
    Complete(u64),
    Cancelled(u64),
}

impl Life {
    /// Returns when the flow ended. If it did not end, this is the end of the trace, `last_ns`.
    pub(super) fn end_ns(&self, last_ns: u64) -> u64 {
        match self.ended {
            Some(FlowEnd::Complete(at) | FlowEnd::Cancelled(at)) => at,
            None => last_ns,
        }
    }

    /// Returns the level of the flow's first permit, or 0 if it has none.
    pub(super) fn level(&self) -> u8 {
        self.permits.first().map_or(0, |permit| permit.level)
    }
}

/// A period in which a batch computed a layer or waited, or in which a request was in a batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spell {
    pub(super) begin_ns: u64,
    /// The end of the period, or of the trace if the period did not end.
    pub(super) end_ns: u64,
    pub(super) has_ended: bool,
    pub(super) what: Spelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelled {
    Layer { batch: u64, layer: u16 },
    Queued { batch: u64, ahead: u64 },
    Request { batch: u64, request: u64, deadline_ns: u64 },
}

impl Spelled {
    /// Returns the key of a period. A new period ends an earlier one with the same key.
    pub(super) fn key(self) -> (bool, u64) {
        match self {
            Self::Layer { batch, .. } | Self::Queued { batch, .. } => (false, batch),
            Self::Request { request, .. } => (true, request),
        }
    }
}

/// The histories of all flows and batches of a trace.
#[derive(Debug, Default)]
pub(super) struct Lives {
    pub(super) flows: Vec<Life>,
    pub(super) spells: Vec<Spell>,
    /// The trace and the calling span of requests, as their engines named them.
    pub(super) traces: HashMap<u64, (String, String)>,
    pub(super) first_ns: u64,
    pub(super) last_ns: u64,
    /// Number of events of flows that were submitted before the trace began.
    pub(super) strays: u64,
}

/// Builds the histories from the events.
pub(super) fn lives(events: &[TraceEvent]) -> Lives {
    let mut all = Lives {
        first_ns: events.first().map_or(0, |event| event.at_ns),
        last_ns: events.last().map_or(0, |event| event.at_ns),
        ..Lives::default()
    };
    // Keyed by the flow's number, which a later flow may have again.
    let mut living: HashMap<u64, usize> = HashMap::new();
    let mut open: HashMap<(bool, u64), (u64, Spelled)> = HashMap::new();
    for event in events {
        let at_ns = event.at_ns;
        match &event.what {
            TraceKind::Submitted(flow) => {
                living.insert(flow.flow, all.flows.len());
                all.flows.push(born(at_ns, flow));
            }
            TraceKind::Permitted { flow, bytes, level, .. } => match living.get(flow) {
                Some(&at) => {
                    all.flows[at].permits.push(FlowPermit { at_ns, bytes: *bytes, level: *level });
                }
                None => all.strays += 1,
            },
            TraceKind::Completed { flow, bytes } => match living.get(flow) {
                Some(&at) => {
                    let life = &mut all.flows[at];
                    life.completed += bytes;
                    if life.completed >= life.flow.bytes {
                        life.ended = Some(FlowEnd::Complete(at_ns));
                        living.remove(flow);
                    }
                }
                None => all.strays += 1,
            },
            TraceKind::Cancelled { flow } => match living.remove(flow) {
                Some(at) => all.flows[at].ended = Some(FlowEnd::Cancelled(at_ns)),
                None => all.strays += 1,
            },
            TraceKind::RequestTrace { request, trace_id, span_id } => {
                all.traces.insert(*request, (trace_id.clone(), span_id.clone()));
            }
            hint => spell(at_ns, hint, &mut open, &mut all.spells),
        }
    }
    let last_ns = all.last_ns;
    let mut left: Vec<_> = open.into_values().collect();
    left.sort_by_key(|(begin_ns, what)| (*begin_ns, what.key()));
    all.spells.extend(left.into_iter().map(|(begin_ns, what)| Spell {
        begin_ns,
        end_ns: last_ns,
        has_ended: false,
        what,
    }));
    all
}

fn born(at_ns: u64, flow: &TracedFlow) -> Life {
    let mut life = Life {
        flow: flow.clone(),
        submitted_ns: at_ns,
        permits: Vec::new(),
        completed: 0,
        ended: None,
    };
    if flow.permitted > 0 && flow.standing != SubmitOutcome::Observed {
        life.permits.push(FlowPermit { at_ns, bytes: flow.permitted, level: flow.level });
    }
    // An empty flow has no completions.
    if flow.bytes == 0 {
        life.ended = Some(FlowEnd::Complete(at_ns));
    }
    life
}

/// Ends the period that a hint ends, and begins the one that it begins.
fn spell(
    at_ns: u64,
    hint: &TraceKind,
    open: &mut HashMap<(bool, u64), (u64, Spelled)>,
    spells: &mut Vec<Spell>,
) {
    let (key, begins) = match *hint {
        TraceKind::LayerBegin { batch, layer } => {
            ((false, batch), Some(Spelled::Layer { batch, layer }))
        }
        TraceKind::BatchQueued { batch, ahead } => {
            ((false, batch), Some(Spelled::Queued { batch, ahead }))
        }
        TraceKind::ComputeEnd { batch } | TraceKind::BatchEnd { batch } => ((false, batch), None),
        TraceKind::RequestJoin { batch, request, deadline_ns } => {
            ((true, request), Some(Spelled::Request { batch, request, deadline_ns }))
        }
        TraceKind::RequestEnd { request } => ((true, request), None),
        _ => return,
    };
    if let Some((begin_ns, what)) = open.remove(&key) {
        spells.push(Spell { begin_ns, end_ns: at_ns, has_ended: true, what });
    }
    if let Some(what) = begins {
        open.insert(key, (at_ns, what));
    }
}
