//! The events of the scheduler, for `laxity trace`.
//!
//! Events are kept only during a trace, in memory of fixed size that another thread allocates.
//! Without a trace, the cost is one look at a pointer per record. With one, an event is a copy of
//! some words. An event without room is counted and lost. While a trace is read, the scheduler
//! thread neither allocates nor frees: the reader swaps the full memory for an empty one.

use laxity_policy::{FlowSpec, Span, Time};
use laxity_shm::record::Hint;
use laxity_wire::trace::{SubmitOutcome, TraceEvent, TraceKind, TracedFlow};
use tokio::sync::oneshot;

use super::deadlines::trace_id;

/// How long a trace that nobody reads is kept after its end.
const KEPT: Span = Span(60_000_000_000);

/// Begins, reads or ends the trace, for `laxity trace`.
#[derive(Debug)]
pub enum TraceCommand {
    Begin(Box<Recorder>),
    /// Return the recorded events and continue in other memory.
    Swap {
        /// The memory, which is empty.
        fresh: Vec<TraceEntry>,
        reply: oneshot::Sender<TakenEvents>,
    },
    /// End the trace and return the recorded events.
    End {
        reply: oneshot::Sender<TakenEvents>,
    },
}

/// The events since the last command that took some.
#[derive(Debug, Default)]
pub struct TakenEvents {
    /// The events, oldest first.
    pub entries: Vec<TraceEntry>,
    /// Events that were lost for lack of room since the trace began.
    pub lost: u64,
    pub is_over: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct TraceEntry {
    at: Time,
    seen: TracedEvent,
}

#[derive(Clone, Copy, Debug)]
pub enum TracedEvent {
    Submitted {
        spec: FlowSpec,
        pid: u32,
        port: u16,
        outcome: SubmitOutcome,
        /// The bytes of the permit, and their level.
        permitted: (u64, u8),
        /// The bytes of other flows in flight on the port, and the window.
        window: (u64, u64),
        /// Flows that waited on the port before this one.
        ahead: u64,
    },
    /// A permit of a waiting flow: name, bytes, level, and whether it is the last.
    Permitted(u64, u64, u8, bool),
    Completed(u64, u64),
    /// A flow ended without completing.
    Cancelled(u64),
    Hint(Hint),
}

#[derive(Debug)]
pub struct Recorder {
    entries: Vec<TraceEntry>,
    most: usize,
    lost: u64,
    until: Time,
}

impl Recorder {
    /// Makes a trace of `most` events at a time, which ends at `until`.
    pub fn new(most: usize, until: Time) -> Self {
        Self { entries: Vec::with_capacity(most), most, lost: 0, until }
    }

    #[cold]
    fn note(&mut self, at: Time, seen: TracedEvent) {
        if at > self.until {
            return;
        }
        if self.entries.len() < self.most {
            self.entries.push(TraceEntry { at, seen });
        } else {
            self.lost += 1;
        }
    }

    fn take(&mut self, now: Time, fresh: Vec<TraceEntry>) -> TakenEvents {
        self.most = self.most.min(fresh.capacity());
        TakenEvents {
            entries: core::mem::replace(&mut self.entries, fresh),
            lost: self.lost,
            is_over: now > self.until,
        }
    }

    /// Reports whether the trace ended long ago and nobody has read it.
    fn is_abandoned(&self, now: Time) -> bool {
        now.since(self.until) > KEPT
    }
}

#[derive(Debug, Default)]
pub struct Tracer(Option<Box<Recorder>>);

impl Tracer {
    #[inline]
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records an event, if a trace is running.
    #[inline]
    pub fn note(&mut self, at: Time, seen: TracedEvent) {
        if let Some(recorder) = &mut self.0 {
            recorder.note(at, seen);
        }
    }

    /// Ends a trace that nobody reads.
    pub fn forget_abandoned(&mut self, now: Time) {
        self.0.take_if(|recorder| recorder.is_abandoned(now));
    }

    /// Runs a command. The recorded events go to the thread that asked for them, which also frees
    /// them.
    pub fn carry_out(&mut self, now: Time, command: TraceCommand) {
        match command {
            TraceCommand::Begin(recorder) => self.0 = Some(recorder),
            TraceCommand::Swap { fresh, reply } => {
                let taken = self.0.as_mut().map(|trace| trace.take(now, fresh));
                let _ = reply.send(taken.unwrap_or_else(over));
            }
            TraceCommand::End { reply } => {
                let taken = self
                    .0
                    .take()
                    .map(|mut trace| TakenEvents { is_over: true, ..trace.take(now, Vec::new()) });
                let _ = reply.send(taken.unwrap_or_else(over));
            }
        }
    }
}

fn over() -> TakenEvents {
    TakenEvents { is_over: true, ..TakenEvents::default() }
}

impl TraceEntry {
    pub fn event(&self) -> TraceEvent {
        TraceEvent { at_ns: self.at.0, what: self.seen.kind() }
    }
}

impl TracedEvent {
    fn kind(&self) -> TraceKind {
        match *self {
            Self::Submitted {
                spec,
                pid,
                port,
                outcome,
                permitted: (permitted, level),
                window: (in_flight_bytes, window_bytes),
                ahead,
            } => TraceKind::Submitted(TracedFlow {
                flow: spec.flow.0,
                pid,
                nic: (port / 2) as u8,
                ingress: port % 2 == 1,
                stage: spec.stage.name().to_owned(),
                layer: spec.layer.0,
                batch: spec.batch.0,
                request: spec.request.0,
                bytes: spec.bytes,
                deadline_ns: match spec.deadline {
                    Time::NEVER => 0,
                    Time(deadline) => deadline,
                },
                standing: outcome,
                permitted,
                level,
                in_flight_bytes,
                window_bytes,
                ahead,
            }),
            Self::Permitted(flow, bytes, level, last) => {
                TraceKind::Permitted { flow, bytes, level, last }
            }
            Self::Completed(flow, bytes) => TraceKind::Completed { flow, bytes },
            Self::Cancelled(flow) => TraceKind::Cancelled { flow },
            Self::Hint(said) => hint(said),
        }
    }
}

fn hint(said: Hint) -> TraceKind {
    match said {
        Hint::BatchBegin { batch, layers, .. } => TraceKind::BatchBegin { batch, layers },
        Hint::RequestJoin { batch, request, deadline_ns, .. } => {
            TraceKind::RequestJoin { batch, request, deadline_ns }
        }
        Hint::BatchQueued { batch, ahead } => TraceKind::BatchQueued { batch, ahead },
        Hint::LayerBegin { batch, layer } => TraceKind::LayerBegin { batch, layer },
        Hint::ComputeEnd { batch } => TraceKind::ComputeEnd { batch },
        Hint::BatchEnd { batch } => TraceKind::BatchEnd { batch },
        Hint::RequestEnd { request } => TraceKind::RequestEnd { request },
        Hint::RequestTrace { request, trace, span } => TraceKind::RequestTrace {
            request,
            trace_id: trace_id(Some((trace, span))),
            span_id: format!("{span:016x}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(request: u64) -> TracedEvent {
        TracedEvent::Hint(Hint::RequestEnd { request })
    }

    fn swap(tracer: &mut Tracer, now: Time, room: usize) -> TakenEvents {
        let (reply, mut taken) = oneshot::channel();
        let fresh = Vec::with_capacity(room);
        tracer.carry_out(now, TraceCommand::Swap { fresh, reply });
        taken.try_recv().expect("an answer at once")
    }

    #[test]
    fn what_finds_no_room_is_counted_and_room_comes_back_with_the_next_reader() {
        let mut trace = Tracer(Some(Box::new(Recorder::new(2, Time(100)))));
        for request in 1..=5 {
            trace.note(Time(request), end(request));
        }
        let taken = swap(&mut trace, Time(10), 2);
        assert_eq!((taken.entries.len(), taken.lost, taken.is_over), (2, 3, false));
        assert_eq!(
            taken.entries[1].event(),
            TraceEvent { at_ns: 2, what: TraceKind::RequestEnd { request: 2 } }
        );
        trace.note(Time(99), end(6));
        trace.note(Time(101), end(7));
        let taken = swap(&mut trace, Time(101), 2);
        assert_eq!((taken.entries.len(), taken.lost, taken.is_over), (1, 3, true));
    }

    #[test]
    fn without_a_trace_every_reader_is_told_that_it_is_over() {
        let mut trace = Tracer::default();
        assert!(swap(&mut trace, Time(1), 2).is_over);
        let (reply, mut taken) = oneshot::channel();
        trace.carry_out(Time(1), TraceCommand::End { reply });
        assert!(taken.try_recv().expect("an answer").is_over);
    }

    #[test]
    fn a_trace_that_nobody_fetches_is_given_up() {
        let recorder = Recorder::new(1, Time(5));
        assert!(!recorder.is_abandoned(Time(5) + KEPT));
        assert!(recorder.is_abandoned(Time(6) + KEPT));
    }
}
