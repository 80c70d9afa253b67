//! The end of flows: their bytes complete, their client cancels them, or the client is gone.

use laxity_policy::{Event, Level};

use super::flows::{Accounting, flow_id};
use super::intake::Intake;
use super::on_wire::TRICKLE_SHIFT;
use super::trace::TracedEvent;
use crate::clients::{AttachedClient, ClientState, RecordOrigin};

/// What happens to the bytes of a cancelled flow that were not permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Withdrawn,
    /// The client sends the bytes unscheduled. The caller has counted them as bypassed.
    Unscheduled,
}

impl Intake {
    /// Accounts for bytes of a flow that its client reported as completed.
    #[inline]
    pub(super) fn completed(&mut self, from: &mut RecordOrigin<'_>, tag: u64, bytes: u64) {
        let (now, id) = (self.now, flow_id(from.client, from.lane, tag));
        let domain = from.state.domain;
        let state = &mut *from.state;
        let flows = &mut state.lanes.at(from.lane).flows;
        let Some(flow) = flows.get_mut(tag) else { return };
        // No more than the permitted bytes can have been sent. Any excess is the client's error.
        let outstanding = flow.outstanding();
        let bytes = bytes.min(outstanding);
        flow.completed += bytes;
        // A trickle is no progress, because it would hold the window for as long as it lasts. Bytes
        // in mode `observe` hold no window.
        let trickle = match flow.accounting {
            Accounting::Nobody => 0,
            _ => outstanding >> TRICKLE_SHIFT,
        };
        if bytes > trickle {
            flow.touched = now;
        }
        let done = flow.completed >= flow.bytes;
        let (index, stage) = (flow.port(), flow.stage);
        let owed = matches!(flow.accounting, Accounting::Owed | Accounting::OwedInPart);
        state.counters.completed_bytes += bytes;
        state.completed = now;
        self.hints.completed(now, domain, flow.request, flow.port(), bytes);
        let port = &mut self.ports[usize::from(flow.port())];
        self.quiet += u64::from(self.credit.is_idle() && port.link.waiting_flows() == 0);
        let on_wire = &mut state.ports[usize::from(flow.port())];
        match flow.accounting {
            Accounting::Link => {
                port.link.handle(now, domain, Event::BytesCompleted { flow: id, bytes });
                on_wire.done(bytes);
            }
            Accounting::Driver => {
                port.link.remove_in_flight(now, domain, flow.peer(), Level(flow.level), bytes);
                on_wire.done(bytes);
            }
            Accounting::Nobody | Accounting::Owed | Accounting::OwedInPart => {}
        }
        port.dirty = true;
        let counted = &mut port.counters.stages[flow.stage.index()];
        counted.completed_bytes += bytes;
        if done {
            counted.completed_flows += 1;
            let is_late = now > flow.deadline;
            counted.deadline_misses += u64::from(is_late);
            state.counters.deadline_misses += u64::from(is_late);
            if is_late {
                let event = "a flow missed its deadline; not every one is logged";
                self.hints.log(now, domain, flow.request, event);
            }
            if flow.fetch {
                self.hints.cluster.fetches.left(now, id);
            }
            state.flows -= usize::from(flows.remove(tag));
        }
        if owed {
            self.paid(id, from.state, index, stage, bytes);
        }
        self.trace.note(now, TracedEvent::Completed(id.0, bytes));
    }

    /// Ends a flow that its client cancelled after it used `permitted` bytes.
    pub(super) fn cancelled(&mut self, from: &mut RecordOrigin<'_>, tag: u64, permitted: u64) {
        // During a bypass, the client sends the rest of the flow unscheduled. Otherwise it does not
        // send the rest at all.
        let rest = match self.bypass || from.state.told_to_bypass() {
            true => Rest::Unscheduled,
            false => Rest::Withdrawn,
        };
        if rest == Rest::Unscheduled
            && let Some(flow) = from.state.lanes.at(from.lane).flows.get_mut(tag)
        {
            from.state.counters.bypassed_bytes += flow.bytes.saturating_sub(permitted);
        }
        self.cancel(from.client, from.state, (from.lane, tag), rest);
    }

    /// Ends a flow that will not complete.
    pub(super) fn cancel(
        &mut self,
        client: u32,
        state: &mut ClientState,
        (lane, seq): (u16, u64),
        rest: Rest,
    ) {
        let (now, id) = (self.now, flow_id(client, lane, seq));
        let domain = state.domain;
        let flows = &mut state.lanes.at(lane).flows;
        let Some(flow) = flows.get_mut(seq) else { return };
        state.waiting -= usize::from(flow.waits());
        let port = &mut self.ports[usize::from(flow.port())];
        match flow.accounting {
            Accounting::Link | Accounting::OwedInPart => {
                port.link.handle(now, domain, Event::FlowCancelled { flow: id });
            }
            Accounting::Driver => {
                let level = Level(flow.level);
                port.link.write_off(now, domain, flow.peer(), level, flow.outstanding());
            }
            Accounting::Nobody | Accounting::Owed => {}
        }
        let owed = matches!(flow.accounting, Accounting::Owed | Accounting::OwedInPart);
        let (index, stage, outstanding) = (flow.port(), flow.stage, flow.outstanding());
        if matches!(flow.accounting, Accounting::Link | Accounting::Driver) {
            state.ports[usize::from(index)].dropped(outstanding);
        }
        port.dirty = true;
        if flow.fetch {
            self.hints.cluster.fetches.left(now, id);
        }
        state.counters.cancelled_flows += 1;
        if rest == Rest::Withdrawn {
            state.counters.withdrawn_bytes += flow.bytes.saturating_sub(flow.permitted);
        }
        state.flows -= usize::from(flows.remove(seq));
        if owed {
            // Owed bytes that will not complete are a loss, unless their NIC is gone.
            let port = &self.ports[usize::from(index)];
            if !port.is_absent {
                state.lost.add(now, outstanding, port.window_bytes(), self.trust.timeout);
            }
            self.paid(id, state, index, stage, outstanding);
        }
        self.trace.note(now, TracedEvent::Cancelled(id.0));
    }

    /// Ends all flows of a lane whose owner is gone. The lane keeps its credit for its next owner.
    pub(super) fn lane_gone(&mut self, client: u32, state: &mut ClientState, lane: u16) {
        for seq in state.lanes.at(lane).flows.seqs(|_| true) {
            self.cancel(client, state, (lane, seq), Rest::Withdrawn);
        }
    }

    /// Ends all flows of a client that is gone, and returns its credit to the ports.
    ///
    /// It is called twice for a client that was released for garbage and then hangs up. The second
    /// call does nothing.
    pub fn client_gone(&mut self, index: u32, client: &mut AttachedClient) {
        if core::mem::replace(&mut client.state.settled, true) {
            return;
        }
        self.leaves(&client.state);
        for lane in 0..client.state.lanes.count() {
            self.lane_gone(index, &mut client.state, lane);
        }
        for port in &mut self.ports {
            // The next client may get this index.
            port.credit.lanes_without_credit.retain(|&(client, _)| client != index);
        }
        for (_, consumer) in client.served.consumers() {
            for (index, port) in self.ports.iter_mut().enumerate() {
                let (permitted, spent) = consumer.credit(index);
                port.credit.take_back(permitted.saturating_sub(spent));
            }
        }
    }
}
