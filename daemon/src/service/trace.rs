//! `laxity trace`, between the control socket and the scheduler: one trace at a time, read in
//! parts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use laxity_policy::Time;
use laxity_shm::sleep::now_ns;
use laxity_wire::trace::TracePage;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tracing::info;

use super::{SNAPSHOT_MAX, Service};
use crate::driver::trace::{Entry, Recorder, Taken, TraceOrder};
use crate::mailbox::Command;

/// Longest trace.
const SECONDS_MAX: u64 = 3600;
/// Most events that may wait to be read: about half a gigabyte.
const EVENTS_MAX: u64 = 1 << 22;
/// Events of one answer: well below what a client of the control socket reads.
const PAGE_EVENTS: usize = 8192;

/// The trace of this daemon.
#[derive(Debug, Default)]
pub(super) struct Tracing {
    /// Traces begun so far: the number of this one.
    number: u64,
    /// When it ends by itself; none without a trace.
    until: Option<Instant>,
    /// Events that may wait at the scheduler.
    most: usize,
    /// What came from there and was not asked for so far.
    unread: VecDeque<Entry>,
    lost: u64,
    is_over: bool,
}

/// A trace that has begun.
#[derive(Debug)]
pub struct Begun {
    /// What was done, for the operator.
    pub message: String,
    number: u64,
}

/// A trace that ends when this is dropped, which is when the connection that began it ends: nobody
/// would read it.
#[derive(Debug)]
pub struct AttendedTrace<'a> {
    service: &'a Service,
    number: u64,
}

impl Drop for AttendedTrace<'_> {
    fn drop(&mut self) {
        self.service.trace_leave(self.number);
    }
}

impl Tracing {
    fn keep(&mut self, taken: Taken) {
        self.unread.extend(taken.entries);
        self.lost = self.lost.max(taken.lost);
        self.is_over |= taken.is_over;
    }
}

impl Service {
    /// Begins a trace.
    ///
    /// # Errors
    /// There is one, or the numbers make no sense; text for the operator.
    pub fn trace_start(&self, seconds: u64, events: u64) -> Result<Begun, String> {
        if !(1..=SECONDS_MAX).contains(&seconds) {
            return Err(format!(
                "a trace takes 1 to {SECONDS_MAX} seconds, not {seconds}"
            ));
        }
        if !(1..=EVENTS_MAX).contains(&events) {
            return Err(format!(
                "a trace has room for 1 to {EVENTS_MAX} events that wait to be read, not {events}"
            ));
        }
        let length = Duration::from_secs(seconds);
        let mut tracing = self.tracing();
        let left = tracing
            .until
            .map(|until| until.saturating_duration_since(Instant::now()))
            .filter(|left| !left.is_zero() && !tracing.is_over);
        if let Some(left) = left {
            return Err(format!(
                "a trace is under way for another {} s; `laxity trace --stop` ends it",
                left.as_secs() + 1
            ));
        }
        let number = tracing.number + 1;
        *tracing = Tracing {
            number,
            until: Some(Instant::now() + length),
            most: events as usize,
            ..Tracing::default()
        };
        drop(tracing);
        let until = Time(now_ns().saturating_add(length.as_nanos() as u64));
        let recorder = Box::new(Recorder::new(events as usize, until));
        if !self.send(Command::Trace(TraceOrder::Begin(recorder))) {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        info!(seconds, events, "a trace begins");
        let message = format!(
            "a trace of {seconds} s begins, with room for {events} events that wait to be read"
        );
        Ok(Begun { message, number })
    }

    /// Ties a trace to whoever keeps what this returns.
    pub fn attend_trace(&self, begun: &Begun) -> AttendedTrace<'_> {
        AttendedTrace {
            service: self,
            number: begun.number,
        }
    }

    /// Whoever began trace `number` is gone: ends it, if it is still the one under way, and forgets
    /// what was not read.
    fn trace_leave(&self, number: u64) {
        let mut tracing = self.tracing();
        if tracing.number != number || tracing.until.is_none() {
            return;
        }
        let was_over = tracing.is_over;
        *tracing = Tracing {
            number,
            ..Tracing::default()
        };
        let (reply, taken) = oneshot::channel();
        // With the lock held: the end of this trace must not follow the beginning of the next.
        let ends = !was_over && self.send(Command::Trace(TraceOrder::End { reply }));
        drop(tracing);
        if ends {
            info!("the trace ends: whoever began it has left");
        }
        if let Ok(runtime) = Handle::try_current() {
            // Freed here, not on the scheduler's thread.
            runtime.spawn(async move { drop(taken.await) });
        }
    }

    /// The next part of the trace.
    ///
    /// # Errors
    /// There is none, or the scheduler does not answer; text for the operator.
    pub async fn trace_read(&self) -> Result<TracePage, String> {
        let wanted = {
            let tracing = self.tracing();
            if tracing.until.is_none() {
                return Err("there is no trace; begin one".to_owned());
            }
            (tracing.unread.is_empty() && !tracing.is_over).then_some(tracing.most)
        };
        if let Some(most) = wanted {
            let (reply, taken) = oneshot::channel();
            let fresh = Vec::with_capacity(most);
            let taken = self
                .traced(TraceOrder::Swap { fresh, reply }, taken)
                .await?;
            self.tracing().keep(taken);
        }
        let mut tracing = self.tracing();
        let count = tracing.unread.len().min(PAGE_EVENTS);
        let page: Vec<Entry> = tracing.unread.drain(..count).collect();
        let answer = TracePage {
            events: page.iter().filter_map(Entry::event).collect(),
            lost: tracing.lost,
            is_empty: tracing.unread.is_empty(),
            is_over: tracing.is_over && tracing.unread.is_empty(),
        };
        drop(tracing);
        Ok(answer)
    }

    /// Ends the trace; what was done, for the operator.
    ///
    /// # Errors
    /// The scheduler does not answer; text for the operator.
    pub async fn trace_stop(&self) -> Result<String, String> {
        if self.tracing().until.is_none() {
            return Ok("there was no trace".to_owned());
        }
        let (reply, taken) = oneshot::channel();
        let taken = self.traced(TraceOrder::End { reply }, taken).await?;
        let mut tracing = self.tracing();
        tracing.keep(taken);
        let unread = tracing.unread.len();
        drop(tracing);
        info!(unread, "the trace ends");
        Ok(format!(
            "the trace has ended; {unread} events wait to be read"
        ))
    }

    async fn traced(
        &self,
        order: TraceOrder,
        taken: oneshot::Receiver<Taken>,
    ) -> Result<Taken, String> {
        if !self.send(Command::Trace(order)) {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        match tokio::time::timeout(SNAPSHOT_MAX, taken).await {
            Ok(Ok(taken)) => Ok(taken),
            Ok(Err(_)) => Err("laxityd is stopping".to_owned()),
            Err(_) => Err(format!(
                "the scheduler did not answer within {SNAPSHOT_MAX:?}; ask again"
            )),
        }
    }
}
