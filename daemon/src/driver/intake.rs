//! Submitted flows: from shared memory into the links, and permits back.
//!
//! Every field of a record is untrusted. A flow with an unknown NIC is counted and goes out
//! unscheduled, so that an honest client with a wrong configuration still works. A flow of a NIC
//! that is gone goes out unscheduled, too. A record that does not decode releases its client
//! ([`crate::driver`]). [`super::ends`] ends flows, and [`super::serve`] permits those that wait.

use laxity_policy::{
    BatchId, Event, FlowSpec, Layer, Level, PeerId, Permit, RequestId, Span, Stage, Time,
};
use laxity_shm::consumer::Wake;
use laxity_shm::producer::SlotRef;
use laxity_shm::record;
use laxity_wire::trace::SubmitOutcome;

use crate::clients::{ClientState, RecordOrigin};
use crate::driver::credit::CreditConditions;
use crate::driver::flows::{Accounting, FlowState, flow_id};
use crate::driver::hint_time::{ARRIVAL_FREE, HintTime};
use crate::driver::hints::Hints;
use crate::driver::peers::PeerNumbers;
use crate::driver::ports::DriverPort;
use crate::driver::trace::{TracedEvent, Tracer};
use crate::driver::trust::OwnerTrust;
use crate::stats::LoopCounters;

/// All state that records change, apart from the clients.
#[derive(Debug)]
pub struct Intake {
    /// The last reading of the clock.
    pub now: Time,
    /// The ports by `nic · 2 + direction`.
    pub ports: Vec<DriverPort>,
    pub hints: Hints,
    pub hint_time: HintTime,
    pub counters: LoopCounters,
    /// Sleeping clients that have a permit, as (client, lane). They are woken after the round,
    /// because a wake-up costs more than the rest of the round.
    pub wakes: Vec<(u32, u16)>,
    /// The number of records that no client waits on and that need no decision: work requests on
    /// credit while nothing waits on any port, and their completions.
    pub quiet: u64,
    /// The owners whose clients are not scheduled.
    pub trust: OwnerTrust,
    /// Whether flows of any client are held for its owed bytes ([`crate::driver::silence`]).
    pub holding: bool,
    pub credit: CreditConditions,
    pub bypass: bool,
    pub trace: Tracer,
    pub peers: PeerNumbers,
}

/// What a flow may send when it is submitted.
#[derive(Clone, Copy)]
struct SubmitDecision {
    outcome: SubmitOutcome,
    /// The level, or 0 if the flow has to wait.
    level: u8,
    bytes: u64,
    accounting: Accounting,
    is_fetch: bool,
}

impl SubmitDecision {
    /// Permits a whole flow, for which the driver accounts.
    const fn whole(level: Level, spec: &FlowSpec, is_fetch: bool) -> Self {
        Self {
            outcome: SubmitOutcome::OnCredit,
            level: level.0,
            bytes: spec.bytes,
            accounting: Accounting::Driver,
            is_fetch,
        }
    }
}

impl Intake {
    /// Returns the index of the flow's port, or `None` if there is no such NIC.
    #[inline(always)]
    fn port(&self, flow: &record::Flow) -> Option<u16> {
        let port = u16::from(flow.nic) * 2 + flow.direction as u16;
        (usize::from(port) < self.ports.len()).then_some(port)
    }

    #[inline(always)]
    fn is_absent(&self, port: u16) -> bool {
        self.ports[usize::from(port)].is_absent
    }

    #[inline(always)]
    fn spec(&mut self, from: &RecordOrigin<'_>, at: SlotRef, flow: &record::Flow) -> FlowSpec {
        let name = flow_id(from.client, from.lane, at.tag);
        // Collectives go first to every peer. So their peers need no numbers, of which there are
        // few.
        let peer = match flow.stage {
            Stage::Collective => PeerId(0),
            _ => from.state.number_of(flow.peer),
        };
        if !self.hint_time.hears(self.now, from.state.domain) {
            let anonymous = FlowSpec::anonymous(name, flow.stage, flow.bytes);
            return FlowSpec { whole: flow.whole, peer, ..anonymous };
        }
        let (mut batch, mut layer) = (BatchId(flow.batch), Layer(flow.layer));
        let hints = self.hints.of(from.state.domain);
        if flow.batch == 0
            && flow.stage == Stage::Collective
            && let Some(computed) = hints.computed_by(from.state.identity.pid)
        {
            (batch, layer) = computed;
        }
        FlowSpec {
            flow: name,
            stage: flow.stage,
            batch,
            request: RequestId(flow.request),
            layer,
            bytes: flow.bytes,
            deadline: hints.deadline(self.now, flow.deadline_ns, flow.request),
            peer,
            whole: flow.whole,
        }
    }

    /// Handles a submitted flow. This is the hot path: it publishes the permit before any
    /// accounting.
    #[inline]
    pub(super) fn submit(&mut self, from: &mut RecordOrigin<'_>, at: SlotRef, flow: &record::Flow) {
        let room = from.state.flows < from.state.room;
        let Some(index) = self.port(flow).filter(|&index| room && !self.is_absent(index)) else {
            return self.bypass_flow(from, at, flow, room);
        };
        let spec = self.spec(from, at, flow);
        let (now, domain) = (self.now, from.state.domain);
        self.ports[usize::from(index)].used_by(now, from.client, spec.stage);
        let is_fetch = self.joins_fetch(from, &spec, flow);
        let port = &mut self.ports[usize::from(index)];
        let held = from.state.ports[usize::from(index)].holds(spec.stage);
        let permit = if held { None } else { port.permit_at_once(now, domain, &spec) };
        let decision = if let Some(permit) = permit {
            // The slot waits, because its submit was consumed just now. So the permit can't be
            // stale.
            let wake = (from.consumer).permit(at, permit.bytes, permit.level.0, permit.last);
            if let Ok(Wake::Needed) = wake {
                self.wakes.push((from.client, from.lane));
            }
            port.link.commit_permit(now, domain, &spec, permit);
            self.permitted_at_once(from, index, &spec, permit, is_fetch)
        } else {
            let says_much = spec.batch != BatchId(0) && spec.deadline != Time::NEVER;
            let began = says_much.then(|| self.hint_time.begin());
            port.link.handle(now, domain, Event::FlowArrived(spec));
            // Its deadline may change the ranks of all groups of its batch.
            if let Some(began) = began
                && self.hint_time.end(now, domain, began, ARRIVAL_FREE)
            {
                self.hint_time.warn(now, &from.state.identity.owner);
            }
            if held {
                port.link.handle(now, domain, Event::FlowHeld { flow: spec.flow });
            }
            SubmitDecision {
                outcome: match held {
                    true => SubmitOutcome::Held,
                    false if port.link.waiting_flows() > 1 => SubmitOutcome::BehindOthers,
                    false => SubmitOutcome::WindowFull,
                },
                level: 0,
                bytes: 0,
                accounting: Accounting::Link,
                is_fetch,
            }
        };
        let port = &mut self.ports[usize::from(index)];
        port.dirty = true;
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        if self.credit.is_given {
            port.refill(now, from, index, &spec);
        }
        self.keep(from, at, index, &spec, decision);
    }

    #[inline]
    fn permitted_at_once(
        &mut self,
        from: &mut RecordOrigin<'_>,
        index: u16,
        spec: &FlowSpec,
        permit: Permit,
        is_fetch: bool,
    ) -> SubmitDecision {
        let counted = &mut self.ports[usize::from(index)].counters.stages[spec.stage.index()];
        counted.permit(permit.level, permit.bytes);
        counted.wait.record(Span::ZERO);
        from.state.counters.permitted_bytes += permit.bytes;
        from.state.ports[usize::from(index)].sent(permit.bytes);
        self.counters.status.permits += 1;
        self.counters.status.permits_at_once += 1;
        SubmitDecision {
            outcome: SubmitOutcome::AtOnce,
            level: permit.level.0,
            bytes: permit.bytes,
            accounting: if permit.last { Accounting::Driver } else { Accounting::Link },
            is_fetch,
        }
    }

    /// Adds a flow to its fetch, if the flow comes in and names the peer that it comes from. A flow
    /// without bytes is over at once and belongs to no fetch.
    #[inline]
    fn joins_fetch(
        &mut self,
        from: &RecordOrigin<'_>,
        spec: &FlowSpec,
        flow: &record::Flow,
    ) -> bool {
        if flow.peer == 0 || flow.bytes == 0 || flow.direction != record::Direction::Ingress {
            return false;
        }
        match from.state.address_of(flow.peer) {
            // A flow without a batch loads no port in the coordinator's estimates.
            Some(peer) if flow.batch != 0 && spec.batch != BatchId(0) => {
                self.hints.cluster.fetches(self.now, spec, peer)
            }
            _ => false,
        }
    }

    /// Records a submitted flow in the trace, after the link has handled it.
    #[cold]
    fn traced(
        &mut self,
        from: &RecordOrigin<'_>,
        index: u16,
        spec: &FlowSpec,
        decision: SubmitDecision,
    ) {
        use SubmitOutcome::{BehindOthers, Held, Observed, WindowFull};
        let link = self.ports[usize::from(index)].link.link(from.state.domain);
        let own = match decision.outcome {
            Observed => 0,
            _ => decision.bytes,
        };
        let waits = matches!(decision.outcome, BehindOthers | WindowFull | Held);
        let seen = TracedEvent::Submitted {
            spec: *spec,
            pid: from.state.identity.pid,
            port: index,
            outcome: decision.outcome,
            permitted: (decision.bytes, decision.level),
            window: (link.in_flight_bytes().saturating_sub(own), link.config().window_bytes),
            ahead: (link.waiting_flows() as u64).saturating_sub(u64::from(waits)),
        };
        self.trace.note(self.now, seen);
    }

    #[inline]
    fn keep(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        port: u16,
        spec: &FlowSpec,
        decision: SubmitDecision,
    ) {
        if self.trace.is_on() {
            self.traced(from, port, spec, decision);
        }
        from.state.counters.flows += 1;
        from.state.counters.submitted_bytes += spec.bytes;
        if spec.bytes == 0 && decision.level != 0 {
            // A flow without bytes gets no completion. It is over.
            self.ports[usize::from(port)].counters.stages[spec.stage.index()].completed_flows += 1;
            return;
        }
        let flow = FlowState {
            seq: at.tag,
            bytes: spec.bytes,
            permitted: decision.bytes,
            completed: 0,
            deadline: spec.deadline,
            touched: self.now,
            request: spec.request,
            slot: at.slot,
            port: port as u8,
            peer: spec.peer.0 as u8,
            stage: spec.stage,
            level: decision.level,
            accounting: decision.accounting,
            fetch: decision.is_fetch,
        };
        from.state.flows += 1;
        from.state.waiting += usize::from(flow.waits());
        from.state.lanes.at(from.lane).flows.insert(flow);
    }

    /// Sends a flow unscheduled, because its client has too many flows, or its NIC is not
    /// configured or gone.
    #[cold]
    fn bypass_flow(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        flow: &record::Flow,
        room: bool,
    ) {
        unscheduled(from.state, flow, room);
        let level = Level::SCAVENGER.0;
        if let Ok(Wake::Needed) = from.consumer.permit(at, flow.bytes, level, true) {
            self.wakes.push((from.client, from.lane));
        }
    }

    /// Handles a flow that was sent on credit. The spent credit returns to the port even if the
    /// flow is not scheduled.
    #[inline]
    pub(super) fn submit_on_credit(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        flow: &record::Flow,
    ) {
        let room = from.state.flows < from.state.room;
        let Some(index) = self.port(flow) else { return unscheduled(from.state, flow, room) };
        let spec = self.spec(from, at, flow);
        let (now, domain) = (self.now, from.state.domain);
        let is_quiet = self.credit.is_idle() && spec.whole && spec.stage != Stage::Collective;
        let is_scheduled = room && !self.is_absent(index);
        self.quiet += u64::from(is_quiet);
        let port = &mut self.ports[usize::from(index)];
        port.credit.take_back(flow.bytes);
        port.used_by(now, from.client, spec.stage);
        let level = match spec.stage {
            Stage::Collective => self.credit.level,
            _ => port.link.link(domain).level_alone(now, &spec),
        };
        if is_scheduled {
            port.link.add_in_flight(now, domain, (spec.stage, spec.peer), level, spec.bytes);
            port.dirty = true;
        }
        if self.credit.is_given {
            port.refill(now, from, index, &spec);
        }
        if !is_scheduled {
            return unscheduled(from.state, flow, room);
        }
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.on_credit(spec.bytes);
        counted.permit(level, spec.bytes);
        from.state.counters.permitted_bytes += spec.bytes;
        from.state.ports[usize::from(index)].sent(spec.bytes);
        let is_fetch = self.joins_fetch(from, &spec, flow);
        self.keep(from, at, index, &spec, SubmitDecision::whole(level, &spec, is_fetch));
    }

    /// Accounts for a flow that its client sent without a permit in mode `observe`. The link does
    /// not see it, because such bytes must not fill the window of clients that ask.
    pub(super) fn observe(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        flow: &record::Flow,
    ) {
        let room = from.state.flows < from.state.room;
        let Some(index) = self.port(flow).filter(|&index| room && !self.is_absent(index)) else {
            return unscheduled(from.state, flow, room);
        };
        let spec = self.spec(from, at, flow);
        let port = &mut self.ports[usize::from(index)];
        port.counters.stages[spec.stage.index()].on_credit(spec.bytes);
        port.observed(self.now, from.state.job, &spec);
        from.state.counters.observed_bytes += spec.bytes;
        let decision = SubmitDecision {
            outcome: SubmitOutcome::Observed,
            accounting: Accounting::Nobody,
            ..SubmitDecision::whole(Level::SCAVENGER, &spec, false)
        };
        self.keep(from, at, index, &spec, decision);
    }
}

#[cold]
fn unscheduled(state: &mut ClientState, flow: &record::Flow, room: bool) {
    state.counters.flows += 1;
    state.counters.submitted_bytes += flow.bytes;
    state.counters.bypassed_bytes += flow.bytes;
    state.counters.overflowed_flows += u64::from(!room);
    state.counters.unknown_nic_flows += u64::from(room);
}
