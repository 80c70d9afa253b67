//! What a record does: from shared memory into the links, and permits back.
//!
//! Every field of a record is untrusted. What decodes and names things that do not exist (a NIC, a
//! flow) is counted and otherwise resolved so that an honest client with a wrong configuration
//! goes on unscheduled; what does not decode ends the client ([`crate::driver`]).

use laxity_policy::{
    Action, BatchId, Event, FlowId, FlowSpec, Layer, Level, RequestId, Stage, Time,
};
use laxity_shm::consumer::{Consumer, Incoming, Wake};
use laxity_shm::producer::SlotRef;
use laxity_shm::record::{self, Record};

use crate::clients::{Book, Client};
use crate::driver::hints::Hints;
use crate::driver::ports::Port;
use crate::flows::{Flow, FlowTable};
use crate::stats::LoopCounters;

/// Everything that records change, apart from the clients' memory.
#[derive(Debug)]
pub struct Intake {
    /// The clock as last read.
    pub now: Time,
    /// Ports by `nic · 2 + direction`.
    pub ports: Vec<Port>,
    /// Living flows.
    pub flows: FlowTable,
    /// Batches, requests, admission.
    pub hints: Hints,
    /// Counters of the loop.
    pub counters: LoopCounters,
    /// Sleeping clients that a permit awaits, as (client, lane): woken after the round, because a
    /// wake-up costs more than all else in it.
    pub wakes: Vec<(u32, u16)>,
    /// Credit may be granted: the mode is `enforce` and nothing is bypassed.
    pub credit: bool,
    /// Everything is bypassed by an operator's order.
    pub bypass: bool,
    /// Level of flows sent on credit, as the clients were told.
    pub credit_level: Level,
}

impl Intake {
    /// Takes one record of `lane` of the client with index `client`.
    #[inline]
    pub fn take(
        &mut self,
        client: u32,
        book: &mut Book,
        lane: u16,
        consumer: &mut Consumer,
        incoming: Incoming,
    ) {
        match incoming.record {
            Record::Submit(ref flow) => {
                self.submit(client, book, lane, consumer, incoming.at, flow);
            }
            Record::SubmitOnCredit { ref flow, observed } => {
                self.submit_on_credit(client, book, lane, consumer, incoming.at, flow, observed);
            }
            Record::Completed { tag, bytes } => self.completed(book, lane, tag, bytes),
            Record::Cancelled { tag, granted } => self.cancelled(book, lane, tag, granted),
            Record::LaneReset => self.lane_gone(book, lane),
            ref hint => self.hints.take(self.now, hint, &mut self.ports),
        }
    }

    fn spec(&mut self, flow: &record::Flow) -> Option<(u16, FlowSpec)> {
        let port = u16::from(flow.nic) * 2 + flow.direction as u16;
        if usize::from(port) >= self.ports.len() {
            return None;
        }
        let spec = FlowSpec {
            flow: self.flows.next_id(),
            stage: stage(flow.stage),
            batch: BatchId(flow.batch),
            request: RequestId(flow.request),
            layer: Layer(flow.layer),
            bytes: flow.bytes,
            deadline: self
                .hints
                .deadline(self.now, flow.deadline_ns, flow.request),
            receiver_bound: flow.receiver_bound,
        };
        Some((port, spec))
    }

    /// The hot path: decide, publish the permit, and only then keep the books.
    #[inline]
    fn submit(
        &mut self,
        client: u32,
        book: &mut Book,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: &record::Flow,
    ) {
        let room = book.flows < book.flows_max;
        let Some((index, spec)) = self.spec(flow).filter(|_| room) else {
            self.pass(client, book, lane, consumer, at, flow, room);
            return;
        };
        let now = self.now;
        let port = &mut self.ports[usize::from(index)];
        let mut level = 0;
        let mut permitted = 0;
        if let Some(permit) = port.link.peek_permit(now, &spec) {
            level = permit.level.0;
            permitted = permit.bytes;
            match consumer.permit(at, permitted, level, permit.last) {
                Ok(Wake::Needed) => self.wakes.push((client, lane)),
                // A submit was consumed just now, so its slot waits: it cannot be stale.
                Ok(Wake::NotNeeded) | Err(_) => {}
            }
            port.link.commit_permit(now, &spec, permit);
            port.dirty = true;
            let counted = &mut port.counters.stages[spec.stage.index()];
            let row = permit.level.row();
            counted.permits[row] += 1;
            counted.permitted_bytes[row] += permitted;
            counted.wait.record(laxity_policy::Span::ZERO);
            book.counters.permitted_bytes += permitted;
            self.counters.permits += 1;
            self.counters.permits_at_once += 1;
        } else {
            port.link.handle(now, Event::FlowArrived(spec));
            port.dirty = true;
        }
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        if self.credit && spec.stage == Stage::Collective {
            feed(port, now, client, book, lane, index, consumer);
        }
        self.keep(client, book, lane, at, index, &spec, level, permitted);
    }

    /// Remembers a flow that was submitted.
    #[inline]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of one flow, used once"
    )]
    fn keep(
        &mut self,
        client: u32,
        book: &mut Book,
        lane: u16,
        at: SlotRef,
        port: u16,
        spec: &FlowSpec,
        level: u8,
        permitted: u64,
    ) {
        book.counters.flows += 1;
        book.counters.submitted_bytes += spec.bytes;
        if spec.bytes == 0 && level != 0 {
            // Nothing of it will ever complete. It is over.
            self.ports[usize::from(port)].counters.stages[spec.stage.index()].completed_flows += 1;
            return;
        }
        let id = self.flows.insert(Flow {
            client,
            lane,
            slot: at.slot,
            port,
            stage: spec.stage,
            gated: true,
            level,
            seq: at.tag,
            request: spec.request,
            bytes: spec.bytes,
            permitted,
            completed: 0,
            submitted: self.now,
            deadline: spec.deadline,
            touched: self.now,
        });
        debug_assert_eq!(id, spec.flow);
        book.flows += 1;
        book.lane(lane).tags.insert(at.tag, id);
    }

    /// Lets a flow out unscheduled that cannot be scheduled: its client has too many, or it names
    /// a NIC that is not configured here.
    #[cold]
    #[expect(clippy::too_many_arguments, reason = "as for the submit it replaces")]
    fn pass(
        &mut self,
        client: u32,
        book: &mut Book,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: &record::Flow,
        room: bool,
    ) {
        book.counters.flows += 1;
        book.counters.submitted_bytes += flow.bytes;
        book.counters.bypassed_bytes += flow.bytes;
        if room {
            book.counters.garbage_records += 1;
        } else {
            book.counters.overflowed_flows += 1;
        }
        if consumer.permit(at, flow.bytes, Level::SCAVENGER.0, true) == Ok(Wake::Needed) {
            self.wakes.push((client, lane));
        }
    }

    #[inline]
    #[expect(
        clippy::too_many_arguments,
        reason = "as for a submit, and how it was granted"
    )]
    fn submit_on_credit(
        &mut self,
        client: u32,
        book: &mut Book,
        lane: u16,
        consumer: &mut Consumer,
        at: SlotRef,
        flow: &record::Flow,
        observed: bool,
    ) {
        let room = book.flows < book.flows_max;
        let Some((index, spec)) = self.spec(flow).filter(|_| room) else {
            book.counters.flows += 1;
            book.counters.submitted_bytes += flow.bytes;
            book.counters.bypassed_bytes += flow.bytes;
            book.counters.overflowed_flows += u64::from(!room);
            book.counters.garbage_records += u64::from(room);
            return;
        };
        let port = &mut self.ports[usize::from(index)];
        port.link.handle(self.now, Event::FlowOnCredit(spec));
        port.dirty = true;
        let level = if observed {
            Level::SCAVENGER
        } else {
            self.credit_level
        };
        let counted = &mut port.counters.stages[spec.stage.index()];
        counted.submitted_flows += 1;
        counted.submitted_bytes += spec.bytes;
        counted.credited_flows += 1;
        counted.credited_bytes += spec.bytes;
        if !observed {
            port.credit_back(spec.bytes);
            if self.credit {
                feed(port, self.now, client, book, lane, index, consumer);
            }
            // What a client does by itself in `observe` mode is not a permit of ours.
            let counted = &mut port.counters.stages[spec.stage.index()];
            counted.permits[level.row()] += 1;
            counted.permitted_bytes[level.row()] += spec.bytes;
            book.counters.permitted_bytes += spec.bytes;
        }
        self.keep(client, book, lane, at, index, &spec, level.0, spec.bytes);
    }

    fn completed(&mut self, book: &mut Book, lane: u16, tag: u64, bytes: u64) {
        let Some(id) = book.lane(lane).tags.get(tag) else {
            return;
        };
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        // More than was permitted cannot have been sent; the excess is the client's mistake.
        let bytes = bytes.min(flow.outstanding());
        let (request, port) = (flow.request, flow.port);
        book.counters.completed_bytes += bytes;
        self.hints.completed(self.now, request, port, bytes);
        let (stage, deadline) = (flow.stage, flow.deadline);
        let done = self.off_the_port(book, id, bytes);
        let counted = &mut self.ports[usize::from(port)].counters.stages[stage.index()];
        counted.completed_bytes += bytes;
        if done {
            counted.completed_flows += 1;
            counted.deadline_misses += u64::from(self.now > deadline);
        }
    }

    /// `bytes` of a flow no longer occupy its port. Whether the flow is over with that.
    fn off_the_port(&mut self, book: &mut Book, id: FlowId, bytes: u64) -> bool {
        let Some(flow) = self.flows.get_mut(id) else {
            return false;
        };
        flow.completed += bytes;
        flow.touched = self.now;
        let done = flow.completed >= flow.bytes;
        let port = &mut self.ports[usize::from(flow.port)];
        port.link
            .handle(self.now, Event::BytesCompleted { flow: id, bytes });
        port.dirty = true;
        if done {
            self.forget(book, id);
        }
        done
    }

    fn cancelled(&mut self, book: &mut Book, lane: u16, tag: u64, granted: u64) {
        let Some(id) = book.lane(lane).tags.get(tag) else {
            return;
        };
        // A client that withdraws while everything is bypassed sends the rest unscheduled;
        // otherwise it will not send it at all.
        if self.bypass
            && let Some(flow) = self.flows.get_mut(id)
        {
            book.counters.bypassed_bytes += flow.bytes.saturating_sub(granted);
        }
        self.cancel(book, id);
    }

    /// Ends a flow that will not complete.
    pub fn cancel(&mut self, book: &mut Book, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let port = &mut self.ports[usize::from(flow.port)];
        port.link
            .handle(self.now, Event::FlowCancelled { flow: id });
        port.dirty = true;
        book.counters.cancelled_flows += 1;
        self.forget(book, id);
    }

    fn forget(&mut self, book: &mut Book, id: FlowId) {
        if let Some(flow) = self.flows.remove(id) {
            book.flows -= 1;
            book.lane(flow.lane).tags.remove(flow.seq);
        }
    }

    /// The owner of a lane is gone: all its flows end. The credit that the lane holds stays with
    /// it, for its next owner.
    pub fn lane_gone(&mut self, book: &mut Book, lane: u16) {
        for id in book.lane(lane).tags.drain() {
            self.cancel(book, id);
        }
    }

    /// A client is gone: all its flows end, and the credit it holds comes back to the ports.
    pub fn client_gone(&mut self, client: &mut Client) {
        for lane in client.book.lanes() {
            self.lane_gone(&mut client.book, lane);
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
    pub fn serve(&mut self, clients: &mut [Option<Client>]) {
        for index in 0..self.ports.len() {
            if !self.ports[index].dirty {
                continue;
            }
            self.ports[index].dirty = false;
            while let Some(action) = self.ports[index].link.poll_action(self.now) {
                match action {
                    Action::Permit {
                        flow,
                        bytes,
                        level,
                        last,
                    } => {
                        self.permit(clients, flow, bytes, level, last);
                    }
                    // The link's own counters have it.
                    Action::Moved { .. } => {}
                }
            }
            let port = &mut self.ports[index];
            port.due = port.link.next_deadline().unwrap_or(Time::NEVER);
            if !port.hungry.is_empty() && self.credit {
                self.feed_hungry(clients, index);
            }
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
        let Some(flow) = self.flows.get_mut(id) else {
            return;
        };
        let first = flow.level == 0;
        if first {
            flow.level = level.0;
        }
        flow.permitted = flow.permitted.saturating_add(bytes).min(flow.bytes);
        flow.touched = self.now;
        let flow = *flow;
        let Some(client) = clients
            .get_mut(flow.client as usize)
            .and_then(Option::as_mut)
        else {
            return;
        };
        let at = SlotRef {
            slot: flow.slot,
            tag: flow.seq,
        };
        let Some(consumer) = client.served.consumer(flow.lane) else {
            return;
        };
        match consumer.permit(at, flow.permitted, flow.level, last) {
            Ok(Wake::Needed) => self.wakes.push((flow.client, flow.lane)),
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
            counted.wait.record(self.now.since(flow.submitted));
        }
        client.book.counters.permitted_bytes += bytes;
        self.counters.permits += 1;
        if flow.bytes == 0 {
            counted.completed_flows += 1;
            self.forget(&mut client.book, id);
        }
    }

    fn feed_hungry(&mut self, clients: &mut [Option<Client>], index: usize) {
        for (client, lane) in core::mem::take(&mut self.ports[index].hungry) {
            let Some(state) = clients.get_mut(client as usize).and_then(Option::as_mut) else {
                continue;
            };
            state.book.lane(lane).hungry[index] = false;
            let Some(consumer) = state.served.consumer(lane) else {
                continue;
            };
            let port = &mut self.ports[index];
            feed(
                port,
                self.now,
                client,
                &mut state.book,
                lane,
                index as u16,
                consumer,
            );
        }
    }

    /// Gives up on bytes that were permitted before `since` and never completed: a client that
    /// lost track of a flow, or means harm, must not shrink the window for all others.
    /// Looks at `count` entries from `from`; returns where to go on.
    pub fn write_off(
        &mut self,
        clients: &mut [Option<Client>],
        since: Time,
        from: usize,
        count: usize,
    ) -> usize {
        let entries = self.flows.entries();
        let from = if from >= entries { 0 } else { from };
        let to = (from + count).min(entries);
        for entry in from..to {
            let Some((id, flow)) = self.flows.at(entry) else {
                continue;
            };
            let bytes = flow.outstanding();
            if bytes == 0 || flow.touched >= since {
                continue;
            }
            let Some(client) = clients
                .get_mut(flow.client as usize)
                .and_then(Option::as_mut)
            else {
                continue;
            };
            client.book.counters.written_off_bytes += bytes;
            self.off_the_port(&mut client.book, id, bytes);
        }
        to
    }
}

/// Feeds a lane with credit of port `index`, or notes that it is hungry.
#[inline]
fn feed(
    port: &mut Port,
    now: Time,
    client: u32,
    book: &mut Book,
    lane: u16,
    index: u16,
    consumer: &mut Consumer,
) {
    let index = usize::from(index);
    if !port.feed(now, index, consumer) {
        let hungry = &mut book.lane(lane).hungry[index];
        if !*hungry {
            *hungry = true;
            port.hungry.push((client, lane));
        }
    }
}

const fn stage(stage: record::Stage) -> Stage {
    match stage {
        record::Stage::KvReuse => Stage::KvReuse,
        record::Stage::Collective => Stage::Collective,
        record::Stage::P2d => Stage::P2d,
        record::Stage::Weights => Stage::Weights,
        record::Stage::Background => Stage::Background,
    }
}
