//! What the scheduler saw and did, for `laxity trace`: kept only while somebody wants it, in memory
//! that was made for it elsewhere, and never more than that.
//!
//! Off, it costs a look at a pointer for each record. On, an event is a copy of some words; when
//! there is no room it is counted and lost. Nothing is allocated or freed on the scheduler's
//! thread: whoever reads swaps the full memory for an empty one.

use laxity_policy::{FlowSpec, Span, Time};
use laxity_shm::record::Record;
use laxity_wire::trace::{SubmitOutcome, TraceEvent, TraceKind, TracedFlow};
use tokio::sync::oneshot;

/// After the end of a trace that nobody fetches, before it is forgotten.
const KEPT: Span = Span(60_000_000_000);

/// What the rest of the daemon wants of it.
#[derive(Debug)]
pub enum TraceCommand {
    /// Begin one.
    Begin(Box<Recorder>),
    /// Give what there is, and go on in this memory.
    Swap {
        /// Empty.
        fresh: Vec<Entry>,
        /// Takes it.
        reply: oneshot::Sender<Taken>,
    },
    /// End it, and give what there is.
    End {
        /// Takes it.
        reply: oneshot::Sender<Taken>,
    },
}

/// What was recorded since the last time.
#[derive(Debug, Default)]
pub struct Taken {
    /// Oldest first.
    pub entries: Vec<Entry>,
    /// Lost for lack of room, since the trace began.
    pub lost: u64,
    /// Nothing more is recorded.
    pub is_over: bool,
}

/// An event, and when.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    at: Time,
    seen: Seen,
}

/// What the scheduler saw or did.
#[derive(Clone, Copy, Debug)]
pub enum Seen {
    /// A flow was submitted.
    Submitted {
        /// It.
        spec: FlowSpec,
        /// By which process.
        pid: u32,
        /// Index of the port.
        port: u16,
        /// How it stood.
        standing: SubmitOutcome,
        /// Bytes granted, and their level.
        granted: (u64, u8),
        /// Bytes of others in flight there, and how many may be.
        window: (u64, u64),
        /// Flows that waited there before it.
        ahead: u64,
    },
    /// More of a flow may go: name, bytes, level, whether that is all.
    Permitted(u64, u64, u8, bool),
    /// Bytes of a flow are complete.
    Completed(u64, u64),
    /// A flow ended otherwise.
    Cancelled(u64),
    /// A hint.
    Hint(Record),
}

/// A trace under way.
#[derive(Debug)]
pub struct Recorder {
    entries: Vec<Entry>,
    /// Events that it may hold.
    most: usize,
    lost: u64,
    until: Time,
}

impl Recorder {
    /// One that takes `most` events at a time, until then.
    #[must_use]
    pub fn new(most: usize, until: Time) -> Self {
        Self {
            entries: Vec::with_capacity(most),
            most,
            lost: 0,
            until,
        }
    }

    /// Takes an event.
    #[cold]
    fn note(&mut self, at: Time, seen: Seen) {
        if at > self.until {
            return;
        }
        if self.entries.len() < self.most {
            self.entries.push(Entry { at, seen });
        } else {
            self.lost += 1;
        }
    }

    fn take(&mut self, now: Time, fresh: Vec<Entry>) -> Taken {
        self.most = self.most.min(fresh.capacity());
        Taken {
            entries: core::mem::replace(&mut self.entries, fresh),
            lost: self.lost,
            is_over: now > self.until,
        }
    }

    /// Nobody came for it.
    fn is_abandoned(&self, now: Time) -> bool {
        now.since(self.until) > KEPT
    }
}

/// The trace that is under way, if any.
#[derive(Debug, Default)]
pub struct Tracer(Option<Box<Recorder>>);

impl Tracer {
    /// Whether anything is recorded.
    #[inline]
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records something, if anything is recorded.
    #[inline]
    pub fn note(&mut self, at: Time, seen: Seen) {
        if let Some(recorder) = &mut self.0 {
            recorder.note(at, seen);
        }
    }

    /// Ends a trace that nobody came for.
    pub fn forget_abandoned(&mut self, now: Time) {
        self.0.take_if(|recorder| recorder.is_abandoned(now));
    }

    /// Carries out a command; the old memory of a trace goes where it can be freed.
    pub fn carry_out(&mut self, now: Time, command: TraceCommand) {
        match command {
            TraceCommand::Begin(recorder) => self.0 = Some(recorder),
            TraceCommand::Swap { fresh, reply } => {
                let taken = self.0.as_mut().map(|trace| trace.take(now, fresh));
                let _ = reply.send(taken.unwrap_or_else(over));
            }
            TraceCommand::End { reply } => {
                let taken = self.0.take().map(|mut trace| Taken {
                    is_over: true,
                    ..trace.take(now, Vec::new())
                });
                let _ = reply.send(taken.unwrap_or_else(over));
            }
        }
    }
}

fn over() -> Taken {
    Taken {
        is_over: true,
        ..Taken::default()
    }
}

impl Entry {
    /// As it is told; `None` for what is nothing to tell.
    #[must_use]
    pub fn event(&self) -> Option<TraceEvent> {
        self.seen.kind().map(|what| TraceEvent {
            at_ns: self.at.0,
            what,
        })
    }
}

impl Seen {
    fn kind(&self) -> Option<TraceKind> {
        Some(match *self {
            Self::Submitted {
                spec,
                pid,
                port,
                standing,
                granted: (granted, level),
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
                standing,
                granted,
                level,
                in_flight_bytes,
                window_bytes,
                ahead,
            }),
            Self::Permitted(flow, bytes, level, last) => TraceKind::Permitted {
                flow,
                bytes,
                level,
                last,
            },
            Self::Completed(flow, bytes) => TraceKind::Completed { flow, bytes },
            Self::Cancelled(flow) => TraceKind::Cancelled { flow },
            Self::Hint(record) => return hint(record),
        })
    }
}

fn hint(record: Record) -> Option<TraceKind> {
    Some(match record {
        Record::BatchBegin { batch, layers, .. } => TraceKind::BatchBegin { batch, layers },
        Record::RequestJoin {
            batch,
            request,
            deadline_ns,
            ..
        } => TraceKind::RequestJoin {
            batch,
            request,
            deadline_ns,
        },
        Record::BatchQueued { batch, ahead } => TraceKind::BatchQueued { batch, ahead },
        Record::LayerBegin { batch, layer } => TraceKind::LayerBegin { batch, layer },
        Record::ComputeEnd { batch } => TraceKind::ComputeEnd { batch },
        Record::BatchEnd { batch } => TraceKind::BatchEnd { batch },
        Record::RequestEnd { request } => TraceKind::RequestEnd { request },
        Record::Submit(_)
        | Record::SubmitOnCredit { .. }
        | Record::Completed { .. }
        | Record::Cancelled { .. }
        | Record::LaneReset
        | Record::Peer { .. } => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(request: u64) -> Seen {
        Seen::Hint(Record::RequestEnd { request })
    }

    fn swap(tracer: &mut Tracer, now: Time, room: usize) -> Taken {
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
        assert_eq!(
            (taken.entries.len(), taken.lost, taken.is_over),
            (2, 3, false)
        );
        assert_eq!(
            taken.entries[1].event(),
            Some(TraceEvent {
                at_ns: 2,
                what: TraceKind::RequestEnd { request: 2 }
            })
        );
        trace.note(Time(99), end(6));
        trace.note(Time(101), end(7));
        let taken = swap(&mut trace, Time(101), 2);
        assert_eq!(
            (taken.entries.len(), taken.lost, taken.is_over),
            (1, 3, true)
        );
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
