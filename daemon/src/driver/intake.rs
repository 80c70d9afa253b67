//! What a record does: from shared memory into the links, and permits back.
//!
//! Every field of a record is untrusted. What decodes and names things that do not exist (a NIC, a
//! flow) is counted and otherwise resolved so that an honest client with a wrong configuration
//! goes on unscheduled; what does not decode ends the client ([`crate::driver`]).

use laxity_policy::{
    Action, BatchId, Event, FlowId, FlowSpec, Layer, Level, Permit, RequestId, Span, Stage, Time,
};
use laxity_shm::consumer::{Consumer, Wake};
use laxity_shm::producer::SlotRef;
use laxity_shm::record;
use laxity_wire::trace::SubmitOutcome;

use crate::clients::{Client, ClientState};
use crate::driver::flows::{Accounting, Flow, name, place};
use crate::driver::hints::Hints;
use crate::driver::on_wire::TRICKLE_SHIFT;
use crate::driver::ports::Port;
use crate::driver::trace::{Recorder, Seen};
use crate::driver::trust::Trust;
use crate::stats::LoopCounters;

/// A link that has just been asked is not asked again sooner, unless something happens to it.
pub const DUE_MIN: Span = Span::from_micros(10);
/// Hungry lanes fed with credit each time that a port is served.
const FEEDS: usize = 8;

/// Everything that records change, apart from the clients.
#[derive(Debug)]
pub struct Intake {
    /// The clock as last read.
    pub now: Time,
    /// Ports by `nic · 2 + direction`.
    pub ports: Vec<Port>,
    /// Batches, requests, admission.
    pub hints: Hints,
    /// Counters of the loop.
    pub counters: LoopCounters,
    /// Sleeping clients that a permit awaits, as (client, lane): woken after the round, because a
    /// wake-up costs more than all else in it.
    pub wakes: Vec<(u32, u16)>,
    /// Records for which nobody waits and nothing has to be decided, all in all: work requests on
    /// credit while nothing waits on any port, and their completions.
    pub quiet: u64,
    /// Owners whose clients are not to be scheduled.
    pub trust: Trust,
    /// Time after which what was not completed is written off.
    pub completion_timeout: Span,
    /// Flows of some client are held for what it owes ([`crate::driver::silence`]).
    pub holding: bool,
    /// The clients were told that nothing waits on any port.
    pub idle: bool,
    /// Credit may be granted: the mode is `enforce` and nothing is bypassed.
    pub credit: bool,
    /// Everything is bypassed by an operator's order.
    pub bypass: bool,
    /// Level of flows sent on credit, as the clients were told.
    pub credit_level: Level,
    /// What is recorded, while somebody wants it.
    pub trace: Option<Box<Recorder>>,
}

/// What a flow may do from the start.
#[derive(Clone, Copy)]
struct SubmitDecision {
    /// 0 if it has to wait.
    level: u8,
    bytes: u64,
    accounting: Accounting,
    /// It is part of a fetch.
    fetch: bool,
    /// It is not to be permitted for now.
    held: bool,
}

/// The lane that a record came from.
pub struct RecordOrigin<'a> {
    /// Index of the client.
    pub client: u32,
    /// Its state.
    pub state: &'a mut ClientState,
    /// Number of the lane.
    pub lane: u16,
    /// Its memory.
    pub consumer: &'a mut Consumer,
}

impl Intake {
    /// Index of the flow's port; `None` if there is no such NIC.
    #[inline(always)]
    fn port(&self, flow: &record::Flow) -> Option<u16> {
        let port = u16::from(flow.nic) * 2 + flow.direction as u16;
        (usize::from(port) < self.ports.len()).then_some(port)
    }

    /// The flow of a process as the policy sees it.
    #[inline(always)]
    fn spec(&mut self, id: FlowId, pid: u32, flow: &record::Flow) -> FlowSpec {
        let (mut batch, mut layer) = (BatchId(flow.batch), Layer(flow.layer));
        if flow.batch == 0
            && flow.stage == record::Stage::Collective
            && let Some(computed) = self.hints.computed_by(pid)
        {
            (batch, layer) = computed;
        }
        FlowSpec {
            flow: id,
            stage: flow.stage,
            batch,
            request: RequestId(flow.request),
            layer,
            bytes: flow.bytes,
            deadline: self
                .hints
                .deadline(self.now, flow.deadline_ns, flow.request),
            receiver_bound: flow.receiver_bound,
            whole: flow.whole,
        }
    }

    /// The hot path: decide, publish the permit, and only then keep the accounting.
    #[inline]
    pub(super) fn submit(&mut self, from: &mut RecordOrigin<'_>, at: SlotRef, flow: &record::Flow) {
        let room = from.state.flows < from.state.room;
        let id = name(from.client, from.lane, at.tag);
        let Some(index) = self.port(flow).filter(|_| room) else {
            return self.pass(from, at, flow, room);
        };
        let spec = self.spec(id, from.state.identity.pid, flow);
        let now = self.now;
        let port = &mut self.ports[usize::from(index)];
        let mut granted = SubmitDecision {
            level: 0,
            bytes: 0,
            accounting: Accounting::Link,
            fetch: false,
            held: false,
        };
        port.used_by(now, from.client, spec.stage);
        if is_read(flow) {
            (granted.fetch, granted.held) = self.hints.fetched_by(from, now, &spec, flow, index);
        }
        granted.held |= from.state.ports[usize::from(index)].holds(spec.stage);
        let permit = if granted.held {
            None
        } else {
            port.link.peek_permit(now, &spec).or_else(|| {
                let goes = is_anonymous(&spec) && port.has_room_alone(now, spec.bytes);
                goes.then(|| Permit {
                    bytes: spec.bytes,
                    level: port.link.level_alone(now, &spec),
                    last: true,
                })
            })
        };
        if let Some(permit) = permit {
            let (level, permitted) = (permit.level.0, permit.bytes);
            // A submit was consumed just now, so its slot waits: the permit cannot be stale.
            if let Ok(Wake::Needed) = from.consumer.permit(at, permitted, level, permit.last) {
                self.wakes.push((from.client, from.lane));
            }
            port.link.commit_permit(now, &spec, permit);
            let accounting = if permit.last {
                Accounting::Driver
            } else {
                Accounting::Link
            };
            granted = SubmitDecision {
                level,
                bytes: permitted,
                accounting,
                ..granted
            };
            let counted = &mut port.counters.stages[spec.stage.index()];
            let row = permit.level.row();
            counted.permits[row] += 1;
            counted.permitted_bytes[row] += permitted;
            counted.wait.record(Span::ZERO);
            from.state.counters.permitted_bytes += permitted;
            from.state.ports[usize::from(index)].sent(permitted);
            self.counters.permits += 1;
            self.counters.permits_at_once += 1;
        } else {
            port.link.handle(now, Event::FlowArrived(spec));
            if granted.held {
                port.link.handle(now, Event::FlowHeld { flow: id });
            }
        }
        port.dirty = true;
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        if self.credit {
            feed(port, now, from, index, &spec);
        }
        if self.trace.is_some() {
            let standing = match (granted.level, granted.held) {
                (_, true) => SubmitOutcome::Held,
                (0, false) if self.ports[usize::from(index)].link.waiting_flows() > 1 => {
                    SubmitOutcome::BehindOthers
                }
                (0, false) => SubmitOutcome::WindowFull,
                _ => SubmitOutcome::AtOnce,
            };
            self.traced(from, index, &spec, standing, granted);
        }
        self.keep(from, at, index, &spec, granted);
    }

    /// Records a flow that was submitted, after the link has heard of it.
    #[cold]
    fn traced(
        &mut self,
        from: &RecordOrigin<'_>,
        index: u16,
        spec: &FlowSpec,
        standing: SubmitOutcome,
        granted: SubmitDecision,
    ) {
        let link = &self.ports[usize::from(index)].link;
        let own = match standing {
            SubmitOutcome::Observed => 0,
            _ => granted.bytes,
        };
        let waits = matches!(
            standing,
            SubmitOutcome::BehindOthers | SubmitOutcome::WindowFull | SubmitOutcome::Held
        );
        let seen = Seen::Submitted {
            spec: *spec,
            pid: from.state.identity.pid,
            port: index,
            standing,
            granted: (granted.bytes, granted.level),
            window: (
                link.in_flight_bytes().saturating_sub(own),
                link.config().window_bytes,
            ),
            ahead: (link.waiting_flows() as u64).saturating_sub(u64::from(waits)),
        };
        self.note(seen);
    }

    /// Records something, if anything is recorded.
    #[inline]
    pub(super) fn note(&mut self, seen: Seen) {
        if let Some(trace) = &mut self.trace {
            trace.note(self.now, seen);
        }
    }

    /// Takes a peer's address for the number that flows of this client use.
    #[cold]
    pub(super) fn introduced(state: &mut ClientState, peer: u8, address: [u8; 16]) {
        let peers = state.peers.get_or_insert_with(|| Box::new([[0; 16]; 256]));
        peers[usize::from(peer)] = address;
    }

    /// Remembers a flow that was submitted.
    #[inline]
    fn keep(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        port: u16,
        spec: &FlowSpec,
        granted: SubmitDecision,
    ) {
        from.state.counters.flows += 1;
        from.state.counters.submitted_bytes += spec.bytes;
        if spec.bytes == 0 && granted.level != 0 {
            // Nothing of it will ever complete. It is over.
            self.ports[usize::from(port)].counters.stages[spec.stage.index()].completed_flows += 1;
            return;
        }
        let flow = Flow {
            seq: at.tag,
            bytes: spec.bytes,
            permitted: granted.bytes,
            completed: 0,
            deadline: spec.deadline,
            touched: self.now,
            request: spec.request,
            slot: at.slot,
            port,
            stage: spec.stage,
            level: granted.level,
            accounting: granted.accounting,
            fetch: granted.fetch,
        };
        from.state.flows += 1;
        from.state.waiting += usize::from(flow.waits());
        from.state.lanes.at(from.lane).flows.insert(flow);
    }

    /// Lets a flow out unscheduled that cannot be scheduled: its client has too many, or it names
    /// a NIC that is not configured here.
    #[cold]
    fn pass(&mut self, from: &mut RecordOrigin<'_>, at: SlotRef, flow: &record::Flow, room: bool) {
        unscheduled(from.state, flow, room);
        let level = Level::SCAVENGER.0;
        if let Ok(Wake::Needed) = from.consumer.permit(at, flow.bytes, level, true) {
            self.wakes.push((from.client, from.lane));
        }
    }

    #[inline]
    pub(super) fn submit_on_credit(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        flow: &record::Flow,
    ) {
        let room = from.state.flows < from.state.room;
        let id = name(from.client, from.lane, at.tag);
        let Some(index) = self.port(flow) else {
            return unscheduled(from.state, flow, room);
        };
        let spec = self.spec(id, from.state.identity.pid, flow);
        let port = &mut self.ports[usize::from(index)];
        self.quiet += u64::from(self.idle && spec.whole && spec.stage != Stage::Collective);
        // Spent credit returns to the port whatever becomes of the flow.
        port.credit_back(flow.bytes);
        port.used_by(self.now, from.client, spec.stage);
        let level = match spec.stage {
            Stage::Collective => self.credit_level,
            _ => port.link.level_alone(self.now, &spec),
        };
        if room {
            port.link.launch(self.now, spec.stage, level, spec.bytes);
            port.dirty = true;
        }
        if self.credit {
            feed(port, self.now, from, index, &spec);
        }
        if !room {
            return unscheduled(from.state, flow, room);
        }
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        counted.credited_flows += 1;
        counted.credited_bytes += spec.bytes;
        counted.permits[level.row()] += 1;
        counted.permitted_bytes[level.row()] += spec.bytes;
        from.state.counters.permitted_bytes += spec.bytes;
        from.state.ports[usize::from(index)].sent(spec.bytes);
        let mut fetch = false;
        if is_read(flow) {
            (fetch, _) = self.hints.fetched_by(from, self.now, &spec, flow, index);
        }
        let granted = SubmitDecision {
            level: level.0,
            bytes: spec.bytes,
            accounting: Accounting::Driver,
            fetch,
            held: false,
        };
        if self.trace.is_some() {
            self.traced(from, index, &spec, SubmitOutcome::OnCredit, granted);
        }
        self.keep(from, at, index, &spec, granted);
    }

    /// Accounting a flow that its client sends without asking, because the mode that holds for it
    /// is `observe`. The link does not hear of it: nobody granted these bytes, so they must not
    /// fill the window of the clients that do ask.
    pub(super) fn observe(
        &mut self,
        from: &mut RecordOrigin<'_>,
        at: SlotRef,
        flow: &record::Flow,
    ) {
        let room = from.state.flows < from.state.room;
        let id = name(from.client, from.lane, at.tag);
        let Some(index) = self.port(flow).filter(|_| room) else {
            return unscheduled(from.state, flow, room);
        };
        let spec = self.spec(id, from.state.identity.pid, flow);
        let counted = &mut self.ports[usize::from(index)].counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        counted.credited_flows += 1;
        counted.credited_bytes += spec.bytes;
        let granted = SubmitDecision {
            level: Level::SCAVENGER.0,
            bytes: spec.bytes,
            accounting: Accounting::Nobody,
            fetch: false,
            held: false,
        };
        if self.trace.is_some() {
            self.traced(from, index, &spec, SubmitOutcome::Observed, granted);
        }
        self.keep(from, at, index, &spec, granted);
    }

    #[inline]
    pub(super) fn completed(&mut self, from: &mut RecordOrigin<'_>, tag: u64, bytes: u64) {
        let now = self.now;
        let state = &mut *from.state;
        let flows = &mut state.lanes.at(from.lane).flows;
        let Some(flow) = flows.get_mut(tag) else {
            return;
        };
        // More than was permitted cannot have been sent; the excess is the client's mistake.
        let outstanding = flow.outstanding();
        let bytes = bytes.min(outstanding);
        flow.completed += bytes;
        // A trickle is no progress: it would hold the window for as long as it lasts. What is only
        // observed holds nothing.
        if bytes
            > if flow.accounting == Accounting::Nobody {
                0
            } else {
                outstanding >> TRICKLE_SHIFT
            }
        {
            flow.touched = now;
        }
        let done = flow.completed >= flow.bytes;
        let (index, stage) = (flow.port, flow.stage);
        let owed = matches!(flow.accounting, Accounting::Owed | Accounting::OwedInPart);
        state.counters.completed_bytes += bytes;
        state.completed = now;
        self.hints.completed(now, flow.request, flow.port, bytes);
        let port = &mut self.ports[usize::from(flow.port)];
        self.quiet += u64::from(self.idle && port.link.waiting_flows() == 0);
        let on_wire = &mut state.ports[usize::from(flow.port)];
        match flow.accounting {
            Accounting::Link => {
                let flow = name(from.client, from.lane, tag);
                port.link.handle(now, Event::BytesCompleted { flow, bytes });
                on_wire.done(bytes);
            }
            Accounting::Driver => {
                port.link.land(now, Level(flow.level), bytes);
                on_wire.done(bytes);
            }
            Accounting::Nobody | Accounting::Owed | Accounting::OwedInPart => {}
        }
        port.dirty = true;
        let counted = &mut port.counters.stages[flow.stage.index()];
        counted.completed_bytes += bytes;
        if done {
            counted.completed_flows += 1;
            counted.deadline_misses += u64::from(now > flow.deadline);
            if flow.fetch {
                let flow = name(from.client, from.lane, tag);
                self.hints.fetched(now, flow);
            }
            state.flows -= usize::from(flows.remove(tag));
        }
        if owed {
            self.paid(
                from.client,
                from.state,
                (from.lane, tag),
                (index, stage),
                bytes,
            );
        }
        self.note(Seen::Completed(name(from.client, from.lane, tag).0, bytes));
    }

    pub(super) fn cancelled(&mut self, from: &mut RecordOrigin<'_>, tag: u64, granted: u64) {
        // A client that withdraws while everything is bypassed sends the rest unscheduled;
        // otherwise it will not send it at all.
        if (self.bypass || from.state.told_to_bypass())
            && let Some(flow) = from.state.lanes.at(from.lane).flows.get_mut(tag)
        {
            from.state.counters.bypassed_bytes += flow.bytes.saturating_sub(granted);
        }
        self.cancel(from.client, from.state, from.lane, tag);
    }

    /// Ends a flow that will not complete.
    pub(super) fn cancel(&mut self, client: u32, state: &mut ClientState, lane: u16, seq: u64) {
        let flows = &mut state.lanes.at(lane).flows;
        let Some(flow) = flows.get_mut(seq) else {
            return;
        };
        state.waiting -= usize::from(flow.waits());
        let port = &mut self.ports[usize::from(flow.port)];
        match flow.accounting {
            Accounting::Link | Accounting::OwedInPart => {
                let flow = name(client, lane, seq);
                port.link.handle(self.now, Event::FlowCancelled { flow });
            }
            Accounting::Driver => port
                .link
                .land(self.now, Level(flow.level), flow.outstanding()),
            Accounting::Nobody | Accounting::Owed => {}
        }
        let on_wire = &mut state.ports[usize::from(flow.port)];
        let owed = matches!(flow.accounting, Accounting::Owed | Accounting::OwedInPart);
        let (index, stage, outstanding) = (flow.port, flow.stage, flow.outstanding());
        match flow.accounting {
            Accounting::Link | Accounting::Driver => on_wire.dropped(outstanding),
            _ => {}
        }
        port.dirty = true;
        if flow.fetch {
            self.hints.fetched(self.now, name(client, lane, seq));
        }
        state.counters.cancelled_flows += 1;
        state.flows -= usize::from(flows.remove(seq));
        if owed {
            // What kept others waiting and is never completed is lost.
            let window = self.ports[usize::from(index)].window_bytes();
            state
                .lost
                .add(self.now, outstanding, window, self.completion_timeout);
            self.paid(client, state, (lane, seq), (index, stage), outstanding);
        }
        self.note(Seen::Cancelled(name(client, lane, seq).0));
    }

    /// The owner of a lane is gone: all its flows end. The credit that the lane holds stays with
    /// it, for its next owner.
    pub(super) fn lane_gone(&mut self, client: u32, state: &mut ClientState, lane: u16) {
        for seq in state.lanes.at(lane).flows.seqs() {
            self.cancel(client, state, lane, seq);
        }
    }

    /// A client is gone: all its flows end, and the credit it holds comes back to the ports.
    ///
    /// A client released for garbage is gone twice, then and when it hangs up; its credit returns
    /// once.
    pub fn client_gone(&mut self, index: u32, client: &mut Client) {
        if core::mem::replace(&mut client.state.settled, true) {
            return;
        }
        self.leaves(&client.state);
        for lane in 0..client.state.lanes.count() {
            self.lane_gone(index, &mut client.state, lane);
        }
        for (_, consumer) in client.served.consumers() {
            for (index, port) in self.ports.iter_mut().enumerate() {
                let (granted, spent) = consumer.credit(index);
                port.credit_back(granted.saturating_sub(spent));
            }
        }
    }

    /// Permits what the links allow. Called after each round: a link that something happened to
    /// is asked until it says `None`.
    #[inline]
    pub fn serve(&mut self, clients: &mut [Option<Client>]) {
        for index in 0..self.ports.len() {
            if self.ports[index].dirty {
                self.serve_port(clients, index);
            }
        }
    }

    fn serve_port(&mut self, clients: &mut [Option<Client>], index: usize) {
        self.ports[index].dirty = false;
        while self.ports[index].link.waiting_flows() > 0 {
            match self.ports[index].link.poll_action(self.now) {
                Some(Action::Permit {
                    flow,
                    bytes,
                    level,
                    last,
                }) => {
                    self.permit(clients, flow, bytes, level, last);
                }
                // The link's own counters have it.
                Some(Action::Moved { .. }) => {}
                None => break,
            }
        }
        let port = &mut self.ports[index];
        // With nothing waiting there is nothing to permit and nobody to move.
        port.due = match port.link.waiting_flows() {
            0 => Time::NEVER,
            _ => port
                .link
                .next_deadline()
                .unwrap_or(Time::NEVER)
                .max(self.now + DUE_MIN),
        };
        if !port.hungry.is_empty() && self.credit {
            self.feed_hungry(clients, index);
        }
    }

    fn permit(
        &mut self,
        clients: &mut [Option<Client>],
        id: FlowId,
        bytes: u64,
        level: Level,
        last: bool,
    ) {
        let (index, lane, seq) = place(id);
        let Some(client) = clients.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let state = &mut client.state;
        let flows = &mut state.lanes.at(lane).flows;
        let Some(flow) = flows.get_mut(seq) else {
            return;
        };
        let first = flow.level == 0;
        let waited = self.now.since(flow.touched);
        if first {
            flow.level = level.0;
        }
        flow.permitted = flow.permitted.saturating_add(bytes).min(flow.bytes);
        flow.touched = self.now;
        state.waiting -= usize::from(!flow.waits());
        let at = SlotRef {
            slot: flow.slot,
            tag: flow.seq,
        };
        let Some(consumer) = client.served.consumer(lane) else {
            return;
        };
        match consumer.permit(at, flow.permitted, flow.level, last) {
            Ok(Wake::Needed) => self.wakes.push((index, lane)),
            Ok(Wake::NotNeeded) => {}
            // Withdrawn: the record that says so is on its way through the lane and will end the
            // flow when it is read.
            Err(_) => return,
        }
        let row = Level(flow.level).row();
        let counted = &mut self.ports[usize::from(flow.port)].counters.stages[flow.stage.index()];
        counted.permits[row] += 1;
        counted.permitted_bytes[row] += bytes;
        if first {
            counted.wait.record(waited);
        }
        state.counters.permitted_bytes += bytes;
        state.ports[usize::from(flow.port)].sent(bytes);
        self.counters.permits += 1;
        let level = flow.level;
        if flow.bytes == 0 {
            counted.completed_flows += 1;
            state.flows -= usize::from(flows.remove(seq));
        }
        self.note(Seen::Permitted(id.0, bytes, level, last));
    }

    /// Feeds some of the lanes that ran out of credit while there was none.
    fn feed_hungry(&mut self, clients: &mut [Option<Client>], index: usize) {
        let port = &mut self.ports[index];
        for _ in 0..FEEDS.min(port.hungry.len()) {
            if !port.has_credit(self.now) {
                return;
            }
            let Some((client, lane)) = port.hungry.pop_front() else {
                return;
            };
            let Some(state) = clients.get_mut(client as usize).and_then(Option::as_mut) else {
                continue;
            };
            let Client { state, served, .. } = state;
            state.lanes.at(lane).hungry[index] = false;
            let feeds = !state.released && state.room > 0 && !state.ports[index].is_held();
            let Some(consumer) = served.consumer(lane).filter(|_| feeds) else {
                continue;
            };
            let mut from = RecordOrigin {
                client,
                state,
                lane,
                consumer,
            };
            feed_collectives(port, self.now, &mut from, index as u16);
        }
        // The others have their turn in the next round.
        port.dirty |= !port.hungry.is_empty() && port.has_credit(self.now);
    }
}

impl Hints {
    /// A flow that names its peer. Gives whether it belongs to a fetch, and whether it is to be
    /// held.
    #[cold]
    fn fetched_by(
        &mut self,
        from: &RecordOrigin<'_>,
        now: Time,
        spec: &FlowSpec,
        flow: &record::Flow,
        port: u16,
    ) -> (bool, bool) {
        let address = from
            .state
            .peers
            .as_ref()
            .map(|peers| peers[usize::from(flow.peer)]);
        match address {
            // What has nothing by which it could be ranked is not ordered.
            Some(address) if address != [0; 16] && flow.batch != 0 => {
                self.fetches(now, spec, address, port)
            }
            _ => (false, false),
        }
    }
}

/// Whether a flow comes in from a peer that it names, and will end some time: one without bytes is
/// over at once.
#[inline]
fn is_read(flow: &record::Flow) -> bool {
    flow.peer != 0 && flow.bytes != 0 && flow.direction == record::Direction::Ingress
}

/// Counts a flow that goes out without being scheduled.
#[cold]
fn unscheduled(state: &mut ClientState, flow: &record::Flow, room: bool) {
    state.counters.flows += 1;
    state.counters.submitted_bytes += flow.bytes;
    state.counters.bypassed_bytes += flow.bytes;
    state.counters.overflowed_flows += u64::from(!room);
    state.counters.unknown_nic_flows += u64::from(room);
}

/// After a flow of `spec`: feeds its lane with credit of port `index`, if the like of it may use
/// any.
#[inline]
fn feed(port: &mut Port, now: Time, from: &mut RecordOrigin<'_>, index: u16, spec: &FlowSpec) {
    if from.state.room == 0 || from.state.ports[usize::from(index)].is_held() {
        // It is not scheduled now, or owes: whoever has credit does not ask.
    } else if spec.stage == Stage::Collective {
        feed_collectives(port, now, from, index);
    } else if spec.whole {
        let alone = is_anonymous(spec) && port.has_one_user(now);
        port.feed_idle(alone, usize::from(index), from.consumer);
    }
}

/// A work request of which nothing is known by which it could be ordered among its like.
const fn is_anonymous(spec: &FlowSpec) -> bool {
    spec.whole && spec.batch.0 == 0 && spec.request.0 == 0 && spec.deadline.0 == Time::NEVER.0
}

/// Feeds a lane that has collectives, or notes that it is hungry.
#[inline]
fn feed_collectives(port: &mut Port, now: Time, from: &mut RecordOrigin<'_>, index: u16) {
    let at = usize::from(index);
    if !port.feed(now, at, from.consumer) {
        let hungry = &mut from.state.lanes.at(from.lane).hungry[at];
        if !*hungry {
            *hungry = true;
            port.hungry.push_back((from.client, from.lane));
        }
    }
}
