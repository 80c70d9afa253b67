//! What the scheduler knows about single flows, for `laxity explain`.
//!
//! There may be many flows, and permits must not wait for an operator. So a command visits the
//! lanes with about [`PLACES`] entries of flows and says where the next command continues. It keeps
//! and explains only the flows that have waited for longest.

use laxity_policy::link::explain::{Obstacle, WaitingFlow};
use laxity_policy::{FlowId, Time};
use laxity_wire::explain::{EXPLAINED_MAX, ExplainedFlow, Explanation, FlowQuery, FlowWait};
use laxity_wire::trace::{SubmitOutcome, TracedFlow};

use super::Driver;
use super::deadlines::trace_id;
use super::flows::{Accounting, FlowState, flow_id, split_flow_id};
use crate::clients::ClientState;
use crate::mailbox::{ExplainCommand, ExplainedPart, FlowPlace};

/// The number of flow entries after which a command ends.
const PLACES: usize = 1024;

/// The flows that an operator asked about, of which the first few are kept.
#[derive(Default)]
struct FoundFlows {
    /// The flows to explain, the one that waits longest first.
    first: Vec<(FlowState, FlowId)>,
    count: u64,
}

impl FoundFlows {
    fn add(&mut self, flow: FlowState, id: FlowId) {
        self.count += 1;
        let order = |(flow, id): &(FlowState, FlowId)| (!flow.waits(), flow.touched, id.0);
        let found = (flow, id);
        let place = self.first.partition_point(|known| order(known) < order(&found));
        if place < EXPLAINED_MAX {
            self.first.truncate(EXPLAINED_MAX - 1);
            self.first.insert(place, found);
        }
    }
}

impl Driver {
    pub(super) fn explain(&self, ExplainCommand { wanted, from, reply }: ExplainCommand) {
        let mut found = FoundFlows::default();
        let next = match wanted.flow.map(|flow| split_flow_id(FlowId(flow))) {
            Some((index, lane, _)) => {
                self.look_for(&wanted, (index, lane), &mut found);
                None
            }
            None => self.look_on(&wanted, from, &mut found),
        };
        let flows = found.first.iter().filter_map(|(flow, id)| self.explained(flow, *id)).collect();
        let told = Explanation { now_ns: self.intake.now.0, flows, count: found.count };
        let _ = reply.send(ExplainedPart { told, next });
    }

    /// Looks for flows from a lane on. Returns where to continue.
    fn look_on(
        &self,
        wanted: &FlowQuery,
        from: FlowPlace,
        found: &mut FoundFlows,
    ) -> Option<FlowPlace> {
        let (mut places, (first, mut lane)) = (0, from);
        for index in first..self.clients.len() as u32 {
            let state = self.clients[index as usize].as_ref().map(|client| &client.state);
            let asked = |state: &&ClientState| {
                state.flows > 0 && wanted.pid.is_none_or(|pid| pid == state.identity.pid)
            };
            while let Some(state) = state.filter(asked)
                && lane < state.lanes.count()
            {
                if places >= PLACES {
                    return Some((index, lane));
                }
                places += self.look_for(wanted, (index, lane), found);
                lane += 1;
            }
            lane = 0;
        }
        None
    }

    /// Adds the wanted flows of a lane to `found`. Returns the number of entries that were visited.
    fn look_for(
        &self,
        wanted: &FlowQuery,
        (index, lane): FlowPlace,
        found: &mut FoundFlows,
    ) -> usize {
        let client = self.clients.get(index as usize).and_then(Option::as_ref);
        let Some(state) = client.map(|client| &client.state) else { return 0 };
        let Some(flows) = state.lanes.get(lane).map(|lane| &lane.flows) else { return 0 };
        let named = *wanted != FlowQuery::default();
        let flows_by_id = flows.iter().map(|flow| (*flow, flow_id(index, lane, flow.seq)));
        let wanted_flows = flows_by_id.filter(|&(flow, id)| {
            let link = self.intake.ports[usize::from(flow.port())].link.link(state.domain);
            wanted.flow.is_none_or(|flow| flow == id.0)
                && wanted.request.is_none_or(|request| request == flow.request.0)
                && wanted.pid.is_none_or(|pid| pid == state.identity.pid)
                && wanted.batch.is_none_or(|batch| link.batch_of(id).is_some_and(|b| b.0 == batch))
                && (named || flow.waits())
        });
        wanted_flows.for_each(|(flow, id)| found.add(flow, id));
        flows.places()
    }

    fn explained(&self, flow: &FlowState, id: FlowId) -> Option<ExplainedFlow> {
        let state = &self.clients.get(split_flow_id(id).0 as usize)?.as_ref()?.state;
        let port = &self.intake.ports[usize::from(flow.port())].link;
        let (now, link) = (self.intake.now, port.link(state.domain));
        let wait = port.explain(now, state.domain, id);
        let (in_flight_bytes, window_bytes) =
            wait.map_or((link.in_flight_bytes(), link.config().window_bytes), |known| known.window);
        let traced = TracedFlow {
            flow: id.0,
            pid: state.identity.pid,
            nic: flow.port / 2,
            ingress: flow.port % 2 == 1,
            stage: flow.stage.name().to_owned(),
            layer: wait.map_or(0, |known| known.spec.layer.0),
            batch: wait.map_or(0, |known| known.spec.batch.0),
            request: flow.request.0,
            bytes: flow.bytes,
            deadline_ns: wait.map_or(flow.deadline, |known| known.spec.deadline).0 % Time::NEVER.0,
            standing: match wait.map(|known| known.obstacle) {
                None if flow.accounting == Accounting::Nobody => SubmitOutcome::Observed,
                None => SubmitOutcome::AtOnce,
                Some(Obstacle::Held) => SubmitOutcome::Held,
                Some(Obstacle::Order | Obstacle::Turn) => SubmitOutcome::BehindOthers,
                Some(_) => SubmitOutcome::WindowFull,
            },
            permitted: flow.permitted,
            level: flow.level,
            in_flight_bytes,
            window_bytes,
            ahead: wait.map_or(0, |known| known.ahead.flows),
        };
        Some(ExplainedFlow {
            flow: traced,
            client: state.identity.id.0,
            trace_id: trace_id(self.intake.hints.trace_of(state.domain, flow.request)),
            completed_bytes: flow.completed,
            since_ns: flow.touched.0,
            wait: wait.map(|known| why(&known)),
        })
    }
}

fn why(known: &WaitingFlow) -> FlowWait {
    FlowWait {
        // Each name is one word, so the wire has it in lower case.
        obstacle: format!("{:?}", known.obstacle).to_lowercase(),
        rule: format!("{:?}", known.rule).to_lowercase(),
        level: known.level.0,
        begin_by_ns: known.begin_by.0 % Time::NEVER.0,
        moved_ns: known.moved.map_or(0, |(at, _)| at.0),
        moved_from: known.moved.map_or(0, |(_, from)| from.0),
        ahead_bytes: known.ahead.bytes,
        starved: known.is_starved,
    }
}
