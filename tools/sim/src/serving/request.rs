//! A request in the serving model, and the objectives of all requests.

use laxity_policy::{Span, Time};

use super::setup::Setup;
use crate::scenario::SloKind;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestState {
    pub(super) arrival: Time,
    pub(super) deadline: Time,
    pub(super) own_objective: Span,
    pub(super) prompt: u32,
    pub(super) reused: u32,
    pub(super) fetched: u32,
    pub(super) rank: u32,
    pub(super) decode: u32,
    pub(super) first_source: u32,
    pub(super) sources: u32,
    pub(super) to_compute: u32,
    pub(super) started: Time,
    pub(super) prefilled: Option<Time>,
    pub(super) last_stage_left: u32,
    pub(super) last_arrival: Time,
    pub(super) stalled_ns: u64,
    pub(super) collective_ns: u64,
    pub(super) computed_ns: u64,
    pub(super) pruned: bool,
    pub(super) relegated: bool,
    /// Time at which the request's fetches, and its P2D, would have passed without contention.
    pub(super) fetching_until: Time,
    pub(super) sending_until: Time,
}

impl RequestState {
    /// Returns the deadline of the first token for flow scheduling. A relegated request has none.
    pub(super) const fn due(&self) -> Time {
        if self.relegated { Time::NEVER } else { self.deadline }
    }
}

pub(super) fn all(setup: &Setup<'_>) -> Vec<RequestState> {
    let requests = &setup.inputs.requests;
    let mut seen = vec![false; requests.distinct_blocks as usize];
    let slo = &setup.scenario.slo;
    let mut alone = Vec::with_capacity(requests.list.len());
    for request in &requests.list {
        let blocks = requests.blocks_of(request);
        let known = blocks.iter().take_while(|&&block| seen[block as usize]).count() as u32;
        for &block in blocks {
            seen[block as usize] = true;
        }
        let prompt = request.prompt_tokens.max(1);
        let reused = (known * requests.block_tokens).min(prompt - 1);
        alone.push(setup.alone(prompt, reused));
    }
    let mean = alone.iter().map(|span| span.0 as f64).sum::<f64>() / alone.len() as f64;
    let arrivals = requests.list.iter().zip(alone);
    arrivals
        .map(|(request, alone)| {
            let objective = match slo.kind {
                SloKind::Alone => alone.0 as f64 * slo.factor,
                SloKind::Mean => mean * slo.factor,
                SloKind::Fixed => slo.fixed_ms * 1e6,
            };
            let least = slo.least_ms * 1e6;
            let own = (alone.0 as f64 * slo.factor).max(least);
            RequestState {
                arrival: request.arrival,
                deadline: request.arrival + Span(objective.max(least) as u64),
                own_objective: Span(own as u64),
                prompt: request.prompt_tokens.max(1),
                started: request.arrival,
                ..RequestState::default()
            }
        })
        .collect()
}
