//! Permits for flows that wait.

use laxity_policy::{Action, FlowId, Level, Permit, Span, Time};
use laxity_shm::consumer::Wake;
use laxity_shm::producer::SlotRef;

use super::flows::split_flow_id;
use super::intake::Intake;
use super::trace::TracedEvent;
use crate::clients::AttachedClient;

/// Actions of a link after which others have a turn. One event can cause very many: all flows of a
/// request that can't be in time any more move to the scavenger.
const ACTIONS_MAX: usize = 512;
/// The shortest time between two calls of a link without an event.
const DUE_MIN: Span = Span::from_micros(10);

impl Intake {
    /// Permits what the links allow, after each round. A link with an event is called until it
    /// returns `None`, or [`ACTIONS_MAX`] times and then again in the next turn.
    #[inline]
    pub fn serve(&mut self, clients: &mut [Option<AttachedClient>]) {
        for index in 0..self.ports.len() {
            if self.ports[index].dirty {
                self.serve_port(clients, index);
            }
        }
    }

    fn serve_port(&mut self, clients: &mut [Option<AttachedClient>], index: usize) {
        self.ports[index].dirty = false;
        for turn in 0.. {
            if self.ports[index].link.waiting_flows() == 0 {
                break;
            }
            if turn == ACTIONS_MAX {
                self.ports[index].due = self.now;
                return;
            }
            match self.ports[index].link.poll_action(self.now) {
                Some(Action::Permit { flow, bytes, level, last }) => {
                    let permit = Permit { bytes, level, last };
                    self.permit(clients, flow, permit);
                }
                // The link itself counts moves.
                Some(Action::Moved { .. }) => {}
                None => break,
            }
        }
        let port = &mut self.ports[index];
        // A link without waiting flows has nothing to permit or to move.
        port.due = match port.link.waiting_flows() {
            0 => Time::NEVER,
            _ => port.link.next_deadline().unwrap_or(Time::NEVER).max(self.now + DUE_MIN),
        };
        if !port.credit.lanes_without_credit.is_empty() && self.credit.is_given {
            port.refill_waiting_lanes(clients, index);
        }
    }

    fn permit(&mut self, clients: &mut [Option<AttachedClient>], id: FlowId, permit: Permit) {
        let Permit { bytes, level, last } = permit;
        let (index, lane, seq) = split_flow_id(id);
        let Some(client) = clients.get_mut(index as usize).and_then(Option::as_mut) else { return };
        let state = &mut client.state;
        let flows = &mut state.lanes.at(lane).flows;
        let Some(flow) = flows.get_mut(seq) else { return };
        let first = flow.level == 0;
        let waited = self.now.since(flow.touched);
        if first {
            flow.level = level.0;
        }
        flow.permitted = flow.permitted.saturating_add(bytes).min(flow.bytes);
        flow.touched = self.now;
        state.waiting -= usize::from(!flow.waits());
        let at = SlotRef { slot: flow.slot, tag: flow.seq };
        let Some(consumer) = client.served.consumer(lane) else { return };
        match consumer.permit(at, flow.permitted, flow.level, last) {
            Ok(Wake::Needed) => self.wakes.push((index, lane)),
            Ok(Wake::NotNeeded) => {}
            // The client has withdrawn the flow. The lane has the record `Cancelled`, which ends
            // the flow later.
            Err(_) => {
                state.counters.withdrawn_bytes += bytes;
                return;
            }
        }
        let counted = &mut self.ports[usize::from(flow.port())].counters.stages[flow.stage.index()];
        counted.permit(Level(flow.level), bytes);
        if first {
            counted.wait.record(waited);
        }
        state.counters.permitted_bytes += bytes;
        state.ports[usize::from(flow.port())].sent(bytes);
        self.counters.status.permits += 1;
        let level = flow.level;
        if flow.bytes == 0 {
            counted.completed_flows += 1;
            state.flows -= usize::from(flows.remove(seq));
        }
        self.trace.note(self.now, TracedEvent::Permitted(id.0, bytes, level, last));
    }
}
