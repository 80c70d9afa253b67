//! One peer of a rank's unit: a communicator each way, and the messages on them.

use std::collections::VecDeque;

use anyhow::bail;
use laxity_nccl_host::{
    Attempt, Connecting, Context, Handle, HostError, Listener, RecvComm, Region, Request, SendComm,
    Tested,
};

use super::{Bell, DEVICE, Progress, Report};
use crate::frame::{self, HEAD_BYTES, Head, PAYLOAD_BYTES_MAX};
use crate::ledger::{Reassembly, stage_name};

/// Payload of one message at most: a step of NCCL's buffers (4 MiB in 8 steps).
const MESSAGE_BYTES_MAX: u64 = 512 << 10;

/// A message with its frames' heads.
const WIRE_BYTES_MAX: usize = wire_bytes(MESSAGE_BYTES_MAX);

/// Messages under way on one communicator: NCCL's steps.
const UNDER_WAY_MAX: usize = 8;

/// Bytes of a message that has so much payload.
const fn wire_bytes(payload: u64) -> usize {
    payload as usize + payload.div_ceil(PAYLOAD_BYTES_MAX as u64) as usize * HEAD_BYTES
}

/// The payload of each message of a flow.
fn messages(total: u64) -> impl Iterator<Item = (u64, u64)> {
    let count = total.div_ceil(MESSAGE_BYTES_MAX);
    (0..count).map(move |index| {
        let offset = index * MESSAGE_BYTES_MAX;
        (offset, (total - offset).min(MESSAGE_BYTES_MAX))
    })
}

/// Fills `region` with the frames of a message and returns how long it is.
fn fill(region: &mut [u8], head: &Head, offset: u64, payload: u64) -> usize {
    let (mut at, mut offset, end) = (0, offset, offset + payload);
    while offset < end {
        let len = (end - offset).min(PAYLOAD_BYTES_MAX as u64);
        let cut = Head {
            offset,
            len: len as u32,
            ..*head
        };
        region[at..][..HEAD_BYTES].copy_from_slice(&cut.encode());
        at += HEAD_BYTES;
        let bytes = frame::payload(head.flow, offset, len as usize);
        region[at..][..bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
        offset += len;
    }
    at
}

/// A message that is to be sent.
struct Outbound {
    head: Head,
    offset: u64,
    payload: u64,
    /// Its memory, once the plugin has said "not now" to it.
    filled: Option<Region>,
}

/// A message that is to come.
struct Inbound {
    wire_bytes: usize,
    /// Its memory, once the plugin has said "not now" to it.
    ready: Option<Region>,
}

/// One peer of the unit.
pub(super) struct Peer {
    pub(super) host: usize,
    listener: Option<Listener>,
    connecting: Option<Connecting>,
    send: Option<SendComm>,
    receive: Option<RecvComm>,
    outbound: VecDeque<Outbound>,
    sending: VecDeque<Request>,
    inbound: VecDeque<Inbound>,
    receiving: VecDeque<(Request, usize)>,
    spare_out: Vec<Region>,
    spare_in: Vec<Region>,
    so_far: Reassembly,
}

impl Peer {
    /// Listens for one.
    pub(super) fn listen(context: &Context, host: usize) -> Result<(Self, Handle), HostError> {
        let (listener, handle) = context.listen(DEVICE)?;
        let peer = Self {
            host,
            listener: Some(listener),
            connecting: None,
            send: None,
            receive: None,
            outbound: VecDeque::new(),
            sending: VecDeque::new(),
            inbound: VecDeque::new(),
            receiving: VecDeque::new(),
            spare_out: Vec::new(),
            spare_in: Vec::new(),
            so_far: Reassembly::default(),
        };
        Ok((peer, handle))
    }

    /// Begins to connect to where the peer listens.
    pub(super) fn connect(&mut self, context: &Context, handle: Handle) {
        self.connecting = Some(context.connect(DEVICE, handle));
    }

    /// Whether there is a communicator each way.
    pub(super) fn is_connected(&self) -> bool {
        self.send.is_some() && self.receive.is_some()
    }

    /// Whether the plugin has to be asked again without an order.
    pub(super) fn is_busy(&self) -> bool {
        self.connecting.is_some()
            || self.listener.is_some()
            || !(self.outbound.is_empty()
                && self.sending.is_empty()
                && self.inbound.is_empty()
                && self.receiving.is_empty())
    }

    /// Sends a flow, and receives one of the same size.
    pub(super) fn exchange(&mut self, head: Head) {
        for (offset, payload) in messages(head.total) {
            self.outbound.push_back(Outbound {
                head,
                offset,
                payload,
                filled: None,
            });
            self.inbound.push_back(Inbound {
                wire_bytes: wire_bytes(payload),
                ready: None,
            });
        }
    }

    /// Goes on with whatever is under way.
    pub(super) fn turn(&mut self, progress: &mut Progress, bell: &Bell) -> anyhow::Result<()> {
        if let Some(connecting) = &mut self.connecting
            && let Some(send) = connecting.poll()?
        {
            self.send = Some(send);
            self.connecting = None;
        }
        if let Some(listener) = &mut self.listener
            && let Some(receive) = listener.accept()?
        {
            self.receive = Some(receive);
            self.listener = None;
        }
        // Receives first: a peer may wait for them.
        self.receive(progress, bell)?;
        self.send(progress)
    }

    fn send(&mut self, progress: &mut Progress) -> anyhow::Result<()> {
        let Some(comm) = &self.send else {
            return Ok(());
        };
        while self.sending.len() < UNDER_WAY_MAX
            && let Some(mut message) = self.outbound.pop_front()
        {
            let wire = wire_bytes(message.payload);
            let region = match message.filled.take() {
                Some(filled) => filled,
                None => {
                    let mut region = spare(&mut self.spare_out, |bytes| comm.register(bytes))?;
                    fill(&mut region, &message.head, message.offset, message.payload);
                    region
                }
            };
            match comm.send(region, wire, 0)? {
                Attempt::Started(request) => {
                    self.sending.push_back(request);
                    progress.record.messages += 1;
                    let stage = stage_name(message.head.kind).to_owned();
                    *progress.carried.entry(stage).or_default() += message.payload;
                }
                Attempt::NotNow(region) => {
                    progress.record.refusals += 1;
                    message.filled = Some(region);
                    self.outbound.push_front(message);
                    break;
                }
            }
        }
        while let Some(request) = self.sending.pop_front() {
            match request.test()? {
                Tested::Done(region, _) => self.spare_out.push(region),
                Tested::Pending(request) => {
                    self.sending.push_front(request);
                    break;
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, progress: &mut Progress, bell: &Bell) -> anyhow::Result<()> {
        let Some(comm) = &self.receive else {
            return Ok(());
        };
        while self.receiving.len() < UNDER_WAY_MAX
            && let Some(mut message) = self.inbound.pop_front()
        {
            let region = match message.ready.take() {
                Some(region) => region,
                None => spare(&mut self.spare_in, |bytes| comm.register(bytes))?,
            };
            match comm.receive(region, message.wire_bytes, 0)? {
                Attempt::Started(request) => {
                    self.receiving.push_back((request, message.wire_bytes));
                }
                Attempt::NotNow(region) => {
                    message.ready = Some(region);
                    self.inbound.push_front(message);
                    break;
                }
            }
        }
        let mut arrivals = Vec::new();
        while let Some((request, expected)) = self.receiving.pop_front() {
            match request.test()? {
                Tested::Done(region, bytes) if bytes == expected => {
                    let (so_far, ledger) = (&mut self.so_far, &mut progress.ledger);
                    so_far.take(&region[..bytes], ledger, &mut arrivals)?;
                    self.spare_in.push(region);
                }
                Tested::Done(_, bytes) => {
                    bail!("a message had {bytes} bytes where {expected} were expected")
                }
                Tested::Pending(request) => {
                    self.receiving.push_front((request, expected));
                    break;
                }
            }
        }
        for arrival in arrivals {
            bell.ring(Report::Arrived(arrival));
        }
        Ok(())
    }
}

/// Registered memory for one message: some that is spare, else new.
fn spare(
    spare: &mut Vec<Region>,
    register: impl FnOnce(Vec<u8>) -> Result<Region, HostError>,
) -> Result<Region, HostError> {
    match spare.pop() {
        Some(region) => Ok(region),
        None => register(vec![0; WIRE_BYTES_MAX]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Kind;
    use crate::ledger::DeliveryCheck;
    use proptest::prelude::*;

    fn head(total: u64) -> Head {
        Head {
            flow: Head::name(3, 9),
            offset: 0,
            total,
            len: 0,
            kind: Kind::Dispatch,
            layer: 2,
            batch: 1_000_001,
            request: 0,
            from: 3,
        }
    }

    proptest! {
        #[test]
        fn a_flow_cut_into_messages_arrives_whole_and_in_order(total in 1..3_000_000_u64) {
            let (mut so_far, mut ledger) = (Reassembly::default(), DeliveryCheck::default());
            let mut arrivals = Vec::new();
            let mut region = vec![0; WIRE_BYTES_MAX];
            for (offset, payload) in messages(total) {
                let filled = fill(&mut region, &head(total), offset, payload);
                prop_assert_eq!(filled, wire_bytes(payload));
                so_far.take(&region[..filled], &mut ledger, &mut arrivals).unwrap();
            }
            prop_assert!(arrivals.last().unwrap().complete);
            prop_assert_eq!(arrivals.iter().filter(|arrival| arrival.complete).count(), 1);
            let traffic = ledger.traffic();
            prop_assert_eq!(traffic.received["collective"], total);
            prop_assert_eq!((traffic.corrupted, traffic.missing, traffic.duplicated), (0, 0, 0));
        }
    }
}
