//! `laxity trace` between the control socket and the scheduler: one trace at a time, read in parts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use laxity_policy::Time;
use laxity_shm::sleep::now_ns;
use laxity_wire::trace::TracePage;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tracing::info;

use crate::driver::trace::{Recorder, TakenEvents, TraceCommand, TraceEntry};
use crate::mailbox::{Mailbox, SchedulerCommand, answer};

/// Longest trace, in seconds.
const SECONDS_MAX: u64 = 3600;
/// Maximum number of events that may wait to be read: about half a gigabyte.
const EVENTS_MAX: u64 = 1 << 22;
/// Events per answer, well below the limit of a control client.
const PAGE_EVENTS: usize = 8192;

/// The latest trace and the way to the scheduler.
#[derive(Debug)]
pub struct Traces {
    mailbox: Mailbox,
    latest: Mutex<Trace>,
}

#[derive(Debug, Default)]
struct Trace {
    /// The number of this trace: how many traces have begun.
    number: u64,
    /// When the trace ends by itself. `None` without a trace.
    until: Option<Instant>,
    /// Maximum number of events that may wait at the scheduler.
    most: usize,
    /// Events from the scheduler that the operator has not read.
    unread: VecDeque<TraceEntry>,
    lost: u64,
    is_over: bool,
}

/// A trace that has begun: its number, and a message for the operator.
#[derive(Debug)]
pub struct BegunTrace {
    pub message: String,
    number: u64,
}

/// A guard that ends its trace when dropped. It is dropped with the connection that began the
/// trace, since nobody else reads it.
#[derive(Debug)]
pub struct AttendedTrace<'a> {
    traces: &'a Traces,
    number: u64,
}

impl Drop for AttendedTrace<'_> {
    fn drop(&mut self) {
        self.traces.leave(self.number);
    }
}

impl Trace {
    fn keep(&mut self, taken: TakenEvents) {
        self.unread.extend(taken.entries);
        self.lost = self.lost.max(taken.lost);
        self.is_over |= taken.is_over;
    }
}

impl Traces {
    /// Makes a state without a trace. `mailbox` leads to the scheduler.
    pub fn new(mailbox: Mailbox) -> Self {
        Self { mailbox, latest: Mutex::default() }
    }

    pub fn start(&self, seconds: u64, events: u64) -> Result<BegunTrace, String> {
        if !(1..=SECONDS_MAX).contains(&seconds) {
            return Err(format!("a trace takes 1 to {SECONDS_MAX} seconds, not {seconds}"));
        }
        if !(1..=EVENTS_MAX).contains(&events) {
            return Err(format!(
                "a trace has room for 1 to {EVENTS_MAX} events that wait to be read, not {events}"
            ));
        }
        let length = Duration::from_secs(seconds);
        let mut trace = self.latest.lock();
        let left = trace
            .until
            .map(|until| until.saturating_duration_since(Instant::now()))
            .filter(|left| !left.is_zero() && !trace.is_over);
        if let Some(left) = left {
            return Err(format!(
                "a trace is under way for another {} s; `laxity trace --stop` ends it",
                left.as_secs() + 1
            ));
        }
        let number = trace.number + 1;
        *trace = Trace {
            number,
            until: Some(Instant::now() + length),
            most: events as usize,
            ..Trace::default()
        };
        drop(trace);
        let until = Time(now_ns().saturating_add(length.as_nanos() as u64));
        let recorder = Box::new(Recorder::new(events as usize, until));
        if !self.mailbox.send(SchedulerCommand::Trace(TraceCommand::Begin(recorder))) {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        info!(seconds, events, "a trace begins");
        let message = format!(
            "a trace of {seconds} s begins, with room for {events} events that wait to be read"
        );
        Ok(BegunTrace { message, number })
    }

    /// Returns a guard that ends the trace when dropped.
    pub fn attend(&self, begun: &BegunTrace) -> AttendedTrace<'_> {
        AttendedTrace { traces: self, number: begun.number }
    }

    /// Ends trace `number` if it is still the current one, and drops its unread events.
    fn leave(&self, number: u64) {
        let mut trace = self.latest.lock();
        if trace.number != number || trace.until.is_none() {
            return;
        }
        let was_over = trace.is_over;
        *trace = Trace { number, ..Trace::default() };
        let (reply, taken) = oneshot::channel();
        // The lock is held, so that this end can't follow the beginning of the next trace.
        let ends =
            !was_over && self.mailbox.send(SchedulerCommand::Trace(TraceCommand::End { reply }));
        drop(trace);
        if ends {
            info!("the trace ends: whoever began it has left");
        }
        if let Ok(runtime) = Handle::try_current() {
            // The events are freed here, so that the scheduler thread does not spend time on it.
            runtime.spawn(async move { drop(taken.await) });
        }
    }

    pub async fn read(&self) -> Result<TracePage, String> {
        let wanted = {
            let trace = self.latest.lock();
            if trace.until.is_none() {
                return Err("there is no trace; begin one".to_owned());
            }
            (trace.unread.is_empty() && !trace.is_over).then_some(trace.most)
        };
        if let Some(most) = wanted {
            let (reply, taken) = oneshot::channel();
            let fresh = Vec::with_capacity(most);
            let taken = self.ask(TraceCommand::Swap { fresh, reply }, taken).await?;
            self.latest.lock().keep(taken);
        }
        let mut trace = self.latest.lock();
        let count = trace.unread.len().min(PAGE_EVENTS);
        let page: Vec<TraceEntry> = trace.unread.drain(..count).collect();
        let answer = TracePage {
            events: page.iter().map(TraceEntry::event).collect(),
            lost: trace.lost,
            is_empty: trace.unread.is_empty(),
            is_over: trace.is_over && trace.unread.is_empty(),
        };
        drop(trace);
        Ok(answer)
    }

    /// Ends the trace and returns text for the operator.
    pub async fn stop(&self) -> Result<String, String> {
        if self.latest.lock().until.is_none() {
            return Ok("there was no trace".to_owned());
        }
        let (reply, taken) = oneshot::channel();
        let taken = self.ask(TraceCommand::End { reply }, taken).await?;
        let mut trace = self.latest.lock();
        trace.keep(taken);
        let unread = trace.unread.len();
        drop(trace);
        info!(unread, "the trace ends");
        Ok(format!("the trace has ended; {unread} events wait to be read"))
    }

    async fn ask(
        &self,
        order: TraceCommand,
        taken: oneshot::Receiver<TakenEvents>,
    ) -> Result<TakenEvents, String> {
        // A command that the scheduler does not take is dropped with its `reply`.
        self.mailbox.send(SchedulerCommand::Trace(order));
        answer(taken).await
    }
}
