//! Passes the records of a client's lanes to the [`Intake`], one call per kind of record.

use laxity_policy::{RequestId, Span};
use laxity_shm::consumer::{Consumer, GarbageRecord, Sink};
use laxity_shm::producer::SlotRef;
use laxity_shm::record::{self, Garbage, Hint, Record};

use super::intake::Intake;
use super::trace::TracedEvent;
use crate::clients::{ClientState, RecordOrigin};

/// A protocol violation, for which the client is released.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum ProtocolViolation {
    #[error("{problem}; {record}")]
    Garbage { problem: Garbage, record: GarbageRecord },
    #[error("a flow sent without a permit by a client that was never in mode observe")]
    Forbidden,
}

/// The record sink of one client: an [`Intake`] and the client state.
pub(super) struct RecordSink<'a> {
    /// All other state that records change.
    pub(super) intake: &'a mut Intake,
    pub(super) client: u32,
    pub(super) state: &'a mut ClientState,
    /// The lane with a protocol violation, and the violation. The client has to be released.
    pub(super) violation: Option<(u16, ProtocolViolation)>,
}

impl<'a> RecordSink<'a> {
    #[inline]
    pub(super) fn new(intake: &'a mut Intake, client: u32, state: &'a mut ClientState) -> Self {
        Self { intake, client, state, violation: None }
    }

    #[inline(always)]
    fn split<'b>(
        &'b mut self,
        lane: u16,
        consumer: &'b mut Consumer,
    ) -> (&'b mut Intake, RecordOrigin<'b>) {
        let from = RecordOrigin { client: self.client, state: self.state, lane, consumer };
        (self.intake, from)
    }
}

impl Sink for RecordSink<'_> {
    #[inline]
    fn submit(&mut self, lane: u16, consumer: &mut Consumer, at: SlotRef, flow: record::Flow) {
        let (intake, mut from) = self.split(lane, consumer);
        intake.submit(&mut from, at, &flow);
    }

    #[inline]
    fn on_credit(
        &mut self,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: record::Flow,
        observed: bool,
    ) {
        let may_observe = self.state.may_observe;
        let (intake, mut from) = self.split(lane, consumer);
        if !observed {
            intake.submit_on_credit(&mut from, at, &flow);
        } else if may_observe {
            intake.observe(&mut from, at, &flow);
        } else {
            // A client in mode `enforce` could otherwise take unlimited credit.
            self.violation = Some((lane, ProtocolViolation::Forbidden));
        }
    }

    #[inline]
    fn completed(&mut self, lane: u16, consumer: &mut Consumer, _: SlotRef, tag: u64, bytes: u64) {
        let (intake, mut from) = self.split(lane, consumer);
        intake.completed(&mut from, tag, bytes);
    }

    #[cold]
    fn message(&mut self, lane: u16, consumer: &mut Consumer, _: SlotRef, record: Record) {
        let (intake, mut from) = self.split(lane, consumer);
        match record {
            Record::Cancelled { tag, permitted } => intake.cancelled(&mut from, tag, permitted),
            Record::LaneReset => intake.lane_gone(from.client, from.state, lane),
            Record::Peer { peer, address } => {
                let number = intake.peers.number(address);
                from.state.introduce(peer, address, number);
            }
            Record::Hint(hint) => {
                let (pid, domain) = (from.state.identity.pid, from.state.domain);
                // A daemon's trace that began after the hint about the request's W3C trace gets
                // that hint at the end of the request.
                if let Hint::RequestEnd { request } = hint
                    && intake.trace.is_on()
                    && let Some((trace, span)) = intake.hints.trace_of(domain, RequestId(request))
                {
                    let known = Hint::RequestTrace { request, trace, span };
                    intake.trace.note(intake.now, TracedEvent::Hint(known));
                }
                let ends = matches!(
                    hint,
                    Hint::RequestEnd { .. } | Hint::ComputeEnd { .. } | Hint::BatchEnd { .. }
                );
                if !ends && !intake.hint_time.hears(intake.now, domain) {
                    return;
                }
                let began = intake.hint_time.begin();
                intake.hints.take(intake.now, domain, pid, &hint, &mut intake.ports);
                if intake.hint_time.end(intake.now, domain, began, Span::ZERO) {
                    let owner = &from.state.identity.owner;
                    intake.hint_time.warn(intake.now, owner);
                }
                intake.trace.note(intake.now, TracedEvent::Hint(hint));
            }
            // These have calls of their own.
            Record::Submit(_) | Record::SubmitOnCredit { .. } | Record::Completed { .. } => {}
        }
    }

    #[cold]
    fn garbage(&mut self, lane: u16, consumer: &mut Consumer, problem: Garbage) {
        self.violation = consumer.refused().map(|record| {
            let record = *record;
            (lane, ProtocolViolation::Garbage { problem, record })
        });
    }

    #[inline]
    fn drained(&mut self, _lane: u16, records: usize) {
        let counters = &mut self.intake.counters;
        counters.status.records += records as u64;
        counters.ring_depth = counters.ring_depth.max(records as u64);
    }
}
