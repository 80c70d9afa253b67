//! `laxity trace`, between the control socket and the scheduler: one trace at a time, read in
//! parts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use laxity_policy::Time;
use laxity_shm::sleep::now_ns;
use laxity_wire::trace::TracePage;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tracing::info;

use crate::driver::trace::{Entry, Recorder, Taken, TraceCommand};
use crate::mailbox::{ANSWER_MAX, Command, Mailbox};

/// Longest trace.
const SECONDS_MAX: u64 = 3600;
/// Most events that may wait to be read: about half a gigabyte.
const EVENTS_MAX: u64 = 1 << 22;
/// Events of one answer: well below what a client of the control socket reads.
const PAGE_EVENTS: usize = 8192;

/// See the module.
#[derive(Debug)]
pub struct Traces {
    mailbox: Mailbox,
    latest: Mutex<Trace>,
}

/// The latest trace.
#[derive(Debug, Default)]
struct Trace {
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
    traces: &'a Traces,
    number: u64,
}

impl Drop for AttendedTrace<'_> {
    fn drop(&mut self) {
        self.traces.leave(self.number);
    }
}

impl Trace {
    fn keep(&mut self, taken: Taken) {
        self.unread.extend(taken.entries);
        self.lost = self.lost.max(taken.lost);
        self.is_over |= taken.is_over;
    }
}

impl Traces {
    /// No trace so far; the scheduler is behind `mailbox`.
    #[must_use]
    pub fn new(mailbox: Mailbox) -> Self {
        Self {
            mailbox,
            latest: Mutex::default(),
        }
    }

    /// Begins a trace.
    ///
    /// # Errors
    /// There is one, or the numbers make no sense; text for the operator.
    pub fn start(&self, seconds: u64, events: u64) -> Result<Begun, String> {
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
        if !self
            .mailbox
            .send(Command::Trace(TraceCommand::Begin(recorder)))
        {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        info!(seconds, events, "a trace begins");
        let message = format!(
            "a trace of {seconds} s begins, with room for {events} events that wait to be read"
        );
        Ok(Begun { message, number })
    }

    /// Ties a trace to whoever keeps what this returns.
    pub fn attend(&self, begun: &Begun) -> AttendedTrace<'_> {
        AttendedTrace {
            traces: self,
            number: begun.number,
        }
    }

    /// Whoever began trace `number` is gone: ends it, if it is still the one under way, and forgets
    /// what was not read.
    fn leave(&self, number: u64) {
        let mut trace = self.latest.lock();
        if trace.number != number || trace.until.is_none() {
            return;
        }
        let was_over = trace.is_over;
        *trace = Trace {
            number,
            ..Trace::default()
        };
        let (reply, taken) = oneshot::channel();
        // With the lock held: the end of this trace must not follow the beginning of the next.
        let ends = !was_over
            && self
                .mailbox
                .send(Command::Trace(TraceCommand::End { reply }));
        drop(trace);
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
        let page: Vec<Entry> = trace.unread.drain(..count).collect();
        let answer = TracePage {
            events: page.iter().filter_map(Entry::event).collect(),
            lost: trace.lost,
            is_empty: trace.unread.is_empty(),
            is_over: trace.is_over && trace.unread.is_empty(),
        };
        drop(trace);
        Ok(answer)
    }

    /// Ends the trace; what was done, for the operator.
    ///
    /// # Errors
    /// The scheduler does not answer; text for the operator.
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
        Ok(format!(
            "the trace has ended; {unread} events wait to be read"
        ))
    }

    async fn ask(
        &self,
        order: TraceCommand,
        taken: oneshot::Receiver<Taken>,
    ) -> Result<Taken, String> {
        if !self.mailbox.send(Command::Trace(order)) {
            return Err("the scheduler has ended; laxityd is stopping".to_owned());
        }
        match tokio::time::timeout(ANSWER_MAX, taken).await {
            Ok(Ok(taken)) => Ok(taken),
            Ok(Err(_)) => Err("laxityd is stopping".to_owned()),
            Err(_) => Err(format!(
                "the scheduler did not answer within {ANSWER_MAX:?}; ask again"
            )),
        }
    }
}
