//! The sending end. Each message is a flow, and waits for its permit before it begins.
//!
//! # What `isend` does
//! A message whose receiver has not posted yet is taken and *kept*, because one thread may drive
//! both ends and has to reach the post. Its flow is submitted after the post.
//!
//! A message that waits for a permit is not taken: NCCL gets a null request and calls again with
//! the same arguments. The first such call submits the flow and keeps it as the connection's
//! *pending* send. The message is taken as soon as some of its bytes are permitted. The rest
//! follows as it is permitted. A message is offered only when all bytes before it are permitted, so
//! at most one flow of a connection waits. Permits therefore come in the order of the messages, and
//! no permitted message waits for another.
//!
//! # What `isend` never does
//! It never submits a flow that can't leave, since it first calls `Sender::clear`. It never waits
//! for ever: after `wait_max` the message goes unscheduled. It never returns an error: `test`
//! returns the connection's fault.

use std::collections::VecDeque;
use std::time::Duration;

use laxity_client::{Direction, Flow, Permit};
use laxity_shm::sleep::now_ns;

use super::TestOutcome;
use super::message::{EarlyMessage, FirstPermit, InFlightMessage, PendingSend};
use super::slots::{RequestSlot, Slots};
use super::surroundings::Surroundings;
use crate::arbiter::SubmittedFlow;
use crate::backend::{Buffer, Memory, MemoryRegistration, Message, Sender, Sent};
use crate::fault::{Fault, Result};
use crate::origin::Operation;
use crate::report::SentMessage;

/// Largest message, in bytes, that completes when the network takes it. Reporting when such a small
/// message is delivered costs more than it helps.
const ACCOUNTED_BYTES_MIN: u64 = 16 << 10;

/// Reports whether the wait since `since_ns` is longer than `wait_max`.
fn is_overdue(since_ns: u64, wait_max: Duration) -> bool {
    u128::from(now_ns().saturating_sub(since_ns)) > wait_max.as_nanos()
}

/// Whether a message began.
enum BeginVerdict {
    Begun,
    /// The permit of the message, or of the one before it, has not come.
    Wait,
    /// The receiver of the message has not posted.
    NotPosted,
}

pub struct SendSide {
    sender: Option<Box<dyn Sender>>,
    around: Surroundings,
    pending: Option<PendingSend>,
    early: VecDeque<EarlyMessage>,
    in_flight: VecDeque<InFlightMessage>,
    slots: Slots,
    fault: Option<Fault>,
    /// The daemon's generation and its number of the NIC.
    nic: (u64, u8),
    /// Whether no registration ended while messages were unsent.
    memory_stays: bool,
    sent: Vec<Sent>,
}

impl core::fmt::Debug for SendSide {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SendSide")
            .field("offer", &self.pending)
            .field("underway", &self.in_flight)
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl SendSide {
    /// Returns the sending end of a complete connection.
    pub fn new(sender: Box<dyn Sender>, around: Surroundings) -> Self {
        let nic = (around.arbiter.generation(), around.arbiter.nic(&around.nic));
        Self {
            sender: Some(sender),
            around,
            pending: None,
            early: VecDeque::new(),
            in_flight: VecDeque::new(),
            slots: Slots::new(),
            fault: None,
            nic,
            memory_stays: true,
            sent: Vec::new(),
        }
    }

    fn sender(&mut self) -> Result<&mut Box<dyn Sender>> {
        let closed = || Fault::Argument("the connection was closed".into());
        self.sender.as_mut().ok_or_else(closed)
    }

    pub(super) fn register(&mut self, memory: Memory) -> Result<MemoryRegistration> {
        self.sender()?.register(memory)
    }

    pub(super) fn deregister(&mut self, region: MemoryRegistration) -> Result<()> {
        // NCCL ends registrations before it closes the connection. When it aborts a job, the memory
        // of unsent messages may therefore be freed at any moment.
        self.memory_stays &= self.early.is_empty() && self.in_flight.iter().all(|entry| entry.done);
        self.sender()?.deregister(region)
    }

    /// Offers a message. Returns the request's index if the message was taken, or `None` if NCCL
    /// has to ask again.
    pub fn offer(
        &mut self,
        buffer: Buffer<'_>,
        origin: impl Fn() -> Option<Operation>,
    ) -> Option<u16> {
        let slot = self.slots.free()?;
        if self.fault.is_none()
            && let Err(fault) = self.pump()
        {
            self.fail(fault);
        }
        if self.fault.is_some() {
            // `test` returns the fault.
            self.slots.set(slot, RequestSlot::Pending(0));
            return Some(slot);
        }
        if !self.early.is_empty() {
            self.keep(slot, buffer, origin());
            self.release();
            return Some(slot);
        }
        match self.try_begin(slot, buffer, &origin) {
            Ok(BeginVerdict::Begun) => Some(slot),
            Ok(BeginVerdict::NotPosted) => {
                self.keep(slot, buffer, origin());
                Some(slot)
            }
            Ok(BeginVerdict::Wait) => None,
            Err(fault) => {
                self.fail(fault);
                self.slots.set(slot, RequestSlot::Pending(0));
                Some(slot)
            }
        }
    }

    fn keep(&mut self, slot: u16, buffer: Buffer<'_>, origin: Option<Operation>) {
        self.slots.set(slot, RequestSlot::Pending(0));
        self.early.push_back(EarlyMessage::new(slot, buffer, origin));
    }

    /// Begins kept messages whose receivers have posted and that are permitted.
    fn release(&mut self) {
        while let Some(early) = self.early.pop_front() {
            match self.try_begin(early.slot, early.buffer(), || early.origin) {
                Ok(BeginVerdict::Begun) => {
                    if let Some(begun) = self.in_flight.back_mut() {
                        begun.was_kept = true;
                    }
                }
                Ok(BeginVerdict::Wait | BeginVerdict::NotPosted) => {
                    self.early.push_front(early);
                    return;
                }
                Err(fault) => return self.fail(fault),
            }
        }
    }

    /// Begins a message if its receiver has posted a buffer and the message is permitted.
    fn try_begin(
        &mut self,
        slot: u16,
        buffer: Buffer<'_>,
        origin: impl FnOnce() -> Option<Operation>,
    ) -> Result<BeginVerdict> {
        let newest_waits = |newest: &InFlightMessage| newest.pushed < newest.bytes;
        if self.in_flight.back().is_some_and(newest_waits) {
            return Ok(BeginVerdict::Wait);
        }
        let bytes = buffer.bytes as u64;
        let pending = self.pending.take();
        // NCCL repeats a call with the same arguments. Different arguments mean another message.
        let mut pending = match pending {
            Some(pending) if pending.bytes == bytes => pending,
            other => {
                if !self.sender()?.clear(buffer.bytes)? {
                    // The flow of another message may be waiting, so its pending send stays.
                    self.pending = other;
                    return Ok(BeginVerdict::NotPosted);
                }
                if let Some(other) = other {
                    self.around.arbiter.cancel(other.flow);
                }
                self.submit(bytes, origin())
            }
        };
        let permit = if bytes == 0 {
            Some(Permit { last: true, bypassed: true, ..Permit::default() })
        } else {
            self.around.arbiter.poll(&mut pending.flow)
        };
        let waited_ns = match permit {
            Some(_) if pending.since_ns == 0 => 0,
            _ => now_ns().saturating_sub(pending.since_ns).max(1),
        };
        let overdue =
            u128::from(waited_ns) > self.around.wait_max.as_nanos() && pending.since_ns > 0;
        let permit = match permit {
            Some(permit) => permit,
            None if overdue => {
                self.around.arbiter.cancel(core::mem::take(&mut pending.flow));
                Permit { bytes, last: true, bypassed: true, ..Permit::default() }
            }
            None => {
                if pending.since_ns == 0 {
                    pending.since_ns = now_ns();
                }
                self.pending = Some(pending);
                return Ok(BeginVerdict::Wait);
            }
        };
        let decision = FirstPermit { permit, waited_ns, overdue };
        self.begin(slot, buffer, pending, decision)?;
        Ok(BeginVerdict::Begun)
    }

    fn submit(&mut self, bytes: u64, origin: Option<Operation>) -> PendingSend {
        let generation = self.around.arbiter.generation();
        if self.nic.0 != generation {
            self.nic = (generation, self.around.arbiter.nic(&self.around.nic));
        }
        let purpose = self.around.context.purpose(origin);
        let asked = Flow {
            stage: purpose.stage,
            direction: Direction::Egress,
            nic: self.nic.1,
            bytes,
            ..Flow::default()
        };
        let flow =
            if bytes == 0 { SubmittedFlow::default() } else { self.around.arbiter.submit(&asked) };
        PendingSend { flow, bytes, since_ns: 0, purpose, known: origin.is_some() }
    }

    fn begin(
        &mut self,
        slot: u16,
        buffer: Buffer<'_>,
        pending: PendingSend,
        decision: FirstPermit,
    ) -> Result<()> {
        let permit = decision.permit;
        let class = self.around.class_of(&permit);
        let accounted = !permit.bypassed && pending.bytes > ACCOUNTED_BYTES_MIN;
        self.around.report.sent(&SentMessage {
            function: pending.purpose.function,
            stage: pending.purpose.stage,
            dscp: self.around.classes[class],
            bytes: pending.bytes,
            waited_ns: decision.waited_ns,
            bypassed: permit.bypassed,
            overdue: decision.overdue,
            known: pending.known,
        });
        let number = self.sender()?.begin(Message { buffer, class, accounted });
        self.slots.set(slot, RequestSlot::Pending(0));
        self.in_flight.push_back(InFlightMessage {
            number,
            flow: pending.flow,
            bytes: pending.bytes,
            pushed: 0,
            left: 0,
            accounted,
            slot,
            done: false,
            was_kept: false,
            waits_since_ns: 0,
        });
        self.push(permit.bytes);
        if let Err(fault) = self.progress() {
            self.fail(fault);
        }
        Ok(())
    }

    /// Permits more bytes of the newest message.
    fn push(&mut self, bytes: u64) {
        let Some(newest) = self.in_flight.back_mut() else { return };
        let bytes = bytes.min(newest.bytes - newest.pushed);
        newest.pushed += bytes;
        if let Some(sender) = &mut self.sender {
            sender.push(bytes as usize);
        }
    }

    /// Collects permits of the newest message.
    fn pump(&mut self) -> Result<()> {
        let mut permitted = 0;
        if let Some(newest) = self.in_flight.back_mut()
            && newest.pushed < newest.bytes
        {
            while let Some(permit) = self.around.arbiter.poll(&mut newest.flow) {
                permitted += permit.bytes;
                if permit.last || permit.bytes == 0 {
                    break;
                }
            }
            if permitted > 0 {
                newest.waits_since_ns = 0;
            } else if newest.waits_since_ns == 0 {
                newest.waits_since_ns = now_ns();
            } else if is_overdue(newest.waits_since_ns, self.around.wait_max) {
                self.around.arbiter.cancel(core::mem::take(&mut newest.flow));
                permitted = newest.bytes - newest.pushed;
                self.around.report.overdue(permitted);
            }
        }
        if permitted > 0 {
            self.push(permitted);
        }
        Ok(())
    }

    /// Collects permits and moves bytes as far as possible without blocking. A fault breaks the
    /// connection.
    fn drive(&mut self) {
        let moved = self.pump().and_then(|()| self.progress());
        if let Err(fault) = moved {
            self.fail(fault);
        } else if !self.early.is_empty() {
            self.release();
        }
    }

    /// Moves bytes as far as possible without blocking, and reports completions to the scheduler.
    fn progress(&mut self) -> Result<()> {
        let mut sent = core::mem::take(&mut self.sent);
        let result = match &mut self.sender {
            Some(sender) => sender.progress(&mut sent),
            None => Ok(()),
        };
        self.settle(sent);
        result
    }

    /// Accounts for the progress of messages.
    fn settle(&mut self, mut sent: Vec<Sent>) {
        for sent in sent.drain(..) {
            self.account(sent);
        }
        self.sent = sent;
        while self.in_flight.front().is_some_and(InFlightMessage::is_over) {
            self.in_flight.pop_front();
        }
    }

    fn account(&mut self, sent: Sent) {
        let Some(first) = self.in_flight.front().map(|first| first.number) else { return };
        let at = usize::try_from(sent.message.wrapping_sub(first)).unwrap_or(usize::MAX);
        let Some(entry) = self.in_flight.get_mut(at) else { return };
        if sent.done {
            entry.done = true;
            self.slots.set(entry.slot, RequestSlot::Done(Some(entry.bytes as usize)));
        }
        // The bytes of a message without exact accounting count as sent when it is done.
        let rest = entry.pushed - entry.left;
        let left = if sent.done && !entry.accounted { rest } else { rest.min(sent.left as u64) };
        if left > 0 {
            entry.left += left;
            self.around.arbiter.complete(&entry.flow, left);
        }
    }

    /// Marks the connection as broken. It sends nothing any more.
    /// Ends the connection's messages. A message that does not fit ends them, too: the next one
    /// would go into the buffer that was posted for it.
    fn fail(&mut self, fault: Fault) {
        self.give_up();
        self.fault = Some(fault);
    }

    /// Cancels all submitted flows.
    fn give_up(&mut self) {
        self.early.clear();
        let pending = self.pending.take().map(|pending| pending.flow);
        let rest = self.in_flight.drain(..).filter(|entry| !entry.is_over());
        for flow in rest.map(|entry| entry.flow).chain(pending) {
            self.around.arbiter.cancel(flow);
        }
    }

    pub(super) fn test(&mut self, index: u16) -> Result<TestOutcome> {
        if self.fault.is_none() {
            self.drive();
        }
        self.slots.outcome(index, self.fault.as_ref())
    }

    /// Reports whether the sweeper has to drive the connection, because the host may not. That is
    /// so for a message that is done and was not delivered yet. It is also so for a message that
    /// was kept, since the host may test its receive first.
    pub fn lingers(&self) -> bool {
        self.fault.is_none()
            && (!self.early.is_empty()
                || self.in_flight.iter().any(|entry| entry.done || entry.was_kept))
    }

    /// Drives the connection for the sweeper. Only memory of messages that the host may not have
    /// tested yet is read, and only while it is registered.
    pub fn sweep(&mut self) {
        if self.fault.is_some() {
            return;
        }
        let unattended = |entry: &InFlightMessage| entry.was_kept && !entry.done;
        if self.memory_stays && (!self.early.is_empty() || self.in_flight.iter().any(unattended)) {
            return self.drive();
        }
        let mut sent = core::mem::take(&mut self.sent);
        if let Some(sender) = &mut self.sender {
            sender.look(&mut sent);
        }
        self.settle(sent);
    }

    pub fn close(&mut self) {
        let early = self.fault.is_none()
            && self.early.is_empty()
            && self.in_flight.iter().all(|entry| entry.done);
        if let Some(sender) = self.sender.take() {
            sender.close(early);
        }
        for entry in &self.in_flight {
            // The network has delivered these bytes by now, or never will.
            if early && entry.left < entry.pushed {
                let rest = entry.pushed - entry.left;
                self.around.arbiter.complete(&entry.flow, rest);
            }
        }
        if early {
            self.in_flight.clear();
        }
        self.give_up();
    }
}
